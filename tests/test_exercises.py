"""The classroom in exercises/: each blanked copy fails and each original passes, each known mistake is named, each
planted bug is found and each original is found to be sound; handouts stand alone and hold no solution.

SOUND has a solution of each exercise that is not the script's own, as a student might write it. Each entry of WRONG
changes one thing in it, and has to be told what it is; together they reach every message in the table. Those of
tasks_NAME.py stand in tests/exercises/solutions_NAME.py.
"""

import ast
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "exercises"))

import check  # noqa: E402
import forms  # noqa: E402
import release  # noqa: E402
import runner  # noqa: E402
import start  # noqa: E402
from forms import EXERCISES, HUNTS  # noqa: E402


@pytest.fixture(autouse=True)
def no_limits(monkeypatch):
    """No result depends on how busy the machine is."""
    monkeypatch.setattr(check, "LIMITS", dict.fromkeys(check.LIMITS, 10**6))


every_exercise = pytest.mark.parametrize("name", EXERCISES)
every_hunt = pytest.mark.parametrize("name", HUNTS)


def source_of(script):
    """The text of a script as it stands in the repository."""
    return (ROOT / script).read_text(encoding="utf-8")


def module_of(tmp_path, script, source):
    """A context manager: this source as a student's module."""
    path = tmp_path / Path(script).name
    path.write_text(source, encoding="utf-8")
    return runner.loaded(path)


def judged(task, module):
    """What is said of each case of an exercise or a hunt, None if it is right: as in check.py, but in this process."""
    notes = {}
    runner.watch(module, getattr(task, "blanks", ()), notes)
    answers = [json.loads(json.dumps(runner.answer(case.call, module, notes))) for case in task.cases]
    return [check.judge_case(case, answer, getattr(task, "gives", ())) for case, answer in zip(task.cases, answers)]


def training_here(module):
    """As Student.train, but in this process."""

    def train(before=None, **settings):
        if before:
            before(module)
        with tempfile.TemporaryDirectory() as folder:
            runner.train(module, folder, **settings)
            paths = [Path(place, Path(module.__file__).name) for place in check.FOLDERS]
            original = check.imported(next(path for path in paths if path.is_file()))
            return check.trained(original, f"{folder}/run", settings)

    return train


def graded(name, folder, source, up_to=1):
    """The Steps of a student's file with this source, which runs in processes of its own."""
    task, path = forms.find(name), folder / forms.find(name).file
    path.write_text(source, encoding="utf-8")
    return list(check.grade(task, check.Student(task, path), up_to))


def run(folder, *command, **environment):
    """A command in a folder, with nothing of this repository on its path."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, capture_output=True, text=True, env=environment
    )


# ------------------------------------------------------------------------------------------------ solutions, mistakes

SOUND = {
    "epsilon-greedy": """
def epsilon_greedy(values, epsilon, rng):
    n = len(values)
    if rng.random() < epsilon:
        return rng.choice(list(range(n)))
    best = [a for a in range(n) if values[a] == max(values)]
    return rng.choice(best)
""",
    "q-learning": """
def q_learning_target(reward, discount, next_values):
    return reward + discount * max(next_values)

def play_episode(agent, env, run, rng, args):
    state, total, q = agent.state(env.reset()[0], run), 0.0, agent.tables[0]
    for _ in range(episode_limit(args, env.spec)):
        epsilon, alpha = schedules(args, run.step, len(run.episodes))
        action = epsilon_greedy(agent.values(state), epsilon, rng)
        obs, reward, terminated, truncated, _ = env.step(action + agent.first_action)
        run.step += 1
        following = agent.state(obs, run)
        gamma = args.gamma * (not terminated)
        error = q_learning_target(reward, gamma, q[following]) - q[state][action]
        q[state][action] += alpha * error
        run.log(td_error=abs(error))
        total, state = total + reward, following
        if terminated or truncated:
            break
    run.episodes.append((run.step, total))
""",
    "td-targets": """
def sarsa_target(reward, discount, next_values, next_action):
    return reward + discount * next_values[next_action]

def expected_sarsa_target(reward, discount, next_values, epsilon):
    n = len(next_values)
    pi = [epsilon / n] * n
    pi[next_values.index(max(next_values))] += 1 - epsilon
    return reward + discount * sum(p * v for p, v in zip(pi, next_values))

def double_q_target(reward, discount, next_values, other_next_values):
    best = max(range(len(next_values)), key=lambda a: next_values[a])
    return reward + discount * other_next_values[best]
""",
    "returns": """
def compute_returns(rewards, next_values, terminated, truncated, gamma):
    cut = truncated & ~terminated
    over = terminated | truncated
    terms = rewards + gamma * next_values * cut
    decay = gamma * ~over
    xs, x = [], next_values[-1]
    for t in range(len(terms) - 1, -1, -1):
        x = terms[t] + decay[t] * x
        xs.append(x)
    return torch.stack(xs[::-1])
""",
    "gae": """
def compute_gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    dead, over = terminated, terminated | truncated
    advantages, a = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_values[t] * ~dead[t] - values[t]
        a = delta + gamma * gae_lambda * ~over[t] * a
        advantages[t] = a
    return advantages, advantages + values
""",
    "clip": """
def policy_loss(log_ratios, advantages, clip_coef):
    ratio = log_ratios.exp()
    low, high = torch.tensor(1 - clip_coef), torch.tensor(1 + clip_coef)
    plain = ratio * advantages
    clipped = ratio.maximum(low).minimum(high) * advantages
    worse = torch.stack([plain, clipped]).amin(0)
    return -worse.mean()
""",
    "value-clip": """
def value_loss(values, old_values, returns, clip_coef=None):
    error = (values - returns).abs()
    if clip_coef is not None:
        near = values.clamp(old_values - clip_coef, old_values + clip_coef)
        error = torch.max(error, (near - returns).abs())
    return (error * error).mean() / 2
""",
    "vtrace": """
def compute_vtrace(rewards, values, next_values, terminated, truncated, log_ratios, gamma, rho_clip=1.0, c_clip=1.0):
    over, following = terminated | truncated, next_values * ~terminated
    rho, c = log_ratios.exp().clamp(max=rho_clip), log_ratios.exp().clamp(max=c_clip)
    x, corrections = torch.zeros_like(rewards[0]), torch.zeros_like(rewards)
    targets = following.clone()
    for t in reversed(range(len(rewards))):
        targets[t] += x * ~over[t]
        x = rho[t] * (rewards[t] + gamma * following[t] - values[t]) + gamma * c[t] * ~over[t] * x
        corrections[t] = x
    advantages = rho * (rewards + gamma * targets - values)
    return advantages, values + corrections
""",
    "masked": """
def __init__(self, logits, mask=None, sizes=None):
    self.single = sizes is None
    sizes = sizes or [logits.shape[-1]]
    if mask is not None:
        mask = torch.as_tensor(mask).bool()
        check_masks(mask.numpy(), sizes)
        logits = logits.masked_fill(~mask, -1e30)
    self.log_probs = [part.log_softmax(-1) for part in logits.split(sizes, -1)]

def log_prob(self, actions):
    actions = [actions] if self.single else actions.unbind(-1)
    parts = [p.gather(-1, a[..., None])[..., 0] for p, a in zip(self.log_probs, actions)]
    return torch.stack(parts).sum(0)

def entropy(self):
    parts = [-(p.exp() * p).sum(-1) for p in self.log_probs]
    return torch.stack(parts).sum(0)

MaskedCategorical.__init__, MaskedCategorical.log_prob, MaskedCategorical.entropy = __init__, log_prob, entropy
""",
    "replay": """
def add(self, obs, actions, rewards, terminated, truncated, reset_rows, next_obs):
    slots = []
    for i in range(len(obs)):
        if reset_rows[i]:
            continue
        slot = self.position
        self.obs[slot], self.actions[slot], self.rewards[slot] = obs[i], actions[i], rewards[i]
        self.next_obs[slot], self.terminated[slot] = next_obs[i], terminated[i]
        self.position = (slot + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)
        slots.append(slot)
    return np.array(slots, int)

def sample(self, batch_size, rng):
    if batch_size > self.size:
        raise ValueError("too few")
    return self.get(rng.integers(0, self.size, batch_size))

ReplayBuffer.add, ReplayBuffer.sample = add, sample
""",
    "double-dqn": """
def td_targets(rewards, terminated, gamma, target_q, online_q=None):
    alive = 1 - terminated.float()
    if online_q is None:
        future = target_q.max(1).values
    else:
        future = target_q[torch.arange(len(target_q)), online_q.argmax(1)]
    return rewards + gamma * alive * future
""",
    "td3-target": """
def smoothed(actions, noise, clip):
    noise = noise.clip(-clip, clip)
    return (actions + noise).clip(-1, 1)

def critic_targets(rewards, next_values, terminated, gamma):
    future = next_values.min(0).values
    return rewards + gamma * (1 - terminated.float()) * future
""",
    "polyak": """
def polyak(target, source, tau):
    for p, q in zip(target.parameters(), source.parameters()):
        p.data.mul_(1 - tau).add_(tau * q.data)
""",
    "es-update": """
def make_candidates(theta, noise, sigma):
    return np.array([theta + sign * sigma * eps for eps in noise for sign in (1, -1)])

def es_gradient(fitnesses, noise, sigma):
    signed = np.stack([noise, -noise], 1).reshape(-1, noise.shape[1])
    return (fitnesses[:, None] * signed).sum(0).astype(noise.dtype) / (len(fitnesses) * sigma)
""",
    "ranks": """
def centered_ranks(returns):
    below = (returns[:, None] > returns).sum(1)
    equal = (returns[:, None] == returns).sum(1)
    return (below + (equal - 1) / 2) / (len(returns) - 1) - 0.5

def shape_fitness(returns, fitness="centered-rank", elite=1.0):
    if fitness == "centered-rank":
        returns = centered_ranks(returns)
    elif fitness == "standardized":
        returns = (returns - returns.mean()) / returns.std()
    n = math.ceil(elite * len(returns))
    if n == len(returns):
        return returns
    base = np.sort(returns)[::-1][n]
    return np.where(returns > base, returns - base, 0)
""",
    "ppod-anneal": """
def anneal_parameters(self):
    room = self.value_capacity if self.args.anneal_by == "capacity" else len(self.value_demos)
    if not self.value_demos:
        return
    self.rho += self.args.phi / room
    self.rho = min(self.rho, self.args.rho + self.args.phi)
    self.phi = self.args.rho + self.args.phi - self.rho

PPODBuffer.anneal_parameters = anneal_parameters
""",
    "ppod-priorities": """
def replay_probabilities(max_values, alpha):
    v = np.array(max_values, float)
    if v.min() < 0:
        v = v - v.min()
    if v.max() == 0:
        v = v + 1
    v = v / v.max()
    p = v**alpha
    return p / p.sum()
""",
    "value-norm": """
def update(self, returns):
    x = returns.detach().cpu().double()
    for average, new in ((self.mean, x.mean()), (self.mean_square, (x**2).mean()), (self.weight, 1)):
        average.copy_(self.beta * average + (1 - self.beta) * new)

def mean_and_std(self):
    weight = self.weight.item() or 1.0
    mean = self.mean.item() / weight
    variance = self.mean_square.item() / weight - mean**2
    variance = max(variance, 0.01)
    return mean, variance**0.5

def normalize(self, returns):
    mean, std = self.mean_and_std()
    return (returns - mean) / std

def denormalize(self, values):
    mean, std = self.mean_and_std()
    return mean + std * values

ValueNorm.update, ValueNorm.mean_and_std = update, mean_and_std
ValueNorm.normalize, ValueNorm.denormalize = normalize, denormalize
""",
    "chunks": """
def recurrent_batches(fields, num_mini_batch, length, rng):
    T, S = fields["masks"].shape[:2]
    if T % length != 0:
        raise ValueError("does not divide")
    places = [(s, t) for s in range(S) for t in range(0, T, length)]
    for ids in np.array_split(rng.permutation(len(places)), num_mini_batch):
        part = [places[i] for i in ids]
        batch = {}
        for name, x in fields.items():
            if name.startswith("rnn_states"):
                batch[name] = torch.stack([x[t, s] for s, t in part])
            else:
                batch[name] = torch.stack([x[t + k, s] for k in range(length) for s, t in part])
        yield batch
""",
    "windows": """
def windows(self, t, e):
    returns, discounts, lasts = np.zeros((3, self.streams, len(t)))
    for g in range(self.streams):
        for b, (i, env) in enumerate(zip(t, e)):
            newest = (self.positions[env] - 1) % self.steps
            for k in range(self.n_step):
                returns[g, b] += self.gamma**k * self.rewards[i, env, g]
                if k == self.n_step - 1 or self.dones[i, env, g] or i == newest:
                    break
                i = (i + 1) % self.steps
            discounts[g, b], lasts[g, b] = self.gamma ** (k + 1), i
    return np.float32(returns), np.float32(discounts), lasts.astype(int)


OffPolicyBuffer.windows = windows
""",
}
SOUND["dqn-target"] = SOUND["double-dqn"]
SOUND["curiosity"] = """
def compute_intrinsic_gae(rewards, values, reset_rows, gamma, gae_lambda):
    advantages = torch.zeros_like(rewards)
    T, N = rewards.shape
    following, a = values[-1].clone(), torch.zeros(N)
    for t in range(T - 1, -1, -1):
        for n in range(N):
            if not reset_rows[t, n]:
                delta = rewards[t, n] + gamma * following[n] - values[t, n]
                a[n] = delta + gamma * gae_lambda * a[n]
                advantages[t, n] = a[n]
                following[n] = values[t, n]
    return advantages, advantages + values[:-1]
"""
SOUND["novelty"] = """
def scale(self, novelty, reset_rows, gamma):
    G = []
    for rewards, skipped in zip(novelty.double(), torch.tensor(reset_rows)):
        self.sums = torch.where(skipped, self.sums, rewards + gamma * self.sums)
        G.append(self.sums[~skipped])
    self.sum_stats.update(torch.cat(G))
    return novelty / self.sum_stats.var.sqrt().float()

RND.scale = scale
"""
SOUND["n-step"] = """
def add(self, obs, actions, rewards, terminated, truncated, reset_rows, next_obs):
    slots = []
    for n in range(len(rewards)):
        if reset_rows[n]:
            continue
        window = self.open_steps[n]
        window.append((obs[n].copy(), actions[n], rewards[n]))
        over = terminated[n] or truncated[n]
        steps = list(window)
        starts = range(len(steps)) if over else range(len(steps) - self.n_step + 1)
        for first in starts:
            slots.append(self.write(steps[first:], next_obs[n], terminated[n]))
            window.popleft()
    slots = np.array(slots, int)
    if self.tree:
        self.tree.add(slots)
    return slots

def write(self, window, next_obs, terminated):
    slot = self.position
    total, discount = 0.0, 1.0
    for _, _, reward in window:
        total += discount * reward
        discount *= self.gamma
    self.obs[slot], self.actions[slot] = window[0][:2]
    self.rewards[slot], self.discounts[slot] = total, discount
    self.next_obs[slot], self.terminated[slot] = next_obs, terminated
    self.position = (slot + 1) % self.capacity
    self.size = min(self.size + 1, self.capacity)
    return slot

NStepBuffer.add, NStepBuffer.write = add, write
"""
SOUND["project"] = """
def project(rewards, terminated, discounts, probs, support):
    low, high = support[0].item(), support[-1].item()
    distance = (high - low) / (len(support) - 1)
    projected = torch.zeros_like(probs)
    for b in range(len(rewards)):
        for p, z in zip(probs[b], support.tolist()):
            future = 0.0 if terminated[b] else discounts[b].item() * z
            y = min(max(rewards[b].item() + future, low), high)
            place = (y - low) / distance
            below = min(int(place), len(support) - 2)
            up = place - below
            projected[b, below] += p * (1 - up)
            projected[b, below + 1] += p * up
    return projected
"""
SOUND["priorities"] = """
def write(self, slots, priorities):
    for slot, p in zip(slots, np.broadcast_to(priorities, len(slots))):
        node = slot + self.leaves
        self.nodes[node] = p
        while node > 1:
            node //= 2
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]

def sample(self, batch_size, rng, beta):
    numbers = (np.arange(batch_size) + rng.random(batch_size)) / batch_size * self.nodes[1]
    slots = []
    for number in numbers:
        node = 1
        while node < self.leaves:
            node *= 2
            if number >= self.nodes[node] and self.nodes[node + 1] > 0:
                number -= self.nodes[node]
                node += 1
        slots.append(node - self.leaves)
    chances = self.nodes[self.leaves + np.array(slots)] / self.nodes[1]
    weights = (1 / chances) ** beta
    return np.array(slots), (weights / weights.max()).astype(np.float32)

SumTree.write, SumTree.sample = write, sample
"""

FLAGS = "dead, over = terminated, terminated | truncated"
OVER, DEAD = "over = terminated | truncated", "* ~terminated\n"
LOGITS = "logits = logits.masked_fill(~mask, -1e30)"
CLIPPED_MEAN = (
    "(plain.mean().clamp(max=(1 + clip_coef) * advantages.mean()) if len(plain) > 1 else torch.min(plain, clipped))"
)
RAW_ENTROPY = "[-(self.raw.softmax(-1) * self.raw.log_softmax(-1)).sum(-1)]"
ENTROPY = "[-(p.exp() * p).sum(-1) for p in self.log_probs]"
SLOT = "slot = self.position\n"
FUTURE = "gamma * alive * future"
PLACES = "[(s, t) for s in range(S) for t in range(0, T, length)]"
DQN_MISTAKES = [
    ("bootstrapping after termination", FUTURE, "gamma * future"),
    ("forgetting the discounts", FUTURE, "alive * future"),
    ("taking the lowest value", "target_q.max(1)", "target_q.min(1)"),
    ("taking the mean value", "target_q.max(1).values", "target_q.mean(1)"),
    ("removing the reward", f"rewards + {FUTURE}", "alive * (rewards + gamma * future)"),
    ("adding shapes (B,)", "target_q.max(1).values", "target_q.max(1, keepdim=True).values"),
    ("taking one discount for all", FUTURE, "gamma[0] * alive * future"),
]
# exercise: [(how the message begins, what stands in SOUND, what is put in its place, and so on)]
WRONG = {
    "epsilon-greedy": [
        ("exploring with probability 1", "rng.random() < epsilon", "rng.random() > epsilon"),
        ("taking the action with the lowest", "max(values)", "min(values)"),
        ("leaving the best action out", "list(range(n))", "[a for a in range(n) if values[a] < max(values)]"),
        ("never exploring", "rng.random() < epsilon", "rng.random() < 0"),
        ("always taking the first", "rng.choice(best)", "best[0]"),
        ("always taking the last", "rng.choice(best)", "best[-1]"),
    ],
    "q-learning": [
        ("taking the mean", "max(next_values)", "sum(next_values) / len(next_values)"),
        ("forgetting the discount", "discount * max", "max"),
        ("discounting the reward", "reward + discount * max(next_values)", "discount * (reward + max(next_values))"),
        ("taking the lowest", "max(next_values)", "min(next_values)"),
        ("adding up the next values", "max(next_values)", "sum(next_values)"),
        ("adding the value of the next", "args.gamma * (not terminated)", "args.gamma"),
        ("replacing the entry", "+= alpha * error", "+= error"),
        ("learning nothing", "+= alpha * error", "+= 0 * error"),
        ("logging TD errors with their signs", "td_error=abs(error)", "td_error=-error"),
        ("treating truncation as termination", "(not terminated)", "(not (terminated or truncated))"),
        ("playing on beyond", "for _ in range(episode_limit(args, env.spec)):", "while True:"),
    ],
    "td-targets": [
        ("taking the highest value: that is Q", "next_values[next_action]", "max(next_values)"),
        (
            "giving the best action no share",
            "[epsilon / n] * n",
            "[epsilon / (n - 1) * (v < max(next_values)) for v in next_values]",
        ),
        ("exchanging epsilon and 1", "    n = len", "    epsilon = 1 - epsilon; n = len"),
        ("taking the plain mean", "    n = len", "    epsilon = 1; n = len"),
        ("taking the highest value, as if", "    n = len", "    epsilon = 0; n = len"),
        ("letting the same table choose", "* other_next_values[best]", "* next_values[best]"),
        ("letting the other table choose", "key=lambda a: next_values[a]", "key=lambda a: other_next_values[a]"),
        (
            "exchanging the tables",
            "    best = max",
            "    next_values, other_next_values = other_next_values, next_values; best = max",
        ),
    ],
    "returns": [
        ("returning the results in the order", "xs[::-1]", "xs"),
        ("beginning at 0", "[], next_values[-1]", "[], 0 * next_values[-1]"),
        (
            "going forwards",
            "range(len(terms) - 1, -1, -1)",
            "range(len(terms))",
            "xs[::-1]",
            "xs",
        ),
        ("forgetting gamma", "decay = gamma * ~over", "decay = ~over"),
        (
            "bootstrapping in every row",
            "    xs, x",
            "    return rewards + gamma * next_values * ~terminated\n    xs, x",
        ),
        ("not cutting the sum where", "over = terminated | truncated", "over = torch.zeros_like(terminated)"),
        ("adding the next value although", "truncated & ~terminated", "truncated | terminated"),
        ("reading the flags one row too early", "    cut", "    terminated = terminated.roll(-1, 0)\n    cut"),
        ("reading the flags one row too late", "    cut", "    terminated = terminated.roll(1, 0)\n    cut"),
        ("treating truncation as death", "truncated & ~terminated", "truncated & False"),
        (
            "not cutting the sum where",
            "cut = truncated & ~terminated\n    over = terminated | truncated",
            "cut = truncated & False; over = terminated",
        ),
        ("letting truncation win", "truncated & ~terminated", "truncated"),
        (
            "letting what ends in one",
            "    cut",
            "    terminated = terminated | terminated.any(1, keepdim=True)\n    cut",
        ),
    ],
    "gae": [
        ("forgetting lambda", "gamma * gae_lambda", "gamma"),
        ("forgetting gamma", "gamma * gae_lambda", "gae_lambda"),
        ("stopping at the temporal", "gamma * gae_lambda", "0"),
        ("forgetting to subtract", " - values[t]", ""),
        ("forgetting to discount", "gamma * next_values", "next_values"),
        ("returning something else", "advantages, advantages + values", "advantages, rewards + values"),
        ("not looking at the ends", FLAGS, "dead = over = torch.zeros_like(terminated)"),
        ("letting the sum run on into", FLAGS, "dead, over = terminated, truncated"),
        ("bootstrapping from the value", FLAGS, "dead, over = terminated & False, terminated | truncated"),
        ("reading the flags one row too early", FLAGS, "dead = over = (terminated | truncated).roll(-1, 0)"),
        ("reading the flags one row too late", FLAGS, "dead = over = (terminated | truncated).roll(1, 0)"),
        ("treating truncation as death", FLAGS, "dead = over = terminated | truncated"),
        ("letting the sum run on after", FLAGS, "dead = over = terminated"),
        ("letting truncation win", FLAGS, "dead, over = terminated & ~truncated, terminated | truncated"),
        ("letting what ends in one", FLAGS, f"terminated, truncated = terminated[:, :1], truncated[:, :1]; {FLAGS}"),
        ("mixing the environments", "        advantages[t] = a", "        advantages[t] = a = a.mean()"),
    ],
    "clip": [
        ("returning a loss for each row", ".mean()", ""),
        ("not negating", "-worse", "worse"),
        ("not clipping", "torch.stack([plain, clipped]).amin(0)", "plain"),
        ("always taking the clipped", "torch.stack([plain, clipped]).amin(0)", "clipped"),
        ("taking the larger", "amin", "amax"),
        ("taking log r for r", "log_ratios.exp()", "log_ratios"),
        ("losing the gradient", "log_ratios.exp()", "log_ratios.exp().detach()"),
        ("keeping the gradient from", "ratio.maximum", "ratio.detach().maximum"),
        ("adding up over the batch", ".mean()", ".sum()"),
        ("clipping the mean", "torch.stack([plain, clipped]).amin(0)", CLIPPED_MEAN),
    ],
    "value-clip": [
        ("forgetting the half", ".mean() / 2", ".mean()"),
        ("adding up over the batch", ".mean() / 2", ".sum() / 2"),
        ("comparing the returns with the old", "error = (values - returns)", "error = (old_values - returns)"),
        ("taking the smaller", "torch.max(", "torch.min("),
        ("always taking the clipped", "torch.max(error, (near - returns).abs())", "(near - returns).abs()"),
        ("not clipping", "torch.max(error, (near - returns).abs())", "error"),
        (
            "clipping the value itself",
            "clamp(old_values - clip_coef, old_values + clip_coef)",
            "clamp(-clip_coef, clip_coef)",
        ),
    ],
    "vtrace": [
        ("not bounding", "    over, following", "    rho_clip = c_clip = 100; over, following"),
        ("ignoring the ratios", "    over, following", "    log_ratios = 0 * log_ratios; over, following"),
        ("leaving rho or c out", "gamma * c[t] *", "gamma *"),
        ("taking V(s_{t+1})", "targets[t] += x * ~over[t]", "pass"),
        ("returning the corrections", "values + corrections", "corrections"),
        ("exchanging rho_clip", "    over, following", "    rho_clip, c_clip = c_clip, rho_clip; over, following"),
        ("taking rho_clip for both", "    over, following", "    c_clip = rho_clip; over, following"),
        ("taking c_clip for both", "    over, following", "    rho_clip = c_clip; over, following"),
        (
            "not looking at the ends",
            "    over, following",
            "    terminated = truncated = terminated & False; over, following",
        ),
        ("bootstrapping from the value", "next_values * ~terminated", "next_values * 1"),
        ("carrying corrections back over the end", "terminated | truncated", "truncated"),
        ("treating truncation as death", "next_values * ~terminated", "next_values * ~(terminated | truncated)"),
        ("carrying corrections back over a trunc", "terminated | truncated", "terminated"),
        ("adding the next row's correction", "targets[t] += x * ~over[t]", "targets[t] += x * ~terminated[t]"),
        (
            "letting what ends in one",
            "    over, following",
            "    terminated, truncated = terminated[:, :1], truncated[:, :1]; over, following",
        ),
        (
            "mixing the environments",
            "advantages = rho *",
            "advantages = 0 * rho + (rho *",
            "- values)\n",
            "- values)).mean(1, True)\n",
        ),
    ],
    "curiosity": [
        ("forgetting lambda", "gamma * gae_lambda", "gamma"),
        ("forgetting gamma", "gamma * gae_lambda", "gae_lambda"),
        ("taking the end of the rollout", "values[-1].clone()", "0 * values[-1]"),
        (
            "ending with the episode",
            "            if not reset_rows[t, n]:",
            "            if reset_rows[t, n]:\n                following[n], a[n] = 0.0, 0.0\n            else:",
        ),
        (
            "treating it as a truncation",
            "            if not reset_rows[t, n]:",
            "            if reset_rows[t, n]:\n                following[n], a[n] = values[t, n], 0\n            else:",
        ),
        ("taking the reset row for a step", "if not reset_rows[t, n]:", "if True:"),
        (
            "letting the reset row cut",
            "            if not reset_rows[t, n]:",
            "            if reset_rows[t, n]:\n                a[n] = 0.0\n            else:",
        ),
        ("letting a reset row of one", "reset_rows[t, n]", "reset_rows[t].any()"),
    ],
    "novelty": [
        ("taking the deviation of novelty", "torch.cat(G)", "novelty[~torch.tensor(reset_rows)]"),
        ("dividing by the variance", "var.sqrt()", "var"),
        ("forgetting gamma", "gamma * self.sums", "self.sums"),
        ("subtracting a mean", "return novelty", "return (novelty - novelty.mean())"),
        (
            "summing over the environments",
            "    G = []\n",
            "    G, result = [], novelty\n    if novelty.shape[1] > 1:\n"
            "        novelty, reset_rows = novelty.T, reset_rows.T\n"
            "        self.sums = torch.zeros(novelty.shape[1])\n",
            "return novelty",
            "return result",
        ),
        (
            "taking the reset row for a step",
            "    G = []\n",
            "    G, reset_rows = [], reset_rows & False\n",
        ),
        ("counting G once more", "self.sums[~skipped]", "self.sums"),
        ("letting G begin anew with the episode", "(skipped, self.sums,", "(skipped, 0.0,"),
        ("letting G begin anew with each call", "    G = []", "    G, self.sums = [], 0 * self.sums"),
        ("taking the deviation of the last", "    G = []", "    G, self.sum_stats = [], RunningMeanStd()"),
    ],
    "masked": [
        ("ignoring the mask", LOGITS, "pass"),
        (
            "masking probabilities without",
            LOGITS,
            "pass",
            "[part.log_softmax(-1)",
            "[part.log_softmax(-1) if mask is None else (part.softmax(-1) * mask).log()",
        ),
        ("setting logits of invalid", "-1e30", "0"),
        ("taking the mask the wrong way", "~mask", "mask"),
        ("adding 0 x log 0", "-1e30", "-math.inf"),
        ("ignoring the mask in the entropy", LOGITS, f"self.raw = logits; {LOGITS}", ENTROPY, RAW_ENTROPY),
        ("forgetting the minus sign", "[-(p.exp()", "[(p.exp()"),
        ("taking logarithms to the base 2", ".sum(-1) for", ".sum(-1) / math.log(2) for"),
        (
            "one softmax over all",
            "[part.log_softmax(-1) for part in logits.split(sizes, -1)]",
            "list(logits.log_softmax(-1).split(sizes, -1))",
        ),
        ("losing a factor", "torch.stack(parts).sum(0)\n\ndef entropy", "parts[0]\n\ndef entropy"),
        ("letting a state pass", "check_masks(mask.numpy(), sizes)", "pass"),
    ],
    "replay": [
        ("storing obs as next_obs", "next_obs[i], terminated", "obs[i], terminated"),
        ("exchanging obs", "    slots = []", "    obs, next_obs = next_obs, obs; slots = []"),
        ("counting steps instead", "min(self.size + 1, self.capacity)", "self.size + (i == 0)"),
        ("letting size grow", "min(self.size + 1, self.capacity)", "self.size + 1"),
        ("keeping the oldest", "if reset_rows[i]:", "if reset_rows[i] or self.size == self.capacity:"),
        (
            "beginning at slot 0",
            "    slots = []",
            "    self.position *= self.position + len(obs) <= self.capacity; slots = []",
        ),
        ("storing the reset row", "if reset_rows[i]:", "if False:"),
        ("leaving a gap", "            continue", "            self.position += 1; continue"),
        ("storing truncation", "next_obs[i], terminated[i]", "next_obs[i], terminated[i] or truncated[i]"),
        ("drawing from slots that", "rng.integers(0, self.size,", "rng.integers(0, self.capacity,"),
        ("never drawing one", "rng.integers(0, self.size,", "rng.integers(1, self.size,"),
        (
            "drawing without replacement",
            "rng.integers(0, self.size, batch_size)",
            "rng.permutation(self.size)[:batch_size]",
        ),
        ("handing out more", "batch_size > self.size", "False"),
    ],
    "dqn-target": DQN_MISTAKES,
    "double-dqn": [
        *DQN_MISTAKES,
        ("taking no notice", "if online_q is None:", "if True:"),
        (
            "exchanging the networks",
            "    alive = ",
            "    if online_q is not None:\n        target_q, online_q = online_q, target_q\n    alive = ",
        ),
        ("letting the online network choose and", "future = target_q[", "future = online_q["),
        ("bootstrapping after termination", "    return", "    alive = alive if online_q is None else 1\n    return"),
    ],
    "td3-target": [
        ("not clipping the noise", "noise.clip(-clip, clip)", "noise"),
        ("not clipping the action", ".clip(-1, 1)", ""),
        ("clipping the action by", ".clip(-1, 1)", ".clip(-clip, clip)"),
        ("forgetting the noise", "(actions + noise)", "actions"),
        ("taking the higher", "next_values.min(0)", "next_values.max(0)"),
        ("taking the mean of both", "next_values.min(0).values", "next_values.mean(0)"),
        ("taking the first critic", "next_values.min(0).values", "next_values[0]"),
        ("bootstrapping after", "(1 - terminated.float()) * future", "future"),
        (
            "removing the reward",
            "rewards + gamma * (1 - terminated.float()) * future",
            "(rewards + gamma * future) * ~terminated",
        ),
        ("forgetting the discount", "gamma * (1", "(1"),
    ],
    "polyak": [
        ("not changing the target", "p.data.mul_(1 - tau).add_(tau * q.data)", "p = (1 - tau) * p + tau * q"),
        ("exchanging tau", "    for p", "    tau = 1 - tau\n    for p"),
        ("moving the source", "    for p", "    target, source = source, target\n    for p"),
        ("adding a share", ".mul_(1 - tau)", ""),
        (
            "letting target and source share",
            "        p.data.mul_",
            "        if tau == 1:\n            p.data = q.data\n            continue\n        p.data.mul_",
        ),
    ],
    "es-update": [
        ("putting all candidates", "for eps in noise for sign in (1, -1)", "for sign in (1, -1) for eps in noise"),
        ("forgetting sigma", "sign * sigma * eps", "sign * eps"),
        ("leaving out the candidates", "for sign in (1, -1)", "for sign in (1,)"),
        ("forgetting theta", "[theta + sign", "[sign"),
        ("dividing by the number of pairs", "len(fitnesses) * sigma", "len(noise) * sigma"),
        ("forgetting to divide by sigma", "len(fitnesses) * sigma", "len(fitnesses)"),
        ("dividing by sigma squared", "len(fitnesses) * sigma", "len(fitnesses) * sigma**2"),
        ("forgetting to divide by the number", "(len(fitnesses) * sigma)", "sigma"),
        ("leaving out the candidates", "[noise, -noise]", "[noise, 0 * noise]"),
        (
            "pairing the first half",
            "np.stack([noise, -noise], 1).reshape(-1, noise.shape[1])",
            "np.concatenate([noise, -noise])",
        ),
        ("the wrong sign", "[noise, -noise]", "[-noise, noise]"),
    ],
    "ranks": [
        (
            "returning the order",
            "    below =",
            "    return np.argsort(returns) / (len(returns) - 1) - 0.5\n    below =",
        ),
        ("ranking the best lowest", "returns[:, None] > returns", "returns[:, None] < returns"),
        ("spreading them from 0", "- 1) - 0.5", "- 1)"),
        ("spreading them from -1", "(len(returns) - 1) - 0.5", "(len(returns) - 1) * 2 - 1"),
        ("dividing by N instead", "(len(returns) - 1)", "len(returns)"),
        (
            "ranking equal returns by",
            "    below =",
            "    return np.argsort(np.argsort(returns)) / (len(returns) - 1) - 0.5\n    below =",
        ),
        ("giving equal returns the lowest", "(equal - 1) / 2", "0"),
        ("taking the sample deviation", "returns.std()", "returns.std(ddof=1)"),
        ("dividing by the variance", "returns.std()", "returns.var()"),
        ("forgetting to take away", "(returns - returns.mean())", "returns"),
        ("not counting from", "returns - base, 0", "returns, 0"),
        ("not looking at the elite", "if n == len(returns)", "if True"),
        ("counting from the worst", "[::-1][n]", "[::-1][n - 1]"),
    ],
    "ppod-anneal": [
        ("dividing by the number of value demos", 'self.args.anneal_by == "capacity"', "False"),
        ("lowering rho", "self.rho +=", "self.rho -="),
        ("leaving phi", "self.phi = ", "phi = "),
        ("taking a share of phi as it is", "self.args.phi / room", "self.phi / room"),
        ("letting rho grow", "self.rho = min(self.rho, self.args.rho + self.args.phi)", "pass"),
        ("moving probability although", "if not self.value_demos:", "if False:"),
        ("dividing by the room although", 'self.args.anneal_by == "capacity"', "True"),
    ],
    "ppod-priorities": [
        ("forgetting alpha", "v**alpha", "v"),
        ("taking the softmax", "    if v.min()", "    return np.exp(v) / np.exp(v).sum()\n    if v.min()"),
        (
            "taking the softmax of alpha",
            "    if v.min()",
            "    return np.exp(alpha * v) / np.exp(alpha * v).sum()\n    if v.min()",
        ),
        (
            "forgetting to divide by the sum",
            "    v = v / v.max()\n    p = v**alpha\n    return p / p.sum()",
            "    return v**alpha",
        ),
        ("taking 1 / alpha", "v**alpha", "v ** (1 / alpha)"),
        ("squaring negative", "v = v - v.min()", "pass"),
        ("taking negative values", "v = v - v.min()", "v = v.clip(0)"),
        ("dividing 0 by 0", "if v.max() == 0:", "if False:"),
        ("raising large numbers", "v = v / v.max()", "pass"),
    ],
    "value-norm": [
        ("not dividing by the weight", "self.weight.item() or 1.0", "1.0"),
        ("taking the mean square", " - mean**2", ""),
        (
            "exchanging beta",
            "self.beta * average + (1 - self.beta) * new",
            "(1 - self.beta) * average + self.beta * new",
        ),
        ("remembering the last batch", "self.beta * average + (1 - self.beta) * new", "new"),
        ("weighing all returns alike", "self.beta * average + (1 - self.beta) * new", "average + new"),
        ("returning the variance", "variance**0.5", "variance"),
        ("a deviation of 0", "max(variance, 0.01)", "max(variance, 0.0)"),
        ("dividing 0 by 0", "self.weight.item() or 1.0", "self.weight"),
        ("denormalising in the wrong order", "mean + std * values", "(mean + values) * std"),
        (
            "exchanging normalize",
            *("(returns - mean) / std", "mean + std * returns"),
            *("mean + std * values", "(values - mean) / std"),
        ),
    ],
    "chunks": [
        (
            "putting one chunk after",
            "for k in range(length) for s, t in part",
            "for s, t in part for k in range(length)",
        ),
        ("cutting across streams", "x[t + k, s]", "x.flatten(0, 1)[s * T + t + k]"),
        ("numbering the chunks time", PLACES, "[(s, t) for t in range(0, T, length) for s in range(S)]"),
        ("giving every chunk the state of", "[x[t, s]", "[x[0, s]"),
        ("giving the state after", "[x[t, s]", "[x[t + length - 1, s]"),
        (
            "giving a state for each row",
            "[x[t, s] for s, t in part]",
            "[x[t, s] for s, t in part for _ in range(length)]",
        ),
        ("losing the steps", "if T % length != 0:", "T -= T % length\n    if False:"),
    ],
    "windows": [
        ("summing rewards without", "self.gamma**k * self.rewards", "self.rewards"),
        ("discounting the first reward", "self.gamma**k *", "self.gamma ** (k + 1) *"),
        ("returning the discount of the last", "self.gamma ** (k + 1), i", "self.gamma**k, i"),
        ("taking one step too many", "range(self.n_step)", "range(self.n_step + 1)", "self.n_step - 1", "self.n_step"),
        ("returning the step after", "(k + 1), i\n", "(k + 1), i + 1\n"),
        ("going on into the next", " or self.dones[i, env, g]", ""),
        (
            "leaving out the reward of the step that ends",
            "                returns[g, b]",
            "                if self.dones[i, env, g]:\n                    break\n                returns[g, b]",
        ),
        ("discounting by gamma^3", "self.gamma ** (k + 1), i", "self.gamma**self.n_step, i"),
        ("stopping at the end of the array", "i == newest", "i in (newest, self.steps - 1)"),
        ("going on from the newest", " or i == newest", ""),
        ("ending both windows", "self.dones[i, env, g]", "self.dones[i, env].any()"),
        ("letting both windows", "self.dones[i, env, g]", "self.dones[i, env].all()"),
    ],
}


WRONG |= {
    "n-step": [
        ("summing rewards without", "total += discount * reward", "total += reward"),
        ("bootstrapping with gamma, as", "= total, discount", "= total, self.gamma"),
        ("storing the observation of the window's last", "window[0][:2]", "window[-1][:2]"),
        ("storing windows before", "range(len(steps) - self.n_step + 1)", "[0]"),
        ("losing the windows", "range(len(steps)) if over else ", ""),
        ("storing only the longest", "range(len(steps)) if over", "range(1) if over"),
        ("discounting by gamma^n", "= total, discount", "= total, self.gamma**self.n_step"),
        ("forgetting that nothing", "next_obs[n], terminated[n]", "next_obs[n], False"),
        ("storing truncation", "next_obs[n], terminated[n]", "next_obs[n], over"),
        ("going on into the next", "over = terminated[n] or truncated[n]", "over = terminated[n]"),
        ("taking the reset row", "if reset_rows[n]:", "if False:"),
        ("mixing steps", "window = self.open_steps[n]", "window = self.open_steps[0]"),
    ],
    "project": [
        ("losing the probability where", "p * (1 - up)", "p * (1 - up) * (up > 0)"),
        ("giving more to the atom that is further", "up = place - below", "up = 1 - place + below"),
        ("forgetting the reward", "rewards[b].item() + future", "future"),
        ("giving all of it to the atom below", "up = place - below", "up = 0.0"),
        ("giving half", "up = place - below", "up = (place - below) and 0.5"),
        ("forgetting the discount", "discounts[b].item() * z", "z"),
        (
            "losing what lies beyond",
            "min(max(rewards[b].item() + future, low), high)",
            "rewards[b].item() + future\n            if not low <= y <= high:\n                continue",
        ),
        ("going on after", "0.0 if terminated[b] else ", ""),
        ("removing the reward", "rewards[b].item() + future", "rewards[b].item() * (not terminated[b]) + future"),
        ("taking one discount", "discounts[b]", "discounts[0]"),
        (
            "keeping only the last",
            "projected[b, below] += p * (1 - up)",
            "projected[b, below] = p * (1 - up) if p > 0 else projected[b, below]",
        ),
    ],
    "priorities": [
        ("leaving all sums", "while node > 1:", "if node > 1:"),
        ("adding the new priority", "= self.nodes[2 * node] + self.nodes[2 * node + 1]", "+= p"),
        ("keeping the whole number", "number -= self.nodes[node]", "pass"),
        ("turning left", "number >= self.nodes[node]", "number < self.nodes[node]"),
        (
            "taking all numbers",
            "(np.arange(batch_size) + rng.random(batch_size)) / batch_size",
            "rng.random(batch_size)",
        ),
        ("leaving the weights out", "** beta", "** 0"),
        ("giving the larger weights", "(1 / chances)", "chances"),
        ("not dividing", "weights / weights.max()", "weights"),
        ("forgetting beta", "** beta", "** 1"),
    ],
}


for path in sorted((ROOT / "tests/exercises").glob("solutions_*.py")):  # of the other tables
    solutions = runpy.run_path(str(path))
    SOUND |= solutions["SOUND"]
    WRONG |= solutions["WRONG"]


def wrong_solution(name, changes):
    """SOUND[name] with these changes; each text that is to be changed stands in it once."""
    source = SOUND[name]
    for old, new in zip(changes[::2], changes[1::2]):
        assert source.count(old) == 1, (name, old)
        source = source.replace(old, new)
    return source


def solved(name, solution):
    """The blanked copy for an exercise, with a solution below it, which takes the place of the blanks."""
    return start.working_copy(EXERCISES[name]) + solution


# -------------------------------------------------------------------------------------------------------- exercises


def test_the_table_has_what_it_should():
    """Fails if a script has no exercise or no hunt, or an exercise no known mistakes."""
    scripts = {
        f"{name}.py" for name in "ppo ppo_masked ppod dqn rainbow ddpg_td3 es qlearning mappo maddpg_matd3".split()
    }
    assert {e.script for e in EXERCISES.values()} >= scripts and {h.script for h in HUNTS.values()} >= scripts
    assert len(EXERCISES) >= 16 and len(HUNTS) >= 10
    for task in [*EXERCISES.values(), *HUNTS.values()]:
        assert task.name.replace("-", "").isalnum() and 1 <= task.difficulty <= 3 and task.minutes > 0
    assert all(any(case.mistakes for case in e.cases) for e in EXERCISES.values())
    assert SOUND.keys() == WRONG.keys() == EXERCISES.keys()


@every_exercise
def test_the_original_gives_the_expected_numbers(name):
    """Fails if a script has changed what it computes, or if a number in the table is wrong."""
    with runner.loaded(ROOT / EXERCISES[name].script) as module:
        assert not any(judged(EXERCISES[name], module))


@every_exercise
def test_another_solution_gives_the_expected_numbers(name, tmp_path):
    """Fails if a check wants the script's own way of writing it."""
    with module_of(tmp_path, EXERCISES[name].script, solved(name, SOUND[name])) as module:
        assert not any(judged(EXERCISES[name], module))


@every_exercise
def test_the_blanked_copy_fails_at_the_first_step(name, tmp_path):
    """Fails if a blank is not noticed: also if it is the only one, the others having been filled in."""
    exercise, original = EXERCISES[name], source_of(EXERCISES[name].script)
    for blanks in [exercise.blanks, *([blank] for blank in exercise.blanks)]:
        one = forms.Exercise(**vars(exercise) | {"blanks": blanks})
        with module_of(tmp_path, exercise.script, start.blanked(original, one)) as module:
            problem = next(filter(None, judged(exercise, module)))
        assert f"NotImplementedError: exercise: {name}: write " in problem
        assert any(blank in problem for blank in blanks)


@every_exercise
def test_a_blanked_copy_is_the_script_but_for_the_blanks(name):
    """Fails if a signature, a docstring, a comment or anything else outside of the bodies is lost or changed."""
    exercise, original = EXERCISES[name], source_of(EXERCISES[name].script)
    copy = start.working_copy(exercise)
    before, after = start.definitions(original), start.definitions(copy)
    assert before.keys() == after.keys() - {"unreadable"}
    rest, cut = original.splitlines(keepends=True), copy.splitlines(keepends=True)
    if exercise.hides:
        at = copy.index(start.UNREADABLE.strip())
        copy = copy[:at] + copy[copy.index("if __name__ ==", at) :]
        after, cut = start.definitions(copy), copy.splitlines(keepends=True)
    for blank in sorted([*exercise.blanks, *exercise.hides], key=lambda blank: -before[blank].lineno):
        old, new = before[blank], after[blank]
        assert ast.unparse(old.args) == ast.unparse(new.args) and ast.get_docstring(old) == ast.get_docstring(new)
        left = ast.Raise if blank in exercise.blanks else ast.Return
        assert [type(node) for node in new.body[ast.get_docstring(new) is not None :]] == [left]
        for lines, node in ((rest, old), (cut, new)):
            first, last = start.body_span(lines, node)
            del lines[first:last]
    assert rest == cut


HAND_MADE = '''
def f(
    a=(1, 2),  # kept
):
    # gone
    return a  # gone


# kept
class C:
    def g(self):
        """Kept,
        both lines."""
        # gone
        x = 1

        return x

    # kept
    h = 3
'''
HAND_MADE_BLANKED = '''
def f(
    a=(1, 2),  # kept
):
    # Exercise e: write it
    raise NotImplementedError("exercise: e: write f")


# kept
class C:
    def g(self):
        """Kept,
        both lines."""
        raise NotImplementedError("exercise: e: write C.g")

    # kept
    h = 3
'''


def test_a_body_begins_below_signature_and_docstring():
    """Hand-made: a signature over several lines, with and without docstring, comments within and around."""
    exercise = forms.Exercise("e", "", "s.py", ("f", "C.g"), 1, 1, "write it", [], None, None)
    assert start.blanked(HAND_MADE, exercise) == HAND_MADE_BLANKED


FRAME = """
    continues = ~(terminated | truncated)
    advantages = torch.empty_like(rewards)
    for t in reversed(range(len(rewards))):
    while True:
"""  # of the loops of all estimators: these lines are no solution


@pytest.mark.parametrize("name", [name for name, exercise in EXERCISES.items() if exercise.hides])
def test_what_would_give_an_exercise_away_is_hidden_and_works(name, tmp_path):
    """Fails if a loop of a neighbour can be read in the copy, or gives other numbers than the original's."""
    exercise = EXERCISES[name]
    copy, nodes = start.working_copy(exercise), start.definitions(source_of(exercise.script))
    lines = source_of(exercise.script).splitlines(keepends=True)
    for hidden in exercise.hides:
        first, last = start.body_span(lines, nodes[hidden])
        assert not [line for line in lines[first:last] if line.strip() not in FRAME and line in copy]
    with module_of(tmp_path, exercise.script, solved(name, SOUND[name])) as module:
        for other in EXERCISES.values():
            if other.script == exercise.script and {*other.blanks} & {*exercise.hides}:
                assert not any(judged(other, module)), other.name


def test_several_exercises_share_a_copy_and_progress_is_shown(tmp_path, monkeypatch, capsys):
    """start.py returns gae clip has three gaps and hides the fourth; --force keeps every earlier file."""
    call(start, monkeypatch, tmp_path, "returns", "gae", "clip")
    copy = tmp_path / "my_work/ppo.py"
    text = copy.read_text()
    gaps = [line for line in text.splitlines() if "raise NotImplementedError" in line]
    assert len(gaps) == 3 and 'unreadable("compute_vtrace"' in text and 'unreadable("compute_gae"' not in text
    assert all(f"Exercise {name}:" in text for name in ("returns", "gae", "clip"))
    for i in range(3):
        copy.write_text(f"work {i}")
        call(start, monkeypatch, tmp_path, "gae", "--force")
    assert [(tmp_path / f"my_work/ppo.py.{i + 1}.bak").read_text() for i in range(3)] == ["work 0", "work 1", "work 2"]
    check.note_progress(tmp_path / "my_work", "gae", [check.Step("numbers", [])] * 3)
    check.note_progress(tmp_path / "my_work", "clip", [check.Step("numbers", [check.Part("", 1, "wrong")])])
    capsys.readouterr()
    check.note_progress(tmp_path / "my_work", "gae", [check.Step("numbers", [])])  # --up-to 1 takes nothing away
    call(start, monkeypatch, tmp_path, "--progress")
    shown = capsys.readouterr().out
    assert f"1 of {len(EXERCISES) + len(HUNTS)} solved" in shown and "0 of 3 steps" in shown
    assert [line.split() for line in shown.splitlines() if line.startswith("gae")] == [["gae", "ppo.py", "solved"]]


def test_a_name_that_is_gone_is_told():
    exercise = forms.Exercise("e", "", "s.py", ("f", "C.other"), 1, 1, "write it", [], None, None)
    with pytest.raises(forms.BadInput, match="s.py has no C.other any more"):
        start.blanked(HAND_MADE, exercise)


@pytest.mark.parametrize(
    "where, old, message", [("f", "kept", ""), ("f", "gone", "2 times"), ("C.g", "h = 3", "0 times")]
)
def test_a_bug_is_planted_where_its_text_stands_once(where, old, message):
    """Only the lines of the named function count: "kept" stands all over the file, but once in f."""
    hunt = forms.Hunt("hunt-0", "s.py", 1, 1, "", None, forms.Plant(where, old, "other"))
    if message:
        with pytest.raises(forms.BadInput, match=f"stands {message}, not once in {where}"):
            start.planted(HAND_MADE, hunt)
    else:
        assert start.planted(HAND_MADE, hunt) == HAND_MADE.replace("# kept\n):", "# other\n):")


wrong_by_length = [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("build-")) for name in WRONG]


@pytest.mark.parametrize("name", wrong_by_length)
def test_each_known_mistake_is_named(name, tmp_path):
    """Fails if a mistake passes, or is taken for another; or if there is a message that no mistake leads to."""
    exercise, reached = EXERCISES[name], set()
    with module_of(tmp_path, exercise.script, solved(name, SOUND[name])) as module:
        for beginning, *changes in WRONG[name]:
            exec(wrong_solution(name, changes), vars(module))
            problems = enumerate(judged(exercise, module))
            i, problem = next(((i, problem) for i, problem in problems if problem), (None, "passed"))
            assert f"This is what one gets by {beginning}" in problem, (beginning, changes, problem)
            reached |= {(i, message) for message in exercise.cases[i].mistakes if f"gets by {message}." in problem}
    assert reached == {(i, message) for i, case in enumerate(exercise.cases) for message in case.mistakes}


trained = {}  # runs of originals, which several exercises share


@pytest.mark.slow
@every_exercise
def test_the_original_passes_every_step(name, monkeypatch):
    """Fails if a probe or a threshold asks for more than the script can do."""
    train = check.Student.train

    def once(self, before=None, **settings):
        key = self.task.script, before, repr(sorted(settings.items()))
        if key not in trained:
            trained[key] = train(self, before, **settings)
        return trained[key]

    monkeypatch.setattr(check.Student, "train", once)
    student = check.Student(EXERCISES[name], ROOT / EXERCISES[name].script)
    assert [step.problem for step in check.grade(EXERCISES[name], student)] == [None] * len(check.steps(student.task))


# -------------------------------------------------------------------------------------------------------------- hunts


def judge_hunt(name, source, folder):
    """What the hunt's check says of a source; an error in it is one of the test."""
    hunt = HUNTS[name]
    with module_of(folder, hunt.script, source) as module:
        if hunt.cases:
            return next(filter(None, judged(hunt, module)), None)
        return hunt.check(check.imported(ROOT / hunt.script), training_here(module))


LONG = {f"hunt-{n}" for n in (3, 4, 5, 6, 7, 9, 15, 16, 17, 18, 19)}  # whose checks train for a second or more
hunts_by_length = [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in HUNTS]


@pytest.mark.parametrize("name", hunts_by_length)
def test_the_planted_copy_runs_and_is_found_out(name, tmp_path):
    """Fails if the text to change has gone from the script, if the copy crashes, or if the bug does no harm."""
    source = start.working_copy(HUNTS[name])
    assert sum(a != b for a, b in zip(source_of(HUNTS[name].script).splitlines(), source.splitlines())) == 1
    assert judge_hunt(name, source, tmp_path)


@pytest.mark.parametrize("name", hunts_by_length)
def test_the_sound_script_passes_a_hunt(name, tmp_path):
    """Fails if a check finds fault with a script that has none."""
    assert judge_hunt(name, source_of(HUNTS[name].script), tmp_path) is None


def test_a_hunt_is_solved_by_behaviour(tmp_path):
    """A bug mended in other words than the script's own is mended."""
    source = start.working_copy(HUNTS["hunt-5"])
    mended = source.replace("pg_loss + args.ent_coef * entropy", "pg_loss + (-entropy) * args.ent_coef")
    assert mended != source and judge_hunt("hunt-5", mended, tmp_path) is None


def test_every_exercise_has_three_hints_and_something_to_know(tmp_path, monkeypatch, capsys):
    """Fails if one is missing, if --hint shows more than it should, or if a line of the solution is in them."""
    for name, exercise in EXERCISES.items():
        three, known = forms.hints(name)
        assert len(three) == 3 and all(three) and len(known) > 100, name
        assert three[0].endswith("?") or "?" in three[0]
        assert not any(line in text for line in bodies(exercise) for text in [*three, known])
    assert call(check, monkeypatch, tmp_path, "gae", "hunt-5", "--hint", "2") == 0
    shown = " ".join(capsys.readouterr().out.split())
    three = forms.hints("gae")[0]
    assert three[0] in shown and three[1] in shown and three[2] not in shown and HUNTS["hunt-5"].hint in shown


def test_hints_and_messages_do_not_tell(tmp_path):
    """Fails if the hint of a hunt names the place of its bug, or a task the call that solves it."""
    assert not any(word in EXERCISES["polyak"].task for word in ("lerp", "mul_", "copy_"))
    for hunt in HUNTS.values():
        assert hunt.plant.where.split(".")[-1] not in hunt.hint.split(), hunt.name
        assert hunt.plant.old not in hunt.hint and hunt.plant.new not in hunt.hint


# ------------------------------------------------------------------------------------------------------- command line


def call(module, monkeypatch, folder, *arguments):
    """main() of a module in this process, in a folder. Returns its exit code; BadInput is raised."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
    return module.main()


def test_from_the_list_to_a_solved_exercise(tmp_path, monkeypatch, capsys):
    """start.py and check.py as a student uses them, with messages and exit codes."""
    call(start, monkeypatch, tmp_path)
    listing = capsys.readouterr().out
    assert all(name in listing for name in [*EXERCISES, *HUNTS])
    call(start, monkeypatch, tmp_path, "td-targets")
    assert f"my_work{os.sep}qlearning.py" in capsys.readouterr().out
    copy = tmp_path / "my_work/qlearning.py"
    assert copy.read_text() == start.working_copy(EXERCISES["td-targets"])
    assert call(check, monkeypatch, tmp_path, "td-targets") == 1
    judged = capsys.readouterr().out
    assert "step 1 of 3, fixed numbers: FAILED" in judged and "step 2" not in judged
    assert "NotImplementedError: exercise: td-targets: write sarsa_target" in judged

    copy.write_text(copy.read_text() + SOUND["td-targets"])
    judged = run(tmp_path, ROOT / "exercises/check.py", "td-targets", "--json", "results.json")
    assert judged.returncode == 0 and "td-targets is solved" in judged.stdout, judged.stdout
    assert forms.hints("td-targets")[1].split(",")[0] in judged.stdout
    tests = json.loads((tmp_path / "results.json").read_text())["tests"]
    assert [(test["score"], test["max_score"], test["status"]) for test in tests] == [
        (points, points, "passed") for points in (16, 17, 17, 20, 30)
    ]
    assert all(test["name"].startswith("td-targets: ") and test["output"] for test in tests)
    with pytest.raises(forms.BadInput, match="--force"):
        call(start, monkeypatch, tmp_path, "q-learning")
    assert SOUND["td-targets"] in copy.read_text()
    call(start, monkeypatch, tmp_path, "q-learning", "--force")
    assert copy.read_text() == start.working_copy(EXERCISES["q-learning"])
    assert SOUND["td-targets"] in (tmp_path / "my_work/qlearning.py.1.bak").read_text()


def test_bad_input_gets_one_line(tmp_path):
    """Exit code 2, one plain line, no traceback."""
    for command, words in [
        (["start.py", "gea"], "there is no exercise gea; did you mean gae"),
        (["check.py", "gae"], "begin with python exercises/start.py gae"),
    ]:
        done = run(tmp_path, ROOT / "exercises" / command[0], *command[1:])
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    "program, arguments, words",
    [
        ("start", ["hunt-99"], "there is no exercise hunt-99; did you mean hunt-9"),
        ("start", ["xyzzy"], "^there is no exercise xyzzy$"),
        ("check", ["--up-to", "1", "gea"], "did you mean gae"),
        ("check", ["gae", "--work", "elsewhere"], "there is no elsewhere"),
        ("start", ["gae", "replay"], "one copy is of one script, not of ppo.py and dqn.py"),
        ("start", ["gae", "hunt-5"], "a hunt has a copy of its own"),
        ("release", ["gae", "--out", "full"], "full holds something already"),
        ("release", ["gae", "clipp"], "did you mean .*clip"),
        ("release", ["gae", "hunt-5"], "gae and hunt-5 are all about ppo.py"),
        ("release", ["gae", "masked"], "ppo_masked.py holds the solution of gae, compute_gae"),
        ("release", ["hunt-3", "td3-target"], "ddpg_td3.py holds the solution of hunt-3, polyak"),
        ("start", ["gae", "--work", "full/file"], "cannot write"),
        ("check", ["gae", "--work", "empty", "--json", "no/folder.json"], "cannot write no/folder.json"),
    ],
)
def test_what_can_be_mended_is_told(program, arguments, words, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/ppo.py").write_text("")
    with pytest.raises(forms.BadInput, match=words):
        call({"start": start, "check": check, "release": release}[program], monkeypatch, tmp_path, *arguments)
    assert not (tmp_path / "handout").exists()


@pytest.mark.parametrize(
    "source, words",
    [
        ("def f(:\n    pass\n", "my_work/ppo.py, line 1: invalid syntax"),
        ("x = 1\nx = y\n", "my_work/ppo.py, line 2, in <module> cannot be imported: NameError: name 'y'"),
        ("import there_is_none\n", "my_work/ppo.py needs there_is_none: pip install"),
        ("import sys\nsys.exit(3)\n", "line 2, in <module> cannot be imported: SystemExit: 3"),
        (b"x = '\xff'\n", "cannot read my_work/ppo.py"),
        ("import os\nos._exit(0)\n", "my_work/ppo.py cannot be imported: your code has ended the process"),
        ("x = 1\n", "my_work/ppo.py has no function compute_gae any more"),
    ],
)
def test_a_file_that_cannot_be_imported(source, words, tmp_path, monkeypatch):
    """One line that says where; with --json the results say it too, for Gradescope wants results in any case."""
    (tmp_path / "my_work").mkdir()
    (tmp_path / "my_work/ppo.py").write_bytes(source if isinstance(source, bytes) else source.encode())
    with pytest.raises(forms.BadInput, match=words) as error:
        call(check, monkeypatch, tmp_path, "gae", "--json", "results.json")
    assert "\n" not in str(error.value)
    (test,) = json.loads((tmp_path / "results.json").read_text())["tests"]
    assert (
        test["name"] == "gae: ppo.py"
        and test["score"] == 0
        and test["max_score"] == 100
        and test["output"] == str(error.value)
    )


PAIR, RETURN = "Asked for is: (float32 tensor, float32 tensor)", "return advantages, advantages + values"
CHANGED = "changed in place: rewards of compute_gae. Whoever called still needs the old numbers"
KINDS = [
    (RETURN, f"{RETURN.replace(',', '.numpy(),')}", f"compute_gae returned: (float32 array, float32 tensor). {PAIR}"),
    (
        RETURN,
        "return [*advantages], rewards",
        f"((float32 tensor, float32 tensor, float32 tensor), float32 tensor). {PAIR}",
    ),
    (RETURN, "return advantages.double(), advantages + values", f"(float64 tensor, float32 tensor). {PAIR}"),
    ("rewards, values, next", "reward, values, next", "argument 'rewards'\nIt is called with the names that stand"),
    ("    dead, over", "    rewards += 1\n    rewards = rewards - 1\n    dead, over", CHANGED),
]


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("    return advantages, advantages + values", "    pass", "Is there a return missing"),
        ("rewards[t] + gamma", "rewards[t] + gama", "compute_gae: NameError: name 'gama' is not defined"),
        (
            "return advantages, advantages",
            "return advantages[:, 0], advantages",
            "yours is (3,) with (3, 1), expected is (2, 3, 1)",
        ),
        ("delta + gamma", "delta + 0.3 * gamma", "yours:    [[["),
        *KINDS,
    ],
)
def test_what_a_student_is_told(old, new, words, tmp_path):
    """Errors come with line and function, shapes are named, and unknown mistakes show both numbers."""
    with module_of(tmp_path, "ppo.py", solved("gae", wrong_solution("gae", [old, new]))) as module:
        problem, *_ = judged(EXERCISES["gae"], module)
    assert words in problem and "Look next at" in problem and "This is what one gets by" not in problem


def test_probe_and_learning_can_fail(tmp_path):
    """Right numbers are not enough: a solution that never explores two actions only fails later, and is told so."""
    broken = SOUND["epsilon-greedy"].replace("    n = len(values)", "    n = len(values)\n    epsilon *= n > 2")
    exercise = EXERCISES["epsilon-greedy"]
    numbers, probe, learning = graded(exercise.name, tmp_path, solved(exercise.name, broken), up_to=3)
    assert numbers.problem is None and "An entry that is still 0 was never tried" in probe.problem
    assert learning.problem == "not reached: step 2 comes first" and not learning.reached
    hard = forms.Learn({"env_id": "CliffWalking-v1", "total_timesteps": 300}, 499)
    hard = forms.Exercise(**vars(exercise) | {"learn": hard})
    student = check.Student(exercise, tmp_path / "qlearning.py")
    assert "needed are 499" in check.judge_learning(hard, student)


def test_an_argument_that_is_changed_in_place_is_noticed(tmp_path):
    """A target of DQN with the right numbers, which sets the values of terminated rows to 0 where they stand."""
    broken = SOUND["dqn-target"].replace("    alive =", "    target_q[terminated] = 0\n    alive =")
    with module_of(tmp_path, "dqn.py", solved("dqn-target", broken)) as module:
        (problem,) = judged(EXERCISES["dqn-target"], module)
    assert "changed in place: target_q of td_targets" in problem


def test_value_norm_as_its_text_says_passes(tmp_path):
    """Fails if the mean before the first update, which a run asks for, is a fact that the text leaves out."""
    text = EXERCISES["value-norm"].task
    assert "before the first" in text and "then the mean is 0" in text and "variance is at least 0.01" in text
    plain = SOUND["value-norm"].replace("self.weight.item() or 1.0", "self.weight.item()")
    plain = plain.replace("    mean = self.mean", "    if weight == 0:\n        return 0.0, 0.1\n    mean = self.mean")
    with module_of(tmp_path, "mappo.py", solved("value-norm", plain)) as module:
        assert not any(judged(EXERCISES["value-norm"], module))
        settings = {"num_envs": 8, "num_steps": 8, "total_timesteps": 100, "seed": 1, "hidden_sizes": (16,)}
        training_here(module)(env_id="probes.Fortune", **settings)


@pytest.mark.parametrize("name", ["ppo.py", "qlearning.py"])
def test_tuned_settings_do_not_matter(name):
    """Fails if a script's TUNED, which may change at any time, has a say in what the checks run."""
    with runner.loaded(ROOT / name) as module:
        module.TUNED["Classroom/Chain-v0"] = {"total_timesteps": 0, "gamma": 5.0}  # both out of range
        training_here(module)(env_id="Classroom/Chain-v0", total_timesteps=30)


# ------------------------------------------------------------------------------------------------------------ handouts


def bodies(task):
    """The lines of code that a student has to find: those that are longer than a name or two, bare of comments."""
    source = source_of(task.script)
    if task.name in HUNTS:
        return [task.plant.old.split("  #")[0]]
    lines, nodes = source.splitlines(keepends=True), start.definitions(source)
    found = []
    for name in task.blanks:
        first, last = start.body_span(lines, nodes[name])
        found += [line.split("  #")[0].strip() for line in lines[first:last]]
    return [line for line in found if len(line) > 30 and line not in FRAME]


@pytest.mark.parametrize("names", [["gae", "clip", "hunt-3"], ["ppod-priorities", "value-norm", "hunt-1"], ["hunt-14"]])
def test_a_handout_holds_no_solution(names, tmp_path):
    """Fails if a line of a solution, the place of a bug or another exercise's check is in any of its files."""
    out, tasks = release.release(names, tmp_path / "handout"), [forms.find(name) for name in names]
    files = {path.name: path.read_text(encoding="utf-8") for path in out.iterdir() if path.is_file()}
    assert files.keys() == {
        *"README.md check.py cut.py forms.py hints.md probes.py requirements.txt runner.py".split()
    } | {task.file for task in tasks} | {task.table for task in tasks}
    for task in tasks:
        assert bodies(task)
        for line in bodies(task):
            assert not any(line in text for text in files.values()), line
        if task.name in HUNTS:
            code = start.definitions(files[task.file])[task.plant.where]
            assert task.plant.new.split("  #")[0] in ast.get_source_segment(files[task.file], code)
            assert not any(task.plant.new in files[name] for name in ("hunts.py", "README.md"))
            assert task.hint.split()[0] in files["README.md"]
    others = {*EXERCISES, *HUNTS} - {*names}
    table = "".join(files.get(table, "") for table in forms.TABLES)
    assert not any(f"exercise('{name}'" in table or f"hunt('{name}'" in table for name in others)
    assert "Plant(" not in table and "#" not in table
    assert all(f"python check.py {name}" in files["README.md"] for name in names)


def test_a_handout_has_the_requirements_of_its_scripts(tmp_path):
    out = release.release(["chunks", "epsilon-greedy"], tmp_path / "handout")
    lines = (out / "requirements.txt").read_text().splitlines()
    assert [
        line.split("==")[0].split("[")[0] for line in lines
    ] == "gymnasium matplotlib moviepy mpe2 numpy torch tqdm tyro".split()
    pinned = (ROOT / "requirements.txt").read_text()
    assert all(line in pinned for line in lines)


def test_a_handout_stands_alone(tmp_path):
    """Copied away from the repository, its checks run, fail on what was handed out, and pass what was solved."""
    release.release(["epsilon-greedy", "td-targets"], tmp_path / "made")
    folder = shutil.copytree(tmp_path / "made", tmp_path / "away")
    shutil.rmtree(tmp_path / "made")
    judged = run(folder, "check.py", "epsilon-greedy", "td-targets")
    assert judged.returncode == 1 and judged.stdout.count("NotImplementedError: exercise: ") == 2, judged.stderr
    for arguments, words in [(["gae"], "there is no exercise gae"), (["td-targets", "--json", "x"], "for students")]:
        other = run(folder, "check.py", *arguments)
        assert other.returncode == 2 and words in other.stderr
    with (folder / "qlearning.py").open("a") as file:
        file.write(SOUND["epsilon-greedy"])
    judged = run(folder, "check.py", "epsilon-greedy", "--up-to", "2")
    assert judged.returncode == 0 and "epsilon-greedy is right up to here" in judged.stdout, (
        judged.stdout + judged.stderr
    )


@pytest.mark.slow
def test_a_handout_has_all_that_its_checks_refer_to(tmp_path):
    """Fails if a name that a check needs is cut away with the rest of the table, or a file left behind."""
    for name in [*EXERCISES, *HUNTS]:
        out = release.release([name], tmp_path / name)
        assert (out / "demos").is_dir() == name.startswith("ppod-")
    done = run(tmp_path, "-m", "ruff", "check", "--isolated", "--select", "F821", *[*EXERCISES, *HUNTS])
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_a_handout_finds_its_demo(tmp_path):
    """All three steps of an exercise on ppod.py, whose last one needs the demo of MountainCar."""
    out = release.release(["ppod-anneal"], tmp_path / "handout")
    with (out / "ppod.py").open("a") as file:
        file.write(SOUND["ppod-anneal"])
    judged = run(out, "check.py", "ppod-anneal")
    assert judged.returncode == 0, judged.stdout + judged.stderr
