"""Prediction: what is each state worth under a policy, told from episodes alone? TD(0) and TD(lambda).

    python exercises/scripts/prediction.py

The random walk of Sutton & Barto, Reinforcement Learning, 2nd edition, example 6.2: five states in a row, 0 to 4, the
walk begins in the middle and goes left or right by chance. Beyond the right end it terminates and pays 1, beyond the
left end it terminates and pays nothing. So the states are worth 1/6, 2/6, 3/6, 4/6 and 5/6.

An episode is a list of steps (state, reward, next state, whether the episode has terminated).
"""

import random

STATES = 5
TRUE_VALUES = [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6]


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


def main():
    """Print the true values, and those that both methods find in 100 episodes; they begin at 0.5 everywhere."""
    rng = random.Random(1)
    by_td_zero, by_td_lambda = [0.5] * STATES, [0.5] * STATES
    for _ in range(100):
        episode = walk(rng)
        by_td_zero = td_zero(values=by_td_zero, episode=episode, alpha=0.05, gamma=1.0)
        by_td_lambda = td_lambda(values=by_td_lambda, episode=episode, alpha=0.05, gamma=1.0, trace_decay=0.8)
    for name, values in (("truth", TRUE_VALUES), ("TD(0)", by_td_zero), ("TD(lambda)", by_td_lambda)):
        print(f"{name:10}", *(f"{value:5.2f}" for value in values))


if __name__ == "__main__":
    main()
