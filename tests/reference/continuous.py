"""What DDPG, TD3 and SAC have in common, slow and obvious: networks, playing with a list as memory, a gradient step."""

import numpy as np
import torch
from tools import Drift, vector_env
from torch import nn


def net(inputs, hidden_sizes, outputs):
    """Linear layers with ReLU between them."""
    sizes = [inputs, *hidden_sizes]
    hidden = [part for pair in zip(sizes, sizes[1:]) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], outputs))


def play_slowly(args, act, update):
    """What `train` does in Drift but for acting and learning, with a plain list of all that was played.

    act(obs, noise) gives actions (N, 2) in [-1, 1]; update(number, rng, batch, left) learns from a batch: obs, actions,
    rewards, next obs, terminated; `left` is the share of the steps that is left. Returns the returns of all episodes.
    """
    memory, seen, discounted, returns, step, checkpoint, updates = [], [], [], [], 0, 0, 0
    N = args.num_envs
    low, high = Drift.action_space.low, Drift.action_space.high

    def observed(rows):
        rows = np.array(rows, np.float64)
        if args.normalize_obs and seen:
            rows = ((rows - np.mean(seen, 0)) / np.sqrt(np.var(seen, 0) + 1e-8)).clip(-10, 10)
        return torch.tensor(rows, dtype=torch.float32)

    while step < args.total_timesteps:
        if step == checkpoint:
            envs, rng = vector_env([Drift], N), np.random.default_rng([args.seed, step])
            obs, _ = envs.reset(seed=int(rng.integers(2**31)))
            rng.integers(2**31)  # torch's seed
            reset, ended, noise, totals, G = [False] * N, [False] * N, np.zeros((N, 2)), [0] * N, [0] * N
        drawn = args.exploration_noise * rng.standard_normal((N, 2))
        for n in range(N):
            left = 0.85 * noise[n] if args.noise == "ou" else 0
            noise[n] = 0 if reset[n] else drawn[n] + left
        actions = act(observed(obs), noise)
        if step < args.learning_starts:
            actions = rng.uniform(-1, 1, (N, 2))
        played = (low + (actions + 1) / 2 * (high - low)).astype(np.float32)
        next_obs, rewards, terminated, truncated, _ = envs.step(played)
        first = step
        for n in np.flatnonzero(np.logical_not(reset)):
            memory.append((obs[n], actions[n], rewards[n], next_obs[n], terminated[n]))
            seen.append(obs[n])
            step += 1
            totals[n] += rewards[n]
            G[n] = rewards[n] + args.gamma * G[n]
            discounted.append(G[n])
            if terminated[n] or truncated[n]:
                returns.append(totals[n])
                totals[n], G[n], ended[n] = 0, 0, True
        obs, reset = next_obs, terminated | truncated
        learning = [t for t in range(first + 1, step + 1) if t > max(args.learning_starts, args.batch_size)]
        rounds = [t for t in learning if t % args.train_frequency == 0]
        for _ in range(len(rounds) * args.gradient_steps):
            updates += 1
            stored = min(len(memory), args.buffer_size)  # slot s of the ring has the newest of s, s + size, …
            slots = rng.integers(stored, size=args.batch_size)
            o, a, r, next_o, over = zip(*[memory[max(range(slot, len(memory), args.buffer_size))] for slot in slots])
            if args.normalize_reward:
                r = (np.array(r) / np.sqrt(np.var(discounted) + 1e-8)).clip(-10, 10)
            batch = observed(o), torch.tensor(np.array(a, np.float32)), r, observed(next_o), over
            update(updates, rng, batch, max(0, 1 - step / args.total_timesteps) if args.anneal_lr else 1)
        if step // args.checkpoint_every > checkpoint // args.checkpoint_every and all(ended):
            checkpoint = step
    return returns


def descend(adam, loss, next_rate, max_norm=None):
    """One step of an optimiser down the gradient of a loss; the next step has this learning rate."""
    adam.zero_grad()
    loss.backward()
    gradients = [p.grad for group in adam.param_groups for p in group["params"]]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    for gradient in gradients if max_norm else ():
        gradient *= min(1, max_norm / norm)
    adam.step()
    adam.param_groups[0]["lr"] = next_rate
