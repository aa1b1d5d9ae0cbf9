# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2",
#   "tyro==1.0.17", "tqdm==4.70.1", "moviepy==2.2.1",
# ]
# ///
"""Evolution strategies (OpenAI-ES) and augmented random search (ARS), all of it, in this one file.

Nothing is backpropagated. A generation is a population of N candidates: the parameters theta with noise added.
Each plays an episode, its return (or the rank of it) is its fitness F, and theta moves towards the noise of those that
did well:

    theta <- theta + alpha / (N sigma) sum_i F_i eps_i,   candidate i: theta + sigma eps_i    (arXiv 1703.03864, alg. 1)

The noise comes in antithetic pairs, eps and -eps, and from seeds that all processes share (alg. 2): none need send it.
All candidates act together: one batched matrix product per step, over one environment per candidate.

    python es.py                                            # CartPole-v1, a few seconds
    python es.py --env-id LunarLander-v3 --ars              # augmented random search instead
    torchrun --nproc-per-node 4 es.py --env-id Pendulum-v1  # the population spread over four processes

Papers: OpenAI-ES arXiv 1703.03864, ARS arXiv 1803.07055, natural evolution strategies arXiv 1106.4487.
The story ends at "# ===== helpers"; the code below it makes environments, connects processes, keeps the run folder and
draws the curve.
"""

import atexit
import copy
import importlib
import json
import math
import os
import pkgutil
import platform
import re
import sys
import time
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from shlex import quote
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium import spaces
from torch import distributed, nn
from tqdm import tqdm


@dataclass(kw_only=True)
class Args:
    """Every flag and its default. For some environments, the default one included, TUNED (below) replaces some."""

    # run
    env_id: str = "CartPole-v1"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers, applied in order
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    total_timesteps: int = 1_000_000  # environment steps of all candidates together to train for
    num_generations: int | None = None  # generations to train for, if that is shorter
    stop_at_return: float | None = None  # stop once an evaluation reaches this
    seed: int = 1  # seed of everything that is drawn at random
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, on separate environments, with deterministic actions
    capture_video: bool = False  # film an episode at each evaluation
    checkpoint_every: int = 0  # steps between checkpoints, which are written between generations; 0: a tenth of the run
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # weights that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window
    config: str | None = None  # config.json of an earlier run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__SCRIPT__SEED__TIME
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
    ars: bool = False  # augmented random search: a linear policy, plain ascent and more, see ARS below
    top_directions: int | None = None  # ARS: the paper's b, at most population_size / 2; None: all of them
    action_noise: float = 0.0  # Discrete: temperature actions are drawn at; Box: deviation of noise on the outputs
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layers of the policy; none: a linear policy
    normalize_obs: bool = False  # normalise observations by the mean and deviation of all that candidates have seen


# --------------------------------------------------------------------------------------------------------- policy


def layer(module, gain=2**0.5):
    """Give a linear or convolutional layer orthogonal weights, scaled by `gain`, and zero biases; return it."""
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


def mlp(inputs, hidden_sizes, outputs, gain):
    """Linear layers with tanh between them; the last one, whose gain is given, has none."""
    layers = []
    for size in hidden_sizes:
        layers += [layer(nn.Linear(inputs, size)), nn.Tanh()]
        inputs = size
    return nn.Sequential(*layers, layer(nn.Linear(inputs, outputs), gain))


class Policy(nn.Module):
    """A deterministic policy: an MLP with tanh, or without hidden layers one linear layer.

    All its weights and biases are one vector, theta, of D numbers. Discrete actions are the argmax of the outputs, Box
    actions the outputs squashed into the bounds, if there are any, by tanh. It acts in NumPy: torch spends more on each
    call than on the arithmetic.
    """

    def __init__(self, observation_space, action_space, args):
        super().__init__()
        self.action_space = action_space
        inputs = math.prod(observation_space.shape)
        self.discrete = isinstance(action_space, spaces.Discrete)
        outputs = int(action_space.n) if self.discrete else math.prod(action_space.shape)
        self.sizes = [inputs, *args.hidden_sizes, outputs]
        network = mlp(inputs, args.hidden_sizes, outputs, gain=0.0)  # outputs of theta itself are 0: the noise decides
        self.theta = nn.Parameter(nn.utils.parameters_to_vector(network.parameters()).detach(), requires_grad=False)
        self.obs_stats = ObservationStats(inputs) if args.normalize_obs else None

    def layers(self, parameters):
        """Cut theta (D,), or many of its kind (B, D), into [(weights (…, outputs, inputs), biases (…, outputs))]."""
        layers = []
        first = 0
        for inputs, outputs in zip(self.sizes, self.sizes[1:]):
            weights = parameters[..., first : first + outputs * inputs]
            first += outputs * inputs
            biases = parameters[..., first : first + outputs]
            first += outputs
            layers.append((weights.reshape(*weights.shape[:-1], outputs, inputs), biases))
        return layers

    def features(self, obs):
        """Observations (B, …) as vectors (B, inputs), normalised if that is asked for."""
        obs = np.asarray(obs, np.float32).reshape(len(obs), -1)
        return obs if self.obs_stats is None else self.obs_stats.normalize(obs)

    def to_env(self, outputs):
        """Outputs (B, O) as actions that the environment takes: in the space's bounds, shape and type."""
        space = self.action_space
        if self.discrete:
            return (outputs.argmax(1) + space.start).astype(space.dtype)
        actions = outputs.reshape(-1, *space.shape)
        if space.is_bounded():
            low, high = space.low.astype(np.float32), space.high.astype(np.float32)
            actions = low + (high - low) * (np.tanh(actions) + 1) / 2
        actions = np.clip(actions, space.low, space.high)
        if np.issubdtype(space.dtype, np.integer):
            actions = np.rint(actions)
        return actions.astype(space.dtype)

    def act(self, obs):
        """What theta does: NumPy observations (B, …) -> actions as the environment takes them."""
        return self.to_env(forward(self.layers(self.theta.numpy()), self.features(obs)))


def forward(layers, x):
    """Outputs (B, O) for x (B, inputs). Layers of one policy serve all rows; layers of B policies serve a row each."""
    for i, (weights, biases) in enumerate(layers):
        if i > 0:
            x = np.tanh(x)
        x = np.matvec(weights, x) + biases
    return x


# ---------------------------------------------------------------------------------------------- evolution strategy


def draw_seeds(args, generation):
    """(seeds of the noise (N / 2,), seeds of the episodes (episodes_per_candidate, N / 2)) of a generation."""
    pairs = args.population_size // 2
    seeds = np.random.SeedSequence([args.seed, generation]).generate_state((1 + args.episodes_per_candidate) * pairs)
    return seeds[:pairs], seeds[pairs:].reshape(-1, pairs)


def draw_noise(seeds, size):
    """One direction eps of standard normal noise from each seed, (len(seeds), size): the same in every process."""
    return np.stack([np.random.default_rng(seed).standard_normal(size, np.float32) for seed in seeds])


def make_candidates(theta, noise, sigma):
    """theta + sigma eps and theta - sigma eps for each direction: (2 x directions, D), the two of a pair in turn."""
    pairs = np.stack([theta + sigma * noise, theta - sigma * noise], axis=1)
    return pairs.reshape(-1, len(theta))


def centered_ranks(returns):
    """Ranks (N,) spread over [-1/2, 1/2]; equal returns share their mean rank.

    arXiv 1703.03864, section 2.1, says "rank transformation"; that ranks are centred is in its authors' code.
    """
    in_order = np.sort(returns)
    smaller = np.searchsorted(in_order, returns, side="left")  # how many are smaller
    not_larger = np.searchsorted(in_order, returns, side="right")
    ranks = (smaller + not_larger - 1) / 2
    return ranks / (len(returns) - 1) - 0.5


def shape_fitness(returns, fitness="centered-rank", elite=1.0):
    """Fitnesses (N,) of returns (N,): centred ranks, standardised, or raw.

    With an elite, all fitnesses up to that of the best candidate outside it become 0, and the others count from there.

    (Natural evolution strategies, arXiv 1106.4487, section 3.1, have other utilities: for the k-th best
    max(0, log(N/2 + 1) - log k), scaled to sum 1, less 1/N. Such a constant matters nothing here: it cancels between
    eps and -eps.)
    """
    fitnesses = returns
    if fitness == "centered-rank":
        fitnesses = centered_ranks(returns)
    if fitness == "standardized":
        fitnesses = (returns - returns.mean()) / returns.std()
    num_elite = math.ceil(round(elite * len(returns), 6))  # rounded, for 0.07 * 100 is 7.000000000000001
    if num_elite == len(returns):
        return fitnesses
    best_outside = np.sort(fitnesses)[-num_elite - 1]
    return np.maximum(fitnesses - best_outside, 0)


def es_gradient(fitnesses, noise, sigma):
    """1/(N sigma) sum_i F_i eps_i: fitnesses (N,) of pairs (eps, -eps) in turn, noise (N / 2, D) with the eps -> (D,).

    An estimate of the gradient of the expected fitness (arXiv 1703.03864, section 2), as one matrix product.
    """
    plus, minus = fitnesses.reshape(-1, 2).T
    return (plus - minus) @ noise / (len(fitnesses) * sigma)


def ars_gradient(returns, noise, top_directions=None):
    """1/(b sigma_R) sum_k (r_k+ - r_k-) delta_k over the b directions whose better return is best  -> (D,).

    sigma_R is the standard deviation of the 2b returns used (arXiv 1803.07055, algorithm 2). Returns (N,) as they are,
    no fitnesses; noise (N / 2, D) as in es_gradient.
    """
    pairs = returns.reshape(-1, 2)
    top = np.argsort(-pairs.max(1), kind="stable")[:top_directions]
    plus, minus = pairs[top].T
    sigma_r = max(pairs[top].std(), 1e-8)
    return (plus - minus) @ noise[top] / (len(top) * sigma_r)


def move_theta(policy, optimizer, returns, noise, args):
    """Move theta once, by the returns (N,) of a generation. Returns figures to log.

    Where all returns are equal (within 1e-6) nothing can be learnt, and nothing changes, Adam's moments included.
    """
    before = policy.theta.clone()
    gradient = torch.zeros_like(before)
    if returns.std() > 1e-6:
        if args.ars:
            estimate = ars_gradient(returns, noise, args.top_directions)
        else:
            fitnesses = shape_fitness(returns, args.fitness, args.elite)
            estimate = es_gradient(fitnesses, noise, args.sigma)
        gradient = torch.from_numpy(estimate).float()
        ascent = gradient - args.weight_decay * policy.theta
        if args.optimizer == "adam":
            policy.theta.grad = -ascent  # Adam descends
            optimizer.step()
        else:
            policy.theta += args.learning_rate * ascent
    return {
        "gradient_norm": gradient.norm(),
        "update_norm": (policy.theta - before).norm(),
        "weight_norm": policy.theta.norm(),
    }


# -------------------------------------------------------------------------------------------------------- playing


def play_candidates(policy, candidates, slots, seeds, rng, args, run):
    """Play an episode with each of n candidates (n, D), side by side; `run` counts the steps.

    Returns (returns (n,), sums for ObservationStats (n, 3, inputs)). `slots` are the environments of this process, one
    for each candidate; `slots.candidates` and `slots.pairs` say which of the population and of its pairs these are.
    Steps after a candidate's episode has ended do not count. `seeds`, one for each pair of the population, fix the
    states that episodes begin from; `rng` draws the action noise.
    """
    layers = policy.layers(candidates)
    obs = slots.begin_episode(seeds)  # where possible, the two of a pair begin alike
    run.check_finite(observation=obs)
    returns = np.zeros(len(candidates))
    seen = np.zeros((len(candidates), 3, policy.sizes[0]))
    playing = np.ones(len(candidates), bool)
    for _ in range(episode_limit(args, slots.envs.spec)):
        if policy.obs_stats is not None:
            seen[playing] += sums_of(obs[playing])
        outputs = forward(layers, policy.features(obs))
        if args.action_noise > 0:
            action_noise = draw_action_noise(policy, rng, args)  # for all N: every process draws the same
            outputs = outputs + action_noise[slots.candidates]
        obs, rewards, terminated, truncated, _ = slots.envs.step(policy.to_env(outputs))
        run.step += int(playing.sum())
        run.check_finite(observation=obs, reward=rewards)
        returns += rewards * playing
        playing &= ~(terminated | truncated)
        if not playing.any():
            break
    return returns, seen


def draw_action_noise(policy, rng, args):
    """Noise (N, O) for the outputs of all candidates, whoever plays them: so it is the same in every process.

    Gumbel noise on logits makes their argmax a draw from softmax(logits / temperature); for Box actions it is normal.
    """
    shape = (args.population_size, policy.sizes[-1])
    noise = rng.gumbel(size=shape) if policy.discrete else rng.standard_normal(shape)
    return args.action_noise * noise


def play_generation(policy, noise, episode_seeds, slots, args, run):
    """Play all candidates: (mean return of each (N,), sums for ObservationStats (3, inputs)); `run` counts the steps.

    Each process plays the candidates of its slots, and hears from the others what became of theirs.
    """
    first_step = run.step
    candidates = make_candidates(policy.theta.numpy(), noise[slots.pairs], args.sigma)
    returns = np.zeros(len(candidates))
    seen = 0.0  # kept apart for each candidate: the sum is then the same for any number of processes
    for episode, seeds in enumerate(episode_seeds):
        rng = np.random.default_rng([args.seed, run.generation(), episode])
        episode_returns, episode_seen = play_candidates(policy, candidates, slots, seeds, rng, args, run)
        returns = returns + episode_returns / len(episode_seeds)
        seen = seen + episode_seen
    # run.step has counted this process only. One part from each process, in the order of candidates:
    parts = exchange({"returns": returns, "seen": seen, "steps": run.step - first_step})
    run.step = first_step + sum(part["steps"] for part in parts)  # those of all processes
    all_returns = np.concatenate([part["returns"] for part in parts])
    all_seen = np.concatenate([part["seen"] for part in parts])
    return all_returns, all_seen.sum(0)


# ------------------------------------------------------------------------------------------------------- training


def train(args):
    """Train with `args`; return the final figures, which summary.json holds as well. UserError on bad input.

    Under torchrun all processes do the same, from the same seeds, but for the candidates that they play; only the first
    evaluates, writes and returns figures.
    """
    join_processes()
    check_args(args)
    check_population(args)
    envs = make_envs(args, 2 * len(pairs_of_this_process(args)))
    policy = make_agent(args, envs)
    optimizer = Adam([policy.theta], lr=args.learning_rate, eps=1e-5)  # below; same results as torch.optim.Adam
    run = make_run(args, policy, envs, optimizer=optimizer)  # with --resume, it loads a checkpoint into these

    while not run.is_finished():
        if run.restarts:  # at the start, and after each checkpoint, which holds no episodes: all begin anew
            envs, _, _ = run.new_envs()  # the first time: those made above
            slots = Slots(envs, args)
        noise_seeds, episode_seeds = draw_seeds(args, run.generation())  # generations played so far

        noise = draw_noise(noise_seeds, len(policy.theta))
        returns, seen = play_generation(policy, noise, episode_seeds, slots, args, run)
        figures = move_theta(policy, optimizer, returns, noise, args)
        if policy.obs_stats is not None:  # only now: all candidates of a generation see by the same numbers
            policy.obs_stats.add(seen)

        run.episodes += [(run.step, value) for value in returns.tolist()]  # N more: one generation more
        run.log(generation=run.generation(), population_mean=returns.mean())
        run.log(return_std=returns.std(), return_max=returns.max(), **figures)
        run.write_what_is_due()  # a row of metrics.csv, an evaluation, a checkpoint
    return run.finish()


# ===== helpers: settings, statistics, Adam, environments, processes ===================================================

RANGES = {"population_size": (2, 1e5), "episodes_per_candidate": (1, 1e6), "num_generations": (1, 1e15)}
RANGES |= {"sigma": (1e-6, 1e15), "elite": (0.01, 1), "top_directions": (1, 1e5), "hidden_sizes": (1, 1e5)}
# The columns of metrics.csv that are this script's own, and those of them that the learning curve shows as well.
FIGURES = "generation population_mean return_std return_max gradient_norm update_norm weight_norm".split()
CURVE = ["gradient_norm", "update_norm"]

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


def method_settings(args):
    """The settings of TUNED for args.env_id; with --ars those of ARS, unless the environment was tuned with it."""
    settings = TUNED.get(args.env_id, {})
    return ARS if args.ars and "ars" not in settings else settings


tuned_settings = method_settings  # as the run section calls it


def check_population(args):
    """UserError if the population does not divide into pairs and processes, or if options are at odds."""
    if args.env_id.startswith("ALE/"):  # before a hundred of them are made
        raise UserError("es.py needs vectors (ppo.py takes images)")
    N = args.population_size
    _, processes = process()
    if N % 2 or N < 2 * processes:
        raise UserError(f"population_size {N} does not divide into pairs, at least one for each process ({processes})")
    if args.ars and (args.fitness != "centered-rank" or args.elite != 1):
        raise UserError("ars weighs returns in its own way: leave out fitness and elite")
    if args.top_directions is not None and (not args.ars or args.top_directions > N // 2):
        raise UserError(f"top_directions needs ars, and must be at most half of population_size {N}")


def sums_of(obs):
    """The sums that ObservationStats keeps, (n, 3, inputs), for each of the observations (n, …) by itself."""
    x = obs.reshape(len(obs), -1).astype(np.float64)
    return np.stack([np.ones_like(x), x, x**2], axis=1)


class ObservationStats(nn.Module):
    """Mean and deviation of all observations seen so far. It keeps sums: what processes have seen just adds up."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("sums", torch.zeros(3, size, dtype=torch.float64))  # of 1, x and x²

    def add(self, sums):
        """Add the sums (3, size) of further observations."""
        self.sums += torch.from_numpy(sums)

    def normalize(self, x):
        """Normalise (B, size), clip to ±10; as long as nothing has been seen, only clip."""
        count, total, squares = self.sums.numpy()
        if count[0] > 0:
            mean = total / count
            variance = squares / count - mean**2
            x = (x - mean) / np.sqrt(np.maximum(variance, 1e-8))
        return np.clip(x, -10, 10).astype(np.float32)


class Adam:
    """Adam (arXiv 1412.6980, algorithm 1), with the interface and the numbers of torch.optim.Adam.

    Importing torch.optim takes a second, and its step on many small tensors three times as long as this one on one
    vector, of which all parameters are made views.
    """

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.parameters = list(parameters)
        self.param_groups = [{"lr": lr, "betas": betas, "eps": eps}]
        self.flat = torch.cat([p.detach().flatten() for p in self.parameters])
        self.m = torch.zeros_like(self.flat)
        self.v = torch.zeros_like(self.flat)
        self.t = 0
        for p, part in zip(self.parameters, self.flat.split([p.numel() for p in self.parameters])):
            p.data = part.view_as(p)

    def zero_grad(self):
        """Forget all gradients."""
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self):
        """Move the parameters against their gradients."""
        lr = self.param_groups[0]["lr"]
        beta1, beta2 = self.param_groups[0]["betas"]
        eps = self.param_groups[0]["eps"]
        gradient = torch.cat([p.grad.flatten() for p in self.parameters])
        self.t += 1
        self.m.lerp_(gradient, 1 - beta1)
        self.v.lerp_(gradient**2, 1 - beta2)
        denominator = self.v.sqrt() / math.sqrt(1 - beta2**self.t) + eps
        self.flat.addcdiv_(self.m, denominator, value=-lr / (1 - beta1**self.t))

    def state_dict(self):
        """Moments and number of steps, for a checkpoint."""
        return {"m": self.m, "v": self.v, "t": self.t}

    def load_state_dict(self, state):
        """Copy what state_dict returned."""
        self.m.copy_(state["m"])
        self.v.copy_(state["v"])
        self.t = state["t"]


class ReturnLimit(gym.Wrapper):
    """Truncate an episode once its return reaches `limit`."""

    def __init__(self, env, limit):
        super().__init__(env)
        self.limit = limit

    def reset(self, **kwargs):
        """Begin an episode, whose return is 0 so far."""
        self.total = 0.0
        return self.env.reset(**kwargs)

    def step(self, action):
        """As the environment's, truncated at the limit."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.total += float(reward)
        return obs, reward, terminated, truncated or self.total >= self.limit, info


class MiniGridView(gym.ObservationWrapper):
    """The image alone of a MiniGrid observation, one-hot and flat: object, colour and state of each cell."""

    SIZES = (11, 6, 4)  # MiniGrid's numbers of objects, colours and states

    def __init__(self, env):
        super().__init__(env)
        height, width, channels = env.observation_space["image"].shape
        if channels != len(self.SIZES):
            raise UserError(f"the images of {env} are not MiniGrid's own: leave out the wrapper that changes them")
        self.observation_space = spaces.Box(0, 1, (height * width * sum(self.SIZES),), np.float32)

    def observation(self, observation):
        """A vector of zeros and ones for the Dict of MiniGrid."""
        image = observation["image"]
        if (image >= self.SIZES).any():
            raise UserError("an image holds no objects, colours and states: leave out the wrapper that changes it")
        one_hot = [np.eye(size, dtype=np.float32)[image[..., i]] for i, size in enumerate(self.SIZES)]
        return np.concatenate(one_hot, axis=-1).ravel()


PLUGINS = {"ALE/": "ale_py", "MiniGrid": "minigrid", "BabyAI": "minigrid"}  # packages whose import registers these


def import_plugin(env_id):
    """Import the package that registers env_id, if it is one of PLUGINS. UserError if it is not installed."""
    for prefix, package in PLUGINS.items():
        if env_id.startswith(prefix):
            with blame(f"{env_id} needs another package: pip install {package.replace('_', '-')}", ImportError):
                importlib.import_module(package)


def find_wrapper(path):
    """The wrapper that a dotted path names; a name without a dot is that of a class in this script."""
    if path in globals():
        return globals()[path]
    with blame(f"there is no wrapper {path}", ImportError, AttributeError, ValueError):
        return pkgutil.resolve_name(path)


def episode_limit(args, spec=None):
    """Steps of the longest episode: the user's limit, else the environment's own, else Atari's half hour or 1,000."""
    default = 27_000 if args.env_id.startswith("ALE/") else 1_000
    return args.max_episode_steps or getattr(spec, "max_episode_steps", None) or default


def make_vector_envs(args, num_envs, render_mode=None):
    """A vector environment with next-step autoreset.

    The environment's own vector implementation is used where there is one and nothing has to be wrapped or shown.
    UserError, saying what to do, if it cannot be made.
    """
    atari = args.env_id.startswith("ALE/")  # a vector version only, which counts frames and would clip true rewards
    if atari and (args.wrappers or args.max_episode_return is not None or render_mode):
        raise UserError("Atari's vector environment takes no wrappers, return limit or window (but --capture-video)")
    import_plugin(args.env_id)
    with blame(f"--env-kwargs {args.env_kwargs}: a JSON object is wanted", ValueError, TypeError, RecursionError):
        kwargs = dict(**json.loads(args.env_kwargs))
        frames = int(kwargs.get("frameskip", 4)) * episode_limit(args) if atari else None
    if "max_episode_steps" in kwargs:
        raise UserError("the steps of an episode are limited by --max-episode-steps, not by --env-kwargs")
    if atari:
        kwargs = {"reward_clipping": False, "max_num_frames_per_episode": frames} | kwargs
    elif args.max_episode_steps is not None:
        kwargs["max_episode_steps"] = args.max_episode_steps
    if render_mode:
        kwargs["render_mode"] = render_mode
    wrappers = [find_wrapper(path) for path in args.wrappers]
    if args.env_id.startswith(("MiniGrid", "BabyAI")):
        wrappers.append(lambda env: MiniGridView(env) if isinstance(env.observation_space, spaces.Dict) else env)
    if args.max_episode_return is not None:
        wrappers.append(partial(ReturnLimit, limit=args.max_episode_return))
    what = f"cannot make {args.env_id}"
    expected = [gym.error.Error, ImportError]
    if args.wrappers or args.env_kwargs != "{}":  # whatever goes wrong now may be due to them
        what += f" with env_kwargs {args.env_kwargs} and wrappers {' '.join(args.wrappers) or 'none'}"
        expected = [Exception]
    if render_mode:
        what += f" with render_mode {render_mode}"
        expected += [TypeError]
    with blame(what, *expected):
        mode = "sync" if wrappers or render_mode else None
        envs = gym.make_vec(args.env_id, num_envs, vectorization_mode=mode, wrappers=wrappers, **kwargs)
    if envs.metadata.get("autoreset_mode") != gym.vector.AutoresetMode.NEXT_STEP:
        raise UserError(f"{args.env_id}: its vector version does not reset in the step after an episode's end")
    if not getattr(envs.unwrapped, "copy", False):  # its next step may overwrite the observations that it has returned
        envs = gym.wrappers.vector.TransformObservation(envs, copy.deepcopy)
    return envs


def make_envs(args, num_envs, render_mode=None):
    """As make_vector_envs, but with Boxes for observations: others, and single numbers, are flattened."""
    envs = make_vector_envs(args, num_envs, render_mode)
    space = envs.single_observation_space
    is_array = isinstance(space, spaces.Box) and space.shape != ()
    if not is_array and space.is_np_flattenable:  # a Sequence or Graph is not
        check_memory(f"the observations of {args.env_id}", 100 * num_envs * spaces.flatdim(space))
        envs = gym.wrappers.vector.FlattenObservation(envs)  # Discrete observations become one-hot
    return envs


WRAPPER_MODULES = ("gymnasium.wrappers.", "minigrid.wrappers.", "pettingzoo.utils.wrappers.")


def untrusted(args, given):
    """The flag without which a file may not ask for `args`, or ""; `given` are those of the command line.

    Trusted are registered ids, wrappers that this script or a library's wrapper module defines, and arguments without
    paths: all else may execute what a stranger has written.
    """
    if args.env_id != given.env_id:
        import_plugin(args.env_id)
        if args.env_id not in gym.registry:
            return f"--env-id {args.env_id}"
    if args.wrappers != given.wrappers:
        for path in args.wrappers:
            if path not in globals() and not path.startswith(WRAPPER_MODULES):
                return f"--wrappers {' '.join(args.wrappers)}"
            wrapper = find_wrapper(path)
            defined_in = f"{getattr(wrapper, '__module__', '')}."
            is_wrapper = isinstance(wrapper, type) and issubclass(wrapper, gym.Wrapper)
            if not is_wrapper or not defined_in.startswith((f"{__name__}.", *WRAPPER_MODULES)):
                return f"--wrappers {' '.join(args.wrappers)}"
    words = re.findall(r'"([^"]*)"', args.env_kwargs)
    plain = "\\" not in args.env_kwargs and all(re.fullmatch(r"[\w -]*", word) for word in words)
    if args.env_kwargs != given.env_kwargs and not plain:
        return f"--env-kwargs '{args.env_kwargs}'"
    return ""


def check_film(args):
    """UserError if no video of this environment can be made: better now than at the first evaluation."""
    with blame("--capture-video needs another package: pip install moviepy", ImportError):
        importlib.import_module("moviepy")
    if not args.env_id.startswith("ALE/"):
        with blame(f"--capture-video: {args.env_id} cannot be rendered", AssertionError, NotImplementedError):
            envs = make_envs(args, 1, "rgb_array")
            envs.reset(seed=args.seed)
            pictures = envs.render()
        envs.close()
        if not pictures or np.ndim(pictures[0]) != 3:
            raise UserError(f"--capture-video: render() of {args.env_id} gives no picture")


def write_video(path, frames, fps):
    """Write an mp4 of frames, each (height, width, 3)."""
    from moviepy import ImageSequenceClip  # slow to import

    path = Path(path)
    check_no_link(path.parent)
    with blame(f"cannot write {path}", OSError):
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)  # it may be a link to somewhere else
        ImageSequenceClip(frames, fps=fps).write_videofile(str(path), logger=None)


STATE = ".pt"  # how the names of checkpoints and models end


def write_state(state, file):
    """Write a dict of tensors, numbers and text to an open file."""
    torch.save(state, file)


def read_state(path):
    """What write_state wrote, on the CPU. Nothing in the file is executed."""
    return torch.load(path, map_location="cpu", weights_only=True)


def check_memory(what, size):
    """UserError if this machine has no `size` bytes of memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise UserError(f"{what} would need {size / 1e9:,.0f} GB of memory; there are {memory / 1e9:.0f}")


def make_policy(args, envs):
    """An untrained Policy for these environments. UserError if the script cannot handle a space."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(action_space, spaces.Discrete | spaces.Box) or math.prod(action_space.shape) == 0:
        raise UserError(f"{args.env_id} has {action_space}; es.py needs Discrete or Box actions (ppo.py takes others)")
    size = math.prod(obs_space.shape) if isinstance(obs_space, spaces.Box) else 0
    if size == 0 or (obs_space.dtype == np.uint8 and size > 1_000):
        raise UserError(f"{args.env_id} has observations {obs_space}; es.py needs vectors (ppo.py takes images)")
    outputs = int(action_space.n) if isinstance(action_space, spaces.Discrete) else math.prod(action_space.shape)
    sizes = [size, *args.hidden_sizes, outputs]
    weights = sum((inputs + 1) * outputs for inputs, outputs in zip(sizes, sizes[1:]))
    check_memory("the population", 16 * weights * args.population_size)  # candidates, noise and copies of them
    if args.evaluate and process()[1] > 1:
        raise UserError("--evaluate takes one process: python es.py, without torchrun")
    torch.manual_seed(args.seed)
    agent = Policy(obs_space, action_space, args)
    agent.args = args  # for evaluate(agent, agent.args) in a notebook
    return agent


make_agent = make_policy  # as the run section calls it


class OneEpisode(gym.Wrapper):
    """After the end of its episode an environment stands still, until it is reset with a seed.

    A finished candidate waits for the slowest; without this, its slot would go on playing episodes that nobody counts.
    """

    def reset(self, *, seed=None, options=None):
        """Begin an episode if there is a seed."""
        if seed is not None:
            self.over = False
            self.obs, _ = self.env.reset(seed=seed, options=options)
        return self.obs, {}

    def step(self, action):
        """As the environment's, until the episode is over."""
        if self.over:
            return self.obs, 0.0, False, False, {}
        self.obs, reward, terminated, truncated, info = self.env.step(action)
        self.over = terminated or truncated
        return self.obs, reward, terminated, truncated, info


class Slots:
    """The environments in which this process plays its candidates, one for each."""

    def __init__(self, envs, args):
        self.pairs = pairs_of_this_process(args)
        self.candidates = np.arange(2 * self.pairs[0], 2 * self.pairs[-1] + 2)
        self.envs = envs
        self.native = not isinstance(envs.unwrapped, gym.vector.SyncVectorEnv)
        if not self.native:
            envs.unwrapped.envs = [OneEpisode(env) for env in envs.unwrapped.envs]
        elif len(self.candidates) < args.population_size:
            self.envs = ShareOfSlots(envs, make_envs(args, args.population_size), self.candidates)

    def begin_episode(self, seeds):
        """Begin an episode in every slot; the first observations. Each of the `seeds` (N / 2,) is for a pair.

        The two of a pair start alike; but a native vector environment takes one seed only, for all of its slots.
        """
        seed = int(seeds[0]) if self.native else seeds[self.pairs].repeat(2).tolist()
        obs, _ = self.envs.reset(seed=seed)
        return obs


# What follows is all that several processes need. torchrun starts them, every one with the same flags.


def process():
    """(number of this process, how many there are): (0, 1) unless torchrun has started several."""
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def pairs_of_this_process(args):
    """Which of the N / 2 pairs of candidates this process plays: they are spread evenly."""
    rank, processes = process()
    return np.array_split(np.arange(args.population_size // 2), processes)[rank]


class ShareOfSlots(gym.vector.VectorWrapper):
    """The slots of this process in a native vector environment, `envs`, with one for each of its candidates.

    Such an environment draws the first states of all its slots from one seed. So that they do not depend on the number
    of processes, `all_envs`, with a slot for each candidate of all processes, draws them; `envs` takes over its own.
    """

    def __init__(self, envs, all_envs, candidates):
        super().__init__(envs)
        self.all_envs = all_envs
        self.candidates = candidates
        if type(envs.unwrapped).__name__ != "CartPoleVectorEnv":  # of which it is known that `state` is all it draws
            raise UserError(f"{envs.spec.id}: its vector version cannot be spread over processes; use one")

    def reset(self, *, seed=None, options=None):
        """Begin an episode in every slot."""
        all_obs, infos = self.all_envs.reset(seed=seed, options=options)
        self.env.reset()
        self.env.unwrapped.state = self.all_envs.unwrapped.state[:, self.candidates]
        return all_obs[self.candidates], infos


def join_processes():
    """Connect the processes, if torchrun has started them. From now on only the first one speaks.

    What the others have to say on stderr is kept until their end, and then told to the first: see `leave_processes`.
    """
    if not distributed.is_torchelastic_launched() or distributed.is_initialized():
        return
    distributed.init_process_group("gloo")
    if distributed.get_rank() > 0:
        sys.stdout = open(os.devnull, "w")
        sys.stderr = StringIO()
    atexit.register(leave_processes)


def tell_all(has_ended, value):
    """[(has_ended, value)] of every process, in every process: all that they tell each other goes through here."""
    said = [None] * distributed.get_world_size()
    distributed.all_gather_object(said, (has_ended, value))
    return said


def exchange(value):
    """[value] of every process, in every process. UserError, with its last words, if one of them has ended."""
    if not distributed.is_initialized():
        return [value]
    said = tell_all(False, value)
    for has_ended, words in said:
        if has_ended:
            raise UserError(words or "another process has ended")
    return [value for _, value in said]


def leave_processes():
    """At the end of a process, good or bad: stay until all have come to theirs, and say so to those that go on."""
    words = sys.stderr.getvalue().strip() if isinstance(sys.stderr, StringIO) else ""
    words = words.removeprefix(f"{sys.argv[0]}: ")
    with suppress(RuntimeError):  # a process that was killed says nothing
        while not all(has_ended for has_ended, _ in tell_all(True, words)):
            pass
    distributed.destroy_process_group()


def make_run(args, policy, envs, **parts):
    """The Run of this process. Only the first evaluates and writes; the others hear from it how the run stands."""
    first = process()[0] == 0

    class SharedRun(Run):
        """A Run that all processes share, and that --num-generations ends as well."""

        def generation(self):
            """How many generations have been played."""
            return len(self.episodes) // self.args.population_size

        def is_finished(self):
            """As of every Run; or if all generations are played."""
            last = self.args.num_generations
            return super().is_finished() or (last is not None and self.generation() >= last)

        def open_folder(self):
            """The first process opens the folder; if it goes on from a checkpoint, the others do the same."""
            if first:
                super().open_folder()
            learnt = [self.agent, *self.parts.values()]
            counters = self.step, self.episodes, self.evaluations
            counters, states = exchange((counters, [part.state_dict() for part in learnt]))[0]
            self.step, self.episodes, self.evaluations = counters
            for part, state in zip(learnt, states):
                part.load_state_dict(state)

        def write_what_is_due(self):
            """The first process evaluates and writes; the others hear of the result, which may end the run."""
            if first:
                super().write_what_is_due()
            self.restarts, self.evaluations = exchange((self.restarts, self.evaluations))[0]

        def finish(self):
            """The summary, in the first process."""
            return super().finish() if first else {}

    if "num_generations" not in MAY_CHANGE:
        MAY_CHANGE.append("num_generations")  # when a run is resumed
    run = SharedRun(replace(args, progress=args.progress and first), policy, envs, explores=True, **parts)
    if args.checkpoint_every == 0:  # nothing is dropped at a checkpoint, so they need not be many episodes apart
        run.checkpoint_every = math.ceil(args.total_timesteps / 10)
    args.folder = run.dir  # for main, should it be interrupted
    return run


if __name__ == "__main__":
    join_processes()  # before any flag is read: only the first process may complain of one


# ===== run: the same in every script ==================================================================================
# Flags, evaluation, run folder, checkpoint, curve. What it knows of the script: Args, RANGES, FIGURES, CURVE and train;
# make_envs, episode_limit, make_agent, tuned_settings, untrusted; check_film, write_video; STATE, write_state and
# read_state.


class UserError(Exception):
    """Something the user can fix: shown as one line, with exit code 2."""


@contextmanager
def blame(what, *expected):
    """Turn an exception of the expected classes into a UserError that begins with `what`."""
    try:
        yield
    except expected as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{what[:500]} ({reason[:300]})") from None


COMMON_RANGES = {"num_envs": (1, 1e5), "eval_episodes": (1, 1e4), "seed": (0, 2**32 - 1)}
COMMON_RANGES |= {"total_timesteps": (1, 1e15), "max_episode_steps": (1, 1e9)}
COMMON_RANGES |= {"stop_at_return": (-1e15, 1e15), "max_episode_return": (-1e15, 1e15)}
NOT_FROM_A_FILE = "resume evaluate model render config run_dir".split()  # what to do, not how to train
EVALUATION = 10_000  # added to the seed: evaluations start from other states than training does
MAY_CHANGE = "total_timesteps stop_at_return eval_every eval_episodes capture_video device progress compile".split()


def tuned(*flags, **given):
    """Args from flags or keywords: tuned("--env-id", "Pendulum-v1") or tuned(env_id="Pendulum-v1").

    What is not given comes from the run that is resumed or evaluated, else from `config`, else from TUNED.
    """
    flags = [*flags, *as_flags(given)]
    first = tyro.cli(Args, args=[flag for flag in flags if flag not in ("-h", "--help")])
    if "" in (first.resume, first.evaluate, first.config, first.run_dir):
        raise UserError("the name of a run folder or config is empty")
    run_dir = first.resume or first.evaluate
    if run_dir and (first.config or first.run_dir or (first.resume and first.evaluate)):
        raise UserError("--resume and --evaluate name a run: only one of them, without --run-dir and --config")
    path = f"{run_dir}/config.json" if run_dir else first.config
    defaults = read_config(path, first) if path else tyro.cli(Args, args=as_flags(tuned_settings(first)))
    return tyro.cli(Args, args=flags, default=defaults, description=sys.modules[__name__].__doc__)


def as_flags(settings):
    """A dict of settings as the command-line flags that say the same."""
    flags = []
    for name, value in settings.items():
        if isinstance(value, (list, tuple)):
            flags += [f"--{name}", *map(str, value)]
        elif isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags.append(f"--{name}={value}")
    return flags


def read_config(path, given):
    """Args from the config.json of a run. UserError if it is not one, or asks for code that is not `given` as well."""
    with blame(f"{path} is not the config.json of a run", OSError, ValueError, LookupError, TypeError, RecursionError):
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        stored = dict(config["args"])
        another = f"{path} is of another script ({config.get('script')!r:.50}) or version, or damaged"
    words = [word for value in stored.values() if isinstance(value, list) for word in value]
    # No word of a file may become a flag of its own.
    flags = [word for word in words if isinstance(word, str) and word.startswith("-")]
    lacking = set(vars(Args())) - set(stored) if given.resume or given.evaluate else []  # a run's own lacks nothing
    if foreign := [name for name in stored if name not in vars(Args())] + flags + sorted(lacking):
        raise UserError(f"{another}: {foreign[0]!r:.100}")
    dropped = NOT_FROM_A_FILE + (["device", "capture_video"] if given.evaluate else [])  # those were for training
    complaint = StringIO()
    try:
        with redirect_stderr(complaint):  # tyro checks names and types
            args = tyro.cli(Args, args=as_flags({k: v for k, v in stored.items() if k not in dropped}))
    except SystemExit:
        reason = re.sub(r"[─│╭╮╰╯\s]+", " ", complaint.getvalue())
        raise UserError(f"{another}: {reason[:300]}") from None
    if flag := untrusted(args, given):
        raise UserError(f"{path} asks for what may execute anything; if you trust it, add {flag[:300]}")
    return args


def check_args(args):
    """UserError that names the first argument that is out of its range."""
    for name, value in vars(args).items():
        low, high = (COMMON_RANGES | RANGES).get(name, (0, 1e15))
        for number in value if isinstance(value, tuple) else [value]:
            if isinstance(number, (int, float)) and not low <= number <= high:
                raise UserError(f"{name} must lie between {low:g} and {high:g}")


def evaluate(agent, args, episodes=100, seed=0, render=False, video=None):
    """(mean, standard deviation) of the undiscounted return of deterministic episodes.

    Every episode has a slot of its own: counting the first to finish would favour the short ones. `render` opens a
    window; `video` is the path of an mp4 of the first slot (of Atari, which cannot render here, what the agent sees).
    """
    atari = args.env_id.startswith("ALE/")
    envs = make_envs(args, episodes, "human" if render else "rgb_array" if video and not atari else None)
    obs, _ = envs.reset(seed=seed)
    if hasattr(agent, "begin_episodes"):  # a recurrent network forgets what it has seen
        agent.begin_episodes(episodes)
    returns = np.zeros(episodes)
    playing = np.ones(episodes, bool)
    frames = []
    for _ in range(episode_limit(args, envs.spec)):
        if video:
            frames.append(np.stack([obs[0, -1]] * 3, -1) if atari else envs.render()[0])
        obs, rewards, terminated, truncated, _ = envs.step(agent.act(obs))
        returns += rewards * playing
        playing &= ~(terminated | truncated)
        if not playing.any():
            break
    envs.close()
    if video:
        write_video(video, frames, envs.metadata.get("render_fps", 30))
    return float(returns.mean()), float(returns.std())


def write_file(path, write):
    """Call write(file), then rename the file to `path`: a reader finds the old file or the new one, never a half."""
    temporary = path.with_name(f"{path.name}.tmp")
    with blame(f"cannot write {path}", OSError, RuntimeError):
        temporary.unlink(missing_ok=True)  # it may be a link to somewhere else: the new file is made here
        with temporary.open("xb") as file:
            write(file)
        os.replace(temporary, path)


def check_no_link(folder):
    """UserError if a part of a run folder is a link: what a run writes stays in its folder."""
    if folder.is_symlink():
        raise UserError(f"{folder} is a link; a run writes nothing outside its own folder")


def read_weights(path, args, agent):
    """Read a model or checkpoint without executing anything in it; load its weights. Returns the whole state."""
    try:
        state = read_state(path)
        if state["env_id"] == args.env_id:
            agent.load_state_dict(state["agent"])
            return state
        reason = f"it is of {state['env_id']}"
    except Exception as error:  # a damaged file can raise anything, and torch's message advises unsafe loading
        reason = type(error).__name__
    raise UserError(f"{path} is missing, damaged, or of another script, environment or network: {reason}")


def load(run_dir, model="best", **given):
    """The agent saved by a run; `model` is best, last or a step. UserError if missing or damaged.

    What a file may not ask for is given here: load(run_dir, env_id="my_module:Mine-v0").
    """
    return load_agent(tuned(evaluate=str(run_dir), model=str(model), **given))


def load_agent(args):
    """The agent that args.evaluate and args.model name."""
    check_args(args)
    envs = make_envs(args, 1)
    agent = make_agent(args, envs)
    envs.close()
    name = "checkpoint" if args.model == "last" else f"models/{args.model}"
    read_weights(Path(args.evaluate, name + STATE), args, agent)
    return agent


class Run:
    """Everything a run keeps besides what it learns: folder, steps and episodes, evaluations, checkpoints, curve.

    `parts` have state_dict and load_state_dict, and are saved with the agent. A row of metrics.csv is written every
    `log_every` steps, or at each call of write_what_is_due. `explores`: training episodes explore, so only evaluations
    decide whether to stop at a return.

    A checkpoint is a restart: it holds no environment and no generator. After writing one, training makes new
    environments and seeds everything from (seed, step), and a resumed run does the same. So a killed and resumed run
    gives the same numbers, bit for bit, as one that was left alone.
    """

    def __init__(self, args, agent, envs, log_every=0, explores=False, **parts):
        self.args = Args(**asdict(args))  # a copy: nobody else can change it
        self.agent = agent
        self.envs = envs
        self.parts = parts
        self.log_every = log_every
        self.explores = explores
        self.step = 0  # environment steps, without reset rows
        self.seconds = 0.0
        self.episodes = []  # (step, return) of each training episode
        self.evaluations = []  # (step, seconds, mean, standard deviation, episodes)
        self.figures = {}  # logged since the last row of metrics.csv
        self.restarts = True  # whether training begins anew: at first, and after each checkpoint
        self.envs_are_new = True
        tenth = math.ceil(args.total_timesteps / 10)
        longest = min(episode_limit(args, envs.spec), 2_000)
        enough = 10 * longest * envs.num_envs  # with shorter intervals, few long episodes would end
        self.eval_every = args.eval_every or tenth
        self.checkpoint_every = args.checkpoint_every or max(tenth, enough)
        if args.capture_video:
            check_film(args)
        stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}"
        name = f"{re.sub('[/:]', '-', args.env_id)}__{Path(__file__).stem}__{args.seed}__{stamp}"
        self.dir = Path(args.resume or args.run_dir or f"runs/{name}")
        args.folder = self.dir  # for main, should it be interrupted
        self.open_folder()
        print(f"{args.env_id} -> {self.dir};", *(f"{key}={getattr(args, key)}" for key in tuned_settings(args)))
        self.begun = time.time() - self.seconds
        self.drawn = time.time()
        self.last_step = self.step  # when write_what_is_due was last called
        bar = {"unit": " steps", "unit_scale": True, "disable": not args.progress}
        self.bar = tqdm(total=args.total_timesteps, initial=self.step, **bar)

    def open_folder(self):
        """Make the run folder, or restore its last checkpoint; write config.json."""
        checkpoint = self.dir / f"checkpoint{STATE}"
        with blame(f"cannot make {self.dir}", OSError):
            check_no_link(self.dir / "models")
            (self.dir / "models").mkdir(parents=True, exist_ok=True)
        if checkpoint.exists() and not self.args.resume:
            raise UserError(f"{self.dir} holds a run already: --resume it, or choose another --run-dir")
        if (self.dir / "config.json").exists():  # it is resumed, or begun once more after an early end
            stored = read_config(self.dir / "config.json", self.args)
            free = MAY_CHANGE + NOT_FROM_A_FILE + ([] if checkpoint.exists() else ["checkpoint_every"])
            changed = [key for key in vars(stored) if key not in free and vars(stored)[key] != vars(self.args)[key]]
            if changed:
                raise UserError(f"{self.dir} holds a run with another {', '.join(changed)}, which cannot change")
        metrics = ""
        if checkpoint.exists():  # else it is new, or was killed before its first checkpoint
            state = read_weights(checkpoint, self.args, self.agent)
            with blame(f"{self.dir} is damaged", OSError, LookupError, TypeError, ValueError, RuntimeError):
                step, seconds, episodes, evaluations, metrics, intervals = state["run"]
                self.step = int(step)
                self.seconds = float(seconds)
                self.episodes = [(int(at), float(total)) for at, total in episodes]
                self.evaluations = [(int(at), *map(float, figures)) for at, *figures in evaluations]
                eval_every, self.checkpoint_every = map(int, intervals)  # kept, also if there are more steps now
                self.eval_every = self.args.eval_every or eval_every
                for part_name, part in self.parts.items():
                    part.load_state_dict(state[part_name])
        if (self.dir / "config.json").exists():
            with blame(f"{self.dir} is damaged", OSError):
                self.forget_later_models()
        git = f"git -C {quote(str(Path(__file__).parent))} describe --always --dirty --exclude='*' --abbrev=40"
        config = {
            "script": Path(__file__).stem,
            "args": asdict(self.args),
            "commit": os.popen(f"{git} 2>/dev/null").read().strip(),  # ends in -dirty if files were changed since
            "versions": {name: version(name) for name in ("torch", "gymnasium", "numpy") if name in sys.modules},
            "machine": f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores",
        }
        write_file(self.dir / "config.json", lambda file: file.write(json.dumps(config, indent=1).encode()))
        write_file(self.dir / "metrics.csv", lambda file: file.write(metrics.encode()))

    def forget_later_models(self):
        """Delete the models that a killed run saved after its last checkpoint; put the best of those before back."""
        models = self.dir / "models"
        steps = [step for step, *_ in self.evaluations]
        for path in models.glob(f"*{STATE}"):
            if path.stem.isdigit() and int(path.stem) not in steps:
                path.unlink()
        (models / f"best{STATE}").unlink(missing_ok=True)
        if self.evaluations:
            _, best = max((mean, step) for step, _, mean, _, _ in self.evaluations)
            weights = (models / f"{best}{STATE}").read_bytes()
            write_file(models / f"best{STATE}", lambda file: file.write(weights))

    def new_envs(self):
        """(environments, their first observations, a NumPy generator), made anew and seeded from (seed, step).

        A reset with a seed is not enough: Box2D's environments keep traces of the episodes before.
        """
        if not self.envs_are_new:
            self.envs.close()
            self.envs = make_envs(self.args, self.envs.num_envs)
        rng = np.random.default_rng([self.args.seed, self.step])
        obs, _ = self.envs.reset(seed=int(rng.integers(2**31)))
        self.check_finite(observation=obs)
        self.totals = np.zeros(self.envs.num_envs)  # returns of the episodes under way
        self.envs_are_new = False
        self.restarts = False
        return self.envs, obs, rng

    def count(self, next_obs, rewards, ended, reset_rows):
        """Count one step of all environments. UserError if it holds a NaN or an infinity."""
        self.step += len(rewards) - int(reset_rows.sum())
        self.check_finite(observation=next_obs, reward=rewards)
        self.totals += rewards
        if ended.any():
            self.episodes += [(self.step, total) for total in self.totals[ended].tolist()]
            self.totals[ended] = 0

    def check_finite(self, **values):
        """UserError naming the environment, the step and the field if a value holds a NaN or an infinity."""
        for name, value in values.items():
            if not np.isfinite(value).all():
                raise UserError(f"{self.args.env_id}, step {self.step}: {name} is NaN or infinite")

    def log(self, **figures):
        """Collect figures (numbers, or tensors of one number); the next row of metrics.csv holds their means."""
        for name, value in figures.items():
            self.figures.setdefault(name, []).append(value)

    def write_what_is_due(self):
        """Write what fell due since the last call: a row of metrics.csv, an evaluation, a checkpoint, the curve."""
        self.seconds = time.time() - self.begun
        self.bar.update(self.step - self.last_step)
        evaluation = self.passed(self.eval_every) or self.is_finished()
        checkpoint = self.passed(self.checkpoint_every)
        row = evaluation or checkpoint or self.passed(self.log_every)
        if row:
            self.write_row()
        if evaluation:
            self.write_evaluation()
        if row and time.time() - self.drawn > 30:  # and at the end: `finish`
            self.draw_curve()
        if checkpoint or self.is_finished():
            self.write_checkpoint()
        self.last_step = self.step

    def passed(self, every):
        """Whether the steps since the last call have passed a multiple of `every`; 0 means every step."""
        return self.step // max(1, every) > self.last_step // max(1, every)

    def is_finished(self):
        """Whether all steps are taken, or the return that --stop-at-return asks for is reached."""
        goal = self.args.stop_at_return
        if self.step >= self.args.total_timesteps:
            return True
        if goal is None:
            return False
        if self.explores:
            return bool(self.evaluations) and self.evaluations[-1][2] >= goal  # its mean
        return len(self.episodes) >= 100 and self.mean_return() >= goal

    def mean_return(self):
        """Mean return of the last 100 training episodes; NaN before the first."""
        recent = [total for _, total in self.episodes[-100:]]
        return sum(recent) / len(recent) if recent else math.nan

    def write_row(self):
        """Append a row to metrics.csv: the counters, and the means of FIGURES since the last row."""
        row = {"step": self.step, "seconds": self.seconds, "sps": self.step / self.seconds}
        row |= {"return_mean": self.mean_return(), "episodes": len(self.episodes)}
        means = {name: sum(map(float, values)) / len(values) for name, values in self.figures.items()}
        self.check_finite(**means)
        self.figures = {}
        row |= {name: means.get(name, math.nan) for name in FIGURES}
        path = self.dir / "metrics.csv"
        with blame(f"cannot write {path}", OSError), path.open("a") as file:
            if file.tell() == 0:
                file.write(",".join(row) + "\n")
            file.write(",".join(f"{x:.8g}" if isinstance(x, float) else str(x) for x in row.values()) + "\n")
        self.bar.set_postfix_str(f"mean return {row['return_mean']:.1f}", refresh=False)

    def write_evaluation(self):
        """Evaluate; save the weights in models/ as STEP, and as best if none were better; film if asked."""
        seed = self.args.seed + EVALUATION
        episodes = self.args.eval_episodes
        mean, std = evaluate(self.agent, self.args, episodes, seed)
        self.check_finite(evaluation=mean)
        best = all(mean >= earlier for _, _, earlier, _, _ in self.evaluations)
        self.evaluations.append((self.step, self.seconds, mean, std, float(episodes)))
        weights = {"env_id": self.args.env_id, "agent": self.agent.state_dict()}
        for name in [self.step, "best"] if best else [self.step]:
            write_file(self.dir / f"models/{name}{STATE}", partial(write_state, weights))
        rows = ["step,seconds,return_mean,return_std,episodes"]
        rows += [f"{step}," + ",".join(f"{x:.8g}" for x in figures) for step, *figures in self.evaluations]
        write_file(self.dir / "evaluations.csv", lambda file: file.write("\n".join([*rows, ""]).encode()))
        if self.args.capture_video:
            evaluate(self.agent, self.args, 1, seed, video=self.dir / f"videos/{self.step}.mp4")

    def write_checkpoint(self):
        """Write the checkpoint; training restarts from here, whether or not the run is killed later."""
        metrics = (self.dir / "metrics.csv").read_text()
        intervals = self.eval_every, self.checkpoint_every
        counters = self.step, self.seconds, self.episodes, self.evaluations, metrics, intervals
        state = {"env_id": self.args.env_id, "agent": self.agent.state_dict(), "run": counters}
        state |= {name: part.state_dict() for name, part in self.parts.items()}
        write_file(self.dir / f"checkpoint{STATE}", partial(write_state, state))
        self.restarts = True

    def draw_curve(self):
        """Write learning_curve.png: returns of episodes, their running mean, evaluations; below, CURVE's figures."""
        from matplotlib.figure import Figure  # slow to import

        metrics = np.genfromtxt(self.dir / "metrics.csv", delimiter=",", names=True, ndmin=1)
        figure = Figure(figsize=(9, 7), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        steps, returns = np.array(self.episodes, float).reshape(-1, 2).T
        top.plot(steps, returns, ".", alpha=0.25, markersize=3, label="training episode")
        top.plot(metrics["step"], metrics["return_mean"], color="midnightblue", label="mean of the last 100")
        steps, _, means, stds, _ = np.array(self.evaluations, float).reshape(-1, 5).T
        top.errorbar(steps, means, stds, fmt="o-", color="tab:orange", capsize=3, label="evaluation, ± one deviation")
        top.set(title=f"{self.args.env_id}, seed {self.args.seed}", ylabel="return of an episode")
        for name in CURVE:
            bottom.plot(metrics["step"], metrics[name], label=name.replace("_", " "))
        large = max(np.abs(np.nan_to_num(metrics[name])).max() for name in CURVE) > 100
        bottom.set(xlabel="environment steps", ylabel="mean since the last row", yscale="symlog" if large else "linear")
        bottom.xaxis.set_major_formatter("{x:,.0f}")
        for axis in (top, bottom):
            axis.legend()
            axis.grid(alpha=0.3)
        write_file(self.dir / "learning_curve.png", lambda file: figure.savefig(file, dpi=120, format="png"))
        self.drawn = time.time()

    def finish(self):
        """Write summary.json, print the last two lines, return the summary."""
        if not self.evaluations or self.evaluations[-1][0] != self.step:  # resumed with fewer steps than it had taken
            self.write_evaluation()
        self.draw_curve()
        self.bar.close()
        self.envs.close()
        _, _, mean, std, episodes = self.evaluations[-1]
        summary = {"eval_return_mean": mean, "eval_return_std": std, "eval_episodes": int(episodes)}
        summary |= {"global_step": self.step, "seconds": self.seconds, "steps_per_second": self.step / self.seconds}
        write_file(self.dir / "summary.json", lambda file: file.write(json.dumps(summary, indent=1).encode()))
        print(f"evaluation: {mean:.1f} ± {std:.1f} over {episodes:.0f} episodes, after {self.step:,} steps")
        print(f"learning curve: {self.dir / 'learning_curve.png'}   to watch it play: --evaluate {self.dir} --render")
        return summary


def main():
    """Train, or evaluate, as the flags say. What the user can mend is one line on stderr and exit code 2."""
    sys.stdout.reconfigure(errors="replace")  # a terminal without a ± gets a ?
    args = None
    try:
        args = tuned(*sys.argv[1:])
        if not args.evaluate:
            train(args)
            return
        agent = load_agent(args)
        seed = args.seed + 2 * EVALUATION  # other episodes than those by which the best weights were chosen
        mean, std = evaluate(agent, args, args.eval_episodes, seed)
        print(f"{args.model} weights: {mean:.2f} ± {std:.2f} over {args.eval_episodes} episodes of {args.env_id}")
        if args.capture_video:
            check_film(args)
            evaluate(agent, args, 1, seed, video=Path(args.evaluate, f"videos/{args.model}.mp4"))
        if args.render:
            evaluate(agent, args, 1, seed, render=True)
    except UserError as error:
        tqdm.write(f"{sys.argv[0]}: {error}", file=sys.stderr)  # above the progress bar, if there is one
        sys.exit(2)
    except KeyboardInterrupt:
        folder = getattr(args, "folder", None)  # a run has begun
        saved = folder and Path(folder, f"checkpoint{STATE}").exists()
        how = "; to go on" if saved else " before its first checkpoint; to begin anew"
        tqdm.write(f"stopped{how}: --resume {folder}" if folder else "stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
