# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2",
#   "tyro==1.0.17", "tqdm==4.70.1", "moviepy==2.2.1", "mpe2==1.1.1",
# ]
# ///
"""Multi-agent PPO (MAPPO) and its sequential sibling HAPPO, all of it, in this one file.

Several agents share one reward. Each acts on what it alone observes (o^i); while learning, one critic V sees the state
s of all. So every agent does PPO with an advantage A of what the whole team gets (one for all; with FP each agent's own
estimate), r^i being its own ratio of new to old policy, and a bonus for entropy (arXiv 2103.01955, appendix A):

    L(theta) = E[ 1/n sum_i min( r^i A, clip(r^i, 1 - eps, 1 + eps) A ) ],   r^i = pi(a^i|o^i) / pi_old(a^i|o^i)

HAPPO updates separate policies one after the other, in random order. Each learns from A times the ratios of those that
have moved already, A prod_j r^j: so it answers to what its teammates do now, not to what they did (2109.11251).

    python mappo.py                                                          # three agents spread over three landmarks
    python mappo.py --env-id mpe2.simple_speaker_listener_v4 --happo --no-share-policy
    python mappo.py --evaluate runs/DIR --render                             # play what a run has left behind

Papers: MAPPO arXiv 2103.01955, HAPPO arXiv 2109.11251 and 2304.09870, PPO arXiv 1707.06347, GAE arXiv 1506.02438.
The story ends at "# ===== helpers"; the code below it makes environments, keeps the run folder and draws the curve.
"""

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
    env_id: str = "mpe2.simple_spread_v3"  # module with a PettingZoo parallel_env, or dotted path of such a function
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers of parallel environments, applied in order
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    async_envs: bool = False  # play each environment in a process of its own
    total_timesteps: int = 1_000_000  # environment steps to train for (resets do not count); in each, all agents act
    stop_at_return: float | None = None  # stop once the mean of the last 100 training episodes reaches this
    seed: int = 1  # seed of everything that is drawn at random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps; auto: the CPU
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, on separate environments, with deterministic actions
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
    share_policy: bool = True  # one policy for all agents, or one for each
    happo: bool = False  # update one policy after the other, knowing how earlier ones moved; needs --no-share-policy
    state_type: Literal["EP", "FP"] = "EP"  # the critic's input: EP, one state for all; FP, a state for each agent
    action_factor: int = 0  # split Discrete(n) actions, n a larger multiple of this, in two: action % this and the rest
    recurrent: bool = False  # a GRU in actors and critic
    data_chunk_length: int = 25  # recurrent: steps through which gradients flow back; 0: the whole rollout
    learning_rate: float = 7e-4  # Adam's learning rate, for actors and critic
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    num_envs: int = 32  # environments played side by side
    num_steps: int = 25  # steps of each environment per rollout
    num_minibatches: int = 1  # parts of a rollout, one gradient step each
    update_epochs: int = 10  # passes over a rollout
    gamma: float = 0.99  # discount
    gae: bool = True  # estimate advantages by GAE; without it, by discounted returns
    gae_lambda: float = 0.95  # GAE: 0 trusts the critic, 1 the rewards
    clip_coef: float = 0.2  # eps of the clipped objective
    value_norm: bool = True  # the critic predicts returns normalised by their moving mean and deviation
    clip_vloss: bool = True  # clip the value loss as well
    clip_vloss_coef: float = 0.2  # values may move this far unclipped; in normalised units with value_norm
    huber_delta: float = 10.0  # errors of the critic beyond this count linearly
    ent_coef: float = 0.01  # weight of the entropy bonus
    max_grad_norm: float = 10.0  # gradients longer than this are scaled down to it
    hidden_sizes: tuple[int, ...] = (64, 64)  # sizes of the actors' hidden layers
    critic_hidden_sizes: tuple[int, ...] | None = None  # sizes of the critic's; None: as the actors'


# ------------------------------------------------------------------------------------------------------- networks
# layer, mlp, categorical and gaussian are those of ppo.py and stand below the story.


class TeamNetwork(nn.Module):
    """An MLP; a recurrent one has a GRU before its last layer, with states (N, 1, H). Without one, H = 0."""

    def __init__(self, inputs, hidden_sizes, outputs, recurrent, gain, device="cpu"):
        super().__init__()
        self.recurrent = recurrent
        self.hidden_size = hidden_sizes[-1] if recurrent else 0
        self.device = device
        if recurrent:
            size = self.hidden_size
            self.body = nn.Sequential(mlp(inputs, hidden_sizes[:-1], size, gain=2**0.5), nn.Tanh())
            self.gru = gru_cell(size, size)
            self.head = layer(nn.Linear(size, outputs), gain)
        else:
            self.mlp = mlp(inputs, hidden_sizes, outputs, gain)
        self.to(device)

    def forward(self, x, rnn_states, masks):
        """(outputs (L·N, outputs), rnn_states (N, 1, H) after the last step) of L steps of N streams, as tensors.

        Inputs (L·N, inputs) are time-major; rnn_states are those before the first step. A step whose mask (L·N, 1) is 0
        is the last of its episode: the next one begins with a state of zeros.
        """
        if not self.recurrent:
            return self.mlp(x), rnn_states
        x = self.body(x)
        h = rnn_states.squeeze(1)
        N = len(h)
        hidden = []
        for x_t, mask_t in zip(x.split(N), masks.split(N)):
            h = self.gru(x_t, h)
            hidden.append(h)
            h = h * mask_t
        return self.head(torch.cat(hidden)), h.unsqueeze(1)

    @torch.no_grad()
    def step(self, x, rnn_states, masks):
        """The same for a single step (L = 1), from NumPy arrays to NumPy arrays: acting calls this."""
        x = torch.as_tensor(x, device=self.device)
        if not self.recurrent:
            return forward_in_numpy(self.mlp, x), rnn_states
        rnn_states = torch.as_tensor(rnn_states, device=self.device)
        masks = torch.as_tensor(masks, device=self.device)
        outputs, rnn_states = self(x, rnn_states, masks)
        return outputs.cpu().numpy(), rnn_states.cpu().numpy()


class AgentPolicy(nn.Module):
    """A policy: from what an agent observes to a distribution over its actions.

    A Box action is Gaussian. Discrete and MultiDiscrete actions consist of one or several categorical factors.
    Everywhere but in the environment, actions are (B, D): a column for each factor or dimension.
    """

    def __init__(self, inputs, action_space, args, device="cpu"):
        super().__init__()
        self.device = device
        self.action_space = action_space
        self.continuous = isinstance(action_space, spaces.Box)
        self.output_sizes = output_sizes(action_space)  # categories of each factor; of a Box only its dimensions
        outputs = sum(self.output_sizes)
        # The small gain makes the first policy nearly uniform, or the first means nearly 0.
        self.network = TeamNetwork(inputs, args.hidden_sizes, outputs, args.recurrent, 0.01, device)
        if self.continuous:
            self.log_std = nn.Parameter(torch.zeros(outputs, device=device))

    def mask_unavailable(self, output, available_actions):
        """Logits, -1e9 where an action is not available; the output as it is if choices are never restricted."""
        if available_actions.shape[1] == 0:
            return output
        return output.masked_fill(available_actions == 0, -1e9)

    def distribution(self, output, actions):
        """(log-probs, entropies), each (B, 1), of actions (B, D), from logits or means."""
        if self.continuous:
            log_probs, entropies = gaussian(output, actions, self.log_std)
        else:
            log_probs, entropies = categorical(output, actions, self.output_sizes)
        return log_probs.unsqueeze(1), entropies.unsqueeze(1)

    def forward(self, obs, rnn_states, masks, available_actions, actions):
        """(log-probs, entropies), each (L·N, 1), of L steps, as tensors; inputs as those of TeamNetwork."""
        output, _ = self.network(obs, rnn_states, masks)
        return self.distribution(self.mask_unavailable(output, available_actions), actions)

    def policy_output(self, obs, rnn_states, masks, available_actions):
        """(masked logits or means (N, …), a tensor; the next rnn_states) for NumPy arrays (N, …)."""
        output, rnn_states = self.network.step(obs, rnn_states, masks)
        output = torch.as_tensor(output, device=self.device)
        return self.mask_unavailable(output, torch.as_tensor(available_actions, device=self.device)), rnn_states

    @torch.no_grad()
    def sample(self, obs, rnn_states, masks, available_actions, rng):
        """(actions (N, D), their log-probs (N, 1), the next rnn_states), drawn with the NumPy generator `rng`."""
        output, rnn_states = self.policy_output(obs, rnn_states, masks, available_actions)
        logits_or_means = output.cpu().numpy()
        if self.continuous:
            noise = rng.standard_normal(logits_or_means.shape, np.float32)
            actions = logits_or_means + self.log_std.exp().cpu().numpy() * noise
        else:
            # The Gumbel-max trick: the argmax of logits + Gumbel noise is a draw from their softmax.
            noise = rng.gumbel(size=logits_or_means.shape)
            actions = argmax_of_factors(logits_or_means + noise, self.output_sizes)
        log_probs, _ = self.distribution(output, torch.as_tensor(actions, device=self.device))
        return actions, log_probs.cpu().numpy(), rnn_states

    def mode(self, obs, rnn_states, masks, available_actions):
        """(the likeliest actions (N, D), the next rnn_states)."""
        output, rnn_states = self.policy_output(obs, rnn_states, masks, available_actions)
        output = output.cpu().numpy()
        actions = output if self.continuous else argmax_of_factors(output, self.output_sizes)
        return actions, rnn_states


class Team(nn.Module):
    """The policies of all agents, the critic that they have in common, and the normaliser of its targets.

    There is one policy, which all agents follow, or one for each: `followers` says who follows which. Environments
    return team_rows [ 1 in an episode's first row | alive, per agent | observations | state | available actions ], of
    which `layout` has the slices (see TeamEnv).
    """

    def __init__(self, layout, action_spaces, args, device="cpu"):
        super().__init__()
        self.layout = layout
        self.args = args
        self.device = device
        self.num_agents = len(action_spaces)
        self.followers = [range(self.num_agents)] if args.share_policy else [[i] for i in range(self.num_agents)]
        obs_sizes = [part.stop - part.start for part in layout.observations]
        self.widest = max(obs_sizes)
        self.actors = nn.ModuleList()
        for first, *_ in self.followers:
            self.actors.append(AgentPolicy(obs_sizes[first], action_spaces[first], args, device))
        self.state_size = layout.state.stop - layout.state.start
        if args.state_type == "FP":
            self.state_size += self.widest
        critic_sizes = args.hidden_sizes if args.critic_hidden_sizes is None else args.critic_hidden_sizes
        self.critic = TeamNetwork(self.state_size, critic_sizes, 1, args.recurrent, 1.0, device)
        self.value_norm = ValueNorm() if args.value_norm else None  # on the CPU: some devices lack float64
        self.begin_episodes(1)

    def actor(self, i):
        """The policy that agent i follows."""
        return self.actors[i] if len(self.actors) > 1 else self.actors[0]

    def share_obs(self, parts):
        """What the critic sees: the state (N, S), or with FP a state for each agent, (N, n, S); parts: see split_rows.

        The state is the environment's own, or else all observations side by side. FP has the agent's observation beside
        it, or zeros once it is dead (arXiv 2103.01955 calls this AS, its FP being pruned, and gives the dead their ID).
        """
        if self.args.state_type == "EP":
            return parts.state
        share_obs = np.zeros((len(parts.state), self.num_agents, self.state_size), np.float32)
        for i, obs in enumerate(parts.obs):
            share_obs[:, i, : obs.shape[1]] = obs * parts.alive[i]
            share_obs[:, i, self.widest :] = parts.state * parts.alive[i]
        return share_obs

    def sample(self, buffers, t, rng):
        """What all agents do in row t of their buffers: tuples of their actions, log-probs and next rnn_states."""
        samples = []
        for i, buffer in enumerate(buffers):
            inputs = buffer.obs[t], buffer.rnn_states[t], buffer.masks[t], buffer.available_actions[t]
            samples.append(self.actor(i).sample(*inputs, rng))
        return tuple(zip(*samples))

    def values(self, buffer, t):
        """(values (…, 1) as the critic gives them, the next rnn_states_critic) of row t of the critic's buffer."""
        share_obs = buffer.share_obs[t]
        states = buffer.rnn_states_critic[t]
        streams = share_obs.shape[:-1]  # N, or with FP N, n
        count = math.prod(streams)
        flat_states = states.reshape(count, 1, states.shape[-1])
        inputs = share_obs.reshape(count, -1), flat_states, buffer.masks[t].reshape(count, 1)
        values, next_states = self.critic.step(*inputs)
        return values.reshape(*streams, 1), next_states.reshape(states.shape)

    def to_env(self, actions):
        """The tuple of all agents' actions that the environment takes."""
        return tuple(to_space(self.actor(i).action_space, actions[i]) for i in range(self.num_agents))

    def begin_episodes(self, num_envs):
        """Forget all that was seen: what `act` is shown next begins num_envs episodes."""
        hidden_size = self.actors[0].network.hidden_size
        self.memory = np.zeros((self.num_agents, num_envs, 1, hidden_size), np.float32)

    def act(self, team_rows):
        """What the deterministic policies do, as the environment takes it: evaluations call this.

        Recurrent policies remember from call to call, and forget where a row begins an episode.
        """
        if self.memory.shape[1] != len(team_rows):
            self.begin_episodes(len(team_rows))
        self.memory[:, team_rows[:, 0] == 1] = 0
        masks = np.ones((len(team_rows), 1), np.float32)
        parts = split_rows(self.layout, team_rows)
        actions = []
        for i in range(self.num_agents):
            inputs = parts.obs[i], self.memory[i], masks, parts.available_actions[i]
            action, self.memory[i] = self.actor(i).mode(*inputs)
            actions.append(action)
        return self.to_env(actions)


# -------------------------------------------------------------------------------------------- returns and buffers
# Rollouts are time-major. An array of what is there before a step has T + 1 rows, of what a step brings T. N is the
# number of environments, n of agents.
#
# After an episode's end the next row only resets its environment (next-step autoreset), and what is done in it is
# ignored. It holds the final observation, so the true successor of step t is always what stands in row t + 1:
#
#     row  observation   reward  masks  bad_masks  active_masks
#      0   s0            r0      1      1          1
#      1   s1            r1      1      1          1
#      2   s2, final     0       0      0          0              an episode of two steps was truncated in s2
#      3   s0, the next  r0      1      1          1
#
# masks 0: an episode ended in this row, and no return reaches back across it. A recurrent network sees it all the same
#   and forgets after it (in other codes, whose row 2 is the next s0, before it).
# bad_masks 0: it ended by truncation, so the value of this row counts. 1 elsewhere, at a termination too.
# active_masks 0: the row counts in no loss. In an actor's buffer a dead agent's rows do not count either.

ACTOR_FIELDS = "obs rnn_states actions masks active_masks available_actions log_probs factor advantages"
ActorBatch = namedtuple("ActorBatch", ACTOR_FIELDS)
CriticBatch = namedtuple("CriticBatch", "share_obs rnn_states_critic masks active_masks value_preds returns")


def feed_forward_batches(fields, num_mini_batch, rng):
    """Yield dicts of the fields' rows (B, …), which together hold all of (T, streams, …) once, in random order."""
    flat = {name: x.flatten(0, 1) for name, x in fields.items()}
    order = torch.as_tensor(rng.permutation(len(flat["masks"])), device=flat["masks"].device)
    for rows in order.tensor_split(num_mini_batch):
        yield {name: x[rows] for name, x in flat.items()}


def recurrent_batches(fields, num_mini_batch, length, rng):
    """Yield dicts of the fields' rows (L·C, …), time-major, in C random chunks of L = `length` steps.

    Fields are (T, S, …) of S streams: the T steps of each are cut into chunks, numbered stream by stream. Length T
    takes streams whole. Of the fields called rnn_states… a batch has the first step of each chunk alone, (C, …).
    """
    T = len(fields["masks"])
    if T % length != 0:
        raise ValueError(f"chunks of {length} steps do not divide a rollout of {T}")
    chunks = {}  # (S·T / L, L, …)
    for name, x in fields.items():
        chunks[name] = x.swapaxes(0, 1).unflatten(1, (T // length, length)).flatten(0, 1)
    order = torch.as_tensor(rng.permutation(len(chunks["masks"])), device=chunks["masks"].device)
    for numbers in order.tensor_split(num_mini_batch):
        rows = {}
        for name, x in chunks.items():
            steps = x[numbers].swapaxes(0, 1)  # (L, C, …)
            rows[name] = steps[0] if name.startswith("rnn_states") else steps.flatten(0, 1)
        yield rows


class OnPolicyActorBuffer:
    """What one agent saw and did in a rollout: obs (T + 1, N, …), actions (T, N, D) and so on; see the table above.

    `available_actions` (T + 1, N, choices) has no choices if all are always available; recurrent states are
    (T + 1, N, 1, H), with H = 0 for a policy without. `factor` (T, N, 1): HAPPO's prod_j r^j.
    """

    def __init__(self, num_steps, num_envs, obs_size, action_space, num_choices=0, hidden_size=0, device="cpu"):
        T, N = num_steps, num_envs
        D = math.prod(action_space.shape)  # 1 for Discrete, whose shape is ()
        action_dtype = np.float32 if isinstance(action_space, spaces.Box) else np.int64
        self.obs = np.zeros((T + 1, N, obs_size), np.float32)
        self.rnn_states = np.zeros((T + 1, N, 1, hidden_size), np.float32)
        self.available_actions = np.ones((T + 1, N, num_choices), np.float32)
        self.masks = np.ones((T + 1, N, 1), np.float32)
        self.active_masks = np.ones((T + 1, N, 1), np.float32)
        self.actions = np.zeros((T, N, D), action_dtype)
        self.action_log_probs = np.zeros((T, N, 1), np.float32)
        self.factor = np.ones((T, N, 1), np.float32)
        self.num_steps = num_steps
        self.device = device
        self.step = 0

    def insert(self, obs, rnn_states, actions, action_log_probs, masks, active_masks=None, available_actions=None):
        """Append a step, each argument (N, …): what was done in this row, and all else as it is in the next."""
        t = self.step  # it counts as the t of train does
        self.actions[t] = actions
        self.action_log_probs[t] = action_log_probs
        self.obs[t + 1] = obs
        self.rnn_states[t + 1] = rnn_states
        self.masks[t + 1] = masks
        self.active_masks[t + 1] = masks if active_masks is None else active_masks
        if available_actions is not None:
            self.available_actions[t + 1] = available_actions
        self.step = (t + 1) % self.num_steps

    def after_update(self):
        """Begin the next rollout where this one ended."""
        for x in (self.obs, self.rnn_states, self.masks, self.active_masks, self.available_actions):
            x[0] = x[-1]
        self.factor[:] = 1

    def fields(self, advantages):
        """What batches consist of, as tensors (T, N, …); advantages are (T, N, 1)."""
        fields = {
            "obs": self.obs[:-1],
            "rnn_states": self.rnn_states[:-1],
            "actions": self.actions,
            "masks": self.masks[:-1],
            "active_masks": self.active_masks[:-1],
            "available_actions": self.available_actions[:-1],
            "log_probs": self.action_log_probs,
            "factor": self.factor,
            "advantages": advantages,
        }
        return {name: torch.as_tensor(x, device=self.device) for name, x in fields.items()}

    def feed_forward_generator_actor(self, advantages, num_mini_batch, rng):
        """Yield ActorBatches of single rows (B, …) in random order."""
        for rows in feed_forward_batches(self.fields(advantages), num_mini_batch, rng):
            yield ActorBatch(**rows)

    def naive_recurrent_generator_actor(self, advantages, num_mini_batch, rng):
        """Yield ActorBatches of whole rollouts (T·C, …) of environments in random order: HARL's name for L = T."""
        return self.recurrent_generator_actor(advantages, num_mini_batch, self.num_steps, rng)

    def recurrent_generator_actor(self, advantages, num_mini_batch, data_chunk_length, rng):
        """Yield ActorBatches of chunks of `data_chunk_length` steps (L·C, …) in random order."""
        for rows in recurrent_batches(self.fields(advantages), num_mini_batch, data_chunk_length, rng):
            yield ActorBatch(**rows)


class CriticBuffer:
    """What the critic saw in a rollout: share_obs (T + 1, *streams, S) and so on, with a value and return per stream.

    The values are those the critic gave: normalised, if it predicts normalised returns. `gae_lambda` None: no GAE.
    """

    def __init__(self, num_steps, streams, state_size, hidden_size=0, device="cpu", gamma=0.99, gae_lambda=0.95):
        T = num_steps
        self.share_obs = np.zeros((T + 1, *streams, state_size), np.float32)
        self.rnn_states_critic = np.zeros((T + 1, *streams, 1, hidden_size), np.float32)
        self.masks = np.ones((T + 1, *streams, 1), np.float32)
        self.bad_masks = np.ones((T + 1, *streams, 1), np.float32)
        self.active_masks = np.ones((T + 1, *streams, 1), np.float32)
        self.value_preds = np.zeros((T + 1, *streams, 1), np.float32)
        self.rewards = np.zeros((T, *streams, 1), np.float32)
        self.advantages = np.zeros((T, *streams, 1), np.float32)
        self.returns = np.zeros((T, *streams, 1), np.float32)
        self.num_steps = num_steps
        self.device = device
        self.gamma = gamma
        self.gae_lambda = gae_lambda
        self.step = 0

    def insert(self, share_obs, rnn_states_critic, value_preds, rewards, masks, bad_masks, active_masks=None):
        """Append a step, each argument (*streams, …): value and reward of this row, all else as it is in the next."""
        t = self.step
        self.value_preds[t] = value_preds
        self.rewards[t] = rewards
        self.share_obs[t + 1] = share_obs
        self.rnn_states_critic[t + 1] = rnn_states_critic
        self.masks[t + 1] = masks
        self.bad_masks[t + 1] = bad_masks
        self.active_masks[t + 1] = masks if active_masks is None else active_masks
        self.step = (t + 1) % self.num_steps

    def after_update(self):
        """Begin the next rollout where this one ended."""
        for x in (self.share_obs, self.rnn_states_critic, self.masks, self.bad_masks, self.active_masks):
            x[0] = x[-1]

    def compute_returns(self, next_value, value_normalizer=None):
        """Set advantages (GAE, as a recursion) and returns, in the units of rewards; `next_value` is V of the last row.

        A_t = delta_t + gamma lambda A_{t+1},   delta_t = r_t + gamma V(s_{t+1}) - V(s_t)   (arXiv 1506.02438, eq. 16)
        where A_{t+1} counts if the episode goes on, and V(s_{t+1}) unless it has terminated. Without GAE lambda is 1.
        """
        self.value_preds[-1] = next_value
        values = self.value_preds
        if value_normalizer is not None:
            values = value_normalizer.denormalize(values)
        gae_lambda = 1.0 if self.gae_lambda is None else self.gae_lambda
        goes_on = self.masks[1:]
        was_cut_off = 1 - self.bad_masks[1:]
        has_future = np.maximum(goes_on, was_cut_off)
        advantage = 0.0
        for t in reversed(range(self.num_steps)):
            delta = self.rewards[t] + self.gamma * has_future[t] * values[t + 1] - values[t]
            advantage = delta + self.gamma * gae_lambda * goes_on[t] * advantage
            self.advantages[t] = advantage
        self.returns = self.advantages + values[:-1]

    def explained_variance(self):
        """1 - Var(R - V) / Var(R): 1 if the critic foresaw all returns R, 0 if it was no better than a constant."""
        active = self.active_masks[:-1] > 0
        if not active.any():
            return 0.0
        errors = self.advantages[active]  # R - V
        return 1 - errors.var() / (self.returns[active].var() + 1e-8)

    def fields(self):
        """What batches consist of, as tensors (T, *streams, …)."""
        fields = {
            "share_obs": self.share_obs[:-1],
            "rnn_states_critic": self.rnn_states_critic[:-1],
            "masks": self.masks[:-1],
            "active_masks": self.active_masks[:-1],
            "value_preds": self.value_preds[:-1],
            "returns": self.returns,
        }
        return {name: torch.as_tensor(x, device=self.device) for name, x in fields.items()}

    def feed_forward_generator_critic(self, num_mini_batch, rng):
        """Yield CriticBatches of single rows (B, …) in random order."""
        for rows in feed_forward_batches(self.fields(), num_mini_batch, rng):
            yield CriticBatch(**rows)

    def naive_recurrent_generator_critic(self, num_mini_batch, rng):
        """Yield CriticBatches of whole rollouts (T·C, …) of streams in random order: HARL's name for L = T."""
        return self.recurrent_generator_critic(num_mini_batch, self.num_steps, rng)

    def recurrent_generator_critic(self, num_mini_batch, data_chunk_length, rng):
        """Yield CriticBatches of chunks of `data_chunk_length` steps (L·C, …) in random order."""
        for rows in recurrent_batches(self.fields(), num_mini_batch, data_chunk_length, rng):
            yield CriticBatch(**rows)


class OnPolicyCriticBufferEP(CriticBuffer):
    """One state, value and return for each environment: arrays (T + 1, N, …)."""

    def __init__(self, num_steps, num_envs, state_size, *more, **options):
        super().__init__(num_steps, (num_envs,), state_size, *more, **options)

    def advantages_of(self, agent):
        """The advantages (T, N, 1) that an agent learns from: all have the same."""
        return self.advantages


class OnPolicyCriticBufferFP(CriticBuffer):
    """A state, value and return for each agent: arrays (T + 1, N, n, …).

    Each value foretells what the whole team gets, also after the agent's death. A dead agent's state is all zeros, so
    (but for a GRU's memory) all dead share one value, V(0): it learns what the team gets on average after a death.
    """

    def __init__(self, num_steps, num_envs, num_agents, state_size, *more, **options):
        super().__init__(num_steps, (num_envs, num_agents), state_size, *more, **options)

    def insert(self, share_obs, rnn_states_critic, value_preds, rewards, masks, bad_masks, active_masks=None):
        """Append a step; rewards, masks and bad_masks that the agents have in common may also be (N, 1)."""
        for_each = lambda x: x[:, None] if np.ndim(x) == 2 else x  # (N, 1) -> (N, 1, 1)
        masks, bad_masks = for_each(masks), for_each(bad_masks)
        super().insert(share_obs, rnn_states_critic, value_preds, for_each(rewards), masks, bad_masks, active_masks)

    def fields(self):
        """The same, whose streams are the agents of all environments: (T, N·n, …)."""
        return {name: x.flatten(1, 2) for name, x in super().fields().items()}

    def advantages_of(self, agent):
        """The advantages (T, N, 1) that an agent learns from: its own."""
        return self.advantages[:, :, agent]


# --------------------------------------------------------------------------------------------------------- losses


def active_mean(x, active):
    """Mean over the rows (B, 1) whose mask is 1; 0 if there are none."""
    return (x * active).sum() / active.sum().clamp(min=1)


def active_policy_loss(log_ratios, advantages, active, clip_coef):
    """The clipped surrogate, negated, over active rows; all are (B, 1), log_ratios = log pi - log pi_old.

    L = E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ]   (arXiv 2103.01955, appendix A). HAPPO's A has its factor in it.
    """
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - clip_coef, 1 + clip_coef)
    return -active_mean(torch.min(ratios * advantages, clipped * advantages), active)


def huber_value_loss(values, old_values, returns, active, huber_delta, clip_coef=None):
    """Mean Huber loss over active rows, all (B, 1): e²/2 up to |e| = delta, from there on linear.

    With `clip_coef`, moving a value further gains nothing (arXiv 2103.01955, appendix A).
    """
    errors = nn.functional.huber_loss(values, returns, reduction="none", delta=huber_delta)
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        clipped_errors = nn.functional.huber_loss(clipped, returns, reduction="none", delta=huber_delta)
        errors = torch.max(errors, clipped_errors)
    return active_mean(errors, active)


def normalize_active(advantages, active):
    """Advantages with the mean and (population) deviation of the active ones taken out; arrays of equal shape."""
    some = advantages[active > 0]
    if some.size == 0:
        return advantages
    return (advantages - some.mean()) / (some.std() + 1e-5)


def team_policy_loss(actor, batch, args):
    """The loss of an ActorBatch, to be minimised, and a dict of figures to log."""
    active = batch.active_masks
    log_probs, entropies = actor(batch.obs, batch.rnn_states, batch.masks, batch.available_actions, batch.actions)
    log_ratios = (log_probs - batch.log_probs) * active  # masked before exp(): an infinite ratio times 0 is NaN
    pg_loss = active_policy_loss(log_ratios, batch.factor * batch.advantages, active, args.clip_coef)
    entropy = active_mean(entropies, active)
    loss = pg_loss - args.ent_coef * entropy
    ratios = log_ratios.detach().exp()
    clipped = ((ratios - 1).abs() > args.clip_coef).float()
    figures = {
        "policy_loss": pg_loss.detach(),
        "entropy": entropy.detach(),
        "approx_kl": active_mean(ratios - 1 - log_ratios.detach(), active),  # Schulman's k3, of KL(pi_old || pi)
        "clip_fraction": active_mean(clipped, active),
    }
    return loss, figures


def team_value_loss(critic, batch, value_norm, args):
    """The loss of a CriticBatch."""
    values, _ = critic(batch.share_obs, batch.rnn_states_critic, batch.masks)
    returns = batch.returns if value_norm is None else value_norm.normalize(batch.returns)
    clip_coef = args.clip_vloss_coef if args.clip_vloss else None
    return huber_value_loss(values, batch.value_preds, returns, batch.active_masks, args.huber_delta, clip_coef)


# -------------------------------------------------------------------------------------------------------- updates


def join_agents(batches):
    """One ActorBatch of several agents', (L·C, …) each: agents join the C chunks, time stays the slowest axis."""
    length = len(batches[0].masks) // len(batches[0].rnn_states)  # L: a chunk has L rows and one recurrent state
    joined = {"rnn_states": torch.cat([batch.rnn_states for batch in batches])}
    for name in ActorBatch._fields:
        if name != "rnn_states":
            parts = [getattr(batch, name).unflatten(0, (length, -1)) for batch in batches]
            joined[name] = torch.cat(parts, dim=1).flatten(0, 1)  # (L, chunks of all, …), then flat again
    return ActorBatch(**joined)


def actor_minibatches(buffers, advantages, args, rng):
    """Yield an epoch, shuffled and split into ActorBatches, of agents who follow one policy; a buffer for each."""
    epochs = []
    for buffer, agent_advantages in zip(buffers, advantages):
        if args.recurrent:
            length = args.data_chunk_length or args.num_steps
            epoch = buffer.recurrent_generator_actor(agent_advantages, args.num_minibatches, length, rng)
        else:
            epoch = buffer.feed_forward_generator_actor(agent_advantages, args.num_minibatches, rng)
        epochs.append(epoch)
    for batches in zip(*epochs):
        batch = join_agents(batches)
        if batch.active_masks.any():  # else all are dead, or wait for the next episode
            yield batch


def critic_minibatches(buffer, args, rng):
    """Yield an epoch, shuffled and split into CriticBatches."""
    if args.recurrent:
        length = args.data_chunk_length or args.num_steps
        epoch = buffer.recurrent_generator_critic(args.num_minibatches, length, rng)
    else:
        epoch = buffer.feed_forward_generator_critic(args.num_minibatches, rng)
    for batch in epoch:
        if batch.active_masks.any():
            yield batch


def normalized_advantages(critic_buffer, agents, buffers):
    """Of each of these agents the advantages (T, N, 1), normalised over the active rows of all of them."""
    advantages = np.stack([critic_buffer.advantages_of(i) for i in agents])
    active = np.stack([buffer.active_masks[:-1] for buffer in buffers])
    return normalize_active(advantages, active)


@torch.no_grad()
def ratios_now(actor, buffer):
    """pi(a|o) / pi_old(a|o) (T, N, 1) of an agent's steps, pi being its policy as it is now; 1 where not active."""
    steps = buffer.fields(buffer.factor)  # the whole rollout, one chunk; factor stands in for advantages, not used here
    rows = {name: x.flatten(0, 1) for name, x in steps.items()}
    log_probs, _ = actor(rows["obs"], steps["rnn_states"][0], rows["masks"], rows["available_actions"], rows["actions"])
    ratios = ((log_probs - rows["log_probs"]) * rows["active_masks"]).exp()
    return ratios.view(buffer.factor.shape).cpu().numpy()


def mappo_update(team, optimizers, actor_buffers, critic_buffer, args, rng, run):
    """MAPPO: each policy learns from all who follow it, as if others stood still (arXiv 2103.01955, algorithm 1)."""
    for actor, optimizer, agents in zip(team.actors, optimizers, team.followers):
        buffers = [actor_buffers[i] for i in agents]
        advantages = normalized_advantages(critic_buffer, agents, buffers)
        for _ in range(args.update_epochs):
            for batch in actor_minibatches(buffers, advantages, args, rng):
                loss, figures = team_policy_loss(actor, batch, args)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(actor.parameters(), args.max_grad_norm)
                optimizer.step()
                run.log(**figures)


def happo_update(team, optimizers, actor_buffers, critic_buffer, args, rng, run):
    """HAPPO: one agent's policy moves after the other's, knowing how the earlier ones have (arXiv 2109.11251)."""
    factor = np.ones_like(actor_buffers[0].factor)  # the product of the ratios of those that have moved
    for i in rng.permutation(team.num_agents):
        actor = team.actors[i]
        optimizer = optimizers[i]
        buffer = actor_buffers[i]
        buffer.factor[:] = factor
        advantages = normalized_advantages(critic_buffer, [i], [buffer])
        for _ in range(args.update_epochs):
            for batch in actor_minibatches([buffer], advantages, args, rng):
                loss, figures = team_policy_loss(actor, batch, args)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(actor.parameters(), args.max_grad_norm)
                optimizer.step()
                run.log(**figures)
        factor = factor * ratios_now(actor, buffer)


# ------------------------------------------------------------------------------------------------------- training


def train(args):
    """Train with `args`; return the final figures, which summary.json holds as well. UserError on bad input."""
    check_args(args)
    check_batches(args)
    envs = make_envs(args, args.num_envs)  # of TeamEnvs: see make_factored_envs
    team = make_agent(args, envs)  # a Team: see make_team
    actor_optimizers = [Adam(actor.parameters(), lr=args.learning_rate, eps=1e-5) for actor in team.actors]
    critic_optimizer = Adam(team.critic.parameters(), lr=args.learning_rate, eps=1e-5)
    named_optimizers = {f"actor_optimizer_{i}": optimizer for i, optimizer in enumerate(actor_optimizers)}
    run = Run(args, team, envs, critic_optimizer=critic_optimizer, **named_optimizers)  # --resume loads into these
    update_actors = happo_update if args.happo else mappo_update

    while not run.is_finished():
        if run.restarts:  # at the start, and after each checkpoint, which holds no episodes: all begin anew
            envs, team_rows, rng = run.new_envs()  # the first time: those made above
            reset_rows = np.zeros(args.num_envs, bool)  # whether the next step only resets an environment
            actor_buffers, critic_buffer = make_buffers(args, team, team_rows)
        learning_rate = args.learning_rate * (1 - run.step / args.total_timesteps if args.anneal_lr else 1)
        for optimizer in [*actor_optimizers, critic_optimizer]:
            optimizer.param_groups[0]["lr"] = learning_rate

        for t in range(args.num_steps):
            actions, log_probs, rnn_states = team.sample(actor_buffers, t, rng)
            values, rnn_states_critic = team.values(critic_buffer, t)
            team_rows, rewards, terminated, truncated, _ = envs.step(team.to_env(actions))
            run.count(team_rows, rewards, terminated | truncated, reset_rows)  # advances run.step; not for reset rows
            reset_rows = terminated | truncated  # from here on those of the next step
            masks = 1 - reset_rows[:, None]
            bad_masks = 1 - (truncated & ~terminated)[:, None]
            parts = split_rows(team.layout, team_rows)
            for i, buffer in enumerate(actor_buffers):
                active_masks = masks * parts.alive[i]  # policies learn neither from reset rows nor from the dead
                available = parts.available_actions[i]
                buffer.insert(parts.obs[i], rnn_states[i], actions[i], log_probs[i], masks, active_masks, available)
            share_obs = team.share_obs(parts)
            # Without active_masks of its own: the critic learns from the dead as well.
            critic_buffer.insert(share_obs, rnn_states_critic, values, rewards[:, None], masks, bad_masks)

        next_value, _ = team.values(critic_buffer, -1)
        critic_buffer.compute_returns(next_value, team.value_norm)

        update_actors(team, actor_optimizers, actor_buffers, critic_buffer, args, rng, run)
        if team.value_norm is not None:  # only now: compute_returns took the old scale, targets take the new
            played = critic_buffer.active_masks[:-1] > 0
            team.value_norm.update(torch.as_tensor(critic_buffer.returns[played]))
        for _ in range(args.update_epochs):
            for batch in critic_minibatches(critic_buffer, args, rng):
                loss = team_value_loss(team.critic, batch, team.value_norm, args)
                critic_optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(team.critic.parameters(), args.max_grad_norm)
                critic_optimizer.step()
                run.log(value_loss=loss.detach())
        run.log(learning_rate=learning_rate, explained_variance=critic_buffer.explained_variance())
        for buffer in [*actor_buffers, critic_buffer]:
            buffer.after_update()
        run.write_what_is_due()  # a row of metrics.csv, an evaluation, a checkpoint
    return run.finish()


# ===== helpers: settings, parts of the networks, Adam, teams of environments ==========================================

RANGES = {"num_steps": (1, 1e9), "num_minibatches": (1, 1e9), "update_epochs": (1, 1e9), "gamma": (0, 1)}
RANGES |= {"gae_lambda": (0, 1), "hidden_sizes": (1, 1e5), "critic_hidden_sizes": (1, 1e5), "huber_delta": (1e-9, 1e15)}
# The columns of metrics.csv that are this script's own, and those of them that the learning curve shows as well.
FIGURES = "learning_rate policy_loss value_loss entropy approx_kl clip_fraction explained_variance".split()
CURVE = ["policy_loss", "value_loss", "entropy"]

# Settings that learn, per environment. What the user gives wins. docs/mappo.md says which of them were confirmed.
PARTICLES = {"learning_rate": 1e-3, "num_minibatches": 8, "gamma": 0.95, "total_timesteps": 200_000}
TUNED = {
    "mpe2.simple_spread_v3": PARTICLES,
    "mpe2.simple_reference_v3": PARTICLES | {"action_factor": 5, "num_envs": 64, "ent_coef": 0.003,
                                             "total_timesteps": 1_000_000},
    "mpe2.simple_speaker_listener_v4": PARTICLES | {"share_policy": False},
}  # fmt: skip


def tuned_settings(args):
    """The settings of TUNED for args.env_id."""
    return TUNED.get(args.env_id, {})


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


def gru_cell(inputs, size):
    """A GRUCell with orthogonal weights and zero biases."""
    gru = nn.GRUCell(inputs, size)
    nn.init.orthogonal_(gru.weight_ih)
    nn.init.orthogonal_(gru.weight_hh)
    nn.init.zeros_(gru.bias_ih)
    nn.init.zeros_(gru.bias_hh)
    return gru


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


def forward_in_numpy(network, x):
    """What a network makes of a tensor x (B, inputs), as a NumPy array.

    A small `mlp` on the CPU is computed in NumPy, on the memory of its parameters: torch spends more on each call than
    on the arithmetic, so that collecting is twice as fast this way. On larger ones NumPy would start several threads.
    """
    small = x.device.type == "cpu" and len(x) <= 32 and isinstance(network, nn.Sequential)
    if not small or any(module.weight.numel() > 2**13 for module in network if isinstance(module, nn.Linear)):
        return network(x).cpu().numpy()
    x = x.numpy()
    for module in network:
        if isinstance(module, nn.Linear):
            x = x @ module.weight.detach().numpy().T + module.bias.detach().numpy()
        else:
            x = np.tanh(x)
    return x


def output_sizes(space):
    """Numbers of categories of the factors of a discrete action space; of a Box, its number of dimensions."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ravel().tolist()
    if isinstance(space, spaces.MultiBinary):
        return [2] * math.prod(space.shape)
    return [math.prod(space.shape)]


class ValueNorm(nn.Module):
    """Moving mean and deviation of the returns, by which the critic's targets are normalised.

    m <- beta m + (1 - beta) E[R], and the same for E[R²] and for E[1], which is what the mean is divided by: the
    average forgets its start at zero (arXiv 2103.01955, section 5.1; debiased as in arXiv 1412.6980, section 3).
    """

    def __init__(self, beta=0.99999):
        super().__init__()
        self.beta = beta
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean_square", torch.zeros((), dtype=torch.float64))
        self.register_buffer("weight", torch.zeros((), dtype=torch.float64))

    def update(self, returns):
        """Take in a batch of returns, a tensor of any shape."""
        returns = returns.detach().cpu().double()
        if returns.numel() == 0:
            return
        self.mean.lerp_(returns.mean(), 1 - self.beta)
        self.mean_square.lerp_(returns.square().mean(), 1 - self.beta)
        self.weight.lerp_(torch.ones_like(self.weight), 1 - self.beta)

    def mean_and_std(self):
        """Two floats. The variance is at least 0.01."""
        weight = max(self.weight.item(), 1e-5)
        mean = self.mean.item() / weight
        variance = self.mean_square.item() / weight - mean**2
        return mean, math.sqrt(max(variance, 1e-2))

    def normalize(self, returns):
        """Returns, an array or a tensor, as the critic sees them."""
        mean, std = self.mean_and_std()
        return (returns - mean) / std

    def denormalize(self, values):
        """What the critic says, an array or a tensor, in the units of returns."""
        mean, std = self.mean_and_std()
        return values * std + mean


def argmax_of_factors(logits, sizes):
    """The category with the largest logit in each factor, (N, factors), of logits (N, sum of sizes) side by side."""
    categories = []
    first = 0
    for size in sizes:
        categories.append(logits[:, first : first + size].argmax(1))
        first += size
    return np.array(categories).T


def to_space(space, actions):
    """Actions (N, D) as the environment takes them: within the bounds of a Box, in the space's shape and type."""
    actions = actions.reshape(-1, *space.shape)
    if not isinstance(space, spaces.Box):
        return (actions + getattr(space, "start", 0)).astype(space.dtype)  # Discrete may begin at another number
    actions = np.clip(actions, space.low, space.high)
    if np.issubdtype(space.dtype, np.integer):
        actions = np.rint(actions)
    return actions.astype(space.dtype)


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


class FactoredActions(gym.ActionWrapper):
    """Splits an agent's Discrete(n) actions, where n is a larger multiple of `size`, into two: first + size * second.

    mpe2 makes one number of a move, of which there are five, and of what is said. A policy with a logit for each such
    number has to learn what to say once for every move; with two factors it learns to move and to speak.
    """

    def __init__(self, env, size):
        super().__init__(env)
        self.size = size
        given = env.action_space.spaces
        self.split = [isinstance(s, spaces.Discrete) and s.n > size > 1 and s.n % size == 0 for s in given]
        if not any(self.split):
            hint = "--action-factor 0 leaves actions whole"
            raise UserError(f"no agent has Discrete(n) actions, n a larger multiple of action_factor = {size}: {hint}")
        if env.layout.available[-1].stop > env.layout.available[0].start:
            raise UserError("action_factor cannot be used with action masks, which are not of factors")
        factored = []
        for space, split in zip(given, self.split):
            factored.append(spaces.MultiDiscrete([size, space.n // size]) if split else space)
        self.action_space = spaces.Tuple(factored)

    def action(self, actions):
        """The actions that the environment has, of pairs where they are split."""
        joined = []
        for action, space, split in zip(actions, self.env.action_space.spaces, self.split):
            joined.append(space.start + action[0] + self.size * action[1] if split else action)
        return tuple(joined)


def make_factored_envs(args, num_envs, render_mode=None):
    """What make_team_envs makes, with --action-factor applied to every environment."""
    factored = partial(FactoredActions, size=args.action_factor)
    return make_team_envs(args, num_envs, render_mode, [factored] if args.action_factor else [])


make_envs = make_factored_envs  # as the run section calls it


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


def make_team(args, envs):
    """An untrained Team for these environments. UserError if the script cannot handle a space or the device."""
    action_spaces = envs.single_action_space.spaces
    layout = envs.get_attr("layout")[0]
    obs_sizes = [part.stop - part.start for part in layout.observations]
    for space in action_spaces:
        kinds = spaces.Discrete | spaces.Box | spaces.MultiDiscrete
        if not isinstance(space, kinds) or not 0 < sum(output_sizes(space)) <= 100_000:
            wanted = "Discrete, Box or MultiDiscrete actions, 100,000 categories at most"
            raise UserError(f"{args.env_id} has {space}; this script needs {wanted}")
    alike = len(set(obs_sizes)) == 1 and all(space == action_spaces[0] for space in action_spaces)
    if args.share_policy and not alike:
        raise UserError(f"the agents of {args.env_id} differ in observations or actions: add --no-share-policy")
    if args.happo and args.share_policy:
        raise UserError("happo updates one policy after the other: add --no-share-policy")
    if args.recurrent and () in (args.hidden_sizes, args.critic_hidden_sizes):
        raise UserError("hidden_sizes and critic_hidden_sizes need at least one layer, which the GRU follows")
    device = choose_device(args)
    with torch.device("meta"):  # counts the weights without making them
        weights = sum(p.numel() for p in Team(layout, action_spaces, args, "meta").parameters())
    check_memory("the networks", 16 * weights)  # with gradients and Adam's moments
    state_size = layout.state.stop - layout.state.start
    numbers = 2 * sum(obs_sizes) + state_size * (len(obs_sizes) if args.state_type == "FP" else 1)
    check_memory("a rollout", args.num_steps * args.num_envs * 4 * (numbers + 20 * len(obs_sizes)))
    torch.manual_seed(args.seed)
    return Team(layout, action_spaces, args, device)


make_agent = make_team  # as the run section calls it


def check_batches(args):
    """UserError if a rollout does not divide into chunks, or these not into minibatches."""
    length = 1
    if args.recurrent:
        length = args.data_chunk_length or args.num_steps
    if args.num_steps % length != 0:
        raise UserError(f"data_chunk_length = {length} does not divide num_steps = {args.num_steps}")
    chunks = args.num_envs * args.num_steps // length
    if chunks % args.num_minibatches != 0:
        what = f"num_envs x num_steps / chunk length = {chunks} rows or chunks"
        raise UserError(f"{what} do not divide into {args.num_minibatches} equal minibatches")


RowParts = namedtuple("RowParts", "obs available_actions alive state")


def split_rows(layout, team_rows):
    """What stands in team_rows (N, …) of TeamEnvs: the state (N, S), all else as lists over agents.

    These are observations (N, …), available actions (N, choices), 1 or 0, and alive (N, 1), 1 or 0.
    """
    obs = [team_rows[:, part] for part in layout.observations]
    available_actions = [team_rows[:, part] for part in layout.available]
    alive = [team_rows[:, [column]] for column in range(layout.alive.start, layout.alive.stop)]
    return RowParts(obs, available_actions, alive, team_rows[:, layout.state])


def make_buffers(args, team, team_rows):
    """([an OnPolicyActorBuffer for each agent], the critic's buffer), whose first row holds team_rows (N, …)."""
    T, N = args.num_steps, args.num_envs
    parts = split_rows(team.layout, team_rows)
    gae_lambda = args.gae_lambda if args.gae else None
    more = team.state_size, team.critic.hidden_size, team.device, args.gamma, gae_lambda
    if args.state_type == "EP":
        critic_buffer = OnPolicyCriticBufferEP(T, N, *more)
    else:
        critic_buffer = OnPolicyCriticBufferFP(T, N, team.num_agents, *more)
    critic_buffer.share_obs[0] = team.share_obs(parts)
    actor_buffers = []
    for i in range(team.num_agents):
        actor = team.actor(i)
        choices = parts.available_actions[i].shape[1]
        sizes = parts.obs[i].shape[1], actor.action_space, choices, actor.network.hidden_size
        buffer = OnPolicyActorBuffer(T, N, *sizes, team.device)
        buffer.obs[0] = parts.obs[i]
        buffer.available_actions[0] = parts.available_actions[i]
        buffer.active_masks[0] = parts.alive[i]
        actor_buffers.append(buffer)
    return actor_buffers, critic_buffer


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
