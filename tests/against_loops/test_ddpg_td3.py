"""ddpg_td3.py against slow, obvious twins: updates, the replay buffer, and what training puts into it."""

import copy
from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.probes.envs import Walk
from tests.probes.td3_envs import ACT, collect, learn, new_agent, random_batch
from tests.tools import close


class Twin:
    """TD3 with networks of its own, torch.optim.Adam, a list of critics and deep copies: nothing shared."""

    def __init__(self, agent, args):
        self.args = args
        self.stats = agent.obs_stats
        self.actor = nn.Sequential(*self.relu_net(agent.actor), nn.Tanh())
        self.critics = [nn.Sequential(*self.relu_net(critic)) for critic in agent.critics]
        self.target_actor, self.target_critics = copy.deepcopy((self.actor, self.critics))
        self.parameters = [p for critic in self.critics for p in critic.parameters()]
        self.actor_adam = torch.optim.Adam(self.actor.parameters(), args.actor_learning_rate)
        self.critic_adam = torch.optim.Adam(self.parameters, args.critic_learning_rate)

    def relu_net(self, network):
        linears = [copy.deepcopy(module) for module in network.modules() if isinstance(module, nn.Linear)]
        return [part for linear in linears for part in (linear, nn.ReLU())][:-1]

    def normal(self, obs):
        if self.stats is None:
            return obs
        return ((obs - self.stats.mean) / (self.stats.var + 1e-8) ** 0.5).clip(-10, 10).float()

    def update(self, batch, number, anneal, noise):
        args = self.args
        obs, next_obs = self.normal(batch.obs), self.normal(batch.next_obs)
        self.actor_adam.param_groups[0]["lr"] = anneal * args.actor_learning_rate
        self.critic_adam.param_groups[0]["lr"] = anneal * args.critic_learning_rate
        with torch.no_grad():
            action = self.target_actor(next_obs)
            if args.target_noise > 0:
                action = torch.clamp(action + torch.clamp(noise, -args.noise_clip, args.noise_clip), -1, 1)
            x = torch.cat([next_obs, action], 1)
            future = torch.stack([critic(x).squeeze(1) for critic in self.target_critics]).min(0).values
            y = torch.where(batch.terminated, batch.rewards, batch.rewards + args.gamma * future)
        x = torch.cat([obs, batch.actions], 1)
        loss = sum(nn.functional.mse_loss(critic(x).squeeze(1), y) for critic in self.critics)
        self.critic_adam.zero_grad()
        loss.backward()
        if args.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, args.max_grad_norm)
        self.critic_adam.step()
        if number % args.policy_frequency == 0:
            loss = -self.critics[0](torch.cat([obs, self.actor(obs)], 1)).mean()
            self.actor_adam.zero_grad()
            loss.backward()
            if args.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(self.actor.parameters(), args.max_grad_norm)
            self.actor_adam.step()
            for target, source in zip([self.target_actor, *self.target_critics], [self.actor, *self.critics]):
                for slow, fast in zip(target.parameters(), source.parameters()):
                    slow.data = args.tau * fast.data + (1 - args.tau) * slow.data


def check_updates(script, seed=0, normalize_obs=False, **settings):
    """Six updates of `train` and of the twin, on the same batches and with the same noise."""
    rates = {"actor_learning_rate": 1e-2, "critic_learning_rate": 3e-3}
    settings = rates | {"gamma": 0.9, "tau": 0.1, "normalize_obs": normalize_obs, "hidden_sizes": (8,)} | settings
    agent = new_agent(script, seed=seed, **settings)
    rng = np.random.default_rng(seed)
    if normalize_obs:
        agent.obs_stats.update(rng.normal(0.5, 3, (20, 3)))
        agent.obs_stats.update = lambda rows: None  # what is observed in training is not what the batches hold
    twin = Twin(agent, script.Args(**settings))
    noises, smoothed = [], script.smoothed
    spied = lambda actions, noise, clip: noises.append(noise) or smoothed(actions, noise, clip)
    batches = [random_batch(script, rng) for _ in range(6)]
    with mock.patch.object(script, "smoothed", spied):
        learn(script, agent, batches, **settings)
    assert len(noises) == (6 if twin.args.target_noise > 0 else 0)
    for n, batch in enumerate(batches):
        anneal = 1 - (n + 1) / 7 if settings.get("anneal_lr") else 1
        twin.update(batch, n + 1, anneal, noises[n] if noises else None)
    for networks in ("actor", "critics", "target_actor", "target_critics"):
        ours, others = getattr(agent, networks), getattr(twin, networks)
        parameters = [p for net in (others if isinstance(others, list) else [others]) for p in net.parameters()]
        for p, q in zip(ours.parameters(), parameters, strict=True):
            close(p, q, 3e-5)


@settings(max_examples=10)
@given(
    st.integers(0, 10**6),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.integers(1, 3),
    st.sampled_from([None, 0.3]),
    st.sampled_from([(), (5,), None]),
    st.booleans(),
)
def test_six_updates_equal_those_of_the_twin(
    script, seed, normalize_obs, twin_q, target_noise, policy_frequency, max_grad_norm, critic_sizes, anneal_lr
):
    """Fails if the order of the updates, a network, an optimiser or a switch is not what the papers say."""
    options = {"twin_q": twin_q, "target_noise": target_noise, "policy_frequency": policy_frequency}
    options |= {"max_grad_norm": max_grad_norm, "critic_hidden_sizes": critic_sizes, "anneal_lr": anneal_lr}
    check_updates(script, seed, normalize_obs, **options)


def test_noise_on_the_targets_actions(script):
    """Fails if it has not the deviation that is given, or is the same for all rows, dimensions or updates."""
    agent, drawn = new_agent(script), []
    rng = np.random.default_rng(0)
    spied = lambda actions, noise, clip: drawn.append(noise.numpy()) or actions
    with mock.patch.object(script, "smoothed", spied):
        learn(script, agent, [random_batch(script, rng, size=2000) for _ in range(2)], target_noise=0.3)
    assert drawn[0].shape == (2000, 2) and abs(np.std(drawn) - 0.3) < 0.01
    assert np.abs(np.corrcoef(np.concatenate(drawn, 1).T) - np.eye(4)).max() < 0.1


def test_no_gradient_is_computed_that_is_thrown_away(script):
    """Counts every multiplication and addition of matrix products: fails if any is wasted (or missing).

    O numbers in an observation, D in an action, layers H wide, K critics, B rows. A row takes A = OH + HH + HD products
    in the actor, C = (O + D)H + HH + H in a critic. The critics: A + KC for the targets, KC forward, KC for the weights
    and K (HH + H) for the inputs, but not those of layer one. The actor: A + C forward, C backward through the inputs
    of one critic but not to its weights, A for the actor's weights, HH + HD for its inputs. (The gradient for the
    observations comes with that for the actions.) To act, a row takes A, but the first step is random.
    """
    obs, D, H, B, K = 3, 2, 16, 32, 2
    A, C = obs * H + H * H + H * D, (obs + D) * H + H * H + H
    critics, actor = A + 3 * K * C + K * (H * H + H), A + C + C + A + H * H + H * D
    agent = new_agent(script, hidden_sizes=(H, H))
    batches = [random_batch(script, np.random.default_rng(0), B) for _ in range(4)]
    with FlopCounterMode(display=False) as counter:
        learn(script, agent, batches, policy_frequency=2)
    assert counter.get_total_flops() == 2 * B * (4 * critics + 2 * actor) + 2 * A * 4


def test_bfloat16(script):
    """Fails if --bf16 changes nothing, spoils the numbers, or makes weights or targets half as precise."""
    batches = [random_batch(script, np.random.default_rng(n)) for n in range(3)]
    ends = []
    for bf16 in (False, True):
        agent = new_agent(script, bf16=bf16)
        learn(script, agent, list(batches), bf16=bf16, target_noise=0.0, critic_learning_rate=1e-3)
        ends.append(torch.cat([p.flatten() for p in agent.parameters()]).detach())
    assert ends[0].dtype == ends[1].dtype == torch.float32
    assert not torch.equal(*ends) and (ends[0] - ends[1]).abs().max() < 0.02


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(4, 9), st.integers(0, 10**6))
def test_replay_buffer_equals_a_list_that_forgets(script, num_envs, capacity, seed):
    """Fails if a reset row is stored, the oldest is not the one that goes, or fields get out of step."""
    rng, stored = np.random.default_rng(seed), []
    buffer = script.ReplayBuffer(capacity, spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (1,)))
    for _ in range(12):
        row = [rng.random((num_envs, 2)), rng.random((num_envs, 1)), rng.random(num_envs)]
        ended, reset_rows = rng.random((2, num_envs)) < 0.4
        next_obs = rng.random((num_envs, 2))
        slots = buffer.add(*row, ended, ~ended, reset_rows, next_obs)
        assert len(slots) == (~reset_rows).sum()
        stored += [[x[n] for x in (*row, next_obs, ended)] for n in range(num_envs) if not reset_rows[n]]
        stored = stored[-capacity:]
        assert buffer.size == len(stored)
        if stored:
            held = sorted(zip(*(getattr(buffer, name)[: buffer.size].tolist() for name in script.Transitions._fields)))
            assert held == sorted(tuple(np.float32(x).tolist() for x in entry) for entry in stored)
            batch = buffer.sample(len(stored), rng)
            assert all(row in held for row in zip(*(field.tolist() for field in batch)))
    with pytest.raises(ValueError, match="cannot sample"):
        buffer.sample(buffer.size + 1, rng)
    copied = script.ReplayBuffer(capacity, spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (1,)))
    copied.load_state_dict(buffer.state_dict())
    for name in (*script.Transitions._fields, "size", "position"):
        assert np.array_equal(getattr(copied, name), getattr(buffer, name))


PLAN = [(3, "truncated"), (2, "terminated"), (1, "both"), (4, "truncated")]


def test_what_is_stored(script):
    """Walk's rewards and observations say which step they belong to: (episode, step) -> 10 episode + step.

    Fails if a reset row is stored, a truncation counts as an end, or a field is that of another step.
    """
    makers = [lambda name=name: Walk(PLAN, name, ACT) for name in range(3)]
    agent_acts = []
    with mock.patch.object(script.ActorCritic, "to_env", lambda agent, a: agent_acts.append(a) or np.zeros((3, 2))):
        run = collect(script, *makers, num_envs=3, total_timesteps=90, learning_starts=20, train_frequency=999)
    buffer = run.parts["buffer"]
    size = buffer.size
    assert size == run.step == 90
    rows = {}
    for n in range(size):
        (name, episode, at), (name_2, episode_2, next_at) = buffer.obs[n], buffer.next_obs[n]
        length, end = PLAN[int(episode) % 4]
        assert (name_2, episode_2, next_at) == (name, episode, at + 1) and buffer.rewards[n] == 10 * episode + at + 1
        assert buffer.terminated[n] == (at + 1 == length and end in ("terminated", "both"))
        rows[name, episode, at] = buffer.actions[n]
    assert len(rows) == size
    # What is stored are actions in [-1, 1], before they are stretched. All environments reset in the same steps.
    walked = [(episode, at) for episode in range(12) for at in range(PLAN[episode % 4][0] + 1)]  # with reset rows
    for step, (episode, at) in enumerate(walked[: len(agent_acts)]):
        for name in range(3):
            if (name, episode, at) in rows:
                close(rows[name, episode, at], agent_acts[step][name])
    assert any(rows[0, 0, 0] < 0)


@pytest.mark.parametrize(
    "num_envs, train_frequency, gradient_steps", [(1, 1, 1), (3, 1, 1), (4, 2, 1), (3, 5, 2), (8, 3, 4)]
)
def test_updates_do_not_depend_on_the_number_of_environments(script, num_envs, train_frequency, gradient_steps):
    """Fails if N environments get one update per step of all instead of per step, or if reset rows count as steps."""
    options = {"num_envs": num_envs, "train_frequency": train_frequency, "gradient_steps": gradient_steps}
    run = collect(
        script, lambda: Walk(PLAN, action_space=ACT), **options, total_timesteps=160, hidden_sizes=(), batch_size=8
    )
    updates = gradient_steps * (run.step // train_frequency - 100 // train_frequency)
    assert len(run.figures["critic_loss"]) == updates == run.agent.updates
    assert run.figures["updates"] == [updates]  # the column of metrics.csv: the last number, not a mean


def explored(script, **settings):
    """The actions, in [-1, 1], of a run with an actor that always does 0, in an episode without end."""
    maker = lambda: Walk([(10**6, "truncated")], action_space=ACT)
    given = {"train_frequency": 10**6, "buffer_size": 5000, "batch_size": 8}
    with mock.patch.object(script.ActorCritic, "policy", lambda agent, obs: np.zeros((len(obs), 2))):
        run = collect(script, maker, **given | settings)
    return run.parts["buffer"].actions[: run.step]


def test_first_actions(script):
    """Uniform until learning_starts, then the actor's with noise, clipped to [-1, 1].

    Fails if the first actions do not fill [-1, 1] evenly, go on for a step too many, or if noise leads out of it.
    """
    drawn = explored(script, learning_starts=200, total_timesteps=206, exploration_noise=0.0)
    close(np.quantile(drawn[:200], [0, 0.25, 0.5, 0.75, 1]), [-1, -0.5, 0, 0.5, 1], 0.15)
    assert (drawn[:200] != 0).all() and (drawn[200:] == 0).all()
    drawn = explored(script, learning_starts=0, total_timesteps=50, exploration_noise=5.0)
    assert np.abs(drawn).max() == 1 and drawn.min() == -1


def test_gaussian_noise(script):
    """Fails if it is not white, has another deviation, or is the same for two environments or dimensions."""
    drawn = explored(script, learning_starts=0, total_timesteps=2400, exploration_noise=0.25, num_envs=2)
    apart = np.concatenate([drawn[::2], drawn[1::2]], 1)  # the two environments
    close(apart.std(0), [0.25] * 4, 0.02)
    assert np.abs(np.corrcoef(apart.T) - np.eye(4)).max() < 0.1
    assert abs(np.corrcoef(apart[:-1, 0], apart[1:, 0])[0, 1]) < 0.1


def test_ornstein_uhlenbeck_noise_settles(script):
    """Deviation sigma / sqrt(1 - (1 - theta)^2) = 0.1 / sqrt(1 - 0.75^2) = 0.1512, autocorrelation 1 - theta = 0.75.

    Fails if training does not carry the noise on from step to step.
    """
    options = {"noise": "ou", "ou_theta": 0.25, "exploration_noise": 0.1, "learning_starts": 0}
    drawn = explored(script, **options, total_timesteps=2500)
    assert abs(drawn.std() - 0.1512) < 0.01
    assert abs(np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1] - 0.75) < 0.03


@pytest.mark.parametrize("noise", ["ou", "gaussian"])
def test_what_belongs_to_episodes_begins_anew_with_them(script, noise):
    """Restarts after 25 and 50 steps; episodes of 9. Fails if noise, or the discounted return, goes on in the next
    episode or after a restart, or does not go on from step to step.
    """
    noises, returns, restarts = [], [], []
    next_noise, update = script.next_noise, script.ActorCritic.update_statistics
    write, new_envs = script.Run.write_what_is_due, script.Run.new_envs

    def watched_noise(before, reset_rows, *rest):
        noises.append((before.copy(), reset_rows.copy(), next_noise(before, reset_rows, *rest)))
        return noises[-1][2]

    def watched_update(agent, obs, rewards, before, *rest):
        returns.append((before.copy(), update(agent, obs, rewards, before, *rest)))
        return returns[-1][1]

    def write_and_restart(run):
        write(run)
        run.restarts = run.step in (25, 50)

    with (
        mock.patch.object(script, "next_noise", watched_noise),
        mock.patch.object(script.ActorCritic, "update_statistics", watched_update),
        mock.patch.object(script.Run, "write_what_is_due", write_and_restart),
        mock.patch.object(script.Run, "new_envs", lambda run: restarts.append(len(noises)) or new_envs(run)),
    ):
        maker = lambda: Walk([(9, "terminated")], action_space=ACT)
        collect(script, maker, noise=noise, learning_starts=10, total_timesteps=60)
    assert len(restarts) == 3
    for n, (noise_before, reset_rows, noise_now) in enumerate(noises):
        return_before, return_now = returns[n]
        if n in restarts:
            assert not noise_before.any() and not reset_rows.any() and not return_before.any()
        else:
            assert np.array_equal(noise_before, noises[n - 1][2]) and np.array_equal(return_before, returns[n - 1][1])
        assert noise_now.any() == return_now.any() == (not reset_rows.any())
    assert sum(reset_rows.any() for _, reset_rows, _ in noises) == 5


def test_acting_is_the_actor(script):
    """Fails if acting and the actor's forward pass differ, or if an action leaves its space."""
    agent = new_agent(script, normalize_obs=True)
    rng = np.random.default_rng(0)
    agent.obs_stats.update(rng.normal(3, 2, (50, 3)))
    obs = rng.normal(size=(50, 3)).astype(np.float32) * 100
    normal = (obs - agent.obs_stats.mean.numpy()) / np.sqrt(agent.obs_stats.var.numpy() + 1e-8)
    close(agent.policy(obs), agent.actor(torch.Tensor(normal.clip(-10, 10))), 1e-5)
    assert all(ACT.contains(action) for action in agent.act(obs))
    assert agent.act(obs.astype(np.float64)).tolist() == agent.act(obs).tolist()


def test_networks(script):
    """Fails if one critic is a copy of the other (trained on the same batches they would stay equal for ever), or if a
    target is no copy, or shares its memory with what it follows."""
    agent = new_agent(script)
    first, second = agent.critics
    assert all((p != q).all() for p, q in zip(first.parameters(), second.parameters()))
    assert len(new_agent(script, twin_q=False).critics) == 1
    for target, source in ((agent.target_actor, agent.actor), (agent.target_critics, agent.critics)):
        for slow, fast in zip(target.parameters(), source.parameters(), strict=True):
            assert torch.equal(slow, fast) and slow.data_ptr() != fast.data_ptr()
    sizes = {"hidden_sizes": (7, 5), "critic_hidden_sizes": ()}
    agent = new_agent(script, **sizes)
    assert [p.shape[0] for p in agent.actor.mlp.parameters()][::2] == [7, 5, 2]
    assert [tuple(p.shape) for p in agent.critics[0].mlp.parameters()] == [(1, 5), (1,)]


@pytest.mark.parametrize("shape", [(36, 40, 3), (2, 36, 40)])
def test_images_have_a_cnn_for_each_network(script, shape):
    """Fails if two networks share a CNN (the actor's gradient would move the critic), or one gets no gradient."""
    images = spaces.Box(0, 255, shape, np.uint8)
    agent = new_agent(script, images, hidden_sizes=(8,))
    pictures = torch.randint(0, 256, (2, 4, *shape), dtype=torch.uint8)
    ends = torch.zeros(4, dtype=torch.bool)
    batch = script.Transitions(pictures[0], torch.zeros(4, 2), torch.ones(4), pictures[1], ends)
    before = copy.deepcopy(agent)
    learn(script, agent, [batch], policy_frequency=2, buffer_size=10)
    moved = [not torch.equal(p, q) for p, q in zip(agent.actor.parameters(), before.actor.parameters())]
    assert not any(moved)
    for critic, old in zip(agent.critics, before.critics):
        moved = [not torch.equal(p, q) for p, q in zip(critic.parameters(), old.parameters())]
        assert all(moved)
    old = copy.deepcopy(agent.critics)
    with mock.patch.object(script, "critic_loss", lambda values, targets: 0 * values.sum()):
        agent.updates -= 1
        learn(script, agent, [batch], policy_frequency=1, buffer_size=10)
    assert all(not torch.equal(p, q) for p, q in zip(agent.actor.parameters(), before.actor.parameters()))
    assert all(torch.equal(p, q) for p, q in zip(agent.critics.parameters(), old.parameters()))
    assert agent.policy(pictures[0].numpy()).shape == (4, 2)
