"""The numbers of demonstrations, worked out by hand: to be read beside ppod.py. Its PPO is that of test_ppo.py."""

import math

import numpy as np
import pytest
import torch
from demo_worlds import LINE, TWO, Adds, Critic, Draws, make_demo, play, store

from tests.tools import close


def test_what_comes_next(script):
    """rho 0.1, phi 0.3: a draw u < 0.1 is a reward demo, u < 0.4 a value demo, else the environment. Fails if the share
    of an empty list goes to the other one, not to the environment.
    """
    reward, value = make_demo(script), make_demo(script)
    for rewards, values, expected in (
        ([reward], [value], [reward, value, value, None, None]),
        ([reward], [], [reward, None, None, None, None]),
        ([], [value], [None, value, value, None, None]),
    ):
        demos, draws = store(script, rewards, values), Draws(0.05, 0.1, 0.39, 0.4, 0.99)
        assert [demos.sample_demo(draws) for _ in expected] == expected


def test_priorities(script):
    """Values 1, 2, 4: alpha 1 gives 1/7, 2/7, 4/7; alpha 2 gives 1/21, 4/21, 16/21; alpha 0 a third each.

    -3, -2, -1 count from the lowest: 0, 1, 2, so 0, 1/3, 2/3. With -3 and 1 and alpha 2 the bare formula prefers the
    worst, 9/10 to 1/10; zeros would be 0/0, and 10^30 to the power of 100 is too large for any number.
    """
    p = script.replay_probabilities
    close(p([1, 2, 4], 1), np.array([1, 2, 4]) / 7)
    close(p([1, 2, 4], 2), np.array([1, 4, 16]) / 21)
    close(p([1, 2, 4], 0), [1 / 3] * 3)
    close(p([-3, -2, -1], 1), [0, 1 / 3, 2 / 3])
    close(p([-3, 1], 2), [0, 1])
    close(p([0, 0], 10), [0.5, 0.5])
    close(p([-2, -2], 10), [0.5, 0.5])
    close(p([1e30, 1e30], 100), [0.5, 0.5])


def test_annealing(script):
    """Room for 3 value demos at the start: each new reward demo moves 0.3/3 = 0.1 from phi to rho, until phi is 0.

    By their current number, 3, then 2, then 1: 0.3/3, 0.3/2, 0.3/1, cut where phi is 0. Without any, nothing moves.
    """
    for by, expected in (
        ("capacity", [(0.2, 0.2), (0.3, 0.1), (0.4, 0), (0.4, 0)]),
        ("current", [(0.2, 0.2), (0.35, 0.05), (0.4, 0), (0.4, 0)]),
    ):
        demos = store(script, value=[make_demo(script) for _ in range(3)], anneal_by=by)
        demos.value_capacity = 3
        for rho_and_phi in expected:
            demos.anneal_parameters()
            close([demos.rho, demos.phi], rho_and_phi)
            if len(demos.value_demos) > 1:
                demos.value_demos.pop()
    demos = store(script)
    demos.anneal_parameters()
    assert (demos.rho, demos.phi) == (0.1, 0.3)


def test_capacity(script):
    """Capacity 3. H is a person's. Value demos A 0.5, B 0.2, C 0.9 go lowest first: B, then A and C for reward demos 1
    and 2; then the longest of an agent goes, 2 (6 steps) for 3 (5 steps). H (9 steps) stays, whatever the agent finds.
    """
    demo = lambda **fields: make_demo(script, **fields)
    H, A, B, C = demo(human=True, length=9), demo(max_value=0.5), demo(max_value=0.2), demo(max_value=0.9)
    one, two, three = demo(length=3), demo(length=6), demo(length=5, total=7.0)
    demos = store(script, [H], [A, B, C], demo_capacity=3)
    demos.check_demo_buffer_capacity()
    assert (demos.reward_demos, demos.value_demos) == ([H], [A, C])
    for new, reward, value in ((one, [H, one], [C]), (two, [H, one, two], []), (three, [H, one, three], [])):
        demos.add_reward_demo(new)
        assert (demos.reward_demos, demos.value_demos) == (reward, value)


def test_what_an_episode_becomes(script):
    """Rewards 0 1 0 2 0 0: what comes after the last positive one is cut off, so four steps are left, truncated; the
    return is 3 and the highest value 0.9. Rewards 0 1 -5: two are left, but the return is -4. 0 0 0: all is kept.

    The threshold is 0.0: 3 and 0 reach it, -4 is a value demo. Fails with the last value for the highest (0.05), with
    the return of what is left (1), if a cut is a termination, or if the threshold 0.0 counts as none.
    """
    demos = store(script, initial_reward_threshold=0.0)
    first = [0, 1, 0, 2, 0, 0], [0.2, 0.9, 0.4, 0.3, 0.1, 0.05], "terminated"
    second = [0, 1, -5], [0.1, 0.2, 0.3], "terminated"
    third, fourth = ([0, 0, 0], [-1, -2, -3], "truncated"), ([0, 3], [0, 0], "terminated")
    play(script, demos, second, third, first, fourth)
    nothing, cut, whole = demos.reward_demos
    (negative,) = demos.value_demos
    assert [len(demo.rewards) for demo in (cut, negative, nothing, whole)] == [4, 2, 3, 2]
    assert [demo.total for demo in (cut, negative, nothing, whole)] == [3, -4, 0, 3]
    assert [demo.terminated for demo in (cut, negative, nothing, whole)] == [False, False, False, True]
    close([demo.max_value for demo in (cut, negative, nothing)], [0.9, 0.3, -1])
    assert cut.obs.ravel().tolist() == [200, 201, 202, 203, 204]
    assert nothing.obs.ravel().tolist() == [100, 101, 102, 103]


def test_threshold(script):
    """Capacity 3, a person's demo of 5, threshold 1. Returns 2, 1.5, 2, 4, 3, 1.9: the threshold is the lowest in the
    list, 2 (1.5 fails, 2 reaches it); with 4 one of the twos goes, with 3 the other: now it is 3. It never falls.
    """
    human = make_demo(script, total=5.0, human=True)
    demos = store(script, [human], demo_capacity=3, initial_reward_threshold=1.0)
    returns = []
    for total in (2, 1.5, 2, 4, 3, 1.9):
        length = int(20 - total)  # the better, the shorter
        play(script, demos, ([0] * length + [total], [0] * (length + 1), "terminated"))
        returns.append((sorted(demo.total for demo in demos.reward_demos), demos.reward_threshold))
    lists = [[2, 5], [2, 5], [2, 2, 5], [2, 4, 5], [3, 4, 5], [3, 4, 5]]
    assert returns == list(zip(lists, [2, 2, 2, 2, 3, 3]))
    demos.add_reward_demo(make_demo(script, total=0.5, length=1))  # as a supplementary demo may be
    assert demos.reward_threshold == 3


def test_without_threshold_and_demos_only_a_positive_return_is_good(script):
    """Returns 0, -1, 0.5, 0.2, 0.7. Fails if failures become reward demos: 0.5 is the first; then 0.2 is too low."""
    demos = store(script)
    play(script, demos, *[([0, total], [0, 0], "terminated") for total in (0, -1, 0.5, 0.2, 0.7)])
    assert [demo.total for demo in demos.reward_demos] == pytest.approx([0.5, 0.7]) and demos.reward_threshold == 0.5


def test_demos_that_earned_nothing_set_no_threshold(script):
    """Supplementary demos of 0 and -3. Returns 0, -1, 0.5, 0.2: with a threshold of 0 or -3, failures would be reward
    demos; a positive return still is needed, and any will do. A demo of 0.3 and room for three: the two longest go,
    the lowest of the rest is 0.2, and 0.1 is too low. The user's own 0 is a threshold like any other.
    """
    lengths = {0.0: 9, -3.0: 8, 0.5: 3, 0.2: 4}
    demos = store(script)
    for total in (0.0, -3.0):
        demos.add_reward_demo(make_demo(script, total=total, length=lengths[total]))
    assert demos.reward_threshold is None
    play(script, demos, ([0, 0], [0, 0], "terminated"), ([0, -1], [0, 0], "terminated"))
    assert len(demos.reward_demos) == 2 and len(demos.value_demos) == 2
    for total in (0.5, 0.2):
        play(script, demos, ([0] * (lengths[total] - 1) + [total], [0] * lengths[total], "terminated"))
    assert [demo.total for demo in demos.reward_demos] == pytest.approx([0, -3, 0.5, 0.2])
    assert demos.reward_threshold is None
    demos.args.demo_capacity = 3
    demos.add_reward_demo(make_demo(script, total=0.3, length=2))
    assert [demo.total for demo in demos.reward_demos] == pytest.approx([0.5, 0.2, 0.3])
    assert demos.reward_threshold == pytest.approx(0.2)
    play(script, demos, ([0.1], [0], "terminated"))
    assert len(demos.reward_demos) == 3
    demos = store(script, initial_reward_threshold=0.0)
    demos.add_reward_demo(make_demo(script, total=0.0))
    play(script, demos, ([0, 0], [0, 0], "terminated"), ([0, -1], [0, 0], "terminated"))
    assert [demo.total for demo in demos.reward_demos] == [0, 0] and demos.reward_threshold == 0


def test_value_demos(script):
    """Room for 2. Highest values 0.5 and 0.3 join; 0.2 and 0.3 do not beat the lowest, 0.4 does (the last value is 0.1
    in all). When the first is replayed and the critic says 0.6 at most, that is its value; a replay is no candidate.
    """
    demos = store(script, demo_capacity=2, initial_reward_threshold=1.0)
    kept = []
    for value in (0.5, 0.3, 0.2, 0.3, 0.4):
        play(script, demos, ([0, 0, 0], [0, value, 0.1], "terminated"))
        kept.append(sorted(demo.max_value for demo in demos.value_demos))
    assert kept == [[0.5], [0.3, 0.5], [0.3, 0.5], [0.3, 0.5], [0.4, 0.5]]
    rollout = script.SequenceBuffer(3, 1, LINE, TWO)
    rollout.demo_ids[:], rollout.rewards[2], rollout.terminated[2] = demos.value_demos[0].id, 5, True
    demos.track_potential_demos(rollout, torch.tensor([[0.2], [0.6], [0.3], [0.9]]))
    close([demo.max_value for demo in demos.value_demos], [0.6, 0.4])
    assert not demos.reward_demos


def test_an_episode_over_three_rollouts(script):
    """Rewards 0 0 | 1 0 | 0 2 0, of which the second rollout shows nothing else; the highest value, 9, is in the first.
    Fails if an episode is cut where a rollout ends, or if the next one inherits from it.
    """
    demos = store(script, initial_reward_threshold=10.0)
    for part in (([0, 0], [0, 9], ""), ([1, 0], [1, 1], ""), ([0, 2, 0], [1, 1, 1], "terminated")):
        play(script, demos, part)
    play(script, demos, ([1], [5], "terminated"))
    one, other = demos.value_demos
    assert (one.total, one.max_value, one.rewards.tolist()) == (3, 9, [0, 0, 1, 0, 0, 2])
    assert one.obs.ravel().tolist() == [0, 1, 0, 1, 0, 1, 2] and (other.total, other.max_value) == (1, 5)


def test_replayed_rows(script):
    """A demo of three steps, rewards 0 0 1, terminated; values 0.1 0.2 0.3, gamma = lambda = 1/2; log-probs count as 0.

    delta = (0 + 0.2/2 - 0.1, 0 + 0.3/2 - 0.2, 1 - 0.3) = (0, -0.05, 0.7); A_2 = 0.7, A_1 = -0.05 + 0.7/4 = 0.125,
    A_0 = 0.125/4 = 0.03125. The ratio is pi itself: with pi = 0.3 and A = 2 the objective is 0.6, its derivative by
    log pi as well; with A = -2 it is clipped, min(-0.6, -1.6), without a gradient. Row 0 is the reset row before.
    """
    demos, rollout = store(script, [make_demo(script)]), script.SequenceBuffer(4, 1, LINE, TWO)
    obs, reset_rows = np.zeros((1, 1), np.float32), np.ones(1, bool)
    environment = script.Step(np.zeros((1, 1), int), np.full((1, 1), 7.0), np.full(1, 7.0), *np.zeros((2, 1), bool))
    for t in range(4):
        next_obs = demos.draw_next(None, reset_rows, environment.next_obs, Draws(0.05))
        step, ids = demos.show_replays(reset_rows, environment._replace(next_obs=next_obs))
        rollout.add(t, obs, step, reset_rows, ids)
        obs, reset_rows = step.next_obs, step.terminated | step.truncated
    log_probs, values = rollout.log_probs_and_values(Critic())
    rollout.compute_advantages(log_probs, values, script.Args(gamma=0.5, gae_lambda=0.5))
    close(log_probs[:, 0], [-1.2, 0, 0, 0])
    close(rollout.advantages[1:, 0], [0.03125, 0.125, 0.7])
    assert rollout.actions[1:, 0, 0].tolist() == [0, 1, 0] and rollout.terminated[:, 0].tolist() == [0, 0, 0, 1]
    assert environment.rewards == 7 and environment.next_obs == 7 and environment.actions == 0  # the caller's own
    for advantage, objective, derivative in ((2.0, 0.6, 0.6), (-2.0, -1.6, 0.0)):
        log_pi = torch.tensor([math.log(0.3)], requires_grad=True)
        loss = script.policy_loss(log_pi - log_probs[1], torch.tensor([advantage]), 0.2)
        close([-loss.item(), -torch.autograd.grad(loss, log_pi)[0].item()], [objective, derivative])


def test_recurrent_states(script):
    """A GRU that only adds: inputs 1 2 4 8 16 from the state 32 give 33, 35, 39; row 2 is a reset row, so then 8, 24.

    States before chunks of two steps: 32, 35. Fails if the state goes on over a reset row, or is lost between chunks.
    """
    agent = script.RecurrentAgent(LINE, TWO, script.Args(gru_size=1))
    agent.trunk_output, agent.gru = lambda obs: obs, Adds()
    rollout = script.SequenceBuffer(4, 1, LINE, TWO)
    rollout.obs[:, 0, 0], rollout.reset_rows[2], rollout.state = [1, 2, 4, 8, 16], True, torch.tensor([[32.0]])
    features, states = agent.features(*map(torch.as_tensor, (rollout.obs[:-1], rollout.reset_rows, rollout.state)))
    close(features.ravel(), [33, 35, 39, 8])
    close(states.ravel(), [33, 35, 0, 8])
    _, values = rollout.log_probs_and_values(agent)
    rollout.advantages = values
    close(rollout.states.ravel(), [32, 33, 35, 0])
    close(rollout.chunks(rollout.states, 2)[0].ravel(), [32, 35])
    close(values, agent.critic(torch.tensor([[33.0], [35], [39], [8], [24]])))
