"""Settings of all tests, and what `script` is in a test."""

import importlib
from pathlib import Path

import torch
from hypothesis import settings

torch.set_num_threads(1)  # the matrices of the tests are small: threads would only fight over them
# The same examples in every run, and no deadline: a result must not depend on luck or on how busy the machine is.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


def pytest_generate_tests(metafunc):
    """A test gets as `script` the script that its file is named after: tests/by_hand/test_ppo.py is about ppo.py.

    Marked `shared("compute_gae", …)`, it runs for every script that has all of these names.
    """
    if "script" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("shared")
    if marker is None:
        scripts = [importlib.import_module(Path(metafunc.module.__file__).stem.removeprefix("test_"))]
    else:
        paths = sorted(Path(__file__).parent.parent.glob("*.py"))
        paths = [path for path in paths if "\n# ===== run" in path.read_text(encoding="utf-8")]
        modules = [importlib.import_module(path.stem) for path in paths]
        scripts = [module for module in modules if all(hasattr(module, name) for name in marker.args)]
    metafunc.parametrize("script", scripts, ids=[module.__name__ for module in scripts])
