"""compare.py on tiny made-up run folders: grouping, labels, numbers worked out by hand, refusals, the picture."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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
    """Run the command as a user would."""
    return subprocess.run([sys.executable, compare.__file__, *flags], cwd=cwd, capture_output=True, text=True)


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


def test_labels_name_what_differs_and_nothing_else(tmp_path):
    """Fails if a legend names what all share or only another script has, hides a difference, or miscounts seeds."""
    old = make_run(tmp_path / "old", (1, 2), gamma=0.9)
    seed = make_run(tmp_path / "seed", (1, 2), gamma=0.9, seed=2)
    new = make_run(tmp_path / "new", (1, 2), gamma=0.9, clip_coef=0.2)
    dqn = make_run(tmp_path / "Pole-v1__dqn__1__2026", (1, 2), script=None, gamma=0.8, tau=1)  # told by its folder
    assert compare.label_settings(read(old, seed)["Pole-v1"]) == ["2 seeds"]
    assert compare.label_settings(read(old, seed, new, dqn)["Pole-v1"]) == [
        "2 seeds: script=ppo, gamma=0.9, clip_coef=not set",
        "1 seed: script=ppo, gamma=0.9, clip_coef=0.2",
        "1 seed: script=dqn, gamma=0.8",
    ]


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
    """Fails if the table takes another value than each run's last, or gives an interval for a single seed."""
    runs = [make_run(tmp_path / f"a{seed}", (9, seed), gamma=0.9, seed=seed) for seed in (1, 2, 3)]
    runs += [make_run(tmp_path / "b", (9, 5), steps=(0, 1000), gamma=0.8)]
    first, second = run_compare(*runs, "--table", cwd=tmp_path).stdout.splitlines()[-2:]
    assert first.split() == "2 -0.48434 to 4.4843 1 10 to 10 3 seeds: gamma=0.9".split()  # 2 ± 4.303 / √3
    assert second.split() == "5 one seed: no interval 5 1,000 to 1,000 1 seed: gamma=0.8".split()


def test_rows_that_hold_no_return(tmp_path):
    """Fails if a NaN (no episode was over yet) spoils a curve, or if half a row at the end of a file counts."""
    folder = make_run(tmp_path / "1", ("nan", 2, 3), steps=(0, 1, 2), file="metrics.csv")
    metrics = Path(folder, "metrics.csv")
    metrics.write_text(metrics.read_text() + "3,1.5,-1")  # of -150, say
    run = compare.read_run(folder, "training", "step")
    assert (run.x.tolist(), run.returns.tolist()) == ([1, 2], [2, 3])


NO_RUNS = {
    "config.json is damaged": ("config.json", b"[" * 100_000),
    "or not that of a run": ("config.json", b'{"args": {"env_id": "Pole-v1"}}'),
    "cannot read evaluations.csv: 'utf-8'": ("evaluations.csv", b"\xff\xfe\x00"),
    "evaluations.csv holds no return yet": ("evaluations.csv", b"step,seconds,return_mean\n1,1,nan\n"),
    "holds no return": ("evaluations.csv", b""),
    "each row needs numbers for step and return_mean": ("evaluations.csv", b"step,seconds,return_mean\n1,1\n"),
    "or step falls": ("evaluations.csv", b"step,seconds,return_mean\n2,1,1\n1,2,1\n"),
    "beyond all bounds": ("evaluations.csv", b"step,seconds,return_mean\n1,1,inf\n"),
    "is larger than 20,000,000 bytes": ("evaluations.csv", b"\n" * 20_000_001),
    "it has no config.json": ("config.json", None),
    "has no evaluations.csv: --returns training": ("evaluations.csv", None),
}


@pytest.mark.parametrize("words", NO_RUNS)
def test_what_is_no_run_is_refused(words, tmp_path, monkeypatch, capsys):
    """Fails if a damaged or foreign folder is drawn, ends in a traceback, or is not named; or if one is written."""
    good = make_run(tmp_path / "good", (1, 2))
    bad = make_run(tmp_path / "bad\nfolder", (1, 2), seed=2)
    name, content = NO_RUNS[words]
    Path(bad, name).unlink()
    if content is not None:
        Path(bad, name).write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["compare.py", good, bad, "--out", str(tmp_path / "a.png")])
    with pytest.raises(SystemExit) as stopped:
        compare.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and words in line and "bad?folder" in line
    assert not list(tmp_path.glob("*.png*"))


def test_what_cannot_be_compared_is_refused(tmp_path):
    """Fails if a seed counts twice, if runs without a common step are averaged, or if --out may hit a script."""
    run = make_run(tmp_path / "1", (1, 2))
    twin = make_run(tmp_path / "twin", (3, 4))
    later = make_run(tmp_path / "later", (1, 2), steps=(20, 30), seed=2)
    for words, *flags in (["leave out one", run, twin], ["ends before", run, later], [".png", run, "--out", "a.py"]):
        done = run_compare(*flags, cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1) and words in done.stderr


def test_picture_shows_what_was_computed(tmp_path):
    """Fails if a panel or curve is missing or under another's name, or if a curve that is cut short does not say so."""
    short = make_run(tmp_path / "1", (1, 2), steps=(0, 10), gamma=0.9)
    long = make_run(tmp_path / "2", (3, 6), steps=(0, 20), gamma=0.9, seed=2)
    other = make_run(tmp_path / "3", (7, 8), gamma=0.8)
    cart = make_run(tmp_path / "4", (1, 2), env_id="Cart-v1")
    top, bottom = compare.draw(read(short, long, other, cart), compare.Args(run_dirs=())).axes
    assert (top.get_title(), bottom.get_title(), top.get_xlabel()) == ("Pole-v1", "Cart-v1", "environment steps")
    labels = [text.get_text() for text in top.get_legend().get_texts()]
    assert labels == ["2 seeds: gamma=0.9\n(up to the end of the shortest run)", "1 seed: gamma=0.8"]
    assert [line.get_ydata().tolist() for line in top.get_lines()] == [[2, 3.25], [7, 8]]  # (2 + (3 + 6) / 2) / 2


def test_picture_is_replaced_as_a_whole(tmp_path):
    """Fails if an earlier picture is replaced without a word, lost when drawing fails, or written through a link."""
    run = make_run(tmp_path / "1", (1, 2), note="$\\frac{$ \x1b[31m")
    other = make_run(tmp_path / "2", (1, 2), note="_")
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "a.png.tmp").symlink_to(tmp_path / "precious")
    assert run_compare(run, other, "--out", "a.png", cwd=tmp_path).stdout == "picture: a.png\n"
    assert "an earlier one was replaced" in run_compare(run, "--out", "a.png", cwd=tmp_path).stdout
    picture = (tmp_path / "a.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and (tmp_path / "precious").read_text() == "precious"

    def full_disk(file, **_):
        file.write(b"half")
        raise OSError("no space left")

    with pytest.raises(compare.UserError, match="cannot write .*a.png: no space left"):
        compare.write_picture(SimpleNamespace(savefig=full_disk), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes() == picture


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
    command = [sys.executable, "-c", WATCHED, compare.__file__, run, "--table"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "config.json r\nevaluations.csv r\n")
    assert sorted(os.listdir(tmp_path)) == ["compare.png", "made_up_run"] and len(os.listdir(run)) == 8
