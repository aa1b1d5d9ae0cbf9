# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2",
#   "tyro==1.0.17", "tqdm==4.70.1", "moviepy==2.2.1",
# ]
# ///
"""Proximal policy optimisation (PPO) that never takes an invalid action, all of it, in this one file.

In many tasks most actions are invalid most of the time. The environment knows which, and gives the agent a mask
m(s), true for each valid action. To learn this from penalties is slow, and hopeless where hundreds of actions are
invalid. Instead, the logits l of invalid actions are set to minus infinity (in the paper: to -1e8) before the softmax,

    pi(a|s) = m_a exp(l_a) / sum_b m_b exp(l_b)     (after arXiv 2006.14171, section 3)

both when acting and when learning. This is a policy like any other: the policy gradient theorem holds for it. The
logits of invalid actions get no gradient. All else is as in ppo.py with GAE; `diff ppo.py ppo_masked.py` compares them.

    python ppo_masked.py                       # Taxi-v4, a minute or two
    python ppo_masked.py --no-mask             # the same without masks: far worse
    python ppo_masked.py --evaluate runs/DIR   # evaluate the trained agent

Papers: invalid action masking arXiv 2006.14171, PPO arXiv 1707.06347, GAE arXiv 1506.02438.
The story ends at "# ===== helpers"; the code below it makes environments, keeps the run folder and draws the curve.
"""

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

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium import spaces
from torch import nn
from tqdm import tqdm


@dataclass(kw_only=True)
class Args:
    """Every flag and its default. For some environments, Taxi included, TUNED (below) overrides these."""

    # algorithm
    no_mask: bool = False  # ablation: ignore the masks; only rewards show which actions are bad
    naive_mask: bool = False  # ablation: use the masks for acting (pi_old), but not for learning (pi)
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
    target_kl: float | None = None  # stop the epochs once the KL divergence in an epoch's last minibatch exceeds this
    hidden_sizes: tuple[int, ...] = (64, 64)  # sizes of the actor's hidden layers
    critic_hidden_sizes: tuple[int, ...] | None = None  # sizes of the critic's; None: as the actor's
    normalize_reward: bool = False  # divide rewards by the running standard deviation of the discounted return
    clip_reward: bool = False  # learn from the signs of rewards; reported returns stay unclipped
    # run
    env_id: str = "Taxi-v4"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers, applied in order
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    total_timesteps: int = 500_000  # environment steps to train for (resets do not count)
    stop_at_return: float | None = None  # stop once the mean of the last 100 training episodes reaches this
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


# ---------------------------------------------------------------------------------------------------------- masks
# A mask is a row of booleans, True for every valid choice. Discrete: one for each action. MultiDiscrete: one for each
# choice of each factor, the factors side by side. MultiBinary: two for each bit, "may be 0" and "may be 1".


class MaskedCategorical:
    """Independent categorical factors, each a softmax over its valid choices only.

    `logits` and `mask`, each (…, sum of `sizes`), hold the factors side by side. Without `sizes` there is one factor,
    and actions are (…) instead of (…, factors). Without `mask` every choice is valid. ValueError if a mask holds a NaN,
    or leaves a factor without a valid choice. The logits of invalid choices get a gradient of exactly zero.
    """

    def __init__(self, logits, mask=None, sizes=None):
        self.single = sizes is None
        if sizes is None:
            sizes = [logits.shape[-1]]
        if mask is None:
            mask = torch.ones_like(logits, dtype=torch.bool)
        mask = torch.as_tensor(mask, device=logits.device)
        check_masks(mask.reshape(-1, sum(sizes)).cpu().numpy(), sizes)
        mask = mask.bool()
        logits = torch.where(mask, logits, -torch.inf)
        self.log_probs = [factor.log_softmax(-1) for factor in logits.split(sizes, -1)]
        self.masks = mask.split(sizes, -1)

    def sample(self, generator=None):
        """Random actions, by default from torch's global generator. (`train` calls MaskedAgent.sample instead.)"""
        draws = []
        for log_probs in self.log_probs:
            probs = log_probs.exp()
            draw = torch.multinomial(probs.reshape(-1, probs.shape[-1]), 1, generator=generator)
            draws.append(draw.reshape(probs.shape[:-1]))
        return self.join(draws)

    def mode(self):
        """The likeliest actions."""
        return self.join([log_probs.argmax(-1) for log_probs in self.log_probs])

    def join(self, choices):
        """Actions (…, factors) from a list of each factor's choices (…); without `sizes`, actions (…)."""
        return choices[0] if self.single else torch.stack(choices, -1)

    def log_prob(self, actions):
        """Log-probs (…) of actions: sums over the factors, minus infinity for an invalid action."""
        actions = actions.unsqueeze(-1) if self.single else actions
        log_prob = 0
        for log_probs, action in zip(self.log_probs, actions.split(1, -1)):
            log_prob = log_prob + log_probs.gather(-1, action).squeeze(-1)
        return log_prob

    def entropy(self):
        """Entropies (…) in nats: sums over the factors, to which invalid choices add nothing."""
        entropy = 0
        for log_probs, mask in zip(self.log_probs, self.masks):
            finite_log_probs = torch.where(mask, log_probs, 0.0)  # 0 * -inf would be NaN, here or in the gradient
            entropy = entropy - (log_probs.exp() * finite_log_probs).sum(-1)
        return entropy


# ------------------------------------------------------------------------------------------------------- networks
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


class MaskedAgent(nn.Module):
    """Actor and critic: two MLPs for vectors, discrete numbers, or Dicts with such entries.

    A discrete action consists of categorical factors: Discrete has one, MultiDiscrete has several, MultiBinary one of
    two categories for each bit. Everywhere but in the environment, actions are (B, factors). Observations are
    (B, features): all entries side by side, a discrete number as one feature.
    """

    def __init__(self, entries, action_space, args, device="cpu"):
        super().__init__()
        self.device = device
        self.entries = entries  # {name: space} of a Dict observation; any other is one entry, called "observation"
        self.action_space = action_space
        self.sizes = output_sizes(action_space)  # choices of each factor; below, `choices` is their sum
        inputs = sum(spaces.flatdim(space) for space in entries.values())  # discrete numbers as one-hot vectors
        critic_sizes = args.hidden_sizes if args.critic_hidden_sizes is None else args.critic_hidden_sizes
        # The actor's small gain makes the first policy nearly uniform.
        self.actor = mlp(inputs, args.hidden_sizes, sum(self.sizes), gain=0.01)
        self.critic = mlp(inputs, critic_sizes, 1, gain=1.0)
        for network in (self.actor, self.critic):
            network[0] = LinearOnEntries(network[0], entries)  # takes discrete numbers themselves
        self.feature_space = spaces.Box(-np.inf, np.inf, (sum(self.actor[0].features),))  # what `split` returns
        self.to(device)
        # Created after the move, so that they stay on the CPU: they are float64, which some devices lack.
        self.return_stats = RunningMeanStd() if args.normalize_reward else None

    def forward(self, obs, actions, masks=None):
        """(log-probs, entropies, values), each (B,), of tensors of observations (B, features) and actions (B, factors).

        The log-probs and entropies are those under `masks` (B, choices); without masks every action is valid.
        """
        pi = MaskedCategorical(self.actor(obs), masks, self.sizes)
        return pi.log_prob(actions), pi.entropy(), self.critic(obs).squeeze(1)

    def draw_noise(self, rng, num_steps, num_envs):
        """Noise (num_steps, num_envs, choices) by which `sample` draws from the policy; `rng` is a NumPy generator."""
        noise = rng.gumbel(size=(num_steps, num_envs, sum(self.sizes)))
        return torch.as_tensor(noise, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def sample(self, obs, masks, noise):
        """Valid actions (B, factors) for NumPy arrays of observations and masks; `noise` (B, choices) from draw_noise.

        The argmax (`mode`) of masked logits + Gumbel noise is a draw from their softmax (the Gumbel-max trick). With
        noise 0 the actions are the likeliest.
        """
        noisy_logits = self.actor(obs) + noise
        return MaskedCategorical(noisy_logits, masks, self.sizes).mode().cpu().numpy()

    def split(self, obs_and_masks):
        """Cut rows of MaskedEnvs, (B, features + choices), in two: (observations, masks as booleans)."""
        choices = sum(self.sizes)
        return obs_and_masks[:, :-choices], obs_and_masks[:, -choices:].astype(bool)

    def act(self, obs_and_masks):
        """What the deterministic policy does, as the environment takes it: evaluations call this."""
        obs, masks = self.split(obs_and_masks)
        return self.to_env(self.sample(obs, masks, noise=0))

    def to_env(self, actions):
        """Actions (B, factors) as the environment takes them: in the space's shape and type."""
        space = self.action_space
        actions = actions.reshape(-1, *space.shape)
        return (actions + getattr(space, "start", 0)).astype(space.dtype)  # Discrete may start elsewhere


# --------------------------------------------------------------------------------------------- returns and buffer
# All tensors are time-major, (T, N). next_values[t] is the critic's value of the observation after step t. After
# termination it counts as 0: nothing follows. After truncation it stands for the rewards that were cut off. Rewards of
# later episodes never count. If both flags are set, terminated wins.


def compute_gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalised advantage estimation: (advantages A_t, returns A_t + V(s_t)), each (T, N).

    A_t = delta_t + gamma lambda A_{t+1}
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


# Flat tensors (B, …) of the same rows, named as in sb3-contrib; in the Dict version, observations are a dict.
# old: of the agent that played the rollout, with which the loss compares the agent now.
SAMPLES = "observations actions old_values old_log_prob advantages returns action_masks"
MaskableRolloutBufferSamples = namedtuple("MaskableRolloutBufferSamples", SAMPLES)
MaskableDictRolloutBufferSamples = namedtuple("MaskableDictRolloutBufferSamples", SAMPLES)


class MaskableRolloutBuffer:
    """One rollout, time-major (T, N, …), with the mask of every observation.

    After an episode's end the next step only resets its environment (next-step autoreset). Its action is ignored:

        row  observation          action   reward  terminated  reset row
         0   s0                   a0       r0      no          no
         1   s1                   a1       r1      yes         no
         2   s2, the final one    ignored  0       no          yes
         3   s0 of the next one   a0       r0      no          no

    Row 2 never enters a minibatch, but it holds s2. So the successor of step t is always the observation in row t + 1,
    whether or not an episode ended in between. Row 2 needs no mask: MaskedEnvs and `add` make everything valid there.
    """

    samples = MaskableRolloutBufferSamples

    def __init__(self, num_steps, num_envs, observation_space, action_space):
        T, N = num_steps, num_envs
        D = math.prod(action_space.shape)  # 1 for Discrete, whose shape is ()
        self.sizes = output_sizes(action_space)
        self.obs = np.zeros((T + 1, N, *observation_space.shape), np.float32)  # row T: what the last step led to
        self.actions = np.zeros((T, N, D), np.int64)
        self.action_masks = np.ones((T, N, sum(self.sizes)), bool)
        self.rewards = np.zeros((T, N), np.float32)
        self.terminated = np.zeros((T, N), bool)
        self.truncated = np.zeros((T, N), bool)
        self.reset_rows = np.zeros((T, N), bool)
        self.discounted_returns = np.zeros(N)  # G of the episodes under way: see scale_rewards
        self.rng = np.random.default_rng(0)  # shuffles the rows for `get`

    def set_obs(self, t, obs):
        """Set the observations (N, …) of row t."""
        self.obs[t] = obs

    def observations(self, obs):
        """What the agent takes for stored observations (B, …), a tensor: here the same, in the Dict version a dict."""
        return obs

    def add(self, t, obs, actions, rewards, terminated, truncated, reset_rows, action_masks=None):
        """Set row t for all environments; all arguments but t are (N, …). Without masks every action is valid."""
        self.set_obs(t, obs)
        self.actions[t] = actions
        self.rewards[t] = rewards
        self.terminated[t] = terminated
        self.truncated[t] = truncated
        self.reset_rows[t] = reset_rows
        masks = np.ones_like(self.action_masks[t]) if action_masks is None else np.array(action_masks)
        masks[self.reset_rows[t]] = True  # the actions there are ignored
        check_masks(masks, self.sizes)
        self.action_masks[t] = masks

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

    @torch.no_grad()
    def log_probs_and_values(self, agent):
        """Log-probs (T, N) of the actions and values (T + 1, N) of the observations under the agent as it is now."""
        T, N, choices = self.action_masks.shape
        rows = [torch.as_tensor(x, device=agent.device) for x in (self.obs[:-1], self.actions, self.action_masks)]
        log_probs = []
        values = []
        size = 1 + 2**22 // choices  # rows per forward pass: about 2**22 logits, since a row may have 50,000
        for obs, actions, masks in zip(*[field.flatten(0, 1).split(size) for field in rows]):
            log_prob, _, value = agent(self.observations(obs), actions, masks)
            log_probs.append(log_prob)
            values.append(value)
        last_obs = self.observations(torch.as_tensor(self.obs[-1], device=agent.device))
        values.append(agent.critic(last_obs).squeeze(1))
        return torch.cat(log_probs).view(T, N), torch.cat(values).view(T + 1, N)

    def compute_advantages(self, log_probs, values, args):
        """Set what else the samples hold, each (T, N), and `played`.

        log_probs (T, N) and values (T + 1, N) are those of the agent that has just played.
        """
        self.played = torch.as_tensor(~self.reset_rows, device=values.device)
        self.old_log_probs = log_probs
        self.old_values = values[:-1]
        rewards = torch.as_tensor(self.rewards, device=values.device)
        terminated = torch.as_tensor(self.terminated, device=values.device)
        truncated = torch.as_tensor(self.truncated, device=values.device)
        steps = rewards, values[:-1], values[1:], terminated, truncated
        self.advantages, self.returns = compute_gae(*steps, args.gamma, args.gae_lambda)

    def minibatches(self, num_minibatches, rng):
        """Yield samples that together hold every row but the reset rows once, in random order."""
        order = rng.permutation(np.flatnonzero(~self.reset_rows))
        for rows in np.array_split(order, num_minibatches):
            if len(rows) > 0:  # reset rows may have left fewer rows than minibatches
                yield self.take(rows)

    def get(self, batch_size=None, rng=None):
        """The same for loops of your own, as in sb3-contrib: `batch_size` rows at a time (None: all at once).

        The last samples may have fewer rows. `rng` is a NumPy generator; without one the buffer takes its own.
        """
        order = (rng or self.rng).permutation(np.flatnonzero(~self.reset_rows))
        size = batch_size or max(1, len(order))
        for first in range(0, len(order), size):
            yield self.take(order[first : first + size])

    def take(self, rows):
        """The samples of an array of row numbers; step t of environment n has the number t * N + n."""
        steps, envs = np.divmod(rows, self.rewards.shape[1])
        as_tensor = partial(torch.as_tensor, device=self.returns.device)
        return self.samples(
            observations=self.observations(as_tensor(self.obs[steps, envs])),
            actions=as_tensor(self.actions[steps, envs]),
            old_values=self.old_values[steps, envs],
            old_log_prob=self.old_log_probs[steps, envs],
            advantages=self.advantages[steps, envs],
            returns=self.returns[steps, envs],
            action_masks=as_tensor(self.action_masks[steps, envs]),
        )

    def explained_variance(self):
        """1 - Var(R - V) / Var(R): 1 if the critic foresaw all returns R, 0 if it was no better than a constant."""
        returns = self.returns[self.played]
        errors = returns - self.old_values[self.played]
        return 1 - errors.var(correction=0) / (returns.var(correction=0) + 1e-8)


# --------------------------------------------------------------------------------------------------------- losses
def policy_loss(log_ratios, advantages, clip_coef):
    """The clipped surrogate, negated; log_ratios (B,) = log pi - log pi_old.

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
    """Zero mean and unit (population) deviation over the batch (B,)."""
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


def approximate_kl(log_ratios):
    """An unbiased estimate of KL(mu || pi) that is never negative; mu is the policy that played.

    KL = E[ (r - 1) - log r ],   r = pi/mu
    """
    return (log_ratios.exp() - 1 - log_ratios).mean()


def masked_ppo_loss(agent, batch, args):
    """The loss of a batch of samples, to be minimised, and a dict of figures to log."""
    # The same masks as for acting: pi/pi_old is 1 at first. With --naive-mask it is lower, and approx_kl is too low.
    masks = None if args.naive_mask else batch.action_masks
    log_probs, entropies, values = agent(batch.observations, batch.actions, masks)
    log_ratios = log_probs - batch.old_log_prob
    advantages = normalize(batch.advantages) if args.norm_adv else batch.advantages
    clip_vloss = args.clip_vloss_coef if args.clip_vloss else None
    pg_loss = policy_loss(log_ratios, advantages, args.clip_coef)
    v_loss = value_loss(values, batch.old_values, batch.returns, clip_vloss)
    entropy = entropies.mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    log_ratios = log_ratios.detach()
    figures = {
        "loss": loss.detach(),
        "policy_loss": pg_loss.detach(),
        "value_loss": v_loss.detach(),
        "entropy": entropy.detach(),
        "approx_kl": approximate_kl(log_ratios),
        "clip_fraction": ((log_ratios.exp() - 1).abs() > args.clip_coef).float().mean(),
    }
    return loss, figures


# ------------------------------------------------------------------------------------------------------- training
def train(args):
    """Train with `args`; return the summary, a dict that summary.json holds as well. UserError on bad input."""
    envs = make_envs(args, args.num_envs)
    agent = make_agent(args, envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    print(f"action masks come from {envs.source}")
    run = Run(args, agent, envs, optimizer=optimizer)  # with --resume, it loads a checkpoint into these

    while not run.is_finished():
        if run.step == run.checkpoint_step:  # at the start and at each checkpoint, so that a resumed run does the same
            envs, obs_and_masks, rng = run.new_envs()  # a row for each environment: its observation, then its mask
            ended = np.zeros(args.num_envs, bool)  # environments whose next step only resets them
            buffer = MaskableRolloutBuffer(args.num_steps, args.num_envs, agent.feature_space, agent.action_space)
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - run.step / args.total_timesteps)

        noise = agent.draw_noise(rng, args.num_steps, args.num_envs)  # all at once: faster than in every step
        for t in range(args.num_steps):
            obs, masks = agent.split(obs_and_masks)
            actions = agent.sample(obs, masks, noise[t])
            obs_and_masks, rewards, terminated, truncated, _ = envs.step(agent.to_env(actions))
            buffer.add(t, obs, actions, rewards, terminated, truncated, ended, masks)
            ended = terminated | truncated
        last_obs, _ = agent.split(obs_and_masks)
        buffer.set_obs(args.num_steps, last_obs)
        ends = buffer.terminated | buffer.truncated
        run.count(buffer.obs, buffer.rewards, ends, buffer.reset_rows)  # advances run.step, notes the true returns
        if args.clip_reward:
            buffer.rewards = np.sign(buffer.rewards)
        if args.normalize_reward:
            buffer.scale_rewards(agent.return_stats, args.gamma)

        log_probs, values = buffer.log_probs_and_values(agent)  # of the agent that has just played
        buffer.compute_advantages(log_probs, values, args)
        run.log(learning_rate=optimizer.param_groups[0]["lr"], explained_variance=buffer.explained_variance())

        for _ in range(args.update_epochs):
            for batch in buffer.minibatches(args.num_minibatches, rng):
                loss, figures = masked_ppo_loss(agent, batch, args)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
                run.log(**figures)
            if args.target_kl is not None and figures["approx_kl"] > args.target_kl:
                break

        run.write_what_is_due()  # a row of metrics.csv, an evaluation, a checkpoint
    return run.finish()


# ===== helpers: settings, parts of the networks, environments =========================================================

LEAST_1 = "num_envs total_timesteps max_episode_steps eval_episodes num_minibatches update_epochs hidden_sizes".split()
RANGES = dict.fromkeys([*LEAST_1, "critic_hidden_sizes"], (1, 1e15))
RANGES |= {"num_steps": (2, 1e15), "gamma": (0, 1), "gae_lambda": (0, 1)}
RANGES |= dict.fromkeys(["stop_at_return", "max_episode_return"], (-1e15, 1e15))
CURVE = {"policy_loss": "policy loss", "value_loss": "value loss", "entropy": "entropy of the policy"}  # curve's panels
EXPLORES = False  # whether an evaluation decides --stop-at-return (training explores), or training episodes do
SAFE_IDS = r"[^:]*"  # ids that a stranger's config.json may ask for: module:Id would import the module
SUFFIX = ".pt"  # of models and checkpoints. How they are stored; with weights_only, reading executes nothing:
write_state = torch.save
read_state = partial(torch.load, map_location="cpu", weights_only=True)

# Tuned settings per environment; flags win over them. docs/ppo_masked.md says how they were confirmed.
TUNED = {
    "Taxi-v4": {"num_envs": 16, "learning_rate": 2e-3, "gamma": 0.98, "ent_coef": 0.01, "total_timesteps": 300_000},
}
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


def is_image(space):
    """Whether a Box holds images (uint8, channels first or last), large enough for the CNN."""
    return space.dtype == np.uint8 and len(space.shape) == 3 and sorted(space.shape)[1] >= 36


class LinearOnEntries(nn.Module):
    """A linear layer on all entries of an observation, side by side. Discrete numbers count as one-hot vectors.

    A matrix times a one-hot vector is one column of the matrix. This column is looked up: fast, even for 500 states.
    """

    def __init__(self, linear, entries):
        super().__init__()
        self.linear = linear
        self.entries = entries
        self.features = [math.prod(space.shape) for space in entries.values()]  # a discrete number is one feature
        self.columns = [spaces.flatdim(space) for space in entries.values()]  # columns of the matrix for each entry
        if all(isinstance(space, spaces.Discrete | spaces.MultiDiscrete) for space in entries.values()):
            linear.bias.requires_grad_(False)  # stays 0: else learning in one state would change all others

    def forward(self, obs):
        """(B, outputs) of an array or a tensor (B, features), or of a dict of the entries (B, …)."""
        output = self.linear.bias
        parts = [obs[name] for name in self.entries] if isinstance(obs, dict) else [obs]
        parts = [torch.as_tensor(part, device=output.device).reshape(len(part), -1) for part in parts]
        parts = torch.cat(parts, dim=1).split(self.features, dim=1)
        weights = self.linear.weight.split(self.columns, dim=1)
        for space, part, weight in zip(self.entries.values(), parts, weights):
            if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
                first_columns = np.cumsum([0, *output_sizes(space)[:-1]]) - np.ravel(space.start)
                columns = part.long() + torch.as_tensor(first_columns, device=part.device)
                output = output + nn.functional.embedding(columns, weight.T).sum(1)
            else:
                output = output + part.float() @ weight.T
        return output


def output_sizes(space):
    """Categories of each factor of a discrete action space; of a Box, its number of dimensions."""
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ravel().tolist()
    if isinstance(space, spaces.MultiBinary):
        return [2] * math.prod(space.shape)
    return [int(spaces.flatdim(space))]


class ReturnLimit(gym.wrappers.RecordEpisodeStatistics):
    """Truncate an episode once its return reaches `limit`."""

    def __init__(self, env, limit):
        super().__init__(env)
        self.limit = limit

    def step(self, action):
        """As the environment's, truncated at the limit."""
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated or self.episode_returns >= self.limit, info


def check_masks(masks, sizes):
    """ValueError if a row of masks, a NumPy array (B, sum of sizes), holds a NaN or leaves a factor no valid choice.

    It names the first such row. `sizes` are the numbers of choices of the factors.
    """
    has_nan = np.isnan(masks).any(axis=1)
    if has_nan.any():  # as a boolean, a NaN would be True: valid
        raise ValueError(f"row {has_nan.argmax()}: the action mask holds a NaN")
    first_columns = np.cumsum([0, *sizes[:-1]])
    can_act = np.logical_or.reduceat(masks, first_columns, axis=1).all(axis=1)
    if not can_act.all():
        raise ValueError(f"row {can_act.argmin()}: the action mask leaves no valid action")


class MaskableDictRolloutBuffer(MaskableRolloutBuffer):
    """A MaskableRolloutBuffer for your own loops with Dict observations: takes dicts of arrays, gives dicts of tensors.

    Inside, the entries stand side by side, as in `train`.
    """

    samples = MaskableDictRolloutBufferSamples

    def __init__(self, num_steps, num_envs, observation_space, action_space):
        self.shapes = {name: space.shape for name, space in observation_space.items()}
        self.widths = [math.prod(shape) for shape in self.shapes.values()]
        flat_space = spaces.Box(-np.inf, np.inf, (sum(self.widths),))
        super().__init__(num_steps, num_envs, flat_space, action_space)

    def set_obs(self, t, obs):
        """Set the observations of row t, a dict of arrays (N, …)."""
        columns = [np.reshape(obs[name], (len(obs[name]), -1)) for name in self.shapes]
        self.obs[t] = np.concatenate(columns, axis=1)

    def observations(self, obs):
        """Stored observations (B, …), a tensor, as the agent takes them: a dict of tensors."""
        entries = {}
        for name, columns in zip(self.shapes, obs.split(self.widths, dim=1)):
            entries[name] = columns.reshape(-1, *self.shapes[name])
        return entries


class MaskedEnvs(gym.vector.VectorWrapper):
    """A vector environment whose observations (N, features + choices) hold the features first, then the action mask.

    Both are in one array of float32, since Run and `evaluate`, the same in every script, know nothing of masks. Only
    MaskedAgent.split cuts them apart. `entries` is {name: space} of the features. `source` says where masks come from.
    """

    ENTRY = 'the entry "action_mask" of a Dict observation'
    METHOD = "a method action_masks()"
    INFO = 'info["action_mask"]'
    NOWHERE = "nowhere: every action counts as valid"

    def __init__(self, envs, args):
        super().__init__(envs)
        self.args = args
        self.steps = 0  # since the environments were made
        self.choices = sum(output_sizes(envs.single_action_space))
        space = envs.single_observation_space
        self.entries = dict(space) if isinstance(space, spaces.Dict) else {"observation": space}
        self.source = self.INFO
        if any(env.has_wrapper_attr("action_masks") for env in getattr(envs.unwrapped, "envs", ())):
            self.source = self.METHOD
        if self.entries.pop("action_mask", None) is not None:
            self.source = self.ENTRY
        if args.no_mask:
            self.source = self.NOWHERE

    def reset(self, **kwargs):
        """As the environment's, with masks. UserError if the environment has none."""
        obs, infos = self.env.reset(**kwargs)
        if self.source == self.INFO and "action_mask" not in infos:
            places = f"neither {self.ENTRY}, nor {self.METHOD}, nor {self.INFO} is there"
            raise UserError(f"{self.args.env_id} has no action masks: {places}")
        return self.rows(obs, infos, np.zeros(self.num_envs, bool)), infos

    def step(self, actions):
        """As the environment's, with masks."""
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        self.steps += 1
        return self.rows(obs, infos, terminated | truncated), rewards, terminated, truncated, infos

    def rows(self, obs, infos, ended):
        """Features and masks side by side. UserError if a mask has the wrong width, holds a NaN or leaves no choice.

        Every action counts as valid where the episode has `ended` (N,), because the next action is ignored there.
        """
        masks = np.ones((self.num_envs, self.choices))
        try:
            for n in np.flatnonzero(~ended):
                masks[n] = np.reshape(self.mask(n, obs, infos), self.choices)
            check_masks(masks, output_sizes(self.single_action_space))
        except ValueError as error:
            where = f"{self.args.env_id}, after {self.steps} steps, masks {self.choices} wide from {self.source}"
            raise UserError(f"{where}: {error}") from error
        parts = [obs[name] for name in self.entries] if isinstance(obs, dict) else [obs]
        parts.append(masks != 0)
        return np.concatenate([part.reshape(self.num_envs, -1) for part in parts], axis=1, dtype=np.float32)

    def mask(self, n, obs, infos):
        """The mask of environment n; all ones if it gives none."""
        if self.source == self.ENTRY:
            return obs["action_mask"][n]
        if self.source == self.METHOD:
            return self.unwrapped.envs[n].get_wrapper_attr("action_masks")()
        if self.source == self.INFO and "action_mask" in infos and infos["_action_mask"][n]:
            return infos["action_mask"][n]
        return np.ones(self.choices)


def make_masked_envs(args, num_envs, render=False, video=None):
    """MaskedEnvs with next-step autoreset, if asked in a window or filmed. UserError if it fails."""
    try:
        kwargs = dict(**json.loads(args.env_kwargs))
        wrappers = [globals().get(path) or pkgutil.resolve_name(path) for path in args.wrappers]
        if args.max_episode_steps is not None:
            kwargs["max_episode_steps"] = args.max_episode_steps
        if args.max_episode_return is not None:
            wrappers.append(partial(ReturnLimit, limit=args.max_episode_return))
        if render or video:
            kwargs["render_mode"] = "rgb_array" if video else "human"
        if video:
            wrappers.append(partial(gym.wrappers.RecordVideo, video_folder=str(video)))
        mode = "sync" if wrappers or render else None  # None: the environment's own vector version, if it has one
        envs = gym.make_vec(args.env_id, num_envs, vectorization_mode=mode, wrappers=wrappers, **kwargs)
    except (ImportError, AttributeError, TypeError, ValueError, LookupError, AssertionError) as error:
        raise UserError(f"cannot make {args.env_id} with env_kwargs {args.env_kwargs}: {error}") from error
    if envs.metadata["autoreset_mode"] != gym.vector.AutoresetMode.NEXT_STEP:
        raise UserError(f"{args.env_id}: its vector version does not reset in the step after an episode's end")
    return MaskedEnvs(envs, args)


make_envs = make_masked_envs  # as the run section calls it


def choose_device(args, image=False):
    """The device that args.device means. UserError if there is no such device."""
    automatic = "cuda" if image and torch.cuda.is_available() else "cpu"
    device = automatic if args.device == "auto" else args.device
    try:
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"no device {device}: {error}") from error
    return device


def make_masked_agent(args, envs):
    """An untrained MaskedAgent for these environments. UserError if it cannot handle a space or finds no masks."""
    action_space = envs.single_action_space
    discrete = spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    if not isinstance(action_space, discrete):
        raise UserError(f"{args.env_id}: no masks for actions {action_space}; ppo.py takes Box actions")
    for name, space in envs.entries.items():
        if not isinstance(space, discrete | spaces.Box) or is_image(space):
            raise UserError(f"{args.env_id}: no MaskedAgent for {name}, {space}; --wrappers may change it")
    if args.no_mask and args.naive_mask:
        raise UserError("no_mask and naive_mask are different ablations: choose one")
    if args.num_envs * args.num_steps < 2 * args.num_minibatches:
        raise UserError("a rollout of num_envs x num_steps rows must give each of num_minibatches two rows at least")
    envs.reset(seed=args.seed)  # raises a UserError if there are no masks
    device = choose_device(args)
    torch.manual_seed(args.seed)
    agent = MaskedAgent(envs.entries, action_space, args, device)
    agent.args = args  # for evaluate(agent, agent.args) in a notebook
    return agent


make_agent = make_masked_agent  # as the run section calls it


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
