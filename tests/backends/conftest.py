"""Fixtures for the backends: small models on disk, made once per session, and simulated devices."""

import functools
import os
from types import FunctionType
from typing import Any

import pytest

from gpu_runtime.devices.probe import open_probe
from tests import tiny_models


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """The directory of a causal language model of 0.6 MB. A test must not change it, only a copy of it."""
    return tiny_models.causal_lm(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory):
    """The path of a GGUF model of 0.5 MB. A test must not change it, only a copy of it."""
    return tiny_models.gguf_lm(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def probe():
    """A probe with two simulated cards and a simulated host of 64 MiB each."""
    return open_probe("sim:2x64MiB,host:64MiB")


@pytest.fixture(autouse=True)
def users_mode(monkeypatch):
    """Opens a mode of torch around each call of a backend: BACKENDS_IN_MODE, set by test_user_modes.py."""
    name = os.environ.get("BACKENDS_IN_MODE")
    if name is None:
        return
    import torch

    from gpu_runtime.backends.pytorch.kernel_memory import KernelBackend
    from gpu_runtime.backends.pytorch.torch_backend import TorchBackend
    from gpu_runtime.backends.pytorch.transformers_backend import TransformersBackend
    from tests.user_modes import MODES

    def as_written(factory: Any) -> Any:
        """The `factory` with the dtype for which the test was written. A factory is user's code."""

        @functools.wraps(factory)
        def call(*args: Any, **named: Any) -> Any:
            usual = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)
            try:
                return factory(*args, **named)
            finally:
                torch.set_default_dtype(usual)

        return call

    def in_mode(method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **named: Any) -> Any:
            given = [as_written(one) if isinstance(one, FunctionType) else one for one in args]
            with MODES[name]():
                return method(*given, **named)

        return call

    for kind in (KernelBackend, TorchBackend, TransformersBackend):
        for method, value in list(vars(kind).items()):
            if isinstance(value, FunctionType) and not method.startswith("_"):
                monkeypatch.setattr(kind, method, in_mode(value))
