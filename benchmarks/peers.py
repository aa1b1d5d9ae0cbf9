"""These scripts beside Stable-Baselines3 and sb3-contrib: same machine, same environments, same evaluation.

    python benchmarks/peers.py [NAME …] [--seeds 1 2 3] [--sides ours peer] [--venv FOLDER] [--steps N]

NAME: as in PAIRS below, such as "PPO CartPole-v1", or its first word; none: all. The peer has the settings that
rl-zoo (github.com/DLR-RM/rl-baselines3-zoo, commit 22e3ff2) has tuned for the environment, ours those of TUNED. Each
side trains on one thread, with 20 episodes after every 20th part of its steps; at the end 100 deterministic episodes
give the score. Seconds are those of training alone. The threshold is Gymnasium's for the environment. The peers live
in a virtual environment in FOLDER, which the command makes. Writes benchmarks/results/peers.json, a seed at a time, and
skips what is there.
"""

import argparse
import csv
import inspect
import json
import math
import os
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

from common import ROOT, call, keep, missing, stamp, thin

PEERS = ["stable-baselines3==2.9.2", "sb3-contrib==2.9.2"]
THRESHOLDS = {
    "CartPole-v1": 475, "Acrobot-v1": -100, "MountainCar-v0": -110, "MountainCarContinuous-v0": 90,
    "LunarLander-v3": 200, "LunarLanderContinuous-v3": 200, "HalfCheetah-v5": 4800,
    "Pendulum-v1": -200, "Taxi-v4": 7,  # Gymnasium has none that an agent can reach
}  # fmt: skip
# rl-zoo's settings, under its names. A learning rate or clip range ["linear", x] falls from x to 0. For Taxi it has no
# settings: these are sb3-contrib's defaults. Where our_timesteps stands, both sides train for fewer steps than tuned.
ZOO = json.loads((ROOT / "benchmarks/data/rl_zoo.json").read_text(encoding="utf-8"))
OURS = {"PPO": "ppo", "DQN": "dqn", "TD3": "ddpg_td3", "SAC": "sac", "ARS": "es", "MaskablePPO": "ppo_masked"}


def train_ours(name, seed, steps, folder):
    """Train and score our script in this process: the figures of one run."""
    sys.path.insert(0, str(ROOT))
    script = import_module(OURS[name.split()[0]])
    env_id = name.split()[1]
    evaluate = script.evaluate
    away = []  # seconds of each evaluation

    def timed(*arguments, **more):
        begun = time.monotonic()
        scores = evaluate(*arguments, **more)
        away.append(time.monotonic() - begun)
        return scores

    script.evaluate = timed
    plain = script.tuned(env_id=env_id)
    total = steps or ZOO[name].get("our_timesteps", plain.total_timesteps)
    often = min(plain.eval_every or total, math.ceil(total / 20))
    args = script.tuned(env_id=env_id, seed=seed, total_timesteps=total, eval_every=often, eval_episodes=20,
                        run_dir=f"{folder}/run", progress=False)  # fmt: skip
    taken = script.train(args)["global_step"]
    with open(f"{folder}/run/evaluations.csv", encoding="utf-8") as file:
        rows = [[float(row[column]) for column in ("step", "return_mean", "seconds")] for row in csv.DictReader(file)]
    curve = [[step, score, seconds - sum(away[: i + 1])] for i, (step, score, seconds) in enumerate(rows)]
    mean, _ = evaluate(script.load(f"{folder}/run", "last"), args, 100, seed + 20_000)
    lines = len(Path(script.__file__).read_text().splitlines())
    return {"returns": mean, "steps": taken, "curve": curve, "lines": lines}


def train_peer(name, seed, steps):
    """Train and score the peer in this process: the figures of one run."""
    import numpy as np
    import sb3_contrib
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    algorithm, env_id = name.split()
    total = steps or ZOO[name]["n_timesteps"]
    settings = {field: value for field, value in ZOO[name].items() if not field.endswith("_timesteps")}
    normalize = settings.pop("normalize", None)
    wrapper = {}
    if algorithm == "MaskablePPO":
        from sb3_contrib.common.maskable.evaluation import evaluate_policy
        from sb3_contrib.common.wrappers import ActionMasker

        mask = lambda env: env.unwrapped.action_mask(env.unwrapped.s)
        wrapper = {"wrapper_class": ActionMasker, "wrapper_kwargs": {"action_mask_fn": mask}}
    else:
        from stable_baselines3.common.evaluation import evaluate_policy

    def make(n_envs, first_seed):
        envs = make_vec_env(env_id, n_envs, seed=first_seed, **wrapper)
        return envs if normalize is None else VecNormalize(envs, gamma=settings.get("gamma", 0.99), **normalize)

    envs = make(settings.pop("n_envs", 1), seed)
    others = make(1, seed + 10_000)
    if "noise" in settings:
        kind, deviation = settings.pop("noise")
        noise = NormalActionNoise if kind == "normal" else OrnsteinUhlenbeckActionNoise
        dimensions = envs.action_space.shape[0]
        settings["action_noise"] = noise(np.zeros(dimensions), deviation * np.ones(dimensions))
    for field in ("learning_rate", "clip_range"):
        if isinstance(settings.get(field), list):
            settings[field] = lambda remaining, first=settings[field][1]: first * remaining
    maker = getattr(sb3_contrib if algorithm in ("ARS", "MaskablePPO") else stable_baselines3, algorithm)
    policy = settings.pop("policy", "MlpPolicy")
    model = maker(policy, envs, seed=seed, device="cpu", **settings)

    def score(episodes):
        if normalize is not None:
            others.training, others.norm_reward, others.obs_rms = False, False, envs.obs_rms
        return float(evaluate_policy(model, others, episodes, deterministic=True)[0])

    class Watch(BaseCallback):
        """Evaluates after every 20th part of the steps, between two updates, and stops the clock meanwhile."""

        def __init__(self):
            super().__init__()
            self.curve = []
            self.away = 0.0

        def look(self):
            begun = time.monotonic()
            self.curve.append([model.num_timesteps, score(20), begun - start - self.away])
            self.away += time.monotonic() - begun

        def _on_rollout_start(self):
            if model.num_timesteps >= (len(self.curve) + 1) * total / 20:
                self.look()

        def _on_step(self):
            return True

    watch = Watch()
    start = time.monotonic()
    model.learn(total, callback=watch)
    watch.look()
    parts = [model, model.policy, envs, getattr(model, "rollout_buffer", None) or getattr(model, "replay_buffer", None)]
    classes = {kind for part in parts for kind in type(part).__mro__ if kind.__module__.startswith(("stable_", "sb3_"))}
    lines = sum(len(Path(file).read_text().splitlines()) for file in {inspect.getsourcefile(kind) for kind in classes})
    others.seed(seed + 20_000)
    return {"returns": score(100), "steps": model.num_timesteps, "curve": watch.curve, "lines": lines}


def reached(curve, env_id):
    """(steps, seconds) at the first evaluation that reaches the threshold; two None if none does."""
    for step, score, seconds in curve:
        if score >= THRESHOLDS[env_id]:
            return int(step), round(seconds, 1)
    return None, None


def peer_python(folder):
    """The interpreter of a virtual environment in which the peers are installed."""
    python = Path(folder, "Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        call(sys.executable, "-m", "venv", folder)
        call(python, "-m", "pip", "install", "-q", "-r", ROOT / "requirements.txt", "gymnasium[mujoco]", *PEERS)
    return python


def main():
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--sides", nargs="*", default=["ours", "peer"], choices=["ours", "peer"])
    parser.add_argument("--venv", default=str(ROOT / "benchmarks/.peers"), metavar="FOLDER")
    parser.add_argument("--steps", type=int, help="of every run, to try the command; nothing is written")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the side that this process, started by another one, trains
    args = parser.parse_args()
    if args.one:
        with tempfile.TemporaryDirectory() as folder:
            run = train_ours if args.one == "ours" else train_peer
            more = [folder] if args.one == "ours" else []
            print("FIGURES", json.dumps(run(args.names[0], args.seeds[0], args.steps, *more)))
        return
    for name in [name for name in ZOO if not args.names or name in args.names or name.split()[0] in args.names]:
        script = f"{OURS[name.split()[0]]}.py"
        for side in args.sides:
            key = f"{name}, {side}"
            stamped = stamp(script, name.split()[1])
            if side == "peer":
                stamped |= {"text": f"{PEERS} {ZOO[name]}", "commit": "rl-zoo 22e3ff2"}
            for seed in missing("peers", key, stamped["text"], args.seeds):
                python = sys.executable if side == "ours" else peer_python(args.venv)
                steps = ["--steps", args.steps] if args.steps else []
                printed, memory = call(python, __file__, name, "--one", side, "--seeds", seed, *steps)
                figures = json.loads(printed.split("FIGURES")[1])
                curve = figures.pop("curve")
                steps_to, seconds_to = reached(curve, name.split()[1])
                figures |= {"seconds": round(curve[-1][2], 1), "memory": memory, "steps to threshold": steps_to}
                figures |= {"seconds to threshold": seconds_to, "curves": thin(curve)}
                print(key, seed, {field: value for field, value in figures.items() if field != "curves"}, flush=True)
                if not args.steps:
                    keep("peers", key, stamped, seed, figures)


if __name__ == "__main__":
    main()
