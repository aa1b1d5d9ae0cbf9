# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.3,<2", "ufal-pybox2d>=2.3.10.5",
#   "numpy>=1.26", "matplotlib>=3.8", "tyro>=1.0", "tqdm>=4.66", "moviepy>=2.0",
# ]
# ///
"""Proximal policy optimisation (PPO) that never takes an invalid action, all of it, in this one file.

In many tasks most actions are invalid most of the time. The environment knows which, and gives the
agent a mask m(s): 1 for each valid action, 0 for the others (MaskedEnvs reads it). To learn this
from penalties is slow, and hopeless where hundreds of actions are invalid. Instead, the logits l of
invalid actions are set to minus infinity (in the paper: to -1e8) before the softmax:

    pi(a|s) = (m_a exp(l_a)) / (sum_b m_b exp(l_b))   (after arXiv 2006.14171, section 3)

both when acting and when learning. This is a policy like any other: the policy gradient theorem
holds for it. The logits of invalid actions get no gradient. All else is as in ppo.py with GAE;
`diff ppo.py ppo_masked.py` compares them.

    python ppo_masked.py                       # Taxi-v4, a minute or two
    python ppo_masked.py --no-mask             # the same without masks: far worse
    python ppo_masked.py --evaluate runs/DIR   # evaluate the trained agent

Papers: invalid action masking arXiv 2006.14171, PPO arXiv 1707.06347, GAE arXiv 1506.02438. The
algorithm ends at "# ===== helpers"; below it are settings, parts of the networks, environments and the
run folder.
"""

import ast
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
    """Every flag and its default; TUNED (below) has others, as for Taxi. A given flag wins."""

    # algorithm
    no_mask: bool = False  # ablation: ignore the masks; only rewards show which actions are bad
    naive_mask: bool = False  # ablation: masks for acting (pi_old), but not for learning (pi)
    learning_rate: float = 3e-4  # Adam's learning rate
    anneal_lr: bool = False  # lower the learning rate linearly to zero; for runs of known length
    num_envs: int = 2  # environments side by side; more are faster
    num_steps: int = 1024  # steps per environment and rollout; episodes may go on in the next
    num_minibatches: int = 32  # parts of a rollout, one gradient step each; here of 64 steps
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
    hidden_sizes: tuple[int, ...] = (64, 64)  # of the actor's hidden layers
    critic_hidden_sizes: tuple[int, ...] = ()  # of the critic's; none: as the actor's
    normalize_reward: bool = True  # divide rewards by the standard deviation of their discounted sum; at most ±10
    clip_reward: bool = False  # learn from the signs of rewards; reported returns are true ones
    checkpoint_every: int = 0  # steps between checkpoints, which restart all episodes; 0: 5,000 * num_envs or more
    # run
    env_id: str = "Taxi-v4"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths, applied in order; with arguments: a.B(size=4)
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    async_envs: bool = False  # a process for each environment: for environments slower than 1 ms a step
    total_timesteps: int = 500_000  # environment steps to train for at least; resets do not count
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


# -------------------------------------------------------------------------------------------- masks
# A mask is a row of booleans, True for every valid choice. Discrete: one for each action.
# MultiDiscrete: one for each choice of each factor (entry of an action), the factors side by side.
# MultiBinary: two for each bit, "may be 0" and "may be 1".


class MaskedCategorical:
    """Independent categorical factors, each a softmax over its valid choices only.

    `logits` and `mask`, each (…, sum of `sizes`), hold the factors side by side. Without `sizes`
    there is one factor, and actions are (…) instead of (…, factors). Without `mask` every choice is
    valid. ValueError if a mask has other values, or leaves a factor no valid choice. The logits of
    invalid choices get a gradient of exactly zero.
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
        """Random actions, for your own loops; by default from torch's global generator."""
        draws = []
        for log_probs in self.log_probs:
            probs = log_probs.exp()
            draw = torch.multinomial(probs.reshape(-1, probs.shape[-1]), 1, generator=generator)
            draws.append(draw.reshape(probs.shape[:-1]))
        return self.join(draws)

    def mode(self):
        """The most likely actions."""
        return self.join([log_probs.argmax(-1) for log_probs in self.log_probs])

    def join(self, choices):
        """Actions (…, factors) from a list of each factor's choices (…); without `sizes`, (…)."""
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
            # 0 * -inf would be NaN, here or in the gradient.
            finite_log_probs = torch.where(mask, log_probs, 0.0)
            entropy = entropy - (log_probs.exp() * finite_log_probs).sum(-1)
        return entropy


# ----------------------------------------------------------------------------------------- networks
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

    A discrete action consists of categorical factors: Discrete has one, MultiDiscrete has several,
    MultiBinary one of two categories for each bit. Everywhere but in the environment, actions are
    (B, factors). Observations are (B, features): all entries side by side, a discrete number as one
    feature.
    """

    def __init__(self, entries, action_space, args, device="cpu"):
        super().__init__()
        self.args = args
        self.device = device
        self.entries = entries  # {name: space} of a Dict; any other observation is one entry
        self.action_space = action_space
        self.output_sizes = output_sizes(action_space)  # choices of each factor
        self.choices = sum(self.output_sizes)
        inputs = sum(
            spaces.flatdim(space) for space in entries.values()
        )  # width of the first layer: a discrete number counts as a one-hot vector
        sizes = args.hidden_sizes
        critic_sizes = args.critic_hidden_sizes or sizes
        # The actor's small gain makes the first policy nearly uniform.
        self.actor = mlp(inputs, sizes, self.choices, gain=0.01)
        self.critic = mlp(inputs, critic_sizes, 1, gain=1.0)
        for network in (self.actor, self.critic):
            network[0] = LinearOnEntries(network[0], entries)  # looks up a discrete number's column
        features = sum(math.prod(space.shape) for space in entries.values())
        self.feature_space = spaces.Box(-np.inf, np.inf, (features,))  # of what `split` returns
        self.to(device)
        # Created after the move, so that its float64 stays on the CPU: some devices lack that type.
        self.return_stats = RunningMeanStd() if args.normalize_reward else None

    def forward(self, obs, actions, masks=None):
        """(log-probs, entropies, values), each (B,), of obs (B, features), actions (B, factors).

        The log-probs and entropies are those under `masks` (B, choices); without, all are valid.
        """
        pi = MaskedCategorical(self.actor(obs), masks, self.output_sizes)
        return pi.log_prob(actions), pi.entropy(), self.critic(obs).squeeze(1)

    @torch.inference_mode()  # as no_grad, but faster
    def sample(self, obs, masks, rng=None):
        """Valid actions (B, factors) for NumPy arrays of observations and masks, drawn with `rng`.

        The argmax (`mode`) of masked logits + Gumbel noise is a draw from their softmax (the
        Gumbel-max trick). Without rng, the most likely actions.
        """
        logits = self.actor(obs)
        if rng is not None:
            noise = rng.gumbel(size=logits.shape)
            logits = logits + torch.as_tensor(noise, dtype=torch.float32, device=self.device)
        return MaskedCategorical(logits, masks, self.output_sizes).mode().cpu().numpy()

    def split(self, rows):
        """Cut rows of MaskedEnvs, (B, features + choices), in two: (observations, masks)."""
        masks = rows[:, -self.choices :].astype(bool)
        if self.args.no_mask:
            masks[:] = True
        return rows[:, : -self.choices], masks

    def act(self, rows):
        """What the deterministic policy does for rows of MaskedEnvs, as the environment takes it."""
        if rows.ndim != 2:
            raise ValueError("act takes a batch of observations with masks; for one: act(row[None])[0]")
        obs, masks = self.split(rows)
        return self.to_env(self.sample(obs, masks))

    def to_env(self, actions):
        """Actions (B, factors) as the environment takes them: in the space's shape and type."""
        space = self.action_space
        actions = actions.reshape(-1, *space.shape)
        return (actions + getattr(space, "start", 0)).astype(space.dtype)  # they need not start at 0


# ------------------------------------------------------------------------------- returns and buffer
# All tensors are time-major, (T, N). next_values[t] is the critic's value of the observation after
# step t. After termination it counts as 0: nothing follows. After truncation it stands for the
# rewards that were cut off. Rewards of later episodes never count. If both flags are set, terminated
# wins.


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


# Tensors of the same rows: (T, N, …) in the buffer, (B, …) in a minibatch; named as in sb3-contrib.
# old_*: of the agent that played the rollout. In the Dict version, observations are a dict.
SAMPLES = "observations actions old_values old_log_prob advantages returns action_masks"
MaskableRolloutBufferSamples = namedtuple("MaskableRolloutBufferSamples", SAMPLES)
MaskableDictRolloutBufferSamples = namedtuple("MaskableDictRolloutBufferSamples", SAMPLES)


class MaskableRolloutBuffer:
    """One rollout, time-major (T, N, …), with the mask of every observation.

    After an episode's end, the next step only resets the environment (next-step autoreset). That
    step's row is called a reset row here. The action in it is ignored:

        row  observation          action   reward  terminated  reset row
         0   s0                   a0       r0      no          no
         1   s1                   a1       r1      yes         no
         2   s2, the final one    ignored  0       no          yes
         3   s0 of the next one   a0       r0      no          no

    Row 2 never enters a minibatch, but it holds s2. So the successor of step t is always the
    observation in row t + 1, whether or not an episode ended in between. Row 2 needs no mask:
    MaskedEnvs and `add` make everything valid there.
    """

    def __init__(self, num_steps, num_envs, observation_space, action_space):
        T, N = num_steps, num_envs
        D = math.prod(action_space.shape)  # 1 for Discrete, whose shape is ()
        self.output_sizes = output_sizes(action_space)
        self.obs = np.zeros((T + 1, N, *observation_space.shape), np.float32)  # row T: after the last step
        self.actions = np.zeros((T, N, D), np.int64)
        self.action_masks = np.ones((T, N, sum(self.output_sizes)), bool)
        self.rewards = np.zeros((T, N), np.float32)
        self.terminated = np.zeros((T, N), bool)
        self.truncated = np.zeros((T, N), bool)
        self.reset_rows = np.zeros((T, N), bool)
        self.rewards_so_far = np.zeros(N)  # discounted, of the episodes under way: see scale_rewards
        self.rows = None  # samples of all rows, made by compute_advantages
        self.rng = np.random.default_rng(0)  # shuffles the rows for `get`

    def set_obs(self, t, obs):
        """Set the observations (N, …) of row t."""
        self.obs[t] = obs

    def observations(self, obs):
        """What the agent takes for stored observations (B, …); in the Dict version a dict."""
        return obs

    def add(self, t, obs, actions, rewards, terminated, truncated, reset_rows, action_masks=None):
        """Set row t for all environments; each argument is (N, …). Without masks all is valid."""
        self.set_obs(t, obs)
        self.actions[t] = actions
        self.rewards[t] = rewards
        self.terminated[t] = terminated
        self.truncated[t] = truncated
        self.reset_rows[t] = reset_rows
        masks = np.ones_like(self.action_masks[t]) if action_masks is None else np.array(action_masks)
        masks[self.reset_rows[t]] = True  # the actions there are ignored
        check_masks(masks, self.output_sizes)
        self.action_masks[t] = masks

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
    def log_probs_and_values(self, agent):
        """Log-probs (T, N) of the actions, values (T + 1, N) of the observations, under this agent.

        Computed in parts of about 2**22 logits: a row may have 50,000, of four bytes each.
        """
        T, N, choices = self.action_masks.shape
        on_device = partial(torch.as_tensor, device=agent.device)
        obs = on_device(self.obs[:-1]).flatten(0, 1)
        actions = on_device(self.actions).flatten(0, 1)
        masks = on_device(self.action_masks).flatten(0, 1)
        size = 1 + 2**22 // choices  # rows of a part
        log_probs = []
        values = []
        for first in range(0, T * N, size):
            part = slice(first, first + size)
            log_prob, _, value = agent(self.observations(obs[part]), actions[part], masks[part])
            log_probs.append(log_prob)
            values.append(value)
        last_obs = self.observations(on_device(self.obs[-1]))
        values.append(agent.critic(last_obs).squeeze(1))
        return torch.cat(log_probs).view(T, N), torch.cat(values).view(T + 1, N)

    def compute_advantages(self, log_probs, values, args):
        """Set self.rows from log_probs (T, N) and values (T + 1, N) of the agent that has just played."""
        on_device = partial(torch.as_tensor, device=values.device)
        ends = on_device(self.terminated), on_device(self.truncated)
        steps = on_device(self.rewards), values[:-1], values[1:], *ends
        advantages, returns = compute_gae(*steps, args.gamma, args.gae_lambda)
        self.rows = MaskableRolloutBufferSamples(
            observations=on_device(self.obs[:-1]),
            actions=on_device(self.actions),
            old_values=values[:-1],
            old_log_prob=log_probs,
            advantages=advantages,
            returns=returns,
            action_masks=on_device(self.action_masks),
        )

    def minibatches(self, num_minibatches, rng):
        """Yield samples that together hold every row but the reset rows once, in random order."""
        order = rng.permutation(np.flatnonzero(~self.reset_rows))
        for chosen in np.array_split(order, num_minibatches):
            yield self.take(chosen)

    def get(self, batch_size=None, rng=None):
        """The same for loops of your own, as in sb3-contrib: `batch_size` rows at a time; None: all.

        The last samples may have fewer rows. `rng` is a NumPy generator, by default the buffer's own.
        """
        rng = self.rng if rng is None else rng
        order = rng.permutation(np.flatnonzero(~self.reset_rows))
        size = batch_size or len(order)
        for first in range(0, len(order), size):
            yield self.take(order[first : first + size])

    def take(self, chosen):
        """The samples of an array of row numbers; step t of environment n has the number t * N + n."""
        if self.rows is None:
            raise ValueError("compute_advantages comes first: it makes the rows")
        chosen = torch.as_tensor(chosen, device=self.rows.returns.device)
        return MaskableRolloutBufferSamples(*[field.flatten(0, 1)[chosen] for field in self.rows])

    def explained_variance(self):
        """Of the critic: 1 if it predicted all its targets R, 0 if no better than a constant.

        EV = 1 - Var(R - V) / Var(R)
        """
        played = torch.as_tensor(~self.reset_rows, device=self.rows.returns.device)
        returns = self.rows.returns[played]
        errors = returns - self.rows.old_values[played]
        return 1 - errors.var(correction=0) / (returns.var(correction=0) + 1e-8)


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


def masked_ppo_loss(agent, batch, args):
    """The loss of a batch of samples, to be minimised, and a dict of metrics to log."""
    # The same masks as for acting: pi/pi_old is 1 at first. With --naive-mask it is lower, because
    # pi gives invalid actions a share.
    masks = None if args.naive_mask else batch.action_masks
    log_probs, entropies, values = agent(batch.observations, batch.actions, masks)
    log_ratios = log_probs - batch.old_log_prob
    advantages = normalize(batch.advantages) if args.norm_adv else batch.advantages
    clip_vloss = args.clip_vloss_coef if args.clip_vloss else None
    pg_loss = policy_loss(log_ratios, advantages, args.clip_coef)
    v_loss = value_loss(values, batch.old_values, batch.returns, clip_vloss)
    entropy = entropies.mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    metrics = {
        "loss": loss.detach(),
        "policy_loss": pg_loss.detach(),
        "value_loss": v_loss.detach(),
        "entropy": entropy.detach(),
        "approx_kl": approximate_kl(log_ratios.detach()),
        "clip_fraction": ((log_ratios.exp() - 1).abs() > args.clip_coef).float().mean(),
    }
    return loss, metrics


# ----------------------------------------------------------------------------------------- training
def train(args):
    """Train with `args`; return the summary, which summary.json holds too. UserError on bad input."""
    envs = make_envs(args, args.num_envs)  # for their spaces: run.new_envs makes those that are played
    agent = make_agent(args, envs)
    set_threads(image=False)
    run = Run(args, envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    factor = lambda _: run.remaining() if args.anneal_lr else 1.0  # multiplies the learning rate
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    run.start(agent=agent, optimizer=optimizer, scheduler=scheduler)  # --resume loads their states
    print(f"action masks come from {envs.source}" + (", and are ignored" if args.no_mask else ""))

    buffer = MaskableRolloutBuffer(args.num_steps, args.num_envs, agent.feature_space, agent.action_space)
    envs, obs_and_masks, reset_rows, rng = run.new_envs()  # a row for each environment: see MaskedEnvs
    while not run.is_finished():
        for t in range(args.num_steps):
            obs, masks = agent.split(obs_and_masks)
            actions = agent.sample(obs, masks, rng)
            obs_and_masks, rewards, terminated, truncated, _ = envs.step(agent.to_env(actions))
            run.count(obs_and_masks, rewards, terminated | truncated, reset_rows=reset_rows)
            buffer.add(t, obs, actions, rewards, terminated, truncated, reset_rows, masks)
            reset_rows = terminated | truncated  # the next step only resets these environments
        last_obs, _ = agent.split(obs_and_masks)
        buffer.set_obs(args.num_steps, last_obs)
        buffer.scale_rewards(agent.return_stats, args)

        log_probs, values = buffer.log_probs_and_values(agent)  # of the agent that has just played
        buffer.compute_advantages(log_probs, values, args)
        run.log(explained_variance=buffer.explained_variance(), learning_rate=scheduler.get_last_lr()[0])

        for _ in range(args.update_epochs):
            agent.train()  # dropout, if added, acts only here: r is not 1 at first
            for batch in buffer.minibatches(args.num_minibatches, rng):
                loss, metrics = masked_ppo_loss(agent, batch, args)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
                run.log(**metrics)
            agent.eval()
            if args.target_kl is not None and metrics["approx_kl"] > args.target_kl:
                break
        scheduler.step()

        if run.write_what_is_due():  # a checkpoint: all episodes begin anew, as in a resumed run
            envs, obs_and_masks, reset_rows, rng = run.new_envs()
            buffer.rewards_so_far[:] = 0
    return run.finish()


# ===== helpers: settings, parts of the networks, environments =====================================

CURVE = {"policy_loss": "policy loss", "value_loss": "value loss", "entropy": "entropy of the policy"}
EXPLORES = False  # training plays the policy itself: its episodes decide --stop-at-return
SCHEDULED = ("anneal_lr",)  # flags that, if they are set, let a schedule end with total_timesteps
ONLY_FLAGS = "resume evaluate model render capture_video config run_dir".split()  # not from config.json
PLUGINS = {}  # what make_envs imports by the names of ids: nothing; write module:Id
ONE_HOT = ()  # wrappers for MiniGrid, whose environments have no masks
set_up_atari = None  # nor have Atari's
WITHOUT_MEMORY = "gymnasium.wrappers.RescaleObservation"  # by fixed bounds, not running statistics
REFUSED_WRAPPERS = {"NormalizeObservation": WITHOUT_MEMORY, "NormalizeReward": "--normalize-reward"}
SAFE_IDS = r"[^:]*"  # ids that a stranger's config.json may ask for: module:Id imports the module
SUFFIX = ".pt"  # of models and checkpoints. With weights_only, reading them executes nothing:
write_state = torch.save
read_state = partial(torch.load, map_location="cpu", weights_only=True)
VECTOR_MODE = None  # the environment's own vector version, if it has one
manual_seed = torch.manual_seed  # seeds torch, for dropout

# Tuned settings per environment; flags win over them. docs/ppo_masked.md says how they were confirmed.
TUNED = {
    "Taxi-v4": {"num_envs": 16, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4, "learning_rate": 2e-3,
                "anneal_lr": True, "gamma": 0.98, "ent_coef": 0.01, "normalize_reward": False,
                "total_timesteps": 300_000},
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


class LinearOnEntries(nn.Module):
    """A linear layer on all entries of an observation, side by side; numbers as one-hot vectors.

    A matrix times a one-hot vector is one column of the matrix. This column is looked up, which is
    fast even for 500 states.
    """

    def __init__(self, linear, entries):
        super().__init__()
        self.linear = linear
        self.entries = entries
        self.features = [math.prod(space.shape) for space in entries.values()]  # a number is one
        self.columns = [spaces.flatdim(space) for space in entries.values()]  # of the matrix
        if all(isinstance(space, spaces.Discrete | spaces.MultiDiscrete) for space in entries.values()):
            # Stays 0: all states share it, so learning in one would shift this layer in all others.
            linear.bias.requires_grad_(False)

    def forward(self, obs):
        """(B, outputs) of an array or a tensor (B, features), or of a dict of the entries (B, …)."""
        output = self.linear.bias
        parts = [obs[name] for name in self.entries] if isinstance(obs, dict) else [obs]
        parts = [torch.as_tensor(part, device=output.device).reshape(len(part), -1) for part in parts]
        features = torch.cat(parts, dim=1).split(self.features, dim=1)
        weights = self.linear.weight.split(self.columns, dim=1)
        for space, x, weight in zip(self.entries.values(), features, weights):
            if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
                first_columns = np.cumsum([0, *output_sizes(space)[:-1]]) - np.ravel(space.start)
                columns = x.long() + torch.as_tensor(first_columns, device=x.device)
                output = output + nn.functional.embedding(columns, weight.T).sum(1)
            else:
                output = output + x.float() @ weight.T
        return output


def output_sizes(space):
    """Categories of each factor of a discrete action space; of a Box, its number of dimensions."""
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ravel().tolist()
    if isinstance(space, spaces.MultiBinary):
        return [2] * math.prod(space.shape)
    return [int(spaces.flatdim(space))]


def check_masks(masks, sizes):
    """ValueError if a row of masks has values other than 0 and 1, or leaves a factor no valid choice.

    `masks` is a NumPy array (B, sum of sizes), `sizes` are the numbers of choices of the factors.
    """
    is_strange = ((masks != 0) & (masks != 1)).any(axis=1)
    if is_strange.any():  # as booleans, NaN and -inf would be True: valid
        raise ValueError(f"row {is_strange.argmax()}: the action mask has values other than 0 and 1")
    first_columns = np.cumsum([0, *sizes[:-1]])
    can_act = np.logical_or.reduceat(masks, first_columns, axis=1).all(axis=1)
    if not can_act.all():
        raise ValueError(f"row {can_act.argmin()}: the action mask leaves no valid action")


class MaskableDictRolloutBuffer(MaskableRolloutBuffer):
    """For your own loops with Dict observations: takes dicts of arrays, gives dicts of tensors.

    Inside, the entries stand side by side, as in `train`.
    """

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

    def take(self, chosen):
        """The samples of an array of row numbers."""
        samples = super().take(chosen)._asdict()
        samples["observations"] = self.observations(samples["observations"])
        return MaskableDictRolloutBufferSamples(**samples)


class MaskedEnvs(gym.vector.VectorWrapper):
    """A vector environment that returns rows (N, features + choices): an observation, then its mask.

    Both are in one array, since Run and `evaluate`, the same in every script, know nothing of masks.
    Only MaskedAgent.split cuts them apart. `entries` is {name: space} of the features; `source` says
    where masks come from.
    """

    ENTRY = 'the entry "action_mask" of a Dict observation'
    METHOD = "a method action_masks()"
    INFO = 'info["action_mask"]'

    def __init__(self, envs, env_id):
        super().__init__(envs)
        self.env_id = env_id
        self.steps = 0  # since the environments were made
        self.output_sizes = output_sizes(envs.single_action_space)
        self.choices = sum(self.output_sizes)
        space = envs.single_observation_space
        self.entries = dict(space) if isinstance(space, spaces.Dict) else {"observation": space}
        self.source = self.INFO
        if any(env.has_wrapper_attr("action_masks") for env in getattr(envs.unwrapped, "envs", ())):
            self.source = self.METHOD
        if self.entries.pop("action_mask", None) is not None:
            self.source = self.ENTRY

    def reset(self, **kwargs):
        """As the environment's, with masks. UserError if the environment has none."""
        obs, infos = self.env.reset(**kwargs)
        if self.source == self.INFO and "action_mask" not in infos:
            method = f"{self.METHOD} (without --async-envs)"
            places = f"neither {self.ENTRY}, nor {method}, nor {self.INFO} of reset"
            raise UserError(f"{self.env_id} has no action masks: {places}")
        return self.rows(obs, infos, np.zeros(self.num_envs, bool)), infos

    def step(self, actions):
        """As the environment's, with masks."""
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        self.steps += 1
        if self.source == self.INFO and "action_mask" not in infos and not np.all(terminated | truncated):
            where = f"{self.env_id}: no action_mask in info after {self.steps} steps"
            raise UserError(f"{where}; if all actions are valid, give a mask of ones")
        return self.rows(obs, infos, terminated | truncated), rewards, terminated, truncated, infos

    def rows(self, obs, infos, dones):
        """Observations and masks side by side. UserError if a mask is of wrong width or value.

        Every action counts as valid where the episode is done: the next action is ignored there.
        """
        given = {n: self.mask(n, obs, infos) for n in np.flatnonzero(~dones)}
        masks = np.ones((self.num_envs, self.choices))
        try:
            for n, mask in given.items():
                mask = np.hstack(mask) if isinstance(mask, tuple) else mask  # an array a factor
                masks[n] = np.reshape(mask, self.choices)
            check_masks(masks, self.output_sizes)
        except ValueError as error:
            where = f"{self.env_id}, after {self.steps} steps, masks {self.choices} wide from {self.source}"
            raise UserError(f"{where}: {error}") from error
        parts = [obs[name] for name in self.entries] if isinstance(obs, dict) else [obs]
        parts.append(masks != 0)
        return np.concatenate([part.reshape(self.num_envs, -1) for part in parts], axis=1)

    def mask(self, n, obs, infos):
        """The mask of environment n; all ones if it gives none."""
        if self.source == self.ENTRY:
            entry = obs["action_mask"]
            return tuple(part[n] for part in entry) if isinstance(entry, tuple) else entry[n]
        if self.source == self.METHOD:
            return self.unwrapped.envs[n].get_wrapper_attr("action_masks")()
        if self.source == self.INFO and "action_mask" in infos and infos.get("_action_mask", np.ones(n + 1))[n]:
            return infos["action_mask"][n]
        return np.ones(self.choices)


vectors_or_images = MaskedEnvs  # make_envs ends with it


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


def make_masked_agent(args, envs):
    """An untrained MaskedAgent for these environments. UserError if it cannot handle a space."""
    action_space = envs.single_action_space
    discrete = spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    if not isinstance(action_space, discrete):
        raise UserError(f"{args.env_id}: no masks for actions {action_space}; ppo.py takes Box actions")
    if not envs.entries:
        raise UserError(f"{args.env_id}: observations hold nothing but action_mask")
    for name, space in envs.entries.items():
        is_picture = space.dtype == np.uint8 and len(space.shape) >= 2 and space.shape[1] >= 36
        if not isinstance(space, discrete | spaces.Box) or is_picture:
            raise UserError(f"{args.env_id}: no MaskedAgent for {name}, {space}; --wrappers may change it")
    if args.no_mask and args.naive_mask:
        raise UserError("no_mask and naive_mask are different ablations: choose one")
    # Every other row can be a reset row and drop out; norm_adv makes a single advantage 0.
    if args.num_envs * (args.num_steps // 2) < (2 if args.norm_adv else 1) * args.num_minibatches:
        raise UserError("num_minibatches must be at most num_envs * (num_steps // 2), with norm_adv half of that")
    envs.reset(seed=args.seed)  # a UserError if there are no masks
    torch.manual_seed(args.seed)
    return MaskedAgent(envs.entries, action_space, args, choose_device(args)).eval()


make_agent = make_masked_agent  # as the run section calls it


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
