"""Small models on disk, made once a session."""

from __future__ import annotations

import pytest

from gpu_runtime.devices.probe import open_probe
from tests import tiny_models


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A causal language model of 0.6 MB. Not to be changed; copy it first."""
    return tiny_models.causal_lm(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory):
    """The same in GGUF, 0.5 MB. Not to be changed; copy it first."""
    return tiny_models.gguf_lm(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def probe():
    """A card and a host of 64 MiB each, simulated."""
    return open_probe("sim:2x64MiB,host:64MiB")
