"""The numbers of DDPG and TD3, worked out by hand: a lesson to be read beside ddpg_td3.py."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tests.probes.td3_envs import learn, new_agent
from tests.tools import close

ONE = spaces.Box(-1, 1, (1,))


def test_target_policy_smoothing(script):
    """mu'(s') = 0 and raw noise 0.8: clipped to 0.5. 0.9 + 0.3 leaves [-1, 1]: 1. -0.4 - 0.2 = -0.6 is within.

    Fails if the noise, or the action, is not clipped, or if both are clipped together.
    """
    actions = script.smoothed(torch.tensor([0.0, 0.9, -0.4]), torch.tensor([0.8, 0.3, -0.2]), 0.5)
    close(actions, [0.5, 1.0, -0.6])


def test_clipped_double_q(script):
    """r = 1, gamma = 0.9, Q'_1 = 2, Q'_2 = 3: y = 1 + 0.9 * 2 = 2.8, and 1 where the step terminates.

    The third row has the lower value in the other critic: -1 + 0.9 * 4 = 2.6. With a single critic, DDPG: 1 + 0.9 * 3.
    Fails if another value than the lower one counts, or if anything follows termination.
    """
    rewards = torch.tensor([1.0, 1.0, -1.0])
    values = torch.tensor([[2.0, 2.0, 7.0], [3.0, 3.0, 4.0]])
    close(script.critic_targets(rewards, values, torch.tensor([False, True, False]), 0.9), [2.8, 1, 2.6])
    close(script.critic_targets(rewards[:1], values[1:, :1], torch.tensor([False]), 0.9), [3.7])


def test_critic_loss(script):
    """y = (1, 3). Q_1 = (2, 5): (1 + 4) / 2 = 2.5. Q_2 = (1, 0): (0 + 9) / 2 = 4.5. Their sum is 7.

    Fails if the mean is taken over critics, the sum over the batch, or errors are not squared.
    """
    close(script.critic_loss(torch.tensor([[2.0, 5.0], [1.0, 0.0]]), torch.tensor([1.0, 3.0])), 7)


def test_actor_loss(script):
    """mu(s) = 2 s, Q(s, a) = s + a, s = 1 and 3: -(3 + 9) / 2. Fails if the sum is taken, or the sign is forgotten."""
    close(script.actor_loss(lambda obs: 2 * obs, lambda obs, actions: obs + actions, torch.tensor([1.0, 3.0])), -6)


def test_polyak(script):
    """tau = 0.01 from 0 towards 1 is 0.01, then 0.01 + 0.01 * 0.99 = 0.0199. The source stays.

    Fails if tau and 1 - tau are exchanged, or if the source moves.
    """
    target, source = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    for network, number in ((target, 0.0), (source, 1.0)):
        for parameter in network.parameters():
            torch.nn.init.constant_(parameter, number)
    for expected in (0.01, 0.0199):
        script.polyak(target, source, 0.01)
        close(target.weight, [[expected, expected]])
        close(target.bias, [expected])
        close(source.weight, [[1, 1]])


def linear_agent(script, **settings):
    """mu(s) = tanh(w s + b) with w = 0.5, b = 0; Q_1(s, a) = s + 2 a, Q_2(s, a) = -3 a, without hidden layers.

    Their targets: mu'(s) = 0, Q'_1(s, a) = 2 s + 9 a, Q'_2(s, a) = s + 9 a.
    """
    agent = new_agent(script, ONE, ONE, hidden_sizes=(), **settings)
    numbers = {agent.actor: [0.5], agent.critics[0]: [1, 2], agent.critics[1]: [0, -3]}
    numbers |= {agent.target_actor: [0], agent.target_critics[0]: [2, 9], agent.target_critics[1]: [1, 9]}
    for network, weights in numbers.items():
        network.mlp[0].weight.data[:] = torch.tensor([weights])
        network.mlp[0].bias.data.zero_()
    return agent


def numbers_of(network):
    """Weights and bias of a network with a single layer."""
    return [*network.mlp[0].weight[0].tolist(), *network.mlp[0].bias.tolist()]


def test_an_update(script):
    """s = 1, a = 0.5, r = 1, s' = 2, gamma = 0.5, no target noise, mu'(s') = 0.

    Q'_1 = 2 * 2 = 4, Q'_2 = 2: y = 1 + 0.5 * 2 = 2.
    Q_1 = 1 + 2 * 0.5 = 2, error 0: no gradient. Q_2 = -3 * 0.5 = -1.5, error -3.5, loss 12.25; dL/dQ_2 = -7, so that
    dL/d(c, d, e)_2 = -7 (s, a, 1): all negative, and Adam's first step is +0.01 on each of them.
    The actor: J = Q_1(s, mu(s)) = 1 + 2 tanh 0.5; dJ/d(w, b) = 2 (1 - mu^2) (s, 1) > 0: Adam's step is +0.1 on both.
    Targets move a quarter of the way: w' = 0.25 * 0.6, c'_1 = 0.75 * 2 + 0.25 * 1, …

    Fails if a network, a sign, a learning rate, a step's order or the way of a target is wrong.
    """
    row = script.Transitions(*map(torch.tensor, ([[1.0]], [[0.5]], [1.0], [[2.0]], [False])))
    agent = linear_agent(script)
    settings = {"target_noise": 0.0, "policy_frequency": 1, "gamma": 0.5, "tau": 0.25}
    settings |= {"actor_learning_rate": 0.1, "critic_learning_rate": 0.01}
    figures = learn(script, agent, [row], **settings).figures
    close(figures["critic_loss"], [12.25])
    close(figures["value_mean"], [(2 - 1.5) / 2])
    close(figures["actor_loss"], [-(1 + 2 * math.tanh(0.5))])
    close(numbers_of(agent.critics[0]), [1, 2, 0])
    close(numbers_of(agent.critics[1]), [0.01, -2.99, 0.01])
    close(numbers_of(agent.actor), [0.6, 0.1])
    close(numbers_of(agent.target_actor), [0.15, 0.025])
    close(numbers_of(agent.target_critics[0]), [1.75, 7.25, 0])
    close(numbers_of(agent.target_critics[1]), [0.7525, 6.0025, 0.0025])

    # Terminated, y = 1, errors 1 and -2.5. The rate is annealed to 1 - 1/2 in the second of two steps. With a delay of
    # two updates, neither actor nor targets have their turn yet.
    agent = linear_agent(script)
    row = row._replace(terminated=torch.tensor([True]))
    figures = learn(script, agent, [row], **settings | {"policy_frequency": 2, "anneal_lr": True}).figures
    close(figures["critic_loss"], [1 + 2.5**2])
    assert "actor_loss" not in figures
    close(numbers_of(agent.critics[0]), [0.995, 1.995, -0.005])
    close(numbers_of(agent.critics[1]), [0.005, -2.995, 0.005])
    close(numbers_of(agent.target_critics[0]) + numbers_of(agent.actor), [2, 9, 0, 0.5, 0])


def test_delay_counts_critic_updates(script):
    """10 critic updates with a delay of 2 are 5 of the actor, with which the targets move. Fails if steps are counted.

    tau = 1/2 halves the distance from a target's bias to that of its critic, which stays at 0 (learning rate 0).
    """
    row = script.Transitions(*map(torch.tensor, ([[1.0]], [[0.5]], [1.0], [[2.0]], [False])))
    agent = linear_agent(script)
    agent.target_critics[0].mlp[0].bias.data.fill_(32.0)
    run = learn(script, agent, [row] * 10, tau=0.5, critic_learning_rate=0.0, policy_frequency=2, train_frequency=1)
    assert len(run.figures["critic_loss"]) == 10 and len(run.figures["actor_loss"]) == 5
    assert numbers_of(agent.target_critics[0])[2] == 1.0


@pytest.mark.parametrize(
    "settings, steps, due",
    [
        ({}, (10, 11), 1),  # step 11 is the first after learning_starts
        ({}, (8, 13), 3),  # 11, 12, 13
        ({"train_frequency": 4}, (10, 20), 3),  # 12, 16, 20
        ({"train_frequency": 4, "gradient_steps": 3}, (8, 17), 6),
        ({"train_frequency": 4}, (12, 15), 0),
        ({"batch_size": 15}, (10, 17), 2),  # no batch of 15 from fewer than 15
    ],
)
def test_updates_due(script, settings, steps, due):
    """learning_starts = 10. Fails if an update comes too early, or if their number depends on how steps are grouped."""
    args = script.Args(**{"learning_starts": 10, "batch_size": 4} | settings)
    assert script.updates_due(*steps, args) == due
    assert sum(script.updates_due(step, step + 1, args) for step in range(*steps)) == due


def test_ornstein_uhlenbeck_noise(script):
    """x <- (1 - theta) x + sigma N: without sigma, 0.8 fades to 0.6 with theta = 0.25; a reset row makes it 0.

    Fails if noise lasts for another time, goes on in the next episode, or if Gaussian noise lasts at all.
    """
    noise = np.full((3, 2), 0.8)
    reset_rows = np.array([False, True, False])
    args = script.Args(noise="ou", ou_theta=0.25, exploration_noise=0.0)
    rng = np.random.default_rng(0)
    close(script.next_noise(noise, reset_rows, args, rng), [[0.6, 0.6], [0, 0], [0.6, 0.6]])
    args = script.Args(noise="gaussian", ou_theta=0.25, exploration_noise=0.0)
    close(script.next_noise(noise, reset_rows, args, rng), np.zeros((3, 2)))


def test_actions_are_stretched_to_the_bounds(script):
    """-1 -> low, 0 -> the middle, 1 -> high, in each dimension. Integers between -2 and 3: -0.84 is -1.6, 0.16 is 0.9.

    Fails if a bound is missed, or if integers are cut towards 0.
    """
    low, high = np.array([[-1, 0], [10, -0.1]]), np.array([[1, 5], [30, 0.3]])
    agent = new_agent(script, action_space=spaces.Box(low, high, dtype=np.float64))
    close(agent.to_env(np.array([[-1] * 4, [0] * 4, [1] * 4], np.float32)), [low, (low + high) / 2, high])
    agent = new_agent(script, action_space=spaces.Box(-2, 3, (1,), np.int64))
    close(agent.to_env(np.array([[-1], [-0.84], [0.16], [0.84], [1]])), [[-2], [-2], [1], [3], [3]])


def test_statistics(script):
    """Rewards 1, 2 and, after a reset row, 3 with gamma = 0.5: G = 1, 2.5, then 3; their mean is 6.5 / 3.

    What is observed before these steps is 0, 1, 3: mean 4/3, variance 10/3 - 16/9 = 14/9. Var G = 4: rewards of 3, 100,
    -100 are learnt from as 1.5, 10, -10. Fails if a reset row counts, G goes on, or rewards are shifted or not cut.
    """
    agent = new_agent(script, ONE, ONE, normalize_obs=True, normalize_reward=True)
    returns = np.zeros(1)
    for obs, reward, reset_row in ((0, 1, False), (1, 2, False), (2, 0, True), (3, 3, False)):
        step = np.array([[obs]]), np.array([reward]), returns, np.array([reset_row])
        returns = agent.update_statistics(*step, gamma=0.5)
    close([agent.return_stats.mean, agent.obs_stats.mean.item(), agent.obs_stats.var.item()], [6.5 / 3, 4 / 3, 14 / 9])
    agent.return_stats.var.fill_(4)
    column = torch.tensor([[3.0]] * 3)
    batch = script.Transitions(column, column, torch.tensor([3.0, 100.0, -100.0]), column, torch.zeros(3))
    close(agent.normalized(batch).rewards, [1.5, 10, -10])
    close(agent.normalized(batch).next_obs, [[(3 - 4 / 3) / math.sqrt(14 / 9)]] * 3)
