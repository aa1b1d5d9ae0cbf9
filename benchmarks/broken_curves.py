"""The broken learning curves of docs/debugging.md: ten runs with a fault, each beside the same run without it.

    python benchmarks/broken_curves.py                   # all pictures, into docs/debugging/; five minutes
    python benchmarks/broken_curves.py kl-spikes         # one of them

A fault is one of the bugs of exercises/hunts.py, a mistake of an exercise, or a flag. Runs go to runs/broken/; those
that are finished there are drawn again, not run again.
"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

from text import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "exercises")]
from copies import planted, source_of  # noqa: E402
from mechanism import load  # noqa: E402

PICTURES, RUNS = ROOT / "docs" / "debugging", Path("runs/broken")
LENGTH = {"dqn.py": 40_000, "ppo.py": 60_000, "ddpg_td3.py": 12_000, "sac.py": 8_000, "qlearning.py": 30_000}
DQN = "--env-id CartPole-v1 --gamma 0.95 --buffer-size 10000 --learning-rate 1e-3 --exploration-fraction 0.4"
PENDULUM = "--env-id Pendulum-v1"
# A metric that ddpg_td3.py does not write; docs/debugging.md shows the edit.
LOSS, AT_BOUNDS = '{"actor_loss": loss.detach()', ', "at_bounds": (agent.actor(batch.obs).abs() > 0.99).float().mean()'


@dataclass
class Curve:
    """A run with a fault: a change of the script's text, or flags that the sound run does not have."""

    script: str
    columns: list  # of metrics.csv, beside the returns
    flags: str  # of both runs
    bug: str = ""  # "function: old -> new"
    wrong: str = ""
    sound: str = ""  # in place of `wrong`
    metric: str = ""  # a change of both


CURVES = {
    "q-above-its-bound": Curve("dqn.py", ["q", "loss"], DQN, "td_targets: gamma * ~terminated -> ~terminated"),
    "flat-return-falling-loss": Curve(
        "dqn.py", ["loss", "q"], DQN, "polyak: target_weights.lerp_(weights, tau) -> target_weights.lerp(weights, tau)"
    ),
    "training-below-evaluation": Curve(
        "dqn.py",
        ["epsilon", "q"],
        DQN,
        "train: linear_schedule(args.start_e, args.end_e, -> linear_schedule(args.end_e, args.start_e,",
    ),
    "entropy-gone": Curve(
        "ppo.py",
        ["entropy", "approx_kl"],
        "--env-id CartPole-v1 --ent-coef 0.3",
        "ppo_loss: pg_loss - args.ent_coef * entropy -> pg_loss + args.ent_coef * entropy",
    ),
    "kl-spikes": Curve(
        "ppo.py",
        ["approx_kl", "clip_fraction"],
        "--env-id CartPole-v1 --update-epochs 20",
        wrong="--clip-coef 1000000 --max-grad-norm 1000",
    ),
    "critic-learns-nothing": Curve(
        "ppo.py",
        ["explained_variance", "value_loss"],
        "--env-id CartPole-v1",
        "compute_gae: advantages, advantages + values -> advantages, advantages",
    ),
    "value-loss-growing": Curve(
        "ddpg_td3.py",
        ["critic_loss", "value_mean"],
        PENDULUM,
        "bellman_targets: for critic in agent.target_critics -> for critic in agent.critics",
        wrong="--critic-learning-rate 0.01",
    ),
    "policy-at-the-bounds": Curve(
        "ddpg_td3.py",
        ["at_bounds", "actor_loss"],
        PENDULUM,
        wrong="--actor-learning-rate 0.1",
        metric=f"update_actor: {LOSS} -> {LOSS}{AT_BOUNDS}",
    ),
    "alpha-runs-away": Curve(
        "sac.py",
        ["alpha", "entropy"],
        PENDULUM,
        "alpha_loss: log_probs.detach() + target_entropy -> log_probs.detach() - target_entropy",
    ),
    "evaluation-below-training": Curve(
        "qlearning.py",
        ["td_error"],
        "--env-id CliffWalking-v1 --algorithm sarsa --no-anneal-lr --epsilon-start 0.1 --epsilon-min 0.1",
        wrong="--learning-rate 0.9",
        sound="--learning-rate 0.1",
    ),
}


def run(name, curve, kind):
    """The folder of a run, "broken" or "sound", which is made if it is not there."""
    folder = RUNS / f"{name}-{kind}"
    if not (folder / "summary.json").exists():
        source = source_of(curve.script)
        for change in filter(None, [curve.metric, curve.bug if kind == "broken" else ""]):
            source = planted(source, change)
        path = RUNS / f"{name}-{kind}-text" / curve.script
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
        steps = LENGTH[curve.script]
        always = f"--total-timesteps {steps} --eval-every {steps // 12} --eval-episodes 10 --seed 1 --no-progress"
        flags = f"{curve.flags} {curve.wrong if kind == 'broken' else curve.sound} {always} --run-dir {folder}"
        module = load(path)
        module.train(module.tuned(*flags.split()))
    return folder


def column(path, name):
    """(steps, numbers) of a column of a CSV file; what is no number is left out."""
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    pairs = [(float(row["step"]), float(row[name])) for row in rows if row.get(name) not in ("", None, "nan")]
    return tuple(zip(*pairs))


def draw(name, curve):
    """The picture: returns, and two columns; the broken run in red, the sound one in grey."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(10, 2.6), layout="constrained")
    axes = figure.subplots(1, 1 + len(curve.columns))
    for kind, color in (("sound", "0.55"), ("broken", "tab:red")):
        folder = run(name, curve, kind)
        axes[0].plot(*column(folder / "metrics.csv", "return_mean"), color=color, label=kind)
        axes[0].plot(*column(folder / "evaluations.csv", "return_mean"), "o", color=color, markersize=4)
        for each, title in zip(axes[1:], curve.columns):
            each.plot(*column(folder / "metrics.csv", title), color=color)
            if title == "q" and kind == "broken":
                each.plot(*column(folder / "metrics.csv", "q_bound"), "--", color="black", linewidth=1)
    for each, title in zip(axes, ["return (line: training, dots: evaluations)", *curve.columns]):
        each.set_title(title, fontsize="medium")
        each.locator_params(axis="x", nbins=4)
        each.xaxis.set_major_formatter("{x:,.0f}")
        each.set_yscale("log" if title in ("alpha", "approx_kl", "critic_loss") else "linear")
    axes[0].legend()
    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / f"{name}.png", dpi=75)


def main():
    """Draw those that are named, or all."""
    names = sys.argv[1:]
    names = names[: names.index("#")] if "#" in names else names  # cmd.exe and zsh hand over comments
    for name in names or CURVES:
        draw(name, CURVES[name])
        print(PICTURES / f"{name}.png", flush=True)


if __name__ == "__main__":
    main()
