"""Messages that read a kernel's memory while no cell runs: it returns before, and may leave afterwards."""

import gc

import pytest
import torch

from gpu_runtime import GpuError
from gpu_runtime.facts import HOST
from gpu_runtime.owner import acquire
from gpu_runtime.owner.kernel import PAUSE_SECONDS, WAIT_SECONDS

from .kernels import FLOATS, Quiet, cell, keep, own


@pytest.fixture
def parked(started, clock):
    """A runtime, its kernel whose tensor is parked, and the tensor."""
    rt, kernel = started(clock=clock)
    kept = keep(kernel, torch.ones(8 * FLOATS))
    rt.park()
    assert set(own(rt)) == {HOST}
    return rt, kernel, kept


@pytest.mark.parametrize("here", [False, True])
def test_the_memory_returns_and_stays_until_the_message_was_handled(parked, here):
    rt, kernel, kept = parked
    if here:
        cell(kernel)
    held = kernel.hold()
    assert set(own(rt)) == {"sim:0"} and float(kept.sum()) == 8 * FLOATS
    with pytest.raises(GpuError):
        rt.park()
    del held
    rt.park()
    assert set(own(rt)) == {HOST}


def test_a_message_that_reads_is_no_use(parked, clock):
    """A page of JupyterLab sends such messages by itself, and made a forgotten notebook young."""
    rt, kernel, _ = parked
    cell(kernel)
    ended = clock()
    clock.advance(600)
    for _ in range(2):
        held = kernel.hold()
        rt.status()
        del held
        rt.status()
        assert kernel.resident.truth().last_used == ended
        rt.park()
    cell(kernel)
    assert kernel.resident.truth().last_used == clock()


def test_a_message_waits_once_for_room_and_then_no_more_for_a_while(parked, clock, monkeypatch):
    """An editor requests a completion for each key; each would also wait for all before it."""
    rt, kernel, _ = parked
    waits = []

    def obtain(session, resident, anchor, timeout):
        waits.append(timeout)
        raise GpuError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(acquire, "obtain", obtain)
        assert kernel.hold() is None and kernel.hold() is None
        clock.advance(PAUSE_SECONDS + 1)
        assert kernel.hold() is None
    assert waits == [WAIT_SECONDS] * 2
    assert "came back from RAM" in cell(kernel)


def test_a_kernel_without_a_lease_has_nothing_to_bring_back(started):
    _, kernel = started()
    assert kernel.hold() is None


@pytest.mark.parametrize("by", ["a message", "a cell"])
def test_a_return_that_failed_at_first_keeps_no_pin(parked, monkeypatch, by):
    """The errors of failed attempts keep their frames, so the kernel was in use a minute after its last cell."""
    rt, kernel, _ = parked
    monkeypatch.setattr("gpu_runtime.owner.kernel.AGAIN_SECONDS", 0.0)
    change, failures = Quiet.change, iter(["a thread runs"] * 3)
    monkeypatch.setattr(Quiet, "change", lambda *args: next(failures, "") or change(*args))
    gc.collect()
    gc.disable()
    try:
        if by == "a cell":
            assert "came back from RAM" in cell(kernel)
        else:
            held = kernel.hold()
            assert set(own(rt)) == {"sim:0"}
            del held
        assert next(failures, None) is None
        assert not kernel.resident.pins
    finally:
        gc.enable()
