"""What sac.py does, from numbers worked out by hand, a lesson to be read beside it, to whole runs.

Each test must also fail for each of the mistakes that stand above it in `catches`. What sac.py shares with ppo.py (the
run section above all), dqn.py (the replay buffer) and ddpg_td3.py has its tests in the files of these.
"""

import math
from functools import cache
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import tools
import torch
from gymnasium import spaces
from reference import sac as reference
from run_folder import check_evaluation, check_refused, kill_and_resume
from tools import ONE, Aim, catches, close, flat, learn, new_agent, rehearse, row_of_one

import sac

# ------------------------------------------------------------------------------------------------- a lesson, by hand


@catches(
    "squashed_gaussian, no tanh correction: (log_density - log_jacobian) -> log_density",
    "squashed_gaussian, correction added: log_density - log_jacobian -> log_density + log_jacobian",
    "squashed_gaussian, correction that rounds: 2 * (math.log(2) - u - nn.functional.softplus(-2 * u)) -> "
    "(1 - u.tanh() ** 2 + 1e-6).log()",
    "squashed_gaussian, deviation for its logarithm: - log_std - -> - log_std.exp() -",
    "squashed_gaussian, variance for deviation: mean + log_std.exp() * noise -> mean + (2 * log_std).exp() * noise",
    "squashed_gaussian, mean over dimensions: .sum(1) -> .mean(1)",
)
def test_squashed_gaussian(script):
    """log N(u) - log(1 - a^2), where log N = -noise^2 / 2 - log sigma - 0.918939.

        mean   sigma   noise   u     a = tanh u   log N                             log (1 - a^2)
        0      1       0       0     0            -0.918939                         0
        0.5    2       0.25    1     0.761594     -0.031250 - 0.693147 - 0.918939   log 0.419974 = -0.867562
        20     1       0       20    1            -0.918939                         2 (log 2 - 20) = -38.613706

    Of 1 - a^2, single precision leaves nothing in the third row. In a second dimension, u = 0 in every row; it adds
    -0.918939 to each log-density.
    """
    column = lambda *numbers: torch.stack([torch.tensor(numbers), torch.zeros(3)], dim=1)
    mean, log_std, noise = column(0.0, 0.5, 20), column(0.0, math.log(2), 0), column(0.0, 0.25, 0)
    actions, log_probs = script.squashed_gaussian(mean, log_std, noise)
    close(actions, column(0, 0.761594, 1))
    close(log_probs, [-0.918939 - 0.918939, -1.643336 + 0.867562 - 0.918939, -0.918939 + 38.613706 - 0.918939])


def test_densities_integrate_to_one(script):
    """The sum of density times width over all actions from -1 to 1 is 1."""
    noise = torch.linspace(-9, 9, 4001, dtype=torch.float64)[:, None]
    mean, log_std = (torch.tensor([[number]], dtype=torch.float64) for number in (0.7, -0.2))
    actions, log_probs = script.squashed_gaussian(mean, log_std, noise)
    close(torch.trapezoid(log_probs.exp(), actions[:, 0]), 1.0)


@catches(
    "soft_td_targets, no entropy: next_values.amin(0) - alpha * next_log_probs -> next_values.amin(0)",
    "soft_td_targets, entropy costs: - alpha * -> + alpha *",
    "soft_td_targets, mean of the critics: amin(0) -> mean(0)",
    "soft_td_targets, maximum of the critics: amin(0) -> amax(0)",
    "soft_td_targets, bootstraps after termination: * ~terminated -> * 1",
    "soft_td_targets, entropy after termination: gamma * next_values * ~terminated -> "
    "gamma * (next_values * ~terminated - alpha * next_log_probs * terminated)",
    "soft_td_targets, entropy of the first action as well: return rewards -> return rewards - alpha * next_log_probs",
    "soft_td_targets, not discounted: gamma * -> 1 *",
)
def test_soft_targets(script):
    """gamma = 0.5, alpha = 0.2. Q' = 2 and 3, log pi = -1: y = 1 + 0.5 (2 + 0.2) = 2.1, and 1 where a step terminates.

    In the third row the other critic has the lower value, and a' is likely: -1 + 0.5 (4 - 0.2 * 0.5) = 0.95.
    """
    rewards, log_probs = torch.tensor([1.0, 1.0, -1.0]), torch.tensor([-1.0, -1.0, 0.5])
    values = torch.tensor([[2.0, 2.0, 7.0], [3.0, 3.0, 4.0]])
    targets = script.soft_td_targets(rewards, values, log_probs, torch.tensor([False, True, False]), 0.2, 0.5)
    close(targets, [2.1, 1, 0.95])


@catches(
    "sac_actor_loss, mean of the critics: amin(0) -> mean(0)",
    "sac_actor_loss, first critic only: values.amin(0) -> values[0]",
    "sac_actor_loss, downhill: - values.amin(0) -> + values.amin(0)",
    "sac_actor_loss, entropy costs: (alpha * log_probs - -> (-alpha * log_probs -",
    "sac_actor_loss, no entropy: alpha * log_probs - -> -",
    "alpha_loss, wrong sign: return -(log_alpha -> return (log_alpha",
    "alpha_loss, target entropy's sign: log_probs.detach() + target -> log_probs.detach() - target",
    "alpha_loss, moves the actor: log_probs.detach() -> log_probs",
    "alpha_loss, the logarithm for alpha: log_alpha.exp() -> log_alpha",
)
def test_losses(script):
    """Two rows, alpha = 0.2, log pi = -1 and 0.5. Q = (1, 5) and (3, 4), of which 1 and 4 count:
    ((0.2 * -1 - 1) + (0.2 * 0.5 - 4)) / 2 = (-1.2 - 3.9) / 2 = -2.55.

    The entropy is (1 - 0.5) / 2 = 0.25. With a target of -1, the loss is 0.2 (0.25 + 1) = 0.25, and so is its slope in
    log alpha: downhill, alpha falls. With a target of 1, it is 0.2 (0.25 - 1) = -0.15: alpha rises.
    """
    log_probs = torch.tensor([-1.0, 0.5], requires_grad=True)
    close(script.sac_actor_loss(torch.tensor([[1.0, 5.0], [3.0, 4.0]]), log_probs, 0.2), -2.55)
    for target_entropy, slope in ((-1, 0.25), (1, -0.15)):
        log_alpha = torch.tensor(0.2).log().requires_grad_()
        loss = script.alpha_loss(log_alpha, log_probs, target_entropy)
        loss.backward()
        close([loss.item(), log_alpha.grad.item()], [slope, slope])
    assert log_probs.grad is None


class HalfNoise:
    """A generator that draws 0.5 wherever Gaussian noise is due."""

    standard_normal = staticmethod(lambda shape, dtype=float: np.full(shape, 0.5, dtype))
    uniform = staticmethod(lambda low, high, shape: np.zeros(shape))
    integers = staticmethod(lambda *_: 0)


@catches(
    "compute_targets, values of the critics themselves: in agent.target_critics -> in agent.critics",
    "compute_targets, values of this state: critic(batch.next_obs, -> critic(batch.obs,",
    "compute_targets, entropy of another action: return soft -> "
    "next_log_probs = agent.draw(batch.obs, rng)[1]\n        return soft",
    "compute_targets, of what was done: critic(batch.next_obs, next_actions) -> critic(batch.next_obs, batch.actions)",
    "compute_targets, with gradients: with torch.no_grad(): -> if True:",
    "SoftActorCritic.draw, noise forgotten: (mean, log_std, noise) -> (mean, log_std, 0 * noise)",
    "SoftActorCritic.__init__, target entropy's sign: -float(self.action_dimensions) -> float(self.action_dimensions)",
    "SoftActorCritic.__init__, alpha is its logarithm: torch.tensor(first_alpha).log() -> torch.tensor(first_alpha)",
    "update_actor_and_alpha, the loss leaves gradients behind: backward(inputs=list(agent.actor.parameters())) -> "
    "backward()",
    "update_actor_and_alpha, learns from what was done: (batch.obs, actions) for -> (batch.obs, batch.actions) for",
    "update_actor_and_alpha, first critic only: for critic in agent.critics] -> for critic in agent.critics[:1]]",
    "train, learning rates exchanged: args.actor_learning_rate -> args.critic_learning_rate",
    "train, targets stay: polyak(agent.target_critics, agent.critics, args.tau) -> 0",
    "update_actor_and_alpha, alpha never learnt: if args.alpha is None -> if False",
    "update_actor_and_alpha, alpha always learnt: if args.alpha is None -> if True",
)
def test_an_update(script):
    """s = 1, a = 0.5, r = 1, s' = 2, gamma = 0.5, alpha = 1; all noise is 0.5. pi has mean s / 4 and deviation 1.

    In s', u = 0.5 + 0.5 = 1: a' = tanh 1, log pi = -0.125 - 0.918939 + 0.867562 = -0.176377.
    Q'_1 = 2 s + a = 4 + tanh 1 = 4.761594, Q'_2 = s + 9 a is more: y = 1 + 0.5 (4.761594 + 0.176377) = 3.468986.
    Q_1 = s + 2 a = 2, Q_2 = -3 a = -1.5, both below y: Adam's first step is +0.01 on all weights and biases.
    Then, in s, u = 0.75: a = tanh 0.75 = 0.635149, log pi = -0.125 - 0.918939 + 0.516532 = -0.527407, and the lower
    value is now Q_2 = 0.01 - 2.99 a + 0.01 = -1.879095: the loss is -0.527407 + 1.879095 = 1.351688.
    Its slope in the mean is 2 a + 2.99 (1 - a^2) > 0, in the logarithm of the deviation half of that less 1, > 0: all
    of the actor's weights fall by 0.1. The entropy 0.53 is above its target -1: log alpha falls from 0 to -0.01.
    With alpha fixed at 0.2: y = 1 + 0.5 (4.761594 + 0.2 * 0.176377) = 3.398435, and -0.105481 + 1.879095 is the loss.
    """
    numbers_of = lambda network: flat(network).tolist()
    settings = {"policy_frequency": 1, "gamma": 0.5, "tau": 0.25}
    settings |= {"actor_learning_rate": 0.1, "critic_learning_rate": 0.01}
    for alpha, y, actor_loss, log_alpha in (
        (None, 3.468986, 1.351688, -0.01),
        (0.2, 3.398435, 1.773614, math.log(0.2)),
    ):
        agent = new_agent(script, ONE, ONE, hidden_sizes=(), alpha=alpha)
        numbers = {agent.actor: [[0.25], [0]], agent.critics[0]: [[1.0, 2]], agent.critics[1]: [[0.0, -3]]}
        numbers |= {agent.target_critics[0]: [[2.0, 1]], agent.target_critics[1]: [[1.0, 9]]}
        for network, weights in numbers.items():
            network.mlp[0].weight.data[:] = torch.tensor(weights)
            network.mlp[0].bias.data.zero_()
        with mock.patch.object(np.random, "default_rng", lambda seed: HalfNoise):
            logged = learn(script, agent, [row_of_one(script)], alpha=alpha, **settings).all_logged
        close(logged["critic_loss"], [(y - 2) ** 2 + (y + 1.5) ** 2], atol=1e-4)
        close(logged["actor_loss"], [actor_loss])
        close(logged["entropy"], [0.527407])
        close(numbers_of(agent.critics[0]), [1.01, 2.01, 0.01])
        close(numbers_of(agent.critics[1]), [0.01, -2.99, 0.01])
        close(numbers_of(agent.actor), [0.15, -0.1, -0.1, -0.1])
        close(agent.log_alpha, log_alpha)
        close(numbers_of(agent.target_critics[0]), [0.75 * 2 + 0.25 * 1.01, 0.75 * 1 + 0.25 * 2.01, 0.0025])
        close(agent.critics[1].mlp[0].weight.grad, [[2 * (-1.5 - y), -1.5 - y]], atol=1e-4)  # not of the actor's loss
        assert agent.target_critics[0].mlp[0].weight.grad is None


@catches(
    "SoftActorCritic.to_env, not stretched: self.action_scale * actions + self.action_bias -> actions",
    "SoftActorCritic.to_env, beyond the bounds by rounding: np.clip(actions, space.low, space.high) -> actions",
    "SoftActorCritic.act, at random: noise=0 -> noise=1",
    "SquashedActor.forward, deviations without bounds: log_std.clamp(-20, 2) -> log_std",
)
def test_actions(script):
    """-1 -> low, 0 -> the middle, 1 -> high; not beyond, where a sum is rounded.

    Evaluations play tanh of the mean: with weights 0 and biases 1 and 50, tanh 1, however large the deviation.
    """
    low, high = np.array([[-1, 0], [10, -0.1]]), np.array([[1, 5], [30, 0.3]])
    agent = new_agent(script, action_space=spaces.Box(low, high, dtype=np.float64))
    close(agent.to_env(np.array([[-1] * 4, [0] * 4, [1] * 4], np.float32)), [low, (low + high) / 2, high])
    low, width = np.random.default_rng(1).uniform(0, 1, (2, 100))
    agent = new_agent(script, action_space=spaces.Box(low, low + width, dtype=np.float64))
    assert all(agent.action_space.contains(action) for action in agent.to_env(np.array([[-1] * 100, [1] * 100])))
    agent = new_agent(script, ONE, ONE, hidden_sizes=())
    agent.actor.mlp[0].weight.data.zero_()
    agent.actor.mlp[0].bias.data[:] = torch.tensor([1.0, 50.0])
    close(agent.act(np.zeros((1, 1))), [[math.tanh(1)]])
    close(agent.explore(np.zeros((1, 1)), noise=np.full((1, 1), -0.2)), [[math.tanh(1 - 0.2 * math.exp(2))]])


# -------------------------------------------------------------------------- against a slow and obvious version of it

COMMON = {"num_envs": 2, "total_timesteps": 50, "learning_starts": 12, "batch_size": 4, "buffer_size": 20, "gamma": 0.9}
COMMON |= {"actor_learning_rate": 0.02, "critic_learning_rate": 0.01, "hidden_sizes": (8,), "tau": 0.1, "seed": 4}
COMMON |= {"checkpoint_every": 20}
TRAININGS = [
    {"normalize_obs": True, "anneal_lr": True, "gradient_steps": 2, "train_frequency": 3, "noise": "ou",
     "exploration_noise": 0.53, "max_grad_norm": 0.05, "normalize_reward": True},
    {"alpha": 0.3, "policy_frequency": 1, "hidden_sizes": ()},
    {"policy_frequency": 3, "learning_starts": 0, "train_frequency": 2, "num_envs": 3},
]  # fmt: skip


@cache
def slow_training(number):
    """What the slow version gives, with the script as it is: `script` may have a mistake."""
    return reference.train(sac.Args(**COMMON | TRAININGS[number]))


@catches(
    "SoftActorCritic.observe, not normalised: obs if self.obs_stats is None -> obs if True",
    "SoftActorCritic.observe_batch, next observations as they are: self.observe(batch.next_obs) -> batch.next_obs",
    "SoftActorCritic.observe_batch, rewards as they are: rewards=rewards -> rewards=batch.rewards",
    "SoftActorCritic.explore, always the mean: log_std.exp() * noise -> 0 * noise",
    "SoftActorCritic.draw, one noise for all rows: rng.standard_normal(mean.shape, -> rng.standard_normal((1, 2),",
    "SoftActorCritic.__init__, the critics' targets are the critics: copy.deepcopy(self.critics) -> self.critics",
    "update_critics, gradients add up: optimizer.zero_grad() -> 0",
    "update_actor_and_alpha, gradients add up: actor_optimizer.zero_grad() -> 0",
    "update_actor_and_alpha, alpha's gradients add up: alpha_optimizer.zero_grad() -> 0",
    "train, actor's rate not annealed: actor_scheduler.step() -> 0",
    "update_critics, gradients not shortened: args.max_grad_norm) -> 1e9)",
    "update_actor_and_alpha, gradients not shortened: args.max_grad_norm) -> 1e9)",
    "train, no delay: updates % args.policy_frequency == 0 -> True",
    "train, delayed and not made up for: in range(args.policy_frequency) -> in range(1)",
    "train, targets wait: polyak(agent.target_critics, agent.critics, args.tau) -> "
    "updates % args.policy_frequency or polyak(agent.target_critics, agent.critics, args.tau)",
    "train, noise begins anew in each step: next_noise(noise, -> next_noise(0 * noise,",
    "train, next observations twice: buffer.add(obs, -> buffer.add(next_obs,",
    "train, overwritten by the next step: obs.copy() -> obs",
    "train, truncation counts as an end: next_obs, terminated, reset -> next_obs, terminated | truncated, reset",
    "train, a random action too many: run.step < args.learning_starts -> run.step <= args.learning_starts",
    "train, half of the range: rng.uniform(-1, 1, -> rng.uniform(0, 1,",
    "train, statistics of what comes next: update_statistics(obs[ -> update_statistics(next_obs[",
    "train, reset rows counted in the statistics: obs[~reset_rows], -> obs,",
    "train, sums of rewards outlive an end: discounted) * ~reset_rows -> discounted)",
    "train, seen before acting: actions = agent -> agent.update_statistics(obs, rewards); actions = agent",
)
def test_training(script):
    """Every weight, figure and return is that of tests/reference/sac.py, whatever the options."""
    for number, options in enumerate(TRAININGS):
        figures, networks, returns = slow_training(number)
        run = tools.rehearse_drift(script, **COMMON | options)
        close(run.episodes["return"], returns)
        assert set(run.all_logged) == set(figures) and len(figures["critic_loss"]) > 10
        for name in figures:
            close(run.all_logged[name], figures[name], atol=1e-3)
        for ours, slow in zip((run.agent.actor, run.agent.critics, run.agent.target_critics), networks):
            close(flat(ours), slow, atol=1e-3)


def test_images_have_a_cnn_for_each_network(script):
    """None of them is another's."""
    tools.check_cnns(script, (36, 40, 3))


@catches(
    "train, critics in eval mode: make_agent(args, envs).train() -> make_agent(args, envs)",
    "train, plays in train mode: agent.actor.eval() -> 0",
    "update_actor_and_alpha, plays in train mode afterwards: agent.actor.eval() -> 0",
    "update_actor_and_alpha, in eval mode: agent.actor.train() -> 0",
)
def test_dropout_would_belong_to_the_losses(script):
    """What an agent acts with is in eval mode."""
    tools.check_modes(script)


@catches(
    "SoftActorCritic.act, one observation is taken for a batch: if obs.shape[1:] != self.observation_shape -> if False"
)
def test_odd_worlds(script):
    """What Gymnasium takes is taken; what cannot be is refused."""
    tools.check_odd_worlds(script)


@catches(
    "SoftActorCritic.draw, density in the environment's unit: return squashed_gaussian(mean, log_std, noise) -> "
    "actions, log_probs = squashed_gaussian(mean, log_std, noise)\n"
    "        return actions, log_probs - np.log(self.action_scale).sum()",
)
def test_the_unit_of_actions_changes_nothing(script):
    """The same task, its two actions counted in five units: the same metrics and returns."""
    units = [(-0.02, 0.02), (-2, 2), (-1000, 1000), (30, 1017), ([-1, 30], [1, 1017])]
    found = []
    for unit in units:
        low, high = (np.broadcast_to(np.float32(bound), 2) for bound in unit)
        world = lambda low=low, high=high: gym.wrappers.RescaleAction(tools.Drift(), low, high)
        run = rehearse(script, world, **COMMON)
        found.append(run.all_logged | {"returns": run.episodes["return"]})
    for metrics in found[1:]:
        for name in found[0]:
            close(metrics[name], found[0][name], atol=1e-4)


# -------------------------------------------------------------------------------- worlds whose right answer is known


@pytest.mark.parametrize(("end", "value"), [("t", 1.0), pytest.param("c", 2.0, marks=pytest.mark.slow)])
def test_small_worlds_are_learnt(script, end, value):
    """The right action is half of what is shown, and then Q = 1; cut off, the future counts: 1 / (1 - 0.5) = 2.

    With a small fixed alpha, entropy changes little of that. An evaluation ends the run.
    """
    settings = {"hidden_sizes": (32, 32), "batch_size": 32, "learning_starts": 100, "buffer_size": 3_000, "gamma": 0.5}
    settings |= {"tau": 0.02, "actor_learning_rate": 3e-3, "critic_learning_rate": 3e-3, "alpha": 0.01}
    settings |= {"eval_every": 100, "eval_episodes": 20, "stop_at_return": 0.99, "total_timesteps": 3000}
    run = rehearse(script, lambda: Aim(end), **settings)
    assert run.evaluations["return_mean"][-1] >= 0.99 and run.step == run.evaluations["step"][-1] < 1500
    actions = run.agent.act(np.array([[-1.0], [1.0]]))
    close(actions, [[-0.5], [0.5]], 0.2)
    close(run.agent.critics[0](torch.tensor([[-1.0], [1.0]]), torch.tensor(actions)), [value] * 2, 0.4)


@pytest.mark.slow
def test_entropy_reaches_its_target(script):
    """alpha is learnt until the entropy is -1; uniform actions would have log 2 = 0.69."""
    settings = {"hidden_sizes": (8,), "batch_size": 32, "learning_starts": 50, "policy_frequency": 1, "gamma": 0.0}
    settings |= {"actor_learning_rate": 2e-2, "critic_learning_rate": 2e-2, "total_timesteps": 1200}
    run = rehearse(script, lambda: Aim(), **settings)
    close(np.mean(run.all_logged["entropy"][-300:]), -1.0, atol=0.3)


# ------------------------------------------------------------------------------------------------------- whole runs

RUN = "--env-id Pendulum-v1 --num-envs 2 --hidden-sizes 8 --batch-size 16 --learning-starts 20 --buffer-size 60 "
RUN += "--max-episode-steps 10 --total-timesteps 80 --checkpoint-every 25 --eval-every 50 --eval-episodes 2 "
RUN += "--normalize-obs --normalize-reward --anneal-lr"


@catches("train, alpha's optimiser is not saved: alpha_optimizer=alpha_optimizer, -> ")
def test_killed_resumed_evaluated(script, tmp_path, monkeypatch, capsys):
    """A resumed run ends as an unbroken one, bit for bit; --evaluate changes nothing."""
    kill_and_resume(script, RUN, 37, monkeypatch, tmp_path)
    check_evaluation(script, capsys)


def test_refused(script, tmp_path, monkeypatch, capsys):
    refused = {"--env-id CartPole-v1": "Box actions of floats, bounded", "--buffer-size 10": "batch_size"}
    refused |= {"--buffer-size 1e14": "GiB"}
    check_refused(script, refused, tmp_path, monkeypatch, capsys)
    assert 2 * 96 * 96 * 3 * script.tuned(env_id="CarRacing-v3").buffer_size < 8e9  # it fits into 16 GiB
