"""Exercises of weeks 4 and 5: replay, targets, and the improvements of DQN."""

from types import SimpleNamespace

import numpy as np
from gymnasium import spaces
from inputs import flags, normal, pick, refuses, share, tensors, together
from mechanism import exercise
from pictures import Table, drawn

DQN_CARTPOLE = {"env_id": "CartPole-v1", "total_timesteps": 40_000, "num_envs": 4, "train_frequency": 2,
                "gradient_steps": 1, "batch_size": 128, "learning_rate": 1e-3, "hidden_sizes": (64, 64),
                "target_network_frequency": 2, "tau": 0.01, "exploration_fraction": 0.16, "end_e": 0.04,
                "normalize_reward": False, "eval_every": 1_000, "stop_at_return": 150.0, "seed": 1}  # fmt: skip
SPACES = spaces.Box(-1, 1, (1,)), spaces.Discrete(9)
TITLES = "obs", "action", "reward", "next_obs", "terminated"
BUFFER, N_STEP_BUFFER = Table(titles=TITLES, part=0), Table(titles=(*TITLES, "discount"), part=0)
LETTERS = {"terminated": "tb", "truncated": "cb", "reset_rows": "r"}


def add_steps(buffer, steps):
    """What a buffer holds after steps: (numbers of the environments, a letter for each).

    A number is observation and reward; the letter says t terminated, c cut off, b both, r only reset, - nothing.
    """
    slots, is_rainbows = [], hasattr(buffer, "discounts")
    for t, (numbers, letters) in enumerate(steps):
        obs = np.array(numbers, np.float32)[:, None]
        given = {name: np.array([letter in kinds for letter in letters]) for name, kinds in LETTERS.items()}
        given |= {"obs": obs, "rewards": obs[:, 0], "next_obs": obs + 0.5}
        if not is_rainbows:  # dqn.py's buffer need not know what was truncated, and returns nothing
            del given["truncated"]
        slots.append(buffer.add(**given, actions=(np.arange(len(obs)) + t)[:, None] % 9))
    names = "obs actions rewards next_obs terminated discounts".split()
    names = [name for name in names if hasattr(buffer, name)]
    rows = [[np.ravel(getattr(buffer, name)[i])[0] for name in names] for i in range(buffer.capacity)]
    if is_rainbows:
        return rows, slots, buffer.position, buffer.size
    return rows, buffer.position, buffer.size


def random_steps(rng):
    """(a capacity, steps): everything may happen in any step."""
    capacity, n = int(rng.integers(4, 12)), rng.integers(1, 5)
    return capacity, [(rng.normal(size=n), rng.choice(list("-----tcbr"), n)) for _ in range(rng.integers(1, 8))]


def ring(capacity, *steps):
    return drawn(BUFFER, lambda m: add_steps(m.ReplayBuffer(capacity, *SPACES), steps))


def replay_shares(m, capacity=5, batch_size=2):
    """How often each of two transitions is drawn, and slots that are empty; whether one is ever drawn twice."""
    buffer, rng = m.ReplayBuffer(capacity, *SPACES), np.random.default_rng(0)
    add_steps(buffer, [([1, 2], "--")])
    batches = [buffer.sample(batch_size=batch_size, rng=rng).obs.numpy()[:, 0] for _ in range(1000)]
    return [np.mean(np.array(batches) == x) for x in range(3)], any(batch[0] == batch[1] for batch in batches)


def random_replay(m, rng):
    """A ring after some steps, and the form of what sample takes from it."""
    capacity, steps = random_steps(rng)
    buffer = m.ReplayBuffer(capacity, *SPACES)
    found = add_steps(buffer, steps)
    batch = buffer.sample(batch_size=1, rng=rng) if buffer.size > 0 else []
    return *found, [len(part) for part in batch]


exercise(
    "replay",
    course="week 4, 45 minutes, medium: the replay buffer, a ring",
    cut="dqn.py: ReplayBuffer.add, ReplayBuffer.sample",
    task="the arrays self.obs, next_obs, actions, rewards and terminated have a row per slot. self.position is the "
    "next slot to write, self.size how many are filled. | ReplayBuffer.add: write what stores transitions. "
    "Reset rows are left out. | ReplayBuffer.sample: write what draws transitions. "
    "self.get(slots) makes Transitions of an array of slots. `rng` is a NumPy Generator.",
    cases={
        "two environments, two steps, capacity 3: (rows (obs, action, reward, next_obs, terminated), position, size) "
        "| the remainder of position + 0, 1, … divided by the capacity": ring(3, ([1, 2], "--"), ([3, 4], "--")),
        "the first of three is truncated, the second only resets, the third terminates | the rows that are stored, and "
        "what is stored as terminated": ring(5, ([1, 2, 3], "crt")),
        "two transitions in a buffer for five: (share of empty slots, of each transition; is one drawn twice?) "
        "| the range of the random slots": (replay_shares, 0.05),
        "asking for three of two stored transitions: is it refused with a ValueError? | the first line of sample": (
            refuses(lambda m: replay_shares(m, batch_size=3))
        ),
    },
    random=random_replay,
    mistakes={
        "storing the reward of the first environment for all": "= rewards[played] -> = rewards[0]",
        "storing the actions without leaving out reset rows": "= actions[played] -> = actions[:count]",
        "letting size grow beyond the capacity": "min(self.size + count, self.capacity) -> self.size + count",
        "storing the reset row, whose action was ignored": "played = ~reset_rows -> played = reset_rows | True",
        "drawing from slots that are still empty": "rng.integers(self.size, size -> rng.integers(self.capacity, size",
        "drawing without replacement": "integers(self.size, size=batch_size) -> "
        "choice(self.size, batch_size, replace=False)",
        "handing out more than there is": "if batch_size > self.size -> if False",
    },
    learn=(DQN_CARTPOLE, 60.0),
)

TWENTY = {"q": [95.0] * 20, "targets": [100.0] * 19 + [0.0]}
ERRORS = {"q": normal("B", 2.0), "targets": normal("B", 2.0), "clip_error": pick(False, True)}
exercise(
    "clipped-error",
    course="week 4, 20 minutes, easy: squared errors, clipped errors, and what each of them estimates",
    cut="dqn.py: q_losses",
    task="write the loss of each transition: with e = y - Q, the squared error e^2; with clip_error, the Huber loss, "
    "e^2 / 2 up to |e| = 1 and |e| - 1/2 beyond, whose slope is e clipped to ±1. `q` and `targets` are (B,); so is the "
    "result. The slopes by q are what moves the network, so they are checked as well.",
    cases={
        "errors 3, -0.5, 0: (losses, their slopes by q) | the sign of a slope, and the factor 2": tensors(
            "q_losses", by=["q"], q=[0.0, 1.0, 2.0], targets=[3.0, 0.5, 2.0], clip_error=False
        ),
        "the same errors, clipped | the loss and its slope where |e| is just below 1, and just above": tensors(
            "q_losses", by=["q"], q=[0.0, 1.0, 2.0], targets=[3.0, 0.5, 2.0], clip_error=True
        ),
        "Q is 95, nineteen targets are 100 and one is 0; squared: add the slopes up. They are 0: Q is the mean "
        "| what one error of 95 weighs beside nineteen of 5": tensors("q_losses", by=["q"], **TWENTY, clip_error=False),
        "the same, clipped: the slopes add up to -18, so Q rises on, nearly to the median, 100 "
        "| what one error of 95 weighs beside nineteen of 5": tensors("q_losses", by=["q"], **TWENTY, clip_error=True),
    },
    random=tensors("q_losses", by=["q"], **ERRORS),
    mistakes={
        "taking the absolute error: half of the targets are above its estimate, a median": "(targets - q).square() -> "
        "(targets - q).abs()",
        "always clipping": "if clip_error -> if True",
        "never clipping": "if clip_error -> if False",
        "clipping the error before it is squared: then large errors have no slope, and teach nothing": ""
        'nn.functional.huber_loss(q, targets, reduction="none") -> (targets - q).clamp(-1, 1).square() / 2',
        "taking the mean already: here each transition has a loss of its own": "(targets - q).square() -> "
        "(targets - q).square().mean()",
    },
)

ROWS = {"rewards": [1.0, 2.0, 3.0], "terminated": [False, False, True], "gamma": [0.5, 0.25, 0.5],
        "target_q": [[1.0, 4.0], [6.0, 2.0], [8.0, 9.0]]}  # fmt: skip
RANDOM_ROWS = {"rewards": normal("B"), "terminated": flags("B"), "gamma": pick(share, normal("B")),
               "target_q": normal("BA")}  # fmt: skip
BEST = "(target_q if online_q is None else online_q)"
exercise(
    "double-dqn",
    course="week 5, 30 minutes, medium: the target of double DQN",
    cut="dqn.py: td_targets",
    task="write the target of DQN and, where online_q is given, that of double DQN: one network chooses the action, "
    "the other one judges it. `rewards` and `terminated` (booleans) are (B,), `gamma` is a number or, here, a discount "
    "for each row (B,), both Q are (B, actions).",
    cases={
        "one network | algorithm 1 of DQN; every tensor but target_q is (B,)": tensors("td_targets", **ROWS),
        "two networks | eq. 4 of double DQN: the argmax is over the one, the value comes from the other": tensors(
            "td_targets", **ROWS, online_q=[[2.0, 1.0], [3.0, 5.0], [0.0, 1.0]]
        ),
    },
    random=together(tensors("td_targets", **RANDOM_ROWS), tensors("td_targets", **RANDOM_ROWS, online_q=normal("BA"))),
    mistakes={
        "bootstrapping after termination": "* ~terminated * -> *",
        "forgetting the discounts": "gamma * ~terminated -> ~terminated",
        "taking the mean value of the next state": "target_q.gather(1, best).squeeze(1) -> "
        "(target_q.mean(1) if online_q is None else target_q.gather(1, best).squeeze(1))",
        "adding shapes (B,) and (B, 1), which makes a table of all pairs": "best).squeeze(1) -> best)",
        "taking no notice of the online network": f"{BEST}.argmax -> target_q.argmax",
        "exchanging the networks: the target network chose, the online one judged": "best = (target_q -> target_q, "
        "online_q = (target_q, None) if online_q is None else (online_q, target_q)\n    best = (target_q",
        "letting the online network choose and judge": "* target_q.gather -> "
        "* (target_q if online_q is None else online_q).gather",
        "letting the sum of both networks choose": f"{BEST}.argmax -> "
        "(target_q if online_q is None else online_q + target_q).argmax",
    },
    learn=(DQN_CARTPOLE, 60.0),
)

RAINBOW_CARTPOLE = dict.fromkeys("double prioritized dueling multi_step distributional noisy".split(), False) | {
    "env_id": "CartPole-v1", "total_timesteps": 30_000, "num_envs": 4, "train_frequency": 64, "gradient_steps": 32,
    "batch_size": 64, "hidden_sizes": (64, 64), "v_min": 0.0, "v_max": 100.0,
    "normalize_reward": False, "target_network_frequency": 128, "end_e": 0.04,
    "exploration_fraction": 0.16, "eval_every": 1_000, "stop_at_return": 150.0, "seed": 1}  # fmt: skip


def windows(*steps):
    """What a buffer with n = 3 and gamma 0.5 holds after these steps."""
    given = {"num_envs": len(steps[0][0]), "n_step": 3, "gamma": 0.5}
    return drawn(N_STEP_BUFFER, lambda m: add_steps(m.NStepBuffer(9, *SPACES, **given), steps))


def random_windows(m, rng):
    """A ring of few slots after many steps, with its tree of priorities."""
    capacity, steps = random_steps(rng)
    given = {"num_envs": len(steps[0][0]), "n_step": int(rng.integers(1, 5)), "gamma": rng.uniform(0.2, 1)}
    buffer, found = m.NStepBuffer(capacity, *SPACES, **given, alpha=0.5), []
    for step in steps:
        found.append(add_steps(buffer, [step]))
        if rng.random() < 0.3 and buffer.size > 0:
            buffer.tree.update(np.arange(buffer.size), rng.random(buffer.size))
    return found, buffer.tree.nodes


exercise(
    "n-step",
    course="week 5, 60 minutes, hard: n-step targets, made while playing",
    cut="rainbow.py: NStepBuffer.add, NStepBuffer.write",
    task="put n steps together into one transition, and store it. self.open_steps[i] is a deque with the steps of "
    "environment i whose windows are open. | NStepBuffer.add: you get a step of all environments. Append "
    "(obs, action, reward) of environment i to self.open_steps[i], unless it is a reset row. When there are "
    "self.n_step of them, the first one's window closes: give the deque to write, and take its first step "
    "off. Where an episode ends, terminated or truncated, all open windows close, each with what it has. "
    "Return an array of all slots (whole numbers, also if it is empty), having told self.tree.add if there is a "
    "tree. | NStepBuffer.write: put one "
    "transition into slot self.position and move on. It has obs and action of the first step, the discounted "
    "sum of the rewards, the next_obs and terminated that you are given, and in self.discounts gamma^k for k "
    "rewards. Return the slot.",
    cases={
        "observations and rewards 1, 2, 3, n = 3, gamma 0.5: (rows (obs, action, reward, next_obs, terminated, "
        "discount), slots of each step, position, size) | what is known after the third step": (
            windows(([1], "-"), ([2], "-"), ([3], "-"))
        ),
        "1, 2, and the second step is truncated; a reset row with 9; then 4, which terminates | what happens to all "
        "windows that are open when an episode ends": windows(([1], "-"), ([2], "c"), ([9], "r"), ([4], "t")),
        "two environments with 1, 2, 3 and 10, 20; the second terminates in its second step | whose window it is": (
            windows(([1, 10], "--"), ([2, 20], "-t"), ([3, 99], "-r"))
        ),
    },
    random=random_windows,
    mistakes={
        "bootstrapping with gamma, as after one step": "self.gamma ** len(steps) -> self.gamma",
        "losing the windows that the end of the episode cuts short": " or (done and steps): -> :",
        "discounting by gamma^n, however few rewards there were": "self.gamma ** len(steps) -> self.gamma**self.n_step",
        "storing truncation as termination": "next_obs[i], terminated[i]) -> next_obs[i], done)",
        "going on into the next episode after a truncation": "done = terminated[i] or truncated[i] -> "
        "done = terminated[i]",
        "taking the reset row for a step": "np.flatnonzero(~reset_rows) -> range(len(reset_rows))",
        "mixing steps of several environments": "self.open_steps[i] -> self.open_steps[0]",
        "not telling the tree: what it does not know is never drawn": "self.tree.add(slots) -> pass",
    },
    learn=(RAINBOW_CARTPOLE | {"multi_step": True}, 60.0),
)


def tree_of(m, priorities, **more):
    """A SumTree of slots with these priorities; then of those that are written one by one."""
    tree = m.SumTree(len(priorities), 1.0)
    tree.write(slots=np.arange(len(priorities)), priorities=np.array(priorities))
    for slot, priority in more.items():
        tree.write(slots=np.array([int(slot)]), priorities=priority)
    return tree


def always(number):
    """A generator whose random numbers are all the same."""
    return SimpleNamespace(random=lambda size=None: number if size is None else np.full(size, number))


def random_tree(m, rng):
    """A tree after several writes, and draws from it; some priorities are 0."""
    capacity = int(rng.integers(1, 12))
    tree = tree_of(m, rng.random(capacity) * (rng.random(capacity) < 0.7), **{"0": 1.5})
    for _ in range(2):
        slots = rng.permutation(capacity)[: rng.integers(1, capacity + 1)]
        tree.write(slots=slots, priorities=0.1 + rng.random(len(slots)))
    draws = [tree.sample(batch_size=8, rng=x, beta=rng.random()) for x in (rng, rng, always(1 - 1e-16))]
    return tree.nodes[1:], draws


exercise(
    "priorities",
    course="week 5, 60 minutes, hard: prioritised sampling, with a sum tree",
    cut="rainbow.py: SumTree.write, SumTree.sample",
    task="write the tree that the drawing shows. self.nodes is an array, slot s is node self.leaves + s, and node "
    "1 is the sum of all. | SumTree.write: set the priorities (an array, or one number) of an array of slots, "
    "and the sums above them. | SumTree.sample: divide the sum of all into batch_size equal parts. Take a "
    "number from each; rng.random(batch_size) gives numbers from 0 to 1. Follow each number down the tree to "
    "its slot. With it go the weights p^-beta, divided by the largest of the batch, float32. Loops over the "
    "batch are fine. A number that rounding has made too large must not lead to a slot with priority 0.",
    cases={
        "nodes 1 to 7 | how far up the sums change": lambda m: tree_of(m, [1.0, 2.0, 0.0, 5.0]).nodes[1:],
        "then 4 is written into slot 1 | a slot that had a priority before": lambda m: tree_of(
            m, [1.0, 2.0, 0.0, 5.0], **{"1": 4.0}
        ).nodes[1:],
        "priorities 2, 4, 8, 2, every random number 0.5: (slots, weights) | one number and its way down; section 3.4 "
        "of the paper: what is drawn twice as often should count half as much, if beta is 1": lambda m: tree_of(
            m, [2.0, 4.0, 8.0, 2.0]
        ).sample(batch_size=8, rng=always(0.5), beta=0.5),
    },
    random=random_tree,
    mistakes={
        "keeping the whole number on the way to the right, where the sum on the left has to be taken off": ""
        "np.where(go_right, numbers - left, numbers) -> numbers",
        "taking all numbers from the whole sum, not each from its own part": "(np.arange(batch_size) + "
        "rng.random(batch_size)) * self.nodes[1] / batch_size -> rng.random(batch_size) * self.nodes[1]",
        "taking one random number for all parts": "rng.random(batch_size) -> rng.random()",
        "not dividing by the largest weight": "(weights / weights.max()) -> (weights + 0)",
        "forgetting beta": "** -beta -> ** -1.0",
        "letting rounding lead to a slot with priority 0": " & (right > 0) -> ",
    },
    learn=(RAINBOW_CARTPOLE | {"prioritized": True}, 60.0),
)
