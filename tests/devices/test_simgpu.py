"""The simulated accelerator for tests with several cards. It must behave as CUDA does.

A program that frees or reads memory before the work on that memory is done is wrong on CUDA. Such a program must
also compute wrong values here. Otherwise the tests that use this accelerator could not fail.
"""

import gc

import pytest
import torch

from tests import simgpu
from tests.simgpu import MIB


@pytest.mark.parametrize("other", ["cpu", "simgpu:0"])
def test_operands_on_two_devices_raise_cudas_error(other):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(4, device="simgpu:1") + torch.ones(4, device=other)


# -- work that is done late ------------------------------------------------------------------------


@pytest.fixture
def late():
    gc.collect()
    with simgpu.late(segment_bytes=2 * MIB):
        yield
        gc.collect()


def card_tensor(value: float, card: int = 0) -> torch.Tensor:
    """A tensor of 1,024 floats on `card`, after all work on it was done."""
    tensor = torch.full((1024,), value, device=f"simgpu:{card}")
    torch.simgpu.synchronize(card)
    return tensor


@pytest.mark.thorough
def test_work_is_done_when_somebody_waits_for_it(late):
    x = card_tensor(1.0)
    y = x + 1
    x.mul_(10)
    assert simgpu.content_now(x)[0] == 1
    torch.simgpu.synchronize(0)
    assert (simgpu.content_now(x)[0], simgpu.content_now(y)[0]) == (10, 2)


@pytest.mark.parametrize(
    "wait", [lambda t: t[0].item(), lambda t: t.cpu(), lambda t: t.nonzero(), lambda t: t.tolist()]
)
def test_a_result_on_the_host_waits_for_its_stream(late, wait):
    x = card_tensor(1.0)
    x.add_(1)
    wait(x)
    assert simgpu.content_now(x)[0] == 2


def test_a_copy_that_does_not_block_is_there_after_a_wait(late):
    """A non-blocking copy reads its source late and writes its target late, in both directions."""
    x, here = card_tensor(1.0), torch.zeros(1024)
    here.copy_(x, non_blocking=True)
    assert here[0] == 0
    torch.simgpu.synchronize(0)
    assert here[0] == 1
    x.copy_(here, non_blocking=True)
    here.fill_(7)  # wrong, and seen as wrong
    assert x.cpu()[0] == 7


def test_streams_are_ordered_by_events_only(late):
    side, other = torch.simgpu.Stream(0), torch.simgpu.Stream(0)
    x = card_tensor(1.0)
    with torch.simgpu.stream(side):
        x.add_(1)
        event = side.record_event()
        x.add_(10)
    with torch.simgpu.stream(other):
        y = x * 2
    other.synchronize()
    assert simgpu.content_now(y)[0] == 2, "nothing ordered the two streams"
    with torch.simgpu.stream(other):
        other.wait_event(event)
        y = x * 2
    other.synchronize()
    assert simgpu.content_now(y)[0] == 4 and event.query()
    assert simgpu.content_now(x)[0] == 2, "what came after the event is not done yet"


def overtaken(records: bool) -> float:
    """The value that a side stream reads from a block of memory, which the main stream has freed and used again.

    With `records`, the block was recorded for the side stream.
    """
    side = torch.simgpu.Stream(0)
    x = card_tensor(1.0)
    address = x.data_ptr()
    with torch.simgpu.stream(side):
        y = x + 1
    if records:
        x.record_stream(side)
    del x
    gc.collect()
    z = torch.full((1024,), 50.0, device="simgpu:0")
    assert (z.data_ptr() == address) is not records
    torch.simgpu.default_stream(0).synchronize()
    torch.simgpu.synchronize(0)
    return float(simgpu.content_now(y)[0])


def test_a_freed_block_is_used_again_under_pending_work_unless_it_was_recorded(late):
    assert overtaken(records=True) == 2
    assert overtaken(records=False) == 51


def test_a_block_goes_to_requests_of_its_own_stream(late):
    side = torch.simgpu.Stream(0)
    x = card_tensor(1.0)
    address = x.data_ptr()
    del x
    with torch.simgpu.stream(side):
        away = torch.empty(1024, device="simgpu:0")
    own = torch.empty(1024, device="simgpu:0")
    assert away.data_ptr() != address == own.data_ptr()
    streams = {s["stream"] for s in torch.simgpu.memory_snapshot() if s["device"] == 0}
    assert streams == {0, side.stream_id}


def test_a_full_card_gives_back_what_is_cached_before_it_refuses(late):
    side = torch.simgpu.Stream(1)
    with simgpu.limited(card1=8 * MIB):
        with torch.simgpu.stream(side):
            cached = torch.empty(6 * MIB, dtype=torch.uint8, device="simgpu:1")
        del cached
        kept = torch.empty(6 * MIB, dtype=torch.uint8, device="simgpu:1")
        with pytest.raises(simgpu.SimOutOfMemory):
            torch.empty(3 * MIB, dtype=torch.uint8, device="simgpu:1")
        assert torch.simgpu.memory_stats(1)["num_ooms"] >= 1
        del kept


def test_a_copy_between_cards_waits_for_the_streams_of_both(late):
    x, y = card_tensor(1.0), card_tensor(0.0, card=1)
    x.add_(1)
    y.copy_(x)
    z = y * 3
    x.zero_()
    assert z.cpu()[0] == 6 and x.cpu()[0] == 0
