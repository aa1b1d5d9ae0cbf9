"""What dqn.py does, from numbers worked out by hand, a lesson to be read beside it, to whole runs.

Each test must also fail for each of the mistakes that stand above it in `catches`. What dqn.py shares with ppo.py, the
run section above all, is the same text there (test_shared_code.py) and has its tests in test_ppo.py and test_run.py.
"""

import re
from collections import defaultdict
from functools import cache
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import dqn as reference
from run_folder import check_evaluation, check_refused, command, kill_and_resume
from tools import Chance, Probe, Table, Walk, catches, close, fails, flat, rehearse, vector_env

import dqn

VECTOR, TWO = spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(2)

# ------------------------------------------------------------------------------------------------- a lesson, by hand


@catches(
    "td_targets, no mask: * ~terminated -> * 1",
    "td_targets, termination masks the reward: return rewards -> return ~terminated * rewards",
    "td_targets, never double: if online_q is None -> if True",
    "td_targets, not discounted: gamma * ~terminated -> ~terminated",
)
def test_targets(script):
    """Four transitions with gamma = 0.5; the second terminated. What Q' and Q say of the next state's two actions:

        r   Q'       Q        DQN                        double DQN: Q chooses, Q' judges
        1   1, 3     2, 1     1 + 0.5 max(1, 3) = 2.5    action 0: 1 + 0.5 * 1 = 1.5
        2   5, 9     0, 1     2                          2
        3   4, 2     1, 2     3 + 0.5 * 4 = 5            action 1: 3 + 0.5 * 2 = 4
        4   -1, -3   7, 8     4 - 0.5 * 1 = 3.5          action 1: 4 - 0.5 * 3 = 2.5

    With a discount for each transition, 0.5, 0.5, 0.25, 1: 2.5, 2, 3 + 0.25 * 4 = 4, 4 - 1 = 3.
    """
    rewards = torch.tensor([1.0, 2.0, 3.0, 4.0])
    terminated = torch.tensor([False, True, False, False])
    target_q = torch.tensor([[1.0, 3.0], [5.0, 9.0], [4.0, 2.0], [-1.0, -3.0]])
    online_q = torch.tensor([[2.0, 1.0], [0.0, 1.0], [1.0, 2.0], [7.0, 8.0]])
    close(script.td_targets(rewards, terminated, 0.5, target_q), [2.5, 2, 5, 3.5])
    close(script.td_targets(rewards, terminated, 0.5, target_q, online_q), [1.5, 2, 4, 2.5])
    discounts = torch.tensor([0.5, 0.5, 0.25, 1.0])
    close(script.td_targets(rewards, terminated, discounts, target_q), [2.5, 2, 4, 3])


@catches(
    "dqn_loss, never double: if args.double -> if False",
    "dqn_loss, always double: if args.double -> if True",
    "dqn_loss, online network as target: target_q = target( -> target_q = agent(",
    "dqn_loss, the target network chooses: online_q = agent( -> online_q = target(",
    "dqn_loss, target of the state itself: target_q = target(batch.next_obs) -> target_q = target(batch.obs)",
    "dqn_loss, the targets are moved as well: with torch.no_grad(): -> if True:",
    "dqn_loss, never clipped: args.clip_error -> False",
    "dqn_loss, mean of the targets logged: q.detach().mean() -> targets.mean()",
)
def test_loss(script):
    """In state 0, Q = (0.5, 2). Three transitions, of which only the first does not end; gamma = 0.5. It leads to state
    1, where Q = (3, 1), Q' = (2, 4): y = 1 + 0.5 * 4 = 3 for DQN; for double DQN Q chooses action 0, 1 + 0.5 * 2 = 2.

        action   y    e = y - Q            e^2              slope -2 e    --clip-error              slope
        0        2    1.5 (DQN: 2.5)       2.25 (6.25)      -3 (-5)       1.5 - 0.5 = 1 (2)         -1
        1        5    3                    9                -6            3 - 0.5 = 2.5             -1
        0        0    -0.5                 0.25             1             0.5 * 0.25 = 0.125        0.5

    The loss is the mean, 11.5 / 3 (15.5 / 3), clipped 3.625 / 3 (4.625 / 3); the slopes are a third of these, those of
    the two steps with action 0 added up; mean Q is (0.5 + 2 + 0.5) / 3 = 1.
    """
    states = torch.zeros(3, 1), torch.tensor([[0], [1], [0]]), torch.tensor([1.0, 5.0, 0.0])
    batch = script.Transitions(*states, torch.tensor([[1.0], [2.0], [2.0]]), torch.tensor([False, True, True]))
    for double, clip_error, loss_times_3, slopes_times_3 in (
        (True, False, 11.5, [-2, -6]),
        (False, False, 15.5, [-4, -6]),
        (True, True, 3.625, [-0.5, -1]),
        (False, True, 4.625, [-0.5, -1]),
    ):
        agent, target = Table([0.5, 2.0], [3.0, 1.0], [9.0, 9.0]), Table([7.0, 7.0], [2.0, 4.0], [8.0, 8.0])
        loss, q = script.dqn_loss(agent, target, batch, script.Args(gamma=0.5, double=double, clip_error=clip_error))
        loss.backward()
        close(loss, loss_times_3 / 3)
        close(q, 1)
        close(agent.q.grad, [[slope / 3 for slope in slopes_times_3], [0, 0], [0, 0]])
        assert target.q.grad is None


@catches(
    "q_losses, always clipped: if clip_error -> if True",
    "q_losses, absolute errors: .square() -> .abs()",
)
def test_mean_or_median(script):
    """One step in twenty ends the episode with nothing, the others lead to 100: of 20 targets y, 19 are 100 and one 0.
    A loss is smallest where its slopes add up to 0:

        loss       slope at y        Q = 95                       Q = 99.947 = 100 - 1/19
        squared    2 (Q - y)         19 * 2 * -5 + 2 * 95 = 0     19 * 2 * -1/19 + 2 * 99.947 = 197.9
        clipped    Q - y, or ±1      19 * -1 + 1 = -18            19 * -1/19 + 1 = 0

    95 is the mean. 100 is the median: the clipped error forgets that one step in twenty ends the episode.
    """
    targets = torch.tensor([100.0] * 19 + [0.0])
    for clip_error, mean, median in ((False, 0.0, 2 * (100 - 1 / 19) - 2), (True, -18.0, 0.0)):
        for value, slope in ((95.0, mean), (100 - 1 / 19, median)):
            q = torch.full((20,), value, requires_grad=True)
            script.q_losses(q, targets, clip_error).sum().backward()
            close(q.grad.sum(), slope, atol=1e-3)


@catches(
    "q_bound, rewards of two steps: 1 - discount -> 1 - discount**2",
    "q_bound, below 0: max(0.0, float(reward)) -> float(reward)",
)
def test_bound_of_q(script):
    """1 in each step and gamma = 0.98: 1 / 0.02 = 50. Where each step costs 1, no Q is above 0, which is Q at the end.
    Three rewards of 1 with gamma = 0.9 sum to 2.71, and 2.71 (1 + 0.729 + 0.729^2 + …) = 2.71 / 0.271 = 10.
    """
    close([script.q_bound(1, 0.98), script.q_bound(-1, 0.98), script.q_bound(2.71, 0.9**3)], [50, 0, 10])


@catches(
    "linear_schedule, goes on falling: max(0.0, 1 - step / duration) -> (1 - step / duration)",
)
def test_schedule(script):
    """From 0.1 to 0.01 in a tenth of 1,000 steps: half way 0.055, and 0.01 for good after step 100."""
    close([script.linear_schedule(0.1, 0.01, 100, step) for step in (0, 50, 100, 500)], [0.1, 0.055, 0.01, 0.01])


@catches(
    "polyak, forgotten: target_weights.lerp_ -> target_weights.lerp",
)
def test_target_network_follows(script):
    """0.1 * 2 + 0.9 * 1 = 1.1 in each layer, and with tau = 1 a copy."""
    target, source = (torch.nn.Sequential(Table([x, 0.0]), Table([x, x])) for x in (1.0, 2.0))
    script.polyak(target, source, 0.1)
    close(torch.cat([target[0].q, target[1].q]), [[1.1, 0], [1.1, 1.1]])
    close(torch.cat([source[0].q, source[1].q]), [[2, 0], [2, 2]])
    script.polyak(target, source, 1.0)
    close(target[1].q, source[1].q)


def add(buffer, numbers, ends=None, reset_rows=None):
    """Store a step of N environments: obs, action and reward are the number, next_obs is the number + 0.5.

    `ends`: a t for each one that terminated, a c for each one that was cut off, else a -.
    """
    ends = np.array(list(ends or "-" * len(numbers)))
    reset_rows = np.array(reset_rows or [False] * len(numbers))
    obs, actions = np.array(numbers, np.float32)[:, None], np.array(numbers, int)[:, None]
    buffer.add(obs, actions, obs[:, 0], obs + 0.5, ends == "t", reset_rows)


@catches(
    "ReplayBuffer.add, reset rows stored: ~reset_rows -> reset_rows | True",
    "ReplayBuffer.add, obs stored as next_obs: = next_obs[played] -> = obs[played]",
    "ReplayBuffer.sample, more than there is: batch_size > self.size -> False",
)
def test_ring(script):
    """Capacity 4, two environments. The third step overwrites the first; its first row only resets, and is left out.
    t: terminated, c: cut off.

    step       1      2        3             4                 5
    stored     1 2    3t 4c    a reset, 6    only resets       7 8
    slots      0 1    2 3      0             none              1 2
    """
    buffer, rng = script.ReplayBuffer(4, VECTOR, spaces.Discrete(9)), np.random.default_rng(0)
    add(buffer, [1, 2])
    assert buffer.rewards.tolist() == [1, 2, 0, 0] and buffer.size == 2 and len(buffer.sample(2, rng).rewards) == 2
    with fails("cannot sample 3 of 2 stored transitions"):
        buffer.sample(3, rng)
    add(buffer, [3, 4], "tc")
    assert buffer.rewards.tolist() == [1, 2, 3, 4] and (buffer.size, buffer.position) == (4, 0)
    add(buffer, [5, 6], reset_rows=[True, False])
    assert buffer.rewards.tolist() == [6, 2, 3, 4] and (buffer.size, buffer.position) == (4, 1)
    assert buffer.terminated.tolist() == [False, False, True, False]
    add(buffer, [7, 8], reset_rows=[True, True])
    assert buffer.rewards.tolist() == [6, 2, 3, 4] and (buffer.size, buffer.position) == (4, 1)
    add(buffer, [7, 8])
    assert buffer.rewards.tolist() == [6, 7, 8, 4]
    batch = buffer.get(np.array([0, 3, 1]))
    for field, expected in zip(batch, ([[6], [4], [7]], [[6], [4], [7]], [6, 4, 7], [[6.5], [4.5], [7.5]], [0, 0, 0])):
        close(field, expected)
    assert [x.dtype for x in batch] == [torch.float32, torch.int64, torch.float32, torch.float32, torch.bool]


def when(script, plan, **given):
    """{steps taken so far: what was done then, u for a gradient step, c for a change of the target network}."""
    done, step, count, loss = defaultdict(str), [0], script.Run.count, script.dqn_loss

    def counted(run, *step_of_all, **flags):
        count(run, *step_of_all, **flags)
        step[0] = run.step

    def noted(letter, result=None):
        done[step[0]] += letter
        return result

    replaced = {"polyak": lambda *_: noted("c"), "dqn_loss": lambda *batch: noted("u", loss(*batch))}
    with mock.patch.object(script.Run, "count", counted), mock.patch.multiple(script, **replaced):
        rehearse(script, lambda: Walk(plan), batch_size=2, **given)
    return done


@catches(
    "train, copies wait: if step % args.target_ -> if step % args.train_frequency == 0 == step % args.target_",
    "train, reset rows do it again: range(previous_step + 1, -> range(min(previous_step + 1, run.step),",
    "train, the step after: % args.train_frequency == 0 -> % args.train_frequency == 1",
    "train, one update for all environments: for step in range(previous_step + 1, -> for step in range(run.step,",
)
def test_periods(script):
    """One environment, from step 8 to 40: updates at 8, 12, … 40, copies at 10, 20, 30, 40, whatever the updates do.
    Episodes last three steps; the step that only resets the environment does not count.

    Three environments step at once, as if one by one; two gradient steps every 2 steps, a copy every 3:

        steps    1 2 3     4 5 6       7 8 9
        done       u c     u   u, c      u c      (u stands for two gradient steps)
    """
    given = {"learning_starts": 8, "train_frequency": 4, "target_network_frequency": 10, "total_timesteps": 40}
    done = when(script, [(3, "t")], **given)
    assert done == {8: "u", 10: "c", 12: "u", 16: "u", 20: "uc", 24: "u", 28: "u", 30: "c", 32: "u", 36: "u", 40: "uc"}
    given = {"learning_starts": 0, "train_frequency": 2, "gradient_steps": 2, "target_network_frequency": 3}
    assert when(script, [(99, "t")], num_envs=3, total_timesteps=9, **given) == {3: "uuc", 6: "uuuuc", 9: "uuc"}


@catches(
    "QNetwork.scaled, by the variance: math.sqrt( -> (",
    "QNetwork.scaled, not clipped: .clip(-10, 10) -> ",
    "QNetwork.update_statistics, never counted: self.return_stats.update( -> len(",
)
def test_rewards_are_scaled_when_they_are_sampled(script):
    """Discounted returns 1, 3, then 5, 7: their variance is 1, then (9 + 1 + 1 + 9) / 4 = 5.

    A reward of 4 counts as 4, then as 4 / sqrt 5 = 1.788854. At most 10 are left of it.
    """
    agent = script.QNetwork(spaces.Box(-1, 1, (1,)), spaces.Discrete(2), script.Args())
    for returns, rewards in (([1.0, 3], [4, -10]), ([5, 7], [1.788854, -10])):
        agent.update_statistics(None, np.array(returns))
        close(agent.scaled(torch.tensor([4.0, -99])), rewards)


# -------------------------------------------------------------------------- against slow and obvious versions of it


@catches(
    "QNetwork.forward, not normalised: obs if self.obs_stats is None -> obs if True",
    "relu_mlp, weights of 1: gain=1.0 -> gain=2**0.5",
    "QNetwork.greedy, the worst action: argmax -> argmin",
    "QNetwork.to_env, start forgotten: actions + self.action_space.start -> actions",
    "QNetwork.epsilon_greedy, greedy where random is due: < epsilon -> >= epsilon",
    "QNetwork.epsilon_greedy, all environments at once: rng.random(len(obs)) -> rng.random() * np.ones(len(obs))",
)
def test_network_and_actions(script):
    """Linear layers with ReLU between them, rows orthogonal; epsilon is the share of actions that are drawn uniformly.

    10,000 draws of three actions with epsilon 0.3: 0.8 of the best, 0.1 of each other one. (3 sigma: 0.014)
    """
    rng, space = np.random.default_rng(0), spaces.Discrete(3, start=-1)
    obs = rng.normal(1, 5, (10_000, 4)).astype(np.float32)
    for scaled, sizes in ((True, (8, 5)), (False, ()), (False, (6,))):
        torch.manual_seed(0)
        agent = script.QNetwork(spaces.Box(-9, 9, (2, 2)), space, script.Args(hidden_sizes=sizes, normalize_obs=scaled))
        layers = [module for module in agent.head if isinstance(module, torch.nn.Linear)]
        assert [layer.out_features for layer in layers] == [*sizes, 3]
        close(layers[-1].weight @ layers[-1].weight.T, np.eye(3))
        x = torch.tensor(obs)
        if scaled:
            agent.obs_stats.update(obs)
            x = torch.tensor(((obs - obs.mean(0)) / obs.std(0)).clip(-10, 10))
        for layer in layers[:-1]:
            layer.bias.data += 0.3
            x = layer(x).clamp(min=0)
        q = layers[-1](x).detach()
        close(agent(torch.tensor(obs).view(-1, 2, 2)), q, atol=1e-4)
        best = agent.greedy(obs)
        assert (best == q.argmax(1).numpy()).all() and set(best) == {0, 1, 2}
        acted = agent.act(obs.reshape(-1, 2, 2))
        assert (acted == best - 1).all() and acted.dtype == np.int64
        with pytest.raises(ValueError, match=re.escape("act(obs[None])")):
            agent.act(obs[0].reshape(2, 2))
    for epsilon in (0.0, 0.3, 1.0):
        rank = (agent.epsilon_greedy(obs, epsilon, rng) - best) % 3  # 0 for the best action
        close(np.bincount(rank, minlength=3) / 10_000, [1 - epsilon * 2 / 3, epsilon / 3, epsilon / 3], atol=0.015)


@catches(
    "ReplayBuffer.__init__, pixels as floats: np.uint8 if -> np.float32 if",
    "ReplayBuffer.__init__, double precision: else np.float32\n -> else np.float64\n",
    "QNetwork.__init__, weights of the head: gain=1.0 -> gain=2**0.5",
)
def test_images_and_types(script):
    """Images stay bytes, and go through the CNN; other numbers take four bytes."""
    no, images = np.zeros(2, bool), np.random.default_rng(0).integers(256, size=(2, 4, 36, 40), dtype=np.uint8)
    space = spaces.Box(0, 255, (4, 36, 40), np.uint8)
    agent, buffer = script.QNetwork(space, TWO, script.Args()), script.ReplayBuffer(4, space, TWO)
    buffer.add(images, np.zeros((2, 1), int), np.zeros(2), images[::-1], no, no)
    assert buffer.obs.dtype == buffer.next_obs.dtype == np.uint8
    assert (buffer.get(np.array([1])).next_obs[0].numpy() == images[0]).all()
    head = agent.head.weight
    close(head @ head.T, np.eye(2))
    close(agent(torch.tensor(images)), agent.cnn(torch.tensor(images)) @ head.T, atol=1e-4)
    buffer = script.ReplayBuffer(4, spaces.Box(-1, 1, (3,), np.float64), spaces.Box(-1, 1, (2, 2)))  # of ddpg_td3.py
    assert {buffer.obs.dtype, buffer.next_obs.dtype, buffer.rewards.dtype, buffer.actions.dtype} == {np.dtype("f4")}


PLAN = st.lists(st.tuples(st.integers(1, 5), st.sampled_from("tcb")), min_size=1, max_size=3)


@catches(
    "ReplayBuffer.add, rewards of other rows: rewards[played] -> rewards[:count]",
    "ReplayBuffer.add, the reset of the first is one of all: ~reset_rows -> ~reset_rows[:1].repeat(len(obs))",
    "ReplayBuffer.add, size not bounded: min(self.size + count, self.capacity) -> self.size + count",
    'ReplayBuffer.state_dict, position lost: "position": self.position -> "position": 0',
    "ReplayBuffer.state_dict, zeros: getattr(self, name)[: self.size] -> 0 * getattr(self, name)[: self.size]",
    "ReplayBuffer.load_state_dict, only obs restored: in Transitions._fields -> in ['obs']",
)
@settings(max_examples=40)
@given(plans=st.lists(PLAN, min_size=1, max_size=3), capacity=st.integers(3, 20), steps=st.integers(1, 30))
@example(plans=[[(3, "t"), (2, "c")], [(1, "c")], [(4, "b")]], capacity=7, steps=20)
def test_ring_equals_a_list(script, plans, capacity, steps):
    """A list of all that was played, of which the ring must hold the end; also after it was saved and loaded."""
    new_ring = lambda: script.ReplayBuffer(capacity, spaces.Box(-np.inf, np.inf, (3,)), TWO)
    envs = vector_env([lambda n=n: Walk(plans[n], n) for n in range(len(plans))], len(plans))
    buffer, played, (obs, _), reset_rows = new_ring(), [], envs.reset(), np.zeros(len(plans), bool)
    for t in range(steps):
        actions = (t + np.arange(len(plans))) % 2
        next_obs, rewards, terminated, truncated, _ = envs.step(actions)
        buffer.add(obs, actions[:, None], rewards, next_obs, terminated, reset_rows)
        for n in np.flatnonzero(~reset_rows):
            played.append([obs[n].tolist(), [actions[n]], rewards[n], next_obs[n].tolist(), terminated[n]])
        obs, reset_rows = next_obs, terminated | truncated
    loaded = new_ring()
    loaded.load_state_dict(buffer.state_dict())
    for ring in (buffer, loaded):
        assert ring.size == min(capacity, len(played)) and ring.position == len(played) % capacity
        numbers = range(len(played) - ring.size, len(played))
        batch = ring.get(np.array(numbers) % capacity)
        assert [[x.tolist() for x in row] for row in zip(*batch)] == [played[number] for number in numbers]


COMMON = {"num_envs": 2, "total_timesteps": 60, "learning_starts": 20, "batch_size": 4, "buffer_size": 30, "gamma": 0.9}
COMMON |= {"learning_rate": 0.01, "hidden_sizes": (8,), "train_frequency": 3, "target_network_frequency": 7, "seed": 3}
COMMON |= {"exploration_fraction": 0.5, "start_e": 0.9, "end_e": 0.1, "gradient_steps": 2, "normalize_reward": False}
TRAININGS = [
    {},
    {"normalize_reward": True, "double": False, "anneal_lr": False, "max_grad_norm": 0.5, "exploration_fraction": 0.0},
    {"normalize_obs": True, "tau": 0.3, "gradient_steps": 1, "learning_starts": 0, "start_e": 0.0, "end_e": 0.0},
    {
        "clip_reward": True,
        "clip_error": True,
        "target_network_frequency": 2,
        "train_frequency": 2,
        "max_grad_norm": 0.1,
    },
]


@cache
def slow_training(number):
    """What the slow version gives, with the script as it is: `script` may have a mistake."""
    return reference.train(dqn.Args(**COMMON | TRAININGS[number]), Chance)


@catches(
    "ReplayBuffer.sample, empty slots drawn: rng.integers(self.size -> rng.integers(self.capacity",
    "ReplayBuffer.sample, the last one never drawn: rng.integers(self.size -> rng.integers(self.size - 1",
    "train, no copy of the network: copy.deepcopy(agent) -> agent",
    "train, gradients not shortened: parameters(), args.max_grad_norm -> parameters(), 1e9",
    "train, gradients never shortened: args.max_grad_norm is not None -> args.max_grad_norm is False",
    "train, exploration of no steps: max(1, args.exploration_fraction -> max(9, args.exploration_fraction",
    "train, reset rows stored: terminated, reset_rows=reset_rows) -> terminated, reset_rows=reset_rows & False)",
    "train, truncation terminates: next_obs, terminated, reset_rows -> next_obs, terminated | truncated, reset_rows",
    "train, obs and next_obs exchanged: buffer.add(obs, -> buffer.add(next_obs,",
    "train, one copy early: if step % args.target -> if (step + 1) % args.target",
    "train, nothing is copied: polyak(target, agent, -> polyak(agent, target,",
    "train, bound of another gamma: buffer.rewards.max()), args.gamma -> buffer.rewards.max()), args.tau",
    "train, tau forgotten: polyak(target, agent, args.tau) -> polyak(target, agent, 1.0)",
    "train, starts early: step >= learning_starts -> step >= args.batch_size",
    "train, rewards not clipped: if args.clip_reward -> if False",
    "train, reported returns clipped: run.count(next_obs, rewards, -> run.count(next_obs, np.sign(rewards),",
    "train, target network has statistics of its own: target.obs_stats = agent.obs_stats -> 0",
    "train, observations overwritten: obs.copy() -> obs",
    "train, statistics of the observations after: update_statistics(obs[ -> update_statistics(next_obs[",
    "train, reset rows in the statistics: update_statistics(obs[~reset_rows] -> update_statistics(obs",
    "train, sums of rewards outlive an end: discounted) * ~reset_rows -> discounted)",
    "train, sums of resets counted: discounted[~reset_rows] -> discounted",
    "train, rewards as they are: agent.scaled(batch.rewards) -> batch.rewards",
    "train, bound of the rewards as they are: agent.scaled(buffer.rewards.max()) -> buffer.rewards.max()",
    "train, never annealed: scheduler.step() -> pass",
    "train, always annealed: run.remaining() if args.anneal_lr else 1.0 -> run.remaining()",
    "train, seen before acting: actions = agent -> agent.update_statistics(obs, discounted); actions = agent",
)
def test_training(script):
    """60 steps of two environments, half of them still in the ring in the end: every weight, metric and return is that
    of tests/reference/dqn.py, whatever the options. The environments use their array of observations again and again.
    """
    for number, options in enumerate(TRAININGS):
        metrics, network, target, returns = slow_training(number)
        with mock.patch("tools.vector_env", lambda makers, n: gym.vector.SyncVectorEnv([*makers] * n, copy=False)):
            run = rehearse(script, Chance, **COMMON | options)
        close(flat(run.agent), network, atol=1e-3)
        close(flat(run.parts["target"]), target, atol=1e-3)
        close(run.episodes["return"], returns)
        assert set(run.all_logged) == set(metrics) and len(metrics["loss"]) >= 18
        for name in metrics:
            close(run.all_logged[name], metrics[name], atol=1e-3)


# -------------------------------------------------------------------------------- worlds whose right answer is known

EASY = {"num_envs": 8, "learning_rate": 4e-2, "gamma": 0.5, "hidden_sizes": (16,), "batch_size": 16, "end_e": 0.5}
EASY |= {
    "normalize_reward": False,
    "learning_starts": 100,
    "train_frequency": 8,
    "target_network_frequency": 60,
    "total_timesteps": 1600,
}
WORLDS = {  # what is learnt, and what Q it must come to: {observation: Q of both actions}
    "one step that pays 1 and terminates": (Probe, {0: [1, 1]}, 1),
    "the same, cut off: it would go on, 1 / (1 - 0.5) = 2": (lambda: Probe(end="c"), {0: [2, 2]}, 1),
    "1 after the second step": (lambda: Probe(lambda obs, _: obs == 1, steps=2), {0: [0.5, 0.5], 1: [1, 1]}, 1),
    "1 for action 0 at -1, 1 at 1": (lambda: Probe(lambda o, a: a == (o > 0), varied=True), {-1: [1, 0], 1: [0, 1]}, 1),
    "a reward of 7, of which the sign is learnt": (lambda: Probe(lambda *_: 7), {0: [1, 1]}, 7),
}


@pytest.mark.parametrize("name", WORLDS)
def test_small_worlds_are_learnt(script, name):
    """Fails if an end, a discount, an action or a reward is taken for another anywhere between environment and Q."""
    world, values, score = WORLDS[name]
    run = rehearse(script, world, **EASY, eval_episodes=8, clip_reward=score == 7)
    close(run.agent(torch.tensor(list(values))[:, None].float()), list(values.values()), atol=0.1)
    assert run.evaluations["return_mean"][-1] == score and run.evaluations["return_std"][-1] == 0


@pytest.mark.filterwarnings("error")
def test_rewards_beyond_float32_are_named(script):
    """1e300 would become infinite in the buffer, and the loss NaN much later."""
    with pytest.raises(script.UserError, match="reward is NaN or infinite"):
        rehearse(script, lambda: Probe(lambda *_: 1e300), **EASY)


# ------------------------------------------------------------------------------------------------------- whole runs

RUN = "--num-envs 2 --hidden-sizes 8 --batch-size 16 --learning-starts 30 --buffer-size 60 --train-frequency 8 "
RUN += "--gradient-steps 1 --target-network-frequency 64 --max-episode-steps 12 --total-timesteps 120 "
RUN += "--checkpoint-every 30 --eval-every 80 --eval-episodes 3 --normalize-reward"


@catches(
    "train, target network not saved: target=target, -> ",
    "train, sums of rewards outlive a restart: discounted = np.zeros(args.num_envs)\n    return -> 0\n    return",
    "train, no new episodes then: if run.write_what_is_due() -> if run.write_what_is_due() and False",
)
def test_killed_resumed_evaluated(script, tmp_path, monkeypatch, capsys):
    """--evaluate plays the best weights, in other episodes than those that chose them, and changes nothing."""
    kill_and_resume(script, RUN, 23, monkeypatch, tmp_path)
    check_evaluation(script, capsys)
    assert command(script, "--resume run --total-timesteps 400") == 2  # epsilon would jump back


def test_refused(script, tmp_path, monkeypatch, capsys):
    refused = {
        "--env-id Pendulum-v1": "are for ppo.py",
        "--buffer-size 10": "batch_size",
        "--target-network-frequency 0": "target_network_frequency must be at least 1",
        "--buffer-size 1e14": "GiB: choose",
    }
    check_refused(script, refused, tmp_path, monkeypatch, capsys)


@catches("make_replay_buffer, said too seldom: max(args.learning_starts, args.batch_size) -> args.learning_starts")
def test_a_run_too_short_to_learn_says_so(script, tmp_path, monkeypatch, capsys):
    """The first update comes once both learning_starts and a batch are there."""
    monkeypatch.chdir(tmp_path)
    for number, (starts, batch, said) in enumerate([(30, 8, True), (8, 30, True), (8, 8, False)]):
        flags = f"--learning-starts {starts} --batch-size {batch} --total-timesteps 30 --eval-episodes 1"
        assert command(script, f"{flags} --num-envs 1 --no-progress --run-dir run{number}") == 0
        assert ("nothing will be learnt" in capsys.readouterr().out) == said


def test_large_rewards(script, tmp_path, monkeypatch, capsys):
    """A hint names --normalize-reward. With it, returns are still the true ones."""
    monkeypatch.chdir(tmp_path)
    flags = "--env-id run_worlds:Faulty-v0 --num-envs 1 --total-timesteps 60 --eval-episodes 1 --no-progress --run-dir "
    odd = ["--env-kwargs", '{"field":"reward","at":3,"value":"500"}']
    for run, more in (("run1", "--no-normalize-reward"), ("run2", "")):
        assert command(script, f"{flags}{run} {' '.join(odd)} {more}") == 0
        out = capsys.readouterr().out
        assert out.count("beyond ±100: try --normalize-reward") == (run == "run1")
        assert "last evaluation: 509.0" in out
