# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.3,<2", "numpy>=1.26", "matplotlib>=3.8",
#   "tyro>=1.0", "tqdm>=4.66", "moviepy>=2.0", "mpe2>=1.0", "pettingzoo>=1.25,<2",
# ]
# ///
"""Multi-agent DDPG and TD3 (MADDPG, MATD3), all of it, in this one file.

Centralised training, decentralised execution: each of n agents acts only on its own observation,
a^i = mu^i(o^i). During training, its critic Q^i sees the state s and the actions of all agents, and
learns, from stored steps, what return to expect. The actor learns to raise Q^i; for the other agents'
actions it takes those stored with the step:

    y^i = r^i + gamma (1 - terminated) Q'^i(s', mu'^1(o'^1), …, mu'^n(o'^n))
    L(Q^i) = E[ (Q^i(s, a^1, …, a^n) - y^i)^2 ]   (arXiv 1706.02275, eq. 6)
    J(mu^i) = E[ Q^i(s, a^1, …, mu^i(o^i), …, a^n) ]   (its gradient: arXiv 1706.02275, eq. 5)

Q' and mu' are copies that follow Q and mu slowly. By default (--state-type EP) there is one Q, of
the sum of all rewards: for cooperative tasks only. With --state-type FP --no-share-policy, as in the
paper, each agent has its own Q^i of its own reward. MATD3 is MADDPG plus TD3's three tricks: noise
on mu'(o') smooths Q', the lower value of two critics counts, and actors are updated less often than
critics. Discrete actions are drawn with Gumbel noise.

    python maddpg_matd3.py                                 # three agents spread over three landmarks
    python maddpg_matd3.py --env-id mpe2.simple_speaker_listener_v4 --algorithm maddpg
    python maddpg_matd3.py --evaluate runs/DIR --render    # watch the trained agents

Papers: MADDPG arXiv 1706.02275, MATD3 arXiv 1910.01465, TD3 arXiv 1802.09477, Gumbel-softmax arXiv
1611.01144. The algorithm ends at "# ===== helpers".
"""

import ast
import copy
import importlib
import json
import math
import os
import pkgutil
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
from pettingzoo.utils.wrappers import AssertOutOfBoundsWrapper, BaseParallelWrapper, OrderEnforcingWrapper
from torch import nn
from tqdm import tqdm


@dataclass(kw_only=True)
class Args:
    """Every flag and its default; TUNED (below) has others. A given flag wins."""

    # algorithm
    algorithm: Literal["matd3", "maddpg"] | None = None  # sets the next three; None: as matd3
    target_noise: float = 0.2  # standard deviation of the noise on continuous target actions; maddpg: 0
    twin_q: bool = True  # two critics; the lower of their target values counts; maddpg: False
    policy_frequency: int = 2  # critic updates per update of actors and targets; maddpg: 1
    noise_clip: float = 0.5  # the target noise is clipped to ± this (1: half an action's range)
    state_type: Literal["EP", "FP"] = "EP"  # EP: one state, reward, critic for the team; FP: one per agent
    share_policy: bool = False  # agents share one actor (FP: one critic too, told apart by what they see)
    actor_learning_rate: float = 1e-3  # Adam's learning rate for the actors
    critic_learning_rate: float = 1e-3  # Adam's learning rate for the critics
    anneal_lr: bool = False  # lower both learning rates linearly to zero
    num_envs: int = 1  # environments played side by side
    buffer_size: int = 1_000_000  # steps to keep, of all environments together
    batch_size: int = 256  # steps drawn from the buffer per update
    learning_starts: int = 1_000  # first steps, with random actions and no updates
    train_frequency: int = 4  # steps (over all environments) from one round of updates to the next
    gradient_steps: int = 1  # critic updates per round
    gamma: float = 0.99  # discount
    n_step: int = 1  # rewards summed in a target before Q' estimates the rest
    tau: float = 0.005  # in an update, target networks <- tau networks + (1 - tau) target networks
    exploration_noise: float = 0.1  # standard deviation of the noise on continuous actions (1: half their range)
    output_penalty: float = 1e-3  # weight of the mean square of the actors' raw outputs
    gumbel_temperature: float = 1.0  # of the softmax that gradients of discrete actions flow through
    hidden_sizes: tuple[int, ...] = (64, 64)  # of each network's hidden layers
    max_grad_norm: float | None = None  # the gradient of all actors, or of all critics, is scaled down to it
    checkpoint_every: int = 0  # steps between checkpoints, which restart all episodes; 0: 5,000 * num_envs or more
    # run
    env_id: str = "mpe2.simple_spread_v3"  # module with a PettingZoo parallel_env, or path of such a function
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # of parallel environments: dotted paths; with arguments: a.B(size=4)
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    async_envs: bool = False  # a process for each environment: for environments slower than 1 ms a step
    total_timesteps: int = 1_000_000  # environment steps to train for at least; resets do not count
    stop_at_return: float | None = None  # stop once the mean return of an evaluation reaches this
    seed: int = 1  # seed of everything that is drawn at random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps; auto: the CPU
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


class Agents(nn.Module):
    """The actors mu^i of n agents, their critics Q, and the targets mu' and Q', which follow slowly.

    A row is the observation that TeamEnv returns in one step; `layout` has the slice of each part:

        [ alive, 1 or 0 per agent | observations | state | available actions, 1 or 0 ]

    `layout.states[i]` is agent i's own state, or all of it.

    Agent i's action is in [-1, 1]^A_i; a Discrete one is one-hot. A joint action holds the actions
    of all agents: A_1 + … + A_n numbers. A list of n tensors has one for each agent, for example
    actions (B, A_i).

    TD3's two estimates of Q are called twins here (MADDPG has only the first): each is a list of
    critics; so critics[0] is Q_1 of all agents. EP and FP are names from arXiv 2103.01955, section 5.2;
    but what is FP here is called AS (agent-specific) there.

        --state-type          EP                    FP
        rewards and ends      one for all agents    one for each agent
        rows with a target    B, the batch          n·B: B for the first agent, B for the second, …
        critics               one for all agents    one for each; with --share-policy, one for all
        a twin                a list of one critic  a list of one critic or n
        a critic's input      state, joint action   the agent's own observation, state, joint action
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
        self.action_sizes = [spaces.flatdim(space) for space in action_spaces]
        self.actors = nn.ModuleList()
        for inputs, outputs in zip(self.obs_sizes, self.action_sizes):
            self.actors.append(uniform_mlp(inputs, args.hidden_sizes, outputs))
        if args.share_policy:  # the list then holds the same network n times
            self.actors = nn.ModuleList([self.actors[0]] * self.num_agents)
        self.critics = nn.ModuleList([self.new_critics()])  # the first twin
        if args.twin_q:  # with its own weights: a copy of the first twin would learn the same
            self.critics.append(self.new_critics())
        self.target_actors = copy.deepcopy(self.actors)
        self.target_critics = copy.deepcopy(self.critics)
        self.to(device)

    def new_critics(self):
        """A list of one critic for all agents; with FP and separate policies, of one for each."""
        args = self.args
        state = self.layout.state
        count = 1
        if args.state_type == "FP":
            state = self.layout.states[0]
            count = 1 if args.share_policy else self.num_agents
        inputs = state.stop - state.start + sum(self.action_sizes)
        if args.state_type == "FP":  # an agent's critic sees the agent's observation as well
            inputs += max(self.obs_sizes)
        return nn.ModuleList(uniform_mlp(inputs, args.hidden_sizes, 1) for _ in range(count))

    def critic_inputs(self, rows):
        """What critics see besides actions: the state (R, S) of rows (R, …).

        With FP (n·B, S') of rows (n·B, …): the agent's own observation, padded with zeros to the
        length of the longest one, and the state (its own, if the environment has one for each).
        """
        if self.args.state_type == "EP":
            return rows[:, self.layout.state]
        inputs = []
        for i, part in enumerate(rows.chunk(self.num_agents)):
            obs = part[:, self.layout.observations[i]]
            obs = nn.functional.pad(obs, (0, max(self.obs_sizes) - self.obs_sizes[i]))
            inputs.append(torch.cat([obs, part[:, self.layout.states[i]]], dim=1))
        return torch.cat(inputs)

    def values(self, critics, rows, actions):
        """Q(s, a^1, …, a^n), (R,), for rows (R, …) and joint actions (R, A_1 + … + A_n).

        `critics` lists one critic for all rows, or n: then R = n·B, and critic i gets the B rows of
        agent i.
        """
        inputs = torch.cat([self.critic_inputs(rows), actions], dim=1).chunk(len(critics))
        return torch.cat([critic(part) for critic, part in zip(critics, inputs)]).squeeze(1)

    def views(self, rows):
        """(observations, masks of available actions) from rows (B, …): two lists over agents.

        If the environment has no masks, all Discrete actions are available. Masks of continuous
        actions are (B, 0).
        """
        obs = [rows[:, part] for part in self.layout.observations]
        available = [rows[:, part] > 0 for part in self.layout.available]
        if self.discrete and available[0].shape[1] == 0:
            available = [rows.new_ones(len(rows), size) > 0 for size in self.action_sizes]
        return obs, available

    def choose(self, actors, rows, rng=None):
        """(actions, outputs), lists over agents. Actions are tanh(output) or Gumbel-softmax draws.

        Gradients flow back through both. The NumPy generator `rng` draws Discrete actions; without it,
        they are the most likely ones.
        """
        actions = []
        outputs = []
        for actor, obs, available in zip(actors, *self.views(rows)):
            output = actor(obs)
            outputs.append(output)
            if self.discrete:
                noise = np.zeros(output.shape) if rng is None else rng.gumbel(size=output.shape)
                noise = torch.as_tensor(noise, dtype=torch.float32, device=self.device)
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
        """Joint actions for training, an array: with noise added; Discrete ones drawn from the softmax."""
        actions, _ = self.choose(self.actors, torch.as_tensor(rows, device=self.device), rng)
        joint = torch.cat(actions, dim=1)
        if not self.discrete:
            joint = (joint + noise * self.normal(joint.shape, rng)).clamp(-1, 1)
        return joint.cpu().numpy()

    def random_actions(self, rows, rng):
        """Uniformly random joint actions, an array; Discrete ones from those available."""
        if not self.discrete:
            return rng.uniform(-1, 1, (len(rows), sum(self.action_sizes)))
        actions = []
        for available in self.views(torch.as_tensor(rows))[1]:
            # The largest of independent random numbers is equally likely to be any of them.
            draws = np.where(available, rng.random(available.shape), -1)
            actions.append(np.eye(available.shape[1])[draws.argmax(1)])
        return np.hstack(actions)

    @torch.no_grad()
    def act(self, rows):
        """The actors' actions in rows (N, …) without noise, as the environment takes them."""
        if np.ndim(rows) != 2:
            raise ValueError("act takes a batch of team rows; for one, it is act(row[None])")
        actions, _ = self.choose(self.actors, torch.as_tensor(rows, device=self.device))
        return self.to_env(torch.cat(actions, dim=1).cpu().numpy())

    def to_env(self, actions):
        """Joint actions as the environment takes them: [-1, 1] becomes the bounds of each Box."""
        taken = []
        ends = np.cumsum(self.action_sizes)
        for space, action in zip(self.action_spaces, np.split(actions, ends[:-1], axis=1)):
            if self.discrete:
                action = action.argmax(1) + space.start
            else:
                scale, bias = scale_and_bias(space)
                action = (scale * action + bias).reshape(-1, *space.shape)
                action = np.clip(action, space.low, space.high)
            taken.append(action.astype(space.dtype))
        return tuple(taken)


def gumbel_softmax(logits, noise, temperature):
    """One-hot draws from softmax(logits) over the last axis, and a gradient for them.

    The argmax of logits + Gumbel noise is such a draw (arXiv 1611.01144, eq. 1). It has no gradient,
    so the backward pass uses that of

        y = softmax( (logits + noise) / temperature )   (arXiv 1611.01144, eq. 2)

    instead: the straight-through estimator (section 2.2).
    """
    soft = ((logits + noise) / temperature).softmax(-1)
    hard = nn.functional.one_hot((logits + noise).argmax(-1), soft.shape[-1]).to(soft.dtype)
    return hard + (soft - soft.detach())  # the value of `hard`, the gradient of `soft`


# ------------------------------------------------------------------------------------ replay buffer
# N environments, n agents, B samples in a batch. A stream is a sequence of rewards and episode ends:
# the team's (EP: G = 1), or one for each agent (FP: G = n). Arrays of G·B entries hold B for the first
# stream, then B for the next. Next rows are G·B too: two agents' n-step windows may
# end in different steps.

OffPolicyBatch = namedtuple(
    "OffPolicyBatch",
    "rows actions took_part "  # (B, …); joint actions (B, A_1 + … + A_n); (B, n): False for the dead
    "rewards terminated "  # (G·B,): sum over a window; whether the window ends by termination
    "next_rows discounts",  # (G·B, …): the row after the window; (G·B,): gamma^k, the factor of Q'
)
STORED = "rows actions took_part rewards terminated dones next_rows".split()  # see insert


class OffPolicyBuffer:
    """The last `capacity` steps of N environments, first in, first out, in host memory.

    Slot t·N + e is position t in the ring of environment e. Each environment has its own ring of T
    steps, because steps that only reset it (those after an episode's end) are not stored. With N = 2
    and n_step = 3:

        slot   0  2  4  6    environment 0: its episode ends in slot 2; slot 6 is its newest
        slot   1  3  5  7    environment 1: its episode ends in slot 5
        from slot 1: reward r1 + γ r3 + γ² r5, discount γ³
        from slot 4: reward r4 + γ r6, discount γ²: slot 6 is the newest
        from slot 2: reward r2, discount γ: the episode ends there
    """

    def __init__(self, capacity, num_envs, num_agents, streams, row_size, action_size, n_step=1, gamma=0.99):
        self.num_envs = num_envs
        self.streams = streams
        self.n_step = n_step
        self.gamma = gamma
        self.steps = capacity // num_envs
        self.positions = np.zeros(num_envs, np.int64)  # where each environment writes its next step
        self.sizes = np.zeros(num_envs, np.int64)  # how many steps of each environment are stored
        shape = self.steps, num_envs
        self.rows = np.zeros((*shape, row_size), np.float32)
        self.actions = np.zeros((*shape, action_size), np.float32)
        self.took_part = np.zeros((*shape, num_agents), bool)
        self.rewards = np.zeros((*shape, streams), np.float32)
        self.terminated = np.zeros((*shape, streams), bool)
        self.dones = np.zeros((*shape, streams), bool)
        self.next_rows = np.zeros((*shape, row_size), np.float32)

    def insert(self, rows, actions, took_part, rewards, terminated, dones, next_rows):
        """Store one step of those environments in which any agent took part.

        took_part is (N, n), all False in a step that only resets. rewards, terminated and dones are (N, G).
        `dones`: this step is the last of the episode (FP: the agent's last, or it is dead); `terminated`:
        it ended by termination, not by truncation. next_rows belong to the same episode, even at its end.
        """
        envs = np.flatnonzero(took_part.any(1))
        t = self.positions[envs]
        self.rows[t, envs] = rows[envs]
        self.actions[t, envs] = actions[envs]
        self.took_part[t, envs] = took_part[envs]
        self.rewards[t, envs] = rewards[envs]
        self.terminated[t, envs] = terminated[envs]
        self.dones[t, envs] = dones[envs]
        self.next_rows[t, envs] = next_rows[envs]
        self.positions[envs] = (t + 1) % self.steps
        self.sizes[envs] = np.minimum(self.sizes[envs] + 1, self.steps)

    def cut(self):
        """End all windows at the newest steps: all environments have been made anew."""
        envs = np.flatnonzero(self.sizes > 0)
        self.dones[self.positions[envs] - 1, envs] = True

    def windows(self, t, e):
        """(rewards, discounts, last steps), each (G, B), of windows from steps t (B,) of envs e (B,).

        The reward of a window of k steps, whose discount, for Q', is gamma^k:

            R = r_0 + gamma r_1 + … + gamma^(k-1) r_{k-1}   (arXiv 1710.02298, eq. 2)

        k is n_step, or less if the episode ends or the newest step is reached first.
        """
        g = np.arange(self.streams)[:, None]  # with e (B,), entry [g, b] is stream g of sample b
        newest = (self.positions[e] - 1) % self.steps
        last = np.tile(t, (self.streams, 1))
        rewards = self.rewards[last, e, g]
        discounts = np.full(last.shape, self.gamma, np.float32)
        for _ in range(self.n_step - 1):
            goes_on = ~self.dones[last, e, g] & (last != newest)
            last = np.where(goes_on, (last + 1) % self.steps, last)
            rewards += goes_on * discounts * self.rewards[last, e, g]
            discounts[goes_on] *= self.gamma
        return rewards, discounts, last

    def get(self, slots, device="cpu"):
        """The OffPolicyBatch of the windows that start in these slots (B,)."""
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
            discounts=discounts.ravel(),
        )
        return OffPolicyBatch(*[torch.as_tensor(field, device=device) for field in batch])

    def sample(self, batch_size, rng, device="cpu"):
        """An OffPolicyBatch drawn uniformly, with replacement. ValueError if nothing is stored."""
        if self.sizes.sum() == 0:
            raise ValueError("cannot sample from an empty buffer")
        ends = self.sizes.cumsum()
        drawn = rng.integers(ends[-1], size=batch_size)
        e = np.searchsorted(ends, drawn, side="right")
        t = drawn - ends[e] + self.sizes[e]
        return self.get(t * self.num_envs + e, device)

    def state_dict(self):
        """What is stored, for a checkpoint."""
        filled = self.sizes.max()
        state = {name: torch.from_numpy(getattr(self, name)[:filled]) for name in STORED}
        state["positions"] = torch.from_numpy(self.positions)
        state["sizes"] = torch.from_numpy(self.sizes)
        return state

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
    dones = (terminated | truncated)[:, None]
    if agents.args.state_type == "EP":
        rewards = rewards[:, None]
        terminated = terminated[:, None]
    else:  # each agent has its own rewards and end, (N, n)
        rewards = infos["rewards"]
        terminated = infos["terminated"]
        dones = dones | (next_rows[:, alive] == 0)
    buffer.insert(rows, actions, took_part, rewards, terminated, dones, next_rows)


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


def valid_mean(x, valid):
    """Mean of x (R,) where valid (R,) is True; 0 if that is nowhere."""
    return (x * valid).sum() / valid.sum().clamp(min=1)


def with_own_actions(own, actions):
    """n copies of B stored joint actions, (n·B, A_1 + … + A_n); in each, one agent's is replaced.

    In copy i, agent i does what its actor chooses: (a^1, …, mu^i(o^i), …, a^n) in eq. 5 of arXiv
    1706.02275. `own`, the actors' choices, and `actions`, the stored ones, are lists over agents of
    (B, A_i). The first B rows are the first agent's copy, the next B the second agent's, and so on.
    """
    copies = []
    for i in range(len(own)):
        joint = list(actions)
        joint[i] = own[i]
        copies.append(torch.cat(joint, dim=1))
    return torch.cat(copies)


@torch.no_grad()
def polyak(target, source, tau):
    """Polyak averaging: move all weights of the target network towards those of the source.

    target <- tau source + (1 - tau) target   (arXiv 1509.02971, algorithm 1)
    """
    for target_weights, weights in zip(target.parameters(), source.parameters()):
        target_weights.lerp_(weights, tau)
    for target_buffer, buffer in zip(target.buffers(), source.buffers()):  # BatchNorm's, if you add it
        target_buffer.copy_(buffer)


@torch.no_grad()
def matd3_targets(agents, batch, args, rng):
    """The critics' targets y (G·B,): n-step returns plus gamma^k Q', with TD3's first two tricks."""
    next_actions, _ = agents.choose(agents.target_actors, batch.next_rows, rng)
    joint = torch.cat(next_actions, dim=1)
    if args.target_noise > 0 and not agents.discrete:  # TD3, trick 1: target policy smoothing
        noise = args.target_noise * agents.normal(joint.shape, rng)
        joint = smoothed(joint, noise, args.noise_clip)
    # TD3, trick 2: clipped double Q. critic_targets takes the lower value of two twins (MADDPG: one).
    next_values = torch.stack([agents.values(twin, batch.next_rows, joint) for twin in agents.target_critics])
    return critic_targets(batch.rewards, next_values, batch.terminated, batch.discounts)


def critics_loss(agents, batch, targets):
    """(loss, mean value). The loss: squared errors, their mean over all Q^i, summed over twins.

    L = E[ (Q^i(s, a^1, …, a^n) - y^i)^2 ]   (arXiv 1706.02275, eq. 6)
    """
    streams = len(targets) // len(batch.rows)
    rows = batch.rows.repeat(streams, 1)
    actions = batch.actions.repeat(streams, 1)
    values = torch.stack([agents.values(twin, rows, actions) for twin in agents.critics])
    errors = ((values - targets) ** 2).sum(0)
    valid = torch.ones_like(errors)
    if agents.args.state_type == "FP":  # an agent's critic does not learn from steps of the dead
        valid = batch.took_part.T.flatten()
    return valid_mean(errors, valid), values.detach().mean()


def actors_loss(agents, batch, rng):
    """(loss, mean square of the actors' outputs); an actor does not learn from steps of the dead.

    L = -E[ Q^i(s, a^1, …, mu^i(o^i), …, a^n) ]   (its gradient: arXiv 1706.02275, eq. 5)
    """
    own, outputs = agents.choose(agents.actors, batch.rows, rng)
    # In copy i only a^i carries a gradient, so one backward pass serves all actors.
    joint = with_own_actions(own, batch.actions.split(agents.action_sizes, dim=1))
    rows = batch.rows.repeat(agents.num_agents, 1)
    values = agents.values(agents.critics[0], rows, joint)  # as in TD3, only of the first twin
    squares = torch.cat([(output**2).mean(1) for output in outputs])
    valid = batch.took_part.T.flatten()
    return -valid_mean(values, valid), valid_mean(squares, valid)


# ----------------------------------------------------------------------------------------- training
def num_updates(step, args):
    """How many updates are due in all, after `step` steps of all environments together."""
    warm_up = max(args.learning_starts, args.batch_size)  # updates need a full batch
    rounds = step // args.train_frequency - warm_up // args.train_frequency
    return max(0, rounds) * args.gradient_steps


def gradient_step(loss, networks, optimizer, args):
    """One step down the gradient of the loss for these networks; others get no gradients."""
    weights = list(networks.parameters())
    optimizer.zero_grad()
    loss.backward(inputs=weights)
    if args.max_grad_norm is not None:
        nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
    optimizer.step()


def train(args):
    """Train with `args`; return the summary, which summary.json holds too. UserError on bad input."""
    envs = make_envs(args, args.num_envs)  # for their spaces: run.new_envs makes those that are played
    agents = make_agent(args, envs)
    set_threads(image=False)
    buffer = make_off_policy_buffer(args, agents)
    run = Run(args, envs)
    actor_optimizer = torch.optim.Adam(agents.actors.parameters(), args.actor_learning_rate, fused=True)
    critic_optimizer = torch.optim.Adam(agents.critics.parameters(), args.critic_learning_rate, fused=True)
    factor = lambda _: run.remaining() if args.anneal_lr else 1.0  # multiplies both learning rates
    actor_scheduler = torch.optim.lr_scheduler.LambdaLR(actor_optimizer, factor)
    critic_scheduler = torch.optim.lr_scheduler.LambdaLR(critic_optimizer, factor)
    optimizers = {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}
    schedulers = {"actor_scheduler": actor_scheduler, "critic_scheduler": critic_scheduler}
    run.start(agent=agents, buffer=buffer, **optimizers, **schedulers)  # --resume loads their states

    updates = num_updates(run.step, args)  # of the critics, so far
    envs, rows, reset_rows, rng = run.new_envs()
    buffer.cut()  # after --resume: no n-step window reaches from old episodes into new ones
    while not run.is_finished():
        if run.step < args.learning_starts:
            actions = agents.random_actions(rows, rng)
        else:
            actions = agents.explore(rows, args.exploration_noise, rng)
        result = envs.step(agents.to_env(actions))
        store_step(buffer, agents, rows, reset_rows, actions, result)
        rows, rewards, terminated, truncated, _ = result
        run.count(rows, rewards, terminated | truncated, reset_rows=reset_rows)
        reset_rows = terminated | truncated  # the next step only resets these environments

        while updates < num_updates(run.step, args):
            updates += 1
            batch = buffer.sample(args.batch_size, rng, agents.device)
            targets = matd3_targets(agents, batch, args, rng)
            agents.train()  # if you add dropout, it belongs to the losses alone
            critic_loss, value_mean = critics_loss(agents, batch, targets)
            gradient_step(critic_loss, agents.critics, critic_optimizer, args)
            run.log(critic_loss=critic_loss.detach(), value_mean=value_mean)
            critic_scheduler.step()
            if updates % args.policy_frequency == 0:  # TD3, trick 3: delayed updates of actors and targets
                actor_loss, squares = actors_loss(agents, batch, rng)
                # As in MADDPG's code, a penalty against saturated outputs.
                penalized = actor_loss + args.output_penalty * squares
                gradient_step(penalized, agents.actors, actor_optimizer, args)
                run.log(actor_loss=actor_loss.detach())
                actor_scheduler.step()
                polyak(agents.target_actors, agents.actors, args.tau)
                polyak(agents.target_critics, agents.critics, args.tau)
            agents.eval()

        if run.write_what_is_due():  # a checkpoint: all episodes begin anew, as in a resumed run
            envs, rows, reset_rows, rng = run.new_envs()
            buffer.cut()
    return run.finish()


# ===== helpers: settings, teams of agents, environments ===========================================

CURVE = {"critic_loss": "loss of the critics", "value_mean": "mean value, by the critics", "actor_loss": "actors' loss"}
EXPLORES = True  # training adds noise to the policy: only evaluations decide --stop-at-return
SCHEDULED = ("anneal_lr",)  # flags that, if they are set, let a schedule end with total_timesteps
ONLY_FLAGS = "resume evaluate model render capture_video config run_dir".split()  # not from config.json
REFUSED_WRAPPERS = {}  # by read_wrapper
SAFE_IDS = r"(mpe2|pettingzoo\.(butterfly|classic|sisl))\.\w+_v\d+"  # that a stranger's config.json may ask for
SUFFIX = ".pt"  # of models and checkpoints. With weights_only, reading them executes nothing:
write_state = torch.save
read_state = partial(torch.load, map_location="cpu", weights_only=True)
manual_seed = torch.manual_seed  # seeds torch, for dropout

# Where MATD3 and MADDPG differ; this wins over TUNED.
ALGORITHMS = {
    None: {},
    "matd3": {"target_noise": 0.2, "twin_q": True, "policy_frequency": 2},
    "maddpg": {"target_noise": 0.0, "twin_q": False, "policy_frequency": 1},
}
# Tuned settings per environment; flags win over them. docs/maddpg_matd3.md has their scores.
PARTICLES = {"env_kwargs": '{"continuous_actions": true}', "num_envs": 8, "gamma": 0.95, "tau": 0.01}
PARTICLES |= {"actor_learning_rate": 3e-3, "critic_learning_rate": 3e-3, "anneal_lr": True, "train_frequency": 2}
TUNED = {
    "mpe2.simple_spread_v3": PARTICLES | {"share_policy": True, "total_timesteps": 120_000},
    "mpe2.simple_speaker_listener_v4": PARTICLES | {"total_timesteps": 100_000},
    "mpe2.simple_reference_v3": PARTICLES | {"share_policy": True, "n_step": 3, "exploration_noise": 0.3,
                                             "total_timesteps": 240_000},
}  # fmt: skip
tuned_settings = lambda args: TUNED.get(args.env_id, {}) | ALGORITHMS[args.algorithm]  # as the run section calls it


def make_agents(args, envs):
    """Untrained Agents for these environments. UserError for unsuitable spaces and flags."""
    named = ALGORITHMS[args.algorithm]
    if args.config and named and all(getattr(args, name) != value for name, value in named.items()):
        raise UserError(f"--config is not of --algorithm {args.algorithm}: give {', '.join(named)} as well")
    action_spaces = envs.single_action_space.spaces
    layout = envs.metadata["layout"]
    all_discrete = all(isinstance(space, spaces.Discrete) for space in action_spaces)
    if not all_discrete and not all(is_bounded_box(space) for space in action_spaces):
        found = ", ".join(map(str, action_spaces))
        needed = "all actions must be Discrete, or bounded Boxes of floats"
        raise UserError(f"{args.env_id}: {needed}, not {found}: use mappo.py")
    sizes = {part.stop - part.start for part in layout.observations}
    alike = len(sizes) == 1 and all(space == action_spaces[0] for space in action_spaces)
    if args.share_policy and not alike:
        raise UserError(f"the agents of {args.env_id} differ: add --no-share-policy; opponents: --state-type FP, too")
    torch.manual_seed(args.seed)
    return Agents(layout, action_spaces, args, choose_device(args)).eval()


make_agent = make_agents  # as the run section calls it


def is_bounded_box(space):
    """Whether it is a Box of floats with bounds; float32's largest number, 3e38, means "none" as well."""
    is_float = isinstance(space, spaces.Box) and space.dtype.kind == "f"
    return is_float and np.abs([space.low, space.high]).max() < 1e30


def make_off_policy_buffer(args, agents):
    """An empty buffer, as the arguments say. UserError if it is too small, or if there is no memory."""
    if args.buffer_size // args.num_envs * args.num_envs < args.batch_size:
        raise UserError("buffer_size, divided among num_envs, must not be less than batch_size")
    if max(args.learning_starts, args.batch_size) >= args.total_timesteps:
        print("learning_starts or batch_size is not below total_timesteps: nothing will be learnt")
    try:
        return OffPolicyBuffer(
            capacity=args.buffer_size,
            num_envs=args.num_envs,
            num_agents=agents.num_agents,
            streams=agents.num_agents if args.state_type == "FP" else 1,
            row_size=agents.layout.available[-1].stop,
            action_size=sum(agents.action_sizes),
            n_step=args.n_step,
            gamma=args.gamma,
        )
    except MemoryError as error:
        raise UserError(f"buffer_size {args.buffer_size:,} is too large: {error}") from error


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


# Where things stand in a TeamEnv's observation, all of them slices: `observations`, `states` and
# `available` list one per agent. If all agents share one state, `states` lists it n times.
Layout = namedtuple("Layout", "alive observations state states available")


class TeamReturn(BaseParallelWrapper):
    """Adds up the rewards of all agents in an episode before the user's wrappers change them."""

    def reset(self, seed=None, options=None):
        """As the environment's."""
        self.true_return = 0.0
        return super().reset(seed, options)

    def step(self, actions):
        """As the environment's."""
        obs, rewards, terminated, truncated, infos = super().step(actions)
        self.true_return += sum(np.asarray(reward, float).item() for reward in rewards.values())
        return obs, rewards, terminated, truncated, infos


class TeamEnv(gym.Env):
    """A PettingZoo parallel environment as a Gymnasium one, for Gymnasium's vector environments.

    An action is a tuple with an entry for each agent, a reward the sum of the agents' rewards (between
    opponents it says nothing), an observation one row:

        [ alive, 1 or 0 per agent | observations | state | available actions, 1 or 0 ]

    An agent is alive while it takes part. The row after its last step has its final observation, if
    the environment returns one; later rows have zeros. When the last agents end, those that acted in
    this last step still count as alive in the row after it.

    The state is the environment's own: one for all, or one for each agent, as `state()` of shape
    (n, S) or as "state" in the agents' infos. If there is none, it is all observations, and the row
    holds them only once. The row has available actions only if the environment gives masks; an agent
    that has no valid action, for example while it waits for its turn, may take the first one.

    The episode ends with the last agent. It is terminated if all that acted in the last step
    terminated, else truncated. It is truncated, too, when its return reaches `return_limit`. `info`
    has each agent's own "rewards" and "terminated".
    """

    JOINED = ("mpe2.", "pettingzoo.sisl.multiwalker")  # state() repeats observations, or fails after a death

    def __init__(self, env, wrappers=(), return_limit=None):
        self.counter = TeamReturn(env)
        self.env = self.counter
        for wrapper in wrappers:
            self.env = wrapper(self.env)
        self.return_limit = math.inf if return_limit is None else return_limit
        self.names = list(self.env.possible_agents)
        self.render_mode = getattr(env, "render_mode", None)
        _, infos = self.env.reset(seed=0)
        self.masked = any("action_mask" in info for info in infos.values())
        self.spaces = []  # of the agents' observations, without their masks
        for name in self.names:
            space = self.env.observation_space(name)
            if isinstance(space, spaces.Dict) and "action_mask" in space.spaces:  # as in turn-based games
                self.masked = True
                space = spaces.Dict({key: part for key, part in space.items() if key != "action_mask"})
            self.spaces.append(checked_space(space, name))
        action_spaces = [self.env.action_space(name) for name in self.names]
        self.choices = [choices(space) if self.masked else [] for space in action_spaces]

        alive = slice(0, len(self.names))
        observations = slices([spaces.flatdim(space) for space in self.spaces], alive.stop)
        joined = slice(alive.stop, observations[-1].stop)
        self.own_states, sizes = self.find_states(infos)
        states = slices(sizes, joined.stop) or [joined]
        state = slice(states[0].start, states[-1].stop)
        if len(states) == 1:  # shared
            states *= len(self.names)
        available = slices([sum(sizes) for sizes in self.choices], max(state.stop, joined.stop))
        self.layout = Layout(alive, observations, state, states, available)
        own_metadata = getattr(self.env, "metadata", {})
        self.metadata = own_metadata | {"layout": self.layout}  # vector environments copy it
        self.observation_space = spaces.Box(-np.inf, np.inf, (available[-1].stop,))
        self.action_space = spaces.Tuple(action_spaces)

    @property
    def true_return(self):
        """The episode's return so far, before the user's wrappers changed rewards."""
        return self.counter.true_return

    def find_states(self, infos):
        """(where the environment's own states are: "infos", "state()" or None; their sizes).

        One size for each agent, or a single one if they share a state. If state() has n rows, n the
        number of agents, each row is one agent's state; so a grid that happens to have n rows must be
        flattened. An image (uint8, three dimensions) does not count.
        """
        if all("state" in infos.get(name, {}) for name in self.names):
            sizes = [np.size(infos[name]["state"]) for name in self.names]
            if len(set(sizes)) > 1:
                raise UserError(f"the agents' states differ in size: {sizes}")
            return "infos", sizes
        if type(self.env.unwrapped).__module__.startswith(self.JOINED):
            return None, []
        try:
            state = np.asarray(self.env.state())
        except (AttributeError, NotImplementedError, TypeError):  # TypeError: `state` is not a function
            return None, []
        if state.dtype == object or state.size == 0 or (state.dtype == np.uint8 and state.ndim == 3):
            return None, []
        if state.ndim == 2 and len(state) == len(self.names):
            return "state()", [state.shape[1]] * len(state)
        return "state()", [state.size]

    def reset(self, *, seed=None, options=None):
        """(first row, info) of an episode. Without a seed, one is drawn: environments differ in what they do then."""
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(2**31))
        obs, infos = self.env.reset(seed=seed)
        return self.row(self.env.agents, obs, infos), self.info((), {}, {})

    def step(self, actions):
        """One step, in which the agents that are alive act; the actions of the dead are ignored."""
        acting = {}
        for name, action in zip(self.names, actions):
            if name in self.env.agents:
                acting[name] = action
        obs, rewards, terminated, truncated, infos = self.env.step(acting)
        going_on = []
        for name in self.env.agents:
            if not terminated.get(name) and not truncated.get(name):
                going_on.append(name)
        over = not going_on
        all_terminated = over and all(terminated.get(name, True) for name in acting)
        cut_off = (over and not all_terminated) or self.true_return >= self.return_limit
        final = {name: obs[name] for name in acting if name in obs}  # also of those that have just ended
        shown = {name: obs[name] for name in going_on} | final
        row = self.row(acting if over else going_on, shown, infos)
        info = self.info(acting, rewards, terminated)
        return row, float(info["rewards"].sum()), all_terminated, cut_off, info

    def row(self, alive, obs, infos):
        """The team's observation. `alive` has agents' names; obs and infos are PettingZoo's dicts."""
        row = np.zeros(self.observation_space.shape, np.float32)
        for i, name in enumerate(self.names):
            row[self.layout.available[i]] = 1
            row[self.layout.alive.start + i] = name in alive
            if name not in obs:
                continue
            put(row, self.layout.observations[i], spaces.flatten(self.spaces[i], obs[name]))
            info = infos.get(name, {})
            if self.own_states == "infos" and "state" in info:
                put(row, self.layout.states[i], info["state"])
            mask = info.get("action_mask")
            if isinstance(obs[name], dict):
                mask = obs[name].get("action_mask", mask)
            if mask is not None and not self.masked:
                raise UserError(f"{name} has an action_mask after a step, but no agent has one after reset")
            if mask is not None and self.choices[i]:
                put(row, self.layout.available[i], usable(mask, self.choices[i]))
        if self.own_states == "state()":
            put(row, self.layout.state, self.env.state())
        return row

    def info(self, acting, rewards, terminated):
        """The agents' own rewards and terminations, as arrays; those of the dead are 0 and False.

        An agent that has acted, and of which `terminated` says nothing, is gone: it has terminated.
        """
        own_rewards = [np.asarray(rewards.get(name, 0), float).item() for name in self.names]
        own_ends = [bool(terminated.get(name, name in acting)) for name in self.names]
        return {"rewards": np.array(own_rewards, np.float32), "terminated": np.array(own_ends)}

    def render(self):
        """As the environment's."""
        return self.env.render()

    def close(self):
        """As the environment's."""
        self.env.close()


def put(row, part, numbers):
    """Write numbers to a part of a row, a slice. ValueError if there are more or fewer of them."""
    row[part] = np.reshape(numbers, row[part].shape)  # else a single number would fill the part


def checked_space(space, name):
    """The space of what an agent observes. UserError if it does not make a short row of numbers."""
    parts = space.values() if isinstance(space, spaces.Dict) else [space]
    if any(is_image(part) for part in parts):
        raise UserError(f"{name} observes {space}: there is no network for images")
    if not space.is_np_flattenable or not 0 < spaces.flatdim(space) <= 10_000:
        raise UserError(f"{name} observes {space}; needed is what makes 1 to 10,000 numbers")
    return space


def choices(space):
    """How many choices each factor of an action has; none for a Box."""
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ravel().tolist()
    return [int(space.n)] if isinstance(space, spaces.Discrete) else []


def usable(mask, sizes):
    """A mask (an array, or a tuple of arrays for the factors) in which each factor has a choice.

    Where a factor had none, its first choice becomes available.
    """
    mask = np.concatenate(mask) if isinstance(mask, tuple) else np.array(mask)
    for factor in np.split(mask, np.cumsum(sizes)[:-1]):  # views
        if not factor.any():
            factor[0] = 1
    return mask


def slices(sizes, begin):
    """A list of adjacent slices of these sizes; the first starts at `begin`."""
    parts = []
    for size in sizes:
        parts.append(slice(begin, begin + size))
        begin += size
    return parts


def without_checks(env):
    """The same environment without PettingZoo's checks of order and bounds.

    In mpe2, these take a third of the time.
    """
    while isinstance(getattr(env, "aec_env", None), (AssertOutOfBoundsWrapper, OrderEnforcingWrapper)):
        env.aec_env = env.aec_env.env
    return env


def is_image(space):
    """Whether a Box holds images (uint8, channels first or last), large enough for a CNN."""
    return space.dtype == np.uint8 and len(space.shape) == 3 and sorted(space.shape)[1] >= 36


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


def make_team_envs(args, num_envs, render=False, video=None):
    """A vector environment of TeamEnvs with next-step autoreset; in a window or filmed, if asked.

    UserError for what is mistyped. What the environment itself raises keeps its traceback.
    """
    try:
        found = pkgutil.resolve_name(args.env_id)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:  # ValueError: this is no path
        if getattr(error, "name", "") not in args.env_id:  # the user's own module lacks another one
            raise
        raise UserError(f"{error}: an id is the path of a module, such as mpe2.simple_spread_v3") from error
    parallel_env = getattr(found, "parallel_env", found)
    if not callable(parallel_env):
        raise UserError(f"{args.env_id} has no parallel_env (docs/mappo.md shows how a turn-based game gets one)")
    try:
        kwargs = json.loads(args.env_kwargs)
        if not isinstance(kwargs, dict):
            raise UserError('--env-kwargs is a JSON object, such as {"size": 4}')
        if render or video:
            kwargs["render_mode"] = "rgb_array" if video else "human"
        wrappers = [read_wrapper(text) for text in args.wrappers]
        for wrapper in wrappers:
            if isinstance(wrapper.func, type) and issubclass(wrapper.func, gym.Wrapper):
                raise UserError("a wrapper must be one of parallel environments, not Gymnasium's")

        def make_env():
            env = without_checks(parallel_env(**kwargs))
            if hasattr(env, "agent_iter") or not hasattr(env, "possible_agents"):  # agent_iter: they act in turn
                raise UserError(f"{args.env_id} is not a parallel environment of PettingZoo")
            env = TeamEnv(env, wrappers, args.max_episode_return)
            if args.max_episode_steps is not None:
                env = gym.wrappers.TimeLimit(env, args.max_episode_steps)
            return gym.wrappers.RecordVideo(env, str(video)) if video else env

        vector_env = gym.vector.AsyncVectorEnv if args.async_envs else gym.vector.SyncVectorEnv
        return vector_env([make_env] * num_envs)
    except MISTYPED as error:
        raise_mistyped(error, args)


make_envs = make_team_envs  # as the run section calls it


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
