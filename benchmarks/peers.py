"""These scripts beside Stable-Baselines3, sb3-contrib, SBX, rejax and CleanRL: same machine and evaluation.

    python benchmarks/peers.py [NAME …] [--seeds 1 2 3] [--sides ours peer SBX rejax CleanRL] [--venv FOLDER]

NAME: as in data/rl_zoo.json, such as "PPO CartPole-v1", or its first word; none: all. Ours has the settings of TUNED.
The peer, Stable-Baselines3 or sb3-contrib, has those that rl-zoo (github.com/DLR-RM/rl-baselines3-zoo, commit 22e3ff2)
has tuned for the environment. So has SBX, which is Stable-Baselines3 in JAX. CleanRL's file has its defaults. Each side
trains on one thread, SBX on one core, with 20 episodes after every 20th part of its steps; at the end 100 deterministic
episodes give the score. Seconds are those of training alone; those of SBX's first update, which compiles, are among
them, and also by themselves. rejax is PPO in JAX of which training and environment (gymnax's copy of it) are one
compiled function; it has the settings of its own configs/gymnax, draws its actions in evaluations too, and its seconds
hold 20 evaluations. The threshold is Gymnasium's for the environment. The peers live in virtual environments
in FOLDER, which the command makes. Writes benchmarks/results/peers.json, a seed at a time, and skips what is there.
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
PACKAGES = {
    "peer": ["-r", ROOT / "requirements.txt", "gymnasium[mujoco]", *PEERS],
    "SBX": ["-r", ROOT / "requirements.txt", *PEERS, "sbx-rl==0.28.0", "jax==0.10.2"],
    "rejax": ["rejax==0.1.3", "gymnax==0.0.9", "jax==0.10.2"],
    "CleanRL": ["gymnasium[classic-control]==0.29.1", "numpy<2", "tensorboard", "tyro", "torch==2.13.0"],
}
CLEANRL = "https://github.com/vwxyzjn/cleanrl", "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb"
THRESHOLDS = {
    "CartPole-v1": 475, "Acrobot-v1": -100, "MountainCar-v0": -110, "MountainCarContinuous-v0": 90,
    "LunarLander-v3": 200, "LunarLanderContinuous-v3": 200, "HalfCheetah-v5": 4800,
    "Pendulum-v1": -200, "Taxi-v4": 7,  # Gymnasium has none that an agent can reach
}  # fmt: skip
# rl-zoo's settings, under its names. A learning rate or clip range ["linear", x] falls from x to 0. For Taxi it has no
# settings: these are sb3-contrib's defaults. Where our_timesteps stands, both sides train for fewer steps than tuned.
ZOO = json.loads((ROOT / "benchmarks/data/rl_zoo.json").read_text(encoding="utf-8"))
CLEANRL_FILES = {  # what one must read, and the actions that the script's global variables choose for observations
    "PPO": (["cleanrl/ppo.py"], lambda trained, obs: trained["agent"].actor(obs).argmax(1)),
    "DQN": (["cleanrl/dqn.py", "cleanrl_utils/buffers.py"], lambda trained, obs: trained["q_network"](obs).argmax(1)),
}
CLEANRL_TASKS = [f"{name} {env_id}" for name in CLEANRL_FILES for env_id in ("CartPole-v1", "Acrobot-v1")]
SBX_TASKS = ["PPO CartPole-v1", "PPO Pendulum-v1", "DQN CartPole-v1", "TD3 Pendulum-v1", "SAC Pendulum-v1"]
REJAX = {  # configs/gymnax at commit 4954fbf
    "PPO CartPole-v1": {"agent_kwargs": {"activation": "tanh"}, "num_envs": 5, "num_steps": 100, "num_epochs": 5,
                        "num_minibatches": 5, "learning_rate": 7.5e-4, "max_grad_norm": 0.5,
                        "total_timesteps": 100_000},
    "PPO Pendulum-v1": {"agent_kwargs": {"activation": "swish"}, "num_envs": 100, "num_steps": 100, "num_epochs": 10,
                        "num_minibatches": 10, "learning_rate": 1e-3, "max_grad_norm": 10, "gamma": 0.995,
                        "ent_coef": 0.0, "normalize_observations": True, "total_timesteps": 150_000},
}  # fmt: skip
OURS = {"PPO": "ppo", "DQN": "dqn", "TD3": "ddpg_td3", "SAC": "sac", "ARS": "es", "MaskablePPO": "ppo_masked"}


class Watch:
    """Evaluates after every 20th part of the steps, and stops the clock meanwhile."""

    def __init__(self, score, total):
        self.score, self.total = score, total
        self.curve = []
        self.away = 0.0
        self.start = time.monotonic()

    def look(self, step):
        """Evaluate if it is due."""
        if step >= min((len(self.curve) + 1) * self.total / 20, self.total):
            begun = time.monotonic()
            self.curve.append([step, self.score(20), begun - self.start - self.away])
            self.away += time.monotonic() - begun


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
    mean, _ = evaluate(script.load(f"{folder}/run", "last"), args, 100, 1000 * seed)
    lines = len(Path(script.__file__).read_text().splitlines())
    return {"returns": mean, "steps": taken, "curve": curve, "lines": lines}


def train_sbx(name, seed, steps):
    """Train and score SBX in this process, on one core: the figures of one run. The first update compiles."""
    import sbx

    os.sched_setaffinity(0, {seed % os.cpu_count()})  # JAX takes no number of threads
    return train_peer(name, seed, steps, sbx)


def train_peer(name, seed, steps, library=None):
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
    library = library or (sb3_contrib if algorithm in ("ARS", "MaskablePPO") else stable_baselines3)
    policy = settings.pop("policy", "MlpPolicy")
    model = getattr(library, algorithm)(policy, envs, seed=seed, device="cpu", **settings)

    def score(episodes):
        if normalize is not None:
            others.training, others.norm_reward, others.obs_rms = False, False, envs.obs_rms
        return float(evaluate_policy(model, others, episodes, deterministic=True)[0])

    class Callback(BaseCallback):
        """Looks between two updates."""

        def _on_rollout_start(self):
            watch.look(model.num_timesteps)

        def _on_step(self):
            return True

    updates = []  # seconds of each
    update = model.train

    def timed(*given, **more):
        begun = time.monotonic()
        update(*given, **more)
        updates.append(time.monotonic() - begun)

    model.train = timed
    watch = Watch(score, total)
    model.learn(total, callback=Callback())
    watch.look(model.num_timesteps)
    parts = [model, model.policy, envs, getattr(model, "rollout_buffer", None) or getattr(model, "replay_buffer", None)]
    classes = {
        kind for part in parts for kind in type(part).__mro__ if kind.__module__.startswith(("stable_", "sb3_", "sbx"))
    }
    lines = sum(len(Path(file).read_text().splitlines()) for file in {inspect.getsourcefile(kind) for kind in classes})
    others.seed(seed + 20_000)
    compiling = round(updates[0] - sorted(updates)[len(updates) // 2], 1) if updates else 0.0
    figures = {"returns": score(100), "steps": model.num_timesteps, "curve": watch.curve, "lines": lines}
    return figures | {"compiling": compiling}


def train_rejax(name, seed, steps):
    """Train and score rejax in this process, on one core: the figures of one run."""
    import jax
    from rejax import PPO
    from rejax.evaluate import evaluate

    os.sched_setaffinity(0, {seed % os.cpu_count()})
    settings = REJAX[name]
    rollout = settings["num_envs"] * settings["num_steps"]
    total = steps or settings["total_timesteps"]
    often = max(rollout, total // 20 // rollout * rollout)
    algorithm = PPO.create(env=name.split()[1], **settings | {"total_timesteps": total, "eval_freq": often})

    def play(algorithm, state, key, episodes=20):
        parameters = algorithm.env_params
        limit = parameters.max_steps_in_episode
        return evaluate(algorithm.make_act(state), key, algorithm.env, parameters, episodes, limit)

    algorithm = algorithm.replace(eval_callback=play)
    begun = time.monotonic()
    train = jax.jit(algorithm.train).lower(jax.random.PRNGKey(seed)).compile()
    compiling = time.monotonic() - begun
    state, (_, returns) = jax.block_until_ready(train(jax.random.PRNGKey(seed)))
    seconds = time.monotonic() - begun - compiling
    means = [float(mean) for mean in returns.mean(1)]  # the first is that of random weights
    curve = [[i * often, mean, compiling + seconds * i / (len(means) - 1)] for i, mean in enumerate(means)][1:]
    final = float(play(algorithm, state, jax.random.PRNGKey(seed + 20_000), 100)[1].mean())
    folder = Path(inspect.getsourcefile(PPO)).parent
    files = [folder / file for file in ("ppo.py", "algorithm.py", "mixins.py", "../networks.py")]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    return {"returns": final, "steps": curve[-1][0], "curve": curve, "lines": lines, "compiling": round(compiling, 1)}


def train_cleanrl(name, seed, steps, source):
    """Train and score CleanRL's file in this process: the figures of one run."""
    import gymnasium
    import torch
    from torch.utils import tensorboard

    torch.set_num_threads(1)
    sys.path.insert(0, source)
    files, act = CLEANRL_FILES[name.split()[0]]
    texts = [Path(source, file).read_text(encoding="utf-8") for file in files]
    env_id, total = name.split()[1], steps or 500_000
    env = gymnasium.make(env_id)
    env.reset(seed=seed + 10_000)
    trained = {"__name__": "__main__", "__file__": files[0]}

    @torch.no_grad()
    def score(episodes):
        returns = 0.0
        for _ in range(episodes):
            obs, _ = env.reset()
            over = False
            while not over:
                action = act(trained, torch.tensor(obs[None], dtype=torch.float32))[0].numpy()
                obs, reward, terminated, truncated, _ = env.step(action)
                returns += float(reward)
                over = terminated or truncated
        return returns / episodes

    class Writer:
        """In place of TensorBoard's: the file makes one before it trains, and reports its speed after an update."""

        def __init__(self, _):
            self.add_text = self.close = lambda *_: None
            watch.start = time.monotonic()

        def add_scalar(self, tag, _, step):
            if tag == "charts/SPS":
                watch.look(step)

    tensorboard.SummaryWriter = Writer
    sys.argv = [files[0], "--env-id", env_id, "--seed", str(seed), "--total-timesteps", str(total), "--no-cuda"]
    watch = Watch(score, total)
    exec(texts[0], trained)  # as __main__; `trained` holds its global variables, so `score` plays its networks
    watch.look(total)
    env.reset(seed=seed + 20_000)
    lines = sum(len(text.splitlines()) for text in texts)
    return {"returns": score(100), "steps": total, "curve": watch.curve, "lines": lines}


def reached(curve, env_id):
    """(steps, seconds) at the first evaluation that reaches the threshold; two None if none does."""
    found = [(int(step), round(seconds, 1)) for step, score, seconds in curve if score >= THRESHOLDS[env_id]]
    return found[0] if found else (None, None)


def interpreter(side, folder):
    """A side's Python, in a virtual environment that is made if there is none; CleanRL's files are brought too."""
    if side == "ours":
        return sys.executable
    python = Path(folder, side, "Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        call(sys.executable, "-m", "venv", Path(folder, side))
    call(python, "-m", "pip", "install", "-q", *PACKAGES[side])  # quick if they are there
    source = Path(folder, "CleanRL/source")
    if side == "CleanRL" and not source.exists():
        call("git", "clone", "-q", CLEANRL[0], source)
        call("git", "-C", source, "checkout", "-q", CLEANRL[1])
    return python


SIDES = {
    "ours": train_ours,
    "peer": train_peer,
    "SBX": train_sbx,
    "rejax": train_rejax,
    "CleanRL": train_cleanrl,
}


def main():
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--venv", default=str(ROOT / "benchmarks/.peers"), metavar="FOLDER")
    parser.add_argument("--steps", type=int, help="of every run, to try the command; nothing is written")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the side that this process, started by another one, trains
    args = parser.parse_args()
    if args.one:
        with tempfile.TemporaryDirectory() as folder:
            more = {"ours": [folder], "CleanRL": [f"{args.venv}/CleanRL/source"]}.get(args.one, [])
            print("FIGURES", json.dumps(SIDES[args.one](args.names[0], args.seeds[0], args.steps, *more)))
        return
    tasks = [name for name in ZOO if not args.names or name in args.names or name.split()[0] in args.names]
    if not tasks:
        parser.error(f"no such task; there are: {', '.join(ZOO)}")
    for name in tasks:
        for side in args.sides:
            if name not in {"CleanRL": CLEANRL_TASKS, "SBX": SBX_TASKS, "rejax": REJAX}.get(side, ZOO):
                continue
            key = f"{name}, {side}"
            stamped = stamp(f"{OURS[name.split()[0]]}.py", name.split()[1])
            if side in ("peer", "SBX"):
                versions = PEERS if side == "peer" else PACKAGES[side][-2:]
                stamped |= {"script": None, "text": f"{versions} {ZOO[name]}", "commit": "rl-zoo 22e3ff2"}
            elif side == "rejax":
                stamped |= {"script": None, "text": f"{PACKAGES[side]} {REJAX[name]}", "commit": "rejax 0.1.3"}
            elif side == "CleanRL":
                stamped |= {"script": None, "text": f"{CLEANRL} {PACKAGES[side]}"}
                stamped["commit"] = f"CleanRL {CLEANRL[1][:7]}"
            for seed in missing("peers", key, stamped["text"], args.seeds):
                command = [interpreter(side, args.venv), __file__, name, "--one", side, "--venv", args.venv]
                steps = ["--steps", args.steps] if args.steps else []
                printed, memory = call(*command, "--seeds", seed, *steps)
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
