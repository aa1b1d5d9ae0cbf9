"""What exercises and bug hunts are, and how answers are judged.

An exercise: functions cut out of a script, calls of them, and well-known mistakes as changes to the script's text. No
number is worked out here: what is right is what the original gives, and what a mistake gives is what the original gives
with the mistake put into it. The first calls are on numbers that can be followed with a pencil; after them come random
inputs (inputs.py). A hunt is a change to a script's text, and calls that show it.

A handout has no originals: there numbers.json holds what they gave when it was made.
"""

import difflib
import functools
import importlib.util
import inspect
import io
import math
import random
import re
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TABLES = ("basics", "values", "policies", "others", "scratch", "hunts")  # modules; a handout has those that it needs
EXERCISES, HUNTS = {}, {}  # by name


class BadInput(Exception):
    """Something that whoever typed the command can mend: shown as one line, with exit code 2."""


@dataclass
class Case:
    """One call of a script's code."""

    what: str  # the situation, as the student reads it
    call: Callable  # of the module; returns numbers, or lists, tensors, … of them
    look: str  # where to look next
    atol: float  # how much answers may differ: shares of random draws, and what runs learn, need more than rounding
    step: int = 1  # 2: random inputs

    @property
    def table(self):
        """How its answer is drawn (pictures.py), or None."""
        return getattr(self.call, "table", None)

    def place(self, yours, expected):
        """(what differs first, where to look next), of an answer whose parts have names; else ("", self.look)."""
        looks = getattr(self.call, "parts", {})
        if isinstance(yours, list) and len(yours) == len(looks) > 0:
            for (name, look), mine, right in zip(looks.items(), yours, expected):
                if not close(mine, right, self.atol):
                    name = name.replace("_", " ")
                    return f"\nFirst of these differ: {name}, yours {short(mine)}, expected {short(right)}.", look
        return "", self.look


@dataclass(kw_only=True)
class Task:
    """An exercise, which has functions to write, or a hunt, which has bugs."""

    name: str
    script: str  # a script of the repository, or exercises/scripts/NAME.py
    week: int  # of the course
    minutes: int
    cases: dict  # "the situation | where to look next" -> call of a module, or (call, how much answers may differ)
    blanks: tuple = ()  # names of functions to write, or Class.method
    level: str = ""  # easy, medium or hard
    topic: str = ""
    task: str = ""  # what to write, and what is at hand; after " | NAME: ", what belongs to one function only
    mistakes: dict = field(default_factory=dict)  # "this is what one gets by … | where" -> a change, see `changed`
    random: Callable = None  # of the module and a NumPy generator: a call on random inputs
    draws: int = 20
    atol: float = 1e-4  # of the random inputs
    learn: tuple = ()  # (fields of Args, what mean - deviation of the last evaluation has to reach)
    bugs: dict = field(default_factory=dict)  # a change of a function or class -> what one sees; a number draws one

    @property
    def file(self):
        """The name of the student's file."""
        return Path(self.script).name

    @property
    def quick(self):
        """Whether no case trains a network: then a case that takes seconds has a loop that never ends."""
        return bool(self.blanks) and not self.file.startswith("build_")

    def instructions(self, name=""):
        """What to do in one function, or, without a name, in all of them: sentences."""
        general, *own = self.task.split(" | ")
        own = dict(part.split(": ", 1) for part in own)
        text = own.get(name, "") if name else general
        sentences = re.split(r"(?<=[.?!]) (?=[A-Z`])", text)
        return [each if re.match(r"\w*[_.(]", each) else each[:1].upper() + each[1:] for each in sentences if each]

    def calls(self):
        """All its Cases: those that are written down, then the random inputs, always the same ones."""
        found = []
        for words, call in self.cases.items():
            what, _, look = words.partition(" | ")
            call, atol = call if isinstance(call, tuple) else (call, 1e-4)
            found.append(Case(what, call, look, atol))
        for i in range(self.draws if self.random else 0):
            draw = lambda m, i=i: self.random(m, np.random.default_rng([i, len(self.name)]))
            found.append(Case(f"random inputs, draw {i + 1} of {self.draws}", draw, "", self.atol, 2))
        return found


def exercise(name, course, cut, **fields):
    """Add an exercise: `course` is "week 6, 45 minutes, medium: topic", `cut` "script: function, Class.method"."""
    script, _, blanks = cut.partition(": ")
    EXERCISES[name] = task(name, course, script=script, blanks=tuple(blanks.split(", ")), **fields)


def hunt(name, script, course, cases, bugs):
    """Add a hunt; its bugs are {"function or class: old text -> new text": what one sees}."""
    HUNTS[name] = task(name, course, script=script, cases=cases, bugs=bugs)


def task(name, course, **fields):
    """A Task; `course` says when it is its turn."""
    when, _, topic = course.partition(": ")
    week, minutes = map(int, re.findall(r"\d+", when))
    level = when.split(", ")[2] if when.count(", ") == 2 else ""
    return Task(name=name, week=week, minutes=minutes, level=level, topic=topic, **fields)


def load_tables():
    """Import the tables, which fills EXERCISES and HUNTS, in the order of the course."""
    for name in TABLES:
        if (HERE / f"{name}.py").is_file():
            importlib.import_module(name)
    for table in (EXERCISES, HUNTS):
        for task in sorted(table.values(), key=lambda task: task.week):  # a dict keeps the order of insertion
            table[task.name] = table.pop(task.name)


def find(name):
    """The Task of this name. BadInput, with near names, if there is none."""
    if task := EXERCISES.get(name) or HUNTS.get(name):
        return task
    near = difflib.get_close_matches(name, [*EXERCISES, *HUNTS], n=3, cutoff=0.4)
    raise BadInput(f"there is no exercise {name}" + (f"; did you mean {' or '.join(near)}?" if near else ""))


def hints(name):
    """(two hints, what to know once it is solved) of an exercise, out of hints.md."""
    for section in (HERE / "hints.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        title, *parts = re.split(r"\n[123]\. ", section.strip())
        if title == name:
            *two, known = [" ".join(part.split()) for part in parts]
            return two, known
    return [], ""


def quoted(path):
    """A path as it stands in a command that is to be copied."""
    return f'"{path}"' if " " in str(path) else str(path)


def run_main(main):
    """Call main() for a command line; BadInput is one line on stderr and exit code 2."""
    sys.stdout.reconfigure(errors="replace")  # a terminal without some letter gets a ?
    if "#" in sys.argv:  # cmd.exe and zsh hand over comments
        del sys.argv[sys.argv.index("#") :]
    load_tables()
    try:
        sys.exit(main())
    except BadInput as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        sys.exit(2)


# ---------------------------------------------------------------------------------------------------- plain numbers
def plain(x):
    """Tensors, arrays, tuples, dicts and single numbers as nested lists of floats."""
    x = x.detach() if hasattr(x, "detach") else x
    x = x.tolist() if hasattr(x, "tolist") else x
    x = sorted(x.items()) if isinstance(x, dict) else x
    if isinstance(x, (list, tuple)):
        return [plain(item) for item in x]
    return float(x)


def shape(x):
    """The lengths of nested lists, [[1, 2], [3, 4]] -> (2, 2); where the parts differ, a list of theirs."""
    if not isinstance(x, list):
        return ()
    inner = [shape(item) for item in x]
    alike = len({str(each) for each in inner}) == 1
    return (len(x), *inner[0]) if alike else inner


def close(a, b, atol=1e-4):
    """Whether nested lists have the same form and nearly the same numbers."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(close(x, y, atol) for x, y in zip(a, b))
    if isinstance(a, list) or isinstance(b, list):
        return False
    return math.isclose(a, b, rel_tol=1e-4, abs_tol=atol) or (math.isnan(a) and math.isnan(b))


def short(x):
    """Nested lists of numbers as text."""
    if isinstance(x, list):
        return f"[{', '.join(map(short, x))}]"
    x = 0.0 if abs(x) < 0.00005 else x  # or it could be -0
    return f"{x:.4f}".rstrip("0").rstrip(".") if abs(x) < 1e6 else f"{x:.4g}"


# --------------------------------------------------------------------------------------- modules, and changes to them
def load(path):
    """The script at `path` as a module, under its own name. BadInput if it cannot be imported."""
    path = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # dataclasses look there
    try:
        exec(compile(path.read_text(encoding="utf-8"), path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        raise BadInput(f"{path.name}{place(error, module)} cannot be imported: {in_words(error)}") from None
    return module


@functools.cache
def original(script):
    """The module of an original, one for all who import it."""
    path = (ROOT / script).resolve()
    known = sys.modules.get(path.stem)
    return known if getattr(known, "__file__", None) == str(path) else load(path)


def changed(sources, change):
    """{name: source} of those functions that the change, "old -> new" or several of these, concerns.

    Before the old text, which stands in them once, "NAME: " may say in which.
    """
    found = {}
    for part in [change] if isinstance(change, str) else change:
        where, _, rest = part.partition(": ")
        old, new = (rest if where in sources else part).split(" -> ")
        current = {name: (sources | found)[name] for name in ([where] if where in sources else sources)}
        if sum(text.count(old) for text in current.values()) != 1:
            raise BadInput(f"{old!r} stands {sum(text.count(old) for text in current.values())} times, not once")
        (name,) = [name for name, text in current.items() if old in text]
        found[name] = current[name].replace(old, new)
    return found


@contextmanager
def mistaken(module, blanks, change):
    """The module, in whose functions `blanks` the change is made for a while."""
    before = {name: attrgetter(name)(module) for name in blanks}
    sources = {name: inspect.getsource(function) for name, function in before.items()}
    for name, source in changed(sources, change).items():
        made = {}
        exec(compile(textwrap.dedent(source), "a change", "exec"), vars(module), made)
        put(module, name, made[name.split(".")[-1]])
    try:
        yield
    finally:
        for name, function in before.items():
            put(module, name, function)


def put(module, name, function):
    """Set a function, or as Class.name a method."""
    owner, _, name = name.rpartition(".")
    setattr(attrgetter(owner)(module) if owner else module, name, function)


# --------------------------------------------------------------------------------------------------------- answers
def answer(call, module, blanks=()):
    """What a call gives, a dict for JSON: `result` in plain numbers, or `error` in words; and what was seen of blanks.

    `kinds` are what they return, `changed` which of their arguments they changed in place, `strays` which of them drew
    random numbers without the generator that they were given, `given` the first call, `calls` (text, result) of the
    first calls, `raised` the call that raised an error.
    """
    notes = {"kinds": {}, "changed": [], "strays": [], "calls": []}
    before = {}
    try:
        for name in blanks:
            before[name] = attrgetter(name)(module)
            put(module, name, watched(name, before[name], notes))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"result": plain(call(module))} | notes
    except (Exception, SystemExit) as error:
        return {"error": explained(error, module)} | notes
    finally:
        for name, function in before.items():
            put(module, name, function)


def watched(name, function, notes):
    """The function, which takes notes of its first calls."""
    names = list(inspect.signature(function).parameters)
    calls = []

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if len(calls) >= 20:
            return function(*args, **kwargs)
        calls.append(name)
        given = dict(zip(names, args)) | kwargs
        generators = [key for key, x in given.items() if hasattr(x, "random") or type(x).__name__ == "Generator"]
        before = {key: snapshot(x) for key, x in given.items()}
        texts = [f"{key}={as_text(x)}" for key, x in given.items() if as_text(x)]
        call = f"{name}({', '.join(texts)})"[:700]
        if texts:
            notes.setdefault("given", f"first call: {call}")
        drawn = global_draws() if generators else {}
        try:
            result = function(*args, **kwargs)
        except Exception:
            notes.setdefault("raised", call)
            raise
        changed = [source for source, state in drawn.items() if global_draws()[source] != state]
        notes["strays"] += [f"{source} in {name}, not from {generators[0]}" for source in changed]
        notes["changed"] += [f"{key} of {name}" for key, x in given.items() if snapshot(x) != before[key]]
        notes["kinds"].setdefault(name, kind(result))
        if texts and not generators:  # else what it returns is a matter of chance
            try:
                notes["calls"].append([call, plain(result)])
            except (TypeError, ValueError):
                notes["calls"].append([call, None])
        return result

    return wrapper


def global_draws():
    """The states of the generators that a module has for all: random, np.random, and torch if it is imported."""
    _, key, position, *_ = np.random.get_state()
    states = {"random": random.getstate(), "np.random": (key.tobytes(), position)}
    if torch := sys.modules.get("torch"):
        states["torch's own generator"] = torch.get_rng_state().numpy().tobytes()
    return states


def as_text(x):
    """Numbers as text; empty for what has none in it."""
    if x is None or isinstance(x, (str, bool, dict)):
        return repr(x)
    try:
        return short(plain(x))
    except (TypeError, ValueError, AttributeError):
        return ""


def snapshot(x):
    """Something that differs once the numbers in a tensor, an array or a list have changed."""
    if hasattr(x, "tolist"):
        return repr(x.tolist())
    return repr(x) if isinstance(x, list) else None


def kind(x):
    """What kind of thing this is: "(float32 tensor, array)". What is neither of the two is a number."""
    if hasattr(x, "detach"):
        return f"{str(x.dtype).removeprefix('torch.')} tensor"
    if isinstance(x, (tuple, list)):
        kinds = [kind(item) for item in x]
        return f"({', '.join(kinds)})" if {*kinds} - {"number"} else "number"
    return "array" if getattr(x, "ndim", 0) > 0 else "number"


def fits(kind, wanted):
    """Whether it is the wanted kind; where a number is wanted, anything will do."""
    return bool(re.fullmatch(re.escape(wanted).replace("number", ".*"), kind))


def place(error, module):
    """Where in the student's file an error came up, as ", line 12, in compute_gae"; empty if it did not."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == module.__file__]
    return f", line {frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def in_words(error):
    """Kind and message of an error, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


def explained(error, module):
    """What to tell a student whose code raised this."""
    if isinstance(error, AttributeError) and (error.obj is module or isinstance(error.obj, type)):
        return f"{Path(module.__file__).name} has no function {error.name} any more"
    if isinstance(error, BadInput):
        return str(error)
    if isinstance(error, NotImplementedError) and str(error).startswith("exercise:"):
        return f"{in_words(error)}\nThis function is still blank{place(error, module)}."
    if where := place(error, module):
        return f"{Path(module.__file__).name}{where}: {in_words(error)}"
    if isinstance(error, TypeError) and re.search("(keyword|positional) argument", str(error)):
        return f"{in_words(error)}\nIt is called with the names that stand in its def: leave that line as it was."
    return f"what your code returned is of no use: {in_words(error)}\nIs there a return missing, or one thing too many?"


# ---------------------------------------------------------------------------------------------------------- judging
class Reference:
    """What the original answers, and what it answers with a known mistake in it: computed when it is asked for.

    In a handout it comes from `numbers`, {"right": answers, "mistakes": {message: answers}}.
    """

    def __init__(self, task, numbers=None):
        self.task, self.calls, self.known = task, task.calls(), {}
        self.messages = list(numbers["mistakes"] if numbers else task.mistakes)
        stored = {None: numbers["right"]} | numbers["mistakes"] if numbers else {}
        for mistake, answers in stored.items():
            self.known |= {(i, mistake): given for i, given in enumerate(answers)}

    def at(self, i, mistake=None):
        """The answer to call i."""
        if (i, mistake) not in self.known:
            module, blanks = original(self.task.script), self.task.blanks
            change = self.task.mistakes[mistake] if mistake else ()
            with mistaken(module, blanks, change), redirect_stdout(io.StringIO()):
                self.known[i, mistake] = answer(self.calls[i].call, module, blanks)
        return self.known[i, mistake]

    def answers(self, mistake=None):
        """The answers to all calls, a list."""
        return [self.at(i, mistake) for i in range(len(self.calls))]


def same(a, b, atol):
    """Whether two answers are the same; an error is like any other."""
    if "result" not in a or "result" not in b:
        return "result" not in a and "result" not in b
    return close(a["result"], b["result"], atol) and a["changed"] == b["changed"]


def judge(answers, reference):
    """For each call None if the answer is right, else what to tell the student."""
    problems = []
    for i, (case, given) in enumerate(zip(reference.calls, answers)):
        problem, look = compared(case, given, reference.at(i))
        wrong = "result" in given and not same(given, reference.at(i), case.atol)
        if problem and wrong and not any(problems):  # right numbers of the wrong kind are no known mistake
            message, place = named(i, answers, reference)
            problem, look = problem + message, place or look
        if problem and look and not any(problems):
            problem += f"\nLook next at {look}."
        problems.append(problem)
    return problems


def compared(case, given, right):
    """(None if an answer is right, else what is wrong with it; where to look next)."""
    told = textwrap.fill(f"case: {case.what}", 110)
    if call := given.get("raised") or differing_call(given["calls"], right["calls"]) or right.get("given"):
        told += "".join(f"\n{textwrap.fill(line, 110)}" for line in call.splitlines())
    if "result" not in given:
        return f"{told}\n{given['error']}"[:3000], ""
    if strays := [stray for stray in given["strays"] if stray not in right["strays"]]:
        told += f"\nrandom numbers come from {strays[0]}: a run with the same seed would be another one."
        return told, "where you draw: only the generator that is given knows the seed"
    for blank, wanted in right["kinds"].items():
        found = given["kinds"].get(blank, wanted)
        if not fits(found, wanted):
            found = "a number or a list" if found == "number" else found
            return f"{told}\n{blank} returned: {found}. Asked for is: {wanted}.", ""
    if names := [name for name in given["changed"] if name not in right["changed"]]:
        told += f"\nchanged in place: {', '.join(names)}. Whoever called still needs the old numbers"
        return f"{told}; work on a copy.", case.look
    yours, expected = given["result"], right["result"]
    if close(yours, expected, case.atol):
        return None, ""
    told += f"\nyours:    {short(yours)[:1000]}\nexpected: {short(expected)[:1000]}"
    told += f"   (± {case.atol:g} is right)" if case.atol > 1e-3 else ""
    if shape(yours) != shape(expected):
        told += f"\nThe shapes differ: yours is {shape(yours)}, expected is {shape(expected)}."[:500]
    if drawing := case.table and case.table.text(yours, expected):
        told += f"\n{drawing}"
    part, look = case.place(yours, expected)
    return told + part, look


def differing_call(yours, expected):
    """The first call of a blank that differs from that of the original, in words; empty if none does, or is shown."""
    if len(expected) == 1:
        return expected[0][0]
    counts = {}
    for (call, gave), (right_call, right) in zip(yours, expected):
        name = right_call.partition("(")[0]
        counts[name] = counts.get(name, 0) + 1
        if call != right_call:
            number = f"call {counts[name]} of {name}"
            return f"{number}, yours:    {call}\n{number}, expected: {right_call}"
        if gave is not None and right is not None and not close(gave, right):
            return f"call {counts[name]} of {name}: {call}\nreturned {short(gave)[:300]}, expected {short(right)[:300]}"
    return ""


def named(i, answers, reference):
    """(which known mistake gives the wrong answer i, as a line of text; where to look), empty if none does.

    One that is contradicted by no other answer is sure. Who has made two mistakes is told which one it looks like.
    """
    likely = []
    for message in reference.messages:
        agrees = lambda j: same(reference.at(j, message), answers[j], reference.calls[j].atol)
        explains = lambda j: agrees(j) or same(reference.at(j, message), reference.at(j), reference.calls[j].atol)
        if agrees(i) and all(explains(j) for j in range(i)):
            words, _, place = message.partition(" | ")
            if all(explains(j) for j in range(i, len(answers))):
                return f"\nThis is what one gets by {words}.", place
            likely.append(words)
    words = f"\nYour answers up to this case, but not later, are those one gets by {likely[0]}." if likely else ""
    return words, ""
