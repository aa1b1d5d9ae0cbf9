# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2",
#   "tyro==1.0.17", "tqdm==4.70.1", "moviepy==2.2.1",
# ]
# ///
"""Proximal policy optimisation (PPO), all of it, in this one file.

Play T steps in N environments, compare what each action brought with what the critic had expected (the difference is
the action's advantage A), and make the better actions likelier. Several epochs of gradient steps reuse the same data,
so the policy pi moves away from the old policy that collected it. Clipping removes the incentive to move the ratio r of
the two far from 1:

    L(theta) = E[ min( r A, clip(r, 1 - eps, 1 + eps) A ) ],   r = pi(a|s) / pi_old(a|s)     (arXiv 1707.06347, eq. 7)

    python ppo.py                                            # CartPole-v1, a few seconds
    python ppo.py --env-id LunarLander-v3 --capture-video    # a lander, filmed while it learns
    python ppo.py --evaluate runs/DIR --render               # watch what a run has left behind

Papers: PPO arXiv 1707.06347, GAE arXiv 1506.02438, V-trace (IMPALA) arXiv 1802.01561, design choices arXiv 2006.05990.
The story ends at "# ===== helpers"; the code below it makes environments, keeps the run folder and draws the curve.
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
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

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
    env_id: str = "CartPole-v1"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers, applied in order
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    total_timesteps: int = 500_000  # environment steps to train for (resets do not count)
    stop_at_return: float | None = None  # stop once the mean of the last 100 training episodes reaches this
    seed: int = 1  # seed of everything that is drawn at random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps; auto: CUDA for images if there is one, else the CPU
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
    estimator: Annotated[  # of advantages; vanilla: discounted return minus value. --buffer is an older name
        Literal["gae", "vtrace", "vanilla"], tyro.conf.arg(aliases=["--buffer"])
    ] = "gae"
    learning_rate: float = 3e-4  # Adam's learning rate
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    num_envs: int = 8  # environments played side by side
    num_steps: int = 128  # steps of each environment per rollout
    num_minibatches: int = 4  # parts of a rollout, one gradient step each
    update_epochs: int = 4  # passes over a rollout
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # GAE: 0 trusts the critic, 1 the rewards
    rho_clip: float = 1.0  # V-trace: bound of the ratio that weighs temporal differences
    c_clip: float = 1.0  # V-trace: bound of the ratio that carries them back in time
    norm_adv: bool = True  # normalise advantages over each minibatch
    clip_coef: float = 0.2  # eps of the clipped objective
    clip_vloss: bool = False  # clip the value loss as well
    clip_vloss_coef: float = 0.2  # values may move this far before their loss is clipped
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # gradients longer than this are scaled down to it
    target_kl: float | None = None  # no more epochs once the KL divergence of an epoch's last minibatch exceeds this
    hidden_sizes: tuple[int, ...] = (64, 64)  # sizes of the actor's hidden layers (vectors only)
    critic_hidden_sizes: tuple[int, ...] | None = None  # sizes of the critic's; None: as the actor's
    normalize_obs: bool = False  # normalise observations (vectors) by their running mean and standard deviation
    normalize_reward: bool = False  # divide rewards by the running standard deviation of the discounted return
    clip_reward: bool = False  # learn from the signs of rewards (Atari); reported returns are always true ones
    compile: bool = False  # compile the loss: faster, after half a minute


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


class Agent(nn.Module):
    """Actor and critic: two MLPs for vectors, two linear layers on a shared CNN for images.

    A Box action is Gaussian. A discrete action consists of categorical factors: Discrete has one, MultiDiscrete has
    several, MultiBinary one of two categories for each bit. Everywhere but in the environment, actions are (B, D): a
    column for each factor or dimension.
    """

    def __init__(self, observation_space, action_space, args, device="cpu"):
        super().__init__()
        self.device = device
        self.action_space = action_space
        self.continuous = isinstance(action_space, spaces.Box)
        self.output_sizes = output_sizes(action_space)  # categories of each factor; of a Box only its dimensions
        outputs = sum(self.output_sizes)
        inputs = math.prod(observation_space.shape)
        self.image = is_image(observation_space)
        # The actor's small gain makes the first policy nearly uniform, or the first means nearly 0.
        if self.image:
            self.cnn = NatureCNN(observation_space.shape)
            self.actor = layer(nn.Linear(512, outputs), gain=0.01)
            self.critic = layer(nn.Linear(512, 1), gain=1.0)
        else:
            critic_sizes = args.hidden_sizes if args.critic_hidden_sizes is None else args.critic_hidden_sizes
            self.actor = mlp(inputs, args.hidden_sizes, outputs, gain=0.01)
            self.critic = mlp(inputs, critic_sizes, 1, gain=1.0)
        if self.continuous:
            self.log_std = nn.Parameter(torch.zeros(outputs))
        self.to(device)
        # Created after the move, so that they stay on the CPU: they are float64, which some devices lack.
        self.obs_stats = RunningMeanStd(inputs) if args.normalize_obs else None
        self.return_stats = RunningMeanStd() if args.normalize_reward else None

    def features(self, obs):
        """The input of actor and critic: images (B, …) through the CNN, vectors flat and normalised."""
        if self.image:
            return self.cnn(obs)
        obs = obs.reshape(len(obs), -1).float()
        return obs if self.obs_stats is None else self.obs_stats(obs)

    def value(self, obs):
        """The critic's values (B,) of observations (B, …)."""
        return self.critic(self.features(obs)).squeeze(1)

    def forward(self, obs, actions):
        """(log-probs, entropies, values), each (B,), of tensors of observations (B, …) and actions (B, D)."""
        features = self.features(obs)
        output = self.actor(features)
        if self.continuous:
            log_probs, entropies = gaussian(output, actions, self.log_std)
        else:
            log_probs, entropies = categorical(output, actions, self.output_sizes)
        return log_probs, entropies, self.critic(features).squeeze(1)

    @torch.no_grad()
    def policy_output(self, obs):
        """Logits or means (B, …), a NumPy array, for a NumPy array of observations. Small MLPs act in NumPy."""
        dtype = torch.uint8 if self.image else torch.float32
        features = self.features(torch.as_tensor(obs, dtype=dtype, device=self.device))
        return forward_in_numpy(self.actor, features)

    def sample(self, obs, rng):
        """Actions (B, D) for a NumPy array of observations (B, …), drawn with the NumPy generator `rng`."""
        output = self.policy_output(obs)
        if self.continuous:
            std = self.log_std.detach().exp().cpu().numpy()
            return output + std * rng.standard_normal(output.shape, np.float32)
        # The Gumbel-max trick: the argmax of logits + Gumbel noise is a draw from their softmax.
        return self.argmax_of_factors(output + rng.gumbel(size=output.shape))

    def mode(self, obs):
        """The likeliest actions (B, D) for a NumPy array of observations (B, …)."""
        output = self.policy_output(obs)
        return output if self.continuous else self.argmax_of_factors(output)

    def argmax_of_factors(self, logits):
        """The category with the largest logit in each factor, (B, factors)."""
        categories = []
        first = 0
        for size in self.output_sizes:
            categories.append(logits[:, first : first + size].argmax(1))
            first += size
        return np.array(categories).T

    def act(self, obs):
        """What the deterministic policy does, as the environment takes it: evaluations call this."""
        return self.to_env(self.mode(obs))

    def to_env(self, actions):
        """Actions (B, D) as the environment takes them: within the bounds of a Box, in the space's shape and type."""
        space = self.action_space
        actions = actions.reshape(-1, *space.shape)
        if not self.continuous:
            return (actions + getattr(space, "start", 0)).astype(space.dtype)  # Discrete may begin at another number
        actions = np.clip(actions, space.low, space.high)
        if np.issubdtype(space.dtype, np.integer):
            actions = np.rint(actions)
        return actions.astype(space.dtype)


# --------------------------------------------------------------------------------------------- returns and buffer
# All tensors are time-major, (T, N). next_values[t] is the critic's value of the observation after step t. After
# termination it counts as 0: nothing follows. After truncation it stands for the rewards that were cut off. Rewards of
# later episodes never count. If both flags are set, terminated wins.


def compute_returns(rewards, next_values, terminated, truncated, gamma):
    """Discounted returns (T, N): R_t = r_t + gamma R_{t+1}.

    After a truncation, or the end of the rollout, V(s_{t+1}) takes the place of R_{t+1}; after a termination, 0 does.
    """
    next_values = next_values * ~terminated
    ends = terminated | truncated
    returns = torch.empty_like(rewards)
    next_return = next_values[-1]
    for t in reversed(range(len(rewards))):
        next_return = torch.where(ends[t], next_values[t], next_return)
        returns[t] = rewards[t] + gamma * next_return
        next_return = returns[t]
    return returns


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


def compute_vtrace(rewards, values, next_values, terminated, truncated, log_ratios, gamma, rho_clip=1.0, c_clip=1.0):
    """V-trace: (advantages, targets), each (T, N); log_ratios = log pi - log mu, where pi is the policy now, mu played.

    v_t - V_t = rho_t delta_t + gamma c_t (v_{t+1} - V_{t+1})         A_t = rho_t (r_t + gamma v_{t+1} - V_t)
    rho_t = min(rho_clip, pi/mu), c_t = min(c_clip, pi/mu)       (arXiv 1802.01561, remark 1 and section 4.2)
    Where the episode or the rollout is cut off, v_{t+1} is V_{t+1}.
    """
    next_values = next_values * ~terminated
    continues = ~(terminated | truncated)
    rho = log_ratios.exp().clamp(max=rho_clip)
    c = log_ratios.exp().clamp(max=c_clip)
    deltas = rewards + gamma * next_values - values
    advantages = torch.empty_like(rewards)
    targets = torch.empty_like(rewards)
    correction = torch.zeros_like(rewards[0])  # v_t - V_t
    for t in reversed(range(len(rewards))):
        next_correction = continues[t] * correction
        advantages[t] = rho[t] * (deltas[t] + gamma * next_correction)
        correction = rho[t] * deltas[t] + gamma * c[t] * next_correction
        targets[t] = values[t] + correction
    return advantages, targets


# Flat tensors (B, …) of the same rows. The loss compares the present log-probs and values with the old ones.
Batch = namedtuple("Batch", "obs actions old_log_probs old_values advantages returns")


class RolloutBuffer:
    """One rollout, time-major (T, N, …), in host memory; observations of uint8 stay uint8.

    After an episode's end the next step only resets its environment (next-step autoreset). Its action is ignored:

        row  observation          action   reward  terminated  reset row
         0   s0                   a0       r0      no          no
         1   s1                   a1       r1      yes         no
         2   s2, the final one    ignored  0       no          yes
         3   s0 of the next one   a0       r0      no          no

    Row 2 never enters a minibatch, but it holds s2. So the successor of step t is always the observation in row t + 1,
    whether or not an episode ended in between. No advantage reaches back from row 2: row 1 ends the episode.
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
        self.discounted_returns = np.zeros(N)  # G of the episodes under way: see scale_rewards

    def add(self, t, obs, actions, rewards, terminated, truncated, reset_rows):
        """Set row t of all environments; all arguments but t are (N, …)."""
        self.obs[t] = obs
        self.actions[t] = actions
        self.rewards[t] = rewards
        self.terminated[t] = terminated
        self.truncated[t] = truncated
        self.reset_rows[t] = reset_rows

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
        """Log-probs (T, N) of the actions and values (T + 1, N) of the observations under the agent as it is now."""
        obs = torch.as_tensor(self.obs, device=agent.device)
        actions = torch.as_tensor(self.actions, device=agent.device)
        log_probs, _, values = agent(obs[:-1].flatten(0, 1), actions.flatten(0, 1))
        last_values = agent.value(obs[-1])
        T, N = self.rewards.shape
        return log_probs.view(T, N), torch.cat([values, last_values]).view(T + 1, N)

    def compute_advantages(self, log_probs, values, mu_log_probs, args):
        """Set advantages, returns, old_log_probs and old_values, each (T, N), for the minibatches.

        log_probs (T, N) and values (T + 1, N) are those of the agent now, pi_old; mu_log_probs (T, N) of mu, which
        played. Only V-trace uses mu: rho corrects from mu to pi_old, the loss's ratio from pi_old to pi. So nothing
        counts twice, but pi_old is renewed in each epoch, and with it the clip range and the KL of --target-kl.
        """
        rewards = torch.as_tensor(self.rewards, device=values.device)
        terminated = torch.as_tensor(self.terminated, device=values.device)
        truncated = torch.as_tensor(self.truncated, device=values.device)
        self.old_log_probs = log_probs
        self.old_values = values[:-1]
        steps = rewards, values[:-1], values[1:], terminated, truncated
        if args.estimator == "gae":
            self.advantages, self.returns = compute_gae(*steps, args.gamma, args.gae_lambda)
        elif args.estimator == "vtrace":
            log_ratios = log_probs - mu_log_probs
            self.advantages, self.returns = compute_vtrace(*steps, log_ratios, args.gamma, args.rho_clip, args.c_clip)
        else:
            self.returns = compute_returns(rewards, values[1:], terminated, truncated, args.gamma)
            self.advantages = self.returns - values[:-1]

    def minibatches(self, num_minibatches, rng):
        """Yield Batches that together hold every row but the reset rows once, in random order."""
        device = self.advantages.device
        obs = torch.as_tensor(self.obs[:-1], device=device).flatten(0, 1)
        actions = torch.as_tensor(self.actions, device=device).flatten(0, 1)
        log_probs = self.old_log_probs.flatten()
        values = self.old_values.flatten()
        advantages = self.advantages.flatten()
        returns = self.returns.flatten()
        order = torch.as_tensor(rng.permutation(np.flatnonzero(~self.reset_rows)), device=device)
        for rows in order.tensor_split(num_minibatches):
            if len(rows) > 0:  # reset rows may have left fewer rows than minibatches
                yield Batch(obs[rows], actions[rows], log_probs[rows], values[rows], advantages[rows], returns[rows])

    def explained_variance(self):
        """1 - Var(R - V) / Var(R): 1 if the critic foresaw all returns R, 0 if it was no better than a constant."""
        played = torch.as_tensor(~self.reset_rows, device=self.returns.device)
        if not played.any():
            return torch.zeros(())
        returns = self.returns[played]
        errors = returns - self.old_values[played]
        return 1 - errors.var(correction=0) / (returns.var(correction=0) + 1e-8)


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


def ppo_loss(agent, batch, args):
    """The loss of a Batch, to be minimised, and a dict of figures to log."""
    log_probs, entropies, values = agent(batch.obs, batch.actions)
    log_ratios = log_probs - batch.old_log_probs
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
    """Train with `args`; return the final figures, which summary.json holds as well. UserError on bad input."""
    check_args(args)
    envs = make_envs(args, args.num_envs)
    check_rollout(args, envs)
    agent = make_agent(args, envs)
    optimizer = Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)  # below; same results as torch.optim.Adam
    loss_function = torch.compile(ppo_loss) if args.compile else ppo_loss
    run = Run(args, agent, envs, optimizer=optimizer)  # with --resume, it loads a checkpoint into these

    while not run.is_finished():
        if run.restarts:  # at the start, and after each checkpoint, which holds no episodes: all begin anew
            envs, obs, rng = run.new_envs()  # the first time: those made above
            reset_rows = np.zeros(args.num_envs, bool)  # whether the next step only resets an environment
            buffer = RolloutBuffer(args.num_steps, args.num_envs, envs.single_observation_space, agent.action_space)
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - run.step / args.total_timesteps)

        for t in range(args.num_steps):
            actions = agent.sample(obs, rng)
            next_obs, rewards, terminated, truncated, _ = envs.step(agent.to_env(actions))
            buffer.add(t, obs, actions, rewards, terminated, truncated, reset_rows)
            run.count(next_obs, rewards, terminated | truncated, reset_rows)  # advances run.step; not for reset rows
            obs = next_obs
            reset_rows = terminated | truncated
        buffer.obs[-1] = obs
        if args.clip_reward:
            buffer.rewards = np.sign(buffer.rewards)
        if args.normalize_reward:
            buffer.scale_rewards(agent.return_stats, args.gamma)

        log_probs, values = buffer.log_probs_and_values(agent)  # of the whole rollout at once: no weight has changed
        mu_log_probs = log_probs  # mu: the policy that has just played
        buffer.compute_advantages(log_probs, values, mu_log_probs, args)
        run.log(learning_rate=optimizer.param_groups[0]["lr"], explained_variance=buffer.explained_variance())

        for epoch in range(args.update_epochs):
            if args.estimator == "vtrace" and epoch > 0:  # the agent has left mu: work out rho anew
                log_probs, values = buffer.log_probs_and_values(agent)
                buffer.compute_advantages(log_probs, values, mu_log_probs, args)
            for batch in buffer.minibatches(args.num_minibatches, rng):
                loss, figures = loss_function(agent, batch, args)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
                run.log(**figures)
            if args.target_kl is not None and figures["approx_kl"] > args.target_kl:
                break

        if args.normalize_obs:  # only now: learning must see observations normalised as they were for acting
            agent.obs_stats.update(buffer.played_obs())
        run.write_what_is_due()  # a row of metrics.csv, an evaluation, a checkpoint
    return run.finish()


# ===== helpers: settings, parts of the networks, Adam, environments ===================================================

RANGES = {"num_steps": (1, 1e9), "num_minibatches": (1, 1e9), "update_epochs": (1, 1e9), "gamma": (0, 1)}
RANGES |= {"gae_lambda": (0, 1), "hidden_sizes": (1, 1e5), "critic_hidden_sizes": (1, 1e5)}
# The columns of metrics.csv that are this script's own, and those of them that the learning curve shows as well.
FIGURES = "learning_rate loss policy_loss value_loss entropy approx_kl clip_fraction explained_variance".split()
CURVE = ["policy_loss", "value_loss", "entropy"]

# Settings that learn, per environment. What the user gives wins. (A run ends with the rollout that reaches its total.)
NORMALIZE = {"normalize_obs": True, "normalize_reward": True}
LUNAR_LANDER = {"num_envs": 16, "num_steps": 512, "num_minibatches": 32, "learning_rate": 1e-3, "gamma": 0.999,
                "gae_lambda": 0.98, "total_timesteps": 990_000} | NORMALIZE  # fmt: skip
MUJOCO = {"num_envs": 1, "num_steps": 2048, "num_minibatches": 32, "update_epochs": 10, "ent_coef": 0.0,
          "total_timesteps": 1_000_000} | NORMALIZE  # fmt: skip
ATARI = {"learning_rate": 2.5e-4, "clip_coef": 0.1, "clip_reward": True, "total_timesteps": 10_000_000}
TUNED = {
    # confirmed with several seeds: benchmarks/results/ppo_scores.json
    "CartPole-v1": {"num_envs": 32, "num_steps": 64, "num_minibatches": 8, "learning_rate": 2e-3, "gamma": 0.98,
                    "gae_lambda": 0.9, "ent_coef": 0.0, "total_timesteps": 147_000},
    "Acrobot-v1": {"num_envs": 16, "num_minibatches": 8, "update_epochs": 10, "learning_rate": 1e-3, "ent_coef": 0.0,
                   "gae_lambda": 0.94, "total_timesteps": 197_000} | NORMALIZE,
    "MountainCar-v0": {"num_envs": 16, "num_steps": 64, "num_minibatches": 8, "update_epochs": 8, "ent_coef": 0.0,
                       "learning_rate": 2e-3, "gae_lambda": 0.98, "total_timesteps": 998_000} | NORMALIZE,
    "Pendulum-v1": {"num_steps": 256, "num_minibatches": 16, "update_epochs": 10, "learning_rate": 1e-3, "gamma": 0.9,
                    "ent_coef": 0.0, "total_timesteps": 147_000},
    "MountainCarContinuous-v0": {"num_minibatches": 8, "update_epochs": 10, "learning_rate": 1e-3, "gamma": 0.9999,
                                 "gae_lambda": 0.9, "ent_coef": 0.00429, "total_timesteps": 100_000} | NORMALIZE,
    "LunarLander-v3": LUNAR_LANDER,
    "LunarLanderContinuous-v3": LUNAR_LANDER | {"ent_coef": 0.0, "total_timesteps": 1_000_000},
    "BipedalWalker-v3": {"num_envs": 32, "num_steps": 256, "num_minibatches": 32, "update_epochs": 10, "gamma": 0.999,
                         "ent_coef": 0.0, "total_timesteps": 3_000_000} | NORMALIZE,
    # after published settings (CleanRL's), not confirmed here
    "HalfCheetah-v5": MUJOCO, "Hopper-v5": MUJOCO, "Walker2d-v5": MUJOCO,
    "ALE/Pong-v5": ATARI, "ALE/Breakout-v5": ATARI,
}  # fmt: skip


def tuned_settings(args):
    """The settings of TUNED for args.env_id."""
    return TUNED.get(args.env_id, {})


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


class NatureCNN(nn.Module):
    """The network for images of DQN (Mnih et al. 2015, doi 10.1038/nature14236): (B, *shape) of bytes -> (B, 512)."""

    def __init__(self, shape):
        super().__init__()
        self.channels_last = shape[2] == min(shape)
        channels, height, width = (shape[2], shape[0], shape[1]) if self.channels_last else shape
        self.convolutions = nn.Sequential(
            layer(nn.Conv2d(channels, 32, kernel_size=8, stride=4)),
            nn.ReLU(),
            layer(nn.Conv2d(32, 64, kernel_size=4, stride=2)),
            nn.ReLU(),
            layer(nn.Conv2d(64, 64, kernel_size=3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
        )
        outputs = self.convolutions(torch.zeros(1, channels, height, width)).shape[1]
        self.linear = layer(nn.Linear(outputs, 512))

    def forward(self, images):
        """Features of images whose channels come first or last."""
        if self.channels_last:
            images = images.movedim(-1, -3)
        return self.linear(self.convolutions(images / 255)).relu()


def is_image(space):
    """Whether a Box holds images (uint8, channels first or last) that are large enough for the CNN."""
    return space.dtype == np.uint8 and len(space.shape) == 3 and sorted(space.shape)[1] >= 36


def output_sizes(space):
    """Numbers of categories of the factors of a discrete action space; of a Box, its number of dimensions."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ravel().tolist()
    if isinstance(space, spaces.MultiBinary):
        return [2] * math.prod(space.shape)
    return [math.prod(space.shape)]


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


class MiniGridView(gym.ObservationWrapper):
    """The image alone of a MiniGrid observation, one-hot and flat: object, colour and state of each cell."""

    SIZES = (11, 6, 4)  # MiniGrid's numbers of objects, colours and states

    def __init__(self, env):
        super().__init__(env)
        height, width, channels = env.observation_space["image"].shape
        if channels != len(self.SIZES):
            raise UserError(f"the images of {env} are not MiniGrid's own: leave out the wrapper that changes them")
        self.observation_space = spaces.Box(0, 1, (height * width * sum(self.SIZES),), np.float32)

    def observation(self, observation):
        """A vector of zeros and ones for the Dict of MiniGrid."""
        image = observation["image"]
        if (image >= self.SIZES).any():
            raise UserError("an image holds no objects, colours and states: leave out the wrapper that changes it")
        one_hot = [np.eye(size, dtype=np.float32)[image[..., i]] for i, size in enumerate(self.SIZES)]
        return np.concatenate(one_hot, axis=-1).ravel()


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


def make_envs(args, num_envs, render_mode=None):
    """As make_vector_envs, but with Boxes for observations: others, and single numbers, are flattened."""
    envs = make_vector_envs(args, num_envs, render_mode)
    space = envs.single_observation_space
    is_array = isinstance(space, spaces.Box) and space.shape != ()
    if not is_array and space.is_np_flattenable:  # a Sequence or Graph is not
        check_memory(f"the observations of {args.env_id}", 100 * num_envs * spaces.flatdim(space))
        envs = gym.wrappers.vector.FlattenObservation(envs)  # Discrete observations become one-hot
    return envs


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


def make_agent(args, envs):
    """An untrained Agent for these environments. UserError if the script cannot handle a space or the device."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    kinds = spaces.Discrete | spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary
    if not isinstance(action_space, kinds) or not 0 < sum(output_sizes(action_space)) <= 100_000:
        wanted = "Discrete, Box, MultiDiscrete or MultiBinary actions, 100,000 categories at most"
        raise UserError(f"{args.env_id} has {action_space}; this script needs {wanted}")
    image = isinstance(obs_space, spaces.Box) and is_image(obs_space)
    size = math.prod(obs_space.shape) if isinstance(obs_space, spaces.Box) else 0
    if size == 0 or (obs_space.dtype == np.uint8 and size > 1_000 and not image):
        wanted = "vectors, or images of three dimensions and at least 36 x 36 pixels: use --wrappers"
        raise UserError(f"{args.env_id} has observations {obs_space}; this script needs {wanted}")
    if image and args.normalize_obs:
        raise UserError("normalize_obs is for vectors: images are always scaled to [0, 1]")
    device = choose_device(args, image)
    with torch.device("meta"):  # counts the weights without making them
        weights = sum(p.numel() for p in Agent(obs_space, action_space, args, "meta").parameters())
    check_memory("the networks", 16 * weights)  # with gradients and Adam's moments
    torch.manual_seed(args.seed)
    agent = Agent(obs_space, action_space, args, device)
    agent.args = args  # for evaluate(agent, agent.args) in a notebook
    return agent


def check_rollout(args, envs):
    """UserError if a rollout does not divide into minibatches, or does not fit into memory."""
    rows = args.num_steps * args.num_envs
    if rows % args.num_minibatches != 0:
        raise UserError(f"num_envs x num_steps = {rows} rows do not divide into {args.num_minibatches} minibatches")
    if args.norm_adv and rows == args.num_minibatches:  # normalised, a single advantage is 0
        raise UserError("minibatches of 1 row need --no-norm-adv: there is nothing to normalise an advantage by")
    space = envs.single_observation_space
    size = 1 if space.dtype == np.uint8 else 4
    check_memory("a rollout", rows * (math.prod(space.shape or (1,)) * size + 100))


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
