# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.3,<2", "ufal-pybox2d>=2.3.10.5",
#   "numpy>=1.26", "matplotlib>=3.8", "tyro>=1.0", "tqdm>=4.66", "moviepy>=2.0",
# ]
# ///
"""Evolution strategies (OpenAI-ES) and augmented random search (ARS), all of it, in this one file.

Nothing is backpropagated. A generation is a population of N candidates, and each candidate is the parameters theta
plus noise. It plays an episode, or several. Its fitness F is its mean return or, by default, the rank of this return
among all candidates. Then theta moves towards the noise of those that did well:

    theta <- theta + alpha / (N sigma) sum_i F_i eps_i,   candidate i: theta + sigma eps_i    (arXiv 1703.03864, alg. 1)

The noise comes in antithetic pairs, eps and -eps. All processes draw it from the same seeds, so none sends it (alg. 2).
All candidates play side by side, each in its own environment; one batched product per layer gives the outputs of all.

    python es.py                                            # CartPole-v1, a few seconds
    python es.py --env-id LunarLander-v3 --ars              # augmented random search instead
    torchrun --nproc-per-node 4 es.py --env-id Pendulum-v1  # four processes share the work (of no use for CartPole)

Papers: OpenAI-ES arXiv 1703.03864, ARS arXiv 1803.07055, natural evolution strategies arXiv 1106.4487.
The story ends at "# ===== helpers"; the code below it makes environments, connects processes and keeps the run folder.
"""

import importlib
import json
import math
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import time
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
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
    """Every flag and its default. For some environments, CartPole included, TUNED (below) overrides these."""

    # algorithm
    population_size: int = 128  # candidates of a generation, an even number: each noise is used with both signs
    episodes_per_candidate: int = 1  # episodes that each candidate plays; their mean return is its return
    num_generations: int | None = None  # stop after this many generations, even if total_timesteps is not reached
    sigma: float = 0.1  # standard deviation of the noise on theta
    fitness: Literal["centered-rank", "standardized", "raw"] = "centered-rank"  # how returns become fitnesses
    elite: float = 1.0  # learn only from the best candidates, this share of all; 1: from all
    optimizer: Literal["adam", "ascent"] = "adam"  # ascent: add learning rate x gradient to theta
    learning_rate: float = 0.05  # alpha, the step size of theta
    weight_decay: float = 0.0  # pulls theta towards zero: this x theta is subtracted from the gradient
    ars: bool = False  # augmented random search (V2), with its own defaults; unlike the paper's, this policy has biases
    top_directions: int | None = None  # ARS: learn only from the best directions, this many (b); None: from all
    action_noise: float = 0.0  # in training. Discrete: softmax temperature, 0: argmax; Box: deviation of output noise
    hidden_sizes: tuple[int, ...] = (64, 64)  # sizes of hidden layers; --hidden-sizes without a number: a linear policy
    normalize_obs: bool = False  # normalise observations by mean and deviation over all earlier generations
    # run
    env_id: str = "CartPole-v1"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers, applied in order
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    total_timesteps: int = 1_000_000  # environment steps to train for, those of all candidates together
    stop_at_return: float | None = None  # stop once the mean return of an evaluation reaches this
    seed: int = 1  # seed of everything that is drawn at random
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation: theta without any noise, on separate environments
    capture_video: bool = False  # film an episode at each evaluation
    checkpoint_every: int = 0  # steps between checkpoints, which are written between generations; 0: a tenth of the run
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # weights that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window; with --capture-video, film it instead
    config: str | None = None  # config.json of an earlier run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__SCRIPT__SEED__TIME
    progress: bool = True  # show the progress bar


# --------------------------------------------------------------------------------------------------------- policy
class Policy(nn.Module):
    """A deterministic policy: linear layers with tanh between them; without hidden layers, a single linear layer.

    All weights and biases lie in one vector, theta, of D numbers. Discrete actions are the argmax of the outputs. Box
    actions are the outputs: squashed into the bounds by tanh if all bounds are finite, else clipped.
    """

    def __init__(self, observation_space, action_space, args):
        super().__init__()
        self.action_space = action_space
        self.discrete = isinstance(action_space, spaces.Discrete)
        inputs = math.prod(observation_space.shape)
        outputs = int(action_space.n) if self.discrete else math.prod(action_space.shape)
        self.sizes = [inputs, *args.hidden_sizes, outputs]
        self.theta = nn.Parameter(first_theta(self.sizes), requires_grad=False)
        self.obs_stats = ObservationStats(inputs) if args.normalize_obs else None

    def layers(self, parameters):
        """Cut one theta (D,), or B of them (B, D), into layers: (weights (…, outputs, inputs), biases (…, outputs))."""
        layers = []
        first = 0
        for inputs, outputs in pairwise(self.sizes):
            weights = parameters[..., first : first + outputs * inputs]
            first += outputs * inputs
            biases = parameters[..., first : first + outputs]
            first += outputs
            layers.append((weights.unflatten(-1, (outputs, inputs)), biases))
        return layers

    def features(self, obs):
        """NumPy observations (B, …) as a tensor of vectors (B, inputs), normalised with --normalize-obs."""
        obs = torch.from_numpy(obs).float().reshape(len(obs), -1)
        return obs if self.obs_stats is None else self.obs_stats(obs)

    def to_env(self, outputs):
        """Outputs (B, O) as actions for the environment: within the action space's bounds, of its shape and type."""
        space = self.action_space
        if self.discrete:
            return (outputs.argmax(1).numpy() + space.start).astype(space.dtype)
        actions = outputs.numpy().reshape(-1, *space.shape)
        if space.is_bounded():
            low, high = space.low.astype(np.float32), space.high.astype(np.float32)
            actions = low + (high - low) * (np.tanh(actions) + 1) / 2
        actions = np.clip(actions, space.low, space.high)
        if np.issubdtype(space.dtype, np.integer):
            actions = np.rint(actions)
        return actions.astype(space.dtype)

    def act(self, obs):
        """The actions of theta itself, without noise: NumPy observations (B, …) -> actions for the environment."""
        return self.to_env(forward(self.layers(self.theta), self.features(obs)))


def forward(layers, x):
    """Outputs (B, O) for x (B, inputs). Layers of a single policy see all rows; of B policies, each sees its own row.

    Each output is a dot product. The last bits of a matrix product would depend on where the weights lie in memory,
    and so on the number of processes.
    """
    for i, (weights, biases) in enumerate(layers):
        if i > 0:
            x = x.tanh()
        x = torch.linalg.vecdot(weights, x.unsqueeze(-2)) + biases
    return x


# ---------------------------------------------------------------------------------------------- evolution strategy
def draw_seeds(args, generation):
    """Seeds of a generation, one per pair: for its noise (N / 2,), for its episodes (episodes_per_candidate, N / 2)."""
    pairs = args.population_size // 2
    seeds = np.random.SeedSequence([args.seed, generation]).generate_state((1 + args.episodes_per_candidate) * pairs)
    return seeds[:pairs], seeds[pairs:].reshape(-1, pairs)


def draw_noise(seeds, size):
    """For each seed a row of standard normal noise, a direction eps: (len(seeds), size), the same in every process."""
    return np.stack([np.random.default_rng(seed).standard_normal(size, np.float32) for seed in seeds])


def make_candidates(theta, noise, sigma):
    """Candidates (2 x directions, D): rows 2k and 2k + 1 are theta + sigma noise[k] and theta - sigma noise[k]."""
    pairs = np.stack([theta + sigma * noise, theta - sigma * noise], axis=1)
    return pairs.reshape(-1, len(theta))


def centered_ranks(returns):
    """Ranks (N,), spread evenly over [-1/2, 1/2]; equal returns share the mean of their ranks.

    arXiv 1703.03864, section 2.1, says only "rank transformation"; its authors' code centres the ranks.
    """
    in_order = np.sort(returns)
    smaller = np.searchsorted(in_order, returns, side="left")  # how many are smaller than each
    not_larger = np.searchsorted(in_order, returns, side="right")  # how many are smaller or equal
    ranks = (smaller + not_larger - 1) / 2  # counted from 0; equal returns fill the ranks smaller … not_larger - 1
    return ranks / (len(returns) - 1) - 0.5


def shape_fitness(returns, fitness="centered-rank", elite=1.0):
    """Fitnesses (N,) of returns (N,): their centred ranks, or returns that are standardised or raw.

    If elite < 1 (in neither paper), the best fitness outside the elite is subtracted from all; negative ones become 0.
    """
    fitnesses = returns
    if fitness == "centered-rank":
        fitnesses = centered_ranks(returns)
    if fitness == "standardized":
        fitnesses = (returns - returns.mean()) / returns.std()
    num_elite = math.ceil(round(elite * len(returns), 6))  # round, because 0.07 * 100 is 7.000000000000001
    if num_elite == len(returns):
        return fitnesses
    best_outside = np.sort(fitnesses)[-num_elite - 1]
    return np.maximum(fitnesses - best_outside, 0)


def es_gradient(fitnesses, noise, sigma):
    """1/(N sigma) sum_i F_i eps_i  -> (D,). It estimates the gradient of E[F]   (arXiv 1703.03864, section 2)

    Fitnesses (N,) are those of eps and -eps in turn; noise (N / 2, D) has each eps once: a pair adds (F+ - F-) eps.
    """
    plus, minus = fitnesses.reshape(-1, 2).T
    return (plus - minus) @ noise / (len(fitnesses) * sigma)


def ars_gradient(returns, noise, top_directions=None):
    """1/(b sigma_R) sum_k (r_k+ - r_k-) delta_k  -> (D,), over the b directions k with the highest max(r_k+, r_k-).

    sigma_R is the standard deviation of the 2b returns used (arXiv 1803.07055, algorithm 2). The returns (N,) are raw,
    in the order of es_gradient's fitnesses; the delta_k are the rows of noise (N / 2, D).
    """
    pairs = returns.reshape(-1, 2)
    top = np.argsort(-pairs.max(1), kind="stable")[:top_directions]
    plus, minus = pairs[top].T
    sigma_r = max(pairs[top].std(), 1e-8)
    return (plus - minus) @ noise[top] / (len(top) * sigma_r)


def move_theta(policy, optimizer, returns, noise, args):
    """Move theta by one step, computed from the returns (N,) of a generation. Returns figures to log.

    If all returns are equal (deviation up to 1e-6), they teach nothing: theta and Adam's moments stay as they are. If
    returns differ but all fitnesses are 0 (see elite), Adam's momentum still moves theta.
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
        policy.theta.grad = gradient
        optimizer.step()  # moves theta uphill, with weight decay: see make_optimizer
    return {
        "gradient_norm": gradient.norm().item(),
        "update_norm": (policy.theta - before).norm().item(),
        "weight_norm": policy.theta.norm().item(),
    }


# -------------------------------------------------------------------------------------------------------- playing
@torch.inference_mode()  # as no_grad, but faster
def play_candidates(policy, candidates, numbers, envs, seeds, args, run):
    """Play one episode with each of n candidates (n, D), side by side, each in its own environment.

    Returns (returns (n,), steps (n,), sums for ObservationStats (n, 3, inputs)). Adds the steps to run.step.
    `numbers` (n,) are the candidates' numbers in the whole population. `seeds`, one for each pair of the population,
    determine first states and action noise. Steps after the end of a candidate's episode do not count.
    """
    layers = policy.layers(candidates)
    rng = np.random.default_rng(seeds)  # one generator from all seeds: the same in every process
    obs = begin_episode(envs, seeds[numbers[::2] // 2])  # both of a pair start alike, where possible
    run.check_finite(observation=obs)
    returns = np.zeros(len(candidates))
    steps = np.zeros(len(candidates), int)
    seen = np.zeros((len(candidates), 3, policy.sizes[0]))
    playing = np.ones(len(candidates), bool)
    for _ in range(args.max_episode_steps or 27_000):  # the same limit as in `evaluate`
        if policy.obs_stats is not None:
            seen[playing] += sums_of(obs[playing])
        outputs = forward(layers, policy.features(obs))
        if args.action_noise > 0:
            action_noise = draw_action_noise(policy, rng, args)  # for all N candidates, also those of other processes
            outputs = outputs + action_noise[numbers]
        obs, rewards, terminated, truncated, _ = envs.step(policy.to_env(outputs))
        run.step += np.count_nonzero(playing)
        run.check_finite(observation=obs, reward=rewards)
        steps += playing
        returns += rewards * playing
        playing &= ~(terminated | truncated)
        if not playing.any():
            break
    return returns, steps, seen


def draw_action_noise(policy, rng, args):
    """Noise (N, O) for the outputs of all candidates, so that every process draws the same. Box: normal noise.

    Discrete: the argmax of logits + temperature x Gumbel noise is a draw from softmax(logits / temperature).
    """
    shape = (args.population_size, policy.sizes[-1])
    noise = rng.gumbel(size=shape) if policy.discrete else rng.standard_normal(shape)
    return torch.as_tensor(args.action_noise * noise, dtype=torch.float32)


def play_generation(policy, noise, episode_seeds, numbers, envs, args, run):
    """Play all candidates: (mean return of each (N,), sums for ObservationStats (3, inputs)); advances run.step.

    The arrays made here have a row for each of the N candidates. This process plays only `numbers`, and fills their
    rows; it receives the other rows from the processes that have played those candidates.
    """
    first_step = run.step
    pairs = numbers[::2] // 2  # of these candidates: 2k and 2k + 1 are pair k
    candidates = torch.from_numpy(make_candidates(policy.theta.numpy(), noise[pairs], args.sigma))
    all_returns = np.zeros(args.population_size)
    all_steps = np.zeros(args.population_size, int)
    all_seen = np.zeros((args.population_size, 3, policy.sizes[0]))
    for seeds in episode_seeds:  # each time, every candidate plays one episode
        returns, steps, seen = play_candidates(policy, candidates, numbers, envs, seeds, args, run)
        all_returns[numbers] += returns / len(episode_seeds)
        all_steps[numbers] += steps
        all_seen[numbers] += seen
    # All processes exchange their arrays. From each one, take the rows of `theirs`: the candidates that it has played.
    for theirs, returns, steps, seen in exchange((numbers, all_returns, all_steps, all_seen)):
        all_returns[theirs] = returns[theirs]
        all_steps[theirs] = steps[theirs]
        all_seen[theirs] = seen[theirs]
    run.step = first_step + int(all_steps.sum())  # play_candidates has added only this process's steps
    return all_returns, all_seen.sum(0)  # always summed in this order: the same bits for any number of processes


# ------------------------------------------------------------------------------------------------------- training
def train(args):
    """Train with `args`; return the summary, a dict that summary.json holds as well. UserError on bad input.

    Under torchrun, every process runs this loop with its share of the candidates. Only the first one writes and prints.
    """
    numbers = candidates_of_this_process(args)
    envs = make_envs(args, len(numbers))  # make_slots, below
    policy = make_agent(args, envs)  # make_policy, below
    optimizer = make_optimizer(args, policy)
    run = make_run(args, policy, envs, optimizer=optimizer)  # with --resume, it loads a checkpoint into these

    while not run.is_finished():
        if run.step == run.checkpoint_step:  # at the start and at each checkpoint, so that a resumed run does the same
            envs, _, _ = run.new_envs()
        generation = len(run.episodes) // args.population_size  # its number, from 0: each one adds N episodes
        noise_seeds, episode_seeds = draw_seeds(args, generation)

        noise = draw_noise(noise_seeds, len(policy.theta))
        returns, seen = play_generation(policy, noise, episode_seeds, numbers, envs, args, run)  # advances run.step
        figures = move_theta(policy, optimizer, returns, noise, args)
        if policy.obs_stats is not None:  # only now: all candidates of a generation must normalise alike
            policy.obs_stats.add(seen)

        run.check_finite(length_of_theta=figures["weight_norm"])
        run.episodes += [(run.step, value) for value in returns.tolist()]  # one for each candidate
        run.log(population_mean=returns.mean(), return_std=returns.std(), return_max=returns.max(), **figures)
        run.write_what_is_due()  # a row of metrics.csv, an evaluation, a checkpoint
    return run.finish()


# ===== helpers: settings, parts of the policy, environments, processes ================================================

LEAST_1 = "total_timesteps max_episode_steps eval_episodes episodes_per_candidate num_generations hidden_sizes".split()
RANGES = dict.fromkeys([*LEAST_1, "top_directions"], (1, 1e15))
RANGES |= {"population_size": (2, 1e5), "sigma": (1e-6, 1e15), "elite": (0.01, 1)}
RANGES |= dict.fromkeys(["stop_at_return", "max_episode_return"], (-1e15, 1e15))
CURVE = {"return_std": "how far candidates differ", "gradient_norm": "length of the gradient",
         "update_norm": "length of theta's step"}  # panels of the curve  # fmt: skip
EXPLORES = True  # training plays candidates, which are theta plus noise: only an evaluation says how good theta is
ONE_HOT = ("minigrid.wrappers.OneHotPartialObsWrapper", "minigrid.wrappers.ImgObsWrapper")  # of MiniGrid, by default
SAFE_IDS = r"[^:]*"  # ids that a stranger's config.json may ask for: module:Id would import the module
SUFFIX = ".pt"  # of models and checkpoints. How they are stored; with weights_only, reading executes nothing:
write_state = torch.save
read_state = partial(torch.load, map_location="cpu", weights_only=True)

# Tuned settings per environment; flags win over them. A run ends with a whole generation.
ARS = {"ars": True, "hidden_sizes": (), "optimizer": "ascent", "learning_rate": 0.02, "sigma": 0.03,
       "normalize_obs": True}  # fmt: skip
TUNED = {
    # confirmed with five seeds: benchmarks/results/es_scores.json
    "CartPole-v1": {"total_timesteps": 400_000},
    "Acrobot-v1": {"population_size": 64, "total_timesteps": 500_000},
    "LunarLander-v3": {"hidden_sizes": (64,), "normalize_obs": True, "total_timesteps": 4_000_000},
    "Pendulum-v1": {"episodes_per_candidate": 4, "sigma": 0.3, "learning_rate": 0.4, "action_noise": 1.0,
                    "normalize_obs": True, "total_timesteps": 6_000_000},
    "Swimmer-v5": ARS | {"population_size": 16, "sigma": 0.2, "learning_rate": 0.2, "total_timesteps": 800_000},
}  # fmt: skip


def method_settings(args):
    """The settings of TUNED for args.env_id. With --ars: ARS instead, unless these are for ARS (also with --no-ars)."""
    settings = TUNED.get(args.env_id, {})
    return ARS if args.ars and "ars" not in settings else settings


tuned_settings = method_settings  # as the run section calls it


def first_theta(sizes):
    """Orthogonal weights, scaled by sqrt(2), and zero biases, as one vector; the last layer's weights are 0 as well."""
    parts = []
    for inputs, outputs in pairwise(sizes):
        weights = nn.init.orthogonal_(torch.empty(outputs, inputs), 2**0.5)
        parts += [weights.flatten(), torch.zeros(outputs)]
    parts[-2].zero_()  # so theta outputs only 0, and at first the noise alone decides
    return torch.cat(parts)


def sums_of(obs):
    """The sums that ObservationStats keeps, separately for each of the observations (n, …): (n, 3, inputs)."""
    x = obs.reshape(len(obs), -1).astype(np.float64)
    return np.stack([np.ones_like(x), x, x**2], axis=1)


class ObservationStats(nn.Module):
    """Mean and deviation of all observations so far, kept as sums: those of several processes can simply be added."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("sums", torch.zeros(3, size, dtype=torch.float64))  # of 1, x and x²

    def add(self, sums):
        """Add the sums (3, size) of further observations."""
        self.sums += torch.from_numpy(sums)

    def forward(self, x):
        """Normalise (B, size), then clip to ±10; before the first generation has ended, only clip."""
        count, total, squares = self.sums
        if count[0] > 0:
            mean = total / count
            variance = squares / count - mean**2
            x = ((x - mean) / variance.clamp(min=1e-8).sqrt()).float()
        return x.clamp(-10, 10)


def make_optimizer(args, policy):
    """Adam, or plain ascent. Both climb along theta.grad, from which they first subtract weight_decay x theta."""
    settings = {"lr": args.learning_rate, "weight_decay": args.weight_decay, "maximize": True, "fused": True}
    if args.optimizer == "ascent":
        return torch.optim.SGD([policy.theta], **settings)
    return torch.optim.Adam([policy.theta], eps=1e-5, **settings)


class ReturnLimit(gym.wrappers.RecordEpisodeStatistics):
    """Truncate an episode once its return reaches `limit`."""

    def __init__(self, env, limit):
        super().__init__(env)
        self.limit = limit

    def step(self, action):
        """As the environment's, truncated at the limit."""
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated or self.episode_returns >= self.limit, info


class OneEpisode(gym.Wrapper):
    """An environment that stands still after the end of its episode, until it is reset with a seed.

    A finished candidate waits for the slowest. Otherwise its slot would play further episodes, which nobody counts.
    """

    def reset(self, *, seed=None, options=None):
        """Begin an episode if there is a seed. Autoreset gives none: then nothing changes."""
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


def is_native(envs):
    """Whether this is the environment's own vector version (CartPole has one), which plays all slots at once."""
    return not isinstance(envs.unwrapped, gym.vector.SyncVectorEnv)


def make_slots(args, num_envs, render=False, video=None):
    """A vector environment with Box observations; in a window or filmed, if asked. UserError if it fails.

    Each slot is wrapped in OneEpisode, except in a native vector environment (see is_native).
    """
    package = "minigrid" if args.env_id.startswith(("MiniGrid", "BabyAI")) else "gymnasium"
    try:
        importlib.import_module(package)  # registers its environments
        kwargs = dict(**json.loads(args.env_kwargs))
        paths = args.wrappers or (ONE_HOT if package == "minigrid" else ())
        wrappers = [globals().get(path) or pkgutil.resolve_name(path) for path in paths]
        if args.max_episode_steps is not None:
            kwargs["max_episode_steps"] = args.max_episode_steps
        if args.max_episode_return is not None:
            wrappers.append(partial(ReturnLimit, limit=args.max_episode_return))
        if render or video:
            kwargs["render_mode"] = "rgb_array" if video else "human"
        if video:
            wrappers.append(partial(gym.wrappers.RecordVideo, video_folder=str(video)))
        mode = "sync" if wrappers or render else None  # None: the environment's own vector version, if it has one
        envs = gym.make_vec(args.env_id, num_envs, vectorization_mode=mode, wrappers=wrappers, **kwargs)
    except (ImportError, AttributeError, TypeError, ValueError, LookupError, AssertionError) as error:
        raise UserError(f"cannot make {args.env_id} with env_kwargs {args.env_kwargs}: {error}") from error
    if envs.metadata["autoreset_mode"] != gym.vector.AutoresetMode.NEXT_STEP:
        raise UserError(f"{args.env_id}: its vector version does not reset in the step after an episode's end")
    if not is_native(envs):
        envs.unwrapped.envs = [OneEpisode(env) for env in envs.unwrapped.envs]
    is_box = isinstance(envs.single_observation_space, spaces.Box)
    return envs if is_box else gym.wrappers.vector.FlattenObservation(envs)


make_envs = make_slots  # as the run section calls it


def begin_episode(envs, seeds):
    """Begin an episode in every slot; returns the first observations. Both slots of a pair start from the pair's seed.

    A native vector environment takes only one seed, for all of its slots: there, the two of a pair start differently.
    """
    obs, _ = envs.reset(seed=int(seeds[0]) if is_native(envs) else seeds.repeat(2).tolist())
    return obs


def make_policy(args, envs):
    """An untrained Policy for these environments. UserError if a space does not suit it, or options contradict."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(action_space, spaces.Discrete | spaces.Box):
        raise UserError(f"{args.env_id} has {action_space}; es.py needs Discrete or Box actions (ppo.py takes others)")
    if not isinstance(obs_space, spaces.Box) or (obs_space.dtype == np.uint8 and math.prod(obs_space.shape) > 1_000):
        raise UserError(f"{args.env_id} has observations {obs_space}; es.py needs vectors (ppo.py takes images)")
    if args.ars and (args.fitness != "centered-rank" or args.elite != 1):
        raise UserError("ars weighs returns in its own way: leave out fitness and elite")
    if args.top_directions is not None and (not args.ars or args.top_directions > args.population_size // 2):
        raise UserError(f"top_directions needs ars, and must be at most half of population_size {args.population_size}")
    torch.set_num_threads(1)  # small matrices are slower on more than one
    torch.manual_seed(args.seed)
    policy = Policy(obs_space, action_space, args)
    policy.args = args  # for evaluate(agent, agent.args) in a notebook
    return policy


make_agent = make_policy  # as the run section calls it


# From here to the run section: what several processes need. torchrun starts all of them with the same flags.
def process():
    """(number of this process, how many there are): (0, 1) unless torchrun has started several."""
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def join_processes():
    """Connect the processes that torchrun has started. All but the first print nothing, and wait until its run begins.

    So bad flags, or a folder that cannot be written, are reported once: the first one ends, and then the others do.
    """
    if distributed.is_torchelastic_launched():
        distributed.init_process_group("gloo")
        if distributed.get_rank() > 0:
            sys.stdout = open(os.devnull, "w")
            exchange("waiting")


def exchange(value):
    """A list of the values of all processes. If another process has ended (it has said why), this one ends as well."""
    if not distributed.is_initialized():
        return [value]
    values = [None] * distributed.get_world_size()
    try:
        distributed.all_gather_object(values, value)
    except RuntimeError:
        distributed.destroy_process_group()  # else its threads may abort while this process ends
        sys.exit()
    return values


def candidates_of_this_process(args):
    """The numbers of the candidates that this process plays: its share of the pairs. UserError if that is not possible.

    A native vector environment draws the first states of all slots from one seed: every process plays all candidates.
    """
    N = args.population_size
    rank, processes = process()
    if N % 2 or N < 2 * processes:
        raise UserError(f"population_size {N} does not divide into pairs, at least one for each process ({processes})")
    native = is_native(make_envs(args, 1))
    pairs = np.arange(N // 2) if native else np.array_split(np.arange(N // 2), processes)[rank]
    return np.arange(2 * pairs[0], 2 * pairs[-1] + 2)


def make_run(args, policy, envs, **parts):
    """This process's Run; num_generations ends it as well. Every process has one, but only the first one's writes."""
    last = (args.num_generations or math.inf) * args.population_size

    class PopulationRun(Run):
        def is_finished(self):
            """As in Run, or if num_generations have been played."""
            return super().is_finished() or len(self.episodes) >= last

    if process()[0] > 0:
        globals().update(write_file=lambda path, write: None)
        args = replace(args, progress=False, capture_video=False)
    run = PopulationRun(args, policy, envs, **parts)
    if args.checkpoint_every == 0:  # here, checkpoints interrupt no episode, so they may be frequent
        run.checkpoint_every = math.ceil(args.total_timesteps / 10)
    if process()[0] == 0:
        exchange("begun")
    return run


if __name__ == "__main__":
    join_processes()  # before any flag is read


# ===== run: the same in every script ==================================================================================
# What it knows of the script: Args, RANGES, CURVE, EXPLORES, SAFE_IDS and SUFFIX; tuned_settings, make_envs,
# make_agent (whose agent can act), train, write_state and read_state. What the user can fix is a UserError.
UserError = gym.error.Error  # so that Gymnasium's own count as well
ONLY_FLAGS = "resume evaluate model render capture_video config run_dir".split()  # never from config.json
FREE = "total_timesteps stop_at_return eval_every eval_episodes checkpoint_every device progress".split()  # at --resume


def tuned(*flags, **given):
    """Args from flags or keywords; the rest from the run to resume or evaluate, from `config`, or from TUNED."""
    # The flags are parsed twice: the first time tells where the defaults of the second come from.
    first = replace(tyro.cli(Args, args=[flag for flag in flags if flag not in ("-h", "--help")]), **given)
    run_dir = first.resume or first.evaluate
    path = f"{run_dir}/config.json" if run_dir else first.config
    defaults = read_config(path, first) if path else replace(Args(), **tuned_settings(first))
    args = replace(tyro.cli(Args, args=flags, default=defaults, description=__doc__), **given)
    for name, value in vars(args).items():
        low, high = RANGES.get(name, (0, 1e15))
        for number in value if isinstance(value, tuple) else [value]:
            if isinstance(number, (int, float)) and not low <= number <= high:
                raise UserError(f"{name} must lie between {low:g} and {high:g}")
        if args.resume and name not in ONLY_FLAGS + FREE and value != getattr(defaults, name):
            raise UserError(f"{name} changes how a run learns: a resumed run keeps {getattr(defaults, name)}")
    return args


def code_flags(args):
    """The flags that a config.json must not decide alone, since they can make any code run; mostly none."""
    own_kwargs = "{}", tuned_settings(args).get("env_kwargs")
    if re.fullmatch(SAFE_IDS, args.env_id) and args.env_kwargs in own_kwargs and not args.wrappers:
        return []
    return ["--env-id", args.env_id, "--env-kwargs", args.env_kwargs, "--wrappers", *args.wrappers]


def read_config(path, given):
    """Args from the config.json of a run. It may be a stranger's: code that it asks for must be `given` as well."""
    flags = []
    try:
        for name, value in json.loads(Path(path).read_text(encoding="utf-8"))["args"].items():
            flags += [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # tyro's complaint would fill a screen
            args = tyro.cli(Args, args=flags, config=[tyro.conf.FlagConversionOff], console_outputs=False)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SystemExit) as error:
        raise UserError(f"{path} is missing, damaged or not from {Path(__file__).name}") from error
    code = code_flags(args)
    if code and code != code_flags(given):
        raise UserError(f"{path} asks for what may execute anything; if you trust it, add {shlex.join(code)}")
    return replace(args, **{name: getattr(given, name) for name in ONLY_FLAGS})


def load(run_dir, model="best", *flags, **given):
    """The agent saved by a run, with its settings as agent.args; `model` is best, last or a step."""
    args = tuned(*flags, **{"evaluate": str(run_dir), "model": str(model)} | given)
    agent = make_agent(args, make_envs(args, 1))
    name = "checkpoint" if args.model == "last" else f"models/{args.model}"
    read_parts(f"{run_dir}/{name}{SUFFIX}", {"agent": agent})
    return agent


def evaluate(agent, args, episodes=100, seed=0, render=False, video=None):
    """(mean, standard deviation) of the returns of `episodes` episodes; if asked, in a window or filmed in a folder."""
    envs = make_envs(args, episodes, render, video)  # one each: with fewer, short episodes would count too often
    obs, _ = envs.reset(seed=seed)
    if hasattr(agent, "begin_episodes"):  # a recurrent network forgets what it has seen
        agent.begin_episodes(episodes)
    returns = np.zeros(episodes)
    playing = np.ones(episodes, bool)
    for _ in range(args.max_episode_steps or 27_000):  # for what never ends by itself: half an hour of Atari
        obs, rewards, terminated, truncated, _ = envs.step(agent.act(obs))
        returns[playing] += rewards[playing]
        playing &= ~(terminated | truncated)
        if not playing.any():
            break
    envs.close()
    return float(returns.mean()), float(returns.std())


def write_file(path, write):
    """Call write(file), then rename the file to `path`: a reader finds the old file or the new one, never a half."""
    temporary = Path(f"{path}.{os.getpid()}.tmp")  # no other process writes to this one
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            write(file)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # on a full disk, torch raises a RuntimeError
        raise UserError(f"cannot write {path}: {error}") from error


def read_parts(path, parts):
    """Give `parts`, a dict of objects with load_state_dict, their states from a file; return all states in it."""
    try:
        state = read_state(path)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except Exception as error:  # there is no list of what a damaged or foreign file may raise
        raise UserError(f"{path} is missing, damaged or of another network: {type(error).__name__}") from error
    return state


class Run:
    """Everything a run keeps besides what it learns: folder, steps and episodes, evaluations, checkpoints, curve."""

    def __init__(self, args, agent, envs, **parts):
        self.args = args
        self.agent = agent
        self.envs = envs
        self.parts = {"agent": agent, **parts}  # what a checkpoint holds besides the run's own numbers
        self.step = 0  # environment steps, without reset rows
        self.episodes = []  # (step, return) of each training episode
        self.metrics = {"step": []}  # the columns of metrics.csv; others begin when they are first logged
        self.evaluations = {name: [] for name in ("step", "seconds", "return_mean", "return_std", "episodes")}
        self.figures = {}  # logged since the last row of metrics.csv
        self.eval_every = args.eval_every or math.ceil(args.total_timesteps / 10)
        self.checkpoint_every = args.checkpoint_every or max(args.total_timesteps // 10, 10_000 * envs.num_envs)
        name = f"{re.sub('[/:]', '-', args.env_id)}__{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
        self.dir = Path(args.resume or args.run_dir or f"runs/{name}")
        self.begun = time.monotonic()
        path = self.dir / f"checkpoint{SUFFIX}"
        if path.exists():  # else the run is new, or was killed before its first checkpoint
            if not args.resume:
                raise UserError(f"{self.dir} holds a run already: --resume it, or choose another --run-dir")
            self.step, seconds, self.episodes, self.metrics, self.evaluations = read_parts(path, self.parts)["run"]
            self.begun -= seconds
        self.checkpoint_step = self.step  # of the last checkpoint, from which training begins anew
        here = Path(__file__).parent
        git = subprocess.run("git describe --always --dirty", shell=True, cwd=here, capture_output=True)
        config = {"script": Path(__file__).stem, "args": asdict(args), "commit": git.stdout.decode().strip()}
        config["versions"] = {name: version(name) for name in ("torch", "gymnasium", "numpy") if name in sys.modules}
        write_file(self.dir / "config.json", lambda file: file.write(json.dumps(config, default=str).encode()))
        print(f"{args.env_id} -> {self.dir}; tuned:", {name: getattr(args, name) for name in tuned_settings(args)})
        self.bar = tqdm(total=args.total_timesteps, initial=self.step, unit=" steps", disable=not args.progress)

    def new_envs(self):
        """(environments, their first observations, a NumPy generator), made anew and seeded from (seed, step)."""
        self.envs.close()  # a reset with a seed is not enough: Box2D's environments keep traces of earlier episodes
        self.envs = make_envs(self.args, self.envs.num_envs)
        rng = np.random.default_rng([self.args.seed, self.step])
        obs, _ = self.envs.reset(seed=int(rng.integers(2**31)))
        self.totals = np.zeros(self.envs.num_envs)  # returns of the episodes under way
        return self.envs, obs, rng

    def count(self, obs, rewards, ended, reset_rows):
        """Count a step of all environments, arrays (N, …), or a rollout, (T, N, …). UserError on NaN or infinity."""
        self.check_finite(observation=obs, reward=rewards)
        rewards, ended, reset_rows = np.atleast_2d(rewards, ended, reset_rows)
        for t in range(len(rewards)):
            self.step += rewards.shape[1] - int(reset_rows[t].sum())
            self.totals += rewards[t]
            self.episodes += [(self.step, total) for total in self.totals[ended[t]].tolist()]
            self.totals[ended[t]] = 0

    def check_finite(self, **values):
        """UserError naming the environment, the step and the field if a value holds a NaN or an infinity."""
        for name, value in values.items():
            if not np.isfinite(value).all():
                raise UserError(f"{self.args.env_id}, after step {self.step}: {name} is NaN or infinite")

    def log(self, **figures):
        """Collect figures (numbers, or tensors of one number); the next row of metrics.csv holds their means."""
        for name, value in figures.items():
            self.figures.setdefault(name, []).append(value)

    def is_finished(self):
        """Whether all steps are taken, or 100 episodes' mean (if EXPLORES, an evaluation's) reaches stop_at_return."""
        returns = self.evaluations["return_mean"][-1:] if EXPLORES else [total for _, total in self.episodes[-100:]]
        enough = self.args.stop_at_return is not None and len(returns) == (1 if EXPLORES else 100)
        return self.step >= self.args.total_timesteps or (enough and np.mean(returns) >= self.args.stop_at_return)

    def write_what_is_due(self):
        """A row of metrics.csv, about 200 times in a run; an evaluation and a checkpoint as often as args say."""
        self.check_finite(**{name: float(values[-1]) for name, values in self.figures.items() if "loss" in name})
        self.bar.update(self.step - self.bar.n)
        last = self.metrics["step"][-1] if self.metrics["step"] else 0
        is_due = lambda every: self.is_finished() or self.step // every > last // every  # a multiple has been passed
        if is_due(self.eval_every) or is_due(self.checkpoint_every) or is_due(self.args.total_timesteps / 200):
            mean = np.mean([total for _, total in self.episodes[-100:]] or math.nan).item()
            sps = self.step / (time.monotonic() - self.begun)
            figures = {name: float(sum(values) / len(values)) for name, values in self.figures.items()}
            self.add_row("metrics.csv", self.metrics, sps=sps, return_mean=mean, episodes=len(self.episodes), **figures)
            self.bar.set_postfix_str(f"mean return {mean:.1f}", refresh=False)
            self.figures = {}
        if is_due(self.eval_every):
            self.write_evaluation()  # it may reach stop_at_return: then the checkpoint is due as well
        if is_due(self.checkpoint_every):
            self.write_checkpoint()
            if not self.is_finished():  # else finish draws it
                self.draw_curve()
        if is_due(self.eval_every) and self.args.capture_video:  # last: should it fail, the checkpoint is written
            evaluate(self.agent, self.args, 1, self.args.seed + 10_000, video=self.dir / f"videos/{self.step}")

    def write_evaluation(self):
        """Evaluate; save the weights in models/ as STEP, and as best if none were better."""
        episodes = self.args.eval_episodes
        mean, std = evaluate(self.agent, self.args, episodes, self.args.seed + 10_000)  # not training's seed
        is_best = all(mean >= earlier for earlier in self.evaluations["return_mean"])
        for name in [self.step, "best"] if is_best else [self.step]:
            write_file(self.dir / f"models/{name}{SUFFIX}", partial(write_state, {"agent": self.agent.state_dict()}))
        self.add_row("evaluations.csv", self.evaluations, return_mean=mean, return_std=std, episodes=episodes)

    def add_row(self, name, table, **row):
        """Add a row of numbers to a table, a dict of columns, and write it as CSV. What is missing is NaN."""
        row = {"step": self.step, "seconds": time.monotonic() - self.begun} | row
        for column in row:
            table.setdefault(column, [math.nan] * len(table["step"]))
        for column in table:
            table[column].append(row.get(column, math.nan))
        rows = np.transpose(list(table.values()))
        head = {"header": ",".join(table), "comments": ""}
        write_file(self.dir / name, lambda file: np.savetxt(file, rows, "%.10g", ",", **head))

    def write_checkpoint(self):
        """Write the checkpoint. It holds no environments: training makes new ones now, just as a resumed run does."""
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state["run"] = self.step, time.monotonic() - self.begun, self.episodes, self.metrics, self.evaluations
        write_file(self.dir / f"checkpoint{SUFFIX}", partial(write_state, state))
        self.checkpoint_step = self.step

    def draw_curve(self):
        """Write learning_curve.png: returns of episodes, their running mean and evaluations; below, CURVE's figures."""
        from matplotlib.figure import Figure  # slow to import

        figure = Figure(figsize=(9, 7), layout="constrained")
        axes = figure.subplot_mosaic([["returns"] * len(CURVE), list(CURVE)], height_ratios=(2, 1))
        top, steps = axes["returns"], self.metrics["step"]
        top.plot(*np.reshape(self.episodes, (-1, 2)).T, ".", alpha=0.25, markersize=3, label="training episode")
        top.plot(steps, self.metrics["return_mean"], label=f"mean of the last {min(100, len(self.episodes))} episodes")
        evaluated_at, _, means, stds, _ = self.evaluations.values()
        top.errorbar(evaluated_at, means, stds, fmt="o-", capsize=3, label="evaluation, ± one deviation")
        if means and top.dataLim.y0 < -100 * max(1, abs(means[-1])):  # from -11,000 to -13, say
            top.set_yscale("symlog", linthresh=10)
        top.set(title=f"{Path(__file__).name}: {self.args.env_id}, seed {self.args.seed}", ylabel="return")
        top.legend()
        for name, title in CURVE.items():
            axes[name].plot(steps, self.metrics.get(name, [math.nan] * len(steps)))
            axes[name].set(title=title, xlabel="environment steps")
            axes[name].locator_params(axis="x", nbins=4)
        write_file(self.dir / "learning_curve.png", partial(figure.savefig, dpi=120, format="png"))

    def finish(self):
        """Draw the curve, write summary.json, return the summary. A run that is killed meanwhile can be resumed."""
        if self.step not in self.evaluations["step"]:  # resumed with a total that is reached already
            self.write_evaluation()
        self.draw_curve()
        self.bar.close()
        self.envs.close()
        summary = {"global_step": self.step, "seconds": time.monotonic() - self.begun, "run_dir": self.dir.as_posix()}
        summary |= {f"eval_{name}": self.evaluations[name][-1] for name in ("return_mean", "return_std", "episodes")}
        write_file(self.dir / "summary.json", lambda file: file.write(json.dumps(summary, indent=1).encode()))
        print(f"last evaluation: {summary['eval_return_mean']:.1f}   curve: {self.dir.as_posix()}/learning_curve.png")
        return summary


def main():
    """Train, or evaluate, as the flags say. What the user can fix is one line on stderr and exit code 2."""
    try:
        args = tuned(*sys.argv[1:])
        if not args.evaluate:
            command = ["python", sys.argv[0], "--evaluate", train(args)["run_dir"], "--render", *code_flags(args)]
            print(f"to watch the best agent: {shlex.join(command)}")
            return
        agent = load(args.evaluate, args.model, *sys.argv[1:])
        seed = args.seed + 20_000  # other episodes than those by which the best weights were chosen
        mean, std = evaluate(agent, args, args.eval_episodes, seed)
        print(f"{args.model} weights: {mean:.2f} ± {std:.2f} over {args.eval_episodes} episodes of {args.env_id}")
        film = f"{args.evaluate}/videos/{args.model}" if args.capture_video else None
        if film or args.render:
            evaluate(agent, args, 1, seed, args.render, film)
            print(f"film: {film or 'none, --capture-video makes one'}")
    except UserError as error:
        text = "".join(letter if letter.isprintable() else " " for letter in str(error))  # no terminal control codes
        tqdm.write(f"{sys.argv[0]}: {' '.join(text.split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("stopped; --resume and the run folder goes on from its last checkpoint, if there is one")


if __name__ == "__main__":
    main()
