"""Run a student's file: check.py starts this in a process of its own, in an empty folder with a copy of the file.

    python runner.py REQUEST

Each answer is a line of JSON on the standard output, written at once; what the student's code prints goes to stderr.
check.py takes nothing else from here. So whatever the code does to this process, it does to its own answers only.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

from mechanism import BadInput, answer, explained, find, load, load_tables


def trained(module, folder=None, **settings):
    """Run a script's train from beginning to end, quietly. Returns its Run, or what a small script's train returns.

    Only `settings` and the defaults of Args count, not the script's TUNED. Without a folder nothing is left behind.
    """
    if not hasattr(module, "Run"):
        return module.train(module.Args(**settings))
    if folder is None:
        with tempfile.TemporaryDirectory() as folder:
            return trained(module, folder, **settings)
    runs = []

    class Quiet(module.Run):
        def __init__(self, *args, **parts):
            with contextlib.redirect_stdout(io.StringIO()):
                super().__init__(*args, **parts)
            runs.append(self)

        def draw_curve(self):
            pass

        def start(self, *args, **parts):
            with contextlib.redirect_stdout(io.StringIO()):
                return super().start(*args, **parts)

        def finish(self):
            with contextlib.redirect_stdout(io.StringIO()):
                return super().finish()

    once = {"eval_every": 10**9, "checkpoint_every": 10**9}  # at the end
    args = module.Args(**once | settings, run_dir=f"{folder}/run", progress=False)
    with mock.patch.object(module, "Run", Quiet), mock.patch.dict(vars(module), draw_values=lambda *given: None):
        module.train(args)
    return runs[0]


def learn(module, settings):
    """Train, and leave the weights in the folder `run`."""
    agent = trained(module, ".", **settings)
    if not hasattr(module, "Run"):
        import torch

        Path("run").mkdir()
        torch.save(agent.state_dict(), "run/checkpoint.pt")


def score(module, settings):
    """(mean, standard deviation) of an evaluation of what a run has left, by this module, mostly the original."""
    args = module.Args(**settings)
    try:
        if hasattr(module, "Run"):
            agent = module.make_agent(args, module.make_envs(args, 1))
            module.read_parts(f"run/checkpoint{module.SUFFIX}", {"agent": agent})
            return module.evaluate(agent, args, args.eval_episodes, args.seed + 10_000)
        import torch

        agent = module.make_agent(args)
        agent.load_state_dict(torch.load("run/checkpoint.pt", weights_only=True))
    except (ValueError, RuntimeError, OSError) as error:
        raise BadInput(f"what your run has saved does not fit the script's own networks: {error}") from None
    return module.evaluate(agent, args)


def main():
    """Do what the request says, and write answers."""
    request = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    load_tables()
    task = find(request["task"])

    def write(**found):
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    write(begun=True)  # from here on time counts
    try:
        module = load(request["script"])
        write(loaded=True)
    except BadInput as error:
        write(refused=str(error))
    else:
        try:
            if request["what"] == "learn":
                write(result=learn(module, task.learn[0]))
            elif request["what"] == "score":
                write(result=score(module, task.learn[0]))
            else:
                for case in task.calls()[request["first"] :]:
                    write(**answer(case.call, module, task.blanks))
        except (Exception, SystemExit) as error:
            write(error=explained(error, module))
    sys.stdout.flush()
    os._exit(0)  # nothing that the student's code has put off until the end happens


if __name__ == "__main__":
    main()
