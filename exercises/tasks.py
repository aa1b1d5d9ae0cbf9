"""The table of exercises. The fixed numbers are worked out by hand, in the comments beside them.

To add one: exercise("name", …) with the fields that forms.py explains, and in tests/test_exercises.py a faulty
implementation for each of its known mistakes. Nothing here may import a script: the checks go to students without them.
"""

import math
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import probes
from forms import Case, Learn, close, column, exercise, flags, has_nan, shape, tensor
from gymnasium import spaces

# ------------------------------------------------------------------------------------------------------ qlearning.py

CLIFF = {"env_id": "CliffWalking-v1", "total_timesteps": 50_000, "learning_rate": 0.5, "anneal_lr": True, "gamma": 1.0,
         "seed": 1}  # fmt: skip


def shares(values, epsilon):
    """How often epsilon_greedy takes each action, of 10,000 times."""

    def call(m):
        rng, counts = random.Random(0), [0] * len(values)
        for _ in range(10_000):
            counts[m.epsilon_greedy(values=list(values), epsilon=epsilon, rng=rng)] += 1
        return [count / 10_000 for count in counts]

    return call


def fork_table(train, **settings):
    """Q of the two states of Fork, after a short run."""
    constant = {"epsilon_start": 0.5, "epsilon_min": 0.5, "learning_rate": 0.5, "total_timesteps": 3000}
    return train(env_id="Classroom/Fork-v0", **constant | settings)


def probe_epsilon_greedy(m, train):
    table = fork_table(train, gamma=1.0).agent.tables[0]
    if not close(table, [[0.2, 1.0], [0.0, 1.0]], 1e-3):
        return (
            f"Fork has the values [[0.2, 1], [0, 1]]; after 3,000 steps with epsilon 0.5 yours are {table}.\n"
            "An entry that is still 0 was never tried. Look next at how often each branch of your function is taken."
        )


exercise(
    "epsilon-greedy",
    topic="explore, or take the best action",
    script="qlearning.py",
    blanks=("epsilon_greedy",),
    difficulty=1,
    minutes=15,
    task="return a random action with probability epsilon, and else one with the highest value. `values` is a list of "
    "numbers, `rng` a random.Random: rng.random() is in [0, 1), rng.randrange(n) one of 0 … n - 1, rng.choice(list) "
    "one of a list. The random action may well be the best one, and ties are broken by chance.",
    cases=[
        Case(
            "epsilon 0, values 1, 3, 2: the share of each action",
            shares([1.0, 3.0, 2.0], 0.0),
            [0, 1, 0],
            {
                "exploring with probability 1 - epsilon instead of epsilon": [1 / 3, 1 / 3, 1 / 3],
                "taking the action with the lowest value": [1, 0, 0],
            },
            "the comparison of rng.random() with epsilon",
            atol=0.02,
        ),
        Case(
            "epsilon 0.4, values 1, 0, 0, 3: the share of each action",
            shares([1.0, 0.0, 0.0, 3.0], 0.4),
            [0.1, 0.1, 0.1, 0.7],  # 0.4 / 4 each, and 0.6 more for the best
            {
                "leaving the best action out when exploring": [0.4 / 3, 0.4 / 3, 0.4 / 3, 0.6],
                "never exploring": [0, 0, 0, 1],
            },
            "the branch that explores",
            atol=0.02,
        ),
        Case(
            "epsilon 0, values 2, 5, 5, 5: the share of each action",
            shares([2.0, 5.0, 5.0, 5.0], 0.0),
            [0, 1 / 3, 1 / 3, 1 / 3],
            {
                "always taking the first of several best actions: at the beginning, when all values are 0, the agent "
                "would go one way only": [0, 1, 0, 0],
                "always taking the last of several best actions": [0, 0, 0, 1],
            },
            "what happens where several actions have the highest value",
            atol=0.02,
        ),
    ],
    probe=probe_epsilon_greedy,
    learn=Learn(CLIFF, -17.0),  # the shortest way has 13 steps
)


def chain_episodes(end, limit=None):
    """Two episodes of Chain by play_episode: (the table, steps, sums of the TD errors that were logged, returns).

    The environment knows nothing of the limit: that is play_episode's own affair.
    """

    def call(m):
        settings = {"gamma": 0.5, "learning_rate": 0.5, "env_kwargs": f'{{"end": "{end}"}}'}
        args = m.Args(env_id="Classroom/Chain-v0", **settings)
        envs = m.make_envs(args, 1)
        env, args.max_episode_steps = envs.envs[0], limit
        agent, rng = m.make_agent(args, envs), random.Random(0)
        agent.tables[0][3] = [4.0]  # as if state 3 had been worth something
        errors, sums = [], []
        log = lambda **figures: errors.extend(figures[name] for name in figures if name == "td_error")
        run = SimpleNamespace(step=0, episodes=[], log=log, check_finite=lambda **_: None)
        for _ in range(2):
            m.play_episode(agent=agent, env=env, run=run, rng=rng, args=args)
            sums.append(sum(errors))
            errors.clear()
        return [row[0] for row in agent.tables[0]], run.step, sums, run.episodes

    return call


def probe_q_learning(m, train):
    table = fork_table(train, gamma=0.5).agent.tables[0]
    if not close(table, [[0.2, 0.5], [0.0, 1.0]], 1e-3):
        return f"with gamma 0.5 Fork has the values [[0.2, 0.5], [0, 1]]; yours are {table}"


exercise(
    "q-learning",
    topic="the Q-learning update, and the loop around it",
    script="qlearning.py",
    blanks=("q_learning_target", "play_episode"),
    difficulty=2,
    minutes=60,
    task="write the target R + gamma max Q, and play one episode with it. `next_values` is a list; `discount` is "
    "gamma, or 0 where the episode terminated. play_episode begins with obs, _ = env.reset(), goes on while neither "
    "terminated nor truncated, but at most episode_limit(args, env.spec) steps, and in each step: take epsilon and the "
    "learning rate from schedules(args, run.step, len(run.episodes)); choose with epsilon_greedy(agent.values(state), "
    "epsilon, rng), where state = agent.state(obs, run); env.step takes action + agent.first_action; count run.step; "
    "move agent.tables[0][state][action] by the learning rate times the TD error; call run.log(td_error=…) "
    "with its absolute value. At the end append (run.step, sum of rewards) to "
    "run.episodes. Only --algorithm q-learning is asked for.",
    cases=[
        Case(
            "the target for reward 1, discount 0.5, next values 3, 7, 2",
            lambda m: m.q_learning_target(reward=1.0, discount=0.5, next_values=[3.0, 7.0, 2.0]),
            4.5,  # 1 + 0.5 x 7
            {
                "taking the mean of the next values instead of the highest": 3.0,  # 1 + 0.5 x 4
                "forgetting the discount": 8.0,
                "discounting the reward as well": 4.0,  # 0.5 x (1 + 7)
                "taking the lowest of the next values": 2.0,  # 1 + 0.5 x 2
                "adding up the next values": 7.0,  # 1 + 0.5 x 12
            },
            "eq. 6.8 in the docstring at the top of the script",
        ),
        Case(
            "two episodes of three steps that pay 1, 2, 3 and terminate; gamma and learning rate are 0.5. "
            "Q of the four states (the last one began at 4), steps, sums of logged |TD error|, (step, return) of each",
            chain_episodes("terminated"),
            # 1st: errors 1, 2, 3 (the row of state 3 counts for nothing): Q = 0.5, 1, 1.5
            # 2nd: errors 1 + 0.5 x 1 - 0.5 = 1, 2 + 0.5 x 1.5 - 1 = 1.75, 3 - 1.5 = 1.5: Q = 1, 1.875, 2.25
            [[1.0, 1.875, 2.25, 4.0], 6, [6.0, 4.25], [[3, 6], [6, 6]]],
            {
                # errors 1, 2, 5, then 1, 2 + 0.5 x 2.5 - 1 = 2.25, 5 - 2.5 = 2.5
                "adding the value of the next state although the episode terminated": lambda r: close(
                    r[0], [1.0, 2.125, 3.75, 4.0]
                ),
                # Q = 1, 2, 3, then 1 + 0.5 x 2 = 2, 2 + 0.5 x 3 = 3.5, 3
                "replacing the entry by its target, instead of moving it by the learning rate": lambda r: close(
                    r[0], [2.0, 3.5, 3.0, 4.0]
                ),
                "learning nothing: the table has not changed": lambda r: close(r[0], [0.0, 0.0, 0.0, 4.0]),
                "logging TD errors with their signs, or not at all": lambda r: (
                    close(r[0], [1.0, 1.875, 2.25, 4.0]) and not close(r[2], [6.0, 4.25])
                ),
            },
            "the line that computes the discount, and the one that changes the table",
        ),
        Case(
            "the same, but the third step is truncated: state 3 is worth 4, only nobody plays on",
            chain_episodes("truncated"),
            [[1.0, 2.125, 3.75, 4.0], 6, [8.0, 5.75], [[3, 6], [6, 6]]],  # the errors are above
            {
                "treating truncation as termination: the clock was stopped, the future has not gone": lambda r: close(
                    r[0], [1.0, 1.875, 2.25, 4.0]
                ),
            },
            "what discount is where truncated is set",
        ),
        Case(
            "the first again, but with --max-episode-steps 2, of which the environment knows nothing",
            chain_episodes("terminated", limit=2),
            # 1st: errors 1, 2. 2nd: errors 1 + 0.5 x 1 - 0.5 = 1, 2 + 0.5 x 0 - 1 = 1
            [[1.0, 1.5, 0.0, 4.0], 4, [3.0, 2.0], [[2, 3], [4, 3]]],
            {"playing on beyond the limit: some environments never end": lambda r: close(r[1], 6)},
            "episode_limit(args, env.spec)",
        ),
    ],
    probe=probe_q_learning,
    learn=Learn(CLIFF, -17.0),
)


def probe_td_targets(m, train):
    # epsilon 0.4 in state 1: 0.4 x the mean 0.5 + 0.6 x 1 = 0.8, which is what action 1 in state 0 is worth
    settings = {"gamma": 1.0, "epsilon_start": 0.4, "epsilon_min": 0.4}
    table = fork_table(train, algorithm="expected-sarsa", **settings).agent.tables[0]
    if not close(table, [[0.2, 0.8], [0.0, 1.0]], 1e-3):
        return f"expected Sarsa gives Fork the values [[0.2, 0.8], [0, 1]] with epsilon 0.4; yours are {table}"
    for table in fork_table(train, algorithm="double-q", **settings).agent.tables:
        if not close(table, [[0.2, 1.0], [0.0, 1.0]], 1e-3):
            return f"double Q-learning gives Fork the values [[0.2, 1], [0, 1]] in each table; yours are {table}"
    value = fork_table(train, algorithm="sarsa", anneal_lr=True, **settings).agent.tables[0][0][1]
    if not 0.65 < value < 0.95:
        return f"Sarsa values action 1 in state 0 of Fork at about 0.8 with epsilon 0.4; yours is {value:.2f}"


TD_STEP = {"reward": 1.0, "discount": 0.5, "next_values": [3.0, 7.0, 2.0]}

exercise(
    "td-targets",
    topic="Sarsa, expected Sarsa, double Q-learning",
    script="qlearning.py",
    blanks=("sarsa_target", "expected_sarsa_target", "double_q_target"),
    difficulty=1,
    minutes=30,
    task="write the three targets that differ from Q-learning's in one term only. `next_values` and "
    "`other_next_values` are lists; `discount` is gamma, or 0 where the episode terminated. The policy pi of expected "
    "Sarsa is epsilon-greedy: with probability epsilon any action, also the best one.",
    cases=[
        Case(
            "Sarsa: reward 1, discount 0.5, next values 3, 7, 2, next action 2",
            lambda m: m.sarsa_target(**TD_STEP, next_action=2),
            2.0,  # 1 + 0.5 x 2
            {"taking the highest value: that is Q-learning, Sarsa takes the action that will be taken": 4.5},
            "eq. 6.7",
        ),
        Case(
            "expected Sarsa: reward 1, discount 0.5, next values 3, 7, 2, epsilon 0.3",
            lambda m: m.expected_sarsa_target(**TD_STEP, epsilon=0.3),
            4.05,  # 1 + 0.5 x (0.3 x 4 + 0.7 x 7) = 1 + 0.5 x 6.1
            {
                "giving the best action no share of the random ones": 3.825,  # 0.3 x 2.5 + 0.7 x 7 = 5.65
                "exchanging epsilon and 1 - epsilon": 3.45,  # 0.7 x 4 + 0.3 x 7 = 4.9
                "taking the plain mean, as if all actions were random": 3.0,
                "taking the highest value, as if no action were random": 4.5,
            },
            "the probability of the best action under an epsilon-greedy policy: 1 - epsilon + epsilon / n",
        ),
        Case(
            "double Q: reward 1, discount 0.5, next values 3, 7, 2, the other table's 10, 4, 20",
            lambda m: m.double_q_target(**TD_STEP, other_next_values=[10.0, 4.0, 20.0]),
            3.0,  # action 1 is chosen, the other table says 4: 1 + 0.5 x 4
            {
                "letting the same table choose and judge: that is Q-learning": 4.5,
                "letting the other table choose as well": 11.0,  # 1 + 0.5 x 20
                "exchanging the tables: the other one chose, this one judged": 2.0,  # action 2: 1 + 0.5 x 2
            },
            "which table chooses and which one judges",
        ),
    ],
    probe=probe_td_targets,
    learn=Learn(CLIFF | {"algorithm": "double-q"}, -17.0),
)

# ------------------------------------------------------------------------------------------------------------ ppo.py

CARTPOLE = {"env_id": "CartPole-v1", "total_timesteps": 100_000, "num_envs": 32, "num_steps": 64, "num_minibatches": 8,
            "learning_rate": 2e-3, "gamma": 0.98, "gae_lambda": 0.9, "ent_coef": 0.0, "seed": 1}  # fmt: skip
TINY = {"num_envs": 8, "num_steps": 32, "learning_rate": 0.01, "ent_coef": 0.0, "hidden_sizes": (16,), "seed": 1}


def state_values(agent, obs):
    """The critic's values of observations, a list."""
    import torch

    with torch.no_grad():
        return agent.critic(agent.features(tensor(obs))).squeeze(1).tolist()


def later_values(**settings):
    """A probe: the values of the two steps of Later, where the right action pays 1, under gamma 0.5."""

    def probe(m, train):
        trained = train(env_id="Classroom/Later-v0", gamma=0.5, total_timesteps=8000, **TINY | settings)
        values = state_values(trained.agent, [[0.0], [1.0]])
        if trained.summary["eval_return_mean"] < 1:
            return "in the second step of Later action 1 pays 1; your agent has not learnt to take it"
        if not close(values, [0.5, 1.0], 0.15):
            return (
                f"Later pays 1 in its second step, so with gamma 0.5 its states are worth 0.5 and 1; your critic has "
                f"learnt {values[0]:.2f} and {values[1]:.2f}.\nLook next at how a reward gets from step to step."
            )

    return probe


def endless_value(**settings):
    """A probe: Endless pays 1 for ever and is truncated, so with gamma 0.5 it is worth 2."""

    def probe(m, train):
        trained = train(env_id="Classroom/Endless-v0", gamma=0.5, total_timesteps=8000, **TINY | settings)
        (value,) = state_values(trained.agent, [[0.0]])
        if not close(value, 2.0, 0.15):
            return (
                f"Endless pays 1 in every step and is truncated after five, so with gamma 0.5 its state is worth "
                f"1 + 0.5 + 0.25 + … = 2; your critic has learnt {value:.2f}.\n"
                "About 1.6 would be: truncation taken for the end. Look next at the last step of an episode."
            )

    return probe


def cue_return(**settings):
    """A probe: in Cue, the action that goes with the observation pays 1."""

    def probe(m, train):
        score = train(env_id="Classroom/Cue-v0", total_timesteps=6000, **TINY | settings).summary["eval_return_mean"]
        if score < 1:
            return f"in Cue the action that goes with the observation pays 1; your agent gets {score} on average"

    return probe


def returns_of(terminated=(), truncated=()):
    """compute_returns of three steps with rewards 1, 2, 3, next values 10, 20, 8 and gamma 0.5."""

    def call(m):
        step = {"rewards": column([1.0, 2.0, 3.0]), "next_values": column([10.0, 20.0, 8.0])}
        return m.compute_returns(**step, terminated=flags(terminated), truncated=flags(truncated), gamma=0.5)

    return call


def ends_of_two():
    """terminated and truncated of two environments: row 1 terminated in the first, was truncated in the second."""
    import torch

    row_1, none = flags([1]), flags([])
    return {"terminated": torch.cat([row_1, none], 1), "truncated": torch.cat([none, row_1], 1)}


def returns_of_two(m):
    """The same steps in two environments: in the first row 1 terminated, in the second it was truncated."""
    step = {"rewards": tensor([[1, 1], [2, 2], [3, 3]]), "next_values": tensor([[10, 10], [20, 20], [8, 8]])}
    return m.compute_returns(**step, **ends_of_two(), gamma=0.5)


exercise(
    "returns",
    topic="discounted returns, backwards in time",
    script="ppo.py",
    blanks=("compute_returns",),
    hides=("compute_gae", "compute_vtrace"),
    gives={"compute_returns": "float32 tensor"},
    difficulty=1,
    minutes=30,
    task="write the discounted returns R_t = r_t + gamma R_{t+1}, from the last row back to the first. All tensors are "
    "(T, N): time, environments; terminated and truncated hold booleans. next_values[t] is the value of the state that "
    "step t led to. Where a step terminated, nothing follows it; where it was truncated, and after the last row, that "
    "value stands for all that follows.",
    cases=[
        Case(
            "rewards 1, 2, 3, next values 10, 20, 8, gamma 0.5, no end",
            returns_of(),
            [[3.75], [5.5], [7.0]],  # 3 + 0.5 x 8 = 7, 2 + 0.5 x 7 = 5.5, 1 + 0.5 x 5.5 = 3.75
            {
                "returning the results in the order in which they were computed, last one first": [[7], [5.5], [3.75]],
                "beginning at 0: what follows the last row is worth its next value": [[2.75], [3.5], [3.0]],
                "going forwards in time": [[5.0], [4.5], [5.25]],  # 1 + 4, 2 + 2.5, 3 + 2.25
                "forgetting gamma": [[14.0], [13.0], [11.0]],  # 3 + 8, 2 + 11, 1 + 13
                "bootstrapping in every row: 1 + 0.5 x 10 and so on are one-step targets": [[6.0], [12.0], [7.0]],
            },
            "the order of the loop, what it begins with, and what it collects",
        ),
        Case(
            "the same, but row 1 terminated",
            returns_of(terminated=[1]),
            [[2.0], [2.0], [7.0]],  # 2 alone; 1 + 0.5 x 2
            {
                "not cutting the sum where an episode ends": [[3.75], [5.5], [7.0]],
                "adding the next value although the episode terminated": [[7.0], [12.0], [7.0]],  # 2 + 0.5 x 20
                "reading the flags one row too early, as if they belonged to the row before": [[1.0], [5.5], [7.0]],
                "reading the flags one row too late": [[2.75], [3.5], [3.0]],  # 3, 2 + 0.5 x 3, 1 + 0.5 x 3.5
            },
            "what follows a row that terminated, and which row that is",
        ),
        Case(
            "the same, but row 1 was truncated",
            returns_of(truncated=[1]),
            [[7.0], [12.0], [7.0]],  # 2 + 0.5 x 20 = 12, 1 + 0.5 x 12 = 7
            {
                "treating truncation as death: the clock was stopped, what would have come is worth the next value": [
                    [2.0],
                    [2.0],
                    [7.0],
                ],
                "not cutting the sum where an episode ends": [[3.75], [5.5], [7.0]],
            },
            "what follows a row that was truncated",
        ),
        Case(
            "the same, but row 1 terminated and was truncated at once: terminated wins",
            returns_of([1], [1]),
            [[2.0], [2.0], [7.0]],
            {"letting truncation win where both are set": [[7.0], [12.0], [7.0]]},
            "rows where both flags are set",
        ),
        Case(
            "two environments with the same numbers: row 1 terminated in the first, was truncated in the second",
            returns_of_two,
            [[2.0, 7.0], [2.0, 12.0], [7.0, 7.0]],
            {"letting what ends in one environment end in all": [[2.0, 2.0], [2.0, 2.0], [7.0, 7.0]]},
            "what the flags of a row are: a boolean for each environment, not one",
        ),
    ],
    probe=later_values(estimator="vanilla"),
    learn=Learn(CARTPOLE | {"estimator": "vanilla"}, 200.0),
)


def gae_of(terminated=(), truncated=()):
    """(advantages, returns) of three steps; gamma 0.5, lambda 0.8."""

    def call(m):
        ends = {"terminated": flags(terminated), "truncated": flags(truncated)}
        return m.compute_gae(**three_steps(), **ends, gamma=0.5, gae_lambda=0.8)

    return call


def three_steps(others=False):
    """rewards, values and next_values of one environment; with others, of a second one beside it."""
    import torch

    step = {"rewards": [1.0, 3.0, 6.0], "values": [2.0, 4.0, 6.0], "next_values": [4.0, 6.0, 8.0]}
    second = {"rewards": [2.0, 1.0, 5.0], "values": [1.0, 2.0, 3.0], "next_values": [2.0, 3.0, 6.0]}
    columns = [step, second] if others else [step]
    return {name: torch.cat([column(numbers[name]) for numbers in columns], 1) for name in step}


def all_alike(numbers):
    """Whether each row, of all environments, holds the same number."""
    return all(close([row[0]] * len(row), row) for row in numbers)


def advantages_are(*numbers):
    """A test of a pair (advantages, returns): are these the advantages?"""
    return lambda pair: close(pair[0], [[x] for x in numbers])


GAE_ROWS = "rewards 1, 3, 6, values 2, 4, 6, next values 4, 6, 8, gamma 0.5, lambda 0.8: (advantages, returns)"
exercise(
    "gae",
    topic="generalised advantage estimation",
    script="ppo.py",
    blanks=("compute_gae",),
    hides=("compute_returns", "compute_vtrace"),
    gives={"compute_gae": ("float32 tensor", "float32 tensor")},
    difficulty=2,
    minutes=45,
    task="write GAE: its recursion runs backwards in time, and begins with an advantage of 0 after the last row. All "
    "tensors are (T, N): time, environments; next_values[t] is the value of the state that step t led to. A step that "
    "terminated has no future: its next value counts for nothing. One that was truncated has one. Both cut the sum "
    "over t. The returns are advantages + values.",
    cases=[
        Case(
            f"{GAE_ROWS}; no end",
            gae_of(),
            # deltas 1 + 2 - 2 = 1, 3 + 3 - 4 = 2, 6 + 4 - 6 = 4; gamma lambda = 0.4:
            # 4, 2 + 0.4 x 4 = 3.6, 1 + 0.4 x 3.6 = 2.44; returns: + 2, 4, 6
            [[[2.44], [3.6], [4.0]], [[4.44], [7.6], [10.0]]],
            {
                "forgetting lambda: the sum decays by gamma lambda": advantages_are(3.0, 4.0, 4.0),  # 2 + 2, 1 + 2
                "forgetting gamma: the sum decays by gamma lambda": advantages_are(5.16, 5.2, 4.0),  # 2 + 3.2, 1 + 4.16
                "stopping at the temporal differences: that is lambda = 0": advantages_are(1.0, 2.0, 4.0),
                "forgetting to subtract the values": advantages_are(7.0, 10.0, 10.0),  # deltas 3, 6, 10
                "forgetting to discount the next value": advantages_are(6.28, 8.2, 8.0),  # deltas 3, 5, 8
                "returning something else than advantages + values as returns": advantages_are(2.44, 3.6, 4.0),
            },
            "eqs. 11 and 16 in the docstring",
        ),
        Case(
            f"{GAE_ROWS}; row 1 terminated",
            gae_of(terminated=[1]),
            # delta of row 1: 3 - 4 = -1. 4; -1; 1 + 0.4 x -1 = 0.6
            [[[0.6], [-1.0], [4.0]], [[2.6], [3.0], [10.0]]],
            {
                "not looking at the ends of episodes": advantages_are(2.44, 3.6, 4.0),
                "letting the sum run on into the next episode: the trace must be cut": advantages_are(1.24, 0.6, 4.0),
                "bootstrapping from the value of a state after termination": advantages_are(1.8, 2.0, 4.0),
                "reading the flags one row too early, as if they belonged to the row before (done and next_done "
                "exchanged)": advantages_are(-1.0, 3.6, 4.0),  # row 0 ends: 1 - 2
                "reading the flags one row too late (done and next_done exchanged)": advantages_are(1.8, 2.0, 0.0),
            },
            "what a terminated step does to its delta, and what it does to the decay",
        ),
        Case(
            f"{GAE_ROWS}; row 1 was truncated",
            gae_of(truncated=[1]),
            [[[1.8], [2.0], [4.0]], [[3.8], [6.0], [10.0]]],  # 4; 2, cut; 1 + 0.4 x 2
            {
                "treating truncation as death: the clock was stopped, the future is worth the next value": (
                    advantages_are(0.6, -1.0, 4.0)
                ),
                "letting the sum run on after a truncation, into the next episode": advantages_are(2.44, 3.6, 4.0),
            },
            "where truncated must count, and where it must not",
        ),
        Case(
            f"{GAE_ROWS}; row 1 terminated and was truncated at once: terminated wins",
            gae_of([1], [1]),
            [[[0.6], [-1.0], [4.0]], [[2.6], [3.0], [10.0]]],
            {"letting truncation win where both are set": advantages_are(1.8, 2.0, 4.0)},
            "rows where both flags are set",
        ),
        Case(
            f"{GAE_ROWS}; row 1 terminated. A second environment: rewards 2, 1, 5, values 1, 2, 3, next values "
            "2, 3, 6; row 1 was truncated",
            lambda m: m.compute_gae(**three_steps(others=True), **ends_of_two(), gamma=0.5, gae_lambda=0.8),
            # the second: deltas 2 + 1 - 1 = 2, 1 + 1.5 - 2 = 0.5, 5 + 3 - 3 = 5: 5; 0.5, cut; 2 + 0.4 x 0.5 = 2.2
            [[[0.6, 2.2], [-1.0, 0.5], [4.0, 5.0]], [[2.6, 3.2], [3.0, 2.5], [10.0, 8.0]]],
            {
                "letting what ends in one environment end in all": lambda pair: close(  # 1 - 2; 2 - 0.4
                    pair[0], [[0.6, 1.6], [-1.0, -1.0], [4.0, 5.0]]
                ),
                "mixing the environments: each has an advantage of its own": lambda pair: all_alike(pair[0]),
            },
            "what the second index of a tensor (T, N) stands for",
        ),
    ],
    probe=endless_value(),
    learn=Learn(CARTPOLE, 200.0),
)


def loss_and_slope(loss, names, *rows):
    """For each row of arguments: (loss of a batch of this row alone, its derivative by the first argument)."""

    def call(m):
        results = []
        for row in rows:
            *tensors, clip_coef = row
            given = {name: tensor([number]) for name, number in zip(names.split(), tensors)}
            x = given[names.split()[0]].requires_grad_()
            value = getattr(m, loss)(**given, clip_coef=clip_coef)
            if getattr(value, "requires_grad", False):
                value.backward()
            results.append([value, 0.0 if x.grad is None else x.grad[0]])
        return results

    return call


def losses_are(*numbers):
    """A test of rows (loss, slope): are these the losses?"""
    return lambda rows: close([row[0] for row in rows], list(numbers))


def surrogates(*rows):
    """(loss, its derivative by log r) of each row (r, advantage) alone, epsilon 0.2."""
    return loss_and_slope("policy_loss", "log_ratios advantages", *[(math.log(r), a, 0.2) for r, a in rows])


exercise(
    "clip",
    topic="PPO's clipped surrogate objective",
    script="ppo.py",
    blanks=("policy_loss",),
    gives={"policy_loss": "float32 tensor"},
    difficulty=2,
    minutes=30,
    task="write the loss: the objective, negated, for a minimum is what gradient descent looks for. You get the "
    "logarithm of the ratio r = pi / pi_old and the advantage of each row (B,), and return the mean, a tensor.",
    cases=[
        Case(
            "four rows, one by one, epsilon 0.2: r = 1.5 and 0.5 with advantage 2, then with -2. "
            "(loss, its derivative by log r) of each",
            surrogates((1.5, 2.0), (0.5, 2.0), (1.5, -2.0), (0.5, -2.0)),
            # min(3, 1.2 x 2); min(1, 0.8 x 2); min(-3, -2.4); min(-1, -1.6): 2.4, 1, -3, -1.6.
            # Slopes: -r A where the first term is the smaller one, else 0
            [[-2.4, 0.0], [-1.0, -1.0], [3.0, 3.0], [1.6, 0.0]],
            {
                "returning a loss for each row: the mean is asked for": lambda rows: shape(rows[0][0]) == (1,),
                "not negating it: this is the objective, not a loss": losses_are(2.4, 1.0, -3.0, -1.6),
                "not clipping": losses_are(-3.0, -1.0, 3.0, 1.0),
                "always taking the clipped term: the minimum keeps the way back open": losses_are(-2.4, -1.6, 2.4, 1.6),
                "taking the larger of both terms (a maximum inside, or a minimum of negated terms)": losses_are(
                    -3.0, -1.6, 2.4, 1.0
                ),
                "taking log r for r": losses_are(-2 * math.log(1.5), 2 * math.log(2.0), 1.6, 1.6),
                "losing the gradient on the way: a detach, or a number where a tensor is needed": losses_are(
                    -2.4, -1.0, 3.0, 1.6
                ),
            },
            "eq. 7, which stands at the top of the script, for A > 0 and for A < 0",
        ),
        Case(
            "two rows within the range, one by one: r = 1.1 with advantage 2, r = 0.9 with -2. (loss, its derivative)",
            surrogates((1.1, 2.0), (0.9, -2.0)),
            [[-2.2, -2.2], [1.8, 1.8]],  # both terms are the same: -r A, and so is the slope
            {
                "keeping the gradient from the clipped term: within the range both terms have it": [
                    [-2.2, -1.1],
                    [1.8, 0.9],
                ],
            },
            "what clipping does to a ratio that lies within the range: nothing",
        ),
        Case(
            "the rows r = 1.5 and r = 0.5 with advantage 2 in one batch, epsilon 0.2",
            lambda m: m.policy_loss(
                log_ratios=tensor([math.log(1.5), math.log(0.5)]), advantages=tensor([2.0, 2.0]), clip_coef=0.2
            ),
            -1.7,  # -(2.4 + 1) / 2
            {
                "adding up over the batch instead of taking the mean": -3.4,
                "clipping the mean, not each row": -2.0,  # mean r A = 2, clipped at 2.4
            },
            "what happens last: the mean over the batch",
        ),
    ],
    probe=cue_return(),
    learn=Learn(CARTPOLE, 200.0),
)

exercise(
    "value-clip",
    topic="the value loss, and clipping it",
    script="ppo.py",
    blanks=("value_loss",),
    gives={"value_loss": "float32 tensor"},
    difficulty=2,
    minutes=30,
    task="write half the mean squared error between values and returns. With clip_coef, compare with the error of the "
    "value that has moved by at most clip_coef from the old one, and let the larger one of both count in each row. All "
    "tensors are (B,); return the mean, a tensor.",
    cases=[
        Case(
            "values 1, 3, 0, returns 2, 5, 3, no clipping",
            lambda m: m.value_loss(
                values=tensor([1.0, 3.0, 0.0]), old_values=tensor([9.0, 9.0, 9.0]), returns=tensor([2.0, 5.0, 3.0])
            ),
            7 / 3,  # (1 + 4 + 9) / 3 / 2
            {
                "forgetting the half": 14 / 3,
                "adding up over the batch instead of taking the mean": 7.0,
                "comparing the returns with the old values": 101 / 6,  # (49 + 16 + 36) / 3 / 2
            },
            "the plain mean squared error",
        ),
        Case(
            "two rows, one by one, old value 2, return 5, clip_coef 0.5: values 3 and 0. (loss, its derivative by the "
            "value) of each",
            loss_and_slope("value_loss", "values old_values returns", (3.0, 2.0, 5.0, 0.5), (0.0, 2.0, 5.0, 0.5)),
            # 3 counts as 2.5: max(4, 6.25) / 2, flat. 0 counts as 1.5: max(25, 12.25) / 2, slope 0 - 5
            [[3.125, 0.0], [12.5, -5.0]],
            {
                "taking the smaller error": losses_are(2.0, 6.125),
                "always taking the clipped value": losses_are(3.125, 6.125),
                "not clipping": losses_are(2.0, 12.5),
                "clipping the value itself instead of how far it has moved": losses_are(10.125, 12.5),  # 0.5: 20.25
            },
            "clipped = old value + (value - old value), the bracket held within ± clip_coef",
        ),
    ],
    probe=later_values(clip_vloss=True),
    learn=Learn(CARTPOLE | {"clip_vloss": True, "clip_vloss_coef": 10.0}, 200.0),
)


def vtrace_of(terminated=(), truncated=(), rho_clip=1.0):
    """(advantages, targets) of three steps with ratios 2, 1/2 and 1; gamma 0.5."""

    def call(m):
        ends = {"terminated": flags(terminated), "truncated": flags(truncated)}
        log_ratios = column([math.log(2.0), math.log(0.5), 0.0])
        return m.compute_vtrace(
            **three_steps(), **ends, log_ratios=log_ratios, gamma=0.5, rho_clip=rho_clip, c_clip=1.0
        )

    return call


def vtrace_of_two(m):
    """The same with a second environment beside it, whose ratios are 1/2, 2 and 1/2; both bounds are 1."""
    log_ratios = tensor([[2.0, 0.5], [0.5, 2.0], [1.0, 0.5]]).log()
    steps = three_steps(others=True) | ends_of_two()
    return m.compute_vtrace(**steps, log_ratios=log_ratios, gamma=0.5, rho_clip=1.0, c_clip=1.0)


def targets_are(*numbers):
    """A test of a pair (advantages, targets): are these the targets?"""
    return lambda pair: close(pair[1], [[x] for x in numbers])


VTRACE_ROWS = "rewards 1, 3, 6, values 2, 4, 6, next values 4, 6, 8, pi/mu 2, 0.5, 1, gamma 0.5: (advantages, targets)"
exercise(
    "vtrace",
    topic="V-trace: learning from actions of an older policy",
    script="ppo.py",
    blanks=("compute_vtrace",),
    hides=("compute_returns", "compute_gae"),
    gives={"compute_vtrace": ("float32 tensor", "float32 tensor")},
    difficulty=3,
    minutes=75,
    task="write V-trace. The recursion of the docstring is one for the corrections v_t - V_t; it runs backwards in "
    "time, as that of compute_gae does, and ends are treated as there. All tensors are (T, N); next_values[t] is the "
    "value of the state that step t led to. Where the episode or the rollout is cut off, v_{t+1} is the next value "
    "itself.",
    cases=[
        Case(
            f"{VTRACE_ROWS}; no end, both bounds 1",
            vtrace_of(),
            # deltas 1, 2, 4 (as in gae), rho = c = 1, 0.5, 1. Corrections: 4; 0.5 x 2 + 0.5 x 0.5 x 4 = 2;
            # 1 x 1 + 0.5 x 1 x 2 = 2. Targets 2 + 2, 4 + 2, 6 + 4. Next targets 4 + 2, 6 + 4, 8:
            # advantages 1 x (1 + 3 - 2), 0.5 x (3 + 5 - 4), 6 + 4 - 6
            [[[2.0], [2.0], [4.0]], [[4.0], [6.0], [10.0]]],
            {
                "not bounding the ratios": targets_are(6.0, 6.0, 10.0),  # 2 x 1 + 0.5 x 2 x 2 = 4
                "ignoring the ratios": targets_are(5.0, 8.0, 10.0),  # corrections 4, 2 + 2, 1 + 2
                "leaving rho or c out of the recursion": targets_are(4.5, 7.0, 10.0),  # corrections 4, 3, 2.5
                "taking V(s_{t+1}) instead of v_{t+1} in the advantages": lambda pair: close(
                    pair, [[[1.0], [1.0], [4.0]], [[4.0], [6.0], [10.0]]]
                ),
                "returning the corrections v - V as targets": targets_are(2.0, 2.0, 4.0),
            },
            "remark 1 and section 4.2 of arXiv 1802.01561; the docstring has both formulas",
        ),
        Case(
            f"{VTRACE_ROWS}; rho_clip 2, c_clip 1",
            vtrace_of(rho_clip=2.0),
            # rho = 2, 0.5, 1 and c = 1, 0.5, 1: corrections 4, 2, 2 x 1 + 0.5 x 1 x 2 = 3; advantage 2 x (1 + 3 - 2)
            [[[4.0], [2.0], [4.0]], [[5.0], [6.0], [10.0]]],
            {
                "exchanging rho_clip and c_clip": lambda pair: close(
                    pair, [[[2.0], [2.0], [4.0]], [[5.0], [6.0], [10.0]]]
                ),
                "taking rho_clip for both bounds": targets_are(6.0, 6.0, 10.0),  # 2 + 0.5 x 2 x 2
                "taking c_clip for both bounds": targets_are(4.0, 6.0, 10.0),
            },
            "which bound belongs to which ratio",
        ),
        Case(
            f"{VTRACE_ROWS}; both bounds 1, row 1 terminated",
            vtrace_of(terminated=[1]),
            # delta of row 1: -1. Corrections 4; 0.5 x -1; 1 + 0.5 x -0.5 = 0.75. Next targets 4 - 0.5, 0, 8
            [[[0.75], [-0.5], [4.0]], [[2.75], [3.5], [10.0]]],
            {
                "not looking at the ends of episodes": targets_are(4.0, 6.0, 10.0),
                "bootstrapping from the value of a state after termination": targets_are(3.5, 5.0, 10.0),
                "carrying corrections back over the end of an episode": targets_are(3.25, 4.5, 10.0),  # -0.5 + 1, 1.25
            },
            "what a terminated step does to its delta, and what it does to the decay",
        ),
        Case(
            f"{VTRACE_ROWS}; both bounds 1, row 1 was truncated",
            vtrace_of(truncated=[1]),
            # corrections 4; 0.5 x 2 = 1; 1 + 0.5 x 1 = 1.5. Next targets 4 + 1, 6, 8
            [[[1.5], [1.0], [4.0]], [[3.5], [5.0], [10.0]]],
            {
                "treating truncation as death": targets_are(2.75, 3.5, 10.0),
                "carrying corrections back over a truncation": targets_are(4.0, 6.0, 10.0),
                "adding the next row's correction to the next value where the episode was cut off": lambda pair: close(
                    pair, [[[1.5], [2.0], [4.0]], [[3.5], [5.0], [10.0]]]
                ),  # 0.5 x (3 + 0.5 x 10 - 4)
            },
            "where truncated must count, and where it must not",
        ),
        Case(
            f"{VTRACE_ROWS}; both bounds 1, row 1 terminated. A second environment: rewards 2, 1, 5, values 1, 2, 3, "
            "next values 2, 3, 6, pi/mu 0.5, 2, 0.5; row 1 was truncated",
            vtrace_of_two,
            # the second: deltas 2, 0.5, 5, rho = c = 0.5, 1, 0.5: corrections 0.5 x 5 = 2.5; 1 x 0.5; 0.5 x 2 + 0.5 x
            # 0.5 x 0.5 = 1.125. Next targets 2.5, 3, 6: advantages 0.5 x (2 + 1.25 - 1), 1 + 1.5 - 2, 0.5 x (5 + 3 - 3)
            [[[0.75, 1.125], [-0.5, 0.5], [4.0, 2.5]], [[2.75, 2.125], [3.5, 2.5], [10.0, 5.5]]],
            {
                "letting what ends in one environment end in all": lambda pair: close(  # -1; 0.5 x 2 - 0.25
                    pair[1], [[2.75, 1.75], [3.5, 1.0], [10.0, 5.5]]
                ),
                "mixing the environments: each has corrections of its own": lambda pair: all_alike(pair[0]),
            },
            "what the second index of a tensor (T, N) stands for",
        ),
    ],
    probe=later_values(estimator="vtrace"),
    learn=Learn(CARTPOLE | {"estimator": "vtrace"}, 200.0),
)

# ------------------------------------------------------------------------------------------------------ ppo_rnd.py

CURIOUS = TINY | {"intrinsic_gamma": 0.5, "gamma": 0.5, "total_timesteps": 8000}


def constant_novelty(m):
    """Change a script so that all that is seen is equally new: its novelty is 1."""
    import torch

    m.RND.novelty = lambda self, obs: torch.ones(obs.shape[:2])


def probe_intrinsic_gae(m, train):
    trained = train(constant_novelty, env_id="Classroom/Later-v0", **CURIOUS, normalize_intrinsic=False)
    values = trained.agent.intrinsic_value(tensor([[0.0], [1.0]])).tolist()
    if not close(values, [2.0, 2.0], 0.15):
        return (
            "in Later everything is equally new, for which curiosity gets 1 in each step. Episodes terminate after two "
            "steps, the next begins, and with intrinsic_gamma 0.5 both states are worth 1 + 0.5 + 0.25 + … = 2; the "
            f"intrinsic critic has learnt {values[0]:.2f} and {values[1]:.2f}.\n"
            "1.5 and 1 would be: ends of episodes cut intrinsic returns. Look next at what follows the last step."
        )


def intrinsic_gae_of(values, reset_row=None, envs=1):
    """(advantages, returns) of all rows but the reset row, that of the first of the environments."""

    def call(m):
        import torch

        rewards = column([2.0, 1.0, 9.0, 3.0, 2.0] if len(values) == 6 else [2.0, 1.0, 3.0, 2.0])
        reset_rows = torch.cat([flags([reset_row], len(rewards))] + [flags([], len(rewards))] * (envs - 1), 1)
        copies = {"rewards": torch.cat([rewards] * envs, 1), "values": torch.cat([column(values)] * envs, 1)}
        rows = [t for t in range(len(rewards)) if t != reset_row]
        results = m.compute_intrinsic_gae(**copies, reset_rows=reset_rows, gamma=0.5, gae_lambda=0.8)
        return [x[rows] for x in results]

    return call


RESET_ROW = "rewards 2, 1, 9, 3, 2, values 1, 2, 50, 2, 4, then 6, gamma 0.5, lambda 0.8. The episode ended in row 1"
exercise(
    "curiosity",
    topic="returns of curiosity, which go on into the next episode",
    script="ppo_rnd.py",
    blanks=("compute_intrinsic_gae",),
    gives={"compute_intrinsic_gae": ("float32 tensor", "float32 tensor")},
    difficulty=2,
    minutes=45,
    task="write GAE for intrinsic rewards: an episode's end is no end for them. rewards and reset_rows are (T, N), "
    "values (T + 1, N): values[t] is that of the observation in row t. The row after an episode's end is a reset row: "
    "it holds the final observation, and its own reward and value are to count for nothing. What follows the row "
    "before it is the row behind it. After the last row follows values[T], whatever it is the value of. Return "
    "(advantages, advantages + values), each (T, N); what you put into reset rows is not looked at.",
    cases=[
        Case(
            "rewards 2, 1, 3, 2, values 1, 2, 2, 4, then 6, gamma 0.5, lambda 0.8, no reset row: (advantages, returns)",
            intrinsic_gae_of([1.0, 2.0, 2.0, 4.0, 6.0]),
            # deltas 2 + 1 - 1 = 2, 1 + 1 - 2 = 0, 3 + 2 - 2 = 3, 2 + 3 - 4 = 1; gamma lambda = 0.4:
            # 1, 3 + 0.4 x 1 = 3.4, 0.4 x 3.4 = 1.36, 2 + 0.4 x 1.36 = 2.544
            [[[2.544], [1.36], [3.4], [1.0]], [[3.544], [3.36], [5.4], [5.0]]],
            {
                "forgetting lambda: the sum decays by gamma lambda": advantages_are(2.875, 1.75, 3.5, 1.0),
                "forgetting gamma: the sum decays by gamma lambda": advantages_are(4.432, 3.04, 3.8, 1.0),
                "taking the end of the rollout for the end of everything": advantages_are(2.352, 0.88, 2.2, -2.0),
            },
            "GAE itself: it is that of compute_gae, where no episode ends",
        ),
        Case(
            f"{RESET_ROW}, so row 2 is the reset row: (advantages, returns) of the others",
            intrinsic_gae_of([1.0, 2.0, 50.0, 2.0, 4.0, 6.0], reset_row=2),
            [[[2.544], [1.36], [3.4], [1.0]], [[3.544], [3.36], [5.4], [5.0]]],  # as above: row 2 is not there
            {
                # rows 1 and 0: 1 - 2 = -1, 2 - 0.4
                "ending with the episode: what is new in the next one counts as well": advantages_are(1.6, -1, 3.4, 1),
                # 1 + 25 - 2 = 24, 2 + 0.4 x 24
                "treating it as a truncation: the final observation's value is not what follows": advantages_are(
                    11.6, 24.0, 3.4, 1.0
                ),
                # row 2: 9 + 1 - 50 + 0.4 x 3.4 = -38.64; row 1: 24 - 0.4 x 38.64 = 8.544; row 0: 2 + 0.4 x 8.544
                "taking the reset row for a step like any other": advantages_are(5.4176, 8.544, 3.4, 1.0),
                "letting the reset row cut the sum over t": advantages_are(2.0, 0.0, 3.4, 1.0),
            },
            "what two things the loop must hand on past a reset row, unchanged",
        ),
        Case(
            f"{RESET_ROW} in the first environment; in a second one with the same numbers nothing ended",
            intrinsic_gae_of([1.0, 2.0, 50.0, 2.0, 4.0, 6.0], reset_row=2, envs=2),
            # the second: row 2: -38.64, row 1: 8.544, row 0: 5.4176, as computed above
            [
                [[2.544, 5.4176], [1.36, 8.544], [3.4, 3.4], [1.0, 1.0]],
                [[3.544, 6.4176], [3.36, 10.544], [5.4, 5.4], [5.0, 5.0]],
            ],
            {
                "letting a reset row of one environment be one of all": lambda pair: close(
                    pair[0], [[2.544, 2.544], [1.36, 1.36], [3.4, 3.4], [1.0, 1.0]]
                ),
            },
            "what reset_rows[t] is: a boolean for each environment, not one",
        ),
    ],
    probe=probe_intrinsic_gae,
    learn=Learn(CARTPOLE | {"intrinsic_gamma": 0.98}, 200.0),
)


def probe_scale(m, train):
    # Episodes of Endless have five steps: of 32 rows 27 are played. G = 1, 1.5, 1.75, … in each environment.
    trained = train(constant_novelty, env_id="Classroom/Endless-v0", **CURIOUS | {"total_timesteps": 8 * 27})
    due = 1 / np.std([2 - 0.5**t for t in range(27)])
    if abs(trained.metrics[0]["intrinsic_reward"] - due) > 0.02:
        return (
            "in Endless everything is equally new, and episodes are truncated after five steps. Over the 27 steps of a "
            f"rollout the deviation of G is {1 / due:.3f}, so the intrinsic reward is 1 / {1 / due:.3f} = {due:.2f}; "
            f"it is {trained.metrics[0]['intrinsic_reward']:.2f}"
        )


def scaled(*rollouts, reset_row=None):
    """What the last of these rollouts, lists of rows, becomes: all its rows but the reset row; gamma 0.5."""

    def call(m):
        rnd = m.RND(spaces.Box(-1, 1, (1,)), len(rollouts[0][0]))
        for rollout in rollouts:
            reset_rows = np.zeros((len(rollout), len(rollout[0])), bool)
            if reset_row is not None:
                reset_rows[reset_row] = True
            result = rnd.scale(novelty=tensor(rollout), reset_rows=reset_rows, gamma=0.5)
        return result[[t for t in range(len(result)) if t != reset_row]]

    return call


def over(deviation, *rows):
    """These rows divided by the deviation."""
    return [[x / deviation for x in row] for row in rows]


FOUR = [2.0], [3.0], [4.0], [1.0]  # G = 2, 3 + 1 = 4, 4 + 2 = 6, 1 + 3 = 4: mean 4, variance (4 + 0 + 4 + 0) / 4 = 2
exercise(
    "novelty",
    topic="the scale of curiosity",
    script="ppo_rnd.py",
    blanks=("RND.scale",),
    gives={"RND.scale": "float32 tensor"},
    difficulty=2,
    minutes=45,
    task="divide novelty, a tensor (T, N), by the standard deviation of its discounted sum G_t = novelty_t + gamma "
    "G_{t-1} over all steps so far, and return it. self.sums, a float64 tensor (N,), holds the G of each environment "
    "between two calls, and must hold the last ones when you return; self.sum_stats is a RunningMeanStd: update it "
    "with all new sums at once (a tensor of one dimension), and take self.sum_stats.var. reset_rows is a NumPy array "
    "of booleans (T, N): no step was played there, so G stays as it was and is not counted once more. G runs on over "
    "ends of episodes and over calls, and no mean is subtracted.",
    cases=[
        Case(
            "novelty 2, 3, 4, 1 in one environment, gamma 0.5",
            scaled(FOUR),
            over(2**0.5, *FOUR),
            {
                "taking the deviation of novelty itself, not of G (or of a G that does not run over time)": over(
                    1.25**0.5, *FOUR
                ),  # mean 2.5: 5 / 4
                "dividing by the variance": over(2.0, *FOUR),
                "forgetting gamma": over(10.25**0.5, *FOUR),  # G = 2, 5, 9, 10: mean 6.5, 41 / 4
                # novelty's mean is 2.5
                "subtracting a mean: what is less new than usual would be a punishment": over(
                    2**0.5, [-0.5], [0.5], [1.5], [-1.5]
                ),
            },
            "what G is, and what it is for: only its deviation is used",
        ),
        Case(
            "novelty 2, 3 in one environment and 6, 1 in another, gamma 0.5",
            scaled(([2.0, 6.0], [3.0, 1.0])),
            over(2**0.5, [2.0, 6.0], [3.0, 1.0]),  # G = 2, 4 and 6, 4: the four numbers of above
            {
                # 2, 6 + 1 = 7 and 3, 1 + 1.5 = 2.5: mean 3.625, squares 68.25: 17.0625 - 13.140625
                "summing over the environments of a step, not over the steps of an environment": over(
                    3.921875**0.5, [2.0, 6.0], [3.0, 1.0]
                ),
            },
            "which of the two dimensions is time",
        ),
        Case(
            "novelty 2, 3, 7, 4, 1, of which row 2 is a reset row, gamma 0.5: the other rows",
            scaled(([2.0], [3.0], [7.0], [4.0], [1.0]), reset_row=2),
            over(2**0.5, *FOUR),
            {
                # G = 2, 4, 9, 8.5, 5.25: mean 5.75, squares 200.8125: 40.1625 - 33.0625
                "taking the reset row for a step like any other": over(7.1**0.5, *FOUR),
                # G = 2, 4, 4, 6, 4: mean 4, 8 / 5
                "counting G once more in the reset row": over(1.6**0.5, *FOUR),
                "letting G begin anew with the episode": over(0.6875**0.5, *FOUR),  # 2, 4, 4, 3: mean 3.25
            },
            "what happens to G in a reset row, and what goes into the statistics",
        ),
        Case(
            "a rollout with novelty 2, 3, then one with 4, 1, gamma 0.5: the second",
            scaled(([2.0], [3.0]), ([4.0], [1.0])),
            over(2**0.5, [4.0], [1.0]),
            {
                "letting G begin anew with each call": over(0.6875**0.5, [4.0], [1.0]),  # 2, 4 and 4, 3
                "taking the deviation of the last rollout alone": over(1.0, [4.0], [1.0]),  # G = 6, 4
            },
            "what must outlast a call",
        ),
    ],
    probe=probe_scale,
    learn=Learn(CARTPOLE | {"intrinsic_gamma": 0.98}, 200.0),
)

# ----------------------------------------------------------------------------------------------------- ppo_masked.py

TAXI = {"env_id": "Taxi-v4", "total_timesteps": 150_000, "num_envs": 16, "learning_rate": 2e-3, "gamma": 0.98,
        "ent_coef": 0.01, "seed": 1}  # fmt: skip
DOORS = [[True, True, False]]  # the mask of logits 0, log 3, 5: probabilities 1/4, 3/4, 0


def masked(m, rows=1, mask=DOORS):
    """MaskedCategorical of logits 0, log 3, 5, so many times."""
    import torch

    return m.MaskedCategorical(logits=tensor([[0.0, math.log(3.0), 5.0]] * rows), mask=torch.tensor(mask * rows))


def masked_probabilities(m):
    import torch

    return masked(m, 3).log_prob(actions=torch.arange(3)).exp()


def masked_gradient(m):
    """The derivative of the log-probability of action 1 by the logits 0, log 3, 5."""
    import torch

    logits = tensor([[0.0, math.log(3.0), 5.0]]).requires_grad_()
    pi = m.MaskedCategorical(logits=logits, mask=torch.tensor(DOORS))
    pi.log_prob(actions=torch.tensor([1])).sum().backward()
    return logits.grad[0]


def two_factors(m):
    """(log-probability of the actions 1 and 0, entropy) of two factors with logits 0, log 3 and 0, 0."""
    import torch

    logits, mask = tensor([[0.0, math.log(3.0), 0.0, 0.0]]), torch.ones(1, 4, dtype=torch.bool)
    pi = m.MaskedCategorical(logits=logits, mask=mask, sizes=[2, 2])
    return pi.log_prob(actions=torch.tensor([[1, 0]])), pi.entropy()


def is_refused(m):
    """Whether a mask without any valid action raises a ValueError."""
    try:
        masked(m, mask=[[False, False, False]])
    except ValueError:
        return True
    return False


def probe_doors(m, train):
    settings = {"num_envs": 8, "num_steps": 32, "learning_rate": 0.01, "ent_coef": 0.0, "hidden_sizes": (16,)}
    trained = train(env_id="Classroom/Doors-v0", total_timesteps=12_000, seed=1, **settings)
    score = trained.summary["eval_return_mean"]
    if score < 1:
        return f"behind the later of the two open Doors there is 1; your agent gets {score} on average"
    if trained.metrics[0]["entropy"] > 0.6932:
        first = trained.metrics[0]["entropy"]
        return f"with two Doors open the entropy can be log 2 = 0.693 at most; at first yours is {first:.3f}"


exercise(
    "masked",
    topic="a categorical distribution that knows which actions are valid",
    script="ppo_masked.py",
    blanks=("MaskedCategorical.__init__", "MaskedCategorical.log_prob", "MaskedCategorical.entropy"),
    gives={"MaskedCategorical.log_prob": "float32 tensor", "MaskedCategorical.entropy": "float32 tensor"},
    difficulty=3,
    minutes=60,
    task="write the distribution. __init__ sets self.single (whether there is one factor, because no `sizes` were "
    "given) and self.log_probs (a list with the log-probabilities (…, size) of each factor), which sample and mode "
    "read; check_masks(array, sizes) raises the error for a row of an array (B, sum of sizes) without a valid action. "
    "The probability of an invalid action is 0, its logit gets no gradient, and the entropy is a number all the same: "
    "0 log 0 counts as 0, in its gradient as well.",
    cases=[
        Case(
            "logits 0, log 3, 5, of which the last is invalid: the probability of each action",
            masked_probabilities,
            [0.25, 0.75, 0.0],  # 1 and 3 of 4
            {
                "ignoring the mask": [0.006561, 0.019683, 0.973756],  # 1, 3, 148.41 of 152.41
                "masking probabilities without renormalising them: they have to add up to 1": [0.006561, 0.019683, 0.0],
                "setting logits of invalid actions to 0, which leaves them a probability": [0.2, 0.6, 0.2],
                "taking the mask the wrong way round: True is valid": [0.0, 0.0, 1.0],
            },
            "what happens to the logits before the softmax",
        ),
        Case(
            "the same distribution: its entropy",
            lambda m: masked(m).entropy(),
            [0.562335],  # -(1/4 log 1/4 + 3/4 log 3/4) = 0.346574 + 0.215762
            {
                "adding 0 x log 0, which is NaN with logits of minus infinity": has_nan,
                "ignoring the mask in the entropy": [0.136192],
                "forgetting the minus sign": [-0.562335],
                "taking logarithms to the base 2: nats are asked for": [0.811278],
            },
            "the entropy's sum, term by term",
        ),
        Case(
            "the derivative of the log-probability of action 1 by the logits",
            masked_gradient,
            [-0.25, 0.25, 0.0],  # -1/4, 1 - 3/4, nothing
            {},
            "what an invalid logit has to do with the result: nothing",
        ),
        Case(
            "two factors with logits 0, log 3 and 0, 0, all valid: (log-probability of 1 and 0 together, entropy)",
            two_factors,
            [[-0.980829], [1.255482]],  # log 3/4 + log 1/2; 0.562335 + log 2
            {
                "one softmax over all factors: each has its own": lambda r: close(r[0], [-2.484907]),  # log 3/6, 1/6
                "losing a factor": lambda r: close(r[0], [-0.287682]) or close(r[1], [0.562335]),
            },
            "how the factors are split, and added up",
        ),
        Case(
            "a mask without any valid action: is it refused with a ValueError?",
            is_refused,
            1.0,
            {"letting a state pass in which nothing can be done": 0.0},
            "check_masks",
        ),
    ],
    probe=probe_doors,
    learn=Learn(TAXI, -60.0),
)

# ------------------------------------------------------------------------------------------------------------ dqn.py

SMALL_DQN = {"num_envs": 4, "hidden_sizes": (32,), "learning_rate": 5e-3, "learning_starts": 200,
             "train_frequency": 4, "target_network_frequency": 20, "gamma": 0.5, "exploration_fraction": 0.9,
             "end_e": 0.3, "seed": 1}  # fmt: skip
DQN_CARTPOLE = {"env_id": "CartPole-v1", "total_timesteps": 40_000, "num_envs": 4, "train_frequency": 2,
                "gradient_steps": 1, "batch_size": 128, "learning_rate": 1e-3, "hidden_sizes": (64, 64),
                "target_network_frequency": 2, "tau": 0.01, "exploration_fraction": 0.16, "end_e": 0.04,
                "eval_every": 1_000, "stop_at_return": 150.0, "seed": 1}  # fmt: skip


def learnt_q(train, env, steps, obs, **settings):
    """Q of observations, nested lists, after a short run."""
    agent = train(env_id=f"Classroom/{env}-v0", total_timesteps=steps, **SMALL_DQN | settings).agent
    return agent(tensor(obs)).tolist()


def transitions(obs, rewards, terminated, truncated, reset_rows):
    """What `add` of a buffer is called with: action 1 of each environment has led from obs to obs + 0.5."""
    masks = {"terminated": terminated, "truncated": truncated, "reset_rows": reset_rows}
    actions = np.ones((len(obs), 1), np.int64)
    return {"obs": obs, "actions": actions, "rewards": rewards, "next_obs": obs + 0.5} | masks


def ring(capacity, steps, reset_rows=None, truncated=None, terminated=None):
    """(slots of the last step, size, obs, next obs, terminated) of a buffer after steps of n environments each.

    The transitions are numbered: obs is the number, next_obs is the number + 0.5.
    """

    def call(m):
        buffer, number = m.ReplayBuffer(capacity, spaces.Box(-1, 1, (1,)), spaces.Discrete(2)), 0
        for n in steps:
            obs = np.arange(number, number + n, dtype=np.float32)[:, None]
            masks = [np.array([False] * n if x is None else x) for x in (terminated, truncated, reset_rows)]
            slots = buffer.add(**transitions(obs, obs[:, 0] * 10, *masks))
            number += n
        return slots, buffer.size, buffer.obs[:, 0], buffer.next_obs[:, 0], buffer.terminated.astype(float)

    return call


def ring_part(index, numbers):
    """A test of what `ring` returns: is this part of it so?"""
    return lambda r: close(r[index], numbers)


def replay_shares(m):
    """How often each of two transitions is drawn, in a buffer for five, of 4,000 times."""
    buffer = m.ReplayBuffer(5, spaces.Box(-1, 1, (1,)), spaces.Discrete(2))
    no, obs = np.zeros(2, bool), np.array([[1.0], [2.0]], np.float32)
    buffer.add(**transitions(obs, obs[:, 0], no, no, no))
    rng = np.random.default_rng(0)
    drawn = np.concatenate([buffer.sample(batch_size=2, rng=rng).obs.numpy()[:, 0] for _ in range(2000)])
    return [(drawn == x).mean() for x in (0, 1, 2)], any(len(set(part)) == 1 for part in drawn.reshape(-1, 2).tolist())


def asks_too_much(m):
    """Whether drawing three of two stored transitions raises a ValueError."""
    buffer = m.ReplayBuffer(5, spaces.Box(-1, 1, (1,)), spaces.Discrete(2))
    no, obs = np.zeros(2, bool), np.ones((2, 1), np.float32)
    buffer.add(**transitions(obs, obs[:, 0], no, no, no))
    try:
        buffer.sample(batch_size=3, rng=np.random.default_rng(0))
    except ValueError:
        return True
    return False


def probe_replay(m, train):
    ((first, second),) = learnt_q(train, "Endless", 3000, [[0.0]], learning_rate=0.02)
    if not close([first, second], [2.0, 2.0], 0.2):
        return (
            f"Endless pays 1 in every step and is truncated after five, so with gamma 0.5 both actions are worth 2; "
            f"yours have {first:.2f} and {second:.2f}.\nLook next at what is stored as terminated, and as next_obs."
        )


exercise(
    "replay",
    topic="the replay buffer, a ring",
    script="dqn.py",
    blanks=("ReplayBuffer.add", "ReplayBuffer.sample"),
    difficulty=2,
    minutes=45,
    task="write what stores transitions and what draws them. The arrays self.obs, next_obs, actions, rewards and "
    "terminated have a row per slot; self.position is the next slot to write, self.size how many are filled. Reset "
    "rows are left out. self.get(slots) makes Transitions of an array of slots; rng is a NumPy Generator. Truncated "
    "transitions are like any other: only termination ends the future.",
    cases=[
        Case(
            "two environments, one step, capacity 5: (slots, size, obs, next_obs, terminated)",
            ring(5, [2]),
            [[0, 1], 2, [0, 1, 0, 0, 0], [0.5, 1.5, 0, 0, 0], [0, 0, 0, 0, 0]],
            {
                "exchanging obs and next_obs": ring_part(2, [0.5, 1.5, 0, 0, 0]),
                "storing obs as next_obs as well": ring_part(3, [0, 1, 0, 0, 0]),
                "counting steps instead of transitions: each environment adds one": ring_part(1, 1),
            },
            "which array gets what",
        ),
        Case(
            "capacity 3, two steps of two environments, transitions 0, 1 and 2, 3: the oldest makes room",
            ring(3, [2, 2]),
            [[2, 0], 3, [3, 1, 2], [3.5, 1.5, 2.5], [0, 0, 0]],
            {
                "letting size grow beyond the capacity": ring_part(1, 4),
                "keeping the oldest and dropping what does not fit any more": ring_part(2, [0, 1, 2]),
                "beginning at slot 0 again before the end is filled": ring_part(2, [2, 3, 0]),
            },
            "the remainder of position + 0, 1, … divided by the capacity",
        ),
        Case(
            "three environments of which the second only resets, the third terminates; capacity 5",
            ring(5, [3], reset_rows=[False, True, False], terminated=[False, False, True]),
            [[0, 1], 2, [0, 2, 0, 0, 0], [0.5, 2.5, 0, 0, 0], [0, 1, 0, 0, 0]],
            {
                "storing the reset row, whose action was ignored": ring_part(1, 3),
                "leaving a gap where the reset row was": ring_part(2, [0, 0, 2, 0, 0]),
            },
            "the rows that are stored",
        ),
        Case(
            "two environments of which the first is truncated",
            ring(5, [2], truncated=[True, False]),
            [[0, 1], 2, [0, 1, 0, 0, 0], [0.5, 1.5, 0, 0, 0], [0, 0, 0, 0, 0]],
            {"storing truncation as termination: the future has not gone": ring_part(4, [1, 0, 0, 0, 0])},
            "what is stored as terminated",
        ),
        Case(
            "two transitions in a buffer for five: (share of empty slots, of each transition; is one drawn twice?)",
            replay_shares,
            [[0, 0.5, 0.5], 1],
            {
                "drawing from slots that are still empty": lambda r: r[0][0] > 0.1,
                "never drawing one of the transitions": lambda r: min(r[0][1:]) < 0.01,
                "drawing without replacement": lambda r: r[1] == 0,
            },
            "the range of the random slots",
            atol=0.03,
        ),
        Case(
            "asking for three of two stored transitions: is it refused with a ValueError?",
            asks_too_much,
            1.0,
            {"handing out more than there is": 0.0},
            "the first line of sample",
        ),
    ],
    probe=probe_replay,
    learn=Learn(DQN_CARTPOLE, 60.0),
)


def dqn_targets(online=False):
    """td_targets of three transitions with rewards 1, 2, 3, of which the last terminated."""

    def call(m):
        import torch

        target_q, online_q = tensor([[1.0, 4.0], [6.0, 2.0], [8.0, 9.0]]), tensor([[2.0, 1.0], [3.0, 5.0], [0.0, 1.0]])
        step = {"rewards": tensor([1.0, 2.0, 3.0]), "terminated": torch.tensor([False, False, True])}
        networks = {"target_q": target_q} | ({"online_q": online_q} if online else {})
        return m.td_targets(**step, gamma=tensor([0.5, 0.25, 0.5]), **networks)

    return call


DQN_ROWS = "rewards 1, 2, 3, discounts 0.5, 0.25, 0.5, the last terminated, target network (1, 4), (6, 2), (8, 9)"
PLAIN_DQN = Case(
    DQN_ROWS,
    dqn_targets(),
    [3.0, 3.5, 3.0],  # 1 + 0.5 x 4, 2 + 0.25 x 6, 3
    {
        "bootstrapping after termination": [3.0, 3.5, 7.5],  # 3 + 0.5 x 9
        "forgetting the discounts": [5.0, 8.0, 3.0],
        "taking the lowest value of the next state": [1.5, 2.5, 3.0],
        "taking the mean value of the next state": [2.25, 3.0, 3.0],  # 1 + 0.5 x 2.5, 2 + 0.25 x 4
        "removing the reward of a terminated transition as well": [3.0, 3.5, 0.0],
        "adding shapes (B,) and (B, 1), which makes a table of all pairs": lambda r: shape(r) == (3, 3),
        "taking one discount for all rows": [3.0, 5.0, 3.0],
    },
    "algorithm 1 of DQN; every tensor but target_q is (B,)",
)


def later_q(**settings):
    """A probe: Q of the two steps of Later under gamma 0.5."""

    def probe(m, train):
        q = learnt_q(train, "Later", 4000, [[0.0], [1.0]], **settings)
        if not close(q, [[0.5, 0.5], [0.0, 1.0]], 0.15):
            return (
                f"Later pays 1 for action 1 in its second step, so with gamma 0.5 Q is [[0.5, 0.5], [0, 1]]; yours is "
                f"[[{q[0][0]:.2f}, {q[0][1]:.2f}], [{q[1][0]:.2f}, {q[1][1]:.2f}]]"
            )

    return probe


exercise(
    "dqn-target",
    topic="the target of DQN",
    script="dqn.py",
    blanks=("td_targets",),
    gives={"td_targets": "float32 tensor"},
    difficulty=1,
    minutes=30,
    task="write y = r + gamma max_a Q'(s', a), for all rows at once. `rewards`, `terminated` (booleans) and "
    "`gamma`, here a discount for each row, are (B,), target_q is (B, actions). Only online_q = None is asked for "
    "here; double-dqn goes on from your solution.",
    cases=[PLAIN_DQN],
    probe=later_q(double=False),
    learn=Learn(DQN_CARTPOLE | {"double": False}, 60.0),
)

exercise(
    "double-dqn",
    topic="the target of double DQN",
    script="dqn.py",
    blanks=("td_targets",),
    gives={"td_targets": "float32 tensor"},
    difficulty=2,
    minutes=30,
    task="write the target of DQN and, where online_q is given, that of double DQN: one network chooses the action, "
    "the other one judges it. `rewards`, `terminated` (booleans) and `gamma`, here a discount for each row, are (B,), "
    "both Q are (B, actions).",
    cases=[
        PLAIN_DQN,
        Case(
            f"{DQN_ROWS}, online network (2, 1), (3, 5), (0, 1)",
            dqn_targets(online=True),
            [1.5, 2.5, 3.0],  # actions 0, 1, 1 are chosen: 1 + 0.5 x 1, 2 + 0.25 x 2, 3
            {
                "taking no notice of the online network": [3.0, 3.5, 3.0],
                "exchanging the networks: the target network chose, the online one judged": [1.5, 2.75, 3.0],
                "letting the online network choose and judge": [2.0, 3.25, 3.0],  # 1 + 0.5 x 2, 2 + 0.25 x 5
                "bootstrapping after termination": [1.5, 2.5, 7.5],
            },
            "eq. 4 of double DQN: the argmax is over the one, the value comes from the other",
        ),
    ],
    probe=later_q(double=True),
    learn=Learn(DQN_CARTPOLE, 60.0),
)

# ------------------------------------------------------------------------------------------------------- ddpg_td3.py

PENDULUM = {"env_id": "Pendulum-v1", "total_timesteps": 12_000, "batch_size": 128, "hidden_sizes": (64, 64),
            "actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3, "gamma": 0.98, "eval_every": 1_000,
            "stop_at_return": -250.0, "seed": 1}  # fmt: skip


SMALL_TD3 = {"actor_learning_rate": 3e-3, "critic_learning_rate": 3e-3, "hidden_sizes": (32,), "learning_starts": 200,
             "batch_size": 64, "seed": 1}  # fmt: skip


def probe_td3(m, train):
    import torch

    trained = train(env_id="Classroom/Aim-v0", total_timesteps=2000, gamma=0.9, **SMALL_TD3)
    score = trained.summary["eval_return_mean"]
    if score < 0.9:
        return f"who Aims well gets 1; your agent gets {score:.2f}"
    with torch.no_grad():
        value = min(critic(tensor([[1.0]]), tensor([[0.5]])).item() for critic in trained.agent.critics)
    if not 0.7 < value < 1.3:
        return (
            f"the best action in Aim is worth 1 and ends the episode; your critics say {value:.2f}.\n"
            "Look next at what follows termination."
        )


def smoothed_actions(m):
    actions, noise = tensor([[0.9], [0.0], [-0.9]]), tensor([[0.3], [0.8], [-0.05]])
    return m.smoothed(actions=actions, noise=noise, clip=0.5)


def td3_targets(*values):
    """critic_targets of three transitions with rewards 1, 2, 3, of which the last terminated; gamma 0.5."""

    def call(m):
        import torch

        step = {"rewards": tensor([1.0, 2.0, 3.0]), "terminated": torch.tensor([False, False, True])}
        return m.critic_targets(**step, next_values=tensor(values), gamma=0.5)

    return call


exercise(
    "td3-target",
    topic="the target of TD3: two critics, smoothed",
    script="ddpg_td3.py",
    blanks=("smoothed", "critic_targets"),
    gives={"smoothed": "float32 tensor", "critic_targets": "float32 tensor"},
    difficulty=2,
    minutes=30,
    task="write two of TD3's tricks: the noise on the target's action, and the target from the values (K, B) of K "
    "critics. Actions are in [-1, 1], before and after; `terminated` is (B,), booleans.",
    cases=[
        Case(
            "actions 0.9, 0, -0.9 with noise 0.3, 0.8, -0.05, clip 0.5",
            smoothed_actions,
            [[1.0], [0.5], [-0.95]],  # 1.2 is too much, 0.8 counts as 0.5
            {
                "not clipping the noise": [[1.0], [0.8], [-0.95]],
                "not clipping the action to [-1, 1]": [[1.2], [0.5], [-0.95]],
                "clipping the action by the noise's bound": [[0.5], [0.5], [-0.5]],
                "forgetting the noise": [[0.9], [0.0], [-0.9]],
            },
            "section 5.3 of TD3: two different clippings",
        ),
        Case(
            "rewards 1, 2, 3, gamma 0.5, values 6, 4, 8 and 4, 10, 2, the last one terminated",
            td3_targets([6.0, 4.0, 8.0], [4.0, 10.0, 2.0]),
            [3.0, 4.0, 3.0],  # 1 + 0.5 x 4, 2 + 0.5 x 4, 3
            {
                "taking the higher of both values: that is what TD3 is against": [4.0, 7.0, 3.0],
                "taking the mean of both critics": [3.5, 5.5, 3.0],
                "taking the first critic only: that is DDPG": [4.0, 4.0, 3.0],
                "bootstrapping after termination": [3.0, 4.0, 4.0],  # 3 + 0.5 x 2
                "removing the reward of a terminated transition as well": [3.0, 4.0, 0.0],
                "forgetting the discount": [5.0, 6.0, 3.0],
            },
            "eq. 10 in the docstring; the critics are the first axis",
        ),
        Case(
            "the same with one critic, as DDPG has it: values 6, 4, 8",
            td3_targets([6.0, 4.0, 8.0]),
            [4.0, 4.0, 3.0],
            {},
            "the case K = 1",
        ),
    ],
    probe=probe_td3,
    learn=Learn(PENDULUM, -500.0),
)


def two_networks():
    """(target, source): networks whose only parameters are 0, 10 and 1, 20."""
    import torch

    target, source = (torch.nn.Linear(2, 1, bias=False) for _ in range(2))
    target.weight.data[:] = tensor([[0.0, 10.0]])
    source.weight.data[:] = tensor([[1.0, 20.0]])
    return target, source


def moved(*arguments):
    """The parameters of (target, source) after a call of polyak with each of these tau."""

    def call(m):
        target, source = two_networks()
        for tau in arguments:
            m.polyak(target=target, source=source, tau=tau)
        return target.weight.data[0], source.weight.data[0]

    return call


def shares_memory(m):
    """Whether the target follows its source although nobody moves it any more."""
    target, source = two_networks()
    m.polyak(target=target, source=source, tau=1.0)
    source.weight.data += 5
    return target.weight.data[0]


def probe_polyak(m, train):
    def differ(networks, others):
        return any(not close(p.tolist(), q.tolist(), 1e-6) for p, q in zip(networks.parameters(), others.parameters()))

    short = {"env_id": "Classroom/Aim-v0", "total_timesteps": 400, "policy_frequency": 1} | SMALL_TD3
    agent = train(tau=1.0, **short).agent
    if differ(agent.critics, agent.target_critics):
        return "with tau = 1 the targets are copies, but after a run your target critics differ from the critics"
    agent = train(tau=0.0, **short).agent
    args = m.Args(**short)
    fresh = m.make_agent(args, m.make_envs(args, 1))
    if differ(agent.target_critics, fresh.critics):
        return "with tau = 0 the targets stay what they were, but after a run your target critics have moved"


exercise(
    "polyak",
    topic="target networks that follow slowly",
    script="ddpg_td3.py",
    blanks=("polyak",),
    difficulty=1,
    minutes=10,
    task="move the target towards the source. Both are networks of the same shape: zip(target.parameters(), "
    "source.parameters()) gives the pairs. The target's numbers have to change in place, and nothing is returned: "
    "methods of a tensor whose names end in _ work in place, p = … only gives the name to another tensor. The line "
    "above the def sees to it that no gradients are recorded.",
    cases=[
        Case(
            "target 0, 10, source 1, 20, tau 0.1: (target, source) afterwards",
            moved(0.1),
            [[0.1, 11.0], [1.0, 20.0]],  # 0.1 x 1 + 0.9 x 0, 0.1 x 20 + 0.9 x 10
            {
                "not changing the target in place": [[0.0, 10.0], [1.0, 20.0]],
                "exchanging tau and 1 - tau: the target would follow almost at once": [[0.9, 19.0], [1.0, 20.0]],
                "moving the source towards the target": lambda r: close(r[0], [0, 10]) and not close(r[1], [1, 20]),
                "adding a share of the source without taking away from the target": [[0.1, 12.0], [1.0, 20.0]],
            },
            "which tensor changes, and how",
        ),
        Case(
            "the same, twice",
            moved(0.1, 0.1),
            [[0.19, 11.9], [1.0, 20.0]],  # 0.1 + 0.9 x 0.1, 2 + 0.9 x 11
            {},
            "what the second call begins with",
        ),
        Case(
            "tau 1, then 5 is added to the source: the target",
            shares_memory,
            [1.0, 20.0],
            {"letting target and source share their memory": [6.0, 25.0]},
            "copying numbers instead of the tensor",
        ),
    ],
    probe=probe_polyak,
    learn=Learn(PENDULUM, -500.0),
)

# ------------------------------------------------------------------------------------------------------------- es.py

ES_NOISE = np.array([[1.0, 0.0], [0.0, 3.0]], np.float32)
SMALL_ES = {"population_size": 16, "sigma": 0.3, "learning_rate": 0.05, "hidden_sizes": (), "seed": 1}
ES_CARTPOLE = Learn({"env_id": "CartPole-v1", "total_timesteps": 200_000, "seed": 1}, 200.0)


def probe_es(m, train):
    score = train(env_id="Classroom/Aim-v0", total_timesteps=3000, **SMALL_ES).summary["eval_return_mean"]
    if score < 0.9:
        return f"who Aims well gets 1; after 3,000 episodes your policy gets {score:.2f}"


exercise(
    "es-update",
    topic="evolution strategies: candidates and their gradient",
    script="es.py",
    blanks=("make_candidates", "es_gradient"),
    hides=("ars_gradient",),
    gives={"make_candidates": "array", "es_gradient": "array"},
    difficulty=2,
    minutes=40,
    task="write what turns noise into candidates, and fitnesses into a gradient. Candidates come in pairs: theta + "
    "sigma eps, theta - sigma eps, then the next pair; fitnesses come in the same order. All are NumPy arrays: theta "
    "(D,), noise (pairs, D), fitnesses (2 x pairs,).",
    cases=[
        Case(
            "candidates: theta (1, 2), noise (1, 0) and (0, 3), sigma 0.5",
            lambda m: m.make_candidates(theta=np.array([1.0, 2.0], np.float32), noise=ES_NOISE, sigma=0.5),
            [[1.5, 2.0], [0.5, 2.0], [1.0, 3.5], [1.0, 0.5]],
            {
                "putting all candidates with +eps first: the two of a pair belong side by side": [
                    [1.5, 2.0],
                    [1.0, 3.5],
                    [0.5, 2.0],
                    [1.0, 0.5],
                ],
                "forgetting sigma": [[2.0, 2.0], [0.0, 2.0], [1.0, 5.0], [1.0, -1.0]],
                "leaving out the candidates with -eps": [[1.5, 2.0], [1.0, 3.5]],
                "forgetting theta": [[0.5, 0.0], [-0.5, 0.0], [0.0, 1.5], [0.0, -1.5]],
            },
            "the order of the rows",
        ),
        Case(
            "gradient: fitnesses 3, 1, 2, 6, noise (1, 0) and (0, 3), sigma 0.2",
            lambda m: m.es_gradient(fitnesses=np.array([3.0, 1.0, 2.0, 6.0]), noise=ES_NOISE, sigma=0.2),
            [2.5, -15.0],  # ((3 - 1) x (1, 0) + (2 - 6) x (0, 3)) / (4 x 0.2)
            {
                "dividing by the number of pairs: N counts the candidates": [5.0, -30.0],
                "forgetting to divide by sigma": [0.5, -3.0],
                "dividing by sigma squared": [12.5, -75.0],
                "forgetting to divide by the number of candidates": [10.0, -60.0],
                "leaving out the candidates with -eps": [3.75, 7.5],  # (3 x (1, 0) + 2 x (0, 3)) / 0.8
                "pairing the first half with the second: the two of a pair are side by side": [1.25, -18.75],
                "the wrong sign: it has to point uphill": [-2.5, 15.0],
            },
            "the formula in the docstring at the top of the script: 1 / (N sigma)",
        ),
    ],
    probe=probe_es,
    learn=ES_CARTPOLE,
)


def ranks_of(*returns):
    return lambda m: m.centered_ranks(returns=np.array(returns))


def fitnesses_of(kind, elite=1.0):
    """shape_fitness of the returns 1, 2, 3, 6."""
    return lambda m: m.shape_fitness(returns=np.array([1.0, 2.0, 3.0, 6.0]), fitness=kind, elite=elite)


exercise(
    "ranks",
    topic="evolution strategies: ranks instead of returns",
    script="es.py",
    blanks=("centered_ranks", "shape_fitness"),
    gives={"centered_ranks": "array", "shape_fitness": "array"},
    difficulty=2,
    minutes=40,
    task="write the ranks of returns (N,), spread evenly from -1/2 for the lowest to 1/2 for the highest, where equal "
    "returns share the mean of their ranks; and shape_fitness, which offers these, returns standardised by their "
    "(population) deviation, or raw ones. Of an elite of the best share, each fitness counts from that of the best "
    "candidate outside of it, and all outside get 0.",
    cases=[
        Case(
            "ranks of 30, 10, 20",
            ranks_of(30.0, 10.0, 20.0),
            [0.5, -0.5, 0.0],
            {
                "returning the order (one argsort) instead of the ranks (argsort of argsort)": [0.0, 0.5, -0.5],
                "ranking the best lowest": [-0.5, 0.5, 0.0],
                "spreading them from 0 to 1": [1.0, 0.0, 0.5],
                "spreading them from -1 to 1": [1.0, -1.0, 0.0],
                "dividing by N instead of N - 1": [1 / 6, -0.5, -1 / 6],
            },
            "section 2.1 of arXiv 1703.03864",
        ),
        Case(
            "ranks of 5, 5, 1, 9",
            ranks_of(5.0, 5.0, 1.0, 9.0),
            [0.0, 0.0, -0.5, 0.5],  # ranks 1.5, 1.5, 0, 3 of 3
            {
                "ranking equal returns by where they stand: what is equal must count equally": lambda r: close(
                    sorted(r), [-0.5, -1 / 6, 1 / 6, 0.5]
                ),
                "giving equal returns the lowest of their ranks": [-1 / 6, -1 / 6, -0.5, 0.5],
            },
            "how many are smaller, and how many are equal: np.searchsorted(np.sort(returns), returns, side=…) counts",
        ),
        Case(
            "standardised 1, 2, 3, 6",
            fitnesses_of("standardized"),
            [-1.069045, -0.534522, 0.0, 1.603567],  # -2, -1, 0, 3 by the root of (4 + 1 + 0 + 9) / 4
            {
                "taking the sample deviation, by N - 1": [-0.92582, -0.46291, 0.0, 1.38873],
                "dividing by the variance": [-0.571429, -0.285714, 0.0, 0.857143],
                "forgetting to take away the mean": [0.534522, 1.069045, 1.603567, 3.207135],
            },
            "mean and deviation",
        ),
        Case(
            "raw 1, 2, 3, 6",
            fitnesses_of("raw"),
            [1.0, 2.0, 3.0, 6.0],
            {},
            "what raw means: as they are",
        ),
        Case(
            "centred ranks of 1, 2, 3, 6, of which the better half is the elite",
            fitnesses_of("centered-rank", 0.5),
            [0.0, 0.0, 1 / 3, 2 / 3],  # ranks -1/2, -1/6, 1/6, 1/2, counted from -1/6
            {
                "not counting from the best outside of the elite": [0.0, 0.0, 1 / 6, 0.5],
                "not looking at the elite": [-0.5, -1 / 6, 1 / 6, 0.5],
                "counting from the worst of the elite": [0.0, 0.0, 0.0, 1 / 3],
            },
            "which candidate has the fitness 0",
        ),
    ],
    probe=probe_es,
    learn=ES_CARTPOLE,
)

# ----------------------------------------------------------------------------------------------------------- ppod.py


# The demo of MountainCar; in a handout it lies beside the checks.
HERE = Path(__file__).resolve().parent
DEMOS = HERE / "demos" if (HERE / "demos").is_dir() else HERE.parent / "demos" / "MountainCar-v0"
PPOD_SMALL = {"recurrent": False, "num_envs": 8, "num_steps": 32, "learning_rate": 5e-3, "hidden_sizes": (32,),
              "ent_coef": 0.0, "anneal_lr": False, "seed": 1}  # fmt: skip
MOUNTAIN_CAR = {"env_id": "MountainCar-v0", "wrappers": ("GoalReward",), "initial_human_demos_dir": str(DEMOS),
                "rho": 0.2, "phi": 0.1, "num_envs": 16, "hidden_sizes": (64,), "recurrent": False,
                "normalize_obs": True, "learning_rate": 1e-3, "total_timesteps": 200_000, "stop_at_return": 0.98,
                "seed": 1}  # fmt: skip


def train_on_password(m, train, **settings):
    """A run on Password with a demonstration of it."""
    env, obs = probes.Password(), []
    obs.append(env.reset(seed=0)[0])
    for action in env.RIGHT:
        obs.append(env.step(action)[0])
    rewards = np.array([0.0] * 9 + [1.0], np.float32)
    demo = m.as_demo(np.array(obs), np.array(env.RIGHT)[:, None], rewards, True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # the run may be another user's
        args = m.Args(env_id="Classroom/Password-v0", initial_human_demos_dir=folder)
        m.save_demo(Path(folder, "demo.npz"), demo, args, env.observation_space, spaces.Discrete(2))
        return train(env_id="Classroom/Password-v0", initial_human_demos_dir=folder, **PPOD_SMALL | settings)


def annealed(times, demos=2, by="capacity"):
    """(rho, phi) after so many new reward demos, from 0.1 and 0.3; so many value demos, and room for 6."""

    def call(m):
        args = SimpleNamespace(rho=0.1, phi=0.3, anneal_by=by, demo_capacity=6, initial_reward_threshold=None)
        buffer = m.PPODBuffer(args, 1, None, None)
        buffer.value_demos = [object() for _ in range(demos)]
        for _ in range(times):
            buffer.anneal_parameters()
        return buffer.rho, buffer.phi

    return call


def probe_anneal(m, train):
    trained = train_on_password(m, train, rho=0.1, phi=0.3, demo_capacity=11, total_timesteps=6000)
    for row in trained.metrics:
        if not close([row["rho"] + row["phi"]], [0.4], 1e-6) or row["rho"] < 0.1 - 1e-9:
            return f"rho began at 0.1 and phi at 0.3; after {row['step']:.0f} steps they are {row['rho']}, {row['phi']}"
    if trained.metrics[-1]["rho"] <= 0.1:
        return "the agent has found reward demos of its own, but rho is still 0.1"


exercise(
    "ppod-anneal",
    topic="PPO+D: from value demos to reward demos",
    script="ppod.py",
    blanks=("PPODBuffer.anneal_parameters",),
    difficulty=2,
    minutes=25,
    task="move probability from phi to rho, each time a reward demo has been added. self.args.rho and self.args.phi "
    "are what the run began with, self.rho and self.phi what they have become; self.value_capacity is the room for "
    "value demos, self.value_demos the list, and self.args.anneal_by says which of both sizes counts. Their sum never "
    "changes, and rho never exceeds it. Without any value demo nothing moves.",
    cases=[
        Case(
            "rho 0.1, phi 0.3, room for 6 value demos, of which there are 2: after one reward demo",
            annealed(1),
            [0.15, 0.25],  # 0.3 / 6 = 0.05
            {
                "dividing by the number of value demos there are, not by their room": [0.25, 0.15],
                "lowering rho and raising phi": [0.05, 0.35],
                "leaving phi as it was: both are probabilities of one draw": [0.15, 0.3],
            },
            "section 3 of arXiv 2007.03328",
        ),
        Case(
            "the same after three reward demos",
            annealed(3),
            [0.25, 0.15],
            {"taking a share of phi as it is now, not of phi at the start": [0.226389, 0.173611]},
            # 0.1 + 0.3 / 6 = 0.15, + 0.25 / 6 = 0.191667, + 0.208333 / 6
            "which phi is divided",
        ),
        Case(
            "the same after ten reward demos",
            annealed(10),
            [0.4, 0.0],
            {"letting rho grow beyond rho + phi, and phi below 0": [0.6, -0.2]},
            "the bound",
        ),
        Case(
            "the same without any value demo",
            annealed(1, demos=0),
            [0.1, 0.3],
            {"moving probability although there are no value demos": [0.15, 0.25]},
            "the first line",
        ),
        Case(
            "two value demos, --anneal-by current, after one reward demo",
            annealed(1, by="current"),
            [0.25, 0.15],  # 0.3 / 2
            {"dividing by the room although the current number is asked for": [0.15, 0.25]},
            "self.args.anneal_by",
        ),
    ],
    probe=probe_anneal,
    learn=Learn(MOUNTAIN_CAR, 0.4),
)


def priorities(values, alpha):
    return lambda m: m.replay_probabilities(max_values=list(values), alpha=alpha)


def probe_priorities(m, train):
    trained = train_on_password(m, train, rho=0.2, phi=0.2, total_timesteps=12_000)
    score = trained.summary["eval_return_mean"]
    if score < 1:
        return f"with one demonstration of it the Password is learnt, which pays 1; your agent gets {score}"


exercise(
    "ppod-priorities",
    topic="PPO+D: which demo to replay",
    script="ppod.py",
    blanks=("replay_probabilities",),
    gives={"replay_probabilities": "array"},
    difficulty=2,
    minutes=30,
    task="write the probabilities of the value demos, from the highest value that the critic gave each of them. The "
    "formula is in the docstring; so is what to do with negative values, and where all are zero. No power may "
    "overflow, however large the values are.",
    cases=[
        Case(
            "values 1, 2, 3, alpha 2",
            priorities([1.0, 2.0, 3.0], 2.0),
            [1 / 14, 4 / 14, 9 / 14],
            {
                "forgetting alpha": [1 / 6, 2 / 6, 3 / 6],
                "taking the softmax": [0.090031, 0.244728, 0.665241],
                "taking the softmax of alpha v": [0.015876, 0.117310, 0.866814],
                "forgetting to divide by the sum": [1.0, 4.0, 9.0],
                "taking 1 / alpha as the exponent": [0.241181, 0.341081, 0.417738],
            },
            "the formula in the docstring",
        ),
        Case("values 1, 2, 3, alpha 0: all alike", priorities([1.0, 2.0, 3.0], 0.0), [1 / 3] * 3, {}, "the exponent"),
        Case(
            "values -1, 0, 1, alpha 2",
            priorities([-1.0, 0.0, 1.0], 2.0),
            [0.0, 0.2, 0.8],  # counted from -1: 0, 1, 2, of which the squares are 0, 1, 4
            {
                "squaring negative values as they are: the lowest would be likely": [0.5, 0.0, 0.5],
                "taking negative values for 0": [0.0, 0.0, 1.0],
            },
            "what is counted from the lowest value, and when",
        ),
        Case(
            "values 0, 0, alpha 2: all alike",
            priorities([0.0, 0.0], 2.0),
            [0.5, 0.5],
            {"dividing 0 by 0": has_nan},
            "the case in which all values are zero",
        ),
        Case(
            "values 1e200, 2e200, alpha 10",
            priorities([1e200, 2e200], 10.0),
            [1 / 1025, 1024 / 1025],  # 1 and 2^10
            {"raising large numbers to a power: divide by the largest first": has_nan},
            "the order of dividing and raising to a power",
        ),
    ],
    probe=probe_priorities,
    learn=Learn(MOUNTAIN_CAR, 0.4),
)

# ---------------------------------------------------------------------------------------------------------- mappo.py


SPREAD = {"env_id": "mpe2.simple_spread_v3", "env_kwargs": '{"N": 2}', "total_timesteps": 10_000,
          "learning_rate": 1e-3, "num_minibatches": 8, "gamma": 0.95, "seed": 1}  # fmt: skip


def value_norm(*batches):
    """(mean, deviation) of a ValueNorm with beta 0.8 that has seen these batches."""
    return lambda m: seen(m, *batches).mean_and_std()


def seen(m, *batches):
    norm = m.ValueNorm(0.8)
    for batch in batches:
        norm.update(returns=tensor(batch))
    return norm


def probe_value_norm(m, train):
    settings = {"num_envs": 8, "num_steps": 8, "total_timesteps": 3000, "learning_rate": 3e-3, "seed": 1}
    agent = train(env_id="probes.Fortune", gamma=0.5, hidden_sizes=(16,), **settings).agent
    mean, std = agent.value_norm.mean_and_std()
    if not 1999 < mean < 2001 or std > 2:
        return f"Fortune pays 2,000 to the team, always; your ValueNorm says {mean:.1f} ± {std:.1f}"


exercise(
    "value-norm",
    topic="a critic of normalised returns",
    script="mappo.py",
    blanks=("ValueNorm.update", "ValueNorm.mean_and_std", "ValueNorm.normalize", "ValueNorm.denormalize"),
    difficulty=2,
    minutes=40,
    task="write the moving averages of returns, of their squares, and of 1 (which is how much of the average is not "
    "its start at zero), and with them mean and deviation. The buffers self.mean, self.mean_square and self.weight are "
    "scalar tensors of float64, to be changed in place. mean_and_std returns two floats; it is asked before the first "
    "update as well, when all three are 0: then the mean is 0. The variance is at least 0.01.",
    cases=[
        Case(
            "beta 0.8, after the returns 2 and 4: (mean, deviation)",
            value_norm([2.0, 4.0]),
            [3.0, 1.0],  # averages 0.2 x 3, 0.2 x 10, weight 0.2: 3, and 10 - 9
            {
                "not dividing by the weight: the average still remembers its start at 0": [0.6, 1.280625],
                "taking the mean square for the variance": [3.0, 3.162278],
            },
            "what the weight is for",
        ),
        Case(
            "the same, after 8 and 8 as well",
            value_norm([2.0, 4.0], [8.0, 8.0]),
            # averages 0.8 x 0.6 + 0.2 x 8 = 2.08, 0.8 x 2 + 0.2 x 64 = 14.4, weight 0.8 x 0.2 + 0.2 = 0.36:
            # 5.777778, and 40 - 33.382716 = 6.617284
            [5.777778, 2.572408],
            {
                "exchanging beta and 1 - beta": [7.166667, 1.907587],  # 6.88 / 0.96, 55 - 51.361111
                "remembering the last batch only": [8.0, 0.1],
                "weighing all returns alike: recent ones count more": [5.5, 2.598076],
                "returning the variance for the deviation": [5.777778, 6.617284],
            },
            "which share of the old average is kept",
        ),
        Case(
            "beta 0.8, after 5 and 5: the variance is at least 0.01",
            value_norm([5.0, 5.0]),
            [5.0, 0.1],
            {"a deviation of 0, by which nothing can be divided": [5.0, 0.0]},
            "the least variance",
        ),
        Case(
            "before the first update: (mean, deviation)",
            value_norm(),
            [0.0, 0.1],
            {"dividing 0 by 0": has_nan},
            "what mean_and_std does when the weight is 0",
        ),
        Case(
            "after 2, 4 and 8, 8: 8.350186 normalised, 1 denormalised",
            lambda m: (
                seen(m, [2.0, 4.0], [8.0, 8.0]).normalize(returns=8.350186),
                seen(m, [2.0, 4.0], [8.0, 8.0]).denormalize(values=1.0),
            ),
            [1.0, 8.350186],  # 5.777778 + 2.572408
            {
                "denormalising in the wrong order: times the deviation, then plus the mean": lambda r: (
                    close(r[0], 1.0) and close(r[1], 17.435203, 1e-3)  # (1 + 5.777778) x 2.572408
                ),
                "exchanging normalize and denormalize": lambda r: close(r[1], -1.857317, 1e-3),  # (1 - mean) / std
            },
            "the one undoes the other",
        ),
    ],
    probe=probe_value_norm,
    learn=Learn(SPREAD, -60.0),
)


class InOrder:
    """A random generator that shuffles nothing."""

    def permutation(self, n):
        return np.arange(n)


def chunks(length, parts=2):
    """[(rows, states) of each batch]: 2 streams of 4 steps, number 10 x stream + step, states 100 more."""

    def call(m):
        numbers = (np.arange(4)[:, None] + 10 * np.arange(2))[:, :, None].astype(float)
        fields = {"obs": tensor(numbers), "masks": tensor(np.ones_like(numbers)), "rnn_states": tensor(100 + numbers)}
        batches = m.recurrent_batches(fields=fields, num_mini_batch=parts, length=length, rng=InOrder())
        return [(batch["obs"][:, 0], batch["rnn_states"][:, 0]) for batch in batches]

    return call


def chunk_rows(*rows):
    """A test of batches (rows, states): are these the rows?"""
    return lambda batches: close([batch[0] for batch in batches], list(rows))


def chunks_must_divide(m):
    """Whether chunks of three steps of four are refused with a ValueError."""
    try:
        chunks(3)(m)
    except ValueError:
        return True
    return False


def probe_recall(m, train):
    settings = {"num_envs": 16, "num_steps": 12, "total_timesteps": 12_000, "learning_rate": 3e-3, "seed": 1}
    run = train(env_id="probes.Recall", recurrent=True, data_chunk_length=3, hidden_sizes=(32,), **settings)
    score = run.summary["eval_return_mean"]
    if score < 2:
        return f"who remembers the sign of the first step of Recall gets 2; your team gets {score} on average"


exercise(
    "chunks",
    topic="batches for recurrent networks",
    script="mappo.py",
    blanks=("recurrent_batches",),
    difficulty=3,
    minutes=60,
    task="cut a rollout into chunks for a recurrent network. `fields` is a dict of tensors (T, S, …): time, streams. "
    "Each stream is cut into chunks of L = `length` steps, numbered stream by stream; rng.permutation(their number) "
    "shuffles them, and they are dealt out into num_mini_batch parts, as tensor_split does it. Of each part of C "
    "chunks yield a dict of the fields' rows (L·C, …), time-major: all first steps before all second ones. But of "
    "fields whose name begins with rnn_states the batch has the first step of each chunk alone, (C, …). A length that "
    "does not divide T is a ValueError.",
    cases=[
        Case(
            "two streams of four steps, numbered 0, 1, 2, 3 and 10, 11, 12, 13, states 100 more; chunks of two steps, "
            "not shuffled, in two parts: (rows, states) of each",
            chunks(2),
            [[[0, 2, 1, 3], [100, 102]], [[10, 12, 11, 13], [110, 112]]],
            {
                "putting one chunk after the other: all first steps come first": chunk_rows(
                    [0, 1, 2, 3], [10, 11, 12, 13]
                ),
                "cutting across streams: swap time and streams before you reshape": chunk_rows(
                    [0, 1, 10, 11], [2, 3, 12, 13]
                ),
                "numbering the chunks time by time instead of stream by stream": chunk_rows(
                    [0, 10, 1, 11], [2, 12, 3, 13]
                ),
                "giving every chunk the state of the rollout's first step": lambda r: close(r[0][1], [100, 100]),
                "giving the state after the first step, or at the end of the chunk": lambda r: close(
                    r[0][1], [101, 103]
                ),
                "giving a state for each row, where each chunk needs one": lambda r: len(r[0][1]) == 4,
            },
            "the two axes, and which of them varies fastest",
        ),
        Case(
            "the same with chunks of four steps: whole streams, in one part",
            chunks(4, 1),
            [[[0, 10, 1, 11, 2, 12, 3, 13], [100, 110]]],
            {},
            "a chunk as long as the rollout",
        ),
        Case(
            "chunks of three steps: is it refused with a ValueError?",
            chunks_must_divide,
            1.0,
            {"losing the steps that are left over": 0.0},
            "the first lines",
        ),
    ],
    probe=probe_recall,
    learn=Learn(SPREAD | {"recurrent": True}, -60.0),
)

# -------------------------------------------------------------------------------------------------- maddpg_matd3.py

PARTICLES = {"env_id": "mpe2.simple_spread_v3", "env_kwargs": '{"N": 2, "continuous_actions": true}', "gamma": 0.95,
             "share_policy": True, "actor_learning_rate": 3e-3, "critic_learning_rate": 3e-3, "num_envs": 8,
             "tau": 0.01, "total_timesteps": 8000, "seed": 1}  # fmt: skip


def windows(starts, rewards, ends=(), position=0, n_step=3):
    """(rewards, discounts, last steps) of windows over one environment and four steps, with gamma 0.5.

    `rewards` has a row for each step, with a number for each stream; `ends` are the (step, stream) that are done.
    """

    def call(m):
        G, rows = len(rewards[0]), len(rewards)
        buffer = m.OffPolicyBuffer(rows, 1, G, 1, [1] * G, [1] * G, [1] * G, n_step=n_step, gamma=0.5)
        buffer.rewards[:, 0] = rewards
        for step, stream in ends:
            buffer.dones[step, 0, stream] = True
        buffer.positions[:], buffer.sizes[:] = position, rows
        return buffer.windows(t=np.array(starts), e=np.zeros(len(starts), int))

    return call


REWARDS = [[8.0], [4.0], [2.0], [1.0]]
PATIENCE = {"env_id": "probes.Patience", "gamma": 0.5, "num_envs": 4, "learning_starts": 200, "hidden_sizes": (32,),
            "batch_size": 64, "critic_learning_rate": 1e-2, "total_timesteps": 4000, "seed": 1}  # fmt: skip


def probe_windows(m, train):
    # With tau = 0 the targets know nothing for ever: the rewards at the end of an episode have to come from the window.
    value = train(n_step=3, tau=0.0, **PATIENCE).metrics[-1]["value_mean"]
    if not close(value, 7 / 6, 0.15):
        return (
            "the last of three steps of Patience pays 2 to the team, so with gamma 0.5 its steps are worth 0.5, 1 and "
            f"2, on average 1.17; with n_step = 3 and targets that never move your critic says {value:.2f}"
        )


exercise(
    "windows",
    topic="n-step returns out of a replay buffer",
    script="maddpg_matd3.py",
    blanks=("OffPolicyBuffer.windows",),
    difficulty=3,
    minutes=60,
    task="sum the rewards of samples that start in steps `t` of environments `e`, both arrays (B,), over at most "
    "self.n_step steps, for each of the G = self.streams streams. self.rewards and self.dones are (self.steps, "
    "environments, G). The steps are a ring: step 0 comes after the last one, and self.positions[e] is where "
    "environment e writes next, so its newest step is the one before. A window ends with the episode of its stream, "
    "and with the newest step. Return the rewards, the discounts of what follows, and the last steps, each (G, B).",
    cases=[
        Case(
            "rewards 8, 4, 2, 1, three steps from step 0, gamma 0.5: (rewards, discounts, last steps)",
            windows([0], REWARDS),
            [[[10.5]], [[0.125]], [[2]]],  # 8 + 0.5 x 4 + 0.25 x 2, and 0.5^3
            {
                "summing rewards without discounting them": lambda r: close(r[0], [[14.0]]),
                "discounting the first reward as well": lambda r: close(r[0], [[5.25]]),
                "returning the discount of the last reward: what follows is one step further": [
                    [[10.5]],
                    [[0.25]],
                    [[2]],
                ],
                "taking one step too many": [[[10.625]], [[0.0625]], [[3]]],
                "returning the step after the window for the last step": [[[10.5]], [[0.125]], [[3]]],
            },
            "where the powers of gamma begin and end",
        ),
        Case(
            "the same, and the episode ends with step 1",
            windows([0], REWARDS, [(1, 0)]),
            [[[10.0]], [[0.25]], [[1]]],  # 8 + 0.5 x 4, and 0.5^2
            {
                "going on into the next episode": [[[10.5]], [[0.125]], [[2]]],
                "leaving out the reward of the step that ends the episode": lambda r: close(r[0], [[8.0]]),
                "discounting by gamma^3 however long the window is": [[[10.0]], [[0.125]], [[1]]],
            },
            "dones: the last step of an episode is in the window, the next one is not",
        ),
        Case(
            "the same without an end; step 2 is written next, so step 1 is the newest: windows from steps 3 and 0",
            windows([3, 0], REWARDS, position=2),
            [[[6.0, 10.0]], [[0.125, 0.25]], [[1, 1]]],  # 1 + 0.5 x 8 + 0.25 x 4 over steps 3, 0, 1; 8 + 0.5 x 4
            {
                "stopping at the end of the array: the steps are a ring": lambda r: close(r[2][0][0], 3.0),
                "going on from the newest step to the oldest": lambda r: close(r[0][0][1], 10.5),
            },
            "the ring, and self.positions",
        ),
        Case(
            "two agents, rewards 8, 4, 2, 1 and 1, 1, 1, 1, the second one dies in step 0",
            windows([0], [[8.0, 1.0], [4.0, 1.0], [2.0, 1.0], [1.0, 1.0]], [(s, 1) for s in range(4)]),
            [[[10.5], [1.0]], [[0.125], [0.5]], [[2], [0]]],
            {
                "ending both windows with the death of one agent": lambda r: close(r[2], [[0], [0]]),
                "letting both windows go on until both have died": lambda r: close(r[2], [[2], [2]]),
            },
            "each stream has a window of its own",
        ),
        Case("one step, from step 1", windows([1], REWARDS, n_step=1), [[[4.0]], [[0.5]], [[1]]], {}, "n_step = 1"),
    ],
    probe=probe_windows,
    learn=Learn(PARTICLES | {"n_step": 3}, -46.0),
)

# -------------------------------------------------------------------------------------------------------- rainbow.py

ALL_OFF = dict.fromkeys(["double", "prioritized", "dueling", "multi_step", "distributional", "noisy"], False)
SMALL_RAINBOW = ALL_OFF | SMALL_DQN | {"v_min": -1.0, "v_max": 3.0, "num_atoms": 21}
RAINBOW_CARTPOLE = ALL_OFF | {"env_id": "CartPole-v1", "total_timesteps": 30_000, "num_envs": 4, "train_frequency": 64,
                              "gradient_steps": 32, "batch_size": 64, "hidden_sizes": (64, 64), "v_min": 0.0,
                              "target_network_frequency": 128, "exploration_fraction": 0.16, "end_e": 0.04,
                              "eval_every": 1_000, "stop_at_return": 150.0, "seed": 1}  # fmt: skip


def rainbow_q(env, obs, expected, steps, **settings):
    """A probe: Q of observations after a short run."""

    def probe(m, train):
        agent = train(env_id=f"Classroom/{env}-v0", total_timesteps=steps, **SMALL_RAINBOW | settings).agent
        q = agent(tensor(obs)).tolist()
        if not close(q, expected, 0.2):
            rounded = [[round(value, 2) for value in row] for row in q]
            return f"{env} has the values {expected} with gamma 0.5; yours are {rounded}"

    return probe


def windows_of(*steps):
    """Rows (obs, reward, next_obs, terminated, discount) of what a buffer with n = 3 and gamma 0.5 holds, by obs.

    A step is (rewards of the environments, a letter for each: t terminated, c truncated, r only reset, - nothing).
    """

    def call(m):
        N = len(steps[0][0])
        buffer = m.NStepBuffer(20, spaces.Box(-1, 1, (1,)), spaces.Discrete(2), num_envs=N, n_step=3, gamma=0.5)
        for rewards, letters in steps:
            obs = np.array(rewards, np.float32)[:, None]
            flags = [np.array([letter == kind for letter in letters]) for kind in "tcr"]
            buffer.add(**transitions(obs, obs[:, 0], *flags))
        columns = buffer.obs[:, 0], buffer.rewards, buffer.next_obs[:, 0], buffer.terminated, buffer.discounts
        return sorted([float(x) for x in row] for row in list(zip(*columns))[: buffer.size])

    return call


ROWS = "rows (obs, reward, next_obs, terminated, discount)"

exercise(
    "n-step",
    topic="n-step targets, made while playing",
    script="rainbow.py",
    blanks=("NStepBuffer.add", "NStepBuffer.write"),
    difficulty=3,
    minutes=60,
    task="put n steps together into one transition, and store it. add gets a step of all environments: append (obs, "
    "action, reward) of environment i to self.open_steps[i], a deque of the steps whose windows are open, unless it is "
    "a reset row. When there are self.n_step of them, the first one's window closes: give the deque to write, and take "
    "its first step off. Where an episode ends, terminated or truncated, all open windows close, each with what it "
    "has. write puts one transition into slot self.position and moves on: obs and action of the first step, the "
    "discounted sum of the rewards, the next_obs and terminated that it is given, and in self.discounts gamma^k for k "
    "rewards. It returns the slot; add returns an array of all slots, having told self.tree.add if there is a tree.",
    cases=[
        Case(
            f"one environment, rewards 1, 2, 3 (which are the observations as well), nothing ends: {ROWS}",
            windows_of(([1], "-"), ([2], "-"), ([3], "-")),
            [[1, 2.75, 3.5, 0, 0.125]],  # 1 + 0.5 x 2 + 0.25 x 3, then 0.5^3
            {
                "summing rewards without discounting them": [[1, 6, 3.5, 0, 0.125]],
                "bootstrapping with gamma, as after one step": [[1, 2.75, 3.5, 0, 0.5]],
                "storing the observation of the window's last step": [[3, 2.75, 3.5, 0, 0.125]],
                "storing windows before they close": lambda rows: len(rows) == 3,
            },
            "what is known when the third step has been taken, and of which of the three",
        ),
        Case(
            f"rewards 1, 2, and the second step terminates: {ROWS}",
            windows_of(([1], "-"), ([2], "t")),
            [[1, 2, 2.5, 1, 0.25], [2, 2, 2.5, 1, 0.5]],
            {
                "losing the windows that the end of the episode cuts short": lambda rows: len(rows) == 0,
                "storing only the longest of the windows that close": lambda rows: len(rows) == 1,
                "discounting by gamma^n, however few rewards there were": [
                    [1, 2, 2.5, 1, 0.125],
                    [2, 2, 2.5, 1, 0.125],
                ],
                "forgetting that nothing follows": [[1, 2, 2.5, 0, 0.25], [2, 2, 2.5, 0, 0.5]],
            },
            "what happens to all windows that are open when an episode ends",
        ),
        Case(
            f"rewards 1, 2, and the second step is truncated; a reset row with 9; then 4, which terminates: {ROWS}",
            windows_of(([1], "-"), ([2], "c"), ([9], "r"), ([4], "t")),
            [[1, 2, 2.5, 0, 0.25], [2, 2, 2.5, 0, 0.5], [4, 4, 4.5, 1, 0.5]],
            {
                "storing truncation as termination": lambda rows: rows[0][1] == 2 and rows[0][3] == 1,
                "going on into the next episode": lambda rows: rows[0][1] == 3,  # 1 + 0.5 x 2 + 0.25 x 4
                "taking the reset row for a step": lambda rows: rows[-1][0] == 9,
            },
            "which steps belong to the episode",
        ),
        Case(
            f"two environments with rewards 1, 2, 3 and 10, 20; the second terminates in its second step: {ROWS}",
            windows_of(([1, 10], "--"), ([2, 20], "-t"), ([3, 99], "-r")),
            [[1, 2.75, 3.5, 0, 0.125], [10, 20, 20.5, 1, 0.25], [20, 20, 20.5, 1, 0.5]],
            {"mixing steps of several environments": lambda rows: rows[0][1] > 3},
            "whose window it is",
        ),
    ],
    probe=rainbow_q("Endless", [[0.0]], [[2.0, 2.0]], 3000, multi_step=True, learning_rate=0.02),
    learn=Learn(RAINBOW_CARTPOLE | {"multi_step": True}, 60.0),
)


def projected(*rows):
    """project on the support 0, 1, 2, 3, 4 of rows (reward, terminated, discount, probabilities)."""

    def call(m):
        import torch

        rewards, terminated, discounts, probs = zip(*rows)
        step = {"rewards": tensor(rewards), "terminated": torch.tensor(terminated), "discounts": tensor(discounts)}
        return m.project(**step, probs=tensor(probs), support=tensor([0.0, 1, 2, 3, 4]))

    return call


CERTAIN = [[0.0] * i + [1.0] + [0.0] * (4 - i) for i in range(5)]  # each of the atoms for certain

exercise(
    "project",
    topic="the projection of C51",
    script="rainbow.py",
    blanks=("project",),
    gives={"project": "float32 tensor"},
    difficulty=3,
    minutes=60,
    task="share out the probabilities of y = r + discount z among the atoms of the support. rewards, terminated "
    "(booleans) and discounts are (B,), probs is (B, atoms): those of the returns z, which are the support's; the "
    "result is (B, atoms). A y beyond the first or last atom counts as that atom. Between two atoms, each gets the "
    "more, the nearer it is: at a quarter of the way from 1 to 2, three quarters go to 1. A loop over atoms is fine.",
    cases=[
        Case(
            "support 0, 1, 2, 3, 4, z is 1 for certain, r = 1, gamma 1",
            projected((1.0, False, 1.0, CERTAIN[1])),
            [[0, 0, 1, 0, 0]],
            {
                "losing the probability where y falls on an atom: floor and ceiling are the same there": [[0] * 5],
                "giving more to the atom that is further away": [[0, 0, 0, 1, 0]],
                "forgetting the reward": [[0, 1, 0, 0, 0]],
            },
            "the case in which y is an atom itself",
        ),
        Case(
            "support 0, 1, 2, 3, 4, z is 2 for certain, r = 0.25, gamma 0.5",
            projected((0.25, False, 0.5, CERTAIN[2])),
            [[0, 0.75, 0.25, 0, 0]],  # y = 1.25
            {
                "giving all of it to the atom below": [[0, 1, 0, 0, 0]],
                "giving half to each of the two atoms": [[0, 0.5, 0.5, 0, 0]],
                "forgetting the discount": [[0, 0, 0.75, 0.25, 0]],
            },
            "how far y is from the atoms below and above it",
        ),
        Case(
            "support 0, 1, 2, 3, 4, gamma 0.5: z is 4 and r = 5; z is 0 and r = -2",
            projected((5.0, False, 0.5, CERTAIN[4]), (-2.0, False, 0.5, CERTAIN[0])),
            [[0, 0, 0, 0, 1], [1, 0, 0, 0, 0]],
            {"losing what lies beyond the ends": [[0] * 5, [0] * 5]},
            "a y that is no return of the support",
        ),
        Case(
            "support 0, 1, 2, 3, 4, z is 2 for certain, r = 1.5, gamma 0.5, terminated",
            projected((1.5, True, 0.5, CERTAIN[2])),
            [[0, 0.5, 0.5, 0, 0]],  # y = 1.5
            {
                "going on after termination": [[0, 0, 0.5, 0.5, 0]],  # 1.5 + 0.5 x 2
                "removing the reward of a terminated transition as well": [[1, 0, 0, 0, 0]],
            },
            "what y is if nothing follows",
        ),
        Case(
            "support 0, 1, 2, 3, 4, z is 4 for certain, r = 0, gamma 0.5 in one row and 0.25 in another",
            projected((0.0, False, 0.5, CERTAIN[4]), (0.0, False, 0.25, CERTAIN[4])),
            [[0, 0, 1, 0, 0], [0, 1, 0, 0, 0]],
            {"taking one discount for all rows": [[0, 0, 1, 0, 0]] * 2},
            "discounts, of which each row has its own",
        ),
        Case(
            "support 0, 1, 2, 3, 4 with probabilities 0.4, 0, 0.2, 0, 0.4, r = 0.5, gamma 0.5",
            projected((0.5, False, 0.5, [0.4, 0.0, 0.2, 0.0, 0.4])),
            [[0.2, 0.3, 0.3, 0.2, 0]],  # y = 0.5, 1.5, 2.5: half of 0.4, 0.2 and 0.4 to either side
            {"keeping only the last of several shares that meet in an atom": lambda m: sum(m[0]) < 0.9},
            "what two returns give to the same atom",
        ),
    ],
    probe=rainbow_q("Later", [[0.0], [1.0]], [[0.5, 0.5], [0.0, 1.0]], 4000, distributional=True),
    learn=Learn(RAINBOW_CARTPOLE | {"distributional": True}, 60.0),
)


def tree_of(*priorities):
    """A SumTree of four slots into which these lists of {slot: priority} have been written, one after the other."""

    def make(m):
        tree = m.SumTree(4, 1.0)
        for written in priorities:
            tree.write(slots=np.array(list(written)), priorities=np.array(list(written.values()), float))
        return tree

    return make


def tree_nodes(*priorities):
    """Its nodes, but for node 0."""
    return lambda m: tree_of(*priorities)(m).nodes[1:]


def drawn(part, batch_size, beta):
    """Slots (part 0) or weights (part 1) drawn from priorities 2, 4, 8, 2, each from the middle of its share."""

    def call(m):
        middle = SimpleNamespace(random=lambda size=None: 0.5 if size is None else np.full(size, 0.5))
        return tree_of({0: 2, 1: 4, 2: 8, 3: 2})(m).sample(batch_size=batch_size, rng=middle, beta=beta)[part]

    return call


PRIORITIES = "priorities 2, 4, 8, 2, every random number 0.5"

exercise(
    "priorities",
    topic="prioritised sampling, with a sum tree",
    script="rainbow.py",
    blanks=("SumTree.write", "SumTree.sample"),
    difficulty=3,
    minutes=60,
    task="write the tree that the drawing shows. self.nodes is an array, slot s is node self.leaves + s, and node 1 is "
    "the sum of all. write sets the priorities (an array, or one number) of an array of slots, and the sums above "
    "them. sample divides the sum of all into batch_size equal parts, takes a number from each (rng.random(batch_size) "
    "gives numbers from 0 to 1), and follows each number down the tree to its slot. With it go the weights p^-beta, "
    "divided by the largest of the batch, float32. Loops over the batch are fine. A number that rounding has made too "
    "large must not lead to a slot with priority 0.",
    cases=[
        Case(
            "priorities 1, 2, 0, 5 written into four slots: nodes 1 to 7",
            tree_nodes({0: 1, 1: 2, 2: 0, 3: 5}),
            [8, 3, 5, 1, 2, 0, 5],
            {"leaving all sums but those above the leaves as they were": lambda nodes: nodes[0] == 0},
            "how far up the sums change",
        ),
        Case(
            "then 4 is written into slot 1, which had 2",
            tree_nodes({0: 1, 1: 2, 2: 0, 3: 5}, {1: 4}),
            [10, 5, 5, 1, 4, 0, 5],
            {"adding the new priority to the sums without taking the old one off": [12, 7, 5, 1, 4, 0, 5]},
            "a slot that had a priority before",
        ),
        Case(
            f"{PRIORITIES}, eight draws, one from each part: the slots",
            drawn(0, 8, 0.5),
            [0, 1, 1, 2, 2, 2, 2, 3],  # numbers 1, 3, 5, …, 15; slots end at 2, 6, 14, 16
            {
                "keeping the whole number on the way to the right, where the sum on the left has to be taken off": (
                    lambda slots: close(slots, [0, 1, 1, 2, 3, 3, 3, 3])
                ),
                "turning left where it should be right": lambda slots: slots[0] == 3 and slots[-1] == 0,
                "taking all numbers from the whole sum, not each from its own part": [2] * 8,  # 8 of 16
            },
            "one number and its way down, with pencil and paper",
        ),
        Case(
            f"{PRIORITIES}, eight draws, beta 0.5: the weights",
            drawn(1, 8, 0.5),
            [1, 0.5**0.5, 0.5**0.5, 0.5, 0.5, 0.5, 0.5, 1],  # (p / 2)^-0.5
            {
                "leaving the weights out": [1] * 8,
                "giving the larger weights to what is drawn more often": lambda w: w[0] < w[1] < w[3],
                "not dividing by the largest weight": lambda w: w[0] != 1 and close(w[0] / w[3], 2.0),
                "forgetting beta": [1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 1],
            },
            "section 3.4 of the paper: what is drawn twice as often should count half as much, if beta is 1",
        ),
    ],
    probe=rainbow_q("Later", [[0.0], [1.0]], [[0.5, 0.5], [0.0, 1.0]], 4000, prioritized=True),
    learn=Learn(RAINBOW_CARTPOLE | {"prioritized": True}, 60.0),
)
