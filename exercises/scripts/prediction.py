# /// script
# requires-python = ">=3.11"
# dependencies = ["gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6"]
# ///
"""Prediction: what is each state worth under a policy, told from episodes alone? Monte Carlo, TD(0) and TD(lambda).

    python exercises/scripts/prediction.py

The random walk of Sutton & Barto, Reinforcement Learning, 2nd edition, example 6.2: five states in a row, 0 to 4, the
walk begins in the middle and goes left or right by chance. Beyond the right end it terminates and pays 1, beyond the
left end it terminates and pays nothing. So the states are worth 1/6, 2/6, 3/6, 4/6 and 5/6.

An episode is a list of steps (state, reward, next state, whether the episode has terminated).
"""

import random
from dataclasses import dataclass

STATES = 5
TRUE_VALUES = [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6]


@dataclass
class Args:
    method: str = "td-zero"  # or td-lambda, monte-carlo
    alpha: float = 0.05  # of TD
    trace_decay: float = 0.8  # of TD(lambda)
    episodes: int = 100
    seed: int = 1


def walk(rng):
    """An episode. Its last step leads nowhere: the next state that is given there counts for nothing."""
    episode, state = [], STATES // 2
    while True:
        next_state = state + rng.choice([-1, 1])
        if next_state in (-1, STATES):
            episode.append((state, 1.0 if next_state == STATES else 0.0, state, True))
            return episode
        episode.append((state, 0.0, next_state, False))
        state = next_state


def first_visit_returns(episode, gamma):
    """{state: the return G that followed its first visit}, G_t = R_{t+1} + gamma G_{t+1}   (eq. 3.9)."""
    returns, following = {}, 0.0
    for state, reward, _, _ in reversed(episode):
        following = reward + gamma * following
        returns[state] = following  # the first visit comes last here, and stays
    return returns


def monte_carlo(episodes, num_states, gamma):
    """The values of all states by first-visit Monte Carlo prediction (section 5.1), a list.

    A state's value is the mean of its first-visit returns, over the episodes in which it was seen; 0 if in none.
    """
    sums, counts = [0.0] * num_states, [0] * num_states
    for episode in episodes:
        for state, following in first_visit_returns(episode=episode, gamma=gamma).items():
            sums[state] += following
            counts[state] += 1
    return [total / max(count, 1) for total, count in zip(sums, counts)]


def td_zero(values, episode, alpha, gamma):
    """The values after TD(0) has learnt from the steps of an episode, one after the other; a new list.

    V(S_t) <- V(S_t) + alpha (R_{t+1} + gamma V(S_{t+1}) - V(S_t))   (eq. 6.2), where V(S_{t+1}) is 0 if the episode has
    terminated.
    """
    values = list(values)
    for state, reward, next_state, terminated in episode:
        following = 0.0 if terminated else values[next_state]
        values[state] += alpha * (reward + gamma * following - values[state])
    return values


def td_lambda(values, episode, alpha, gamma, trace_decay):
    """The same for TD(lambda), lambda being trace_decay: each error also goes to the states that led here.

    In each step all traces z fade by gamma lambda, that of S_t grows by 1 (eq. 12.5 for a table; all are 0 when the
    episode begins), and all values move: V(s) <- V(s) + alpha delta_t z(s), where delta_t is the TD error
    (eqs. 12.6 and 12.7).
    """
    values = list(values)
    traces = [0.0] * len(values)
    for state, reward, next_state, terminated in episode:
        following = 0.0 if terminated else values[next_state]
        delta = reward + gamma * following - values[state]
        traces = [gamma * trace_decay * trace for trace in traces]
        traces[state] += 1
        values = [value + alpha * delta * trace for value, trace in zip(values, traces)]
    return values


def train(args):
    """The values that a method finds; TD begins at 0.5 everywhere."""
    rng = random.Random(args.seed)
    episodes = [walk(rng) for _ in range(args.episodes)]
    if args.method == "monte-carlo":
        return monte_carlo(episodes=episodes, num_states=STATES, gamma=1.0)
    values = [0.5] * STATES
    for episode in episodes:
        if args.method == "td-zero":
            values = td_zero(values=values, episode=episode, alpha=args.alpha, gamma=1.0)
        else:
            values = td_lambda(
                values=values, episode=episode, alpha=args.alpha, gamma=1.0, trace_decay=args.trace_decay
            )
    return values


def error(values):
    """The root of the mean squared error of values."""
    return (sum((value - true) ** 2 for value, true in zip(values, TRUE_VALUES)) / STATES) ** 0.5


def main():
    """Print the values after 100 episodes of one walk, and the mean errors over 100 walks."""
    print("               values after 100 episodes         mean error after 1, 10 and 100 episodes")
    print("truth         ", *(f"{value:5.2f}" for value in TRUE_VALUES))
    for method in ("monte-carlo", "td-zero", "td-lambda"):
        errors = []
        for episodes in (1, 10, 100):
            walks = [train(Args(method=method, episodes=episodes, seed=seed)) for seed in range(100)]
            errors.append(sum(map(error, walks)) / 100)
        values = train(Args(method=method))
        print(f"{method:14}", *(f"{x:5.2f}" for x in values), "     ", *(f"{x:5.2f}" for x in errors))


if __name__ == "__main__":
    main()
