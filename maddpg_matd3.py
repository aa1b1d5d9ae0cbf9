# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2",
#   "tyro==1.0.17", "tqdm==4.70.1", "moviepy==2.2.1", "mpe2==1.1.1",
# ]
# ///
"""Multi-agent DDPG and TD3 (MADDPG, MATD3), all of it, in this one file.

Each of n agents acts on what it alone observes, a^i = mu^i(o^i). While learning, a critic Q sees the state s and what
all of them do. From old transitions it learns what return to expect of that, and each actor follows its gradient
uphill, the others doing what they did:

    y = r + gamma Q'(s', mu'^1(o'^1), …, mu'^n(o'^n)),      L(Q) = E[ (Q(s, a^1, …, a^n) - y)^2 ],
    J(mu^i) = E[ Q(s, a^1, …, mu^i(o^i), …, a^n) ]          (arXiv 1706.02275, eqs. 6 and 5)

where Q' and mu' follow Q and mu slowly. MATD3 is MADDPG plus TD3's three lines: of two critics the lower value counts,
noise on mu'(o') smooths Q', and actors move less often than critics. Discrete actions are drawn by Gumbel-softmax.

    python maddpg_matd3.py                                                   # three agents spread over three landmarks
    python maddpg_matd3.py --env-id mpe2.simple_speaker_listener_v4 --algorithm maddpg
    python maddpg_matd3.py --evaluate runs/DIR --render                      # play what a run has left behind

Papers: MADDPG arXiv 1706.02275, MATD3 arXiv 1910.01465, TD3 arXiv 1802.09477, Gumbel-softmax arXiv 1611.01144.
"""

import argparse
import contextlib
import copy
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

# What makes MATD3 of MADDPG: the defaults of three flags, each of which can also be given by itself.
ALGORITHMS = {
    "matd3": {"twin_q": True, "target_noise": 0.2, "policy_frequency": 2},
    "maddpg": {"twin_q": False, "target_noise": 0.0, "policy_frequency": 1},
}
# Settings that learn, per environment; what the user gives wins. docs/maddpg_matd3.md says which were confirmed.
PARTICLES = {"env_kwargs": '{"continuous_actions": true}', "num_envs": 8, "gamma": 0.95, "tau": 0.01}
FASTER = {"actor_learning_rate": 3e-3, "critic_learning_rate": 3e-3, "train_frequency": 2}
TUNED = {
    "mpe2.simple_spread_v3": PARTICLES | {"share_policy": True, "total_timesteps": 50_000},
    "mpe2.simple_speaker_listener_v4": PARTICLES | FASTER | {"total_timesteps": 40_000},
    "mpe2.simple_reference_v3": PARTICLES | FASTER | {"share_policy": True, "n_step": 3, "exploration_noise": 0.3,
                                                      "total_timesteps": 80_000},
}  # fmt: skip


@dataclass
class Args:
    """Every flag with its default, or what TUNED has for the environment.

    The tuned values depend on the environment, and a value that the user gives wins: so `__new__` notes what was given,
    and `__post_init__` fills in the rest. (dataclasses.replace gives every value: make new Args for a new environment.)
    """

    # run
    env_id: str = (
        "mpe2.simple_spread_v3"  # module with a PettingZoo parallel_env, or the dotted path of such a function
    )
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers of parallel environments, applied in order
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    async_envs: bool = False  # play each environment in a process of its own
    total_timesteps: int = 1_000_000  # environment steps to train for; in each, all agents act
    stop_at_return: float | None = None  # stop once an evaluation reaches this (training episodes explore)
    seed: int = 1  # of everything that is drawn at random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps; auto: the CPU
    torch_threads: int = 0  # 0: one (more fight over small matrices)
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, on separate environments, without noise
    capture_video: bool = False  # film an episode at each evaluation
    checkpoint_every: int = 0  # steps between checkpoints; 0: a twentieth of the run
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # weights that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window
    config: str | None = None  # config.json of an earlier run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__maddpg_matd3__SEED__TIME
    progress: bool = True  # show the progress bar
    # algorithm
    algorithm: Literal["matd3", "maddpg"] = "matd3"  # sets the next three, unless they are given as well
    twin_q: bool = True  # two critics, of whose target values the lower one counts
    target_noise: float = 0.2  # deviation of the noise on the target's continuous actions
    policy_frequency: int = 2  # critic updates per update of the actors and of all targets
    noise_clip: float = 0.5  # bound of the noise on the target's continuous actions
    state_type: Literal["EP", "FP"] = "EP"  # one critic of the summed reward, or one per agent, of the agent's own
    share_policy: bool = False  # one actor (and with FP, one critic) for all agents, or one for each
    actor_learning_rate: float = 1e-3  # of Adam
    critic_learning_rate: float = 1e-3  # of Adam
    anneal_lr: bool = False  # lower both learning rates linearly to zero
    num_envs: int = 1  # environments played side by side
    buffer_size: int = 1_000_000  # steps to keep, over all environments
    batch_size: int = 256  # steps per update
    learning_starts: int = 1_000  # steps with uniformly random actions before the first update
    train_frequency: int = 4  # environment steps (over all environments) per training
    gradient_steps: int = 1  # critic updates per training
    gamma: float = 0.99  # discount
    n_step: int = 1  # rewards that a target sums before it asks Q'
    tau: float = 0.005  # how far the targets move towards the networks in one update
    exploration_noise: float = 0.1  # deviation of the noise on continuous actions, in units of half an action's range
    output_penalty: float = 1e-3  # weight of the mean square of what goes into tanh or softmax, so that both stay soft
    gumbel_temperature: float = 1.0  # discrete actions: how soft the choices are that gradients flow through
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layers of each actor
    critic_hidden_sizes: tuple[int, ...] | None = None  # hidden layers of each critic; None: as the actors'
    max_grad_norm: float | None = None  # longer gradients (of all actors, of all critics) are shortened to this norm

    def __new__(cls, *_, **given):
        """Note which arguments are given."""
        self = super().__new__(cls)
        self.given = given
        return self

    def __post_init__(self):
        """Fill in the others, from the run that is resumed or evaluated, else from `config`, else from the tables."""
        run_dir = self.resume or self.evaluate
        source = f"{run_dir}/config.json" if run_dir else self.config
        values = read_config(source) if source else TUNED.get(self.env_id, {})
        known = values.get("algorithm", type(self).algorithm)
        values = ALGORITHMS.get(str(known), {}) | values
        if "algorithm" in self.given and self.algorithm != known:  # these settings are not for it: set all three
            values = values | ALGORITHMS.get(self.algorithm, {})
        for name, value in values.items():
            if name not in self.given and not (self.evaluate and name in ("device", "capture_video")):  # training's own
                setattr(self, name, value)


class UserError(Exception):
    """Something the user can mend: shown as one line, with exit code 2."""


MODES = "resume evaluate model render config run_dir".split()  # what to do, not how: never taken from a config
RESUMABLE = MODES + "total_timesteps stop_at_return eval_every eval_episodes capture_video checkpoint_every".split()
RESUMABLE += "device torch_threads progress".split()  # these may change when a run is resumed
COUNTS = "num_envs buffer_size batch_size train_frequency gradient_steps policy_frequency n_step".split()
COUNTS += "total_timesteps eval_episodes max_episode_steps".split()
RANGES = dict.fromkeys([*COUNTS, "hidden_sizes", "critic_hidden_sizes"], (1, math.inf))
RANGES |= dict.fromkeys(("stop_at_return", "max_episode_return"), (-math.inf, math.inf))
RANGES |= dict.fromkeys(("gamma", "tau"), (0, 1))
RANGES |= {"seed": (0, 2**32), "torch_threads": (0, 10_000)}  # all other numbers: from 0 to infinity
RANGES["gumbel_temperature"] = (1e-3, math.inf)


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


make_envs = make_team_envs  # as evaluate and load, which all scripts share, call it


def episode_limit(args, spec=None):
    """Steps of the longest episode: the user's limit, else the environment's own, else Atari's half hour or 1,000."""
    default = 27_000 if args.env_id.startswith("ALE/") else 1_000
    return args.max_episode_steps or getattr(spec, "max_episode_steps", None) or default


# ------------------------------------------------------------------------------------------------------- networks


def uniform(shape, fan_in, generator):
    """A parameter drawn from ±1/sqrt(fan_in), as the DDPG paper (section 7) and nn.Linear do."""
    bound = fan_in**-0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))


class StackedNets(nn.Module):
    """Networks of one shape, each with weights of its own, computed side by side: one product per layer for them all.

    Layers are linear, with ReLU between them, between the given sizes.
    """

    def __init__(self, count, sizes, generator):
        super().__init__()
        pairs = list(zip(sizes, sizes[1:]))
        self.weights = nn.ParameterList(uniform((count, i, o), i, generator) for i, o in pairs)
        self.biases = nn.ParameterList(uniform((count, 1, o), i, generator) for i, o in pairs)

    def forward(self, x):
        """Outputs (k, B, outputs) of the first k networks, for inputs (k, B, inputs)."""
        *hidden, (weight, bias) = [(w[: len(x)], b[: len(x)]) for w, b in zip(self.weights, self.biases)]
        for w, b in hidden:
            x = torch.baddbmm(b, x, w).relu_()
        if weight.shape[2] == 1:  # faster than a matrix product that has a single column
            return (x * weight.mT).sum(2, keepdim=True) + bias
        return torch.baddbmm(bias, x, weight)


class Agents(nn.Module):
    """The actors mu^i of n agents, their critics, and the targets mu' and Q', which follow slowly.

    Where agents differ, what they observe and do is filled up with zeros to the widest, so that all can be computed in
    one product. Everywhere but in the environment, an action is in [-1, 1]^A, or, if it is Discrete, one-hot. With
    twin critics, those of all agents come first, and then the second ones of all.
    """

    def __init__(self, layout, action_spaces, args, device="cpu"):
        super().__init__()
        self.layout, self.action_spaces, self.args, self.device = layout, action_spaces, args, torch.device(device)
        self.num_agents, self.discrete = len(action_spaces), isinstance(action_spaces[0], spaces.Discrete)
        self.obs_sizes = [part.stop - part.start for part in layout.observations]
        self.action_sizes = [int(a.n) if self.discrete else math.prod(a.shape) for a in action_spaces]
        n, observed, A = self.num_agents, max(self.obs_sizes), max(self.action_sizes)
        own = args.state_type == "FP"
        self.state_size = layout.state.stop - layout.state.start + (observed if own else 0)
        self.critic_sets = n if own and not args.share_policy else 1
        generator = torch.Generator().manual_seed(args.seed)
        self.actors = StackedNets(1 if args.share_policy else n, [observed, *args.hidden_sizes, A], generator)
        critic_sizes = [self.state_size + n * A, *(args.critic_hidden_sizes or args.hidden_sizes), 1]
        self.critics = StackedNets(self.critic_sets * (2 if args.twin_q else 1), critic_sizes, generator)
        self.target_actors, self.target_critics = copy.deepcopy((self.actors, self.critics))
        self.to(self.device)
        for network in (self.actors, self.critics, self.target_actors, self.target_critics):
            network.leaves = list(network.parameters())
            network.flat = flatten_parameters(network.leaves)
        real = [[float(j < size) for j in range(A)] for size in self.action_sizes]
        self.real = torch.tensor(real, device=self.device)[:, None]  # (n, 1, A): 0 where an action is filled up
        # Acting is done in NumPy: matrices are small, and torch's overhead per call would exceed the arithmetic. It
        # reads the parameters' own memory, or a copy of it if that is on a GPU.
        self.host = self.actors.flat.cpu()
        parts = self.host.split([p.numel() for p in self.actors.leaves])
        arrays = [part.view_as(p).numpy() for part, p in zip(parts, self.actors.leaves)]
        self.numpy_layers = list(zip(arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]))

    def views(self, rows):
        """What each agent observes and which actions it has, two lists of arrays (N, …), in rows of TeamEnvs.

        Discrete actions are all available where the environment does not say; of continuous ones there is no list.
        """
        available = [rows[:, part] for part in self.layout.available]
        if self.discrete and not available[0].shape[1]:
            available = [np.ones((len(rows), size), np.float32) for size in self.action_sizes]
        return [rows[:, part] for part in self.layout.observations], available

    def critic_inputs(self, rows):
        """What the critic sees, besides actions, in rows (N, …) of TeamEnvs: the state (N, S), or, FP, (N, n, S').

        These are the agent's observation, as wide as the widest, beside the state; zeros once the agent is dead.
        """
        state = rows[:, self.layout.state]
        if self.args.state_type == "EP":
            return state
        states = np.repeat(state[:, None], self.num_agents, 1)
        return np.concatenate([pad(self.views(rows)[0]), states], 2) * rows[:, self.layout.alive, None]

    def outputs(self, obs):
        """What the actors say, (N, n, A) before tanh or softmax, of what they observe: a list of arrays. In NumPy."""
        if self.device.type != "cpu":
            self.host.copy_(self.actors.flat)
        *hidden, (weight, bias) = self.numpy_layers
        x = pad(obs).swapaxes(0, 1).reshape(len(weight), -1, max(self.obs_sizes))
        for w, b in hidden:
            x = np.maximum(x @ w + b, 0)
        return (x @ weight + bias).reshape(self.num_agents, len(obs[0]), -1).swapaxes(0, 1)

    def best(self, outputs, available):
        """The deterministic actions (N, n, A): tanh, or one-hot what has the largest output of what is available."""
        if not self.discrete:
            return np.tanh(outputs)
        choices = np.where(pad(available) > 0, outputs, np.float32(-1e9)).argmax(2)
        return np.eye(outputs.shape[2], dtype=np.float32)[choices]

    def to_env(self, actions):
        """The tuple of all agents' actions that the environment takes: [-1, 1] stretched to the bounds of a Box."""
        taken = []
        for i, (space, size) in enumerate(zip(self.action_spaces, self.action_sizes)):
            own = actions[:, i, :size]
            if self.discrete:
                taken.append((own.argmax(1) + space.start).astype(space.dtype))
                continue
            share = (own.reshape(-1, *space.shape) + 1) / 2
            low, high = space.low.astype(np.float64), space.high.astype(np.float64)
            scaled = np.clip(low + share * (high - low), low, high)
            taken.append((np.rint(scaled) if space.dtype.kind in "iu" else scaled).astype(space.dtype))
        return tuple(taken)

    def act(self, rows):
        """What the deterministic actors do: rows (N, …) of TeamEnvs -> actions as the environment takes them."""
        obs, available = self.views(rows)
        return self.to_env(self.best(self.outputs(obs), available))

    def choose(self, actors, obs, available, rng):
        """(actions, what they are made of by tanh or Gumbel-softmax), each (n, B, A), for tensors (n, B, …)."""
        outputs = actors(obs.reshape(len(actors.biases[0]), -1, obs.shape[2])).view(*obs.shape[:2], -1)
        if not self.discrete:
            return outputs.tanh() * self.real, outputs
        noise = torch.as_tensor(gumbel(outputs.shape, rng), device=self.device)
        logits = outputs.masked_fill(available == 0, -1e9)
        return gumbel_softmax(logits, noise, self.args.gumbel_temperature), outputs

    def values(self, critics, share_obs, actions, count):
        """Values (count, R) of actions (R, n, A) in states (R, S), by the first `count` critics of each agent.

        R is B, of one critic; or, with FP, n·B: those of the first agent, of the second one, and so on.
        """
        x = torch.cat([share_obs, actions.flatten(1)], 1).unflatten(0, (self.critic_sets, -1))
        return critics(x.expand(count, *x.shape).flatten(0, 1)).view(count, -1)


def flatten_parameters(parameters):
    """Lay parameters end to end in one vector, of which they become views. Returns the vector."""
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.data = part.view_as(p)
    return flat


def pad(parts):
    """n arrays (N, sizes) as one array (N, n, largest size), filled up with zeros."""
    padded = np.zeros((len(parts[0]), len(parts), max(part.shape[1] for part in parts)), np.float32)
    for i, part in enumerate(parts):
        padded[:, i, : part.shape[1]] = part
    return padded


def gumbel(shape, rng):
    """Standard Gumbel noise, -log of exponential noise, in float32."""
    return -np.log(np.maximum(rng.standard_exponential(shape, np.float32), np.float32(1e-30)))


def gumbel_softmax(logits, noise, temperature):
    """One-hot draws from softmax(logits) over the last axis, with the gradient of softmax((logits + noise) / T).

    The largest of logits + Gumbel noise is such a draw. Backwards, the draw passes for its soft version: the
    straight-through estimator (arXiv 1611.01144, eqs. 1, 2 and section 2.2).
    """
    soft = ((logits + noise) / temperature).softmax(-1)
    hard = nn.functional.one_hot(soft.argmax(-1), soft.shape[-1]).to(soft.dtype)
    return hard + soft - soft.detach()


# ------------------------------------------------------------------------------------------------- replay buffers
# N is the number of environments, n of agents, B of a batch. Environments lie side by side: slot t N + e is step t of
# environment e. Each has a position of its own in its ring of T steps, for a row that only resets an environment is no
# step, and is not stored. With n_step = 3 a sample that starts at slot 1 reaches to the end of the episode:
#
#     slot   0  2  4  6    environment 0: its episode ends in slot 2; slot 6 is its newest
#     slot   1  3  5  7    environment 1: its episode ends in slot 5
#     reward of a sample from slot 1: r_1 + gamma r_3 + gamma^2 r_5, its discount gamma^3; from slot 4: r_4 + gamma r_6
#     and gamma^2, for no more has been played; from slot 2: r_2 and gamma.

OffPolicyBatch = namedtuple(  # tensors; (B, …) and (n, B, …); G = 1 (EP) or n (FP): (G·B, …) and (n, G·B, …)
    "OffPolicyBatch",
    "share_obs obs actions available_actions rewards dones valid_transitions terms next_share_obs next_obs "
    "next_available_actions gammas",
)


class OffPolicyBuffer:
    """The last `capacity` steps of N environments, first in, first out, in host memory.

    G streams of rewards and states: one for all agents (EP), or one for each (FP). `obs_sizes`, `action_sizes` and
    `choices` (of available actions) are those of each agent; all are filled up with zeros to the widest.
    """

    arrays = OffPolicyBatch._fields[:-1]  # what is stored, each of a step; gammas are of a sample

    def __init__(
        self, capacity, num_envs, streams, state_size, obs_sizes, action_sizes, choices,
        n_step=1, gamma=0.99, device="cpu",
    ):  # fmt: skip
        T, N, n, G = capacity // num_envs, num_envs, len(obs_sizes), streams
        self.share_obs, self.next_share_obs = np.zeros((2, T, N, G, state_size), np.float32)
        self.obs, self.next_obs = np.zeros((2, T, N, n, max(obs_sizes)), np.float32)
        self.actions = np.zeros((T, N, n, max(action_sizes)), np.float32)
        self.available_actions, self.next_available_actions = np.zeros((2, T, N, n, max(choices)), bool)
        self.rewards, self.valid_transitions = np.zeros((T, N, G), np.float32), np.zeros((T, N, n), np.float32)
        self.dones, self.terms = np.zeros((2, T, N, G), bool)
        self.steps, self.num_envs, self.streams, self.n_step, self.gamma, self.device = T, N, G, n_step, gamma, device
        self.positions, self.sizes = np.zeros((2, N), np.int64)  # where each environment goes on; steps it has stored

    def insert(
        self, share_obs, obs, actions, available_actions, reward, done, valid_transitions, term,
        next_share_obs, next_obs, next_available_actions,
    ):  # fmt: skip
        """Store a step of all environments in which any agent took part (in a row that resets, none does).

        share_obs, reward, done and term are (N, …), or FP (N, n, …); the others lists over agents of arrays (N, …).
        `done` is 1 where the episode ends (FP: where the agent's does, and from then on), `term` where that was no
        truncation; `valid_transitions` are 0 for an agent that was dead before. What is called next is of the same
        episode, also at its end.
        """
        valid = pad(valid_transitions)[..., 0]
        rows = np.flatnonzero(valid.any(1))
        at = self.positions[rows], rows
        for name, parts in (
            ("obs", obs), ("actions", actions), ("available_actions", available_actions),
            ("next_obs", next_obs), ("next_available_actions", next_available_actions),
        ):  # fmt: skip
            getattr(self, name)[at] = pad(parts)[rows]
        for name, x in (
            ("share_obs", share_obs), ("rewards", reward), ("dones", done), ("terms", term),
            ("next_share_obs", next_share_obs),
        ):  # fmt: skip
            array = getattr(self, name)
            array[at] = np.reshape(x, (self.num_envs, *array.shape[2:]))[rows]
        self.valid_transitions[at] = valid[rows]
        self.positions[rows] = (self.positions[rows] + 1) % self.steps
        self.sizes[rows] = np.minimum(self.sizes[rows] + 1, self.steps)

    def cut(self, envs):
        """Let no sample reach beyond the newest step of these environments, a mask (N,): they are about to restart."""
        rows = np.flatnonzero(envs & (self.sizes > 0))
        self.dones[self.positions[rows] - 1, rows] = True

    def windows(self, t, e):
        """(rewards, discounts, last steps), each (G, B), of samples that start in step t of environment e, each (B,).

        R = r_0 + gamma r_1 + … + gamma^(k-1) r_(k-1) and gamma^k, after which Q' is asked (arXiv 1710.02298, eq. 1).
        k is n_step, but less where the episode ends, or where no more of it has been played.
        """
        g, newest = np.arange(self.streams)[:, None], (self.positions[e] - 1) % self.steps
        last = np.repeat(t[None], self.streams, 0)
        rewards, discounts = self.rewards[last, e, g], np.full(last.shape, self.gamma, np.float32)
        for _ in range(self.n_step - 1):
            goes_on = ~self.dones[last, e, g] & (last != newest)
            last = np.where(goes_on, (last + 1) % self.steps, last)
            rewards += goes_on * discounts * self.rewards[last, e, g]
            discounts[goes_on] *= self.gamma
        return rewards, discounts, last

    def get(self, slots):
        """The OffPolicyBatch of the samples that start in these slots, on the device.

        What there is per stream is stream-major (FP: agent-major): the samples of the first, of the second, and so on.
        """
        t, e = np.divmod(slots, self.num_envs)
        rewards, discounts, last = (x.reshape(-1) for x in self.windows(t, e))
        first, e_last = np.tile(t, self.streams), np.tile(e, self.streams)
        g = np.repeat(np.arange(self.streams), len(slots))
        fields = dict(rewards=rewards[:, None], gammas=discounts[:, None], share_obs=self.share_obs[first, e_last, g])
        for name in ("obs", "actions", "available_actions", "valid_transitions"):
            fields[name] = getattr(self, name)[t, e].swapaxes(0, 1)
        fields["valid_transitions"] = fields["valid_transitions"].reshape(-1, 1)
        for name in ("next_obs", "next_available_actions"):
            fields[name] = getattr(self, name)[last, e_last].swapaxes(0, 1)
        fields["next_share_obs"] = self.next_share_obs[last, e_last, g]
        for name in ("dones", "terms"):
            fields[name] = getattr(self, name)[last, e_last, g][:, None]
        return OffPolicyBatch(**{name: torch.as_tensor(x, device=self.device) for name, x in fields.items()})

    def sample(self, batch_size, rng):
        """An OffPolicyBatch drawn uniformly, with replacement. ValueError if fewer steps are stored than asked for."""
        if batch_size > self.sizes.sum():
            raise ValueError(f"cannot sample {batch_size} of {self.sizes.sum()} stored steps")
        ends = self.sizes.cumsum()
        drawn = rng.integers(ends[-1], size=batch_size)
        e = np.searchsorted(ends, drawn, side="right")
        return self.get((drawn - ends[e] + self.sizes[e]) * self.num_envs + e)

    def state_dict(self):
        """What is stored, for a checkpoint."""
        names = ("positions", "sizes")
        filled = {name: torch.from_numpy(getattr(self, name)[: self.sizes.max()]) for name in self.arrays}
        return filled | {name: torch.from_numpy(getattr(self, name)) for name in names}

    def load_state_dict(self, state):
        """Copy what state_dict returned."""
        for name, value in state.items():
            getattr(self, name)[: len(value)] = value.numpy()


class OffPolicyBufferEP(OffPolicyBuffer):
    """One state, reward and end for all agents of an environment ("environment-provided" state)."""

    def __init__(self, capacity, num_envs, state_size, obs_sizes, *more, **options):
        super().__init__(capacity, num_envs, 1, state_size, obs_sizes, *more, **options)


class OffPolicyBufferFP(OffPolicyBuffer):
    """A state, reward and end for each agent ("feature-pruned" state), and so a window of its own."""

    def __init__(self, capacity, num_envs, state_size, obs_sizes, *more, **options):
        super().__init__(capacity, num_envs, len(obs_sizes), state_size, obs_sizes, *more, **options)


# --------------------------------------------------------------------------------------------- targets and update


def smoothed(actions, noise, clip):
    """Target policy smoothing: mu'(s') + clip(epsilon, -c, c), within [-1, 1]   (arXiv 1802.09477, section 5.3)."""
    return (actions + noise.clamp(-clip, clip)).clamp(-1, 1)


def critic_targets(rewards, next_values, terminated, gamma):
    """y (B,) from target values (K, B): y = r + gamma min_k Q'_k(s', a')   (arXiv 1802.09477, eq. 10).

    Nothing follows termination. With K = 1 it is DDPG's target (arXiv 1509.02971, algorithm 1).
    """
    return rewards + gamma * next_values.amin(0) * ~terminated


def active_mean(x, active):
    """Mean over the rows (B, 1) whose mask is 1; 0 if there are none."""
    return (x * active).sum() / active.sum().clamp(min=1)


def put_in(own, actions):
    """What is done if each agent in turn does what it would now: (n, B, n, A), from `own` and old actions, (n, B, A).

    Entry i has the i-th agent's own action among the old ones of the others (arXiv 1706.02275, eq. 5).
    """
    turn = torch.eye(len(own), dtype=torch.bool, device=own.device)[:, None, :, None]
    return torch.where(turn, own[:, :, None], actions.transpose(0, 1))


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


class FusedAdam(Adam):
    """The same numbers, from the kernel behind torch.optim.Adam(fused=True): it goes through memory once, not often."""

    def step(self, gradient, learning_rate, max_norm):
        """Descend along `gradient`, shortened to `max_norm` before."""
        if max_norm < math.inf:
            gradient = gradient * (max_norm / (gradient.norm() + 1e-6)).clamp(max=1)
        m, v, t = ([value] for value in self.state.values())
        t[0] += 1
        adam = dict(lr=learning_rate, beta1=0.9, beta2=0.999, eps=self.eps, weight_decay=0, amsgrad=False)
        torch._fused_adam_([self.flat], [gradient], m, v, [], t, **adam, maximize=False)


def polyak(target, source, tau):
    """target <- tau source + (1 - tau) target, in place, on flat parameter vectors (arXiv 1509.02971, algorithm 1)."""
    target.lerp_(source, tau)


def linear_schedule(start, end, duration, step):
    """From `start` at step 0 to `end` at step `duration`, in a straight line, and `end` from then on."""
    return end + (start - end) * max(0.0, 1 - step / duration)


def flat_gradient(loss, leaves):
    """The gradient for these parameters, and no others, as one vector."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, leaves)])


def update_agents(agents, optimizers, batch, updates, anneal, args, rng):
    """Update number `updates` of the critics on a batch; every policy_frequency-th time, actors and targets as well.

    `anneal` multiplies the learning rates. Returns a tensor: critic loss, mean value, actor loss or NaN.
    """
    n, critics = agents.num_agents, 2 if args.twin_q else 1
    max_norm = math.inf if args.max_grad_norm is None else args.max_grad_norm
    streams = len(batch.rewards) // batch.obs.shape[1]
    rewards, gammas, terms = (x.squeeze(1) for x in (batch.rewards, batch.gammas, batch.terms))
    played = batch.valid_transitions if streams > 1 else torch.ones_like(batch.rewards)

    with torch.no_grad():
        next_actions, _ = agents.choose(agents.target_actors, batch.next_obs, batch.next_available_actions, rng)
        if args.target_noise and not agents.discrete:  # the second of TD3's three lines: Q' is smoothed
            noise = torch.as_tensor(args.target_noise * rng.standard_normal(next_actions.shape, np.float32))
            next_actions = smoothed(next_actions, noise.to(agents.device), args.noise_clip) * agents.real
        # the first: of two critics, the lower value counts
        next_values = agents.values(agents.target_critics, batch.next_share_obs, next_actions.transpose(0, 1), critics)
        targets = critic_targets(rewards, next_values, terms, gammas)
    together = batch.actions.transpose(0, 1).repeat(streams, 1, 1)
    values = agents.values(agents.critics, batch.share_obs, together, critics)
    loss = active_mean((values - targets).square().sum(0), played.squeeze(1))
    gradient = flat_gradient(loss, agents.critics.leaves)
    optimizers.critic.step(gradient, anneal * args.critic_learning_rate, max_norm)

    actor_loss = loss.new_full((), math.nan)
    if updates % args.policy_frequency == 0:  # the third: the actors wait, and so do the targets
        own, outputs = agents.choose(agents.actors, batch.obs, batch.available_actions, rng)
        together = put_in(own, batch.actions).flatten(0, 1)
        share_obs = batch.share_obs.repeat(n // streams, 1)
        values_of_own = agents.values(agents.critics, share_obs, together, 1)
        valid = batch.valid_transitions.squeeze(1)
        actor_loss, size = -active_mean(values_of_own[0], valid), outputs.square().mean(2).flatten()
        gradient = flat_gradient(actor_loss + args.output_penalty * active_mean(size, valid), agents.actors.leaves)
        optimizers.actor.step(gradient, anneal * args.actor_learning_rate, max_norm)
        polyak(agents.target_critics.flat, agents.critics.flat, args.tau)
        polyak(agents.target_actors.flat, agents.actors.flat, args.tau)
    return torch.stack([loss, values.mean(), actor_loss]).detach()


# -------------------------------------------------------------------------------------- run folder and evaluation

LOWER_PANEL = ("critic_loss", "actor_loss")  # columns of metrics.csv that the learning curve shows as well
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


def make_agents(args, envs):
    """Untrained Agents for these environments. UserError if a space or the device is none this script handles."""
    action_spaces, layout = envs.single_action_space.spaces, envs.get_attr("layout")[0]
    sizes = {(part.stop - part.start) for part in layout.observations}
    if max(sizes) > 10_000:
        raise UserError(f"{args.env_id} has observations of {max(sizes)} numbers; vectors are needed: use --wrappers")
    kind = spaces.Discrete if isinstance(action_spaces[0], spaces.Discrete) else spaces.Box
    for space in action_spaces:
        if not isinstance(space, kind) or (kind is spaces.Box and not np.isfinite([space.low, space.high]).all()):
            wanted = "bounded Box actions, or Discrete ones, of all agents alike"
            raise UserError(f"{args.env_id} has {space}; maddpg_matd3.py needs {wanted}: use mappo.py")
    if args.share_policy and (len(sizes) > 1 or any(space != action_spaces[0] for space in action_spaces)):
        raise UserError(f"the agents of {args.env_id} differ in observations or actions: add --no-share-policy")
    return Agents(layout, action_spaces, args, choose_device(args))


make_agent = make_agents  # as load, which all scripts share, calls it


def make_off_policy_buffer(args, agents):
    """The empty buffer that the arguments ask for. UserError if there is no memory for it."""
    buffer_class = OffPolicyBufferEP if args.state_type == "EP" else OffPolicyBufferFP
    choices = agents.action_sizes if agents.discrete else [0]
    sizes = agents.state_size, agents.obs_sizes, agents.action_sizes, choices
    try:
        return buffer_class(args.buffer_size, args.num_envs, *sizes, args.n_step, args.gamma, agents.device)
    except (MemoryError, ValueError) as error:
        raise UserError(f"buffer_size = {args.buffer_size} is too large: {error}") from None


def mean_return(run):
    """Mean return of the last 100 training episodes; NaN before the first."""
    recent = [total for _, total in run.episodes[-100:]]
    return sum(recent) / len(recent) if recent else math.nan


def is_over(args, run):
    """Whether all steps are taken, or the last evaluation is as good as --stop-at-return asks."""
    solved = args.stop_at_return is not None and run.evaluations and run.evaluations[-1][1] >= args.stop_at_return
    return bool(solved) or run.step >= args.total_timesteps


def explore_together(agents, run, args, rng):
    """Actions (N, n, A): uniform until --learning-starts, then the actors', with noise or drawn from their softmax."""
    obs, available = agents.views(run.obs)
    outputs = agents.outputs(obs)
    begins = run.step < args.learning_starts
    if agents.discrete:
        return agents.best(outputs * (not begins) + gumbel(outputs.shape, rng), available)
    if begins:
        return rng.uniform(-1, 1, outputs.shape)
    noise = args.exploration_noise * rng.standard_normal(outputs.shape, np.float32)
    return np.clip(agents.best(outputs, available) + noise, -1, 1)


def play_together(agents, envs, buffer, run, args, rng):
    """One step of all environments into the buffer; `run` keeps what goes on from step to step."""
    actions, rows, alive = explore_together(agents, run, args, rng), run.obs, agents.layout.alive
    next_rows, rewards, terminated, truncated, infos = envs.step(agents.to_env(actions))
    run.step += args.num_envs - int(run.reset_rows.sum())
    check_finite(args, run.step, observation=next_rows, reward=rewards)
    over = terminated | truncated
    took_part = rows[:, alive] * ~run.reset_rows[:, None]
    ends = rewards, over, terminated
    if args.state_type == "FP":
        ends = infos["rewards"], over[:, None] | (next_rows[:, alive] == 0), infos["terminated"]
    (obs, available), (next_obs, next_available) = agents.views(rows), agents.views(next_rows)
    taken = [actions[:, i, :size] for i, size in enumerate(agents.action_sizes)]
    valid = [took_part[:, [i]] for i in range(agents.num_agents)]
    states = [agents.critic_inputs(x) for x in (rows, next_rows)]
    buffer.insert(
        states[0], obs, taken, available, ends[0], ends[1], valid, ends[2], states[1], next_obs, next_available
    )
    run.returns += rewards
    run.obs, run.reset_rows = next_rows, over
    if over.any():
        run.episodes += [(run.step, total) for total in run.returns[over].tolist()]
        run.returns[over] = 0


def train(args):
    """Train as `args` say. Returns the final figures, which also stand in summary.json. UserError on bad input."""
    check_args(args)
    if args.buffer_size // args.num_envs * args.num_envs < args.batch_size:
        least = f"batch_size = {args.batch_size} once it is divided among num_envs = {args.num_envs}"
        raise UserError(f"buffer_size = {args.buffer_size} must not be less than {least}")
    envs = make_envs(args, args.num_envs)
    agents = make_agent(args, envs)
    if args.capture_video:
        make_envs(args, 1, "rgb_array").close()  # now, rather than at the first evaluation, if it has no pictures
    adam = FusedAdam if agents.device.type == "cpu" else Adam
    optimizers = SimpleNamespace(actor=adam(agents.actors.flat, 1e-8), critic=adam(agents.critics.flat, 1e-8))
    buffer, rng = make_off_policy_buffer(args, agents), np.random.default_rng(args.seed)
    obs, _ = envs.reset(seed=args.seed)
    run = SimpleNamespace(  # all that the loop changes, besides weights and generators: a checkpoint holds it
        step=0,  # environment steps, without reset rows
        seconds=0.0,
        updates=0,  # of the critics
        episodes=[],  # (step, return) of each training episode, summed over agents
        evaluations=[],  # (step, mean, standard deviation)
        obs=obs,
        reset_rows=np.zeros(args.num_envs, bool),  # whether the next row of an environment only resets it
        returns=np.zeros(args.num_envs),  # of the episodes being played
    )
    check_finite(args, 0, observation=obs)
    run_dir = Path(args.resume) if args.resume else start_run(args)
    args.folder = run_dir  # for main, should it be interrupted
    print(f"{args.env_id} -> {run_dir};", *(f"{name}={getattr(args, name)}" for name in TUNED.get(args.env_id, ())))
    parts = dict(agent=agents, actor_optimizer=optimizers.actor, critic_optimizer=optimizers.critic, buffer=buffer)
    if args.resume:
        envs = restore_checkpoint(run_dir, args, run, rng, envs, **parts)
        buffer.cut(run.obs[:, 0] == 1)  # where an episode begins, the last one is over, also if it was broken off
    else:
        save_checkpoint(run_dir, args, run, rng, envs, **parts)
    torch.empty(31 * 2**18)  # once 31 MB were freed, glibc keeps what updates free, and need not fault it in each time
    begun, drawn, figures = time.time() - run.seconds, time.time(), []
    total, quiet = args.total_timesteps, not args.progress
    log_every, eval_every = math.ceil(total / 200), args.eval_every or math.ceil(total / 10)
    checkpoint_every = args.checkpoint_every or math.ceil(total / 20)
    starts = max(args.learning_starts, args.batch_size)
    with tqdm(total=total, initial=run.step, unit=" steps", unit_scale=True, disable=quiet) as bar:
        while not is_over(args, run):
            first_step = run.step
            play_together(agents, envs, buffer, run, args, rng)
            anneal = linear_schedule(1, 0, total, first_step) if args.anneal_lr else 1
            trainings = max(run.step, starts) // args.train_frequency - max(first_step, starts) // args.train_frequency
            enough = buffer.sizes.sum() >= args.batch_size  # a tiny buffer forgets some before all rings are full
            for _ in range(trainings * args.gradient_steps * enough):
                run.updates += 1
                batch = buffer.sample(args.batch_size, rng)
                figures.append(update_agents(agents, optimizers, batch, run.updates, anneal, args, rng))
            bar.update(run.step - first_step)

            over = is_over(args, run)
            due = [over or run.step // n > first_step // n for n in (log_every, eval_every, checkpoint_every)]
            if not any(due):
                continue
            losses = torch.stack(figures).cpu() if figures else torch.empty(0, 3)  # whose mean is NaN
            weights = (agents.actors.flat.sum() + agents.critics.flat.sum()).item()
            check_finite(args, run.step, loss=losses[:, :2].numpy(), weights=weights)
            figures.clear()
            run.seconds, return_mean = time.time() - begun, mean_return(run)
            row = {"step": run.step, "seconds": run.seconds, "sps": run.step / run.seconds, "return_mean": return_mean}
            row |= {"episodes": len(run.episodes), "updates": run.updates}
            row |= dict(zip(("critic_loss", "value_mean", "actor_loss"), losses.nanmean(0).tolist()))
            log_row(run_dir, row)
            bar.set_postfix_str(f"mean return {return_mean:.1f}", refresh=over)
            if over or due[1]:
                evaluate_and_save(agents, args, run, run_dir)
            if is_over(args, run) or due[2]:
                save_checkpoint(run_dir, args, run, rng, envs, **parts)
            if time.time() - drawn > 30:
                draw_curve(run_dir, args, run)
                drawn = time.time()
    if not run.evaluations:  # resumed, with no more steps to take than had been taken
        evaluate_and_save(agents, args, run, run_dir)
    envs.close()
    return finish(run_dir, args, run)


def main():
    """Train, or evaluate, as the flags say. What the user can mend is one line on stderr and exit code 2."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in "env_id algorithm config resume evaluate".split():  # the defaults of all other flags depend on these
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
