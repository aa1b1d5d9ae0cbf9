"""maddpg_matd3.py against slow and obvious versions of it: lists that forget, and a network at a time."""

import copy
import itertools
import json
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.by_hand.test_maddpg_matd3 import fill, new_buffer
from tests.tools import close

ENVS = "tests.probes.maddpg_envs"
SPREAD = "mpe2.simple_spread_v3"


# ----------------------------------------------------------------------------------------------------------- buffers


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    num_envs=st.integers(1, 3),
    agents=st.integers(1, 3),
    n_step=st.integers(1, 5),
    kind=st.sampled_from(["EP", "FP"]),
)
def test_buffers_equal_lists_that_forget(script, seed, num_envs, agents, n_step, kind):
    """Fails if any sample of any slot, after any number of steps, is not what a walk along lists of steps gives, or if
    a buffer that has been saved and restored is another.
    """
    rng, G = np.random.default_rng(seed), agents if kind == "FP" else 1
    capacity = num_envs * int(rng.integers(2, 7)) + int(rng.integers(num_envs))
    buffer = new_buffer(script, kind, capacity, num_envs, agents, n_step)
    played = [[] for _ in range(num_envs)]
    for t in range(int(rng.integers(1, 15))):
        rewards, ends = rng.normal(size=(1, num_envs, G)), rng.integers(4, size=(1, num_envs, G))
        valid = rng.integers(4, size=(1, num_envs, agents)) > 0
        fill(buffer, rewards, ends < 2, ends < 1, valid, first=t)
        for e in range(num_envs):
            if valid[0, e].any():
                step = dict(number=t * num_envs + e, rewards=rewards[0, e], ends=ends[0, e], valid=valid[0, e])
                played[e] = [*played[e], step][-(capacity // num_envs) :]
    assert buffer.sizes.tolist() == [len(steps) for steps in played]
    for e, steps in enumerate(played):
        begin = (buffer.positions[e] - len(steps)) % buffer.steps
        for k, first in enumerate(steps):
            batch = buffer.get(np.array([(begin + k) % buffer.steps * num_envs + e]))
            close([own[0, 0] for own in batch.obs], 1000 * np.arange(agents) + first["number"])
            close(batch.valid_transitions[:, 0], first["valid"])
            for g in range(G):
                total, discount, last = 0.0, 1.0, None
                for step in steps[k : k + n_step]:
                    total += discount * step["rewards"][g]
                    discount, last = discount * 0.5, step
                    if step["ends"][g] < 2:
                        break
                close([batch.rewards[g, 0], batch.gammas[g, 0]], [total, discount])
                assert (batch.dones[g, 0], batch.terms[g, 0]) == (last["ends"][g] < 2, last["ends"][g] < 1)
                close(batch.next_share_obs[g], [last["number"] + 0.5])
                close([own[g, 0] for own in batch.next_obs], 1000 * np.arange(agents) + last["number"] + 0.5)
    restored = new_buffer(script, kind, capacity, num_envs, agents, n_step)
    restored.load_state_dict(buffer.state_dict())
    close(restored.positions, buffer.positions)
    for name, arrays in buffer.arrays().items():
        for array, same in zip(arrays, restored.arrays()[name], strict=True):
            assert (array == same).all(), name


@pytest.mark.parametrize("kind", ["EP", "FP"])
def test_sample(script, kind):
    """Fails if what is not stored is drawn, if anything that is stored is not, or if some steps come more often."""
    buffer, rng, G = new_buffer(script, kind, 12, 2, 2, 1), np.random.default_rng(0), 2 if kind == "FP" else 1
    with pytest.raises(ValueError, match="empty"):
        buffer.sample(1, rng)
    valid = np.ones((4, 2, 2))
    valid[1:3, 1] = 0  # environment 0 has stored four steps, environment 1 two: 0 2 4 6 and 1 7
    fill(buffer, np.ones((4, 2, G)), np.zeros((4, 2, G)) > 0, valid=valid)
    drawn = buffer.sample(6000, rng).share_obs[:6000, 0]
    numbers, counts = np.unique(drawn, return_counts=True)
    assert numbers.tolist() == [0, 1, 2, 4, 6, 7] and 900 < counts.min() and counts.max() < 1100
    fill(buffer, np.ones((9, 2, G)), np.zeros((9, 2, G)) > 0, first=4)  # full: 12 slots, the last six steps of each
    drawn = buffer.sample(1200, rng).share_obs[:1200, 0]
    assert np.unique(drawn).tolist() == list(range(14, 26))


# -------------------------------------------------------------------------------------------------- whole trainings


def rehearse(script, env_id=f"{ENVS}:Chance", **settings):
    """Train without a folder. Returns the Run; its `calls` are copies of (agents, batch, generator) as they were when
    each batch had just been sampled, its `buffer` is the last one.
    """
    calls = []

    class Rehearsal(script.Run):
        open_folder = write_row = draw_curve = lambda self: None
        finish = lambda self: self

        def write_checkpoint(self):
            self.restarts = True

        def write_evaluation(self):
            mean, std = script.evaluate(self.agent, self.args, self.args.eval_episodes)
            self.evaluations.append((self.step, self.seconds, mean, std))

    def watched(args, agents):
        buffer = make_buffer(args, agents)
        sample = buffer.sample

        def sample_and_tell(batch_size, rng):
            batch = sample(batch_size, rng)
            calls.append((copy.deepcopy(agents), batch, copy.deepcopy(rng)))
            return batch

        buffer.sample = sample_and_tell
        return buffer

    make_buffer = script.make_off_policy_buffer
    quiet = {"progress": False, "eval_every": 10**9, "checkpoint_every": 10**9, "eval_episodes": 1}
    small = {"hidden_sizes": (8, 6), "batch_size": 16, "num_envs": 2, "learning_starts": 30}
    args = script.Args(**quiet | small | {"env_id": env_id} | settings)
    with mock.patch.multiple(script, Run=Rehearsal, make_off_policy_buffer=watched):
        run = script.train(args)
    run.calls = calls
    run.buffer = run.parts["buffer"]
    return run


class Twin:
    """MATD3 network by network, agent by agent, stream by stream, with torch.optim.Adam."""

    def __init__(self, agents, args):
        self.args, self.n, self.discrete = args, agents.num_agents, agents.discrete
        agents = copy.deepcopy(agents)
        self.networks = {
            "actors": [agents.actors], "critics": agents.critics,
            "slow actors": [agents.target_actors], "slow critics": agents.target_critics,
        }  # fmt: skip
        self.adam = {}
        for name, rate in (("actors", args.actor_learning_rate), ("critics", args.critic_learning_rate)):
            unique = {
                id(p): p for networks in self.networks[name] for network in networks for p in network.parameters()
            }
            self.adam[name] = torch.optim.Adam(unique.values(), rate)

    def choice(self, name, i, obs, available, rng):
        """(What agent i does, the outputs that it is made of.)"""
        output = self.networks[name][0][i](obs)
        if not self.discrete:
            return torch.tanh(output), output
        noise = torch.as_tensor(rng.gumbel(size=output.shape)).float()
        logits = torch.where(available, output, torch.tensor(-1e9))
        soft = ((logits + noise) / self.args.gumbel_temperature).softmax(1)
        hard = nn.functional.one_hot((logits + noise).argmax(1), logits.shape[1])
        return hard + soft - soft.detach(), output

    def update(self, batch, number, rng):
        args, n, B = self.args, self.n, len(batch.obs[0])
        streams = len(batch.rewards) // B
        with torch.no_grad():
            there = [
                self.choice("slow actors", i, batch.next_obs[i], batch.next_available_actions[i], rng)[0]
                for i in range(n)
            ]
            if args.target_noise and not self.discrete:
                for i in range(n):
                    noise = args.target_noise * torch.as_tensor(rng.standard_normal(there[i].shape, np.float32))
                    there[i] = (there[i] + noise.clamp(-args.noise_clip, args.noise_clip)).clamp(-1, 1)
        losses, count = [], 0
        for g in range(streams):
            rows = slice(g * B, (g + 1) * B)
            x = torch.cat([batch.next_share_obs[rows], *(action[rows] for action in there)], 1)
            slow = [critics[g % len(critics)](x)[:, 0].detach() for critics in self.networks["slow critics"]]
            future = torch.stack(slow).amin(0)
            y = batch.rewards[rows, 0] + batch.gammas[rows, 0] * torch.where(batch.terms[rows, 0], 0, future)
            x = torch.cat([batch.share_obs[rows], *batch.actions], 1)
            valid = batch.valid_transitions[rows, 0] if args.state_type == "FP" else torch.ones(B)
            for critics in self.networks["critics"]:
                losses.append(((critics[g % len(critics)](x)[:, 0] - y) ** 2 * valid).sum())
            count += valid.sum()
        self.step("critics", sum(losses) / max(count, 1))
        if number % args.policy_frequency:
            return
        losses = []
        chosen = [self.choice("actors", i, batch.obs[i], batch.available_actions[i], rng) for i in range(n)]
        for i in range(n):
            together = list(batch.actions)
            together[i], output = chosen[i]
            states = batch.share_obs[i * B : (i + 1) * B] if args.state_type == "FP" else batch.share_obs
            critics = self.networks["critics"][0]
            values = critics[i % len(critics)](torch.cat([states, *together], 1))[:, 0]
            worth = values - args.output_penalty * output.square().mean(1)
            losses.append((worth * batch.valid_transitions[i * B : (i + 1) * B, 0]).sum())
        self.step("actors", -sum(losses) / max(batch.valid_transitions.sum(), 1))
        for kind in ("actors", "critics"):
            for slow, fast in zip(self.networks[f"slow {kind}"], self.networks[kind]):
                for p, q in zip(slow.parameters(), fast.parameters()):
                    p.data = args.tau * q.data + (1 - args.tau) * p.data

    def step(self, name, loss):
        for adam in self.adam.values():
            adam.zero_grad()
        loss.backward()
        if self.args.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.adam[name].param_groups[0]["params"], self.args.max_grad_norm)
        self.adam[name].step()

    def weights(self):
        networks = [network for networks in self.networks.values() for network in networks]
        return torch.cat([p.detach().flatten() for network in networks for p in network.parameters()])


MADDPG = {"algorithm": "maddpg", "twin_q": False, "policy_frequency": 1, "target_noise": 0.0}
ALIKE, DISCRETE = {"alike": True}, {"discrete": True}
TWINS = {  # (arguments of the environment, settings)
    "MATD3": ({}, {}),
    "MADDPG": ({"agents": 3}, MADDPG),
    "FP": ({"agents": 3}, {"state_type": "FP"}),
    "FP, MADDPG": ({}, {"state_type": "FP", "critic_hidden_sizes": ()} | MADDPG),
    "shared": (ALIKE, {"share_policy": True}),
    "shared, FP": (ALIKE, {"share_policy": True, "state_type": "FP", "n_step": 3}),
    "discrete": (DISCRETE, {"n_step": 2, "gumbel_temperature": 0.7}),
    "discrete, FP": (DISCRETE, {"state_type": "FP", "policy_frequency": 1, "n_step": 3}),
    "discrete, shared": (DISCRETE | ALIKE, {"share_policy": True, "max_grad_norm": 0.1}),
    "large penalty": (DISCRETE, {"output_penalty": 1.0, "gradient_steps": 3}),
    "short gradients": ({}, {"max_grad_norm": 0.1, "critic_hidden_sizes": (5,)}),
}


OFTEN = ("MATD3", "MADDPG", "shared, FP", "discrete, FP")


@pytest.mark.parametrize(
    "case", [case if case in OFTEN else pytest.param(case, marks=pytest.mark.slow) for case in TWINS]
)
def test_training_equals_that_of_the_twin(script, case):
    """Fails if the targets, losses or steps of a training are not those of the twin, or if their order is another."""
    kwargs, more = TWINS[case]
    fast = {"tau": 0.1, "actor_learning_rate": 1e-2, "total_timesteps": 62}
    run = rehearse(script, env_kwargs=json.dumps(kwargs), **fast | more)
    assert script.updates_due(0, 62, run.args) == len(run.calls) == run.agent.updates >= 8
    assert len(run.agent.critics) == 1 + run.args.twin_q
    twin = Twin(run.calls[0][0], run.args)
    following = [agents for agents, _, _ in run.calls[1:]] + [run.agent]
    for number, ((_, batch, rng), after) in enumerate(zip(run.calls, following), 1):
        twin.update(batch, number, rng)
        close(twin.weights(), Twin(after, run.args).weights(), 3e-5)


@pytest.mark.parametrize("state_type", ["EP", "FP"])
@pytest.mark.parametrize("share_policy", [False, True])
def test_which_networks_there_are(script, state_type, share_policy):
    """Fails if networks share weights that should not, or do not that should; if twins begin alike, or targets do not
    begin as what they follow.
    """
    more = {"state_type": state_type, "share_policy": share_policy, "num_envs": 2, "hidden_sizes": (8,)}
    args = script.Args(env_id=f"{ENVS}:Chance", env_kwargs='{"alike": true, "agents": 3}', **more)
    agents = script.make_agent(args, script.make_envs(args, 2))
    assert len(agents.actors) == 3 and len(set(map(id, agents.actors))) == (1 if share_policy else 3)
    critics = 3 if state_type == "FP" and not share_policy else 1
    assert [len(twin) for twin in agents.critics] == [critics, critics]
    kinds = "actors critics target_actors target_critics".split()
    weights = {kind: list(getattr(agents, kind).parameters()) for kind in kinds}
    assert len(weights["actors"]) == 4 * len(set(agents.actors)) and len(weights["critics"]) == 4 * 2 * critics
    assert len({p.data_ptr() for ps in weights.values() for p in ps}) == sum(map(len, weights.values()))
    for kind in kinds[:2]:
        assert all(torch.equal(p, q) for p, q in zip(weights[kind], weights[f"target_{kind}"], strict=True))
    every = weights["actors"] + weights["critics"]
    assert not any(p.shape == q.shape and torch.equal(p, q) for p, q in itertools.combinations(every, 2))


@pytest.mark.parametrize("discrete, state_type", [(False, "EP"), (False, "FP"), (True, "FP")])
def test_nobody_learns_from_what_the_dead_did(script, discrete, state_type):
    """Fails if an agent's actor, or with FP its critic, learns from what happened in steps that it took no part in."""
    kwargs = json.dumps({"discrete": discrete})
    agents, batch, rng = rehearse(script, env_kwargs=kwargs, state_type=state_type, total_timesteps=40).calls[-1]
    dead = batch.valid_transitions.reshape(2, -1) == 0
    assert dead.any()
    gradients = []
    for garbage in (0, 3):
        for i, own in enumerate(batch.obs):
            own[dead[i]] += garbage
        if state_type == "FP":
            batch.share_obs[dead.flatten()] -= garbage
            batch.rewards[dead.flatten()] += garbage
        targets = script.matd3_targets(agents, batch, agents.args, copy.deepcopy(rng))
        losses = [
            script.critics_loss(agents, batch, targets)[0],
            *script.actors_loss(agents, batch, copy.deepcopy(rng)),
        ]
        parameters = [*agents.critics.parameters(), *agents.actors.parameters()]
        gradients.append(torch.cat([p.flatten() for p in torch.autograd.grad(sum(losses), parameters)]))
    assert torch.equal(*gradients) and gradients[0].any()


# ---------------------------------------------------------------------------------------------- acting and exploring


def two_agents(script, discrete=False, **more):
    """Agents who observe two and three numbers, of which all but the third are the state."""
    boxes = spaces.Box(-1, 1, (2,)), spaces.Box(np.float32([0, -5, 1]), np.float32([1, 5, 2]))
    available = [slice(8, 10), slice(10, 13)] if discrete else [slice(8, 8)] * 2
    layout = script.Layout(slice(1, 3), [slice(3, 5), slice(5, 8)], slice(3, 8), available)
    action_spaces = (spaces.Discrete(2), spaces.Discrete(3, start=5)) if discrete else boxes
    torch.manual_seed(0)
    return script.Agents(layout, action_spaces, script.Args(hidden_sizes=(8,), **more))


def rows_of(agents, rng, N=20):
    """Random rows of a TeamEnv with this layout, everybody alive; of the choices, some are not available."""
    rows = rng.normal(size=(N, agents.layout.available[-1].stop)).astype(np.float32)
    rows[:, agents.layout.alive] = 1
    for part in agents.layout.available:
        rows[:, part] = rng.integers(2, size=rows[:, part].shape)
        rows[:, part.start : part.stop][:, :1] = 1
    return rows


@pytest.mark.parametrize("discrete", [False, True])
def test_best_actions(script, discrete):
    """Fails if evaluations play what training would not, with noise or without masks, or what is in no space."""
    agents, rng = two_agents(script, discrete), np.random.default_rng(0)
    rows = rows_of(agents, rng)
    obs, available = agents.views(rows)
    sure = SimpleNamespace(gumbel=lambda size: np.ones(size))
    tensors = [[torch.as_tensor(x) for x in xs] for xs in (obs, available)]
    chosen, _ = agents.choose(agents.actors, *tensors, sure)
    expected = agents.to_env([action.detach().numpy() for action in chosen])
    for i, (actions, space) in enumerate(zip(agents.act(rows), agents.action_spaces)):
        close(actions, expected[i])
        assert all(space.contains(action) for action in actions)
        if discrete:
            assert available[i][np.arange(20), actions - space.start].all()


def test_actions_are_stretched_to_the_bounds_of_each_agent(script):
    """-1 -> low, 0 -> the middle, 1 -> high; whole numbers are rounded; one-hot -> the choice, from the start on."""
    ends = np.array([[-1.0], [0], [1]])
    first, second = two_agents(script).to_env([ends.repeat(2, 1), ends.repeat(3, 1)])
    close(first, [[-1, -1], [0, 0], [1, 1]])
    close(second, [[0, -5, 1], [0.5, 0, 1.5], [1, 5, 2]])
    first, second = two_agents(script, True).to_env([np.eye(2), np.eye(3)[[2, 0]]])
    assert first.tolist() == [0, 1] and second.tolist() == [7, 5]
    agents = two_agents(script)
    agents.action_spaces = [spaces.Box(0, 4, (1,), np.int64)] * 2
    first, _ = agents.to_env([np.array([[-1], [-0.3], [0.2], [0.9], [1.0]])] * 2)  # 0, 1.4, 2.4, 3.8, 4
    assert first.dtype == np.int64 and first[:, 0].tolist() == [0, 1, 2, 4, 4]


def test_exploration_with_noise(script):
    """Fails if the noise has not the given deviation, is the same for agents or environments, or leaves the bounds."""
    agents, rng = two_agents(script), np.random.default_rng(0)
    for p in agents.actors.parameters():
        p.data.zero_()
    rows = rows_of(agents, rng, 3)
    drawn = [agents.explore(rows, 0.25, rng) for _ in range(2000)]
    first, second = (np.array([actions[i] for actions in drawn]) for i in range(2))
    close(first.std((0, 1)), np.full(2, 0.25), 0.01)
    close(second.std((0, 1)), np.full(3, 0.25), 0.01)
    assert abs(np.corrcoef(first[:, 0, 0], second[:, 0, 0])[0, 1]) < 0.06
    assert abs(np.corrcoef(first[:, 0, 0], first[:, 1, 0])[0, 1]) < 0.06
    assert np.abs(agents.explore(rows, 9.0, rng)[1]).max() == 1
    drawn = np.concatenate([agents.random_actions(rows, rng)[1] for _ in range(500)])
    close(np.quantile(drawn, [0, 0.25, 0.5, 0.75, 1]), [-1, -0.5, 0, 0.5, 1], 0.06)


def test_exploration_by_draws(script):
    """Fails if discrete actions are not drawn from the softmax of what is available, or, at first, evenly from that."""
    agents, rng = two_agents(script, True), np.random.default_rng(0)
    for p in agents.actors.parameters():
        p.data.zero_()
    agents.actors[1][-1].bias.data = torch.tensor([0.2, 0.6, 0.2]).log()
    rows = rows_of(agents, rng, 3000)
    rows[:, agents.layout.available[1]] = [1, 1, 0]
    for drawn, expected in (
        (agents.explore(rows, 0, rng), [0.25, 0.75, 0]),
        (agents.random_actions(rows, rng), [0.5, 0.5, 0]),
    ):
        close(drawn[1].mean(0), expected, 0.03)
        assert (drawn[0].sum(1) == 1).all() and (drawn[1].sum(1) == 1).all()
        _, (available, _) = agents.views(rows)
        assert available[np.arange(3000), drawn[0].argmax(1)].all()


def test_draws_have_the_probabilities_of_the_softmax(script):
    """20,000 draws with probabilities 0.25 and 0.75 and one action that is not available: 1 % is three deviations."""
    logits = torch.tensor([0.2, 0.6, 0.2]).log().repeat(20_000, 1)
    logits[:, 2] = -1e9
    noise = torch.as_tensor(np.random.default_rng(0).gumbel(size=logits.shape))
    for temperature in (0.5, 1.0):
        close(script.gumbel_softmax(logits, noise, temperature).mean(0), [0.25, 0.75, 0], 0.01)


# ----------------------------------------------------------------------------------------------------- what is stored


def play(script, env_id, steps, **more):
    """The Run of a training that takes random steps only."""
    settings = {"num_envs": 1, "learning_starts": 10**9, "seed": 0, "total_timesteps": steps}
    return rehearse(script, env_id, **settings | more)


def stored(run, name, env=0):
    """What is stored of an environment; of lists over agents, a list."""
    arrays = [array[: run.buffer.sizes[env], env] for array in run.buffer.arrays()[name]]
    return arrays if isinstance(getattr(run.buffer, name), list) else arrays[0]


SCRIPTS = [
    {"a": [1, "terminated"], "b": [2, "truncated"]},
    {"a": [3, "truncated"], "b": [1, "terminated"]},
    {"a": [2, "terminated"], "b": [2, "terminated"]},
]


@pytest.mark.parametrize("state_type", ["EP", "FP"])
def test_deaths_and_ends_are_stored(script, state_type):
    """Rewards are 1 and 2 for who takes part. A constructor has reset the environment: the second script comes first.

    Steps 1-3: b terminates in the first, a is truncated in the third. Then two steps after which both terminate, then
    two: a terminates in the first, b is truncated in the second. The rows in between, which reset, are not stored.
    """
    kwargs = json.dumps({"scripts": SCRIPTS, "masks": {"a": [0, 1, 1], "b": [1, 1, 1]}})
    run = play(script, "tests.probes.team_envs:Scripted", 7, env_kwargs=kwargs, state_type=state_type)
    assert run.episodes == [(3, 5), (5, 6), (7, 5)]
    close(stored(run, "valid_transitions"), [[1, 1], [1, 0], [1, 0], [1, 1], [1, 1], [1, 1], [0, 1]])
    if state_type == "EP":
        close(stored(run, "rewards")[:, 0], [3, 1, 1, 3, 3, 3, 2])
        close(stored(run, "dones")[:, 0], [0, 0, 1, 0, 1, 0, 1])
        close(stored(run, "terms")[:, 0], [0, 0, 0, 0, 1, 0, 0])
        close(stored(run, "share_obs")[:, 0], [[1, t] for t in range(3)] + [[2, 0], [2, 1], [3, 0], [3, 1]])
        close(stored(run, "next_share_obs")[:, 0], [[1, t + 1] for t in range(3)] + [[2, 1], [2, 2], [3, 1], [3, 2]])
    else:
        close(stored(run, "rewards"), [[1, 2], [1, 0], [1, 0], [1, 2], [1, 2], [1, 2], [0, 2]])
        close(stored(run, "dones"), [[0, 1], [0, 1], [1, 1], [0, 0], [1, 1], [1, 0], [1, 1]])
        took_part = stored(run, "valid_transitions") > 0
        terms = np.array([[0, 1], [0, 9], [0, 9], [0, 0], [1, 1], [1, 0], [9, 0]])
        close(stored(run, "terms")[took_part], terms[took_part])
        close(stored(run, "share_obs")[:3, 0], [[10, 1, 0], [11, 1, 1], [12, 1, 2]])  # own observation, then state
        close(stored(run, "share_obs")[:3, 1], [[110, 1, 0], [0, 0, 0], [0, 0, 0]])  # zeros once dead
        close(stored(run, "next_share_obs")[:3, 0], [[11, 1, 1], [12, 1, 2], [13, 1, 3]])
    # Observations are 100 for agent b, 10 per episode, 1 per step; zero for the dead.
    close(np.hstack(stored(run, "obs")), [[10, 110], [11, 0], [12, 0], [20, 120], [21, 121], [30, 130], [0, 131]])
    next_obs = np.array([[11, 111], [12, 0], [13, 0], [21, 121], [22, 122], [31, 131], [0, 132]])
    seen = np.hstack(stored(run, "next_obs"))
    close(seen[seen != 0], next_obs[seen != 0])
    assert (seen[:, 0] > 0).sum() >= 5 and seen[[2, 4, 6]].any(1).all()  # final observations are there
    masks, _ = stored(run, "available_actions")
    assert (masks[stored(run, "valid_transitions")[:, 0] > 0] == [0, 1, 1]).all()


@pytest.mark.parametrize("state_type", ["EP", "FP"])
def test_a_death_is_of_one_environment(script, state_type):
    """Two environments of two agents; in the first step these are done: [[1, 0], [1, 1]]. Environment 1 resets in the
    second, and in what is stored next all of its agents take part: [[0, 1], [1, 1]].

    Fails if the dead come back with another environment's reset, or if a reset row is stored.
    """
    agents = two_agents(script, state_type=state_type, num_envs=2, batch_size=2, buffer_size=20)
    buffer, rng = script.make_off_policy_buffer(agents.args, agents), np.random.default_rng(0)
    rows, reset_rows = rows_of(agents, rng, 2), np.zeros(2, bool)
    for over in ([False, True], [False, False], [False, False]):
        next_rows = rows.copy()
        next_rows[:, agents.layout.alive] = [[0, 1], [1, 1]]
        info = {"rewards": np.ones((2, 2)), "terminated": np.array([[True, False], [True, True]])}
        result = next_rows, np.ones(2), np.array(over), np.zeros(2, bool), info
        script.store_step(buffer, agents, rows, reset_rows, agents.random_actions(rows, rng), result)
        rows, reset_rows = next_rows, np.array(over)
    assert buffer.sizes.tolist() == [3, 2]
    close(buffer.valid_transitions[:3, 0], [[1, 1], [0, 1], [0, 1]])
    close(buffer.valid_transitions[:2, 1], [[1, 1], [1, 1]])
    if state_type == "FP":
        close(buffer.dones[:3, 0], [[1, 0], [1, 0], [1, 0]])
        close(buffer.dones[:2, 1], [[1, 1], [0, 0]])
    else:
        close([buffer.dones[:2, 0, 0], buffer.dones[:2, 1, 0]], [[0, 0], [1, 0]])


def test_masks_are_those_of_the_episode(script):
    """Tic-tac-toe: fails if a player's mask is another's, or that of the next game, or if a move is not legal."""
    run = play(script, "tests.probes.team_envs:tictactoe", 340, num_envs=2)
    assert len(run.episodes) > 20 and {total for _, total in run.episodes} == {0}
    for env in range(2):
        names = "available_actions next_available_actions actions".split()
        now, then, actions = (np.stack(stored(run, name, env), 1) for name in names)
        done = stored(run, "dones", env)[:, 0]
        assert ((actions * now).sum(-1) == 1).all() and (actions.sum(-1) == 1).all()
        for t in np.flatnonzero(~done[:-1]):
            assert (now[t + 1] == then[t]).all()
        begins = np.flatnonzero(np.r_[True, done[:-1]])
        assert (now[begins, 0] == 1).all() and (now[begins, 1] == (np.arange(9) == 0)).all()  # who waits has a no-op
        full_board = then[done].reshape(done.sum(), -1).sum(1)
        assert (full_board < 9).all()  # a new game's mask would have nine moves, and a no-op


def test_what_is_next_is_the_true_successor(script):
    """Fails if a new episode's first observation is stored as the old one's last, or a truncation as a termination."""
    run = play(script, SPREAD, 154, num_envs=2, env_kwargs='{"continuous_actions": true}')
    assert run.buffer.sizes.tolist() == [77, 77]  # of 80 rows; three only reset
    for env in range(2):
        obs, next_obs = (np.stack(stored(run, name, env), 1) for name in ("obs", "next_obs"))
        dones = stored(run, "dones", env)[:, 0]
        assert not stored(run, "terms", env).any() and np.flatnonzero(dones).tolist() == [24, 49, 74]
        close(obs[1:][~dones[:-1]], next_obs[:-1][~dones[:-1]])
        moved = next_obs[:, :, 2:4] - obs[:, :, 2:4]  # place; the velocity before says how far, in 0.1 s
        close(moved, 0.1 * obs[:, :, :2], 1e-5)
        close(stored(run, "share_obs", env)[:, 0], obs.reshape(77, -1))
        close(stored(run, "next_share_obs", env)[:, 0], next_obs.reshape(77, -1))
    assert not np.allclose(run.buffer.rewards[:77, 0], run.buffer.rewards[:77, 1])


def test_a_checkpoint_is_a_restart(script):
    """Three times ten steps of episodes of 25 in two environments, with a checkpoint after each. Fails if episodes are
    not begun anew, if a window reaches from one to the next, or if that passes for a termination.
    """
    run = play(script, SPREAD, 60, num_envs=2, checkpoint_every=20, n_step=3)
    for env in range(2):
        assert np.flatnonzero(stored(run, "dones", env)).tolist() == [9, 19]
        assert not stored(run, "terms", env).any()
    assert run.buffer.get(np.arange(14, 20)).gammas[::2, 0].tolist() == pytest.approx([0.99**3, 0.99**2, 0.99])


@pytest.mark.slow
def test_multiwalker(script):
    """Fails if walkers that fall are asked for actions, come back too early, or make the networks learn nonsense."""
    kwargs = '{"terminate_on_fall": false, "max_cycles": 100}'
    more = {"num_envs": 2, "state_type": "FP", "n_step": 3, "env_kwargs": kwargs, "learning_starts": 420}
    run = play(script, "pettingzoo.sisl.multiwalker_v9", 430, **more)
    assert len(run.episodes) >= 2
    for e in range(2):
        valid, dones, terms = (stored(run, name, e) for name in ("valid_transitions", "dones", "terms"))
        assert (valid.sum(1) < 3).any() and (valid.sum(1) > 0).all()
        over = dones.all(1)
        died = (valid > 0) & dones
        assert terms[died & ~over[:, None]].all()  # who falls while others walk on has terminated
        for t in range(len(valid) - 1):  # alive next, if alive now and not done, or if a new episode begins
            close(valid[t + 1], np.ones(3) if over[t] else (valid[t] > 0) & ~dones[t])
    assert len(run.calls) > 1 and all(p.isfinite().all() for p in run.agent.parameters())


def test_processes_give_the_same_as_one(script):
    """Fails if --async-envs loses or mixes up anything, FP rewards included."""
    more = {"num_envs": 2, "state_type": "FP"}
    one, other = (play(script, SPREAD, 58, async_envs=in_processes, **more) for in_processes in (False, True))
    for name, arrays in one.buffer.arrays().items():
        for array, same in itertools.zip_longest(arrays, other.buffer.arrays()[name]):
            assert (array[:29] == same[:29]).all() and len(array[:29]), name
    other.envs.close()
