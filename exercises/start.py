"""Begin an exercise or a bug hunt: a working copy of a script, with something to write or a bug to find.

    python exercises/start.py                  # the list
    python exercises/start.py gae              # writes my_work/ppo.py, in which compute_gae is to be written
    python exercises/start.py returns gae      # writes one copy, in which both are to be written
    python exercises/start.py hunt-3           # writes a copy of a script with a bug in it
    python exercises/start.py hunt-ppo --number 17   # with a bug drawn from a number: your neighbour has another one
    python exercises/start.py gae --force      # begin again; what was there is kept as my_work/ppo.py.1.bak
    python exercises/start.py --progress       # what is solved

The copy is cut out of the script as it stands today, so it cannot be out of date. Then: python exercises/check.py gae
"""

import argparse
import ast
import base64
import functools
import io
import json
import os
import random
import textwrap
import tokenize
import zlib
from dataclasses import replace
from pathlib import Path

from forms import EXERCISES, HUNTS, POOLS, BadInput, Exercise, find, load_tables, run_main

load_tables()
ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def definitions(source):
    """{name: node of the syntax tree} of the functions and classes of a script, and Class.name of methods."""
    kinds, found = (ast.FunctionDef, ast.ClassDef), {}
    for node in ast.parse(source).body:
        if isinstance(node, kinds):
            found[node.name] = node
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{inner.name}": inner for inner in node.body if isinstance(inner, kinds)}
    return found


def body_span(lines, node):
    """(first, last), counted from 0 and `last` left out: a function's lines below its signature and docstring."""
    if ast.get_docstring(node) is not None:
        first = node.body[0].end_lineno
    else:  # the first NEWLINE token ends the signature: inside its brackets there are only NLs
        text = io.StringIO("".join(lines[node.lineno - 1 :]))
        ends = (t.end[0] for t in tokenize.generate_tokens(text.readline) if t.type == tokenize.NEWLINE)
        first = node.lineno - 1 + next(ends)
    return first, node.end_lineno


UNREADABLE = '''

def unreadable(name, arguments):
    """Call a function of UNREADABLE: reading it would give an exercise away."""
    import base64
    import zlib

    names = dict(globals())
    exec(zlib.decompress(base64.b85decode(UNREADABLE[name])), names)
    return names[name](**arguments)


UNREADABLE = {}
'''


def hidden(name, text):
    """A line of code that adds a function of this text to UNREADABLE."""
    packed = base64.b85encode(zlib.compress(text.encode(), 9)).decode()
    return f'UNREADABLE["{name}"] = "{packed}"\n'


def blanked(source, *exercises):
    """The source of a script with the bodies of these exercises' functions taken out, and all else as it is.

    Only what would give an exercise away is unreadable: it works as ever, but its text stands packed at the end.
    """
    lines, nodes, blanks = source.splitlines(keepends=True), definitions(source), {}
    for exercise in exercises:
        if missing := [name for name in (*exercise.blanks, *exercise.hides) if name not in nodes]:
            raise BadInput(f"exercise {exercise.name}: {exercise.script} has no {' and no '.join(missing)} any more")
        blanks = dict.fromkeys(exercise.blanks, exercise) | blanks  # what two have in common is the first one's
    hides = {name for exercise in exercises for name in exercise.hides} - {*blanks}
    packed = [hidden(name, "".join(lines[nodes[name].lineno - 1 : nodes[name].end_lineno])) for name in sorted(hides)]
    for name in sorted({*blanks, *hides}, key=lambda name: -nodes[name].lineno):  # from below: lines above stay
        first, last = body_span(lines, nodes[name])
        if name in hides:
            text = [f'return unreadable("{name}", locals())  # it would give away what you are to write']
        else:
            exercise = blanks[name]
            text = [f'raise NotImplementedError("exercise: {exercise.name}: write {name}")']
            if name == exercise.blanks[0]:
                text = [f"# {line}" for line in textwrap.wrap(f"Exercise {exercise.name}: {exercise.task}", 100)] + text
        lines[first:last] = [" " * (nodes[name].col_offset + 4) + line + "\n" for line in text]
    if packed:  # before main is called
        at = max((i for i, line in enumerate(lines) if line.startswith("if __name__ ==")), default=len(lines))
        lines[at:at] = [UNREADABLE.lstrip("\n"), *packed, "\n\n"]
    return "".join(lines)


def alternatives(hunt):
    """The Plants of a Hunt, each with its hint: one, but of a pool all that may be drawn."""
    if hunt.plant:
        return [replace(hunt.plant, hint=hunt.hint)]
    return [plant for name in hunt.members for plant in alternatives(HUNTS[name])] + list(hunt.plants)


def drawn(hunt, number):
    """The pool with the bug of this number: always the same one, and the next number has another one."""
    plants = alternatives(hunt)
    random.Random(hunt.name).shuffle(plants)
    plant = plants[number % len(plants)]
    return replace(hunt, plant=plant, hint=plant.hint)


def with_bugs(chosen, number):
    """The tasks that were chosen, those of POOLS with the bug of this number. BadInput without one, or for no pool."""
    if pools := [task.name for task in chosen if task.name in POOLS]:
        if number is None:
            raise BadInput(f"the bug of {pools[0]} is drawn from a number: --number 17, say (--student in handouts)")
    elif number is not None:
        raise BadInput(f"a number is for {', '.join(POOLS)}: the others have no bug to draw")
    return [drawn(task, number) if task.name in POOLS else task for task in chosen]


def planted(source, hunt):
    """The source of a script with the hunt's bug in it. BadInput if its text does not stand there exactly once."""
    lines, plant = source.splitlines(keepends=True), hunt.plant
    node = definitions(source).get(plant.where)
    if node is None:
        raise BadInput(f"{hunt.name}: {hunt.script} has no {plant.where} any more")
    first, last = node.lineno - 1, node.end_lineno
    text = "".join(lines[first:last])
    if text.count(plant.old) != 1:
        times = f"{text.count(plant.old)} times, not once"
        raise BadInput(f"{hunt.name}: the text to change stands {times} in {plant.where} of {hunt.script}")
    lines[first:last] = [text.replace(plant.old, plant.new)]
    return "".join(lines)


def working_copy(first, *more, root=ROOT):
    """The source that the student gets for a Hunt, or for one or more Exercises of one script."""
    try:
        source = Path(root, first.script).read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot read {first.script}: {error}") from None
    return blanked(source, first, *more) if isinstance(first, Exercise) else planted(source, first)


def keep(path):
    """Rename a file to the first of path.1.bak, path.2.bak, … that there is not yet. Returns its new Path."""
    number = 1
    while True:
        backup = path.with_name(f"{path.name}.{number}.bak")
        try:
            os.link(path, backup)  # unlike a rename, this never replaces a file
        except FileExistsError:
            number += 1
            continue
        path.unlink()
        return backup


def write_copy(chosen, folder, force=False):
    """Write the working copy for one or more exercises of a script into a folder. Returns its Path.

    BadInput, unless `force`, if another file is there; with `force`, that one is kept under another name.
    """
    path, source = Path(folder, chosen[0].file), working_copy(*chosen)
    try:
        if path.exists() and path.read_bytes() != source.encode():
            if not force:
                raise BadInput(f"{path} holds work already; --force replaces it, --work FOLDER puts the copy elsewhere")
            print(f"what was there is kept as {keep(path)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error}") from None
    return path


def progress(folder):
    """What check.py has found in a folder of working copies, as lines of text."""
    try:
        known = json.loads(Path(folder, ".progress.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    lines = []
    pools = [pool for pool in POOLS.values() if pool.name in known]  # those that have been begun
    for task in [*EXERCISES.values(), *HUNTS.values(), *pools]:
        passed, steps = known.get(task.name, (0, 0))
        state = "solved" if steps and passed == steps else f"{passed} of {steps} steps" if steps else ""
        lines.append(f"{task.name:16}  {task.file:16}  {state}".rstrip())
    solved = sum(line.endswith("solved") for line in lines)
    return [*lines, "", f"{solved} of {len(lines)} solved in {folder}"]


def describe(task):
    """What there is to do, as lines of text."""
    if isinstance(task, Exercise):
        what = f"Topic: {task.topic}. To write, in {task.file}: {', '.join(task.blanks)}."
        text = task.task[0].upper() + task.task[1:]
    else:
        what = f"A bug hunt: one line of {task.file} is wrong in this copy. It runs, and no message will tell you."
        text = f"Hint: {task.hint}"
    return [*textwrap.wrap(what, 100), "", *textwrap.wrap(text, 100)]


def table():
    """The list of all exercises and hunts, as lines of text."""
    width = max(map(len, EXERCISES))
    lines = [f"{'exercise':{width}}  {'script':18}  level  minutes  topic"]
    for e in EXERCISES.values():
        lines.append(f"{e.name:{width}}  {e.file:18}  {'*' * e.difficulty:5}  {e.minutes:7}  {e.topic}")
    lines += ["", f"{'bug hunt':{width}}  {'script':18}  level  minutes  what one sees"]
    for h in HUNTS.values():
        indent = " " * (width + 38)
        hint = textwrap.wrap(h.hint, 100, initial_indent=indent, subsequent_indent=indent)
        lines.append(f"{h.name:{width}}  {h.file:18}  {'*' * h.difficulty:5}  {h.minutes:7}  {hint[0].strip()}")
        lines += hint[1:]
    for pool in POOLS.values():
        lines.append(f"{pool.name:{width}}  {pool.file:18}  {'*' * pool.difficulty:5}  {pool.minutes:7}  {pool.hint}")
    return [*lines, "", "begin one with: python exercises/start.py NAME"]


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of exercises or a hunt; without any, the list")
    parser.add_argument("--force", action="store_true", help="replace work that is there; it is kept as .1.bak, …")
    parser.add_argument("--progress", action="store_true", help="show what is solved")
    parser.add_argument("--number", type=int, metavar="N", help=f"draw the bug of {', '.join(POOLS)} from it")
    parser.add_argument("--work", default="my_work", metavar="FOLDER", help="where to write (default: my_work)")
    args = parser.parse_args()
    if args.progress or not args.names:
        print("\n".join(progress(args.work) if args.progress else table()))
        return
    chosen = with_bugs([find(name) for name in dict.fromkeys(args.names)], args.number)
    scripts = list(dict.fromkeys(task.script for task in chosen))
    if len(scripts) > 1:
        raise BadInput(f"one copy is of one script, not of {' and '.join(scripts)}: begin them one by one")
    if len(chosen) > 1 and not all(isinstance(task, Exercise) for task in chosen):
        raise BadInput("a hunt has a copy of its own: begin it by itself, with --work FOLDER beside another one")
    path = write_copy(chosen, args.work, args.force)
    command = f"python {os.path.relpath(Path(__file__).with_name('check.py'))} {' '.join(task.name for task in chosen)}"
    if args.work != "my_work":
        command += f" --work {args.work}"
    for task in chosen:
        print("\n".join([*describe(task), ""]))
    print(f"Work in {path}. Then: {command}")


if __name__ == "__main__":
    run_main(main)
