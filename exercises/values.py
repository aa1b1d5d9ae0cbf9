"""Exercises of weeks 4 and 5: replay, targets, and the improvements of DQN."""

from types import SimpleNamespace

import numpy as np
import probes  # noqa: F401  (registers its environments)
from gymnasium import spaces
from mechanism import exercise, refuses, tensor

# ------------------------------------------------------------------------------------------------------------ dqn.py

DQN_CARTPOLE = {"env_id": "CartPole-v1", "total_timesteps": 40_000, "num_envs": 4, "train_frequency": 2,
                "gradient_steps": 1, "batch_size": 128, "learning_rate": 1e-3, "hidden_sizes": (64, 64),
                "target_network_frequency": 2, "tau": 0.01, "exploration_fraction": 0.16, "end_e": 0.04,
                "eval_every": 1_000, "stop_at_return": 150.0, "seed": 1}  # fmt: skip
LINE = spaces.Box(-1, 1, (1,))


def transitions(obs, rewards, terminated, truncated, reset_rows, actions=None):
    """What `add` of a buffer is called with: actions (1, if none are given) have led from obs to obs + 0.5."""
    actions = np.ones((len(obs), 1), np.int64) if actions is None else actions
    flags = {"terminated": terminated, "truncated": truncated, "reset_rows": reset_rows}
    flags = {name: np.array(flag, bool) for name, flag in flags.items()}
    return {"obs": obs, "actions": actions, "rewards": rewards, "next_obs": obs + 0.5} | flags


def ring(capacity, steps, **flags):
    """(slots of the last step, size, obs, next obs, rewards, actions, terminated) of a buffer after steps of n
    environments each. The transitions are numbered: obs is the number, the reward ten times as much.
    """

    def call(m):
        buffer, number = m.ReplayBuffer(capacity, LINE, spaces.Discrete(2)), 0
        for n in steps:
            obs = np.arange(number, number + n, dtype=np.float32)[:, None]
            off = dict.fromkeys(("terminated", "truncated", "reset_rows"), [False] * n)
            slots = buffer.add(**transitions(obs, obs[:, 0] * 10, **off | flags))
            number += n
        arrays = buffer.rewards, buffer.actions[:, 0], buffer.terminated.astype(float)
        return slots, buffer.size, buffer.obs[:, 0], buffer.next_obs[:, 0], *arrays

    return call


def replay_shares(m, stored=2, capacity=5, batch_size=2):
    """How often each transition is drawn, and slots that are empty; whether one is ever drawn twice in a batch."""
    buffer, no = m.ReplayBuffer(capacity, LINE, spaces.Discrete(2)), np.zeros(stored, bool)
    obs = np.arange(1, stored + 1, dtype=np.float32)[:, None]
    buffer.add(**transitions(obs, obs[:, 0], no, no, no))
    rng = np.random.default_rng(0)
    batches = [buffer.sample(batch_size=batch_size, rng=rng).obs.numpy()[:, 0] for _ in range(4000 // batch_size)]
    drawn = np.concatenate(batches)
    twice = any(len(set(batch.tolist())) < batch_size for batch in batches)
    return [(drawn == x).mean() for x in range(stored + 1)], twice


def random_replay(m, rng):
    """A ring after some steps, and what sample takes from it."""
    capacity, n = int(rng.integers(2, 9)), int(rng.integers(1, 5))
    buffer, slots = m.ReplayBuffer(capacity, LINE, spaces.Discrete(9)), []
    for _ in range(rng.integers(1, 6)):
        n = min(n, capacity)
        given = transitions(rng.normal(size=(n, 1)), rng.normal(size=n), *(rng.random((3, n)) < 0.3))
        slots.append(buffer.add(**given | {"actions": rng.integers(9, size=(n, 1))}))
    names = "obs actions rewards next_obs terminated".split()
    found = [getattr(buffer, name).astype(float) for name in names], slots, buffer.size, buffer.position
    if buffer.size == 0:
        return found
    batch = buffer.sample(batch_size=1, rng=rng)
    return *found, [len(part) for part in batch], batch.obs[0] in buffer.obs[: buffer.size]


exercise(
    "replay",
    topic="the replay buffer, a ring",
    cut="dqn.py: ReplayBuffer.add, ReplayBuffer.sample",
    course="week 4, 45 minutes",
    task="write what stores transitions and what draws them. The arrays self.obs, next_obs, actions, rewards and "
    "terminated have a row per slot; self.position is the next slot to write, self.size how many are filled. Reset "
    "rows are left out. self.get(slots) makes Transitions of an array of slots; rng is a NumPy Generator. Truncated "
    "transitions are like any other: only termination ends the future.",
    cases={
        "two environments, one step, capacity 5: (slots, size, obs, next_obs, rewards, actions, terminated) "
        "| which array gets what": ring(5, [2]),
        "capacity 3, two steps of two environments, transitions 0, 1 and 2, 3: the oldest makes room "
        "| the remainder of position + 0, 1, … divided by the capacity": ring(3, [2, 2]),
        "three environments of which the second only resets, the third terminates; capacity 5 "
        "| the rows that are stored": ring(5, [3], reset_rows=[False, True, False], terminated=[False, False, True]),
        "two environments of which the first is truncated | what is stored as terminated": ring(
            5, [2], truncated=[True, False]
        ),
        "two transitions in a buffer for five: (share of empty slots, of each transition; is one drawn twice?) "
        "| the range of the random slots": (replay_shares, 0.04),
        "asking for three of two stored transitions: is it refused with a ValueError? "
        "| the first line of sample": lambda m: refuses(lambda: replay_shares(m, batch_size=3)),
    },
    random=random_replay,
    mistakes={
        "exchanging obs and next_obs": "played = ~reset_rows -> obs, next_obs = next_obs, obs; played = ~reset_rows",
        "storing obs as next_obs as well": "= next_obs[played] -> = obs[played]",
        "storing the reward of the first environment for all": "= rewards[played] -> = rewards[0]",
        "storing the actions without leaving out reset rows": "= actions[played] -> = actions[:count]",
        "counting steps instead of transitions: each environment adds one": "self.size + count -> self.size + 1",
        "letting size grow beyond the capacity": "min(self.size + count, self.capacity) -> self.size + count",
        "keeping the oldest and dropping what does not fit any more": (
            "played = ~reset_rows -> played = ~reset_rows & (self.size + np.cumsum(~reset_rows) <= self.capacity)"
        ),
        "beginning at slot 0 again before the end is filled": "slots = (self.position -> "
        "self.position *= self.position + count <= self.capacity; slots = (self.position",
        "storing the reset row, whose action was ignored": "played = ~reset_rows -> played = reset_rows | True",
        "leaving a gap where the reset row was": (
            "(self.position + np.arange(count)) -> (self.position + np.flatnonzero(played))",
            "(self.position + count) -> (self.position + len(played))",
        ),
        "storing truncation as termination: the future has not gone": "= terminated[played] -> "
        "= (terminated | truncated)[played]",
        "drawing from slots that are still empty": "rng.integers(self.size, size -> rng.integers(self.capacity, size",
        "never drawing one of the transitions": "rng.integers(self.size, size -> "
        "rng.integers(min(1, self.size - 1), self.size, size",
        "drawing without replacement": "rng.integers(self.size, size=batch_size) -> "
        "rng.permutation(self.size)[:batch_size]",
        "handing out more than there is": "if batch_size > self.size -> if False",
    },
    learn=(DQN_CARTPOLE, 60.0),
)


def dqn_targets(online=False):
    """td_targets of three transitions with rewards 1, 2, 3, of which the last terminated."""

    def call(m):
        networks = {"target_q": tensor([[1.0, 4.0], [6.0, 2.0], [8.0, 9.0]])}
        if online:
            networks["online_q"] = tensor([[2.0, 1.0], [3.0, 5.0], [0.0, 1.0]])
        step = {"rewards": tensor([1.0, 2.0, 3.0]), "terminated": tensor(np.array([False, False, True]))}
        return m.td_targets(**step, gamma=tensor([0.5, 0.25, 0.5]), **networks)

    return call


def random_dqn_targets(m, rng, double=False):
    rows, actions = rng.integers(1, 6), rng.integers(2, 5)
    given = {"rewards": tensor(rng.normal(size=rows)), "terminated": tensor(rng.random(rows) < 0.4)}
    given |= {"target_q": tensor(rng.normal(size=(rows, actions))), "gamma": tensor(rng.random(rows))}
    if double and rng.random() < 0.7:
        given["online_q"] = tensor(rng.normal(size=(rows, actions)))
    if rng.random() < 0.3:
        given["gamma"] = rng.random()
    return m.td_targets(**given)


DQN_ROWS = "rewards 1, 2, 3, discounts 0.5, 0.25, 0.5, the last terminated, target network (1, 4), (6, 2), (8, 9)"
PLAIN_DQN = {f"{DQN_ROWS} | algorithm 1 of DQN; every tensor but target_q is (B,)": dqn_targets()}
DQN_MISTAKES = {
    "bootstrapping after termination": "* ~terminated * -> *",
    "forgetting the discounts": "gamma * ~terminated -> ~terminated",
    "taking the lowest value of the next state": "(target_q if online_q is None else online_q).argmax -> "
    "(-target_q if online_q is None else online_q).argmax",
    "taking the mean value of the next state": "target_q.gather(1, best).squeeze(1) -> "
    "(target_q.mean(1) if online_q is None else target_q.gather(1, best).squeeze(1))",
    "removing the reward of a terminated transition as well": "return rewards + -> return rewards * ~terminated +",
    "adding shapes (B,) and (B, 1), which makes a table of all pairs": "best).squeeze(1) -> best)",
    "taking one discount for all rows": "rewards + gamma * -> "
    "rewards + (gamma if isinstance(gamma, float) else gamma[0]) *",
}
exercise(
    "dqn-target",
    topic="the target of DQN",
    cut="dqn.py: td_targets",
    course="week 4, 30 minutes",
    task="write y = r + gamma max_a Q'(s', a), for all rows at once. `rewards` and `terminated` (booleans) are (B,), "
    "`gamma` is a number or, here, a discount for each row (B,), target_q is (B, actions). Only online_q = None is "
    "asked for here; double-dqn goes on from your solution.",
    cases=PLAIN_DQN,
    random=random_dqn_targets,
    mistakes=DQN_MISTAKES,
    learn=(DQN_CARTPOLE | {"double": False}, 60.0),
)

BEST = "(target_q if online_q is None else online_q)"
exercise(
    "double-dqn",
    topic="the target of double DQN",
    cut="dqn.py: td_targets",
    course="week 5, 30 minutes",
    task="write the target of DQN and, where online_q is given, that of double DQN: one network chooses the action, "
    "the other one judges it. `rewards` and `terminated` (booleans) are (B,), `gamma` is a number or, here, a discount "
    "for each row (B,), both Q are (B, actions).",
    cases={
        **PLAIN_DQN,
        f"{DQN_ROWS}, online network (2, 1), (3, 5), (0, 1) "
        "| eq. 4 of double DQN: the argmax is over the one, the value comes from the other": dqn_targets(online=True),
    },
    random=lambda m, rng: random_dqn_targets(m, rng, double=True),
    mistakes=DQN_MISTAKES
    | {
        "taking no notice of the online network": f"{BEST}.argmax -> target_q.argmax",
        "exchanging the networks: the target network chose, the online one judged": "best = (target_q -> target_q, "
        "online_q = (target_q, None) if online_q is None else (online_q, target_q)\n    best = (target_q",
        "letting the online network choose and judge": "* target_q.gather -> "
        "* (target_q if online_q is None else online_q).gather",
        "letting the sum of both networks choose": f"{BEST}.argmax -> "
        "(target_q if online_q is None else online_q + target_q).argmax",
        "bootstrapping after termination where online_q is given": "gamma * ~terminated -> "
        "gamma * (~terminated if online_q is None else 1)",
    },
    learn=(DQN_CARTPOLE, 60.0),
)

# -------------------------------------------------------------------------------------------------------- rainbow.py

RAINBOW_CARTPOLE = dict.fromkeys("double prioritized dueling multi_step distributional noisy".split(), False) | {
    "env_id": "CartPole-v1", "total_timesteps": 30_000, "num_envs": 4, "train_frequency": 64, "gradient_steps": 32,
    "batch_size": 64, "hidden_sizes": (64, 64), "v_min": 0.0, "target_network_frequency": 128, "end_e": 0.04,
    "exploration_fraction": 0.16, "eval_every": 1_000, "stop_at_return": 150.0, "seed": 1}  # fmt: skip


def rows_of(buffer):
    """Rows (obs, reward, next_obs, terminated, discount) of what an n-step buffer holds."""
    columns = buffer.obs[:, 0], buffer.rewards, buffer.next_obs[:, 0], buffer.terminated, buffer.discounts
    return [[float(x) for x in row] for row in list(zip(*columns))[: buffer.size]]


def windows_of(*steps):
    """The rows of a buffer with n = 3 and gamma 0.5, by obs; each environment's obs are its rewards.

    A step is (rewards of the environments, a letter for each: t terminated, c truncated, r only reset, - nothing).
    """

    def call(m):
        buffer = m.NStepBuffer(20, LINE, spaces.Discrete(2), num_envs=len(steps[0][0]), n_step=3, gamma=0.5)
        for rewards, letters in steps:
            obs = np.array(rewards, np.float32)[:, None]
            flags = [[letter == kind for letter in letters] for kind in "tcr"]
            buffer.add(**transitions(obs, obs[:, 0], *flags))
        return sorted(rows_of(buffer))

    return call


def random_windows(m, rng):
    """A ring of few slots after many steps, with the slots of each, the actions, and the tree if there is one."""
    capacity, n = int(rng.integers(3, 12)), int(rng.integers(1, 4))
    given = {"num_envs": n, "n_step": int(rng.integers(1, 5)), "gamma": rng.uniform(0.2, 1), "alpha": 0.5}
    buffer = m.NStepBuffer(capacity, LINE, spaces.Discrete(9), **given)
    slots, reset_rows = [], np.zeros(n, bool)
    for _ in range(8):
        terminated, truncated = rng.random((2, n)) < 0.2
        step = transitions(rng.normal(size=(n, 1)), rng.normal(size=n), terminated, truncated, reset_rows)
        slots.append(buffer.add(**step | {"actions": rng.integers(9, size=(n, 1))}))
        reset_rows = (terminated | truncated) & ~reset_rows
        if rng.random() < 0.3 and buffer.size > 0:
            buffer.tree.update(np.arange(buffer.size), rng.random(buffer.size))
    return rows_of(buffer), buffer.actions, slots, buffer.size, buffer.position, buffer.tree.nodes


ROWS = "rows (obs, reward, next_obs, terminated, discount)"
exercise(
    "n-step",
    topic="n-step targets, made while playing",
    cut="rainbow.py: NStepBuffer.add, NStepBuffer.write",
    course="week 5, 60 minutes",
    task="put n steps together into one transition, and store it. add gets a step of all environments: append (obs, "
    "action, reward) of environment i to self.open_steps[i], a deque of the steps whose windows are open, unless it is "
    "a reset row. When there are self.n_step of them, the first one's window closes: give the deque to write, and take "
    "its first step off. Where an episode ends, terminated or truncated, all open windows close, each with what it "
    "has. write puts one transition into slot self.position and moves on: obs and action of the first step, the "
    "discounted sum of the rewards, the next_obs and terminated that it is given, and in self.discounts gamma^k for k "
    "rewards. It returns the slot; add returns an array of all slots, having told self.tree.add if there is a tree.",
    cases={
        f"one environment, rewards 1, 2, 3 (which are the observations as well), nothing ends: {ROWS} "
        "| what is known when the third step has been taken, and of which of the three": windows_of(
            ([1], "-"), ([2], "-"), ([3], "-")
        ),
        f"rewards 1, 2, and the second step terminates: {ROWS} "
        "| what happens to all windows that are open when an episode ends": windows_of(([1], "-"), ([2], "t")),
        f"rewards 1, 2, and the second step is truncated; a reset row with 9; then 4, which terminates: {ROWS} "
        "| which steps belong to the episode": windows_of(([1], "-"), ([2], "c"), ([9], "r"), ([4], "t")),
        f"two environments with rewards 1, 2, 3 and 10, 20; the second terminates in its second step: {ROWS} "
        "| whose window it is": windows_of(([1, 10], "--"), ([2, 20], "-t"), ([3, 99], "-r")),
    },
    random=random_windows,
    mistakes={
        "summing rewards without discounting them": "self.gamma**k * reward -> reward",
        "bootstrapping with gamma, as after one step": "self.gamma ** len(steps) -> self.gamma",
        "storing the observation of the window's last step": "obs, action, _ = steps[0] -> obs, action, _ = steps[-1]",
        "storing windows before they close": "len(steps) == self.n_step or (ended and steps) -> steps",
        "losing the windows that the end of the episode cuts short": " or (ended and steps): -> :",
        "storing only the longest of the windows that close": "steps.popleft() -> steps.clear() if ended else "
        "steps.popleft()",
        "discounting by gamma^n, however few rewards there were": "self.gamma ** len(steps) -> self.gamma**self.n_step",
        "forgetting that nothing follows": "next_obs[i], terminated[i]) -> next_obs[i], False)",
        "storing truncation as termination": "next_obs[i], terminated[i]) -> next_obs[i], ended)",
        "going on into the next episode after a truncation": "ended = terminated[i] or truncated[i] -> "
        "ended = terminated[i]",
        "taking the reset row for a step": "np.flatnonzero(~reset_rows) -> range(len(reset_rows))",
        "mixing steps of several environments": "self.open_steps[i] -> self.open_steps[0]",
        "not telling the tree: what it does not know is never drawn": "self.tree.add(slots) -> pass",
        "writing on beyond the last slot instead of over the first": "(slot + 1) % self.capacity -> "
        "min(slot + 1, self.capacity - 1)",
    },
    learn=(RAINBOW_CARTPOLE | {"multi_step": True}, 60.0),
)


def projected(*rows):
    """project on the support 0, 1, 2, 3, 4 of rows (reward, terminated, discount, probabilities)."""

    def call(m):
        rewards, terminated, discounts, probs = zip(*rows)
        step = {"rewards": tensor(rewards), "terminated": tensor(np.array(terminated)), "discounts": tensor(discounts)}
        return m.project(**step, probs=tensor(probs), support=tensor([0.0, 1, 2, 3, 4]))

    return call


def random_projected(m, rng):
    rows, atoms = int(rng.integers(1, 5)), int(rng.integers(2, 8))
    low = rng.normal()
    given = {"rewards": tensor(3 * rng.normal(size=rows)), "terminated": tensor(rng.random(rows) < 0.3)}
    given |= {"discounts": tensor(rng.random(rows)), "probs": tensor(rng.dirichlet([1] * atoms, size=rows))}
    return m.project(**given, support=tensor(np.linspace(low, low + rng.uniform(0.5, 4), atoms)))


CERTAIN = [[0.0] * i + [1.0] + [0.0] * (4 - i) for i in range(5)]  # each of the atoms for certain
SHARES = "(1 - (y[:, :, None] - support).abs() / distance).clamp(min=0)"
exercise(
    "project",
    topic="the projection of C51",
    cut="rainbow.py: project",
    course="week 5, 60 minutes",
    task="share out the probabilities of y = r + discount z among the atoms of the support. rewards, terminated "
    "(booleans) and discounts are (B,), probs is (B, atoms): those of the returns z, which are the support's; the "
    "result is (B, atoms). A y beyond the first or last atom counts as that atom. Between two atoms, each gets the "
    "more, the nearer it is: at a quarter of the way from 1 to 2, three quarters go to 1. A loop over atoms is fine.",
    cases={
        "support 0, 1, 2, 3, 4, z is 1 for certain, r = 1, gamma 1 | the case in which y is an atom itself": projected(
            (1.0, False, 1.0, CERTAIN[1])
        ),
        "support 0, 1, 2, 3, 4, z is 2 for certain, r = 0.25, gamma 0.5 "
        "| how far y is from the atoms below and above it": projected((0.25, False, 0.5, CERTAIN[2])),
        "support 0, 1, 2, 3, 4, gamma 0.5: z is 4 and r = 5; z is 0 and r = -2 "
        "| a y that is no return of the support": projected(
            (5.0, False, 0.5, CERTAIN[4]), (-2.0, False, 0.5, CERTAIN[0])
        ),
        "support 0, 1, 2, 3, 4, z is 2 for certain, r = 1.5, gamma 0.5, terminated "
        "| what y is if nothing follows": projected((1.5, True, 0.5, CERTAIN[2])),
        "support 0, 1, 2, 3, 4, z is 4 for certain, r = 0, gamma 0.5 in one row and 0.25 in another "
        "| discounts, of which each row has its own": projected(
            (0.0, False, 0.5, CERTAIN[4]), (0.0, False, 0.25, CERTAIN[4])
        ),
        "support 0, 1, 2, 3, 4 with probabilities 0.4, 0, 0.2, 0, 0.4, r = 0.5, gamma 0.5 "
        "| what two returns give to the same atom": projected((0.5, False, 0.5, [0.4, 0.0, 0.2, 0.0, 0.4])),
    },
    random=random_projected,
    mistakes={
        "losing the probability where y falls on an atom: floor and ceiling are the same there": f"{SHARES} -> "
        f"{SHARES} * ((y[:, :, None] - support) != 0)",
        "giving more to the atom that is further away": f"{SHARES} -> "
        f"{SHARES}\n    shares = torch.where((shares > 0) & "
        "(shares < 1), 1 - shares, (shares == 1).roll(1, 2).float())",
        "giving more to the atom that is further away, but for y that are atoms": f"{SHARES} -> {SHARES}\n    "
        "shares = torch.where((shares > 0) & (shares < 1), 1 - shares, shares)",
        "forgetting the reward": "rewards[:, None] + -> 0 * rewards[:, None] +",
        "giving all of it to the atom below": f"{SHARES} -> ((y[:, :, None] >= support - 1e-6) & "
        "(y[:, :, None] < support + distance - 1e-6)).float()",
        "giving half to each of the two atoms": f"{SHARES} -> {SHARES}\n    shares = torch.where((shares > 0) & "
        "(shares < 0.99999), 0.5, shares)",
        "forgetting the discount": "(discounts * ~terminated) -> (discounts**0 * ~terminated)",
        "losing what lies beyond the ends": "y = y.clamp(support[0], support[-1]) -> probs = probs[:, :, None] * "
        "((y >= support[0]) & (y <= support[-1]))[:, :, None]; probs = probs.squeeze(2)",
        "going on after termination": "discounts * ~terminated -> discounts",
        "removing the reward of a terminated transition as well": "rewards[:, None] -> "
        "(rewards * ~terminated)[:, None]",
        "taking one discount for all rows": "(discounts * -> (discounts[0] *",
        "keeping only the last of several shares that meet in an atom": "(probs[:, :, None] * shares).sum(1) -> "
        "torch.stack([part.gather(0, (len(part) - 1 - (part.flip(0) > 0).int().argmax(0))[None])[0] "
        "for part in probs[:, :, None] * shares])",
    },
    learn=(RAINBOW_CARTPOLE | {"distributional": True}, 60.0),
)


def tree_of(*priorities):
    """A SumTree of four slots into which these lists of {slot: priority} have been written, one after the other."""

    def make(m):
        tree = m.SumTree(4, 1.0)
        for written in priorities:
            tree.write(slots=np.array(list(written)), priorities=np.array(list(written.values()), float))
        return tree

    return make


def tree_draws(part, batch_size, beta):
    """Slots (part 0) or weights (part 1) drawn from priorities 2, 4, 8, 2, each from the middle of its share."""

    def call(m):
        middle = SimpleNamespace(random=lambda size=None: 0.5 if size is None else np.full(size, 0.5))
        return tree_of({0: 2, 1: 4, 2: 8, 3: 2})(m).sample(batch_size=batch_size, rng=middle, beta=beta)[part]

    return call


def random_tree(m, rng):
    """A tree after several writes, and draws from it by a real generator; some priorities are 0."""
    capacity = int(rng.integers(1, 12))
    tree = m.SumTree(capacity, 1.0)
    tree.write(slots=np.arange(capacity), priorities=rng.random(capacity) * (rng.random(capacity) < 0.7))
    tree.write(slots=np.array([0]), priorities=1.5)
    for _ in range(2):
        slots = rng.permutation(capacity)[: rng.integers(1, capacity + 1)]
        tree.write(slots=slots, priorities=0.1 + rng.random(len(slots)))
    top = SimpleNamespace(random=lambda size=None: 1 - 1e-16 if size is None else np.full(size, 1 - 1e-16))
    draws = [tree.sample(batch_size=int(rng.integers(1, 9)), rng=x, beta=rng.random()) for x in (rng, rng, top)]
    return tree.nodes[1:], draws


PRIORITIES = "priorities 2, 4, 8, 2, every random number 0.5"
exercise(
    "priorities",
    topic="prioritised sampling, with a sum tree",
    cut="rainbow.py: SumTree.write, SumTree.sample",
    course="week 5, 60 minutes",
    task="write the tree that the drawing shows. self.nodes is an array, slot s is node self.leaves + s, and node 1 is "
    "the sum of all. write sets the priorities (an array, or one number) of an array of slots, and the sums above "
    "them. sample divides the sum of all into batch_size equal parts, takes a number from each (rng.random(batch_size) "
    "gives numbers from 0 to 1), and follows each number down the tree to its slot. With it go the weights p^-beta, "
    "divided by the largest of the batch, float32. Loops over the batch are fine. A number that rounding has made too "
    "large must not lead to a slot with priority 0.",
    cases={
        "priorities 1, 2, 0, 5 written into four slots: nodes 1 to 7 | how far up the sums change": lambda m: tree_of(
            {0: 1, 1: 2, 2: 0, 3: 5}
        )(m).nodes[1:],
        "then 4 is written into slot 1, which had 2 | a slot that had a priority before": lambda m: tree_of(
            {0: 1, 1: 2, 2: 0, 3: 5}, {1: 4}
        )(m).nodes[1:],
        f"{PRIORITIES}, eight draws, one from each part: the slots "
        "| one number and its way down, with pencil and paper": tree_draws(0, 8, 0.5),
        f"{PRIORITIES}, eight draws, beta 0.5: the weights "
        "| section 3.4 of the paper: what is drawn twice as often should count half as much, if beta is 1": tree_draws(
            1, 8, 0.5
        ),
    },
    random=random_tree,
    mistakes={
        "leaving all sums but those above the leaves as they were": "for _ in range(self.levels):\n            nodes = "
        "nodes // 2 -> for _ in range(min(1, self.levels)):\n            nodes = nodes // 2",
        "adding the new priority to the sums without taking the old one off": (
            "self.nodes[nodes] = priorities -> self.nodes[nodes] = priorities; leaves = nodes; done = nodes",
            "nodes = nodes // 2 -> nodes = nodes // 2; np.add.at(self.nodes, nodes, self.nodes[leaves]); continue",
        ),
        "keeping the whole number on the way to the right, where the sum on the left has to be taken off": ""
        "np.where(go_right, numbers - left, numbers) -> numbers",
        "turning left where it should be right": "(numbers >= left) & (right > 0) -> (numbers < left)",
        "taking all numbers from the whole sum, not each from its own part": "(np.arange(batch_size) + "
        "rng.random(batch_size)) * self.nodes[1] / batch_size -> rng.random(batch_size) * self.nodes[1]",
        "taking one random number for all parts": "rng.random(batch_size) -> rng.random()",
        "leaving the weights out": "** -beta -> ** 0.0",
        "giving the larger weights to what is drawn more often": "** -beta -> ** beta",
        "not dividing by the largest weight": "(weights / weights.max()) -> (weights + 0)",
        "forgetting beta": "** -beta -> ** -1.0",
        "letting rounding lead to a slot with priority 0": " & (right > 0) -> ",
    },
    learn=(RAINBOW_CARTPOLE | {"prioritized": True}, 60.0),
)
