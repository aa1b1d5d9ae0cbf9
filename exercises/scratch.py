"""Milestones: a whole algorithm written from scratch, in a small script of its own, function by function."""

import inspect
from operator import attrgetter
from types import SimpleNamespace
from unittest import mock

import numpy as np
from inputs import FLAGS, ROLLOUT, flags, normal, rollout, share, slopes, tensor, tensors, together, whole
from mechanism import exercise

LOG_3 = 1.0986123
CARTPOLE = {"env_id": "CartPole-v1", "seed": 1, "quiet": True}


def simple_agent(Agent, logits, slope):
    """An Agent for observations of one number: the policy has these logits, the value is `slope` times the number."""
    import torch

    agent = Agent(1, len(logits), 4)
    agent.actor, agent.critic = torch.nn.Linear(1, len(logits)), torch.nn.Linear(1, 1)
    for layer, weight, bias in ((agent.actor, 0.0, logits), (agent.critic, slope, [0.0])):
        layer.weight.data.fill_(weight)
        layer.bias.data = tensor(bias)
    return agent


def at_each_step(look, run):
    """look(parameters of the optimizer) at each step of an optimizer while run() runs, as a list."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    seen = []
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: seen.append(look(optimizer.param_groups[0]["params"]))
    )
    try:
        run()
    finally:
        hook.remove()
    return seen


def gradients_of_train(m, env_id, **settings):
    """train() with a learning rate of 0: the gradient of the last bias at each step, divided by the first one."""
    last = lambda parameters: float(parameters[-1].grad.sum())
    args = m.Args(env_id=env_id, learning_rate=0.0, quiet=True, **settings)
    seen = at_each_step(last, lambda: m.train(args))
    return [gradient / seen[0] for gradient in seen]


def noted(m, function, note, **settings):
    """What note(arguments, result) gives for each call of a function while train() runs, as a list."""
    owner, _, name = function.rpartition(".")
    original, seen = attrgetter(function)(m), []

    def noting(*given, **named):
        result = original(*given, **named)
        seen.append(note(list(inspect.signature(original).bind(*given, **named).arguments.values()), result))
        return result

    with mock.patch.object(attrgetter(owner)(m) if owner else m, name, noting):
        m.train(m.Args(quiet=True, **settings))
    return seen


def linear_q(m, slopes_of_q):
    """A QNetwork for observations of one number: an action's value is its slope times the number."""
    import torch

    network = m.QNetwork(1, len(slopes_of_q), 4)
    network.layers = torch.nn.Linear(1, len(slopes_of_q))
    network.layers.weight.data = tensor(slopes_of_q)[:, None]
    network.layers.bias.data.zero_()
    return network


def choices(m):
    """The shares of four actions in 3,000 draws of choose_action; action 2 is the best one."""
    rng, counts, network = np.random.default_rng(1), [0] * 4, linear_q(m, [1, 2, 4, 3])
    for _ in range(3000):
        counts[m.choose_action(network=network, obs=np.ones(1, np.float32), epsilon=0.4, rng=rng)] += 1 / 3000
    return counts


def remembered(m, count):
    """A ReplayBuffer with three places, to which transitions 1 to `count` were added. Odd ones terminated."""
    buffer = m.ReplayBuffer(3, 1)
    for i in range(1, count + 1):
        obs = np.full(1, i, np.float32)
        buffer.add(obs=obs, action=i % 2, reward=10.0 * i, next_obs=obs + 0.5, terminated=i % 2 == 1)
        obs += 100  # the environment may use its arrays again
    return buffer


def stored(count):
    """What is in the buffer, slot after slot."""

    def call(m):
        b = remembered(m, count)
        return b.obs.flatten(), b.actions, b.rewards, b.next_obs.flatten(), b.terminated

    return call


def sampled(count):
    """A large sample: share of each transition, and whether the parts of each row belong together."""

    def call(m):
        rng = np.random.default_rng(1)
        obs, actions, rewards, next_obs, terminated = remembered(m, count).sample(batch_size=4000, rng=rng)
        number = obs.flatten()
        parts = actions == number % 2, rewards == 10 * number, next_obs.flatten() == number + 0.5
        return [(number == i).float().mean() for i in range(count + 1)], [part.all() for part in parts]

    return call


def dqn_step(m, q, target_q, obs, actions, rewards, next_obs, terminated, gamma):
    """(the loss, its slopes by those of the network, and of the target network)."""
    network, target = linear_q(m, q), linear_q(m, target_q)
    batch = tensor(obs), tensor(np.array(actions)), tensor(rewards), tensor(next_obs), tensor(np.array(terminated))
    loss = m.dqn_loss(network=network, target=target, batch=batch, gamma=gamma)
    return loss, slopes(loss, network.layers.weight, target.layers.weight)


def random_dqn(m, rng):
    rows, actions = rng.integers(1, 6), rng.integers(2, 5)
    q, target_q = rng.normal(size=(2, actions))
    obs, next_obs = rng.normal(size=(2, rows, 1))
    given = {"actions": rng.integers(actions, size=rows), "rewards": rng.normal(size=rows), "gamma": rng.random()}
    loss = dqn_step(m, q, target_q, obs, next_obs=next_obs, terminated=rng.random(rows) < 0.4, **given)
    return loss, stored(rng.integers(9))(m)


def networks_of_train(m):
    """Whether network and target of dqn_loss are one object; whether the target changes: 0 never, 1 now and then, 2
    always.
    """
    note = lambda given, _: (given[0] is given[1], float(sum(p.abs().sum() for p in given[1].parameters())))
    settings = {"total_timesteps": 60, "learning_starts": 4, "train_every": 1, "target_every": 20}
    seen = noted(m, "dqn_loss", note, env_id="Classroom/Endless-v0", learning_rate=0.01, **settings)
    different = len({sums for _, sums in seen})
    return any(same for same, _ in seen), 0 if different == 1 else 1 if different < 10 else 2


def updates_of_train(m):
    """train() for 40 steps of Endless, learning from step 10 on, every second step: updates; whether gradients add up.

    The learning rate is 0, and every target is near 1 plus half of a small number: so gradients stay what they are.
    """
    settings = {"total_timesteps": 40, "learning_starts": 10, "train_every": 2, "batch_size": 200, "gamma": 0.5}
    seen = gradients_of_train(m, "Classroom/Endless-v0", **settings)
    return len(seen), seen[-1] > 2


def transition(given, result):
    """What was given to ReplayBuffer.add: (obs, reward, next_obs, terminated)."""
    _, obs, _, reward, next_obs, terminated = given
    return obs[0], reward, next_obs[0], terminated


EPSILON = SimpleNamespace(epsilon_start=1.0, epsilon_end=0.2, exploration_steps=100)
BUFFER = "self.obs[slots], self.actions[slots], self.rewards[slots], self.next_obs[slots], self.terminated[slots]"
exercise(
    "build-dqn",
    course="week 4, 240 minutes, hard: milestone: DQN from scratch",
    cut="exercises/scripts/build_dqn.py: epsilon_at, choose_action, ReplayBuffer.add, ReplayBuffer.sample, "
    "td_targets, dqn_loss, train",
    task="environment, network and evaluation are given above. Write the functions one by one, and after each of "
    "them let check.py build-dqn --up-to 1 judge it. | epsilon_at: write the share of random actions in a "
    "step. | choose_action: network(obs) returns Q for each action. Draw with `rng` only. | ReplayBuffer.add: "
    "remember one step. | ReplayBuffer.sample: draw a batch with `rng`. | td_targets: nothing follows a step "
    "that terminated. | dqn_loss: compare Q of the actions taken with the targets. | train: make env, two "
    "networks (make_agent twice; the target begins with the weights of the other: load_state_dict), an "
    "optimizer (torch.optim.Adam over one network's parameters, with args.learning_rate), the buffer and rng "
    "= np.random.default_rng(args.seed), and begin with env.reset(). Then, for each of args.total_timesteps "
    "steps, counted from 0: choose, step, remember. Reset where an episode is over. In steps that train_every "
    "divides, not before learning_starts, take one step of the optimizer. In steps that target_every divides, "
    "copy the network into the target. End with env.close() and return the network.",
    cases={
        "epsilon from 1 to 0.2 within 100 steps | the docstring: where the line begins and where it ends": together(
            *[tensors("epsilon_at", step=step, args=EPSILON) for step in (25, 0, 100, 1000)]
        ),
        "choose_action: epsilon 0.4, Q = 1, 2, 4, 3: shares of the actions | with probability epsilon any action, the "
        "best one too": (choices, 0.05),
        "ReplayBuffer(3): transitions 1 and 2 are added (reward ten times the number, odd ones terminated) "
        "| which slot is written first": stored(2),
        "ReplayBuffer(3): transitions 1 to 5 are added | which slot is written when all are full": stored(5),
        "ReplayBuffer.sample: of 2 transitions in 3 slots: shares of slots never written, of 1, of 2; whether "
        "the parts of a row belong together | which slots hold something": (sampled(2), 0.05),
        "ReplayBuffer.sample: of the newest 3 of 5 | how many slots there are to draw from": (sampled(5), 0.05),
        "two rows | the docstring, and which dimension has the actions": tensors(
            "td_targets", rewards=[1, 2], terminated=[False, True], gamma=0.5, target_q=[[3, 5], [8, 7]]
        ),
        "dqn_loss: Q(s) = (s, 2s), target (6s, 3s), gamma 0.5; s 1, action 0, reward 1, s' 2; s 2, action 1, "
        "reward 2, terminated. (loss, its slopes by those of Q and of the target) "
        "| which network says what, about which state, and where the gradient has to go": lambda m: dqn_step(
            m, [1, 2], [6, 3], [[1], [2]], [0, 1], [1, 2], [[2], [3]], [False, True], 0.5
        ),
        "train for seven steps in Walk, whose episodes terminate after three, and where they are truncated instead: "
        "(obs, reward, next obs, terminated) of all transitions that are added | what a step begins with": lambda m: [
            noted(m, "ReplayBuffer.add", transition, env_id=f"Classroom/{walk}-v0", total_timesteps=7)
            for walk in ("Walk", "CutWalk")
        ],
        "train in Endless, 40 steps, learning_starts 10, train_every 2: steps of the optimizer; whether "
        "gradients add up | when there is an update, and what happens in it": updates_of_train,
        "train in Endless, 60 steps, target_every 20: whether network and target of dqn_loss are one object; "
        "how often the target changes (0 never, 1 now and then, 2 at every update) "
        "| when the weights are copied, and where from": networks_of_train,
    },
    random=together(
        tensors("td_targets", rewards=normal("B"), terminated=flags("B"), gamma=share, target_q=normal("BA")),
        tensors("epsilon_at", step=whole(0, 150), args=EPSILON),
        random_dqn,
    ),
    mistakes={
        "stopping at epsilon_end too early: the line goes to 0 and is cut off": "args.epsilon_start + done * "
        "(args.epsilon_end - args.epsilon_start) -> max(args.epsilon_start * (1 - done), args.epsilon_end)",
        "leaving the best action out of the random ones": "int(rng.integers(len(q))) -> "
        "int((int(q.argmax()) + rng.integers(1, len(q))) % len(q))",
        "forgetting all that comes when the buffer is full": "slot = self.added % self.size -> "
        "slot = self.added\n        if slot >= self.size:\n            return",
        "drawing slots that were never written": "min(self.added, self.size), size -> self.size, size",
        "drawing each part by itself: they are of different transitions": f"{BUFFER} -> "
        "[x[rng.permutation(slots)] for x in (self.obs, self.actions, self.rewards, self.next_obs, self.terminated)]",
        "bootstrapping over an end: nothing follows what terminated": ".values * ~terminated -> .values",
        "not using the target network: y is from the network that learns": "target(next_obs)) -> network(next_obs))",
        "taking Q of the best action, not of the one that was taken": "gather(1, actions[:, None]).squeeze(1) -> "
        "max(1).values",
        "letting the gradient through the target: it is a number to aim at": "dqn_loss: torch.no_grad() -> "
        "torch.enable_grad()",
        "storing truncation as termination: the clock was stopped, the future has not gone": "float(reward), next_obs, "
        "terminated) -> float(reward), next_obs, terminated or truncated)",
        "not setting gradients back to zero: they add up": "optimizer.zero_grad() -> pass",
        "using one network for both": "make_agent(args), make_agent(args)\n -> "
        "make_agent(args), None\n    target = network\n",
        "never copying the network into the target": "step % args.target_every == 0 -> False",
        "copying the network into the target at every update": "step % args.target_every == 0 -> True",
    },
    learn=(CARTPOLE, 100.0),
)


def chosen(m):
    """choose_actions for 4,000 rows of probabilities 1/4, 3/4: share of action 1, largest error of a log-prob."""
    import torch

    torch.manual_seed(1)
    actions, log_probs = m.choose_actions(logits=tensor([[0.0, LOG_3]] * 4000))
    right = tensor([0.25, 0.75]).log()[actions]
    return actions.float().mean(), (log_probs - right).abs().max()


def ppo_step(values, returns, ent_coef):
    """Four steps with action 0, which has 1/2; when it was taken, 1/4, 1, 1/4, 1: so the ratios are 2, 1/2, 2, 1/2."""
    given = {"logits": [[0.0, 0.0]] * 4, "values": values, "actions": np.zeros(4, int), "returns": returns}
    given |= {"old_log_probs": np.log([0.25, 1, 0.25, 1]), "advantages": [1, 4, -1, -2]}
    args = SimpleNamespace(clip_coef=0.25, vf_coef=0.25, ent_coef=ent_coef)
    return tensors("ppo_loss", by=["logits", "values"], **given, args=args)


def random_args(draw):
    return SimpleNamespace(clip_coef=draw.rng.uniform(0.05, 0.9), vf_coef=draw.rng.random(), ent_coef=draw.rng.random())


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
        ends = tensor(over & [True, False]), tensor(over & [False, True])
        return obs, tensor([self.steps, -self.steps]), *ends, tensor([[self.steps]] * 2)


def collected(*names):
    """What collect() returns under these names for three steps of Turns; and the observations to go on with.

    The value of an observation is twice its number; action 1 has probability 1.
    """

    def call(m):
        given = {"agent": simple_agent(m.Agent, [0.0, 50.0], 2.0), "envs": Turns(), "obs": tensor([[0], [0]])}
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
    agent = simple_agent(Noting, [0.0, 0.0], 2.0)
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.0)
    given = {"obs": numbers[:, None], "actions": numbers.long() % 2, "log_probs": numbers * 0}
    given |= {"advantages": numbers % 2, "returns": numbers, "args": m.Args(vf_coef=0.5, ent_coef=0.0, **settings)}
    return at_each_step(look, lambda: m.update(agent=agent, optimizer=optimizer, **given)), seen


def gradients_of_update(m):
    """Three epochs over four rows at once: gradients of the weight of the critic and of the policy's logit 1."""
    look = lambda parameters: (float(parameters[2].grad), float(parameters[1].grad[1]))
    return updated(m, look, 4, update_epochs=3, minibatch_size=4)[0]


def rows_of_update(m):
    """Two epochs over seven rows, two at a time: (steps, rows of each epoch in order, whether the epochs differ)."""
    steps, seen = updated(m, len, 7, update_epochs=2, minibatch_size=2)
    rows = sum(seen, [])
    return len(steps), sorted(rows[:7]), sorted(rows[7:]), rows[:7] != rows[7:]


WALK = {"env_id": "Classroom/Walk-v0", "total_timesteps": 12, "num_envs": 2, "num_steps": 2, "update_epochs": 1}
ROWS = dict.fromkeys(("values", "old_log_probs", "advantages", "returns"), normal("B"))
BATCH = ROWS | {"logits": normal("BA"), "actions": whole(0, "A", "B"), "args": random_args}
TERMS = "torch.min(ratio * advantages, clipped * advantages)"
exercise(
    "build-ppo",
    course="week 7, 300 minutes, hard: milestone: PPO from scratch",
    cut="exercises/scripts/build_ppo.py: choose_actions, compute_gae, normalized, ppo_loss, collect, update, train",
    task="environments, networks and evaluation are given above. Write the functions one by one, and after each of "
    "them let check.py build-ppo --up-to 1 judge it. Tensors have a row for each step and a column for each "
    "environment, (T, N), or one row for each of all these (B,). | choose_actions: "
    "torch.distributions.Categorical(logits=…) is a policy, with sample(), log_prob() and entropy(). | "
    "compute_gae: where a step terminated nothing follows it, where it was truncated the next value stands "
    "for what would have followed. | normalized: mind a deviation of 0. | ppo_loss: agent(obs) has returned "
    "these logits and values. | collect: note what you act on before the step, and what the step returns. | "
    "update: several epochs, each over all rows in minibatches of another order; call agent(obs) for them. | "
    "train: make the Environments, the agent and an optimizer (torch.optim.Adam over agent.parameters(), with "
    "args.learning_rate), and begin with envs.reset(). While envs.steps < args.total_timesteps collect, "
    "estimate, normalize all advantages, make (B, …) of (T, N, …) and update. End with envs.close() and "
    "return the agent.",
    cases={
        "choose_actions: 4,000 rows of probabilities 1/4, 3/4: share of action 1, largest error of a log-prob "
        "| what is drawn, and what log_prob is asked for": (chosen, 0.04),
        "row 1 terminated in one environment, was truncated in the other | the two places where an end counts": tensors(
            "compute_gae",
            **rollout({"rewards": [1, 3, 6], "values": [2, 4, 6], "next_values": [4, 6, 8]}, ([1], []), ([], [1])),
            gamma=0.5,
            gae_lambda=0.8,
        ),
        "two rows | the mean and the deviation of how many numbers": tensors("normalized", advantages=[[1, 3], [5, 7]]),
        "all the same | what happens when the deviation is 0": tensors("normalized", advantages=[[2, 2], [2, 2]]),
        "ratios 2, 1/2, 2, 1/2, clip_coef 0.25, nothing but the policy's term: (loss, its slopes by logits and values) "
        "| eq. 7, row by row, with pencil and paper": ppo_step([0] * 4, [0] * 4, 0.0),
        "the same with vf_coef 0.25 and ent_coef 0.1 | the second term and the third, and their signs": ppo_step(
            [2, 1, 3, 1], [1] * 4, 0.1
        ),
        "collect: three steps in two environments whose observations count them; step 1 terminates the first, step 2 "
        "truncates the second, a new episode begins with 10; values are twice the observation: obs, values, "
        "next_values; and the next obs | what is stored before a step, and the difference between obs and reached": (
            collected("obs", "values", "next_values")
        ),
        "collect: the same; actions (1 is certain), rewards, terminated and truncated | what envs.step returns": (
            collected("actions", "rewards", "terminated", "truncated")
        ),
        "update: two epochs over rows 1 to 7 in minibatches of 2: steps of the optimizer, rows of each epoch "
        "(sorted), whether the order differs | how the rows get into minibatches": rows_of_update,
        "update: three epochs over four rows at once, optimizer with a learning rate of 0: gradients of the "
        "critic's weight and of the logit of action 1 at each step "
        "| what happens in each minibatch, and which rows go into the loss together": gradients_of_update,
        "train in Walk, where observations count the steps of an episode of three: those of three rollouts of "
        "two steps in two environments | which observations a rollout begins with": lambda m: noted(
            m, "collect", lambda given, result: result[0]["obs"], minibatch_size=4, **WALK
        ),
        "train in Walk: mean and deviation of the advantages that update is given | what is normalized, and when": (
            lambda m: noted(m, "update", lambda given, _: (given[5].mean(), given[5].std()), minibatch_size=4, **WALK)
        ),
    },
    random=together(
        tensors("compute_gae", **ROLLOUT, **FLAGS, gamma=share, gae_lambda=share),
        tensors("normalized", advantages=normal("2N", 5.0)),
        tensors("ppo_loss", by=["logits", "values"], **BATCH),
    ),
    mistakes={
        "always taking the likeliest action: a policy that never tries learns nothing": "policy.sample() -> "
        "logits.argmax(-1)",
        "bootstrapping over an end: nothing follows what terminated": "* ~terminated[t] -> * 1",
        "taking the value of the next row, which need not be where the step led to": "next_values[t] * -> "
        "torch.cat([values[1:], next_values[-1:]])[t] *",
        "letting later surprises of another episode in": "* ~(terminated[t] | truncated[t]) -> * ~truncated[t]",
        "treating truncation as death: the clock was stopped, the future is worth the next value": "* ~terminated[t] "
        "-> * ~(terminated[t] | truncated[t])",
        "ignoring how the last row ended": "advantages = torch.empty_like(rewards) -> advantages = "
        "torch.empty_like(rewards); terminated, truncated = terminated.clone(), truncated.clone(); "
        "terminated[-1] = truncated[-1] = False",
        "dividing by 0: add something small to the deviation": " + 1e-8 -> ",
        "taking the clipped term alone": f"{TERMS} -> (clipped * advantages)",
        "punishing entropy: a term that is to be high has to be subtracted from a loss": "- args.ent_coef -> "
        "+ args.ent_coef",
        "storing the observations that actions led to, not those they were chosen from": "append((obs, -> "
        "append((next_obs,",
        "playing on from `reached`: where an episode has ended, a new one has begun": "obs = next_obs -> obs = reached",
        "taking the value of a new episode's first observation for what the step led to": "agent(reached) -> "
        "agent(next_obs)",
        "taking the rows in the same order in each epoch": "torch.randperm(len(obs)) -> torch.arange(len(obs))",
        "dropping the last minibatch": ".split(args.minibatch_size): -> "
        ".split(args.minibatch_size)[: len(obs) // args.minibatch_size]:",
        "not setting gradients back to zero: they add up": "optimizer.zero_grad() -> pass",
        "collecting once only": "        update(agent, optimizer, *(x.flatten(0, 1) for x in batch), args) ->         "
        "update(agent, optimizer, *(x.flatten(0, 1) for x in batch), args)\n        break",
        "resetting the environments before each rollout: most episodes would never be finished": "rollout, obs = "
        "collect(agent, envs, obs, args) -> rollout, _ = collect(agent, envs, envs.reset(), args)",
    },
    learn=(CARTPOLE, 400.0),
)
