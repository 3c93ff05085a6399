"""Fixtures for the backends: small models on disk, made once per session, and simulated devices."""

from __future__ import annotations

import pytest

from gpu_runtime.devices.probe import open_probe
from tests import tiny_models


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """The directory of a causal language model of 0.6 MB. A test must not change it, only a copy of
    it.
    """
    return tiny_models.causal_lm(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory):
    """The path of a GGUF model of 0.5 MB. A test must not change it, only a copy of it."""
    return tiny_models.gguf_lm(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def probe():
    """A probe with two simulated cards and a simulated host of 64 MiB each."""
    return open_probe("sim:2x64MiB,host:64MiB")
