"""The defaults where nobody has tuned: each script beside Stable-Baselines3's defaults, at equal environment steps.

    pip install mujoco==3.17.0 dm_control shimmy minatar flappy-bird-gymnasium gym-pusht stable-baselines3 sb3-contrib
    python benchmarks/unknown.py ppo [--names NAME …] [--half choosing] [--seeds 1 2 3] [--sides ours peer]
    python benchmarks/unknown.py ppo --half choosing --seeds 11 12 --sides ours --flags="--update-epochs 10"

The environments are in no TUNED table. Half of them are for choosing defaults; the other half only for reporting, and
nobody looks at them while choosing. Both sides train on one thread; the score is the mean return of 30 deterministic
episodes of the final weights, and the share is the script's gain over random play by the peer's. Writes
benchmarks/results/unknown.json (with other flags: nothing) and prints a table.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from importlib import import_module
from types import SimpleNamespace

from common import ROOT, call, keep, missing, stamp
from peers import PEERS

table_of = lambda x: ""

sys.path.insert(0, str(ROOT))

GAME = {"max_episode_steps": 2500}
ENVIRONMENTS = {  # half: {name: (id, arguments of its constructor)}; a blank line between families
    "choosing": {
        "Breakout": ("worlds:MinAtar/Breakout-v1", GAME),
        "FlappyBird": ("flappy_bird_gymnasium:FlappyBird-v0", {"use_lidar": False} | GAME),
        "DoorKey": ("MiniGrid-DoorKey-5x5-v0", {}),
        "CartPole swing-up": ("shimmy:dm_control/cartpole-swingup-v0", {}),
        "Reacher, easy": ("shimmy:dm_control/reacher-easy-v0", {}),
        "Double pendulum": ("InvertedDoublePendulum-v5", {}),
        "Reacher": ("Reacher-v5", {}),
        "PushT": ("gym_pusht:gym_pusht/PushT-v0", {}),
        "Actions": ("worlds:Actions-v0", {}),
        "Large rewards": ("worlds:Large-v0", {}),
        "Units": ("worlds:Units-v0", {}),
    },
    "reporting": {
        "Space Invaders": ("worlds:MinAtar/SpaceInvaders-v1", GAME),
        "Asterix": ("worlds:MinAtar/Asterix-v1", GAME),
        "LavaGap": ("MiniGrid-LavaGapS5-v0", {}),
        "Frozen lake 8x8": ("FrozenLake8x8-v1", {}),
        "CartPole balance": ("shimmy:dm_control/cartpole-balance-v0", {}),
        "Finger": ("shimmy:dm_control/finger-spin-v0", {}),
        "Inverted pendulum": ("InvertedPendulum-v5", {}),
        "Pusher": ("Pusher-v5", {}),
        "Small rewards": ("worlds:Small-v0", {}),
        "Offset": ("worlds:Offset-v0", {}),
        "Long": ("worlds:Long-v0", {}),
    },
}
ALL = ENVIRONMENTS["choosing"] | ENVIRONMENTS["reporting"]
SCRIPTS = {  # script: (the peer, its environment steps)
    "ppo": ("PPO", 100_000),
    "dqn": ("DQN", 50_000),
    "ddpg_td3": ("TD3", 10_000),
    "sac": ("SAC", 10_000),
}
EPISODES = 30


def train_ours(script, name, seed, steps, flags):
    """Train and score a script in this process."""
    module = import_module(script)
    env_id, kwargs = ALL[name]
    limit = kwargs.get("max_episode_steps")
    own = {key: value for key, value in kwargs.items() if key != "max_episode_steps"}
    with tempfile.TemporaryDirectory() as folder:
        settings = {"env_id": env_id, "env_kwargs": json.dumps(own), "max_episode_steps": limit, "seed": seed}
        settings |= {"eval_every": steps, "eval_episodes": 1, "run_dir": f"{folder}/run", "progress": False}
        args = module.tuned("--env-id", env_id, *shlex.split(flags), **settings, total_timesteps=steps)
        begun = time.monotonic()
        module.train(args)
        seconds = time.monotonic() - begun
        agent = module.load(args.run_dir, "last", env_id=env_id, env_kwargs=args.env_kwargs)
        return {"returns": module.evaluate(agent, args, EPISODES, seed + 20_000)[0], "seconds": seconds}


def train_random(script, name, seed, *_):
    """What random actions get in the same environments."""
    module = import_module(script)
    env_id, kwargs = ALL[name]
    limit = kwargs.get("max_episode_steps")
    own = {key: value for key, value in kwargs.items() if key != "max_episode_steps"}
    args = module.tuned(env_id=env_id, env_kwargs=json.dumps(own), max_episode_steps=limit)
    space = module.make_envs(args, EPISODES).action_space
    space.seed(seed)
    agent = SimpleNamespace(act=lambda obs: space.sample())
    return {"returns": module.evaluate(agent, args, EPISODES, seed + 20_000)[0], "seconds": 0.0}


def train_peer(script, name, seed, steps, _):
    """Train and score the peer, with all its defaults, in this process."""
    import gymnasium as gym
    import stable_baselines3
    import torch
    from minigrid.wrappers import ImgObsWrapper, OneHotPartialObsWrapper
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    torch.set_num_threads(1)
    env_id, kwargs = ALL[name]

    def make():
        env = gym.make(env_id, **kwargs)
        if env_id.startswith("MiniGrid"):  # what our scripts take of it
            env = ImgObsWrapper(OneHotPartialObsWrapper(env))
        return gym.wrappers.FlattenObservation(env)

    maker = getattr(stable_baselines3, SCRIPTS[script][0])
    model = maker("MlpPolicy", make_vec_env(make, 1, seed=seed), seed=seed, device="cpu")
    begun = time.monotonic()
    model.learn(steps)
    seconds = time.monotonic() - begun
    others = make_vec_env(make, 1, seed=seed + 20_000)
    return {"returns": float(evaluate_policy(model, others, EPISODES)[0]), "seconds": seconds}


SIDES = {"ours": train_ours, "peer": train_peer, "random": train_random}


def main():
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("--names", nargs="*", choices=ALL, default=list(ALL))
    parser.add_argument("--half", choices=ENVIRONMENTS)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    parser.add_argument("--steps", type=int, help="others than the script's; nothing is written")
    parser.add_argument("--flags", default="", help="of our side; nothing is written")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the side that this process, started by another one, trains
    args = parser.parse_args()
    peer, steps = SCRIPTS[args.script]
    steps = args.steps or steps
    if args.one:
        figures = SIDES[args.one](args.script, args.names[0], args.seeds[0], steps, args.flags)
        print("FIGURES", json.dumps({field: float(f"{value:.5g}") for field, value in figures.items()}))
        return
    names = [name for name in args.names if not args.half or name in ENVIRONMENTS[args.half]]
    for seed in args.seeds:
        for name in names:
            for side in args.sides:
                key = f"{args.script} {name}, {side} {args.flags}".strip()
                stamped = stamp(f"{args.script}.py", ALL[name][0])
                if side != "ours":
                    stamped |= {"text": f"{PEERS} {ALL[name]} {steps}", "commit": "–"}
                if not missing("unknown", key, stamped["text"], [seed]):
                    continue
                command = [sys.executable, __file__, args.script, "--names", name, "--one", side, "--steps", steps]
                printed, _ = call(*command, "--seeds", seed, f"--flags={args.flags}")
                figures = json.loads(printed.split("FIGURES")[1])
                print(key, seed, figures, flush=True)
                if not args.steps:
                    keep("unknown", key, stamped, seed, figures)
    print(table_of(args.script))


if __name__ == "__main__":
    main()
