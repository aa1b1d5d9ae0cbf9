"""Working copies: blanked functions, or a planted bug. The first line of a copy says what has been begun in it."""

import ast
import base64
import functools
import json
import random
import textwrap
import zlib
from pathlib import Path

from mechanism import EXERCISES, ROOT, BadInput, changed

BEGUN = "# Begun in this copy: "


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


def text_of(source, name):
    """The lines of a function or class, without decorators."""
    node = definitions(source)[name]
    return "".join(source.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno])


def body_span(node):
    """(first, last), counted from 0 and `last` left out: a function's lines below its signature and docstring."""
    first = node.body[0]
    return first.end_lineno if ast.get_docstring(node) else first.lineno - 1, node.end_lineno


def begun_in(source):
    """The names of what has been begun in a copy."""
    first, _, _ = source.partition("\n")
    return first.removeprefix(BEGUN).split(", ") if first.startswith(BEGUN) else []


def with_begun(source, names):
    """The source with a first line that says what has been begun in it."""
    if begun_in(source):
        source = source.partition("\n")[2]
    return f"{BEGUN}{', '.join(names)}\n{source}"


def blanked(source, exercise):
    """The source with the bodies of the exercise's functions taken out, and all else as it is."""
    lines, nodes = source.splitlines(keepends=True), definitions(source)
    if missing := [name for name in exercise.blanks if name not in nodes]:
        raise BadInput(f"exercise {exercise.name}: {exercise.file} has no {' and no '.join(missing)} any more")
    for name in sorted(exercise.blanks, key=lambda name: -nodes[name].lineno):  # from below: lines above stay
        first, last = body_span(nodes[name])
        items = exercise.instructions(name)
        if name == exercise.blanks[0]:
            items = exercise.instructions() + items
        text = [f"# Exercise {exercise.name}" + (":" if items else "")]
        for item in items:
            text += textwrap.wrap(item, 100, initial_indent="# * ", subsequent_indent="#   ")
        text.append(f'raise NotImplementedError("exercise: {exercise.name}: write {name}")')
        lines[first:last] = [" " * (nodes[name].col_offset + 4) + line + "\n" for line in text]
    return "".join(lines)


LATER = """# Functions that other weeks ask for. They are packed, so that the script runs and nothing is given away.
PACKED, UNPACKED = "{packed}", {{}}


def later(name, **given):
    \"\"\"What the packed function of this name returns.\"\"\"
    import base64
    import json
    import zlib

    if name not in UNPACKED:
        texts, made = json.loads(zlib.decompress(base64.b85decode(PACKED))), {{}}
        exec(texts[name], globals(), made)
        UNPACKED[name] = made[name.rpartition(".")[2]]
    return UNPACKED[name](**given)


"""


def asked_from(script, week):
    """The names of a script's functions for which exercises of this week, and of later ones, ask."""
    found, source = [], source_of(script)
    for task in EXERCISES.values():
        other = source_of(task.script)
        for name in task.blanks:
            if task.week >= week and name in definitions(source) and text_of(source, name) == text_of(other, name):
                found.append(name)
    return list(dict.fromkeys(found))


def packed(source, names):
    """The source of a script in which the bodies of these functions cannot be read, and run all the same."""
    lines, nodes, texts = source.splitlines(keepends=True), definitions(source), {}
    for name in sorted(names, key=lambda name: -nodes[name].lineno):
        texts[name] = textwrap.dedent(text_of(source, name))
        first, last = body_span(nodes[name])
        lines[first:last] = [" " * (nodes[name].col_offset + 4) + f'return later("{name}", **locals())\n']
    if not texts:
        return source
    code = base64.b85encode(zlib.compress(json.dumps(texts).encode())).decode()
    return "".join(lines).replace('if __name__ == "__main__"', LATER.format(packed=code) + 'if __name__ == "__main__"')


def planted(source, bug):
    """The source of a script with a bug in it, "function or class: old text -> new text"."""
    where, _, change = bug.partition(": ")
    if where not in definitions(source):
        raise BadInput(f"the script has no {where} any more")
    text = text_of(source, where)
    return source.replace(text, changed({where: text}, change)[where])


def drawn(hunt, number):
    """(bug, what one sees) of this number: always the same one, and the next number has another one."""
    bugs = list(hunt.bugs.items())
    random.Random(hunt.name).shuffle(bugs)
    return bugs[number % len(bugs)]


def source_of(script):
    """The text of an original."""
    return Path(ROOT, script).read_text(encoding="utf-8")


def working_copy(tasks, number=0, source=""):
    """What the student gets for a hunt, or for exercises of one script.

    With the source of a copy these exercises are added to it: what is begun in it, and written, stays.
    """
    source = source or source_of(tasks[0].script)
    for task in tasks:
        begun = begun_in(source)
        if task.blanks:
            source = blanked(source, task)
        else:
            bug, seen = drawn(task, number)
            source = f"# Hint: {seen}\n{planted(source, bug)}"
        source = with_begun(source, [*begun, task.name])
    return source


def is_begun(task, source):
    """Whether a copy is one for this task: its first line says so, or an exercise's function is not the original."""
    if task.name in begun_in(source):
        return True
    original = source_of(task.script)
    try:
        names = definitions(source)
    except SyntaxError:  # a message about that comes later
        return True
    return any(name not in names or text_of(source, name) != text_of(original, name) for name in task.blanks)
