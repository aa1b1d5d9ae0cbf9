# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.3,<2", "ufal-pybox2d>=2.3.10.5",
#   "numpy>=1.26", "matplotlib>=3.8", "tyro>=1.0", "tqdm>=4.66", "moviepy>=2.0",
# ]
# ///
"""Rainbow: DQN with six improvements, in this one file.

Each is a switch; TUNED has four off for MountainCar-v0. With all six off and equal settings, it is
dqn.py --no-double. As in dqn.py, Q' is the target network, a copy of Q that lags behind.

    --double          Q chooses the next action, Q' evaluates it         (arXiv 1509.06461)
    --prioritized     draws transitions of large error more often        (arXiv 1511.05952)
    --dueling         Q is the state's value plus the action's advantage (arXiv 1511.06581)
    --multi-step      a target sums n rewards before it asks Q'          (arXiv 1710.02298, eq. 2)
    --distributional  learns how likely returns are, not only the mean    (arXiv 1707.06887)
    --noisy           explores by noise in the weights, of learnt size   (arXiv 1706.10295)

All six together: the atoms z are fixed returns, equally spaced. The network learns their
probabilities p(s, a), and Q(s, a) is the sum of z p. Let R = r_0 + gamma r_1 + … be the discounted sum
of n rewards, and a* = argmax_a Q(s_n, a). If the return from s_n is z, that from s_0 is

    y = R + gamma^n (1 - terminated) z

So y has the probability that the target network gives to this z: p'(s_n, a*). The projection Phi splits
this probability between the two atoms around y; w is the importance weight of prioritized replay:

    L = E[ w KL( Phi(y, p'(s_n, a*)) || p(s_0, a_0) ) ]   (arXiv 1710.02298, "The Integrated Agent")

    python rainbow.py                                          # CartPole-v1, a minute or two
    python rainbow.py --no-noisy --no-distributional           # any combination
    python rainbow.py --env-id LunarLander-v3 --capture-video  # a lander, filmed at each evaluation

Papers: Rainbow arXiv 1710.02298, and those above. The algorithm ends at "# ===== helpers".
"""

import ast
import copy
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
from collections import deque, namedtuple
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

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

    # the six improvements and their settings
    double: bool = True  # double DQN: Q chooses the next action, Q' evaluates it; else Q' does both
    prioritized: bool = True  # replay transitions with larger errors more often
    alpha: float = 0.5  # prioritized: 0 draws uniformly, 1 in proportion to the errors
    beta: float = 0.4  # prioritized: exponent of the importance weights at first; rises linearly to 1
    dueling: bool = True  # Q is the state's value + the action's advantage over the mean one
    multi_step: bool = True  # targets sum --n-step rewards; --no-multi-step: one reward
    n_step: int = 3  # multi-step: how many rewards a target sums
    distributional: bool = True  # C51: learn probabilities of --num-atoms returns, not only the mean
    num_atoms: int = 51  # distributional: number of returns, at equal distances
    v_min: float = -10.0  # distributional: lowest return; set it to min(r, 0) / (1 - gamma) with --no-normalize-reward
    v_max: float = 10.0  # distributional: highest return, as v_min; long episodes need more
    noisy: bool = True  # explore by noise in the weights; else by random actions, see --start-e
    sigma: float = 0.5  # noisy: a layer's sigmas begin at this / sqrt(its inputs)
    # algorithm
    clip_error: bool = False  # with --no-distributional: Huber loss, not the squared error: see q_losses
    learning_rate: float = 1e-3  # Adam's learning rate
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    adam_eps: float = 1e-5  # Adam's epsilon, which keeps it from dividing by zero
    num_envs: int = 1  # environments played side by side
    buffer_size: int = 100_000  # transitions kept; checkpoints hold them too: gigabytes for images
    learning_starts: int = 1_000  # environment steps before the first update
    train_frequency: int = 4  # environment steps from one round of updates to the next
    gradient_steps: int = 1  # gradient steps per round
    batch_size: int = 128  # transitions per gradient step
    gamma: float = 0.99  # discount
    target_network_frequency: int = 500  # environment steps between copies of Q to the target network
    start_e: float = 1.0  # with --no-noisy: epsilon, the probability of a random action, at the start
    end_e: float = 0.05  # with --no-noisy: epsilon at the end
    exploration_fraction: float = 0.2  # epsilon falls in this share of the run, then stays
    max_grad_norm: float = 10.0  # gradients longer than this are scaled down to it
    hidden_sizes: tuple[int, ...] = (64, 64)  # of hidden layers (vectors only), as --hidden-sizes 64 64
    normalize_obs: bool = False  # normalise observations (vectors) by their running mean and standard deviation
    normalize_reward: bool = True  # divide sums of n rewards by the standard deviation of returns; at most ±10
    clip_reward: bool = False  # learn from the signs of rewards (Atari); reported returns are true ones
    checkpoint_every: int = 0  # steps between checkpoints, which restart all episodes; 0: 5,000 * num_envs or more
    # run
    env_id: str = "CartPole-v1"  # Gymnasium id; module:Id-v0 imports the module first
    env_kwargs: str = "{}"  # arguments of the environment's constructor, as JSON
    wrappers: tuple[str, ...] = ()  # dotted paths, applied in order; with arguments: a.B(size=4)
    max_episode_steps: int | None = None  # truncate episodes after this many steps
    max_episode_return: float | None = None  # truncate episodes whose return reaches this
    async_envs: bool = False  # a process for each environment: for environments slower than 1 ms a step
    total_timesteps: int = 500_000  # environment steps to train for at least; resets do not count
    stop_at_return: float | None = None  # stop once an evaluation reaches this mean return
    seed: int = 1  # seed of everything that is drawn at random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps; auto: CUDA for images if there is one
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


# ------------------------------------------------------------------------------------------ network
def layer(module, gain=2**0.5):
    """Give a linear or convolutional layer orthogonal weights, scaled by `gain`, and zero biases."""
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


class NoisyLinear(nn.Linear):
    """A linear layer with noise in its weights; the sigmas are learnt like W and b.

        y = (W + sigma_W * noise_W) x + b + sigma_b * noise_b   (arXiv 1706.10295, eq. 9)
        noise_W = f(e_out) f(e_in)^T   (eq. 10)
        noise_b = f(e_out)   (eq. 11)
        f(e) = sign(e) sqrt(|e|)

    The noise is factorised: one Gaussian number e per input and one per output, instead of one per
    weight. Before the first draw it is zero. `layer` makes W orthogonal and b zero; the paper
    draws both uniformly.
    """

    def __init__(self, inputs, outputs, sigma):
        super().__init__(inputs, outputs)
        self.sigma_weight = nn.Parameter(torch.full((outputs, inputs), sigma / math.sqrt(inputs)))
        self.sigma_bias = nn.Parameter(torch.full((outputs,), sigma / math.sqrt(inputs)))
        self.register_buffer("input_noise", torch.zeros(inputs), persistent=False)  # f(e_in)
        self.register_buffer("output_noise", torch.zeros(outputs), persistent=False)  # f(e_out)

    def draw_noise(self, rng):
        """Replace the noise, drawing from the NumPy generator `rng`."""
        for noise in (self.input_noise, self.output_noise):
            e = torch.as_tensor(rng.standard_normal(len(noise)))
            noise.copy_(e.sign() * e.abs().sqrt())

    def remove_noise(self):
        """Set the noise to zero, until the next draw."""
        self.input_noise.zero_()
        self.output_noise.zero_()

    def forward(self, x):
        """(B, inputs) -> (B, outputs)."""
        noise = torch.outer(self.output_noise, self.input_noise)
        weight = self.weight + self.sigma_weight * noise
        bias = self.bias + self.sigma_bias * self.output_noise
        return nn.functional.linear(x, weight, bias)


def hidden_layers(sizes, linear):
    """Layers from sizes[0] inputs to sizes[-1] outputs, made by nn.Linear or NoisyLinear, each with a ReLU."""
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [layer(linear(inputs, outputs)), nn.ReLU()]
    return nn.Sequential(*layers)


def stream(sizes, outputs, linear):
    """Hidden layers and an output layer, all made by `linear`."""
    return nn.Sequential(*hidden_layers(sizes, linear), layer(linear(sizes[-1], outputs), gain=1.0))


def dueling_values(value, advantages):
    """Q, or C51's logits, (B, actions, atoms) from V (B, 1, atoms) and A (B, actions, atoms).

    Q(s, a) = V(s) + A(s, a) - mean_b A(s, b)   (arXiv 1511.06581, eq. 9)
    """
    return value + advantages - advantages.mean(1, keepdim=True)


class RainbowNetwork(nn.Module):
    """Q(s, a) of all actions at once; with --distributional, the mean of the learnt distribution.

                     ┌── stream: hidden layer, outputs for every action ─────┐
        obs ── body ─┤                                                       ├─ V + A - mean A
                     └── --dueling: another stream, outputs for the state ───┘

    For images, the body is the convolutions of a CNN. For vectors, it is all hidden layers but the
    last; each stream has its own last one. `outputs` returns V + A - mean A: Q, or with
    --distributional the logits of the atoms; `forward` always returns Q. Without --dueling, `outputs`
    is A alone. With --noisy, all layers of the streams are noisy.
    """

    def __init__(self, observation_space, action_space, args, device="cpu"):
        super().__init__()
        self.args = args
        self.device = device
        self.observation_shape = observation_space.shape
        self.action_space = action_space
        self.num_actions = int(action_space.n)
        self.num_atoms = args.num_atoms if args.distributional else 1
        linear = partial(NoisyLinear, sigma=args.sigma) if args.noisy else nn.Linear
        inputs = math.prod(observation_space.shape)
        self.image = is_image(observation_space)
        if self.image:
            self.body = Convolutions(observation_space.shape)
            sizes = self.body.outputs, 512
        else:
            body_sizes = inputs, *args.hidden_sizes[:-1]
            self.body = hidden_layers(body_sizes, nn.Linear)
            sizes = body_sizes[-1], *args.hidden_sizes[-1:]
        # Without --dueling, `advantage` computes Q, or the logits, alone.
        self.advantage = stream(sizes, self.num_actions * self.num_atoms, linear)
        self.value = stream(sizes, self.num_atoms, linear) if args.dueling else None
        support = torch.linspace(args.v_min, args.v_max, self.num_atoms)  # the atoms z
        self.register_buffer("support", support, persistent=False)
        self.noisy_layers = [module for module in self.modules() if isinstance(module, NoisyLinear)]
        self.to(device)
        # Created after the move, so that its float64 stays on the CPU: some devices lack that type.
        self.obs_stats = RunningMeanStd(inputs) if args.normalize_obs else None
        self.return_stats = RunningMeanStd() if args.normalize_reward else None

    def outputs(self, obs):
        """Logits (B, actions, atoms) for observations (B, …); without --distributional Q (B, actions, 1)."""
        if not self.image:
            obs = obs.reshape(len(obs), -1).float()
            obs = obs if self.obs_stats is None else self.obs_stats(obs)
        features = self.body(obs)
        advantages = self.advantage(features).view(-1, self.num_actions, self.num_atoms)
        if self.value is None:
            return advantages
        value = self.value(features).view(-1, 1, self.num_atoms)
        return dueling_values(value, advantages)

    def log_probs(self, obs):
        """With --distributional: log-probabilities (B, actions, atoms) of the returns in `support`."""
        return self.outputs(obs).log_softmax(2)

    def forward(self, obs):
        """Q (B, actions) of observations (B, …)."""
        if self.args.distributional:
            return (self.log_probs(obs).exp() * self.support).sum(2)
        return self.outputs(obs).squeeze(2)

    def draw_noise(self, rng):
        """Replace the noise of all noisy layers, drawing from the NumPy generator `rng`."""
        for noisy_layer in self.noisy_layers:
            noisy_layer.draw_noise(rng)

    def mean_sigma(self):
        """The mean of the layers' means of |sigma_W|; 0 without noisy layers."""
        sigmas = [module.sigma_weight.detach().abs().mean() for module in self.noisy_layers]
        return float(sum(sigmas)) / max(1, len(sigmas))

    def scaled(self, rewards):
        """Sums of n rewards as the loss gets them: scaled, if args say so, by the newest statistics; at most ±10."""
        if self.return_stats is None:
            return rewards
        return (rewards / math.sqrt(self.return_stats.var.item() + 1e-8)).clip(-10, 10)

    def update_statistics(self, obs, discounted_returns):
        """Add a step's obs (B, …) and discounted sums of past rewards (B,) to the running statistics."""
        if self.obs_stats is not None:
            self.obs_stats.update(obs)
        if self.return_stats is not None:
            self.return_stats.update(discounted_returns)

    @torch.inference_mode()  # as no_grad, but faster
    def greedy(self, obs):
        """The greedy actions (B,), of the highest Q, for an array of observations (B, …)."""
        dtype = torch.uint8 if self.image else torch.float32
        return self(torch.as_tensor(obs, dtype=dtype, device=self.device)).argmax(1).cpu().numpy()

    def explore(self, obs, epsilon, rng):
        """The greedy actions (B,) under new noise; with probability epsilon, each is drawn uniformly."""
        self.draw_noise(rng)  # the same noise for all environments
        at_random = rng.random(len(obs)) < epsilon
        any_actions = rng.integers(self.num_actions, size=len(obs))
        return np.where(at_random, any_actions, self.greedy(obs))

    def act(self, obs):
        """The greedy actions without noise for observations (B, …), as the environment takes them."""
        if obs.shape[1:] != self.observation_shape:
            raise ValueError("act takes a batch of observations; for one, it is act(obs[None])[0]")
        for noisy_layer in self.noisy_layers:
            noisy_layer.remove_noise()
        return self.to_env(self.greedy(obs))

    def to_env(self, actions):
        """Actions (B,), counted from 0, as the environment counts them: from `start`."""
        return (actions + self.action_space.start).astype(self.action_space.dtype)


# ------------------------------------------------------------------------------------ replay buffer

# Tensors (B, …). The action was taken at obs; next_obs followed k <= n steps later. `rewards` are the
# discounted sums of the k rewards in between, `discounts` are gamma^k (arXiv 1710.02298, eq. 2).
NStepTransitions = namedtuple("NStepTransitions", "obs actions rewards next_obs terminated discounts")


class NStepBuffer:
    """The last `capacity` transitions of up to n steps, in CPU memory.

    Every step opens a window. It closes after n rewards or at the end of the episode, and is stored.
    With n = 3:

        step         0     1     2     3, the last one
        window 0     r0  + γ r1 + γ² r2                  from s0 to s3, discount γ³
        window 1           r1  + γ r2 + γ² r3            from s1 to s4, discount γ³
        window 2                 r2  + γ r3              from s2 to s4, discount γ²
        window 3                       r3                from s3 to s4, discount γ

    The windows that reach s4 bootstrap from it if the episode was truncated there, but not if it
    terminated. In either case the environment's next step only resets it and ignores the action
    (next-step autoreset). Such a reset row opens no window. With `alpha`, transitions are drawn by
    priority (SumTree), without it uniformly. uint8 observations stay uint8.
    """

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
        self.size = 0  # transitions stored now
        self.position = 0  # slot that is written next
        self.open_steps = [deque() for _ in range(num_envs)]  # whose windows are open, oldest first
        self.tree = None if alpha is None else SumTree(capacity, alpha)

    def begin_episodes(self):
        """All environments begin new episodes: drop the windows that are still open."""
        for steps in self.open_steps:
            steps.clear()

    def add(self, obs, actions, rewards, next_obs, terminated, truncated, reset_rows):
        """Add a step of all N environments; actions are (N, D). Returns the slots written."""
        slots = []
        for i in np.flatnonzero(~reset_rows):
            steps = self.open_steps[i]
            steps.append((obs[i], actions[i], rewards[i]))
            done = terminated[i] or truncated[i]
            # Close the oldest window if it is full. At the end of the episode, close all.
            while len(steps) == self.n_step or (done and steps):
                slots.append(self.write(steps, next_obs[i], terminated[i]))
                steps.popleft()
        slots = np.array(slots, int)
        if self.tree is not None:
            self.tree.add(slots)
        return slots

    def write(self, steps, next_obs, terminated):
        """Store the transition from the first of these steps to next_obs. Returns the slot."""
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
        arrays = [getattr(self, name)[slots] for name in NStepTransitions._fields]
        return NStepTransitions(*[torch.as_tensor(array, device=self.device) for array in arrays])

    def sample(self, batch_size, rng, beta=0.0):
        """(slots (B,), importance weights (B,), NStepTransitions). ValueError if fewer than B are stored."""
        if batch_size > self.size:
            raise ValueError(f"cannot sample {batch_size} of {self.size} stored transitions")
        if self.tree is None:
            slots = rng.integers(self.size, size=batch_size)
            weights = np.ones(batch_size, np.float32)
        else:
            slots, weights = self.tree.sample(batch_size, rng, beta)
        return slots, torch.as_tensor(weights, device=self.device), self.get(slots)

    def update_priorities(self, slots, errors):
        """Set the priorities of these slots from their errors (B,), if there are priorities."""
        if self.tree is not None:
            self.tree.update(slots, errors.cpu().numpy())

    def state_dict(self):
        """What is stored, for a checkpoint; no open windows, all episodes begin anew."""
        names = NStepTransitions._fields
        filled = {name: torch.from_numpy(getattr(self, name)[: self.size]) for name in names}
        state = {"size": self.size, "position": self.position, **filled}
        if self.tree is not None:
            state["tree"] = self.tree.state_dict()
        return state

    def load_state_dict(self, state):
        """Copy what state_dict returned."""
        self.size = state["size"]
        self.position = state["position"]
        for name in NStepTransitions._fields:
            getattr(self, name)[: self.size] = state[name]
        if self.tree is not None:
            self.tree.load_state_dict(state["tree"])


class SumTree:
    """Draws slots in proportion to their priorities.

        p = (|error| + 1e-6)^alpha   (arXiv 1511.05952, eq. 1, where it is p_i^alpha)

    Node i is the sum of nodes 2i and 2i + 1; the leaves are the priorities, 0 for an empty
    slot. Four slots of priorities 1, 2, 0 and 5:

                                node 1: 8
                      ┌─────────────┴─────────────┐
                  node 2: 3                   node 3: 5
                ┌─────┴─────┐               ┌─────┴─────┐
            node 4: 1   node 5: 2       node 6: 0   node 7: 5
            = slot 0    = slot 1        = slot 2    = slot 3

    A random number from 0 to 8 leads from the top to a slot. Take 2.5. It is less than 3, the sum on
    the left: go left, to node 2. There it is not less than 1, the sum on the left: subtract 1 and go
    right, to slot 1. All from 1 to 3 end there: the probability of slot 1 is 2/8. All numbers of
    a batch go down together, one level at a time.
    """

    def __init__(self, capacity, alpha):
        self.levels = (capacity - 1).bit_length()  # of the tree, below node 1
        self.leaves = 2**self.levels  # slot s is node leaves + s
        self.nodes = np.zeros(2 * self.leaves)
        self.alpha = alpha
        self.highest = 1.0  # the highest priority so far, at least 1

    def add(self, slots):
        """Give new transitions the highest priority so far, because their errors are unknown."""
        self.write(slots, self.highest)

    def update(self, slots, errors):
        """Set the priorities of these slots from their errors (B,), and `highest` if one is higher."""
        priorities = (np.abs(errors) + 1e-6) ** self.alpha
        self.highest = max(self.highest, float(priorities.max()))
        self.write(slots, priorities)

    def write(self, slots, priorities):
        """Set the priorities of these slots, and update the sums above them."""
        nodes = slots + self.leaves
        self.nodes[nodes] = priorities
        for _ in range(self.levels):
            nodes = nodes // 2
            self.nodes[nodes] = self.nodes[2 * nodes] + self.nodes[2 * nodes + 1]

    def sample(self, batch_size, rng, beta):
        """(slots, importance weights), each (B,); one slot from each of B equal parts of the sum.

        A slot has probability P and weight w, divided by the batch's largest w:

            P = p / (sum_i p_i)
            w = (1 / (size P))^beta   (arXiv 1511.05952, section 3.4)

        Size and sum cancel in this quotient: p^-beta is left.
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
        """The priorities and their sums, for a checkpoint."""
        return {"nodes": torch.from_numpy(self.nodes), "highest": self.highest}

    def load_state_dict(self, state):
        """Copy what state_dict returned."""
        self.nodes[:] = state["nodes"]
        self.highest = state["highest"]


# ------------------------------------------------------------------------------- targets and losses
def linear_schedule(start, end, duration, step):
    """From `start` at step 0 to `end` at step `duration`, in a straight line; then `end`."""
    return end + (start - end) * max(0.0, 1 - step / duration)


def td_targets(rewards, terminated, gamma, target_q, online_q=None):
    """Targets y (B,) from target_q, which is Q'(s', .), and online_q, Q(s', .): both (B, actions).

        y = r + gamma (1 - terminated) Q'(s', a*)
        a* = argmax_a Q'(s', a)   (without `online_q`: Mnih 2015, algorithm 1)
        a* = argmax_a Q(s', a)   (double DQN: arXiv 1509.06461, eq. 4 with theta^- for theta')

    With the first a*, y is too high on average: the maximum prefers values with positive errors.
    The second has less of this bias, as the errors of Q and Q' differ. `gamma`: a number or (B,).
    """
    best = (target_q if online_q is None else online_q).argmax(1, keepdim=True)
    return rewards + gamma * ~terminated * target_q.gather(1, best).squeeze(1)


def project(rewards, terminated, discounts, probs, support):
    """Project the distribution of returns y onto the atoms: probabilities m (B, atoms).

        y_j = r + discount (1 - terminated) z_j
        m_i = sum_j [1 - |clip(y_j) - z_i| / d]_0^1 p'_j   (arXiv 1707.06887, eq. 7)

    `support` (atoms,) holds the atoms z_j, d apart; `probs` (B, atoms) the probability p'_j of z_j,
    and so of y_j. The two atoms around y_j share p'_j; the nearer gets more. clip limits y to the range
    of the atoms: beyond the ends, the outermost atom gets it all. [x]_0^1 limits x to [0, 1]; here x
    is never above 1. `discounts`: (B,) or a number, gamma^k if r sums k rewards.
    """
    spacing = support[1] - support[0]
    y = rewards[:, None] + (discounts * ~terminated)[:, None] * support
    y = y.clamp(support[0], support[-1])
    distances = (y[:, :, None] - support).abs()  # (B, j, i): from y_j to z_i
    shares = (1 - distances / spacing).clamp(min=0)  # what y_j gives to z_i
    return (probs[:, :, None] * shares).sum(1)


def q_losses(q, targets, clip_error):
    """Squared errors (B,); with `clip_error` Huber losses, whose slope is at most 1 (Mnih 2015).

        L = (y - Q)^2   (squared)
        L = (y - Q)^2 / 2 if |y - Q| <= 1, else |y - Q| - 1/2   (Huber)

    Say that y is 100 in 19 of 20 equally likely cases, else 0. Squared errors are least at the mean,
    Q = 95; Huber losses near the median, at Q = 99.947. The latter resist large errors, but almost ignore
    rare failures, and targets pass such a Q on to earlier states.
    """
    if clip_error:
        return nn.functional.huber_loss(q, targets, reduction="none")
    return (targets - q).square()


def td_losses(agent, target, batch, args):
    """(losses (B,), errors |y - Q| (B,) for the priorities, metrics) of NStepTransitions."""
    with torch.no_grad():
        target_q = target(batch.next_obs)
        online_q = agent(batch.next_obs) if args.double else None
        targets = td_targets(batch.rewards, batch.terminated, batch.discounts, target_q, online_q)
    q = agent(batch.obs).gather(1, batch.actions).squeeze(1)
    losses = q_losses(q, targets, args.clip_error)
    return losses, (targets - q).detach().abs(), {"q": q.detach().mean()}


def distributional_losses(agent, target, batch, args):
    """(losses (B,), the same detached as errors, metrics) of NStepTransitions.

    L = KL(m || p) = sum_i m_i log(m_i / p_i)   (arXiv 1710.02298, "The Integrated Agent")

    m is the projected target, p the network's p(s_0, a_0).
    """
    rows = torch.arange(len(batch.rewards), device=batch.rewards.device)
    support = agent.support
    with torch.no_grad():
        next_probs = target.log_probs(batch.next_obs).exp()
        next_q = agent(batch.next_obs) if args.double else (next_probs * support).sum(2)
        best_probs = next_probs[rows, next_q.argmax(1)]  # those of a*, (B, atoms)
        to_project = batch.rewards, batch.terminated, batch.discounts, best_probs, support
        targets = project(*to_project)
        outside = outside_support(*to_project)
    log_probs = agent.log_probs(batch.obs)[rows, batch.actions[:, 0]]
    losses = (torch.xlogy(targets, targets) - targets * log_probs).sum(1)  # xlogy: 0 log 0 is 0
    q = (log_probs.detach().exp() * support).sum(1)
    return losses, losses.detach(), {"q": q.mean(), "outside_support": outside.mean()}


# ----------------------------------------------------------------------------------------- training
def train(args):
    """Train with `args`; return the summary, which summary.json holds too. UserError on bad input."""
    envs = make_envs(args, args.num_envs)  # for their spaces: run.new_envs makes those that are played
    agent = make_agent(args, envs)  # a RainbowNetwork
    target = copy.deepcopy(agent)
    target.obs_stats = agent.obs_stats  # not a copy: both normalise alike
    buffer = make_n_step_buffer(args, envs, agent)
    set_threads(agent.image)
    run = Run(args, envs)
    # fused: all weights in one call, faster
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=args.adam_eps, fused=True)
    factor = lambda _: run.remaining() if args.anneal_lr else 1.0  # multiplies the learning rate
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    run.start(agent=agent, target=target, optimizer=optimizer, scheduler=scheduler, buffer=buffer)  # --resume loads
    exploration_steps = max(1, args.exploration_fraction * args.total_timesteps)
    learning_starts = max(args.learning_starts, args.batch_size)
    losses_of = distributional_losses if args.distributional else td_losses

    envs, obs, reset_rows, rng = run.new_envs()
    discounted = np.zeros(args.num_envs)  # in the episode so far, to step t: sum_{i <= t} gamma^(t-i) r_i
    while not run.is_finished():
        epsilon = 0 if args.noisy else linear_schedule(args.start_e, args.end_e, exploration_steps, run.step)
        beta = linear_schedule(args.beta, 1, args.total_timesteps, run.step)
        obs = obs.copy()  # the environments may write the next ones into the same array
        actions = agent.explore(obs, epsilon, rng)
        next_obs, rewards, terminated, truncated, _ = envs.step(agent.to_env(actions))
        previous_step = run.step
        run.count(next_obs, rewards, terminated | truncated, reset_rows=reset_rows)  # moves run.step on
        learned_rewards = np.sign(rewards) if args.clip_reward else rewards
        buffer.add(obs, actions[:, None], learned_rewards, next_obs, terminated, truncated, reset_rows)
        discounted = (learned_rewards + args.gamma * discounted) * ~reset_rows
        agent.update_statistics(obs[~reset_rows], discounted[~reset_rows])  # the buffer keeps raw rows
        obs = next_obs
        reset_rows = terminated | truncated  # the next step only resets these environments

        for step in range(previous_step + 1, run.step + 1):  # one by one: no update is left out
            # Steps of open windows are not stored yet, so the buffer may hold fewer.
            starts = step >= learning_starts and buffer.size >= args.batch_size
            if starts and step % args.train_frequency == 0:
                agent.train()  # dropout, if you add it, acts here, not in play
                for _ in range(args.gradient_steps):
                    slots, weights, batch = buffer.sample(args.batch_size, rng, beta)
                    batch = batch._replace(rewards=agent.scaled(batch.rewards))
                    agent.draw_noise(rng)  # the same noise for Q(s, a) and a*; arXiv 1706.10295: one for each
                    target.draw_noise(rng)
                    losses, errors, metrics = losses_of(agent, target, batch, args)
                    loss = (weights * losses).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                    optimizer.step()
                    buffer.update_priorities(slots, errors)
                    run.log(loss=loss.detach(), **metrics)
                    warn_of_support(metrics, args)
                agent.eval()
                scheduler.step()
                run.log(sigma=agent.mean_sigma())
            if step % args.target_network_frequency == 0:
                target.load_state_dict(agent.state_dict())
                run.log(q_bound=q_bound(agent.scaled(buffer.rewards.max()), args.gamma**buffer.n_step))  # for the plot
        run.log(epsilon=epsilon, learning_rate=scheduler.get_last_lr()[0])
        if run.write_what_is_due():  # a checkpoint: all episodes begin anew, as in a resumed run
            envs, obs, reset_rows, rng = run.new_envs()
            discounted = np.zeros(args.num_envs)
            buffer.begin_episodes()
    return run.finish()


# ===== helpers: settings, parts of the networks, environments =====================================

CURVE = {"loss": "loss", "q": "mean Q", "sigma": "noise in the weights"}
EXPLORES = True  # training explores: only evaluations decide --stop-at-return
SCHEDULED = ("anneal_lr", "exploration_fraction", "prioritized")  # if set, a schedule ends with the run
ONLY_FLAGS = "resume evaluate model render capture_video config run_dir".split()  # not from config.json
PLUGINS = {"ALE": "ale_py", "MiniGrid": "minigrid", "BabyAI": "minigrid"}  # their import registers ids
ONE_HOT = ("minigrid.wrappers.OneHotPartialObsWrapper", "minigrid.wrappers.ImgObsWrapper")
REFUSED_WRAPPERS = {"NormalizeObservation": "--normalize-obs", "NormalizeReward": "--normalize-reward"}
VECTOR_MODE = None  # the environment's own vector version, if it has one
SAFE_IDS = r"[^:]*"  # ids that a stranger's config.json may ask for: module:Id imports the module
SUFFIX = ".pt"  # of models and checkpoints. With weights_only, reading them executes nothing:
write_state = torch.save
read_state = partial(torch.load, map_location="cpu", weights_only=True)
manual_seed = torch.manual_seed  # seeds torch, for dropout

# Tuned settings per environment; flags win over them. Where large rewards are rare, returns stay far within
# the v_min and v_max that Args names; narrower ones bring the atoms closer together.
AS_THEY_ARE = {"normalize_reward": False}
ATARI = {"num_envs": 8, "learning_rate": 6.25e-5, "anneal_lr": False, "adam_eps": 1.5e-4, "batch_size": 32,
         "learning_starts": 20_000, "target_network_frequency": 8_000, "clip_error": True,
         "clip_reward": True, "total_timesteps": 10_000_000, "checkpoint_every": 1_000_000} | AS_THEY_ARE  # fmt: skip
TUNED = {
    "CartPole-v1": {"num_envs": 4, "train_frequency": 64, "gradient_steps": 32, "batch_size": 64, "gamma": 0.98,
                    "learning_rate": 2e-3, "target_network_frequency": 64, "exploration_fraction": 0.16, "end_e": 0.04,
                    "hidden_sizes": (128, 128), "normalize_obs": True, "learning_starts": 200, "v_min": 0.0,
                    "v_max": 50.0, "total_timesteps": 50_000} | AS_THEY_ARE,
    "LunarLander-v3": {"num_envs": 4, "train_frequency": 2, "batch_size": 64, "learning_rate": 6.3e-4, "gamma": 0.995,
                       "target_network_frequency": 250, "exploration_fraction": 0.1, "hidden_sizes": (128, 128),
                       "v_min": -300.0, "v_max": 300.0, "total_timesteps": 300_000, "eval_every": 10_000,
                       "stop_at_return": 240} | AS_THEY_ARE,
    "Acrobot-v1": {"num_envs": 8, "train_frequency": 2, "target_network_frequency": 250, "learning_starts": 200,
                   "hidden_sizes": (128, 128), "normalize_obs": True, "v_min": -100.0, "v_max": 0.0,
                   "total_timesteps": 100_000} | AS_THEY_ARE,
    # with double and multi-step only: there are no tuned settings for all six
    "MountainCar-v0": {"prioritized": False, "dueling": False, "distributional": False, "noisy": False,
                       "train_frequency": 16, "gradient_steps": 16, "gamma": 0.98, "end_e": 0.07,
                       "target_network_frequency": 600, "hidden_sizes": (128, 128), "v_min": -50.0, "v_max": 0.0,
                       "total_timesteps": 150_000} | AS_THEY_ARE,
    # the paper's, but 8 environments, a smaller buffer, fewer steps, whole games; not confirmed
    "ALE/Pong-v5": ATARI, "ALE/Breakout-v5": ATARI,
}  # fmt: skip
tuned_settings = lambda args: TUNED.get(args.env_id, {})  # as the run section calls it


def q_bound(reward, discount):
    """The discounted sum of a reward r for ever; 0 for negative r, as episodes may end.

    bound = max(r, 0) / (1 - gamma)

    No true Q is higher if no reward is higher than r; a mean Q above it is overestimated.
    `discount` is gamma, or gamma^n if r sums n rewards.
    """
    return max(0.0, float(reward)) / max(1e-9, 1 - discount)


class RunningMeanStd(nn.Module):
    """Mean and variance of all rows seen so far. A module, so that every saved model holds them."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def update(self, rows):
        """Merge an array of B rows, each of the shape of `mean`.

        Chan, Golub & LeVeque 1979, eq. 2.1.
        """
        if len(rows) == 0:
            return
        device = self.mean.device
        rows = torch.as_tensor(rows, dtype=torch.float64, device=device).view(-1, *self.mean.shape)
        weight = len(rows) / (self.count + len(rows))
        delta = rows.mean(0) - self.mean
        self.mean += weight * delta
        self.var += weight * (rows.var(0, correction=0) - self.var)
        self.var += weight * (1 - weight) * delta**2
        self.count += len(rows)

    def forward(self, x):
        """Normalise (B, *shape), clip to ±10."""
        mean = self.mean.to(x.device, torch.float32)
        std = (self.var + 1e-8).sqrt().to(x.device, torch.float32)
        return ((x - mean) / std).clamp(-10, 10)


class Convolutions(nn.Module):
    """The convolutions of DQN (Mnih et al. 2015, doi 10.1038/nature14236).

    (B, *shape) of bytes -> (B, outputs).
    """

    def __init__(self, shape):
        super().__init__()
        self.channels_last = shape[2] == min(shape)
        channels, height, width = (shape[2], *shape[:2]) if self.channels_last else shape
        image = torch.zeros(1, channels, height, width)
        layers = []
        for outputs, kernel_size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            layers += [layer(nn.Conv2d(channels, outputs, kernel_size, stride)), nn.ReLU()]
            channels = outputs
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.outputs = self.layers(image).shape[1]

    def forward(self, images):
        """Features of images whose channels come first or last."""
        images = images.movedim(-1, -3) if self.channels_last else images
        return self.layers(images / 255)


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


def make_q_network(args, envs):
    """An untrained QNetwork for these environments. UserError if it cannot handle a space."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(obs_space, spaces.Box) or not isinstance(action_space, spaces.Discrete):
        pair = f"observations {obs_space} and actions {action_space}"
        raise UserError(f"{args.env_id}: Q-learning needs Discrete actions; {pair} are for ppo.py")
    if is_image(obs_space) and args.normalize_obs:
        raise UserError("normalize_obs is for vectors: images are always scaled to [0, 1]")
    device = choose_device(args, is_image(obs_space))
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = True  # images on a GPU: a resumed run ends as an unbroken one
    return QNetwork(obs_space, action_space, args, device).eval()


QNetwork = RainbowNetwork  # as make_q_network calls it
make_agent = make_q_network  # as the run section calls it


def outside_support(rewards, terminated, discounts, probs, support):
    """The probability (B,) that `project` clips y; a margin keeps rounding errors out."""
    margin = 0.01 * (support[1] - support[0])
    y = rewards[:, None] + (discounts * ~terminated)[:, None] * support
    beyond = (y < support[0] - margin) | (y > support[-1] + margin)
    return (probs * beyond).sum(1)


def warn_of_support(metrics, args):
    """Warn (Python hides repetitions) if over 5 % of a batch's probability is beyond the support."""
    if metrics.get("outside_support", 0) > 0.05:
        support = f"[{args.v_min:g}, {args.v_max:g}]"
        gym.logger.warn(f"returns leave the support {support}: see --v-min and --v-max")


def make_n_step_buffer(args, envs, agent):
    """The replay buffer that `args` ask for. UserError if sizes or the support are not right."""
    n_step = args.n_step if args.multi_step else 1
    if args.distributional and (args.v_min >= args.v_max or args.num_atoms < 2):
        raise UserError("v_min must be less than v_max, and num_atoms at least 2")
    if args.buffer_size < max(args.batch_size, n_step * args.num_envs):
        raise UserError("buffer_size must not be less than batch_size or n_step x num_envs")
    if max(args.learning_starts, args.batch_size) >= args.total_timesteps:
        print("learning_starts or batch_size is not below total_timesteps: nothing will be learnt")
    space = envs.single_observation_space
    itemsize = 1 if space.dtype == np.uint8 else 4
    num_bytes = 2 * args.buffer_size * math.prod(space.shape) * itemsize  # obs and next_obs
    try:
        np.empty(num_bytes, np.uint8)  # takes no memory yet; most systems refuse more than they have
    except (MemoryError, ValueError) as error:
        size = f"{num_bytes / 2**30:,.1f} GiB"
        raise UserError(f"buffer_size {args.buffer_size:,} takes {size}: choose a smaller one") from error
    alpha = args.alpha if args.prioritized else None
    settings = args.num_envs, n_step, args.gamma, alpha
    return NStepBuffer(args.buffer_size, space, envs.single_action_space, agent.device, *settings)


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
