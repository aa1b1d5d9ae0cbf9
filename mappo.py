# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2",
#   "tyro==1.0.17", "tqdm==4.70.1", "moviepy==2.2.1", "mpe2==1.1.1",
# ]
# ///
"""Multi-agent PPO (MAPPO) and its sequential sibling HAPPO, all of it, in this one file.

Several agents share one reward. Each acts on what it alone observes (o^i); while learning, one critic V sees the state
s of all. So every agent does PPO with an advantage A that the whole team has in common, r^i being its own ratio of new
to old policy (arXiv 2103.01955, appendix A):

    L(theta) = E[ 1/n sum_i min( r^i A, clip(r^i, 1 - eps, 1 + eps) A ) ],   r^i = pi(a^i|o^i) / mu(a^i|o^i)

HAPPO updates separate policies one after the other, in random order, each with A times the ratios of those that have
moved already: A M, M = prod_j r^j, so that every step counts with the team as it is by then (arXiv 2109.11251).

    python mappo.py                                                          # three agents spread over three landmarks
    python mappo.py --env-id mpe2.simple_speaker_listener_v4 --happo --no-share-policy
    python mappo.py --evaluate runs/DIR --render                             # play what a run has left behind

Papers: MAPPO arXiv 2103.01955, HAPPO arXiv 2109.11251 and 2304.09870, PPO arXiv 1707.06347, GAE arXiv 1506.02438.
"""

import argparse
import contextlib
import dataclasses
import datetime
import difflib
import functools
import importlib.metadata
import importlib.util
import io
import itertools
import json
import math
import os
import pickle
import pkgutil
import platform
import re
import subprocess
import sys
import time
import typing
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium import spaces
from torch import nn
from tqdm import tqdm

# Settings that learn, per environment; what the user gives wins. docs/mappo.md says which of them were confirmed.
PARTICLES = {"learning_rate": 1e-3, "num_minibatches": 8, "gamma": 0.95, "total_timesteps": 200_000}
TUNED = {
    "mpe2.simple_spread_v3": PARTICLES,
    "mpe2.simple_reference_v3": PARTICLES | {"action_factor": 5, "num_envs": 64, "ent_coef": 0.003,
                                                "total_timesteps": 1_000_000},
    "mpe2.simple_speaker_listener_v4": PARTICLES | {"share_policy": False},
}  # fmt: skip


@dataclass
class Args:
    """Every flag with its default, or what TUNED has for the environment.

    The tuned values depend on the environment, and a value that the user gives wins: so `__new__` notes what was given,
    and `__post_init__` fills in the rest. (dataclasses.replace gives every value: make new Args for a new environment.)
    """

    # run
    env_id: str = "mpe2.simple_spread_v3"  # module with a PettingZoo parallel_env, or dotted path of such a function
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers of parallel environments, applied in order
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    async_envs: bool = False  # play each environment in a process of its own
    total_timesteps: int = 1_000_000  # environment steps to train for; in each, all agents act
    stop_at_return: float | None = None  # stop once the mean of the last 100 training episodes reaches this
    seed: int = 1  # of everything that is drawn at random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps; auto: the CPU
    torch_threads: int = 0  # 0: one (more fight over small matrices)
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, on separate environments, with deterministic actions
    capture_video: bool = False  # film an episode at each evaluation
    checkpoint_every: int = 0  # steps between checkpoints; 0: a twentieth of the run
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # weights that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window
    config: str | None = None  # config.json of an earlier run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__mappo__SEED__TIME
    progress: bool = True  # show the progress bar
    # algorithm
    share_policy: bool = True  # one policy for all agents, or one for each
    action_factor: int = 0  # split Discrete(n) actions, n a larger multiple of this, in two: action % this and the rest
    happo: bool = False  # update the policies one after the other, each knowing how the earlier ones have moved
    state_type: Literal["EP", "FP"] = "EP"  # the critic's input: the environment's state, or each agent's view of it
    recurrent: bool = False  # a GRU in actors and critic
    data_chunk_length: int = 25  # recurrent: steps through which gradients flow back; 0: the whole rollout
    learning_rate: float = 7e-4  # of Adam, for actors and critic
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    num_envs: int = 32  # environments played side by side
    num_steps: int = 25  # steps of each environment per rollout
    num_minibatches: int = 1  # parts of a rollout, one gradient step each
    update_epochs: int = 10  # passes over a rollout
    gamma: float = 0.99  # discount
    gae: bool = True  # estimate advantages by GAE; without it, by discounted returns
    gae_lambda: float = 0.95  # GAE: 0 trusts the critic, 1 the rewards
    clip_coef: float = 0.2  # eps of the clipped objective
    value_norm: bool = True  # the critic predicts returns normalised by their moving mean and deviation
    clip_vloss: bool = True  # clip the value loss as well
    clip_vloss_coef: float = 0.2  # how far a value may move before its loss is clipped
    huber_delta: float = 10.0  # errors of the critic beyond this count linearly
    ent_coef: float = 0.01  # weight of the entropy bonus
    max_grad_norm: float = 10.0  # longer gradients are shortened to this norm
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layers of the actors
    critic_hidden_sizes: tuple[int, ...] | None = None  # hidden layers of the critic; None: as the actors'

    def __new__(cls, *_, **given):
        """Note which arguments are given."""
        self = super().__new__(cls)
        self.given = given
        return self

    def __post_init__(self):
        """Fill in the others, from the run that is resumed or evaluated, else from `config`, else from TUNED."""
        run_dir = self.resume or self.evaluate
        source = f"{run_dir}/config.json" if run_dir else self.config
        for name, value in (read_config(source) if source else TUNED.get(self.env_id, {})).items():
            if name not in self.given and not (self.evaluate and name in ("device", "capture_video")):  # training's own
                setattr(self, name, value)


class UserError(Exception):
    """Something the user can mend: shown as one line, with exit code 2."""


MODES = "resume evaluate model render config run_dir".split()  # what to do, not how: never taken from a config
RESUMABLE = MODES + "total_timesteps stop_at_return eval_every eval_episodes capture_video checkpoint_every".split()
RESUMABLE += "device torch_threads progress".split()  # these may change when a run is resumed
COUNTS = "num_envs num_steps num_minibatches update_epochs total_timesteps eval_episodes max_episode_steps".split()
RANGES = dict.fromkeys([*COUNTS, "hidden_sizes", "critic_hidden_sizes"], (1, math.inf))
RANGES |= dict.fromkeys(("stop_at_return", "max_episode_return"), (-math.inf, math.inf))
RANGES |= {"gamma": (0, 1), "gae_lambda": (0, 1)}
RANGES |= {"seed": (0, 2**32), "torch_threads": (0, 10_000)}  # all other numbers: from 0 to infinity


def read_config(path):
    """The arguments in the config.json of a run, as a dict. UserError if it is none, or has an unknown field."""
    try:
        stored = json.loads(Path(path).read_text())["args"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not the config.json of a run: {error!r}") from None
    if unknown := [name for name, _ in stored if name not in typing.get_type_hints(Args)]:
        raise UserError(f"{path}: unknown field {', '.join(unknown)}")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in stored if k not in MODES}


def check_args(args):
    """UserError that names the first argument of a wrong type, out of range or at odds with another."""

    def fits(value, hint):  # hint: a plain type, a Literal, a union, or a tuple of one type
        origin, options = typing.get_origin(hint), typing.get_args(hint)
        if origin is Literal:
            return value in options
        if origin is tuple:
            return type(value) is tuple and all(fits(item, options[0]) for item in value)
        return any(fits(value, o) for o in options) or type(value) is hint or (hint is float and type(value) is int)

    for name, hint in typing.get_type_hints(Args).items():
        value = getattr(args, name)
        if not fits(value, hint):
            kind = str(hint) if typing.get_args(hint) else hint.__name__
            raise UserError(f"{name} must be {kind.removeprefix('typing.')}, not {value!r}")
        low, high = RANGES.get(name, (0, math.inf))
        for number in value if isinstance(value, tuple) else [value]:
            if isinstance(number, (int, float)) and not (low <= number <= high and math.isfinite(number)):
                raise UserError(f"{name} must lie between {low} and {high}, not be {number}")
    if args.capture_video and not importlib.util.find_spec("moviepy"):
        raise UserError("capture_video needs moviepy: pip install moviepy")
    if args.resume and (args.run_dir or args.evaluate):
        raise UserError("resume goes on in its own run folder: neither run_dir nor evaluate can be given beside it")


# ---------------------------------------------------------------------------------------------------- environment


class ReturnLimit(gym.Wrapper):
    """Truncate an episode once its return reaches `limit`."""

    def __init__(self, env, limit):
        super().__init__(env)
        self.limit = limit

    def reset(self, **kwargs):
        self.total = 0.0
        return self.env.reset(**kwargs)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.total += float(reward)
        return obs, reward, terminated, truncated or self.total >= self.limit, info


# Here state() is all observations side by side as well, but takes time, or fails once an agent is dead (multiwalker).
JOINED = ("mpe2.", "pettingzoo.sisl.multiwalker")
# Where things stand in an observation of TeamEnv: slices; of `observations` and `available`, one for each agent.
Layout = namedtuple("Layout", "alive observations state available")


class TeamEnv(gym.Env):
    """A PettingZoo parallel environment as a Gymnasium one, so that Gymnasium's vector environments can run it.

    Its action is a tuple with one entry per agent, its reward the sum of the agents' own, and its observation one row:

        [ 1 in an episode's first row | alive, per agent | observations | state | available actions, 1 or 0 ]

    An agent is alive while it takes part; in the last row of an episode that is not cut by a limit, those are alive who
    took part in its last step. The dead observe zeros. The state is the environment's own, or else all observations
    side by side, which then stand in the row but once. Available actions are in the row only if the environment gives
    masks; an agent with no valid action, such as who waits for its turn, has the first one, a no-op. An episode ends
    with its last agent, and by termination if all who acted last terminated. `info` has each agent's own "rewards" and
    "terminated".
    """

    def __init__(self, make):
        self.make, self.env, self.seed, self.actions = make, without_checks(make()), None, []
        env, names = self.env, list(self.env.possible_agents)
        self.names, self.metadata, self.render_mode = names, env.metadata, getattr(env, "render_mode", None)
        _, infos = env.reset(seed=0)
        given = {name: env.observation_space(name) for name in names}
        self.observed = {name: space["observation"] if is_masked(space) else space for name, space in given.items()}
        masked = any(is_masked(given[name]) or "action_mask" in infos.get(name, {}) for name in names)
        self.own_state, state_size = False, 0
        if not type(env.unwrapped).__module__.startswith(JOINED):
            with contextlib.suppress(AttributeError, NotImplementedError):
                state = np.asarray(env.state())
                if state.dtype != np.uint8:  # images are too large
                    self.own_state, state_size = True, state.size

        begin = 1 + len(names)
        observations = slices([spaces.flatdim(self.observed[name]) for name in names], begin)
        end = observations[-1].stop
        state = slice(end, end + state_size) if self.own_state else slice(begin, end)
        choices = [getattr(env.action_space(name), "n", 0) if masked else 0 for name in names]
        self.layout = Layout(slice(1, begin), observations, state, slices(choices, state.stop))
        self.observation_space = spaces.Box(-np.inf, np.inf, (self.layout.available[-1].stop,))
        self.action_space = spaces.Tuple([env.action_space(name) for name in names])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.begin(int(self.np_random.integers(2**31)))

    def begin(self, seed):
        """Start the episode that `seed` alone decides."""
        self.seed, self.actions = seed, []
        obs, infos = self.env.reset(seed=seed)
        self.alive = np.array([name in self.env.agents for name in self.names])
        row = self.row(obs, infos)
        row[0] = 1
        return row, self.info({}, {})

    def step(self, actions):
        self.actions.append(actions)
        playing = [name in self.env.agents for name in self.names]
        given = {name: action for name, action, plays in zip(self.names, actions, playing) if plays}
        obs, rewards, terminated, truncated, infos = self.env.step(given)
        ended = [name not in self.env.agents or terminated.get(name) or truncated.get(name) for name in self.names]
        over = all(ended)
        self.alive = np.array(playing) if over else ~np.array(ended)
        all_terminated = over and all(terminated.get(name, True) for name in given)
        info = self.info(rewards, terminated)
        reward = float(info["rewards"].sum())
        return self.row(obs, infos), reward, all_terminated, over and not all_terminated, info

    def row(self, obs, infos):
        """The observation of the team, from the dicts of PettingZoo."""
        row, layout = np.zeros(self.observation_space.shape, np.float32), self.layout
        row[layout.alive] = self.alive
        for name, alive, observed, available in zip(self.names, self.alive, layout.observations, layout.available):
            row[available] = 1
            if not alive:
                continue
            own, mask = obs[name], infos.get(name, {}).get("action_mask")
            if isinstance(own, dict) and "action_mask" in own:
                own, mask = own["observation"], own["action_mask"]
            space = self.observed[name]
            row[observed] = np.ravel(own) if isinstance(space, spaces.Box) else spaces.flatten(space, own)
            if mask is not None:
                if len(mask) != available.stop - available.start:
                    raise UserError(
                        f"{name} has {len(mask)} action masks: give one per Discrete action, from the start"
                    )
                row[available] = mask if np.any(mask) else np.arange(len(mask)) == 0
        if self.own_state:
            row[layout.state] = np.ravel(self.env.state())
        return row

    def info(self, rewards, terminated):
        """What a vector environment has no place for, as arrays over agents."""
        rewards = np.array([rewards.get(name, 0) for name in self.names], np.float32)
        return {"rewards": rewards, "terminated": np.array([terminated.get(name, False) for name in self.names])}

    def render(self):
        return self.env.render()

    def close(self):
        self.env.close()

    def __getstate__(self):
        """How to play the present episode again: few environments survive pickling, most repeat themselves."""
        return {"make": self.make, "np_random": self.np_random, "seed": self.seed, "actions": self.actions}

    def __setstate__(self, state):
        self.__init__(state["make"])
        self.np_random = state["np_random"]
        if state["seed"] is not None:
            self.begin(state["seed"])
            for actions in state["actions"]:
                self.step(actions)


class FactoredActions(gym.ActionWrapper):
    """Splits an agent's Discrete(n) actions, where n is a larger multiple of `size`, into two: first + size · second.

    mpe2 makes one number of a move, of which there are five, and of what is said. A policy with a logit for each such
    number has to learn what to say once for every move; with two factors it learns to move and to speak.
    """

    def __init__(self, env, size):
        super().__init__(env)
        self.size, given = size, env.action_space.spaces
        self.split = [isinstance(s, spaces.Discrete) and s.n > size > 1 and s.n % size == 0 for s in given]
        if not any(self.split):
            hint = "--action-factor 0 leaves actions whole"
            raise ValueError(f"no agent has Discrete(n) actions, n a larger multiple of action_factor = {size}: {hint}")
        if env.layout.available[-1].stop > env.layout.available[0].start:
            raise ValueError("action_factor cannot be used with action masks, which are not of factors")
        pairs = zip(given, self.split)
        self.action_space = spaces.Tuple(
            [spaces.MultiDiscrete([size, s.n // size]) if split else s for s, split in pairs]
        )

    def action(self, actions):
        given = zip(actions, self.env.action_space.spaces, self.split)
        return tuple(a[0] + self.size * a[1] + space.start if split else a for a, space, split in given)


def without_checks(env):
    """The same environment without PettingZoo's checks of order and bounds: a third of mpe2's time, and kept here."""
    from pettingzoo.utils.wrappers import AssertOutOfBoundsWrapper, OrderEnforcingWrapper

    while isinstance(getattr(env, "aec_env", None), (AssertOutOfBoundsWrapper, OrderEnforcingWrapper)):
        env.aec_env = env.aec_env.env
    return env


def is_masked(space):
    """Whether an observation space is a Dict with an "action_mask", as PettingZoo's turn-based games have it."""
    return isinstance(space, spaces.Dict) and "action_mask" in space.spaces


def slices(sizes, begin):
    """Slices of the given sizes, one after the other, from `begin` on."""
    ends = [begin + end for end in itertools.accumulate(sizes)]
    return [slice(end - size, end) for size, end in zip(sizes, ends)]


def make_team_envs(args, num_envs, render_mode=None, team_env=TeamEnv):
    """A vector environment with next-step autoreset, each of whose environments is team_env(what makes PettingZoo's).

    UserError, saying what to do, if it cannot be made.
    """
    parent, _, name = args.env_id.replace(":", ".").rpartition(".")
    parallel_env = None
    try:
        found = pkgutil.resolve_name(args.env_id)
        parallel_env = getattr(found, "parallel_env", found)
        if not callable(parallel_env):
            raise ValueError("it has no parallel_env")
        kwargs = json.loads(args.env_kwargs)
        if not isinstance(kwargs, dict):
            raise ValueError(f"env_kwargs {args.env_kwargs} is not a JSON object")
        if render_mode:
            kwargs["render_mode"] = render_mode
        wrappers = [pkgutil.resolve_name(path) for path in args.wrappers]

        def make_parallel():
            return functools.reduce(lambda env, wrapper: wrapper(env), wrappers, parallel_env(**kwargs))

        def make():
            env = team_env(make_parallel)
            if args.max_episode_return is not None:
                env = ReturnLimit(env, args.max_episode_return)
            return gym.wrappers.TimeLimit(env, args.max_episode_steps) if args.max_episode_steps else env

        if args.async_envs and num_envs == args.num_envs and not render_mode:  # evaluations have more, as a rule
            return gym.vector.AsyncVectorEnv([make] * num_envs)
        envs = gym.vector.SyncVectorEnv([make] * num_envs)
        if render_mode and render_mode not in envs.metadata.get("render_modes", ()):
            raise ValueError(f"it has no render mode {render_mode}")
        envs.spec = SimpleNamespace(entry_point=args.env_id, max_episode_steps=args.max_episode_steps)
        return envs
    except Exception as error:  # whatever went wrong, the library that complains knows best
        given = f" with env_kwargs {args.env_kwargs}" if args.env_kwargs != "{}" else ""
        given += f" and wrappers {' '.join(args.wrappers)}" if args.wrappers else ""
        hint, siblings = "", pkgutil.iter_modules(getattr(sys.modules.get(parent), "__path__", ()))
        near = [n for n in difflib.get_close_matches(name, [module.name for module in siblings], 2) if n != name]
        if not (parent and name):
            hint = " (an id is a module such as mpe2.simple_spread_v3)"
        elif isinstance(error, ModuleNotFoundError) and error.name:
            hint = f" (try: pip install {error.name.partition('.')[0]})"
        elif near and not callable(parallel_env):
            hint = f" (did you mean {parent}.{near[0]}?)"
        raise UserError(f"cannot make {args.env_id}{given}: {' '.join(str(error).split())}{hint}") from None


def make_factored_envs(args, num_envs, render_mode=None):
    """What make_team_envs makes, with `--action-factor` applied to every environment."""
    if not args.action_factor:
        return make_team_envs(args, num_envs, render_mode)
    factored = lambda make_parallel: FactoredActions(TeamEnv(make_parallel), args.action_factor)
    return make_team_envs(args, num_envs, render_mode, factored)


make_envs = make_factored_envs  # as evaluate and load, which all scripts share, call it


def episode_limit(args, spec=None):
    """Steps of the longest episode: the user's limit, else the environment's own, else Atari's half hour or 1,000."""
    default = 27_000 if args.env_id.startswith("ALE/") else 1_000
    return args.max_episode_steps or getattr(spec, "max_episode_steps", None) or default


# ------------------------------------------------------------------------------------------------------- networks


class ValueNorm(nn.Module):
    """Moving mean and deviation of the returns, by which the critic's targets are normalised.

    m <- beta m + (1 - beta) E[R], and the same for E[R²] and for E[1], which is what the mean is divided by: the
    average forgets its start at zero (arXiv 2103.01955, section 5.1; debiased as in arXiv 1412.6980, section 3).
    """

    def __init__(self, beta=0.99999):
        super().__init__()
        self.beta = beta
        for name in ("mean", "mean_square", "weight"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def update(self, returns):
        """Take in a batch of returns, a tensor of any shape."""
        returns = returns.detach().cpu().double()
        for average, value in ((self.mean, returns.mean()), (self.mean_square, returns.square().mean())):
            average.lerp_(value, 1 - self.beta)
        self.weight.lerp_(torch.ones_like(self.weight), 1 - self.beta)

    def mean_and_std(self):
        """Two floats. The variance is at least 0.01."""
        weight = max(self.weight.item(), 1e-5)
        mean = self.mean.item() / weight
        return mean, math.sqrt(max(self.mean_square.item() / weight - mean**2, 1e-2))

    def normalize(self, returns):
        """Returns, an array or a tensor, as the critic sees them."""
        mean, std = self.mean_and_std()
        return (returns - mean) / std

    def denormalize(self, values):
        """What the critic says, an array or a tensor, in the units of returns."""
        mean, std = self.mean_and_std()
        return values * std + mean


def layer(module, generator, gain=2**0.5):
    """A linear or convolutional layer, zero biases and orthogonal weights; a gain of √2 keeps signals their size."""
    nn.init.orthogonal_(module.weight, gain, generator)
    nn.init.zeros_(module.bias)
    return module


def mlp(sizes, generator, last_gain):
    """Linear layers between the given sizes, tanh after all but the last."""
    hidden = [(layer(nn.Linear(i, o), generator), nn.Tanh()) for i, o in zip(sizes, sizes[1:-1])]
    return nn.Sequential(*itertools.chain(*hidden), layer(nn.Linear(*sizes[-2:]), generator, last_gain))


class Categorical:
    """One or more independent discrete factors; their `logits` (B, sum of `sizes`) stand side by side."""

    def __init__(self, logits, sizes):
        self.log_probs = [factor.log_softmax(1) for factor in logits.split(sizes, 1)]

    def log_prob(self, actions):
        """(B,) for actions (B, factors)."""
        return sum(p.gather(1, a) for p, a in zip(self.log_probs, actions.split(1, 1))).squeeze(1)

    def entropy(self):
        """(B,), in nats."""
        return -sum((p.exp() * p).sum(1) for p in self.log_probs)


class DiagonalGaussian:
    """Independent normal variables with `mean` (B, D) and `log_std` (D,)."""

    def __init__(self, mean, log_std):
        self.mean, self.log_std = mean, log_std

    def log_prob(self, actions):
        """(B,): log-density of actions (B, D) before they are clipped to the bounds of the environment."""
        z = (actions - self.mean) * (-self.log_std).exp()
        return (-0.5 * z.square() - self.log_std - 0.5 * math.log(2 * math.pi)).sum(1)

    def entropy(self):
        """(B,), in nats."""
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum().expand(len(self.mean))


def flatten_parameters(parameters):
    """Lay parameters end to end in one vector, of which they become views. Returns the vector."""
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.data = part.view_as(p)
    return flat


class Net(nn.Module):
    """An MLP; a recurrent one has a GRU before its last layer, with states (N, 1, H). (Without, H = 0.)

    Called on tensors for learning. For acting there is `infer`, in NumPy: matrices are small, and torch's overhead per
    call would exceed the arithmetic. It reads the parameters' own memory, or a copy of it if that is on a GPU.
    """

    def __init__(self, inputs, hidden_sizes, outputs, recurrent, generator, last_gain, device="cpu"):
        super().__init__()
        width = hidden_sizes[-1]
        self.recurrent, self.hidden_size = recurrent, width if recurrent else 0
        self.body = nn.Sequential(mlp([inputs, *hidden_sizes], generator, 2**0.5), nn.Tanh())
        if recurrent:
            self.gru = nn.GRUCell(width, width)
            for weight in (self.gru.weight_ih, self.gru.weight_hh):
                nn.init.orthogonal_(weight, generator=generator)
            for bias in (self.gru.bias_ih, self.gru.bias_hh):
                nn.init.zeros_(bias)
        self.head = layer(nn.Linear(width, outputs), generator, last_gain)
        self.to(device)
        self.lay_out()

    def lay_out(self):
        """Lay all parameters in one vector, `flat`, and find their memory for NumPy."""
        self.leaves = list(self.parameters())
        self.flat = flatten_parameters(self.leaves)
        self.host = self.flat.cpu()  # on a CPU this is `flat` itself
        parts = self.host.split([p.numel() for p in self.leaves])
        self.arrays = {name: x.view_as(p).numpy() for (name, p), x in zip(self.named_parameters(), parts)}
        layers = [name.removesuffix(".weight") for name in self.arrays if re.match(r"body.*weight", name)]
        self.layers = [(self.arrays[f"{name}.weight"].T, self.arrays[f"{name}.bias"]) for name in layers]

    def forward(self, x, states, masks):
        """Outputs (L·N, outputs) for inputs (L·N, inputs), time-major, from the states (N, 1, H) before the first step.

        A step whose mask (L·N, 1) is 0 is a reset row: the state that it leaves behind is zero.
        """
        x = self.body(x)
        if self.recurrent:
            h, steps = states.squeeze(1), []
            for x_t, mask in zip(x.split(len(h)), masks.split(len(h))):
                h = self.gru(x_t, h)
                steps.append(h)
                h = h * mask
            x = torch.cat(steps)
        return self.head(x)

    def infer(self, x, states):
        """(outputs (B, outputs), states (B, 1, H)) after one step, in NumPy."""
        for weight, bias in self.layers:
            x = np.tanh(x @ weight + bias)
        a = self.arrays
        if self.recurrent:
            h = states[:, 0]
            from_x = x @ a["gru.weight_ih"].T + a["gru.bias_ih"]
            from_h = h @ a["gru.weight_hh"].T + a["gru.bias_hh"]
            (rx, zx, nx), (rh, zh, nh) = np.split(from_x, 3, 1), np.split(from_h, 3, 1)
            reset, keep = 1 / (1 + np.exp(-rx - rh)), 1 / (1 + np.exp(-zx - zh))
            new = np.tanh(nx + reset * nh)
            x = new + keep * (h - new)
            states = x[:, None]
        return x @ a["head.weight"].T + a["head.bias"], states


class AgentPolicy(Net):
    """A policy: from what an agent observes to a distribution over its actions, (B, factors or dimensions)."""

    def __init__(self, inputs, action_space, args, generator, device="cpu"):
        self.action_space, self.continuous = action_space, isinstance(action_space, spaces.Box)
        if self.continuous:
            outputs = math.prod(action_space.shape)
        else:
            sizes = getattr(action_space, "nvec", None)
            self.sizes = [int(action_space.n)] if sizes is None else sizes.ravel().tolist()
            outputs = sum(self.sizes)
        super().__init__(inputs, args.hidden_sizes, outputs, args.recurrent, generator, 0.01, device)
        if self.continuous:
            self.log_std = nn.Parameter(torch.zeros(outputs, device=device))
            self.lay_out()

    def forward(self, obs, states, masks, available, actions):
        """(log-probs, entropies), each (B, 1), of tensors; obs, states and masks as in Net."""
        output = super().forward(obs, states, masks)
        if available.shape[1]:
            output = output.masked_fill(available == 0, -1e9)
        pi = DiagonalGaussian(output, self.log_std) if self.continuous else Categorical(output, self.sizes)
        return pi.log_prob(actions)[:, None], pi.entropy()[:, None]

    def sample(self, obs, available, states, rng=None):
        """(actions, their log-probs (B, 1), states) for arrays; drawn with the generator `rng`, or else the modes."""
        output, states = self.infer(obs, states)
        if self.continuous:
            noise = np.zeros_like(output) if rng is None else rng.standard_normal(output.shape, np.float32)
            log_std = self.arrays["log_std"]
            log_prob = (-0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(1, keepdims=True)
            return output + np.exp(log_std) * noise, log_prob, states
        if available.shape[1]:
            output = np.where(available > 0, output, np.float32(-1e9))
        actions, log_prob, ends = [], 0, np.cumsum(self.sizes)
        for logits in np.split(output, ends[:-1], 1):
            # The Gumbel-max trick: argmax(logits + Gumbel noise) is a draw from their softmax.
            draw = logits if rng is None else logits + rng.gumbel(size=logits.shape)
            actions.append(draw.argmax(1, keepdims=True))
            logits = logits - logits.max(1, keepdims=True)
            chosen = np.take_along_axis(logits, actions[-1], 1)
            log_prob = log_prob + chosen - np.log(np.exp(logits).sum(1, keepdims=True))
        return np.concatenate(actions, 1), log_prob, states

    def to_env(self, actions):
        """Actions as the environment takes them: clipped to the bounds of a Box, in the space's shape and type."""
        space = self.action_space
        actions = actions.reshape(-1, *space.shape)
        if self.continuous:
            return np.clip(actions, space.low, space.high).astype(space.dtype)
        return (actions + getattr(space, "start", 0)).astype(space.dtype)


class Team(nn.Module):
    """The policies of all agents, the critic that they have in common, and the normaliser of its targets.

    `groups` are pairs of a policy and the agents who follow it: one if they share it, else one for each agent.
    """

    def __init__(self, layout, action_spaces, args, device="cpu"):
        super().__init__()
        self.layout, self.args, self.device = layout, args, torch.device(device)
        generator = torch.Generator().manual_seed(args.seed)
        sizes = [part.stop - part.start for part in layout.observations]
        self.num_agents, self.widest = len(sizes), max(sizes)
        leaders = [0] if args.share_policy else range(self.num_agents)
        self.actors = nn.ModuleList(AgentPolicy(sizes[i], action_spaces[i], args, generator, device) for i in leaders)
        members = [list(range(self.num_agents))] if args.share_policy else [[i] for i in range(self.num_agents)]
        self.groups = list(zip(self.actors, members))
        inputs = layout.state.stop - layout.state.start + (self.widest if args.state_type == "FP" else 0)
        critic_sizes = args.critic_hidden_sizes or args.hidden_sizes
        self.critic = Net(inputs, critic_sizes, 1, args.recurrent, generator, 1.0, device)
        self.networks = [*self.actors, self.critic]
        self.value_norm = ValueNorm() if args.value_norm else None
        self.memory = None

    def fetch(self):
        """Make what NumPy reads equal to the parameters, where these are on a GPU."""
        for network in self.networks:
            network.host.copy_(network.flat)

    def views(self, rows):
        """What each agent observes and which actions it has, two lists of arrays (N, …), in rows of TeamEnvs."""
        layout = self.layout
        return [rows[:, part] for part in layout.observations], [rows[:, part] for part in layout.available]

    def sample(self, obs, available, states, rng=None):
        """What all agents do: actions, log-probs and states of each, from what AgentPolicy.sample takes of each."""
        results = [None] * self.num_agents
        for actor, members in self.groups:
            given = [np.concatenate([x[i] for i in members]) for x in (obs, available, states)]
            parts = [np.split(x, len(members)) for x in actor.sample(*given, rng)]
            for i, *part in zip(members, *parts):
                results[i] = part
        return zip(*results)

    def to_env(self, actions):
        """The tuple of all agents' actions that the environment takes."""
        return tuple(actor.to_env(actions[i]) for actor, members in self.groups for i in members)

    def critic_inputs(self, rows):
        """What the critic sees in rows (N, …) of TeamEnvs: the state (N, S), or with agent-specific states (N, n, S').

        These are the agent's observation, as wide as the widest, beside the state; zeros once the agent is dead.
        """
        state = rows[:, self.layout.state]
        if self.args.state_type == "EP":
            return state
        own = np.zeros((len(rows), self.num_agents, self.widest), np.float32)
        for i, part in enumerate(self.layout.observations):
            own[:, i, : part.stop - part.start] = rows[:, part]
        states = np.repeat(state[:, None], self.num_agents, 1)
        return np.concatenate([own, states], 2) * rows[:, self.layout.alive, None]

    def values(self, inputs, states):
        """(values (…, 1) as the critic gives them, states (…, 1, H)) for inputs (…, S), in NumPy."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        values, after = self.critic.infer(flat, states.reshape(len(flat), 1, -1 if states.size else 0))
        return values.reshape(*inputs.shape[:-1], 1), after.reshape(states.shape)

    def act(self, rows):
        """What the deterministic policies do: rows (N, …) of TeamEnvs -> actions as the environment takes them.

        Recurrent policies remember from call to call; a row that begins an episode makes them forget.
        """
        self.fetch()
        if self.memory is None or self.memory.shape[1] != len(rows):
            self.memory = np.zeros((self.num_agents, len(rows), 1, self.actors[0].hidden_size), np.float32)
        self.memory[:, rows[:, 0] == 1] = 0
        actions, _, states = self.sample(*self.views(rows), self.memory)
        self.memory = np.stack(states)
        return self.to_env(actions)


# -------------------------------------------------------------------------------------------- returns and buffers
# Rollouts are time-major. An array of what is there before a step has T + 1 rows, of what a step brings T. N is the
# number of environments, n of agents.
#
# After an episode's end the next row only resets its environment (next-step autoreset), and what is done in it is
# ignored. It holds the final observation, so the true successor of step t is always what stands in row t + 1:
#
#     row  observation   reward  masks  bad_masks  active_masks   An episode of two steps that was truncated in s2, as
#      0   s0            r0      1      1          1              the masks of row 2 say; had it terminated, bad_masks
#      1   s1            r1      1      1          1              would be 1. Where masks are 0, no return reaches back
#      2   s2, final     0       0      0          0              across, and recurrent networks, having seen s2, begin
#      3   s0, the next  r0      1      1          1              anew. A dead agent's active_masks are 0 as well.


def backwards(terms, decay, last):
    """x_t = terms_t + decay_t x_{t+1} from x_T = `last` (N,) back to x_0: the recursion of all three estimators."""
    xs, x = [], last
    for term, factor in zip(terms.flip(0), decay.flip(0)):
        x = term + factor * x
        xs.append(x)
    return torch.stack(xs).flip(0)


def compute_returns(rewards, next_values, terminated, truncated, gamma):
    """Discounted returns (T, N): R_t = r_t + gamma R_{t+1}, with V(s_{t+1}) for R_{t+1} where something was cut off."""
    next_values, ends = next_values * ~terminated, terminated | truncated
    return backwards(rewards + gamma * ends * next_values, gamma * ~ends, next_values[-1])


def compute_gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalised advantage estimation: (advantages, returns), each (T, N).

    A_t = delta_t + gamma lambda A_{t+1},   delta_t = r_t + gamma V(s_{t+1}) - V(s_t)   (arXiv 1506.02438, eqs. 10, 16)
    """
    deltas = rewards + gamma * next_values * ~terminated - values
    advantages = backwards(deltas, gamma * gae_lambda * ~(terminated | truncated), torch.zeros_like(rewards[0]))
    return advantages, advantages + values


ActorBatch = namedtuple(
    "ActorBatch", "obs rnn_states actions masks active_masks available_actions log_probs factor advantages"
)
CriticBatch = namedtuple("CriticBatch", "share_obs rnn_states_critic masks active_masks value_preds returns")


def merge(x):
    """(A, B, …) -> (A·B, …)."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def feed_forward_batches(fields, num_mini_batch, rng):
    """Yield lists of the fields' rows (B, …), which together hold all of (T, S, …) once, in random order."""
    flat = [merge(field) for field in fields]
    for rows in np.array_split(rng.permutation(len(flat[0])), num_mini_batch):
        yield [field[rows] for field in flat]


def recurrent_batches(fields, states, num_mini_batch, length, rng):
    """Yield pairs of the fields' rows (L·C, …), time-major, and states (C, …) before the first steps of C chunks.

    Fields are (T, S, …): of each of S streams the T steps are cut into chunks of L = `length`, numbered stream by
    stream, and shuffled. Length T takes streams whole.
    """
    T, S = fields[0].shape[:2]
    if T % length:
        raise ValueError(f"chunks of {length} steps do not divide a rollout of {T}")
    chunks = [x.swapaxes(0, 1).reshape(S * T // length, length, *x.shape[2:]) for x in (*fields, states[:T])]
    for ids in np.array_split(rng.permutation(S * T // length), num_mini_batch):
        *rows, states = (x[ids].swapaxes(0, 1) for x in chunks)
        yield [merge(x) for x in rows], states[0]


class OnPolicyActorBuffer:
    """What one agent saw and did in a rollout: obs (T + 1, N, …), actions (T, N, D) and so on; see the table above.

    `available_actions` (T + 1, N, choices) has no choices if all are always available; recurrent states are
    (T + 1, N, 1, H), with H = 0 for a policy without. `factor` (T, N, 1) is HAPPO's M.
    """

    def __init__(self, num_steps, num_envs, obs_size, action_space, num_choices=0, hidden_size=0, device="cpu"):
        T, N, continuous = num_steps, num_envs, isinstance(action_space, spaces.Box)
        self.obs = np.zeros((T + 1, N, obs_size), np.float32)
        self.rnn_states = np.zeros((T + 1, N, 1, hidden_size), np.float32)
        self.available_actions = np.ones((T + 1, N, num_choices), np.float32)
        self.masks, self.active_masks = np.ones((2, T + 1, N, 1), np.float32)
        self.actions = np.zeros((T, N, math.prod(action_space.shape)), np.float32 if continuous else np.int64)
        self.action_log_probs, self.factor = np.zeros((T, N, 1), np.float32), np.ones((T, N, 1), np.float32)
        self.num_steps, self.device, self.step = T, device, 0

    def insert(self, obs, rnn_states, actions, action_log_probs, masks, active_masks=None, available_actions=None):
        """Append a step, each argument (N, …): what was done in this row, and all else as it is in the next."""
        t = self.step
        self.actions[t], self.action_log_probs[t] = actions, action_log_probs
        self.obs[t + 1], self.rnn_states[t + 1], self.masks[t + 1] = obs, rnn_states, masks
        self.active_masks[t + 1] = masks if active_masks is None else active_masks
        if available_actions is not None:
            self.available_actions[t + 1] = available_actions
        self.step = (t + 1) % self.num_steps

    def after_update(self):
        """Begin the next rollout where this one ended."""
        for x in (self.obs, self.rnn_states, self.masks, self.active_masks, self.available_actions):
            x[0] = x[-1]
        self.factor[:] = 1

    def fields(self, advantages):
        """What a batch consists of, without the recurrent states; advantages are (T, N, 1)."""
        rows = self.obs, self.actions, self.masks, self.active_masks, self.available_actions
        return *(x[: self.num_steps] for x in rows), self.action_log_probs, self.factor, advantages

    def batch(self, rows, states):
        """An ActorBatch of tensors."""
        obs, *others = (torch.as_tensor(x, device=self.device) for x in rows)
        return ActorBatch(obs, torch.as_tensor(states, device=self.device), *others)

    def feed_forward_generator_actor(self, advantages, num_mini_batch, rng):
        """Yield ActorBatches of single rows (B, …) in random order."""
        fields = [*self.fields(advantages), self.rnn_states[:-1]]
        for *rows, states in feed_forward_batches(fields, num_mini_batch, rng):
            yield self.batch(rows, states)

    def naive_recurrent_generator_actor(self, advantages, num_mini_batch, rng):
        """Yield ActorBatches of whole rollouts (T·C, …) of environments in random order."""
        yield from self.recurrent_generator_actor(advantages, num_mini_batch, self.num_steps, rng)

    def recurrent_generator_actor(self, advantages, num_mini_batch, data_chunk_length, rng):
        """Yield ActorBatches of chunks of `data_chunk_length` steps (L·C, …) in random order."""
        fields = self.fields(advantages)
        for batch in recurrent_batches(fields, self.rnn_states, num_mini_batch, data_chunk_length, rng):
            yield self.batch(*batch)


class CriticBuffer:
    """What the critic saw in a rollout: share_obs (T + 1, *streams, S) and so on, with a value and return per stream.

    The values are those the critic gave: normalised, if it predicts normalised returns. With `gae_lambda` None there
    is no GAE: returns are discounted rewards.
    """

    def __init__(self, num_steps, streams, state_size, hidden_size=0, device="cpu", gamma=0.99, gae_lambda=0.95):
        T = num_steps
        self.share_obs = np.zeros((T + 1, *streams, state_size), np.float32)
        self.rnn_states_critic = np.zeros((T + 1, *streams, 1, hidden_size), np.float32)
        self.masks, self.bad_masks, self.active_masks = np.ones((3, T + 1, *streams, 1), np.float32)
        self.value_preds = np.zeros((T + 1, *streams, 1), np.float32)
        self.rewards = np.zeros((T, *streams, 1), np.float32)
        self.num_steps, self.device, self.gamma, self.gae_lambda, self.step = T, device, gamma, gae_lambda, 0

    def insert(self, share_obs, rnn_states_critic, value_preds, rewards, masks, bad_masks, active_masks=None):
        """Append a step, each argument (N, …): value and reward of this row, and all else as it is in the next."""
        t = self.step
        self.value_preds[t], self.rewards[t] = value_preds, rewards
        self.share_obs[t + 1], self.rnn_states_critic[t + 1] = share_obs, rnn_states_critic
        self.masks[t + 1], self.bad_masks[t + 1] = masks, bad_masks
        self.active_masks[t + 1] = masks if active_masks is None else active_masks
        self.step = (t + 1) % self.num_steps

    def after_update(self):
        """Begin the next rollout where this one ended."""
        for x in (self.share_obs, self.rnn_states_critic, self.masks, self.bad_masks, self.active_masks):
            x[0] = x[-1]

    def compute_returns(self, next_value, value_normalizer=None):
        """Set returns and advantages (T, N, 1), in the units of rewards, from the value of the last row.

        Reset rows hold final states, so the value of the final state before a truncation stands in the next row.
        """
        self.value_preds[-1] = next_value
        values = value_normalizer.denormalize(self.value_preds) if value_normalizer else self.value_preds
        values = torch.as_tensor(values)
        ends, truncated = (torch.as_tensor(x[1:] == 0) for x in (self.masks, self.bad_masks))
        step = torch.as_tensor(self.rewards), values[1:], ends & ~truncated, ends & truncated
        if self.gae_lambda is None:
            returns = compute_returns(*step, self.gamma)
            advantages = returns - values[:-1]
        else:
            advantages, returns = compute_gae(step[0], values[:-1], *step[1:], self.gamma, self.gae_lambda)
        self.advantages, self.returns = advantages.numpy(), returns.numpy()

    def fields(self):
        """What a batch consists of, (T, streams, …), without the recurrent states, and these."""
        rows = self.share_obs, self.masks, self.active_masks, self.value_preds
        fields = [*(x[:-1] for x in rows), self.returns, self.rnn_states_critic[:-1]]
        T, S, streams = self.num_steps, math.prod(self.masks.shape[1:]), self.masks.ndim - 1
        *fields, states = (x.reshape(T, S, *x.shape[streams:]) for x in fields)
        return fields, states

    def batch(self, rows, states):
        """A CriticBatch of tensors."""
        share_obs, *others = (torch.as_tensor(x, device=self.device) for x in rows)
        return CriticBatch(share_obs, torch.as_tensor(states, device=self.device), *others)

    def feed_forward_generator_critic(self, num_mini_batch, rng):
        """Yield CriticBatches of single rows (B, …) in random order."""
        fields, states = self.fields()
        for *rows, first in feed_forward_batches([*fields, states], num_mini_batch, rng):
            yield self.batch(rows, first)

    def naive_recurrent_generator_critic(self, num_mini_batch, rng):
        """Yield CriticBatches of whole rollouts (T·C, …) of environments in random order."""
        yield from self.recurrent_generator_critic(num_mini_batch, self.num_steps, rng)

    def recurrent_generator_critic(self, num_mini_batch, data_chunk_length, rng):
        """Yield CriticBatches of chunks of `data_chunk_length` steps (L·C, …) in random order."""
        for batch in recurrent_batches(*self.fields(), num_mini_batch, data_chunk_length, rng):
            yield self.batch(*batch)


class OnPolicyCriticBufferEP(CriticBuffer):
    """One state, value and return per environment ("environment-provided" state): arrays (T + 1, N, …)."""

    def __init__(self, num_steps, num_envs, state_size, *more, **options):
        super().__init__(num_steps, (num_envs,), state_size, *more, **options)


class OnPolicyCriticBufferFP(CriticBuffer):
    """A state, value and return for each agent ("feature-pruned" state): arrays (T + 1, N, n, …).

    Chunks are numbered environment by environment, and agent by agent within each.
    """

    def __init__(self, num_steps, num_envs, num_agents, state_size, *more, **options):
        super().__init__(num_steps, (num_envs, num_agents), state_size, *more, **options)


# ----------------------------------------------------------------------------------------------- losses and update


def active_mean(x, active):
    """Mean over the rows (B, 1) whose mask is 1; 0 if there are none."""
    return (x * active).sum() / active.sum().clamp(min=1)


def actor_loss(log_ratios, advantages, active, clip_coef):
    """The clipped surrogate, negated, of log r = log pi - log mu and A (or HAPPO's A M), each (B, 1).

    L = E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ] over active rows (arXiv 2103.01955, appendix A). As in policy_loss
    of ppo.py, the clipped term may as well be the constant A + eps |A|.
    """
    return -active_mean(torch.min(log_ratios.exp() * advantages, advantages + clip_coef * advantages.abs()), active)


def huber_value_loss(values, old_values, returns, active, huber_delta, clip_coef=None):
    """Mean Huber loss over active rows, all (B, 1): e²/2 up to |e| = delta, from there on linear.

    With `clip_coef`, moving a value further gains nothing (arXiv 2103.01955, appendix A).
    """

    def huber(errors):
        small = errors.abs().clamp(max=huber_delta)
        return small * (errors.abs() - 0.5 * small)

    errors = huber(values - returns)
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, huber(clipped - returns))
    return active_mean(errors, active)


def normalize_active(advantages, active):
    """Advantages with the mean and (population) deviation of the active ones taken out; arrays of equal shape."""
    some = advantages[active > 0]
    return (advantages - some.mean()) / (some.std() + 1e-5) if some.size else advantages


def approximate_kl(log_ratios):
    """KL(mu || pi) from log r of samples of mu: E[(r - 1) - log r], unbiased, no term negative (Schulman's k3)."""
    return (log_ratios.exp() - 1 - log_ratios).mean()


class Adam:
    """Adam (arXiv 1412.6980, algorithm 1) on the flat vector of all parameters.

    The numbers of torch.optim.Adam, without the time that many small tensors and the first use of torch.optim take.
    """

    def __init__(self, flat, eps=1e-5):
        self.flat, self.eps = flat, eps
        self.state = {"m": torch.zeros_like(flat), "v": torch.zeros_like(flat), "t": torch.zeros(())}

    def step(self, gradient, learning_rate, max_norm):
        """Descend along `gradient`, shortened to `max_norm` before."""
        gradient = gradient * (max_norm / (gradient.norm() + 1e-6)).clamp(max=1)
        m, v, t = self.state.values()
        t += 1
        m.lerp_(gradient, 1 - 0.9)
        v.lerp_(gradient.square(), 1 - 0.999)
        v_hat = v / (1 - 0.999 ** t.item())
        self.flat.addcdiv_(m, v_hat.sqrt_().add_(self.eps), value=-learning_rate / (1 - 0.9 ** t.item()))

    def state_dict(self):
        """The moments and the number of steps, for a checkpoint."""
        return self.state

    def load_state_dict(self, state):
        """Copy what state_dict returned."""
        for name, value in self.state.items():
            value.copy_(state[name])


def join_agents(batches):
    """One ActorBatch of several agents', (L·C, …) each: agents join the C chunks, time stays the slowest axis."""
    length = len(batches[0].masks) // len(batches[0].rnn_states)
    joined = {}
    for name, parts in zip(ActorBatch._fields, zip(*batches)):
        if name == "rnn_states":
            joined[name] = torch.cat(parts)
        else:
            joined[name] = torch.cat([x.unflatten(0, (length, -1)) for x in parts], 1).flatten(0, 1)
    return ActorBatch(**joined)


def actor_gradient(actor, batch, args):
    """(flat gradient, [policy loss, entropy], log pi - log mu (B, 1)) of an ActorBatch."""
    log_probs, entropies = actor(batch.obs, batch.rnn_states, batch.masks, batch.available_actions, batch.actions)
    log_ratios = log_probs - batch.log_probs
    pg_loss = actor_loss(log_ratios, batch.factor * batch.advantages, batch.active_masks, args.clip_coef)
    entropy = active_mean(entropies, batch.active_masks)
    gradient = torch.autograd.grad(pg_loss - args.ent_coef * entropy, actor.leaves)
    return torch.cat([g.flatten() for g in gradient]), torch.stack([pg_loss, entropy]).detach(), log_ratios.detach()


def critic_gradient(critic, batch, args, value_norm):
    """(flat gradient, value loss) of a CriticBatch."""
    values = critic(batch.share_obs, batch.rnn_states_critic, batch.masks)
    returns = value_norm.normalize(batch.returns) if value_norm else batch.returns
    clip_coef = args.clip_vloss_coef if args.clip_vloss else None
    loss = huber_value_loss(values, batch.value_preds, returns, batch.active_masks, args.huber_delta, clip_coef)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, critic.leaves)]), loss.detach()


def minibatches(buffer, kind, args, rng, *advantages):
    """One epoch of a buffer's minibatches, as the arguments ask for; `kind` is actor or critic."""
    form, length = "feed_forward", ()
    if args.recurrent:
        form, length = ("recurrent", (args.data_chunk_length,)) if args.data_chunk_length else ("naive_recurrent", ())
    return getattr(buffer, f"{form}_generator_{kind}")(*advantages, args.num_minibatches, *length, rng)


def update(team, optimizers, actor_buffers, critic_buffer, learning_rate, args, rng):
    """Estimate advantages and take all gradient steps on one rollout. Returns the figures for metrics.csv."""
    next_value, _ = team.values(critic_buffer.share_obs[-1], critic_buffer.rnn_states_critic[-1])
    critic_buffer.compute_returns(next_value, team.value_norm)
    active = critic_buffer.active_masks[:-1] > 0
    returns, errors = critic_buffer.returns[active], critic_buffer.advantages[active]  # returns - values
    explained_variance = 1 - errors.var() / (returns.var() + 1e-8) if len(returns) else 0.0

    losses, value_losses, log_ratios = [], [], []
    order = rng.permutation(len(team.groups)) if args.happo else range(len(team.groups))
    factor = np.ones_like(actor_buffers[0].factor)
    for group in order:
        actor, members = team.groups[group]
        buffers = [actor_buffers[i] for i in members]
        advantages = [critic_buffer.advantages] * len(members)
        if args.state_type == "FP":  # each agent has a value, and so an advantage, of its own
            advantages = [critic_buffer.advantages[:, :, i] for i in members]
        advantages = normalize_active(np.stack(advantages), np.stack([b.active_masks[:-1] for b in buffers]))
        for _ in range(args.update_epochs):
            parts = [minibatches(b, "actor", args, rng, a) for b, a in zip(buffers, advantages)]
            for batch in map(join_agents, zip(*parts)):
                gradient, loss, log_ratio = actor_gradient(actor, batch, args)
                optimizers[group].step(gradient, learning_rate, args.max_grad_norm)
                losses.append(loss)
                log_ratios.append(log_ratio[batch.active_masks > 0])
        if args.happo:  # the next in order are told how likely this one's actions have become
            factor = factor * ratios(actor, buffers[0])
            for buffer in actor_buffers:
                buffer.factor[:] = factor
    if team.value_norm:
        team.value_norm.update(torch.as_tensor(returns))
    for _ in range(args.update_epochs):
        for batch in minibatches(critic_buffer, "critic", args, rng):
            gradient, loss = critic_gradient(team.critic, batch, args, team.value_norm)
            optimizers[-1].step(gradient, learning_rate, args.max_grad_norm)
            value_losses.append(loss)
    log_ratios, (pg_loss, entropy) = torch.cat(log_ratios), torch.stack(losses).mean(0)
    figures = {"policy_loss": pg_loss, "value_loss": torch.stack(value_losses).mean(), "entropy": entropy}
    figures["approx_kl"] = approximate_kl(log_ratios)
    figures["clip_fraction"] = ((log_ratios.exp() - 1).abs() > args.clip_coef).float().mean()
    return {name: x.item() for name, x in figures.items()} | {"explained_variance": float(explained_variance)}


def ratios(actor, buffer):
    """pi(a|o) / mu(a|o) (T, N, 1) of an agent's steps, pi being its policy as it has become; 1 where not active."""
    T = buffer.num_steps
    rows = buffer.obs[:-1], buffer.masks[:-1], buffer.available_actions[:-1], buffer.actions
    obs, masks, available, actions = (torch.as_tensor(x, device=buffer.device).flatten(0, 1) for x in rows)
    states = torch.as_tensor(buffer.rnn_states[0], device=buffer.device)
    with torch.no_grad():
        log_probs, _ = actor(obs, states, masks, available, actions)
    log_ratios = log_probs.cpu().numpy().reshape(T, -1, 1) - buffer.action_log_probs
    return np.exp(log_ratios * buffer.active_masks[:-1])


# -------------------------------------------------------------------------------------- run folder and evaluation

LOWER_PANEL = ("policy_loss", "value_loss", "entropy")  # columns of metrics.csv that the learning curve shows as well
EVALUATION = 10_000  # added to the seed: evaluations start from other states than training does
# TeamEnvs are carried over by playing the present episode again. Tested: these then go on just where they were.
CARRIED = ("mpe2.",)


def evaluate(agent, args, episodes=100, seed=0, render=False, video=None):
    """(mean, standard deviation) of the undiscounted return of deterministic episodes.

    Every episode has a slot of its own: to count those that finish first would favour the short ones. `render` opens a
    window; `video` is the path of an mp4 of the first slot (of Atari, which cannot render here, what the agent sees).
    """
    atari = args.env_id.startswith("ALE/")
    envs = make_envs(args, episodes, "human" if render else "rgb_array" if video and not atari else None)
    obs, _ = envs.reset(seed=seed)
    returns, playing, frames = np.zeros(episodes), np.ones(episodes, bool), []
    for _ in range(episode_limit(args, envs.spec)):
        if video:
            frames.append(np.stack([obs[0, -1]] * 3, -1) if atari else envs.render()[0])
        obs, rewards, terminated, truncated, _ = envs.step(agent.act(obs))
        returns[playing] += rewards[playing]
        playing &= ~(terminated | truncated)
        if not playing.any():
            break
    if video:
        from moviepy import ImageSequenceClip  # slow to import

        video.parent.mkdir(exist_ok=True)
        clip = ImageSequenceClip(frames, fps=envs.metadata.get("render_fps", 30))
        clip.write_videofile(str(video), logger=None)
    envs.close()
    return float(returns.mean()), float(returns.std())


def atomic_write(path, write):
    """Call write(temporary path), then rename: whoever looks finds the old file or the new one, never half of one."""
    temporary = path.with_name(f"{path.name}.tmp")
    write(temporary)
    os.replace(temporary, path)


def start_run(args):
    """Make the run folder and its config.json: all arguments, git commit, versions, machine. Returns its Path."""
    stamp = f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"  # to the microsecond: runs may begin in the same second
    name = f"{re.sub('[/:]', '-', args.env_id)}__{Path(__file__).stem}__{args.seed}__{stamp}"
    run_dir, commit = Path(args.run_dir or f"runs/{name}"), ""
    if (run_dir / "config.json").exists():
        raise UserError(f"{run_dir} holds a run already: --resume it, or choose another --run-dir")
    try:
        (run_dir / "models").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the run folder {run_dir}: {error}") from None
    with contextlib.suppress(OSError):  # no git on this machine
        git = ["git", "-C", str(Path(__file__).parent), *"describe --always --exclude=* --abbrev=40 --dirty=+".split()]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    config = {
        "args": dataclasses.asdict(args),
        "git": {"commit": commit.rstrip("+"), "dirty": commit.endswith("+")},
        "versions": {k: importlib.metadata.version(k) for k in ("torch", "gymnasium", "numpy") if k in sys.modules},
        "machine": f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores",
    }
    atomic_write(run_dir / "config.json", lambda path: path.write_text(json.dumps(config, indent=1)))
    return run_dir


def log_row(run_dir, row):
    """Append a dict of figures to metrics.csv."""
    with (run_dir / "metrics.csv").open("a") as file:
        if file.tell() == 0:
            file.write(",".join(row) + "\n")
        file.write(",".join(f"{v:.8g}" if isinstance(v, float) else str(v) for v in row.values()) + "\n")


def evaluate_and_save(agent, args, run, run_dir):
    """Evaluate; save the weights as models/STEP.pt, and as models/best.pt if none were better; film if asked to."""
    seed = args.seed + EVALUATION
    mean, std = evaluate(agent, args, args.eval_episodes, seed)
    check_finite(args, run.step, evaluation=mean)
    best = all(mean >= earlier for _, earlier, _ in run.evaluations)
    run.evaluations.append((run.step, mean, std))
    state = {"env_id": args.env_id, "step": run.step, "agent": agent.state_dict()}
    for name in [run.step, "best"] if best else [run.step]:
        atomic_write(run_dir / f"models/{name}.pt", lambda path: torch.save(state, path))
    if args.capture_video:
        evaluate(agent, args, 1, seed, video=run_dir / f"videos/{run.step}.mp4")


def save_checkpoint(run_dir, args, run, rng, envs, **parts):
    """Write checkpoint.pt (the run, the generator, the state_dict of each part) and the state of the environments.

    That goes first, to a file with the step in its name; checkpoint.pt names it, so that its rename commits both.
    Environments that cannot be carried over are not written.
    """
    entry_point = str(getattr(envs.spec, "entry_point", ""))
    carried = entry_point.startswith(CARRIED) and all(path.startswith("gymnasium.") for path in args.wrappers)
    envs_file = f"envs_{run.step}.pkl" if carried else None
    if carried:
        import cloudpickle

        atomic_write(run_dir / envs_file, lambda path: path.write_bytes(cloudpickle.dumps(envs)))
    state = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in vars(run).items()}
    state |= {"env_id": args.env_id, "envs_file": envs_file, "rng": rng.bit_generator.state}
    state |= {name: part.state_dict() for name, part in parts.items()}
    atomic_write(run_dir / "checkpoint.pt", lambda path: torch.save(state, path))
    for file in run_dir.glob("envs_*.pkl"):
        if file.name != envs_file:
            file.unlink()


@contextlib.contextmanager
def blame(path):
    """UserError that names the file at `path`, if something goes wrong while it is read."""
    try:
        yield
    except Exception as error:  # loading raises many kinds
        foreign = isinstance(error, pickle.UnpicklingError)  # torch would explain how to run what is in the file
        reason = type(error).__name__ if foreign else " ".join(str(error).split())[:200]
        raise UserError(f"{path} is missing, damaged, or of another script, environment or network: {reason}") from None


def load_file(path, args, agent):
    """Load what torch.save wrote, without executing any of it, and copy the weights into the agent. Returns the dict.

    UserError unless the file is whole, of args.env_id and of a network like the agent's.
    """
    with blame(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["env_id"] != args.env_id:
            raise ValueError(f"it is of {state['env_id']}, not of {args.env_id}")
        agent.load_state_dict(state["agent"])
        return state


def load(run_dir, model="best", args=None):
    """The agent that a run has left behind; `model` is best, last or a step. UserError if missing or damaged."""
    args = args or Args(evaluate=str(run_dir))  # those of the run
    envs = make_envs(args, 1)
    agent = make_agent(args, envs)
    envs.close()
    load_file(Path(run_dir, "checkpoint.pt" if model == "last" else f"models/{model}.pt"), args, agent)
    return agent


def restore_checkpoint(run_dir, args, run, rng, envs, agent, **parts):
    """Put everything back as it was at the last checkpoint, and cut metrics.csv there. Returns the environments."""
    config = read_config(run_dir / "config.json")
    if changed := [name for name in config if name not in RESUMABLE and getattr(args, name) != config[name]]:
        raise UserError(f"{', '.join(changed)} cannot change when a run is resumed")
    state = load_file(run_dir / "checkpoint.pt", args, agent)
    with blame(run_dir / "checkpoint.pt"):
        rng.bit_generator.state = state["rng"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
        for name, value in vars(run).items():
            setattr(run, name, state[name].numpy() if isinstance(value, np.ndarray) else state[name])
    if state["envs_file"]:
        import cloudpickle

        with blame(run_dir / state["envs_file"]):
            envs = cloudpickle.loads((run_dir / state["envs_file"]).read_bytes())
    else:
        print(f"the state of {args.env_id} cannot be carried over: its episodes restart")
        run.obs, _ = envs.reset(seed=args.seed + run.step)
        for name in {"reset_rows", "returns", "discounted", "noise"} & vars(run).keys():
            getattr(run, name)[:] = 0
    metrics = run_dir / "metrics.csv"
    if run.step == 0:  # killed before the first checkpoint after the one at the start
        metrics.unlink(missing_ok=True)
    else:
        with blame(metrics):
            header, *rows = metrics.read_text().splitlines(keepends=True)
            kept = [row for row in rows if row.endswith("\n") and int(row.split(",")[0]) <= run.step]
        atomic_write(metrics, lambda path: path.write_text("".join([header, *kept])))
    config = json.loads((run_dir / "config.json").read_text()) | {"args": dataclasses.asdict(args)}
    atomic_write(run_dir / "config.json", lambda path: path.write_text(json.dumps(config, indent=1)))
    return envs


def draw_curve(run_dir, args, run):
    """Write learning_curve.png: returns of episodes, their running mean, evaluations; below, LOWER_PANEL's figures."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(9, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps, returns = np.array(run.episodes, float).reshape(-1, 2).T
    sums = np.concatenate([np.zeros(100), returns.cumsum()])
    running_mean = (sums[100:] - sums[:-100]) / np.minimum(np.arange(len(returns)) + 1, 100)
    top.plot(steps, returns, ".", color="tab:blue", alpha=0.25, markersize=3, label="training episode")
    top.plot(steps, running_mean, color="tab:blue", label="mean of the last 100")
    if run.evaluations:
        points = np.array(run.evaluations, float).T
        top.errorbar(*points, fmt="o-", color="tab:orange", capsize=3, label="evaluation, ± standard deviation")
    top.set(title=f"{args.env_id}, seed {args.seed}", ylabel="return of an episode")
    metrics = np.genfromtxt(run_dir / "metrics.csv", delimiter=",", names=True, ndmin=1)
    for name in LOWER_PANEL:
        bottom.plot(metrics["step"], metrics[name], label=name.replace("_", " "))
    scale = "symlog" if max(np.abs(np.nan_to_num(metrics[name])).max() for name in LOWER_PANEL) > 10 else "linear"
    bottom.set(xlabel="environment steps", ylabel="mean since the last log row", yscale=scale)
    bottom.xaxis.set_major_formatter("{x:,.0f}")
    for axis in (top, bottom):
        axis.legend()
        axis.grid(alpha=0.3)
    atomic_write(run_dir / "learning_curve.png", lambda path: figure.savefig(path, dpi=120, format="png"))


def finish(run_dir, args, run):
    """Draw the curve, write summary.json, print the last two lines, return the summary."""
    draw_curve(run_dir, args, run)
    step, mean, std = run.evaluations[-1]
    summary = {"eval_return_mean": mean, "eval_return_std": std, "eval_episodes": args.eval_episodes}
    summary |= {"global_step": step, "seconds": run.seconds, "steps_per_second": step / run.seconds}
    atomic_write(run_dir / "summary.json", lambda path: path.write_text(json.dumps(summary, indent=1)))
    print(f"evaluation: {mean:.1f} ± {std:.1f} over {args.eval_episodes} episodes, after {step:,} steps")
    print(f"learning curve: {run_dir / 'learning_curve.png'}   to watch it play: --evaluate {run_dir} --render")
    return summary


def check_finite(args, step, **fields):
    """UserError naming the environment, the step and the field if a value holds a NaN or an infinity."""
    for name, value in fields.items():
        if not np.isfinite(value).all():
            raise UserError(f"{args.env_id}, step {step}: {name} is NaN or infinite; earlier checkpoints are good")


# ------------------------------------------------------------------------------------------------------- training


def choose_device(args, image=False):
    """The device that args.device means, and torch's threads set to match. UserError if the device is none."""
    device = args.device if args.device != "auto" else "cuda" if image and torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {device}: {str(error).splitlines()[0]}") from None
    torch.set_num_threads(args.torch_threads or (os.cpu_count() if image else 1))
    return device


def make_team(args, envs):
    """An untrained Team for these environments. UserError if a space or the device is none this script handles."""
    action_spaces, layout = envs.single_action_space.spaces, envs.get_attr("layout")[0]
    sizes = {(part.stop - part.start) for part in layout.observations}
    if max(sizes) > 10_000:
        raise UserError(f"{args.env_id} has observations of {max(sizes)} numbers; vectors are needed: use --wrappers")
    for space in action_spaces:
        if not isinstance(space, (spaces.Discrete, spaces.Box, spaces.MultiDiscrete)):
            raise UserError(f"{args.env_id} has {space}; mappo.py needs Discrete, Box or MultiDiscrete actions")
    if args.share_policy and (len(sizes) > 1 or any(space != action_spaces[0] for space in action_spaces)):
        raise UserError(f"the agents of {args.env_id} differ in observations or actions: add --no-share-policy")
    if not args.hidden_sizes or args.critic_hidden_sizes == ():
        raise UserError("hidden_sizes and critic_hidden_sizes need at least one layer")
    if args.happo and args.share_policy:
        raise UserError("happo updates one policy after the other: add --no-share-policy")
    return Team(layout, action_spaces, args, choose_device(args))


make_agent = make_team  # as load, which all scripts share, calls it


def make_buffers(args, team):
    """([one OnPolicyActorBuffer per agent], the critic's buffer)."""
    T, N, actors = args.num_steps, args.num_envs, []
    for actor, members in team.groups:
        for i in members:
            obs, available = team.layout.observations[i], team.layout.available[i]
            sizes = obs.stop - obs.start, actor.action_space, available.stop - available.start, actor.hidden_size
            actors.append(OnPolicyActorBuffer(T, N, *sizes, team.device))
    inputs, gae_lambda = team.critic.body[0][0].in_features, args.gae_lambda if args.gae else None
    more = inputs, team.critic.hidden_size, team.device, args.gamma, gae_lambda
    if args.state_type == "EP":
        return actors, OnPolicyCriticBufferEP(T, N, *more)
    return actors, OnPolicyCriticBufferFP(T, N, team.num_agents, *more)


def mean_return(run):
    """Mean return of the last 100 training episodes; NaN before the first."""
    recent = [total for _, total in run.episodes[-100:]]
    return sum(recent) / len(recent) if recent else math.nan


def is_finished(args, run):
    """Whether all steps are taken, or the last 100 training episodes are as good as --stop-at-return asks."""
    solved = args.stop_at_return is not None and len(run.episodes) >= 100 and mean_return(run) >= args.stop_at_return
    return solved or run.step >= args.total_timesteps


Row = namedtuple("Row", "obs available masks active_masks share_obs critic_masks critic_active_masks")


def next_row(team, run):
    """The row that comes next, as the buffers hold it; obs, available and active_masks are lists over agents."""
    masks = 1 - run.reset_rows[:, None].astype(np.float32)
    active = [masks * run.obs[:, [column]] for column in range(team.layout.alive.start, team.layout.alive.stop)]
    critic_masks = masks, masks
    if team.args.state_type == "FP":
        critic_masks = np.repeat(masks[:, None], team.num_agents, 1), np.stack(active, 1)
    return Row(*team.views(run.obs), masks, active, team.critic_inputs(run.obs), *critic_masks)


def begin(team, actor_buffers, critic_buffer, run):
    """Put where the run stands into the buffers' first row."""
    row, first = next_row(team, run), run.obs[:, 0] == 1
    run.rnn_states[:, first], run.rnn_states_critic[first] = 0, 0
    for b, *own in zip(actor_buffers, row.obs, row.available, row.active_masks, run.rnn_states):
        b.obs[0], b.available_actions[0], b.active_masks[0], b.rnn_states[0], b.masks[0] = *own, row.masks
    b = critic_buffer
    b.share_obs[0], b.rnn_states_critic[0] = row.share_obs, run.rnn_states_critic
    b.masks[0], b.active_masks[0] = row.critic_masks, row.critic_active_masks


def rollout(team, envs, actor_buffers, critic_buffer, args, run, rng):
    """Fill the buffers with one rollout; `run` keeps what goes on from rollout to rollout."""
    team.fetch()
    for t in range(args.num_steps):
        before = zip(*((b.obs[t], b.available_actions[t], b.rnn_states[t]) for b in actor_buffers))
        actions, log_probs, states = team.sample(*before, rng)
        values, critic_states = team.values(critic_buffer.share_obs[t], critic_buffer.rnn_states_critic[t])
        run.obs, rewards, terminated, truncated, _ = envs.step(team.to_env(actions))
        run.step += args.num_envs - int(run.reset_rows.sum())
        check_finite(args, run.step, observation=run.obs, reward=rewards)
        forget, run.reset_rows = run.reset_rows, terminated | truncated
        row = next_row(team, run)
        for i, buffer in enumerate(actor_buffers):
            states[i][forget] = 0
            own = row.active_masks[i], row.available[i]
            buffer.insert(row.obs[i], states[i], actions[i], log_probs[i], row.masks, *own)
        critic_states[forget] = 0
        wide = args.num_envs, *[1] * (row.critic_masks.ndim - 1)  # one reward for all agents
        bad_masks = 1 - (truncated & ~terminated).reshape(wide)
        masks = row.critic_masks, bad_masks, row.critic_active_masks
        critic_buffer.insert(row.share_obs, critic_states, values, rewards.reshape(wide), *masks)
        run.returns += rewards
        if run.reset_rows.any():
            run.episodes += [(run.step, total) for total in run.returns[run.reset_rows].tolist()]
            run.returns[run.reset_rows] = 0
    run.rnn_states = np.stack([buffer.rnn_states[-1] for buffer in actor_buffers])
    run.rnn_states_critic = critic_buffer.rnn_states_critic[-1].copy()


def train(args):
    """Train as `args` say. Returns the final figures, which also stand in summary.json. UserError on bad input."""
    check_args(args)
    length = (args.data_chunk_length or args.num_steps) if args.recurrent else 1
    if args.num_steps % length:
        raise UserError(f"data_chunk_length = {length} does not divide num_steps = {args.num_steps}")
    if args.num_envs * args.num_steps // length % args.num_minibatches:
        rows = f"num_envs x num_steps / chunk length = {args.num_envs * args.num_steps // length} rows or chunks"
        raise UserError(f"{rows} do not divide into num_minibatches = {args.num_minibatches} equal parts")
    envs = make_envs(args, args.num_envs)
    team = make_agent(args, envs)
    if args.capture_video:
        make_envs(args, 1, "rgb_array").close()  # now, rather than at the first evaluation, if it has no pictures
    optimizers = [Adam(network.flat) for network in team.networks]
    actor_buffers, critic_buffer = make_buffers(args, team)
    rng = np.random.default_rng(args.seed)
    obs, _ = envs.reset(seed=args.seed)
    run = SimpleNamespace(  # all that the loop changes, besides weights and generators: a checkpoint holds it
        step=0,  # environment steps, without reset rows
        seconds=0.0,
        episodes=[],  # (step, return) of each training episode, summed over agents
        evaluations=[],  # (step, mean, standard deviation)
        obs=obs,
        reset_rows=np.zeros(args.num_envs, bool),  # whether the next row of an environment only resets it
        returns=np.zeros(args.num_envs),  # of the episodes being played
        rnn_states=np.stack([buffer.rnn_states[0] for buffer in actor_buffers]),  # (n, N, 1, H)
        rnn_states_critic=critic_buffer.rnn_states_critic[0].copy(),
    )
    run_dir = Path(args.resume) if args.resume else start_run(args)
    args.folder = run_dir  # for main, should it be interrupted
    print(f"{args.env_id} -> {run_dir};", *(f"{name}={getattr(args, name)}" for name in TUNED.get(args.env_id, ())))
    parts = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(optimizers)}
    if args.resume:
        envs = restore_checkpoint(run_dir, args, run, rng, envs, team, **parts)
    else:
        save_checkpoint(run_dir, args, run, rng, envs, agent=team, **parts)
    begin(team, actor_buffers, critic_buffer, run)
    begun, drawn = time.time() - run.seconds, time.time()
    eval_every = args.eval_every or math.ceil(args.total_timesteps / 10)
    checkpoint_every = args.checkpoint_every or math.ceil(args.total_timesteps / 20)
    total, quiet = args.total_timesteps, not args.progress
    with tqdm(total=total, initial=run.step, unit=" steps", unit_scale=True, disable=quiet) as bar:
        while not is_finished(args, run):
            first_step = run.step
            rollout(team, envs, actor_buffers, critic_buffer, args, run, rng)
            learning_rate = args.learning_rate * (1 - first_step / args.total_timesteps if args.anneal_lr else 1)
            figures = {}
            if run.step > first_step:  # not if there were reset rows only: one environment, one step
                figures = update(team, optimizers, actor_buffers, critic_buffer, learning_rate, args, rng)
                check_finite(args, run.step, **figures, weights=sum(net.flat.sum().item() for net in team.networks))
            for buffer in (*actor_buffers, critic_buffer):
                buffer.after_update()
            if not figures:
                continue

            run.seconds = time.time() - begun
            finished, return_mean = is_finished(args, run), mean_return(run)
            row = {"step": run.step, "seconds": run.seconds, "sps": run.step / run.seconds, "return_mean": return_mean}
            log_row(run_dir, row | {"episodes": len(run.episodes), "learning_rate": learning_rate} | figures)
            bar.update(run.step - first_step)
            bar.set_postfix_str(f"mean return {return_mean:.1f}", refresh=finished)
            if finished or run.step // eval_every > first_step // eval_every:
                evaluate_and_save(team, args, run, run_dir)
            if finished or run.step // checkpoint_every > first_step // checkpoint_every:
                save_checkpoint(run_dir, args, run, rng, envs, agent=team, **parts)
            if time.time() - drawn > 30:
                draw_curve(run_dir, args, run)
                drawn = time.time()
    if not run.evaluations:  # resumed, with no more steps to take than had been taken
        evaluate_and_save(team, args, run, run_dir)
    envs.close()
    return finish(run_dir, args, run)


def main():
    """Train, or evaluate, as the flags say. What the user can mend is one line on stderr and exit code 2."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("env_id", "config", "resume", "evaluate"):  # the defaults of all other flags depend on these
        first.add_argument(f"--{name.replace('_', '-')}", f"--{name}", nargs="?")
    complaint, args = io.StringIO(), None
    sys.stdout.reconfigure(errors="replace")  # a terminal without a ± gets a ?
    try:
        with contextlib.redirect_stderr(complaint):
            defaults = Args(**{k: v for k, v in vars(first.parse_known_args()[0]).items() if v is not None})
            check_args(defaults)
            args = tyro.cli(Args, default=defaults, description=__doc__)
        if not args.evaluate:
            train(args)
            return
        check_args(args)
        agent, seed = load(args.evaluate, args.model, args), args.seed + EVALUATION
        mean, std = evaluate(agent, args, args.eval_episodes, seed)
        print(f"{args.model} weights: {mean:.2f} ± {std:.2f} over {args.eval_episodes} episodes of {args.env_id}")
        if args.capture_video:
            evaluate(agent, args, 1, seed, video=Path(args.evaluate, f"videos/{args.model}.mp4"))
        if args.render:
            evaluate(agent, args, 1, seed, render=True)
    except UserError as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit:  # tyro has drawn its complaint, if there is one, in a box below a title: keep the words
        text = re.sub(r"\x1b\[[\d;]*m", "", complaint.getvalue())
        lines = [re.sub("^-+$", "", line.strip("│╭╮╰╯─ ")) for line in text.splitlines()]
        words = itertools.takewhile(bool, itertools.dropwhile(lambda line: not line, lines[1:]))
        sys.stderr.write(" ".join(words) + "\n" * bool(lines))
        raise
    except KeyboardInterrupt:
        print(f"\nstopped; to go on: --resume {getattr(args, 'folder', 'RUN_DIR')}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
