"""Evolution strategies, slow and obvious (Salimans et al. 2017, arXiv 1703.03864).

Candidate by candidate, episode by episode, step by step. test_es.py compares es.py with it.
"""

import numpy as np
import torch

from es import first_theta


def train(args, world, discrete):
    """What `train` of es.py does with three pairs of candidates, in environments that `world` makes.

    `discrete`: two actions, 1 and 2, or else one number in [0, 2]. Returns theta, the metrics of each generation, the
    (step, return) of all candidates, and the observations that were acted upon.
    """
    sizes = [2, *args.hidden_sizes, 2 if discrete else 1]
    torch.manual_seed(args.seed)
    theta = first_theta(sizes).double().numpy()
    m, v, metrics, episodes, all_seen, step = 0, 0, [], [], [], 0

    def outputs_of(parameters, obs):
        x, first = np.array(obs, float), 0
        if args.normalize_obs and all_seen:
            x = (x - np.mean(all_seen, 0)) / np.std(all_seen, 0)
        x = x.clip(-10, 10) if args.normalize_obs else x
        for layer, (inputs, outputs) in enumerate(zip(sizes, sizes[1:])):
            weights = parameters[first : first + inputs * outputs].reshape(outputs, inputs)
            first += inputs * outputs + outputs
            x = weights @ (np.tanh(x) if layer > 0 else x) + parameters[first - outputs : first]
        return x

    for generation in range(args.num_generations):
        words = np.random.SeedSequence([args.seed, generation]).generate_state(3 + 3 * args.episodes_per_candidate)
        noise = [np.random.default_rng(word).standard_normal(len(theta), np.float32) for word in words[:3]]
        returns, seen = np.zeros(6), []
        for i in range(6):
            candidate = theta + (args.sigma if i % 2 == 0 else -args.sigma) * noise[i // 2]
            for episode in range(args.episodes_per_candidate):
                seeds, env, over = words[3 + 3 * episode : 6 + 3 * episode], world(), False
                rng, (obs, _) = np.random.default_rng(seeds), env.reset(seed=int(seeds[i // 2]))
                while not over:
                    seen.append(obs)
                    draws = (rng.gumbel if discrete else rng.standard_normal)(size=(6, sizes[-1]))
                    outputs = outputs_of(candidate, obs) + args.action_noise * draws[i]
                    action = 1 + outputs.argmax() if discrete else np.tanh(outputs) + 1
                    obs, reward, terminated, truncated, _ = env.step(action)
                    returns[i] += reward / args.episodes_per_candidate
                    step, over = step + 1, terminated or truncated
        all_seen += seen
        episodes += [(step, value) for value in returns]
        fitnesses = returns if args.fitness == "raw" else [np.sum(returns < x) / 5 - 0.5 for x in returns]
        gradient = sum((fitnesses[2 * k] - fitnesses[2 * k + 1]) * noise[k] for k in range(3)) / (6 * args.sigma)
        ascent, t = gradient - args.weight_decay * theta, generation + 1
        m, v = 0.9 * m + 0.1 * ascent, 0.999 * v + 0.001 * ascent**2
        adam = args.learning_rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-5)
        change = adam if args.optimizer == "adam" else args.learning_rate * ascent
        theta = theta + change
        metrics.append([returns.mean(), returns.std(), returns.max(), *map(np.linalg.norm, (gradient, change, theta))])
    return theta, metrics, episodes, all_seen
