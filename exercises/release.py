"""Make a folder to hand out: working copies of scripts, their checks, and what else a student needs; no solution.

    python exercises/release.py gae hunt-3 --out handout/
    python exercises/release.py hunt-ppo --student 17 --out handout-17/  # a bug drawn from a number
    python exercises/release.py --gradescope gae hunt-3 --out autograder.zip    # for teachers: what grades uploads
    python exercises/release.py --answers gae hunt-3 --out answers.md    # for teachers: solutions, and where bugs are

A handout stands alone: `cd handout && pip install -r requirements.txt && python check.py gae`. Of the tables it holds
only the entries that are named, and of these only what the checks need: numbers that are expected, never how they come
about.
"""

import argparse
import re
import shutil
from pathlib import Path

from cut import cut_table
from forms import EXERCISES, HUNTS, POOLS, BadInput, Exercise, find, run_main
from start import ROOT, alternatives, definitions, describe, with_bugs, working_copy

HERE = Path(__file__).resolve().parent


def requirements(scripts):
    """The packages that these scripts need, from the blocks at their tops, a line each."""
    found = {}
    for script in scripts:
        block = Path(ROOT, script).read_text(encoding="utf-8").split("# ///")[1]
        found |= dict.fromkeys(re.findall(r'"([^"\s]+==[^"]+)"', block))
    return "\n".join(sorted(found)) + "\n"


SHEET = """## How it is judged

Once: `pip install -r requirements.txt`. A check stops at the first thing that is wrong and says what to look at next.
{kinds}
All at once: `python check.py {names}`. Change what you like in the scripts; the other files belong to the checks.
"""
STEPS = """
An exercise has three steps: your functions on fixed numbers; a run in an environment so small that the right answer is
known (`probes.py`); and a run that has to learn. `--up-to 1` takes only the first, which is quick. Where a script has
several functions to write, the runs need all of them. `--hint`, `--hint 2` and `--hint 3` help you on.
"""
BEHAVIOUR = """
A bug hunt is judged by what the script does, so mend it as you like. All but one line of it is sound.
"""


def sheet(chosen):
    """The instructions, as Markdown."""
    lines = ["# What there is to do", ""]
    for task in chosen:
        lines += [f"## {task.name}: `{task.file}`, about {task.minutes} minutes", "", *describe(task), ""]
        lines += [f"Then: `python check.py {task.name}`", ""]
    kinds = "".join(
        text for text, table in ((STEPS, EXERCISES), (BEHAVIOUR, HUNTS | POOLS)) if {t.name for t in chosen} & {*table}
    )
    return "\n".join(lines) + "\n" + SHEET.format(kinds=kinds, names=" ".join(task.name for task in chosen))


def by_script(chosen):
    """{script: its tasks}. BadInput if the copy for one task would hold the solution of another."""
    groups = {}
    for task in chosen:
        groups.setdefault(task.script, []).append(task)
    for script, tasks in groups.items():
        if len(tasks) > 1 and not all(isinstance(task, Exercise) for task in tasks):
            names = " and ".join(task.name for task in tasks)
            raise BadInput(f"{names} are all about {script} and would give each other away: hand them out separately")
    defined = {script: definitions(Path(ROOT, script).read_text(encoding="utf-8")) for script in groups}
    for task in chosen:
        for name in task.blanks if isinstance(task, Exercise) else [plant.where for plant in alternatives(task)]:
            for script in groups.keys() - {task.script}:
                # Scripts repeat each other on purpose, all but train; the name decides, not the text.
                if name in defined[script] and name != "train":
                    raise BadInput(f"{script} holds the solution of {task.name}, {name}: hand them out separately")
    return groups


def release(names, out, student=None):
    """Write the handout; of a pool, the bug is that of the number `student`, which stands nowhere in it.

    BadInput if the folder holds something, or a name is unknown. Returns its Path.
    """
    chosen, out = with_bugs([find(name) for name in dict.fromkeys(names)], student), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"{out} holds something already: remove it, or choose another --out")
    files = {tasks[0].file: working_copy(*tasks) for tasks in by_script(chosen).values()}
    files |= {
        name: (HERE / name).read_text(encoding="utf-8")
        for name in ("check.py", "cut.py", "forms.py", "probes.py", "runner.py")
    }
    named = {task.name for task in chosen} | {member for task in chosen for member in getattr(task, "members", ())}
    for table in dict.fromkeys(task.table for task in chosen):
        files[table] = cut_table((HERE / table).read_text(encoding="utf-8"), named)
    for task in chosen:
        if task.name in POOLS:  # the hint of the bug that was drawn, and no others
            for member in task.members:
                files["hunts.py"] = files["hunts.py"].replace(f"hint={find(member).hint!r}", "hint=''")
            files["hunts.py"] = files["hunts.py"].replace("hint=DRAWN", f"hint={task.hint!r}")
    intro, *sections = (HERE / "hints.md").read_text(encoding="utf-8").split("\n## ")
    kept = [section for section in sections if section.split("\n")[0] in [task.name for task in chosen]]
    files["hints.md"] = "\n## ".join([intro, *kept])
    files |= {"requirements.txt": requirements({task.script for task in chosen}), "README.md": sheet(chosen)}
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")
    if "DEMOS" in files.get("tasks.py", ""):
        shutil.copytree(ROOT / "demos" / "MountainCar-v0", out / "demos")
    return out


def write_for_teachers(args, chosen):
    """Write a grader or answer notes."""
    from answers import answers  # these two files are for teachers: no handout has them
    from gradescope import write_zip

    if args.gradescope:
        out = write_zip(chosen, args.out or "autograder.zip", args.up_to, args.minutes)
        print(f"{out} is for Gradescope, whose limit has to be {args.minutes} minutes. It holds the solutions.")
        return
    out = Path(args.out or "answers.md")
    if out.exists():
        raise BadInput(f"{out} is there already: remove it, or choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(answers(chosen), encoding="utf-8")
    print(f"{out} holds solutions and bugs: not for students")


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="of exercises and hunts")
    parser.add_argument("--out", metavar="PATH", help="where to write (default: handout, autograder.zip or answers.md)")
    parser.add_argument("--student", type=int, metavar="NUMBER", help=f"draw the bug of {', '.join(POOLS)} from it")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--gradescope", action="store_true", help="a zip for Gradescope, which grades uploads")
    kinds.add_argument("--answers", action="store_true", help="answer notes for teachers")
    parser.add_argument(
        "--up-to", type=int, choices=(1, 2, 3), default=3, metavar="STEP", help="--gradescope: last step"
    )
    parser.add_argument(
        "--minutes", type=int, default=10, help="--gradescope: the limit that is set there (default: 10)"
    )
    args = parser.parse_args()
    if args.gradescope or args.answers:
        if args.student is not None:
            raise BadInput("grader and answers hold all the bugs that may be drawn: leave --student out")
        write_for_teachers(args, [find(name) for name in dict.fromkeys(args.names)])
        return
    out = release(args.names, args.out or "handout", args.student)
    print(f"{out} holds {', '.join(sorted(path.name for path in out.iterdir()))}")
    print(f"to try it: cd {out} && python check.py {args.names[0]}")


if __name__ == "__main__":
    run_main(main)
