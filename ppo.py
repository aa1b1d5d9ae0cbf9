# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.3,<2", "ufal-pybox2d>=2.3.10.5",
#   "numpy>=1.26", "matplotlib>=3.8", "tyro>=1.0", "tqdm>=4.66", "moviepy>=2.0",
# ]
# ///
"""Proximal policy optimisation (PPO), all of it, in this one file.

Play T steps in N environments. Compare what each action brought with what the critic had expected:
the difference is the action's advantage A. Make the better actions more likely. Several epochs
reuse the same data, so the policy pi moves away from pi_old, which collected it. Clipping removes
the incentive to move their ratio r far from 1:

    L(theta) = E[ min( r A, clip(r, 1 - eps, 1 + eps) A ) ]   (arXiv 1707.06347, eq. 7)
    r = pi(a|s) / pi_old(a|s)

    python ppo.py                                            # CartPole-v1, under a minute
    python ppo.py --env-id LunarLander-v3 --capture-video    # a lander, filmed while it learns
    python ppo.py --evaluate runs/DIR --render               # watch the trained agent

Papers: PPO arXiv 1707.06347, GAE arXiv 1506.02438, V-trace (IMPALA) arXiv 1802.01561, design choices
arXiv 2006.05990. The algorithm ends at "# ===== helpers"; below it are settings, parts of the networks,
environments and the run folder.
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
    """Every flag and its default; TUNED (below) has others, as for CartPole. A given flag wins."""

    # algorithm
    estimator: Literal["gae", "vtrace", "vanilla"] = "gae"  # of advantages; vanilla: return minus value (gae, lambda 1)
    value_target: Literal["estimator", "returns"] = "estimator"  # what the critic learns; returns: as with vanilla
    learning_rate: float = 3e-4  # Adam's learning rate
    anneal_lr: bool = False  # lower the learning rate linearly to zero; for runs of known length
    num_envs: int = 2  # environments side by side; more are faster
    num_steps: int = 1024  # steps per environment and rollout; episodes may go on in the next
    num_minibatches: int = 32  # parts of a rollout, one gradient step each; here of 64 steps
    update_epochs: int = 10  # passes over a rollout
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # GAE only: 0 trusts the critic, 1 the rewards
    rho_clip: float = 1.0  # V-trace: upper bound of rho, the ratio pi/pi_old that weights a TD error
    c_clip: float = 1.0  # V-trace: upper bound of c, the ratio pi/pi_old that cuts the trace; at most rho_clip
    norm_adv: bool = True  # normalise advantages over each minibatch
    clip_coef: float = 0.2  # eps of the clipped objective
    clip_vloss: bool = False  # clip the value loss as well
    clip_vloss_coef: float = 0.2  # values may move this far before their loss is clipped
    ent_coef: float = 0.003  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # gradients longer than this are scaled down to it
    target_kl: float | None = None  # stop the epochs once the KL of an epoch's last minibatch is larger
    hidden_sizes: tuple[int, ...] = (64, 64)  # of the actor (vectors only), as --hidden-sizes 64 64
    critic_hidden_sizes: tuple[int, ...] = ()  # of the critic's; none: as the actor's
    init_std: float = 1.0  # standard deviation of a Box's first actions; 1 is half their range
    normalize_obs: bool = True  # by their running mean and standard deviation; never images
    normalize_reward: bool = True  # divide rewards by the standard deviation of their discounted sum; at most ±10
    clip_reward: bool = False  # learn from the signs of rewards (Atari); reported returns are true ones
    checkpoint_every: int = 0  # steps between checkpoints, which restart all episodes; 0: 5,000 * num_envs or more
    # run
    env_id: str = "CartPole-v1"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths, applied in order; with arguments: a.B(size=4)
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    async_envs: bool = False  # a process for each environment: for environments slower than 1 ms a step
    total_timesteps: int = 500_000  # environment steps to train for at least; resets do not count
    stop_at_return: float | None = None  # stop once the last 100 training episodes have this mean
    seed: int = 1  # seed of everything that is drawn at random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps; auto: CUDA for images if there is one
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


class Agent(nn.Module):
    """Actor and critic: two MLPs for vectors, two linear layers on a shared CNN for images.

    A Box action is Gaussian. to_env maps [-1, 1] to the Box's bounds and clips what lies outside;
    log-probs are those of the action before to_env. A discrete action consists of categorical factors:
    Discrete has one, MultiDiscrete has several, MultiBinary one of two categories for each bit.
    Everywhere but in the environment, actions are (B, D): a column for each factor or dimension.
    """

    def __init__(self, observation_space, action_space, args, device="cpu"):
        super().__init__()
        self.args = args
        self.device = device
        self.observation_shape = observation_space.shape
        self.action_space = action_space
        self.continuous = isinstance(action_space, spaces.Box)
        self.output_sizes = output_sizes(action_space)  # categories of each factor; for a Box, its D
        outputs = sum(self.output_sizes)
        inputs = math.prod(observation_space.shape)
        self.image = is_image(observation_space)
        # The actor's small gain makes the first policy nearly uniform, or the first means nearly 0.
        if self.image:
            self.cnn = NatureCNN(observation_space.shape)
            self.actor = layer(nn.Linear(512, outputs), gain=0.01)
            self.critic = layer(nn.Linear(512, 1), gain=1.0)
        else:
            sizes = args.hidden_sizes
            self.actor = mlp(inputs, sizes, outputs, gain=0.01)
            self.critic = mlp(inputs, args.critic_hidden_sizes or sizes, 1, gain=1.0)
        if self.continuous:
            self.log_std = nn.Parameter(torch.full((outputs,), math.log(args.init_std)))
            self.action_scale, self.action_bias = scale_and_bias(action_space)
        self.to(device)
        # Created after the move, so that its float64 stays on the CPU: some devices lack that type.
        normalizes = args.normalize_obs and not self.image  # images are always scaled to [0, 1]
        self.obs_stats = RunningMeanStd(inputs) if normalizes else None
        self.return_stats = RunningMeanStd() if args.normalize_reward else None

    def features(self, obs):
        """The input of actor and critic: images (B, …) through the CNN, vectors flat, normalised."""
        if self.image:
            return self.cnn(obs)
        obs = obs.reshape(len(obs), -1).float()
        return obs if self.obs_stats is None else self.obs_stats(obs)

    def forward(self, obs, actions):
        """(log-probs, entropies, values), each (B,), of observations (B, …) and actions (B, D)."""
        features = self.features(obs)
        output = self.actor(features)
        if self.continuous:
            log_probs, entropies = gaussian(output, actions, self.log_std)
        else:
            log_probs, entropies = categorical(output, actions, self.output_sizes)
        return log_probs, entropies, self.critic(features).squeeze(1)

    @torch.inference_mode()  # as no_grad, but faster
    def sample(self, obs, rng=None):
        """Actions (B, D) for a NumPy array of observations (B, …), drawn with the generator `rng`.

        The argmax of logits + Gumbel noise is a draw from their softmax (the Gumbel-max trick), in
        half the time of torch.distributions.Categorical. Without rng, the most likely actions.
        """
        dtype = torch.uint8 if self.image else torch.float32
        obs = torch.as_tensor(obs, dtype=dtype, device=self.device)
        output = self.actor(self.features(obs))
        if rng is not None:
            draw = rng.standard_normal if self.continuous else rng.gumbel
            noise = torch.as_tensor(draw(size=output.shape), dtype=torch.float32, device=self.device)
            output = output + (self.log_std.exp() * noise if self.continuous else noise)
        if self.continuous:
            return output.cpu().numpy()
        actions = [logits.argmax(dim=1) for logits in output.split(self.output_sizes, dim=1)]
        return torch.stack(actions, dim=1).cpu().numpy()

    def act(self, obs):
        """What the deterministic policy does for observations (B, …), as the environment takes it."""
        if obs.shape[1:] != self.observation_shape:
            raise ValueError("act takes a batch of observations; for one, it is act(obs[None])[0]")
        return self.to_env(self.sample(obs))

    def to_env(self, actions):
        """Actions (B, D) as the environment takes them, in the space's bounds, shape and type."""
        space = self.action_space
        if self.continuous:
            actions = self.action_scale * actions + self.action_bias
        actions = actions.reshape(-1, *space.shape)
        if not self.continuous:
            return (actions + getattr(space, "start", 0)).astype(space.dtype)  # they need not start at 0
        actions = np.clip(actions, space.low, space.high)
        if np.issubdtype(space.dtype, np.integer):
            actions = np.rint(actions)
        return actions.astype(space.dtype)


# ------------------------------------------------------------------------------- returns and buffer
# All tensors are time-major, (T, N). next_values[t] is the critic's value of the observation after
# step t: an estimate of all later rewards, used in their place (bootstrapping). After termination it
# counts as 0: nothing follows. After truncation it stands for the rewards that were cut off. Rewards
# of later episodes never count. If both flags are set, terminated wins.


def compute_returns(rewards, next_values, terminated, truncated, gamma):
    """Discounted returns (T, N), also called rewards-to-go.

        G_t = r_t + gamma G_{t+1}

    After a truncation, or the end of the rollout, V(s_{t+1}) takes the place of G_{t+1}; after a
    termination, 0 does.
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


def compute_vtrace(rewards, values, next_values, terminated, truncated, rho, c, gamma):
    """V-trace: (advantages A_t, targets v_t), each (T, N); pi_old is the paper's mu.

        v_t - V_t = rho_t delta_t + gamma c_t (v_{t+1} - V_{t+1})
        A_t = r_t + gamma v_{t+1} - V_t
        rho_t = min(rho_clip, w), c_t = min(c_clip, w), w = pi/pi_old   (arXiv 1802.01561, section 4)

    delta_t is that of GAE; after a termination, v_{t+1} is 0. Where the episode or the rollout is cut
    off, v_{t+1} is V_{t+1}. In the policy's gradient the paper multiplies A_t by rho_t; PPO's ratio r does
    that here. In the first epoch pi is pi_old: if no bound is below 1, A_t is that of GAE with lambda = 1.
    """
    next_values = next_values * ~terminated
    continues = ~(terminated | truncated)
    deltas = rewards + gamma * next_values - values
    advantages = torch.empty_like(rewards)
    targets = torch.empty_like(rewards)
    correction = torch.zeros_like(rewards[0])  # v_t - V_t
    for t in reversed(range(len(rewards))):
        next_correction = continues[t] * correction  # v_{t+1} - V_{t+1}, or 0 after an end
        advantages[t] = deltas[t] + gamma * next_correction
        correction = rho[t] * deltas[t] + gamma * c[t] * next_correction
        targets[t] = values[t] + correction
    return advantages, targets


# Tensors of the same rows: (T, N, …) in the buffer, (B, …) in a minibatch. old_log_probs are those of
# pi_old, which collected the rollout; old_values are the agent's when it computed the advantages;
# returns are the critic's targets.
Batch = namedtuple("Batch", "obs actions old_log_probs old_values advantages returns")


class RolloutBuffer:
    """One rollout, time-major (T, N, …); observations of uint8 stay uint8.

    After an episode's end, the next step only resets the environment (next-step autoreset). That
    step's row is called a reset row here. The action in it is ignored:

        row  observation          action   reward  terminated  reset row
         0   s0                   a0       r0      no          no
         1   s1                   a1       r1      yes         no
         2   s2, the final one    ignored  0       no          yes
         3   s0 of the next one   a0       r0      no          no

    Row 2 never enters a minibatch: its action did nothing, so there is nothing to learn from it. But
    it holds s2, whose value row 1 needs if it was truncated. So the successor of step t is always the
    observation in row t + 1, whether or not an episode ended in between. Advantages are not carried
    back from row 2 to row 1, since row 1 ends the episode.
    """

    def __init__(self, num_steps, num_envs, observation_space, action_space):
        T, N = num_steps, num_envs
        D = math.prod(action_space.shape)  # 1 for Discrete, whose shape is ()
        obs_dtype = np.uint8 if observation_space.dtype == np.uint8 else np.float32
        action_dtype = np.float32 if isinstance(action_space, spaces.Box) else np.int64
        self.obs = np.zeros((T + 1, N, *observation_space.shape), obs_dtype)  # row T: after the last step
        self.actions = np.zeros((T, N, D), action_dtype)
        self.rewards = np.zeros((T, N), np.float32)
        self.terminated = np.zeros((T, N), bool)
        self.truncated = np.zeros((T, N), bool)
        self.reset_rows = np.zeros((T, N), bool)
        self.rewards_so_far = np.zeros(N)  # discounted, of the episodes under way: see scale_rewards
        self.rows = None  # a Batch of all rows, made by compute_advantages

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
        """Log-probs (T, N) of the actions, values (T + 1, N) of the observations, by the agent now.

        One large batch costs less than keeping them step by step, and V-trace needs them again.
        """
        obs = torch.as_tensor(self.obs, device=agent.device)
        actions = torch.as_tensor(self.actions, device=agent.device)
        log_probs, _, values = agent(obs[:-1].flatten(0, 1), actions.flatten(0, 1))
        last_values = agent.critic(agent.features(obs[-1])).squeeze(1)
        T, N = self.rewards.shape
        return log_probs.view(T, N), torch.cat([values, last_values]).view(T + 1, N)

    def compute_advantages(self, log_probs, values, old_log_probs, args):
        """Set self.rows from pi's log_probs (T, N) and values (T + 1, N), and from pi_old's log-probs.

        pi is the agent now. Only V-trace needs its log-probs: it computes advantages again at the
        start of each epoch, when the agent has left pi_old.
        """
        on_device = partial(torch.as_tensor, device=values.device)
        rewards = on_device(self.rewards)
        terminated = on_device(self.terminated)
        truncated = on_device(self.truncated)
        old_values, next_values = values[:-1], values[1:]
        steps = rewards, old_values, next_values, terminated, truncated
        if args.estimator == "gae":
            advantages, returns = compute_gae(*steps, args.gamma, args.gae_lambda)
        elif args.estimator == "vtrace":
            ratios = (log_probs - old_log_probs).exp()
            rho = ratios.clamp(max=args.rho_clip)
            c = ratios.clamp(max=args.c_clip)
            advantages, returns = compute_vtrace(*steps, rho, c, args.gamma)
        if args.estimator == "vanilla" or args.value_target == "returns":
            returns = compute_returns(rewards, next_values, terminated, truncated, args.gamma)
        if args.estimator == "vanilla":
            advantages = returns - old_values
        self.rows = Batch(
            obs=on_device(self.obs[:-1]),
            actions=on_device(self.actions),
            old_log_probs=old_log_probs,
            old_values=old_values,
            advantages=advantages,
            returns=returns,
        )

    def minibatches(self, num_minibatches, rng):
        """Yield Batches that together hold every row but the reset rows once, in random order."""
        order = rng.permutation(np.flatnonzero(~self.reset_rows))
        flat_rows = Batch(*[field.flatten(0, 1) for field in self.rows])
        for chosen in torch.as_tensor(order, device=self.rows.obs.device).tensor_split(num_minibatches):
            yield Batch(*[field[chosen] for field in flat_rows])

    def explained_variance(self):
        """Of the critic: 1 if it predicted all its targets R, 0 if no better than a constant; below: worse.

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


def ppo_loss(agent, batch, args):
    """The loss of a Batch, to be minimised, and a dict of metrics to log.

    -L_clip - ent_coef E[entropy] + vf_coef L_value   (arXiv 1707.06347, eq. 9, negated; c_1 = vf_coef / 2)
    """
    log_probs, entropies, values = agent(batch.obs, batch.actions)
    log_ratios = log_probs - batch.old_log_probs
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
    set_threads(agent.image)
    run = Run(args, envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    factor = lambda _: run.remaining() if args.anneal_lr else 1.0  # multiplies the learning rate
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    run.start(agent=agent, optimizer=optimizer, scheduler=scheduler)  # --resume loads their states

    buffer = RolloutBuffer(args.num_steps, args.num_envs, envs.single_observation_space, agent.action_space)
    envs, obs, reset_rows, rng = run.new_envs()
    while not run.is_finished():
        for t in range(args.num_steps):
            buffer.obs[t] = obs
            buffer.reset_rows[t] = reset_rows
            buffer.actions[t] = agent.sample(obs, rng)
            obs, rewards, terminated, truncated, _ = envs.step(agent.to_env(buffer.actions[t]))
            run.count(obs, rewards, terminated | truncated, reset_rows=reset_rows)
            buffer.rewards[t] = rewards
            buffer.terminated[t] = terminated
            buffer.truncated[t] = truncated
            reset_rows = terminated | truncated  # the next step only resets these environments
        buffer.obs[-1] = obs
        buffer.scale_rewards(agent.return_stats, args)

        old_log_probs, values = buffer.log_probs_and_values(agent)
        buffer.compute_advantages(old_log_probs, values, old_log_probs, args)  # pi is pi_old still
        run.log(explained_variance=buffer.explained_variance(), learning_rate=scheduler.get_last_lr()[0])

        for epoch in range(args.update_epochs):
            if args.estimator == "vtrace" and epoch > 0:  # the agent has left pi_old
                log_probs, values = buffer.log_probs_and_values(agent)
                buffer.compute_advantages(log_probs, values, old_log_probs, args)
            agent.train()  # dropout, if added, acts only here: r is not 1 at first
            for batch in buffer.minibatches(args.num_minibatches, rng):
                loss, metrics = ppo_loss(agent, batch, args)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
                run.log(**metrics)
            agent.eval()
            if args.target_kl is not None and metrics["approx_kl"] > args.target_kl:
                break
        scheduler.step()

        if agent.obs_stats is not None:  # only now: old_log_probs are of the former statistics
            agent.obs_stats.update(buffer.obs[:-1][~buffer.reset_rows])
        if run.write_what_is_due():  # a checkpoint: all episodes begin anew, as in a resumed run
            envs, obs, reset_rows, rng = run.new_envs()
            buffer.rewards_so_far[:] = 0
    return run.finish()


# ===== helpers: settings, parts of the networks, environments =====================================

CURVE = {"policy_loss": "policy loss", "value_loss": "value loss", "entropy": "entropy of the policy"}
EXPLORES = False  # training plays the policy itself: its episodes decide --stop-at-return
SCHEDULED = ("anneal_lr",)  # flags that, if they are set, let a schedule end with total_timesteps
ONLY_FLAGS = "resume evaluate model render capture_video config run_dir".split()  # not from config.json
PLUGINS = {"ALE": "ale_py", "MiniGrid": "minigrid", "BabyAI": "minigrid"}  # their import registers ids
ONE_HOT = ("minigrid.wrappers.OneHotPartialObsWrapper", "minigrid.wrappers.ImgObsWrapper")
REFUSED_WRAPPERS = {"NormalizeObservation": "--normalize-obs", "NormalizeReward": "--normalize-reward"}
SAFE_IDS = r"[^:]*"  # ids that a stranger's config.json may ask for: module:Id imports the module
SUFFIX = ".pt"  # of models and checkpoints. With weights_only, reading them executes nothing:
write_state = torch.save
read_state = partial(torch.load, map_location="cpu", weights_only=True)
VECTOR_MODE = None  # the environment's own vector version, if it has one
manual_seed = torch.manual_seed  # seeds torch, for dropout

# Tuned settings per environment; flags win over them.
AS_THEY_ARE = {"normalize_obs": False, "normalize_reward": False}
LUNAR_LANDER = {"num_envs": 16, "num_steps": 512, "update_epochs": 4, "learning_rate": 1e-3, "anneal_lr": True,
                "gamma": 0.999, "gae_lambda": 0.98, "ent_coef": 0.01, "total_timesteps": 990_000}  # fmt: skip
MUJOCO = {"num_envs": 1, "num_steps": 2048, "anneal_lr": True, "ent_coef": 0.0, "total_timesteps": 1_000_000}
ATARI = {"num_envs": 8, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4, "learning_rate": 2.5e-4,
         "anneal_lr": True, "clip_coef": 0.1, "ent_coef": 0.01, "clip_reward": True,
         "total_timesteps": 10_000_000} | AS_THEY_ARE  # fmt: skip
MINIGRID = {"num_envs": 8, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4, "learning_rate": 5e-4,
            "anneal_lr": True, "ent_coef": 0.01, "total_timesteps": 200_000}  # fmt: skip
TUNED = {
    # scores: benchmarks/results/ppo_scores.json
    "CartPole-v1": {"num_envs": 32, "num_steps": 64, "num_minibatches": 8, "update_epochs": 4, "learning_rate": 2e-3,
                    "anneal_lr": True, "gamma": 0.98, "gae_lambda": 0.9, "ent_coef": 0.0,
                    "total_timesteps": 147_000} | AS_THEY_ARE,
    "Acrobot-v1": {"num_envs": 16, "num_steps": 128, "num_minibatches": 8, "learning_rate": 1e-3, "anneal_lr": True,
                   "gae_lambda": 0.94, "ent_coef": 0.0, "total_timesteps": 998_000},
    "MountainCar-v0": {"num_envs": 16, "num_steps": 64, "num_minibatches": 8, "update_epochs": 8,
                       "learning_rate": 2e-3, "anneal_lr": True, "gae_lambda": 0.98, "ent_coef": 0.0,
                       "total_timesteps": 998_000},
    "Pendulum-v1": {"num_envs": 8, "num_steps": 256, "num_minibatches": 16, "learning_rate": 1e-3, "anneal_lr": True,
                    "gamma": 0.98, "ent_coef": 0.0, "total_timesteps": 500_000} | AS_THEY_ARE,
    "MountainCarContinuous-v0": {"num_envs": 8, "num_steps": 128, "num_minibatches": 8, "learning_rate": 1e-3,
                                 "anneal_lr": True, "gamma": 0.9999, "gae_lambda": 0.9, "ent_coef": 0.00429,
                                 "total_timesteps": 100_000},
    "LunarLander-v3": LUNAR_LANDER,
    "LunarLanderContinuous-v3": LUNAR_LANDER | {"ent_coef": 0.0, "init_std": 0.37, "total_timesteps": 1_500_000},
    "BipedalWalker-v3": {"num_envs": 32, "num_steps": 256, "num_minibatches": 64, "anneal_lr": True, "gamma": 0.999,
                         "ent_coef": 0.0, "total_timesteps": 1_500_000},
    "MiniGrid-DoorKey-5x5-v0": MINIGRID,  # as RGB images, too
    "MiniGrid-Empty-5x5-v0": MINIGRID | {"total_timesteps": 60_000},
    # CleanRL's hyperparameters, but for its clipped value loss and HalfCheetah's init_std. Atari,
    # with Gymnasium's preprocessing, was not run to its end
    "HalfCheetah-v5": MUJOCO | {"init_std": 0.37},
    "Hopper-v5": MUJOCO, "Walker2d-v5": MUJOCO,
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


class NatureCNN(nn.Module):
    """DQN's network for images (Mnih et al. 2015, doi 10.1038/nature14236).

    (B, *shape) of bytes -> (B, 512).
    """

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
    """Whether a Box holds images (uint8, channels first or last), large enough for a CNN."""
    return space.dtype == np.uint8 and len(space.shape) == 3 and sorted(space.shape)[1] >= 36


def output_sizes(space):
    """Categories of each factor of a discrete action space; of a Box, its number of dimensions."""
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ravel().tolist()
    if isinstance(space, spaces.MultiBinary):
        return [2] * math.prod(space.shape)
    return [int(spaces.flatdim(space))]


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


def set_up_atari(kwargs, wrappers, mode):
    """Add DQN's preprocessing to `kwargs`; return the wrappers that it takes."""
    if mode is None:  # ale_py's own vector version, which counts frames and clips rewards by default
        kwargs.setdefault("max_num_frames_per_episode", 4 * kwargs.pop("max_episode_steps", 27_000))
        kwargs.setdefault("reward_clipping", False)
        kwargs.setdefault("use_fire_reset", False)  # off: agents learn to press FIRE
        return wrappers
    kwargs["max_episode_steps"] = 4 * kwargs.get("max_episode_steps", 27_000)  # of frames
    kwargs.setdefault("frameskip", 1)
    stack = partial(gym.wrappers.FrameStackObservation, stack_size=4, padding_type="zero")
    return [gym.wrappers.AtariPreprocessing, stack, *wrappers]  # it needs opencv-python


def vectors_or_images(envs, env_id):
    """The environments; Discrete observations one-hot, Dict and Tuple flat; else a UserError."""
    space = envs.single_observation_space
    if isinstance(space, spaces.Box):
        is_picture = space.dtype == np.uint8 and len(space.shape) >= 2 and space.shape[1] >= 36
        if (is_picture or len(space.shape) == 3 and sorted(space.shape)[1] >= 36) and not is_image(space):
            stack = "'gymnasium.wrappers.FrameStackObservation(stack_size=4)'"
            raise UserError(f"{env_id}: images are uint8 and have three dimensions, not {space}; if grey: {stack}")
        return envs
    plain = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    parts = [space]
    for part in parts:  # the list grows while it is walked
        if isinstance(part, spaces.Dict | spaces.Tuple):
            parts += part.values() if isinstance(part, spaces.Dict) else part
        elif not isinstance(part, plain) or sorted((0, 0, *part.shape))[-2] >= 36:
            choose = "a wrapper must choose what to see, as minigrid.wrappers.ImgObsWrapper does"
            raise UserError(f"{env_id}: {part} cannot become a row of numbers: {choose}")
    return gym.wrappers.vector.FlattenObservation(envs)


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


def make_agent(args, envs):
    """An untrained Agent for these environments. UserError if it cannot handle a space."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    kinds = spaces.Discrete | spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary
    if not isinstance(obs_space, spaces.Box) or not isinstance(action_space, kinds):
        raise UserError(f"{args.env_id}: no Agent for observations {obs_space} and actions {action_space}")
    if args.init_std <= 0:
        raise UserError("init_std must be more than 0")
    # Every other row can be a reset row and drop out; norm_adv makes a single advantage 0.
    if args.num_envs * (args.num_steps // 2) < (2 if args.norm_adv else 1) * args.num_minibatches:
        raise UserError("num_minibatches must be at most num_envs * (num_steps // 2), with norm_adv half of that")
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = True  # images on a GPU: a resumed run ends as an unbroken one
    return Agent(obs_space, action_space, args, choose_device(args, is_image(obs_space))).eval()


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
