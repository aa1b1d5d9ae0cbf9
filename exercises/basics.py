"""Exercises of weeks 1 to 3: bandits, dynamic programming, prediction, Q-learning."""

import math
import random
from types import SimpleNamespace
from unittest import mock

from inputs import lists, normal, pick, share, together, uniform, whole
from mechanism import exercise
from pictures import Table, drawn, parts

UCB = {"values": normal("A", 0.3), "counts": whole(0, 4, "A"), "t": whole(2, 9), "c": uniform(0.2, 3)}
RANDOM_REWARD = {"reward": normal(), "baseline": normal(), "alpha": share}
exercise(
    "bandit",
    course="week 1, 40 minutes, easy: bandits: action values, UCB, gradient bandit",
    cut="exercises/scripts/bandits.py: new_value, ucb_action, new_preferences",
    task="Values, counts and preferences are lists, one entry for each arm. Return numbers, or a new list. | "
    "new_value: write the incremental estimate of a value, with step 1/count or a constant one. | ucb_action: "
    "write the choice by upper confidence bounds. | new_preferences: write the update of a gradient bandit; "
    "softmax(preferences) is at hand.",
    cases={
        "the third reward of an arm is 6 | eq. 2.3: new = old + step x (target - old)": lists(
            "new_value", value=3.0, reward=6.0, count=3
        ),
        "two arms were never pulled | what N(a) = 0 means": lists(
            "ucb_action", values=[5.0, 0.0, 1.0, 0.0], counts=[9, 0, 3, 0], t=13, c=2.0
        ),
        "the bonus is worth the gap of 1 from c = 2.22 on | eq. 2.10, term by term": lists(
            "ucb_action", values=[2.0, 1.0], counts=[89, 10], t=100, c=2.3
        ),
        "probabilities 1/4, 1/2, 1/4 | eq. 2.12: the action and the others have formulas of their own": lists(
            "new_preferences", preferences=[0.0, math.log(2), 0.0], action=0, reward=5.0, baseline=3.0, alpha=0.3
        ),
    },
    random=together(
        lists("new_value", value=normal(), reward=normal(), count=whole(1, 9), alpha=pick(None, 0.0, share)),
        together(*[lists("ucb_action", **UCB)] * 20),
        lists("new_preferences", preferences=normal("A"), action=whole(0, "A"), **RANDOM_REWARD),
    ),
    mistakes={
        "forgetting to take away the old estimate": "(reward - value) -> reward",
        "ignoring alpha": "1 / count if alpha is None else alpha -> 1 / count",
        "taking alpha = 0 for no alpha: `if alpha` is false for None and for 0": "if alpha is None -> if not alpha",
        "giving arms that were never pulled no bonus": "append(math.inf) -> append(value)",
        "taking the logarithm of t + 1": "math.log(t) -> math.log(t + 1)",
        "forgetting the logarithm": "math.log(t) -> t",
        "moving the preference of the action only": "(taken - probability) -> taken * (1 - probability)",
        "taking pi of the action for all arms": "(taken - probability) -> (taken - softmax(preferences)[action])",
        "forgetting the baseline": "(reward - baseline) -> reward",
    },
)

# In 0, action 0 pays 1 and ends, action 1 leads to 1. In 1, action 0 pays 3 and ends; action 1 leads back to 0, or pays
# 5.5 and ends, each half of the time. As in FrozenLake's table, ends have a next state as well.
WORLD = {
    0: {0: [(1.0, 1, 1.0, True)], 1: [(1.0, 1, 0.0, False)]},
    1: {0: [(1.0, 0, 3.0, True)], 1: [(0.5, 0, 0.0, False), (0.5, 1, 5.5, True)]},
}
LINE = {0: {0: [(1.0, 1, 0.0, False)]}, 1: {0: [(1.0, 2, 8.0, True)]}, 2: {0: [(1.0, 2, 0.0, True)]}}
TIES = {0: {0: [(1.0, 0, 1.0, True)], 1: [(1.0, 0, 2.0, True)], 2: [(1.0, 0, 2.0, True)]}}
ALMOST = {0: TIES[0] | {1: [(1.0, 0, 2.0 + 1e-10, True)]}}


def cliff_grid(rows=3, columns=4):
    """The rules of a small CliffWalking: a step costs 1, a fall 10 and ends the episode, as the goal does."""
    rules = {}
    for state in range(rows * columns):
        row, column = divmod(state, columns)
        rules[state] = {}
        for action, (down, right) in enumerate([(-1, 0), (0, 1), (1, 0), (0, -1)]):
            at = min(max(row + down, 0), rows - 1), min(max(column + right, 0), columns - 1)
            bottom = at[0] == rows - 1 and at[1] > 0
            falls = bottom and at[1] < columns - 1
            rules[state][action] = [(1.0, at[0] * columns + at[1], -10.0 if falls else -1.0, bottom)]
    return rules


CLIFF_GRID = cliff_grid()
GRID = "a grid of 3 x 4: steps cost 1, the cliff in the bottom row 10, and the goal is its right end"
OUTCOMES = [(0.5, 0, 4.0, False), (0.25, 1, 2.0, True), (0.25, 2, 0.0, False)]
PLAN_MISTAKES = {
    "stopping after one sweep": "if change < theta -> if True",
    "ending when one state has not changed instead of all": "max(change, abs(values[state] - before)) -> "
    "abs(values[state] - before)",
    "taking values that sink for values that do not change": "abs(values[state] - before) -> values[state] - before",
}


def world(draw):
    """A table of rules with up to four states and three actions; every action may end the episode."""
    rng, table = draw.rng, {}
    states = int(rng.integers(2, 5))
    for state in range(states):
        table[state] = {}
        for action in range(rng.integers(1, 4)):
            chances = rng.dirichlet([1, 1, 1]) * 0.7
            ends = [(float(p), int(rng.integers(states)), rng.normal(), False) for p in chances]
            table[state][action] = [*ends, (0.3, int(rng.integers(states)), rng.normal(), True)]
    draw.sizes["S"] = states
    return table


exercise(
    "policy-iteration",
    course="week 2, 40 minutes, medium: dynamic programming: evaluate a policy, improve it",
    cut="exercises/scripts/planning.py: evaluate_policy, improve_policy, policy_iteration",
    task="write the two halves of policy iteration, and their turns. P[s][a] is a list of tuples (probability, "
    "next state, reward, terminated). Policies are lists with the action of each state. | evaluate_policy: "
    "action_value(P[s][a], values, gamma) says what an action is worth. Sweep until no value changes by theta "
    "or more in a sweep. | improve_policy: return a new policy. Mind ties: an action is kept unless another "
    "one is better by more than 1e-8. | policy_iteration: evaluate and improve in turns, until nothing is "
    "left to improve.",
    cases={
        "two states and their policy | eq. 4.5 with a policy that is sure of its action": lists(
            "evaluate_policy", P=WORLD, policy=[1, 0], gamma=0.5
        ),
        f"{GRID}; always to the right | which action the policy takes": drawn(
            Table(columns=4), lists("evaluate_policy", P=CLIFF_GRID, policy=[1] * 12, gamma=0.5)
        ),
        "three states in a line | which change is compared with theta": lists(
            "evaluate_policy", P=LINE, policy=[0, 0, 0], gamma=0.5
        ),
        "two states, improved | eq. 4.9: the argmax over actions of what each is worth": lists(
            "improve_policy", P=WORLD, policy=[1, 0], values=[1.5, 3.0], gamma=0.5
        ),
        "actions that pay 1, 2, 2; then one that pays 0.0000000001 more | ties: which action is kept": together(
            lists("improve_policy", P=TIES, policy=[2], values=[0.0], gamma=0.5),
            lists("improve_policy", P=ALMOST, policy=[2], values=[0.0], gamma=0.5),
        ),
        "(policy, its values, policies evaluated) | when it ends: the improved policy is the one before": lists(
            "policy_iteration", P=WORLD, gamma=0.5
        ),
    },
    random=together(
        lists("evaluate_policy", P=world, policy=whole(0, 1, "S"), gamma=uniform(0.5, 0.9)),
        lists("improve_policy", P=world, policy=whole(0, 1, "S"), values=normal("S"), gamma=uniform(0.5, 0.9)),
        lists("policy_iteration", P=world, gamma=uniform(0.5, 0.9)),
    ),
    mistakes={
        "taking the best action instead of the policy's: that is value iteration": "action_value(P[state]"
        "[policy[state]], values, gamma) -> max(action_value(x, values, gamma) for x in P[state].values())",
        **PLAN_MISTAKES,
        "changing to another action that is only as good": "if max(worth) > worth[action] + 1e-8 -> if True",
        "letting rounding decide between equals: policy iteration may then never end": " + 1e-8 -> ",
        "stopping after the first improvement": "if improved == policy -> if True",
    },
)

exercise(
    "value-iteration",
    course="week 2, 35 minutes, easy: dynamic programming: value iteration",
    cut="exercises/scripts/planning.py: action_value, value_iteration",
    task="States are numbered from 0. P[s] is a dict with the actions of s. | action_value: write what an action "
    "is worth by the table of the world's rules. `outcomes` is P[s][a], a list of tuples (probability, next "
    "state, reward, terminated). | value_iteration: write value iteration with it. Whether a sweep works in "
    "one list or in two is up to you.",
    cases={
        "an action | the sum over outcomes, and what terminated does to one of them": lists(
            "action_value", outcomes=OUTCOMES, values=[2.0, 100.0, 8.0], gamma=0.5
        ),
        "three states in a line | which change is compared with theta: the largest size of the sweep": lists(
            "value_iteration", P=LINE, gamma=0.5
        ),
        "two states | what a sweep makes of several actions": lists("value_iteration", P=WORLD, gamma=0.5),
        f"{GRID} | the maximum over actions, beside the cliff and far from it": drawn(
            Table(columns=4), lists("value_iteration", P=CLIFF_GRID, gamma=0.5)
        ),
    },
    random=together(
        lists("action_value", outcomes=lambda draw: world(draw)[0][0], values=normal("S"), gamma=share),
        lists("value_iteration", P=world, gamma=uniform(0.5, 0.9)),
    ),
    mistakes={
        "adding the value of the next state although the episode has terminated": "0.0 if terminated else gamma -> "
        "gamma",
        "forgetting gamma": "else gamma * values -> else values",
        **PLAN_MISTAKES,
        "taking the mean over actions, as if they were random": (
            "max(action_value -> sum(action_value",
            "for action in P[state]) -> for action in P[state]) / len(P[state])",
        ),
        "beginning the maximum over actions at 0, as if there were always something better than a loss": (
            "max(action_value -> max([0.0] + [action_value",
            "for action in P[state]) -> for action in P[state]])",
        ),
    },
)


def episode(draw):
    """Some steps among four states, of which the last one ends the episode or not."""
    path = draw.rng.integers(4, size=draw.rng.integers(2, 8)).tolist()
    steps = [(state, draw.rng.normal(), next_state, False) for state, next_state in zip(path, path[1:])]
    *first, terminated = steps[-1]
    return [*steps[:-1], (*first, draw.rng.random() < 0.5)]


TWO_STATES = {"values": [2.0, 4.0], "alpha": 0.5, "gamma": 0.5}
THREE_STEPS = [(0, 1.0, 1, False), (1, 2.0, 0, False), (0, 4.0, 1, True)]
CUT_OFF = [*THREE_STEPS[:2], (0, 4.0, 1, False)]
RANDOM_TD = {"values": normal("4"), "episode": episode, "alpha": share, "gamma": share}
AS_END = "in episode: -> in [*episode[:-1], (*episode[-1][:3], True)]:"
exercise(
    "td-prediction",
    course="week 3, 35 minutes, medium: TD(0) and TD(lambda)",
    cut="exercises/scripts/prediction.py: td_zero, td_lambda",
    task="an episode is a list of tuples (state, reward, next state, terminated). Learn from its steps in their "
    "order, each from the values that the steps before have left. Return a new list: `values` itself stays. "
    "An episode can be cut off: its last step has then not terminated, and the value of its next state "
    "counts. | td_zero: write TD(0). | td_lambda: write TD(lambda), with accumulating traces.",
    cases={
        "the last step ends | eq. 6.2, and what follows the last step": lists(
            "td_zero", **TWO_STATES, episode=THREE_STEPS
        ),
        "the episode is cut off in state 1 | the flag terminated: the end of a list is no end": lists(
            "td_zero", **TWO_STATES, episode=CUT_OFF
        ),
        "the last step ends | the order in a step: the error, all traces fade, one grows, all values move": lists(
            "td_lambda", **TWO_STATES, episode=THREE_STEPS, trace_decay=0.8
        ),
    },
    random=together(lists("td_zero", **RANDOM_TD), lists("td_lambda", **RANDOM_TD, trace_decay=share)),
    mistakes={
        "adding the value of the next state although the episode has terminated": (
            "td_zero: 0.0 if terminated else values -> values",
            "td_lambda: 0.0 if terminated else values -> values",
        ),
        "forgetting gamma in TD(0)": "td_zero: gamma * following -> following",
        "taking the last step of the list for an end": (f"td_zero: {AS_END}", f"td_lambda: {AS_END}"),
        "taking, in TD(lambda), the last step of the list for an end": f"td_lambda: {AS_END}",
        "setting the trace to 1 instead of adding 1": "traces[state] += 1 -> traces[state] = 1",
        "forgetting gamma: traces fade by gamma lambda": "[gamma * trace_decay * trace -> [trace_decay * trace",
        "forgetting lambda: traces fade by gamma lambda": "[gamma * trace_decay * trace -> [gamma * trace",
    },
)

CLIFF = {"env_id": "CliffWalking-v1", "total_timesteps": 50_000, "learning_rate": 0.5, "anneal_lr": True, "gamma": 1.0,
         "max_episode_steps": 1000, "seed": 1}  # fmt: skip


def action_shares(values, epsilon, draws=10_000):
    """How often epsilon_greedy takes each action."""

    def call(m):
        rng, counts = random.Random(0), [0] * len(values)
        for _ in range(draws):
            counts[m.epsilon_greedy(values=list(values), epsilon=epsilon, rng=rng)] += 1
        return [count / draws for count in counts]

    return call


def random_choices(m, rng):
    """Values of which some are equal and some nearly so; with and without exploring."""
    values = (rng.integers(3, size=rng.integers(2, 6)) + 0.2 * rng.integers(2) * rng.random()).tolist()
    values[0] += rng.choice([0.0, 0.2, 0.4])
    return [action_shares(values, epsilon, 3000)(m) for epsilon in (0.0, rng.random())]


exercise(
    "epsilon-greedy",
    course="week 1, 15 minutes, easy: explore, or take the best action",
    cut="qlearning.py: epsilon_greedy",
    task="return a random action with probability epsilon, and else one with the highest value. `values` is a list of "
    "numbers, `rng` a random.Random: rng.random() is in [0, 1), rng.randrange(n) one of 0 … n - 1, rng.choice(list) "
    "one of a list. The random action may well be the best one, and ties are broken by chance.",
    cases={
        "the share of each action in 10,000 draws | the comparison of rng.random() with epsilon": (
            action_shares([1.0, 3.0, 2.0], 0.0),
            0.025,
        ),
        "the share of each action | the branch that explores": (action_shares([1.0, 0.0, 0.0, 3.0], 0.4), 0.025),
        "the share of each action | what happens where several actions have the highest value": (
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
        "always taking the first of several best actions: at the beginning, when all values are 0, the agent would go "
        "one way only": "rng.choice([action for action, value in enumerate(values) if value == best]) -> "
        "values.index(best)",
        "taking action 0, whatever the values are": "if rng.random() -> return 0\n    if rng.random()",
        "taking values that are nearly the best for the best": (
            "if values.count(best) == 1 -> if False",
            "value == best -> value > best - 0.5",
        ),
    },
    learn=(CLIFF, -17.0),  # the shortest way has 13 steps
)

TD_STEP = {"reward": 1.0, "discount": 0.5, "next_values": [3.0, 7.0, 2.0]}
TIED_STEP = {"reward": normal(), "discount": share, "next_values": whole(0, 4, "A")}
NORMAL_STEP = {"reward": normal(), "discount": share, "next_values": normal("A")}
exercise(
    "td-targets",
    course="week 3, 30 minutes, easy: Sarsa, expected Sarsa, double Q-learning",
    cut="qlearning.py: sarsa_target, expected_sarsa_target, double_q_target",
    task="write the three targets that differ from Q-learning's in one term only. `next_values` is a list. "
    "`discount` is gamma, or 0 where the episode terminated. | sarsa_target: the next action is known. | "
    "expected_sarsa_target: the policy pi is epsilon-greedy: with probability epsilon any action, also the "
    "best one. | double_q_target: one table chooses, `other_next_values`, a list, judges.",
    cases={
        "Sarsa | eq. 6.7": lists("sarsa_target", **TD_STEP, next_action=2),
        "expected Sarsa | the probability of the best action: 1 - epsilon + epsilon / n": lists(
            "expected_sarsa_target", **TD_STEP, epsilon=0.3
        ),
        "double Q | which table chooses and which one judges": lists(
            "double_q_target", **TD_STEP, other_next_values=[10.0, 4.0, 20.0]
        ),
    },
    random=together(
        lists("sarsa_target", **TIED_STEP, next_action=whole(0, "A")),
        lists("expected_sarsa_target", **TIED_STEP, epsilon=share),
        lists("double_q_target", **NORMAL_STEP, other_next_values=normal("A")),
    ),
    mistakes={
        "taking the highest value: that is Q-learning": "next_values[next_action] -> max(next_values)",
        "giving the best action no share of the random ones": "sum(next_values) / len(next_values) -> "
        "(sum(next_values) - max(next_values)) / max(len(next_values) - 1, 1)",
        "exchanging epsilon and 1 - epsilon": "epsilon * average + (1 - epsilon) -> (1 - epsilon) * average + epsilon",
        "counting 1 - epsilon for each of several best actions": "(1 - epsilon) * -> "
        "next_values.count(max(next_values)) * (1 - epsilon) *",
        "giving all of epsilon to every action that is as good as the best": "epsilon * average -> "
        "epsilon / len(next_values) * sum(v for v in next_values if v < max(next_values))",
        "letting the same table choose and judge: that is Q-learning": "* other_next_values[best] -> "
        "* next_values[best]",
        "letting the other table choose as well": "next_values.index(max(next_values)) -> "
        "other_next_values.index(max(other_next_values))",
    },
    learn=(CLIFF | {"algorithm": "double-q"}, -17.0),
)


def chain_episodes(end, limit=None, table=(0.0, 0.0, 0.0, 4.0), **settings):
    """Two episodes of Chain by play_episode: (steps, what it gave for each episode, the epsilons with which actions
    were chosen, the table, the sum of the TD errors that were logged). The environment knows nothing of the limit:
    that is play_episode's own affair. State 3, the last one, is never learnt.
    """

    def call(m):
        given = {"gamma": 0.5, "learning_rate": 0.5, "env_kwargs": f'{{"end": "{end}"}}'} | settings
        args = m.Args(env_id="Classroom/Chain-v0", **given)
        envs = m.make_envs(args, 1)
        env, args.max_episode_steps = envs.envs[0], limit
        agent, rng = m.make_agent(args, envs), random.Random(0)
        agent.tables[0][:] = [[value] for value in table]
        errors, epsilons, episodes = [], [], []
        log = lambda **metrics: errors.append(metrics.get("td_error", 0.0))
        run = SimpleNamespace(step=0, num_episodes=0, log=log, check_finite=lambda **_: None)

        def action_0(values, epsilon, rng):
            epsilons.append(epsilon)
            return 0

        with mock.patch.object(m, "epsilon_greedy", action_0):
            for _ in range(2):
                episodes.append(m.play_episode(agent=agent, env=env, run=run, rng=rng, args=args))
                run.num_episodes += 1
        return run.step, episodes, epsilons, [row[0] for row in agent.tables[0]], sum(errors)

    return parts(
        call,
        steps="where run.step is counted: once in each step",
        return_and_length_of_each="what is summed up, where the loop ends, and what is returned",
        epsilons="where schedules is called: it depends on run.step",
        Q="the line that changes the table: is `state` the one that the action was chosen in, and the discount right?",
        TD_errors="the call of run.log",
    )


def random_chain(m, rng):
    annealed = {"anneal_lr": True, "total_timesteps": int(rng.integers(8, 20)), "exploration_fraction": 0.9}
    given = {"gamma": rng.random(), "learning_rate": rng.random()} | (annealed if rng.random() < 0.7 else {})
    end, limit, table = rng.choice(["terminated", "truncated"]), rng.choice([None, 1, 2, 9]), 5 * rng.normal(size=4)
    return chain_episodes(end, limit, table.tolist(), **given)(m)


CHAIN = "two episodes of three steps that pay 1, 2, 3; gamma and learning rate 0.5"
exercise(
    "q-learning",
    course="week 3, 60 minutes, medium: the Q-learning update, and the loop around it",
    cut="qlearning.py: q_learning_target, play_episode",
    task="write the target, and play one episode with it. Only --algorithm q-learning is asked for. | "
    "q_learning_target: write R + gamma max Q. `next_values` is a list. `discount` is gamma, or 0 where the "
    "episode terminated. | play_episode: begin with obs, _ = env.reset(). Go on while neither terminated nor "
    "truncated, but at most args.max_episode_steps or 27_000 steps. In each step take epsilon and the "
    "learning rate from schedules(args, run.step, run.num_episodes). Choose with "
    "epsilon_greedy(agent.values(state), epsilon, rng), where state = agent.state(obs, run). Give env.step "
    "the action + agent.first_action. Count run.step. Move agent.tables[0][state][action] by the learning "
    "rate times the TD error. Call run.log(td_error=…) with its absolute value. At the end return (sum of "
    "rewards, number of steps).",
    cases={
        "the target | eq. 6.8 in the docstring at the top of the script": lists(
            "q_learning_target", reward=1.0, discount=0.5, next_values=[3.0, 7.0, 2.0]
        ),
        f"{CHAIN}; they terminate. Steps, (return, length) of each, epsilons, Q of the four states (the last one began "
        "at 4), sum of logged |TD error| | the line with the discount, and the one that changes the table": (
            chain_episodes("terminated")
        ),
        "the same, but the third step is truncated: state 3 is worth 4, only nobody plays on "
        "| what discount is where truncated is set": chain_episodes("truncated"),
        "the first again, but with --max-episode-steps 2, of which the environment knows nothing "
        "| args.max_episode_steps": chain_episodes("terminated", limit=2),
        "the first again, where epsilon and the learning rate fall with each of ten steps "
        "| where schedules is called: it depends on run.step": chain_episodes(
            "terminated", total_timesteps=10, anneal_lr=True, exploration_fraction=1.0
        ),
    },
    random=together(lists("q_learning_target", reward=normal(), discount=share, next_values=normal("A")), random_chain),
    mistakes={
        "forgetting the discount": "reward + discount * max -> reward + max",
        "adding the value of the next state although the episode terminated": "0.0 if terminated else args.gamma -> "
        "args.gamma",
        "replacing the entry by its target": "+= learning_rate * td_error -> += td_error",
        "logging TD errors with their signs": "td_error=abs(td_error) -> td_error=td_error",
        "treating truncation as termination: the clock was stopped, the future has not gone": "0.0 if terminated "
        "else -> 0.0 if terminated or truncated else",
        "playing on beyond the limit: some environments never end": "args.max_episode_steps or 27_000 -> 27_000",
        "forgetting to count the step | the line after env.step: run.step += 1": "run.step += 1 -> pass",
        "never computing the state anew, so that all is learnt about the first one "
        "| the end of the loop: the next state becomes the state": "state = next_state\n -> \n",
        "taking epsilon and the learning rate once an episode: they change with each step": (
            "epsilon, learning_rate = schedules(args, run.step, run.num_episodes)\n -> \n",
            "    for _ in ->     epsilon, learning_rate = schedules(args, run.step, run.num_episodes)\n    for _ in",
        ),
    },
    learn=(CLIFF, -17.0),
)
