"""Q-learning, Sarsa, expected Sarsa and double Q-learning by the book (Sutton and Barto 2018, chapter 6).

test_qlearning.py compares every entry of the tables of qlearning.py with it.
"""

import random

import numpy as np


def train(args, world):
    """What `train` of qlearning.py does in a `world` of 4 states, called 3 to 6, and 3 actions, called 1 to 3.

    Returns tables, TD errors, (step, return, length) of episodes.
    """
    generator, env = np.random.default_rng([args.seed, 0]), world()
    env.reset(seed=int(generator.integers(2**31)))
    rng = random.Random(int(generator.integers(2**63)))
    Q, errors, episodes, step = np.zeros((2 if args.algorithm == "double-q" else 1, 4, 3)), [], [], 0

    def draw(values):
        if rng.random() < epsilon:
            return rng.randrange(3)
        best = [a for a in range(3) if values[a] == max(values)]
        return best[0] if len(best) == 1 else rng.choice(best)

    while step < args.total_timesteps:
        (obs, _), total, over, a, first = env.reset(), 0, False, None, step
        while not over:
            s, left = obs - 3, max(0, 1 - step / args.total_timesteps)
            epsilon = max(0.05, args.epsilon_decay ** len(episodes))
            if args.exploration_fraction:
                epsilon = 0.05 + 0.95 * max(0, 1 - step / (args.total_timesteps * args.exploration_fraction))
            a = draw(Q.sum(0)[s]) if a is None else a
            obs, r, terminated, truncated, _ = env.step(a + 1)
            s2, q = obs - 3, Q[0]
            worth = max(q[s2])
            if args.algorithm == "sarsa":
                a2 = draw(q[s2])
                worth = q[s2, a2]
            elif args.algorithm == "expected-sarsa":
                worth = sum((epsilon / 3 + (1 - epsilon) * (a == np.argmax(q[s2]))) * q[s2, a] for a in range(3))
            elif args.algorithm == "double-q":
                q, other = Q if rng.random() < 0.5 else Q[::-1]
                worth = other[s2, np.argmax(q[s2])]
            error = r + (0 if terminated else args.gamma * worth) - q[s, a]
            q[s, a] += args.learning_rate * (left if args.anneal_lr else 1) * error
            step, total, over = step + 1, total + r, terminated or truncated
            a = a2 if args.algorithm == "sarsa" else None
            errors.append(abs(error))
        episodes.append((step, total, step - first))
    return Q, errors, episodes
