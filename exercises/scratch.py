"""Milestones: a whole algorithm written from scratch, in a small script of its own, function by function."""

import types

import numpy as np
import probes
from mechanism import exercise, slopes, tensor

# --------------------------------------------------------------------------------------------------- what several use


def simple_agent(m, logits, slope):
    """An Agent for observations of one number: the policy has these logits, the value is `slope` times the number."""
    import torch

    agent = m.Agent(1, len(logits), 4)
    agent.actor, agent.critic = torch.nn.Linear(1, len(logits)), torch.nn.Linear(1, 1)
    for layer, weight, bias in ((agent.actor, 0.0, logits), (agent.critic, slope, [0.0])):
        layer.weight.data.fill_(weight)
        layer.bias.data = tensor(bias)
    return agent


def with_gradients(loss, **given):
    """(loss, its gradients for logits and for values)."""
    for name in ("logits", "values"):
        given[name].requires_grad_()
    result = loss(**given)
    return result, *slopes(result, given["logits"], given["values"])


def at_each_step(look, run):
    """look(parameters of the optimizer) at each step of an optimizer while run() runs, as a list."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    seen = []
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: seen.append(look([p for group in optimizer.param_groups for p in group["params"]]))
    )
    try:
        run()
    finally:
        hook.remove()
    return seen


def last_gradient(parameters):
    """The sum of the gradients of the last parameter, which is a bias of the last layer."""
    gradient = parameters[-1].grad
    return 0.0 if gradient is None else float(gradient.sum())


def gradients_of_train(env_id, **settings):
    """train() with a learning rate of 0: the gradient of the last bias at each step, divided by the first one."""

    def call(m):
        args = m.Args(env_id=env_id, learning_rate=0.0, quiet=True, **settings)
        seen = at_each_step(last_gradient, lambda: m.train(args))
        return [gradient / seen[0] for gradient in seen]

    return call


# ------------------------------------------------------------------------------------------------------ build-reinforce


def played(end, slope=2.0):
    """play_episode in Walk, where the value of a state is so many times its number; the policy takes action 1."""
    return lambda m: m.play_episode(agent=simple_agent(m, [0.0, 50.0], slope), env=probes.Walk(end))


def shares_of_actions(m):
    """300 episodes in Walk, of a policy that takes action 1 three times in four."""
    import torch

    torch.manual_seed(1)
    env, share = probes.Walk(), 0.0
    agent = simple_agent(m, [0.0, 1.0986123], 0.0)  # e^1.0986 = 3
    for _ in range(300):
        _, actions, _, _ = m.play_episode(agent=agent, env=env)
        share += float(actions.float().mean()) / 300
    return share, sum(env.actions) / len(env.actions)


def reinforce_step(part):
    """A part of (loss, gradient of the logits, gradient of the values) of two steps.

    Both actions are equally likely in the first; the second has logits 0 and log 3, so its actions have 1/4 and 3/4.
    """

    def call(m):
        given = {"actions": tensor(np.array([1, 0])), "returns": tensor([5.0, 1.0]), "vf_coef": 0.25}
        given |= {"logits": tensor([[0.0, 0.0], [0.0, 1.0986123]]), "values": tensor([1.0, 3.0])}
        return with_gradients(m.reinforce_loss, **given)[part]

    return call


def discounted(last_value):
    """compute_returns of the rewards 1, 2, 3 with gamma 0.5."""
    return lambda m: m.compute_returns(rewards=tensor([1.0, 2.0, 3.0]), last_value=last_value, gamma=0.5)


def random_reinforce(m, rng):
    rows, actions = rng.integers(1, 6), rng.integers(2, 5)
    returns = m.compute_returns(rewards=tensor(rng.normal(size=rows)), last_value=rng.normal(), gamma=rng.random())
    given = {"logits": tensor(rng.normal(size=(rows, actions))), "values": tensor(rng.normal(size=rows))}
    given |= {"actions": tensor(rng.integers(actions, size=rows)), "returns": tensor(rng.normal(size=rows))}
    loss = with_gradients(m.reinforce_loss, **given, vf_coef=rng.random())
    return returns, *loss, played(rng.choice(["terminated", "truncated"]), rng.normal())(m)


exercise(
    "build-reinforce",
    topic="milestone: REINFORCE with a baseline, from scratch",
    cut="exercises/scripts/build_reinforce.py: compute_returns, reinforce_loss, play_episode, train",
    course="week 6, 120 minutes",
    task="write the algorithm: environment, networks and evaluation are given above. Write the functions one by one, "
    "and after each of them let check.py build-reinforce --up-to 1 judge it. agent(obs) returns logits and values; "
    "torch.distributions.Categorical(logits=…) is a policy, with sample(), log_prob() and entropy(). train makes env, "
    "agent and an optimizer (torch.optim.Adam over agent.parameters(), with args.learning_rate), then plays an episode "
    "and takes one step of the optimizer with it, while env.steps < args.total_timesteps; it ends with env.close() and "
    "returns the agent. The factor gamma^t of the book is left out, as nearly everybody does.",
    cases={
        "compute_returns: rewards 1, 2, 3, gamma 0.5, the last state is worth 0 "
        "| eq. 3.9 in the docstring: which of the returns can be worked out first?": discounted(0.0),
        "compute_returns: the same, but the last state is worth 8 | what follows the last step": discounted(8.0),
        "reinforce_loss: probabilities 1/2, 1/2 and 1/4, 3/4, actions 1, 0, returns 5, 1, values 1, 3, vf_coef "
        "0.25 "
        "| the docstring, term by term, with pencil and paper": reinforce_step(0),
        "reinforce_loss: the same; the gradient for the logits "
        "| optimizers minimise; which way does the likelihood of a good action have to go?": reinforce_step(1),
        "reinforce_loss: the same; the gradient for the values "
        "| which term the baseline learns from, and where its gradient has to be cut": reinforce_step(2),
        "play_episode: 300 episodes of a policy that takes action 1 three times in four: its share in what is "
        "returned, and in what was played "
        "| how an action is drawn": (shares_of_actions, 0.07),
        "play_episode in Walk (observations 0, 1, 2, 3, rewards 1, 2, 3), which terminates; values are twice "
        "the observation, action 1 is certain "
        "| the order of storing and stepping": played("terminated"),
        "play_episode: the same, but the episode is truncated | what last_value is where truncated is set": played(
            "truncated"
        ),
        "train in Endless (5 steps an episode), learning rate 0, 20 steps: the baseline's gradient at each "
        "step of the optimizer, divided by the first one "
        "| what happens once for each episode": gradients_of_train("Classroom/Endless-v0", total_timesteps=20),
    },
    random=random_reinforce,
    mistakes={
        "returning them in the order in which they were computed, last one first": "return returns\n -> "
        "return returns.flip(0)\n",
        "going forwards in time": (
            "compute_returns: reversed(range(len(rewards))) -> range(len(rewards))",
            "following = last_value -> following = 0.0",
        ),
        "forgetting gamma": "rewards[t] + gamma * following -> rewards[t] + following",
        "discounting the reward as well: gamma belongs to what follows": "rewards[t] + gamma * following -> "
        "gamma * (rewards[t] + following)",
        "giving each step the return of the whole episode": "return returns\n -> "
        "return returns[:1].expand(len(rewards))\n",
        "leaving last_value out": "following = last_value -> following = 0.0",
        "adding last_value without a discount": "following = last_value -> following = last_value / gamma",
        "taking the log-prob of the other action": "log_prob(actions) -> log_prob(1 - actions.clamp(max=1))",
        "leaving the baseline out: weighing by the return alone": "(log_probs * advantages) -> (log_probs * returns)",
        "adding up over the steps instead of taking the mean": (
            "(log_probs * advantages).mean() -> (log_probs * advantages).sum()",
            "((returns - values) ** 2).mean() -> ((returns - values) ** 2).sum()",
        ),
        "leaving vf_coef out": "+ vf_coef * value_loss -> + value_loss",
        "leaving the baseline's own loss out: it would never learn": "policy_loss + vf_coef * value_loss -> "
        "policy_loss",
        "subtracting the baseline's loss": "policy_loss + vf_coef -> policy_loss - vf_coef",
        "taking probabilities where their logarithms belong": "log_prob(actions) -> log_prob(actions).exp()",
        "making bad actions likelier: there is a sign too few": "policy_loss = - -> policy_loss = ",
        "cutting the gradient of the log-probs: the policy cannot learn": "log_prob(actions) -> "
        "log_prob(actions).detach()",
        "not detaching the advantage: the policy's term moves the baseline": "(returns - values).detach() -> "
        "(returns - values)",
        "cutting the gradient of the values: the baseline cannot learn": "((returns - values) ** 2).mean() -> "
        "((returns - values.detach()) ** 2).mean()",
        "always taking the likeliest action: a policy that never tries learns nothing": "torch.distributions."
        "Categorical(logits=logits).sample() -> logits.argmax()",
        "drawing all actions with equal chances": "Categorical(logits=logits).sample() -> "
        "Categorical(logits=0 * logits).sample()",
        "storing one action and playing another": "env.step(action.item()) -> "
        "env.step(torch.distributions.Categorical(logits=0 * logits).sample().item())",
        "giving the last state a value although the episode terminated": "if not terminated: -> if True:",
        "storing the observation that an action led to, not the one it was chosen from": (
            "        all_obs.append(obs)\n -> ",
            "rewards.append(float(reward)) -> rewards.append(float(reward)); all_obs.append(torch.as_tensor(obs))",
        ),
        "storing the first observation again and again": "all_obs.append(obs) -> all_obs.append((all_obs or [obs])[0])",
        "leaving out the last step": "return torch.stack(all_obs), torch.stack(actions), torch.tensor(rewards), -> "
        "return torch.stack(all_obs)[:-1], torch.stack(actions)[:-1], torch.tensor(rewards)[:-1],",
        "treating truncation as death: the clock was stopped, the last state has a value": "if not terminated: -> "
        "if not over:",
        "taking the value of the state before the last one": "agent(torch.as_tensor(obs))[1] -> agent(all_obs[-1])[1]",
        "not setting gradients back to zero: they add up": "optimizer.zero_grad() -> pass",
        "taking no step of the optimizer": "optimizer.step() -> pass",
        "taking one step only": "optimizer.step() -> optimizer.step(); break",
        "taking one step for each step of the environment": "optimizer.step() -> [optimizer.step() for _ in obs]",
    },
    learn=({"env_id": "CartPole-v1", "seed": 1, "quiet": True}, 150.0),
)


# ------------------------------------------------------------------------------------------------------------ build-dqn


def epsilons(m, steps=(0, 25, 100, 1000), **given):
    """epsilon_at in some steps, with epsilon from 1 to 0.2 within 100 steps unless other numbers are given."""
    args = m.Args(**{"epsilon_start": 1.0, "epsilon_end": 0.2, "exploration_steps": 100} | given)
    return [m.epsilon_at(step=step, args=args) for step in steps]


def linear_q(m, *slopes):
    """A QNetwork for observations of one number: an action's value is its slope times the number."""
    import torch

    network = m.QNetwork(1, len(slopes), 4)
    network.layers = torch.nn.Linear(1, len(slopes))
    network.layers.weight.data = tensor(slopes)[:, None]
    network.layers.bias.data.zero_()
    return network


def choices(epsilon):
    """The shares of four actions in 3,000 draws of choose_action; action 2 is the best one."""

    def call(m):
        rng, counts, network = np.random.default_rng(1), [0] * 4, linear_q(m, 1, 2, 4, 3)
        for _ in range(3000):
            counts[m.choose_action(network=network, obs=np.ones(1, np.float32), epsilon=epsilon, rng=rng)] += 1 / 3000
        return counts

    return call


def remembered(m, count, size=3):
    """A ReplayBuffer with this many places, to which transitions 1 to `count` were added. Odd ones terminated."""
    buffer = m.ReplayBuffer(size, 1)
    for i in range(1, count + 1):
        obs = np.full(1, i, np.float32)
        buffer.add(obs=obs, action=i % 2, reward=10.0 * i, next_obs=obs + 0.5, terminated=i % 2 == 1)
        obs += 100  # the environment may use its arrays again
    return buffer


def stored(count, size=3):
    """What is in the buffer, slot after slot."""

    def call(m):
        b = remembered(m, count, size)
        return b.obs.flatten(), b.actions, b.rewards, b.next_obs.flatten(), b.terminated

    return call


def sampled(count, batch_size=4000):
    """A large sample: share of each transition, and whether the parts of each row belong together."""

    def call(m):
        buffer = remembered(m, count)
        obs, actions, rewards, next_obs, terminated = buffer.sample(batch_size=batch_size, rng=np.random.default_rng(1))
        number = obs.flatten()
        parts = (actions == number % 2, rewards == 10 * number, next_obs.flatten() == number + 0.5)
        together = (parts[0] & parts[1] & parts[2] & (terminated == (number % 2 == 1))).all()
        return [float((number == i).float().mean()) for i in range(count + 1)], together

    return call


def dqn_step(part):
    """A part of (loss, gradients of the network's slopes, of the target's), for a batch of two with gamma 0.5.

    Q(s) = (1, 2) s, target (6, 3) s. Transitions: s 1, action 0, reward 1, s' 2; s 2, action 1, reward 2, terminated.
    """
    flags = np.array([0, 1])
    batch = lambda: (tensor([[1], [2]]), tensor(flags), tensor([1, 2]), tensor([[2], [3]]), tensor(flags == 1))
    return lambda m: dqn_gradients(m, [1, 2], [6, 3], batch(), 0.5)[part]


def dqn_gradients(m, slopes_of_q, slopes_of_target, batch, gamma):
    network, target = linear_q(m, *slopes_of_q), linear_q(m, *slopes_of_target)
    loss = m.dqn_loss(network=network, target=target, batch=batch, gamma=gamma)
    return loss, *slopes(loss, network.layers.weight, target.layers.weight)


def what_train_stores(m):
    """What train() adds to the buffer in an environment whose episodes terminate after one step, or are cut off after
    the third: (obs, reward, next_obs, terminated) of each step.
    """
    seen, add = [], m.ReplayBuffer.add

    def noting(self, obs, action, reward, next_obs, terminated):
        seen.append([float(obs[0]), reward, float(next_obs[0]), terminated])
        return add(self, obs, action, reward, next_obs, terminated)

    m.ReplayBuffer.add = noting
    try:
        m.train(m.Args(env_id="Classroom/Mixed-v0", total_timesteps=12, quiet=True))
    finally:
        m.ReplayBuffer.add = add
    return seen


def networks_of_train(m):
    """train() for 60 steps of Endless with a copy every 20 steps: what dqn_loss is called with.

    Whether network and target are one object; whether the target changes: 0 never, 1 now and then, 2 at every update.
    """
    seen, loss = [], m.dqn_loss

    def noting(network, target, batch, gamma):
        seen.append((network is target, float(sum(p.abs().sum() for p in target.parameters()))))
        return loss(network, target, batch, gamma)

    m.dqn_loss = noting
    try:
        settings = {"total_timesteps": 60, "learning_starts": 4, "train_every": 1, "target_every": 20}
        m.train(m.Args(env_id="Classroom/Endless-v0", learning_rate=0.01, quiet=True, **settings))
    finally:
        m.dqn_loss = loss
    different = len({sums for _, sums in seen})
    return any(same for same, _ in seen), 0 if different == 1 else 1 if different < 10 else 2


def updates_of_train(m):
    """train() for 40 steps of Endless, learning from step 10 on, every second step: updates; whether gradients add up.

    The learning rate is 0, and every target is near 1 plus half of a small number: so gradients stay what they are.
    """
    settings = {"total_timesteps": 40, "learning_starts": 10, "train_every": 2, "batch_size": 200, "gamma": 0.5}
    args = m.Args(env_id="Classroom/Endless-v0", learning_rate=0.0, quiet=True, **settings)
    seen = at_each_step(last_gradient, lambda: m.train(args))
    return len(seen), len(seen) > 0 and seen[-1] / seen[0] > 2


def random_dqn(m, rng):
    rows, actions = rng.integers(1, 6), rng.integers(2, 5)
    flags = tensor(rng.random(rows) < 0.4)
    given = {"rewards": tensor(rng.normal(size=rows)), "terminated": flags, "gamma": rng.random()}
    y = m.td_targets(**given, target_q=tensor(rng.normal(size=(rows, actions))))
    batch = tensor(rng.normal(size=(rows, 1))), tensor(rng.integers(actions, size=rows)), given["rewards"]
    batch = *batch, tensor(rng.normal(size=(rows, 1))), flags
    loss = dqn_gradients(m, rng.normal(size=actions), rng.normal(size=actions), batch, rng.random())
    settings = {"epsilon_start": rng.uniform(0.5, 1), "epsilon_end": rng.uniform(0, 0.5), "exploration_steps": 50}
    return y, *loss, epsilons(m, rng.integers(80, size=4).tolist(), **settings), stored(rng.integers(9), 4)(m)


BUFFER = "self.obs[slots], self.actions[slots], self.rewards[slots], self.next_obs[slots], self.terminated[slots]"
exercise(
    "build-dqn",
    topic="milestone: DQN from scratch",
    cut="exercises/scripts/build_dqn.py: epsilon_at, choose_action, ReplayBuffer.add, ReplayBuffer.sample, "
    "td_targets, dqn_loss, train",
    course="week 4, 240 minutes",
    task="write the algorithm: environment, network and evaluation are given above. Write the functions one by one, "
    "and after each of them let check.py build-dqn --up-to 1 judge it. network(obs) returns Q for each action. train "
    "makes env, two networks (make_agent twice; the target begins with the weights of the other: load_state_dict), an "
    "optimizer (torch.optim.Adam over one network's parameters, with args.learning_rate), the buffer and "
    "rng = np.random.default_rng(args.seed), and begins with env.reset(). Then, for each of args.total_timesteps "
    "steps, counted from 0: choose, step, remember; reset where an episode is over; in steps that train_every divides, "
    "not before learning_starts, one step of the optimizer; in steps that target_every divides, copy the network into "
    "the target. It ends with env.close() and returns the network.",
    cases={
        "epsilon_at steps 0, 25, 100 and 1000: from 1 to 0.2 within 100 steps "
        "| the docstring: where the line begins and where it ends": epsilons,
        "choose_action: epsilon 0, Q = 1, 2, 4, 3: shares of the actions | which side of the coin is the best action": (
            choices(0.0),
            0.05,
        ),
        "choose_action: the same with epsilon 0.4 | with probability epsilon any action, the best one too": (
            choices(0.4),
            0.05,
        ),
        "ReplayBuffer(3): transitions 1 and 2 are added (reward ten times the number, odd ones terminated) "
        "| which slot is written first": stored(2),
        "ReplayBuffer(3): transitions 1 to 5 are added | which slot is written when all are full": stored(5),
        "ReplayBuffer.sample: of 2 transitions in 3 slots: shares of slots never written, of 1, of 2; whether "
        "the parts of a row belong together "
        "| which slots hold something": (sampled(2), 0.05),
        "ReplayBuffer.sample: of the newest 3 of 5: shares of 0 (nothing) to 5 "
        "| how many slots there are to draw from when all are full": (sampled(5), 0.05),
        "td_targets: rewards 1, 2, the second terminated, gamma 0.5, target Q (3, 5) and (8, 7) "
        "| the docstring, and which dimension has the actions": lambda m: m.td_targets(
            rewards=tensor([1, 2]),
            terminated=tensor(np.array([False, True])),
            gamma=0.5,
            target_q=tensor([[3, 5], [8, 7]]),
        ),
        "dqn_loss: Q(s) = (s, 2s), target (6s, 3s), gamma 0.5; s 1, action 0, reward 1, s' 2; s 2, action 1, "
        "reward 2, terminated "
        "| which network says what, about which state": dqn_step(0),
        "dqn_loss: the same; the gradient for the slopes of Q | where the gradient has to go": dqn_step(1),
        "dqn_loss: the same; the gradient for the slopes of the target | where the gradient has to be cut": dqn_step(2),
        "train in Mixed, whose episodes terminate after one step, or are truncated after three: (obs, reward, "
        "next obs, terminated) of each of twelve transitions that are added "
        "| what is stored where an episode is over, and what the next step begins with": what_train_stores,
        "train in Endless, 40 steps, learning_starts 10, train_every 2: steps of the optimizer; whether "
        "gradients add up "
        "| when there is an update, and what happens in it": updates_of_train,
        "train in Endless, 60 steps, target_every 20: whether network and target of dqn_loss are one object; "
        "how often the target changes (0 never, 1 now and then, 2 at every update) "
        "| when the weights are copied, and where from": networks_of_train,
    },
    random=random_dqn,
    mistakes={
        "going on below epsilon_end": "min(step / args.exploration_steps, 1.0) -> step / args.exploration_steps",
        "forgetting epsilon_end: the line goes down to 0": "args.epsilon_start + done * (args.epsilon_end - "
        "args.epsilon_start) -> args.epsilon_start * (1 - done)",
        "going upwards": "done = min( -> done = 1 - min(",
        "stopping at epsilon_end too early: the line goes to 0 and is cut off": "args.epsilon_start + done * "
        "(args.epsilon_end - args.epsilon_start) -> max(args.epsilon_start * (1 - done), args.epsilon_end)",
        "exchanging epsilon and 1 - epsilon": "rng.random() < epsilon -> rng.random() > epsilon",
        "taking the lowest Q": "int(q.argmax()) -> int(q.argmin())",
        "never exploring": "rng.random() < epsilon -> False",
        "leaving the best action out of the random ones": "int(rng.integers(len(q))) -> "
        "int((int(q.argmax()) + rng.integers(1, len(q))) % len(q))",
        "exchanging obs and next_obs": "slot = self.added % self.size -> "
        "slot = self.added % self.size; obs, next_obs = next_obs, obs",
        "always writing into the same slot": "slot = self.added % self.size -> slot = 0",
        "beginning with the second slot": "slot = self.added % self.size -> slot = (self.added + 1) % self.size",
        "forgetting all that comes when the buffer is full": "slot = self.added % self.size -> "
        "slot = self.added\n        if slot >= self.size:\n            return",
        "overwriting the newest when the buffer is full": "slot = self.added % self.size -> "
        "slot = min(self.added, self.size - 1)",
        "drawing slots that were never written": "min(self.added, self.size), size -> self.size, size",
        "never drawing the newest": "min(self.added, self.size), size -> min(max(self.added - 1, 1), self.size), size",
        "drawing each part by itself: they are of different transitions": f"{BUFFER} -> "
        "[x[rng.permutation(slots)] for x in (self.obs, self.actions, self.rewards, self.next_obs, self.terminated)]",
        "never drawing the oldest: all slots hold something": "rng.integers(min(self.added, self.size), "
        "size=batch_size) "
        "-> (self.added - 1 - rng.integers(min(self.added, max(self.size - 1, 1)), size=batch_size)) % self.size",
        "bootstrapping over an end: nothing follows what terminated": ".values * ~terminated -> .values",
        "counting the next state only where the episode has terminated": ".values * ~terminated -> "
        ".values * terminated",
        "taking the maximum over the batch, not over the actions": "target_q.max(1).values -> "
        "target_q.max(0).values.max().expand(len(rewards))",
        "taking the mean of the actions": "target_q.max(1).values -> target_q.mean(1)",
        "forgetting gamma": "rewards + gamma * -> rewards +",
        "giving nothing at all where the episode terminated: the last reward counts": "return rewards + -> "
        "return rewards * ~terminated +",
        "not using the target network: y is from the network that learns": "target(next_obs)) -> network(next_obs))",
        "taking Q of the best action, not of the one that was taken": "gather(1, actions[:, None]).squeeze(1) -> "
        "max(1).values",
        "taking Q of the next state for Q(s, a)": "q = network(obs) -> q = network(next_obs)",
        "taking the sum, not the mean": "((q - y) ** 2).mean() -> ((q - y) ** 2).sum()",
        "bootstrapping from s, not from s'": "target(next_obs)) -> target(obs))",
        "cutting the gradient of Q(s, a): nothing is learnt": "squeeze(1)\n    return -> "
        "squeeze(1).detach()\n    return",
        "letting the gradient through the target: it is a number to aim at": "dqn_loss: torch.no_grad() -> "
        "torch.enable_grad()",
        "storing truncation as termination: the clock was stopped, the future has not gone": "float(reward), next_obs, "
        "terminated) -> float(reward), next_obs, terminated or truncated)",
        "storing the first observation of the next episode": (
            "        buffer.add(obs, action, float(reward), next_obs, terminated)\n        obs = next_obs\n ->         "
            "last, obs = obs, next_obs\n",
            "            obs, _ = env.reset()\n ->             obs, _ = env.reset()\n"
            "        buffer.add(last, action, float(reward), obs, terminated)\n",
        ),
        "not setting gradients back to zero: they add up": "optimizer.zero_grad() -> pass",
        "taking no notice of train_every": " and step % args.train_every == 0 -> ",
        "learning before learning_starts": "step >= args.learning_starts and -> step > 0 and",
        "taking no step of the optimizer": "optimizer.step() -> pass",
        "using one network for both": "make_agent(args), make_agent(args)\n -> "
        "make_agent(args), None\n    target = network\n",
        "never copying the network into the target": "step % args.target_every == 0 -> False",
        "copying the network into the target at every update": "step % args.target_every == 0 -> True",
    },
    learn=({"env_id": "CartPole-v1", "seed": 1, "quiet": True}, 100.0),
)


# ------------------------------------------------------------------------------------------------------------ build-ppo


def chosen(m):
    """choose_actions for 4,000 rows of probabilities 1/4, 3/4: share of action 1, largest error of a log-prob."""
    import torch

    torch.manual_seed(1)
    actions, log_probs = m.choose_actions(logits=tensor([[0.0, 1.0986123]] * 4000))  # e^1.0986 = 3
    right = tensor([0.25, 0.75]).log()[actions]
    return actions.float().mean(), (log_probs - right).abs().max()


def two_alike(terminated=(), truncated=()):
    """compute_gae of rewards 1, 3, 6, values 2, 4, 6, next values 4, 6, 8, gamma 0.5, lambda 0.8, in two environments.

    The rows that end do so in the first only.
    """

    def call(m):
        two = {"rewards": [1, 3, 6], "values": [2, 4, 6], "next_values": [4, 6, 8]}
        two = {name: tensor([[x, x] for x in numbers]) for name, numbers in two.items()}
        for name, rows in (("terminated", terminated), ("truncated", truncated)):
            two[name] = tensor(np.array([[t in rows, False] for t in range(3)]))
        return m.compute_gae(**two, gamma=0.5, gae_lambda=0.8)

    return call


def ppo_step(part, values=(0, 0, 0, 0), returns=(0, 0, 0, 0), ent_coef=0.0):
    """A part of (loss, gradient of the logits, gradient of the values) of four steps, both of whose actions have 1/2.

    Action 0 was taken in all of them, when it had the probabilities 1/4, 1, 1/4, 1: so the ratios are 2, 1/2, 2, 1/2.
    """

    def call(m):
        given = {"logits": tensor([[0, 0]] * 4), "values": tensor(values), "actions": tensor(np.zeros(4, int))}
        given |= {"old_log_probs": tensor([0.25, 1, 0.25, 1]).log(), "advantages": tensor([1, 4, -1, -2])}
        given |= {"returns": tensor(returns), "args": m.Args(clip_coef=0.25, vf_coef=0.25, ent_coef=ent_coef)}
        return with_gradients(m.ppo_loss, **given)[part]

    return call


class Turns:
    """Two environments side by side for collect. Step 1 terminates the first, step 2 truncates the second.

    Observations count the steps, but an episode that begins on the way begins with 10.
    """

    def __init__(self):
        self.steps = 0

    def step(self, actions):
        self.steps += 1
        over = np.array([self.steps == 1, self.steps == 2])
        obs = tensor([[10 if each else self.steps] for each in over])
        flags = tensor(over & [True, False]), tensor(over & [False, True])
        return obs, tensor([self.steps, -self.steps]), *flags, tensor([[self.steps]] * 2)


def collected(*names):
    """What collect() returns under these names for three steps of Turns; and the observations to go on with.

    The value of an observation is twice its number; action 1 has probability 1.
    """

    def call(m):
        given = {"agent": simple_agent(m, [0.0, 50.0], 2.0), "envs": Turns(), "obs": tensor([[0], [0]])}
        steps, obs = m.collect(**given, args=m.Args(num_envs=2, num_steps=3))
        return *(steps[name] for name in names), obs

    return call


def updated(m, look, rows, **settings):
    """look(parameters) at each step of an optimizer that changes nothing, in update() of so many rows, and which
    rows the agent was given, one after the other.

    Observations are 1, 2, …, values twice that, returns 1, 2, …; actions are 1, 0, 1, …, and so are advantages.
    Both actions have probability 1/2, and had 1 when they were taken: ratios are 1/2.
    """
    import torch

    class Noting(m.Agent):
        def forward(self, obs):
            if seen[-1:] != [obs.flatten().tolist()]:
                seen.append(obs.flatten().tolist())
            return super().forward(obs)

    torch.manual_seed(1)
    seen, numbers = [], torch.arange(1.0, rows + 1)
    agent = simple_agent(types.SimpleNamespace(Agent=Noting), [0.0, 0.0], 2.0)
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.0)
    given = {"obs": numbers[:, None], "actions": numbers.long() % 2, "log_probs": numbers * 0}
    given |= {"advantages": numbers % 2, "returns": numbers, "args": m.Args(vf_coef=0.5, ent_coef=0.0, **settings)}
    return at_each_step(look, lambda: m.update(agent=agent, optimizer=optimizer, **given)), seen


def gradients_of_update(m):
    """Three epochs over four rows at once: gradients of the weight of the critic and of the policy's logit 1."""

    def look(parameters):  # of simple_agent: weight and bias of actor and critic
        return float(parameters[2].grad), float(parameters[1].grad[1])

    return updated(m, look, 4, update_epochs=3, minibatch_size=4)[0]


def rows_of_update(m):
    """Two epochs over seven rows, two at a time: (steps, rows of each epoch in order, whether the epochs differ)."""
    steps, seen = updated(m, len, 7, update_epochs=2, minibatch_size=2)
    rows = sum(seen, [])
    return len(steps), sorted(rows[:7]), sorted(rows[7:]), rows[:7] != rows[7:]


def rollouts_of_train(m):
    """train() in Long, whose observations count the steps of an episode of nine: those of each of three rollouts."""
    seen, collect = [], m.collect

    def noting(*given, **named):
        steps, obs = collect(*given, **named)
        seen.append(steps["obs"].flatten().tolist())
        return steps, obs

    m.collect = noting
    try:
        settings = {"num_envs": 2, "num_steps": 4, "update_epochs": 1, "minibatch_size": 8}
        m.train(m.Args(env_id="Classroom/Long-v0", total_timesteps=24, quiet=True, **settings))
    finally:
        m.collect = collect
    return seen


def random_ppo(m, rng):
    shape, actions = rng.integers(1, 6, 2), rng.integers(2, 5)
    given = {name: tensor(rng.normal(size=shape)) for name in ("rewards", "values", "next_values")}
    given |= {name: tensor(rng.random(shape) < 0.35) for name in ("terminated", "truncated")}
    estimates = m.compute_gae(**given, gamma=rng.random(), gae_lambda=rng.random())
    scaled = m.normalized(advantages=tensor(5 * rng.normal(size=(2, 1 + shape[0]))))
    rows = int(rng.integers(1, 7))
    step = {name: tensor(rng.normal(size=rows)) for name in ("values", "old_log_probs", "advantages", "returns")}
    step |= {"logits": tensor(rng.normal(size=(rows, actions))), "actions": tensor(rng.integers(actions, size=rows))}
    args = m.Args(clip_coef=rng.uniform(0.05, 0.9), vf_coef=rng.random(), ent_coef=rng.random())
    return *estimates, scaled, with_gradients(m.ppo_loss, **step, args=args)


TERMS = "torch.min(ratio * advantages, clipped * advantages)"
exercise(
    "build-ppo",
    topic="milestone: PPO from scratch",
    cut="exercises/scripts/build_ppo.py: choose_actions, compute_gae, normalized, ppo_loss, collect, update, train",
    course="week 7, 300 minutes",
    task="write the algorithm: environments, networks and evaluation are given above. Write the functions one by one, "
    "and after each of them let check.py build-ppo --up-to 1 judge it. agent(obs) returns logits and values; "
    "torch.distributions.Categorical(logits=…) is a policy, with sample(), log_prob() and entropy(). Tensors have a "
    "row for each step and a column for each environment, (T, N), or one row for each of all these (B,). Where a step "
    "terminated nothing follows it, where it was truncated the next value stands for what would have followed. train "
    "makes the Environments, the agent and an optimizer (torch.optim.Adam over agent.parameters(), with "
    "args.learning_rate), begins with envs.reset(), and while envs.steps < args.total_timesteps it collects, "
    "estimates, normalizes all advantages, makes (B, …) of (T, N, …) and updates; it ends with envs.close() and "
    "returns the agent.",
    cases={
        "choose_actions: 4,000 rows of probabilities 1/4, 3/4: share of action 1, largest error of a log-prob "
        "| what is drawn, and what log_prob is asked for": (chosen, 0.04),
        "compute_gae: rewards 1, 3, 6, values 2, 4, 6, next values 4, 6, 8, gamma 0.5, lambda 0.8, in both of "
        "two environments: (advantages, returns) "
        "| delta and A in the docstring, and which row comes first": two_alike(),
        "compute_gae: the same; row 1 terminated in the first environment "
        "| the two places where an end counts": two_alike([1]),
        "compute_gae: the same; row 1 was truncated in the first environment "
        "| where truncated must count, and where it must not": two_alike([], [1]),
        "normalized: 1, 3 in the first row, 5, 7 in the second "
        "| the mean and the deviation of how many numbers": lambda m: m.normalized(advantages=tensor([[1, 3], [5, 7]])),
        "normalized: advantages that are all the same | what happens when the deviation is 0": lambda m: m.normalized(
            advantages=tensor([[2, 2], [2, 2]])
        ),
        "ppo_loss: ratios 2, 1/2, 2, 1/2, advantages 1, 4, -1, -2, clip_coef 0.25; nothing but the policy's "
        "term "
        "| eq. 7, row by row, with pencil and paper": ppo_step(0),
        "ppo_loss: the same; the gradient for the logits | which of the log-probs have a gradient": ppo_step(1),
        "ppo_loss: the same with values 2, 1, 3, 1, returns 1, vf_coef 0.25 | the second term": ppo_step(
            0, values=[2, 1, 3, 1], returns=[1, 1, 1, 1]
        ),
        "ppo_loss: the same; the gradient for the values | what the critic learns from": ppo_step(
            2, values=[2, 1, 3, 1], returns=[1, 1, 1, 1]
        ),
        "ppo_loss: the first again, with ent_coef 0.1 | the third term, and its sign": ppo_step(0, ent_coef=0.1),
        "collect: three steps in two environments whose observations count them; step 1 terminates the first, "
        "step 2 truncates the second, a new episode begins with 10: obs and actions (1 is certain); and the "
        "next obs "
        "| what is stored before a step, what after it, and what the next step begins with": collected(
            "obs", "actions"
        ),
        "collect: the same; values (twice the observation) and next_values "
        "| the difference between obs and reached": collected("values", "next_values"),
        "collect: the same; rewards, terminated and truncated | what envs.step returns, in which order": collected(
            "rewards", "terminated", "truncated"
        ),
        "update: two epochs over rows 1 to 7 in minibatches of 2: steps of the optimizer, rows of each epoch "
        "(sorted), whether the order differs "
        "| how the rows get into minibatches": rows_of_update,
        "update: three epochs over four rows at once, optimizer with a learning rate of 0: gradients of the "
        "critic's weight and of the logit of action 1 at each step "
        "| what happens in each minibatch, and which rows go into the loss together": gradients_of_update,
        "train in Endless (5 steps an episode), learning rate 0, 30 steps, 10 of them in each of three "
        "rollouts, two epochs: the critic's gradient at each step of the optimizer, divided by the first one "
        "| the order of collecting, estimating and updating": gradients_of_train(
            "Classroom/Endless-v0", total_timesteps=30, num_envs=2, num_steps=5, update_epochs=2, minibatch_size=10
        ),
        "train in Long, where observations count the steps of an episode of nine: those of three rollouts of "
        "four steps in two environments "
        "| which observations a rollout begins with": rollouts_of_train,
    },
    random=random_ppo,
    mistakes={
        "always taking the likeliest action: a policy that never tries learns nothing": "policy.sample() -> "
        "logits.argmax(-1)",
        "drawing all actions with equal chances": "policy.sample() -> "
        "torch.distributions.Categorical(logits=0 * logits).sample()",
        "returning probabilities, not their logarithms": "return actions, policy.log_prob(actions) -> "
        "return actions, policy.log_prob(actions).exp()",
        "returning the log-prob of another action than the one drawn": "return actions, policy.log_prob(actions) -> "
        "return actions, policy.log_prob(policy.sample())",
        "returning one-step surprises: nothing is added from later rows": "gamma * gae_lambda * following -> "
        "0 * following",
        "leaving lambda out": "gamma * gae_lambda * following -> gamma * following",
        "leaving gamma out of the trace": "gamma * gae_lambda * following -> gae_lambda * following",
        "going forwards in time": "reversed(range(len(rewards))) -> range(len(rewards))",
        "returning advantages as returns: the value has to be added": "return advantages, advantages + values -> "
        "return advantages, advantages",
        "bootstrapping over an end: nothing follows what terminated": "* ~terminated[t] -> * 1",
        "letting later surprises of another episode in": "* ~(terminated[t] | truncated[t]) -> * ~truncated[t]",
        "taking no notice of the end": (
            "* ~terminated[t] -> * 1",
            "* ~(terminated[t] | truncated[t]) -> * ~truncated[t]",
        ),
        "letting what ends in one environment end in all": "advantages = torch.empty_like(rewards) -> "
        "advantages = torch.empty_like(rewards)\n    terminated, truncated = terminated | terminated.any(1, True), "
        "truncated | truncated.any(1, True)",
        "treating truncation as death: the clock was stopped, the future is worth the next value": "* ~terminated[t] "
        "-> "
        "* ~(terminated[t] | truncated[t])",
        "letting later surprises of another episode in: a truncated one is over, too": "* ~(terminated[t] | "
        "truncated[t]) -> * ~terminated[t]",
        "ignoring how the last row ended": "advantages = torch.empty_like(rewards) -> advantages = "
        "torch.empty_like(rewards); terminated, truncated = terminated.clone(), truncated.clone(); "
        "terminated[-1] = truncated[-1] = False",
        "normalising each environment by itself: over the wrong axis": "(advantages - advantages.mean()) / "
        "(advantages.std() + 1e-8) -> (advantages - advantages.mean(0)) / (advantages.std(0) + 1e-8)",
        "normalising each row by itself: over the wrong axis": "(advantages - advantages.mean()) / (advantages.std() + "
        "1e-8) -> (advantages - advantages.mean(1, True)) / (advantages.std(1, keepdim=True) + 1e-8)",
        "dividing by the variance": "(advantages.std() + -> (advantages.var() +",
        "dividing before the mean is taken off": "(advantages - advantages.mean()) / (advantages.std() + 1e-8) -> "
        "advantages / (advantages.std() + 1e-8) - advantages.mean()",
        "not taking the mean off": "(advantages - advantages.mean()) -> advantages",
        "dividing by 0: add something small to the deviation": " + 1e-8 -> ",
        "not clipping": f"{TERMS} -> (ratio * advantages)",
        "taking the clipped term alone": f"{TERMS} -> (clipped * advantages)",
        "taking the larger of the two terms": "torch.min(ratio -> torch.max(ratio",
        "minimising L: it is to become high": "policy_loss = - -> policy_loss = ",
        "putting the ratio upside down": "(policy.log_prob(actions) - old_log_probs) -> "
        "(old_log_probs - policy.log_prob(actions))",
        "computing both log-probs anew: the ratio is always 1": "(policy.log_prob(actions) - old_log_probs) -> "
        "(policy.log_prob(actions) - policy.log_prob(actions).detach())",
        "leaving the exponential out": "old_log_probs).exp() -> old_log_probs)",
        "taking the sum, not the mean": f"{TERMS}.mean() -> {TERMS}.sum()",
        "comparing values with advantages, not with returns": "((returns - values) ** 2) -> "
        "((advantages - values) ** 2)",
        "cutting the gradient of the log-probs: the policy cannot learn": "policy.log_prob(actions) - -> "
        "policy.log_prob(actions).detach() -",
        "leaving the critic's loss out: it would never learn": " + args.vf_coef * value_loss -> ",
        "leaving vf_coef out": "args.vf_coef * value_loss -> value_loss",
        "subtracting the critic's loss": "+ args.vf_coef * -> - args.vf_coef *",
        "cutting the gradient of the values: the critic cannot learn": "(returns - values) -> "
        "(returns - values.detach())",
        "punishing entropy: a term that is to be high has to be subtracted from a loss": "- args.ent_coef -> "
        "+ args.ent_coef",
        "leaving the entropy out": " - args.ent_coef * policy.entropy().mean() -> ",
        "adding up the entropies of all rows": "policy.entropy().mean() -> policy.entropy().sum()",
        "storing the observations that actions led to, not those they were chosen from": '"obs": obs, -> '
        '"obs": next_obs,',
        "playing on from `reached`: where an episode has ended, a new one has begun": "obs = next_obs -> obs = reached",
        "choosing all actions from the first observations": "obs = next_obs -> last_obs = next_obs",
        "returning the observations that it began with": "for name in steps[0]}, obs -> "
        'for name in steps[0]}, steps[0]["obs"]',
        "taking the value of a new episode's first observation for what the step led to": "agent(reached) -> "
        "agent(next_obs)",
        "exchanging values and next_values": (
            '"values": values, -> "values": next_values,',
            '"next_values": next_values, -> "next_values": values,',
        ),
        "exchanging terminated and truncated": "next_obs, rewards, terminated, truncated, reached = -> "
        "next_obs, rewards, truncated, terminated, reached =",
        "treating truncation as termination": '"terminated": terminated, -> "terminated": terminated | truncated,',
        "taking no step of the optimizer": "optimizer.step() -> pass",
        "taking the rows in the same order in each epoch": "torch.randperm(len(obs)) -> torch.arange(len(obs))",
        "going through the rows once only": "range(args.update_epochs) -> range(1)",
        "drawing rows with repeats: some are in several minibatches, some in none": "torch.randperm(len(obs)) -> "
        "torch.randint(len(obs), (len(obs),))",
        "taking all rows at once": ".split(args.minibatch_size) -> .split(len(obs))",
        "dropping the last minibatch": ".split(args.minibatch_size): -> "
        ".split(args.minibatch_size)[: len(obs) // args.minibatch_size]:",
        "not setting gradients back to zero: they add up": "optimizer.zero_grad() -> pass",
        "shuffling each tensor by itself: each row mixes several steps": "log_probs[rows], advantages[rows], "
        "returns[rows] -> log_probs[rows], advantages[rows.flip(0)], returns[rows.roll(1)]",
        "collecting once only": "        update(agent, optimizer, *(x.flatten(0, 1) for x in batch), args) ->         "
        "update(agent, optimizer, *(x.flatten(0, 1) for x in batch), args)\n        break",
        "resetting the environments before each rollout: most episodes would never be finished": "rollout, obs = "
        "collect(agent, envs, obs, args) -> rollout, _ = collect(agent, envs, envs.reset(), args)",
    },
    learn=({"env_id": "CartPole-v1", "seed": 1, "quiet": True}, 400.0),
)
