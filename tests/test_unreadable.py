"""A run folder with a file that cannot be read: one line that names the file, and exit code 2."""

import importlib
import shutil
from pathlib import Path

import pytest
from run_folder import command

RUN = "--total-timesteps 64 --eval-episodes 1 --max-episode-steps 9 --no-progress"
SMALL = {"ppo": "--num-steps 16 --num-minibatches 2", "dqn": "--learning-starts 32", "qlearning": ""}
READERS = {"checkpoint": "--resume {}", "best": "--evaluate {}", "config": "--config {}/config.json"}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("file", READERS)
def test_unreadable_file(name, file, tmp_path, capsys):
    """In its place is a folder, an empty file, or one that nobody (but root) may read."""
    script = importlib.import_module(name)
    assert command(script, f"{SMALL[name]} {RUN} --run-dir {tmp_path}") == 0
    (path,) = tmp_path.rglob(f"{file}.*")
    for spoil in (Path.mkdir, Path.touch, lambda path: path.touch(mode=0)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        spoil(path)
        capsys.readouterr()
        assert command(script, f"{READERS[file].format(tmp_path)} --no-progress") == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and str(path) in err and "damaged" in err
