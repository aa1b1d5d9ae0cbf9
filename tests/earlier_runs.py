"""For tests of scripts that still have the earlier form: how to start a run, read it and compare two."""

import csv
import json
import os
from pathlib import Path

import torch

TIME_COLUMNS = ("seconds", "sps")


def surroundings(**extra):
    """Environment variables of a process: one thread, no window, our environments importable, no CUDA device."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    own = {"OMP_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | own | extra


def metrics(run_dir):
    """The text of metrics.csv as rows of cells, header first, without the columns that hold times."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    kept = [i for i, name in enumerate(header) if name not in TIME_COLUMNS]
    assert len(kept) == len(header) - 2 and all(len(row) == len(header) for row in rows)
    return [[row[i] for i in kept] for row in [header, *rows]]


def column(run_dir, name):
    header, *rows = metrics(run_dir)
    return [float(row[header.index(name)]) for row in rows]


def torch_file(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def assert_equal(one, other, where=""):
    """Two nests of dicts, lists and tensors are the same, bit for bit; the message says where they are not."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other)):
            assert_equal(a, b, f"{where}[{i}]")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    else:
        assert one == other, where


def assert_same_run(one, other):
    """Two finished runs agree in everything but the time they took: figures, every saved weight, generators, buffers
    of the optimiser, returns of all episodes, evaluations."""
    assert metrics(one) == metrics(other)
    files = [sorted(path.name for path in (run / "models").iterdir()) for run in (one, other)]
    assert files[0] == files[1]
    for name in files[0]:
        assert_equal(torch_file(one / "models" / name), torch_file(other / "models" / name), name)
    states = [torch_file(run / "checkpoint.pt") for run in (one, other)]
    for state in states:
        assert state.pop("seconds") > 0
    assert_equal(*states, "checkpoint.pt")
    times = ("seconds", "steps_per_second")
    final = [{k: v for k, v in summary(run).items() if k not in times} for run in (one, other)]
    assert final[0] == final[1]


def assert_one_line(err):
    assert err.endswith("\n") and err.count("\n") == 1 and len(err) > 10, err
    assert not any(word in err for word in ("Traceback", "usage:", "│", "---", "\r", "\x1b")), err
