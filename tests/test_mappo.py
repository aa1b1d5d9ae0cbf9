"""What mappo.py does, from numbers worked out by hand, a lesson to be read beside it, to whole runs.

Each test must also fail for each of the mistakes that stand above it in `catches`. What mappo.py shares with ppo.py is
the same text there (test_shared_code.py) and has its tests in test_ppo.py and test_run.py.
"""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from pettingzoo import ParallelEnv
from pettingzoo.utils import BaseParallelWrapper
from reference import mappo as reference
from run_folder import check_evaluation, check_refused, command, kill_and_resume
from tools import catches, close, fails, flat, rehearse, vector_env

import mappo

SPREAD, SPEAKER = "mpe2.simple_spread_v3", "mpe2.simple_speaker_listener_v4"
slow = pytest.mark.slow

# ------------------------------------------------------------------------------------------------- a lesson, by hand


def looks_back(script, rewards, values, ends, **given):
    """CriticSteps of one environment: a value for each row, or one for each of two agents; gamma = 0.5.

    `ends`: for each step a t where it terminated, a c where it was cut off, a b for both, an r for a reset row, or -.
    """
    values, ends = np.array(values, np.float32).reshape(len(rewards) + 1, 1, -1), np.array(list(ends))
    agents = values.shape[2]
    critic = mock.Mock(hidden_size=0, side_effect=lambda x, *_: (x, torch.zeros(len(x) + 1, agents, 0)))  # V(s) = s
    layout = SimpleNamespace(alive=None, available=[slice(agents, agents)])
    see = lambda rows: rows.flatten(1, 2).unsqueeze(2)
    team = SimpleNamespace(layout=layout, actors=[], followers=[], critic=critic, share_obs=see)
    team.device, team.values_per_env, team.value_norm, team.first_states = "cpu", agents, None, lambda N: []
    args = script.Args(num_steps=len(rewards), num_envs=1, gamma=0.5, **given)
    buffer = script.TeamBuffer(args, team)
    buffer.team_rows[:], buffer.reset_rows[:-1, 0] = values, ends == "r"
    for t, (reward, end) in enumerate(zip(rewards, ends)):
        outcome = [np.array([x]) for x in (reward, end in "tb", end in "cb")]
        buffer.insert_results(t, buffer.team_rows[t + 1], *outcome, infos=None)
    return buffer.critic_steps(team)


@catches(
    "TeamBuffer.critic_steps, truncation is termination: v[1:], terminated -> v[1:], terminated | truncated",
    "TeamBuffer.critic_steps, terminations ignored: v[1:], terminated -> v[1:], truncated & False",
    "TeamBuffer.critic_steps, truncations ignored: truncated, args.gamma -> truncated & False, args.gamma",
    "TeamBuffer.critic_steps, bootstraps from the wrong row: v[1:], -> torch.cat([v[1:-1], v[-2:-1]]),",
    "compute_gae, truncation wins over termination: * ~terminated - values -> * (~terminated | truncated) - values",
    "TeamBuffer.critic_steps, lambda forgotten: args.gae_lambda) -> 0.95)",
    "TeamBuffer.critic_steps, reset rows are played: ~reset_rows[:-1] -> ~reset_rows[:-1] | True",
)
def test_returns(script):
    """gamma = lambda = 0.5: traces decay by 0.25. Row 2 resets after a termination, row 5 after a truncation; they hold
    the values of the final states, 99, which must not matter, and 8.

    delta_0 = 1 + 0.5 * 1 - 0.5 = 1      A_0 = 1 + 0.25 * 1 = 1.25
    delta_1 = 2 - 1 = 1                  A_1 = 1                     (terminated: neither bootstrap nor trace)
    delta_3 = 3 + 0.5 * 2 - 1.5 = 2.5    A_3 = 2.5 + 0.25 * 6 = 4
    delta_4 = 4 + 0.5 * 8 - 2 = 6        A_4 = 6                     (truncated: bootstrap, but no trace)
    delta_6 = 5 + 0.5 * 3 - 2.5 = 4      A_6 = 4 + 0.25 * 5 = 5.25
    delta_7 = 6 + 0.5 * 4 - 3 = 5        A_7 = 5                     (the rollout ends, the episode does not)

    Without GAE: 6 + 0.5 * 4 = 8; 5 + 0.5 * 8 = 9; 4 + 0.5 * 8 = 8; 3 + 0.5 * 8 = 7; 2; 1 + 0.5 * 2 = 2.
    Where row 1 is cut off as well, nothing changes: terminated wins.
    """
    played = [0, 1, 3, 4, 6, 7]
    rollout = [1, 2, 0, 3, 4, 0, 5, 6], [0.5, 1, 99, 1.5, 2, 8, 2.5, 3, 4]
    for ends in ("-tr-cr--", "-br-cr--"):
        steps = looks_back(script, *rollout, ends, gae_lambda=0.5)
        close(steps.advantages[played, 0], [1.25, 1, 4, 6, 5.25, 5])
        close(steps.returns[played, 0], [1.75, 2, 5.5, 8, 7.75, 8])  # A + V
        assert steps.active[:, 0].nonzero().flatten().tolist() == played
    steps = looks_back(script, *rollout, "-tr-cr--", gae_lambda=1.0)
    close(steps.returns[played, 0], [2, 2, 7, 8, 9, 8])
    close(steps.advantages[played, 0], [1.5, 1, 5.5, 6, 6.5, 5])  # R - V


@catches("TeamBuffer.critic_steps, the dead do not learn: ~reset_rows[:-1] -> v[:-1] == 3")
def test_return_at_a_death(script):
    """FP, two agents; the first dies in step 0. The team gets 1, 2, 4, and the episode terminates. What an agent does
    in step 0 is worth R_0 = 1 + 0.5 * 2 + 0.25 * 4 = 3 to the team, whether or not it lives on; R_1 = 2 + 0.5 * 4 = 4,
    R_2 = 4. The critic knows that: it says 3, 4, 4 for who lives, and 3, V(0), V(0) for who died. No advantage is left
    if V(0) = 4. Were V(0) never trained, 0, the return at death would be 1 with lambda = 0. So dead rows are trained.
    """
    for gae_lambda, untrained in ((0.0, 1), (0.5, 1 + 0.5 * (0.5 * 2 + 0.25 * 2)), (1.0, 3)):
        knows = looks_back(script, [1, 2, 4], [(3, 3), (4, 4), (4, 4), (77, 77)], "--t", gae_lambda=gae_lambda)
        close(knows.returns, [[3, 3], [4, 4], [4, 4]])
        close(knows.advantages, np.zeros((3, 2)))
        assert knows.active.all()  # rows 1 and 2 of the first agent count: V(0) learns 4
        steps = looks_back(script, [1, 2, 4], [(3, 3), (0, 4), (0, 4), (0, 77)], "--t", gae_lambda=gae_lambda)
        close(steps.returns[0], [untrained, 3])  # 0.5: half of it is sampled, delta by delta


@catches(
    'TeamBuffer.insert_results, everybody gets the sum: = infos["rewards"] -> = rewards[:, None]',
    'TeamBuffer.insert_results, the termination of all: [t] = infos["terminated"] -> [t] = terminated[:, None]',
    "TeamBuffer.insert_results, a death is no end: (next_rows[:, self.alive] == 0) -> (next_rows[:, self.alive] > 9)",
    'TeamBuffer.insert_results, terminated and cut off: over & ~infos["terminated"] -> terminated[:, None]',
    "TeamBuffer.critic_steps, the dead learn: if args.agent_rewards: -> if False:",
    "Team.share_obs, the dead have no final state: if not self.args.agent_rewards: -> if True:",
)
def test_rewards_and_ends_of_each_agent(script):
    """FP with --agent-rewards: two agents with rewards of their own, gamma = lambda = 1/2, and V(o, s) = o.

    step  rewards  what happens              observations after it
    0     1, -1    the first is cut off      8, 4
    1     0, -2    the second terminates     0, 6
    2     0, 0     (resets)                  1, 1
    3     3, -3    the second terminates     2, 6
    4     4, 0     time is up                4, 0

    The first, where 8 is what it saw last; then the second:
        A_0 = 1 + 8/2 - 1 = 4,   A_3 = 3 + 2/2 - 1 + A_4/4 = 4,   A_4 = 4 + 4/2 - 2 = 4
        A_0 = -1 + 4/2 - 1 + A_1/4 = -1.5,   A_1 = -2 - 4 = -6,   A_3 = -3 - 1 = -4
    """
    layout = script.Layout(slice(0, 2), [slice(2, 3), slice(3, 4)], slice(2, 4), [slice(2, 4)] * 2, [slice(4, 4)] * 2)
    own = {"state_type": "FP", "agent_rewards": True, "value_norm": False, "hidden_sizes": ()}
    args = script.Args(num_steps=5, num_envs=1, gamma=0.5, gae_lambda=0.5, **own)
    team = script.Team(layout, [spaces.Discrete(2)] * 2, args)
    team.critic.mlp[0].weight.data[:] = torch.tensor([1.0, 0, 0])  # V sees o, s, s
    buffer = script.TeamBuffer(args, team)
    buffer.team_rows[:, 0] = [[1, 1, 1, 1], [0, 1, 8, 4], [0, 1, 0, 6], [1, 1, 1, 1], [1, 0, 2, 6], [1, 0, 4, 0]]
    buffer.reset_rows[2] = True
    rewards, died = [(1, -1), (0, -2), (0, 0), (3, -3), (4, 0)], [(0, 0), (0, 1), (0, 0), (0, 1), (0, 0)]
    for t, (over, cut) in enumerate([(0, 0), (1, 0), (0, 0), (0, 0), (0, 1)]):
        infos = {"rewards": np.array([rewards[t]]), "terminated": np.array([died[t]]) > 0}
        outcome = np.array([sum(rewards[t])]), np.array([over]) > 0, np.array([cut]) > 0
        buffer.insert_results(t, buffer.team_rows[t + 1], *outcome, infos)
    steps = buffer.critic_steps(team)
    assert steps.active.tolist() == [[True, True], [False, True], [False, False], [True, True], [True, False]]
    close(steps.returns[steps.active], [5, -0.5, -2, 5, -3, 6])  # A + V
    close(steps.advantages[steps.active], [4, -1.5, -6, 4, -4, 4])


class Shuffled:
    """A generator whose permutation is known."""

    def __init__(self, *order):
        self.order = order

    def permutation(self, size):
        assert sorted(self.order) == list(range(size))
        return np.array(self.order)


@catches(
    "minibatches, chunks across environments: x.swapaxes(0, 1).un -> x.reshape(2, 4, *x.shape[2:]).un",
    "minibatches, chunk-major batches: x[numbers].swapaxes(0, 1) -> x[numbers].reshape(length, -1, *x.shape[2:])",
    "minibatches, learns from nothing: if batch.active.any(): -> if True:",
    "minibatches, states after the first steps: batch.rnn_states[0] -> batch.rnn_states[-1]",
    "minibatches, not shuffled: rng.permutation(len(chunks[0])) -> np.arange(len(chunks[0]))",
    "chunk_length, no rollout whole: args.data_chunk_length or args.num_steps -> args.data_chunk_length or 1",
)
def test_minibatches(script):
    """4 steps in 2 streams: 0 1 2 3 and 10 11 12 13. Chunks of 2 steps, stream by stream: 0 1 | 2 3 | 10 11 | 12 13,
    shuffled to 2, 0, 3, 1, in two parts. A column is a chunk. Of the recurrent states a batch has those before a
    chunk's first step: 110 and 100 with the chunks 10 11 and 0 1.
    """
    cases = [  # length of chunks, parts, order, batches
        (2, 2, [2, 0, 3, 1], [[[10, 0], [11, 1]], [[12, 2], [13, 3]]]),
        (0, 1, [1, 0], [[[10, 0], [11, 1], [12, 2], [13, 3]]]),  # whole rollouts
        (0, 2, [1, 0], [[[10], [11], [12], [13]], [[0], [1], [2], [3]]]),
        (None, 3, [7, 0, 1, 6, 5, 4, 2, 3], [[[13, 0, 1]], [[12, 11, 10]], [[2, 3]]]),  # no GRU: single steps
    ]
    numbers = (10 * torch.arange(2) + torch.arange(4)[:, None]).float()  # 10 stream + step
    like = dict.fromkeys(script.PolicySteps._fields, numbers) | {"obs": numbers[..., None], "active": numbers >= 0}
    steps = script.PolicySteps(**like | {"rnn_states": 100 + numbers[..., None]})
    for length, parts, order, expected in cases:
        given = {"recurrent": length is not None, "data_chunk_length": length, "num_steps": 4}
        args = script.Args(num_minibatches=parts, **given)
        for batch, rows in zip(script.minibatches(steps, args, Shuffled(*order)), expected, strict=True):
            for field in (batch.obs[..., 0], batch.actions, batch.log_probs, batch.advantages):
                close(field, rows)
            close(batch.rnn_states[..., 0], 100 + np.array(rows[0]))
    idle = steps._replace(active=steps.obs[..., 0] == 3)  # all others are dead: no gradient step of momentum alone
    batches = script.minibatches(idle, script.Args(num_minibatches=8), Shuffled(*range(8)))
    assert [batch.obs.item() for batch in batches] == [3]


def small_team(script, **given):
    """A Team of two agents that observe 1 and 2 numbers; its rows are alive, alive | o | o o | state, state."""
    state = slice(5, 7)
    layout = script.Layout(slice(0, 2), [slice(2, 3), slice(3, 5)], state, [state] * 2, [slice(7, 7)] * 2)
    spaces_of = [spaces.Discrete(9)] * 2
    return script.Team(layout, spaces_of, script.Args(share_policy=False, hidden_sizes=(4,), **given))


@catches(
    "Team.share_obs, the dead are seen: if not self.args.agent_rewards: -> if False:",
    "Team.share_obs, one death is all agents': self.layout.alive.start + i -> self.layout.alive.start + 1",
    "Team.share_obs, agents before environments: .flatten(1, 2) -> .swapaxes(1, 2).flatten(1, 2)",
)
def test_what_the_critic_sees(script):
    """Two environments, whose states are (7, 8) and (9, 10). Agent 0 sees 1 and 2, agent 1 (3, 4) and (5, 6); in the
    second environment agent 1 is dead. With FP: own observation, filled up with zeros, then the state.
    """
    rows = torch.tensor([[[1.0, 1, 1, 3, 4, 7, 8], [1, 0, 2, 5, 6, 9, 10]]])
    close(small_team(script).share_obs(rows)[0], [[7, 8], [9, 10]])
    states = np.array([[1, 0, 7, 8], [3, 4, 7, 8], [2, 0, 9, 10], [0, 0, 0, 0]])
    team = small_team(script, state_type="FP")
    close(team.share_obs(rows)[0], states)
    team.layout = team.layout._replace(states=[slice(5, 6), slice(6, 7)])  # each agent has its own
    close(team.share_obs(rows)[0], states[:, [0, 1, 2]] + [[0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]])


@catches(
    "ValueNorm.mean_and_std, not debiased: max(self.weight.item(), 1e-5) -> 1.0",
    "ValueNorm.mean_and_std, no floor: max(variance, 1e-2) -> variance",
    "ValueNorm.update, forgetful: lerp_(returns.mean(), 1 - self.beta) -> copy_(returns.mean() * self.weight)",
    "ValueNorm.update, square of the mean for mean of squares: returns.square().mean() -> returns.mean().square()",
)
def test_value_norm(script):
    """beta = 0.9. At first mean 0 and variance 0.01 (its floor). After [1, 3]: mean 2, E[R²] = 5, variance 1.

    Then [5, 5]: E[R] <- 0.9 * 0.1 * 2 + 0.1 * 5 = 0.68, weight 0.9 * 0.1 + 0.1 = 0.19: mean 68/19 = 3.578947;
    E[R²] <- 0.9 * 0.1 * 5 + 0.1 * 25 = 2.95: 295/19 - (68/19)² = 2.717452.
    """
    norm = script.ValueNorm(0.9)
    assert norm.mean_and_std() == (0, 0.1)
    norm.update(torch.tensor([[1.0], [3.0]]))
    close(norm.mean_and_std(), [2, 1])
    close(norm.normalize(torch.tensor([3.0])), [1])
    close(norm.denormalize(torch.tensor([1.0])), [3])
    norm.update(torch.tensor([[5.0], [5.0]]))
    norm.update(torch.tensor([]))
    close(norm.mean_and_std(), [3.5789473684210527, 2.717451523545707**0.5])
    norm = script.ValueNorm(0.9)
    norm.update(torch.tensor([5.0, 5.0]))
    close(norm.mean_and_std(), [5, 0.1])


@catches(
    "huber_value_loss, value clip ignored: clip_coef is not None -> clip_coef == 77",
    "huber_value_loss, min for max: torch.max -> torch.min",
    "huber_value_loss, squares: delta=huber_delta -> delta=1e9 * huber_delta",
)
def test_value_loss(script):
    """Errors 1 and -3, delta 2: 1/2 and 2 (3 - 1) = 4, mean 2.25.

    Clipped: old 1, new 2, return 3, clip 0.2: the larger of (3 - 2)²/2 and (3 - 1.2)²/2 = 1.62, delta being 10.
    """
    column = lambda *numbers: torch.tensor(numbers, dtype=torch.float32)
    close(script.huber_value_loss(column(1, 0), column(0, 0), column(0, 3), 2.0), 2.25)
    close(script.huber_value_loss(column(2), column(1), column(3), 10.0, 0.2), 1.62)
    close(script.huber_value_loss(column(2), column(1), column(3), 10.0), 0.5)


@catches(
    "team_policy_loss, all weigh: batch.log_probs)[batch.active] -> batch.log_probs)[:, 1:][0]",
    "team_policy_loss, entropy of all: entropies[batch.active] -> entropies",
    "team_policy_loss, entropy lowered: - args.ent_coef -> + args.ent_coef",
    "team_value_loss, clipped or not: if args.clip_vloss -> if not args.clip_vloss",
    "explained_variance, over all rows: errors = steps.advantages[steps.active] -> errors = steps.advantages",
)
def test_only_active_rows_count(script):
    """eps = 0.2; the last row is not active: its ratio is infinite. Ratios 1.5, 0.5, 1.5, 0.5, A = 2, 2, -2, -2:

    min(3, 2.4) = 2.4; min(1, 1.6) = 1; min(-3, -2.4) = -3; min(-1, -1.6) = -1.6; the mean is -0.3, the loss 0.3,
    less 0.1 times the mean entropy of 1, 2, 3, 4. Values of 1 where 0 was before and the return is 3: 2²/2; clipped to
    0.5, 2.5²/2. Returns 0, 4 less values are 1, 3: 1 - 1/4 of their variance was foreseen.
    """
    active = torch.tensor([[True, True, True, True, False]])
    log_ratios, entropies = torch.tensor([[1.5, 0.5, 1.5, 0.5, np.inf]]).log(), torch.tensor([[1.0, 2, 3, 4, 99]])
    advantages = torch.tensor([[2.0, 2, -2, -2, 9]])
    fields = dict.fromkeys(script.PolicySteps._fields) | {"reset_rows": ~active, "log_probs": 0 * entropies}
    batch = script.PolicySteps(**fields | {"active": active, "advantages": advantages})
    policy = lambda *_: (log_ratios, entropies, None)
    loss, metrics = script.team_policy_loss(policy, batch, script.Args(ent_coef=0.1))
    close(loss, 0.3 - 0.1 * 2.5)
    kl = ((0.5 - np.log(1.5)) + (-0.5 - np.log(0.5))) / 2
    close([metrics[name] for name in ("entropy", "clip_fraction", "approx_kl")], [2.5, 1, kl])
    threes, critic = torch.full((1, 5), 3.0), lambda *_: (torch.tensor([1.0, 1, 1, 1, 9]).view(1, 5, 1), None)
    batch = script.CriticSteps(None, None, ~active, 0 * threes, threes, None, active)
    for given, loss in (({"clip_vloss": False}, 2), ({"clip_vloss_coef": 0.5}, 2.5**2 / 2)):
        close(script.team_value_loss(critic, batch, script.Args(**given))[0], loss)
    returns, errors = torch.tensor([[0.0, 4, 0, 4, 50]]), torch.tensor([[1.0, 3, 1, 3, 90]])
    steps = script.CriticSteps(None, None, ~active, None, returns, errors, active)
    close(script.explained_variance(steps), 1 - 1 / 4)


@catches("happo_update, the last ratio alone: ratios * ratios_now -> ratios_now")
def test_happo_hands_on_the_product_of_ratios(script):
    """Updates move three policies by ratios of 2, 3 and 5. In the order 1, 2, 0 they learn from A, 3 A and 15 A."""
    learned, steps = [], script.PolicySteps(*[torch.ones(1, 1)] * 8)
    watched = lambda *given: learned.append(given[3].advantages.item())
    with mock.patch.multiple(script, update=watched, ratios_now=lambda actor, _: actor):
        team = SimpleNamespace(actors=[2.0, 3.0, 5.0])
        script.happo_update(team, None, [steps] * 3, None, Shuffled(1, 2, 0), None)
    assert learned == [1, 3, 15]


# -------------------------------------------------------------------------- against slow and obvious versions of it


@catches(
    "TeamNetwork.forward, a state survives the reset row: * ~reset_t[:, None] -> ",
    "TeamNetwork.forward, forgets before the final state: rnn_states[-1])) -> rnn_states[-1] * ~reset_t[:, None]))",
)
def test_recurrent_network(script):
    """All steps at once are one step after the other; the row that resets is seen with the episode in mind."""
    torch.manual_seed(0)
    network = script.TeamNetwork(3, (5, 6), 2, True, 1.0)
    x, state = torch.randn(4, 2, 3), torch.randn(2, 6)
    reset_rows = torch.tensor([[False, False], [True, False], [False, False], [False, True]])
    outputs, states = network(x, state, reset_rows)
    close(states[0], state)
    for t in range(4):
        state = network.gru(network.body(x[t]), state)
        close(outputs[t], network.head(state))
        state = torch.stack([torch.zeros(6) if reset else h for h, reset in zip(state, reset_rows[t])])
        close(states[t + 1], state)


@catches(
    "AgentPolicy.choose, no noise: outputs + noise -> outputs",
    "AgentPolicy.choose, normal noise: else rng.gumbel -> else rng.standard_normal",
    "AgentPolicy.logits_or_means, masks do not bind: == 0, -1e9 -> == 0, 0.0",
    "Team.act, draws: self.memory, no_resets) -> self.memory, no_resets, np.random.default_rng(0))",
)
def test_actions_are_drawn_with_their_probabilities(script):
    """Logits log 1, 2, 3, the second not available: 1/4, 0, 3/4 of 10,000 draws (3 sigma: 0.013), which is also what
    the policy says of them.
    """
    layout = script.Layout(slice(0, 1), [slice(0, 1)], slice(0, 1), [slice(0, 1)], [slice(1, 4)])
    team = script.Team(layout, [spaces.Discrete(3)], script.Args())
    (policy,) = team.actors
    rows = np.tile(np.float32([1, 1, 0, 1]), (10_000, 1))
    policy.network.mlp[-1].weight.data[:] = 0
    policy.network.mlp[-1].bias.data[:] = torch.tensor([1.0, 2, 3]).log()
    no = np.zeros(10_000, bool)
    (actions,), _ = team.sample(rows, team.first_states(10_000), no, np.random.default_rng(0))
    close(np.bincount(actions[:, 0], minlength=3) / 10_000, [0.25, 0, 0.75], atol=0.013)
    given = torch.ones(1, 2, 1), torch.zeros(2, 0), torch.zeros(1, 2, dtype=bool), torch.tensor(rows[None, :2, 1:])
    log_probs, entropies, _ = policy(*given, torch.tensor([[[0], [2]]]))
    close(log_probs.exp(), [[0.25, 0.75]])
    close(entropies, [[0.562335, 0.562335]])
    team.begin_episodes(5)
    assert team.act(rows[:5])[0].tolist() == [2] * 5
    with fails("act takes a batch of team rows; for one, it is act(row[None])"):
        team.act(rows[0])


@catches(
    "AgentPolicy.to_env, cut off: np.rint(actions) -> actions",
    "AgentPolicy.to_env, bounds forgotten: np.clip(actions, space.low, space.high) -> actions",
    'AgentPolicy.to_env, start forgotten: getattr(space, "start", 0) -> 0',
    "AgentPolicy.to_env, factors exchanged: self.output_sizes[0] * act -> self.output_sizes[1] * act",
    "AgentPolicy.choose, half the deviation: self.log_std.exp() * noise -> self.log_std.exp() * noise / 2",
    "AgentPolicy.to_env, not mapped: self.action_scale * actions + self.action_bias -> actions",
    "scale_and_bias, one bound is enough: (low > -1e30) & (high < 1e30) -> (low > -1e30) | (high < 1e30)",
)
def test_actions_as_the_environment_takes_them(script):
    """simple_reference has 5 moves and 10 messages in one number, move + 5 · message, so (2, 7) is 2 + 35 = 37. A Box
    from -3 to 5 takes 0.3 as 1 + 4 * 0.3 = 2.2, rounded if it holds integers; without two bounds a number stays.
    """
    policy = lambda space, factor=0: script.AgentPolicy(1, space, script.Args(action_factor=factor))
    speaks = policy(spaces.Discrete(50, start=3), 5)
    assert speaks.output_sizes == [5, 10] and speaks.to_env(np.array([[2, 7], [4, 9]])).tolist() == [40, 52]
    assert policy(spaces.Discrete(7), 5).output_sizes == [7] and policy(spaces.Discrete(5), 5).output_sizes == [5]
    several = policy(spaces.MultiDiscrete([2, 3], start=[1, 0])).to_env(np.array([[1, 2], [0, 0]]))
    assert several.tolist() == [[2, 2], [1, 0]]
    integers = policy(spaces.Box(-3, 5, (1, 2), np.int64)).to_env(np.array([[0.3, 9], [-0.4, -9]], np.float32))
    assert integers.tolist() == [[[2, 5]], [[-1, -3]]] and integers.dtype == np.int64
    huge = np.finfo(np.float32).max
    low, high = np.float32([-3, -huge, -huge, 0, 7]), np.float32([5, huge, 1, np.inf, 7])
    taken = policy(spaces.Box(low, high)).to_env(np.float32([[0.3, 1e9, 0.3, 0.3, 0.3]]))
    close(taken, [[2.2, 1e9, 0.3, 0.3, 7]])
    gaussian = policy(spaces.Box(-1, 1, (2,)))
    gaussian.log_std.data[:] = torch.tensor([1.0, 3.0]).log()
    assert gaussian.outputs == 2
    drawn = SimpleNamespace(standard_normal=lambda size: np.reshape([1.0, -1.0], size))
    for rng, action in ((drawn, [6, 3]), (None, [5, 6])):
        close(gaussian.choose(torch.tensor([[5.0, 6.0]]), rng), [action])


@catches(
    "Team.act, remembers nothing: all_actions, self.memory = -> all_actions, _ =",
    "Team.begin_episodes, remembers the last episode: self.memory = -> self.memory = getattr(self, 'memory', 0) or",
)
def test_recurrent_evaluation_remembers_and_forgets(script):
    """`act` in a row of observations is the networks' way through all of them at once."""
    torch.manual_seed(0)
    team, rows = small_team(script, recurrent=True), torch.randn(6, 3, 7)
    for actor in team.actors:
        actor.network.head.weight.data *= 100
    for _ in range(2):
        team.begin_episodes(3)
        played = np.array([team.act(row.numpy()) for row in rows])
        for agent, actor in enumerate(team.actors):
            obs, none = rows[..., team.layout.observations[agent]], torch.zeros(6, 3, dtype=bool)
            logits, _ = actor.network(obs, torch.zeros(3, 4), none)
            assert (played[:, agent] == logits.argmax(-1).numpy()).all()


class Game(ParallelEnv):
    """Two agents, "a" and "b"; a subclass says what they observe and what `play(actions)` leads to."""

    metadata, render_mode, actions = {}, None, 2
    start = lambda self: None
    info = lambda self, agent: {}
    shown = lambda self: self.agents
    observe = lambda self, agent: np.zeros(1, np.float32)
    observation_space = lambda self, agent: spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = lambda self, agent: spaces.Discrete(self.actions)

    def __init__(self, render_mode=None, **options):
        self.possible_agents = ["a", "b"]
        vars(self).update(options)

    def reset(self, seed=None, options=None):
        self.rng, self.agents, self.t = np.random.default_rng(seed), list(self.possible_agents), 0
        self.start()
        return self.all(self.observe), self.all(self.info)

    def step(self, actions):
        assert set(actions) == set(self.agents), "the dead must not act, the others must"
        self.t += 1
        own = [x if callable(x) else lambda agent, x=x: x for x in self.play(actions)]  # the same for all, or not
        obs, infos = {agent: self.observe(agent) for agent in self.shown()}, self.all(self.info)
        rewards, terminated, truncated = map(self.all, own)
        self.agents = [agent for agent in self.agents if not terminated[agent] and not truncated[agent]]
        return obs, rewards, terminated, truncated, infos

    def all(self, function):
        return {agent: function(agent) for agent in self.agents}


class Fray(Game):
    """Observations, masks, rewards, deaths and ends of all sorts, by chance; has a state of its own."""

    actions = 3
    size = lambda self, agent: 2 if agent == "a" or self.alike else 3
    observe = lambda self, agent: self.rng.normal(size=self.size(agent)).astype(np.float32)
    observation_space = lambda self, agent: spaces.Box(-np.inf, np.inf, (self.size(agent),), np.float32)
    info = lambda self, agent: {"action_mask": self.rng.integers(2, size=3)}
    state = lambda self: self.rng.normal(size=2)

    def play(self, actions):
        terminated, truncated = self.rng.random((2, 3)) < 0.1
        ends = lambda x: lambda agent: x["ab".index(agent)] or x[2]
        return lambda agent: float(self.rng.normal() + actions[agent]), ends(terminated), ends(truncated)


@catches("put, one number fills the part: np.reshape(numbers, row[part].shape) -> numbers")
@pytest.mark.parametrize("what", ["observe", "info", "state"])
def test_one_number_is_no_row(script, what):
    """NumPy spreads one number over a whole slice: an observation, mask or state too short would pass unseen."""
    team_env = script.TeamEnv(Fray(alike=True))
    team_env.reset(seed=1)
    one = {"observe": np.zeros(1, np.float32), "info": {"action_mask": np.ones(1)}, "state": np.zeros(1)}[what]
    setattr(team_env.env.unwrapped, what, lambda *agent: one)
    try:
        team_env.step([0, 0])
        error = None
    except ValueError as raised:
        error = raised
    assert "reshape" in str(error)


def stirred(team):
    """Policies that are not nearly uniform: what they do depends on what they see and remember."""
    for actor in team.actors:
        (actor.network.head if actor.network.recurrent else actor.network.mlp[-1]).weight.data *= 500
    return team


SETTINGS = {"num_envs": 2, "num_steps": 4, "num_minibatches": 2, "update_epochs": 2, "hidden_sizes": (4,)}
SETTINGS |= {"learning_rate": 0.02, "max_grad_norm": 0.3, "ent_coef": 0.1, "gamma": 0.8, "total_timesteps": 20}
SETTINGS |= {"clip_vloss_coef": 0.05, "huber_delta": 0.5}
VARIANTS = {
    "HAPPO, FP": {"happo": True, "share_policy": False, "state_type": "FP"},
    "shared, EP": {"gae_lambda": 1.0, "value_norm": False, "clip_vloss": False, "anneal_lr": False},
    "own rewards": {"state_type": "FP", "agent_rewards": True},
}


@cache
def weights_by_definition(name):
    """What the slow version gives, with the script as it is: `script` may have a mistake."""
    args = mappo.Args(**SETTINGS | VARIANTS[name])
    envs = vector_env([lambda: mappo.TeamEnv(Fray(alike=args.share_policy))], 2)
    return reference.train(args, envs, stirred(mappo.make_team(args, envs)))


@catches(
    "train, ends forgotten: reset_rows = terminated | truncated -> reset_rows = terminated",
    "TeamBuffer.critic_steps, not denormalised: if team.value_norm is None else -> if True else",
    "happo_update, M not handed on: ratios = ratios * ratios_now(team.actors[k], steps) -> pass",
    "train, the last observation is forgotten: buffer.team_rows[-1] = team_rows -> pass",
    "train, targets not normalised: team.value_norm.normalize(critic_steps.returns) -> critic_steps.returns",
    "update, gradients add up: optimizer.zero_grad() -> pass",
    "TeamBuffer.policy_steps, the dead are active: (alive == 1) & ~reset_rows -> ~reset_rows",
    "TeamBuffer.policy_steps, another's: of_agents[..., agents] -> of_agents.flip(2)[..., agents]",
)
def test_training_equals_its_definition(script):
    """Some rollouts of a game in which everything happens, from the first draw to the last gradient step."""
    for name, more in VARIANTS.items():
        make_env = lambda more=more: script.TeamEnv(Fray(alike=more.get("share_policy", True)))
        with mock.patch.object(script, "make_agent", lambda *given: stirred(script.make_team(*given))):
            team = rehearse(script, make_env, **SETTINGS | more).agent
        weights = torch.cat([flat(network) for network in [*team.actors, team.critic]])
        close(weights, weights_by_definition(name), atol=1e-4)


@slow
@catches(
    "TeamBuffer.insert_results, truncation terminates: = terminated[:, None] -> = (terminated | truncated)[:, None]",
    "TeamBuffer.critic_steps, of ten times the outputs: denormalize(outputs) -> denormalize(10 * outputs)",
    "TeamBuffer.critic_steps, another environment: on_device(self.rewards) -> on_device(self.rewards).roll(1, 1)",
    "TeamBuffer.critic_steps, values kept denormalised: values=outputs[:-1] -> values=v[:-1]",
    "TeamBuffer.critic_steps, last row not denormalised: v[1:], -> torch.cat([v[1:-1], outputs[-1:]]),",
    "happo_update, M forgotten: advantages=ratios * all -> advantages=all",
    "happo_update, always the same order: rng.permutation(len(team.actors)) -> range(len(team.actors))",
    "ratios_now, upside down: log_probs - steps.log_probs -> steps.log_probs - log_probs",
    "ratios_now, of the dead as well: .masked_fill(~steps.active, 0) -> ",
    "train, one learning rate: if args.anneal_lr else 1.0 -> if False else 1.0",
    "train, targets on the old scale: team.value_norm.update(critic -> team.value_norm.normalize(critic",
    "train, reset rows in the mean: critic_steps.returns[critic_steps.active] -> critic_steps.returns",
    "update, gradients not shortened: args.max_grad_norm -> 1e9",
    "update, one epoch: range(args.update_epochs) -> range(1)",
    "TeamBuffer.policy_steps, reset rows are active: (alive == 1) & ~reset_rows -> alive == 1",
    "TeamBuffer.policy_steps, the dead weigh: = normalize(normalized[active]) -> = normalize(normalized)[active]",
    "TeamBuffer.policy_steps, the first agent's for all: of_agents[..., agents] -> of_agents[..., [0 for _ in agents]]",
    "Team.__init__, the critic's gain: args.recurrent, gain=1.0 -> args.recurrent, gain=0.5",
    "Team.views, agents before environments: dim=2).flatten(1, 2), torch -> dim=1).flatten(1, 2), torch",
    "Team.to_env, actions of others: per_env[:, place] -> per_env[:, -1 - place]",
)
def test_training_equals_its_definition_in_all_parts(script):
    """More mistakes that the same must show."""
    test_training_equals_its_definition(script)


def watched(owner, name, look):
    """Call look(arguments, result) after each call of a function or method."""
    original = getattr(owner, name)

    def call(*given):
        result = original(*given)
        look(given, result)
        return result

    return mock.patch.object(owner, name, call)


@catches(
    "train, memory lost between rollouts: = buffer.rnn_states -> = team.first_states(args.num_envs)",
    "train, resets of the other environment: rnn_states, reset_rows, -> rnn_states, reset_rows[::-1].copy(),",
    "Team.sample, resets of no agent: reset_rows.repeat_interleave -> (reset_rows & False).repeat_interleave",
    "TeamBuffer.policy_steps, memory begins anew: self.rnn_states[k] = rnn_states[-1] -> pass",
    "TeamBuffer.policy_steps, states after the step: rnn_states=rnn_states[:-1] -> rnn_states=rnn_states[1:]",
    "TeamBuffer.critic_steps, memory begins anew: self.rnn_states_critic = rnn_states[-2] -> pass",
    "TeamBuffer.critic_steps, sees the last row twice: critic = rnn_states[-2] -> critic = rnn_states[-1]",
    "TeamBuffer.critic_steps, resets of another row: critic, reset_rows) -> critic, reset_rows.roll(1, 0))",
    "ratios_now, the last states for the first: steps.rnn_states[0] -> steps.rnn_states[-1]",
)
def test_recurrent_training(script):
    """Without learning, the states that learning starts from are those of one way through all rollouts at once, and of
    acting. Chunks then bring the same log-probs: no KL divergence, and ratios of 1.
    """
    acted, seen, settings = [], {"critic": [], 0: [], 1: []}, SETTINGS | VARIANTS["HAPPO, FP"] | {"learning_rate": 0.0}
    keep = lambda k, steps: seen[k].append((steps[0], steps.rnn_states, steps.reset_rows))  # what it sees comes first
    with (
        watched(script.Team, "sample", lambda given, _: acted.append(torch.stack(given[2]))),
        watched(script, "ratios_now", lambda _, ratios: close(ratios, np.ones((4, 2)))),
        watched(script.TeamBuffer, "critic_steps", lambda _, steps: keep("critic", steps)),
        watched(script.TeamBuffer, "policy_steps", lambda given, steps: keep(given[2], steps)),
    ):
        settings |= {"recurrent": True, "data_chunk_length": 2}
        run = rehearse(script, lambda: script.TeamEnv(Fray(alike=False)), **settings)
    close(run.all_logged["approx_kl"], np.zeros(len(run.all_logged["approx_kl"])))
    for k, network in zip(seen, [run.agent.critic, *(actor.network for actor in run.agent.actors)]):
        x, states, reset_rows = map(torch.cat, zip(*seen[k]))
        close(network(x, torch.zeros(len(states[0]), 4), reset_rows)[1][:-1], states)
        assert states.abs().min() == 0 and states[4::4].abs().max() > 0.1  # rows 4, 8, … begin a rollout
        close(torch.stack([x[k] for x in acted[: len(states)]]) if k != "critic" else states, states)


@catches("update, never in training: network.train() -> pass", "update, always in training: network.eval() -> pass")
def test_dropout_belongs_to_the_loss(script):
    """Networks are in training mode in the loss; who acts, and whose ratios count, is not."""
    modes = {"team_policy_loss": set(), "ratios_now": set(), "sample": set()}
    note = lambda name: lambda given, _: modes[name].update(part.training for part in given[0].modules())
    look = lambda owner, name: watched(owner, name, note(name))
    with look(script, "team_policy_loss"), look(script, "ratios_now"), look(script.Team, "sample"):
        rehearse(script, lambda: script.TeamEnv(Fray(alike=False)), **SETTINGS | VARIANTS["HAPPO, FP"])
    assert modes == {"team_policy_loss": {True}, "ratios_now": {False}, "sample": {False}}


def test_a_scheduler_of_ones_own(script):
    """Whoever replaces the scheduler replaces it: nothing else sets a learning rate, --no-anneal-lr or not."""
    halving = lambda optimizer, factor: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for anneal_lr in (True, False):
        with mock.patch.object(torch.optim.lr_scheduler, "LambdaLR", halving):
            run = small_run(
                script, lambda: script.TeamEnv(Matrix()), anneal_lr=anneal_lr, learning_rate=0.02, num_steps=2
            )
        close(run.all_logged["learning_rate"][:4], [0.02, 0.01, 0.005, 0.0025])


# ------------------------------------------------------------------------------------- teams as vector environments


def make(script, env_id=SPREAD, num_envs=1, **given):
    """A vector environment, and the layout of its rows; the id may be the name of a game in this file."""
    env_id = env_id if "." in env_id else f"test_mappo:{env_id}"
    envs = script.make_team_envs(script.Args(env_id=env_id, **given), num_envs)
    return envs, envs.metadata["layout"]


@catches(
    "TeamEnv.step, actions of others: zip(self.names, actions) -> zip(self.names, actions[::-1])",
    "TeamEnv.reset, the same episode always: int(self.np_random.integers(2**31)) -> 0",
)
def test_rows_are_what_pettingzoo_returns(script):
    """A row of simple_spread: 3 numbers for who is alive, 3 x 18 observations, which are the state."""
    from mpe2 import simple_spread_v3

    envs, layout = make(script, num_envs=2)
    assert layout.alive == slice(0, 3) and layout.observations == [slice(3, 21), slice(21, 39), slice(39, 57)]
    assert layout.state == slice(3, 57) and all(part == slice(57, 57) for part in layout.available)
    rows, _ = envs.reset(seed=5)
    env = simple_spread_v3.parallel_env()
    obs, _ = env.reset(seed=6)  # as the second of the two
    rng = np.random.default_rng(0)
    for t in range(25):
        close(rows[:, layout.alive], np.ones((2, 3)))
        close(rows[1, layout.state], np.concatenate(list(obs.values())))
        actions = rng.integers(5, size=(3, 2))
        rows, rewards, terminated, truncated, infos = envs.step(tuple(actions))
        obs, own, *_ = env.step(dict(zip(env.possible_agents, actions[:, 1])))
        close(infos["rewards"][1], list(own.values()))
        close(rewards[1], sum(own.values()))
        assert not terminated.any() and not infos["terminated"].any() and (truncated == (t == 24)).all()
    close(rows[:, layout.alive], np.ones((2, 3)))  # the final observation is there, though all agents are gone
    close(rows[1, layout.state], np.concatenate(list(obs.values())))
    first, rewards, _, truncated, infos = envs.step(tuple(actions))  # the reset row
    assert not rewards.any() and not truncated.any() and not infos["rewards"].any()
    later = [envs.step(tuple(actions))[0] for _ in range(26)][-1]
    assert (np.abs(later - first).max(1) > 0.1).all()  # another episode


class Scripted(Game):
    """Episode e ends as scripts[e % len] says: {agent: [step of its end, "t" or "c"]}: it terminates or is cut off.

    Agents observe 100 x agent + 10 x episode + step and get agent + 1 per step; state() is [episode, step].
    """

    episode, masks = -1, None
    shown = lambda self: self.possible_agents  # even the dead
    observe = lambda self, agent: np.full(1, 100 * "ab".index(agent) + 10 * self.episode + self.t, np.float32)
    info = lambda self, agent: {"action_mask": np.array(self.masks[agent], np.int8)} if self.masks else {}
    state = lambda self: np.array([self.episode, self.t], np.float32)

    def start(self):
        self.episode += 1

    def play(self, actions):
        ends = self.scripts[self.episode % len(self.scripts)]
        ended = lambda kind: lambda agent: ends[agent] == [self.t, kind]
        return lambda agent: np.array([1.0 + "ab".index(agent)]), ended("t"), ended("c")  # arrays, as some games do


@catches(
    "TeamEnv.step, ends with the first agent: over = not going_on -> over = len(going_on) < 2",
    "TeamEnv.step, any who terminated decides: all(terminated.get(name, True) -> any(terminated.get(name, True)",
    "TeamEnv.step, the last to act is dead: acting if over else going_on -> going_on",
    "TeamEnv.step, no final observation: for name in acting if name in obs} -> for name in going_on}",
    "TeamEnv.step, the dead are shown: for name in going_on} | final -> for name in going_on} | obs",
)
def test_the_dead_and_how_episodes_end(script):
    """Agent a terminates at step 1, b is truncated at step 3: the episode is truncated. In the second episode b is
    truncated at step 1 and a terminates at step 2: the last to act terminated, and so did the episode. What an agent
    sees last is shown, and nothing after it, even if the game goes on telling it.
    """
    plan = '{"scripts": [{"a": [1, "t"], "b": [3, "c"]}, {"a": [2, "t"], "b": [1, "c"]}]}'
    envs, layout = make(script, "Scripted", env_kwargs=plan)
    state = slice(4, 6)
    assert layout == script.Layout(slice(0, 2), [slice(2, 3), slice(3, 4)], state, [state] * 2, [slice(6, 6)] * 2)
    rows, _ = envs.reset(seed=0)  # the constructor has reset it once: this is the plan's second episode
    action = (np.zeros(1, np.int64),) * 2
    close(rows[0], [1, 1, 10, 110, 1, 0])
    expected = [
        # alive a and b, observations of a and b, state; reward, terminated, truncated; terminated of a and b
        ([1, 0, 11, 111, 1, 1], 3, False, False, [False, False]),
        ([1, 0, 12, 0, 1, 2], 1, True, False, [True, False]),  # the last row: who acted last has an observation
        ([1, 1, 20, 120, 2, 0], 0, False, False, [False, False]),
        ([0, 1, 21, 121, 2, 1], 3, False, False, [True, False]),
        ([0, 1, 0, 122, 2, 2], 2, False, False, [False, False]),
        ([0, 1, 0, 123, 2, 3], 2, False, True, [False, False]),
        ([1, 1, 30, 130, 3, 0], 0, False, False, [False, False]),
    ]
    for row, reward, terminated, truncated, own in expected:
        rows, rewards, *ends, infos = envs.step(action)
        close(rows[0], row)
        assert (rewards[0], ends[0][0], ends[1][0]) == (reward, terminated, truncated)
        assert infos["terminated"][0].tolist() == own
    envs, _ = make(script, "Scripted", env_kwargs='{"scripts": [{"a": [1, "t"], "b": [1, "c"]}]}')
    envs.reset(seed=0)
    _, _, terminated, truncated, _ = envs.step(action)
    assert not terminated and truncated  # not all who acted last terminated


class Silent(Scripted):
    """Who ends is gone, and nothing more is said of it."""

    def step(self, actions):
        obs, _, _, _, infos = super().step(actions)
        rewards, terminated, truncated = (dict.fromkeys(self.agents, x) for x in (1.0, False, False))
        return obs, rewards, terminated, truncated, infos


@catches(
    "TeamEnv.info, who left in silence goes on: terminated.get(name, name in acting) -> terminated.get(name)",
    "TeamEnv.info, the dead terminate: terminated.get(name, name in acting) -> terminated.get(name, True)",
    "TeamEnv.step, the team goes on: all(terminated.get(name, True) -> all(terminated.get(name)",
)
def test_who_leaves_without_a_flag_has_terminated(script):
    """Agent a leaves at step 1, b at step 3. The team and they themselves say the same: each terminated in its step."""
    envs, _ = make(script, "Silent", env_kwargs='{"scripts": [{"a": [1, "t"], "b": [3, "t"]}]}')
    envs.reset(seed=0)
    for own, team in (([True, False], False), ([False, False], False), ([False, True], True)):
        _, _, terminated, truncated, infos = envs.step((np.zeros(1, np.int64),) * 2)
        assert infos["terminated"][0].tolist() == own and (terminated[0], truncated[0]) == (team, False)


def tictactoe(render_mode=None):
    """A turn-based game with action masks, of which the waiting player's is empty."""
    from pettingzoo.classic import tictactoe_v3
    from pettingzoo.utils.conversions import turn_based_aec_to_parallel

    return turn_based_aec_to_parallel(tictactoe_v3.env(render_mode=render_mode))


@catches(
    "usable, no valid action: factor[0] = 1 -> pass",
    'TeamEnv.row, of the observation alone: info.get("action_mask") -> None',
    'TeamEnv.row, of info alone: mask = obs[name].get("action_mask", mask) -> pass',
)
def test_masks_come_from_info_or_from_the_observation(script):
    """Who has no valid action, such as who waits for its turn, has the first one, a no-op."""
    plan = '{"scripts": [{"a": [2, "c"], "b": [2, "c"]}], "masks": {"a": [0, 1], "b": [0, 0]}}'
    envs, layout = make(script, "Scripted", env_kwargs=plan)
    assert layout.available == [slice(6, 8), slice(8, 10)] and layout.state == slice(4, 6)
    close(envs.reset(seed=0)[0][0, 6:], [0, 1, 1, 0])
    envs, layout = make(script, "tictactoe")
    rows, _ = envs.reset(seed=0)
    for played, free in ((None, np.ones(9)), (4, np.arange(9) != 4)):
        player = int(played is not None)
        close(rows[0, layout.available[player]], free)
        close(rows[0, layout.available[1 - player]], np.arange(9) == 0)
        rows, *_ = envs.step((np.array([4]), np.array([0])))


class Buttons(Game):
    """One step; each agent presses one button of two and one of three; pays for those that the masks allow."""

    masks = (0, 1), (0, 0, 1)
    action_space = lambda self, agent: spaces.MultiDiscrete([2, 3])
    info = lambda self, agent: {"action_mask": self.masks} if self.t >= self.first else {}
    play = lambda self, actions: (lambda agent: float(actions[agent][0] + actions[agent][1]), True, False)


@catches("usable, one choice in all factors: np.cumsum(sizes)[:-1] -> []")
def test_masks_of_several_factors(script):
    """Of actions (2, 3) only (1, 2) is allowed: each agent gets 3, untrained. Where a factor has no choice, it is 0."""
    plain, masked = (small_run(script, lambda: script.TeamEnv(Buttons(first=first))) for first in (9, 0))
    assert set(masked.episodes["return"]) == {6.0} and len(set(plain.episodes["return"])) > 2
    close(script.usable((np.array([0, 0]), np.array([0, 1, 1])), [2, 3]), [1, 0, 0, 1, 1])
    with pytest.raises(script.UserError, match="a has an action_mask after a step, but no agent has one after reset"):
        small_run(script, lambda: script.TeamEnv(Buttons(first=1)))


def small_run(script, make_env, **settings):
    """A short training."""
    quick = {"num_envs": 2, "num_steps": 10, "hidden_sizes": (4,), "total_timesteps": 20, "update_epochs": 1}
    quick |= {"num_minibatches": 1}
    return rehearse(script, make_env, **quick | settings)


@catches(
    "TeamEnv.find_states, a table of states is one: if state.ndim == 2 and -> if False and",
    'TeamEnv.find_states, states in infos are not seen: if all("state" in -> if False and all("state" in',
    "TeamEnv.row, states of others: row, self.layout.states[i] -> row, self.layout.states[-1 - i]",
)
def test_states_of_each_agent(script):
    """Agents see 0 and 0; their states are (1, 2) and (3, 4), given by state() or in infos: FP shows (0, 1, 2) and
    (0, 3, 4), EP all four numbers.
    """
    states = {"a": [1, 2], "b": [3, 4]}
    for given in ({"state": lambda: np.array([[1, 2], [3, 4]])}, {"info": lambda agent: {"state": states[agent]}}):
        envs = vector_env([lambda given=given: script.TeamEnv(Matrix(**given))], 1)
        for state_type, seen in (("EP", [[1, 2, 3, 4]]), ("FP", [[0, 1, 2], [0, 3, 4]])):
            team = script.make_team(script.Args(state_type=state_type), envs)
            rows = torch.tensor(envs.reset(seed=0)[0])
            close(team.share_obs(rows[None])[0], seen)
            assert team.critic.mlp[0].in_features == len(seen[0])


@catches(
    "TeamEnv.find_states, bytes are an image: (state.dtype == np.uint8 and state.ndim == 3) -> state.dtype == np.uint8",
    "TeamEnv.find_states, an image is a state: (state.dtype == np.uint8 and state.ndim == 3) -> False",
)
def test_images_are_no_states(script):
    """A state of six bytes is one; an image is none, so that all observations, 0 and 0, take its place."""
    for shape, state in (((6,), [7] * 6), ((2, 3, 1), [0, 0])):
        env = script.TeamEnv(Matrix(state=lambda shape=shape: np.full(shape, 7, np.uint8)))
        row, _ = env.reset(seed=0)
        close(row[env.layout.state], state)


class Tenfold(BaseParallelWrapper):
    """A wrapper of a user's own: rewards are ten times as large."""

    def step(self, actions):
        obs, rewards, *rest = super().step(actions)
        return obs, {agent: 10 * reward for agent, reward in rewards.items()}, *rest


@catches(
    "TeamEnv.__init__, counted outside: self.counter = TeamReturn(env) -> self.counter = TeamReturn(wrappers[0](env))",
    "TeamReturn.reset, episodes add up: self.true_return = 0.0 -> self.true_return = getattr(self, 'true_return', 0.0)",
    "TeamEnv.step, the limit is of ten times the return: self.true_return >= -> 10 * self.true_return >=",
)
def test_returns_are_true_ones(script):
    """The team gets 3 a step, and learns from 30. Its return is 9 after 3 steps, where the limit is."""
    plan = '{"scripts": [{"a": [99, "t"], "b": [99, "t"]}]}'
    envs, _ = make(script, "Scripted", env_kwargs=plan, max_episode_return=9.0, wrappers=("test_mappo.Tenfold",))
    envs.reset(seed=0)
    for t in range(8):
        _, rewards, _, truncated, _ = envs.step((np.zeros(1, np.int64),) * 2)
        close(rewards, [0 if t in (3, 7) else 30])
        close(envs.get_attr("true_return"), [[3, 6, 9, 0, 3, 6, 9, 0][t]])
        assert truncated[0] == (t in (2, 6))


@catches(
    "make_team_envs, no limit of steps: if args.max_episode_steps is not None: -> if False:",
    "make_team_envs, no limit of returns: args.max_episode_return) -> None)",
)
def test_limits_truncate(script):
    """Each step pays 3 to the team: 9 after 3 steps."""
    plan = '{"scripts": [{"a": [99, "t"], "b": [99, "t"]}]}'
    for limit in ({"max_episode_steps": 3}, {"max_episode_return": 9.0}):
        envs, _ = make(script, "Scripted", env_kwargs=plan, **limit)
        envs.reset(seed=0)
        steps = [envs.step((np.zeros(1, np.int64),) * 2) for _ in range(8)]
        assert [bool(step[3]) for step in steps] == [False, False, True, False] * 2 and not any(s[2] for s in steps)


@slow
def test_processes_give_the_same_as_one(script):
    """--async-envs loses and mixes up nothing."""
    one, two = (script.make_envs(script.Args(async_envs=on, num_envs=2), 2) for on in (False, True))
    assert isinstance(two, gym.vector.AsyncVectorEnv) and one.metadata["layout"] == two.metadata["layout"]
    close(one.reset(seed=1)[0], two.reset(seed=1)[0])
    for _ in range(30):
        actions = (np.array([1, 2]), np.array([3, 4]), np.array([0, 1]))
        for a, b in zip(one.step(actions)[:4], two.step(actions)[:4]):
            close(a, b, atol=0)
    two.close()


# -------------------------------------------------------------------------------- games whose right answer is known


class Matrix(Game):
    """One step; the payoff depends on both actions. Best: (2, 0), worth 2 x 3; best against chance is (1, 1)."""

    actions, payoff = 3, [[0, 1, 0], [1, 2, 0], [3, 0, 0]]
    play = lambda self, actions: (float(self.payoff[actions["a"]][actions["b"]]), True, False)


class Recall(Game):
    """Three steps: the first row shows a sign to each, the last action must be that sign. Without a memory 2 x 1/4."""

    def start(self):
        self.sign = {agent: int(self.rng.integers(2)) for agent in self.possible_agents}

    observe = lambda self, agent: np.array([2 * self.sign[agent] - 1 if self.t == 0 else 0], np.float32)
    play = lambda self, actions: (float(self.t == 3 and actions == self.sign), self.t == 3, False)


class Rivals(Game):
    """One step; doing 1 takes 1 from the other: a gets x and b gets -x, where x = a's action - b's."""

    play = lambda self, actions: (lambda agent: 2.0 * actions[agent] - sum(actions.values()), True, False)


def test_opposite_aims(script):
    """The team always gets 0, and so nothing is to be learnt; what each gets by itself is best with 1."""
    quick = {"num_envs": 16, "num_steps": 10, "share_policy": False, "state_type": "FP", "learning_rate": 0.01}
    for agent_rewards in (True, False):
        more = {"agent_rewards": agent_rewards, "total_timesteps": 500, "ent_coef": 0.0}
        run = rehearse(script, lambda: script.TeamEnv(Rivals()), **quick | more)
        for actor in run.agent.actors:
            does_1 = actor.network.mlp(torch.zeros(1)).softmax(0)[1].item()
            assert does_1 > 0.9 if agent_rewards else 0.3 < does_1 < 0.7


HAPPO = {"happo": True, "share_policy": False}
GAMES = {  # game, settings, steps, best return
    "matrix, HAPPO": (Matrix, HAPPO, 2000, 6.0),
    "matrix, MAPPO": (Matrix, {"share_policy": False}, 2000, 6.0),
    "recall, recurrent": (Recall, {"recurrent": True, "data_chunk_length": 5}, 12_000, 2.0),
}


@slow
@pytest.mark.parametrize("name", GAMES)
def test_games_are_solved(script, name):
    """Fails if an end, a reward or another agent is taken for another anywhere between environment and policies."""
    game, more, steps, best = GAMES[name]
    given = {"num_envs": 16, "num_steps": 10, "update_epochs": 5, "learning_rate": 3e-3, "num_minibatches": 2}
    run = rehearse(script, lambda: script.TeamEnv(game()), total_timesteps=steps, eval_episodes=50, **given | more)
    assert run.evaluations["return_mean"][-1] >= best - 0.2


def test_games_of_pettingzoo(script):
    """No illegal move, which ends tic-tac-toe at a price of 1; rock, paper, scissors, whose `state` is no function."""
    for env_id, steps in (("tictactoe", 400), ("pettingzoo.classic.rps_v2", 80)):
        with mock.patch("tools.vector_env", lambda makers, n, env_id=env_id: make(script, env_id, n)[0]):
            run = rehearse(script, None, num_envs=4, num_steps=steps // 4, total_timesteps=steps)
        assert set(run.episodes["return"]) == {0.0} and run.num_episodes >= steps // 20


def test_one_environment_one_step(script):
    """A rollout that is nothing but a reset row is not learned from, nor counted."""
    settings = {"num_envs": 1, "num_steps": 1, "num_minibatches": 1, "total_timesteps": 5}
    run = rehearse(script, lambda: script.TeamEnv(Matrix()), **settings)
    assert run.step == 5 == run.num_episodes and flat(run.agent).isfinite().all()
    assert len(run.all_logged["value_loss"]) == len(run.all_logged["entropy"]) == 50


# ------------------------------------------------------------------------------------------------------- whole runs

RUN = "--num-envs 2 --num-steps 10 --hidden-sizes 8 --num-minibatches 1 --update-epochs 1 --data-chunk-length 5 "
RUN += "--recurrent --happo --no-share-policy --max-episode-steps 8 --total-timesteps 80 --checkpoint-every 25 "
RUN += "--eval-every 60 --eval-episodes 1"


@catches(
    "train, the optimiser is not saved: optimizer=optimizer, -> ",
    "train, the scheduler is not saved: , scheduler=scheduler -> ",
    "train, no new episodes then: if run.write_what_is_due(): -> if run.write_what_is_due() and False:",
)
def test_killed_resumed_evaluated(script, tmp_path, monkeypatch, capsys):
    """--evaluate plays the best weights, in other episodes than those that chose them, and changes nothing."""
    kill_and_resume(script, RUN, 11, monkeypatch, tmp_path)
    check_evaluation(script, capsys)


REFUSED = {
    "--env-id simple_spread_v3": "such as mpe2.simple_spread_v3",
    "--env-id mpe2.simple_spred_v3": "simple_spred_v3",
    "--env-id no_such_module:game": "no_such_module",
    "--env-id gymnasium:Env": "not a parallel environment",
    "--wrappers gymnasium.wrappers.FlattenObservation": "a wrapper must be one of parallel environments",
    "--agent-rewards": "add --state-type FP",
    f"--env-id {__name__}:Photo": "there is no network for images",
    "--env-id pettingzoo.classic.tictactoe_v3": "has no parallel_env",
    f"--env-id {SPEAKER} --share-policy": "--no-share-policy",
    "--happo": "--no-share-policy",
    "--happo --no-share-policy --state-type FP --agent-rewards": "without --agent-rewards",
    '--env-kwargs {"M":3}': "unexpected keyword",
    "--num-minibatches 999": "num_minibatches must be at most",
    "--recurrent --data-chunk-length 7": "does not divide num_steps",
    "--recurrent --data-chunk-length -5": "data_chunk_length must be at least 0",
    "--recurrent --hidden-sizes": "needs a layer",
    '--env-id mpe2.simple_reference_v3 --env-kwargs {"continuous_actions":true}': "action_factor = 5",
    f"--env-id {__name__}:tictactoe --action-factor 3": "action masks",
}


def test_refused(script, tmp_path, monkeypatch, capsys):
    check_refused(script, REFUSED, tmp_path, monkeypatch, capsys)


class Photo(Game):
    """Pictures in a Dict."""

    observation_space = lambda self, agent: spaces.Dict(eye=spaces.Box(0, 255, (36, 36, 3), np.uint8))


@pytest.mark.parametrize("field", ["observation", "reward"])
def test_numbers_too_large_for_float32(script, field):
    """A line names environment, step and field."""
    huge = (
        {"observe": lambda *_: np.full(1, 1e300)}
        if field == "observation"
        else {"play": lambda _: (1e300, True, False)}
    )
    with pytest.raises(script.UserError, match=f"none, after step .: {field} is NaN"), np.errstate(over="ignore"):
        small_run(script, lambda: script.TeamEnv(Matrix(**huge)))


class Raising(Game):
    """Raises where it is told to."""

    where = "wrapper"
    start = lambda self: {}["reset"] if self.where == "reset" else None
    play = lambda self, actions: {}["step"]

    def __init__(self, **options):
        super().__init__(**options)
        if self.where == "constructor":
            raise KeyError(self.where)


def raising(env):
    """A wrapper that raises."""
    raise KeyError("wrapper")


@pytest.mark.parametrize("where", ["constructor", "reset", "step", "wrapper", "module"])
def test_the_users_own_errors_keep_their_traceback(script, where, tmp_path, monkeypatch):
    """The file and the line of whoever raises are in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wrong_team.py").write_text("\n{}['module']")
    flags = f'--env-id {__name__}:Raising --env-kwargs {{"where":"{where}"}} --num-envs 8'
    if where == "wrapper":
        flags += f" --wrappers {__name__}.raising"
    if where == "module":
        flags = "--env-id wrong_team:Game"
    with pytest.raises(KeyError, match=where) as raised:
        command(script, flags)
    last = raised.traceback[-1]
    assert last.path.name == ("wrong_team.py" if where == "module" else Path(__file__).name)
    assert where in str(last.statement) or where == "constructor"


def test_what_a_strangers_config_may_ask_for(script):
    """Environments of known packages; what else is importable may execute anything."""
    refused = "my_module:Game pettingzoo.test.example_envs mpe2._mpe_utils.core mpe2_v3.simple_v3 os:system"
    safe = dict.fromkeys(refused.split(), False) | {"mpe2.simple_tag_v3": True, "pettingzoo.sisl.multiwalker_v9": True}
    for env_id, is_safe in safe.items():
        assert (script.code_flags(script.Args(env_id=env_id)) == []) == is_safe
