"""Speed of es.py beside the plain loop, which asks one network per candidate and step, and beside the bare environment.

    python benchmarks/es_speed.py [--repeats 5]

CartPole-v1 with a population of 128, a linear policy and one of 64-64, on one thread; environment steps per second, in
which steps of finished candidates do not count. All three are timed in alternation within one process, generation by
generation, with noise and update, around a policy that balances (the linear one set by hand, 64-64 as trained) and with
so little noise that every candidate does: all slots are at work to the end. The rate of a whole run from scratch, in
whose early generations most slots soon stand idle, and which includes evaluations, files and the curve, is given beside
it. Last, the seconds from pressing Enter to the prompt's return, and the score (100 episodes), of five plain runs.
Writes benchmarks/results/es_speed.json and prints tables.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import es  # noqa: E402

POPULATION = 128
BALANCES = [0, 0, 0, 0, 0.1, 0.5, 1, 1, 0, 0]  # a linear policy: push right if 0.1 x + 0.5 x' + angle + angle' > 0


def plain_loop(agent, candidates, envs, obs):
    """What es.play_candidates does, with one forward pass per candidate and step: (returns, steps)."""
    inputs, *hidden_sizes, outputs = agent.sizes
    networks = [es.mlp(inputs, hidden_sizes, outputs, gain=1.0) for _ in candidates]
    for network, candidate in zip(networks, candidates):
        torch.nn.utils.vector_to_parameters(torch.from_numpy(candidate), network.parameters())
    returns, steps, playing = np.zeros(len(candidates)), 0, np.ones(len(candidates), bool)
    actions = np.zeros(len(candidates), np.int64)
    with torch.no_grad():
        while playing.any():
            for i in np.flatnonzero(playing):
                actions[i] = networks[i](torch.from_numpy(obs[i])).argmax().item()
            obs, rewards, terminated, truncated, _ = envs.step(actions)
            returns += rewards * playing
            steps += playing.sum()
            playing &= ~(terminated | truncated)
    return returns, steps


def generation(agent, slots, args, run, play):
    """Noise, play and update: (seconds, steps). The learning rate is 0, so that all generations are alike."""
    begun, first_step = time.perf_counter(), run.step
    noise_seeds, episode_seeds = es.draw_seeds(args, run.generation())
    noise = es.draw_noise(noise_seeds, len(agent.theta))
    if play == "batched":
        returns, _ = es.play_generation(agent, noise, episode_seeds, slots, args, run)
    else:
        candidates = es.make_candidates(agent.theta.numpy(), noise, args.sigma)
        returns, steps = plain_loop(agent, candidates, slots.envs, slots.begin_episode(episode_seeds[0]))
        run.step += int(steps)
    es.move_theta(agent, es.Adam([agent.theta], lr=args.learning_rate), returns, noise, args)
    run.played += 1
    return time.perf_counter() - begun, run.step - first_step


class Played:
    """What es.play_generation needs of a Run."""

    def __init__(self):
        self.step = 0
        self.played = 10**6

    def generation(self):
        """The number of the generation, from which its seeds are drawn."""
        return self.played

    def check_finite(self, **values):
        """As that of Run, which every step calls."""
        assert all(np.isfinite(value).all() for value in values.values())


def bare_rate(num_steps=5_000):
    """Steps per second of the native vector environment with given actions, rows that only reset not counted."""
    envs = gym.make_vec("CartPole-v1", POPULATION)
    envs.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 2, (num_steps, POPULATION))
    resets, begun = 0, time.perf_counter()
    for action in actions:
        _, _, terminated, truncated, _ = envs.step(action)
        resets += np.count_nonzero(terminated | truncated)
    return (num_steps * POPULATION - resets) / (time.perf_counter() - begun)


def from_the_prompt(seed):
    """(seconds, score) of `python es.py`, the start of the process and the evaluations included."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "es.py"), "--seed", str(seed), "--eval-episodes", "100"]
        begun = time.perf_counter()
        subprocess.run([*command, "--run-dir", folder], check=True, capture_output=True)
        seconds = time.perf_counter() - begun
        return round(seconds, 2), json.loads(Path(folder, "summary.json").read_text())["eval_return_mean"]


def rate(results):
    """Steps per second of several (seconds, steps)."""
    seconds, steps = zip(*results)
    return sum(steps) / sum(seconds)


def main():
    """Train, measure, print, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    report = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, one thread used",
        "versions": {name: version(name) for name in ("torch", "gymnasium", "numpy")},
        "steps_per_second": {},
    }
    print("| policy | batched | plain loop | bare environment | batched/plain (min) | batched/bare (min) | whole run |")
    print("|---|---|---|---|---|---|---|")
    for name, hidden_sizes in (("linear", ()), ("64-64", (64, 64))):
        with tempfile.TemporaryDirectory() as folder:
            args = es.tuned(hidden_sizes=hidden_sizes, population_size=POPULATION, progress=False, run_dir=folder)
            with open(os.devnull, "w") as quiet:
                sys.stdout, terminal = quiet, sys.stdout
                whole_run = es.train(args)["steps_per_second"]
                sys.stdout = terminal
            agent = es.load(folder, "last")
        if not hidden_sizes:
            agent.theta.copy_(torch.tensor(BALANCES))
        args.learning_rate, args.sigma = 0.0, 0.001
        slots, run = es.Slots(es.make_envs(args, POPULATION), args), Played()
        rates = {"batched": [], "plain loop": [], "bare environment": [], "whole run": [whole_run]}
        for _ in range(repeats):
            rates["bare environment"].append(bare_rate())
            rates["batched"].append(rate([generation(agent, slots, args, run, "batched") for _ in range(10)]))
            rates["plain loop"].append(rate([generation(agent, slots, args, run, "plain")]))
        report["steps_per_second"][name] = rates
        median = {kind: statistics.median(values) for kind, values in rates.items()}
        ratios = {}
        for kind in ("plain loop", "bare environment"):
            pairwise = [ours / other for ours, other in zip(rates["batched"], rates[kind])]
            ratios[kind] = f"{statistics.median(pairwise):.2f} ({min(pairwise):.2f})"
        print(
            f"| {name} | {median['batched']:,.0f} | {median['plain loop']:,.0f} | {median['bare environment']:,.0f} | "
            f"{ratios['plain loop']} | {ratios['bare environment']} | {whole_run:,.0f} |"
        )
    report["from_the_prompt"] = [from_the_prompt(seed) for seed in range(1, 6)]
    print("\nseconds from Enter to the end, and score:", *report["from_the_prompt"])
    path = Path(__file__).parent / "results" / "es_speed.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
