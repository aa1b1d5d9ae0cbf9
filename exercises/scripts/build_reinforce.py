# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2",
#   "tyro==1.0.17",
# ]
# ///
"""REINFORCE with a baseline, from scratch (Sutton & Barto, section 13.4).

Play an episode. Make each of its actions likelier, in proportion to how much better the episode went on from there than
the baseline had expected:

    grad J  ~  (G_t - v(s_t)) grad log pi(a_t | s_t)

The baseline v, a second network, learns to predict the return G_t; without it the gradient would be right as well, but
far noisier. Environment, networks, evaluation and the learning curve are at the top; what learns stands below.

    python build_reinforce.py                      # CartPole-v1, half a minute; draws build_reinforce.png
    python build_reinforce.py --gamma 1 --seed 2
"""

from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from torch import nn


@dataclass(kw_only=True)
class Args:
    env_id: str = "CartPole-v1"  # discrete actions, observations that are vectors
    seed: int = 1
    total_timesteps: int = 60_000  # the episode in which they are reached is the last one
    learning_rate: float = 1e-2
    gamma: float = 0.99  # discount
    vf_coef: float = 0.5  # weight of the baseline's loss
    hidden_size: int = 64
    quiet: bool = False  # print nothing, draw no curve


# ===== given: environment, networks, evaluation, learning curve


class Recorder(gym.Wrapper):
    """An environment that counts its steps and remembers the return of each episode, for the learning curve."""

    def __init__(self, env, args):
        super().__init__(env)
        self.args, self.steps, self.current, self.history = args, 0, 0.0, []

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        self.current += reward
        if terminated or truncated:
            self.history.append((self.steps, self.current))
            if len(self.history) % 50 == 0 and not self.args.quiet:
                print(f"step {self.steps}: mean return {np.mean([r for _, r in self.history[-50:]]):.1f}")
            self.current = 0.0
        return obs, reward, terminated, truncated, info

    def close(self):
        """Call it at the end: it draws the curve."""
        super().close()
        if self.history and not self.args.quiet:
            draw_curve(self.history)


def draw_curve(history):
    """A picture of the return of each episode, beside this file."""
    import matplotlib.pyplot as plt

    plt.plot(*zip(*history), ".")
    plt.xlabel("steps")
    plt.ylabel("return of an episode")
    plt.savefig(f"{__file__.removesuffix('.py')}.png")


def make_env(args):
    """The environment. Its first reset has happened, with the seed: reset it without one."""
    env = Recorder(gym.make(args.env_id), args)
    env.reset(seed=args.seed)
    return env


class Agent(nn.Module):
    """Two networks: the policy, and the baseline."""

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
    env, returns = gym.make(args.env_id), []
    for i in range(episodes):
        obs, _ = env.reset(seed=args.seed + 10_000 + i)
        returns.append(0.0)
        over = False
        while not over:
            with torch.no_grad():
                action = agent.best_action(torch.as_tensor(obs)).item()
            obs, reward, terminated, truncated, _ = env.step(action)
            returns[-1] += float(reward)
            over = terminated or truncated
    return float(np.mean(returns)), float(np.std(returns))


# ===== what learns


def compute_returns(rewards, last_value, gamma):
    """The discounted returns (T,) of an episode: G_t = r_t + gamma G_{t+1} (Sutton & Barto, eq. 3.9).

    `rewards` is a tensor (T,). `last_value` is the G of the state after the last step: 0 where the episode terminated,
    the baseline's value of that state where it was truncated.
    """
    returns = torch.empty_like(rewards)
    following = last_value
    for t in reversed(range(len(rewards))):
        following = rewards[t] + gamma * following
        returns[t] = following
    return returns


def reinforce_loss(logits, values, actions, returns, vf_coef):
    """A number to minimise: - mean(log pi(a|s) (G - v)) + vf_coef mean((G - v)^2).

    `logits` is (T, actions), the others are (T,). Only the second term may move the baseline.
    """
    log_probs = torch.distributions.Categorical(logits=logits).log_prob(actions)
    advantages = (returns - values).detach()
    policy_loss = -(log_probs * advantages).mean()
    value_loss = ((returns - values) ** 2).mean()
    return policy_loss + vf_coef * value_loss


def play_episode(agent, env):
    """An episode, from env.reset() to its end, with actions drawn from the policy: (obs, actions, rewards, last_value).

    Tensors (T, size), (T,), (T,), and a float; obs[t] is what actions[t] was chosen from. No gradient is needed here.
    """
    all_obs, actions, rewards = [], [], []
    obs, _ = env.reset()
    over = False
    while not over:
        obs = torch.as_tensor(obs)
        with torch.no_grad():
            logits, _ = agent(obs)
        action = torch.distributions.Categorical(logits=logits).sample()
        all_obs.append(obs)
        actions.append(action)
        obs, reward, terminated, truncated, _ = env.step(action.item())
        rewards.append(float(reward))
        over = terminated or truncated
    last_value = 0.0
    if not terminated:
        with torch.no_grad():
            last_value = agent(torch.as_tensor(obs))[1].item()
    return torch.stack(all_obs), torch.stack(actions), torch.tensor(rewards), last_value


def train(args):
    """Learn for args.total_timesteps steps. Returns the agent."""
    env = make_env(args)
    agent = make_agent(args)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate)
    while env.steps < args.total_timesteps:
        obs, actions, rewards, last_value = play_episode(agent, env)
        returns = compute_returns(rewards, last_value, args.gamma)
        logits, values = agent(obs)
        loss = reinforce_loss(logits, values, actions, returns, args.vf_coef)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    env.close()
    return agent


if __name__ == "__main__":
    import tyro

    args = tyro.cli(Args)
    print("evaluation: {:.1f} ± {:.1f}".format(*evaluate(train(args), args)))
