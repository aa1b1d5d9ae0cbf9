"""rainbow.py against slow and obvious versions of it: projection, noise, windows, stacks, the tree, whole trainings."""

import math
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.probes.envs import Walk
from tests.rainbow_envs import Frames
from tests.tools import close, rehearse, vector_env

VECTOR, TWO = spaces.Box(-np.inf, np.inf, (3,)), spaces.Discrete(2)
STACK = spaces.Box(0, 255, (3, 2, 2), np.uint8)
FRACTIONS = st.sampled_from([0, 0.125, 0.5, 0.75, 0.9, 1])

# -------------------------------------------------------------------------------------------------------- projection


def slow_project(reward, terminated, gamma, probs, support):
    """One distribution, atom by atom, as algorithm 1 of arXiv 1707.06887 has it."""
    distance = support[1] - support[0]
    projected = [0.0] * len(support)
    for z, p in zip(support, probs):
        y = reward + (0 if terminated else gamma * z)
        y = min(max(y, support[0]), support[-1])
        b = (y - support[0]) / distance
        lower, upper = math.floor(b), math.ceil(b)
        if lower == upper:
            projected[lower] += p
        else:
            projected[lower] += p * (upper - b)
            projected[upper] += p * (b - lower)
    return projected


@settings(max_examples=40)
@given(
    atoms=st.integers(2, 7),
    v_min=st.integers(-3, 3),
    width=st.sampled_from([0.5, 1, 3, 6]),
    steps=st.lists(
        st.tuples(st.sampled_from([-9, -1, -0.25, 0, 0.3, 1, 2, 9]), st.booleans(), FRACTIONS), min_size=1, max_size=5
    ),
    seed=st.integers(0, 99),
)
def test_project(script, atoms, v_min, width, steps, seed):
    """Fails if a probability is lost, goes to a wrong atom, or to another row. The mean is kept if nothing is cut."""
    support = torch.linspace(v_min, v_min + width, atoms)
    probs = torch.tensor(np.random.default_rng(seed).dirichlet(np.ones(atoms), len(steps)), dtype=torch.float32)
    rewards, terminated, gamma = (torch.tensor(column) for column in zip(*steps))
    projected = script.project(rewards.float(), terminated, gamma.float(), probs, support)
    exact = np.linspace(v_min, v_min + width, atoms).tolist()
    for i, (reward, over, discount) in enumerate(steps):
        close(projected[i], slow_project(reward, over, discount, probs[i].tolist(), exact), atol=1e-4)
        y = [reward + (0 if over else discount * z) for z in exact]
        if v_min <= min(y) and max(y) <= v_min + width:
            close((projected[i] * support).sum(), (probs[i] * torch.tensor(y)).sum(), atol=1e-4)
    close(projected.sum(1), np.ones(len(steps)), atol=1e-4)


# ------------------------------------------------------------------------------------------------------------- noise


def test_noise_of_many_draws(script):
    """f(e) = sign(e) sqrt|e| has the mean 0 and the variance E|e| = sqrt(2 / pi) = 0.798; noise_W is a product of two.

    So the weights have the mean W and the deviation sigma_W 0.798. Fails for plain Gaussian noise, for one number per
    weight, and if inputs and outputs share their numbers. (Four standard errors: 0.08.)
    """
    torch.manual_seed(0)
    noisy, rng = script.NoisyLinear(3, 2, sigma=0.5), np.random.default_rng(0)
    drawn = []
    for _ in range(1_500):
        noisy.draw_noise(rng)
        drawn.append((noisy(torch.eye(3)) - noisy(torch.zeros(1, 3))).detach().T)  # the noisy weights, (2, 3)
    noise = (torch.stack(drawn) - noisy.weight.detach()) / noisy.sigma_weight.detach()
    close(noise.mean(0), np.zeros((2, 3)), atol=0.08)
    close(noise.std(0), np.full((2, 3), math.sqrt(2 / math.pi)), atol=0.08)
    close(noise[:, 0, 0] * noise[:, 1, 1], noise[:, 0, 1] * noise[:, 1, 0], atol=1e-3)  # of rank one
    assert abs((noise[:, 0, 0] * noise[:, 1, 1]).mean()) < 0.08


def new_network(script, space=VECTOR, actions=4, start=0, **args):
    """A RainbowNetwork whose weights are random, so that nothing is zero by chance."""
    torch.manual_seed(0)
    args = {"hidden_sizes": (8, 5), "v_min": -2.0, "v_max": 3.0, "num_atoms": 6} | args
    agent = script.RainbowNetwork(space, spaces.Discrete(actions, start=start), script.Args(**args))
    for p in agent.parameters():
        p.data += 0.3 * torch.randn(p.shape)
    return agent


def slow_layer(layer, x):
    """A linear layer, noisy or not, for one input x."""
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    if hasattr(layer, "sigma_weight") and layer.training:
        for i in range(len(bias)):
            bias[i] += layer.sigma_bias[i].item() * layer.output_noise[i]
            for j in range(len(x)):
                weight[i, j] += layer.sigma_weight[i, j].item() * layer.output_noise[i] * layer.input_noise[j]
    return weight @ x + bias


def slow_outputs(agent, obs, actions, atoms):
    """Outputs (actions, atoms) for one observation, layer by layer."""
    x = torch.tensor(obs, dtype=torch.float32)
    for module in agent.body:
        x = slow_layer(module, x) if isinstance(module, torch.nn.Linear) else x.clamp(min=0)
    outputs = []
    for stream in [agent.advantage] if agent.value is None else [agent.advantage, agent.value]:
        y = x
        for module in stream:
            y = slow_layer(module, y) if isinstance(module, torch.nn.Linear) else y.clamp(min=0)
        assert len(y) % atoms == 0
        outputs.append(y.reshape(-1, atoms))
    if agent.value is None:
        return outputs[0]
    return torch.stack([outputs[1][0] + a - outputs[0].sum(0) / actions for a in outputs[0]])


@pytest.mark.parametrize("noisy", [True, False])
@pytest.mark.parametrize("distributional", [True, False])
@pytest.mark.parametrize("dueling", [True, False])
def test_network(script, dueling, distributional, noisy):
    """Fails if a stream, an atom or a noisy layer is left out or put in another place; with fewer hidden layers, too.

    Only the streams are noisy, every layer of them; evaluations see no noise, and training has it again afterwards.
    """
    atoms = 6 if distributional else 1
    obs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    for hidden_sizes in ((8, 5), (7,), ()):
        switches = {"dueling": dueling, "distributional": distributional, "noisy": noisy}
        agent = new_network(script, hidden_sizes=hidden_sizes, **switches)
        agent.draw_noise(np.random.default_rng(1))
        streams = [agent.advantage] + ([agent.value] if dueling else [])
        linears = [m for stream in streams for m in stream if isinstance(m, torch.nn.Linear)]
        assert len(linears) == len(streams) * min(2, len(hidden_sizes) + 1)
        assert [isinstance(m, script.NoisyLinear) for m in linears] == [noisy] * len(linears)
        assert not any(isinstance(m, script.NoisyLinear) for m in agent.body)
        for evaluating in (False, True):
            agent.train(not evaluating)
            expected = [slow_outputs(agent, x, 4, atoms) for x in obs]
            close(agent.outputs(torch.tensor(obs)), torch.stack(expected), atol=1e-4)
            q = [x[:, 0] for x in expected]
            if distributional:
                probs = [x.softmax(1) for x in expected]
                close(agent.log_probs(torch.tensor(obs)).exp(), torch.stack(probs), atol=1e-4)
                q = [(p * torch.tensor([-2.0, -1, 0, 1, 2, 3])).sum(1) for p in probs]
            close(agent(torch.tensor(obs)), torch.stack(q), atol=1e-4)
            best = torch.stack(q).argmax(1).numpy()
            assert (agent.greedy(obs) == best).all()
        agent.train()
        assert (agent.act(obs) == best).all() and agent.training


def test_normalised_observations(script):
    """Fails if observations are not normalised, or by something else than the mean and deviation of those seen."""
    obs = np.random.default_rng(0).normal(3, 9, (20, 3)).astype(np.float32)
    agent = new_network(script, normalize_obs=True)
    agent.obs_stats.update(obs)
    seen = agent.features(torch.tensor(obs))
    agent.obs_stats = None
    close(seen, agent.features(torch.tensor((obs - obs.mean(0)) / obs.std(0))), atol=1e-4)


def test_sigmas(script):
    """Fails if sigmas do not begin at sigma / sqrt(inputs), or are not what is logged, or if there is no gradient."""
    args = script.Args(hidden_sizes=(8, 5), sigma=0.5)
    agent = script.RainbowNetwork(VECTOR, TWO, args)
    sigmas = [0.5 / math.sqrt(inputs) for inputs in (8, 5, 8, 5)]
    assert agent.mean_sigma() == pytest.approx(np.mean(sigmas))
    agent.advantage[2].sigma_weight.data *= -1  # its sign means nothing
    assert agent.mean_sigma() == pytest.approx(np.mean(sigmas))
    agent.draw_noise(np.random.default_rng(0))
    agent(torch.ones(1, 3))[0, 0].backward()
    assert all(layer.sigma_weight.grad.abs().sum() > 0 for layer in agent.noisy_layers())
    assert new_network(script, noisy=False).mean_sigma() == 0


@pytest.mark.parametrize("shape", [(3, 36, 40), (36, 40, 3)])
def test_images(script, shape):
    """Fails if images in one of the two layouts are not what the network sees, scaled to [0, 1]."""
    space = spaces.Box(0, 255, shape, np.uint8)
    agent = new_network(script, space, noisy=False)
    images = np.random.default_rng(0).integers(256, size=(2, *shape), dtype=np.uint8)
    channels_first = images if shape[0] == 3 else images.transpose(0, 3, 1, 2)
    convolved = agent.body.layers(torch.tensor(channels_first / 255, dtype=torch.float32))
    close(agent.features(torch.tensor(images)), convolved)
    assert [m.out_features for m in agent.advantage if isinstance(m, torch.nn.Linear)] == [512, 24]


def test_actions_are_shifted_and_typed(script):
    """Fails if a Discrete space that begins at another number than 0 gets actions outside of it."""
    agent = new_network(script, start=-1)
    actions = agent.act(np.random.default_rng(0).normal(0, 9, (50, 3)).astype(np.float32))
    assert actions.dtype == np.int64 and all(agent.action_space.contains(action) for action in actions)
    everything = agent.explore(np.zeros((200, 3), np.float32), 1.0, np.random.default_rng(0))
    assert set(agent.to_env(everything)) == {-1, 0, 1, 2}


def test_exploration(script):
    """Fails if epsilon is not the share of random actions, or random ones are not uniform. (3 sigma: 0.014)"""
    agent, rng = new_network(script), np.random.default_rng(0)
    obs = np.zeros((10_000, 3), np.float32)
    greedy = agent.greedy(obs)[0]
    assert (agent.explore(obs, 0.0, rng) == greedy).all()
    shares = np.bincount(agent.explore(obs, 0.4, rng), minlength=4) / 10_000
    close(shares, np.where(np.arange(4) == greedy, 0.7, 0.1), atol=0.015)


# ------------------------------------------------------------------------------------------------------------ losses


def random_batch(script, size=16, actions=4):
    """NStepTransitions without any sense."""
    rng = np.random.default_rng(0)
    obs, next_obs = torch.tensor(rng.normal(size=(2, size, 3)), dtype=torch.float32)
    rewards = torch.tensor(rng.normal(0, 2, size), dtype=torch.float32)
    terminated = torch.tensor(rng.random(size) < 0.3)
    discounts = torch.tensor(rng.choice([0.9, 0.81], size), dtype=torch.float32)
    chosen = torch.tensor(rng.integers(actions, size=(size, 1)))
    return script.NStepTransitions(obs, chosen, rewards, next_obs, terminated, discounts)


def slow_loss(agent, target, transition, args):
    """(loss, error, Q, mean of the target) of one transition, by the book; the loss has a gradient."""
    obs, (action,), reward, next_obs, terminated, discount = transition
    discount = 0.0 if terminated else discount.item()
    with torch.no_grad():
        best = (agent if args.double else target)(next_obs[None])[0].argmax()
        future = target(next_obs[None])[0, best].item()
    y = reward.item() + discount * future
    q = agent(obs[None])[0, action]
    if not args.distributional:
        error = abs(y - q)
        return (0.5 * error**2 if error < 1 else error - 0.5), error.item(), q.item(), y
    probs = target.outputs(next_obs[None])[0, best].softmax(0).tolist()
    wanted = slow_project(reward.item(), terminated, discount, probs, agent.support.tolist())
    predicted = agent.outputs(obs[None])[0, action].softmax(0)
    loss = sum(m * (math.log(m) - p.log()) for m, p in zip(wanted, predicted) if m > 0)
    return loss, loss.item(), q.item(), y


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("distributional", [True, False])
def test_losses(script, distributional, double):
    """Fails if losses, errors, figures or the gradient are not the textbook's, written out for each transition."""
    switches = {"distributional": distributional, "double": double, "normalize_obs": True}
    agent, target = (new_network(script, **switches) for _ in range(2))
    agent.obs_stats.update(np.random.default_rng(3).normal(1, 3, (50, 3)))
    target.obs_stats = agent.obs_stats
    for i, network in enumerate((agent, target)):
        network.draw_noise(np.random.default_rng(i))
    batch, args = random_batch(script), script.Args(**switches)
    losses_of = script.distributional_losses if distributional else script.td_losses
    losses, errors, figures = losses_of(agent, target, batch, args)
    expected = [slow_loss(agent, target, transition, args) for transition in zip(*batch)]
    close(losses, torch.stack([row[0] for row in expected]), atol=1e-4)
    close(errors, [row[1] for row in expected], atol=1e-4)
    close(figures["q"], np.mean([row[2] for row in expected]), atol=1e-4)
    if distributional:
        means = [row[3] for row in expected]
        close([float(figures["target_min"]), float(figures["target_max"])], [min(means), max(means)], atol=1e-4)
    else:
        assert max(row[1] for row in expected) > 1  # Huber's corner is passed
    weights = torch.linspace(0.1, 1, 16)
    parameters = [*agent.parameters(), *target.parameters()]
    gradients = torch.autograd.grad((weights * losses).mean(), parameters, allow_unused=True)
    slow = torch.autograd.grad(sum(w * row[0] for w, row in zip(weights, expected)) / 16, list(agent.parameters()))
    close(torch.cat([g.flatten() for g in gradients[: len(slow)]]), torch.cat([g.flatten() for g in slow]), atol=1e-4)
    assert all(gradient is None for gradient in gradients[len(slow) :]) and not errors.requires_grad


# ------------------------------------------------------------------------------------------------------------ buffer


def play(buffer, plans, steps, restarts=(), observe=lambda obs: obs):
    """Play `plans` in a buffer: (length, terminated) of the episodes of each environment, repeated.

    Returns {(environment, episode): [(obs, action, reward, next obs, terminated), …]} and, for each step that the
    environments took together, the slots that add returned. Before the steps in `restarts` all begin anew.
    """
    ends = [[(length, "terminated" if over else "truncated") for length, over in plan] for plan in plans]
    played, slots = {}, []
    for t in range(steps):
        if t == 0 or t in restarts:
            envs = vector_env([lambda n=n: Walk(ends[n], n + len(plans) * t) for n in range(len(plans))], len(plans))
            obs, _ = envs.reset()
            reset_rows = np.zeros(len(plans), bool)
            buffer.begin_episodes()
        actions = np.full(len(plans), t % 2)
        next_obs, rewards, terminated, truncated, _ = envs.step(actions)
        shown, next_shown = (np.array([observe(row) for row in rows]) for rows in (obs, next_obs))
        step = actions[:, None], rewards, terminated, truncated, reset_rows
        slots.append(buffer.add(shown, *step, next_shown).tolist())
        for n in np.flatnonzero(~reset_rows):
            row = shown[n], t % 2, rewards[n], next_shown[n], terminated[n], truncated[n]
            played.setdefault(tuple(obs[n, :2]), []).append(row)
        obs, reset_rows = next_obs, terminated | truncated
    return played, slots


def slow_windows(played, n, gamma):
    """All transitions of these steps, each (obs, action, return, next obs, terminated, discount), but no open ones."""
    transitions = []
    for episode in played.values():
        over = episode[-1][4] or episode[-1][5]
        for first in range(len(episode)):
            window = episode[first : first + n]
            if len(window) == n or over:
                total = sum(gamma**k * step[2] for k, step in enumerate(window))
                transitions.append((*window[0][:2], total, *window[-1][3:5], gamma ** len(window)))
    return transitions


def sorted_rows(transitions):
    """Transitions as rows of numbers, in one order: all observations are different."""
    rows = [np.concatenate([np.asarray(field, float).ravel() for field in row]) for row in transitions]
    return np.array(sorted(rows, key=lambda row: row.tolist()))


episode_plans = st.lists(st.tuples(st.integers(1, 7), st.booleans()), min_size=1, max_size=3)
plays = {
    "plans": st.lists(episode_plans, min_size=1, max_size=3),
    "n": st.integers(1, 4),
    "steps": st.integers(1, 30),
    "restarts": st.lists(st.integers(1, 20), max_size=2),
    "saved": st.booleans(),
}


def check_play(buffer, again, capacity, plans, n, steps, restarts, saved, **more):
    """What the buffer returns is what the loop says: all of it, and nothing but the last `capacity` transitions."""
    played, slots = play(buffer, plans, steps, restarts, **more)
    flat = [slot for step_slots in slots for slot in step_slots]
    assert flat == [i % capacity for i in range(len(flat))]
    if saved:  # a checkpoint, and on from there
        again.load_state_dict(buffer.state_dict())
        buffer = again
    assert buffer.size == min(len(flat), capacity) and buffer.position == len(flat) % capacity
    expected = slow_windows(played, n, 0.5)
    assert len(expected) == len(flat)
    if not expected:
        return
    stored = sorted_rows(zip(*buffer.get(np.arange(buffer.size))))
    expected = sorted_rows(expected)
    if len(flat) <= capacity:
        close(stored, expected)
    else:  # the ring holds the last ones: they are among all, and no two are the same
        keys = {tuple(row) for row in expected.round(4).tolist()}
        assert (
            all(tuple(row) in keys for row in stored.round(4).tolist()) and len(np.unique(stored, axis=0)) == capacity
        )


@settings(max_examples=40)
@given(capacity=st.integers(12, 40), **plays)
def test_n_step_windows(script, capacity, **settings):
    """Fails if any window is not the one that the loop cuts out of its episode; also after a checkpoint."""
    settings["restarts"] = [t for t in settings["restarts"] if t < settings["steps"]]
    buffers = [
        script.NStepBuffer(capacity, VECTOR, TWO, num_envs=len(settings["plans"]), n_step=settings["n"], gamma=0.5)
        for _ in range(2)
    ]
    check_play(*buffers, capacity, **settings)


def test_the_ring_holds_the_last_transitions(script):
    """Six steps of one environment in four slots: 5 and 6 have taken the place of 1 and 2. Slot 0 is never skipped."""
    buffer = script.NStepBuffer(4, VECTOR, TWO, n_step=2, gamma=0.5)
    _, slots = play(buffer, [[(9, True)]], 7)
    assert slots == [[], [0], [1], [2], [3], [0], [1]]
    close(buffer.rewards, [5 + 3, 6 + 3.5, 3 + 2, 4 + 2.5])


def stack_of(obs):
    """The last three frames of Walk's observation (name, episode, step); before the first there is another's."""
    name, episode, step = obs.astype(int)
    frames = [(97 * name + 31 * episode + 7 * (step - i)) % 256 for i in (2, 1, 0)]
    return np.array([np.full((2, 2), frame) for frame in frames], np.uint8)


@settings(max_examples=40)
@given(capacity=st.integers(12, 40), **plays)
def test_frame_stacks(script, capacity, **settings):
    """Fails if a stack is put together wrongly anywhere: first steps, ends, several environments, a checkpoint."""
    settings["restarts"] = [t for t in settings["restarts"] if t < settings["steps"]]
    more = {"num_envs": len(settings["plans"]), "n_step": settings["n"], "gamma": 0.5}
    stacked = [script.FrameStackBuffer(capacity, STACK, TWO, **more) for _ in range(2)]
    whole = script.NStepBuffer(capacity, STACK, TWO, **more)
    play_settings = {name: settings[name] for name in ("plans", "steps", "restarts")}
    _, slots = play(stacked[0], **play_settings, observe=stack_of)
    _, expected_slots = play(whole, **play_settings, observe=stack_of)
    assert slots == expected_slots
    if settings["saved"]:
        state = stacked[0].state_dict()
        stacked[1].load_state_dict(state)
        again = stacked[1].state_dict()
        assert all(torch.equal(state[name], again[name]) for name in ("frames", "stacks"))
        stacked = stacked[1:]
    if whole.size:
        for field, expected in zip(stacked[0].get(np.arange(whole.size)), whole.get(np.arange(whole.size))):
            assert field.dtype == expected.dtype and torch.equal(field, expected)


def test_every_frame_is_kept_once(script):
    """Two episodes of ten steps in four slots, n = 1: the last four steps need 3 + 4 frames, whatever came before.

    With a million slots for Atari, and episodes of 100 steps, shorter than any game's, that is less than 8 GB.
    """
    buffer = script.FrameStackBuffer(4, STACK, TWO)
    play(buffer, [[(10, True)]], 21, observe=stack_of)
    stacks = [*buffer.obs, *buffer.next_obs]
    frames = {id(frame): frame for stack in stacks for frame in stack}
    assert len(frames) == len(buffer.state_dict()["frames"]) == 7
    assert all(frame.base is None for frame in frames.values())  # none is a part of something larger
    sizes = [sys.getsizeof(frame) + sys.getsizeof(stack) for stack, frame in zip(stacks, frames.values())]
    per_step = max(sizes) + 8 * 8 + 84 * 84  # besides the pixels, the numbers of the other arrays and of the sum tree
    assert (per_step + 4 * 84 * 84 / 100) * 1e6 < 8e9


def test_a_stack_may_change_after_it_was_added(script):
    """Fails if a buffer keeps the environment's own arrays, which it may write over, while a window is open."""
    no = np.zeros(1, bool)
    for buffer_class, k in ((script.NStepBuffer, 3), (script.FrameStackBuffer, 3)):
        buffer = buffer_class(4, STACK, TWO, n_step=2)
        obs, next_obs = np.full((1, k, 2, 2), 1, np.uint8), np.full((1, k, 2, 2), 1, np.uint8)
        for _ in range(2):
            buffer.add(obs, np.zeros((1, 1), int), np.zeros(1), no, no, no, next_obs)
            obs[:], next_obs[:] = 9, 9
        assert buffer.get(np.array([0])).obs.max() == 1


def test_what_is_not_a_stack_is_refused(script):
    """Fails if images that are no stacks of frames, newest last, are silently stored as if they were."""
    buffer, no = script.FrameStackBuffer(4, STACK, TWO), np.zeros(1, bool)
    obs = np.arange(12, dtype=np.uint8).reshape(1, 3, 2, 2)
    with pytest.raises(script.UserError, match="stacks of frames"):
        buffer.add(obs, np.zeros((1, 1), int), np.zeros(1), no, no, no, obs + 1)


def test_sampling(script):
    """Fails if a slot is left out, drawn before it is filled, or favoured without priorities; or if new transitions
    have no priority with them. (chi-square, 9 degrees: 28 has p = 0.001)
    """
    for alpha in (None, 0.5):
        buffer, rng = script.NStepBuffer(16, VECTOR, TWO, n_step=1, alpha=alpha), np.random.default_rng(0)
        play(buffer, [[(99, True)]], 10)
        assert buffer.tree is None or buffer.tree.nodes[1] == 10
        drawn = np.concatenate([buffer.sample(10, rng)[0] for _ in range(500)])
        counts = np.bincount(drawn, minlength=10)
        assert len(counts) == 10 and ((counts - 500) ** 2 / 500).sum() < 28
    slots, weights, batch = buffer.sample(5, rng, 0.5)
    close(batch.rewards, buffer.rewards[slots])
    close(weights, np.ones(5))
    again = script.NStepBuffer(16, VECTOR, TWO, n_step=1, alpha=0.5)
    buffer.tree.update(np.array([1, 2]), np.array([9.0, 0.1]))
    again.load_state_dict(buffer.state_dict())  # the priorities are part of it
    assert (again.tree.nodes == buffer.tree.nodes).all() and again.tree.highest == buffer.tree.highest
    close(again.tree.highest, 3)


# ---------------------------------------------------------------------------------------------------------- sum tree


@settings(max_examples=40)
@given(
    priorities=st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=1, max_size=40).filter(any),
    batch_size=st.integers(1, 16),
    seed=st.integers(0, 99),
)
def test_tree(script, priorities, batch_size, seed):
    """Fails if the walk through the tree ends elsewhere than a search in the cumulative sums, or in an empty slot."""
    priorities = np.array(priorities)
    tree = script.SumTree(len(priorities), 1.0)
    tree.write(np.arange(len(priorities)), priorities)
    inner = np.arange(1, tree.leaves)
    close(tree.nodes[inner], tree.nodes[2 * inner] + tree.nodes[2 * inner + 1], atol=0)
    slots, weights = tree.sample(batch_size, np.random.default_rng(seed), 0.4)
    numbers = (np.arange(batch_size) + np.random.default_rng(seed).random(batch_size)) * priorities.sum() / batch_size
    cumulative = np.concatenate([[0], priorities.cumsum()])
    slack = 1e-9 * cumulative[-1]  # the sums were rounded in another order
    assert (priorities[slots] > 0).all()
    assert (cumulative[slots] - slack <= numbers).all() and (numbers <= cumulative[slots + 1] + slack).all()
    close(weights, (priorities[slots] / priorities[slots].min()) ** -0.4, atol=1e-4)


def test_tree_never_ends_in_an_empty_slot(script):
    """Fails if a number that rounding has made as large as the sum leads to a slot without priority."""
    tree = script.SumTree(6, 1.0)
    tree.write(np.array([0, 2]), np.array([0.1, 0.2]))
    top = SimpleNamespace(random=lambda size: np.ones(size))  # the upper edge of each part
    assert tree.sample(4, top, 1.0)[0].tolist()[-1] == 2


def test_tree_comes_back_from_a_checkpoint(script):
    """Fails if priorities, their sums or the highest are lost; slots that are updated twice have one priority."""
    tree, again, rng = script.SumTree(37, 0.6), script.SumTree(37, 0.6), np.random.default_rng(0)
    tree.add(np.arange(30))
    for _ in range(20):
        tree.update(rng.integers(30, size=5), rng.normal(0, 3, 5))
    again.load_state_dict(tree.state_dict())
    assert (again.nodes == tree.nodes).all() and again.highest == tree.highest > 1
    assert tree.nodes[1] == pytest.approx(tree.nodes[tree.leaves :].sum())


# ------------------------------------------------------------------------------------------------------ whole trainings

SWITCHES = ["double", "prioritized", "dueling", "multi_step", "distributional", "noisy"]
PLANS = [[(4, "terminated"), (6, "truncated")], [(1, "both"), (7, "truncated"), (2, "terminated")]]
SHORT = {"num_envs": 2, "hidden_sizes": (8, 6), "num_atoms": 5, "v_min": -10.0, "v_max": 90.0, "gamma": 0.8, "seed": 5}
SHORT |= {"batch_size": 6, "learning_starts": 11, "train_frequency": 3, "gradient_steps": 2, "buffer_size": 20}
SHORT |= {"target_network_frequency": 5, "tau": 0.4, "total_timesteps": 36, "learning_rate": 0.02, "n_step": 3}
SHORT |= {"alpha": 0.7, "beta": 0.3, "exploration_fraction": 0.5, "sigma": 0.8}


def draw_noise(network, rng):
    """Two vectors for each noisy layer, in the order of the layers."""
    for stream in (network.advantage, network.value):
        for layer in stream or []:
            if hasattr(layer, "draw_noise"):
                for noise in (layer.input_noise, layer.output_noise):
                    e = rng.standard_normal(len(noise))
                    noise[:] = torch.tensor(np.sign(e) * np.sqrt(np.abs(e)))


def slow_training(script, args, agent):
    """Rainbow written down plainly, with lists and torch's own Adam. Returns (agent, target, {slot: priority})."""
    target = new_network(script, VECTOR, 2, **vars(args))
    target.load_state_dict(agent.state_dict())
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
    envs = vector_env([lambda n=n: Walk(PLANS[n], n) for n in range(2)], 2)
    rng = np.random.default_rng([args.seed, 0])
    obs, _ = envs.reset(seed=int(rng.integers(2**31)))
    reset = [False, False]
    ring, priorities, windows, highest, written, step = {}, {}, {0: [], 1: []}, 1.0, 0, 0
    n_step = args.n_step if args.multi_step else 1
    while step < args.total_timesteps:
        epsilon = 0 if args.noisy else max(0.05, 1 - 0.95 * step / 18)
        beta = 0.3 + 0.7 * step / 36
        learning_rate = 0.02 * (1 - step / 36)
        draw_noise(agent, rng)
        best = agent(torch.tensor(obs)).argmax(1).numpy()
        at_random, any_actions = rng.random(2) < epsilon, rng.integers(2, size=2)
        actions = np.array([a if r else b for a, r, b in zip(any_actions, at_random, best)])
        next_obs, rewards, terminated, truncated, _ = envs.step(actions)
        before = step
        for n in (0, 1):
            if reset[n]:
                continue
            step += 1
            windows[n].append((torch.tensor(obs[n]), actions[n], rewards[n]))
            while len(windows[n]) == n_step or (windows[n] and (terminated[n] or truncated[n])):
                total = sum(0.8**k * reward for k, (*_, reward) in enumerate(windows[n]))
                first_obs, action, _ = windows[n][0]
                reward, discount = np.float32(total), np.float32(0.8 ** len(windows[n]))
                row = first_obs, torch.tensor([action]), reward, torch.tensor(next_obs[n]), terminated[n], discount
                ring[written % 20], priorities[written % 20] = row, highest
                written += 1
                del windows[n][0]
        obs, reset = next_obs, terminated | truncated
        for now in range(before + 1, step + 1):
            for _ in range(2 if now >= 11 and now % 3 == 0 and len(ring) >= 6 else 0):
                if args.prioritized:
                    cumulative = np.cumsum([priorities[slot] for slot in range(len(ring))])
                    numbers = (np.arange(6) + rng.random(6)) * cumulative[-1] / 6
                    slots = np.searchsorted(cumulative, numbers, side="right")
                    weights = np.array([(priorities[slot] / cumulative[-1] * len(ring)) ** -beta for slot in slots])
                    weights /= weights.max()
                else:
                    slots, weights = rng.integers(len(ring), size=6), np.ones(6)
                draw_noise(agent, rng)
                draw_noise(target, rng)
                rows = [slow_loss(agent, target, ring[slot], args) for slot in slots]
                loss = sum(w * row[0] for w, row in zip(weights, rows)) / 6
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.param_groups[0]["lr"] = learning_rate
                optimizer.step()
                for slot, row in zip(slots, rows):
                    if args.prioritized:
                        priorities[slot] = (row[1] + 1e-6) ** 0.7
                        highest = max(highest, priorities[slot])
            if now % 5 == 0:
                for p, q in zip(target.parameters(), agent.parameters()):
                    p.data = 0.6 * p.data + 0.4 * q.data
    return agent, target, priorities


def check_training(script, off):
    """The weights and priorities after 36 steps are those of the algorithm written down plainly."""
    switches = {name: name not in off for name in SWITCHES}
    switches["max_grad_norm"] = 0.5 if off else 1e6  # gradients are larger: all are shortened, or none
    loss = "distributional_losses" if switches["distributional"] else "td_losses"
    makers = [lambda n=n: Walk(PLANS[n], n) for n in range(2)]
    networks = []
    make_agent = script.make_agent

    def make_and_copy(args, envs):
        """Weights at random, which the slow version begins with as well."""
        for _ in range(2):
            networks.append(make_agent(args, envs))
            torch.manual_seed(0)
            for p in networks[-1].parameters():
                p.data += 0.3 * torch.randn(p.shape)
        return networks[0]

    with mock.patch.object(script, "make_agent", make_and_copy):
        run = rehearse(script, *makers, buffer="NStepBuffer", loss=loss, **SHORT | switches)
    agent, target, priorities = slow_training(script, run.args, networks[1])
    for expected, network in ((agent, run.agent), (target, run.parts["target"])):
        for p, q in zip(expected.parameters(), network.parameters()):
            close(p, q, atol=2e-4)
    if switches["prioritized"]:
        tree = run.parts["buffer"].tree
        found = tree.nodes[tree.leaves : tree.leaves + len(priorities)]
        close(found, [priorities[slot] for slot in range(len(priorities))], atol=2e-3)
    assert run.step >= 36 and run.parts["buffer"].size == 20
    return run


def test_training(script):
    """All six switches on. Fails if anything in the loop is done in another order, or at another step, or not at all:
    noise, priorities, weights, beta, windows, updates, copies of the target network.
    """
    check_training(script, [])


@pytest.mark.parametrize("off", [["noisy", "distributional"], SWITCHES])
def test_training_without(script, off):
    """Fails if the loop depends on a switch that is off, or goes on as if it were on."""
    check_training(script, off)


@pytest.mark.slow
@pytest.mark.parametrize("off", SWITCHES)
def test_training_without_one(script, off):
    """The same for each switch."""
    check_training(script, [off])


@pytest.mark.parametrize("double", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_with_all_switches_off_it_is_dqn(script, double, tmp_path):
    """Fails if a run differs from that of dqn.py in any number: weights, target network, optimiser, figures, returns.

    With checkpoints, at which episodes begin anew, normalisation, ends of episodes and several environments. The first
    update would be due in step 20 of the 21 that three environments have taken at once, a step before a batch is full.
    """
    import dqn

    settings = {"num_envs": 3, "total_timesteps": 400, "learning_starts": 9, "batch_size": 21, "buffer_size": 200}
    settings |= {"hidden_sizes": (20, 10), "normalize_obs": True, "target_network_frequency": 30, "eval_episodes": 2}
    settings |= {"checkpoint_every": 150, "eval_every": 200, "progress": False, "gradient_steps": 2}
    off = dict.fromkeys(SWITCHES, False)
    runs = [(dqn, {"double": double}), (script, off | {"double": double})]
    states, rows = [], []
    for module, switches in runs:
        folder = tmp_path / module.__name__
        with mock.patch.object(module.Run, "draw_curve"):
            module.train(module.Args(run_dir=str(folder), **settings | switches))
        state = torch.load(folder / "checkpoint.pt", weights_only=True)
        networks = [list(state[name].values()) for name in ("agent", "target")]
        states.append([*networks[0], *networks[1], state["optimizer"]["m"], state["optimizer"]["v"]])
        table = np.genfromtxt(folder / "metrics.csv", delimiter=",", names=True)
        rows.append([table[name] for name in ["step", "episodes", "return_mean", *dqn.FIGURES]])
    assert len(states[0]) == len(states[1]) and all(torch.equal(*pair) for pair in zip(*states))
    assert all(np.array_equal(*pair, equal_nan=True) for pair in zip(*rows))


PICTURES = {"total_timesteps": 30, "learning_starts": 16, "batch_size": 4, "buffer_size": 20, "num_envs": 2}


@pytest.mark.slow
def test_stacked_frames_change_nothing(script, monkeypatch):
    """Fails if a training on frames that are kept once differs in anything from one on whole stacks."""
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # images would take all cores
    settings = PICTURES | {"dueling": False, "noisy": False}
    weights = []
    for stacked, buffer in (("yes", "FrameStackBuffer"), ("no", "NStepBuffer")):
        run = rehearse(script, Frames, buffer=buffer, loss="distributional_losses", stacked_frames=stacked, **settings)
        assert isinstance(run.parts["buffer"], script.FrameStackBuffer) == (stacked == "yes")
        weights.append(torch.cat([p.flatten() for p in run.agent.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.slow
def test_images_with_all_switches_off(script, monkeypatch):
    """Fails if the network for images is not dqn.py's, number for number."""
    import dqn

    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    off = dict.fromkeys(SWITCHES, False)
    one = rehearse(dqn, Frames, buffer="ReplayBuffer", loss="dqn_loss", double=False, **PICTURES).agent
    other = rehearse(script, Frames, buffer="NStepBuffer", loss="td_losses", **PICTURES | off).agent
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))
