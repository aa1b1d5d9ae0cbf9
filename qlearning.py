# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2", "tyro==1.0.17",
#   "tqdm==4.70.1", "moviepy==2.2.1",
# ]
# ///
"""Q-learning with a table, and its relatives Sarsa, expected Sarsa and double Q-learning, all in this one file.

The table holds a number Q(s, a) for every state s and action a: the discounted return to expect if a is taken in s and
only best actions follow. Play: mostly take the best action of the table, sometimes a random one. After each step (in
state S, action A gave reward R and led to S'), move Q(S, A) a little towards its target R + gamma max_a Q(S', a):

    Q(S, A) <- Q(S, A) + alpha [R + gamma max_a Q(S', a) - Q(S, A)]     (Sutton & Barto, eq. 6.8)

Its relatives replace max_a Q(S', a) by something else, and double Q-learning has two tables. Sarsa and expected Sarsa
learn the return of what is really played, random actions included. There is no neural network: a table and a loop.

    python qlearning.py                                          # CliffWalking-v1, a few seconds; see its values.png
    python qlearning.py --algorithm sarsa --epsilon-min 0.1      # learns the path away from the cliff
    python qlearning.py --env-id MountainCar-v0                  # continuous observations, cut into a grid

Sources: Sutton & Barto, Reinforcement Learning, 2nd edition 2018, chapter 6 (incompleteideas.net/book); Q-learning doi
10.1007/BF00992698, expected Sarsa doi 10.1109/ADPRL.2009.4927542, double Q-learning van Hasselt, NeurIPS 2010.
The story ends at "# ===== helpers"; the code below it makes environments, keeps the run folder and draws pictures.
"""

import json
import math
import os
import pkgutil
import random
import re
import shlex
import subprocess
import sys
import time
from bisect import bisect
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import tyro
from gymnasium import spaces
from tqdm import tqdm


@dataclass(kw_only=True)
class Args:
    """Every flag and its default. For some environments, CliffWalking included, TUNED (below) overrides these."""

    # algorithm
    algorithm: Literal["q-learning", "sarsa", "expected-sarsa", "double-q"] = "q-learning"  # how to update the table
    learning_rate: float = 0.1  # alpha: an entry of the table moves this share of the way to its target
    anneal_lr: bool = False  # lower the learning rate linearly to zero
    gamma: float = 0.99  # discount
    epsilon_start: float = 1.0  # probability of a random action (epsilon) at the beginning
    epsilon_min: float = 0.05  # epsilon falls to this and no further
    epsilon_decay: float = 0.99  # epsilon is multiplied by this after each episode
    exploration_fraction: float | None = None  # if given: epsilon falls linearly over this share of the run instead
    grid_size: int = 20  # Box observations: number of bins in each dimension
    grid_low: tuple[float, ...] | None = None  # lower end of the grid, a number per dimension; None: the space's bounds
    grid_high: tuple[float, ...] | None = None  # upper end; numbers outside the grid go to the nearest bin
    # run
    env_id: str = "CliffWalking-v1"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers, applied in order
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    total_timesteps: int = 500_000  # environment steps to train for; the episode that reaches them is played to its end
    stop_at_return: float | None = None  # stop once the mean return of an evaluation reaches this
    seed: int = 1  # seed of everything that is drawn at random
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, on separate environments, with the best actions of the table
    capture_video: bool = False  # film an episode at each evaluation
    checkpoint_every: int = 0  # steps between checkpoints, written between episodes; 0: mostly a tenth of a run
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # table that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window; with --capture-video, film it instead
    config: str | None = None  # config.json of an earlier run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__SCRIPT__SEED__TIME
    progress: bool = True  # show the progress bar


# ------------------------------------------------------------------------------------------------------ the table
class QTable:
    """Q(s, a): a row for each state, a column for each action. Double Q-learning has two such tables.

    They are lists of lists, where reading and writing single numbers is faster than in NumPy arrays. All begin at 0: if
    rewards are negative, actions not yet tried look best. An observation is one number or several, each with its own
    `edges`. A number's bin is how many of its edges are at or below it. So numbers below all edges are in bin 0, and
    integers 0 … n - 1, whose edges are 1 … n - 1, have a bin each.
    """

    def __init__(self, edges, action_space, num_tables=1):
        self.edges = [list(cuts) for cuts in edges]
        self.bins = [len(cuts) + 1 for cuts in edges]
        self.first_action = int(action_space.start)
        self.shape = (num_tables, math.prod(self.bins), int(action_space.n))
        self.tables = np.zeros(self.shape).tolist()

    def state(self, obs, run=None):
        """The number of an observation's row, 0 to prod(bins) - 1. With `run`, UserError if an array holds a NaN."""
        if not isinstance(obs, np.ndarray | tuple):  # an integer, of a Discrete space
            return bisect(self.edges[0], obs)
        numbers = obs if isinstance(obs, tuple) else obs.ravel().tolist()
        if run and not math.isfinite(sum(numbers)):
            run.check_finite(observation=obs)
        row = 0
        for number, cuts, num_bins in zip(numbers, self.edges, self.bins):
            row = row * num_bins + bisect(cuts, number)
        return row

    def values(self, state):
        """Q(state, a) of all actions, as a list; with two tables, their sum (Sutton & Barto, section 6.7)."""
        if len(self.tables) == 1:
            return self.tables[0][state]
        return [a + b for a, b in zip(self.tables[0][state], self.tables[1][state])]

    def act(self, obs):
        """The best action (the first of equal ones) for each observation of a batch, as the environment numbers it."""
        batch = zip(*obs) if isinstance(obs, tuple) else obs  # a Tuple space gives a tuple of arrays
        values = [self.values(self.state(one)) for one in batch]
        return np.argmax(values, axis=1) + self.first_action

    def state_dict(self):
        """The tables as an array (tables, states, actions)."""
        return {"q": np.array(self.tables)}

    def load_state_dict(self, state):
        """Take the tables from what state_dict returned. ValueError unless they are finite and of this shape."""
        q = np.asarray(state["q"], float)
        if q.shape != self.shape or not np.isfinite(q).all():
            raise ValueError(f"these are not finite numbers of shape {self.shape}")
        self.tables = q.tolist()


def epsilon_greedy(values, epsilon, rng):
    """With probability epsilon a random action, else one with the highest value; ties are broken at random."""
    if rng.random() < epsilon:
        return rng.randrange(len(values))
    best = max(values)
    if values.count(best) == 1:
        return values.index(best)
    return rng.choice([action for action, value in enumerate(values) if value == best])


def schedules(args, step, episode):
    """(epsilon, alpha). Epsilon falls by a factor per episode, or linearly; alpha is constant, or falls linearly."""
    if args.exploration_fraction is None:
        epsilon = max(args.epsilon_min, args.epsilon_start * args.epsilon_decay**episode)
    else:
        duration = args.exploration_fraction * args.total_timesteps
        epsilon = linear_schedule(args.epsilon_start, args.epsilon_min, duration, step)
    if args.anneal_lr:
        return epsilon, linear_schedule(args.learning_rate, 0.0, args.total_timesteps, step)
    return epsilon, args.learning_rate


def linear_schedule(start, end, duration, step):
    """From `start` at step 0 to `end` at step `duration`, in a straight line, and `end` from then on."""
    return end + (start - end) * max(0.0, 1 - step / duration)


# ---------------------------------------------------------------------------------------------- the four algorithms
# The target of a step S, A, R, S': what Q(S, A) should become. `next_values` is the row Q(S', .) of the table that is
# updated. `discount` is gamma, or 0 if the episode terminated: then there is no future, and that row has no effect.


def q_learning_target(reward, discount, next_values):
    """R + gamma max_a Q(S', a): as if only best actions were to follow   (Sutton & Barto, eq. 6.8)"""
    return reward + discount * max(next_values)


def sarsa_target(reward, discount, next_values, next_action):
    """R + gamma Q(S', A'): A' is the action really taken next, sometimes a random one   (eq. 6.7)"""
    return reward + discount * next_values[next_action]


def expected_sarsa_target(reward, discount, next_values, epsilon):
    """R + gamma sum_a pi(a|S') Q(S', a): the mean over A', drawn from the epsilon-greedy policy pi   (eq. 6.9)"""
    average = sum(next_values) / len(next_values)
    return reward + discount * (epsilon * average + (1 - epsilon) * max(next_values))


def double_q_target(reward, discount, next_values, other_next_values):
    """R + gamma Q2(S', argmax_a Q1(S', a)): Q1 chooses the action, Q2 says what it is worth   (eq. 6.10)

    A maximum of noisy values is too high on average. Q2 has other noise, so its value of Q1's choice is not too high.
    """
    best = next_values.index(max(next_values))  # of equal ones the first
    return reward + discount * other_next_values[best]


def play_episode(agent, env, run, rng, args):
    """Play one episode in `env` and learn from each step; count steps in run.step, add the episode to run.episodes."""
    obs, _ = env.reset()
    state = agent.state(obs, run)
    action = None
    total = 0.0
    for _ in range(args.max_episode_steps or 27_000):  # 27_000 as in `evaluate`; then the episode is truncated
        epsilon, learning_rate = schedules(args, run.step, len(run.episodes))
        if action is None:  # else Sarsa has chosen it already
            action = epsilon_greedy(agent.values(state), epsilon, rng)
        obs, reward, terminated, truncated, _ = env.step(action + agent.first_action)
        reward = float(reward)  # else the table would hold np.float32, but Python floats after --resume: results differ
        run.step += 1
        next_state = agent.state(obs, run)
        next_action = None  # None: chosen after the update; only Sarsa needs it before
        discount = 0.0 if terminated else args.gamma  # truncated: S' still has a value

        # Q(S, A) is q[state][action], Q(S', .) is q[next_state]. The four algorithms differ only in the target.
        q = agent.tables[0]  # the table to update; double-q picks one of its two below
        if args.algorithm == "q-learning":
            target = q_learning_target(reward, discount, q[next_state])
        elif args.algorithm == "sarsa":
            next_action = epsilon_greedy(q[next_state], epsilon, rng)  # A', the action of the next step
            target = sarsa_target(reward, discount, q[next_state], next_action)
        elif args.algorithm == "expected-sarsa":
            target = expected_sarsa_target(reward, discount, q[next_state], epsilon)
        else:  # double-q: a coin decides which table is updated (Q1), and which helps (Q2)
            q, other = agent.tables if rng.random() < 0.5 else reversed(agent.tables)
            target = double_q_target(reward, discount, q[next_state], other[next_state])
        td_error = target - q[state][action]
        q[state][action] += learning_rate * td_error  # the update, the same for all four

        if not math.isfinite(td_error):
            run.check_finite(reward=reward, td_error=td_error)
        run.log(td_error=abs(td_error))  # metrics.csv has means over many steps
        total += reward
        state = next_state
        action = next_action
        if terminated or truncated:
            break
    run.log(epsilon=epsilon, learning_rate=learning_rate)
    run.episodes.append((run.step, total))


# ------------------------------------------------------------------------------------------------------- training
def train(args):
    """Train with `args`; return the summary, a dict that summary.json holds as well. UserError on bad input."""
    envs = make_envs(args, 1)
    agent = make_agent(args, envs)
    run = Run(args, agent, envs)  # with --resume, it loads a checkpoint

    while not run.is_finished():
        if run.step == run.checkpoint_step:  # at the start and at each checkpoint, so that a resumed run does the same
            envs, _, generator = run.new_envs()
            env = envs.envs[0]  # one environment is stepped directly, which is faster than through a vector of one
            rng = random.Random(int(generator.integers(2**63)))  # draws single numbers faster than NumPy's generator
        play_episode(agent, env, run, rng, args)  # advances run.step
        run.write_what_is_due()  # a row of metrics.csv, an evaluation, a checkpoint
    draw_values(run.dir, args, agent, envs.envs[0])
    return run.finish()


# ===== helpers: settings, environments, the grid, files, pictures =====================================================

RANGES = dict.fromkeys("learning_rate gamma epsilon_start epsilon_min epsilon_decay".split(), (0, 1))
RANGES |= {"exploration_fraction": (1e-6, 1), "grid_size": (1, 1e6), "grid_low": (-1e9, 1e9), "grid_high": (-1e9, 1e9)}
RANGES |= dict.fromkeys("total_timesteps max_episode_steps eval_episodes".split(), (1, 1e15))
RANGES |= dict.fromkeys(["stop_at_return", "max_episode_return"], (-1e15, 1e15))
CURVE = {"td_error": "mean size of the TD error", "epsilon": "share of random actions"}  # panels of the curve
EXPLORES = True  # training takes random actions as well: only an evaluation says how good the table is
SAFE_IDS = r"[^:]*"  # ids that a stranger's config.json may ask for: module:Id would import the module
SUFFIX = ".npz"  # of models and checkpoints

# Tuned settings per environment; flags win over them. A run ends with the episode that reaches its total.
TUNED = {
    "CliffWalking-v1": {"total_timesteps": 50_000, "learning_rate": 0.5, "anneal_lr": True, "gamma": 1.0,
                        "max_episode_steps": 1000},
    "Taxi-v4": {"total_timesteps": 300_000, "learning_rate": 0.5, "anneal_lr": True, "epsilon_min": 0.1},
    "FrozenLake-v1": {"total_timesteps": 300_000, "anneal_lr": True, "epsilon_min": 0.3},
    "Blackjack-v1": {"total_timesteps": 500_000, "learning_rate": 0.02, "anneal_lr": True, "gamma": 1.0,
                     "epsilon_min": 0.3},
    "MountainCar-v0": {"total_timesteps": 1_500_000, "learning_rate": 0.3, "anneal_lr": True, "epsilon_min": 0.0,
                       "grid_size": 40},
}  # fmt: skip
tuned_settings = lambda args: TUNED.get(args.env_id, {})  # as the run section calls it


def write_state(state, file):
    """Write the table as the array `q`, and all else as JSON, to an open file."""
    rest = {name: value for name, value in state.items() if name != "agent"}
    np.savez(file, q=state["agent"]["q"], rest=json.dumps(rest))


def read_state(path):
    """What write_state wrote. Nothing in the file is executed."""
    with np.load(path, allow_pickle=False) as file:
        return json.loads(str(file["rest"])) | {"agent": {"q": file["q"]}}


class ReturnLimit(gym.wrappers.RecordEpisodeStatistics):
    """Truncate an episode once its return reaches `limit`."""

    def __init__(self, env, limit):
        super().__init__(env)
        self.limit = limit

    def step(self, action):
        """As the environment's, truncated at the limit."""
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated or self.episode_returns >= self.limit, info


def make_table_envs(args, num_envs, render=False, video=None):
    """A vector environment; `envs` lists its single ones. If asked, in a window or filmed. UserError if it fails."""
    try:
        kwargs = dict(**json.loads(args.env_kwargs))
        wrappers = [globals().get(path) or pkgutil.resolve_name(path) for path in args.wrappers]
        if args.max_episode_steps is not None:
            kwargs["max_episode_steps"] = args.max_episode_steps
        if args.max_episode_return is not None:
            wrappers.append(partial(ReturnLimit, limit=args.max_episode_return))
        if render or video:
            kwargs["render_mode"] = "rgb_array" if video else "human"
        if video:
            wrappers.append(partial(gym.wrappers.RecordVideo, video_folder=str(video)))
        return gym.make_vec(args.env_id, num_envs, vectorization_mode="sync", wrappers=wrappers, **kwargs)
    except (ImportError, AttributeError, TypeError, ValueError, LookupError, AssertionError) as error:
        raise UserError(f"cannot make {args.env_id} with env_kwargs {args.env_kwargs}: {error}") from error


def box_edges(args, space):
    """The inner edges of `grid_size` equal bins for each number in a Box. UserError without finite ends for each."""
    lows = space.low.ravel().tolist() if args.grid_low is None else args.grid_low
    highs = space.high.ravel().tolist() if args.grid_high is None else args.grid_high
    if not len(lows) == len(highs) == math.prod(space.shape):
        raise UserError(f"{args.env_id}: grid_low and grid_high need a number for each of {space}")
    edges = []
    for low, high in zip(lows, highs):
        if not -1e9 < low < high < 1e9:
            raise UserError(f"{args.env_id}: no grid from {low} to {high}: say its ends by grid_low and grid_high")
        edges.append(np.linspace(low, high, args.grid_size + 1)[1:-1].tolist())
    return edges


def make_q_table(args, envs):
    """A table of zeros for these environments. UserError if a space does not suit, or the table is too large."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    parts = obs_space.spaces if isinstance(obs_space, spaces.Tuple) else [obs_space]
    if not isinstance(action_space, spaces.Discrete):
        raise UserError(f"{args.env_id} has {action_space}; qlearning.py needs Discrete actions: use ppo.py")
    if isinstance(obs_space, spaces.Box):
        edges = box_edges(args, obs_space)
    elif isinstance(obs_space, spaces.MultiDiscrete):
        sizes = zip(obs_space.start.ravel(), obs_space.nvec.ravel())
        edges = [range(start + 1, start + n) for start, n in sizes]  # n - 1 edges: n bins, one for each integer
    elif all(isinstance(part, spaces.Discrete) for part in parts):
        edges = [range(part.start + 1, part.start + part.n) for part in parts]
    else:
        wanted = "Discrete, MultiDiscrete, a Tuple of Discrete, or a Box"
        raise UserError(f"{args.env_id} has observations {obs_space}; qlearning.py needs {wanted}: use ppo.py")
    num_tables = 2 if args.algorithm == "double-q" else 1
    if num_tables * math.prod(len(cuts) + 1 for cuts in edges) * int(action_space.n) > 10**7:
        raise UserError(f"{args.env_id} needs a table of over ten million numbers: a smaller grid_size, or ppo.py")
    agent = QTable(edges, action_space, num_tables)
    agent.args = args  # for evaluate(agent, agent.args) in a notebook
    return agent


make_envs = make_table_envs  # as the run section calls it
make_agent = make_q_table  # as the run section calls it


SIGNS = {"CliffWalkingEnv": "↑→↓←", "FrozenLakeEnv": "←↓→↑"}  # arrows for the actions 0, 1, 2, 3 of grid worlds


def draw_values(folder, args, agent, env):
    """Write values.png and print its path. It shows the value of each state, max_a Q(s, a), and the best action there.

    Only for the grid worlds of SIGNS, and for observations of two numbers. Grey: all values of the state are still 0.
    """
    from matplotlib.figure import Figure  # slow to import

    world = env.unwrapped
    q = np.array(agent.tables).mean(0)
    values = np.where((q != 0).any(1), q.max(1), np.nan)
    figure = Figure(figsize=(11, 5), layout="constrained")
    if type(world).__name__ in SIGNS and env.observation_space == world.observation_space:
        draw_world(figure, world, values, q.argmax(1))
    elif len(agent.bins) == 2 and min(agent.bins) > 2:
        draw_grid(figure, agent, values, q.argmax(1))
    else:
        return
    figure.suptitle(f"{args.env_id}, {args.algorithm}: value of each state, and the best action in it")
    path = Path(folder, "values.png")
    write_file(path, partial(figure.savefig, dpi=120, format="png"))
    tqdm.write(f"values and best actions: {path}")  # above the progress bar


def draw_world(figure, world, values, best):
    """A heat map of a grid world; in each cell the arrow of its best action."""
    shape = world.desc.shape if hasattr(world, "desc") else world.shape
    axis = figure.add_subplot(xticks=[], yticks=[], facecolor="lightgrey")
    image = axis.imshow(values.reshape(shape))
    figure.colorbar(image, label="max Q(s, a)")
    for state in np.flatnonzero(~np.isnan(values)):
        row, column = divmod(state, shape[1])
        sign = SIGNS[type(world).__name__][best[state]]
        axis.text(column, row, sign, size=14, ha="center", va="center", backgroundcolor="white")


def draw_grid(figure, agent, values, best):
    """Maps of the values and of the best actions, for two numbers. All bins of a number have the same width."""
    x, y = ([2 * edges[0] - edges[1], *edges, 2 * edges[-1] - edges[-2]] for edges in agent.edges)
    best = np.where(np.isnan(values), np.nan, best)
    panels = (values, "max Q(s, a)", None), (best, "best action", range(agent.shape[2]))
    for axis, (numbers, label, ticks) in zip(figure.subplots(1, 2), panels):
        image = axis.pcolormesh(x, y, numbers.reshape(agent.bins).T)
        figure.colorbar(image, ax=axis, label=label, ticks=ticks)
        axis.set(xlabel="first number of the observation", ylabel="second number", facecolor="lightgrey")


# ===== run: the same in every script ==============================================================
# What it knows of the script: Args, CURVE, EXPLORES, SCHEDULED, SAFE_IDS, SUFFIX; tuned_settings,
# make_envs, make_agent (whose agent can act), train, manual_seed, write_state and read_state.
UserError = gym.error.Error  # what was mistyped; Gymnasium raises it for ids that do not exist
ONLY_FLAGS = "resume evaluate model render capture_video config run_dir".split()  # not in config.json
FREE = "stop_at_return eval_every eval_episodes device progress total_timesteps".split()  # at --resume


def tuned(*flags, **given):
    """Args from flags or keywords; the rest from a run (to resume, to evaluate, `config`) or TUNED."""
    flags = [f"{float(flag):.0f}" if re.fullmatch(r"[\d.]+e\d+", flag) else flag for flag in flags]  # 1e6
    # The flags are parsed twice: the first time tells where the defaults of the second come from.
    first = tyro.cli(Args, args=[flag for flag in flags if flag not in ("-h", "--help")])
    first = replace(first, **given)
    first = replace(first, env_id=full_id(first.env_id))
    run_dir = first.resume or first.evaluate
    path = f"{run_dir}/config.json" if run_dir else first.config
    defaults = read_config(path, first) if path else replace(Args(), **tuned_settings(first))
    args = checked(replace(defaults, **given), flags)
    args = replace(args, env_id=full_id(args.env_id))
    fixed = [name for name in vars(args) if name not in ONLY_FLAGS + FREE]
    if any(getattr(defaults, name) for name in SCHEDULED):
        fixed.append("total_timesteps")
    for name in fixed if args.resume else []:
        if getattr(args, name) != getattr(defaults, name):
            kept = getattr(defaults, name)
            raise UserError(f"{name} changes how a run learns: a resumed run keeps {kept}")
    return args


def full_id(env_id):
    """CartPole-v1 for CartPole: the highest version, if none is given."""
    ids = [known for known in gym.registry if re.fullmatch(re.escape(env_id) + r"-v\d+", known)]
    return max(ids, key=lambda known: int(known.rpartition("-v")[2]), default=env_id)


def checked(defaults, flags=()):
    """Args from flags, else from `defaults`, whose values must be of the types that Args says."""
    try:
        with warnings.catch_warnings(action="error", category=UserWarning):  # tyro warns of wrong types
            return tyro.cli(Args, args=flags, default=defaults, description=__doc__)
    except UserWarning as error:
        raise UserError(str(error).split(" We'll try")[0]) from error


def code_flags(args):
    """The flags that a config.json must not decide alone, since they can run any code; mostly none."""
    own_kwargs = "{}", tuned_settings(args).get("env_kwargs")
    if re.fullmatch(SAFE_IDS, args.env_id) and args.env_kwargs in own_kwargs and not args.wrappers:
        return []
    return ["--env-id", args.env_id, "--env-kwargs", args.env_kwargs, "--wrappers", *args.wrappers]


def read_config(path, given):
    """Args from the config.json of a run. If it is a stranger's, its code must be `given` as well."""
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        saved = {name: tuple(x) if isinstance(x, list) else x for name, x in config["args"].items()}
        if config["script"] != Path(__file__).stem:
            raise ValueError
        args = checked(Args(**saved | {name: getattr(given, name) for name in ONLY_FLAGS}))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is missing, damaged or not from {Path(__file__).name}") from error
    code = code_flags(args)
    if code and code != code_flags(given):
        raise UserError(f"{path} may execute anything; if you trust it, add {shlex.join(code)}")
    return args


def load(run_dir, model="best", *flags, **given):
    """The agent saved by a run, with its settings as agent.args; `model` is best, last or a step."""
    args = tuned(*flags, **{"evaluate": str(run_dir), "model": str(model)} | given)
    envs = make_envs(args, 1)
    agent = make_agent(args, envs)
    envs.close()
    name = "checkpoint" if args.model == "last" else f"models/{args.model}"
    read_parts(f"{run_dir}/{name}{SUFFIX}", {"agent": agent})
    return agent


def evaluate(agent, args, episodes=100, seed=0, render=False, video=None):
    """(mean, standard deviation) of the returns of `episodes` episodes; if asked, shown or filmed."""
    if episodes < 1:
        raise ValueError("an evaluation needs at least one episode")
    envs = make_envs(args, episodes, render, video)  # one each: else short episodes count too often
    obs, _ = envs.reset(seed=seed)
    if hasattr(agent, "begin_episodes"):  # a recurrent network forgets what it has seen
        agent.begin_episodes(episodes)
    returns = np.zeros(episodes)
    playing = np.ones(episodes, bool)
    for _ in range(args.max_episode_steps or 27_000):  # for what never ends: half an hour of Atari
        obs, rewards, terminated, truncated, _ = envs.step(agent.act(obs))
        returns[playing] = true_returns(envs, args, returns + rewards)[playing]
        playing &= ~(terminated | truncated)
        if not playing.any():
            break
    envs.close()
    return float(returns.mean()), float(returns.std())


def true_returns(envs, args, returns):
    """Returns (N,) of the episodes under way, before the user's wrappers changed their rewards."""
    return np.array(envs.unwrapped.get_attr("true_return")) if args.wrappers else returns


def write_file(path, write):
    """Call write(file), then rename the file to `path`: no reader finds a half-written one."""
    temporary = Path(f"{path}.{os.getpid()}.tmp")  # no other process writes to this one
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            write(file)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # on a full disk, torch raises a RuntimeError
        raise UserError(f"cannot write {path}: {error}") from error


def write_csv(path, table):
    """Write a table, a dict of columns."""
    rows = np.transpose(list(table.values()))
    head = ",".join(table)
    write_file(path, lambda file: np.savetxt(file, rows, "%.10g", ",", header=head, comments=""))


def read_parts(path, parts):
    """Give each of `parts`, a dict of objects with load_state_dict, its state from a file."""
    try:
        state = read_state(path)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except Exception as error:  # there is no list of what a damaged or foreign file may raise
        kind = type(error).__name__
        raise UserError(f"{path} is missing, damaged or of another network: {kind}") from error


class Run:
    """All that a run keeps besides what it learns: folder, counts, evaluations, checkpoints, curve."""

    def __init__(self, args, envs):
        self.args = args
        self.envs = envs
        self.step = 0  # environment steps, without reset rows
        self.seconds = 0.0
        self.num_episodes = 0
        self.recent = []  # returns of the last 100 training episodes
        self.stride = 1  # the table has each stride-th episode, so that it never grows beyond 10,000
        self.episodes = {"step": [], "return": [], "length": []}
        self.metrics = {"step": []}  # other columns begin when they are first logged
        self.evaluations = {"step": [], "seconds": [], "return_mean": [], "return_std": []}
        self.saved = list(vars(self))[2:]  # what a checkpoint holds: all from step on
        self.logged = {}  # since the last row of metrics.csv
        self.checkpoint_step = 0  # of the last checkpoint
        self.eval_every = args.eval_every or math.ceil(args.total_timesteps / 10)
        tenth = min(args.total_timesteps // 10, 50_000)
        self.checkpoint_every = args.checkpoint_every or max(tenth, 5_000 * envs.num_envs)
        name = f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
        self.dir = Path(args.resume or args.run_dir or f"runs/{re.sub('[/:]', '-', name)}")
        if (self.dir / "config.json").exists() and not args.resume:
            raise UserError(f"{self.dir} holds a run already: --resume it, or choose another --run-dir")
        if args.capture_video:  # what cannot be filmed is refused at once
            make_envs(args, 1, video=self.dir / "videos").close()
        for rest in self.dir.rglob("*.[0-9]*.tmp") if args.resume else ():  # of a killed process
            rest.unlink()
        command = {"shell": True, "cwd": Path(__file__).parent, "capture_output": True}
        commit = subprocess.run("git describe --always --dirty", **command).stdout.decode().strip()
        packages = [name for name in ("torch", "gymnasium", "numpy") if name in sys.modules]
        config = {"script": Path(__file__).stem, "args": asdict(args), "commit": commit}
        config["versions"] = {name: version(name) for name in packages}
        write_file(self.dir / "config.json", lambda file: file.write(json.dumps(config).encode()))

    def start(self, agent, **parts):
        """Start with `agent` and whatever else a checkpoint must hold. --resume loads their states."""
        self.agent = agent
        self.parts = {"run": self, "agent": agent, **parts}
        if (self.dir / f"checkpoint{SUFFIX}").exists():
            read_parts(self.dir / f"checkpoint{SUFFIX}", self.parts)
        total = self.args.total_timesteps
        known = tuned_settings(self.args)
        given = {name: x for name, x in vars(self.args).items() if x != known.get(name, getattr(Args(), name))}
        print(f"{self.args.env_id} -> {self.dir}\ntuned: {known}\ngiven: {given}")
        if self.args.resume:
            print("finished" if self.step >= total else f"goes on from step {self.step:,} of {total:,}")
        self.begun = time.monotonic() - self.seconds
        self.bar = tqdm(total=total, initial=self.step, unit=" steps", disable=not self.args.progress)

    def state_dict(self):
        """What a checkpoint holds of the run itself."""
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state):
        """Take over what state_dict returned. TypeError or ValueError where it is damaged."""
        for name in self.saved:
            if type(state[name]) is not type(getattr(self, name)):
                raise TypeError(name)
            if isinstance(state[name], dict):  # a table: numbers, in columns of equal length
                np.array([state[name]["step"], *state[name].values()], float)
        vars(self).update({name: state[name] for name in self.saved})
        self.checkpoint_step = self.step

    def remaining(self):
        """The share of the steps that is left, from 1 down to 0."""
        return max(0.0, 1 - self.step / self.args.total_timesteps)

    def new_envs(self):
        """(environments, observations, dones, a NumPy generator), all new, seeded by (seed, step)."""
        self.envs.close()  # a reset is not enough: Box2D's environments keep traces of old episodes
        self.envs = make_envs(self.args, self.envs.num_envs)
        rng = np.random.default_rng([self.args.seed, self.step])
        obs, _ = self.envs.reset(seed=int(rng.integers(2**31)))
        manual_seed(int(rng.integers(2**31)))
        self.check_finite(observation=obs)
        self.returns = np.zeros(self.envs.num_envs)  # of the episodes under way
        self.lengths = np.zeros(self.envs.num_envs, int)
        self.has_ended = np.zeros(self.envs.num_envs, bool)  # whether an episode has, since now
        return self.envs, obs, np.zeros(self.envs.num_envs, bool), rng

    def count(self, obs, rewards, dones, reset_rows):
        """Count a step of all environments, arrays (N, …). UserError on NaN or infinity."""
        self.check_finite(observation=obs, reward=rewards)
        self.step += int((~reset_rows).sum())
        self.returns += rewards
        self.lengths += ~reset_rows
        if dones.any():
            returns = true_returns(self.envs, self.args, self.returns)
            for n in np.flatnonzero(dones):
                self.add_episode(n, float(returns[n]), int(self.lengths[n]))
            self.returns[dones] = 0
            self.lengths[dones] = 0

    def add_episode(self, n, total, length):
        """Count an episode that has ended in environment n."""
        self.has_ended[n] = True
        self.num_episodes += 1
        self.recent = [*self.recent[-99:], total]
        if self.num_episodes % self.stride == 0:
            for column, value in zip(self.episodes.values(), (self.step, total, length)):
                column.append(value)
        if len(self.episodes["step"]) == 10_000:
            self.stride *= 2
            self.episodes = {name: column[1::2] for name, column in self.episodes.items()}

    def check_finite(self, **values):
        """UserError naming environment, step and field if a value is NaN, or too large for float32."""
        for name, value in values.items():
            if not np.all(np.abs(value) < 3.4e38):
                where = f"{self.args.env_id}, after step {self.step}"
                raise UserError(f"{where}: {name} is NaN or infinite")

    def log(self, **metrics):
        """Collect numbers, or tensors of one number; a row of metrics.csv holds their means."""
        for name, value in metrics.items():
            if getattr(value, "shape", ()) not in ((), (1,)):
                raise ValueError(f"the metric {name} is not one number: {value}")
            self.logged.setdefault(name, []).append(value)

    def is_finished(self):
        """Whether all steps are taken, or --stop-at-return is reached."""
        goal = math.inf if self.args.stop_at_return is None else self.args.stop_at_return
        if self.step >= self.args.total_timesteps:
            return True
        if EXPLORES:  # training episodes hold random actions, so the last evaluation decides
            return bool(self.evaluations["step"]) and self.evaluations["return_mean"][-1] >= goal
        return len(self.recent) == 100 and np.mean(self.recent) >= goal

    def write_what_is_due(self):
        """A row of metrics.csv, about 200 in a run; evaluations and checkpoints, as often as args say.

        True if a checkpoint was written: then training begins anew from it, as a resumed run does.
        """
        losses = {name: float(values[-1]) for name, values in self.logged.items() if "loss" in name}
        self.check_finite(**losses)
        self.bar.update(self.step - self.bar.n)
        is_due = lambda every, last: self.is_finished() or self.step // every > last // every
        evaluates = is_due(self.eval_every, max(self.evaluations["step"], default=0))
        saves = is_due(self.checkpoint_every, self.checkpoint_step)
        saves = saves and (self.is_finished() or self.has_ended.all())  # long episodes come to an end
        if evaluates or saves or is_due(self.args.total_timesteps / 200, max(self.metrics["step"], default=0)):
            mean = float(np.mean(self.recent or math.nan))
            means = {name: float(sum(values) / len(values)) for name, values in self.logged.items()}
            self.add_row("metrics", dict(return_mean=mean, episodes=self.num_episodes, **means))
            self.bar.set_postfix_str(f"mean return {mean:.1f}", refresh=False)
            self.logged = {}
        if evaluates:
            self.write_evaluation()
        if saves or self.is_finished():  # an evaluation may have finished it
            self.write_checkpoint()
        if saves and not self.is_finished():  # else finish draws it
            self.draw_curve()
        if evaluates and self.args.capture_video:
            folder = self.dir / f"videos/{self.step}"
            evaluate(self.agent, self.args, 1, self.args.seed + 10_000, video=folder)
        return saves

    def write_evaluation(self):
        """Evaluate; save the weights in models/ as STEP, and as best if none were better."""
        seed = self.args.seed + 10_000  # not training's
        mean, std = evaluate(self.agent, self.args, self.args.eval_episodes, seed)
        is_best = mean >= max(self.evaluations["return_mean"], default=-math.inf)
        weights = {"agent": self.agent.state_dict()}
        for name in [self.step, "best"] if is_best else [self.step]:
            write_file(self.dir / f"models/{name}{SUFFIX}", partial(write_state, weights))
        self.add_row("evaluations", dict(return_mean=mean, return_std=std))

    def add_row(self, name, row):
        """Add a row, a dict of numbers, to a table and write it as CSV. What is missing is NaN."""
        table = getattr(self, name)
        row = dict(step=self.step, seconds=time.monotonic() - self.begun, **row)
        for column in row:
            table.setdefault(column, [math.nan] * len(table["step"]))
        for column in table:
            table[column].append(row.get(column, math.nan))
        write_csv(self.dir / f"{name}.csv", table)

    def write_checkpoint(self):
        """Write it. It holds no environments: training makes new ones now, as a resumed run does."""
        self.seconds = time.monotonic() - self.begun
        write_csv(self.dir / "episodes.csv", self.episodes)
        state = {name: part.state_dict() for name, part in self.parts.items()}
        write_file(self.dir / f"checkpoint{SUFFIX}", partial(write_state, state))
        self.checkpoint_step = self.step

    def draw_curve(self):
        """Write learning_curve.png: returns, their running mean, evaluations; below, CURVE's metrics."""
        from matplotlib.figure import Figure  # slow to import

        figure = Figure(figsize=(9, 7), layout="constrained")
        axes = figure.subplot_mosaic([["returns"] * len(CURVE), list(CURVE)], height_ratios=(2, 1))
        top, steps = axes["returns"], self.metrics["step"]
        at, returns, _ = self.episodes.values()
        top.plot(at, returns, ".", alpha=0.25, markersize=3, label="training episode")
        count = min(100, self.num_episodes)
        top.plot(steps, self.metrics.get("return_mean", []), label=f"mean of the last {count} episodes")
        at, _, means, stds = self.evaluations.values()
        top.errorbar(at, means, stds, fmt="o-", capsize=3, label="evaluation, ± one deviation")
        if means and top.dataLim.y0 < -100 * max(1, abs(means[-1])):  # from -11,000 to -13, say
            top.set_yscale("symlog", linthresh=10)
        title = f"{Path(__file__).name}: {self.args.env_id}, seed {self.args.seed}"
        top.set(title=title, ylabel="return")
        top.legend()
        for name, title in CURVE.items():
            axes[name].plot(steps, self.metrics.get(name, [math.nan] * len(steps)))
            axes[name].set(title=title, xlabel="environment steps")
            axes[name].locator_params(axis="x", nbins=4)
        write_file(self.dir / "learning_curve.png", partial(figure.savefig, dpi=120, format="png"))

    def finish(self):
        """Draw the curve, write summary.json, return the summary."""
        if self.step not in self.evaluations["step"]:  # resumed with a total that is reached already
            self.write_evaluation()
        self.draw_curve()
        self.bar.close()
        self.envs.close()
        last = {f"eval_{name}": self.evaluations[name][-1] for name in ("return_mean", "return_std")}
        seconds = time.monotonic() - self.begun
        summary = {"global_step": self.step, "seconds": seconds, "run_dir": self.dir.as_posix(), **last}
        write_file(self.dir / "summary.json", lambda file: file.write(json.dumps(summary).encode()))
        curve = f"{self.dir.as_posix()}/learning_curve.png"
        print(f"last evaluation: {summary['eval_return_mean']:.1f}   curve: {curve}")
        return summary


def main():
    """Train, or evaluate, as the flags say. What was mistyped is a line on stderr and exit code 2."""
    try:
        args = tuned(*sys.argv[1:])
        if not args.evaluate:
            run_dir = train(args)["run_dir"]
            watch = ["python", sys.argv[0], "--evaluate", run_dir, "--render", *code_flags(args)]
            print(f"to watch the best agent: {shlex.join(watch)}")
            return
        agent = load(args.evaluate, args.model, *sys.argv[1:])
        seed = args.seed + 20_000  # other episodes than those by which the best weights were chosen
        mean, std = evaluate(agent, args, args.eval_episodes, seed)
        print(f"{args.model} weights: {mean:.2f} ± {std:.2f} over {args.eval_episodes} episodes")
        film = f"{args.evaluate}/videos/{args.model}" if args.capture_video else None
        if film or args.render:
            evaluate(agent, args, 1, seed, args.render, film)
            print(f"film: {film or 'none, --capture-video makes one'}")
    except UserError as error:
        text = "".join(letter if letter.isprintable() else " " for letter in str(error))
        tqdm.write(f"{sys.argv[0]}: {' '.join(text.split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("stopped. --resume and the run folder goes on from the last checkpoint, if there is one")
    except BrokenPipeError:  # as in: python ppo.py | head -1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    main()
