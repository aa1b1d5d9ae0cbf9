"""es.py in environments whose right answer is known, with each option that changes how it learns."""

from unittest import mock

import numpy as np
import pytest
import torch

from tests.probes import population_envs  # noqa: F401  (registers its environments)
from tests.tools import close

TARGET = dict(env_id="Target-v0", hidden_sizes=(), population_size=16, num_generations=80)


def learn(script, **settings):
    """Train without a folder. Returns the Run."""

    class Rehearsal(script.Run):
        open_folder = write_row = write_checkpoint = draw_curve = lambda self: None
        finish = lambda self: self

        def write_evaluation(self):
            mean, std = script.evaluate(self.agent, self.args, self.args.eval_episodes)
            self.evaluations.append((self.step, self.seconds, mean, std))

    quiet = dict(progress=False, eval_every=10**9, eval_episodes=1)
    with mock.patch.object(script, "Run", Rehearsal):
        return script.train(script.Args(**quiet | settings))


OPTIONS = [
    dict(),
    dict(fitness="raw", optimizer="ascent", learning_rate=0.1),
    dict(fitness="standardized", elite=0.5, optimizer="ascent"),
    dict(ars=True, top_directions=4),
    dict(action_noise=0.05, episodes_per_candidate=3),
    dict(env_kwargs='{"bounds": 2}', hidden_sizes=(8,), normalize_obs=True),
]
MORE_OPTIONS = [
    dict(fitness="standardized"),
    dict(fitness="raw"),
    dict(elite=0.25),
    dict(ars=True),
    dict(episodes_per_candidate=2),
    dict(hidden_sizes=(8,)),
    dict(env_kwargs='{"bounds": 2}'),
    dict(normalize_obs=True),
    dict(weight_decay=0.001),
]


@pytest.mark.parametrize(
    "given",
    [*OPTIONS, *(pytest.param(given, marks=pytest.mark.slow) for given in MORE_OPTIONS)],
    ids=lambda given: ", ".join(f"{k} {v}" for k, v in given.items()) or "default",
)
def test_every_option_learns(script, given):
    """The policy has to output (0.5, -0.25): from 0, which costs 0.31, to less than a tenth of that."""
    if "ars" in given:
        given = script.ARS | given | {"num_generations": 200}
    run = learn(script, **TARGET | given)
    assert run.evaluations[-1][2] > -0.03
    assert run.generation() == run.args.num_generations
    assert run.step == 16 * run.args.num_generations * run.args.episodes_per_candidate


def test_weight_decay_keeps_parameters_small(script):
    """The slope 2 (target - bias) meets the decay 0.5 bias: bias = 2 target / 2.5."""
    run = learn(script, **TARGET, weight_decay=0.5, optimizer="ascent", fitness="raw")
    close(run.agent.theta[-2:], np.array([0.5, -0.25]) * 2 / 2.5, atol=0.05)


def test_all_candidates_of_a_generation_see_by_the_same_numbers(script):
    """Fails if observations change the statistics before the generation is over: then pairs would not be compared."""
    seen = []
    normalize = script.ObservationStats.normalize
    with mock.patch.object(
        script.ObservationStats, "normalize", lambda self, x: seen.append(self.sums.clone()) or normalize(self, x)
    ):
        run = learn(script, env_id="Patience-v0", population_size=4, num_generations=2, normalize_obs=True)
    assert len({tuple(sums.flatten().tolist()) for sums in seen}) == 3  # of each generation, and of the evaluation
    steps = run.agent.obs_stats.sums[0]
    assert torch.equal(steps, torch.full((2,), float(run.step), dtype=torch.float64))


def test_whichever_comes_first_ends_the_run(script):
    """Fails if the steps of finished candidates are counted, or one of the two limits is not. Here four candidates
    take three steps each; the step total of 25 is reached in the third generation."""
    plain = dict(env_id="Constant-v0", population_size=4)
    assert learn(script, **plain, num_generations=2, total_timesteps=10**6).step == 2 * 12
    assert learn(script, **plain, num_generations=9, total_timesteps=25).step == 3 * 12


def test_stop_at_return(script):
    """Fails if a run goes on after an evaluation that was good enough, or stops because candidates were."""
    plain = dict(env_id="Constant-v0", population_size=4, total_timesteps=10**6)
    run = learn(script, **plain | dict(eval_every=50, stop_at_return=6.0))
    assert run.step == 60 and [step for step, *_ in run.evaluations] == [60]


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [dict(total_timesteps=400_000), dict(ars=True), dict(hidden_sizes=(), normalize_obs=True, total_timesteps=800_000)],
    ids=["tuned", "ars", "linear"],
)
def test_cartpole_is_solved(script, given):
    """Fails if what is right in small is not in large."""
    if "ars" in given:
        given = script.ARS | {"total_timesteps": 400_000}
    assert learn(script, **given | {"eval_episodes": 20}).evaluations[-1][2] > 475
