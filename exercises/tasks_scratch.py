"""The table of milestones: a whole algorithm written from scratch, in a small script of its own.

Each is judged in stages: its functions one after the other on fixed numbers, the whole in probe environments, and then
by learning CartPole. See tasks.py for how a table is written.
"""

import types

import probes
from forms import Case, Learn, close, exercise, tensor

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
    """Call loss(**given), where `logits` and `values` ask for gradients. Returns (loss, their gradients)."""
    import torch

    for name in ("logits", "values"):
        given[name].requires_grad_()
    result = loss(**given)
    result.backward()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in (given["logits"], given["values"])]
    return (result, *gradients)


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


def actor_critic_probe(**settings):
    """A probe in three environments: what depends on the observation, on a later reward, and on a stopped clock."""

    def probe(m, train):
        score = train(env_id="Classroom/Cue-v0", **settings).summary["eval_return_mean"]
        if score < 1:
            return (
                f"in Cue, one step long, the action that goes with the observation pays 1; your agent gets {score}.\n"
                "Look next at the sign of the loss, and at whether observations and actions belong together."
            )
        later = train(env_id="Classroom/Later-v0", gamma=0.5, **settings)
        first, second = later.agent.critic(tensor([[0.0], [1.0]])).flatten().tolist()
        if later.summary["eval_return_mean"] < 1 or not close([first, second], [0.5, 1.0], 0.2):
            return (
                "Later pays 1 in its second and last step for action 1, so with gamma 0.5 its states are worth 0.5 and "
                f"1; your agent gets {later.summary['eval_return_mean']}, and its values are {first:.2f} and "
                f"{second:.2f}.\nLook next at how a reward gets from step to step."
            )
        value = train(env_id="Classroom/Endless-v0", gamma=0.5, **settings).agent.critic(tensor([0.0])).item()
        if not close(value, 2.0, 0.2):
            return (
                "Endless pays 1 in every step and is truncated after five, so with gamma 0.5 its state is worth "
                f"1 + 0.5 + 0.25 + … = 2; your critic says {value:.2f}.\n1.6 or 1.7 would be: truncation taken for the "
                "end. Look next at the last step of an episode."
            )

    return probe


# ------------------------------------------------------------------------------------------------------ build-reinforce


def played(end):
    """play_episode in Walk, where the value of a state is twice its number; the policy takes action 1."""

    def call(m):
        return m.play_episode(agent=simple_agent(m, [0.0, 50.0], 2.0), env=probes.Walk(end))

    return call


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
        given = {"actions": tensor([1, 0]).long(), "returns": tensor([5.0, 1.0]), "vf_coef": 0.25}
        given |= {"logits": tensor([[0.0, 0.0], [0.0, 1.0986123]]), "values": tensor([1.0, 3.0])}
        return with_gradients(m.reinforce_loss, **given)[part]

    return call


def returns_of(last_value):
    """compute_returns of the rewards 1, 2, 3 with gamma 0.5."""
    return lambda m: m.compute_returns(rewards=tensor([1.0, 2.0, 3.0]), last_value=last_value, gamma=0.5)


exercise(
    "build-reinforce",
    topic="milestone: REINFORCE with a baseline, from scratch",
    script="exercises/scripts/build_reinforce.py",
    blanks=("compute_returns", "reinforce_loss", "play_episode", "train"),
    gives={
        "compute_returns": "float32 tensor",
        "reinforce_loss": "float32 tensor",
        "play_episode": ("float32 tensor", "int64 tensor", "float32 tensor", "float"),
    },
    difficulty=2,
    minutes=120,
    task="write the algorithm: environment, networks and evaluation are given above. Write the functions one by one, "
    "and after each of them let check.py build-reinforce --up-to 1 judge it. agent(obs) returns logits and values; "
    "torch.distributions.Categorical(logits=…) is a policy, with sample(), log_prob() and entropy(). train makes env, "
    "agent and an optimizer (torch.optim.Adam over agent.parameters(), with args.learning_rate), then plays an episode "
    "and takes one step of the optimizer with it, while env.steps < args.total_timesteps; it ends with env.close() and "
    "returns the agent. The factor gamma^t of the book is left out, as nearly everybody does.",
    cases=[
        Case(
            "compute_returns: rewards 1, 2, 3, gamma 0.5, the last state is worth 0",
            returns_of(0.0),
            [2.75, 3.5, 3.0],  # 3, 2 + 0.5 x 3, 1 + 0.5 x 3.5
            {
                "returning them in the order in which they were computed, last one first": [3.0, 3.5, 2.75],
                "going forwards in time": [1.0, 2.5, 4.25],  # 1, 2 + 0.5 x 1, 3 + 0.5 x 2.5
                "forgetting gamma": [6.0, 5.0, 3.0],
                "discounting the reward as well: gamma belongs to what follows": [1.375, 1.75, 1.5],  # half of each
                "giving each step the return of the whole episode": [2.75, 2.75, 2.75],
            },
            "eq. 3.9 in the docstring: which of the returns can be worked out first?",
        ),
        Case(
            "compute_returns: the same, but the last state is worth 8",
            returns_of(8.0),
            [3.75, 5.5, 7.0],  # 3 + 0.5 x 8, 2 + 0.5 x 7, 1 + 0.5 x 5.5
            {
                "leaving last_value out": [2.75, 3.5, 3.0],
                "adding last_value without a discount": [4.75, 7.5, 11.0],  # 3 + 8, 2 + 0.5 x 11, 1 + 0.5 x 7.5
            },
            "what follows the last step",
        ),
        Case(
            "reinforce_loss: probabilities 1/2, 1/2 and 1/4, 3/4, actions 1, 0, returns 5, 1, values 1, 3, vf_coef "
            "0.25",
            reinforce_step(0),
            # advantages 4, -2: -(4 log 1/2 - 2 log 1/4) / 2 = -(-2.7726 + 2.7726) / 2 = 0; 0.25 (16 + 4) / 2 = 2.5
            2.5,
            {
                "taking the log-prob of the other action": 3.5986,  # -(-2.7726 - 2 log 3/4) / 2 = 1.0986
                "leaving the baseline out: weighing by the return alone": 4.9260,  # (5 x 0.6931 + 1.3863) / 2 = 2.4260
                "adding up over the steps instead of taking the mean": 5.0,
                "leaving vf_coef out": 10.0,
                "leaving the baseline's own loss out: it would never learn": 0.0,
                "subtracting the baseline's loss": -2.5,
                "taking probabilities where their logarithms belong": 1.75,  # -(4/2 - 2/4) / 2 = -0.75
            },
            "the docstring, term by term, with pencil and paper",
        ),
        Case(
            "reinforce_loss: the same; the gradient for the logits",
            reinforce_step(1),
            # -A (1[a] - pi) / 2: -4 (-1/2, 1/2) / 2 = (1, -1);  2 (3/4, -3/4) / 2
            [[1.0, -1.0], [0.75, -0.75]],
            {
                "making bad actions likelier: there is a sign too few": [[-1.0, 1.0], [-0.75, 0.75]],
                "cutting the gradient of the log-probs: the policy cannot learn": [[0.0, 0.0], [0.0, 0.0]],
            },
            "optimizers minimise; which way does the likelihood of a good action have to go?",
        ),
        Case(
            "reinforce_loss: the same; the gradient for the values",
            reinforce_step(2),
            # 0.25 x 2 (v - G) / 2 = 0.25 x (-4), 0.25 x 2
            [-1.0, 0.5],
            {
                # the advantage's gradient: log pi / 2 = -0.3466, -0.6931 comes on top
                "not detaching the advantage: the policy's term moves the baseline": [-1.3466, -0.1931],
                "cutting the gradient of the values: the baseline cannot learn": [0.0, 0.0],
            },
            "which term the baseline learns from, and where its gradient has to be cut",
        ),
        Case(
            "play_episode: 300 episodes of a policy that takes action 1 three times in four: its share in what is "
            "returned, and in what was played",
            shares_of_actions,
            [0.75, 0.75],
            {
                "always taking the likeliest action: a policy that never tries learns nothing": [1.0, 1.0],
                "drawing all actions with equal chances": [0.5, 0.5],
                "storing one action and playing another": lambda r: abs(r[0] - r[1]) > 0.1,
            },
            "how an action is drawn",
            atol=0.05,
        ),
        Case(
            "play_episode in Walk (observations 0, 1, 2, 3, rewards 1, 2, 3), which terminates; values are twice the "
            "observation, action 1 is certain",
            played("terminated"),
            [[[0], [1], [2]], [1, 1, 1], [1, 2, 3], 0],
            {
                "giving the last state a value although the episode terminated": lambda r: r[3] in (4, 6),
                "storing the observation that an action led to, not the one it was chosen from": lambda r: (
                    r[0] == [[1], [2], [3]]
                ),
                "storing the first observation again and again": lambda r: r[0] == [[0], [0], [0]],
                "leaving out the last step": lambda r: r[2] == [1, 2],
            },
            "the order of storing and stepping",
        ),
        Case(
            "play_episode: the same, but the episode is truncated",
            played("truncated"),
            [[[0], [1], [2]], [1, 1, 1], [1, 2, 3], 6],  # 2 x 3
            {
                "treating truncation as death: the clock was stopped, the last state has a value": lambda r: r[3] == 0,
                "taking the value of the state before the last one": lambda r: r[3] == 4,
            },
            "what last_value is where truncated is set",
        ),
        Case(
            "train in Endless (5 steps an episode), learning rate 0, 20 steps: the baseline's gradient at each step of "
            "the optimizer, divided by the first one",
            gradients_of_train("Classroom/Endless-v0", total_timesteps=20),
            [1, 1, 1, 1],
            {
                "not setting gradients back to zero: they add up": [1, 2, 3, 4],
                "taking no step of the optimizer": [],
                "taking one step only": [1],
                "taking one step for each step of the environment": lambda r: len(r) == 20,
            },
            "what happens once for each episode",
        ),
    ],
    probe=actor_critic_probe(total_timesteps=1500, learning_rate=0.02, hidden_size=16, quiet=True),
    learn=Learn({"env_id": "CartPole-v1", "seed": 1, "quiet": True}, 150.0),
)


# ------------------------------------------------------------------------------------------------------------ build-dqn


def epsilons(m):
    """epsilon_at in some steps, with epsilon from 1 to 0.2 within 100 steps."""
    args = m.Args(epsilon_start=1.0, epsilon_end=0.2, exploration_steps=100)
    return [m.epsilon_at(step=step, args=args) for step in (0, 25, 100, 1000)]


def linear_q(m, *slopes):
    """A QNetwork for observations of one number: an action's value is its slope times the number."""
    import torch

    network = m.QNetwork(1, len(slopes), 4)
    network.layers = torch.nn.Linear(1, len(slopes))
    network.layers.weight.data = tensor(slopes)[:, None]
    network.layers.bias.data.zero_()
    return network


def choices(epsilon):
    """The shares of four actions in 1,500 draws of choose_action; action 2 is the best one."""

    def call(m):
        import numpy as np

        rng, counts, network = np.random.default_rng(1), [0] * 4, linear_q(m, 1, 2, 4, 3)
        for _ in range(1500):
            counts[m.choose_action(network=network, obs=np.ones(1, np.float32), epsilon=epsilon, rng=rng)] += 1 / 1500
        return counts

    return call


def remembered(m, count, size=3):
    """A ReplayBuffer with this many places, to which transitions 1 to `count` were added. Odd ones terminated."""
    import numpy as np

    buffer = m.ReplayBuffer(size, 1)
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


def sampled(count, batch_size=1000):
    """A large sample: share of each transition, and whether the parts of each row belong together."""

    def call(m):
        import numpy as np

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

    def call(m):
        network, target = linear_q(m, 1, 2), linear_q(m, 6, 3)
        batch = tensor([[1], [2]]), tensor([0, 1]).long(), tensor([1, 2]), tensor([[2], [3]]), tensor([0, 1]).bool()
        loss = m.dqn_loss(network=network, target=target, batch=batch, gamma=0.5)
        loss.backward()
        gradients = [network.layers.weight.grad, target.layers.weight.grad]
        gradients = [[0, 0] if gradient is None else gradient.flatten() for gradient in gradients]
        return (loss, *gradients)[part]

    return call


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


def dqn_probe(m, train):
    """In three environments: what depends on the observation, on a later reward, and on a stopped clock."""
    settings = {"total_timesteps": 2000, "learning_starts": 100, "exploration_steps": 1000, "epsilon_end": 0.2}
    settings |= {"train_every": 2, "target_every": 40, "learning_rate": 3e-3, "hidden_size": 16, "quiet": True}
    cue = train(env_id="Classroom/Cue-v0", **settings).agent(tensor([[-1.0], [1.0]])).tolist()
    if not close(cue, [[1, 0], [0, 1]], 0.2):
        return (
            "in Cue, one step long, the action that goes with the observation pays 1: its Q is [[1, 0], [0, 1]]; yours "
            f"is {[[round(x, 2) for x in row] for row in cue]}.\nLook next at what is stored, and at the loss."
        )
    later = train(env_id="Classroom/Later-v0", gamma=0.5, **settings).agent(tensor([[0.0], [1.0]])).tolist()
    if not close(later, [[0.5, 0.5], [0, 1]], 0.2):
        return (
            "Later pays 1 in its second and last step for action 1, so with gamma 0.5 its Q is [[0.5, 0.5], [0, 1]]; "
            f"yours is {[[round(x, 2) for x in row] for row in later]}.\nLook next at the target."
        )
    endless = train(env_id="Classroom/Endless-v0", gamma=0.5, **settings).agent(tensor([0.0])).tolist()
    if not close(endless, [2, 2], 0.2):
        return (
            "Endless pays 1 in every step and is truncated after five, so with gamma 0.5 both actions are worth "
            f"1 + 0.5 + 0.25 + … = 2; yours are worth {[round(x, 2) for x in endless]}.\nAbout 1.7 would be: "
            "truncation taken for the end. Look next at what is stored where an episode is truncated."
        )


exercise(
    "build-dqn",
    topic="milestone: DQN from scratch",
    script="exercises/scripts/build_dqn.py",
    blanks=(
        "epsilon_at",
        "choose_action",
        "ReplayBuffer.add",
        "ReplayBuffer.sample",
        "td_targets",
        "dqn_loss",
        "train",
    ),
    gives={
        "choose_action": "int",
        "ReplayBuffer.sample": ("float32 tensor", "int64 tensor", "float32 tensor", "float32 tensor", "bool tensor"),
        "td_targets": "float32 tensor",
        "dqn_loss": "float32 tensor",
    },
    difficulty=2,
    minutes=240,
    task="write the algorithm: environment, network and evaluation are given above. Write the functions one by one, "
    "and after each of them let check.py build-dqn --up-to 1 judge it. network(obs) returns Q for each action. train "
    "makes env, two networks (make_agent twice; the target begins with the weights of the other: load_state_dict), an "
    "optimizer (torch.optim.Adam over one network's parameters, with args.learning_rate), the buffer and "
    "rng = np.random.default_rng(args.seed), and begins with env.reset(). Then, for each of args.total_timesteps "
    "steps, counted from 0: choose, step, remember; reset where an episode is over; in steps that train_every divides, "
    "not before learning_starts, one step of the optimizer; in steps that target_every divides, copy the network into "
    "the target. It ends with env.close() and returns the network.",
    cases=[
        Case(
            "epsilon_at steps 0, 25, 100 and 1000: from 1 to 0.2 within 100 steps",
            epsilons,
            [1.0, 0.8, 0.2, 0.2],  # 1 - 0.25 x 0.8
            {
                "going on below epsilon_end": [1.0, 0.8, 0.2, -7.0],
                "forgetting epsilon_end: the line goes down to 0": [1.0, 0.75, 0.0, 0.0],
                "going upwards": [0.2, 0.4, 1.0, 1.0],
                "stopping at epsilon_end too early: the line goes to 0 and is cut off": [1.0, 0.75, 0.2, 0.2],
            },
            "the docstring: where the line begins and where it ends",
        ),
        Case(
            "choose_action: epsilon 0, Q = 1, 2, 4, 3: shares of the actions",
            choices(0.0),
            [0, 0, 1, 0],
            {
                "exchanging epsilon and 1 - epsilon": lambda r: close(r, [0.25] * 4, 0.05),
                "taking the lowest Q": [1, 0, 0, 0],
            },
            "which side of the coin is the best action",
        ),
        Case(
            "choose_action: the same with epsilon 0.4",
            choices(0.4),
            [0.1, 0.1, 0.7, 0.1],  # 0.6 + 0.4 / 4
            {
                "never exploring": [0, 0, 1, 0],
                "leaving the best action out of the random ones": [0.1333, 0.1333, 0.6, 0.1333],
            },
            "with probability epsilon any action, the best one too",
            atol=0.04,
        ),
        Case(
            "ReplayBuffer(3): transitions 1 and 2 are added (reward ten times the number, odd ones terminated)",
            stored(2),
            [[1, 2, 0], [1, 0, 0], [10, 20, 0], [1.5, 2.5, 0], [1, 0, 0]],
            {
                "exchanging obs and next_obs": lambda r: r[0][0] == 1.5,
                "always writing into the same slot": lambda r: r[2] in ([20, 0, 0], [0, 20, 0], [0, 0, 20]),
                "beginning with the second slot": lambda r: r[2] == [0, 10, 20],
            },
            "which slot is written first",
        ),
        Case(
            "ReplayBuffer(3): transitions 1 to 5 are added",
            stored(5),
            [[4, 5, 3], [0, 1, 1], [40, 50, 30], [4.5, 5.5, 3.5], [0, 1, 1]],
            {
                "forgetting all that comes when the buffer is full": lambda r: r[2] == [10, 20, 30],
                "overwriting the newest when the buffer is full": lambda r: r[2][:2] == [10, 20],
            },
            "which slot is written when all are full",
        ),
        Case(
            "ReplayBuffer.sample: of 2 transitions in 3 slots: shares of slots never written, of 1, of 2; whether the "
            "parts of a row belong together",
            sampled(2),
            [[0, 0.5, 0.5], 1],
            {
                "drawing slots that were never written": lambda r: r[0][0] > 0.1,
                "never drawing the newest": lambda r: close(r[0], [0, 1, 0]),
                "drawing each part by itself: they are of different transitions": lambda r: r[1] == 0,
            },
            "which slots hold something",
            atol=0.05,
        ),
        Case(
            "ReplayBuffer.sample: of the newest 3 of 5: shares of 0 (nothing) to 5",
            sampled(5),
            [[0, 0, 0, 1 / 3, 1 / 3, 1 / 3], 1],
            {
                "never drawing the oldest: all slots hold something": lambda r: close(
                    r[0], [0, 0, 0, 0, 0.5, 0.5], 0.05
                ),
            },
            "how many slots there are to draw from when all are full",
            atol=0.05,
        ),
        Case(
            "td_targets: rewards 1, 2, the second terminated, gamma 0.5, target Q (3, 5) and (8, 7)",
            lambda m: m.td_targets(
                rewards=tensor([1, 2]), terminated=tensor([0, 1]).bool(), gamma=0.5, target_q=tensor([[3, 5], [8, 7]])
            ),
            [3.5, 2.0],  # 1 + 0.5 x 5; 2
            {
                "bootstrapping over an end: nothing follows what terminated": [3.5, 6.0],
                "counting the next state only where the episode has terminated": [1.0, 6.0],
                "taking the maximum over the batch, not over the actions": [5.0, 2.0],  # (8, 7): 1 + 4
                "taking the mean of the actions": [3.0, 2.0],
                "forgetting gamma": [6.0, 2.0],
                "giving nothing at all where the episode terminated: the last reward counts": [3.5, 0.0],
            },
            "the docstring, and which dimension has the actions",
        ),
        Case(
            "dqn_loss: Q(s) = (s, 2s), target (6s, 3s), gamma 0.5; s 1, action 0, reward 1, s' 2; s 2, action 1, "
            "reward 2, terminated",
            dqn_step(0),
            20.0,  # y = 1 + 0.5 x 12 = 7 and 2; Q(s, a) = 1 and 4: (36 + 4) / 2
            {
                "not using the target network: y is from the network that learns": 4.0,  # y = 1 + 0.5 x 4: (4 + 4) / 2
                "taking Q of the best action, not of the one that was taken": 14.5,  # Q = 2, 4: (25 + 4) / 2
                "taking Q of the next state for Q(s, a)": 20.5,  # Q = 2, 6: (25 + 16) / 2
                "taking the sum, not the mean": 40.0,
                "bootstrapping from s, not from s'": 6.5,  # y = 1 + 0.5 x 6 = 4: (9 + 4) / 2
            },
            "which network says what, about which state",
        ),
        Case(
            "dqn_loss: the same; the gradient for the slopes of Q",
            dqn_step(1),
            # 2 (1 - 7) x 1 / 2 = -6 for action 0; 2 (4 - 2) x 2 / 2 = 4 for action 1
            [-6.0, 4.0],
            {"cutting the gradient of Q(s, a): nothing is learnt": [0, 0]},
            "where the gradient has to go",
        ),
        Case(
            "dqn_loss: the same; the gradient for the slopes of the target",
            dqn_step(2),
            [0, 0],
            {"letting the gradient through the target: it is a number to aim at": lambda r: r[0] != 0},
            "where the gradient has to be cut",
        ),
        Case(
            "train in Endless, 40 steps, learning_starts 10, train_every 2: steps of the optimizer; whether gradients "
            "add up",
            updates_of_train,
            [15, 0],  # in steps 10, 12, …, 38
            {
                "not setting gradients back to zero: they add up": [15, 1],
                "taking no notice of train_every": lambda r: r[0] == 30,
                "learning before learning_starts": lambda r: r[0] in (20, 19),
                "taking no step of the optimizer": lambda r: r[0] == 0,
            },
            "when there is an update, and what happens in it",
        ),
        Case(
            "train in Endless, 60 steps, target_every 20: whether network and target of dqn_loss are one object; how "
            "often the target changes (0 never, 1 now and then, 2 at every update)",
            networks_of_train,
            [0, 1],
            {
                "using one network for both": lambda r: r[0] == 1,
                "never copying the network into the target": [0, 0],
                "copying the network into the target at every update": [0, 2],
            },
            "when the weights are copied, and where from",
        ),
    ],
    probe=dqn_probe,
    learn=Learn({"env_id": "CartPole-v1", "seed": 1, "quiet": True}, 100.0),
)


# ------------------------------------------------------------------------------------------------------------ build-ppo


def chosen(m):
    """choose_actions for 4,000 rows of probabilities 1/4, 3/4: share of action 1, largest error of a log-prob."""
    import torch

    torch.manual_seed(1)
    logits = tensor([[0.0, 1.0986123]]).repeat(4000, 1)  # e^1.0986 = 3
    actions, log_probs = m.choose_actions(logits=logits)
    right = tensor([0.25, 0.75]).log()[actions]
    return actions.float().mean(), (log_probs - right).abs().max()


def gae_of(terminated=(), truncated=()):
    """compute_gae of rewards 1, 3, 6, values 2, 4, 6, next values 4, 6, 8, gamma 0.5, lambda 0.8, in two environments.

    The rows that end do so in the first only.
    """

    def call(m):
        two = {"rewards": [1, 3, 6], "values": [2, 4, 6], "next_values": [4, 6, 8]}
        two = {name: tensor([[x, x] for x in numbers]) for name, numbers in two.items()}
        for name, rows in (("terminated", terminated), ("truncated", truncated)):
            two[name] = tensor([[t in rows, False] for t in range(3)]).bool()
        return m.compute_gae(**two, gamma=0.5, gae_lambda=0.8)

    return call


def ppo_step(part, values=(0, 0, 0, 0), returns=(0, 0, 0, 0), ent_coef=0.0):
    """A part of (loss, gradient of the logits, gradient of the values) of four steps, both of whose actions have 1/2.

    Action 0 was taken in all of them, when it had the probabilities 1/4, 1, 1/4, 1: so the ratios are 2, 1/2, 2, 1/2.
    """

    def call(m):
        given = {"logits": tensor([[0, 0]] * 4), "values": tensor(values), "actions": tensor([0] * 4).long()}
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
        terminated, truncated = [self.steps == 1, False], [False, self.steps == 2]
        reached = tensor([[self.steps], [self.steps]])
        obs = tensor([[10 if over else self.steps] for over in (self.steps == 1, self.steps == 2)])
        return obs, tensor([self.steps, -self.steps]), tensor(terminated).bool(), tensor(truncated).bool(), reached


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
    """Two epochs over six rows, two at a time: (steps, rows of each epoch in order, whether the epochs differ)."""
    steps, seen = updated(m, len, 6, update_epochs=2, minibatch_size=2)
    rows = sum(seen, [])
    return len(steps), sorted(rows[:6]), sorted(rows[6:]), rows[:6] != rows[6:]


exercise(
    "build-ppo",
    topic="milestone: PPO from scratch",
    script="exercises/scripts/build_ppo.py",
    blanks=("choose_actions", "compute_gae", "normalized", "ppo_loss", "collect", "update", "train"),
    gives={
        "choose_actions": ("int64 tensor", "float32 tensor"),
        "compute_gae": ("float32 tensor", "float32 tensor"),
        "normalized": "float32 tensor",
        "ppo_loss": "float32 tensor",
    },
    difficulty=3,
    minutes=300,
    task="write the algorithm: environments, networks and evaluation are given above. Write the functions one by one, "
    "and after each of them let check.py build-ppo --up-to 1 judge it. agent(obs) returns logits and values; "
    "torch.distributions.Categorical(logits=…) is a policy, with sample(), log_prob() and entropy(). Tensors have a "
    "row for each step and a column for each environment, (T, N), or one row for each of all these (B,). Where a step "
    "terminated nothing follows it, where it was truncated the next value stands for what would have followed. train "
    "makes the Environments, the agent and an optimizer (torch.optim.Adam over agent.parameters(), with "
    "args.learning_rate), begins with envs.reset(), and while envs.steps < args.total_timesteps it collects, "
    "estimates, normalizes all advantages, makes (B, …) of (T, N, …) and updates; it ends with envs.close() and "
    "returns the agent.",
    cases=[
        Case(
            "choose_actions: 4,000 rows of probabilities 1/4, 3/4: share of action 1, largest error of a log-prob",
            chosen,
            [0.75, 0.0],
            {
                "always taking the likeliest action: a policy that never tries learns nothing": [1.0, 0.0],
                "drawing all actions with equal chances": lambda r: close(r[0], 0.5, 0.04),
                "returning probabilities, not their logarithms": lambda r: close(r[1], 1.6363),  # 1/4 + log 4
                "returning the log-prob of another action than the one drawn": lambda r: close(r[1], 1.0986),  # log 3
            },
            "what is drawn, and what log_prob is asked for",
            atol=0.03,
        ),
        Case(
            "compute_gae: rewards 1, 3, 6, values 2, 4, 6, next values 4, 6, 8, gamma 0.5, lambda 0.8, in both of two "
            "environments: (advantages, returns)",
            gae_of(),
            # delta: 1 + 2 - 2 = 1, 3 + 3 - 4 = 2, 6 + 4 - 6 = 4; A: 4, 2 + 0.4 x 4 = 3.6, 1 + 0.4 x 3.6 = 2.44
            [[[2.44, 2.44], [3.6, 3.6], [4, 4]], [[4.44, 4.44], [7.6, 7.6], [10, 10]]],
            {
                "returning one-step surprises: nothing is added from later rows": lambda r: close(
                    [row[0] for row in r[0]], [1, 2, 4]
                ),
                "leaving lambda out": lambda r: close([row[0] for row in r[0]], [3, 4, 4]),
                "leaving gamma out of the trace": lambda r: close([row[0] for row in r[0]], [5.16, 5.2, 4]),
                "going forwards in time": lambda r: close([row[0] for row in r[0]], [1, 2.4, 4.96]),
                "returning advantages as returns: the value has to be added": lambda r: r[0] == r[1],
            },
            "delta and A in the docstring, and which row comes first",
        ),
        Case(
            "compute_gae: the same; row 1 terminated in the first environment",
            gae_of(terminated=[1]),
            # delta of row 1: 3 - 4 = -1, and A the same; row 0: 1 + 0.4 x -1 = 0.6
            [[[0.6, 2.44], [-1, 3.6], [4, 4]], [[2.6, 4.44], [3, 7.6], [10, 10]]],
            {
                "bootstrapping over an end: nothing follows what terminated": lambda r: close(r[0][1][0], 2.0),
                "letting later surprises of another episode in": lambda r: close(r[0][1][0], 0.6),  # -1 + 0.4 x 4
                "taking no notice of the end": lambda r: close(r[0][1][0], 3.6),
                "letting what ends in one environment end in all": lambda r: close(r[0][1], [-1, -1]),
            },
            "the two places where an end counts",
        ),
        Case(
            "compute_gae: the same; row 1 was truncated in the first environment",
            gae_of(truncated=[1]),
            # delta of row 1: 2, and A the same; row 0: 1 + 0.4 x 2 = 1.8
            [[[1.8, 2.44], [2, 3.6], [4, 4]], [[3.8, 4.44], [6, 7.6], [10, 10]]],
            {
                "treating truncation as death: the clock was stopped, the future is worth the next value": lambda r: (
                    close(r[0][1][0], -1.0)
                ),
                "letting later surprises of another episode in: a truncated one is over, too": lambda r: close(
                    r[0][1][0], 3.6
                ),
            },
            "where truncated must count, and where it must not",
        ),
        Case(
            "normalized: 1, 3 in the first row, 5, 7 in the second",
            lambda m: m.normalized(advantages=tensor([[1, 3], [5, 7]])),
            # mean 4; deviation sqrt((9 + 1 + 1 + 9) / 3) = 2.582, as torch's std has it
            [[-1.1619, -0.3873], [0.3873, 1.1619]],
            {
                "normalising each environment by itself: over the wrong axis": [[-0.7071, -0.7071], [0.7071, 0.7071]],
                "normalising each row by itself: over the wrong axis": [[-0.7071, 0.7071], [-0.7071, 0.7071]],
                "dividing by the variance": [[-0.45, -0.15], [0.15, 0.45]],  # 20 / 3
                "dividing before the mean is taken off": lambda r: close(r[0][0], 1 / 2.582 - 4),
                "not taking the mean off": lambda r: close(r[0][0], 1 / 2.582),
            },
            "the mean and the deviation of how many numbers",
        ),
        Case(
            "normalized: advantages that are all the same",
            lambda m: m.normalized(advantages=tensor([[2, 2], [2, 2]])),
            [[0, 0], [0, 0]],
            {"dividing by 0: add something small to the deviation": lambda r: r[0][0] != r[0][0]},
            "what happens when the deviation is 0",
        ),
        Case(
            "ppo_loss: ratios 2, 1/2, 2, 1/2, advantages 1, 4, -1, -2, clip_coef 0.25; nothing but the policy's term",
            ppo_step(0),
            # min(2, 1.25) + min(2, 3) + min(-2, -1.25) + min(-1, -1.5) = 1.25 + 2 - 2 - 1.5 = -0.25; L = -0.0625
            0.0625,
            {
                "not clipping": -0.25,  # 2 + 2 - 2 - 1 = 1
                "taking the clipped term alone": -0.375,  # 1.25 + 3 - 1.25 - 1.5 = 1.5
                "taking the larger of the two terms": -0.6875,  # 2 + 3 - 1.25 - 1 = 2.75
                "minimising L: it is to become high": -0.0625,
                "putting the ratio upside down": -0.1875,  # 0.5 + 5 - 0.75 - 4 = 0.75
                "computing both log-probs anew: the ratio is always 1": -0.5,  # (1 + 4 - 1 - 2) / 4
                "leaving the exponential out": 1.0824,  # 0.6931 - 2.7726 - 0.75 - 1.5 = -4.3295
                "taking the sum, not the mean": 0.25,
                "comparing values with advantages, not with returns": 1.4375,  # 0.0625 + 0.25 x (1 + 16 + 1 + 4) / 4
            },
            "eq. 7, row by row, with pencil and paper",
        ),
        Case(
            "ppo_loss: the same; the gradient for the logits",
            ppo_step(1),
            # rows 0 and 3 are clipped; row 1: -2 / 4 (1 - 1/2, -1/2), row 2: 2 / 4 (1/2, -1/2)
            [[0, 0], [-0.25, 0.25], [0.25, -0.25], [0, 0]],
            {"cutting the gradient of the log-probs: the policy cannot learn": [[0, 0]] * 4},
            "which of the log-probs have a gradient",
        ),
        Case(
            "ppo_loss: the same with values 2, 1, 3, 1, returns 1, vf_coef 0.25",
            ppo_step(0, values=[2, 1, 3, 1], returns=[1, 1, 1, 1]),
            0.375,  # 0.0625 + 0.25 x (1 + 0 + 4 + 0) / 4
            {
                "leaving the critic's loss out: it would never learn": 0.0625,
                "leaving vf_coef out": 1.3125,
                "subtracting the critic's loss": -0.25,
            },
            "the second term",
        ),
        Case(
            "ppo_loss: the same; the gradient for the values",
            ppo_step(2, values=[2, 1, 3, 1], returns=[1, 1, 1, 1]),
            [0.125, 0, 0.25, 0],  # 0.25 x 2 (V - R) / 4
            {"cutting the gradient of the values: the critic cannot learn": [0, 0, 0, 0]},
            "what the critic learns from",
        ),
        Case(
            "ppo_loss: the first again, with ent_coef 0.1",
            ppo_step(0, ent_coef=0.1),
            -0.0068,  # the entropy is log 2 = 0.6931 in each row: 0.0625 - 0.0693
            {
                "punishing entropy: a term that is to be high has to be subtracted from a loss": 0.1318,
                "leaving the entropy out": 0.0625,
                "adding up the entropies of all rows": -0.2148,  # 0.0625 - 0.1 x 4 x 0.6931
            },
            "the third term, and its sign",
        ),
        Case(
            "collect: three steps in two environments whose observations count them; step 1 terminates the first, step "
            "2 truncates the second, a new episode begins with 10: obs and actions (1 is certain); and the next obs",
            collected("obs", "actions"),
            [[[[0], [0]], [[10], [1]], [[2], [10]]], [[1, 1], [1, 1], [1, 1]], [[3], [3]]],
            {
                "storing the observations that actions led to, not those they were chosen from": lambda r: close(
                    r[0], [[[10], [1]], [[2], [10]], [[3], [3]]]
                ),
                "playing on from `reached`: where an episode has ended, a new one has begun": lambda r: close(
                    r[0], [[[0], [0]], [[1], [1]], [[2], [2]]]
                ),
                "choosing all actions from the first observations": lambda r: close(r[0], [[[0], [0]]] * 3),
                "returning the observations that it began with": lambda r: close(r[2], [[0], [0]]),
            },
            "what is stored before a step, what after it, and what the next step begins with",
        ),
        Case(
            "collect: the same; values (twice the observation) and next_values",
            collected("values", "next_values"),
            [[[0, 0], [20, 2], [4, 20]], [[2, 2], [4, 4], [6, 6]], [[3], [3]]],
            {
                "taking the value of a new episode's first observation for what the step led to": lambda r: close(
                    r[1], [[20, 2], [4, 20], [6, 6]]
                ),
                "exchanging values and next_values": lambda r: close(r[0], [[2, 2], [4, 4], [6, 6]]),
            },
            "the difference between obs and reached",
        ),
        Case(
            "collect: the same; rewards, terminated and truncated",
            collected("rewards", "terminated", "truncated"),
            [[[1, -1], [2, -2], [3, -3]], [[1, 0], [0, 0], [0, 0]], [[0, 0], [0, 1], [0, 0]], [[3], [3]]],
            {
                "exchanging terminated and truncated": lambda r: r[1][1][1] == 1 and r[2][0][0] == 1,
                "treating truncation as termination": lambda r: r[1][1][1] == 1,
            },
            "what envs.step returns, in which order",
        ),
        Case(
            "update: two epochs over rows 1 to 6 in minibatches of 2: steps of the optimizer, rows of each epoch "
            "(sorted), whether the order differs",
            rows_of_update,
            [6, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], 1],
            {
                "taking no step of the optimizer": lambda r: r[0] == 0,
                "taking the rows in the same order in each epoch": lambda r: r[3] == 0,
                "going through the rows once only": lambda r: r[0] == 3,
                "drawing rows with repeats: some are in several minibatches, some in none": lambda r: (
                    r[0] == 6 and set(r[1]) != {1, 2, 3, 4, 5, 6}
                ),
                "taking all rows at once": lambda r: r[0] == 2,
            },
            "how the rows get into minibatches",
        ),
        Case(
            "update: three epochs over four rows at once, optimizer with a learning rate of 0: gradients of the "
            "critic's weight and of the logit of action 1 at each step",
            gradients_of_update,
            # errors 1, 2, 3, 4, observations as well: 0.5 x 2 (1 + 4 + 9 + 16) / 4 = 7.5
            # advantage 1 in two of four rows, where action 1 was taken: -(2 x 1/2 (1 - 1/2)) / 4 = -0.125
            [[7.5, -0.125], [7.5, -0.125], [7.5, -0.125]],
            {
                "not setting gradients back to zero: they add up": [[7.5, -0.125], [15, -0.25], [22.5, -0.375]],
                "computing the old log-probs anew: the ratio is always 1": lambda r: close(r[0][1], -0.25),
                "shuffling each tensor by itself: rows no longer belong together": lambda r: (
                    len(r) == 3 and not close(r[0], r[1]) and not close(r[1][0] / r[0][0], 2)
                ),
            },
            "what happens in each minibatch, and which rows go into the loss together",
        ),
        Case(
            "train in Endless (5 steps an episode), learning rate 0, 30 steps, 10 of them in each of three rollouts, "
            "two epochs: the critic's gradient at each step of the optimizer, divided by the first one",
            gradients_of_train(
                "Classroom/Endless-v0", total_timesteps=30, num_envs=2, num_steps=5, update_epochs=2, minibatch_size=10
            ),
            [1, 1, 1, 1, 1, 1],
            {
                "collecting once only": [1, 1],
            },
            "the order of collecting, estimating and updating",
        ),
    ],
    probe=actor_critic_probe(
        total_timesteps=8000,
        num_steps=32,
        minibatch_size=128,
        update_epochs=4,
        learning_rate=5e-3,
        ent_coef=0.01,
        hidden_size=16,
        quiet=True,
    ),  # fmt: skip
    learn=Learn({"env_id": "CartPole-v1", "seed": 1, "quiet": True}, 400.0),
)
