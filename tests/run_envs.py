"""Moved to tests/runs/run_envs.py; what stands there is also found here, for tests that have not been brought over."""

from pathlib import Path

exec(Path(__file__).with_name("runs").joinpath("run_envs.py").read_text(encoding="utf-8"))
