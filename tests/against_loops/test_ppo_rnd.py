"""What ppo_rnd.py adds to ppo.py, against slow and obvious versions of it, on random input."""

import copy
from unittest import mock

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.against_loops.test_ppo import FRACTIONS, for_each_env, slow_gae, textbook_loss
from tests.probes.envs import Walk
from tests.tools import close, rehearse

IMAGE = spaces.Box(0, 255, (36, 40, 2), np.uint8)


@st.composite
def streams(draw):
    """(rewards (T, N), values (T + 1, N), reset_rows (T, N)); behind a reset row there is another row, or the end."""
    shape = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    numbers = lambda *shape: draw(hnp.arrays(np.int64, shape, elements=st.integers(-4, 4))).astype(float)
    reset_rows = draw(hnp.arrays(bool, shape, elements=st.booleans()))
    return tuple(map(torch.as_tensor, (numbers(*shape), numbers(shape[0] + 1, shape[1]), reset_rows)))


def slow_intrinsic_gae(rewards, values, reset_rows, gamma, gae_lambda):
    """Advantages of one environment: its reset rows are taken out, then all that is left is one endless episode."""
    played = [t for t, reset_row in enumerate(reset_rows) if not reset_row]
    rewards, values = [rewards[t] for t in played], [values[t] for t in played] + [values[-1]]
    never = [False] * len(rewards)
    if rewards:
        advantages, _ = slow_gae(rewards, values[:-1], values[1:], never, never, None, gamma, gae_lambda)
        return dict(zip(played, advantages))
    return {}


@settings(max_examples=100)
@given(stream=streams(), gamma=FRACTIONS, gae_lambda=FRACTIONS)
def test_intrinsic_gae(script, stream, gamma, gae_lambda):
    """Fails if the recursion is not the weighted average of n-step advantages over all rows but the reset rows."""
    rewards, values, reset_rows = stream
    advantages, returns = script.compute_intrinsic_gae(rewards, values, reset_rows, gamma, gae_lambda)
    for n in range(rewards.shape[1]):
        expected = slow_intrinsic_gae(*[x[:, n].tolist() for x in stream], gamma, gae_lambda)
        for t, advantage in expected.items():
            close(advantages[t, n], advantage)
            close(returns[t, n], advantage + values[t, n])


@settings(max_examples=50)
@given(stream=streams(), gamma=FRACTIONS, gae_lambda=FRACTIONS)
def test_without_ends_it_is_gae(script, stream, gamma, gae_lambda):
    """Fails if the two kinds of advantages differ in anything but ends of episodes."""
    rewards, values, reset_rows = stream
    never = torch.zeros_like(reset_rows)
    episodic = script.compute_gae(rewards, values[:-1], values[1:], never, never, gamma, gae_lambda)
    for one, other in zip(episodic, script.compute_intrinsic_gae(rewards, values, never, gamma, gae_lambda)):
        close(one, other)


@settings(max_examples=50)
@given(stream=streams(), gamma=FRACTIONS, cut=st.integers(0, 8))
def test_scale(script, stream, gamma, cut):
    """Fails if the deviation is not that of all discounted sums so far, each written out, in two rollouts."""
    rewards, _, reset_rows = stream
    rnd = script.RND(spaces.Box(-1, 1, (1,)), rewards.shape[1])
    sums = []
    for t, n in zip(*np.nonzero(~reset_rows.numpy())):
        played = [k for k in range(t + 1) if not reset_rows[k, n]]
        sums.append(sum(gamma**age * rewards[k, n].item() for age, k in enumerate(reversed(played))))
    for rows in (slice(0, cut), slice(cut, None)):
        scaled = rnd.scale(rewards[rows], reset_rows[rows].numpy(), gamma)
    close(rnd.sum_stats.count.item(), len(sums))
    if sums:
        close(rnd.sum_stats.var.item(), np.var(sums))
        close(scaled, rewards[cut:] / np.sqrt(np.var(sums) + 1e-8))


def slow_novelty(rnd, obs, seen):
    """Novelty of one observation, `seen` being all that the statistics have seen, in double precision."""
    seen = np.array(seen, np.float64)
    z = np.clip((obs - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8), -5, 5)
    x = torch.tensor(z, dtype=torch.float32)[None]
    if rnd.image:
        x = 255 * x
    errors = rnd.predictor(x) - rnd.target(x)
    return sum(error**2 for error in errors[0].tolist()) / errors.shape[1]


@pytest.mark.parametrize("space", [spaces.Box(-9, 9, (3,)), spaces.Box(-9, 9, (2, 2), np.float64), IMAGE])
def test_novelty(script, space):
    """Fails if vectors, matrices or images are not normalised number by number, or if rows change places."""
    torch.manual_seed(0)
    rnd = script.RND(space, 2)
    seen = np.random.default_rng(0).uniform(0, 9, (20, *space.shape)).astype(space.dtype)
    rnd.obs_stats.update(seen)
    obs = np.random.default_rng(1).uniform(0, 9, (3, 2, *space.shape)).astype(space.dtype)
    expected = [[slow_novelty(rnd, o, seen) for o in row] for row in obs]
    close(rnd.novelty(obs), expected, atol=1e-4)
    assert np.min(expected) > 1e-3


def test_channels_first_or_last(script):
    """Fails if the same image, stored the other way round, is not as new. Weights are those of the seed."""
    image = np.random.default_rng(0).integers(0, 256, (1, 2, 36, 40, 2), np.uint8)
    novelty = []
    for axes in ((0, 1, 2, 3, 4), (0, 1, 4, 2, 3)):
        torch.manual_seed(0)
        images = image.transpose(axes)
        novelty.append(script.RND(spaces.Box(0, 255, images.shape[2:], np.uint8), 2).novelty(images))
    close(*novelty)


def test_networks(script):
    """Fails if the target could learn, if the two networks are the same, or if the predictor cannot become the target.

    Two layers more, for what is random may need more layers to be learnt than it has.
    """
    rnd = script.RND(spaces.Box(-1, 1, (3,)), 1)
    depths = [sum(isinstance(m, torch.nn.Linear) for m in network) for network in (rnd.target, rnd.predictor)]
    assert depths == [2, 4] and not any(p.requires_grad for p in rnd.target.parameters())
    assert all(p.requires_grad for p in rnd.predictor.parameters())
    names = list(rnd.state_dict())  # a checkpoint holds all of it
    assert {name.split(".")[0] for name in names} == {"target", "predictor", "obs_stats", "sum_stats", "sums"}


# ----------------------------------------------------------------------------------------------------- whole trainings

# Rows of the first environment: 2 steps (terminated), reset, 3 steps (truncated); of the second: 1 step (both), reset,
# 4 steps (truncated). So both rollouts have reset rows, the second begins with them, and the first ends with two ends.
PLANS = [[(2, "terminated"), (3, "truncated")], [(1, "both"), (4, "truncated")]]
SHORT = {"num_envs": 2, "num_steps": 6, "num_minibatches": 2, "update_epochs": 2, "gamma": 0.5, "intrinsic_gamma": 0.75}
SHORT |= {"gae_lambda": 0.8, "hidden_sizes": (16,), "predictor_learning_rate": 1e-2, "learning_rate": 1e-2}
SHORT |= {"random_steps": 9, "clip_vloss_coef": 0.3, "ent_coef": 0.03, "vf_coef": 0.7, "total_timesteps": 15}


def walk(script, **args):
    """(Run, the RND at the beginning of each rollout's learning, and at the end)."""
    makers = [lambda i=i: Walk(PLANS[i], i, spaces.Discrete(3)) for i in range(2)]
    copies = []

    class Recorded(script.RND):
        def novelty(self, obs):
            copies.append(copy.deepcopy(self))
            return super().novelty(obs)

    with mock.patch.object(script, "RND", Recorded):
        run = rehearse(script, *makers, watch=True, buffer="CuriousBuffer", loss="curious_loss", **SHORT | args)
    return run, [*copies, run.parts["rnd"]]


def walked(steps):
    """All observations of so many steps in these environments: (name, episode, step)."""
    rows = []
    for n, plan in enumerate(PLANS):
        path = [(n, e, at) for e in range(9) for at in range(plan[e % 2][0] + 1)]
        rows += path[1 : steps + 1]
    return rows


def slow_batch_fields(args, agent, buffer, intrinsic_rewards):
    """What a Batch holds, for every row (T, N) of a rollout."""
    with torch.no_grad():
        obs, actions = torch.tensor(buffer.obs), torch.tensor(buffer.actions)
        features = agent.features(obs.flatten(0, 1))
        values = agent.critic(features).view(7, 2)
        intrinsic_values = agent.intrinsic_critic(features).view(7, 2)
        log_probs = agent.actor(features).log_softmax(1).view(7, 2, 3)[:-1].gather(2, actions)[:, :, 0]
    reset_rows = torch.tensor(buffer.reset_rows)
    ends = torch.tensor(buffer.terminated), torch.tensor(buffer.truncated), reset_rows
    rewards = (10 * obs[:-1, :, 1] + obs[:-1, :, 2] + 1) * ~reset_rows  # as Walk gives them
    steps = rewards, values[:-1], values[1:], *ends
    extrinsic, returns = for_each_env(slow_gae, steps, args.gamma, args.gae_lambda)
    if args.episodic:
        steps = intrinsic_rewards, intrinsic_values[:-1], intrinsic_values[1:], *ends
        intrinsic, _ = for_each_env(slow_gae, steps, args.intrinsic_gamma, args.gae_lambda)
    else:
        intrinsic = torch.zeros(6, 2)
        for n in range(2):
            stream = [x[:, n].tolist() for x in (intrinsic_rewards, intrinsic_values, reset_rows)]
            for t, advantage in slow_intrinsic_gae(*stream, args.intrinsic_gamma, args.gae_lambda).items():
                intrinsic[t, n] = advantage
    advantages = args.extrinsic_coef * extrinsic + args.intrinsic_coef * intrinsic
    old = log_probs, values[:-1], intrinsic_values[:-1]
    return obs[:-1], actions, obs[1:], *old, advantages, returns, intrinsic + intrinsic_values[:-1]


def textbook_curious_loss(agent, batch, args):
    """ppo.py's loss by the book, and the other critic's."""
    loss, figures = textbook_loss(agent, batch, args)
    values = agent.intrinsic_critic(agent.features(batch.obs)).squeeze(1)
    errors = (values - batch.intrinsic_returns) ** 2
    if args.clip_vloss:
        old = batch.old_intrinsic_values
        moved = (values - old).clamp(-args.clip_vloss_coef, args.clip_vloss_coef)
        errors = torch.maximum(errors, (old + moved - batch.intrinsic_returns) ** 2)
    loss = loss + args.vf_coef * errors.mean() / 2
    return loss, figures | {"loss": loss, "intrinsic_value_loss": errors.mean() / 2}


TRAININGS = {
    "as it is": {},
    "episodic": {"episodic": True, "clip_vloss": True},
    "not normalised": {"normalize_intrinsic": False, "anneal_lr": False, "norm_adv": False},
    "other weights": {"extrinsic_coef": 0.5, "intrinsic_coef": 3.0, "predictor_share": 1.0, "max_grad_norm": 1e9},
}


@pytest.mark.parametrize("name", TRAININGS)
def test_training(script, name):
    """Fails if two rollouts, with ends and reset rows, move any weight elsewhere than the slow way does.

    Statistics begin with nine steps of random play and go on with what each rollout led to; novelty is that of the
    observation behind a step; the predictor learns from the first rows of each batch, after the agent.
    """
    run, rnds = walk(script, **TRAININGS[name])
    args, agent, rnd = run.args, run.calls[0].agent, copy.deepcopy(rnds[0])
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
    predictor_optimizer = torch.optim.Adam(rnd.predictor.parameters(), args.predictor_learning_rate)
    seen, streams, sums, steps = walked(args.random_steps), [[], []], [], 0
    for i, call in enumerate(run.calls):
        rollout, k = divmod(i, 4)
        if k == 0:
            buffer, played = call.buffer, ~call.buffer.reset_rows
            optimizer.param_groups[0]["lr"] = 1e-2 * (1 - steps / 15 if args.anneal_lr else 1)
            novelty = np.array([[slow_novelty(rnd, obs, seen) for obs in row] for row in buffer.obs[1:]])
            for t, n in zip(*np.nonzero(played)):
                streams[n].append(novelty[t, n])
                sums.append(sum(0.75**age * x for age, x in enumerate(reversed(streams[n]))))
            rewards = novelty / np.std(sums) if args.normalize_intrinsic else novelty
            close(run.figures["intrinsic_reward"][rollout], rewards[played].mean(), atol=1e-3)
            fields = slow_batch_fields(args, agent, buffer, torch.tensor(rewards, dtype=torch.float32))
            place = {tuple(buffer.obs[t, n]): (t, n) for t, n in zip(*np.nonzero(played))}
            rnd.obs_stats.load_state_dict(rnds[rollout].obs_stats.state_dict())
            close(rnd.obs_stats.mean, np.mean(seen, 0))
            close(rnd.obs_stats.var, np.var(seen, 0))
            seen += buffer.obs[1:][played].tolist()
            steps += played.sum()
        assert all(tuple(obs) in place for obs in call.batch.obs.tolist()), "a reset row in a minibatch"
        rows = tuple(np.transpose([place[tuple(obs)] for obs in call.batch.obs.tolist()]))
        batch = script.Batch(*[field[rows] for field in fields])
        for actual, expected in zip(call.batch, batch):
            close(actual, expected, atol=1e-3)
        loss, figures = textbook_curious_loss(agent, batch, args)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
        share = batch.next_obs[: int(np.ceil(args.predictor_share * len(rows[0])))]
        figures["predictor_loss"] = rnd(share).mean()
        predictor_optimizer.zero_grad()
        figures["predictor_loss"].backward()
        predictor_optimizer.step()
        for figure, expected in figures.items():
            close(run.figures[figure][i], expected, atol=1e-3)
    flat = lambda network: torch.cat([p.detach().flatten() for p in network.parameters()])
    assert len(run.calls) == 8 and set(run.figures) == set(script.FIGURES)
    close(flat(run.agent), flat(agent), atol=1e-3)
    close(flat(rnds[-1].predictor), flat(rnd.predictor), atol=1e-3)
    assert torch.equal(flat(rnds[-1].target), flat(rnds[0].target))
    assert (flat(rnds[-1].predictor) - flat(rnds[0].predictor)).abs().max() > 0.02
