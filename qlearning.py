# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2", "tyro==1.0.17",
#   "tqdm==4.70.1", "moviepy==2.2.1",
# ]
# ///
"""Q-learning with a table, and its relatives Sarsa, expected Sarsa and double Q-learning, all in this one file.

The table holds a number Q(s, a) for every state s and action a: the return to be expected if a is taken in s. Play,
mostly by taking the best action of the table, sometimes a random one. After each step from S by A to S' with reward R,
move Q(S, A) a little towards what that step says it should be:

    Q(S, A) <- Q(S, A) + alpha [R + gamma max_a Q(S', a) - Q(S, A)]     (Sutton & Barto, eq. 6.8)

The relatives differ in nothing but what they put for max_a Q(S', a). No neural network, no torch: a table and a loop.

    python qlearning.py                                          # CliffWalking-v1, one second; look at values.png
    python qlearning.py --algorithm sarsa --epsilon-min 0.1      # the same, but with the safe path
    python qlearning.py --env-id MountainCar-v0                  # a continuous world, cut into a grid
    python qlearning.py --evaluate runs/DIR                      # play what a run has left behind

Sources: Sutton & Barto, Reinforcement Learning, 2nd edition 2018, chapter 6 (incompleteideas.net/book); Q-learning doi
10.1007/BF00992698, expected Sarsa doi 10.1109/ADPRL.2009.4927542, double Q-learning van Hasselt, NeurIPS 2010.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import io
import itertools
import json
import math
import os
import pickle
import pkgutil
import platform
import random
import re
import subprocess
import sys
import time
import typing
from bisect import bisect
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import gymnasium as gym
import numpy as np
import tyro
from gymnasium import spaces
from tqdm import tqdm

# Settings that learn, per environment; what the user gives wins. (A run ends with the episode that reaches its total.)
TUNED = {
    "CliffWalking-v1": {"total_timesteps": 50_000, "learning_rate": 0.5, "anneal_lr": True, "gamma": 1.0},
    "Taxi-v4": {"total_timesteps": 300_000, "learning_rate": 0.5, "anneal_lr": True, "epsilon_min": 0.1},
    "FrozenLake-v1": {"total_timesteps": 300_000, "anneal_lr": True, "epsilon_min": 0.3},
    "Blackjack-v1": {"total_timesteps": 500_000, "learning_rate": 0.02, "anneal_lr": True, "gamma": 1.0,
                     "epsilon_min": 0.3},
    "MountainCar-v0": {"total_timesteps": 1_500_000, "learning_rate": 0.3, "anneal_lr": True, "epsilon_min": 0.0,
                       "grid_size": 40},
}  # fmt: skip


@dataclass
class Args:
    """Every flag with its default, or what TUNED has for the environment.

    The tuned values depend on the environment, and a value that the user gives wins: so `__new__` notes what was given,
    and `__post_init__` fills in the rest. (dataclasses.replace gives every value: make new Args for a new environment.)
    """

    # run
    env_id: str = "CliffWalking-v1"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers, applied in order
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    total_timesteps: int = 500_000  # environment steps to train for
    stop_at_return: float | None = None  # stop once an evaluation reaches this
    seed: int = 1  # of everything that is drawn at random
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, on separate environments, with the best actions of the table
    capture_video: bool = False  # film an episode at each evaluation
    checkpoint_every: int = 0  # steps between checkpoints; 0: a twentieth of the run
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # table that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window
    config: str | None = None  # config.json of an earlier run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__qlearning__SEED__TIME
    progress: bool = True  # show the progress bar
    # algorithm
    algorithm: Literal["q-learning", "sarsa", "expected-sarsa", "double-q"] = "q-learning"  # the target of an update
    learning_rate: float = 0.1  # alpha: how far an entry of the table moves towards its target
    anneal_lr: bool = False  # lower the learning rate linearly to zero
    gamma: float = 0.99  # discount
    epsilon_start: float = 1.0  # share of random actions at first
    epsilon_min: float = 0.05  # share of random actions in the end
    epsilon_decay: float = 0.99  # factor of that share per episode, down to epsilon_min
    exploration_fraction: float | None = None  # lower it linearly over this part of the run instead
    grid_size: int = 20  # Box observations: bins of each dimension
    grid_low: tuple[float, ...] | None = None  # lower end of each dimension's bins; None: the space's own bounds
    grid_high: tuple[float, ...] | None = None  # upper end; what lies outside goes to the bin at the edge

    def __new__(cls, *_, **given):
        """Note which arguments are given."""
        self = super().__new__(cls)
        self.given = given
        return self

    def __post_init__(self):
        """Fill in the others, from the run that is resumed or evaluated, else from `config`, else from TUNED."""
        run_dir = self.resume or self.evaluate
        source = f"{run_dir}/config.json" if run_dir else self.config
        for name, value in (read_config(source) if source else TUNED.get(self.env_id, {})).items():
            if name not in self.given and not (self.evaluate and name == "capture_video"):  # training's own
                setattr(self, name, value)


class UserError(Exception):
    """Something the user can mend: shown as one line, with exit code 2."""


MODES = "resume evaluate model render config run_dir".split()  # what to do, not how: never taken from a config
RESUMABLE = MODES + "total_timesteps stop_at_return eval_every eval_episodes capture_video checkpoint_every".split()
RESUMABLE += ["progress"]  # these may change when a run is resumed
RANGES = dict.fromkeys("total_timesteps eval_episodes max_episode_steps grid_size".split(), (1, math.inf))
RANGES |= dict.fromkeys("stop_at_return max_episode_return grid_low grid_high".split(), (-math.inf, math.inf))
RANGES |= dict.fromkeys("learning_rate gamma epsilon_start epsilon_min epsilon_decay".split(), (0, 1))
RANGES |= {"exploration_fraction": (1e-6, 1), "seed": (0, 2**32)}  # all other numbers: from 0 to infinity


def read_config(path):
    """The arguments in the config.json of a run, as a dict. UserError if it is none, or has an unknown field."""
    try:
        stored = json.loads(Path(path).read_text())["args"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not the config.json of a run: {error!r}") from None
    if unknown := [name for name, _ in stored if name not in typing.get_type_hints(Args)]:
        raise UserError(f"{path}: unknown field {', '.join(unknown)}")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in stored if k not in MODES}


def check_args(args):
    """UserError that names the first argument of a wrong type, out of range or at odds with another."""

    def fits(value, hint):  # hint: a plain type, a Literal, a union, or a tuple of one type
        origin, options = typing.get_origin(hint), typing.get_args(hint)
        if origin is Literal:
            return value in options
        if origin is tuple:
            return type(value) is tuple and all(fits(item, options[0]) for item in value)
        return any(fits(value, o) for o in options) or type(value) is hint or (hint is float and type(value) is int)

    for name, hint in typing.get_type_hints(Args).items():
        value = getattr(args, name)
        if not fits(value, hint):
            kind = str(hint) if typing.get_args(hint) else hint.__name__
            raise UserError(f"{name} must be {kind.removeprefix('typing.')}, not {value!r}")
        low, high = RANGES.get(name, (0, math.inf))
        for number in value if isinstance(value, tuple) else [value]:
            if isinstance(number, (int, float)) and not (low <= number <= high and math.isfinite(number)):
                raise UserError(f"{name} must lie between {low} and {high}, not be {number}")
    if args.capture_video and not importlib.util.find_spec("moviepy"):
        raise UserError("capture_video needs moviepy: pip install moviepy")
    if args.resume and (args.run_dir or args.evaluate):
        raise UserError("resume goes on in its own run folder: neither run_dir nor evaluate can be given beside it")


# ---------------------------------------------------------------------------------------------------- environment


class ReturnLimit(gym.Wrapper):
    """Truncate an episode once its return reaches `limit`."""

    def __init__(self, env, limit):
        super().__init__(env)
        self.limit = limit

    def reset(self, **kwargs):
        self.total = 0.0
        return self.env.reset(**kwargs)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.total += float(reward)
        return obs, reward, terminated, truncated or self.total >= self.limit, info


def make_table_envs(args, num_envs, render_mode=None):
    """A vector of `num_envs` single environments, in its list `envs`. UserError, saying what to do, if it cannot be."""
    try:
        kwargs = json.loads(args.env_kwargs)
        if not isinstance(kwargs, dict):
            raise ValueError(f"env_kwargs {args.env_kwargs} is not a JSON object")
        if args.max_episode_steps is not None:
            kwargs["max_episode_steps"] = args.max_episode_steps
        if render_mode:
            kwargs["render_mode"] = render_mode
        wrappers = [pkgutil.resolve_name(path) for path in args.wrappers]
        if args.max_episode_return is not None:
            wrappers.append(functools.partial(ReturnLimit, limit=args.max_episode_return))
        return gym.make_vec(args.env_id, num_envs, vectorization_mode="sync", wrappers=wrappers, **kwargs)
    except Exception as error:  # whatever went wrong, the library that complains knows best
        given = f" with env_kwargs {args.env_kwargs}" if args.env_kwargs != "{}" else ""
        given += f" and wrappers {' '.join(args.wrappers)}" if args.wrappers else ""
        raise UserError(f"cannot make {args.env_id}{given}: {' '.join(str(error).split())}") from None


make_envs = make_table_envs  # as evaluate and load, which all scripts share, call it


def episode_limit(args, spec=None):
    """Steps of the longest episode: the user's limit, else the environment's own, else Atari's half hour or 1,000."""
    default = 27_000 if args.env_id.startswith("ALE/") else 1_000
    return args.max_episode_steps or getattr(spec, "max_episode_steps", None) or default


# ------------------------------------------------------------------------------------------------------ the table


class QTable:
    """Q(s, a): a row for each state, a column for each action. Double Q-learning has two such tables.

    They are lists of lists: reading and writing single numbers is faster there than in NumPy arrays.
    An observation is one number or several. The range of each is cut at its `edges`, and the number of edges that lie
    at or below it is its bin: so what lies outside of all edges is in the first bin or the last.
    """

    def __init__(self, args, edges, action_space):
        self.args, self.edges, self.first_action = args, edges, int(action_space.start)
        self.bins = [len(cuts) + 1 for cuts in edges]
        self.shape = 2 if args.algorithm == "double-q" else 1, math.prod(self.bins), int(action_space.n)
        if math.prod(self.shape) > 10**7:
            raise UserError(f"{args.env_id} needs a table of over ten million numbers: a smaller grid_size, or ppo.py")
        self.tables = np.zeros(self.shape).tolist()

    def state(self, obs, step="of an evaluation"):
        """The row of an observation: its bins read as the digits of one number. UserError if it is not finite."""
        if not isinstance(obs, (np.ndarray, tuple)):  # a single integer
            return bisect(self.edges[0], obs)
        numbers = obs if isinstance(obs, tuple) else obs.ravel().tolist()
        if not math.isfinite(sum(numbers)):
            check_finite(self.args, step, observation=obs)
        row = 0
        for number, edges, bins in zip(numbers, self.edges, self.bins):
            row = row * bins + bisect(edges, number)
        return row

    def values(self, state):
        """The list of Q(state, a) of all actions; of two tables, the sum (van Hasselt 2010, algorithm 1)."""
        if len(self.tables) == 1:
            return self.tables[0][state]
        return [a + b for a, b in zip(self.tables[0][state], self.tables[1][state])]

    def act(self, obs):
        """The best actions, as the environment takes them, of a batch of observations."""
        rows = [self.values(self.state(row)) for row in (zip(*obs) if isinstance(obs, tuple) else obs)]
        return np.argmax(rows, 1) + self.first_action

    def state_dict(self):
        """The tables as an array (tables, states, actions)."""
        return {"q": np.array(self.tables)}

    def load_state_dict(self, state):
        """Copy what state_dict returned. ValueError or TypeError unless these are finite numbers of the same shape."""
        q = state["q"]
        if q.shape != self.shape or not np.isfinite(q).all():
            raise ValueError(f"these are not finite numbers of shape {self.shape}")
        self.tables = q.tolist()


def epsilon_greedy(values, epsilon, rng):
    """With probability epsilon any action, else one with the highest value; which of several, is left to chance."""
    if rng.random() < epsilon:
        return rng.randrange(len(values))
    best = max(values)
    if values.count(best) == 1:
        return values.index(best)
    return rng.choice([action for action, value in enumerate(values) if value == best])


def linear_schedule(start, end, duration, step):
    """From `start` at step 0 to `end` at step `duration`, in a straight line, and `end` from then on."""
    return end + (start - end) * max(0.0, 1 - step / duration)


def schedules(args, step, episode):
    """(epsilon, alpha): epsilon falls by a constant factor per episode, or linearly; alpha is constant, or linear."""
    total, epsilon, learning_rate = args.total_timesteps, args.epsilon_start, args.learning_rate
    if args.exploration_fraction is None:
        epsilon = max(args.epsilon_min, epsilon * args.epsilon_decay**episode)
    else:
        epsilon = linear_schedule(epsilon, args.epsilon_min, args.exploration_fraction * total, step)
    return epsilon, linear_schedule(learning_rate, 0.0, total, step) if args.anneal_lr else learning_rate


# ---------------------------------------------------------------------------------------------- the four algorithms
# What Q(S, A) should be, says the step from S by A to S' with reward R. `next_values` is the row Q(S', .) of the table;
# `discount` is gamma, but 0 if the episode terminated: then there is no future, and that row counts for nothing.


def q_learning_target(reward, discount, next_values):
    """R + gamma max_a Q(S', a): as if all actions from now on were the best ones   (Sutton & Barto, eq. 6.8)"""
    return reward + discount * max(next_values)


def sarsa_target(reward, discount, next_values, next_action):
    """R + gamma Q(S', A'): A' is the action that will really be taken, a random one at times   (eq. 6.7)"""
    return reward + discount * next_values[next_action]


def expected_sarsa_target(reward, discount, next_values, epsilon):
    """R + gamma sum_a pi(a|S') Q(S', a): the mean over A', pi being epsilon-greedy   (eq. 6.9)"""
    mean = sum(next_values) / len(next_values)
    return reward + discount * (epsilon * mean + (1 - epsilon) * max(next_values))


def double_q_target(reward, discount, next_values, other_next_values):
    """R + gamma Q2(S', argmax_a Q1(S', a)): one table chooses, the other one judges   (eq. 6.10)

    The maximum of noisy values is too high on average; what another table says of that action is not.
    """
    best = next_values.index(max(next_values))
    return reward + discount * other_next_values[best]


def play_episode(agent, env, run, rng, args):
    """Play one episode and learn from each step. Returns the sum of the absolute temporal-difference errors."""
    obs, _ = env.reset()
    state, action, total, errors = agent.state(obs, run.step), None, 0.0, 0.0
    for _ in range(episode_limit(args, env.spec)):  # CliffWalking has no limit of its own
        epsilon, learning_rate = schedules(args, run.step, len(run.episodes))
        if action is None:  # Sarsa has chosen it already
            action = epsilon_greedy(agent.values(state), epsilon, rng)
        obs, reward, terminated, truncated, _ = env.step(action + agent.first_action)
        run.step += 1
        next_state, next_action = agent.state(obs, run.step), None
        discount = 0.0 if terminated else args.gamma  # truncated: there is a future, it is only not played

        q = agent.tables[0]
        if args.algorithm == "q-learning":
            target = q_learning_target(reward, discount, q[next_state])
        elif args.algorithm == "sarsa":
            next_action = epsilon_greedy(q[next_state], epsilon, rng)
            target = sarsa_target(reward, discount, q[next_state], next_action)
        elif args.algorithm == "expected-sarsa":
            target = expected_sarsa_target(reward, discount, q[next_state], epsilon)
        else:
            q, other = agent.tables if rng.random() < 0.5 else reversed(agent.tables)  # each step improves one of them
            target = double_q_target(reward, discount, q[next_state], other[next_state])
        td_error = target - q[state][action]
        q[state][action] += learning_rate * td_error

        if not math.isfinite(td_error):
            check_finite(args, run.step, reward=reward, td_error=td_error)
        total += reward
        errors += abs(td_error)
        state, action = next_state, next_action
        if terminated or truncated:
            break
    run.episodes.append((run.step, float(total)))
    return errors


# -------------------------------------------------------------------------------------- run folder and evaluation

LOWER_PANEL = ("td_error", "epsilon")  # columns of metrics.csv that the learning curve shows as well
EVALUATION = 10_000  # added to the seed: evaluations start from other states than training does


def evaluate(agent, args, episodes=100, seed=0, render=False, video=None):
    """(mean, standard deviation) of the undiscounted return of deterministic episodes.

    Every episode has a slot of its own: to count those that finish first would favour the short ones. `render` opens a
    window; `video` is the path of an mp4 of the first slot (of Atari, which cannot render here, what the agent sees).
    """
    atari = args.env_id.startswith("ALE/")
    envs = make_envs(args, episodes, "human" if render else "rgb_array" if video and not atari else None)
    obs, _ = envs.reset(seed=seed)
    returns, playing, frames = np.zeros(episodes), np.ones(episodes, bool), []
    for _ in range(episode_limit(args, envs.spec)):
        if video:
            frames.append(np.stack([obs[0, -1]] * 3, -1) if atari else envs.render()[0])
        obs, rewards, terminated, truncated, _ = envs.step(agent.act(obs))
        returns[playing] += rewards[playing]
        playing &= ~(terminated | truncated)
        if not playing.any():
            break
    if video:
        from moviepy import ImageSequenceClip  # slow to import

        video.parent.mkdir(exist_ok=True)
        clip = ImageSequenceClip(frames, fps=envs.metadata.get("render_fps", 30))
        clip.write_videofile(str(video), logger=None)
    envs.close()
    return float(returns.mean()), float(returns.std())


def atomic_write(path, write):
    """Call write(temporary path), then rename: whoever looks finds the old file or the new one, never half of one."""
    temporary = path.with_name(f"{path.name}.tmp")
    write(temporary)
    os.replace(temporary, path)


def start_run(args):
    """Make the run folder and its config.json: all arguments, git commit, versions, machine. Returns its Path."""
    stamp = f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"  # to the microsecond: runs may begin in the same second
    name = f"{re.sub('[/:]', '-', args.env_id)}__{Path(__file__).stem}__{args.seed}__{stamp}"
    run_dir, commit = Path(args.run_dir or f"runs/{name}"), ""
    if (run_dir / "config.json").exists():
        raise UserError(f"{run_dir} holds a run already: --resume it, or choose another --run-dir")
    try:
        (run_dir / "models").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the run folder {run_dir}: {error}") from None
    with contextlib.suppress(OSError):  # no git on this machine
        git = ["git", "-C", str(Path(__file__).parent), *"describe --always --exclude=* --abbrev=40 --dirty=+".split()]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    config = {
        "args": dataclasses.asdict(args),
        "git": {"commit": commit.rstrip("+"), "dirty": commit.endswith("+")},
        "versions": {k: importlib.metadata.version(k) for k in ("torch", "gymnasium", "numpy") if k in sys.modules},
        "machine": f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores",
    }
    atomic_write(run_dir / "config.json", lambda path: path.write_text(json.dumps(config, indent=1)))
    return run_dir


def log_row(run_dir, row):
    """Append a dict of figures to metrics.csv."""
    with (run_dir / "metrics.csv").open("a") as file:
        if file.tell() == 0:
            file.write(",".join(row) + "\n")
        file.write(",".join(f"{v:.8g}" if isinstance(v, float) else str(v) for v in row.values()) + "\n")


@contextlib.contextmanager
def blame(path):
    """UserError that names the file at `path`, if something goes wrong while it is read."""
    try:
        yield
    except Exception as error:  # loading raises many kinds
        foreign = isinstance(error, pickle.UnpicklingError)  # torch would explain how to run what is in the file
        reason = type(error).__name__ if foreign else " ".join(str(error).split())[:200]
        raise UserError(f"{path} is missing, damaged, or of another script, environment or network: {reason}") from None


def check_finite(args, step, **fields):
    """UserError naming the environment, the step and the field if a value holds a NaN or an infinity."""
    for name, value in fields.items():
        if not np.isfinite(value).all():
            raise UserError(f"{args.env_id}, step {step}: {name} is NaN or infinite; earlier checkpoints are good")


def save_table(path, args, agent, **more):
    """Write an npz file: the agent's tables as the array `q`, the environment's id, and what else is given."""
    file = io.BytesIO()
    np.savez(file, env_id=args.env_id, **agent.state_dict(), **more)
    atomic_write(path, lambda path: path.write_bytes(file.getvalue()))


def read_table(path, args, agent):
    """Copy the tables in a file of `save_table` into the agent. Returns the dict of all its arrays.

    UserError unless the file is whole, of args.env_id and of a table of the same shape. Nothing in it is executed.
    """
    with blame(path), np.load(path, allow_pickle=False) as file:
        if file["env_id"] != args.env_id:
            raise ValueError(f"it is of {file['env_id']}, not of {args.env_id}")
        agent.load_state_dict(file)
        return dict(file)


def load_table(run_dir, model="best", args=None):
    """The agent that a run has left behind; `model` is best, last or a step. UserError if missing or damaged."""
    args = args or Args(evaluate=str(run_dir))  # those of the run
    envs = make_envs(args, 1)
    agent = make_agent(args, envs)
    envs.close()
    read_table(Path(run_dir, "q_table.npz" if model == "last" else f"models/{model}.npz"), args, agent)
    return agent


load = load_table  # as in all scripts


def evaluate_table(agent, args, run, run_dir):
    """Evaluate; save the table as models/STEP.npz, and as models/best.npz if none was better; film if asked to."""
    seed = args.seed + EVALUATION
    mean, std = evaluate(agent, args, args.eval_episodes, seed)
    check_finite(args, run.step, evaluation=mean)
    best = all(mean >= earlier for _, earlier, _ in run.evaluations)
    run.evaluations.append((run.step, mean, std))
    for name in [run.step, "best"] if best else [run.step]:
        save_table(run_dir / f"models/{name}.npz", args, agent)
    if args.capture_video:
        evaluate(agent, args, 1, seed, video=run_dir / f"videos/{run.step}.mp4")


def save_run(run_dir, args, run, rng, env, agent):
    """Write q_table.npz: the table, and all that --resume needs to go on.

    This is done between episodes, when an environment holds nothing but the state of its random generator.
    """
    state = vars(run) | {"rng": rng.getstate(), "env_rng": env.unwrapped.np_random.bit_generator.state}
    episodes = np.array(state.pop("episodes"), float).reshape(-1, 2)
    save_table(run_dir / "q_table.npz", args, agent, episodes=episodes, run=json.dumps(state))


def restore_run(run_dir, args, run, rng, env, agent):
    """Put everything back as it was when q_table.npz was written, and cut metrics.csv there."""
    config = read_config(run_dir / "config.json")
    if changed := [name for name in config if name not in RESUMABLE and getattr(args, name) != config[name]]:
        raise UserError(f"{', '.join(changed)} cannot change when a run is resumed")
    file = read_table(run_dir / "q_table.npz", args, agent)
    with blame(run_dir / "q_table.npz"):
        state = json.loads(str(file["run"]))
        version, numbers, gauss = state.pop("rng")
        rng.setstate((version, tuple(numbers), gauss))
        env.unwrapped.np_random.bit_generator.state = state.pop("env_rng")
        vars(run).update(state)
        run.episodes = [(int(step), total) for step, total in file["episodes"].tolist()]
    metrics = run_dir / "metrics.csv"
    if run.step == 0:  # killed before the first checkpoint after the one at the start
        metrics.unlink(missing_ok=True)
    else:
        with blame(metrics):
            header, *rows = metrics.read_text().splitlines(keepends=True)
            kept = [row for row in rows if row.endswith("\n") and int(row.split(",")[0]) <= run.step]
        atomic_write(metrics, lambda path: path.write_text("".join([header, *kept])))
    config = json.loads((run_dir / "config.json").read_text()) | {"args": dataclasses.asdict(args)}
    atomic_write(run_dir / "config.json", lambda path: path.write_text(json.dumps(config, indent=1)))


def draw_curve(run_dir, args, run):
    """Write learning_curve.png: returns of episodes, their running mean, evaluations; below, LOWER_PANEL's figures."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(9, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps, returns = np.array(run.episodes, float).reshape(-1, 2).T
    sums = np.concatenate([np.zeros(100), returns.cumsum()])
    running_mean = (sums[100:] - sums[:-100]) / np.minimum(np.arange(len(returns)) + 1, 100)
    top.plot(steps, returns, ".", color="tab:blue", alpha=0.25, markersize=3, label="training episode")
    top.plot(steps, running_mean, color="tab:blue", label="mean of the last 100")
    if run.evaluations:
        points = np.array(run.evaluations, float).T
        top.errorbar(*points, fmt="o-", color="tab:orange", capsize=3, label="evaluation, ± standard deviation")
    top.set(title=f"{args.env_id}, seed {args.seed}", ylabel="return of an episode")
    metrics = np.genfromtxt(run_dir / "metrics.csv", delimiter=",", names=True, ndmin=1)
    for name in LOWER_PANEL:
        bottom.plot(metrics["step"], metrics[name], label=name.replace("_", " "))
    scale = "symlog" if max(np.abs(np.nan_to_num(metrics[name])).max() for name in LOWER_PANEL) > 10 else "linear"
    bottom.set(xlabel="environment steps", ylabel="mean since the last log row", yscale=scale)
    bottom.xaxis.set_major_formatter("{x:,.0f}")
    for axis in (top, bottom):
        axis.legend()
        axis.grid(alpha=0.3)
    atomic_write(run_dir / "learning_curve.png", lambda path: figure.savefig(path, dpi=120, format="png"))


def finish(run_dir, args, run):
    """Draw the curve, write summary.json, print the last two lines, return the summary."""
    draw_curve(run_dir, args, run)
    step, mean, std = run.evaluations[-1]
    summary = {"eval_return_mean": mean, "eval_return_std": std, "eval_episodes": args.eval_episodes}
    summary |= {"global_step": step, "seconds": run.seconds, "steps_per_second": step / run.seconds}
    atomic_write(run_dir / "summary.json", lambda path: path.write_text(json.dumps(summary, indent=1)))
    print(f"evaluation: {mean:.1f} ± {std:.1f} over {args.eval_episodes} episodes, after {step:,} steps")
    print(f"learning curve: {run_dir / 'learning_curve.png'}   to watch it play: --evaluate {run_dir} --render")
    return summary


SIGNS = {  # what values.png shows for each action of these environments, and how to read it
    "CliffWalkingEnv": ("↑→↓←", "S: start, C: cliff, G: goal"),
    "FrozenLakeEnv": ("←↓→↑", "H: hole, G: goal"),
    "TaxiEnv": ("↓↑→←PD", "P: pick up, D: drop off"),
    "BlackjackEnv": ("SH", "S: stick, H: hit"),
}


def draw_values(run_dir, args, agent, env):
    """Write values.png: how good each state is, max_a Q(s, a), and the best action in it. Returns whether it could.

    For the grid worlds and Blackjack of Gymnasium, and for observations of two numbers. Grey: nothing learnt there.
    """
    from matplotlib.figure import Figure  # slow to import

    q, world, kind = np.array(agent.tables).mean(0), env.unwrapped, type(env.unwrapped).__name__
    values, best = np.where((q != 0).any(1), q.max(1), np.nan), q.argmax(1)
    if kind in SIGNS and (env.observation_space, env.action_space) == (world.observation_space, world.action_space):
        figure = Figure(figsize=(10, 9) if kind == "TaxiEnv" else (11, 5), layout="constrained")
        draw_panels(figure, world, values, best)
    elif len(agent.bins) == 2 and min(agent.bins) > 2:
        figure = Figure(figsize=(11, 5), layout="constrained")
        draw_surface(figure, agent, values.reshape(agent.bins), best.reshape(agent.bins))
    else:
        return False
    reading = f"   ({SIGNS[kind][1]})" if kind in SIGNS else ""
    figure.suptitle(f"{args.env_id}, {args.algorithm}: value of each state, max Q(s, a), and best action{reading}")
    atomic_write(run_dir / "values.png", lambda path: figure.savefig(path, dpi=120, format="png"))
    return True


def draw_panels(figure, world, values, best):
    """Heat maps of the values, each cell with a sign for its best action, for the environments in SIGNS."""
    kind, states = type(world).__name__, np.arange(len(values))
    signs = np.where(np.isnan(values), "", np.array([*SIGNS[kind][0]])[best])
    if kind == "CliffWalkingEnv":
        panels, signs[-11:] = {"": states.reshape(world.shape)}, [*"CCCCCCCCCCG"]
    elif kind == "FrozenLakeEnv":
        panels, letters = {"": states.reshape(world.desc.shape)}, world.desc.astype(str).ravel()
        signs = np.where(np.isin(letters, ["H", "G"]), letters, signs)
    elif kind == "TaxiEnv":
        stops, cells = ("red", "green", "yellow", "blue", "in the taxi"), states.reshape(5, 5, 5, 4)
        tasks = [(p, d) for d in range(4) for p in range(5) if p != d]
        panels = {f"{stops[p]}, to {stops[d]}": cells[:, :, p, d] for p, d in tasks}
    else:
        cells = states.reshape(32, 11, 2)[21:11:-1, 1:]  # sums of 21 down to 12; below, there is nothing to decide
        panels = {"usable ace": cells[:, :, 1], "no usable ace": cells[:, :, 0]}
    rows, (low, high) = math.ceil(len(panels) / 4), (np.nanmin(values, initial=0), np.nanmax(values, initial=0))
    axes = figure.subplots(rows, len(panels) // rows, squeeze=False)
    for axis, (title, cells) in zip(axes.flat, panels.items()):
        image = axis.imshow(values[cells], vmin=low, vmax=high)
        axis.set(title=title, xticks=[], yticks=[], facecolor="lightgrey")
        if kind == "BlackjackEnv":
            axis.set(xlabel="card of the dealer", xticks=range(10), xticklabels=["ace", *range(2, 11)])
            axis.set(ylabel="sum of the player", yticks=range(10), yticklabels=range(21, 11, -1))
        for (row, column), state in np.ndenumerate(cells):
            color = "white" if values[state] < (low + high) / 2 else "black"
            axis.text(column, row, signs[state], color=color, size=14, ha="center", va="center")
    figure.colorbar(image, ax=axes)


def draw_surface(figure, agent, values, best):
    """The values as a surface over a grid of two dimensions, and a map of the best actions."""
    from matplotlib import colormaps

    x, y = (cuts[0] + (cuts[1] - cuts[0]) * np.arange(-0.5, len(cuts)) for cuts in agent.edges)  # centres of the bins
    left, right = figure.add_subplot(121, projection="3d"), figure.add_subplot(122)
    left.plot_surface(*np.meshgrid(x, y, indexing="ij"), values, cmap="viridis", rcount=100, ccount=100)
    left.set_box_aspect((1, 1, 0.6))
    last = agent.shape[2] - 1
    best = np.where(np.isnan(values), np.nan, best)
    image = right.pcolormesh(x, y, best.T, cmap=colormaps["viridis"].resampled(last + 1), vmin=-0.5, vmax=last + 0.5)
    right.set_facecolor("lightgrey")
    figure.colorbar(image, ax=right, ticks=range(last + 1), label="best action")
    for axis in (left, right):
        axis.set(xlabel="first number of the observation", ylabel="second number")


# ------------------------------------------------------------------------------------------------------- training


def grid_edges(args, space):
    """The inner edges of `grid_size` equal bins for each number in a Box. UserError if its ends are no use."""
    lows = space.low.ravel().tolist() if args.grid_low is None else args.grid_low
    highs = space.high.ravel().tolist() if args.grid_high is None else args.grid_high
    if not len(lows) == len(highs) == math.prod(space.shape):
        counts = f"grid_low has {len(lows)} numbers, grid_high {len(highs)}, an observation {math.prod(space.shape)}"
        raise UserError(f"{args.env_id}: {counts}")
    for low, high in zip(lows, highs):
        if not -1e9 < low < high < 1e9:
            raise UserError(f"{args.env_id}: no grid from {low} to {high}: say its ends by grid_low and grid_high")
    return [np.linspace(low, high, args.grid_size + 1)[1:-1].tolist() for low, high in zip(lows, highs)]


def make_q_table(args, envs):
    """A table of zeros for these environments. UserError if they have a space that this script cannot handle."""
    observation_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(action_space, spaces.Discrete):
        raise UserError(f"{args.env_id} has {action_space}; qlearning.py needs Discrete actions: use ppo.py")
    parts = observation_space.spaces if isinstance(observation_space, spaces.Tuple) else [observation_space]
    if (args.grid_low or args.grid_high) and not isinstance(observation_space, spaces.Box):
        raise UserError(f"{args.env_id} has {observation_space}: grid_low and grid_high are for a Box")
    if isinstance(observation_space, spaces.Box):
        edges = grid_edges(args, observation_space)
    elif isinstance(observation_space, spaces.MultiDiscrete):
        first, bins = observation_space.start.ravel().tolist(), observation_space.nvec.ravel().tolist()
        edges = [list(range(a + 1, a + n)) for a, n in zip(first, bins)]
    elif all(isinstance(part, spaces.Discrete) for part in parts):
        edges = [list(range(int(part.start) + 1, int(part.start + part.n))) for part in parts]
    else:
        wanted = "Discrete, MultiDiscrete, a Tuple of Discrete, or a Box"
        raise UserError(f"{args.env_id} has observations {observation_space}; qlearning.py needs {wanted}: use ppo.py")
    return QTable(args, edges, action_space)


make_agent = make_q_table  # as in all scripts


def mean_return(run):
    """Mean return of the last 100 training episodes; NaN before the first."""
    recent = [total for _, total in run.episodes[-100:]]
    return sum(recent) / len(recent) if recent else math.nan


def is_over(args, run):
    """Whether all steps are taken, or the last evaluation is as good as --stop-at-return asks."""
    solved = args.stop_at_return is not None and run.evaluations and run.evaluations[-1][1] >= args.stop_at_return
    return bool(solved) or run.step >= args.total_timesteps


def train(args):
    """Train as `args` say. Returns the final figures, which also stand in summary.json. UserError on bad input."""
    check_args(args)
    envs = make_envs(args, 1)
    agent, env, rng = make_agent(args, envs), envs.envs[0], random.Random(args.seed)
    if args.capture_video:
        make_envs(args, 1, "rgb_array").close()  # now, rather than at the first evaluation, if it has no pictures
    env.reset(seed=args.seed)
    run = SimpleNamespace(  # all that the loop changes, besides the table and the generators
        step=0,
        seconds=0.0,
        episodes=[],  # (step, return) of each training episode
        evaluations=[],  # (step, mean, standard deviation)
    )
    run_dir = Path(args.resume) if args.resume else start_run(args)
    args.folder = run_dir  # for main, should it be interrupted
    print(f"{args.env_id} -> {run_dir};", *(f"{name}={getattr(args, name)}" for name in TUNED.get(args.env_id, ())))
    if args.resume:
        restore_run(run_dir, args, run, rng, env, agent)
    else:
        save_run(run_dir, args, run, rng, env, agent)
    begun, drawn = time.time() - run.seconds, time.time()
    eval_every = args.eval_every or math.ceil(args.total_timesteps / 10)
    checkpoint_every = args.checkpoint_every or math.ceil(args.total_timesteps / 20)
    log_every = min(eval_every, checkpoint_every, math.ceil(args.total_timesteps / 200))
    total, quiet = args.total_timesteps, not args.progress
    with tqdm(total=total, initial=run.step, unit=" steps", unit_scale=True, disable=quiet) as bar:
        while not is_over(args, run):
            first_step, errors = run.step, 0.0
            while run.step < min(total, (first_step // log_every + 1) * log_every):
                errors += play_episode(agent, env, run, rng, args)

            run.seconds = time.time() - begun
            finished, return_mean = run.step >= args.total_timesteps, mean_return(run)
            row = {"step": run.step, "seconds": run.seconds, "sps": run.step / run.seconds, "return_mean": return_mean}
            epsilon, learning_rate = schedules(args, run.step, len(run.episodes))
            row |= {"episodes": len(run.episodes), "epsilon": epsilon, "learning_rate": learning_rate}
            log_row(run_dir, row | {"td_error": errors / (run.step - first_step)})
            bar.update(run.step - first_step)
            bar.set_postfix_str(f"mean return {return_mean:.1f}", refresh=finished)
            if finished or run.step // eval_every > first_step // eval_every:
                evaluate_table(agent, args, run, run_dir)
            if is_over(args, run) or run.step // checkpoint_every > first_step // checkpoint_every:
                save_run(run_dir, args, run, rng, env, agent)
            if time.time() - drawn > 30:
                draw_curve(run_dir, args, run)
                draw_values(run_dir, args, agent, env)
                drawn = time.time()
    envs.close()
    if not run.evaluations:  # resumed with fewer steps than it had taken
        evaluate_table(agent, args, run, run_dir)
    if draw_values(run_dir, args, agent, env):
        print(f"values and best actions: {run_dir / 'values.png'}")
    return finish(run_dir, args, run)


def main():
    """Train, or evaluate, as the flags say. What the user can mend is one line on stderr and exit code 2."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("env_id", "config", "resume", "evaluate"):  # the defaults of all other flags depend on these
        first.add_argument(f"--{name.replace('_', '-')}", f"--{name}", nargs="?")
    complaint, args = io.StringIO(), None
    sys.stdout.reconfigure(errors="replace")  # a terminal without a ± gets a ?
    try:
        with contextlib.redirect_stderr(complaint):
            defaults = Args(**{k: v for k, v in vars(first.parse_known_args()[0]).items() if v is not None})
            check_args(defaults)
            args = tyro.cli(Args, default=defaults, description=__doc__)
        if not args.evaluate:
            train(args)
            return
        check_args(args)
        agent, seed = load(args.evaluate, args.model, args), args.seed + EVALUATION
        mean, std = evaluate(agent, args, args.eval_episodes, seed)
        print(f"{args.model} table: {mean:.2f} ± {std:.2f} over {args.eval_episodes} episodes of {args.env_id}")
        if args.capture_video:
            evaluate(agent, args, 1, seed, video=Path(args.evaluate, f"videos/{args.model}.mp4"))
        if args.render:
            evaluate(agent, args, 1, seed, render=True)
    except UserError as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit:  # tyro has drawn its complaint, if there is one, in a box below a title: keep the words
        text = re.sub(r"\x1b\[[\d;]*m", "", complaint.getvalue())
        lines = [re.sub("^-+$", "", line.strip("│╭╮╰╯─ ")) for line in text.splitlines()]
        words = itertools.takewhile(bool, itertools.dropwhile(lambda line: not line, lines[1:]))
        sys.stderr.write(" ".join(words) + "\n" * bool(lines))
        raise
    except KeyboardInterrupt:
        print(f"\nstopped; to go on: --resume {getattr(args, 'folder', 'RUN_DIR')}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
