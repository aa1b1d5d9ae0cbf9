# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.3,<2", "ufal-pybox2d>=2.3.10.5",
#   "numpy>=1.26", "matplotlib>=3.8", "tyro>=1.0", "tqdm>=4.66", "moviepy>=2.0",
# ]
# ///
"""Evolution strategies (OpenAI-ES) and augmented random search (ARS), all of it, in this one file.

Nothing is backpropagated. A generation is a population of N candidates. Candidate i has the
parameters theta plus noise, theta + sigma eps_i. It plays an episode, or several. Its fitness F_i is
its mean return or, by default, the rank of this return among all candidates. Then theta moves towards
the noise of those that did well, with the learning rate alpha:

    theta <- theta + alpha / (N sigma) sum_i F_i eps_i   (arXiv 1703.03864, alg. 1)

The noise comes in antithetic pairs, eps and -eps. All candidates play side by side, each in its own
environment. Several processes can share the work: they draw the noise from the same seeds, so none
sends it (alg. 2). By default, Adam replaces the plain step.

    python es.py                                            # CartPole-v1, half a minute
    python es.py --env-id LunarLander-v3 --ars              # augmented random search instead
    torchrun --nproc-per-node 4 es.py --env-id Pendulum-v1  # four processes share the work

Papers: OpenAI-ES arXiv 1703.03864, ARS arXiv 1803.07055. The algorithm ends at "# ===== helpers";
below it are theta's first values, the optimizer, environments, processes and the run folder.
"""

import ast
import atexit
import importlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
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
    """Every flag and its default; TUNED (below) has others, as for CartPole. A given flag wins."""

    # algorithm
    population_size: int = 128  # candidates of a generation: an even number, for pairs of opposite noise
    episodes_per_candidate: int = 1  # their mean is the candidate's return
    num_generations: int | None = None  # generations to train for, in place of total_timesteps
    sigma: float = 0.1  # standard deviation of the noise on theta; ARS calls it nu
    fitness: Literal["centered-rank", "standardized", "raw"] = (
        "centered-rank"  # how returns become fitness: ranks, standardised, unchanged
    )
    elite: float = 1.0  # learn only from the best candidates, this share of all; 1: from all
    optimizer: Literal["adam", "ascent"] = "adam"  # ascent: add learning rate * gradient to theta
    learning_rate: float = 0.05  # alpha, the step size of theta
    weight_decay: float = 0.0  # pulls theta towards zero: this * theta is subtracted from the gradient
    ars: bool = False  # augmented random search (V2), with its own defaults
    top_directions: int | None = None  # ARS: learn only from the b best pairs of candidates; None: from all
    action_noise: float = 0.0  # in training. Discrete: softmax temperature; Box: standard deviation before tanh
    hidden_sizes: tuple[int, ...] = (64, 64)  # --hidden-sizes without a number: one linear layer
    normalize_obs: bool = True  # by mean and standard deviation over all earlier generations
    checkpoint_every: int = 0  # steps between checkpoints; 0: a tenth, up to 500,000
    # run
    env_id: str = "CartPole-v1"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths, applied in order; with arguments: a.B(size=4)
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    total_timesteps: int = 1_000_000  # steps to train for, of all candidates together
    stop_at_return: float | None = None  # stop once the mean return of an evaluation reaches this
    seed: int = 1  # seed of everything that is drawn at random
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, apart from training: theta without any noise
    capture_video: bool = False  # film an episode at each evaluation
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # weights that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window; with --capture-video, film it instead
    config: str | None = None  # config.json of another run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__SCRIPT__SEED__TIME
    progress: bool = True  # show the progress bar


# ------------------------------------------------------------------------------------------- policy
class FlatPolicy(nn.Module):
    """A deterministic policy: linear layers with tanh between them, or a single linear layer.

    All weights and biases lie in one vector, theta, of D numbers. A Discrete action is the argmax of
    the outputs. A dimension of a Box with two bounds is squashed into them by tanh; any other is only
    clipped, to the bound that it has.
    """

    def __init__(self, observation_space, action_space, args):
        super().__init__()
        self.args = args
        self.observation_shape = observation_space.shape
        self.action_space = action_space
        self.discrete = isinstance(action_space, spaces.Discrete)
        inputs = math.prod(observation_space.shape)
        outputs = int(spaces.flatdim(action_space))
        self.sizes = [inputs, *args.hidden_sizes, outputs]
        self.theta = nn.Parameter(first_theta(self.sizes), requires_grad=False)
        self.obs_stats = ObservationStats(inputs) if args.normalize_obs else None
        if not self.discrete:
            self.bounded = is_bounded(action_space)
            self.action_scale, self.action_bias = scale_and_bias(action_space)

    def layers(self, parameters):
        """Cut one theta (D,), or B of them (B, D), into layers.

        Each is (weights (…, outputs, inputs), biases (…, outputs)).
        """
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
        """NumPy observations (B, …) as a tensor of vectors (B, inputs), normalised if args say so."""
        obs = torch.as_tensor(obs, dtype=torch.float32).reshape(len(obs), -1)
        return obs if self.obs_stats is None else self.obs_stats(obs)

    def act(self, obs):
        """Actions of theta itself, without noise, for observations (B, …), as the environment takes them."""
        if obs.shape[1:] != self.observation_shape:
            raise ValueError("act takes a batch of observations; for one, it is act(obs[None])[0]")
        return self.to_env(forward(self.layers(self.theta), self.features(obs)))

    def to_env(self, outputs):
        """Outputs (B, outputs) as the environment takes them, in the space's bounds, shape and type."""
        space = self.action_space
        if self.discrete:
            return (outputs.argmax(1).numpy() + space.start).astype(space.dtype)
        outputs = outputs.double().numpy()
        squashed = self.action_scale * np.tanh(outputs) + self.action_bias
        actions = np.where(self.bounded, squashed, outputs).reshape(-1, *space.shape)
        actions = np.clip(actions, space.low, space.high)
        if np.issubdtype(space.dtype, np.integer):
            actions = np.rint(actions)
        return actions.astype(space.dtype)


def forward(layers, x):
    """Outputs (B, outputs) for x (B, inputs), by the layers of one policy, or of B policies, a row for each.

    With vecdot, not a matrix product, whose rounding may depend on how many candidates a process has.
    """
    for i, (weights, biases) in enumerate(layers):
        if i > 0:
            x = x.tanh()
        x = torch.linalg.vecdot(weights, x.unsqueeze(-2)) + biases
    return x


# ------------------------------------------------------------------------------- evolution strategy
def draw_seeds(args, generation):
    """Seeds of a generation, one per pair: of noise (N / 2,), of episodes (episodes_per_candidate, N / 2)."""
    pairs = args.population_size // 2
    sequence = np.random.SeedSequence([args.seed, generation])
    seeds = sequence.generate_state((1 + args.episodes_per_candidate) * pairs)
    return seeds[:pairs], seeds[pairs:].reshape(-1, pairs)


def draw_noise(seeds, size):
    """A direction eps for each seed, normal noise (len(seeds), size); the same in every process."""
    generators = [np.random.default_rng(seed) for seed in seeds]
    return np.stack([rng.standard_normal(size, np.float32) for rng in generators])


def make_candidates(theta, noise, sigma):
    """Candidates (2 * directions, D): rows 2k and 2k + 1 are theta ± sigma noise[k]."""
    pairs = np.stack([theta + sigma * noise, theta - sigma * noise], axis=1)
    return pairs.reshape(-1, len(theta))


def centered_ranks(returns):
    """Ranks (N,), spread evenly over [-1/2, 1/2]; equal returns share the mean of their ranks.

    arXiv 1703.03864, section 2.1, says "fitness shaping" by ranks; its authors' code centres them.
    """
    in_order = np.sort(returns)
    smaller = np.searchsorted(in_order, returns, side="left")  # how many are smaller than each
    not_larger = np.searchsorted(in_order, returns, side="right")  # how many are smaller or equal
    ranks = (smaller + not_larger - 1) / 2  # equal returns fill the ranks smaller … not_larger - 1
    return ranks / (len(returns) - 1) - 0.5


def shape_fitness(returns, fitness="centered-rank", elite=1.0):
    """Fitnesses (N,) of returns (N,): their centred ranks, or returns that are standardised or raw.

    If elite < 1 (in neither paper), the best fitness outside the elite is subtracted from all;
    negative ones become 0.
    """
    fitnesses = returns
    if fitness == "centered-rank":
        fitnesses = centered_ranks(returns)
    if fitness == "standardized":
        fitnesses = (returns - returns.mean()) / (returns.std() or 1.0)  # all equal: all 0
    num_elite = math.ceil(round(elite * len(returns), 6))  # 0.07 * 100 is 7.000000000000001
    if num_elite == len(returns):
        return fitnesses
    best_outside = np.sort(fitnesses)[-num_elite - 1]
    return np.maximum(fitnesses - best_outside, 0)


def es_gradient(fitnesses, noise, sigma):
    """An estimate g (D,) of the gradient of E[F], from fitnesses (N,) of eps and -eps in turn.

        g = 1 / (N sigma) sum_i F_i eps_i   (arXiv 1703.03864, algorithm 1)

    `noise` (N / 2, D) has each eps once: a pair adds (F^+ - F^-) eps.
    """
    plus, minus = fitnesses.reshape(-1, 2).T
    return (plus - minus) @ noise / (len(fitnesses) * sigma)


def ars_gradient(returns, noise, top_directions=None):
    """The direction g (D,) in which ARS moves theta, from raw returns (N,) of delta and -delta in turn.

        g = 1 / (b sigma_R) sum_k (r_k^+ - r_k^-) delta_k   (arXiv 1803.07055, algorithm 2)

    The sum is over the b directions k with the highest max(r_k^+, r_k^-), which are rows delta_k of
    `noise` (N / 2, D). sigma_R is the standard deviation of the 2b returns used. The paper's N counts
    directions; here N counts candidates.
    """
    pairs = returns.reshape(-1, 2)
    top = np.argsort(-pairs.max(1), kind="stable")[:top_directions]
    plus, minus = pairs[top].T
    sigma_r = pairs[top].std() or 1.0  # all equal: the sum is 0 as well
    return (plus - minus) @ noise[top] / (len(top) * sigma_r)


def move_theta(policy, optimizer, returns, noise, args):
    """Move theta by one step, computed from the returns (N,) of a generation. Returns metrics to log.

    A gradient of 0 carries no information: theta and Adam's moments stay as they are. It is 0 if
    both of each pair are equally fit, as when more tie for the best return than the elite holds.
    """
    before = policy.theta.clone()
    if args.ars:
        gradient = ars_gradient(returns, noise, args.top_directions)
    else:
        fitnesses = shape_fitness(returns, args.fitness, args.elite)
        gradient = es_gradient(fitnesses, noise, args.sigma)
    if gradient.any():
        policy.theta.grad = torch.from_numpy(gradient).float()
        optimizer.step()  # uphill, with weight decay: see make_optimizer
    return {
        "gradient_norm": float(np.linalg.norm(gradient)),
        "update_norm": (policy.theta - before).norm().item(),
        "weight_norm": policy.theta.norm().item(),
    }


# ------------------------------------------------------------------------------------------ playing
@torch.inference_mode()  # as no_grad, but faster
def play_candidates(policy, candidates, numbers, envs, seeds, args, run):
    """Play one episode with each of n candidates (n, D), side by side, each in its own environment.

    Returns a dict: `returns`, `true_returns` (before the user's wrappers change rewards) and `steps`,
    each (n,), and the sums `seen` for ObservationStats (n, 3, inputs). `numbers` (n,) are the
    candidates' indices in the whole population. `seeds`, one for each pair of the population,
    seed the environments and the action noise. Nothing counts after the end of a candidate's episode.
    """
    layers = policy.layers(candidates)
    rng = np.random.default_rng(seeds)  # of action noise; from all seeds: the same in every process
    obs, _ = envs.reset(seed=seeds[numbers // 2].tolist())  # both candidates of a pair start alike
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
            action_noise = draw_action_noise(policy, rng, args)  # of all N candidates
            outputs = outputs + action_noise[numbers]
        obs, rewards, terminated, truncated, _ = envs.step(policy.to_env(outputs))
        run.check_finite(observation=obs, reward=rewards)
        steps += playing
        returns += rewards * playing
        playing &= ~(terminated | truncated)
        if not playing.any():
            break
    before_wrappers = true_returns(envs, args, returns)
    return {"returns": returns, "true_returns": before_wrappers, "steps": steps, "seen": seen}


def draw_action_noise(policy, rng, args):
    """Noise (N, outputs) for the outputs of all candidates, so that every process draws the same.

    Box: normal noise. Discrete: the argmax of logits + temperature * Gumbel noise is a draw from
    softmax(logits / temperature).
    """
    shape = (args.population_size, policy.sizes[-1])
    noise = rng.gumbel(size=shape) if policy.discrete else rng.standard_normal(shape)
    return torch.as_tensor(args.action_noise * noise, dtype=torch.float32)


def play_generation(policy, noise, episode_seeds, numbers, envs, args, run):
    """Play all N candidates: play_candidates' dict, summed over each one's episodes, with N rows.

    This process plays only `numbers`. It receives the other rows from the processes that played them.
    """
    pairs = numbers[::2] // 2  # of these candidates: 2k and 2k + 1 are pair k
    candidates = torch.from_numpy(make_candidates(policy.theta.numpy(), noise[pairs], args.sigma))
    N = args.population_size
    played = {"returns": np.zeros(N), "true_returns": np.zeros(N), "steps": np.zeros(N, int)}
    played["seen"] = np.zeros((N, 3, policy.sizes[0]))
    for seeds in episode_seeds:  # each time, every candidate plays one episode
        episode = play_candidates(policy, candidates, numbers, envs, seeds, args, run)
        for name in played:
            played[name][numbers] += episode[name]
    for theirs, arrays in exchange((numbers, played)):  # of each process the rows that it has played
        for name in played:
            played[name][theirs] = arrays[name][theirs]
    return played


# ----------------------------------------------------------------------------------------- training
def train(args):
    """Train with `args`; return the summary, which summary.json holds too. UserError on bad input.

    Under torchrun, every process runs this loop with its share of the candidates.
    """
    numbers = candidates_of_this_process(args)
    envs = make_envs(args, len(numbers))  # make_slots, below
    policy = make_agent(args, envs)  # make_flat_policy, below
    set_threads(image=False)
    optimizer = make_optimizer(args, policy)
    run = start_es_run(args, envs, agent=policy, optimizer=optimizer)  # --resume loads their states

    envs, *_ = run.new_envs()
    set_total(run, run.num_episodes // args.population_size, args.num_generations)  # if resumed
    while not run.is_finished():
        generation = run.num_episodes // args.population_size  # its number: a candidate counts as an episode
        noise_seeds, episode_seeds = draw_seeds(args, generation)
        noise = draw_noise(noise_seeds, len(policy.theta))
        played = play_generation(policy, noise, episode_seeds, numbers, envs, args, run)
        returns = played["returns"] / args.episodes_per_candidate
        metrics = move_theta(policy, optimizer, returns, noise, args)
        if policy.obs_stats is not None:  # only now: all candidates must normalise alike
            policy.obs_stats.add(played["seen"].sum(0))  # in candidate order, for any number of processes

        run.check_finite(length_of_theta=metrics["weight_norm"])
        run.log(population_mean=returns.mean(), return_std=returns.std(), return_max=returns.max(), **metrics)
        count_candidates(run, played, args)
        # True after a checkpoint: a resumed run has new environments, so this one makes new ones as well.
        if run.write_what_is_due():
            envs, *_ = run.new_envs()
    return run.finish()


# ===== helpers: settings, parts of the policy, environments, processes ============================

CURVE = {"return_std": "std of candidates' returns", "gradient_norm": "length of the gradient",
         "update_norm": "length of theta's step"}  # fmt: skip
EXPLORES = True  # training plays theta plus noise: only an evaluation says how good theta is
SCHEDULED = ()  # flags that let a schedule end with total_timesteps: none
ONLY_FLAGS = "resume evaluate model render capture_video config run_dir".split()  # not from config.json
ONE_HOT = ("minigrid.wrappers.OneHotPartialObsWrapper", "minigrid.wrappers.ImgObsWrapper")
REFUSED_WRAPPERS = {"NormalizeObservation": "--normalize-obs", "NormalizeReward": "--fitness"}
SAFE_IDS = r"[^:]*"  # ids that a stranger's config.json may ask for: module:Id imports the module
SUFFIX = ".pt"  # of models and checkpoints. With weights_only, reading them executes nothing:
write_state = torch.save
read_state = partial(torch.load, map_location="cpu", weights_only=True)
manual_seed = torch.manual_seed

# Tuned settings per environment; flags win over them.
ARS = {"ars": True, "hidden_sizes": (), "optimizer": "ascent", "learning_rate": 0.02, "sigma": 0.03}
TUNED = {
    # confirmed with five seeds: benchmarks/results/es_scores.json
    "CartPole-v1": {"normalize_obs": False, "total_timesteps": 800_000},
    "Acrobot-v1": {"population_size": 64, "normalize_obs": False, "total_timesteps": 500_000},
    "LunarLander-v3": {"hidden_sizes": (64,), "total_timesteps": 4_000_000},
    "Pendulum-v1": {"episodes_per_candidate": 4, "sigma": 0.3, "learning_rate": 0.4, "action_noise": 1.0,
                    "total_timesteps": 6_000_000},
    "Swimmer-v5": ARS | {"population_size": 16, "sigma": 0.4, "learning_rate": 0.4, "total_timesteps": 800_000},
}  # fmt: skip


def method_settings(args):
    """TUNED for args.env_id; with --ars, ARS instead, unless the tuned settings are for ARS themselves."""
    settings = TUNED.get(args.env_id, {})
    return ARS if args.ars and "ars" not in settings else settings


tuned_settings = method_settings  # as the run section calls it


def first_theta(sizes):
    """Orthogonal weights times sqrt(2) and zero biases, as one vector; the last weights are 0 as well."""
    parts = []
    for inputs, outputs in pairwise(sizes):
        weights = nn.init.orthogonal_(torch.empty(outputs, inputs), 2**0.5)
        parts += [weights.flatten(), torch.zeros(outputs)]
    parts[-2].zero_()  # so theta outputs only 0, and at first the noise alone decides
    return torch.cat(parts)


def sums_of(obs):
    """What ObservationStats adds up, of each of the observations (n, …): (n, 3, inputs)."""
    x = obs.reshape(len(obs), -1).astype(np.float64)
    return np.stack([np.ones_like(x), x, x**2], axis=1)


class ObservationStats(nn.Module):
    """Mean and deviation of all observations so far, kept as sums, which several processes can add."""

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
    """Adam, or plain ascent. Both climb along theta.grad, less weight_decay * theta."""
    settings = {"lr": args.learning_rate, "weight_decay": args.weight_decay, "maximize": True, "fused": True}
    if args.optimizer == "ascent":
        return torch.optim.SGD([policy.theta], **settings)
    return torch.optim.Adam([policy.theta], eps=1e-5, **settings)


def count_candidates(run, played, args):
    """Count the steps of a generation, and each candidate as an episode: the mean of those it played."""
    run.step += int(played["steps"].sum())
    for total, length in zip(played["true_returns"].tolist(), played["steps"].tolist()):
        episodes = args.episodes_per_candidate
        run.add_episode(slice(None), total / episodes, length / episodes)  # in all environments
    set_total(run, run.num_episodes // args.population_size, args.num_generations)


def set_total(run, done, total):
    """End a run after `total` rounds, of which `done` are over; None: after total_timesteps.

    A run ends by steps: total_timesteps is estimated from the rounds (episodes, generations) so far.
    """
    if total is not None and done > 0:
        run.args = replace(run.args, total_timesteps=run.step * total / done)
        is_tenth = 10 * done // total > 10 * (done - 1) // total
        run.eval_every = run.args.eval_every or (run.step if is_tenth else math.inf)
        run.bar.total = run.args.total_timesteps


def is_image(space):
    """Whether a Box holds images (uint8, channels first or last), large enough for a CNN."""
    return space.dtype == np.uint8 and len(space.shape) == 3 and sorted(space.shape)[1] >= 36


def scale_and_bias(box):
    """(scale, bias), each (D,), of a Box: scale * a + bias maps [-1, 1] to its bounds.

    A dimension without two bounds has (1, 0): its actions pass through.
    """
    low = box.low.astype(np.float64).ravel()
    high = box.high.astype(np.float64).ravel()
    bounded = (low > -1e30) & (high < 1e30)  # float32's largest number, 3e38, means "no bound"
    low[~bounded] = -1
    high[~bounded] = 1
    return high / 2 - low / 2, high / 2 + low / 2


def is_bounded(box):
    """Which dimensions (D,) of a Box have two bounds, as scale_and_bias means it."""
    return ((box.low > -1e30) & (box.high < 1e30)).ravel()


class TrueReturn(gym.Wrapper):
    """Adds up an episode's rewards before the user's wrappers change them; truncates at `limit`."""

    def __init__(self, env, limit=None):
        super().__init__(env)
        self.limit = math.inf if limit is None else limit

    def reset(self, **kwargs):
        """As the environment's."""
        self.true_return = 0.0
        return super().reset(**kwargs)

    def step(self, action):
        """As the environment's, truncated at the limit."""
        obs, reward, terminated, truncated, info = super().step(action)
        self.true_return += np.asarray(reward, float).item()
        return obs, reward, terminated, truncated or self.true_return >= self.limit, info


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


def read_wrapper(text):
    """The wrapper that `module.Name` or `module.Name(size=4)` means; arguments are literals."""
    path, _, arguments = text.partition("(")
    module, _, name = path.rpartition(".")
    if name in REFUSED_WRAPPERS:
        raise UserError(f"{name} would start anew at checkpoints: use {REFUSED_WRAPPERS[name]}")
    try:
        call = ast.parse(f"f({arguments or ')'}", mode="eval").body
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise UserError(f"--wrappers {text}: {error}") from error
    if call.args:
        raise UserError(f"--wrappers {text}: arguments need names, as in (size=4)")
    wrapper = getattr(importlib.import_module(module or name), name, None)
    if wrapper is None:
        raise UserError(f"--wrappers {text}: there is no {name} in {module}")
    return partial(wrapper, **given)


# What a mistyped --env-id, --env-kwargs or --wrappers raises.
MISTYPED = gym.error.Error, ModuleNotFoundError, json.JSONDecodeError, TypeError


def raise_mistyped(error, args):
    """Raise a UserError in place of one of MISTYPED. A TypeError of another kind keeps its traceback."""
    message = str(error)
    argument = re.search(r"unexpected keyword argument '(\w+)'", message)
    is_given = argument and argument[1] in f"render_mode {args.env_kwargs} {args.wrappers}"
    if isinstance(error, TypeError) and not is_given:
        raise error
    if isinstance(error, gym.error.NameNotFound):
        message += " One of your own is module:Id-v0, made known by gymnasium.register"
    if "Box2D" in message:  # Gymnasium's advice needs a compiler
        message = "pip install ufal-pybox2d"
    raise UserError(f"cannot make {args.env_id} with --env-kwargs {args.env_kwargs}: {message}") from error


def make_slots(args, num_envs, render=False, video=None):
    """A vector environment whose slots play one episode each; in a window or filmed, if asked.

    UserError for what is mistyped. What the environment itself raises keeps its traceback.
    """
    package = "minigrid" if args.env_id.startswith(("MiniGrid", "BabyAI")) else "gymnasium"
    try:
        importlib.import_module(package)
        kwargs = json.loads(args.env_kwargs)
        if not isinstance(kwargs, dict):
            raise UserError('--env-kwargs is a JSON object, such as {"size": 4}')
        defaults = ONE_HOT if package == "minigrid" else ()
        wrappers = [read_wrapper(text) for text in args.wrappers or defaults]
        if args.wrappers or args.max_episode_return is not None:
            wrappers.insert(0, partial(TrueReturn, limit=args.max_episode_return))
        if args.max_episode_steps is not None:
            kwargs["max_episode_steps"] = args.max_episode_steps
        if render or video:
            kwargs["render_mode"] = "rgb_array" if video else "human"
        if video:
            wrappers.append(partial(gym.wrappers.RecordVideo, video_folder=str(video)))
        wrappers.append(OneEpisode)
        envs = gym.make_vec(args.env_id, num_envs, vectorization_mode="sync", wrappers=wrappers, **kwargs)
    except MISTYPED as error:
        raise_mistyped(error, args)
    return vectors_or_images(envs, args.env_id)


make_envs = make_slots  # as the run section calls it


def vectors_or_images(envs, env_id):
    """The environments; Discrete observations one-hot, Dict and Tuple flat; else a UserError."""
    space = envs.single_observation_space
    if isinstance(space, spaces.Box):
        is_picture = space.dtype == np.uint8 and len(space.shape) >= 2 and space.shape[1] >= 36
        if (is_picture or len(space.shape) == 3 and sorted(space.shape)[1] >= 36) and not is_image(space):
            stack = "'gymnasium.wrappers.FrameStackObservation(stack_size=4)'"
            raise UserError(f"{env_id}: images are uint8 and have three dimensions, not {space}; if grey: {stack}")
        return envs
    plain = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    parts = [space]
    for part in parts:  # the list grows while it is walked
        if isinstance(part, spaces.Dict | spaces.Tuple):
            parts += part.values() if isinstance(part, spaces.Dict) else part
        elif not isinstance(part, plain) or sorted((0, 0, *part.shape))[-2] >= 36:
            choose = "a wrapper must choose what to see, as minigrid.wrappers.ImgObsWrapper does"
            raise UserError(f"{env_id}: {part} cannot become a row of numbers: {choose}")
    return gym.wrappers.vector.FlattenObservation(envs)


def set_threads(image):
    """One thread for vectors: small matrices are slower on more. If set, OMP_NUM_THREADS decides."""
    if not image and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def make_flat_policy(args, envs):
    """An untrained FlatPolicy for these environments. UserError for unsuitable spaces and flags."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(action_space, spaces.Discrete | spaces.Box):
        raise UserError(f"{args.env_id}: actions must be Discrete or a Box, not {action_space}")
    if is_image(obs_space):
        raise UserError(f"{args.env_id}: es.py takes no images: use ppo.py")
    if 0 in (args.episodes_per_candidate, args.num_generations, args.sigma):
        raise UserError("episodes_per_candidate, num_generations and sigma must be above 0")
    if not 0 < args.elite <= 1:
        raise UserError("elite is not in (0, 1]")
    if args.ars and (args.fitness != "centered-rank" or args.elite != 1):
        raise UserError("ars weighs returns in its own way: leave out fitness and elite")
    top = args.top_directions
    if top is not None and (not args.ars or not 1 <= top <= args.population_size // 2):
        raise UserError("top_directions needs ars, and lies between 1 and half of population_size")
    torch.manual_seed(args.seed)
    return FlatPolicy(obs_space, action_space, args).eval()


make_agent = make_flat_policy  # as the run section calls it


# From here to the run section: what several processes need. torchrun starts all with the same flags.
def process():
    """(number of this process, how many there are): (0, 1) unless torchrun has started several."""
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def join_processes():
    """Connect the processes of torchrun. All but the first print only errors, and wait until its run begins.

    So bad flags, or a folder that cannot be written, are reported once: the first one ends, and then
    the others do, with exit code 0. `exchange` returns when all processes have called it: the first
    one does so in start_run.
    """
    if distributed.is_torchelastic_launched():
        gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
        distributed.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
        atexit.register(distributed.destroy_process_group)  # else its threads may crash the process at its end
        if distributed.get_rank() > 0:
            sys.stdout = open(os.devnull, "w")
            exchange("waiting", code=0)


def exchange(value, code=1):
    """A list of the values of all processes, each of which must call it. It waits for them.

    If another process has ended, this one ends as well, with this exit code.
    """
    if not distributed.is_initialized():
        return [value]
    values = [None] * distributed.get_world_size()
    try:
        distributed.all_gather_object(values, value)
    except RuntimeError as error:
        end_with_the_others(error, code)
    return values


def end_with_the_others(error, code=1):
    """End this process, which has lost another one.

    If that one has failed, it says why itself, and torchrun ends this one meanwhile. It does not if
    the line between two machines is cut.
    """
    if code != 0:
        time.sleep(10)
        print(f"process {distributed.get_rank()} has lost the others: {error}", file=sys.stderr, flush=True)
    os._exit(code)  # sys.exit may crash here


def candidates_of_this_process(args):
    """The numbers of the candidates that this process plays: its share of the pairs, or a UserError."""
    N = args.population_size
    rank, processes = process()
    if N % 2 or N < 2 * processes:
        raise UserError(f"population_size {N} is not pairs, at least one for each process ({processes})")
    pairs = np.array_split(np.arange(N // 2), processes)[rank]
    return np.arange(2 * pairs[0], 2 * pairs[-1] + 2)


def make_run(args, envs):
    """A Run. The first process's has the run folder, the others write into temporary ones."""
    rank, _ = process()
    if rank == 0:
        return Run(args, envs)
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    checkpoint = Path(args.resume or "", f"checkpoint{SUFFIX}")
    if args.resume and checkpoint.exists():
        shutil.copy(checkpoint, folder.name)
    where = {"resume": args.resume and folder.name, "run_dir": folder.name}
    run = Run(replace(args, **where, progress=False, capture_video=False), envs)
    run.folder = folder  # it is deleted when the process ends by itself
    return run


def start_run(run, **parts):
    """Start the run with these parts. If this is the first process, the others, too, can begin."""
    run.start(**parts)
    if process()[0] == 0:
        exchange("begun")
    if len(set(exchange((run.step, run.seconds)))) > 1:
        raise UserError("another machine has another checkpoint, or none: copy the run folder to all of them")


def start_es_run(args, envs, **parts):
    """A Run that has started with these parts."""
    run = make_run(args, envs)
    tenth = math.ceil(min(args.total_timesteps, 5_000_000) / 10)
    run.checkpoint_every = args.checkpoint_every or tenth  # often: no episode is interrupted
    start_run(run, **parts)
    return run


if __name__ == "__main__":
    join_processes()  # before any flag is read


# ===== run: the same in every script ==============================================================
# Of the script it knows Args, TUNED, CURVE, EXPLORES, SCHEDULED, ONLY_FLAGS, SAFE_IDS, SUFFIX;
# tuned_settings, make_envs, make_agent (whose agent can act), train, manual_seed, write_state and read_state.
# Free at --resume; the first three only without a schedule:
FREE = "total_timesteps num_episodes num_generations stop_at_return eval_every eval_episodes device progress".split()
COUNTS = """total_timesteps num_envs num_steps eval_episodes max_episode_steps num_minibatches batch_size
update_epochs train_frequency gradient_steps policy_frequency n_step target_network_frequency hidden_sizes
critic_hidden_sizes""".split()  # from 1
SIGNED = "stop_at_return max_episode_return initial_reward_threshold v_min v_max".split()  # the rest: from 0


shell = subprocess.list2cmdline if os.name == "nt" else shlex.join  # a command, to be copied


class UserError(Exception):
    """What the user can mend: `main` prints its one line."""


def tuned(*flags, **given):
    """Args from flags or keywords; the rest from a run (to resume, to evaluate, `config`) or TUNED."""
    plain = lambda number: (number[1] or "") + f"{float(number[2]):.15g}"  # 1000000 for 1e6
    flags = flags[: flags.index("#")] if "#" in flags else flags  # cmd.exe and zsh hand over comments
    flags = [re.sub(r"^(--[\w-]+=)?(\d+\.?\d*[eE]\d+)$", plain, flag) for flag in flags]
    if flags and not flags[0].startswith("-"):
        flags.insert(0, "--env-id")
    # Parsed twice: the first time tells where the other values come from.
    first = parse(replace(Args(), **given), [flag for flag in flags if flag not in ("-h", "--help")])
    paths = [first.resume, first.evaluate, first.config or first.run_dir]
    if paths.count(None) < 2:
        raise UserError("choose between --resume, --evaluate and --config or --run-dir")
    if first.render and not first.evaluate:
        raise UserError("--render shows a trained agent: add --evaluate and its run folder")
    path = first.resume or first.evaluate or first.config
    if path and (path != first.config or os.path.isdir(path)):
        path = f"{path}/config.json"
    defaults = read_config(path, first) if path else replace(Args(), **tuned_settings(first))
    args = parse(replace(defaults, **given), flags)
    code = code_flags(args) if path else []
    if code and code != code_flags(first):
        raise UserError(f"{path} may execute anything; if you trust it, add {shell(code)}")
    for name, value in vars(args).items():
        least = 1 if name in COUNTS else 0
        if isinstance(getattr(Args(), name), tuple) and not isinstance(value, tuple):  # in a notebook
            raise UserError(f"{name} must be a tuple, such as (64,)")
        for number in value if isinstance(value, tuple) else [value]:
            if isinstance(number, int | float) and name not in SIGNED and not number >= least:
                raise UserError(f"{name} must be at least {least}")
    free = FREE[3:] if any(getattr(defaults, name) for name in SCHEDULED) else FREE
    for name, kept in vars(defaults).items() if args.resume else []:
        if getattr(args, name) != kept and name not in free:
            raise UserError(f"{name} changes how a run learns: a resumed run keeps {kept}")
    return args


def parse(defaults, flags):
    """Args from flags, else from `defaults`, whose values must be of the types that Args says."""
    try:
        with warnings.catch_warnings(action="error", category=UserWarning):  # tyro warns of wrong types
            args = tyro.cli(Args, args=flags, default=defaults, description=__doc__.split("\n\nPapers")[0])
    except UserWarning as error:
        raise UserError(str(error).split(" We'll try")[0]) from error
    env_id = re.sub("^(ale_py|minigrid):", "", args.env_id)  # as TUNED has it
    ids = [*gym.registry, *TUNED]  # those of plugins are not registered yet
    versions = [known for known in ids if re.fullmatch(re.escape(env_id) + r"-v\d+", known)]
    newest = max(versions, key=lambda known: int(known.rpartition("-v")[2]), default=env_id)
    return replace(args, env_id=newest)  # CartPole-v1 for CartPole


def code_flags(args):
    """Flags that a config.json must not decide alone, as they can run any code; mostly none."""
    own = tuned_settings(args)
    is_own = args.env_kwargs in ("{}", own.get("env_kwargs")) and args.wrappers in ((), own.get("wrappers"))
    if re.fullmatch(SAFE_IDS, args.env_id) and is_own:
        return []
    flags = ["--env-id", args.env_id]
    flags += [] if args.env_kwargs == "{}" else ["--env-kwargs", args.env_kwargs]
    return [*flags, "--wrappers", *args.wrappers] if args.wrappers else flags


def read_config(path, given):
    """Args from the config.json of a run; but what to do, such as `resume`, is as `given`."""
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        script, saved = config["script"], config["args"]
        saved = {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()}
        if script != Path(__file__).stem:
            raise TypeError(f"it is from {script}.py")
        return Args(**saved | {name: getattr(given, name) for name in ONLY_FLAGS})
    except Exception as error:  # as in read_parts
        raise UserError(f"{path} is missing, damaged or foreign: {error}") from error


def load(run_dir, model="best", *flags, **given):
    """The agent saved by a run, with its settings as agent.args; `model`: best, last or a step."""
    args = tuned(*flags, **{"evaluate": str(run_dir), "model": str(model)} | given)
    envs = make_envs(args, 1)
    agent = make_agent(args, envs)
    envs.close()
    name = "checkpoint" if args.model == "last" else f"models/{args.model}"
    read_parts(f"{run_dir}/{name}{SUFFIX}", {"agent": agent})
    return agent


def evaluate(agent, args, episodes=100, seed=0, render=False, video=None):
    """(mean, standard deviation) of the returns of `episodes` episodes; if asked, shown or filmed."""
    # not a process for each episode:
    here = replace(args, async_envs=False) if hasattr(args, "async_envs") else args
    envs = make_envs(here, episodes, render, video)  # one each: else short episodes count too often
    obs, _ = envs.reset(seed=seed)
    if hasattr(agent, "begin_episodes"):  # a recurrent network forgets what it has seen
        agent.begin_episodes(episodes)
    returns = np.zeros(episodes)
    playing = np.ones(episodes, bool)
    for _ in range(args.max_episode_steps or 27_000):  # for what never ends: half an hour of Atari
        obs, rewards, terminated, truncated, _ = envs.step(agent.act(obs))
        returns[playing] = true_returns(envs, args, returns + rewards)[playing]
        playing &= ~(terminated | truncated)
        if not playing.any():
            break
    else:
        tqdm.write(f"{playing.sum()} episodes of an evaluation were cut off: see --max-episode-steps")
    envs.close()
    return float(returns.mean()), float(returns.std())


def true_returns(envs, args, returns):
    """Returns (N,) of the episodes under way, before the user's wrappers changed their rewards."""
    return np.array(envs.unwrapped.get_attr("true_return")) if args.wrappers else returns


def write_file(path, write):
    """Call write(file), then rename the file to `path`: no reader finds a half-written one."""
    temporary = Path(f"{path}.tmp")  # what a killed process leaves is written over later
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            write(file)
        try:
            os.replace(temporary, path)
        except PermissionError:  # on Windows: another program has one open
            tqdm.write(f"{path} is in use, so it stays as it was: close it")
    except (OSError, RuntimeError) as error:  # on a full disk, torch raises a RuntimeError
        raise UserError(f"cannot write {path}: {error}") from error


def write_csv(path, table):
    """Write a table, a dict of columns."""
    rows = np.transpose(list(table.values()))
    head = ",".join(table)
    save = lambda file: np.savetxt(file, rows, "%.10g", ",", header=head, comments="", encoding="utf-8")
    write_file(path, save)


def read_parts(path, parts):
    """Give each of `parts`, a dict of objects with load_state_dict, its state from a file."""
    try:
        state = read_state(path)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except Exception as error:  # there is no list of what a damaged or foreign file may raise
        reason = str(error)[:200]  # torch names the layers that do not fit
        raise UserError(f"{path} is missing, damaged or of another network: {reason}") from error


class Run:
    """All that a run keeps besides what it learns: folder, counts, evaluations, checkpoints, curve."""

    def __init__(self, args, envs):
        self.args = args
        self.envs = envs
        self.step = 0  # environment steps, without reset rows
        self.seconds = 0.0
        self.num_episodes = 0
        self.episodes = {"step": [], "return": [], "length": []}
        self.metrics = {"step": []}  # other columns begin when they are first logged
        self.evaluations = {"step": [], "seconds": [], "return_mean": [], "return_std": []}
        self.saved = "step seconds num_episodes episodes metrics evaluations".split()
        self.logged = {}  # since the last row of metrics.csv
        self.largest = {}  # absolute observation, reward, …
        self.checkpoint_step = 0  # of the last checkpoint
        self.eval_every = args.eval_every or math.ceil(args.total_timesteps / 10)
        tenth = min(args.total_timesteps // 10, 50_000)
        self.checkpoint_every = args.checkpoint_every or max(tenth, 5_000 * envs.num_envs)
        name = f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
        self.dir = Path(args.resume or args.run_dir or f"runs/{re.sub('[/:]', '-', name)}")
        if os.path.exists(self.dir / "config.json") and not args.resume:
            raise UserError(f"{self.dir} holds a run already: --resume it, or choose another --run-dir")
        if args.capture_video:  # what cannot be filmed is refused at once
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                film = make_envs(args, 1, video=folder)
                film.reset(seed=args.seed)
                film.close()

    def start(self, agent, **parts):
        """Start with `agent` and whatever else a checkpoint must hold. --resume loads their states."""
        self.agent = agent
        self.parts = {"run": self, "agent": agent, **parts}
        if self.args.resume and (self.dir / f"checkpoint{SUFFIX}").exists():
            read_parts(self.dir / f"checkpoint{SUFFIX}", self.parts)
        command = {"shell": True, "cwd": Path(__file__).parent, "capture_output": True}
        commit = subprocess.run("git describe --always --dirty", **command).stdout.decode().strip()
        packages = [name for name in ("torch", "gymnasium", "numpy") if name in sys.modules]
        config = {"script": Path(__file__).stem, "args": asdict(self.args), "commit": commit}
        config["versions"] = {name: version(name) for name in packages}
        config["started"] = self.started = time.time_ns()
        write_file(self.dir / "config.json", lambda file: file.write(json.dumps(config).encode()))
        known = tuned_settings(self.args)
        given = {name: x for name, x in vars(self.args).items() if x != known.get(name, getattr(Args(), name))}
        print(f"{self.args.env_id} -> {self.dir}\ntuned: {known}\ngiven: {given}")
        if self.args.env_id not in TUNED:
            print(f"no settings for {self.args.env_id}: the defaults. docs/settings.md says what to change first")
        if self.args.resume:
            print(f"resumed after {self.step:,} steps" if self.step else "no checkpoint yet: it begins anew")
        self.begun = time.monotonic() - self.seconds
        total = self.args.total_timesteps
        self.bar = tqdm(total=total, initial=self.step, unit=" steps", disable=not self.args.progress)

    def state_dict(self):
        """What a checkpoint holds of the run."""
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state):
        """Take over what state_dict returned."""
        vars(self).update({name: state[name] for name in self.saved})
        self.checkpoint_step = self.step

    def remaining(self):
        """The share of the steps that is left, from 1 down to 0."""
        return max(0.0, 1 - self.step / self.args.total_timesteps)

    def new_envs(self):
        """(environments, observations, reset rows, a NumPy generator), all new, seeded by (seed, step).

        So a resumed run draws what an unbroken one does.
        """
        self.envs.close()  # a reset is not enough: Box2D's environments keep traces of old episodes
        self.envs = make_envs(self.args, self.envs.num_envs)
        rng = np.random.default_rng([self.args.seed, self.step])
        obs, _ = self.envs.reset(seed=int(rng.integers(2**31)))
        manual_seed(int(rng.integers(2**31)))
        self.check_finite(observation=obs)
        n = self.envs.num_envs
        self.returns = np.zeros(n)  # of the episodes under way
        self.lengths = np.zeros(n, int)
        self.has_ended = np.zeros(n, bool)  # whether an episode ended since
        return self.envs, obs, np.zeros(n, bool), rng

    def count(self, obs, rewards, dones, reset_rows):
        """Count a step of all environments, arrays (N, …). UserError on NaN or infinity."""
        self.check_finite(observation=obs, reward=rewards)
        self.step += int((~reset_rows).sum())
        self.returns += rewards * ~reset_rows
        self.lengths += ~reset_rows
        if dones.any():
            returns = true_returns(self.envs, self.args, self.returns)
            for n in np.flatnonzero(dones):
                self.add_episode(n, float(returns[n]), int(self.lengths[n]))
            self.returns[dones] = 0
            self.lengths[dones] = 0

    def add_episode(self, n, total, length):
        """Count an episode that has ended in environment n."""
        self.has_ended[n] = True
        self.num_episodes += 1
        for column, value in zip(self.episodes.values(), (self.step, total, length)):
            column.append(value)

    def check_finite(self, **values):
        """UserError if a value is NaN, or too large for float32."""
        for name, value in values.items():
            if np.asarray(value).dtype == np.uint8:
                continue
            largest = np.max(np.abs(value), initial=0)
            if not largest < 3.4e38:
                raise UserError(f"{self.args.env_id}, after step {self.step}: {name} is NaN or infinite")
            self.largest[name] = max(largest, self.largest.get(name, 0))

    def check_alone(self):
        """UserError if another process has resumed or removed the run since this one started."""
        path = self.dir / "config.json"
        if not path.exists() or json.loads(path.read_text())["started"] != self.started:
            raise UserError(f"another process has resumed or removed {self.dir}: this one ends")

    def log(self, **metrics):
        """Collect numbers, or tensors of one number; a row of metrics.csv holds their means."""
        for name, value in metrics.items():
            if getattr(value, "shape", ()) not in ((), (1,)):
                raise ValueError(f"the metric {name} is not one number, but {tuple(value.shape)}")
            self.logged.setdefault(name, []).append(value)

    def mean_return(self):
        """The mean return of the last 100 training episodes; NaN if there are none."""
        return float(np.mean(self.episodes["return"][-100:] or math.nan))

    def is_finished(self):
        """Whether all steps are taken, or --stop-at-return is reached."""
        goal = math.inf if self.args.stop_at_return is None else self.args.stop_at_return
        if self.step >= self.args.total_timesteps:
            return True
        if EXPLORES:  # training's episodes explore, so the last evaluation decides
            return bool(self.evaluations["step"]) and self.evaluations["return_mean"][-1] >= goal
        return self.num_episodes >= 100 and self.mean_return() >= goal

    def write_what_is_due(self):
        """A row of metrics.csv, about 200 in a run; evaluations and checkpoints, as often as args say.

        True if training goes on after a checkpoint: all episodes begin anew, as in a resumed run.
        """
        losses = {name: float(values[-1]) for name, values in self.logged.items() if "loss" in name}
        self.check_finite(**losses)
        self.bar.update(self.step - self.bar.n)
        finished = self.is_finished()
        is_due = lambda every, last: finished or self.step // every > last // every
        evaluates = is_due(self.eval_every, max(self.evaluations["step"], default=0))
        saves = is_due(self.checkpoint_every, self.checkpoint_step)
        saves = saves and (finished or self.has_ended.all())  # lets long episodes end
        last_row = max(self.metrics["step"], default=0)
        if evaluates or saves or is_due(self.args.total_timesteps / 200, last_row):
            self.check_alone()
            mean = self.mean_return()
            means = {name: float(sum(values) / len(values)) for name, values in self.logged.items()}
            self.add_row("metrics", dict(return_mean=mean, episodes=self.num_episodes, **means))
            self.bar.set_postfix_str(f"mean return {mean:.1f}", refresh=False)
            self.logged = {}
            if self.args.env_id not in TUNED and last_row < self.args.total_timesteps / 10 <= self.step:
                self.give_hints()
        if evaluates:
            self.write_evaluation()
        finished = self.is_finished()  # an evaluation may have finished it
        if saves or finished:
            self.write_checkpoint()
        if evaluates and self.args.capture_video:
            folder = self.dir / f"videos/{self.step}"
            evaluate(self.agent, self.args, 1, self.args.seed + 10_000, video=folder)
        if saves and not finished:  # else finish draws it
            self.draw_curve()
        return saves and not finished

    def give_hints(self):
        """After a tenth of the run, print what one would notice too late."""
        is_off = lambda flag: not getattr(self.args, flag, True)
        high = getattr(getattr(self.envs, "single_action_space", None), "high", 0)
        if self.largest.get("observation", 0) > 100 and is_off("normalize_obs"):
            tqdm.write("observations go beyond ±100: try --normalize-obs")
        if self.largest.get("reward", 0) > 100 and is_off("normalize_reward"):
            tqdm.write("rewards go beyond ±100: try --normalize-reward")
        if 10 < np.max(high) < 1e30:
            tqdm.write("actions in [-1, 1] are mapped to bounds beyond ±10")
        if not self.has_ended.all():
            tqdm.write("no checkpoint before every environment has ended an episode: see --max-episode-steps")

    def write_evaluation(self):
        """Evaluate; save the weights in models/ as STEP, and as best if none were better."""
        seed = self.args.seed + 10_000  # not training's
        mean, std = evaluate(self.agent, self.args, self.args.eval_episodes, seed)
        is_best = mean >= max(self.evaluations["return_mean"], default=-math.inf)
        weights = {"agent": self.agent.state_dict()}
        for name in [self.step, "best"] if is_best else [self.step]:
            write_file(self.dir / f"models/{name}{SUFFIX}", partial(write_state, weights))
        self.check_finite(evaluation=mean)
        self.add_row("evaluations", dict(return_mean=mean, return_std=std))

    def add_row(self, name, row):
        """Add a row, a dict of numbers, to a table and write it as CSV. What is missing is NaN."""
        table = getattr(self, name)
        row = dict(step=self.step, seconds=time.monotonic() - self.begun, **row)
        for column in row:
            table.setdefault(column, [math.nan] * len(table["step"]))
        for column in table:
            table[column].append(row.get(column, math.nan))
        write_csv(self.dir / f"{name}.csv", table)

    def write_checkpoint(self):
        """Write the checkpoint. It holds no environments: training now makes new ones."""
        self.seconds = time.monotonic() - self.begun
        write_csv(self.dir / "episodes.csv", self.episodes)
        state = {name: part.state_dict() for name, part in self.parts.items()}
        write_file(self.dir / f"checkpoint{SUFFIX}", partial(write_state, state))
        self.checkpoint_step = self.step

    def draw_curve(self):
        """Write learning_curve.png: returns, their running mean, evaluations; below, CURVE's metrics."""
        from matplotlib.figure import Figure  # slow to import

        figure = Figure(figsize=(3 * max(3, len(CURVE)), 7), layout="constrained")
        axes = figure.subplot_mosaic([["returns"] * len(CURVE), list(CURVE)], height_ratios=(2, 1))
        top, steps = axes["returns"], self.metrics["step"]
        known = lambda name: zip(*[(x, y) for x, y in zip(steps, self.metrics.get(name, [])) if y == y])
        at, returns, _ = self.episodes.values()
        top.plot(at, returns, ".", alpha=0.25, markersize=3, label="training episode")
        label = f"mean of the last {min(100, self.num_episodes)} episodes"
        top.plot(*known("return_mean"), marker=".", markersize=2, label=label)
        at, _, means, stds = self.evaluations.values()
        top.errorbar(at, means, stds, fmt="o-", capsize=3, label="evaluation, ± one deviation")
        if means and top.dataLim.y0 < -100 * max(1, abs(means[-1])):  # from -11,000 to -13, say
            top.set_yscale("symlog", linthresh=10)
        top.set_title(f"{Path(__file__).name}: {self.args.env_id}, seed {self.args.seed}")
        top.set_ylabel("return before wrappers" if self.args.wrappers else "return")
        top.legend()
        for name, title in CURVE.items():
            axes[name].plot(*known(name), marker=".", markersize=2)  # not NaN, where nothing was logged
            bound = np.fmax.accumulate(self.metrics.get(f"{name}_bound", [math.nan]))
            if bound[-1] < 2 * axes[name].get_ylim()[1]:  # known and near
                axes[name].plot(steps, bound, "--", color="gray")
            axes[name].set(title=title, xlabel="environment steps")
            axes[name].locator_params(axis="x", nbins=3)
        write_file(self.dir / "learning_curve.png", partial(figure.savefig, dpi=120, format="png"))

    def finish(self):
        """Draw the curve, write summary.json, return the summary."""
        if self.step not in self.evaluations["step"]:  # resumed when all was over
            self.write_evaluation()
        self.draw_curve()
        self.bar.close()
        self.envs.close()
        last = {f"eval_{name}": self.evaluations[name][-1] for name in ("return_mean", "return_std")}
        seconds = time.monotonic() - self.begun
        summary = {"global_step": self.step, "seconds": seconds, "run_dir": self.dir.as_posix(), **last}
        write_file(self.dir / "summary.json", lambda file: file.write(json.dumps(summary).encode()))
        if self.step < self.args.total_timesteps:
            print(f"stopped after {self.step:,} steps: stop_at_return {self.args.stop_at_return:g} is reached")
        print(f"last evaluation: {summary['eval_return_mean']:.1f}   curve: {summary['run_dir']}/learning_curve.png")
        return summary


def main():
    """Train or evaluate. What was mistyped is a line on stderr, exit code 2."""
    sys.stdout.reconfigure(errors="replace")  # "?" for what it lacks
    try:
        args = tuned(*sys.argv[1:])
        if not args.evaluate:
            run_dir = train(args)["run_dir"]
            watch = ["python", Path(sys.argv[0]).as_posix(), "--evaluate", run_dir, "--render", *code_flags(args)]
            print(f"to watch the best agent: {shell(watch)}")
            return
        screens = {"DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"}
        if args.render and not args.capture_video and sys.platform == "linux" and not screens & {*os.environ}:
            raise UserError("there is no display for --render; with --capture-video it makes a film")
        agent = load(args.evaluate, args.model, *sys.argv[1:])
        seed = args.seed + 20_000  # not those by which the best weights were chosen
        mean, std = evaluate(agent, args, args.eval_episodes, seed)
        print(f"{args.model} weights: {mean:.2f} ± {std:.2f} over {args.eval_episodes} episodes")
        film = f"{args.evaluate}/videos/{args.model}" if args.capture_video else None
        if film or args.render:
            evaluate(agent, args, 1, seed, args.render, film)
        if film:
            print(f"film: {film}")
    except UserError as error:
        line = " ".join(str(error).split())
        tqdm.write(f"{sys.argv[0]}: {''.join(filter(str.isprintable, line))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("\nstopped: a training goes on from its last checkpoint, if any, with --resume RUN_DIR")


if __name__ == "__main__":
    main()
