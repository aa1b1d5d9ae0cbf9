"""Write docs/results.md and its figure from the outputs in benchmarks/results.

python benchmarks/results_page.py
"""

import json
import statistics

from common import RESULTS, ROOT, interval, iqm, read
from peers import OURS

PAGE = ROOT / "docs" / "results.md"
FIGURE = RESULTS / "overview.png"
PUBLISHED = json.loads((ROOT / "benchmarks/data/published.json").read_text(encoding="utf-8"))
SCRIPTS = "ppo ppo_masked ppo_rnd ppod dqn rainbow ddpg_td3 sac es qlearning mappo maddpg_matd3".split()
INTRO = """# What these scripts reach

![Share of the best known score, per script and environment](../benchmarks/results/overview.png)

A score is the interquartile mean over seeds (without the best and the worst quarter), in brackets its 95 % bootstrap
interval. *Text* is the commit of the script that was measured. In the figure 0 is what random actions get, and 1 is
the best score known: the optimum, or the highest that is published or measured here. Dots are these scripts, diamonds
the peers, bars the intervals. Where a diamond is missing, no peer has been measured."""
HOW = """## How it was measured

* Scores: `python benchmarks/scores.py ppo.py CartPole-v1`: the plain command with its tuned settings, final weights,
  100 deterministic episodes for each seed, on seeds that were not tuned on. For a team, the sum over agents.
* Peers: `python benchmarks/peers.py`: Stable-Baselines3 2.9.2 and sb3-contrib 2.9.2 with the settings that rl-zoo has
  tuned, on the same machine, with the same evaluation. Published: rl-zoo's own list, one run each.
* Speed: `python benchmarks/speed.py`: environment steps per second in training, both sides in turn, on one thread, at
  equal settings. For ES and Q-learning the other side is the bare environment, which nobody can outrun.
* Single seeds, seconds, memory, versions and the machine (two cores, no GPU): [results](../benchmarks/results)."""


def number(x):
    """A figure with four digits or so, thousands apart."""
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"


def table(*rows):
    """A Markdown table; the first row is its head."""
    head, *body = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def score(returns):
    """Interquartile mean and interval, as one cell."""
    if len(returns) == 1:
        return f"{number(returns[0])} (one seed)"
    low, high = interval(returns)
    return f"{number(iqm(returns))} ({number(low)} to {number(high)})"


def peer_scores(script, env_id, side="peer"):
    """The entry of the script's peer on an environment; {} if it was not measured."""
    names = [name for name, ours in OURS.items() if ours == script]
    return read("peers").get(f"{names[0]} {env_id}, {side}", {}) if names else {}


def rows_of(script):
    """The rows of a script's table: each environment with its tuned settings, without other flags."""
    yield "environment", "score", "mean", "worst seed", "seeds", "steps", "peer", "published", "text"
    for env_id, entry in read(f"{script}_scores").items():
        if " " in env_id:
            continue
        peer = peer_scores(script, env_id)
        published = PUBLISHED.get(env_id, {})
        known = published.get(script) or (f"optimum {published['optimum']}" if "optimum" in published else "–")
        cells = [number(statistics.mean(entry["returns"])), number(min(entry["returns"]))]
        cells += [len(entry["seeds"]), number(max(entry["steps"]))]
        cells += [score(peer["returns"]) if peer else "–", known, entry.get("commit", "not recorded")]
        yield f"`{env_id}`", score(entry["returns"]), *cells


def races():
    """Rows: ours beside the peer, steps and seconds to the threshold, memory and lines."""
    yield "task", "side", "score", "steps to threshold", "seconds to threshold", "memory, MiB", "lines to read"
    for key, entry in sorted(read("peers").items()):
        task, side = key.split(", ")
        cells = []
        for field in ("steps to threshold", "seconds to threshold"):
            there = [value for value in entry[field] if value is not None]
            missed = len(entry[field]) - len(there)
            cells.append((number(statistics.median(there)) if there else "") + (f" ({missed} never)" if missed else ""))
        yield task, side, score(entry["returns"]), *cells, max(entry["memory"]), f"{entry['lines'][0]:,}"


def speeds():
    """Rows of speed.json, without those that compare a script with itself at another commit."""
    yield "what", "ours / peer", "lowest to highest of the pairs", "text"
    for name, entry in read("speed").items():
        if "beside" not in name:
            yield name, f"{entry['ratio']:.2f}", f"{min(entry['ratios'])} to {max(entry['ratios'])}", entry["commit"]


def shares():
    """(script, environment, side, share of the best known score, low, high) of all that can be placed."""
    entries = []
    for script in SCRIPTS:
        if script == "ppod":  # its MountainCar has another reward
            continue
        for env_id, entry in read(f"{script}_scores").items():
            entries.append((script, env_id, "ours", entry["returns"]))
            entries.append((script, env_id, "peer", peer_scores(script, env_id).get("returns")))
    entries = [entry for entry in entries if entry[3]]
    for script, env_id, side, returns in entries:
        known = PUBLISHED.get(env_id, {})
        rivals = [iqm(others) for _, other, _, others in entries if other == env_id]
        best = known["optimum"] if "optimum" in known else max([*rivals, known.get("best", min(rivals))])
        if env_id in read("random"):
            worst = read("random")[env_id]["returns"][0]
            yield script, env_id, side, *[(x - worst) / (best - worst) for x in (iqm(returns), *interval(returns))]


def draw():
    """The figure: a row for each script and environment."""
    from matplotlib.figure import Figure

    found = list(shares())
    places = {place: i for i, place in enumerate(dict.fromkeys(share[:2] for share in found))}
    figure = Figure(figsize=(9, 1 + 0.21 * len(places)), layout="constrained")
    axis = figure.subplots()
    labels = []
    for script, env_id in places:
        first = not labels or not any(label.startswith(f"{script}.py") for label in labels)
        labels.append(f"{script}.py   {env_id}" if first else env_id)
    for script, env_id, side, share, low, high in found:
        row = places[script, env_id] + (0.25 if side == "peer" else 0)
        style = {"fmt": "o", "color": "C0"} if side == "ours" else {"fmt": "D", "color": "C1"}
        axis.errorbar(
            share, row, xerr=[[max(share - low, 0)], [max(high - share, 0)]], markersize=4, capsize=2, **style
        )
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(range(len(labels)), labels, fontsize="small")
    axis.invert_yaxis()
    axis.set(xlim=(0, 1.1), xlabel="share of the best known score (0: random actions)")
    axis.grid(axis="x", alpha=0.3)
    figure.savefig(FIGURE, dpi=110)


def page():
    """The whole page."""
    parts = [INTRO]
    for script in SCRIPTS:
        rows = list(rows_of(script))
        if len(rows) > 1:
            parts += [f"## {script}.py", table(*rows)]
    if read("peers"):
        parts += ["## Beside the peers", table(*races())]
    killed, differing = (sum(entry[field] for entry in read("kills").values()) for field in ("kills", "differing"))
    kills = f"Of runs killed {killed} times and resumed (`python benchmarks/kills.py`), {differing} came out different."
    parts += ["## Speeds", table(*speeds()), kills, HOW]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    draw()
    PAGE.write_text(page(), encoding="utf-8")
