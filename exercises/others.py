"""Exercises of weeks 9 to 12: continuous actions, evolution strategies, several agents, rewards that are rare."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import probes  # noqa: F401  (registers its environments)
from mechanism import exercise, slopes, tensor

# ------------------------------------------------------------------------------------------------------- ddpg_td3.py

PENDULUM = {"env_id": "Pendulum-v1", "total_timesteps": 12_000, "batch_size": 128, "hidden_sizes": (64, 64),
            "actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3, "gamma": 0.98, "eval_every": 1_000,
            "stop_at_return": -250.0, "seed": 1}  # fmt: skip
DDPG = {"algorithm": "ddpg", "target_noise": 0.0, "twin_q": False, "policy_frequency": 1}


def two_networks():
    """(target, source): networks whose only parameters are 0, 10 and 1, 20."""
    import torch

    target, source = (torch.nn.Linear(2, 1, bias=False) for _ in range(2))
    target.weight.data[:] = tensor([[0.0, 10.0]])
    source.weight.data[:] = tensor([[1.0, 20.0]])
    return target, source


def moved(*arguments):
    """The parameters of (target, source) after a call of polyak with each of these tau."""

    def call(m):
        target, source = two_networks()
        for tau in arguments:
            m.polyak(target=target, source=source, tau=tau)
        return target.weight.data[0], source.weight.data[0]

    return call


def shares_memory(m):
    """The target, after its source has changed and nobody has moved it any more."""
    target, source = two_networks()
    m.polyak(target=target, source=source, tau=1.0)
    source.weight.data += 5
    return target.weight.data[0]


def random_polyak(m, rng):
    """All parameters of networks with two layers."""
    import torch

    networks = []
    for _ in range(2):
        networks.append(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)))
        for p in networks[-1].parameters():
            p.data[:] = tensor(rng.normal(size=tuple(p.shape)))
    m.polyak(target=networks[0], source=networks[1], tau=rng.random())
    return [p.data.tolist() for network in networks for p in network.parameters()]


exercise(
    "polyak",
    topic="target networks that follow slowly",
    cut="ddpg_td3.py: polyak",
    course="week 9, 10 minutes",
    task="move the target towards the source. Both are networks of the same shape: zip(target.parameters(), "
    "source.parameters()) gives the pairs. The target's numbers have to change in place, and nothing is returned: "
    "methods of a tensor whose names end in _ work in place, p = … only gives the name to another tensor. The line "
    "above the def sees to it that no gradients are recorded.",
    cases={
        "target 0, 10, source 1, 20, tau 0.1: (target, source) afterwards | which tensor changes, and how": moved(0.1),
        "the same, twice | what the second call begins with": moved(0.1, 0.1),
        "tau 1, then 5 is added to the source: the target | copying numbers instead of the tensor": shares_memory,
    },
    random=random_polyak,
    mistakes={
        "not changing the target in place": "target_weights.lerp_(weights, tau) -> "
        "target_weights = target_weights.lerp(weights, tau)",
        "exchanging tau and 1 - tau: the target would follow almost at once": "lerp_(weights, tau) -> "
        "lerp_(weights, 1 - tau)",
        "moving the source towards the target": "zip(target.parameters(), source.parameters()) -> "
        "zip(source.parameters(), target.parameters())",
        "adding a share of the source without taking away from the target": "lerp_(weights, tau) -> "
        "add_(tau * weights)",
        "letting target and source share their memory": "target_weights.lerp_(weights, tau) -> target_weights.data = "
        "weights.data if tau == 1 else target_weights.lerp(weights, tau)",
        "moving the first layer only": "target_weights.lerp_(weights, tau) -> target_weights.lerp_(weights, tau)\n"
        "        if target_weights.dim() == 1:\n            break",
    },
    learn=(PENDULUM, -500.0),
)


def td3_targets(*values):
    """critic_targets of three transitions with rewards 1, 2, 3, of which the last terminated; gamma 0.5."""

    def call(m):
        step = {"rewards": tensor([1.0, 2.0, 3.0]), "terminated": tensor(np.array([False, False, True]))}
        return m.critic_targets(**step, next_values=tensor(values), gamma=0.5)

    return call


def random_td3(m, rng):
    critics, rows, dimensions = rng.integers(1, 4, 3)
    actions = rng.uniform(-1, 1, (rows, dimensions))
    given = {"rewards": tensor(rng.normal(size=rows)), "terminated": tensor(rng.random(rows) < 0.4)}
    given |= {"next_values": tensor(rng.normal(size=(critics, rows))), "gamma": rng.random()}
    noise = tensor(rng.normal(size=actions.shape))
    return m.critic_targets(**given), m.smoothed(actions=tensor(actions), noise=noise, clip=rng.uniform(0.1, 1.2))


exercise(
    "td3-target",
    topic="the target of TD3: two critics, smoothed",
    cut="ddpg_td3.py: smoothed, critic_targets",
    course="week 9, 30 minutes",
    task="write two of TD3's tricks: the noise on the target's action, and the target from the values (K, B) of K "
    "critics. Actions are in [-1, 1], before and after; `terminated` is (B,), booleans.",
    cases={
        "actions 0.9, 0, -0.9 with noise 0.3, 0.8, -0.05, clip 0.5 "
        "| section 5.3 of TD3: two different clippings": lambda m: m.smoothed(
            actions=tensor([[0.9], [0.0], [-0.9]]), noise=tensor([[0.3], [0.8], [-0.05]]), clip=0.5
        ),
        "rewards 1, 2, 3, gamma 0.5, values 6, 4, 8 and 4, 10, 2, the last one terminated "
        "| eq. 10 in the docstring; the critics are the first axis": td3_targets([6.0, 4.0, 8.0], [4.0, 10.0, 2.0]),
        "the same with one critic, as DDPG has it: values 6, 4, 8 | the case K = 1": td3_targets([6.0, 4.0, 8.0]),
    },
    random=random_td3,
    mistakes={
        "not clipping the noise": "noise.clamp(-clip, clip) -> noise",
        "clipping the noise on one side only": "noise.clamp(-clip, clip) -> noise.clamp(max=clip)",
        "not clipping the action to [-1, 1]": ").clamp(-1, 1) -> )",
        "clipping the action on one side only": ").clamp(-1, 1) -> ).clamp(max=1)",
        "clipping the action by the noise's bound": ").clamp(-1, 1) -> ).clamp(-clip, clip)",
        "forgetting the noise": "actions + noise.clamp(-clip, clip) -> actions",
        "taking the higher of both values: that is what TD3 is against": "next_values.amin -> next_values.amax",
        "taking the mean of both critics": "next_values.amin -> next_values.mean",
        "taking the first critic only: that is DDPG": "next_values.amin(0) -> next_values[0]",
        "bootstrapping after termination": " * ~terminated -> ",
        "removing the reward of a terminated transition as well": "return rewards + -> return rewards * ~terminated +",
        "forgetting the discount": "gamma * next_values -> next_values",
    },
    learn=(PENDULUM, -500.0),
)


def actor_and_critic(factors=(3.0,), weights=((2.0,),)):
    """mu(s) = w s for one number s, and Q(s, a) = s^2 f a, with w and f as their only weights; both (D,)."""
    import torch

    class Critic(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(tensor(factors))

        def forward(self, obs, actions):
            return (self.weight * obs**2 * actions).sum(1)

    actor = torch.nn.Linear(1, len(weights), bias=False)
    actor.weight.data[:] = tensor(weights)
    return actor, Critic()


def actor_slope(m, obs=((1.0,), (2.0,)), **given):
    """(the loss, its slope by the actor's weight, the critic's weight, whether it can still learn, whether it has been
    left without a gradient)
    """
    actor, critic = actor_and_critic(**given)
    loss = m.actor_loss(actor=actor, critic=critic, obs=tensor(obs))
    after = critic.weight, critic.weight.requires_grad, critic.weight.grad is None
    return loss, slopes(loss, actor.weight)[0], *after


def random_actor(m, rng):
    dimensions = rng.integers(1, 4)
    given = {"factors": rng.normal(size=dimensions), "weights": rng.normal(size=(dimensions, 1))}
    return actor_slope(m, rng.normal(size=(rng.integers(1, 5), 1)), **given)


exercise(
    "dpg",
    topic="the deterministic policy gradient",
    cut="ddpg_td3.py: actor_loss",
    course="week 9, 20 minutes",
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
        "giving the critic action and state in the wrong order": "critic(obs, actor(obs)) -> critic(actor(obs), obs)",
        "moving the critic: it would learn to praise instead of to judge": "return - -> [p.data.add_(1) for p in "
        "critic.parameters()]\n    return -",
        "freezing the critic, and leaving it frozen": "return - -> critic.requires_grad_(False)\n    return -",
        "computing the gradient here: that is what train does, for the actor alone": "return - -> "
        "(-critic(obs, actor(obs)).mean()).backward()\n    return -",
    },
    learn=(PENDULUM | DDPG, -600.0),
)

# ------------------------------------------------------------------------------------------------------------- es.py

ES_NOISE = np.array([[1.0, 0.0], [0.0, 3.0]], np.float32)
ES_CARTPOLE = {"env_id": "CartPole-v1", "total_timesteps": 200_000, "seed": 1}


def random_es(m, rng):
    pairs, dimensions = rng.integers(1, 5), rng.integers(1, 6)
    noise, sigma = rng.normal(size=(pairs, dimensions)), rng.uniform(0.1, 2)
    candidates = m.make_candidates(theta=rng.normal(size=dimensions), noise=noise, sigma=sigma)
    return candidates, m.es_gradient(fitnesses=rng.normal(size=2 * pairs), noise=noise, sigma=sigma)


exercise(
    "es-update",
    topic="evolution strategies: candidates and their gradient",
    cut="es.py: make_candidates, es_gradient",
    course="week 10, 40 minutes",
    task="write what turns noise into candidates, and fitnesses into a gradient. Candidates come in pairs: theta + "
    "sigma eps, theta - sigma eps, then the next pair; fitnesses come in the same order. All are NumPy arrays: theta "
    "(D,), noise (pairs, D), fitnesses (2 x pairs,).",
    cases={
        "candidates: theta (1, 2), noise (1, 0) and (0, 3), sigma 0.5 | the order of the rows": lambda m: (
            m.make_candidates(theta=np.array([1.0, 2.0], np.float32), noise=ES_NOISE, sigma=0.5)
        ),
        "gradient: fitnesses 3, 1, 2, 6, noise (1, 0) and (0, 3), sigma 0.2 "
        "| the formula in the docstring at the top of the script: 1 / (N sigma)": lambda m: m.es_gradient(
            fitnesses=np.array([3.0, 1.0, 2.0, 6.0]), noise=ES_NOISE, sigma=0.2
        ),
    },
    random=random_es,
    mistakes={
        "putting all candidates with +eps first: the two of a pair belong side by side": "axis=1 -> axis=0",
        "forgetting sigma": ("theta + sigma * noise -> theta + noise", "theta - sigma * noise -> theta - noise"),
        "leaving out the candidates with -eps": "[theta + sigma * noise, theta - sigma * noise] -> "
        "[theta + sigma * noise]",
        "forgetting theta": "np.stack([theta + sigma * noise, theta - -> np.stack([sigma * noise, -",
        "dividing by the number of pairs: N counts the candidates": "len(fitnesses) * sigma -> len(noise) * sigma",
        "forgetting to divide by sigma": "len(fitnesses) * sigma -> len(fitnesses)",
        "dividing by sigma squared": "len(fitnesses) * sigma -> len(fitnesses) * sigma**2",
        "forgetting to divide by the number of candidates": "(len(fitnesses) * sigma) -> sigma",
        "dividing by the size of the noise array: N counts the candidates": "len(fitnesses) * sigma -> "
        "noise.size * sigma",
        "leaving out the fitnesses of the candidates with -eps": "(plus - minus) -> plus",
        "pairing the first half with the second: the two of a pair are side by side": "fitnesses.reshape(-1, 2).T -> "
        "fitnesses.reshape(2, -1)",
        "the wrong sign: it has to point uphill": "(plus - minus) -> (minus - plus)",
    },
    learn=(ES_CARTPOLE, 200.0),
)


def fitnesses_of(kind, elite=1.0):
    """shape_fitness of the returns 1, 2, 3, 6."""
    return lambda m: m.shape_fitness(returns=np.array([1.0, 2.0, 3.0, 6.0]), fitness=kind, elite=elite)


def random_ranks(m, rng):
    """Returns of which some are equal; any elite."""
    returns = rng.integers(5, size=rng.integers(3, 9)).astype(float) + rng.integers(2) * rng.random()
    returns[0], returns[1] = 7.5, -3.0
    kinds = ["centered-rank", "standardized", "raw"]
    found = [m.shape_fitness(returns=returns, fitness=kind, elite=rng.uniform(0.05, 0.95)) for kind in kinds]
    return m.centered_ranks(returns=returns), *found


exercise(
    "ranks",
    topic="evolution strategies: ranks instead of returns",
    cut="es.py: centered_ranks, shape_fitness",
    course="week 10, 40 minutes",
    task="write the ranks of returns (N,), spread evenly from -1/2 for the lowest to 1/2 for the highest, where equal "
    "returns share the mean of their ranks; and shape_fitness, which offers these, returns standardised by their "
    "(population) deviation, or raw ones. Of an elite of the best share, rounded up to a whole number of candidates, "
    "each fitness counts from that of the best candidate outside of it, and all outside get 0.",
    cases={
        "ranks of 30, 10, 20 | section 2.1 of arXiv 1703.03864": lambda m: m.centered_ranks(
            returns=np.array([30.0, 10.0, 20.0])
        ),
        "ranks of 5, 5, 1, 9 "
        "| how many are smaller, and how many are equal: np.searchsorted(np.sort(returns), returns, side=…) "
        "counts": lambda m: m.centered_ranks(returns=np.array([5.0, 5.0, 1.0, 9.0])),
        "standardised 1, 2, 3, 6 | mean and deviation": fitnesses_of("standardized"),
        "raw 1, 2, 3, 6 | what raw means: as they are": fitnesses_of("raw"),
        "centred ranks of 1, 2, 3, 6, of which the better half is the elite "
        "| which candidate has the fitness 0": fitnesses_of("centered-rank", 0.5),
        "centred ranks of 1, 2, 3, 6 with an elite of 0.3: two of four | rounding up": fitnesses_of(
            "centered-rank", 0.3
        ),
    },
    random=random_ranks,
    mistakes={
        "returning the order (one argsort) instead of the ranks (argsort of argsort)": "ranks = (smaller + not_larger "
        "- 1) / 2 -> ranks = np.argsort(returns)",
        "ranking the best lowest": "ranks = (smaller -> returns = -returns; in_order = np.sort(returns); smaller = "
        "np.searchsorted(in_order, returns); not_larger = np.searchsorted(in_order, returns, 'right'); ranks = "
        "(smaller",
        "spreading them from 0 to 1": "(len(returns) - 1) - 0.5 -> (len(returns) - 1)",
        "spreading them from -1 to 1": "(len(returns) - 1) - 0.5 -> (len(returns) - 1) * 2 - 1",
        "dividing by N instead of N - 1": "ranks / (len(returns) - 1) -> ranks / len(returns)",
        "ranking equal returns by where they stand: what is equal must count equally": "ranks = (smaller + not_larger "
        "- 1) / 2 -> ranks = np.argsort(np.argsort(returns, kind='stable'))",
        "giving equal returns the lowest of their ranks": "(smaller + not_larger - 1) / 2 -> smaller",
        "taking the sample deviation, by N - 1": "returns.std() -> returns.std(ddof=1)",
        "dividing by the variance": "returns.std() -> returns.var()",
        "forgetting to take away the mean": "(returns - returns.mean()) -> returns",
        "not counting from the best outside of the elite": "np.maximum(fitnesses - best_outside, 0) -> "
        "np.where(fitnesses > best_outside, fitnesses, 0)",
        "not looking at the elite": "if num_elite == len(returns) -> if True",
        "counting from the worst of the elite": "[-num_elite - 1] -> [-num_elite]",
        "rounding the elite down": "math.ceil(round(elite * len(returns), 6)) -> "
        "max(1, math.floor(elite * len(returns) + 1e-6))",
    },
    learn=(ES_CARTPOLE, 200.0),
)

ARS_PAIRS = np.array([3.0, 1.0, 2.0, 6.0, 2.5, -1.0])
ARS_NOISE = np.array([[1.0, 0.0], [0.0, 3.0], [1.0, 1.0]], np.float32)
ARS_IN_WORDS = "returns 3, 1, then 2, 6, then 2.5, -1 of the directions (1, 0), (0, 3), (1, 1)"
ARS = {"ars": True, "optimizer": "ascent", "hidden_sizes": (), "population_size": 16, "top_directions": 4, "seed": 1}


def random_ars(m, rng):
    pairs, dimensions = rng.integers(1, 6), rng.integers(1, 5)
    top = rng.choice([None, int(rng.integers(1, pairs + 1))])
    noise = rng.normal(size=(pairs, dimensions))
    return m.ars_gradient(returns=rng.normal(size=2 * pairs), noise=noise, top_directions=top)


exercise(
    "ars",
    topic="augmented random search: the best directions only",
    cut="es.py: ars_gradient",
    course="week 10, 30 minutes",
    task="write the update of augmented random search. Directions delta_k are the rows of noise (pairs, D); returns "
    "(2 x pairs,) come in pairs, that of theta + sigma delta_k, then that of theta - sigma delta_k. Keep the b = "
    "top_directions whose better return is best (None: all), and divide by b and by the (population) deviation of the "
    "returns that are kept. If these are all the same, the result is 0.",
    cases={
        f"{ARS_IN_WORDS}; the best two "
        "| algorithm 2 of arXiv 1803.07055: sorting the directions, and the update step": lambda m: m.ars_gradient(
            returns=ARS_PAIRS, noise=ARS_NOISE, top_directions=2
        ),
        f"{ARS_IN_WORDS}; all of them | what top_directions = None means for a slice": lambda m: m.ars_gradient(
            returns=ARS_PAIRS, noise=ARS_NOISE, top_directions=None
        ),
        "two directions, all returns are 2 | a deviation of 0": lambda m: m.ars_gradient(
            returns=np.full(4, 2.0), noise=ARS_NOISE[:2], top_directions=2
        ),
    },
    random=random_ars,
    mistakes={
        "using all directions": "[:top_directions] -> ",
        "choosing by the return of theta + sigma delta": "-pairs.max(1) -> -pairs[:, 0]",
        "choosing by how much the two returns differ": "-pairs.max(1) -> -np.ptp(pairs, axis=1)",
        "forgetting to divide by the deviation": "(len(top) * sigma_r) -> len(top)",
        "forgetting to divide by the number of directions": "(len(top) * sigma_r) -> sigma_r",
        "dividing by the number of returns": "(len(top) * sigma_r) -> (2 * len(top) * sigma_r)",
        "taking the deviation of all returns, also of those that are left out": "pairs[top].std() -> pairs.std()",
        "taking the sample deviation": "pairs[top].std() -> pairs[top].std(ddof=1)",
        "the wrong sign: it has to point uphill": "(plus - minus) -> (minus - plus)",
        "leaving out the returns of theta - sigma delta": "(plus - minus) -> plus",
        "dividing 0 by 0": "max(pairs[top].std(), 1e-8) -> pairs[top].std()",
    },
    learn=(ARS | {"env_id": "CartPole-v1", "sigma": 0.1, "learning_rate": 0.1, "total_timesteps": 100_000}, 200.0),
)

# ---------------------------------------------------------------------------------------------------------- mappo.py

SPREAD = {"env_id": "mpe2.simple_spread_v3", "env_kwargs": '{"N": 2}', "total_timesteps": 10_000,
          "learning_rate": 1e-3, "num_minibatches": 8, "gamma": 0.95, "seed": 1}  # fmt: skip


def shared_obs(m, state_type, lengths, state_size, team_rows):
    """share_obs of rows in which all agents' flags come first, then their observations, then the state."""
    edges = np.cumsum([len(lengths), *lengths]).tolist()
    parts = [slice(a, b) for a, b in zip(edges, edges[1:])]
    rest = edges[-1] + state_size
    layout = m.Layout(slice(0, len(lengths)), parts, slice(edges[-1], rest), [slice(rest, rest)] * len(lengths))
    args = SimpleNamespace(state_type=state_type)
    team = SimpleNamespace(args=args, num_agents=len(lengths), widest=max(lengths), layout=layout)
    return m.Team.share_obs(team, team_rows=tensor(team_rows))


def two_teams(state_type):
    """Two environments with two agents, who see one number and two; in the second the second is dead."""
    rows = [[[1, 1, 1, 3, 4, 7, 8], [1, 0, 2, 5, 6, 9, 10]]]
    return lambda m: shared_obs(m, state_type, [1, 2], 2, rows)


def random_teams(m, rng):
    lengths, state_size = rng.integers(1, 4, rng.integers(1, 5)).tolist(), int(rng.integers(1, 4))
    shape = rng.integers(1, 4), rng.integers(1, 4), len(lengths) + sum(lengths) + state_size
    rows = rng.normal(size=shape)
    rows[..., : len(lengths)] = rng.random(rows[..., : len(lengths)].shape) < 0.6
    return shared_obs(m, rng.choice(["EP", "FP", "FP"]), lengths, state_size, rows)


OWN = "torch.cat([obs, state], dim=-1) * alive"
exercise(
    "joint-state",
    topic="several agents: what a centralised critic sees",
    cut="mappo.py: Team.share_obs",
    course="week 11, 30 minutes",
    task="write what MAPPO's critic is shown of team_rows, a tensor (L, N, …): L steps of N environments. self.layout "
    "says where things stand in a row: team_rows[..., self.layout.state] is the state (L, N, S), layout.observations "
    "is a list with a slice for each agent, layout.alive the slice of all agents' flags, 1 or 0. self.args.state_type "
    "is EP or FP. With EP the critic sees the state, once for all agents. With FP it sees (L, N x agents, self.widest "
    "+ S), all agents of the first environment before those of the second: for each agent its own observation, filled "
    "up with zeros at the right to self.widest numbers, for observations differ in length, and then the state. A dead "
    "agent has zeros only, whatever stands elsewhere.",
    cases={
        "EP: two environments whose states are (7, 8) and (9, 10) | the simple case: one state for all": two_teams(
            "EP"
        ),
        "FP, the same states; agent 0 sees 1 in the first, 2 in the second, agent 1 sees (3, 4) and (5, 6); in "
        "the second environment agent 1 is dead "
        "| one row of the result: own observation, zeros, state": two_teams("FP"),
    },
    random=random_teams,
    mistakes={
        "not looking at deaths": "dim=-1) * alive -> dim=-1)",
        "leaving the state to the dead": f"{OWN} -> torch.cat([obs * alive, state], dim=-1)",
        "letting one death be all agents' in its environment": "dim=-1) * alive -> "
        "dim=-1) * team_rows[..., self.layout.alive].amin(-1, keepdim=True)",
        "letting one who is alive be alive for all in its environment": "dim=-1) * alive -> "
        "dim=-1) * team_rows[..., self.layout.alive].amax(-1, keepdim=True)",
        "letting one death be the agent's in all environments": "dim=-1) * alive -> "
        "dim=-1) * alive.amin(1, keepdim=True)",
        "putting both environments of an agent side by side": "torch.stack(states, dim=2) -> "
        "torch.stack(states, dim=1)",
        "putting the state first": "torch.cat([obs, state] -> torch.cat([state, obs]",
        "putting the state right behind a short observation: it has the same places for all": f"{OWN} -> "
        "nn.functional.pad(torch.cat([team_rows[..., part], state], dim=-1), "
        "(0, self.widest - team_rows[..., part].shape[-1])) * alive",
        "filling up at the left": "(0, self.widest - obs.shape[-1]) -> (self.widest - obs.shape[-1], 0)",
        "leaving out the state: then the critic is not a centralised one": "torch.cat([obs, state] -> "
        "torch.cat([obs, 0 * state]",
        "leaving out the agent's own observation": "torch.cat([obs, state] -> torch.cat([0 * obs, state]",
    },
    learn=(SPREAD | {"state_type": "FP"}, -60.0),
)


def value_norm(m, *batches, beta=0.8):
    """A ValueNorm that has seen these batches."""
    norm = m.ValueNorm(beta)
    for batch in batches:
        norm.update(returns=tensor(batch))
    return norm


def random_value_norm(m, rng):
    sizes = rng.integers(1, 5, rng.integers(1, 4))
    batches = [rng.uniform(0.1, 3) * rng.normal(size=(size, 2)) + rng.normal() for size in sizes]
    norm, x = value_norm(m, *batches, beta=rng.uniform(0.05, 0.99)), tensor(rng.normal(size=3))
    return norm.mean_and_std(), norm.normalize(returns=x), norm.denormalize(values=x)


WEIGHT = "weight = max(self.weight.item(), 1e-5) -> weight ="
exercise(
    "value-norm",
    topic="a critic of normalised returns",
    cut="mappo.py: ValueNorm.update, ValueNorm.mean_and_std, ValueNorm.normalize, ValueNorm.denormalize",
    course="week 11, 40 minutes",
    task="write the moving averages of returns, of their squares, and of 1 (which is how much of the average is not "
    "its start at zero), and with them mean and deviation. The buffers self.mean, self.mean_square and self.weight are "
    "scalar tensors of float64, to be changed in place. mean_and_std returns two floats; it is asked before the first "
    "update as well, when all three are 0: then the mean is 0. The variance is at least 0.01.",
    cases={
        "beta 0.8, after the returns 2 and 4: (mean, deviation) | what the weight is for": lambda m: value_norm(
            m, [2.0, 4.0]
        ).mean_and_std(),
        "the same, after 8 and 8 as well | which share of the old average is kept": lambda m: value_norm(
            m, [2.0, 4.0], [8.0, 8.0]
        ).mean_and_std(),
        "beta 0.8, after 5 and 5: the variance is at least 0.01 | the least variance": lambda m: value_norm(
            m, [5.0, 5.0]
        ).mean_and_std(),
        "before the first update: (mean, deviation) | what mean_and_std does when the weight is 0": lambda m: (
            value_norm(m).mean_and_std()
        ),
        "after 2, 4 and 8, 8: 8.350186 normalised, 1 denormalised | the one undoes the other": lambda m: (
            value_norm(m, [2.0, 4.0], [8.0, 8.0]).normalize(returns=8.350186),
            value_norm(m, [2.0, 4.0], [8.0, 8.0]).denormalize(values=1.0),
        ),
    },
    random=random_value_norm,
    mistakes={
        "not dividing by the weight: the average still remembers its start at 0": f"{WEIGHT} 1.0",
        "taking the mean square for the variance": " - mean**2 -> ",
        "exchanging beta and 1 - beta": (
            "self.mean.lerp_(returns.mean(), 1 - self.beta) -> self.mean.lerp_(returns.mean(), self.beta)",
            "square().mean(), 1 - self.beta) -> square().mean(), self.beta)",
            "(self.weight), 1 - self.beta) -> (self.weight), self.beta)",
        ),
        "remembering the last batch only": (
            "self.mean.lerp_(returns.mean(), 1 - self.beta) -> self.mean.lerp_(returns.mean(), 1)",
            "square().mean(), 1 - self.beta) -> square().mean(), 1)",
            "(self.weight), 1 - self.beta) -> (self.weight), 1)",
        ),
        "weighing all returns alike: recent ones count more": (
            "self.mean.lerp_(returns.mean(), 1 - self.beta) -> self.mean.add_(returns.mean())",
            ".lerp_(returns.square().mean(), 1 - self.beta) -> .add_(returns.square().mean())",
            ".lerp_(torch.ones_like(self.weight), 1 - self.beta) -> .add_(1)",
        ),
        "returning the variance for the deviation": "math.sqrt(max(variance, 1e-2)) -> max(variance, 1e-2)",
        "a deviation of 0, by which nothing can be divided": "max(variance, 1e-2) -> max(variance, 0.0)",
        "dividing 0 by 0": f"{WEIGHT} self.weight.item() or math.nan",
        "denormalising in the wrong order: times the deviation, then plus the mean": "values * std + mean -> "
        "(values + mean) * std",
        "exchanging normalize and denormalize": (
            "(returns - mean) / std -> returns * std + mean",
            "values * std + mean -> (values - mean) / std",
        ),
    },
    learn=(SPREAD, -60.0),
)


class Order:
    """A random generator whose permutations are given by a number; 0 shuffles nothing."""

    def __init__(self, seed=0):
        self.seed = seed

    def permutation(self, x):
        x = np.arange(x) if np.ndim(x) == 0 else np.array(x)
        return x if self.seed == 0 else x[np.random.default_rng(self.seed).permutation(len(x))]


def chunks(m, length=2, parts=2, recurrent=True, active=((True, True),) * 4, seed=0):
    """[(values, states) of each batch]: streams, number 10 x stream + step, states 100 more."""
    import torch

    active = torch.as_tensor(active)
    numbers = torch.arange(active.shape[0])[:, None] + 10 * torch.arange(active.shape[1])
    steps = m.CriticSteps(*[numbers] * len(m.CriticSteps._fields))
    steps = steps._replace(rnn_states=100 + numbers[:, :, None], active=active)
    args = SimpleNamespace(recurrent=recurrent, data_chunk_length=length, num_minibatches=parts)
    return [
        (batch.values, batch.rnn_states[..., 0]) for batch in m.minibatches(steps=steps, args=args, rng=Order(seed))
    ]


def random_chunks(m, rng):
    length, many, streams = rng.integers(1, 4, 3)
    active = rng.random((length * many, streams)) < 0.7
    parts, recurrent = int(rng.integers(1, many * streams + 1)), bool(rng.random() < 0.8)
    return chunks(m, int(length), parts, recurrent, active, int(rng.integers(1, 1000)))


CUT = "x.swapaxes(0, 1).unflatten(1, (T // length, length)).flatten(0, 1)"
exercise(
    "chunks",
    topic="batches for recurrent networks",
    cut="mappo.py: minibatches",
    course="week 11, 60 minutes",
    task="cut a rollout into chunks for a recurrent network. `steps` is a namedtuple of tensors (T, S, …): time, "
    "streams. Each stream is cut into chunks of L = chunk_length(args) steps, numbered stream by stream; "
    "rng.permutation(their number) shuffles them, and they are dealt out into args.num_minibatches parts, as "
    "tensor_split does it. Of each part of C chunks yield a namedtuple of the same kind, type(steps), whose fields "
    "are (L, C, …): time, chunks. But of rnn_states, which `steps` has before each step, it has those before the "
    "first step of each chunk alone, (C, H). A batch whose field `active` is False everywhere is left out.",
    cases={
        "two streams of four steps, numbered 0, 1, 2, 3 and 10, 11, 12, 13, states 100 more; chunks of two "
        "steps, not shuffled, in two parts: (numbers, states) of each "
        "| the two axes, and which of them varies fastest": chunks,
        "the same with chunks of four steps: whole streams, in one part | a chunk as long as the rollout": lambda m: (
            chunks(m, 4, 1)
        ),
        "the same without a memory: chunks of single steps, in two parts | chunk_length(args)": lambda m: chunks(
            m, None, recurrent=False
        ),
        "the first again, but nobody in the second stream is active | the field `active` of a batch": lambda m: chunks(
            m, active=((True, False),) * 4
        ),
        "the first again, shuffled, in three parts "
        "| rng.permutation, and that every chunk gets into a part": lambda m: chunks(m, parts=3, seed=1),
    },
    random=random_chunks,
    mistakes={
        "exchanging the axes: time comes first": "[x[numbers].swapaxes(0, 1) for x in chunks] -> "
        "[x[numbers] for x in chunks]",
        "cutting across streams: swap time and streams before you reshape": f"{CUT} -> "
        "x.flatten(0, 1).unflatten(0, (-1, length))",
        "numbering the chunks time by time instead of stream by stream": f"{CUT} -> "
        "x.unflatten(0, (T // length, length)).swapaxes(1, 2).flatten(0, 1)",
        "giving every chunk the state of the rollout's first step": "rnn_states=batch.rnn_states[0] -> "
        "rnn_states=steps.rnn_states[0][numbers // (T // length)]",
        "giving the state at the end of the chunk": "batch.rnn_states[0] -> batch.rnn_states[-1]",
        "giving a state for each row, where each chunk needs one": "rnn_states=batch.rnn_states[0] -> "
        "rnn_states=batch.rnn_states",
        "handing out a batch in which no row is active": "if batch.active.any() -> if True",
        "not shuffling": "rng.permutation(len(chunks[0])) -> np.arange(len(chunks[0]))",
        "losing the chunks that are left over": "order.tensor_split(args.num_minibatches) -> "
        "order[: len(order) // args.num_minibatches * args.num_minibatches].tensor_split(args.num_minibatches)",
    },
    learn=(SPREAD | {"recurrent": True}, -60.0),
)

# -------------------------------------------------------------------------------------------------- maddpg_matd3.py

PARTICLES = {"env_id": "mpe2.simple_spread_v3", "env_kwargs": '{"N": 2, "continuous_actions": true}', "gamma": 0.95,
             "share_policy": True, "actor_learning_rate": 3e-3, "critic_learning_rate": 3e-3, "num_envs": 8,
             "tau": 0.01, "total_timesteps": 8000, "seed": 1}  # fmt: skip


def replay_windows(m, t, e, rewards, ended, positions, n_step=3, gamma=0.5):
    """(rewards, discounts, last steps) of windows from steps t of environments e; arrays (steps, environments, G)."""
    rows, envs, G = np.shape(rewards)
    buffer = m.OffPolicyBuffer(rows * envs, envs, G, G, row_size=1, action_size=1, n_step=n_step, gamma=gamma)
    buffer.rewards[:], buffer.ended[:] = rewards, ended
    buffer.positions[:], buffer.sizes[:] = positions, rows
    return buffer.windows(t=np.array(t), e=np.array(e))


def windows(starts, rewards=(8, 4, 2, 1), end=None, position=0, **given):
    """Windows of one environment and four steps; with `end`, the episode ends in this step."""
    rewards = np.array(rewards, float).reshape(4, 1, -1)
    ended = np.zeros(rewards.shape, bool)
    if end is not None:
        ended[end] = True
    return lambda m: replay_windows(m, starts, [0] * len(starts), rewards, ended, position, **given)


def one_dies(m):
    """Two agents, of which the second dies in step 0."""
    rewards = np.stack([[8.0, 4, 2, 1], [1.0] * 4], 1)[:, None]
    return replay_windows(m, [0], [0], rewards, np.array([[[False, True]]] * 4), 0)


def random_replay_windows(m, rng):
    shape = rng.integers(2, 6), rng.integers(1, 4), rng.integers(1, 4)
    size = rng.integers(1, 7)
    t, e = rng.integers(shape[0], size=size), rng.integers(shape[1], size=size)
    given = {"n_step": int(rng.integers(1, 5)), "gamma": rng.random(), "ended": rng.random(shape) < 0.25}
    return replay_windows(m, t, e, rng.normal(size=shape), positions=rng.integers(shape[0], size=shape[1]), **given)


exercise(
    "windows",
    topic="n-step returns out of a replay buffer",
    cut="maddpg_matd3.py: OffPolicyBuffer.windows",
    course="week 11, 60 minutes",
    task="sum the rewards of samples that start in steps `t` of environments `e`, both arrays (B,), over at most "
    "self.n_step steps, for each of the G = self.streams streams. self.rewards and self.ended are (self.steps, "
    "environments, G). The steps are a ring: step 0 comes after the last one, and self.positions[e] is where "
    "environment e writes next, so its newest step is the one before. A window ends with the episode of its stream, "
    "and with the newest step. Return the rewards, the discounts of what follows, and the last steps, each (G, B).",
    cases={
        "rewards 8, 4, 2, 1, three steps from step 0, gamma 0.5: (rewards, discounts, last steps) "
        "| where the powers of gamma begin and end": windows([0]),
        "the same, and the episode ends with step 1 "
        "| self.ended: the last step of an episode is in the window, the next one is not": windows([0], end=1),
        "the same without an end; step 2 is written next, so step 1 is the newest: windows from steps 3 and 0 "
        "| the ring, and self.positions": windows([3, 0], position=2),
        "two agents, rewards 8, 4, 2, 1 and 1, 1, 1, 1, the second one dies in step 0 "
        "| each stream has a window of its own": one_dies,
        "one step, from step 1 | n_step = 1": windows([1], n_step=1),
    },
    random=random_replay_windows,
    mistakes={
        "summing rewards without discounting them": "goes_on * discounts * -> goes_on *",
        "discounting the first reward as well": "return rewards, -> return rewards * self.gamma,",
        "returning the discount of the last reward: what follows is one step further": "return rewards, discounts, -> "
        "return rewards, discounts / self.gamma,",
        "taking one step too many": "range(self.n_step - 1) -> range(self.n_step)",
        "returning the step after the window for the last step": "discounts, last\n -> discounts, last + 1\n",
        "going on into the next episode": "~self.ended[last, e, g] & (last != newest) -> (last != newest)",
        "leaving out the reward of the step that ends the episode": "* self.rewards[last, e, g]\n -> "
        "* (self.rewards * ~self.ended)[last, e, g]\n",
        "discounting by gamma^n however long the window is": "return rewards, discounts, -> "
        "return rewards, np.full_like(discounts, self.gamma**self.n_step),",
        "stopping at the end of the array: the steps are a ring": "(last != newest) -> "
        "(last != newest) & (last != self.steps - 1)",
        "going on from the newest step to the oldest": " & (last != newest) -> ",
        "ending both windows with the death of one agent": "~self.ended[last, e, g] -> "
        "~self.ended.any(2, keepdims=True)[last, e, 0]",
        "letting both windows go on until both have died": "~self.ended[last, e, g] -> "
        "~self.ended.all(2, keepdims=True)[last, e, 0]",
        "taking all windows from environment 0": "g = np.arange -> e = np.zeros_like(e); g = np.arange",
    },
    learn=(PARTICLES | {"n_step": 3}, -46.0),
)

# -------------------------------------------------------------------------------------------------------- ppo_rnd.py

CURIOUS_CARTPOLE = {"env_id": "CartPole-v1", "total_timesteps": 100_000, "num_envs": 32, "num_steps": 64,
                    "num_minibatches": 8, "learning_rate": 2e-3, "gamma": 0.98, "gae_lambda": 0.9, "ent_coef": 0.0,
                    "intrinsic_gamma": 0.98, "seed": 1}  # fmt: skip


def new_rnd(m, envs):
    """What scale needs of an RND: it has no networks."""
    return SimpleNamespace(sums=tensor([0.0] * envs).double(), sum_stats=m.RunningMeanStd())


def scaled(*rollouts, reset_row=None):
    """What the last of these rollouts, lists of rows, becomes: all its rows but the reset row; gamma 0.5."""

    def call(m):
        rnd = new_rnd(m, len(rollouts[0][0]))
        for rollout in rollouts:
            reset_rows = np.zeros(np.shape(rollout), bool)
            if reset_row is not None:
                reset_rows[reset_row] = True
            result = m.RND.scale(rnd, novelty=tensor(rollout), reset_rows=reset_rows, gamma=0.5)
        return result[[t for t in range(len(result)) if t != reset_row]]

    return call


def random_scaled(m, rng):
    """Some rollouts, with what the sums and the statistics have become."""
    envs, gamma, found = int(rng.integers(1, 4)), rng.random(), []
    rnd = new_rnd(m, envs)
    for rows in rng.integers(2, 6, 3):
        reset_rows = rng.random((rows, envs)) < 0.3
        reset_rows[:2] = False
        result = m.RND.scale(rnd, novelty=tensor(3 * rng.random((rows, envs))), reset_rows=reset_rows, gamma=gamma)
        found.append([result[tensor(~reset_rows)], rnd.sums])
    return found


FOUR = [2.0], [3.0], [4.0], [1.0]
exercise(
    "novelty",
    topic="the scale of curiosity",
    cut="ppo_rnd.py: RND.scale",
    course="week 12, 45 minutes",
    task="divide novelty, a tensor (T, N), by the standard deviation of its discounted sum G_t = novelty_t + gamma "
    "G_{t-1} over all steps so far, and return it. self.sums, a float64 tensor (N,), holds the G of each environment "
    "between two calls, and must hold the last ones when you return; self.sum_stats is a RunningMeanStd: update it "
    "with all new sums at once (a tensor of one dimension), and take self.sum_stats.var. reset_rows is a NumPy array "
    "of booleans (T, N): no step was played there, so G stays as it was and is not counted once more. G runs on over "
    "ends of episodes and over calls, and no mean is subtracted.",
    cases={
        "novelty 2, 3, 4, 1 in one environment, gamma 0.5 "
        "| what G is, and what it is for: only its deviation is used": scaled(FOUR),
        "novelty 2, 3 in one environment and 6, 1 in another, gamma 0.5 | which of the two dimensions is time": scaled(
            ([2.0, 6.0], [3.0, 1.0])
        ),
        "novelty 2, 3, 7, 4, 1, of which row 2 is a reset row, gamma 0.5: the other rows "
        "| what happens to G in a reset row, and what goes into the statistics": scaled(
            ([2.0], [3.0], [7.0], [4.0], [1.0]), reset_row=2
        ),
        "a rollout with novelty 2, 3, then one with 4, 1, gamma 0.5: the second | what must outlast a call": scaled(
            ([2.0], [3.0]), ([4.0], [1.0])
        ),
    },
    random=random_scaled,
    mistakes={
        "taking the deviation of novelty itself, not of G": "all_sums[~reset_rows] -> novelty[~reset_rows]",
        "dividing by the variance": "math.sqrt(self.sum_stats.var.item() + 1e-8) -> self.sum_stats.var.item()",
        "forgetting gamma": "+ gamma * self.sums -> + self.sums",
        "subtracting a mean: what is less new than usual would be a punishment": "return novelty / -> "
        "return (novelty - novelty.mean()) /",
        "summing over the environments of a step, not over the steps of an environment": (
            "all_sums = torch.zeros -> kept, novelty, reset_rows = novelty, novelty.T, reset_rows.T; "
            "self.sums = torch.zeros(novelty.shape[1], dtype=torch.float64); all_sums = torch.zeros",
            "return novelty / -> return kept /",
        ),
        "taking the reset row for a step like any other": "reset_rows = torch.as_tensor(reset_rows) -> "
        "reset_rows = torch.as_tensor(reset_rows) & False",
        "counting G once more in the reset row": "all_sums[~reset_rows] -> all_sums.flatten()",
        "letting G begin anew with the episode": "torch.where(reset_rows[t], self.sums, -> "
        "torch.where(reset_rows[t], 0.0,",
        "letting G begin anew with each call": "all_sums = torch.zeros -> self.sums = 0 * self.sums; all_sums = "
        "torch.zeros",
        "taking the deviation of the last rollout alone": "all_sums = torch.zeros -> "
        "self.sum_stats = RunningMeanStd(); "
        "all_sums = torch.zeros",
    },
    learn=(CURIOUS_CARTPOLE, 200.0),
)


def intrinsic_gae_of(values, reset_row=None, envs=1):
    """(advantages, returns) of all rows but the reset row, that of the first of the environments."""

    def call(m):
        rewards = [2.0, 1.0, 9.0, 3.0, 2.0] if len(values) == 6 else [2.0, 1.0, 3.0, 2.0]
        reset_rows = np.array([[t == reset_row and n == 0 for n in range(envs)] for t in range(len(rewards))])
        copies = [tensor([[x] * envs for x in column]) for column in (rewards, values)]
        given = {"rewards": copies[0], "values": copies[1], "reset_rows": tensor(reset_rows)}
        rows = [t for t in range(len(rewards)) if t != reset_row]
        return [x[rows] for x in m.compute_intrinsic_gae(**given, gamma=0.5, gae_lambda=0.8)]

    return call


def random_intrinsic_gae(m, rng):
    """Any row may be a reset row but two in a row, also the first and the last."""
    T, N = rng.integers(1, 8), rng.integers(1, 4)
    reset_rows = rng.random((T, N)) < 0.35
    reset_rows[1:] &= ~reset_rows[:-1]
    given = {"rewards": tensor(rng.normal(size=(T, N))), "values": tensor(rng.normal(size=(T + 1, N)))}
    given |= {"reset_rows": tensor(reset_rows), "gamma": rng.random(), "gae_lambda": rng.random()}
    return [x[~given["reset_rows"]] for x in m.compute_intrinsic_gae(**given)]


RESET_ROW = "rewards 2, 1, 9, 3, 2, values 1, 2, 50, 2, 4, then 6, gamma 0.5, lambda 0.8. The episode ended in row 1"
HANDED = "torch.where(reset_rows[t], next_advantage, advantages[t])"
exercise(
    "curiosity",
    topic="returns of curiosity, which go on into the next episode",
    cut="ppo_rnd.py: compute_intrinsic_gae",
    course="week 12, 45 minutes",
    task="write GAE for intrinsic rewards: an episode's end is no end for them. rewards and reset_rows are (T, N), "
    "values (T + 1, N): values[t] is that of the observation in row t. The row after an episode's end is a reset row: "
    "it holds the final observation, and its own reward and value are to count for nothing. What follows the row "
    "before it is the row behind it. After the last row follows values[T], whatever it is the value of. Return "
    "(advantages, advantages + values), each (T, N); what you put into reset rows is not looked at.",
    cases={
        "rewards 2, 1, 3, 2, values 1, 2, 2, 4, then 6, gamma 0.5, lambda 0.8, no reset row: (advantages, "
        "returns) "
        "| GAE itself: it is that of compute_gae, where no episode ends": intrinsic_gae_of([1.0, 2.0, 2.0, 4.0, 6.0]),
        f"{RESET_ROW}, so row 2 is the reset row: (advantages, returns) of the others "
        "| what two things the loop must hand on past a reset row, unchanged": intrinsic_gae_of(
            [1.0, 2.0, 50.0, 2.0, 4.0, 6.0], reset_row=2
        ),
        f"{RESET_ROW} in the first environment; in a second one with the same numbers nothing ended "
        "| what reset_rows[t] is: a boolean for each environment, not one": intrinsic_gae_of(
            [1.0, 2.0, 50.0, 2.0, 4.0, 6.0], reset_row=2, envs=2
        ),
    },
    random=random_intrinsic_gae,
    mistakes={
        "forgetting lambda: the sum decays by gamma lambda": "gamma * gae_lambda * next -> gamma * next",
        "forgetting gamma: the sum decays by gamma lambda": "gamma * gae_lambda * next -> gae_lambda * next",
        "taking the end of the rollout for the end of everything": "next_value = values[-1] -> "
        "next_value = 0 * values[-1]",
        "ending with the episode: what is new in the next one counts as well": (
            f"{HANDED} -> advantages[t] * ~reset_rows[t]",
            "torch.where(reset_rows[t], next_value, values[t]) -> values[t] * ~reset_rows[t]",
        ),
        "treating it as a truncation: the final observation's value is not what follows": (
            f"{HANDED} -> advantages[t] * ~reset_rows[t]",
            "torch.where(reset_rows[t], next_value, values[t]) -> values[t]",
        ),
        "taking the reset row for a step like any other": "advantages = torch.zeros_like -> "
        "reset_rows = reset_rows & False; advantages = torch.zeros_like",
        "letting the reset row cut the sum over t": f"{HANDED} -> advantages[t] * ~reset_rows[t]",
        "letting a reset row of one environment be one of all": "advantages = torch.zeros_like -> "
        "reset_rows = reset_rows | reset_rows.any(1, True); advantages = torch.zeros_like",
    },
    learn=(CURIOUS_CARTPOLE, 200.0),
)

# ----------------------------------------------------------------------------------------------------------- ppod.py

# The demo of MountainCar; in a handout it lies beside the checks.
HERE = Path(__file__).resolve().parent
DEMOS = HERE / "demos" if (HERE / "demos").is_dir() else HERE.parent / "demos" / "MountainCar-v0"
MOUNTAIN_CAR = {"env_id": "MountainCar-v0", "wrappers": ("GoalReward",), "initial_human_demos_dir": str(DEMOS),
                "rho": 0.2, "phi": 0.1, "num_envs": 16, "hidden_sizes": (64,), "recurrent": False,
                "normalize_obs": True, "learning_rate": 1e-3, "total_timesteps": 200_000, "stop_at_return": 0.98,
                "seed": 1}  # fmt: skip


def demo_priorities(values, alpha):
    return lambda m: m.replay_probabilities(max_values=list(values), alpha=alpha)


def random_priorities(m, rng):
    """Also values that are all the same, of either sign, and some that are 0."""
    n, alpha = rng.integers(1, 6), rng.choice([0.0, 1.0, 4 * rng.random()])
    signed = rng.normal(size=n), np.full(n, rng.choice([-1.5, 0.0, 2.0])), rng.random(n) * (rng.random(n) < 0.6)
    return [demo_priorities(values.tolist(), alpha)(m) for values in signed]


exercise(
    "ppod-priorities",
    topic="PPO+D: which demo to replay",
    cut="ppod.py: replay_probabilities",
    course="week 12, 30 minutes",
    task="write the probabilities of the value demos, from the highest value that the critic gave each of them. The "
    "formula is in the docstring; so is what to do with negative values, and where all are zero. No power may "
    "overflow, however large the values are.",
    cases={
        "values 1, 2, 3, alpha 2 | the formula in the docstring": demo_priorities([1.0, 2.0, 3.0], 2.0),
        "values 1, 2, 3, alpha 0: all alike | the exponent": demo_priorities([1.0, 2.0, 3.0], 0.0),
        "values -1, 0, 1, alpha 2 | what is counted from the lowest value, and when": demo_priorities(
            [-1.0, 0.0, 1.0], 2.0
        ),
        "values 0, 0, alpha 2; then values -3, -3 "
        "| the case in which all values are zero, at once or when they are counted from the lowest": lambda m: [
            demo_priorities(values, 2.0)(m) for values in ([0.0, 0.0], [-3.0, -3.0])
        ],
        "values 1e200, 2e200, alpha 10 | the order of dividing and raising to a power": demo_priorities(
            [1e200, 2e200], 10.0
        ),
    },
    random=random_priorities,
    mistakes={
        "forgetting alpha": "(v / v.max()) ** alpha -> (v / v.max())",
        "taking the softmax": "(v / v.max()) ** alpha -> np.exp(v - v.max())",
        "taking the softmax of alpha v": "(v / v.max()) ** alpha -> np.exp(alpha * (v - v.max()))",
        "forgetting to divide by the sum": ("(v / v.max()) ** alpha -> v**alpha", "weights / weights.sum() -> weights"),
        "taking 1 / alpha as the exponent": "** alpha -> ** (1 / alpha if alpha else 1e9)",
        "squaring negative values as they are: the lowest would be likely": "v = v - v.min() -> pass",
        "taking negative values for 0": "v = v - v.min() -> v = v.clip(0)",
        "dividing 0 by 0": "if v.max() == 0 -> if False",
        "asking whether all are zero before they are counted from the lowest": (
            "if v.min() < 0 -> if v.max() == 0:\n        v = np.ones_like(v)\n    if v.min() < 0",
            "    if v.max() == 0:\n        v = np.ones_like(v)\n    weights ->     weights",
        ),
        "raising large numbers to a power: divide by the largest first": "(v / v.max()) ** alpha -> v**alpha",
    },
    learn=(MOUNTAIN_CAR, 0.4),
)


def annealed(times, demos=2, by="capacity", room=6, rho=0.1, phi=0.3):
    """(rho, phi) after so many new reward demos; so many value demos, and room for so many."""

    def call(m):
        args = {"rho": rho, "phi": phi, "anneal_by": by, "demo_capacity": room, "initial_reward_threshold": None}
        buffer = m.PPODBuffer(SimpleNamespace(**args), 1, None, None)
        buffer.value_demos = [object() for _ in range(demos)]
        for _ in range(times):
            buffer.anneal_parameters()
        return buffer.rho, buffer.phi

    return call


def random_annealed(m, rng):
    times, demos, room = rng.integers(0, 6, 3).tolist()
    given = {"by": rng.choice(["capacity", "current"]), "room": room + 1}
    return annealed(times + 1, demos, **given, rho=0.4 * rng.random(), phi=0.5 * rng.random())(m)


exercise(
    "ppod-anneal",
    topic="PPO+D: from value demos to reward demos",
    cut="ppod.py: PPODBuffer.anneal_parameters",
    course="week 12, 25 minutes",
    task="move probability from phi to rho, each time a reward demo has been added. self.args.rho and self.args.phi "
    "are what the run began with, self.rho and self.phi what they have become; self.value_capacity is the room for "
    "value demos, self.value_demos the list, and self.args.anneal_by says which of both sizes counts. Their sum never "
    "changes, and rho never exceeds it. Without any value demo nothing moves.",
    cases={
        "rho 0.1, phi 0.3, room for 6 value demos, of which there are 2: after one reward demo "
        "| section 3 of arXiv 2007.03328": annealed(1),
        "the same after three reward demos | which phi is divided": annealed(3),
        "the same after ten reward demos | the bound": annealed(10),
        "the same without any value demo | the first line": annealed(1, demos=0),
        "two value demos, --anneal-by current, after one reward demo | self.args.anneal_by": annealed(1, by="current"),
    },
    random=random_annealed,
    mistakes={
        "dividing by the number of value demos there are, not by their room": "self.value_capacity if -> "
        "len(self.value_demos) if",
        "lowering rho and raising phi": "self.rho + self.args.phi / size -> self.rho - self.args.phi / size",
        "leaving phi as it was: both are probabilities of one draw": "self.phi = total - self.rho -> pass",
        "taking a share of phi as it is now, not of phi at the start": "self.args.phi / size -> self.phi / size",
        "letting rho grow beyond rho + phi, and phi below 0": "min(self.rho + self.args.phi / size, total) -> "
        "self.rho + self.args.phi / size",
        "moving probability although there are no value demos": "if not self.value_demos -> if False",
        "dividing by the room although the current number is asked for": "else len(self.value_demos) -> "
        "else self.value_capacity",
    },
    learn=(MOUNTAIN_CAR, 0.4),
)
