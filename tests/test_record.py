"""demos/: the committed demonstrations, record.py, which makes more, and film.py."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium import spaces
from run_folder import command
from tools import close

SCRIPT = "ppod"
CARTPOLE, TWO = spaces.Box(-np.inf, np.inf, (4,)), spaces.Discrete(2)


def test_the_committed_demos(script):
    """MountainCar pays 1 at the goal and nothing before. DoorKey's demo was recorded on the layout of seed 1: played
    there again, it shows the same and earns the same."""
    args = script.tuned(env_id="MountainCar-v0", num_envs=1)
    (demo,) = script.make_demo_buffer(args, script.make_envs(args, 1)).reward_demos
    assert demo.human and demo.terminated and demo.total == 1 and (demo.rewards[:-1] == 0).all()
    args = script.tuned(num_envs=1)
    envs = script.make_envs(args, 1)
    (demo,) = script.make_demo_buffer(args, envs).reward_demos
    close(demo.total, 1 - 0.9 * 47 / 2560)
    (obs, _), total = envs.reset(seed=1), 0
    for t, action in enumerate(demo.actions[:, 0]):
        assert (obs[0] == demo.obs[t]).all()
        obs, rewards, *_ = envs.step(np.array([action]))
        total += rewards[0]
    close(total, demo.total)


def record(script, monkeypatch, flags, program="record"):
    """What `python demos/record.py flags` does with this script, or another program there; the exit code."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.syspath_prepend(Path(script.__file__).parent / "demos")
    monkeypatch.setattr(importlib.import_module("record"), "load_script", lambda path: script)
    return command(SimpleNamespace(__name__=program, main=importlib.import_module(program).main), flags)


PICTURES = (
    "--env-id MiniGrid-DoorKey-5x5-v0 --wrappers minigrid.wrappers.RGBImgPartialObsWrapper(tile_size=8) "
    "minigrid.wrappers.ImgObsWrapper"
)
SOLVERS = [
    ("solve_doorkey", "", "MiniGrid-DoorKey-16x16-v0/solver"),
    ("solve_doorkey", PICTURES, "MiniGrid-DoorKey-5x5-v0-pictures/solver"),
    ("solve_mountaincar", "# --seed 2 is in a comment", "MountainCar-v0/script"),
]


@pytest.mark.parametrize("program, flags, file", SOLVERS, ids=[file for *_, file in SOLVERS])
def test_solvers(script, tmp_path, monkeypatch, program, flags, file):
    """The programs make the committed demos again, outside demos/; a second one gets a name of its own."""
    monkeypatch.chdir(tmp_path)
    folder = Path("my_demos", file.split("/")[0].removesuffix("-pictures"))
    for _ in range(2):
        assert record(script, monkeypatch, flags, program) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["0.npz", "1.npz"]
    with np.load(folder / "0.npz") as made, np.load(Path(script.__file__).parent / f"demos/{file}.npz") as committed:
        assert {*made} == {*committed} and all((made[name] == committed[name]).all() for name in made)


def test_record_by_keyboard(script, tmp_path, monkeypatch, capsys):
    """A person plays three episodes of CartPole, cut off after 20 steps: the two that last as long are saved. The keys
    are shown."""
    import gymnasium.utils.play

    def play(env, keys_to_action, noop, wait_on_player):
        assert keys_to_action == {"0": 0, "1": 1} and wait_on_player and env.render_mode == "rgb_array"
        for actions in ([0, 1] * 10, [0] * 20, [0, 1] * 10):
            env.reset()
            for action in actions:
                *_, terminated, truncated, _ = env.step(action)
                if terminated:
                    break
            assert (terminated or truncated) and env.render().shape == (400, 600, 3)

    pytest.importorskip("pygame")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gymnasium.utils.play, "play", play)
    flags = "--env-id CartPole-v1 --max-episode-steps 20 --initial-reward-threshold 20 --target-agent-demos-dir mine"
    assert record(script, monkeypatch, flags) == 0
    out = capsys.readouterr().out
    assert "action 0" in out and "escape" in out and out.count("->") == 2 and len(list(Path("mine").iterdir())) == 2
    demo = script.read_demo(Path("mine/1.npz"), script.Args(env_id="CartPole-v1"), CARTPOLE, TWO)
    assert demo.total == 20 and demo.actions[:, 0].tolist() == [0, 1] * 10
    assert record(script, monkeypatch, "--env-id Pendulum-v1") == 2 and "Discrete" in capsys.readouterr().err


def test_record_from_a_run(script, tmp_path, monkeypatch, capsys):
    """Episodes of a saved agent, cut off after 5 steps: two are saved if 5 will do, none if they have to return 6."""
    monkeypatch.chdir(tmp_path)
    small = {"num_envs": 2, "num_steps": 8, "num_minibatches": 1, "gru_size": 4, "chunk_length": 8}
    small |= {"total_timesteps": 16, "eval_episodes": 1, "run_dir": "run", "progress": False, "recurrent": True}
    script.train(script.tuned(env_id="CartPole-v1", **small))
    limit = "--from-run run --max-episode-steps 5 --num-agent-demos-to-save 2 --initial-reward-threshold"
    assert record(script, monkeypatch, f"{limit} 5 --target-agent-demos-dir recorded") == 0
    assert "episodes were good" not in capsys.readouterr().out
    assert record(script, monkeypatch, f"{limit} 6 --target-agent-demos-dir none") == 0 and not Path("none").exists()
    assert "only 0 of 100 episodes were good" in capsys.readouterr().out
    agent = script.load("run")
    (demo, _) = [script.read_demo(path, agent.args, CARTPOLE, TWO) for path in sorted(Path("recorded").iterdir())]
    agent.begin_episodes(1)
    assert [int(agent.act(obs[None])[0]) for obs in demo.obs[:-1]] == demo.actions[:, 0].tolist()
    assert demo.total == 5 and not demo.terminated


def test_record_from_minari(script, tmp_path, monkeypatch, capsys):
    """Two episodes of three steps become demos, beside the one that is there. Of a dataset in which one does not fit,
    nothing is written. The folder's name has no colon, which Windows does not allow."""
    observations = np.arange(16, dtype=np.float32).reshape(4, 4)
    sound = dict(observations=observations, actions=np.array([0, 1, 1]), rewards=[0, 0, 0], terminations=[False] * 3)
    datasets = {
        "good": [sound, sound],
        "short": [sound, sound | {"observations": observations[:3]}],
        "other": [sound, sound | {"actions": np.array([0, 1, 2])}],
    }
    episodes = lambda name: [SimpleNamespace(id=i, **fields) for i, fields in enumerate(datasets[name])]
    load_dataset = lambda name: SimpleNamespace(iterate_episodes=lambda: episodes(name))
    monkeypatch.setitem(sys.modules, "minari", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.chdir(tmp_path)
    folder = Path("my_demos/gymnasium-CartPole-v1")
    folder.mkdir(parents=True)
    (folder / "0.npz").write_text("mine")
    flags = "--env-id gymnasium:CartPole-v1 --from-minari"
    for name, reason in {"short": "observations (3, 4)", "other": "an action is not in Discrete(2)"}.items():
        assert record(script, monkeypatch, f"{flags} {name}") == 2
        assert f"{name}, episode 1 does not fit gymnasium:CartPole-v1: {reason}" in capsys.readouterr().err
        assert len(list(folder.iterdir())) == 1
    assert record(script, monkeypatch, f"{flags} good # not --from-minari short") == 0
    assert sorted(path.name for path in folder.iterdir()) == ["0.npz", "1.npz", "2.npz"]
    assert (folder / "0.npz").read_text() == "mine" and "2 demos -> " in capsys.readouterr().out
    demo = script.read_demo(folder / "2.npz", script.Args(env_id="gymnasium:CartPole-v1"), CARTPOLE, TWO)
    assert (demo.obs == observations).all() and demo.actions[:, 0].tolist() == [0, 1, 1] and not demo.terminated


def test_record_with_another_script(script, tmp_path, monkeypatch, capsys):
    """What is no file, no Python or no copy of ppod.py is one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(script.__file__).parent / "demos")
    main = importlib.import_module("record").main
    Path("no_demos.py").write_text("x = 1")
    Path("text.md").write_text("x = 1")
    for path in ("nowhere.py", "text.md", "no_demos.py"):
        assert command(SimpleNamespace(__name__="record", main=main), f"--script {path} --from-run run") == 2
        assert capsys.readouterr().err == f"record.py: --script {path} is not ppod.py, nor a changed copy of it\n"


def test_film(script, tmp_path, monkeypatch, capsys):
    """The film of a run with arguments of its own: the script's line says which, and they are handed over. A folder
    without a run, and two of one name, are refused before anything is filmed."""
    pytest.importorskip("pygame")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(script.__file__).parent / "demos")
    commands = []

    def run(words):  # in this process
        commands.append(words)
        return SimpleNamespace(returncode=command(script, " ".join(words[2:])))

    monkeypatch.setattr(importlib.import_module("film"), "subprocess", SimpleNamespace(run=run))
    kwargs = '{"sutton_barto_reward":true}'
    small = {"num_envs": 2, "num_steps": 8, "num_minibatches": 1, "total_timesteps": 16, "max_episode_steps": 5}
    small |= {"eval_episodes": 1, "run_dir": "runs/A", "progress": False}
    script.train(script.tuned(env_id="CartPole-v1", env_kwargs=kwargs, **small))
    refused = {"runs/A runs/none": "runs/none holds no run", "runs/A runs/A/": "two folders have the name A"}
    for flags, words in refused.items():
        assert record(script, monkeypatch, flags, "film") == 2 and not commands
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1
    assert record(script, monkeypatch, "runs/A # a comment", "film") == 2 and not Path("films").exists()
    flags = capsys.readouterr().err.strip().split("add ")[1].replace("'", "")
    assert record(script, monkeypatch, f"runs/A --folder films --height 40 {flags}", "film") == 0
    assert commands[-1][1] == script.__file__ and Path("films/A.gif").stat().st_size > 0


def test_tables(monkeypatch):
    """tables.py copies the table of one run several times; each copy knows at least the states of the one before."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "demos")
    tables = importlib.import_module("tables")
    monkeypatch.setattr(tables, "EPISODES", (1, 2, 20))
    known = [(q != 0).any(1) for q in tables.tables_of("CliffWalking-v1")]
    assert len(known) == 3 and 0 < known[0].sum() < known[2].sum()
    assert all((before <= after).all() for before, after in zip(known, known[1:]))
