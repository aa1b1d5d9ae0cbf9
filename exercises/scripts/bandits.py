# /// script
# requires-python = ">=3.11"
# dependencies = ["gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6"]
# ///
"""Bandits: which of ten arms pays most? Four ways to find out while one plays.

    python exercises/scripts/bandits.py

The ten-armed testbed of Sutton & Barto, Reinforcement Learning, 2nd edition, section 2.3: the arms' true values are
drawn from N(0, 1), a reward from N(true value, 1). What is printed is, as in figures 2.2, 2.4 and 2.5, the mean over
many testbeds of the reward, and how often the best arm is taken.
"""

import math
import random
from dataclasses import dataclass

ARMS, STEPS = 10, 1000


@dataclass
class Args:
    method: str = "epsilon-greedy"  # or greedy, ucb, gradient
    testbeds: int = 200
    seed: int = 1


def new_value(value, reward, count, alpha=None):
    """The estimate of an arm's value after one more reward: Q_{n+1} = Q_n + step (R_n - Q_n)   (eq. 2.3).

    count is n: how often the arm was pulled, this time included. The step is 1/n, which makes Q the mean of all
    rewards; or the constant alpha if there is one, also if it is 0 (eq. 2.5), which lets old rewards fade away.
    """
    step = 1 / count if alpha is None else alpha
    return value + step * (reward - value)


def ucb_action(values, counts, t, c):
    """The arm with the highest upper confidence bound: argmax_a [Q(a) + c sqrt(ln t / N(a))]   (eq. 2.10).

    An arm that was never pulled comes before all others. Of several best arms it is the first.
    """
    bounds = []
    for value, count in zip(values, counts):
        if count == 0:
            bounds.append(math.inf)
        else:
            bounds.append(value + c * math.sqrt(math.log(t) / count))
    return bounds.index(max(bounds))


def softmax(preferences):
    """The probabilities pi(a) = e^H(a) / sum_b e^H(b)   (eq. 2.11), a list."""
    largest = max(preferences)  # taken away, so that no power overflows
    powers = [math.exp(preference - largest) for preference in preferences]
    return [power / sum(powers) for power in powers]


def new_preferences(preferences, action, reward, baseline, alpha):
    """The preferences of a gradient bandit after a reward (eq. 2.12), a new list.

    H(A) + alpha (R - baseline) (1 - pi(A)) for the action A that was taken, and for all others
    H(a) - alpha (R - baseline) pi(a).
    """
    step = alpha * (reward - baseline)
    moved = []
    for a, probability in enumerate(softmax(preferences)):
        taken = 1 if a == action else 0
        moved.append(preferences[a] + step * (taken - probability))
    return moved


def choose(method, values, counts, preferences, t, rng):
    """The arm that a method pulls in step t = 1, 2, …"""
    if method == "ucb":
        return ucb_action(values=values, counts=counts, t=t, c=2.0)
    if method == "gradient":
        return rng.choices(range(ARMS), weights=softmax(preferences))[0]
    if method == "epsilon-greedy" and rng.random() < 0.1:
        return rng.randrange(ARMS)
    return values.index(max(values))


def play(method, rng):
    """(rewards, whether the best arm was taken) of all steps on one testbed."""
    true_values = [rng.gauss(0, 1) for _ in range(ARMS)]
    values, counts, preferences = [0.0] * ARMS, [0] * ARMS, [0.0] * ARMS
    rewards, best, mean_reward = [], [], 0.0
    for t in range(1, STEPS + 1):
        action = choose(method, values, counts, preferences, t, rng)
        reward = rng.gauss(true_values[action], 1)
        counts[action] += 1
        values[action] = new_value(value=values[action], reward=reward, count=counts[action])
        mean_reward = new_value(value=mean_reward, reward=reward, count=t)
        if method == "gradient":
            preferences = new_preferences(
                preferences=preferences, action=action, reward=reward, baseline=mean_reward, alpha=0.1
            )
        rewards.append(reward)
        best.append(true_values[action] == max(true_values))
    return rewards, best


def train(args):
    """Play on all testbeds: (mean reward, share of the best arm) in steps 1 to 100, then in those after them."""
    rng, means = random.Random(args.seed), [0.0] * 4
    for _ in range(args.testbeds):
        rewards, best = play(args.method, rng)
        parts = rewards[:100], best[:100], rewards[100:], best[100:]
        means = [mean + sum(part) / len(part) / args.testbeds for mean, part in zip(means, parts)]
    return means


def main():
    """Print how each method does, early and late."""
    print("                     steps 1 to 100          steps 101 to 1000")
    print("                     reward    best arm      reward    best arm")
    for method in ("greedy", "epsilon-greedy", "ucb", "gradient"):
        early, early_best, late, late_best = train(Args(method=method))
        print(f"{method:18} {early:8.2f} {early_best:11.0%} {late:11.2f} {late_best:11.0%}")


if __name__ == "__main__":
    main()
