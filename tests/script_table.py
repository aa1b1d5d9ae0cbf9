"""What the tests of whole runs (tests/runs/test_runs.py, tests/kills.py) must know of each script: a row for each.

To bring a script over is to add its row to SCRIPTS; then `pytest -m "" tests/runs/test_runs.py -k NAME` tries it. Flags
are written as one text, words apart. The comments beside the fields of `Script` say what belongs where; only `name`,
`fast`, `one` and `kinds` must be given. `python tests/kills.py SCRIPT CONFIGURATION` kills for longer.
"""

import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import random
import re
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch


def words(*parts):
    """All words of all parts."""
    return [word for part in parts for word in str(part).split()]


def lines(text):
    """The entries of a table written as text: they stand on lines of their own, or between bars."""
    return [line.strip() for line in re.split(r"\n| \| ", text) if line.strip()]


def of(name, **kwargs):
    """Flags of an environment of run_envs.py with arguments for its constructor."""
    return f"--env-id run_envs:{name}-v0 --env-kwargs {json.dumps(kwargs, separators=(',', ':'))}"


# Spaces of Match (run_envs.py) -> what the refusal names. These no script can handle.
NO_ACTIONS = "text Text | tuple Tuple | dict Dict | huge 1000000000 | empty Box"
NO_OBSERVATIONS = "sequence Sequence | graph Graph | huge memory | empty Box"


@dataclasses.dataclass(kw_only=True)
class Script:
    """What the tests must know of a script; they add what they are about."""

    name: str  # of the file
    # Short runs. They take place in `home`, of `fast` or `one` steps and environments at a time.
    home: str = "--env-id CartPole-v1"  # a quick environment that a run folder may ask for; short episodes
    fast: str  # sizes of short runs: if there is num_envs, 4 environments; --eval-episodes 4
    one: str  # the same with one environment; at most 32 steps between two looks whether the run is over
    stride: int = 128  # with `fast`, so many steps at most pass between two looks whether the run is over
    # What kind of script it is.
    explores: bool = False  # training episodes explore: evaluations decide about --stop-at-return; it learns later on
    steps_vectors: bool = True  # it steps the vector environments that make_envs makes
    actions_are: str = "discrete"  # or "box": what the environments of run_envs.py must have
    teams: bool = False  # it plays PettingZoo's parallel environments: those of run_envs_teams.py
    always: str = ""  # flags that it needs to take the environments of run_envs.py, whatever the test
    names_the_step: bool = True  # with `one`, it sees a NaN in the step that brought it
    prints: str = ""  # how a line begins that it prints about the environments before anything else
    draws: dict = dataclasses.field(default_factory=dict)  # pictures besides the curve: function(folder, …) -> file
    # Kills. The first is tried in the fast tests too, and around every write.
    kinds: dict  # of state: a name -> flags of a run with two checkpoints, within some tens of milliseconds
    kills: dict = dataclasses.field(default_factory=dict)  # for kills.py: a name -> flags; some 25 checkpoints
    # What it learns: Match (run_envs.py), to more than 0.95, in a second or two.
    learn: str = ""  # flags with which it does
    learn_images: str = ""  # what to add for images
    actions: list = ()  # of Match, that it learns
    observations: list = ()
    options: list = ()  # flags each of which has an effect on 200 steps at home
    options_learn: bool = False  # whether it learns CartPole in 40,000 steps with each of them
    minigrid: str = ""  # what to add for a short run on MiniGrid-Empty-5x5-v0, if it can play it
    # Bad input: the words to the right of -> stand in the message.
    refused: str = ""  # flags that only this script refuses, one of its own or in words of its own
    out_of_range: str = ""  # numbers that only this script has: a flag and its impossible values
    no_actions: str = NO_ACTIONS  # of Match, refused: the name, and a word in the message
    no_observations: str = NO_OBSERVATIONS
    misfits: str = ""  # flags that do not fit a finished run, `run` at home, made with `fast`
    diverges: str = ""  # flags with which the loss becomes infinite or NaN at home

    @functools.cached_property
    def module(self):
        return importlib.import_module(self.name.removesuffix(".py"))

    def has(self, *flags):
        """Whether all of these are flags of the script."""
        return all(flag in vars(self.module.Args()) for flag in flags)

    def has_own(self, *names):
        """Whether one of these functions is not ppo.py's, which another test compares: it has, or is, another name."""
        return any(getattr(getattr(self.module, name, None), "__name__", "") != name for name in names)

    def env_id(self, name):
        """The --env-id of an environment of run_envs.py, as this script can play it."""
        if self.teams:
            return f"run_envs_teams:{name}"
        return f"run_envs:{name}{'Box' if self.actions_are == 'box' else ''}-v0"

    def own(self, name):
        """The dotted path of a wrapper of run_envs.py."""
        return f"run_envs_teams.{name}" if self.teams else f"run_envs.{name}"

    def world(self, name, **kwargs):
        """Flags of an environment of run_envs.py, as this script can play it."""
        given = f" --env-kwargs {json.dumps(kwargs, separators=(',', ':'))}" if kwargs else ""
        return f"{self.always} --env-id {self.env_id(name)}{given}"

    def scramble(self):
        """Put the generators that all of a process share into another state: no run may depend on them."""
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(int.from_bytes(os.urandom(4), "little"))

    def train(self, *flags):
        """`train` in this process; the summary."""
        self.scramble()
        return self.module.train(self.module.tuned(*words("--no-progress", *flags)))

    def main(self, *flags):
        """What `python script flags…` does, in this process; the exit code."""
        self.scramble()
        with patch.object(sys, "argv", [self.name, *words(*flags)]):
            try:
                self.module.main()
            except SystemExit as stop:
                return stop.code or 0
        return 0


def small(settings, kinds):
    """`kinds` with the same settings before each; checkpoints after 60 and 120 steps, an evaluation between them."""
    limits = "--total-timesteps 150 --checkpoint-every 60 --eval-every 90 --eval-episodes 1"
    return {name: f"{settings} {limits} {flags}" for name, flags in kinds.items()}


KINDS = {  # for scripts that play Gymnasium's environments with discrete actions
    "CartPole": "--env-id CartPole-v1",
    "LunarLander": "--env-id LunarLander-v3 --max-episode-steps 40",
    "reset not clean": "--env-id run_envs:Unclean-v0",
    "own wrapper": "--env-id CartPole-v1 --wrappers run_envs.Own --max-episode-steps 40",
    "images": of("Match", observation="channels_last"),
    "toy text": "--env-id Taxi-v4 --max-episode-steps 30",
    "MiniGrid": "--env-id MiniGrid-Empty-5x5-v0 --max-episode-steps 20",
    "return limit": "--env-id CartPole-v1 --max-episode-return 8",
    "stopped early": "--env-id CartPole-v1 --stop-at-return 5 --max-episode-steps 10 --total-timesteps 1000000 "
    "--checkpoint-every 300 --eval-every 400",
}
BIPEDAL_WALKER = "--env-id BipedalWalker-v3 --max-episode-steps 40"
LIT = of("Match", observation="channels_last")
PONG = "--env-id ALE/Pong-v5 --max-episode-steps 100" if importlib.util.find_spec("ale_py") else LIT

ON_POLICY = "--num-envs 2 --num-steps 32 --num-minibatches 2 --update-epochs 2"
LONGER = "--num-minibatches 2 --update-epochs 2 --eval-episodes 2"  # for kills.py
LONG = f"{LONGER} --num-envs 4 --num-steps 32 --total-timesteps 20000 --checkpoint-every 800"
LONG_IMAGES = (
    f"{LONGER} --update-epochs 1 --num-envs 2 --num-steps 16 --total-timesteps 800 --checkpoint-every 64 {PONG}"
)
BAD_ROLLOUTS = """
    --num-envs 3 --num-steps 5 --num-minibatches 4 -> 15 4 minibatches | --num-steps 1000000000 -> rollout memory
    --hidden-sizes 99999 99999 -> network memory | --num-envs 1 --num-steps 2 --num-minibatches 4 -> 2 4 minibatches
    --num-envs 2 --num-steps 2 --num-minibatches 4 --norm-adv -> no-norm-adv
    """
BAD_SIZES = """num-steps 0 HUGE | num-minibatches 0 | update-epochs 0 | gae-lambda 2 | clip-coef -0.2 HUGE
    ent-coef nan | target-kl -1 | critic-hidden-sizes -3 | hidden-sizes 100000000"""
DIVERGES = "--learning-rate 1e15 --vf-coef 1e15 --no-anneal-lr"

PPO = Script(
    name="ppo.py",
    fast="--num-envs 4 --num-steps 32 --num-minibatches 4 --update-epochs 2 --eval-episodes 4",
    one="--num-envs 1 --num-steps 32 --num-minibatches 4 --update-epochs 2 --eval-episodes 2",
    kinds=small(
        ON_POLICY,
        {
            "V-trace, normalised": "--env-id Pendulum-v1 --wrappers gymnasium.wrappers.TimeAwareObservation "
            "--estimator vtrace --max-episode-steps 40 --normalize-obs --normalize-reward --target-kl 0.02",
            **KINDS,
            "BipedalWalker": BIPEDAL_WALKER,
            "plain returns": "--env-id FrozenLake-v1 --estimator vanilla --normalize-reward",
        },
    ),
    kills={
        "CartPole": f"--env-id CartPole-v1 {LONG}",
        "LunarLander": f"--env-id LunarLander-v3 {LONG}",
        "BipedalWalker": f"--env-id BipedalWalker-v3 --max-episode-steps 300 {LONG}",
        "V-trace": f"--env-id Pendulum-v1 --estimator vtrace --normalize-obs --normalize-reward {LONG}",
        "images": LONG_IMAGES,
        "own wrapper": f"--env-id run_envs:Unclean-v0 --wrappers run_envs.Own --normalize-obs {LONG}",
    },
    learn="--num-envs 8 --num-steps 32 --num-minibatches 4 --learning-rate 5e-3 --gamma 0.5 --ent-coef 0 "
    "--total-timesteps 3000 --eval-every 100000",
    learn_images="--total-timesteps 1500 --learning-rate 1e-3",
    actions=words("discrete box integers multidiscrete multibinary"),
    observations=words("dict matrix channels_last discrete multibinary multidiscrete tuple channels_first"),
    options=lines("""--estimator vtrace --update-epochs 2 | --estimator vanilla | --buffer vtrace --update-epochs 2
        --clip-vloss --clip-vloss-coef 0.01
        --target-kl 0.001 | --normalize-obs | --normalize-reward | --critic-hidden-sizes 32 | --no-anneal-lr
        --hidden-sizes --critic-hidden-sizes 64 64 | --no-norm-adv | --ent-coef 0.01 | --clip-coef 0.1"""),
    options_learn=True,
    minigrid="--eval-episodes 2",
    out_of_range=BAD_SIZES,
    refused=BAD_ROLLOUTS
    + """
        --env-id run_envs:Match-v0 --env-kwargs {"observation":"channels_first"} --normalize-obs -> normalize_obs""",
    diverges=DIVERGES,
    misfits="""--resume run --num-envs 8 -> num_envs | --evaluate run --normalize-obs -> network
        --resume run --hidden-sizes 32 -> hidden_sizes | --evaluate run --hidden-sizes 32 -> network""",
)
TAXI = "--env-id Taxi-v4 --max-episode-steps 30"
PPO_MASKED = Script(
    name="ppo_masked.py",
    home=TAXI,
    fast="--num-envs 4 --num-steps 32 --num-minibatches 4 --update-epochs 2 --eval-episodes 4",
    one="--num-envs 1 --num-steps 32 --num-minibatches 4 --update-epochs 2 --eval-episodes 2",
    always="--no-mask",
    prints="action masks come from",
    kinds=small(
        ON_POLICY,
        {
            "Taxi": TAXI,
            "reset not clean": "--env-id run_envs:Unclean-v0 --no-mask",
            "own wrapper": "--env-id CartPole-v1 --wrappers run_envs.Own --max-episode-steps 40 --no-mask",
            "V-trace, normalised": f"{TAXI} --estimator vtrace --normalize-reward",
            "naive": f"{TAXI} --naive-mask",
            "dict of observations": """--env-id masked_envs:Cue-v0 --env-kwargs {"observation":"dict"}""",
        },
    ),
    kills={
        "Taxi": f"--env-id Taxi-v4 {LONG}",
        "V-trace": f"--env-id Taxi-v4 --estimator vtrace --normalize-reward {LONG}",
        "naive": f"--env-id Taxi-v4 --naive-mask {LONG}",
        "own wrapper": f"--env-id run_envs:Unclean-v0 --wrappers run_envs.Own --no-mask {LONG}",
    },
    learn="--num-envs 8 --num-steps 32 --num-minibatches 4 --learning-rate 3e-3 --gamma 0.5 --ent-coef 0 "
    "--total-timesteps 5000 --eval-every 100000",
    actions=words("discrete multidiscrete multibinary"),
    observations=words("matrix discrete multibinary multidiscrete tuple"),
    options=lines("""--estimator vtrace | --estimator vanilla | --clip-vloss --clip-vloss-coef 0.01
        --target-kl 1e-6 | --normalize-reward | --critic-hidden-sizes 32 | --naive-mask | --no-mask"""),
    minigrid="--no-mask --eval-episodes 2",
    no_actions=f"{NO_ACTIONS} | box ppo.py",
    out_of_range=BAD_SIZES,
    refused=BAD_ROLLOUTS
    + """--no-mask --naive-mask -> no_mask naive_mask | --env-id Pendulum-v1 -> Box ppo.py
        --env-id masked_envs:Cue-v0 --env-kwargs {"source":"entry","observation":"mask"} -> nothing but
        --env-id CartPole-v1 -> action_masks() | --hidden-sizes --critic-hidden-sizes 8 -> hidden_sizes layer""",
    diverges=DIVERGES,
    misfits="--resume run --naive-mask -> naive_mask | --evaluate run --hidden-sizes 32 -> network",
)
WATCHED = "--random-steps 10"
PPO_RND = Script(
    name="ppo_rnd.py",
    fast=f"{WATCHED} --num-envs 4 --num-steps 32 --num-minibatches 4 --update-epochs 2 --eval-episodes 4",
    one=f"{WATCHED} --num-envs 1 --num-steps 32 --num-minibatches 4 --update-epochs 2 --eval-episodes 2",
    kinds=small(
        f"{ON_POLICY} {WATCHED}",
        {
            "CartPole, normalised": "--env-id CartPole-v1 --normalize-obs --normalize-reward",
            "rooms": "--env-id MiniGrid-MultiRoom-N2-S4-v0 --max-episode-steps 20",
            "LunarLander": f"{KINDS['LunarLander']} --target-kl 0.02",
            "own wrapper": KINDS["own wrapper"],
            "images": KINDS["images"],
            "no random play": "--env-id CartPole-v1 --random-steps 0 --episodic",
        },
    ),
    kills={
        "rooms": f"--env-id MiniGrid-MultiRoom-N2-S4-v0 {LONG}",
        "images": LONG_IMAGES,
        "LunarLander": f"--env-id LunarLander-v3 --normalize-obs --normalize-reward {LONG}",
    },
    learn=f"{WATCHED} --num-envs 8 --num-steps 32 --num-minibatches 4 --learning-rate 3e-3 --gamma 0.5 --ent-coef 0 "
    "--intrinsic-gamma 0.5 --total-timesteps 5000 --eval-every 100000",
    learn_images="--total-timesteps 1500 --learning-rate 1e-3",
    actions=words("discrete box"),
    observations=words("matrix dict channels_first"),
    options=lines("""--intrinsic-coef 0 | --intrinsic-coef 2 | --extrinsic-coef 1 | --intrinsic-gamma 0.9 | --episodic
        --no-normalize-intrinsic | --predictor-learning-rate 1e-3 | --predictor-share 1 | --random-steps 0
        --clip-vloss --clip-vloss-coef 0.01 | --critic-hidden-sizes 32 | --normalize-obs | --normalize-reward"""),
    out_of_range=BAD_SIZES
    + """ | intrinsic-gamma 1.5 | predictor-share 0 2 | random-steps -1 | intrinsic-coef nan | extrinsic-coef -1
        predictor-learning-rate -1""",
    refused=BAD_ROLLOUTS,
    diverges=DIVERGES,
    misfits="""--resume run --intrinsic-coef 3 -> intrinsic_coef | --resume run --episodic -> episodic
        --resume run --predictor-share 1 -> predictor_share | --evaluate run --hidden-sizes 32 -> network""",
)
CLIFF = "--env-id CliffWalking-v1 --max-episode-steps 60"
LAKE = "--env-id FrozenLake-v1"
QLEARNING = Script(
    name="qlearning.py",
    home=CLIFF,
    fast="--eval-episodes 4",
    one="--eval-episodes 2",
    stride=60,
    explores=True,
    steps_vectors=False,
    always="--grid-size 2",
    draws={"draw_values": "values.png"},
    kinds=small(
        "",
        {
            "cliff, Sarsa": f"{CLIFF} --algorithm sarsa",
            "taxi, double Q": f"{TAXI} --algorithm double-q --exploration-fraction 0.5 --anneal-lr",
            "mountain car": "--env-id MountainCar-v0 --max-episode-steps 40",
            "stopped early": f'{LAKE} --env-kwargs {{"is_slippery":false}} --stop-at-return 1 --total-timesteps 5000 '
            "--checkpoint-every 500 --eval-every 400",
            "reset not clean, wrapped": "--env-id run_envs:Unclean-v0 --wrappers run_envs.Own --grid-low -3 -3 "
            "--grid-high 3 3 --grid-size 5",
            "lake, expected Sarsa": f"{LAKE} --algorithm expected-sarsa",
            "blackjack": "--env-id Blackjack-v1",
            "lander": "--env-id LunarLander-v3 --grid-size 3 --max-episode-steps 20",
        },
    ),
    kills={
        name: f"{flags} --total-timesteps 60000 --checkpoint-every 2400 --eval-episodes 2"
        for name, flags in {
            "CliffWalking": "--env-id CliffWalking-v1",
            "Taxi, double Q": "--env-id Taxi-v4 --algorithm double-q --exploration-fraction 0.5",
            "MountainCar, Sarsa": "--env-id MountainCar-v0 --algorithm sarsa",
            "Blackjack, expected Sarsa": "--env-id Blackjack-v1 --algorithm expected-sarsa",
            "own wrapper": "--env-id run_envs:Unclean-v0 --wrappers run_envs.Own --grid-low -3 -3 --grid-high 3 3",
        }.items()
    },
    learn="--learning-rate 0.3 --gamma 0 --total-timesteps 2000 --eval-every 100000",
    actions=["discrete"],
    observations=words("discrete multidiscrete"),
    options=lines("""--algorithm sarsa | --algorithm expected-sarsa | --algorithm double-q | --epsilon-decay 0.9
        --epsilon-min 0.99 | --epsilon-start 0.5 | --exploration-fraction 0.5 | --no-anneal-lr | --gamma 0.9"""),
    no_actions=NO_ACTIONS.replace("1000000000", "million") + " | multibinary MultiBinary | box Box",
    no_observations="sequence Sequence | graph Graph | huge million | dict Dict | multibinary MultiBinary",
    out_of_range=f"""grid-size 0 {10**30} | learning-rate 1.5 | epsilon-start 1.2 | epsilon-min -0.1
        epsilon-decay 2 | exploration-fraction 0""",
    refused="""--env-id Pendulum-v1 -> Box Discrete ppo.py
        --env-id CartPole-v1 --grid-low -1 --grid-high 1 -> 4 grid_low 1
        --env-id CartPole-v1 --grid-low nan --grid-high 1 -> grid_low
        --env-id MountainCar-v0 --grid-low 0.7 -1 -> 0.7 grid_low
        --env-id MountainCar-v0 --grid-size 9999 -> million grid_size | --grid-low 1 --grid-high 2 -> grid_low Box""",
    misfits="--resume run --algorithm sarsa -> algorithm | --evaluate run --algorithm double-q -> best.npz",
)

ROOT = Path(__file__).resolve().parent.parent
# No replays, so that the environments' steps are the run's.
ALONE = "--rho 0 --phi 0 --gru-size 8 --chunk-length 8 --num-steps 32 --num-minibatches 4 --update-epochs 2"
FROM_DEMO = f"--env-id MountainCar-v0 --initial-human-demos-dir {ROOT / 'demos/MountainCar-v0'} --max-episode-steps 40"
OWN_DEMOS = "--rho 0.3 --phi 0.3 --demo-capacity 5"
GRU = "--recurrent --gru-size 8 --chunk-length 8"
PPOD = Script(
    name="ppod.py",
    fast=f"{ALONE} --num-envs 4 --eval-episodes 4",
    one=f"{ALONE} --num-envs 1 --eval-episodes 2",
    kinds=small(
        f"{ON_POLICY} {OWN_DEMOS} {GRU}",
        {
            "a demo, normalised": f"{FROM_DEMO} --normalize-obs",
            "CartPole, feed-forward": "--env-id CartPole-v1 --no-recurrent --normalize-obs --normalize-reward",
            "MiniGrid": f"{KINDS['MiniGrid']} --initial-reward-threshold 0.1",
            "LunarLander": f"{KINDS['LunarLander']} --target-kl 0.02 --anneal-by current",
            "reset not clean": KINDS["reset not clean"],
            "own wrapper": KINDS["own wrapper"],
        },
    ),
    kills={
        "a demo": f"{FROM_DEMO} {OWN_DEMOS} {GRU} --normalize-obs {LONG}",
        "MiniGrid": f"--env-id MiniGrid-DoorKey-5x5-v0 --max-episode-steps 50 {OWN_DEMOS} {GRU} {LONG}",
        "CartPole": f"--env-id CartPole-v1 {OWN_DEMOS} --normalize-obs --normalize-reward {LONG}",
        "own wrapper": f"--env-id run_envs:Unclean-v0 --wrappers run_envs.Own {OWN_DEMOS} {GRU} {LONG}",
    },
    learn="--no-recurrent --num-envs 8 --num-steps 32 --num-minibatches 4 --learning-rate 5e-3 --gamma 0.5 "
    "--ent-coef 0 --hidden-sizes 64 64 --phi 0 --total-timesteps 4000 --eval-every 100000",
    actions=words("discrete box integers multidiscrete multibinary"),
    observations=words("dict matrix discrete multibinary multidiscrete tuple"),
    options=lines(f"""--rho 0.5 | --phi 0.6 | {OWN_DEMOS} | --rho 0.5 --initial-reward-threshold 40 | {GRU}
        --rho 0.2 --phi 0.5 --alpha 0 | --rho 0.2 --phi 0.5 --anneal-by current --demo-capacity 9
        --clip-vloss --clip-vloss-coef 0.01 | --target-kl 1e-6 | --normalize-obs | --normalize-reward
        --no-norm-adv | --ent-coef 0.01 | --clip-coef 0.1 | --hidden-sizes 32 | --no-anneal-lr"""),
    no_observations=f"{NO_OBSERVATIONS} | channels_first ppo.py | channels_last ppo.py",
    out_of_range=BAD_SIZES
    + """
        rho 1.5 | phi -0.1 | alpha -1 | demo-capacity 0 | gru-size 0 | chunk-length 0 | num-agent-demos-to-save 0
        save-demos-every 0 | initial-reward-threshold nan""",
    refused=BAD_ROLLOUTS
    + """--rho 0.8 --phi 0.3 -> rho phi environment | --rho 1 --phi 0 -> rho phi environment
        --recurrent --num-steps 100 -> num_steps chunk_length | --hidden-sizes --gamma 0.9 -> hidden_sizes layer
        --recurrent --num-envs 3 --num-minibatches 8 -> 12 chunks 8 minibatches
        --env-id MiniGrid-Empty-5x5-v0 --normalize-obs -> normalize_obs one-hot
        --initial-human-demos-dir taken -> taken demos/record.py | --initial-agent-demos-dir missing -> missing
        --supplementary-demos-dir taken -> taken folder | --supplementary-demos-dir missing -> missing folder
        --target-agent-demos-dir taken -> taken folder | --target-agent-demos-dir taken/deeper -> taken folder""",
    diverges=DIVERGES,
    misfits="""--resume run --rho 0.3 -> rho | --evaluate run --hidden-sizes 32 -> network
        --resume run --recurrent -> recurrent | --resume run --demo-capacity 7 -> demo_capacity""",
)
REPLAY = "--batch-size 16 --buffer-size 300 --train-frequency 4 --gradient-steps 1 --target-network-frequency 50"
REPLAY_LONG = f"{REPLAY} --num-envs 4 --buffer-size 2000 --total-timesteps 20000 --checkpoint-every 800"
DQN = Script(
    name="dqn.py",
    fast=f"{REPLAY} --num-envs 4 --hidden-sizes 64 --learning-starts 32 --learning-rate 0.01 --eval-episodes 4 "
    "--target-network-frequency 20",
    one=f"{REPLAY} --num-envs 1 --hidden-sizes 64 --learning-starts 16 --eval-episodes 2",
    stride=4,
    explores=True,
    kinds=small(
        f"{REPLAY} --buffer-size 50 --batch-size 8 --num-envs 2 --learning-starts 16 --hidden-sizes 8",
        {
            "soft target, normalised": "--env-id CartPole-v1 --normalize-obs --tau 0.1 --target-network-frequency 4",
            "images": f"{KINDS['images']} --train-frequency 16",
            **{name: flags for name, flags in KINDS.items() if name not in ("images", "stopped early")},
            "stopped early": "--env-id CartPole-v1 --max-episode-steps 10 --stop-at-return 5 --eval-every 40 "
            "--total-timesteps 1000000",
        },
    ),
    kills={
        "CartPole": f"--env-id CartPole-v1 {REPLAY_LONG}",
        "LunarLander, normalised": f"--env-id LunarLander-v3 --normalize-obs --tau 0.01 {REPLAY_LONG}",
        "images": f"{REPLAY} --num-envs 2 --total-timesteps 1600 --checkpoint-every 64 --learning-starts 64 "
        f"--train-frequency 16 --eval-episodes 1 {PONG}",
        "own wrapper": f"--env-id run_envs:Unclean-v0 --wrappers run_envs.Own --no-double {REPLAY_LONG}",
    },
    learn="--num-envs 8 --learning-rate 3e-3 --gamma 0.5 --hidden-sizes 64 --batch-size 32 --learning-starts 100 "
    "--train-frequency 4 --target-network-frequency 100 --buffer-size 2000 --end-e 0.5 --gradient-steps 1 "
    "--total-timesteps 4000 --eval-every 100000",
    learn_images="--total-timesteps 2500 --learning-rate 5e-4 --train-frequency 8",
    actions=["discrete"],
    observations=words("dict matrix channels_last discrete multibinary multidiscrete tuple channels_first"),
    options=lines("""--no-double | --tau 0.05 --target-network-frequency 2 | --no-anneal-lr | --normalize-obs
        --gamma 0.9 | --hidden-sizes | --start-e 0.5 | --end-e 0.5 | --exploration-fraction 1 | --max-grad-norm 0.01
        --gradient-steps 2 | --train-frequency 3 | --target-network-frequency 30 | --batch-size 8 | --buffer-size 64
        --learning-starts 80"""),
    minigrid="--eval-episodes 2",
    no_actions=f"{NO_ACTIONS} | box ppo.py | multibinary ppo.py | multidiscrete ppo.py",
    out_of_range="""tau 1.5 | start-e 1.5 | end-e -0.1 | exploration-fraction 2 | train-frequency 0 | gradient-steps 0
        target-network-frequency 0 | batch-size 0 | buffer-size 0 | learning-starts -1 | max-grad-norm nan
        hidden-sizes 100000000""",
    refused="""--env-id Pendulum-v1 -> Box Discrete ddpg_td3.py
        --env-id run_envs:Match-v0 --env-kwargs {"observation":"channels_first"} --normalize-obs -> normalize_obs
        --buffer-size 100 --batch-size 128 -> buffer_size 100 128 | --buffer-size 2 --batch-size 1 -> buffer_size 2 4
        --buffer-size 1000000000000000 -> buffer_size memory | --hidden-sizes 99999 99999 -> network memory""",
    diverges="--learning-rate 1e15 --no-anneal-lr --hidden-sizes 64 64",
    misfits="""--resume run --num-envs 8 -> num_envs | --evaluate run --normalize-obs -> network
        --resume run --buffer-size 400 -> buffer_size | --evaluate run --hidden-sizes 32 -> network""",
)
ALL_OFF = "--no-double --no-prioritized --no-dueling --no-multi-step --no-distributional --no-noisy"
FRAMES = "--env-id rainbow_envs:Frames-v0 --stacked-frames yes"
RAINBOW = Script(
    name="rainbow.py",
    fast=f"{REPLAY} --num-envs 4 --hidden-sizes 64 --learning-starts 100 --eval-episodes 4 --learning-rate 5e-3 "
    "--v-max 40",
    one=f"{REPLAY} --num-envs 1 --hidden-sizes 64 --learning-starts 16 --eval-episodes 2",
    stride=4,
    explores=True,
    kinds=small(
        f"{REPLAY} --buffer-size 50 --batch-size 8 --num-envs 2 --learning-starts 16 --hidden-sizes 8",
        {
            "all six": "--env-id CartPole-v1 --normalize-obs",
            "none": f"--env-id CartPole-v1 {ALL_OFF}",
            "stacked frames": f"{FRAMES} --train-frequency 16",
            "often": "--env-id CartPole-v1 --checkpoint-every 24 --n-step 5",  # few windows are closed in time
            "LunarLander": KINDS["LunarLander"],
            "own wrapper": KINDS["own wrapper"],
            "reset not clean": f"{KINDS['reset not clean']} --no-noisy",
            "stopped early": "--env-id CartPole-v1 --max-episode-steps 10 --stop-at-return 5 --eval-every 40 "
            "--total-timesteps 1000000",
        },
    ),
    kills={
        "CartPole": f"--env-id CartPole-v1 {REPLAY_LONG}",
        "LunarLander, normalised": f"--env-id LunarLander-v3 --normalize-obs --tau 0.01 {REPLAY_LONG}",
        "stacked frames": f"{REPLAY} --num-envs 2 --total-timesteps 1600 --checkpoint-every 64 --learning-starts 64 "
        f"--train-frequency 16 --eval-episodes 1 {FRAMES}",
        "uniform": f"--env-id CartPole-v1 --no-prioritized {REPLAY_LONG}",
    },
    learn="--num-envs 8 --learning-rate 3e-3 --gamma 0.5 --hidden-sizes 64 --batch-size 32 --learning-starts 100 "
    "--train-frequency 4 --target-network-frequency 100 --buffer-size 2000 --gradient-steps 1 --v-min 0 --v-max 1 "
    "--total-timesteps 4000 --eval-every 100000",
    learn_images="--total-timesteps 2500 --learning-rate 5e-4 --train-frequency 8",
    actions=["discrete"],
    observations=words("dict matrix discrete channels_first"),
    options=lines("""--no-double | --no-prioritized | --no-dueling | --no-multi-step | --no-distributional | --no-noisy
        --alpha 1 | --beta 1 | --n-step 5 | --num-atoms 11 | --v-min -10 | --v-max 200 | --sigma 0.1 | --adam-eps 0.01
        --no-noisy --end-e 0.5 | --tau 0.05 --target-network-frequency 2 | --hidden-sizes | --normalize-obs"""),
    no_actions=f"{NO_ACTIONS} | box ppo.py | multibinary ppo.py | multidiscrete ppo.py",
    out_of_range="""tau 1.5 | alpha -0.1 2 | beta 2 | n-step 0 | num-atoms 1 | sigma -1 | adam-eps -1 | start-e 1.5
        exploration-fraction 2 | train-frequency 0 | gradient-steps 0 | target-network-frequency 0 | batch-size 0
        buffer-size 0 | learning-starts -1 | max-grad-norm nan | hidden-sizes 100000000 | v-min nan""",
    refused="""--env-id Pendulum-v1 -> Box Discrete ddpg_td3.py | --v-min 3 --v-max 3 -> v_min v_max
        --env-id rainbow_envs:Frames-v0 --normalize-obs -> normalize_obs | --stacked-frames yes -> stacked_frames images
        --buffer-size 100 --batch-size 128 -> buffer_size 100 128 | --n-step 3 --checkpoint-every 3 -> checkpoint_every
        --buffer-size 11 --batch-size 1 --num-envs 4 -> buffer_size 11 12
        --num-atoms 10000 --batch-size 100000 -> 10000 atoms memory
        --buffer-size 1000000000000000 -> buffer memory | --hidden-sizes 99999 99999 -> network memory""",
    diverges="--no-noisy --learning-rate 1e15 --no-anneal-lr --max-grad-norm 1e15 --hidden-sizes 16 16 16",
    misfits="""--resume run --num-envs 8 -> num_envs | --evaluate run --normalize-obs -> network
        --resume run --no-noisy -> noisy | --resume run --n-step 2 -> n_step
        --evaluate run --no-dueling -> network""",
)
UPDATES = "--batch-size 16 --buffer-size 2000 --train-frequency 4 --gradient-steps 1 --hidden-sizes 16"
UPDATES_LONG = f"{UPDATES} --learning-starts 200 --total-timesteps 12000 --checkpoint-every 480 --eval-episodes 1"
SWING = "--env-id Pendulum-v1 --max-episode-steps 40"
DDPG_TD3 = Script(
    name="ddpg_td3.py",
    home="--env-id Pendulum-v1 --max-episode-steps 50",
    fast=f"{UPDATES} --num-envs 4 --learning-starts 96 --eval-episodes 4",  # the actor moves in the last of 1000 steps
    one=f"{UPDATES} --num-envs 1 --learning-starts 16 --eval-episodes 2",
    stride=4,
    explores=True,
    actions_are="box",
    kinds=small(
        f"{UPDATES} --num-envs 2 --learning-starts 16 --buffer-size 50",
        {
            "Pendulum, lasting noise, normalised": f"{SWING} --noise ou --normalize-obs --normalize-reward",
            "DDPG, annealed": f"{SWING} --algorithm ddpg --anneal-lr --max-grad-norm 1 --bf16",
            "reset not clean": "--env-id run_envs:UncleanBox-v0 --policy-frequency 3",
            "own wrapper": f"{SWING} --wrappers run_envs.Own",
            "images": f"{of('MatchBox', observation='channels_last')} --train-frequency 16",
            "LunarLander": "--env-id LunarLanderContinuous-v3 --max-episode-steps 40 --stop-at-return 10000 "
            "--train-frequency 1",
        },
    ),
    kills={
        "Pendulum, lasting noise, normalised": f"{SWING} --noise ou --normalize-obs --normalize-reward {UPDATES_LONG}",
        "DDPG": f"--env-id Pendulum-v1 --algorithm ddpg --anneal-lr --max-grad-norm 1 --bf16 {UPDATES_LONG}",
        "LunarLander": f"--env-id LunarLanderContinuous-v3 --policy-frequency 3 {UPDATES_LONG} --num-envs 4",
        "images": f"{of('MatchBox', observation='channels_last')} {UPDATES_LONG} --train-frequency 16 --num-envs 2 "
        "--total-timesteps 1600 --checkpoint-every 64",
        "own wrapper": f"--env-id run_envs:UncleanBox-v0 --wrappers run_envs.Own --normalize-obs {UPDATES_LONG}",
    },
    learn="--num-envs 2 --hidden-sizes 32 32 --batch-size 64 --learning-starts 100 --buffer-size 3000 --gamma 0.5 "
    "--tau 0.02 --actor-learning-rate 3e-3 --critic-learning-rate 3e-3 --exploration-noise 0.3 --total-timesteps 1500 "
    "--eval-every 100000",
    actions=words("box integers"),
    observations=words("dict matrix discrete multibinary multidiscrete tuple"),  # images: tests/probes
    options=lines("""--algorithm ddpg | --target-noise 0 | --no-twin-q | --policy-frequency 1 | --noise-clip 0.01
        --actor-learning-rate 3e-3 | --critic-learning-rate 3e-3 | --anneal-lr | --gamma 0.9 | --tau 0.5 | --noise ou
        --exploration-noise 0.5 | --noise ou --ou-theta 0.5 | --critic-hidden-sizes 8 | --critic-hidden-sizes
        --max-grad-norm 0.01 | --normalize-obs | --normalize-reward | --bf16 | --gradient-steps 2 | --train-frequency 3
        --batch-size 8 | --buffer-size 64 | --learning-starts 40"""),
    no_actions=f"{NO_ACTIONS} | discrete dqn.py | multibinary ppo.py | multidiscrete ppo.py",
    out_of_range="""tau 1.5 | ou-theta -1 | policy-frequency 0 | gradient-steps 0 | train-frequency 0 | batch-size 0
        buffer-size 0 | exploration-noise -0.1 | max-grad-norm nan | target-noise -1 | noise-clip -1
        actor-learning-rate -1 | critic-learning-rate nan | hidden-sizes 100000000 | critic-hidden-sizes 0""",
    refused="""--env-id CartPole-v1 -> Discrete dqn.py ppo.py
        --env-id run_envs:MatchBox-v0 --env-kwargs {"observation":"channels_first"} --normalize-obs -> normalize_obs
        --buffer-size 10 --batch-size 11 -> buffer_size 10 11
        --buffer-size 3 --batch-size 1 --num-envs 4 -> buffer_size 3 4
        --buffer-size 100000000000000 -> buffer_size memory | --hidden-sizes 99999 99999 -> network memory
        --env-id run_envs:MatchBox-v0 --env-kwargs {"actions":"unbounded"} -> bounded
        --algorithm ddpg --target-noise 0.2 --twin-q --policy-frequency 2 -> algorithm ddpg td3""",
    diverges="--critic-learning-rate 1e15 --policy-frequency 100000",
    misfits="""--resume run --algorithm ddpg -> algorithm | --resume run --noise ou -> noise
        --resume run --batch-size 8 -> batch_size | --evaluate run --normalize-obs -> network
        --evaluate run --no-twin-q -> network | --evaluate run --hidden-sizes 32 -> network""",
)
PAIR = "--population-size 2 --hidden-sizes 4"
SHORT = "--max-episode-steps 20"
ES = Script(
    name="es.py",
    home="--env-id CartPole-v1 --max-episode-steps 32",
    fast="--population-size 4 --hidden-sizes 4 --eval-episodes 4",
    one="--population-size 2 --hidden-sizes 4 --eval-episodes 2 --checkpoint-every 400",
    explores=True,
    names_the_step=False,  # two candidates play side by side
    kinds=small(
        PAIR,
        {
            "CartPole": f"--env-id CartPole-v1 {SHORT}",
            "normalised, drawn actions": f"--env-id Pendulum-v1 {SHORT} --normalize-obs --action-noise 0.5",
            "ARS": f"--env-id LunarLander-v3 {SHORT} --ars --hidden-sizes --episodes-per-candidate 2",
            "reset not clean": "--env-id run_envs:Unclean-v0 --optimizer ascent",
            "own wrapper": f"--env-id CartPole-v1 --wrappers run_envs.Own {SHORT}",
            "generations": f"--env-id CartPole-v1 {SHORT} --num-generations 4",
        },
    ),
    kills={
        name: f"{flags} --population-size 8 --hidden-sizes 4 --eval-episodes 2"
        for name, flags in {
            "CartPole": "--env-id CartPole-v1 --total-timesteps 60000 --checkpoint-every 2400",
            "Pendulum, ARS": "--env-id Pendulum-v1 --ars --total-timesteps 40000 --checkpoint-every 1600",
            "LunarLander": "--env-id LunarLander-v3 --normalize-obs --max-episode-steps 120 --total-timesteps 25000 "
            "--checkpoint-every 1000",
            "own wrapper": "--env-id run_envs:Unclean-v0 --wrappers run_envs.Own --total-timesteps 10000 "
            "--checkpoint-every 400",
        }.items()
    },
    learn="--normalize-obs --population-size 32 --hidden-sizes 16 --sigma 0.3 --learning-rate 0.1 "
    "--episodes-per-candidate 2 --total-timesteps 20000 --eval-every 1000000",
    actions=words("discrete box integers"),
    observations=words("dict matrix discrete multibinary multidiscrete tuple"),
    options=lines("""--fitness standardized | --fitness raw | --elite 0.5 | --optimizer ascent | --weight-decay 0.1
        --ars | --episodes-per-candidate 2 | --action-noise 0.5 | --normalize-obs | --sigma 0.2"""),
    minigrid=f"{PAIR} --eval-episodes 2 {SHORT}",
    no_actions=NO_ACTIONS.replace("1000000000", "memory") + " | multidiscrete ppo.py | multibinary ppo.py",
    no_observations=f"{NO_OBSERVATIONS} | channels_last ppo.py",
    out_of_range="""population-size 0 1 -2 1000000000 | episodes-per-candidate 0 | num-generations 0 | sigma 0 nan HUGE
        learning-rate -1 1e38 | weight-decay -1 | elite 0 1.5 | action-noise -1 | top-directions 0
        hidden-sizes 0 100000000""",
    refused="""--population-size 7 -> population_size 7 pairs
        --env-id ALE/Pong-v5 -> vectors ppo.py | --top-directions 4 -> top_directions ars
        --ars --top-directions 65 -> top_directions 128 | --ars --fitness raw -> ars fitness
        --ars --elite 0.5 -> ars elite | --hidden-sizes 99999 99999 -> population memory""",
    misfits="""--resume run --sigma 0.5 -> sigma | --resume run --population-size 2 -> population_size
        --resume run --ars -> ars | --evaluate run --hidden-sizes 32 -> network""",
)
SPREAD = '--env-id mpe2.simple_spread_v3 --env-kwargs {"N":2}'
TEAMS = "--num-envs 2 --num-steps 25 --num-minibatches 1 --update-epochs 2"
LONG_TEAMS = "--num-envs 4 --num-steps 25 --num-minibatches 2 --update-epochs 2 --eval-episodes 2"
LONG_TEAMS += " --total-timesteps 12000 --checkpoint-every 450"
MAPPO = Script(
    name="mappo.py",
    home=SPREAD,
    fast="--num-envs 4 --num-steps 25 --num-minibatches 2 --update-epochs 2 --eval-episodes 4",
    one="--num-envs 1 --num-steps 25 --num-minibatches 1 --update-epochs 2 --eval-episodes 2",
    teams=True,
    kinds=small(
        TEAMS,
        {
            "recurrent, FP": f"{SPREAD} --recurrent --state-type FP --data-chunk-length 5",
            "HAPPO, continuous": "--env-id mpe2.simple_spread_v3 --happo --no-share-policy "
            '--env-kwargs {"N":2,"continuous_actions":true}',
            "messages": "--env-id mpe2.simple_reference_v3 --max-episode-steps 11 --recurrent --data-chunk-length 0",
            "different agents": "--env-id mpe2.simple_speaker_listener_v4",
            "processes": f"{SPREAD} --async-envs",
            "own wrapper": "--env-id run_envs_teams:Endless --wrappers run_envs_teams.Own --max-episode-steps 40",
            "reset not clean": "--env-id run_envs_teams:Unclean --no-value-norm",
            "stopped early": f"{SPREAD} --stop-at-return -1000 --max-episode-steps 3 --total-timesteps 1000000",
        },
    ),
    kills={
        "spread": f"{SPREAD} {LONG_TEAMS}",
        "recurrent, FP": f"{SPREAD} --recurrent --state-type FP --data-chunk-length 5 {LONG_TEAMS}",
        "HAPPO, continuous": '--env-id mpe2.simple_spread_v3 --env-kwargs {"N":2,"continuous_actions":true} --happo '
        f"--no-share-policy {LONG_TEAMS}",
        "messages": f"--env-id mpe2.simple_reference_v3 --max-episode-steps 11 {LONG_TEAMS}",
        "processes": f"{SPREAD} --async-envs {LONG_TEAMS}",
        "own wrapper": "--env-id run_envs_teams:Endless --wrappers run_envs_teams.Own --max-episode-steps 40 "
        f"--recurrent {LONG_TEAMS}",
    },
    learn="--num-envs 8 --num-steps 32 --num-minibatches 4 --update-epochs 4 --learning-rate 5e-3 --gamma 0.5 "
    "--ent-coef 0 --total-timesteps 4000 --eval-every 100000",
    actions=words("discrete box integers multidiscrete"),
    observations=words("dict matrix discrete multibinary multidiscrete tuple"),
    options=lines("""--no-share-policy | --no-share-policy --happo | --state-type FP | --recurrent | --no-gae
        --gae-lambda 0 | --recurrent --data-chunk-length 0 | --no-value-norm | --no-clip-vloss | --clip-vloss-coef 0.01
        --huber-delta 0.01 | --ent-coef 0.1 | --critic-hidden-sizes 32 | --no-anneal-lr | --clip-coef 0.01
        --max-grad-norm 0.1"""),
    no_actions=f"{NO_ACTIONS} | multibinary MultiBinary",
    no_observations="sequence Sequence | graph Graph | huge 10,000 | empty Box",
    out_of_range="""num-steps 0 HUGE | num-minibatches 0 | update-epochs 0 | gae-lambda 2 | clip-coef -0.2 HUGE
        ent-coef nan | huber-delta 0 | critic-hidden-sizes -3 | hidden-sizes 100000000 | data-chunk-length -1""",
    refused="""--num-envs 3 --num-steps 5 --num-minibatches 4 -> 15 4 minibatches | --happo -> --no-share-policy
        --num-steps 1000000000 -> rollout memory | --hidden-sizes 99999 99999 -> network memory
        --recurrent --data-chunk-length 7 -> 7 num_steps 25 | --env-id mpe2.simple_spred_v3 -> simple_spread_v3
        --env-id mpe2.simple_speaker_listener_v4 --share-policy -> --no-share-policy
        --env-id CartPole-v1 -> CartPole-v1 mpe2.simple_spread_v3 | --wrappers no.such.Wrapper -> no.such.Wrapper
        --env-kwargs {nonsense -> env_kwargs | --env-kwargs [1] -> env_kwargs | --env-kwargs DEEP -> env_kwargs
        --env-kwargs {"M":3} -> M | --env-id run_envs_teams:Unpicturable --capture-video -> Unpicturable
        --env-id run_envs_teams:Blind --capture-video -> Blind""",
    misfits="""--resume run --num-envs 8 -> num_envs | --resume run --state-type FP -> state_type
        --resume run --happo --no-share-policy -> happo share_policy | --evaluate run --hidden-sizes 32 -> network
        --evaluate run --recurrent -> network
        --evaluate run --env-id mpe2.simple_v3 --env-kwargs {} -> simple_spread""",
)
SHORT_SPREAD = "--env-id mpe2.simple_spread_v3 --max-episode-steps 10"
TEAM = "--hidden-sizes 8 --batch-size 16 --learning-starts 40"
TEAM_SMALL = f"--num-envs 2 {TEAM}"
MADDPG_MATD3 = Script(
    name="maddpg_matd3.py",
    home=SHORT_SPREAD,
    fast=f"{TEAM} --num-envs 4 --eval-episodes 4",
    one=f"{TEAM} --num-envs 1 --eval-episodes 2",
    stride=4,
    explores=True,
    teams=True,
    kinds=small(
        TEAM_SMALL,
        {
            "spread, FP, n steps": f"{SHORT_SPREAD} --state-type FP --no-share-policy --n-step 3 --buffer-size 60",
            "listener, annealed": "--env-id mpe2.simple_speaker_listener_v4 --max-episode-steps 9 --anneal-lr "
            "--max-grad-norm 0.5",
            "discrete MADDPG": f"{SHORT_SPREAD} --env-kwargs {{}} --algorithm maddpg --n-step 2",
            "reset not clean, wrapped": "--env-id run_envs_teams:Unclean --wrappers run_envs_teams.Own",
            "return limit": "--env-id run_envs_teams:Endless --max-episode-return 8",
            "stopped early": "--env-id run_envs_teams:Endless --max-episode-steps 7 --stop-at-return 5",
        },
    ),
    kills={
        name: f"{TEAM} --num-envs 4 --total-timesteps 6000 --checkpoint-every 240 --eval-episodes 2 {flags}"
        for name, flags in {
            "spread": SHORT_SPREAD,
            "spread, FP, n steps": f"{SHORT_SPREAD} --state-type FP --no-share-policy --n-step 3 --buffer-size 1200",
            "discrete MADDPG": f"{SHORT_SPREAD} --env-kwargs {{}} --algorithm maddpg --n-step 2",
            "processes": "--env-id mpe2.simple_speaker_listener_v4 --max-episode-steps 9 --async-envs",
            "own wrapper": "--env-id run_envs_teams:Unclean --wrappers run_envs_teams.Own",
        }.items()
    },
    learn="--num-envs 4 --hidden-sizes 32 --batch-size 64 --learning-starts 200 --gamma 0.5 --output-penalty 1e-4 "
    "--actor-learning-rate 3e-3 --critic-learning-rate 3e-3 --tau 0.05 --exploration-noise 0.3 --total-timesteps 4000 "
    "--eval-every 100000",
    actions=words("discrete box integers"),
    observations=words("matrix dict"),
    options=lines("""--algorithm maddpg | --no-twin-q | --target-noise 0.5 | --noise-clip 0.1 | --policy-frequency 3
        --state-type FP | --no-share-policy | --actor-learning-rate 1e-4 | --critic-learning-rate 1e-4 | --anneal-lr
        --buffer-size 32 | --batch-size 20 | --learning-starts 50 | --train-frequency 8 | --gradient-steps 2
        --gamma 0.5 | --n-step 2 | --tau 0.5 | --exploration-noise 0.9 | --output-penalty 1 | --hidden-sizes 9
        --critic-hidden-sizes 9 | --max-grad-norm 0.01 | --env-kwargs {} --gumbel-temperature 2"""),
    no_actions=f"{NO_ACTIONS} | multidiscrete MultiDiscrete | multibinary MultiBinary",
    no_observations="sequence Sequence | graph Graph | huge 10,000 | empty Box",
    out_of_range="""n-step 0 | tau 1.5 -1 | gumbel-temperature 0 | batch-size 0 | buffer-size 0 | train-frequency 0
        gradient-steps 0 | policy-frequency 0 | target-noise -1 nan | exploration-noise -0.1 | learning-starts -1
        actor-learning-rate nan | critic-learning-rate -1 | max-grad-norm -1 | critic-hidden-sizes 0""",
    refused="""
        --env-id mpe2.simple_spred_v3 -> mean mpe2.simple_spread_v3 | --env-id CartPole-v1 -> CartPole-v1 mpe2
        --env-id mpe2.simple_speaker_listener_v4 --share-policy -> --no-share-policy
        --env-id pettingzoo.classic.tictactoe -> pettingzoo.classic.tictactoe_v3
        --env-id pettingzoo.classic.tictactoe_v3 -> turn-based parallel_env
        --env-id tests.probes.maddpg_envs:Unbounded -> bounded mappo.py
        --env-id tests.probes.maddpg_envs:Uneven -> agents alike
        --env-id tests.probes.team_envs:Empty -> no agents | --env-id tests.probes.team_envs:Absent -> agent b
        --env-kwargs [1] -> env-kwargs | --env-kwargs {"gravity":1} -> gravity | --wrappers nosuch -> nosuch
        --buffer-size 10 --batch-size 11 -> buffer_size batch_size | --buffer-size 100000000000000 -> buffer_size
        --buffer-size 100 --num-envs 40 --batch-size 90 -> buffer_size num_envs
        --hidden-sizes 99999 99999 -> network memory
        --twin-q --policy-frequency 2 --target-noise 0.2 --algorithm maddpg -> algorithm matd3
        --env-id run_envs_teams:Endless --capture-video -> Endless rgb_array""",
    diverges="--critic-learning-rate 1e14",
    misfits="""--resume run --algorithm maddpg -> algorithm | --resume run --n-step 2 -> n_step
        --resume run --state-type FP -> state_type | --evaluate run --hidden-sizes 32 -> network""",
)
SCRIPTS = {
    script.name: script
    for script in [PPO, PPO_MASKED, PPO_RND, PPOD, QLEARNING, DQN, RAINBOW, DDPG_TD3, ES, MAPPO, MADDPG_MATD3]
}
