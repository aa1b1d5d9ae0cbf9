"""Answer notes for teachers, out of the tables and the scripts as they stand: release.py --answers. Not to hand out."""

import ast
import difflib
import textwrap
from pathlib import Path

from cut import entry, names_bound, names_in
from forms import Exercise, hints
from start import ROOT, alternatives, definitions, describe, planted

HERE = Path(__file__).resolve().parent
TITLE = """# For teachers: answers

Solutions, the arithmetic behind the expected numbers, known mistakes, hints and planted bugs. Not for students.
"""


def entry_of(name):
    """(the lines of the table that holds this entry, its call, {name: statement} of the table's other names)."""
    for path in sorted(HERE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        body = ast.parse(source).body
        for node in body:
            if entry(node) == name:
                return source.splitlines(), node.value, {bound: other for other in body for bound in names_bound(other)}
    raise LookupError(f"no table has {name}")


def field(call, name):
    """The value that an entry gives to a field, as a node of the syntax tree, or None."""
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def code(lines, *nodes):
    """These pieces of code as they stand there, comments included, as a block of Markdown."""
    texts = ["\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes]
    return ["```python", "\n\n".join(map(textwrap.dedent, texts)), "```", ""]


def referred(nodes, statements):
    """The statements that these nodes refer to, directly or not, but for imports; in the order of the table."""
    found, wanted = [], set().union(*map(names_in, nodes))
    while new := [statements[name] for name in wanted & statements.keys() if statements[name] not in found]:
        found += [node for i, node in enumerate(new) if node not in new[:i]]
        wanted |= set().union(*map(names_in, new))
    return sorted((n for n in found if not isinstance(n, (ast.Import, ast.ImportFrom))), key=lambda node: node.lineno)


def answers_to_exercise(task):
    """Lines of Markdown: the solution, the cases with their arithmetic, mistakes, hints."""
    source = Path(ROOT, task.script).read_text(encoding="utf-8")
    solution = [definitions(source)[name] for name in task.blanks]
    lines, call, statements = entry_of(task.name)
    three, known = hints(task.name)
    text = ["### The solution", "", f"As it stands in `{task.script}`:", "", *code(source.splitlines(), *solution)]
    cases = field(call, "cases")
    text += ["### The cases, and how their numbers come about", ""]
    text += code(lines, *referred([cases], statements), cases)
    text += ["### Known mistakes", ""]
    for i, case in enumerate(task.cases, 1):
        for mistake, numbers in case.mistakes.items():
            gives = "recognised by a test of the numbers" if callable(numbers) else f"gives {numbers}"
            text.append(f"* Case {i}: {mistake} ({gives}).")
    text += ["", "### Hints", "", *[f"{i}. {hint}" for i, hint in enumerate(three, 1)], "", known, ""]
    return text


def answers_to_hunt(task):
    """Lines of Markdown: where the bugs are, how one sees them, and what the check looks at."""
    source, text = Path(ROOT, task.script).read_text(encoding="utf-8"), []
    for plant in alternatives(task):
        bugged = planted(source, type(task)(task.name, task.script, 1, 1, "", plant=plant))
        change = [*difflib.unified_diff(source.splitlines(), bugged.splitlines(), n=1, lineterm="")]
        text += [f"### In `{plant.where}`", "", "```diff", *change[2:], "```", "", f"How to see it: {plant.hint}", ""]
    text += ["### What the check looks at", ""]
    for name in task.members or [task.name]:
        lines, call, statements = entry_of(name)
        node = field(call, "check") or field(call, "cases")
        judges = [n for n in referred([node], statements) if isinstance(n, ast.FunctionDef)]
        text += code(lines, *judges, *[n for n in [node] if not isinstance(n, ast.Name)])
    return text


def answers(chosen):
    """Notes on these exercises and hunts, as Markdown."""
    text = [TITLE]
    for task in chosen:
        text += [f"## {task.name}: `{task.script}`, about {task.minutes} minutes", "", *describe(task), ""]
        text += answers_to_exercise(task) if isinstance(task, Exercise) else answers_to_hunt(task)
    return "\n".join(text)
