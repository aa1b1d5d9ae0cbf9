"""PPO by the textbook (Schulman et al. 2017, arXiv 1707.06347), with torch's distributions and sums for returns.

test_ppo.py and test_ppod.py compare losses and weights with it.
"""

import numpy as np
import torch
from tools import close


def distributions(agent, output):
    """One of torch's distributions for each column of the actions, by what the actor gives."""
    if agent.continuous:
        return [torch.distributions.Normal(mean, std) for mean, std in zip(output.unbind(-1), agent.log_std.exp())]
    return [torch.distributions.Categorical(logits=part) for part in output.split(agent.output_sizes, -1)]


def log_prob(pi, actions):
    """Log-probs of actions (…, D) under D distributions."""
    return sum(d.log_prob(a) for d, a in zip(pi, actions.unbind(-1)))


def textbook_loss(pi, values, batch, args, norm_adv, own):
    """(loss, figures) of PPO written with torch's distributions; approx_kl is that of rows that are the agent's own."""
    log_probs, advantages, eps = log_prob(pi, batch.actions), batch.advantages, args.clip_coef
    ratios = (log_probs - batch.old_log_probs).exp()
    if norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    near = torch.where(advantages > 0, ratios.clamp(max=1 + eps), ratios.clamp(min=1 - eps))
    errors = (values - batch.returns) ** 2
    if args.clip_vloss:
        moved = (values - batch.old_values).clamp(-args.clip_vloss_coef, args.clip_vloss_coef)
        errors = torch.maximum(errors, (batch.old_values + moved - batch.returns) ** 2)
    figures = {"policy_loss": -(near * advantages).mean(), "value_loss": errors.mean() / 2}
    figures["entropy"] = sum(d.entropy() for d in pi).mean()
    figures["approx_kl"] = (ratios - 1 - ratios.log())[own].sum() / max(1, len(ratios[own]))
    far = (ratios > 1 + eps) | (ratios < 1 - eps)
    figures["clip_fraction"] = far[own].sum() / max(1, len(ratios[own]))
    loss = figures["policy_loss"] - args.ent_coef * figures["entropy"] + args.vf_coef * figures["value_loss"]
    return loss, {"loss": loss} | figures


def slow_targets(rewards, values, next_values, terminated, truncated, gamma, rho, c):
    """v_s = V_s + sum_t gamma^(t-s) c_s … c_{t-1} rho_t delta_t to the episode's end (arXiv 1802.01561, eq. 1), (T, N).

    With rho = 1 these are GAE's returns if c = lambda, and discounted rewards up to the bootstrap if c = 1.
    """
    targets, deltas = values.clone(), rewards + gamma * next_values * ~terminated - values
    for n in range(rewards.shape[1]):
        for s in range(len(rewards)):
            weight = 1
            for t in range(s, len(rewards)):
                targets[s, n] += weight * rho[t, n] * deltas[t, n]
                weight *= gamma * c[t, n]
                if terminated[t, n] or truncated[t, n]:
                    break
    return targets


def train(script, run, calls):
    """(the agent after the same training done the slow way, steps). On the way, every logged figure is compared."""
    args, agent, figures = run.args, calls[0].agent, run.all_logged
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
    seen, is_vtrace, one = [], args.estimator == "vtrace", torch.ones(6, 2)  # observations so far
    for i, call in enumerate(calls):
        number, k = divmod(i, args.update_epochs * args.num_minibatches)  # of the rollout, of the step in its update
        if k == 0:
            obs, actions = torch.tensor(call.buffer.obs), torch.tensor(call.buffer.actions)
            terminated, truncated = torch.tensor(call.buffer.terminated), torch.tensor(call.buffer.truncated)
            played = ~call.buffer.reset_rows
            place = {tuple(obs[t, n].tolist()): (t, n) for t, n in zip(*np.nonzero(played))}
            optimizer.param_groups[0]["lr"] = 1e-2 * (1 - len(seen) / 15 if args.anneal_lr else 1)
            close(figures["learning_rate"][number], optimizer.param_groups[0]["lr"])
            if args.normalize_obs and seen:
                agent.obs_stats.mean[:] = torch.tensor(np.mean(seen, 0))
                agent.obs_stats.var[:] = torch.tensor(np.var(seen, 0))
            seen += obs[:-1][played].double().tolist()
            rewards = (10 * obs[:-1, :, 1] + obs[:-1, :, 2] + 1) * torch.tensor(played)  # as Walk gives them
            rewards = rewards.sign() if args.clip_reward else rewards
            if args.normalize_reward:
                rewards = torch.tensor(call.buffer.rewards).float()  # by hand in test_reward_scaling
        if k == 0 or (is_vtrace and k % args.num_minibatches == 0):
            pi = distributions(agent, agent.actor(agent.features(obs[:-1].flatten(0, 1))))
            log_probs = log_prob(pi, actions.flatten(0, 1)).detach().view(6, 2)
            values = agent.critic(agent.features(obs.flatten(0, 1))).detach().view(7, 2)
            if k == 0:
                old_log_probs = log_probs
            ratios = (log_probs - old_log_probs).exp()
            rho, c = one, one * (args.gae_lambda if args.estimator == "gae" else 1)
            if is_vtrace:
                rho, c = ratios.clamp(max=args.rho_clip), ratios.clamp(max=args.c_clip)
            steps = rewards, values[:-1], values[1:], terminated, truncated
            returns = slow_targets(*steps, args.gamma, rho, c)
            advantages = returns - values[:-1]
            if is_vtrace:
                successors = torch.where(terminated | truncated, values[1:], torch.cat([returns[1:], values[-1:]]))
                advantages = rewards + args.gamma * successors * ~terminated - values[:-1]
        if k == 0:
            errors, targets = (returns - values[:-1])[played].numpy(), returns[played].numpy()
            close(figures["explained_variance"][number], 1 - errors.var() / targets.var())
        assert set(map(tuple, call.batch.obs.tolist())) <= set(place), "a reset row is trained on"
        rows = tuple(np.transpose([place[tuple(o)] for o in call.batch.obs.tolist()]))
        fields = obs[:-1], actions, old_log_probs, values[:-1], advantages, returns
        batch = script.Batch(*[field[rows] for field in fields])
        features = agent.features(batch.obs)
        pi, new_values = distributions(agent, agent.actor(features)), agent.critic(features)[:, 0]
        given = batch, args, args.norm_adv, slice(None)
        loss, expected = textbook_loss(pi, new_values, *given)
        for name, figure in expected.items():
            close(figures[name][i], figure, atol=1e-4)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
    return agent, len(seen)
