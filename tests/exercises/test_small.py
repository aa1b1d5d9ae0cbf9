"""The exercises of exercises/tasks_small.py beyond what tests/test_exercises.py asks of all: small scripts are right
and show something, probes notice what they are there for, and a handout gives no neighbour's solution away.
"""

import random
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "exercises"), str(ROOT / "tests")]

import release  # noqa: E402
import runner  # noqa: E402
from forms import EXERCISES, close  # noqa: E402
from test_exercises import SOUND, WRONG, bodies, graded, module_of, run, solved, training_here, wrong_solution  # noqa: E402

SMALL = [name for name, exercise in EXERCISES.items() if exercise.table == "tasks_small.py"]
SCRIPTS = sorted({EXERCISES[name].script for name in SMALL if "/" in EXERCISES[name].script})


@pytest.mark.parametrize("file, words", [
    pytest.param("bandits", r"ucb +\S+ +\d\d% +\S+ +7\d%", marks=pytest.mark.slow),
    ("planning", r"0\.951  0\.961  0\.970  0\.961 +↓ → ↓ ←(.|\n)*0\.542"),  # 0.99^5 six steps before the goal
    ("prediction", r"td-zero +0\.1\d  0\.3\d  0\.5\d  0\.\d\d  0\.8\d"),
    ("squashed", r"0\.8 and  1\.0 +0\.27\d +0\.27\d"),
])  # fmt: skip
def test_a_small_script_shows_something(file, words, tmp_path):
    """Fails if one of them does not run alone, or what it prints is not what the book says."""
    done = run(tmp_path, ROOT / f"exercises/scripts/{file}.py", PYTHONIOENCODING="utf-8")
    assert done.returncode == 0 and re.search(words, done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize("file", SCRIPTS)
def test_a_small_script_is_short_and_says_what_it_needs(file):
    text, pinned = (ROOT / file).read_text(encoding="utf-8"), (ROOT / "requirements.txt").read_text()
    packages = re.findall(r'"([^"\s]+==[^"]+)"', text.split("# ///")[1])
    assert len(text.splitlines()) < 140 and packages and all(package in pinned for package in packages)


def original(name):
    """A context manager: the script of an exercise as a module."""
    return runner.loaded(ROOT / EXERCISES[name].script)


def test_estimates_are_means():
    """Fails if the value of an arm is not the mean of its rewards, or preferences do not keep their sum."""
    rng = random.Random(1)
    with original("bandit") as m:
        value, rewards = 7.0, [rng.gauss(0, 1) for _ in range(50)]
        for count, reward in enumerate(rewards, 1):
            value = m.new_value(value, reward, count)
        assert close(value, sum(rewards) / 50)
        assert close(sum(m.new_preferences([1.0, 2.0, 4.0], 2, 3.0, 1.0, 0.1)), 7.0)


def test_both_ways_of_planning_agree():
    """Fails if value and policy iteration differ in a random world of five states and three actions with ends."""
    rng, P = random.Random(1), {}
    for s in range(5):
        P[s] = {}
        for a in range(3):
            P[s][a] = [(0.5, rng.randrange(5), rng.gauss(0, 1), rng.random() < 0.2) for _ in range(2)]
    with original("value-iteration") as m:
        policy, values, _ = m.policy_iteration(P, 0.9)
        assert close(values, m.value_iteration(P, 0.9), 1e-8)
        assert close(values, m.evaluate_policy(P, policy, 0.9), 1e-8)


def test_td_lambda_lies_between_td_zero_and_monte_carlo():
    """lambda = 0 is TD(0). With lambda = 1 a state that is visited once moves by alpha times (return - value)."""
    with original("td-prediction") as m:
        walk = m.walk(random.Random(3))
        given = {"values": [0.1, 0.4, 0.2, 0.7, 0.9], "alpha": 0.3, "gamma": 0.9}
        assert close(m.td_lambda(**given, episode=walk, trace_decay=0.0), m.td_zero(**given, episode=walk))
        line = [(0, 1.0, 1, False), (1, 2.0, 2, False), (2, 4.0, 3, True)]
        after = m.td_lambda(**given, episode=line, trace_decay=1.0)
        # returns 1 + 1.8 + 3.24, 2 + 3.6, 4. The errors of later steps are those of values not yet moved.
        returns = m.first_visit_returns(line, 0.9)
        assert close(after[:3], [v + 0.3 * (returns[s] - v) for s, v in enumerate(given["values"][:3])])


def test_squashed_actions_have_a_density():
    """Fails if the density over (-1, 1) does not integrate to 1, whatever mean and deviation."""
    with original("squashed") as m:
        a = m.torch.linspace(-1, 1, 20_001, dtype=m.torch.float64)[1:-1, None]
        for mean, log_std in ((0.0, 0.0), (0.5, -1.0), (-0.3, -0.5)):
            log_std = m.torch.tensor([log_std], dtype=m.torch.float64)
            density = m.squashed_log_prob(m.torch.full_like(a, mean), log_std, m.torch.atanh(a)).exp()
            assert abs(density.sum().item() * 2 / 20_000 - 1) < 0.01


# exercise: (a mistake of WRONG, a part of what its probe says then)
CAUGHT = {
    "bandit": ("looking at the bonus", "ucb should take the best arm"),
    "value-iteration": ("stopping too early", "of FrozenLake is worth"),
    "policy-iteration": ("keeping the policy", "of FrozenLake is worth"),
    "monte-carlo": ("adding up", "states are worth 0.17"),
    "td-prediction": ("adding the value of the next", "states are worth 0.17"),
    "log-probs": ("the wrong sign", "who Aims well"),
    "dpg": ("going downhill", "Does the actor climb"),
    "ars": ("the wrong sign", "after 3,000 episodes"),
    "joint-state": ("leaving out the state", "0, 1, 1, 2"),
}
SLOW = {"log-probs", "dpg", "joint-state"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CAUGHT])
def test_a_probe_notices_a_mistake(name, tmp_path):
    """Fails if a probe passes with a solution that learns nothing, or something else."""
    exercise, (beginning, words) = EXERCISES[name], CAUGHT[name]
    changes, *_ = [changes for start, *changes in WRONG[name] if start == beginning]
    with module_of(tmp_path, exercise.script, solved(name, wrong_solution(name, changes))) as module:
        problem = exercise.probe(module, training_here(module))
    assert words in problem


@pytest.mark.parametrize("name, old, new, words", [
    # right on the fixed numbers, which have three arms, a gamma of 0.5, two episodes, an alpha of 0.5
    ("bandit", "return max(range(len(values)), key=key)", "return max(range(min(4, len(values))), key=key)", "ucb"),
    ("value-iteration", "while change >= theta:", "for _ in range(40):", "FrozenLake"),
    ("monte-carlo", "for episode in episodes:", "for episode in episodes[:2]:", "random walk"),
    ("td-prediction", "new[x] += alpha *", "new[x] += 0.5 *", "random walk"),
])  # fmt: skip
def test_a_probe_sees_what_the_numbers_do_not(name, old, new, words, tmp_path):
    """In processes of their own, as a student would run it: step 1 passes, step 2 does not."""
    numbers, probe = graded(name, tmp_path, solved(name, wrong_solution(name, [old, new])), up_to=2)
    assert numbers.problem is None and words in probe.problem


@pytest.mark.parametrize("name", [name for name in SMALL if name not in SLOW])
def test_solutions_pass_in_processes_of_their_own(name, tmp_path):
    """Fails if a table that is cut for the student's process lacks something, or a probe its environment."""
    steps = graded(name, tmp_path, solved(name, SOUND[name]), up_to=2)
    assert [step.problem for step in steps] == [None] * min(2, 1 + bool(EXERCISES[name].probe))


def test_a_handout_of_planning_holds_neither_half(tmp_path):
    """Two exercises share one copy, in which all their functions are blank; and it can be checked where it lies."""
    names = ["value-iteration", "policy-iteration"]
    out = release.release(names, tmp_path / "handout")
    copy = (out / "planning.py").read_text(encoding="utf-8")
    assert copy.count("raise NotImplementedError") == 5
    for name in names:
        assert bodies(EXERCISES[name]) and not [line for line in bodies(EXERCISES[name]) if line in copy]
    with (out / "planning.py").open("a", encoding="utf-8") as file:
        file.write(SOUND["value-iteration"] + SOUND["policy-iteration"])
    done = run(out, "check.py", *names)
    assert done.returncode == 0 and "policy-iteration is solved" in done.stdout, done.stdout + done.stderr
