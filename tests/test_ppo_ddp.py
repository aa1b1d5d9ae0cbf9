"""What ppo_ddp.py adds to ppo.py: a lesson by hand, then many processes against ppo.py itself, then kills.

Most tests let threads stand for processes, since threads start at once and can train with a known mistake. What
ppo_ddp.py shares with ppo.py is the same text (test_shared_code.py) and is tested in test_ppo.py.
"""

import copy
import os
import re
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from tools import Chance, catches, close, flat, rehearse, vector_env

import ppo
from exercises.processes import Threads

# ------------------------------------------------------------------------------------------------- a lesson, by hand


@catches(
    "average, mean of means: sums = rows * torch -> sums = torch",
    "average, a process without rows counts: if rows == 0 -> if False",
)
def test_weighted_mean(script):
    """
    process  rows        mean
    0        1, 2, 3     2
    1        6           6
    2        none        NaN

    All rows: (3 * 2 + 1 * 6) / (3 + 1) = 3. The mean of the means, (2 + 6) / 2 = 4, is that of no rows.
    """
    rows = [[1.0, 2.0, 3.0], [6.0], []]

    def work(rank):
        own = torch.tensor(rows[rank])
        means = [own.mean(), torch.stack([own.mean(), -own.mean()])]
        script.average(means, len(own))
        return means

    for mean, pair in Threads(3).run(script, work):
        close(mean, 3)
        close(pair, [3, -3])


@catches(
    "normalize_over_all, moments of one process only: add_up(sums) -> pass",
    "normalize_over_all, mean of one process only: sums[1] / sums[0] -> x.mean()",
)
def test_advantages(script):
    """Process 0 has the advantages 1 and 3, process 1 has 5, 7 and 9: their mean is 5, their variance
    (16 + 4 + 0 + 4 + 16) / 5 = 8, their deviation 2.8284. So 1 becomes (1 - 5) / 2.8284 = -1.4142.
    """
    rows = [[1.0, 3.0], [5.0, 7.0, 9.0]]
    parts = Threads(2).run(script, lambda rank: script.normalize(torch.tensor(rows[rank])))
    close(torch.cat(parts), [-1.4142, -0.7071, 0, 0.7071, 1.4142], atol=1e-4)


@catches(
    "RunningMeanStdOfAll, statistics of one process only: np.concatenate(exchange(rows)) -> rows",
)
def test_statistics(script):
    """The rows 1, 3 of one process and 5 of the other: mean 3, variance (4 + 0 + 4) / 3 = 2.6667, in both."""
    rows = [np.array([1.0, 3.0]), np.array([5.0])]

    def work(rank):
        stats = script.RunningMeanStd()
        stats.update(rows[rank])
        return [stats.mean.item(), stats.var.item(), stats.count.item()]

    for stats in Threads(2).run(script, work):
        close(stats, [3, 8 / 3, 3])


# --------------------------------------------------------------------------------------- equality with one process


class Lines(torch.nn.Module):
    """A network in float64: linear log-probabilities and values of three numbers."""

    def __init__(self):
        super().__init__()
        self.heads = torch.nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, obs, actions):
        log_probs, values = self.heads(obs).T
        return log_probs, log_probs**2, values


@catches(
    "average, mean of means: sums = rows * torch -> sums = torch",
    "normalize_over_all, moments of one process only: add_up(sums) -> pass",
)
def test_gradient_in_float64(script):
    """However 40 rows are divided, gradient and metrics of an update are those of ppo.py on all rows to 1e-12."""
    args = ppo.Args(clip_vloss=True)
    rng = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=rng)
    batch = ppo.Batch(draw(40, 3), draw(40, 1), *(draw(40) / 2 for _ in range(2)), draw(40), draw(40))
    torch.manual_seed(2)
    first = Lines()

    def update(script, rank, sizes):
        agent = copy.deepcopy(first)
        own = ppo.Batch(*[field.split(sizes)[rank] for field in batch])
        loss, metrics = script.ppo_loss(agent, own, args)
        loss.backward()
        gradients = [p.grad for p in agent.parameters()]
        del metrics["clip_fraction"]  # in float32
        if script is not ppo:
            script.average([*gradients, *metrics.values()], len(own.obs))
        return torch.cat([*(x.flatten() for x in gradients), torch.stack([*metrics.values()])])

    alone = update(ppo, 0, [40])
    for sizes in ([40], [9, 31], [40, 0], [7, 20, 0, 13]):
        for together in Threads(len(sizes)).run(script, lambda rank: update(script, rank, sizes)):
            assert (together - alone).abs().max() < 1e-12


def quiet_run(script):
    """A class for script.Run: as of `rehearse`, which works in one thread only."""

    class Quiet(script.Run):
        draw_curve = check_alone = lambda run: None
        finish = lambda run: run

        def __init__(self, *given):
            super().__init__(*given)
            self.all_logged = {}

        def log(self, **metrics):
            super().log(**metrics)
            for name, value in metrics.items():
                self.all_logged.setdefault(name, []).append(float(value))

    return Quiet


def train_together(script, processes, args):
    """The runs of that many processes in Chance."""

    def work(rank):
        if rank > 0:
            script.exchange("waiting")  # as in join_processes
        return script.train(args)

    replaced = {"Run": quiet_run(script), "write_file": lambda path, write: None}
    replaced["make_envs"] = lambda args, num_envs, *_: vector_env([Chance], num_envs)
    no_git = mock.patch.object(script.subprocess, "run")
    with mock.patch.multiple(script, **replaced), no_git, mock.patch.dict(os.environ, LOCAL_RANK="0"):
        return Threads(processes).run(script, work)


def train_alone(processes, **settings):
    """The run of ppo.py that plays and shuffles as that many processes would: their seeds, noise and minibatches."""

    def new_envs(run):
        N, step = run.envs.num_envs, run.step
        rngs = [np.random.default_rng([run.args.seed + 1_000_000 * k, step]) for k in range(processes)]
        envs, _, dones, _ = original(run)
        seeds = [int(rng.integers(2**31)) for rng in rngs]
        _ = [rng.integers(2**31) for rng in rngs]  # torch's seeds
        obs, _ = envs.reset(seed=[seed + n for seed in seeds for n in range(N // processes)])
        return envs, obs, dones, rngs

    def sample(agent, obs, rngs=None):
        if rngs is None:
            return draw(agent, obs)
        return np.concatenate([draw(agent, part, rng) for part, rng in zip(np.split(obs, processes), rngs)])

    def minibatches(buffer, number, rngs):
        parts = []
        for k, rng in enumerate(rngs):
            n = buffer.reset_rows.shape[1] // processes
            part = copy.copy(buffer)
            part.reset_rows = buffer.reset_rows[:, k * n : (k + 1) * n]
            part.rows = ppo.Batch(*[field[:, k * n : (k + 1) * n] for field in buffer.rows])
            parts.append(split(part, number, rng))
        return (ppo.Batch(*map(torch.cat, zip(*batches))) for batches in zip(*parts))

    original, draw, split = ppo.Run.new_envs, ppo.Agent.sample, ppo.RolloutBuffer.minibatches
    with (
        mock.patch.object(ppo.Run, "new_envs", new_envs),
        mock.patch.object(ppo.Agent, "sample", sample),
        mock.patch.object(ppo.RolloutBuffer, "minibatches", minibatches),
    ):
        return rehearse(ppo, Chance, **settings)


BASE = {"num_envs": 8, "num_steps": 25, "num_minibatches": 3, "update_epochs": 2, "total_timesteps": 400,
        "hidden_sizes": (8,), "anneal_lr": True}  # fmt: skip
ONE_UPDATE = {"num_minibatches": 1, "update_epochs": 1, "total_timesteps": 100}
CASES = {
    "2": (2, {}),
    "4": (4, {}),
    "2, one update": (2, ONE_UPDATE),
    "4, one update": (4, ONE_UPDATE),
    "vtrace": (2, {"estimator": "vtrace"}),
    "nothing normalised": (2, {"norm_adv": False, "normalize_obs": False, "normalize_reward": False}),
    "target_kl": (2, {"update_epochs": 12, "target_kl": 0.0005, "num_envs": 4, "total_timesteps": 100}),
    "checkpoints": (4, {"checkpoint_every": 100, "clip_vloss": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_as_one_process(script, name):
    """Whole runs of 2 and 4 processes are those of ppo.py on the same rows: after one update, weights to 1e-6; later
    ones, metrics and statistics nearly; steps and episodes exactly. All processes end with the same bits.
    """
    compare(script, name)


@catches(
    "train, KL of one process: average([*gradients, *metrics.values()] -> average([*gradients, metrics['loss']]",
    "train, gradients of one process: average([*gradients, * -> average([*",
    "divide_run, seeds alike in all processes: args.seed + 1_000_000 * rank -> args.seed",
    "share_of_this_process, weights differ at the start: // processes) -> // processes, seed=process()[0])",
    "RunningMeanStdOfAll, statistics of one process only: np.concatenate(exchange(rows)) -> rows",
    "normalize_over_all, moments of one process only: add_up(sums) -> pass",
    "average, mean of means: sums = rows * torch -> sums = torch",
    "explained_variance_of_all, of one process: exchange(played) -> [played]",
    "count_rollout, one process's steps: ~reset_rows[t] -> ~buffer.reset_rows[t]",
)
def test_target_kl(script):
    """The epochs end where KL over all rows says so, in all processes."""
    compare(script, "target_kl")


QUIET = {"progress": False, "eval_every": 10**9, "checkpoint_every": 10**9, "eval_episodes": 1, "run_dir": "none"}


@cache
def run_alone(name):
    """The run of ppo.py for a case."""
    processes, options = CASES[name]
    return train_alone(processes, **QUIET | {"env_id": "none"} | BASE | options)


def compare(script, name):
    """Train with so many processes, and with ppo.py."""
    processes, options = CASES[name]
    settings = QUIET | {"env_id": "none"} | BASE | options
    alone = run_alone(name)
    runs = train_together(script, processes, script.Args(**settings))
    first = runs[0]
    for run in runs:
        assert all(map(torch.equal, first.agent.state_dict().values(), run.agent.state_dict().values()))
        assert (run.step, run.num_episodes, run.episodes) == (alone.step, alone.num_episodes, alone.episodes)
    one = settings["num_minibatches"] == 1
    assert (flat(first.agent) - flat(alone.agent)).abs().max() < (1e-6 if one else 1e-4)
    for name, x in alone.agent.state_dict().items():
        if "stats" in name:
            np.testing.assert_allclose(first.agent.state_dict()[name], x, rtol=1e-9)
    assert len(first.all_logged["loss"]) == len(alone.all_logged["loss"])
    for name, values in alone.all_logged.items():
        np.testing.assert_allclose(first.all_logged[name], np.array(values, float), rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("options", [{}, {"estimator": "vtrace", "target_kl": 0.001}, {"checkpoint_every": 100}])
def test_alone(script, options):
    """Without torchrun, all numbers are those of ppo.py, to the last bit."""
    ours, theirs = (rehearse(module, Chance, **BASE | options) for module in (script, ppo))
    assert ours.metrics.keys() == theirs.metrics.keys() and len(ours.metrics["step"]) >= 2
    for name in ours.metrics.keys() - {"seconds"}:
        assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=0, abs=0, nan_ok=True)
    assert (ours.episodes, torch.equal(flat(ours.agent), flat(theirs.agent))) == (theirs.episodes, True)


@catches("share_of_this_process, some environments are lost: if args.num_envs % processes -> if False")
def test_refusal(script):
    """Eight environments do not divide among three processes."""

    def work(rank):
        try:
            script.share_of_this_process(script.Args(num_envs=8))
        except script.UserError as error:
            return str(error)

    assert Threads(3).run(script, work) == ["num_envs 8 is no multiple of the 3 processes"] * 3


@catches("add_up, waits or complains: end_with_the_others(error) -> raise")
def test_ends_with_the_others(script):
    """If another process has ended, this one fails as well: torchrun must not report success."""
    gone = mock.Mock(**{"all_reduce.side_effect": RuntimeError("closed")})
    end_now = mock.patch.object(script.os, "_exit", lambda code: sys.exit(code))
    with end_now, mock.patch.object(script, "distributed", gone), mock.patch.object(script.time, "sleep"):
        try:
            script.average([torch.ones(1)], 1)
        except BaseException as end:
            assert isinstance(end, SystemExit) and end.code == 1


# ------------------------------------------------------------------------------------------- processes, and their ends

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
RUN = "--env-id LunarLander-v3 --num-envs 4 --num-steps 100 --num-minibatches 4 --total-timesteps 6000 --no-progress "
RUN += "--checkpoint-every 900 --eval-every 1500 --eval-episodes 2 --run-dir run"


def torchrun(folder, flags, how="--standalone --nproc-per-node 2"):
    """Start processes in the folder."""
    command = [*TORCHRUN, *how.split(), str(ROOT / "ppo_ddp.py"), *flags.split()]
    options = {"cwd": folder, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": "."}, **options)


def children(process):
    """{rank: process number} of what a torchrun has started, as soon as all are there."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for(lambda: len(path.read_text().split()) >= 2)
    numbers = path.read_text().split()
    environments = {n: Path(f"/proc/{n}/environ").read_bytes() for n in numbers}
    found = {n: re.search(rb"\0RANK=(\d+)", b"\0" + text) for n, text in environments.items()}
    return {int(match[1]): int(n) for n, match in found.items() if match}


def runs(pid):
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=120):
    """Wait until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def metrics(folder):
    """The rows of metrics.csv, without times."""
    path = folder / "run/metrics.csv"
    lines = path.read_text().split("\n")[1:-1] if path.exists() else []
    return [[x for i, x in enumerate(line.split(",")) if i != 1] for line in lines]


def has_reached(folder, step):
    """Whether a row of metrics.csv comes after the step."""
    return bool(metrics(folder)) and int(metrics(folder)[-1][0]) > step


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks for processes in /proc")


@pytest.mark.slow
@needs_proc
def test_killed_and_resumed(tmp_path):
    """After kill -9 of all processes at two moments, the run ends as an unbroken one. Resumed with one process, it goes
    on, and says that this is another number.
    """
    for name in ("unbroken", "killed"):
        (tmp_path / name).mkdir()
    whole = torchrun(tmp_path / "unbroken", RUN)
    out, err = whole.communicate(timeout=300)
    assert whole.returncode == 0 and len(out.splitlines()) == 5, err
    folder, flags = tmp_path / "killed", RUN
    for moment in (1300, 3000):
        process = torchrun(folder, flags)
        wait_for(lambda: has_reached(folder, moment))
        pids = [*children(process).values(), process.pid]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
        wait_for(lambda: not any(map(runs, pids)))
        flags = "--resume run --no-progress"
    assert torchrun(folder, flags).wait(300) == 0
    assert metrics(folder) == metrics(tmp_path / "unbroken") != []
    states = [torch.load(tmp_path / name / "run/checkpoint.pt") for name in ("unbroken", "killed")]
    assert str(states[0]["agent"]) == str(states[1]["agent"])
    alone = torchrun(folder, "--resume run --no-progress --total-timesteps 6500 --no-anneal-lr", "--nproc-per-node 1")
    out, err = alone.communicate(timeout=300)
    assert "anneal_lr changes how a run learns" in err
    alone = torchrun(folder, "--resume run --no-progress", "--standalone --nproc-per-node 1")
    out, err = alone.communicate(timeout=300)
    assert alone.returncode == 0 and "begun by 2 processes" in out, err


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_all(rank, tmp_path):
    """Nobody waits for ever, and torchrun says who was killed."""
    process = torchrun(tmp_path, RUN.replace("6000", "600000"))
    wait_for(lambda: has_reached(tmp_path, 1300))
    pids = children(process)
    os.kill(pids[rank], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0 and "SIGKILL" in err and not any(map(runs, pids.values()))
    assert "Traceback" not in err.split("torch/distributed/elastic")[0], err


BAD = '''
import gymnasium as gym, torch
class Bad(gym.Wrapper):
    """After 150 steps, rewards in process {rank} are NaN."""
    steps = 0
    def step(self, action):
        obs, reward, *rest = self.env.step(action)
        self.steps += 1
        is_bad = self.steps > 150 and torch.distributed.get_rank() == {rank}
        return obs, float("nan") if is_bad else reward, *rest
'''


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_what_fails_in_one_ends_all(rank, tmp_path):
    """With one line on stderr from ppo_ddp.py; torchrun adds its own report."""
    (tmp_path / "bad.py").write_text(BAD.format(rank=rank))
    process = torchrun(tmp_path, f"{RUN} --wrappers bad.Bad")
    _, err = process.communicate(timeout=120)
    complaints = re.findall(r"^.*ppo_ddp\.py: .*", err, re.M)
    assert process.returncode != 0 and re.search(r"exitcode +: 2", err), err
    assert len(complaints) == 1 and "reward is NaN" in complaints[0], err


@pytest.mark.slow
def test_two_machines(tmp_path):
    """Two torchruns that find each other, as on two machines: the run of two processes of one torchrun."""
    short = RUN.replace("6000", "1500")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert torchrun(tmp_path / "one", short).wait(120) == 0
    how = "--nnodes 2 --nproc-per-node 1 --rdzv-id t --rdzv-backend c10d --rdzv-endpoint localhost:29517"
    machines = [torchrun(tmp_path / "two", short, how) for _ in range(2)]
    outs = [machine.communicate(timeout=200) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outs
    assert sorted(len(out.splitlines()) for out, _ in outs) == [0, 5]
    assert metrics(tmp_path / "two") == metrics(tmp_path / "one") != []
