# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.3,<2", "ufal-pybox2d>=2.3.10.5",
#   "numpy>=1.26", "matplotlib>=3.8", "tyro>=1.0", "tqdm>=4.66", "moviepy>=2.0",
# ]
# ///
"""Proximal policy optimisation (PPO), all of it, in this one file.

Play T steps in N environments, compare what each action brought with what the critic had expected (the difference is
the action's advantage A), and make the better actions likelier. Several epochs reuse the same data, so the policy pi
moves away from pi_old, which collected it. Clipping removes the incentive to move their ratio r far from 1:

    L(theta) = E[ min( r A, clip(r, 1 - eps, 1 + eps) A ) ],   r = pi(a|s) / pi_old(a|s)     (arXiv 1707.06347, eq. 7)

    python ppo.py                                            # CartPole-v1, under a minute
    python ppo.py --env-id LunarLander-v3 --capture-video    # a lander, filmed while it learns
    python ppo.py --evaluate runs/DIR --render               # watch the trained agent

Papers: PPO arXiv 1707.06347, GAE arXiv 1506.02438, V-trace (IMPALA) arXiv 1802.01561, design choices arXiv 2006.05990.
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
    """Every flag and its default. For some environments, CartPole included, TUNED (below) overrides these."""

    # algorithm
    estimator: Literal["gae", "vtrace", "vanilla"] = "gae"  # of advantages; vanilla: discounted return minus value
    learning_rate: float = 3e-4  # Adam's learning rate
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    num_envs: int = 8  # environments played side by side
    num_steps: int = 128  # steps of each environment per rollout
    num_minibatches: int = 4  # parts of a rollout, one gradient step each
    update_epochs: int = 4  # passes over a rollout
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # GAE: 0 trusts the critic, 1 the rewards
    rho_clip: float = 1.0  # V-trace: upper bound of rho, the ratio pi/mu that weighs each temporal difference
    c_clip: float = 1.0  # V-trace: upper bound of c, the ratio pi/mu that carries differences back in time
    norm_adv: bool = True  # normalise advantages over each minibatch; with V-trace, over the rollout
    clip_coef: float = 0.2  # eps of the clipped objective
    clip_vloss: bool = False  # clip the value loss as well
    clip_vloss_coef: float = 0.2  # values may move this far before their loss is clipped
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # gradients longer than this are scaled down to it
    target_kl: float | None = None  # stop the epochs once the KL divergence in an epoch's last minibatch exceeds this
    hidden_sizes: tuple[int, ...] = (64, 64)  # sizes of the actor's hidden layers (vectors only)
    critic_hidden_sizes: tuple[int, ...] | None = None  # sizes of the critic's; None: as the actor's
    normalize_obs: bool = False  # normalise observations (vectors) by their running mean and standard deviation
    normalize_reward: bool = False  # divide rewards by the running standard deviation of the discounted return
    clip_reward: bool = False  # learn from the signs of rewards (Atari); reported returns stay unclipped
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
    checkpoint_every: int = 0  # steps between checkpoints, at which all episodes begin anew; 0: mostly a tenth of a run
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # weights that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window; with --capture-video, film it instead
    config: str | None = None  # config.json of an earlier run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__SCRIPT__SEED__TIME
    progress: bool = True  # show the progress bar


# ------------------------------------------------------------------------------------------------------- networks
def layer(module, gain=2**0.5):
    """Give a linear or convolutional layer orthogonal weights, scaled by `gain`, and zero biases; return it."""
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
        self.output_sizes = output_sizes(action_space)  # categories of each factor; for a Box, its dimensions
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
        """The input of actor and critic: images (B, …) through the CNN, vectors flat, normalised if args say so."""
        if self.image:
            return self.cnn(obs)
        obs = obs.reshape(len(obs), -1).float()
        return obs if self.obs_stats is None else self.obs_stats(obs)

    def forward(self, obs, actions):
        """(log-probs, entropies, values), each (B,), of tensors of observations (B, …) and actions (B, D)."""
        features = self.features(obs)
        output = self.actor(features)
        if self.continuous:
            log_probs, entropies = gaussian(output, actions, self.log_std)
        else:
            log_probs, entropies = categorical(output, actions, self.output_sizes)
        return log_probs, entropies, self.critic(features).squeeze(1)

    def draw_noise(self, rng, num_steps, num_envs):
        """Noise (num_steps, num_envs, outputs) by which `sample` draws from the policy; `rng` is a NumPy generator.

        For categories: the argmax of logits + Gumbel noise is a draw from their softmax (the Gumbel-max trick).
        """
        draw = rng.standard_normal if self.continuous else rng.gumbel
        noise = draw(size=(num_steps, num_envs, sum(self.output_sizes)))
        return torch.as_tensor(noise, dtype=torch.float32, device=self.device)

    @torch.inference_mode()  # as no_grad, but faster
    def sample(self, obs, noise):
        """Actions (B, D) for a NumPy array of observations (B, …); `noise` (B, outputs) as from draw_noise.

        With noise 0 they are the likeliest: the mean of a Gaussian, the category with the largest logit.
        """
        dtype = torch.uint8 if self.image else torch.float32
        output = self.actor(self.features(torch.as_tensor(obs, dtype=dtype, device=self.device)))
        if self.continuous:
            return (output + self.log_std.exp() * noise).cpu().numpy()
        logits_of_factors = (output + noise).split(self.output_sizes, dim=1)
        return torch.stack([logits.argmax(1) for logits in logits_of_factors], dim=1).cpu().numpy()

    def act(self, obs):
        """What the deterministic policy does, as the environment takes it: evaluations call this."""
        return self.to_env(self.sample(obs, noise=0))

    def to_env(self, actions):
        """Actions (B, D) as the environment takes them: within the bounds of a Box, in the space's shape and type."""
        space = self.action_space
        actions = actions.reshape(-1, *space.shape)
        if not self.continuous:
            return (actions + getattr(space, "start", 0)).astype(space.dtype)  # Discrete may start elsewhere
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
    """Generalised advantage estimation: (advantages A_t, returns A_t + V(s_t) for the critic to learn), each (T, N).

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


def compute_vtrace(rewards, values, next_values, terminated, truncated, log_ratios, gamma, rho_clip, c_clip, played):
    """V-trace: (advantages, targets), each (T, N); log_ratios = log pi - log mu, where pi is the policy now, mu played.

    v_t - V_t = rho_t delta_t + gamma c_t (v_{t+1} - V_{t+1})         A_t = rho_t (r_t + gamma v_{t+1} - V_t)
    rho_t = min(rho_clip, pi/mu), c_t = min(c_clip, pi/mu), delta_t as in GAE   (arXiv 1802.01561, section 4, remark 1)
    Where the episode or the rollout is cut off, v_{t+1} is V_{t+1}. With a mask `played`, r + gamma v_{t+1} - V_t is
    normalised over its rows before rho weighs it: where rho = pi/mu, subtracting their mean then adds no bias.
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
        advantages[t] = deltas[t] + gamma * next_correction
        correction = rho[t] * deltas[t] + gamma * c[t] * next_correction
        targets[t] = values[t] + correction
    if played is not None:
        advantages[played] = normalize(advantages[played])
    return rho * advantages, targets


# Flat tensors (B, …) of the same rows. Three policies: mu played the rollout; pi_old is the agent for which advantages
# were last computed; pi is the agent now. Only V-trace, which computes them in every epoch, has a pi_old other than mu.
Batch = namedtuple("Batch", "obs actions mu_log_probs old_log_probs old_values advantages returns")


class RolloutBuffer:
    """One rollout, time-major (T, N, …); observations of uint8 stay uint8.

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
        obs = torch.as_tensor(self.obs, device=agent.device)
        actions = torch.as_tensor(self.actions, device=agent.device)
        log_probs, _, values = agent(obs[:-1].flatten(0, 1), actions.flatten(0, 1))
        last_values = agent.critic(agent.features(obs[-1])).squeeze(1)
        T, N = self.rewards.shape
        return log_probs.view(T, N), torch.cat([values, last_values]).view(T + 1, N)

    def compute_advantages(self, log_probs, values, mu_log_probs, args):
        """Set `played` and Batch's other fields, each (T, N), from pi_old's log_probs (T, N) and values (T + 1, N).

        With V-trace, rho corrects from mu to pi_old and the loss's ratio from pi_old to pi, so nothing counts twice.
        """
        self.played = torch.as_tensor(~self.reset_rows, device=values.device)
        self.mu_log_probs = mu_log_probs
        self.old_log_probs = log_probs
        self.old_values = values[:-1]
        rewards = torch.as_tensor(self.rewards, device=values.device)
        terminated = torch.as_tensor(self.terminated, device=values.device)
        truncated = torch.as_tensor(self.truncated, device=values.device)
        steps = rewards, values[:-1], values[1:], terminated, truncated
        if args.estimator == "gae":
            self.advantages, self.returns = compute_gae(*steps, args.gamma, args.gae_lambda)
        elif args.estimator == "vtrace":
            clips = args.rho_clip, args.c_clip
            played = self.played if args.norm_adv else None
            self.advantages, self.returns = compute_vtrace(*steps, log_probs - mu_log_probs, args.gamma, *clips, played)
        else:
            self.returns = compute_returns(rewards, values[1:], terminated, truncated, args.gamma)
            self.advantages = self.returns - values[:-1]

    def minibatches(self, num_minibatches, rng):
        """Yield Batches that together hold every row but the reset rows once, in random order."""
        device = self.advantages.device
        fields = {name: torch.as_tensor(getattr(self, name), device=device).flatten(0, 1) for name in Batch._fields}
        order = torch.as_tensor(rng.permutation(np.flatnonzero(~self.reset_rows)), device=device)
        for rows in order.tensor_split(num_minibatches):
            yield Batch(**{name: field[rows] for name, field in fields.items()})

    def explained_variance(self):
        """1 - Var(R - V) / Var(R): 1 if the critic foresaw all returns R, 0 if it was no better than a constant."""
        returns = self.returns[self.played]
        errors = returns - self.old_values[self.played]
        return 1 - errors.var(correction=0) / (returns.var(correction=0) + 1e-8)


# --------------------------------------------------------------------------------------------------------- losses
def policy_loss(log_ratios, advantages, clip_coef):
    """The clipped surrogate, negated (arXiv 1707.06347, eq. 7); log_ratios (B,) = log pi - log pi_old."""
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.min(ratios * advantages, clipped * advantages).mean()


def value_loss(values, old_values, returns, clip_coef=None):
    """Half the mean squared error; with `clip_coef` (OpenAI's ppo2), moving a value by more cannot lower its error."""
    errors = (values - returns) ** 2
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (clipped - returns) ** 2)
    return 0.5 * errors.mean()


def normalize(advantages):
    """Zero mean and unit (population) deviation over the batch (B,)."""
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


def approximate_kl(log_ratios):
    """Estimate of KL(mu || pi), mu the policy that acted, r = pi/mu: E[(r - 1) - log r], unbiased, never negative."""
    return (log_ratios.exp() - 1 - log_ratios).mean()


def ppo_loss(agent, batch, args):
    """The loss of a Batch, to be minimised, and a dict of figures to log."""
    log_probs, entropies, values = agent(batch.obs, batch.actions)
    log_ratios = log_probs - batch.old_log_probs
    normalizes = args.norm_adv and args.estimator != "vtrace"  # compute_vtrace does so itself, before it weighs by rho
    advantages = normalize(batch.advantages) if normalizes else batch.advantages
    clip_vloss = args.clip_vloss_coef if args.clip_vloss else None
    pg_loss = policy_loss(log_ratios, advantages, args.clip_coef)
    v_loss = value_loss(values, batch.old_values, batch.returns, clip_vloss)
    entropy = entropies.mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    figures = {
        "loss": loss.detach(),
        "policy_loss": pg_loss.detach(),
        "value_loss": v_loss.detach(),
        "entropy": entropy.detach(),
        "approx_kl": approximate_kl((log_probs - batch.mu_log_probs).detach()),
        "clip_fraction": ((log_ratios.exp() - 1).abs() > args.clip_coef).float().mean(),
    }
    return loss, figures


# ------------------------------------------------------------------------------------------------------- training
def train(args):
    """Train with `args`; return the summary, a dict that summary.json holds as well. UserError on bad input."""
    envs = make_envs(args, args.num_envs)
    agent = make_agent(args, envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    run = Run(args, agent, envs, optimizer=optimizer)  # with --resume, it loads a checkpoint into these

    while not run.is_finished():
        if run.step == run.checkpoint_step:  # at the start and at each checkpoint, so that a resumed run does the same
            envs, obs, rng = run.new_envs()
            ended = np.zeros(args.num_envs, bool)  # environments whose next step only resets them
            buffer = RolloutBuffer(args.num_steps, args.num_envs, envs.single_observation_space, agent.action_space)
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - run.step / args.total_timesteps)

        noise = agent.draw_noise(rng, args.num_steps, args.num_envs)  # all at once: faster than in every step
        for t in range(args.num_steps):
            buffer.obs[t] = obs
            buffer.reset_rows[t] = ended
            buffer.actions[t] = agent.sample(obs, noise[t])
            actions = agent.to_env(buffer.actions[t])
            obs, buffer.rewards[t], buffer.terminated[t], buffer.truncated[t], _ = envs.step(actions)
            ended = buffer.terminated[t] | buffer.truncated[t]
        buffer.obs[-1] = obs
        # Advances run.step (not for reset rows) and notes the true returns of the episodes.
        run.count(buffer.obs, buffer.rewards, buffer.terminated | buffer.truncated, buffer.reset_rows)
        if args.clip_reward:
            buffer.rewards = np.sign(buffer.rewards)
        if args.normalize_reward:
            buffer.scale_rewards(agent.return_stats, args.gamma)

        mu_log_probs, values = buffer.log_probs_and_values(agent)  # mu: the policy that has just played
        buffer.compute_advantages(mu_log_probs, values, mu_log_probs, args)
        run.log(learning_rate=optimizer.param_groups[0]["lr"], explained_variance=buffer.explained_variance())

        for epoch in range(args.update_epochs):
            if args.estimator == "vtrace" and epoch > 0:  # the agent has left mu: work out rho anew
                log_probs, values = buffer.log_probs_and_values(agent)
                buffer.compute_advantages(log_probs, values, mu_log_probs, args)
            for batch in buffer.minibatches(args.num_minibatches, rng):
                loss, figures = ppo_loss(agent, batch, args)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
                run.log(**figures)
            if args.target_kl is not None and figures["approx_kl"] > args.target_kl:
                break

        if agent.obs_stats is not None:  # only now: acting and learning must normalise alike
            agent.obs_stats.update(buffer.obs[:-1][~buffer.reset_rows])
        run.write_what_is_due()  # a row of metrics.csv, an evaluation, a checkpoint
    return run.finish()


# ===== helpers: settings, parts of the networks, environments =========================================================

LEAST_1 = "num_envs total_timesteps max_episode_steps eval_episodes num_minibatches update_epochs hidden_sizes".split()
RANGES = dict.fromkeys([*LEAST_1, "critic_hidden_sizes"], (1, 1e15))
RANGES |= {"gamma": (0, 1), "gae_lambda": (0, 1), "stop_at_return": (-1e15, 1e15), "max_episode_return": (-1e15, 1e15)}
CURVE = {"policy_loss": "policy loss", "value_loss": "value loss", "entropy": "entropy of the policy"}  # curve's panels
EXPLORES = False  # whether an evaluation decides --stop-at-return (training explores), or training episodes do
PLUGINS = {"ALE": "ale_py", "MiniGrid": "minigrid", "BabyAI": "minigrid"}  # packages whose import registers ids
ONE_HOT = ("minigrid.wrappers.OneHotPartialObsWrapper", "minigrid.wrappers.ImgObsWrapper")  # of MiniGrid, by default
SAFE_IDS = r"[^:]*"  # ids that a stranger's config.json may ask for: module:Id would import the module
SUFFIX = ".pt"  # of models and checkpoints. How they are stored; with weights_only, reading executes nothing:
write_state = torch.save
read_state = partial(torch.load, map_location="cpu", weights_only=True)

# Tuned settings per environment; flags win over them. A run ends with the rollout that reaches its total.
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
    # CleanRL's published settings, but for its clipped value loss; MuJoCo was run with one seed, Atari not at all
    "HalfCheetah-v5": MUJOCO, "Hopper-v5": MUJOCO, "Walker2d-v5": MUJOCO,
    "ALE/Pong-v5": ATARI, "ALE/Breakout-v5": ATARI,
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
        """Merge an array of B rows, each of as many numbers as `mean` (Chan, Golub & LeVeque 1979, eq. 2.1)."""
        if len(rows) == 0:
            return
        rows = torch.as_tensor(rows, dtype=torch.float64, device=self.mean.device).view(-1, *self.mean.shape)
        weight = len(rows) / (self.count + len(rows))
        delta = rows.mean(0) - self.mean
        self.mean += weight * delta
        self.var += weight * (rows.var(0, correction=0) - self.var) + weight * (1 - weight) * delta**2
        self.count += len(rows)

    def forward(self, x):
        """Normalise (B, *shape), clip to ±10."""
        mean = self.mean.to(x.device, torch.float32)
        std = (self.var + 1e-8).sqrt().to(x.device, torch.float32)
        return ((x - mean) / std).clamp(-10, 10)


class NatureCNN(nn.Module):
    """DQN's network for images (Mnih et al. 2015, doi 10.1038/nature14236): (B, *shape) of bytes -> (B, 512)."""

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
    """Whether a Box holds images (uint8, channels first or last) that are large enough for the CNN."""
    return space.dtype == np.uint8 and len(space.shape) == 3 and sorted(space.shape)[1] >= 36


def output_sizes(space):
    """Numbers of categories of the factors of a discrete action space; of a Box, its number of dimensions."""
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


def make_envs(args, num_envs, render=False, video=None):
    """A vector environment with next-step autoreset; in a window or filmed, if asked. UserError if it fails."""
    package = PLUGINS.get(re.split("[/-]", args.env_id)[0], "gymnasium")
    try:
        pkgutil.resolve_name(package)  # imports it
        kwargs = dict(**json.loads(args.env_kwargs))
        paths = args.wrappers or (ONE_HOT if package == "minigrid" else ())
        wrappers = [globals().get(path) or pkgutil.resolve_name(path) for path in paths]
        if args.max_episode_steps is not None:
            kwargs["max_episode_steps"] = args.max_episode_steps
        if args.max_episode_return is not None:
            wrappers.append(partial(ReturnLimit, limit=args.max_episode_return))
        if render or video:
            kwargs["render_mode"] = "rgb_array" if video else "human"
        if video:
            wrappers.append(partial(gym.wrappers.RecordVideo, video_folder=str(video)))
        mode = "sync" if wrappers or render else None  # None: the environment's own vector version, if it has one
        if package == "ale_py" and mode is None:
            kwargs["max_num_frames_per_episode"] = 4 * kwargs.pop("max_episode_steps", 27_000)
            kwargs["reward_clipping"] = False
        elif package == "ale_py":  # its vector version can be neither wrapped nor shown; this one needs opencv-python
            kwargs["max_episode_steps"] = 4 * kwargs.get("max_episode_steps", 27_000)  # here it counts frames
            kwargs |= {"frameskip": 1, "repeat_action_probability": 0.0}
            stack = partial(gym.wrappers.FrameStackObservation, stack_size=4)
            wrappers = [gym.wrappers.AtariPreprocessing, stack, *wrappers]
        envs = gym.make_vec(args.env_id, num_envs, vectorization_mode=mode, wrappers=wrappers, **kwargs)
    except (ImportError, AttributeError, TypeError, ValueError, LookupError, AssertionError) as error:
        raise UserError(f"cannot make {args.env_id} with env_kwargs {args.env_kwargs}: {error}") from error
    if envs.metadata["autoreset_mode"] != gym.vector.AutoresetMode.NEXT_STEP:
        raise UserError(f"{args.env_id}: its vector version does not reset in the step after an episode's end")
    is_box = isinstance(envs.single_observation_space, spaces.Box)
    return envs if is_box else gym.wrappers.vector.FlattenObservation(envs)  # Discrete becomes one-hot, a Dict flat


def choose_device(args, image=False):
    """The device that args.device means, and torch's threads set to match. UserError if there is no such device."""
    torch.set_num_threads(os.cpu_count() if image else 1)  # small matrices are slower on more than one
    automatic = "cuda" if image and torch.cuda.is_available() else "cpu"
    device = automatic if args.device == "auto" else args.device
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"no device {device}: {error}") from error
    return device


def make_agent(args, envs):
    """An untrained Agent for these environments. UserError if it cannot handle a space."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    kinds = spaces.Discrete | spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary
    if not isinstance(obs_space, spaces.Box) or not isinstance(action_space, kinds):
        raise UserError(f"{args.env_id}: no Agent for observations {obs_space} and actions {action_space}")
    if is_image(obs_space) and args.normalize_obs:
        raise UserError("normalize_obs is for vectors: images are always scaled to [0, 1]")
    if args.num_envs * (args.num_steps // 2) < args.num_minibatches:
        raise UserError("num_minibatches must be at most num_envs * (num_steps // 2): half the rows can be reset rows")
    torch.manual_seed(args.seed)
    agent = Agent(obs_space, action_space, args, choose_device(args, is_image(obs_space)))
    agent.args = args  # for evaluate(agent, agent.args) in a notebook
    return agent


# ===== run: the same in every script ==================================================================================
# What it knows of the script: Args, RANGES, CURVE, EXPLORES, SAFE_IDS and SUFFIX; tuned_settings, make_envs,
# make_agent (whose agent can act), train, write_state and read_state. What the user can fix is a UserError.
UserError = gym.error.Error  # so that Gymnasium's own count as well
ONLY_FLAGS = "resume evaluate model render capture_video config run_dir".split()  # never from config.json
FREE = "total_timesteps stop_at_return eval_every eval_episodes checkpoint_every device progress".split()  # at --resume


def tuned(*flags, **given):
    """Args from flags or keywords; the rest from the run to resume or evaluate, from `config`, or from TUNED."""
    # The flags are parsed twice: the first time tells where the defaults of the second come from.
    first = replace(tyro.cli(Args, args=[flag for flag in flags if flag not in ("-h", "--help")]), **given)
    run_dir = first.resume or first.evaluate
    path = f"{run_dir}/config.json" if run_dir else first.config
    defaults = read_config(path, first) if path else replace(Args(), **tuned_settings(first))
    args = replace(tyro.cli(Args, args=flags, default=defaults, description=__doc__), **given)
    for name, value in vars(args).items():
        low, high = RANGES.get(name, (0, 1e15))
        for number in value if isinstance(value, tuple) else [value]:
            if isinstance(number, (int, float)) and not low <= number <= high:
                raise UserError(f"{name} must lie between {low:g} and {high:g}")
        if args.resume and name not in ONLY_FLAGS + FREE and value != getattr(defaults, name):
            raise UserError(f"{name} changes how a run learns: a resumed run keeps {getattr(defaults, name)}")
    return args


def code_flags(args):
    """The flags that a config.json must not decide alone, since they can make any code run; mostly none."""
    own_kwargs = "{}", tuned_settings(args).get("env_kwargs")
    if re.fullmatch(SAFE_IDS, args.env_id) and args.env_kwargs in own_kwargs and not args.wrappers:
        return []
    return ["--env-id", args.env_id, "--env-kwargs", args.env_kwargs, "--wrappers", *args.wrappers]


def read_config(path, given):
    """Args from the config.json of a run. It may be a stranger's: code that it asks for must be `given` as well."""
    flags = []
    try:
        for name, value in json.loads(Path(path).read_text(encoding="utf-8"))["args"].items():
            flags += [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # tyro's complaint would fill a screen
            args = tyro.cli(Args, args=flags, config=[tyro.conf.FlagConversionOff], console_outputs=False)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SystemExit) as error:
        raise UserError(f"{path} is missing, damaged or not from {Path(__file__).name}") from error
    code = code_flags(args)
    if code and code != code_flags(given):
        raise UserError(f"{path} asks for what may execute anything; if you trust it, add {shlex.join(code)}")
    return replace(args, **{name: getattr(given, name) for name in ONLY_FLAGS})


def load(run_dir, model="best", *flags, **given):
    """The agent saved by a run, with its settings as agent.args; `model` is best, last or a step."""
    args = tuned(*flags, **{"evaluate": str(run_dir), "model": str(model)} | given)
    agent = make_agent(args, make_envs(args, 1))
    name = "checkpoint" if args.model == "last" else f"models/{args.model}"
    read_parts(f"{run_dir}/{name}{SUFFIX}", {"agent": agent})
    return agent


def evaluate(agent, args, episodes=100, seed=0, render=False, video=None):
    """(mean, standard deviation) of the returns of `episodes` episodes; if asked, in a window or filmed in a folder."""
    envs = make_envs(args, episodes, render, video)  # one each: with fewer, short episodes would count too often
    obs, _ = envs.reset(seed=seed)
    if hasattr(agent, "begin_episodes"):  # a recurrent network forgets what it has seen
        agent.begin_episodes(episodes)
    returns = np.zeros(episodes)
    playing = np.ones(episodes, bool)
    for _ in range(args.max_episode_steps or 27_000):  # for what never ends by itself: half an hour of Atari
        obs, rewards, terminated, truncated, _ = envs.step(agent.act(obs))
        returns[playing] += rewards[playing]
        playing &= ~(terminated | truncated)
        if not playing.any():
            break
    envs.close()
    return float(returns.mean()), float(returns.std())


def write_file(path, write):
    """Call write(file), then rename the file to `path`: a reader finds the old file or the new one, never a half."""
    temporary = Path(f"{path}.{os.getpid()}.tmp")  # no other process writes to this one
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            write(file)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # on a full disk, torch raises a RuntimeError
        raise UserError(f"cannot write {path}: {error}") from error


def read_parts(path, parts):
    """Give `parts`, a dict of objects with load_state_dict, their states from a file; return all states in it."""
    try:
        state = read_state(path)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except Exception as error:  # there is no list of what a damaged or foreign file may raise
        raise UserError(f"{path} is missing, damaged or of another network: {type(error).__name__}") from error
    return state


class Run:
    """Everything a run keeps besides what it learns: folder, steps and episodes, evaluations, checkpoints, curve."""

    def __init__(self, args, agent, envs, **parts):
        self.args = args
        self.agent = agent
        self.envs = envs
        self.parts = {"agent": agent, **parts}  # what a checkpoint holds besides the run's own numbers
        self.step = 0  # environment steps, without reset rows
        self.episodes = []  # (step, return) of each training episode
        self.metrics = {"step": []}  # the columns of metrics.csv; others begin when they are first logged
        self.evaluations = {name: [] for name in ("step", "seconds", "return_mean", "return_std", "episodes")}
        self.figures = {}  # logged since the last row of metrics.csv
        self.eval_every = args.eval_every or math.ceil(args.total_timesteps / 10)
        self.checkpoint_every = args.checkpoint_every or max(args.total_timesteps // 10, 10_000 * envs.num_envs)
        name = f"{re.sub('[/:]', '-', args.env_id)}__{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
        self.dir = Path(args.resume or args.run_dir or f"runs/{name}")
        self.begun = time.monotonic()
        path = self.dir / f"checkpoint{SUFFIX}"
        if path.exists():  # else the run is new, or was killed before its first checkpoint
            if not args.resume:
                raise UserError(f"{self.dir} holds a run already: --resume it, or choose another --run-dir")
            self.step, seconds, self.episodes, self.metrics, self.evaluations = read_parts(path, self.parts)["run"]
            self.begun -= seconds
        self.checkpoint_step = self.step  # of the last checkpoint, from which training begins anew
        here = Path(__file__).parent
        git = subprocess.run("git describe --always --dirty", shell=True, cwd=here, capture_output=True)
        config = {"script": Path(__file__).stem, "args": asdict(args), "commit": git.stdout.decode().strip()}
        config["versions"] = {name: version(name) for name in ("torch", "gymnasium", "numpy") if name in sys.modules}
        write_file(self.dir / "config.json", lambda file: file.write(json.dumps(config, default=str).encode()))
        print(f"{args.env_id} -> {self.dir}; tuned:", {name: getattr(args, name) for name in tuned_settings(args)})
        self.bar = tqdm(total=args.total_timesteps, initial=self.step, unit=" steps", disable=not args.progress)

    def new_envs(self):
        """(environments, their first observations, a NumPy generator), made anew and seeded from (seed, step)."""
        self.envs.close()  # a reset with a seed is not enough: Box2D's environments keep traces of earlier episodes
        self.envs = make_envs(self.args, self.envs.num_envs)
        rng = np.random.default_rng([self.args.seed, self.step])
        obs, _ = self.envs.reset(seed=int(rng.integers(2**31)))
        self.totals = np.zeros(self.envs.num_envs)  # returns of the episodes under way
        return self.envs, obs, rng

    def count(self, obs, rewards, ended, reset_rows):
        """Count a step of all environments, arrays (N, …), or a rollout, (T, N, …). UserError on NaN or infinity."""
        self.check_finite(observation=obs, reward=rewards)
        rewards, ended, reset_rows = np.atleast_2d(rewards, ended, reset_rows)
        for t in range(len(rewards)):
            self.step += rewards.shape[1] - int(reset_rows[t].sum())
            self.totals += rewards[t]
            self.episodes += [(self.step, total) for total in self.totals[ended[t]].tolist()]
            self.totals[ended[t]] = 0

    def check_finite(self, **values):
        """UserError naming the environment, the step and the field if a value holds a NaN or an infinity."""
        for name, value in values.items():
            if not np.isfinite(value).all():
                raise UserError(f"{self.args.env_id}, after step {self.step}: {name} is NaN or infinite")

    def log(self, **figures):
        """Collect figures (numbers, or tensors of one number); the next row of metrics.csv holds their means."""
        for name, value in figures.items():
            self.figures.setdefault(name, []).append(value)

    def is_finished(self):
        """Whether all steps are taken, or 100 episodes' mean (if EXPLORES, an evaluation's) reaches stop_at_return."""
        returns = self.evaluations["return_mean"][-1:] if EXPLORES else [total for _, total in self.episodes[-100:]]
        enough = self.args.stop_at_return is not None and len(returns) == (1 if EXPLORES else 100)
        return self.step >= self.args.total_timesteps or (enough and np.mean(returns) >= self.args.stop_at_return)

    def write_what_is_due(self):
        """A row of metrics.csv, about 200 times in a run; an evaluation and a checkpoint as often as args say."""
        self.check_finite(**{name: float(values[-1]) for name, values in self.figures.items() if "loss" in name})
        self.bar.update(self.step - self.bar.n)
        last = self.metrics["step"][-1] if self.metrics["step"] else 0
        is_due = lambda every: self.is_finished() or self.step // every > last // every  # a multiple has been passed
        if is_due(self.eval_every) or is_due(self.checkpoint_every) or is_due(self.args.total_timesteps / 200):
            mean = np.mean([total for _, total in self.episodes[-100:]] or math.nan).item()
            sps = self.step / (time.monotonic() - self.begun)
            figures = {name: float(sum(values) / len(values)) for name, values in self.figures.items()}
            self.add_row("metrics.csv", self.metrics, sps=sps, return_mean=mean, episodes=len(self.episodes), **figures)
            self.bar.set_postfix_str(f"mean return {mean:.1f}", refresh=False)
            self.figures = {}
        if is_due(self.eval_every):
            self.write_evaluation()  # it may reach stop_at_return: then the checkpoint is due as well
        if is_due(self.checkpoint_every):
            self.write_checkpoint()
            if not self.is_finished():  # else finish draws it
                self.draw_curve()
        if is_due(self.eval_every) and self.args.capture_video:  # last: should it fail, the checkpoint is written
            evaluate(self.agent, self.args, 1, self.args.seed + 10_000, video=self.dir / f"videos/{self.step}")

    def write_evaluation(self):
        """Evaluate; save the weights in models/ as STEP, and as best if none were better."""
        episodes = self.args.eval_episodes
        mean, std = evaluate(self.agent, self.args, episodes, self.args.seed + 10_000)  # not training's seed
        is_best = all(mean >= earlier for earlier in self.evaluations["return_mean"])
        for name in [self.step, "best"] if is_best else [self.step]:
            write_file(self.dir / f"models/{name}{SUFFIX}", partial(write_state, {"agent": self.agent.state_dict()}))
        self.add_row("evaluations.csv", self.evaluations, return_mean=mean, return_std=std, episodes=episodes)

    def add_row(self, name, table, **row):
        """Add a row of numbers to a table, a dict of columns, and write it as CSV. What is missing is NaN."""
        row = {"step": self.step, "seconds": time.monotonic() - self.begun} | row
        for column in row:
            table.setdefault(column, [math.nan] * len(table["step"]))
        for column in table:
            table[column].append(row.get(column, math.nan))
        rows = np.transpose(list(table.values()))
        head = {"header": ",".join(table), "comments": ""}
        write_file(self.dir / name, lambda file: np.savetxt(file, rows, "%.10g", ",", **head))

    def write_checkpoint(self):
        """Write the checkpoint. It holds no environments: training makes new ones now, just as a resumed run does."""
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state["run"] = self.step, time.monotonic() - self.begun, self.episodes, self.metrics, self.evaluations
        write_file(self.dir / f"checkpoint{SUFFIX}", partial(write_state, state))
        self.checkpoint_step = self.step

    def draw_curve(self):
        """Write learning_curve.png: returns of episodes, their running mean and evaluations; below, CURVE's figures."""
        from matplotlib.figure import Figure  # slow to import

        figure = Figure(figsize=(9, 7), layout="constrained")
        axes = figure.subplot_mosaic([["returns"] * len(CURVE), list(CURVE)], height_ratios=(2, 1))
        top, steps = axes["returns"], self.metrics["step"]
        top.plot(*np.reshape(self.episodes, (-1, 2)).T, ".", alpha=0.25, markersize=3, label="training episode")
        top.plot(steps, self.metrics["return_mean"], label=f"mean of the last {min(100, len(self.episodes))} episodes")
        evaluated_at, _, means, stds, _ = self.evaluations.values()
        top.errorbar(evaluated_at, means, stds, fmt="o-", capsize=3, label="evaluation, ± one deviation")
        if means and top.dataLim.y0 < -100 * max(1, abs(means[-1])):  # from -11,000 to -13, say
            top.set_yscale("symlog", linthresh=10)
        top.set(title=f"{Path(__file__).name}: {self.args.env_id}, seed {self.args.seed}", ylabel="return")
        top.legend()
        for name, title in CURVE.items():
            axes[name].plot(steps, self.metrics.get(name, [math.nan] * len(steps)))
            axes[name].set(title=title, xlabel="environment steps")
            axes[name].locator_params(axis="x", nbins=4)
        write_file(self.dir / "learning_curve.png", partial(figure.savefig, dpi=120, format="png"))

    def finish(self):
        """Draw the curve, write summary.json, return the summary. A run that is killed meanwhile can be resumed."""
        if self.step not in self.evaluations["step"]:  # resumed with a total that is reached already
            self.write_evaluation()
        self.draw_curve()
        self.bar.close()
        self.envs.close()
        summary = {"global_step": self.step, "seconds": time.monotonic() - self.begun, "run_dir": self.dir.as_posix()}
        summary |= {f"eval_{name}": self.evaluations[name][-1] for name in ("return_mean", "return_std", "episodes")}
        write_file(self.dir / "summary.json", lambda file: file.write(json.dumps(summary, indent=1).encode()))
        print(f"last evaluation: {summary['eval_return_mean']:.1f}   curve: {self.dir.as_posix()}/learning_curve.png")
        return summary


def main():
    """Train, or evaluate, as the flags say. What the user can fix is one line on stderr and exit code 2."""
    try:
        args = tuned(*sys.argv[1:])
        if not args.evaluate:
            command = ["python", sys.argv[0], "--evaluate", train(args)["run_dir"], "--render", *code_flags(args)]
            print(f"to watch the best agent: {shlex.join(command)}")
            return
        agent = load(args.evaluate, args.model, *sys.argv[1:])
        seed = args.seed + 20_000  # other episodes than those by which the best weights were chosen
        mean, std = evaluate(agent, args, args.eval_episodes, seed)
        print(f"{args.model} weights: {mean:.2f} ± {std:.2f} over {args.eval_episodes} episodes of {args.env_id}")
        film = f"{args.evaluate}/videos/{args.model}" if args.capture_video else None
        if film or args.render:
            evaluate(agent, args, 1, seed, args.render, film)
            print(f"film: {film or 'none, --capture-video makes one'}")
    except UserError as error:
        text = "".join(letter if letter.isprintable() else " " for letter in str(error))  # no terminal control codes
        tqdm.write(f"{sys.argv[0]}: {' '.join(text.split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("stopped; --resume and the run folder goes on from its last checkpoint, if there is one")


if __name__ == "__main__":
    main()
