# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "gymnasium[classic-control,toy-text]>=1.3,<2", "numpy>=1.26", "matplotlib>=3.8", "tyro>=1.0",
#   "tqdm>=4.66", "moviepy>=2.0",
# ]
# ///
"""Q-learning with a table, and its relatives Sarsa, expected Sarsa and double Q-learning.

The table holds a number Q(s, a) for every state s and action a: an estimate of the discounted return
if a is taken in s and only best actions follow. Play epsilon-greedily: mostly the table's best action,
sometimes a random one. After each step (in state S, action A gave reward R and led to S'), move
Q(S, A) a little towards the TD target y:

    Q(S, A) <- Q(S, A) + alpha [y - Q(S, A)]
    y = R + gamma max_a Q(S', a)   (Sutton & Barto, eq. 6.8)

Its relatives replace max_a Q(S', a): Sarsa by the value of the action taken next, expected Sarsa by
the mean over actions, double Q-learning by a second table's value of the first one's best action. The two Sarsas are
on-policy: they learn the return of what is really played, random actions included.

    python qlearning.py                                      # CliffWalking-v1; see values.png in its folder
    python qlearning.py --algorithm sarsa --epsilon-min 0.1  # learns a path away from the cliff
    python qlearning.py --env-id MountainCar-v0              # continuous numbers, cut into a grid

Papers: Sutton & Barto, Reinforcement Learning, 2nd edition 2018, chapter 6
(incompleteideas.net/book); Q-learning doi 10.1007/BF00992698, expected Sarsa doi
10.1109/ADPRL.2009.4927542, double Q-learning van Hasselt, NeurIPS 2010. The algorithm ends at
"# ===== helpers"; the code below it makes environments, keeps the run folder and draws pictures.
"""

import ast
import importlib
import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from bisect import bisect
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
    """Every flag and its default; TUNED (below) has others, as for CliffWalking. A given flag wins."""

    # algorithm
    algorithm: Literal["q-learning", "sarsa", "expected-sarsa", "double-q"] = "q-learning"
    learning_rate: float = 0.1  # alpha: an entry moves this share of the way to its target
    anneal_lr: bool = False  # lower the learning rate linearly to zero
    gamma: float = 0.99  # discount
    epsilon_start: float = 1.0  # probability of a random action (epsilon) at the beginning
    epsilon_min: float = 0.05  # epsilon falls to this and no further
    epsilon_decay: float = 0.99  # epsilon is multiplied by this after each episode; unless the next is set
    exploration_fraction: float | None = None  # if set, epsilon falls linearly over this share of the run
    grid_size: int = 20  # Box observations: number of bins in each dimension
    grid_low: tuple[float, ...] | None = None  # lower ends of the grid; None: the space's bounds
    grid_high: tuple[float, ...] | None = None  # upper ends; numbers outside go to the nearest bin
    num_episodes: int | None = None  # episodes to train for, in place of total_timesteps
    checkpoint_every: int = 0  # steps between checkpoints, which renew the environment; 0: by run length
    # run
    env_id: str = "CliffWalking-v1"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths, applied in order; with arguments: a.B(size=4)
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    total_timesteps: int = 500_000  # environment steps to train for; the last episode is finished
    stop_at_return: float | None = None  # stop once the mean return of an evaluation reaches this
    seed: int = 1  # seed of everything that is drawn at random
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, apart from training, without exploration
    capture_video: bool = False  # film an episode at each evaluation
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # table that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window; with --capture-video, film it instead
    config: str | None = None  # config.json of another run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__SCRIPT__SEED__TIME
    progress: bool = True  # show the progress bar


# ---------------------------------------------------------------------------------------- the table
class QTable:
    """Q(s, a): a row for each state, a column for each action. Double Q-learning has two such tables.

    They are lists of lists: in NumPy arrays, single numbers are read and written more slowly. All
    begin at 0, which is optimistic if rewards are negative: untried actions look best. An
    observation is one number or several, each discretised by its `edges` (state aggregation, Sutton &
    Barto, section 9.3): a number's bin is how many edges are <= the number. Integers 0 … n - 1, with
    edges 1 … n - 1, have a bin each. Of two components, the row is bin_1 * (number of bins_2) + bin_2.
    """

    def __init__(self, edges, observation_space, action_space, args):
        self.args = args
        self.edges = [list(cuts) for cuts in edges]
        self.bins = [len(cuts) + 1 for cuts in edges]
        self.observation_shape = observation_space.shape or ()  # a Tuple has none
        self.first_action = int(action_space.start)
        num_tables = 2 if args.algorithm == "double-q" else 1
        self.shape = (num_tables, math.prod(self.bins), int(action_space.n))
        self.tables = np.zeros(self.shape).tolist()

    def state(self, obs, run=None):
        """The row of an observation, 0 to prod(bins) - 1. With `run`, UserError if it is not finite."""
        numbers = obs if isinstance(obs, tuple) else np.asarray(obs).ravel().tolist()
        if run and not math.isfinite(sum(numbers)):
            run.check_finite(observation=obs)
        row = 0
        for number, cuts, num_bins in zip(numbers, self.edges, self.bins):
            row = row * num_bins + bisect(cuts, number)
        return row

    def values(self, state):
        """Q(state, a) of all actions, a list; of two tables the sum (Sutton & Barto, section 6.7)."""
        if len(self.tables) == 1:
            return self.tables[0][state]
        return [a + b for a, b in zip(self.tables[0][state], self.tables[1][state])]

    def act(self, obs):
        """The best actions (ties: the first) for observations (B, …), or a tuple of arrays."""
        first = obs[0] if isinstance(obs, tuple) else obs
        if np.ndim(first) != 1 + len(self.observation_shape):
            raise ValueError("act takes a batch: for one observation, act(np.array([obs]))[0]; a tuple: each part so")
        batch = zip(*obs) if isinstance(obs, tuple) else obs
        values = [self.values(self.state(one)) for one in batch]
        return np.argmax(values, axis=1) + self.first_action

    def state_dict(self):
        """The tables as an array (tables, states, actions)."""
        return {"q": np.array(self.tables)}

    def load_state_dict(self, state):
        """Take what state_dict returned. ValueError unless it is finite and of this shape."""
        q = np.asarray(state["q"], float)
        if q.shape != self.shape or not np.isfinite(q).all():
            raise ValueError(f"these are not finite numbers of shape {self.shape}")
        self.tables = q.tolist()


def epsilon_greedy(values, epsilon, rng):
    """With probability epsilon a random action, else one of those with the highest value."""
    if rng.random() < epsilon:
        return rng.randrange(len(values))
    best = max(values)
    if values.count(best) == 1:
        return values.index(best)
    return rng.choice([action for action, value in enumerate(values) if value == best])


def schedules(args, step, episode):
    """(epsilon, alpha) after so many steps and episodes. Epsilon falls by a factor per episode, or linearly.

    Linear schedules count the steps of the run or, with num_episodes, its episodes.
    """
    done, total = step, args.total_timesteps
    if args.num_episodes is not None:
        done, total = episode, args.num_episodes
    if args.exploration_fraction is None:
        epsilon = max(args.epsilon_min, args.epsilon_start * args.epsilon_decay**episode)
    else:
        duration = args.exploration_fraction * total
        epsilon = linear_schedule(args.epsilon_start, args.epsilon_min, duration, done)
    if args.anneal_lr:
        return epsilon, linear_schedule(args.learning_rate, 0.0, total, done)
    return epsilon, args.learning_rate


def linear_schedule(start, end, duration, step):
    """From `start` at step 0 to `end` at step `duration`, in a straight line; then `end`."""
    return end + (start - end) * max(0.0, 1 - step / duration)


# ------------------------------------------------------------------------------ the four algorithms
# The target y of a step S, A, R, S': what Q(S, A) should become. `next_values` is the row Q(S', .) of
# the table that is updated. `discount` is gamma, or 0 if the episode terminated: then there is no
# future, and that row has no effect.


def q_learning_target(reward, discount, next_values):
    """As if only best actions were to follow.

    y = R + gamma max_a Q(S', a)   (Sutton & Barto, eq. 6.8)
    """
    return reward + discount * max(next_values)


def sarsa_target(reward, discount, next_values, next_action):
    """A' is the action really taken next, sometimes a random one.

    y = R + gamma Q(S', A')   (Sutton & Barto, eq. 6.7)
    """
    return reward + discount * next_values[next_action]


def expected_sarsa_target(reward, discount, next_values, epsilon):
    """The mean over A' of the policy pi: epsilon / n for each action, 1 - epsilon more for the best.

    y = R + gamma sum_a pi(a|S') Q(S', a)   (Sutton & Barto, eq. 6.9)
    """
    average = sum(next_values) / len(next_values)
    return reward + discount * (epsilon * average + (1 - epsilon) * max(next_values))


def double_q_target(reward, discount, next_values, other_next_values):
    """Q_1 (`next_values`) chooses the action, Q_2 says what it is worth.

        y = R + gamma Q_2(S', argmax_a Q_1(S', a))   (Sutton & Barto, eq. 6.10)

    A maximum of noisy values is too high on average (maximisation bias). Q_2 has other noise, so on
    average its value of Q_1's choice is not too high.
    """
    best = next_values.index(max(next_values))  # ties: the first
    return reward + discount * other_next_values[best]


def play_episode(agent, env, run, rng, args):
    """Play one episode in `env`, learn from each step and count it in run.step: (return, length)."""
    obs, _ = env.reset()
    state = agent.state(obs, run)
    action = None
    episode_return, first_step = 0.0, run.step
    for _ in range(args.max_episode_steps or 27_000):  # so every episode ends; the same limit as in `evaluate`
        epsilon, learning_rate = schedules(args, run.step, run.num_episodes)
        if action is None:  # else Sarsa has chosen it already
            action = epsilon_greedy(agent.values(state), epsilon, rng)
        obs, reward, terminated, truncated, _ = env.step(action + agent.first_action)
        reward = np.asarray(reward, float).item()  # a Python float, as all numbers of the table
        run.step += 1
        next_state = agent.state(obs, run)
        next_action = None  # None: chosen after the update; only Sarsa needs it before
        discount = 0.0 if terminated else args.gamma  # truncated: S' still has a value

        # Q(S, A) is q[state][action], Q(S', .) is q[next_state].
        q = agent.tables[0]  # the table to update; double-q picks one of its two below
        if args.algorithm == "q-learning":
            target = q_learning_target(reward, discount, q[next_state])
        elif args.algorithm == "sarsa":
            next_action = epsilon_greedy(q[next_state], epsilon, rng)  # A', for the next step
            target = sarsa_target(reward, discount, q[next_state], next_action)
        elif args.algorithm == "expected-sarsa":
            target = expected_sarsa_target(reward, discount, q[next_state], epsilon)
        else:  # double-q: a coin decides which table is updated (Q_1), and which helps (Q_2)
            q, other = agent.tables if rng.random() < 0.5 else reversed(agent.tables)
            target = double_q_target(reward, discount, q[next_state], other[next_state])
        td_error = target - q[state][action]
        q[state][action] += learning_rate * td_error  # the update, the same for all four

        if not math.isfinite(td_error):
            run.check_finite(reward=reward, td_error=td_error)
        run.log(td_error=abs(td_error))  # metrics.csv has means over many steps
        episode_return += reward
        state = next_state
        action = next_action
        if terminated or truncated:
            break
    run.log(epsilon=epsilon, learning_rate=learning_rate)
    return episode_return, run.step - first_step


# ----------------------------------------------------------------------------------------- training
def train(args):
    """Train with `args`; return the summary, which summary.json holds too. UserError on bad input."""
    envs = make_envs(args, 1)  # for its spaces: new_env makes the one that is played
    agent = make_agent(args, envs)
    run = Run(args, envs)
    run.start(agent=agent)  # --resume loads its table

    env, rng = new_env(run)
    set_total(run, run.num_episodes, args.num_episodes)  # a resumed run has had episodes already
    while not run.is_finished():
        episode_return, length = play_episode(agent, env, run, rng, args)  # advances run.step
        (true_return,) = true_returns(run.envs, args, [episode_return])  # before wrappers changed rewards
        run.add_episode(0, float(true_return), length)
        set_total(run, run.num_episodes, args.num_episodes)
        # True after a checkpoint. It holds no environment: make a new one, as a resumed run does.
        if run.write_what_is_due():
            env, rng = new_env(run)
    draw_values(run.dir, args, agent, env)
    return run.finish()


# ===== helpers: settings, environments, the grid, files, pictures =================================

CURVE = {"td_error": "mean size of the TD error", "epsilon": "share of random actions"}
EXPLORES = True  # training takes random actions: only an evaluation says how good the table is
SCHEDULED = ("anneal_lr", "exploration_fraction")  # if set, they end with total_timesteps
ONLY_FLAGS = "resume evaluate model render capture_video config run_dir".split()  # not from config.json
REFUSED_WRAPPERS = {"NormalizeObservation": "--grid-low and --grid-high"}
SAFE_IDS = r"[^:]*"  # ids that a stranger's config.json may ask for: module:Id imports the module
SUFFIX = ".npz"  # of models and checkpoints
manual_seed = lambda seed: None  # of torch's generator, which nothing here draws from

# Tuned settings per environment; flags win over them.
TUNED = {
    "CliffWalking-v1": {"total_timesteps": 50_000, "learning_rate": 0.5, "anneal_lr": True, "gamma": 1.0,
                        "max_episode_steps": 1000},
    "Taxi-v4": {"total_timesteps": 300_000, "learning_rate": 0.5, "anneal_lr": True, "epsilon_min": 0.1},
    "FrozenLake-v1": {"total_timesteps": 300_000, "anneal_lr": True, "epsilon_min": 0.3},
    "Blackjack-v1": {"total_timesteps": 500_000, "learning_rate": 0.02, "anneal_lr": True, "gamma": 1.0,
                     "epsilon_min": 0.3},
    # epsilon_min: a greedy agent keeps the first way up that it has found
    "MountainCar-v0": {"total_timesteps": 3_000_000, "learning_rate": 0.6, "anneal_lr": True, "epsilon_min": 0.3,
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


class TrueReturn(gym.Wrapper):
    """Adds up an episode's rewards before the user's wrappers change them; truncates at `limit`."""

    def __init__(self, env, limit=None):
        super().__init__(env)
        self.limit = math.inf if limit is None else limit

    def reset(self, **kwargs):
        """As the environment's."""
        self.true_return = 0.0
        return super().reset(**kwargs)

    def step(self, action):
        """As the environment's, truncated at the limit."""
        obs, reward, terminated, truncated, info = super().step(action)
        self.true_return += np.asarray(reward, float).item()
        return obs, reward, terminated, truncated or self.true_return >= self.limit, info


def read_wrapper(text):
    """The wrapper that `module.Name` or `module.Name(size=4)` means; arguments are literals."""
    path, _, arguments = text.partition("(")
    module, _, name = path.rpartition(".")
    if name in REFUSED_WRAPPERS:
        raise UserError(f"{name} would start anew at checkpoints: use {REFUSED_WRAPPERS[name]}")
    try:
        call = ast.parse(f"f({arguments or ')'}", mode="eval").body
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise UserError(f"--wrappers {text}: {error}") from error
    if call.args:
        raise UserError(f"--wrappers {text}: arguments need names, as in (size=4)")
    wrapper = getattr(importlib.import_module(module or name), name, None)
    if wrapper is None:
        raise UserError(f"--wrappers {text}: there is no {name} in {module}")
    return partial(wrapper, **given)


# What a mistyped --env-id, --env-kwargs or --wrappers raises.
MISTYPED = gym.error.Error, ModuleNotFoundError, json.JSONDecodeError, TypeError


def raise_mistyped(error, args):
    """Raise a UserError in place of one of MISTYPED. A TypeError of another kind keeps its traceback."""
    message = str(error)
    argument = re.search(r"unexpected keyword argument '(\w+)'", message)
    is_given = argument and argument[1] in f"render_mode {args.env_kwargs} {args.wrappers}"
    if isinstance(error, TypeError) and not is_given:
        raise error
    if isinstance(error, gym.error.NameNotFound):
        message += " One of your own is module:Id-v0, made known by gymnasium.register"
    if "Box2D" in message:  # Gymnasium's advice needs a compiler
        message = "pip install ufal-pybox2d"
    raise UserError(f"cannot make {args.env_id} with --env-kwargs {args.env_kwargs}: {message}") from error


def make_table_envs(args, num_envs, render=False, video=None):
    """A vector environment, whose `envs` are single ones; in a window or filmed in a folder, if asked.

    UserError for what is mistyped. What the environment itself raises keeps its traceback.
    """
    try:
        kwargs = json.loads(args.env_kwargs)
        if not isinstance(kwargs, dict):
            raise UserError('--env-kwargs is a JSON object, such as {"size": 4}')
        wrappers = [read_wrapper(text) for text in args.wrappers]
        if args.wrappers or args.max_episode_return is not None:
            wrappers.insert(0, partial(TrueReturn, limit=args.max_episode_return))
        if args.max_episode_steps is not None:
            kwargs["max_episode_steps"] = args.max_episode_steps
        if render or video:
            kwargs["render_mode"] = "rgb_array" if video else "human"
        if video:
            wrappers.append(partial(gym.wrappers.RecordVideo, video_folder=str(video)))
        return gym.make_vec(args.env_id, num_envs, vectorization_mode="sync", wrappers=wrappers, **kwargs)
    except MISTYPED as error:
        raise_mistyped(error, args)


def new_env(run):
    """(environment, generator of random numbers), both new, seeded by (seed, step).

    A single environment is faster than a vector of one. random.Random draws single numbers faster
    than NumPy's generators.
    """
    envs, _, _, rng = run.new_envs()
    return envs.envs[0], random.Random(int(rng.integers(2**63)))


def set_total(run, done, total):
    """End a run after `total` rounds, of which `done` are over; None: after total_timesteps.

    A run ends by steps: total_timesteps is estimated from the rounds (episodes, generations) so far.
    """
    if total is not None and done > 0:
        run.args = replace(run.args, total_timesteps=run.step * total / done)
        is_tenth = 10 * done // total > 10 * (done - 1) // total
        run.eval_every = run.args.eval_every or (run.step if is_tenth else math.inf)
        run.bar.total = run.args.total_timesteps


def box_edges(args, space):
    """The inner edges of `grid_size` equal bins for each number of a Box. UserError without ends."""
    lows = space.low.ravel().tolist() if args.grid_low is None else args.grid_low
    highs = space.high.ravel().tolist() if args.grid_high is None else args.grid_high
    if not len(lows) == len(highs) == math.prod(space.shape):
        raise UserError(f"{args.env_id}: grid_low and grid_high need a number for each of {space}")
    edges = []
    for low, high in zip(lows, highs):
        if not -1e9 < low < high < 1e9:
            ends = f"{args.env_id}: no grid from {low} to {high}"
            raise UserError(f"{ends}: give its ends with --grid-low and --grid-high")
        edges.append(np.linspace(low, high, args.grid_size + 1)[1:-1].tolist())
    return edges


def make_q_table(args, envs):
    """A table of zeros for these environments. UserError if a space does not suit or is too large."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if 0 in (args.grid_size, args.num_episodes, args.exploration_fraction):
        raise UserError("grid_size, num_episodes and exploration_fraction must be above 0")
    if args.epsilon_start < args.epsilon_min:
        raise UserError(f"epsilon falls from epsilon_start to epsilon_min: {args.epsilon_start:g} is too low")
    if not isinstance(action_space, spaces.Discrete):
        raise UserError(f"{args.env_id}: a table needs Discrete actions, not {action_space}")
    parts = obs_space if isinstance(obs_space, spaces.Tuple) else [obs_space]
    if isinstance(obs_space, spaces.Box):
        edges = box_edges(args, obs_space)
    elif isinstance(obs_space, spaces.MultiDiscrete):
        sizes = zip(obs_space.start.ravel(), obs_space.nvec.ravel())
        edges = [range(start + 1, start + n) for start, n in sizes]  # n - 1 edges: n bins, one each
    elif all(isinstance(part, spaces.Discrete) for part in parts):
        edges = [range(part.start + 1, part.start + part.n) for part in parts]
    else:
        wanted = "Discrete, MultiDiscrete, a Tuple of Discrete, or a Box"
        raise UserError(f"{args.env_id}: observations must be {wanted}, not {obs_space}")
    size = math.prod(len(cuts) + 1 for cuts in edges) * int(action_space.n)
    if size > 10**7:
        raise UserError(f"{args.env_id}: the table is too large: try a smaller --grid-size, or ppo.py")
    return QTable(edges, obs_space, action_space, args)


make_envs = make_table_envs  # as the run section calls it
make_agent = make_q_table  # as the run section calls it


SIGNS = {"CliffWalkingEnv": "↑→↓←", "FrozenLakeEnv": "←↓→↑"}  # of actions 0 to 3


def draw_values(folder, args, agent, env):
    """Write values.png: the value of each state, max_a Q(s, a), and the best action there.

    Only for the grid worlds of SIGNS, and for observations of two numbers. Grey: all values are 0.
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
    figure.suptitle(f"{args.env_id}, {args.algorithm}: value of each state, and its best action")
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
    """Maps of the values and of the best actions, for two numbers, whose bins have equal widths."""
    x, y = ([2 * edges[0] - edges[1], *edges, 2 * edges[-1] - edges[-2]] for edges in agent.edges)
    best = np.where(np.isnan(values), np.nan, best)
    panels = (values, "max Q(s, a)", None), (best, "best action", range(agent.shape[2]))
    for axis, (numbers, label, ticks) in zip(figure.subplots(1, 2), panels):
        image = axis.pcolormesh(x, y, numbers.reshape(agent.bins).T)
        figure.colorbar(image, ax=axis, label=label, ticks=ticks)
        axis.set(xlabel="first number of the observation", ylabel="second number")
        axis.set_facecolor("lightgrey")


# ===== run: the same in every script ==============================================================
# Of the script it knows Args, TUNED, CURVE, EXPLORES, SCHEDULED, ONLY_FLAGS, SAFE_IDS, SUFFIX;
# tuned_settings, make_envs, make_agent (whose agent can act), train, manual_seed, write_state and read_state.
# Free at --resume; the first three only without a schedule:
FREE = "total_timesteps num_episodes num_generations stop_at_return eval_every eval_episodes device progress".split()
COUNTS = """total_timesteps num_envs num_steps eval_episodes max_episode_steps num_minibatches batch_size
update_epochs train_frequency gradient_steps policy_frequency n_step target_network_frequency hidden_sizes
critic_hidden_sizes""".split()  # from 1
SIGNED = "stop_at_return max_episode_return initial_reward_threshold v_min v_max".split()  # the rest: from 0


shell = subprocess.list2cmdline if os.name == "nt" else shlex.join  # a command, to be copied


class UserError(Exception):
    """What the user can mend: `main` prints its one line."""


def tuned(*flags, **given):
    """Args from flags or keywords; the rest from a run (to resume, to evaluate, `config`) or TUNED."""
    plain = lambda number: (number[1] or "") + f"{float(number[2]):.15g}"  # 1000000 for 1e6
    flags = flags[: flags.index("#")] if "#" in flags else flags  # cmd.exe and zsh hand over comments
    flags = [re.sub(r"^(--[\w-]+=)?(\d+\.?\d*[eE]\d+)$", plain, flag) for flag in flags]
    if flags and not flags[0].startswith("-"):
        flags.insert(0, "--env-id")
    # Parsed twice: the first time tells where the other values come from.
    first = parse(replace(Args(), **given), [flag for flag in flags if flag not in ("-h", "--help")])
    paths = [first.resume, first.evaluate, first.config or first.run_dir]
    if paths.count(None) < 2:
        raise UserError("choose between --resume, --evaluate and --config or --run-dir")
    if first.render and not first.evaluate:
        raise UserError("--render shows a trained agent: add --evaluate and its run folder")
    path = first.resume or first.evaluate or first.config
    if path and (path != first.config or os.path.isdir(path)):
        path = f"{path}/config.json"
    defaults = read_config(path, first) if path else replace(Args(), **tuned_settings(first))
    args = parse(replace(defaults, **given), flags)
    code = code_flags(args) if path else []
    if code and code != code_flags(first):
        raise UserError(f"{path} may execute anything; if you trust it, add {shell(code)}")
    for name, value in vars(args).items():
        least = 1 if name in COUNTS else 0
        if isinstance(getattr(Args(), name), tuple) and not isinstance(value, tuple):  # in a notebook
            raise UserError(f"{name} must be a tuple, such as (64,)")
        for number in value if isinstance(value, tuple) else [value]:
            if isinstance(number, int | float) and name not in SIGNED and not number >= least:
                raise UserError(f"{name} must be at least {least}")
    free = FREE[3:] if any(getattr(defaults, name) for name in SCHEDULED) else FREE
    for name, kept in vars(defaults).items() if args.resume else []:
        if getattr(args, name) != kept and name not in free:
            raise UserError(f"{name} changes how a run learns: a resumed run keeps {kept}")
    return args


def parse(defaults, flags):
    """Args from flags, else from `defaults`, whose values must be of the types that Args says."""
    try:
        with warnings.catch_warnings(action="error", category=UserWarning):  # tyro warns of wrong types
            args = tyro.cli(Args, args=flags, default=defaults, description=__doc__.split("\n\nPapers")[0])
    except UserWarning as error:
        raise UserError(str(error).split(" We'll try")[0]) from error
    env_id = re.sub("^(ale_py|minigrid):", "", args.env_id)  # as TUNED has it
    ids = [*gym.registry, *TUNED]  # those of plugins are not registered yet
    versions = [known for known in ids if re.fullmatch(re.escape(env_id) + r"-v\d+", known)]
    newest = max(versions, key=lambda known: int(known.rpartition("-v")[2]), default=env_id)
    return replace(args, env_id=newest)  # CartPole-v1 for CartPole


def code_flags(args):
    """Flags that a config.json must not decide alone, as they can run any code; mostly none."""
    own = tuned_settings(args)
    is_own = args.env_kwargs in ("{}", own.get("env_kwargs")) and args.wrappers in ((), own.get("wrappers"))
    if re.fullmatch(SAFE_IDS, args.env_id) and is_own:
        return []
    flags = ["--env-id", args.env_id]
    flags += [] if args.env_kwargs == "{}" else ["--env-kwargs", args.env_kwargs]
    return [*flags, "--wrappers", *args.wrappers] if args.wrappers else flags


def read_config(path, given):
    """Args from the config.json of a run; but what to do, such as `resume`, is as `given`."""
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        script, saved = config["script"], config["args"]
        saved = {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()}
        if script != Path(__file__).stem:
            raise TypeError(f"it is from {script}.py")
        return Args(**saved | {name: getattr(given, name) for name in ONLY_FLAGS})
    except Exception as error:  # as in read_parts
        raise UserError(f"{path} is missing, damaged or foreign: {error}") from error


def load(run_dir, model="best", *flags, **given):
    """The agent saved by a run, with its settings as agent.args; `model`: best, last or a step."""
    args = tuned(*flags, **{"evaluate": str(run_dir), "model": str(model)} | given)
    envs = make_envs(args, 1)
    agent = make_agent(args, envs)
    envs.close()
    name = "checkpoint" if args.model == "last" else f"models/{args.model}"
    read_parts(f"{run_dir}/{name}{SUFFIX}", {"agent": agent})
    return agent


def evaluate(agent, args, episodes=100, seed=0, render=False, video=None):
    """(mean, standard deviation) of the returns of `episodes` episodes; if asked, shown or filmed."""
    # not a process for each episode:
    here = replace(args, async_envs=False) if hasattr(args, "async_envs") else args
    envs = make_envs(here, episodes, render, video)  # one each: else short episodes count too often
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
    else:
        tqdm.write(f"{playing.sum()} episodes of an evaluation were cut off: see --max-episode-steps")
    envs.close()
    return float(returns.mean()), float(returns.std())


def true_returns(envs, args, returns):
    """Returns (N,) of the episodes under way, before the user's wrappers changed their rewards."""
    return np.array(envs.unwrapped.get_attr("true_return")) if args.wrappers else returns


def write_file(path, write):
    """Call write(file), then rename the file to `path`: no reader finds a half-written one."""
    temporary = Path(f"{path}.tmp")  # what a killed process leaves is written over later
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            write(file)
        try:
            os.replace(temporary, path)
        except PermissionError:  # on Windows: another program has one open
            tqdm.write(f"{path} is in use, so it stays as it was: close it")
    except (OSError, RuntimeError) as error:  # on a full disk, torch raises a RuntimeError
        raise UserError(f"cannot write {path}: {error}") from error


def write_csv(path, table):
    """Write a table, a dict of columns."""
    rows = np.transpose(list(table.values()))
    head = ",".join(table)
    save = lambda file: np.savetxt(file, rows, "%.10g", ",", header=head, comments="", encoding="utf-8")
    write_file(path, save)


def read_parts(path, parts):
    """Give each of `parts`, a dict of objects with load_state_dict, its state from a file."""
    try:
        state = read_state(path)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except Exception as error:  # there is no list of what a damaged or foreign file may raise
        reason = str(error)[:200]  # torch names the layers that do not fit
        raise UserError(f"{path} is missing, damaged or of another network: {reason}") from error


class Run:
    """All that a run keeps besides what it learns: folder, counts, evaluations, checkpoints, curve."""

    def __init__(self, args, envs):
        self.args = args
        self.envs = envs
        self.step = 0  # environment steps, without reset rows
        self.seconds = 0.0
        self.num_episodes = 0
        self.episodes = {"step": [], "return": [], "length": []}
        self.metrics = {"step": []}  # other columns begin when they are first logged
        self.evaluations = {"step": [], "seconds": [], "return_mean": [], "return_std": []}
        self.saved = "step seconds num_episodes episodes metrics evaluations".split()
        self.logged = {}  # since the last row of metrics.csv
        self.largest = {}  # absolute observation, reward, …
        self.checkpoint_step = 0  # of the last checkpoint
        self.eval_every = args.eval_every or math.ceil(args.total_timesteps / 10)
        tenth = min(args.total_timesteps // 10, 50_000)
        self.checkpoint_every = args.checkpoint_every or max(tenth, 5_000 * envs.num_envs)
        name = f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
        self.dir = Path(args.resume or args.run_dir or f"runs/{re.sub('[/:]', '-', name)}")
        if os.path.exists(self.dir / "config.json") and not args.resume:
            raise UserError(f"{self.dir} holds a run already: --resume it, or choose another --run-dir")
        if args.capture_video:  # what cannot be filmed is refused at once
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                film = make_envs(args, 1, video=folder)
                film.reset(seed=args.seed)
                film.close()

    def start(self, agent, **parts):
        """Start with `agent` and whatever else a checkpoint must hold. --resume loads their states."""
        self.agent = agent
        self.parts = {"run": self, "agent": agent, **parts}
        if self.args.resume and (self.dir / f"checkpoint{SUFFIX}").exists():
            read_parts(self.dir / f"checkpoint{SUFFIX}", self.parts)
        command = {"shell": True, "cwd": Path(__file__).parent, "capture_output": True}
        commit = subprocess.run("git describe --always --dirty", **command).stdout.decode().strip()
        packages = [name for name in ("torch", "gymnasium", "numpy") if name in sys.modules]
        config = {"script": Path(__file__).stem, "args": asdict(self.args), "commit": commit}
        config["versions"] = {name: version(name) for name in packages}
        config["started"] = self.started = time.time_ns()
        write_file(self.dir / "config.json", lambda file: file.write(json.dumps(config).encode()))
        known = tuned_settings(self.args)
        given = {name: x for name, x in vars(self.args).items() if x != known.get(name, getattr(Args(), name))}
        print(f"{self.args.env_id} -> {self.dir}\ntuned: {known}\ngiven: {given}")
        if self.args.env_id not in TUNED:
            print(f"no settings for {self.args.env_id}: the defaults. docs/settings.md says what to change first")
        if self.args.resume:
            print(f"resumed after {self.step:,} steps" if self.step else "no checkpoint yet: it begins anew")
        self.begun = time.monotonic() - self.seconds
        total = self.args.total_timesteps
        self.bar = tqdm(total=total, initial=self.step, unit=" steps", disable=not self.args.progress)

    def state_dict(self):
        """What a checkpoint holds of the run."""
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state):
        """Take over what state_dict returned."""
        vars(self).update({name: state[name] for name in self.saved})
        self.checkpoint_step = self.step

    def remaining(self):
        """The share of the steps that is left, from 1 down to 0."""
        return max(0.0, 1 - self.step / self.args.total_timesteps)

    def new_envs(self):
        """(environments, observations, reset rows, a NumPy generator), all new, seeded by (seed, step).

        So a resumed run draws what an unbroken one does.
        """
        self.envs.close()  # a reset is not enough: Box2D's environments keep traces of old episodes
        self.envs = make_envs(self.args, self.envs.num_envs)
        rng = np.random.default_rng([self.args.seed, self.step])
        obs, _ = self.envs.reset(seed=int(rng.integers(2**31)))
        manual_seed(int(rng.integers(2**31)))
        self.check_finite(observation=obs)
        n = self.envs.num_envs
        self.returns = np.zeros(n)  # of the episodes under way
        self.lengths = np.zeros(n, int)
        self.has_ended = np.zeros(n, bool)  # whether an episode ended since
        return self.envs, obs, np.zeros(n, bool), rng

    def count(self, obs, rewards, dones, reset_rows):
        """Count a step of all environments, arrays (N, …). UserError on NaN or infinity."""
        self.check_finite(observation=obs, reward=rewards)
        self.step += int((~reset_rows).sum())
        self.returns += rewards * ~reset_rows
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
        for column, value in zip(self.episodes.values(), (self.step, total, length)):
            column.append(value)

    def check_finite(self, **values):
        """UserError if a value is NaN, or too large for float32."""
        for name, value in values.items():
            if np.asarray(value).dtype == np.uint8:
                continue
            largest = np.max(np.abs(value), initial=0)
            if not largest < 3.4e38:
                raise UserError(f"{self.args.env_id}, after step {self.step}: {name} is NaN or infinite")
            self.largest[name] = max(largest, self.largest.get(name, 0))

    def check_alone(self):
        """UserError if another process has resumed or removed the run since this one started."""
        path = self.dir / "config.json"
        if not path.exists() or json.loads(path.read_text())["started"] != self.started:
            raise UserError(f"another process has resumed or removed {self.dir}: this one ends")

    def log(self, **metrics):
        """Collect numbers, or tensors of one number; a row of metrics.csv holds their means."""
        for name, value in metrics.items():
            if getattr(value, "shape", ()) not in ((), (1,)):
                raise ValueError(f"the metric {name} is not one number, but {tuple(value.shape)}")
            self.logged.setdefault(name, []).append(value)

    def mean_return(self):
        """The mean return of the last 100 training episodes; NaN if there are none."""
        return float(np.mean(self.episodes["return"][-100:] or math.nan))

    def is_finished(self):
        """Whether all steps are taken, or --stop-at-return is reached."""
        goal = math.inf if self.args.stop_at_return is None else self.args.stop_at_return
        if self.step >= self.args.total_timesteps:
            return True
        if EXPLORES:  # training's episodes explore, so the last evaluation decides
            return bool(self.evaluations["step"]) and self.evaluations["return_mean"][-1] >= goal
        return self.num_episodes >= 100 and self.mean_return() >= goal

    def write_what_is_due(self):
        """A row of metrics.csv, about 200 in a run; evaluations and checkpoints, as often as args say.

        True if training goes on after a checkpoint: all episodes begin anew, as in a resumed run.
        """
        losses = {name: float(values[-1]) for name, values in self.logged.items() if "loss" in name}
        self.check_finite(**losses)
        self.bar.update(self.step - self.bar.n)
        finished = self.is_finished()
        is_due = lambda every, last: finished or self.step // every > last // every
        evaluates = is_due(self.eval_every, max(self.evaluations["step"], default=0))
        saves = is_due(self.checkpoint_every, self.checkpoint_step)
        saves = saves and (finished or self.has_ended.all())  # lets long episodes end
        last_row = max(self.metrics["step"], default=0)
        if evaluates or saves or is_due(self.args.total_timesteps / 200, last_row):
            self.check_alone()
            mean = self.mean_return()
            means = {name: float(sum(values) / len(values)) for name, values in self.logged.items()}
            self.add_row("metrics", dict(return_mean=mean, episodes=self.num_episodes, **means))
            self.bar.set_postfix_str(f"mean return {mean:.1f}", refresh=False)
            self.logged = {}
            if self.args.env_id not in TUNED and last_row < self.args.total_timesteps / 10 <= self.step:
                self.give_hints()
        if evaluates:
            self.write_evaluation()
        finished = self.is_finished()  # an evaluation may have finished it
        if saves or finished:
            self.write_checkpoint()
        if evaluates and self.args.capture_video:
            folder = self.dir / f"videos/{self.step}"
            evaluate(self.agent, self.args, 1, self.args.seed + 10_000, video=folder)
        if saves and not finished:  # else finish draws it
            self.draw_curve()
        return saves and not finished

    def give_hints(self):
        """After a tenth of the run, print what one would notice too late."""
        is_off = lambda flag: not getattr(self.args, flag, True)
        high = getattr(getattr(self.envs, "single_action_space", None), "high", 0)
        if self.largest.get("observation", 0) > 100 and is_off("normalize_obs"):
            tqdm.write("observations go beyond ±100: try --normalize-obs")
        if self.largest.get("reward", 0) > 100 and is_off("normalize_reward"):
            tqdm.write("rewards go beyond ±100: try --normalize-reward")
        if 10 < np.max(high) < 1e30:
            tqdm.write("actions in [-1, 1] are mapped to bounds beyond ±10")
        if not self.has_ended.all():
            tqdm.write("no checkpoint before every environment has ended an episode: see --max-episode-steps")

    def write_evaluation(self):
        """Evaluate; save the weights in models/ as STEP, and as best if none were better."""
        seed = self.args.seed + 10_000  # not training's
        mean, std = evaluate(self.agent, self.args, self.args.eval_episodes, seed)
        is_best = mean >= max(self.evaluations["return_mean"], default=-math.inf)
        weights = {"agent": self.agent.state_dict()}
        for name in [self.step, "best"] if is_best else [self.step]:
            write_file(self.dir / f"models/{name}{SUFFIX}", partial(write_state, weights))
        self.check_finite(evaluation=mean)
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
        """Write the checkpoint. It holds no environments: training now makes new ones."""
        self.seconds = time.monotonic() - self.begun
        write_csv(self.dir / "episodes.csv", self.episodes)
        state = {name: part.state_dict() for name, part in self.parts.items()}
        write_file(self.dir / f"checkpoint{SUFFIX}", partial(write_state, state))
        self.checkpoint_step = self.step

    def draw_curve(self):
        """Write learning_curve.png: returns, their running mean, evaluations; below, CURVE's metrics."""
        from matplotlib.figure import Figure  # slow to import

        figure = Figure(figsize=(3 * max(3, len(CURVE)), 7), layout="constrained")
        axes = figure.subplot_mosaic([["returns"] * len(CURVE), list(CURVE)], height_ratios=(2, 1))
        top, steps = axes["returns"], self.metrics["step"]
        known = lambda name: zip(*[(x, y) for x, y in zip(steps, self.metrics.get(name, [])) if y == y])
        at, returns, _ = self.episodes.values()
        top.plot(at, returns, ".", alpha=0.25, markersize=3, label="training episode")
        label = f"mean of the last {min(100, self.num_episodes)} episodes"
        top.plot(*known("return_mean"), marker=".", markersize=2, label=label)
        at, _, means, stds = self.evaluations.values()
        top.errorbar(at, means, stds, fmt="o-", capsize=3, label="evaluation, ± one deviation")
        if means and top.dataLim.y0 < -100 * max(1, abs(means[-1])):  # from -11,000 to -13, say
            top.set_yscale("symlog", linthresh=10)
        top.set_title(f"{Path(__file__).name}: {self.args.env_id}, seed {self.args.seed}")
        top.set_ylabel("return before wrappers" if self.args.wrappers else "return")
        top.legend()
        for name, title in CURVE.items():
            axes[name].plot(*known(name), marker=".", markersize=2)  # not NaN, where nothing was logged
            bound = np.fmax.accumulate(self.metrics.get(f"{name}_bound", [math.nan]))
            if bound[-1] < 2 * axes[name].get_ylim()[1]:  # known and near
                axes[name].plot(steps, bound, "--", color="gray")
            axes[name].set(title=title, xlabel="environment steps")
            axes[name].locator_params(axis="x", nbins=3)
        write_file(self.dir / "learning_curve.png", partial(figure.savefig, dpi=120, format="png"))

    def finish(self):
        """Draw the curve, write summary.json, return the summary."""
        if self.step not in self.evaluations["step"]:  # resumed when all was over
            self.write_evaluation()
        self.draw_curve()
        self.bar.close()
        self.envs.close()
        last = {f"eval_{name}": self.evaluations[name][-1] for name in ("return_mean", "return_std")}
        seconds = time.monotonic() - self.begun
        summary = {"global_step": self.step, "seconds": seconds, "run_dir": self.dir.as_posix(), **last}
        write_file(self.dir / "summary.json", lambda file: file.write(json.dumps(summary).encode()))
        if self.step < self.args.total_timesteps:
            print(f"stopped after {self.step:,} steps: stop_at_return {self.args.stop_at_return:g} is reached")
        print(f"last evaluation: {summary['eval_return_mean']:.1f}   curve: {summary['run_dir']}/learning_curve.png")
        return summary


def main():
    """Train or evaluate. What was mistyped is a line on stderr, exit code 2."""
    sys.stdout.reconfigure(errors="replace")  # "?" for what it lacks
    try:
        args = tuned(*sys.argv[1:])
        if not args.evaluate:
            run_dir = train(args)["run_dir"]
            watch = ["python", Path(sys.argv[0]).as_posix(), "--evaluate", run_dir, "--render", *code_flags(args)]
            print(f"to watch the best agent: {shell(watch)}")
            return
        screens = {"DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"}
        if args.render and not args.capture_video and sys.platform == "linux" and not screens & {*os.environ}:
            raise UserError("there is no display for --render; with --capture-video it makes a film")
        agent = load(args.evaluate, args.model, *sys.argv[1:])
        seed = args.seed + 20_000  # not those by which the best weights were chosen
        mean, std = evaluate(agent, args, args.eval_episodes, seed)
        print(f"{args.model} weights: {mean:.2f} ± {std:.2f} over {args.eval_episodes} episodes")
        film = f"{args.evaluate}/videos/{args.model}" if args.capture_video else None
        if film or args.render:
            evaluate(agent, args, 1, seed, args.render, film)
        if film:
            print(f"film: {film}")
    except UserError as error:
        line = " ".join(str(error).split())
        tqdm.write(f"{sys.argv[0]}: {''.join(filter(str.isprintable, line))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("\nstopped: a training goes on from its last checkpoint, if any, with --resume RUN_DIR")


if __name__ == "__main__":
    main()
