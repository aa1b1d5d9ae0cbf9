"""More exercises: on small scripts of their own (exercises/scripts/), and shorter ones on scripts of the repository.

The fields are explained in forms.py; the fixed numbers are worked out by hand, in the comments beside them. Solutions
and mistakes stand in tests/exercises/solutions_small.py.
"""

import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import probes  # noqa: F401  (registers its environments)
from forms import Case, Learn, close, exercise, has_nan, tensor

# -------------------------------------------------------------------------------------------------------- bandits.py


def new_values(m):
    """The value 3 after a reward of 6, the third: without alpha, with 0.5 and with 0."""
    return [m.new_value(value=3.0, reward=6.0, count=3, alpha=alpha) for alpha in (None, 0.5, 0.0)]


def ucb_arms(m):
    """The arm that is pulled, of two, for five values of c. The bonus is worth the gap of 1 from c = 2.22 on."""
    arms = {"values": [2.0, 1.0], "counts": [89, 10], "t": 100}
    return [m.ucb_action(**arms, c=c) for c in (0.2, 1.0, 2.3, 3.0, 4.0)]


def moved_preferences(m):
    """The preferences ln 2, 0, 0 after action 0 paid 5, and after action 1 paid 1; the baseline is 3, alpha 0.1."""
    given = {"preferences": [math.log(2), 0.0, 0.0], "baseline": 3.0, "alpha": 0.1}
    return m.new_preferences(**given, action=0, reward=5.0), m.new_preferences(**given, action=1, reward=1.0)


def preferences_move(first, second):
    """What moved_preferences gives if the preferences move by so much."""
    return [[x + y for x, y in zip((math.log(2), 0.0, 0.0), by)] for by in (first, second)]


def probe_bandit(m, train):
    for method in ("ucb", "gradient"):
        share = train(method=method, testbeds=50).agent[3]
        if share < 0.6:
            return (
                f"after 100 steps on the ten-armed testbed {method} should take the best arm four times out of five; "
                f"yours does so in {share:.0%} of all steps"
            )


exercise(
    "bandit",
    topic="bandits: action values, UCB, gradient bandit",
    script="exercises/scripts/bandits.py",
    blanks=("new_value", "ucb_action", "new_preferences"),
    difficulty=1,
    minutes=40,
    task="write one step of three things: the incremental estimate of a value, with step 1/count or a constant one; "
    "the choice by upper confidence bounds; and the update of a gradient bandit. Values, counts and preferences are "
    "lists, one entry for each arm; softmax(preferences) is at hand. Return numbers, or a new list.",
    cases=[
        Case(
            "an arm's value is 3, its third reward is 6. The new value without alpha, with alpha 0.5, with alpha 0",
            new_values,
            [4.0, 4.5, 3.0],  # 3 + 3 / 3, 3 + 0.5 x 3, 3
            {
                "dividing by count + 1: the count has this reward in it": [3.75, 4.5, 3.0],
                "dividing by count - 1": [4.5, 4.5, 3.0],
                "forgetting to take away the old estimate": [5.0, 6.0, 3.0],
                "ignoring alpha": [4.0, 4.0, 4.0],
                "dividing alpha by the count as well": [4.0, 3.5, 3.0],
                "taking alpha = 0 for no alpha: `if alpha` is false for None and for 0": [4.0, 4.5, 4.0],
                "moving away from the reward": [2.0, 1.5, 3.0],
            },
            "eq. 2.3: new = old + step x (target - old)",
        ),
        Case(
            "UCB: values 5, 0, 1, 0, counts 9, 0, 3, 0, t = 13, c = 2: the arm",
            lambda m: m.ucb_action(values=[5.0, 0.0, 1.0, 0.0], counts=[9, 0, 3, 0], t=13, c=2.0),
            1,
            {
                "giving arms that were never pulled no bonus": 0,
                "taking the last of the arms that were never pulled": 3,
            },
            "what N(a) = 0 means",
        ),
        Case(
            "UCB: values 2, 1, counts 89, 10, t = 100: the arms for c = 0.2, 1, 2.3, 3, 4",
            ucb_arms,
            # sqrt(ln 100 / 89) = 0.2275, sqrt(ln 100 / 10) = 0.6786: arm 1 catches up at c = 1 / 0.4511 = 2.22
            [0, 0, 1, 1, 1],
            {
                "forgetting the root": [0, 0, 0, 1, 1],  # 1 / (0.4605 - 0.0517) = 2.45
                "taking the logarithm to base 10": [0, 0, 0, 0, 1],  # 1 / (0.4472 - 0.1499) = 3.36
                "forgetting the logarithm": [0, 1, 1, 1, 1],  # 1 / (3.162 - 1.060) = 0.48
                "forgetting the bonus": [0, 0, 0, 0, 0],
                "looking at the bonus only": [1, 1, 1, 1, 1],
            },
            "eq. 2.10, term by term",
        ),
        Case(
            "gradient bandit: preferences ln 2, 0, 0, baseline 3, alpha 0.1: after action 0 paid 5; after 1 paid 1",
            moved_preferences,
            # pi = 1/2, 1/4, 1/4. Steps 0.1 x 2 and 0.1 x -2, times 1 - pi for the action, -pi for the others
            preferences_move((0.1, -0.05, -0.05), (0.1, -0.15, 0.05)),
            {
                "moving the preference of the action only": preferences_move((0.1, 0, 0), (0, -0.15, 0)),
                "forgetting the baseline": preferences_move((0.25, -0.125, -0.125), (-0.05, 0.075, -0.025)),
                "forgetting the probabilities": preferences_move((0.2, -0.2, -0.2), (0.2, -0.2, 0.2)),
                "moving all in the same direction": preferences_move((0.1, 0.05, 0.05), (-0.1, -0.15, -0.05)),
                "treating the action like all others": preferences_move((-0.1, -0.05, -0.05), (0.1, 0.05, 0.05)),
                "forgetting alpha": preferences_move((1, -0.5, -0.5), (1, -1.5, 0.5)),
            },
            "eq. 2.12: the action and the others have formulas of their own",
        ),
    ],
    probe=probe_bandit,
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


def lake_problem(method, train):
    """What is wrong with the values of FrozenLake that a method finds; None if they solve Bellman's equation."""
    for slippery in (False, True):
        values = train(method=method, slippery=slippery, gamma=0.9).agent
        for state, actions in gym.make("FrozenLake-v1", is_slippery=slippery).unwrapped.P.items():
            # The values themselves are 0 at the ends of FrozenLake.
            worth = [sum(p * (r + 0.9 * values[s] * (not end)) for p, s, r, end in row) for row in actions.values()]
            if not close(values[state], max(worth), 1e-6):
                return (
                    f"state {state} of FrozenLake is worth {values[state]:.6f}, you say, but its best action, by your "
                    f"own values of its successors, {max(worth):.6f} (is_slippery={slippery}, gamma 0.9)"
                )


COSTS = {
    0: {0: [(1.0, 1, -1.0, False)], 1: [(1.0, 0, -4.0, False)]},
    1: {0: [(1.0, 2, -2.0, True)]},
    2: {0: [(1.0, 2, 0.0, True)]},
}
OUTCOMES = [(0.5, 0, 4.0, False), (0.25, 1, 2.0, True), (0.25, 2, 0.0, False)]
exercise(
    "value-iteration",
    topic="dynamic programming: value iteration on FrozenLake",
    script="exercises/scripts/planning.py",
    blanks=("action_value", "value_iteration"),
    hides=("evaluate_policy", "improve_policy"),
    difficulty=1,
    minutes=35,
    task="write what an action is worth by the table of the world's rules, and value iteration with it. `outcomes` is "
    "P[s][a], a list of tuples (probability, next state, reward, terminated); P[s] is a dict with the actions of s. "
    "States are numbered from 0. Whether a sweep works in one list or in two is up to you.",
    cases=[
        Case(
            "an action: half of the time 4 and state 0, a quarter 2 and the end (the table says: state 1), a quarter 0 "
            "and state 2. Values 2, 100, 8, gamma 0.5",
            lambda m: m.action_value(outcomes=OUTCOMES, values=[2.0, 100.0, 8.0], gamma=0.5),
            4.0,  # 0.5 x (4 + 1) + 0.25 x 2 + 0.25 x (0 + 4)
            {
                "adding the value of the next state although the episode has terminated": 16.5,  # + 0.25 x 50
                "forgetting gamma": 5.5,  # 0.5 x 6 + 0.5 + 2
                "adding up the outcomes without their probabilities": 11.0,  # 5 + 2 + 4
                "taking the plain mean of the outcomes": 11 / 3,
                "losing the reward of an outcome that ends the episode": 3.5,
                "discounting the reward as well": 2.75,  # 0.5 x (0.5 x 6 + 0.25 x 2 + 0.25 x 8)
            },
            "the sum over outcomes, and what terminated does to one of them",
        ),
        Case(
            f"the values: {LINE_IN_WORDS}",
            lambda m: m.value_iteration(P=LINE, gamma=0.5),
            [4.0, 8.0, 0.0],
            {
                "stopping too early: after one sweep, or when one state has not changed instead of all": [
                    0.0,
                    8.0,
                    0.0,
                ],
            },
            "which change is compared with theta: the largest of the sweep",
        ),
        Case(
            f"the best values: {WORLD_IN_WORDS}",
            lambda m: m.value_iteration(P=WORLD, gamma=0.5),
            [11 / 7, 22 / 7],  # action 1 in both: V1 = 0.25 V0 + 2.75 with V0 = V1 / 2, so 0.875 V1 = 2.75
            {
                # V0 = (1 + V1 / 2) / 2, V1 = (3 + 0.25 V0 + 2.75) / 2
                "taking the mean over actions, as if they were random": [1.258065, 3.032258],
            },
            "what a sweep makes of several actions",
        ),
        Case(
            "the values where every step costs: state 0 leads to state 1 for 1 or stays for 4, leaving state 1 costs 2 "
            "and ends, state 2 is the end; gamma 0.5",
            lambda m: m.value_iteration(P=COSTS, gamma=0.5),
            [-2.0, -2.0, 0.0],  # V1 = -2, V0 = -1 + 0.5 V1
            {
                "taking values that sink for values that do not change": [-1.0, -2.0, 0.0],
                "beginning the maximum over actions at 0, as if there were always something better than a loss": [
                    0.0,
                    0.0,
                    0.0,
                ],
            },
            "the size of a change, whatever its sign; the maximum of numbers that may all be negative",
        ),
    ],
    probe=lambda m, train: lake_problem("value-iteration", train),
)

TIES = {0: {0: [(1.0, 0, 1.0, True)], 1: [(1.0, 0, 2.0, True)], 2: [(1.0, 0, 2.0, True)]}}
ALMOST = {0: TIES[0] | {1: [(1.0, 0, 2.0 + 1e-10, True)]}}


def improved(*worlds_policies_values):
    """improve_policy for each (world, policy, values), gamma 0.5."""

    def call(m):
        return [m.improve_policy(P=P, policy=pi, values=v, gamma=0.5) for P, pi, v in worlds_policies_values]

    return call


exercise(
    "policy-iteration",
    topic="dynamic programming: evaluate a policy, improve it",
    script="exercises/scripts/planning.py",
    blanks=("evaluate_policy", "improve_policy", "policy_iteration"),
    hides=("action_value", "value_iteration"),
    difficulty=2,
    minutes=40,
    task="write the two halves of policy iteration, and their turns. P[s][a] is a list of tuples (probability, next "
    "state, reward, terminated); action_value(P[s][a], values, gamma) says what it is worth. Policies are lists with "
    "the action of each state. Sweep until no value changes by theta or more in a sweep. Mind ties: an action is kept "
    "unless another one is better by more than 1e-8.",
    cases=[
        Case(
            f"the values of the policy 1, 0: {WORLD_IN_WORDS}",
            lambda m: m.evaluate_policy(P=WORLD, policy=[1, 0], gamma=0.5),
            [1.5, 3.0],  # 0.5 x 3, and 3
            {
                "taking the best action instead of the policy's: that is value iteration": [11 / 7, 22 / 7],
                "stopping after one sweep": [0.0, 3.0],
                "always taking action 0": [1.0, 3.0],
            },
            "eq. 4.5 with a policy that is sure of its action",
        ),
        Case(
            f"the values of the only policy: {LINE_IN_WORDS}",
            lambda m: m.evaluate_policy(P=LINE, policy=[0, 0, 0], gamma=0.5),
            [4.0, 8.0, 0.0],
            {
                "ending when one state has not changed: it takes the largest change of the sweep": [0.0, 8.0, 0.0],
            },
            "which change is compared with theta",
        ),
        Case(
            f"the policy 1, 0 improved, for the values 1.5, 3 and for 0, 0: {WORLD_IN_WORDS}",
            improved((WORLD, [1, 0], [1.5, 3.0]), (WORLD, [1, 0], [0.0, 0.0])),
            # state 0: 1 or 0.5 x 3; state 1: 3 or 0.25 x 1.5 + 2.75 = 3.125. Then 1 or 0, 3 or 2.75
            [[1, 1], [0, 0]],
            {
                "taking the worst action": [[0, 0], [1, 1]],
                "looking at the next reward only": [[0, 0], [0, 0]],
                "keeping the policy as it is": [[1, 0], [1, 0]],
            },
            "eq. 4.9: the argmax over actions of what each is worth",
        ),
        Case(
            "one state, whose actions pay 1, 2, 2 and end: action 2 improved, action 0 improved; then action 2 where "
            "action 1 pays 0.0000000001 more",
            improved((TIES, [2], [0.0]), (TIES, [0], [0.0]), (ALMOST, [2], [0.0])),
            [[2], [1], [2]],
            {
                "changing to another action that is only as good": [[1], [1], [1]],
                "taking the last of several best actions": [[2], [2], [2]],
                "letting rounding decide between equals: policy iteration may then never end": [[2], [1], [1]],
            },
            "ties: which action is kept",
        ),
        Case(
            f"policy iteration: {WORLD_IN_WORDS}. (policy, its values, policies evaluated)",
            lambda m: m.policy_iteration(P=WORLD, gamma=0.5),
            # 0, 0 is worth 1, 3: state 0 changes (1.5), in state 1 both give 3. 1, 0 is worth 1.5, 3: see above.
            # 1, 1 is worth 11/7, 22/7 and stays.
            [[1, 1], [11 / 7, 22 / 7], 3],
            {
                "stopping after the first improvement": lambda r: close(r[1:], [[1.0, 3.0], 1]),
                "counting improvements instead of evaluations": [[1, 1], [11 / 7, 22 / 7], 2],
                "beginning with another policy than action 0 everywhere": [[1, 1], [11 / 7, 22 / 7], 1],
            },
            "when it ends: once the improved policy is the one that was evaluated",
        ),
    ],
    probe=lambda m, train: lake_problem("policy-iteration", train),
)

# ----------------------------------------------------------------------------------------------------- prediction.py

# Rewards 1, 2, 4, 8 in the states 0, 1, 0, 1, then the end.
VISITS = [(0, 1.0, 1, False), (1, 2.0, 0, False), (0, 4.0, 1, False), (1, 8.0, 2, True)]
SHORT_VISIT = [(1, 10.0, 2, True)]


def first_visits(m):
    """(state, return) of first_visit_returns, in order."""
    return sorted(m.first_visit_returns(episode=VISITS, gamma=0.5).items())


def walk_problem(train, least, **settings):
    """What is wrong with the values of the random walk after many episodes; None if they are near the true ones."""
    values = train(episodes=2000, **settings).agent
    if not close(values, [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6], least):
        numbers = ", ".join(f"{value:.2f}" for value in values)
        return (
            f"the random walk's states are worth 0.17, 0.33, 0.5, 0.67, 0.83; after 2,000 episodes yours are {numbers}"
        )


exercise(
    "monte-carlo",
    topic="Monte Carlo prediction, first visits",
    script="exercises/scripts/prediction.py",
    blanks=("first_visit_returns", "monte_carlo"),
    difficulty=1,
    minutes=30,
    task="write first-visit Monte Carlo prediction. An episode is a list of tuples (state, reward, next state, "
    "terminated); the reward is the one that follows the state. first_visit_returns gives a dict with the states that "
    "were seen, monte_carlo a list with all states, numbered from 0.",
    cases=[
        Case(
            "first-visit returns: states 0, 1, 0, 1 with the rewards 1, 2, 4, 8, then the end; gamma 0.5",
            first_visits,
            [[0, 4.0], [1, 6.0]],  # 8; 4 + 4 = 8; 2 + 4 = 6; 1 + 3 = 4
            {
                "taking the last visits": [[0, 8.0], [1, 8.0]],
                "taking the mean of all visits": [[0, 6.0], [1, 7.0]],
                "forgetting gamma": [[0, 15.0], [1, 14.0]],
                "taking the reward alone, not what follows": [[0, 1.0], [1, 2.0]],
                "discounting the reward as well": [[0, 2.0], [1, 3.0]],
                "leaving out the reward of the step itself": [[0, 3.0], [1, 4.0]],
                "carrying the sum forwards in time, as if the past were still to come": [[0, 1.0], [1, 2.5]],
            },
            "eq. 3.9, backwards in time, and which visit's return stays",
        ),
        Case(
            "four states; that episode, and one that goes from state 1 to the end for 10; gamma 0.5: the values",
            lambda m: m.monte_carlo(episodes=[VISITS, SHORT_VISIT], num_states=4, gamma=0.5),
            [4.0, 8.0, 0.0, 0.0],  # 4; (6 + 10) / 2; never seen
            {
                "dividing by the number of episodes, also by those in which the state was not seen": [2, 8, 0, 0],
                "adding up instead of taking the mean": [4, 16, 0, 0],
                "keeping the last return only": [4, 10, 0, 0],
                "dividing 0 by 0 for states that were never seen": has_nan,
            },
            "what a mean is taken over",
        ),
    ],
    probe=lambda m, train: walk_problem(train, 0.08, method="monte-carlo"),
)

TWO_STATES = {"values": [2.0, 4.0], "alpha": 0.5, "gamma": 0.5}
THREE_STEPS = [(0, 1.0, 1, False), (1, 2.0, 0, False), (0, 4.0, 1, True)]
CUT_OFF = [*THREE_STEPS[:2], (0, 4.0, 1, False)]
TD_STEPS = "values 2, 4, states 0, 1, 0 with rewards 1, 2, 4, alpha and gamma 0.5"


exercise(
    "td-prediction",
    topic="TD(0) and TD(lambda)",
    script="exercises/scripts/prediction.py",
    blanks=("td_zero", "td_lambda"),
    difficulty=2,
    minutes=35,
    task="write TD(0), and TD(lambda) with accumulating traces. An episode is a list of tuples (state, reward, next "
    "state, terminated). Learn from its steps in their order, each from the values that the steps before have left, "
    "and return a new list: `values` itself stays. An episode can be cut off: its last step has then not terminated, "
    "and the value of its next state counts.",
    cases=[
        Case(
            f"TD(0): {TD_STEPS}; the last step ends (the next state is given as 1, and counts for nothing)",
            lambda m: m.td_zero(**TWO_STATES, episode=THREE_STEPS),
            # 1 + 2 - 2 = 1: V0 = 2.5; 2 + 1.25 - 4 = -0.75: V1 = 3.625; 4 - 2.5 = 1.5: V0 = 3.25
            [3.25, 3.625],
            {
                "adding the value of the next state although the episode has terminated": [
                    4.15625,
                    3.625,
                ],  # V0 + 0.90625
                "forgetting gamma": [3.75, 4.75],  # errors 3, 1.5, 0.5
                "learning from the values as they were before the episode": [3.5, 3.5],  # errors 1, -1, 2
                "replacing the value by its target": [4.0, 3.5],
                "forgetting to take away the old value": [5.5, 5.875],
            },
            "eq. 6.2, and what follows the last step",
        ),
        Case(
            f"TD(0): {TD_STEPS}; the episode is cut off in state 1",
            lambda m: m.td_zero(**TWO_STATES, episode=CUT_OFF),
            [4.15625, 3.625],  # the last error is 4 + 0.5 x 3.625 - 2.5 = 3.3125
            {"taking the last step of the list for an end": [3.25, 3.625]},
            "the flag terminated: the end of a list is no end",
        ),
        Case(
            f"TD(lambda): {TD_STEPS}, lambda 0.8; the last step ends",
            lambda m: m.td_lambda(**TWO_STATES, episode=THREE_STEPS, trace_decay=0.8),
            # traces fade by 0.4. Error 1, z = 1, 0: V = 2.5, 4. Error -0.75, z = 0.4, 1: V = 2.35, 3.625.
            # Error 4 - 2.35 = 1.65, z = 1.16, 0.4: V = 2.35 + 0.957, 3.625 + 0.33
            [3.307, 3.955],
            {
                "setting the trace to 1 instead of adding 1": [3.175, 3.955],
                "forgetting gamma: traces fade by gamma lambda": [3.676, 4.345],
                "forgetting lambda: traces fade by gamma lambda": [3.3671875, 4.046875],
                "traces that never fade": [4.0, 4.5625],
                "moving the state at hand only: that is TD(0)": [3.25, 3.625],
                "letting the trace of a visit fade before it is used": [2.562304, 3.96976],
                "adding the value of the next state although the episode has terminated": [4.35825, 4.3175],
            },
            "the order in a step: the error, all traces fade, one grows, all values move",
        ),
    ],
    probe=lambda m, train: (
        walk_problem(train, 0.12, method="td-zero", alpha=0.02)
        or walk_problem(train, 0.12, method="td-lambda", alpha=0.01)
    ),
)

# ------------------------------------------------------------------------------------------------ ppo.py, squashed.py

AIM_BY_PPO = {"env_id": "Classroom/Aim-v0", "num_envs": 8, "num_steps": 32, "learning_rate": 0.01, "ent_coef": 0.0,
              "hidden_sizes": (16,), "total_timesteps": 8000, "seed": 1}  # fmt: skip
PENDULUM_BY_PPO = {"env_id": "Pendulum-v1", "num_envs": 16, "num_steps": 64, "num_minibatches": 8, "update_epochs": 10,
                   "learning_rate": 1e-3, "gamma": 0.9, "ent_coef": 0.0, "total_timesteps": 100_000,
                   "seed": 1}  # fmt: skip


def slope(y, x):
    """The derivative of y by x, a list; zeros if y does not depend on x."""
    import torch

    (found,) = torch.autograd.grad(y, x, retain_graph=True, allow_unused=True) if y.requires_grad else (None,)
    return torch.zeros_like(x) if found is None else found


def gaussian_of(mean, actions, log_std):
    """(log-probs, entropies) of lists."""
    return lambda m: m.gaussian(mean=tensor(mean), actions=tensor(actions), log_std=tensor(log_std))


def gaussian_slopes(m):
    """Slopes for mean 1, action 3, log_std 0: of the log-prob by mean and by log_std, of the entropy by log_std."""
    mean, log_std = tensor([[1.0]]).requires_grad_(), tensor([0.0]).requires_grad_()
    log_probs, entropies = m.gaussian(mean=mean, actions=tensor([[3.0]]), log_std=log_std)
    pairs = (log_probs.sum(), mean), (log_probs.sum(), log_std), (entropies.sum(), log_std)
    return [slope(y, x).sum() for y, x in pairs]


def probe_log_probs(m, train):
    score = train(**AIM_BY_PPO).summary["eval_return_mean"]
    if score < 0.9:
        return f"who Aims well gets 1; your agent gets {score:.2f}"


exercise(
    "log-probs",
    topic="continuous actions: log-probability and entropy",
    script="ppo.py",
    blanks=("gaussian",),
    gives={"gaussian": ("float32 tensor", "float32 tensor")},
    difficulty=1,
    minutes=25,
    task="write log-density and entropy of a Gaussian whose dimensions are independent. mean and actions are (B, D), "
    "log_std, the logarithm of the standard deviation, is (D,), the same for all rows. Return two tensors (B,): also "
    "the entropies, although they are all alike. Gradients have to flow. math.pi and math.e are at hand; write it out "
    "instead of calling torch.distributions.",
    cases=[
        Case(
            "mean 1, action 3, log_std 0: (log-probs, entropies)",
            gaussian_of([[1.0]], [[3.0]], [0.0]),
            [[-2.918939], [1.418939]],  # -4 / 2 - ln(2 pi) / 2 with ln(2 pi) = 1.837877; (ln(2 pi) + 1) / 2
            {
                "forgetting 1 / sqrt(2 pi)": lambda r: close(r[0], [-2.0]),
                "the wrong sign: a larger distance from the mean is less likely": lambda r: close(r[0], [2.918939]),
                "forgetting the half before the square": lambda r: close(r[0], [-4.918939]),
                "returning the density, not its logarithm": lambda r: close(r[0], [0.053991]),
                "taking log_std for the deviation itself": lambda r: math.isinf(r[0][0]),
                "forgetting e in the entropy": [[-2.918939], [0.918939]],
            },
            "log of exp(-z^2 / 2) / (sigma sqrt(2 pi)), and log(sigma sqrt(2 pi e))",
        ),
        Case(
            "two dimensions, deviations 2 and 1, means 0, 0 and 1, 0, actions 4, 1 and 1, 0: (log-probs, entropies)",
            gaussian_of([[0.0, 0.0], [1.0, 0.0]], [[4.0, 1.0], [1.0, 0.0]], [math.log(2), 0.0]),
            # z = 2, 1 and 0, 0: -2.5 and 0, less ln 2 = 0.693147 and 1.837877; 0.693147 + 2 x 1.418939
            [[-5.031024, -2.531024], [3.531024, 3.531024]],
            {
                "dividing by the variance instead of the deviation": lambda r: close(r[0], [-3.531024, -2.531024]),
                "forgetting to take away log_std": lambda r: close(r[0], [-4.337877, -1.837877]),
                "taking the mean over dimensions: probabilities multiply, so logarithms add up": lambda r: close(
                    r[0], [-2.515512, -1.265512]
                ),
                "forgetting log_std in the entropy": lambda r: close(r[1], [2.837877, 2.837877]),
                "taking the negated log-prob of this action for the entropy": lambda r: close(
                    r[1], [5.031024, 2.531024]
                ),
            },
            "the sum over dimensions",
        ),
        Case(
            "mean 1, action 3, log_std 0: slopes of the log-prob by mean and by log_std, of the entropy by log_std",
            gaussian_slopes,
            [2.0, 3.0, 1.0],  # z / sigma, z^2 - 1, 1
            {"cutting gradients off": lambda r: 0.0 in r},
            "what turns a tensor into a number: .item(), .detach(), NumPy",
        ),
    ],
    probe=probe_log_probs,
    learn=Learn(PENDULUM_BY_PPO, -700.0),
)


def squashed_of(mean, log_std, u):
    """squashed_log_prob of lists."""
    return lambda m: m.squashed_log_prob(mean=tensor(mean), log_std=tensor(log_std), u=tensor(u))


def squashed_slope(m):
    """How log pi(a) of the action without noise changes with its mean, which is 1."""
    mean = tensor([[1.0]]).requires_grad_()
    _, log_probs = m.sample(mean, tensor([0.0]), tensor([[0.0]]))
    return slope(log_probs.sum(), mean)[0]


exercise(
    "squashed",
    topic="actions through tanh, and their log-probability",
    script="exercises/scripts/squashed.py",
    blanks=("log_slope", "squashed_log_prob"),
    gives={"log_slope": "float32 tensor", "squashed_log_prob": "float32 tensor"},
    difficulty=2,
    minutes=35,
    task="write the logarithm of the slope of tanh, which has to be right where tanh(u) is rounded to 1 as well (the "
    "docstring has a form that is), and with it the log-probability of squashed actions. "
    "torch.distributions.Normal(mean, std).log_prob(u) is at hand, and so is F.softplus.",
    cases=[
        Case(
            "log(1 - tanh(u)^2) for u = 0, 1, 20, -50",
            lambda m: m.log_slope(u=tensor([0.0, 1.0, 20.0, -50.0])),
            # tanh(1) = 0.761594: ln(0.419974). Far out 1 - tanh(u)^2 = 4 e^(-2|u|): ln 4 - 40, ln 4 - 100
            [0.0, -0.867562, -38.613706, -98.613706],
            {
                "taking the logarithm of 0 where tanh is rounded to 1": lambda r: (
                    close(r[1], -0.867562) and math.isinf(r[2])
                ),
                "adding a small number, which is far too much where the slope is smaller": lambda r: (
                    close(r[1], -0.867562, 1e-3) and r[2] > -25
                ),
                "forgetting the logarithm": lambda r: close(r[:2], [1.0, 0.419974]),
                "forgetting the square": lambda r: close(r[1], -1.43378),  # ln(1 - 0.761594)
                "forgetting the factor 2": lambda r: close(r[1:3], [-0.433781, -19.306853]),
                "raising e to a large power: softplus does not overflow": lambda r: (
                    close(r[2], -38.613706) and math.isinf(r[3])
                ),
            },
            "the second formula in the docstring",
        ),
        Case(
            "mean 0, log_std 0, u = 0 and u = 1: the log-probs",
            squashed_of([[0.0], [0.0]], [0.0], [[0.0], [1.0]]),
            [-0.918939, -0.551377],  # -ln(2 pi) / 2; -0.5 - 0.918939 + 0.867562
            {
                "forgetting the correction": [-0.918939, -1.418939],
                "correcting in the wrong direction: what is pressed together gets denser": [-0.918939, -2.286501],
                "asking for the density of tanh(u) instead of u": [-0.918939, -0.34139],  # -0.290013 for -0.5
            },
            "the sign of the correction, and where the Gaussian is looked up",
        ),
        Case(
            "means 0, 1, deviations 1, 2, u = (1, 1) and (0, 3): the log-probs",
            squashed_of([[0.0, 1.0], [0.0, 1.0]], [0.0, math.log(2)], [[1.0, 1.0], [0.0, 3.0]]),
            # -0.551377, and -0.918939 - 0.693147 + 0.867562 = -0.744524; -0.918939, and -0.5 - 1.612086 + 4.618662
            [-1.295901, 1.587637],
            {
                "taking the mean over dimensions": [-0.647951, 0.793819],
                "taking log_std for the deviation": lambda r: has_nan(r) or any(map(math.isinf, r)),
                # -1.418939 - 1.612086 + 0.867562; -0.918939 - 2.112086 + 4.618662 / 2
                "averaging the correction over dimensions": [-2.163463, -0.721694],
            },
            "the sum over dimensions, of both terms",
        ),
        Case(
            "mean 1, no noise: how log pi(a) changes with the mean",
            squashed_slope,
            [1.523188],  # the density of u stays, -log_slope(u) grows by 2 tanh(1)
            {"cutting gradients off": [0.0]},
            "what turns a tensor into a number: .item(), .detach(), NumPy",
        ),
    ],
)

# ------------------------------------------------------------------------------------------------------ ddpg_td3.py

DDPG = {"algorithm": "ddpg", "target_noise": 0.0, "twin_q": False, "policy_frequency": 1, "seed": 1}
AIM_BY_DDPG = DDPG | {"env_id": "Classroom/Aim-v0", "gamma": 0.9, "total_timesteps": 2000, "hidden_sizes": (32,),
                      "actor_learning_rate": 3e-3, "critic_learning_rate": 3e-3, "learning_starts": 200,
                      "batch_size": 64}  # fmt: skip
PENDULUM_BY_DDPG = DDPG | {"env_id": "Pendulum-v1", "gamma": 0.98, "total_timesteps": 12_000, "hidden_sizes": (64, 64),
                           "actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3, "batch_size": 128,
                           "eval_every": 1_000, "stop_at_return": -250.0}  # fmt: skip


def actor_and_critic():
    """mu(s) = 2 s and Q(s, a) = 3 s^2 a, with 2 and 3 as their only weights."""
    import torch

    class Critic(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(3.0))

        def forward(self, obs, actions):
            return (self.weight * obs**2 * actions)[:, 0]

    actor = torch.nn.Linear(1, 1, bias=False)
    actor.weight.data[:] = 2.0
    return actor, Critic()


def actor_slope(m):
    """(the loss, its slope by the actor's weight) in the states 1 and 2."""
    actor, critic = actor_and_critic()
    loss = m.actor_loss(actor=actor, critic=critic, obs=tensor([[1.0], [2.0]]))
    return loss, slope(loss, actor.weight)[0, 0]


def critic_afterwards(m):
    """(the critic's weight, whether it can still learn, whether it has been left without a gradient) afterwards."""
    actor, critic = actor_and_critic()
    m.actor_loss(actor=actor, critic=critic, obs=tensor([[1.0], [2.0]]))
    return critic.weight, critic.weight.requires_grad, critic.weight.grad is None


def probe_dpg(m, train):
    score = train(**AIM_BY_DDPG).summary["eval_return_mean"]
    if score < 0.9:
        return f"who Aims well gets 1; your agent gets {score:.2f}. Does the actor climb what the critic has learnt?"


exercise(
    "dpg",
    topic="the deterministic policy gradient",
    script="ddpg_td3.py",
    blanks=("actor_loss",),
    gives={"actor_loss": "float32 tensor"},
    difficulty=2,
    minutes=20,
    task="write the loss with which the actor climbs the critic: its gradient has to go through the critic into the "
    "actor, and the critic must stay as it is. actor(obs) gives actions (B, D), critic(obs, actions) values (B,). "
    "The loss is minimised; train computes the gradient, for the actor's weights only.",
    cases=[
        Case(
            "mu(s) = w s with w = 2, Q(s, a) = 3 s^2 a, states 1 and 2: (the loss, its slope by w)",
            actor_slope,
            [-27.0, -13.5],  # Q = 3 x 2 = 6 and 12 x 4 = 48; Q grows by 3 s^3 = 3 and 24 with w
            {
                "going downhill: what is minimised is -Q": [27.0, 13.5],
                "adding up over the batch instead of taking the mean": [-54.0, -27.0],
                "cutting the actor's gradient off: .detach() and torch.no_grad() leave nothing to learn from": [
                    -27.0,
                    0.0,
                ],
                "giving the critic action and state in the wrong order": lambda r: close(r[0], -54.0),
            },
            "the way from the loss back to the actor's weights: through the action",
        ),
        Case(
            "the same; afterwards: (the critic's weight, whether it can learn, whether it has no gradient yet)",
            critic_afterwards,
            [3.0, 1.0, 1.0],
            {
                "moving the critic: it would learn to praise instead of to judge": lambda r: not close(r[0], 3.0),
                "freezing the critic, and leaving it frozen": [3.0, 0.0, 1.0],
                "computing the gradient here: that is what train does, for the actor alone": [3.0, 1.0, 0.0],
            },
            "what your function does beside returning a loss: nothing",
        ),
    ],
    probe=probe_dpg,
    learn=Learn(PENDULUM_BY_DDPG, -600.0),
)

# ------------------------------------------------------------------------------------------------------------- es.py

ARS_PAIRS = np.array([3.0, 1.0, 2.0, 6.0, 2.5, -1.0])
ARS_NOISE = np.array([[1.0, 0.0], [0.0, 3.0], [1.0, 1.0]], np.float32)
ARS_IN_WORDS = "returns 3, 1, then 2, 6, then 2.5, -1 of the directions (1, 0), (0, 3), (1, 1)"
ARS = {"ars": True, "optimizer": "ascent", "hidden_sizes": (), "population_size": 16, "top_directions": 4, "seed": 1}


def probe_ars(m, train):
    settings = {"sigma": 0.3, "learning_rate": 0.05, "total_timesteps": 3000}
    score = train(env_id="Classroom/Aim-v0", **ARS, **settings).summary["eval_return_mean"]
    if score < 0.9:
        return f"who Aims well gets 1; after 3,000 episodes your policy gets {score:.2f}"


exercise(
    "ars",
    topic="augmented random search: the best directions only",
    script="es.py",
    blanks=("ars_gradient",),
    hides=("es_gradient",),
    gives={"ars_gradient": "array"},
    difficulty=2,
    minutes=30,
    task="write the update of augmented random search. Directions delta_k are the rows of noise (pairs, D); returns "
    "(2 x pairs,) come in pairs, that of theta + sigma delta_k, then that of theta - sigma delta_k. Keep the b = "
    "top_directions whose better return is best (None: all), and divide by b and by the (population) deviation of the "
    "returns that are kept. If these are all the same, the result is 0.",
    cases=[
        Case(
            f"{ARS_IN_WORDS}; the best two",
            lambda m: m.ars_gradient(returns=ARS_PAIRS, noise=ARS_NOISE, top_directions=2),
            # better returns 3, 6, 2.5: the first two. 2 (1, 0) - 4 (0, 3) = (2, -12); 3, 1, 2, 6 have the mean 3 and
            # the variance (0 + 4 + 1 + 9) / 4 = 3.5: divided by 2 x 1.870829
            [0.534522, -3.207135],
            {
                "using all directions": [0.866249, -1.338749],  # see the next case
                "choosing by the return of theta + sigma delta": [1.767082, 1.124507],  # (5.5, 3.5) / 2 / 1.556238
                "choosing by how much the two returns differ": [0.704416, -1.710725],  # (3.5, -8.5) / 2 / 2.484326
                "forgetting to divide by the deviation": [1.0, -6.0],
                "forgetting to divide by the number of directions": [1.069045, -6.41427],
                "dividing by the number of returns": [0.267261, -1.603567],
                "taking the deviation of all returns, also of those that are left out": [0.4725, -2.835],
                "taking the sample deviation": [0.46291, -2.77746],
                "the wrong sign: it has to point uphill": [-0.534522, 3.207135],
                "leaving out the returns of theta - sigma delta": [0.801784, 1.603567],  # (3, 6)
            },
            "algorithm 2 of arXiv 1803.07055: sorting the directions, and the update step",
        ),
        Case(
            f"{ARS_IN_WORDS}; all of them",
            lambda m: m.ars_gradient(returns=ARS_PAIRS, noise=ARS_NOISE, top_directions=None),
            # (2 + 3.5, -12 + 3.5) / 3; the six returns have the mean 2.25 and the variance 26.875 / 6 = 2.116404^2
            [0.866249, -1.338749],
            {},
            "what top_directions = None means for a slice",
        ),
        Case(
            "two directions, all returns are 2",
            lambda m: m.ars_gradient(returns=np.full(4, 2.0), noise=ARS_NOISE[:2], top_directions=2),
            [0.0, 0.0],
            {"dividing 0 by 0": has_nan},
            "a deviation of 0",
        ),
    ],
    probe=probe_ars,
    learn=Learn(ARS | {"env_id": "CartPole-v1", "sigma": 0.1, "learning_rate": 0.1, "total_timesteps": 100_000}, 200.0),
)

# ---------------------------------------------------------------------------------------------------------- mappo.py

FP_SPREAD = {"env_id": "mpe2.simple_spread_v3", "env_kwargs": '{"N": 2}', "state_type": "FP", "total_timesteps": 10_000,
             "learning_rate": 1e-3, "num_minibatches": 8, "gamma": 0.95, "seed": 1}  # fmt: skip


def shared(state_type):
    """share_obs in two environments with two agents, who see one number and two; in the second the second is dead."""

    def call(m):
        size = 2 if state_type == "EP" else 4
        args = SimpleNamespace(state_type=state_type)
        team = SimpleNamespace(args=args, num_agents=2, widest=2, state_size=size)
        obs = [np.float32([[1], [2]]), np.float32([[3, 4], [5, 6]])]
        alive = [np.float32([[1], [1]]), np.float32([[1], [0]])]
        available = [np.ones((2, 2), np.float32)] * 2
        parts = m.RowParts(obs, available, alive, np.float32([[7, 8], [9, 10]]))
        return m.Team.share_obs(team, parts=parts)

    return call


def rows_are(*rows):
    """A test of an array (2, 2, S): are these the states of both agents in the first environment, then the second?"""
    return lambda found: close([row for env in found for row in env], [list(row) for row in rows])


def probe_joint_state(m, train):
    settings = {"num_envs": 8, "num_steps": 8, "total_timesteps": 6000, "learning_rate": 3e-3, "hidden_sizes": (16,)}
    agent = train(env_id="probes.Signs", state_type="FP", seed=1, **settings).agent
    a, b = np.float32([[-1], [-1], [1], [1]]), np.float32([[-1], [1], [-1], [1]])
    ones = np.ones((4, 1), np.float32)
    share_obs = agent.share_obs(m.RowParts([a, b], [ones, ones], [ones, ones], np.hstack([a, b])))
    buffer = SimpleNamespace(
        share_obs=[share_obs], rnn_states_critic=[np.zeros((4, 2, 1, 0), np.float32)], masks=[np.ones((4, 2, 1))]
    )
    values, _ = agent.values(buffer, 0)
    values = agent.value_norm.denormalize(tensor(values))[..., 0].tolist()
    if not close(values, [[0, 0], [1, 1], [1, 1], [2, 2]], 0.3):
        return (
            "in Signs the team gets 1 for every agent with the sign 1. For the signs (-1, -1), (-1, 1), (1, -1), (1, 1)"
            " the critic should say 0, 1, 1, 2 to both; yours says to the two of them "
            + ", ".join(f"{x:.1f} and {y:.1f}" for x, y in values)
        )


exercise(
    "joint-state",
    topic="several agents: what a centralised critic sees",
    script="mappo.py",
    blanks=("Team.share_obs",),
    gives={"Team.share_obs": "float32 array"},
    difficulty=2,
    minutes=30,
    task="write what MAPPO's critic is shown. self.args.state_type is EP or FP. With EP it is the state that the "
    "environment provides, parts.state (N, S), once for all agents. With FP it is a float32 array (N, self.num_agents, "
    "self.state_size): for each agent its own observation, filled up with zeros at the right to self.widest numbers, "
    "for observations differ in length, and then the state. parts.obs and parts.alive are lists with an entry for each "
    "agent: observations (N, …), and 1 or 0 as (N, 1). A dead agent has zeros only, whatever stands elsewhere.",
    cases=[
        Case(
            "EP: two environments whose states are (7, 8) and (9, 10)",
            shared("EP"),
            [[7.0, 8.0], [9.0, 10.0]],
            {},
            "the simple case: one state for all",
        ),
        Case(
            "FP, the same states; agent 0 sees 1 in the first, 2 in the second, agent 1 sees (3, 4) and (5, 6); in the "
            "second environment agent 1 is dead",
            shared("FP"),
            [[[1, 0, 7, 8], [3, 4, 7, 8]], [[2, 0, 9, 10], [0, 0, 0, 0]]],
            {
                "not looking at deaths": rows_are((1, 0, 7, 8), (3, 4, 7, 8), (2, 0, 9, 10), (5, 6, 9, 10)),
                "leaving the state to the dead": rows_are((1, 0, 7, 8), (3, 4, 7, 8), (2, 0, 9, 10), (0, 0, 9, 10)),
                "letting one death be all agents' in its environment": rows_are(
                    (1, 0, 7, 8), (3, 4, 7, 8), (0, 0, 0, 0), (0, 0, 0, 0)
                ),
                "letting one death be the agent's in all environments": rows_are(
                    (1, 0, 7, 8), (0, 0, 0, 0), (2, 0, 9, 10), (0, 0, 0, 0)
                ),
                "putting the state first": rows_are((7, 8, 1, 0), (7, 8, 3, 4), (9, 10, 2, 0), (0, 0, 0, 0)),
                "putting the state right behind a short observation: it has the same places for all": rows_are(
                    (1, 7, 8, 0), (3, 4, 7, 8), (2, 9, 10, 0), (0, 0, 0, 0)
                ),
                "filling up at the left": rows_are((0, 1, 7, 8), (3, 4, 7, 8), (0, 2, 9, 10), (0, 0, 0, 0)),
                "leaving out the state: then the critic is not a centralised one": rows_are(
                    (1, 0, 0, 0), (3, 4, 0, 0), (2, 0, 0, 0), (0, 0, 0, 0)
                ),
                "leaving out the agent's own observation": rows_are(
                    (0, 0, 7, 8), (0, 0, 7, 8), (0, 0, 9, 10), (0, 0, 0, 0)
                ),
            },
            "one row of the result: own observation, zeros, state",
        ),
    ],
    probe=probe_joint_state,
    learn=Learn(FP_SPREAD, -60.0),
)
