"""Well-known faulty versions of what stands in qlearning.py: each must be caught, by name."""

from functools import partial

import pytest

from tests.against_loops import test_qlearning as loops
from tests.by_hand import test_qlearning as by_hand
from tests.tools import mutant

EPISODE = {
    end: partial(by_hand.test_an_episode, algorithm="q-learning", end=end)
    for end in ("terminated", "truncated", "both")
}
STEPS = {
    name: partial(loops.test_every_step.hypothesis.inner_test, algorithm=name, seed=0) for name in loops.ALGORITHMS
}
ACTIONS = {name: partial(loops.test_actions, algorithm=name) for name in loops.ALGORITHMS}
FIRST_TABLE = partial(by_hand.test_double_q_learning, drawn=0.2, tables=[1.5, 4.0])
DISCOUNT = "discount = 0.0 if terminated else args.gamma"

MISTAKES = {  # (where it is made, what catches it): {name: text that stands there -> what stands there in its place}
    ("q_learning_target", by_hand.test_targets): {
        "no maximum": "max(next_values) -> next_values[0]",
        "gamma forgotten": "discount * max -> max",
    },
    ("sarsa_target", by_hand.test_targets): {"takes the maximum": "next_values[next_action] -> max(next_values)"},
    ("expected_sarsa_target", by_hand.test_targets): {
        "epsilon swapped": "(epsilon * average + (1 - epsilon) * max -> ((1 - epsilon) * average + epsilon * max",
        "leaves the best one out": "sum(next_values) / -> sum(sorted(next_values)[:-1]) / ",
    },
    ("double_q_target", by_hand.test_targets): {
        "maximum of the other table": "other_next_values[best] -> max(other_next_values)",
        "judged by the table that chooses": "* other_next_values -> * next_values",
    },
    ("play_episode", EPISODE["truncated"]): {
        "truncated is treated as terminated": "0.0 if terminated else -> 0.0 if terminated or truncated else",
        "learning rate ignored": "+= learning_rate * td_error -> += td_error",
        "wrong sign": "target - q[state][action] -> q[state][action] - target",
        "next state's row updated": "q[state][action] += -> q[next_state][action] +=",
        "errors with their signs": "td_error=abs(td_error) -> td_error=-td_error",
        "step not counted": "run.step += 1 -> run.step += 0",
        "return of the last step": "total += reward -> total = reward",
    },
    ("play_episode", EPISODE["terminated"]): {"terminated bootstraps": f"{DISCOUNT} -> discount = args.gamma"},
    ("play_episode", EPISODE["both"]): {
        "truncated wins": f"{DISCOUNT} -> discount = 0.0 if terminated and not truncated else args.gamma"
    },
    ("play_episode", by_hand.test_the_limit_of_steps_truncates): {
        "limit ignored": "range(episode_limit(args, env.spec)) -> range(9)",
    },
    ("play_episode", ACTIONS["sarsa"]): {
        "draws another action than it updated with": "action = next_action -> action = None"
    },
    ("play_episode", ACTIONS["q-learning"]): {
        "the action is chosen before the update": (
            "target = q_learning_target( -> "
            "next_action = epsilon_greedy(q[next_state], epsilon, rng)\n            target = q_learning_target("
        ),
    },
    ("play_episode", STEPS["sarsa"]): {
        "updated with another action": "q[next_state], next_action) -> q[next_state], 0)",
    },
    ("play_episode", STEPS["double-q"]): {
        "judges its own choice": "q[next_state], other[next_state] -> q[next_state], q[next_state]",
        "another table's error": "td_error = target - q -> td_error = target - agent.tables[0]",
    },
    ("play_episode", loops.test_the_table_keeps_double_precision): {"rewards as they come": "float(reward) -> reward"},
    ("play_episode", loops.test_double_q_improves_either_table): {
        "always the first table": "random() < 0.5 -> random() < 2"
    },
    ("QTable.values", ACTIONS["double-q"]): {"acts on one of its tables": "if len(self.tables) == 1: -> if True:"},
    ("QTable.state", by_hand.test_rows_of_integers): {"digits in the wrong radix": "row * bins -> row * 2"},
    ("QTable.act", by_hand.test_rows_of_a_grid): {
        "actions begin at 0": " + self.first_action -> ",
        "the worst actions": "np.argmax -> np.argmin",
    },
    ("epsilon_greedy", by_hand.test_epsilon_greedy): {
        "the wrong way round": "rng.random() < epsilon -> rng.random() > epsilon",
        "ties go to the first": "if values.count(best) == 1 -> if True",
        "one action is never explored": "rng.randrange(len(values)) -> rng.randrange(len(values) - 1)",
    },
    ("schedules", by_hand.test_schedules): {
        "decays per step": "args.epsilon_decay**episode -> args.epsilon_decay**step",
        "falls below its floor": "max(args.epsilon_min, -> max(0.0,",
        "the linear one ignores its fraction": "args.exploration_fraction * -> ",
    },
    ("linear_schedule", by_hand.test_schedules): {
        "goes on beyond its end": "max(0.0, 1 - step / duration) -> (1 - step / duration)"
    },
    ("box_edges", by_hand.test_rows_of_a_grid): {"one bin less": "args.grid_size + 1 -> args.grid_size"},
    ("integer_edges", by_hand.test_rows_of_integers): {
        "start of a Discrete forgotten": "int(first) + 1, int(first) + int(number) -> 1, int(number)"
    },
}
NAMED = [(*place, name, texts) for place, named in MISTAKES.items() for name, texts in named.items()]


@pytest.mark.parametrize("where, check, name, texts", NAMED, ids=[f"{where}: {name}" for where, _, name, _ in NAMED])
def test_mistakes(script, where, check, name, texts):
    """Fails if a faulty version passes the check that is named beside it, or if the sound one does not."""
    old, new = texts.split(" -> ")
    faulty = mutant(script, where, old, new)
    check(script)
    with pytest.raises((AssertionError, IndexError)):
        check(faulty)
