# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2", "tyro==1.0.17",
#   "tqdm==4.70.1", "moviepy==2.2.1",
# ]
# ///
"""Q-learning with a table, and its relatives Sarsa, expected Sarsa and double Q-learning, all in this one file.

The table holds a number Q(s, a) for every state s and action a: the discounted return to be expected if a is taken in s
and the best actions from then on. Play, mostly by taking the best action of the table, sometimes a random one. After
each step from S by A to S' with reward R, move Q(S, A) a little towards what that step says it should be:

    Q(S, A) <- Q(S, A) + alpha [R + gamma max_a Q(S', a) - Q(S, A)]     (Sutton & Barto, eq. 6.8)

The relatives differ in what they put for max_a Q(S', a); double Q-learning also keeps two tables. The Q of Sarsa and
expected Sarsa is the return of what is really played, random actions included. No neural network: a table and a loop.

    python qlearning.py                                          # CliffWalking-v1, a few seconds; look at values.png
    python qlearning.py --algorithm sarsa --epsilon-min 0.1      # learns the path away from the cliff
    python qlearning.py --env-id MountainCar-v0                  # a continuous world, cut into a grid

Sources: Sutton & Barto, Reinforcement Learning, 2nd edition 2018, chapter 6 (incompleteideas.net/book); Q-learning doi
10.1007/BF00992698, expected Sarsa doi 10.1109/ADPRL.2009.4927542, double Q-learning van Hasselt, NeurIPS 2010.
The story ends at "# ===== helpers"; what stands below makes environments, keeps the run folder and draws the pictures.
"""

import importlib
import json
import math
import os
import pkgutil
import platform
import random
import re
import sys
import time
from bisect import bisect
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from shlex import quote
from typing import Literal

import gymnasium as gym
import numpy as np
import tyro
from gymnasium import spaces
from tqdm import tqdm


@dataclass(kw_only=True)
class Args:
    """Every flag and its default. For some environments, the default one included, TUNED (below) replaces some."""

    # run
    env_id: str = "CliffWalking-v1"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers, applied in order
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    total_timesteps: int = 500_000  # environment steps to train for; the episode that reaches them is played to its end
    stop_at_return: float | None = None  # stop once an evaluation reaches this
    seed: int = 1  # seed of everything that is drawn at random
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, on separate environments, with the best actions of the table
    capture_video: bool = False  # film an episode at each evaluation
    checkpoint_every: int = 0  # steps between checkpoints, which are written between episodes; 0: a sensible interval
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # table that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window
    config: str | None = None  # config.json of an earlier run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__SCRIPT__SEED__TIME
    progress: bool = True  # show the progress bar
    # algorithm
    algorithm: Literal["q-learning", "sarsa", "expected-sarsa", "double-q"] = "q-learning"  # the target of an update
    learning_rate: float = 0.1  # alpha: how far an entry of the table moves towards its target
    anneal_lr: bool = False  # lower the learning rate linearly to zero
    gamma: float = 0.99  # discount
    epsilon_start: float = 1.0  # share of random actions at first
    epsilon_min: float = 0.05  # share of random actions in the end
    epsilon_decay: float = 0.99  # factor of that share per episode, down to epsilon_min
    exploration_fraction: float | None = None  # lower epsilon linearly over this part of the run instead
    grid_size: int = 20  # Box observations: bins of each dimension
    grid_low: tuple[float, ...] | None = None  # lower end of each dimension's bins; None: the space's own bounds
    grid_high: tuple[float, ...] | None = None  # upper end; what lies outside goes to the bin at the edge


# ------------------------------------------------------------------------------------------------------ the table


class QTable:
    """Q(s, a): a row for each state, a column for each action. Double Q-learning has two such tables.

    They are lists of lists: reading and writing single numbers is faster there than in NumPy arrays. All begin at 0:
    where rewards are negative, what has not been tried looks best.
    An observation is one number or several. The range of each is cut at its `edges`, and the number of edges that lie
    at or below it is its bin: so what lies outside of all edges is in the first bin or the last. Integers 0 … n - 1
    have the edges 1 … n - 1: each is its own bin.
    """

    def __init__(self, edges, action_space, num_tables=1):
        self.edges = edges
        self.bins = [len(cuts) + 1 for cuts in edges]
        self.first_action = int(action_space.start)
        self.shape = (num_tables, math.prod(self.bins), int(action_space.n))
        self.tables = np.zeros(self.shape).tolist()

    def state(self, obs, run=None):
        """The row of an observation: its bins read as the digits of one number. With `run`, it must be finite."""
        if not isinstance(obs, np.ndarray | tuple):  # a single integer
            return bisect(self.edges[0], obs)
        numbers = obs if isinstance(obs, tuple) else obs.ravel().tolist()
        if run and not math.isfinite(sum(numbers)):
            run.check_finite(observation=obs)
        row = 0
        for number, edges, bins in zip(numbers, self.edges, self.bins):
            row = row * bins + bisect(edges, number)
        return row

    def values(self, state):
        """The list of Q(state, a) of all actions; of two tables, the sum (Sutton & Barto, section 6.7)."""
        if len(self.tables) == 1:
            return self.tables[0][state]
        return [a + b for a, b in zip(self.tables[0][state], self.tables[1][state])]

    def act(self, obs):
        """The best actions, as the environment takes them, of a batch of observations: evaluations call this."""
        batch = zip(*obs) if isinstance(obs, tuple) else obs  # of a Tuple space: a tuple of arrays
        values = [self.values(self.state(one)) for one in batch]
        return np.argmax(values, axis=1) + self.first_action

    def state_dict(self):
        """The tables as an array (tables, states, actions)."""
        return {"q": np.array(self.tables)}

    def load_state_dict(self, state):
        """Copy what state_dict returned. ValueError unless these are finite numbers of the same shape."""
        q = np.asarray(state["q"], float)
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


def schedules(args, step, episode):
    """(epsilon, alpha): epsilon falls by a constant factor per episode, or linearly; alpha is constant, or linear."""
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
# What Q(S, A) should become after the step S, A, R, S': its target. `next_values` is the row Q(S', .) of the table;
# `discount` is gamma, but 0 if the episode terminated: then there is no future, and that row counts for nothing.


def q_learning_target(reward, discount, next_values):
    """R + gamma max_a Q(S', a): as if all actions from now on were the best ones   (Sutton & Barto, eq. 6.8)"""
    return reward + discount * max(next_values)


def sarsa_target(reward, discount, next_values, next_action):
    """R + gamma Q(S', A'): A' is the action that will really be taken, a random one at times   (eq. 6.7)"""
    return reward + discount * next_values[next_action]


def expected_sarsa_target(reward, discount, next_values, epsilon):
    """R + gamma sum_a pi(a|S') Q(S', a): the expectation over A', pi being epsilon-greedy   (eq. 6.9)"""
    average = sum(next_values) / len(next_values)
    return reward + discount * (epsilon * average + (1 - epsilon) * max(next_values))


def double_q_target(reward, discount, next_values, other_next_values):
    """R + gamma Q2(S', argmax_a Q1(S', a)): one table chooses, the other one judges   (eq. 6.10)

    The maximum of noisy values is too high on average; what another table says of that action is not too high.
    """
    best = next_values.index(max(next_values))
    return reward + discount * other_next_values[best]


def play_episode(agent, env, run, rng, args):
    """Play one episode in `env` and learn from each step of it; `run` keeps the steps, and the episodes that ended."""
    obs, _ = env.reset()
    state = agent.state(obs, run)
    action = None
    total = 0.0
    for _ in range(episode_limit(args, env.spec)):  # 1,000 if nothing sets a limit; its end is a truncation
        epsilon, learning_rate = schedules(args, run.step, len(run.episodes))
        if action is None:  # else Sarsa has chosen it already
            action = epsilon_greedy(agent.values(state), epsilon, rng)
        obs, reward, terminated, truncated, _ = env.step(action + agent.first_action)
        reward = float(reward)  # one np.float32 would make its whole row np.float32, which a checkpoint does not keep
        run.step += 1
        next_state = agent.state(obs, run)
        next_action = None  # only Sarsa chooses it before the update
        discount = 0.0 if terminated else args.gamma  # truncated: S' still has a value

        q = agent.tables[0]  # the only table, or the first of two
        if args.algorithm == "q-learning":
            target = q_learning_target(reward, discount, q[next_state])
        elif args.algorithm == "sarsa":
            next_action = epsilon_greedy(q[next_state], epsilon, rng)
            target = sarsa_target(reward, discount, q[next_state], next_action)
        elif args.algorithm == "expected-sarsa":
            target = expected_sarsa_target(reward, discount, q[next_state], epsilon)
        else:  # double-q: a coin says which of the two tables is improved
            q, other = agent.tables if rng.random() < 0.5 else reversed(agent.tables)
            target = double_q_target(reward, discount, q[next_state], other[next_state])
        td_error = target - q[state][action]
        q[state][action] += learning_rate * td_error

        if not math.isfinite(td_error):
            run.check_finite(reward=reward, td_error=td_error)
        run.log(td_error=abs(td_error))  # metrics.csv has the mean of many steps
        total += reward
        state = next_state
        action = next_action
        if terminated or truncated:
            break
    run.log(epsilon=epsilon, learning_rate=learning_rate)
    run.episodes.append((run.step, total))


# ------------------------------------------------------------------------------------------------------- training


def train(args):
    """Train with `args`; return the final figures, which summary.json holds as well. UserError on bad input."""
    check_args(args)
    envs = make_envs(args, 1)
    agent = make_agent(args, envs)
    # explores: its training episodes hold random actions, so only evaluations say how good it is
    run = Run(args, agent, envs, log_every=math.ceil(args.total_timesteps / 200), explores=True)

    while not run.is_finished():
        if run.restarts:  # at the start, and after each checkpoint, which holds no episodes: all begin anew
            envs, _, generator = run.new_envs()  # seeded by a reset; the first time: those made above
            env = envs.envs[0]  # one environment is stepped directly, which is faster than through a vector of one
            rng = random.Random(int(generator.integers(2**63)))  # draws single numbers faster than NumPy's generator
        play_episode(agent, env, run, rng, args)
        run.write_what_is_due()  # a row of metrics.csv, an evaluation, a checkpoint
    draw_values(run.dir, args, agent, envs.envs[0])
    return run.finish()


# ===== helpers: settings, environments, the grid, files, pictures =====================================================

RANGES = dict.fromkeys("learning_rate gamma epsilon_start epsilon_min epsilon_decay".split(), (0, 1))
RANGES |= {"exploration_fraction": (1e-6, 1), "grid_size": (1, 1e6), "grid_low": (-1e9, 1e9), "grid_high": (-1e9, 1e9)}
# The columns of metrics.csv that are this script's own, and those of them that the learning curve shows as well.
FIGURES = ["epsilon", "learning_rate", "td_error"]
CURVE = ["td_error", "epsilon"]

# Settings that learn, per environment. What the user gives wins. (A run ends with the episode that reaches its total.)
TUNED = {
    "CliffWalking-v1": {"total_timesteps": 50_000, "learning_rate": 0.5, "anneal_lr": True, "gamma": 1.0},
    "Taxi-v4": {"total_timesteps": 300_000, "learning_rate": 0.5, "anneal_lr": True, "epsilon_min": 0.1},
    "FrozenLake-v1": {"total_timesteps": 300_000, "anneal_lr": True, "epsilon_min": 0.3},
    "Blackjack-v1": {"total_timesteps": 500_000, "learning_rate": 0.02, "anneal_lr": True, "gamma": 1.0,
                     "epsilon_min": 0.3},
    "MountainCar-v0": {"total_timesteps": 1_500_000, "learning_rate": 0.3, "anneal_lr": True, "epsilon_min": 0.0,
                       "grid_size": 40},
}  # fmt: skip


def tuned_settings(args):
    """The settings of TUNED for args.env_id."""
    return TUNED.get(args.env_id, {})


class ReturnLimit(gym.Wrapper):
    """Truncate an episode once its return reaches `limit`."""

    def __init__(self, env, limit):
        super().__init__(env)
        self.limit = limit

    def reset(self, **kwargs):
        """Begin an episode, whose return is 0 so far."""
        self.total = 0.0
        return self.env.reset(**kwargs)

    def step(self, action):
        """As the environment's, truncated at the limit."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.total += float(reward)
        return obs, reward, terminated, truncated or self.total >= self.limit, info


PLUGINS = {"ALE/": "ale_py", "MiniGrid": "minigrid", "BabyAI": "minigrid"}  # packages whose import registers these


def import_plugin(env_id):
    """Import the package that registers env_id, if it is one of PLUGINS. UserError if it is not installed."""
    for prefix, package in PLUGINS.items():
        if env_id.startswith(prefix):
            with blame(f"{env_id} needs another package: pip install {package.replace('_', '-')}", ImportError):
                importlib.import_module(package)


def find_wrapper(path):
    """The wrapper that a dotted path names; a name without a dot is that of a class in this script."""
    if path in globals():
        return globals()[path]
    with blame(f"there is no wrapper {path}", ImportError, AttributeError, ValueError):
        return pkgutil.resolve_name(path)


def episode_limit(args, spec=None):
    """Steps of the longest episode: the user's limit, else the environment's own, else Atari's half hour or 1,000."""
    default = 27_000 if args.env_id.startswith("ALE/") else 1_000
    return args.max_episode_steps or getattr(spec, "max_episode_steps", None) or default


def make_table_envs(args, num_envs, render_mode=None):
    """A vector of single environments, in its list `envs`. UserError, saying what to do, if it cannot be made."""
    import_plugin(args.env_id)
    with blame(f"--env-kwargs {args.env_kwargs} is not a JSON object", ValueError, TypeError, RecursionError):
        kwargs = dict(**json.loads(args.env_kwargs))
    if "max_episode_steps" in kwargs:
        raise UserError("the steps of an episode are limited by --max-episode-steps, not by --env-kwargs")
    if args.max_episode_steps is not None:
        kwargs["max_episode_steps"] = args.max_episode_steps
    if render_mode:
        kwargs["render_mode"] = render_mode
    wrappers = [find_wrapper(path) for path in args.wrappers]
    if args.max_episode_return is not None:
        wrappers.append(partial(ReturnLimit, limit=args.max_episode_return))
    what = f"cannot make {args.env_id}"
    expected = [gym.error.Error, ImportError]
    if args.wrappers or args.env_kwargs != "{}":  # whatever goes wrong now may be due to them
        what += f" with env_kwargs {args.env_kwargs} and wrappers {' '.join(args.wrappers) or 'none'}"
        expected = [Exception]
    if render_mode:
        what += f" with render_mode {render_mode}"
        expected += [TypeError]
    with blame(what, *expected):
        return gym.make_vec(args.env_id, num_envs, vectorization_mode="sync", wrappers=wrappers, **kwargs)


make_envs = make_table_envs  # as the run section calls it


WRAPPER_MODULES = ("gymnasium.wrappers.", "minigrid.wrappers.", "pettingzoo.utils.wrappers.")


def untrusted(args, given):
    """The flag without which a file may not ask for `args`, or ""; `given` are those of the command line.

    Trusted are registered ids, wrappers that this script or a library's wrapper module defines, and arguments without
    paths: all else may execute what a stranger has written.
    """
    if args.env_id != given.env_id:
        import_plugin(args.env_id)
        if args.env_id not in gym.registry:
            return f"--env-id {args.env_id}"
    if args.wrappers != given.wrappers:
        for path in args.wrappers:
            if path not in globals() and not path.startswith(WRAPPER_MODULES):
                return f"--wrappers {' '.join(args.wrappers)}"
            wrapper = find_wrapper(path)
            defined_in = f"{getattr(wrapper, '__module__', '')}."
            is_wrapper = isinstance(wrapper, type) and issubclass(wrapper, gym.Wrapper)
            if not is_wrapper or not defined_in.startswith((f"{__name__}.", *WRAPPER_MODULES)):
                return f"--wrappers {' '.join(args.wrappers)}"
    words = re.findall(r'"([^"]*)"', args.env_kwargs)
    plain = "\\" not in args.env_kwargs and all(re.fullmatch(r"[\w -]*", word) for word in words)
    if args.env_kwargs != given.env_kwargs and not plain:
        return f"--env-kwargs '{args.env_kwargs}'"
    return ""


def check_film(args):
    """UserError if no video of this environment can be made: better now than at the first evaluation."""
    with blame("--capture-video needs another package: pip install moviepy", ImportError):
        importlib.import_module("moviepy")
    if not args.env_id.startswith("ALE/"):
        with blame(f"--capture-video: {args.env_id} cannot be rendered", AssertionError, NotImplementedError):
            envs = make_envs(args, 1, "rgb_array")
            envs.reset(seed=args.seed)
            pictures = envs.render()
        envs.close()
        if not pictures or np.ndim(pictures[0]) != 3:
            raise UserError(f"--capture-video: render() of {args.env_id} gives no picture")


def write_video(path, frames, fps):
    """Write an mp4 of frames, each (height, width, 3)."""
    from moviepy import ImageSequenceClip  # slow to import

    path = Path(path)
    check_no_link(path.parent)
    with blame(f"cannot write {path}", OSError):
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)  # it may be a link to somewhere else
        ImageSequenceClip(frames, fps=fps).write_videofile(str(path), logger=None)


def box_edges(args, space):
    """The inner edges of `grid_size` equal bins for each number in a Box. UserError if its ends are no use."""
    lows = space.low.ravel().tolist() if args.grid_low is None else args.grid_low
    highs = space.high.ravel().tolist() if args.grid_high is None else args.grid_high
    numbers = math.prod(space.shape)
    if not len(lows) == len(highs) == numbers:
        counts = f"grid_low has {len(lows)} numbers, grid_high {len(highs)}, an observation {numbers}"
        raise UserError(f"{args.env_id}: {counts}")
    edges = []
    for low, high in zip(lows, highs):
        if not -1e9 < low < high < 1e9:
            raise UserError(f"{args.env_id}: no grid from {low} to {high}: say its ends by grid_low and grid_high")
        edges.append(np.linspace(low, high, args.grid_size + 1)[1:-1].tolist())
    return edges


def integer_edges(first, number):
    """The edges of bins that hold one of the integers first, first + 1, … each; there are `number` of them."""
    return list(range(int(first) + 1, int(first) + int(number)))


def make_q_table(args, envs):
    """A table of zeros for these environments. UserError if they have a space that this script cannot handle."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(action_space, spaces.Discrete):
        raise UserError(f"{args.env_id} has {action_space}; qlearning.py needs Discrete actions: use ppo.py")
    grid = isinstance(obs_space, spaces.Box)
    if (args.grid_low or args.grid_high) and not grid:
        raise UserError(f"{args.env_id} has {obs_space}: grid_low and grid_high are for a Box")
    parts = obs_space.spaces if isinstance(obs_space, spaces.Tuple) else [obs_space]
    if grid:
        bins = [args.grid_size] * math.prod(obs_space.shape)
    elif isinstance(obs_space, spaces.MultiDiscrete):
        bins = obs_space.nvec.ravel().tolist()
    elif all(isinstance(part, spaces.Discrete) for part in parts):
        bins = [int(part.n) for part in parts]
    else:
        wanted = "Discrete, MultiDiscrete, a Tuple of Discrete, or a Box"
        raise UserError(f"{args.env_id} has observations {obs_space}; qlearning.py needs {wanted}: use ppo.py")
    num_tables = 2 if args.algorithm == "double-q" else 1
    if num_tables * math.prod(bins) * int(action_space.n) > 10**7:
        raise UserError(f"{args.env_id} needs a table of over ten million numbers: a smaller grid_size, or ppo.py")
    if grid:
        edges = box_edges(args, obs_space)
    elif isinstance(obs_space, spaces.MultiDiscrete):
        edges = [integer_edges(first, number) for first, number in zip(obs_space.start.ravel(), bins)]
    else:
        edges = [integer_edges(part.start, part.n) for part in parts]
    agent = QTable(edges, action_space, num_tables)
    agent.args = args  # for evaluate(agent, agent.args) in a notebook
    return agent


make_agent = make_q_table  # as the run section calls it

STATE = ".npz"  # how the names of checkpoints and models end


def write_npz(state, file):
    """Write the table as the array `q`, and all else as JSON, to an open file."""
    rest = {name: value for name, value in state.items() if name != "agent"}
    np.savez(file, q=state["agent"]["q"], rest=json.dumps(rest))


def read_npz(path):
    """What write_npz wrote. Nothing in the file is executed."""
    with np.load(path, allow_pickle=False) as file:
        return json.loads(str(file["rest"])) | {"agent": {"q": file["q"]}}


write_state = write_npz  # as the run section calls them
read_state = read_npz


SIGNS = {  # what values.png shows for each action of these environments, and how to read it
    "CliffWalkingEnv": ("↑→↓←", "C: cliff, G: goal"),
    "FrozenLakeEnv": ("←↓→↑", "H: hole, G: goal"),
    "TaxiEnv": ("↓↑→←PD", "P: pick up, D: drop off"),
    "BlackjackEnv": ("SH", "S: stick, H: hit"),
}


def draw_values(folder, args, agent, env):
    """Write values.png and say where it lies: how good each state is, max_a Q(s, a), and the best action in it.

    For the grid worlds and Blackjack of Gymnasium, and for observations of two numbers. Grey: nothing learnt there.
    """
    from matplotlib.figure import Figure  # slow to import

    world = env.unwrapped
    kind = type(world).__name__
    unchanged = env.observation_space == world.observation_space and env.action_space == world.action_space
    q = np.array(agent.tables).mean(0)
    values = np.where((q != 0).any(1), q.max(1), np.nan)
    best = q.argmax(1)
    title = f"{args.env_id}, {args.algorithm}: value of each state, max Q(s, a), and best action"
    if kind in SIGNS and unchanged:
        figure = Figure(figsize=(10, 9) if kind == "TaxiEnv" else (11, 5), layout="constrained")
        draw_panels(figure, world, values, best)
        title += f"   ({SIGNS[kind][1]})"
    elif len(agent.bins) == 2 and min(agent.bins) > 2:
        figure = Figure(figsize=(11, 5), layout="constrained")
        draw_surface(figure, agent, values.reshape(agent.bins), best.reshape(agent.bins))
    else:
        return
    figure.suptitle(title)
    path = Path(folder, "values.png")
    write_file(path, lambda file: figure.savefig(file, dpi=120, format="png"))
    tqdm.write(f"values and best actions: {path}")  # above the progress bar


def panels_of(world, signs):
    """{title: states (rows, columns)} of the heat maps for an environment in SIGNS; marks holes, cliff and goals."""
    states = np.arange(len(signs))
    kind = type(world).__name__
    if kind == "CliffWalkingEnv":
        signs[-11:] = "C"
        signs[-1] = "G"
        return {"": states.reshape(world.shape)}
    if kind == "FrozenLakeEnv":
        letters = world.desc.astype(str).ravel()
        marked = np.isin(letters, ["H", "G"])
        signs[marked] = letters[marked]
        return {"": states.reshape(world.desc.shape)}
    if kind == "TaxiEnv":
        stops = ["red", "green", "yellow", "blue", "in the taxi"]
        cells = states.reshape(5, 5, 5, 4)  # row, column, where the passenger is, where to
        tasks = [(place, goal) for goal in range(4) for place in range(5) if place != goal]
        return {f"{stops[place]}, to {stops[goal]}": cells[:, :, place, goal] for place, goal in tasks}
    cells = states.reshape(32, 11, 2)[21:11:-1, 1:]  # sums of 21 down to 12; below, there is nothing to decide
    return {"usable ace": cells[:, :, 1], "no usable ace": cells[:, :, 0]}


def draw_panels(figure, world, values, best):
    """Heat maps of the values, each cell with a sign for its best action, for the environments in SIGNS."""
    kind = type(world).__name__
    signs = np.array([*SIGNS[kind][0]])[best]
    signs[np.isnan(values)] = ""
    panels = panels_of(world, signs)
    low = np.nanmin(values, initial=0)
    high = np.nanmax(values, initial=0)
    rows = math.ceil(len(panels) / 4)
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
    figure.colorbar(image, ax=axes, label="max Q(s, a)")


def draw_surface(figure, agent, values, best):
    """The values as a surface over a grid of two dimensions, and a map of the best actions."""
    from matplotlib import colormaps

    centres = []  # of the bins
    for edges in agent.edges:
        width = edges[1] - edges[0]
        centres.append(edges[0] + width * np.arange(-0.5, len(edges)))
    x, y = centres
    left = figure.add_subplot(121, projection="3d")
    left.plot_surface(*np.meshgrid(x, y, indexing="ij"), values, cmap="viridis", rcount=100, ccount=100)
    left.set_box_aspect((1, 1, 0.6))
    left.set_zlabel("max Q(s, a)")
    right = figure.add_subplot(122)
    actions = agent.shape[2]
    colors = colormaps["viridis"].resampled(actions)
    best = np.where(np.isnan(values), np.nan, best)
    image = right.pcolormesh(x, y, best.T, cmap=colors, vmin=-0.5, vmax=actions - 0.5)
    right.set_facecolor("lightgrey")
    figure.colorbar(image, ax=right, ticks=range(actions), label="best action")
    for axis in (left, right):
        axis.set(xlabel="first number of the observation", ylabel="second number")


# ===== run: the same in every script ==================================================================================
# Flags, evaluation, run folder, checkpoint, curve. What it knows of the script: Args, RANGES, FIGURES, CURVE and train;
# make_envs, episode_limit, make_agent, tuned_settings, untrusted; check_film, write_video; STATE, write_state and
# read_state.


class UserError(Exception):
    """Something the user can fix: shown as one line, with exit code 2."""


@contextmanager
def blame(what, *expected):
    """Turn an exception of the expected classes into a UserError that begins with `what`."""
    try:
        yield
    except expected as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{what[:500]} ({reason[:300]})") from None


COMMON_RANGES = {"num_envs": (1, 1e5), "eval_episodes": (1, 1e4), "seed": (0, 2**32 - 1)}
COMMON_RANGES |= {"total_timesteps": (1, 1e15), "max_episode_steps": (1, 1e9)}
COMMON_RANGES |= {"stop_at_return": (-1e15, 1e15), "max_episode_return": (-1e15, 1e15)}
NOT_FROM_A_FILE = "resume evaluate model render config run_dir".split()  # what to do, not how to train
EVALUATION = 10_000  # added to the seed: evaluations start from other states than training does
MAY_CHANGE = "total_timesteps stop_at_return eval_every eval_episodes capture_video device progress compile".split()


def tuned(*flags, **given):
    """Args from flags or keywords: tuned("--env-id", "Pendulum-v1") or tuned(env_id="Pendulum-v1").

    What is not given comes from the run that is resumed or evaluated, else from `config`, else from TUNED.
    """
    flags = [*flags, *as_flags(given)]
    first = tyro.cli(Args, args=[flag for flag in flags if flag not in ("-h", "--help")])
    if "" in (first.resume, first.evaluate, first.config, first.run_dir):
        raise UserError("the name of a run folder or config is empty")
    run_dir = first.resume or first.evaluate
    if run_dir and (first.config or first.run_dir or (first.resume and first.evaluate)):
        raise UserError("--resume and --evaluate name a run: only one of them, without --run-dir and --config")
    path = f"{run_dir}/config.json" if run_dir else first.config
    defaults = read_config(path, first) if path else tyro.cli(Args, args=as_flags(tuned_settings(first)))
    return tyro.cli(Args, args=flags, default=defaults, description=sys.modules[__name__].__doc__)


def as_flags(settings):
    """A dict of settings as the command-line flags that say the same."""
    flags = []
    for name, value in settings.items():
        if isinstance(value, (list, tuple)):
            flags += [f"--{name}", *map(str, value)]
        elif isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags.append(f"--{name}={value}")
    return flags


def read_config(path, given):
    """Args from the config.json of a run. UserError if it is not one, or asks for code that is not `given` as well."""
    with blame(f"{path} is not the config.json of a run", OSError, ValueError, LookupError, TypeError, RecursionError):
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        stored = dict(config["args"])
        another = f"{path} is of another script ({config.get('script')!r:.50}) or version, or damaged"
    words = [word for value in stored.values() if isinstance(value, list) for word in value]
    # No word of a file may become a flag of its own.
    flags = [word for word in words if isinstance(word, str) and word.startswith("-")]
    lacking = set(vars(Args())) - set(stored) if given.resume or given.evaluate else []  # a run's own lacks nothing
    if foreign := [name for name in stored if name not in vars(Args())] + flags + sorted(lacking):
        raise UserError(f"{another}: {foreign[0]!r:.100}")
    dropped = NOT_FROM_A_FILE + (["device", "capture_video"] if given.evaluate else [])  # those were for training
    complaint = StringIO()
    try:
        with redirect_stderr(complaint):  # tyro checks names and types
            args = tyro.cli(Args, args=as_flags({k: v for k, v in stored.items() if k not in dropped}))
    except SystemExit:
        reason = re.sub(r"[─│╭╮╰╯\s]+", " ", complaint.getvalue())
        raise UserError(f"{another}: {reason[:300]}") from None
    if flag := untrusted(args, given):
        raise UserError(f"{path} asks for what may execute anything; if you trust it, add {flag[:300]}")
    return args


def check_args(args):
    """UserError that names the first argument that is out of its range."""
    for name, value in vars(args).items():
        low, high = (COMMON_RANGES | RANGES).get(name, (0, 1e15))
        for number in value if isinstance(value, tuple) else [value]:
            if isinstance(number, (int, float)) and not low <= number <= high:
                raise UserError(f"{name} must lie between {low:g} and {high:g}")


def evaluate(agent, args, episodes=100, seed=0, render=False, video=None):
    """(mean, standard deviation) of the undiscounted return of deterministic episodes.

    Every episode has a slot of its own: counting the first to finish would favour the short ones. `render` opens a
    window; `video` is the path of an mp4 of the first slot (of Atari, which cannot render here, what the agent sees).
    """
    atari = args.env_id.startswith("ALE/")
    envs = make_envs(args, episodes, "human" if render else "rgb_array" if video and not atari else None)
    obs, _ = envs.reset(seed=seed)
    if hasattr(agent, "begin_episodes"):  # a recurrent network forgets what it has seen
        agent.begin_episodes(episodes)
    returns = np.zeros(episodes)
    playing = np.ones(episodes, bool)
    frames = []
    for _ in range(episode_limit(args, envs.spec)):
        if video:
            frames.append(np.stack([obs[0, -1]] * 3, -1) if atari else envs.render()[0])
        obs, rewards, terminated, truncated, _ = envs.step(agent.act(obs))
        returns += rewards * playing
        playing &= ~(terminated | truncated)
        if not playing.any():
            break
    envs.close()
    if video:
        write_video(video, frames, envs.metadata.get("render_fps", 30))
    return float(returns.mean()), float(returns.std())


def write_file(path, write):
    """Call write(file), then rename the file to `path`: a reader finds the old file or the new one, never a half."""
    temporary = path.with_name(f"{path.name}.tmp")
    with blame(f"cannot write {path}", OSError, RuntimeError):
        temporary.unlink(missing_ok=True)  # it may be a link to somewhere else: the new file is made here
        with temporary.open("xb") as file:
            write(file)
        os.replace(temporary, path)


def check_no_link(folder):
    """UserError if a part of a run folder is a link: what a run writes stays in its folder."""
    if folder.is_symlink():
        raise UserError(f"{folder} is a link; a run writes nothing outside its own folder")


def read_weights(path, args, agent):
    """Read a model or checkpoint without executing anything in it; load its weights. Returns the whole state."""
    try:
        state = read_state(path)
        if state["env_id"] == args.env_id:
            agent.load_state_dict(state["agent"])
            return state
        reason = f"it is of {state['env_id']}"
    except Exception as error:  # a damaged file can raise anything, and torch's message advises unsafe loading
        reason = type(error).__name__
    raise UserError(f"{path} is missing, damaged, or of another script, environment or network: {reason}")


def load(run_dir, model="best", **given):
    """The agent saved by a run; `model` is best, last or a step. UserError if missing or damaged.

    What a file may not ask for is given here: load(run_dir, env_id="my_module:Mine-v0").
    """
    return load_agent(tuned(evaluate=str(run_dir), model=str(model), **given))


def load_agent(args):
    """The agent that args.evaluate and args.model name."""
    check_args(args)
    envs = make_envs(args, 1)
    agent = make_agent(args, envs)
    envs.close()
    name = "checkpoint" if args.model == "last" else f"models/{args.model}"
    read_weights(Path(args.evaluate, name + STATE), args, agent)
    return agent


class Run:
    """Everything a run keeps besides what it learns: folder, steps and episodes, evaluations, checkpoints, curve.

    `parts` have state_dict and load_state_dict, and are saved with the agent. A row of metrics.csv is written every
    `log_every` steps, or at each call of write_what_is_due. `explores`: training episodes explore, so only evaluations
    decide whether to stop at a return.

    A checkpoint is a restart: it holds no environment and no generator. After writing one, training makes new
    environments and seeds everything from (seed, step), and a resumed run does the same. So a killed and resumed run
    gives the same numbers, bit for bit, as one that was left alone.
    """

    def __init__(self, args, agent, envs, log_every=0, explores=False, **parts):
        self.args = Args(**asdict(args))  # a copy: nobody else can change it
        self.agent = agent
        self.envs = envs
        self.parts = parts
        self.log_every = log_every
        self.explores = explores
        self.step = 0  # environment steps, without reset rows
        self.seconds = 0.0
        self.episodes = []  # (step, return) of each training episode
        self.evaluations = []  # (step, seconds, mean, standard deviation, episodes)
        self.figures = {}  # logged since the last row of metrics.csv
        self.restarts = True  # whether training begins anew: at first, and after each checkpoint
        self.envs_are_new = True
        tenth = math.ceil(args.total_timesteps / 10)
        longest = min(episode_limit(args, envs.spec), 2_000)
        enough = 10 * longest * envs.num_envs  # with shorter intervals, few long episodes would end
        self.eval_every = args.eval_every or tenth
        self.checkpoint_every = args.checkpoint_every or max(tenth, enough)
        if args.capture_video:
            check_film(args)
        stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}"
        name = f"{re.sub('[/:]', '-', args.env_id)}__{Path(__file__).stem}__{args.seed}__{stamp}"
        self.dir = Path(args.resume or args.run_dir or f"runs/{name}")
        args.folder = self.dir  # for main, should it be interrupted
        self.open_folder()
        print(f"{args.env_id} -> {self.dir};", *(f"{key}={getattr(args, key)}" for key in tuned_settings(args)))
        self.begun = time.time() - self.seconds
        self.drawn = time.time()
        self.last_step = self.step  # when write_what_is_due was last called
        bar = {"unit": " steps", "unit_scale": True, "disable": not args.progress}
        self.bar = tqdm(total=args.total_timesteps, initial=self.step, **bar)

    def open_folder(self):
        """Make the run folder, or restore its last checkpoint; write config.json."""
        checkpoint = self.dir / f"checkpoint{STATE}"
        with blame(f"cannot make {self.dir}", OSError):
            check_no_link(self.dir / "models")
            (self.dir / "models").mkdir(parents=True, exist_ok=True)
        if checkpoint.exists() and not self.args.resume:
            raise UserError(f"{self.dir} holds a run already: --resume it, or choose another --run-dir")
        if (self.dir / "config.json").exists():  # it is resumed, or begun once more after an early end
            stored = read_config(self.dir / "config.json", self.args)
            free = MAY_CHANGE + NOT_FROM_A_FILE + ([] if checkpoint.exists() else ["checkpoint_every"])
            changed = [key for key in vars(stored) if key not in free and vars(stored)[key] != vars(self.args)[key]]
            if changed:
                raise UserError(f"{self.dir} holds a run with another {', '.join(changed)}, which cannot change")
        metrics = ""
        if checkpoint.exists():  # else it is new, or was killed before its first checkpoint
            state = read_weights(checkpoint, self.args, self.agent)
            with blame(f"{self.dir} is damaged", OSError, LookupError, TypeError, ValueError, RuntimeError):
                step, seconds, episodes, evaluations, metrics, intervals = state["run"]
                self.step = int(step)
                self.seconds = float(seconds)
                self.episodes = [(int(at), float(total)) for at, total in episodes]
                self.evaluations = [(int(at), *map(float, figures)) for at, *figures in evaluations]
                eval_every, self.checkpoint_every = map(int, intervals)  # kept, also if there are more steps now
                self.eval_every = self.args.eval_every or eval_every
                for part_name, part in self.parts.items():
                    part.load_state_dict(state[part_name])
        if (self.dir / "config.json").exists():
            with blame(f"{self.dir} is damaged", OSError):
                self.forget_later_models()
        git = f"git -C {quote(str(Path(__file__).parent))} describe --always --dirty --exclude='*' --abbrev=40"
        config = {
            "script": Path(__file__).stem,
            "args": asdict(self.args),
            "commit": os.popen(f"{git} 2>/dev/null").read().strip(),  # ends in -dirty if files were changed since
            "versions": {name: version(name) for name in ("torch", "gymnasium", "numpy") if name in sys.modules},
            "machine": f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores",
        }
        write_file(self.dir / "config.json", lambda file: file.write(json.dumps(config, indent=1).encode()))
        write_file(self.dir / "metrics.csv", lambda file: file.write(metrics.encode()))

    def forget_later_models(self):
        """Delete the models that a killed run saved after its last checkpoint; put the best of those before back."""
        models = self.dir / "models"
        steps = [step for step, *_ in self.evaluations]
        for path in models.glob(f"*{STATE}"):
            if path.stem.isdigit() and int(path.stem) not in steps:
                path.unlink()
        (models / f"best{STATE}").unlink(missing_ok=True)
        if self.evaluations:
            _, best = max((mean, step) for step, _, mean, _, _ in self.evaluations)
            weights = (models / f"{best}{STATE}").read_bytes()
            write_file(models / f"best{STATE}", lambda file: file.write(weights))

    def new_envs(self):
        """(environments, their first observations, a NumPy generator), made anew and seeded from (seed, step).

        A reset with a seed is not enough: Box2D's environments keep traces of the episodes before.
        """
        if not self.envs_are_new:
            self.envs.close()
            self.envs = make_envs(self.args, self.envs.num_envs)
        rng = np.random.default_rng([self.args.seed, self.step])
        obs, _ = self.envs.reset(seed=int(rng.integers(2**31)))
        self.check_finite(observation=obs)
        self.totals = np.zeros(self.envs.num_envs)  # returns of the episodes under way
        self.envs_are_new = False
        self.restarts = False
        return self.envs, obs, rng

    def count(self, next_obs, rewards, ended, reset_rows):
        """Count one step of all environments. UserError if it holds a NaN or an infinity."""
        self.step += len(rewards) - int(reset_rows.sum())
        self.check_finite(observation=next_obs, reward=rewards)
        self.totals += rewards
        if ended.any():
            self.episodes += [(self.step, total) for total in self.totals[ended].tolist()]
            self.totals[ended] = 0

    def check_finite(self, **values):
        """UserError naming the environment, the step and the field if a value holds a NaN or an infinity."""
        for name, value in values.items():
            if not np.isfinite(value).all():
                raise UserError(f"{self.args.env_id}, step {self.step}: {name} is NaN or infinite")

    def log(self, **figures):
        """Collect figures (numbers, or tensors of one number); the next row of metrics.csv holds their means."""
        for name, value in figures.items():
            self.figures.setdefault(name, []).append(value)

    def write_what_is_due(self):
        """Write what fell due since the last call: a row of metrics.csv, an evaluation, a checkpoint, the curve."""
        self.seconds = time.time() - self.begun
        self.bar.update(self.step - self.last_step)
        evaluation = self.passed(self.eval_every) or self.is_finished()
        checkpoint = self.passed(self.checkpoint_every)
        row = evaluation or checkpoint or self.passed(self.log_every)
        if row:
            self.write_row()
        if evaluation:
            self.write_evaluation()
        if row and time.time() - self.drawn > 30:  # and at the end: `finish`
            self.draw_curve()
        if checkpoint or self.is_finished():
            self.write_checkpoint()
        self.last_step = self.step

    def passed(self, every):
        """Whether the steps since the last call have passed a multiple of `every`; 0 means every step."""
        return self.step // max(1, every) > self.last_step // max(1, every)

    def is_finished(self):
        """Whether all steps are taken, or the return that --stop-at-return asks for is reached."""
        goal = self.args.stop_at_return
        if self.step >= self.args.total_timesteps:
            return True
        if goal is None:
            return False
        if self.explores:
            return bool(self.evaluations) and self.evaluations[-1][2] >= goal  # its mean
        return len(self.episodes) >= 100 and self.mean_return() >= goal

    def mean_return(self):
        """Mean return of the last 100 training episodes; NaN before the first."""
        recent = [total for _, total in self.episodes[-100:]]
        return sum(recent) / len(recent) if recent else math.nan

    def write_row(self):
        """Append a row to metrics.csv: the counters, and the means of FIGURES since the last row."""
        row = {"step": self.step, "seconds": self.seconds, "sps": self.step / self.seconds}
        row |= {"return_mean": self.mean_return(), "episodes": len(self.episodes)}
        means = {name: sum(map(float, values)) / len(values) for name, values in self.figures.items()}
        self.check_finite(**means)
        self.figures = {}
        row |= {name: means.get(name, math.nan) for name in FIGURES}
        path = self.dir / "metrics.csv"
        with blame(f"cannot write {path}", OSError), path.open("a") as file:
            if file.tell() == 0:
                file.write(",".join(row) + "\n")
            file.write(",".join(f"{x:.8g}" if isinstance(x, float) else str(x) for x in row.values()) + "\n")
        self.bar.set_postfix_str(f"mean return {row['return_mean']:.1f}", refresh=False)

    def write_evaluation(self):
        """Evaluate; save the weights in models/ as STEP, and as best if none were better; film if asked."""
        seed = self.args.seed + EVALUATION
        episodes = self.args.eval_episodes
        mean, std = evaluate(self.agent, self.args, episodes, seed)
        self.check_finite(evaluation=mean)
        best = all(mean >= earlier for _, _, earlier, _, _ in self.evaluations)
        self.evaluations.append((self.step, self.seconds, mean, std, float(episodes)))
        weights = {"env_id": self.args.env_id, "agent": self.agent.state_dict()}
        for name in [self.step, "best"] if best else [self.step]:
            write_file(self.dir / f"models/{name}{STATE}", partial(write_state, weights))
        rows = ["step,seconds,return_mean,return_std,episodes"]
        rows += [f"{step}," + ",".join(f"{x:.8g}" for x in figures) for step, *figures in self.evaluations]
        write_file(self.dir / "evaluations.csv", lambda file: file.write("\n".join([*rows, ""]).encode()))
        if self.args.capture_video:
            evaluate(self.agent, self.args, 1, seed, video=self.dir / f"videos/{self.step}.mp4")

    def write_checkpoint(self):
        """Write the checkpoint; training restarts from here, whether or not the run is killed later."""
        metrics = (self.dir / "metrics.csv").read_text()
        intervals = self.eval_every, self.checkpoint_every
        counters = self.step, self.seconds, self.episodes, self.evaluations, metrics, intervals
        state = {"env_id": self.args.env_id, "agent": self.agent.state_dict(), "run": counters}
        state |= {name: part.state_dict() for name, part in self.parts.items()}
        write_file(self.dir / f"checkpoint{STATE}", partial(write_state, state))
        self.restarts = True

    def draw_curve(self):
        """Write learning_curve.png: returns of episodes, their running mean, evaluations; below, CURVE's figures."""
        from matplotlib.figure import Figure  # slow to import

        metrics = np.genfromtxt(self.dir / "metrics.csv", delimiter=",", names=True, ndmin=1)
        figure = Figure(figsize=(9, 7), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        steps, returns = np.array(self.episodes, float).reshape(-1, 2).T
        top.plot(steps, returns, ".", alpha=0.25, markersize=3, label="training episode")
        top.plot(metrics["step"], metrics["return_mean"], color="midnightblue", label="mean of the last 100")
        steps, _, means, stds, _ = np.array(self.evaluations, float).reshape(-1, 5).T
        top.errorbar(steps, means, stds, fmt="o-", color="tab:orange", capsize=3, label="evaluation, ± one deviation")
        top.set(title=f"{self.args.env_id}, seed {self.args.seed}", ylabel="return of an episode")
        for name in CURVE:
            bottom.plot(metrics["step"], metrics[name], label=name.replace("_", " "))
        large = max(np.abs(np.nan_to_num(metrics[name])).max() for name in CURVE) > 100
        bottom.set(xlabel="environment steps", ylabel="mean since the last row", yscale="symlog" if large else "linear")
        bottom.xaxis.set_major_formatter("{x:,.0f}")
        for axis in (top, bottom):
            axis.legend()
            axis.grid(alpha=0.3)
        write_file(self.dir / "learning_curve.png", lambda file: figure.savefig(file, dpi=120, format="png"))
        self.drawn = time.time()

    def finish(self):
        """Write summary.json, print the last two lines, return the summary."""
        if not self.evaluations or self.evaluations[-1][0] != self.step:  # resumed with fewer steps than it had taken
            self.write_evaluation()
        self.draw_curve()
        self.bar.close()
        self.envs.close()
        _, _, mean, std, episodes = self.evaluations[-1]
        summary = {"eval_return_mean": mean, "eval_return_std": std, "eval_episodes": int(episodes)}
        summary |= {"global_step": self.step, "seconds": self.seconds, "steps_per_second": self.step / self.seconds}
        write_file(self.dir / "summary.json", lambda file: file.write(json.dumps(summary, indent=1).encode()))
        print(f"evaluation: {mean:.1f} ± {std:.1f} over {episodes:.0f} episodes, after {self.step:,} steps")
        print(f"learning curve: {self.dir / 'learning_curve.png'}   to watch it play: --evaluate {self.dir} --render")
        return summary


def main():
    """Train, or evaluate, as the flags say. What the user can mend is one line on stderr and exit code 2."""
    sys.stdout.reconfigure(errors="replace")  # a terminal without a ± gets a ?
    args = None
    try:
        args = tuned(*sys.argv[1:])
        if not args.evaluate:
            train(args)
            return
        agent = load_agent(args)
        seed = args.seed + 2 * EVALUATION  # other episodes than those by which the best weights were chosen
        mean, std = evaluate(agent, args, args.eval_episodes, seed)
        print(f"{args.model} weights: {mean:.2f} ± {std:.2f} over {args.eval_episodes} episodes of {args.env_id}")
        if args.capture_video:
            check_film(args)
            evaluate(agent, args, 1, seed, video=Path(args.evaluate, f"videos/{args.model}.mp4"))
        if args.render:
            evaluate(agent, args, 1, seed, render=True)
    except UserError as error:
        tqdm.write(f"{sys.argv[0]}: {error}", file=sys.stderr)  # above the progress bar, if there is one
        sys.exit(2)
    except KeyboardInterrupt:
        folder = getattr(args, "folder", None)  # a run has begun
        saved = folder and Path(folder, f"checkpoint{STATE}").exists()
        how = "; to go on" if saved else " before its first checkpoint; to begin anew"
        tqdm.write(f"stopped{how}: --resume {folder}" if folder else "stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
