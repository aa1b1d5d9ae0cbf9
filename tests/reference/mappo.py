"""MAPPO and HAPPO by their definition (Yu et al. 2022, arXiv 2103.01955; Kuba et al. 2022, arXiv 2109.11251).

Step by step, each one of one agent in one environment. test_mappo.py compares every weight of mappo.py with it.
"""

import numpy as np
import torch
from tools import flat


def by_walking(rewards, values, ends, gamma, gae_lambda):
    """Advantages of a single stream: the sum of (gamma lambda)^k delta along what was played from there."""
    advantages = []
    for t in range(len(rewards)):
        last = next((k for k in range(t, len(rewards)) if ends[k] != "-"), len(rewards) - 1)
        delta = lambda k: rewards[k] + gamma * values[k + 1] * (ends[k] != "t") - values[k]
        advantages.append(sum((gamma * gae_lambda) ** (k - t) * delta(k) for k in range(t, last + 1)))
    return advantages


def train(args, envs, team):
    """All weights of a new team of two agents after training in two environments; a step is (t, e, i)."""
    shared, fp, T, own = args.share_policy, args.state_type == "FP", args.num_steps, args.agent_rewards
    networks = [*(actor.network.mlp for actor in team.actors), team.critic.mlp]
    optimizers = [torch.optim.Adam(network.parameters(), lr=args.learning_rate, eps=1e-5) for network in networks]
    followers = [[(e, i) for e in (0, 1) for i in agents] for agents in ([[0, 1]] if shared else [[0], [1]])]
    end = 6 if shared else 7  # of the observations in a row; then the state, then three choices each

    def log_probs(t, e, i):
        obs, mask = rows[t][e][2:4] if i == 0 else rows[t][e][4:end], rows[t][e][end + 2 + 3 * i :][:3]
        logits = networks[0 if shared else i](torch.tensor(obs))
        return torch.where(torch.tensor(mask) > 0, logits, -1e9).log_softmax(0)

    def value(t, e, i):
        row = rows[t][e]
        obs = [*row[2:4], *[0] * (not shared)] if i == 0 else [*row[4:end]]
        state = np.array([*obs, *row[end : end + 2]]) * (row[i] or own) if fp else row[end : end + 2]
        return networks[-1](torch.tensor(state, dtype=torch.float32))[0]

    def scale():
        if not args.value_norm or not batches:
            return 0, 0.1 if args.value_norm else 1
        mean, square = np.average(batches, axis=0, weights=0.99999 ** np.arange(len(batches))[::-1])
        return mean, np.sqrt(max(square - mean**2, 0.01))

    def learn(k, streams, loss):
        steps = [(t, e, i) for e, i in streams for t in range(T)]
        for _ in range(args.update_epochs):
            for part in np.array_split(rng.permutation(len(steps)), args.num_minibatches):
                losses = [loss(*steps[number]) for number in part if steps[number] in active[k]]
                if losses:
                    optimizers[k].zero_grad()
                    torch.stack(losses).mean().backward()
                    torch.nn.utils.clip_grad_norm_(networks[k].parameters(), args.max_grad_norm)
                    optimizers[k].step()

    def ratio(*step):
        return (log_probs(*step)[action[step]] - old[step]).exp()

    def policy_loss(*step):
        r, A, log_p = ratio(*step), M[step[:2]] * (advantages[step] - mean_A) / (std_A + 1e-8), log_probs(*step)
        return -torch.min(r * A, r.clamp(0.8, 1.2) * A) + args.ent_coef * (log_p.exp() * log_p).sum()

    def value_loss(*step):
        v, far, (mean, std) = value(*step), args.clip_vloss_coef if args.clip_vloss else 1e9, scale()
        v = torch.stack([v, values[step] + (v - values[step]).clamp(-far, far)])
        x, delta = ((returns[step] - mean) / std - v).abs(), args.huber_delta
        return torch.where(x < delta, x**2 / 2, delta * (x - delta / 2)).max()

    rng, batches, taken = np.random.default_rng([args.seed, 0]), [], 0
    (row, _), resets, _ = envs.reset(seed=int(rng.integers(2**31))), [False, False], rng.integers(2**31)
    while taken < args.total_timesteps:
        for optimizer in optimizers:
            rate = 1 - taken / args.total_timesteps if args.anneal_lr else 1
            optimizer.param_groups[0]["lr"] = args.learning_rate * rate
        rows, rewards, ends, action, old, active = [row], [], [], {}, {}, [set() for _ in networks]
        for t in range(T):
            for k, streams in enumerate(followers):
                for (e, i), z in zip(streams, rng.gumbel(size=(len(streams), 3))):
                    log_p = log_probs(t, e, i).detach()
                    action[t, e, i] = int((log_p + torch.tensor(z)).argmax())
                    old[t, e, i] = log_p[action[t, e, i]]
                    active[k] |= {(t, e, i)} if row[e][i] == 1 and not resets[e] else set()
                    active[-1] |= {(t, e, i)} if not resets[e] and (row[e][i] == 1 or not own) else set()
            row, reward, *over, infos = envs.step(tuple(np.array([action[t, e, i] for e in (0, 1)]) for i in (0, 1)))
            rows, taken = [*rows, row], taken + 2 - sum(resets)
            rewards.append(infos["rewards"] if own else np.stack([reward, reward], 1))
            resets = [terminated or truncated for terminated, truncated in zip(*over)]
            died = infos["terminated"] if own else over[0][:, None].repeat(2, 1)
            gone = [[resets[e] or (own and row[e][i] == 0) for i in (0, 1)] for e in (0, 1)]
            ends.append([["t" if died[e][i] else "c" if gone[e][i] else "-" for i in (0, 1)] for e in (0, 1)])

        advantages, values, returns, (mean, std) = {}, {}, {}, scale()
        for e, i in [(0, 0), (0, 1), (1, 0), (1, 1)]:
            said = [value(t, e, i).item() for t in range(T + 1)]
            walk = [x[e][i] for x in rewards], [v * std + mean for v in said], [x[e][i] for x in ends]
            for t, A in enumerate(by_walking(*walk, args.gamma, args.gae_lambda)):
                advantages[t, e, i], values[t, e, i], returns[t, e, i] = A, said[t], A + walk[1][t]
        M = np.ones((T, 2))
        for k in rng.permutation(2) if args.happo else range(len(followers)):
            mean_A, std_A = (f([advantages[step] for step in active[k]]) for f in (np.mean, np.std))
            learn(k, followers[k], policy_loss)
            for step in active[k] if args.happo else []:
                M[step[:2]] *= ratio(*step).item()
        some = [returns[step] for step in active[-1]]
        batches.append([np.mean(some), np.mean(np.square(some))])
        learn(-1, [(e, i) for e in (0, 1) for i in range(1 + fp)], value_loss)
    return torch.cat([flat(network) for network in networks])
