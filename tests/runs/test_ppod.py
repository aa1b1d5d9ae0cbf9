"""Whole runs of ppod.py: files of demonstrations, the folders they come from and go to, and demos/record.py.

The rest is in test_runs.py.
"""

import dataclasses
import importlib
import json
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import demo_worlds
import numpy as np
import pytest
import torch
from demo_worlds import LINE, TWO, Chain, chain_demo, make_demo, store, write_demo
from gymnasium import spaces
from kills import run_difference, shell

import ppod as script

ROOT = Path(script.__file__).parent
CHAIN = "demo_worlds:Chain-v0"
SMALL = "--no-progress --num-envs 4 --num-steps 32 --num-minibatches 2 --gru-size 8 --chunk-length 8 --hidden-sizes 8 "
SMALL += "--update-epochs 1 --eval-episodes 2"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    """Every test works in an empty folder, on one thread, without a window or a curve."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(script.Run, "draw_curve", lambda run: None)


@pytest.fixture
def record(monkeypatch):
    """demos/record.py as a module; it takes ppod.py as the tests have imported it."""
    monkeypatch.syspath_prepend(ROOT / "demos")
    module = importlib.import_module("record")
    monkeypatch.setattr(module, "load_script", lambda path: script)
    return module


def train(*flags):
    """A short run; the summary."""
    return script.train(script.tuned(*SMALL.split(), *" ".join(flags).split()))


def refusal(main, *flags, capsys, command="ppod.py"):
    """What these flags make a command say on stderr: one line, exit code 2."""
    with mock.patch.object(sys, "argv", [command, *" ".join(flags).split()]), pytest.raises(SystemExit) as stop:
        main()
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and "Traceback" not in err, err
    return err


def checkpoint(run):
    return script.read_state(Path(run, "checkpoint.pt"))


def demos_of(**settings):
    """A PPODBuffer for the Chain, with the demos in its folders."""
    args = script.Args(**{"env_id": CHAIN, "num_envs": 1} | settings)
    envs = types.SimpleNamespace(single_observation_space=Chain.observation_space, single_action_space=TWO)
    return script.make_demo_buffer(args, envs)


def write_chain(path, **changes):
    """Save the Chain's demo; `changes` replace or (None) remove fields of the file."""
    write_demo(script, Path(path), chain_demo(script), Chain(), env_id=CHAIN)
    if changes:
        with np.load(path) as file:
            fields = {name: value for name, value in (dict(file) | changes).items() if value is not None}
        np.savez(path, **fields)


# ---------------------------------------------------------------------------------------------------------- demo files

SPACES = {
    "Discrete from -1": spaces.Discrete(4, start=-1),
    "Box": spaces.Box(np.array([-0.5, 0.0]), np.array([1.0, 0.25]), dtype=np.float64),
    "integers": spaces.Box(-3, 9, (2,), np.int64),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "MultiBinary": spaces.MultiBinary(2),
}


@pytest.mark.parametrize("name", SPACES)
def test_a_demo_comes_back_from_its_file(name):
    """Fails if saving and loading loses or changes anything: actions of every kind, the cut, the whole return."""
    space, view, path = SPACES[name], spaces.Box(0, 255, (2, 2, 3), np.uint8), Path("sub/demo.npz")
    space.seed(1)
    given = np.array([space.sample() for _ in range(5)])
    obs = np.random.default_rng(1).integers(0, 4, (6, 2, 2, 3)).astype(np.uint8)
    rewards = np.array([0, 1, 2, -5, 0], np.float32)
    demo = script.as_demo(obs, script.from_env(given, space), rewards, True)
    args = script.Args(env_id="Nothing-v0", env_kwargs='{"size": 3, "a": 1}', wrappers=("some.Wrapper",))
    script.save_demo(path, demo, args, view, space)
    same = dataclasses.replace(args, env_kwargs='{"a":1, "size":3}')
    loaded = script.read_demo(path, same, view, space)
    for field in ("obs", "actions", "rewards"):
        np.testing.assert_array_equal(getattr(loaded, field), getattr(demo, field), field)
    assert (loaded.terminated, loaded.total, loaded.human) == (False, -2, False)
    with np.load(path, allow_pickle=False) as file:
        assert file["observation"].shape == (3, 2, 2, 3) and file["final_observation"].tolist() == obs[3].tolist()
        assert file["truncated"] and not file["terminated"] and json.loads(str(file["env_id"])) == "Nothing-v0"
        assert file["action"].dtype == space.dtype and all(action in space for action in file["action"])
        np.testing.assert_allclose(file["action"], given[:3], rtol=1e-6)
    assert [path.name for path in Path("sub").iterdir()] == ["demo.npz"]


def test_fields_that_may_be_missing():
    """A file without the return of the episode: it is the sum of the rewards."""
    write_chain("demo.npz", episode_return=None)
    assert script.read_demo(Path("demo.npz"), script.Args(env_id=CHAIN), Chain.observation_space, TWO).total == 1


L = Chain.LENGTH
BAD = {
    "another environment": ({"env_id": json.dumps("CartPole-v1")}, "CartPole-v1"),
    "other kwargs": ({"env_kwargs": json.dumps({"length": 3})}, "env_kwargs"),
    "other wrappers": ({"wrappers": json.dumps(["some.Wrapper"])}, "wrappers"),
    "another shape": ({"observation": np.zeros((L, 7)), "final_observation": np.zeros(7)}, f"({L + 1}, 7)"),
    "too few actions": ({"action": np.zeros(L - 1, int)}, f"({L - 1},)"),
    "actions that are none": ({"action": np.full(L, 2)}, "action"),
    "broken actions": ({"action": np.full(L, 0.5)}, "whole numbers"),
    "NaN": ({"reward": np.full(L, np.nan)}, "NaN"),
    "an infinite observation": ({"final_observation": np.full(L + 1, np.inf)}, "infinite"),
    "a return that is none": ({"episode_return": np.nan}, "NaN"),
    "no rewards": ({"reward": None}, "reward"),
    "no steps": (
        {"reward": np.zeros(0), "action": np.zeros(0, int), "observation": np.zeros((0, L + 1))},
        "do not fit",
    ),
    "objects": ({"reward": np.array([None] * L, object)}, "allow_pickle"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_demo_files(name, capsys):
    """At the start a bad file ends the run with a line that names it, before anything is written; a supplementary one
    is skipped with a line."""
    changes, word = BAD[name]
    write_chain("demos/demo.npz", **changes)
    with pytest.raises(script.UserError, match="demo.npz") as error:
        train("--env-id", CHAIN, "--initial-agent-demos-dir demos --run-dir run")
    assert word in str(error.value) and "\n" not in str(error.value) and not Path("run").exists()
    demos = demos_of(supplementary_demos_dir="demos")
    demos.load_supplementary_demos()
    err = capsys.readouterr().err
    assert not demos.reward_demos and err.count("\n") == 1 and "demo.npz" in err and word in err


class Bomb:
    """Unpickling this creates a file named `executed`."""

    def __reduce__(self):
        return exec, ("open('executed', 'w').close()",)


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"garbage"),
    "half of a zip": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "an array": lambda path: np.save(path.open("wb"), np.zeros(3)),
    "a pickle with code": lambda path: path.write_bytes(pickle.dumps(Bomb())),
    "an array with code": lambda path: np.savez(path, reward=np.array([Bomb()], object)),
    "images of other numbers": lambda path: np.savez(path, **dict(np.load(path)) | {"env_id": np.zeros(3)}),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_demo_files_execute_nothing(damage):
    """Fails if a damaged file, or one of a stranger's, ends in anything but a message that names it."""
    write_chain("demo.npz")
    DAMAGES[damage](Path("demo.npz"))
    with pytest.raises(script.UserError, match="demo.npz"):
        script.read_demo(Path("demo.npz"), script.Args(env_id=CHAIN), Chain.observation_space, TWO)
    assert not Path("executed").exists()
    if "code" in damage:  # loaded carelessly it would execute its code, so this test can fail
        file = np.load("demo.npz", allow_pickle=True)
        assert (file["reward"] if "array" in damage else True) is not None and Path("executed").exists()


def test_bytes_that_are_none():
    """Fails if 256 becomes 0 where observations are bytes."""
    view, args = spaces.Box(0, 255, (2,), np.uint8), script.Args(env_id="none")
    demo = script.Demo(np.zeros((2, 2), np.uint8), np.zeros((1, 1), int), np.ones(1, np.float32), True, 1.0)
    script.save_demo(Path("demo.npz"), demo, args, view, TWO)
    np.savez("demo.npz", **dict(np.load("demo.npz")) | {"observation": np.full((1, 2), 256)})
    with pytest.raises(script.UserError, match="from 0 to 255"):
        script.read_demo(Path("demo.npz"), args, view, TWO)


# ------------------------------------------------------------------------------------------------------------- folders


@pytest.mark.parametrize(("given", "threshold"), [(None, 3), (0.0, 0), (7.0, 7)])
def test_initial_demos(given, threshold):
    """A person's demo of 5 and an agent's of 3, capacity 51: the threshold is 3 unless given, 49 value demos have room,
    and a new reward demo moves 0.3 / 49 once there is a value demo. Too many demos are refused."""
    for folder, total in (("human", 5.0), ("agent", 3.0)):
        demo = make_demo(script, total=total)
        script.save_demo(Path(folder, "0.npz"), demo, script.Args(env_id="none"), LINE, TWO)
    folders = {"initial_human_demos_dir": "human", "initial_agent_demos_dir": "agent"}
    args = script.Args(env_id="none", initial_reward_threshold=given, **folders)
    envs = types.SimpleNamespace(single_observation_space=LINE, single_action_space=TWO)
    demos = script.make_demo_buffer(args, envs)
    assert [(demo.total, demo.human) for demo in demos.reward_demos] == [(5, True), (3, False)]
    assert (demos.reward_threshold, demos.value_capacity) == (threshold, 49)
    demos.add(demos.value_demos, make_demo(script))
    demos.add_reward_demo(make_demo(script))
    assert demos.rho == pytest.approx(0.1 + 0.3 / 49)
    with pytest.raises(script.UserError, match="2 demos exceed demo_capacity = 1"):
        script.make_demo_buffer(dataclasses.replace(args, demo_capacity=1), envs)


@pytest.mark.parametrize("given", [None, -200.0])
@pytest.mark.parametrize("total", [0.0, -150.0])
def test_initial_demos_that_earned_nothing(given, total):
    """Fails if demos without a positive return make failures reward demos, or if the user's threshold is not kept."""
    script.save_demo(Path("agent/0.npz"), make_demo(script, total=total), script.Args(env_id="none"), LINE, TWO)
    args = script.Args(env_id="none", initial_reward_threshold=given, initial_agent_demos_dir="agent")
    envs = types.SimpleNamespace(single_observation_space=LINE, single_action_space=TWO)
    demos = script.make_demo_buffer(args, envs)
    assert len(demos.reward_demos) == 1 and demos.reward_threshold == given
    demos.consider(make_demo(script, total=-100.0))
    assert len(demos.reward_demos) == (1 if given is None else 2)


def test_supplementary_demos_are_taken_once(capsys):
    """Fails if a file is taken twice, also after a resume, or if one that was half written is never looked at again."""
    write_chain("a.npz")
    Path("b.npz").write_bytes(b"half")
    demos, counts = demos_of(supplementary_demos_dir="."), []
    for step in range(4):
        if step == 2:
            write_chain("b.npz")
            os.utime("b.npz", ns=(1, 1))
        demos.load_supplementary_demos()
        counts.append(len(demos.reward_demos))
        again = demos_of(supplementary_demos_dir=".")
        again.load_state_dict(demos.state_dict())
        demos = again
    assert counts == [1, 1, 2, 2] and capsys.readouterr().err.count("skipped") == 1
    assert not any(demo.human for demo in demos.reward_demos)


def test_supplementary_demos_arrive_in_mid_run():
    """Fails if the folder is looked at only at the start, or not at all."""
    Path("watched").mkdir()
    rollouts = []

    def look(demos, load=script.PPODBuffer.load_supplementary_demos):
        rollouts.append(len(demos.reward_demos))
        if len(rollouts) == 3:
            write_chain("watched/late.npz")
        load(demos)

    with mock.patch.object(script.PPODBuffer, "load_supplementary_demos", look):
        train("--env-id", CHAIN, "--supplementary-demos-dir watched --total-timesteps 400 --run-dir run --rho 0.3")
    assert rollouts[:3] == [0, 0, 0] and rollouts[3] >= 1 and checkpoint("run")["demos"]["replayed_rows"] > 0


def test_saved_demos_are_the_best():
    """The two best of an agent's reward demos and the two highest value demos, in folders of their own; every second
    rollout, and at the end. A person's demo is nobody's to save, and survives a new best one."""
    reward = [make_demo(script, total=t) for t in (2.0, 4.0, 3.0)] + [make_demo(script, total=9.0, human=True)]
    value = [make_demo(script, total=0.0, max_value=v, length=n) for v, n in ((0.1, 3), (0.3, 5), (0.2, 4))]
    settings = {"num_agent_demos_to_save": 2, "target_agent_demos_dir": "best", "save_demos_every": 2, "env_id": "none"}
    demos = store(script, reward, value, **settings)
    saved = lambda: sorted(str(path) for path in Path("best").rglob("*.npz"))
    demos.save_demos(is_finished=False)
    assert not saved()
    demos.save_demos(is_finished=False)
    assert saved() == ["best/reward/0.npz", "best/reward/1.npz", "best/value/0.npz", "best/value/1.npz"]
    returns = lambda: [float(np.load(f"best/reward/{i}.npz")["episode_return"]) for i in (0, 1)]
    assert returns() == [4, 3] and [len(np.load(f"best/value/{i}.npz")["reward"]) for i in (0, 1)] == [5, 4]
    demos.add_reward_demo(make_demo(script, total=10.0))
    demos.save_demos(is_finished=True)
    assert returns() == [10, 4] and [demo.total for demo in demos.reward_demos if demo.human] == [9]


def test_folder_to_write_to_is_not_a_files_affair(capsys):
    """Fails if a config.json names where demos are written: the flag must be given again."""
    flags = "--env-id CartPole-v1 --total-timesteps 300 --rho 0.3 --target-agent-demos-dir best --run-dir run"
    train(flags, "--save-demos-every 1 --num-agent-demos-to-save 1")
    assert len(list(Path("best").rglob("*.npz"))) == 2
    main = script.main
    for flags in ("--resume run", "--evaluate run", "--config run/config.json --run-dir new"):
        assert "--target-agent-demos-dir best" in refusal(main, flags, capsys=capsys)
    script.train(script.tuned("--resume", "run", "--target-agent-demos-dir", "best"))
    script.load("run", target_agent_demos_dir="best")


def test_no_space_for_saved_demos(capsys):
    """Fails if demos that cannot be written end in a traceback."""
    flags = "--env-id CartPole-v1 --total-timesteps 300 --target-agent-demos-dir best --run-dir run".split()
    with mock.patch.object(np, "savez_compressed", side_effect=OSError(28, "No space left on device")):
        err = refusal(script.main, SMALL, *flags, capsys=capsys)
    assert "cannot write best/" in err and "No space left" in err


# ----------------------------------------------------------------------------------------------- checkpoint and resume


def test_state_of_the_demos_comes_back():
    """Fails if anything that a PPODBuffer knows and that outlives episodes is missing from a checkpoint."""
    demos = store(script, [make_demo(script, total=2.0, human=True)], [make_demo(script, max_value=0.2)], rho=0.2)
    demos.rho, demos.phi, demos.reward_threshold, demos.seen = 0.3, 0.2, 1.5, {"a.npz": script.TAKEN, "b.npz": 7}
    demos.value_capacity, demos.rollouts, demos.replayed_rows = 50, 3, 77
    torch.save(demos.state_dict(), "state.pt")
    other = store(script, rho=0.2)
    other.load_state_dict(torch.load("state.pt", weights_only=True))
    for name, value in vars(demos).items():
        if name not in ("args", "spaces", "replays", "position", "away", "episodes"):  # these belong to episodes
            plain = lambda x: [vars(demo) for demo in x] if isinstance(x, list) else x
            np.testing.assert_equal(plain(getattr(other, name)), plain(value), name)


@pytest.mark.parametrize(
    "change",
    [
        lambda demos: demos.pop("rho"),
        lambda demos: demos.update(rho="a"),
        lambda demos: demos.update(reward_demos=3),
        lambda demos: demos["reward_demos"][0].pop("obs"),
        lambda demos: demos["reward_demos"][0].update(obs=torch.zeros(3, 99)),
        lambda demos: demos["reward_demos"][0].update(actions="none"),
    ],
)
def test_damaged_state_of_the_demos(change, capsys):
    """Fails if demos in a checkpoint that are none end in a traceback."""
    train("--env-id CartPole-v1 --total-timesteps 300 --run-dir run")
    state = checkpoint("run")
    change(state["demos"])
    torch.save(state, "run/checkpoint.pt")
    assert "run is damaged" in refusal(script.main, "--resume run", capsys=capsys)


def test_a_resumed_run_needs_no_folder_of_demos():
    """Killed after a checkpoint, with the folder of its demonstration gone, a run goes on to the same end, bit for bit.

    Fails if demos, their values, the threshold or probabilities are not in the checkpoint, or if replays go on.
    """
    write_chain("demos/demo.npz")
    flags = f"--env-id {CHAIN} --initial-human-demos-dir demos --rho 0.3 --phi 0.3 --demo-capacity 6 "
    flags += "--total-timesteps 250 --checkpoint-every 100 --normalize-obs --normalize-reward --run-dir"
    train(flags, "whole")
    write = script.Run.write_checkpoint

    def write_and_die(run):
        write(run)
        raise KeyboardInterrupt

    with mock.patch.object(script.Run, "write_checkpoint", write_and_die), pytest.raises(KeyboardInterrupt):
        train(flags, "killed")
    Path("demos/demo.npz").unlink()
    assert 100 <= checkpoint("killed")["run"][0] < 200
    script.train(script.tuned("--resume", "killed", "--no-progress", "--env-id", CHAIN))
    assert not run_difference(Path("whole"), Path("killed"))
    (human,) = [demo for demo in checkpoint("killed")["demos"]["reward_demos"] if demo["human"]]
    assert human["actions"].shape == (L, 1) and checkpoint("killed")["demos"]["replayed_rows"] > 50


def test_figures(monkeypatch):
    """Fails if a figure of the demos is missing, or if they do not add up: here rho 0.3, phi 0.3, six demos."""
    flags = "--env-id CartPole-v1 --total-timesteps 1500 --rho 0.3 --phi 0.3 --demo-capacity 6 --run-dir run"
    train(flags, "--recurrent")
    table = np.genfromtxt("run/metrics.csv", delimiter=",", names=True)
    np.testing.assert_allclose(table["rho"] + table["phi"], 0.6)
    assert (table["reward_demos"] + table["value_demos"] <= 6).all() and table["reward_threshold"][-1] > 1
    state = checkpoint("run")
    assert table["training_rows"][-1] == state["run"][0] + state["demos"]["replayed_rows"] > 1600
    assert set(script.FIGURES) <= set(table.dtype.names)


# ------------------------------------------------------------------------------------------------------- the two tasks


def test_the_committed_demos():
    """MountainCar pays 1 at the goal and nothing before. DoorKey's demo was recorded on the layout of seed 1: played
    there again, it shows the same and earns the same."""
    args = script.tuned(env_id="MountainCar-v0", num_envs=1)
    assert args.wrappers == ("GoalReward",)
    (demo,) = script.make_demo_buffer(args, script.make_envs(args, 1)).reward_demos
    assert demo.human and demo.terminated and demo.total == 1 and (demo.rewards[:-1] == 0).all()
    args = script.tuned(num_envs=1)
    assert args.env_id == "MiniGrid-DoorKey-16x16-v0"
    envs = script.make_envs(args, 1)
    (demo,) = script.make_demo_buffer(args, envs).reward_demos
    assert demo.human and demo.terminated and demo.total == pytest.approx(1 - 0.9 * 47 / 2560, abs=1e-6)
    obs, _ = envs.reset(seed=1)
    total = 0
    for t, action in enumerate(demo.actions[:, 0]):
        np.testing.assert_array_equal(obs[0], demo.obs[t])
        obs, rewards, *_ = envs.step(np.array([action]))
        total += rewards[0]
    assert total == pytest.approx(demo.total)


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["MiniGrid-DoorKey-16x16-v0", "MountainCar-v0"])
def test_copied_away_it_says_how_to_get_a_demo(env_id):
    """Copied away alone, under another name, the tuned runs have no demo: one line names the folder and the command."""
    Path("mine.py").write_text(Path(script.__file__).read_text())
    _, err = shell(Path(), "-B", "mine.py", "--env-id", env_id, code=2)
    assert err.count("\n") == 1 and f"demos/{env_id}" in err and f"demos/record.py --env-id {env_id}" in err
    assert os.listdir() == ["mine.py"]


@pytest.mark.slow
def test_under_another_name_it_finds_its_wrapper():
    """Fails if GoalReward is looked up by the name of the file: copied away with its demo, a renamed script trains, is
    resumed and evaluated."""
    Path("mine.py").write_text(Path(script.__file__).read_text())
    Path("demos").symlink_to(ROOT / "demos")
    flags = [*SMALL.split(), "--env-id", "MountainCar-v0", "--max-episode-steps", "30", "--run-dir", "run"]
    shell(Path(), "-B", "mine.py", *flags, "--total-timesteps", "200", "--no-recurrent")
    shell(Path(), "-B", "mine.py", "--resume", "run", "--total-timesteps", "400", "--no-progress")
    out, _ = shell(Path(), "-B", "mine.py", "--evaluate", "run", "--eval-episodes", "3")
    assert "3 episodes of MountainCar-v0" in out and checkpoint("run")["demos"]["reward_demos"][0]["human"]


# ----------------------------------------------------------------------------------------------------------- record.py


def main_of(record, *flags):
    with mock.patch.object(sys, "argv", ["record.py", *" ".join(flags).split()]):
        record.main()


def test_record_by_keyboard(record, monkeypatch, capsys):
    """A person plays three episodes: the two good ones are saved, and can be loaded; the keys are shown."""
    import gymnasium.utils.play

    def play(env, keys_to_action, noop, wait_on_player):
        assert keys_to_action == {"0": 0, "1": 1} and wait_on_player and env.render_mode == "rgb_array"
        for wrong_at in (None, 3, None):
            env.reset()
            for at in range(L):
                action = demo_worlds.right_choice(at) ^ (at == wrong_at)
                obs, reward, terminated, truncated, _ = env.step(action)
                assert obs.shape == (L + 1,) and env.render().shape == (64, 64, 3)
                if terminated or truncated:
                    break

    monkeypatch.setattr(gymnasium.utils.play, "play", play)
    main_of(record, "--env-id", CHAIN)
    out = capsys.readouterr().out
    assert "action 0" in out and "escape" in out and out.count("->") == 2
    assert sorted(os.listdir(f"demos/{CHAIN}")) == ["0.npz", "1.npz"]
    demo = script.read_demo(Path(f"demos/{CHAIN}/0.npz"), script.Args(env_id=CHAIN), Chain.observation_space, TWO)
    np.testing.assert_array_equal(demo.obs, chain_demo(script).obs)
    np.testing.assert_array_equal(demo.actions, chain_demo(script).actions)


@pytest.mark.parametrize("env_id", ["MiniGrid-Empty-5x5-v0", "MountainCar-v0"])
def test_keys_are_real(env_id, record, capsys):
    """gymnasium.utils.play itself, on a driver without a screen: every key of the tables is an action. It ends by
    Escape."""
    pygame = pytest.importorskip("pygame")
    pygame.display.init()
    pygame.event.post(pygame.event.Event(pygame.KEYDOWN, key=pygame.K_ESCAPE))
    main_of(record, "--env-id", env_id)
    out = capsys.readouterr().out
    assert ("action 5 toggle" if "Grid" in env_id else "action 2") in out


@pytest.mark.slow
def test_recording_without_a_display_ends_in_a_line():
    """Fails if a machine without a screen waits for keys for ever, or ends in a traceback."""
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "XDG_RUNTIME_DIR")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [sys.executable, "-B", str(ROOT / "demos/record.py"), "--env-id", "MountainCar-v0"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no display" in done.stderr
    assert not os.listdir()


def test_record_from_a_run(record, capsys):
    """Fails if episodes of an agent are not saved, up to the number asked for, or if it plays other actions."""
    train("--env-id CartPole-v1 --total-timesteps 300 --run-dir run")
    limit = "--max-episode-steps 5 --initial-reward-threshold"
    main_of(record, "--from-run run --target-agent-demos-dir recorded --num-agent-demos-to-save 2", limit, "5")
    assert sorted(os.listdir("recorded")) == ["0.npz", "1.npz"] and capsys.readouterr().out.count("-> recorded/") == 2
    agent = script.load("run")
    envs = script.make_envs(agent.args, 1)
    demo = script.read_demo(Path("recorded/0.npz"), agent.args, envs.single_observation_space, envs.single_action_space)
    agent.begin_episodes(1)
    assert [int(agent.act(obs[None])[0]) for obs in demo.obs[:-1]] == demo.actions[:, 0].tolist()
    assert demo.total == 5 and not demo.terminated
    main_of(record, "--from-run run --target-agent-demos-dir none", limit, "6")
    assert not Path("none").exists()


def test_record_from_minari(record, monkeypatch, capsys):
    """Fails if an episode of a (stubbed) Minari dataset does not become a demo that can be loaded."""
    demo = chain_demo(script)
    episode = types.SimpleNamespace(id=4, observations=demo.obs, actions=demo.actions[:, 0], rewards=demo.rewards * 1.0)
    episode.terminations = np.arange(L) == L - 1

    class Dataset(list):
        iterate_episodes = list.__iter__

    stub = types.SimpleNamespace(load_dataset=lambda name: Dataset([episode]) if name == "chain/one" else 1 / 0)
    monkeypatch.setitem(sys.modules, "minari", stub)
    flags = f"--env-id {CHAIN} --target-agent-demos-dir recorded --from-minari"
    main_of(record, flags, "chain/one")
    loaded = script.read_demo(Path("recorded/4.npz"), script.Args(env_id=CHAIN), Chain.observation_space, TWO)
    np.testing.assert_array_equal(loaded.obs, demo.obs)
    assert loaded.terminated and loaded.total == 1
    assert "chain/two" in refusal(record.main, flags, "chain/two", capsys=capsys, command="record.py")
    episode.actions = episode.actions + 5
    assert "episode 4" in refusal(record.main, flags, "chain/one", capsys=capsys, command="record.py")
    monkeypatch.setitem(sys.modules, "minari", None)
    err = refusal(record.main, flags, "chain/one", capsys=capsys, command="record.py")
    assert "pip install minari" in err


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--env-id Pendulum-v1", "Discrete"),
        ("--env-id MiniGrid-DoorKy-5x5-v0", "DoorKey"),
        ("--env-id CartPole-v1 --gamma 7", "gamma"),
        ("--from-run nowhere", "nowhere"),
        ("--script nowhere.py", "nowhere.py"),
        ("--env-id CartPole-v1 --target-agent-demos-dir taken", "taken"),
    ],
)
def test_record_refuses(flags, word, record, capsys):
    """One line on stderr, exit code 2, nothing written."""
    Path("taken").write_text("a file, no folder")
    assert word in refusal(record.main, flags, capsys=capsys, command="record.py")
    assert os.listdir() == ["taken"]
