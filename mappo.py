# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.3,<2", "numpy>=1.26", "matplotlib>=3.8",
#   "tyro>=1.0", "tqdm>=4.66", "moviepy>=2.0", "mpe2>=1.0", "pettingzoo>=1.25,<2",
# ]
# ///
"""Multi-agent PPO (MAPPO) and its sequential sibling HAPPO, all of it, in this one file.

A team of n agents shares one reward, the sum of the agents' own. Each agent acts only on its own observation
o^i. During training, one critic V sees the state s of the whole team. Every agent does PPO, with its
own ratio r^i, but with one advantage A for all: that of the team's return. (With --state-type FP each
agent has its own estimate of A; with --agent-rewards as well, its own rewards.) A is normalised,
policies learn nothing from agents that have left the episode, and entropy is rewarded.

    L(theta) = E[ 1/n sum_i min( r^i A, clip(r^i, 1 - eps, 1 + eps) A ) ]   (arXiv 2103.01955, appendix A)
    r^i = pi(a^i|o^i) / pi_old(a^i|o^i)

HAPPO updates separate policies one after the other, in random order. For the next policy, the
normalised A is multiplied by the ratios r^j of all policies j updated before it: so this policy learns
what pays with its teammates as they are now (arXiv 2109.11251).

    python mappo.py                                 # three agents spread over three landmarks
    python mappo.py --env-id mpe2.simple_speaker_listener_v4 --happo --no-share-policy
    python mappo.py --evaluate runs/DIR --render    # watch the trained agents

Papers: MAPPO arXiv 2103.01955, HAPPO arXiv 2109.11251 and 2304.09870, PPO arXiv 1707.06347, GAE
arXiv 1506.02438. The algorithm ends at "# ===== helpers"; below it are settings, parts of the networks,
environments and the run folder.
"""

import ast
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
    share_policy: bool = True  # all agents share one policy; otherwise each has its own
    happo: bool = False  # HAPPO: update one policy after the other; needs --no-share-policy
    state_type: Literal["EP", "FP"] = "EP"  # what the critic sees. EP: one state for all; FP: one per agent
    agent_rewards: bool = False  # each agent learns from its own rewards and its own end; needs FP
    action_factor: int = 0  # split Discrete actions into action % this and action // this; 0: do not
    recurrent: bool = False  # add a GRU to actors and critic
    data_chunk_length: int = 25  # steps that gradients flow back through the GRU; 0: the whole rollout
    learning_rate: float = 1e-3  # Adam's learning rate for actors and critic
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    num_envs: int = 32  # environments played side by side
    num_steps: int = 25  # steps of each environment per rollout
    num_minibatches: int = 8  # parts of a rollout, one gradient step each
    update_epochs: int = 10  # passes over a rollout
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # 0: advantages rely most on the critic, 1: most on the rewards
    clip_coef: float = 0.2  # eps of the clipped objective
    value_norm: bool = True  # the critic predicts returns normalised by their running mean and standard deviation
    clip_vloss: bool = True  # clip how far values move in the loss as well
    clip_vloss_coef: float = 0.2  # moving a value further gains nothing; with value_norm, in normalised units
    huber_delta: float = 10.0  # the critic's loss is quadratic for errors up to this, linear beyond
    ent_coef: float = 0.01  # weight of the entropy bonus
    max_grad_norm: float = 10.0  # gradients longer than this are scaled down to it
    hidden_sizes: tuple[int, ...] = (64, 64)  # of the actors' hidden layers
    critic_hidden_sizes: tuple[int, ...] = ()  # of the critic's; none: as the actors'
    checkpoint_every: int = 0  # steps between checkpoints, which restart all episodes; 0: 5,000 * num_envs or more
    # run
    env_id: str = "mpe2.simple_spread_v3"  # module with a PettingZoo parallel_env, or path of such a function
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # of parallel environments: dotted paths; with arguments: a.B(size=4)
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    async_envs: bool = False  # a process for each environment: for environments slower than 1 ms a step
    total_timesteps: int = 1_000_000  # environment steps to train for at least; resets do not count
    stop_at_return: float | None = None  # stop once the last 100 training episodes have this mean
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
# layer, mlp, categorical and gaussian are those of ppo.py; they stand among the helpers.
#
# A stream is a sequence of steps that a network sees: those of one agent in one environment, or, for
# a critic with one state for all (EP), those of one environment. A tensor (L, S, …) holds L steps of
# S streams.
class TeamNetwork(nn.Module):
    """An MLP; if recurrent, with a GRU before the last layer.

    The GRU's state has H numbers; without a GRU, H = 0.
    """

    def __init__(self, inputs, hidden_sizes, outputs, recurrent, gain):
        super().__init__()
        self.recurrent = recurrent
        self.hidden_size = hidden_sizes[-1] if recurrent else 0
        if recurrent:
            size = self.hidden_size
            self.body = nn.Sequential(mlp(inputs, hidden_sizes[:-1], size, gain=2**0.5), nn.Tanh())
            self.gru = gru_cell(size, size)
            self.head = layer(nn.Linear(size, outputs), gain)
        else:
            self.mlp = mlp(inputs, hidden_sizes, outputs, gain)

    def forward(self, x, first, reset_rows):
        """(outputs (L, S, outputs), rnn_states (L + 1, S, H)) for x (L, S, inputs).

        rnn_states[t] are the GRU's states before step t; `first` (S, H) are those before step 0.
        reset_rows (L, S) marks the rows that only reset an environment (see TeamBuffer). Such a row
        holds the final observation and still gets its episode's state; the next row gets zeros.
        """
        if not self.recurrent:
            return self.mlp(x), first.expand(len(x) + 1, *first.shape)
        rnn_states = [first]
        hidden = []
        for x_t, reset_t in zip(self.body(x), reset_rows):
            hidden.append(self.gru(x_t, rnn_states[-1]))
            rnn_states.append(hidden[-1] * ~reset_t[:, None])
        return self.head(torch.stack(hidden)), torch.stack(rnn_states)


class AgentPolicy(nn.Module):
    """A policy: a distribution over actions, given what an agent observes.

    A Box action is Gaussian; to_env maps [-1, 1] to the Box's bounds. A Discrete action is one
    categorical factor (two if action_factor splits it), a MultiDiscrete action has several.
    Everywhere but in the environment, an action is D numbers: one for each factor or dimension.
    """

    def __init__(self, inputs, action_space, args):
        super().__init__()
        self.action_space = action_space
        self.continuous = isinstance(action_space, spaces.Box)
        self.factored = can_be_split(action_space, args.action_factor)
        self.output_sizes = choices(action_space) or [spaces.flatdim(action_space)]  # for a Box, its D
        if self.factored:
            self.output_sizes = [args.action_factor, int(action_space.n) // args.action_factor]
        self.outputs = sum(self.output_sizes)
        # The small gain makes the first policy nearly uniform, or the first means nearly 0.
        sizes = args.hidden_sizes
        self.network = TeamNetwork(inputs, sizes, self.outputs, args.recurrent, gain=0.01)
        if self.continuous:
            self.log_std = nn.Parameter(torch.zeros(self.outputs))
            self.action_scale, self.action_bias = scale_and_bias(action_space)

    def logits_or_means(self, obs, rnn_states, reset_rows, available_actions):
        """(outputs (L, S, outputs), rnn_states) of TeamNetwork; logits of unavailable actions are -1e9.

        `available_actions` is (L, S, outputs), or (L, S, 0) if the agents have no masks.
        """
        outputs, rnn_states = self.network(obs, rnn_states, reset_rows)
        if available_actions.shape[-1] > 0:
            outputs = outputs.masked_fill(available_actions == 0, -1e9)
        return outputs, rnn_states

    def forward(self, obs, rnn_states, reset_rows, available_actions, actions):
        """(log-probs (L, S) of actions (L, S, D), entropies (L, S), rnn_states of TeamNetwork)."""
        outputs, rnn_states = self.logits_or_means(obs, rnn_states, reset_rows, available_actions)
        rows = outputs.flatten(0, 1)
        flat_actions = actions.flatten(0, 1)
        if self.continuous:
            log_probs, entropies = gaussian(rows, flat_actions, self.log_std)
        else:
            log_probs, entropies = categorical(rows, flat_actions, self.output_sizes)
        return log_probs.view(reset_rows.shape), entropies.view(reset_rows.shape), rnn_states

    def choose(self, outputs, rng=None):
        """Actions (S, D) for logits or means (S, outputs), drawn with the NumPy generator `rng`.

        The argmax of logits + Gumbel noise is a draw from their softmax (the Gumbel-max trick).
        Without rng, the most likely action is chosen.
        """
        if rng is not None:
            draw = rng.standard_normal if self.continuous else rng.gumbel
            noise = torch.as_tensor(draw(size=outputs.shape), dtype=torch.float32, device=outputs.device)
            if self.continuous:
                noise = self.log_std.exp() * noise
            outputs = outputs + noise
        if self.continuous:
            return outputs
        logits_of_factors = outputs.split(self.output_sizes, dim=1)
        return torch.stack([logits.argmax(dim=1) for logits in logits_of_factors], dim=1)

    def to_env(self, actions):
        """Actions (N, D) as the environment takes them, in the space's bounds, shape and type."""
        space = self.action_space
        if self.factored:
            actions = actions[:, 0] + self.output_sizes[0] * actions[:, 1]
        if self.continuous:
            actions = self.action_scale * actions + self.action_bias
        actions = actions.reshape(-1, *space.shape)
        if not self.continuous:
            return (actions + getattr(space, "start", 0)).astype(space.dtype)  # they need not start at 0
        actions = np.clip(actions, space.low, space.high)
        if np.issubdtype(space.dtype, np.integer):
            actions = np.rint(actions)
        return actions.astype(space.dtype)


class Team(nn.Module):
    """The policies of all n agents, the critic they have in common, the normaliser of its targets.

    Either all agents follow one policy, or each has its own. followers[k] lists the F agents that
    follow actors[k]. In N environments they are N·F streams: all followers in the first environment,
    then those in the second. Environments return team_rows (`layout` has the slices, see TeamEnv):

        [ alive, 1 or 0 per agent | observations | state | available actions, 1 or 0 ]
    """

    def __init__(self, layout, action_spaces, args, device="cpu"):
        super().__init__()
        self.layout = layout
        self.args = args
        self.device = device
        self.num_agents = len(action_spaces)
        everybody = list(range(self.num_agents))
        self.followers = [everybody] if args.share_policy else [[i] for i in everybody]
        obs_sizes = [part.stop - part.start for part in layout.observations]
        self.widest = max(obs_sizes)  # FP pads all observations to this length
        self.actors = nn.ModuleList()
        for agents in self.followers:
            first = agents[0]  # its other followers have the same spaces: see make_team
            self.actors.append(AgentPolicy(obs_sizes[first], action_spaces[first], args))
        if args.state_type == "EP":
            self.values_per_env = 1
            inputs = layout.state.stop - layout.state.start
        else:
            self.values_per_env = self.num_agents
            inputs = self.widest + layout.states[0].stop - layout.states[0].start
        sizes = args.critic_hidden_sizes or args.hidden_sizes
        self.critic = TeamNetwork(inputs, sizes, 1, args.recurrent, gain=1.0)
        self.to(device)
        # Created after the move, so that it stays on the CPU: some devices lack its float64.
        self.value_norm = ValueNorm() if args.value_norm else None

    def views(self, team_rows, agents):
        """What these F agents see in team_rows (L, N, …).

        (observations, available actions), each (L, N·F, …).
        """
        obs = [team_rows[..., self.layout.observations[i]] for i in agents]
        available = [team_rows[..., self.layout.available[i]] for i in agents]
        return torch.stack(obs, dim=2).flatten(1, 2), torch.stack(available, dim=2).flatten(1, 2)

    def share_obs(self, team_rows):
        """What the critic sees of team_rows (L, N, …): (L, N, size), or with FP (L, N·n, size).

        EP (environment-provided) is the state: the environment's own (if it has one for each agent, all
        of them side by side), or else all observations (CL in arXiv 2103.01955, section 5.2). FP has for
        each agent its own observation, padded with zeros, and the state (its own, if the environment has
        one for each agent). The paper calls this AS (agent-specific); its FP (feature-pruned) leaves out
        what is there twice. Without --agent-rewards a dead agent has zeros (death masking; in the paper,
        with the agent's number): its value is then what its team still gets.
        """
        if self.args.state_type == "EP":
            return team_rows[..., self.layout.state]
        states = []
        for i, part in enumerate(self.layout.observations):
            obs = team_rows[..., part]
            obs = nn.functional.pad(obs, (0, self.widest - obs.shape[-1]))
            state = team_rows[..., self.layout.states[i]]
            seen = torch.cat([obs, state], dim=-1)
            # With --agent-rewards nothing is learned from the rows of the dead: they need no zeros.
            # Zeros would hide the final observation of a truncated agent: GAE needs its value.
            if not self.args.agent_rewards:
                seen = seen * team_rows[..., [self.layout.alive.start + i]]
            states.append(seen)
        return torch.stack(states, dim=2).flatten(1, 2)

    @torch.no_grad()
    def sample(self, team_rows, rnn_states, reset_rows, rng=None):
        """One step in team_rows (N, …): (actions (N·F, D), next rnn_states (N·F, H)).

        Both, and rnn_states, are lists over policies. With `rng` actions are drawn; without, they are
        the most likely ones. To the networks it is a sequence of L = 1 step.
        """
        team_rows = torch.as_tensor(team_rows, device=self.device).unsqueeze(0)
        reset_rows = torch.as_tensor(reset_rows, device=self.device).unsqueeze(0)
        all_actions = []
        next_rnn_states = []
        for actor, agents, before in zip(self.actors, self.followers, rnn_states):
            obs, available_actions = self.views(team_rows, agents)
            resets = reset_rows.repeat_interleave(len(agents), dim=1)
            outputs, after = actor.logits_or_means(obs, before, resets, available_actions)
            all_actions.append(actor.choose(outputs[0], rng).cpu().numpy())
            next_rnn_states.append(after[-1])
        return all_actions, next_rnn_states

    def to_env(self, all_actions):
        """Each policy's actions (N·F, D) as the environment takes them: a tuple over agents."""
        for_env = [None for _ in range(self.num_agents)]
        for actor, agents, actions in zip(self.actors, self.followers, all_actions):
            per_env = actions.reshape(-1, len(agents), actions.shape[1])  # (N, F, D)
            for place, agent in enumerate(agents):
                for_env[agent] = actor.to_env(per_env[:, place])
        return tuple(for_env)

    def first_states(self, num_envs):
        """A list over policies of the recurrent states (N·F, H) before an episode: zeros."""
        rnn_states = []
        for actor, agents in zip(self.actors, self.followers):
            shape = num_envs * len(agents), actor.network.hidden_size
            rnn_states.append(torch.zeros(shape, device=self.device))
        return rnn_states

    def begin_episodes(self, num_envs):
        """Clear `memory`: the next rows that `act` gets begin num_envs new episodes."""
        self.memory = self.first_states(num_envs)

    def act(self, team_rows):
        """The most likely actions in team_rows (N, …), as the environment takes them.

        Call begin_episodes(N) before the episodes' first rows.
        """
        if np.ndim(team_rows) != 2:
            raise ValueError("act takes a batch of team rows; for one, it is act(row[None])")
        no_resets = np.zeros(len(team_rows), bool)
        all_actions, self.memory = self.sample(team_rows, self.memory, no_resets)
        return self.to_env(all_actions)


# ------------------------------------------------------------------------------- returns and buffer
# next_values[t] is the critic's value of the observation after step t. After termination it counts
# as 0: nothing follows. After truncation it stands for the rewards that were cut off. If both flags
# are set, terminated wins.
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


# What a policy, or the critic, learns from: a rollout of S streams, (T, S, …), or C chunks of L steps
# of it, (L, C, …). `active` marks the rows that count in the loss.
POLICY_FIELDS = "obs rnn_states reset_rows available_actions actions log_probs active advantages"
CRITIC_FIELDS = "share_obs rnn_states reset_rows values returns advantages active"
PolicySteps = namedtuple("PolicySteps", POLICY_FIELDS)
CriticSteps = namedtuple("CriticSteps", CRITIC_FIELDS)


class TeamBuffer:
    """One rollout, time-major (T, N, …), in host memory.

    After an episode's end the next step only resets its environment (next-step autoreset). Actions
    in it are ignored:

        row  observations         actions  reward  truncated  reset row
         0   s0                   a0       r0      no         no
         1   s1                   a1       r1      yes        no
         2   s2, the final ones   ignored  0       no         yes
         3   s0 of the next one   a0       r0      no         no

    Row 2 counts in no loss, but it holds s2. So the successor of step t is always the observation in
    row t + 1, whether or not an episode ended in between. No advantage reaches back from row 2: row 1
    ends the episode.

    Rewards and ends are (T, N, K). The critic has K values for each environment: 1, or with FP n.
    """

    def __init__(self, args, team):
        T, N, K = args.num_steps, args.num_envs, team.values_per_env
        row_size = team.layout.available[-1].stop
        self.args = args
        self.alive = team.layout.alive
        self.team_rows = np.zeros((T + 1, N, row_size), np.float32)  # row T: after the last step
        self.reset_rows = np.zeros((T + 1, N), bool)
        self.actions = []  # one array per policy
        for actor, agents in zip(team.actors, team.followers):
            columns = actor.outputs if actor.continuous else len(actor.output_sizes)
            dtype = np.float32 if actor.continuous else np.int64
            self.actions.append(np.zeros((T, N * len(agents), columns), dtype))
        self.rewards = np.zeros((T, N, K), np.float32)
        self.terminated = np.zeros((T, N, K), bool)
        self.truncated = np.zeros((T, N, K), bool)
        self.rnn_states = team.first_states(N)  # one tensor per policy: the states before row 0
        self.rnn_states_critic = torch.zeros(N * K, team.critic.hidden_size, device=team.device)

    def insert_results(self, t, next_rows, rewards, terminated, truncated, infos):
        """Store rewards and ends of step t of all environments, as envs.step returned them.

        With --agent-rewards, agents have their own rewards, and an agent's episode ends when it dies.
        If it was truncated, the next row still has its final observation, whose value GAE needs.
        """
        if self.args.agent_rewards:
            over = (terminated | truncated)[:, None] | (next_rows[:, self.alive] == 0)
            self.rewards[t] = infos["rewards"]
            self.terminated[t] = infos["terminated"]
            self.truncated[t] = over & ~infos["terminated"]
        else:
            self.rewards[t] = rewards[:, None]
            self.terminated[t] = terminated[:, None]
            self.truncated[t] = truncated[:, None]

    @torch.no_grad()
    def critic_steps(self, team):
        """The rollout's CriticSteps.

        Call it once, before the update: it hands the GRU's states on to the next rollout. Advantages
        and returns are in the units of rewards, values are the critic's outputs: with value_norm,
        they are normalised.

        A value predicts what the team gets, even after an agent's death. With --agent-rewards it
        predicts what one agent gets, so nothing is learned from the rows of the dead.
        """
        args = self.args
        on_device = partial(torch.as_tensor, device=team.device)
        team_rows = on_device(self.team_rows)
        rewards = on_device(self.rewards).flatten(1, 2)  # (T, S), S = N·K
        terminated = on_device(self.terminated).flatten(1, 2)
        truncated = on_device(self.truncated).flatten(1, 2)
        reset_rows = on_device(self.reset_rows).repeat_interleave(team.values_per_env, dim=1)
        share_obs = team.share_obs(team_rows)
        outputs, rnn_states = team.critic(share_obs, self.rnn_states_critic, reset_rows)
        outputs = outputs.squeeze(2)  # (T + 1, S)
        v = outputs if team.value_norm is None else team.value_norm.denormalize(outputs)
        advantages, returns = compute_gae(rewards, v[:-1], v[1:], terminated, truncated, args.gamma, args.gae_lambda)
        self.rnn_states_critic = rnn_states[-2]  # before row T, where the next rollout begins
        active = ~reset_rows[:-1]
        if args.agent_rewards:
            active &= (team_rows[:-1, :, self.alive] == 1).flatten(1, 2)
        return CriticSteps(
            share_obs=share_obs[:-1],
            rnn_states=rnn_states[:-2],
            reset_rows=reset_rows[:-1],
            values=outputs[:-1],
            returns=returns,
            advantages=advantages,
            active=active,
        )

    @torch.no_grad()
    def policy_steps(self, team, k, advantages):
        """PolicySteps of all agents that follow policy k. As critic_steps: once, before the update.

        `advantages` are those of CriticSteps, (T, N·K). With EP all agents of an environment take the
        same ones, with FP each its own. They are normalised over the active rows of all followers.
        """
        actor = team.actors[k]
        agents = team.followers[k]
        team_rows = torch.as_tensor(self.team_rows[:-1], device=team.device)
        resets = torch.as_tensor(self.reset_rows[:-1], device=team.device)
        reset_rows = resets.repeat_interleave(len(agents), dim=1)
        actions = torch.as_tensor(self.actions[k], device=team.device)
        obs, available_actions = team.views(team_rows, agents)
        observed = obs, self.rnn_states[k], reset_rows, available_actions
        # These log_probs are pi_old's: no policy has been updated yet. One pass for the whole rollout.
        log_probs, _, rnn_states = actor(*observed, actions)
        self.rnn_states[k] = rnn_states[-1]  # before row T, where the next rollout begins
        alive = team_rows[..., self.alive][..., agents].flatten(1, 2)
        active = (alive == 1) & ~reset_rows  # policies do not learn from dead agents or reset rows
        per_env = advantages.unflatten(1, (-1, team.values_per_env))  # (T, N, K)
        of_agents = per_env.expand(-1, -1, team.num_agents)
        normalized = of_agents[..., agents].flatten(1, 2)
        normalized[active] = normalize(normalized[active])
        return PolicySteps(
            obs=obs,
            rnn_states=rnn_states[:-1],
            reset_rows=reset_rows,
            available_actions=available_actions,
            actions=actions,
            log_probs=log_probs,
            active=active,
            advantages=normalized,
        )


def minibatches(steps, args, rng):
    """Yield minibatches (L, C, …) of PolicySteps or CriticSteps (T, S, …), in random order.

    The T steps of each stream are cut into chunks of L, numbered stream by stream; C random ones
    make a minibatch. Its rnn_states are only those before the first step of each chunk, (C, H).
    Without a GRU, a chunk is a single step.
    """
    T = len(steps.reset_rows)
    length = chunk_length(args)
    chunks = []  # a tensor (S·T / L, L, …) for each field
    for x in steps:
        chunks.append(x.swapaxes(0, 1).unflatten(1, (T // length, length)).flatten(0, 1))
    order = torch.as_tensor(rng.permutation(len(chunks[0])), device=chunks[0].device)
    for numbers in order.tensor_split(args.num_minibatches):
        batch = type(steps)(*[x[numbers].swapaxes(0, 1) for x in chunks])
        if batch.active.any():  # else the loss, a mean of nothing, is NaN
            yield batch._replace(rnn_states=batch.rnn_states[0])


# ------------------------------------------------------------------------------------------- losses
def policy_loss(log_ratios, advantages, clip_coef):
    """The clipped surrogate, negated; log_ratios (B,) = log pi - log pi_old; r: the ratio, not a reward.

    L = E[ min( r A, clip(r, 1 - eps, 1 + eps) A ) ]   (arXiv 1707.06347, eq. 7)
    """
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.min(ratios * advantages, clipped * advantages).mean()


def normalize(advantages):
    """Advantages (B,) with zero mean and unit (population) standard deviation."""
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


def approximate_kl(log_ratios):
    """An unbiased estimate of KL(pi_old || pi) that is never negative (Schulman's k3).

    KL = E[ (r - 1) - log r ],   r = pi/pi_old
    """
    return (log_ratios.exp() - 1 - log_ratios).mean()


def huber_value_loss(values, old_values, returns, huber_delta, clip_coef=None):
    """Mean Huber loss of tensors (B,). With `clip_coef`, moving a value by more cannot lower its loss.

        L = E[ max( Huber(V - R), Huber(V_old + clip(V - V_old, -eps, eps) - R) ) ]

    This is arXiv 2103.01955, appendix A, with Huber(e) in place of its e². Huber(e) is e²/2 for
    errors |e| up to `huber_delta`, and linear beyond.
    """
    huber = partial(nn.functional.huber_loss, reduction="none", delta=huber_delta)
    errors = huber(values, returns)
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, huber(clipped, returns))
    return errors.mean()


def team_policy_loss(actor, batch, args):
    """The loss of PolicySteps (L, C, …) and a dict of metrics to log. Only active rows count."""
    observed = batch.obs, batch.rnn_states, batch.reset_rows, batch.available_actions
    log_probs, entropies, _ = actor(*observed, batch.actions)
    log_ratios = (log_probs - batch.log_probs)[batch.active]
    pg_loss = policy_loss(log_ratios, batch.advantages[batch.active], args.clip_coef)
    entropy = entropies[batch.active].mean()
    log_ratios = log_ratios.detach()
    metrics = {
        "policy_loss": pg_loss.detach(),
        "entropy": entropy.detach(),
        "approx_kl": approximate_kl(log_ratios),
        "clip_fraction": ((log_ratios.exp() - 1).abs() > args.clip_coef).float().mean(),
    }
    return pg_loss - args.ent_coef * entropy, metrics


def team_value_loss(critic, batch, args):
    """The loss of CriticSteps (L, C, …) and a dict of metrics to log. Only active rows count.

    Returns must be normalised if values are.
    """
    values, _ = critic(batch.share_obs, batch.rnn_states, batch.reset_rows)
    values = values.squeeze(2)[batch.active]
    old_values = batch.values[batch.active]
    returns = batch.returns[batch.active]
    clip_coef = args.clip_vloss_coef if args.clip_vloss else None
    loss = huber_value_loss(values, old_values, returns, args.huber_delta, clip_coef)
    return loss, {"value_loss": loss.detach()}


# ------------------------------------------------------------------------------------------ updates
def update(network, optimizer, loss_function, steps, args, rng, run):
    """All epochs of gradient steps for one network, a policy or the critic, on a rollout's steps."""
    network.train()  # dropout, if you add it, acts in the loss alone
    for _ in range(args.update_epochs):
        for batch in minibatches(steps, args, rng):
            loss, metrics = loss_function(network, batch, args)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
            optimizer.step()
            run.log(**metrics)
    network.eval()


@torch.no_grad()
def ratios_now(actor, steps):
    """r = pi / pi_old, (T, S), of a rollout's PolicySteps; pi is the updated policy.

    Where a row is not active, the ratio is 1.
    """
    observed = steps.obs, steps.rnn_states[0], steps.reset_rows, steps.available_actions
    log_probs, _, _ = actor(*observed, steps.actions)
    return (log_probs - steps.log_probs).masked_fill(~steps.active, 0).exp()


def mappo_update(team, optimizer, all_steps, args, rng, run):
    """MAPPO: no policy's A is corrected for what the updates of the others have changed.

    arXiv 2103.01955, algorithm 1, but the critic learns afterwards.
    """
    for actor, steps in zip(team.actors, all_steps):
        update(actor, optimizer, team_policy_loss, steps, args, rng, run)


def happo_update(team, optimizer, all_steps, args, rng, run):
    """HAPPO: each update multiplies A by the ratios of the policies already updated.

    arXiv 2109.11251, algorithm 4.
    """
    ratios = torch.ones_like(all_steps[0].advantages)  # (T, N), the product of all ratios so far
    for k in rng.permutation(len(team.actors)):
        steps = all_steps[k]._replace(advantages=ratios * all_steps[k].advantages)
        update(team.actors[k], optimizer, team_policy_loss, steps, args, rng, run)
        ratios = ratios * ratios_now(team.actors[k], steps)


# ----------------------------------------------------------------------------------------- training
def train(args):
    """Train with `args`; return the summary, which summary.json holds too. UserError on bad input."""
    envs = make_envs(args, args.num_envs)  # for their spaces: run.new_envs makes those that are played
    team = make_agent(args, envs)  # a Team: see make_team
    set_threads(image=False)
    run = Run(args, envs)
    # One optimiser for all networks: zero_grad sets gradients to None, and a step skips networks without any.
    optimizer = torch.optim.Adam(team.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    factor = lambda _: run.remaining() if args.anneal_lr else 1.0  # multiplies the learning rate
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    run.start(agent=team, optimizer=optimizer, scheduler=scheduler)  # --resume loads their states
    update_policies = happo_update if args.happo else mappo_update

    envs, team_rows, reset_rows, rng = run.new_envs()
    buffer = TeamBuffer(args, team)
    while not run.is_finished():
        rnn_states = buffer.rnn_states  # policy_steps replaces them with those before row T
        for t in range(args.num_steps):
            buffer.team_rows[t] = team_rows
            buffer.reset_rows[t] = reset_rows
            actions, rnn_states = team.sample(team_rows, rnn_states, reset_rows, rng)
            for k, actions_of_policy in enumerate(actions):
                buffer.actions[k][t] = actions_of_policy
            team_rows, rewards, terminated, truncated, infos = envs.step(team.to_env(actions))
            run.count(team_rows, rewards, terminated | truncated, reset_rows=reset_rows)
            buffer.insert_results(t, team_rows, rewards, terminated, truncated, infos)
            reset_rows = terminated | truncated  # the next step only resets these environments
        buffer.team_rows[-1] = team_rows
        buffer.reset_rows[-1] = reset_rows

        critic_steps = buffer.critic_steps(team)
        all_steps = []
        for k in range(len(team.actors)):
            all_steps.append(buffer.policy_steps(team, k, critic_steps.advantages))
        ev = explained_variance(critic_steps)
        run.log(explained_variance=ev, learning_rate=scheduler.get_last_lr()[0])

        update_policies(team, optimizer, all_steps, args, rng, run)
        if team.value_norm is not None:  # after GAE, since the critic's outputs have the old mean and std
            team.value_norm.update(critic_steps.returns[critic_steps.active])
            targets = team.value_norm.normalize(critic_steps.returns)
            critic_steps = critic_steps._replace(returns=targets)
        update(team.critic, optimizer, team_value_loss, critic_steps, args, rng, run)
        scheduler.step()
        # True after a checkpoint. It cannot hold environments, so training makes new ones, as a
        # resumed run does. The old buffer's recurrent states belong to the old episodes.
        if run.write_what_is_due():
            envs, team_rows, reset_rows, rng = run.new_envs()
            buffer = TeamBuffer(args, team)
    return run.finish()


# ===== helpers: settings, parts of the networks, teams of environments ============================

CURVE = {"policy_loss": "policy loss", "value_loss": "value loss", "entropy": "entropy of the policies"}
EXPLORES = False  # training plays the policy itself: its episodes decide --stop-at-return
SCHEDULED = ("anneal_lr",)  # flags that, if they are set, let a schedule end with total_timesteps
ONLY_FLAGS = "resume evaluate model render capture_video config run_dir".split()  # not from config.json
REFUSED_WRAPPERS = {}  # by read_wrapper
SAFE_IDS = r"(mpe2|pettingzoo\.(butterfly|classic|sisl))\.\w+_v\d+"  # that a stranger's config.json may ask for
SUFFIX = ".pt"  # of models and checkpoints. With weights_only, reading them executes nothing:
write_state = torch.save
read_state = partial(torch.load, map_location="cpu", weights_only=True)
manual_seed = torch.manual_seed  # seeds torch, for dropout

# Tuned settings per environment; flags win over them. docs/mappo.md has their scores.
PARTICLES = {"gamma": 0.95, "total_timesteps": 200_000}
TUNED = {
    "mpe2.simple_spread_v3": PARTICLES,
    "mpe2.simple_reference_v3": PARTICLES | {"action_factor": 5, "num_envs": 64, "ent_coef": 0.003,
                                             "total_timesteps": 1_000_000},
    "mpe2.simple_speaker_listener_v4": PARTICLES | {
        "share_policy": False, "num_envs": 64, "ent_coef": 0.03, "total_timesteps": 400_000},
}  # fmt: skip
tuned_settings = lambda args: TUNED.get(args.env_id, {})  # as the run section calls it


def layer(module, gain=2**0.5):
    """Give a linear or convolutional layer orthogonal weights, scaled by `gain`, and zero biases."""
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


def mlp(inputs, hidden_sizes, outputs, gain):
    """Linear layers with tanh between them; `gain` is that of the last layer, which has no tanh."""
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


class ValueNorm(nn.Module):
    """Running mean and standard deviation of the returns, which normalise the critic's targets.

        m <- beta m + (1 - beta) E[R]
        q <- beta q + (1 - beta) E[R²]
        w <- beta w + (1 - beta)   (once a rollout; all start at 0)
        mean = m / w
        variance = q / w - mean²

    Dividing by w is Adam's bias correction (arXiv 1412.6980, section 3). beta is so near to 1 that all
    rollouts of a run count almost alike; it is that of the authors' code for arXiv 2103.01955 (idea:
    section 5.1). Attributes: m is `mean`, q is `mean_square`, w is `weight`.
    """

    def __init__(self, beta=0.99999):
        super().__init__()
        self.beta = beta
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean_square", torch.zeros((), dtype=torch.float64))
        self.register_buffer("weight", torch.zeros((), dtype=torch.float64))

    def update(self, returns):
        """Move the averages towards a batch of returns, a tensor of any shape."""
        returns = returns.detach().cpu().double()
        if returns.numel() == 0:
            return
        self.mean.lerp_(returns.mean(), 1 - self.beta)
        self.mean_square.lerp_(returns.square().mean(), 1 - self.beta)
        self.weight.lerp_(torch.ones_like(self.weight), 1 - self.beta)

    def mean_and_std(self):
        """(mean, standard deviation) of the returns, two floats; the variance is at least 0.01."""
        weight = max(self.weight.item(), 1e-5)
        mean = self.mean.item() / weight
        variance = self.mean_square.item() / weight - mean**2
        return mean, math.sqrt(max(variance, 1e-2))

    def normalize(self, returns):
        """Returns, a tensor, in the units of the critic's outputs."""
        mean, std = self.mean_and_std()
        return (returns - mean) / std

    def denormalize(self, values):
        """The critic's outputs, a tensor, in the units of returns."""
        mean, std = self.mean_and_std()
        return values * std + mean


def explained_variance(steps):
    """Of the critic: 1 if it predicted all its targets R, 0 if no better than a constant.

        EV = 1 - Var(R - V) / Var(R)

    `steps` are CriticSteps; only active rows count.
    """
    errors = steps.advantages[steps.active]  # R - V
    return 1 - errors.var(correction=0) / (steps.returns[steps.active].var(correction=0) + 1e-8)


def chunk_length(args):
    """L, the number of successive steps in a chunk of a minibatch."""
    if not args.recurrent:
        return 1
    return args.data_chunk_length or args.num_steps


def can_be_split(space, size):
    """Whether actions are Discrete(n), n a larger multiple of `size`.

    Then action % size and action // size are the factors. mpe2 makes one number of a move (one of
    five) and a message. A policy with one logit for each such number has to learn the message
    separately for every move; with two factors it learns to move, and to speak.
    """
    return isinstance(space, spaces.Discrete) and space.n > size > 1 and space.n % size == 0


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


def make_team(args, envs):
    """An untrained Team for these environments. UserError if arguments or spaces do not fit."""
    layout = envs.metadata["layout"]
    action_spaces = envs.single_action_space.spaces
    for space in action_spaces:
        if not isinstance(space, spaces.Discrete | spaces.Box | spaces.MultiDiscrete):
            raise UserError(f"{args.env_id}: no Team for actions {space}")
    obs_sizes = {part.stop - part.start for part in layout.observations}
    alike = len(obs_sizes) == 1 and all(space == action_spaces[0] for space in action_spaces)
    if args.share_policy and not alike:
        advice = "add --no-share-policy; opponents also need --state-type FP --agent-rewards"
        raise UserError(f"the agents of {args.env_id} differ: {advice}")
    if args.happo and args.share_policy:
        raise UserError("happo updates one policy after the other: add --no-share-policy")
    if args.agent_rewards and args.state_type == "EP":
        raise UserError("agent_rewards needs a value for each agent: add --state-type FP")
    if args.happo and args.agent_rewards:
        raise UserError("happo is for a team: without --agent-rewards")
    if args.recurrent and not args.hidden_sizes:
        raise UserError("hidden_sizes needs a layer, which the GRU follows")
    size = args.action_factor
    if size and not any(can_be_split(space, size) for space in action_spaces):
        needed = "Discrete(n) actions, n a larger multiple of it: see --action-factor 0"
        raise UserError(f"no agent has what action_factor = {size} needs, {needed}")
    if size and layout.available[-1].stop > layout.available[0].start:
        raise UserError("action_factor cannot be used with action masks, which are not of factors")
    length = chunk_length(args)
    if length < 1 or args.num_steps % length != 0:
        raise UserError(f"data_chunk_length = {length} does not divide num_steps = {args.num_steps}")
    chunks = args.num_envs * args.num_steps // length
    if args.num_minibatches > chunks:
        raise UserError(f"num_minibatches must be at most num_envs * num_steps / chunk length = {chunks}")
    torch.manual_seed(args.seed)
    return Team(layout, action_spaces, args, choose_device(args)).eval()


make_agent = make_team  # as the run section calls it


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
