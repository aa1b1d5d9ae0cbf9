"""The classroom in exercises/: originals pass, blanks fail, known mistakes are named, other right ways of writing pass,
bugs are found; what a submission cannot do; handouts, the zip for Gradescope, the course.
"""

import codecs
import importlib
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import minigrid  # noqa: F401  (registers its environments)
import pytest
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "exercises"), str(ROOT / "benchmarks")]

import check  # noqa: E402
import copies  # noqa: E402
import mechanism  # noqa: E402
import release  # noqa: E402
import start  # noqa: E402
from mechanism import EXERCISES, HUNTS, BadInput, Reference, answer, judge  # noqa: E402
from pictures import Table  # noqa: E402
from sheets import commands  # noqa: E402

mechanism.load_tables()
QUICK = "td-targets returns gae clip double-dqn polyak squashed joint-state ppod-priorities".split()
LONG = "build-dqn build-ppo epsilon-greedy replay".split()  # which train, or draw many times
QUICK_HUNTS = "hunt-es hunt-ddp hunt-ppod hunt-mappo".split()

SOUND = {  # other ways of writing than the scripts' own
    "epsilon-greedy": """
def epsilon_greedy(values, epsilon, rng):
    n = len(values)
    if rng.random() < epsilon:
        return rng.choice(list(range(n)))
    best = [a for a in range(n) if values[a] == max(values)]
    return rng.choice(best)
""",
    "td-targets": """
def sarsa_target(reward, discount, next_values, next_action):
    return reward + discount * next_values[next_action]
def expected_sarsa_target(reward, discount, next_values, epsilon):
    n = len(next_values)
    pi = [epsilon / n] * n
    pi[next_values.index(max(next_values))] += 1 - epsilon
    return reward + discount * sum(p * v for p, v in zip(pi, next_values))
def double_q_target(reward, discount, next_values, other_next_values):
    best = max(range(len(next_values)), key=lambda a: next_values[a])
    return reward + discount * other_next_values[best]
""",
    "double-dqn": """
def td_targets(rewards, terminated, gamma, target_q, online_q=None):
    alive = 1 - terminated.float()
    if online_q is None:
        future = target_q.max(1).values
    else:
        future = target_q[torch.arange(len(target_q)), online_q.argmax(1)]
    return rewards + gamma * alive * future
""",
    "returns": """
def compute_returns(rewards, next_values, terminated, truncated, gamma):
    cut = truncated & ~terminated
    over = terminated | truncated
    terms = rewards + gamma * next_values * cut
    decay = gamma * ~over
    xs, x = [], next_values[-1]
    for t in range(len(terms) - 1, -1, -1):
        x = terms[t] + decay[t] * x
        xs.append(x)
    return torch.stack(xs[::-1])
""",
    "gae": """
def compute_gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    dead, over = terminated, terminated | truncated
    advantages, a = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_values[t] * ~dead[t] - values[t]
        a = delta + gamma * gae_lambda * ~over[t] * a
        advantages[t] = a
    return advantages, advantages + values
""",
    "clip": """
def policy_loss(log_ratios, advantages, clip_coef):
    ratio = log_ratios.exp()
    low, high = torch.tensor(1 - clip_coef), torch.tensor(1 + clip_coef)
    plain = ratio * advantages
    clipped = ratio.maximum(low).minimum(high) * advantages
    worse = torch.stack([plain, clipped]).amin(0)
    return -worse.mean()
""",
    "value-clip": """
def value_loss(values, old_values, returns, clip_coef=None):
    error = (values - returns).abs()
    if clip_coef is not None:
        near = values.clamp(old_values - clip_coef, old_values + clip_coef)
        error = torch.max(error, (near - returns).abs())
    return (error * error).mean() / 2
""",
    "squashed": """
def squashed_gaussian(mean, log_std, noise):
    u = mean + noise * log_std.exp()
    log_density = torch.distributions.Normal(mean, log_std.exp()).log_prob(u)
    a = u.abs()
    log_slope = 2 * (math.log(2) - a - torch.log1p((-2 * a).exp()))
    return torch.tanh(u), log_density.sum(-1) - log_slope.sum(-1)
""",
    "polyak": """
def polyak(target, source, tau):
    for p, q in zip(target.parameters(), source.parameters()):
        p.data.mul_(1 - tau).add_(tau * q.data)
""",
    "es-update": """
def make_candidates(theta, noise, sigma):
    return np.array([theta + sign * sigma * eps for eps in noise for sign in (1, -1)])
def es_gradient(fitnesses, noise, sigma):
    signed = np.stack([noise, -noise], 1).reshape(-1, noise.shape[1])
    return (fitnesses[:, None] * signed).sum(0).astype(noise.dtype) / (len(fitnesses) * sigma)
""",
    "ppod-priorities": """
def replay_probabilities(max_values, alpha):
    v = np.array(max_values, float)
    if v.min() < 0:
        v = v - v.min()
    if v.max() == 0:
        v = v + 1
    v = v / v.max()
    p = v**alpha
    return p / p.sum()
""",
}
EQUAL = [  # changes to the originals that change nothing
    ("vtrace", "continues = ~(terminated | truncated) -> continues = (~terminated & ~truncated).float()"),
    ("td3-target", "next_values.amin(0) -> next_values.min(0).values"),
    ("dpg", "-critic(obs, actor(obs)).mean() -> -torch.sum(critic(obs, actor(obs))) / len(obs)"),
    ("td-prediction", "trace_decay * trace for trace in traces -> trace_decay * traces[s] for s in range(len(traces))"),
    (
        "value-iteration",
        "total += probability * (reward + future) -> total += probability * reward + probability * future",
    ),
    ("masked", "torch.where(mask, logits, -torch.inf) -> logits.masked_fill(~mask, -torch.inf)"),
    ("windows", "goes_on * discounts * self.rewards -> np.where(goes_on, discounts, 0) * self.rewards"),
    ("bandit", "value + step * (reward - value) -> (1 - step) * value + step * reward"),
    ("joint-state", "torch.stack(states, dim=2) -> torch.cat([x[:, :, None] for x in states], 2)"),
    ("priorities", "rng.random(batch_size) -> np.array([rng.random() for _ in range(batch_size)])"),
    ("chunks", "rng.permutation(len(chunks[0])) -> rng.permutation(np.arange(len(chunks[0])))"),
]


def slow_but(names, quick):
    """Parameters for all these names, of which only `quick` ones are tested without -m ''."""
    marked = [pytest.param(x, marks=[pytest.mark.slow] * (x not in quick)) for x in names]
    return pytest.mark.parametrize("name", marked)


def answered(task, source, folder):
    """What a file with this source answers to each call, in this process."""
    original = mechanism.original(task.script)
    (folder / task.file).write_text(source, encoding="utf-8")
    try:
        module = mechanism.load(folder / task.file)
        return [answer(case.call, module, task.blanks) for case in task.calls()]
    finally:
        sys.modules[original.__name__] = original


def told(name, folder, old="", new=""):
    """What is said of the blanked copy for an exercise with the solution of SOUND below it, in which one text is
    changed: all problems, in order.
    """
    assert old in SOUND[name]
    source = copies.working_copy([EXERCISES[name]]) + SOUND[name].replace(old, new, 1)
    problems = judge(answered(EXERCISES[name], source, folder), Reference(EXERCISES[name]))
    return [problem for problem in problems if problem]


# ------------------------------------------------------------------------------------------------------------- judging


@slow_but(EXERCISES, EXERCISES.keys() - {*LONG})
def test_the_original_passes_and_each_blank_fails(name, tmp_path):
    """Also if it is the only one that is left."""
    task = EXERCISES[name]
    reference = Reference(task)
    assert not any(judge(reference.answers(), reference))
    for blank in task.blanks:
        source = copies.blanked(copies.source_of(task.script), replace(task, blanks=(blank,)))
        first = next(filter(None, judge(answered(task, source, tmp_path), reference)))
        assert f"exercise: {name}: write {blank}" in first


@slow_but(EXERCISES, QUICK)
def test_each_mistake_is_refused_and_named(name):
    reference = Reference(EXERCISES[name])
    for message in reference.messages:
        text = "\n".join(filter(None, judge(reference.answers(message), reference)))
        words, _, place = message.partition(" | ")
        assert f"This is what one gets by {words}." in text, message
        assert not place or f"Look next at {place}." in text, message


@slow_but(SOUND, SOUND.keys() - {*LONG})
def test_other_right_ways_pass(name, tmp_path):
    assert told(name, tmp_path) == []


@pytest.mark.parametrize("name, change", EQUAL)
def test_small_changes_that_change_nothing_pass(name, change):
    task, reference = EXERCISES[name], Reference(EXERCISES[name])
    reference.answers()
    with mechanism.mistaken(mechanism.original(task.script), task.blanks, change):
        answers = [answer(case.call, mechanism.original(task.script), task.blanks) for case in task.calls()]
    assert not any(judge(answers, reference))


WRONG = [  # (exercise, text of a solution above, what stands in its place, what must not be told)
    ("value-clip", "old_values + clip_coef", "old_values + old_values", "not clipping"),
    ("epsilon-greedy", "rng.choice(best)", "0", "lowest"),
    ("double-dqn", "online_q.argmax(1)", "(3 * online_q + target_q).argmax(1)", "exchanging"),
    ("gae", "~over[t] * a", "~over[t] * a.flip(0)", "mixing"),
    ("returns", "decay = gamma * ~over", "decay = 0.9 * gamma * ~over", "gamma"),
]


@pytest.mark.parametrize("name, old, new, never", WRONG)
def test_what_is_not_known_is_not_named(name, old, new, never, tmp_path):
    """A mistake that nobody has foreseen is refused, and no other one's name is given as if it were sure."""
    text = "\n".join(told(name, tmp_path, old, new))
    assert "expected:" in text and not re.search(rf"This is what one gets by [^.]*{never}", text)


RETURN, NUMPY = "return advantages, advantages + values", "return advantages.numpy(), advantages"
KINDS = [
    (RETURN, NUMPY, "Asked for is: (float32 tensor, float32 tensor)"),
    (RETURN, "return advantages.double(), advantages", "(float64 tensor, float32 tensor)"),
    (RETURN, "pass", "Is there a return missing"),
    (RETURN, "return advantages[:, 0], advantages", "The shapes differ"),
    ("rewards, values, next", "reward, values, next", "It is called with the names that stand in its def"),
    (
        "    dead, over",
        "    rewards += 1; rewards = rewards - 1; dead, over",
        "changed in place: rewards of compute_gae",
    ),
    ("rewards[t] + gamma", "rewards[t] + gama", "in compute_gae: NameError: name 'gama' is not defined"),
    ("terminated, terminated | truncated", "terminated & False, truncated", "answers up to this case, but not later"),
]


@pytest.mark.parametrize("old, new, words", KINDS)
def test_what_a_student_is_told(old, new, words, tmp_path):
    first, *_ = told("gae", tmp_path, old, new)
    compared = "expected:" in first or "changed in place" in first  # else no line of theory helps
    assert words in first and ("Look next at" in first) == compared


def test_right_numbers_of_a_wrong_kind_are_no_known_mistake(tmp_path):
    """A mistake that shows in es_gradient only leaves the right candidates, as this list of arrays does."""
    first, *_ = told("es-update", tmp_path, "return np.array(", "return list(")
    assert "(array, array, array, array). Asked for is: array." in first and "what one gets" not in first


def with_change(name, change):
    """What is said of the original with a change in it: all problems, in order."""
    task, reference = EXERCISES[name], Reference(EXERCISES[name])
    reference.answers()
    with mechanism.mistaken(mechanism.original(task.script), task.blanks, change):
        answers = [answer(case.call, mechanism.original(task.script), task.blanks) for case in task.calls()]
    return [problem for problem in judge(answers, reference) if problem]


PLACES = [  # (exercise, a fault, what is told of the first case that it spoils)
    ("q-learning", "run.step += 1 -> pass", "Look next at the line after env.step: run.step"),
    ("q-learning", "run.step += 1 -> run.step += 2", "steps, yours 12, expected 6.*where run.step is counted"),
    ("q-learning", "state = next_state\n -> \n", "by never computing the state anew.*Look next at the end of the loop"),
    (
        "q-learning",
        "0.0 if terminated else args.gamma -> args.gamma",
        "call 3 of q_learning_target, yours: .*discount=0.5.*call 3 of q_learning_target, expected: .*discount=0,",
    ),
    (
        "q-learning",
        "episode_return += reward -> episode_return = reward",
        "return and length of each.*Look next at what is summed up",
    ),
    (
        "gae",
        ("= torch.empty_like -> = torch.zeros_like", "range(len(rewards)) -> range(len(rewards) - 1)"),
        "leaving the last row out: the loop begins a row too early",
    ),
    (
        "epsilon-greedy",
        "rng.random() < -> __import__('random').random() <",
        "from random in epsilon_greedy, not from rng",
    ),
    (
        "replay",
        "rng.integers(self.size, size=batch_size) -> np.random.randint(self.size, size=batch_size)",
        "from np.random in ReplayBuffer.sample, not from rng",
    ),
    (
        "priorities",
        "rng.random(batch_size) -> np.random.rand(batch_size)",
        "from np.random in SumTree.sample, not from",
    ),
]


@pytest.mark.parametrize("name, change, words", PLACES)
def test_the_place_of_a_fault_is_told(name, change, words):
    """The call that differs, not the first of several; where to look; random numbers that no seed knows."""
    assert re.search(words, with_change(name, change)[0], re.DOTALL), with_change(name, change)[0]


def test_grids_and_buffers_are_drawn(tmp_path):
    """By hand: in a corner of the grid one number is wrong; slot 0 of a buffer holds the reward of slot 1."""
    grid = Table(columns=2)
    assert grid.text([1, 2, 4, 5], [1, 3, 4, 5]).split("\n")[1:] == ["  1 2*  |  1  3", "  4  5  |  4  5"]
    assert grid.text([1, 2, 4], [1, 3, 4, 5]) == ""
    assert grid.save(tmp_path / "grid.png", [1, 2, 4, 5], [1, 3, 4, 5]) and (tmp_path / "grid.png").stat().st_size > 0
    (first, *_) = with_change("replay", "= rewards[played] -> = rewards[0]")
    assert re.search(r"slot +obs +action +reward", first) and re.search(r"\n +1 +2 +1 +1\* ", first), first
    assert "yours, where" in "".join(with_change("value-iteration", "else gamma * values -> else 0.9 * values"))


def test_instructions_stand_in_their_function():
    """A list in each, of what belongs to it."""
    text = copies.working_copy([EXERCISES["q-learning"]])
    target, play = (copies.text_of(text, name) for name in ("q_learning_target", "play_episode"))
    assert "    # * Write R + gamma max Q.\n" in target and "    # * Count run.step.\n" in play
    assert "run.step" not in target and all(task.level in ("easy", "medium", "hard") for task in EXERCISES.values())


def test_random_inputs_are_shown():
    """What only random inputs refute comes with these inputs."""
    reference = Reference(EXERCISES["value-clip"])
    problems = judge(reference.answers("writing 0.5 where clip_coef belongs"), reference)
    first = next(filter(None, problems))
    assert problems.index(first) == 2 and "value_loss(values=[" in first and "clip_coef=0." in first


@slow_but(HUNTS, QUICK_HUNTS)
def test_bugs_are_found_and_sound_scripts_pass(name, tmp_path):
    """Each of them, whichever of several a number draws."""
    task, reference = HUNTS[name], Reference(HUNTS[name])
    source = copies.source_of(task.script)
    assert not any(judge(answered(task, source, tmp_path), reference))
    for bug, seen in task.bugs.items():
        assert any(judge(answered(task, copies.planted(source, bug), tmp_path), reference)) and seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "new", ["next_values.index(min(next_values))", "other_next_values.index(min(other_next_values))"]
)
def test_a_bug_that_is_mended_wrongly_is_found(new, tmp_path):
    """hunt-qlearning: the minimum instead of the maximum, or both tables in each other's place."""
    task, old = HUNTS["hunt-qlearning"], "double_q_target: next_values.index(max(next_values))"
    reference, source = Reference(task), copies.source_of("qlearning.py")
    assert any(judge(answered(task, copies.planted(source, f"{old} -> {new}"), tmp_path), reference))
    swap = "double_q_target: best = -> next_values, other_next_values = other_next_values, next_values\n    best ="
    assert any(judge(answered(task, copies.planted(source, swap), tmp_path), reference))


# -------------------------------------------------------------------------------------------------------------- copies


def run(module, monkeypatch, folder, *arguments):
    """main() of a module in this process, in a folder. Returns its exit code; BadInput is raised."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
    return module.main()


def test_a_copy_holds_several_exercises_and_keeps_what_is_solved(tmp_path, monkeypatch, capsys):
    path = tmp_path / "my_work/ppo.py"
    run(start, monkeypatch, tmp_path, "gae")
    assert copies.begun_in(path.read_text()) == ["gae"] and path.read_text().count("raise NotImplementedError(") == 1
    with pytest.raises(BadInput, match="returns has not been begun in .*: python exercises/start.py returns"):
        run(check, monkeypatch, tmp_path, "returns")
    blank = next(line for line in path.read_text().splitlines() if "raise NotImplementedError" in line)
    path.write_text(path.read_text().replace(blank, "    return 1, 2  # mine"))
    run(start, monkeypatch, tmp_path, "returns", "clip")
    text = path.read_text()
    assert "# mine" in text and text.count("raise NotImplementedError(") == 2
    assert copies.begun_in(text) == ["gae", "returns", "clip"]
    for names, words in [(["gae"], "holds gae already"), (["hunt-ppo"], "holds gae, returns, clip already")]:
        with pytest.raises(BadInput, match=words):
            run(start, monkeypatch, tmp_path, *names)
    run(start, monkeypatch, tmp_path, "gae", "--force")
    assert "# mine" not in path.read_text() and (tmp_path / "my_work/ppo.py.1.bak").read_text() == text
    run(start, monkeypatch, tmp_path, "hunt-ppo", "--force")
    assert copies.begun_in(path.read_text()) == ["hunt-ppo"] and (tmp_path / "my_work/ppo.py.2.bak").exists()
    path.write_text("def f(:\n")
    with pytest.raises(BadInput, match="holds something already"):
        run(start, monkeypatch, tmp_path, "gae")
    run(start, monkeypatch, tmp_path, "gae", "--force")
    capsys.readouterr()


def test_a_copy_that_a_windows_editor_saved(tmp_path, monkeypatch):
    """Its ends of lines and its byte order mark change nothing."""
    run(start, monkeypatch, tmp_path, "hunt-ppo", "--work", "my work")
    path = tmp_path / "my work/ppo.py"
    text = path.read_bytes()
    assert b"\r" not in text
    path.write_bytes(codecs.BOM_UTF8 + text.replace(b"\n", b"\r\n"))
    assert check.Student(mechanism.find("hunt-ppo"), path).source == text
    with pytest.raises(BadInput, match="holds hunt-ppo already"):
        run(start, monkeypatch, tmp_path, "hunt-ppo", "--work", "my work")
    with pytest.raises(BadInput, match='start.py hunt-dqn --work "my work"'):
        run(check, monkeypatch, tmp_path, "hunt-dqn", "--work", "my work")


def test_a_comment_behind_a_command(tmp_path, monkeypatch, capsys):
    """zsh and cmd.exe hand it over."""
    with pytest.raises(SystemExit):
        program = SimpleNamespace(main=lambda: mechanism.run_main(start.main))
        run(program, monkeypatch, tmp_path, "gae", "#", "writes it")
    assert "Work in" in capsys.readouterr().out


def test_a_blanked_copy_is_the_script_but_for_the_blanks():
    """Hand-made: a signature over several lines, with and without docstring, comments within and around."""
    source = "def f(\n    a=(1, 2),  # kept\n):\n    # kept\n    return a  # gone\n\n\nclass C:\n    def g(self):\n"
    source += '        """Kept,\n        both lines."""\n        x = 1\n        return x\n\n    h = 3  # kept\n'
    task = replace(EXERCISES["gae"], name="e", blanks=("f", "C.g"), task="write it")
    blanked = copies.blanked(source, task)
    wanted = source.replace("    return a  # gone\n", "    # Exercise e:\n    # * Write it\n    raise E(f)\n")
    wanted = wanted.replace("        x = 1\n        return x\n", "        # Exercise e\n        raise E(C.g)\n")
    assert blanked == re.sub(r"raise E\((.*)\)", r'raise NotImplementedError("exercise: e: write \1")', wanted)


def test_the_list_is_that_of_the_course(tmp_path, monkeypatch, capsys):
    run(start, monkeypatch, tmp_path)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if re.match(r" {2,3}\d", line)]
    assert [line[1] for line in lines] == [*EXERCISES, *HUNTS]
    assert all(weeks == sorted(weeks) for weeks in ([x.week for x in table.values()] for table in (EXERCISES, HUNTS)))


def test_numbers_draw_bugs():
    """Each number has its bug, always the same one, and all bugs have one."""
    for task in HUNTS.values():
        drawn = [copies.drawn(task, number)[0] for number in range(len(task.bugs))]
        assert {*drawn} == {*task.bugs} and copies.drawn(task, 17) == copies.drawn(task, 17)


BAD = [
    (start, ["gea"], "there is no exercise gea; did you mean gae"),
    (start, ["gae", "replay"], "one copy is of one script, not of ppo.py and dqn.py"),
    (start, ["gae", "hunt-ppo"], "a hunt has a copy of its own"),
    (check, ["gae"], "there is no my_work.ppo.py: python exercises/start.py gae"),
    (check, ["hunt-dqn", "--hint"], "is in the second line of its copy"),
    (release, ["gae", "--out", "full"], "full holds something already"),
    (release, ["gae", "hunt-ppo"], "gae and hunt-ppo are all about ppo.py"),
    (release, ["hunt-dqn", "td3-target"], "ddpg_td3.py holds the solution of hunt-dqn, polyak"),
]


@pytest.mark.parametrize("module, arguments, words", BAD)
def test_what_can_be_mended_is_told(module, arguments, words, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    with pytest.raises(BadInput, match=words):
        run(module, monkeypatch, tmp_path, *arguments)


def test_hints_come_one_by_one(tmp_path, monkeypatch, capsys):
    for name in EXERCISES:
        two, known = mechanism.hints(name)
        assert len(two) == 2 and known, name
    run(check, monkeypatch, tmp_path, "gae", "--hint", "2")
    text = " ".join(capsys.readouterr().out.split())
    first, second = mechanism.hints("gae")[0]
    assert second in text and first not in text


# ------------------------------------------------------------------------------------- processes: what a file cannot do


def graded(folder, monkeypatch, source, *arguments, name="epsilon-greedy"):
    """check.py with --json for a file of this source: ({test: score}, all output, exit code)."""
    (folder / mechanism.find(name).file).write_text(source, encoding="utf-8")
    results = folder / "results.json"
    try:
        code = run(check, monkeypatch, folder, name, *arguments, "--work", folder, "--json", results)
    except BadInput:
        code = 2
    tests = json.loads(results.read_text())["tests"]
    return {t["name"]: t["score"] for t in tests}, "\n".join(t["output"] for t in tests), code


HEAD = f"{copies.BEGUN}epsilon-greedy\n"
RIGHT = HEAD + SOUND["epsilon-greedy"]
ALWAYS_0 = HEAD + "def epsilon_greedy(values, epsilon, rng):\n    return 0\n"
FORGED = """
import json, os, sys, atexit
line = "".join(json.dumps({"result": x, "kinds": 7}) + "\\n" for x in ([1, 1, 1], {"a": "b"}, "x", [[[None]]]))
for number in range(1, 9):
    try: os.write(number, line.encode())
    except OSError: pass
for name in ("results.json", "../results.json", "answers.jsonl", "numbers.json"):
    open(name, "w").write('{"tests": [{"name": "all", "score": 100, "max_score": 100}]}')
import mechanism
mechanism.close = mechanism.judge = lambda *anything: True
for task in mechanism.EXERCISES.values(): task.cases = dict(list(task.cases.items())[:1])
atexit.register(os._exit, 0)
"""


def test_a_file_cannot_change_its_grade(tmp_path, monkeypatch):
    """Whatever it writes, and whatever it does to its own process; nor do files beside it count."""
    for name in ("check.py", "mechanism.py", "random.py", "sitecustomize.py"):
        (tmp_path / name).write_text("import os; os._exit(0)\n")
    scores, text, code = graded(tmp_path, monkeypatch, ALWAYS_0 + FORGED)
    assert sum(scores.values()) == 0 and len(scores) == 5 and code == 1


def test_each_file_that_cannot_be_judged_is_told(tmp_path, monkeypatch, capsys):
    """The others are judged all the same, and what comes next begins on a line of its own."""
    (tmp_path / "qlearning.py").write_text(HEAD + "def f(:\n")
    (tmp_path / "ppod.py").write_text(copies.working_copy([EXERCISES["ppod-priorities"]]), encoding="utf-8")
    names = ["epsilon-greedy", "gae", "ppod-priorities"]
    with pytest.raises(BadInput, match=r"qlearning.py cannot be imported: SyntaxError.*; there is no .*ppo.py"):
        run(check, monkeypatch, tmp_path, *names, "--work", tmp_path)
    text = capsys.readouterr().out
    assert "with a pencil: not judged\nppod-priorities: " in text and "This function is still blank" in text


def test_a_file_is_alone_and_nothing_of_it_stays(tmp_path, monkeypatch):
    """Its process works in an empty folder of its own, not among submissions; the folder is gone when all is over."""
    (tmp_path / "others.py").write_text("")
    look = "import os\nopen('left.txt', 'w').write('x')\nprint('FOLDER', os.getcwd(), sorted(os.listdir()))\n"
    scores, text, code = graded(tmp_path, monkeypatch, RIGHT + look, "--up-to", "1")
    folder, files = re.search(r"FOLDER (\S+) (\[.*\])", text).groups()
    assert sum(scores.values()) == 50 and code == 0
    assert files == "['left.txt', 'qlearning.py']" and not Path(folder).exists() and Path(folder) != tmp_path


def test_a_file_cannot_take_the_points_of_others(tmp_path, monkeypatch):
    """A solved exercise of a script says nothing about another one of the same script."""
    scores, text, code = graded(tmp_path, monkeypatch, RIGHT, "--up-to", "1", name="td-targets")
    assert sum(scores.values()) == 0 and "has no function sarsa_target" in text and code == 1


ENDLESS = [
    "while True: pass\n",
    "import time\nwhile True:\n    try: time.sleep(10**6)\n    except BaseException: pass\n",
    "import os\nos.close(1); os.close(2)\nwhile True: pass\n",
    "while True: print('x' * 10**6)\n",
    "import os\nif hasattr(os, 'fork') and os.fork(): os._exit(0)\nwhile True: pass\n",
]


@pytest.mark.parametrize("source", [ENDLESS[0], *(pytest.param(x, marks=pytest.mark.slow) for x in ENDLESS[1:])])
def test_a_file_cannot_hang_the_grader(source, tmp_path, monkeypatch):
    """Nor where there are no process groups, as on Windows: then the process itself is ended."""
    if "sleep" in source:
        monkeypatch.delattr(os, "killpg", raising=False)
    monkeypatch.setattr(check, "LIMITS", dict.fromkeys(check.LIMITS, 0.5))
    monkeypatch.setattr(check, "MOST", 10**7)
    begun = time.monotonic()
    scores, text, code = graded(tmp_path, monkeypatch, HEAD + source)
    assert scores == {"epsilon-greedy: qlearning.py": 0} and code == 2 and time.monotonic() - begun < 60
    assert "given up after 0.5 seconds" in text or "without an end" in text or "has ended its process" in text


@pytest.mark.slow
def test_a_function_that_ends_its_process_costs_its_own_case_only(tmp_path, monkeypatch):
    source = RIGHT.replace("    n = len", "    if epsilon == 0.4:\n        __import__('os')._exit(0)\n    n = len")
    scores, text, code = graded(tmp_path, monkeypatch, source, "--up-to", "1")
    assert [*scores.values()] == [16, 0, 17] and "has ended its process" in text and code == 1


@pytest.mark.slow
def test_results_are_written_after_each_step(tmp_path, monkeypatch):
    """A run that never ends is given up; the steps before it keep their points."""
    written, write = [], check.write_json
    monkeypatch.setattr(check, "write_json", lambda path, tests: (written.append(len(tests)), write(path, tests)))
    monkeypatch.setattr(check, "LIMITS", check.LIMITS | {"learn": 20})
    ends = "class Args:\n    def __init__(self, **given): pass\ndef train(args):\n    while True: pass\n"
    scores, text, code = graded(tmp_path, monkeypatch, RIGHT + ends)
    assert [*scores.values()] == [16, 17, 17, 20, 0][: len(scores)] or sum(scores.values()) == 70
    assert "given up after 20 seconds" in text and written == [3, 4, 5]


def test_an_endless_case_costs_its_own_points_only(tmp_path, monkeypatch):
    """The second case of three never ends; the others count."""
    assert check.LIMITS["answers"] == 10
    monkeypatch.setattr(check, "LIMITS", check.LIMITS | {"answers": 1})
    source = RIGHT.replace("    n = len", "    while epsilon == 0.4: pass\n    n = len")
    scores, text, code = graded(tmp_path, monkeypatch, source, "--up-to", "1")
    assert [*scores.values()] == [16, 0, 17] and "given up after 1 seconds" in text and code == 1


def test_a_link_is_no_submission(tmp_path, monkeypatch):
    try:
        (tmp_path / "qlearning.py").symlink_to(ROOT / "qlearning.py")
    except OSError:
        pytest.skip("no links here")
    with pytest.raises(BadInput, match="is a link"):
        run(check, monkeypatch, tmp_path, "epsilon-greedy", "--work", tmp_path)


@pytest.mark.slow
def test_from_the_list_to_a_solved_exercise(tmp_path, monkeypatch, capsys):
    """start.py and check.py as a student uses them: three steps, and prints."""
    run(start, monkeypatch, tmp_path, "epsilon-greedy")
    path = tmp_path / "my_work/qlearning.py"
    assert run(check, monkeypatch, tmp_path, "epsilon-greedy") == 1
    assert "This function is still blank" in capsys.readouterr().out
    path.write_text(path.read_text() + "print('hello \\x1b[2J')\n" + SOUND["epsilon-greedy"])
    assert run(check, monkeypatch, tmp_path, "epsilon-greedy") == 0
    text = capsys.readouterr().out
    assert "step 3 of 3, learning CliffWalking-v1: passed" in text and "printed | hello ?" in text
    assert "epsilon-greedy is solved\nExploring keeps" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gae", "double-dqn", "td3-target", "joint-state", "ppod-priorities", "build-ppo"])
def test_originals_learn_enough(name, tmp_path, monkeypatch):
    source = copies.with_begun(copies.source_of(EXERCISES[name].script), [name])
    scores, text, code = graded(tmp_path, monkeypatch, source, name=name)
    assert sum(scores.values()) == 100 and code == 0, text


# --------------------------------------------------------------------------------------- handouts, Gradescope, teachers


@pytest.mark.parametrize("names, number", [(["gae", "clip", "hunt-es"], 0), (["hunt-es"], 1)])
def test_a_handout_holds_no_solution(names, number, tmp_path):
    """No line of a solution, no bug, no mistake, and nothing about other exercises."""
    out = release.release(names, tmp_path / "handout", number)
    files = {path.name: path.read_text(encoding="utf-8") for path in out.iterdir()}
    for task in map(mechanism.find, names):
        text = files[task.file]
        if task.name in EXERCISES:
            secrets = [line.strip() for name in task.blanks for line in lines_of_body(task.script, name)]
            secrets = [
                line for line in secrets if len(line) > 35 and not re.search("reversed|empty_like|zeros_like", line)
            ]
            assert secrets and not [line for line in secrets if any(line in each for each in files.values())]
        else:
            bug, _ = copies.drawn(task, number)
            new = bug.split(" -> ")[1]
            assert new in text and not any(new in files[name] for name in files.keys() - {task.file})
        assert task.name in files["README.md"] and task.name in json.loads(files["numbers.json"])
    tables = "".join(files.get(f"{table}.py", "") for table in mechanism.TABLES)
    assert {*re.findall(r"(?:exercise|hunt)\('([a-z0-9-]+)'", tables)} == {*names} and " -> " not in tables


def lines_of_body(script, name):
    source = copies.source_of(script)
    lines = source.splitlines()
    first, last = copies.body_span(copies.definitions(source)[name])
    return [line.split("  #")[0] for line in lines[first:last]]


LATER = [  # (what is handed out, functions of later weeks that stand in the same scripts)
    (["bandit", "epsilon-greedy"], "qlearning.py", ["play_episode", "expected_sarsa_target", "double_q_target"]),
    (["returns", "gae"], "ppo.py", ["policy_loss", "value_loss", "compute_vtrace"]),
    (["week", "3"], "qlearning.py", ["play_episode", "expected_sarsa_target", "double_q_target"]),
]


@pytest.mark.parametrize("names, file, later", LATER)
def test_a_handout_gives_no_other_week_away(names, file, later, tmp_path, monkeypatch):
    """No line of these functions can be read, yet the scripts run; a week has its sheet with what it needs."""
    run(release, monkeypatch, tmp_path, *names, "--out", "out")
    texts = {str(path.relative_to(tmp_path)): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.*")}
    secrets = [line.strip() for name in later for line in lines_of_body(file, name)]
    secrets = [line for line in secrets if len(line) > 35 and copies.source_of(file).count(line) == 1]
    assert secrets and [line for line in secrets if any(line in text for text in texts.values())] == []
    folder = tmp_path / "out" / ("sheet" if names[0] == "week" else "")
    if names[0] == "week":
        assert {path.name for path in folder.iterdir()} == {"README.md", "compare.py", "qlearning.py"}
        assert {"prediction.py", "check.py"} <= {path.name for path in folder.parent.iterdir()}
    original = mechanism.original(file)
    try:
        module = mechanism.load(folder / file)
        if file == "ppo.py":
            import torch

            ratio, advantage = torch.tensor([0.5, -0.5]), torch.tensor([1.0, 2.0])
            assert module.policy_loss(ratio, advantage, 0.2) == original.policy_loss(ratio, advantage, 0.2)
        else:
            assert module.double_q_target(1.0, 0.5, [3.0, 7.0], [9.0, 4.0]) == 3.0
    finally:
        sys.modules[original.__name__] = original


def test_a_milestone_is_not_solved_beside_it(tmp_path):
    """Week 4 asks for functions of build_dqn.py that dqn.py has in another text."""
    out = release.release_week(4, tmp_path / "out")
    for path in (out / "dqn.py", out / "sheet/dqn.py"):
        text = path.read_text(encoding="utf-8")
        assert 'later("td_targets"' in text and 'later("dqn_loss"' in text


@pytest.mark.slow
def test_the_script_of_a_sheet_trains(tmp_path, monkeypatch):
    """With what this week asks for packed, a run gives what the script's own run gives."""
    rows = []
    release.release_week(3, tmp_path / "out")
    for script in (tmp_path / "out/sheet/qlearning.py", ROOT / "qlearning.py"):
        flags = "--algorithm sarsa --total-timesteps 2000 --eval-episodes 2 --no-progress --run-dir".split()
        folder = tmp_path / script.parent.name
        subprocess.run([sys.executable, script, *flags, folder], check=True, capture_output=True)
        table = (folder / "metrics.csv").read_text().splitlines()
        keep = [i for i, name in enumerate(table[0].split(",")) if name not in ("seconds", "sps")]
        rows.append([[line.split(",")[i] for i in keep] for line in table])
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_a_handout_stands_alone(tmp_path):
    """Away from the repository its checks fail on what was handed out, name a mistake, and pass what was solved."""
    out = release.release(["gae", "epsilon-greedy", "hunt-es"], tmp_path / "handout")
    judged = lambda *names: subprocess.run(
        [sys.executable, "check.py", *names], cwd=out, capture_output=True, text=True, env={"PATH": os.environ["PATH"]}
    )
    done = judged("gae", "epsilon-greedy", "hunt-es")
    assert done.returncode == 1 and done.stdout.count("FAILED") == 3, done.stdout + done.stderr
    wrong = SOUND["gae"].replace("gamma * gae_lambda", "gamma")
    text = (out / "ppo.py").read_text()
    (out / "ppo.py").write_text(text + wrong)
    assert "This is what one gets by forgetting lambda" in judged("gae").stdout
    (out / "ppo.py").write_text(text + SOUND["gae"])
    (out / "es.py").write_text(copies.source_of("es.py"))
    done = judged("gae", "hunt-es")
    assert done.returncode == 0 and done.stdout.count("is solved") == 2, done.stdout + done.stderr
    assert judged("clip").returncode == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Gradescope is Linux")
def test_the_zip_for_gradescope(tmp_path):
    """Unpacked as Gradescope does it, it grades an upload. What setup.sh installs is here already."""
    release.write_zip([mechanism.find("epsilon-greedy")], tmp_path / "autograder.zip", up_to=2)
    source, upload = tmp_path / "source", tmp_path / "submission"
    zipfile.ZipFile(tmp_path / "autograder.zip").extractall(source)
    for folder in (upload, tmp_path / "results"):
        folder.mkdir()
    (upload / "qlearning.py").write_text(RIGHT)
    environment = os.environ | {"SOURCE": str(source), "PYTHON": sys.executable}
    done = subprocess.run(["bash", source / "run_autograder"], env=environment, capture_output=True, text=True)
    tests = json.loads((tmp_path / "results/results.json").read_text())["tests"]
    assert done.returncode == 0 and [test["score"] for test in tests] == [16, 17, 17, 20], done.stderr
    assert (source / "requirements.txt").read_text() == release.REQUIREMENTS


# ------------------------------------------------------------------------------------------- sheets, and the course

SHEETS = sorted((ROOT / "exercises/sheets").glob("week-*.md"))
COURSE = (ROOT / "docs/exercises.md").read_text(encoding="utf-8").split("## A course of twelve weeks")[1]


def test_the_course_has_every_exercise_hunt_and_sheet():
    course = COURSE.split("\n## ")[0]
    for week, text in enumerate(course.split("\n### Week ")[1:], 1):
        here = [task.name for task in [*EXERCISES.values(), *HUNTS.values()] if task.week == week]
        assert {*re.findall(r"`([a-z0-9-]+)`", text)} >= {*here}, week
        assert (
            f"exercises/sheets/week-{week:02}.md" in text and (ROOT / f"exercises/teachers/week-{week:02}.md").exists()
        )
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (\d+) \| (\w+) \|", course, re.MULTILINE)
    assert rows == [(task.name, str(task.minutes), task.level) for task in EXERCISES.values()]
    assert week == len(SHEETS) == 12


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda path: path.stem)
def test_every_command_of_a_sheet_is_accepted(sheet):
    """Fails if a flag, a value or an environment does not exist, or if two commands would make the same run."""
    folders = []
    for python, script, *flags in commands(sheet.read_text(encoding="utf-8")):
        module = importlib.import_module(script.removesuffix(".py"))
        if script == "compare.py":
            tyro.cli(module.Args, args=flags)
            continue
        args = module.tuned(*flags)
        if script in ("mappo.py", "maddpg_matd3.py"):
            importlib.import_module(args.env_id)
        else:
            gym.spec(args.env_id)  # an error if there is none
        folders.append(args.run_dir)
        assert python == "python" and args.run_dir.startswith(f"runs/{sheet.stem}/")
    assert len({*folders}) == len(folders) >= 6


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda path: path.stem)
def test_a_sheet_asks_and_does_not_tell(sheet):
    """As many answers for teachers as questions, and none of them in the sheet."""
    asked, answers = (path.read_text(encoding="utf-8") for path in (sheet, ROOT / "exercises/teachers" / sheet.name))
    parts = lambda text: re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    numbered = lambda text: len(re.findall(r"^\d\. ", text, re.MULTILINE))
    assert [title for title, _ in parts(asked)] == ["Before you run", "Run", "Explain", "Quiz"]
    quiz = parts(asked)[3][1]
    assert 2 <= numbered(quiz) <= 3 and numbered(quiz) == len(re.findall(r"<details>.+</details>", quiz))
    assert [numbered(text) for _, text in parts(asked)][:3:2] == [numbered(text) for _, text in parts(answers)][::2]
    for sentence in re.split(r"(?<=[.:?])\s", " ".join(answers.split("\n", 1)[1].split())):
        assert len(sentence) < 30 or sentence not in " ".join(asked.split()), sentence
