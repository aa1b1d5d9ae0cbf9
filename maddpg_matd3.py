# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2",
#   "tyro==1.0.17", "tqdm==4.70.1", "moviepy==2.2.1", "mpe2==1.1.1",
# ]
# ///
"""Multi-agent DDPG and TD3 (MADDPG, MATD3), all of it, in this one file.

Each of n agents acts only on its own observation, a^i = mu^i(o^i). During training, its critic Q^i sees the state s and
the actions of all agents, and learns, from stored steps, what return to expect. The actor learns to raise Q^i; for the
other agents' actions it takes those that are stored with the step:

    y^i = r^i + gamma (1 - terminated) Q'^i(s', mu'^1(o'^1), …, mu'^n(o'^n)),
    L(Q^i) = E[ (Q^i(s, a^1, …, a^n) - y^i)^2 ],                               (arXiv 1706.02275, eq. 6)
    J(mu^i) = E[ Q^i(s, a^1, …, mu^i(o^i), …, a^n) ]                               (its gradient: eq. 5)

where Q' and mu' are copies that follow Q and mu slowly. By default (--state-type EP) there is one Q, of the sum of all
rewards: for cooperative tasks only. With --state-type FP --no-share-policy, as in the paper, each agent has its own Q^i
of its own reward. MATD3 is MADDPG plus TD3's three tricks: noise on mu'(o') smooths Q', the lower value of two critics
counts, and actors are updated less often than critics. Discrete actions are drawn by Gumbel-softmax.

    python maddpg_matd3.py                                                   # three agents spread over three landmarks
    python maddpg_matd3.py --env-id mpe2.simple_speaker_listener_v4 --algorithm maddpg
    python maddpg_matd3.py --evaluate runs/DIR --render                      # watch the trained agents

Papers: MADDPG arXiv 1706.02275, MATD3 arXiv 1910.01465, TD3 arXiv 1802.09477, Gumbel-softmax arXiv 1611.01144.
The story ends at "# ===== helpers"; the code below it makes environments, keeps the run folder and draws the curve.
"""

import copy
import json
import math
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import time
from collections import namedtuple
from contextlib import redirect_stderr
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
    """Every flag and its default. For some environments, simple_spread included, TUNED (below) overrides these."""

    # algorithm
    algorithm: Literal["matd3", "maddpg"] = "matd3"  # sets the next three flags, where not given: see ALGORITHMS
    target_noise: float = 0.2  # standard deviation of the noise on continuous target actions; maddpg: 0
    twin_q: bool = True  # two critics; the lower of their target values counts; maddpg: False
    policy_frequency: int = 2  # critic updates per update of the actors and of all targets; maddpg: 1
    noise_clip: float = 0.5  # the target noise is clipped to ± this (1: half an action's range)
    state_type: Literal["EP", "FP"] = "EP"  # EP: one state, reward, critic for the team; FP: one per agent
    share_policy: bool = False  # all agents share one actor (with FP, one critic too); otherwise one for each
    actor_learning_rate: float = 1e-3  # Adam's learning rate for the actors
    critic_learning_rate: float = 1e-3  # Adam's learning rate for the critics
    anneal_lr: bool = False  # lower both learning rates linearly to zero
    num_envs: int = 1  # environments played side by side
    buffer_size: int = 1_000_000  # steps to keep, of all environments together
    batch_size: int = 256  # steps drawn from the buffer per update
    learning_starts: int = 1_000  # first steps, with random actions; updates begin after max(this, batch_size) steps
    train_frequency: int = 4  # steps (over all environments) from one round of updates to the next
    gradient_steps: int = 1  # critic updates per round
    gamma: float = 0.99  # discount
    n_step: int = 1  # rewards summed in a target before Q' estimates the rest
    tau: float = 0.005  # in one update, target networks <- tau networks + (1 - tau) target networks
    exploration_noise: float = 0.1  # standard deviation of the noise on continuous actions (1: half their range)
    output_penalty: float = 1e-3  # weight, in the actors' loss, of the mean square of tanh's or softmax's inputs
    gumbel_temperature: float = 1.0  # discrete actions: temperature of the softmax that gradients flow through
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layers of each actor
    critic_hidden_sizes: tuple[int, ...] | None = None  # hidden layers of each critic; None: as the actors'
    max_grad_norm: float | None = None  # longer gradients are scaled down to it (all actors' as one, all critics' too)
    # run
    env_id: str = "mpe2.simple_spread_v3"  # module with a PettingZoo parallel_env, or dotted path of a function like it
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers of parallel environments, applied in order
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    async_envs: bool = False  # play each environment in a process of its own
    total_timesteps: int = 1_000_000  # environment steps to train for (resets do not count); in each, all agents act
    stop_at_return: float | None = None  # stop once the mean return of an evaluation reaches this
    seed: int = 1  # seed of everything that is drawn at random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps; auto: the CPU
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, on separate environments, with deterministic actions
    capture_video: bool = False  # film an episode at each evaluation
    checkpoint_every: int = 0  # steps between checkpoints, at which all episodes begin anew; 0: mostly a tenth of a run
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # weights that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window; with --capture-video, film it instead
    config: str | None = None  # config.json of an earlier run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__SCRIPT__SEED__TIME
    progress: bool = True  # show the progress bar


# ------------------------------------------------------------------------------------------------------- networks
def uniform_mlp(inputs, hidden_sizes, outputs):
    """Linear layers with ReLU between them, as nn.Linear initialises them: uniform within ±1/sqrt(inputs)."""
    layers = []
    for size in hidden_sizes:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class Agents(nn.Module):
    """The actors mu^i of n agents, their critics Q, and the targets mu' and Q', which follow slowly.

    A row is the observation that TeamEnv returns in one step; `layout` has the slice of each part:

        [ alive, 1 or 0 per agent | observations | state | available actions, 1 or 0 ]

    Agent i's action is in [-1, 1]^A_i; a Discrete one is one-hot. A joint action holds the actions of all agents:
    A_1 + … + A_n numbers. All else that each agent has is a list of n tensors, for example actions (B, A_i).

        --state-type          EP                      FP
        rewards and ends      one for all agents      one for each agent
        rows with a target    B, for a batch of B     n·B: B for the first agent, then B for the second, and so on
        critics               one for all agents      one for each agent; with --share-policy, one for all
        a twin                a list of one critic    a list of one critic or n
        a critic's input      state, joint action     the agent's own observation, state, joint action
    """

    def __init__(self, layout, action_spaces, args, device="cpu"):
        super().__init__()
        self.layout = layout
        self.action_spaces = action_spaces
        self.args = args
        self.device = device
        self.num_agents = len(action_spaces)
        self.discrete = isinstance(action_spaces[0], spaces.Discrete)
        self.obs_sizes = [part.stop - part.start for part in layout.observations]
        self.action_sizes = [int(space.n) if self.discrete else math.prod(space.shape) for space in action_spaces]
        self.state_size = layout.state.stop - layout.state.start
        if args.state_type == "FP":  # an agent's critic sees the agent's observation as well
            self.state_size += max(self.obs_sizes)
        self.actors = nn.ModuleList()
        for inputs, outputs in zip(self.obs_sizes, self.action_sizes):
            self.actors.append(uniform_mlp(inputs, args.hidden_sizes, outputs))
        if args.share_policy:  # the list then holds the same network n times
            self.actors = nn.ModuleList([self.actors[0]] * self.num_agents)
        self.critics = nn.ModuleList([self.new_critics()])  # one twin, or two with twin_q; each is a list of critics
        if args.twin_q:  # with its own weights: a copy of the first twin would learn the same
            self.critics.append(self.new_critics())
        self.target_actors = copy.deepcopy(self.actors)
        self.target_critics = copy.deepcopy(self.critics)
        self.to(device)

    def new_critics(self):
        """A list of one critic for all agents; with FP and separate policies, of one for each agent."""
        args = self.args
        inputs = self.state_size + sum(self.action_sizes)
        hidden_sizes = args.hidden_sizes if args.critic_hidden_sizes is None else args.critic_hidden_sizes
        count = self.num_agents if args.state_type == "FP" and not args.share_policy else 1
        return nn.ModuleList(uniform_mlp(inputs, hidden_sizes, 1) for _ in range(count))

    def critic_inputs(self, rows):
        """What critics see besides actions: the state (B, S) of rows (B, …), or with FP (n·B, S') of rows (n·B, …).

        With FP it is the agent's own observation, padded with zeros to the length of the longest one, and the state.
        Once the agent is dead, all of it is zeros.
        """
        if self.args.state_type == "EP":
            return rows[:, self.layout.state]
        inputs = []
        for i, part in enumerate(rows.chunk(self.num_agents)):
            obs = part[:, self.layout.observations[i]]
            obs = nn.functional.pad(obs, (0, max(self.obs_sizes) - self.obs_sizes[i]))
            alive = part[:, self.layout.alive][:, i : i + 1]
            inputs.append(torch.cat([obs, part[:, self.layout.state]], dim=1) * alive)
        return torch.cat(inputs)

    def values(self, critics, rows, actions):
        """Q(s, a^1, …, a^n), (R,), for rows (R, …) and joint actions (R, A_1 + … + A_n).

        `critics` lists one critic for all rows, or n critics: then R = n·B, and critic i gets the B rows of agent i.
        """
        inputs = torch.cat([self.critic_inputs(rows), actions], dim=1).chunk(len(critics))
        return torch.cat([critic(part) for critic, part in zip(critics, inputs)]).squeeze(1)

    def views(self, rows):
        """(observations, masks of available actions) from rows (B, …): two lists over agents of tensors (B, …).

        If the environment has no masks, all Discrete actions are available. Masks of continuous actions are (B, 0).
        """
        obs = [rows[:, part] for part in self.layout.observations]
        available = [rows[:, part] > 0 for part in self.layout.available]
        if self.discrete and available[0].shape[1] == 0:
            available = [rows.new_ones(len(rows), size) > 0 for size in self.action_sizes]
        return obs, available

    def choose(self, actors, rows, rng):
        """(actions, outputs), lists over agents: outputs go into tanh or Gumbel-softmax, which give the actions.

        Gradients flow through both. Discrete actions are drawn with the NumPy generator `rng`.
        """
        actions = []
        outputs = []
        for actor, obs, available in zip(actors, *self.views(rows)):
            output = actor(obs)
            outputs.append(output)
            if self.discrete:
                noise = torch.as_tensor(rng.gumbel(size=output.shape), dtype=torch.float32, device=self.device)
                logits = torch.where(available, output, -1e9)  # -inf could make gradients NaN
                actions.append(gumbel_softmax(logits, noise, self.args.gumbel_temperature))
            else:
                actions.append(torch.tanh(output))
        return actions, outputs

    def normal(self, shape, rng):
        """Standard normal noise, drawn with the NumPy generator `rng`."""
        return torch.as_tensor(rng.standard_normal(shape, np.float32), device=self.device)

    @torch.no_grad()
    def explore(self, rows, noise, rng):
        """Joint actions for training, an array: with noise added if continuous, drawn from the softmax if Discrete."""
        actions, _ = self.choose(self.actors, torch.as_tensor(rows, device=self.device), rng)
        if not self.discrete:
            actions = [(action + noise * self.normal(action.shape, rng)).clamp(-1, 1) for action in actions]
        return torch.cat(actions, dim=1).cpu().numpy()

    def random_actions(self, rows, rng):
        """Uniformly random joint actions, an array; Discrete ones are drawn from those available."""
        if not self.discrete:
            return np.hstack([rng.uniform(-1, 1, (len(rows), size)) for size in self.action_sizes])
        actions = []
        for available in self.views(torch.as_tensor(rows))[1]:
            lots = np.where(available, rng.random(available.shape), -1)
            actions.append(np.eye(available.shape[1])[lots.argmax(1)])
        return np.hstack(actions)

    @torch.no_grad()
    def act(self, rows):
        """The actors' actions without any noise, as the environment takes them. Evaluations call this."""
        actions = []
        for actor, obs, available in zip(self.actors, *self.views(torch.as_tensor(rows, device=self.device))):
            output = actor(obs)
            if self.discrete:
                best = torch.where(available, output, -math.inf).argmax(1)
                actions.append(nn.functional.one_hot(best, output.shape[1]))
            else:
                actions.append(torch.tanh(output))
        return self.to_env(torch.cat(actions, dim=1).cpu().numpy())

    def to_env(self, actions):
        """Joint actions as the environment takes them: a tuple, with [-1, 1] scaled to the bounds of a Box."""
        taken = []
        ends = np.cumsum(self.action_sizes)
        for space, action in zip(self.action_spaces, np.split(actions, ends[:-1], axis=1)):
            if self.discrete:
                action = action.argmax(1) + space.start
            else:
                low = space.low.astype(np.float64)
                high = space.high.astype(np.float64)
                action = action.reshape(-1, *space.shape)
                action = np.clip(low + (action + 1) / 2 * (high - low), low, high)
                if np.issubdtype(space.dtype, np.integer):
                    action = np.rint(action)
            taken.append(action.astype(space.dtype))
        return tuple(taken)


def gumbel_softmax(logits, noise, temperature):
    """One-hot draws from softmax(logits) over the last axis, with the gradient of softmax((logits + noise) / T).

    The argmax of logits + Gumbel noise is such a draw (arXiv 1611.01144, eq. 1). The backward pass uses the gradient of
    the soft version (eq. 2) instead: the straight-through estimator (section 2.2).
    """
    soft = ((logits + noise) / temperature).softmax(-1)
    hard = nn.functional.one_hot((logits + noise).argmax(-1), soft.shape[-1]).to(soft.dtype)
    return hard + (soft - soft.detach())  # the value of `hard`, the gradient of `soft`


# -------------------------------------------------------------------------------------------------- replay buffer
# N environments, n agents, B samples in a batch. A stream is a sequence of rewards and episode ends; an environment has
# G of them: one (EP), or one for each agent (FP). G·B entries are the B of the first stream, then the B of the
# second, and so on. There are G·B next rows too: the n-step windows of two streams may end in different steps.

OffPolicyBatch = namedtuple(
    "OffPolicyBatch",
    "rows actions took_part "  # (B, …); joint actions (B, A_1 + … + A_n); (B, n): 0 where an agent was dead
    "rewards terminated "  # (G·B,): sum over a window; whether it ends by termination, so that Q' does not count
    "next_rows gammas",  # (G·B, …): the row after the window; (G·B,): the factor of Q', gamma^k
)
STORED = "rows actions took_part rewards terminated ended next_rows".split()  # the arrays of the buffer: see insert


class OffPolicyBuffer:
    """The last `capacity` steps of N environments, first in, first out, in host memory.

    Slot t·N + e is step t of environment e. Each environment writes into its own ring of T steps, at its own position,
    because steps that only reset it (those after an episode's end) are not stored. With n_step = 3:

        slot   0  2  4  6    environment 0: its episode ends in slot 2; slot 6 is its newest
        slot   1  3  5  7    environment 1: its episode ends in slot 5
        from slot 1: reward r_1 + gamma r_3 + gamma^2 r_5, discount gamma^3
        from slot 4: reward r_4 + gamma r_6, discount gamma^2: slot 6 is the newest
        from slot 2: reward r_2, discount gamma: the episode ends there
    """

    def __init__(
        self, capacity, num_envs, num_agents, streams, row_size, action_size, n_step=1, gamma=0.99, device="cpu"
    ):
        self.num_envs = num_envs
        self.streams = streams
        self.n_step = n_step
        self.gamma = gamma
        self.device = device
        self.steps = capacity // num_envs
        self.positions = np.zeros(num_envs, np.int64)  # where each environment writes its next step
        self.sizes = np.zeros(num_envs, np.int64)  # how many steps of each environment are stored
        shape = self.steps, num_envs
        self.rows = np.zeros((*shape, row_size), np.float32)
        self.actions = np.zeros((*shape, action_size), np.float32)
        self.took_part = np.zeros((*shape, num_agents), bool)
        self.rewards = np.zeros((*shape, streams), np.float32)
        self.terminated = np.zeros((*shape, streams), bool)
        self.ended = np.zeros((*shape, streams), bool)
        self.next_rows = np.zeros((*shape, row_size), np.float32)

    def insert(self, rows, actions, took_part, rewards, terminated, ended, next_rows):
        """Store one step of those environments in which any agent took part; in a reset row, none does.

        took_part is (N, n). rewards, terminated and ended are (N,), or with FP (N, n). `ended`: this step is the last
        of the episode (FP: the agent's last, or it is dead); `terminated`: it ended by termination, not by truncation.
        next_rows belong to the same episode, even at its end.
        """
        envs = np.flatnonzero(took_part.any(1))
        t = self.positions[envs]
        streams = self.num_envs, self.streams
        self.rows[t, envs] = rows[envs]
        self.actions[t, envs] = actions[envs]
        self.took_part[t, envs] = took_part[envs]
        self.rewards[t, envs] = rewards.reshape(streams)[envs]
        self.terminated[t, envs] = terminated.reshape(streams)[envs]
        self.ended[t, envs] = ended.reshape(streams)[envs]
        self.next_rows[t, envs] = next_rows[envs]
        self.positions[envs] = (t + 1) % self.steps
        self.sizes[envs] = np.minimum(self.sizes[envs] + 1, self.steps)

    def cut(self):
        """End all windows at the newest steps: all environments are about to be made anew."""
        envs = np.flatnonzero(self.sizes > 0)
        self.ended[self.positions[envs] - 1, envs] = True

    def windows(self, t, e):
        """(rewards, discounts, last steps), each (G, B), of windows that start in steps t of environments e, both (B,).

        A window of k steps has the reward r_0 + gamma r_1 + … + gamma^(k-1) r_(k-1) (arXiv 1710.02298, eq. 2) and the
        discount gamma^k, for Q'. k is n_step, or less if the episode ends or the newest step is reached first.
        """
        g = np.arange(self.streams)[:, None]  # indexed with e (B,), entry [g, b] is stream g of sample b
        newest = (self.positions[e] - 1) % self.steps
        last = np.tile(t, (self.streams, 1))
        rewards = self.rewards[last, e, g]
        discounts = np.full(last.shape, self.gamma, np.float32)
        for _ in range(self.n_step - 1):
            goes_on = ~self.ended[last, e, g] & (last != newest)
            last = np.where(goes_on, (last + 1) % self.steps, last)
            rewards += goes_on * discounts * self.rewards[last, e, g]
            discounts[goes_on] *= self.gamma
        return rewards, discounts, last

    def get(self, slots):
        """The OffPolicyBatch of the windows that start in these slots (B,), on the device."""
        t, e = np.divmod(slots, self.num_envs)
        rewards, discounts, last = self.windows(t, e)
        g = np.arange(self.streams)[:, None]
        batch = OffPolicyBatch(
            rows=self.rows[t, e],
            actions=self.actions[t, e],
            took_part=self.took_part[t, e],
            rewards=rewards.ravel(),
            terminated=self.terminated[last, e, g].ravel(),
            next_rows=self.next_rows[last, e].reshape(last.size, -1),
            gammas=discounts.ravel(),
        )
        return OffPolicyBatch(*[torch.as_tensor(field, device=self.device) for field in batch])

    def sample(self, batch_size, rng):
        """An OffPolicyBatch drawn uniformly, with replacement. ValueError if nothing is stored."""
        if self.sizes.sum() == 0:
            raise ValueError("cannot sample from an empty buffer")
        ends = self.sizes.cumsum()
        drawn = rng.integers(ends[-1], size=batch_size)
        e = np.searchsorted(ends, drawn, side="right")
        t = drawn - ends[e] + self.sizes[e]
        return self.get(t * self.num_envs + e)

    def state_dict(self):
        """What is stored, for a checkpoint."""
        filled = self.sizes.max()
        state = {name: torch.from_numpy(getattr(self, name)[:filled]) for name in STORED}
        return state | {"positions": torch.from_numpy(self.positions), "sizes": torch.from_numpy(self.sizes)}

    def load_state_dict(self, state):
        """Copy what state_dict returned."""
        self.positions[:] = state["positions"]
        self.sizes[:] = state["sizes"]
        for name in STORED:
            getattr(self, name)[: len(state[name])] = state[name]


def store_step(buffer, agents, rows, reset_rows, actions, result):
    """Store a step of all environments, except reset rows; `result` is what envs.step returned."""
    next_rows, rewards, terminated, truncated, infos = result
    alive = agents.layout.alive
    took_part = (rows[:, alive] == 1) & ~reset_rows[:, None]
    ended = terminated | truncated
    if agents.args.state_type == "FP":  # each agent has its own rewards and end, (N, n)
        rewards = infos["rewards"]
        ended = ended[:, None] | (next_rows[:, alive] == 0)
        # If an agent is truncated before the others, its last observation is not known: Q' sees zeros instead.
        terminated = infos["terminated"]
    buffer.insert(rows, actions, took_part, rewards, terminated, ended, next_rows)


# --------------------------------------------------------------------------------------------- targets and losses
def smoothed(actions, noise, clip):
    """Smoothing: mu'(s') + clip(epsilon, -c, c)   (arXiv 1802.09477, section 5.3), within [-1, 1] as in its code."""
    return (actions + noise.clamp(-clip, clip)).clamp(-1, 1)


def critic_targets(rewards, next_values, terminated, gamma):
    """y (B,) = r + gamma (1 - terminated) min_k Q'_k(s', a'), from target values (K, B)   (arXiv 1802.09477, eq. 10).

    With K = 1 critic it is DDPG's target (arXiv 1509.02971, algorithm 1).
    """
    return rewards + gamma * next_values.amin(0) * ~terminated


def valid_mean(x, valid):
    """Mean of x (R,) where valid (R,) is True; 0 if that is nowhere."""
    return (x * valid).sum() / valid.sum().clamp(min=1)


def in_turn(own, actions):
    """n copies of B joint actions, (n·B, A_1 + … + A_n); in copy i, agent i's current action replaces its stored one.

    `own`, the current actions, and `actions`, the stored ones, are lists over agents of (B, A_i). The first B rows are
    the first agent's copy, the next B the second agent's, and so on (arXiv 1706.02275, eq. 5).
    """
    turns = []
    for i in range(len(own)):
        joint = list(actions)
        joint[i] = own[i]
        turns.append(torch.cat(joint, dim=1))
    return torch.cat(turns)


@torch.no_grad()
def polyak(target, source, tau):
    """target <- tau source + (1 - tau) target, for all weights of two networks (arXiv 1509.02971, algorithm 1)."""
    for target_weights, weights in zip(target.parameters(), source.parameters()):
        target_weights.lerp_(weights, tau)


@torch.no_grad()
def matd3_targets(agents, batch, args, rng):
    """The critics' targets y (G·B,): a window's reward plus gamma^k Q', with the first two of TD3's tricks."""
    next_actions, _ = agents.choose(agents.target_actors, batch.next_rows, rng)
    if args.target_noise > 0 and not agents.discrete:  # TD3, trick 1: target policy smoothing
        for i, actions in enumerate(next_actions):
            noise = args.target_noise * agents.normal(actions.shape, rng)
            next_actions[i] = smoothed(actions, noise, args.noise_clip)
    joint = torch.cat(next_actions, dim=1)
    # TD3, trick 2: clipped double Q. Of the values of two critics (MADDPG: one), critic_targets takes the lower.
    next_values = torch.stack([agents.values(twin, batch.next_rows, joint) for twin in agents.target_critics])
    return critic_targets(batch.rewards, next_values, batch.terminated, batch.gammas)


def critics_loss(agents, batch, targets):
    """(loss, mean value): the mean squared error of all Q^i, summed over twins   (arXiv 1706.02275, eq. 6)."""
    streams = len(targets) // len(batch.rows)
    rows = batch.rows.repeat(streams, 1)
    actions = batch.actions.repeat(streams, 1)
    values = torch.stack([agents.values(twin, rows, actions) for twin in agents.critics])
    errors = ((values - targets) ** 2).sum(0)
    valid = torch.ones_like(errors)
    if agents.args.state_type == "FP":  # an agent's critic does not learn from steps in which the agent was dead
        valid = batch.took_part.T.flatten()
    return valid_mean(errors, valid), values.detach().mean()


def actors_loss(agents, batch, rng):
    """(loss, mean square of the actors' outputs): mean of -J(mu^i) over agents (gradient: arXiv 1706.02275, eq. 5)."""
    own, outputs = agents.choose(agents.actors, batch.rows, rng)
    # In copy i only a^i carries a gradient, so one backward pass serves all actors. As in TD3, twin 2 has no say here.
    joint = in_turn(own, batch.actions.split(agents.action_sizes, dim=1))
    values = agents.values(agents.critics[0], batch.rows.repeat(agents.num_agents, 1), joint)
    squares = torch.cat([(output**2).mean(1) for output in outputs])
    valid = batch.took_part.T.flatten()  # an actor does not learn from steps in which its agent was dead
    return -valid_mean(values, valid), valid_mean(squares, valid)


# ------------------------------------------------------------------------------------------------------- training
def updates_due(step_before, step, args):
    """Which critic updates, counted from 1 over the whole run, are due after steps step_before + 1 to `step`.

    All environments' steps count, whatever num_envs is. The first update is after max(learning_starts, batch_size).
    """
    rounds_left_out = max(args.learning_starts, args.batch_size) // args.train_frequency  # a batch must be stored
    rounds_before = max(0, step_before // args.train_frequency - rounds_left_out)
    rounds = max(0, step // args.train_frequency - rounds_left_out)
    return range(rounds_before * args.gradient_steps + 1, rounds * args.gradient_steps + 1)


def train(args):
    """Train with `args`; return the summary, a dict that summary.json holds as well. UserError on bad input."""
    check_algorithm(args)  # --algorithm has set target_noise, twin_q and policy_frequency already: see ALGORITHMS
    envs = make_envs(args, args.num_envs)
    agents = make_agent(args, envs)
    buffer = make_off_policy_buffer(args, agents)
    actor_optimizer = torch.optim.Adam(agents.actors.parameters(), lr=args.actor_learning_rate, fused=True)
    critic_optimizer = torch.optim.Adam(agents.critics.parameters(), lr=args.critic_learning_rate, fused=True)
    parts = {"buffer": buffer, "actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}
    run = Run(args, agents, envs, **parts)  # with --resume, it loads a checkpoint into these

    while not run.is_finished():
        if run.step == run.checkpoint_step:  # at the start and at each checkpoint, so that a resumed run does the same
            envs, rows, rng = run.new_envs()
            ended = np.zeros(args.num_envs, bool)  # True: the coming step only resets this environment
            buffer.cut()  # no n-step window reaches from old episodes into new ones
        if args.anneal_lr:
            actor_optimizer.param_groups[0]["lr"] = args.actor_learning_rate * (1 - run.step / args.total_timesteps)
            critic_optimizer.param_groups[0]["lr"] = args.critic_learning_rate * (1 - run.step / args.total_timesteps)

        step_before = run.step
        if run.step < args.learning_starts:
            actions = agents.random_actions(rows, rng)
        else:
            actions = agents.explore(rows, args.exploration_noise, rng)
        result = envs.step(agents.to_env(actions))
        store_step(buffer, agents, rows, ended, actions, result)
        rows, rewards, terminated, truncated, _ = result
        run.count(rows, rewards, terminated | truncated, ended)  # advances run.step; not for reset rows
        ended = terminated | truncated

        for update in updates_due(step_before, run.step, args):
            batch = buffer.sample(args.batch_size, rng)
            targets = matd3_targets(agents, batch, args, rng)
            critic_loss, value_mean = critics_loss(agents, batch, targets)
            critic_optimizer.zero_grad()
            critic_loss.backward()
            if args.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(agents.critics.parameters(), args.max_grad_norm)
            critic_optimizer.step()
            run.log(critic_loss=critic_loss.detach(), value_mean=value_mean)
            if update % args.policy_frequency == 0:  # TD3, trick 3: delayed updates of actors and all targets
                actor_loss, squares = actors_loss(agents, batch, rng)
                loss = actor_loss + args.output_penalty * squares  # as in MADDPG's code: against saturated outputs
                actor_optimizer.zero_grad()
                loss.backward(inputs=list(agents.actors.parameters()))  # no gradients for the critics
                if args.max_grad_norm is not None:
                    nn.utils.clip_grad_norm_(agents.actors.parameters(), args.max_grad_norm)
                actor_optimizer.step()
                polyak(agents.target_actors, agents.actors, args.tau)
                polyak(agents.target_critics, agents.critics, args.tau)
                run.log(actor_loss=actor_loss.detach())
        run.write_what_is_due()  # a row of metrics.csv, an evaluation, a checkpoint
    return run.finish()


# ===== helpers: settings, teams of agents, environments ===============================================================

LEAST_1 = "num_envs total_timesteps max_episode_steps eval_episodes hidden_sizes critic_hidden_sizes".split()
LEAST_1 += "buffer_size batch_size train_frequency gradient_steps policy_frequency n_step".split()
RANGES = dict.fromkeys(LEAST_1, (1, 1e15)) | dict.fromkeys(["gamma", "tau"], (0, 1))
RANGES |= dict.fromkeys(["stop_at_return", "max_episode_return"], (-1e15, 1e15)) | {"gumbel_temperature": (1e-3, 1e15)}
CURVE = {"critic_loss": "loss of the critics", "value_mean": "mean value, by the critics", "actor_loss": "actors' loss"}
EXPLORES = True  # whether an evaluation decides --stop-at-return (training explores), or training episodes do
SAFE_IDS = r"(mpe2|pettingzoo\.(butterfly|classic|sisl))\.\w+_v\d+"  # ids that a stranger's config.json may ask for
SUFFIX = ".pt"  # of models and checkpoints. How they are stored; with weights_only, reading executes nothing:
write_state = torch.save
read_state = partial(torch.load, map_location="cpu", weights_only=True)

# The three flags in which MATD3 differs from MADDPG. Each of them can also be given by itself.
ALGORITHMS = {
    "matd3": {"target_noise": 0.2, "twin_q": True, "policy_frequency": 2},
    "maddpg": {"target_noise": 0.0, "twin_q": False, "policy_frequency": 1},
}
# Tuned settings per environment; flags win over them. docs/maddpg_matd3.md has their scores.
PARTICLES = {"env_kwargs": '{"continuous_actions": true}', "num_envs": 8, "gamma": 0.95, "tau": 0.01}
FASTER = {"actor_learning_rate": 3e-3, "critic_learning_rate": 3e-3, "train_frequency": 2}
TUNED = {
    "mpe2.simple_spread_v3": PARTICLES | {"share_policy": True, "total_timesteps": 50_000},
    "mpe2.simple_speaker_listener_v4": PARTICLES | FASTER | {"total_timesteps": 40_000},
    "mpe2.simple_reference_v3": PARTICLES | FASTER | {"share_policy": True, "n_step": 3, "exploration_noise": 0.3,
                                                      "total_timesteps": 80_000},
}  # fmt: skip


def matd3_settings(args):
    """The settings of ALGORITHMS for args.algorithm, and those of TUNED for args.env_id."""
    return ALGORITHMS[args.algorithm] | TUNED.get(args.env_id, {})


tuned_settings = matd3_settings  # as the run section calls it


def check_algorithm(args):
    """UserError if --algorithm is not what the settings say, as in Args(algorithm=…) alone, or beside --config."""
    for name, settings in ALGORITHMS.items():
        given = {key: getattr(args, key) for key in settings}
        if args.algorithm not in (None, name) and given == settings:
            wanted = " ".join(f"{key}={value}" for key, value in ALGORITHMS[args.algorithm].items())
            raise UserError(f"algorithm is {args.algorithm}, but the settings are those of {name}: give {wanted}")


def make_agents(args, envs):
    """Untrained Agents for these environments. UserError if they cannot handle a space."""
    action_spaces = envs.single_action_space.spaces
    layout = envs.metadata["layout"]
    all_discrete = all(isinstance(space, spaces.Discrete) for space in action_spaces)
    all_boxes = all(isinstance(space, spaces.Box) and space.is_bounded() for space in action_spaces)
    if not all_discrete and not all_boxes:
        found = ", ".join(map(str, action_spaces))
        raise UserError(f"{args.env_id}: all actions must be Discrete, or bounded Boxes, not {found}: use mappo.py")
    sizes = {part.stop - part.start for part in layout.observations}
    if args.share_policy and (len(sizes) > 1 or any(space != action_spaces[0] for space in action_spaces)):
        raise UserError(f"the agents of {args.env_id} differ in observations or actions: add --no-share-policy")
    device = choose_device(args)
    torch.manual_seed(args.seed)
    return Agents(layout, action_spaces, args, device)


make_agent = make_agents  # as the run section calls it


def make_off_policy_buffer(args, agents):
    """An empty buffer, as the arguments say. UserError if it is too small, or if there is no memory for it."""
    if args.buffer_size // args.num_envs * args.num_envs < args.batch_size:
        raise UserError("buffer_size, divided among num_envs, must not be less than batch_size")
    streams = agents.num_agents if args.state_type == "FP" else 1
    sizes = agents.num_agents, streams, agents.layout.available[-1].stop, sum(agents.action_sizes)
    try:
        return OffPolicyBuffer(args.buffer_size, args.num_envs, *sizes, args.n_step, args.gamma, agents.device)
    except (MemoryError, ValueError) as error:
        raise UserError(f"buffer_size = {args.buffer_size} is too large: {error}") from error


class ReturnLimit(gym.wrappers.RecordEpisodeStatistics):
    """Truncate an episode once its return reaches `limit`."""

    def __init__(self, env, limit):
        super().__init__(env)
        self.limit = limit

    def step(self, action):
        """As the environment's, truncated at the limit."""
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated or self.episode_returns >= self.limit, info


# Where things stand in a TeamEnv's observation. All are slices; `observations` and `available` list one per agent.
Layout = namedtuple("Layout", "alive observations state available")


class TeamEnv(gym.Env):
    """A PettingZoo parallel environment as a Gymnasium one, so that Gymnasium's vector environments can run it.

    An action is a tuple with an entry for each agent, a reward the sum of the agents' rewards, an observation one row:

        [ alive, 1 or 0 per agent | observations | state | available actions, 1 or 0 ]

    An agent is alive while it takes part. When the last agents end, those that acted in this last step still count as
    alive in the next row, so that it has their final observations. A dead agent observes zeros. The state is the
    environment's own. If there is none, it is all observations, and the row holds them only once. The row has available
    actions only if the environment gives masks; an agent that has no valid action, for example while it waits for its
    turn, gets the first one as a no-op. The episode ends with the last agent. It is terminated if all that acted in the
    last step terminated, else truncated. `info` has each agent's own "rewards" and "terminated".
    """

    JOINED = ("mpe2.", "pettingzoo.sisl.multiwalker")  # state() only repeats observations, or fails after a death

    def __init__(self, env):
        self.env = env
        self.names = list(env.possible_agents)
        self.render_mode = getattr(env, "render_mode", None)
        _, infos = env.reset(seed=0)
        masked = any("action_mask" in info for info in infos.values())
        self.spaces = []  # of the agents' observations, without their masks
        for name in self.names:
            space = env.observation_space(name)
            if isinstance(space, spaces.Dict) and "action_mask" in space.spaces:  # turn-based games put it there
                masked = True
                space = spaces.Dict({key: entry for key, entry in space.items() if key != "action_mask"})
            if not space.is_np_flattenable or not 0 < spaces.flatdim(space) <= 10_000:
                raise UserError(f"{name} observes {space}; needed is what makes a vector of 1 to 10,000 numbers")
            self.spaces.append(space)
        action_spaces = [env.action_space(name) for name in self.names]
        alive = slice(0, len(self.names))
        observations = slices([spaces.flatdim(space) for space in self.spaces], alive.stop)
        state = slice(observations[-1].stop, observations[-1].stop + self.own_state_size())
        choices = [getattr(space, "n", 0) if masked else 0 for space in action_spaces]
        available = slices(choices, state.stop)
        self.has_own_state = state.stop > state.start
        if not self.has_own_state:
            state = slice(alive.stop, state.stop)
        self.layout = Layout(alive, observations, state, available)
        self.metadata = getattr(env, "metadata", {}) | {"layout": self.layout}  # vector environments copy it
        self.observation_space = spaces.Box(-np.inf, np.inf, (available[-1].stop,))
        self.action_space = spaces.Tuple(action_spaces)

    def own_state_size(self):
        """Size of the environment's own state; 0 if it has none, or if it is an image or only repeats observations."""
        if type(self.env.unwrapped).__module__.startswith(self.JOINED):
            return 0
        try:
            state = np.asarray(self.env.state())
        except (AttributeError, NotImplementedError, TypeError):  # TypeError: `state` is not a function
            return 0
        return 0 if state.dtype in (np.uint8, object) else state.size

    def reset(self, *, seed=None, options=None):
        """(first row, info) of an episode. Each gets a seed, as environments differ in what they do without one."""
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(2**31))
        obs, infos = self.env.reset(seed=seed)
        return self.row(self.env.agents, obs, infos), self.info({}, {})

    def step(self, actions):
        """One step, in which the agents that are alive act; the actions of the dead are ignored."""
        given = {name: action for name, action in zip(self.names, actions) if name in self.env.agents}
        obs, rewards, terminated, truncated, infos = self.env.step(given)
        going_on = [name for name in self.env.agents if not terminated.get(name) and not truncated.get(name)]
        over = not going_on
        all_terminated = over and all(terminated.get(name, True) for name in given)
        info = self.info(rewards, terminated)
        row = self.row(given if over else going_on, obs, infos)
        return row, float(info["rewards"].sum()), all_terminated, over and not all_terminated, info

    def row(self, alive, obs, infos):
        """The team's observation: `alive` has the names of living agents; obs and infos are dicts from PettingZoo."""
        row = np.zeros(self.observation_space.shape, np.float32)
        for i, name in enumerate(self.names):
            available = self.layout.available[i]
            row[available] = 1
            if name not in alive:
                continue
            row[self.layout.alive.start + i] = 1
            row[self.layout.observations[i]] = spaces.flatten(self.spaces[i], obs[name])
            mask = infos.get(name, {}).get("action_mask")
            if isinstance(obs[name], dict):
                mask = obs[name].get("action_mask", mask)
            if mask is not None:
                row[available] = mask if np.any(mask) else np.arange(len(mask)) == 0
        if self.has_own_state:
            row[self.layout.state] = np.ravel(self.env.state())
        return row

    def info(self, rewards, terminated):
        """The agents' own rewards and terminations, as arrays; a vector environment returns only those of the team."""
        rewards = np.array([rewards.get(name, 0) for name in self.names], np.float32)
        return {"rewards": rewards, "terminated": np.array([bool(terminated.get(name)) for name in self.names])}

    def render(self):
        """As the environment's."""
        return self.env.render()

    def close(self):
        """As the environment's."""
        self.env.close()


def slices(sizes, begin):
    """A list of adjacent slices of these sizes; the first starts at `begin`."""
    parts = []
    for size in sizes:
        parts.append(slice(begin, begin + size))
        begin += size
    return parts


def without_checks(env):
    """The same environment without PettingZoo's checks of order and bounds: in mpe2, these take a third of the time."""
    from pettingzoo.utils.wrappers import AssertOutOfBoundsWrapper, OrderEnforcingWrapper

    while isinstance(getattr(env, "aec_env", None), (AssertOutOfBoundsWrapper, OrderEnforcingWrapper)):
        env.aec_env = env.aec_env.env
    return env


def make_team_envs(args, num_envs, render=False, video=None):
    """A vector environment of TeamEnvs, with next-step autoreset; in a window, or filmed. UserError if it fails."""
    try:
        found = pkgutil.resolve_name(args.env_id)
        parallel_env = getattr(found, "parallel_env", found)
        if not callable(parallel_env):
            raise ValueError("it has no parallel_env (docs/mappo.md shows how a turn-based game gets one)")
        kwargs = dict(**json.loads(args.env_kwargs))
        wrappers = [without_checks, *map(pkgutil.resolve_name, args.wrappers), TeamEnv]
        if args.max_episode_steps is not None:
            wrappers.append(partial(gym.wrappers.TimeLimit, max_episode_steps=args.max_episode_steps))
        if args.max_episode_return is not None:
            wrappers.append(partial(ReturnLimit, limit=args.max_episode_return))
        if render or video:
            kwargs["render_mode"] = "rgb_array" if video else "human"
        if video:
            wrappers.append(partial(gym.wrappers.RecordVideo, video_folder=str(video)))

        def make_env():
            env = parallel_env(**kwargs)
            for wrapper in wrappers:
                env = wrapper(env)
            return env

        in_processes = args.async_envs and num_envs == args.num_envs  # evaluations too, if there are as many
        vector_env = gym.vector.AsyncVectorEnv if in_processes else gym.vector.SyncVectorEnv
        return vector_env([make_env] * num_envs)
    except (ImportError, AttributeError, TypeError, ValueError, LookupError, AssertionError) as error:
        raise UserError(f"cannot make {args.env_id} with env_kwargs {args.env_kwargs}: {error}") from error


make_envs = make_team_envs  # as the run section calls it


def choose_device(args, image=False):
    """The device that args.device means. UserError if there is no such device."""
    automatic = "cuda" if image and torch.cuda.is_available() else "cpu"
    device = automatic if args.device == "auto" else args.device
    try:
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"no device {device}: {error}") from error
    return device


# ===== run: the same in every script ==============================================================
# What it knows of the script: Args, CURVE, EXPLORES, SCHEDULED, SAFE_IDS, SUFFIX; tuned_settings,
# make_envs, make_agent (whose agent can act), train, manual_seed, write_state and read_state.
UserError = gym.error.Error  # what was mistyped; Gymnasium raises it for ids that do not exist
ONLY_FLAGS = "resume evaluate model render capture_video config run_dir".split()  # not in config.json
FREE = "stop_at_return eval_every eval_episodes device progress total_timesteps".split()  # at --resume


def tuned(*flags, **given):
    """Args from flags or keywords; the rest from a run (to resume, to evaluate, `config`) or TUNED."""
    flags = [f"{float(flag):.0f}" if re.fullmatch(r"[\d.]+e\d+", flag) else flag for flag in flags]  # 1e6
    # The flags are parsed twice: the first time tells where the defaults of the second come from.
    first = tyro.cli(Args, args=[flag for flag in flags if flag not in ("-h", "--help")])
    first = replace(first, **given)
    first = replace(first, env_id=full_id(first.env_id))
    run_dir = first.resume or first.evaluate
    path = f"{run_dir}/config.json" if run_dir else first.config
    defaults = read_config(path, first) if path else replace(Args(), **tuned_settings(first))
    args = checked(replace(defaults, **given), flags)
    args = replace(args, env_id=full_id(args.env_id))
    fixed = [name for name in vars(args) if name not in ONLY_FLAGS + FREE]
    if any(getattr(defaults, name) for name in SCHEDULED):
        fixed.append("total_timesteps")
    for name in fixed if args.resume else []:
        if getattr(args, name) != getattr(defaults, name):
            kept = getattr(defaults, name)
            raise UserError(f"{name} changes how a run learns: a resumed run keeps {kept}")
    return args


def full_id(env_id):
    """CartPole-v1 for CartPole: the highest version, if none is given."""
    ids = [known for known in gym.registry if re.fullmatch(re.escape(env_id) + r"-v\d+", known)]
    return max(ids, key=lambda known: int(known.rpartition("-v")[2]), default=env_id)


def checked(defaults, flags=()):
    """Args from flags, else from `defaults`, whose values must be of the types that Args says."""
    try:
        with warnings.catch_warnings(action="error", category=UserWarning):  # tyro warns of wrong types
            return tyro.cli(Args, args=flags, default=defaults, description=__doc__)
    except UserWarning as error:
        raise UserError(str(error).split(" We'll try")[0]) from error


def code_flags(args):
    """The flags that a config.json must not decide alone, since they can run any code; mostly none."""
    own_kwargs = "{}", tuned_settings(args).get("env_kwargs")
    if re.fullmatch(SAFE_IDS, args.env_id) and args.env_kwargs in own_kwargs and not args.wrappers:
        return []
    return ["--env-id", args.env_id, "--env-kwargs", args.env_kwargs, "--wrappers", *args.wrappers]


def read_config(path, given):
    """Args from the config.json of a run. If it is a stranger's, its code must be `given` as well."""
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        saved = {name: tuple(x) if isinstance(x, list) else x for name, x in config["args"].items()}
        if config["script"] != Path(__file__).stem:
            raise ValueError
        args = checked(Args(**saved | {name: getattr(given, name) for name in ONLY_FLAGS}))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is missing, damaged or not from {Path(__file__).name}") from error
    code = code_flags(args)
    if code and code != code_flags(given):
        raise UserError(f"{path} may execute anything; if you trust it, add {shlex.join(code)}")
    return args


def load(run_dir, model="best", *flags, **given):
    """The agent saved by a run, with its settings as agent.args; `model` is best, last or a step."""
    args = tuned(*flags, **{"evaluate": str(run_dir), "model": str(model)} | given)
    envs = make_envs(args, 1)
    agent = make_agent(args, envs)
    envs.close()
    name = "checkpoint" if args.model == "last" else f"models/{args.model}"
    read_parts(f"{run_dir}/{name}{SUFFIX}", {"agent": agent})
    return agent


def evaluate(agent, args, episodes=100, seed=0, render=False, video=None):
    """(mean, standard deviation) of the returns of `episodes` episodes; if asked, shown or filmed."""
    if episodes < 1:
        raise ValueError("an evaluation needs at least one episode")
    envs = make_envs(args, episodes, render, video)  # one each: else short episodes count too often
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
    envs.close()
    return float(returns.mean()), float(returns.std())


def true_returns(envs, args, returns):
    """Returns (N,) of the episodes under way, before the user's wrappers changed their rewards."""
    return np.array(envs.unwrapped.get_attr("true_return")) if args.wrappers else returns


def write_file(path, write):
    """Call write(file), then rename the file to `path`: no reader finds a half-written one."""
    temporary = Path(f"{path}.{os.getpid()}.tmp")  # no other process writes to this one
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            write(file)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # on a full disk, torch raises a RuntimeError
        raise UserError(f"cannot write {path}: {error}") from error


def write_csv(path, table):
    """Write a table, a dict of columns."""
    rows = np.transpose(list(table.values()))
    head = ",".join(table)
    write_file(path, lambda file: np.savetxt(file, rows, "%.10g", ",", header=head, comments=""))


def read_parts(path, parts):
    """Give each of `parts`, a dict of objects with load_state_dict, its state from a file."""
    try:
        state = read_state(path)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except Exception as error:  # there is no list of what a damaged or foreign file may raise
        kind = type(error).__name__
        raise UserError(f"{path} is missing, damaged or of another network: {kind}") from error


class Run:
    """All that a run keeps besides what it learns: folder, counts, evaluations, checkpoints, curve."""

    def __init__(self, args, envs):
        self.args = args
        self.envs = envs
        self.step = 0  # environment steps, without reset rows
        self.seconds = 0.0
        self.num_episodes = 0
        self.recent = []  # returns of the last 100 training episodes
        self.stride = 1  # the table has each stride-th episode, so that it never grows beyond 10,000
        self.episodes = {"step": [], "return": [], "length": []}
        self.metrics = {"step": []}  # other columns begin when they are first logged
        self.evaluations = {"step": [], "seconds": [], "return_mean": [], "return_std": []}
        self.saved = list(vars(self))[2:]  # what a checkpoint holds: all from step on
        self.logged = {}  # since the last row of metrics.csv
        self.checkpoint_step = 0  # of the last checkpoint
        self.eval_every = args.eval_every or math.ceil(args.total_timesteps / 10)
        tenth = min(args.total_timesteps // 10, 50_000)
        self.checkpoint_every = args.checkpoint_every or max(tenth, 5_000 * envs.num_envs)
        name = f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
        self.dir = Path(args.resume or args.run_dir or f"runs/{re.sub('[/:]', '-', name)}")
        if (self.dir / "config.json").exists() and not args.resume:
            raise UserError(f"{self.dir} holds a run already: --resume it, or choose another --run-dir")
        if args.capture_video:  # what cannot be filmed is refused at once
            make_envs(args, 1, video=self.dir / "videos").close()
        for rest in self.dir.rglob("*.[0-9]*.tmp") if args.resume else ():  # of a killed process
            rest.unlink()
        command = {"shell": True, "cwd": Path(__file__).parent, "capture_output": True}
        commit = subprocess.run("git describe --always --dirty", **command).stdout.decode().strip()
        packages = [name for name in ("torch", "gymnasium", "numpy") if name in sys.modules]
        config = {"script": Path(__file__).stem, "args": asdict(args), "commit": commit}
        config["versions"] = {name: version(name) for name in packages}
        write_file(self.dir / "config.json", lambda file: file.write(json.dumps(config).encode()))

    def start(self, agent, **parts):
        """Start with `agent` and whatever else a checkpoint must hold. --resume loads their states."""
        self.agent = agent
        self.parts = {"run": self, "agent": agent, **parts}
        if (self.dir / f"checkpoint{SUFFIX}").exists():
            read_parts(self.dir / f"checkpoint{SUFFIX}", self.parts)
        total = self.args.total_timesteps
        known = tuned_settings(self.args)
        given = {name: x for name, x in vars(self.args).items() if x != known.get(name, getattr(Args(), name))}
        print(f"{self.args.env_id} -> {self.dir}\ntuned: {known}\ngiven: {given}")
        if self.args.resume:
            print("finished" if self.step >= total else f"goes on from step {self.step:,} of {total:,}")
        self.begun = time.monotonic() - self.seconds
        self.bar = tqdm(total=total, initial=self.step, unit=" steps", disable=not self.args.progress)

    def state_dict(self):
        """What a checkpoint holds of the run itself."""
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state):
        """Take over what state_dict returned. TypeError or ValueError where it is damaged."""
        for name in self.saved:
            if type(state[name]) is not type(getattr(self, name)):
                raise TypeError(name)
            if isinstance(state[name], dict):  # a table: numbers, in columns of equal length
                np.array([state[name]["step"], *state[name].values()], float)
        vars(self).update({name: state[name] for name in self.saved})
        self.checkpoint_step = self.step

    def remaining(self):
        """The share of the steps that is left, from 1 down to 0."""
        return max(0.0, 1 - self.step / self.args.total_timesteps)

    def new_envs(self):
        """(environments, observations, dones, a NumPy generator), all new, seeded by (seed, step)."""
        self.envs.close()  # a reset is not enough: Box2D's environments keep traces of old episodes
        self.envs = make_envs(self.args, self.envs.num_envs)
        rng = np.random.default_rng([self.args.seed, self.step])
        obs, _ = self.envs.reset(seed=int(rng.integers(2**31)))
        manual_seed(int(rng.integers(2**31)))
        self.check_finite(observation=obs)
        self.returns = np.zeros(self.envs.num_envs)  # of the episodes under way
        self.lengths = np.zeros(self.envs.num_envs, int)
        self.has_ended = np.zeros(self.envs.num_envs, bool)  # whether an episode has, since now
        return self.envs, obs, np.zeros(self.envs.num_envs, bool), rng

    def count(self, obs, rewards, dones, reset_rows):
        """Count a step of all environments, arrays (N, …). UserError on NaN or infinity."""
        self.check_finite(observation=obs, reward=rewards)
        self.step += int((~reset_rows).sum())
        self.returns += rewards
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
        self.recent = [*self.recent[-99:], total]
        if self.num_episodes % self.stride == 0:
            for column, value in zip(self.episodes.values(), (self.step, total, length)):
                column.append(value)
        if len(self.episodes["step"]) == 10_000:
            self.stride *= 2
            self.episodes = {name: column[1::2] for name, column in self.episodes.items()}

    def check_finite(self, **values):
        """UserError naming environment, step and field if a value is NaN, or too large for float32."""
        for name, value in values.items():
            if not np.all(np.abs(value) < 3.4e38):
                where = f"{self.args.env_id}, after step {self.step}"
                raise UserError(f"{where}: {name} is NaN or infinite")

    def log(self, **metrics):
        """Collect numbers, or tensors of one number; a row of metrics.csv holds their means."""
        for name, value in metrics.items():
            if getattr(value, "shape", ()) not in ((), (1,)):
                raise ValueError(f"the metric {name} is not one number: {value}")
            self.logged.setdefault(name, []).append(value)

    def is_finished(self):
        """Whether all steps are taken, or --stop-at-return is reached."""
        goal = math.inf if self.args.stop_at_return is None else self.args.stop_at_return
        if self.step >= self.args.total_timesteps:
            return True
        if EXPLORES:  # training episodes hold random actions, so the last evaluation decides
            return bool(self.evaluations["step"]) and self.evaluations["return_mean"][-1] >= goal
        return len(self.recent) == 100 and np.mean(self.recent) >= goal

    def write_what_is_due(self):
        """A row of metrics.csv, about 200 in a run; evaluations and checkpoints, as often as args say.

        True if a checkpoint was written: then training begins anew from it, as a resumed run does.
        """
        losses = {name: float(values[-1]) for name, values in self.logged.items() if "loss" in name}
        self.check_finite(**losses)
        self.bar.update(self.step - self.bar.n)
        is_due = lambda every, last: self.is_finished() or self.step // every > last // every
        evaluates = is_due(self.eval_every, max(self.evaluations["step"], default=0))
        saves = is_due(self.checkpoint_every, self.checkpoint_step)
        saves = saves and (self.is_finished() or self.has_ended.all())  # long episodes come to an end
        if evaluates or saves or is_due(self.args.total_timesteps / 200, max(self.metrics["step"], default=0)):
            mean = float(np.mean(self.recent or math.nan))
            means = {name: float(sum(values) / len(values)) for name, values in self.logged.items()}
            self.add_row("metrics", dict(return_mean=mean, episodes=self.num_episodes, **means))
            self.bar.set_postfix_str(f"mean return {mean:.1f}", refresh=False)
            self.logged = {}
        if evaluates:
            self.write_evaluation()
        if saves or self.is_finished():  # an evaluation may have finished it
            self.write_checkpoint()
        if saves and not self.is_finished():  # else finish draws it
            self.draw_curve()
        if evaluates and self.args.capture_video:
            folder = self.dir / f"videos/{self.step}"
            evaluate(self.agent, self.args, 1, self.args.seed + 10_000, video=folder)
        return saves

    def write_evaluation(self):
        """Evaluate; save the weights in models/ as STEP, and as best if none were better."""
        seed = self.args.seed + 10_000  # not training's
        mean, std = evaluate(self.agent, self.args, self.args.eval_episodes, seed)
        is_best = mean >= max(self.evaluations["return_mean"], default=-math.inf)
        weights = {"agent": self.agent.state_dict()}
        for name in [self.step, "best"] if is_best else [self.step]:
            write_file(self.dir / f"models/{name}{SUFFIX}", partial(write_state, weights))
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
        """Write it. It holds no environments: training makes new ones now, as a resumed run does."""
        self.seconds = time.monotonic() - self.begun
        write_csv(self.dir / "episodes.csv", self.episodes)
        state = {name: part.state_dict() for name, part in self.parts.items()}
        write_file(self.dir / f"checkpoint{SUFFIX}", partial(write_state, state))
        self.checkpoint_step = self.step

    def draw_curve(self):
        """Write learning_curve.png: returns, their running mean, evaluations; below, CURVE's metrics."""
        from matplotlib.figure import Figure  # slow to import

        figure = Figure(figsize=(9, 7), layout="constrained")
        axes = figure.subplot_mosaic([["returns"] * len(CURVE), list(CURVE)], height_ratios=(2, 1))
        top, steps = axes["returns"], self.metrics["step"]
        at, returns, _ = self.episodes.values()
        top.plot(at, returns, ".", alpha=0.25, markersize=3, label="training episode")
        count = min(100, self.num_episodes)
        top.plot(steps, self.metrics.get("return_mean", []), label=f"mean of the last {count} episodes")
        at, _, means, stds = self.evaluations.values()
        top.errorbar(at, means, stds, fmt="o-", capsize=3, label="evaluation, ± one deviation")
        if means and top.dataLim.y0 < -100 * max(1, abs(means[-1])):  # from -11,000 to -13, say
            top.set_yscale("symlog", linthresh=10)
        title = f"{Path(__file__).name}: {self.args.env_id}, seed {self.args.seed}"
        top.set(title=title, ylabel="return")
        top.legend()
        for name, title in CURVE.items():
            axes[name].plot(steps, self.metrics.get(name, [math.nan] * len(steps)))
            axes[name].set(title=title, xlabel="environment steps")
            axes[name].locator_params(axis="x", nbins=4)
        write_file(self.dir / "learning_curve.png", partial(figure.savefig, dpi=120, format="png"))

    def finish(self):
        """Draw the curve, write summary.json, return the summary."""
        if self.step not in self.evaluations["step"]:  # resumed with a total that is reached already
            self.write_evaluation()
        self.draw_curve()
        self.bar.close()
        self.envs.close()
        last = {f"eval_{name}": self.evaluations[name][-1] for name in ("return_mean", "return_std")}
        seconds = time.monotonic() - self.begun
        summary = {"global_step": self.step, "seconds": seconds, "run_dir": self.dir.as_posix(), **last}
        write_file(self.dir / "summary.json", lambda file: file.write(json.dumps(summary).encode()))
        curve = f"{self.dir.as_posix()}/learning_curve.png"
        print(f"last evaluation: {summary['eval_return_mean']:.1f}   curve: {curve}")
        return summary


def main():
    """Train, or evaluate, as the flags say. What was mistyped is a line on stderr and exit code 2."""
    try:
        args = tuned(*sys.argv[1:])
        if not args.evaluate:
            run_dir = train(args)["run_dir"]
            watch = ["python", sys.argv[0], "--evaluate", run_dir, "--render", *code_flags(args)]
            print(f"to watch the best agent: {shlex.join(watch)}")
            return
        agent = load(args.evaluate, args.model, *sys.argv[1:])
        seed = args.seed + 20_000  # other episodes than those by which the best weights were chosen
        mean, std = evaluate(agent, args, args.eval_episodes, seed)
        print(f"{args.model} weights: {mean:.2f} ± {std:.2f} over {args.eval_episodes} episodes")
        film = f"{args.evaluate}/videos/{args.model}" if args.capture_video else None
        if film or args.render:
            evaluate(agent, args, 1, seed, args.render, film)
            print(f"film: {film or 'none, --capture-video makes one'}")
    except UserError as error:
        text = "".join(letter if letter.isprintable() else " " for letter in str(error))
        tqdm.write(f"{sys.argv[0]}: {' '.join(text.split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("stopped. --resume and the run folder goes on from the last checkpoint, if there is one")
    except BrokenPipeError:  # as in: python ppo.py | head -1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    main()
