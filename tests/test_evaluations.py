"""Which weights an evaluation leaves in models/, in ppo.py; the run section is the same in all scripts."""

from unittest import mock

from run_folder import command
from tools import catches

SCRIPT = "ppo"
RUN = (
    "--num-envs 2 --num-steps 8 --num-minibatches 2 --hidden-sizes 8 --total-timesteps 64 --eval-every 16 --no-progress"
)


@catches(
    "Run.write_evaluation, the worst is best: mean >= max -> mean <= min",
    "Run.write_evaluation, the last is best: if is_best else -> if True else",
    "Run.write_evaluation, of two equals the first: mean >= max -> mean > max",
    "Run.write_evaluation, best.pt is not the step's: partial(write_state, weights) -> partial(write_state, "
    "weights if name == self.step else {'agent': {k: 0 * v for k, v in weights['agent'].items()}})",
)
def test_best_weights(script, tmp_path, monkeypatch):
    """Evaluations return 1, 3, 3 and 2: best.pt has the weights of the third, which no other step has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script.Run, "draw_curve", lambda run: None)
    with mock.patch.object(script, "evaluate", side_effect=[(1.0, 0.0), (3.0, 0.0), (3.0, 0.0), (2.0, 0.0)]):
        assert command(script, f"{RUN} --run-dir run") == 0
    weights = {path.stem: script.read_state(path)["agent"] for path in (tmp_path / "run/models").iterdir()}
    best = weights.pop("best", None)
    third = sorted(weights, key=int)[2]
    same = lambda state: best and all(value.equal(best[name]) for name, value in state.items())
    assert len(weights) == 4 and [step for step, state in weights.items() if same(state)] == [third]
