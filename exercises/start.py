"""Begin an exercise or a bug hunt: a working copy of a script, with something to write or a bug to find.

    python exercises/start.py                  # the list
    python exercises/start.py gae              # writes my_work/ppo.py, in which compute_gae is to be written
    python exercises/start.py returns          # adds a second one to this copy; what is written in it stays
    python exercises/start.py hunt-ppo         # writes a copy of a script with a bug in it
    python exercises/start.py hunt-ppo --number 17   # one of several bugs, drawn from a number
    python exercises/start.py gae --force      # begin again; what was there is kept as my_work/ppo.py.1.bak

The copy is cut out of the script as it stands today, so it cannot be out of date. Then: python exercises/check.py gae
"""

import argparse
import sys
import textwrap
from pathlib import Path

from copies import begun_in, drawn, working_copy
from mechanism import EXERCISES, HUNTS, BadInput, find, quoted, run_main


def new_source(tasks, path, number, force):
    """What is to stand in the working copy: exercises are added to those begun there. BadInput if they cannot be."""
    try:
        text = path.read_text(encoding="utf-8-sig") if path.exists() and not force else ""
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8: save it as UTF-8") from None
    begun = begun_in(text)
    again = [task.name for task in tasks if task.name in begun]
    where = "--force begins a new copy and keeps this one under another name, --work FOLDER puts it elsewhere"
    only_exercises = tasks[0].blanks and begun and all(name in EXERCISES for name in begun)
    if text and (again or not only_exercises):
        new = [task.name for task in tasks if task.name not in begun]
        add = f"python exercises/start.py {' '.join(new)} adds the rest; " if again and new and only_exercises else ""
        raise BadInput(f"{path} holds {', '.join(again or begun) or 'something'} already; {add}{where}")
    try:
        return working_copy(tasks, number, text)
    except SyntaxError as error:
        raise BadInput(f"{path}, line {error.lineno}: {error.msg}; {where}") from None


def keep(path):
    """Copy a file to the first of path.1.bak, path.2.bak, … that there is not yet. Returns its new Path."""
    number = 1
    while (backup := path.with_name(f"{path.name}.{number}.bak")).exists():
        number += 1
    backup.write_bytes(path.read_bytes())
    return backup


def write_copy(tasks, folder, number=0, force=False):
    """Write the working copy for a hunt, or for exercises of one script, into a folder. Returns its Path."""
    path = Path(folder, tasks[0].file)
    try:
        source = new_source(tasks, path, number, force)
        if force and path.exists():
            print(f"what was there is kept as {keep(path)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8", newline="\n")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error}") from None
    return path


def chosen(names):
    """The tasks of these names: exercises of one script, or one hunt. BadInput if they do not go together."""
    tasks = [find(name) for name in dict.fromkeys(names)]
    scripts = list(dict.fromkeys(task.script for task in tasks))
    if len(scripts) > 1:
        raise BadInput(f"one copy is of one script, not of {' and '.join(scripts)}: begin them one by one")
    if len(tasks) > 1 and not all(task.blanks for task in tasks):
        raise BadInput("a hunt has a copy of its own: begin it by itself, with --work FOLDER beside another one")
    return tasks


def describe(task, number=0):
    """What there is to do, as lines of text."""
    if task.blanks:
        what = f"Topic: {task.topic}. To write, in {task.file}: {', '.join(task.blanks)}."
        items = [*task.instructions(), *(f"{name}: {item}" for name in task.blanks for item in task.instructions(name))]
        lines = [textwrap.wrap(item, 100, initial_indent="* ", subsequent_indent="  ") for item in items]
        return [*textwrap.wrap(what, 100), "", *sum(lines, [])]
    else:
        what = f"A bug hunt: one line of {task.file} is wrong in this copy. It runs, and no message will tell you."
        text = f"Hint: {drawn(task, number)[1]}"
    return [*textwrap.wrap(what, 100), "", *textwrap.wrap(text, 100)]


def table():
    """The list of all exercises and hunts, as lines of text."""
    lines = ["week  name              minutes  level   script              topic, or what one sees"]
    for task in [*EXERCISES.values(), *HUNTS.values()]:
        seen = "one bug of several, drawn from a number" if len(task.bugs) > 1 else "".join(task.bugs.values())
        first, *more = textwrap.wrap(task.topic or seen, 66)
        lines.append(f"{task.week:4}  {task.name:16}  {task.minutes:7}  {task.level:6}  {task.file:18}  {first}")
        lines += [" " * 61 + line for line in more]
    return [*lines, "", "begin one with: python exercises/start.py NAME"]


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of exercises or a hunt; without any, the list")
    parser.add_argument("--force", action="store_true", help="begin again; what is there is kept as .1.bak, …")
    parser.add_argument("--number", type=int, default=0, metavar="N", help="draw the bug of a hunt that has several")
    parser.add_argument("--work", default="my_work", metavar="FOLDER", help="where to write (default: my_work)")
    args = parser.parse_args()
    if not args.names:
        print("\n".join(table()))
        return
    tasks = chosen(args.names)
    path = write_copy(tasks, args.work, args.number, args.force)
    for task in tasks:
        print("\n".join([*describe(task, args.number), ""]))
    command = f"python {quoted(Path(sys.argv[0]).with_name('check.py'))} {' '.join(args.names)}"
    print(f"Work in {path}. Then: {command}" + (f" --work {quoted(args.work)}" if args.work != "my_work" else ""))


if __name__ == "__main__":
    run_main(main)
