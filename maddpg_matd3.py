# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2",
#   "tyro==1.0.17", "tqdm==4.70.1", "moviepy==2.2.1", "mpe2==1.1.1",
# ]
# ///
"""Multi-agent DDPG and TD3 (MADDPG, MATD3), all of it, in this one file.

Each of n agents acts on what it alone observes, a^i = mu^i(o^i). While learning, its critic Q^i sees the state s and
all actions, and learns from old transitions what return to expect. The actor follows the gradient of Q^i uphill, while
the others do what they did:

    y^i = r^i + gamma Q'^i(s', mu'^1(o'^1), …, mu'^n(o'^n)),      L(Q^i) = E[ (Q^i(s, a^1, …, a^n) - y^i)^2 ],
    J(mu^i) = E[ Q^i(s, a^1, …, mu^i(o^i), …, a^n) ]              (arXiv 1706.02275, eq. 6; J's gradient: 5)

where Q' and mu' follow Q and mu slowly. By default (--state-type EP) there is one Q, of the team's summed reward: for
cooperative tasks only. --state-type FP --no-share-policy has one Q^i per agent, of its own reward, as in the paper.
MATD3 is MADDPG plus TD3's three tricks: noise on mu'(o') smooths Q', of two critics the lower value counts, actors move
less often than critics. Discrete actions are drawn by Gumbel-softmax.

    python maddpg_matd3.py                                                   # three agents spread over three landmarks
    python maddpg_matd3.py --env-id mpe2.simple_speaker_listener_v4 --algorithm maddpg
    python maddpg_matd3.py --evaluate runs/DIR --render                      # play what a run has left behind

Papers: MADDPG arXiv 1706.02275, MATD3 arXiv 1910.01465, TD3 arXiv 1802.09477, Gumbel-softmax arXiv 1611.01144.
The story ends at "# ===== helpers"; the code below it makes environments, keeps the run folder and draws the curve.
"""

import copy
import difflib
import importlib
import json
import math
import os
import pkgutil
import platform
import re
import signal
import sys
import threading
import time
from collections import namedtuple
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from shlex import quote
from types import SimpleNamespace
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
    env_id: str = "mpe2.simple_spread_v3"  # module with a PettingZoo parallel_env, or the dotted path of a maker
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers of parallel environments, applied in order
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    async_envs: bool = False  # play each environment in a process of its own
    total_timesteps: int = 1_000_000  # environment steps to train for; in each, all agents act
    stop_at_return: float | None = None  # stop once an evaluation reaches this (training episodes explore)
    seed: int = 1  # seed of everything that is drawn at random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps; auto: the CPU
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
    algorithm: Literal["matd3", "maddpg"] = "matd3"  # sets those of the next three that are not given: see ALGORITHMS
    target_noise: float = 0.2  # noise on the target's continuous actions (1: half their range); maddpg: 0
    twin_q: bool = True  # two critics, of whose target values the lower one counts; maddpg: False
    policy_frequency: int = 2  # critic updates per update of the actors and of all targets; maddpg: 1
    noise_clip: float = 0.5  # bound of the noise on the target's continuous actions (1: half their range)
    state_type: Literal["EP", "FP"] = "EP"  # EP: one state, reward and critic for the team; FP: one of each per agent
    share_policy: bool = False  # one actor (and with FP, one critic) for all agents, or one for each
    actor_learning_rate: float = 1e-3  # of Adam
    critic_learning_rate: float = 1e-3  # of Adam
    anneal_lr: bool = False  # lower both learning rates linearly to zero
    num_envs: int = 1  # environments played side by side
    buffer_size: int = 1_000_000  # steps to keep, over all environments
    batch_size: int = 256  # steps per update
    learning_starts: int = 1_000  # steps with uniformly random actions; updates begin once batch_size are stored too
    train_frequency: int = 4  # steps (over all environments) from one round of updates to the next
    gradient_steps: int = 1  # critic updates per round
    gamma: float = 0.99  # discount
    n_step: int = 1  # rewards that a target sums before it asks Q'
    tau: float = 0.005  # how far the targets move towards the networks in one update
    exploration_noise: float = 0.1  # deviation of the noise on continuous actions (1: half their range)
    output_penalty: float = 1e-3  # weight of the mean square of what goes into tanh or softmax; not in the papers
    gumbel_temperature: float = 1.0  # discrete actions: how soft the choices are that gradients flow through
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layers of each actor
    critic_hidden_sizes: tuple[int, ...] | None = None  # hidden layers of each critic; None: as the actors'
    max_grad_norm: float | None = None  # longer gradients (of all actors, of all critics) are shortened to this norm


# ------------------------------------------------------------------------------------------------------- networks


def uniform_mlp(inputs, hidden_sizes, outputs):
    """Linear layers with ReLU between them. They start from ±1/sqrt(inputs), as nn.Linear has it."""
    layers = []
    for size in hidden_sizes:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class Agents(nn.Module):
    """The actors mu^i of n agents, their critics Q, and the targets mu' and Q', which follow slowly.

    What each agent has of its own stands in lists over agents: observations (B, O_i), actions (B, A_i), masks (B, A_i)
    of available actions (continuous: (B, 0)). Everywhere but in the environment, an action is in [-1, 1]^A, or, if it
    is Discrete, one-hot. The state is the environment's own, or else what all agents observe.
    `rows` (N, …) are observations of TeamEnv, in which all this stands side by side, as `layout` says:

        [ 1 in an episode's first row | alive, per agent | observations | state | available actions, 1 or 0 ]

        --state-type          EP                      FP
        state, reward, end    one for all agents      one for each agent
        their rows in a batch B                       n·B: the first agent's, then the second one's, and so on
        critics               one for all agents      one for each agent; with --share-policy, one for all
        what a critic sees    the state               the agent's own observation, and the state
    """

    def __init__(self, layout, action_spaces, args, device="cpu"):
        super().__init__()
        self.layout = layout
        self.action_spaces = action_spaces
        self.args = args
        self.device = torch.device(device)
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
        if args.share_policy:  # the list then holds one and the same network n times
            self.actors = nn.ModuleList([self.actors[0]] * self.num_agents)
        self.critics = nn.ModuleList([self.new_critics(args)])  # twins, each a list over agents (EP: of one)
        if args.twin_q:  # with weights of their own: copies of the first would learn the same
            self.critics.append(self.new_critics(args))
        self.target_actors = copy.deepcopy(self.actors)
        self.target_critics = copy.deepcopy(self.critics)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))  # of the critics, so far
        self.to(device)

    def new_critics(self, args):
        """A list of one critic for all agents, or, with FP, of one for each."""
        inputs = self.state_size + sum(self.action_sizes)
        hidden_sizes = args.hidden_sizes if args.critic_hidden_sizes is None else args.critic_hidden_sizes
        count = self.num_agents if args.state_type == "FP" and not args.share_policy else 1
        return nn.ModuleList(uniform_mlp(inputs, hidden_sizes, 1) for _ in range(count))

    def values(self, critics, states, actions):
        """Q(s, a^1, …, a^n), (R,), of states (R, S) and a list over agents of actions, (R, A_i) or (B, A_i).

        `critics` has one critic for all rows, or one for each agent's B of the n·B rows.
        """
        together = torch.cat(actions, dim=1)
        together = together.repeat(len(states) // len(together), 1)  # from the buffer: B for every agent's critic
        inputs = torch.cat([states, together], dim=1).chunk(len(critics))
        return torch.cat([critic(part) for critic, part in zip(critics, inputs)]).squeeze(1)

    def choose(self, actors, obs, available, rng):
        """(actions, outputs): what the actors do, and what goes into tanh or Gumbel-softmax for it. Lists of tensors.

        Gradients flow through both. Discrete actions are drawn with the NumPy generator `rng`.
        """
        outputs = [actor(own) for actor, own in zip(actors, obs)]
        if not self.discrete:
            return [torch.tanh(output) for output in outputs], outputs
        actions = []
        for output, mask in zip(outputs, available):
            noise = torch.as_tensor(rng.gumbel(size=output.shape), dtype=torch.float32, device=self.device)
            logits = torch.where(mask, output, -1e9)
            actions.append(gumbel_softmax(logits, noise, self.args.gumbel_temperature))
        return actions, outputs

    @torch.no_grad()
    def explore(self, rows, noise, rng):
        """What the actors do while they learn, arrays (N, A_i): with noise, or drawn from their softmax."""
        obs, available = self.views(rows)
        obs = [torch.as_tensor(own, device=self.device) for own in obs]
        available = [torch.as_tensor(mask, device=self.device) for mask in available]
        actions, _ = self.choose(self.actors, obs, available, rng)
        if not self.discrete:
            actions = [(action + noise * self.normal(action.shape, rng)).clamp(-1, 1) for action in actions]
        return [action.cpu().numpy() for action in actions]

    def normal(self, shape, rng):
        """Standard normal noise, drawn with the NumPy generator `rng`."""
        return torch.as_tensor(rng.standard_normal(shape, np.float32), device=self.device)

    def random_actions(self, rows, rng):
        """Uniformly random actions, arrays (N, A_i), of those that are available."""
        if not self.discrete:
            return [rng.uniform(-1, 1, (len(rows), size)) for size in self.action_sizes]
        actions = []
        for mask in self.views(rows)[1]:
            lots = np.where(mask, rng.random(mask.shape), -1)
            actions.append(np.eye(mask.shape[1])[lots.argmax(1)])
        return actions

    @torch.no_grad()
    def act(self, rows):
        """What the deterministic actors do, as the environment takes it: evaluations call this."""
        obs, available = self.views(rows)
        actions = []
        for actor, own, mask in zip(self.actors, obs, available):
            output = actor(torch.as_tensor(own, device=self.device)).cpu().numpy()
            if self.discrete:
                best = np.where(mask, output, -np.inf).argmax(1)
                actions.append(np.eye(output.shape[1])[best])
            else:
                actions.append(np.tanh(output))
        return self.to_env(actions)

    def to_env(self, actions):
        """The tuple of all agents' actions as the environment takes them: [-1, 1] stretched to the bounds of a Box."""
        taken = []
        for space, action in zip(self.action_spaces, actions):
            if self.discrete:
                taken.append((action.argmax(1) + space.start).astype(space.dtype))
                continue
            low = space.low.astype(np.float64)
            high = space.high.astype(np.float64)
            action = action.reshape(-1, *space.shape)
            scaled = np.clip(low + (action + 1) / 2 * (high - low), low, high)
            if np.issubdtype(space.dtype, np.integer):
                scaled = np.rint(scaled)
            taken.append(scaled.astype(space.dtype))
        return tuple(taken)

    def views(self, rows):
        """(observations, available actions) in rows, lists over agents of arrays (N, …).

        Discrete actions are all available where the environment does not say. Continuous ones have no list: (N, 0).
        """
        obs = [rows[:, part] for part in self.layout.observations]
        available = [rows[:, part] > 0 for part in self.layout.available]
        if self.discrete and available[0].shape[1] == 0:
            available = [np.ones((len(rows), size), bool) for size in self.action_sizes]
        return obs, available

    def critic_inputs(self, rows):
        """What critics see in rows, besides actions: the state (N, S), or with FP, (N, n, S').

        With FP these are the agent's observation, filled up with zeros to the widest, beside the state; and nothing but
        zeros once the agent is dead.
        """
        state = rows[:, self.layout.state]
        if self.args.state_type == "EP":
            return state
        inputs = np.zeros((len(rows), self.num_agents, self.state_size), np.float32)
        for i, part in enumerate(self.layout.observations):
            inputs[:, i, : self.obs_sizes[i]] = rows[:, part]
            inputs[:, i, max(self.obs_sizes) :] = state
        return inputs * rows[:, self.layout.alive, None]


def gumbel_softmax(logits, noise, temperature):
    """One-hot draws from softmax(logits) over the last axis, with the gradient of softmax((logits + noise) / T).

    The largest of logits + Gumbel noise is such a draw. Backwards, the draw passes for its soft version: the
    straight-through estimator (arXiv 1611.01144, eqs. 1, 2 and section 2.2).
    """
    soft = ((logits + noise) / temperature).softmax(-1)
    hard = nn.functional.one_hot(soft.argmax(-1), soft.shape[-1]).to(soft.dtype)
    return hard + (soft - soft.detach())  # the value of `hard`, the gradient of `soft`


# ------------------------------------------------------------------------------------------------- replay buffers
# N is the number of environments, n of agents, B of a batch. Environments lie side by side: slot t·N + e is step t of
# environment e. Each has a position of its own in its ring of T steps, as steps that only reset it (the ones after an
# episode's end) are not stored. With n_step = 3 a sample that starts at slot 1 reaches to the end of the episode:
#
#     slot   0  2  4  6    environment 0: its episode ends in slot 2; slot 6 is its newest
#     slot   1  3  5  7    environment 1: its episode ends in slot 5
#     reward of a sample from slot 1: r_1 + gamma r_3 + gamma^2 r_5, its discount gamma^3; from slot 4: r_4 + gamma r_6
#     and gamma^2, for no more has been played; from slot 2: r_2 and gamma.

# B samples, as tensors. There are G streams of rewards: one (EP), or one for each agent (FP). G·B rows are those of the
# first stream, then those of the second one, and so on. What is next has G·B rows too, for each stream's n-step
# window may end in another step, where all agents observe something else.
OffPolicyBatch = namedtuple(
    "OffPolicyBatch",
    "share_obs "  # (G·B, S): what critics see besides actions
    "obs actions available_actions "  # lists over agents: (B, O_i), (B, A_i), (B, A_i)
    "rewards dones "  # (G·B, 1): a window's sum; whether the episode ends with it (no target needs that)
    "valid_transitions "  # (n·B, 1), agent by agent: 0 where the agent was dead
    "terms next_share_obs "  # (G·B, 1): whether the window ends in a termination: then no Q'; (G·B, S)
    "next_obs next_available_actions "  # lists over agents: (G·B, O_i), (G·B, A_i)
    "gammas",  # (G·B, 1): the discount of Q'
)


class OffPolicyBuffer:
    """The last `capacity` steps of N environments, first in, first out, in host memory.

    There are G `streams` of rewards and states. `obs_sizes`, `action_sizes` and `choices` (how many masks of actions
    there are) are lists over agents.
    """

    def __init__(
        self,
        capacity,
        num_envs,
        streams,
        state_size,
        obs_sizes,
        action_sizes,
        choices,
        n_step=1,
        gamma=0.99,
        device="cpu",
    ):
        self.num_envs = num_envs
        self.streams = streams
        self.n_step = n_step
        self.gamma = gamma
        self.device = device
        self.steps = capacity // num_envs
        self.positions = np.zeros(num_envs, np.int64)  # where each environment goes on in its ring
        self.sizes = np.zeros(num_envs, np.int64)  # how many steps of each are stored
        self.share_obs = self.zeros(streams, state_size)
        self.obs = [self.zeros(size) for size in obs_sizes]
        self.actions = [self.zeros(size) for size in action_sizes]
        self.available_actions = [self.zeros(size, dtype=bool) for size in choices]
        self.rewards = self.zeros(streams)
        self.dones = self.zeros(streams, dtype=bool)
        self.valid_transitions = self.zeros(len(obs_sizes))
        self.terms = self.zeros(streams, dtype=bool)
        self.next_share_obs = self.zeros(streams, state_size)
        self.next_obs = [self.zeros(size) for size in obs_sizes]
        self.next_available_actions = [self.zeros(size, dtype=bool) for size in choices]

    def zeros(self, *shape, dtype=np.float32):
        """Room for something in each step of each environment."""
        return np.zeros((self.steps, self.num_envs, *shape), dtype)

    def insert(
        self,
        share_obs,
        obs,
        actions,
        available_actions,
        reward,
        done,
        valid_transitions,
        term,
        next_share_obs,
        next_obs,
        next_available_actions,
    ):
        """Store a step of all environments in which any agent took part (in a row that resets, none does).

        share_obs, reward, done and term are (N, …), or with FP (N, n, …); obs, actions and available_actions are lists
        over agents of (N, …). `done` is 1 where the episode ends (FP: where the agent's does, and from then on), `term`
        where that was no truncation. valid_transitions (N, n) are 0 for an agent that was dead before. What is called
        next is of the same episode, also at its end.
        """
        envs = np.flatnonzero(valid_transitions.any(1))
        t = self.positions[envs]
        shape = self.num_envs, self.streams
        self.share_obs[t, envs] = share_obs.reshape(*shape, -1)[envs]
        self.rewards[t, envs] = reward.reshape(shape)[envs]
        self.dones[t, envs] = done.reshape(shape)[envs]
        self.valid_transitions[t, envs] = valid_transitions[envs]
        self.terms[t, envs] = term.reshape(shape)[envs]
        self.next_share_obs[t, envs] = next_share_obs.reshape(*shape, -1)[envs]
        for i in range(len(obs)):
            self.obs[i][t, envs] = obs[i][envs]
            self.actions[i][t, envs] = actions[i][envs]
            self.available_actions[i][t, envs] = available_actions[i][envs]
            self.next_obs[i][t, envs] = next_obs[i][envs]
            self.next_available_actions[i][t, envs] = next_available_actions[i][envs]
        self.positions[envs] = (t + 1) % self.steps
        self.sizes[envs] = np.minimum(self.sizes[envs] + 1, self.steps)

    def cut(self):
        """Let no window reach beyond the newest steps: all environments are about to begin anew."""
        envs = np.flatnonzero(self.sizes > 0)
        self.dones[self.positions[envs] - 1, envs] = True

    def windows(self, t, e):
        """(rewards, discounts, last steps), each (G, B), of samples that start in step t of environment e, each (B,).

        R = r_0 + gamma r_1 + … + gamma^(k-1) r_(k-1) and gamma^k, after which Q' is asked (arXiv 1710.02298, eq. 2).
        k is n_step, but less where the episode ends, or where no more of it has been played.
        """
        g = np.arange(self.streams)[:, None]
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

    def get(self, slots):
        """The OffPolicyBatch of the samples that start in these slots, on the device."""
        t, e = np.divmod(slots, self.num_envs)
        rewards, discounts, last = self.windows(t, e)
        g = np.repeat(np.arange(self.streams), len(slots))  # (G·B,), like the next three: stream by stream
        first_t = np.tile(t, self.streams)
        last_t = last.ravel()
        of_streams = np.tile(e, self.streams)
        return OffPolicyBatch(
            share_obs=self.tensor(self.share_obs[first_t, of_streams, g]),
            obs=[self.tensor(obs[t, e]) for obs in self.obs],
            actions=[self.tensor(actions[t, e]) for actions in self.actions],
            available_actions=[self.tensor(masks[t, e]) for masks in self.available_actions],
            rewards=self.tensor(rewards.reshape(-1, 1)),
            dones=self.tensor(self.dones[last_t, of_streams, g, None]),
            valid_transitions=self.tensor(self.valid_transitions[t, e].T.reshape(-1, 1)),
            terms=self.tensor(self.terms[last_t, of_streams, g, None]),
            next_share_obs=self.tensor(self.next_share_obs[last_t, of_streams, g]),
            next_obs=[self.tensor(obs[last_t, of_streams]) for obs in self.next_obs],
            next_available_actions=[self.tensor(masks[last_t, of_streams]) for masks in self.next_available_actions],
            gammas=self.tensor(discounts.reshape(-1, 1)),
        )

    def sample(self, batch_size, rng):
        """An OffPolicyBatch drawn uniformly, with replacement. ValueError if nothing is stored."""
        if self.sizes.sum() == 0:
            raise ValueError("cannot sample from an empty buffer")
        ends = self.sizes.cumsum()
        drawn = rng.integers(ends[-1], size=batch_size)
        e = np.searchsorted(ends, drawn, side="right")
        t = drawn - ends[e] + self.sizes[e]
        return self.get(t * self.num_envs + e)

    def tensor(self, array):
        """An array as a tensor on the device."""
        return torch.as_tensor(array, device=self.device)

    def arrays(self):
        """{name: list of the arrays} of all that is stored."""
        names = OffPolicyBatch._fields[:-1]  # gammas are of a sample
        stored = {name: getattr(self, name) for name in names}
        return {name: x if isinstance(x, list) else [x] for name, x in stored.items()}

    def state_dict(self):
        """What is stored, for a checkpoint."""
        filled = self.sizes.max()
        state = {"positions": torch.from_numpy(self.positions), "sizes": torch.from_numpy(self.sizes)}
        for name, arrays in self.arrays().items():
            state[name] = [torch.from_numpy(array[:filled]) for array in arrays]
        return state

    def load_state_dict(self, state):
        """Copy what state_dict returned."""
        self.positions[:] = state["positions"].numpy()
        self.sizes[:] = state["sizes"].numpy()
        for name, arrays in self.arrays().items():
            for array, tensor in zip(arrays, state[name], strict=True):
                array[: len(tensor)] = tensor.numpy()


class OffPolicyBufferEP(OffPolicyBuffer):
    """One state, reward and end for all agents of an environment ("environment-provided" state)."""

    def __init__(self, capacity, num_envs, state_size, obs_sizes, *more, **options):
        super().__init__(capacity, num_envs, 1, state_size, obs_sizes, *more, **options)


class OffPolicyBufferFP(OffPolicyBuffer):
    """A state, reward and end for each agent, and so a window of its own (agent-specific state; "FP" in HARL)."""

    def __init__(self, capacity, num_envs, state_size, obs_sizes, *more, **options):
        super().__init__(capacity, num_envs, len(obs_sizes), state_size, obs_sizes, *more, **options)


def store_step(buffer, agents, rows, reset_rows, actions, result):
    """Put a step of all environments, which returned `result`, into the buffer, but for what only resets one."""
    next_rows, rewards, terminated, truncated, infos = result
    alive = agents.layout.alive
    took_part = (rows[:, alive] == 1) & ~reset_rows[:, None]
    done = terminated | truncated
    if agents.args.state_type == "FP":  # each agent has rewards and an end of its own, (N, n)
        rewards = infos["rewards"]
        done = done[:, None] | (next_rows[:, alive] == 0)
        # An agent that is truncated before the others leaves no last observation: Q' is then asked about zeros.
        terminated = infos["terminated"]
    states = agents.critic_inputs(rows)
    next_states = agents.critic_inputs(next_rows)
    obs, available = agents.views(rows)
    next_obs, next_available = agents.views(next_rows)
    buffer.insert(
        states, obs, actions, available, rewards, done, took_part, terminated, next_states, next_obs, next_available
    )


# --------------------------------------------------------------------------------------------- targets and losses


def smoothed(actions, noise, clip):
    """Target policy smoothing: mu'(s') + clip(epsilon, -c, c), within [-1, 1]   (arXiv 1802.09477, section 5.3)."""
    return (actions + noise.clamp(-clip, clip)).clamp(-1, 1)


def critic_targets(rewards, next_values, terminated, gamma):
    """y (B,) = r + gamma (1 - terminated) min_k Q'_k(s', a'), from target values (K, B)   (arXiv 1802.09477, eq. 10).

    With K = 1 it is DDPG's target (arXiv 1509.02971, algorithm 1).
    """
    return rewards + gamma * next_values.amin(0) * ~terminated


def valid_mean(x, valid):
    """Mean over the rows (R,) whose mask is 1; 0 if there are none."""
    return (x * valid).sum() / valid.sum().clamp(min=1)


def in_turn(own, actions):
    """Joint actions in which one agent at a time acts anew: a list over agents of (n·B, A_i).

    `own` and `actions`, what each would do now and what it did, are lists over agents of (B, A_i). In the first B rows
    the first agent acts anew, in the next B the second; the others do what they did (arXiv 1706.02275, eq. 5).
    """
    joint = []
    for i in range(len(own)):
        turns = [actions[i]] * len(own)
        turns[i] = own[i]
        joint.append(torch.cat(turns))
    return joint


@torch.no_grad()
def polyak(target, source, tau):
    """target <- tau source + (1 - tau) target, for all weights of two networks (arXiv 1509.02971, algorithm 1)."""
    for target_weights, weights in zip(target.parameters(), source.parameters()):
        target_weights.lerp_(weights, tau)


def matd3_targets(agents, batch, args, rng):
    """What the critics learn, y (G·B,): a window's rewards plus gamma^k Q', with the first two of TD3's tricks."""
    with torch.no_grad():
        next_actions, _ = agents.choose(agents.target_actors, batch.next_obs, batch.next_available_actions, rng)
        if args.target_noise > 0 and not agents.discrete:  # TD3, trick 1: target policy smoothing
            for i, actions in enumerate(next_actions):
                noise = args.target_noise * agents.normal(actions.shape, rng)
                next_actions[i] = smoothed(actions, noise, args.noise_clip)
        # TD3, trick 2: clipped double Q. There are two critics (MADDPG: one), and the lower value counts.
        next_values = [agents.values(twin, batch.next_share_obs, next_actions) for twin in agents.target_critics]
        rewards = batch.rewards.squeeze(1)
        terminated = batch.terms.squeeze(1)
        gammas = batch.gammas.squeeze(1)
        return critic_targets(rewards, torch.stack(next_values), terminated, gammas)


def critics_loss(agents, batch, targets):
    """(loss, mean value): the mean squared error of all Q^i, summed over twins   (arXiv 1706.02275, eq. 6)."""
    values = torch.stack([agents.values(twin, batch.share_obs, batch.actions) for twin in agents.critics])
    errors = ((values - targets) ** 2).sum(0)
    valid = torch.ones_like(errors)
    if agents.args.state_type == "FP":  # an agent's critic learns nothing from steps in which the agent was dead
        valid = batch.valid_transitions.squeeze(1)
    return valid_mean(errors, valid), values.detach().mean()


def actors_loss(agents, batch, rng):
    """(loss, mean square of the actors' outputs): the mean of -J(mu^i) over agents   (arXiv 1706.02275, eq. 5)."""
    own, outputs = agents.choose(agents.actors, batch.obs, batch.available_actions, rng)
    states = batch.share_obs
    if agents.args.state_type == "EP":  # the same states in each agent's turn; with FP, each agent has its own
        states = states.repeat(agents.num_agents, 1)
    # In turn i only a^i carries a gradient, so one backward serves all actors. TD3: they follow the first twin only.
    values = agents.values(agents.critics[0], states, in_turn(own, batch.actions))
    squares = torch.cat([(output**2).mean(1) for output in outputs])
    valid = batch.valid_transitions.squeeze(1)  # nobody learns from what happened when it was dead
    return -valid_mean(values, valid), valid_mean(squares, valid)


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


def train(args):
    """Train with `args`; return the final figures, which summary.json holds as well. UserError on bad input."""
    check_args(args)
    check_algorithm(args)
    envs = make_envs(args, args.num_envs)
    agents = make_agent(args, envs)
    buffer = make_off_policy_buffer(args, agents)
    actor_optimizer = Adam(agents.actors.parameters(), lr=args.actor_learning_rate)
    critic_optimizer = Adam(agents.critics.parameters(), lr=args.critic_learning_rate)
    parts = {"buffer": buffer, "actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}
    # explores: its training episodes hold random actions, so evaluations say how good it is
    run = Run(args, agents, envs, log_every=math.ceil(args.total_timesteps / 200), explores=True, **parts)

    while not run.is_finished():
        if run.restarts:  # at the start, and after each checkpoint, which holds no episodes: all begin anew
            envs, rows, rng = run.new_envs()  # the first time: those made above
            reset_rows = np.zeros(args.num_envs, bool)  # whether the next step only resets an environment
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
        store_step(buffer, agents, rows, reset_rows, actions, result)
        rows, rewards, terminated, truncated, _ = result
        run.count(rows, rewards, terminated | truncated, reset_rows)  # advances run.step; not for reset rows
        reset_rows = terminated | truncated

        for _ in range(updates_due(step_before, run.step, args)):
            agents.updates += 1
            batch = buffer.sample(args.batch_size, rng)
            targets = matd3_targets(agents, batch, args, rng)
            critic_loss, value_mean = critics_loss(agents, batch, targets)
            run.check_finite(critic_loss=critic_loss.item())
            critic_optimizer.zero_grad()
            critic_loss.backward()
            if args.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(agents.critics.parameters(), args.max_grad_norm)
            critic_optimizer.step()
            run.log(critic_loss=critic_loss.detach(), value_mean=value_mean)
            if agents.updates % args.policy_frequency == 0:  # TD3, trick 3: delayed updates of actors and all targets
                actor_loss, squares = actors_loss(agents, batch, rng)
                run.check_finite(actor_loss=actor_loss.item())
                loss = actor_loss + args.output_penalty * squares
                actor_optimizer.zero_grad()
                loss.backward(inputs=list(agents.actors.parameters()))  # spares the critics: they are not updated here
                if args.max_grad_norm is not None:
                    nn.utils.clip_grad_norm_(agents.actors.parameters(), args.max_grad_norm)
                actor_optimizer.step()
                polyak(agents.target_actors, agents.actors, args.tau)
                polyak(agents.target_critics, agents.critics, args.tau)
                run.log(actor_loss=actor_loss.detach())
        run.figures["updates"] = [agents.updates]  # the last number counts, not the mean
        run.write_what_is_due()  # a row of metrics.csv, an evaluation, a checkpoint
    return run.finish()


# ===== helpers: settings, Adam, teams of agents, environments =========================================================

COUNTS = "buffer_size batch_size train_frequency gradient_steps policy_frequency n_step".split()
RANGES = dict.fromkeys(COUNTS, (1, 1e15))
RANGES |= {"gamma": (0, 1), "tau": (0, 1), "gumbel_temperature": (1e-3, 1e15)}
RANGES |= {"hidden_sizes": (1, 1e5), "critic_hidden_sizes": (1, 1e5)}
# The columns of metrics.csv that are this script's own, and those of them that the learning curve shows as well.
FIGURES = ["updates", "critic_loss", "value_mean", "actor_loss"]
CURVE = ["critic_loss", "actor_loss"]

# What makes MATD3 of MADDPG: settings of three flags, each of which can also be given by itself.
ALGORITHMS = {
    "matd3": {"target_noise": 0.2, "twin_q": True, "policy_frequency": 2},
    "maddpg": {"target_noise": 0.0, "twin_q": False, "policy_frequency": 1},
}
# Settings that learn, per environment. What the user gives wins. docs/maddpg_matd3.md says which were confirmed.
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
    """UserError if --algorithm is not what the settings say: in Args(algorithm="ddpg"), or beside --config."""
    for name, settings in ALGORITHMS.items():
        given = {key: getattr(args, key) for key in settings}
        if args.algorithm not in (None, name) and given == settings:
            wanted = " ".join(as_flags(ALGORITHMS[args.algorithm]))
            raise UserError(f"algorithm is {args.algorithm}, but the settings are those of {name}: give {wanted}")


def make_agents(args, envs):
    """Untrained Agents for these environments. UserError if a space or the device is none this script handles."""
    action_spaces = envs.single_action_space.spaces
    layout = envs.get_attr("layout")[0]
    kind = spaces.Discrete if isinstance(action_spaces[0], spaces.Discrete) else spaces.Box
    for space in action_spaces:
        fits = isinstance(space, kind) and 0 < spaces.flatdim(space) <= 100_000
        if not fits or (kind is spaces.Box and not space.is_bounded()):
            wanted = "bounded Box actions, or Discrete ones (100,000 at most), of all agents alike"
            raise UserError(f"{args.env_id} has {space}; this script needs {wanted}: use mappo.py")
    sizes = {part.stop - part.start for part in layout.observations}
    if args.share_policy and (len(sizes) > 1 or any(space != action_spaces[0] for space in action_spaces)):
        raise UserError(f"the agents of {args.env_id} differ in observations or actions: add --no-share-policy")
    device = choose_device(args)
    with torch.device("meta"):  # counts the weights without making them
        weights = sum(p.numel() for p in Agents(layout, action_spaces, args, "meta").parameters())
    check_memory("the networks", 10 * weights)  # half of them are targets; the others have gradients and moments
    torch.manual_seed(args.seed)
    return Agents(layout, action_spaces, args, device)


make_agent = make_agents  # as the run section calls it


def make_off_policy_buffer(args, agents):
    """The empty buffer that the arguments ask for. UserError if it is too small, or if there is no memory for it."""
    stored = args.buffer_size // args.num_envs * args.num_envs
    if stored < args.batch_size:
        least = f"batch_size = {args.batch_size} once it is divided among num_envs = {args.num_envs}"
        raise UserError(f"buffer_size = {args.buffer_size} must not be less than {least}")
    choices = agents.action_sizes if agents.discrete else [0] * agents.num_agents
    streams = 1 if args.state_type == "EP" else agents.num_agents
    numbers = 2 * streams * (agents.state_size + 2) + 2 * sum(agents.obs_sizes) + 2 * sum(agents.action_sizes)
    check_memory(f"buffer_size = {args.buffer_size}", min(stored, args.total_timesteps) * 4 * numbers)
    buffer_class = OffPolicyBufferEP if args.state_type == "EP" else OffPolicyBufferFP
    sizes = agents.state_size, agents.obs_sizes, agents.action_sizes, choices
    with blame(f"buffer_size = {args.buffer_size} is too large", MemoryError, ValueError):
        return buffer_class(args.buffer_size, args.num_envs, *sizes, args.n_step, args.gamma, agents.device)


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


# Where things stand in an observation of TeamEnv: slices; of `observations` and `available`, one for each agent.
Layout = namedtuple("Layout", "alive observations state available")


class TeamEnv(gym.Env):
    """A PettingZoo parallel environment as a Gymnasium one, so that Gymnasium's vector environments can run it.

    Its action is a tuple with one entry per agent, its reward the sum of the agents' own, and its observation one row:

        [ 1 in an episode's first row | alive, per agent | observations | state | available actions, 1 or 0 ]

    An agent is alive while it takes part; in the last row of an episode that is not cut by a limit, those are alive who
    took part in its last step. The dead observe zeros. The state is the environment's own, or else all observations
    side by side, which then stand in the row but once. Available actions are in the row only if the environment gives
    masks; an agent with no valid action, such as who waits for its turn, has the first one, a no-op. An episode ends
    with its last agent, and by termination if all who acted last terminated. `info` has each agent's own "rewards" and
    "terminated".
    """

    JOINED = ("mpe2.", "pettingzoo.sisl.multiwalker")  # their state() is all observations as well, or fails at a death

    def __init__(self, env):
        self.env = without_checks(env)
        self.names = list(env.possible_agents)
        self.metadata = getattr(env, "metadata", None) or {}
        self.render_mode = getattr(env, "render_mode", None)
        self.max_steps = getattr(env.unwrapped, "max_cycles", None)  # what PettingZoo's environments call their limit
        _, infos = self.reset_parallel_env(seed=0)
        masked = any("action_mask" in info for info in infos.values())
        self.spaces = []  # of the agents' observations, without their masks
        for name in self.names:
            space = env.observation_space(name)
            if isinstance(space, spaces.Dict) and "action_mask" in space.spaces:  # as turn-based games have it
                masked = True
                space = spaces.Dict({key: entry for key, entry in space.items() if key != "action_mask"})
            if not space.is_np_flattenable or not 0 < spaces.flatdim(space) <= 10_000:
                wanted = "what makes a vector of 1 to 10,000 numbers: use --wrappers"
                raise UserError(f"{env}: {name} observes {space}; this script needs {wanted}")
            self.spaces.append(space)

        own_state_size = self.own_state_size()
        self.has_own_state = own_state_size > 0
        action_spaces = [env.action_space(name) for name in self.names]
        choices = [getattr(space, "n", 0) if masked else 0 for space in action_spaces]
        alive = slice(1, 1 + len(self.names))
        observations = slices([spaces.flatdim(space) for space in self.spaces], alive.stop)
        end = observations[-1].stop
        state = slice(end, end + own_state_size) if self.has_own_state else slice(alive.stop, end)
        self.layout = Layout(alive, observations, state, slices(choices, state.stop))
        self.observation_space = spaces.Box(-np.inf, np.inf, (self.layout.available[-1].stop,))
        self.action_space = spaces.Tuple(action_spaces)

    def own_state_size(self):
        """Numbers in the environment's own state; 0 if it has none, or only the observations once more, or an image."""
        joined = type(self.env.unwrapped).__module__.startswith(self.JOINED)
        if joined or not callable(getattr(self.env.unwrapped, "state", None)):
            return 0
        try:
            state = np.asarray(self.env.state())
        except (AttributeError, NotImplementedError):
            return 0
        return 0 if state.dtype in (np.uint8, object) else state.size

    def reset_parallel_env(self, seed):
        """What reset returns, if somebody takes part and each of them has an observation; else UserError."""
        obs, infos = self.env.reset(seed=seed)
        if not self.env.agents:
            raise UserError(f"{self.env} has no agents when an episode begins")
        for name in self.env.agents:
            if name not in self.names or name not in obs:
                raise UserError(f"{self.env}: agent {name} takes part, but has no observation or is no possible agent")
        return obs, infos

    def reset(self, *, seed=None, options=None):
        """The first row of an episode. Environments differ in what they do without a seed: each episode gets one."""
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(2**31))
        obs, infos = self.reset_parallel_env(seed)
        self.alive = np.array([name in self.env.agents for name in self.names])
        row = self.row(obs, infos)
        row[0] = 1
        return row, self.info({}, {})

    def step(self, actions):
        """All who are alive act; what the others should do is ignored."""
        playing = [name in self.env.agents for name in self.names]
        given = {name: action for name, action, plays in zip(self.names, actions, playing) if plays}
        obs, rewards, terminated, truncated, infos = self.env.step(given)
        ended = {name for name in self.names if terminated.get(name) or truncated.get(name)}
        goes_on = [name in self.env.agents and name not in ended for name in self.names]
        over = not any(goes_on)
        self.alive = np.array(playing if over else goes_on)
        all_terminated = over and all(terminated.get(name, True) for name in given)
        info = self.info(rewards, terminated)
        reward = float(info["rewards"].sum())
        return self.row(obs, infos), reward, all_terminated, over and not all_terminated, info

    def row(self, obs, infos):
        """The observation of the team, from the dicts of PettingZoo."""
        row = np.zeros(self.observation_space.shape, np.float32)
        row[self.layout.alive] = self.alive
        for i, name in enumerate(self.names):
            available = self.layout.available[i]
            row[available] = 1
            if not self.alive[i]:
                continue
            if name not in obs:
                raise UserError(f"{self.env}: agent {name} has no observation in a step that it took part in")
            observation = obs[name]
            mask = infos.get(name, {}).get("action_mask")
            if isinstance(observation, dict) and "action_mask" in observation:
                mask = observation["action_mask"]
            row[self.layout.observations[i]] = spaces.flatten(self.spaces[i], observation)
            if mask is None:
                continue
            if len(mask) != available.stop - available.start:
                raise UserError(f"{name} has {len(mask)} action masks: give one per Discrete action, from the start")
            row[available] = mask if np.any(mask) else np.arange(len(mask)) == 0
        if self.has_own_state:
            state = np.ravel(self.env.state())
            if state.shape != row[self.layout.state].shape:
                raise UserError(f"{self.env}: the state has {state.size} numbers now; before it had others")
            row[self.layout.state] = state
        return row

    def info(self, rewards, terminated):
        """What a vector environment has no place for, as arrays over agents."""
        rewards = np.array([rewards.get(name, 0) for name in self.names], np.float32)
        return {"rewards": rewards, "terminated": np.array([bool(terminated.get(name)) for name in self.names])}

    def render(self):
        """As the environment's."""
        return self.env.render()

    def close(self):
        """As the environment's."""
        self.env.close()


def slices(sizes, begin):
    """Slices of the given sizes, one after the other, from `begin` on."""
    parts = []
    for size in sizes:
        parts.append(slice(begin, begin + size))
        begin += size
    return parts


def without_checks(env):
    """The same environment without PettingZoo's checks of order and bounds: they take a third of mpe2's time."""
    from pettingzoo.utils.wrappers import AssertOutOfBoundsWrapper, OrderEnforcingWrapper

    while isinstance(getattr(env, "aec_env", None), (AssertOutOfBoundsWrapper, OrderEnforcingWrapper)):
        env.aec_env = env.aec_env.env
    return env


class TeamProcesses(gym.vector.AsyncVectorEnv):
    """Environments in processes of their own, which end without a word: what happens, the first process says."""

    def __init__(self, makers):
        if threading.current_thread() is threading.main_thread():  # no other can handle signals
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # a kill is as good as Ctrl-C
        super().__init__([partial(make_quiet_env, make, os.getpid()) for make in makers])

    def close_extras(self, **kwargs):
        """End the processes, whatever they are doing."""
        for process in self.processes:
            process.kill()
            process.join()


def make_quiet_env(make, first_process):
    """make(); if this is another process than the first, it leaves Ctrl-C and complaints to that one."""
    if os.getpid() != first_process:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.stderr = open(os.devnull, "w")
    return make()


@contextmanager
def suggest_package(env_id):
    """Turn the lack of a package into a UserError that says how to install it, unless the id may just be misspelt."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "of that name").partition(".")[0]
        if package == env_id.partition(".")[0] and package not in ("mpe2", "pettingzoo"):
            raise UserError(
                f"cannot make {env_id}: {error} (an id is a module such as mpe2.simple_spread_v3)"
            ) from None
        raise UserError(f"{env_id} needs another package: pip install {package} ({error})") from None


def find_parallel_env(env_id):
    """What makes a parallel environment: the parallel_env of the module that a dotted path names, or else a callable.

    UserError, saying what may have been meant, if there is none.
    """
    package, _, name = env_id.rpartition(".")
    with suggest_package(env_id):
        try:
            found = pkgutil.resolve_name(env_id)
            reason = "it has no parallel_env"
        except ModuleNotFoundError:
            raise
        except (ImportError, AttributeError, ValueError) as error:
            found = None
            reason = str(error)
    parallel_env = getattr(found, "parallel_env", found)
    if callable(parallel_env):
        return parallel_env
    if hasattr(found, "env"):
        convert = "docs/mappo.md shows how turn_based_aec_to_parallel makes one of it"
        raise UserError(f"cannot make {env_id}: it is turn-based and has no parallel_env; {convert}")
    siblings = pkgutil.iter_modules(getattr(sys.modules.get(package), "__path__", []))
    environments = [module.name for module in siblings if re.search(r"_v\d+$", module.name)]
    near = difflib.get_close_matches(name, environments, 1)
    hint = f"did you mean {package}.{near[0]}?" if near else "an id is a module such as mpe2.simple_spread_v3"
    raise UserError(f"cannot make {env_id}: {reason} ({hint})")


def make_team_envs(args, num_envs, render_mode=None, team_wrappers=()):
    """A vector environment of TeamEnvs, with next-step autoreset. UserError, saying what to do, if it cannot be made.

    args.wrappers are wrappers of PettingZoo's parallel environments, team_wrappers of TeamEnv.
    """
    parallel_env = find_parallel_env(args.env_id)
    with blame(f"--env-kwargs {args.env_kwargs}: a JSON object is wanted", ValueError, TypeError, RecursionError):
        kwargs = dict(**json.loads(args.env_kwargs))
    if render_mode:
        kwargs["render_mode"] = render_mode
    wrappers = [find_wrapper(path) for path in args.wrappers]
    what = f"cannot make {args.env_id}"
    expected = [ImportError, TypeError]
    if args.wrappers or args.env_kwargs != "{}":  # whatever goes wrong may be due to them
        what += f" with env_kwargs {args.env_kwargs} and wrappers {' '.join(args.wrappers) or 'none'}"
        expected = [Exception]
    if render_mode:
        what += f" with render_mode {render_mode}"

    def make_env():
        with blame(what, *expected), suggest_package(args.env_id):
            env = parallel_env(**kwargs)
            for wrapper in wrappers:
                env = wrapper(env)
        if not hasattr(env, "possible_agents") or hasattr(env, "agent_iter"):  # the latter is turn-based
            raise UserError(f"{args.env_id} makes {env!r:.100}, which is no PettingZoo parallel environment")
        env = TeamEnv(env)
        for wrapper in team_wrappers:
            env = wrapper(env)
        if args.max_episode_return is not None:
            env = ReturnLimit(env, args.max_episode_return)
        if args.max_episode_steps is not None:
            env = gym.wrappers.TimeLimit(env, args.max_episode_steps)
        return env

    in_processes = args.async_envs and num_envs == args.num_envs and not render_mode  # for training, not evaluations
    envs = (TeamProcesses if in_processes else gym.vector.SyncVectorEnv)([make_env] * num_envs)
    if render_mode and render_mode not in envs.metadata.get("render_modes", ()):
        raise UserError(f"{args.env_id} has no render mode {render_mode}")
    own_limit = kwargs.get("max_cycles") or envs.get_attr("max_steps")[0]
    envs.spec = SimpleNamespace(max_episode_steps=args.max_episode_steps or own_limit)
    return envs


TRUSTED_TEAMS = r"(mpe2|pettingzoo\.(butterfly|classic|sisl))\.\w+_v\d+"
TEAM_WRAPPERS = "pettingzoo.utils.wrappers."


def untrusted_team(args, given):
    """The flag without which a file may not ask for `args`, or ""; `given` are those of the command line.

    Trusted are the environments of PettingZoo's packages, wrappers that PettingZoo's wrapper modules define, and
    arguments without paths: all else may execute what a stranger has written.
    """
    if args.env_id != given.env_id and not re.fullmatch(TRUSTED_TEAMS, args.env_id):
        return f"--env-id {args.env_id}"
    if args.wrappers != given.wrappers:
        for path in args.wrappers:
            wrapper = find_wrapper(path) if path.startswith(TEAM_WRAPPERS) else None
            if not isinstance(wrapper, type) or not f"{wrapper.__module__}.".startswith(TEAM_WRAPPERS):
                return f"--wrappers {' '.join(args.wrappers)}"
    words = re.findall(r'"([^"]*)"', args.env_kwargs)
    plain = "\\" not in args.env_kwargs and all(re.fullmatch(r"[\w -]*", word) for word in words)
    if args.env_kwargs != given.env_kwargs and not plain:
        return f"--env-kwargs '{args.env_kwargs}'"
    return ""


untrusted = untrusted_team  # as the run section calls it


make_envs = make_team_envs  # as the run section calls it


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
