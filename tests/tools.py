"""What the tests of all scripts use: comparison, mistakes, small environments, training without a folder."""

import ast
import copy
import inspect
import warnings
from contextlib import contextmanager
from decimal import Decimal
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces


def close(actual, expected, atol=1e-5):
    """AssertionError unless all numbers, and the shapes, agree."""
    array = lambda x: x.detach().double().numpy() if isinstance(x, torch.Tensor) else np.array(x, float)
    actual, expected = array(actual), array(expected)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)  # NumPy 1 has no strict=True for this
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=atol)


@contextmanager
def fails(message):
    """AssertionError unless a ValueError with this message is raised."""
    try:
        yield
    except ValueError as error:
        assert str(error) == message
    else:
        raise AssertionError("nothing was raised")


def catches(*mistakes):
    """The test must fail if one of these is put into the script: "where, what is wrong: old text -> new text"."""

    def mark(test):
        test.mistakes = mistakes
        return test

    return mark


source_of = cache(inspect.getsource)  # slow for a class, and mistakes stand in few of them


@cache
def pieces(script):
    """The script's text, cut where its functions, classes and other statements begin; and each piece compiled."""
    lines = Path(script.__file__).read_text(encoding="utf-8").splitlines(keepends=True)
    nodes = ast.parse("".join(lines)).body
    first_line = lambda node: min(part.lineno for part in [node, *getattr(node, "decorator_list", [])])
    starts = [first_line(node) - 1 for node in nodes]
    texts = ["".join(lines[first:last]) for first, last in zip(starts, [*starts[1:], None])]
    return texts, [compile(text, script.__file__, "exec") for text in texts]


def with_mistake(script, mistake):
    """The script as another module, in whose function, class or method `where` the old text has become the new one."""
    name, change = mistake.split(": ", 1)
    where, (old, new) = name.split(", ")[0], change.split(" -> ")
    part, (texts, codes) = source_of(attrgetter(where)(script)), pieces(script)
    assert part.count(old) == 1, f"{old!r} stands {part.count(old)} times in {where}"
    (place,) = [i for i, text in enumerate(texts) if part in text]
    wrong = compile(texts[place].replace(part, part.replace(old, new)), mistake, "exec")
    module = ModuleType(script.__name__)
    module.__file__ = script.__file__
    for code in [*codes[:place], wrong, *codes[place + 1 :]]:
        exec(code, vars(module))
    return module


class Table(torch.nn.Module):
    """Q(s, .) as rows of a table; the observation is the number of the row."""

    def __init__(self, *rows):
        super().__init__()
        self.q = torch.nn.Parameter(torch.tensor(rows))

    def forward(self, obs):
        return self.q[obs[:, 0].long()]


class Walk(gym.Env):
    """Episodes of planned lengths and ends (t: terminated, c: cut off, b: both), whatever the action, for ever.

    The observation is (name, episode, step), the reward of the step that leads to it 10 episode + step.
    """

    observation_space, action_space = spaces.Box(-np.inf, np.inf, (3,)), spaces.Discrete(2)

    def __init__(self, plan, name=0):
        self.plan, self.name, self.episode = plan, name, -1

    def reset(self, *, seed=None, options=None):
        self.episode, self.at = self.episode + 1, 0
        return np.array([self.name, self.episode, 0], np.float32), {}

    def step(self, action):
        length, end = self.plan[self.episode % len(self.plan)]
        self.at += 1
        assert self.at <= length, "stepped after the end of the episode"
        over = self.at == length
        obs = np.array([self.name, self.episode, self.at], np.float32)
        return obs, 10.0 * self.episode + self.at, over and end in "tb", over and end in "cb", {}


class Probe(gym.Env):
    """Episodes of `steps` steps. The observation is the step's number (after the last it is 0 again: if the episode is
    cut off there, it would begin anew) or, if `varied`, -1 or 1, drawn at its beginning.
    """

    observation_space, action_space = spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(2)

    def __init__(self, reward=lambda obs, action: 1.0, steps=1, end="t", varied=False):
        self.reward, self.steps, self.end, self.varied = reward, steps, end, varied

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        self.obs = np.full(1, self.np_random.choice([-1, 1]) if self.varied else 0, np.float32)
        return self.obs, {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        reward = float(self.reward(self.obs[0], action))
        self.at += 1
        if not self.varied:
            self.obs = np.full(1, self.at % self.steps, np.float32)
        over = self.at == self.steps
        return self.obs, reward, over and self.end == "t", over and self.end == "c", {}


class Chance(gym.Env):
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


def vector_env(makers, num_envs):
    """A vector environment with next-step autoreset; `makers` take turns in making its environments."""
    return gym.vector.SyncVectorEnv([makers[i % len(makers)] for i in range(num_envs)])


def rehearse(script, *makers, **settings):
    """Train in environments that `makers` make, and write nothing. Returns the Run: agent, evaluations, episodes.

    `run.all_logged` has all that was ever logged: {metric: its values}.
    """

    class Rehearsal(script.Run):
        draw_curve = check_alone = lambda run: None
        finish = lambda run: run

        def __init__(self, *given):
            super().__init__(*given)
            self.all_logged = {}

        def log(self, **metrics):
            super().log(**metrics)
            for name, value in metrics.items():
                self.all_logged.setdefault(name, []).append(value)

    quiet = {"progress": False, "eval_every": 10**9, "checkpoint_every": 10**9, "eval_episodes": 1}
    quiet |= {"run_dir": "nowhere", "env_id": "none"}
    replaced = {"Run": Rehearsal, "write_file": lambda path, write: None}
    replaced["make_envs"] = lambda args, num_envs, render=False, video=None: vector_env(makers, num_envs)
    with mock.patch.multiple(script, **replaced), mock.patch.object(script.subprocess, "run"):
        return script.train(script.Args(**quiet | settings))


def flat(network):
    """All parameters, one after the other."""
    return torch.cat([p.detach().flatten() for p in network.parameters()])


IN_ORDER = SimpleNamespace(permutation=lambda rows: rows)  # a generator that does not shuffle


@contextmanager
def watched(script, loss="ppo_loss", buffer="RolloutBuffer"):
    """A list of what training sees: at each call of the loss its agent, batch and buffer, as they are then."""
    script_loss, buffers, calls = getattr(script, loss), [], []

    class Buffer(getattr(script, buffer)):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            buffers.append(self)

    def watched_loss(agent, *given):
        *_, batch, args = given
        calls.append(SimpleNamespace(agent=copy.deepcopy(agent), batch=batch, buffer=copy.deepcopy(buffers[-1])))
        return script_loss(agent, *given)

    with mock.patch.multiple(script, **{loss: watched_loss, buffer: Buffer}):
        yield calls


# -------------------------------------------------------------------------- of test_ddpg_td3.py and test_sac.py both

ONE = spaces.Box(-1, 1, (1,))
NUMBERS = spaces.Box(-np.inf, np.inf, (3,))
BOX = spaces.Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32))


def new_agent(script, obs_space=NUMBERS, action_space=BOX, **settings):
    """An untrained agent with small networks for these spaces."""
    torch.manual_seed(1)
    agent = script.Agent(obs_space, action_space, script.Args(**{"hidden_sizes": (8,)} | settings))
    agent.observation_space = obs_space  # for `learn`
    return agent


class Still(gym.Env):
    """Nothing ever happens: zeros are observed, the reward is always the same, and no episode ends."""

    def __init__(self, observation_space, action_space, reward=0.0):
        self.observation_space, self.action_space, self.reward = observation_space, action_space, reward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape, self.observation_space.dtype), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        return self.reset()[0], self.reward, False, False, {}


def learn(script, agent, batches, **settings):
    """Let `train` make one critic update with each of `batches`, which take the place of what it has played.

    The update number n comes in step n + 1 of len(batches) + 1. Returns the Run.
    """
    batches = list(batches)
    given = {"learning_starts": 1, "batch_size": 1, "num_envs": 1, "buffer_size": 99, "max_episode_steps": 1}
    given |= {"total_timesteps": len(batches) + 1, "gradient_steps": 1}
    with (
        mock.patch.object(script.ReplayBuffer, "sample", lambda buffer, size, rng: batches.pop(0)),
        mock.patch.object(script, "make_agent", lambda args, envs: agent),
    ):
        run = rehearse(script, lambda: Still(agent.observation_space, agent.action_space), **given | settings)
    assert not batches
    return run


def row_of_one(script, terminated=False):
    """A batch of one transition: s = 1, a = 0.5, r = 1, s' = 2."""
    return script.Transitions(*map(torch.tensor, ([[1.0]], [[0.5]], [1.0], [[2.0]], [terminated])))


def check_cnns(script, shape):
    """An update of the critics moves their CNNs and not the actor's; one of the actor its own and not the critics'."""
    pictures = torch.randint(0, 256, (2, 4, *shape), dtype=torch.uint8)
    batch = script.Transitions(pictures[0], torch.zeros(4, 2), torch.ones(4), pictures[1], torch.zeros(4) > 0)
    for frequency, rate, moving in ((2, 1e-3, "critics"), (1, 0.0, "actor")):
        agent = new_agent(script, spaces.Box(0, 255, shape, np.uint8))
        before = copy.deepcopy(agent)
        learn(script, agent, [batch], policy_frequency=frequency, buffer_size=3, critic_learning_rate=rate)
        for name in ("actor", "critics"):
            pairs = zip(getattr(agent, name).parameters(), getattr(before, name).parameters(), strict=True)
            assert all(torch.equal(p, q) == (name != moving) for p, q in pairs)
        assert any("convolutions" in name for name, _ in agent.actor.named_parameters())
        assert agent.act(pictures[0].numpy()).shape == (4, 2)


def check_modes(script):
    """The actor is in train mode in its own loss and nowhere else; critics always are: they serve losses alone."""
    agent, calls = new_agent(script, ONE, ONE).eval(), set()
    for name, network in (("actor", agent.actor), ("critic", agent.critics[0])):
        note = lambda network, *_, name=name: calls.add((name, network.training, torch.is_grad_enabled()))
        network.register_forward_hook(note)
    learn(script, agent, [row_of_one(script)] * 2, policy_frequency=1)
    assert calls == {("actor", True, True), ("actor", False, False), ("critic", True, True)}


def check_odd_worlds(script):
    """Actions with a single value, rewards of other types; what float32 cannot hold is a line that names the field."""
    settings = {"learning_starts": 3, "batch_size": 2, "hidden_sizes": (4,), "total_timesteps": 6}

    def train(low, high, reward):
        world = Still(spaces.Box(-9, 9, ()), spaces.Box(np.float32(low), np.float32(high)), reward)
        return rehearse(script, lambda: world, **settings, max_episode_steps=2)

    for reward in (np.array(1.0), Decimal("0.5"), np.float32(1), 1, True):
        run = train([0.5, -1], [0.5, 1], reward)
        assert run.step == 6 and np.isfinite(run.all_logged["critic_loss"]).all()
        assert run.agent.act(np.zeros(4))[:, 0].tolist() == [0.5] * 4
    with pytest.raises(script.UserError, match="none, after step 0: reward"), warnings.catch_warnings(action="error"):
        train([-1], [1], 1e300)
    for bounds in (([-3.4e38], [3.4e38]), ([-1], [np.inf]), ([-np.inf], [np.inf])):
        try:
            train(*bounds, 0)
            raise AssertionError(f"actions with the bounds {bounds} were not refused")
        except script.UserError as error:
            assert "bounded in every dimension" in str(error)
    with fails("act takes a batch of observations; for one, it is act(obs[None])[0]"):
        new_agent(script, ONE).act(np.zeros(1))


class Aim(Probe):
    """One-step episodes: -1 or 1 is shown, the reward is 1 - (action - half of it)^2. At best 1."""

    action_space = ONE

    def __init__(self, end="t"):
        super().__init__(lambda shown, action: 1 - (action[0] - shown / 2) ** 2, end=end, varied=True)


class Drift(gym.Env):
    """Observations of very unequal size, rewards of either sign, ends of all sorts; all of it by chance."""

    observation_space, action_space = spaces.Box(-np.inf, np.inf, (2,)), BOX

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.np_random.normal([0, 30], [1, 5]).astype(np.float32)
        return self.obs, {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        reward = float(self.np_random.uniform(-3, 3) + self.obs[0] * action[0] + action[1])
        self.obs = self.np_random.normal([action[0], 30], [1, 5]).astype(np.float32)
        terminated, truncated = self.np_random.random(2) < 0.15
        return self.obs, reward, bool(terminated), bool(truncated), {}


def rehearse_drift(script, **settings):
    """Train in Drift; each step's observations are written over those of the step before. Returns the Run."""
    reusing = lambda makers, num_envs: gym.vector.SyncVectorEnv(makers * num_envs, copy=False)
    with mock.patch.dict(globals(), vector_env=reusing):
        return rehearse(script, Drift, **settings)
