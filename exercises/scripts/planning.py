# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = ["gymnasium[classic-control,toy-text]>=1.3,<2", "numpy>=1.26"]
# ///
"""Planning: the best policy of a world whose rules are known, on FrozenLake.

    python exercises/scripts/planning.py

Sutton & Barto, Reinforcement Learning, 2nd edition, chapter 4. Nothing is played here, and nothing is random: P is the
table of the world's rules. P[s][a] lists what can happen if action a is taken in state s, as tuples
(probability, next state, reward, whether the episode has terminated).
"""

import gymnasium as gym

ARROWS = "←↓→↑"  # FrozenLake's actions


def action_value(outcomes, values, gamma):
    """What an action is worth, if states are worth `values`: sum of p (r + gamma V(s')) over its outcomes P[s][a].

    It is the sum in eqs. 4.5 and 4.10. Nothing follows where the episode has terminated: there V(s') counts as 0,
    whatever `values` say.
    """
    total = 0.0
    for probability, next_state, reward, terminated in outcomes:
        future = 0.0 if terminated else gamma * values[next_state]
        total += probability * (reward + future)
    return total


def value_iteration(P, gamma, theta=1e-10):
    """The values of all states under the best policy, a list, by sweeps (eq. 4.10).

    Each does V(s) <- max_a sum p (r + gamma V(s')) for all states. The values begin at 0. The first sweep in which no
    value changes by theta or more is the last.
    """
    values = [0.0] * len(P)
    while True:
        change = 0.0
        for state in range(len(P)):
            before = values[state]
            values[state] = max(action_value(P[state][action], values, gamma) for action in P[state])
            change = max(change, abs(values[state] - before))
        if change < theta:
            return values


def evaluate_policy(P, policy, gamma, theta=1e-10):
    """The values of all states under a policy, which is a list of actions, one for each state (eq. 4.5, by sweeps)."""
    values = [0.0] * len(P)
    while True:
        change = 0.0
        for state in range(len(P)):
            before = values[state]
            values[state] = action_value(P[state][policy[state]], values, gamma)
            change = max(change, abs(values[state] - before))
        if change < theta:
            return values


def improve_policy(P, policy, values, gamma):
    """The policy that is greedy with respect to `values`, a new list of actions (eq. 4.9).

    An action of the old policy is kept if no other is better by more than 1e-8; else the first of the best is taken.
    """
    improved = []
    for state in range(len(P)):
        worth = [action_value(P[state][action], values, gamma) for action in range(len(P[state]))]
        action = policy[state]
        if max(worth) > worth[action] + 1e-8:
            action = worth.index(max(worth))
        improved.append(action)
    return improved


def policy_iteration(P, gamma):
    """(the best policy, its values, how many policies were evaluated), by turns of evaluation and improvement.

    Begins with action 0 everywhere; ends when the improved policy is the same (section 4.3).
    """
    policy = [0] * len(P)
    evaluated = 0
    while True:
        values = evaluate_policy(P=P, policy=policy, gamma=gamma)
        evaluated += 1
        improved = improve_policy(P=P, policy=policy, values=values, gamma=gamma)
        if improved == policy:
            return policy, values, evaluated
        policy = improved


def main():
    """Print the values as the lake lies, and what is best to do, on dry and on slippery ice. H is a hole, G the goal.

    On slippery ice one moves where one wants once in three times, else to a side.
    """
    for slippery in (False, True):
        env = gym.make("FrozenLake-v1", is_slippery=slippery).unwrapped
        values = value_iteration(P=env.P, gamma=0.99)
        policy, _, evaluated = policy_iteration(P=env.P, gamma=0.99)
        print("slippery ice," if slippery else "dry ice,", f"{evaluated} policies evaluated")
        for row, letters in enumerate(env.desc.astype(str)):
            states = range(row * 4, row * 4 + 4)
            moves = [letter if letter in "HG" else ARROWS[policy[s]] for letter, s in zip(letters, states)]
            print("   ", *(f"{values[s]:6.3f}" for s in states), "   ", *moves)


if __name__ == "__main__":
    main()
