"""maddpg_matd3.py in games whose right answer is known."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tests.against_loops.test_maddpg_matd3 import rehearse
from tests.team_tools import all_processes_end

MADDPG = {"algorithm": "maddpg", "twin_q": False, "target_noise": 0.0, "policy_frequency": 1}
ENVS, GAMES = "tests.probes.maddpg_envs", "tests.probes.team_envs"
QUICK = {"hidden_sizes": (32, 32), "batch_size": 64, "learning_starts": 200, "num_envs": 4, "gamma": 0.9, "tau": 0.02,
         "output_penalty": 1e-2, "actor_learning_rate": 3e-3, "critic_learning_rate": 3e-3,
         "exploration_noise": 0.3, "eval_episodes": 50}  # fmt: skip


def values_after(script, end, **more):
    """Q of the only state there is, for each stream of rewards, after some hundred steps."""
    quick = QUICK | {
        "critic_learning_rate": 1e-2,
        "tau": 0.2,
        "gamma": 0.5,
        "total_timesteps": 640,
        "hidden_sizes": (16,),
    }
    run = rehearse(script, f"{ENVS}:Pay", env_kwargs=json.dumps({"end": end}), **quick | more)
    batch = run.buffer.get(np.array([0, 1]))
    with torch.no_grad():
        return run.agent.values(run.agent.critics[0], batch.share_obs, batch.actions)[::2].tolist()


@pytest.mark.parametrize("end, worth", [pytest.param("terminated", 1, marks=pytest.mark.slow), ("truncated", 2)])
def test_what_an_end_is_worth(script, end, worth):
    """One step, which pays 1 to one agent and 2 to the other, 3 to the team. Terminated, that is all. Truncated, it
    would go on: 3 / (1 - 0.5) = 6. Fails if truncation is treated as termination, or the other way round, anywhere
    between environment and critic.
    """
    assert values_after(script, end) == pytest.approx([3 * worth], abs=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("more", [MADDPG, {"n_step": 3}, {"gradient_steps": 2, "train_frequency": 8}])
@pytest.mark.parametrize("end, worth", [("terminated", 1), ("truncated", 2)])
def test_what_an_end_is_worth_to_each(script, end, worth, more):
    """The same with a critic for each agent: 1 and 2, or 2 and 4."""
    actual = values_after(script, end, state_type="FP", **more)
    assert actual == pytest.approx([worth, 2 * worth], abs=0.2)


SOLVED = {  # environment, settings, steps, the least that has to be reached
    "solo": (f"{ENVS}:Solo", {}, 2000, 0.8),
    "duet, FP": (f"{ENVS}:Duet", {"state_type": "FP"}, 2500, 1.8),
    "integers": (f"{GAMES}:Target", {}, 2000, -0.1),
    "matrix": (f"{ENVS}:Steep", {}, 1500, 10.0),
    "matrix, MADDPG": (f"{ENVS}:Steep", {"state_type": "FP"} | MADDPG, 1500, 10.0),
    "halfway, n-step": (f"{ENVS}:MeetHalfway", {"n_step": 3}, 4000, -4.0),
    "halfway, dies": (f"{ENVS}:MeetHalfway", {"state_type": "FP", "env_kwargs": '{"dies": true}'}, 4000, -3.0),
    "meet, FP": (f"{GAMES}:Meet", {"share_policy": True, "state_type": "FP", "n_step": 2}, 4000, 1.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVED)
def test_games_are_solved(script, name):
    """Best play: both follow their own sign, 2 for both (0 is worth -0.5), or 1 alone; the whole number 2, which costs
    nothing; (2, 0) gives 2 x 5 in the matrix game, a safe (1, 1) but 4; who goes to 0 at once loses 1.5 on
    average, a little less after a death, who stays 22; who meets in at most two steps gets 2 x (1 - 0.2) or more.
    """
    env_id, more, steps, least = SOLVED[name]
    assert rehearse(script, env_id, **QUICK | {"total_timesteps": steps} | more).evaluations[-1][2] >= least


@pytest.mark.slow
def test_rock_paper_scissors(script):
    """Fails if PettingZoo's rps_v2, whose observations are single numbers, cannot be played."""
    run = rehearse(script, "pettingzoo.classic.rps_v2", total_timesteps=60)
    assert run.agent.discrete and run.agent.obs_sizes == [4, 4] and len(run.calls) > 1


REFUSED = {
    f"{GAMES}:Nobody": "has no agents",
    f"{GAMES}:Empty": "has no agents",
    f"{GAMES}:Absent": "agent b takes part, but has no observation",
    "pettingzoo.classic.tictactoe": "did you mean pettingzoo.classic.tictactoe_v3?",
    "pettingzoo.classic.tictactoe_v3": "turn-based",  # and not: did you mean tictactoe?
    f"{ENVS}:Unbounded": "bounded Box actions",
    f"{ENVS}:Uneven": "of all agents alike",
}


@pytest.mark.parametrize("env_id", REFUSED)
def test_environments_that_cannot_be_played(script, env_id):
    """Fails if it ends in a traceback or several lines, or if the advice leads in a circle."""
    args = script.Args(env_id=env_id)
    with pytest.raises(script.UserError) as error:
        script.make_agent(args, script.make_envs(args, 2))
    assert REFUSED[env_id] in str(error.value) and "\n" not in str(error.value)


def test_algorithm_sets_three_flags_and_what_is_given_wins(script):
    """Fails if MATD3 is not MADDPG plus three settings, if they cannot be mixed, or if a name without its settings is
    taken for the algorithm.
    """
    settings = lambda args: (args.target_noise, args.twin_q, args.policy_frequency)
    assert settings(script.tuned()) == settings(script.tuned(algorithm="matd3")) == (0.2, True, 2)
    assert settings(script.tuned(algorithm="maddpg")) == (0.0, False, 1)
    assert settings(script.tuned(algorithm="maddpg", twin_q=True)) == (0.0, True, 1)
    assert script.tuned(algorithm="maddpg").num_envs == script.TUNED[script.Args().env_id]["num_envs"]
    with pytest.raises(script.UserError, match="algorithm is maddpg.*--no-twin_q"):
        script.train(script.Args(algorithm="maddpg"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_processes_end_without_a_word(script, number, tmp_path):
    """Fails if Ctrl-C or a kill, which in a terminal reach all processes, end in more than the line that says how to
    go on, or if a process outlives the first one.
    """
    command = [sys.executable, script.__file__, "--async-envs", "--num-envs", "3", "--no-progress"]
    command += ["--run-dir", str(tmp_path / "run"), "--eval-episodes", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # else a child in the background is deaf to it
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    signal.signal(signal.SIGINT, handler)
    while not (tmp_path / "run/metrics.csv").exists() or not (tmp_path / "run/metrics.csv").read_text():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines() == [f"stopped before its first checkpoint; to begin anew: --resume {tmp_path / 'run'}"]
    assert all_processes_end(process.pid)
