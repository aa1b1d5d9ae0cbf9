# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = ["numpy>=1.26", "matplotlib>=3.8", "tyro>=1.0"]
# ///
"""Compare runs: the learning curves of several run folders in one picture, averaged over seeds.

Runs that differ in nothing but their seed are one setting, and each setting is one curve: the line is the mean over its
seeds; at each step, the band reaches from the lowest seed to the highest. The legend names what differs. Each
environment has a panel. A folder that holds no run is left out, with a line that says so.

    python compare.py runs/*                                  # all runs there are, in compare.png
    python compare.py runs/A runs/B runs/C --table            # and print final means with 95 % intervals
    python compare.py runs/* --returns training --x seconds   # returns while training, against time
    python compare.py runs/bug-* runs/sound-* --each          # a curve for each folder, such as a copy with an edit
    python compare.py runs/* --tensorboard events             # and write all figures for TensorBoard
    python compare.py runs/A --tensorboard events --follow    # and go on doing so while the run goes on
"""

import csv
import glob
import json
import math
import os
import sys
import textwrap
import time
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro


@dataclass(kw_only=True)
class Args:
    """Every flag with its default."""

    run_dirs: tyro.conf.Positional[tuple[str, ...]]  # the run folders to compare
    out: str = "compare.png"  # where the picture goes; an earlier one of that name is replaced
    returns: Literal["evaluation", "training"] = "evaluation"  # of evaluations, or of the episodes of training
    x: Literal["step", "seconds"] = "step"  # against environment steps, or seconds since training began
    each: bool = False  # a setting for each folder, named by it; else two scripts of the same name are taken for one
    labels: tuple[str, ...] = ()  # names for the legends, one for each setting, in the order in which they stand there
    table: bool = False  # also print the final mean of each setting, with its 95 % confidence interval
    tensorboard: str | None = None  # also write all figures of the runs as TensorBoard events, into this new folder
    # with --tensorboard: write what is new every ten seconds, until all runs have ended, or Ctrl-C. A run that was
    # killed has not ended: it may be resumed
    follow: bool = False


IGNORED = "run_dir resume evaluate model render config progress capture_video".split()  # make no other setting
IGNORED += "target_agent_demos_dir save_demos_every num_agent_demos_to_save".split()
FOLLOW_EVERY = 10  # seconds
ONLY_SPEED = "device async_envs".split()  # nor do these, unless seconds are drawn
# 97.5 % quantiles of Student's t for 2 to 16 seeds; the last one serves for more, and is at most 9 % too large.
T_QUANTILES = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131]
# What the picture needs of a run folder. A list of these is a setting. x (steps or seconds) and returns: (points,)
LoggedRun = namedtuple("LoggedRun", "folder seed arguments x returns")


class UserError(Exception):
    """What the user can mend: `main` prints its one line."""


def printable(value):
    """The value as text without line breaks or control characters: these, in a stranger's file, command a terminal."""
    return "".join(character if character.isprintable() else "?" for character in str(value))


def read_text(folder, name):
    """The text of a file in a run folder. UserError if it is missing, unreadable or not UTF-8."""
    path = Path(folder, name)
    if not path.is_file():
        raise UserError(f"{folder} is no run folder, or its run has just begun: it has no {name}")
    try:
        return path.read_text(encoding="utf-8-sig")  # a spreadsheet puts a mark before the first column
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder}: cannot read {name}: {error}") from None


def read_arguments(folder):
    """A run's arguments as text, and "script", which made it. UserError if config.json is not that of a run."""
    try:
        config = json.loads(read_text(folder, "config.json"))
        arguments = {printable(name): printable(value) for name, value in config["args"].items()}
        if not {"env_id", "seed"} <= arguments.keys():
            raise ValueError("every script has these two")
        return {"script": printable(config["script"])} | arguments
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(f"{folder} is no run folder: config.json is damaged, or not that of a run") from None


def read_rows(folder, name):
    """The rows of a CSV file, dicts of numbers. UserError if it is missing, or if something else stands in it."""
    rows = []
    try:
        for row in csv.DictReader(read_text(folder, name).splitlines()):
            rows.append({column: float(value) for column, value in row.items()})
    except (TypeError, ValueError, csv.Error):
        raise UserError(f"{folder}: {name} is damaged: each row needs a number for each column") from None
    return rows


def read_columns(folder, name, columns):
    """Columns of a CSV file as arrays. Rows with a NaN (no episode was over yet) or an infinity are left out."""
    table = []
    for row in read_rows(folder, name):
        values = [row.get(column, math.nan) for column in columns]
        if np.isfinite(values).all():
            table.append(values)
    if not table:
        raise UserError(f"{folder}: {name} holds no return yet")
    return np.array(sorted(table)).T


def read_run(folder, returns, x, each=False):
    """A run folder as a LoggedRun. UserError, saying which folder and why, if it is none."""
    arguments = read_arguments(folder)
    seed = arguments.pop("seed")
    ignored = IGNORED if x == "seconds" else IGNORED + ONLY_SPEED
    for name in ignored:
        arguments.pop(name, None)
    for name in arguments:
        if name.endswith("_dir"):  # two clones of the repository have the same demos in two places
            arguments[name] = "/".join(Path(arguments[name]).parts[-2:])
    if each:
        arguments = {"script": printable(folder), "env_id": arguments["env_id"]}
    csv_name = "metrics.csv" if returns == "training" else "evaluations.csv"
    if csv_name == "evaluations.csv" and not Path(folder, csv_name).exists():
        raise UserError(f"{folder} has no evaluations.csv: --returns training draws its training episodes instead")
    return LoggedRun(folder, seed, arguments, *read_columns(folder, csv_name, [x, "return_mean"]))


def leave_out(reason):
    """Say, in one line, why a folder is left out."""
    print(f"left out: {printable(reason)}", file=sys.stderr)


def find_folders(run_dirs):
    """The folders that are meant: cmd.exe, PowerShell and notebooks leave runs/* as it is, a notebook may give one."""
    folders = []
    for name in [run_dirs] if isinstance(run_dirs, (str, Path)) else run_dirs:
        found = sorted(glob.glob(str(name))) if "*" in str(name) else [str(name)]
        if not found:
            leave_out(f"{name} matches no folder")
        folders += found
    return folders


def read_panels(folders, args):
    """What `draw` needs: {environment: [setting, …]} of the folders that hold a run, and {environment: [label, …]}.

    Of the other folders, a line each says why they are left out. UserError if none is left.
    """
    runs = []
    for folder in folders:
        try:
            runs.append(read_run(folder, args.returns, args.x, args.each))
        except UserError as error:
            leave_out(error)
    if not runs:
        raise UserError("no run is left to be drawn")
    panels = group_runs(runs)
    return panels, label_panels(panels, args.labels)


def group_runs(runs):
    """{environment: [setting, …]}. Of two runs with one setting and seed, the later counts: they are no two seeds."""
    panels = {}
    for run in runs:
        settings = panels.setdefault(run.arguments["env_id"], {})
        setting = settings.setdefault(frozenset(run.arguments.items()), {})
        if run.seed in setting:
            leave_out(f"{setting[run.seed].folder} has the setting and the seed of {run.folder}")
        setting[run.seed] = run
    for settings in panels.values():
        for key, setting in settings.items():
            settings[key] = leave_out_short_runs(list(setting.values()))
    return {env_id: list(settings.values()) for env_id, settings in panels.items()}


def leave_out_short_runs(setting):
    """A setting without the runs that ended, killed perhaps, before another one of its runs had a return."""
    while len(common_x(setting)) == 0:
        shortest = min(setting, key=lambda run: run.x[-1])
        leave_out(f"{shortest.folder} ends before another seed of its setting has a return")
        setting = [run for run in setting if run is not shortest]
    return setting


def label_settings(settings, names):
    """What the legend says of each setting of a panel: its script, if there are several, what differs, its seeds.

    The next of `names`, an iterator, if there is one, replaces all but the seeds. What differs is an argument that has
    several values among the settings of the same script: the defaults of two scripts differ in a dozen arguments, and
    none of these was anybody's choice.
    """
    scripts = {setting[0].arguments["script"] for setting in settings}
    labels = []
    for setting in settings:
        script = setting[0].arguments["script"]
        siblings = [other[0].arguments for other in settings if other[0].arguments["script"] == script]
        words = [script] if len(scripts) > 1 else []
        for name in dict.fromkeys(name for arguments in siblings for name in arguments):  # in their order, each once
            if len({arguments.get(name) for arguments in siblings}) > 1:
                words.append(f"{name}={setting[0].arguments.get(name, 'not set')}")
        seeds = "1 seed" if len(setting) == 1 else f"{len(setting)} seeds"
        labels.append(f"{next(names, ', '.join(words) or script)} ({seeds})")
    return labels


def label_panels(panels, given):
    """{environment: [label, …]}, with the names that are given. UserError if not each setting is given one."""
    number = sum(len(settings) for settings in panels.values())
    if given and len(given) != number:
        raise UserError(f"{len(given)} --labels for {number} settings: give one for each")
    names = iter(given)
    return {env_id: label_settings(settings, names) for env_id, settings in panels.items()}


def common_x(setting):
    """Every point at which some seed was measured, from where the last of them begins to where the first ends."""
    begin = max(run.x[0] for run in setting)
    end = min(run.x[-1] for run in setting)
    x = np.unique(np.concatenate([run.x for run in setting]))
    x = x[(x >= begin) & (x <= end)]
    if len(x) == 0 and begin < 1.1 * end:
        x = np.array([begin])  # short runs have one evaluation each, at about the same step
    return x


def across_seeds(setting):
    """(x, mean, lowest, highest): the returns of a setting over its seeds, an array each.

    Every mean is over all seeds. Between its own points, a seed's return is on a straight line.
    """
    x = common_x(setting)
    returns = np.array([np.interp(x, run.x, run.returns) for run in setting])
    return x, returns.mean(axis=0), returns.min(axis=0), returns.max(axis=0)


def draw(panels, labels, args):
    """The picture, a matplotlib Figure: a panel for each environment, a curve for each of its settings."""
    from matplotlib.figure import Figure  # slow to import

    height = 5 + 0.25 * max(len(settings) for settings in panels.values())  # the legend stands below the curves
    figure = Figure(figsize=(9, height * len(panels)), layout="constrained")
    all_axes = figure.subplots(len(panels), squeeze=False).flat
    for axes, (env_id, settings) in zip(all_axes, panels.items()):
        for number, (setting, label) in enumerate(zip(settings, labels[env_id])):
            x, mean, lowest, highest = across_seeds(setting)
            label = textwrap.fill(label, 100, max_lines=5, placeholder=" …")
            if x[-1] < 0.9 * max(run.x[-1] for run in setting):
                label += "\n(up to the end of the shortest run)"
            style = ["-", "--", ":", "-."][number // 10 % 4]  # there are ten colours
            marker = "o" if args.returns == "evaluation" or len(x) == 1 else ""  # a single point is no line
            label = label.replace("$", r"\$")  # it begins no formula
            (line,) = axes.plot(x, mean, linestyle=style, marker=marker, markersize=3, label=label)
            width = 3 if len(x) == 1 else 0  # of the band's outline, which is all there is of it at a single point
            axes.fill_between(x, lowest, highest, color=line.get_color(), alpha=0.2, linewidth=width)
        unit = "environment steps" if args.x == "step" else "seconds of training"
        title = env_id.replace("$", r"\$")
        axes.set(title=title, xlabel=unit, ylabel=f"{args.returns} return: mean over seeds, lowest to highest")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize="small", frameon=False)
        axes.xaxis.set_major_formatter("{x:,.10g}")
        axes.grid(alpha=0.3)
    return figure


def confidence_interval(finals):
    """(low, high), 95 %, of the mean of n >= 2 independent numbers: mean ± t s / √n, where s² divides by n - 1."""
    n = len(finals)
    half_width = T_QUANTILES[min(n, 16) - 2] * np.std(finals, ddof=1) / np.sqrt(n)
    return np.mean(finals) - half_width, np.mean(finals) + half_width


def print_table(panels, labels, args):
    """The mean of the last returns of each setting's runs, the 95 % interval, the lowest, the ends of the runs."""
    for env_id, settings in panels.items():
        print(f"\n{env_id}: last {args.returns} return of each run")
        print(f"{'mean':>10}  {'95 % interval':^24}  {'lowest last return':>18}  {'at ' + args.x:^24}  setting")
        for setting, label in zip(settings, labels[env_id]):
            finals = [run.returns[-1] for run in setting]
            ends = sorted(run.x[-1] for run in setting)
            interval = "one seed: no interval"
            if ends[0] < 0.9 * ends[-1]:
                interval = "ends differ: no interval"
            elif len(finals) > 1:
                interval = "{:.5g} to {:.5g}".format(*confidence_interval(finals))
            at = f"{ends[0]:,.0f} to {ends[-1]:,.0f}"
            print(f"{np.mean(finals):>10.5g}  {interval:^24}  {min(finals):>18.5g}  {at:^24}  {label}")


def goes_on(folder):
    """Whether a run has no summary.json, or an old one: --resume writes config.json anew."""
    summary = Path(folder, "summary.json")
    return not summary.exists() or summary.stat().st_mtime < Path(folder, "config.json").stat().st_mtime


def write_events(folders, out, follow=False):
    """Write every figure of the runs as TensorBoard events, into a folder for each run. UserError if that fails.

    With `follow` what is new is written again and again, until no run goes on, or until Ctrl-C.
    """
    try:
        from tensorboard.summary import Writer
    except ImportError:
        raise UserError("--tensorboard needs a package: pip install tensorboard") from None
    paths = [Path(folder).resolve() for folder in folders if Path(folder, "config.json").is_file()]
    try:
        common = os.path.commonpath([path.parent for path in paths])
        Path(out).mkdir(parents=True)
    except ValueError:
        raise UserError("--tensorboard needs all runs on one drive") from None
    except OSError as error:
        raise UserError(f"--tensorboard: choose a new folder, so that no figure counts twice: {error}") from None
    writers = {path: Writer(str(Path(out, path.relative_to(common)))) for path in paths}
    written = {}  # the last step of each file
    try:
        while True:
            running = [path for path in paths if goes_on(path)]
            for path, writer in writers.items():
                for table in ("metrics", "evaluations"):
                    written[path, table] = write_rows(path, table, writer, written.get((path, table), -1))
                writer.flush()
            if not (follow and running):
                break
            time.sleep(FOLLOW_EVERY)
    except KeyboardInterrupt:
        print("stopped; what there is by now is written")
    for writer in writers.values():
        writer.close()


def write_rows(path, table, writer, after):
    """Write the rows of a CSV file whose step is larger than `after`. Returns the last step."""
    if not Path(path, f"{table}.csv").exists():  # a run that was stopped before its first evaluation
        return after
    try:
        rows = read_rows(path, f"{table}.csv")
    except UserError as error:
        leave_out(error)
        return after
    for row in rows:
        step = row.pop("step", math.nan)
        if after < step < 2**63:  # neither NaN nor more than an event can hold
            for column, value in row.items():
                writer.add_scalar(f"{table}/{column}", value, round(step))
            after = step
    return after


def compare(args):
    """Draw the picture and print what there is to say. UserError on bad input, before anything is written."""
    if args.follow and not args.tensorboard:
        raise UserError("--follow goes with --tensorboard FOLDER")
    if not args.run_dirs or Path(args.out).suffix != ".png":
        raise UserError("give at least one run folder, and an --out that ends in .png")
    if not Path(args.out).parent.is_dir():
        raise UserError(f"cannot write {args.out}: {Path(args.out).parent} is no folder")
    folders = find_folders(args.run_dirs)
    panels, labels = read_panels(folders, args)
    if args.tensorboard:
        write_events(folders, args.tensorboard, args.follow)
    if args.follow:  # the runs have gone on
        panels, labels = read_panels(folders, args)
    figure = draw(panels, labels, args)
    try:
        figure.savefig(args.out, dpi=120)
    except OSError as error:
        raise UserError(f"cannot write {args.out}: {error}") from None
    print(f"picture: {args.out}")
    if args.table:
        print_table(panels, labels, args)


def main():
    """Compare as the flags say. What the user can mend is one line on stderr and exit code 2."""
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter of a label shows a ?
    flags = sys.argv[1:]
    flags = flags[: flags.index("#")] if "#" in flags else flags  # cmd.exe and zsh hand over comments
    try:
        compare(tyro.cli(Args, args=flags, description=__doc__))
    except UserError as error:
        print(f"{sys.argv[0]}: {printable(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("\nstopped")


if __name__ == "__main__":
    main()
