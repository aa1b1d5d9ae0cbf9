"""What the tests of runs use: the command line in this process, what two run folders have to agree in, and kills."""

import csv
import json
import re
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch


def command(script, flags):
    """What `python script flags` does, in this process; the exit code."""
    torch.manual_seed(np.random.default_rng().integers(2**31))  # no run may depend on generators that all share
    with mock.patch.object(sys, "argv", [f"{script.__name__}.py", *flags.split()]):
        try:
            script.main()
        except SystemExit as stop:
            return stop.code or 0
    return 0


TIMES = "seconds", "sps"


def plain(x):
    """Tensors as lists and numbers in text, so that they can be compared; times are left out."""
    if isinstance(x, dict):
        return {name: plain(value) for name, value in x.items() if name not in TIMES}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    return x.tolist() if isinstance(x, torch.Tensor) else str(x)


def content(script, run="run"):
    """All numbers in a run folder but times: {file: what is in it}."""
    paths = [path for path in Path(run).rglob("*") if path.suffix != ".tmp"]  # the rest of a process that was killed
    found = {str(path.relative_to(run)): None for path in paths}
    for name in found:
        path = Path(run, name)
        if path.suffix == ".csv":
            with path.open(newline="") as file:
                found[name] = plain(list(csv.DictReader(file)))
        if path.name == "summary.json":
            found[name] = plain(json.loads(path.read_text()))
        if path.suffix == script.SUFFIX:
            found[name] = plain(script.read_state(path))
    return found


def check_refused(script, refused, folder, monkeypatch, capsys):
    """What the user can mend is one line that names it and exit code 2, and leaves nothing behind: {flags: words}."""
    monkeypatch.chdir(folder)
    for flags, words in refused.items():
        assert command(script, flags) == 2 and not list(folder.iterdir())
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1, f"{flags}: {err}"


def check_evaluation(script, capsys):
    """--evaluate plays the best weights, in other episodes than those that chose them, and changes nothing."""
    before, agent = content(script), script.load("run")
    assert command(script, "--evaluate run --eval-episodes 4") == 0 and content(script) == before
    mean, std = script.evaluate(agent, agent.args, 4, agent.args.seed + 20_000)
    assert f"best weights: {mean:.2f} ± {std:.2f} over 4 episodes" in capsys.readouterr().out


class Killed(BaseException):
    """No script may catch it."""


def kill_and_resume(script, flags, every, monkeypatch, folder):
    """A run that is killed before one of its files is written, and resumed, must end as an unbroken one, bit for bit.

    `every`: how many writes lie between the moments that are tried. The unbroken run stays in `folder`.
    """
    write, writes, fatal = script.write_file, [], 0
    own = " ".join(re.findall(r"--env-id \S+:\S+", flags))  # what may execute code is given again

    def write_or_die(path, *given):
        writes.append(Path(path).name)
        if len(writes) == fatal:
            raise Killed
        write(path, *given)

    monkeypatch.setattr(script, "write_file", write_or_die)
    monkeypatch.setattr(script.Run, "draw_curve", lambda run: None)  # it takes most of the time
    monkeypatch.chdir(folder)
    assert command(script, f"{flags} --no-progress --run-dir run") == 0
    unbroken, names = content(script), list(writes)
    if names.count(f"checkpoint{script.SUFFIX}") < 3:  # no AssertionError: it would pass for a mistake that was found
        raise ValueError("a run with fewer than three checkpoints shows nothing")
    for fatal in reversed(range(2, len(names) + 1, every)):  # the last first: there a mistake has had most time
        monkeypatch.chdir((folder / str(fatal)).mkdir() or folder / str(fatal))
        writes.clear()
        try:
            command(script, f"{flags} --no-progress --run-dir run")
            raise AssertionError("it was not killed")
        except Killed:
            assert command(script, f"--resume run --no-progress {own}") == 0
        assert content(script) == unbroken, f"killed before {names[fatal - 1]}, the {fatal}th file"
    monkeypatch.chdir(folder)
    fatal = 0
    assert (
        command(script, f"--resume run --no-progress {own}") == 0 and content(script) == unbroken
    )  # nothing is left to do
