"""A run folder with a file that cannot be read: one line that names the file, and exit code 2."""

import importlib
from pathlib import Path

import pytest
from run_folder import command

SMALL = {"ppo": "--num-steps 16 --num-minibatches 2", "dqn": "--learning-starts 32", "qlearning": ""}
READERS = {"checkpoint": "--resume {}", "best": "--evaluate {}", "config": "--config {}/config.json"}


@pytest.mark.parametrize("name", SMALL)
def test_unreadable_files(name, tmp_path, capsys):
    """In the place of each, one after the other: an empty file, one that nobody but root may read, a folder."""
    script, flags = importlib.import_module(name), f"{SMALL[name]} --total-timesteps 64 --max-episode-steps 9"
    assert command(script, f"{flags} --eval-episodes 1 --no-progress --run-dir {tmp_path}") == 0
    for file, reader in READERS.items():
        (path,) = tmp_path.rglob(f"{file}.*")
        for spoil in (Path.touch, lambda path: path.touch(mode=0), Path.mkdir):
            path.unlink()
            spoil(path)
            assert command(script, f"{reader.format(tmp_path)} --no-progress") == 2
            assert str(path) in capsys.readouterr().err.splitlines()[-1]
