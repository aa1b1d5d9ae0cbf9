"""Exercises of weeks 1 to 3: bandits, dynamic programming, prediction, Q-learning."""

import math
import random
from types import SimpleNamespace
from unittest import mock

import probes  # noqa: F401  (registers its environments)
from mechanism import exercise

# -------------------------------------------------------------------------------------------------------- bandits.py


def ucb_arms(m):
    """The arm that is pulled, of two, for five values of c. The bonus is worth the gap of 1 from c = 2.22 on."""
    return [m.ucb_action(values=[2.0, 1.0], counts=[89, 10], t=100, c=c) for c in (0.2, 1.0, 2.3, 3.0, 4.0)]


def moved_preferences(m):
    """The preferences ln 2, 0, 0 after action 0 paid 5, and after action 1 paid 1; the baseline is 3, alpha 0.1."""
    given = {"preferences": [math.log(2), 0.0, 0.0], "baseline": 3.0, "alpha": 0.1}
    return m.new_preferences(**given, action=0, reward=5.0), m.new_preferences(**given, action=1, reward=1.0)


def random_bandits(m, rng):
    """The three functions; the bounds of the arms nearly agree."""
    alpha = rng.choice([None, 0.0, rng.random()])
    value = m.new_value(value=rng.normal(), reward=rng.normal(), count=int(rng.integers(1, 9)), alpha=alpha)
    arms = []
    for _ in range(10):
        t, counts, c = int(rng.integers(2, 9)), rng.integers(1, 4, 3).tolist(), rng.uniform(0.5, 3)
        values = [0.05 * rng.normal() - c * math.sqrt(math.log(t) / count) for count in counts]
        arms.append(m.ucb_action(values=values, counts=counts, t=t, c=c))
    arms.append(m.ucb_action(values=[0.1, 0.2, 0.3], counts=rng.integers(0, 2, 3).tolist(), t=3, c=1.0))
    preferences, action = rng.normal(size=rng.integers(2, 6)).tolist(), int(rng.integers(2))
    given = {"reward": rng.normal(), "baseline": rng.normal(), "alpha": rng.random()}
    return value, arms, m.new_preferences(preferences=preferences, action=action, **given)


exercise(
    "bandit",
    topic="bandits: action values, UCB, gradient bandit",
    cut="exercises/scripts/bandits.py: new_value, ucb_action, new_preferences",
    course="week 1, 40 minutes",
    task="write one step of three things: the incremental estimate of a value, with step 1/count or a constant one; "
    "the choice by upper confidence bounds; and the update of a gradient bandit. Values, counts and preferences are "
    "lists, one entry for each arm; softmax(preferences) is at hand. Return numbers, or a new list.",
    cases={
        "an arm's value is 3, its third reward is 6. The new value without alpha, with alpha 0.5, with alpha 0 "
        "| eq. 2.3: new = old + step x (target - old)": lambda m: [
            m.new_value(value=3.0, reward=6.0, count=3, alpha=alpha) for alpha in (None, 0.5, 0.0)
        ],
        "UCB: values 5, 0, 1, 0, counts 9, 0, 3, 0, t = 13, c = 2: the arm | what N(a) = 0 means": lambda m: (
            m.ucb_action(values=[5.0, 0.0, 1.0, 0.0], counts=[9, 0, 3, 0], t=13, c=2.0)
        ),
        "UCB: values 2, 1, counts 89, 10, t = 100: the arms for c = 0.2, 1, 2.3, 3, 4 "
        "| eq. 2.10, term by term": ucb_arms,
        "gradient bandit: preferences ln 2, 0, 0, baseline 3, alpha 0.1: after action 0 paid 5; after 1 paid 1 "
        "| eq. 2.12: the action and the others have formulas of their own": moved_preferences,
    },
    random=random_bandits,
    mistakes={
        "dividing by count + 1: the count has this reward in it": "1 / count if -> 1 / (count + 1) if",
        "dividing by count - 1": "1 / count if -> 1 / max(count - 1, 0.1) if",
        "forgetting to take away the old estimate": "(reward - value) -> reward",
        "ignoring alpha": "1 / count if alpha is None else alpha -> 1 / count",
        "dividing alpha by the count as well": "else alpha -> else alpha / count",
        "taking alpha = 0 for no alpha: `if alpha` is false for None and for 0": "if alpha is None -> if not alpha",
        "moving away from the reward": "value + step * -> value - step *",
        "giving arms that were never pulled no bonus": "append(math.inf) -> append(value)",
        "taking the last of the arms that were never pulled": "bounds.index(max(bounds)) -> "
        "max(range(len(bounds)), key=lambda a: (bounds[a], a))",
        "forgetting the root": "math.sqrt(math.log(t) / count) -> math.log(t) / count",
        "taking the logarithm to base 10": "math.log(t) -> math.log10(t)",
        "taking the logarithm of t + 1": "math.log(t) -> math.log(t + 1)",
        "forgetting the logarithm": "math.log(t) -> t",
        "forgetting the bonus": "value + c * math.sqrt(math.log(t) / count) -> value",
        "looking at the bonus only": "append(value + c -> append(c",
        "moving the preference of the action only": "(taken - probability) -> taken * (1 - probability)",
        "forgetting the baseline": "(reward - baseline) -> reward",
        "forgetting the probabilities": "(taken - probability) -> (2 * taken - 1)",
        "moving all in the same direction": "(taken - probability) -> abs(taken - probability)",
        "treating the action like all others": "(taken - probability) -> -probability",
        "forgetting alpha": "alpha * (reward -> (reward",
    },
)

# ------------------------------------------------------------------------------------------------------- planning.py

# State 0: action 0 pays 1 and ends, action 1 leads to state 1. State 1: action 0 pays 3 and ends; action 1 leads back
# to state 0, or pays 5.5 and ends, each half of the time. As in FrozenLake's table, ends have a next state as well.
WORLD = {
    0: {0: [(1.0, 1, 1.0, True)], 1: [(1.0, 1, 0.0, False)]},
    1: {0: [(1.0, 0, 3.0, True)], 1: [(0.5, 0, 0.0, False), (0.5, 1, 5.5, True)]},
}
WORLD_IN_WORDS = (
    "two states; in 0, action 0 pays 1 and ends, action 1 leads to 1; in 1, action 0 pays 3 and ends, action 1 leads "
    "to 0 or, half of the time, pays 5.5 and ends. gamma 0.5"
)
LINE = {0: {0: [(1.0, 1, 0.0, False)]}, 1: {0: [(1.0, 2, 8.0, True)]}, 2: {0: [(1.0, 2, 0.0, True)]}}
LINE_IN_WORDS = "three states in a line, one action; leaving state 1 pays 8 and ends, state 2 is the end; gamma 0.5"
COSTS = {
    0: {0: [(1.0, 1, -1.0, False)], 1: [(1.0, 0, -4.0, False)]},
    1: {0: [(1.0, 2, -2.0, True)]},
    2: {0: [(1.0, 2, 0.0, True)]},
}
OUTCOMES = [(0.5, 0, 4.0, False), (0.25, 1, 2.0, True), (0.25, 2, 0.0, False)]


def random_world(rng):
    """A table of rules with up to four states and three actions; every action may end the episode."""
    states, world = int(rng.integers(2, 5)), {}
    for state in range(states):
        world[state] = {}
        for action in range(rng.integers(1, 4)):
            chances = rng.dirichlet([1, 1, 1]) * 0.7
            ends = [(float(p), int(rng.integers(states)), rng.normal(), False) for p in chances]
            world[state][action] = [*ends, (0.3, int(rng.integers(states)), rng.normal(), True)]
    return world


def random_values(m, rng):
    world, values = random_world(rng), rng.normal(size=4).tolist()
    worth = [m.action_value(outcomes=row, values=values, gamma=0.7) for row in world[0].values()]
    return worth, m.value_iteration(P=world, gamma=rng.uniform(0.5, 0.9))


exercise(
    "policy-iteration",
    topic="dynamic programming: evaluate a policy, improve it",
    cut="exercises/scripts/planning.py: evaluate_policy, improve_policy, policy_iteration",
    course="week 2, 40 minutes",
    task="write the two halves of policy iteration, and their turns. P[s][a] is a list of tuples (probability, next "
    "state, reward, terminated); action_value(P[s][a], values, gamma) says what it is worth. Policies are lists with "
    "the action of each state. Sweep until no value changes by theta or more in a sweep. Mind ties: an action is kept "
    "unless another one is better by more than 1e-8.",
    cases={
        f"the values of the policy 1, 0: {WORLD_IN_WORDS} "
        "| eq. 4.5 with a policy that is sure of its action": lambda m: m.evaluate_policy(
            P=WORLD, policy=[1, 0], gamma=0.5
        ),
        f"the values of the only policy: {LINE_IN_WORDS} | which change is compared with theta": lambda m: (
            m.evaluate_policy(P=LINE, policy=[0, 0, 0], gamma=0.5)
        ),
        f"the policy 1, 0 improved, for the values 1.5, 3 and for 0, 0: {WORLD_IN_WORDS} "
        "| eq. 4.9: the argmax over actions of what each is worth": lambda m: improved(
            m, (WORLD, [1, 0], [1.5, 3.0]), (WORLD, [1, 0], [0.0, 0.0])
        ),
        "one state, whose actions pay 1, 2, 2 and end: action 2 improved, action 0 improved; then action 2 "
        "where action 1 pays 0.0000000001 more "
        "| ties: which action is kept": lambda m: improved(
            m, (TIES, [2], [0.0]), (TIES, [0], [0.0]), (ALMOST, [2], [0.0])
        ),
        f"policy iteration: {WORLD_IN_WORDS}. (policy, its values, policies evaluated) "
        "| when it ends: once the improved policy is the one that was evaluated": lambda m: m.policy_iteration(
            P=WORLD, gamma=0.5
        ),
    },
    random=lambda m, rng: random_policies(m, random_world(rng), rng),
    mistakes={
        "taking the best action instead of the policy's: that is value iteration": "action_value(P[state]"
        "[policy[state]], values, gamma) -> max(action_value(x, values, gamma) for x in P[state].values())",
        "stopping after one sweep": "if change < theta -> if True",
        "always taking action 0": "P[state][policy[state]] -> P[state][0]",
        "ending when one state has not changed: it takes the largest change of the sweep": "max(change, "
        "abs(values[state] - before)) -> abs(values[state] - before)",
        "taking the worst action": (
            "if max(worth) > worth[action] + 1e-8 -> if True",
            "worth.index(max(worth)) -> worth.index(min(worth))",
        ),
        "looking at the next reward only": "values, gamma) for action in range -> "
        "[0.0] * len(P), gamma) for action in range",
        "keeping the policy as it is": "improved.append(action) -> improved.append(policy[state])",
        "changing to another action that is only as good": "if max(worth) > worth[action] + 1e-8 -> if True",
        "taking the last of several best actions": (
            "if max(worth) > worth[action] + 1e-8 -> if True",
            "worth.index(max(worth)) -> len(worth) - 1 - worth[::-1].index(max(worth))",
        ),
        "letting rounding decide between equals: policy iteration may then never end": " + 1e-8 -> ",
        "stopping after the first improvement": "if improved == policy -> if True",
        "counting improvements instead of evaluations": "values, evaluated -> values, evaluated - 1",
        "beginning with another policy than action 0 everywhere": "policy = [0] * len(P) -> "
        "policy = [len(P[s]) - 1 for s in range(len(P))]",
    },
)

TIES = {0: {0: [(1.0, 0, 1.0, True)], 1: [(1.0, 0, 2.0, True)], 2: [(1.0, 0, 2.0, True)]}}
ALMOST = {0: TIES[0] | {1: [(1.0, 0, 2.0 + 1e-10, True)]}}


def improved(m, *worlds_policies_values):
    """improve_policy for each (world, policy, values), gamma 0.5."""
    return [m.improve_policy(P=P, policy=pi, values=v, gamma=0.5) for P, pi, v in worlds_policies_values]


def random_policies(m, world, rng):
    policy, gamma = [int(rng.integers(len(world[s]))) for s in world], rng.uniform(0.5, 0.9)
    better = m.improve_policy(P=world, policy=policy, values=rng.normal(size=len(world)).tolist(), gamma=gamma)
    return m.evaluate_policy(P=world, policy=policy, gamma=gamma), better


exercise(
    "value-iteration",
    topic="dynamic programming: value iteration",
    cut="exercises/scripts/planning.py: action_value, value_iteration",
    course="week 2, 35 minutes",
    task="write what an action is worth by the table of the world's rules, and value iteration with it. `outcomes` is "
    "P[s][a], a list of tuples (probability, next state, reward, terminated); P[s] is a dict with the actions of s. "
    "States are numbered from 0. Whether a sweep works in one list or in two is up to you.",
    cases={
        "an action: half of the time 4 and state 0, a quarter 2 and the end (the table says: state 1), a "
        "quarter 0 and state 2. Values 2, 100, 8, gamma 0.5 "
        "| the sum over outcomes, and what terminated does to one of them": lambda m: m.action_value(
            outcomes=OUTCOMES, values=[2.0, 100.0, 8.0], gamma=0.5
        ),
        f"the values: {LINE_IN_WORDS} | which change is compared with theta: the largest of the sweep": lambda m: (
            m.value_iteration(P=LINE, gamma=0.5)
        ),
        f"the best values: {WORLD_IN_WORDS} | what a sweep makes of several actions": lambda m: m.value_iteration(
            P=WORLD, gamma=0.5
        ),
        "the values where every step costs: state 0 leads to state 1 for 1 or stays for 4, leaving state 1 "
        "costs 2 and ends, state 2 is the end; gamma 0.5 "
        "| the size of a change, whatever its sign; the maximum of numbers that may all be negative": lambda m: (
            m.value_iteration(P=COSTS, gamma=0.5)
        ),
    },
    random=random_values,
    mistakes={
        "adding the value of the next state although the episode has terminated": "0.0 if terminated else gamma -> "
        "gamma",
        "forgetting gamma": "else gamma * values -> else values",
        "adding up the outcomes without their probabilities": "probability * (reward -> (reward",
        "taking the plain mean of the outcomes": "probability * (reward -> 1 / len(outcomes) * (reward",
        "losing the reward of an outcome that ends the episode": "(reward + -> (reward * (not terminated) +",
        "discounting the reward as well": "(reward + -> (gamma * reward +",
        "stopping after one sweep": "if change < theta -> if True",
        "ending when one state has not changed instead of all": "max(change, abs(values[state] - before)) -> "
        "abs(values[state] - before)",
        "taking the mean over actions, as if they were random": (
            "max(action_value -> sum(action_value",
            "for action in P[state]) -> for action in P[state]) / len(P[state])",
        ),
        "taking values that sink for values that do not change": "abs(values[state] - before) -> "
        "values[state] - before",
        "beginning the maximum over actions at 0, as if there were always something better than a loss": (
            "max(action_value -> max([0.0] + [action_value",
            "for action in P[state]) -> for action in P[state]])",
        ),
    },
)

# ----------------------------------------------------------------------------------------------------- prediction.py

# Rewards 1, 2, 4, 8 in the states 0, 1, 0, 1, then the end.
VISITS = [(0, 1.0, 1, False), (1, 2.0, 0, False), (0, 4.0, 1, False), (1, 8.0, 2, True)]
SHORT_VISIT = [(1, 10.0, 2, True)]


def random_episode(rng, states):
    """Some steps among these states, of which the last one ends the episode or not."""
    path = rng.integers(states, size=rng.integers(2, 8)).tolist()
    last = len(path) - 2
    return [(s, rng.normal(), t, i == last and rng.random() < 0.5) for i, (s, t) in enumerate(zip(path, path[1:]))]


def random_monte_carlo(m, rng):
    episodes, gamma = [random_episode(rng, 4) for _ in range(4)], rng.random()
    first = [sorted(m.first_visit_returns(episode=episode, gamma=gamma).items()) for episode in episodes]
    return first, m.monte_carlo(episodes=episodes, num_states=5, gamma=gamma)


exercise(
    "monte-carlo",
    topic="Monte Carlo prediction, first visits",
    cut="exercises/scripts/prediction.py: first_visit_returns, monte_carlo",
    course="week 3, 30 minutes",
    task="write first-visit Monte Carlo prediction. An episode is a list of tuples (state, reward, next state, "
    "terminated); the reward is the one that follows the state. first_visit_returns gives a dict with the states that "
    "were seen, monte_carlo a list with all states, numbered from 0.",
    cases={
        "first-visit returns: states 0, 1, 0, 1 with the rewards 1, 2, 4, 8, then the end; gamma 0.5 "
        "| eq. 3.9, backwards in time, and which visit's return stays": lambda m: sorted(
            m.first_visit_returns(episode=VISITS, gamma=0.5).items()
        ),
        "four states; that episode, and one that goes from state 1 to the end for 10; gamma 0.5: the values "
        "| what a mean is taken over": lambda m: m.monte_carlo(episodes=[VISITS, SHORT_VISIT], num_states=4, gamma=0.5),
    },
    random=random_monte_carlo,
    mistakes={
        "taking the last visits": "returns[state] = following -> returns.setdefault(state, following)",
        "taking the mean of all visits": (
            "returns[state] = following -> returns.setdefault(state, []).append(following)",
            "return returns -> return {state: sum(x) / len(x) for state, x in returns.items()}",
        ),
        "forgetting gamma": "gamma * following -> following",
        "taking the reward alone, not what follows": "reward + gamma * following -> reward",
        "discounting the reward as well": "reward + gamma * following -> gamma * (reward + following)",
        "leaving out the reward of the step itself": "returns[state] = following -> "
        "returns[state] = following - reward",
        "carrying the sum forwards in time, as if the past were still to come": (
            "reversed(episode) -> episode",
            "returns[state] = following -> returns.setdefault(state, following)",
        ),
        "dividing by the number of episodes, also by those in which the state was not seen": "total / max(count, 1) -> "
        "total / len(episodes)",
        "adding up instead of taking the mean": "total / max(count, 1) -> total",
        "keeping the last return only": ("sums[state] += -> sums[state] =", "counts[state] += 1 -> counts[state] = 1"),
        "dividing 0 by 0 for states that were never seen": "total / max(count, 1) -> "
        "(total / count if count else float('nan'))",
    },
)

TWO_STATES = {"values": [2.0, 4.0], "alpha": 0.5, "gamma": 0.5}
THREE_STEPS = [(0, 1.0, 1, False), (1, 2.0, 0, False), (0, 4.0, 1, True)]
CUT_OFF = [*THREE_STEPS[:2], (0, 4.0, 1, False)]
TD_STEPS = "values 2, 4, states 0, 1, 0 with rewards 1, 2, 4, alpha and gamma 0.5"


def random_td(m, rng):
    given = {"values": rng.normal(size=4).tolist(), "episode": random_episode(rng, 4)}
    given |= {"alpha": rng.random(), "gamma": rng.random()}
    return m.td_zero(**given), m.td_lambda(**given, trace_decay=rng.random())


exercise(
    "td-prediction",
    topic="TD(0) and TD(lambda)",
    cut="exercises/scripts/prediction.py: td_zero, td_lambda",
    course="week 3, 35 minutes",
    task="write TD(0), and TD(lambda) with accumulating traces. An episode is a list of tuples (state, reward, next "
    "state, terminated). Learn from its steps in their order, each from the values that the steps before have left, "
    "and return a new list: `values` itself stays. An episode can be cut off: its last step has then not terminated, "
    "and the value of its next state counts.",
    cases={
        f"TD(0): {TD_STEPS}; the last step ends (the next state is given as 1, and counts for nothing) "
        "| eq. 6.2, and what follows the last step": lambda m: m.td_zero(**TWO_STATES, episode=THREE_STEPS),
        f"TD(0): {TD_STEPS}; the episode is cut off in state 1 "
        "| the flag terminated: the end of a list is no end": lambda m: m.td_zero(**TWO_STATES, episode=CUT_OFF),
        f"TD(lambda): {TD_STEPS}, lambda 0.8; the last step ends "
        "| the order in a step: the error, all traces fade, one grows, all values move": lambda m: m.td_lambda(
            **TWO_STATES, episode=THREE_STEPS, trace_decay=0.8
        ),
        f"TD(lambda): {TD_STEPS}, lambda 0.8; the episode is cut off in state 1 "
        "| the flag terminated: the end of a list is no end": lambda m: m.td_lambda(
            **TWO_STATES, episode=CUT_OFF, trace_decay=0.8
        ),
    },
    random=random_td,
    mistakes={
        "adding the value of the next state although the episode has terminated": (
            "td_zero: 0.0 if terminated else values -> values",
            "td_lambda: 0.0 if terminated else values -> values",
        ),
        "adding, in TD(lambda), the value of the next state although the episode has terminated": "td_lambda: 0.0 if "
        "terminated else values -> values",
        "forgetting gamma in TD(0)": "td_zero: gamma * following -> following",
        "learning from the values as they were before the episode": (
            "td_zero: values = list(values) -> values, old = list(values), values",
            "td_zero: values[next_state] -> old[next_state]",
            "td_zero: following - values[state] -> following - old[state]",
        ),
        "replacing the value by its target": "td_zero: values[state] += alpha * (reward + gamma * following - "
        "values[state]) -> values[state] = reward + gamma * following",
        "forgetting to take away the old value": "td_zero: following - values[state]) -> following)",
        "taking the last step of the list for an end": (
            "td_zero: in episode: -> in [*episode[:-1], (*episode[-1][:3], True)]:",
            "td_lambda: in episode: -> in [*episode[:-1], (*episode[-1][:3], True)]:",
        ),
        "taking, in TD(lambda), the last step of the list for an end": "td_lambda: in episode: -> "
        "in [*episode[:-1], (*episode[-1][:3], True)]:",
        "setting the trace to 1 instead of adding 1": "traces[state] += 1 -> traces[state] = 1",
        "forgetting gamma: traces fade by gamma lambda": "[gamma * trace_decay * trace -> [trace_decay * trace",
        "forgetting lambda: traces fade by gamma lambda": "[gamma * trace_decay * trace -> [gamma * trace",
        "traces that never fade": "[gamma * trace_decay * trace for -> [trace for",
        "moving the state at hand only: that is TD(0)": "[gamma * trace_decay * trace for -> [0.0 for",
        "letting the trace of a visit fade before it is used": (
            "traces[state] += 1 -> pass",
            "traces = [gamma -> traces[state] += 1; traces = [gamma",
        ),
    },
)

# ------------------------------------------------------------------------------------------------------ qlearning.py

CLIFF = {"env_id": "CliffWalking-v1", "total_timesteps": 50_000, "learning_rate": 0.5, "anneal_lr": True, "gamma": 1.0,
         "max_episode_steps": 1000, "seed": 1}  # fmt: skip


def action_shares(values, epsilon, draws=10_000, seed=0):
    """How often epsilon_greedy takes each action."""

    def call(m):
        rng, counts = random.Random(seed), [0] * len(values)
        for _ in range(draws):
            counts[m.epsilon_greedy(values=list(values), epsilon=epsilon, rng=rng)] += 1
        return [count / draws for count in counts]

    return call


def random_choices(m, rng):
    """Values of which some are equal and some nearly so; with and without exploring."""
    values = (rng.integers(3, size=rng.integers(2, 6)) + 0.2 * rng.integers(2) * rng.random()).tolist()
    values[0] += rng.choice([0.0, 0.2, 0.4])
    seed = int(rng.integers(1000))
    return [action_shares(values, epsilon, 3000, seed)(m) for epsilon in (0.0, rng.random())]


exercise(
    "epsilon-greedy",
    topic="explore, or take the best action",
    cut="qlearning.py: epsilon_greedy",
    course="week 1, 15 minutes",
    task="return a random action with probability epsilon, and else one with the highest value. `values` is a list of "
    "numbers, `rng` a random.Random: rng.random() is in [0, 1), rng.randrange(n) one of 0 … n - 1, rng.choice(list) "
    "one of a list. The random action may well be the best one, and ties are broken by chance.",
    cases={
        "epsilon 0, values 1, 3, 2: the share of each action | the comparison of rng.random() with epsilon": (
            action_shares([1.0, 3.0, 2.0], 0.0),
            0.025,
        ),
        "epsilon 0.4, values 1, 0, 0, 3: the share of each action | the branch that explores": (
            action_shares([1.0, 0.0, 0.0, 3.0], 0.4),
            0.025,
        ),
        "epsilon 0, values 2, 5, 5, 5: the share of each action "
        "| what happens where several actions have the highest value": (
            action_shares([2.0, 5.0, 5.0, 5.0], 0.0),
            0.025,
        ),
    },
    random=random_choices,
    draws=8,
    atol=0.06,
    mistakes={
        "exploring with probability 1 - epsilon instead of epsilon": "< epsilon -> > epsilon",
        "taking the action with the lowest value": "max(values) -> min(values)",
        "leaving the best action out when exploring": "rng.randrange(len(values)) -> "
        "rng.choice([a for a, value in enumerate(values) if value < max(values)] or [0])",
        "never exploring": "< epsilon -> < 0",
        "always taking the first of several best actions: at the beginning, when all values are 0, the agent would go "
        "one way only": "rng.choice([action for action, value in enumerate(values) if value == best]) -> "
        "values.index(best)",
        "always taking the last of several best actions": "rng.choice([action -> max([action",
        "taking action 0, whatever the values are": "if rng.random() -> return 0\n    if rng.random()",
        "taking values that are nearly the best for the best": (
            "if values.count(best) == 1 -> if False",
            "value == best -> value > best - 0.5",
        ),
    },
    learn=(CLIFF, -17.0),  # the shortest way has 13 steps
)


def chain_episodes(end, limit=None, table=(0.0, 0.0, 0.0, 4.0), **settings):
    """Two episodes of Chain by play_episode: (the table, steps, sums of the TD errors that were logged, episodes, the
    epsilons with which actions were chosen). The environment knows nothing of the limit: that is play_episode's own
    affair. State 3, the last one, is never learnt.
    """

    def call(m):
        given = {"gamma": 0.5, "learning_rate": 0.5, "env_kwargs": f'{{"end": "{end}"}}'} | settings
        args = m.Args(env_id="Classroom/Chain-v0", **given)
        envs = m.make_envs(args, 1)
        env, args.max_episode_steps = envs.envs[0], limit
        agent, rng = m.make_agent(args, envs), random.Random(0)
        agent.tables[0][:] = [[value] for value in table]
        errors, sums, epsilons = [], [], []
        log = lambda **figures: errors.extend(figures[name] for name in figures if name == "td_error")
        run = SimpleNamespace(step=0, episodes=[], log=log, check_finite=lambda **_: None)
        chosen = lambda values, epsilon, rng: epsilons.append(epsilon) or 0
        with mock.patch.object(m, "epsilon_greedy", chosen):
            for _ in range(2):
                m.play_episode(agent=agent, env=env, run=run, rng=rng, args=args)
                sums.append(sum(errors))
                errors.clear()
        return [row[0] for row in agent.tables[0]], run.step, sums, run.episodes, epsilons

    return call


def random_chain(m, rng):
    annealed = {"anneal_lr": True, "total_timesteps": int(rng.integers(8, 20)), "exploration_fraction": 0.9}
    given = {"gamma": rng.random(), "learning_rate": rng.random()} | (annealed if rng.random() < 0.7 else {})
    target = m.q_learning_target(reward=rng.normal(), discount=rng.random(), next_values=rng.normal(size=3).tolist())
    end, limit, table = rng.choice(["terminated", "truncated"]), rng.choice([None, 1, 2, 9]), 5 * rng.normal(size=4)
    return target, chain_episodes(end, limit, table.tolist(), **given)(m)


CHAIN = (
    "gamma and learning rate are 0.5. Q of the four states (the last one began at 4), steps, sums of logged |TD "
    "error|, "
    "(step, return) of each, epsilons"
)
exercise(
    "q-learning",
    topic="the Q-learning update, and the loop around it",
    cut="qlearning.py: q_learning_target, play_episode",
    course="week 3, 60 minutes",
    task="write the target R + gamma max Q, and play one episode with it. `next_values` is a list; `discount` is "
    "gamma, or 0 where the episode terminated. play_episode begins with obs, _ = env.reset(), goes on while neither "
    "terminated nor truncated, but at most args.max_episode_steps or 27_000 steps, and in each step: take epsilon and "
    "the learning rate from schedules(args, run.step, len(run.episodes)); choose with "
    "epsilon_greedy(agent.values(state), epsilon, rng), where state = agent.state(obs, run); env.step takes action + "
    "agent.first_action; count run.step; move agent.tables[0][state][action] by the learning rate times the TD error; "
    "call run.log(td_error=…) with its absolute value. At the end append (run.step, sum of rewards) to run.episodes. "
    "Only --algorithm q-learning is asked for.",
    cases={
        "the target for reward 1, discount 0.5, next values 3, 7, 2 "
        "| eq. 6.8 in the docstring at the top of the script": lambda m: m.q_learning_target(
            reward=1.0, discount=0.5, next_values=[3.0, 7.0, 2.0]
        ),
        f"two episodes of three steps that pay 1, 2, 3 and terminate; {CHAIN} "
        "| the line that computes the discount, and the one that changes the table": chain_episodes("terminated"),
        "the same, but the third step is truncated: state 3 is worth 4, only nobody plays on "
        "| what discount is where truncated is set": chain_episodes("truncated"),
        "the first again, but with --max-episode-steps 2, of which the environment knows nothing "
        "| args.max_episode_steps": chain_episodes("terminated", limit=2),
        "the first again, where epsilon and the learning rate fall with each of ten steps "
        "| where schedules is called: it depends on run.step": chain_episodes(
            "terminated", total_timesteps=10, anneal_lr=True, exploration_fraction=1.0
        ),
    },
    random=random_chain,
    mistakes={
        "taking the mean of the next values instead of the highest": "max(next_values) -> "
        "sum(next_values) / len(next_values)",
        "forgetting the discount": "reward + discount * max -> reward + max",
        "discounting the reward as well": "reward + discount * max(next_values) -> "
        "discount * (reward + max(next_values))",
        "taking the lowest of the next values": "max(next_values) -> min(next_values)",
        "adding up the next values": "max(next_values) -> sum(next_values)",
        "adding the value of the next state although the episode terminated": "0.0 if terminated else args.gamma -> "
        "args.gamma",
        "replacing the entry by its target, instead of moving it by the learning rate": "+= learning_rate * td_error "
        "-> "
        "+= td_error",
        "learning nothing: the table has not changed": "+= learning_rate * td_error -> += 0",
        "logging TD errors with their signs": "td_error=abs(td_error) -> td_error=td_error",
        "not logging TD errors": "run.log(td_error=abs(td_error)) -> pass",
        "treating truncation as termination: the clock was stopped, the future has not gone": "0.0 if terminated "
        "else -> "
        "0.0 if terminated or truncated else",
        "playing on beyond the limit: some environments never end": "args.max_episode_steps or 27_000 -> 27_000",
        "taking epsilon and the learning rate once an episode: they change with each step": (
            "epsilon, learning_rate = schedules(args, run.step, len(run.episodes))\n -> \n",
            "    for _ in ->     epsilon, learning_rate = schedules(args, run.step, len(run.episodes))\n    for _ in",
        ),
    },
    learn=(CLIFF, -17.0),
)

TD_STEP = {"reward": 1.0, "discount": 0.5, "next_values": [3.0, 7.0, 2.0]}


def random_targets(m, rng):
    """The three targets, in which several actions may be equally good."""
    q, other = rng.integers(4, size=(2, rng.integers(2, 5))).astype(float).tolist()
    step = {"reward": rng.normal(), "discount": rng.random(), "next_values": q}
    targets = [m.sarsa_target(**step, next_action=int(rng.integers(len(q))))]
    targets.append(m.expected_sarsa_target(**step, epsilon=rng.random()))
    step["next_values"] = rng.normal(size=len(q)).tolist()
    return [*targets, m.double_q_target(**step, other_next_values=other)]


exercise(
    "td-targets",
    topic="Sarsa, expected Sarsa, double Q-learning",
    cut="qlearning.py: sarsa_target, expected_sarsa_target, double_q_target",
    course="week 3, 30 minutes",
    task="write the three targets that differ from Q-learning's in one term only. `next_values` and "
    "`other_next_values` are lists; `discount` is gamma, or 0 where the episode terminated. The policy pi of expected "
    "Sarsa is epsilon-greedy: with probability epsilon any action, also the best one.",
    cases={
        "Sarsa: reward 1, discount 0.5, next values 3, 7, 2, next action 2 | eq. 6.7": lambda m: m.sarsa_target(
            **TD_STEP, next_action=2
        ),
        "expected Sarsa: reward 1, discount 0.5, next values 3, 7, 2, epsilon 0.3 "
        "| the probability of the best action under an epsilon-greedy policy: 1 - epsilon + epsilon / n": lambda m: (
            m.expected_sarsa_target(**TD_STEP, epsilon=0.3)
        ),
        "double Q: reward 1, discount 0.5, next values 3, 7, 2, the other table's 10, 4, 20 "
        "| which table chooses and which one judges": lambda m: m.double_q_target(
            **TD_STEP, other_next_values=[10.0, 4.0, 20.0]
        ),
    },
    random=random_targets,
    mistakes={
        "taking the highest value: that is Q-learning, Sarsa takes the action that will be taken": ""
        "next_values[next_action] -> max(next_values)",
        "giving the best action no share of the random ones": "sum(next_values) / len(next_values) -> "
        "(sum(next_values) - max(next_values)) / (len(next_values) - 1)",
        "exchanging epsilon and 1 - epsilon": "epsilon * average + (1 - epsilon) -> (1 - epsilon) * average + epsilon",
        "taking the plain mean, as if all actions were random": "(epsilon * average + (1 - epsilon) * "
        "max(next_values)) -> average",
        "taking the highest value, as if no action were random": "(epsilon * average + (1 - epsilon) * "
        "max(next_values)) -> max(next_values)",
        "counting 1 - epsilon for each of several best actions": "(1 - epsilon) * -> "
        "next_values.count(max(next_values)) * (1 - epsilon) *",
        "giving all of epsilon to every action that is as good as the best": "epsilon * average -> "
        "epsilon / len(next_values) * sum(v for v in next_values if v < max(next_values))",
        "letting the same table choose and judge: that is Q-learning": "* other_next_values[best] -> "
        "* next_values[best]",
        "letting the other table choose as well": "next_values.index(max(next_values)) -> "
        "other_next_values.index(max(other_next_values))",
        "exchanging the tables: the other one chose, this one judged": (
            "next_values.index(max(next_values)) -> other_next_values.index(max(other_next_values))",
            "* other_next_values[best] -> * next_values[best]",
        ),
    },
    learn=(CLIFF | {"algorithm": "double-q"}, -17.0),
)
