"""Run a student's file: check.py starts this in a process of its own, which knows what to call, but no expected number.

    python -u runner.py REQUEST.json      # in the folder that holds a copy of the student's file

Each answer is a line of JSON in answers.jsonl, written at once. check.py judges these lines and the files of a run, and
takes nothing else from here. So whatever a student's code does to this process, it does to itself only.
"""

import contextlib
import ctypes
import functools
import inspect
import io
import json
import os
import re
import resource
import struct
import sys
import traceback
import types
import warnings
from pathlib import Path

from forms import BadInput, plain

BIGGEST_FILE = 2**29  # bytes


@contextlib.contextmanager
def loaded(path):
    """The script at `path` as a module, under its own name until the end. BadInput if it cannot be imported."""
    path = Path(path)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {path}: {error}") from None
    module, before = types.ModuleType(path.stem), sys.modules.get(path.stem)
    module.__file__ = str(path.resolve())
    sys.modules[path.stem] = module  # dataclasses and dotted paths of wrappers look here
    try:
        try:
            exec(compile(source, module.__file__, "exec"), vars(module))
        except SyntaxError as error:
            raise BadInput(f"{path}, line {error.lineno}: {error.msg}") from None
        except ModuleNotFoundError as error:
            raise BadInput(f"{path} needs {error.name}: pip install -r requirements.txt") from None
        except (Exception, SystemExit) as error:
            raise BadInput(f"{path}{place(error, module)} cannot be imported: {in_words(error)}") from None
        yield module
    finally:
        sys.modules.pop(path.stem, None)
        if before:
            sys.modules[path.stem] = before


def place(error, module):
    """Where in the student's file an error came up, as ", line 12, in compute_gae"; empty if it did not."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == module.__file__]
    return f", line {frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def in_words(error):
    """Kind and message of an error, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


def explained(error, module):
    """What to tell a student whose code raised this."""
    if isinstance(error, NotImplementedError) and str(error).startswith("exercise:"):
        return f"{in_words(error)}\nThis function is still blank{place(error, module)}."
    if isinstance(error, getattr(module, "UserError", ())):
        return f"the script gave up: {error}"
    if where := place(error, module):
        return f"{Path(module.__file__).name}{where}: {in_words(error)}"
    if isinstance(error, TypeError) and re.search("(keyword|positional) argument", str(error)):
        return f"{in_words(error)}\nIt is called with the names that stand in its def: leave that line as it was."
    return f"what your code returned is of no use: {in_words(error)}\nIs there a return missing, or one thing too many?"


# ------------------------------------------------------------------------------------------- what a function is seen to


def snapshot(x):
    """Something that differs once the numbers in a tensor, an array, a list or a dict of these have changed."""
    if isinstance(x, dict):
        return {key: snapshot(value) for key, value in x.items()}
    if hasattr(x, "tolist"):
        return repr(x.tolist())
    return repr(x) if isinstance(x, list) else None


def kind(x):
    """What kind of thing this is, as "float32 tensor"; of a tuple or list, a list of kinds."""
    if isinstance(x, (tuple, list)):
        return [kind(item) for item in x]
    if not hasattr(x, "dtype"):
        return type(x).__name__
    return f"{str(x.dtype).removeprefix('torch.')} {'tensor' if hasattr(x, 'detach') else 'array'}"


def watched(name, function, notes):
    """The function, which now notes what it returns, and which of its arguments it changes in place."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        given = dict(zip(names, args)) | kwargs
        before = {key: snapshot(x) for key, x in given.items()}
        result = function(*args, **kwargs)
        if inspect.isgenerator(result):
            result = list(result)
        notes["kinds"].setdefault(name, kind(result))
        changed = [key for key, x in given.items() if snapshot(x) != before[key]]
        notes["changed"] += [f"{key} of {name}" for key in changed if f"{key} of {name}" not in notes["changed"]]
        return result

    return wrapper


def watch(module, blanks, notes):
    """Put `watched` around the functions and methods of an exercise. BadInput if one is missing."""
    for blank in blanks:
        holder, _, name = blank.rpartition(".")
        owner = getattr(module, holder, None) if holder else module
        if not callable(getattr(owner, name, None)):
            raise BadInput(f"{Path(module.__file__).name} has no function {blank} any more")
        setattr(owner, name, watched(blank, getattr(owner, name), notes))


def watch_files(folders, opened):
    """Note in the set `opened` which scripts directly in `folders` this process imports or opens from now on."""
    scripts = {path.stem for folder in folders for path in Path(folder).glob("*.py")}
    folders = {*folders, *(os.path.join(folder, "__pycache__") for folder in folders)}

    def hook(event, args):
        if event == "import" and args[0] in scripts:
            opened.add(f"{args[0]}.py")
        if event == "open" and isinstance(args[0], (str, bytes)):
            path = os.path.abspath(os.fsdecode(args[0]))
            if os.path.dirname(path) in folders and path.endswith((".py", ".pyc")):
                opened.add(f"{os.path.basename(path).split('.')[0]}.py")

    sys.addaudithook(hook)  # cannot be taken off again


def answer(call, module, notes):
    """What a case's call gives, as a dict for JSON: a result in plain numbers, or an error in words; and the notes."""
    notes.update(kinds={}, changed=[])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = {"result": plain(call(module))}
    except (Exception, SystemExit) as error:
        found = {"error": explained(error, module)}
    return found | notes


def quiet(function):
    """The function without what it prints."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        with contextlib.redirect_stdout(io.StringIO()):
            return function(*args, **kwargs)

    return wrapper


def train(module, folder, **settings):
    """Run a script from beginning to end, into the folder `run` of `folder`. Returns what its train returned.

    The script's own lines are not shown, and no curve is drawn: prints are the student's. What a small script's train
    returns is written here: the weights of a network, or numbers.
    """
    if not hasattr(module, "Run"):
        agent = module.train(module.Args(**settings))
        os.makedirs(f"{folder}/run", exist_ok=True)
        if hasattr(agent, "state_dict"):
            import torch

            torch.save(agent.state_dict(), f"{folder}/run/checkpoint.pt")
        else:
            Path(folder, "run/checkpoint.json").write_text(json.dumps(plain(agent)))
        return agent
    for name in ("__init__", "finish"):
        setattr(module.Run, name, quiet(getattr(module.Run, name)))
    module.Run.draw_curve = module.draw_values = lambda *anything: None  # the latter is qlearning.py's
    once = {"eval_every": 10**9, "checkpoint_every": 10**9}  # at the end
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return module.train(module.Args(**once | settings, run_dir=f"{folder}/run", progress=False))


# ---------------------------------------------------------------------------------------------------------- the fence

READ, WRITE, READ_FOLDER = 0b101, 0b10 | 1 << 14, 0b1000  # rights: execute and read; write and shorten; list a folder
CREATE_RULESET, ADD_RULE, RESTRICT = 444, 445, 446  # its system calls


def around(folder, hidden):
    """The paths in and beneath `folder` that cover all of it but those in `hidden`. Links lead to other paths."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.is_symlink() or entry.path in hidden:
                continue
            if any(path.startswith(f"{entry.path}/") for path in hidden):
                yield from around(entry.path, hidden)
            else:
                yield entry.path


def landlock(number, *arguments):
    """One of Landlock's system calls."""
    return ctypes.CDLL(None).syscall(number, *arguments)


def fence_version():
    """Which version of Landlock this kernel has; less than 1 if none."""
    return landlock(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1)) if sys.platform == "linux" else 0


def fence(hidden, writable):
    """Take this process the right to read `hidden` paths, to write outside of `writable`, and to reach the checker.

    Landlock (Linux 5.13 or newer) needs no privileges and cannot be undone. Elsewhere nothing happens.
    """
    version = fence_version()
    if version < 1:
        return
    everything = 2**13 - 1  # version 2 added moving files between folders, 3 shortening them
    everything |= (version >= 2) << 13 | (version >= 3) << 14
    rights = struct.pack("Q", everything)  # taken away, unless a rule gives them back
    if version >= 6:
        rights += struct.pack("QQ", 0, 3)  # no network rules; no sockets and signals of processes outside
    ruleset = landlock(CREATE_RULESET, rights, ctypes.c_size_t(len(rights)), ctypes.c_uint32(0))
    hidden = {os.path.realpath(path) for path in hidden}
    allowed = [(path, READ) for path in around("/", hidden)] + [(path, everything) for path in writable]
    for path, allowance in allowed:
        try:
            opened = os.open(path, os.O_PATH)
        except OSError:  # gone, or not ours to see
            continue
        if os.path.isdir(path):
            allowance |= READ_FOLDER
        else:
            allowance &= READ | WRITE
        rule = struct.pack("=Qi", allowance & everything, opened)
        landlock(ADD_RULE, ruleset, 1, rule, ctypes.c_uint32(0))
        os.close(opened)
    ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, which Landlock asks for
    landlock(RESTRICT, ruleset, ctypes.c_uint32(0))


def main():
    """Do what the request says, and write answers."""
    request = json.loads(Path(sys.argv[1]).read_text())
    answers, opened, notes = Path("answers.jsonl").open("a"), set(), {}

    def write(**found):
        answers.write(json.dumps(found | {"opened": sorted(opened)}) + "\n")
        answers.flush()

    if request["originals"]:
        watch_files(request["originals"], opened)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BIGGEST_FILE, BIGGEST_FILE))
    fence(request["hidden"], [os.getcwd(), "/dev/null"])
    import table  # what may be called, cut from the tables of exercises and hunts

    write(begun=True)
    try:
        with loaded(request["script"]) as module:
            if "settings" in request:
                if request["before"]:
                    getattr(table, request["before"])(module)
                write(loaded=True)
                train(module, os.getcwd(), **request["settings"])
                write(result=0)
            else:
                watch(module, request["blanks"], notes)
                write(loaded=True)
                for call in table.CALLS[request["first"] :]:
                    write(**answer(call, module, notes))
    except BadInput as error:
        write(refused=str(error))
    except (Exception, SystemExit) as error:
        write(error=explained(error, module))
    sys.stdout.flush()
    os._exit(0)  # nothing that the student's code has put off until the end happens


if __name__ == "__main__":
    main()
