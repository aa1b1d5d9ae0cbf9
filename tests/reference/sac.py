"""SAC, slow and obvious (Haarnoja et al. 2018, arXiv 1812.05905).

A plain list of all that was played, batches row by row, torch's Adam. test_sac.py compares sac.py with it.
"""

import copy
import math
from collections import defaultdict

import numpy as np
import torch
from reference.continuous import descend, net, play_slowly
from tools import flat
from torch import nn


def train(args):
    """What `train` of sac.py does in Drift.

    Returns ({figure: its values}, [actor, critics, targets], returns of all episodes).
    """
    torch.manual_seed(args.seed)
    actor = net(2, args.hidden_sizes, 4)
    critics = nn.ModuleList([net(4, args.hidden_sizes, 1) for _ in range(2)])
    targets = copy.deepcopy(critics)
    log_alpha = torch.tensor(math.log(args.alpha or 1), requires_grad=True)
    actor_adam = torch.optim.Adam(actor.parameters(), args.actor_learning_rate)
    critic_adam = torch.optim.Adam(critics.parameters(), args.critic_learning_rate)
    alpha_adam = torch.optim.Adam([log_alpha], args.critic_learning_rate)
    figures = defaultdict(list)

    def q(networks, obs, actions):
        return [network(torch.cat([obs, actions], 1))[:, 0] for network in networks]

    def draw(obs, noise):
        """Actions and their log-densities, in double precision."""
        output = actor(obs)
        mean, std = output[:, :2], output[:, 2:].clamp(-20, 2).exp()
        u = mean + std * torch.tensor(noise, dtype=torch.float32)
        log_prob = torch.tensor(np.log(np.exp(-(noise**2) / 2) / np.sqrt(2 * np.pi))) - std.double().log()
        log_cosh = torch.logaddexp(u.double(), -u.double()) - math.log(2)  # 1 - tanh^2 = 1 / cosh^2
        return u.tanh(), (log_prob + 2 * log_cosh).sum(1).float()

    def update(number, rng, batch, left):
        o, a, r, next_o, over = batch
        with torch.no_grad():
            next_a, log_prob = draw(next_o, rng.standard_normal((args.batch_size, 2), np.float32))
            future = torch.min(*q(targets, next_o, next_a)) - log_alpha.exp() * log_prob
            y = torch.tensor(
                [r[b] + (0 if over[b] else args.gamma * future[b]) for b in range(args.batch_size)], dtype=torch.float32
            )
        values = q(critics, o, a)
        loss = sum(nn.functional.mse_loss(value, y) for value in values)
        descend(critic_adam, loss, left * args.critic_learning_rate, args.max_grad_norm)
        figures["critic_loss"].append(loss.item())
        figures["value_mean"].append(torch.cat(values).mean().item())
        for slow, fast in zip(targets.parameters(), critics.parameters()):
            slow.data = args.tau * fast.data + (1 - args.tau) * slow.data
        for _ in range(args.policy_frequency if number % args.policy_frequency == 0 else 0):
            new_a, log_prob = draw(o, rng.standard_normal((args.batch_size, 2), np.float32))
            loss = (log_alpha.exp().detach() * log_prob - torch.min(*q(critics, o, new_a))).mean()
            descend(actor_adam, loss, left * args.actor_learning_rate, args.max_grad_norm)
            figures["actor_loss"].append(loss.item())
            figures["entropy"].append(-log_prob.mean().item())
            if args.alpha is None:
                log_alpha.grad = -log_alpha.exp().detach() * (log_prob.detach() - 2).mean()
                alpha_adam.step()
            figures["alpha"].append(log_alpha.exp().item())

    returns = play_slowly(args, lambda obs, noise: draw(obs, noise)[0].detach().numpy(), update)
    return figures, [flat(network) for network in (actor, critics, targets)], returns
