"""Fixtures: cards that a fake driver simulates, empty ledgers of each kind, and runtimes and processes on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_runtime import Runtime
from tests.nvml_driver import driver as driver
from tests.nvml_driver import host as host
from tests.nvml_driver import library as library
from tests.redis_server import redis as redis

from .kernels import DEVICES, Kernel


@pytest.fixture
def keeper(tmp_path: Path) -> str:
    """The URL of a ledger with a keeper."""
    return f"keeper://{tmp_path}/ledger"


@pytest.fixture(params=["keeper", "redis"])
def ledger(request: pytest.FixtureRequest) -> str:
    """The URL of a ledger of each kind."""
    found = request.getfixturevalue(request.param)
    return found if request.param == "keeper" else found.fresh()


@pytest.fixture
def devices() -> str:
    return DEVICES


@pytest.fixture
def here(ledger: str, devices: str) -> Iterator[Runtime]:
    """A runtime of this process."""
    with Runtime(devices=devices, ledger=ledger, eviction_grace_seconds=0) as rt:
        yield rt


@pytest.fixture
def kernel(ledger: str, devices: str) -> Iterator[Callable[[], Kernel]]:
    """A function that starts another process on the ledger."""
    made: list[Kernel] = []

    def make() -> Kernel:
        made.append(Kernel(ledger, devices))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def other(kernel: Callable[[], Kernel]) -> Kernel:
    return kernel()
