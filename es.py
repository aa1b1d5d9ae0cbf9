# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2",
#   "tyro==1.0.17", "tqdm==4.70.1", "moviepy==2.2.1",
# ]
# ///
"""Evolution strategies (OpenAI-ES) and augmented random search (ARS), all of it, in this one file.

No gradient is computed anywhere. A generation is a population of N candidates: the parameters theta with noise added.
Each plays an episode, its return is its fitness F, and theta moves towards the noise of those that did well:

    theta <- theta + alpha / (N sigma) sum_i F_i eps_i,   candidate i: theta + sigma eps_i    (arXiv 1703.03864, alg. 1)

The noise comes in antithetic pairs, eps and -eps, and from seeds, so that processes need to exchange fitnesses only.
All candidates act together: one batched matrix product per step, over one environment per candidate.

    python es.py                                            # CartPole-v1, a few seconds
    python es.py --env-id LunarLander-v3 --ars              # augmented random search instead
    torchrun --nproc-per-node 4 es.py --env-id Pendulum-v1  # the population spread over four processes

Papers: OpenAI-ES arXiv 1703.03864, ARS arXiv 1803.07055, natural evolution strategies arXiv 1106.4487.
"""

import argparse
import atexit
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
from torch import distributed, nn
from tqdm import tqdm

# Settings that learn, per environment; what the user gives wins. (The generation that reaches the total is the last.)
ARS = {"ars": True, "hidden_sizes": (), "optimizer": "ascent", "learning_rate": 0.02, "sigma": 0.03,
       "normalize_obs": True}  # fmt: skip
TUNED = {
    # confirmed with five seeds: benchmarks/results/es_scores.json
    "CartPole-v1": {"total_timesteps": 400_000},
    "Acrobot-v1": {"population_size": 64, "total_timesteps": 500_000},
    "LunarLander-v3": {"hidden_sizes": (64,), "normalize_obs": True, "total_timesteps": 1_300_000},
    "Pendulum-v1": {"episodes_per_candidate": 4, "sigma": 0.3, "learning_rate": 0.4, "action_noise": 1.0,
                    "normalize_obs": True, "total_timesteps": 6_000_000},
    "Swimmer-v5": ARS | {"population_size": 16, "sigma": 0.2, "learning_rate": 0.2, "total_timesteps": 800_000},
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
    total_timesteps: int = 1_000_000  # environment steps of all candidates together to train for
    num_generations: int | None = None  # generations to train for, if that is shorter
    stop_at_return: float | None = None  # stop once an evaluation reaches this
    seed: int = 1  # of everything that is drawn at random
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, on separate environments, with deterministic actions
    capture_video: bool = False  # film an episode at each evaluation
    checkpoint_every: int = 0  # steps between checkpoints; 0: a twentieth of the run
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # weights that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window
    config: str | None = None  # config.json of an earlier run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__es__SEED__TIME
    progress: bool = True  # show the progress bar
    # algorithm
    population_size: int = 128  # candidates of a generation: half as many directions of noise, each with both signs
    episodes_per_candidate: int = 1  # a candidate's fitness is its mean return over these
    sigma: float = 0.1  # standard deviation of the noise
    fitness: Literal["centered-rank", "standardized", "raw"] = "centered-rank"  # what returns are turned into
    elite: float = 1.0  # share of the candidates, the best, from which theta learns
    optimizer: Literal["adam", "ascent"] = "adam"  # ascent: theta moves by learning rate x gradient
    learning_rate: float = 0.05  # alpha
    weight_decay: float = 0.0  # pulls parameters to zero: subtracts this x theta from the gradient
    ars: bool = False  # augmented random search; also sets a linear policy, plain ascent, normalised observations
    top_directions: int | None = None  # ARS: learn from this many directions, the best; None: from all
    action_noise: float = 0.0  # Discrete: temperature actions are drawn at; Box: deviation of noise on the outputs
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layers of the policy; none: a linear policy
    normalize_obs: bool = False  # normalise observations by the mean and deviation of all that candidates have seen

    def __new__(cls, *_, **given):
        """Note which arguments are given."""
        self = super().__new__(cls)
        self.given = given
        return self

    def __post_init__(self):
        """Fill in the others, from the run that is resumed or evaluated, else from `config`, else from TUNED."""
        run_dir = self.resume or self.evaluate
        source = f"{run_dir}/config.json" if run_dir else self.config
        values = read_config(source) if source else TUNED.get(self.env_id, {})
        method = values.get("ars", False)
        if not source and self.given.get("ars", method) != method:  # tuned for the other method
            values = {} if method else ARS
        for name, value in values.items():
            if name not in self.given and not (self.evaluate and name == "capture_video"):  # training's own
                setattr(self, name, value)


class UserError(Exception):
    """Something the user can mend: shown as one line, with exit code 2."""


MODES = "resume evaluate model render config run_dir".split()  # what to do, not how: never taken from a config
RESUMABLE = MODES + "total_timesteps num_generations stop_at_return eval_every eval_episodes capture_video".split()
RESUMABLE += "checkpoint_every progress".split()  # these may change when a run is resumed
COUNTS = "num_generations episodes_per_candidate top_directions total_timesteps eval_episodes max_episode_steps".split()
RANGES = dict.fromkeys([*COUNTS, "hidden_sizes"], (1, math.inf)) | {"population_size": (2, math.inf)}
RANGES |= dict.fromkeys(("stop_at_return", "max_episode_return"), (-math.inf, math.inf))
RANGES |= {"elite": (0.01, 1), "sigma": (1e-6, math.inf), "seed": (0, 2**32)}  # all other numbers: from 0 to infinity


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


class OneEpisode(gym.Wrapper):
    """After the end of its episode an environment stands still, until it is reset with a seed.

    A finished candidate waits for the slowest; without this, its slot would go on playing episodes that nobody counts.
    """

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.obs, self.over = self.env.reset(seed=seed, options=options)[0], False
        return self.obs, {}

    def step(self, action):
        if self.over:
            return self.obs, 0.0, False, False, {}
        self.obs, reward, terminated, truncated, info = self.env.step(action)
        self.over = terminated or truncated
        return self.obs, reward, terminated, truncated, info


Slots = namedtuple("Slots", "envs candidates all_envs")  # a vector environment, and which candidate plays in each slot


def make_slots(args):
    """Slots for the candidates that this process plays: whole pairs, spread evenly over the processes."""
    rank, processes = process()
    pairs = np.array_split(np.arange(args.population_size // 2), processes)[rank]
    candidates = np.arange(2 * pairs[0], 2 * pairs[-1] + 2)
    envs = make_envs(args, len(candidates))
    if isinstance(envs.unwrapped, gym.vector.SyncVectorEnv):
        envs.unwrapped.envs = [OneEpisode(env) for env in envs.unwrapped.envs]
        return Slots(envs, candidates, None)
    return Slots(envs, candidates, envs if processes == 1 else make_envs(args, args.population_size))


def begin_episode(slots, seeds):
    """Start an episode in every slot. Returns the observations.

    `seeds` (N / 2) has one seed per pair, so that the two candidates of a pair start alike. A native vector environment
    takes one seed only, and draws the first states of all its slots from it: `all_envs`, with a slot for each of the N
    candidates, draws them, and `envs` takes over its part. So what a candidate meets does not depend on the processes.
    """
    envs, candidates, all_envs = slots
    if all_envs is None:
        return envs.reset(seed=[int(seeds[candidate // 2]) for candidate in candidates])[0]
    obs, _ = all_envs.reset(seed=int(seeds[0]))
    if envs is not all_envs:
        envs.reset()
        envs.unwrapped.state = all_envs.unwrapped.state[:, candidates]
    return obs[candidates]


# --------------------------------------------------------------------------------------------------------- policy


def layer(module, generator, gain=2**0.5):
    """A linear or convolutional layer, zero biases and orthogonal weights; a gain of √2 keeps signals their size."""
    nn.init.orthogonal_(module.weight, gain, generator)
    nn.init.zeros_(module.bias)
    return module


def mlp(sizes, generator, last_gain):
    """Linear layers between the given sizes, tanh after all but the last."""
    hidden = [(layer(nn.Linear(i, o), generator), nn.Tanh()) for i, o in zip(sizes, sizes[1:-1])]
    return nn.Sequential(*itertools.chain(*hidden), layer(nn.Linear(*sizes[-2:]), generator, last_gain))


def flatten_parameters(parameters):
    """Lay parameters end to end in one vector, of which they become views. Returns the vector."""
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.data = part.view_as(p)
    return flat


class ObservationStats(nn.Module):
    """Mean and deviation of all observations seen so far. It keeps sums: what processes have seen just adds up."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("sums", torch.zeros(3, size, dtype=torch.float64))  # of 1, x and x²

    def mean_and_std(self):
        """Two NumPy vectors; 0 and 1 as long as nothing has been seen."""
        count, total, squares = self.sums.numpy()
        mean = total / np.maximum(count, 1)
        variance = np.where(count > 0, squares / np.maximum(count, 1) - mean**2, 1)
        return mean.astype(np.float32), np.sqrt(np.maximum(variance, 1e-8)).astype(np.float32)


class Policy(nn.Module):
    """A deterministic policy: an MLP with tanh, or without hidden layers a linear map.

    Discrete actions are the argmax of its outputs, Box actions are the outputs squashed into the bounds by tanh.
    It acts in NumPy, for torch's overhead per call would exceed the arithmetic.
    """

    def __init__(self, observation_space, action_space, args):
        super().__init__()
        self.action_space = action_space
        inputs = math.prod(observation_space.shape)
        outputs = action_space.n if isinstance(action_space, spaces.Discrete) else math.prod(action_space.shape)
        generator = torch.Generator().manual_seed(args.seed)
        self.network = mlp([inputs, *args.hidden_sizes, int(outputs)], generator, 0)  # 0: all actions equal at first
        self.requires_grad_(False)
        self.shapes = [p.shape for p in self.parameters()]
        self.flat = flatten_parameters(list(self.parameters()))  # theta
        self.obs_stats = ObservationStats(inputs) if args.normalize_obs else None

    def layers(self, parameters):
        """[(weights (…, O, I), biases (…, O))] of flat parameters (…, D): of one policy or of many."""
        ends = np.cumsum([shape.numel() for shape in self.shapes])
        parts = [np.ascontiguousarray(part) for part in np.split(parameters, ends[:-1], -1)]
        parts = [part.reshape(*part.shape[:-1], *shape) for part, shape in zip(parts, self.shapes)]
        return list(zip(parts[::2], parts[1::2]))

    def features(self, obs, scale):
        """Observations (B, …) as float32 vectors, normalised if there is a `scale`, then clipped to ±10."""
        obs = np.asarray(obs, np.float32).reshape(len(obs), -1)
        return obs if scale is None else np.clip((obs - scale[0]) / scale[1], -10, 10)

    def scale(self):
        """(mean, deviation) by which observations are normalised, or None."""
        return self.obs_stats.mean_and_std() if self.obs_stats else None

    def to_env(self, outputs):
        """Outputs (B, O) as actions that the environment takes: in the space's bounds, shape and type."""
        space = self.action_space
        if isinstance(space, spaces.Discrete):
            return (outputs.argmax(1) + space.start).astype(space.dtype, copy=False)
        outputs = outputs.reshape(-1, *space.shape)
        if space.is_bounded():
            outputs = space.low + (space.high - space.low) * (np.tanh(outputs) + 1) / 2
        return np.clip(outputs, space.low, space.high).astype(space.dtype)

    def act(self, obs):
        """What theta does: NumPy observations (B, …) -> actions as the environment takes them."""
        return self.to_env(forward(self.layers(self.flat.numpy()), self.features(obs, self.scale())))


def forward(layers, x):
    """Outputs (B, O) for x (B, I). Layers of one policy serve all rows; layers of B policies serve one row each."""
    for i, (weights, biases) in enumerate(layers):
        if i > 0:
            np.tanh(x, out=x)
        x = np.matvec(weights, x)
        x += biases
    return x


# ---------------------------------------------------------------------------------------------- evolution strategy


def draw_seeds(args, generation):
    """(seeds of the noise (N / 2,), seeds of the episodes (episodes_per_candidate, N / 2)) of a generation."""
    pairs = args.population_size // 2
    seeds = np.random.SeedSequence([args.seed, generation]).generate_state((1 + args.episodes_per_candidate) * pairs)
    return seeds[:pairs], seeds[pairs:].reshape(-1, pairs)


def draw_noise(seeds, size):
    """One direction eps of standard normal noise from each seed, (len(seeds), size): the same in every process."""
    noise, generator = torch.empty(len(seeds), size), torch.Generator()
    for direction, seed in zip(noise, seeds):
        direction.normal_(generator=generator.manual_seed(int(seed)))
    return noise.numpy()


def make_candidates(theta, noise, sigma):
    """theta + sigma eps and theta - sigma eps for each direction: (2 x directions, D), the two of a pair in turn."""
    candidates, steps = np.empty((len(noise), 2, len(theta)), theta.dtype), sigma * noise
    np.add(theta, steps, out=candidates[:, 0])
    np.subtract(theta, steps, out=candidates[:, 1])
    return candidates.reshape(-1, len(theta))


def centered_ranks(returns):
    """Ranks (N,) spread over [-1/2, 1/2] (arXiv 1703.03864, section 2.1); equal returns share their mean rank."""
    _, which, counts = np.unique(returns, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts + 1) / 2
    return (ranks / (len(returns) - 1) - 0.5)[which]


def shape_fitness(returns, fitness="centered-rank", elite=1.0):
    """Fitnesses (N,) of returns (N,): centred ranks, standardised, or raw.

    Of an elite, fitness counts from that of the best candidate outside it, and all outside get 0: truncation
    selection, with weights that are never negative, as the utilities in arXiv 1106.4487, section 3.1.
    """
    if fitness == "centered-rank":
        returns = centered_ranks(returns)
    if fitness == "standardized":
        returns = (returns - returns.mean()) / returns.std()
    best = math.ceil(elite * len(returns))
    return returns if best == len(returns) else np.maximum(returns - np.sort(returns)[-best - 1], 0)


def es_gradient(fitnesses, noise, sigma):
    """1/(N sigma) sum_i F_i eps_i: fitnesses (N,) of pairs (eps, -eps) in turn, noise (N / 2, D) with the eps -> (D,).

    An estimate of the gradient of the expected fitness (arXiv 1703.03864, section 2), as one matrix product.
    """
    plus, minus = fitnesses.reshape(-1, 2).T
    return (plus - minus).astype(noise.dtype) @ noise / (len(fitnesses) * sigma)


def ars_gradient(returns, noise, top_directions=None):
    """1/(b sigma_R) sum_k (r_k+ - r_k-) delta_k over the b directions whose better return is best  -> (D,).

    sigma_R is the standard deviation of the 2b returns used (arXiv 1803.07055, algorithm 2). Arguments as es_gradient.
    """
    pairs = returns.reshape(-1, 2)
    top = np.argsort(-pairs.max(1), kind="stable")[:top_directions]
    plus, minus = pairs[top].T
    return (plus - minus).astype(noise.dtype) @ noise[top] / (len(top) * max(pairs[top].std(), 1e-8))


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


def move_theta(policy, optimizer, returns, noise, args):
    """Move theta once, by the returns (N,) of a generation. Returns the figures for metrics.csv.

    Where all returns are equal nothing can be learnt, and nothing changes, Adam's moments included.
    """
    before, norm = policy.flat.clone(), 0.0
    if returns.std() > 1e-6:
        if args.ars:
            gradient = ars_gradient(returns, noise, args.top_directions)
        else:
            gradient = es_gradient(shape_fitness(returns, args.fitness, args.elite), noise, args.sigma)
        gradient = torch.from_numpy(gradient.astype(np.float32))
        norm = gradient.norm().item()
        gradient -= args.weight_decay * policy.flat
        if args.optimizer == "adam":
            optimizer.step(-gradient, args.learning_rate, max_norm=math.inf)  # which descends
        else:
            policy.flat.add_(gradient, alpha=args.learning_rate)
    figures = {"gradient_norm": norm, "update_norm": (policy.flat - before).norm().item()}
    return figures | {"weight_norm": policy.flat.norm().item()}


def play_candidates(policy, candidates, envs, obs, args, step, draw=None):
    """One episode of each of n candidates (n, D), side by side, from the first observations `obs` (n, …).

    Returns (returns (n,), steps (n,), sums for ObservationStats). A candidate that has finished is not counted any
    more, whatever its slot does. `draw` gives noise (n, O) for the outputs; `step` is for the message about a NaN.
    """
    n, layers, scale = len(candidates), policy.layers(candidates), policy.scale()
    returns, steps, playing = np.zeros(n), np.zeros(n, np.int64), np.ones(n, bool)
    sums = np.zeros((3, math.prod(obs.shape[1:])))
    check_finite(args, step, observation=obs)
    for _ in range(episode_limit(args, envs.spec)):
        if scale:
            seen = obs[playing].reshape(-1, sums.shape[1]).astype(np.float64)
            sums += np.array([np.full(sums.shape[1], len(seen)), seen.sum(0), np.square(seen).sum(0)])
        outputs = forward(layers, policy.features(obs, scale))
        actions = policy.to_env(outputs if draw is None else outputs + draw())
        obs, rewards, terminated, truncated, _ = envs.step(actions)
        steps += playing
        if not math.isfinite(np.vdot(obs, obs) + np.vdot(rewards, rewards)):  # the quickest first look
            check_finite(args, step + steps.sum(), observation=obs[playing], reward=rewards[playing])
        np.add(returns, rewards, out=returns, where=playing)
        ended = terminated | truncated
        if np.count_nonzero(ended):
            playing &= ~ended
            if not playing.any():
                break
    return returns, steps, sums


def play_generation(policy, noise, slots, args, run):
    """Play all candidates of a generation. Returns (mean returns (N,), steps of all, sums for ObservationStats).

    Each process plays the candidates of its slots; what they find is added up.
    """
    candidates = make_candidates(policy.flat.numpy(), noise[slots.candidates[::2] // 2], args.sigma)
    found, sums = np.zeros((2, args.population_size)), 0.0  # returns and steps: of other processes' candidates, zero
    for episode, seeds in enumerate(draw_seeds(args, run.generation)[1]):
        obs = begin_episode(slots, seeds)
        draw = action_noise(policy, args, run.generation, episode, slots) if args.action_noise else None
        returns, steps, seen = play_candidates(policy, candidates, slots.envs, obs, args, run.step, draw)
        found[:, slots.candidates] += returns / args.episodes_per_candidate, steps
        sums = sums + seen
    returns, steps = add_up(found)
    return returns, int(steps.sum()), add_up(sums)


def action_noise(policy, args, generation, episode, slots):
    """A function that returns noise (n, O) for the outputs of n slots, however slots are spread over processes.

    Gumbel noise on logits makes their argmax a draw from their softmax; for Box actions it is normal.
    """
    rng = np.random.default_rng([args.seed, generation, episode])
    kind = rng.gumbel if isinstance(policy.action_space, spaces.Discrete) else rng.normal
    size = args.population_size, policy.shapes[-1].numel()
    return lambda: kind(0, args.action_noise, size)[slots.candidates]


# ------------------------------------------------------------------------------------------------------ processes


def process():
    """(rank of this process, number of processes) among those that torchrun has started; without it, (0, 1)."""
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def add_up(array):
    """The sum of an array over all processes; here and nowhere else do they exchange anything."""
    if distributed.is_initialized():
        distributed.all_reduce(torch.from_numpy(array))
    return array


# -------------------------------------------------------------------------------------- run folder and evaluation

LOWER_PANEL = ("gradient_norm", "update_norm")  # columns of metrics.csv that the learning curve shows as well
EVALUATION = 10_000  # added to the seed: evaluations start from other states than training does


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


def save_generation(run_dir, args, run, **parts):
    """Write checkpoint.pt: the run and the state_dict of each part.

    A generation begins with seeded noise and seeded environments, so no generator and no environment has to be kept.
    """
    state = {"env_id": args.env_id} | vars(run) | {name: part.state_dict() for name, part in parts.items()}
    atomic_write(run_dir / "checkpoint.pt", lambda path: torch.save(state, path))


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


def restore_generation(run_dir, args, run, agent, **parts):
    """Put everything back as it was at the last checkpoint, and (in the first process) cut metrics.csv there."""
    config = read_config(run_dir / "config.json")
    if changed := [name for name in config if name not in RESUMABLE and getattr(args, name) != config[name]]:
        raise UserError(f"{', '.join(changed)} cannot change when a run is resumed")
    state = load_file(run_dir / "checkpoint.pt", args, agent)
    with blame(run_dir / "checkpoint.pt"):
        for name, part in parts.items():
            part.load_state_dict(state[name])
        for name in vars(run):
            setattr(run, name, state[name])
    if process()[0] > 0:
        return
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


def make_policy(args, envs):
    """An untrained Policy for these environments. UserError if a space is none that this script handles."""
    observation_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(action_space, (spaces.Discrete, spaces.Box)):
        other = " (ppo.py takes it)" if isinstance(action_space, (spaces.MultiDiscrete, spaces.MultiBinary)) else ""
        raise UserError(f"{args.env_id} has {action_space}{other}; es.py needs Discrete or Box actions")
    image = observation_space.dtype == np.uint8 and len(observation_space.shape or ()) > 1
    if not isinstance(observation_space, spaces.Box) or image:
        wanted = "es.py needs vectors or Discrete observations (ppo.py takes images)"
        raise UserError(f"{args.env_id} has observations {observation_space}; {wanted}")
    torch.set_num_threads(1)  # more would fight over the small matrices
    agent = Policy(observation_space, action_space, args)
    agent.args = args  # for evaluate(agent, agent.args) in a notebook
    return agent


make_agent = make_policy  # as load, which all scripts share, calls it


def is_last(args, run):
    """Whether training is over: steps, generations or --stop-at-return reached."""
    return is_over(args, run) or (args.num_generations is not None and run.generation >= args.num_generations)


def is_over(args, run):
    """Whether all steps are taken, or the last evaluation is as good as --stop-at-return asks."""
    solved = args.stop_at_return is not None and run.evaluations and run.evaluations[-1][1] >= args.stop_at_return
    return bool(solved) or run.step >= args.total_timesteps


def check_population(args, processes):
    """UserError if the population does not divide into pairs and processes, or if options are at odds."""
    N = args.population_size
    if N % 2 or N < 2 * processes:
        raise UserError(f"population_size {N} does not divide into pairs, at least one for each process ({processes})")
    if args.ars and (args.fitness != "centered-rank" or args.elite != 1):
        raise UserError("ars weighs returns in its own way: leave out fitness and elite")
    if args.top_directions is not None and (not args.ars or args.top_directions > N // 2):
        raise UserError(f"top_directions needs ars, and must be at most half of population_size {N}")


def evaluate_in_first(agent, args, run, run_dir):
    """The first process evaluates and saves; the others hear of the result, for --stop-at-return."""
    first = process()[0] == 0
    if first:
        evaluate_and_save(agent, args, run, run_dir)
    result = add_up(np.array(run.evaluations[-1] if first else (0.0, 0.0, 0.0)))
    if not first:
        run.evaluations.append(tuple(result))


def train(args):
    """Train as `args` say. Returns the final figures, which also stand in summary.json. UserError on bad input.

    Under torchrun all processes do the same, from the same seeds, but for the candidates they play; only the first
    evaluates, writes and returns figures.
    """
    check_args(args)
    if distributed.is_torchelastic_launched() and not distributed.is_initialized():
        distributed.init_process_group("gloo")
        atexit.register(distributed.destroy_process_group)  # its threads would outlive the interpreter, and abort
    first = process()[0] == 0
    check_population(args, process()[1])
    slots = make_slots(args)
    agent = make_agent(args, slots.envs)
    if args.capture_video:
        make_envs(args, 1, "rgb_array").close()  # now, rather than at the first evaluation, if it has no pictures
    optimizer, run_dir = Adam(agent.flat), Path(args.resume or "")
    run = SimpleNamespace(  # all that the loop changes, besides weights: a checkpoint holds it
        generation=0,
        step=0,  # environment steps of all candidates
        seconds=0.0,
        episodes=[],  # (step, mean return over its episodes) of each candidate
        evaluations=[],  # (step, mean, standard deviation)
    )
    if first and not args.resume:
        run_dir = start_run(args)
    if first:
        args.folder = run_dir  # for main, should it be interrupted
        chosen = (f"{name}={getattr(args, name)}" for name in TUNED.get(args.env_id, {}) | (ARS if args.ars else {}))
        print(f"{args.env_id} -> {run_dir};", *chosen)
    if args.resume:
        restore_generation(run_dir, args, run, agent, optimizer=optimizer)
    elif first:
        save_generation(run_dir, args, run, agent=agent, optimizer=optimizer)
    begun, drawn = time.time() - run.seconds, time.time()
    eval_every = args.eval_every or math.ceil(args.total_timesteps / 10)
    checkpoint_every = args.checkpoint_every or math.ceil(args.total_timesteps / 20)
    total, quiet = args.total_timesteps, not (args.progress and first)
    with tqdm(total=total, initial=run.step, unit=" steps", unit_scale=True, disable=quiet) as bar:
        while not is_last(args, run):
            first_step = run.step
            noise = draw_noise(draw_seeds(args, run.generation)[0], len(agent.flat))
            returns, steps, sums = play_generation(agent, noise, slots, args, run)
            figures = move_theta(agent, optimizer, returns, noise, args)
            run.step, run.generation, run.seconds = first_step + steps, run.generation + 1, time.time() - begun
            run.episodes += [(run.step, fitness) for fitness in returns.tolist()]
            check_finite(args, run.step, weights=agent.flat.sum().item())
            if agent.obs_stats:  # only now: all candidates of a generation see by the same numbers
                agent.obs_stats.sums += torch.from_numpy(sums)
            if first:
                row = {"step": run.step, "seconds": run.seconds, "sps": run.step / run.seconds}
                row |= {"return_mean": returns.mean(), "return_std": returns.std(), "return_max": returns.max()}
                log_row(run_dir, row | {"generation": run.generation, "episodes": len(run.episodes)} | figures)
            bar.update(steps)
            bar.set_postfix_str(f"mean return {returns.mean():.1f}", refresh=is_last(args, run))
            if is_last(args, run) or run.step // eval_every > first_step // eval_every:
                evaluate_in_first(agent, args, run, run_dir)
            if first and (is_last(args, run) or run.step // checkpoint_every > first_step // checkpoint_every):
                save_generation(run_dir, args, run, agent=agent, optimizer=optimizer)
            if first and time.time() - drawn > 30:
                draw_curve(run_dir, args, run)
                drawn = time.time()
    if not run.evaluations:  # resumed, with no more steps to take than had been taken
        evaluate_in_first(agent, args, run, run_dir)
    slots.envs.close()
    return finish(run_dir, args, run) if first else {}


def main():
    """Train, or evaluate, as the flags say. What the user can mend is one line on stderr and exit code 2."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("env_id", "config", "resume", "evaluate"):  # the defaults of all other flags depend on these
        first.add_argument(f"--{name.replace('_', '-')}", f"--{name}", nargs="?")
    first.add_argument("--ars", action=argparse.BooleanOptionalAction)
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
