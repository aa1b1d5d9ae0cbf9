"""Make a moving picture (GIF, less than 1 MB) of the best agent of each run folder.

    python demos/film.py runs/LANDER runs/SPREAD [--folder docs/films] [--height 180] [--frames 120]
    python demos/film.py runs/MINE --env-id my_env:Line-v0

The script of the run films an episode (--evaluate --capture-video). Other flags are the script's, for every run; give
them last. The picture is made smaller and its frames fewer until the GIF, which has the name of the run folder, is
below 1 MB.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import imageio.v3 as imageio
from PIL import Image
from record import command_line

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 1_000_000  # bytes


def film(run_dir, flags):
    """The frames of an episode that the best agent of a run plays, and how many of them are a second."""
    script = json.loads(Path(run_dir, "config.json").read_text(encoding="utf-8"))["script"]
    command = [sys.executable, str(ROOT / f"{script}.py"), "--evaluate", run_dir, "--capture-video", *flags]
    code = subprocess.run(command).returncode
    if code != 0:  # the script has said why
        sys.exit(code)
    path = max(Path(run_dir, "videos").glob("*/*.mp4"), key=lambda path: path.stat().st_mtime)
    return [Image.fromarray(frame) for frame in imageio.imread(path)], imageio.immeta(path)["fps"]


def write_gif(frames, fps, path, height, most):
    """Write at most so many of the frames, equally far apart, as a GIF of this height; as long as the episode was."""
    step = -(-len(frames) // most)
    small = []
    for frame in frames[::step]:
        frame = frame.resize((round(frame.width * height / frame.height), height), Image.Resampling.LANCZOS)
        small.append(frame.quantize(64, dither=Image.Dither.NONE))
    path.parent.mkdir(parents=True, exist_ok=True)
    duration = max(20, round(1000 * step / fps))  # of a frame, in ms; browsers show none shorter
    small[0].save(path, save_all=True, append_images=small[1:], duration=duration, loop=0, optimize=True)


def main():
    """Film the agents, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run_dirs", nargs="+")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs/films")
    parser.add_argument("--height", type=int, default=180, help="of the picture, in pixels")
    parser.add_argument("--frames", type=int, default=120, help="at most so many")
    args, flags = parser.parse_known_args(command_line())
    names = [Path(run_dir).resolve().name for run_dir in args.run_dirs]
    for run_dir, name in zip(args.run_dirs, names):  # before the first is filmed
        if not Path(run_dir, "config.json").is_file():
            parser.exit(2, f"{parser.prog}: {run_dir} holds no run: there is no config.json\n")
        if names.count(name) > 1:
            parser.exit(2, f"{parser.prog}: two folders have the name {name}, and so would their films\n")
    for run_dir, name in zip(args.run_dirs, names):
        frames, fps = film(run_dir, flags)
        path = args.folder / f"{name}.gif"
        height, most = args.height, args.frames
        write_gif(frames, fps, path, height, most)
        while path.stat().st_size > LARGEST:
            height, most = round(0.85 * height), round(0.9 * most)
            write_gif(frames, fps, path, height, most)
        print(f"{path}: {path.stat().st_size:,} bytes, of {len(frames)} frames")


if __name__ == "__main__":
    main()
