"""The numbers of DQN, worked out by hand: a lesson to be read beside dqn.py."""

from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tests.probes.envs import Walk
from tests.tools import close, rehearse

VECTOR, TWO = spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(2)


def test_targets(script):
    """Four transitions with gamma = 0.5; the second terminated. What Q' and Q say of the next state's two actions:

        r   Q'       Q        DQN                        double DQN: Q chooses, Q' judges
        1   1, 3     2, 1     1 + 0.5 max(1, 3) = 2.5    action 0: 1 + 0.5 * 1 = 1.5
        2   5, 9     0, 1     2                          2
        3   4, 2     1, 2     3 + 0.5 * 4 = 5            action 1: 3 + 0.5 * 2 = 4
        4   -1, -3   7, 8     4 - 0.5 * 1 = 3.5          action 1: 4 - 0.5 * 3 = 2.5

    With a discount for each transition, 0.5, 0.5, 0.25, 1: 2.5, 2, 3 + 0.25 * 4 = 4, 4 - 1 = 3.
    Fails if termination does not cut, or if an action is chosen or judged by the wrong network.
    """
    rewards = torch.tensor([1.0, 2.0, 3.0, 4.0])
    terminated = torch.tensor([False, True, False, False])
    target_q = torch.tensor([[1.0, 3.0], [5.0, 9.0], [4.0, 2.0], [-1.0, -3.0]])
    online_q = torch.tensor([[2.0, 1.0], [0.0, 1.0], [1.0, 2.0], [7.0, 8.0]])
    close(script.td_targets(rewards, terminated, 0.5, target_q), [2.5, 2, 5, 3.5])
    close(script.td_targets(rewards, terminated, 0.5, target_q, online_q), [1.5, 2, 4, 2.5])
    discounts = torch.tensor([0.5, 0.5, 0.25, 1.0])
    close(script.td_targets(rewards, terminated, discounts, target_q), [2.5, 2, 4, 3])


class Table(torch.nn.Module):
    """Q(s, .) as rows of a table; the observation is the number of the row."""

    def __init__(self, *rows):
        super().__init__()
        self.q = torch.nn.Parameter(torch.tensor(rows))

    def forward(self, obs):
        return self.q[obs[:, 0].long()]


@pytest.mark.parametrize("double", [True, False])
def test_loss(script, double):
    """From state 0, Q = (0.5, 2), action 0 led to state 1, and action 1 to state 2, the end; r = 1 and 5; gamma = 0.5.

    In state 1, Q = (3, 1) and Q' = (2, 4). DQN: y = 1 + 0.5 * 4 = 3. Double DQN: Q chooses action 0, 1 + 0.5 * 2 = 2.

              e = y - Q               Huber loss       slope: -e clipped to ±1, over the batch of two
    double    2 - 0.5 = 1.5           1.5 - 0.5 = 1    -0.5
              5 - 2   = 3             2.5              -0.5     mean loss 1.75
    DQN       3 - 0.5 = 2.5           2                -0.5     mean loss 2.25

    Mean Q: (0.5 + 2) / 2 = 1.25. Fails if the loss is not Huber's, or if the target is moved as well.
    """
    agent, target = Table([0.5, 2.0], [3.0, 1.0], [9.0, 9.0]), Table([7.0, 7.0], [2.0, 4.0], [8.0, 8.0])
    states = torch.tensor([[0.0], [0.0]]), torch.tensor([[0], [1]]), torch.tensor([1.0, 5.0])
    batch = script.Transitions(*states, torch.tensor([[1.0], [2.0]]), torch.tensor([False, True]))
    loss, q = script.dqn_loss(agent, target, batch, script.Args(gamma=0.5, double=double))
    loss.backward()
    close(loss, 1.75 if double else 2.25)
    close(q, 1.25)
    close(agent.q.grad, [[-0.5, -0.5], [0, 0], [0, 0]])
    assert target.q.grad is None


def test_small_errors_weigh_as_squares(script):
    """y = 1, Q = 0.5: 0.5 * 0.5^2 = 0.125, with slope -0.5; beyond 1 the slope stays at 1. Fails for |e| or 0.5 e^2."""
    batch = [torch.tensor([[0.0]]), torch.tensor([[0]]), torch.tensor([1.0]), torch.tensor([[0.0]])]
    for q, expected, slope in ((0.5, 0.125, -0.5), (1.5, 0.125, 0.5), (-2.0, 2.5, -1.0), (4.0, 2.5, 1.0)):
        agent = Table([q, 0.0])
        batch[4:] = [torch.tensor([True])]
        loss, _ = script.dqn_loss(agent, agent, script.Transitions(*batch), script.Args())
        loss.backward()
        close(loss, expected)
        close(agent.q.grad, [[slope, 0]])


def test_schedule(script):
    """From 0.1 to 0.01 in a tenth of 1,000 steps: half way 0.055, and 0.01 for good after step 100."""
    close([script.linear_schedule(0.1, 0.01, 100, step) for step in (0, 50, 100, 500)], [0.1, 0.055, 0.01, 0.01])


def test_target_network_follows(script):
    """0.1 * 2 + 0.9 * 1 = 1.1, and with tau = 1 a copy. Fails if target and source are exchanged."""
    target, source = Table([1.0, 0.0]), Table([2.0, 1.0])
    script.polyak(target, source, 0.1)
    close(target.q, [[1.1, 0.1]])
    close(source.q, [[2, 1]])
    script.polyak(target, source, 1.0)
    assert torch.equal(target.q, source.q)


def add(buffer, numbers, ends=None, reset_rows=None):
    """Store a step of N environments: obs and reward are the number, next_obs is the number + 0.5.

    `ends`: a t for each one that terminated, a c for each one that was cut off, else a -.
    """
    ends = np.array(list(ends or "-" * len(numbers)))
    reset_rows = np.array(reset_rows or [False] * len(numbers))
    obs, actions = np.array(numbers, np.float32)[:, None], np.array(numbers, int)[:, None] % 2
    return buffer.add(obs, actions, obs[:, 0], ends == "t", ends == "c", reset_rows, obs + 0.5).tolist()


def complaint(buffer, batch_size):
    """What sampling so many transitions is refused with, or None."""
    try:
        buffer.sample(batch_size, np.random.default_rng(0))
    except ValueError as error:
        return str(error)


def test_ring(script):
    """Capacity 4, two environments. The third step overwrites the first; its second row only resets, and is left out.

    step       1      2        3             4                 5
    stored     1 2    3t 4c    5, a reset    only resets       7 8
    slots      0 1    2 3      0             none              1 2

    Fails if reset rows are stored, a truncation terminates, the ring does not wrap, or more is drawn than there is.
    """
    buffer = script.ReplayBuffer(4, VECTOR, TWO)
    assert add(buffer, [1, 2]) == [0, 1] and buffer.size == 2
    assert complaint(buffer, 3) == "cannot sample 3 of 2 stored transitions" and complaint(buffer, 2) is None
    assert add(buffer, [3, 4], "tc") == [2, 3]
    assert add(buffer, [5, 6], reset_rows=[False, True]) == [0]
    assert buffer.rewards.tolist() == [5, 2, 3, 4] and (buffer.size, buffer.position) == (4, 1)
    assert buffer.terminated.tolist() == [False, False, True, False]
    assert add(buffer, [7, 8], reset_rows=[True, True]) == []
    assert add(buffer, [7, 8]) == [1, 2] and buffer.rewards.tolist() == [5, 7, 8, 4]
    batch = buffer.get(np.array([3, 1]))
    close(batch.obs, [[4], [7]])
    close(batch.next_obs, [[4.5], [7.5]])
    close(batch.actions, [[0], [1]])
    assert [tuple(x.shape) for x in batch] == [(2, 1), (2, 1), (2,), (2, 1), (2,)]
    assert batch.actions.dtype == torch.int64 and batch.terminated.dtype == torch.bool


def when(script, plan, **settings):
    """{steps taken so far: what was done then, u for a gradient step, c for a change of the target network}."""
    done = {}
    note = lambda run, letter: done.update({run.step: done.get(run.step, "") + letter})
    runs = []

    def count(run, *given):
        runs[:] = [run]
        return script_count(run, *given)

    def sample(buffer, *given):
        note(runs[0], "u")
        return script_sample(buffer, *given)

    script_count, script_sample = script.Run.count, script.ReplayBuffer.sample
    with mock.patch.object(script.Run, "count", count), mock.patch.object(script.ReplayBuffer, "sample", sample):
        with mock.patch.object(script, "polyak", lambda *_: note(runs[0], "c")):
            rehearse(script, lambda: Walk(plan), buffer="ReplayBuffer", loss="dqn_loss", batch_size=2, **settings)
    return done


def test_periods(script):
    """Up to step 40, from step 8 on: updates at 8, 12, … 40, and copies at 10, 20, 30, 40, whatever the updates do.

    Episodes last three steps; the step that only resets the environment does not count. Fails if copies wait for the
    next update (20 and 40 alone), or if an update is off by a step or repeated in a reset row.
    """
    settings = {"learning_starts": 8, "train_frequency": 4, "target_network_frequency": 10, "total_timesteps": 40}
    done = when(script, [(3, "terminated")], num_envs=1, **settings)
    assert {step for step, letters in done.items() if "u" in letters} == set(range(8, 41, 4))
    assert {step for step, letters in done.items() if "c" in letters} == {10, 20, 30, 40}
    assert done[40] == "uc" and all(len(letters) == 1 for step, letters in done.items() if step % 20)


def test_periods_with_several_environments(script):
    """Three environments step at once, as if one by one; two gradient steps every 2 steps, a copy every 3.

    steps    1 2 3     4 5 6       7 8 9
    done       u c     u   u, c      u c      (u stands for two gradient steps)

    Fails if the ratio of updates to steps, or their order, depends on the number of environments.
    """
    settings = {"learning_starts": 0, "train_frequency": 2, "gradient_steps": 2, "target_network_frequency": 3}
    done = when(script, [(99, "terminated")], num_envs=3, total_timesteps=9, **settings)
    assert done == {3: "uuc", 6: "uuuuc", 9: "uuc"}
