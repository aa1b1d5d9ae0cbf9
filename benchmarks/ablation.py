"""What the parts of an algorithm contribute: variants of one script, by flags, side by side.

    python benchmarks/ablation.py rainbow [--env-ids …] [--variants …] [--seeds 1 2 3 4 5]
    python benchmarks/ablation.py rainbow --seeds          # only the figure and the table, of what is there

NAME is one of STUDIES below. Every run has the tuned settings of its script but for the variant's flags, and is scored
as scores.py does it. Writes benchmarks/results/ablation_NAME.json, a run at a time, skips what is there for the same
text of the script, and draws ablation_NAME.png: on the left the mean over seeds of the returns while training, on the
right the scores, their mean, and its 95 % bootstrap interval.
"""

import argparse

import numpy as np
from common import RESULTS, interval, keep, missing, read, stamp, text_of
from results_page import variants as table_of
from scores import measure

SWITCHES = ["double", "prioritized", "dueling", "multi-step", "distributional", "noisy"]
SHORT = "--stop-at-return None --total-timesteps 20000"
RAINBOW = {"Rainbow": f"rainbow.py {SHORT}"}
RAINBOW |= {f"no {switch}": f"rainbow.py {SHORT} --no-{switch}" for switch in SWITCHES}
RAINBOW["DQN"] = f"dqn.py {SHORT}"
MAPPO = {"EP": "mappo.py", "FP": "mappo.py --state-type FP", "HAPPO": "mappo.py --happo --no-share-policy"}
MAPPO |= {f"{state}, GRU": f"{MAPPO[state]} --recurrent --data-chunk-length 5" for state in ("EP", "FP")}
RND = {
    "RND": "ppo_rnd.py",
    "episodic": "ppo_rnd.py --episodic",
    "intrinsic rewards not normalised": "ppo_rnd.py --no-normalize-intrinsic",
    "no curiosity": "ppo_rnd.py --intrinsic-coef 0",
    "PPO": "ppo.py --num-envs 16 --num-minibatches 8 --learning-rate 1e-3 --total-timesteps 400000",
}
PPOD = {"PPO+D": "ppod.py", "PPO": "ppod.py --rho 0 --phi 0", "no value demos": "ppod.py --rho 0.4 --phi 0"}
MEMORY = "ppod.py --rho 0 --phi 0 --num-envs 32 --num-steps 64 --num-minibatches 8 --update-epochs 4 --gae-lambda 0.9 "
MEMORY += "--learning-rate 2e-3 --anneal-lr --gamma 0.98 --ent-coef 0 --hidden-sizes 64 --gru-size 64 "
MEMORY += "--no-normalize-obs --no-normalize-reward --total-timesteps 300000"
GRUS = {"with a": "", "without a": "no-"}
PIXELS = "'minigrid.wrappers.RGBImgPartialObsWrapper(tile_size=8)' minigrid.wrappers.ImgObsWrapper"
PICTURES = f"ppod.py --wrappers {PIXELS} --num-envs 16 --num-steps 128 --num-minibatches 8 --update-epochs 4 "
PICTURES += (
    "--learning-rate 5e-4 --gae-lambda 0.97 --no-norm-adv --ent-coef 0.002 --no-normalize-reward --no-recurrent "
)
PICTURES += "--sample-actions --phi 0 --total-timesteps 50000 --eval-every 50000"
ONE_DEMO = "--rho 0.5 --initial-reward-threshold 0.9 --initial-human-demos-dir demos/MiniGrid-DoorKey-5x5-v0-pictures"
MASKED = {f"{kind} mask": f"ppo_masked.py --{kind}-mask" for kind in ("naive", "no")}
ALGORITHMS = ["q-learning", "sarsa", "expected-sarsa", "double-q"]
QLEARNING = {algorithm: f"qlearning.py --algorithm {algorithm}" for algorithm in ALGORITHMS}
CHEETAH = "ppo.py --total-timesteps 150000 --no-anneal-lr"
STUDIES = {  # name: (environments, {variant: its command})
    "init_std": (["HalfCheetah-v5"], {f"init_std {x}": f"{CHEETAH} --init-std {x}" for x in (0.37, 1.0)}),
    "rainbow": (["CartPole-v1"], RAINBOW),
    "mappo": (["mpe2.simple_spread_v3"], MAPPO),
    "ppo_rnd": (["MiniGrid-MultiRoom-N4-S5-v1"], RND),
    "ppod": (["MiniGrid-DoorKey-16x16-v0"], PPOD),
    "ppo_masked": (["Taxi-v4"], {"masked": "ppo_masked.py"} | MASKED),
    "memory": (
        ["benchmarks.blind:BlindCartPole-v0"],
        {f"{x} GRU": f"{MEMORY} --{y}recurrent" for x, y in GRUS.items()},
    ),
    "pictures": (
        ["MiniGrid-DoorKey-5x5-v0"],
        {"with one demonstration": f"{PICTURES} {ONE_DEMO}", "without": f"{PICTURES} --rho 0"},
    ),
    "qlearning": (["CliffWalking-v1", "Taxi-v4", "FrozenLake-v1"], QLEARNING),
}


def run(name, env_id, variant, seed):
    """Measure one run of a variant, and write it down."""
    script, _, flags = STUDIES[name][1][variant].partition(" ")
    stamped = stamp(script, env_id)
    figures = measure(script, env_id, seed, flags, stamped["text"])
    keep(f"ablation_{name}", f"{env_id}, {variant}", stamped, seed, figures)
    print(f"{env_id}, {variant}, seed {seed}: {figures['returns']}", flush=True)


def draw(name, report):
    """A row for each environment: returns while training on the left, scores on the right."""
    from matplotlib.figure import Figure

    env_ids, variants = STUDIES[name]
    env_ids = [env_id for env_id in env_ids if any(key.startswith(f"{env_id}, ") for key in report)]
    figure = Figure(figsize=(12, 4 * len(env_ids)), layout="constrained")
    axes = figure.subplots(len(env_ids), 2, width_ratios=(3, 2), squeeze=False)
    for env_id, (left, right) in zip(env_ids, axes):
        there = [variant for variant in variants if f"{env_id}, {variant}" in report]
        for place, variant in enumerate(there):
            entry = report[f"{env_id}, {variant}"]
            curves = [np.array(curve).T for curve in entry["curves"]]
            begin, end = max(curve[0][0] for curve in curves), min(curve[0][-1] for curve in curves)
            steps = np.linspace(begin, end, 100)
            mean = np.mean([np.interp(steps, *curve) for curve in curves], axis=0)
            color = "black" if place == 0 else f"C{place - 1}"
            left.plot(steps, mean, color=color, linewidth=2 if place == 0 else 1.2, label=variant)
            scores = entry["returns"]
            center, low, high = np.mean(scores), *interval(scores, np.mean)
            right.plot(scores, [place] * len(scores), "o", color=color, alpha=0.35, markersize=4)
            right.errorbar(center, place, xerr=[[center - low], [high - center]], fmt="D", color=color, capsize=4)
        left.set(title=env_id, xlabel="environment steps", ylabel="return while training, mean")
        left.xaxis.set_major_formatter("{x:,.0f}")
        left.legend(fontsize="small")
        right.set(title="final weights: seeds, mean, 95 % interval", xlabel="return of 100 episodes")
        right.set_yticks(range(len(there)), there)
        right.invert_yaxis()
        left.grid(alpha=0.3)
        right.grid(alpha=0.3)
    figure.savefig(RESULTS / f"ablation_{name}.png", dpi=100)


def main():
    """Measure what is missing, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=STUDIES)
    parser.add_argument("--env-ids", nargs="*")
    parser.add_argument("--variants", nargs="*")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    args = parser.parse_args()
    env_ids, variants = STUDIES[args.name]
    for seed in args.seeds:
        for env_id in args.env_ids or env_ids:
            for variant in args.variants or variants:
                text = text_of(variants[variant].split()[0], env_id)
                if missing(f"ablation_{args.name}", f"{env_id}, {variant}", text, [seed]):
                    run(args.name, env_id, variant, seed)
    draw(args.name, read(f"ablation_{args.name}"))
    print(table_of(f"ablation_{args.name}"))


if __name__ == "__main__":
    main()
