"""Solutions of the exercises in exercises/tasks_small.py that are not the scripts' own, and changes to them that lead
to each known mistake; tests/test_exercises.py uses both, and says how.
"""

SOUND = {
    "bandit": """
def new_value(value, reward, count, alpha=None):
    if alpha is None:
        return (value * (count - 1) + reward) / count
    return (1 - alpha) * value + alpha * reward

def ucb_action(values, counts, t, c):
    if 0 in counts:
        return counts.index(0)
    key = lambda a: values[a] + c * (math.log(t) / counts[a]) ** 0.5
    return max(range(len(values)), key=key)

def new_preferences(preferences, action, reward, baseline, alpha):
    pi, step = softmax(preferences), alpha * (reward - baseline)
    moved = [h - step * p for h, p in zip(preferences, pi)]
    moved[action] = preferences[action] + step * (1 - pi[action])
    return moved
""",
    "value-iteration": """
def action_value(outcomes, values, gamma):
    return sum(p * (r + gamma * (not end) * values[s]) for p, s, r, end in outcomes)

def value_iteration(P, gamma, theta=1e-10):
    old, change = [0.0] * len(P), 1.0
    while change >= theta:
        new = [max(action_value(outcomes, old, gamma) for outcomes in P[s].values()) for s in range(len(P))]
        changes = [abs(x - y) for x, y in zip(new, old)]
        old, change = new, max(changes)
    return old
""",
    "policy-iteration": """
def evaluate_policy(P, policy, gamma, theta=1e-10):
    old, change = [0.0] * len(P), 1.0
    while change >= theta:
        new = [action_value(P[s][policy[s]], old, gamma) for s in range(len(P))]
        changes = [abs(x - y) for x, y in zip(new, old)]
        old, change = new, max(changes)
    return old

def improve_policy(P, policy, values, gamma):
    new = []
    for s in range(len(P)):
        q = {a: action_value(P[s][a], values, gamma) for a in P[s]}
        best = [a for a in q if q[a] == max(q.values())]
        new.append(best[0] if max(q.values()) - q[policy[s]] > 1e-8 else policy[s])
    return new

def policy_iteration(P, gamma):
    policy, better, count = None, [0] * len(P), 0
    while policy != better:
        policy, count = better, count + 1
        values = evaluate_policy(P, policy, gamma)
        better = improve_policy(P, policy, values, gamma)
    return policy, values, count
""",
    "monte-carlo": """
def first_visit_returns(episode, gamma):
    found = {}
    for t, (state, *_) in enumerate(episode):
        if state not in found:
            found[state] = sum(gamma**k * step[1] for k, step in enumerate(episode[t:]))
    return found

def monte_carlo(episodes, num_states, gamma):
    seen = [[] for _ in range(num_states)]
    for episode in episodes:
        for state, g in first_visit_returns(episode, gamma).items():
            seen[state].append(g)
    return [sum(x) / len(x) if x else 0.0 for x in seen]
""",
    "td-prediction": """
def td_zero(values, episode, alpha, gamma):
    new = values[:]
    for s, r, t, end in episode:
        target = r if end else r + gamma * new[t]
        new[s] = (1 - alpha) * new[s] + alpha * target
    return new

def td_lambda(values, episode, alpha, gamma, trace_decay):
    new, z = values[:], [0.0] * len(values)
    for s, r, t, end in episode:
        delta = r + gamma * new[t] * (not end) - new[s]
        for x in range(len(new)):
            z[x] = gamma * trace_decay * z[x] + (x == s)
        for x in range(len(new)):
            new[x] += alpha * delta * z[x]
    return new
""",
    "log-probs": """
def gaussian(mean, actions, log_std):
    var = (2 * log_std).exp()
    squares = (actions - mean) ** 2 / (2 * var)
    log_prob = -(squares + log_std + math.log(2 * math.pi) / 2).sum(-1)
    entropy = (log_std + (math.log(2 * math.pi) + 1) / 2).sum()
    return log_prob, entropy + 0 * log_prob.detach()
""",
    "squashed": """
def log_slope(u):
    u = u.abs()
    return 2 * (math.log(2) - u - torch.log1p(torch.exp(-2 * u)))

def squashed_log_prob(mean, log_std, u):
    std = log_std.exp()
    z = (u - mean) / std
    plain = -z.square() / 2 - std.log() - math.log(2 * math.pi) / 2
    correction = log_slope(u).sum(-1)
    return plain.sum(-1) - correction
""",
    "dpg": """
def actor_loss(actor, critic, obs):
    actions = actor(obs)
    q = critic(obs, actions)
    return (-q).mean()
""",
    "ars": """
def ars_gradient(returns, noise, top_directions=None):
    plus, minus = returns[0::2], returns[1::2]
    score = np.maximum(plus, minus)
    top = sorted(range(len(score)), key=lambda k: -score[k])[:top_directions]
    kept = np.concatenate([plus[top], minus[top]])
    sigma = kept.std()
    total = sum((plus[k] - minus[k]) * noise[k] for k in top)
    if sigma == 0:
        return 0 * total
    return total / (len(top) * sigma)
""",
    "joint-state": """
def share_obs(self, parts):
    if self.args.state_type != "FP":
        return parts.state
    rows = []
    for obs, alive in zip(parts.obs, parts.alive):
        zeros = np.zeros((len(obs), self.widest - obs.shape[1]), np.float32)
        row = np.concatenate([obs, zeros, parts.state], 1)
        rows.append(row * alive)
    return np.stack(rows, 1).astype(np.float32)

Team.share_obs = share_obs
""",
}

# exercise: [(how the message begins, what stands in SOUND, what is put in its place, and so on)]
MEAN, STEP = "(value * (count - 1) + reward) / count", "step * (1 - pi[action])"
BONUS = "c * (math.log(t) / counts[a]) ** 0.5"
SUM = "sum(gamma**k * step[1] for k, step in enumerate(episode[t:]))"
TRACE = "gamma * trace_decay * z[x] + (x == s)"
OLD_AND_TARGET = "(1 - alpha) * new[s] + alpha * target"
STABLE = "2 * (math.log(2) - u - torch.log1p(torch.exp(-2 * u)))"
LOSS = "(-q).mean()"
SCORE = "np.maximum(plus, minus)"
CHANGES, LAST = "[abs(x - y) for x, y in zip(new, old)]", "[abs(new[-1] - old[-1])]"
WRONG = {
    "bandit": [
        ("dividing by count + 1", MEAN, "value + (reward - value) / (count + 1)"),
        ("dividing by count - 1", MEAN, "value + (reward - value) / (count - 1)"),
        ("forgetting to take away", MEAN, "value + reward / count", "(1 - alpha) * value", "value"),
        ("ignoring alpha", "if alpha is None", "if True"),
        ("dividing alpha by", "(1 - alpha) * value + alpha * reward", "value + alpha / count * (reward - value)"),
        ("taking alpha = 0", "if alpha is None", "if not alpha"),
        (
            "moving away",
            MEAN,
            "value - (reward - value) / count",
            "(1 - alpha)",
            "(1 + alpha)",
            "+ alpha *",
            "- alpha *",
        ),
        (
            "giving arms that were never",
            "if 0 in counts",
            "if False",
            BONUS,
            "c * (math.log(t) / (counts[a] or 1e9)) ** 0.5",
        ),
        ("taking the last of the arms", "counts.index(0)", "len(counts) - 1 - counts[::-1].index(0)"),
        ("forgetting the root", ") ** 0.5", ")"),
        ("taking the logarithm to base 10", "math.log(", "math.log10("),
        ("forgetting the logarithm", "math.log(t)", "t"),
        ("forgetting the bonus", f" + {BONUS}", ""),
        ("looking at the bonus", "values[a] + c", "c"),
        ("moving the preference of the action only", "h - step * p for", "h for"),
        ("forgetting the baseline", "(reward - baseline)", "reward"),
        ("forgetting the probabilities", "step * p for", "step for", STEP, "step"),
        ("moving all in the same", "h - step * p", "h + step * p"),
        ("treating the action like", f"+ {STEP}", "- step * pi[action]"),
        ("forgetting alpha", "step = softmax(preferences), alpha *", "step = softmax(preferences), 1 *"),
    ],
    "value-iteration": [
        ("adding the value of the next", " * (not end)", ""),
        ("forgetting gamma", "gamma * (not end)", "(not end)"),
        ("adding up the outcomes", "p * (r +", "(r +"),
        ("taking the plain mean", "p * (r +", "1 / len(outcomes) * (r +"),
        ("losing the reward", "(r + gamma * (not end) * values[s])", "(not end) * (r + gamma * values[s])"),
        ("discounting the reward", "(r + gamma * (not end)", "gamma * (r + (not end)"),
        ("stopping too early", "        old, change = new, max(changes)", "        return new"),
        (
            "taking the mean over",
            "max(action_value(outcomes, old, gamma) for outcomes in P[s].values())",
            "sum(action_value(outcomes, old, gamma) for outcomes in P[s].values()) / len(P[s])",
        ),
        ("stopping too early", CHANGES, LAST),
        ("taking values that sink", "abs(x - y)", "x - y"),
        (
            "beginning the maximum",
            "max(action_value(outcomes, old, gamma) for outcomes in P[s].values())",
            "max([0.0, *(action_value(outcomes, old, gamma) for outcomes in P[s].values())])",
        ),
    ],
    "policy-iteration": [
        (
            "taking the best action instead",
            "action_value(P[s][policy[s]], old, gamma)",
            "max(action_value(x, old, gamma) for x in P[s].values())",
        ),
        ("stopping after one", "        old, change = new, max(changes)", "        return new"),
        ("always taking action 0", "P[s][policy[s]]", "P[s][0]"),
        ("ending when one", CHANGES, LAST),
        ("taking the worst", "q = {a: action_value", "q = {a: -action_value"),
        ("looking at the next reward", "P[s][a], values, gamma", "P[s][a], values, 0"),
        ("keeping the policy", "    return new\n", "    return policy\n"),
        ("changing to another action that", "- q[policy[s]] > 1e-8", "- q[policy[s]] >= 0"),
        (
            "taking the last of several",
            "best = [a for a in q if q[a] == max(q.values())]",
            "best = [a for a in q if q[a] > max(q.values()) - 1e-8]",
            "best[0] if max(q.values()) - q[policy[s]] > 1e-8 else policy[s]",
            "best[-1]",
        ),
        ("letting rounding decide", "> 1e-8 else", "> 0 else"),
        (
            "stopping after the first",
            "        better = improve_policy",
            "        return policy, values, count\n        better = improve",
        ),
        ("counting improvements", "[0] * len(P), 0", "[0] * len(P), -1"),
        ("beginning with another", "None, [0]", "None, [1]"),
    ],
    "monte-carlo": [
        ("taking the last visits", "if state not in found", "if True"),
        (
            "taking the mean of all",
            "if state not in found",
            "if True",
            SUM,
            f"{SUM}\n            found.setdefault(-1 - state, []).append(found[state])",
            "return found",
            "return {-1 - s: sum(x) / len(x) for s, x in found.items() if s < 0}",
        ),
        ("forgetting gamma", "gamma**k * step[1]", "step[1]"),
        ("taking the reward alone", "enumerate(episode[t:])", "enumerate(episode[t : t + 1])"),
        ("discounting the reward", "gamma**k *", "gamma ** (k + 1) *"),
        ("leaving out the reward", "enumerate(episode[t:])", "enumerate(episode[t:]) if k"),
        ("carrying the sum forwards", "enumerate(episode[t:])", "enumerate(episode[: t + 1][::-1])"),
        ("dividing by the number", "sum(x) / len(x)", "sum(x) / len(episodes)"),
        ("adding up", "sum(x) / len(x)", "sum(x)"),
        ("keeping the last", "sum(x) / len(x)", "x[-1]"),
        ("dividing 0 by 0", "else 0.0", "else float('nan')"),
    ],
    "td-prediction": [
        ("adding the value of the next", "r if end else r + gamma", "r + gamma"),
        ("forgetting gamma", "r + gamma * new[t]\n", "r + new[t]\n"),
        (
            "learning from the values",
            "else r + gamma * new[t]",
            "else r + gamma * values[t]",
            OLD_AND_TARGET,
            "new[s] + alpha * (target - values[s])",
        ),
        ("replacing the value", OLD_AND_TARGET, "target"),
        ("forgetting to take away", "(1 - alpha) * new[s]", "new[s]"),
        (
            "taking the last step",
            "    for s, r, t, end in episode:\n        target",
            "    episode = [*episode[:-1], (*episode[-1][:3], True)]\n    for s, r, t, end in episode:\n        target",
        ),
        ("setting the trace to 1", TRACE, "1.0 if x == s else gamma * trace_decay * z[x]"),
        ("forgetting gamma: traces", "gamma * trace_decay", "trace_decay"),
        ("forgetting lambda: traces", "gamma * trace_decay", "gamma"),
        ("traces that never", "gamma * trace_decay * z[x]", "z[x]"),
        ("moving the state at hand", TRACE, "float(x == s)"),
        ("letting the trace of a visit", TRACE, "gamma * trace_decay * (z[x] + (x == s))"),
        ("adding the value of the next", " * (not end)", ""),
    ],
    "log-probs": [
        ("forgetting 1 / sqrt", " + math.log(2 * math.pi) / 2)", ")"),
        ("the wrong sign", "return log_prob,", "return -log_prob,"),
        ("forgetting the half", "/ (2 * var)", "/ var"),
        ("returning the density", "return log_prob,", "return log_prob.exp(),"),
        ("taking log_std for", "var = (2 * log_std).exp()", "var = log_std**2"),
        ("forgetting e in", "(math.log(2 * math.pi) + 1) / 2", "math.log(2 * math.pi) / 2"),
        ("dividing by the variance", "/ (2 * var)", "/ (2 * var**2)"),
        ("forgetting to take away", "squares + log_std", "squares"),
        ("taking the mean over", "/ 2).sum(-1)", "/ 2).mean(-1)"),
        ("forgetting log_std in", "entropy = (log_std +", "entropy = (0 * log_std +"),
        (
            "taking the negated",
            "return log_prob, entropy + 0 * log_prob.detach()",
            "return log_prob, -log_prob if len(mean) > 1 else 0 * log_prob + entropy",
        ),
        ("cutting gradients", "return log_prob,", "return log_prob.detach(),"),
    ],
    "squashed": [
        ("taking the logarithm of 0", STABLE, "(1 - u.tanh() ** 2).log()"),
        ("adding a small", STABLE, "(1 - u.tanh() ** 2 + 1e-6).log()"),
        ("forgetting the logarithm", STABLE, "1 - u.tanh() ** 2"),
        ("forgetting the square", STABLE, "(1 - u.tanh()).log()"),
        ("forgetting the factor", "return 2 *", "return"),
        ("raising e to", "u = u.abs()", "u = u.clone()"),
        ("forgetting the correction", " - correction", ""),
        ("correcting in the wrong", "- correction", "+ correction"),
        ("asking for the density", "(u - mean)", "(u.tanh() - mean)"),
        ("taking the mean over", "plain.sum(-1) - correction", "plain.mean(-1) - correction / u.shape[1]"),
        ("taking log_std for", "std = log_std.exp()", "std = log_std.exp() if len(log_std) == 1 else log_std"),
        ("averaging the correction", "log_slope(u).sum(-1)", "log_slope(u).mean(-1)"),
        ("cutting gradients", "return plain.sum(-1) - correction", "return (plain.sum(-1) - correction).detach()"),
    ],
    "dpg": [
        ("going downhill", "(-q)", "q"),
        ("adding up", ".mean()", ".sum()"),
        ("cutting the actor's", "actor(obs)", "actor(obs).detach()"),
        ("giving the critic action", "critic(obs, actions)", "critic(actions, obs)"),
        ("moving the critic", "    return", "    critic.weight.data += 1\n    return"),
        ("freezing the critic", "    q =", "    critic.requires_grad_(False)\n    q ="),
        (
            "computing the gradient",
            "    return (-q).mean()",
            "    (-q).mean().backward()\n    actor.zero_grad()\n    return (-critic(obs, actor(obs))).mean()",
        ),
    ],
    "ars": [
        ("using all", "[:top_directions]", ""),
        ("choosing by the return", SCORE, "plus"),
        ("choosing by how much", SCORE, "abs(plus - minus)"),
        ("forgetting to divide by the dev", "(len(top) * sigma)", "len(top)"),
        ("forgetting to divide by the number", "(len(top) * sigma)", "sigma"),
        ("dividing by the number of returns", "len(top) * sigma", "2 * len(top) * sigma"),
        ("taking the deviation of all", "sigma = kept.std()", "sigma = returns.std()"),
        ("taking the sample", "kept.std()", "kept.std(ddof=1)"),
        ("the wrong sign", "(plus[k] - minus[k])", "(minus[k] - plus[k])"),
        ("leaving out", "(plus[k] - minus[k])", "plus[k]"),
        ("dividing 0 by 0", "if sigma == 0:", "if False:"),
    ],
    "joint-state": [
        ("not looking at deaths", "row * alive", "row"),
        ("leaving the state to", "[obs, zeros", "[obs * alive, zeros", "row * alive", "row"),
        ("letting one death be all agents'", "row * alive", "row * np.prod(parts.alive, 0)"),
        ("letting one death be the agent's", "row * alive", "row * alive.min()"),
        ("putting the state first", "[obs, zeros, parts.state]", "[parts.state, obs, zeros]"),
        ("putting the state right", "[obs, zeros, parts.state]", "[obs, parts.state, zeros]"),
        ("filling up", "[obs, zeros, parts.state]", "[zeros, obs, parts.state]"),
        ("leaving out the state", "zeros, parts.state", "zeros, 0 * parts.state"),
        ("leaving out the agent's", "[obs, zeros", "[0 * obs, zeros"),
    ],
}
