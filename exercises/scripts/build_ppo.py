# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.3,<2", "numpy>=1.26", "matplotlib>=3.8",
#   "tyro>=1.0",
# ]
# ///
"""Proximal policy optimisation (PPO), from scratch (arXiv 1707.06347).

Play some steps in several environments, let the critic say how much better than expected each action turned out (its
advantage A), and make the better actions likelier, in several epochs over the same steps. The ratio r says how much
likelier an action has become since; clipping takes away the reason to move it far from 1:

    L = E[ min( r A, clip(r, 1 - eps, 1 + eps) A ) ],   r = pi(a|s) / pi_old(a|s)     (eq. 7)

Environment, networks, evaluation and the learning curve are at the top; what learns stands below.

    python build_ppo.py                       # CartPole-v1, half a minute; draws build_ppo.png
    python build_ppo.py --clip-coef 1000      # without clipping
"""

from dataclasses import dataclass

import gymnasium as gym
import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro
from torch import nn


@dataclass(kw_only=True)
class Args:
    env_id: str = "CartPole-v1"  # discrete actions, observations that are vectors
    seed: int = 1
    total_timesteps: int = 100_000  # in all environments together
    num_envs: int = 16
    num_steps: int = 64  # in each environment, between two updates
    learning_rate: float = 1e-3
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95
    update_epochs: int = 8
    minibatch_size: int = 256  # divides num_envs x num_steps
    clip_coef: float = 0.2  # the eps of the formula
    vf_coef: float = 0.5  # weight of the critic's loss
    ent_coef: float = 0.0  # weight of the entropy, which is to be high
    hidden_size: int = 64
    quiet: bool = False  # print nothing, draw no curve


# ===== given: environment, networks, evaluation, learning curve


class Environments:
    """Environments side by side: all is in tensors, of which the first dimension counts the environments."""

    def __init__(self, args):
        same_step = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
        envs = gym.make_vec(args.env_id, args.num_envs, vectorization_mode="sync", vector_kwargs=same_step)
        self.envs = gym.wrappers.vector.RecordEpisodeStatistics(envs, buffer_length=args.total_timesteps)
        self.args, self.steps, self.returns = args, 0, self.envs.return_queue

    def reset(self):
        """The first observations (N, size)."""
        obs, _ = self.envs.reset(seed=self.args.seed)
        return torch.as_tensor(obs)

    def step(self, actions):
        """One step in each: (obs, rewards, terminated, truncated, reached).

        `obs` are what the next actions are to be chosen from. `reached` are the observations that the step led to.
        They are the same, but where an episode has ended: there obs is already the first of a new episode.
        """
        obs, rewards, terminated, truncated, infos = self.envs.step(actions.numpy())
        reached = obs.copy()
        for i in np.flatnonzero(terminated | truncated):
            reached[i] = infos["final_obs"][i]
        self.steps += len(obs)
        if self.steps % 10_000 < len(obs) and self.returns and not self.args.quiet:
            print(f"step {self.steps}: mean return {np.mean(list(self.returns)[-20:]):.1f}")
        rewards = torch.as_tensor(rewards, dtype=torch.float32)
        ends = torch.as_tensor(terminated), torch.as_tensor(truncated)
        return torch.as_tensor(obs), rewards, *ends, torch.as_tensor(reached)

    def close(self):
        """Call it at the end: it draws the return of each episode."""
        self.envs.close()
        if not self.args.quiet:
            plt.plot(self.returns, ".")
            plt.xlabel("episodes")
            plt.ylabel("return")
            plt.savefig("build_ppo.png")


class Agent(nn.Module):
    """Two networks: the policy, and the critic."""

    def __init__(self, obs_size, num_actions, hidden_size):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(obs_size, hidden_size), nn.Tanh(), nn.Linear(hidden_size, num_actions))
        self.critic = nn.Sequential(nn.Linear(obs_size, hidden_size), nn.Tanh(), nn.Linear(hidden_size, 1))

    def forward(self, obs):
        """(logits (…, actions), values (…)) of observations (…, size), a float32 tensor."""
        return self.actor(obs), self.critic(obs).squeeze(-1)

    def best_action(self, obs):
        return self.actor(obs).argmax(-1)


def make_agent(args):
    """A new agent. From here on everything that torch draws depends on the seed."""
    torch.manual_seed(args.seed)
    env = gym.make(args.env_id)
    return Agent(env.observation_space.shape[0], int(env.action_space.n), args.hidden_size)


def evaluate(agent, args, episodes=20):
    """(mean, standard deviation) of the returns of some episodes, in which the agent takes its best action."""
    env = gym.wrappers.RecordEpisodeStatistics(gym.make(args.env_id), buffer_length=episodes)
    for i in range(episodes):
        obs, _ = env.reset(seed=args.seed + 10_000 + i)
        over = False
        while not over:
            with torch.no_grad():
                action = agent.best_action(torch.as_tensor(obs)).item()
            obs, _, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
    return float(np.mean(env.return_queue)), float(np.std(env.return_queue))


# ===== what learns


def choose_actions(logits):
    """Draw an action for each row of logits (N, actions). Returns (actions (N,), their log-probabilities (N,))."""
    policy = torch.distributions.Categorical(logits=logits)
    actions = policy.sample()
    return actions, policy.log_prob(actions)


def compute_gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """(advantages, returns) by generalised advantage estimation (arXiv 1506.02438, eq. 11 and 16); all are (T, N).

    delta_t = r_t + gamma V(s_{t+1}) - V(s_t),   A_t = delta_t + gamma lambda A_{t+1},   returns = A + V.
    next_values[t] is the value of the state that step t led to.
    """
    advantages = torch.empty_like(rewards)
    following = 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_values[t] * ~terminated[t] - values[t]
        following = delta + gamma * gae_lambda * following * ~(terminated[t] | truncated[t])
        advantages[t] = following
    return advantages, advantages + values


def normalized(advantages):
    """The advantages (T, N), shifted and scaled to mean 0 and standard deviation 1, by torch's std(), over all."""
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def ppo_loss(logits, values, actions, old_log_probs, advantages, returns, args):
    """A number to minimise: - L + vf_coef mean((returns - V)^2) - ent_coef (the mean entropy of the policy).

    L is the clipped objective of eq. 7. `logits` (B, actions) and `values` (B,) are of the present networks, with
    gradients; all else is (B,) and was collected.
    """
    policy = torch.distributions.Categorical(logits=logits)
    ratio = (policy.log_prob(actions) - old_log_probs).exp()
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    value_loss = ((returns - values) ** 2).mean()
    return policy_loss + args.vf_coef * value_loss - args.ent_coef * policy.entropy().mean()


def collect(agent, envs, obs, args):
    """Play num_steps steps in each environment, beginning with the observations obs (N, size).

    Returns a dict of tensors (T, N, …): obs, actions, log_probs, rewards, values, next_values, terminated, truncated,
    of which next_values are the values of what each step has `reached`; and the observations to go on with. None of
    them carries a gradient: that is for the update.
    """
    names = "obs actions log_probs rewards values next_values terminated truncated".split()
    steps = []
    for _ in range(args.num_steps):
        with torch.no_grad():
            logits, values = agent(obs)
            actions, log_probs = choose_actions(logits)
            next_obs, rewards, terminated, truncated, reached = envs.step(actions)
            _, next_values = agent(reached)
        steps.append((obs, actions, log_probs, rewards, values, next_values, terminated, truncated))
        obs = next_obs
    return {name: torch.stack(column) for name, column in zip(names, zip(*steps))}, obs


def update(agent, optimizer, obs, actions, log_probs, advantages, returns, args):
    """One step of the optimizer for each minibatch, in each of update_epochs epochs.

    The tensors are (B, …), all that was collected. In an epoch each row is in one minibatch, in an order drawn anew.
    """
    for _ in range(args.update_epochs):
        for rows in torch.randperm(len(obs)).split(args.minibatch_size):
            logits, values = agent(obs[rows])
            loss = ppo_loss(logits, values, actions[rows], log_probs[rows], advantages[rows], returns[rows], args)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def train(args):
    """Learn for args.total_timesteps steps. Returns the agent."""
    envs = Environments(args)
    agent = make_agent(args)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate)
    obs = envs.reset()
    while envs.steps < args.total_timesteps:
        rollout, obs = collect(agent, envs, obs, args)
        estimates = ("rewards", "values", "next_values", "terminated", "truncated")
        advantages, returns = compute_gae(*(rollout[name] for name in estimates), args.gamma, args.gae_lambda)
        batch = [rollout["obs"], rollout["actions"], rollout["log_probs"], normalized(advantages), returns]
        update(agent, optimizer, *(x.flatten(0, 1) for x in batch), args)
    envs.close()
    return agent


if __name__ == "__main__":
    args = tyro.cli(Args)
    print("evaluation: {:.1f} ± {:.1f}".format(*evaluate(train(args), args)))
