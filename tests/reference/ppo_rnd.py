"""PPO with random network distillation, slow and obvious (Burda et al. 2018, arXiv 1810.12894).

Lists, the losses of ppo.py, and an optimiser for each network. test_ppo_rnd.py compares ppo_rnd.py with it.
"""

import math
from collections import defaultdict
from functools import partial

import numpy as np
import torch
from tools import flat, vector_env

import ppo
import ppo_rnd


def train(args, world):
    """What `train` of ppo_rnd.py does in two environments, which `world` makes, with 7 steps a rollout.

    Returns {metric: its values}, parameters of the agent and of the predictor, returns of all episodes.
    """
    envs = vector_env([world], 2)
    torch.manual_seed(args.seed)
    agent = ppo_rnd.Agent(envs.single_observation_space, envs.single_action_space, args)
    rnd = ppo_rnd.RND(envs.single_observation_space, 2)
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
    predictor_optimizer = torch.optim.Adam(rnd.predictor.parameters(), args.predictor_learning_rate)
    metrics, returns, step, seen, led_to = defaultdict(list), [], 0, [], []  # led_to: by all steps, random ones too
    sums, all_sums = np.zeros((3, 2)), []  # of rewards, true rewards and novelty, discounted, in both environments

    def normal(obs, rows, bound):
        mean, var = (np.mean(rows, 0), np.var(rows, 0)) if rows else (0, 1)
        return torch.tensor(((obs - mean) / np.sqrt(var + 1e-8)).clip(-bound, bound), dtype=torch.float32)

    def novelty(obs):
        x = normal(obs.reshape(-1, 2), led_to, 5)
        return ((rnd.predictor(x) - rnd.target(x)) ** 2).mean(1).view(obs.shape[:-1])

    view = lambda obs: normal(obs, seen, 10) if args.normalize_obs else torch.tensor(obs)

    def play(obs, reset, steps, choose):
        rows = []
        for t in range(steps):
            actions = choose(t, obs)
            next_obs, rewards, terminated, truncated, _ = envs.step(actions + 1)
            rows.append((obs, actions, rewards, next_obs, terminated, truncated, reset))
            obs, reset = next_obs, terminated | truncated
        return [np.array(field) for field in zip(*rows)]

    envs.action_space.seed(args.seed)
    obs, over = envs.reset(seed=args.seed)[0], np.zeros(2, bool)
    *_, next_obs, _, _, reset = play(obs, over, args.random_steps, lambda t, obs: envs.action_space.sample() - 1)
    led_to += list(next_obs[~reset])
    rng = np.random.default_rng([args.seed, 0])
    last_obs, _ = envs.reset(seed=int(rng.integers(2**31)))
    rng.integers(2**31)  # torch's seed
    while step < args.total_timesteps:
        lr = optimizer.param_groups[0]["lr"] = args.learning_rate * (
            1 - step / args.total_timesteps if args.anneal_lr else 1
        )
        noise = rng.gumbel(size=(7, 2, 2)).astype(np.float32)
        choose = lambda t, obs: (agent.actor(view(obs)).detach().numpy() + noise[t]).argmax(1)
        obs, actions, paid, next_obs, terminated, truncated, reset = play(last_obs, over, 7, choose)
        last_obs, over, played = next_obs[-1], terminated[-1] | truncated[-1], ~reset
        step += played.sum()
        with torch.no_grad():
            rewards, bonus = np.sign(paid) if args.clip_reward else paid, novelty(next_obs).numpy()
            log_probs = agent.actor(view(obs)).log_softmax(2).gather(2, torch.tensor(actions)[:, :, None])[:, :, 0]
            v, next_v = (agent.critic(view(x))[..., 0].numpy() for x in (obs, next_obs))
            w, next_w = (agent.intrinsic_critic(view(x))[..., 0].numpy() for x in (obs, next_obs))
        for t, n in zip(*np.nonzero(played)):
            sums[:, n] = (rewards[t, n], paid[t, n], bonus[t, n]) + sums[:, n] * (0.5, 1, 0.75)
            all_sums.append(sums[:, n].copy())
            if terminated[t, n] or truncated[t, n]:
                returns.append(sums[1, n])
                sums[:2, n] = 0
        rewards = np.clip(rewards / np.std(all_sums, 0)[0], -10, 10) if args.normalize_reward else rewards
        bonus = bonus / np.std(all_sums, 0)[2] if args.normalize_intrinsic else bonus
        gae = lambda gamma, *steps: ppo.compute_gae(*map(torch.tensor, (*steps, terminated, truncated)), gamma, 0.8)[0]
        a, b = gae(0.5, rewards, v, next_v).numpy(), gae(0.75, bonus, w, next_w).numpy()
        for n in (0, 1) if not args.episodic else ():
            at = np.flatnonzero(played[:, n])
            deltas = bonus[at, n] + 0.75 * np.append(w[at[1:], n], next_w[-1, n]) - w[at, n]
            b[at, n] = [sum(0.6 ** (j - t) * deltas[j] for j in range(t, len(at))) for t in range(len(at))]
        metrics["learning_rate"].append(lr)
        metrics["explained_variance"].append(1 - a[played].var() / (a + v)[played].var())
        metrics["intrinsic_reward"].append(bonus[played].mean())
        advantages = args.extrinsic_coef * a + args.intrinsic_coef * b
        fields = view(obs), actions[:, :, None], log_probs, v, advantages, a + v
        for _ in range(1 if args.target_kl == 0 else 2):
            for rows in np.array_split(rng.permutation(np.flatnonzero(played)), 2):
                at = np.unravel_index(rows, (7, 2))
                batch = ppo.Batch(*[torch.as_tensor(field[at]) for field in fields])
                loss, found = ppo.ppo_loss(partial(ppo.Agent.forward, agent), batch, args)
                values, old = agent.intrinsic_critic(batch.obs)[:, 0], torch.tensor(w[at])
                other = ppo.value_loss(values, old, torch.tensor((b + w)[at]), 0.2 if args.clip_vloss else None)
                found |= {"loss": loss + 0.7 * other, "intrinsic_value_loss": other}
                found["predictor_loss"] = novelty(next_obs[at][: math.ceil(args.predictor_share * len(rows))]).mean()
                optimizer.zero_grad()
                found["loss"].backward()
                torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                predictor_optimizer.zero_grad()
                found["predictor_loss"].backward()
                predictor_optimizer.step()
                for name, figure in found.items():
                    metrics[name].append(figure.item())
        seen += list(obs[played])
        led_to += list(next_obs[played])
    return metrics, flat(agent), flat(rnd.predictor), returns
