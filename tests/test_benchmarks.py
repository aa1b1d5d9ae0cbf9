"""What benchmarks/ writes down: which text of a script was measured, and whether it has changed since."""

import ast
import importlib
import json
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def text_of(monkeypatch, tmp_path):
    """text_of of benchmarks/text.py, for a source in place of a file's name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def text_of_source(source, env_id=None):
        (tmp_path / "script.py").write_text(source, encoding="utf-8")
        return importlib.import_module("text").text_of(tmp_path / "script.py", env_id)

    return text_of_source


SCRIPT = '''
import numpy as np

class Args:
    """Flags."""
    gamma: float = 0.99  # discount
    rate: float = 0.1
    progress: bool = True

FAST = {"rate": 0.5}
TUNED = {"Pole-v1": FAST | {"gamma": 0.9}, "Cart-v0": {"gamma": 1.0}}

def discounted(rewards, gamma=1.0):
    """A sum."""
    total = 0
    for reward in reversed(rewards):
        total = reward + gamma * total  # R_t
    return total

class Buffer:
    def add(self, reward, done):
        self.rewards = np.append(self.rewards, reward * (1 - done))

    def clear(self):
        self.rewards = []

def train(args):
    if args.gamma > 1:
        raise ValueError("gamma is too large")
    buffer = Buffer()
    buffer.add(done=0, reward=args.rate)
    return discounted(buffer.rewards, gamma=args.gamma)
'''
# Renamed: variables, arguments, functions, a class, a constant, an import. Reordered: definitions, methods, fields.
REWRITTEN = '''
"""A docstring."""
import numpy

def train(settings):
    if package == "ale_py":
        settings = preprocessed(settings)
    for name in settings:
        if name == "gama":
            raise ValueError(name)
    memory = Memory()
    memory.add(done=0, gain=settings.rate)
    return backwards(memory.rewards, discount=settings.gamma)

class Memory:
    """Keeps rewards."""

    def clear(my):
        my.rewards = []

    def add(my, gain, done):
        if done > 1:
            message = f"{done} is no flag"
            raise TypeError(message)
        my.rewards = numpy.append(
            my.rewards,
            gain * (1 - done),
        )

def unused():
    print("not reached")

def backwards(gains, discount=1.0):
    result = 0
    for x in reversed(gains): result = x + discount * result
    print("sum:", result)
    return result

class Args:
    progress: bool = False
    rate: float = 0.1
    gamma: float = 0.99

QUICK = {"rate": 0.5}
TUNED = {"Cart-v0": {"gamma": 1.0}, "Pole-v1": QUICK | {"gamma": 0.9}}

# ===== run
def main(): ...
'''
CHANGES = [  # of what is computed
    ("total = 0", "total = 1"),
    ("gamma=1.0", "gamma=0.5"),
    ("reversed(rewards)", "rewards"),
    ("reward + gamma * total", "total + gamma * reward"),
    ("(1 - done)", "(1 - reward)"),
    ("done=0, reward=args.rate", "reward=0, done=args.rate"),
    ("np.append", "np.add"),
    ("self.rewards = []", "self.returns = []"),
    ("rate: float = 0.1", "rate: float = 0.2"),
    ('"gamma": 1.0', '"gamma": 0.9'),
    ('{"rate": 0.5}', '{"rate": 0.6}'),
]


def test_words_do_not_count(text_of):
    """The same hash for other names, another order, other messages; another one for each other computation."""
    assert text_of(SCRIPT) == text_of(REWRITTEN)
    hashes = [text_of(SCRIPT.replace(*change)) for change in CHANGES]
    assert len({text_of(SCRIPT), *hashes}) == 1 + len(CHANGES)


def test_settings_of_one_environment(text_of):
    """With an environment, what TUNED holds for others does not count, nor does a default that it overrides."""
    other = SCRIPT.replace('"gamma": 1.0', '"gamma": 0.5')
    assert text_of(SCRIPT, "Pole-v1") == text_of(other, "Pole-v1") != text_of(SCRIPT, "Cart-v0")
    assert text_of(SCRIPT, "Cart-v0") != text_of(other, "Cart-v0")
    default = SCRIPT.replace("rate: float = 0.1", "rate: float = 0.2")
    assert text_of(SCRIPT, "Pole-v1") == text_of(default, "Pole-v1")
    assert text_of(SCRIPT, "Cart-v0") != text_of(default, "Cart-v0")


def test_ppo(text_of):
    """ppo.py without comments, formatted by ast.unparse, its definitions from last to first: the same hash."""
    source = (ROOT / "ppo.py").read_text(encoding="utf-8").split("# ===== run")[0]
    tree = ast.parse(source)
    tree.body.sort(key=lambda node: -node.lineno if hasattr(node, "name") else -math.inf)
    assert text_of(ast.unparse(tree), "CartPole-v1") == text_of(source, "CartPole-v1")
    assert text_of(source.replace("0.5 * errors.mean()", "0.6 * errors.mean()"), "CartPole-v1") != text_of(
        source, "CartPole-v1"
    )


def test_unknown(text_of):
    """No script has settings for the environments of unknown.py; half of them are kept from choosing."""
    unknown, text = importlib.import_module("unknown"), importlib.import_module("text")
    assert len(unknown.CHOOSING) == len(unknown.REPORTING) >= 8 and not {*unknown.CHOOSING} & {*unknown.REPORTING}
    ids = {env_id for _, env_id, _ in unknown.ENVIRONMENTS.values()}
    assert len(ids) == len(unknown.ENVIRONMENTS)
    for script in ROOT.glob("*.py"):
        source = script.read_text(encoding="utf-8")
        if "\nTUNED" in source:
            tuned = text.Story(source.split("# ===== run")[0]).tuned
            assert tuned and not {env_id.split(":")[-1] for env_id in ids} & {*tuned}, script


def test_share(text_of, tmp_path, monkeypatch):
    """Ours gains (3 + 5) / 2 - 1 = 3 over random play, the peer 9 - 1 = 8: a share of 3 / 8 = 0.375."""
    monkeypatch.setattr(importlib.import_module("common"), "RESULTS", tmp_path)
    returns = {"ours": [3.0, 5.0], "peer": [9.0], "random": [1.0]}
    report = {f"ppo Arm, {side}": {"half": "choosing", "returns": values} for side, values in returns.items()}
    (tmp_path / "unknown.json").write_text(json.dumps(report | {"ppo Leg, ours": {"half": "choosing", "returns": [2]}}))
    _, _, *rows = importlib.import_module("results_page").unknown("ppo").splitlines()
    arm, leg, mean = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert arm == ["Arm", "4", "3", "–", "–", "9", "9", "–", "–", "1", "0.375", "–"]
    assert leg[-2] == "–" and mean[-2] == "0.375, 0.375, 0.375"


def test_confirm(text_of, tmp_path, monkeypatch):
    """Two texts that train alike carry the entry over, those with another loss do not."""
    monkeypatch.setattr(importlib.import_module("common"), "RESULTS", tmp_path)
    scores = importlib.import_module("scores")
    monkeypatch.setattr(scores, "script_at", lambda commit, script: f"{commit}/{script}")
    monkeypatch.setattr(scores, "text_of", lambda script, env_id: "old")
    monkeypatch.setattr(scores, "lengths_of", lambda script, env_id: lengths[script])
    lengths = {"a1/es.py": ["100"], "es.py": ["100"]}
    losses = {"a1/es.py": "2.5", "es.py": "2.4"}
    monkeypatch.setattr(scores, "train", lambda script, *_: (script, None))
    metrics = lambda script: {"step": ("1", "2"), "seconds": (script, "3"), "loss": ("0.5", losses[script])}
    monkeypatch.setattr(scores, "metrics_of", metrics)
    for seed in (1, 2):
        scores.keep("es_scores", "Arm", {"text": "old", "commit": "a1"}, seed, {"returns": 9.0, "seconds": 5})
    new = {"text": "new", "commit": "b2", "script": "es.py"}
    assert not scores.confirm("es_scores", "Arm", new, 100)
    assert scores.read("es_scores")["Arm"]["text"] == "old"
    losses["es.py"] = "2.5"
    lengths["es.py"] = ["200"]
    assert not scores.confirm("es_scores", "Arm", new, 100)
    lengths["es.py"] = ["100"]
    assert scores.confirm("es_scores", "Arm", new, 100)
    entry = scores.read("es_scores")["Arm"]
    assert (entry["text"], entry["measured"], entry["seeds"], entry["returns"]) == ("new", "a1", [1, 2], [9.0, 9.0])
    assert importlib.import_module("results_page").cell(entry | {"script": None}, "commit") == "a1 = b2"
