# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2",
#   "tyro==1.0.17", "tqdm==4.70.1", "moviepy==2.2.1",
# ]
# ///
"""Deterministic policy gradients, DDPG and TD3, all of it, in this one file.

The actor mu picks one action per state, the critic Q says what return to expect of it. Q learns from old transitions
(s, a, r, s') towards the reward plus its own value of the actor's next action; mu follows the gradient of Q uphill:

    y = r + gamma Q'(s', mu'(s')),    L(Q) = E[ (Q(s, a) - y)^2 ],    J(mu) = E[ Q(s, mu(s)) ]   (arXiv 1509.02971)

where Q' and mu' follow Q and mu slowly. The actor finds every error of Q that looks like a high value. TD3 is DDPG
plus three lines against that: of two critics the lower value counts, noise on mu'(s') smooths Q', and the actor moves
less often than they do.

    python ddpg_td3.py                                      # Pendulum-v1 with TD3, half a minute
    python ddpg_td3.py --algorithm ddpg                     # without the three lines
    python ddpg_td3.py --evaluate runs/DIR                  # play what a run has left behind

Papers: DDPG arXiv 1509.02971, TD3 arXiv 1802.09477.
"""

import argparse
import contextlib
import copy
import dataclasses
import datetime
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

# What makes TD3 of DDPG: the defaults of three flags, each of which can also be given by itself.
ALGORITHMS = {
    "td3": {"twin_q": True, "target_noise": 0.2, "policy_frequency": 2},
    "ddpg": {"twin_q": False, "target_noise": 0.0, "policy_frequency": 1},
}
# Settings that learn, per environment; what the user gives wins. docs/ddpg_td3.md says what they were tried on.
SMALL = {"hidden_sizes": (64, 64), "actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3}
TUNED = {
    "Pendulum-v1": SMALL | {"gamma": 0.98, "total_timesteps": 20_000},
    "MountainCarContinuous-v0": SMALL | {"noise": "ou", "exploration_noise": 0.75, "learning_starts": 300,
                                         "anneal_lr": True, "total_timesteps": 45_000},
    # One critic: the lower of two values is too gloomy about landing, and learns to hover.
    "LunarLanderContinuous-v3": SMALL | {"algorithm": "ddpg", "target_noise": 0.2, "hidden_sizes": (128, 128),
                                         "num_envs": 8, "train_frequency": 8, "gradient_steps": 8, "batch_size": 128,
                                         "noise": "ou", "exploration_noise": 0.3, "learning_starts": 10_000,
                                         "anneal_lr": True, "total_timesteps": 300_000, "eval_every": 5_000,
                                         "eval_episodes": 50, "stop_at_return": 225.0},
    "HalfCheetah-v5": {"learning_starts": 25_000, "total_timesteps": 1_000_000},  # CleanRL's settings
}  # fmt: skip


@dataclass
class Args:
    """Every flag with its default, or what TUNED has for the environment.

    The tuned values depend on the environment, and a value that the user gives wins: so `__new__` notes what was given,
    and `__post_init__` fills in the rest. (dataclasses.replace gives every value: make new Args for a new environment.)
    """

    # run
    env_id: str = "Pendulum-v1"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers, applied in order
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    total_timesteps: int = 1_000_000  # environment steps to train for
    stop_at_return: float | None = None  # stop once an evaluation reaches this (training episodes explore)
    seed: int = 1  # of everything that is drawn at random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps; auto: CUDA for images if there is one, else the CPU
    torch_threads: int = 0  # 0: one for vectors (more fight over small matrices), all cores for images
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, on separate environments, without noise
    capture_video: bool = False  # film an episode at each evaluation
    checkpoint_every: int = 0  # steps between checkpoints; 0: a twentieth of the run
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # weights that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window
    config: str | None = None  # config.json of an earlier run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__ddpg_td3__SEED__TIME
    progress: bool = True  # show the progress bar
    # algorithm
    algorithm: Literal["td3", "ddpg"] = "td3"  # sets the next three, unless they are given as well
    twin_q: bool = True  # two critics, of whose target values the lower one counts
    target_noise: float = 0.2  # deviation of the noise on the target's actions
    policy_frequency: int = 2  # critic updates per update of the actor and of all targets
    noise_clip: float = 0.5  # bound of the noise on the target's actions
    actor_learning_rate: float = 3e-4  # of Adam
    critic_learning_rate: float = 3e-4  # of Adam
    anneal_lr: bool = False  # lower both learning rates linearly to zero
    num_envs: int = 1  # environments played side by side
    buffer_size: int = 1_000_000  # transitions to keep
    batch_size: int = 256  # transitions per update
    learning_starts: int = 1_000  # steps with uniformly random actions before the first update
    train_frequency: int = 1  # environment steps (over all environments) per training
    gradient_steps: int = 1  # critic updates per training
    gamma: float = 0.99  # discount
    tau: float = 0.005  # how far the targets move towards the networks in one update
    noise: Literal["gaussian", "ou"] = "gaussian"  # exploration: independent, or Ornstein-Uhlenbeck, which lasts
    exploration_noise: float = 0.1  # its deviation (per step), in units of half an action's range
    ou_theta: float = 0.15  # share of Ornstein-Uhlenbeck noise that fades in a step
    hidden_sizes: tuple[int, ...] = (256, 256)  # hidden layers of the actor
    critic_hidden_sizes: tuple[int, ...] | None = None  # hidden layers of each critic; None: as the actor's
    max_grad_norm: float | None = None  # longer gradients are shortened to this norm
    normalize_obs: bool = False  # normalise observations by their running mean and deviation
    normalize_reward: bool = False  # divide rewards by the running deviation of the discounted return
    bf16: bool = False  # matrix products of updates in bfloat16: faster where the processor has it

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
COUNTS = "num_envs buffer_size batch_size train_frequency gradient_steps policy_frequency total_timesteps".split()
COUNTS += "eval_episodes max_episode_steps".split()
RANGES = dict.fromkeys([*COUNTS, "hidden_sizes", "critic_hidden_sizes"], (1, math.inf))
RANGES |= dict.fromkeys(("stop_at_return", "max_episode_return"), (-math.inf, math.inf))
RANGES |= dict.fromkeys(("gamma", "tau", "ou_theta"), (0, 1))
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

PLUGINS = {"ALE/": "ale-py", "MiniGrid": "minigrid", "BabyAI": "minigrid"}  # packages whose import registers these


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


def make_envs(args, num_envs, render_mode=None):
    """A vector environment with next-step autoreset, whose observations are Boxes (others are flattened).

    The environment's own vector implementation is used where there is one and nothing has to be wrapped or shown.
    UserError, saying what to do, if it cannot be made.
    """
    package = next((package for prefix, package in PLUGINS.items() if args.env_id.startswith(prefix)), None)
    atari = args.env_id.startswith("ALE/")  # a vector version only, which counts frames and would clip true rewards
    if atari and (args.wrappers or args.max_episode_return is not None or render_mode):
        raise UserError("Atari's vector environment takes no wrappers, return limit or window (but --capture-video)")
    try:
        if package:
            importlib.import_module(package.replace("-", "_"))
        kwargs = json.loads(args.env_kwargs)
        if not isinstance(kwargs, dict):
            raise ValueError(f"env_kwargs {args.env_kwargs} is not a JSON object")
        if atari:
            frames = kwargs.get("frameskip", 4) * episode_limit(args)
            kwargs = {"reward_clipping": False, "max_num_frames_per_episode": frames} | kwargs
        elif args.max_episode_steps is not None:
            kwargs["max_episode_steps"] = args.max_episode_steps
        if render_mode:
            kwargs["render_mode"] = render_mode
        wrappers = [pkgutil.resolve_name(path) for path in args.wrappers]
        if args.max_episode_return is not None:
            wrappers.append(functools.partial(ReturnLimit, limit=args.max_episode_return))
        mode = "sync" if wrappers or render_mode else None
        envs = gym.make_vec(args.env_id, num_envs, vectorization_mode=mode, wrappers=wrappers, **kwargs)
        if envs.metadata.get("autoreset_mode") != gym.vector.AutoresetMode.NEXT_STEP:
            raise ValueError("its vector version does not reset in the step after an episode's end (NEXT_STEP)")
        if not isinstance(envs.single_observation_space, spaces.Box):
            envs = gym.wrappers.vector.FlattenObservation(envs)  # Discrete observations become one-hot
        return envs
    except Exception as error:  # whatever went wrong, the library that complains knows best
        hint = f" (try: pip install {package})" if package and isinstance(error, ImportError) else ""
        given = f" with env_kwargs {args.env_kwargs}" if args.env_kwargs != "{}" else ""
        given += f" and wrappers {' '.join(args.wrappers)}" if args.wrappers else ""
        raise UserError(f"cannot make {args.env_id}{given}: {' '.join(str(error).split())}{hint}") from None


def episode_limit(args, spec=None):
    """Steps of the longest episode: the user's limit, else the environment's own, else Atari's half hour or 1,000."""
    default = 27_000 if args.env_id.startswith("ALE/") else 1_000
    return args.max_episode_steps or getattr(spec, "max_episode_steps", None) or default


# ------------------------------------------------------------------------------------------------------- networks


class RunningMeanStd(nn.Module):
    """Mean and variance of all rows seen so far; buffers of the module, so that every saved model has them."""

    def __init__(self, shape):
        super().__init__()
        for name, value in (("mean", torch.zeros(shape)), ("var", torch.ones(shape)), ("count", torch.zeros(()))):
            self.register_buffer(name, value)

    def update(self, rows):
        """Merge `rows` (B, *shape), a NumPy array, in float64 (Chan, Golub & LeVeque 1979, eq. 2.1)."""
        mean, var, count = (buffer.cpu().numpy().astype(np.float64) for buffer in self.buffers())
        total, delta = count + len(rows), rows.mean(0, dtype=np.float64) - mean
        squares = var * count + rows.var(0, dtype=np.float64) * len(rows) + delta**2 * count * len(rows) / total
        for buffer, value in zip(self.buffers(), (mean + delta * len(rows) / total, squares / total, total)):
            buffer.copy_(torch.as_tensor(value))

    def forward(self, x):
        """Normalise (B, *shape), clip to ±10."""
        return ((x - self.mean) / (self.var + 1e-8).sqrt()).clamp(-10, 10)


def layer(module, generator, gain=2**0.5):
    """A linear or convolutional layer, zero biases and orthogonal weights; a gain of √2 keeps signals their size."""
    nn.init.orthogonal_(module.weight, gain, generator)
    nn.init.zeros_(module.bias)
    return module


def nature_cnn(channels, height, width, generator):
    """Trunk for images (Mnih 2015, doi 10.1038/nature14236): (B, channels, height, width) -> (B, 512)."""
    layers = []
    for inputs, outputs, kernel, stride in ((channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)):
        layers += [layer(nn.Conv2d(inputs, outputs, kernel, stride), generator), nn.ReLU()]
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
    return nn.Sequential(*layers, nn.Flatten(), layer(nn.Linear(64 * height * width, 512), generator), nn.ReLU())


def is_image(space):
    """Whether a Box holds images (uint8, channels first or last) that are large enough for `nature_cnn`."""
    return space.dtype == np.uint8 and len(space.shape) == 3 and sorted(space.shape)[1] >= 36


def uniform(shape, fan_in, generator):
    """A parameter drawn from ±1/sqrt(fan_in), as the DDPG paper (section 7) and nn.Linear do."""
    bound = fan_in**-0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))


class Actor(nn.Sequential):
    """mu: features -> hidden layers with ReLU -> tanh, an action in [-1, 1]^D."""

    def __init__(self, trunk, sizes, generator):
        linears = [nn.Linear(i, o) for i, o in zip(sizes, sizes[1:])]
        for linear in linears:
            linear.weight = uniform(linear.weight.shape, linear.in_features, generator)
            linear.bias = uniform(linear.bias.shape, linear.in_features, generator)
        hidden = itertools.chain(*((linear, nn.ReLU(inplace=True)) for linear in linears[:-1]))
        super().__init__(trunk, *hidden, linears[-1], nn.Tanh())


class Critics(nn.Module):
    """Q_1 … Q_K, each with weights of its own: K networks of one shape, computed side by side in batched products."""

    def __init__(self, trunk, sizes, count, generator):
        super().__init__()
        pairs = list(zip(sizes, sizes[1:]))
        self.trunk = trunk
        self.weights = nn.ParameterList(uniform((count, i, o), i, generator) for i, o in pairs)
        self.biases = nn.ParameterList(uniform((count, 1, o), i, generator) for i, o in pairs)

    def forward(self, obs, actions, count=None):
        """Values (K, B) of actions (B, D), or those of the first `count` critics."""
        layers = list(zip(self.weights, self.biases))
        if count is not None:
            layers = [(weight[:count], bias[:count]) for weight, bias in layers]
        x = torch.cat([self.trunk(obs), actions], 1).expand(len(layers[0][0]), -1, -1)
        for weight, bias in layers[:-1]:
            x = torch.baddbmm(bias, x, weight).relu_()
        weight, bias = layers[-1]
        return (x * weight.mT).sum(2) + bias.squeeze(2)  # faster than a matrix product that has a single column


class ActorCritic(nn.Module):
    """Actor mu, critics Q_1 … Q_K, and their targets mu' and Q', which follow slowly.

    Everywhere but in the environment, actions are (B, D) in [-1, 1]: the bounds of each dimension are met exactly,
    noise has the same meaning in all of them, and the critics see numbers of one size.
    """

    def __init__(self, observation_space, action_space, args, device="cpu"):
        super().__init__()
        self.device, self.action_space, self.image = torch.device(device), action_space, is_image(observation_space)
        generator = torch.Generator().manual_seed(args.seed)
        shape, actions = observation_space.shape, math.prod(action_space.shape)
        size, trunks = math.prod(shape), (nn.Identity(), nn.Identity())
        if self.image:  # one CNN for the actor, one for both critics
            self.channels_last = shape[2] == min(shape)
            chw = np.roll(shape, 1).tolist() if self.channels_last else shape
            size, trunks = 512, (nature_cnn(*chw, generator), nature_cnn(*chw, generator))
        critic_sizes = [size + actions, *(args.critic_hidden_sizes or args.hidden_sizes), 1]
        self.actor = Actor(trunks[0], [size, *args.hidden_sizes, actions], generator)
        self.critics = Critics(trunks[1], critic_sizes, 2 if args.twin_q else 1, generator)
        self.target_actor, self.target_critics = copy.deepcopy((self.actor, self.critics))
        self.obs_stats = RunningMeanStd(math.prod(shape)) if args.normalize_obs else None
        self.return_stats = RunningMeanStd(()) if args.normalize_reward else None
        self.to(self.device)
        for network in (self.actor, self.critics, self.target_actor, self.target_critics):
            network.leaves = list(network.parameters())
            network.flat = flatten_parameters(network.leaves)
        # Small matrices on a CPU: torch's overhead per call exceeds the arithmetic, so acting is done in NumPy, on the
        # memory of the parameters themselves. These are changed in place only: copy weights with load_state_dict.
        self.acts_in_numpy = not self.image and self.device.type == "cpu"
        if self.acts_in_numpy:
            linears = [module for module in self.actor if isinstance(module, nn.Linear)]
            self.numpy_layers = [(m.weight.detach().numpy().T, m.bias.detach().numpy()) for m in linears]

    def observe(self, obs):
        """What the networks see of a tensor of observations (B, …): images in [0, 1], vectors flat and normalised."""
        if self.image:
            return (obs.movedim(-1, -3) if self.channels_last else obs).float() / 255
        obs = obs.reshape(len(obs), -1).float()
        return self.obs_stats(obs) if self.obs_stats else obs

    def policy(self, obs):
        """mu(s) in [-1, 1] (B, D) for a NumPy array of observations, as a NumPy array."""
        if not self.acts_in_numpy:
            with torch.no_grad():
                return self.actor(self.observe(torch.as_tensor(obs, device=self.device))).cpu().numpy()
        x = np.asarray(obs, np.float32).reshape(len(obs), -1)
        if self.obs_stats:
            x = self.obs_stats(torch.from_numpy(x)).numpy()
        *hidden, (weight, bias) = self.numpy_layers
        for w, b in hidden:
            x = np.maximum(x @ w + b, 0)
        return np.tanh(x @ weight + bias)

    def to_env(self, actions):
        """Actions as the environment takes them: [-1, 1] stretched to its bounds, in the space's shape and type."""
        space = self.action_space
        share = (actions.reshape(-1, *space.shape) + 1) / 2
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        actions = np.clip(low + share * (high - low), low, high)
        return (np.rint(actions) if space.dtype.kind in "iu" else actions).astype(space.dtype)

    def act(self, obs):
        """What the deterministic policy does: NumPy observations (B, …) -> actions as the environment takes them."""
        return self.to_env(self.policy(obs))


def flatten_parameters(parameters):
    """Lay parameters end to end in one vector, of which they become views. Returns the vector."""
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.data = part.view_as(p)
    return flat


# -------------------------------------------------------------------------------------------------- replay buffer

Transitions = namedtuple("Transitions", "obs actions rewards next_obs terminated")  # flat tensors (B, …)


class ReplayBuffer:
    """The last `capacity` transitions, first in, first out, sampled uniformly; in host memory, images as uint8.

    Terminated, a transition has no future; truncated, it has one like any other, for what is stored is the true next
    observation. So `truncated` is not kept, and a reset row, whose action was ignored, is no transition at all.
    """

    arrays = Transitions._fields  # the arrays that hold a row per transition

    def __init__(self, capacity, observation_space, action_space, device="cpu"):
        obs_dtype = np.uint8 if observation_space.dtype == np.uint8 else np.float32
        D = math.prod(action_space.shape)  # 1 for Discrete, whose shape is ()
        self.obs = np.zeros((capacity, *observation_space.shape), obs_dtype)
        self.next_obs = np.zeros((capacity, *observation_space.shape), obs_dtype)
        self.actions = np.zeros((capacity, D), np.float32 if isinstance(action_space, spaces.Box) else np.int64)
        self.rewards, self.terminated = np.zeros(capacity, np.float32), np.zeros(capacity, bool)
        self.capacity, self.device, self.size, self.position = capacity, device, 0, 0

    def add(self, obs, actions, rewards, terminated, truncated, reset_rows, next_obs):
        """Store a step of all environments, each argument (N, …), without reset rows. Returns the slots written.

        Actions are (N, D). N must not exceed the capacity.
        """
        rows = np.flatnonzero(~reset_rows)
        slots = (self.position + np.arange(len(rows))) % self.capacity
        self.obs[slots], self.actions[slots], self.rewards[slots] = obs[rows], actions[rows], rewards[rows]
        self.next_obs[slots], self.terminated[slots] = next_obs[rows], terminated[rows]
        self.position = (self.position + len(rows)) % self.capacity
        self.size = min(self.size + len(rows), self.capacity)
        return slots

    def get(self, slots):
        """The Transitions in these slots, on the device."""
        fields = (getattr(self, name)[slots] for name in Transitions._fields)
        return Transitions(*(torch.as_tensor(field, device=self.device) for field in fields))

    def sample(self, batch_size, rng):
        """Transitions drawn uniformly, with replacement. ValueError if fewer are stored than are asked for."""
        if batch_size > self.size:
            raise ValueError(f"cannot sample {batch_size} of {self.size} stored transitions")
        return self.get(rng.integers(self.size, size=batch_size))

    def state_dict(self):
        """What is stored, for a checkpoint."""
        filled = {name: torch.from_numpy(getattr(self, name)[: self.size]) for name in self.arrays}
        return filled | {"size": self.size, "position": self.position}

    def load_state_dict(self, state):
        """Copy what state_dict returned."""
        self.size, self.position = state["size"], state["position"]
        for name in self.arrays:
            getattr(self, name)[: self.size] = state[name].numpy()


# --------------------------------------------------------------------------------------------- targets and update


def smoothed(actions, noise, clip):
    """Target policy smoothing: mu'(s') + clip(epsilon, -c, c), within [-1, 1]   (arXiv 1802.09477, section 5.3)."""
    return (actions + noise.clamp(-clip, clip)).clamp(-1, 1)


def critic_targets(rewards, next_values, terminated, gamma):
    """y (B,) from target values (K, B): y = r + gamma min_k Q'_k(s', a')   (arXiv 1802.09477, eq. 10).

    Nothing follows termination. With K = 1 it is DDPG's target (arXiv 1509.02971, algorithm 1).
    """
    return rewards + gamma * next_values.amin(0) * ~terminated


def critic_loss(values, targets):
    """The sum over critics of the mean of (Q_k(s, a) - y)^2, for values (K, B) and targets (B,)."""
    return (values - targets).square().mean(1).sum()


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


def update_networks(agent, optimizers, batch, updates, anneal, args, rng):
    """Update number `updates` of the critics on a batch; every policy_frequency-th time, actor and targets as well.

    `anneal` multiplies the learning rates. Returns a tensor: critic loss, mean value, actor loss or NaN.
    """
    obs, next_obs = agent.observe(batch.obs), agent.observe(batch.next_obs)
    rewards, max_norm = batch.rewards, math.inf if args.max_grad_norm is None else args.max_grad_norm
    if agent.return_stats:
        rewards = (rewards / (agent.return_stats.var + 1e-8).sqrt()).clamp(-10, 10)
    mixed_precision = torch.autocast(agent.device.type, torch.bfloat16, enabled=args.bf16)  # sums stay in float32

    with torch.no_grad(), mixed_precision:
        next_actions = agent.target_actor(next_obs)
        if args.target_noise:  # the second of TD3's three lines: Q' is smoothed
            noise = args.target_noise * rng.standard_normal(next_actions.shape, np.float32)
            next_actions = smoothed(next_actions, torch.as_tensor(noise, device=agent.device), args.noise_clip)
        next_values = agent.target_critics(next_obs, next_actions)  # the first: of two critics, or of one
        targets = critic_targets(rewards, next_values, batch.terminated, args.gamma)
    with mixed_precision:
        values = agent.critics(obs, batch.actions)
    loss = critic_loss(values, targets)
    gradient = flat_gradient(loss, agent.critics.leaves)
    optimizers.critic.step(gradient, anneal * args.critic_learning_rate, max_norm)

    actor_loss = loss.new_full((), math.nan)
    if updates % args.policy_frequency == 0:  # the third: the actor waits, and so do the targets
        with mixed_precision:
            actor_loss = -agent.critics(obs, agent.actor(obs), count=1).mean()
        gradient = flat_gradient(actor_loss, agent.actor.leaves)
        optimizers.actor.step(gradient, anneal * args.actor_learning_rate, max_norm)
        polyak(agent.target_critics.flat, agent.critics.flat, args.tau)
        polyak(agent.target_actor.flat, agent.actor.flat, args.tau)
    return torch.stack([loss, values.mean(), actor_loss]).detach()


# -------------------------------------------------------------------------------------- run folder and evaluation

LOWER_PANEL = ("critic_loss", "actor_loss")  # columns of metrics.csv that the learning curve shows as well
EVALUATION = 10_000  # added to the seed: evaluations start from other states than training does
# Unpickled, these environments go on just where they were (tested). Others pickle without complaint and come back
# rebuilt, their state lost (Box2D, MuJoCo): they are not carried over, their episodes restart.
CARRIED = ("gymnasium.envs.classic_control", "gymnasium.envs.toy_text", "minigrid.")


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


def make_actor_critic(args, envs):
    """An untrained ActorCritic for these environments. UserError if a space or the device is none we can handle."""
    observation_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(action_space, spaces.Box):
        script = "dqn.py or ppo.py" if isinstance(action_space, spaces.Discrete) else "ppo.py"
        raise UserError(f"{args.env_id} has {action_space}; ddpg_td3.py needs Box actions: use {script}")
    if not np.isfinite([action_space.low, action_space.high]).all():
        raise UserError(
            f"{args.env_id} has {action_space}; ddpg_td3.py needs bounded actions: use ppo.py or --wrappers"
        )
    vector = isinstance(observation_space, spaces.Box)
    image = vector and is_image(observation_space)
    if not vector or (observation_space.dtype == np.uint8 and math.prod(observation_space.shape) > 1_000 and not image):
        wanted = "vectors, or images of three dimensions and at least 36 x 36 pixels"
        raise UserError(
            f"{args.env_id} has observations {observation_space}; ddpg_td3.py needs {wanted}: use --wrappers"
        )
    if image and args.normalize_obs:
        raise UserError("normalize_obs is for vectors: images are always scaled to [0, 1]")
    device = choose_device(args, image)
    agent = ActorCritic(observation_space, action_space, args, device)
    agent.args = args  # for evaluate(agent, agent.args) in a notebook
    return agent


make_agent = make_actor_critic  # as load, which all scripts share, calls it


def mean_return(run):
    """Mean return of the last 100 training episodes; NaN before the first."""
    recent = [total for _, total in run.episodes[-100:]]
    return sum(recent) / len(recent) if recent else math.nan


def is_over(args, run):
    """Whether all steps are taken, or the last evaluation is as good as --stop-at-return asks."""
    solved = args.stop_at_return is not None and run.evaluations and run.evaluations[-1][1] >= args.stop_at_return
    return bool(solved) or run.step >= args.total_timesteps


def explore(agent, run, args, rng):
    """Actions (N, D) in [-1, 1]: uniform until --learning-starts, then the actor's with noise.

    x <- (1 - theta) x + sigma N(0, 1) from 0 at an episode's start: Ornstein-Uhlenbeck noise (arXiv 1509.02971,
    section 7), which pushes one way for about 1 / theta steps; with theta = 1 it is independent Gaussian noise.
    """
    if run.step < args.learning_starts:
        return rng.uniform(-1, 1, run.noise.shape)
    theta = args.ou_theta if args.noise == "ou" else 1
    run.noise = (1 - theta) * run.noise + args.exploration_noise * rng.standard_normal(run.noise.shape)
    run.noise[run.reset_rows] = 0  # the action of a reset row is ignored: the next one is an episode's first
    return np.clip(agent.policy(run.obs) + run.noise, -1, 1)


def play_one_step(agent, envs, buffer, run, args, rng):
    """One step of all environments into the buffer; `run` keeps what goes on from step to step."""
    actions, played = explore(agent, run, args, rng), ~run.reset_rows
    next_obs, rewards, terminated, truncated, _ = envs.step(agent.to_env(actions))
    buffer.add(run.obs, actions, rewards, terminated, truncated, run.reset_rows, next_obs)
    run.step += int(played.sum())
    check_finite(args, run.step, observation=next_obs, reward=rewards)
    run.returns += rewards
    if agent.obs_stats and played.any():
        agent.obs_stats.update(run.obs[played].reshape(-1, len(agent.obs_stats.mean)))
    if agent.return_stats and played.any():
        run.discounted = args.gamma * run.discounted + rewards
        agent.return_stats.update(run.discounted[played])
    run.obs, run.reset_rows = next_obs, terminated | truncated
    if run.reset_rows.any():
        run.episodes += [(run.step, total) for total in run.returns[run.reset_rows].tolist()]
        run.returns[run.reset_rows] = run.discounted[run.reset_rows] = 0


def train(args):
    """Train as `args` say. Returns the final figures, which also stand in summary.json. UserError on bad input."""
    check_args(args)
    if args.buffer_size < max(args.batch_size, args.num_envs):
        least = f"batch_size = {args.batch_size} or num_envs = {args.num_envs}"
        raise UserError(f"buffer_size = {args.buffer_size} must not be less than {least}")
    envs = make_envs(args, args.num_envs)
    agent = make_agent(args, envs)
    if args.capture_video and not args.env_id.startswith("ALE/"):
        make_envs(args, 1, "rgb_array").close()  # now, rather than at the first evaluation, if it has no pictures
    adam = FusedAdam if agent.device.type == "cpu" else Adam
    optimizers = SimpleNamespace(actor=adam(agent.actor.flat, 1e-8), critic=adam(agent.critics.flat, 1e-8))
    observation_space, action_space = envs.single_observation_space, envs.single_action_space
    try:
        buffer = ReplayBuffer(args.buffer_size, observation_space, action_space, agent.device)
    except (MemoryError, ValueError) as error:
        raise UserError(f"buffer_size = {args.buffer_size} is too large: {error}") from None
    rng = np.random.default_rng(args.seed)
    obs, _ = envs.reset(seed=args.seed)
    run = SimpleNamespace(  # all that the loop changes, besides weights and generators: a checkpoint holds it
        step=0,  # environment steps, without reset rows
        seconds=0.0,
        updates=0,  # of the critics
        episodes=[],  # (step, return) of each training episode
        evaluations=[],  # (step, mean, standard deviation)
        obs=obs,
        reset_rows=np.zeros(args.num_envs, bool),  # whether the next row of an environment only resets it
        returns=np.zeros(args.num_envs),  # of the episodes being played
        discounted=np.zeros(args.num_envs),  # the same for normalize_reward, discounted
        noise=np.zeros((args.num_envs, math.prod(action_space.shape))),  # of exploration
    )
    check_finite(args, 0, observation=obs)
    run_dir = Path(args.resume) if args.resume else start_run(args)
    args.folder = run_dir  # for main, should it be interrupted
    print(f"{args.env_id} -> {run_dir};", *(f"{name}={getattr(args, name)}" for name in TUNED.get(args.env_id, ())))
    parts = dict(agent=agent, actor_optimizer=optimizers.actor, critic_optimizer=optimizers.critic, buffer=buffer)
    if args.resume:
        envs = restore_checkpoint(run_dir, args, run, rng, envs, **parts)
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
            play_one_step(agent, envs, buffer, run, args, rng)
            anneal = linear_schedule(1, 0, total, first_step) if args.anneal_lr else 1
            trainings = max(run.step, starts) // args.train_frequency - max(first_step, starts) // args.train_frequency
            for _ in range(trainings * args.gradient_steps):
                run.updates += 1
                batch = buffer.sample(args.batch_size, rng)
                figures.append(update_networks(agent, optimizers, batch, run.updates, anneal, args, rng))
            bar.update(run.step - first_step)

            over = is_over(args, run)
            due = [over or run.step // n > first_step // n for n in (log_every, eval_every, checkpoint_every)]
            if not any(due):
                continue
            losses = torch.stack(figures).cpu() if figures else torch.empty(0, 3)  # whose mean is NaN
            weights = (agent.actor.flat.sum() + agent.critics.flat.sum()).item()
            check_finite(args, run.step, loss=losses[:, :2].numpy(), weights=weights)
            figures.clear()
            run.seconds, return_mean = time.time() - begun, mean_return(run)
            row = {"step": run.step, "seconds": run.seconds, "sps": run.step / run.seconds, "return_mean": return_mean}
            row |= {"episodes": len(run.episodes), "updates": run.updates}
            row |= dict(zip(("critic_loss", "value_mean", "actor_loss"), losses.nanmean(0).tolist()))
            log_row(run_dir, row)
            bar.set_postfix_str(f"mean return {return_mean:.1f}", refresh=over)
            if over or due[1]:
                evaluate_and_save(agent, args, run, run_dir)
            if is_over(args, run) or due[2]:
                save_checkpoint(run_dir, args, run, rng, envs, **parts)
            if time.time() - drawn > 30:
                draw_curve(run_dir, args, run)
                drawn = time.time()
    if not run.evaluations:  # resumed, with no more steps to take than had been taken
        evaluate_and_save(agent, args, run, run_dir)
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
