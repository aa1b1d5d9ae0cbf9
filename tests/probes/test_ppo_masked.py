"""ppo_masked.py in small environments whose best return is known, and what it says where masks are missing or foul.

Their masks come from each of the three places, for each of the three kinds of actions; an invalid action is an error.
"""

import json
import os

import gymnasium as gym
import pytest
import torch

CUE = {"env_id": "masked_envs:Cue-v0", "num_envs": 8, "num_steps": 32, "num_minibatches": 4, "learning_rate": 5e-3}
CUE |= {"gamma": 0.5, "ent_coef": 0.0, "total_timesteps": 6_000, "eval_episodes": 50}
NEEDLE = {"env_id": "masked_envs:Needle-v0", "num_envs": 8, "num_steps": 128, "num_minibatches": 8, "gamma": 0.0}
NEEDLE |= {"update_epochs": 40, "learning_rate": 3e-3, "ent_coef": 0.0, "hidden_sizes": (512,), "eval_episodes": 20}
NEEDLE |= {"total_timesteps": 1_950}


@pytest.fixture(autouse=True)
def one_thread():
    """`train` sets the number of threads of this process: put it back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def score(script, tmp_path):
    """score(settings, **more): the summary of a training."""

    def train(settings, **more):
        quiet = {"progress": False, "eval_every": 10**9, "run_dir": str(tmp_path / "run")}
        return script.train(script.tuned(**quiet | settings | more))

    return train


@pytest.mark.parametrize("source, kind, observation", [
    ("info", "discrete", "number"),
    *(pytest.param(*case.split(), marks=pytest.mark.slow) for case in
      ("method multidiscrete vector", "entry multibinary dict", "entry discrete vector")),
])  # fmt: skip
def test_every_source_learns(score, source, kind, observation):
    """Fails if learning does not work with masks from one of the places, one of the action spaces or Dicts.

    The best return is 1. The right action of each factor depends on both coins, and at random it is met at most half
    of the time.
    """
    kwargs = json.dumps({"source": source, "kind": kind, "observation": observation})
    assert score(CUE, env_kwargs=kwargs)["eval_return_mean"] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"estimator": "vtrace"}, {"estimator": "vanilla"}, {"normalize_reward": True}])
def test_every_estimator_learns(score, more):
    """Fails if one of ppo.py's estimators does not work with masks."""
    assert score(CUE, **more)["eval_return_mean"] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_70_actions_of_which_55_are_invalid(score, seed):
    """At least 90 of 100 within 2,048 steps. Fails if masks are not used in learning (see the next test)."""
    final = score(NEEDLE, seed=seed)
    assert final["eval_return_mean"] >= 90 and final["global_step"] <= 2048


@pytest.mark.slow
def test_naive_mask_learns_worse(score):
    """Fails if the ablation is no ablation."""
    assert score(NEEDLE, naive_mask=True)["eval_return_mean"] < 85


def test_taxi_in_a_notebook(script, score, tmp_path, capsys):
    """Fails if Taxi's masks are not found, if the run does not say so, or if load or evaluate do not work."""
    final = score({"total_timesteps": 3_000, "eval_episodes": 4})
    assert script.tuned().env_id == "Taxi-v4"
    assert 'action masks come from info["action_mask"]' in capsys.readouterr().out
    agent = script.load(tmp_path / "run", "last")
    assert script.evaluate(agent, agent.args, 4, agent.args.seed + 10_000)[0] == final["eval_return_mean"]


@pytest.mark.slow
def test_taxi_is_learned(score):
    """Fails if Taxi is not learned nearly to its optimum, 7.93 on average (over 500 episodes: ± 0.12)."""
    final = score({}, eval_episodes=500)
    assert final["eval_return_mean"] >= 7.3 and final["global_step"] < 305_000


@pytest.mark.slow
def test_compiled_it_learns(score):
    """Fails if the compiled loss, masks included, is another one."""
    kwargs = json.dumps({"kind": "multidiscrete"})
    assert score(CUE, env_kwargs=kwargs, compile=True)["eval_return_mean"] > 0.95


CUE_WITH = "--env-id masked_envs:Cue-v0 --env-kwargs "


@pytest.mark.parametrize("flags, words", [
    ("--env-id CartPole-v1", ["CartPole-v1", 'entry "action_mask"', 'info["action_mask"]', "action_masks()"]),
    ("--env-id Pendulum-v1", ["Box", "ppo.py"]),
    (CUE_WITH + '{"source":"nothing"}', ["Dict", "info", "action_masks()"]),
    (CUE_WITH + '{"observation":"text"}', ["mission", "--wrappers"]),
    (CUE_WITH + '{"observation":"image"}', ["observation", "--wrappers"]),
    ("--no-mask --naive-mask", ["no_mask", "naive_mask"]),
    ("--device nonsense", ["nonsense"]),
    ("--num-envs 3 --num-steps 5 --num-minibatches 4", ["15", "4 minibatches"]),
    ("--env-id Taxy-v4", ["Taxy"]),
    ("--hidden-sizes --critic-hidden-sizes 8", ["hidden_sizes", "one layer"]),
    ("--critic-hidden-sizes", ["critic_hidden_sizes", "one layer"]),
])  # fmt: skip
def test_bad_input(script, flags, words, tmp_path, monkeypatch, capfd):
    """Fails if bad input ends in a traceback, writes anything, or if the message does not name what is wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ppo_masked.py", *flags.split()])
    with pytest.raises(SystemExit) as stop:
        script.main()
    err = capfd.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and "Traceback" not in err, err
    assert all(word in err for word in words), err
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("bad, words", [("0", "no valid action"), ("NaN", "NaN")])
@pytest.mark.parametrize("source", ["info", "method", "entry"])
def test_foul_masks_end_the_run(script, score, source, bad, words):
    """Fails if a mask that leaves nothing, or holds a NaN, passes; if environment, step or row are not named."""
    kwargs = json.dumps({"bad_at": 5, "bad": float(bad), "source": source})
    with pytest.raises(script.UserError, match=rf"Cue-v0, after \d+ steps .*row 0\b.*{words}"):
        score(CUE, env_kwargs=kwargs)


class Narrow(gym.Wrapper):
    """Gives masks that are too short."""

    def action_masks(self):
        return [True, True]


def test_mask_of_a_wrong_width(script):
    """Fails if a method of a wrapper is not found, or if a mask of another width is stretched instead of refused."""
    wrapper = f"{__name__}.Narrow"
    args = script.Args(env_id="CartPole-v1", wrappers=(wrapper, "gymnasium.wrappers.TimeAwareObservation"))
    assert "action_masks()" in script.make_envs(args, 2).source
    envs = script.make_envs(script.Args(env_id="Acrobot-v1", wrappers=(wrapper,)), 2)
    with pytest.raises(script.UserError, match="3 wide.* 2"):
        envs.reset(seed=1)
