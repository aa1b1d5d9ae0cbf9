"""compare.py on tiny made-up run folders: grouping, labels, numbers worked out by hand, refusals, the picture."""

import codecs
import io
import json
import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import compare


def make_run(folder, returns, steps=(0, 10), file="evaluations.csv", script="ppo", **arguments):
    """Write the config.json and the rows of a made-up run. A step takes half a second. Returns the folder's path."""
    folder.mkdir(parents=True)
    config = {"script": script, "args": {"env_id": "Pole-v1", "seed": 1, "run_dir": str(folder)} | arguments}
    (folder / "config.json").write_text(json.dumps(config))
    rows = [f"{step},{step / 2},{value}" for step, value in zip(steps, returns)]
    (folder / file).write_text("\n".join(["step,seconds,return_mean", *rows, ""]))
    return str(folder)


def read(*folders, returns="evaluation", x="step"):
    """{environment: [setting, …]} of run folders."""
    return compare.group_runs([compare.read_run(folder, returns, x) for folder in folders])


def run_compare(*flags, cwd):
    """What the command does, in this process."""
    code, (out, err) = 0, [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    with chdir(cwd), redirect_stdout(out), redirect_stderr(err), mock.patch.object(sys, "argv", ["compare.py", *flags]):
        try:
            compare.main()
        except SystemExit as stop:
            code = stop.code
    for stream in (out, err):
        stream.seek(0)
    return SimpleNamespace(returncode=code, stdout=out.read(), stderr=err.read())


def test_runs_that_differ_only_in_seed_are_one_setting(tmp_path):
    """Fails if what does not change learning splits a curve, or if what does change it is averaged away."""
    first = make_run(tmp_path / "1", (1, 2), gamma=0.9, seed=1, device="cpu", progress=True)
    second = make_run(tmp_path / "2", (1, 2), gamma=0.9, seed=2, device="cuda", progress=False, resume="x")
    third = make_run(tmp_path / "3", (1, 2), gamma=0.8, seed=3, device="cpu")
    fourth = make_run(tmp_path / "4", (1, 2), gamma=0.9, seed=1, device="cpu", env_id="Cart-v1")
    panels = read(first, second, third, fourth)
    assert list(map(len, panels["Pole-v1"])) == [2, 1] and list(map(len, panels["Cart-v1"])) == [1]
    assert [run.folder for run in panels["Pole-v1"][0]] == [first, second]
    assert len(read(first, second, x="seconds")["Pole-v1"]) == 2  # a GPU does not learn more, but it may be faster


def test_demos_of_two_clones_are_one_setting(tmp_path):
    """Fails if the place of a clone, or where a run saves its demos, splits a curve, or if other demos do not."""
    first = make_run(tmp_path / "1", (1, 2), initial_human_demos_dir="/a/demos/Pole-v1", target_agent_demos_dir="x")
    second = make_run(tmp_path / "2", (1, 2), initial_human_demos_dir="/b/demos/Pole-v1", seed=2)
    third = make_run(tmp_path / "3", (1, 2), initial_human_demos_dir="/b/mine/Pole-v1", seed=3)
    assert list(map(len, read(first, second, third)["Pole-v1"])) == [2, 1]


def test_each_folder_a_setting(tmp_path):
    """Fails if a script and a copy of it with a bug are averaged although --each is given, or are not named."""
    runs = [make_run(tmp_path / name, (1, value)) for name, value in (("sound-1", 8), ("bug-1", 3))]
    *_, first, second = run_compare("sound-1", "bug-1", "--each", "--table", cwd=tmp_path).stdout.splitlines()
    assert (first.split()[0], first.split()[-3]) == ("8", "sound-1")
    assert (second.split()[0], second.split()[-3]) == ("3", "bug-1")
    assert len(read(*runs)["Pole-v1"]) == 1


def test_labels_name_what_differs_and_nothing_else(tmp_path):
    """Fails if a legend names what all share, hides a difference, or miscounts seeds."""
    old = make_run(tmp_path / "old", (1, 2), gamma=0.9)
    seed = make_run(tmp_path / "seed", (1, 2), gamma=0.9, seed=2)
    new = make_run(tmp_path / "new", (1, 2), gamma=0.9, clip_coef=0.2)
    assert compare.label_panels(read(old, seed), ()) == {"Pole-v1": ["ppo (2 seeds)"]}
    labels = ["clip_coef=not set (2 seeds)", "clip_coef=0.2 (1 seed)"]
    assert compare.label_panels(read(old, seed, new), ()) == {"Pole-v1": labels}


def test_labels_across_scripts_leave_out_defaults(tmp_path):
    """Fails if a legend names the defaults in which two scripts differ, or hides what differs within one of them."""
    ppo = make_run(tmp_path / "ppo", (1, 2), gamma=0.98, num_envs=32)
    dqn = make_run(tmp_path / "dqn", (1, 2), script="dqn", gamma=0.99, num_envs=1, tau=1)
    soft = make_run(tmp_path / "soft", (1, 2), script="dqn", gamma=0.99, num_envs=1, tau=0.1)
    labels = ["ppo (1 seed)", "dqn, tau=1 (1 seed)", "dqn, tau=0.1 (1 seed)"]
    assert compare.label_panels(read(ppo, dqn, soft), ()) == {"Pole-v1": labels}


def test_labels_that_are_given(tmp_path):
    """Fails if given names stand at other settings than the legend's, hide seeds, or are one too few unnoticed."""
    runs = [make_run(tmp_path / str(gamma), (1, gamma), gamma=gamma) for gamma in (8, 9)]
    runs += [make_run(tmp_path / "cart", (1, 7), gamma=9, env_id="Cart-v1")]
    panels = read(*runs)
    labels = {"Pole-v1": ["a (1 seed)", "b (1 seed)"], "Cart-v1": ["c (1 seed)"]}
    assert compare.label_panels(panels, ("a", "b", "c")) == labels
    with pytest.raises(compare.UserError, match="2 --labels for 3 settings"):
        compare.label_panels(panels, ("a", "b"))
    table = run_compare(*runs, "--table", "--labels", "short", "far", "other", cwd=tmp_path).stdout
    rows = [line.split() for line in table.splitlines() if line.endswith(" seed)")]
    assert [(row[0], row[-3]) for row in rows] == [("8", "short"), ("9", "far"), ("7", "other")]


def test_mean_and_band_by_hand(tmp_path):
    """Fails if seeds are averaged at different steps, if a run is drawn on beyond its end, or if the band is another.

    The first run is measured at steps 0 and 20, the second at 10 and 30. Both are known from 10 to 20 only:
        step 10:  first 0 + (40 - 0) * 10 / 20 = 20    second 10                                  mean 15
        step 20:  first 40                             second 10 + (50 - 10) * 10 / 20 = 30       mean 35
    """
    first = make_run(tmp_path / "1", (0, 40), steps=(0, 20), seed=1)
    second = make_run(tmp_path / "2", (10, 50), steps=(10, 30), seed=2)
    x, mean, lowest, highest = compare.across_seeds(read(first, second)["Pole-v1"][0])
    assert (x.tolist(), mean.tolist()) == ([10, 20], [15, 35])
    assert (lowest.tolist(), highest.tolist()) == ([10, 30], [20, 40])
    in_seconds = read(first, second, x="seconds")["Pole-v1"][0]
    assert compare.across_seeds(in_seconds)[0].tolist() == [5, 10]


def test_confidence_interval_by_hand():
    """Fails if the interval divides by n, takes the normal distribution's 1.96, or forgets the root of n.

    1, 2, 3: mean 2, s² = (1 + 0 + 1) / (3 - 1) = 1, t = 4.303 (two degrees of freedom), 4.303 * 1 / √3 = 2.484
    8 zeros, 8 ones: mean 0.5, s² = 16 * 0.25 / 15 = 0.26667, t = 2.131 (15 degrees), 2.131 * 0.5164 / √16 = 0.275
    """
    assert compare.confidence_interval([1, 2, 3]) == pytest.approx((2 - 2.484, 2 + 2.484), abs=1e-3)
    assert compare.confidence_interval([0, 1] * 8) == pytest.approx((0.5 - 0.275, 0.5 + 0.275), abs=1e-3)


def test_table(tmp_path):
    """Fails if the table takes another value than each run's last, or gives an interval where there is none."""
    runs = [make_run(tmp_path / f"a{seed}", (9, seed), gamma=0.9, seed=seed) for seed in (1, 2, 3)]
    runs += [make_run(tmp_path / "b", (9, 5), steps=(0, 1000), gamma=0.8)]
    runs += [make_run(tmp_path / f"c{end}", (9, end), steps=(0, end), gamma=0.7, seed=end) for end in (8, 10)]
    first, second, third = run_compare(*runs, "--table", cwd=tmp_path).stdout.splitlines()[-3:]
    assert first.split() == "2 -0.48434 to 4.4843 1 10 to 10 gamma=0.9 (3 seeds)".split()  # 2 ± 4.303 / √3
    assert second.split() == "5 one seed: no interval 5 1,000 to 1,000 gamma=0.8 (1 seed)".split()
    assert third.split() == "9 ends differ: no interval 8 8 to 10 gamma=0.7 (2 seeds)".split()


def test_rows_that_hold_no_return(tmp_path):
    """Fails if a NaN (no episode was over yet) spoils a curve."""
    folder = make_run(tmp_path / "1", ("nan", 2, 3), steps=(0, 1, 2), file="metrics.csv")
    run = compare.read_run(folder, "training", "step")
    assert (run.x.tolist(), run.returns.tolist()) == ([1, 2], [2, 3])


NO_RUNS = {
    "config.json is damaged": ("config.json", b"[" * 100_000),
    "or not that of a run": ("config.json", b'{"args": {"env_id": "Pole-v1"}}'),
    "cannot read evaluations.csv: 'utf-8'": ("evaluations.csv", b"\xff\xfe\x00"),
    "evaluations.csv holds no return yet": ("evaluations.csv", b"step,seconds,return_mean\n1,1,nan\n"),
    "holds no return": ("evaluations.csv", b""),
    "each row needs a number for each column": ("evaluations.csv", b"step,seconds,return_mean\n1,1\n"),
    "it has no config.json": ("config.json", None),
    "has no evaluations.csv: --returns training": ("evaluations.csv", None),
}


@pytest.mark.parametrize("words", NO_RUNS)
def test_what_is_no_run_is_left_out(words, tmp_path, monkeypatch, capsys):
    """Fails if a damaged or foreign folder is drawn, ends in a traceback, is not named, or stops others."""
    good = make_run(tmp_path / "good", (1, 2))
    bad = make_run(tmp_path / "bad\nfolder", (1, 2), seed=2)
    name, content = NO_RUNS[words]
    Path(bad, name).unlink()
    if content is not None:
        Path(bad, name).write_bytes(content)
    picture = tmp_path / "a.png"
    monkeypatch.setattr(sys, "argv", ["compare.py", bad, "--out", str(picture)])
    with pytest.raises(SystemExit) as stopped:
        compare.main()
    assert stopped.value.code == 2 and not picture.exists()
    line, last = capsys.readouterr().err.splitlines()
    assert words in line and "bad?folder" in line and "no run is left" in last
    monkeypatch.setattr(sys, "argv", ["compare.py", bad, good, "--out", str(picture), "--table"])
    compare.main()
    shown = capsys.readouterr()
    assert shown.err == f"{line}\n" and "ppo (1 seed)" in shown.out and picture.read_bytes().startswith(b"\x89PNG")


def test_a_seed_counts_once(tmp_path, capsys):
    """Fails if two runs with one setting and seed count as two seeds, or if the earlier is the one that counts."""
    first = make_run(tmp_path / "1", (1, 2))
    again = make_run(tmp_path / "2", (1, 3))
    (setting,) = read(first, again)["Pole-v1"]
    assert [run.folder for run in setting] == [again]
    assert capsys.readouterr().err == f"left out: {first} has the setting and the seed of {again}\n"


def test_a_run_that_was_killed_early_is_left_out(tmp_path, capsys):
    """Fails if runs without a common step are averaged, if the longer ones are left out, or if nothing is said."""
    killed = make_run(tmp_path / "1", (1, 2), steps=(0, 10), seed=1)
    late = make_run(tmp_path / "2", (1, 2), steps=(20, 30), seed=2)
    later = make_run(tmp_path / "3", (1, 2), steps=(25, 30), seed=3)
    other = make_run(tmp_path / "4", (1, 2), gamma=0.8)
    settings = read(killed, late, later, other)["Pole-v1"]
    assert [[run.folder for run in setting] for setting in settings] == [[late, later], [other]]
    message = f"left out: {killed} ends before another seed of its setting has a return\n"
    assert capsys.readouterr().err == message


def test_what_cannot_be_done_is_refused(tmp_path):
    """Fails if --out may hit a script or a missing folder, if anything is written, or if no plain line says why."""
    run = make_run(tmp_path / "1", (1, 2))
    (tmp_path / "file").touch()
    refused = {
        ".png": [run, "--out", "a.py"],
        "cannot write no/a.png: no is no folder": [run, "--out", "no/a.png", "--tensorboard", "events"],
        "nothing/* matches no folder": ["nothing/*"],
    }
    if find_spec("tensorboard"):
        refused["choose a new folder"] = [run, "--tensorboard", "file/x"]
    for words, flags in refused.items():
        done = run_compare(*flags, cwd=tmp_path)
        assert done.returncode == 2 and words in done.stderr.splitlines()[0]
    assert sorted(os.listdir(tmp_path)) == ["1", "file"]


def test_ctrl_c_ends_with_a_line(tmp_path):
    """Fails if it ends with a traceback."""
    with mock.patch.object(compare, "draw", side_effect=KeyboardInterrupt):
        assert run_compare(make_run(tmp_path / "1", (1, 2)), cwd=tmp_path).returncode == "\nstopped"


def test_names_in_a_notebook(tmp_path, monkeypatch):
    """Fails if a Path, or a single name that is no tuple, is no run folder, or if a * is none there."""
    run = make_run(tmp_path / "1", (1, 2))
    for run_dirs in (run, Path(run), (Path(run),), f"{tmp_path}/*"):
        assert compare.find_folders(run_dirs) == [run]


def test_picture_shows_what_was_computed(tmp_path):
    """Fails if a panel or curve is missing or under another's name, or if a curve that is cut short does not say so."""
    short = make_run(tmp_path / "1", (1, 2), steps=(0, 10), gamma=0.9)
    long = make_run(tmp_path / "2", (3, 6), steps=(0, 20), gamma=0.9, seed=2)
    other = make_run(tmp_path / "3", (7, 8), gamma=0.8)
    cart = make_run(tmp_path / "4", (1, 2), env_id="Cart-v1")
    panels = read(short, long, other, cart)
    top, bottom = compare.draw(panels, compare.label_panels(panels, ()), compare.Args(run_dirs=())).axes
    assert (top.get_title(), bottom.get_title(), top.get_xlabel()) == ("Pole-v1", "Cart-v1", "environment steps")
    labels = [text.get_text() for text in top.get_legend().get_texts()]
    assert labels == ["gamma=0.9 (2 seeds)\n(up to the end of the shortest run)", "gamma=0.8 (1 seed)"]
    assert [line.get_ydata().tolist() for line in top.get_lines()] == [[2, 3.25], [7, 8]]  # (2 + (3 + 6) / 2) / 2


def test_letters_of_arguments_command_nothing(tmp_path):
    """Fails if a label's letters are read as a formula, or reach the terminal."""
    runs = [make_run(tmp_path / note[0], (1, 2), note=note) for note in ("$\\frac{$ \x1b[31m", "_")]
    done = run_compare(*runs, "--out", "a.png", "--table", cwd=tmp_path)
    assert done.returncode == 0 and "note=$\\frac{$ ?[31m" in done.stdout and "note=_" in done.stdout


def test_a_table_that_a_spreadsheet_saved(tmp_path):
    """Fails if its byte order mark hides the first column."""
    run = make_run(tmp_path / "run", (1, 2))
    path = Path(run, "evaluations.csv")
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert read(run)["Pole-v1"][0][0].returns.tolist() == [1, 2]


def test_band_of_a_single_point(tmp_path):
    """Fails if the seeds of runs with one evaluation each cannot be seen: their band has no width."""
    runs = [make_run(tmp_path / str(seed), (seed,), steps=(10,), seed=seed) for seed in (1, 3)]
    figure = compare.draw(read(*runs), {"Pole-v1": ["a"]}, compare.Args(run_dirs=()))
    figure.draw_without_rendering()
    (band,) = figure.axes[0].collections
    assert band.get_linewidth() > 0 and band.get_datalim(figure.axes[0].transData).intervaly.tolist() == [1, 3]


def test_tensorboard_events(tmp_path):
    """Fails if a figure, a step or a run is missing among the events, or under another name; or if one counts twice."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = make_run(tmp_path / "runs/week/1", (1, 2), steps=(10, 20))
    make_run(tmp_path / "rows", ("nan", 7), steps=(5, 20), file="metrics.csv")
    Path(run, "metrics.csv").write_text((tmp_path / "rows/metrics.csv").read_text())
    other = make_run(tmp_path / "runs/1", (3, 4), gamma=0.8)
    Path(other, "metrics.csv").write_text("step,seconds,return_mean\n1,1,1\n2,2\n")  # cut off
    (tmp_path / "runs/none").mkdir()
    given = [f"{tmp_path}/runs/week/../../runs/week/1", "runs/1", "runs/none"]
    done = run_compare(*given, "--tensorboard", "events", cwd=tmp_path)
    assert done.returncode == 0 and "metrics.csv is damaged" in done.stderr
    assert sorted(os.listdir(tmp_path / "events")) == ["1", "week"]
    figures = {}
    for folder in ("week/1", "1"):
        events = accumulator.EventAccumulator(str(tmp_path / "events" / folder)).Reload()
        for tag in events.Tags()["tensors"]:
            figures[folder, tag] = [
                (event.step, float(event.tensor_proto.float_val[0])) for event in events.Tensors(tag)
            ]
    assert figures[("week/1", "evaluations/return_mean")] == [(10, 1), (20, 2)]
    assert figures[("week/1", "metrics/seconds")] == [(5, 2.5), (20, 10)]
    assert str(figures[("week/1", "metrics/return_mean")]) == "[(5, nan), (20, 7.0)]"
    assert figures[("1", "evaluations/return_mean")] == [(0, 3), (10, 4)]
    assert len(figures) == 2 * 2 + 2
    again = run_compare(run, "--tensorboard", "events", cwd=tmp_path)
    assert again.returncode == 2 and "choose a new folder" in again.stderr


def test_running_runs_are_followed(tmp_path, monkeypatch, capsys):
    """By hand: A was resumed and has two rows, B has none. While it waits, B gets a row and ends, then A gets a third
    row, then A ends. Each row is written once, and the table names both as they are at last."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.chdir(tmp_path)
    folder, other = make_run(tmp_path / "runs/A", (1, 2), steps=(10, 20), gamma=0.9), tmp_path / "runs/B"
    path, waits = Path(folder, "evaluations.csv"), []
    Path(folder, "summary.json").touch()
    os.utime(Path(folder, "summary.json"), (0, 0))  # of the time before it was resumed
    make_run(other, (), gamma=0.8)
    rows = (other / "evaluations.csv").read_text()
    (other / "evaluations.csv").unlink()

    def go_on(seconds):
        """What the runs do meanwhile."""
        waits.append(seconds)
        if len(waits) == 1:
            (other / "evaluations.csv").write_text(rows + "30,15,7\n")
            (other / "summary.json").touch()
        elif len(waits) == 2:
            path.write_text(path.read_text() + "30,15,3\n")
        else:
            Path(folder, "summary.json").touch()

    monkeypatch.setattr(compare.time, "sleep", go_on)
    args = compare.Args(run_dirs=(folder, other), tensorboard="events", follow=True, table=True)
    compare.compare(args)
    for name, steps in (("A", [10, 20, 30]), ("B", [30])):
        events = accumulator.EventAccumulator(str(tmp_path / "events" / name)).Reload()
        assert [event.step for event in events.Tensors("evaluations/return_mean")] == steps
    assert len(waits) == 3 and Path("compare.png").exists()
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first.split()[0] == "3" and first.endswith("gamma=0.9 (1 seed)")
    assert second.split()[0] == "7" and second.endswith("gamma=0.8 (1 seed)")


def test_ctrl_c_ends_following(tmp_path, monkeypatch, capsys):
    """Fails if Ctrl-C, the only end if a run was killed, leaves no picture and table behind."""
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare.time, "sleep", mock.Mock(side_effect=KeyboardInterrupt))
    run = make_run(tmp_path / "1", (1, 2))
    compare.compare(compare.Args(run_dirs=(run,), tensorboard="events", follow=True, table=True))
    assert Path("compare.png").exists() and "ppo (1 seed)" in capsys.readouterr().out


def test_two_drives_of_windows(tmp_path, monkeypatch):
    """Fails if runs on two drives, which have no common folder, end in a traceback."""
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(compare.os.path, "commonpath", mock.Mock(side_effect=ValueError))
    done = run_compare(make_run(tmp_path / "1", (1, 2)), "--tensorboard", "events", cwd=tmp_path)
    assert done.returncode == 2 and "on one drive" in done.stderr


def test_tensorboard_is_optional(tmp_path, monkeypatch):
    """Fails if the lack of the package is anything but a plain line, or if it is needed without --tensorboard."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    run = make_run(tmp_path / "1", (1, 2))
    with pytest.raises(compare.UserError, match="pip install tensorboard"):
        compare.compare(compare.Args(run_dirs=(run,), tensorboard="events"))
    compare.compare(compare.Args(run_dirs=(run,)))


WATCHED = """
import pathlib, runpy, sys

def watch(event, arguments):
    if event == "open" and "made_up_run" in str(arguments[0]):
        print(pathlib.Path(arguments[0]).name, arguments[1], file=sys.stderr)

sys.addaudithook(watch)
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def test_run_folders_are_only_read(tmp_path):
    """Fails if anything of a run folder is opened but its JSON and CSV, or if anything is written but the picture."""
    run = make_run(tmp_path / "made_up_run", (1, 2))
    for name in ("numpy.py", "matplotlib.py", "json.py", "sitecustomize.py", "checkpoint.pt", "envs.pkl"):
        Path(run, name).write_text("import pathlib; pathlib.Path('executed').touch()")
    command = [sys.executable, "-c", WATCHED, compare.__file__, "made_up*", "--table", "#", "a", "comment"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "config.json r\nevaluations.csv r\n")
    assert sorted(os.listdir(tmp_path)) == ["compare.png", "made_up_run"] and len(os.listdir(run)) == 8
