"""Write the measured figures on README.md and docs/*.md, and draw the figures, from the files in benchmarks/results.

    python benchmarks/results_page.py

What stands on a page between <!-- KIND: NAME --> and <!-- end --> is written anew; KINDS and COLUMNS below are the
kinds. NAME is a script for a table of its scores, a result file for a table of variants, and "FILE ENTRY" for a single
figure. Where nothing was measured, there is a dash.
"""

import json
import math
import re
import statistics
from functools import cache

from common import RESULTS, interval, iqm, number, read, table
from matplotlib.figure import Figure
from peers import OURS
from text import ROOT, text_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PUBLISHED = json.loads((ROOT / "benchmarks/data/published.json").read_text(encoding="utf-8"))
SCRIPTS = "ppo reinforce ppo_masked ppo_rnd dqn rainbow ddpg_td3 sac es qlearning mappo maddpg_matd3".split()
CHANGED = ", since changed"
MARK = re.compile(r"<!-- ([\w ]+): (.*?) -->.*?<!-- end -->", re.DOTALL)
COLUMNS = {  # title: the list of an entry, with an item for each seed, and what is taken of it
    "mean": ("returns", statistics.mean),
    "worst seed": ("returns", min),
    "steps": ("steps", max),
    "seconds": ("seconds", lambda seconds: round(statistics.median(seconds))),
    "reached by": ("seconds to threshold", len),
    "steps to threshold": ("steps to threshold", statistics.median),
    "seconds to threshold": ("seconds to threshold", statistics.median),
    "ours / peer": ("ratios", statistics.median),
    "lowest pair": ("ratios", min),
    "highest pair": ("ratios", max),
    "times as fast": ("gains", statistics.median),
    "on the CPU": ("CPU", max),
    "on the GPU": ("GPU", max),
    "Stable-Baselines3 on the GPU": ("Stable-Baselines3", max),
    "memory, MiB": ("memory", max),
    "compiling": ("compiling", statistics.median),
    "largest `q` / bound": ("q", max),
    "lines to read": ("lines", max),
}


@cache
def present_text(script, env_id):
    """The hash of a script as it is today."""
    return text_of(script, env_id)


def cell(entry, title):
    """A column of an entry, as text."""
    if title == "commit":
        same = entry.get("script") is None or entry["text"] == present_text(entry["script"], entry["env_id"])
        measured = f"{entry['measured']} = " if "measured" in entry else ""  # both were seen to train alike
        return measured + entry.get("commit", "–") + ("" if same else CHANGED)
    if title == "seeds":
        seeds = sorted(entry.get("seeds", []))
        in_a_row = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1))
        return f"{seeds[0]}–{seeds[-1]}" if in_a_row else ", ".join(map(str, seeds)) or "–"
    field, summary = COLUMNS[title]
    values = [value for value in entry.get(field, []) if value is not None]
    return number(summary(values)) if values else "–"


def figure(name, title):
    """A single figure of "FILE ENTRY"."""
    file, _, key = name.partition(" ")
    return cell(read(file).get(key, {}), title)


def score(entry):
    """Interquartile mean and 95 % bootstrap interval, as one cell."""
    returns = entry.get("returns", [])
    if len(returns) < 2:
        return f"{number(returns[0])} (one seed)" if returns else "–"
    low, high = interval(returns)
    return f"{number(iqm(returns))} ({number(low)} to {number(high)})"


def peer_of(script, env_id):
    """The entry of the script's peer on an environment; {} if it was not measured."""
    names = [f"{name} {env_id}, peer" for name, ours in OURS.items() if ours == script]
    return read("peers").get(names[0], {}) if names else {}


def published(script, env_id):
    """What others report; the optimum where it is known."""
    known = PUBLISHED.get(env_id, {})
    return known.get(script) or (f"{number(known['optimum'])} is the optimum" if "optimum" in known else "–")


def scores(script):
    """The table on a script's page: its scores, beside random play and what others report."""
    titles = ["mean", "worst seed", "seeds", "steps", "seconds"]
    rows = [["environment", *titles, "random play", "published", "commit"]]
    for name, entry in sorted(read(f"{script}_scores").items(), key=lambda item: " " in item[0]):  # with flags: last
        chance = figure(f"random {script} {name.split()[0]}", "mean")
        cells = [*[cell(entry, title) for title in titles], chance, published(script, name), cell(entry, "commit")]
        rows.append([f"`{name}`", *cells])
    return table(*rows)


def intervals(scripts):
    """The table on docs/results.md: the scores of the tuned settings, beside those of the peer."""
    rows = [["script", "environment", "score", "worst seed", "seeds", "peer", "published", "commit"]]
    for script in scripts.split():
        for name, entry in read(f"{script}_scores").items():
            if " " not in name:  # without other flags
                cells = [score(entry), cell(entry, "worst seed"), cell(entry, "seeds"), score(peer_of(script, name))]
                rows.append([script, f"`{name}`", *cells, published(script, name), cell(entry, "commit")])
    return table(*rows)


def variants(file):
    """A table of the entries in a result file, with the columns that hold anything."""
    found = read(file)
    titles = ["mean", "worst seed", "seeds", *list(COLUMNS)[2:], "commit"]
    titles = [title for title in titles if any(cell(entry, title) != "–" for entry in found.values())]
    return table(["", *titles], *[[name, *[cell(entry, title) for title in titles]] for name, entry in found.items()])


def grid(file):
    """A table with a row for each variant and a column for each environment."""
    found = {tuple(name.split(", ", 1)): entry for name, entry in read(file).items()}
    steps = {}
    for (env_id, _), entry in found.items():
        steps.setdefault(env_id, []).extend(entry.get("steps", []))
    rows = [["mean (worst seed; number of seeds)", *steps]]
    rows.append(["steps", *[cell({"steps": taken}, "steps") for taken in steps.values()]])
    commits = [{cell(entry, "commit") for (there, _), entry in found.items() if there == env_id} for env_id in steps]
    rows.append(["commit", *["; ".join(sorted(several)) for several in commits]])
    for variant in dict.fromkeys(variant for _, variant in found):
        there = [found.get((env_id, variant)) for env_id in steps]
        cells = [f"{cell(x, 'mean')} ({cell(x, 'worst seed')}; {len(x['seeds'])})" if x else "–" for x in there]
        rows.append([variant, *cells])
    return table(*rows)


def peers(file):
    """A row for each task: ours, Stable-Baselines3's and CleanRL's figures, with strokes between them."""
    titles = ["steps", "reached by", "steps to threshold", "seconds to threshold", "memory, MiB", "lines to read"]
    rows = [["task", "score", "Stable-Baselines3's", "CleanRL's", "seeds", *titles, "commit"]]
    found = read(file)
    for task in sorted({key.split(", ")[0] for key in found}):
        sides = [found.get(f"{task}, {side}", {}) for side in ("ours", "peer", "CleanRL")]
        cells = [" / ".join(cell(side, title) for side in sides if side) for title in titles]
        rows.append([task, *map(score, sides), cell(sides[0], "seeds"), *cells, cell(sides[0], "commit")])
    return table(*rows)


def sbx(file):
    """A row for each task that SBX or rejax has trained on, ours beside it."""
    titles = ["steps to threshold", "seconds to threshold"]
    rows = [["task", "library", "score", "its score", *titles, "seconds that it compiles", "seeds", "commit"]]
    found = read(file)
    for task, library in [key.split(", ") for key in found if key.endswith((", SBX", ", rejax"))]:
        ours, other = found.get(f"{task}, ours", {}), found[f"{task}, {library}"]
        cells = [" / ".join(cell(side, title) for side in (ours, other)) for title in titles]
        ends = [cell(other, "compiling"), cell(other, "seeds"), cell(ours, "commit")]
        rows.append([task, library, score(ours), score(other), *cells, *ends])
    return table(*rows)


def unknown(script):
    """The table of unknown.py: a script, `es`, or with flags, `es --ars`, beside the peer; the means of the shares."""
    script, _, flags = script.partition(" ")
    entries = read("unknown")
    found = {key.removeprefix(f"{script} "): entry for key, entry in entries.items() if key.startswith(f"{script} ")}
    others = {"ppo_rnd": "ppo", "ppod": "ppo", "rainbow": "dqn"}.get(script, script)  # they have the same peer
    titles = ["mean", "worst seed", "seeds", "seconds"]
    rows = [["environment", *titles, "peer: mean", *titles[1:], "random play", "share of the peer's gain", "commit"]]
    for half in dict.fromkeys(entry["half"] for entry in found.values()):
        shares = []
        for name in dict.fromkeys(key.rpartition(", ")[0] for key, entry in found.items() if entry["half"] == half):
            ours = found.get(f"{name}, ours {flags}".strip(), {})
            peer, chance = [entries.get(f"{others} {name}, {side}", {}) for side in ("peer", "random")]
            if not ours:  # only with other flags
                continue
            row = [name, *[cell(side, title) for side in (ours, peer) for title in titles], cell(chance, "mean"), "–"]
            if ours and peer and chance:
                score, other, worst = [statistics.mean(side["returns"]) for side in (ours, peer, chance)]
                if other > worst:  # else there is no gain to share
                    shares.append((score - worst) / (other - worst))
                    row[-1] = number(shares[-1])
            rows.append([*row, cell(ours, "commit")])
        if shares:
            summary = [number(figure(shares)) for figure in (statistics.mean, statistics.median, min)]
            rows.append([f"*{half}: mean, median, lowest*", *["–"] * 9, ", ".join(summary), ""])
    return table(*rows)


def effects(script):
    """{change: {environment: gain that it leaves, as a share of the defaults' gain}}, what harms most first."""
    found = {
        key.removeprefix(f"{script} "): dict(zip(entry["seeds"], entry["returns"], strict=True))
        for key, entry in read("settings").items()
        if entry["script"] == f"{script}.py"
    }
    rows = {}
    for key, scores in found.items():
        name, dashes, change = key.partition(" --")
        if dashes:  # with the seeds that the change has, since those of the defaults differ much
            keys = key, f"{name} defaults", f"{name} random"
            score, defaults, chance = [statistics.mean(found[other][seed] for seed in scores) for other in keys]
            rows.setdefault(f"--{change}", {})[name] = (score - chance) / (defaults - chance)
    return dict(sorted(rows.items(), key=lambda row: min(row[1].values())))


def settings(script):
    """The table of settings.py: what a setting's changes leave of the gain over random play, in each environment."""
    rows = effects(script)
    names = list(dict.fromkeys(name for shares in rows.values() for name in shares))
    source = (ROOT / f"{script}.py").read_text(encoding="utf-8")
    settings = {}
    for change in rows:
        settings.setdefault(change.split(" ")[0], []).append(change)
    body = []
    for flag, changes in settings.items():
        field = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        default = re.search(rf"^    {field}: .* = (.+?)  #", source, re.MULTILINE)[1]
        changes.sort(key=lambda change: [float(value) for value in change.split(" ")[1:]])
        first, *others = changes
        label = " / ".join([f"`{first}`", *[f"`{change.partition(' ')[2]}`" for change in others]])
        cells = [" / ".join(number(rows[change].get(name, math.nan)) for change in changes) for name in names]
        body.append([label, f"`{default}`", *[cell.replace("nan", "–") for cell in cells]])
    return table(["change", "default", *names], *body)


def total(name):
    """The sum of a field of all entries, "FILE FIELD"."""
    file, field = name.split()
    return number(sum(entry.get(field, 0) for entry in read(file).values()))


def shares():
    """(script, environment, side, shares of the best score: IQM, low, high, worst), where a best score is known."""
    found = []
    for script in SCRIPTS:
        for env_id, entry in read(f"{script}_scores").items():
            found.append((script, env_id, "ours", entry.get("returns")))
            found.append((script, env_id, "peer", peer_of(script, env_id).get("returns")))
    found = [entry for entry in found if entry[3]]
    for script, env_id, side, returns in found:
        known = PUBLISHED.get(env_id, {})
        rivals = [iqm(others) for _, other, _, others in found if other == env_id]
        best = known["optimum"] if "optimum" in known else max([*rivals, known.get("best", math.inf)])
        for worst in read("random").get(f"{script} {env_id}", {}).get("returns", []) if best < math.inf else []:
            four = iqm(returns), *interval(returns), min(returns)
            yield script, env_id, side, *[(x - worst) / (best - worst) for x in four]


def draw():
    """The figure: a row for each script and environment."""
    found = list(shares())
    places = {place: i for i, place in enumerate(dict.fromkeys(share[:2] for share in found))}
    picture = Figure(figsize=(9, 1 + 0.21 * len(places)), layout="constrained")
    axis = picture.subplots()
    for script, env_id, side, share, low, high, lowest in found:
        mark, color, label = {"ours": ("o", "C0", "these scripts"), "peer": ("D", "C1", "Stable-Baselines3")}[side]
        row = places[script, env_id] + 0.25 * (side == "peer")
        errors = [[max(share - low, 0)], [max(high - share, 0)]]
        axis.errorbar(share, row, xerr=errors, fmt=mark, color=color, label=label, markersize=4, capsize=2)
        axis.plot(max(lowest, 0), row, "|", color=color, markersize=9, label=f"{label}: worst seed")
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(range(len(places)), [f"{script}.py   {env_id}" for script, env_id in places], fontsize="small")
    axis.set(xlim=(0, 1.1), ylim=(len(places), -1), xlabel="share of the best known score (0: random actions)")
    by_label = dict(zip(*axis.get_legend_handles_labels()[::-1]))
    axis.legend(by_label.values(), by_label, loc="lower left")
    axis.grid(axis="x", alpha=0.3)
    picture.savefig(RESULTS / "overview.png", dpi=110)


def draw_panels(file, panels, ylabel, xscale="linear"):
    """A figure with a panel for each title of {title: {colour: entry}}: a line for each seed, dashed the mean score."""
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    picture = Figure(figsize=(3.7 * columns, max(2.2 * rows, 3)), layout="constrained")
    for place, (title, entries) in enumerate(panels.items(), start=1):
        axis = picture.add_subplot(rows, columns, place)
        for color, entry in entries.items():
            for curve in entry["curves"]:
                axis.plot([row[0] for row in curve], [row[1] for row in curve], color=color, linewidth=1, alpha=0.8)
            ends = [curve[0][0], max(entry["steps"])]
            axis.plot(ends, [statistics.mean(entry["returns"])] * 2, "--", color=color, linewidth=1)
        if axis.dataLim.y0 < -100 * abs(axis.dataLim.y1):  # from -11,000 to -13, say: as in a learning curve
            axis.set(yscale="symlog", ylim=(None, 0))
        axis.set_title(title, fontsize="small")
        axis.tick_params(labelsize="small")
        axis.set_xscale(xscale)
        axis.xaxis.set_minor_formatter("")
        axis.xaxis.set_major_formatter(lambda step, _: f"{step / 1e6:g}M" if step >= 1e6 else f"{step / 1000:g}k")
        axis.grid(alpha=0.3)
    picture.supxlabel("environment steps", fontsize="small")
    picture.supylabel(ylabel, fontsize="small")
    picture.savefig(RESULTS / file, dpi=100)


def draw_curves():
    """The curves of each script, and of the peers beside ours."""
    tasks, colors = {}, {"ours": "C0", "peer": "C1", "CleanRL": "C2", "SBX": "C3"}
    for key, entry in sorted(read("peers").items()):
        task, side = key.split(", ")
        if side != "rejax":  # other environments: gymnax's copies
            tasks.setdefault(task, {})[colors[side]] = entry
    label = "return of an evaluation (blue: these scripts, orange: Stable-Baselines3, red: SBX, green: CleanRL)"
    draw_panels("peers.png", tasks, label, "log")
    for script in {*SCRIPTS, "ppod"} - {"ppo_masked", "reinforce"}:  # the figure of its ablation has the curves
        found = {env_id: {"C0": entry} for env_id, entry in read(f"{script}_scores").items() if " " not in env_id}
        draw_panels(f"{script}_curves.png", found, "return")


KINDS = {maker.__name__: maker for maker in (scores, intervals, variants, grid, peers, sbx, unknown, settings, total)}


def written(mark):
    """A mark and what belongs behind it."""
    kind, name = mark.groups()
    text = KINDS[kind](name) if kind in KINDS else figure(name, kind)
    space = "\n\n" if text.startswith("|") else ""
    return f"<!-- {kind}: {name} -->{space}{text}{space}<!-- end -->"


def page(path):
    """A page with all its figures written anew."""
    return MARK.sub(written, path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    draw()
    draw_curves()
    for path in PAGES:
        if page(path) != path.read_text(encoding="utf-8"):
            path.write_text(page(path), encoding="utf-8")
            print(f"written: {path}")
