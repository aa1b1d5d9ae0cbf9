# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2",
#   "tyro==1.0.17", "tqdm==4.70.1", "moviepy==2.2.1",
# ]
# ///
"""Deterministic policy gradients, DDPG and TD3, all of it, in this one file.

The actor mu picks one action per state, the critic Q says what return to expect of it. Q learns from old transitions
(s, a, r, s') towards the reward plus the discounted value of the actor's next action; mu follows Q's gradient uphill:

    y = r + gamma (1 - terminated) Q'(s', mu'(s')),    L(Q) = E[ (Q(s, a) - y)^2 ],    J(mu) = E[ Q(s, mu(s)) ]

where Q' and mu' follow Q and mu slowly (arXiv 1509.02971). The actor finds every error of Q that looks like a high
value. TD3 is DDPG plus three tricks against that: noise on mu'(s') smooths Q', of two critics the lower value counts,
and the actor and all targets move less often than the critics.

    python ddpg_td3.py                                      # Pendulum-v1 with TD3, a minute
    python ddpg_td3.py --algorithm ddpg                     # without the three tricks
    python ddpg_td3.py --evaluate runs/DIR --render         # watch what a run has left behind

Papers: DDPG arXiv 1509.02971, TD3 arXiv 1802.09477.
The story ends at "# ===== helpers"; the code below it makes environments, keeps the run folder and draws the curve.
"""

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
from collections import namedtuple
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass
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
from torch import nn
from tqdm import tqdm


@dataclass(kw_only=True)
class Args:
    """Every flag and its default. For some environments, the default one included, TUNED (below) replaces some."""

    # run
    env_id: str = "Pendulum-v1"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers, applied in order
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    total_timesteps: int = 1_000_000  # environment steps to train for (resets do not count)
    stop_at_return: float | None = None  # stop once an evaluation reaches this (training episodes explore)
    seed: int = 1  # seed of everything that is drawn at random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps; auto: CUDA for images if there is one, else the CPU
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, on separate environments, without noise
    capture_video: bool = False  # film an episode at each evaluation
    checkpoint_every: int = 0  # steps between checkpoints, at which all episodes begin anew; 0: a sensible interval
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # weights that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window
    config: str | None = None  # config.json of an earlier run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__SCRIPT__SEED__TIME
    progress: bool = True  # show the progress bar
    # algorithm
    algorithm: Literal["td3", "ddpg"] | None = None  # sets the next three, TD3's tricks; None: as tuned, else td3
    target_noise: float = 0.2  # the first trick: deviation of the noise on the target's actions; DDPG: 0, or as tuned
    twin_q: bool = True  # the second: two critics, of whose target values the lower one counts; DDPG: one critic
    policy_frequency: int = 2  # the third: critic updates per update of the actor and of all targets; DDPG: 1
    noise_clip: float = 0.5  # bound of the noise on the target's actions
    actor_learning_rate: float = 3e-4  # Adam's learning rate for the actor
    critic_learning_rate: float = 3e-4  # Adam's learning rate for the critics
    anneal_lr: bool = False  # lower both learning rates linearly to zero
    num_envs: int = 1  # environments played side by side
    buffer_size: int = 1_000_000  # transitions to keep
    batch_size: int = 256  # transitions per update
    learning_starts: int = 1_000  # steps with uniformly random actions; updates begin once batch_size are stored too
    train_frequency: int = 1  # steps (over all environments) from one round of updates to the next
    gradient_steps: int = 1  # critic updates per round
    gamma: float = 0.99  # discount
    tau: float = 0.005  # how far the targets move towards the networks in one update
    noise: Literal["gaussian", "ou"] = "gaussian"  # exploration: independent, or (ou) correlated over time
    exploration_noise: float = 0.1  # deviation of what is drawn in each step; 1 is half an action's range
    ou_theta: float = 0.15  # share of ou noise that fades in a step; at 0.15 its deviation grows to 1.9 x the above
    hidden_sizes: tuple[int, ...] = (256, 256)  # sizes of the actor's hidden layers
    critic_hidden_sizes: tuple[int, ...] | None = None  # sizes of each critic's; None: as the actor's
    max_grad_norm: float | None = None  # gradients longer than this are scaled down to it
    normalize_obs: bool = False  # normalise observations (vectors) by their running mean and standard deviation
    normalize_reward: bool = False  # divide rewards by the running deviation of the discounted return, clip to ±10
    bf16: bool = False  # networks compute in bfloat16 during updates: faster where the processor has it


# ------------------------------------------------------------------------------------------------------- networks


def uniform_mlp(inputs, hidden_sizes, outputs):
    """Linear layers with ReLU between them. They start from ±1/sqrt(inputs), as nn.Linear has it."""
    layers = []
    for size in hidden_sizes:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


def encoder(observation_space):
    """(what comes before an MLP, its outputs): a CNN for images, nothing for vectors."""
    if is_image(observation_space):
        return NatureCNN(observation_space.shape), 512
    return nn.Identity(), math.prod(observation_space.shape)


class Actor(nn.Module):
    """mu(s): one action in [-1, 1]^D for each state."""

    def __init__(self, observation_space, action_space, hidden_sizes):
        super().__init__()
        self.encoder, features = encoder(observation_space)
        self.mlp = uniform_mlp(features, hidden_sizes, math.prod(action_space.shape))

    def forward(self, obs):
        """Actions (B, D) of observations (B, …)."""
        return self.mlp(self.encoder(obs)).tanh()


class Critic(nn.Module):
    """Q(s, a): the discounted return to expect after action a in state s."""

    def __init__(self, observation_space, action_space, hidden_sizes):
        super().__init__()
        self.encoder, features = encoder(observation_space)
        self.mlp = uniform_mlp(features + math.prod(action_space.shape), hidden_sizes, 1)

    def forward(self, obs, actions):
        """Values (B,) of observations (B, …) and actions (B, D)."""
        return self.mlp(torch.cat([self.encoder(obs), actions], dim=1)).squeeze(1)


class ActorCritic(nn.Module):
    """The actor mu, one or two critics Q, and the targets mu' and Q', which follow them slowly.

    Everywhere but in the environment, actions are (B, D) in [-1, 1]: so noise means the same in every dimension, and
    the critics see numbers of one size.
    """

    def __init__(self, observation_space, action_space, args, device="cpu"):
        super().__init__()
        self.device = device
        self.action_space = action_space
        self.action_dimensions = math.prod(action_space.shape)
        self.image = is_image(observation_space)
        self.bf16 = args.bf16
        critic_sizes = args.hidden_sizes if args.critic_hidden_sizes is None else args.critic_hidden_sizes
        self.actor = Actor(observation_space, action_space, args.hidden_sizes)
        self.critics = nn.ModuleList([Critic(observation_space, action_space, critic_sizes)])
        if args.twin_q:  # with weights of its own: a copy of the first would learn the same
            self.critics.append(Critic(observation_space, action_space, critic_sizes))
        self.target_actor = copy.deepcopy(self.actor)
        self.target_critics = copy.deepcopy(self.critics)
        self.to(device)
        # Created after the move, so that they stay on the CPU: they are float64, which some devices lack.
        self.obs_stats = RunningMeanStd(math.prod(observation_space.shape)) if args.normalize_obs else None
        self.return_stats = RunningMeanStd() if args.normalize_reward else None
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))  # critic updates so far

    def mixed_precision(self):
        """A context in which matrix products are done in bfloat16, with --bf16; else one that does nothing."""
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.bf16)

    def observe(self, obs):
        """What the networks see of a tensor of observations (B, …): images as they are, vectors flat and normalised."""
        if self.image:
            return obs
        obs = obs.reshape(len(obs), -1).float()
        return obs if self.obs_stats is None else self.obs_stats(obs)

    def normalized(self, batch):
        """Transitions as the networks see them, rewards divided by the running deviation of the discounted return."""
        rewards = batch.rewards
        if self.return_stats is not None:
            rewards = (rewards / math.sqrt(self.return_stats.var.item() + 1e-8)).clamp(-10, 10)
        return batch._replace(obs=self.observe(batch.obs), next_obs=self.observe(batch.next_obs), rewards=rewards)

    def update_statistics(self, obs, rewards, discounted_returns, reset_rows, gamma):
        """Add a step of all environments, each argument (N, …), to the statistics of the two --normalize- flags.

        Returns G_t = r_t + gamma G_{t-1} (N,), `discounted_returns` being G_{t-1}: sums of past rewards, not future
        ones, for only their deviation is used, as the scale of returns.
        """
        discounted_returns = rewards + gamma * discounted_returns
        discounted_returns[reset_rows] = 0
        if self.obs_stats is not None:
            self.obs_stats.update(obs.reshape(len(obs), -1)[~reset_rows])
        if self.return_stats is not None:
            self.return_stats.update(discounted_returns[~reset_rows])
        return discounted_returns

    @torch.no_grad()
    def policy(self, obs):
        """mu(s), a NumPy array (B, D), for a NumPy array of observations (B, …)."""
        dtype = torch.uint8 if self.image else torch.float32
        obs = torch.as_tensor(obs, dtype=dtype, device=self.device)
        return self.actor(self.observe(obs)).cpu().numpy()

    def act(self, obs):
        """What the policy does without noise, as the environment takes it: evaluations call this."""
        return self.to_env(self.policy(obs))

    def to_env(self, actions):
        """Actions (B, D) as the environment takes them: [-1, 1] stretched to its bounds, in its shape and type."""
        space = self.action_space
        low = space.low.astype(np.float64)
        high = space.high.astype(np.float64)
        share = (actions.reshape(-1, *space.shape) + 1) / 2
        actions = np.clip(low + share * (high - low), low, high)
        if np.issubdtype(space.dtype, np.integer):
            actions = np.rint(actions)
        return actions.astype(space.dtype)


# ---------------------------------------------------------------------------------------------------- exploration


def next_noise(noise, reset_rows, args, rng):
    """Noise (N, D) on the actions of this step, made from that of the step before.

    x <- (1 - theta) x + sigma N(0, 1): Ornstein-Uhlenbeck noise (arXiv 1509.02971, section 7), which pushes one way for
    about 1 / theta steps. With theta = 1 nothing of x is left: independent Gaussian noise.
    """
    theta = args.ou_theta if args.noise == "ou" else 1.0
    noise = (1 - theta) * noise + args.exploration_noise * rng.standard_normal(noise.shape)
    noise[reset_rows] = 0  # the action of a reset row is ignored: the next one is an episode's first
    return noise


# -------------------------------------------------------------------------------------------------- replay buffer

Transitions = namedtuple("Transitions", "obs actions rewards next_obs terminated")  # tensors (B, …)


class ReplayBuffer:
    """The last `capacity` transitions, first in, first out, sampled uniformly; in host memory, uint8 stays uint8.

    After an episode's end the next step only resets its environment (next-step autoreset). Its action is ignored:

        obs               action   reward  next_obs               terminated  reset row
        s0                a0       r0      s1                     no          no
        s1                a1       r1      s2, the final one      yes         no
        s2                ignored  0       s0 of the next one     no          yes: not stored

    So each stored next_obs is the true one. A terminated transition has no future. A truncated one has: its target goes
    on from next_obs as any other's does, so `truncated` is not stored.
    """

    def __init__(self, capacity, observation_space, action_space, device="cpu"):
        shape = observation_space.shape
        D = math.prod(action_space.shape)  # 1 for Discrete, whose shape is ()
        obs_dtype = np.uint8 if observation_space.dtype == np.uint8 else np.float32
        action_dtype = np.float32 if isinstance(action_space, spaces.Box) else np.int64
        self.obs = np.zeros((capacity, *shape), obs_dtype)
        self.actions = np.zeros((capacity, D), action_dtype)
        self.rewards = np.zeros(capacity, np.float32)
        self.next_obs = np.zeros((capacity, *shape), obs_dtype)
        self.terminated = np.zeros(capacity, bool)
        self.capacity = capacity
        self.device = device
        self.size = 0  # transitions stored so far
        self.position = 0  # slot that is written next

    def add(self, obs, actions, rewards, terminated, truncated, reset_rows, next_obs):
        """Store a step of all environments, each argument (N, …), without reset rows. Returns the slots written.

        Actions are (N, D); `truncated` is not needed (see above). N must not exceed the capacity.
        """
        played = ~reset_rows
        count = int(played.sum())
        slots = (self.position + np.arange(count)) % self.capacity
        self.obs[slots] = obs[played]
        self.actions[slots] = actions[played]
        self.rewards[slots] = rewards[played]
        self.next_obs[slots] = next_obs[played]
        self.terminated[slots] = terminated[played]
        self.position = (self.position + count) % self.capacity
        self.size = min(self.size + count, self.capacity)
        return slots

    def get(self, slots):
        """The Transitions in these slots, on the device."""
        arrays = [getattr(self, name)[slots] for name in Transitions._fields]
        return Transitions(*[torch.as_tensor(array, device=self.device) for array in arrays])

    def sample(self, batch_size, rng):
        """Transitions drawn uniformly, with replacement. ValueError if fewer are stored than are asked for."""
        if batch_size > self.size:
            raise ValueError(f"cannot sample {batch_size} of {self.size} stored transitions")
        return self.get(rng.integers(self.size, size=batch_size))

    def state_dict(self):
        """What is stored, for a checkpoint."""
        filled = {name: torch.from_numpy(getattr(self, name)[: self.size]) for name in Transitions._fields}
        return {"size": self.size, "position": self.position, **filled}

    def load_state_dict(self, state):
        """Copy what state_dict returned."""
        self.size = int(state["size"])
        self.position = int(state["position"])
        for name in Transitions._fields:
            getattr(self, name)[: self.size] = np.asarray(state[name])


# -------------------------------------------------------------------------------------------- targets and losses


def smoothed(actions, noise, clip):
    """Target policy smoothing: mu'(s') + clip(epsilon, -c, c), within [-1, 1]   (arXiv 1802.09477, section 5.3)."""
    return (actions + noise.clamp(-clip, clip)).clamp(-1, 1)


def critic_targets(rewards, next_values, terminated, gamma):
    """y (B,) = r + gamma (1 - terminated) min_k Q'_k(s', a'), from target values (K, B)   (arXiv 1802.09477, eq. 10).

    With K = 1 it is DDPG's target (arXiv 1509.02971, algorithm 1).
    """
    return rewards + gamma * next_values.amin(0) * ~terminated


def critic_loss(values, targets):
    """The sum over critics of the mean of (Q_k(s, a) - y)^2, for values (K, B) and targets (B,)."""
    return ((values - targets) ** 2).mean(1).sum()


def actor_loss(actor, critic, obs):
    """-mean Q(s, mu(s)): its gradient is that of the deterministic policy, negated (arXiv 1509.02971, eq. 6)."""
    return -critic(obs, actor(obs)).mean()


@torch.no_grad()
def polyak(target, source, tau):
    """target <- tau source + (1 - tau) target, for all weights of two networks (arXiv 1509.02971, algorithm 1)."""
    for target_weights, weights in zip(target.parameters(), source.parameters()):
        target_weights.lerp_(weights, tau)


# ------------------------------------------------------------------------------------------------------- training


def updates_due(step_before, step, args):
    """How many critic updates the steps from step_before + 1 to `step` bring.

    Steps of all environments count, so the ratio of updates to steps does not depend on how many there are.
    """
    due = 0
    for taken in range(step_before + 1, step + 1):
        enough = taken > max(args.learning_starts, args.batch_size)  # the buffer must hold a batch
        if enough and taken % args.train_frequency == 0:
            due += args.gradient_steps
    return due


def bellman_targets(agent, batch, args, rng):
    """What the critics learn, y (B,): critic_targets of a' = mu'(s'), with the first two of TD3's three tricks."""
    with torch.no_grad():
        next_actions = agent.target_actor(batch.next_obs)
        if args.target_noise > 0:  # TD3, trick 1: target policy smoothing
            noise = args.target_noise * rng.standard_normal(next_actions.shape, np.float32)
            next_actions = smoothed(next_actions, torch.as_tensor(noise, device=agent.device), args.noise_clip)
        # TD3, trick 2: clipped double Q. Of the values of two critics (DDPG: one), critic_targets takes the lower.
        next_values = [critic(batch.next_obs, next_actions) for critic in agent.target_critics]
        return critic_targets(batch.rewards, torch.stack(next_values), batch.terminated, args.gamma)


def train(args):
    """Train with `args`; return the final figures, which summary.json holds as well. UserError on bad input."""
    check_args(args)
    check_algorithm(args)  # --algorithm has set target_noise, twin_q and policy_frequency already: see ALGORITHMS
    envs = make_envs(args, args.num_envs)
    agent = make_agent(args, envs)
    buffer = make_replay_buffer(args, envs, agent)
    actor_optimizer = Adam(agent.actor.parameters(), lr=args.actor_learning_rate)
    critic_optimizer = Adam(agent.critics.parameters(), lr=args.critic_learning_rate)
    parts = {"buffer": buffer, "actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}
    log_every = math.ceil(args.total_timesteps / 200)
    run = Run(args, agent, envs, log_every, explores=True, **parts)  # explores: only evaluations say how good it is

    while not run.is_finished():
        if run.restarts:  # at the start, and after each checkpoint, which holds no episodes: all begin anew
            envs, obs, rng = run.new_envs()  # the first time: those made above
            reset_rows = np.zeros(args.num_envs, bool)  # whether the next step only resets an environment
            noise = np.zeros((args.num_envs, agent.action_dimensions))
            discounted_returns = np.zeros(args.num_envs)
        if args.anneal_lr:
            actor_optimizer.param_groups[0]["lr"] = args.actor_learning_rate * (1 - run.step / args.total_timesteps)
            critic_optimizer.param_groups[0]["lr"] = args.critic_learning_rate * (1 - run.step / args.total_timesteps)
        step_before = run.step
        noise = next_noise(noise, reset_rows, args, rng)
        if run.step < args.learning_starts:
            actions = rng.uniform(-1, 1, noise.shape)
        else:
            actions = np.clip(agent.policy(obs) + noise, -1, 1)
        next_obs, rewards, terminated, truncated, _ = envs.step(agent.to_env(actions))
        buffer.add(obs, actions, rewards, terminated, truncated, reset_rows, next_obs)
        run.count(next_obs, rewards, terminated | truncated, reset_rows)  # advances run.step; not for reset rows
        discounted_returns = agent.update_statistics(obs, rewards, discounted_returns, reset_rows, args.gamma)
        obs = next_obs
        reset_rows = terminated | truncated

        for _ in range(updates_due(step_before, run.step, args)):
            agent.updates += 1
            batch = agent.normalized(buffer.sample(args.batch_size, rng))
            with agent.mixed_precision():
                targets = bellman_targets(agent, batch, args, rng)
                values = torch.stack([critic(batch.obs, batch.actions) for critic in agent.critics])
            loss = critic_loss(values, targets)
            critic_optimizer.zero_grad()
            loss.backward()
            if args.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(agent.critics.parameters(), args.max_grad_norm)
            critic_optimizer.step()
            run.log(critic_loss=loss.detach(), value_mean=values.detach().mean())
            if agent.updates % args.policy_frequency == 0:  # TD3, trick 3: delayed updates of the actor and all targets
                with agent.mixed_precision():
                    loss = actor_loss(agent.actor, agent.critics[0], batch.obs)  # TD3: by the first critic
                actor_optimizer.zero_grad()
                loss.backward(inputs=list(agent.actor.parameters()))  # gradients for the actor only
                if args.max_grad_norm is not None:
                    nn.utils.clip_grad_norm_(agent.actor.parameters(), args.max_grad_norm)
                actor_optimizer.step()
                polyak(agent.target_actor, agent.actor, args.tau)
                polyak(agent.target_critics, agent.critics, args.tau)
                run.log(actor_loss=loss.detach())
        run.figures["updates"] = [agent.updates]  # run.log would average it over the row
        run.write_what_is_due()  # a row of metrics.csv, an evaluation, a checkpoint
    return run.finish()


# ===== helpers: settings, parts of the networks, Adam, environments ===================================================

COUNTS = "buffer_size batch_size train_frequency gradient_steps policy_frequency".split()
RANGES = dict.fromkeys(COUNTS, (1, 1e15)) | dict.fromkeys(("gamma", "tau", "ou_theta"), (0, 1))
RANGES |= dict.fromkeys(("hidden_sizes", "critic_hidden_sizes"), (1, 1e5))
# The columns of metrics.csv that are this script's own, and those of them that the learning curve shows as well.
FIGURES = ["updates", "critic_loss", "value_mean", "actor_loss"]
CURVE = ["critic_loss", "actor_loss"]

# What makes TD3 of DDPG: the settings of three flags, each of which can also be given by itself.
ALGORITHMS = {
    "td3": {"target_noise": 0.2, "twin_q": True, "policy_frequency": 2},
    "ddpg": {"target_noise": 0.0, "twin_q": False, "policy_frequency": 1},
}
# Settings that learn, per environment. What the user gives wins. docs/ddpg_td3.md says what they were tried on.
SMALL = {"algorithm": "td3", "hidden_sizes": (64, 64), "actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3}
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
    # CleanRL's settings
    "HalfCheetah-v5": {"algorithm": "td3", "learning_starts": 25_000, "total_timesteps": 1_000_000},
}  # fmt: skip


def algorithm_settings(args):
    """What makes args.algorithm, and the settings of TUNED for args.env_id.

    These may have a mixture of their own for one of the algorithms; whoever asks for the other gets that as it is.
    """
    settings = TUNED.get(args.env_id, {})
    algorithm = args.algorithm or settings.get("algorithm")
    if algorithm is None:  # neither asked for nor tuned: the plain defaults are TD3's
        return settings
    if algorithm == settings.get("algorithm"):
        return ALGORITHMS[algorithm] | settings
    return settings | {"algorithm": algorithm} | ALGORITHMS[algorithm]


tuned_settings = algorithm_settings  # as the run section calls it


def check_algorithm(args):
    """UserError if --algorithm is not what the settings say: in Args(algorithm="ddpg"), or beside --config."""
    for name, settings in ALGORITHMS.items():
        given = {key: getattr(args, key) for key in settings}
        if args.algorithm not in (None, name) and given == settings:
            wanted = " ".join(as_flags(ALGORITHMS[args.algorithm]))
            raise UserError(f"algorithm is {args.algorithm}, but the settings are those of {name}: give {wanted}")


class RunningMeanStd(nn.Module):
    """Mean and variance of all rows seen so far. A module, so that every saved model holds them."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def update(self, rows):
        """Merge `rows` (B, *shape), a NumPy array (Chan, Golub & LeVeque 1979, eq. 2.1)."""
        if len(rows) == 0:
            return
        rows = torch.as_tensor(rows, dtype=torch.float64, device=self.mean.device)
        total = self.count + len(rows)
        delta = rows.mean(0) - self.mean
        squares = self.var * self.count + rows.var(0, correction=0) * len(rows)
        squares += delta**2 * self.count * len(rows) / total
        self.mean += delta * len(rows) / total
        self.var.copy_(squares / total)
        self.count.copy_(total)

    def forward(self, x):
        """Normalise (B, *shape), clip to ±10."""
        mean = self.mean.to(x.device, torch.float32)
        std = (self.var + 1e-8).sqrt().to(x.device, torch.float32)
        return ((x - mean) / std).clamp(-10, 10)


class NatureCNN(nn.Module):
    """The network for images of DQN (Mnih et al. 2015, doi 10.1038/nature14236): (B, *shape) of bytes -> (B, 512)."""

    def __init__(self, shape):
        super().__init__()
        self.channels_last = shape[2] == min(shape)
        channels, height, width = (shape[2], shape[0], shape[1]) if self.channels_last else shape
        self.convolutions = nn.Sequential(
            layer(nn.Conv2d(channels, 32, kernel_size=8, stride=4)),
            nn.ReLU(),
            layer(nn.Conv2d(32, 64, kernel_size=4, stride=2)),
            nn.ReLU(),
            layer(nn.Conv2d(64, 64, kernel_size=3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
        )
        outputs = self.convolutions(torch.zeros(1, channels, height, width)).shape[1]
        self.linear = layer(nn.Linear(outputs, 512))

    def forward(self, images):
        """Features of images whose channels come first or last."""
        if self.channels_last:
            images = images.movedim(-1, -3)
        return self.linear(self.convolutions(images / 255)).relu()


def layer(module, gain=2**0.5):
    """Give a linear or convolutional layer orthogonal weights, scaled by `gain`, and zero biases; return it."""
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


def is_image(space):
    """Whether a Box holds images (uint8, channels first or last) that are large enough for the CNN."""
    return space.dtype == np.uint8 and len(space.shape) == 3 and sorted(space.shape)[1] >= 36


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


def choose_device(args, image=False):
    """The device that args.device means, and torch's threads set to match. UserError if there is no such device."""
    automatic = "cuda" if image and torch.cuda.is_available() else "cpu"
    device = automatic if args.device == "auto" else args.device
    with blame(f"device {device}", RuntimeError, AssertionError, ImportError):
        torch.zeros(1, device=device).item()
    torch.set_num_threads(os.cpu_count() if image else 1)  # small matrices are slower on more than one
    return device


def check_memory(what, size):
    """UserError if this machine has no `size` bytes of memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise UserError(f"{what} would need {size / 1e9:,.0f} GB of memory; there are {memory / 1e9:.0f}")


def make_actor_critic(args, envs):
    """An untrained ActorCritic for these environments. UserError if it cannot handle a space or the device."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(action_space, spaces.Box) or math.prod(action_space.shape) == 0:
        script = "dqn.py or ppo.py" if isinstance(action_space, spaces.Discrete) else "ppo.py"
        raise UserError(f"{args.env_id} has {action_space}; this script needs Box actions: use {script}")
    with np.errstate(over="ignore"):
        width = action_space.high.astype(float) - action_space.low
    if not action_space.is_bounded() or not np.isfinite(width).all():
        wanted = "bounded actions: use ppo.py or --wrappers"
        raise UserError(f"{args.env_id} has {action_space}; this script needs {wanted}")
    image = isinstance(obs_space, spaces.Box) and is_image(obs_space)
    size = math.prod(obs_space.shape) if isinstance(obs_space, spaces.Box) else 0
    if size == 0 or (obs_space.dtype == np.uint8 and size > 1_000 and not image):
        wanted = "vectors, or images of three dimensions and at least 36 x 36 pixels: use --wrappers"
        raise UserError(f"{args.env_id} has observations {obs_space}; this script needs {wanted}")
    if image and args.normalize_obs:
        raise UserError("normalize_obs is for vectors: images are always scaled to [0, 1]")
    device = choose_device(args, image)
    with torch.device("meta"):  # counts the weights without making them
        weights = sum(p.numel() for p in ActorCritic(obs_space, action_space, args, "meta").parameters())
    check_memory("the networks", 16 * weights)  # with gradients and Adam's moments
    torch.manual_seed(args.seed)
    agent = ActorCritic(obs_space, action_space, args, device)
    agent.args = args  # for evaluate(agent, agent.args) in a notebook
    return agent


make_agent = make_actor_critic  # as the run section calls it


def make_replay_buffer(args, envs, agent):
    """The replay buffer that `args` ask for. UserError if it holds too little, or does not fit into memory."""
    least = max(args.batch_size, args.num_envs)
    if args.buffer_size < least:
        raise UserError(f"buffer_size = {args.buffer_size} is less than batch_size or num_envs = {least}")
    space = envs.single_observation_space
    size = 1 if space.dtype == np.uint8 else 4
    actions = max(2, math.prod(envs.single_action_space.shape))  # a discrete one has eight bytes
    row = 2 * math.prod(space.shape) * size + 4 * actions + 5
    check_memory(f"the replay buffer of --buffer-size {args.buffer_size}", args.buffer_size * row)
    return ReplayBuffer(args.buffer_size, space, envs.single_action_space, agent.device)


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
