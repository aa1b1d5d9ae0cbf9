"""Bandits: which of ten arms pays most? Four ways to find out while one plays.

    python exercises/scripts/bandits.py

The ten-armed testbed of Sutton & Barto, Reinforcement Learning, 2nd edition, section 2.3: the arms' true values are
drawn from N(0, 1), a reward from N(true value, 1). What is printed is the mean reward of 1,000 steps, over many
testbeds, and how often the best arm is taken, as in figures 2.2, 2.4 and 2.5.
"""

import math
import random

ARMS, STEPS = 10, 1000


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


def play(method, rng):
    """(mean reward, share of the best arm) of a method in STEPS steps on one testbed."""
    true_values = [rng.gauss(0, 1) for _ in range(ARMS)]
    values, counts, preferences = [0.0] * ARMS, [0] * ARMS, [0.0] * ARMS
    mean_reward, best = 0.0, 0
    for t in range(1, STEPS + 1):
        if method == "ucb":
            action = ucb_action(values=values, counts=counts, t=t, c=2.0)
        elif method == "gradient":
            action = rng.choices(range(ARMS), weights=softmax(preferences))[0]
        elif method == "epsilon-greedy" and rng.random() < 0.1:
            action = rng.randrange(ARMS)
        else:
            action = values.index(max(values))
        reward = rng.gauss(true_values[action], 1)
        counts[action] += 1
        values[action] = new_value(value=values[action], reward=reward, count=counts[action])
        mean_reward = new_value(value=mean_reward, reward=reward, count=t)
        preferences = new_preferences(preferences, action=action, reward=reward, baseline=mean_reward, alpha=0.1)
        best += true_values[action] == max(true_values)
    return mean_reward, best / STEPS


def main():
    """Print how each method does on 200 testbeds."""
    print("                  reward  best arm")
    for method in ("greedy", "epsilon-greedy", "ucb", "gradient"):
        rng = random.Random(1)
        rewards, shares = zip(*[play(method, rng) for _ in range(200)])
        print(f"{method:15} {sum(rewards) / 200:8.2f} {sum(shares) / 200:9.0%}")


if __name__ == "__main__":
    main()
