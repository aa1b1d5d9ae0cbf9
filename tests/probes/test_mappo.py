"""Games so small that the right answer is known, played by mappo.py; and what it says where it cannot play."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tests.team_tools import ENVS, all_processes_end, arguments, played, rehearse_team
from tests.tools import close

slow = pytest.mark.slow

GAMES = {
    "matrix, MAPPO": ("Matrix", {}, 6.0),
    "matrix, HAPPO": ("Matrix", {"happo": True, "share_policy": False}, 6.0),
    "meet": ("Meet", {}, 1.6),
    "meet, HAPPO, FP, no GAE": ("Meet", {"happo": True, "share_policy": False, "state_type": "FP", "gae": False}, 1.6),
    "meet, recurrent, FP, naive": ("Meet", {"recurrent": True, "state_type": "FP", "data_chunk_length": 0}, 1.6),
    "meet, no value norm, no clipping": ("Meet", {"value_norm": False, "clip_vloss": False}, 1.6),
    "recall, recurrent": ("Recall", {"recurrent": True}, 2.0),
    "integers": ("Target", {"ent_coef": 0.0}, 0.0),
}
FAST = {"matrix, HAPPO"}


def learned(script, name, **more):
    """The mean evaluation return of a short training run, and that of best play."""
    game, given, best = GAMES[name]
    steps = {"Matrix": 2_000, "Meet": 8_000, "Recall": 12_000, "Target": 8_000}[game]
    settings = dict(num_envs=16, num_steps=10, update_epochs=5, learning_rate=3e-3, total_timesteps=steps)
    settings |= dict(num_minibatches=2, eval_episodes=50, share_policy=game != "Matrix")  # there both see the same
    run = rehearse_team(script, game, evaluates=True, **settings | given | more)
    return run.evaluations[-1][2], best


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FAST else [slow]) for name in GAMES])
def test_games_are_solved(script, name):
    """Best play: (2, 0) gives 2 x 3 in the matrix game (best against chance is (1, 1)); who meets in at most two steps
    gets at least 2 x (1 - 0.2); who remembers both signs gets 2 x 1; who plays the integer gets 0."""
    mean, best = learned(script, name)
    assert mean >= best - 0.2


@slow
def test_recall_needs_a_memory(script):
    """Fails if the sign leaks into later observations: without memory 2 x 1/4 is the most to expect."""
    mean, _ = learned(script, "recall, recurrent", recurrent=False, eval_episodes=200)
    assert mean < 1


@slow
def test_what_follows_a_death_is_learnt(script):
    """Widow: agent a dies in the first step, and the team, b alone, gets 1 in each of the two that follow. gamma = 0.5,
    lambda = 0: b's values are 0.75, 1.5 and 1. V(0) is the mean of 1 + 0.5 V(0) and 1, that is 4/3, and the first step
    is worth 0 + 0.5 * 4/3 = 2/3 to a. Fails if death cuts off what the team gets, or if V(0), which the return at death
    rests on, is never trained.
    """
    settings = dict(state_type="FP", gamma=0.5, gae_lambda=0.0, value_norm=False, clip_vloss=False, learning_rate=3e-3)
    settings |= dict(num_envs=8, num_steps=16, update_epochs=10, total_timesteps=3000)
    run = rehearse_team(script, "Widow", **settings)
    critic = run.rollouts[-1].critic
    alive = np.stack([buffer.active_masks[:, :, 0] for buffer in run.rollouts[-1].actors], 2)
    first = (alive.sum(2) == 2)[:-1]
    close(critic.value_preds[:-1][first], np.full((first.sum(), 2, 1), [[2 / 3], [0.75]]), 0.1)
    dead = (alive[..., 0] == 0)[:-1] & (critic.masks[:-1, :, 0, 0] == 1)
    close(critic.value_preds[:-1, :, 0][dead], np.full((dead.sum(), 1), 4 / 3), 0.1)


def test_no_illegal_move_in_a_turn_based_game(script):
    """Fails if masks do not bind: tic-tac-toe ends at once, at a price of 1, with an illegal move."""
    run = played(script, "tictactoe", num_envs=4, num_steps=100)
    assert len(run.episodes) > 30 and {total for _, total in run.episodes} == {0.0}
    for buffer in run.rollouts[0].actors:
        chosen = np.take_along_axis(buffer.available_actions[:-1], buffer.actions, -1)
        assert (chosen[buffer.masks[:-1] > 0] == 1).all()
        waiting = buffer.available_actions[:-1].sum(-1) == 1
        close(buffer.action_log_probs[waiting], np.zeros((waiting.sum(), 1)))


def test_rock_paper_scissors(script):
    """Fails if an environment whose `state` is no function, as PettingZoo's rps_v2, cannot be played."""
    run = played(script, "pettingzoo.classic.rps_v2", num_steps=20)
    assert {total for _, total in run.episodes} == {0.0} and len(run.episodes) == 2


@slow
def test_multiwalker(script):
    """Fails if walkers that fall are still asked for actions, or come back before their environment is reset."""
    kwargs = {"env_kwargs": {"terminate_on_fall": False}, "num_envs": 2, "num_steps": 200, "total_timesteps": 400}
    run = rehearse_team(script, "pettingzoo.sisl.multiwalker_v9", **kwargs)
    rollout = run.rollouts[0]
    active = np.concatenate([b.active_masks for b in rollout.actors], 2)  # (T + 1, N, n)
    masks = rollout.actors[0].masks[..., 0] > 0
    assert (active.sum(2)[masks] < 3).any() and not active[~masks].any() and len(run.episodes) >= 2
    revived = (active[1:] > active[:-1]).any(2)
    assert (revived <= ~masks[:-1]).all()  # only right after a reset row
    assert all(np.isfinite(list(map(float, values))).all() for values in run.figures.values())


def test_one_environment_one_step(script):
    """Fails if a rollout that is nothing but a reset row is learned from, or counted."""
    run = rehearse_team(script, "Matrix", num_envs=1, num_steps=1, total_timesteps=5)
    played_rollouts = [rollout for rollout in run.rollouts if rollout.critic.masks[0].all()]
    assert run.step == 5 and len(played_rollouts) == 5 and len(run.rollouts) == 9
    assert len(run.calls) == 5 * 2 * 2  # epochs; actors and critic
    assert all(torch.isfinite(p).all() for p in run.agent.parameters())


# ------------------------------------------------------------------------------------------------ what cannot be played

REFUSED = {
    "mpe2.simple_spred_v3": "did you mean mpe2.simple_spread_v3?",
    "mpe2.simple_spread": "did you mean mpe2.simple_spread_v3?",
    "pettingzoo.classic.tictactoe": "did you mean pettingzoo.classic.tictactoe_v3?",
    "pettingzoo.classic.tictactoe_v3": "turn-based",  # and not: did you mean tictactoe?
    "CartPole-v1": "such as mpe2.simple_spread_v3",
    "json": "no parallel_env",
    "json.dumps": "missing 1 required",
    "__main__.foo": "cannot make __main__.foo",
    "nosuchpackage.env": "No module named 'nosuchpackage' (an id is a module such as mpe2.simple_spread_v3)",
    "simple_spread": "No module named 'simple_spread' (an id is a module such as mpe2.simple_spread_v3)",
    f"{ENVS}.broken": "pip install nosuchdependency",
    f"{ENVS}:NOT_AN_ENVIRONMENT": "no PettingZoo parallel environment",
    f"{ENVS}:turn_based": "no PettingZoo parallel environment",
    f"{ENVS}:Nobody": "has no agents",
    f"{ENVS}:Empty": "has no agents",
    f"{ENVS}:Absent": "agent b takes part, but has no observation",
    f"{ENVS}:Latecomer": "agent c takes part, but has no observation or is no possible agent",
}


@pytest.mark.parametrize("env_id", REFUSED)
def test_environments_that_cannot_be_played(script, env_id):
    """Fails if it ends in a traceback or several lines, or if the advice leads in a circle."""
    with pytest.raises(script.UserError) as error:
        script.make_envs(arguments(script, env_id), 2)
    assert REFUSED[env_id] in str(error.value) and "\n" not in str(error.value)


FLAGS = {
    "--env-id mpe2.simple_speaker_listener_v4 --share-policy": "--no-share-policy",
    "--happo": "--no-share-policy",
    "--env-kwargs [1]": "JSON object",
    '--env-kwargs {"M":3}': "unexpected keyword",
    "--wrappers no.such.wrapper": "no.such.wrapper",
    "--num-minibatches 7": "do not divide",
    "--recurrent --data-chunk-length 7": "does not divide num_steps",
    "--recurrent --hidden-sizes": "at least one layer",
    "--recurrent --critic-hidden-sizes": "at least one layer",
    '--env-id mpe2.simple_reference_v3 --env-kwargs {"continuous_actions":true}': "--action-factor 0",
    "--env-id mpe2.simple_speaker_listener_v4 --action-factor 5": "larger multiple of action_factor = 5",
    "--action-factor 1": "action_factor = 1",
    f"--env-id {ENVS}:tictactoe --action-factor 3": "action masks",
    f"--env-id {ENVS}:Matrix --capture-video": "no render mode rgb_array",
    "--huber-delta 0": "huber_delta must lie between",
}


@pytest.mark.parametrize("flags", FLAGS)
def test_bad_input_is_one_line(script, flags, tmp_path, monkeypatch, capsys):
    """Fails if bad input ends in a traceback, in several lines, another exit code, or after something was written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mappo.py", *flags.split()])
    with pytest.raises(SystemExit) as stop:
        script.main()
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and FLAGS[flags] in err and list(tmp_path.iterdir()) == []


ALIVE = {"": [(1, 1)] * 4, "numbers": [(1, 1)] * 4, "newcomer": [(1, 0), (1, 1), (1, 1), (1, 1)]}
ALIVE |= {"dict of state": ALIVE[""]}


@pytest.mark.parametrize("how", ALIVE)
def test_who_is_alive(script, how):
    """Fails if ends that are 0 or 1, and no bools, or not given for who joins in later, say anything else; or if an
    environment whose state is no array cannot be played."""
    envs = script.make_envs(arguments(script, "Edges", env_kwargs={"how": how}), 1)
    (layout,) = envs.get_attr("layout")
    rows = [envs.reset(seed=0)[0]]
    for step in range(3):
        row, rewards, terminated, truncated, infos = envs.step((np.zeros(1, np.int64),) * 2)
        rows.append(row)
        assert rewards == [sum(ALIVE[how][step])] and terminated == [step == 2] and not truncated.any()
        assert infos["terminated"].dtype == bool and infos["terminated"].all() == (step == 2)
    assert [tuple(row[0, layout.alive]) for row in rows] == ALIVE[how]


def test_all_entries_of_an_observation_are_seen(script):
    """Fails if an entry beside the action mask is dropped, whatever its name, or the mask is seen as an observation."""
    envs = script.make_envs(arguments(script, "Edges", env_kwargs={"how": "keys"}), 1)
    (layout,) = envs.get_attr("layout")
    envs.reset(seed=0)
    row, *_ = envs.step((np.ones(1, np.int64),) * 2)
    for agent in range(2):
        assert sorted(row[0, layout.observations[agent]]) == [0, 0, 1, 1, 7]  # the goal (1, 7); the place, one-hot
        assert row[0, layout.available[agent]].tolist() == [0, 1]


@pytest.mark.parametrize("how", ["no last observation", "growing state"])
def test_what_is_missing_is_named(script, how):
    """Fails if an environment that leaves out an observation, or changes the size of its state, ends in a traceback."""
    envs = script.make_envs(arguments(script, "Edges", env_kwargs={"how": how}), 1)
    envs.reset(seed=0)
    with pytest.raises(script.UserError, match=how.split()[-1]):
        for _ in range(3):
            envs.step((np.zeros(1, np.int64),) * 2)


def test_evaluations_are_as_long_as_max_cycles(script):
    """Fails if an environment that takes max_cycles, but does not say so afterwards, is cut at another step."""
    args = arguments(script, "Edges", env_kwargs={"max_cycles": 2000})
    assert script.episode_limit(args, script.make_envs(args, 1).spec) == 2000


def test_masks_that_come_late_are_refused(script):
    """Fails if masks that are not in the first row, where there is then no room for them, end in a traceback."""
    kwargs = {"scripts": [{"a": [2, "truncated"], "b": [2, "truncated"]}], "masks": {"a": [0, 1, 1], "b": [1, 1, 0]}}
    envs = script.make_envs(arguments(script, "MoreMasks", env_kwargs=kwargs), 1)
    envs.reset(seed=0)
    with pytest.raises(script.UserError, match="a has 3 action masks"):
        envs.step((np.zeros(1, np.int64),) * 2)


TRUSTED = {  # of a file
    "env_id mpe2.simple_tag_v3": True,
    "env_id pettingzoo.sisl.multiwalker_v9": True,
    "env_id pettingzoo.test.example_envs": False,
    "env_id mpe2._mpe_utils.core": False,
    "env_id my_module:Game": False,
    "env_id mpe2_v3.simple_v3": False,
    "wrappers pettingzoo.utils.wrappers.BaseParallelWrapper": True,
    "wrappers pettingzoo.utils.wrappers.base_parallel.np.load": False,
    "wrappers pettingzoo.utils.wrappers.base_parallel.ParallelEnv": False,  # imported there, defined elsewhere
    "wrappers os.system": False,
    'env_kwargs {"path": "/etc/passwd"}': False,
    'env_kwargs {"N": 2, "continuous_actions": true}': True,
}


@pytest.mark.parametrize("asked", TRUSTED)
def test_what_a_file_may_ask_for(script, asked):
    """Fails if a file can name what executes anything, or if what PettingZoo itself brings is refused."""
    name, _, value = asked.partition(" ")
    value = (value,) if name == "wrappers" else value
    given, stored = script.Args(), script.Args(**{name: value})
    flag = script.untrusted(stored, given)
    assert (flag == "") == TRUSTED[asked] and (not flag or flag.startswith("--" + name.replace("_", "-")))
    assert script.untrusted(stored, stored) == ""  # given on the command line as well


@slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_processes_end_without_a_word(script, number, tmp_path):
    """Fails if Ctrl-C or a kill, which in a terminal reach all processes, end in more than the line that says how to
    go on, or if a process outlives the first one."""
    command = [sys.executable, script.__file__, "--async-envs", "--num-envs", "3", "--num-minibatches", "1"]
    command += ["--no-progress", "--run-dir", str(tmp_path / "run"), "--eval-episodes", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy"}
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # else a child in the background is deaf to it
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    signal.signal(signal.SIGINT, handler)
    while not (tmp_path / "run/metrics.csv").exists() or not (tmp_path / "run/metrics.csv").read_text():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines() == [f"stopped before its first checkpoint; to begin anew: --resume {tmp_path / 'run'}"]
    assert all_processes_end(process.pid)


def test_shared_evaluation_takes_the_summed_reward(script):
    """Fails if evaluate() does not see the team's reward, or another length of episodes than PettingZoo's own."""
    args = arguments(script, "mpe2.simple_spread_v3", env_kwargs=json.dumps({"max_cycles": 7}))
    envs = script.make_envs(args, 2)
    assert script.episode_limit(args, envs.spec) == 7
    team = script.make_agent(args, envs)
    rows, _ = envs.reset(seed=3)
    total = np.zeros(2)
    team.begin_episodes(2)
    for _ in range(7):
        rows, _, _, truncated, infos = envs.step(team.act(rows))
        total += infos["rewards"].sum(1)
    assert truncated.all()
    close(script.evaluate(team, args, 2, 3), [total.mean(), total.std()], 1e-4)
