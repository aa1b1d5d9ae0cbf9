"""What masks change in ppo.py, against slow and obvious versions of it, on random input."""

import copy
import json
import math
import tracemalloc

import hypothesis.extra.numpy as hnp
import masked_envs
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.against_loops.test_ppo import PLANS, SHORT, for_each_env, slow_gae, slow_vtrace
from tests.probes.envs import Walk
from tests.tools import IN_ORDER, close, rehearse

NUMBER = spaces.Box(-np.inf, np.inf, (1,))
BUFFERS = "MaskableRolloutBuffer", "MaskableDictRolloutBuffer"

# ------------------------------------------------------------------------------------------------------- distributions


@st.composite
def masked_logits(draw):
    """(logits, mask, sizes), of one to three factors and rows; logits up to 1,000 apart; each factor has a choice."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    rows = draw(st.integers(1, 3))
    logits = draw(hnp.arrays(np.float64, (rows, sum(sizes)), elements=st.floats(-500, 500)))
    mask = draw(hnp.arrays(np.bool_, (rows, sum(sizes))))
    for end, size in zip(np.cumsum(sizes), sizes):
        for row in range(rows):
            if not mask[row, end - size : end].any():
                mask[row, draw(st.integers(end - size, end - 1))] = True
    return logits, mask, sizes


@given(case=masked_logits(), factor=st.sampled_from([1.0, -1.01, 3e5]))
def test_distribution(script, case, factor):
    """Fails if any log-prob, entropy, mode, draw or gradient is not that of a softmax over the valid choices alone."""
    logits, mask, sizes = case
    pi = script.MaskedCategorical(torch.tensor(logits), torch.tensor(mask), sizes)
    entropies, mode, draws = pi.entropy(), pi.mode(), pi.sample()
    for row in range(len(logits)):
        entropy, begin, log_probs = 0, 0, []
        for f, size in enumerate(sizes):
            valid = [i for i in range(size) if mask[row, begin + i]]
            shifted = {i: logits[row, begin + i] - max(logits[row, begin + j] for j in valid) for i in valid}
            total = math.log(sum(math.exp(x) for x in shifted.values()))
            log_probs.append({i: x - total for i, x in shifted.items()})
            entropy -= sum(math.exp(p) * p for p in log_probs[-1].values())
            assert log_probs[-1][mode[row, f].item()] == max(log_probs[-1].values())
            assert draws[row, f].item() in valid
            begin += size
        close(entropies[row], entropy)
        first_valid = [next(iter(p)) for p in log_probs]
        log_prob = pi.log_prob(torch.tensor([first_valid] * len(logits)))[row]
        close(log_prob, sum(p[i] for p, i in zip(log_probs, first_valid)))
    for function in (lambda p: p.entropy(), lambda p: p.log_prob(draws)):
        x = torch.tensor(logits, requires_grad=True)
        (factor * function(script.MaskedCategorical(x, torch.tensor(mask), sizes))).sum().backward()
        assert x.grad.isfinite().all() and (x.grad[~torch.tensor(mask)] == 0).all()


def test_without_mask_it_is_the_plain_distribution(script):
    """Fails if mask=None, or a mask of nothing but True, changes anything."""
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    peer, actions = torch.distributions.Categorical(logits=logits), torch.arange(5)
    for mask in (None, torch.ones(5, 7, dtype=torch.bool)):
        pi = script.MaskedCategorical(logits, mask)
        close(pi.log_prob(actions), peer.log_prob(actions))
        close(pi.entropy(), peer.entropy())
        assert torch.equal(pi.mode(), logits.argmax(1))


def test_masks_of_other_types(script):
    """Fails if only boolean tensors are understood as masks (environments give int8 arrays)."""
    for mask in (np.array([[1, 0, 1]], np.int8), [[True, False, True]], torch.tensor([[1.0, 0, 1]])):
        close(script.MaskedCategorical(torch.zeros(1, 3), mask).log_prob(torch.tensor([2])), [math.log(0.5)])


def within_five_deviations(draws, share):
    """Whether 0 is drawn that often, and all else is 2."""
    draws = np.asarray(draws)
    return set(draws) == {0, 2} and abs((draws == 0).mean() - share) < 5 * math.sqrt(share * (1 - share) / len(draws))


def test_draws_have_their_probabilities(script):
    """0.1 and 0.3 of four are valid: 1/4 and 3/4. Fails if the distribution or acting follows others. 20,000 draws."""
    logits, mask = torch.tensor([0.1, 0.2, 0.3, 0.4]).log(), torch.tensor([True, False, True, False])
    pi = script.MaskedCategorical(logits.expand(20_000, 4), mask.expand(20_000, 4))
    assert within_five_deviations(pi.sample(torch.Generator().manual_seed(3)), 0.25)
    agent = script.MaskedAgent({"observation": NUMBER}, spaces.Discrete(4), script.Args())
    agent.actor.rest[-1].weight.data.zero_()
    agent.actor.rest[-1].bias.data = logits
    obs, masks = np.zeros((20_000, 1), np.float32), np.tile(mask.numpy(), (20_000, 1))
    assert within_five_deviations(agent.sample(obs, masks, np.random.default_rng(0)).ravel(), 0.25)
    with pytest.raises(ValueError, match="row 1"):
        agent.sample(obs[:3], masks[:3] * [[1], [0], [1]], np.random.default_rng(0))


def test_deterministic_actions_are_the_likeliest_valid_ones(script):
    """Fails if the mode is of all actions, valid or not, or if the space's start is forgotten."""
    agent = script.MaskedAgent({"observation": NUMBER}, spaces.Discrete(4, start=-1), script.Args())
    agent.actor.rest[-1].weight.data.zero_()
    agent.actor.rest[-1].bias.data = torch.tensor([1.0, 4, 2, 3])
    obs = np.zeros((3, 1), np.float32)
    masks = np.array([[1, 0, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]], bool)
    assert agent.mode(obs, masks).ravel().tolist() == [2, 1, 0]
    assert agent.act(np.concatenate([obs, masks], 1, dtype=np.float32)).tolist() == [1, 0, -1]


# ------------------------------------------------------------------------------------------------------------- buffers


def counted(script, buffer_class, reset_rows, action_space):
    """A full buffer in which every field of row (t, n) tells the number 10 n + t; its mask is the number in binary."""
    T, N = reset_rows.shape
    is_dict = buffer_class == "MaskableDictRolloutBuffer"
    space = spaces.Dict(a=NUMBER, b=spaces.Discrete(1000)) if is_dict else NUMBER
    buffer = getattr(script, buffer_class)(T, N, space, action_space)
    sizes = script.output_sizes(action_space)
    for t in range(T):
        number = 10 * np.arange(N) + t
        obs = {"a": number[:, None], "b": number} if is_dict else number[:, None]
        actions = number[:, None] * np.ones(buffer.actions.shape[-1], int)
        no = np.zeros(N, bool)
        buffer.add(t, obs, actions, number, no, no, reset_rows[t], mask_of(number[:, None], sizes))
    numbers = torch.as_tensor(10.0 * np.arange(N) + np.arange(T)[:, None])
    buffer.old_values, buffer.old_log_probs = numbers, numbers + 0.25
    buffer.advantages, buffer.returns = numbers + 0.5, numbers + 0.75
    return buffer


def mask_of(number, sizes):
    """A mask that tells the number (…, 1) of a row; the last choice of each factor is always valid."""
    mask = number >> np.arange(sum(sizes)) & 1
    mask[..., np.cumsum(sizes) - 1] = 1
    return mask


SPACES = {
    "Discrete": spaces.Discrete(4),
    "MultiDiscrete": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "MultiBinary": spaces.MultiBinary(3),
}


@pytest.mark.parametrize("buffer_class", BUFFERS)
@pytest.mark.parametrize("kind", SPACES)
@settings(max_examples=25)
@given(
    reset_rows=hnp.arrays(bool, st.tuples(st.integers(1, 8), st.integers(1, 3)), elements=st.booleans()),
    size=st.integers(1, 9),
)
def test_batches(script, buffer_class, kind, reset_rows, size):
    """Every row but the reset rows once, all fields of a batch of the same rows, masks included; in `minibatches` as
    many parts as asked, as equal as can be; in `get` the last part alone is short. Fails if a row is lost or mixed.
    """
    sizes = script.output_sizes(SPACES[kind])
    buffer = counted(script, buffer_class, reset_rows, SPACES[kind])
    played = [10 * n + t for t, n in np.argwhere(~reset_rows)]
    for rng in (np.random.default_rng(0), IN_ORDER):
        for batches in (list(buffer.minibatches(size, rng)), list(buffer.get(size, rng)), list(buffer.get(None, rng))):
            numbers = [x for batch in batches for x in batch.old_values.int().tolist()]
            assert (numbers if rng is IN_ORDER else sorted(numbers)) == (
                played if rng is IN_ORDER else sorted(played)  # in order, they are time-major
            )
            for batch in batches:
                number = batch.old_values
                entries = batch.observations if isinstance(batch.observations, dict) else {"a": batch.observations}
                for entry in entries.values():
                    close(entry.ravel(), number)
                close(batch.actions, number[:, None].expand_as(batch.actions))
                fields = batch.old_log_prob, batch.advantages, batch.returns
                close(torch.stack(fields) - number, np.array([[0.25], [0.5], [0.75]]) * np.ones(len(number)))
                assert batch.action_masks.dtype == torch.bool
                close(batch.action_masks, mask_of(number.int().numpy()[:, None], sizes) > 0)
        parts = [len(batch.actions) for batch in buffer.minibatches(size, rng)]
        assert len(parts) == min(size, len(played)) and (not parts or max(parts) - min(parts) <= 1)
        assert all(len(batch.actions) == size for batch in list(buffer.get(size, rng))[:-1])
    assert buffer.action_masks[reset_rows].all()


def test_order_is_random_and_repeatable(script):
    """Fails if batches are not shuffled, in the same order twice, or in another order for the same generator."""
    buffer = counted(script, "MaskableRolloutBuffer", np.zeros((20, 2), bool), SPACES["Discrete"])
    for batches in (lambda rng: buffer.get(7, rng), lambda rng: buffer.minibatches(3, rng or np.random.default_rng())):
        rngs = np.random.default_rng(1), np.random.default_rng(1), None, None
        orders = [torch.cat([b.old_values for b in batches(rng)]).tolist() for rng in rngs]
        assert orders[0] == orders[1] != orders[2] != orders[3] != sorted(orders[0])


def test_without_masks_all_is_valid(script):
    """Fails if action_masks=None keeps what the rollout before had stored; if a NaN, or nothing valid, gets stored."""
    buffer = counted(script, "MaskableRolloutBuffer", np.zeros((1, 2), bool), SPACES["Discrete"])
    add = lambda masks: buffer.add(0, np.zeros((2, 1)), np.zeros((2, 1)), np.zeros(2), False, False, False, masks)
    assert not buffer.action_masks.all()
    add(None)
    assert buffer.action_masks.all()
    for bad in ([0, 0, 0, 0], [1, 1, 1, math.nan]):
        with pytest.raises(ValueError, match="row 1"):
            add(np.array([[1, 1, 1, 1], bad]))


def test_names_of_the_fields(script):
    """Fails if a field of the samples is renamed or moved."""
    names = "observations", "actions", "old_values", "old_log_prob", "advantages", "returns", "action_masks"
    for name in BUFFERS:
        samples = getattr(script, f"{name}Samples")
        assert samples._fields == names and getattr(script, name).samples is samples


def test_large_action_sets_stay_small(script):
    """50,000 actions x 16 environments x 128 steps are 102 MB of booleans; with all of filling and reading them, under
    150 MB in NumPy. Fails if masks are stored wider than a byte, or if a float copy (410 MB) of them is ever made.
    """
    actions, N, T = 50_000, 16, 128
    tracemalloc.start()
    buffer = script.MaskableRolloutBuffer(T, N, NUMBER, spaces.Discrete(actions))
    assert buffer.action_masks.nbytes <= actions * N * T
    no, masks = np.zeros(N, bool), np.zeros((N, actions), bool)
    masks[:, ::7] = True
    for t in range(T):
        buffer.add(t, np.zeros((N, 1)), np.zeros((N, 1)), np.zeros(N), no, no, no, masks)
    zeros = torch.zeros(T, N)
    buffer.compute_advantages(zeros, torch.zeros(T + 1, N), zeros, script.Args())
    for batch in buffer.get(256):
        assert batch.action_masks.dtype == torch.bool and len(batch.action_masks) == 256
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150e6


def test_large_action_sets_are_evaluated_in_parts(script):
    """Fails if the logits of a whole rollout, 4 bytes per choice, are asked for at once; or if parts are mixed up."""
    buffer = script.MaskableRolloutBuffer(64, 4, NUMBER, spaces.Discrete(50_000))
    buffer.obs[:, :, 0] = np.arange(65 * 4).reshape(65, 4)
    sizes = []

    class Agent:
        device = "cpu"

        def __call__(self, obs, actions, masks):
            sizes.append(len(actions))
            assert masks.dtype == torch.bool and masks.shape == (len(obs), 50_000)
            return obs[:, 0], None, -obs[:, 0]

        def value(self, obs):
            return -obs[:, 0]

    log_probs, values = buffer.log_probs_and_values(Agent())
    close(log_probs, buffer.obs[:-1, :, 0])
    close(values, -buffer.obs[:, :, 0])
    assert max(sizes) * 50_000 * 4 < 20e6 and sum(sizes) == 64 * 4


# --------------------------------------------------------------------------------------------------------------- agent


def play(script, rollouts=1, no_mask=False, **kwargs):
    """(agent, buffer) after whole rollouts in Cues, played as `train` does; the environment checks every action."""
    args = script.Args(env_id="masked_envs:Cue-v0", env_kwargs=json.dumps(kwargs), num_steps=16, no_mask=no_mask)
    envs = script.make_envs(args, 3)
    agent = script.make_agent(args, envs)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    args.num_envs = 3
    buffer, rng = script.make_masked_buffer(args, agent), np.random.default_rng(0)
    obs_and_masks, _ = envs.reset(seed=1)
    resets = np.zeros(3, bool)
    for step in range(rollouts * 16):
        obs, masks = agent.split(obs_and_masks)
        actions = agent.sample(obs, masks, rng)
        obs_and_masks, rewards, terminated, truncated, _ = envs.step(agent.to_env(actions))
        buffer.add(step % 16, obs, actions, rewards, terminated, truncated, resets, masks)
        resets = terminated | truncated
    buffer.set_obs(16, agent.split(obs_and_masks)[0])
    return agent, buffer


KINDS = [
    (kind, observation) for kind in ("discrete", "multidiscrete", "multibinary") for observation in ("vector", "dict")
]
every_kind = pytest.mark.parametrize("kind, observation", [*KINDS, ("discrete", "number")])


@pytest.mark.parametrize("source", ["info", "method", "entry"])
@every_kind
@pytest.mark.parametrize("final", ["zeros", "nan", None])
def test_masks_from_every_source(script, source, kind, observation, final):
    """Fails if an invalid action reaches an environment, if masks belong to other observations than those they come
    with, if a final observation's empty, foul or missing mask is taken for an error, or if the mask is fed to the
    network.
    """
    kwargs = {"source": source, "kind": kind, "observation": observation, "final": final}
    envs = script.make_envs(script.Args(env_id="masked_envs:Cue-v0", env_kwargs=json.dumps(kwargs)), 1)
    assert {"info": "info[", "method": "action_masks()", "entry": "Dict observation"}[source] in envs.source
    agent, buffer = play(script, 3, **kwargs)
    assert "action_mask" not in agent.entries
    first = buffer.obs[:-1].reshape(16, 3, -1)[:, :, 0]
    coins = (first - 3) // 2 if observation == "number" else first
    expected = np.array(masked_envs.MASKS[kind], bool)[coins.astype(int)]
    played = ~buffer.reset_rows
    assert (buffer.action_masks[played] == expected[played]).all()
    assert 0 < (~played).sum() < played.sum() and buffer.action_masks[~played].all()


def test_masks_of_a_native_vector_environment(script):
    """Fails if a vector environment's own action_masks() is not found, or if its rows go to the wrong slots."""
    envs = script.make_envs(script.Args(env_id="masked_envs:NativeCue-v0"), 3)
    assert isinstance(envs.unwrapped, masked_envs.NativeCues) and envs.source == "a method action_masks()"
    obs_and_masks, _ = envs.reset(seed=1)
    ended = np.zeros(3, bool)
    for _ in range(20):
        obs, masks = obs_and_masks[:, :2].astype(int), obs_and_masks[:, 2:]
        expected = np.array(masked_envs.MASKS["discrete"])[obs[:, 0]]
        assert np.array_equal(masks[~ended], expected[~ended]) and masks[ended].all()
        actions = masks.argmax(1) - 1
        actions[ended] = 0
        obs_and_masks, _, terminated, truncated, _ = envs.step(actions)
        ended = terminated | truncated


def test_no_mask_ignores_masks(script):
    """Fails if --no-mask still looks at a mask, or feeds the entry of that name to the network."""
    for source in ("info", "method", "entry", "nothing"):
        agent, buffer = play(script, 4, no_mask=True, source=source, lenient=True)
        assert "action_mask" not in agent.entries
        assert buffer.action_masks.all() and set(buffer.actions.ravel()) == {0, 1, 2, 3}


@every_kind
def test_first_ratios_are_one(script, kind, observation):
    """Fails if acting and learning see different masks, observations or weights: on the first minibatch pi = pi_old."""
    agent, buffer = play(script, 2, kind=kind, observation=observation)
    old_log_probs, values = buffer.log_probs_and_values(agent)
    assert (old_log_probs <= 0).all() and (old_log_probs > -100).all()  # no action was invalid
    buffer.compute_advantages(old_log_probs, values, old_log_probs, script.Args())
    for batch in buffer.minibatches(3, np.random.default_rng(0)):
        log_probs, _, values = agent(batch.observations, batch.actions, batch.action_masks)
        close(log_probs, batch.old_log_prob)
        close(values, batch.old_values)


@every_kind
def test_acting_in_numpy_equals_torch(script, kind, observation):
    """Fails if acting in NumPy and the network that learns disagree."""
    agent, buffer = play(script, kind=kind, observation=observation)
    obs = buffer.observations(torch.as_tensor(buffer.obs[3]))
    arrays = {name: entry.numpy() for name, entry in obs.items()} if isinstance(obs, dict) else obs.numpy()
    close(agent.policy_output(arrays), agent.actor(agent.parts(obs)))


def test_networks_see_discrete_numbers_as_one_hot_vectors(script):
    """Fails if a lookup, of one number or several, from another start, is not the linear layer that it stands for; if
    an entry is left out; or if the first layer does not keep the size of its input.
    """
    entries = {
        "number": spaces.Discrete(5, start=2),
        "numbers": spaces.MultiDiscrete([3, 4], start=[1, -2]),
        "vector": spaces.Box(-1, 1, (2, 2)),
        "bits": spaces.MultiBinary(3),
    }
    network = script.Network(entries, (8, 6), 3, 0.01)
    together = spaces.Dict(entries)
    for seed in range(10):
        together.seed(seed)
        sample = together.sample()
        total = 0
        for encoder, name in zip(network.encoders, entries):
            one_hot = torch.as_tensor(spaces.flatten(entries[name], sample[name])).float()
            weight = encoder.columns if name.startswith("number") else encoder.linear.weight.T
            total = total + one_hot @ weight
        parts = [torch.as_tensor(np.asarray(sample[name]))[None] for name in entries]
        close(network(parts)[0], network.rest(total.tanh()))
    for encoder, name in zip(network.encoders, entries):
        w = encoder.columns if name.startswith("number") else encoder.linear.weight.T
        w = w.T if len(w) > 8 else w
        close(w @ w.T, np.eye(len(w)) / 2)  # a gain of sqrt 2, shared by four


# ---------------------------------------------------------------------------------------------------- whole trainings


class MaskedWalk(Walk):
    """A Walk in which all actions but one are valid; each place in it forbids another one."""

    def action_masks(self):
        return np.arange(4) != (self.name + self.episode + self.at) % 4


def walk(script, **args):
    """A Run in two environments that walk according to PLANS."""
    makers = [lambda i=i: MaskedWalk(PLANS[i], i, spaces.Discrete(4)) for i in range(2)]
    names = {"buffer": "MaskableRolloutBuffer", "loss": "masked_ppo_loss", "adapt": script.MaskedEnvs}
    return rehearse(script, *makers, watch=True, **names, **SHORT | args)


def slow_log_probs(agent, obs, actions, masks):
    """(log-probs, entropies) by torch's distribution over logits of -1e9 where a mask says so."""
    pi = torch.distributions.Categorical(logits=agent.actor([obs]).masked_fill(~masks, -1e9))
    return pi.log_prob(actions[..., 0]), pi.entropy()


@pytest.mark.parametrize("case", [{}, {"estimator": "vtrace", "normalize_reward": True}, {"naive_mask": True}])
def test_training(script, case):
    """Fails if two rollouts, of three epochs each, with ends and reset rows, move the weights elsewhere than torch's
    Adam does along the gradient of the textbook's loss, with advantages by the slow loops, or if a figure is off.
    """
    run = walk(script, **case)
    args, agent, figures = run.args, run.calls[0].agent, run.figures
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
    start = torch.cat([p.detach().flatten() for p in agent.parameters()])
    steps = 0
    assert np.array_equal(run.calls[0].buffer.obs[6], run.calls[6].buffer.obs[0])  # what the last step led to
    for i, call in enumerate(run.calls):
        rollout, k = divmod(i, args.update_epochs * args.num_minibatches)
        buffer = call.buffer
        obs, actions = torch.tensor(buffer.obs), torch.tensor(buffer.actions)
        played = ~buffer.reset_rows
        walked = obs[:-1].sum(2).int().numpy()  # name + episode + step
        masks = torch.tensor((np.arange(4) != walked[..., None] % 4) | ~played[..., None])
        if k == 0:
            optimizer.param_groups[0]["lr"] = 1e-2 * (1 - steps / 15)
            steps += played.sum()
            place = {tuple(obs[t, n].tolist()): (t, n) for t, n in np.argwhere(played)}
            if args.normalize_reward:
                rewards = torch.tensor(buffer.rewards)  # how they are scaled is tested in test_ppo.py
            else:
                rewards = (10 * obs[:-1, :, 1] + obs[:-1, :, 2] + 1) * torch.tensor(played)
        if k == 0 or (args.estimator == "vtrace" and k % args.num_minibatches == 0):
            with torch.no_grad():
                log_probs, _ = slow_log_probs(agent, obs[:-1].flatten(0, 1), actions.flatten(0, 1), masks.flatten(0, 1))
                values = agent.critic([obs.flatten(0, 1)]).view(7, 2)
            log_probs = log_probs.view(6, 2)
            mu_log_probs = log_probs if k == 0 else mu_log_probs  # noqa: F821
            ends = torch.tensor(buffer.terminated), torch.tensor(buffer.truncated)
            rollout_of = rewards, values[:-1], values[1:], *ends, log_probs - mu_log_probs
            if args.estimator == "vtrace":
                estimates = for_each_env(slow_vtrace, rollout_of, args.gamma, args.rho_clip, args.c_clip)
            else:
                estimates = for_each_env(slow_gae, rollout_of, args.gamma, args.gae_lambda)
            advantages, returns = (x.float() for x in estimates)
        observed = [tuple(o) for o in call.batch.observations.tolist()]
        assert set(observed) <= set(place), "a reset row is learnt"
        rows = tuple(np.transpose([place[o] for o in observed]))
        seen = torch.ones_like(masks) if args.naive_mask else masks
        log_prob, entropy = slow_log_probs(agent, obs[:-1][rows], actions[rows], seen[rows])
        ratios = (log_prob - log_probs[rows]).exp()
        a = advantages[rows]
        a = (a - a.mean()) / (a.std(correction=0) + 1e-8)
        pg_loss = -torch.min(ratios * a, ratios.clamp(1 - args.clip_coef, 1 + args.clip_coef) * a).mean()
        v_loss = 0.5 * ((agent.critic([obs[:-1][rows]])[:, 0] - returns[rows]) ** 2).mean()
        loss = pg_loss - args.ent_coef * entropy.mean() + args.vf_coef * v_loss
        for name, figure in {"loss": loss, "value_loss": v_loss, "entropy": entropy.mean()}.items():
            close(figures[name][i], figure, atol=1e-3)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in agent.parameters()])
    assert len(run.calls) == 12 and run.step == steps and set(run.figures) == set(script.FIGURES)
    close(torch.cat([p.detach().flatten() for p in run.agent.parameters()]), flat, atol=2e-4)
    assert (flat - start).abs().max() > 0.05  # the tolerance is far below what was learnt


@pytest.mark.parametrize("target_kl, gradient_steps", [(None, 12), (1e-12, 4), (1e9, 12)])
def test_target_kl(script, target_kl, gradient_steps):
    """Fails if the limit is not looked at after each epoch, or ends more than the update."""
    assert len(walk(script, target_kl=target_kl).calls) == gradient_steps


def test_masked_logits_learn_nothing(script):
    """Fails if a gradient step moves the logits of an action that was invalid in the whole batch."""
    agent, buffer = play(script, kind="discrete")
    buffer.action_masks[..., 1] = False
    buffer.action_masks[..., 2] = True
    buffer.actions[:] = 2
    log_probs, values = buffer.log_probs_and_values(agent)
    args = script.Args()
    buffer.compute_advantages(log_probs, values, log_probs, args)
    before = copy.deepcopy(agent.actor.rest[-1])
    optimizer = script.Adam(agent.parameters(), lr=1e-2)
    for batch in buffer.minibatches(2, np.random.default_rng(0)):
        loss, _ = script.masked_ppo_loss(agent, batch, args)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = agent.actor.rest[-1]
    moved = (after.weight != before.weight).any(1) | (after.bias != before.bias)
    assert not moved[1] and moved[2]
