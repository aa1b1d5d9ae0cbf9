"""Make a folder to hand out: working copies of scripts, their checks, and what else a student needs; no solution.

    python exercises/release.py gae hunt-dqn --out handout/
    python exercises/release.py hunt-ppo --student 17 --out handout-17/  # a bug drawn from a number
    python exercises/release.py week 3 --out handout/            # the exercises of a week, and what its sheet needs
    python exercises/release.py --gradescope gae hunt-dqn --out autograder.zip    # for teachers: what grades uploads

A handout stands alone: `cd handout && pip install -r requirements.txt && python check.py gae`. Of the tables it holds
only the entries that are named, without mistakes and bugs; numbers.json has what the originals give.
"""

import argparse
import ast
import json
import re
import shutil
import zipfile
from pathlib import Path

from copies import asked_from, definitions, packed, source_of, working_copy
from mechanism import EXERCISES, HERE, HUNTS, ROOT, TABLES, BadInput, Reference, find, run_main
from start import describe

CHECKS = ("check.py", "copies.py", "inputs.py", "mechanism.py", "pictures.py", "probes.py", "processes.py", "runner.py")
REQUIREMENTS = (ROOT / "requirements.txt").read_text(encoding="utf-8").split("# Tests and style")[0]


def by_script(tasks):
    """{script: its tasks}. BadInput if a hunt is not alone with its script."""
    groups = {}
    for task in tasks:
        groups.setdefault(task.script, []).append(task)
    for script, chosen in groups.items():
        if len(chosen) > 1 and not all(task.blanks for task in chosen):
            names = " and ".join(task.name for task in chosen)
            raise BadInput(f"{names} are all about {script} and would give each other away: hand them out separately")
    return groups


def repeated(task, script):
    """The functions with a task's solution that a script has as well: scripts repeat each other, all but train."""
    names = task.blanks or [bug.split(": ")[0] for bug in task.bugs]
    return [
        name for name in names if task.script != script and name != "train" and name in definitions(source_of(script))
    ]


def cut_table(source, names):
    """The source of a table with the entries of these names only, without mistakes, bugs, comments and what only these
    have used.
    """
    kept = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Expr):  # the docstring, or an entry
            if isinstance(node.value, ast.Constant) or node.value.args[0].value not in names:
                continue
            for keyword in node.value.keywords:
                if keyword.arg in ("mistakes", "bugs"):
                    keyword.value = ast.Dict([], [])
        kept.append(node)
    before = None
    while before != len(kept):
        before = len(kept)
        used = {name for node in kept for name in names_in(node, ast.Load)}
        kept = [node for node in kept if not names_bound(node) or names_bound(node) & used]
    return ast.unparse(ast.Module(kept, [])) + "\n"


def names_in(node, context):
    """The names within a node that are read (ast.Load), or given something to (ast.Store)."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, context)}


def names_bound(node):
    """The names that a definition or an assignment at the top of a module gives something to."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    return names_in(node, ast.Store) if isinstance(node, ast.Assign) else set()


def numbers(task):
    """What a handout's check compares with."""
    reference = Reference(task)
    return {"right": reference.answers(), "mistakes": {name: reference.answers(name) for name in reference.messages}}


SHEET = """# What there is to do

Once: `pip install -r requirements.txt`. A check stops at the first thing that is wrong and says what to look at next.
An exercise has up to three steps: your functions on numbers that can be followed with a pencil; the same on random
inputs; and a run that has to learn. `--up-to 1` takes only the first. `--hint` and `--hint 2` help you on.
A bug hunt: run the file, and look at `learning_curve.png` and `metrics.csv` in its run folder. You are judged by what
it does, so mend it as you like: all but one line of it is sound. If there is a folder `sheet/`, its `README.md` is the
experiment of the week; type its commands in that folder, in bash (on a Mac type `bash` first, on Windows use Git Bash).
"""


def sheet(tasks, number):
    """The instructions, as Markdown."""
    lines = [SHEET]
    for task in tasks:
        lines += [
            f"## {task.name}: `{task.file}`, {task.level or 'a hunt'}, about {task.minutes} minutes",
            "",
            *describe(task, number),
            "",
        ]
        lines += [f"Then: `python check.py {task.name}`", ""]
    return "\n".join(lines)


def without_later(tasks, number, chosen):
    """A working copy for these tasks, in which what others that were chosen ask for, or later weeks, cannot be read."""
    source, own = working_copy(tasks, number), set()
    for task in tasks:
        own |= {*task.blanks, *(bug.split(": ")[0] for bug in task.bugs)}
    names = asked_from(tasks[0].script, 1 + max(task.week for task in tasks))
    names += [name for task in chosen for name in repeated(task, tasks[0].script) if name not in names]
    return packed(source, [name for name in names if not {name, name.split(".")[0]} & own])


def release_week(week, out):
    """Write the handout of a week: its exercises, and in sheet/ the sheet, compare.py and the scripts that it runs.

    In these scripts all is packed that this week and later ones ask for: a sheet does not wait for a solution.
    """
    path = HERE / "sheets" / f"week-{week:02}.md"
    if not path.is_file():
        raise BadInput(f"there is no week {week}")
    tasks = [task for task in EXERCISES.values() if task.week == week]
    out = release([task.name for task in tasks], out)
    text = path.read_text(encoding="utf-8")
    (out / "sheet").mkdir()
    (out / "sheet" / "README.md").write_text(text, encoding="utf-8")
    scripts = {*re.findall(r"python (\w+\.py)", text)} - {"compare.py"}
    for script in scripts:
        names = [*asked_from(script, week), *(name for task in tasks for name in repeated(task, script))]
        source = packed(source_of(script), dict.fromkeys(names))
        (out / "sheet" / script).write_text(source, encoding="utf-8")
    shutil.copyfile(ROOT / "compare.py", out / "sheet" / "compare.py")
    if "ppod.py" in scripts:
        shutil.copytree(ROOT / "demos", out / "sheet" / "demos")
    return out


def release(names, out, number=0):
    """Write the handout; where a bug is drawn, it is that of this number, which stands nowhere in it. Returns its Path.

    BadInput if the folder holds something, or a name is unknown.
    """
    tasks, out = [find(name) for name in dict.fromkeys(names)], Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"{out} holds something already: remove it, or choose another --out")
    groups = by_script(tasks)
    for script in groups:
        for task in tasks:
            if names_of_bugs := [] if task.blanks else repeated(task, script):
                text = f"{script} holds the solution of {task.name}, {names_of_bugs[0]}"
                raise BadInput(f"{text}: hand them out separately")
    files = {group[0].file: without_later(group, number, tasks) for group in groups.values()}
    files |= {name: (HERE / name).read_text(encoding="utf-8") for name in CHECKS}
    for table in TABLES:
        entries = cut_table((HERE / f"{table}.py").read_text(encoding="utf-8"), names)
        files |= {f"{table}.py": entries} if "exercise(" in entries or "hunt(" in entries else {}
    intro, *sections = (HERE / "hints.md").read_text(encoding="utf-8").split("\n## ")
    files["hints.md"] = "\n## ".join([intro, *(each for each in sections if each.split("\n")[0] in names)])
    files["numbers.json"] = json.dumps({task.name: numbers(task) for task in tasks})
    files |= {"requirements.txt": REQUIREMENTS, "README.md": sheet(tasks, number)}
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")
    if any(task.script == "ppod.py" for task in tasks):
        shutil.copytree(ROOT / "demos" / "MountainCar-v0", out / "demos")
    return out


SETUP = """#!/usr/bin/env bash
# Once, when Gradescope builds the image.
set -euo pipefail
cd "$(dirname "$0")"
apt-get update
apt-get install -y curl
curl -LsSf https://astral.sh/uv/install.sh | env UV_INSTALL_DIR=/usr/local/bin sh
UV_PYTHON_INSTALL_DIR=/opt/python uv venv --python 3.12 /opt/grader
uv pip install --python /opt/grader/bin/python --torch-backend cpu -r requirements.txt
"""
RUN = """#!/usr/bin/env bash
# For each upload. Of it nothing is copied or run but the scripts asked for, by check.py, in processes of their own.
# Gradescope's limit has to be 10 minutes: after it there would be no results at all, so this ends a little earlier.
cd "${{SOURCE:-/autograder/source}}" || exit 1
rm -f ../results/results.json
timeout --kill-after=5 570 "${{PYTHON:-/opt/grader/bin/python}}" -B exercises/check.py {names} --up-to {up_to} \\
    --work ../submission --json ../results/results.json
test -f ../results/results.json  # wrong answers are no error: only if there are no results at all, the grader failed
"""


def write_zip(tasks, out, up_to=3):
    """Write the zip that grades these tasks at Gradescope, which unpacks it into /autograder/source and runs setup.sh
    once, then run_autograder for each upload.
    """
    scripts = by_script(tasks)
    run = RUN.format(names=" ".join(task.name for task in tasks), up_to=up_to)
    files = [*HERE.glob("*.py"), HERE / "hints.md", *(ROOT / script for script in scripts)]
    demos = (ROOT / "demos").rglob("*.npz") if "ppod.py" in scripts else []
    with zipfile.ZipFile(out, "x", zipfile.ZIP_DEFLATED) as archive:
        for name, text in {"setup.sh": SETUP, "run_autograder": run, "requirements.txt": REQUIREMENTS}.items():
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.create_system = 3  # Unix, also when it is written on Windows
            entry.external_attr = 0o755 << 16  # who may run it
            archive.writestr(entry, text)
        for path in [*files, *demos]:
            archive.write(path, path.relative_to(ROOT))


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="of exercises and hunts")
    parser.add_argument("--out", metavar="PATH", help="where to write (default: handout or autograder.zip)")
    parser.add_argument("--student", type=int, default=0, metavar="N", help="draws the bug of a hunt with several")
    parser.add_argument("--gradescope", action="store_true", help="a zip for Gradescope, which grades uploads")
    parser.add_argument("--up-to", type=int, choices=(1, 2, 3), default=3, help="--gradescope: the last step to take")
    args = parser.parse_args()
    if args.names[0] == "week" and len(args.names) == 2 and args.names[1].isdigit():
        week = int(args.names[1])
        print(f"handout of week {week}: {release_week(week, args.out or 'handout')}")
        hunts = " ".join(name for name, task in HUNTS.items() if task.week == week)
        print(f"its hunt shows solutions, so hand it out by itself, when they are in: {hunts or 'none'}")
        return
    if not args.gradescope:
        out = release(args.names, args.out or "handout", args.student)
        print(f"to try it: cd {out} && python check.py {args.names[0]}")
        return
    out = Path(args.out or "autograder.zip")
    if out.exists():
        raise BadInput(f"{out} is there already: remove it, or choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_zip([find(name) for name in args.names], out, args.up_to)
    print(f"{out} holds solutions and bugs: not for students")


if __name__ == "__main__":
    run_main(main)
