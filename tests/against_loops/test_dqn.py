"""dqn.py against slow and obvious versions of it: the ring, acting, and whole trainings written down with lists."""

import importlib
from functools import cache

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.probes.envs import Walk
from tests.tools import close, rehearse, vector_env

VECTOR, TWO = spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(2)

# ----------------------------------------------------------------------------------------------------------- network


def new_network(script, space=VECTOR, actions=3, start=0, **settings):
    """A QNetwork with random biases, so that nothing is zero by chance."""
    torch.manual_seed(0)
    settings = {"hidden_sizes": (8, 5)} | settings
    agent = script.QNetwork(space, spaces.Discrete(actions, start=start), script.Args(**settings))
    for p in agent.parameters():
        p.data += 0.3 * torch.randn(p.shape)
    return agent


@pytest.mark.parametrize("normalize_obs", [False, True])
@pytest.mark.parametrize("hidden_sizes", [(8, 5), ()])
def test_network(script, normalize_obs, hidden_sizes):
    """Fails if Q is not made by linear layers with ReLU between them, on normalised observations."""
    agent = new_network(script, normalize_obs=normalize_obs, hidden_sizes=hidden_sizes)
    obs = np.random.default_rng(0).normal(1, 5, (30, 2)).astype(np.float32)
    layers = [module for module in agent.head if isinstance(module, torch.nn.Linear)]
    inputs = torch.tensor(obs)
    if normalize_obs:
        agent.obs_stats.update(obs)
        inputs = torch.tensor(((obs - obs.mean(0)) / obs.std(0)).clip(-10, 10))
    features = agent.features(torch.tensor(obs))
    close(features, inputs, atol=1e-4)
    for layer in layers[:-1]:
        inputs = layer(inputs).clamp(min=0)
    expected = layers[-1](inputs).detach()
    close(agent(torch.tensor(obs)), expected, atol=1e-4)
    assert agent.greedy(obs).tolist() == expected.argmax(1).tolist() and len(set(agent.greedy(obs))) > 1


def test_actions_are_shifted_and_typed(script):
    """Fails if a Discrete space that begins at another number than 0 gets actions outside of it."""
    agent = new_network(script, start=-1)
    actions = agent.act(np.random.default_rng(0).normal(0, 9, (50, 2)))
    assert actions.dtype == np.int64 and all(agent.action_space.contains(action) for action in actions)
    everything = agent.to_env(agent.explore(np.zeros((200, 2)), 1.0, np.random.default_rng(0)))
    assert set(everything) == {-1, 0, 1}


def test_exploration(script):
    """Fails if epsilon is not the share of random actions, or random ones are not uniform. (3 sigma: 0.014)"""
    agent, rng = new_network(script), np.random.default_rng(0)
    obs = np.zeros((10_000, 2))
    greedy = agent.greedy(obs)[0]
    assert (agent.explore(obs, 0.0, rng) == greedy).all()
    shares = np.bincount(agent.explore(obs, 0.3, rng), minlength=3) / 10_000
    close(shares, np.where(np.arange(3) == greedy, 0.8, 0.1), atol=0.015)
    close(np.bincount(agent.explore(obs, 1.0, rng)) / 10_000, np.full(3, 1 / 3), atol=0.015)


@pytest.mark.parametrize("shape", [(3, 36, 40), (36, 40, 3)])
def test_images(script, shape):
    """Fails if images in one of the two layouts are not what the network sees, scaled to [0, 1]; or not bytes."""
    space = spaces.Box(0, 255, shape, np.uint8)
    agent, buffer = new_network(script, space), script.ReplayBuffer(4, space, TWO)
    images = np.random.default_rng(0).integers(256, size=(2, *shape), dtype=np.uint8)
    no = np.zeros(2, bool)
    buffer.add(images, np.zeros((2, 1), int), np.zeros(2), no, no, no, images[::-1])
    assert buffer.obs.dtype == buffer.next_obs.dtype == np.uint8
    stored = buffer.get(np.array([1]))
    assert (stored.obs[0].numpy() == images[1]).all() and (stored.next_obs[0].numpy() == images[0]).all()
    channels_first = images if shape[0] == 3 else images.transpose(0, 3, 1, 2)
    convolved = agent.cnn.convolutions(torch.tensor(channels_first / 255, dtype=torch.float32))
    close(agent(torch.tensor(images)), agent.head(agent.cnn.linear(convolved).clamp(min=0)))


# ------------------------------------------------------------------------------------------------------ replay buffer


def walk(buffer, plans, steps):
    """Play `plans` in a buffer: for each environment (length, terminated) of its episodes, repeated.

    Returns the transitions that went in, oldest first, as (obs, action, reward, next obs, terminated).
    """
    ends = [[(length, "terminated" if over else "truncated") for length, over in plan] for plan in plans]
    envs = vector_env([lambda n=n: Walk(ends[n], n) for n in range(len(plans))], len(plans))
    obs, _ = envs.reset()
    reset_rows = np.zeros(len(plans), bool)
    played = []
    for t in range(steps):
        actions = np.full(len(plans), t % 2)
        next_obs, rewards, terminated, truncated, _ = envs.step(actions)
        slots = buffer.add(obs, actions[:, None], rewards, terminated, truncated, reset_rows, next_obs)
        first = len(played)
        for n in np.flatnonzero(~reset_rows):
            played.append((obs[n], [t % 2], rewards[n], next_obs[n], terminated[n]))
        assert slots.tolist() == [i % buffer.capacity for i in range(first, len(played))]
        obs, reset_rows = next_obs, terminated | truncated
    return played


episode_plans = st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=3)


@settings(max_examples=40)
@given(
    plans=st.lists(episode_plans, min_size=1, max_size=3),
    capacity=st.integers(3, 20),
    steps=st.integers(1, 30),
    saved=st.booleans(),
)
def test_ring(script, plans, capacity, steps, saved):
    """Fails if the ring ever holds anything but the last transitions; also after a checkpoint has been loaded."""
    buffer = script.ReplayBuffer(capacity, spaces.Box(-np.inf, np.inf, (3,)), TWO)
    played = walk(buffer, plans, steps)
    if saved:
        state = buffer.state_dict()
        buffer = script.ReplayBuffer(capacity, spaces.Box(-np.inf, np.inf, (3,)), TWO)
        buffer.load_state_dict(state)
    slots = np.arange(min(capacity, len(played)))
    assert buffer.size == len(slots) and buffer.position == len(played) % capacity
    batch = buffer.get(slots)
    for number in range(max(0, len(played) - capacity), len(played)):
        for field, expected in zip(batch, played[number]):
            close(field[number % capacity], np.array(expected))


def test_sampling_is_uniform(script):
    """Fails if a slot is left out, drawn before it is filled, or favoured. (chi-square, 9 degrees: 28 has p = 0.001)"""
    buffer, rng = script.ReplayBuffer(16, VECTOR, TWO), np.random.default_rng(0)
    obs, no = np.zeros((10, 2), np.float32), np.zeros(10, bool)
    buffer.add(obs, np.zeros((10, 1), int), np.arange(10.0), no, no, no, obs)
    drawn = np.concatenate([buffer.sample(10, rng).rewards for _ in range(1000)]).astype(int)
    counts = np.bincount(drawn, minlength=10)
    assert len(counts) == 10 and ((counts - 1000) ** 2 / 1000).sum() < 28


def test_what_is_stored_has_few_bytes(script):
    """Fails if numbers are stored in double precision, or if continuous actions (ddpg_td3.py's) become integers."""
    buffer = script.ReplayBuffer(4, spaces.Box(-1, 1, (3,), np.float64), spaces.Box(-1, 1, (2, 2)))
    assert buffer.obs.dtype == buffer.next_obs.dtype == buffer.rewards.dtype == np.float32
    assert buffer.actions.dtype == np.float32 and buffer.actions.shape == (4, 4)


# ----------------------------------------------------------------------------------------------------- whole trainings


class Uneven(gym.Env):
    """Observations of very unequal size, rewards of either sign up to 3, ends of all sorts; all of it by chance."""

    observation_space, action_space = spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(2, start=1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.np_random.normal([0, 30], [1, 5]).astype(np.float32)
        return self.obs, {}

    def step(self, action):
        reward = float(self.np_random.uniform(-3, 3) + self.obs[0] * (2 * action - 3))
        self.obs = self.np_random.normal([action, 30], [1, 5]).astype(np.float32)
        terminated, truncated = self.np_random.random(2) < 0.2
        return self.obs, reward, bool(terminated), bool(truncated), {}


@cache
def slow_training(script, name):
    """What `train` does in two environments, with plain lists, torch's Adam and one transition at a time.

    Returns (parameters of the network, flat; those of the target network; losses; mean Q; returns of all episodes).
    """
    args = script.Args(**COMMON | TRAININGS[name])
    envs = vector_env([Uneven], 2)
    plain = script.Args(hidden_sizes=args.hidden_sizes)
    torch.manual_seed(args.seed)
    agent = script.QNetwork(envs.single_observation_space, envs.single_action_space, plain)
    target = script.QNetwork(envs.single_observation_space, envs.single_action_space, plain)
    target.load_state_dict(agent.state_dict())
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
    rng = np.random.default_rng([args.seed, 0])
    obs, _ = envs.reset(seed=int(rng.integers(2**31)))
    memory, seen, losses, means, returns, totals, step, reset = [], [], [], [], [], [0, 0], 0, [False, False]

    def q_of(network, observation):
        x = np.array(observation, np.float64)
        if args.normalize_obs and seen:
            x = ((x - np.mean(seen, 0)) / np.sqrt(np.var(seen, 0) + 1e-8)).clip(-10, 10)
        return network(torch.tensor(x, dtype=torch.float32)[None])[0]

    while step < args.total_timesteps:
        epsilon = args.start_e + (args.end_e - args.start_e) * min(
            1, step / (args.exploration_fraction * args.total_timesteps)
        )
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / args.total_timesteps if args.anneal_lr else 1)
        at_random, any_actions = rng.random(2) < epsilon, rng.integers(2, size=2)
        actions = [any_actions[n] if at_random[n] else int(q_of(agent, obs[n]).argmax()) for n in (0, 1)]
        next_obs, rewards, terminated, truncated, _ = envs.step(np.array(actions) + 1)
        first = step
        for n in (0, 1):
            if not reset[n]:
                reward = np.sign(rewards[n]) if args.clip_reward else rewards[n]
                memory.append((obs[n], actions[n], reward, next_obs[n], terminated[n]))
                seen.append(obs[n])
                step += 1
                totals[n] += rewards[n]
                if terminated[n] or truncated[n]:
                    returns.append(totals[n])
                    totals[n] = 0
        stored = len(memory)
        for at in range(first + 1, step + 1):
            if at >= max(args.learning_starts, args.batch_size) and at % args.train_frequency == 0:
                for _ in range(args.gradient_steps):
                    kept = min(
                        stored, args.buffer_size
                    )  # slot s of the ring holds the newest of numbers s, s + size, …
                    slots = rng.integers(kept, size=args.batch_size)
                    numbers = [max(i for i in range(slot, stored, args.buffer_size)) for slot in slots]
                    loss = mean_q = 0
                    for o, action, reward, next_o, over in [memory[number] for number in numbers]:
                        with torch.no_grad():
                            values = q_of(target, next_o)
                            best = (q_of(agent, next_o) if args.double else values).argmax()
                            y = reward + (0 if over else 0.9 * values[best])
                        q = q_of(agent, o)[action]
                        error = abs(y - q)
                        loss = loss + (0.5 * error**2 if error < 1 else error - 0.5) / args.batch_size
                        mean_q = mean_q + q / args.batch_size
                    optimizer.zero_grad()
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                    optimizer.step()
                    losses.append(loss.item())
                    means.append(mean_q.item())
            if at % args.target_network_frequency == 0:
                for p, q in zip(target.parameters(), agent.parameters()):
                    p.data = args.tau * q.data + (1 - args.tau) * p.data
        obs, reset = next_obs, terminated | truncated
    flat = [torch.cat([p.detach().flatten() for p in network.parameters()]) for network in (agent, target)]
    return *flat, losses, means, returns


COMMON = {"num_envs": 2, "total_timesteps": 60, "learning_starts": 20, "batch_size": 4, "buffer_size": 30, "gamma": 0.9}
COMMON |= {"learning_rate": 0.01, "hidden_sizes": (8,), "train_frequency": 3, "target_network_frequency": 7}
COMMON |= {"exploration_fraction": 0.5, "start_e": 0.9, "end_e": 0.1, "seed": 3, "gradient_steps": 2}
TRAININGS = {
    "double": {},
    "plain": {"double": False, "anneal_lr": False, "max_grad_norm": 0.5},
    "normalised": {"normalize_obs": True, "tau": 0.3, "gradient_steps": 1, "learning_starts": 0},
    "clipped rewards": {"clip_reward": True, "target_network_frequency": 2, "train_frequency": 2, "max_grad_norm": 0.1},
}


@pytest.mark.parametrize("name", TRAININGS)
def test_training(script, name):
    """Fails if exploration, storing, targets, loss, schedules, periods or statistics move a weight elsewhere.

    60 steps of two environments; half of them are still in the ring in the end.
    """
    run = rehearse(script, Uneven, buffer="ReplayBuffer", loss="dqn_loss", **COMMON | TRAININGS[name])
    network, target, losses, means, returns = slow_training(importlib.import_module(script.__name__), name)
    flat = lambda agent: torch.cat([p.detach().flatten() for p in agent.parameters()])
    close(flat(run.agent), network, atol=1e-3)
    close(flat(run.parts["target"]), target, atol=1e-3)
    close(run.figures["loss"], losses, atol=1e-3)
    close(run.figures["q"], means, atol=1e-3)
    close([total for _, total in run.episodes], returns)
    assert len(losses) >= 18
    assert set(run.figures) == set(script.FIGURES)


def test_figures(script):
    """Epsilon falls from 0.8 to 0.2 over half of 100 steps, the learning rate from 0.01 to 0; both as they were used.

    Fails if the schedule of one is the other's, or if --no-anneal-lr lowers the rate.
    """
    given = {"start_e": 0.8, "end_e": 0.2, "exploration_fraction": 0.5, "learning_rate": 0.01, "batch_size": 4}
    given |= {"total_timesteps": 100, "buffer": "ReplayBuffer", "loss": "dqn_loss"}
    never = lambda: Walk([(1000, "terminated")])
    run = rehearse(script, never, **given)
    close(run.figures["epsilon"], [max(0.2, 0.8 - 0.6 * step / 50) for step in range(100)])
    close(run.figures["learning_rate"], [0.01 * (1 - step / 100) for step in range(100)])
    run = rehearse(script, never, anneal_lr=False, **given | {"exploration_fraction": 0.0})
    assert set(run.figures["learning_rate"]) == {0.01} and run.figures["epsilon"][:3] == [0.8, 0.2, 0.2]
