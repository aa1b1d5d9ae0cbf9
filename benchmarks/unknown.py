"""The defaults where nobody has tuned: each script beside those of Stable-Baselines3 or sb3-contrib, at equal steps.

    pip install mujoco==3.17.0 stable-baselines3 flappy-bird-gymnasium gym-pusht dm_control shimmy
    pip install --no-deps minatar
    python benchmarks/unknown.py ppo [--names NAME …] [--half choosing] [--seeds 1 2 3] [--sides ours peer random]
    python benchmarks/unknown.py ppo --half choosing --seeds 11 12 --sides ours --flags="--update-epochs 10"
    python benchmarks/unknown.py ppo_rnd --sides ours --flags="--intrinsic-coef 0"    # the peer's are in ppo's table
    python benchmarks/unknown.py ppo --half reporting --confirm 10000    # ours of another text, as scores.py does it

The environments are in no TUNED table. Half of them are for choosing defaults; the other half is only for reporting,
and nobody looks at it while choosing. Both sides train on one thread. The score is the mean return of 30 deterministic
episodes of the final weights; the share is the script's gain over random play, divided by the peer's. Writes
benchmarks/results/unknown.json, a seed at a time, skips what is there, and prints a table.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

from common import ROOT, call, keep, missing, read, stamp, write
from peers import PEERS
from results_page import unknown as table_of
from scores import metrics_of, script_at

sys.path.insert(0, str(ROOT))

GAME = {"max_episode_steps": 2500}  # games that need not end
CHOOSING = {  # name: (discrete or continuous actions, id, arguments of the constructor)
    "Breakout": ("discrete", "worlds:MinAtar/Breakout-v1", GAME),
    "FlappyBird": ("discrete", "flappy_bird_gymnasium:FlappyBird-v0", {"use_lidar": False} | GAME),
    "DoorKey": ("discrete", "MiniGrid-DoorKey-6x6-v0", {}),
    "Large rewards": ("discrete", "worlds:Large-v0", {}),
    "Units": ("discrete", "worlds:Units-v0", {}),
    "CartPole swing-up": ("continuous", "shimmy:dm_control/cartpole-swingup-v0", {}),
    "Reacher (easy)": ("continuous", "shimmy:dm_control/reacher-easy-v0", {}),
    "Double pendulum": ("continuous", "InvertedDoublePendulum-v5", {}),
    "Reacher": ("continuous", "Reacher-v5", {}),
    "PushT": ("continuous", "gym_pusht:gym_pusht/PushT-v0", {}),
    "Actions": ("continuous", "worlds:Actions-v0", {}),
    "Rainy taxi": ("masked", "worlds:Rainy-v0", {"is_rainy": True}),
}
REPORTING = {
    "Space Invaders": ("discrete", "worlds:MinAtar/SpaceInvaders-v1", GAME),
    "Asterix": ("discrete", "worlds:MinAtar/Asterix-v1", GAME),
    "LavaGap": ("discrete", "MiniGrid-LavaGapS5-v0", {}),
    "Frozen lake 8x8": ("discrete", "FrozenLake8x8-v1", {}),
    "Small rewards": ("discrete", "worlds:Small-v0", {}),
    "CartPole balance": ("continuous", "shimmy:dm_control/cartpole-balance-v0", {}),
    "Finger": ("continuous", "shimmy:dm_control/finger-spin-v0", {}),
    "Inverted pendulum": ("continuous", "InvertedPendulum-v5", {}),
    "Pusher": ("continuous", "Pusher-v5", {}),
    "Offset": ("continuous", "worlds:Offset-v0", {}),
    "Long": ("continuous", "worlds:Long-v0", {}),
    "Taxi": ("masked", "worlds:Taxi-v0", {}),
}
ENVIRONMENTS = CHOOSING | REPORTING
SCRIPTS = {  # script: (the peer, environment steps, kinds of actions)
    "ppo": ("PPO", 100_000, ("discrete", "continuous")),
    "dqn": ("DQN", 50_000, ("discrete",)),
    "rainbow": ("DQN", 50_000, ("discrete",)),
    "es": ("ARS", 500_000, ("discrete", "continuous")),
    "ddpg_td3": ("TD3", 10_000, ("continuous",)),
    "sac": ("SAC", 10_000, ("continuous",)),
    "ppo_rnd": ("PPO", 100_000, ("discrete", "continuous")),
    "ppod": ("PPO", 100_000, ("discrete", "continuous")),
    "ppo_masked": ("MaskablePPO", 100_000, ("masked",)),
}
EPISODES = 30


def settings(name):
    """What a script's Args hold for an environment."""
    _, env_id, kwargs = ENVIRONMENTS[name]
    kwargs = dict(kwargs)
    limit = kwargs.pop("max_episode_steps", None)
    return {"env_id": env_id, "max_episode_steps": limit, "env_kwargs": json.dumps(kwargs)}


def train_ours(script, name, seed, steps, flags):
    """Train and score a script in this process."""
    module = import_module(script)
    with tempfile.TemporaryDirectory() as folder:
        given = settings(name) | {"total_timesteps": steps, "eval_every": steps, "eval_episodes": 1, "seed": seed}
        args = module.tuned(*shlex.split(flags), **given, run_dir=f"{folder}/run", progress=False)
        begun = time.monotonic()
        module.train(args)
        seconds = time.monotonic() - begun
        agent = module.load(args.run_dir, "last", **settings(name), wrappers=args.wrappers)
        last = {column: texts[-1] for column, texts in metrics_of(Path(args.run_dir)).items() if column != "seconds"}
        returns, _ = module.evaluate(agent, args, EPISODES, seed + 20_000)
        return {"returns": returns, "seconds": seconds, "last": last}


def play_random(script, name, seed, *_):
    """What random actions get."""
    module = import_module(script)
    args = module.tuned(**settings(name))
    space = module.make_envs(args, EPISODES).action_space
    space.seed(seed)
    agent = SimpleNamespace(act=lambda obs: space.sample())
    return {"returns": module.evaluate(agent, args, EPISODES, seed + 20_000)[0], "seconds": 0.0}


def train_peer(script, name, seed, steps, _):
    """Train and score the peer, with all its defaults, in this process."""
    import gymnasium as gym
    import sb3_contrib
    import stable_baselines3
    import torch
    from minigrid.wrappers import ImgObsWrapper, OneHotPartialObsWrapper
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    torch.set_num_threads(1)
    kind, env_id, kwargs = ENVIRONMENTS[name]
    wrapper = lambda env: env
    if kind == "masked":
        from sb3_contrib.common.maskable.evaluation import evaluate_policy
        from sb3_contrib.common.wrappers import ActionMasker

        wrapper = lambda env: ActionMasker(env, lambda taxi: taxi.unwrapped.action_mask(taxi.unwrapped.s))

    def make():
        env = gym.make(env_id, **kwargs)
        if env_id.startswith("MiniGrid"):  # what our scripts see of it
            env = ImgObsWrapper(OneHotPartialObsWrapper(env))
        return wrapper(gym.wrappers.FlattenObservation(env))

    name = SCRIPTS[script][0]
    maker = getattr(stable_baselines3, name, None) or getattr(sb3_contrib, name)
    model = maker("MlpPolicy", make_vec_env(make, 1, seed=seed), seed=seed, device="cpu")
    begun = time.monotonic()
    model.learn(steps)
    seconds = time.monotonic() - begun
    others = make_vec_env(make, 1, seed=seed + 20_000)
    return {"returns": float(evaluate_policy(model, others, EPISODES)[0]), "seconds": seconds}


SIDES = {"ours": train_ours, "peer": train_peer, "random": play_random}


def confirm(script, name, steps, flags):
    """Whether the text that was measured and today's train alike; if so, the entry holds for today's as well."""
    key = f"{script} {name}, ours {flags}".strip()
    entry, stamped = read("unknown")[key], stamp(f"{script}.py", ENVIRONMENTS[name][1])
    if entry["text"] == stamped["text"]:
        return True
    runs = []
    for folder in (script_at(entry["commit"], ""), ROOT):
        command = [sys.executable, __file__, script, "--names", name, "--one", "ours", "--steps", steps]
        printed, _ = call(*command, f"--flags={flags}", "--scripts", folder)
        runs.append(json.loads(printed.split("FIGURES")[1])["last"])
    same = all(runs[0][column] == runs[1][column] for column in runs[0].keys() & runs[1].keys())
    if same:
        stamped["measured"] = entry.get("measured", entry["commit"])
        write("unknown", read("unknown") | {key: entry | stamped})
    return same


def main():
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("--names", nargs="*", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument("--half", choices=["choosing", "reporting"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    parser.add_argument("--flags", default="", help="of our side")
    parser.add_argument("--steps", type=int, help="of every run, to try the command; nothing is written")
    parser.add_argument("--confirm", type=int, metavar="STEPS")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the side that this process, started by another one, trains
    parser.add_argument("--scripts", default=str(ROOT), help=argparse.SUPPRESS)  # the folder of its script
    args = parser.parse_args()
    _, steps, kinds = SCRIPTS[args.script]
    steps = args.steps or steps
    if args.one:
        sys.path.insert(0, args.scripts)
        figures = SIDES[args.one](args.script, args.names[0], args.seeds[0], steps, args.flags)
        last = figures.pop("last", {})
        print(
            "FIGURES", json.dumps({field: float(f"{value:.5g}") for field, value in figures.items()} | {"last": last})
        )
        return
    names = [name for name in args.names if ENVIRONMENTS[name][0] in kinds]
    names = [name for name in names if args.half in (None, "choosing" if name in CHOOSING else "reporting")]
    measured = [name for name in names if f"{args.script} {name}, ours {args.flags}".strip() in read("unknown")]
    for name in measured if args.confirm else []:
        print(name, "the same" if confirm(args.script, name, args.confirm, args.flags) else "another", flush=True)
    args.seeds = [] if args.confirm else args.seeds
    for seed, name, side in [(seed, name, side) for seed in args.seeds for name in names for side in args.sides]:
        key = f"{args.script} {name}, {side}"
        stamped = stamp(f"{args.script}.py", ENVIRONMENTS[name][1])
        stamped["half"] = "choosing" if name in CHOOSING else "reporting"
        if side == "ours":
            key = f"{key} {args.flags}".strip()
        else:
            stamped |= {"script": None, "text": f"{PEERS} {ENVIRONMENTS[name]} {steps}", "commit": "–"}
        if missing("unknown", key, stamped["text"], [seed]):
            command = [sys.executable, __file__, args.script, "--names", name, "--one", side, "--steps", steps]
            printed, _ = call(*command, "--seeds", seed, f"--flags={args.flags}")
            figures = json.loads(printed.split("FIGURES")[1])
            del figures["last"]  # row of metrics.csv, for --confirm
            print(key, seed, figures, flush=True)
            if not args.steps:
                keep("unknown", key, stamped, seed, figures)
    print(table_of(args.script))


if __name__ == "__main__":
    main()
