"""Settings of all tests; what `script` is in a test; and that a test must fail for each of its known mistakes."""

import importlib
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: threads would only fight over the tests' small matrices
for name in ("CI", "BUILD_NUMBER"):  # where they are set, pytest takes minutes to show how two long lists differ
    os.environ.pop(name, None)

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import Phase, settings  # noqa: E402
from tools import with_mistake  # noqa: E402

# No shrinking: it would take its time for each of the known mistakes.
phases = [Phase.explicit, Phase.generate]
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, phases=phases)
settings.load_profile("repeatable")


def pytest_generate_tests(metafunc):
    """tests/test_dqn.py is about dqn.py: `script` is this module, then the module with each mistake in `catches`.

    Where a file says SCRIPT, it is about this one.
    """
    if "script" in metafunc.fixturenames:
        name = getattr(metafunc.module, "SCRIPT", metafunc.module.__name__.split(".")[-1].removeprefix("test_"))
        script = importlib.import_module(name)
        mistakes = getattr(metafunc.function, "mistakes", ())
        ids = [script.__name__, *(mistake.split(": ")[0] for mistake in mistakes)]
        metafunc.parametrize("script", [script, *((script, mistake) for mistake in mistakes)], ids=ids)


def pytest_pyfunc_call(pyfuncitem):
    """With a mistake put into the script, a test passes if it fails."""
    script = pyfuncitem.funcargs.get("script")
    if isinstance(script, tuple):
        given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        given["script"] = with_mistake(*script)
        with pytest.raises(AssertionError):
            pyfuncitem.obj(**given)
        return True


@pytest.fixture(autouse=True)
def one_thread():
    """A script takes all cores for images; the next test has one again."""
    torch.set_num_threads(1)
