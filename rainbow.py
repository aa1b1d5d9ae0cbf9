# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6", "matplotlib==3.11.2",
#   "tyro==1.0.17", "tqdm==4.70.1", "moviepy==2.2.1",
# ]
# ///
"""Rainbow: DQN and six improvements, all in this one file. Each of them is a switch; with all six off it is dqn.py.

    --double          one network chooses the next action, the other says what it is worth         (arXiv 1509.06461)
    --prioritized     what is learnt worst is replayed most                                        (arXiv 1511.05952)
    --dueling         Q is the value of a state plus the advantage of an action                    (arXiv 1511.06581)
    --multi-step      a target sums n rewards before it relies on the network                      (arXiv 1710.02298)
    --distributional  not only the mean of the return is learnt, but how likely each return is     (arXiv 1707.06887)
    --noisy           noise in the weights explores, and how much of it is learnt                  (arXiv 1706.10295)

Together: the network gives fixed returns z, the atoms, probabilities p(s, a), and Q(s, a) is the sum of z p. With
R = r_0 + gamma r_1 + …, the discounted sum of n rewards, and a*, the action whose Q(s_n, .) is highest, the target is
the distribution of R + gamma^n z, where z has the target network's probabilities p'. Phi shares it out among the atoms:

    L = E[ KL( Phi(R + gamma^n z, p'(s_n, a*))  ||  p(s_0, a_0) ) ]

    python rainbow.py                                          # CartPole-v1, a minute or two
    python rainbow.py --no-noisy --no-distributional           # any combination
    python rainbow.py --env-id LunarLander-v3 --capture-video  # a lander, filmed while it learns

Papers: Rainbow arXiv 1710.02298, and those above; DQN is explained in dqn.py.
The story ends at "# ===== helpers"; the code below it makes environments, keeps the run folder and draws the curve.
"""

import copy
import functools
import importlib
import itertools
import json
import math
import os
import pkgutil
import platform
import re
import sys
import time
from collections import deque, namedtuple
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
import torch
import tyro
from gymnasium import spaces
from torch import nn
from tqdm import tqdm


@dataclass(kw_only=True)
class Args:
    """Every flag and its default. For some environments, the default one included, TUNED (below) replaces some."""

    # run
    env_id: str = "CartPole-v1"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths of wrappers, applied in order
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    total_timesteps: int = 500_000  # environment steps to train for (resets do not count)
    stop_at_return: float | None = None  # stop once an evaluation reaches this
    seed: int = 1  # seed of everything that is drawn at random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps; auto: CUDA for images if there is one, else the CPU
    eval_every: int = 0  # steps between evaluations; 0: a tenth of the run
    eval_episodes: int = 20  # episodes of an evaluation, on separate environments, with the best actions
    capture_video: bool = False  # film an episode at each evaluation
    # steps between checkpoints, at which all episodes begin anew; 0: a tenth of the run or more. The replay buffer is
    # saved as well: gigabytes for images
    checkpoint_every: int = 0
    resume: str | None = None  # run folder to continue
    evaluate: str | None = None  # run folder to evaluate, without training
    model: str = "best"  # weights that --evaluate plays: best, last or a step
    render: bool = False  # show --evaluate in a window
    config: str | None = None  # config.json of an earlier run to start from; flags win over it
    run_dir: str | None = None  # where to write; None: runs/ENV__SCRIPT__SEED__TIME
    progress: bool = True  # show the progress bar
    # the six improvements, and their settings
    double: bool = True  # double DQN: the network chooses the action that the target network values
    prioritized: bool = True  # replay transitions the more often, the larger their last error
    alpha: float = 0.5  # prioritized: 0 draws uniformly, 1 fully in proportion to the errors
    beta: float = 0.4  # prioritized: importance weights at the start; rises to 1, which corrects for all of the bias
    dueling: bool = True  # Q as the sum of a state's value and the actions' advantages
    multi_step: bool = True  # sum --n-step rewards before bootstrapping; without, one
    n_step: int = 3  # multi-step: how many rewards
    distributional: bool = True  # C51: learn the distribution of the return, on --num-atoms returns
    num_atoms: int = 51  # distributional: returns that get a probability each, at equal distances
    v_min: float = -100.0  # distributional: lowest return; if no reward is below r, min(r, 0) / (1 - gamma) will do
    v_max: float = 100.0  # distributional: highest return; if none is above r, max(r, 0) / (1 - gamma) will do
    noisy: bool = True  # explore by noise in the weights; without, by random actions (start_e, end_e)
    sigma: float = 0.5  # noisy: deviation of the noise at the start, before division by the root of a layer's inputs
    # algorithm
    learning_rate: float = 1e-3  # Adam's learning rate
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    adam_eps: float = 1e-5  # Adam's epsilon
    num_envs: int = 1  # environments played side by side
    buffer_size: int = 100_000  # transitions in the replay buffer; once it is full, a new one replaces the oldest
    stacked_frames: Literal["auto", "yes", "no"] = "auto"  # images are stacks of frames: keep each once; auto: Atari
    learning_starts: int = 1_000  # steps before the first update
    train_frequency: int = 4  # steps from one update to the next
    gradient_steps: int = 1  # gradient steps per update
    batch_size: int = 128  # transitions per gradient step
    gamma: float = 0.99  # discount
    target_network_frequency: int = 500  # steps from one change of the target network to the next
    tau: float = 1.0  # how far it then moves towards the network: 1 copies; if small, let it move every few steps
    start_e: float = 1.0  # share of random actions at the start; with noisy there are none
    end_e: float = 0.05  # share of random actions in the end
    exploration_fraction: float = 0.2  # part of the run in which the one falls to the other
    max_grad_norm: float = 10.0  # gradients longer than this are scaled down to it
    hidden_sizes: tuple[int, ...] = (64, 64)  # sizes of the hidden layers (vectors only)
    normalize_obs: bool = False  # normalise observations (vectors) by their running mean and standard deviation
    clip_reward: bool = False  # learn from the signs of rewards (Atari); reported returns are always true ones


# -------------------------------------------------------------------------------------------------------- network


def layer(module, gain=2**0.5):
    """Give a linear or convolutional layer orthogonal weights, scaled by `gain`, and zero biases; return it."""
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


class NoisyLinear(nn.Linear):
    """A linear layer with noise in its weights; how much of it is learnt   (arXiv 1706.10295, eqs. 9 to 11).

        y = (W + sigma_W * noise_W) x + b + sigma_b * noise_b,
        noise_W = f(e_out) f(e_in)^T,   noise_b = f(e_out),   f(e) = sign(e) sqrt|e|

    The noise is factorised: a Gaussian number e for each input and each output, not for each weight. In evaluation
    mode, module.eval(), there is none.
    """

    def __init__(self, inputs, outputs, sigma):
        super().__init__(inputs, outputs)
        self.sigma_weight = nn.Parameter(torch.full((outputs, inputs), sigma / math.sqrt(inputs)))
        self.sigma_bias = nn.Parameter(torch.full((outputs,), sigma / math.sqrt(inputs)))
        self.register_buffer("input_noise", torch.zeros(inputs), persistent=False)  # f(e_in)
        self.register_buffer("output_noise", torch.zeros(outputs), persistent=False)  # f(e_out)

    def draw_noise(self, rng):
        """Draw the noise anew, with the NumPy generator `rng`."""
        for noise in (self.input_noise, self.output_noise):
            e = torch.as_tensor(rng.standard_normal(len(noise)))
            noise.copy_(e.sign() * e.abs().sqrt())

    def forward(self, x):
        """(B, inputs) -> (B, outputs)."""
        if not self.training:
            return super().forward(x)
        weight = self.weight + self.sigma_weight * torch.outer(self.output_noise, self.input_noise)
        bias = self.bias + self.sigma_bias * self.output_noise
        return nn.functional.linear(x, weight, bias)


def hidden_layers(inputs, sizes, linear):
    """A list of linear layers of these sizes, made by `linear`, each with a ReLU behind it."""
    layers = []
    for size in sizes:
        layers += [layer(linear(inputs, size)), nn.ReLU()]
        inputs = size
    return layers


def stream(inputs, hidden_sizes, outputs, linear):
    """Hidden layers and an output layer, all of them made by `linear`: nn.Linear or NoisyLinear."""
    layers = hidden_layers(inputs, hidden_sizes, linear)
    last_size = hidden_sizes[-1] if hidden_sizes else inputs
    return nn.Sequential(*layers, layer(linear(last_size, outputs), gain=1.0))


def dueling_values(value, advantages):
    """Q = V + A - mean A, (B, actions, atoms), of V (B, 1, atoms) and A like Q   (arXiv 1511.06581, eq. 9)."""
    return value + advantages - advantages.mean(1, keepdim=True)


class RainbowNetwork(nn.Module):
    """Q(s, a) of all actions at once; with --distributional it is the mean of a distribution of returns.

                     ┌── stream: hidden layer, outputs for every action ────────────────┐
        obs ── body ─┤                                                                  ├─ Q = V + A - mean A
                     └── --dueling: another stream, with outputs for the state's value ─┘

    The body is the convolutions of a CNN for images, and all hidden layers but the last for vectors; that one belongs
    to the streams. --distributional: an output for each atom. --noisy: all layers of the streams are noisy.
    """

    def __init__(self, observation_space, action_space, args, device="cpu"):
        super().__init__()
        self.device = device
        self.action_space = action_space
        self.num_actions = int(action_space.n)
        self.distributional = args.distributional
        self.num_atoms = args.num_atoms if args.distributional else 1
        linear = partial(NoisyLinear, sigma=args.sigma) if args.noisy else nn.Linear
        inputs = math.prod(observation_space.shape)
        self.image = is_image(observation_space)
        if self.image:
            self.body = Convolutions(observation_space.shape)
            num_features = self.body.outputs
            stream_sizes = (512,)
        else:
            body_sizes = args.hidden_sizes[:-1]
            self.body = nn.Sequential(*hidden_layers(inputs, body_sizes, nn.Linear))
            num_features = body_sizes[-1] if body_sizes else inputs
            stream_sizes = args.hidden_sizes[-1:]
        # Without --dueling, what is called the advantage is Q itself.
        self.advantage = stream(num_features, stream_sizes, self.num_actions * self.num_atoms, linear)
        self.value = stream(num_features, stream_sizes, self.num_atoms, linear) if args.dueling else None
        self.register_buffer("support", torch.linspace(args.v_min, args.v_max, self.num_atoms), persistent=False)
        self.to(device)
        # Created after the move, so that they stay on the CPU: they are float64, which some devices lack.
        self.obs_stats = RunningMeanStd(inputs) if args.normalize_obs else None

    def features(self, obs):
        """The input of the streams: images (B, …) through the CNN, vectors flat, normalised, through hidden layers."""
        if not self.image:
            obs = obs.reshape(len(obs), -1).float()
            obs = obs if self.obs_stats is None else self.obs_stats(obs)
        return self.body(obs)

    def outputs(self, obs):
        """The outputs (B, actions, atoms) for a tensor of observations (B, …)."""
        features = self.features(obs)
        advantages = self.advantage(features).view(-1, self.num_actions, self.num_atoms)
        if self.value is None:
            return advantages
        value = self.value(features).view(-1, 1, self.num_atoms)
        return dueling_values(value, advantages)

    def log_probs(self, obs):
        """Log-probabilities (B, actions, atoms) of the returns in `support`: what --distributional learns."""
        return self.outputs(obs).log_softmax(2)

    def forward(self, obs):
        """Q (B, actions)."""
        if self.distributional:
            return (self.log_probs(obs).exp() * self.support).sum(2)
        return self.outputs(obs).squeeze(2)

    def noisy_layers(self):
        """All noisy layers, a list."""
        return [module for module in self.modules() if isinstance(module, NoisyLinear)]

    def draw_noise(self, rng):
        """Draw the noise of all noisy layers anew."""
        for noisy_layer in self.noisy_layers():
            noisy_layer.draw_noise(rng)

    def mean_sigma(self):
        """Mean size of the sigmas of the noisy layers' weights: how much they still explore; 0 without --noisy."""
        sigmas = [noisy_layer.sigma_weight.detach().abs().mean().item() for noisy_layer in self.noisy_layers()]
        return sum(sigmas) / max(1, len(sigmas))

    @torch.no_grad()
    def greedy(self, obs):
        """The best actions (B,) for a NumPy array of observations (B, …)."""
        return self(torch.as_tensor(obs, device=self.device)).argmax(1).cpu().numpy()

    def explore(self, obs, epsilon, rng):
        """The best actions (B,) under the noise last drawn, each with probability epsilon replaced by any at all."""
        at_random = rng.random(len(obs)) < epsilon
        any_actions = rng.integers(self.num_actions, size=len(obs))
        return np.where(at_random, any_actions, self.greedy(obs))

    def act(self, obs):
        """What the greedy policy does without noise, as the environment takes it: evaluations call this."""
        self.eval()
        actions = self.greedy(obs)
        self.train()
        return self.to_env(actions)

    def to_env(self, actions):
        """Actions (B,), counted from 0 up, as the environment takes them: a Discrete may begin at another number."""
        return (actions + self.action_space.start).astype(self.action_space.dtype)


# -------------------------------------------------------------------------------------------------- replay buffers

# Flat tensors (B, …): from obs, whose action is stored, over up to n steps to next_obs. rewards are discounted sums of
# k <= n rewards, discounts are gamma^k.
NStepTransitions = namedtuple("NStepTransitions", "obs actions rewards next_obs terminated discounts")


class NStepBuffer:
    """The last `capacity` transitions over up to n steps, first in, first out, in host memory; uint8 stays uint8.

    Every step opens a window. It closes with its n-th reward, or where the episode ends: a transition. With n = 3:

        step         0     1     2     3, the last one
        window 0     r0  + γ r1 + γ² r2                  from s0 to s3, discount γ³
        window 1           r1  + γ r2 + γ² r3            from s1 to s4, discount γ³
        window 2                 r2  + γ r3              from s2 to s4, discount γ²
        window 3                       r3                from s3 to s4, discount γ

    If step 3 terminated, there is no future; if it was truncated, the target goes on from s4. After either, the
    environment's next step only resets it (next-step autoreset) and its action is ignored: a reset row, which is no
    step and opens no window. With `alpha`, transitions are drawn by priority (SumTree), without it uniformly.
    FrameStackBuffer, in the helpers, has `add` and `observations` of its own.
    """

    arrays = NStepTransitions._fields  # those that have a row for each slot

    def __init__(
        self, capacity, observation_space, action_space, device="cpu", num_envs=1, n_step=1, gamma=0.99, alpha=None
    ):
        shape = observation_space.shape
        D = math.prod(action_space.shape)  # 1 for Discrete, whose shape is ()
        obs_dtype = np.uint8 if observation_space.dtype == np.uint8 else np.float32
        self.obs = np.zeros((capacity, *shape), obs_dtype)
        self.actions = np.zeros((capacity, D), np.int64)
        self.rewards = np.zeros(capacity, np.float32)
        self.next_obs = np.zeros((capacity, *shape), obs_dtype)
        self.terminated = np.zeros(capacity, bool)
        self.discounts = np.zeros(capacity, np.float32)
        self.capacity = capacity
        self.device = device
        self.n_step = n_step
        self.gamma = gamma
        self.size = 0  # transitions stored so far
        self.position = 0  # slot that is written next
        self.open_steps = [deque() for _ in range(num_envs)]  # per environment: those whose windows are open, in order
        self.tree = None if alpha is None else SumTree(capacity, alpha)

    def begin_episodes(self):
        """All environments begin anew: windows that are still open are given up."""
        for steps in self.open_steps:
            steps.clear()

    def add(self, obs, actions, rewards, terminated, truncated, reset_rows, next_obs):
        """Add a step of all environments, each argument (N, …); actions are (N, D). Returns the slots written."""
        slots = []
        for i in np.flatnonzero(~reset_rows):
            steps = self.open_steps[i]
            steps.append((copy.copy(obs[i]), actions[i], rewards[i]))
            ended = terminated[i] or truncated[i]
            # The oldest step's window is full, or the episode is over: then every open one closes.
            while len(steps) == self.n_step or (ended and steps):
                slots.append(self.write(steps, next_obs[i], terminated[i]))
                steps.popleft()
        slots = np.array(slots, int)
        if self.tree is not None:
            self.tree.add(slots)
        return slots

    def write(self, steps, next_obs, terminated):
        """Store the transition from the first of these steps to what the last one led to. Returns the slot."""
        slot = self.position
        obs, action, _ = steps[0]
        self.obs[slot] = obs
        self.actions[slot] = action
        self.rewards[slot] = sum(self.gamma**k * reward for k, (_, _, reward) in enumerate(steps))
        self.next_obs[slot] = next_obs
        self.terminated[slot] = terminated
        self.discounts[slot] = self.gamma ** len(steps)
        self.position = (slot + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)
        return slot

    def get(self, slots):
        """The NStepTransitions in these slots, on the device."""
        obs, next_obs = self.observations(slots)
        fields = obs, self.actions[slots], self.rewards[slots], next_obs, self.terminated[slots], self.discounts[slots]
        return NStepTransitions(*[torch.as_tensor(field, device=self.device) for field in fields])

    def observations(self, slots):
        """(obs, next_obs) in these slots, arrays (B, …)."""
        return self.obs[slots], self.next_obs[slots]

    def sample(self, batch_size, rng, beta=0.0):
        """(slots, importance weights, NStepTransitions), B of each. ValueError if fewer are stored than asked for."""
        if batch_size > self.size:
            raise ValueError(f"cannot sample {batch_size} of {self.size} stored transitions")
        if self.tree is None:
            slots = rng.integers(self.size, size=batch_size)
            weights = np.ones(batch_size, np.float32)
        else:
            slots, weights = self.tree.sample(batch_size, rng, beta)
        return slots, torch.as_tensor(weights, device=self.device), self.get(slots)

    def update_priorities(self, slots, errors):
        """Set the priorities of these slots from their absolute errors (B,), if transitions have priorities."""
        if self.tree is not None:
            self.tree.update(slots, errors.cpu().numpy())

    def state_dict(self):
        """What is stored, for a checkpoint. Open windows are not: episodes begin anew there."""
        state = {name: torch.from_numpy(getattr(self, name)[: self.size]) for name in self.arrays}
        state |= {"size": self.size, "position": self.position}
        if self.tree is not None:
            state["tree"] = self.tree.state_dict()
        return state

    def load_state_dict(self, state):
        """Copy what state_dict returned."""
        self.size = int(state["size"])
        self.position = int(state["position"])
        for name in self.arrays:
            getattr(self, name)[: self.size] = np.asarray(state[name])
        if self.tree is not None:
            self.tree.load_state_dict(state["tree"])


class SumTree:
    """Draws slots in proportion to their priorities p = (|error| + 1e-6)^alpha (p^alpha in arXiv 1511.05952, 3.3).

    Node i is the sum of nodes 2i and 2i + 1; the leaves are the priorities. Four slots of priorities 1, 2, 0 and 5:

                             node 1: 8
                   ┌─────────────┴─────────────┐
               node 2: 3                   node 3: 5
             ┌─────┴─────┐               ┌─────┴─────┐
         node 4: 1   node 5: 2       node 6: 0   node 7: 5
         = slot 0    = slot 1        = slot 2    = slot 3

    A number between 0 and 8 leads from the top to a slot. Take 2.5: it is less than 3, so go left, to node 2. There it
    is not less than 1, so go right, with 2.5 - 1 left, to slot 1; as all numbers from 1 to 3 do, two out of eight.
    A whole batch goes down, or its changes up, one level at a time.
    """

    def __init__(self, capacity, alpha):
        self.levels = (capacity - 1).bit_length()  # below node 1
        self.leaves = 2**self.levels  # slot s is node leaves + s
        self.nodes = np.zeros(2 * self.leaves)
        self.alpha = alpha
        self.highest = 1.0  # priority so far

    def add(self, slots):
        """New transitions get the highest priority so far, for their errors are unknown."""
        self.write(slots, self.highest)

    def update(self, slots, errors):
        """Set the priorities of these slots from their errors (B,), an array."""
        priorities = (np.abs(errors) + 1e-6) ** self.alpha
        self.highest = max(self.highest, float(priorities.max()))
        self.write(slots, priorities)

    def write(self, slots, priorities):
        """Set priorities, and the sums above them."""
        nodes = slots + self.leaves
        self.nodes[nodes] = priorities
        for _ in range(self.levels):
            nodes = nodes // 2
            self.nodes[nodes] = self.nodes[2 * nodes] + self.nodes[2 * nodes + 1]

    def sample(self, batch_size, rng, beta):
        """(slots, importance weights), each (B,); one slot from each of B equal parts of the sum of all priorities.

        Of `size` transitions, each with the probability P = p / sum of all p, the weights are (1 / (size P))^beta,
        divided by the largest in the batch (section 3.4). Size and sum cancel, and p^-beta is left.
        """
        numbers = (np.arange(batch_size) + rng.random(batch_size)) * self.nodes[1] / batch_size
        nodes = np.ones(batch_size, np.int64)
        for _ in range(self.levels):
            left = self.nodes[2 * nodes]
            right = self.nodes[2 * nodes + 1]
            go_right = (numbers >= left) & (right > 0)  # rounding must not lead to an empty slot
            numbers = np.where(go_right, numbers - left, numbers)
            nodes = np.where(go_right, 2 * nodes + 1, 2 * nodes)
        weights = self.nodes[nodes] ** -beta
        return nodes - self.leaves, (weights / weights.max()).astype(np.float32)

    def state_dict(self):
        """The priorities, for a checkpoint."""
        return {"priorities": torch.from_numpy(self.nodes[self.leaves :]), "highest": self.highest}

    def load_state_dict(self, state):
        """Copy what state_dict returned."""
        self.write(np.arange(self.leaves), np.asarray(state["priorities"]))
        self.highest = float(state["highest"])


# --------------------------------------------------------------------------------------------- targets and losses


def linear_schedule(start, end, duration, step):
    """From `start` at step 0 to `end` at step `duration`, in a straight line, and `end` from then on."""
    return end + (start - end) * max(0.0, 1 - step / duration)


def td_targets(rewards, terminated, gamma, target_q, online_q=None):
    """y (B,) = r + gamma (1 - terminated) Q'(s', a*), from Q'(s', .) and, for double DQN, Q(s', .), each (B, actions).

    a* = argmax_a Q'(s', a) (Mnih 2015, algorithm 1), or argmax_a Q(s', a) (double DQN, arXiv 1509.06461, eq. 4 with
    the target network as its second). The maximum of estimates that have errors is too high on average; less so if Q
    chooses a* and Q' rates it, for their errors differ. gamma is a number, or (B,).
    """
    best = (target_q if online_q is None else online_q).argmax(1, keepdim=True)
    return rewards + gamma * ~terminated * target_q.gather(1, best).squeeze(1)


def project(rewards, terminated, discounts, probs, support):
    """Share out the probabilities p of y = r + discount (1 - terminated) z among the atoms: m (B, atoms).

    The atoms z of the support (atoms,) lie at equal distances d; `probs` (B, atoms) are the p. Where y_j, made of z_j,
    falls between two atoms they share p_j, the nearer one gets more; beyond the ends, the outermost gets it all:

        m_i = sum_j [1 - |clip(y_j) - z_i| / d]_0^1 p_j     (arXiv 1707.06887, eq. 7)

    clip(y) lies between the outermost atoms, [x]_0^1 between 0 and 1. discounts are a number or (B,).
    """
    distance = support[1] - support[0]
    y = rewards[:, None] + (discounts * ~terminated)[:, None] * support
    y = y.clamp(support[0], support[-1])
    shares = (1 - (y[:, :, None] - support).abs() / distance).clamp(min=0)  # (B, j, i): what y_j gives to z_i
    return (probs[:, :, None] * shares).sum(1)


def td_losses(agent, target, batch, args):
    """(Huber losses (B,), absolute errors |y - Q| (B,), figures to log) of NStepTransitions."""
    with torch.no_grad():
        target_q = target(batch.next_obs)
        online_q = agent(batch.next_obs) if args.double else None
        targets = td_targets(batch.rewards, batch.terminated, batch.discounts, target_q, online_q)
    q = agent(batch.obs).gather(1, batch.actions).squeeze(1)
    losses = nn.functional.huber_loss(q, targets, reduction="none")
    return losses, (targets - q).detach().abs(), {"q": q.detach().mean()}


def distributional_losses(agent, target, batch, args):
    """(KL(target || prediction) (B,), the same without gradient, for the priorities, figures to log)."""
    rows = torch.arange(len(batch.rewards), device=batch.rewards.device)
    support = agent.support
    with torch.no_grad():
        next_probs = target.log_probs(batch.next_obs).exp()
        next_q = agent(batch.next_obs) if args.double else (next_probs * support).sum(2)
        best_probs = next_probs[rows, next_q.argmax(1)]  # of the best action a*, (B, atoms)
        targets = project(batch.rewards, batch.terminated, batch.discounts, best_probs, support)
        # The mean of the targets before they are cut off at the support: warn_of_support compares it with the limits.
        means = batch.rewards + batch.discounts * ~batch.terminated * (best_probs * support).sum(1)
    log_probs = agent.log_probs(batch.obs)[rows, batch.actions[:, 0]]
    losses = (torch.xlogy(targets, targets) - targets * log_probs).sum(1)  # sum of m log(m / p), where 0 log 0 = 0
    q = (log_probs.detach().exp() * support).sum(1)
    return losses, losses.detach(), {"q": q.mean(), "target_min": means.min(), "target_max": means.max()}


@torch.no_grad()
def polyak(target, source, tau):
    """target <- tau source + (1 - tau) target, for all weights of two networks (arXiv 1509.02971, algorithm 1)."""
    for target_weights, weights in zip(target.parameters(), source.parameters()):
        target_weights.lerp_(weights, tau)


# ------------------------------------------------------------------------------------------------------- training


def train(args):
    """Train with `args`; return the final figures, which summary.json holds as well. UserError on bad input."""
    check_args(args)
    envs = make_envs(args, args.num_envs)
    agent = make_agent(args, envs)  # a RainbowNetwork
    target = copy.deepcopy(agent)
    target.obs_stats = agent.obs_stats  # both see observations normalised in the same way
    optimizer = Adam(agent.parameters(), lr=args.learning_rate, eps=args.adam_eps)
    buffer = make_n_step_buffer(args, envs, agent)  # without --multi-step n is 1, without --prioritized alpha None
    log_every = math.ceil(args.total_timesteps / 200)
    # explores: training episodes are noisy, or hold random actions, so evaluations say how good it is
    run = Run(args, agent, envs, log_every, explores=True, target=target, optimizer=optimizer, buffer=buffer)
    exploration_steps = max(1, args.exploration_fraction * args.total_timesteps)
    learning_starts = max(args.learning_starts, args.batch_size)  # or later: open windows are not stored yet
    losses_of = distributional_losses if args.distributional else td_losses

    while not run.is_finished():
        if run.restarts:  # at the start, and after each checkpoint, which holds no episodes: all begin anew
            envs, obs, rng = run.new_envs()  # the first time: those made above
            reset_rows = np.zeros(args.num_envs, bool)  # whether the next step only resets an environment
            buffer.begin_episodes()
        epsilon = 0 if args.noisy else linear_schedule(args.start_e, args.end_e, exploration_steps, run.step)
        beta = linear_schedule(args.beta, 1, args.total_timesteps, run.step)
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - run.step / args.total_timesteps)

        agent.draw_noise(rng)  # with --noisy, this is what explores: the same noise for all environments
        actions = agent.explore(obs, epsilon, rng)
        next_obs, rewards, terminated, truncated, _ = envs.step(agent.to_env(actions))
        learned_rewards = np.sign(rewards) if args.clip_reward else rewards
        buffer.add(obs, actions[:, None], learned_rewards, terminated, truncated, reset_rows, next_obs)
        if args.normalize_obs:
            agent.obs_stats.update(obs.reshape(args.num_envs, -1)[~reset_rows])
        step_before = run.step
        run.count(next_obs, rewards, terminated | truncated, reset_rows)  # advances run.step; not for reset rows
        obs = next_obs
        reset_rows = terminated | truncated

        # N environments took up to N steps at once. Now make as many updates as one alone would have made meanwhile.
        for step in range(step_before + 1, run.step + 1):
            if step >= learning_starts and step % args.train_frequency == 0 and buffer.size >= args.batch_size:
                for _ in range(args.gradient_steps):
                    slots, weights, batch = buffer.sample(args.batch_size, rng, beta)
                    agent.draw_noise(rng)  # anew for each update: for Q(s, a) and a* alike; arXiv 1706.10295 draws two
                    target.draw_noise(rng)
                    losses, errors, figures = losses_of(agent, target, batch, args)
                    loss = (weights * losses).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                    optimizer.step()
                    buffer.update_priorities(slots, errors)
                    run.log(loss=loss.detach(), **figures)
                    warn_of_support(figures, args)
            if step % args.target_network_frequency == 0:
                polyak(target, agent, args.tau)

        run.log(epsilon=epsilon, learning_rate=optimizer.param_groups[0]["lr"], sigma=agent.mean_sigma())
        run.write_what_is_due()  # a row of metrics.csv, an evaluation, a checkpoint
    return run.finish()


# ===== helpers: settings, parts of the networks, Adam, environments ===================================================

RANGES = dict.fromkeys(
    "buffer_size batch_size train_frequency gradient_steps target_network_frequency n_step".split(), (1, 1e15)
)
RANGES |= dict.fromkeys("gamma tau start_e end_e exploration_fraction alpha beta".split(), (0, 1))
RANGES |= {"hidden_sizes": (1, 1e5), "num_atoms": (2, 1e4), "v_min": (-1e15, 1e15), "v_max": (-1e15, 1e15)}
# The columns of metrics.csv that are this script's own, and those of them that the learning curve shows as well.
FIGURES = ["epsilon", "sigma", "learning_rate", "loss", "q", "target_min", "target_max"]
CURVE = ["loss", "q"]

# Settings that learn, per environment. What the user gives wins. Support [v_min, v_max]: rewards between a and b give
# returns between min(a, 0) / (1 - gamma) and max(b, 0) / (1 - gamma); where few steps are rewarded, a narrower support
# is finer.
ATARI = {"num_envs": 8, "learning_rate": 6.25e-5, "anneal_lr": False, "adam_eps": 1.5e-4, "buffer_size": 1_000_000,
         "batch_size": 32, "learning_starts": 20_000, "target_network_frequency": 8_000, "v_min": -10.0, "v_max": 10.0,
         "clip_reward": True, "total_timesteps": 10_000_000}  # fmt: skip
TUNED = {
    "CartPole-v1": {"num_envs": 4, "train_frequency": 64, "gradient_steps": 32, "batch_size": 64, "gamma": 0.98,
                    "learning_rate": 2e-3, "target_network_frequency": 64, "exploration_fraction": 0.16, "end_e": 0.04,
                    "hidden_sizes": (128, 128), "v_min": 0.0, "v_max": 50.0, "total_timesteps": 50_000,
                    "eval_every": 1_000, "stop_at_return": 495},
    "LunarLander-v3": {"num_envs": 4, "train_frequency": 2, "batch_size": 64, "learning_rate": 6.3e-4, "gamma": 0.995,
                       "target_network_frequency": 250, "exploration_fraction": 0.1, "hidden_sizes": (128, 128),
                       "v_min": -300.0, "v_max": 300.0, "total_timesteps": 150_000},
    # two of the six: double and multi-step (all six are not tuned for it)
    "MountainCar-v0": {"prioritized": False, "dueling": False, "distributional": False, "noisy": False,
                       "train_frequency": 16, "gradient_steps": 16, "gamma": 0.98, "end_e": 0.07,
                       "target_network_frequency": 600, "hidden_sizes": (128, 128), "v_min": -50.0, "v_max": 0.0,
                       "total_timesteps": 150_000},
    # dqn.py's settings with a support, not confirmed here
    "Acrobot-v1": {"num_envs": 8, "exploration_fraction": 0.15, "v_min": -100.0, "v_max": 0.0,
                   "total_timesteps": 100_000},
    # the paper's settings, with 8 environments and fewer steps; not confirmed here
    "ALE/Pong-v5": ATARI, "ALE/Breakout-v5": ATARI,
}  # fmt: skip


def tuned_settings(args):
    """The settings of TUNED for args.env_id."""
    return TUNED.get(args.env_id, {})


class RunningMeanStd(nn.Module):
    """Mean and variance of all rows seen so far. A module, so that every saved model holds them."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def update(self, rows):
        """Merge `rows` (B, *shape), a NumPy array (Chan, Golub & LeVeque 1979, eq. 2.1)."""
        if len(rows) == 0:
            return
        rows = torch.as_tensor(rows, dtype=torch.float64, device=self.mean.device)
        total = self.count + len(rows)
        delta = rows.mean(0) - self.mean
        squares = self.var * self.count + rows.var(0, correction=0) * len(rows)
        squares += delta**2 * self.count * len(rows) / total
        self.mean += delta * len(rows) / total
        self.var.copy_(squares / total)
        self.count.copy_(total)

    def forward(self, x):
        """Normalise (B, *shape), clip to ±10."""
        mean = self.mean.to(x.device, torch.float32)
        std = (self.var + 1e-8).sqrt().to(x.device, torch.float32)
        return ((x - mean) / std).clamp(-10, 10)


class Convolutions(nn.Module):
    """The convolutions of DQN (Mnih et al. 2015, doi 10.1038/nature14236): (B, *shape) of bytes -> (B, outputs)."""

    def __init__(self, shape):
        super().__init__()
        self.channels_last = shape[2] == min(shape)
        channels, height, width = (shape[2], shape[0], shape[1]) if self.channels_last else shape
        self.layers = nn.Sequential(
            layer(nn.Conv2d(channels, 32, kernel_size=8, stride=4)),
            nn.ReLU(),
            layer(nn.Conv2d(32, 64, kernel_size=4, stride=2)),
            nn.ReLU(),
            layer(nn.Conv2d(64, 64, kernel_size=3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.outputs = self.layers(torch.zeros(1, channels, height, width)).shape[1]

    def forward(self, images):
        """Features of images whose channels come first or last."""
        if self.channels_last:
            images = images.movedim(-1, -3)
        return self.layers(images / 255)


def is_image(space):
    """Whether a Box holds images (uint8, channels first or last) that are large enough for the CNN."""
    return space.dtype == np.uint8 and len(space.shape) == 3 and sorted(space.shape)[1] >= 36


class Adam:
    """Adam (arXiv 1412.6980, algorithm 1), with the interface and the numbers of torch.optim.Adam.

    Importing torch.optim takes a second, and its step on many small tensors three times as long as this one on one
    vector, of which all parameters are made views.
    """

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.parameters = list(parameters)
        self.param_groups = [{"lr": lr, "betas": betas, "eps": eps}]
        self.flat = torch.cat([p.detach().flatten() for p in self.parameters])
        self.m = torch.zeros_like(self.flat)
        self.v = torch.zeros_like(self.flat)
        self.t = 0
        for p, part in zip(self.parameters, self.flat.split([p.numel() for p in self.parameters])):
            p.data = part.view_as(p)

    def zero_grad(self):
        """Forget all gradients."""
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self):
        """Move the parameters against their gradients."""
        lr = self.param_groups[0]["lr"]
        beta1, beta2 = self.param_groups[0]["betas"]
        eps = self.param_groups[0]["eps"]
        gradient = torch.cat([p.grad.flatten() for p in self.parameters])
        self.t += 1
        self.m.lerp_(gradient, 1 - beta1)
        self.v.lerp_(gradient**2, 1 - beta2)
        denominator = self.v.sqrt() / math.sqrt(1 - beta2**self.t) + eps
        self.flat.addcdiv_(self.m, denominator, value=-lr / (1 - beta1**self.t))

    def state_dict(self):
        """Moments and number of steps, for a checkpoint."""
        return {"m": self.m, "v": self.v, "t": self.t}

    def load_state_dict(self, state):
        """Copy what state_dict returned."""
        self.m.copy_(state["m"])
        self.v.copy_(state["v"])
        self.t = state["t"]


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


class MiniGridView(gym.ObservationWrapper):
    """The image alone of a MiniGrid observation, one-hot and flat: object, colour and state of each cell."""

    SIZES = (11, 6, 4)  # MiniGrid's numbers of objects, colours and states

    def __init__(self, env):
        super().__init__(env)
        height, width, channels = env.observation_space["image"].shape
        if channels != len(self.SIZES):
            raise UserError(f"the images of {env} are not MiniGrid's own: leave out the wrapper that changes them")
        self.observation_space = spaces.Box(0, 1, (height * width * sum(self.SIZES),), np.float32)

    def observation(self, observation):
        """A vector of zeros and ones for the Dict of MiniGrid."""
        image = observation["image"]
        if (image >= self.SIZES).any():
            raise UserError("an image holds no objects, colours and states: leave out the wrapper that changes it")
        one_hot = [np.eye(size, dtype=np.float32)[image[..., i]] for i, size in enumerate(self.SIZES)]
        return np.concatenate(one_hot, axis=-1).ravel()


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


def make_vector_envs(args, num_envs, render_mode=None):
    """A vector environment with next-step autoreset.

    The environment's own vector implementation is used where there is one and nothing has to be wrapped or shown.
    UserError, saying what to do, if it cannot be made.
    """
    atari = args.env_id.startswith("ALE/")  # a vector version only, which counts frames and would clip true rewards
    if atari and (args.wrappers or args.max_episode_return is not None or render_mode):
        raise UserError("Atari's vector environment takes no wrappers, return limit or window (but --capture-video)")
    import_plugin(args.env_id)
    with blame(f"--env-kwargs {args.env_kwargs}: a JSON object is wanted", ValueError, TypeError, RecursionError):
        kwargs = dict(**json.loads(args.env_kwargs))
        frames = int(kwargs.get("frameskip", 4)) * episode_limit(args) if atari else None
    if "max_episode_steps" in kwargs:
        raise UserError("the steps of an episode are limited by --max-episode-steps, not by --env-kwargs")
    if atari:
        kwargs = {"reward_clipping": False, "max_num_frames_per_episode": frames} | kwargs
    elif args.max_episode_steps is not None:
        kwargs["max_episode_steps"] = args.max_episode_steps
    if render_mode:
        kwargs["render_mode"] = render_mode
    wrappers = [find_wrapper(path) for path in args.wrappers]
    if args.env_id.startswith(("MiniGrid", "BabyAI")):
        wrappers.append(lambda env: MiniGridView(env) if isinstance(env.observation_space, spaces.Dict) else env)
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
        mode = "sync" if wrappers or render_mode else None
        envs = gym.make_vec(args.env_id, num_envs, vectorization_mode=mode, wrappers=wrappers, **kwargs)
    if envs.metadata.get("autoreset_mode") != gym.vector.AutoresetMode.NEXT_STEP:
        raise UserError(f"{args.env_id}: its vector version does not reset in the step after an episode's end")
    if not getattr(envs.unwrapped, "copy", False):  # its next step may overwrite the observations that it has returned
        envs = gym.wrappers.vector.TransformObservation(envs, copy.deepcopy)
    return envs


def make_envs(args, num_envs, render_mode=None):
    """As make_vector_envs, but with Boxes for observations: others, and single numbers, are flattened."""
    envs = make_vector_envs(args, num_envs, render_mode)
    space = envs.single_observation_space
    is_array = isinstance(space, spaces.Box) and space.shape != ()
    if not is_array and space.is_np_flattenable:  # a Sequence or Graph is not
        check_memory(f"the observations of {args.env_id}", 100 * num_envs * spaces.flatdim(space))
        envs = gym.wrappers.vector.FlattenObservation(envs)  # Discrete observations become one-hot
    return envs


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


STATE = ".pt"  # how the names of checkpoints and models end


def write_state(state, file):
    """Write a dict of tensors, numbers and text to an open file."""
    torch.save(state, file)


def read_state(path):
    """What write_state wrote, on the CPU. Nothing in the file is executed."""
    return torch.load(path, map_location="cpu", weights_only=True)


def choose_device(args, image=False):
    """The device that args.device means, and torch's threads set to match. UserError if there is no such device."""
    automatic = "cuda" if image and torch.cuda.is_available() else "cpu"
    device = automatic if args.device == "auto" else args.device
    with blame(f"device {device}", RuntimeError, AssertionError, ImportError):
        torch.zeros(1, device=device).item()
    torch.set_num_threads(os.cpu_count() if image else 1)  # small matrices are slower on more than one
    return device


def check_memory(what, size):
    """UserError if this machine has no `size` bytes of memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise UserError(f"{what} would need {size / 1e9:,.0f} GB of memory; there are {memory / 1e9:.0f}")


QNetwork = RainbowNetwork  # as make_q_network calls it


def make_q_network(args, envs):
    """An untrained QNetwork for these environments. UserError if the script cannot handle a space or the device."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(action_space, spaces.Discrete) or action_space.n > 100_000:
        wanted = "Discrete actions, 100,000 at most; there are ppo.py and ddpg_td3.py for others"
        raise UserError(f"{args.env_id} has {action_space}; this script needs {wanted}")
    image = isinstance(obs_space, spaces.Box) and is_image(obs_space)
    size = math.prod(obs_space.shape) if isinstance(obs_space, spaces.Box) else 0
    if size == 0 or (obs_space.dtype == np.uint8 and size > 1_000 and not image):
        wanted = "vectors, or images of three dimensions and at least 36 x 36 pixels: use --wrappers"
        raise UserError(f"{args.env_id} has observations {obs_space}; this script needs {wanted}")
    if image and args.normalize_obs:
        raise UserError("normalize_obs is for vectors: images are always scaled to [0, 1]")
    device = choose_device(args, image)
    with torch.device("meta"):  # counts the weights without making them
        weights = sum(p.numel() for p in QNetwork(obs_space, action_space, args, "meta").parameters())
    check_memory("the networks", 20 * weights)  # with gradients, Adam's moments and the target network
    torch.manual_seed(args.seed)
    agent = QNetwork(obs_space, action_space, args, device)
    agent.args = args  # for evaluate(agent, agent.args) in a notebook
    return agent


make_agent = make_q_network  # as the run section calls it


class FrameStackBuffer(NStepBuffer):
    """An NStepBuffer whose observations (k, height, width) are the last k frames, newest last: each frame is kept once.

    A stack is kept as a tuple of its frames. The next one takes over all of them but the oldest, and adds one:

        (f0, f1, f2, f3)  ->  (f1, f2, f3, f4)  ->  (f2, f3, f4, f5)  ->  …

    A frame is forgotten, by Python, when the last tuple that holds it has been overwritten.
    """

    arrays = ("actions", "rewards", "terminated", "discounts")

    def __init__(self, capacity, observation_space, *arguments, **more_arguments):
        super().__init__(capacity, spaces.Box(0, 255, (0,), np.uint8), *arguments, **more_arguments)
        self.obs = np.empty(capacity, object)  # tuples of frames
        self.next_obs = np.empty(capacity, object)
        self.num_frames = observation_space.shape[0]
        self.begin_episodes()

    def begin_episodes(self):
        """All environments begin anew: windows that are still open are given up."""
        super().begin_episodes()
        self.newest = [None] * len(self.open_steps)  # the stack that each environment shows; None: an episode begins

    def add(self, obs, actions, rewards, terminated, truncated, reset_rows, next_obs):
        """As NStepBuffer.add. UserError if an observation is not the one before, moved on by a frame."""
        stacks = np.empty(len(obs), object)
        next_stacks = np.empty(len(obs), object)
        for i in np.flatnonzero(~reset_rows):
            if not np.array_equal(next_obs[i, :-1], obs[i, 1:]):
                raise UserError("observations are not stacks of frames, newest last: use --stacked-frames no")
            stacks[i] = self.newest[i] or tuple(obs[i].copy())
            next_stacks[i] = (*stacks[i][1:], next_obs[i, -1].copy())
            self.newest[i] = None if terminated[i] or truncated[i] else next_stacks[i]
        return super().add(stacks, actions, rewards, terminated, truncated, reset_rows, next_stacks)

    def observations(self, slots):
        """(obs, next_obs) in these slots, arrays (B, k, height, width)."""
        return np.array(self.obs[slots].tolist()), np.array(self.next_obs[slots].tolist())

    def state_dict(self):
        """What is stored, for a checkpoint: every frame once, and which of them the stacks consist of."""
        frames = []
        places = {}  # of frames in that list, by their ids
        stacks = []
        for frame in itertools.chain(*self.obs[: self.size], *self.next_obs[: self.size]):
            if id(frame) not in places:
                places[id(frame)] = len(frames)
                frames.append(frame)
            stacks.append(places[id(frame)])
        stacks = torch.tensor(stacks, dtype=torch.int64).view(2, self.size, self.num_frames)
        return super().state_dict() | {"frames": torch.from_numpy(np.array(frames)), "stacks": stacks}

    def load_state_dict(self, state):
        """Copy what state_dict returned."""
        super().load_state_dict(state)
        frames = [frame.copy() for frame in np.asarray(state["frames"])]
        for stored, stacks in zip((self.obs, self.next_obs), np.asarray(state["stacks"])):
            for slot, places in enumerate(stacks):
                stored[slot] = tuple(frames[place] for place in places)


@functools.cache
def say_once(message):
    """Write a message to stderr, above the progress bar; not again if it is the same."""
    tqdm.write(message, file=sys.stderr)


def warn_of_support(figures, args):
    """Say once in a run that targets lie outside of [v_min, v_max]: what lies beyond is learnt as the limit itself."""
    margin = 0.01 * (args.v_max - args.v_min)  # targets of noisy networks go astray a little, now and then
    too_low = "target_min" in figures and figures["target_min"] < args.v_min - margin
    too_high = "target_max" in figures and figures["target_max"] > args.v_max + margin
    if too_low or too_high:
        limits = f"[{args.v_min:g}, {args.v_max:g}]"
        flag = "--v-min" if too_low else "--v-max"
        say_once(f"{args.folder}: returns leave the support {limits}: see target_min and target_max; give {flag}")


def make_n_step_buffer(args, envs, agent):
    """The replay buffer that `args` ask for. UserError if it holds too little, or does not fit into memory."""
    if args.v_min >= args.v_max:
        raise UserError(f"v_min = {args.v_min:g} must be less than v_max = {args.v_max:g}")
    if args.distributional:
        check_memory(f"targets of {args.num_atoms} atoms", 16 * args.batch_size * args.num_atoms**2)
    n_step = args.n_step if args.multi_step else 1
    if 0 < args.checkpoint_every <= n_step * args.num_envs:
        raise UserError("checkpoint_every must be more than n_step x num_envs: no n steps would follow each other")
    least = max(args.batch_size, n_step * args.num_envs)
    if args.buffer_size < least:
        raise UserError(f"buffer_size = {args.buffer_size} is less than batch_size or n_step x num_envs = {least}")
    space = envs.single_observation_space
    stacked = args.env_id.startswith("ALE/") if args.stacked_frames == "auto" else args.stacked_frames == "yes"
    if stacked and not agent.image:
        raise UserError(f"stacked_frames is for images, not for {space}")
    size = 1 if space.dtype == np.uint8 else 4
    obs_size = math.prod(space.shape) * size
    transition_size = obs_size / space.shape[0] + 500 if stacked else 2 * obs_size
    check_memory(f"the replay buffer of --buffer-size {args.buffer_size}", args.buffer_size * (transition_size + 60))
    buffer_class = FrameStackBuffer if stacked else NStepBuffer
    alpha = args.alpha if args.prioritized else None
    spaces_and_device = space, envs.single_action_space, agent.device
    return buffer_class(args.buffer_size, *spaces_and_device, args.num_envs, n_step, args.gamma, alpha)


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
