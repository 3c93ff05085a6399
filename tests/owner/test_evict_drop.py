"""`evict` with `drop` empties host memory too, and `*` names every idle model."""

from __future__ import annotations

import pytest

from .conftest import fakes
from .conftest import where as places


def where(rt):
    """The places of the models that are not on disk."""
    return {name: place for name, place in places(rt).items() if place != "disk"}


def test_a_dropped_model_leaves_host_memory(runtime):
    rt = runtime()
    fakes(rt, a="8GiB", b="8GiB")
    for name in ("a", "b"):
        rt.preload(name)
    rt.evict("a")
    assert rt.evict("a", drop=True).where == "disk"
    assert rt.evict("b", drop=True).bytes == 8 << 30
    assert where(rt) == {}
    with rt.use("a"):
        assert where(rt) == {"a": "sim:0"}


def test_a_model_that_exists_nowhere_else_stays_in_host_memory(runtime):
    """The weights of this model have no source, so `drop` only moves them to host memory."""
    torch = pytest.importorskip("torch")
    rt = runtime()
    rt.adopt("mine", torch.nn.Linear(4, 4).eval())
    rt.preload("mine")
    for _ in range(2):
        rt.evict("mine", drop=True)
        assert where(rt) == {"mine": "host"}


def test_all_idle_models_of_all_processes_leave(runtime, shared_book):
    first, second = runtime(ledger=shared_book), runtime(ledger=shared_book)
    fakes(first, a="4GiB", used="4GiB", kept="4GiB")
    fakes(second, b="4GiB")
    for rt, name in ((first, "a"), (first, "kept"), (second, "b")):
        rt.preload(name)
    first.pin("kept")
    with first.use("used"):
        second.evict("*")
        assert where(first) == {"a": "host", "used": "sim:0", "kept": "sim:0", "b": "host"}
        second.evict("*", drop=True)
        assert where(first) == {"used": "sim:0", "kept": "sim:0"}
