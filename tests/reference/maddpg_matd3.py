"""MADDPG and MATD3, slow and obvious (Lowe et al. 2017, arXiv 1706.02275; Ackermann et al. 2019, arXiv 1910.01465).

Lists of all that was played, one sample, one agent at a time. test_maddpg_matd3.py compares maddpg_matd3.py with it.
"""

from types import SimpleNamespace

import numpy as np
import torch

import maddpg_matd3


def window(steps, g, n_step, gamma):
    """What stream g gets from the first of these steps on: (rewards, discount of what follows, last step)."""
    total, discount = 0.0, 1.0
    for step in steps[:n_step]:
        total, discount = total + discount * step.rewards[g], discount * gamma
        if step.dones[g]:
            break
    return total, discount, step


def train(args, new_envs):
    """What `train` does in 50 steps of two environments: (agents, {metric: its values}, returns of episodes)."""
    envs = new_envs()
    torch.manual_seed(args.seed)
    agents = maddpg_matd3.Agents(envs.get_attr("layout")[0], envs.single_action_space.spaces, args)
    agents.target_actors.load_state_dict(agents.actors.state_dict())  # targets begin as copies
    agents.target_critics.load_state_dict(agents.critics.state_dict())
    layout, sizes, n, FP = agents.layout, agents.action_sizes, agents.num_agents, args.state_type == "FP"
    of_actors, of_critics = list(agents.actors.parameters()), list(agents.critics.parameters())
    of_targets = [*agents.target_actors.parameters(), *agents.target_critics.parameters()]
    adams = (
        torch.optim.Adam(of_actors, args.actor_learning_rate),
        torch.optim.Adam(of_critics, args.critic_learning_rate),
    )
    metrics, memory, returns, step, restart = {name: [] for name in maddpg_matd3.CURVE}, [[], []], [], 0, 0
    seen_ends, updates = np.zeros(2, bool), 0

    def value(twin, g, row, actions):
        """Q^g of a row and a list of all actions."""
        seen = row[layout.state]
        if FP:  # agents observe as many numbers as they have actions
            seen = torch.cat([row[layout.observations[g]], torch.zeros(max(sizes) - sizes[g]), seen])
        return twin[g % len(twin)](torch.cat([seen, *actions]))[0]

    def learn(adam, loss, parameters, rate):
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
            p.grad = gradient
        torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm or 1e9)
        adam.step()
        adam.param_groups[0]["lr"] = rate * (max(0, 1 - step / 50) if args.anneal_lr else 1)

    def learn_from(update, samples):
        """An update of the critics and, if it is time, of actors and targets."""
        steps, windows = [memory[e][number] for e, number in samples], []
        for g in range(n if FP else 1):
            windows += [window(memory[e][number:], g, args.n_step, args.gamma) for e, number in samples]
        next_rows = torch.stack([last.next_row for _, _, last in windows])
        next_actions, _ = agents.choose(agents.target_actors, next_rows, rng)
        if args.target_noise and not agents.discrete:
            joint = torch.cat(next_actions, 1)
            noise = args.target_noise * agents.normal(joint.shape, rng)
            next_actions = maddpg_matd3.smoothed(joint, noise, args.noise_clip).split(sizes, 1)
        errors, values = [], []
        for k, (total, discount, last) in enumerate(windows):
            g, step = k // 6, steps[k % 6]
            joint = [a[k] for a in next_actions]
            future = min(value(twin, g, last.next_row, joint) for twin in agents.target_critics).detach()
            target = total + discount * future * (not last.terminated[g])
            for twin in agents.critics:
                values.append(value(twin, g, step.row, step.actions))
                errors += [(values[-1] - target) ** 2] if step.row[g] or not FP else []
        loss = sum(errors) * len(agents.critics) / len(errors)
        learn(adams[1], loss, of_critics, args.critic_learning_rate)
        metrics["critic_loss"].append(loss.item())
        metrics["value_mean"].append(sum(values).item() / len(values))
        if update % args.policy_frequency:
            return
        own, outputs = agents.choose(agents.actors, torch.stack([step.row for step in steps]), rng)
        worth, squares = [], []
        for k, step in enumerate(steps):
            for i in np.flatnonzero(step.row[:n]):  # who is alive
                joint = [own[j][k] if j == i else step.actions[j] for j in range(n)]
                worth.append(value(agents.critics[0], i if FP else 0, step.row, joint))
                squares.append((outputs[i][k] ** 2).mean())
        loss, penalty = -sum(worth) / len(worth), args.output_penalty * sum(squares) / len(worth)
        learn(adams[0], loss + penalty, of_actors, args.actor_learning_rate)
        metrics["actor_loss"].append(loss.item())
        for p, q in zip(of_targets, of_actors + of_critics):
            p.data = args.tau * q.data + (1 - args.tau) * p.data

    while step < 50:
        if step >= restart and (step == 0 or seen_ends.all()):  # a checkpoint waits for the ends of episodes
            restart = (step // args.checkpoint_every + 1) * args.checkpoint_every
            seen_ends[:] = False
            envs, rng = new_envs(), np.random.default_rng([args.seed, step])
            rows, _ = envs.reset(seed=int(rng.integers(2**31)))
            rng.integers(2**31)  # torch's generator
            reset, totals = np.zeros(2, bool), [0, 0]
            for steps in filter(None, memory):
                steps[-1].dones = [True] * n
        actions = agents.random_actions(rows, rng) if step < 20 else agents.explore(rows, args.exploration_noise, rng)
        next_rows, rewards, terminated, truncated, info = envs.step(agents.to_env(actions))
        for e in np.flatnonzero(~reset):
            over = terminated[e] or truncated[e]
            streams = {"rewards": [rewards[e]], "dones": [over], "terminated": [terminated[e]]}
            if FP:
                streams = {name: info[name][e] for name in ("rewards", "terminated")}
                streams["dones"] = over | (next_rows[e, :n] == 0)
            did = torch.tensor(actions[e]).float().split(sizes)
            row, next_row = torch.tensor(rows[e]), torch.tensor(next_rows[e])
            memory[e].append(SimpleNamespace(row=row, actions=did, next_row=next_row, **streams))
            step, totals[e] = step + 1, totals[e] + rewards[e]
            if over:
                returns.append(totals[e])
                totals[e], seen_ends[e] = 0, True
        rows, reset = next_rows, terminated | truncated
        stored = []  # the newest step in each slot of the ring
        for e, steps in enumerate(memory):
            stored += [(e, max(range(slot, len(steps), 12))) for slot in range(min(len(steps), 12))]
        while updates < (step // 4 - 20 // 4) * args.gradient_steps:
            updates += 1
            learn_from(updates, [stored[x] for x in rng.integers(len(stored), size=6)])
    return agents, metrics, returns
