"""What rainbow.py adds to dqn.py, from numbers worked out by hand, a lesson to be read beside it, to whole runs.

Each test must also fail for each of the mistakes that stand above it in `catches`. What rainbow.py shares with dqn.py
and ppo.py is the same text there (test_shared_code.py), and has its tests in test_dqn.py, test_ppo.py and test_run.py.
"""

from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import rainbow as reference
from run_folder import check_evaluation, check_refused, command, kill_and_resume
from tools import Chance, Probe, Walk, catches, close, fails, flat, rehearse, vector_env

NUMBER, VECTOR, TWO = spaces.Box(-np.inf, np.inf, (1,)), spaces.Box(-np.inf, np.inf, (3,)), spaces.Discrete(2)
SUPPORT = torch.tensor([-2.0, -1, 0, 1, 2])  # five atoms, a distance of 1 apart

# ------------------------------------------------------------------------------------------------- a lesson, by hand


@catches(
    "project, lost beyond the ends: y = y.clamp(support[0], support[-1]) -> pass",
    "project, goes on after termination: * ~terminated -> * (terminated | True)",
)
def test_project(script):
    """gamma = 0.5. A return that is certain to be z = 1 or 2 becomes y = r + 0.5 z. The atoms are -2, -1, 0, 1, 2.

    r     z       y        the probability goes
    0.5   1       1        to atom 1: y falls on it
    0.25  1       0.75     to 0 and 1, a quarter and three quarters: y is three times as near to 1
    3     2       4        to 2: y is beyond the end
    -4    2      -3        to -2: the other end
    -1.5  any    -1.5      to -2 and -1, a half each: it terminated, so nothing follows
    1     2      1.25      to 1 and 2, three quarters and one, with 0.125 for gamma: three steps, gamma^3
    """
    rewards = torch.tensor([0.5, 0.25, 3, -4, -1.5, 1])
    terminated = torch.tensor([0, 0, 0, 0, 1, 0]) > 0
    gamma = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5, 0.125])
    probs = torch.eye(5)[[3, 3, 4, 4, 4, 4]]
    projected = script.project(rewards, terminated, gamma, probs, SUPPORT)
    expected = [[0, 0, 0, 1, 0], [0, 0, 0.25, 0.75, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]]
    close(projected, [*expected, [0, 0, 0, 0.75, 0.25]])


@catches("project, shared by all atoms: .clamp(min=0) -> .abs()")
def test_project_keeps_probability_and_mean(script):
    """p = (0.1, 0.2, 0.4, 0.2, 0.1), whose mean is 0, under r = 0.5 and gamma = 0.5: y = -0.5, 0, 0.5, 1, 1.5.

    -0.5: 0.05 to -1 and to 0; 0: 0.2 to 0; 0.5: 0.2 to 0 and to 1; 1: 0.2 to 1; 1.5: 0.05 to 1 and to 2.
    Sums: 0, 0.05, 0.45, 0.45, 0.05, together 1; mean -0.05 + 0.45 + 0.1 = 0.5 = r. With r = 1.5 the same, one further:
    0, 0, 0.05, 0.45, 0.45 and 0.05 at 3, which is cut off at 2. The sum is 1, the mean 1.45: less than 1.5.
    """
    probs = torch.tensor([[0.1, 0.2, 0.4, 0.2, 0.1]]).expand(2, 5)
    projected = script.project(torch.tensor([0.5, 1.5]), torch.zeros(2) > 0, 0.5, probs, SUPPORT)
    close(projected, [[0, 0.05, 0.45, 0.45, 0.05], [0, 0, 0.05, 0.45, 0.5]])
    close(projected.sum(1), [1, 1])
    close((projected * SUPPORT).sum(1), [0.5, 1.45])


@catches(
    "outside_support, below forgotten: (y < support[0] - margin) | -> ",
    "outside_support, the end itself counts: > support[-1] + margin -> >= support[-1]",
)
def test_outside_support(script):
    """p = (0.1, 0.2, 0.4, 0.2, 0.1) on z = (-2, -1, 0, 1, 2); y = r + 0.5 z. With r = 1.5 only y = 2.5 is beyond, and
    has 0.1; with r = -2.5, y = -3.5, -3, -2.5: 0.7.

    r = 1: y = 2 falls on the end, and is not beyond. r = 3: all of it if it terminated, else what is above 2: 0.9.
    """
    probs = torch.tensor([[0.1, 0.2, 0.4, 0.2, 0.1]]).expand(5, 5)
    rewards, terminated = torch.tensor([1.5, -2.5, 1.0, 3.0, 3.0]), torch.tensor([0, 0, 0, 1, 0]) > 0
    close(script.outside_support(rewards, terminated, 0.5, probs, SUPPORT), [0.1, 0.7, 0, 1, 0.9])


def table(*log_probs):
    """A network that gives these log-probs (actions, atoms) on the atoms 0 and 1 for every observation."""
    probs = torch.tensor(log_probs)[None]
    network = lambda obs: (probs * torch.tensor([0.0, 1])).sum(2)
    network.log_probs = lambda obs: probs.log()
    network.support = torch.tensor([0.0, 1])
    return network


@catches(
    "distributional_losses, never double: if args.double -> if False",
    "distributional_losses, cross-entropy: torch.xlogy(targets, targets) - targets * log_probs -> -targets * log_probs",
)
def test_distributional_loss(script):
    """Atoms 0 and 1, so that Q is the probability of 1. Two actions, and action 0 was taken; r = 0.5, gamma^n = 0.5.

    The network says (0.8, 0.2) and (0.4, 0.6): Q = 0.2, 0.6. The target network: (0, 1) and (0.5, 0.5), Q' = 1, 0.5.
    Double: the network's choice is action 1, of which the target network says (0.5, 0.5). y is 0.5 or 1: 0.25 to 0 and
    0.75 to 1. KL = 0.25 ln(0.25 / 0.8) + 0.75 ln(0.75 / 0.2) = -0.2908 + 0.9913 = 0.7005.
    Not double: action 0 with (0, 1), y is 1 for certain, KL = ln(1 / 0.2) = 1.6094 (and 0 ln 0 = 0).
    With r = 0.6 half of the probability (all of it) would lie at 1.1.
    """
    agent, target = table([0.8, 0.2], [0.4, 0.6]), table([0.0, 1.0], [0.5, 0.5])
    number, half = torch.tensor([[0.0]]), torch.tensor([0.5])
    batch = script.NStepTransitions(number, torch.tensor([[0]]), half, number, torch.zeros(1) > 0, half)
    for double, divergence, outside in ((True, 0.7005, 0.5), (False, 1.6094, 1.0)):
        losses, errors, metrics = script.distributional_losses(agent, target, batch, script.Args(double=double))
        close(losses, [divergence], atol=1e-4)
        close(errors, losses)
        close([metrics["q"], metrics["outside_support"]], [0.2, 0])
        *_, metrics = script.distributional_losses(
            agent, target, batch._replace(rewards=half + 0.1), script.Args(double=double)
        )
        close(metrics["outside_support"], outside)


@catches(
    "td_losses, never double: if args.double -> if False",
    "td_losses, never clipped: args.clip_error -> False",
    "td_losses, gamma for gamma^n: batch.terminated, batch.discounts, -> batch.terminated, 0.5,",
)
def test_td_losses(script):
    """Two actions, action 1 was taken, over two steps with rewards that sum to 3; gamma^2 = 0.25.

    Q = (2, 1), Q'(s') = (4, 8), Q(s') = (2, 1). Double: action 0, y = 3 + 0.25 x 4 = 4, error 3, loss 9.
    Not double: action 1, y = 3 + 0.25 x 8 = 5, error 4, loss 16. Terminated: y = 3, error 2, loss 4.
    With --clip-error: 3 - 0.5 = 2.5, 3.5 and 1.5.
    """
    agent, target = (lambda obs: torch.tensor([[2.0, 1]])), (lambda obs: torch.tensor([[4.0, 8]]))
    for double, terminated, error in ((True, 0, 3), (False, 0, 4), (True, 1, 2)):
        step = torch.tensor([[1]]), torch.tensor([3.0]), None, torch.tensor([terminated]) > 0, torch.tensor([0.25])
        batch = script.NStepTransitions(None, *step)
        losses, errors, _ = script.td_losses(agent, target, batch, script.Args(double=double))
        close(losses, [error**2])
        losses, _, _ = script.td_losses(agent, target, batch, script.Args(double=double, clip_error=True))
        close(losses, [error - 0.5])
        close(errors, [error])


@catches(
    "NoisyLinear.remove_noise, of the inputs only: self.output_noise.zero_() -> pass",
    "NoisyLinear.forward, no noise in the bias: self.bias + self.sigma_bias * self.output_noise -> self.bias",
)
def test_noisy_layer(script):
    """Numbers drawn: e_in = (4, -9), e_out = (1, -0.25), so f(e_in) = (2, -3), f(e_out) = (1, -0.5).

    noise_W = ((1 x 2, 1 x -3), (-0.5 x 2, -0.5 x -3)) = ((2, -3), (-1, 1.5)), noise_b = (1, -0.5). With W = ((1, 2),
    (3, 4)), sigma_W = ((0.1, 0.2), (0.3, 0.4)), b = (5, 6), sigma_b = (0.5, 1) the weights are ((1.2, 1.4), (2.7, 4.6))
    and the biases (5.5, 5.5). For x = (1, 10): y = (1.2 + 14 + 5.5, 2.7 + 46 + 5.5) = (20.7, 54.2). Once it is
    removed: (1 + 20 + 5, 3 + 40 + 6) = (26, 49).
    """
    noisy = script.NoisyLinear(2, 2, sigma=0.5)
    close([*noisy.sigma_weight.flatten().tolist(), *noisy.sigma_bias.tolist()], np.full(6, 0.5 / 2**0.5))
    noisy.weight.data = torch.tensor([[1.0, 2], [3, 4]])
    noisy.bias.data = torch.tensor([5.0, 6])
    noisy.sigma_weight.data = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    noisy.sigma_bias.data = torch.tensor([0.5, 1])
    drawn = iter([np.array([4.0, -9]), np.array([1.0, -0.25])])
    noisy.draw_noise(SimpleNamespace(standard_normal=lambda size: next(drawn, np.zeros(size))))
    x = torch.tensor([[1.0, 10]])
    close(noisy(x), [[20.7, 54.2]])
    noisy.remove_noise()
    close(noisy(x), [[26, 49]])


@catches(
    "dueling_values, V + A - max A: advantages.mean(1, keepdim=True) -> advantages.amax(1, keepdim=True)",
)
def test_dueling(script):
    """V = 1, A = (1, 2, 6) with the mean 3: Q = 1 + (-2, -1, 3) = (-1, 0, 4). Fails for V + A or V + A - max A.

    With two atoms, each by itself: V = (1, 0), A = (1, 5), (2, 5), (6, 2), means 3 and 4.
    """
    one = script.dueling_values(torch.tensor([[[1.0]]]), torch.tensor([[[1.0], [2], [6]]]))
    close(one, [[[-1], [0], [4]]])
    two = script.dueling_values(torch.tensor([[[1.0, 0]]]), torch.tensor([[[1.0, 5], [2, 5], [6, 2]]]))
    close(two, [[[-1, 1], [0, 1], [4, -2]]])


def add(buffer, rewards, ends="", resets=""):
    """One step of N environments, whose obs are the rewards; `ends`: a letter for each, t terminated, c truncated."""
    obs = np.array(rewards, np.float32)[:, None]
    terminated, truncated = (np.array([end == kind for end in ends.ljust(len(obs))]) for kind in "tc")
    reset_rows = np.array([mark == "r" for mark in resets.ljust(len(obs))])
    actions = np.zeros((len(obs), 1), int)
    return buffer.add(obs, actions, obs[:, 0], obs + 0.5, terminated, truncated, reset_rows).tolist()


@catches(
    "NStepBuffer.add, truncation terminates: next_obs[i], terminated[i]) -> next_obs[i], done)",
    "NStepBuffer.add, reset rows are steps: np.flatnonzero(~reset_rows) -> range(len(obs))",
    "NStepBuffer.write, always gamma^n: self.gamma ** len(steps) -> self.gamma**self.n_step",
)
def test_n_step_windows(script):
    """n = 3, gamma = 0.5, two environments; the first terminates in step 1 (t), the second is cut off in step 2 (c).

    rewards  step   0   1   2      3      slots 0, 1: 1 + 0.5 x 2 = 2 and 2, both over with step 1
          env 0     1   2t  reset  4      slot 2: 10 + 0.5 x 20 + 0.25 x 30 = 27.5, three steps, gamma^3 = 0.125
          env 1     10  20  30c    reset  slots 3, 4: 20 + 0.5 x 30 = 35 and 30, from the final observation on

    Nothing is stored of windows that are open: neither steps 0 and 1 of env 1 before step 2, nor step 3 of env 0. With
    Q' = 8 the targets are 2, 2, 27.5 + 0.125 x 8 = 28.5, 35 + 0.25 x 8 = 37 and 30 + 0.5 x 8 = 34.
    """
    buffer = script.NStepBuffer(6, NUMBER, TWO, num_envs=2, n_step=3, gamma=0.5)
    written = [add(buffer, [1, 10]), add(buffer, [2, 20], "t-"), add(buffer, [3, 30], "-c", "r-")]
    assert written == [[], [0, 1], [2, 3, 4]] and add(buffer, [4, 40], "--", "-r") == [] and buffer.size == 5
    batch = buffer.get(np.arange(5))
    close(batch.obs.ravel(), [1, 2, 10, 20, 30])
    close(batch.rewards, [2, 2, 27.5, 35, 30])
    close(batch.next_obs.ravel(), [2.5, 2.5, 30.5, 30.5, 30.5])
    close(batch.discounts, [0.25, 0.5, 0.125, 0.25, 0.5])
    assert batch.terminated.tolist() == [True, True, False, False, False]
    y = script.td_targets(batch.rewards, batch.terminated, batch.discounts, torch.full((5, 2), 8.0))
    close(y, [2, 2, 28.5, 37, 34])
    assert add(buffer, [5, 50]) == [] and add(buffer, [6, 60]) == [5]  # 4 + 0.5 x 5 + 0.25 x 6 = 8
    assert add(buffer, [7, 70], "-t") == [0, 1, 2, 3]  # the ring begins anew: 5 + 3 + 1.75, then 50 + 30 + 17.5, …
    close(buffer.rewards, [9.75, 97.5, 95, 70, 30, 8])
    assert buffer.size == 6
    buffer.begin_episodes()  # a checkpoint: steps 6 and 7 of env 0, whose windows are open, are given up
    assert add(buffer, [8, 80], "t-") == [4] and buffer.rewards[4] == 8


@catches(
    "SumTree.add, new ones get 1: self.highest -> 1.0",
)
def test_sum_tree(script):
    """Errors 1, -4, 16 in three slots; alpha = 0.5, priorities 1, 2, 4, sum 7. Weights with beta = 1: 1, 1/2, 1/4.

    Four draws, one from each quarter of the sum, all from its middle: 0.875, 2.625, 4.375, 6.125. The first is less
    than 1, slot 0; the second less than 1 + 2, slot 1; the others slot 2. In a batch without slot 0 the largest is 1/2.
    beta = 0: all weights are 1. A new transition in slot 1 gets the highest priority so far, 4, also later on.
    """
    tree = script.SumTree(3, alpha=0.5)
    tree.update(np.arange(3), np.array([1.0, -4, 16]))
    close(tree.nodes, [0, 7, 3, 4, 1, 2, 4, 0], atol=1e-4)
    middle = SimpleNamespace(random=lambda size: np.full(size, 0.5))
    for beta, expected in ((1, [1, 0.5, 0.25, 0.25]), (0.5, [1, 0.5**0.5, 0.5, 0.5]), (0, [1, 1, 1, 1])):
        slots, weights = tree.sample(4, middle, beta)
        assert slots.tolist() == [0, 1, 2, 2]
        close(weights, expected)
    slots, weights = tree.sample(2, middle, 1)  # 1.75 and 5.25
    assert slots.tolist() == [1, 2]
    close(weights, [1, 0.5])
    tree.update(np.array([2]), np.array([1.0]))
    tree.add(np.array([1]))
    close(tree.nodes[4:], [1, 4, 1, 0], atol=1e-4)


# -------------------------------------------------------------------------- buffers, against slow versions of them

PLAN = st.lists(st.tuples(st.integers(1, 7), st.sampled_from("tcb")), min_size=1, max_size=3)
PLAYS = {"plans": st.lists(PLAN, min_size=1, max_size=3), "n": st.integers(1, 4), "steps": st.integers(1, 30)}
PLAYS |= {"restarts": st.lists(st.integers(1, 20), max_size=2), "capacity": st.integers(12, 40)}
PLAY = {"plans": [[(3, "t"), (5, "c")], [(5, "b")]], "n": 2, "steps": 24, "restarts": [9, 15], "capacity": 12}


def play(buffer, plans, steps, restarts, n=1):
    """Play `plans`, and store the steps. Before the steps in `restarts` all episodes begin anew.

    Returns the slots that add returned, one after the other; and all transitions over up to n steps, cut out of lists
    with gamma = 0.5: [obs, [action], return, next obs, terminated, discount].
    """
    transitions, slots, num_envs = [], [], len(plans)
    for t in range(steps):
        if t == 0 or t in restarts:
            envs = vector_env([lambda i=i, t=t: Walk(plans[i], i + num_envs * t) for i in range(num_envs)], num_envs)
            (obs, _), reset_rows, episodes = envs.reset(), np.zeros(num_envs, bool), [[] for _ in plans]
            buffer.begin_episodes()
        actions = np.full(num_envs, t % 2)
        next_obs, rewards, terminated, truncated, _ = envs.step(actions)
        slots += buffer.add(obs.copy(), actions[:, None], rewards, next_obs, terminated, truncated, reset_rows).tolist()
        ended = terminated | truncated
        for i in np.flatnonzero(~reset_rows):
            episode = episodes[i]
            episode.append((obs[i].tolist(), t % 2, rewards[i]))
            length = len(episode)
            for first in range(max(0, length - n), length if ended[i] else max(0, length - n + 1)):
                total = sum(0.5**k * reward for k, (*_, reward) in enumerate(episode[first:]))
                start, action, _ = episode[first]
                discount = 0.5 ** (length - first)
                transitions.append([start, [action], total, next_obs[i].tolist(), terminated[i], discount])
            if ended[i]:
                episode.clear()
        obs, reset_rows = next_obs, ended
    return slots, transitions


@catches(
    "NStepBuffer.add, mixes environments: steps = self.open_steps[i] -> steps = self.open_steps[0]",
    'NStepBuffer.state_dict, position lost: "position": self.position -> "position": 0',
)
@settings(max_examples=30)
@given(**PLAYS)
@example(**PLAY)
def test_windows_equal_a_list(script, capacity, plans, n, steps, restarts):
    """The ring holds the last transitions of all that the loop cuts out of the episodes; also after a checkpoint."""
    new_ring = lambda: script.NStepBuffer(capacity, VECTOR, TWO, num_envs=len(plans), n_step=n, gamma=0.5)
    buffer, loaded = new_ring(), new_ring()
    slots, expected = play(buffer, plans, steps, restarts, n)
    assert slots == [number % capacity for number in range(len(expected))]
    loaded.load_state_dict(buffer.state_dict())
    for ring in (buffer, loaded):
        assert ring.size == min(len(slots), capacity) and ring.position == len(slots) % capacity
        numbers = range(len(slots) - ring.size, len(slots))
        batch = ring.get(np.array(numbers, int) % capacity)
        assert [[x.tolist() for x in row] for row in zip(*batch)] == [expected[number] for number in numbers]


@catches(
    "NStepBuffer.__init__, pixels as floats: np.uint8 if -> np.float32 if",
    "Convolutions.forward, channels stay last: images.movedim(-1, -3) -> images.mT",
    "Convolutions.forward, pixels up to 255: images / 255 -> images * 1.0",
    "RainbowNetwork.__init__, streams without a hidden layer: self.body.outputs, 512 -> [self.body.outputs]",
)
def test_images(script):
    """Images stay bytes. Whether channels come first or last, the streams see the same, from pixels from 0 to 1."""
    no, images = np.zeros(2, bool), np.random.default_rng(0).integers(256, size=(2, 40, 40, 40), dtype=np.uint8)
    space, args = spaces.Box(0, 255, (40, 40, 40), np.uint8), script.Args(noisy=False)
    agent, buffer = script.RainbowNetwork(space, TWO, args), script.NStepBuffer(4, space, TWO, num_envs=2)
    buffer.add(images, np.zeros((2, 1), int), np.zeros(2), images[::-1], no, no, no)
    assert buffer.obs.dtype == buffer.next_obs.dtype == np.uint8
    assert (buffer.get(np.array([1])).next_obs[0].numpy() == images[0]).all()
    outputs = agent.outputs(torch.tensor(images))
    features = agent.body.layers(torch.tensor(images).movedim(3, 1) / 255)
    advantages, value = agent.advantage(features).view(2, 2, -1), agent.value(features)[:, None]
    assert agent.body.channels_last and len(agent.advantage) == 3 and agent.advantage[0].out_features == 512
    close(outputs, value + advantages - advantages.mean(1, keepdim=True), atol=1e-4)
    agent.body.channels_last = False
    close(agent.outputs(torch.tensor(images).movedim(3, 1)), outputs, atol=1e-4)


PRIORITIES = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=1, max_size=40).filter(any)


@catches(
    "SumTree.sample, empty slots: & (right > 0) -> ",
    "SumTree.load_state_dict, highest lost: self.highest = state -> highest = state",
)
@settings(max_examples=30)
@given(priorities=PRIORITIES, batch_size=st.integers(1, 16), seed=st.integers(0, 99))
@example(priorities=[3.0, 0.5, 0.0, 2.0, 0.25, 8.0, 1.0], batch_size=7, seed=3)
def test_tree_equals_a_search(script, priorities, batch_size, seed):
    """The walk through the tree ends where a search in the cumulative sums does, and never in an empty slot."""
    tree, loaded = (script.SumTree(len(priorities), 1.0) for _ in range(2))
    priorities = np.array(priorities)
    tree.write(np.arange(len(priorities)), priorities)
    tree.highest = 7.0
    inner = np.arange(1, tree.leaves)
    close(tree.nodes[inner], tree.nodes[2 * inner] + tree.nodes[2 * inner + 1], atol=0)
    slots, weights = tree.sample(batch_size, np.random.default_rng(seed), 0.4)
    numbers = (np.arange(batch_size) + np.random.default_rng(seed).random(batch_size)) * priorities.sum() / batch_size
    cumulative = np.concatenate([[0], priorities.cumsum()])
    slack = 1e-9 * cumulative[-1]  # the sums were rounded in another order
    assert (priorities[slots] > 0).all()
    assert (cumulative[slots] - slack <= numbers).all() and (numbers <= cumulative[slots + 1] + slack).all()
    close(weights, (priorities[slots] / priorities[slots].min()) ** -0.4, atol=1e-4)
    upper_edges = SimpleNamespace(random=np.ones)  # to where rounding may lead
    assert (tree.nodes[tree.leaves + tree.sample(batch_size, upper_edges, 0.0)[0]] > 0).all()
    loaded.load_state_dict(tree.state_dict())
    assert (loaded.nodes == tree.nodes).all() and loaded.highest == 7


@catches(
    "NStepBuffer.sample, more than there is: batch_size > self.size -> False",
    "NStepBuffer.sample, empty slots drawn: rng.integers(self.size -> rng.integers(self.capacity",
)
def test_sampling(script):
    """10 of 16 slots are filled. All are drawn alike, as new transitions are by priority; then slot 1 more often."""
    for alpha in (None, 0.5):
        buffer, rng = script.NStepBuffer(16, VECTOR, TWO, n_step=1, alpha=alpha), np.random.default_rng(0)
        play(buffer, [[(99, "t")]], 10, [])
        assert buffer.tree is None or buffer.tree.nodes[1] == 10
        counts = np.bincount(np.concatenate([buffer.sample(10, rng)[0] for _ in range(500)]), minlength=10)
        slots, weights, batch = buffer.sample(10, rng, 0.5)
        close(batch.rewards, buffer.rewards[slots])
        close(weights, np.ones(10))
        with fails("cannot sample 11 of 10 stored transitions"):
            buffer.sample(11, rng)
        assert len(counts) == 10 and ((counts - 500) ** 2 / 500).sum() < 28  # chi-square, 9 degrees: p = 0.001
    again = script.NStepBuffer(16, VECTOR, TWO, n_step=1, alpha=0.5)
    buffer.update_priorities(np.array([1, 2, 3]), torch.tensor([9.0, 0.25, 0.0]))
    again.load_state_dict(buffer.state_dict())
    close(again.tree.nodes[again.tree.leaves :][:5], [1, 3, 0.5, 1e-3, 1])


# ---------------------------------------------------------- network and training, against slow and obvious versions


@catches(
    "RainbowNetwork.log_probs, softmax over actions: log_softmax(2) -> log_softmax(1)",
    "RainbowNetwork.act, noise in evaluations: noisy_layer.remove_noise() -> pass",
    "RainbowNetwork.explore, acts without new noise: self.draw_noise(rng) -> pass",
    "RainbowNetwork.mean_sigma, signs cancel out: .abs().mean() -> .mean()",
)
def test_network(script):
    """Every stream, atom and noisy layer is where the drawing has it. Only the streams are noisy, every layer of them;
    evaluations see no noise. Exploration draws it anew.
    """
    torch.manual_seed(0)
    obs = np.random.default_rng(0).normal(1, 2, (5, 3)).astype(np.float32)
    plain = script.stream((4, 3), 2, torch.nn.Linear)[-1].weight
    close(plain @ plain.T, np.eye(2))
    cases = (
        ((8, 5), True, True, True),
        ((7,), False, True, False),
        ((), True, False, True),
        ((9, 8, 7), False, False, False),
    )
    for sizes, dueling, distributional, noisy in cases:
        switches = {"dueling": dueling, "distributional": distributional, "noisy": noisy, "normalize_obs": True}
        args = script.Args(hidden_sizes=sizes, v_min=-2.0, v_max=3.0, num_atoms=6, **switches)
        agent = script.RainbowNetwork(VECTOR, spaces.Discrete(4, start=-1), args)
        for p in agent.parameters():
            p.data += 0.3 * torch.randn(p.shape)  # so that nothing is zero by chance
        agent.obs_stats.update(obs)
        streams = [agent.advantage] + [agent.value] * dueling
        linears = [module for stream in streams for module in stream if isinstance(module, torch.nn.Linear)]
        assert len(linears) == (1 + dueling) * min(2, len(sizes) + 1)
        assert [isinstance(module, script.NoisyLinear) for module in linears] == [noisy] * len(linears)
        close(agent.mean_sigma(), np.mean([m.sigma_weight.abs().mean().item() for m in linears]) if noisy else 0)
        seen = ((obs - obs.mean(0)) / obs.std(0)).clip(-10, 10)
        agent.draw_noise(np.random.default_rng(1))
        for evaluating in (False, True):
            if evaluating:
                agent.act(obs)  # removes the noise
            expected = [reference.outputs(agent, x, 4, 6 if distributional else 1) for x in seen]
            close(agent.outputs(torch.tensor(obs)), torch.stack(expected), atol=1e-4)
            if distributional:
                q = torch.stack([(x.softmax(1) * torch.arange(-2.0, 4)).sum(1) for x in expected])
            else:
                q = torch.stack(expected)[:, :, 0]
            close(agent(torch.tensor(obs)), q, atol=1e-4)
        agent.draw_noise(np.random.default_rng(1))
        assert (agent.act(obs) == q.argmax(1).numpy() - 1).all()
        assert not any(module.output_noise.any() for module in agent.noisy_layers)
        before = agent(torch.tensor(obs))
        agent.explore(obs, 0.0, np.random.default_rng(2))
        assert torch.equal(before, agent(torch.tensor(obs))) != noisy


SWITCHES = "double prioritized dueling multi_step distributional noisy".split()
PLANS = [[(4, "t"), (6, "c")], [(1, "b"), (7, "c"), (2, "t")]]
SHORT = {"num_envs": 2, "hidden_sizes": (8, 6), "num_atoms": 5, "v_min": -10.0, "v_max": 90.0, "gamma": 0.8, "seed": 5}
SHORT |= {"batch_size": 6, "learning_starts": 11, "train_frequency": 3, "gradient_steps": 2, "buffer_size": 20}
SHORT |= {"target_network_frequency": 5, "total_timesteps": 36, "learning_rate": 0.02, "n_step": 3}
SHORT |= {"normalize_reward": False, "alpha": 0.7, "beta": 0.3, "exploration_fraction": 0.5, "sigma": 0.8}


@catches(
    "train, learns with the noise it has acted with: agent.draw_noise(rng) -> pass",
    "train, observations overwritten: obs.copy() -> obs",
    "train, weights left out: (weights * losses).mean() -> losses.mean()",
    "train, weighted errors: update_priorities(slots, errors) -> update_priorities(slots, weights * errors)",
    "train, epsilon beside the noise: 0 if args.noisy else -> ",
    "train, reset rows stored: truncated, reset_rows) -> truncated, reset_rows & False)",
    "train, the target stays: target.load_state_dict(agent.state_dict()) -> pass",
)
def test_training(script):
    """36 steps of two environments: every weight and priority is that of tests/reference/rainbow.py, with all six
    improvements and with some of them. So everything in the loop happens in its order, at its step.
    """
    for off in ([], ["noisy", "distributional"], ["prioritized", "multi_step", "dueling"]):
        given = SHORT | {name: name not in off for name in SWITCHES} | {"max_grad_norm": 0.5 if off else 1e6}
        networks, make_agent = [], script.make_agent

        def make_three(args, envs):
            """Weights at random, with which the slow version begins as well."""
            for _ in range(3):
                networks.append(make_agent(args, envs))
                for p in networks[-1].parameters():
                    p.data += 0.3 * torch.randn(p.shape)
            return networks[0]

        walks = [lambda n=n: Walk(PLANS[n], n) for n in range(2)]
        reuse_arrays = mock.patch("tools.vector_env", lambda makers, n: gym.vector.SyncVectorEnv(walks[:n], copy=False))
        with mock.patch.object(script, "make_agent", make_three), reuse_arrays:
            run = rehearse(script, **given)
        _, agent, target = networks
        priorities = reference.train(script, run.args, agent, target, vector_env(walks, 2))
        close(flat(run.agent), flat(agent), atol=2e-4)
        close(flat(run.parts["target"]), flat(target), atol=2e-4)
        assert all(p.grad is None for p in run.parts["target"].parameters())
        tree = run.parts["buffer"].tree
        if tree is not None:
            close(tree.nodes[tree.leaves :][:20], priorities, atol=2e-3)


@catches(
    "RainbowNetwork.scaled, not clipped: .clip(-10, 10) -> ",
    "RainbowNetwork.update_statistics, never counted: self.return_stats.update( -> len(",
    "train, rewards as they are: agent.scaled(batch.rewards) -> batch.rewards",
    "train, bound of the rewards as they are: agent.scaled(buffer.rewards.max()) -> buffer.rewards.max()",
    "train, sums outlive a restart: discounted = np.zeros(args.num_envs)\n            buffer -> 0\n            buffer",
    "train, sums of rewards outlive an end: discounted) * ~reset_rows -> discounted)",
    "train, sums of resets counted: discounted[~reset_rows] -> discounted",
    "train, statistics of what comes next: update_statistics(obs[ -> update_statistics(next_obs[",
)
def test_with_all_switches_off_it_is_dqn(script):
    """Every number of a run is that of dqn.py, in several environments, with checkpoints and normalisation."""
    import dqn

    given = {"num_envs": 3, "total_timesteps": 300, "learning_starts": 9, "batch_size": 21, "buffer_size": 200}
    given |= {"hidden_sizes": (20, 10), "normalize_obs": True, "target_network_frequency": 30, "gradient_steps": 2}
    given |= {"checkpoint_every": 100, "double": False}
    one, other = rehearse(dqn, Chance, **given), rehearse(script, Chance, **dict.fromkeys(SWITCHES, False) | given)
    assert torch.equal(flat(one.agent), flat(other.agent)) and one.episodes == other.episodes
    assert torch.equal(flat(one.parts["target"]), flat(other.parts["target"]))
    close(other.agent.scaled(torch.tensor([-1e9, 1e9])), [-10, 10])
    for name, values in one.all_logged.items():
        assert np.array_equal([float(x) for x in values], [float(x) for x in other.all_logged[name]])


# -------------------------------------------------------------------------------- worlds whose right answer is known

EASY = {"num_envs": 8, "learning_rate": 2e-2, "gamma": 0.5, "hidden_sizes": (16,), "batch_size": 32, "end_e": 0.5}
EASY |= {"learning_starts": 100, "train_frequency": 8, "target_network_frequency": 50, "total_timesteps": 2000}
EASY |= {
    "normalize_reward": False,
    "buffer_size": 1_000,
    "eval_episodes": 8,
    "num_atoms": 21,
    "v_min": -1.0,
    "v_max": 3.0,
    "n_step": 3,
}


@pytest.mark.slow
@pytest.mark.parametrize("on", ["all", *SWITCHES])
def test_small_worlds_are_learnt(script, on):
    """With all six improvements, and with each of them alone: 1 for ever, 1 after two steps, 1 for the right action."""
    given = EASY | {"train_frequency": 4} | {name: on in (name, "all") for name in SWITCHES}
    later, right = (lambda obs, _: obs == 1), (lambda obs, action: action == (obs > 0))
    for world, values in ((lambda: Probe(end="c"), [2, 2]), (lambda: Probe(later, steps=2), [0.5, 0.5])):
        agent = rehearse(script, world, **given).agent  # an evaluation has removed the noise
        close(agent(torch.zeros(1, 1)), [values], atol=0.4)  # the mean weights' Q is not the mean of the noisy ones'
    assert rehearse(script, lambda: Probe(right, varied=True), **given).evaluations["return_mean"] == [1]


@catches('warn_of_support, never: metrics.get("outside_support", 0) > 0.05 -> False')
def test_returns_that_leave_the_support_are_named(script):
    """1 in each step for ever, gamma = 0.9: 10. The support ends at 6, or at 10, which is no more than enough."""
    for v_max, warned in ((6.0, True), (10.0, False)):
        with mock.patch.object(gym.logger, "warn") as warn:
            given = {"gamma": 0.9, "v_min": 0.0, "v_max": v_max, "total_timesteps": 1000}
            rehearse(script, lambda: Probe(end="c"), **EASY | given)
        assert bool(warn.call_args) == warned and (not warned or "[0, 6]" in warn.call_args.args[0])


# ------------------------------------------------------------------------------------------------------- whole runs

RUN = "--num-envs 2 --hidden-sizes 8 --batch-size 16 --learning-starts 30 --buffer-size 60 --train-frequency 8 "
RUN += "--gradient-steps 1 --max-episode-steps 12 --total-timesteps 120 --checkpoint-every 30 --eval-every 80 "
RUN += "--eval-episodes 3"


@catches("train, target network not saved: target=target, -> ")
def test_killed_resumed_evaluated(script, tmp_path, monkeypatch, capsys):
    """--evaluate plays the best weights, without noise, and changes nothing."""
    kill_and_resume(script, RUN, 23, monkeypatch, tmp_path)
    check_evaluation(script, capsys)
    assert command(script, "--resume run --total-timesteps 400") == 2  # epsilon would jump back


def test_refused(script, tmp_path, monkeypatch, capsys):
    refused = "--env-id Pendulum-v1, --buffer-size 10, --v-min 60, --num-atoms 1, --n-step 0, --buffer-size 1e14"
    words = "are for ppo.py, batch_size, v_max, num_atoms, n_step, GiB: choose"
    check_refused(script, dict(zip(refused.split(", "), words.split(", "))), tmp_path, monkeypatch, capsys)
