# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2",
#   "tyro==1.0.17", "tqdm==4.70.1", "moviepy==2.2.1", "minigrid==3.2.0",
# ]
# ///
"""PPO with demonstrations (PPO+D), all of it, in this one file: hard exploration from a single demonstration.

Where rewards are so sparse that chance never finds one, PPO learns nothing. One demonstration is enough to begin with:
at the end of each episode or replay a slot of the vector environment draws what comes next,

    a replay of a reward demo with probability rho, of value demo i with phi v_i^alpha / sum_j v_j^alpha,
    v_i = max_t V(s_t), else the environment                                        (arXiv 2007.03328, section 3)

A replay streams its stored steps into the rollout; the current critic values them, and their log-probability counts as
log 1 = 0 (discrete actions). The ratio of PPO is then pi <= 1: what turned out better than expected is imitated without
a clip, if weakly while pi is small. The agent's own episodes become reward demos if their return is good enough, value
demos if the critic thinks highly of some state in them; new reward demos shift probability from phi to rho. Everything
else is PPO, with or without a GRU.

    python ppod.py                              # MiniGrid-DoorKey-16x16-v0 from one demonstration, some minutes
    python ppod.py --env-id MountainCar-v0      # with a reward of 1 at the goal and 0 elsewhere, a minute
    python demos/record.py --env-id MiniGrid-DoorKey-8x8-v0    # play yourself, save good episodes in demos/

Papers: PPO+D arXiv 2007.03328, PPO arXiv 1707.06347, GAE arXiv 1506.02438, GRU arXiv 1406.1078.
The story ends at "# ===== helpers"; the code below it reads demos, makes environments and keeps the run folder.
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
from torch import nn
from tqdm import tqdm


@dataclass(kw_only=True)
class Args:
    """Every flag and its default. For some environments, the default one included, TUNED (below) replaces some."""

    # run
    env_id: str = "MiniGrid-DoorKey-16x16-v0"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers, applied in order; without a dot: a class of this script
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    total_timesteps: int = 500_000  # environment steps to train for (neither resets nor replays count)
    stop_at_return: float | None = None  # stop once the mean of the last 100 training episodes reaches this
    seed: int = 1  # seed of everything that is drawn at random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps; auto: the CPU
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, on separate environments, with the likeliest actions
    sample_actions: bool = False  # evaluations draw actions: with no memory, the likeliest ones may go round in circles
    capture_video: bool = False  # film an episode at each evaluation
    checkpoint_every: int = 0  # steps between checkpoints, at which all episodes begin anew; 0: a sensible interval
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # weights that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window
    config: str | None = None  # config.json of an earlier run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__SCRIPT__SEED__TIME
    progress: bool = True  # show the progress bar
    # demonstrations
    rho: float = 0.1  # probability that the next episode is a replay of a reward demo
    phi: float = 0.3  # probability that it is a replay of a value demo
    alpha: float = 10.0  # exponent of the value demos' priorities; 0 draws them uniformly
    # a new reward demo moves phi / N from phi to rho; N: room for value demos, or how many there are now
    anneal_by: Literal["capacity", "current"] = "capacity"
    demo_capacity: int = 51  # demos in both lists together
    initial_reward_threshold: float | None = None  # least return of a reward demo; None: the demos' lowest, but above 0
    initial_human_demos_dir: str | None = None  # folder of demos that are never dropped
    initial_agent_demos_dir: str | None = None  # folder of demos that may be dropped
    supplementary_demos_dir: str | None = None  # folder that is watched: each new file becomes an agent demo
    target_agent_demos_dir: str | None = None  # folder in which the agent's best demos are saved
    num_agent_demos_to_save: int = 10  # as many reward demos, and as many value demos
    save_demos_every: int = 10  # rollouts between saves
    # algorithm
    recurrent: bool = True  # a GRU between trunk and heads; without it the agent has no memory
    gru_size: int = 128  # units of the GRU
    chunk_length: int = 32  # steps that gradients flow back through the GRU
    learning_rate: float = 3e-4  # Adam's learning rate
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
    clip_vloss_coef: float = 0.2  # values may move this far before their loss is clipped
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # gradients longer than this are scaled down to it
    target_kl: float | None = None  # no more epochs once the KL divergence of an epoch's last minibatch exceeds this
    hidden_sizes: tuple[int, ...] = (128,)  # sizes of the trunk's layers
    normalize_obs: bool = False  # normalise observations (vectors) by their running mean and standard deviation
    normalize_reward: bool = False  # divide rewards by the running standard deviation of the discounted return
    clip_reward: bool = False  # learn from the signs of rewards; reported returns are always true ones


# ------------------------------------------------------------------------------------------------------- networks


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


def categorical(logits, actions, sizes):
    """Log-probs and entropies, each (B,), of actions (B, factors).

    The factors are independent of each other; the logits (B, sum of sizes) of all of them stand side by side.
    """
    log_prob = 0
    entropy = 0
    for factor_logits, action in zip(logits.split(sizes, dim=1), actions.split(1, dim=1)):
        log_probs = factor_logits.log_softmax(1)
        log_prob = log_prob + log_probs.gather(1, action).squeeze(1)
        entropy = entropy - (log_probs.exp() * log_probs).sum(1)
    return log_prob, entropy


def gaussian(mean, actions, log_std):
    """Log-densities and entropies, each (B,), of actions (B, D) before they are clipped to the environment's bounds."""
    z = (actions - mean) / log_std.exp()
    log_density = -0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi)
    entropy = log_std + 0.5 * math.log(2 * math.pi * math.e)
    return log_density.sum(1), entropy.sum().expand(len(mean))


class RecurrentAgent(nn.Module):
    """Actor and critic: two linear heads on one trunk, an MLP and, unless feed-forward, a GRU (arXiv 1406.1078).

    A Box action is Gaussian. A discrete action consists of categorical factors: Discrete has one, MultiDiscrete has
    several, MultiBinary one of two categories for each bit. Everywhere but in the environment, actions are (…, D): a
    column for each factor or dimension. A MiniGrid image goes through GridPatches first.

    Sequences are (L, B, …): L steps in time, B of them side by side. The GRU's state runs on from step to step; after a
    reset row (see SequenceBuffer) it begins at zero, with an episode or a replay.
    """

    def __init__(self, observation_space, action_space, args, device="cpu"):
        super().__init__()
        self.device = device
        self.action_space = action_space
        self.continuous = isinstance(action_space, spaces.Box)
        self.output_sizes = output_sizes(action_space)  # categories of each factor; of a Box only its dimensions
        self.state_size = args.gru_size if args.recurrent else 0
        outputs = sum(self.output_sizes)
        inputs = math.prod(observation_space.shape)
        self.patches = None
        if is_grid(observation_space):
            self.patches = GridPatches(observation_space.shape)
            inputs = self.patches.outputs
        *sizes, width = args.hidden_sizes
        self.trunk = nn.Sequential(mlp(inputs, sizes, width, gain=2**0.5), nn.Tanh())
        self.gru = None
        if args.recurrent:
            self.gru = gru_cell(width, args.gru_size)
            width = args.gru_size
        # The actor's small gain makes the first policy nearly uniform, or the first means nearly 0.
        self.actor = layer(nn.Linear(width, outputs), gain=0.01)
        self.critic = layer(nn.Linear(width, 1), gain=1.0)
        if self.continuous:
            self.log_std = nn.Parameter(torch.zeros(outputs))
        self.to(device)
        # Created after the move, so that they stay on the CPU: they are float64, which some devices lack.
        self.obs_stats = RunningMeanStd(inputs) if args.normalize_obs else None
        self.return_stats = RunningMeanStd() if args.normalize_reward else None
        self.sample_actions = args.sample_actions
        self.seed = args.seed
        self.begin_episodes(0)

    def trunk_output(self, obs):
        """(B, F) of observations (B, …): MiniGrid images through GridPatches, vectors flat and normalised."""
        if self.patches is not None:
            return self.trunk(self.patches(obs))
        obs = obs.flatten(1).float()
        return self.trunk(obs if self.obs_stats is None else self.obs_stats(obs))

    def features(self, obs, reset_rows, state):
        """What the heads see of sequences, (L, B, F), and the GRU's states after each step, (L, B, gru_size).

        obs is (L, B, …), reset_rows (L, B), and state (B, gru_size) that before the first step.
        """
        x = self.trunk_output(obs.flatten(0, 1)).unflatten(0, reset_rows.shape)
        if self.gru is None:
            return x, state.expand(len(obs), *state.shape)
        features = []
        states = []
        for t in range(len(obs)):
            state = self.gru(x[t], state)
            features.append(state)
            state = state * ~reset_rows[t, :, None]  # after a reset row the next row begins an episode
            states.append(state)
        return torch.stack(features), torch.stack(states)

    def value(self, obs, state):
        """The critic's values (B,) of observations (B, …) that come after GRU states (B, gru_size)."""
        no_reset_rows = torch.zeros(1, len(obs), dtype=torch.bool, device=self.device)
        features, _ = self.features(obs[None], no_reset_rows, state)
        return self.critic(features[0]).squeeze(1)

    def forward(self, obs, reset_rows, actions, state):
        """(log-probs, entropies, values), each (L, B), and GRU states after each step, for sequences as in `features`.

        actions are (L, B, D).
        """
        features, states = self.features(obs, reset_rows, state)
        output = self.actor(features).flatten(0, 1)
        if self.continuous:
            log_probs, entropies = gaussian(output, actions.flatten(0, 1), self.log_std)
        else:
            log_probs, entropies = categorical(output, actions.flatten(0, 1), self.output_sizes)
        values = self.critic(features).squeeze(2)
        return log_probs.view_as(values), entropies.view_as(values), values, states

    def certain_log_prob(self):
        """log mu, where mu is how probable a replayed action was: PPO+D takes any for certain, so log 1 = 0.

        With continuous actions nothing has probability 1: there mu is taken as the density at the mean of a Gaussian
        with our present std. So pi/mu <= 1 at first, as for discrete actions.
        """
        if not self.continuous:
            return 0.0
        mean = torch.zeros_like(self.log_std)[None]
        log_density, _ = gaussian(mean, mean, self.log_std.detach())
        return log_density.item()

    @torch.no_grad()
    def policy_output(self, obs, reset_rows, state):
        """(logits or means (B, …), a NumPy array, and the next GRU state) for NumPy observations (B, …) of one step."""
        dtype = torch.uint8 if obs.dtype == np.uint8 else torch.float32
        obs = torch.as_tensor(obs, dtype=dtype, device=self.device)
        reset_rows = torch.as_tensor(reset_rows, device=self.device)
        features, states = self.features(obs[None], reset_rows[None], state)
        return self.actor(features[0]).cpu().numpy(), states[0]

    def sample(self, obs, reset_rows, state, rng=None):
        """(actions (B, D), next GRU state) for NumPy observations of one step.

        They are drawn with the NumPy generator `rng`; without it, these are the likeliest actions.
        """
        output, state = self.policy_output(obs, reset_rows, state)
        if self.continuous:
            std = self.log_std.detach().exp().cpu().numpy()
            noise = 0 if rng is None else rng.standard_normal(output.shape, np.float32)
            return output + std * noise, state
        if rng is not None:  # the Gumbel-max trick: the argmax of logits + Gumbel noise is a draw from their softmax
            output = output + rng.gumbel(size=output.shape)
        return self.argmax_of_factors(output), state

    def argmax_of_factors(self, logits):
        """The category with the largest logit in each factor, (B, factors)."""
        categories = []
        first = 0
        for size in self.output_sizes:
            categories.append(logits[:, first : first + size].argmax(1))
            first += size
        return np.array(categories).T

    def begin_episodes(self, episodes):
        """Forget all that `act` remembers: evaluations call this before they begin. Draws begin anew as well."""
        self.state = torch.zeros(episodes, self.state_size, device=self.device)
        self.rng = np.random.default_rng(self.seed)

    def act(self, obs):
        """What the policy does in evaluations, as the environment takes it; it remembers the GRU's state.

        These are the likeliest actions or, with --sample-actions, draws.
        """
        if len(obs) != len(self.state):
            self.begin_episodes(len(obs))
        no_reset_rows = np.zeros(len(obs), bool)  # an evaluation counts nothing after an episode's end
        rng = self.rng if self.sample_actions else None
        actions, self.state = self.sample(obs, no_reset_rows, self.state, rng)
        return to_env(actions, self.action_space)


# -------------------------------------------------------------------------------------------- returns and rollout
# All tensors are time-major, (T, N). next_values[t] is the critic's value of the observation after step t. After
# termination it counts as 0: nothing follows. After truncation it stands for the rewards that were cut off. Rewards of
# later episodes never count. If both flags are set, terminated wins.


def compute_gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalised advantage estimation: (advantages, lambda-returns), each (T, N).

    A_t = delta_t + gamma lambda A_{t+1},   delta_t = r_t + gamma V(s_{t+1}) - V(s_t)   (arXiv 1506.02438, eqs. 11, 16)
    """
    deltas = rewards + gamma * next_values * ~terminated - values
    decay = gamma * gae_lambda * ~(terminated | truncated)
    advantages = torch.empty_like(rewards)
    next_advantage = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        advantages[t] = deltas[t] + decay[t] * next_advantage
        next_advantage = advantages[t]
    return advantages, advantages + values


# One step of all slots: actions (N, D), what they led to (N, …), rewards and flags (N,). NumPy arrays.
Step = namedtuple("Step", "actions next_obs rewards terminated truncated")

# Chunks of L steps, (L, B, …), and the GRU's state (B, gru_size) before each. Rows are trained on unless they are reset
# rows. The loss compares the present log-probs and values with the old ones.
Sequences = namedtuple("Sequences", "obs reset_rows replayed actions old_log_probs old_values advantages returns state")


class SequenceBuffer:
    """One rollout of N slots, time-major (T, N, …), real episodes and replays alike; it is cut into chunks for the GRU.

        row  observation          reward  terminated  truncated  reset row  replayed
         0   last of the demo     r       no          yes        no         yes
         1   its final one        0       no          no         yes        no
         2   s0 of an episode     r0      no          no         no         no

    A slot replays the end of a demo, then shows its environment. Row 1 is a reset row and never trained on, but it
    holds the true successor of row 0, whose value stands for the rest of a demo that ends truncated. The row after the
    end of a real episode is just the same, for in it the environment resets itself.
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
        self.demo_ids = np.zeros((T, N), np.int64)  # which demo a row replays; 0: none
        self.state = torch.zeros(N, 0)  # of the GRU, (N, gru_size), before row 0
        self.discounted_returns = np.zeros(N)  # G of the episodes under way: see scale_rewards

    def add(self, t, obs, step, reset_rows, demo_ids):
        """Set row t of all slots: observations, what their Step was, whether it is a reset row, and which replay."""
        self.obs[t] = obs
        self.obs[t + 1] = step.next_obs
        self.actions[t] = step.actions
        self.rewards[t] = step.rewards
        self.terminated[t] = step.terminated
        self.truncated[t] = step.truncated
        self.reset_rows[t] = reset_rows
        self.demo_ids[t] = demo_ids

    def scale_rewards(self, stats, gamma):
        """Divide rewards by the running deviation of G_t = r_t + gamma G_{t-1}, a sum over the past; clip to ±10.

        G runs on from rollout to rollout and begins anew with each episode; `stats` is its RunningMeanStd.
        """
        all_returns = np.zeros(self.rewards.shape)
        for t in range(len(all_returns)):
            self.discounted_returns = self.rewards[t] + gamma * self.discounted_returns
            all_returns[t] = self.discounted_returns
            self.discounted_returns[self.terminated[t] | self.truncated[t]] = 0
        stats.update(all_returns[~self.reset_rows])
        self.rewards = np.clip(self.rewards / math.sqrt(stats.var.item() + 1e-8), -10, 10)

    def played_obs(self):
        """Observations of all rows but reset rows, flat: (rows, numbers)."""
        obs = self.obs[:-1][~self.reset_rows]
        return obs.reshape(len(obs), math.prod(obs.shape[1:]))

    @torch.no_grad()
    def log_probs_and_values(self, agent):
        """Log-probs (T, N) of the actions and values (T + 1, N) of the observations under the agent as it is now.

        The log-probs of replayed rows are those of an action taken with certainty, as if by a demonstrator, even where
        the agent itself once drew it. Sets `states` (T, N, gru_size), those of the GRU before each row.
        """
        obs = torch.as_tensor(self.obs, device=agent.device)
        reset_rows = torch.as_tensor(self.reset_rows, device=agent.device)
        actions = torch.as_tensor(self.actions, device=agent.device)
        replayed = torch.as_tensor(self.demo_ids > 0, device=agent.device)
        log_probs, _, values, states = agent(obs[:-1], reset_rows, actions, self.state)
        last_values = agent.value(obs[-1], states[-1])
        log_probs[replayed] = agent.certain_log_prob()  # PPO+D's trick: what is replayed counts as certain
        self.states = torch.cat([self.state[None], states[:-1]])
        return log_probs, torch.cat([values, last_values[None]])

    def compute_advantages(self, log_probs, values, args):
        """Set advantages, returns, old_log_probs and old_values, each (T, N), for the minibatches.

        log_probs (T, N) and values (T + 1, N) are those of log_probs_and_values.
        """
        rewards = torch.as_tensor(self.rewards, device=values.device)
        terminated = torch.as_tensor(self.terminated, device=values.device)
        truncated = torch.as_tensor(self.truncated, device=values.device)
        self.old_log_probs = log_probs
        self.old_values = values[:-1]
        steps = rewards, values[:-1], values[1:], terminated, truncated
        self.advantages, self.returns = compute_gae(*steps, args.gamma, args.gae_lambda)

    def chunks(self, x, length):
        """(T, N, …) -> (L, N T / L, …): chunks of L steps side by side, those of a slot in a row."""
        x = torch.as_tensor(x, device=self.advantages.device)
        return x.unflatten(0, (-1, length)).movedim(0, 2).flatten(1, 2)

    def minibatches(self, num_minibatches, length, rng):
        """Yield Sequences of `length` steps that together hold every chunk once, in random order."""
        rows = self.obs[:-1], self.reset_rows, self.demo_ids > 0, self.actions
        results = self.old_log_probs, self.old_values, self.advantages, self.returns
        fields = [self.chunks(field, length) for field in (*rows, *results)]
        states = self.chunks(self.states, length)[0]  # before the first step of each chunk
        order = torch.as_tensor(rng.permutation(len(states)), device=states.device)
        for part in order.tensor_split(num_minibatches):
            batch = Sequences(*[field[:, part] for field in fields], states[part])
            if not batch.reset_rows.all():  # else there is nothing to learn from
                yield batch

    def explained_variance(self):
        """1 - Var(R - V) / Var(R): 1 if the critic foresaw all returns R, 0 if it was no better than a constant."""
        played = torch.as_tensor(~self.reset_rows, device=self.returns.device)
        if not played.any():
            return torch.zeros(())
        returns = self.returns[played]
        errors = returns - self.old_values[played]
        return 1 - errors.var(correction=0) / (returns.var(correction=0) + 1e-8)


# -------------------------------------------------------------------------------------------------- demonstrations


@dataclass(eq=False)
class Demo:
    """A trajectory that slots of the vector environment can replay."""

    obs: np.ndarray  # (T + 1, …), the last of which is the final observation
    actions: np.ndarray  # (T, D), as the agent has them
    rewards: np.ndarray  # (T,), raw
    terminated: bool  # whether the episode ended with the last row; if not, it was truncated there
    total: float  # return of the whole episode, of which this may be the beginning
    human: bool = False  # never dropped
    max_value: float = 0.0  # the critic's highest: over the whole episode when added, later over its last replay
    id: int = 0  # given by PPODBuffer


def as_demo(obs, actions, rewards, terminated, max_value=0.0):
    """The Demo that an episode becomes, given as Demo's fields of its T steps.

    What follows the last positive reward is cut off, penalties too (it is meant for sparse rewards that are never
    negative); the demo then ends truncated. An episode without any is kept whole. The return and the highest value are
    those of the whole episode all the same.
    """
    length = len(rewards)
    if (rewards > 0).any():
        length = int(np.flatnonzero(rewards > 0)[-1]) + 1
    return Demo(
        obs=obs[: length + 1].copy(),
        actions=actions[:length].copy(),
        rewards=rewards[:length].copy(),
        terminated=bool(terminated and length == len(rewards)),
        total=float(rewards.sum(dtype=np.float64)),
        max_value=float(max_value),
    )


def replay_probabilities(max_values, alpha):
    """p_i = v_i^alpha / sum_j v_j^alpha (arXiv 2007.03328, section 3) over the highest values v of value demos.

    Where some v is negative, all are counted from the lowest; if all are zero then, all demos are equally likely. So p
    is finite, not negative, and never lower for a higher value.
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

    Reward demos are from outside, or the agent's own best; value demos are those of its other episodes of whose states
    the critic thinks most highly. While there are value demos, each new reward demo makes replays of reward demos
    likelier (rho), of value demos less likely (phi).
    """

    def __init__(self, args, num_envs, observation_space, action_space):
        self.args = args
        self.spaces = observation_space, action_space
        self.reward_demos = []
        self.value_demos = []
        self.value_capacity = args.demo_capacity  # room for value demos; make_demo_buffer takes off the initial demos
        self.rho = args.rho
        self.phi = args.phi
        self.reward_threshold = args.initial_reward_threshold  # None: any return above 0 is good
        self.last_id = 0
        self.seen = {}  # supplementary files: name -> TAKEN, or the mtime of a bad one, retried once it changes
        self.rollouts = 0
        self.replayed_rows = 0
        self.replays = [None] * num_envs  # the Demo that each slot replays; None: it shows its environment
        self.position = np.zeros(num_envs, int)  # the next step of that Demo
        self.needs_reset = np.zeros(num_envs, bool)  # whether its environment ran on unseen during a replay
        # What each slot's episode had in earlier rollouts: parts (obs, actions, rewards, values), one from each.
        self.episodes = [[] for _ in range(num_envs)]

    def sample_demo(self, rng):
        """The Demo to replay next, or None: the environment, also where the list that was drawn is empty."""
        u = rng.random()
        if u < self.rho:
            if not self.reward_demos:
                return None
            return self.reward_demos[rng.integers(len(self.reward_demos))]
        if u < self.rho + self.phi and self.value_demos:
            probabilities = replay_probabilities([demo.max_value for demo in self.value_demos], self.args.alpha)
            return self.value_demos[rng.choice(len(probabilities), p=probabilities)]
        return None

    def draw_sources(self, slots, obs, rng):
        """Let slots draw what they show next. Returns obs (N, …) with the first observations of what they replay."""
        obs = obs.copy()
        for i in slots:
            demo = self.sample_demo(rng)
            self.replays[i] = demo
            self.position[i] = 0
            if demo is not None:
                obs[i] = demo.obs[0]
                self.needs_reset[i] = True
        return obs

    def restart(self, obs, rng):
        """Forget all episodes and replays under way. Returns what the slots show of new environments that show obs."""
        self.needs_reset[:] = False
        self.episodes = [[] for _ in self.episodes]
        return self.draw_sources(range(len(obs)), obs, rng)

    def draw_next(self, envs, reset_rows, next_obs, rng):
        """Let slots in a reset row draw what comes next. Returns next_obs (N, …) with its first observations."""
        next_obs = self.draw_sources(np.flatnonzero(reset_rows), next_obs, rng)
        shows_env = np.array([demo is None for demo in self.replays])
        to_reset = reset_rows & shows_env & self.needs_reset  # these drew their environments
        if to_reset.any():
            first_obs, _ = envs.reset(options={"reset_mask": to_reset})
            next_obs[to_reset] = first_obs[to_reset]
            self.needs_reset[to_reset] = False
        return next_obs

    def show_replays(self, reset_rows, step):
        """What the slots show: (the Step with replays in place of what the environments did, demo ids (N,), 0: none).

        Nothing happens in a reset row: no reward, no end, whatever an environment behind a replay did.
        """
        actions, next_obs, rewards, terminated, truncated = [array.copy() for array in step]
        rewards[reset_rows] = 0
        terminated[reset_rows] = False
        truncated[reset_rows] = False
        demo_ids = np.zeros(len(reset_rows), np.int64)
        for i in np.flatnonzero(~reset_rows):
            demo = self.replays[i]
            if demo is None:
                continue
            t = self.position[i]
            is_last = t + 1 == len(demo.rewards)
            actions[i] = demo.actions[t]
            next_obs[i] = demo.obs[t + 1]
            rewards[i] = demo.rewards[t]
            terminated[i] = is_last and demo.terminated
            truncated[i] = is_last and not demo.terminated
            demo_ids[i] = demo.id
            self.position[i] += 1
        self.replayed_rows += int((demo_ids > 0).sum())
        return Step(actions, next_obs, rewards, terminated, truncated), demo_ids

    def track_potential_demos(self, rollout, values):
        """Look at all episodes and replays that ended in a SequenceBuffer with these values (T + 1, N).

        A real episode is a candidate. A value demo that was replayed gets the highest value that the critic gave it
        this time.
        """
        values = values.cpu().numpy()
        begins = np.zeros(len(self.episodes), int)
        for t, i in np.argwhere(rollout.terminated | rollout.truncated):  # in the order of time
            self.extend_episode(i, rollout, values, begins[i], t + 1)
            begins[i] = t + 1  # a reset row, which extend_episode leaves out
            obs, actions, rewards, episode_values = [np.concatenate(parts) for parts in zip(*self.episodes[i])]
            self.episodes[i] = []
            if rollout.demo_ids[t, i] > 0:
                for demo in self.value_demos:
                    if demo.id == rollout.demo_ids[t, i]:
                        demo.max_value = float(episode_values.max())
            else:
                obs = np.concatenate([obs, rollout.obs[t + 1, i][None]])
                self.consider(as_demo(obs, actions, rewards, rollout.terminated[t, i], episode_values.max()))
        for i, begin in enumerate(begins):  # what is still under way goes on in the next rollout
            self.extend_episode(i, rollout, values, begin, len(rollout.rewards))

    def extend_episode(self, i, rollout, values, begin, end):
        """Add rows [begin, end) of a rollout to what was seen of slot i's episode, without reset rows."""
        rows = begin + np.flatnonzero(~rollout.reset_rows[begin:end, i])
        if len(rows) > 0:
            part = rollout.obs[rows, i], rollout.actions[rows, i], rollout.rewards[rows, i], values[rows, i]
            self.episodes[i].append(part)

    def consider(self, demo):
        """Take an episode of the agent as a reward demo, as a value demo, or not at all.

        It is a value demo if there is room, or if the critic thought more highly of a state in it than of any in the
        lowest value demo.
        """
        if is_good(demo.total, self.reward_threshold):
            self.add_reward_demo(demo)
            return
        has_room = len(self.reward_demos) + len(self.value_demos) < self.args.demo_capacity
        if has_room or (self.value_demos and demo.max_value > min(d.max_value for d in self.value_demos)):
            self.add(self.value_demos, demo)
            self.check_demo_buffer_capacity()

    def add_reward_demo(self, demo):
        """A new reward demo: anneal, make room, and raise the threshold to the lowest return in the list."""
        self.add(self.reward_demos, demo)
        self.anneal_parameters()
        self.check_demo_buffer_capacity()
        lowest = min(d.total for d in self.reward_demos)
        if is_good(lowest, self.reward_threshold):  # it never falls; without the flag it is above 0
            self.reward_threshold = lowest

    def add(self, demo_list, demo):
        """Append the Demo to one of the lists, under an id of its own."""
        self.last_id += 1
        demo.id = self.last_id
        demo_list.append(demo)

    def anneal_parameters(self):
        """For a new reward demo, move phi_0 / |D_V| of probability from phi to rho, if there are value demos.

        |D_V| is how many value demos there was room for at the start, or with --anneal-by current how many there are.
        """
        if not self.value_demos:
            return
        size = self.value_capacity if self.args.anneal_by == "capacity" else len(self.value_demos)
        total = self.args.rho + self.args.phi
        self.rho = min(self.rho + self.args.phi / size, total)
        self.phi = total - self.rho

    def check_demo_buffer_capacity(self):
        """Drop what exceeds the capacity: the lowest value demos first, then the longest reward demo of an agent."""
        while len(self.reward_demos) + len(self.value_demos) > self.args.demo_capacity:
            from_agents = [demo for demo in self.reward_demos if not demo.human]
            if self.value_demos:
                self.value_demos.remove(min(self.value_demos, key=lambda demo: demo.max_value))
            elif from_agents:
                self.reward_demos.remove(max(from_agents, key=lambda demo: len(demo.rewards)))
            else:
                break

    def load_supplementary_demos(self):
        """Take each new file in the folder that is watched as an agent's demo; warn of a bad one, until it changes."""
        demos, self.seen = new_demos(self.args, self.seen, *self.spaces)
        for demo in demos:
            self.add_reward_demo(demo)

    def save_demos(self, is_finished):
        """Every --save-demos-every rollouts, and at the end, write the best demos to target_agent_demos_dir."""
        self.rollouts += 1
        if is_finished or self.rollouts % self.args.save_demos_every == 0:
            own = [demo for demo in self.reward_demos if not demo.human]
            save_best_demos(own, self.value_demos, self.args, *self.spaces)

    COUNTERS = "rho phi value_capacity reward_threshold last_id rollouts replayed_rows".split()

    def figures(self):
        """What to log about the demos."""
        figures = {"reward_demos": len(self.reward_demos), "value_demos": len(self.value_demos)}
        figures |= {"rho": self.rho, "phi": self.phi}
        if self.reward_threshold is not None:
            figures["reward_threshold"] = self.reward_threshold
        return figures

    def state_dict(self):
        """All that outlives episodes, as tensors and plain types, for a checkpoint."""
        state = {name: getattr(self, name) for name in self.COUNTERS}
        state["seen"] = dict(self.seen)
        state["reward_demos"] = [demo_state(demo) for demo in self.reward_demos]
        state["value_demos"] = [demo_state(demo) for demo in self.value_demos]
        return state

    def load_state_dict(self, state):
        """Put back what state_dict returned. ValueError, or the like, if it is of another kind."""
        for name in self.COUNTERS:
            setattr(self, name, number_or_none(state[name]))
        self.seen = dict(state["seen"])
        self.reward_demos = [restored_demo(fields, *self.spaces) for fields in state["reward_demos"]]
        self.value_demos = [restored_demo(fields, *self.spaces) for fields in state["value_demos"]]


def is_good(total, threshold):
    """Whether an episode of this return becomes a reward demo; without a threshold the return must be positive."""
    if threshold is None:
        return total > 0
    return total >= threshold - 1e-6 * max(1, abs(threshold))  # a sum of float32 may be a little less than is meant


# --------------------------------------------------------------------------------------------------------- losses


def policy_loss(log_ratios, advantages, clip_coef):
    """The clipped surrogate, negated (arXiv 1707.06347, eq. 7); log_ratios (B,) = log pi - log pi_old."""
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.min(ratios * advantages, clipped * advantages).mean()


def value_loss(values, old_values, returns, clip_coef=None):
    """Half the mean squared error; with `clip_coef` (OpenAI baselines, ppo2), moving a value further gains nothing."""
    errors = (values - returns) ** 2
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (clipped - returns) ** 2)
    return 0.5 * errors.mean()


def normalize(advantages):
    """Zero mean and unit (population) deviation over the batch (B,)."""
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


def approximate_kl(log_ratios):
    """KL(pi_old || pi) from samples of pi_old: E[(r - 1) - log r], unbiased and never negative (Schulman's k3)."""
    return (log_ratios.exp() - 1 - log_ratios).mean()


def sequence_loss(agent, batch, args):
    """PPO's loss of Sequences, to be minimised, and a dict of figures to log. Reset rows count for nothing.

    In replayed rows the ratio is pi/mu (see certain_log_prob), with mu = 1 for discrete actions. So A > 0 is never
    clipped, and A < 0 counts only while pi > 1 - eps. This ratio does not tell how far the policy has moved: approx_kl
    and clip_fraction leave these rows out.
    """
    log_probs, entropies, values, _ = agent(batch.obs, batch.reset_rows, batch.actions, batch.state)
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
    own = log_ratios.detach()[~batch.replayed[trained]]
    if len(own) == 0:  # nothing but replays
        own = torch.zeros(1)
    figures = {
        "loss": loss.detach(),
        "policy_loss": pg_loss.detach(),
        "value_loss": v_loss.detach(),
        "entropy": entropy.detach(),
        "approx_kl": approximate_kl(own),
        "clip_fraction": ((own.exp() - 1).abs() > args.clip_coef).float().mean(),
    }
    return loss, figures


# ------------------------------------------------------------------------------------------------------- training


def train(args):
    """Train with `args`; return the final figures, which summary.json holds as well. UserError on bad input."""
    check_args(args)
    envs = make_envs(args, args.num_envs)
    check_sequences(args, envs)
    agent = make_agent(args, envs)
    optimizer = Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)  # below; same results as torch.optim.Adam
    demos = make_demo_buffer(args, envs)  # it holds the initial demos
    run = Run(args, agent, envs, optimizer=optimizer, demos=demos)  # with --resume, it loads a checkpoint into these

    while not run.is_finished():
        if run.restarts:  # at the start, and after each checkpoint, which holds no episodes: all begin anew
            envs, obs, rng = run.new_envs()  # the first time: those made above
            obs = demos.restart(obs, rng)
            state = torch.zeros(args.num_envs, agent.state_size, device=agent.device)  # of the GRU
            reset_rows = np.zeros(args.num_envs, bool)  # whether a slot's next row is a reset row: see SequenceBuffer
            buffer = SequenceBuffer(args.num_steps, args.num_envs, envs.single_observation_space, agent.action_space)
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - run.step / args.total_timesteps)
        demos.load_supplementary_demos()
        buffer.state = state
        # All environments step, even behind replays. A reset row follows an end: its next_obs begins what a slot draws.
        for t in range(args.num_steps):
            actions, state = agent.sample(obs, reset_rows, state, rng)
            next_obs, rewards, terminated, truncated, _ = envs.step(to_env(actions, agent.action_space))
            next_obs = demos.draw_next(envs, reset_rows, next_obs, rng)  # slots in a reset row: replay or environment?
            step, demo_ids = demos.show_replays(reset_rows, Step(actions, next_obs, rewards, terminated, truncated))
            buffer.add(t, obs, step, reset_rows, demo_ids)
            ended = step.terminated | step.truncated
            real = ~reset_rows & (demo_ids == 0)
            run.count(step.next_obs, step.rewards * real, ended & real, ~real)  # neither replays nor reset rows count
            obs = step.next_obs
            reset_rows = ended

        log_probs, values = buffer.log_probs_and_values(agent)  # of the whole rollout at once: no weight has changed
        demos.track_potential_demos(buffer, values)  # before rewards are scaled: demos keep them raw
        if args.clip_reward:
            buffer.rewards = np.sign(buffer.rewards)
        if args.normalize_reward:
            buffer.scale_rewards(agent.return_stats, args.gamma)
        buffer.compute_advantages(log_probs, values, args)
        run.log(learning_rate=optimizer.param_groups[0]["lr"], explained_variance=buffer.explained_variance())
        run.log(training_rows=run.step + demos.replayed_rows, **demos.figures())

        for _ in range(args.update_epochs):
            for batch in buffer.minibatches(args.num_minibatches, chunk_length(args), rng):
                loss, figures = sequence_loss(agent, batch, args)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
                run.log(**figures)
            if args.target_kl is not None and figures["approx_kl"] > args.target_kl:
                break

        if args.normalize_obs:  # only now: learning must see observations normalised as they were for acting
            agent.obs_stats.update(buffer.played_obs())
        demos.save_demos(run.is_finished())
        run.write_what_is_due()  # a row of metrics.csv, an evaluation, a checkpoint
    return run.finish()


# ===== helpers: settings, parts of the networks, demo files, Adam, environments =======================================

RANGES = {"num_steps": (1, 1e9), "num_minibatches": (1, 1e9), "update_epochs": (1, 1e9), "gamma": (0, 1)}
RANGES |= {"gae_lambda": (0, 1), "hidden_sizes": (1, 1e5), "gru_size": (1, 1e5), "chunk_length": (1, 1e9)}
RANGES |= {"rho": (0, 1), "phi": (0, 1), "demo_capacity": (1, 1e9), "initial_reward_threshold": (-1e15, 1e15)}
RANGES |= {"num_agent_demos_to_save": (1, 1e9), "save_demos_every": (1, 1e9)}
# The columns of metrics.csv that are this script's own, and those of them that the learning curve shows as well.
FIGURES = "training_rows reward_demos value_demos reward_threshold rho phi".split()
FIGURES += "learning_rate loss policy_loss value_loss entropy approx_kl clip_fraction explained_variance".split()
CURVE = ["policy_loss", "value_loss", "entropy"]

# Settings that learn, per environment. What the user gives wins. docs/ppod.md has the evidence for them.
DEMOS = Path(__file__).parent / "demos"
TUNED = {
    "MiniGrid-DoorKey-16x16-v0": {
        "initial_human_demos_dir": str(DEMOS / "MiniGrid-DoorKey-16x16-v0"), "initial_reward_threshold": 0.9,
        "max_episode_steps": 2560, "sample_actions": True, "rho": 0.1, "phi": 0.3, "num_envs": 16, "recurrent": False,
        "hidden_sizes": (128,), "num_minibatches": 8, "update_epochs": 8, "learning_rate": 1e-3, "gae_lambda": 0.97,
        "norm_adv": False, "ent_coef": 0.002, "total_timesteps": 590_000, "stop_at_return": 0.94,
    },
    "MountainCar-v0": {
        "wrappers": ("GoalReward",), "initial_human_demos_dir": str(DEMOS / "MountainCar-v0"), "rho": 0.3, "phi": 0.0,
        "num_envs": 16, "hidden_sizes": (64,), "recurrent": False, "normalize_obs": True, "learning_rate": 1e-3,
        "total_timesteps": 200_000,
    },
    # without demonstrations: where rewards are frequent, replays of the agent's own episodes do no harm; one seed
    "CartPole-v1": {
        "num_envs": 32, "num_steps": 64, "num_minibatches": 8, "hidden_sizes": (64, 64), "recurrent": False,
        "learning_rate": 2e-3, "gamma": 0.98, "gae_lambda": 0.9, "ent_coef": 0.0, "total_timesteps": 147_000,
    },
}  # fmt: skip


def tuned_settings(args):
    """The settings of TUNED for args.env_id."""
    return TUNED.get(args.env_id, {})


def chunk_length(args):
    """Steps of a chunk: single rows where nothing goes back in time."""
    return args.chunk_length if args.recurrent else 1


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


def gru_cell(inputs, size):
    """A GRUCell with orthogonal weights and zero biases."""
    gru = nn.GRUCell(inputs, size)
    nn.init.orthogonal_(gru.weight_ih)
    nn.init.orthogonal_(gru.weight_hh)
    nn.init.zeros_(gru.bias_ih)
    nn.init.zeros_(gru.bias_hh)
    return gru


CELL = [11, 6, 4]  # MiniGrid's numbers of objects, colours and states: a cell of its images has one of each


def is_grid(space):
    """Whether a Box holds MiniGrid's images: not colours, but an object, its colour and its state per cell."""
    return space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[2] == len(CELL)


class GridPatches(nn.Module):
    """Features of all 3 x 3 patches of a MiniGrid image whose cells are one-hot.

    One set of weights for the whole view: what a key means does not depend on where it is seen. One demonstration shows
    the agent few of these places.
    """

    def __init__(self, shape, features=16):
        super().__init__()
        width = min(3, shape[0])
        height = min(3, shape[1])
        self.conv = layer(nn.Conv2d(sum(CELL), features, kernel_size=(width, height)))
        self.outputs = features * (shape[0] - width + 1) * (shape[1] - height + 1)

    def one_hot(self, images):
        """(B, width, height, 11 + 6 + 4) of objects, colours and states by number, images (B, width, height, 3)."""
        parts = []
        for i, size in enumerate(CELL):
            with blame("an image holds other numbers than MiniGrid's objects, colours and states", RuntimeError):
                parts.append(nn.functional.one_hot(images[..., i].long(), size))
        return torch.cat(parts, dim=3).float()

    def forward(self, images):
        """(B, outputs) for images (B, width, height, 3)."""
        return self.conv(self.one_hot(images).movedim(3, 1)).relu().flatten(1)


def output_sizes(space):
    """Numbers of categories of the factors of a discrete action space; of a Box, its number of dimensions."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ravel().tolist()
    if isinstance(space, spaces.MultiBinary):
        return [2] * math.prod(space.shape)
    return [math.prod(space.shape)]


def to_env(actions, space):
    """Actions (B, D) as the environment takes them: within the bounds of a Box, in the space's shape and type."""
    actions = actions.reshape(-1, *space.shape)
    if not isinstance(space, spaces.Box):
        return (actions + getattr(space, "start", 0)).astype(space.dtype)  # Discrete may begin at another number
    actions = np.clip(actions, space.low, space.high)
    if np.issubdtype(space.dtype, np.integer):
        actions = np.rint(actions)
    return actions.astype(space.dtype)


def from_env(actions, space):
    """The environment's actions (B, …) as the agent has them, (B, D). ValueError if one is not in the space."""
    actions = np.asarray(actions)
    if np.issubdtype(space.dtype, np.integer) and not np.issubdtype(actions.dtype, np.integer):
        raise ValueError(f"actions are {actions.dtype}, not whole numbers")
    own = actions.astype(space.dtype)  # a number that is too large comes back as another one
    if (own != actions).any() or not all(action in space for action in own):
        raise ValueError(f"an action is not in {space}")
    shape = len(actions), math.prod(space.shape)
    if isinstance(space, spaces.Box):
        return actions.reshape(shape).astype(np.float32)
    return (actions - getattr(space, "start", 0)).reshape(shape).astype(np.int64)


TAKEN = -1  # what PPODBuffer.seen says of a file that has become a demo


def demo_identity(args):
    """What a demo has to agree with: the environment as its file names it."""
    return {"env_id": args.env_id, "env_kwargs": json.loads(args.env_kwargs), "wrappers": list(args.wrappers)}


def demo_files(folder, args):
    """The demo files in a folder, sorted; none if no folder is given. UserError if it holds none."""
    if not folder:
        return []
    paths = sorted(Path(folder).glob("*.npz"))
    if not paths:
        how = f"python demos/record.py --env-id {args.env_id} (in the repository, whose demos/ you can copy as well)"
        raise UserError(f"there are no demos (.npz files) in {folder}; to make one: {how}")
    return paths


def check_demo(demo, observation_space, action_space):
    """The demo. ValueError if its arrays do not fit the spaces and each other, or hold a NaN or an infinity."""
    T = len(demo.rewards)
    D = math.prod(action_space.shape)
    fits = demo.obs.shape == (T + 1, *observation_space.shape) and demo.actions.shape == (T, D)
    if T == 0 or not fits or demo.rewards.shape != (T,):
        shapes = f"observations {demo.obs.shape}, actions {demo.actions.shape} and rewards {demo.rewards.shape}"
        raise ValueError(f"{shapes} do not fit {observation_space}, {action_space} and each other")
    for numbers in (demo.obs, demo.actions, demo.rewards, [demo.total, demo.max_value]):
        if not np.isfinite(numbers).all():
            raise ValueError("an observation, action or reward is NaN or infinite")
    return demo


def read_demo(path, args, observation_space, action_space):
    """The Demo in a file that save_demo (or whoever follows docs/ppod.md) wrote. Nothing in it is executed.

    UserError naming the file if it is damaged, or of another environment.
    """
    what = f"{path} is missing, damaged, or of another environment"
    with blame(what, Exception), np.load(path, allow_pickle=False) as file:  # a damaged file can raise anything
        for name, own in demo_identity(args).items():
            if json.loads(str(file[name])) != own:
                raise ValueError(f"its {name} is {file[name]}, not {json.dumps(own)}")
        given = np.concatenate([file["observation"], file["final_observation"][None]])
        obs = given.astype(np.uint8 if observation_space.dtype == np.uint8 else np.float32)
        if obs.dtype == np.uint8 and (obs != given).any():
            raise ValueError("observations are not of whole numbers from 0 to 255")
        rewards = file["reward"].astype(np.float32)
        total = float(file["episode_return"] if "episode_return" in file else rewards.sum(dtype=np.float64))
        if file["action"].shape != (len(rewards), *action_space.shape):
            raise ValueError(f"actions {file['action'].shape} and rewards {rewards.shape} do not fit {action_space}")
        demo = Demo(obs, from_env(file["action"], action_space), rewards, bool(file["terminated"]), total)
        return check_demo(demo, observation_space, action_space)


def save_demo(path, demo, args, observation_space, action_space):
    """Write a Demo as an .npz file, whole or not at all; docs/ppod.md describes the fields.

    ValueError if it does not fit the spaces, UserError if it cannot be written.
    """
    check_demo(demo, observation_space, action_space)
    fields = {"observation": demo.obs[:-1], "action": to_env(demo.actions, action_space), "reward": demo.rewards}
    fields |= {"final_observation": demo.obs[-1], "terminated": demo.terminated, "truncated": not demo.terminated}
    fields |= {"episode_return": demo.total}
    fields |= {name: json.dumps(value) for name, value in demo_identity(args).items()}
    with blame(f"cannot make the folder {path.parent}", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, lambda file: np.savez_compressed(file, **fields))


def save_best_demos(reward_demos, value_demos, args, observation_space, action_space):
    """Write the best demos to the subfolders `reward` and `value` of target_agent_demos_dir, the best as 0.npz."""
    if not args.target_agent_demos_dir:
        return
    best_reward = sorted(reward_demos, key=lambda demo: -demo.total)
    best_value = sorted(value_demos, key=lambda demo: -demo.max_value)
    for name, demos in (("reward", best_reward), ("value", best_value)):
        for rank, demo in enumerate(demos[: args.num_agent_demos_to_save]):
            path = Path(args.target_agent_demos_dir, name, f"{rank}.npz")
            save_demo(path, demo, args, observation_space, action_space)


def make_demo_buffer(args, envs):
    """A PPODBuffer that holds the demos in the folders that args name. UserError if one is bad, or too many are there.

    A run that is resumed from a checkpoint needs no folder: the checkpoint holds its demos.
    """
    check_demo_args(args)
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    demos = PPODBuffer(args, args.num_envs, obs_space, action_space)
    if args.resume and Path(args.resume, f"checkpoint{STATE}").exists():
        return demos
    for path in demo_files(args.initial_human_demos_dir, args):
        demo = read_demo(path, args, obs_space, action_space)
        demos.add(demos.reward_demos, replace(demo, human=True))
    for path in demo_files(args.initial_agent_demos_dir, args):
        demos.add(demos.reward_demos, read_demo(path, args, obs_space, action_space))
    demos.value_capacity = args.demo_capacity - len(demos.reward_demos)
    if demos.value_capacity < 0:
        raise UserError(f"{len(demos.reward_demos)} demos exceed demo_capacity = {args.demo_capacity}")
    if demos.reward_threshold is None and demos.reward_demos:
        lowest = min(demo.total for demo in demos.reward_demos)
        if is_good(lowest, None):
            demos.reward_threshold = lowest
    return demos


def new_demos(args, seen, observation_space, action_space):
    """(Demos in those files of supplementary_demos_dir that are not in `seen` yet, `seen` with all files that are now).

    `seen` has TAKEN, or when a bad file was last changed, by the file's name. Of a bad one a line on stderr warns.
    """
    seen = dict(seen)
    demos = []
    folder = args.supplementary_demos_dir
    for path in sorted(Path(folder).glob("*.npz")) if folder else []:
        changed = 0
        try:
            with blame(f"cannot read {path}", OSError):
                changed = path.stat().st_mtime_ns
            if seen.get(path.name) not in (TAKEN, changed):
                demos.append(read_demo(path, args, observation_space, action_space))
                seen[path.name] = TAKEN
        except UserError as error:
            seen[path.name] = changed
            tqdm.write(f"skipped: {error}", file=sys.stderr)
    return demos, seen


def demo_state(demo):
    """A Demo as a dict of tensors and plain types, for a checkpoint."""
    arrays = {"obs": demo.obs, "actions": demo.actions, "rewards": demo.rewards}
    return vars(demo) | {name: torch.from_numpy(array) for name, array in arrays.items()}


def restored_demo(fields, observation_space, action_space):
    """The Demo that demo_state has described. ValueError, or the like, if it is of another kind."""
    arrays = {name: np.asarray(fields[name]) for name in ("obs", "actions", "rewards")}
    return check_demo(Demo(**dict(fields) | arrays), observation_space, action_space)


def number_or_none(value):
    """The value. ValueError if it is neither a number nor None."""
    if value is not None and type(value) not in (int, float):
        raise ValueError("a number is wanted")
    return value


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


class GoalReward(gym.Wrapper):
    """Pay 1 where the episode terminates and 0 elsewhere: the sparse version of a task that ends at its goal."""

    def step(self, action):
        """As the environment's, with that reward."""
        obs, _, terminated, truncated, info = self.env.step(action)
        return obs, float(terminated), terminated, truncated, info


class GridImage(gym.ObservationWrapper):
    """The image alone of a MiniGrid observation, in bytes: object, colour and state of each cell.

    The network makes it one-hot (GridPatches). So a demo takes 147 bytes a step, not 4,116.
    """

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = env.observation_space["image"]

    def observation(self, observation):
        """The image of the Dict of MiniGrid."""
        return observation["image"]


MiniGridView = GridImage  # as make_vector_envs calls it


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


def make_demo_envs(args, num_envs, render_mode=None):
    """As make_vector_envs, but single environments side by side, with Boxes for observations: others are flattened.

    Single slots must be reset when a replay ends, and an environment's own vector version may not be able to. It is
    used only where nothing wraps the environment: so there always is a limit of the return, if one out of reach.
    """
    if args.max_episode_return is None and not args.env_id.startswith("ALE/"):
        args = replace(args, max_episode_return=math.inf)
    envs = make_vector_envs(args, num_envs, render_mode)
    space = envs.single_observation_space
    is_array = isinstance(space, spaces.Box) and space.shape != ()
    if not is_array and space.is_np_flattenable:  # a Sequence or Graph is not
        check_memory(f"the observations of {args.env_id}", 100 * num_envs * spaces.flatdim(space))
        envs = gym.wrappers.vector.FlattenObservation(envs)  # Discrete observations become one-hot
    return envs


make_envs = make_demo_envs  # as the run section calls it


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


untrusted_code = untrusted


def untrusted_code_or_folder(args, given):
    """As untrusted_code; nor may a file name a folder to write to."""
    if args.target_agent_demos_dir not in (None, given.target_agent_demos_dir):
        return f"--target-agent-demos-dir {args.target_agent_demos_dir}"
    return untrusted_code(args, given)


untrusted = untrusted_code_or_folder  # as the run section calls it


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


def make_recurrent_agent(args, envs):
    """An untrained RecurrentAgent for these environments. UserError if a space or the device is none this handles."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    kinds = spaces.Discrete | spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary
    if not isinstance(action_space, kinds) or not 0 < sum(output_sizes(action_space)) <= 100_000:
        wanted = "Discrete, Box, MultiDiscrete or MultiBinary actions, 100,000 categories at most"
        raise UserError(f"{args.env_id} has {action_space}; this script needs {wanted}")
    size = math.prod(obs_space.shape) if isinstance(obs_space, spaces.Box) else 0
    if size == 0 or (obs_space.dtype == np.uint8 and size > 1_000):
        wanted = "vectors or MiniGrid's images (ppo.py takes larger ones): use --wrappers"
        raise UserError(f"{args.env_id} has observations {obs_space}; this script needs {wanted}")
    if is_grid(obs_space) and args.normalize_obs:
        raise UserError("normalize_obs is for vectors: the cells of a MiniGrid image are one-hot")
    if not args.hidden_sizes:
        raise UserError("hidden_sizes needs one layer at least")
    device = choose_device(args)
    with torch.device("meta"):  # counts the weights without making them
        weights = sum(p.numel() for p in RecurrentAgent(obs_space, action_space, args, "meta").parameters())
    check_memory("the networks", 16 * weights)  # with gradients and Adam's moments
    torch.manual_seed(args.seed)
    agent = RecurrentAgent(obs_space, action_space, args, device)
    agent.args = args  # for evaluate(agent, agent.args) in a notebook
    return agent


make_agent = make_recurrent_agent  # as the run section calls it


def check_demo_args(args):
    """UserError if rho and phi leave nothing to the environment, or if what should be a folder is none."""
    if args.rho + args.phi >= 1:
        raise UserError(f"rho + phi = {args.rho + args.phi:g} must be below 1: the environment needs its share")
    watched = args.supplementary_demos_dir
    if watched and not os.path.isdir(watched):
        raise UserError(f"supplementary_demos_dir {watched} is no folder")
    target = Path(args.target_agent_demos_dir or ".")
    while not os.path.lexists(target):  # then the folder that it would be made in
        target = target.parent
    if not target.is_dir():
        raise UserError(f"target_agent_demos_dir {args.target_agent_demos_dir}: {target} is no folder")


def check_sequences(args, envs):
    """UserError if a rollout does not divide into chunks and minibatches, or does not fit into memory."""
    length = chunk_length(args)
    if args.num_steps % length != 0:
        raise UserError(f"num_steps = {args.num_steps} does not divide into chunks of chunk_length = {length}")
    rows = args.num_steps * args.num_envs
    chunks = rows // length
    if chunks % args.num_minibatches != 0:
        what = f"num_envs x num_steps = {rows} rows"
        if args.recurrent:
            what = f"num_envs x num_steps / chunk_length = {chunks} chunks"
        raise UserError(f"{what} do not divide into {args.num_minibatches} minibatches")
    if args.norm_adv and rows == args.num_minibatches:  # normalised, a single advantage is 0
        raise UserError("minibatches of 1 row need --no-norm-adv: there is nothing to normalise an advantage by")
    space = envs.single_observation_space
    size = 1 if space.dtype == np.uint8 else 4
    check_memory("a rollout", rows * (math.prod(space.shape or (1,)) * size + 4 * args.gru_size + 100))


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
