# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2",
#   "tyro==1.0.17", "tqdm==4.70.1", "moviepy==2.2.1", "minigrid==3.2.0",
# ]
# ///
"""PPO with demonstrations (PPO+D), all of it, in this one file: hard exploration from a single demonstration.

Where rewards are so sparse that chance never finds one, PPO learns nothing. One demonstration is enough to begin with:
at the end of each episode a slot of the vector environment draws where its next episode comes from,

    a replay of a reward demo with probability rho, of value demo i with probability phi max_t V_i(s_t)^alpha / sum,
    else the environment                                                            (arXiv 2007.03328, section 3)

A replay streams stored observations, actions and rewards into the rollout; the current critic values them, and their
log-probability counts as log 1 = 0, so the clipped objective of PPO imitates what turned out better than expected. The
agent's own episodes become reward demos if their return is good enough, value demos if the critic thinks highly of
some state in them; each new reward demo shifts probability from phi to rho. Everything else is PPO, with a GRU.

    python ppod.py                              # MiniGrid-DoorKey-16x16-v0 from one demonstration, some minutes
    python ppod.py --env-id MountainCar-v0      # with a reward of 1 at the goal and 0 elsewhere, a minute
    python ppod.py --record-demo --env-id MiniGrid-DoorKey-8x8-v0    # play yourself, save good episodes in demos/

Papers: PPO+D arXiv 2007.03328, PPO arXiv 1707.06347, GAE arXiv 1506.02438, GRU arXiv 1406.1078.
"""

import argparse
import contextlib
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

# Settings that learn, per environment; what the user gives wins. docs/ppod.md has the evidence for them.
DEMOS = Path(__file__).parent / "demos"
TUNED = {
    "MiniGrid-DoorKey-16x16-v0": {
        "initial_human_demos_dir": str(DEMOS / "MiniGrid-DoorKey-16x16-v0"), "initial_reward_threshold": 0.9,
        "max_episode_steps": 2560, "sample_actions": True, "rho": 0.1, "phi": 0.3, "num_envs": 16, "recurrent": False,
        "hidden_sizes": (128,), "chunk_length": 16, "num_minibatches": 8, "update_epochs": 8, "learning_rate": 1e-3,
        "gae_lambda": 0.97, "norm_adv": False, "ent_coef": 0.002, "total_timesteps": 590_000,
        "stop_at_return": 0.94,
    },
    "MountainCar-v0": {
        "wrappers": ("ppod.GoalReward",), "initial_human_demos_dir": str(DEMOS / "MountainCar-v0"), "rho": 0.3,
        "phi": 0.0, "num_envs": 16, "hidden_sizes": (64,), "recurrent": False, "normalize_obs": True,
        "learning_rate": 1e-3, "total_timesteps": 200_000,
    },
}  # fmt: skip


@dataclass
class Args:
    """Every flag with its default, or what TUNED has for the environment.

    The tuned values depend on the environment, and a value that the user gives wins: so `__new__` notes what was given,
    and `__post_init__` fills in the rest. (dataclasses.replace gives every value: make new Args for a new environment.)
    """

    # run
    env_id: str = "MiniGrid-DoorKey-16x16-v0"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers, applied in order
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    total_timesteps: int = 500_000  # environment steps to train for; replays do not count
    stop_at_return: float | None = None  # stop once the mean of the last 100 training episodes reaches this
    seed: int = 1  # of everything that is drawn at random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps; auto: the CPU
    torch_threads: int = 0  # 0: one (more fight over small matrices)
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, on separate environments, with deterministic actions
    sample_actions: bool = False  # evaluations draw actions: with no memory, the likeliest ones may go round in circles
    capture_video: bool = False  # film an episode at each evaluation
    checkpoint_every: int = 0  # steps between checkpoints; 0: a twentieth of the run
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # weights that --evaluate and --record-from play: best, last or a step
    render: bool = False  # show --evaluate in a window
    config: str | None = None  # config.json of an earlier run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__ppod__SEED__TIME
    progress: bool = True  # show the progress bar
    record_demo: bool = False  # no training: play by keyboard, save good episodes as demos
    record_from: str | None = None  # no training: save good episodes of the agent in this run folder as demos
    import_minari: str | None = None  # no training: turn this local Minari dataset into demos
    # demonstrations
    rho: float = 0.1  # probability that the next episode is a replay of a reward demo
    phi: float = 0.3  # probability that it is a replay of a value demo
    alpha: float = 10.0  # exponent of the value demos' priorities; 0 draws them uniformly
    anneal_by: Literal["capacity", "current"] = "capacity"  # a new reward demo moves phi / this size of the value list
    demo_capacity: int = 51  # demos in both lists together
    initial_reward_threshold: float | None = None  # return from which an episode is a reward demo; None: as demos have
    initial_human_demos_dir: str | None = None  # folder of demos that are never dropped
    initial_agent_demos_dir: str | None = None  # folder of demos that may be dropped
    supplementary_demos_dir: str | None = None  # folder that is watched: each new file becomes an agent demo
    target_agent_demos_dir: str | None = None  # where the agent's best demos are saved; recording: None: demos/ENV
    num_agent_demos_to_save: int = 10  # as many reward demos, and as many value demos; recording: episodes
    save_demos_every: int = 10  # rollouts between saves
    # algorithm
    recurrent: bool = True  # a GRU between trunk and heads; without it the agent has no memory
    gru_size: int = 128  # units of the GRU
    chunk_length: int = 32  # steps that gradients flow back through the GRU
    learning_rate: float = 3e-4  # of Adam
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    num_envs: int = 8  # environments played side by side
    num_steps: int = 128  # steps of each environment per rollout
    num_minibatches: int = 4  # parts of a rollout, one gradient step each
    update_epochs: int = 4  # passes over a rollout
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # GAE: 0 trusts the critic, 1 the rewards
    norm_adv: bool = True  # normalise advantages over each minibatch
    clip_coef: float = 0.2  # eps of the clipped objective
    clip_vloss: bool = False  # clip the value loss as well
    clip_vloss_coef: float = 0.2  # how far a value may move before its loss is clipped
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # longer gradients are shortened to this norm
    target_kl: float | None = None  # end an update at the first minibatch whose KL divergence exceeds this
    hidden_sizes: tuple[int, ...] = (128,)  # layers of the trunk
    normalize_obs: bool = False  # normalise observations by their running mean and deviation
    normalize_reward: bool = False  # divide rewards by the running deviation of the discounted return
    clip_reward: bool = False  # learn from the signs of rewards; reported returns are always true ones

    def __new__(cls, *_, **given):
        """Note which arguments are given."""
        self = super().__new__(cls)
        self.given = given
        return self

    def __post_init__(self):
        """Fill in the others, from the run that is resumed or played, else from `config`, else from TUNED."""
        played = self.evaluate or self.record_from
        run_dir = self.resume or played
        source = f"{run_dir}/config.json" if run_dir else self.config
        for name, value in (read_config(source) if source else TUNED.get(self.env_id, {})).items():
            if name not in self.given and not (played and name in ("device", "capture_video")):  # training's own
                setattr(self, name, value)


class UserError(Exception):
    """Something the user can mend: shown as one line, with exit code 2."""


MODES = "resume evaluate model render config run_dir record_demo record_from import_minari".split()  # not in a config
RESUMABLE = MODES + "total_timesteps stop_at_return eval_every eval_episodes capture_video checkpoint_every".split()
RESUMABLE += "device torch_threads progress supplementary_demos_dir target_agent_demos_dir".split()
RESUMABLE += "num_agent_demos_to_save save_demos_every".split()  # these may change when a run is resumed
COUNTS = "num_envs num_steps num_minibatches update_epochs total_timesteps eval_episodes max_episode_steps".split()
COUNTS += "gru_size chunk_length demo_capacity num_agent_demos_to_save save_demos_every hidden_sizes".split()
RANGES = dict.fromkeys(COUNTS, (1, math.inf)) | dict.fromkeys("gamma gae_lambda rho phi".split(), (0, 1))
RANGES |= dict.fromkeys("stop_at_return max_episode_return initial_reward_threshold".split(), (-math.inf, math.inf))
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

PLUGINS = {"MiniGrid": "minigrid", "BabyAI": "minigrid"}  # packages whose import registers these


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


class GoalReward(gym.RewardWrapper):
    """Pay 1 where the episode terminates and 0 elsewhere: the sparse version of a task that ends at its goal."""

    def step(self, action):
        obs, _, terminated, truncated, info = self.env.step(action)
        return obs, float(terminated), terminated, truncated, info


class EpisodeStarts(gym.vector.VectorWrapper):
    """A vector environment whose observations are rows (N, W + 1): flat, then 1 where an episode begins and else 0.

    There a recurrent state starts at zero; so whoever has the row needs to know nothing else. Of a Dict with an "image"
    (MiniGrid's view) only that is kept. `view` is the Box of observations without the mark.
    """

    def __init__(self, envs):
        super().__init__(envs)
        space = envs.single_observation_space
        self.key = "image" if isinstance(space, spaces.Dict) and "image" in space.spaces else None
        self.view = space[self.key] if self.key else space
        low, high, self.dtype = (0, 255, np.uint8) if self.view.dtype == np.uint8 else (-np.inf, np.inf, np.float32)
        self.single_observation_space = spaces.Box(low, high, (math.prod(self.view.shape) + 1,), self.dtype)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, self.num_envs)
        self.ended = np.zeros(self.num_envs, bool)

    def reset(self, *, seed=None, options=None):
        which = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        obs, infos = self.env.reset(seed=seed, options=options)
        self.ended = self.ended & ~which
        return self.rows(obs, which), infos

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        rows = self.rows(obs, self.ended)  # what ended in the step before has been reset in this one
        self.ended = terminated | truncated
        return rows, rewards, terminated, truncated, infos

    def rows(self, obs, starts):
        obs = obs[self.key] if self.key else obs
        return np.concatenate([obs.reshape(self.num_envs, -1), starts[:, None]], 1, dtype=self.dtype)


def make_single_envs(args, num_envs, render_mode=None):
    """A vector environment with next-step autoreset, whose observations are the rows of EpisodeStarts.

    UserError, saying what to do, if it cannot be made.
    """
    package = next((package for prefix, package in PLUGINS.items() if args.env_id.startswith(prefix)), None)
    try:
        if package:
            importlib.import_module(package)
        kwargs = json.loads(args.env_kwargs)
        if not isinstance(kwargs, dict):
            raise ValueError(f"env_kwargs {args.env_kwargs} is not a JSON object")
        if args.max_episode_steps is not None:
            kwargs["max_episode_steps"] = args.max_episode_steps
        if render_mode:
            kwargs["render_mode"] = render_mode
        wrappers = [pkgutil.resolve_name(path) for path in args.wrappers]
        if args.max_episode_return is not None:
            wrappers.append(functools.partial(ReturnLimit, limit=args.max_episode_return))
        # Not the environment's own vector version: that cannot reset single slots, as is due when a replay ends.
        envs = gym.make_vec(args.env_id, num_envs, vectorization_mode="sync", wrappers=wrappers, **kwargs)
        space = envs.single_observation_space
        if not isinstance(space, spaces.Box) and not (isinstance(space, spaces.Dict) and "image" in space.spaces):
            envs = gym.wrappers.vector.FlattenObservation(envs)  # Discrete observations become one-hot
        return EpisodeStarts(envs)
    except Exception as error:  # whatever went wrong, the library that complains knows best
        hint = f" (try: pip install {package})" if package and isinstance(error, ImportError) else ""
        given = f" with env_kwargs {args.env_kwargs}" if args.env_kwargs != "{}" else ""
        given += f" and wrappers {' '.join(args.wrappers)}" if args.wrappers else ""
        raise UserError(f"cannot make {args.env_id}{given}: {' '.join(str(error).split())}{hint}") from None


make_envs = make_single_envs  # as evaluate and load, which all scripts share, call it


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


def mlp(sizes, generator, last_gain):
    """Linear layers between the given sizes, tanh after all but the last."""
    hidden = [(layer(nn.Linear(i, o), generator), nn.Tanh()) for i, o in zip(sizes, sizes[1:-1])]
    return nn.Sequential(*itertools.chain(*hidden), layer(nn.Linear(*sizes[-2:]), generator, last_gain))


CELL = 11, 6, 4  # MiniGrid's numbers of objects, colours and states: a cell of its images has one of each


def is_grid(space):
    """Whether a Box holds MiniGrid's images: not colours, but an object, its colour and its state per cell."""
    return space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[2] == len(CELL)


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


def to_env(actions, space):
    """The agent's actions (B, factors or dimensions) as the environment takes them, clipped to the bounds of a Box."""
    actions = actions.reshape(-1, *space.shape)
    if isinstance(space, spaces.Box):
        return np.clip(actions, space.low, space.high).astype(space.dtype)
    return (actions + getattr(space, "start", 0)).astype(space.dtype)


def from_env(actions, space):
    """The environment's actions (B, …) as the agent has them (B, factors or dimensions). ValueError if one is none."""
    if not isinstance(space, spaces.Box) and not np.issubdtype(actions.dtype, np.integer):
        raise ValueError(f"actions are {actions.dtype}, not whole numbers")
    if not all(action in space for action in actions.astype(space.dtype)):
        raise ValueError(f"an action is not in {space}")
    if isinstance(space, spaces.Box):
        return actions.reshape(len(actions), -1).astype(np.float32)
    return (actions - getattr(space, "start", 0)).reshape(len(actions), -1).astype(np.int64)


class GridPatches(nn.Module):
    """Features of all 3 x 3 patches of a MiniGrid image whose cells are one-hot.

    One set of weights for the whole view: what a key means does not depend on where it is seen. One demonstration shows
    the agent few of these places.
    """

    def __init__(self, shape, generator, features=16):
        super().__init__()
        self.shape, side = shape, [min(3, n) for n in shape[:2]]
        self.conv = layer(nn.Conv2d(sum(CELL), features, side), generator)
        self.num_outputs = features * math.prod(n - k + 1 for n, k in zip(shape, side))

    def one_hot(self, cells):
        """(B, width, height, 11 + 6 + 4) of objects, colours and states by number, cells (B, width, height, 3)."""
        parts = [nn.functional.one_hot(cells[..., j].long().clamp(max=n - 1), n) for j, n in enumerate(CELL)]
        return torch.cat(parts, 3).float()

    def forward(self, rows):
        """(B, num_outputs) for flat images (B, width x height x 3)."""
        return self.conv(self.one_hot(rows.unflatten(1, self.shape)).movedim(3, 1)).relu().flatten(1)


class RecurrentAgent(nn.Module):
    """Actor and critic: two linear heads on one trunk, an MLP and, unless feed-forward, a GRU.

    Discrete, MultiDiscrete and MultiBinary actions are all lists of categorical factors (a bit has two categories),
    Box actions are Gaussian. Everywhere but in the environment, actions are (…, factors or dimensions). Observations
    are the rows of EpisodeStarts; a MiniGrid image goes through GridPatches first.
    """

    def __init__(self, view, action_space, args, device="cpu"):
        super().__init__()
        self.device, self.action_space, self.patches = torch.device(device), action_space, None
        self.continuous = isinstance(action_space, spaces.Box)
        if self.continuous:
            outputs = math.prod(action_space.shape)
            self.log_std = nn.Parameter(torch.zeros(outputs))
        else:
            binary = isinstance(action_space, spaces.MultiBinary)
            sizes = np.full(action_space.shape, 2) if binary else getattr(action_space, "nvec", None)
            self.sizes = [int(action_space.n)] if sizes is None else sizes.ravel().tolist()
            self.factors = [slice(end - size, end) for size, end in zip(self.sizes, np.cumsum(self.sizes))]
            outputs = sum(self.sizes)
        generator = torch.Generator().manual_seed(args.seed)
        inputs = math.prod(view.shape)
        if is_grid(view):
            self.patches = GridPatches(view.shape, generator)
            inputs = self.patches.num_outputs
        self.trunk = mlp([inputs, *args.hidden_sizes], generator, 2**0.5)  # with a tanh after its last layer as well
        width, self.state_size = args.hidden_sizes[-1], args.gru_size if args.recurrent else 0
        if args.recurrent:  # three gates side by side: reset, update, candidate
            self.gru_input = layer(nn.Linear(width, 3 * args.gru_size), generator, 1)
            self.gru_state = layer(nn.Linear(args.gru_size, 3 * args.gru_size), generator, 1)
            width = args.gru_size
        self.actor = layer(nn.Linear(width, outputs), generator, 0.01)  # 0.01: at first, all equally likely
        self.critic = layer(nn.Linear(width, 1), generator, 1)
        self.obs_stats = RunningMeanStd(inputs) if args.normalize_obs else None
        self.return_stats = RunningMeanStd(()) if args.normalize_reward else None
        self.to(self.device)
        self.leaves = list(self.parameters())
        self.flat = flatten_parameters(self.leaves)
        self.state = np.zeros((0, self.state_size), np.float32)  # of `act`
        self.seed, self.rng = args.seed if args.sample_actions else None, None  # of its draws
        # Small matrices on a CPU: torch's overhead per call exceeds the arithmetic, so acting is done in NumPy, on the
        # memory of the parameters themselves. These are changed in place only: copy weights with load_state_dict.
        if self.device.type == "cpu":
            memory = lambda m: (m.weight.detach().numpy().T, m.bias.detach().numpy())
            self.numpy_trunk = [memory(module) for module in self.trunk if isinstance(module, nn.Linear)]
            self.numpy_gru = [memory(m) for m in (self.gru_input, self.gru_state)] if args.recurrent else []
            self.numpy_actor = memory(self.actor)

    def inputs(self, rows):
        """What the trunk sees of a tensor of rows (B, W + 1): (B, inputs), without the marks of starts."""
        if self.patches:
            return self.patches(rows[:, :-1])
        x = rows[:, :-1].float()
        return self.obs_stats(x) if self.obs_stats else x

    def states(self, rows, state):
        """What the heads see of rows (L, B, W + 1), steps in time: (L, B, F), and the GRU's states after each step.

        The GRU (arXiv 1406.1078, section 2.3, its reset gate applied after the matrix as in cuDNN) starts from `state`
        (B, gru_size), and from zero wherever a row says that an episode begins. Feed-forward, there are no states.
        """
        x = self.trunk(self.inputs(rows.flatten(0, 1))).tanh()
        if not self.state_size:
            return x.unflatten(0, rows.shape[:2]), state.expand(len(rows), -1, -1)
        states, H = [], self.state_size
        for gates, starts in zip(self.gru_input(x).unflatten(0, rows.shape[:2]), rows[:, :, -1:] > 0):
            state = state * ~starts
            recurrent = self.gru_state(state)
            reset, update = (gates[:, : 2 * H] + recurrent[:, : 2 * H]).sigmoid().chunk(2, 1)
            candidate = (gates[:, 2 * H :] + reset * recurrent[:, 2 * H :]).tanh()
            state = update * state + (1 - update) * candidate
            states.append(state)
        states = torch.stack(states)
        return states, states

    def forward(self, rows, actions, state):
        """(log-probs, entropies, values), each (L, B), and GRU states (L, B, gru_size), as `states` gives them.

        `rows` (L, B, W + 1) and `actions` (L, B, factors or dimensions) are steps in time, `state` is the one before.
        """
        features, states = self.states(rows, state)
        output, actions = self.actor(features).flatten(0, 1), actions.flatten(0, 1)
        pi = DiagonalGaussian(output, self.log_std) if self.continuous else Categorical(output, self.sizes)
        log_probs, entropies = (x.view(rows.shape[:2]) for x in (pi.log_prob(actions), pi.entropy()))
        return log_probs, entropies, self.critic(features).squeeze(2), states

    def policy_output(self, rows, state):
        """(logits or means, next GRU state) for NumPy rows (B, W + 1) and the GRU state before, as NumPy arrays."""
        with torch.no_grad():
            if self.device.type != "cpu":
                features, states = self.states(*(torch.as_tensor(x, device=self.device) for x in (rows[None], state)))
                return self.actor(features[0]).cpu().numpy(), states[0].cpu().numpy()
            x = self.inputs(torch.from_numpy(rows)).numpy()
        for weight, bias in self.numpy_trunk:
            x = np.tanh(x @ weight + bias)
        if self.state_size:  # as in `states`; tanh gives the sigmoid without overflow
            H, state = self.state_size, state * (rows[:, -1:] == 0)
            gates, recurrent = (x @ w + b for x, (w, b) in zip((x, state), self.numpy_gru))
            reset, update = np.hsplit(0.5 + 0.5 * np.tanh(0.5 * (gates[:, : 2 * H] + recurrent[:, : 2 * H])), 2)
            candidate = np.tanh(gates[:, 2 * H :] + reset * recurrent[:, 2 * H :])
            x = state = update * state + (1 - update) * candidate
        weight, bias = self.numpy_actor
        return x @ weight + bias, state

    def sample(self, rows, state, rng=None):
        """(actions, next GRU state) for NumPy rows: drawn with the NumPy generator `rng`; without it, the mode."""
        output, state = self.policy_output(rows, state)
        if self.continuous:
            noise = 0 if rng is None else rng.standard_normal(output.shape, np.float32)
            return output + np.exp(self.log_std.detach().cpu().numpy()) * noise, state
        if rng is not None:  # the Gumbel-max trick: argmax(logits + Gumbel noise) is a draw from their softmax
            output = output + rng.gumbel(size=output.shape)
        return np.array([output[:, factor].argmax(1) for factor in self.factors]).T, state

    def certain_log_prob(self):
        """The log-probability of an action taken with certainty: 0; of a Gaussian, its log-density at the mean.

        A density has no probability 1. This keeps pi/mu at most 1 where pi has not moved, as for discrete actions.
        """
        if not self.continuous:
            return 0.0
        zeros = torch.zeros_like(self.log_std.detach())[None]
        return DiagonalGaussian(zeros, self.log_std.detach()).log_prob(zeros).item()

    def act(self, rows):
        """What the policy does in evaluations: NumPy rows (B, W + 1) -> actions as the environment takes them.

        The most probable ones or, with --sample-actions, draws, each evaluation's with the same random numbers. It
        remembers the GRU's state from call to call, until a row says that an episode begins.
        """
        if len(self.state) != len(rows):
            self.state = np.zeros((len(rows), self.state_size), np.float32)
        if self.seed is not None and (self.rng is None or rows[:, -1].all()):
            self.rng = np.random.default_rng(self.seed)
        actions, self.state = self.sample(rows, self.state, self.rng)
        return to_env(actions, self.action_space)


def flatten_parameters(parameters):
    """Lay parameters end to end in one vector, of which they become views. Returns the vector."""
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.data = part.view_as(p)
    return flat


# -------------------------------------------------------------------------------------------- returns and rollout
# All tensors are time-major, (T, N). next_values[t] is the value of the true successor of step t: terminated, it counts
# for nothing; truncated, it stands for the rest of the episode. Both cut the recursion; terminated wins over truncated.


def backwards(terms, decay, last):
    """x_t = terms_t + decay_t x_{t+1} from x_T = `last` (N,) back to x_0: the recursion of all three estimators."""
    xs, x = [], last
    for term, factor in zip(terms.flip(0), decay.flip(0)):
        x = term + factor * x
        xs.append(x)
    return torch.stack(xs).flip(0)


def compute_gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalised advantage estimation: (advantages, returns), each (T, N).

    A_t = delta_t + gamma lambda A_{t+1},   delta_t = r_t + gamma V(s_{t+1}) - V(s_t)   (arXiv 1506.02438, eqs. 10, 16)
    """
    deltas = rewards + gamma * next_values * ~terminated - values
    advantages = backwards(deltas, gamma * gae_lambda * ~(terminated | truncated), torch.zeros_like(rewards[0]))
    return advantages, advantages + values


Sequences = namedtuple("Sequences", "obs state actions log_probs values advantages returns trained replayed")


class SequenceBuffer:
    """One rollout of N slots, time-major (T, N, …), real episodes and replays alike; it is cut into chunks for the GRU.

        row  observation          reward  truncated  reset row  replayed     A slot replays the end of a demo. Row 1 is
         0   last of the demo     r       yes        no         yes          a reset row and never trained on, but it
         1   its final one        0       no         yes        no           holds the true successor of row 0, whose
         2   s0 of an episode     r0      no         no         no           value stands for the rest of the demo.

    The row after the end of a real episode is just the same, for in it the environment resets itself.
    """

    def __init__(self, num_steps, num_envs, observation_space, action_space, state_size, chunk_length, device="cpu"):
        T, N, D = num_steps, num_envs, math.prod(action_space.shape)  # D = 1 for Discrete, whose shape is ()
        self.obs = np.zeros((T + 1, N, *observation_space.shape), observation_space.dtype)
        self.actions = np.zeros((T, N, D), np.float32 if isinstance(action_space, spaces.Box) else np.int64)
        self.rewards = np.zeros((T, N), np.float32)
        self.terminated, self.truncated, self.reset_rows = np.zeros((3, T, N), bool)
        self.demo_ids = np.zeros((T, N), np.int64)  # which demo a row replays; 0: none
        self.state = np.zeros((N, state_size), np.float32)  # of the GRU before row 0
        self.num_steps, self.num_envs, self.chunk_length, self.device, self.row = T, N, chunk_length, device, 0

    def add(self, obs, actions, rewards, terminated, truncated, reset_rows, demo_ids, next_obs):
        """Append a step of all slots, each argument (N, …); in a full buffer the next rollout begins."""
        t = self.row
        self.obs[t], self.actions[t], self.rewards[t], self.obs[t + 1] = obs, actions, rewards, next_obs
        self.terminated[t], self.truncated[t], self.reset_rows[t] = terminated, truncated, reset_rows
        self.demo_ids[t] = demo_ids
        self.row = (t + 1) % self.num_steps

    def tensors(self, *names):
        """The named arrays as tensors on the device."""
        return [torch.as_tensor(getattr(self, name), device=self.device) for name in names]

    def evaluate(self, agent):
        """Set log_probs (T, N), values (T + 1, N) and states (T, N, gru_size), those before each row, under the agent.

        A demonstrator took his action with certainty: the log-probs of replayed rows are those of such an action.
        """
        obs, actions, state = self.tensors("obs", "actions", "state")
        actions = torch.cat([actions, actions[:1]])  # the last observation has no action yet: any will do
        with torch.no_grad():
            log_probs, _, self.values, states = agent(obs, actions, state)
        self.states = torch.cat([state[None], states[:-2]])
        self.log_probs = log_probs[:-1]
        self.log_probs[self.tensors("demo_ids")[0] > 0] = agent.certain_log_prob()

    def compute_returns(self, gamma, gae_lambda):
        """Set advantages and returns (T, N) by GAE."""
        rewards, terminated, truncated = self.tensors("rewards", "terminated", "truncated")
        step = rewards, self.values[:-1], self.values[1:], terminated, truncated
        self.advantages, self.returns = compute_gae(*step, gamma, gae_lambda)

    def chunks(self, x):
        """(T, N, …) -> (L, N T / L, …): chunks of L = chunk_length steps side by side, those of a slot in a row."""
        return x.unflatten(0, (-1, self.chunk_length)).movedim(0, 2).flatten(1, 2)

    def minibatches(self, num_minibatches, rng):
        """Yield Sequences (L, B, …) in random order that together hold every chunk once; `state` is (B, gru_size)."""
        obs, actions, demo_ids, reset_rows = self.tensors("obs", "actions", "demo_ids", "reset_rows")
        values, states = self.values[:-1], self.chunks(self.states)[0]
        fields = actions, self.log_probs, values, self.advantages, self.returns, ~reset_rows, demo_ids > 0
        obs, *fields = map(self.chunks, (obs[:-1], *fields))
        for part in np.array_split(rng.permutation(len(states)), num_minibatches):
            part = torch.as_tensor(part, device=self.device)
            yield Sequences(obs[:, part], states[part], *(field[:, part] for field in fields))


# -------------------------------------------------------------------------------------------------- demonstrations


@dataclass(eq=False)
class Demo:
    """A trajectory that slots of the vector environment can replay."""

    obs: np.ndarray  # rows of EpisodeStarts (T + 1, W + 1), the last of which is the final observation
    actions: np.ndarray  # (T, factors or dimensions), as the agent has them
    rewards: np.ndarray  # (T,), raw
    terminated: bool  # whether the episode ended with the last row; if not, it was truncated there
    total: float  # return of the whole episode, of which this may be the beginning
    human: bool = False  # never dropped
    max_value: float = 0.0  # highest estimate of the critic, over all steps of the episode; matters for value demos
    id: int = 0  # given by PPODBuffer


def as_rows(obs, view):
    """The observations (T + 1, …) of an episode as the rows of EpisodeStarts. ValueError if they lose anything so."""
    rows = np.zeros((len(obs), math.prod(view.shape) + 1), np.uint8 if view.dtype == np.uint8 else np.float32)
    rows[:, :-1], rows[0, -1] = np.reshape(obs, (len(obs), -1)), 1
    if view.dtype == np.uint8 and (rows[:, :-1] != np.reshape(obs, (len(obs), -1))).any():
        raise ValueError("observations are not of whole numbers from 0 to 255")
    return rows


def as_demo(obs, actions, rewards, terminated, max_value=0.0):
    """The Demo that an episode becomes, given as Demo's fields of its T steps.

    What follows the last positive reward teaches nothing and is cut off, so that the demo ends truncated; an episode
    without any is kept whole. The return and the highest value are those of the whole episode all the same.
    """
    positive = np.flatnonzero(rewards > 0)
    length = positive[-1] + 1 if len(positive) else len(rewards)
    whole = length == len(rewards)
    parts = obs[: length + 1].copy(), actions[:length].copy(), rewards[:length].copy()
    return Demo(*parts, bool(terminated and whole), float(rewards.sum(dtype=np.float64)), max_value=float(max_value))


def replay_probabilities(max_values, alpha):
    """p_i = v_i^alpha / sum_j v_j^alpha (arXiv 2007.03328, section 3) over the highest values v of value demos.

    Where some v is negative, all are counted from the lowest; if all are zero then, all demos are equally likely. So p
    is finite, not negative, and never lower for a higher value.
    """
    v = np.asarray(max_values, np.float64)
    v = v - min(v.min(), 0)
    weights = (v / v.max() if v.max() > 0 else np.ones_like(v)) ** alpha  # divided first: no power overflows
    return weights / weights.sum()


def as_tensor(x):
    """NumPy arrays as tensors, as checkpoints have them; anything else as it is."""
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


def as_array(x):
    """The inverse of as_tensor."""
    return x.numpy() if isinstance(x, torch.Tensor) else x


class PPODBuffer:
    """The demos, which of them each slot replays, and the episodes that may become demos (arXiv 2007.03328).

    Reward demos are from outside, or the agent's own best; value demos are those of its other episodes of whose states
    the critic thinks most highly. Each new reward demo makes replays of reward demos likelier (rho), of value demos
    less likely (phi).
    """

    LISTS = "reward_demos value_demos replays".split()
    PLAIN = "rho phi value_capacity reward_threshold last_id seen position away".split()

    def __init__(self, args, num_envs, view, action_space):
        self.args, self.view, self.action_space = args, view, action_space
        self.rho, self.phi, self.value_capacity = args.rho, args.phi, args.demo_capacity
        self.reward_demos, self.value_demos, self.last_id, self.seen = [], [], 0, {}
        self.reward_threshold = -math.inf if args.initial_reward_threshold is None else args.initial_reward_threshold
        self.replays = [None] * num_envs  # the Demo that each slot replays; None: it shows its environment
        self.position = np.zeros(num_envs, int)  # the next step of that Demo
        self.away = np.ones(num_envs, bool)  # whether the environment must be reset before it is seen (again)
        self.episodes = [None] * num_envs  # what was seen so far of each slot's episode: obs, actions, rewards, values

    # files

    def load_initial_demos(self):
        """Begin with the demos in the folders that args name. UserError if one is bad, or if there are too many."""
        for folder, human in ((self.args.initial_human_demos_dir, True), (self.args.initial_agent_demos_dir, False)):
            paths = sorted(Path(folder).glob("*.npz")) if folder else []
            if folder and not paths:
                raise UserError(f"there are no demos (.npz files) in {folder}")
            for path in paths:
                self.add(self.reward_demos, self.load_demo(path, human))
        self.value_capacity = self.args.demo_capacity - len(self.reward_demos)
        if self.value_capacity < 0:
            raise UserError(f"{len(self.reward_demos)} demos exceed demo_capacity = {self.args.demo_capacity}")
        if self.args.initial_reward_threshold is None and self.reward_demos:
            self.reward_threshold = min(demo.total for demo in self.reward_demos)

    def load_supplementary_demos(self):
        """Take each new file in the folder that is watched as an agent's demo; warn of a bad one, until it changes."""
        folder = self.args.supplementary_demos_dir
        for path in sorted(Path(folder).glob("*.npz")) if folder else ():
            changed = path.stat().st_mtime_ns
            if self.seen.get(path.name) in (0, changed):  # 0: taken
                continue
            try:
                self.add_reward_demo(self.load_demo(path, human=False))
                self.seen[path.name] = 0
            except UserError as error:
                self.seen[path.name] = changed
                print(f"skipped: {error}", file=sys.stderr)

    def load_demo(self, path, human):
        """The Demo in a file that `save_demo` (or whoever follows docs/ppod.md) wrote. UserError naming a bad one."""
        space, view = self.action_space, self.view
        with blame(path), np.load(path, allow_pickle=False) as file:
            for name, own in identity(self.args).items():
                if json.loads(str(file[name])) != own:
                    raise ValueError(f"its {name} is {file[name]}, not {json.dumps(own)}")
            obs = np.concatenate([file["observation"], file["final_observation"][None]])
            actions, rewards = file["action"], np.asarray(file["reward"], np.float32)
            T = len(rewards)
            shapes = f"observations {obs.shape}, actions {actions.shape} and rewards {rewards.shape}"
            if (
                obs.shape != (T + 1, *view.shape)
                or actions.shape != (T, *space.shape)
                or rewards.shape != (T,)
                or T == 0
            ):
                raise ValueError(f"{shapes} do not fit {view}, {space} and each other")
            rows = as_rows(obs, view)
            if not (np.isfinite(rows).all() and np.isfinite(rewards).all()):
                raise ValueError("an observation or a reward is NaN or infinite")
            total = file["episode_return"] if "episode_return" in file else rewards.sum(dtype=np.float64)
            return Demo(rows, from_env(actions, space), rewards, bool(file["terminated"]), float(total), human)

    def save_demos(self):
        """Write the agent's best reward demos and the best value demos to subfolders of target_agent_demos_dir."""
        own = sorted((demo for demo in self.reward_demos if not demo.human), key=lambda demo: -demo.total)
        best = sorted(self.value_demos, key=lambda demo: -demo.max_value)
        for name, demos in (("reward", own), ("value", best)):
            for rank, demo in enumerate(demos[: self.args.num_agent_demos_to_save]):
                path = Path(self.args.target_agent_demos_dir, name, f"{rank}.npz")
                save_demo(path, demo, self.args, self.view, self.action_space)

    # replays

    def sample_demo(self, rng):
        """The Demo to replay next, or None: the environment, also where the list that was drawn is empty."""
        u = rng.random()
        if u < self.rho:
            return self.reward_demos[rng.integers(len(self.reward_demos))] if self.reward_demos else None
        if u < self.rho + self.phi and self.value_demos:
            p = replay_probabilities([demo.max_value for demo in self.value_demos], self.args.alpha)
            return self.value_demos[rng.choice(len(p), p=p)]
        return None

    def replay(self, envs, reset_rows, actions, step, rng):
        """Put replays in place of what the environments did, in the arrays (N, …) themselves. Returns demo ids (N,).

        `step` is (next observations, rewards, terminated, truncated). In its reset row a slot draws what comes next.
        """
        next_obs, rewards, terminated, truncated = step
        demo_ids, shown = np.zeros(len(reset_rows), np.int64), np.zeros(len(reset_rows), bool)
        for i, demo in enumerate(self.replays):
            if reset_rows[i]:
                demo = self.replays[i] = self.sample_demo(rng)
                self.position[i], rewards[i], terminated[i], truncated[i] = 0, 0, False, False
                if demo:
                    next_obs[i], self.away[i] = demo.obs[0], True
                else:
                    shown[i], self.away[i] = self.away[i], False
            elif demo:
                t = self.position[i]
                demo_ids[i], actions[i], rewards[i], next_obs[i] = (
                    demo.id,
                    demo.actions[t],
                    demo.rewards[t],
                    demo.obs[t + 1],
                )
                over = t + 1 == len(demo.rewards)
                terminated[i], truncated[i] = over and demo.terminated, over and not demo.terminated
                self.position[i] += 1
        if shown.any():
            next_obs[shown] = envs.reset(options={"reset_mask": shown})[0][shown]
        return demo_ids

    def abandon_episodes(self):
        """Forget all replays and unfinished episodes, for the environments have been reset."""
        self.replays, self.episodes = [None] * len(self.replays), [None] * len(self.episodes)
        self.away[:] = False

    # lists

    def add(self, demos, demo):
        """Append the Demo to one of the lists, under an id of its own."""
        self.last_id += 1
        demo.id = self.last_id
        demos.append(demo)

    def add_reward_demo(self, demo):
        """A new reward demo: anneal, make room, and raise the threshold to the lowest return in the list."""
        self.add(self.reward_demos, demo)
        self.anneal_parameters()
        self.check_demo_buffer_capacity()
        self.reward_threshold = max(self.reward_threshold, min(d.total for d in self.reward_demos))

    def track_potential_demos(self, rollout):
        """Look at all episodes and replays that ended in a SequenceBuffer whose values are known.

        A real episode is a candidate: with a return that reaches the threshold it becomes a reward demo, else a value
        demo if there is room or the critic thought more highly of a state in it than of any in the lowest value demo. A
        value demo that was replayed gets the highest value that the critic gave it this time.
        """
        values = rollout.values.cpu().numpy()
        begins = rollout.reset_rows[0].astype(int)
        for t, i in np.argwhere(rollout.terminated | rollout.truncated):
            self.extend(i, rollout, values, begins[i], t + 1)
            obs, actions, rewards, episode_values = self.episodes[i]
            self.episodes[i], begins[i] = None, t + 2  # row t + 1 is a reset row
            if demo_id := rollout.demo_ids[t, i]:
                for demo in self.value_demos:
                    if demo.id == demo_id:
                        demo.max_value = float(episode_values.max())
                continue
            demo = as_demo(
                np.concatenate([obs, rollout.obs[t + 1, i][None]]),
                actions,
                rewards,
                rollout.terminated[t, i],
                episode_values.max(),
            )
            if demo.total >= self.reward_threshold:
                self.add_reward_demo(demo)
            elif len(self.reward_demos) + len(self.value_demos) < self.args.demo_capacity or (
                self.value_demos and demo.max_value > min(d.max_value for d in self.value_demos)
            ):
                self.add(self.value_demos, demo)
                self.check_demo_buffer_capacity()
        for i, begin in enumerate(begins):
            self.extend(i, rollout, values, begin, rollout.num_steps)

    def extend(self, i, rollout, values, begin, end):
        """Add rows [begin, end) of a rollout to what was seen of slot i's episode."""
        if begin < end:
            new = [x[begin:end, i] for x in (rollout.obs, rollout.actions, rollout.rewards, values)]
            old = self.episodes[i] or [x[:0] for x in new]
            self.episodes[i] = [np.concatenate(pair) for pair in zip(old, new)]

    def anneal_parameters(self):
        """Move probability from value demos to reward demos: phi_0 / |D_V| for each new reward demo.

        |D_V| is how many value demos there was room for at the start, or with --anneal-by current how many there are.
        """
        if self.value_demos:
            size = self.value_capacity if self.args.anneal_by == "capacity" else len(self.value_demos)
            total = self.args.rho + self.args.phi
            self.rho = min(self.rho + self.args.phi / size, total)
            self.phi = total - self.rho

    def check_demo_buffer_capacity(self):
        """Drop what exceeds the capacity: the lowest value demos first, then the longest reward demo of an agent."""
        while len(self.reward_demos) + len(self.value_demos) > self.args.demo_capacity:
            if self.value_demos:
                self.value_demos.remove(min(self.value_demos, key=lambda demo: demo.max_value))
            elif own := [demo for demo in self.reward_demos if not demo.human]:
                self.reward_demos.remove(max(own, key=lambda demo: len(demo.rewards)))
            else:
                break

    def figures(self):
        """What metrics.csv has about the demos."""
        sizes = {"reward_demos": len(self.reward_demos), "value_demos": len(self.value_demos)}
        return sizes | {"reward_threshold": self.reward_threshold, "rho": self.rho, "phi": self.phi}

    def state_dict(self):
        """Everything that changes, as tensors and plain types, for a checkpoint."""
        demos = {d.id: d for d in [*self.reward_demos, *self.value_demos, *self.replays] if d}
        fields = {k: {name: as_tensor(x) for name, x in vars(demo).items()} for k, demo in demos.items()}
        ids = {name: [d.id if d else 0 for d in getattr(self, name)] for name in self.LISTS}
        episodes = [[torch.from_numpy(x) for x in episode] if episode else None for episode in self.episodes]
        return {"demos": fields, "ids": ids, "episodes": episodes} | {
            k: as_tensor(getattr(self, k)) for k in self.PLAIN
        }

    def load_state_dict(self, state):
        """Put back what state_dict returned."""
        demos = {k: Demo(**{name: as_array(x) for name, x in fields.items()}) for k, fields in state["demos"].items()}
        for name in self.LISTS:
            setattr(self, name, [demos.get(k) for k in state["ids"][name]])
        self.episodes = [[x.numpy() for x in episode] if episode else None for episode in state["episodes"]]
        for name in self.PLAIN:
            setattr(self, name, as_array(state[name]))


def identity(args):
    """What a demo has to agree with: the environment as its file names it."""
    return {"env_id": args.env_id, "env_kwargs": json.loads(args.env_kwargs), "wrappers": list(args.wrappers)}


def save_demo(path, demo, args, view, action_space):
    """Write a Demo as an .npz file, whole or not at all. docs/ppod.md describes the fields."""
    obs = demo.obs[:, :-1].reshape(-1, *view.shape)
    fields = {"observation": obs[:-1], "action": to_env(demo.actions, action_space), "reward": demo.rewards}
    fields |= {"final_observation": obs[-1], "terminated": demo.terminated, "truncated": not demo.terminated}
    fields |= {"episode_return": demo.total} | {k: json.dumps(v) for k, v in identity(args).items()}

    def write(temporary):
        with temporary.open("wb") as file:
            np.savez_compressed(file, **fields)

    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, write)


# ----------------------------------------------------------------------------------------------- losses and update


def policy_loss(log_ratios, advantages, clip_coef):
    """The clipped surrogate, negated, of log r = log pi - log mu (B,) and advantages A (B,).

    L = E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ]   (arXiv 1707.06347, eq. 7). Where A > 0 only the upper bound can be
    the smaller one, where A < 0 only the lower, so the clipped term may as well be the constant A + eps |A|.
    """
    return -torch.min(log_ratios.exp() * advantages, advantages + clip_coef * advantages.abs()).mean()


def value_loss(values, old_values, returns, clip_coef=None):
    """Half the mean squared error; with `clip_coef` (OpenAI baselines, ppo2), moving a value further gains nothing."""
    errors = (values - returns).square()
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (clipped - returns).square())
    return 0.5 * errors.mean()


def normalize(advantages):
    """Zero mean and unit (population) deviation over the batch (B,)."""
    std, mean = torch.std_mean(advantages, correction=0)
    return (advantages - mean) / (std + 1e-8)


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


def sequence_gradient(agent, batch, args):
    """(flat gradient, [loss, policy loss, value loss, entropy], log pi - log mu of the rows that are no replays)."""
    new_log_probs, entropies, new_values, _ = agent(batch.obs, batch.actions, batch.state)
    log_ratios, values, entropies = (x[batch.trained] for x in (new_log_probs - batch.log_probs, new_values, entropies))
    advantages, returns = batch.advantages[batch.trained], batch.returns[batch.trained]
    advantages = normalize(advantages) if args.norm_adv else advantages
    pg_loss = policy_loss(log_ratios, advantages, args.clip_coef)
    clip_vloss_coef = args.clip_vloss_coef if args.clip_vloss else None
    v_loss = value_loss(values, batch.values[batch.trained], returns, clip_vloss_coef)
    entropy = entropies.mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, agent.leaves)])
    own = log_ratios.detach()[~batch.replayed[batch.trained]]
    return gradient, torch.stack([loss, pg_loss, v_loss, entropy]).detach(), own


def learn_sequences(agent, optimizer, buffer, learning_rate, args, rng):
    """Take all gradient steps on one rollout. Returns the figures for metrics.csv.

    Of replayed rows pi/mu is no distance that the policy has moved: figures of that (and target_kl) leave them out.
    """
    trained = ~torch.as_tensor(buffer.reset_rows, device=agent.device)
    returns, errors = buffer.returns[trained], (buffer.returns - buffer.values[:-1])[trained]
    explained_variance = 1 - errors.var(correction=0) / (returns.var(correction=0) + 1e-8)
    losses, log_ratios = [], []
    for batch in (b for _ in range(args.update_epochs) for b in buffer.minibatches(args.num_minibatches, rng)):
        if not batch.trained.any():
            continue
        gradient, loss, own = sequence_gradient(agent, batch, args)
        optimizer.step(gradient, learning_rate, args.max_grad_norm)
        losses.append(loss)
        log_ratios.append(own)
        if args.target_kl is not None and len(own) and approximate_kl(own) > args.target_kl:
            break
    log_ratios = torch.cat(log_ratios)
    figures = dict(zip(("loss", "policy_loss", "value_loss", "entropy"), torch.stack(losses).mean(0)))
    figures["approx_kl"] = approximate_kl(log_ratios)
    figures["clip_fraction"] = ((log_ratios.exp() - 1).abs() > args.clip_coef).float().mean()
    return {name: x.item() for name, x in (figures | {"explained_variance": explained_variance}).items()}


def scale_rewards(buffer, stats, discounted):
    """Divide the buffer's rewards by the running deviation of the discounted return so far, and clip them to ±10.

    That return is G_t = r_t + gamma G_{t-1}; `stats` is its RunningMeanStd, `discounted` (N,) the G before the rollout.
    Returns the G after it.
    """
    history = np.empty(buffer.rewards.shape)
    for t, ended in enumerate(buffer.terminated | buffer.truncated):
        history[t] = discounted = discounted * buffer.gamma + buffer.rewards[t]
        discounted = discounted * ~ended
    stats.update(history[~buffer.reset_rows])
    buffer.rewards = np.clip(buffer.rewards / math.sqrt(stats.var.item() + 1e-8), -10, 10)
    return discounted


# -------------------------------------------------------------------------------------- run folder and evaluation

LOWER_PANEL = ("policy_loss", "value_loss", "entropy")  # columns of metrics.csv that the learning curve shows as well
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


# ------------------------------------------------------------------------------------------------------- recording

# Keys for --record-demo by the beginning of the environment's id: (key -> action, action if no key is held). Without
# the latter, time stands still until a key is pressed. Discrete actions of all others are on the keys 0 to 9.
MINIGRID = {"a": 0, "d": 1, "w": 2, "p": 3, "x": 4, " ": 5}, None
KEYS = {"MiniGrid": MINIGRID, "BabyAI": MINIGRID, "MountainCar-": ({"a": 0, "d": 2}, 1)}


class Recorder(gym.Env):
    """One environment that shows rows of EpisodeStarts and saves each good episode as a demo in a folder.

    Good: the return reaches initial_reward_threshold, or is positive if that is not given.
    """

    def __init__(self, args, render_mode=None):
        self.envs, self.args, self.render_mode, self.saved = make_envs(args, 1, render_mode), args, render_mode, 0
        self.observation_space, self.action_space = self.envs.single_observation_space, self.envs.single_action_space
        self.metadata, self.folder = self.envs.metadata, Path(args.target_agent_demos_dir or f"demos/{args.env_id}")
        self.first = {"seed": args.seed}  # later episodes go on from there

    def reset(self, *, seed=None, options=None):
        rows, infos = self.envs.reset(**self.first)
        self.first, self.obs, self.actions, self.rewards = {}, [rows[0]], [], []
        return rows[0], infos

    def step(self, action):
        rows, rewards, terminated, truncated, infos = self.envs.step(np.array([action]))
        self.obs.append(rows[0])
        self.actions.append(action)
        self.rewards.append(rewards[0])
        if terminated[0] or truncated[0]:
            self.keep(terminated[0])
        return rows[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), infos

    def keep(self, terminated):
        """Save the episode if it is good, and say so."""
        actions = from_env(np.array(self.actions), self.action_space)
        demo = as_demo(np.array(self.obs), actions, np.array(self.rewards, np.float32), terminated)
        threshold, note = self.args.initial_reward_threshold, ""
        if demo.total >= threshold if threshold is not None else demo.total > 0:
            taken = {path.name for path in self.folder.glob("*.npz")}
            path = self.folder / next(f"{i}.npz" for i in itertools.count() if f"{i}.npz" not in taken)
            save_demo(path, demo, self.args, self.envs.view, self.action_space)
            self.saved, note = self.saved + 1, f" -> {path}"
        print(f"return {demo.total:.3f} in {len(self.rewards)} steps{note}")

    def render(self):
        return self.envs.render()[0]


def record_by_keyboard(args):
    """--record-demo: let a person play."""
    recorder = Recorder(args, "rgb_array")
    if not isinstance(recorder.action_space, spaces.Discrete):
        raise UserError(f"{args.env_id} has {recorder.action_space}; by keyboard one plays Discrete actions only")
    start, n = int(recorder.action_space.start), int(recorder.action_space.n)
    digits = {str(i): start + i for i in range(min(n, 10))}, None
    keys, noop = next((entry for prefix, entry in KEYS.items() if args.env_id.startswith(prefix)), digits)
    names = getattr(getattr(recorder.envs.unwrapped.envs[0].unwrapped, "actions", None), "__members__", {})
    names = {int(action): name for name, action in names.items()}
    for key, action in keys.items():
        print(f"{'space' if key == ' ' else key:>6}  action {action} {names.get(action, '')}")
    print("escape  stop; good episodes are saved in", recorder.folder)
    from gymnasium.utils.play import play  # needs pygame

    play(recorder, keys_to_action=keys, noop=start if noop is None else noop, wait_on_player=noop is None)


def record_from_agent(args):
    """--record-from RUN_DIR: let an agent play until enough good episodes are saved, or 100 episodes at most."""
    agent, recorder = load(args.record_from, args.model, args), Recorder(args)
    for _ in range(100):
        obs, _ = recorder.reset()
        for _ in range(episode_limit(args, recorder.envs.spec)):
            obs, _, terminated, truncated, _ = recorder.step(agent.act(obs[None])[0])
            if terminated or truncated:
                break
        if recorder.saved >= args.num_agent_demos_to_save:
            return


def import_minari(args):
    """--import-minari DATASET: every episode of a local Minari dataset as a demo file."""
    try:
        import minari
    except ImportError:
        raise UserError("import_minari needs minari: pip install minari") from None
    try:
        dataset = minari.load_dataset(args.import_minari)
    except Exception as error:
        raise UserError(f"cannot load the Minari dataset {args.import_minari}: {error}") from None
    envs = make_envs(args, 1)
    folder = Path(args.target_agent_demos_dir or f"demos/{args.env_id}")
    for episode in dataset.iterate_episodes():
        obs = episode.observations[envs.key] if envs.key else episode.observations
        actions = from_env(np.asarray(episode.actions), envs.single_action_space)
        demo = as_demo(
            as_rows(obs, envs.view), actions, np.asarray(episode.rewards, np.float32), episode.terminations[-1]
        )
        save_demo(folder / f"{episode.id}.npz", demo, args, envs.view, envs.single_action_space)
    print(f"{len(dataset)} demos -> {folder}")


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


def make_recurrent_agent(args, envs):
    """An untrained RecurrentAgent for these environments. UserError if a space or the device is none this handles."""
    view, action_space = envs.view, envs.single_action_space
    if not isinstance(action_space, (spaces.Discrete, spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        raise UserError(
            f"{args.env_id} has {action_space}; ppod.py needs Discrete, Box, MultiDiscrete or MultiBinary actions"
        )
    if view.dtype == np.uint8 and math.prod(view.shape) > 1_000:
        wanted = "vectors or MiniGrid's images (ppo.py takes larger ones)"
        raise UserError(f"{args.env_id} has observations {view}; ppod.py needs {wanted}: use --wrappers")
    if is_grid(view) and args.normalize_obs:
        raise UserError("normalize_obs is for vectors: the cells of a MiniGrid image are one-hot")
    agent = RecurrentAgent(view, action_space, args, choose_device(args))
    agent.args = args  # for evaluate(agent, agent.args) in a notebook
    return agent


make_agent = make_recurrent_agent  # as load, which all scripts share, calls it


def mean_return(run):
    """Mean return of the last 100 training episodes; NaN before the first."""
    recent = [total for _, total in run.episodes[-100:]]
    return sum(recent) / len(recent) if recent else math.nan


def is_finished(args, run):
    """Whether all steps are taken, or the last 100 training episodes are as good as --stop-at-return asks."""
    solved = args.stop_at_return is not None and len(run.episodes) >= 100 and mean_return(run) >= args.stop_at_return
    return solved or run.step >= args.total_timesteps


def play_or_replay(agent, envs, buffer, demos, args, run, rng):
    """Fill the buffer with one rollout; `run` keeps what goes on from rollout to rollout."""
    buffer.state = run.state.copy()
    check_finite(args, run.step, observation=run.obs)
    for _ in range(buffer.num_steps):
        actions, run.state = agent.sample(run.obs, run.state, rng)
        next_obs, *outcome, _ = envs.step(to_env(actions, agent.action_space))
        demo_ids = demos.replay(envs, run.reset_rows, actions, (next_obs, *outcome), rng)
        rewards, terminated, truncated = outcome
        buffer.add(run.obs, actions, rewards, terminated, truncated, run.reset_rows, demo_ids, next_obs)
        real = ~run.reset_rows & (demo_ids == 0)
        run.step += int(real.sum())
        run.replayed_rows += int((demo_ids > 0).sum())
        check_finite(args, run.step, observation=next_obs, reward=rewards)
        run.returns += rewards * real
        run.obs, run.reset_rows = next_obs, terminated | truncated
        over = run.reset_rows & real
        if over.any():
            run.episodes += [(run.step, total) for total in run.returns[over].tolist()]
            run.returns[over] = 0


def train(args):
    """Train as `args` say. Returns the final figures, which also stand in summary.json. UserError on bad input."""
    check_args(args)
    chunk_length = args.chunk_length if args.recurrent else 1  # single rows where nothing goes back in time
    if args.num_steps % chunk_length:
        raise UserError(f"num_steps = {args.num_steps} does not divide into chunks of chunk_length = {chunk_length}")
    if args.num_envs * args.num_steps // chunk_length % args.num_minibatches:
        chunks = f"num_envs x num_steps / {chunk_length} = {args.num_envs * args.num_steps // chunk_length} chunks"
        raise UserError(f"{chunks} do not divide into num_minibatches = {args.num_minibatches} equal parts")
    if args.rho + args.phi >= 1:
        raise UserError(f"rho + phi = {args.rho + args.phi:g} must be below 1: the environment needs its share")
    if args.supplementary_demos_dir and not Path(args.supplementary_demos_dir).is_dir():
        raise UserError(f"supplementary_demos_dir {args.supplementary_demos_dir} is no folder")
    envs = make_envs(args, args.num_envs)
    agent = make_agent(args, envs)
    if args.capture_video:
        make_envs(args, 1, "rgb_array").close()  # now, rather than at the first evaluation, if it has no pictures
    observation_space, action_space = envs.single_observation_space, envs.single_action_space
    shape = args.num_steps, args.num_envs, observation_space, action_space, agent.state_size, chunk_length
    optimizer, rng, buffer = Adam(agent.flat), np.random.default_rng(args.seed), SequenceBuffer(*shape, agent.device)
    buffer.gamma = args.gamma
    demos = PPODBuffer(args, args.num_envs, envs.view, action_space)
    obs, _ = envs.reset(seed=args.seed)
    run = SimpleNamespace(  # all that the loop changes, besides weights, demos and generators: a checkpoint holds it
        step=0,  # environment steps, without reset rows and replays
        replayed_rows=0,
        rollouts=0,
        seconds=0.0,
        episodes=[],  # (step, return) of each training episode
        evaluations=[],  # (step, mean, standard deviation)
        obs=obs,
        state=np.zeros((args.num_envs, agent.state_size), np.float32),  # of the GRU
        reset_rows=np.ones(args.num_envs, bool),  # whether the next row of a slot only resets it; as every slot begins
        returns=np.zeros(args.num_envs),  # of the episodes being played
        discounted=np.zeros(args.num_envs),  # the same for normalize_reward, discounted
    )
    if not args.resume:
        demos.load_initial_demos()
    run_dir = Path(args.resume) if args.resume else start_run(args)
    args.folder = run_dir  # for main, should it be interrupted
    print(f"{args.env_id} -> {run_dir};", *(f"{name}={getattr(args, name)}" for name in TUNED.get(args.env_id, ())))
    parts = {"optimizer": optimizer, "demos": demos}
    if args.resume:
        restored = restore_checkpoint(run_dir, args, run, rng, envs, agent, **parts)
        if restored is envs:  # not carried over
            demos.abandon_episodes()
        envs = restored
    else:
        save_checkpoint(run_dir, args, run, rng, envs, agent=agent, **parts)
    begun, drawn = time.time() - run.seconds, time.time()
    eval_every = args.eval_every or math.ceil(args.total_timesteps / 10)
    checkpoint_every = args.checkpoint_every or math.ceil(args.total_timesteps / 20)
    total, quiet = args.total_timesteps, not args.progress
    with tqdm(total=total, initial=run.step, unit=" steps", unit_scale=True, disable=quiet) as bar:
        while not is_finished(args, run):
            first_step = run.step
            demos.load_supplementary_demos()
            play_or_replay(agent, envs, buffer, demos, args, run, rng)
            run.rollouts += 1
            if buffer.reset_rows.all():  # nothing was played
                continue
            buffer.evaluate(agent)
            demos.track_potential_demos(buffer)
            if args.clip_reward:
                buffer.rewards = np.sign(buffer.rewards)
            if agent.return_stats:
                run.discounted = scale_rewards(buffer, agent.return_stats, run.discounted)
            buffer.compute_returns(args.gamma, args.gae_lambda)
            learning_rate = args.learning_rate * (1 - first_step / args.total_timesteps if args.anneal_lr else 1)
            figures = learn_sequences(agent, optimizer, buffer, learning_rate, args, rng)
            check_finite(args, run.step, loss=figures["loss"], weights=agent.flat.sum().item())
            if agent.obs_stats:  # after learning, so that it saw the very numbers that the actions were chosen by
                agent.obs_stats.update(buffer.obs[:-1][~buffer.reset_rows][:, :-1])

            run.seconds = time.time() - begun
            finished, return_mean = is_finished(args, run), mean_return(run)
            row = {"step": run.step, "seconds": run.seconds, "sps": run.step / run.seconds, "return_mean": return_mean}
            row |= {"episodes": len(run.episodes), "training_rows": run.step + run.replayed_rows}
            log_row(run_dir, row | demos.figures() | {"learning_rate": learning_rate} | figures)
            bar.update(run.step - first_step)
            bar.set_postfix_str(f"mean return {return_mean:.2f}", refresh=finished)
            if args.target_agent_demos_dir and (finished or run.rollouts % args.save_demos_every == 0):
                demos.save_demos()
            if finished or run.step // eval_every > first_step // eval_every:
                evaluate_and_save(agent, args, run, run_dir)
            if finished or run.step // checkpoint_every > first_step // checkpoint_every:
                save_checkpoint(run_dir, args, run, rng, envs, agent=agent, **parts)
            if time.time() - drawn > 30:
                draw_curve(run_dir, args, run)
                drawn = time.time()
    if not run.evaluations:  # resumed, with no more steps to take than had been taken
        evaluate_and_save(agent, args, run, run_dir)
    envs.close()
    return finish(run_dir, args, run)


def main():
    """Train, evaluate or record, as the flags say. What the user can mend is one line on stderr and exit code 2."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in "env_id config resume evaluate record_from".split():  # the defaults of all other flags depend on these
        first.add_argument(f"--{name.replace('_', '-')}", f"--{name}", nargs="?")
    complaint, args = io.StringIO(), None
    sys.stdout.reconfigure(errors="replace")  # a terminal without a ± gets a ?
    try:
        with contextlib.redirect_stderr(complaint):
            defaults = Args(**{k: v for k, v in vars(first.parse_known_args()[0]).items() if v is not None})
            check_args(defaults)
            args = tyro.cli(Args, default=defaults, description=__doc__)
        check_args(args)
        if args.record_demo:
            record_by_keyboard(args)
        elif args.record_from:
            record_from_agent(args)
        elif args.import_minari:
            import_minari(args)
        elif args.evaluate:
            agent, seed = load(args.evaluate, args.model, args), args.seed + EVALUATION
            mean, std = evaluate(agent, args, args.eval_episodes, seed)
            print(f"{args.model} weights: {mean:.2f} ± {std:.2f} over {args.eval_episodes} episodes of {args.env_id}")
            if args.capture_video:
                evaluate(agent, args, 1, seed, video=Path(args.evaluate, f"videos/{args.model}.mp4"))
            if args.render:
                evaluate(agent, args, 1, seed, render=True)
        else:
            train(args)
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
