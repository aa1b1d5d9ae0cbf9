"""DQN and double DQN, slow and obvious (Mnih et al. 2015; van Hasselt et al. 2016, arXiv 1509.06461).

Plain lists, one transition at a time, torch's Adam. test_dqn.py compares all weights and metrics with it.
"""

from collections import defaultdict

import numpy as np
import torch
from tools import flat, vector_env

from dqn import relu_mlp


def train(args, world):
    """What `train` of dqn.py does in two environments, which `world` makes, with observations of two numbers.

    Returns {metric: its values}, parameters of the network and of the target network, returns of all episodes.
    """
    envs = vector_env([world], 2)
    torch.manual_seed(args.seed)
    agent, target = (relu_mlp(2, args.hidden_sizes, 2) for _ in range(2))
    target.load_state_dict(agent.state_dict())
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    rng = np.random.default_rng([args.seed, 0])
    obs, _ = envs.reset(seed=int(rng.integers(2**31)))
    rng.integers(2**31)  # torch's seed
    memory, seen, returns, totals, step, reset = [], [], [], [0, 0], 0, [False, False]
    sums, all_sums = [0, 0], []  # discounted sums of the rewards so far
    metrics = defaultdict(list)

    def q_of(network, observation):
        x = np.array(observation, np.float64)
        if args.normalize_obs and seen:
            x = ((x - np.mean(seen, 0)) / np.sqrt(np.var(seen, 0) + 1e-8)).clip(-10, 10)
        return network(torch.tensor(x, dtype=torch.float32)[None])[0]

    def scaled(reward):
        return np.clip(reward / np.sqrt(np.var(all_sums) + 1e-8), -10, 10) if args.normalize_reward else reward

    def loss_of(o, action, reward, next_o, over):
        with torch.no_grad():
            values = q_of(target, next_o)
            best = (q_of(agent, next_o) if args.double else values).argmax()
            y = scaled(reward) + (0 if over else args.gamma * values[best])
        q = q_of(agent, o)[action]
        error = abs(y - q)
        if args.clip_error:
            return (0.5 * error**2 if error < 1 else error - 0.5), q.item()
        return error**2, q.item()

    while step < args.total_timesteps:
        fallen = min(1, step / max(1, args.total_timesteps * args.exploration_fraction))
        metrics["epsilon"].append(args.start_e + (args.end_e - args.start_e) * fallen)
        at_random, any_actions = rng.random(2) < metrics["epsilon"][-1], rng.integers(2, size=2)
        actions = [any_actions[n] if at_random[n] else int(q_of(agent, obs[n]).argmax()) for n in (0, 1)]
        next_obs, rewards, terminated, truncated, _ = envs.step(np.array(actions) + 1)
        first = step
        for n in (0, 1):
            if not reset[n]:
                reward = np.sign(rewards[n]) if args.clip_reward else rewards[n]
                memory.append((obs[n], actions[n], reward, next_obs[n], terminated[n]))
                seen.append(obs[n])
                sums[n] = reward + args.gamma * sums[n]
                all_sums.append(sums[n])
                step += 1
                totals[n] += rewards[n]
                if terminated[n] or truncated[n]:
                    returns.append(totals[n])
                    totals[n] = sums[n] = 0
        for at in range(first + 1, step + 1):
            if at >= max(args.learning_starts, args.batch_size) and at % args.train_frequency == 0:
                for _ in range(args.gradient_steps):  # slot s of the ring holds the newest of numbers s, s + size, …
                    slots = rng.integers(min(len(memory), args.buffer_size), size=args.batch_size)
                    rows = [memory[max(range(slot, len(memory), args.buffer_size))] for slot in slots]
                    losses, q = zip(*[loss_of(*row) for row in rows])
                    optimizer.zero_grad()
                    (sum(losses) / args.batch_size).backward()
                    if args.max_grad_norm:
                        torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                    optimizer.step()
                    metrics["loss"].append(sum(losses).item() / args.batch_size)
                    metrics["q"].append(sum(q) / args.batch_size)
                left = 1 - step / args.total_timesteps if args.anneal_lr else 1
                optimizer.param_groups[0]["lr"] = args.learning_rate * left
            if at % args.target_network_frequency == 0:
                for p, q in zip(target.parameters(), agent.parameters()):
                    p.data = args.tau * q.data + (1 - args.tau) * p.data
                highest = max(0, *[reward for _, _, reward, _, _ in memory[-args.buffer_size :]])
                metrics["q_bound"].append(scaled(highest) / (1 - args.gamma))
        metrics["learning_rate"].append(optimizer.param_groups[0]["lr"])
        obs, reset = next_obs, terminated | truncated
    return metrics, flat(agent), flat(target), returns
