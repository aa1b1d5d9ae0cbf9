"""What the benchmarks share: which text was measured, where, and what is there already.

A result file is JSON, {what was measured: entry}. An entry says where and on what text it was measured, and holds lists
with an item for each of its "seeds". Each seed is written as soon as it is measured, so a command that was killed goes
on where it was; an entry of another text of the script is replaced.
"""

import json
import os
import platform
import random
import statistics
import subprocess
import sys
from importlib.metadata import version

from text import ROOT, text_of

RESULTS = ROOT / "benchmarks" / "results"


def stamp(script, env_id=None):
    """What identifies a measurement: the text, the commit that last changed it (+: changed since), the machine."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "log", "-1", "--format=%h", "--", script], capture_output=True, text=True).stdout
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", script]).returncode
    return {
        "script": script,
        "env_id": env_id,
        "text": text_of(script, env_id),
        "commit": commit.strip() + ("+" if changed else ""),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "gymnasium", "numpy")},
    }


def read(name):
    """A result file; {} if there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(name, report):
    """Write a result file, short lists on one line each."""
    entries = []
    for key, entry in report.items():
        lines = [f"  {json.dumps(field)}: {json.dumps(value)}" for field, value in entry.items()]
        entries.append(f" {json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n }")
    temporary = RESULTS / f"{name}.json.tmp"
    temporary.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")
    os.replace(temporary, RESULTS / f"{name}.json")


def missing(name, key, text, seeds):
    """The seeds that have not been measured on this text."""
    entry = read(name).get(key, {})
    there = entry["seeds"] if entry.get("text") == text else []
    return [seed for seed in seeds if seed not in there]


def keep(name, key, stamped, seed, figures):
    """Add the figures of one seed to an entry; begin it anew if the text is another."""
    report = read(name)
    if report.get(key, {}).get("text") != stamped["text"]:
        report[key] = stamped | {"seeds": []}
    report[key]["seeds"].append(seed)
    for field, value in figures.items():
        report[key].setdefault(field, []).append(value)
    write(name, report)


def call(*command, **environment):
    """(what a command prints, the most memory that it took in MiB), on one thread; its error ends the benchmark."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True, env=environment)
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(map(str, command))}")
    unit = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes there, in KiB here
    return printed, round(usage.ru_maxrss / unit)


def thin(points, most=100):
    """At most so many of the points, equally far apart, the last one among them; four digits each."""
    chosen = points[:: -(-len(points) // most)] if points else []
    chosen = chosen if not points or chosen[-1] == points[-1] else [*chosen[: most - 1], points[-1]]
    return [[float(f"{value:.4g}") if i else int(value) for i, value in enumerate(point)] for point in chosen]


def iqm(values):
    """The interquartile mean: a quarter of the values is left out at each end (Agarwal et al. 2021)."""
    values = sorted(values)
    cut = len(values) // 4
    return statistics.mean(values[cut : len(values) - cut])


def interval(values, statistic=iqm):
    """(low, high): the 95 % bootstrap interval of a statistic, of 2,000 draws; of one value, the value."""
    rng = random.Random(0)
    draws = sorted(float(statistic(rng.choices(values, k=len(values)))) for _ in range(2000))
    return draws[50], draws[-51]


def number(x):
    """A figure with four digits, at most three of them behind the point, thousands apart."""
    short = f"{x:,.0f}" if abs(x) >= 1000 else f"{round(float(f'{x:.4g}'), 3) + 0:g}"  # + 0: no minus before a 0
    return short.replace("-", "−")


def table(*rows):
    """A Markdown table; the first row is its head."""
    head, *body = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])
