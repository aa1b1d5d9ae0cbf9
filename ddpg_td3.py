# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.3,<2", "ufal-pybox2d>=2.3.10.5",
#   "numpy>=1.26", "matplotlib>=3.8", "tyro>=1.0", "tqdm>=4.66", "moviepy>=2.0",
# ]
# ///
"""Deep deterministic policy gradient (DDPG) and TD3, all of it, in this one file.

The actor mu(s) picks one action per state, and the critic Q(s, a) predicts the return that follows
it. Transitions (s, a, r, s') are drawn from a replay buffer. Gradient descent on L(Q) moves Q towards
the target y, and gradient ascent on J improves mu:

    y = r + gamma (1 - terminated) Q'(s', mu'(s'))   (arXiv 1509.02971, algorithm 1)
    L(Q) = E[ (Q(s, a) - y)^2 ],   J(mu) = E[ Q(s, mu(s)) ]

In L, no gradient flows through y. The target networks Q' and mu' follow Q and mu slowly. If Q
overrates an action, mu learns to take it, and y passes the error on. TD3 adds three tricks against
that: noise on mu'(s') blurs narrow peaks of Q', y uses the lower value of two critics, and the
actor and the target networks are updated less often than the critics.

    python ddpg_td3.py                                # Pendulum-v1 with TD3, a minute
    python ddpg_td3.py --algorithm ddpg               # Pendulum-v1 with DDPG: without the three tricks
    python ddpg_td3.py --evaluate runs/DIR --render   # watch the trained agent

Papers: DDPG arXiv 1509.02971 (here with all other settings of TD3), TD3 arXiv 1802.09477.
The algorithm ends at "# ===== helpers". In shapes, B is the number of rows in a batch, D of action
dimensions, N of environments and K of critics.
"""

import ast
import copy
import importlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections import namedtuple
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
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
    """Every flag and its default; TUNED (below) has others, as for Pendulum-v1. A given flag wins."""

    # algorithm
    algorithm: Literal["td3", "ddpg"] | None = None  # sets the next three; None: as TUNED says, else TD3
    target_noise: float = 0.2  # trick 1: standard deviation of the noise on mu'(s'); DDPG: 0
    twin_q: bool = True  # trick 2: the target y uses the lower value of two critics; DDPG: one critic
    policy_frequency: int = 2  # trick 3: critic updates per update of mu, mu' and Q'; DDPG: 1
    noise_clip: float = 0.5  # trick 1: the noise is clipped to ± this; 1 is half an action's range
    actor_learning_rate: float = 3e-4  # Adam's learning rate for the actor
    critic_learning_rate: float = 3e-4  # Adam's learning rate for the critics
    anneal_lr: bool = False  # lower both learning rates linearly to zero
    max_grad_norm: float | None = None  # gradients of larger norm are scaled down to it; None: off
    num_envs: int = 1  # environments played side by side
    buffer_size: int = 1_000_000  # transitions in the replay buffer, and in each checkpoint
    batch_size: int = 256  # transitions per update
    learning_starts: int = 1_000  # steps with uniformly random actions; then updates, once batch_size steps are stored
    train_frequency: int = 1  # steps (over all environments) from one round of updates to the next
    gradient_steps: int = 2  # critic updates per round; the papers: 1, which learns less per step
    gamma: float = 0.99  # discount
    tau: float = 0.005  # each update of a target network: target <- tau network + (1 - tau) target
    noise: Literal["gaussian", "ou"] = "gaussian"  # independent draws, or noise that lasts (ou)
    exploration_noise: float = 0.3  # its deviation per step (TD3's paper: 0.1); 1 is half an action's range
    ou_theta: float = 0.15  # share of ou noise lost per step; with 0.15 its deviation grows to 1.9 times a draw's
    hidden_sizes: tuple[int, ...] = (256, 256)  # of actor and critics, as --hidden-sizes 64 64
    normalize_obs: bool = False  # normalise observations (vectors) by their running mean and standard deviation
    normalize_reward: bool = False  # divide rewards by the standard deviation of their discounted sum; at most ±10
    checkpoint_every: int = 0  # steps between checkpoints, which restart all episodes; 0: 5,000 * num_envs or more
    # run
    env_id: str = "Pendulum-v1"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths, applied in order; with arguments: a.B(size=4)
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    async_envs: bool = False  # a process for each environment: for environments slower than 1 ms a step
    total_timesteps: int = 1_000_000  # environment steps to train for at least; resets do not count
    stop_at_return: float | None = None  # stop once the mean return of an evaluation reaches this
    seed: int = 1  # seed of everything that is drawn at random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps; auto: CUDA for images if there is one
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, apart from training, without exploration
    capture_video: bool = False  # film an episode at each evaluation
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # weights that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window; with --capture-video, film it instead
    config: str | None = None  # config.json of another run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__SCRIPT__SEED__TIME
    progress: bool = True  # show the progress bar


# ----------------------------------------------------------------------------------------- networks
def uniform_mlp(inputs, hidden_sizes, outputs):
    """Linear layers with ReLU between them; nn.Linear's weights are uniform in ±1/sqrt(inputs)."""
    layers = []
    for size in hidden_sizes:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


def encoder(observation_space):
    """(network before the MLP, number of its outputs): a CNN for images, nn.Identity for vectors."""
    if is_image(observation_space):
        return NatureCNN(observation_space.shape), 512
    return nn.Identity(), math.prod(observation_space.shape)


class Actor(nn.Module):
    """mu(s): one action in [-1, 1]^D for each state."""

    def __init__(self, observation_space, action_space, args):
        super().__init__()
        self.encoder, features = encoder(observation_space)
        self.mlp = uniform_mlp(features, args.hidden_sizes, math.prod(action_space.shape))

    def forward(self, obs):
        """Actions (B, D) for observations (B, …)."""
        return self.mlp(self.encoder(obs)).tanh()


class Critic(nn.Module):
    """Q(s, a): the return to expect after action a in state s. In SAC, with later entropy bonuses."""

    def __init__(self, observation_space, action_space, args):
        super().__init__()
        self.encoder, features = encoder(observation_space)
        inputs = features + math.prod(action_space.shape)
        self.mlp = uniform_mlp(inputs, args.hidden_sizes, 1)

    def forward(self, obs, actions):
        """Values (B,) of observations (B, …) and actions (B, D)."""
        return self.mlp(torch.cat([self.encoder(obs), actions], dim=1)).squeeze(1)


class ActorCritic(nn.Module):
    """The actor mu, one or two critics Q, and the target networks mu' and Q', which follow slowly.

    Actions are (B, D) in [-1, 1] everywhere except in the environment. So noise of one size suits
    every dimension, and the critics see all actions on the same scale.
    """

    def __init__(self, observation_space, action_space, args, device="cpu"):
        super().__init__()
        self.args = args
        self.device = device
        self.observation_shape = observation_space.shape
        self.action_space = action_space
        self.action_dimensions = math.prod(action_space.shape)
        self.action_scale, self.action_bias = scale_and_bias(action_space)
        self.image = is_image(observation_space)
        self.actor = Actor(observation_space, action_space, args)
        num_critics = 2 if args.twin_q else 1  # drawn separately: equal critics would stay equal
        self.critics = nn.ModuleList(Critic(observation_space, action_space, args) for _ in range(num_critics))
        self.target_actor = copy.deepcopy(self.actor)
        self.target_critics = copy.deepcopy(self.critics)
        self.to(device)
        # Created after the move, so that its float64 stays on the CPU: some devices lack that type.
        inputs = math.prod(observation_space.shape)
        self.obs_stats = RunningMeanStd(inputs) if args.normalize_obs else None
        self.return_stats = RunningMeanStd() if args.normalize_reward else None

    def observe(self, obs):
        """Observations (B, …) for the networks: vectors flat, normalised if asked; images as is."""
        if self.image:
            return obs
        obs = obs.reshape(len(obs), -1).float()
        return obs if self.obs_stats is None else self.obs_stats(obs)

    def observe_batch(self, batch):
        """A batch as the networks get it: observations by `observe`, rewards scaled if args say so.

        The buffer keeps them raw. So old ones, too, are normalised by the newest statistics.
        """
        rewards = batch.rewards
        if self.return_stats is not None:
            std = math.sqrt(self.return_stats.var.item() + 1e-8)
            rewards = (rewards / std).clamp(-10, 10)
        obs, next_obs = self.observe(batch.obs), self.observe(batch.next_obs)
        return batch._replace(obs=obs, rewards=rewards, next_obs=next_obs)

    def update_statistics(self, obs, discounted_returns):
        """Add a step's obs (B, …) and discounted sums of past rewards (B,) to the running statistics."""
        if self.obs_stats is not None:
            self.obs_stats.update(obs)
        if self.return_stats is not None:
            self.return_stats.update(discounted_returns)

    @torch.inference_mode()  # as no_grad, but faster
    def explore(self, obs, noise):
        """mu(s) + noise, clipped to [-1, 1], as an array (B, D), for an array of observations (B, …)."""
        dtype = torch.uint8 if self.image else torch.float32
        obs = torch.as_tensor(obs, dtype=dtype, device=self.device)
        actions = self.actor(self.observe(obs)).cpu().numpy()
        return np.clip(actions + noise, -1, 1)

    def act(self, obs):
        """Actions without noise for observations (B, …), as the environment takes them."""
        if obs.shape[1:] != self.observation_shape:
            raise ValueError("act takes a batch of observations; for one, it is act(obs[None])[0]")
        return self.to_env(self.explore(obs, noise=0))

    def to_env(self, actions):
        """Actions (B, D) in [-1, 1] as the environment takes them, in its bounds, shape and type."""
        space = self.action_space
        actions = self.action_scale * actions + self.action_bias
        actions = actions.reshape(-1, *space.shape)
        return np.clip(actions, space.low, space.high).astype(space.dtype)  # rounding may overstep


# -------------------------------------------------------------------------------------- exploration
def next_noise(noise, reset_rows, args, rng):
    """This step's noise (N, D) for `explore`: Gaussian, or made from the noise of the step before.

        x <- (1 - theta) x + scale N(0, 1)   (arXiv 1509.02971, section 7, in steps of 1)

    Here scale is exploration_noise. This Ornstein-Uhlenbeck (ou) noise x keeps its direction for
    about 1 / theta steps. So the agent tries the same thing several times in a row.
    """
    draws = args.exploration_noise * rng.standard_normal(noise.shape)
    if args.noise == "gaussian":
        return draws
    noise = (1 - args.ou_theta) * noise + draws
    noise[reset_rows] = 0  # reset rows (see ReplayBuffer): the new episode's noise starts from 0
    return noise


# ------------------------------------------------------------------------------------ replay buffer

Transitions = namedtuple("Transitions", "obs actions rewards next_obs terminated")  # tensors (B, …)


class ReplayBuffer:
    """The last `capacity` transitions, in CPU memory. New ones replace the oldest.

    After an episode's end, the next step only resets the environment (next-step autoreset). That
    step's row is called a reset row here. The action in it is ignored:

        obs    action   reward  next_obs               terminated  reset row
        s0     a0       r0      s1                     no          no
        s1     a1       r1      s2, the final one      yes         no
        s2     ignored  0       s0, the next episode   no          yes: not stored

    So each stored next_obs truly follows its obs. Targets bootstrap from next_obs unless the transition
    terminated, so no column says what was truncated. uint8 observations stay uint8.
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
        self.size = 0  # transitions stored now
        self.position = 0  # slot that is written next

    def add(self, obs, actions, rewards, next_obs, terminated, reset_rows):
        """Store a step of all N environments, except reset rows."""
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

    def get(self, slots):
        """The Transitions in these slots, on the device."""
        arrays = [getattr(self, name)[slots] for name in Transitions._fields]
        return Transitions(*[torch.as_tensor(array, device=self.device) for array in arrays])

    def sample(self, batch_size, rng):
        """Transitions drawn uniformly, with replacement. ValueError if fewer are stored."""
        if batch_size > self.size:
            raise ValueError(f"cannot sample {batch_size} of {self.size} stored transitions")
        return self.get(rng.integers(self.size, size=batch_size))

    def state_dict(self):
        """What is stored, for a checkpoint."""
        names = Transitions._fields
        filled = {name: torch.from_numpy(getattr(self, name)[: self.size]) for name in names}
        return {"size": self.size, "position": self.position, **filled}

    def load_state_dict(self, state):
        """Copy what state_dict returned."""
        self.size = state["size"]
        self.position = state["position"]
        for name in Transitions._fields:
            getattr(self, name)[: self.size] = state[name]


# ------------------------------------------------------------------------------- targets and losses
def smoothed(actions, noise, clip):
    """TD3's smoothing of mu'(s') by the noise epsilon (B, D); within [-1, 1] as in its authors' code.

    a' = clip( mu'(s') + clip(epsilon, -c, c), -1, 1 )   (arXiv 1802.09477, section 5.3)
    """
    return (actions + noise.clamp(-clip, clip)).clamp(-1, 1)


def critic_targets(rewards, next_values, terminated, gamma):
    """Targets y (B,) from the values (K, B) of K target critics. DDPG has K = 1.

    y = r + gamma (1 - terminated) min_k Q'_k(s', a')   (arXiv 1802.09477, algorithm 1)
    """
    return rewards + gamma * next_values.amin(0) * ~terminated


def critic_loss(values, targets):
    """The mean squared errors of K critics, added up; values are (K, B), targets (B,).

    L = sum_k E[ (Q_k(s, a) - y)^2 ]
    """
    return ((values - targets) ** 2).mean(1).sum()


def actor_loss(actor, critic, obs):
    """What the actor minimises.

    L = -E[ Q(s, mu(s)) ]   (its gradient is minus the policy gradient of arXiv 1509.02971, eq. 6)
    """
    return -critic(obs, actor(obs)).mean()


@torch.no_grad()
def polyak(target, source, tau):
    """Polyak averaging: move all weights of the target network towards those of the source.

    target <- tau source + (1 - tau) target   (arXiv 1509.02971, algorithm 1)
    """
    for target_weights, weights in zip(target.parameters(), source.parameters()):
        target_weights.lerp_(weights, tau)
    for target_buffer, buffer in zip(target.buffers(), source.buffers()):  # BatchNorm's, if you add it
        target_buffer.copy_(buffer)


# ----------------------------------------------------------------------------------------- training
def num_updates(step, args):
    """How many updates are due in all, after `step` steps of all environments together."""
    warm_up = max(args.learning_starts, args.batch_size)  # updates need a full batch
    rounds = step // args.train_frequency - warm_up // args.train_frequency
    return max(0, rounds) * args.gradient_steps


def bellman_targets(agent, batch, args, rng):
    """The critics' targets y (B,) for a batch: critic_targets with a' = mu'(s') and tricks 1 and 2."""
    with torch.no_grad():
        next_actions = agent.target_actor(batch.next_obs)
        if args.target_noise > 0:  # TD3, trick 1: target policy smoothing
            noise = args.target_noise * rng.standard_normal(next_actions.shape, np.float32)
            noise = torch.as_tensor(noise, device=agent.device)
            next_actions = smoothed(next_actions, noise, args.noise_clip)
        # TD3, trick 2: clipped double Q; critic_targets takes the lower value (DDPG has only one).
        next_values = [critic(batch.next_obs, next_actions) for critic in agent.target_critics]
        next_values = torch.stack(next_values)
        return critic_targets(batch.rewards, next_values, batch.terminated, args.gamma)


def update_critics(agent, optimizer, batch, targets, args):
    """One step of all critics towards the targets (B,); returns metrics."""
    values = torch.stack([critic(batch.obs, batch.actions) for critic in agent.critics])
    loss = critic_loss(values, targets)
    optimizer.zero_grad()
    loss.backward()
    if args.max_grad_norm is not None:
        nn.utils.clip_grad_norm_(agent.critics.parameters(), args.max_grad_norm)
    optimizer.step()
    return {"critic_loss": loss.detach(), "value_mean": values.detach().mean()}


def update_actor(agent, optimizer, batch, args):
    """One gradient step of the actor up Q; returns metrics. TD3 uses the first critic here."""
    agent.actor.train()  # if you add dropout, it acts only in losses
    loss = actor_loss(agent.actor, agent.critics[0], batch.obs)
    optimizer.zero_grad()
    loss.backward(inputs=list(agent.actor.parameters()))  # no gradients for the critic's weights
    if args.max_grad_norm is not None:
        nn.utils.clip_grad_norm_(agent.actor.parameters(), args.max_grad_norm)
    optimizer.step()
    agent.actor.eval()
    return {"actor_loss": loss.detach()}


def train(args):
    """Train with `args`; return the summary, which summary.json holds too. UserError on bad input."""
    envs = make_envs(args, args.num_envs)  # for their spaces: run.new_envs makes those that are played
    agent = make_agent(args, envs).train()
    agent.actor.eval()  # it also plays, without dropout; the other networks serve only losses
    set_threads(agent.image)
    buffer = make_replay_buffer(args, envs, agent)
    run = Run(args, envs)
    # fused: all weights in one call, faster
    actor_optimizer = torch.optim.Adam(agent.actor.parameters(), args.actor_learning_rate, fused=True)
    critic_optimizer = torch.optim.Adam(agent.critics.parameters(), args.critic_learning_rate, fused=True)
    factor = lambda _: run.remaining() if args.anneal_lr else 1.0  # multiplies both learning rates
    actor_scheduler = torch.optim.lr_scheduler.LambdaLR(actor_optimizer, factor)
    critic_scheduler = torch.optim.lr_scheduler.LambdaLR(critic_optimizer, factor)
    optimizers = {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}
    schedulers = {"actor_scheduler": actor_scheduler, "critic_scheduler": critic_scheduler}
    run.start(agent=agent, buffer=buffer, **optimizers, **schedulers)  # --resume loads their states

    updates = num_updates(run.step, args)  # of the critics, so far
    envs, obs, reset_rows, rng = run.new_envs()  # reset_rows: these steps only reset
    noise = np.zeros((args.num_envs, agent.action_dimensions))
    discounted = np.zeros(args.num_envs)  # over each episode so far: sum_i gamma^(t-i) r_i
    while not run.is_finished():
        noise = next_noise(noise, reset_rows, args, rng)
        if run.step < args.learning_starts:
            actions = rng.uniform(-1, 1, noise.shape)
        else:
            actions = agent.explore(obs, noise)
        obs = obs.copy()  # the environments may write their next observations into the same array
        next_obs, rewards, terminated, truncated, _ = envs.step(agent.to_env(actions))
        run.count(next_obs, rewards, terminated | truncated, reset_rows=reset_rows)
        buffer.add(obs, actions, rewards, next_obs, terminated, reset_rows=reset_rows)
        discounted = (rewards + args.gamma * discounted) * ~reset_rows
        agent.update_statistics(obs[~reset_rows], discounted[~reset_rows])
        reset_rows = terminated | truncated  # the next step only resets these environments
        obs = next_obs

        while updates < num_updates(run.step, args):  # N environments: up to N rounds, or none
            updates += 1
            batch = agent.observe_batch(buffer.sample(args.batch_size, rng))
            targets = bellman_targets(agent, batch, args, rng)
            run.log(**update_critics(agent, critic_optimizer, batch, targets, args))
            critic_scheduler.step()
            if updates % args.policy_frequency == 0:  # TD3, trick 3: these are updated less often
                run.log(**update_actor(agent, actor_optimizer, batch, args))
                actor_scheduler.step()
                polyak(agent.target_actor, agent.actor, args.tau)
                polyak(agent.target_critics, agent.critics, args.tau)

        if run.write_what_is_due():  # a checkpoint: all episodes begin anew, as in a resumed run
            envs, obs, reset_rows, rng = run.new_envs()
            noise = np.zeros(noise.shape)
            discounted = np.zeros(args.num_envs)
    return run.finish()


# ===== helpers: settings, parts of the networks, environments =====================================

CURVE = {"critic_loss": "loss of the critics", "value_mean": "mean value, by the critics", "actor_loss": "actor's loss"}
EXPLORES = True  # training adds noise to the policy: only evaluations decide --stop-at-return
SCHEDULED = ("anneal_lr",)  # flags that, if they are set, let a schedule end with total_timesteps
ONLY_FLAGS = "resume evaluate model render capture_video config run_dir".split()  # not from config.json
PLUGINS = {"ALE": "ale_py", "MiniGrid": "minigrid", "BabyAI": "minigrid"}  # their import registers ids
ONE_HOT = ("minigrid.wrappers.OneHotPartialObsWrapper", "minigrid.wrappers.ImgObsWrapper")
REFUSED_WRAPPERS = {"NormalizeObservation": "--normalize-obs", "NormalizeReward": "--normalize-reward"}
SAFE_IDS = r"[^:]*"  # ids that a stranger's config.json may ask for: module:Id imports the module
SUFFIX = ".pt"  # of models and checkpoints. With weights_only, reading them executes nothing:
write_state = torch.save
read_state = partial(torch.load, map_location="cpu", weights_only=True)
VECTOR_MODE = None  # the environment's own vector version, if it has one
manual_seed = torch.manual_seed  # seeds torch, for dropout

# The three settings in which TD3 and DDPG differ. Those of --algorithm win over TUNED.
ALGORITHMS = {
    None: {},
    "td3": {"target_noise": 0.2, "twin_q": True, "policy_frequency": 2},
    "ddpg": {"target_noise": 0.0, "twin_q": False, "policy_frequency": 1},
}
# Tuned settings per environment; flags win over them. docs/ddpg_td3.md has the scores.
SMALL = {"hidden_sizes": (64, 64), "actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3,
         "gradient_steps": 1}  # fmt: skip
TUNED = {
    "Pendulum-v1": SMALL | {"exploration_noise": 0.1, "gamma": 0.98, "total_timesteps": 20_000},
    "MountainCarContinuous-v0": SMALL | {"noise": "ou", "exploration_noise": 0.75, "learning_starts": 300,
                                         "anneal_lr": True, "total_timesteps": 45_000},
    # Lasting, wide noise tries whole landings; with less, a lander often learns to hover.
    "LunarLanderContinuous-v3": SMALL | {"hidden_sizes": (128, 128), "num_envs": 8, "train_frequency": 8,
                                         "gradient_steps": 8, "tau": 0.01, "noise": "ou", "exploration_noise": 0.5,
                                         "learning_starts": 10_000, "anneal_lr": True, "total_timesteps": 300_000,
                                         "eval_every": 5_000, "eval_episodes": 50, "stop_at_return": 250.0},
    # CleanRL's settings; needs MuJoCo
    "HalfCheetah-v5": {"exploration_noise": 0.1, "learning_starts": 25_000, "gradient_steps": 1},
    # not tuned: 100,000 pairs of images take 5.2 GiB
    "CarRacing-v3": {"buffer_size": 100_000, "gradient_steps": 1},
}  # fmt: skip
tuned_settings = lambda args: TUNED.get(args.env_id, {}) | ALGORITHMS[args.algorithm]  # as the run section calls it


def layer(module, gain=2**0.5):
    """Give a linear or convolutional layer orthogonal weights, scaled by `gain`, and zero biases."""
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


class RunningMeanStd(nn.Module):
    """Mean and variance of all rows seen so far. A module, so that every saved model holds them."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def update(self, rows):
        """Merge an array of B rows, each of the shape of `mean`.

        Chan, Golub & LeVeque 1979, eq. 2.1.
        """
        if len(rows) == 0:
            return
        device = self.mean.device
        rows = torch.as_tensor(rows, dtype=torch.float64, device=device).view(-1, *self.mean.shape)
        weight = len(rows) / (self.count + len(rows))
        delta = rows.mean(0) - self.mean
        self.mean += weight * delta
        self.var += weight * (rows.var(0, correction=0) - self.var)
        self.var += weight * (1 - weight) * delta**2
        self.count += len(rows)

    def forward(self, x):
        """Normalise (B, *shape), clip to ±10."""
        mean = self.mean.to(x.device, torch.float32)
        std = (self.var + 1e-8).sqrt().to(x.device, torch.float32)
        return ((x - mean) / std).clamp(-10, 10)


class NatureCNN(nn.Module):
    """DQN's network for images (Mnih et al. 2015, doi 10.1038/nature14236).

    (B, *shape) of bytes -> (B, 512).
    """

    def __init__(self, shape):
        super().__init__()
        self.channels_last = shape[2] == min(shape)
        channels, height, width = (shape[2], *shape[:2]) if self.channels_last else shape
        image = torch.zeros(1, channels, height, width)
        layers = []
        for outputs, kernel_size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            layers += [layer(nn.Conv2d(channels, outputs, kernel_size, stride)), nn.ReLU()]
            channels = outputs
        self.convolutions = nn.Sequential(*layers, nn.Flatten())
        self.linear = layer(nn.Linear(self.convolutions(image).shape[1], 512))

    def forward(self, images):
        """Features of images whose channels come first or last."""
        images = images.movedim(-1, -3) if self.channels_last else images
        return self.linear(self.convolutions(images / 255)).relu()


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


def make_envs(args, num_envs, render=False, video=None):
    """A vector environment with next-step autoreset. If asked, it is shown, or filmed into `video`.

    UserError for what is mistyped. What the environment itself raises keeps its traceback.
    """
    package = PLUGINS.get(re.split("[/-]", args.env_id)[0], "gymnasium")
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
        mode = VECTOR_MODE
        if wrappers or render:
            mode = "sync"
        if args.async_envs:
            mode = "async"
        if package == "ale_py":
            wrappers = set_up_atari(kwargs, wrappers, mode)
        envs = gym.make_vec(args.env_id, num_envs, vectorization_mode=mode, wrappers=wrappers, **kwargs)
    except MISTYPED as error:
        raise_mistyped(error, args)
    if envs.metadata.get("autoreset_mode") != gym.vector.AutoresetMode.NEXT_STEP:
        raise UserError(f"{args.env_id}: its vector version does not reset in the step after an end")
    return vectors_or_images(envs, args.env_id)


def set_up_atari(kwargs, wrappers, mode):
    """Add DQN's preprocessing to `kwargs`; return the wrappers that it takes."""
    if mode is None:  # ale_py's own vector version, which counts frames and clips rewards by default
        kwargs.setdefault("max_num_frames_per_episode", 4 * kwargs.pop("max_episode_steps", 27_000))
        kwargs.setdefault("reward_clipping", False)
        kwargs.setdefault("use_fire_reset", False)  # off: agents learn to press FIRE
        return wrappers
    kwargs["max_episode_steps"] = 4 * kwargs.get("max_episode_steps", 27_000)  # of frames
    kwargs.setdefault("frameskip", 1)
    stack = partial(gym.wrappers.FrameStackObservation, stack_size=4, padding_type="zero")
    return [gym.wrappers.AtariPreprocessing, stack, *wrappers]  # it needs opencv-python


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


def choose_device(args, image=False):
    """The device that args.device means. UserError if there is no such device."""
    automatic = "cuda" if image and torch.cuda.is_available() else "cpu"
    device = automatic if args.device == "auto" else args.device
    try:
        torch.zeros(1, device=device).cpu()
    except Exception as error:
        raise UserError(f"no device {device}: {error}") from error
    return device


def set_threads(image):
    """One thread for vectors: small matrices are slower on more. If set, OMP_NUM_THREADS decides."""
    if not image and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def make_box_agent(args, envs):
    """An untrained Agent for these environments. UserError if it cannot handle a space."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    is_float = isinstance(action_space, spaces.Box) and action_space.dtype.kind == "f"
    # float32's largest number, 3e38, means "no bound" as well
    if not is_float or np.abs([action_space.low, action_space.high]).max() > 1e30:
        need = "this needs Box actions of floats, bounded in every dimension: try ppo.py"
        raise UserError(f"{args.env_id} has {action_space}; {need}")
    if is_image(obs_space) and args.normalize_obs:
        raise UserError("normalize_obs is for vectors: images are always scaled to [0, 1]")
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = True  # images on a GPU: a resumed run ends as an unbroken one
    return Agent(obs_space, action_space, args, choose_device(args, is_image(obs_space))).eval()


Agent = ActorCritic  # as make_box_agent calls it


def make_td3_or_ddpg(args, envs):
    """make_box_agent. UserError if a --config has the settings of the other algorithm."""
    named = ALGORITHMS[args.algorithm]
    if args.config and named and all(getattr(args, name) != value for name, value in named.items()):
        raise UserError(f"--config is not of --algorithm {args.algorithm}: give {', '.join(named)} as well")
    return make_box_agent(args, envs)


make_agent = make_td3_or_ddpg  # as the run section calls it


def make_replay_buffer(args, envs, agent):
    """The replay buffer that `args` ask for. UserError if it is too small, or too large for memory."""
    if args.buffer_size < max(args.batch_size, args.num_envs):
        raise UserError("buffer_size must not be less than batch_size or num_envs")
    if max(args.learning_starts, args.batch_size) >= args.total_timesteps:
        print("learning_starts or batch_size is not below total_timesteps: nothing will be learnt")
    space = envs.single_observation_space
    itemsize = 1 if space.dtype == np.uint8 else 4
    num_bytes = 2 * args.buffer_size * math.prod(space.shape) * itemsize  # obs and next_obs
    try:
        np.empty(num_bytes, np.uint8)  # takes no memory yet; most systems refuse more than they have
    except (MemoryError, ValueError) as error:
        size = f"{num_bytes / 2**30:,.1f} GiB"
        raise UserError(f"buffer_size {args.buffer_size:,} takes {size}: choose a smaller one") from error
    return ReplayBuffer(args.buffer_size, space, envs.single_action_space, agent.device)


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
