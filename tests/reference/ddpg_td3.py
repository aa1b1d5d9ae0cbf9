"""DDPG and TD3, slow and obvious (arXiv 1509.02971; arXiv 1802.09477).

A plain list of all that was played, batches row by row, torch's Adam. test_ddpg_td3.py compares ddpg_td3.py with it.
"""

import copy
from collections import defaultdict

import numpy as np
import torch
from reference.continuous import descend, net, play_slowly
from tools import flat
from torch import nn


def train(args):
    """What `train` of ddpg_td3.py does in Drift.

    Returns ({figure: its values}, [actor, critics, target actor, target critics], returns of all episodes).
    """
    torch.manual_seed(args.seed)
    actor = nn.Sequential(net(2, args.hidden_sizes, 2), nn.Tanh())
    critics = nn.ModuleList([net(4, args.hidden_sizes, 1) for _ in range(2 if args.twin_q else 1)])
    target_actor, target_critics = copy.deepcopy((actor, critics))
    actor_adam = torch.optim.Adam(actor.parameters(), args.actor_learning_rate)
    critic_adam = torch.optim.Adam(critics.parameters(), args.critic_learning_rate)
    figures = defaultdict(list)

    def q(critic, obs, actions):
        return critic(torch.cat([obs, actions], 1))[:, 0]

    def update(number, rng, batch, left):
        o, a, r, next_o, over = batch
        with torch.no_grad():
            next_a = target_actor(next_o)
            if args.target_noise > 0:
                epsilon = args.target_noise * rng.standard_normal((args.batch_size, 2), np.float32)
                next_a = (next_a + torch.tensor(epsilon.clip(-0.5, 0.5))).clip(-1, 1)
            future = [
                min(q(critic, next_o, next_a)[b].item() for critic in target_critics) for b in range(args.batch_size)
            ]
            y = torch.tensor(
                [r[b] + (0 if over[b] else args.gamma * future[b]) for b in range(args.batch_size)], dtype=torch.float32
            )
        values = [q(critic, o, a) for critic in critics]
        loss = sum(nn.functional.mse_loss(value, y) for value in values)
        descend(critic_adam, loss, left * args.critic_learning_rate, args.max_grad_norm)
        figures["critic_loss"].append(loss.item())
        figures["value_mean"].append(torch.cat(values).mean().item())
        if number % args.policy_frequency == 0:
            loss = -q(critics[0], o, actor(o)).mean()
            descend(actor_adam, loss, left * args.actor_learning_rate, args.max_grad_norm)
            figures["actor_loss"].append(loss.item())
            for target, source in ((target_actor, actor), (target_critics, critics)):
                for slow, fast in zip(target.parameters(), source.parameters()):
                    slow.data = args.tau * fast.data + (1 - args.tau) * slow.data

    act = lambda obs, noise: (actor(obs).detach().numpy() + noise).clip(-1, 1)
    returns = play_slowly(args, act, update)
    return figures, [flat(network) for network in (actor, critics, target_actor, target_critics)], returns
