"""Bug hunts, one for each script: in each copy one line is wrong, without any message. What is judged is what the
script does: short runs in probe environments, and calls. Their cases say what can be seen, never where to look.

Of a hunt with several bugs a number draws one; all have the same cases.
"""

import copy

import numpy as np
from inputs import lists, normal, share, slopes, tensor, together
from mechanism import hunt
from processes import Threads
from runner import trained


def last(column, **settings):
    """What a run writes last into a column of metrics.csv."""
    return lambda m: trained(m, **settings).metrics[column][-1]


def mean_return(m, run, episodes=20):
    """The mean return of deterministic episodes."""
    return m.evaluate(run.agent, run.args, episodes, 1)[0]


def endless_table(m):
    """What the table says of Endless with gamma 0.5, where the right answer is 2."""
    run = trained(m, env_id="Classroom/Endless-v0", gamma=0.5, learning_rate=0.5, total_timesteps=2000)
    return max(map(max, run.agent.tables[0]))


STEP = {"reward": normal(), "discount": share, "next_values": normal("3")}
TARGETS = together(
    lists("sarsa_target", **STEP, next_action=1),
    lists("expected_sarsa_target", **STEP, epsilon=0.3),
    lists("double_q_target", **STEP, other_next_values=normal("3")),
)
hunt(
    "hunt-qlearning",
    "qlearning.py",
    "week 3, 40 minutes",
    cases={
        "a state that pays 1 in each step, gamma 0.5, episodes are truncated: its value": (endless_table, 0.02),
        "targets of Sarsa, expected Sarsa and double Q-learning on random numbers": lambda m: [
            TARGETS(m, np.random.default_rng(i)) for i in range(5)
        ],
    },
    bugs={
        "play_episode: terminated else args.gamma  # truncated: S' still has a value -> terminated or truncated else "
        "args.gamma": "Environments whose episodes terminate are learnt as ever. Where a time limit ends them, values "
        "stay too small, and the values of states late in an episode jump up and down from one episode to the next.",
        "double_q_target: discount * other_next_values[best] -> discount * next_values[best]": "With --algorithm "
        "double-q the curve is just that of Q-learning, and where rewards are noisy, values are just as much too high.",
        "double_q_target: next_values.index(max(next_values)) -> other_next_values.index(max(other_next_values))": ""
        "With --algorithm double-q values are too high where rewards are noisy, as if there were one table only.",
    },
)

SMALL_DQN = {"num_envs": 4, "hidden_sizes": (32,), "learning_rate": 5e-3, "learning_starts": 200,
             "train_frequency": 4, "target_network_frequency": 20, "gamma": 0.5, "exploration_fraction": 0.9,
             "end_e": 0.3, "normalize_reward": False, "seed": 1}  # fmt: skip


def later_q(m):
    """Q of the two steps of Later."""
    agent = trained(m, env_id="Classroom/Later-v0", total_timesteps=4000, **SMALL_DQN).agent
    return agent(tensor([[0.0], [1.0]]))


def lottery_q(m):
    """Q of a ticket, the same for both actions."""
    agent = trained(m, env_id="Classroom/Lottery-v0", total_timesteps=4000, **SMALL_DQN).agent
    return agent(tensor([[0.0]]))


def epsilons(m):
    """Epsilon after a quarter, a half, and at the end."""
    settings = {"exploration_fraction": 0.5, "start_e": 1.0, "end_e": 0.1}
    run = trained(m, env_id="Classroom/Cue-v0", total_timesteps=2000, **SMALL_DQN | settings)
    column = run.metrics["epsilon"]
    return [column[len(column) * part // 4 - 1] for part in (1, 2, 4)]


hunt(
    "hunt-dqn",
    "dqn.py",
    "week 5, 40 minutes",
    cases={
        "Q of two steps, of which the second pays 1 for action 1, with gamma 0.5": (later_q, 0.15),
        "Q of a step that pays 20 one time in ten, and else nothing": (lottery_q, 0.6),
        "epsilon, to fall from 1 to 0.1 over the first half: after a quarter, a half, and all": (epsilons, 0.05),
    },
    bugs={
        "polyak: target_weights.lerp_(weights, tau) -> target_weights.lerp(weights, tau)": "The loss goes down quickly "
        "and stays there. q stays near one reward, however long the run, and the return rises a little and then no "
        "more.",
        "train: args.exploration_fraction * args.total_timesteps -> args.exploration_fraction": ""
        "--exploration-fraction makes no difference. Whether the return rises at all is a matter of luck; on "
        "MountainCar-v0, where the goal has to be found first, it rarely leaves -200.",
        "td_targets: ~terminated * target_q -> target_q": "On CartPole-v1 q goes towards 1 / (1 - gamma), however "
        "short the episodes are. With --gamma 0 all is well.",
        "q_losses: (targets - q).square() -> (targets - q).abs()": "q tells what mostly happens. On CartPole-v1 it "
        "reaches 1 / (1 - gamma) while the pole still falls, and may rise beyond it without end.",
        "ReplayBuffer.add: = next_obs[played] -> = obs[played]": "A reward that comes late is learnt in the step that "
        "it is paid in, but not in those before. With --gamma 0 all is well.",
        "train: linear_schedule(args.start_e, args.end_e, -> linear_schedule(args.end_e, args.start_e,": "Episodes of "
        "training get worse and worse, whatever the evaluations say.",
    },
)

TINY = {"num_envs": 8, "num_steps": 32, "learning_rate": 0.01, "ent_coef": 0.0, "hidden_sizes": (16,), "seed": 1}


TINY_PPO = TINY | {"num_minibatches": 4, "update_epochs": 4, "anneal_lr": True, "normalize_obs": False,
                   "normalize_reward": False}  # fmt: skip


def later_values(m):
    """The critic's values of the two steps of Later, and the mean return."""
    run = trained(m, env_id="Classroom/Later-v0", gamma=0.5, gae_lambda=0.9, total_timesteps=8000, **TINY_PPO)
    return run.agent.critic(tensor([[0.0], [1.0]])).flatten(), mean_return(m, run)


def loaded_again(m):
    """Mean returns of the same agent: at the end of its run, and with its weights given to a new one."""
    env = {"env_id": "Classroom/Cue-v0", "env_kwargs": '{"offset": 50}'}
    run = trained(m, **env, **TINY_PPO | {"normalize_obs": True}, total_timesteps=6000)
    other = m.make_agent(run.args, m.make_envs(run.args, 1))
    other.load_state_dict(run.agent.state_dict())
    return mean_return(m, run), m.evaluate(other, run.args, 20, 1)[0]


def bootstrapped_values(m):
    """The critic's values of the two steps of Later, learnt one step at a time, and the mean return."""
    settings = {"env_id": "Classroom/Later-v0", "gamma": 0.5, "n_step": 1, "num_envs": 16, "hidden_sizes": (16,)}
    run = trained(m, **settings, learning_rate=0.01, total_timesteps=12_000, seed=1)
    return run.agent.value(tensor([[0.0], [1.0]])), mean_return(m, run)


hunt(
    "hunt-reinforce",
    "reinforce.py",
    "week 6, 30 minutes",
    cases={
        "two steps, of which the second pays 1 for action 1, gamma 0.5, --n-step 1: (the critic's values, the mean "
        "return)": (bootstrapped_values, 0.15),
    },
    bugs={
        "Rollout.batch: [*self.obs[1:], last_obs] -> self.obs": "Without --n-step, and where no episode is cut off by "
        "a time limit, nothing is wrong. With --n-step 1 the critic's values are far too small.",
    },
)


BONUS_RUN = {"env_id": "Classroom/Cue-v0", "total_timesteps": 4000} | TINY_PPO | {"ent_coef": 10.0}
hunt(
    "hunt-ppo",
    "ppo.py",
    "week 7, 45 minutes",
    cases={
        "an entropy bonus of weight 10, two actions: the entropy at the end (log 2 = 0.69 is the highest)": (
            last("entropy", **BONUS_RUN),
            0.09,
        ),
        "two steps, of which the second pays 1 for action 1, gamma 0.5: (the critic's values, the mean return)": (
            later_values,
            0.12,
        ),
        "a run that normalises observations, where every episode can pay 1: the mean return of its agent; then "
        "of a new agent that has got its weights": (loaded_again, 0.1),
    },
    bugs={
        "ppo_loss: pg_loss - args.ent_coef * entropy -> pg_loss + args.ent_coef * entropy": "On CartPole-v1 with "
        "--ent-coef 1 the entropy in the lower panel falls to zero, where it should stay near 0.6, and the last "
        "evaluation is far below 500. Without an entropy bonus nothing is wrong.",
        "RolloutBuffer.minibatches: ~self.reset_rows -> ~(self.terminated | self.truncated)": "CartPole-v1 and "
        "Acrobot-v1 are learnt as ever; only explained_variance stays somewhat lower on the latter, 0.82 instead of "
        "0.92. But on FrozenLake-v1 the return stays below 0.05, where the sound script comes to 0.3 or more within "
        "150,000 steps.",
        'RunningMeanStd: "mean", torch.zeros(shape, dtype=torch.float64) -> "mean", torch.zeros(shape, '
        "dtype=torch.float64), False": "With --normalize-obs, on CartPole-v1 for instance, the curve looks sound. But "
        "--evaluate of the finished run scores far less than its last point, and a run that is resumed falls back to "
        "where it began.",
        "RolloutBuffer.compute_advantages: args.gamma, args.gae_lambda -> args.gae_lambda, args.gamma": "A "
        "small --gamma does not make the critic's values small, and a small --gae-lambda does.",
        "compute_gae: advantages, advantages + values -> advantages, advantages": "The critic's values stay far below "
        "the returns, and explained_variance far below that of the sound script.",
        "compute_gae: next_values * ~terminated - values -> next_values - values": "Where episodes end by a time limit "
        "nothing is wrong. Where they end in failure, the critic is too confident shortly before: it sees a future "
        "where there is none.",
    },
)

STILL_RUN = {"env_id": "Taxi-v4", "total_timesteps": 1000} | TINY | {"learning_rate": 0.0}
hunt(
    "hunt-masked",
    "ppo_masked.py",
    "week 8, 45 minutes",
    cases={"a learning rate of 0, so that the policy does not move: approx_kl": (last("approx_kl", **STILL_RUN), 1e-5)},
    bugs={
        "masked_ppo_loss: masks = None if args.naive_mask -> masks = None if not args.naive_mask": "No invalid action "
        "is ever taken. But approx_kl is large from the first rollout on, before the policy has moved at all, and "
        "clip_fraction with it."
    },
)


WINDOW_RUN = {"env_id": "Classroom/Window-v0", "total_timesteps": 3000, "gamma": 0.5, "intrinsic_gamma": 0.5} | TINY
hunt(
    "hunt-rnd",
    "ppo_rnd.py",
    "week 12, 45 minutes",
    cases={
        "nothing in Window pays, and action 1 shows something new each time, action 0 never. So curiosity "
        "settles for action 1 within 3,000 steps: the entropy of the policy": (last("entropy", **WINDOW_RUN), 0.25),
    },
    bugs={
        "train: rnd.rewards(buffer.next_obs,  -> rnd.rewards(buffer.obs[:-1], ": "intrinsic_reward and predictor_loss "
        "look as they should. But where episodes have one step only, curiosity has no effect at all; in longer ones "
        "it seems to credit the wrong steps."
    },
)

SMALL_CRITIC = {"actor_learning_rate": 3e-3, "critic_learning_rate": 1e-2, "hidden_sizes": (32,), "gamma": 0.9,
                "seed": 1}  # fmt: skip
ENDLESS = {"env_id": "Classroom/Endless-v0", "env_kwargs": '{"continuous": true}'}


def frozen_targets(m):
    """By how much the critic's value of Endless differs from 1 + 0.9 of its target's, where targets never move."""
    settings = {"batch_size": 64, "learning_starts": 200, "total_timesteps": 1500, "tau": 0.0} | SMALL_CRITIC
    agent = trained(m, **settings, **ENDLESS).agent
    values = []
    for critics in (agent.critics, agent.target_critics):
        values.append(min(critic(tensor([[0.0]]), tensor([[0.0]])).item() for critic in critics))
    return values[0] - (1 + 0.9 * values[1])


hunt(
    "hunt-td3",
    "ddpg_td3.py",
    "week 9, 50 minutes",
    cases={
        "every step pays 1, gamma is 0.9, and targets stay what they are, since tau is 0: by how much the "
        "critic's value differs from 1 + 0.9 of the target's": (frozen_targets, 0.5),
    },
    bugs={
        "bellman_targets: for critic in agent.target_critics -> for critic in agent.critics": "The critic's values "
        "grow faster than they should, and value_mean and critic_loss swing together. --tau makes no difference to "
        "them, though it should make a large one."
    },
)


def alphas(m):
    """What becomes of alpha, which begins at 1, in a short run, and its slopes for too much and too little entropy."""
    settings = {"batch_size": 64, "learning_starts": 100, "total_timesteps": 400} | SMALL_CRITIC | ENDLESS
    log_alpha = tensor(0.0).requires_grad_()
    found = [slopes(m.alpha_loss(log_alpha, tensor([x - 0.5, x + 0.5]), -1.0), log_alpha)[0] for x in (-2, 0, 2)]
    return trained(m, **settings).metrics["alpha"][-1], *found


hunt(
    "hunt-sac",
    "sac.py",
    "week 9, 40 minutes",
    cases={
        "(alpha after 400 steps with one dimension of actions, the slopes of its loss by log alpha where the "
        "entropy is 2, 0 and -2)": (alphas, 0.2),
    },
    bugs={
        "alpha_loss: log_probs.detach() + target_entropy -> log_probs.detach() - target_entropy": "On Pendulum-v1 "
        "alpha rises without an end, where it should fall, and the entropy stays as high as it can be. With a fixed "
        "--alpha nothing is wrong."
    },
)


def uphill_cosine(m):
    """The cosine of the angle between the gradient that candidates find and the direction in which returns grow."""
    rng = np.random.default_rng(0)
    theta, noise, uphill = rng.normal(size=8), rng.normal(size=(200, 8)), rng.normal(size=8)
    gradient = m.es_gradient(m.make_candidates(theta, noise, 0.1) @ uphill, noise, 0.1)
    return gradient @ uphill / np.linalg.norm(gradient) / np.linalg.norm(uphill)


def counted(m):
    """The returns of 32 candidates on CartPole, which pays 1 in each step, by the steps that they have taken."""
    run = trained(m, env_id="CartPole-v1", population_size=32, num_generations=1, hidden_sizes=(), seed=1)
    return run.metrics["return_mean"][0] * 32 / run.metrics["step"][0]


hunt(
    "hunt-es",
    "es.py",
    "week 10, 40 minutes",
    cases={
        "returns grow along a straight line: the cosine of the angle between it and the way that theta is to "
        "take, as 400 candidates find it": (uphill_cosine, 0.1),
        "CartPole pays 1 in each step: the returns of 32 candidates, divided by their steps": (counted, 0.01),
    },
    bugs={
        "make_candidates: axis=1 -> axis=0": "theta moves in every generation, and candidates differ in their returns; "
        "but the curve wanders, and the more parameters the policy has, the less it rises.",
        "play_candidates: steps += playing -> steps += 1": "On CartPole-v1, which pays 1 in each step, most episodes "
        "in episodes.csv are longer than their returns, and a run has fewer generations than it should have. On "
        "Pendulum-v1 nothing is wrong.",
        "es_gradient: return (plus - minus) @ noise -> return (plus + minus) @ noise": "theta moves in every "
        "generation, and candidates differ in their returns; but the curve wanders, and more candidates do not help.",
    },
)


def updated_apart(m, *sizes):
    """(value loss, gradient of the critic's last layer) that processes with so many rows of Cue agree on."""
    import torch

    args = m.Args(env_id="Classroom/Cue-v0", hidden_sizes=(8,), num_envs=4, normalize_obs=False)
    torch.manual_seed(1)
    numbers = torch.randn(6, 40)
    agent = m.make_agent(args, m.make_envs(args, 1))

    def update(rank):
        mine = copy.deepcopy(agent)
        obs, *rest, returns = [field.split(sizes)[rank] for field in numbers]
        actions = (rest[0] > 0).long().unsqueeze(1)
        batch = m.Batch(obs.unsqueeze(1).repeat(1, len(agent.critic[0].weight[0])), actions, *rest[1:], returns.abs())
        loss, metrics = m.ppo_loss(mine, batch, args)
        loss.backward()
        gradients = [weights.grad for weights in mine.parameters()]
        m.average([*gradients, *metrics.values()], len(obs))
        return metrics["value_loss"], gradients[-2]

    return Threads(len(sizes), patience=5).run(m, update)[0]


hunt(
    "hunt-ddp",
    "ppo_ddp.py",
    "week 10, 30 minutes",
    cases={
        "two processes with 20 rows each: (value loss, gradient of the critic's last layer)": (
            lambda m: updated_apart(m, 20, 20),
            0.001,
        ),
        "the same rows, but one process has 36 of them and the other 4": (lambda m: updated_apart(m, 36, 4), 0.001),
    },
    bugs={
        "average: sums = rows * torch.cat -> sums = torch.cat": "Without torchrun nothing is wrong, nor where all "
        "processes have equally many rows. In environments with short episodes two processes do not learn quite as one "
        "does: rows after an end drop out, in one process more of them than in the other.",
    },
)


def tiny_sequences(m):
    """(agent, SequenceBuffer of three rows of one slot, Args): a row of demo 1, a reset row, a row of the agent's."""
    args = m.Args(env_id="Classroom/Later-v0", recurrent=False, hidden_sizes=(8,), seed=1)
    envs = m.make_envs(args, 1)
    agent = m.make_agent(args, envs)
    buffer = m.SequenceBuffer(3, 1, envs.single_observation_space, envs.single_action_space)
    buffer.obs[:] = np.arange(4)[:, None, None]
    buffer.rewards[1:] = 1
    buffer.terminated[0] = buffer.reset_rows[1] = buffer.demos[0] = True
    return agent, buffer, args


def demonstrator(m):
    """The log-probabilities of a replayed row and of one of the agent's own."""
    agent, buffer, _ = tiny_sequences(m)
    buffer.add_log_probs_and_values(agent)
    return buffer.old_log_probs[0, 0], buffer.old_log_probs[2, 0]


hunt(
    "hunt-ppod",
    "ppod.py",
    "week 12, 60 minutes",
    cases={
        "log-probabilities in a rollout: of a replayed row (who demonstrates is certain of his actions, log "
        "1), and of a new agent's own (undecided between two actions, log 1/2)": (demonstrator, 0.1),
    },
    bugs={
        "SequenceBuffer.add_log_probs_and_values: (self.demos.astype(bool), -> (self.demos.astype(bool) & "
        "(self.rewards > 0),": "Only rows with a reward count as certain. Where rewards are frequent it hardly shows. "
        "Where only the goal is rewarded, demonstrations are replayed, as training_rows says, but of all the steps "
        "that lead there the policy does not take more than from its own episodes."
    },
)


def units(m):
    """(returns, advantages) of two rewards of 7, where the critic says 0, 1 and 0, which mean 100, 110 and 100."""
    args = m.Args(env_id="probes.Ayes", num_envs=1, num_steps=2, num_minibatches=1, gamma=0.5, gae_lambda=1.0)
    team = m.make_agent(args, m.make_envs(args, 1))
    team.critic.forward = lambda share_obs, *_: (tensor([[[0.0]], [[1.0]], [[0.0]]]), tensor([[[0.0]]] * 4))
    team.value_norm = m.ValueNorm(0.5)
    team.value_norm.update(tensor([90.0, 110.0]))  # mean 100, deviation 10
    buffer = m.TeamBuffer(args, team)
    buffer.rewards[:] = 7
    steps = buffer.critic_steps(team)
    return steps.returns[:, 0], steps.advantages[:, 0]


hunt(
    "hunt-mappo",
    "mappo.py",
    "week 11, 45 minutes",
    cases={
        "the critic says 0 and 1 and 0 again, where returns are 100 ± 10, so it means 100, 110 and 100; two "
        "rewards of 7, gamma 0.5: (returns, advantages)": (units, 1e-2),
    },
    bugs={
        "TeamBuffer.critic_steps: team.value_norm.denormalize( -> team.value_norm.normalize(": "With --no-value-norm "
        "nothing is wrong. With value norm, which ought to help, the return rises more slowly, value_loss is twice as "
        "large, and explained_variance stays near 0."
    },
)

TEAM = {"num_envs": 4, "learning_starts": 200, "hidden_sizes": (32,), "batch_size": 64, "seed": 1}
hunt(
    "hunt-maddpg",
    "maddpg_matd3.py",
    "week 11, 45 minutes",
    cases={
        "Ayes pays 1 to both for every agent that does action 1, so the team learns to get 4: its mean return": (
            lambda m: mean_return(m, trained(m, env_id="probes.Ayes", total_timesteps=1500, **TEAM)),
            1.0,
        ),
    },
    bugs={
        "gumbel_softmax: hard + (soft - soft.detach()) -> hard - (soft - soft.detach())": "Teams with continuous "
        "actions learn as ever. Those with discrete ones do worse and worse; value_mean falls with the return, so the "
        "critic knows, and actor_loss rises as if that were what the actors want."
    },
)


def endless_q(m):
    """Q of Endless, learnt by three-step returns alone."""
    off = dict.fromkeys(["double", "prioritized", "dueling", "distributional", "noisy"], False)
    settings = SMALL_DQN | off | {"multi_step": True, "n_step": 3, "learning_rate": 0.02}
    return trained(m, env_id="Classroom/Endless-v0", total_timesteps=3000, **settings).agent(tensor([[0.0]])).max()


hunt(
    "hunt-rainbow",
    "rainbow.py",
    "week 6, 40 minutes",
    cases={"a state that pays 1 in every step for ever, gamma 0.5, with multi-step: its Q": (endless_q, 0.2)},
    bugs={
        "NStepBuffer.write: = self.gamma ** len(steps) -> = self.gamma": "With --no-multi-step all is well. With it, "
        "q is far above what episodes return, and with a gamma near 1 it rises to the end of the support. A larger "
        "--n-step makes it worse."
    },
)
