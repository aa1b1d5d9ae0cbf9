"""What reinforce.py does, from numbers worked out by hand, a lesson to be read beside it, to whole runs.

Each test must also fail for each of the mistakes that stand above it in `catches`. compute_returns has its tests in
test_ppo.py, the run section in test_run.py.
"""

from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from run_folder import check_evaluation, check_refused, command, kill_and_resume
from tools import Probe, Walk, catches, close, flat, rehearse

NUMBER = spaces.Box(-np.inf, np.inf, (1,))
log = lambda *ratios: torch.tensor(ratios).log()

# ------------------------------------------------------------------------------------------------ a lesson, by hand


class Stub(torch.nn.Module):
    """pi is 1/4, 3/4 in every state; V(s) = s."""

    device = "cpu"

    def __init__(self, args):
        super().__init__()
        self.args = args
        self.logits = torch.nn.Parameter(log(0.25, 0.75))
        self.scale = torch.nn.Parameter(torch.ones(()))

    def distribution(self, obs):
        return torch.distributions.Categorical(logits=self.logits.expand(len(obs), 2))

    def value(self, obs):
        return self.scale * torch.as_tensor(obs)[:, 0]


@catches(
    "policy_gradient_loss, uphill: return - -> return ",
    "actor_critic_loss, the baseline learns from the actor's loss: values.detach() -> values",
    "actor_critic_loss, no baseline: returns - values.detach() -> returns",
    "actor_critic_loss, entropy lowered: - args.ent_coef -> + args.ent_coef",
    "actor_critic_loss, the critic's loss counts once: args.vf_coef * v_loss -> v_loss",
    "actor_critic_loss, normalised unasked: if args.norm_adv -> if True",
    "actor_critic_loss, a single advantage becomes 0: len(advantages) > 1 -> True",
    "actor_critic_loss, a critic where there is none: if args.baseline == -> if not args.baseline ==",
)
def test_policy_gradient(script):
    """pi = 1/4, 3/4. The gradient of log pi(a) in the logits is 1[a] - pi: for a = 0 it is 3/4, -3/4.

    step  action  R  V  A = R - V  A grad log pi
    0     0       4  2  2          1.5, -1.5
    1     1       2  3  -1         0.25, -0.25     for a = 1: -1/4, 1/4
    The mean is 0.875, -0.875. Without a baseline A = R: 3, -3 and -0.5, 0.5, whose mean is 1.25, -1.25. The critic's
    half squared error is (4 + 1)/4 = 1.25, its gradient in a scale of V is ((2 - 4) 2 + (3 - 2) 3)/2 = -0.5.
    """
    obs, actions, returns = torch.tensor([[2.0], [3.0]]), torch.tensor([0, 1]), torch.tensor([4.0, 2.0])
    for baseline, gradient, slope in (("value", 0.875, -0.25), ("none", 1.25, 0.0)):
        args = script.Args(baseline=baseline, norm_adv=False, vf_coef=0.5)
        agent = Stub(args)
        loss, metrics = script.actor_critic_loss(agent, obs, actions, returns, args)
        (loss + 0 * agent.scale).backward()
        close(-agent.logits.grad, [gradient, -gradient])
        close(agent.scale.grad, slope)
        close(metrics["value_loss"], 1.25 if baseline == "value" else 0)
        close(loss, metrics["policy_loss"] + 0.5 * metrics["value_loss"])
    args = script.Args(norm_adv=False, ent_coef=0.1)
    loss, metrics = script.actor_critic_loss(Stub(args), obs, actions, returns, args)
    close(metrics["entropy"], 0.562335)
    close(loss, metrics["policy_loss"] + 0.5 * 1.25 - 0.0562335)
    args = script.Args()  # A = 2, -1 normalised is 1, -1: the mean of 3/4 and 1/4
    agent = Stub(args)
    script.actor_critic_loss(agent, obs, actions, returns, args)[0].backward()
    close(-agent.logits.grad, [0.5, -0.5])
    agent = Stub(args)  # a single step: A = 2 stays
    script.actor_critic_loss(agent, obs[:1], actions[:1], returns[:1], args)[0].backward()
    close(-agent.logits.grad, [1.5, -1.5])


@catches(
    "Rollout.batch, skipped rows are learnt from: kept = ~ -> kept = 0 * ",
    "Rollout.batch, the state's own value: self.obs[1:], last_obs -> self.obs",
    'Rollout.batch, never a bootstrap: if agent.args.baseline == "value" -> if False',
    "Rollout.batch, float64: return tensor(self.obs, np.float32) -> return tensor(self.obs)",
    'Rollout.batch, a critic in any case: if agent.args.baseline == "value" -> if True',
)
def test_rollout(script):
    """gamma = 0.5, V(s) = s. The first episode is cut off in state 8, the second by the end of the rollout in state 4.

    row  s  r  ends       skipped  R with V         R without
    0    1  1             no       1 + 6/2 = 4      1 + 2/2 = 2
    1    2  2  truncated  no       2 + 8/2 = 6      2
    2    8  9             yes
    3    3  3             no       3 + 4/2 = 5      3
    """
    for baseline, expected in (("value", [4, 6, 5]), ("none", [2, 2, 3])):
        rollout = script.Rollout()
        for s, r, end, skip in ((1, 1, 0, 0), (2, 2, 1, 0), (8, 9, 0, 1), (3, 3, 0, 0)):
            state = np.array([[s]], float)  # which some devices lack
            flags = np.array([False]), np.array([end > 0]), np.array([skip > 0])
            rollout.add(state, np.array([s % 2]), np.array([r]), *flags)
        agent = Stub(script.Args(baseline=baseline, gamma=0.5))
        obs, actions, returns = rollout.batch(agent, np.array([[4.0]]))
        close(obs[:, 0], [1, 2, 3])
        assert obs.dtype == returns.dtype == torch.float32
        assert actions.tolist() == [1, 0, 1]
        close(returns, expected)


# ----------------------------------------------------------------------------------------------------- whole trainings

PLANS = [[(2, "t"), (3, "c")], [(1, "b"), (4, "c")]]
# Of three rows each, A2C first has 2 + 2 that count, then 3 + 3, then 2 + 1. REINFORCE resets all environments before
# it plays, and so skips episodes: it has 3 + 4 rows, then 3 + 1.
ROLLOUTS = [
    ({}, [7, 4]),
    ({"baseline": "none", "norm_adv": False}, [7, 4]),
    ({"n_step": 3, "ent_coef": 0.1}, [4, 6, 3]),
]
SHORT = {"num_envs": 2, "gamma": 0.5, "hidden_sizes": (16,), "learning_rate": 1e-2, "total_timesteps": 11}


@catches("train, an update from reset rows alone: and not np.all(rollout.skipped) -> ")
def test_reset_rows_alone_are_no_batch(script):
    """With --n-step 1, where episodes end together, a step may do nothing but reset."""
    loss = script.actor_critic_loss

    def watched_loss(agent, obs, *rest):
        assert len(obs)
        return loss(agent, obs, *rest)

    with mock.patch.object(script, "actor_critic_loss", watched_loss):
        rehearse(script, *[lambda: Walk(PLANS[0], 0)] * 2, **SHORT | {"n_step": 1})


@catches(
    "train, learns from what comes after the end: skipped = skipped | dones -> skipped = dones",
    "train, A2C learns from reset rows: skipped = dones -> skipped = dones & False",
    "train, gradients add up: optimizer.zero_grad() -> 0",
    "train, gradients not shortened: args.max_grad_norm -> 1e9",
    "train, learning rate kept: if args.anneal_lr else -> if False else",
    "train, a step too many: len(rollout.obs) >= -> len(rollout.obs) > ",
    "train, observations overwritten: obs.copy() -> obs",
)
def test_training(script):
    """The weights go where torch's Adam goes along the loss; the batches are whole episodes, or three rows of each
    environment without those that only reset it.
    """
    for options, sizes in ROLLOUTS:
        args = script.Args(**SHORT | options)
        loss, updates = script.actor_critic_loss, []

        def watched_loss(agent, obs, actions, returns, args):
            updates.append((obs.clone(), actions.clone(), returns.clone(), flat(agent).clone()))
            return loss(agent, obs, actions, returns, args)

        reuse_arrays = mock.patch(
            "tools.vector_env", lambda makers, n: gym.vector.SyncVectorEnv(makers[:n], copy=False)
        )
        with mock.patch.object(script, "actor_critic_loss", watched_loss), reuse_arrays:
            run = rehearse(script, lambda: Walk(PLANS[0], 0), lambda: Walk(PLANS[1], 1), **SHORT | options)
        assert [len(obs) for obs, *_ in updates] == sizes
        agent = script.make_agent(args, run.envs)
        optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
        step = 0
        for obs, actions, returns, weights in updates:
            close(weights, flat(agent), atol=1e-5)
            assert len(obs) == len({tuple(o) for o in obs.tolist()}) and (obs[:, 2] >= 0).all()  # each state once
            for (name, episode, t), total in zip(obs.tolist(), returns.tolist()):
                length, end = PLANS[int(name)][int(episode) % 2]
                if args.n_step is None:  # R is the sum of all that follows; Walk pays 10 episode + t
                    left = range(int(t) + 1, length + 1)
                    expected = sum(0.5**k * (10 * episode + later) for k, later in enumerate(left))
                    last = torch.tensor([[name, episode, float(length)]])
                    if end == "c" and args.baseline == "value":
                        expected += 0.5 ** len(left) * agent.value(last).item()
                    close(total, expected, atol=1e-4)
            optimizer.param_groups[0]["lr"] = 1e-2 * max(0, 1 - step / 11)
            step += len(obs)
            value, _ = loss(agent, obs, actions, returns, args)
            optimizer.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
        assert run.step == step  # skipped rows do not count
        close(flat(run.agent), flat(agent), atol=1e-5)


WORLDS = {  # what is learnt, the value that each observation must come to, and the return of the best actions
    "one step that pays 1 and terminates": (Probe, {0: 1}, 1),
    "1 after the second step": (lambda: Probe(lambda obs, _: obs == 1, steps=2), {0: 0.5, 1: 1}, 1),
    "1 for action 0 at -1, 1 at 1": (lambda: Probe(lambda o, a: a == (o > 0), varied=True), {-1: 1, 1: 1}, 1),
}


@catches("Run.count, with rewards of skipped rows: rewards * ~reset_rows -> rewards")
def test_returns_hold_no_skipped_rows(script):
    """Episodes of 2 and 5 steps; rewards are 1, 2, … and 10 more in each episode: 3 + 20 e and 15 + 50 e in episode e,
    though the first environment plays on while the second has not ended.
    """
    makers = [lambda: Walk([(2, "t")]), lambda: Walk([(5, "c")])]
    run = rehearse(script, *makers, num_envs=2, total_timesteps=60)
    assert set(run.episodes["length"]) == {2, 5}
    for total, length in zip(run.episodes["return"], run.episodes["length"]):
        assert (total - length * (length + 1) / 2) % (10 * length) == 0


@pytest.mark.parametrize(
    "options", [{}, {"n_step": 4}, pytest.param({"baseline": "none"}, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", WORLDS)
def test_small_worlds_are_learnt(script, name, options):
    """Fails if an end, a discount, an action or a reward is taken for another anywhere between environment and V."""
    world, values, score = WORLDS[name]
    given = {"num_envs": 16, "gamma": 0.5, "learning_rate": 3e-2, "hidden_sizes": (16,), "eval_episodes": 8}
    run = rehearse(script, world, **given, total_timesteps=2500, **options)
    assert run.evaluations["return_mean"][-1] == score
    if "baseline" not in options:
        obs = torch.tensor(list(values))[:, None].float()
        close(run.agent.value(obs), list(values.values()), atol=0.1)


RUN = "--num-envs 2 --hidden-sizes 8 --total-timesteps 150 --checkpoint-every 60 --eval-every 90 --eval-episodes 3 "


@catches("train, the optimizer is not saved: agent=agent, optimizer=optimizer -> agent=agent, other=agent")
def test_killed_resumed_evaluated(script, tmp_path, monkeypatch, capsys):
    """Actions are drawn by torch's generator, which is seeded with each checkpoint."""
    kill_and_resume(script, RUN, 6, monkeypatch, tmp_path)
    check_evaluation(script, capsys)


def test_refused(script, tmp_path, monkeypatch, capsys):
    refused = {
        "--env-id Pendulum-v1": "ppo.py takes more kinds",
        "--n-step 5 --baseline none": "n_step needs baseline",
    }
    refused["--n-step 0"] = "n_step must be at least 1"
    check_refused(script, refused, tmp_path, monkeypatch, capsys)


def test_an_episode_that_never_ends(script, tmp_path, monkeypatch, capsys):
    """REINFORCE cannot learn before an episode is over: it says so instead of playing on for ever."""
    monkeypatch.chdir(tmp_path)
    assert command(script, "--env-id run_worlds:Endless-v0 --num-envs 1 --no-progress") == 2
    assert "an episode does not end; try --max-episode-steps" in capsys.readouterr().err
