# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.3,<2", "numpy>=1.26", "matplotlib>=3.8",
#   "tyro>=1.0",
# ]
# ///
"""Deep Q-learning (DQN), from scratch (arXiv 1312.5602; Mnih et al. 2015, "Human-level control …", Nature 518).

A network learns what each action is worth, Q(s, a), from transitions that are drawn at random from a memory. It is
moved towards what a second network, an older copy of it, makes of the next state:

    y = r + gamma max_a' Q_target(s', a')        (nothing but r where the episode terminated)

Environment, network, evaluation and the learning curve are at the top; what learns stands below.

    python build_dqn.py                      # CartPole-v1, half a minute; draws build_dqn.png
    python build_dqn.py --target-every 1     # the target network is always new
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
    total_timesteps: int = 40_000
    learning_rate: float = 5e-4
    gamma: float = 0.99  # discount
    buffer_size: int = 40_000  # transitions
    batch_size: int = 64
    learning_starts: int = 1000  # steps before the first update
    train_every: int = 4  # steps from one update to the next
    target_every: int = 400  # steps from one copy into the target network to the next
    epsilon_start: float = 1.0  # probability of a random action, at first …
    epsilon_end: float = 0.05  # … and after
    exploration_steps: int = 10_000  # so many steps
    hidden_size: int = 128
    quiet: bool = False  # print nothing, draw no curve


# ===== given: environment, networks, evaluation, learning curve


class Recorder(gym.wrappers.RecordEpisodeStatistics):
    """An environment that prints how it goes, and draws the return of each episode when it is closed."""

    def __init__(self, env, args):
        super().__init__(env, buffer_length=args.total_timesteps)
        self.quiet = args.quiet

    def step(self, action):
        result = super().step(action)
        if "episode" in result[-1] and self.episode_count % 50 == 0 and not self.quiet:
            print(f"episode {self.episode_count}: mean return {np.mean(list(self.return_queue)[-50:]):.1f}")
        return result

    def close(self):
        super().close()
        if not self.quiet:
            plt.plot(self.return_queue, ".")
            plt.xlabel("episodes")
            plt.ylabel("return")
            plt.savefig("build_dqn.png")


def make_env(args):
    """The environment. Its first reset has happened, with the seed: reset it without one."""
    env = Recorder(gym.make(args.env_id), args)
    env.reset(seed=args.seed)
    return env


class QNetwork(nn.Module):
    """What each action is worth."""

    def __init__(self, obs_size, num_actions, hidden_size):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(obs_size, hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, num_actions),
        )

    def forward(self, obs):
        """Q values (…, actions) of observations (…, size), a float32 tensor."""
        return self.layers(obs)

    def best_action(self, obs):
        return self(obs).argmax(-1)


def make_agent(args):
    """A new network. From here on everything that torch draws depends on the seed."""
    torch.manual_seed(args.seed)
    env = gym.make(args.env_id)
    return QNetwork(env.observation_space.shape[0], int(env.action_space.n), args.hidden_size)


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


def epsilon_at(step, args):
    """The probability of a random action: from epsilon_start in step 0, in a straight line, to epsilon_end.

    There it arrives at step exploration_steps, and there it stays.
    """
    done = min(step / args.exploration_steps, 1.0)
    return args.epsilon_start + done * (args.epsilon_end - args.epsilon_start)


def choose_action(network, obs, epsilon, rng):
    """An action, an int: with probability epsilon any of them, the best one too; else the one of the highest Q.

    `obs` is an array (size,); `rng` is a NumPy generator.
    """
    with torch.no_grad():
        q = network(torch.as_tensor(obs))
    if rng.random() < epsilon:
        return int(rng.integers(len(q)))
    return int(q.argmax())


class ReplayBuffer:
    """The last `size` transitions. Slots are filled one after the other; when all are, the oldest is overwritten."""

    def __init__(self, size, obs_size):
        self.size, self.added = size, 0  # how many have been added in all
        self.obs = torch.zeros(size, obs_size)
        self.actions = torch.zeros(size, dtype=torch.int64)
        self.rewards = torch.zeros(size)
        self.next_obs = torch.zeros(size, obs_size)
        self.terminated = torch.zeros(size, dtype=torch.bool)

    def add(self, obs, action, reward, next_obs, terminated):
        """Remember a transition."""
        slot = self.added % self.size
        self.obs[slot] = torch.as_tensor(obs)
        self.actions[slot] = action
        self.rewards[slot] = reward
        self.next_obs[slot] = torch.as_tensor(next_obs)
        self.terminated[slot] = terminated
        self.added += 1

    def sample(self, batch_size, rng):
        """(obs, actions, rewards, next_obs, terminated) of transitions drawn with equal chances, repeats allowed."""
        slots = rng.integers(min(self.added, self.size), size=batch_size)
        return self.obs[slots], self.actions[slots], self.rewards[slots], self.next_obs[slots], self.terminated[slots]


def td_targets(rewards, terminated, gamma, target_q):
    """y = r + gamma max_a' Q_target(s', a') (B,), nothing but r where the episode terminated. `target_q` is (B, A)."""
    return rewards + gamma * target_q.max(1).values * ~terminated


def dqn_loss(network, target, batch, gamma):
    """mean((Q(s, a) - y)^2) of a batch as `sample` returns it. Only `network` learns, and only through Q(s, a)."""
    obs, actions, rewards, next_obs, terminated = batch
    with torch.no_grad():
        y = td_targets(rewards, terminated, gamma, target(next_obs))
    q = network(obs).gather(1, actions[:, None]).squeeze(1)
    return ((q - y) ** 2).mean()


def train(args):
    """Learn for args.total_timesteps steps. Returns the network."""
    env = make_env(args)
    network, target = make_agent(args), make_agent(args)
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate)
    buffer = ReplayBuffer(args.buffer_size, env.observation_space.shape[0])
    rng = np.random.default_rng(args.seed)
    obs, _ = env.reset()
    for step in range(args.total_timesteps):
        action = choose_action(network, obs, epsilon_at(step, args), rng)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        buffer.add(obs, action, float(reward), next_obs, terminated)
        obs = next_obs
        if terminated or truncated:
            obs, _ = env.reset()
        if step >= args.learning_starts and step % args.train_every == 0:
            loss = dqn_loss(network, target, buffer.sample(args.batch_size, rng), args.gamma)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % args.target_every == 0:
            target.load_state_dict(network.state_dict())
    env.close()
    return network


if __name__ == "__main__":
    args = tyro.cli(Args)
    print("evaluation: {:.1f} ± {:.1f}".format(*evaluate(train(args), args)))
