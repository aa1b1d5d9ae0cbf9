"""What the pages tell a reader to do is done here: the examples of docs/ppo.md, and the names that pages mention.

Their figures are those of benchmarks/results.
"""

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from run_folder import command

ROOT = Path(__file__).resolve().parent.parent
PPO = (ROOT / "docs/ppo.md").read_text(encoding="utf-8")
change = lambda page: page.split("## How do I change it?")[-1].split("\n## ")[0]
blocks = lambda kind, text=PPO: re.findall(rf"```{kind}\n(.*?)```", change(text), re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = "--num-envs 2 --num-steps 16 --num-minibatches 2 --total-timesteps 64 --eval-episodes 2 --no-progress"


FEW = "--total-timesteps 64 --eval-episodes 2 --no-progress "
OFF_POLICY = FEW + "--num-envs 2 --learning-starts 8 --batch-size 4 --buffer-size 64"
SHORT = {  # a run of each script that takes a second
    "ppo": SMALL,
    "reinforce": FEW + "--num-envs 2 --max-episode-steps 8",
    "ppo_ddp": SMALL,
    "ppo_masked": SMALL,
    "ppo_rnd": SMALL,
    "ppod": SMALL + " --rho 0 --phi 0",
    "dqn": OFF_POLICY,
    "rainbow": OFF_POLICY,
    "ddpg_td3": OFF_POLICY,
    "sac": OFF_POLICY,
    "es": FEW + "--population-size 4 --max-episode-steps 8",
    "qlearning": FEW + "--max-episode-steps 8",
    "mappo": SMALL,
    "maddpg_matd3": OFF_POLICY,
}
EDITS = [(page.stem, diff) for page in PAGES for diff in blocks("diff", page.read_text(encoding="utf-8"))]


def edited_text(name, diff):
    """The script's text with an edit of its page."""
    old = "".join(line[1:] + "\n" for line in diff.splitlines() if not line.startswith("+"))
    new = "".join(line[1:] + "\n" for line in diff.splitlines() if not line.startswith("-"))
    text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    assert text.count(old) == 1 and old != new, f"{name}:\n{diff}"
    return text.replace(old, new)


def test_edits_fit():
    """Each edit on a script's page fits the script as it is, and what comes of it can be compiled."""
    for name, diff in EDITS:
        compile(edited_text(name, diff), name, "exec")


MARKED = [pytest.param(*edit, marks=[pytest.mark.slow] * (edit[0] != "ppo")) for edit in EDITS]


@pytest.mark.parametrize("name, diff", MARKED, ids=[f"{name}-{i}" for i, (name, _) in enumerate(EDITS)])
def test_edits(name, diff, tmp_path, monkeypatch):
    """With each edit the script trains; a new metric has a column."""
    (tmp_path / "edited.py").write_text(edited_text(name, diff), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "edited", raising=False)
    edited = importlib.import_module("edited")
    monkeypatch.setattr(edited.Run, "draw_curve", lambda run: None)
    assert command(edited, f"{SHORT[name]} --run-dir run") == 0
    columns = Path("run/metrics.csv").read_text().split("\n")[0]
    assert all(metric in columns for metric in re.findall(r'^\+ *"(\w+)": ', diff, re.MULTILINE))


def test_environment_and_wrapper(tmp_path, monkeypatch):
    """The files are written as the page has them, and its commands run, with fewer steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for code in blocks("python"):
        Path(code.split("# ")[1].split("\n")[0]).write_text(code)
    ppo = importlib.import_module("ppo")
    monkeypatch.setattr(ppo.Run, "draw_curve", lambda run: None)
    commands = [line.removeprefix("python ppo.py ") for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == 2 and all(command(ppo, f"{flags} {SMALL}") == 0 for flags in commands)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_exist(page):
    """A page names no flag that a script lacks."""
    for name, words in re.findall(r"python (\w+)\.py ([^`#|\n]*)", page.read_text(encoding="utf-8")):
        script = importlib.import_module(name) if (ROOT / f"{name}.py").exists() else None
        if hasattr(script, "Args"):
            flags = re.findall(r"--([a-z][a-z-]+)", words)
            names = {flag.removeprefix("no-").replace("-", "_") for flag in flags} - {"help"}
            assert names <= {*script.Args.__annotations__}, f"{name}.py {words}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_and_links(page):
    """A code block begins and ends on lines of its own, and what a page links to exists."""
    text = page.read_text(encoding="utf-8")
    fences = [line for line in text.splitlines() if "```" in line]
    assert len(fences) % 2 == 0 and all(re.fullmatch(r" *```\w*", line) for line in fences)
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        target = page.parent / path if path else page
        assert target.exists(), path
        titles = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
        assert not anchor or anchor in slugs, f"{path}#{anchor}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_comments_of_commands(page):
    """zsh and cmd.exe read a comment as part of the command: it holds no character on which they act."""
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for comment in re.findall(r"(?<!\S)#.*", block):
            assert not re.search(r"""[;'"()`&|<>*?!$]""", comment), comment


@pytest.fixture
def results_page(monkeypatch):
    """benchmarks/results_page.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("results_page")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_are_the_measured_ones(page, results_page, monkeypatch):
    """Fails if a page shows other figures than the files in benchmarks/results, or if a mark is misspelt or open."""
    text = page.read_text(encoding="utf-8")
    kinds = {kind for kind, _ in results_page.MARK.findall(text)}
    assert kinds <= {*results_page.KINDS, *results_page.COLUMNS, "seeds"}
    assert len(results_page.MARK.findall(text)) == text.count("<!-- end -->") == text.count("<!--") / 2
    changed = results_page.CHANGED  # a script that is being edited needs no new pages
    monkeypatch.setattr(results_page, "present_text", lambda *_: None)
    assert results_page.page(page).replace(changed, "") == text.replace(changed, ""), "run benchmarks/results_page.py"


# Three seeds of Pole (mean 2, worst 1, most steps 1,100, median of 3 and 8 seconds 6), on a text of ppo.py that is not
# the present one; nothing was measured on Cart.
STAMP = {"script": "ppo.py", "env_id": "Pole", "text": "another", "commit": "abc1234"}
SCORES = {
    "Pole": {"seeds": [3, 1, 2], "returns": [3, 1.0, 2], "steps": [90, 1100, 80], "seconds": [3, None, 8]} | STAMP,
    "Cart": {"seeds": []},
}
# A variant x on environment A: (2.5 + -1) / 2 = 0.75.
VARIANTS = {"A, x": {"seeds": [1, 2], "returns": [2.5, -1], "steps": [5, 6]}}
PAGE = """Before <!-- mean: made_scores Pole -->9<!-- end -->, <!-- seconds: made_scores Cart --><!-- end --> after.
<!-- scores: made -->old<!-- end -->
<!-- variants: made -->

old

<!-- end -->
<!-- grid: made --><!-- end -->
"""
WRITTEN = """Before <!-- mean: made_scores Pole -->2<!-- end -->, <!-- seconds: made_scores Cart -->–<!-- end --> after.
<!-- scores: made -->

| environment | mean | worst seed | seeds | steps | seconds | random play | published | commit |
|---|---|---|---|---|---|---|---|---|
| `Pole` | 2 | 1 | 1–3 | 1,100 | 6 | – | – | abc1234, since changed |
| `Cart` | – | – | – | – | – | – | – | – |

<!-- end -->
<!-- variants: made -->

|  | mean | worst seed | seeds | steps |
|---|---|---|---|---|
| A, x | 0.75 | −1 | 1, 2 | 6 |

<!-- end -->
<!-- grid: made -->

| mean (worst seed; number of seeds) | A |
|---|---|
| steps | 6 |
| commit | – |
| x | 0.75 (−1; 2) |

<!-- end -->
"""


def test_figures_by_hand(results_page, tmp_path, monkeypatch):
    """Fails if a figure is summarised wrongly, stays as it was, or is made up where nothing was measured."""
    monkeypatch.setattr(importlib.import_module("common"), "RESULTS", tmp_path)
    for name, report in {"made_scores": SCORES, "made": VARIANTS}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    (tmp_path / "page.md").write_text(PAGE, encoding="utf-8")
    assert results_page.page(tmp_path / "page.md") == WRITTEN
    assert [results_page.number(x) for x in (-46.6254, 0.004916, -0.0001, 1234.6)] == ["−46.63", "0.005", "0", "1,235"]


def test_the_page_of_broken_curves(monkeypatch):
    """Each curve has its picture and its section; its faults fit the scripts, its flags and columns exist."""
    for folder in ("benchmarks", "exercises"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    broken, copies = importlib.import_module("broken_curves"), importlib.import_module("copies")
    text = (ROOT / "docs/debugging.md").read_text(encoding="utf-8")
    sections = text.split("\n## ")[1:]
    assert {*re.findall(r"debugging/([a-z-]+)\.png", text)} == {*broken.CURVES} and len(sections) == 10
    assert all(section.count("\n* **") == 3 for section in sections)
    for name, curve in broken.CURVES.items():
        assert 0 < (broken.PICTURES / f"{name}.png").stat().st_size < 50_000
        assert curve.bug or curve.wrong
        source = copies.source_of(curve.script)
        for change in filter(None, [curve.metric, curve.bug]):
            source = copies.planted(source, change)
        assert all(f"{column}=" in source or f'"{column}":' in source for column in curve.columns)
        script = importlib.import_module(curve.script.removesuffix(".py"))
        for more in (curve.wrong, curve.sound):
            script.tuned(*f"{curve.flags} {more}".split())


def test_the_page_on_use(tmp_path, monkeypatch):
    """Its blocks run one after the other, and all three ways act alike; normalisation is part of what is exported."""
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/use.md").read_text(encoding="utf-8")
    ppo = importlib.import_module("ppo")
    monkeypatch.setattr(ppo.Run, "draw_curve", lambda run: None)
    (train,) = re.findall(r"```sh\npython ppo.py ([^#\n]*)", text)
    assert command(ppo, f"{train} {SMALL} --normalize-obs") == 0
    *plain, onnx = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    for code in plain:
        exec(code, names)
    statistics = names["agent"].obs_stats
    statistics.mean += torch.arange(4) / 10  # so that actions would differ without it
    batch = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    wanted = names["agent"].act(batch).tolist()
    assert {*wanted} == {0, 1}
    exec(plain[-1], names)
    assert [names["acting"](torch.as_tensor(row[None])).item() for row in batch] == wanted
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    exec(onnx, names)
    assert [names["session"].run(None, {"obs": row[None]})[0].item() for row in batch] == wanted
