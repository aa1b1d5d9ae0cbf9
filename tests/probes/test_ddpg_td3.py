"""ddpg_td3.py in environments of a step or a few, whose right answer is known."""

from unittest import mock

import numpy as np
import pytest
import run_envs
import torch
from gymnasium import spaces

from tests.probes.td3_envs import Aim, Later, Push, play
from tests.tools import close

slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Images are learnt on all cores: here they would fight over small matrices with other tests."""
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)


@pytest.mark.parametrize("algorithm", ["td3", pytest.param("ddpg", marks=slow)])
def test_policy_and_values_of_one_step_episodes(script, algorithm):
    """The right action is half the target, and then Q = 1. Fails if the actor does not follow the critic uphill."""
    settings = script.ALGORITHMS[algorithm] | {"exploration_noise": 0.3}
    agent = play(script, Aim, total_timesteps=600, **settings).agent
    close(agent.act(np.array([[-1.0], [1.0]])), [[-0.5], [0.5]], 0.15)
    assert len(agent.critics) == (2 if algorithm == "td3" else 1)
    for critic in agent.critics:
        close(critic(torch.tensor([[1.0], [1.0]]), torch.tensor([[0.5], [-0.5]])), [1.0, 0.0], 0.2)


@slow
@pytest.mark.parametrize(("end", "value"), [("terminated", 1.0), ("truncated", 2.0)])
def test_value_of_a_truncated_episode_goes_on(script, end, value):
    """Every step pays 1 at best; gamma = 0.5. Terminated, Q = 1. Truncated, the future is worth Q as well: 2."""
    agent = play(script, lambda: Aim(end), total_timesteps=600, exploration_noise=0.2).agent
    obs = torch.tensor([[1.0], [-1.0]])
    close(agent.critics[0](obs, agent.actor(obs)).mean(), value, 0.25)


@slow
def test_credit_for_an_earlier_action(script):
    """The first action (right: 0, in bounds of -1 and 3) is rewarded a step later. Fails if values do not go back."""
    run = play(script, Later, gamma=0.9, total_timesteps=2500, exploration_noise=0.2, eval_episodes=20)
    assert run.evaluations[-1][2] > 0.97
    agent = run.agent
    close(agent.act(np.zeros((1, 2))), [[0.0]], 0.2)
    close(agent.critics[0](torch.zeros(1, 2), agent.actor(torch.zeros(1, 2))), [0.9], 0.15)


def match(observation="vector"):
    """Makes a Match, in which random actions get about 0.5, the best ones 1; its actions have unequal bounds."""
    return lambda: run_envs.Match("box", observation)


def score(script, maker, **settings):
    """(mean return of the evaluation, all losses) after 1,000 steps."""
    given = {"total_timesteps": 1000, "exploration_noise": 0.3, "eval_episodes": 20}
    run = play(script, maker, **given | settings)
    assert max(total for _, total in run.episodes) <= 1 + 1e-6  # true returns are reported, also of normalised rewards
    return run.evaluations[-1][2], run.figures["critic_loss"]


OPTIONS = {
    "normalised, four environments": {"normalize_obs": True, "normalize_reward": True, "num_envs": 4},
    "default": {},
    "bfloat16": {"bf16": True},
    "ddpg": {"twin_q": False, "target_noise": 0.0, "policy_frequency": 1},
    "two lines": {"target_noise": 0.0},
    "no delay": {"policy_frequency": 1},
    "one critic": {"twin_q": False},
    "Ornstein-Uhlenbeck": {"noise": "ou"},
    "normalised observations": {"normalize_obs": True},
    "normalised rewards": {"normalize_reward": True},
    "short gradients": {"max_grad_norm": 0.01},
    "learning rates annealed": {"anneal_lr": True},
    "four environments": {"num_envs": 4},
    "every other step, twice": {"train_frequency": 2, "gradient_steps": 2},
    "critic's own sizes": {"critic_hidden_sizes": (48,)},
    "small buffer": {"buffer_size": 400},
}
losses = {}


@slow
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_learns(script, option):
    """Fails if an option keeps Match from being learnt, or changes nothing at all."""
    mean, losses[option] = score(script, match(), **OPTIONS[option])
    assert mean > 0.75
    assert all(losses[option] != losses[other] for other in losses if other != option)


@slow
def test_images_learn(script):
    """Fails if images do not reach the networks, or a CNN gets no gradient."""
    few = {"actor_learning_rate": 1e-4, "critic_learning_rate": 1e-3, "hidden_sizes": (64,), "batch_size": 32}
    assert score(script, match("channels_last"), **few | {"total_timesteps": 900, "buffer_size": 900})[0] > 0.75


@slow
def test_lasting_noise_finds_what_white_noise_does_not(script):
    """Push pays 3 for going one way for long; else, every action costs. Fails if --noise ou is no better than white."""
    found = {}
    for noise in ("ou", "gaussian"):
        run = play(script, Push, noise=noise, exploration_noise=0.4, gamma=0.95, total_timesteps=2000)
        found[noise] = run.evaluations[-1][2]
    assert found["ou"] > 1 and found["gaussian"] < 0.1


def test_stopping_waits_for_an_evaluation(script):
    """Fails if training episodes, which explore, decide; or if the run goes on after an evaluation that is enough."""
    options = {"eval_every": 200, "eval_episodes": 20, "stop_at_return": 0.8, "total_timesteps": 20_000}
    run = play(script, match(), exploration_noise=0.3, **options)
    assert [mean >= 0.8 for _, _, mean, _ in run.evaluations] == [False] * (len(run.evaluations) - 1) + [True]
    assert run.step == run.evaluations[-1][0] < 3000


@pytest.mark.parametrize(
    "obs_space, action_space, words",
    [
        (spaces.Box(-1, 1, (2,)), spaces.Discrete(2), "dqn.py or ppo.py"),
        (spaces.Box(-1, 1, (2,)), spaces.MultiBinary(2), "ppo.py"),
        (
            spaces.Box(-1, 1, (2,)),
            spaces.Box(np.array([-1, -np.inf]), np.array([1, np.inf]), dtype=np.float64),
            "bounded",
        ),
        (spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (0,)), "Box actions"),
        (spaces.Box(-1, 1, (0,)), spaces.Box(-1, 1, (2,)), "vectors, or images"),
        (spaces.Box(0, 255, (30, 40, 3), np.uint8), spaces.Box(-1, 1, (2,)), "vectors, or images"),
    ],
)
def test_spaces_that_cannot_be_learnt(script, obs_space, action_space, words):
    """Fails if a space is taken that the networks cannot handle, or if the line does not say what would do."""
    envs = type("Envs", (), {"single_observation_space": obs_space, "single_action_space": action_space})
    with pytest.raises(script.UserError, match=words):
        script.make_agent(script.Args(), envs)


def three(args):
    return args.algorithm, args.target_noise, args.twin_q, args.policy_frequency


def test_algorithm_sets_three_flags_and_what_is_given_wins(script):
    """Fails if TD3 is not DDPG plus three settings, or if they cannot be mixed."""
    tuned = lambda **given: three(script.tuned(**given))
    td3, ddpg = ("td3", 0.2, True, 2), ("ddpg", 0.0, False, 1)
    assert tuned() == tuned(algorithm="td3") == tuned(algorithm="td3", env_id="Acrobot-v1") == td3
    assert tuned(env_id="Acrobot-v1") == (None, *td3[1:])
    assert tuned(algorithm="ddpg") == tuned(algorithm="ddpg", env_id="Acrobot-v1") == ddpg
    lander = {"env_id": "LunarLanderContinuous-v3"}  # tuned: DDPG with noise on the target's actions
    assert tuned(**lander) == tuned(**lander, algorithm="ddpg") == ("ddpg", 0.2, False, 1)
    assert tuned(**lander, algorithm="td3") == td3
    assert tuned(**lander, policy_frequency=3) == ("ddpg", 0.2, False, 3)
    assert tuned(algorithm="ddpg", twin_q=True) == ("ddpg", 0.0, True, 1)
    assert tuned(target_noise=0.0) == ("td3", 0.0, True, 2)
    with mock.patch.dict(script.TUNED, {"Acrobot-v1": {"algorithm": "ddpg", "target_noise": 0.1}}):
        assert tuned(env_id="Acrobot-v1") == ("ddpg", 0.1, False, 1)
        assert tuned(env_id="Acrobot-v1", algorithm="td3") == td3
    others = [vars(script.tuned(algorithm=name)) for name in ("td3", "ddpg")]
    differing = [name for name in others[0] if others[0][name] != others[1][name]]
    assert differing == ["algorithm", "target_noise", "twin_q", "policy_frequency"]


def test_an_algorithm_that_the_settings_contradict(script):
    """Fails if Args(algorithm="ddpg"), or --config of the one beside --algorithm of the other, is taken."""
    for args in (script.Args(algorithm="ddpg"), script.Args(algorithm="td3", **script.ALGORITHMS["ddpg"])):
        trained = mock.patch.object(script, "make_envs", side_effect=AssertionError("it was taken"))
        with trained, pytest.raises(script.UserError, match="algorithm is .* give --target_noise"):
            script.train(args)
    for args in (script.Args(), script.Args(algorithm="ddpg", twin_q=False), script.tuned(algorithm="ddpg")):
        script.check_algorithm(args)
