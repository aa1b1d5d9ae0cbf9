"""What ddpg_td3.py does, from numbers worked out by hand, a lesson to be read beside it, to whole runs.

Each test must also fail for each of the mistakes that stand above it in `catches`. What ddpg_td3.py shares with ppo.py
(the run section above all) and with dqn.py (the replay buffer) has its tests in the files of these.
"""

import math
from functools import cache
from unittest import mock

import numpy as np
import pytest
import tools
import torch
from gymnasium import spaces
from reference import ddpg_td3 as reference
from run_folder import check_evaluation, check_refused, command, content, kill_and_resume
from tools import BOX, ONE, Aim, catches, close, flat, learn, new_agent, rehearse, row_of_one

import ddpg_td3

# ------------------------------------------------------------------------------------------------- a lesson, by hand


@catches(
    "smoothed, noise not clipped: noise.clamp(-clip, clip) -> noise",
    "smoothed, action not clipped: ).clamp(-1, 1) -> )",
    "critic_targets, maximum of the critics: amin(0) -> amax(0)",
    "critic_targets, bootstraps after termination: * ~terminated -> * 1",
    "critic_targets, not discounted: gamma * -> 1 *",
)
def test_smoothing_and_clipped_double_q(script):
    """mu'(s') = 0 and raw noise 0.8: clipped to 0.5. 0.9 + 0.3 leaves [-1, 1]: 1. -0.4 - 0.2 = -0.6 is within.

    r = 1, gamma = 0.9, Q'_1 = 2, Q'_2 = 3: y = 1 + 0.9 * 2 = 2.8, and 1 where the step terminates. The third row has
    the lower value in the other critic: -1 + 0.9 * 4 = 2.6. With a single critic, DDPG: 1 + 0.9 * 3.
    """
    actions = script.smoothed(torch.tensor([0.0, 0.9, -0.4]), torch.tensor([0.8, 0.3, -0.2]), 0.5)
    close(actions, [0.5, 1.0, -0.6])
    rewards = torch.tensor([1.0, 1.0, -1.0])
    values = torch.tensor([[2.0, 2.0, 7.0], [3.0, 3.0, 4.0]])
    close(script.critic_targets(rewards, values, torch.tensor([False, True, False]), 0.9), [2.8, 1, 2.6])
    close(script.critic_targets(rewards[:1], values[1:, :1], torch.tensor([False]), 0.9), [3.7])


@catches(
    "critic_loss, averaged over critics: .mean(1).sum() -> .mean()",
    "critic_loss, absolute errors: ((values - targets) ** 2) -> (values - targets).abs()",
    "actor_loss, downhill: return -critic -> return critic",
)
def test_losses(script):
    """y = (1, 3). Q_1 = (2, 5): (1 + 4) / 2 = 2.5. Q_2 = (1, 0): (0 + 9) / 2 = 4.5. Their sum is 7.

    mu(s) = 2 s, Q(s, a) = s + a, s = 1 and 3: -(3 + 9) / 2 = -6.
    """
    close(script.critic_loss(torch.tensor([[2.0, 5.0], [1.0, 0.0]]), torch.tensor([1.0, 3.0])), 7)
    close(script.actor_loss(lambda obs: 2 * obs, lambda obs, actions: obs + actions, torch.tensor([1.0, 3.0])), -6)


def linear_agent(script):
    """mu(s) = tanh(w s + b) with w = 0.5, b = 0; Q_1(s, a) = s + 2 a, Q_2(s, a) = -3 a, without hidden layers.

    Their targets: mu'(s) = 0, Q'_1(s, a) = 2 s + 9 a, Q'_2(s, a) = s + 9 a.
    """
    agent = new_agent(script, ONE, ONE, hidden_sizes=())
    numbers = {agent.actor: [0.5], agent.critics[0]: [1, 2], agent.critics[1]: [0, -3]}
    numbers |= {agent.target_actor: [0], agent.target_critics[0]: [2, 9], agent.target_critics[1]: [1, 9]}
    for network, weights in numbers.items():
        network.mlp[0].weight.data[:] = torch.tensor([weights])
        network.mlp[0].bias.data.zero_()
    return agent


@catches(
    "bellman_targets, values of the critics themselves: in agent.target_critics -> in agent.critics",
    "bellman_targets, actions of the actor itself: agent.target_actor( -> agent.actor(",
    "bellman_targets, targets of this state's values: critic(batch.next_obs, -> critic(batch.obs,",
    "update_actor, follows the other critic: agent.critics[0], batch.obs -> agent.critics[-1], batch.obs",
    "train, learning rates exchanged: args.actor_learning_rate -> args.critic_learning_rate",
    "train, actor's target stays: polyak(agent.target_actor, agent.actor, args.tau) -> 0",
    "train, critics' targets stay: polyak(agent.target_critics, agent.critics, args.tau) -> 0",
    "train, no delay: updates % args.policy_frequency == 0 -> True",
    "train, the first of two is the actor's turn: if updates % -> if (updates - 1) %",
    "train, critics' rate not annealed: critic_scheduler.step() -> 0",
    "update_actor, learns from what was done: actor_loss(agent.actor, -> "
    "actor_loss(lambda obs: batch.actions + 0 * agent.actor(obs),",
    "update_actor, its loss goes into the critic: backward(inputs=list(agent.actor.parameters())) -> backward()",
    "update_actor, the second critic is asked in vain: loss = actor_loss(agent.actor, agent.critics[0], batch.obs) -> "
    "loss = [actor_loss(agent.actor, critic, batch.obs) for critic in agent.critics][0]",
    "bellman_targets, with gradients: with torch.no_grad(): -> if True:",
)
def test_an_update(script):
    """s = 1, a = 0.5, r = 1, s' = 2, gamma = 0.5, no target noise, mu'(s') = 0.

    Q'_1 = 2 * 2 = 4, Q'_2 = 2: y = 1 + 0.5 * 2 = 2.
    Q_1 = 1 + 2 * 0.5 = 2, error 0: no gradient. Q_2 = -3 * 0.5 = -1.5, error -3.5, loss 12.25, slope -7. Its
    critic c s + d a + e has the slopes -7 (s, a, 1): all negative, and Adam's first step is +0.01 on each of c, d, e.
    The actor tanh(w s + b): J = Q_1(s, mu(s)) = 1 + 2 tanh 0.5; its slopes in w and b are 2 (1 - mu^2) (s, 1) > 0, so
    that Adam's step is +0.1 on both.
    Targets move a quarter of the way: w' = 0.25 * 0.6, c'_1 = 0.75 * 2 + 0.25 * 1, …
    """
    numbers_of = lambda network: flat(network).tolist()
    agent = linear_agent(script)
    settings = {"target_noise": 0.0, "policy_frequency": 1, "gamma": 0.5, "tau": 0.25}
    settings |= {"actor_learning_rate": 0.1, "critic_learning_rate": 0.01}
    with mock.patch.object(agent.critics[1], "forward", side_effect=agent.critics[1].forward) as second:
        logged = learn(script, agent, [row_of_one(script)], **settings).all_logged
    close(logged["critic_loss"], [12.25])
    close(logged["value_mean"], [(2 - 1.5) / 2])
    close(logged["actor_loss"], [-(1 + 2 * math.tanh(0.5))])
    close(numbers_of(agent.critics[0]), [1, 2, 0])
    close(numbers_of(agent.critics[1]), [0.01, -2.99, 0.01])
    close(numbers_of(agent.actor), [0.6, 0.1])
    close(numbers_of(agent.target_actor), [0.15, 0.025])
    close(numbers_of(agent.target_critics[0]), [1.75, 7.25, 0])
    close(numbers_of(agent.target_critics[1]), [0.7525, 6.0025, 0.0025])
    # No gradient is computed in vain: none of the actor's step is left in the critics, targets and critic 2 have none.
    close(agent.critics[0].mlp[0].weight.grad, [[0, 0]])
    assert agent.target_critics[1].mlp[0].weight.grad is None and second.call_count == 1

    # Terminated, y = 1, errors 1 and -2.5. After this update, the second of three steps, a third of the rate is left.
    # With a delay of two updates, neither actor nor targets have their turn yet.
    agent = linear_agent(script)
    settings |= {"policy_frequency": 2, "anneal_lr": True, "train_frequency": 2, "total_timesteps": 3}
    run = learn(script, agent, [row_of_one(script, terminated=True)], **settings)
    close(run.all_logged["critic_loss"], [1 + 2.5**2])
    assert "actor_loss" not in run.all_logged
    close(run.parts["critic_optimizer"].param_groups[0]["lr"], 0.01 / 3)
    close(numbers_of(agent.critics[0]), [0.99, 1.99, -0.01])
    close(numbers_of(agent.critics[1]), [0.01, -2.99, 0.01])
    close(numbers_of(agent.target_critics[0]) + numbers_of(agent.actor), [2, 9, 0, 0.5, 0])


@catches(
    "num_updates, fewer transitions than a batch: max(args.learning_starts, args.batch_size) -> args.learning_starts",
    "num_updates, gradient steps forgotten: max(0, rounds) * args.gradient_steps -> max(0, rounds)",
    "num_updates, one too early: - warm_up // -> - (warm_up - 1) //",
    "num_updates, at every step: rounds = step // args.train_frequency -> rounds = step",
    "num_updates, less than none: max(0, rounds) -> rounds",
)
def test_num_updates(script):
    """learning_starts = 10: the first update comes in step 11. With train_frequency 4 they come in 12, 16, 20, …

    With 3 gradient steps, the first round is updates 1, 2, 3 in step 12, the second 4, 5, 6 in step 16.
    """
    cases = [  # settings, {steps taken: updates made}
        ({}, {0: 0, 10: 0, 11: 1, 13: 3}),
        ({"train_frequency": 4}, {8: 0, 11: 0, 12: 1, 15: 1, 16: 2, 20: 3}),
        ({"train_frequency": 4, "gradient_steps": 3}, {0: 0, 12: 3, 17: 6}),
        ({"batch_size": 15}, {11: 0, 15: 0, 16: 1, 17: 2}),  # no batch of 15 from fewer than 15
    ]
    for settings, updates in cases:
        args = script.Args(**{"learning_starts": 10, "batch_size": 4, "gradient_steps": 1} | settings)
        assert {step: script.num_updates(step, args) for step in updates} == updates


@catches(
    "next_noise, goes on in the next episode: noise[reset_rows] = 0 -> 0",
    "next_noise, theta and 1 - theta exchanged: (1 - args.ou_theta) * noise -> args.ou_theta * noise",
    'next_noise, Gaussian noise lasts: if args.noise == "gaussian" -> if False',
)
def test_exploration_noise(script):
    """x <- (1 - theta) x + sigma N: without sigma, 0.8 fades to 0.6 with theta = 0.25; a reset row makes it 0."""
    noise, reset_rows = np.full((3, 2), 0.8), np.array([False, True, False])
    args, rng = script.Args(noise="ou", ou_theta=0.25, exploration_noise=0.0), np.random.default_rng(0)
    close(script.next_noise(noise, reset_rows, args, rng), [[0.6, 0.6], [0, 0], [0.6, 0.6]])
    args = script.Args(noise="gaussian", ou_theta=0.25, exploration_noise=0.0)
    close(script.next_noise(noise, reset_rows, args, rng), np.zeros((3, 2)))


@catches(
    "ActorCritic.to_env, not stretched: self.action_scale * actions + self.action_bias -> actions",
    "ActorCritic.to_env, beyond the bounds by rounding: np.clip(actions, space.low, space.high) -> actions",
)
def test_actions_are_stretched_to_the_bounds(script):
    """-1 -> low, 0 -> the middle, 1 -> high, in each dimension; not beyond, where a sum is rounded."""
    low, high = np.array([[-1, 0], [10, -0.1]]), np.array([[1, 5], [30, 0.3]])
    agent = new_agent(script, action_space=spaces.Box(low, high, dtype=np.float64))
    close(agent.to_env(np.array([[-1] * 4, [0] * 4, [1] * 4], np.float32)), [low, (low + high) / 2, high])
    low, width = np.random.default_rng(1).uniform(0, 1, (2, 100))
    agent = new_agent(script, action_space=spaces.Box(low, low + width, dtype=np.float64))
    assert all(agent.action_space.contains(action) for action in agent.to_env(np.array([[-1] * 100, [1] * 100])))


@catches(
    "ActorCritic.observe_batch, by the variance: math.sqrt( -> (",
    "ActorCritic.observe_batch, not clipped: .clamp(-10, 10) -> ",
    "ActorCritic.update_statistics, never counted: self.return_stats.update( -> len(",
)
def test_rewards_are_scaled_when_they_are_sampled(script):
    """Discounted returns 1, 3, then 5, 7: their variance is 1, then (9 + 1 + 1 + 9) / 4 = 5.

    A reward of 4 counts as 4, then as 4 / sqrt 5 = 1.788854. It stays 4 in the buffer. At most 10 are left of it.
    """
    agent = new_agent(script, ONE, ONE, normalize_reward=True)
    batch = row_of_one(script)._replace(rewards=torch.tensor([4.0, -99]))
    for returns, rewards in (([1.0, 3], [4, -10]), ([5, 7], [1.788854, -10])):
        agent.update_statistics(None, np.array(returns))
        close(agent.observe_batch(batch).rewards, rewards)


# -------------------------------------------------------------------------- against slow and obvious versions of it


COMMON = {"num_envs": 2, "total_timesteps": 50, "learning_starts": 12, "batch_size": 4, "buffer_size": 20, "gamma": 0.9}
COMMON |= {"actor_learning_rate": 0.02, "critic_learning_rate": 0.01, "hidden_sizes": (8,), "tau": 0.1, "seed": 4}
COMMON |= {"exploration_noise": 0.8, "checkpoint_every": 20}
TRAININGS = [
    {"noise": "ou", "normalize_obs": True, "anneal_lr": True, "target_noise": 0.6, "gradient_steps": 2,
     "train_frequency": 3, "max_grad_norm": 0.05, "normalize_reward": True},
    {"twin_q": False, "target_noise": 0.0, "policy_frequency": 1, "hidden_sizes": ()},
    {"policy_frequency": 3, "learning_starts": 0, "train_frequency": 2, "num_envs": 3},
]  # fmt: skip


@cache
def slow_training(number):
    """What the slow version gives, with the script as it is: `script` may have a mistake."""
    return reference.train(ddpg_td3.Args(**COMMON | TRAININGS[number]))


@catches(
    "ActorCritic.observe, not normalised: obs if self.obs_stats is None -> obs if True",
    "ActorCritic.__init__, one critic is a copy of the other: for _ in range(num_critics)) -> "
    "for _ in range(num_critics)); self.critics[-1].load_state_dict(self.critics[0].state_dict())",
    "ActorCritic.observe_batch, next observations as they are: self.observe(batch.next_obs) -> batch.next_obs",
    "ActorCritic.__init__, the actor's target is the actor: copy.deepcopy(self.actor) -> self.actor",
    "ActorCritic.__init__, the critics' targets are the critics: copy.deepcopy(self.critics) -> self.critics",
    "bellman_targets, one noise for all rows: standard_normal(next_actions.shape, -> standard_normal((1, 2),",
    "bellman_targets, noise bound forgotten: args.noise_clip) -> 99.0)",
    "update_actor, gradients add up: optimizer.zero_grad() -> 0",
    "train, actor's rate not annealed: actor_scheduler.step() -> 0",
    "update_critics, gradients not shortened: agent.critics.parameters(), args.max_grad_norm -> "
    "agent.critics.parameters(), 1e9",
    "update_actor, gradients not shortened: agent.actor.parameters(), args.max_grad_norm -> "
    "agent.actor.parameters(), 1e9",
    "train, next observations twice: buffer.add(obs, -> buffer.add(next_obs,",
    "train, overwritten by the next step: obs.copy() -> obs",
    "train, truncation counts as an end: next_obs, terminated, reset -> next_obs, terminated | truncated, reset",
    "train, reset rows stored: terminated, reset_rows=reset_rows -> terminated, reset_rows=reset_rows & False",
    "train, reset rows are steps: truncated, reset_rows=reset_rows -> truncated, reset_rows=reset_rows & False",
    "train, a random action too many: run.step < args.learning_starts -> run.step <= args.learning_starts",
    "train, half of the range: rng.uniform(-1, 1, -> rng.uniform(0, 1,",
    "train, noise goes on in the next episode: next_noise(noise, reset_rows, -> next_noise(noise, reset_rows & False,",
    "train, noise outlives a restart: noise = np.zeros(noise.shape) -> 0",
    "train, sums of rewards outlive a restart: discounted = np.zeros(args.num_envs)\n    return -> 0\n    return",
    "train, sums of rewards outlive an end: discounted) * ~reset_rows -> discounted)",
    "train, sums of resets counted: discounted[~reset_rows] -> discounted",
    "ActorCritic.observe_batch, rewards as they are: rewards=rewards -> rewards=batch.rewards",
    "train, statistics of what comes next: update_statistics(obs[ -> update_statistics(next_obs[",
    "train, reset rows counted in the statistics: obs[~reset_rows], -> obs,",
    "train, seen before acting: actions = agent -> agent.update_statistics(obs, rewards); actions = agent",
)
def test_training(script):
    """Every weight, figure and return is that of tests/reference/ddpg_td3.py, whatever the options; also where
    environments reuse their arrays, and with episodes that begin anew at checkpoints.
    """
    for number, options in enumerate(TRAININGS):
        figures, networks, returns = slow_training(number)
        run = tools.rehearse_drift(script, **COMMON | options)
        close(run.episodes["return"], returns)
        assert set(run.all_logged) == set(figures) and len(figures["critic_loss"]) > 10
        for name in figures:
            close(run.all_logged[name], figures[name], atol=1e-3)
        agent = run.agent
        for ours, slow in zip((agent.actor, agent.critics, agent.target_actor, agent.target_critics), networks):
            close(flat(ours), slow, atol=1e-3)


@catches(
    "ActorCritic.__init__, one CNN for all: self.target_actor = -> "
    "self.actor.encoder = self.critics[0].encoder\n        self.target_actor =",
)
@pytest.mark.parametrize("shape", [(36, 40, 3), (2, 36, 40)])
def test_images_have_a_cnn_for_each_network(script, shape):
    """Whether channels come first or last."""
    tools.check_cnns(script, shape)


@catches(
    "train, critics in eval mode: make_agent(args, envs).train() -> make_agent(args, envs)",
    "train, plays in train mode: agent.actor.eval() -> 0",
    "update_actor, plays in train mode afterwards: agent.actor.eval() -> 0",
    "update_actor, in eval mode: agent.actor.train() -> 0",
)
def test_dropout_would_belong_to_the_losses(script):
    """What an agent acts with is in eval mode."""
    tools.check_modes(script)


@catches(
    "ActorCritic.act, one observation is taken for a batch: if obs.shape[1:] != self.observation_shape -> if False",
    "make_box_agent, the largest number is a bound: > 1e30 -> == np.inf",
)
def test_odd_worlds(script):
    """What Gymnasium takes is taken; what cannot be is refused."""
    tools.check_odd_worlds(script)


def test_processes_change_nothing(script, tmp_path, monkeypatch):
    """Environments in processes of their own give the same numbers."""
    contents = []
    for number, flag in enumerate(("", "--async-envs")):
        monkeypatch.chdir((tmp_path / str(number)).mkdir() or tmp_path / str(number))
        assert command(script, f"{RUN} --total-timesteps 40 --no-progress --run-dir run {flag}") == 0
        contents.append(content(script))
    assert contents[0] == contents[1]


# -------------------------------------------------------------------------------- worlds whose right answer is known


WORLD = {"hidden_sizes": (32, 32), "batch_size": 32, "learning_starts": 100, "buffer_size": 3_000, "gamma": 0.5}
WORLD |= {"tau": 0.02, "actor_learning_rate": 3e-3, "critic_learning_rate": 3e-3, "exploration_noise": 0.3}


@pytest.mark.parametrize("algorithm", ["td3", pytest.param("ddpg", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("end", "value"), [("t", 1.0), pytest.param("c", 2.0, marks=pytest.mark.slow)])
def test_small_worlds_are_learnt(script, algorithm, end, value):
    """The right action is half of what is shown, and then Q = 1; cut off, the future counts: 1 / (1 - 0.5) = 2.

    The first run ends with an evaluation; no 100 episodes with noise would reach this return.
    """
    until = {"eval_every": 100, "eval_episodes": 20, "total_timesteps": 1500}
    until |= {"stop_at_return": 0.98} if end == "t" else {}
    run = rehearse(script, lambda: Aim(end), **WORLD | until | script.ALGORITHMS[algorithm])
    assert run.evaluations["return_mean"][-1] >= 0.98 and (run.step < 1500) == (end == "t")
    close(run.agent.act(np.array([[-1.0], [1.0]])), [[-0.5], [0.5]], 0.2)
    assert len(run.agent.critics) == (2 if algorithm == "td3" else 1)
    obs = torch.tensor([[1.0], [-1.0]])
    close(run.agent.critics[0](obs, run.agent.actor(obs)), [value] * 2, 0.4)


# ------------------------------------------------------------------------------------------------------- whole runs

RUN = "--env-id Pendulum-v1 --num-envs 2 --hidden-sizes 8 --batch-size 16 --learning-starts 20 --buffer-size 60 "
RUN += "--max-episode-steps 10 --total-timesteps 80 --checkpoint-every 25 --eval-every 50 --eval-episodes 2 "
RUN += "--normalize-obs --normalize-reward --anneal-lr --noise ou"


@catches(
    "train, updates numbered anew: updates = num_updates(run.step, args) -> updates = 0",
    "train, an optimiser is not saved: **optimizers -> actor_optimizer=actor_optimizer",
)
def test_killed_resumed_evaluated(script, tmp_path, monkeypatch, capsys):
    """A resumed run ends as an unbroken one, bit for bit; --evaluate changes nothing."""
    kill_and_resume(script, RUN, 37, monkeypatch, tmp_path)
    check_evaluation(script, capsys)
    assert command(script, "--resume run --total-timesteps 999") == 2  # the schedule has ended
    assert "total_timesteps" in capsys.readouterr().err


@catches(
    "make_td3_or_ddpg, never refused: named and all( -> named and not any(",
    "make_td3_or_ddpg, mixtures refused: != value -> != None",
    "make_td3_or_ddpg, flags refused: if args.config and named -> if named",
)
def test_config_of_the_other_algorithm(script, tmp_path, monkeypatch, capsys):
    """It has TD3's three settings, which --algorithm ddpg does not change: refused, unless one is given as well."""
    monkeypatch.chdir(tmp_path)
    assert command(script, f"{RUN} --run-dir run") == 0
    assert command(script, "--config run --algorithm ddpg") == 2
    assert "give target_noise, twin_q, policy_frequency as well" in capsys.readouterr().err
    assert command(script, "--config run --algorithm ddpg --no-twin-q --run-dir other --no-progress") == 0
    td3s_tricks = "--algorithm ddpg --twin-q --target-noise 0.1 --policy-frequency 2"
    assert command(script, f"{RUN} {td3s_tricks} --run-dir mixed") == 0


@catches(
    "tuned_settings, what is tuned wins: TUNED.get(args.env_id, {}) | ALGORITHMS[args.algorithm] -> "
    "ALGORITHMS[args.algorithm] | TUNED.get(args.env_id, {})",
)
def test_algorithm_sets_three_flags_and_what_is_given_wins(script, monkeypatch):
    """TD3 is DDPG plus three settings, which can be mixed; TUNED may have a mixture of its own."""
    mixture = {"target_noise": 0.2, "twin_q": False, "policy_frequency": 1}
    monkeypatch.setitem(script.TUNED, "LunarLanderContinuous-v3", mixture)

    def tuned(**given):
        args = script.tuned(**given)
        return args.target_noise, args.twin_q, args.policy_frequency

    td3, ddpg = (0.2, True, 2), (0.0, False, 1)
    lander = {"env_id": "LunarLanderContinuous-v3"}
    assert tuned() == tuned(algorithm="td3") == tuned(env_id="Acrobot-v1") == tuned(**lander, algorithm="td3") == td3
    assert tuned(algorithm="ddpg") == tuned(algorithm="ddpg", env_id="Acrobot-v1") == ddpg
    assert tuned(**lander) == (0.2, False, 1) and tuned(**lander, algorithm="ddpg") == ddpg
    assert tuned(**lander, policy_frequency=3) == (0.2, False, 3)
    assert tuned(algorithm="ddpg", twin_q=True) == (0.0, True, 1)
    assert tuned(target_noise=0.0) == (0.0, True, 2)


def test_refused(script, tmp_path, monkeypatch, capsys):
    refused = {"env-id CartPole-v1": "Box actions of floats, bounded", "buffer-size 10": "batch_size"}
    refused |= {"buffer-size 1e14": "GiB", "wrappers gymnasium.wrappers.NormalizeReward": "--normalize-reward"}
    refused = {f"--total-timesteps 1 --max-episode-steps 1 --{flags}": words for flags, words in refused.items()}
    check_refused(script, refused, tmp_path, monkeypatch, capsys)
    assert 2 * 96 * 96 * 3 * script.tuned(env_id="CarRacing-v3").buffer_size < 8e9  # it fits into 16 GiB
    images = mock.Mock(single_observation_space=spaces.Box(0, 255, (36, 36, 3), np.uint8), single_action_space=BOX)
    with pytest.raises(script.UserError, match="normalize_obs"):
        script.make_agent(script.Args(normalize_obs=True), images)
