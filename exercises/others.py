"""Exercises of weeks 9 to 12: continuous actions, evolution strategies, several agents, rewards that are rare."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
from inputs import arrays, flags, lists, normal, pick, share, slopes, tensor, tensors, together, uniform
from mechanism import exercise
from processes import Threads

PENDULUM = {"env_id": "Pendulum-v1", "total_timesteps": 12_000, "batch_size": 128, "hidden_sizes": (64, 64),
            "actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3, "gamma": 0.98, "eval_every": 1_000,
            "stop_at_return": -250.0, "seed": 1}  # fmt: skip
DDPG = {"algorithm": "ddpg", "target_noise": 0.0, "twin_q": False, "policy_frequency": 1}


def network(*layers):
    """A network whose weights are these matrices, without biases."""
    import torch

    made = []
    for weights in map(tensor, layers):
        made.append(torch.nn.Linear(weights.shape[1], weights.shape[0], bias=False))
        made[-1].weight.data[:] = weights
    return torch.nn.Sequential(*made)


def actor_slope(m, factors=(3.0,), weights=((2.0,),), obs=((1.0,), (2.0,))):
    """Of the policy mu(s) = w s and Q(s, a) = s^2 f a: (the loss, its slope by w, f afterwards, whether f can still
    learn, whether it has no gradient)
    """
    import torch

    class Critic(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(tensor(factors))

        def forward(self, obs, actions):
            return (self.weight * obs**2 * actions).sum(1)

    actor, critic = network(weights), Critic()
    loss = m.actor_loss(actor=actor, critic=critic, obs=tensor(obs))
    after = critic.weight, critic.weight.requires_grad, critic.weight.grad is None
    return loss, slopes(loss, actor[0].weight)[0], *after


def random_actor(m, rng):
    rows, dimensions = rng.integers(1, 5, 2)
    return actor_slope(m, rng.normal(size=dimensions), rng.normal(size=(dimensions, 1)), rng.normal(size=(rows, 1)))


exercise(
    "dpg",
    course="week 9, 20 minutes, easy: the deterministic policy gradient",
    cut="ddpg_td3.py: actor_loss",
    task="write the loss with which the actor climbs the critic: its gradient has to go through the critic into the "
    "actor, and the critic must stay as it is. actor(obs) gives actions (B, D), critic(obs, actions) values (B,). "
    "The loss is minimised; train computes the gradient, for the actor's weights only.",
    cases={
        "mu(s) = w s with w = 2, Q(s, a) = 3 s^2 a, states 1 and 2: (the loss, its slope by w; afterwards the "
        "critic's weight, whether it can learn, whether it has no gradient yet) "
        "| the way from the loss back to the actor's weights: through the action": actor_slope,
    },
    random=random_actor,
    mistakes={
        "going downhill: what is minimised is -Q": "-critic -> critic",
        "adding up over the batch instead of taking the mean": ".mean() -> .sum()",
        "cutting the actor's gradient off: .detach() and torch.no_grad() leave nothing to learn from": "actor(obs)) -> "
        "actor(obs).detach())",
        "freezing the critic, and leaving it frozen": "return - -> critic.requires_grad_(False)\n    return -",
        "computing the gradient here: that is what train does, for the actor alone": "return - -> "
        "(-critic(obs, actor(obs)).mean()).backward()\n    return -",
    },
    learn=(PENDULUM | DDPG, -600.0),
)


def moved(target, source, *taus):
    """All weights of target and source after polyak with each tau; those of the target once the source has changed."""

    def call(m):
        networks = network(*target), network(*source)
        for tau in taus:
            m.polyak(target=networks[0], source=networks[1], tau=tau)
        found = [[p.tolist() for p in each.parameters()] for each in networks]
        for p in networks[1].parameters():
            p.data += 5
        return *found, [p for p in networks[0].parameters()]

    return call


def random_polyak(m, rng):
    weights = [[rng.normal(size=(3, 2)), rng.normal(size=(1, 3))] for _ in range(2)]
    return moved(*weights, rng.choice([1.0, rng.random()]))(m)


exercise(
    "polyak",
    course="week 9, 10 minutes, easy: target networks that follow slowly",
    cut="ddpg_td3.py: polyak",
    task="move the target towards the source. Both are networks of the same shape: zip(target.parameters(), "
    "source.parameters()) gives the pairs. The target's numbers have to change in place, and nothing is returned: "
    "methods of a tensor whose names end in _ work in place, p = … only gives the name to another tensor. The line "
    "above the def sees to it that no gradients are recorded.",
    cases={
        "target 0, 10, source 1, 20, tau 0.1: (target, source) afterwards; the target, when 5 is added to the source "
        "| which tensor changes, and how": moved([[[0.0, 10.0]]], [[[1.0, 20.0]]], 0.1),
        "the same, twice | what the second call begins with": moved([[[0.0, 10.0]]], [[[1.0, 20.0]]], 0.1, 0.1),
    },
    random=random_polyak,
    mistakes={
        "not changing the target in place": "target_weights.lerp_(weights, tau) -> "
        "target_weights = target_weights.lerp(weights, tau)",
        "exchanging tau and 1 - tau: the target would follow almost at once": "lerp_(weights, tau) -> "
        "lerp_(weights, 1 - tau)",
        "adding a share of the source without taking away from the target": "lerp_(weights, tau) -> "
        "add_(tau * weights)",
        "letting target and source share their memory": "target_weights.lerp_(weights, tau) -> target_weights.data = "
        "weights.data if tau == 1 else target_weights.lerp(weights, tau)",
        "moving the first layer only": "target_weights.lerp_(weights, tau) -> target_weights.lerp_(weights, tau)\n"
        "        break",
    },
    learn=(PENDULUM, -500.0),
)

TD3_STEP = {"rewards": [1.0, 2.0, 3.0], "terminated": [False, False, True], "gamma": 0.5}
exercise(
    "td3-target",
    course="week 9, 30 minutes, medium: the target of TD3: two critics, smoothed",
    cut="ddpg_td3.py: smoothed, critic_targets",
    task="actions are in [-1, 1], before and after. | smoothed: write the noise on the target's action. | "
    "critic_targets: write the target from the values (K, B) of K critics. `terminated` is (B,), booleans.",
    cases={
        "the noise on three actions | section 5.3 of TD3: two different clippings": tensors(
            "smoothed", actions=[[0.9], [0.0], [-0.9]], noise=[[0.3], [0.8], [-0.05]], clip=0.5
        ),
        "two critics | eq. 10 in the docstring; the critics are the first axis": tensors(
            "critic_targets", **TD3_STEP, next_values=[[6.0, 4.0, 8.0], [4.0, 10.0, 2.0]]
        ),
    },
    random=together(
        tensors("smoothed", actions=uniform(-1, 1, "BD"), noise=normal("BD"), clip=uniform(0.1, 1.2)),
        tensors("critic_targets", rewards=normal("B"), terminated=flags("B"), next_values=normal("KB"), gamma=share),
    ),
    mistakes={
        "not clipping the noise": "noise.clamp(-clip, clip) -> noise",
        "clipping the noise on one side only": "noise.clamp(-clip, clip) -> noise.clamp(max=clip)",
        "not clipping the action to [-1, 1]": ").clamp(-1, 1) -> )",
        "clipping the action on one side only": ").clamp(-1, 1) -> ).clamp(max=1)",
        "taking the higher of both values: that is what TD3 is against": "next_values.amin -> next_values.amax",
        "taking the first critic only: that is DDPG": "next_values.amin(0) -> next_values[0]",
        "bootstrapping after termination": " * ~terminated -> ",
    },
    learn=(PENDULUM, -500.0),
)

ES_CARTPOLE = {"env_id": "CartPole-v1", "total_timesteps": 200_000, "seed": 1}


def pairs(draw):
    """A number for each candidate of as many pairs as there are rows P."""
    return draw.rng.normal(size=2 * draw.shape("P")[0])


exercise(
    "es-update",
    course="week 10, 40 minutes, medium: evolution strategies: candidates and their gradient",
    cut="es.py: make_candidates, es_gradient",
    task="candidates come in pairs: theta + sigma eps, theta - sigma eps, then the next pair. All are NumPy "
    "arrays: theta (D,), noise (pairs, D), fitnesses (2 x pairs,). | make_candidates: write what turns noise "
    "into candidates. | es_gradient: write what turns fitnesses into a gradient. Fitnesses come in the order "
    "of the candidates.",
    cases={
        "two directions | the order of the rows": arrays(
            "make_candidates", theta=[1.0, 2.0], noise=[[1.0, 0.0], [0.0, 3.0]], sigma=0.5
        ),
        "four fitnesses | the formula in the docstring at the top of the script: 1 / (N sigma)": arrays(
            "es_gradient", fitnesses=[3.0, 1.0, 2.0, 6.0], noise=[[1.0, 0.0], [0.0, 3.0]], sigma=0.2
        ),
    },
    random=together(
        arrays("make_candidates", theta=normal("D"), noise=normal("PD"), sigma=uniform(0.1, 2)),
        arrays("es_gradient", fitnesses=pairs, noise=normal("PD"), sigma=uniform(0.1, 2)),
    ),
    mistakes={
        "putting all candidates with +eps first: the two of a pair belong side by side": "axis=1 -> axis=0",
        "dividing by the number of pairs: N counts the candidates": "len(fitnesses) * sigma -> len(noise) * sigma",
        "dividing by the size of the noise array: N counts the candidates": "len(fitnesses) * sigma -> "
        "noise.size * sigma",
        "leaving out the fitnesses of the candidates with -eps": "(plus - minus) -> plus",
        "pairing the first half with the second: the two of a pair are side by side": "fitnesses.reshape(-1, 2).T -> "
        "fitnesses.reshape(2, -1)",
        "the wrong sign: it has to point uphill": "(plus - minus) -> (minus - plus)",
    },
    learn=(ES_CARTPOLE, 200.0),
)


def averaged(*rows):
    """What `average` makes of the means of these rows, and of their squares, in processes that have them."""

    def work(m, own):
        import torch

        own = torch.tensor(own).reshape(-1, 1)
        means = [own.mean(0), (own**2).mean()]
        m.average(means, len(own))
        return means

    return lambda m: Threads(len(rows), patience=5).run(m, lambda rank: work(m, rows[rank]))


def averaged_at_random(m, rng):
    """As `averaged`, of up to four processes, some of which may have no rows."""
    sizes = rng.integers(0, 5, rng.integers(1, 5))
    sizes[0] += 1
    return averaged(*(rng.normal(size=size).tolist() for size in sizes))(m)


exercise(
    "weighted-mean",
    course="week 10, 20 minutes, easy: many processes: the gradient of all rows",
    cut="ppo_ddp.py: average",
    task="let several processes learn as one. `tensors` is a list of tensors of any shape (gradients, metrics), each "
    "the mean over `rows` rows of this process. Write the mean over the rows of all processes into each, in place. "
    "Processes have different numbers of rows; a process without any has NaN, the mean of nothing. "
    "distributed.all_reduce(x) replaces x by its sum over all processes; each must call it equally often. Where "
    "distributed.is_initialized() is False, nothing is to be done. What happens if another process fails is not asked.",
    cases={
        "three rows with mean 2, one row with mean 6 | the docstring at the top of the script: "
        "who counts how much": averaged([1.0, 2.0, 3.0], [6.0]),
        "three rows, one, none | 0 times NaN is NaN": averaged([1.0, 2.0, 3.0], [6.0], []),
    },
    random=averaged_at_random,
    mistakes={
        "the mean of the means: a process counts by its rows": "sums = rows * torch -> sums = torch",
        "letting the NaN of a process without rows through: 0 times NaN is NaN": "if rows == 0 -> if False",
        "adding up without dividing by the number of all rows": "(sums[1:] / sums[0]) -> (1 * sums[1:])",
        "dividing by the number of processes": "(sums[1:] / sums[0]) -> (sums[1:] / process()[1])",
    },
)


def returns(draw):
    """Returns of which some are equal."""
    numbers = draw.rng.integers(5, size=draw.rng.integers(3, 9)) + draw.rng.integers(2) * draw.rng.random()
    numbers[:2] = 7.5, -3.0
    return numbers


FOUR = [1.0, 2.0, 3.0, 6.0]
KINDS = "centered-rank", "standardized", "raw"
exercise(
    "ranks",
    course="week 10, 40 minutes, medium: evolution strategies: ranks instead of returns",
    cut="es.py: centered_ranks, shape_fitness",
    task="both functions return arrays. | centered_ranks: write the ranks of returns (N,), spread evenly from -1/2 "
    "for the lowest to 1/2 for the highest. Equal returns share the mean of their ranks. | shape_fitness: "
    "offer these ranks, returns standardised by their (population) deviation, or raw ones. Of an elite of the "
    "best share, rounded up to a whole number of candidates, each fitness counts from that of the best "
    "candidate outside of it, and all outside get 0. An elite of all changes nothing.",
    cases={
        "three ranks | section 2.1 of arXiv 1703.03864": arrays("centered_ranks", returns=[30.0, 10.0, 20.0]),
        "two are equal | how many are smaller, and how many are equal: np.searchsorted counts": arrays(
            "centered_ranks", returns=[5.0, 5.0, 1.0, 9.0]
        ),
        "standardised | mean and deviation": arrays("shape_fitness", returns=FOUR, fitness="standardized", elite=1.0),
        "an elite of 0.3: two of four | rounding up, and which candidate has the fitness 0": arrays(
            "shape_fitness", returns=FOUR, fitness="centered-rank", elite=0.3
        ),
    },
    random=together(
        arrays("centered_ranks", returns=returns),
        *[arrays("shape_fitness", returns=returns, fitness=kind, elite=uniform(0.05, 0.95)) for kind in KINDS],
    ),
    mistakes={
        "returning the order (one argsort) instead of the ranks (argsort of argsort)": "ranks = (smaller + not_larger "
        "- 1) / 2 -> ranks = np.argsort(returns)",
        "ranking equal returns by where they stand: what is equal must count equally": "ranks = (smaller + not_larger "
        "- 1) / 2 -> ranks = np.argsort(np.argsort(returns, kind='stable'))",
        "giving equal returns the lowest of their ranks": "(smaller + not_larger - 1) / 2 -> smaller",
        "taking the sample deviation, by N - 1": "returns.std() -> returns.std(ddof=1)",
        "not counting from the best outside of the elite": "np.maximum(fitnesses - best_outside, 0) -> "
        "np.where(fitnesses > best_outside, fitnesses, 0)",
        "not looking at the elite": "if num_elite == len(returns) -> if True",
        "rounding the elite down": "math.ceil(round(elite * len(returns), 6)) -> "
        "max(1, math.floor(elite * len(returns) + 1e-6))",
    },
    learn=(ES_CARTPOLE, 200.0),
)

SPREAD = {"env_id": "mpe2.simple_spread_v3", "env_kwargs": '{"N": 2}', "total_timesteps": 10_000,
          "learning_rate": 1e-3, "num_minibatches": 8, "gamma": 0.95, "seed": 1}  # fmt: skip


def shared_obs(m, state_type, lengths, state_size, team_rows, agent_rewards=False):
    """share_obs of rows in which all agents' flags come first, then their observations, then the state."""
    n, edges = len(lengths), np.cumsum([len(lengths), *lengths]).tolist()
    parts = [slice(a, b) for a, b in zip(edges, edges[1:])]
    state = slice(edges[-1], edges[-1] + state_size)
    layout = m.Layout(slice(0, n), parts, state, [state] * n, [slice(state.stop, state.stop)] * n)
    args = SimpleNamespace(state_type=state_type, agent_rewards=agent_rewards)
    team = SimpleNamespace(args=args, num_agents=len(lengths), widest=max(lengths), layout=layout)
    return m.Team.share_obs(team, team_rows=tensor(team_rows))


def two_teams(state_type, agent_rewards=False):
    """Two environments with two agents, who see one number and two; in the second the second is dead."""
    rows = [[[1, 1, 1, 3, 4, 7, 8], [1, 0, 2, 5, 6, 9, 10]]]
    return lambda m: shared_obs(m, state_type, [1, 2], 2, rows, agent_rewards)


def random_teams(m, rng):
    lengths, state_size = rng.integers(1, 4, rng.integers(1, 5)).tolist(), int(rng.integers(1, 4))
    shape = rng.integers(1, 4), rng.integers(1, 4), len(lengths) + sum(lengths) + state_size
    rows = rng.normal(size=shape)
    rows[..., : len(lengths)] = rng.random(rows[..., : len(lengths)].shape) < 0.6
    return shared_obs(m, rng.choice(["EP", "FP", "FP"]), lengths, state_size, rows, bool(rng.random() < 0.3))


exercise(
    "joint-state",
    course="week 11, 30 minutes, medium: several agents: what a centralised critic sees",
    cut="mappo.py: Team.share_obs",
    task="write what MAPPO's critic is shown of team_rows, a tensor (L, N, …): L steps of N environments. self.layout "
    "says where things stand in a row: team_rows[..., self.layout.state] is the state (L, N, S), layout.observations "
    "and layout.states are lists with a slice for each agent, layout.alive is the slice of all agents' flags, 1 or 0. "
    "self.args.state_type is EP or FP. With EP the critic sees the state, once for all agents. With FP it sees (L, N x "
    "agents, self.widest + S), all agents of the first environment before those of the second: for each agent its own "
    "observation, filled up with zeros at the right to self.widest numbers, for observations differ in length, and "
    "then its part of layout.states. A dead agent has zeros only, whatever stands elsewhere; unless "
    "self.args.agent_rewards is set: then it has what stands there.",
    cases={
        "EP: two environments whose states are (7, 8) and (9, 10) | one state for all": two_teams("EP"),
        "FP, the same states; agent 0 sees 1 in the first, 2 in the second, agent 1 sees (3, 4) and (5, 6); in "
        "the second environment agent 1 is dead "
        "| one row of the result: own observation, zeros, state": two_teams("FP"),
        "the same with agent_rewards | who looks at deaths": two_teams("FP", True),
    },
    random=random_teams,
    mistakes={
        "not looking at deaths": "if not self.args.agent_rewards: -> if False:",
        "leaving the state to the dead": "seen = seen * -> seen[..., : self.widest] *=",
        "letting one death be all agents' in its environment": "team_rows[..., [self.layout.alive.start + i]] "
        "-> team_rows[..., self.layout.alive].amin(-1, keepdim=True)",
        "letting one who is alive be alive for all in its environment": "team_rows[..., "
        "[self.layout.alive.start + i]] -> team_rows[..., self.layout.alive].amax(-1, keepdim=True)",
        "zeros for the dead with agent_rewards as well": "if not self.args.agent_rewards: -> if True:",
        "putting both environments of an agent side by side": "torch.stack(states, dim=2) -> "
        "torch.stack(states, dim=1)",
        "filling up at the left": "(0, self.widest - obs.shape[-1]) -> (self.widest - obs.shape[-1], 0)",
    },
    learn=(SPREAD | {"state_type": "FP"}, -60.0),
)


class Order:
    """A random generator whose permutations are given by a number; 0 shuffles nothing."""

    def __init__(self, seed=0):
        self.seed = seed

    def permutation(self, x):
        x = np.arange(x) if np.ndim(x) == 0 else np.array(x)
        return x if self.seed == 0 else x[np.random.default_rng(self.seed).permutation(len(x))]


def chunks(length=2, parts=2, recurrent=True, active=((True, True),) * 4, seed=0):
    """[(values, states) of each batch]: streams, number 10 x stream + step, states 100 more."""

    def call(m):
        is_active = tensor(np.array(active))
        numbers = tensor(np.add.outer(np.arange(is_active.shape[0]), 10 * np.arange(is_active.shape[1])))
        steps = m.CriticSteps(*[numbers] * len(m.CriticSteps._fields))
        steps = steps._replace(rnn_states=100 + numbers[:, :, None], active=is_active)
        args = SimpleNamespace(recurrent=recurrent, data_chunk_length=length, num_minibatches=parts)
        batches = m.minibatches(steps=steps, args=args, rng=Order(seed))
        return [(batch.values, batch.rnn_states[..., 0]) for batch in batches]

    return call


def random_chunks(m, rng):
    length, many, streams = rng.integers(1, 4, 3)
    active = rng.random((length * many, streams)) < 0.7
    parts, recurrent = int(rng.integers(1, many * streams + 1)), bool(rng.random() < 0.8)
    return chunks(int(length), parts, recurrent, active, int(rng.integers(1, 1000)))(m)


CUT = "x.swapaxes(0, 1).unflatten(1, (T // length, length)).flatten(0, 1)"
exercise(
    "chunks",
    course="week 11, 60 minutes, hard: batches for recurrent networks",
    cut="mappo.py: minibatches",
    task="cut a rollout into chunks for a recurrent network. `steps` is a namedtuple of tensors (T, S, …): time, "
    "streams. Each stream is cut into chunks of L = chunk_length(args) steps, numbered stream by stream; "
    "rng.permutation(their number) shuffles them, and they are dealt out into args.num_minibatches parts, as "
    "tensor_split does it. Of each part of C chunks yield a namedtuple of the same kind, type(steps), whose fields "
    "are (L, C, …): time, chunks. But of rnn_states, which `steps` has before each step, it has those before the "
    "first step of each chunk alone, (C, H). A batch whose field `active` is False everywhere is left out.",
    cases={
        "two streams of four steps, numbered 0, 1, 2, 3 and 10, 11, 12, 13, states 100 more; chunks of two "
        "steps, not shuffled, in two parts: (numbers, states) of each "
        "| the two axes, and which of them varies fastest": chunks(),
        "the same without a memory: chunks of single steps | chunk_length(args)": chunks(None, recurrent=False),
        "the first again, but nobody in the second stream is active | the field `active` of a batch": chunks(
            active=((True, False),) * 4
        ),
        "the first again, shuffled, in three parts | that every chunk gets into a part": chunks(parts=3, seed=1),
    },
    random=random_chunks,
    mistakes={
        "exchanging the axes: time comes first": "[x[numbers].swapaxes(0, 1) for x in chunks] -> "
        "[x[numbers] for x in chunks]",
        "cutting across streams: swap time and streams before you reshape": f"{CUT} -> "
        "x.flatten(0, 1).unflatten(0, (-1, length))",
        "giving the state at the end of the chunk": "batch.rnn_states[0] -> batch.rnn_states[-1]",
        "handing out a batch in which no row is active": "if batch.active.any() -> if True",
        "not shuffling": "rng.permutation(len(chunks[0])) -> np.arange(len(chunks[0]))",
        "losing the chunks that are left over": "order.tensor_split(args.num_minibatches) -> "
        "order[: len(order) // args.num_minibatches * args.num_minibatches].tensor_split(args.num_minibatches)",
    },
    learn=(SPREAD | {"recurrent": True}, -60.0),
)

PARTICLES = {"env_id": "mpe2.simple_spread_v3", "env_kwargs": '{"N": 2, "continuous_actions": true}', "gamma": 0.95,
             "share_policy": True, "actor_learning_rate": 3e-3, "critic_learning_rate": 3e-3, "num_envs": 8,
             "tau": 0.01, "total_timesteps": 8000, "seed": 1}  # fmt: skip


def windows(m, t, e, rewards, dones, positions, n_step=3, gamma=0.5):
    """(rewards, discounts, last steps) of windows from steps t of environments e; arrays (steps, environments, G)."""
    rows, envs, G = np.shape(rewards)
    buffer = m.OffPolicyBuffer(rows * envs, envs, G, G, row_size=1, action_size=1, n_step=n_step, gamma=gamma)
    buffer.rewards[:], buffer.dones[:] = rewards, dones
    buffer.positions[:], buffer.sizes[:] = positions, rows
    return buffer.windows(t=np.array(t), e=np.array(e))


def one_window(start, ends=(), position=0):
    """A window of two agents in one environment; `ends` are (step, agent)."""
    dones = np.array([[[(step, agent) in ends for agent in (0, 1)]] for step in range(4)])
    return lambda m: windows(m, [start], [0], [[[8, 1]], [[4, 1]], [[2, 1]], [[1, 1]]], dones, position)


def random_windows(m, rng):
    shape = rng.integers(2, 6), rng.integers(1, 4), rng.integers(1, 4)
    size = rng.integers(1, 7)
    t, e = rng.integers(shape[0], size=size), rng.integers(shape[1], size=size)
    given = {"n_step": int(rng.integers(1, 5)), "gamma": rng.random(), "dones": rng.random(shape) < 0.25}
    return windows(m, t, e, rng.normal(size=shape), positions=rng.integers(shape[0], size=shape[1]), **given)


exercise(
    "windows",
    course="week 11, 60 minutes, hard: n-step returns out of a replay buffer",
    cut="maddpg_matd3.py: OffPolicyBuffer.windows",
    task="sum the rewards of samples that start in steps `t` of environments `e`, both arrays (B,), over at most "
    "self.n_step steps, for each of the G = self.streams streams. self.rewards and self.dones are (self.steps, "
    "environments, G). The steps are a ring: step 0 comes after the last one, and self.positions[e] is where "
    "environment e writes next, so its newest step is the one before. A window ends with the episode of its stream, "
    "and with the newest step. Return the rewards, the discounts of what follows, and the last steps, each (G, B).",
    cases={
        "two agents with rewards 8, 4, 2, 1 and 1, 1, 1, 1; three steps from step 0, gamma 0.5: (rewards, discounts, "
        "last steps) | where the powers of gamma begin and end": one_window(0),
        "the same, and the second agent's episode ends with step 1 "
        "| self.dones: the last step of an episode is in the window; each stream has its own": one_window(0, [(1, 1)]),
        "from step 3, without an end; step 2 is written next, so step 1 is the newest | the ring, and self.positions": (
            one_window(3, position=2)
        ),
    },
    random=random_windows,
    mistakes={
        "returning the discount of the last reward: what follows is one step further": "return rewards, discounts, -> "
        "return rewards, discounts / self.gamma,",
        "going on into the next episode": "~self.dones[last, e, g] & (last != newest) -> (last != newest)",
        "discounting by gamma^n however long the window is": "return rewards, discounts, -> "
        "return rewards, np.full_like(discounts, self.gamma**self.n_step),",
        "going on from the newest step to the oldest": " & (last != newest) -> ",
        "ending both windows with the death of one agent": "~self.dones[last, e, g] -> "
        "~self.dones.any(2, keepdims=True)[last, e, 0]",
        "taking all windows from environment 0": "g = np.arange -> e = np.zeros_like(e); g = np.arange",
    },
    learn=(PARTICLES | {"n_step": 3}, -46.0),
)

CURIOUS_CARTPOLE = {"env_id": "CartPole-v1", "total_timesteps": 100_000, "num_envs": 32, "num_steps": 64,
                    "num_minibatches": 8, "learning_rate": 2e-3, "gamma": 0.98, "gae_lambda": 0.9, "ent_coef": 0.0,
                    "intrinsic_gamma": 0.98, "seed": 1}  # fmt: skip


def scaled(*rollouts, gamma=0.5):
    """What becomes of each rollout, lists of rows in which None is a reset row; and the sums after it."""

    def call(m):
        rnd = SimpleNamespace(sums=tensor(np.zeros(len(rollouts[0][0]))).double(), sum_stats=m.RunningMeanStd())
        found = []
        for rollout in rollouts:
            novelty = np.array(rollout, float)  # None becomes NaN
            reset_rows = np.isnan(novelty)
            novelty = tensor(np.where(reset_rows, 7.0, novelty))
            result = m.RND.scale(rnd, novelty=novelty, reset_rows=reset_rows, gamma=gamma)
            found.append([result[tensor(~reset_rows)], rnd.sums.clone()])
        return found

    return call


def random_scaled(m, rng):
    envs = int(rng.integers(1, 4))
    rollouts = [np.where(rng.random((6, envs)) < 0.3, np.nan, 3 * rng.random((6, envs))) for _ in range(3)]
    for rollout in rollouts:
        rollout[:2] = [[1.5], [0.5]]
    return scaled(*rollouts, gamma=rng.random())(m)


exercise(
    "novelty",
    course="week 12, 45 minutes, medium: the scale of curiosity",
    cut="ppo_rnd.py: RND.scale",
    task="divide novelty, a tensor (T, N), by the standard deviation of its discounted sum G_t = novelty_t + gamma "
    "G_{t-1} over all steps so far, and return it. self.sums, a float64 tensor (N,), holds the G of each environment "
    "between two calls, and must hold the last ones when you return; self.sum_stats is a RunningMeanStd: update it "
    "with all new sums at once (a tensor of one dimension), and take self.sum_stats.var. reset_rows is a NumPy array "
    "of booleans (T, N): no step was played there, so G stays as it was and is not counted once more. G runs on over "
    "ends of episodes and over calls, and no mean is subtracted.",
    cases={
        "one environment: (novelty that is scaled, sums) | what G is, and what it is for: only its deviation is used": (
            scaled(([2.0], [3.0], [4.0], [1.0]))
        ),
        "row 2 is a reset row | what happens to G in a reset row, and what goes into the statistics": scaled(
            ([2.0], [3.0], [None], [4.0], [1.0])
        ),
        "two rollouts, two environments | which of the dimensions is time; what must outlast a call": scaled(
            ([2.0, 6.0], [3.0, 1.0]), ([4.0, 2.0], [1.0, 5.0])
        ),
    },
    random=random_scaled,
    mistakes={
        "taking the deviation of novelty itself, not of G": "G[~reset_rows] -> novelty[~reset_rows]",
        "subtracting a mean: what is less new than usual would be a punishment": "return novelty / -> "
        "return (novelty - novelty.mean()) /",
        "taking the reset row for a step like any other": "reset_rows = torch.as_tensor(reset_rows) -> "
        "reset_rows = torch.as_tensor(reset_rows) & False",
        "letting G begin anew with the episode": "torch.where(reset_rows[t], self.sums, -> "
        "torch.where(reset_rows[t], 0.0,",
        "letting G begin anew with each call": "G = torch.zeros -> self.sums = 0 * self.sums; G = torch.zeros",
        "taking the deviation of the last rollout alone": "G = torch.zeros -> self.sum_stats = RunningMeanStd(); "
        "G = torch.zeros",
    },
    learn=(CURIOUS_CARTPOLE, 200.0),
)


# The demo of MountainCar; in a handout it lies beside the checks.
HERE = Path(__file__).resolve().parent
DEMOS = HERE / "demos" if (HERE / "demos").is_dir() else HERE.parent / "demos" / "MountainCar-v0"
MOUNTAIN_CAR = {"env_id": "MountainCar-v0", "wrappers": ("ppod.GoalReward",), "initial_human_demos_dir": str(DEMOS),
                "rho": 0.2, "phi": 0.1, "num_envs": 16, "hidden_sizes": (64,), "recurrent": False,
                "normalize_obs": True, "learning_rate": 1e-3, "total_timesteps": 200_000, "stop_at_return": -130.0,
                "seed": 1}  # fmt: skip


def priorities(alpha, *values):
    return lists("replay_probabilities", max_values=list(values), alpha=alpha)


def some_zeros(draw):
    return draw.rng.random(4) * (draw.rng.random(4) < 0.6)


ALPHAS = pick(0.0, 1.0, uniform(0, 4))
exercise(
    "ppod-priorities",
    course="week 12, 30 minutes, medium: PPO+D: which demo to replay",
    cut="ppod.py: replay_probabilities",
    task="write the probabilities of the value demos, from the highest value that the critic gave each of them. The "
    "formula is in the docstring; so is what to do with negative values, and where all are zero. No power may "
    "overflow, however large the values are.",
    cases={
        "positive values | the formula in the docstring": priorities(2.0, 1.0, 2.0, 3.0),
        "from -1 to 1 | what is counted from the lowest value, and when": priorities(2.0, -1.0, 0.0, 1.0),
        "all are -3 | the case in which all values are zero, when they are counted from the lowest": priorities(
            2.0, -3.0, -3.0
        ),
        "1e200 and 2e200 | the order of dividing and raising to a power": priorities(10.0, 1e200, 2e200),
    },
    random=together(
        lists("replay_probabilities", max_values=normal("B"), alpha=ALPHAS),
        lists("replay_probabilities", max_values=some_zeros, alpha=ALPHAS),
        lists("replay_probabilities", max_values=pick([0.0, 0.0], [2.0, 2.0, 2.0]), alpha=ALPHAS),
    ),
    mistakes={
        "forgetting to divide by the sum": ("(v / v.max()) ** alpha -> v**alpha", "weights / weights.sum() -> weights"),
        "squaring negative values as they are: the lowest would be likely": "v = v - v.min() -> pass",
        "taking negative values for 0": "v = v - v.min() -> v = v.clip(0)",
        "dividing 0 by 0": "if v.max() == 0 -> if False",
        "asking whether all are zero before they are counted from the lowest": (
            "if v.min() < 0 -> if v.max() == 0:\n        v = np.ones_like(v)\n    if v.min() < 0",
            "    if v.max() == 0:\n        v = np.ones_like(v)\n    weights ->     weights",
        ),
        "raising large numbers to a power: divide by the largest first": "(v / v.max()) ** alpha -> v**alpha",
    },
    learn=(MOUNTAIN_CAR, -190.0),
)
