"""Make demonstrations for ppod.py: play by keyboard, let a trained agent play, or take a Minari dataset.

    python demos/record.py --env-id MiniGrid-DoorKey-8x8-v0                          # by keyboard, the keys are shown
    python demos/record.py --from-run runs/DIR --num-agent-demos-to-save 3           # good episodes of a trained agent
    python demos/record.py --from-minari DATASET --env-id ENV                        # pip install minari

Good episodes (a return of at least --initial-reward-threshold; if there is none, a positive one), and all episodes of
a dataset, become .npz files in --target-agent-demos-dir, by default my_demos/ENV_ID. ppod.py trains from all demos in
the folder that --initial-human-demos-dir names. They have to be of the same environment. All flags but those below are
ppod.py's own, TUNED included: --env-kwargs, --wrappers, --max-episode-steps, --seed, … The environment and the format
of the files are the script's, which is loaded from the file that --script names.
"""

import argparse
import importlib.util
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import gymnasium as gym
import numpy as np

SCRIPT = Path(__file__).resolve().parent.parent / "ppod.py"

# Keys by the beginning of the environment's id: (key -> action, action if no key is held). Without the latter, time
# stands still until a key is pressed. Discrete actions of all others are on the keys 0 to 9.
MINIGRID = {"a": 0, "d": 1, "w": 2, "p": 3, "x": 4, " ": 5}, None
KEYS = {"MiniGrid": MINIGRID, "BabyAI": MINIGRID, "MountainCar-": ({"a": 0, "d": 2}, 1)}
MOST_EPISODES = 100  # that an agent plays in search of good ones
MOST_STEPS = 27_000  # of an episode that has no end of its own


def load_script(path):
    """The script at `path` as a module. It is executed: this is for a file of one's own, given on the command line."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # `tuned` looks there for its docstring
    spec.loader.exec_module(script)
    return script


def command_line():
    """The flags, without a comment: cmd.exe and zsh hand it over with them."""
    flags = sys.argv[1:]
    return flags[: flags.index("#")] if "#" in flags else flags


def folder_for(args):
    """Where demos go. Not into demos/: ppod.py trains from all that it finds there."""
    return Path(args.target_agent_demos_dir or f"my_demos/{re.sub('[/:]', '-', args.env_id)}")


def free_path(folder):
    """The first of 0.npz, 1.npz, … that does not exist yet."""
    number = 0
    while (folder / f"{number}.npz").exists():
        number += 1
    return folder / f"{number}.npz"


class Recorder(gym.Env):
    """One environment of the script's that saves each good episode as a demo in a folder.

    Good: the return reaches initial_reward_threshold, or is positive if that is not given.
    """

    def __init__(self, script, args, render_mode=None):
        self.script = script
        self.args = args
        kwargs = json.loads(args.env_kwargs) | ({"render_mode": render_mode} if render_mode else {})
        self.envs = script.make_envs(replace(args, env_kwargs=json.dumps(kwargs)), 1)
        self.observation_space = self.envs.single_observation_space
        self.action_space = self.envs.single_action_space
        self.metadata = self.envs.metadata
        self.render_mode = render_mode
        self.folder = folder_for(args)
        self.saved = 0
        self.seed = args.seed  # of the first episode; later ones go on from there

    def reset(self, *, seed=None, options=None):
        """Begin an episode, and forget the one before if it has not ended."""
        obs, info = self.envs.reset(seed=self.seed)
        self.seed = None
        self.obs = [obs[0]]
        self.actions = []
        self.rewards = []
        return obs[0], info

    def step(self, action):
        """As the environment's; an episode that ends with it is saved, if it is good."""
        obs, rewards, terminated, truncated, info = self.envs.step(np.array([action]))
        self.obs.append(obs[0])
        self.actions.append(action)
        self.rewards.append(rewards[0])
        if terminated[0] or truncated[0]:
            self.keep(terminated[0])
        return obs[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), info

    def keep(self, terminated):
        """Save the episode if it is good, and say so."""
        actions = self.script.from_env(np.array(self.actions), self.action_space)
        rewards = np.array(self.rewards, np.float32)
        demo = self.script.as_demo(np.array(self.obs), actions, rewards, terminated)
        note = ""
        if self.script.is_good(demo.total, self.args.initial_reward_threshold):
            path = free_path(self.folder)
            self.script.save_demo(path, demo, self.args, self.action_space)
            self.saved += 1
            note = f" -> {path}"
        print(f"return {demo.total:.3f} in {len(self.rewards)} steps{note}")

    def render(self):
        """A picture of the environment."""
        return self.envs.render()[0]


def check_display(script):
    """UserError if there is no screen to play on: pygame would draw nowhere, and wait for keys for ever."""
    without = script.UserError(
        "there is no display to play on; without one: --from-run RUN_DIR or --from-minari DATASET"
    )
    asked_for = os.environ.get("SDL_VIDEODRIVER")  # who names a driver knows what he does
    has_screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.platform.startswith("linux") and not (asked_for or has_screen):
        raise without
    try:
        import pygame
    except ImportError as error:
        raise script.UserError("playing needs another package: pip install pygame") from error
    try:
        pygame.display.init()
    except pygame.error:
        raise without from None
    if pygame.display.get_driver() in ("dummy", "offscreen") and not asked_for:
        raise without


def record_by_keyboard(script, args):
    """Let a person play until he presses escape."""
    recorder = Recorder(script, args, "rgb_array")
    space = recorder.action_space
    if not isinstance(space, gym.spaces.Discrete):
        raise script.UserError(f"{args.env_id} has {space}; by keyboard one plays Discrete actions only")
    check_display(script)
    digits = {str(i): int(space.start) + i for i in range(min(int(space.n), 10))}, None
    keys, noop = next((entry for prefix, entry in KEYS.items() if args.env_id.startswith(prefix)), digits)
    names = action_names(recorder.envs.unwrapped.envs[0].unwrapped)
    for key, action in keys.items():
        print(f"{'space' if key == ' ' else key:>6}  action {action} {names.get(action, '')}")
    print("escape  stop; good episodes are saved in", recorder.folder)
    from gymnasium.utils.play import play  # needs pygame

    waits = noop is None
    play(recorder, keys_to_action=keys, noop=int(space.start) if waits else noop, wait_on_player=waits)


def action_names(env):
    """{action: name} of an environment that names its actions, as MiniGrid's do, in an enumeration `actions`."""
    members = getattr(getattr(env, "actions", None), "__members__", {})
    return {int(action): name for name, action in members.items()}


def record_from_run(script, run_dir, flags):
    """Let the agent of a run play until enough good episodes are saved, or MOST_EPISODES have been played."""
    model = script.tuned("--evaluate", run_dir, *flags).model
    agent = script.load(run_dir, model, *flags)
    recorder = Recorder(script, agent.args)
    for _ in range(MOST_EPISODES):
        obs, _ = recorder.reset()
        agent.begin_episodes(1)
        for _ in range(MOST_STEPS):
            obs, _, terminated, truncated, _ = recorder.step(agent.act(obs[None])[0])
            if terminated or truncated:
                break
        if recorder.saved >= agent.args.num_agent_demos_to_save:
            return
    print(f"only {recorder.saved} of {MOST_EPISODES} episodes were good: see --initial-reward-threshold")


def record_from_minari(script, args, name):
    """Make a demo file of every episode of a local Minari dataset, good or not; of none if one does not fit."""
    try:
        import minari
    except ImportError as error:
        raise script.UserError("--from-minari needs another package: pip install minari") from error
    try:
        dataset = minari.load_dataset(name)
    except Exception as error:  # it can raise anything
        raise script.UserError(f"cannot load the Minari dataset {name}: {error}") from error
    envs = script.make_envs(args, 1)
    observation_space, action_space = envs.single_observation_space, envs.single_action_space
    demos = []
    with TemporaryDirectory() as folder:
        path = Path(folder, "demo.npz")
        for episode in dataset.iterate_episodes():
            obs = episode.observations["image"] if isinstance(episode.observations, dict) else episode.observations
            rewards = np.asarray(episode.rewards, np.float32)
            try:
                actions = script.from_env(np.asarray(episode.actions), action_space)
                demo = script.as_demo(np.asarray(obs), actions, rewards, episode.terminations[-1])
                script.save_demo(path, demo, args, action_space)
                demos.append(script.read_demo(path, args, observation_space, action_space))  # does it fit?
            except (ValueError, script.UserError) as error:
                reason = error.__cause__ or error  # read_demo's own line names the temporary file
                raise script.UserError(f"{name}, episode {episode.id} does not fit {args.env_id}: {reason}") from error
    for demo in demos:
        script.save_demo(free_path(folder_for(args)), demo, args, action_space)
    print(f"{len(demos)} demos -> {folder_for(args)}")


def main():
    """The command line. What the user can mend is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--script", default=SCRIPT, help="ppod.py, or a changed copy of it")
    parser.add_argument("--from-run", metavar="RUN_DIR", help="let the agent of this run play")
    parser.add_argument("--from-minari", metavar="DATASET", help="make demos of this local Minari dataset")
    given, flags = parser.parse_known_args(command_line())
    path = Path(given.script)
    script = load_script(path) if path.is_file() and path.suffix == ".py" else None
    if not hasattr(script, "as_demo"):
        print(f"{sys.argv[0]}: --script {path} is not ppod.py, nor a changed copy of it", file=sys.stderr)
        sys.exit(2)
    try:
        if given.from_run:
            record_from_run(script, given.from_run, flags)
            return
        args = script.tuned(*flags)
        if given.from_minari:
            record_from_minari(script, args, given.from_minari)
        else:
            record_by_keyboard(script, args)
    except script.UserError as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
