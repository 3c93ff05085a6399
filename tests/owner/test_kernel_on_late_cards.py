"""A kernel on two late cards (tests/simgpu.py): the ledger's decisions agree with what the cards measure."""

import gc
import io

import pytest
import torch
from msgspec.structs import replace

from gpu_runtime import Busy, GpuError, OutOfMemory
from gpu_runtime.backends.pytorch import search
from gpu_runtime.facts import HOST, Sample, Share
from gpu_runtime.units import MIB
from tests import simgpu
from tests.clock import PATIENCE

from .kernels import FLOATS, cell, own

pytestmark = pytest.mark.thorough

SEGMENT_BYTES = 16 * MIB


@pytest.fixture
def late(started, guards):
    """A runtime and its kernel. The cards do their work late and allocate in segments of 16 MiB."""
    with simgpu.late(segment_bytes=SEGMENT_BYTES):
        yield started(
            probe=simgpu.SimProbe(), gpu_memory_max_percent=1.0, cpu_memory_max_percent=1.0
        )
        gc.collect()


def on(card: int, mib: int, value: float) -> torch.Tensor:
    """A tensor of `mib` MiB on that card, whose work is still pending."""
    return torch.full((mib * FLOATS,), value, device=f"simgpu:{card}")


def reserved_bytes() -> tuple[int, int]:
    return simgpu.cards[0].reserved_bytes, simgpu.cards[1].reserved_bytes


def test_the_shares_of_both_cards_leave_and_return_with_work_pending(late):
    rt, kernel = late
    zero, one = on(0, 20, 1.0), on(1, 30, 2.0)
    cell(kernel)
    held = own(rt)
    assert held == {"simgpu:0": 20 * MIB, "simgpu:1": 30 * MIB}
    for _ in range(3):
        one.add_(zero.to("simgpu:1", non_blocking=True)[0])
        assert rt.park().done
        assert own(rt) == {HOST: 50 * MIB} and reserved_bytes() == (0, 0)
        kernel.begin()
        assert own(rt) == held and not kernel.refusal
        assert (str(zero.device), str(one.device)) == ("simgpu:0", "simgpu:1")
        zero.mul_(2)
        kernel.end()
    assert (float(zero.cpu()[0]), float(one.cpu()[0])) == (8.0, 2.0 + 1 + 2 + 4)


def test_each_card_gives_exactly_its_part_of_the_room_on_the_return(late):
    """The memory returns to both cards: the model on the second must leave, the one on the first may stay."""
    rt, kernel = late
    zero, one = on(0, 20, 1.0), on(1, 30, 2.0)
    cell(kernel)
    rt.park()
    for card, size in ((0, "40MiB"), (1, "40MiB")):
        rt.register(f"m{card}", backend="fake", size=size, devices=(f"simgpu:{card}",))
        rt.preload(f"m{card}")
    cell(kernel)
    assert own(rt) == {"simgpu:0": 20 * MIB, "simgpu:1": 30 * MIB}
    assert rt.here("m0") and not rt.here("m1")
    del zero, one


@pytest.mark.parametrize("full", [0, 1])
def test_a_card_that_is_full_on_the_return_changes_nothing_and_refuses_the_cell(late, full):
    rt, kernel = late
    zero, one = on(0, 20, 1.0), on(1, 30, 2.0)
    cell(kernel)
    held = own(rt)
    rt.park()
    with simgpu.limited(**{f"card{full}": 18 * MIB}):
        for _ in range(2):
            cell(kernel)
            assert "did not run" in str(kernel.refusal) and "parked in RAM" in str(kernel.refusal)
            assert type(kernel.refusal) is OutOfMemory
            assert kernel.refusal.device == f"simgpu:{full}", "the full one, and not the first"
            assert own(rt) == {HOST: 50 * MIB}
            assert (simgpu.used_bytes(0), simgpu.used_bytes(1)) == (0, 0)
    cell(kernel)
    assert not kernel.refusal and own(rt) == held
    assert (float(zero.cpu()[0]), float(one.cpu()[0])) == (1.0, 2.0)


def test_memory_that_no_tensor_holds_stays_and_who_waits_for_it_waits_in_vain(late):
    """A library's own, in C++. It was moved again and again, without an end: its lease never left."""
    rt, kernel = late
    address = simgpu.cards[0].allocate(20 * MIB)
    try:
        cell(kernel)
        assert own(rt) == {"simgpu:0": 20 * MIB}
        with pytest.raises(GpuError, match="none of its bytes left its card"):
            rt.park()
        size = f"{simgpu.CARD_BYTES // MIB - 10}MiB"
        rt.register("big", backend="fake", size=size, devices=("simgpu:0",))
        with pytest.raises(Busy):
            rt.preload("big", timeout=0.1)
        beside = on(0, 10, 3.0)
        cell(kernel)
        assert rt.park().done and own(rt) == {HOST: 10 * MIB}
        cell(kernel)
        assert own(rt) == {"simgpu:0": 30 * MIB} and float(beside.cpu()[0]) == 3.0
        del beside
    finally:
        simgpu.cards[0].free(address)


# -- what runs on the bytes in host memory
def saved(what) -> bytes:
    buffer = io.BytesIO()
    torch.save(what, buffer)
    return buffer.getvalue()


def test_torch_save_reads_parked_tensors_from_host_memory(late):
    """The file is the same as one that is written while the memory is on the card."""
    rt, kernel = late
    both = {"one": on(1, 3, 2.0), "zero": on(0, 2, 1.0)}
    both["view"] = both["one"][5:8]
    cell(kernel)
    here = saved(both)
    rt.park()
    with pytest.raises(RuntimeError, match="parked in RAM"):
        saved(both)
    with kernel.readable():
        assert saved(both) == here
    with pytest.raises(RuntimeError, match="parked in RAM"):
        saved(both)


def test_a_parked_tensor_has_a_stand_in_that_can_be_printed(late):
    rt, kernel = late
    one = on(1, 30, 2.0)
    cell(kernel)
    rt.park()
    with kernel.readable() as stand_in:
        assert stand_in(one)[3:5].tolist() == [2.0, 2.0] and stand_in("text") == "text"
        assert stand_in(one).device.type == "cpu"


def test_the_stand_in_of_a_conjugate_has_its_values(late):
    """torch conjugates without a change of the bytes. In 0.3 the stand-in had the values of the bytes."""
    rt, kernel = late
    one = torch.full((MIB,), 2 + 3j, device="simgpu:0")
    conjugate = one.conj()
    cell(kernel)
    rt.park()
    with kernel.readable() as stand_in:
        assert stand_in(conjugate)[0].item() == 2 - 3j


def test_what_is_deleted_while_it_is_parked_is_free(late):
    rt, kernel = late
    zero, one = on(0, 20, 1.0), on(1, 30, 2.0)
    view = one[:3]
    cell(kernel)
    rt.park()
    del one
    assert kernel.forget_deleted() == "", "a view refers to its bytes"
    del view
    assert kernel.forget_deleted() == "30.0 MiB came free. 20.0 MiB is still parked in RAM."
    assert own(rt) == {HOST: 20 * MIB} and rt.probe.used()[HOST] == 20 * MIB
    cell(kernel)
    assert own(rt) == {"simgpu:0": 20 * MIB} and float(zero.cpu()[0]) == 1.0
    rt.park()
    del zero
    assert "Nothing is parked any more" in kernel.forget_deleted() and own(rt) == {}


def test_a_search_meets_the_guard_of_what_was_deleted_while_it_is_parked(late):
    """`%gpu free NAME` ended with an error of torch, whose traceback kept the guard: no later park succeeded."""
    rt, kernel = late
    zero, one = on(0, 20, 1.0), on(1, 30, 2.0)
    cell(kernel)
    rt.park()
    with kernel.readable():  # the cell keeps what was parked at its begin
        del one
        assert kernel.forget_deleted().startswith("30.0 MiB came free")
        rt.who()
    cell(kernel)
    assert rt.park().done
    del zero


def test_storages_leave_and_return_one_by_one(late):
    """Two notebooks change places in pieces if card and RAM are too full for whole copies."""
    rt, kernel = late
    tensors = [on(1, size, float(size)) for size in (8, 6, 3)]
    cell(kernel)
    backend, handle = kernel.resident.backend, kernel.resident.handle

    def at(card: int, host: int) -> list[tuple[str, int]]:
        shares = (Share("simgpu:1", card * MIB), Share(HOST, host * MIB))
        backend.move(handle, tuple(share for share in shares if share.bytes))
        return [(share.device, share.bytes // MIB) for share in backend.measure(handle)]

    handle.searches = True  # another lease waits in host memory
    kernel.count()
    assert kernel.resident.lease.piece_bytes == 8 * MIB
    assert at(7, 10) == [("simgpu:1", 9), (HOST, 8)], "the largest storages that fit into 10 MiB"
    with pytest.raises(RuntimeError, match="parked in RAM"):
        tensors[0].cpu()
    assert at(3, 14) == [("simgpu:1", 3), (HOST, 14)]
    assert at(9, 8) == [("simgpu:1", 9), (HOST, 8)]
    assert at(0, 17) == [(HOST, 17)] and reserved_bytes()[1] == 0
    assert at(17, 0) == [("simgpu:1", 17)]
    assert [float(one.cpu()[-1]) for one in tensors] == [8.0, 6.0, 3.0]


# -- what is measured ------------------------------------------------------------------------------
class MeasuredProbe(simgpu.SimProbe):
    """A probe whose driver measures the free memory of these cards, as the driver of real cards does."""

    def __init__(self) -> None:
        super().__init__()
        self.devices = tuple(replace(one, simulated=one.is_host) for one in self.devices)
        self.simulated = False

    def samples(self, now: float, fresh: bool = False) -> dict[str, Sample]:
        cards = enumerate(one for one in self.devices if not one.is_host)
        free = {one.id: simgpu.CARD_BYTES - simgpu.cards[n].reserved_bytes for n, one in cards}
        return {card: Sample(card, now, size) for card, size in free.items()}

    def check(self, now: float, stale_seconds: float) -> None:
        """These cards always answer."""


def linear(mib: int, device: str) -> torch.nn.Module:
    """A module of `mib` MiB."""
    module = torch.nn.utils.skip_init(torch.nn.Linear, FLOATS, mib, bias=False, device=device)
    return module.requires_grad_(False)


@pytest.mark.parametrize("stays", [True, False])
def test_if_a_segment_keeps_a_storage_the_next_victim_leaves_too(
    started, guards, monkeypatch, stays
):
    """The park frees 15 MiB less than the lease, by the card's measurement. So an idle model leaves as well."""
    with simgpu.late(segment_bytes=SEGMENT_BYTES):
        rt, kernel = started(
            probe=MeasuredProbe(),
            gpu_memory_max_percent=1.0,
            cpu_memory_max_percent=1.0,
            eviction_grace_seconds=0.0,
        )
        moving = on(0, 15, 1.0)
        staying = torch.full((16,), 2.0, device="simgpu:0")
        rt.adopt("idle", linear(16, "simgpu:0"), importance="high")  # leaves after the kernel
        cell(kernel)
        torch.simgpu.empty_cache()
        assert reserved_bytes()[0] == 2 * SEGMENT_BYTES
        sent = frozenset((staying.untyped_storage()._cdata,) if stays else ())
        monkeypatch.setattr(search, "_sent_to_others", lambda: sent)
        rt.register(
            "wanted",
            lambda: linear(40, "cpu"),
            size="40MiB",
            importance="high",
            devices=("simgpu:0",),
        )
        rt.preload("wanted", timeout=PATIENCE)
        assert rt.here("wanted") and own(rt)[HOST] >= 15 * MIB
        assert rt.here("idle") != stays
        del moving, staying
        rt.close()
        gc.collect()


def test_the_largest_storage_is_looked_for_only_while_another_process_s_lease_waits_in_ram(
    started, runtime, guards, shared_book
):
    """The other lease may have to change places with the notebook's memory in pieces."""
    with simgpu.late(segment_bytes=SEGMENT_BYTES):
        rt, kernel = started(probe=MeasuredProbe(), ledger=shared_book, monitor=False)
        tensors = [on(0, size, 1.0) for size in (8, 3)]
        cell(kernel)
        rt.tick()
        assert kernel.resident.lease.piece_bytes == 0
        other = runtime(ledger=shared_book, monitor=False)
        other.adopt("theirs", linear(1, "cpu"))  # in host memory, and nowhere else
        rt.tick()
        assert kernel.resident.lease.piece_bytes == 8 * MIB
        del tensors
        rt.close()
        gc.collect()
