# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2",
#   "tyro==1.0.17", "tqdm==4.70.1", "moviepy==2.2.1",
# ]
# ///
"""Deep Q-learning (DQN), all of it, in this one file.

A network Q(s, a) learns what return to expect from action a in state s, by playing, storing each step in a replay
buffer, and regressing on targets that a slower copy of itself, the target network Q', helps to compute:

    y = r + gamma (1 - terminated) Q'(s', argmax_a Q(s', a)),   L = E[ Huber(y - Q(s, a)) ]    (arXiv 1509.06461, eq. 4)

    python dqn.py                                            # CartPole-v1, half a minute
    python dqn.py --env-id LunarLander-v3 --capture-video    # a lander, filmed while it learns
    python dqn.py --evaluate runs/DIR                        # play what a run has left behind

Papers: DQN arXiv 1312.5602 and Mnih 2015 (doi 10.1038/nature14236), double DQN arXiv 1509.06461, dueling networks
arXiv 1511.06581, prioritized replay arXiv 1511.05952, n-step targets as in Rainbow arXiv 1710.02298.
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

# Settings that learn, per environment. What the user gives wins.
ATARI = {"num_envs": 8, "learning_rate": 1e-4, "buffer_size": 1_000_000, "batch_size": 32, "learning_starts": 80_000,
         "target_network_frequency": 1_000, "exploration_fraction": 0.1, "end_e": 0.01, "clip_reward": True,
         "total_timesteps": 10_000_000}  # fmt: skip
TUNED = {
    "CartPole-v1": {"num_envs": 4, "train_frequency": 256, "gradient_steps": 128, "n_step": 3, "batch_size": 64,
                    "target_network_frequency": 256, "exploration_fraction": 0.16, "end_e": 0.04,
                    "hidden_sizes": (256, 256), "total_timesteps": 50_000, "eval_every": 1_000, "stop_at_return": 495},
    "Acrobot-v1": {"num_envs": 8, "n_step": 3, "exploration_fraction": 0.15, "total_timesteps": 100_000},
    "MountainCar-v0": {"train_frequency": 16, "gradient_steps": 16, "n_step": 3, "gamma": 0.98, "end_e": 0.07,
                       "target_network_frequency": 600, "hidden_sizes": (128, 128), "total_timesteps": 150_000},
    "LunarLander-v3": {"num_envs": 8, "n_step": 3, "target_network_frequency": 4, "tau": 0.005, "end_e": 0.03,
                       "exploration_fraction": 0.5, "buffer_size": 200_000, "hidden_sizes": (128, 128),
                       "total_timesteps": 300_000},
    # CleanRL's settings, not confirmed here
    "ALE/Pong-v5": ATARI, "ALE/Breakout-v5": ATARI,
}  # fmt: skip


@dataclass
class Args:
    """Every flag with its default, or what TUNED has for the environment.

    The tuned values depend on the environment, and a value that the user gives wins: so `__new__` notes what was given,
    and `__post_init__` fills in the rest. (dataclasses.replace gives every value: make new Args for a new environment.)
    """

    # run
    env_id: str = "CartPole-v1"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers, applied in order
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    total_timesteps: int = 500_000  # environment steps to train for
    stop_at_return: float | None = None  # stop once an evaluation reaches this
    seed: int = 1  # of everything that is drawn at random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps; auto: CUDA for images if there is one, else the CPU
    torch_threads: int = 0  # 0: one for vectors (more fight over small matrices), all cores for images
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, on separate environments, with deterministic actions
    capture_video: bool = False  # film an episode at each evaluation
    checkpoint_every: int = 0  # steps between checkpoints; 0: a twentieth of the run
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # weights that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window
    config: str | None = None  # config.json of an earlier run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__dqn__SEED__TIME
    progress: bool = True  # show the progress bar
    # algorithm
    double: bool = True  # the online network chooses the action that the target network values
    dueling: bool = False  # Q as the sum of a state's value and the actions' advantages
    n_step: int = 1  # rewards that a target sums before it bootstraps
    prioritized: bool = False  # sample transitions in proportion to their last error
    alpha: float = 0.6  # prioritized: 0 samples uniformly, 1 fully in proportion
    beta: float = 0.4  # prioritized: importance weights at the start, annealed to 1, which corrects for all of it
    learning_rate: float = 1e-3  # of Adam
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    num_envs: int = 1  # environments played side by side
    buffer_size: int = 100_000  # transitions in the replay buffer
    stacked_frames: Literal["auto", "yes", "no"] = "auto"  # images are stacks of frames: store each once; auto: Atari
    learning_starts: int = 1_000  # steps before the first update
    train_frequency: int = 4  # steps from one update to the next
    gradient_steps: int = 1  # gradient steps per update
    batch_size: int = 128  # transitions per gradient step
    gamma: float = 0.99  # discount
    target_network_frequency: int = 500  # steps from one change of the target network to the next
    tau: float = 1.0  # how far it then moves towards the network; 1 copies (small values need a small frequency)
    start_e: float = 1.0  # share of random actions at the start
    end_e: float = 0.05  # share of random actions at the end
    exploration_fraction: float = 0.2  # share of the run in which the one falls to the other
    max_grad_norm: float = 10.0  # longer gradients are shortened to this norm
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layers (vectors only)
    normalize_obs: bool = False  # normalise observations by their running mean and deviation
    clip_reward: bool = False  # learn from the signs of rewards (Atari); reported returns are always true ones

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
COUNTS = "num_envs buffer_size batch_size train_frequency gradient_steps target_network_frequency n_step".split()
COUNTS += "total_timesteps eval_episodes max_episode_steps hidden_sizes".split()
RANGES = dict.fromkeys(COUNTS, (1, math.inf)) | {"seed": (0, 2**32), "torch_threads": (0, 10_000)}
RANGES |= dict.fromkeys(("stop_at_return", "max_episode_return"), (-math.inf, math.inf))
SHARES = "gamma tau start_e end_e exploration_fraction alpha beta".split()
RANGES |= dict.fromkeys(SHARES, (0, 1))  # all other numbers: from 0 to infinity


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


def relu_mlp(sizes, generator):
    """Linear layers between the given sizes, ReLU after all but the last."""
    hidden = [(layer(nn.Linear(i, o), generator), nn.ReLU()) for i, o in zip(sizes, sizes[1:-1])]
    return nn.Sequential(*itertools.chain(*hidden), layer(nn.Linear(*sizes[-2:]), generator, 1))


def dueling_values(output):
    """Q = V + A - mean A, (B, actions), of V and A side by side (B, 1 + actions)   (arXiv 1511.06581, eq. 9)."""
    value, advantages = output[:, :1], output[:, 1:]
    return value + advantages - advantages.mean(1, keepdims=True)


class QNetwork(nn.Module):
    """Q(s, a) of all actions at once: an MLP on vectors, the Nature CNN and a linear layer on images."""

    def __init__(self, observation_space, action_space, args, device="cpu"):
        super().__init__()
        self.device, self.action_space, self.image = torch.device(device), action_space, is_image(observation_space)
        self.dueling = args.dueling
        outputs = int(action_space.n) + self.dueling
        generator = torch.Generator().manual_seed(args.seed)
        shape = observation_space.shape
        if self.image:
            self.channels_last = shape[2] == min(shape)
            self.trunk = nature_cnn(*(np.roll(shape, 1).tolist() if self.channels_last else shape), generator)
            self.head = layer(nn.Linear(512, outputs), generator, 1)
        else:
            self.head = relu_mlp([math.prod(shape), *args.hidden_sizes, outputs], generator)
        self.obs_stats = RunningMeanStd(math.prod(shape)) if args.normalize_obs else None
        self.to(self.device)
        self.leaves = list(self.parameters())
        self.flat = flatten_parameters(self.leaves)
        # Small matrices on a CPU: torch's overhead per call exceeds the arithmetic: what needs no gradient is done in
        # NumPy, on the memory of the parameters. These are changed in place only: copy weights with load_state_dict.
        self.fits_numpy = not self.image and self.device.type == "cpu"
        if self.fits_numpy:
            linears = [module for module in self.head if isinstance(module, nn.Linear)]
            self.numpy_layers = [(m.weight.detach().numpy().T, m.bias.detach().numpy()) for m in linears]

    def features(self, obs):
        """What the head sees of observations (B, …): images through the CNN, vectors flat and normalised."""
        if self.image:
            return self.trunk((obs.movedim(-1, -3) if self.channels_last else obs).float() / 255)
        obs = obs.reshape(len(obs), -1).float()
        return self.obs_stats(obs) if self.obs_stats else obs

    def forward(self, obs):
        """Q (B, actions) of a tensor of observations (B, …)."""
        output = self.head(self.features(obs))
        return dueling_values(output) if self.dueling else output

    def predict(self, obs):
        """forward without gradient."""
        if self.fits_numpy:
            return torch.from_numpy(self.predict_in_numpy(obs.numpy()))
        with torch.inference_mode():
            return self(obs)

    def predict_in_numpy(self, obs):
        """The same, from array to array."""
        output = self.layers_in_numpy(obs)[-1]
        return dueling_values(output) if self.dueling else output

    def layers_in_numpy(self, obs):
        """The input of the first layer and the outputs of all, ReLU included: arrays (B, width)."""
        x = np.asarray(obs, np.float32).reshape(len(obs), -1)
        outputs = [self.obs_stats(torch.from_numpy(x)).numpy() if self.obs_stats else x]
        *hidden, (weight, bias) = self.numpy_layers
        for w, b in hidden:
            outputs.append(np.maximum(outputs[-1] @ w + b, 0))
        return [*outputs, outputs[-1] @ weight + bias]

    def chosen_q(self, obs, actions):
        """(Q of these actions (B, 1), as (B,); a function from dL/dQ (B,) to dL/dparameters, flat)."""
        if self.fits_numpy:
            return self.chosen_q_in_numpy(obs.numpy(), actions.numpy())
        q = self(obs).gather(1, actions).squeeze(1)
        return q.detach(), lambda slopes: torch.cat([g.flatten() for g in torch.autograd.grad(q, self.leaves, slopes)])

    def chosen_q_in_numpy(self, obs, actions):
        """The same, by the chain rule from the last layer to the first: what autograd does, with fewer calls."""
        *inputs, output = self.layers_in_numpy(obs)
        q = np.take_along_axis(dueling_values(output) if self.dueling else output, actions, 1).squeeze(1)

        def backward(slopes):
            slope = np.zeros((len(obs), self.action_space.n), np.float32)  # dL/d what the layer at hand puts out
            np.put_along_axis(slope, actions, slopes.numpy()[:, None], 1)
            if self.dueling:  # dV: their sum; dA: how far each is from their mean
                slope = np.hstack([slope.sum(1, keepdims=True), slope - slope.mean(1, keepdims=True)])
            gradients = []
            for x, (weight, _) in zip(reversed(inputs), reversed(self.numpy_layers)):
                gradients += [slope.sum(0), (slope.T @ x).ravel()]
                if x is not inputs[0]:
                    slope = (slope @ weight.T) * (x > 0)  # ReLU passes on slopes where it was open
            return torch.from_numpy(np.concatenate(gradients[::-1]))

        return torch.from_numpy(q), backward

    def greedy(self, obs):
        """The best actions (B,) for a NumPy array of observations (B, …)."""
        if self.fits_numpy:
            return self.predict_in_numpy(obs).argmax(1)
        return self.predict(torch.as_tensor(obs, device=self.device)).argmax(1).cpu().numpy()

    def explore(self, obs, epsilon, rng):
        """Each action drawn uniformly with probability epsilon, else the best one."""
        actions, at_random = self.greedy(obs), rng.random(len(obs)) < epsilon
        if at_random.any():
            actions[at_random] = rng.integers(self.action_space.n, size=at_random.sum())
        return actions

    def to_env(self, actions):
        """Actions as the environment takes them."""
        return (actions + self.action_space.start).astype(self.action_space.dtype)

    def act(self, obs):
        """What the greedy policy does: NumPy observations (B, …) -> actions as the environment takes them."""
        return self.to_env(self.greedy(obs))


def flatten_parameters(parameters):
    """Lay parameters end to end in one vector, of which they become views. Returns the vector."""
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.data = part.view_as(p)
    return flat


# ------------------------------------------------------------------------------------------------- replay buffers

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


NStepTransitions = namedtuple("NStepTransitions", (*Transitions._fields, "discounts"))


class NStepBuffer(ReplayBuffer):
    """Transitions over up to n steps: from s_0, with r_0 + gamma r_1 + … + gamma^(k-1) r_(k-1), to s_k.

    They are put together when they are drawn, by following the links from each step to the next of its episode. k is
    n, but less where the episode ends before, or where nothing more of it has been played. The target of such a
    transition bootstraps with discount gamma^k, unless step k - 1 terminated   (arXiv 1710.02298, eq. 1).
    """

    arrays = (*ReplayBuffer.arrays, "next_slot")

    def __init__(self, capacity, observation_space, action_space, device="cpu", num_envs=1, n_step=1, gamma=0.99):
        super().__init__(capacity, observation_space, action_space, device)
        self.next_slot = np.arange(capacity + 1)  # where the episode goes on; the slot itself: nowhere (yet)
        self.newest = np.full(num_envs, -1)  # slot of each environment's last step; -1, a spare one: there is none
        self.n_step, self.gamma = n_step, gamma

    def add(self, obs, actions, rewards, terminated, truncated, reset_rows, next_obs):
        """As ReplayBuffer.add; capacity must be at least 2 N, so that an episode's last step is always there."""
        slots = super().add(obs, actions, rewards, terminated, truncated, reset_rows, next_obs)
        rows = np.flatnonzero(~reset_rows)
        self.next_slot[self.newest[rows]] = self.next_slot[slots] = slots
        self.newest[rows] = np.where((terminated | truncated)[rows], -1, slots)
        return slots

    def get(self, slots):
        """The NStepTransitions that begin in these slots, on the device."""
        last, rewards, discounts = slots, self.rewards[slots], np.full(len(slots), self.gamma, np.float32)
        for _ in range(self.n_step - 1):
            following = self.next_slot[last]
            goes_on = following != last
            rewards += goes_on * discounts * self.rewards[following]
            discounts[goes_on] *= self.gamma
            last = following
        ends = self.next_observations(last), self.terminated[last]
        fields = self.observations(slots), self.actions[slots], rewards, *ends, discounts
        return NStepTransitions(*(torch.as_tensor(field, device=self.device) for field in fields))

    def observations(self, slots):
        """What the steps in these slots began with."""
        return self.obs[slots]

    def next_observations(self, slots):
        """What the steps in these slots led to."""
        return self.next_obs[slots]

    def state_dict(self):
        """What is stored, for a checkpoint."""
        return super().state_dict() | {"newest": torch.from_numpy(self.newest)}

    def load_state_dict(self, state):
        """Copy what state_dict returned."""
        super().load_state_dict(state)
        self.newest[:] = state["newest"].numpy()


class FrameStackBuffer(NStepBuffer):
    """An NStepBuffer whose observations (k, height, width) are the last k frames, the newest last: each is kept once.

    A step adds one frame, so `next_obs` holds the newest frame of what it led to, and `obs` nothing: the frames that a
    step began with are those that the k steps before it led to. Where there are fewer, because the episode began there
    or the ring has overwritten what came before, `first` holds the whole observation of the first that is left.
    """

    arrays = (*NStepBuffer.arrays, "previous_slot")

    def __init__(self, capacity, observation_space, action_space, device="cpu", num_envs=1, n_step=1, gamma=0.99):
        self.num_frames, *frame_shape = observation_space.shape
        frame_space = spaces.Box(0, 255, frame_shape, observation_space.dtype)
        super().__init__(capacity, frame_space, action_space, device, num_envs, n_step, gamma)
        self.obs = np.zeros((capacity, 0), np.uint8)
        self.previous_slot = np.arange(capacity)  # the slot itself: it is the first of its episode that is left
        self.first = {}  # slot -> observation

    def add(self, obs, actions, rewards, terminated, truncated, reset_rows, next_obs):
        """As NStepBuffer.add. UserError if an observation is not the one before, moved on by a frame."""
        rows = np.flatnonzero(~reset_rows)
        if not np.array_equal(next_obs[rows, :-1], obs[rows, 1:]):
            raise UserError("observations are not stacks of frames, newest last: use --stacked-frames no")
        for slot in (self.position + np.arange(len(rows))) % self.capacity:  # to be overwritten
            following = self.next_slot[slot]
            if following != slot:
                self.first[following] = self.observations(np.array([following]))[0]
                self.previous_slot[following] = following
            self.first.pop(slot, None)
        before = self.newest[rows]
        slots = super().add(obs[:, :0, 0, 0], actions, rewards, terminated, truncated, reset_rows, next_obs[:, -1])
        self.previous_slot[slots] = np.where(before >= 0, before, slots)
        self.first |= {slot: obs[row].copy() for slot, row in zip(slots[before < 0], rows[before < 0])}
        return slots

    def observations(self, slots):
        """What the steps in these slots began with: stacks (B, k, height, width)."""
        stacks = np.empty((len(slots), self.num_frames, *self.next_obs.shape[1:]), self.next_obs.dtype)
        at, walked = slots, np.zeros(len(slots), int)
        for i in reversed(range(self.num_frames)):
            walked += self.previous_slot[at] != at
            at = self.previous_slot[at]
            stacks[:, i] = self.next_obs[at]
        for row in np.flatnonzero(walked < self.num_frames):
            stacks[row, : self.num_frames - walked[row]] = self.first[at[row]][walked[row] :]
        return stacks

    def next_observations(self, slots):
        """What the steps in these slots led to: stacks (B, k, height, width)."""
        return np.concatenate([self.observations(slots)[:, 1:], self.next_obs[slots, None]], 1)

    def state_dict(self):
        """What is stored, for a checkpoint."""
        slots, stacks = np.array([*self.first], np.int64), np.array([*self.first.values()], self.next_obs.dtype)
        return super().state_dict() | {"first_slots": torch.from_numpy(slots), "first": torch.from_numpy(stacks)}

    def load_state_dict(self, state):
        """Copy what state_dict returned."""
        super().load_state_dict(state)
        self.first = dict(zip(state["first_slots"].tolist(), state["first"].numpy()))


class SumTree:
    """Draws slots in proportion to their priorities p = (|error| + 1e-6)^alpha   (arXiv 1511.05952, section 3.3).

    Node i of the tree is the sum of nodes 2i and 2i + 1, node 1 that of all priorities, which are the leaves. A whole
    batch goes from the root to its leaves, or back, one level at a time.
    """

    def __init__(self, capacity, alpha):
        self.leaves = 1 << (capacity - 1).bit_length()  # slot s is node leaves + s
        self.nodes = np.zeros(2 * self.leaves)
        self.alpha, self.highest = alpha, 1.0

    def add(self, slots):
        """New transitions get the highest priority so far, for their errors are unknown."""
        self.write(slots, self.highest)

    def update(self, slots, errors):
        """Set the priorities of these slots from their errors (B,)."""
        priorities = (np.abs(errors) + 1e-6) ** self.alpha
        self.highest = max(self.highest, float(priorities.max()))
        self.write(slots, priorities)

    def write(self, slots, priorities):
        """Set priorities, and the sums above them."""
        nodes = slots + self.leaves
        self.nodes[nodes] = priorities
        for _ in range(self.leaves.bit_length() - 1):
            nodes = nodes // 2
            self.nodes[nodes] = self.nodes[2 * nodes] + self.nodes[2 * nodes + 1]

    def sample(self, batch_size, rng, beta):
        """(slots, weights), each (B,); one slot from each of B equal parts of the sum of all priorities.

        The weights (1 / (size P))^beta, divided by the largest, undo what unequal sampling does to the mean gradient
        (section 3.4). P is p / sum of p, and all but p^-beta cancels.
        """
        mass = (np.arange(batch_size) + rng.random(batch_size)) * (self.nodes[1] / batch_size)
        nodes = np.ones(batch_size, np.int64)
        while nodes[0] < self.leaves:
            left = self.nodes[2 * nodes]
            right = (mass >= left) & (self.nodes[2 * nodes + 1] > 0)  # rounding must not lead to an empty leaf
            mass = mass - right * left
            nodes = 2 * nodes + right
        weights = self.nodes[nodes] ** -beta
        return nodes - self.leaves, (weights / weights.max()).astype(np.float32)

    def state_dict(self):
        """The priorities, for a checkpoint."""
        return {"priorities": torch.from_numpy(self.nodes[self.leaves :]), "highest": self.highest}

    def load_state_dict(self, state):
        """Copy what state_dict returned."""
        self.write(np.arange(self.leaves), state["priorities"].numpy())
        self.highest = state["highest"]


# ----------------------------------------------------------------------------------------------- targets and update


def linear_schedule(start, end, duration, step):
    """From `start` at step 0 to `end` at step `duration`, in a straight line, and `end` from then on."""
    return end + (start - end) * max(0.0, 1 - step / duration)


def polyak(target, source, tau):
    """target <- tau source + (1 - tau) target, in place, on flat parameter vectors (arXiv 1509.02971, algorithm 1)."""
    target.lerp_(source, tau)


def td_targets(rewards, terminated, discounts, target_q, online_q=None):
    """y (B,) = r + gamma (1 - terminated) Q'(s', a*), from Q'(s', .) and, for double DQN, Q(s', .), each (B, actions).

    a* = argmax_a Q'(s', a) (Mnih 2015, algorithm 1), or argmax_a Q(s', a) (double DQN, arXiv 1509.06461, eq. 4).
    """
    best = (target_q if online_q is None else online_q).argmax(1, keepdim=True)
    return rewards + discounts * ~terminated * target_q.gather(1, best).squeeze(1)


def huber(errors):
    """e^2 / 2 where |e| < 1, |e| - 1/2 elsewhere. Its derivative is the error clipped to ±1 (Mnih 2015, methods)."""
    return torch.where(errors.abs() < 1, 0.5 * errors.square(), errors.abs() - 0.5)


def td_gradient(agent, target, batch, weights, double):
    """(flat gradient of the mean of w Huber(y - Q), errors y - Q (B,), Q (B,)) of NStepTransitions; w (B,), or 1."""
    online_q = agent.predict(batch.next_obs) if double else None
    y = td_targets(batch.rewards, batch.terminated, batch.discounts, target.predict(batch.next_obs), online_q)
    q, backward = agent.chosen_q(batch.obs, batch.actions)
    errors = y - q
    slopes = errors.clamp(-1, 1) * (-weights / len(errors))  # dL/dQ
    return backward(slopes), errors, q


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


# -------------------------------------------------------------------------------------- run folder and evaluation

LOWER_PANEL = ("loss", "q")  # columns of metrics.csv that the learning curve shows as well
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


def mean_return(run):
    """Mean return of the last 100 training episodes; NaN before the first."""
    recent = [total for _, total in run.episodes[-100:]]
    return sum(recent) / len(recent) if recent else math.nan


def make_q_network(args, envs):
    """An untrained QNetwork for these environments. UserError if a space or the device is none this script handles."""
    observation_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(action_space, spaces.Discrete):
        raise UserError(f"{args.env_id} has {action_space}; dqn.py needs Discrete actions: try ppo.py or ddpg_td3.py")
    vector = isinstance(observation_space, spaces.Box)
    image = vector and is_image(observation_space)
    if not vector or (observation_space.dtype == np.uint8 and math.prod(observation_space.shape) > 1_000 and not image):
        wanted = "vectors, or images of three dimensions and at least 36 x 36 pixels"
        raise UserError(f"{args.env_id} has observations {observation_space}; dqn.py needs {wanted}: use --wrappers")
    if image and args.normalize_obs:
        raise UserError("normalize_obs is for vectors: images are always scaled to [0, 1]")
    device = choose_device(args, image)
    agent = QNetwork(observation_space, action_space, args, device)
    agent.args = args  # for evaluate(agent, agent.args) in a notebook
    return agent


make_agent = make_q_network  # as load, which all scripts share, calls it


def gradient_step(agent, target, optimizer, buffer, tree, learning_rate, args, run, rng):
    """Take one gradient step on a batch from the buffer; `tree`: only with --prioritized. Returns (errors, Q)."""
    weights = 1
    if tree:
        beta = linear_schedule(args.beta, 1, args.total_timesteps, run.step)
        slots, weights = tree.sample(args.batch_size, rng, beta)
        batch, weights = buffer.get(slots), torch.as_tensor(weights, device=agent.device)
    else:
        batch = buffer.sample(args.batch_size, rng)
    gradient, errors, q = td_gradient(agent, target, batch, weights, args.double)
    optimizer.step(gradient, learning_rate, args.max_grad_norm)
    if tree:
        tree.update(slots, errors.cpu().numpy())
    return errors, q


def is_over(args, run):
    """Whether all steps are taken, or the last evaluation is as good as --stop-at-return asks."""
    solved = args.stop_at_return is not None and run.evaluations and run.evaluations[-1][1] >= args.stop_at_return
    return bool(solved) or run.step >= args.total_timesteps


def make_replay_buffer(args, envs, agent):
    """The replay buffer that `args` ask for. UserError if it would hold too little."""
    if args.buffer_size < max(args.batch_size, 2 * args.num_envs):
        least = f"batch_size = {args.batch_size} or 2 x num_envs = {2 * args.num_envs}"
        raise UserError(f"buffer_size = {args.buffer_size} must not be less than {least}")
    stacked = args.env_id.startswith("ALE/") if args.stacked_frames == "auto" else args.stacked_frames == "yes"
    if stacked and not agent.image:
        raise UserError(f"stacked_frames is for images, not for {envs.single_observation_space}")
    spaces_and_device = envs.single_observation_space, envs.single_action_space, agent.device
    buffer_class = FrameStackBuffer if stacked else NStepBuffer
    return buffer_class(args.buffer_size, *spaces_and_device, args.num_envs, args.n_step, args.gamma)


def play_step(agent, envs, buffer, tree, epsilon, args, run, rng):
    """Play one step in all environments and store it; `run` keeps what goes on from step to step."""
    actions = agent.explore(run.obs, epsilon, rng)
    next_obs, rewards, terminated, truncated, _ = envs.step(agent.to_env(actions))
    check_finite(args, run.step, observation=next_obs, reward=rewards)
    learned = np.sign(rewards) if args.clip_reward else rewards
    slots = buffer.add(run.obs, actions[:, None], learned, terminated, truncated, run.reset_rows, next_obs)
    if tree:
        tree.add(slots)
    if agent.obs_stats and len(slots):
        agent.obs_stats.update(run.obs[~run.reset_rows].reshape(len(slots), -1))
    run.step += len(slots)
    run.returns += rewards
    run.obs, run.reset_rows = next_obs, terminated | truncated
    if run.reset_rows.any():
        run.episodes += [(run.step, total) for total in run.returns[run.reset_rows].tolist()]
        run.returns[run.reset_rows] = 0


def train(args):
    """Train as `args` say. Returns the final figures, which also stand in summary.json. UserError on bad input."""
    check_args(args)
    envs = make_envs(args, args.num_envs)
    agent, target = make_agent(args, envs), make_agent(args, envs)  # equal weights: both are drawn with the same seed
    target.obs_stats = agent.obs_stats
    if args.capture_video and not args.env_id.startswith("ALE/"):
        make_envs(args, 1, "rgb_array").close()  # now, rather than at the first evaluation, if it has no pictures
    optimizer, buffer, rng = Adam(agent.flat), make_replay_buffer(args, envs, agent), np.random.default_rng(args.seed)
    tree = SumTree(args.buffer_size, args.alpha) if args.prioritized else None
    obs, _ = envs.reset(seed=args.seed)
    check_finite(args, 0, observation=obs)
    run = SimpleNamespace(  # all that the loop changes, besides weights and generators: a checkpoint holds it
        step=0,  # environment steps, without reset rows
        seconds=0.0,
        episodes=[],  # (step, return) of each training episode
        evaluations=[],  # (step, mean, standard deviation)
        obs=obs,
        reset_rows=np.zeros(args.num_envs, bool),  # whether the next row of an environment only resets it
        returns=np.zeros(args.num_envs),  # of the episodes being played
    )
    run_dir = Path(args.resume) if args.resume else start_run(args)
    args.folder = run_dir  # for main, should it be interrupted
    print(f"{args.env_id} -> {run_dir};", *(f"{name}={getattr(args, name)}" for name in TUNED.get(args.env_id, ())))
    parts = {"target": target, "optimizer": optimizer, "buffer": buffer} | ({"tree": tree} if tree else {})
    if args.resume:
        made, envs = envs, restore_checkpoint(run_dir, args, run, rng, envs, agent, **parts)
        if envs is made:  # episodes restart: what is played next does not follow on what is in the buffer
            buffer.newest[:] = -1
    else:
        save_checkpoint(run_dir, args, run, rng, envs, agent=agent, **parts)
    begun, drawn = time.time() - run.seconds, time.time()
    total, quiet = args.total_timesteps, not args.progress
    eval_every = args.eval_every or math.ceil(total / 10)
    checkpoint_every = args.checkpoint_every or math.ceil(total / 20)
    intervals = math.ceil(total / 200), eval_every, checkpoint_every  # the first: between two rows of metrics.csv
    learning_starts, exploration = max(args.learning_starts, args.batch_size), max(1, args.exploration_fraction * total)
    figures = []  # (errors, Q) of each gradient step since the last row of metrics.csv
    with tqdm(total=total, initial=run.step, unit=" steps", unit_scale=True, disable=quiet) as bar:
        while not is_over(args, run):
            first_step = run.step
            epsilon = linear_schedule(args.start_e, args.end_e, exploration, first_step)
            learning_rate = args.learning_rate * (1 - first_step / total if args.anneal_lr else 1)
            play_step(agent, envs, buffer, tree, epsilon, args, run, rng)
            for step in range(first_step + 1, run.step + 1):  # as if the environments took their steps one by one
                if step >= learning_starts and step % args.train_frequency == 0:
                    for _ in range(args.gradient_steps):
                        figures.append(
                            gradient_step(agent, target, optimizer, buffer, tree, learning_rate, args, run, rng)
                        )
                if step % args.target_network_frequency == 0:
                    polyak(target.flat, agent.flat, args.tau)

            finished = run.step >= total
            log_due, eval_due, checkpoint_due = (finished or run.step // n > first_step // n for n in intervals)
            if not (log_due or eval_due or checkpoint_due):
                continue
            run.seconds = time.time() - begun
            loss = q = math.nan
            if figures:
                errors, q = (torch.cat(batches) for batches in zip(*figures))
                loss, q, figures = huber(errors).mean().item(), q.mean().item(), []
                check_finite(args, run.step, loss=loss, weights=agent.flat.sum().item())
            row = {"step": run.step, "seconds": run.seconds, "sps": run.step / run.seconds}
            row |= {"return_mean": mean_return(run), "episodes": len(run.episodes), "epsilon": epsilon}
            log_row(run_dir, row | {"learning_rate": learning_rate, "loss": loss, "q": q})
            bar.update(run.step - bar.n)
            bar.set_postfix_str(f"mean return {mean_return(run):.1f}", refresh=finished)
            if eval_due:
                evaluate_and_save(agent, args, run, run_dir)
            if checkpoint_due or is_over(args, run):
                save_checkpoint(run_dir, args, run, rng, envs, agent=agent, **parts)
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
