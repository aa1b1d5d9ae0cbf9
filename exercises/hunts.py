"""The table of bug hunts: in each copy one line is wrong, without any message. A run (`check`) or calls (`cases`) judge
what the script does.

Messages of checks say what can be seen, never where to look. To add one: hunt("hunt-19", …) with the fields that
forms.py explains; tests/test_exercises.py sees that the planted copy runs and fails, and that the sound script passes.
"""

import tempfile

import numpy as np
import probes  # noqa: F401  (registers the probe environments)
import runner
from forms import Case, Plant, close, hunt, pool, tensor

# ------------------------------------------------------------------------------------------------------ qlearning.py


def check_clock(m, train):
    settings = {"gamma": 0.5, "learning_rate": 0.5, "total_timesteps": 2000}
    table = train(env_id="Classroom/Endless-v0", **settings).agent.tables[0]
    value = max(map(max, table))
    if not close(value, 2.0, 0.02):
        return f"a state that pays 1 in every step for ever is worth 2 with gamma 0.5; the table says {value:.2f}"


hunt(
    "hunt-1",
    script="qlearning.py",
    difficulty=1,
    minutes=30,
    hint="Environments whose episodes terminate are learnt as ever. Where a time limit ends them, values stay too "
    "small, and the values of states late in an episode jump up and down from one episode to the next.",
    check=check_clock,
    plant=Plant(
        "play_episode",
        "discount = 0.0 if terminated else args.gamma  # truncated: S' still has a value",
        "discount = 0.0 if terminated or truncated else args.gamma  # after the last step nothing follows",
    ),
)


def check_casino(m, train):
    constant = {"epsilon_start": 0.5, "epsilon_min": 0.5, "learning_rate": 0.1, "total_timesteps": 20_000}
    agent = train(env_id="Classroom/Casino-v0", algorithm="double-q", gamma=1.0, **constant).agent
    value = np.mean([table[0][:5] for table in agent.tables])
    if value > 0:
        return f"the games of Casino lose 0.1 on average; the tables of double-q value them at {value:+.2f}"


hunt(
    "hunt-2",
    script="qlearning.py",
    difficulty=2,
    minutes=40,
    hint="With --algorithm double-q the curve is just that of Q-learning, and where rewards are noisy, values are just "
    "as much too high.",
    check=check_casino,
    plant=Plant(
        "double_q_target",
        "return reward + discount * other_next_values[best]",
        "return reward + discount * next_values[best]",
    ),
)

# ------------------------------------------------------------------------------------------------------------ dqn.py

SMALL_DQN = {"num_envs": 4, "hidden_sizes": (32,), "learning_rate": 5e-3, "learning_starts": 200,
             "train_frequency": 4, "target_network_frequency": 20, "gamma": 0.5, "exploration_fraction": 0.9,
             "end_e": 0.3, "seed": 1}  # fmt: skip


def check_future(m, train):
    agent = train(env_id="Classroom/Later-v0", total_timesteps=4000, **SMALL_DQN).agent
    q = agent(tensor([[0.0], [1.0]])).tolist()
    if not close(q, [[0.5, 0.5], [0.0, 1.0]], 0.15):
        return (
            f"of two steps the second pays 1, so with gamma 0.5 Q is 0.5 in the first; it is {q[0][0]:.2f} and "
            f"{q[0][1]:.2f}, and in the second {q[1][0]:.2f} and {q[1][1]:.2f} (0 and 1 are right)"
        )


hunt(
    "hunt-3",
    script="dqn.py",
    difficulty=2,
    minutes=40,
    hint="The loss goes down quickly and stays there. q stays near one reward, however long the run, and the return "
    "rises a little and then no more.",
    check=check_future,
    plant=Plant("polyak", "target_weights.lerp_(weights, tau)", "target_weights.lerp(weights, tau)"),
)


def check_exploration(m, train):
    settings = {"exploration_fraction": 0.5, "start_e": 1.0, "end_e": 0.1}
    trained = train(env_id="Classroom/Cue-v0", total_timesteps=2000, **SMALL_DQN | settings)
    for row in trained.metrics:
        due = max(0.1, 1 - 0.9 * row["step"] / 1000)
        if abs(row["epsilon"] - due) > 0.05:
            return (
                f"epsilon has to fall from 1 to 0.1 over the first half of 2,000 steps; after {row['step']:.0f} it is "
                f"{row['epsilon']:.2f} instead of {due:.2f}"
            )


hunt(
    "hunt-4",
    script="dqn.py",
    difficulty=1,
    minutes=25,
    hint="--exploration-fraction makes no difference. Whether the return rises at all is a matter of luck; on "
    "MountainCar-v0, where the goal has to be found first, it rarely leaves -200.",
    check=check_exploration,
    plant=Plant(
        "train", "max(1, args.exploration_fraction * args.total_timesteps)", "max(1, args.exploration_fraction)"
    ),
)

# ------------------------------------------------------------------------------------------------------------ ppo.py

TINY = {"num_envs": 8, "num_steps": 32, "learning_rate": 0.01, "ent_coef": 0.0, "hidden_sizes": (16,), "seed": 1}


def check_bonus(m, train):
    trained = train(env_id="Classroom/Cue-v0", total_timesteps=4000, **TINY | {"ent_coef": 10.0})
    entropy = trained.metrics[-1]["entropy"]
    if entropy < 0.6:
        return (
            f"with an entropy bonus of weight 10 the policy has to stay near the highest entropy, log 2 = 0.69; "
            f"after {trained.metrics[-1]['step']:.0f} steps it is {entropy:.2f}"
        )


hunt(
    "hunt-5",
    script="ppo.py",
    difficulty=1,
    minutes=20,
    hint="On CartPole-v1 with --ent-coef 1 the entropy in the lower panel falls to zero, where it should stay near "
    "0.6, and the last evaluation is far below 500. Without an entropy bonus nothing is wrong.",
    check=check_bonus,
    plant=Plant("ppo_loss", "pg_loss - args.ent_coef * entropy", "pg_loss + args.ent_coef * entropy"),
)


def check_later(m, train):
    import torch

    trained = train(env_id="Classroom/Later-v0", gamma=0.5, total_timesteps=8000, **TINY)
    with torch.no_grad():
        values = trained.agent.critic(tensor([[0.0], [1.0]])).squeeze(1).tolist()
    if not close(values, [0.5, 1.0], 0.15) or trained.summary["eval_return_mean"] < 1:
        return (
            f"of two steps the second pays 1, so with gamma 0.5 they are worth 0.5 and 1; the critic has learnt "
            f"{values[0]:.2f} and {values[1]:.2f}, and the agent gets {trained.summary['eval_return_mean']:.2f}"
        )


hunt(
    "hunt-6",
    script="ppo.py",
    difficulty=3,
    minutes=60,
    hint="CartPole-v1 and Acrobot-v1 are learnt as ever; only explained_variance stays somewhat lower on the latter, "
    "0.85 instead of 0.91. But on FrozenLake-v1 the return stays at 0.04, where the sound script comes to 0.3 or more "
    "within 150,000 steps.",
    check=check_later,
    plant=Plant(
        "train",
        "buffer.add(t, obs, actions, rewards, terminated, truncated, reset_rows)",
        "buffer.add(t, obs, actions, rewards, terminated, truncated, terminated | truncated)",
    ),
)


def loaded_again(m):
    """Mean returns of the same agent: at the end of its run, and loaded from the run's folder."""
    settings = TINY | {"env_id": "Classroom/Cue-v0", "env_kwargs": '{"offset": 50}', "normalize_obs": True}
    with tempfile.TemporaryDirectory() as folder:
        summary = runner.train(m, folder, **settings, total_timesteps=6000, eval_episodes=50)
        agent = m.load(f"{folder}/run", "last")
    return summary["eval_return_mean"], m.evaluate(agent, m.Args(**settings), 50)[0]


hunt(
    "hunt-7",
    script="ppo.py",
    difficulty=2,
    minutes=45,
    hint="With --normalize-obs, on CartPole-v1 for instance, the curve looks sound. But --evaluate of the finished run "
    "scores far less than its last point, and a run that is resumed falls back to where it began.",
    cases=[
        Case(
            "a run that normalises observations: its last evaluation, then one of the agent that load returns, where "
            "every episode can pay 1",
            loaded_again,
            [1.0, 1.0],
        ),
    ],
    plant=Plant(
        "read_weights",
        'agent.load_state_dict(state["agent"])',
        'agent.load_state_dict({name: state["agent"][name] for name, _ in agent.named_parameters()}, strict=False)',
    ),
)

# ----------------------------------------------------------------------------------------------------- ppo_masked.py


def check_first_ratio(m, train):
    trained = train(env_id="Classroom/Doors-v0", total_timesteps=1000, **TINY | {"learning_rate": 0.0})
    kl = trained.metrics[0]["approx_kl"]
    if kl > 1e-6:
        return f"with a learning rate of 0 the policy does not move, but approx_kl is {kl:.4f} instead of 0"


hunt(
    "hunt-8",
    script="ppo_masked.py",
    difficulty=2,
    minutes=45,
    hint="No invalid action is ever taken. But approx_kl is large from the first rollout on, before the policy has "
    "moved at all, and clip_fraction with it.",
    check=check_first_ratio,
    plant=Plant(
        "masked_ppo_loss",
        "masks = None if args.naive_mask else batch.action_masks",
        "masks = batch.action_masks if args.naive_mask else None",
    ),
)

# ------------------------------------------------------------------------------------------------------- ddpg_td3.py


def check_frozen_targets(m, train):
    import torch

    settings = {"actor_learning_rate": 3e-3, "critic_learning_rate": 1e-2, "hidden_sizes": (32,), "batch_size": 64}
    settings |= {"learning_starts": 200, "total_timesteps": 1500, "gamma": 0.9, "tau": 0.0, "seed": 1}
    agent = train(env_id="Classroom/Endless-v0", env_kwargs='{"continuous": true}', **settings).agent
    with torch.no_grad():
        action = torch.zeros(1, 1)
        value = min(critic(torch.zeros(1, 1), action).item() for critic in agent.critics)
        target = min(critic(torch.zeros(1, 1), action).item() for critic in agent.target_critics)
    if not close(value, 1 + 0.9 * target, 0.5):
        return (
            f"where every step pays 1, and targets stay at {target:.2f} because tau is 0, Q has to be about "
            f"1 + 0.9 x {target:.2f} = {1 + 0.9 * target:.2f}; it is {value:.2f}"
        )


hunt(
    "hunt-9",
    script="ddpg_td3.py",
    difficulty=3,
    minutes=50,
    hint="The critic's values grow faster than they should, and value_mean and critic_loss swing together. --tau makes "
    "no difference to them, though it should make a large one.",
    check=check_frozen_targets,
    plant=Plant(
        "bellman_targets",
        "next_values = [critic(batch.next_obs, next_actions) for critic in agent.target_critics]",
        "next_values = [critic(batch.next_obs, next_actions) for critic in agent.critics]",
    ),
)

# ------------------------------------------------------------------------------------------------------------- es.py


def uphill_cosine(m):
    """The cosine of the angle between the gradient that candidates find and the direction in which returns grow."""
    rng = np.random.default_rng(0)
    theta, noise, uphill = rng.normal(size=8), rng.normal(size=(200, 8)), rng.normal(size=8)
    returns = m.make_candidates(theta, noise, 0.1) @ uphill
    gradient = m.es_gradient(returns, noise, 0.1)
    return gradient @ uphill / np.linalg.norm(gradient) / np.linalg.norm(uphill)


hunt(
    "hunt-10",
    script="es.py",
    difficulty=2,
    minutes=40,
    hint="theta moves in every generation, and candidates differ in their returns; but the curve wanders, and the more "
    "parameters the policy has, the less it rises.",
    cases=[
        Case(
            "returns grow along a straight line: the cosine of the angle between it and the way that theta is to take, "
            "as 400 candidates find it",
            uphill_cosine,
            1.0,
            atol=0.1,
        ),
    ],
    plant=Plant("make_candidates", "axis=1", "axis=0"),
)


def check_counting(m, train):
    trained = train(env_id="CartPole-v1", population_size=32, num_generations=1, hidden_sizes=(), seed=1)
    row = trained.metrics[0]
    if not close(row["return_mean"] * 32, row["step"], 0.5):
        return (
            f"CartPole pays 1 in each step, so 32 candidates that have taken {row['step']:.0f} steps got as much; but "
            f"their returns add up to {row['return_mean'] * 32:.0f}"
        )


hunt(
    "hunt-11",
    script="es.py",
    difficulty=2,
    minutes=40,
    hint="On CartPole-v1 the mean return of the candidates is far above what the evaluations say, from the first "
    "generation on, and all candidates seem to be nearly as good. On Pendulum-v1 nothing is wrong.",
    check=check_counting,
    plant=Plant("play_candidates", "returns += rewards * playing", "returns += rewards"),
)

# ----------------------------------------------------------------------------------------------------------- ppod.py


def tiny_sequences(m):
    """(agent, SequenceBuffer of three rows of one slot, Args): a row of demo 1, a reset row, a row of the agent's."""
    args = m.Args(env_id="Classroom/Password-v0", recurrent=False, hidden_sizes=(8,), seed=1)
    envs = m.make_envs(args, 1)
    agent = m.make_agent(args, envs)
    buffer = m.SequenceBuffer(3, 1, envs.single_observation_space, envs.single_action_space)
    buffer.state = tensor([[]])  # there is no GRU
    obs = np.eye(4, 11, dtype=np.float32)[:, None]
    for t in range(3):
        step = m.Step([[0]], obs[t + 1], [1.0], [t == 0], [False])
        buffer.add(t, obs[t], step, [t == 1], [1 if t == 0 else 0])
    return agent, buffer, args


def demonstrator(m):
    """The log-probabilities of a replayed row and of one of the agent's own."""
    agent, buffer, _ = tiny_sequences(m)
    log_probs, _ = buffer.log_probs_and_values(agent)
    replayed, _, own = log_probs[:, 0].tolist()
    return replayed, own


hunt(
    "hunt-12",
    script="ppod.py",
    difficulty=3,
    minutes=60,
    hint="With several demonstrations it hardly shows. With a single one, its replays are played, as training_rows "
    "says, but the policy does not take more from them than from its own episodes.",
    cases=[
        Case(
            "log-probabilities in a rollout: of a replayed row (who demonstrates is certain of his actions, log 1), "
            "and of a new agent's own (undecided between two actions, log 1/2)",
            demonstrator,
            [0.0, -0.69],
            atol=0.1,
        ),
    ],
    plant=Plant(
        "SequenceBuffer.log_probs_and_values",
        "replayed = torch.as_tensor(self.demo_ids > 0, device=agent.device)",
        "replayed = torch.as_tensor(self.demo_ids > 1, device=agent.device)",
    ),
)


def junk_in_gradient(m):
    """By how much the gradient changes with what stands in a reset row."""
    gradients = []
    for junk in (0.0, 1000.0):
        agent, buffer, args = tiny_sequences(m)
        buffer.compute_advantages(*buffer.log_probs_and_values(agent), args)
        buffer.advantages = tensor([[1.0], [junk], [3.0]])
        buffer.returns = tensor([[1.0], [junk], [3.0]])
        (batch,) = buffer.minibatches(1, 1, np.random.default_rng(0))
        loss, _ = m.sequence_loss(agent, batch, args)
        loss.backward()
        gradients.append([number for p in agent.parameters() for number in p.grad.flatten().tolist()])
    return max(abs(x - y) for x, y in zip(*gradients))


hunt(
    "hunt-13",
    script="ppod.py",
    difficulty=3,
    minutes=60,
    hint="Long episodes are learnt as ever. The shorter episodes and demos are, the further policy_loss is from where "
    "it should be in the first updates, near 0. With --no-norm-adv there is no difference.",
    cases=[
        Case(
            "the largest change of the gradient, if something else stands in a reset row, where no action was taken",
            junk_in_gradient,
            0.0,
            atol=1e-5,
        ),
    ],
    plant=Plant(
        "sequence_loss",
        "advantages = normalize(advantages)",
        "advantages = normalize(batch.advantages)[trained]",
    ),
)

# ---------------------------------------------------------------------------------------------------------- mappo.py


def units(m):
    """(returns, advantages) of two rewards of 7, where the critic says 0, 1 and 0, which mean 100, 110 and 100."""
    buffer, norm = m.OnPolicyCriticBufferEP(2, 1, 1, gamma=0.5, gae_lambda=1.0), m.ValueNorm(0.5)
    norm.update(tensor([90.0, 110.0]))  # mean 100, deviation 10
    ones, state = np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32)
    for value in (0.0, 1.0):
        buffer.insert(state, np.zeros((1, 1, 0), np.float32), ones * value, ones * 7, ones, ones)
    buffer.compute_returns(ones * 0, norm)
    return buffer.returns.ravel().tolist(), buffer.advantages.ravel().tolist()


hunt(
    "hunt-14",
    script="mappo.py",
    difficulty=2,
    minutes=45,
    hint="With --no-value-norm nothing is wrong. With value norm, which ought to help, the return rises more slowly, "
    "value_loss is twice as large, and explained_variance stays near 0.",
    cases=[
        Case(
            "the critic says 0 and 1 and 0 again, where returns are 100 ± 10, so it means 100, 110 and 100; two "
            "rewards of 7, gamma 0.5: (returns, advantages)",
            units,
            [[35.5, 57.0], [-64.5, -53.0]],  # 7 + 0.5 x 100 = 57, 7 + 0.5 x 57 = 35.5; less 100 and 110
            atol=1e-2,
        ),
    ],
    plant=Plant("CriticBuffer.compute_returns", "value_normalizer.denormalize(", "value_normalizer.normalize("),
)


def check_memory(m, train):
    settings = {"num_envs": 4, "num_steps": 12, "data_chunk_length": 3, "hidden_sizes": (16,), "seed": 1}
    settings |= {"recurrent": True, "total_timesteps": 300, "learning_rate": 0.0}
    kl = max(row["approx_kl"] for row in train(env_id="probes.Recall", **settings).metrics)
    if kl > 1e-9:
        return f"with a learning rate of 0 the policies do not move, but approx_kl is {kl:.1e} instead of 0"


hunt(
    "hunt-15",
    script="mappo.py",
    difficulty=3,
    minutes=60,
    hint="Feed-forward teams learn as ever. With --recurrent approx_kl is never 0, not even with a learning rate of 0, "
    "and it is the larger, the more episodes end in a rollout.",
    check=check_memory,
    plant=Plant("Team.sample", "buffer.masks[t]", "buffer.masks[t - 1]"),
)

# -------------------------------------------------------------------------------------------------- maddpg_matd3.py

TEAM = {"num_envs": 4, "learning_starts": 200, "hidden_sizes": (32,), "batch_size": 64, "seed": 1}


def check_tomorrow(m, train):
    settings = {"gamma": 0.5, "tau": 0.1, "critic_learning_rate": 1e-2, "algorithm": "maddpg"}
    settings |= {"target_noise": 0.0, "twin_q": False, "policy_frequency": 1}
    value = train(env_id="probes.Patience", total_timesteps=3000, **TEAM | settings).metrics[-1]["value_mean"]
    if not close(value, 7 / 6, 0.15):
        return (
            "the last of three steps of Patience pays 2 to the team, so with gamma 0.5 the steps are worth 0.5, 1 and "
            f"2, on average 1.17; the critic says {value:.2f}"
        )


hunt(
    "hunt-16",
    script="maddpg_matd3.py",
    difficulty=2,
    minutes=45,
    hint="Where every step pays for itself, nothing is wrong. Where the reward comes later, value_mean is too low, and "
    "with --gamma 0 all is as it should be. critic_loss does not show it.",
    check=check_tomorrow,
    plant=Plant(
        "matd3_targets",
        "agents.values(twin, batch.next_share_obs, ",
        "agents.values(twin, batch.share_obs, ",
    ),
)


def check_ayes(m, train):
    score = train(env_id="probes.Ayes", total_timesteps=1500, **TEAM).summary["eval_return_mean"]
    if score < 3:
        return (
            "Ayes pays 1 to both for every agent that does action 1, so the team learns within 1,000 steps to get 4; "
            f"it gets {score:.2f}"
        )


hunt(
    "hunt-17",
    script="maddpg_matd3.py",
    difficulty=2,
    minutes=45,
    hint="Teams with continuous actions learn as ever. Those with discrete ones do worse and worse; value_mean falls "
    "with the return, so the critic knows, and actor_loss rises as if that were what the actors want.",
    check=check_ayes,
    plant=Plant("gumbel_softmax", "return hard + (soft - soft.detach())", "return hard - (soft - soft.detach())"),
)


# ------------------------------------------------------------------------------------------------------ ppo_rnd.py


def check_window(m, train):
    trained = train(env_id="Classroom/Window-v0", total_timesteps=3000, **TINY | {"gamma": 0.5, "intrinsic_gamma": 0.5})
    entropy = trained.metrics[-1]["entropy"]
    if entropy > 0.3:
        return (
            "nothing in Window pays, and action 1 shows something new each time, action 0 never: within 3,000 steps "
            f"curiosity settles for action 1; the entropy of the policy is still {entropy:.2f} (log 2 = 0.69)"
        )


hunt(
    "hunt-18",
    script="ppo_rnd.py",
    difficulty=2,
    minutes=45,
    hint="intrinsic_reward and predictor_loss look as they should. But where episodes have one step only, curiosity "
    "has no effect at all; in longer ones it seems to credit the wrong steps.",
    check=check_window,
    plant=Plant("train", "rnd.rewards(buffer.obs[1:], ", "rnd.rewards(buffer.obs[:-1], "),
)


# -------------------------------------------------------------------------------------------------------- rainbow.py


def check_endless(m, train):
    off = dict.fromkeys(["double", "prioritized", "dueling", "distributional", "noisy"], False)
    settings = SMALL_DQN | off | {"multi_step": True, "n_step": 3, "learning_rate": 0.02}
    agent = train(env_id="Classroom/Endless-v0", total_timesteps=3000, **settings).agent
    value = agent(tensor([[0.0]])).max().item()
    if not close(value, 2.0, 0.2):
        return f"a state that pays 1 in every step for ever is worth 2 with gamma 0.5; Q says {value:.2f}"


hunt(
    "hunt-19",
    script="rainbow.py",
    difficulty=2,
    minutes=40,
    hint="With --no-multi-step all is well. With it, q is far above what episodes return, and with a gamma near 1 it "
    "rises to the end of the support, target_max with it. A larger --n-step makes it worse.",
    check=check_endless,
    plant=Plant(
        "NStepBuffer.write",
        "self.discounts[slot] = self.gamma ** len(steps)",
        "self.discounts[slot] = self.gamma",
    ),
)

# -------------------------------------------------------------------------------------------- a bug for each student
# Of each pool every student gets one bug, drawn from a number: that of a hunt on this script, or one of those below.
# All checks of these hunts have to pass, so a check does not know, nor tell, which bug it was.

DRAWN = "one bug of several, drawn from a number; the hint comes with the copy"

pool(
    "hunt-qlearning",
    script="qlearning.py",
    difficulty=2,
    minutes=40,
    hint=DRAWN,
    members=("hunt-1", "hunt-2"),
    plants=(
        Plant(
            "double_q_target",
            "best = next_values.index(max(next_values))",
            "best = other_next_values.index(max(other_next_values))",
            "With --algorithm double-q values are too high where rewards are noisy, as if there were one table only.",
        ),
    ),
)

pool(
    "hunt-dqn",
    script="dqn.py",
    difficulty=2,
    minutes=40,
    hint=DRAWN,
    members=("hunt-3", "hunt-4"),
    plants=(
        Plant(
            "td_targets",
            "gamma * ~terminated * target_q",
            "gamma * target_q",
            "On CartPole-v1 q goes towards 1 / (1 - gamma), however short the episodes are. With --gamma 0 all is "
            "well.",
        ),
        Plant(
            "ReplayBuffer.add",
            "self.next_obs[slots] = next_obs[played]",
            "self.next_obs[slots] = obs[played]",
            "A reward that comes late is learnt in the step that it is paid in, but not in those before. With "
            "--gamma 0 all is well.",
        ),
        Plant(
            "train",
            "linear_schedule(args.start_e, args.end_e, exploration_steps, run.step)",
            "linear_schedule(args.end_e, args.start_e, exploration_steps, run.step)",
            "Episodes of training get worse and worse, whatever the evaluations say.",
        ),
    ),
)

pool(
    "hunt-ppo",
    script="ppo.py",
    difficulty=2,
    minutes=45,
    hint=DRAWN,
    members=("hunt-5", "hunt-6", "hunt-7"),
    plants=(
        Plant(
            "RolloutBuffer.compute_advantages",
            "compute_gae(*steps, args.gamma, args.gae_lambda)",
            "compute_gae(*steps, args.gae_lambda, args.gamma)",
            "A small --gamma does not make the critic's values small, and a small --gae-lambda does.",
        ),
        Plant(
            "compute_gae",
            "return advantages, advantages + values",
            "return advantages, advantages",
            "The critic's values stay far below the returns, and explained_variance far below that of the sound "
            "script.",
        ),
        Plant(
            "compute_gae",
            "deltas = rewards + gamma * next_values * ~terminated - values",
            "deltas = rewards + gamma * next_values - values",
            "Where episodes end by a time limit nothing is wrong. Where they end in failure, the critic is too "
            "confident shortly before: it sees a future where there is none.",
        ),
    ),
)

pool(
    "hunt-es",
    script="es.py",
    difficulty=2,
    minutes=40,
    hint=DRAWN,
    members=("hunt-10", "hunt-11"),
    plants=(
        Plant(
            "es_gradient",
            "return (plus - minus) @ noise / (len(fitnesses) * sigma)",
            "return (plus + minus) @ noise / (len(fitnesses) * sigma)",
            "theta moves in every generation, and candidates differ in their returns; but the curve wanders, and more "
            "candidates do not help.",
        ),
    ),
)
