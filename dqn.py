# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.3,<2", "ufal-pybox2d>=2.3.10.5",
#   "numpy>=1.26", "matplotlib>=3.8", "tyro>=1.0", "tqdm>=4.66", "moviepy>=2.0",
# ]
# ///
"""Deep Q-learning (DQN), all of it, in this one file.

A network Q(s, a) learns what return to expect from action a in state s. Act: mostly take the action
with the highest Q, sometimes a random one. Store each step in a replay buffer. Draw a random batch
of stored steps, since successive ones are too alike, and move Q(s, a) towards a target y. The target
network Q', an older copy of Q, helps to compute y: if y moved with every update, learning could
diverge.

    y = r + gamma (1 - terminated) Q'(s', argmax_a Q(s', a))   (double DQN: arXiv 1509.06461, eq. 4)
    y = r + gamma (1 - terminated) max_a Q'(s', a)   (DQN, --no-double: Mnih 2015, algorithm 1)
    L = E[ (y - Q(s, a))^2 ]

    python dqn.py                                            # CartPole-v1, one or two minutes
    python dqn.py --env-id LunarLander-v3 --capture-video    # a lander, filmed while it learns
    python dqn.py --evaluate runs/DIR --render               # watch the trained agent

Papers: DQN arXiv 1312.5602 and Mnih et al. 2015 (doi 10.1038/nature14236), double DQN arXiv
1509.06461. The algorithm ends at "# ===== helpers".
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

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium import spaces
from torch import nn
from tqdm import tqdm


@dataclass(kw_only=True)
class Args:
    """Every flag and its default; TUNED (below) has others, as for CartPole. A given flag wins."""

    # algorithm
    double: bool = True  # double DQN: Q chooses the next action, Q' evaluates it; else Q' does both
    clip_error: bool = False  # Huber loss (Mnih 2015's clipped error), not the squared error: see q_losses
    learning_rate: float = 1e-3  # Adam's learning rate
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    num_envs: int = 1  # environments played side by side
    buffer_size: int = 100_000  # transitions kept, also in checkpoints: gigabytes for images
    learning_starts: int = 1_000  # steps before the first update
    train_frequency: int = 4  # environment steps from one round of updates to the next
    gradient_steps: int = 1  # gradient steps per round
    batch_size: int = 128  # transitions per gradient step
    gamma: float = 0.99  # discount
    target_network_frequency: int = 500  # steps (not updates) between target updates
    tau: float = 1.0  # target <- tau Q + (1 - tau) target: 1 copies; a small tau needs --target-network-frequency 4
    start_e: float = 1.0  # epsilon, the probability of a random action, at the start
    end_e: float = 0.05  # epsilon at the end
    exploration_fraction: float = 0.2  # epsilon falls from start_e to end_e in this share of the run, then stays
    max_grad_norm: float | None = None  # gradients longer than this are scaled down to it
    hidden_sizes: tuple[int, ...] = (64, 64)  # of hidden layers (vectors only), as --hidden-sizes 64 64
    normalize_obs: bool = False  # normalise observations (vectors) by their running mean and standard deviation
    normalize_reward: bool = True  # divide by the deviation of discounted sums: for rewards of any size; up to ±10
    clip_reward: bool = False  # learn from the signs of rewards (Atari); reported returns are true ones
    checkpoint_every: int = 0  # steps between checkpoints, which restart all episodes; 0: 5,000 * num_envs or more
    # run
    env_id: str = "CartPole-v1"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths, applied in order; with arguments: a.B(size=4)
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    async_envs: bool = False  # a process for each environment: for environments slower than 1 ms a step
    total_timesteps: int = 500_000  # environment steps to train for at least; resets do not count
    stop_at_return: float | None = None  # stop once an evaluation reaches this mean return
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


# ------------------------------------------------------------------------------------------ network
def layer(module, gain=2**0.5):
    """Give a linear or convolutional layer orthogonal weights, scaled by `gain`, and zero biases."""
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


def relu_mlp(inputs, hidden_sizes, outputs):
    """Linear layers with ReLU between them."""
    layers = []
    for size in hidden_sizes:
        layers += [layer(nn.Linear(inputs, size)), nn.ReLU()]
        inputs = size
    return nn.Sequential(*layers, layer(nn.Linear(inputs, outputs), gain=1.0))


class QNetwork(nn.Module):
    """Q(s, a) of all actions at once: an MLP for vectors, a linear layer on a CNN for images."""

    def __init__(self, observation_space, action_space, args, device="cpu"):
        super().__init__()
        self.args = args
        self.device = device
        self.observation_shape = observation_space.shape
        self.action_space = action_space
        self.num_actions = int(action_space.n)
        inputs = math.prod(observation_space.shape)
        self.image = is_image(observation_space)
        if self.image:
            self.cnn = NatureCNN(observation_space.shape)
            self.head = layer(nn.Linear(512, self.num_actions), gain=1.0)
        else:
            self.head = relu_mlp(inputs, args.hidden_sizes, self.num_actions)
        self.to(device)
        # Created after the move, so that its float64 stays on the CPU: some devices lack that type.
        self.obs_stats = RunningMeanStd(inputs) if args.normalize_obs else None
        self.return_stats = RunningMeanStd() if args.normalize_reward else None

    def forward(self, obs):
        """Q (B, actions) of observations (B, …): images through the CNN, vectors flat."""
        if self.image:
            return self.head(self.cnn(obs))
        obs = obs.reshape(len(obs), -1).float()
        return self.head(obs if self.obs_stats is None else self.obs_stats(obs))

    def scaled(self, rewards):
        """Rewards as the loss gets them: scaled, if args say so, by the newest statistics; at most ±10."""
        if self.return_stats is None:
            return rewards
        return (rewards / math.sqrt(self.return_stats.var.item() + 1e-8)).clip(-10, 10)

    def update_statistics(self, obs, discounted_returns):
        """Add a step's obs (B, …) and discounted sums of past rewards (B,) to the running statistics."""
        if self.obs_stats is not None:
            self.obs_stats.update(obs)
        if self.return_stats is not None:
            self.return_stats.update(discounted_returns)

    @torch.inference_mode()  # as no_grad, but faster
    def greedy(self, obs):
        """The greedy actions (B,), of the highest Q, for an array of observations (B, …)."""
        dtype = torch.uint8 if self.image else torch.float32
        return self(torch.as_tensor(obs, dtype=dtype, device=self.device)).argmax(1).cpu().numpy()

    def epsilon_greedy(self, obs, epsilon, rng):
        """Actions (B,): each is greedy or, with probability epsilon, drawn uniformly."""
        at_random = rng.random(len(obs)) < epsilon
        any_actions = rng.integers(self.num_actions, size=len(obs))
        return np.where(at_random, any_actions, self.greedy(obs))

    def act(self, obs):
        """The greedy actions for observations (B, …), as the environment takes them."""
        if obs.shape[1:] != self.observation_shape:
            raise ValueError("act takes a batch of observations; for one, it is act(obs[None])[0]")
        return self.to_env(self.greedy(obs))

    def to_env(self, actions):
        """Actions (B,), counted from 0, as the environment counts them: from `start`."""
        return (actions + self.action_space.start).astype(self.action_space.dtype)


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


# --------------------------------------------------------------------------------- targets and loss
def linear_schedule(start, end, duration, step):
    """From `start` at step 0 to `end` at step `duration`, in a straight line; then `end`."""
    return end + (start - end) * max(0.0, 1 - step / duration)


def td_targets(rewards, terminated, gamma, target_q, online_q=None):
    """Targets y (B,) from target_q, which is Q'(s', .), and online_q, Q(s', .): both (B, actions).

        y = r + gamma (1 - terminated) Q'(s', a*)
        a* = argmax_a Q'(s', a)   (without `online_q`: Mnih 2015, algorithm 1)
        a* = argmax_a Q(s', a)   (double DQN: arXiv 1509.06461, eq. 4 with theta^- for theta')

    With the first a*, y is too high on average: the maximum prefers values with positive errors.
    The second has less of this bias, as the errors of Q and Q' differ. `gamma`: a number or (B,).
    """
    best = (target_q if online_q is None else online_q).argmax(1, keepdim=True)
    return rewards + gamma * ~terminated * target_q.gather(1, best).squeeze(1)


def q_bound(reward, discount):
    """The discounted sum of a reward r for ever; 0 for negative r, as episodes may end.

    bound = max(r, 0) / (1 - gamma)

    No true Q is higher if no reward is higher than r; a mean Q above it is overestimated.
    `discount` is gamma, or gamma^n if r sums n rewards.
    """
    return max(0.0, float(reward)) / max(1e-9, 1 - discount)


def q_losses(q, targets, clip_error):
    """Squared errors (B,); with `clip_error` Huber losses, whose slope is at most 1 (Mnih 2015).

        L = (y - Q)^2   (squared)
        L = (y - Q)^2 / 2 if |y - Q| <= 1, else |y - Q| - 1/2   (Huber)

    Say that y is 100 in 19 of 20 equally likely cases, else 0. Squared errors are least at the mean,
    Q = 95; Huber losses near the median, at Q = 99.947. The latter resist large errors, but almost ignore
    rare failures, and targets pass such a Q on to earlier states.
    """
    if clip_error:
        return nn.functional.huber_loss(q, targets, reduction="none")
    return (targets - q).square()


def dqn_loss(agent, target, batch, args):
    """(mean loss, mean Q(s, a) for the log) of a batch; no gradient flows through the targets."""
    with torch.no_grad():
        target_q = target(batch.next_obs)
        online_q = agent(batch.next_obs) if args.double else None
        targets = td_targets(batch.rewards, batch.terminated, args.gamma, target_q, online_q)
    q = agent(batch.obs).gather(1, batch.actions).squeeze(1)
    return q_losses(q, targets, args.clip_error).mean(), q.detach().mean()


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
def train(args):
    """Train with `args`; return the summary, which summary.json holds too. UserError on bad input."""
    envs = make_envs(args, args.num_envs)  # for their spaces: run.new_envs makes those that are played
    agent = make_agent(args, envs)  # the network Q
    target = copy.deepcopy(agent)  # Q'
    target.obs_stats = agent.obs_stats  # not a copy: both normalise alike
    buffer = make_replay_buffer(args, envs, agent)
    set_threads(agent.image)
    run = Run(args, envs)
    # eps: small steps where gradients are tiny; fused: faster
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    factor = lambda _: run.remaining() if args.anneal_lr else 1.0  # multiplies the learning rate
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    run.start(agent=agent, target=target, optimizer=optimizer, scheduler=scheduler, buffer=buffer)  # --resume loads
    exploration_steps = max(1, args.exploration_fraction * args.total_timesteps)
    learning_starts = max(args.learning_starts, args.batch_size)  # an update needs a whole batch

    envs, obs, reset_rows, rng = run.new_envs()
    discounted = np.zeros(args.num_envs)  # in the episode so far, to step t: sum_{i <= t} gamma^(t-i) r_i
    while not run.is_finished():
        epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, run.step)
        obs = obs.copy()  # the environments may write the next ones into the same array
        actions = agent.epsilon_greedy(obs, epsilon, rng)
        next_obs, rewards, terminated, truncated, _ = envs.step(agent.to_env(actions))
        previous_step = run.step
        run.count(next_obs, rewards, terminated | truncated, reset_rows=reset_rows)  # moves run.step on
        learned_rewards = np.sign(rewards) if args.clip_reward else rewards
        buffer.add(obs, actions[:, None], learned_rewards, next_obs, terminated, reset_rows=reset_rows)
        discounted = (learned_rewards + args.gamma * discounted) * ~reset_rows
        agent.update_statistics(obs[~reset_rows], discounted[~reset_rows])  # the buffer keeps raw rows
        obs = next_obs
        reset_rows = terminated | truncated  # the next step only resets these environments

        for step in range(previous_step + 1, run.step + 1):  # one by one: no multiple is left out
            if step >= learning_starts and step % args.train_frequency == 0:
                agent.train()  # dropout, if you add it, acts here, not in play
                for _ in range(args.gradient_steps):
                    batch = buffer.sample(args.batch_size, rng)
                    batch = batch._replace(rewards=agent.scaled(batch.rewards))
                    loss, q = dqn_loss(agent, target, batch, args)
                    optimizer.zero_grad()
                    loss.backward()
                    if args.max_grad_norm is not None:
                        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                    optimizer.step()
                    run.log(loss=loss.detach(), q=q)
                agent.eval()
                scheduler.step()
            if step % args.target_network_frequency == 0:
                polyak(target, agent, args.tau)
                run.log(q_bound=q_bound(agent.scaled(buffer.rewards.max()), args.gamma))  # for the plot

        run.log(epsilon=epsilon, learning_rate=scheduler.get_last_lr()[0])
        if run.write_what_is_due():  # a checkpoint: all episodes begin anew, as in a resumed run
            envs, obs, reset_rows, rng = run.new_envs()
            discounted = np.zeros(args.num_envs)
    return run.finish()


# ===== helpers: settings, parts of the networks, environments =====================================

CURVE = {"loss": "loss: errors of Q", "q": "mean Q", "epsilon": "share of random actions"}
EXPLORES = True  # training plays random actions as well: only evaluations decide --stop-at-return
SCHEDULED = ("anneal_lr", "exploration_fraction")  # if set, a schedule ends with total_timesteps
ONLY_FLAGS = "resume evaluate model render capture_video config run_dir".split()  # not from config.json
PLUGINS = {"ALE": "ale_py", "MiniGrid": "minigrid", "BabyAI": "minigrid"}  # their import registers ids
ONE_HOT = ("minigrid.wrappers.OneHotPartialObsWrapper", "minigrid.wrappers.ImgObsWrapper")
REFUSED_WRAPPERS = {"NormalizeObservation": "--normalize-obs", "NormalizeReward": "--normalize-reward"}
VECTOR_MODE = None  # the environment's own vector version, if it has one
SAFE_IDS = r"[^:]*"  # ids that a stranger's config.json may ask for: module:Id imports the module
SUFFIX = ".pt"  # of models and checkpoints. With weights_only, reading them executes nothing:
write_state = torch.save
read_state = partial(torch.load, map_location="cpu", weights_only=True)
manual_seed = torch.manual_seed  # seeds torch, for dropout

# Tuned settings per environment; flags win over them.
AS_THEY_ARE = {"normalize_reward": False}
ATARI = {"num_envs": 8, "learning_rate": 1e-4, "batch_size": 32, "learning_starts": 80_000, "end_e": 0.01,
         "target_network_frequency": 1_000, "exploration_fraction": 0.1, "clip_error": True,
         "clip_reward": True, "total_timesteps": 10_000_000, "checkpoint_every": 1_000_000} | AS_THEY_ARE  # fmt: skip
# gamma: with 0.99 a needless turn costs so little that a greedy policy turns for ever
MINIGRID = {"num_envs": 8, "batch_size": 32, "gamma": 0.9, "buffer_size": 50_000} | AS_THEY_ARE
TUNED = {
    "CartPole-v1": {"num_envs": 8, "hidden_sizes": (120, 84), "target_network_frequency": 1_000,
                    "exploration_fraction": 0.1, "total_timesteps": 300_000, "stop_at_return": 500.0} | AS_THEY_ARE,
    "Acrobot-v1": {"num_envs": 8, "gradient_steps": 4, "learning_rate": 6.3e-4, "anneal_lr": False,
                   "target_network_frequency": 250, "exploration_fraction": 0.12, "end_e": 0.1, "buffer_size": 50_000,
                   "hidden_sizes": (256, 256), "total_timesteps": 100_000} | AS_THEY_ARE,
    "MountainCar-v0": {"train_frequency": 16, "gradient_steps": 16, "gamma": 0.98, "end_e": 0.07, "normalize_obs": True,
                       "target_network_frequency": 64, "hidden_sizes": (128, 128), "max_grad_norm": 10.0,
                       "total_timesteps": 150_000, "eval_every": 5_000, "stop_at_return": -105} | AS_THEY_ARE,
    # errors are clipped: with squared ones, more seeds never try to land
    "LunarLander-v3": {"num_envs": 8, "train_frequency": 2, "learning_rate": 5e-4, "gamma": 0.995,
                       "target_network_frequency": 1000, "end_e": 0.03, "exploration_fraction": 0.25,
                       "buffer_size": 200_000, "hidden_sizes": (128, 128), "clip_error": True, "max_grad_norm": 10.0,
                       "total_timesteps": 600_000, "eval_every": 5_000, "eval_episodes": 50,
                       "stop_at_return": 220} | AS_THEY_ARE,
    "MiniGrid-Empty-5x5-v0": MINIGRID | {"total_timesteps": 50_000},  # as RGB images, too
    "MiniGrid-DoorKey-5x5-v0": MINIGRID | {"exploration_fraction": 0.5, "total_timesteps": 100_000,
                                           "stop_at_return": 0.95},  # as RGB images, too
    # CleanRL's, but 8 environments, a smaller buffer, clipped errors; not run to the end
    "ALE/Pong-v5": ATARI, "ALE/Breakout-v5": ATARI,
}  # fmt: skip
tuned_settings = lambda args: TUNED.get(args.env_id, {})  # as the run section calls it


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


def make_q_network(args, envs):
    """An untrained QNetwork for these environments. UserError if it cannot handle a space."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(obs_space, spaces.Box) or not isinstance(action_space, spaces.Discrete):
        pair = f"observations {obs_space} and actions {action_space}"
        raise UserError(f"{args.env_id}: Q-learning needs Discrete actions; {pair} are for ppo.py")
    if is_image(obs_space) and args.normalize_obs:
        raise UserError("normalize_obs is for vectors: images are always scaled to [0, 1]")
    device = choose_device(args, is_image(obs_space))
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = True  # images on a GPU: a resumed run ends as an unbroken one
    return QNetwork(obs_space, action_space, args, device).eval()


make_agent = make_q_network  # as the run section calls it


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
