"""Rules that hold across scripts: same name, same code; no sibling imports; nothing happens on import."""

import ast
import importlib
import os
import shutil
import subprocess
import sys

import pytest
import shared_code

SCRIPTS = shared_code.scripts()
FILES = [
    *SCRIPTS,
    *(shared_code.ROOT / name for name in shared_code.NO_ALGORITHM if (shared_code.ROOT / name).exists()),
]
each_script = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
BUDGETS = {  # at most: characters of the whole file, lines of the story
    "ppo.py": (69250, 549),
    "ddpg_td3.py": (65050, 468),
    "dqn.py": (60600, 387),
    "es.py": (61900, 378),
    "maddpg_matd3.py": (78450, 623),
    "mappo.py": (87100, 699),
    "ppo_ddp.py": (78500, 607),
    "ppo_masked.py": (71100, 551),
    "ppo_rnd.py": (73950, 636),
    "ppod.py": (92850, 864),
    "qlearning.py": (52050, 297),
    "rainbow.py": (76600, 664),
    "reinforce.py": (49800, 299),
    "sac.py": (66950, 512),
}
RUN_CHARACTERS = 25_400

DRIFTS_PPO = '''@functools.cache
def drifts(x):
    """Not equal in both."""

    def inner():
        return x

    return inner()  # ppo's
'''
DRIFTS_A2C = '''def drifts(x):
    """Not equal in both."""
    return x  # the decorator is missing as well
'''
NET_PPO = '''class Net:
    """Also drifts."""

    size = 64
'''
NET_A2C = '''class Net:
    """Also drifts."""

    size = 32
    more = """a string
that ends here"""
'''
FIRST = f'''"""The first."""
import functools

CONSTANT = 1


class Args:
    """Of the first."""


@functools.cache
def same(x):
    """Equal in both."""
    return x + 1  # with a comment


{DRIFTS_PPO}

{NET_PPO}

def train(args):
    """Of the first."""
'''
SECOND = f'''"""The second."""
import functools


{NET_A2C}

class Args:
    """Of the second."""


{DRIFTS_A2C}

# A comment that stays.
def own(x):
    """Only here."""
    return x


@functools.cache
def same(x):
    """Equal in both."""
    return x + 1  # with a comment


def train(args):
    """Of the second."""
    return 2


def main():
    """Of the second."""


if __name__ == "__main__":
    main()
'''


@pytest.fixture
def folder(tmp_path):
    """A repository of two scripts that have drifted apart; what is not in its root, or not a script, is no concern."""
    (tmp_path / "ppo.py").write_text(FIRST)
    (tmp_path / "a2c.py").write_text(SECOND)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "other.py").write_text("def drifts():\n    pass\n")
    (tmp_path / "notes.txt").write_text("def drifts(")
    return tmp_path


def test_drift_is_found_and_shown(folder):
    """Fails if a difference in a body, a decorator or a class goes unseen, or if Args or train are compared."""
    found = dict(shared_code.problems(folder))
    assert set(found) == {"drifts", "Net"}
    assert found["drifts"].startswith("--- ppo.py\n+++ a2c.py\n")  # ppo.py is the original, though a2c.py sorts first
    assert "\n-@functools.cache\n" in found["drifts"]
    assert "\n-    size = 64\n+    size = 32\n" in found["Net"]


def test_drift_between_scripts_other_than_ppo_is_found(folder):
    """Fails if only ppo.py is compared with the others: dqn.py and td3.py share names that it does not have."""
    (folder / "dqn.py").write_text("def only_off_policy():\n    return 1\n")
    (folder / "td3.py").write_text("def only_off_policy():\n    return 2\n")
    assert "only_off_policy" in dict(shared_code.problems(folder))


def test_from_mends_every_shared_name_and_nothing_else(folder):
    """Fails if a replacement hits the wrong lines, forgets decorators, or touches exempt names or ppo.py itself."""
    changes = shared_code.copy_from("ppo.py", folder)
    assert sorted(changes) == ["a2c.py: Net replaced by that of ppo.py", "a2c.py: drifts replaced by that of ppo.py"]
    assert (folder / "ppo.py").read_text() == FIRST
    first, second = shared_code.sources(folder / "ppo.py"), shared_code.sources(folder / "a2c.py")
    assert all(second[name] == first[name] for name in ("same", "drifts", "Net"))
    expected = SECOND.replace(DRIFTS_A2C, DRIFTS_PPO).replace(NET_A2C, NET_PPO)
    assert (folder / "a2c.py").read_text() == expected  # everything else stays as it was, comments included
    assert shared_code.problems(folder) == []
    assert shared_code.copy_from("ppo.py", folder) == []


RUN_SECTION = '''
# ===== run: the same in every script =====


def main():
    """Train."""
    return 1
'''


def test_the_run_section_is_the_same_to_the_last_byte(folder):
    """Fails if a difference in the run section goes unseen, be it a comment, or if --from does not mend it."""
    (folder / "ppo.py").write_text(FIRST + RUN_SECTION)
    (folder / "a2c.py").write_text(FIRST + RUN_SECTION.replace("same in", "same, in"))
    assert [name for name, _ in shared_code.problems(folder)] == [shared_code.RUN]
    shared_code.copy_from("ppo.py", folder)
    assert (folder / "a2c.py").read_text() == FIRST + RUN_SECTION


def test_a_name_defined_twice_is_an_error(folder):
    """Fails if the second definition hides the first from the comparison."""
    (folder / "a2c.py").write_text(SECOND + "\n\ndef own():\n    return 2\n")
    with pytest.raises(ValueError, match="a2c.py defines own twice"):
        shared_code.problems(folder)


def test_command_line(folder):
    """Fails if the exit code does not tell, or if the command looks anywhere but in the root above its own folder."""
    command = [sys.executable, str(folder / "tests" / "shared_code.py")]
    shutil.copy(shared_code.__file__, command[1])
    drifted = subprocess.run(command, capture_output=True, text=True)
    assert drifted.returncode == 1 and "drifts differs:\n--- ppo.py" in drifted.stdout
    mended = subprocess.run([*command, "--from", "ppo.py"], capture_output=True, text=True)
    assert mended.returncode == 0 and "a2c.py: Net replaced by that of ppo.py" in mended.stdout
    clean = subprocess.run(command, capture_output=True, text=True)
    assert (clean.returncode, clean.stdout) == (0, "")
    unknown = subprocess.run([*command, "--from", "nothing.py"], capture_output=True, text=True)
    assert unknown.returncode == 2 and "nothing.py" in unknown.stderr


# ---------------------------------------------------------------------------------------------- the real repository


def test_same_name_same_code():
    """Fails if a shared function or class is changed in one script only."""
    assert SCRIPTS and SCRIPTS[0].name == "ppo.py"
    found = shared_code.problems()
    mend = "to give all scripts ppo.py's version: python tests/shared_code.py --from ppo.py"
    assert not found, "\n\n".join([f"{name} differs:\n{diff}" for name, diff in found] + [mend])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_story_comes_first_and_is_short(path):
    """Fails if the story, or the section that runs it, outgrows what a reader can be asked to read."""
    lines = path.read_text(encoding="utf-8").split("\n")
    heads = [number for number, line in enumerate(lines) if line.startswith("# =====")]
    assert [lines[number].split(":")[0] for number in heads] == ["# ===== helpers", shared_code.RUN]
    characters, story = BUDGETS[path.name]
    assert len("\n".join(lines)) <= characters and heads[0] <= story
    assert len("\n".join(lines[heads[1] :])) <= RUN_CHARACTERS
    assert 12 * sum(len(line) > 100 for line in lines) <= len(lines)  # width does not buy shortness
    (train,) = [node for node in ast.parse("\n".join(lines)).body if getattr(node, "name", "") == "train"]
    assert train.end_lineno < heads[0] and train.end_lineno - train.lineno < 75


def imported_modules(tree):
    """Every module that is imported anywhere in the tree, functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


@each_script
def test_no_script_imports_a_sibling(path):
    """Fails if a script could not be copied away alone."""
    local = {p.stem for p in path.parent.glob("*.py")} | {p.name for p in path.parent.iterdir() if p.is_dir()}
    for module in imported_modules(ast.parse(path.read_text(encoding="utf-8"))):
        assert not module.startswith(".") and module.split(".")[0] not in local, f"{path.name} imports {module}"


WATCH_IMPORT = """
import importlib, os, pickle, random, sys
import numpy, torch

def state():
    return pickle.dumps((random.getstate(), numpy.random.get_state(), torch.get_rng_state().numpy()))

before, threads, loaded = state(), torch.get_num_threads(), set(sys.modules)
sys.path.insert(0, sys.argv[1])
importlib.import_module(sys.argv[2])
assert state() == before, "a global random generator was touched"
assert torch.get_num_threads() == threads, "the number of threads was changed"
assert not torch.cuda.is_initialized(), "CUDA was initialised"
assert "matplotlib" not in sys.modules, "matplotlib was imported: it is slow, and only the curve needs it"
assert os.listdir() == [], f"files were written: {os.listdir()}"
print("nothing happened")
"""


@pytest.mark.slow
@each_script
def test_importing_a_script_does_nothing(path, tmp_path):
    """Fails if an import seeds, draws, prints, writes a file, wakes the GPU or loads what only the curve needs."""
    command = [sys.executable, "-c", WATCH_IMPORT, str(path.parent), path.stem]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert (done.returncode, done.stdout) == (0, "nothing happened\n"), done.stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_mistyped_id_is_one_line(path):
    """Also where make_envs is the script's own."""
    script = importlib.import_module(path.stem)
    with pytest.raises(script.UserError, match="CartPol"):
        script.make_envs(script.tuned(env_id="CartPol-v1"), 1)


@each_script
def test_everything_public_is_documented(path):
    """Fails if a public function or class, or the script itself, has no docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    public = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")]
    assert public and not [node.name for node in public if not ast.get_docstring(node)]
