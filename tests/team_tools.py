"""What the tests of scripts for teams use: arguments of small runs, and training without a folder."""

import copy
import json
import os
import time
from types import SimpleNamespace
from unittest import mock

import torch

from tests.probes import team_envs

ENVS = "tests.probes.team_envs"
SPREAD = "mpe2.simple_spread_v3"


def arguments(script, env_id=SPREAD, **more):
    """Args for a small run; the id may be the name of one of team_envs.py; env_kwargs may be a dict."""
    small = dict(num_envs=2, num_steps=10, update_epochs=2, eval_episodes=2, progress=False, hidden_sizes=(16, 16))
    small |= dict(data_chunk_length=5, num_minibatches=1, eval_every=10**9, checkpoint_every=10**9) | more
    if isinstance(small.get("env_kwargs"), dict):
        small["env_kwargs"] = json.dumps(small["env_kwargs"])
    return script.Args(env_id=f"{ENVS}:{env_id}" if hasattr(team_envs, env_id) else env_id, **small)


def all_processes_end(group, seconds=20):
    """Whether a process group is empty within some seconds: what has ended is in it until it has been waited for."""
    for _ in range(seconds * 20):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def stir(team):
    """Large and random weights: what comes out depends on what goes in."""
    generator = torch.Generator().manual_seed(0)
    for parameter in team.parameters():
        parameter.data.mul_(2).add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return team


def rehearse_team(script, env_id=SPREAD, stirred=False, evaluates=False, **settings):
    """Train without a folder. Returns the Run: `agent`, every logged figure in `figures`, `evaluations`; `rollouts`,
    each with a copy of the `actors`' buffers and the `critic`'s before the update; and `calls`, what each gradient step
    was given, in order, and the gradient of its loss.
    """
    calls, rollouts = [], []

    class Rehearsal(script.Run):
        open_folder = write_row = write_checkpoint = draw_curve = lambda self: None
        finish = lambda self: self

        def write_evaluation(self):
            if evaluates:
                mean, std = script.evaluate(self.agent, self.args, self.args.eval_episodes)
                self.evaluations.append((self.step, self.seconds, mean, std))

    def watch(name):
        loss = getattr(script, name)

        def watched(network, batch, *rest):
            result = loss(network, batch, *rest)
            total = result[0] if isinstance(result, tuple) else result
            gradient = torch.autograd.grad(total, list(network.parameters()), retain_graph=True)
            kind = "actor" if name == "team_policy_loss" else "critic"
            call = {"kind": kind, "network": network, "batch": batch, "rest": rest, "result": result}
            calls.append(SimpleNamespace(**call, gradient=torch.cat([g.flatten() for g in gradient])))
            return result

        return watched

    def watched_update(update):
        def call(team, optimizers, actors, critic, *rest):
            rollouts.append(SimpleNamespace(actors=copy.deepcopy(actors), critic=copy.deepcopy(critic)))
            update(team, optimizers, actors, critic, *rest)

        return call

    make_agent = script.make_agent
    replaced = {name: watch(name) for name in ("team_policy_loss", "team_value_loss")}
    replaced |= {name: watched_update(getattr(script, name)) for name in ("mappo_update", "happo_update")}
    replaced["make_agent"] = lambda *given: stir(make_agent(*given)) if stirred else make_agent(*given)
    with mock.patch.multiple(script, Run=Rehearsal, **replaced):
        run = script.train(arguments(script, env_id, **settings))
    run.calls, run.rollouts = calls, rollouts
    return run


def played(script, env_id=SPREAD, rollouts=1, **settings):
    """A Run of so many rollouts that changed no weight, as rehearse_team returns it, of large weights."""
    steps = settings.get("num_envs", 2) * settings.get("num_steps", 10)
    total = (rollouts - 1) * steps + 1  # with reset rows there may be one more
    return rehearse_team(script, env_id, stirred=True, total_timesteps=total, learning_rate=0.0, **settings)
