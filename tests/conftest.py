"""Common ground of all tests: no settings from outside, no network for models, a state directory of their own."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time

import pytest
from hypothesis import HealthCheck, settings

from gpu_runtime.settings import Settings
from tests import soak

# Set when this file is imported, so that kernels and other processes of any fixture inherit it.
for name in Settings.model_fields:
    os.environ.pop(name.upper(), None)
# A short path: it contains sockets, whose paths may have at most 107 bytes.
_home = tempfile.mkdtemp(prefix="gpu-")
atexit.register(shutil.rmtree, _home, ignore_errors=True)
os.environ.update(
    XDG_STATE_HOME=f"{_home}/state",
    XDG_CONFIG_HOME=f"{_home}/config",
    IPYTHONDIR=f"{_home}/ipython",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)

_began = time.monotonic()

# The ordinary run judges a change, so it tries the same examples each time. `make soak` searches for new ones.
settings.register_profile("ordinary", deadline=None, derandomize=True)
settings.register_profile(
    "soak",
    deadline=None,
    max_examples=10_000,
    stateful_step_count=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ordinary")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A MonkeyPatch to set environment variables; no setting is in the environment."""
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked gpu if there is no GPU."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if on_gpu else ""
    if reason:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Appends the result of a soak run to its log."""
    if os.environ.get("SOAK"):
        stats = terminalreporter.stats
        soak.write(
            len(stats.get("passed", ())),
            len(stats.get("failed", ())) + len(stats.get("error", ())),
            time.monotonic() - _began,
        )


def _why_no_gpu() -> str:
    """Why tests marked gpu cannot run here; empty if they can."""
    try:
        import torch
    except ImportError as error:
        return f"needs an NVIDIA GPU; torch cannot be imported: {error}"
    if torch.version.cuda is None:
        return "needs an NVIDIA GPU; this torch is a CPU build"
    return "" if torch.cuda.is_available() else "needs an NVIDIA GPU; torch finds none"
