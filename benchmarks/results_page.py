"""Write docs/results.md: every measured figure, from the outputs in benchmarks/results.

python benchmarks/results_page.py
"""

import json
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "results.md"
SCRIPTS = ["ppo", "ppo_masked", "ppo_rnd", "ppod", "qlearning", "es", "dqn", "rainbow", "ddpg_td3", "mappo"]
SCRIPTS += ["maddpg_matd3"]
INTRO = """# Every measured figure

Written by `python benchmarks/results_page.py` from the outputs in
[benchmarks/results](../benchmarks/results), which hold the single seeds, versions and the machine as well. What the
figures mean, and what was tried, stands in each script's own page. All were measured on one machine, x86_64 with two
cores and no GPU."""
SCORES = """## Scores

The command is `python benchmarks/scores.py SCRIPT ENVIRONMENT`, with the flags that stand behind an environment as
`--flags="…"`. Each score is the mean return of 100 deterministic episodes of the final weights of a run with the
script's tuned settings; for teams it is the sum over agents. *Text* is the commit of the script that was run; the
scores without one are of an earlier text of the script, before all scripts took their present form."""
SPEEDS = """## Speeds

Medians, and in brackets the lowest and the highest, of the runs in one call of `python benchmarks/SCRIPT_speed.py`, on
an idle machine, one thread each. Rows of one file were measured in turns and may be compared; those of different files
may not."""
KILLS = """## Killed and resumed

`python tests/kills.py SCRIPT CONFIGURATION --kills 20` kills a run at random moments with SIGKILL, resumes it each
time, and compares all that is left behind with an unbroken run. kills.json has the sha256 of the text that was killed,
which may be older than the present one; tests/runs kills every script, fewer times, whenever the tests run."""


def read(name):
    """An output, or an empty dict if there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def table(*rows):
    """A Markdown table; the first row is its head."""
    head, *body = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def number(x):
    """A figure with four digits or so, thousands apart."""
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"


def many(values):
    """Mean, worst and deviation of the scores of several seeds, as three cells."""
    deviation = number(statistics.stdev(values)) if len(values) > 1 else "–"
    return number(statistics.mean(values)), number(min(values)), deviation


def scores():
    """The rows of all …_scores.json."""
    yield "script", "environment", "mean", "worst seed", "deviation", "seeds", "steps", "text"
    for script in SCRIPTS:
        for setting, entry in read(f"{script}_scores").items():
            seeds, steps = " ".join(map(str, entry["seeds"])), number(max(entry["steps"]))
            text = entry.get("commit", "earlier")
            yield f"{script}.py", f"`{setting}`", *many(entry["returns"]), seeds, steps, text


def samples(tree, path=()):
    """(names on the way, list of numbers) for each list of numbers in nested dicts."""
    for name, branch in tree.items():
        if isinstance(branch, dict):
            yield from samples(branch, (*path, name))
        elif isinstance(branch, list) and all(isinstance(x, (int, float)) for x in branch):
            yield (*path, name), branch


def speeds():
    """The rows of all …_speed.json: what was run, what it was measured in, median and range."""
    yield "output", "what", "unit", "median"
    for path in sorted(RESULTS.glob("*_speed*.json")):
        for names, values in samples(json.loads(path.read_text())):
            units = [name for name in names if name.startswith(("steps_per", "peak_", "environment_share"))]
            if not units:
                continue
            what = ", ".join(name for name in names if name not in units)
            spread = f" ({number(min(values))} – {number(max(values))})" if len(values) > 1 else ""
            unit = units[0].replace("_", " ")
            yield (
                f"[{path.stem}](../benchmarks/results/{path.name})",
                what,
                unit,
                number(statistics.median(values)) + spread,
            )


def by_variant(results, key):
    """(variant, scores of its seeds) for results of the form {variant: {seed: {key: score}}}."""
    for variant, runs in results.items():
        yield variant, [run[key] for run in runs.values() if isinstance(run, dict)]


def comparisons():
    """(benchmark, environment, {variant: scores}) of the benchmarks that compare settings."""
    taxi = read("ppo_masked_taxi")
    last = {name: list(entry["milestones"].values())[-1] for name, entry in taxi["results"].items()}
    yield "ppo_masked_taxi", "Taxi-v4, expected return", last
    needle = read("ppo_masked_needle")
    yield "ppo_masked_needle", "Needle-v0", {name: needle[name]["returns"] for name in ("masked", "naive mask")}
    exact = {name: entry["exact_returns"] for name, entry in read("qlearning_exact").items()}
    yield "qlearning_exact", "expected return of the greedy policy", exact
    yield "ppod_doorkey", "MiniGrid-DoorKey-16x16-v0", dict(by_variant(read("ppod_doorkey")["results"], "return"))
    rnd = read("ppo_rnd_multiroom")
    yield "ppo_rnd_multiroom", rnd["env_id"], dict(by_variant(rnd["results"], "return_mean"))
    yield "ppo_rnd_further", "1,000,000 steps", dict(by_variant(read("ppo_rnd_further")["results"], "return_mean"))
    variants = read("mappo_variants")
    runs = {
        name: [run["summary"]["eval_return_mean"] for run in seeds.values()] for name, seeds in variants["runs"].items()
    }
    yield "mappo_variants", variants["env_id"], runs
    cheetah = read("ddpg_td3_halfcheetah")["last weights, 100 episodes: mean, standard deviation"]
    yield "ddpg_td3_halfcheetah", "HalfCheetah-v5, 225,000 steps", {"TD3": [mean for mean, _ in cheetah]}
    for env_id, results in read("rainbow_ablation").get("results", {}).items():
        yield "rainbow_ablation", env_id, dict(by_variant(results, "score"))


def compared():
    """The rows of all comparisons."""
    yield "command", "environment", "setting", "mean", "worst seed", "deviation", "seeds"
    for benchmark, environment, variants in comparisons():
        for name, values in variants.items():
            yield f"`benchmarks/{benchmark}.py`", environment, name, *many(values), len(values)


def kills():
    """The configurations of each script that were killed, and whether they came out the same."""
    yield "script", "configurations", "kills each", "verdict"
    for script, configurations in read("kills").items():
        for verdict in sorted({entry["verdict"] for entry in configurations.values()}):
            entries = {name: entry for name, entry in configurations.items() if entry["verdict"] == verdict}
            yield script, ", ".join(entries), min(entry["kills"] for entry in entries.values()), verdict


def page():
    """The whole page."""
    parts = [INTRO, SCORES, table(*scores()), SPEEDS, table(*speeds()), "## Settings compared", table(*compared())]
    parts += [KILLS, table(*kills())]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
