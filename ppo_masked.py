# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2",
#   "tyro==1.0.17", "tqdm==4.70.1", "moviepy==2.2.1",
# ]
# ///
"""Proximal policy optimisation (PPO) that never takes an invalid action, all of it, in this one file.

In many tasks most actions make no sense most of the time, and the environment knows which: a mask m(s), true for each
valid action. Learning that from penalties is slow, and hopeless where hundreds of actions are invalid. Instead, the
logits l of invalid actions are replaced by minus infinity before the softmax,

    pi(a|s) = m_a exp(l_a) / sum_b m_b exp(l_b)     (arXiv 2006.14171, section 3)

both when acting and when learning: then this is a policy like any other, the policy gradient theorem holds, and the
logits of invalid actions get no gradient. Everything else is ppo.py: `diff ppo.py ppo_masked.py` shows the difference.

    python ppo_masked.py                       # Taxi-v4, half a minute
    python ppo_masked.py --no-mask             # the same, without masks: learn by penalty only
    python ppo_masked.py --evaluate runs/DIR   # play what a run has left behind

Papers: invalid action masking arXiv 2006.14171, PPO arXiv 1707.06347, GAE arXiv 1506.02438.
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

# Settings that learn, per environment; what the user gives wins. docs/ppo_masked.md says which of them were confirmed.
TUNED = {
    "Taxi-v4": {"num_envs": 16, "learning_rate": 2e-3, "gamma": 0.98, "ent_coef": 0.01, "total_timesteps": 300_000},
}  # fmt: skip


@dataclass
class Args:
    """Every flag with its default, or what TUNED has for the environment.

    The tuned values depend on the environment, and a value that the user gives wins: so `__new__` notes what was given,
    and `__post_init__` fills in the rest. (dataclasses.replace gives every value: make new Args for a new environment.)
    """

    # run
    env_id: str = "Taxi-v4"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers, applied in order
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    total_timesteps: int = 500_000  # environment steps to train for
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
    run_dir: str | None = None  # where to write; None: runs/ENV__ppo_masked__SEED__TIME
    progress: bool = True  # show the progress bar
    # algorithm
    no_mask: bool = False  # ablation: no masks at all, learn from penalties only
    naive_mask: bool = False  # ablation: masks when acting, none when learning
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
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layers of the actor
    critic_hidden_sizes: tuple[int, ...] | None = None  # hidden layers of the critic; None: as the actor's
    normalize_reward: bool = False  # divide rewards by the running deviation of the discounted return
    compile: bool = False  # compile the loss and its gradient: faster, after half a minute

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
RESUMABLE += "device torch_threads progress compile".split()  # these may change when a run is resumed
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


def make_masked_envs(args, num_envs, render_mode=None):
    """A vector environment with next-step autoreset, whose observations end in the masks of valid actions.

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
        if isinstance(envs.single_observation_space, spaces.Tuple):
            envs = gym.wrappers.vector.FlattenObservation(envs)
        return MaskedEnvs(envs, args.no_mask)
    except Exception as error:  # whatever went wrong, the library that complains knows best
        hint = f" (try: pip install {package})" if package and isinstance(error, ImportError) else ""
        given = f" with env_kwargs {args.env_kwargs}" if args.env_kwargs != "{}" else ""
        given += f" and wrappers {' '.join(args.wrappers)}" if args.wrappers else ""
        raise UserError(f"cannot make {args.env_id}{given}: {' '.join(str(error).split())}{hint}") from None


make_envs = make_masked_envs  # as evaluate and load, which all scripts share, call it


def episode_limit(args, spec=None):
    """Steps of the longest episode: the user's limit, else the environment's own, else Atari's half hour or 1,000."""
    default = 27_000 if args.env_id.startswith("ALE/") else 1_000
    return args.max_episode_steps or getattr(spec, "max_episode_steps", None) or default


# ---------------------------------------------------------------------------------------------------------- masks
# A mask is a row of booleans, True for every valid choice: one for each action (Discrete), those of all factors side by
# side (MultiDiscrete), or two per bit, "may be 0" and "may be 1" (MultiBinary).


class InvalidMask(UserError, ValueError):
    """A mask that leaves nothing to choose from."""


def factor_sizes(action_space):
    """The number of choices of each factor of a Discrete, MultiDiscrete or MultiBinary space (a bit has two)."""
    if isinstance(action_space, spaces.Discrete):
        return [int(action_space.n)]
    binary = isinstance(action_space, spaces.MultiBinary)
    return [2] * math.prod(action_space.shape) if binary else action_space.nvec.ravel().tolist()


def can_act(masks, sizes):
    """Which rows of masks (…, sum of sizes), a NumPy array, leave a choice to every factor: booleans (…)."""
    if len(sizes) == 1:
        return masks.any(-1)
    return np.logical_or.reduceat(masks, np.cumsum([0, *sizes[:-1]]), axis=-1).all(-1)


def check_masks(masks, sizes):
    """InvalidMask, a ValueError, that names the first row of masks (…, sum of sizes) without a valid action."""
    good = can_act(masks, sizes)
    if not good.all():
        raise InvalidMask(f"row {np.flatnonzero(~good)[0]}: the action mask leaves no valid action")


class MaskedEnvs(gym.vector.VectorWrapper):
    """A vector environment each of whose observations (N, features + choices) ends in the mask of valid actions.

    All in one array of float32, so that evaluation, checkpoints and whatever else is shared with ppo.py need not know
    of masks. `entries` are the spaces of the features by name, those of a Dict or a single one; a Discrete one is one
    number wide. Masks are looked for in the three SOURCES, unless `no_mask`. UserError if they are in none of them.
    """

    SOURCES = 'the entry "action_mask" of a Dict observation', 'info["action_mask"]', "a method action_masks()"

    def __init__(self, envs, no_mask=False):
        super().__init__(envs)
        space, actions = envs.single_observation_space, envs.single_action_space
        if not isinstance(actions, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            other = "; ppo.py takes Box actions" if isinstance(actions, spaces.Box) else ""
            raise UserError(f"actions are {actions}; masks need Discrete, MultiDiscrete or MultiBinary ones{other}")
        self.sizes = factor_sizes(actions)
        self.entries = dict(space.spaces) if isinstance(space, spaces.Dict) else {"observation": space}
        entry, info, method = self.SOURCES
        has_entry = isinstance(space, spaces.Dict) and self.entries.pop("action_mask", None) is not None
        for name, part in self.entries.items():
            kinds = spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary
            if not isinstance(part, kinds) or (part.dtype == np.uint8 and math.prod(part.shape) > 1_000):
                raise UserError(f"{name} is {part}; ppo_masked.py needs vectors or discrete numbers: use --wrappers")
        width = sum(math.prod(part.shape) for part in self.entries.values()) + sum(self.sizes)
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (width,))
        self.observation_space = spaces.Box(-np.inf, np.inf, (self.num_envs, width))
        self.native = hasattr(
            envs.unwrapped, "action_masks"
        )  # the environment's own vector version tells for all slots
        if no_mask:
            self.source = "nowhere, every action counts as valid"
        elif has_entry:
            self.source = entry
        elif self.native or any(env.has_wrapper_attr("action_masks") for env in getattr(envs.unwrapped, "envs", ())):
            self.source = method
        elif "action_mask" in envs.reset(seed=0)[1]:
            self.source = info
        else:
            raise UserError(f"no action masks: neither {entry}, nor {info}, nor {method} is there")

    def reset(self, **kwargs):
        obs, infos = self.env.reset(**kwargs)
        return self.rows(obs, infos, np.zeros(self.num_envs, bool)), infos

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        return self.rows(obs, infos, terminated | truncated), rewards, terminated, truncated, infos

    def rows(self, obs, infos, ended):
        """Features and masks side by side. Where an episode has `ended` (N,), the next action will be ignored."""
        parts = [obs[name] for name in self.entries] if isinstance(obs, dict) else [obs]
        parts.append(self.masks(obs, infos, ended))
        return np.concatenate([part.reshape(self.num_envs, -1) for part in parts], 1, dtype=np.float32)

    def masks(self, obs, infos, ended):
        """(N, choices), bool. What the environment leaves unset is valid; so is all in an empty mask at the end."""
        masks = np.ones((self.num_envs, sum(self.sizes)), bool)
        entry, info, method = self.SOURCES
        if self.source == entry:
            given, values = slice(None), obs["action_mask"]
        elif self.source == info and "action_mask" in infos:
            given = infos.get("_action_mask", slice(None))
            values = infos["action_mask"][given]
        elif self.source == method and self.native:
            given, values = ~ended, self.unwrapped.action_masks()[~ended]
        elif self.source == method:
            given, asked = ~ended, zip(self.unwrapped.envs, ended)  # one whose episode is over is not asked
            values = [env.get_wrapper_attr("action_masks")() for env, over in asked if not over]
        else:
            return masks
        values = np.array(list(values) if np.asarray(values).dtype.hasobject else values, bool)
        if values.size and values[0].size != masks.shape[1]:
            wanted = f"{masks.shape[1]} wide, for {self.single_action_space}"
            raise UserError(f"action masks must be {wanted}; {self.source} gives {values[0].size}")
        masks[given] = values.reshape(-1, masks.shape[1])
        if ended.any():
            masks[ended & ~can_act(masks, self.sizes)] = True
        return masks


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


add = functools.partial(functools.reduce, torch.add)  # sum() would begin with 0, and mostly there is one term only


class MaskedCategorical:
    """Independent discrete factors, each renormalised over its valid choices.

    `logits` and the boolean `mask` (…, sum of `sizes`) of the factors stand side by side; without `sizes` there is one
    factor, and actions are (…) instead of (…, factors). Without `mask` all is valid. InvalidMask, a ValueError, if a
    row has no valid choice. Masked logits get a gradient of exactly zero.
    """

    def __init__(self, logits, mask=None, sizes=None):
        self.single, sizes = sizes is None, sizes or [logits.shape[-1]]
        if mask is not None:
            mask = torch.as_tensor(mask, dtype=torch.bool, device=logits.device)
            if not torch.compiler.is_compiling():  # with --compile: those in the buffer were checked when acting
                check_masks(mask.cpu().numpy(), sizes)
            # Not minus infinity: the probability is exactly 0 either way, but 0 times infinity is NaN in the entropy.
            logits = torch.where(mask, logits, torch.finfo(logits.dtype).min)
        self.log_probs = [factor.log_softmax(-1) for factor in logits.split(sizes, -1)]

    def sample(self, generator=None):
        """Random actions, from torch's global generator unless another is given."""
        probs = [p.exp().reshape(-1, p.shape[-1]) for p in self.log_probs]
        draws = [torch.multinomial(p, 1, generator=generator) for p in probs]
        return self.actions([draw.reshape(p.shape[:-1]) for draw, p in zip(draws, self.log_probs)])

    def mode(self):
        """The likeliest actions."""
        return self.actions([p.argmax(-1) for p in self.log_probs])

    def actions(self, choices):
        return choices[0] if self.single else torch.stack(choices, -1)

    def log_prob(self, actions):
        """(…), the sum over the factors; about -3e38 for an invalid action."""
        actions = actions.unsqueeze(-1) if self.single else actions
        return add(p.gather(-1, a).squeeze(-1) for p, a in zip(self.log_probs, actions.split(1, -1)))

    def entropy(self):
        """(…), in nats."""
        return -add((p.exp() * p).sum(-1) for p in self.log_probs)


class Encoder(nn.Module):
    """First layer for one entry of the observation: linear, tanh. Discrete numbers count as one-hot vectors.

    A matrix times a one-hot vector is one of its columns: looked up, so that hundreds of states cost no time.
    """

    def __init__(self, space, width, generator):
        super().__init__()
        self.discrete = isinstance(space, (spaces.Discrete, spaces.MultiDiscrete))
        sizes = factor_sizes(space) if self.discrete else [math.prod(space.shape)]
        linear = layer(nn.Linear(sum(sizes), width), generator)
        self.weight, self.bias = nn.Parameter(linear.weight.detach().T.clone()), linear.bias
        offsets = np.cumsum([0, *sizes[:-1]]) - np.ravel(getattr(space, "start", 0))  # to the rows of `weight`
        self.register_buffer("offsets", torch.as_tensor(offsets), persistent=False)

    def forward(self, x):
        """(B, …) -> (B, width), of tensors."""
        x = x.reshape(len(x), -1)
        if not self.discrete:
            return (x.float() @ self.weight + self.bias).tanh()
        columns = (x.long() + self.offsets).unbind(1)
        return (add(self.weight.index_select(0, rows) for rows in columns) + self.bias).tanh()

    def numpy(self, x, weight, bias):
        """The same for a NumPy array and the parameters as such."""
        x = x.reshape(len(x), -1)
        if not self.discrete:
            return np.tanh(x @ weight + bias)
        columns = (x.astype(int) + self.offsets.numpy()).T
        return np.tanh(functools.reduce(np.add, [weight[rows] for rows in columns]) + bias)


class Network(nn.Module):
    """An MLP whose first layer is an Encoder for each entry of the observation, their outputs side by side."""

    def __init__(self, entries, hidden_sizes, outputs, generator, last_gain):
        super().__init__()
        width, *rest = hidden_sizes
        self.encoders = nn.ModuleList(Encoder(space, width, generator) for space in entries.values())
        self.rest = mlp([width * len(entries), *rest, outputs], generator, last_gain)

    def forward(self, parts):
        """Tensors (B, …), one for each entry -> (B, outputs)."""
        encoded = [encoder(x) for encoder, x in zip(self.encoders, parts)]
        return self.rest(torch.cat(encoded, 1) if len(encoded) > 1 else encoded[0])


class MaskedAgent(nn.Module):
    """Actor and critic, each a Network. Everywhere but in the environment, actions are (B, factors).

    Observations reach `forward` as the buffers store them, and acting as MaskedEnvs returns them: with their masks.
    """

    def __init__(self, entries, action_space, args, device="cpu"):
        super().__init__()
        self.device, self.action_space, self.entries = torch.device(device), action_space, entries
        self.sizes = factor_sizes(action_space)
        self.factors = [slice(end - size, end) for size, end in zip(self.sizes, np.cumsum(self.sizes))]
        generator = torch.Generator().manual_seed(args.seed)
        self.actor = Network(entries, args.hidden_sizes, sum(self.sizes), generator, 0.01)  # 0.01: all equally likely
        self.critic = Network(entries, args.critic_hidden_sizes or args.hidden_sizes, 1, generator, 1)
        self.return_stats = RunningMeanStd(()) if args.normalize_reward else None
        self.to(self.device)
        self.leaves = list(self.parameters())
        self.flat = flatten_parameters(self.leaves)
        # Small matrices on a CPU: torch's overhead per call exceeds the arithmetic, so acting is done in NumPy, on the
        # memory of the parameters themselves (which are therefore only ever changed in place).
        self.acts_in_numpy = self.device.type == "cpu"
        if self.acts_in_numpy:
            linears = [module for module in self.actor.rest if isinstance(module, nn.Linear)]
            self.numpy_layers = [(m.weight.detach().numpy().T, m.bias.detach().numpy()) for m in linears]
            self.numpy_encoders = [(e, e.weight.detach().numpy(), e.bias.detach().numpy()) for e in self.actor.encoders]

    def forward(self, obs_and_masks, actions):
        """(log-probs, entropies, values), each (B,), of actions (B, factors), and of observations and their masks.

        Observations are a tensor (B, …), or a dict of them; masks are bools (B, sum of sizes), or None: all is valid.
        """
        obs, masks = obs_and_masks
        parts = [obs[name] for name in self.entries] if isinstance(obs, dict) else [obs]
        pi = MaskedCategorical(self.actor(parts), masks, self.sizes)
        return pi.log_prob(actions), pi.entropy(), self.critic(parts).squeeze(1)

    def split(self, rows):
        """Rows of MaskedEnvs -> (observations as the buffers take them, masks as bools)."""
        masks = rows[:, -sum(self.sizes) :].astype(bool)
        if list(self.entries) == ["observation"]:
            return rows[:, : -sum(self.sizes)].reshape(-1, *self.entries["observation"].shape), masks
        obs, begin = {}, 0
        for name, space in self.entries.items():
            end = begin + math.prod(space.shape)
            obs[name], begin = rows[:, begin:end].reshape(-1, *space.shape), end
        return obs, masks

    def policy_output(self, obs):
        """Logits for NumPy observations, as a NumPy array."""
        parts = [obs[name] for name in self.entries] if isinstance(obs, dict) else [obs]
        if not self.acts_in_numpy:
            with torch.no_grad():
                return self.actor([torch.as_tensor(x, device=self.device) for x in parts]).cpu().numpy()
        encoded = [e.numpy(part, w, b) for (e, w, b), part in zip(self.numpy_encoders, parts)]
        x = np.concatenate(encoded, 1) if len(encoded) > 1 else encoded[0]
        *hidden, (weight, bias) = self.numpy_layers
        for w, b in hidden:
            x = np.tanh(x @ w + b)
        return x @ weight + bias

    def sample(self, obs, masks, rng=None):
        """Valid actions for NumPy observations and masks: drawn with the NumPy generator `rng`; without, the mode."""
        check_masks(masks, self.sizes)
        output = np.where(masks, self.policy_output(obs), -np.inf)
        if rng is not None:  # the Gumbel-max trick: argmax(logits + Gumbel noise) is a draw from their softmax
            output = output + rng.gumbel(size=output.shape)
        return np.array([output[:, factor].argmax(1) for factor in self.factors]).T

    def to_env(self, actions):
        """Actions as the environment takes them: in the space's shape and type."""
        space = self.action_space
        return (actions.reshape(-1, *space.shape) + getattr(space, "start", 0)).astype(space.dtype)

    def act(self, rows):
        """What the deterministic policy does: rows of MaskedEnvs -> actions as the environment takes them."""
        return self.to_env(self.sample(*self.split(rows)))


def flatten_parameters(parameters):
    """Lay parameters end to end in one vector, of which they become views. Returns the vector."""
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.data = part.view_as(p)
    return flat


# -------------------------------------------------------------------------------------------- returns and buffers
# All tensors are time-major, (T, N). next_values[t] is the value of the true successor of step t: terminated, it counts
# for nothing; truncated, it stands for the rest of the episode. Both cut the recursion; terminated wins over truncated.


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


Batch = namedtuple("Batch", "obs actions log_probs values advantages returns")  # flat tensors (B, …), of the same rows


class RolloutBuffer:
    """One rollout, time-major (T, N, …), with plain discounted returns. Kept in host memory, images as uint8.

    After an episode's end the next row only resets its environment (next-step autoreset); the action in it is ignored:

        row  observation          reward  terminated  reset row     An episode of two steps ends in s2. Row 2 is a reset
         0   s0                   r0      no          no            row and never enters a minibatch, but it holds s2:
         1   s1                   r1      yes         no            the true successor of step t is always the
         2   s2, the final one    0       no          yes           observation in row t + 1, whether or not an episode
         3   s0 of the next one   r0      no          no            ended in between.
    """

    def __init__(self, num_steps, num_envs, observation_space, action_space, device="cpu", gamma=0.99):
        T, N, D = num_steps, num_envs, math.prod(action_space.shape)  # D = 1 for Discrete, whose shape is ()
        obs_dtype = np.uint8 if observation_space.dtype == np.uint8 else np.float32
        self.obs = np.zeros((T + 1, N, *observation_space.shape), obs_dtype)
        self.actions = np.zeros((T, N, D), np.float32 if isinstance(action_space, spaces.Box) else np.int64)
        self.rewards = np.zeros((T, N), np.float32)
        self.terminated, self.truncated, self.reset_rows = np.zeros((3, T, N), bool)
        self.num_steps, self.num_envs, self.device, self.gamma, self.row = T, N, device, gamma, 0

    def add(self, obs, actions, rewards, terminated, truncated, reset_rows, next_obs):
        """Append a step of all environments, each argument (N, …); in a full buffer the next rollout begins."""
        t = self.row
        self.obs[t], self.actions[t], self.rewards[t], self.obs[t + 1] = obs, actions, rewards, next_obs
        self.terminated[t], self.truncated[t], self.reset_rows[t] = terminated, truncated, reset_rows
        self.row = (t + 1) % self.num_steps

    def tensors(self, *names):
        """The named arrays as tensors on the device."""
        return [torch.as_tensor(getattr(self, name), device=self.device) for name in names]

    def evaluate(self, agent):
        """(log-probs (T, N), values (T + 1, N)) of the whole rollout under the agent, without gradient."""
        obs, actions = self.tensors("obs", "actions")
        actions = torch.cat([actions, actions[:1]])  # the last observation has no action yet: any will do
        with torch.no_grad():
            parts = [agent(o, a) for o, a in zip(obs.flatten(0, 1).split(8192), actions.flatten(0, 1).split(8192))]
        log_probs, _, values = (torch.cat(part).view(-1, self.num_envs) for part in zip(*parts))
        return log_probs[:-1], values

    def compute_returns(self, log_probs, values, behaviour_log_probs=None):
        """Set advantages and returns (T, N) from a policy's log-probs (T, N) and its critic's values (T + 1, N).

        The policy is the one that acted, unless the log-probs of that one are given as well.
        """
        self.log_probs, self.values = log_probs if behaviour_log_probs is None else behaviour_log_probs, values[:-1]
        rewards, terminated, truncated = self.tensors("rewards", "terminated", "truncated")
        step = rewards, self.values, values[1:], terminated, truncated
        self.advantages, self.returns = self.estimate(*step, log_probs - self.log_probs)

    def estimate(self, rewards, values, next_values, terminated, truncated, log_ratios):
        """(advantages R - V, returns R), each (T, N)."""
        returns = compute_returns(rewards, next_values, terminated, truncated, self.gamma)
        return returns - values, returns

    def before_epoch(self, agent):
        """Called before every epoch but the first: nothing to do, estimates are those of the behaviour policy."""

    def minibatches(self, num_minibatches, rng):
        """Yield Batches, in random order, which together hold every row but the reset rows once."""
        rows = torch.as_tensor(rng.permutation(np.flatnonzero(~self.reset_rows)), device=self.device)
        fields = *self.tensors("obs", "actions"), self.log_probs, self.values, self.advantages, self.returns
        parts = [field.flatten(0, 1)[rows].tensor_split(num_minibatches) for field in fields]
        return (Batch(*part) for part in zip(*parts) if len(part[0]))


class GAEBuffer(RolloutBuffer):
    """A rollout with generalised advantage estimation."""

    def __init__(self, num_steps, num_envs, observation_space, action_space, device="cpu", gamma=0.99, gae_lambda=0.95):
        super().__init__(num_steps, num_envs, observation_space, action_space, device, gamma)
        self.gae_lambda = gae_lambda

    def estimate(self, rewards, values, next_values, terminated, truncated, log_ratios):
        """(advantages, returns), each (T, N), by GAE."""
        return compute_gae(rewards, values, next_values, terminated, truncated, self.gamma, self.gae_lambda)


SAMPLES = "observations actions old_values old_log_prob advantages returns action_masks"  # flat tensors (B, …)
MaskableRolloutBufferSamples = namedtuple("MaskableRolloutBufferSamples", SAMPLES)
MaskableDictRolloutBufferSamples = namedtuple("MaskableDictRolloutBufferSamples", SAMPLES)  # observations: a dict


class MaskableRolloutBuffer(GAEBuffer):
    """A rollout that keeps the mask of each observation, one byte per choice: it serves acting and learning alike.

    `naive` is the ablation in which learning does not see the masks that acting had.
    """

    samples = MaskableRolloutBufferSamples

    def __init__(self, num_steps, num_envs, observation_space, action_space, *more, naive=False, **named):
        super().__init__(num_steps, num_envs, observation_space, action_space, *more, **named)
        self.naive, self.rng = naive, np.random.default_rng(0)
        self.action_masks = np.ones((num_steps, num_envs, sum(factor_sizes(action_space))), bool)

    def add(self, obs, actions, rewards, terminated, truncated, reset_rows, next_obs, action_masks=None):
        """As in RolloutBuffer; the masks (N, choices) are those of `obs`. None: all is valid, as in all reset rows."""
        masks = self.action_masks[self.row]
        masks[:] = True if action_masks is None else action_masks
        masks[np.asarray(reset_rows, bool)] = True
        super().add(obs, actions, rewards, terminated, truncated, reset_rows, next_obs)

    def observations(self, obs):
        """Stored observations (B, …), a tensor, as the agent and the samples have them."""
        return obs

    def evaluate(self, agent):
        """(log-probs (T, N), values (T + 1, N)) of the whole rollout under the agent, without gradient."""
        obs, actions, masks = self.tensors("obs", "actions", "action_masks")
        size = max(1, min(8192, 2**22 // masks.shape[-1]))  # rows at a time: there may be 50,000 logits in each
        fields = (field.flatten(0, 1).split(size) for field in (obs[:-1], actions, masks))
        with torch.no_grad():
            parts = [agent((self.observations(o), m), a) for o, a, m in zip(*fields)]
            _, _, last = agent((self.observations(obs[-1]), None), actions[-1])  # of which only the values count
        log_probs, _, values = (torch.cat(part).view(-1, self.num_envs) for part in zip(*parts))
        return log_probs, torch.cat([values, last[None]])

    def get(self, batch_size=None, rng=None):
        """Yield `samples` of `batch_size` rows (None: of all), the last perhaps shorter, that hold all but reset rows.

        In one random order, drawn with the NumPy generator `rng`, or else with one of the buffer's own.
        """
        rows = torch.as_tensor((rng or self.rng).permutation(np.flatnonzero(~self.reset_rows)), device=self.device)
        obs, actions, masks = self.tensors("obs", "actions", "action_masks")
        fields = obs, actions, self.values, self.log_probs, self.advantages, self.returns, masks
        fields = [field.flatten(0, 1) for field in fields]  # views: nothing of the size of all masks is made
        for part in rows.split(batch_size or max(1, len(rows))):
            obs, *others = (field[part] for field in fields)
            if len(part):
                yield self.samples(self.observations(obs), *others)

    def minibatches(self, num_minibatches, rng):
        """The same as Batches, in at most `num_minibatches` parts, for `learn`: each mask goes with its observation."""
        for s in self.get(math.ceil((~self.reset_rows).sum() / num_minibatches), rng):
            obs = s.observations, None if self.naive else s.action_masks
            yield Batch(obs, s.actions, s.old_log_prob, s.old_values, s.advantages, s.returns)


class MaskableDictRolloutBuffer(MaskableRolloutBuffer):
    """The same for Dict observations: stored side by side in one array of float32, handed out as a dict of tensors."""

    samples = MaskableDictRolloutBufferSamples

    def __init__(self, num_steps, num_envs, observation_space, *more, **named):
        self.shapes = {name: space.shape for name, space in observation_space.spaces.items()}
        self.widths = [math.prod(shape) for shape in self.shapes.values()]
        super().__init__(num_steps, num_envs, spaces.Box(-np.inf, np.inf, (sum(self.widths),)), *more, **named)

    def add(self, obs, actions, rewards, terminated, truncated, reset_rows, next_obs, action_masks=None):
        """As in MaskableRolloutBuffer; `obs` and `next_obs` are dicts of arrays (N, …)."""
        obs, next_obs = (
            np.concatenate([np.reshape(o[name], (self.num_envs, -1)) for name in self.shapes], 1)
            for o in (obs, next_obs)
        )
        super().add(obs, actions, rewards, terminated, truncated, reset_rows, next_obs, action_masks)

    def observations(self, obs):
        """Stored observations (B, …), a tensor, as the agent and the samples have them."""
        parts = zip(self.shapes.items(), obs.split(self.widths, 1))
        return {name: part.reshape(-1, *shape) for (name, shape), part in parts}


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


def minibatch_gradient(agent, batch, args):
    """(flat gradient, [loss, policy loss, value loss, entropy], log pi - log mu (B,)) of a Batch."""
    log_probs, entropies, values = agent(batch.obs, batch.actions)
    log_ratios = log_probs - batch.log_probs
    advantages = normalize(batch.advantages) if args.norm_adv else batch.advantages
    pg_loss = policy_loss(log_ratios, advantages, args.clip_coef)
    v_loss = value_loss(values, batch.values, batch.returns, args.clip_vloss_coef if args.clip_vloss else None)
    entropy = entropies.mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, agent.leaves)])
    return gradient, torch.stack([loss, pg_loss, v_loss, entropy]).detach(), log_ratios.detach()


def learn(agent, optimizer, buffer, learning_rate, args, rng, gradient_of=minibatch_gradient):
    """Estimate advantages and take all gradient steps on one rollout. Returns the figures for metrics.csv.

    `gradient_of` is `minibatch_gradient`, or its compiled version.
    """
    buffer.compute_returns(*buffer.evaluate(agent))
    played = ~torch.as_tensor(buffer.reset_rows, device=agent.device)
    returns, errors = buffer.returns[played], (buffer.returns - buffer.values)[played]
    explained_variance = 1 - errors.var(correction=0) / (returns.var(correction=0) + 1e-8)

    def batches():
        for epoch in range(args.update_epochs):
            if epoch > 0:
                buffer.before_epoch(agent)
            yield from buffer.minibatches(args.num_minibatches, rng)

    losses, log_ratios = [], []
    for batch in batches():
        gradient, loss, log_ratio = gradient_of(agent, batch, args)
        optimizer.step(gradient, learning_rate, args.max_grad_norm)
        losses.append(loss)
        log_ratios.append(log_ratio)
        if args.target_kl is not None and approximate_kl(log_ratio) > args.target_kl:
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


def make_masked_agent(args, envs):
    """An untrained MaskedAgent for these MaskedEnvs. UserError if the device is none."""
    device = choose_device(args)
    agent = MaskedAgent(envs.entries, envs.single_action_space, args, device)
    agent.args = args  # for evaluate(agent, agent.args) in a notebook
    return agent


make_agent = make_masked_agent  # as load, which all scripts share, calls it


def make_masked_buffer(args, agent):
    """An empty buffer for the agent's observations and actions."""
    common = agent.action_space, agent.device, args.gamma, args.gae_lambda
    if list(agent.entries) == ["observation"]:
        space = agent.entries["observation"]
        return MaskableRolloutBuffer(args.num_steps, args.num_envs, space, *common, naive=args.naive_mask)
    space = spaces.Dict(agent.entries)
    return MaskableDictRolloutBuffer(args.num_steps, args.num_envs, space, *common, naive=args.naive_mask)


def mean_return(run):
    """Mean return of the last 100 training episodes; NaN before the first."""
    recent = [total for _, total in run.episodes[-100:]]
    return sum(recent) / len(recent) if recent else math.nan


def is_finished(args, run):
    """Whether all steps are taken, or the last 100 training episodes are as good as --stop-at-return asks."""
    solved = args.stop_at_return is not None and len(run.episodes) >= 100 and mean_return(run) >= args.stop_at_return
    return solved or run.step >= args.total_timesteps


def check_rollout(args, buffer, first_step):
    """UserError if a rollout that began at `first_step` holds a NaN or an infinity."""
    if np.isfinite(buffer.obs).all() and np.isfinite(buffer.rewards).all():
        return
    check_finite(args, first_step, observation=buffer.obs[0])
    for t, steps in enumerate(np.cumsum((~buffer.reset_rows).sum(1))):
        check_finite(args, first_step + steps, observation=buffer.obs[t + 1], reward=buffer.rewards[t])


def play_masked(args, agent, envs, buffer, run, rng):
    """Fill the buffer with one rollout; `run` keeps what goes on from rollout to rollout."""
    obs, masks = agent.split(run.obs)
    for _ in range(buffer.num_steps):
        try:
            actions = agent.sample(obs, masks, rng)
        except InvalidMask as error:
            raise InvalidMask(f"{args.env_id}, step {run.step}: {error}") from None
        run.obs, rewards, terminated, truncated, _ = envs.step(agent.to_env(actions))
        next_obs, next_masks = agent.split(run.obs)
        buffer.add(obs, actions, rewards, terminated, truncated, run.reset_rows, next_obs, masks)
        obs, masks = next_obs, next_masks
        run.step += buffer.num_envs - int(run.reset_rows.sum())
        run.returns += rewards
        run.reset_rows = terminated | truncated
        if run.reset_rows.any():
            run.episodes += [(run.step, total) for total in run.returns[run.reset_rows].tolist()]
            run.returns[run.reset_rows] = 0


def train(args):
    """Train as `args` say. Returns the final figures, which also stand in summary.json. UserError on bad input."""
    check_args(args)
    if args.num_envs * args.num_steps % args.num_minibatches:
        rows = f"num_envs x num_steps = {args.num_envs * args.num_steps} rows"
        raise UserError(f"{rows} do not divide into num_minibatches = {args.num_minibatches} equal parts")
    if args.no_mask and args.naive_mask:
        raise UserError("no_mask and naive_mask are different ablations: choose one")
    envs = make_envs(args, args.num_envs)
    agent = make_agent(args, envs)
    if args.capture_video:
        make_envs(args, 1, "rgb_array").close()  # now, rather than at the first evaluation, if it has no pictures
    optimizer, buffer, rng = Adam(agent.flat), make_masked_buffer(args, agent), np.random.default_rng(args.seed)
    gradient_of = minibatch_gradient
    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True  # so that loss and gradient become one compiled function
        gradient_of = torch.compile(minibatch_gradient, fullgraph=True, dynamic=True)
    obs, _ = envs.reset(seed=args.seed)
    run = SimpleNamespace(  # all that the loop changes, besides weights and generators: a checkpoint holds it
        step=0,  # environment steps, without reset rows
        seconds=0.0,
        episodes=[],  # (step, return) of each training episode
        evaluations=[],  # (step, mean, standard deviation)
        obs=obs,
        reset_rows=np.zeros(args.num_envs, bool),  # whether the next row of an environment only resets it
        returns=np.zeros(args.num_envs),  # of the episodes being played
        discounted=np.zeros(args.num_envs),  # the same for normalize_reward, discounted
    )
    run_dir = Path(args.resume) if args.resume else start_run(args)
    args.folder = run_dir  # for main, should it be interrupted
    print(f"{args.env_id} -> {run_dir};", *(f"{name}={getattr(args, name)}" for name in TUNED.get(args.env_id, ())))
    print(f"action masks come from {envs.source}")
    if args.resume:
        envs = restore_checkpoint(run_dir, args, run, rng, envs, agent, optimizer=optimizer)
    else:
        save_checkpoint(run_dir, args, run, rng, envs, agent=agent, optimizer=optimizer)
    begun, drawn = time.time() - run.seconds, time.time()
    eval_every = args.eval_every or math.ceil(args.total_timesteps / 10)
    checkpoint_every = args.checkpoint_every or math.ceil(args.total_timesteps / 20)
    total, quiet = args.total_timesteps, not args.progress
    with tqdm(total=total, initial=run.step, unit=" steps", unit_scale=True, disable=quiet) as bar:
        while not is_finished(args, run):
            first_step = run.step
            play_masked(args, agent, envs, buffer, run, rng)
            check_rollout(args, buffer, first_step)
            if buffer.reset_rows.all():  # nothing was played: one environment, one step
                continue
            if agent.return_stats:
                run.discounted = scale_rewards(buffer, agent.return_stats, run.discounted)
            learning_rate = args.learning_rate * (1 - first_step / args.total_timesteps if args.anneal_lr else 1)
            figures = learn(agent, optimizer, buffer, learning_rate, args, rng, gradient_of)
            check_finite(args, run.step, loss=figures["loss"], weights=agent.flat.sum().item())

            run.seconds = time.time() - begun
            finished, return_mean = is_finished(args, run), mean_return(run)
            row = {"step": run.step, "seconds": run.seconds, "sps": run.step / run.seconds, "return_mean": return_mean}
            log_row(run_dir, row | {"episodes": len(run.episodes), "learning_rate": learning_rate} | figures)
            bar.update(run.step - first_step)
            bar.set_postfix_str(f"mean return {return_mean:.1f}", refresh=finished)
            if finished or run.step // eval_every > first_step // eval_every:
                evaluate_and_save(agent, args, run, run_dir)
            if finished or run.step // checkpoint_every > first_step // checkpoint_every:
                save_checkpoint(run_dir, args, run, rng, envs, agent=agent, optimizer=optimizer)
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
