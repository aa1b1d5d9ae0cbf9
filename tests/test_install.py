"""What is installed, and where: one set of ranges for all scripts, a lock within them, what only Windows meets."""

import ast
import json
import re
import sys
import tomllib
from pathlib import PureWindowsPath

import pytest
import shared_code
from packaging.requirements import Requirement
from run_folder import command
from tools import catches

SCRIPT = "ppo"
ROOT = shared_code.ROOT
PYTHONS = ">=3.11,<3.15"  # to the newest for which moviepy's Pillow and Box2D have wheels
SCRIPTS = [*shared_code.scripts(), *(ROOT / name for name in shared_code.NO_ALGORITHM)]
WITH_PACKAGES = ("build_dqn.py", "build_ppo.py", "planning.py")  # Python alone is enough for the others
HEADS = [*SCRIPTS, *(ROOT / "exercises/scripts" / name for name in WITH_PACKAGES)]


def text(name):
    """The text of a file in the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def lines(name):
    """The requirements in a file, without comments."""
    return [line.split("#")[0].strip() for line in text(name).splitlines() if line.split("#")[0].strip()]


RANGES = lines("requirements.txt")


@pytest.mark.parametrize("path", HEADS, ids=lambda path: path.name)
def test_heads_repeat_requirements(path):
    """Fails if `uv run` of a script would install what requirements.txt does not, or lack what it imports."""
    source = text(path)
    # The reference regular expression of PEP 723.
    blocks = re.findall(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$", source)
    (content,) = [block[1] for block in blocks if block[0] == "script"]
    head = tomllib.loads("".join(line[2:] or "\n" for line in content.splitlines(keepends=True)))
    assert head["requires-python"] == PYTHONS and set(head["dependencies"]) <= set(RANGES)
    imports = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            imports |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imports.add(node.module.split(".")[0])
    assert imports - sys.stdlib_module_names <= {Requirement(line).name for line in head["dependencies"]}


def test_the_lock_is_within_the_ranges():
    """Fails if requirements.txt with -c requirements-lock.txt has no solution, or if a lower bound is missing."""
    locked = {lock.name: lock for lock in map(Requirement, lines("requirements-lock.txt"))}
    for allowed in map(Requirement, RANGES):
        (version,) = locked[allowed.name].specifier
        assert version.operator == "==" and version.version in allowed.specifier
        assert ">=" in {bound.operator for bound in allowed.specifier}


def test_the_workflow_does_what_readme_says():
    """Fails if the commands with which README begins, or the Pythons that it names, are not those that are tested."""
    first, last = re.search(r"Python (3\.\d+) to (3\.\d+)", text("README.md")).groups()
    assert PYTHONS == f">={first},<3.{int(last[2:]) + 1}"
    workflow = text(".github/workflows/tests.yml")
    assert f'python: ["{first}", "{last}"]' in workflow
    commands = re.search(r"```sh\n(.*?)```", text("README.md"), re.DOTALL)[1].splitlines()
    assert len(commands) == 3 and all(f"- run: {line}\n" in workflow for line in commands)


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_installs_ranges(path):
    """Fails if a notebook has no way to Colab, or if its first cell replaces what Colab has and a script can use."""
    cells = json.loads(text(path))["cells"]
    assert "(https://colab.research.google.com/" in "".join(cells[0]["source"])
    code = next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    installed = re.findall(r'"(\S+>=\S+)"', re.search(r"%pip install .*", code)[0])
    assert installed and set(installed) <= set(RANGES)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_pipe_of_windows_can_take_it(path):
    """Fails if --help or a message has a sign that cp1252 lacks, in which Windows writes to a pipe or a file."""
    source = text(path)
    tree, lines = ast.parse(source), source.splitlines()
    printed = [ast.get_docstring(tree)]
    for node in ast.walk(tree):
        is_message = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("print", "UserError")
        if is_message or isinstance(node, ast.ClassDef) and node.name == "Args":
            printed.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    assert len(printed) > 3
    for words in printed:
        words.encode("cp1252")


@catches("Run.__init__, a colon stays: '[/:]' -> '[/]'")
def test_a_run_folder_has_a_name_for_windows(script, tmp_path, monkeypatch):
    """`module:Id-v0` has a sign that means a drive."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script.Run, "draw_curve", lambda run: None)
    small = "--num-envs 2 --num-steps 16 --num-minibatches 2 --total-timesteps 64 --eval-episodes 2 --no-progress"
    assert command(script, f"--env-id run_worlds:Plain-v0 {small}") == 0
    names = [path.name for path in tmp_path.rglob("*")]
    assert len(names) > 5 and not set("".join(names)) & set('<>:"/\\|?*')
    assert all(PureWindowsPath(name).name == name for name in names)
