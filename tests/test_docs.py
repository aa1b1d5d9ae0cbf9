"""What the pages tell a reader to do is done here: the examples of docs/ppo.md, and the names that pages mention."""

import importlib
import re
from pathlib import Path

import pytest
from run_folder import command
from tools import Probe, rehearse

ROOT = Path(__file__).resolve().parent.parent
PPO = (ROOT / "docs/ppo.md").read_text(encoding="utf-8")
SECTION = PPO.split("## How do I change it?")[1].split("\n## ")[0]
blocks = lambda kind: re.findall(rf"```{kind}\n(.*?)```", SECTION, re.DOTALL)
SMALL = "--num-envs 2 --num-steps 16 --num-minibatches 2 --total-timesteps 64 --eval-episodes 2 --no-progress"


@pytest.mark.parametrize("diff", blocks("diff"), ids=["activation", "network", "figure"])
def test_edits(diff, tmp_path, monkeypatch):
    """Each edit fits the script as it is, and the edited script trains."""
    old = "".join(line[1:] + "\n" for line in diff.splitlines() if line.startswith("-"))
    new = "".join(line[1:] + "\n" for line in diff.splitlines() if line.startswith("+"))
    text = (ROOT / "ppo.py").read_text(encoding="utf-8")
    assert text.count(old) == 1 and old != new
    (tmp_path / "edited.py").write_text(text.replace(old, new), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "edited", raising=False)
    edited = importlib.import_module("edited")
    run = rehearse(edited, Probe, num_envs=2, num_steps=16, num_minibatches=2, total_timesteps=64)
    assert "value_mean" in run.metrics or "value_mean" not in new


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


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_flags_exist(page):
    """A page names no flag that its script lacks."""
    script = ROOT / f"{page.stem}.py"
    if not script.exists() or page.stem == "compare":
        pytest.skip("a page that is about no script of one name")
    args = vars(importlib.import_module(page.stem).Args())
    commands = re.findall(rf"python {page.stem}\.py ([^`#|\n]*)", page.read_text(encoding="utf-8"))
    flags = {flag for command in commands for flag in re.findall(r"--([a-z][a-z-]+)", command)}
    names = {flag.removeprefix("no-").replace("-", "_") for flag in flags} - {"help"}
    assert names <= set(args), names - set(args)
