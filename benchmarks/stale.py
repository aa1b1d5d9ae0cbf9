"""Actors that lag behind the learner, the case that V-trace was made for: GAE, V-trace and plain returns side by side.

    python benchmarks/stale.py [--seeds 1 2 3] [--env-ids CartPole-v1]

The policy that collects a rollout, pi_old, is that of four updates ago; everything else, settings included, is that of
ppo.py. V-trace also corrects the critic's targets from pi_old to the present policy. "moved" is V-trace with a clip
round the policy at the start of each epoch.
The score is that of the final weights in 100 episodes. Writes benchmarks/results/stale.json, a seed at a time, and
skips what is there.
"""

import argparse
import copy
import sys
import tempfile
from collections import deque
from itertools import product

import torch
from common import ROOT, keep, missing, stamp
from torch import nn

sys.path.insert(0, str(ROOT))
import ppo  # noqa: E402


def play(buffer, actor, run, envs, obs, reset_rows, rng):
    """Fill the buffer with what `actor` does: (the last observations, whether episodes ended with them)."""
    for t in range(len(buffer.rewards)):
        buffer.obs[t] = obs
        buffer.reset_rows[t] = reset_rows
        buffer.actions[t] = actor.sample(obs, rng)
        obs, buffer.rewards[t], buffer.terminated[t], buffer.truncated[t], _ = envs.step(
            actor.to_env(buffer.actions[t])
        )
        run.count(obs, buffer.rewards[t], buffer.terminated[t] | buffer.truncated[t], reset_rows=reset_rows)
        reset_rows = buffer.terminated[t] | buffer.truncated[t]
    buffer.obs[-1] = obs
    return obs, reset_rows


def train(args, moved, lag=4):
    """ppo.py's loop, with an actor that is `lag` updates behind: the final agent."""
    torch.set_num_threads(1)
    envs = ppo.make_envs(args, args.num_envs)
    agent = ppo.make_agent(args, envs)
    actor = copy.deepcopy(agent)
    run = ppo.Run(args, envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    run.start(agent=agent, optimizer=optimizer)
    envs, obs, reset_rows, rng = run.new_envs()
    buffer = ppo.RolloutBuffer(args.num_steps, args.num_envs, envs.single_observation_space, agent.action_space)
    weights = deque(maxlen=lag + 1)
    while not run.is_finished():
        weights.append(copy.deepcopy(agent.state_dict()))
        actor.load_state_dict(weights[0])
        obs, reset_rows = play(buffer, actor, run, envs, obs, reset_rows, rng)
        buffer.scale_rewards(agent.return_stats, args)
        old_log_probs, _ = buffer.log_probs_and_values(actor)
        optimizer.param_groups[0]["lr"] = args.learning_rate * (run.remaining() if args.anneal_lr else 1)
        for epoch in range(args.update_epochs):
            if epoch == 0 or args.estimator == "vtrace":
                log_probs, values = buffer.log_probs_and_values(agent)
                buffer.compute_advantages(log_probs, values, old_log_probs, args)
                if moved:
                    buffer.rows = buffer.rows._replace(old_log_probs=log_probs)
            for batch in buffer.minibatches(args.num_minibatches, rng):
                loss, _ = ppo.ppo_loss(agent, batch, args)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
        if agent.obs_stats is not None:
            agent.obs_stats.update(buffer.obs[:-1][~buffer.reset_rows])
    envs.close()
    return agent


def main():
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--env-ids", nargs="*", default=["CartPole-v1"])
    given = parser.parse_args()
    for seed, env_id, name in product(given.seeds, given.env_ids, ("gae", "vtrace", "vanilla", "vtrace, moved")):
        stamped = stamp("ppo.py", env_id)
        key = f"{env_id}, {name}"
        if missing("stale", key, stamped["text"], [seed]):
            estimator, _, moved = name.partition(", ")
            with tempfile.TemporaryDirectory() as folder:
                args = ppo.tuned(env_id=env_id, estimator=estimator, seed=seed, progress=False, run_dir=folder)
                agent = train(args, moved)
            returns = ppo.evaluate(agent, args, 100, seed + 20_000)[0]
            print(key, seed, returns, flush=True)
            keep("stale", key, stamped, seed, {"returns": returns})


if __name__ == "__main__":
    main()
