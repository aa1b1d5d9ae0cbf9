# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.3,<2", "ufal-pybox2d>=2.3.10.5",
#   "numpy>=1.26", "matplotlib>=3.8", "tyro>=1.0", "tqdm>=4.66", "moviepy>=2.0", "minigrid>=3.1",
# ]
# ///
"""PPO with demonstrations (PPO+D), all of it, in this one file: hard exploration from a single demonstration.

Where rewards are so sparse that chance never finds one, PPO learns nothing. PPO+D also replays
demonstrations; one is enough to begin with. A slot is one of the num_envs places of the vector
environment. After each episode or replay, it draws what it shows next:

    with probability rho                                  a reward demo,
    with probability phi v_i^alpha / sum_j v_j^alpha      value demo i, where v_i = max_t V(s_t),
    else, or if there is none                             its environment   (arXiv 2007.03328, section 3)

A replay copies a demo's steps into the rollout. The current critic gives their values; their old
log-probability is log 1 = 0 (discrete actions). So PPO's ratio is pi <= 1: clipping never limits
steps that were better than expected, but they weigh little while pi is small.

An episode of the agent whose return reaches a threshold becomes a reward demo. The threshold then
rises to the lowest return of all reward demos, if that is higher. Other episodes become value demos
if there is room, or if their v is above the lowest stored one, which is then dropped. While there
are value demos, each new reward demo moves probability from phi to rho. All else is PPO, with or
without a GRU (the runs below are without).

    python ppod.py                              # MiniGrid-DoorKey-16x16-v0 from one demonstration
    python ppod.py --env-id MountainCar-v0      # with a reward of 1 at the goal and 0 elsewhere
    python demos/record.py --env-id MiniGrid-DoorKey-8x8-v0    # play, and save good episodes

Papers: PPO+D arXiv 2007.03328, PPO arXiv 1707.06347, GAE arXiv 1506.02438, GRU arXiv 1406.1078
(in PyTorch's variant). The algorithm ends at "# ===== helpers". Below it are settings, parts of
networks, demo files, environments and the run folder.
"""

import ast
import hashlib
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
    """Every flag and its default; TUNED (below) has others, as for DoorKey. A given flag wins."""

    # demonstrations
    rho: float = 0.1  # probability that a slot replays a reward demo next
    phi: float = 0.3  # probability that a slot replays a value demo next
    alpha: float = 10.0  # exponent of the value demos' priorities; 0: all are equally likely
    # if there are value demos, each new reward demo moves args.phi / M from phi to rho; M is the room
    # for value demos at the start (capacity), or how many there are (current)
    anneal_by: Literal["capacity", "current"] = "capacity"
    demo_capacity: int = 51  # greatest number of demos, reward and value demos together
    # an episode with at least this return (of wrapped rewards) becomes a reward demo; it may rise
    # None: the lowest return of the first demos if that is above 0; else every return above 0 will do
    initial_reward_threshold: float | None = None
    initial_human_demos_dir: str | None = None  # folder of reward demos that are never dropped
    initial_agent_demos_dir: str | None = None  # folder of reward demos that may be dropped
    supplementary_demos_dir: str | None = None  # watched: new files become reward demos that may be dropped
    target_agent_demos_dir: str | None = None  # where the best demos are saved; give it again with --resume
    num_agent_demos_to_save: int = 10  # at most this many reward demos, and value demos, are saved
    save_demos_every: int = 10  # rollouts between these saves
    # PPO
    recurrent: bool = True  # a GRU behind the trunk; without it the agent has no memory
    gru_size: int = 128  # units of the GRU
    chunk_length: int = 32  # steps over which gradients flow back through the GRU
    learning_rate: float = 3e-4  # Adam's learning rate
    anneal_lr: bool = False  # lower the learning rate linearly to zero; for runs of known length
    num_envs: int = 2  # environments side by side; more are faster
    num_steps: int = 1024  # steps per environment and rollout; episodes may go on in the next
    num_minibatches: int = 32  # parts of a rollout, one gradient step each: by default of 64 steps
    update_epochs: int = 10  # passes over a rollout
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # GAE: 0 trusts the critic, 1 the rewards
    norm_adv: bool = True  # normalise advantages over each minibatch
    clip_coef: float = 0.2  # eps of the clipped objective
    clip_vloss: bool = False  # clip the value loss as well
    clip_vloss_coef: float = 0.2  # values may move this far before their loss is clipped
    ent_coef: float = 0.003  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # gradients longer than this are scaled down to it
    target_kl: float | None = None  # stop the epochs once the KL of an epoch's last minibatch is larger
    hidden_sizes: tuple[int, ...] = (128,)  # sizes of the trunk's layers
    init_std: float = 1.0  # standard deviation of a Box's first actions; 1 is half their range
    normalize_obs: bool = True  # by their running mean and standard deviation; never images or grids
    normalize_reward: bool = True  # divide rewards by the standard deviation of their discounted sum; at most ±10
    clip_reward: bool = False  # learn from the signs of rewards; reported returns are true ones
    sample_actions: bool = False  # draw in evaluations too: most likely actions can go in circles
    checkpoint_every: int = 0  # steps between checkpoints, which restart all episodes; 0: 5,000 * num_envs or more
    # run
    env_id: str = "MiniGrid-DoorKey-16x16-v0"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths, applied in order; with arguments: a.B(size=4)
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    async_envs: bool = False  # a process for each environment: for environments slower than 1 ms a step
    total_timesteps: int = 500_000  # environment steps to train for (neither resets nor replays count)
    stop_at_return: float | None = None  # stop once the last 100 training episodes have this mean
    seed: int = 1  # seed of everything that is drawn at random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps; auto: CUDA for images if there is one
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 5  # episodes of an evaluation; few, because failures are long
    capture_video: bool = False  # film an episode at each evaluation
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # weights that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window; with --capture-video, film it instead
    config: str | None = None  # config.json of another run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__SCRIPT__SEED__TIME
    progress: bool = True  # show the progress bar


# ----------------------------------------------------------------------------------------- networks
def layer(module, gain=2**0.5):
    """Give a linear or convolutional layer orthogonal weights, scaled by `gain`, and zero biases."""
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


def categorical(logits, actions, sizes):
    """Log-probs of actions (B, factors) and entropies of the policy, each (B,).

    The factors are independent of each other: their log-probs and entropies add up. The logits
    (B, sum of sizes) of all of them stand side by side.
    """
    log_probs = []
    entropies = []
    for i, factor_logits in enumerate(logits.split(sizes, dim=1)):
        log_p = factor_logits.log_softmax(dim=1)  # of every category
        log_probs.append(log_p.gather(1, actions[:, i].unsqueeze(1)).squeeze(1))
        entropies.append(-(log_p.exp() * log_p).sum(dim=1))
    return sum(log_probs), sum(entropies)


def gaussian(mean, actions, log_std):
    """Log-densities of actions (B, D) and entropies of the policy, each (B,)."""
    z = (actions - mean) / log_std.exp()
    log_density = -0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi)
    entropy = log_std + 0.5 * math.log(2 * math.pi * math.e)
    return log_density.sum(1), entropy.sum().expand(len(mean))


class RecurrentAgent(nn.Module):
    """Actor and critic: a linear layer each, on a shared trunk; if recurrent, a GRU is between.

    A Box action is Gaussian. A discrete action consists of categorical factors: Discrete has one,
    MultiDiscrete has several, MultiBinary one of two categories for each bit. Everywhere but in the
    environment and in files, actions are (…, D): a column for each factor or dimension. A grid
    (MiniGrid's) goes through GridCNN first, an image through NatureCNN.

    Sequences are (L, B, …): L steps in time, B sequences side by side. The GRU's state runs on from
    step to step. After a reset row (see SequenceBuffer) an episode or a replay begins, so the state
    is zero again.
    """

    def __init__(self, observation_space, action_space, args, device="cpu"):
        super().__init__()
        self.args = args
        self.device = device
        self.observation_shape = observation_space.shape
        self.action_space = action_space
        self.continuous = isinstance(action_space, spaces.Box)
        self.output_sizes = output_sizes(action_space)  # categories of each factor; for a Box, its D
        self.image = is_image(observation_space)
        self.state_size = args.gru_size if args.recurrent else 0
        self.chunk_length = args.chunk_length if args.recurrent else 1  # without a GRU a chunk is one row
        outputs = sum(self.output_sizes)
        inputs = math.prod(observation_space.shape)
        self.cnn = None  # of an image or a grid
        width = inputs
        if self.image:
            self.cnn = NatureCNN(observation_space.shape)
            width = 512
        elif len(observation_space.shape) == 3:
            self.cnn = GridCNN(observation_space.shape)
            width = self.cnn.outputs
        layers = []
        for size in args.hidden_sizes:
            layers += [layer(nn.Linear(width, size)), nn.Tanh()]
            width = size
        self.trunk = nn.Sequential(*layers)
        self.gru = None
        if args.recurrent:
            self.gru = nn.GRUCell(width, args.gru_size)
            for weight in (self.gru.weight_ih, self.gru.weight_hh):
                nn.init.orthogonal_(weight)
            for bias in (self.gru.bias_ih, self.gru.bias_hh):
                nn.init.zeros_(bias)
            width = args.gru_size
        # The actor's small gain makes the first policy nearly uniform, or the first means nearly 0.
        self.actor = layer(nn.Linear(width, outputs), gain=0.01)
        self.critic = layer(nn.Linear(width, 1), gain=1.0)
        if self.continuous:
            self.log_std = nn.Parameter(torch.full((outputs,), math.log(args.init_std)))
        self.to(device)
        # Created after the move, so that its float64 stays on the CPU: some devices lack that type.
        normalizes = args.normalize_obs and len(observation_space.shape) != 3  # no image, no grid
        self.obs_stats = RunningMeanStd(inputs) if normalizes else None
        self.return_stats = RunningMeanStd() if args.normalize_reward else None
        self.begin_episodes(0)

    def trunk_output(self, obs):
        """(B, F) of observations (B, …): images and grids through their CNN, vectors flat, normalised."""
        if self.cnn is not None:
            return self.trunk(self.cnn(obs))
        obs = obs.flatten(1).float()
        return self.trunk(obs if self.obs_stats is None else self.obs_stats(obs))

    def features(self, obs, reset_rows, state):
        """(features, states) of sequences obs (L, B, …) with reset_rows (L, B).

        features (L, B, …) are the input of actor and critic; states (L, B, gru_size) are the GRU's
        after each step, zero after a reset row; `state` (B, gru_size) is the one before the first step.
        """
        x = self.trunk_output(obs.flatten(0, 1)).unflatten(0, reset_rows.shape)
        if self.gru is None:
            return x, state.expand(len(obs), *state.shape)
        features = []
        states = []
        for t in range(len(obs)):
            state = self.gru(x[t], state)
            features.append(state)
            state = state * ~reset_rows[t, :, None]  # after a reset row an episode or a replay begins
            states.append(state)
        return torch.stack(features), torch.stack(states)

    def forward(self, obs, reset_rows, actions, state):
        """(log-probs, entropies, values), each (L, B), and GRU states: see `features`. actions are (L, B, D)."""
        features, states = self.features(obs, reset_rows, state)
        output = self.actor(features).flatten(0, 1)
        if self.continuous:
            log_probs, entropies = gaussian(output, actions.flatten(0, 1), self.log_std)
        else:
            log_probs, entropies = categorical(output, actions.flatten(0, 1), self.output_sizes)
        values = self.critic(features).squeeze(2)
        return log_probs.view_as(values), entropies.view_as(values), values, states

    def demo_log_prob(self):
        """log mu(a|s) of a replayed action; mu is the demonstrator's policy. PPO+D takes mu = 1, so it is 0.

        A continuous action (not in the paper) has a density instead: mu is then the present
        policy's density at its own mean, where it is highest. So pi/mu <= 1 until it is updated, as for
        discrete actions.
        """
        if not self.continuous:
            return 0.0
        return -(self.log_std + 0.5 * math.log(2 * math.pi)).sum().item()

    def draw_noise(self, rng, num_steps, num_envs):
        """Noise (num_steps, num_envs, outputs) by which `sample` draws from the policy; `rng` is a NumPy generator.

        For categories: the argmax of logits + Gumbel noise is a draw from their softmax (the
        Gumbel-max trick).
        """
        draw = rng.standard_normal if self.continuous else rng.gumbel
        noise = draw(size=(num_steps, num_envs, sum(self.output_sizes)))
        return torch.as_tensor(noise, dtype=torch.float32, device=self.device)

    @torch.inference_mode()  # as no_grad, but faster
    def sample(self, obs, reset_rows, state, noise):
        """(actions (B, D), next GRU state) for one step's NumPy arrays of observations (B, …) and reset rows (B,).

        `noise` (B, outputs) is as from draw_noise. With noise 0 the actions are the most likely.
        """
        dtype = torch.uint8 if self.image else torch.float32
        obs = torch.as_tensor(obs, dtype=dtype, device=self.device)
        reset_rows = torch.as_tensor(reset_rows, device=self.device)
        features, states = self.features(obs[None], reset_rows[None], state)
        output = self.actor(features[0])
        if self.continuous:
            return (output + self.log_std.exp() * noise).cpu().numpy(), states[0]
        logits_of_factors = (output + noise).split(self.output_sizes, dim=1)
        actions = torch.stack([logits.argmax(1) for logits in logits_of_factors], dim=1)
        return actions.cpu().numpy(), states[0]

    def initial_state(self, num_envs):
        """The GRU's state (num_envs, gru_size) where an episode begins: zeros; without a GRU (num_envs, 0)."""
        return torch.zeros(num_envs, self.state_size, device=self.device)

    def begin_episodes(self, episodes):
        """Set the GRU's state for `act` to zero, and seed its draws again: evaluations begin with this."""
        self.state = self.initial_state(episodes)
        self.rng = np.random.default_rng(self.args.seed)

    def act(self, obs):
        """The most likely actions, or draws if sample_actions, as the environment takes them. Moves the state on."""
        if obs.shape[1:] != self.observation_shape:
            raise ValueError("act takes a batch of observations; for one, it is act(obs[None])[0]")
        if len(obs) != len(self.state):
            self.begin_episodes(len(obs))
        no_reset_rows = np.zeros(len(obs), bool)  # evaluations ignore what comes after an episode's end
        noise = self.draw_noise(self.rng, 1, len(obs))[0] if self.args.sample_actions else 0
        actions, self.state = self.sample(obs, no_reset_rows, self.state, noise)
        return to_env(actions, self.action_space)


# ------------------------------------------------------------------------------ returns and rollout
# All tensors are time-major, (T, N). next_values[t] is the critic's value of the observation after
# step t. After termination it counts as 0: nothing follows. After truncation it stands for the
# rewards that were cut off. Rewards of later episodes never count. If both flags are set,
# terminated wins.


def compute_gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalised advantage estimation: (advantages A_t, returns A_t + V(s_t)), each (T, N).

    A_t = delta_t + gamma lambda A_{t+1}   (A_{t+1} is 0 after the end of an episode or the rollout)
    delta_t = r_t + gamma V(s_{t+1}) - V(s_t)   (arXiv 1506.02438, eqs. 11, 16)
    """
    deltas = rewards + gamma * next_values * ~terminated - values
    decay = gamma * gae_lambda * ~(terminated | truncated)
    advantages = torch.empty_like(rewards)
    next_advantage = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        advantages[t] = deltas[t] + decay[t] * next_advantage
        next_advantage = advantages[t]
    return advantages, advantages + values


# B chunks of L steps, (L, B, …). The GRU begins a chunk with states[0], the state that it had there
# in the rollout. All rows but reset rows are trained on. old_*: of the agent that played the
# rollout; but old_log_probs of replayed rows are demo_log_prob.
FIELDS = "obs reset_rows replayed actions old_log_probs old_values advantages returns states"
Sequences = namedtuple("Sequences", FIELDS)


class SequenceBuffer:
    """One rollout of N slots, time-major (T, N, …): real episodes and replays. It is cut into chunks for the GRU.

        row  observation           reward  terminated  truncated  reset row  replayed
         0   demo, its last step   r       no          yes        no         yes
         1   demo, the final obs   0       no          no         yes        no
         2   s0 of an episode      r0      no          no         no         no

    Here a slot replays the last step of a demo, then shows its environment. Row 1 is a reset row:
    it is never trained on, and in it the slot draws what comes next. It holds the demo's final
    observation, whose value stands for the rest after a truncation. The row after a real episode's
    end is a reset row, too: in it the environment resets itself.
    """

    def __init__(self, num_steps, num_envs, observation_space, action_space):
        T, N = num_steps, num_envs
        D = math.prod(action_space.shape)  # 1 for Discrete, whose shape is ()
        obs_dtype = np.uint8 if observation_space.dtype == np.uint8 else np.float32
        action_dtype = np.float32 if isinstance(action_space, spaces.Box) else np.int64
        self.obs = np.zeros((T + 1, N, *observation_space.shape), obs_dtype)  # row T: what the last step led to
        self.actions = np.zeros((T, N, D), action_dtype)
        self.rewards = np.zeros((T, N), np.float32)
        self.terminated = np.zeros((T, N), bool)
        self.truncated = np.zeros((T, N), bool)
        self.reset_rows = np.zeros((T, N), bool)
        self.demos = np.full((T, N), None)  # the Demo that a row replays, or None
        self.state = torch.zeros(N, 0)  # the GRU's (N, gru_size) before row 0, set by `train`
        self.rewards_so_far = np.zeros(N)  # discounted: X of scale_rewards

    def scale_rewards(self, stats, args):
        """Make rewards their signs if clip_reward is set, and scale them if normalize_reward is.

        Scaling divides them by the running standard deviation of X, the discounted sum so far;
        at most ±10.

            X_t = r_t + gamma X_{t-1}

        X starts at 0 in each episode, not in each rollout. `stats` is the RunningMeanStd of X.
        """
        if args.clip_reward:
            self.rewards[:] = np.sign(self.rewards)
        if not args.normalize_reward:
            return
        X = np.zeros(self.rewards.shape)
        for t in range(len(X)):
            X[t] = self.rewards[t] + args.gamma * self.rewards_so_far
            self.rewards_so_far = np.where(self.terminated[t] | self.truncated[t], 0, X[t])
        stats.update(X[~self.reset_rows])
        self.rewards[:] = np.clip(self.rewards / math.sqrt(stats.var.item() + 1e-8), -10, 10)

    @torch.no_grad()
    def add_log_probs_and_values(self, agent):
        """Set old_log_probs (T, N) and old_values (T + 1, N), of the agent that played this rollout.

        Also replayed (T, N), and states (T, N, gru_size): the GRU's states before each row. In
        replayed rows the log-prob is demo_log_prob(), even if the demo is the agent's own.
        """
        obs = torch.as_tensor(self.obs, device=agent.device)
        reset_rows = torch.as_tensor(self.reset_rows, device=agent.device)
        actions = torch.as_tensor(self.actions, device=agent.device)
        log_probs, _, values, states = agent(obs[:-1], reset_rows, actions, self.state)
        # Its reset_rows change only the state after it, which is not used.
        last_features, _ = agent.features(obs[-1:], reset_rows[-1:], states[-1])
        self.replayed = torch.as_tensor(self.demos.astype(bool), device=agent.device)
        log_probs[self.replayed] = agent.demo_log_prob()
        self.old_log_probs = log_probs
        self.old_values = torch.cat([values, agent.critic(last_features).squeeze(2)])
        self.states = torch.cat([self.state[None], states[:-1]])

    def compute_advantages(self, args):
        """Set advantages and returns, each (T, N); add_log_probs_and_values comes first."""
        values = self.old_values
        rewards = torch.as_tensor(self.rewards, device=values.device)
        terminated = torch.as_tensor(self.terminated, device=values.device)
        truncated = torch.as_tensor(self.truncated, device=values.device)
        steps = rewards, values[:-1], values[1:], terminated, truncated
        self.advantages, self.returns = compute_gae(*steps, args.gamma, args.gae_lambda)

    def chunks(self, x, length):
        """(T, N, …) -> (L, N T / L, …): chunks of L steps side by side, those of a slot next to each other."""
        x = torch.as_tensor(x[: len(self.rewards)], device=self.advantages.device)  # without row T
        return x.unflatten(0, (-1, length)).movedim(0, 2).flatten(1, 2)

    def minibatches(self, num_minibatches, length, rng):
        """Yield Sequences of `length` steps: each chunk once, in random order, but no batch of reset rows alone."""
        fields = [self.chunks(getattr(self, name), length) for name in Sequences._fields]
        order = torch.as_tensor(rng.permutation(fields[0].shape[1]), device=self.advantages.device)
        for part in order.tensor_split(num_minibatches):
            batch = Sequences(*[field[:, part] for field in fields])
            if not batch.reset_rows.all():  # else there is nothing to learn from
                yield batch

    def explained_variance(self):
        """1 - Var(R - V) / Var(R): 1 if the critic predicted all its targets R, 0 if no better than a constant."""
        trained = torch.as_tensor(~self.reset_rows, device=self.returns.device)
        returns = self.returns[trained]
        errors = returns - self.old_values[:-1][trained]
        return 1 - errors.var(correction=0) / (returns.var(correction=0) + 1e-8)


# ----------------------------------------------------------------------------------- demonstrations
@dataclass(eq=False)  # equal only if the same: arrays cannot be compared by ==
class Demo:
    """A trajectory that slots of the vector environment can replay."""

    obs: np.ndarray  # (T + 1, …); the last one is the final observation
    actions: np.ndarray  # (T, D), in the agent's form: see to_env
    rewards: np.ndarray  # (T,), neither clipped nor scaled
    terminated: bool  # whether the last step terminated; if not, it counts as truncated
    total: float  # return of the whole episode, of which the demo may be only the beginning
    human: bool = False  # whether it is never dropped
    max_value: float = 0.0  # max_t V(s_t), in the whole episode at first, then in its last replay

    def arrays(self, convert):
        """Its arrays by name, converted by a function: a checkpoint holds them as tensors."""
        return {name: convert(getattr(self, name)) for name in ("obs", "actions", "rewards")}


def as_demo(obs, actions, rewards, terminated, max_value=0.0):
    """The Demo that an episode becomes; the arguments are Demo's fields for all of the episode.

    What follows the last positive reward is cut off, penalties too (this is meant for sparse
    rewards that are never negative); the demo then counts as truncated. An episode without a
    positive reward is kept whole. `total` and, at first, `max_value` are those of the whole episode.
    """
    length = len(rewards)
    if (rewards > 0).any():
        length = int(np.flatnonzero(rewards > 0)[-1]) + 1
    total = float(rewards.sum(dtype=np.float64))
    ends_terminated = bool(terminated and length == len(rewards))
    parts = obs[: length + 1].copy(), actions[:length].copy(), rewards[:length].copy()
    return Demo(*parts, ends_terminated, total, max_value=float(max_value))


def replay_probabilities(max_values, alpha):
    """p_i = v_i^alpha / sum_j v_j^alpha (arXiv 2007.03328, section 3) over the highest values v of value demos.

    If some v is negative, the lowest is first subtracted from all. If all are zero after that,
    all demos are equally likely. So p is finite, not negative, and never lower for a higher value.
    """
    v = np.asarray(max_values, np.float64)
    if v.min() < 0:
        v = v - v.min()
    if v.max() == 0:
        v = np.ones_like(v)
    weights = (v / v.max()) ** alpha  # divided first: no power overflows
    return weights / weights.sum()


class PPODBuffer:
    """The demos, which of them each slot replays, and the episodes that may become demos (arXiv 2007.03328).

    Reward demos come from files, or are the agent's episodes with a good return. Value demos are
    others, in which the critic gave some state a high value.
    """

    def __init__(self, args, num_envs, observation_space, action_space):
        self.args = args
        self.spaces = observation_space, action_space
        self.reward_demos = []
        self.value_demos = []
        self.value_capacity = args.demo_capacity  # room for value demos: make_demo_buffer subtracts the initial demos
        self.rho = args.rho
        self.phi = args.phi
        self.reward_threshold = args.initial_reward_threshold  # None: any return above 0 is good
        self.seen = []  # checksums of the files in supplementary_demos_dir that were read
        self.rollouts = 0
        self.replayed_rows = 0
        self.replays = [None] * num_envs  # the Demo that each slot replays; None: it shows its environment
        self.position = np.zeros(num_envs, int)  # the next step of that Demo
        # What each slot has shown of the episode or replay under way: for each rollout (obs,
        # actions, rewards, values).
        self.episodes = [[] for _ in range(num_envs)]

    def sample_demo(self, rng):
        """Draw the Demo to replay next, or None for the environment. If the list that was drawn is empty: None."""
        kinds = "reward", "value", "environment"
        kind = rng.choice(kinds, p=[self.rho, self.phi, 1 - self.rho - self.phi])
        if kind == "reward" and self.reward_demos:
            return self.reward_demos[rng.integers(len(self.reward_demos))]
        if kind == "value" and self.value_demos:
            max_values = [demo.max_value for demo in self.value_demos]
            probabilities = replay_probabilities(max_values, self.args.alpha)
            return self.value_demos[rng.choice(len(probabilities), p=probabilities)]
        return None

    def restart(self, envs, obs, rng):
        """Begin anew with the first observations `obs` of new environments. Returns what the slots show first.

        Slot 0 shows its environment: else the first rollout could be all replays and count no step.
        """
        self.replays = [None] * len(obs)
        self.episodes = [[] for _ in self.episodes]
        return self.draw_next(envs, np.arange(len(obs)) > 0, obs, rng)

    def draw_next(self, envs, reset_rows, next_obs, rng):
        """Let each slot in a reset row draw what it shows next; return next_obs (N, …) with its first observation.

        A demo's is demo.obs[0]. After a real episode, an environment's is already in next_obs:
        autoreset has put it there. After a replay it is not: the environment has run on unseen (see
        insert_replays), so it is reset here.
        """
        next_obs = next_obs.copy()
        to_reset = np.zeros(len(reset_rows), bool)
        for i in np.flatnonzero(reset_rows):
            demo = self.sample_demo(rng)
            to_reset[i] = demo is None and self.replays[i] is not None
            self.replays[i] = demo
            self.position[i] = 0
            if demo is not None:
                next_obs[i] = demo.obs[0]
        if to_reset.any():
            # CartPole's own vector version would reset all; VECTOR_MODE asks for SyncVectorEnv.
            first_obs, _ = envs.reset(options={"reset_mask": to_reset})
            next_obs[to_reset] = first_obs[to_reset]
        return next_obs

    def insert_replays(self, envs, buffer, t, next_obs, rng):
        """After the environments' step t: where a slot replays, overwrite row t with its demo's step.

        The environment of such a slot has stepped as well, unseen: what it returned is lost. A
        reset row has neither a reward nor an end; in it a slot draws what it shows next. Returns
        the observations (N, …) of row t + 1.
        """
        reset_rows = buffer.reset_rows[t]
        buffer.rewards[t, reset_rows] = 0
        buffer.terminated[t, reset_rows] = False
        buffer.truncated[t, reset_rows] = False
        buffer.demos[t] = None
        next_obs = self.draw_next(envs, reset_rows, next_obs, rng)
        for i in np.flatnonzero(~reset_rows):
            demo = self.replays[i]
            if demo is None:
                continue
            at = self.position[i]
            is_last = at + 1 == len(demo.rewards)
            next_obs[i] = demo.obs[at + 1]
            buffer.actions[t, i] = demo.actions[at]
            buffer.rewards[t, i] = demo.rewards[at]
            buffer.terminated[t, i] = is_last and demo.terminated
            buffer.truncated[t, i] = is_last and not demo.terminated
            buffer.demos[t, i] = demo
            self.position[i] += 1
            self.replayed_rows += 1
        return next_obs

    def track_potential_demos(self, buffer):
        """Look at all episodes and replays that ended in a SequenceBuffer with old_values.

        A real episode may become a demo. A replayed value demo gets a new max_value: the highest
        value in this replay.
        """
        values = buffer.old_values.cpu().numpy()
        ends = buffer.terminated | buffer.truncated
        for i, parts in enumerate(self.episodes):
            for rows in np.split(np.arange(len(ends)), np.flatnonzero(ends[:, i]) + 1):  # cut after each end
                rows = rows[~buffer.reset_rows[rows, i]]
                parts.append([x[rows, i] for x in (buffer.obs, buffer.actions, buffer.rewards, values)])
                if len(rows) > 0 and ends[rows[-1], i]:
                    self.finish_episode(i, buffer, rows[-1])

    def finish_episode(self, i, buffer, t):
        """Slot i's episode or replay ended in row t: an episode may become a demo, a value demo gets its max_value."""
        obs, actions, rewards, values = [np.concatenate(parts) for parts in zip(*self.episodes[i])]
        self.episodes[i].clear()
        demo = buffer.demos[t, i]
        if demo is None:
            obs = np.concatenate([obs, buffer.obs[t + 1, i][None]])
            self.consider(as_demo(obs, actions, rewards, buffer.terminated[t, i], values.max()))
        else:
            demo.max_value = float(values.max())  # only value demos use it

    def consider(self, demo):
        """Take an episode of the agent as a reward demo, as a value demo, or not at all."""
        if is_good(demo.total, self.reward_threshold):
            self.add_reward_demo(demo)
            return
        has_room = len(self.reward_demos) + len(self.value_demos) < self.args.demo_capacity
        if has_room or (self.value_demos and demo.max_value > min(d.max_value for d in self.value_demos)):
            self.value_demos.append(demo)
            self.check_demo_buffer_capacity()

    def add_reward_demo(self, demo):
        """Add a reward demo; then anneal, make room, and raise the threshold to the lowest return in the list."""
        self.reward_demos.append(demo)
        self.anneal_parameters()
        self.check_demo_buffer_capacity()
        lowest = min(d.total for d in self.reward_demos)
        if lowest > (self.reward_threshold or 0):  # it never falls; None: none was above 0
            self.reward_threshold = lowest

    def anneal_parameters(self):
        """A new reward demo moves args.phi / M from phi to rho: see Args.anneal_by."""
        if not self.value_demos:
            return
        M = self.value_capacity if self.args.anneal_by == "capacity" else len(self.value_demos)
        total = self.args.rho + self.args.phi
        self.rho = min(self.rho + self.args.phi / M, total)
        self.phi = total - self.rho

    def check_demo_buffer_capacity(self):
        """Drop demos until they fit: value demos of lowest max_value, then the longest reward demos.

        Made for rewards that come only at the goal: there the longest is the worst. Human demos stay.
        """
        while len(self.reward_demos) + len(self.value_demos) > self.args.demo_capacity:
            droppable = [demo for demo in self.reward_demos if not demo.human]
            if self.value_demos:
                self.value_demos.remove(min(self.value_demos, key=lambda demo: demo.max_value))
            elif droppable:
                self.reward_demos.remove(max(droppable, key=lambda demo: len(demo.rewards)))
            else:
                break

    def load_supplementary_demos(self):
        """Add each file with new content in supplementary_demos_dir as a reward demo; print a warning if it is bad."""
        folder = self.args.supplementary_demos_dir
        for path in sorted(Path(folder).glob("*.npz")) if folder else []:
            try:
                checksum = hashlib.sha256(path.read_bytes()).hexdigest()
                if checksum in self.seen:
                    continue
                self.seen.append(checksum)
                self.add_reward_demo(read_demo(path, self.args, *self.spaces))
            except (OSError, UserError) as error:
                tqdm.write(f"skipped: {error}", file=sys.stderr)

    def save_demos(self, is_finished):
        """Every --save-demos-every rollouts, and at the end, write the best demos to target_agent_demos_dir.

        In subfolder `reward` the return decides, in `value` max_value; 0.npz is the best. Demos that
        are never dropped are left out. Files of higher rank, from a save with more demos, stay.
        """
        self.rollouts += 1
        is_due = is_finished or self.rollouts % self.args.save_demos_every == 0
        if not is_due or not self.args.target_agent_demos_dir:
            return
        own = [demo for demo in self.reward_demos if not demo.human]
        best = {"reward": sorted(own, key=lambda demo: -demo.total)}
        best["value"] = sorted(self.value_demos, key=lambda demo: -demo.max_value)
        for name, demos in best.items():
            for rank, demo in enumerate(demos[: self.args.num_agent_demos_to_save]):
                save_demo(Path(self.args.target_agent_demos_dir, name, f"{rank}.npz"), demo, self.args, self.spaces[1])

    def metrics(self, step):
        """A dict of metrics to log about the demos; `step` is run.step."""
        threshold = self.reward_threshold
        return {
            "reward_demos": len(self.reward_demos),
            "value_demos": len(self.value_demos),
            "rho": self.rho,
            "phi": self.phi,
            "reward_threshold": math.nan if threshold is None else threshold,
            "training_rows": step + self.replayed_rows,
        }

    LASTING = "rho phi value_capacity reward_threshold seen rollouts replayed_rows".split()

    def state_dict(self):
        """For a checkpoint, as tensors and plain types: all but episodes and replays under way, which begin anew."""
        state = {name: getattr(self, name) for name in self.LASTING}
        for name in ("reward_demos", "value_demos"):
            state[name] = [vars(demo) | demo.arrays(torch.as_tensor) for demo in getattr(self, name)]
        return state

    def load_state_dict(self, state):
        """Put back what state_dict returned."""
        for name in self.LASTING:
            setattr(self, name, state[name])
        for name in ("reward_demos", "value_demos"):
            demos = [Demo(**fields) for fields in state[name]]
            setattr(self, name, [replace(demo, **demo.arrays(np.asarray)) for demo in demos])


def is_good(total, threshold):
    """Whether an episode of this return becomes a reward demo; without a threshold the return must be positive."""
    if threshold is None:
        return total > 0
    return total >= threshold - 1e-6 * max(1, abs(threshold))  # rounding of float32 may make a sum a little too low


# ------------------------------------------------------------------------------------------- losses
def policy_loss(log_ratios, advantages, clip_coef):
    """The clipped surrogate, negated; log_ratios (B,) = log pi - log pi_old; r: the ratio, not a reward.

    L = E[ min( r A, clip(r, 1 - eps, 1 + eps) A ) ]   (arXiv 1707.06347, eq. 7)
    """
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.min(ratios * advantages, clipped * advantages).mean()


def value_loss(values, old_values, returns, clip_coef=None):
    """Half the mean squared error. With `clip_coef`, moving a value by more cannot lower the loss.

    L = 1/2 E[ max( (V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2 ) ]   (OpenAI's ppo2)
    """
    errors = (values - returns) ** 2
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (clipped - returns) ** 2)
    return 0.5 * errors.mean()


def normalize(advantages):
    """Advantages (B,) with zero mean and unit (population) standard deviation."""
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


def approximate_kl(log_ratios):
    """An unbiased estimate of KL(pi_old || pi) that is never negative (Schulman's k3).

    KL = E[ (r - 1) - log r ],   r = pi/pi_old
    """
    return (log_ratios.exp() - 1 - log_ratios).mean()


def sequence_loss(agent, batch, args):
    """The loss of Sequences, without their reset rows, to be minimised, and a dict of metrics to log.

    In replayed rows the ratio is pi/mu (see demo_log_prob). For discrete actions mu = 1, so
    A > 0 is never clipped, and A < 0 has a gradient only while pi > 1 - eps. This ratio does not
    tell how far the policy has moved, so approx_kl and clip_fraction leave these rows out.
    """
    log_probs, entropies, values, _ = agent(batch.obs, batch.reset_rows, batch.actions, batch.states[0])
    trained = ~batch.reset_rows
    log_ratios = (log_probs - batch.old_log_probs)[trained]
    advantages = batch.advantages[trained]
    if args.norm_adv:
        advantages = normalize(advantages)
    clip_vloss = args.clip_vloss_coef if args.clip_vloss else None
    pg_loss = policy_loss(log_ratios, advantages, args.clip_coef)
    v_loss = value_loss(values[trained], batch.old_values[trained], batch.returns[trained], clip_vloss)
    entropy = entropies[trained].mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    metrics = {
        "loss": loss.detach(),
        "policy_loss": pg_loss.detach(),
        "value_loss": v_loss.detach(),
        "entropy": entropy.detach(),
    }
    played = log_ratios.detach()[~batch.replayed[trained]]
    if len(played) > 0:
        metrics["approx_kl"] = approximate_kl(played)
        metrics["clip_fraction"] = ((played.exp() - 1).abs() > args.clip_coef).float().mean()
    return loss, metrics


# ----------------------------------------------------------------------------------------- training
def train(args):
    """Train with `args`; return the summary, which summary.json holds too. UserError on bad input."""
    envs = make_envs(args, args.num_envs)  # for their spaces: run.new_envs makes those that are played
    agent = make_agent(args, envs)
    set_threads(agent.image)
    demo_buffer = make_demo_buffer(args, envs)  # it holds the initial demos
    run = Run(args, envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    factor = lambda _: run.remaining() if args.anneal_lr else 1.0  # multiplies the learning rate
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    run.start(agent=agent, optimizer=optimizer, scheduler=scheduler, demos=demo_buffer)  # --resume loads their states

    begins_anew = True
    while not run.is_finished():
        if begins_anew:  # also after a checkpoint, as a resumed run does
            envs, obs, reset_rows, rng = run.new_envs()
            obs = demo_buffer.restart(envs, obs, rng)
            buffer = SequenceBuffer(args.num_steps, args.num_envs, *demo_buffer.spaces)
            state = agent.initial_state(args.num_envs)
        demo_buffer.load_supplementary_demos()
        noise = agent.draw_noise(rng, args.num_steps, args.num_envs)  # all at once: that is faster
        buffer.state = state
        buffer.obs[0] = obs
        for t in range(args.num_steps):
            buffer.reset_rows[t] = reset_rows
            buffer.actions[t], state = agent.sample(obs, reset_rows, state, noise[t])
            obs, rewards, terminated, truncated, _ = envs.step(to_env(buffer.actions[t], agent.action_space))
            buffer.rewards[t] = rewards
            buffer.terminated[t] = terminated
            buffer.truncated[t] = truncated
            obs = demo_buffer.insert_replays(envs, buffer, t, obs, rng)  # in slots that replay
            buffer.obs[t + 1] = obs
            uncounted = reset_rows | buffer.demos[t].astype(bool)  # replays do not count, either
            reset_rows = buffer.terminated[t] | buffer.truncated[t]  # where row t ended: row t + 1 is a reset row
            run.count(obs, rewards, reset_rows & ~uncounted, uncounted)

        buffer.add_log_probs_and_values(agent)  # of replayed rows: demo_log_prob
        demo_buffer.track_potential_demos(buffer)  # before rewards are scaled: demos keep them raw
        buffer.scale_rewards(agent.return_stats, args)
        buffer.compute_advantages(args)
        run.log(explained_variance=buffer.explained_variance(), learning_rate=scheduler.get_last_lr()[0])
        run.log(**demo_buffer.metrics(run.step))

        for _ in range(args.update_epochs):
            agent.train()  # dropout, if added, acts only here: r is not 1 at first
            for batch in buffer.minibatches(args.num_minibatches, agent.chunk_length, rng):
                loss, metrics = sequence_loss(agent, batch, args)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
                run.log(**metrics)
            agent.eval()
            if args.target_kl is not None and metrics.get("approx_kl", 0) > args.target_kl:
                break
        scheduler.step()

        if agent.obs_stats is not None:  # only now: old_log_probs are of the former statistics
            agent.obs_stats.update(buffer.obs[:-1][~buffer.reset_rows])
        demo_buffer.save_demos(run.is_finished())
        begins_anew = run.write_what_is_due()
    return run.finish()


# ===== helpers: settings, parts of the networks, demo files, environments =========================

CURVE = {"policy_loss": "policy loss", "value_loss": "value loss", "entropy": "entropy of the policy"}
EXPLORES = False  # training plays the policy itself: its episodes decide --stop-at-return
SCHEDULED = ("anneal_lr",)  # flags that, if they are set, let a schedule end with total_timesteps
ONLY_FLAGS = "resume evaluate model render capture_video config run_dir target_agent_demos_dir".split()
PLUGINS = {"ALE": "ale_py", "MiniGrid": "minigrid", "BabyAI": "minigrid"}  # their import registers ids
ONE_HOT = ("minigrid.wrappers.OneHotPartialObsWrapper", "minigrid.wrappers.ImgObsWrapper")
REFUSED_WRAPPERS = {"NormalizeObservation": "--normalize-obs", "NormalizeReward": "--normalize-reward"}
SAFE_IDS = r"[^:]*"  # ids that a stranger's config.json may ask for: module:Id imports the module
SUFFIX = ".pt"  # of models and checkpoints. With weights_only, reading them executes nothing:
write_state = torch.save
read_state = partial(torch.load, map_location="cpu", weights_only=True)
VECTOR_MODE = "sync"  # it can reset single environments
manual_seed = torch.manual_seed  # seeds torch, for dropout

# Tuned settings per environment; flags win over them. docs/ppod.md has the evidence for them.
DEMOS = Path(__file__).parent / "demos"
SHORT_ROLLOUTS = {"recurrent": False, "num_envs": 16, "num_steps": 128, "num_minibatches": 8, "update_epochs": 4,
                  "learning_rate": 1e-3, "anneal_lr": True, "normalize_reward": False}  # fmt: skip
TUNED = {
    "MiniGrid-DoorKey-16x16-v0": SHORT_ROLLOUTS | {
        "initial_human_demos_dir": str(DEMOS / "MiniGrid-DoorKey-16x16-v0"), "initial_reward_threshold": 0.9,
        "sample_actions": True, "update_epochs": 8, "gae_lambda": 0.97, "norm_adv": False, "ent_coef": 0.002,
        "normalize_obs": False, "total_timesteps": 1_000_000,
        "eval_every": 100_000,  # an evaluation of an agent that fails is 5 x 2,560 steps
    },
    "MountainCar-v0": SHORT_ROLLOUTS | {
        "wrappers": ("ppod.GoalReward",), "initial_human_demos_dir": str(DEMOS / "MountainCar-v0"),
        "rho": 0.3, "phi": 0.0, "num_minibatches": 4, "hidden_sizes": (64,), "ent_coef": 0.01,
        "total_timesteps": 200_000,
    },
    # without demonstrations, one seed: replays did no harm
    "CartPole-v1": SHORT_ROLLOUTS | {
        "num_envs": 32, "num_steps": 64, "learning_rate": 2e-3, "hidden_sizes": (64, 64), "gamma": 0.98,
        "gae_lambda": 0.9, "ent_coef": 0.0, "normalize_obs": False, "total_timesteps": 147_000,
    },
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


class GridCNN(nn.Module):
    """Features of all 3 x 3 patches of a grid: (B, width, height, channels) -> (B, outputs).

    The whole view shares one set of weights, because a key means the same wherever it is seen, and
    one demonstration shows it in few places.
    """

    def __init__(self, shape, features=16):
        super().__init__()
        if min(shape[:2]) < 3:
            raise UserError(f"no 3 x 3 patch fits into observations of shape {shape}")
        self.conv = layer(nn.Conv2d(shape[2], features, kernel_size=3))
        self.outputs = features * (shape[0] - 2) * (shape[1] - 2)

    def forward(self, grids):
        """(B, outputs) of grids (B, width, height, channels)."""
        return self.conv(grids.float().movedim(3, 1)).relu().flatten(1)


def output_sizes(space):
    """Categories of each factor of a discrete action space; of a Box, its number of dimensions."""
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ravel().tolist()
    if isinstance(space, spaces.MultiBinary):
        return [2] * math.prod(space.shape)
    return [int(spaces.flatdim(space))]


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


def to_env(actions, space):
    """Actions (B, D) as the environment takes them, in the space's bounds, shape and type."""
    if not isinstance(space, spaces.Box):
        actions = actions.reshape(-1, *space.shape)
        return (actions + getattr(space, "start", 0)).astype(space.dtype)  # they need not start at 0
    scale, bias = scale_and_bias(space)
    actions = (scale * actions + bias).reshape(-1, *space.shape)
    actions = np.clip(actions, space.low, space.high)
    if np.issubdtype(space.dtype, np.integer):
        actions = np.rint(actions)
    return actions.astype(space.dtype)


def from_env(actions, space):
    """The inverse of to_env: (T, D) from the environment's actions (T, …). ValueError if one is not in the space."""
    if np.issubdtype(space.dtype, np.floating):
        actions = actions.astype(space.dtype)
    if not all(action in space for action in actions):
        raise ValueError(f"an action is not in {space}")
    actions = actions.reshape(len(actions), math.prod(space.shape))
    if isinstance(space, spaces.Box):
        scale, bias = scale_and_bias(space)
        return ((actions - bias) / np.where(scale == 0, 1, scale)).astype(np.float32)
    return actions.astype(np.int64) - np.ravel(getattr(space, "start", 0))


def demo_identity(args):
    """What a demo's file says about its environment; read_demo accepts only the same."""
    return {"env_id": args.env_id, "env_kwargs": json.loads(args.env_kwargs), "wrappers": list(args.wrappers)}


def read_demo(path, args, observation_space, action_space):
    """The Demo in a file that save_demo (or whoever follows docs/ppod.md) wrote. Nothing in it is executed.

    UserError naming the file if it is damaged, or of another environment.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            for name, own in demo_identity(args).items():
                if json.loads(str(file[name])) != own:
                    raise ValueError(f"its {name} is {file[name]}, not {json.dumps(own)}")
            obs = np.concatenate([file["observation"], file["final_observation"][None]])
            rewards = file["reward"].astype(np.float32)
            total = float(file["episode_return"]) if "episode_return" in file else float(rewards.sum())
            demo = Demo(obs, from_env(file["action"], action_space), rewards, bool(file["terminated"]), total)
        T = len(rewards)
        if T == 0 or len(demo.actions) != T or obs.shape != (T + 1, *observation_space.shape):
            raise ValueError(f"observations {obs.shape}, actions {demo.actions.shape}, rewards {rewards.shape}")
        if not all(np.isfinite(numbers).all() for numbers in (obs, rewards, total)):
            raise ValueError("an observation or reward is NaN or infinite")
        return demo
    except Exception as error:  # there is no list of what a damaged file may raise
        raise UserError(f"{path} is missing, damaged, or of another environment: {error}") from error


def save_demo(path, demo, args, action_space):
    """Write a Demo as an .npz file, whole or not at all; docs/ppod.md describes the fields."""
    fields = {"observation": demo.obs[:-1], "action": to_env(demo.actions, action_space), "reward": demo.rewards}
    fields |= {"final_observation": demo.obs[-1], "episode_return": demo.total}
    fields |= {"terminated": demo.terminated, "truncated": not demo.terminated}
    fields |= {name: json.dumps(value) for name, value in demo_identity(args).items()}
    write_file(path, lambda file: np.savez_compressed(file, **fields))


def make_demo_buffer(args, envs):
    """A PPODBuffer with the demos in the folders that args name. UserError if one is bad, or if there are too many.

    A run that is resumed from a checkpoint needs no folder: the checkpoint holds its demos.
    """
    if min(args.demo_capacity, args.save_demos_every) < 1:
        raise UserError("demo_capacity or save_demos_every is below 1")
    if args.rho + args.phi >= 1:
        raise UserError(f"rho + phi = {args.rho + args.phi:g} must be below 1: the environment needs its share")
    if args.supplementary_demos_dir and not args.resume and not Path(args.supplementary_demos_dir).is_dir():
        raise UserError(f"supplementary_demos_dir {args.supplementary_demos_dir} is no folder")
    if Path(args.target_agent_demos_dir or "").is_file():
        raise UserError(f"target_agent_demos_dir {args.target_agent_demos_dir} is a file, not a folder")
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    demo_buffer = PPODBuffer(args, args.num_envs, obs_space, action_space)
    if args.resume and Path(args.resume, f"checkpoint{SUFFIX}").exists():
        return demo_buffer
    for folder, human in ((args.initial_human_demos_dir, True), (args.initial_agent_demos_dir, False)):
        paths = sorted(Path(folder).glob("*.npz")) if folder else []
        if folder and not paths:
            how = f"python demos/record.py --env-id {args.env_id} --target-agent-demos-dir {folder}"
            raise UserError(f"no demos (.npz) in {folder}: {how} makes one; or copy demos/ along")
        for path in paths:
            demo = read_demo(path, args, obs_space, action_space)
            demo_buffer.reward_demos.append(replace(demo, human=human))
    demo_buffer.value_capacity = args.demo_capacity - len(demo_buffer.reward_demos)
    if demo_buffer.value_capacity < 0:
        raise UserError(f"{len(demo_buffer.reward_demos)} demos exceed demo_capacity = {args.demo_capacity}")
    if not demo_buffer.reward_demos and args.rho + args.phi > 0:
        print("no demonstrations yet, only those that the agent will make: see --initial-human-demos-dir")
    lowest = min([demo.total for demo in demo_buffer.reward_demos], default=0)
    if demo_buffer.reward_threshold is None and lowest > 0:
        demo_buffer.reward_threshold = lowest
    return demo_buffer


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


class GoalReward(gym.Wrapper):
    """Pay 1 where the episode terminates and 0 elsewhere: the sparse version of a task that ends at its goal."""

    def step(self, action):
        """As the environment's, with that reward."""
        obs, _, terminated, truncated, info = self.env.step(action)
        return obs, float(terminated), terminated, truncated, info


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


def make_recurrent_agent(args, envs):
    """An untrained RecurrentAgent for these environments. UserError if it cannot handle a space."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    kinds = spaces.Discrete | spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary
    if not isinstance(obs_space, spaces.Box) or not isinstance(action_space, kinds):
        what = f"observations {obs_space} and actions {action_space}"
        raise UserError(f"{args.env_id}: no RecurrentAgent for {what}")
    if args.init_std <= 0:
        raise UserError("init_std must be more than 0")
    if args.num_steps < 2:
        raise UserError("num_steps must be at least 2: every other row of an environment can be a reset row")
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = True  # images on a GPU: a resumed run ends as an unbroken one
    agent = RecurrentAgent(obs_space, action_space, args, choose_device(args, is_image(obs_space))).eval()
    if agent.chunk_length < 1 or args.num_steps % agent.chunk_length != 0:
        raise UserError(f"num_steps = {args.num_steps} does not divide into chunks of {agent.chunk_length} steps")
    rows_per_minibatch = args.num_steps * args.num_envs // args.num_minibatches
    if rows_per_minibatch < max(2, agent.chunk_length):
        raise UserError("num_envs x num_steps rows must give each of num_minibatches a chunk, and two rows at least")
    return agent


make_agent = make_recurrent_agent  # as the run section calls it


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
