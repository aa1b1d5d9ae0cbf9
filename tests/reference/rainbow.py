"""Rainbow, slow and obvious (Hessel et al. 2018, arXiv 1710.02298): one action, one transition at a time.

test_rainbow.py compares every weight and priority of rainbow.py with it.
"""

import math

import numpy as np
import torch


def stream(modules, x):
    """Linear layers with ReLU between them, noisy or not, for one input x."""
    for module in modules:
        if not isinstance(module, torch.nn.Linear):
            x = x.clamp(min=0)
            continue
        weight, bias = module.weight, module.bias
        if hasattr(module, "sigma_weight") and module.training:
            weight = weight + module.sigma_weight * module.output_noise[:, None] * module.input_noise
            bias = bias + module.sigma_bias * module.output_noise
        x = weight @ x + bias
    return x


def outputs(agent, obs, actions, atoms):
    """Outputs (actions, atoms) for one observation, one action after the other."""
    x = stream(agent.body, torch.as_tensor(obs))
    advantages = stream(agent.advantage, x).view(actions, atoms)
    if agent.value is None:
        return advantages
    value = stream(agent.value, x)
    return torch.stack([value + advantage - sum(advantages) / actions for advantage in advantages])


def loss_of(script, agent, target, transition, args):
    """(loss, error) of one transition, by the book; the loss has a gradient. `project` has its own test."""
    obs, (action,), reward, next_obs, terminated, discount = transition
    with torch.no_grad():
        best = (agent if args.double else target)(next_obs[None])[0].argmax()
        y = reward + discount * ~terminated * target(next_obs[None])[0, best]
        probs = target.outputs(next_obs[None])[0, best].softmax(0)[None]
    if not args.distributional:
        error = abs(y - agent(obs[None])[0, action])
        return error**2, error.item()
    wanted = script.project(reward[None], terminated[None], discount, probs, agent.support)[0].tolist()
    predicted = agent.outputs(obs[None])[0, action].softmax(0)
    loss = sum(m * (math.log(m) - p.log()) for m, p in zip(wanted, predicted) if m > 0)
    return loss, loss.item()


def train(script, args, agent, target, envs):
    """36 steps in two environments, one transition at a time. Returns the priorities, which are a list.

    Windows come from a buffer without priorities, which has its own test.
    """
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.02, eps=1e-5)
    rng = np.random.default_rng([args.seed, 0])
    obs, _ = envs.reset(seed=int(rng.integers(2**31)))
    rng.integers(2**31)  # torch's seed
    ring = script.NStepBuffer(
        20,
        envs.single_observation_space,
        envs.single_action_space,
        "cpu",
        2,
        args.n_step if args.multi_step else 1,
        0.8,
    )
    priorities, highest, step, reset = np.zeros(20), 1.0, 0, np.zeros(2, bool)
    while step < args.total_timesteps:
        epsilon = 0 if args.noisy else max(0.05, 1 - 0.95 * step / 18)
        beta = 0.3 + 0.7 * step / 36
        agent.draw_noise(rng)
        at_random, any_actions = rng.random(2) < epsilon, rng.integers(2, size=2)
        actions = np.where(at_random, any_actions, agent(torch.tensor(obs)).argmax(1))
        next_obs, rewards, terminated, truncated, _ = envs.step(actions)
        priorities[ring.add(obs, actions[:, None], rewards, next_obs, terminated, truncated, reset)] = highest
        before, step = step, step + sum(~reset)
        obs, reset = next_obs, terminated | truncated
        for now in range(before + 1, step + 1):
            for _ in range(2 if now >= 11 and now % 3 == 0 and ring.size >= 6 else 0):
                if args.prioritized:
                    parts = (np.arange(6) + rng.random(6)) / 6
                    slots = np.searchsorted(priorities.cumsum(), parts * priorities.sum(), side="right")
                    weights = (ring.size * priorities[slots] / priorities.sum()) ** -beta
                else:
                    slots, weights = rng.integers(ring.size, size=6), np.ones(6)
                agent.draw_noise(rng)
                target.draw_noise(rng)
                losses, errors = zip(*[loss_of(script, agent, target, row, args) for row in zip(*ring.get(slots))])
                optimizer.zero_grad()
                (sum(w * loss for w, loss in zip(weights / weights.max(), losses)) / 6).backward()
                torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
                priorities[slots] = (np.array(errors) + 1e-6) ** 0.7
                highest = max(highest, priorities[slots].max())
            if now >= 11 and now % 3 == 0 and ring.size >= 6:
                optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 36)
            if now % 5 == 0:
                for p, q in zip(target.parameters(), agent.parameters()):
                    p.data = q.data.clone()
    return priorities
