"""What ppod.py does with demonstrations, and its GRU, against slow and obvious versions, on random input.

What test_ppo.py has for every script, it has for this one as well.
"""

import contextlib
import copy
import math
from unittest import mock

import numpy as np
import pytest
import torch
from demo_worlds import LINE, TWO, Draws, make_demo, store
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.against_loops.test_ppo import ACTION_SPACES
from tests.probes.envs import Walk
from tests.tools import close, rehearse

# ---------------------------------------------------------------------------------------------------- more by hand


def test_annealing_comes_before_eviction(script):
    """Capacity 3: a person's demo and two value demos. The new reward demo evicts one of two, and moves 0.3/2 = 0.15.

    Fails if room is made first: of one value demo that is left, the current number would make it 0.3/1.
    """
    for by in ("capacity", "current"):
        value = [make_demo(script), make_demo(script)]
        demos = store(script, [make_demo(script, human=True)], value, demo_capacity=3, anneal_by=by)
        demos.value_capacity = 2
        demos.add_reward_demo(make_demo(script))
        assert len(demos.value_demos) == 1 and demos.rho == pytest.approx(0.25)


def test_chunks(script):
    """Row t of slot e is 10 e + t, T = 4, chunks of 2: 0 1 | 2 3 | 10 11 | 12 13.

    In the order 2 0 3 1, in two minibatches: 10 0, then 11 1; and 12 2, then 13 3.
    """
    rollout = script.SequenceBuffer(4, 2, LINE, TWO)
    numbers = 10.0 * torch.arange(2)[None] + torch.arange(5)[:, None]
    rollout.obs[:] = numbers[:, :, None]
    rollout.compute_advantages(numbers[:4], numbers, script.Args())
    rollout.states, rollout.advantages, rollout.returns = 100 + numbers[:4, :, None], numbers[:4], numbers[:4]
    order = Draws()
    order.permutation = lambda n: np.array([2, 0, 3, 1])
    one, two = rollout.minibatches(2, 2, order)
    close(one.state.ravel(), [110, 100])
    for name in ("obs", "old_log_probs", "old_values", "advantages", "returns"):
        close(getattr(one, name).reshape(2, 2), [[10, 0], [11, 1]])
        close(getattr(two, name).reshape(2, 2), [[12, 2], [13, 3]])


def test_a_gaussian_demonstrator(script):
    """The log-density at the mean, log std = (0.5, -1): -(0.5 - 1) - log 2 pi; so that pi/mu is at most 1."""
    agent = script.RecurrentAgent(LINE, spaces.Box(-1, 1, (2,)), script.Args())
    agent.log_std.data = torch.tensor([0.5, -1.0])
    close(agent.certain_log_prob(), 0.5 - math.log(2 * math.pi))
    assert script.RecurrentAgent(LINE, TWO, script.Args()).certain_log_prob() == 0


# ---------------------------------------------------------------------------------------------------------- priorities


@settings(max_examples=100)
@given(st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=8), st.floats(0, 20), st.data())
def test_priorities_are_a_distribution_that_follows_the_value(script, v, alpha, data):
    """Fails if p is negative, not finite, does not sum to 1, or falls when a value rises."""
    p = script.replay_probabilities(v, alpha)
    assert np.isfinite(p).all() and (p >= 0).all() and p.sum() == pytest.approx(1)
    assert all(p[i] <= p[j] + 1e-12 for i in range(len(v)) for j in range(len(v)) if v[i] <= v[j])
    i = data.draw(st.integers(0, len(v) - 1))
    raised = [*v]
    raised[i] += data.draw(st.floats(0, 1e6))
    assert script.replay_probabilities(raised, alpha)[i] >= p[i] - 1e-12


def test_value_demos_are_drawn_by_priority_and_reward_demos_uniformly(script):
    """1000 draws each; alpha = 1, values 1 and 3: a quarter and three quarters. Four standard deviations are 55, 63."""
    rng = np.random.default_rng(1)
    low, high = make_demo(script, max_value=1), make_demo(script, max_value=3)
    demos = store(script, value=[low, high], rho=0.0, phi=1.0, alpha=1.0)
    assert abs(sum(demos.sample_demo(rng) is high for _ in range(1000)) - 750) < 55
    demos = store(script, reward=[low, high], rho=1.0, phi=0.0, alpha=1.0)
    assert abs(sum(demos.sample_demo(rng) is high for _ in range(1000)) - 500) < 63


# ------------------------------------------------------------------------------------------------ replays, row by row

PLANS = [[(3, "terminated"), (2, "truncated")], [(1, "truncated"), (4, "both")], [(6, "terminated")]]
LENGTHS = {1: 2, 2: 5}  # of the demos, by their number; the first ends terminated, the second truncated


def walk_demo(script, length, terminated):
    """A demo whose observations are (-1, length, step), whose rewards are -1, -2, … and whose actions are all 1."""
    obs = np.array([[-1, length, t] for t in range(length + 1)], np.float32)
    rewards = -np.arange(1, length + 1, dtype=np.float32)
    return script.Demo(obs, np.ones((length, 1), int), rewards, terminated, float(rewards.sum()))


def train_on_walks(script, rollouts, **more):
    """(Run, its rollouts): three slots, of which each replays one of two demos half of the time."""

    def with_demos(args, envs):
        demos = script.PPODBuffer(args, 3, envs.single_observation_space, TWO)
        demos.add(demos.reward_demos, walk_demo(script, 2, terminated=True))
        demos.add(demos.reward_demos, walk_demo(script, 5, terminated=False))
        return demos

    makers = [lambda i=i: Walk(PLANS[i], i) for i in range(3)]
    small = {"num_envs": 3, "num_steps": 7, "chunk_length": 7, "num_minibatches": 1, "update_epochs": 1, "gru_size": 2}
    small |= {"hidden_sizes": (2,), "rho": 0.5, "phi": 0.0, "initial_reward_threshold": 1e9, "demo_capacity": 10**6}
    names = {"buffer": "SequenceBuffer", "loss": "sequence_loss", "watch": True}
    with mock.patch.object(script, "make_demo_buffer", with_demos):
        run = rehearse(script, *makers, **names, **small | {"total_timesteps": 7 * rollouts} | more)
    return run, [call.buffer for call in run.calls]


def rows_of(rollouts, i):
    """What slot i shows, row after row: dicts."""
    names = "obs", "actions", "rewards", "terminated", "truncated", "reset_rows", "demo_ids"
    return [
        {name: getattr(rollout, name)[t, i].tolist() for name in names} | {"next_obs": rollout.obs[t + 1, i].tolist()}
        for rollout in rollouts
        for t in range(7)
    ]


def test_replays(script):
    """Every row of some twenty rollouts is what it should be: a slot shows, over and over, all of an episode or of a
    demo, from its first observation to its last, then one reset row that holds the final observation. The environment
    of a replaying slot is not seen; afterwards it begins a new episode.

    Fails if the environment behind a replay is seen, counted or tracked, or if any row of a replay is not the demo's
    own. Tracked episodes, returns and steps are those of the environments alone.
    """
    run, rollouts = train_on_walks(script, 12)
    assert rollouts[0].demo_ids[0].any()  # slots draw before their first row
    finished, totals, real_rows, replayed = [], [], 0, 0
    for i in range(3):
        slot = rows_of(rollouts, i)
        t = 0
        while t < len(slot):
            name, number, _ = slot[t]["obs"]
            demo = slot[t]["demo_ids"]
            length, end = PLANS[i][int(number) % len(PLANS[i])]
            if demo:
                length, end = LENGTHS[demo], {1: "terminated", 2: "truncated"}[demo]
            episode = slot[t : t + length]
            for k, row in enumerate(episode):
                last = k + 1 == length
                assert (row["obs"], row["next_obs"]) == ([name, number, k], [name, number, k + 1])
                assert name == (-1 if demo else i) and row["demo_ids"] == demo and not row["reset_rows"]
                assert row["rewards"] == (-(k + 1) if demo else 10 * number + k + 1)
                assert row["actions"] == [1] or not demo
                assert row["terminated"] == (last and end in ("terminated", "both"))
                assert row["truncated"] == (last and end in ("truncated", "both"))
            real_rows += 0 if demo else len(episode)
            replayed += len(episode) if demo else 0
            if len(episode) == length and not demo:
                finished.append((i, number, length))
                totals.append(sum(row["rewards"] for row in episode))
            if t + length < len(slot):
                final = slot[t + length]
                assert final["reset_rows"] and final["obs"] == [name, number, length]
                assert (final["rewards"], final["terminated"], final["truncated"]) == (0, False, False)
            t += length + 1
    demos = run.parts["demos"]
    assert (run.step, demos.replayed_rows) == (real_rows, replayed) and replayed > 40 and real_rows > 40
    assert run.figures["training_rows"][-1] == real_rows + replayed
    assert sorted(total for _, total in run.episodes) == sorted(totals)
    tracked = sorted((int(demo.obs[0, 0]), demo.obs[0, 1], len(demo.rewards)) for demo in demos.value_demos)
    assert tracked == sorted(finished)
    for demo in demos.value_demos:
        assert demo.obs[:, 2].tolist() == list(range(len(demo.rewards) + 1))


# ---------------------------------------------------------------------------------------------- the network, the loss

VIEWS = {"vector": spaces.Box(-1, 1, (3,)), "grid": spaces.Box(0, 255, (4, 5, 3), np.uint8)}
SMALL = {"gru_size": 8, "chunk_length": 8, "hidden_sizes": (8,)}
each_view = pytest.mark.parametrize("view", VIEWS)
each_memory = pytest.mark.parametrize("recurrent", [True, False], ids=["GRU", "feed-forward"])


def make_agent(script, view=LINE, action_space=TWO, **settings):
    """A RecurrentAgent with weights and biases that are all but small, and its Args."""
    args = script.Args(**SMALL | settings)
    torch.manual_seed(0)
    agent = script.RecurrentAgent(view, action_space, args)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    return agent, args


def random_rollout(script, agent, view, T=32, N=4, seed=0):
    """A SequenceBuffer of random rows: episodes of random lengths, a third of them replays."""
    rng = np.random.default_rng(seed)
    rollout = script.SequenceBuffer(T, N, view, agent.action_space)
    shape = rollout.obs.shape
    rollout.obs[:] = rng.integers(0, 4, shape) if view.dtype == np.uint8 else rng.standard_normal(shape)
    rollout.reset_rows[1:] = rng.random((T - 1, N)) < 0.15
    rollout.truncated[:-1] = rollout.reset_rows[1:]
    for i in range(N):
        ids = np.cumsum(rollout.reset_rows[:, i])
        rollout.demo_ids[:, i] = np.where(ids % 3 == 1, ids, 0)
    rollout.demo_ids[rollout.reset_rows] = 0
    agent.action_space.seed(seed)
    actions = np.array([agent.action_space.sample() for _ in range(T * N)])
    rollout.actions[:] = script.from_env(actions, agent.action_space).reshape(T, N, -1)
    rollout.rewards[:] = rng.standard_normal((T, N))
    rollout.state = 0.5 * torch.randn(N, agent.state_size)
    return rollout


def slow_gru(gru, x, h):
    """The GRU (arXiv 1406.1078, section 2.3; the reset gate applied after the matrix, as in cuDNN) of one step."""
    from_x, from_h = gru.weight_ih @ x + gru.bias_ih, gru.weight_hh @ h + gru.bias_hh
    (x_reset, x_update, x_new), (h_reset, h_update, h_new) = from_x.chunk(3), from_h.chunk(3)
    reset, update = (x_reset + h_reset).sigmoid(), (x_update + h_update).sigmoid()
    return update * h + (1 - update) * (x_new + reset * h_new).tanh()


def slow_features(agent, obs, reset_rows, state):
    """What the heads see of one slot's rows, one at a time; (features, states after each)."""
    features, states = [], []
    for row, reset_row in zip(obs, reset_rows):
        x = agent.trunk_output(row[None])[0]
        if agent.gru is not None:
            x = state = slow_gru(agent.gru, x, state)
        features.append(x)
        if reset_row:
            state = torch.zeros_like(state)
        states.append(state)
    return torch.stack(features), torch.stack(states)


@each_view
@each_memory
def test_features_of_sequences(script, view, recurrent):
    """Fails if a state is not zero where an episode begins, or is zero elsewhere, if slots are mixed up, or if playing
    step by step sees something else than learning does, the whole rollout at once."""
    view = VIEWS[view]
    agent, _ = make_agent(script, view, spaces.MultiDiscrete([2, 3]), recurrent=recurrent)
    rollout = random_rollout(script, agent, view)
    obs, reset_rows, state = torch.as_tensor(rollout.obs[:-1]), torch.as_tensor(rollout.reset_rows), rollout.state
    with torch.no_grad():
        features, states = agent.features(obs, reset_rows, state)
        for i in range(4):
            expected = slow_features(agent, obs[:, i], reset_rows[:, i], state[i])
            close(features[:, i], expected[0], atol=1e-4)
            close(states[:, i], expected[1], atol=1e-4)
        for t in range(len(obs)):
            output, state = agent.policy_output(rollout.obs[t], rollout.reset_rows[t], state)
            close(output, agent.actor(features[t]), atol=1e-4)
            close(state, states[t], atol=1e-4)
        _, values = rollout.log_probs_and_values(agent)
        close(values[-1], agent.value(torch.as_tensor(rollout.obs[-1]), states[-1]))
    assert agent.state_size == (8 if recurrent else 0)


@pytest.mark.parametrize("length", [1, 4, 32])
@each_view
def test_chunks_play_on_where_the_rollout_was(script, view, length):
    """Fails if the log-probs or values of any chunk differ from those of the whole rollout while the weights are the
    same: the ratio of the first minibatch has to be 1. Those of replays count as log 1."""
    view = VIEWS[view]
    agent, _ = make_agent(script, view)
    rollout = random_rollout(script, agent, view)
    rollout.compute_advantages(*rollout.log_probs_and_values(agent), script.Args())
    seen = 0
    for batch in rollout.minibatches(2, length, np.random.default_rng(1)):
        log_probs, _, values, _ = agent(batch.obs, batch.reset_rows, batch.actions, batch.state)
        played = ~batch.reset_rows
        own = played & ~batch.replayed
        close(log_probs[own], batch.old_log_probs[own], atol=1e-4)
        close(values[played], batch.old_values[played], atol=1e-4)
        assert (batch.old_log_probs[batch.replayed] == 0).all() and batch.obs.shape[0] == length
        seen += played.sum()
    assert seen == (~rollout.reset_rows).sum()


def textbook_loss(agent, batch, args):
    """(loss, figures) of Sequences, row by row, with torch's distributions."""
    rows = []
    for b in range(batch.obs.shape[1]):
        features, _ = slow_features(agent, batch.obs[:, b], batch.reset_rows[:, b], batch.state[b])
        output, values = agent.actor(features), agent.critic(features)[:, 0]
        for t in range(len(features)):
            if batch.reset_rows[t, b]:
                continue
            if agent.continuous:
                pi = torch.distributions.Independent(torch.distributions.Normal(output[t], agent.log_std.exp()), 1)
                log_prob = pi.log_prob(batch.actions[t, b])
            else:
                pi = torch.distributions.Categorical(logits=output[t])
                log_prob = pi.log_prob(batch.actions[t, b, 0])
            at = lambda name, t=t, b=b: getattr(batch, name)[t, b]
            log_ratio = log_prob - at("old_log_probs")
            rows.append((log_ratio, at("advantages"), values[t], at("old_values"), at("returns"), pi.entropy(),
                         at("replayed")))  # fmt: skip
    log_ratios, advantages, values, old_values, returns, entropies, replayed = map(torch.stack, zip(*rows))
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    ratios, eps = log_ratios.exp(), args.clip_coef
    near = torch.where(advantages > 0, ratios.clamp(max=1 + eps), ratios.clamp(min=1 - eps))
    errors = (values - returns) ** 2
    if args.clip_vloss:
        moved = (values - old_values).clamp(-args.clip_vloss_coef, args.clip_vloss_coef)
        errors = torch.maximum(errors, (old_values + moved - returns) ** 2)
    own = ratios[~replayed]
    figures = {"policy_loss": -(near * advantages).mean(), "value_loss": errors.mean() / 2}
    figures |= {"entropy": entropies.mean(), "approx_kl": (own - 1 - own.log()).sum() / max(1, len(own))}
    figures |= {"clip_fraction": ((own > 1 + eps) | (own < 1 - eps)).sum() / max(1, len(own))}
    loss = figures["policy_loss"] - args.ent_coef * figures["entropy"] + args.vf_coef * figures["value_loss"]
    return loss, {"loss": loss} | figures


CLIPPED = {"norm_adv": False, "clip_vloss": True, "clip_vloss_coef": 0.01}


@pytest.mark.parametrize("action_space", [TWO, spaces.Box(-1, 1, (2,))], ids=["Discrete", "Box"])
@pytest.mark.parametrize("more", [{}, CLIPPED], ids=["plain", "clipped"])
def test_loss(script, action_space, more):
    """Fails if reset rows enter loss, advantages or figures, or replays the figures of how far the policy has moved."""
    agent, args = make_agent(script, action_space=action_space, **more)
    rollout = random_rollout(script, agent, LINE)
    rollout.compute_advantages(*rollout.log_probs_and_values(agent), args)
    for name in ("advantages", "returns", "old_log_probs"):
        getattr(rollout, name)[torch.as_tensor(rollout.reset_rows)] = 1e6
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    for batch in rollout.minibatches(2, 8, np.random.default_rng(1)):
        loss, figures = script.sequence_loss(agent, batch, args)
        expected, expected_figures = textbook_loss(agent, batch, args)
        parameters = list(agent.parameters())
        for one, other in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)):
            close(one, other, atol=1e-4)
        assert figures.keys() == expected_figures.keys()
        for name in figures:
            close(figures[name], expected_figures[name], atol=1e-4)
        assert figures["approx_kl"] > 0


def test_figures_of_nothing_but_replays(script):
    """Fails if a minibatch without a row of the agent's own gives NaN: nothing has moved."""
    agent, args = make_agent(script)
    rollout = random_rollout(script, agent, LINE)
    rollout.demo_ids[:] = 1
    rollout.compute_advantages(*rollout.log_probs_and_values(agent), args)
    (batch,) = rollout.minibatches(1, 8, np.random.default_rng(1))
    _, figures = script.sequence_loss(agent, batch, args)
    assert figures["approx_kl"] == 0 and figures["clip_fraction"] == 0 and figures["loss"].isfinite()


@pytest.mark.parametrize("more", [{}, {"anneal_lr": False, "normalize_obs": True, "normalize_reward": True}], ids=str)
def test_training(script, more):
    """Fails if the weights of a short training differ from those that torch's own Adam gives with the slow loss on the
    same minibatches, or if statistics have seen something else than the played rows."""
    settings = {"update_epochs": 2, "learning_rate": 5e-2, "max_grad_norm": 0.2} | more
    run, rollouts = train_on_walks(script, 2, **settings)
    agent = copy.deepcopy(run.calls[0].agent)
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
    steps = 0
    for i, (call, rollout) in enumerate(zip(run.calls, rollouts)):
        played, new_rollout = ~rollout.reset_rows, i % 2 == 0
        if new_rollout:
            optimizer.param_groups[0]["lr"] = 5e-2 * (1 - steps / 14 if run.args.anneal_lr else 1)
            close(run.figures["learning_rate"][i // 2], optimizer.param_groups[0]["lr"])
            steps += (played & (rollout.demo_ids == 0)).sum()
        if run.args.normalize_obs:
            agent.obs_stats.load_state_dict(call.agent.obs_stats.state_dict())
            seen = [rollout.obs[:-1][~rollout.reset_rows] for rollout in rollouts[: i // 2 * 2 : 2]]
            if seen:
                close(agent.obs_stats.mean, np.concatenate(seen).mean(0))
            assert np.abs(rollout.rewards[played]).max() <= 10
        loss, _ = textbook_loss(agent, call.batch, run.args)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.2)
        optimizer.step()
        torch.testing.assert_close(run.figures["loss"][i], loss.detach(), atol=1e-3, rtol=1e-3)
    for one, other in zip(run.agent.parameters(), agent.parameters()):
        close(one, other, atol=1e-3)
    assert set(run.figures) == set(script.FIGURES)


def test_target_kl(script):
    """Fails if --target-kl does nothing: rollouts of four epochs, all of them, or the first two of each."""
    for target_kl, steps in ((None, 4), (1e9, 4), (1e-12, 2)):  # in the first epoch nothing has moved yet
        _, rollouts = train_on_walks(script, 2, update_epochs=4, learning_rate=1e-2, target_kl=target_kl)
        begins = [one.obs.tobytes() != other.obs.tobytes() for one, other in zip(rollouts[1:], rollouts)]
        assert len(rollouts) == steps * (1 + sum(begins)) and sum(begins) > 0


def test_rewards_that_are_learnt_from(script):
    """Fails if --clip-reward learns from anything but signs, or if demos and reported returns have signs as well."""
    run, rollouts = train_on_walks(script, 8, clip_reward=True)
    assert set(np.unique([rollout.rewards for rollout in rollouts])) == {-1, 0, 1}
    assert max(total for _, total in run.episodes) > 20
    assert max(demo.rewards.max() for demo in run.parts["demos"].value_demos) > 5


def test_cells_enter_one_hot(script):
    """A cell (door, blue, locked) = (4, 2, 2) lights inputs 4, 11 + 2 and 17 + 2. Colours are no objects: refused."""
    images = torch.zeros(1, 2, 2, 3, dtype=torch.uint8)
    images[0, 0, 1] = torch.tensor([4, 2, 2])
    one_hot = script.GridPatches((2, 2, 3)).one_hot(images)
    lit = [np.flatnonzero(x).tolist() for x in one_hot.reshape(4, 21).numpy()]
    assert lit == [[0, 11, 17], [4, 11 + 2, 17 + 2], [0, 11, 17], [0, 11, 17]]
    images[0, 1, 1] = 200
    with contextlib.suppress(script.UserError):
        assert script.GridPatches((2, 2, 3)).one_hot(images) is None, "taken"


def test_a_return_at_the_threshold_is_good(script):
    """Fails if 0.9, which float32 makes a little less, does not reach a threshold of 0.9; a hundredth less does not."""
    total = float(np.array([0, 0, 0.9], np.float32).sum(dtype=np.float64))
    assert total < 0.9 and script.is_good(total, 0.9) and not script.is_good(total - 0.01, 0.9)
    assert script.is_good(-200.0, -200.0) and not script.is_good(-200.01, -200.0)


@pytest.mark.parametrize("actions, kind", [([[256, 1]], "MultiBinary"), ([[300, 3]], "Box"), ([[-1, 3]], "Box")])
def test_actions_beyond_their_type_are_refused(script, actions, kind):
    """Fails if an action that only its type, as it overflows, brings into the space is taken."""
    space = spaces.MultiBinary(2) if kind == "MultiBinary" else spaces.Box(0, 255, (2,), np.uint8)
    with pytest.raises(ValueError, match="not in"):
        script.from_env(actions, space)


def test_patches_are_seen_alike_wherever_they_are(script):
    """Fails if the weights differ over the view, or if rows, columns and features get mixed up: features of a patch by
    a loop over its cells."""
    torch.manual_seed(0)
    patches = script.GridPatches((5, 4, 3), features=2)
    images = torch.randint(0, 4, (3, 5, 4, 3), dtype=torch.uint8)
    out = patches(images).detach().unflatten(1, (2, 3, 2))  # features, 5 - 2 places across, 4 - 2 down
    assert patches.outputs == 12
    for b, f, x, y in np.ndindex(3, 2, 3, 2):
        total = patches.conv.bias[f].item()
        for i, j in np.ndindex(3, 3):
            one_hot = patches.one_hot(images[b, x + i, y + j][None, None, None])[0, 0, 0]
            total += (patches.conv.weight[f, :, i, j] * one_hot).sum().item()
        assert out[b, f, x, y].item() == pytest.approx(max(0.0, total), abs=1e-5)


# ------------------------------------------------------------------------------------------------------------- acting


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_actions_as_the_environment_takes_them(script, name):
    """Fails if actions arrive unclipped, unshifted, not rounded where the space is of integers, or in another shape."""
    space, actions, expected = ACTION_SPACES[name]
    actual = script.to_env(np.array(actions), space)
    assert all(action in space for action in actual) and actual.dtype == space.dtype
    close(actual, expected)


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_actions_of_the_environment_as_the_agent_has_them(script, name):
    """Fails if there and back again is another action."""
    space, _, _ = ACTION_SPACES[name]
    space.seed(1)
    actions = np.array([space.sample() for _ in range(20)])
    inner = script.from_env(actions, space)
    assert inner.shape == (20, math.prod(space.shape)) and inner.dtype in (np.int64, np.float32)
    close(script.to_env(inner, space), actions)
    if not isinstance(space, spaces.Box):
        assert inner.min() == 0
    for wrong in (actions + 100, actions + 0.5 if not isinstance(space, spaces.Box) else actions * np.nan):
        with pytest.raises(ValueError):
            script.from_env(wrong, space)


def test_gaussian_actions_have_their_mean_and_deviation(script):
    """10,000 draws around the mean, of which 5 standard errors are 0.05 deviations; without a generator the mean."""
    agent, _ = make_agent(script, action_space=spaces.Box(-100, 100, (1,)))
    obs, reset_rows, state = np.zeros((10_000, 1), np.float32), np.zeros(10_000, bool), torch.zeros(10_000, 8)
    agent.log_std.data[:] = math.log(3)
    mean, _ = agent.sample(obs, reset_rows, state)
    drawn, _ = agent.sample(obs, reset_rows, state, np.random.default_rng(1))
    assert mean.std() < 1e-6 and abs(drawn.mean() - mean.mean()) < 0.15 and abs(drawn.std() - 3) < 0.15


def test_act_remembers_and_forgets(script):
    """Fails if `act` forgets within an episode, or remembers the last one."""
    agent, _ = make_agent(script, VIEWS["vector"], spaces.Box(-100, 100, (1,)))
    obs = np.random.default_rng(0).standard_normal((5, 2, 3)).astype(np.float32)
    agent.begin_episodes(2)
    first = [agent.act(x) for x in obs]
    agent.begin_episodes(2)
    again = [agent.act(x) for x in obs]
    np.testing.assert_array_equal(first, again)
    on = [agent.act(x) for x in obs]
    assert not np.allclose(first[0], on[0])
    agent.act(obs[0][:1])  # another number of slots: these must be new episodes
    np.testing.assert_array_equal(agent.act(obs[0]), first[0])


@pytest.mark.parametrize("sample_actions", [False, True])
def test_evaluations_can_draw_actions(script, sample_actions):
    """Logits (ln 3, 0): --sample-actions takes the first in 3 of 4 steps, anew in each evaluation, else in all."""
    agent, _ = make_agent(script, recurrent=False, sample_actions=sample_actions)
    agent.actor.weight.data.zero_()
    agent.actor.bias.data[:] = torch.tensor([math.log(3), 0])
    drawn = []
    for _ in range(2):
        agent.begin_episodes(10_000)
        drawn.append([agent.act(np.zeros((10_000, 1), np.float32)) for _ in range(2)])
    np.testing.assert_array_equal(*drawn)
    first, second = drawn[0]
    if sample_actions:
        assert abs((first == 0).mean() - 0.75) < 0.02  # 4.6 standard deviations
        assert abs((first == second).mean() - (0.75**2 + 0.25**2)) < 0.02  # independent
    else:
        assert (first == 0).all() and (second == 0).all()
