"""The runbooks run in the tests' isolated state directory, also under a bare `pytest --nbval`.

Loading ahead, the line of a slow load and the copies that stay in RAM depend on the time, so the
recorded outputs are those without them.
"""

import importlib.util
import os

import pytest

from tests import isolation  # noqa: F401 - importing it isolates
from tests.clock import pytest_timeout_set_timer  # noqa: F401 - a hook

# The drill with many hosts needs Ray, which only the extra `fleet` installs.
collect_ignore = [] if importlib.util.find_spec("ray") else ["15_many_hosts.ipynb"]
RECORDED = {"GPU_PREFETCH": "never", "GPU_PROGRESS_SECONDS": "1h", "GPU_SHADOWS": "never"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Ray gives its processes 15 s to start, so its runbook runs alone, in `make soak`."""
    for item in items:
        if item.path.name == "15_many_hosts.ipynb":
            item.add_marker("soak")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Sets these settings while a cell runs. Other tests of the same process keep the defaults.

    pytest calls this hook for the tests of all folders.
    """
    if item.path.suffix != ".ipynb":
        yield
        return
    before = {name: os.environ.get(name) for name in RECORDED}
    os.environ.update(RECORDED)
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
