"""Solutions of the exercises of tasks_scratch.py that are not the scripts' own, and what is known to go wrong in them.

tests/test_exercises.py says how they are used.
"""

SOUND = {
    "build-reinforce": """
def compute_returns(rewards, last_value, gamma):
    found, following = [], last_value
    for reward in rewards.flip(0):
        following = reward + gamma * following
        found.insert(0, following)
    return torch.stack(found)

def reinforce_loss(logits, values, actions, returns, vf_coef):
    log_p = logits.log_softmax(1)
    log_p = log_p[range(len(actions)), actions]
    error = returns - values
    better = error.detach()
    return vf_coef * error.pow(2).mean() - (better * log_p).mean()

def play_episode(agent, env):
    obs, over, rows = env.reset()[0], False, []
    while not over:
        seen = torch.as_tensor(obs)
        action = torch.multinomial(agent(seen)[0].detach().softmax(0), 1)[0]
        obs, reward, terminated, truncated, _ = env.step(int(action))
        rows.append((seen, action, float(reward)))
        over = terminated or truncated
    all_obs, actions, rewards = zip(*rows)
    last_value = 0.0 if terminated else float(agent(torch.as_tensor(obs))[1])
    return torch.stack(all_obs), torch.stack(actions), torch.tensor(rewards), last_value

def train(args):
    env, agent = make_env(args), make_agent(args)
    adam = torch.optim.Adam(agent.parameters(), args.learning_rate)
    while env.steps < args.total_timesteps:
        obs, actions, rewards, last_value = play_episode(agent, env)
        returns = compute_returns(rewards, last_value, args.gamma)
        adam.zero_grad()
        reinforce_loss(*agent(obs), actions, returns, args.vf_coef).backward()
        adam.step()
    env.close()
    return agent
""",
    "build-dqn": """
def epsilon_at(step, args):
    slope = (args.epsilon_end - args.epsilon_start) / args.exploration_steps
    return max(args.epsilon_end, args.epsilon_start + slope * step)

def choose_action(network, obs, epsilon, rng):
    q = network(torch.as_tensor(obs)).detach().numpy()
    if rng.random() >= epsilon:
        return int(np.argmax(q))
    return int(rng.choice(np.arange(len(q))))

def add(self, obs, action, reward, next_obs, terminated):
    i = self.added % self.size
    self.obs[i], self.next_obs[i] = torch.tensor(obs), torch.tensor(next_obs)
    self.actions[i] = action
    self.rewards[i] = reward
    self.terminated[i] = bool(terminated)
    self.added = self.added + 1

def sample(self, batch_size, rng):
    full = self.size if self.added > self.size else self.added
    i = torch.as_tensor(rng.choice(full, batch_size))
    return tuple(x[i] for x in (self.obs, self.actions, self.rewards, self.next_obs, self.terminated))

ReplayBuffer.add, ReplayBuffer.sample = add, sample

def td_targets(rewards, terminated, gamma, target_q):
    best = target_q.amax(dim=1)
    return torch.where(terminated, rewards, rewards + gamma * best)

def dqn_loss(network, target, batch, gamma):
    obs, actions, rewards, next_obs, terminated = batch
    y = td_targets(rewards, terminated, gamma, target(next_obs)).detach()
    q = network(obs)[range(len(actions)), actions]
    return torch.nn.functional.mse_loss(q, y)

def train(args):
    env, rng = make_env(args), np.random.default_rng(args.seed)
    network, target = make_agent(args), make_agent(args)
    adam = torch.optim.Adam(network.parameters(), args.learning_rate)
    buffer = ReplayBuffer(args.buffer_size, env.observation_space.shape[0])
    obs, over = None, True
    for t in range(args.total_timesteps):
        if over:
            obs, _ = env.reset()
        action = choose_action(network, obs, epsilon_at(t, args), rng)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        buffer.add(obs, action, reward, next_obs, terminated)
        obs, over = next_obs, terminated or truncated
        if t >= args.learning_starts and t % args.train_every == 0:
            adam.zero_grad()
            dqn_loss(network, target, buffer.sample(args.batch_size, rng), args.gamma).backward()
            adam.step()
        if t % args.target_every == 0:
            target.load_state_dict(network.state_dict())
    env.close()
    return network
""",
    "build-ppo": """
def choose_actions(logits):
    p = logits.softmax(1)
    actions = torch.multinomial(p, 1)
    return actions.squeeze(1), p.gather(1, actions).squeeze(1).log()

def compute_gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    T = len(rewards)
    dead, over = terminated.float(), (terminated | truncated).float()
    deltas = rewards + gamma * (1 - dead) * next_values - values
    trace = gamma * gae_lambda * (1 - over)
    advantages = deltas.clone()
    for t in range(T - 2, -1, -1):
        advantages[t] += trace[t] * advantages[t + 1]
    return advantages, advantages + values

def normalized(advantages):
    mean, std = advantages.mean(), advantages.std()
    return (advantages - mean) / (std + 1e-8)

def ppo_loss(logits, values, actions, old_log_probs, advantages, returns, args):
    log_p = logits.log_softmax(1)
    now = log_p[range(len(actions)), actions]
    ratio = torch.exp(now - old_log_probs)
    bounded = torch.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    gain = torch.minimum(ratio * advantages, bounded * advantages).mean()
    error = (values - returns).pow(2).mean()
    entropy = -(log_p.exp() * log_p).sum(1).mean()
    return -gain + args.vf_coef * error - args.ent_coef * entropy

def collect(agent, envs, obs, args):
    names = "obs actions log_probs rewards values next_values terminated truncated".split()
    columns = {name: [] for name in names}
    for _ in range(args.num_steps):
        with torch.no_grad():
            logits, values = agent(obs)
        actions, log_probs = choose_actions(logits)
        following, rewards, terminated, truncated, reached = envs.step(actions)
        with torch.no_grad():
            next_values = agent(reached)[1]
        row = [obs, actions, log_probs, rewards, values, next_values, terminated, truncated]
        for name, x in zip(names, row):
            columns[name].append(x)
        obs = following
    return {name: torch.stack(column) for name, column in columns.items()}, obs

def update(agent, optimizer, obs, actions, log_probs, advantages, returns, args):
    B = len(obs)
    for _ in range(args.update_epochs):
        order = torch.randperm(B)
        for begin in range(0, B, args.minibatch_size):
            i = order[begin : begin + args.minibatch_size]
            optimizer.zero_grad()
            ppo_loss(*agent(obs[i]), actions[i], log_probs[i], advantages[i], returns[i], args).backward()
            optimizer.step()

def train(args):
    envs, agent = Environments(args), make_agent(args)
    adam, obs = torch.optim.Adam(agent.parameters(), args.learning_rate), envs.reset()
    while envs.steps < args.total_timesteps:
        x, obs = collect(agent, envs, obs, args)
        names = ("rewards", "values", "next_values", "terminated", "truncated")
        advantages, returns = compute_gae(*[x[name] for name in names], args.gamma, args.gae_lambda)
        batch = [x["obs"], x["actions"], x["log_probs"], normalized(advantages), returns]
        update(agent, adam, *[x.reshape(-1, *x.shape[2:]) for x in batch], args)
    envs.close()
    return agent
""",
}

APPEND = "found.insert(0, following)"
LOSS = "vf_coef * error.pow(2).mean() - (better * log_p).mean()"
BEST = "torch.multinomial(agent(seen)[0].detach().softmax(0), 1)[0]"
LAST = "0.0 if terminated else float(agent(torch.as_tensor(obs))[1])"
GAIN = "torch.minimum(ratio * advantages, bounded * advantages).mean()"
TOTAL = "-gain + args.vf_coef * error - args.ent_coef * entropy"
ORDER = "torch.randperm(B)"
WRONG = {
    "build-reinforce": [
        ("returning them in the order in which", APPEND, "found.append(following)"),
        ("going forwards in time", "rewards.flip(0)", "rewards", APPEND, "found.append(following)"),
        ("forgetting gamma", "gamma * following", "following"),
        ("discounting the reward as well", "reward + gamma * following", "gamma * (reward + following)"),
        ("giving each step the return of the whole", "torch.stack(found)", "torch.stack([found[0]] * len(found))"),
        ("leaving last_value out", "found, following = [], last_value", "found, following = [], 0.0"),
        ("adding last_value without a discount", "= [], last_value", "= [], last_value / gamma"),
        ("taking the log-prob of the other action", "len(actions)), actions]", "len(actions)), 1 - actions]"),
        ("leaving the baseline out", "better = error.detach()", "better = returns"),
        ("adding up over the steps", LOSS, "vf_coef * error.pow(2).sum() - (better * log_p).sum()"),
        ("leaving vf_coef out", "return vf_coef * error", "return error"),
        ("leaving the baseline's own loss out", LOSS, "-(better * log_p).mean()"),
        ("subtracting the baseline's loss", "return vf_coef", "return -vf_coef"),
        ("taking probabilities where their", "logits.log_softmax(1)", "logits.softmax(1)"),
        ("making bad actions likelier", "mean() - (better", "mean() + (better"),
        ("cutting the gradient of the log-probs", "(better * log_p)", "(better * log_p.detach())"),
        ("not detaching the advantage", "error.detach()", "error"),
        ("cutting the gradient of the values", "returns - values", "returns - values.detach()"),
        ("giving the last state a value although", LAST, "float(agent(torch.as_tensor(obs))[1])"),
        ("storing the observation that an action led to", "append((seen,", "append((torch.as_tensor(obs),"),
        ("storing the first observation", "append((seen,", "append((rows[0][0] if rows else seen,"),
        ("leaving out the last step", "zip(*rows)", "zip(*rows[:-1])"),
        ("treating truncation as death", LAST, "0.0"),
        ("taking the value of the state before", LAST, "0.0 if terminated else float(agent(seen)[1])"),
        ("always taking the likeliest action", BEST, "agent(seen)[0].argmax()"),
        ("drawing all actions with equal", BEST, "torch.randint(2, ())"),
        ("storing one action and playing another", "env.step(int(action))", f"env.step(int({BEST}) * 0)"),
        ("not setting gradients back", "        adam.zero_grad()\n", ""),
        ("taking no step of the optimizer", "        adam.step()\n", ""),
        ("taking one step only", "        adam.step()\n", "        adam.step()\n        break\n"),
        ("taking one step for each step", "        adam.step()\n", "        [adam.step() for _ in obs]\n"),
    ],
    "build-dqn": [
        ("going on below epsilon_end", "max(args.epsilon_end, ", "("),
        ("forgetting epsilon_end", "(args.epsilon_end - args.epsilon_start)", "(0 - args.epsilon_start)",
         "max(args.epsilon_end,", "max(0.0,"),
        ("going upwards", "max(args.epsilon_end, args.epsilon_start + slope * step)", "min(1.0, 0.2 - slope * step)"),
        ("stopping at epsilon_end too early", "(args.epsilon_end - args.epsilon_start)", "(0 - args.epsilon_start)"),
        ("exchanging epsilon", "rng.random() >= epsilon", "rng.random() < epsilon"),
        ("taking the lowest Q", "np.argmax", "np.argmin"),
        ("never exploring", "rng.random() >= epsilon", "True"),
        ("leaving the best action out", "rng.choice(np.arange(len(q)))",
         "rng.choice([a for a in range(len(q)) if a != q.argmax()])"),
        ("exchanging obs and next_obs", "torch.tensor(obs), torch.tensor(next_obs)",
         "torch.tensor(next_obs), torch.tensor(obs)"),
        ("always writing into the same slot", "i = self.added % self.size", "i = 0"),
        ("beginning with the second slot", "i = self.added %", "i = (self.added + 1) %"),
        ("forgetting all that comes when", "    i = self.added % self.size",
         "    i = self.added\n    if i >= self.size:\n        return"),
        ("overwriting the newest when", "i = self.added % self.size", "i = min(self.added, self.size - 1)"),
        ("drawing slots that were never written", "rng.choice(full,", "rng.choice(self.size,"),
        ("never drawing the newest", "rng.choice(full,", "rng.choice(full - 1,"),
        ("drawing each part by itself", "x[i] for x", "x[i[torch.randperm(len(i))]] for x"),
        ("never drawing the oldest", "full = self.size", "full = self.size - 1"),
        ("bootstrapping over an end", "torch.where(terminated, rewards, rewards + gamma * best)",
         "rewards + gamma * best"),
        ("counting the next state only where", "torch.where(terminated,", "torch.where(~terminated,"),
        ("taking the maximum over the batch", "amax(dim=1)", "amax(dim=0)"),
        ("taking the mean of the actions", "amax(dim=1)", "mean(dim=1)"),
        ("forgetting gamma", "gamma * best", "best"),
        ("giving nothing at all where", "torch.where(terminated, rewards,", "torch.where(terminated, 0 * rewards,"),
        ("not using the target network", "target(next_obs)", "network(next_obs)"),
        ("taking Q of the best action", "network(obs)[range(len(actions)), actions]", "network(obs).amax(1)"),
        ("taking Q of the next state", "network(obs)[", "network(next_obs)["),
        ("taking the sum, not the mean", "mse_loss(q, y)", "mse_loss(q, y, reduction='sum')"),
        ("bootstrapping from s, not", "target(next_obs)", "target(obs)"),
        ("cutting the gradient of Q", "mse_loss(q, y)", "mse_loss(q.detach(), y.requires_grad_())"),
        ("letting the gradient through", ".detach()\n    q =", "\n    q ="),
        ("using one network for both", "make_agent(args), make_agent(args)\n", "[make_agent(args)] * 2\n"),
        ("never copying", "            target.load_state_dict(network.state_dict())", "            pass"),
        ("copying the network into the target at every", "t % args.target_every == 0", "True"),
        ("not setting gradients back", "            adam.zero_grad()\n", ""),
        ("taking no notice of train_every", " and t % args.train_every == 0", ""),
        ("learning before learning_starts", "t >= args.learning_starts and", "t > 0 and"),
        ("taking no step", "            adam.step()\n", ""),
    ],
    "build-ppo": [
        ("always taking the likeliest action", "torch.multinomial(p, 1)", "p.argmax(1, keepdim=True)"),
        ("drawing all actions with equal", "torch.multinomial(p, 1)", "torch.randint(2, (len(p), 1))"),
        ("returning probabilities, not", "squeeze(1).log()", "squeeze(1)"),
        ("returning the log-prob of another", "p.gather(1, actions)", "p.gather(1, torch.multinomial(p, 1))"),
        ("returning one-step surprises", "trace[t] * advantages[t + 1]", "0"),
        ("leaving lambda out", "gamma * gae_lambda * (1 - over)", "gamma * (1 - over)"),
        ("leaving gamma out of the trace", "gamma * gae_lambda * (1 - over)", "gae_lambda * (1 - over)"),
        ("going forwards in time", "range(T - 2, -1, -1)", "range(1, T)", "advantages[t + 1]", "advantages[t - 1]"),
        ("returning advantages as returns", "return advantages, advantages + values", "return advantages, advantages"),
        ("bootstrapping over an end", "(1 - dead) * next_values", "next_values"),
        ("letting later surprises of another episode in.", "(1 - over)", "(1 - over * 0)"),
        ("taking no notice of the end", "(1 - over)", "(1 - over * 0)", "(1 - dead) * next_values", "next_values"),
        ("letting what ends in one", "dead, over",
         "terminated = terminated.any(1, keepdim=True) | terminated\n    dead, over"),
        ("treating truncation as death", "dead, over", "terminated = terminated | truncated\n    dead, over"),
        ("letting later surprises of another episode in: a", "(1 - over)", "(1 - dead)"),
        ("normalising each environment", "advantages.mean(), advantages.std()",
         "advantages.mean(0), advantages.std(0)"),
        ("normalising each row", "advantages.mean(), advantages.std()",
         "advantages.mean(1, True), advantages.std(1, keepdim=True)"),
        ("dividing by the variance", "advantages.std()", "advantages.var()"),
        ("dividing before the mean", "(advantages - mean) / (std + 1e-8)", "advantages / (std + 1e-8) - mean"),
        ("not taking the mean off", "(advantages - mean)", "advantages"),
        ("dividing by 0", " + 1e-8", ""),
        ("not clipping", GAIN, "(ratio * advantages).mean()"),
        ("taking the clipped term alone", GAIN, "(bounded * advantages).mean()"),
        ("taking the larger of the two", "torch.minimum", "torch.maximum"),
        ("minimising L", "return -gain", "return gain"),
        ("putting the ratio upside down", "now - old_log_probs", "old_log_probs - now"),
        ("computing both log-probs anew", "now - old_log_probs", "now - now"),
        ("leaving the exponential out", "torch.exp(now - old_log_probs)", "now - old_log_probs"),
        ("taking the sum, not the mean", GAIN, GAIN.replace("mean", "sum")),
        ("cutting the gradient of the log-probs", "torch.exp(now -", "torch.exp(now.detach() -"),
        ("leaving the critic's loss out", " + args.vf_coef * error", ""),
        ("leaving vf_coef out", "args.vf_coef * error", "error"),
        ("subtracting the critic's loss", "+ args.vf_coef", "- args.vf_coef"),
        ("comparing values with advantages", "(values - returns)", "(values - advantages)"),
        ("cutting the gradient of the values", "(values - returns)", "(values.detach() - returns)"),
        ("punishing entropy", "- args.ent_coef", "+ args.ent_coef"),
        ("leaving the entropy out", " - args.ent_coef * entropy", ""),
        ("adding up the entropies", "sum(1).mean()", "sum()"),
        ("storing the observations that actions led to", "row = [obs,", "row = [following,"),
        ("playing on from `reached`", "obs = following", "obs = reached"),
        ("choosing all actions from the first", "obs = following", "pass"),
        ("returning the observations that it began", "columns.items()}, obs", "columns.items()}, columns['obs'][0]"),
        ("taking the value of a new episode's", "agent(reached)[1]", "agent(following)[1]"),
        ("exchanging values and next_values", "values, next_values, terminated, truncated]",
         "next_values, values, terminated, truncated]"),
        ("exchanging terminated and truncated", "values, terminated, truncated]", "values, truncated, terminated]"),
        ("treating truncation as termination", "next_values, terminated, truncated]",
         "next_values, terminated | truncated, truncated]"),
        ("taking the rows in the same order", ORDER, "torch.arange(B)"),
        ("going through the rows once only", "range(args.update_epochs)", "range(1)"),
        ("drawing rows with repeats", ORDER, "torch.randint(B, (B,))"),
        ("taking all rows at once", "range(0, B, args.minibatch_size)", "[0]", "begin + args.minibatch_size", "B"),
        ("not setting gradients back", "            optimizer.zero_grad()\n", ""),
        ("computing the old log-probs anew", "log_probs[i], advantages",
         "agent(obs[i])[0].log_softmax(1)[range(len(i)), actions[i]].detach(), advantages"),
        ("shuffling each tensor by itself", "returns[i], args", "returns[torch.randperm(len(i))], args"),
        ("collecting once only", "while envs.steps < args.total_timesteps:", "if 1:"),
        ("taking no step of the optimizer", "            optimizer.step()\n", ""),
    ],
}  # fmt: skip
