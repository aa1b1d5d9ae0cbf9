"""What a clipped error does to Q: two networks learn from the same steps, and differ in one line.

    python benchmarks/clipped_error.py      # a few minutes

Random actions fill a buffer with steps of CartPole-v1: a pole that falls after 20 steps or so. Two equal networks then
learn from the same batches, in the same order, with dqn.py's loss and copies to a target network. One of them has
--clip-error. Writes benchmarks/results/clipped_error.json and .png: mean Q beside its bound 1 / (1 - gamma).
"""

import copy
import json
import sys

import numpy as np
import torch
from common import RESULTS, ROOT, stamp

sys.path.insert(0, str(ROOT))
import dqn  # noqa: E402

STEPS, UPDATES, PERIOD, GAMMA = 20_000, 5_000, 50, 0.95
ARGS = dqn.Args(gamma=GAMMA, num_envs=10, learning_rate=2.5e-4)


def play(seed):
    """A buffer with STEPS random steps."""
    envs, rng = dqn.make_envs(ARGS, ARGS.num_envs), np.random.default_rng(seed)
    buffer = dqn.ReplayBuffer(STEPS, envs.single_observation_space, envs.single_action_space)
    obs, _ = envs.reset(seed=seed)
    reset_rows = np.zeros(ARGS.num_envs, bool)
    while buffer.size < STEPS:
        actions = rng.integers(2, size=ARGS.num_envs)
        next_obs, rewards, terminated, truncated, _ = envs.step(actions)
        buffer.add(obs, actions[:, None], rewards, next_obs, terminated, reset_rows)
        obs, reset_rows = next_obs.copy(), terminated | truncated
    return envs, buffer


def learn(envs, buffer, seed, clip_error):
    """Mean Q, over PERIOD updates each."""
    args = dqn.replace(ARGS, seed=seed, clip_error=clip_error)
    agent = dqn.make_agent(args, envs)
    target, rng, means = copy.deepcopy(agent), np.random.default_rng(seed), []
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    for _ in range(UPDATES // PERIOD):
        total = 0
        for _ in range(PERIOD):
            loss, q = dqn.dqn_loss(agent, target, buffer.sample(args.batch_size, rng), args)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += q
        dqn.polyak(target, agent, 1.0)
        means.append(round(float(total) / PERIOD, 3))
    return means


def main():
    """Three seeds of both, and the picture."""
    from matplotlib.figure import Figure

    report = stamp("dqn.py") | {"bound": 1 / (1 - GAMMA), "period": PERIOD, "squared": [], "clipped": []}
    for seed in (1, 2, 3):
        envs, buffer = play(seed)
        report.setdefault("terminated", []).append(round(float(buffer.terminated.mean()), 4))
        for name in ("squared", "clipped"):
            report[name].append(learn(envs, buffer, seed, name == "clipped"))
            print(f"seed {seed}, {name}: mean Q {report[name][-1][-1]}, at most {max(report[name][-1])}", flush=True)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for color, name in enumerate(("squared", "clipped")):
        for curve in report[name]:
            axes.plot(PERIOD * np.arange(1, len(curve) + 1), curve, color=f"C{color}", label=name)
            name = None  # one entry of the legend for all seeds
    axes.axhline(report["bound"], linestyle="--", color="gray", label="bound 1 / (1 - γ)")
    axes.set(title="the same steps, the same batches, another loss", xlabel="gradient steps", ylabel="mean Q")
    axes.set_yscale("log")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(RESULTS / "clipped_error.png", dpi=100)
    (RESULTS / "clipped_error.json").write_text(json.dumps(report) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
