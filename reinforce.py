# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.3,<2", "ufal-pybox2d>=2.3.10.5",
#   "numpy>=1.26", "matplotlib>=3.8", "tyro>=1.0", "tqdm>=4.66", "moviepy>=2.0",
# ]
# ///
"""REINFORCE and A2C, the simplest policy gradients, all of it, in this one file.

Play episodes. Make each action more likely if the rewards after it were more than expected, less
likely if they were less. What was expected is the baseline b: 0, or a critic's value.

    grad J = E[ sum_t grad log pi(a_t|s_t) (G_t - b(s_t)) ]   (from Sutton & Barto, eq. 13.11)

J is the expected sum of an episode's rewards, G_t the return from step t on. This is exact for gamma =
1. For smaller gamma, G_t is discounted, but the book's factor gamma^t is left out, as nearly everywhere:
with it, late steps would hardly count. REINFORCE waits for the ends of episodes. A2C, which is A3C
made synchronous, updates every n steps and bootstraps: the critic's value replaces the rewards that
follow (arXiv 1602.01783, section 4). REINFORCE does so, if it has a critic, only where a time limit
cuts an episode off.

    python reinforce.py                                # CartPole-v1, under a minute
    python reinforce.py --baseline none --no-norm-adv  # without any baseline
    python reinforce.py --n-step 32 --no-norm-adv      # A2C
    python reinforce.py --evaluate runs/DIR --render

Papers: REINFORCE Williams 1992 (doi 10.1007/BF00992696), A3C arXiv 1602.01783. The algorithm ends
at "# ===== helpers"; below it are settings, parts of the networks, environments and the run folder.
"""

import ast
import importlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium import spaces
from torch import nn
from tqdm import tqdm


@dataclass(kw_only=True)
class Args:
    """Every flag and its default; TUNED (below) has others, as for CartPole. A given flag wins."""

    # algorithm
    baseline: Literal["none", "value"] = "value"  # what is subtracted from returns; value: a critic
    n_step: int | None = None  # A2C: steps per environment and update; None: whole episodes, REINFORCE
    learning_rate: float = 1e-3  # Adam's learning rate
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    num_envs: int = 16  # environments side by side; REINFORCE: episodes per update
    gamma: float = 0.99  # discount
    norm_adv: bool = True  # normalise each update's advantages: a baseline even without a critic
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the critic's loss, if there is one: half the mean squared error
    max_grad_norm: float = 0.5  # a longer gradient, of actor and critic together, is scaled down to it
    hidden_sizes: tuple[int, ...] = (64, 64)  # of actor and critic, as --hidden-sizes 64 64
    checkpoint_every: int = 0  # steps between checkpoints, which restart all episodes; 0: 5,000 * num_envs or more
    # run
    env_id: str = "CartPole-v1"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths, applied in order; with arguments: a.B(size=4)
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    async_envs: bool = False  # a process for each environment: for environments slower than 1 ms a step
    total_timesteps: int = 500_000  # steps to learn from (skipped ones do not count)
    stop_at_return: float | None = None  # stop once the mean of the last 100 training episodes reaches this
    seed: int = 1  # seed of everything that is drawn at random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps; auto: the CPU
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, apart from training, without exploration
    capture_video: bool = False  # film an episode at each evaluation
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # weights that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window; with --capture-video, film it instead
    config: str | None = None  # config.json of another run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__SCRIPT__SEED__TIME
    progress: bool = True  # show the progress bar


# ----------------------------------------------------------------------------------------- networks
class PolicyAgent(nn.Module):
    """An actor, which gives a distribution over actions, and a critic, the value of an observation.

    Actions are Discrete; observations are vectors.
    """

    def __init__(self, observation_space, action_space, args, device="cpu"):
        super().__init__()
        self.args = args
        self.device = device
        self.observation_shape = observation_space.shape
        self.action_space = action_space
        inputs = spaces.flatdim(observation_space)
        num_actions = int(action_space.n)
        self.actor = mlp(inputs, args.hidden_sizes, num_actions, gain=0.01)  # nearly uniform at first
        self.critic = mlp(inputs, args.hidden_sizes, 1, gain=1.0)
        self.to(device)

    def features(self, obs):
        """Observations (B, …), an array or a tensor, as vectors (B, inputs)."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.device)
        return obs.reshape(len(obs), -1)

    def distribution(self, obs):
        """The policy pi(.|s), one of torch's distributions, for observations (B, …)."""
        return torch.distributions.Categorical(logits=self.actor(self.features(obs)))

    @torch.no_grad()
    def sample(self, obs):
        """Actions (B,) drawn from the policy, from 0 on."""
        return self.distribution(obs).sample().cpu().numpy()

    def value(self, obs):
        """V(s), (B,), of observations (B, …)."""
        return self.critic(self.features(obs)).squeeze(1)

    @torch.no_grad()
    def act(self, obs):
        """The most likely actions (B,) for observations (B, …), as the environment numbers them."""
        if obs.shape[1:] != self.observation_shape:
            raise ValueError("act takes a batch of observations; for one, it is act(obs[None])[0]")
        return self.to_env(self.distribution(obs).mode.cpu().numpy())

    def to_env(self, actions):
        """Actions as the environment numbers them, not always from 0 on."""
        return actions + self.action_space.start


# ------------------------------------------------------------------------------- returns and buffer
def compute_returns(rewards, next_values, terminated, truncated, gamma):
    """Discounted returns (T, N), also called rewards-to-go.

        G_t = r_t + gamma G_{t+1}

    After a truncation, or the end of the rollout, V(s_{t+1}) takes the place of G_{t+1}; after a
    termination, 0 does.
    """
    next_values = next_values * ~terminated
    ends = terminated | truncated
    returns = torch.empty_like(rewards)
    next_return = next_values[-1]
    for t in reversed(range(len(rewards))):
        next_return = torch.where(ends[t], next_values[t], next_return)
        returns[t] = rewards[t] + gamma * next_return
        next_return = returns[t]
    return returns


class Rollout:
    """Steps of N environments, in the order in which they were played.

    A row is a step of one environment. The row after an episode's end has the final observation; its
    action is ignored, and the step only resets (next-step autoreset). A2C skips these rows, that is,
    does not learn from them. REINFORCE skips all rows after an environment's first episode.
    """

    def __init__(self):
        self.obs = []
        self.actions = []
        self.rewards = []
        self.terminated = []
        self.truncated = []
        self.skipped = []

    def add(self, obs, actions, rewards, terminated, truncated, skipped):
        """Add a step of all environments: arrays (N, …)."""
        self.obs.append(obs)
        self.actions.append(actions)
        self.rewards.append(rewards)
        self.terminated.append(terminated)
        self.truncated.append(truncated)
        self.skipped.append(skipped)

    def batch(self, agent, last_obs):
        """(observations (B, …), actions (B,), returns (B,)) of all rows that were not skipped, as tensors.

        Where rewards are cut off, the critic's value replaces the rest; without a critic, 0 does.
        """
        tensor = lambda steps, dtype=None: torch.as_tensor(np.array(steps, dtype), device=agent.device)
        rewards = tensor(self.rewards, np.float32)
        next_values = torch.zeros_like(rewards)
        if agent.args.baseline == "value":
            next_obs = tensor([*self.obs[1:], last_obs], np.float32)  # obs[t + 1] followed obs[t], even a final one
            with torch.no_grad():
                next_values = agent.value(next_obs.flatten(0, 1)).view_as(rewards)
        ends = tensor(self.terminated), tensor(self.truncated)
        returns = compute_returns(rewards, next_values, *ends, agent.args.gamma)
        kept = ~tensor(self.skipped)
        return tensor(self.obs, np.float32)[kept], tensor(self.actions)[kept], returns[kept]


# ------------------------------------------------------------------------------------------- losses
def policy_gradient_loss(log_probs, advantages):
    """A scalar, of tensors (B,). With A as below, its gradient estimates -grad J / (an episode's mean length).

    L = -E[ log pi(a|s) A ],   A = G - b(s)   (Sutton & Barto, eq. 13.11)
    """
    return -(log_probs * advantages).mean()


def normalize(advantages):
    """Advantages (B,) with zero mean and unit (population) standard deviation."""
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


def actor_critic_loss(agent, obs, actions, returns, args):
    """The loss of a batch, to be minimised, and a dict of metrics to log."""
    distribution = agent.distribution(obs)
    advantages = returns
    v_loss = torch.zeros(())
    if args.baseline == "value":
        values = agent.value(obs)
        advantages = returns - values.detach()  # the baseline is not to learn from the actor's loss
        v_loss = 0.5 * ((values - returns) ** 2).mean()
    if args.norm_adv and len(advantages) > 1:  # a single one would become 0
        advantages = normalize(advantages)
    pg_loss = policy_gradient_loss(distribution.log_prob(actions), advantages)
    entropy = distribution.entropy().mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    metrics = {
        "loss": loss.detach(),
        "policy_loss": pg_loss.detach(),
        "value_loss": v_loss.detach(),
        "entropy": entropy.detach(),
    }
    return loss, metrics


# ----------------------------------------------------------------------------------------- training
def train(args):
    """Train with `args`; return the summary, which summary.json holds too. UserError on bad input."""
    envs = make_envs(args, args.num_envs)  # for their spaces: run.new_envs makes those that are played
    agent = make_agent(args, envs)
    set_threads(image=False)
    run = Run(args, envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    factor = lambda _: run.remaining() if args.anneal_lr else 1.0  # multiplies the learning rate
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    run.start(agent=agent, optimizer=optimizer, scheduler=scheduler)  # --resume loads their states

    envs, obs, skipped, _ = run.new_envs()
    while not run.is_finished():
        rollout = Rollout()
        is_over = False
        if args.n_step is None:
            obs, _ = envs.reset()
            skipped = np.zeros(args.num_envs, bool)
        while not is_over:
            obs = obs.copy()  # the environments may write the next ones into the same array
            actions = agent.sample(obs)
            next_obs, rewards, terminated, truncated, _ = envs.step(agent.to_env(actions))
            dones = (terminated | truncated) & ~skipped
            run.count(next_obs, rewards, dones, skipped)
            rollout.add(obs, actions, rewards, terminated, truncated, skipped)
            obs = next_obs
            if args.n_step is None:  # REINFORCE: one episode each, however long; later steps are skipped
                skipped = skipped | dones
                is_over = skipped.all()
                if len(rollout.obs) > (args.max_episode_steps or 27_000):  # `evaluate` has this limit
                    raise UserError(f"{args.env_id}: an episode does not end; try --max-episode-steps, or --n-step 5")
            else:  # A2C skips steps that only reset; a rollout of nothing else goes on
                skipped = dones
                is_over = len(rollout.obs) >= args.n_step and not np.all(rollout.skipped)

        obs_of_batch, actions, returns = rollout.batch(agent, obs)
        agent.train()  # dropout, if added, acts in the loss alone
        loss, metrics = actor_critic_loss(agent, obs_of_batch, actions, returns, args)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
        agent.eval()
        run.log(**metrics, learning_rate=scheduler.get_last_lr()[0])
        scheduler.step()

        # True after a checkpoint. It holds no environments: make new ones, as a resumed run does.
        if run.write_what_is_due():
            envs, obs, skipped, _ = run.new_envs()
    return run.finish()


# ===== helpers: settings, parts of the networks, environments =====================================

CURVE = {"policy_loss": "policy loss", "value_loss": "value loss", "entropy": "entropy of the policy"}
EXPLORES = False  # training plays the policy itself: its episodes decide --stop-at-return
SCHEDULED = ("anneal_lr",)  # flags that, if they are set, let a schedule end with total_timesteps
ONLY_FLAGS = "resume evaluate model render capture_video config run_dir".split()  # not from config.json
PLUGINS = {"ALE": "ale_py", "MiniGrid": "minigrid", "BabyAI": "minigrid"}  # their import registers ids
ONE_HOT = ("minigrid.wrappers.OneHotPartialObsWrapper", "minigrid.wrappers.ImgObsWrapper")
REFUSED_WRAPPERS = {"NormalizeObservation": "ppo.py", "NormalizeReward": "ppo.py"}
SAFE_IDS = r"[^:]*"  # ids that a stranger's config.json may ask for: module:Id imports the module
SUFFIX = ".pt"  # of models and checkpoints. With weights_only, reading them executes nothing:
write_state = torch.save
read_state = partial(torch.load, map_location="cpu", weights_only=True)
VECTOR_MODE = None  # the environment's own vector version, if it has one
manual_seed = torch.manual_seed  # torch draws the actions

# Tuned settings per environment; flags win over them.
TUNED = {
    # confirmed with several seeds: benchmarks/results/reinforce_scores.json
    "CartPole-v1": {"learning_rate": 5e-3, "total_timesteps": 400_000},
}
tuned_settings = lambda args: TUNED.get(args.env_id, {})  # as the run section calls it


def layer(module, gain=2**0.5):
    """Give a linear or convolutional layer orthogonal weights, scaled by `gain`, and zero biases."""
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


def mlp(inputs, hidden_sizes, outputs, gain):
    """Linear layers with tanh between them; `gain` is that of the last layer, which has no tanh."""
    layers = []
    for size in hidden_sizes:
        layers += [layer(nn.Linear(inputs, size)), nn.Tanh()]
        inputs = size
    return nn.Sequential(*layers, layer(nn.Linear(inputs, outputs), gain))


def is_image(space):
    """Whether a Box holds images (uint8, channels first or last), large enough for a CNN."""
    return space.dtype == np.uint8 and len(space.shape) == 3 and sorted(space.shape)[1] >= 36


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


def make_envs(args, num_envs, render=False, video=None):
    """A vector environment with next-step autoreset. If asked, it is shown, or filmed into `video`.

    UserError for what is mistyped. What the environment itself raises keeps its traceback.
    """
    package = PLUGINS.get(re.split("[/-]", args.env_id)[0], "gymnasium")
    try:
        importlib.import_module(package)
        kwargs = json.loads(args.env_kwargs)
        if not isinstance(kwargs, dict):
            raise UserError('--env-kwargs is a JSON object, such as {"size": 4}')
        defaults = ONE_HOT if package == "minigrid" else ()
        wrappers = [read_wrapper(text) for text in args.wrappers or defaults]
        if args.wrappers or args.max_episode_return is not None:
            wrappers.insert(0, partial(TrueReturn, limit=args.max_episode_return))
        if args.max_episode_steps is not None:
            kwargs["max_episode_steps"] = args.max_episode_steps
        if render or video:
            kwargs["render_mode"] = "rgb_array" if video else "human"
        if video:
            wrappers.append(partial(gym.wrappers.RecordVideo, video_folder=str(video)))
        mode = VECTOR_MODE
        if wrappers or render:
            mode = "sync"
        if args.async_envs:
            mode = "async"
        if package == "ale_py":
            wrappers = set_up_atari(kwargs, wrappers, mode)
        envs = gym.make_vec(args.env_id, num_envs, vectorization_mode=mode, wrappers=wrappers, **kwargs)
    except MISTYPED as error:
        raise_mistyped(error, args)
    if envs.metadata.get("autoreset_mode") != gym.vector.AutoresetMode.NEXT_STEP:
        raise UserError(f"{args.env_id}: its vector version does not reset in the step after an end")
    return vectors_or_images(envs, args.env_id)


def set_up_atari(kwargs, wrappers, mode):
    """Add DQN's preprocessing to `kwargs`; return the wrappers that it takes."""
    if mode is None:  # ale_py's own vector version, which counts frames and clips rewards by default
        kwargs.setdefault("max_num_frames_per_episode", 4 * kwargs.pop("max_episode_steps", 27_000))
        kwargs.setdefault("reward_clipping", False)
        kwargs.setdefault("use_fire_reset", False)  # off: agents learn to press FIRE
        return wrappers
    kwargs["max_episode_steps"] = 4 * kwargs.get("max_episode_steps", 27_000)  # of frames
    kwargs.setdefault("frameskip", 1)
    stack = partial(gym.wrappers.FrameStackObservation, stack_size=4, padding_type="zero")
    return [gym.wrappers.AtariPreprocessing, stack, *wrappers]  # it needs opencv-python


def vectors_or_images(envs, env_id):
    """The environments; Discrete observations one-hot, Dict and Tuple flat; else a UserError."""
    space = envs.single_observation_space
    if isinstance(space, spaces.Box):
        is_picture = space.dtype == np.uint8 and len(space.shape) >= 2 and space.shape[1] >= 36
        if (is_picture or len(space.shape) == 3 and sorted(space.shape)[1] >= 36) and not is_image(space):
            stack = "'gymnasium.wrappers.FrameStackObservation(stack_size=4)'"
            raise UserError(f"{env_id}: images are uint8 and have three dimensions, not {space}; if grey: {stack}")
        return envs
    plain = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    parts = [space]
    for part in parts:  # the list grows while it is walked
        if isinstance(part, spaces.Dict | spaces.Tuple):
            parts += part.values() if isinstance(part, spaces.Dict) else part
        elif not isinstance(part, plain) or sorted((0, 0, *part.shape))[-2] >= 36:
            choose = "a wrapper must choose what to see, as minigrid.wrappers.ImgObsWrapper does"
            raise UserError(f"{env_id}: {part} cannot become a row of numbers: {choose}")
    return gym.wrappers.vector.FlattenObservation(envs)


def choose_device(args, image=False):
    """The device that args.device means. UserError if there is no such device."""
    automatic = "cuda" if image and torch.cuda.is_available() else "cpu"
    device = automatic if args.device == "auto" else args.device
    try:
        torch.zeros(1, device=device).cpu()
    except Exception as error:
        raise UserError(f"no device {device}: {error}") from error
    return device


def set_threads(image):
    """One thread for vectors: small matrices are slower on more. If set, OMP_NUM_THREADS decides."""
    if not image and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def make_policy_agent(args, envs):
    """An untrained PolicyAgent for these environments. UserError if it cannot handle a space."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    is_vector = isinstance(obs_space, spaces.Box) and not is_image(obs_space)
    if not is_vector or not isinstance(action_space, spaces.Discrete):
        kinds = f"observations {obs_space} and actions {action_space}"
        raise UserError(f"{args.env_id}: no PolicyAgent for {kinds}; ppo.py takes more kinds")
    if args.n_step and args.baseline == "none":
        raise UserError("n_step needs baseline value: the critic stands for what follows after n steps")
    torch.manual_seed(args.seed)
    return PolicyAgent(obs_space, action_space, args, choose_device(args)).eval()


make_agent = make_policy_agent  # as the run section calls it


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
