"""Run the experiment sheets, and write what came out into the notes for teachers.

    python benchmarks/sheets.py 06 07     # the runs of two sheets, one after the other, and the tables of all sheets
    python benchmarks/sheets.py           # only the tables

The commands are those of exercises/sheets/week-….md. A run that is finished in runs/ is not repeated. Figures go to
benchmarks/results/sheets.json, and from there into exercises/teachers/week-….md, between two marks. compare.py is left
out: it draws, and adds nothing to the figures.
"""

import argparse
import csv
import json
import os
import re
import shlex
import statistics
import subprocess
import sys

from common import ROOT, number, read, stamp, table, write

SHEETS, TEACHERS = ROOT / "exercises" / "sheets", ROOT / "exercises" / "teachers"
BEGIN, END = "<!-- figures: written by benchmarks/sheets.py -->", "<!-- end of figures -->"
LOOP = re.compile(r"^( *)for (\w+) in ([^\n]*); do\n(.*?)^\1done$", re.DOTALL | re.MULTILINE)
# What else a sheet asks to look at: columns of metrics.csv, and what is taken of each run's.
LAST, LARGEST = ("in the end", lambda column: column[-1]), ("at most", max)
MEAN = ("mean over the run", statistics.mean)
COLUMNS = {
    "week-01": [("return_mean", LAST)],
    "week-03": [("return_mean", LAST), ("td_error", LAST)],
    "week-04": [("q", LARGEST)],
    "week-05": [("q", LARGEST)],
    "week-06": [("return_mean", LAST), ("explained_variance", LAST)],
    "week-07": [("approx_kl", MEAN), ("clip_fraction", MEAN)],
    "week-08": [("return_mean", LAST), ("entropy", LAST)],
    "week-09": [("value_mean", LAST)],
    "week-10": [("return_mean", LAST)],
    "week-11": [("value_loss", LAST), ("explained_variance", LAST)],
    "week-12": [("return_mean", LAST)],
}


def commands(text):
    """What a shell would run of a sheet, lists of words. Loops, assignments (x="…") and $x are understood."""
    text = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).replace("\\\n", " ")
    while loop := LOOP.search(text):  # the outer one of two comes first
        _, name, values, body = loop.groups()
        rounds = [re.sub(rf"\${name}\b", value, body) for value in values.split()]
        text = text.replace(loop[0], "".join(rounds), 1)
    found, names = [], {}
    for line in text.splitlines():
        line = re.sub(r"\$(\w+)", lambda match: names[match[1]], line.strip())
        if assignment := re.fullmatch(r'(\w+)="(.*)"', line):
            names[assignment[1]] = assignment[2]
        elif line:
            found.append(shlex.split(line))
    return found


def figures(week, run):
    """What a finished run says: its last evaluation, its steps, and the columns that its sheet asks to look at."""
    summary = json.loads((run / "summary.json").read_text())
    found = {"evaluation": summary["eval_return_mean"], "steps": summary["global_step"]}
    with open(run / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    for column, (_, taken) in COLUMNS.get(week, []):
        found[column] = taken([float(row[column]) for row in rows if row[column] not in ("", "nan")])
    return found


def run_sheet(week):
    """Make the runs of a sheet that are not finished yet, noting the figures of each."""
    for python, script, *flags in commands((SHEETS / f"{week}.md").read_text(encoding="utf-8")):
        if script == "compare.py":
            continue
        run = ROOT / flags[flags.index("--run-dir") + 1]
        if not (run / "summary.json").exists():
            print(python, script, *flags, flush=True)
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(ROOT / script), *flags, "--no-progress"]
            subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        setting, seed = run.name.rsplit("-seed-", 1)
        known = read("sheets")
        made = {"commit": stamp(script)["commit"]}
        known.setdefault(week, {}).setdefault(setting, {})[seed] = figures(week, run) | made
        write("sheets", known)


def table_of(week, settings):
    """A Markdown table, a row for each setting: seeds, last evaluations, and means of the other figures."""
    columns = [f"`{column}` {words}" for column, (words, _) in COLUMNS.get(week, [])]
    commits = ", ".join(sorted({run["commit"].strip("+") for runs in settings.values() for run in runs.values()}))
    rows = [[f"setting (commit {commits})", "seeds", "last evaluation, mean", "of each seed", *columns]]
    for setting, runs in settings.items():
        seeds = sorted(runs, key=int)
        mean = lambda name: number(statistics.mean(run[name] for run in runs.values()))
        each = ", ".join(number(runs[seed]["evaluation"]) for seed in seeds)
        others = [mean(column) for column, _ in COLUMNS.get(week, [])]
        rows.append([setting, ", ".join(seeds), mean("evaluation"), each, *others])
    return table(*rows)


def write_tables():
    """Put the figures that there are into the notes for teachers, between the marks."""
    known = read("sheets")
    for path in sorted(TEACHERS.glob("week-*.md")):
        before, rest = path.read_text(encoding="utf-8").split(BEGIN)
        after = rest.split(END)[1]
        text = table_of(path.stem, known[path.stem])
        path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weeks", nargs="*", metavar="WEEK", help="two digits: 01 to 12")
    for week in parser.parse_args().weeks:
        run_sheet(f"week-{week}")
    write_tables()


if __name__ == "__main__":
    main()
