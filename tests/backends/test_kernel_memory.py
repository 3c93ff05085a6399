"""A notebook's memory on late cards (tests/simgpu.py), where a step in the wrong order computes a wrong value."""

import contextlib
import gc
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runtime.backends.base import NotStill
from gpu_runtime.backends.pytorch import kernel_memory, old_torch, search, shadows, streams
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.facts import HOST, Share
from gpu_runtime.units import MIB
from tests import simgpu
from tests.clock import PATIENCE

TO_HOST = (Share(HOST, 1),)

PARKED = "parked in RAM"


class Still:
    """A stand-in for the kernel's activity: nothing runs in it."""

    def __init__(self) -> None:
        self.at_exchange: Callable[[], str] = lambda: ""

    def why_not(self) -> str:
        return ""

    def mark(self) -> object:
        return 0

    def change(self, mark: object, act: Callable[[], None]) -> str:
        if why := self.at_exchange():
            return why
        act()
        return ""


class Kernel:
    """The backend `kernel`, and the handle of the memory that this process holds on cards of one `kind`."""

    def __init__(self, kind: str = "simgpu") -> None:
        simulated = kind == "sim"
        probe = open_probe("sim:1GiB,host:1GiB") if simulated else simgpu.SimProbe()
        self.card = "cpu" if simulated else "simgpu:0"
        self.back = (Share(f"{kind}:0", 1),)
        self.backend = open_backend("kernel", probe)
        self.still = Still()
        self.handle = self.backend.open(self.still, lambda: ())

    def park(self) -> None:
        self.backend.move(self.handle, TO_HOST)

    def unpark(self) -> None:
        self.backend.move(self.handle, self.back)

    @property
    def bytes(self) -> dict[str, int]:
        return {share.device: share.bytes for share in self.backend.measure(self.handle)}


@pytest.fixture(autouse=True)
def _late(guards):
    gc.collect()
    assert all(simgpu.used_bytes(card) == 0 for card in range(simgpu.CARDS)), "of another test"
    with simgpu.late(segment_bytes=2 * MIB):
        yield
        gc.collect()


@pytest.fixture
def kernel():
    return Kernel()


def floats(value: float, card: int = 0, count: int = 1024) -> torch.Tensor:
    """A tensor full of `value` on that card. The work that fills it is done."""
    tensor = torch.full((count,), value, device=f"simgpu:{card}")
    torch.simgpu.synchronize(card)
    return tensor


def test_bytes_whose_count_is_being_recorded_leave_a_moment_later(kernel):
    x = floats(2.0)
    recorded = iter([True, False])

    class Gate(contextlib.nullcontext):
        def locked(self) -> bool:
            return next(recorded)

    kernel.handle.gate = Gate()
    kernel.park()
    assert kernel.bytes == {HOST: x.nbytes} and next(recorded, None) is None


def side_stream() -> torch.Stream:
    return torch.simgpu.Stream(0)


def test_pending_work_is_done_before_the_copy_and_the_copy_before_the_exchange(kernel):
    x = floats(1.0)
    x.add_(1)
    with torch.simgpu.stream(side := side_stream()):
        y = floats(5.0)
        y.mul_(2)
    kernel.park()
    assert side.queue.done == side.queue.launched
    kernel.unpark()
    assert (x.cpu()[0], y.cpu()[0]) == (2, 10)
    x = floats(3.0)
    queue = simgpu.cards[0].queue(0)
    seen = []

    def pending() -> str:
        seen.append(queue.launched - queue.done)
        return ""

    kernel.still.at_exchange = pending
    kernel.park()
    assert {float(one.copy.view(torch.float32)[0]) for one in kernel.handle.away} == {3, 10}
    kernel.unpark()
    assert seen == [0, 0] and simgpu.content_now(x)[0] == 3


def test_parked_bytes_raise_what_to_type_and_free_the_card(kernel):
    x = floats(1.0, count=MIB)
    view = x[5:]
    kernel.park()
    kernel.unpark()
    gc.collect()  # torch's first call of an operator leaves a cycle with its operands
    kernel.park()
    assert simgpu.used_bytes(0) == 0 and simgpu.SimProbe().used()["simgpu:0"] == 0
    assert kernel.bytes == {HOST: 4 * MIB}
    for act in (lambda: x + 1, lambda: view.cpu(), lambda: x.data_ptr()):
        with pytest.raises(RuntimeError, match=PARKED):
            act()
    kernel.unpark()
    assert kernel.bytes == {"simgpu:0": 4 * MIB} and view.cpu()[0] == 1


def test_bytes_return_to_blocks_of_their_own_streams(kernel):
    main = floats(1.0)
    with torch.simgpu.stream(side := side_stream()):
        other = floats(2.0)
    kernel.park()
    kernel.unpark()
    segments = torch.simgpu.memory_snapshot()
    addresses = [main.data_ptr(), other.data_ptr()]
    assert streams.homes(addresses, segments) == [0, side.stream_id]


def test_a_returned_block_is_not_reused_under_the_work_of_a_stream_that_it_was_recorded_on(kernel):
    """A tensor recorded on a side stream leaves, returns, is used there, and is freed."""
    side, x = side_stream(), floats(1.0)
    x.record_stream(side)
    kernel.park()
    kernel.unpark()
    with torch.simgpu.stream(side):
        y = x + 1
    del x
    again = torch.full((1024,), 50.0, device="simgpu:0")
    torch.simgpu.default_stream(0).synchronize()
    side.synchronize()
    del again
    assert simgpu.content_now(y)[0] == 2


def test_a_return_into_a_block_with_pending_work_waits_for_it(kernel):
    """The block was freed while a side stream still had work on it."""
    with torch.simgpu.stream(side_stream()):
        x = floats(1.0)
        kernel.park()
        last = floats(7.0)
        last.fill_(9.0)  # is not done yet
        del last
    kernel.unpark()
    torch.simgpu.synchronize(0)
    assert simgpu.content_now(x)[0] == 1


@pytest.mark.parametrize("away", [True, False], ids=["leaving", "returning"])
def test_a_card_that_does_not_come_to_rest_keeps_everything_as_it_is(kernel, monkeypatch, away):
    """A second attempt does not start a second wait. Once the card has finished, the move works."""
    x = floats(4.0)
    act = kernel.park if away else kernel.unpark
    if not away:
        kernel.park()
    monkeypatch.setattr(kernel_memory, "REST_SECONDS", 0.02)
    held, waits, real = simgpu.used_bytes(0), [], torch.simgpu.synchronize
    monkeypatch.setattr(torch.simgpu, "synchronize", lambda card: (waits.append(card), real(card)))
    with simgpu.stuck(0) as release:
        for _ in range(2):
            with pytest.raises(NotStill, match=r"simgpu:0 has not finished its work within 0.02 s"):
                act()
        assert simgpu.used_bytes(0) == held and len(waits) <= 1
        release()
    monkeypatch.setattr(kernel_memory, "REST_SECONDS", PATIENCE)
    act()
    if away:
        kernel.unpark()
    assert x.cpu()[0] == 4 and not streams._waiting


def test_a_card_that_has_failed_keeps_everything_and_names_its_error(kernel, monkeypatch, capfd):
    """After a failed assert in a kernel, each call of CUDA in the process fails."""
    x = floats(4.0)
    text = "CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"

    with monkeypatch.context() as patch:
        patch.setattr(torch.simgpu, "synchronize", Mock(side_effect=RuntimeError(text)))
        with pytest.raises(NotStill, match="simgpu:0 has failed: CUDA error: device-side assert"):
            kernel.park()
    assert not kernel.handle.away and not capfd.readouterr().err
    assert x.cpu()[0] == 4


def test_memory_in_a_private_pool_keeps_the_kernel(kernel):
    with simgpu.private_pool():
        captured = floats(1.0)
    with pytest.raises(NotStill, match="a CUDA graph holds some of its memory"):
        kernel.park()
    assert captured.cpu()[0] == 1


def test_a_graph_over_memory_of_the_ordinary_pool_keeps_the_kernel(kernel, monkeypatch):
    """A graph replays on the addresses of its capture (PyTorch's notes on CUDA graphs): others' bytes, silently."""

    class CUDAGraph:  # a CPU build of torch makes no graphs
        pass

    class Derived(CUDAGraph):
        pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    static_input = floats(1.0)
    for kind in (CUDAGraph, Derived):
        graph = kind()
        with pytest.raises(NotStill, match="a CUDA graph holds some of its memory"):
            kernel.park()
        del graph
    kernel.park()
    kernel.unpark()
    assert static_input.cpu()[0] == 1


def test_the_tensors_of_two_cards_leave_together_and_return_each_to_its_own(kernel):
    one, two = floats(1.0, count=MIB), floats(2.0, card=1, count=2 * MIB)
    two.add_(one.to("simgpu:1", non_blocking=True)[0])  # both cards have work
    held = kernel.bytes
    assert held["simgpu:0"] >= 4 * MIB and held["simgpu:1"] >= 8 * MIB
    kernel.park()
    assert simgpu.used_bytes(0) == simgpu.used_bytes(1) == 0
    assert kernel.backend.must_return_to(kernel.handle) == held
    kernel.unpark()
    assert kernel.bytes == held
    assert (str(one.device), str(two.device)) == ("simgpu:0", "simgpu:1")
    assert (one.cpu()[0], two.cpu()[0]) == (1, 3)


@pytest.mark.parametrize("full", [0, 1])
def test_a_card_that_is_full_on_the_return_changes_nothing(kernel, full):
    """If one of two cards is full, nothing returns to the other one, even while the error is kept."""
    one, two = floats(1.0, count=MIB), floats(2.0, card=1, count=MIB)
    kernel.park()
    with simgpu.limited(**{f"card{full}": 3 * MIB}), pytest.raises(simgpu.SimOutOfMemory) as error:
        kernel.unpark()
    assert error.value.__traceback__ is not None
    assert simgpu.used_bytes(0) == simgpu.used_bytes(1) == 0
    with pytest.raises(RuntimeError, match=PARKED):
        one.cpu()
    kernel.unpark()
    assert (one.cpu()[0], two.cpu()[0]) == (1, 2)


def test_a_stream_is_entered_while_its_card_is_the_current_card(kernel, monkeypatch):
    """Else torch creates a context on the earlier card at the end: torch/cuda/__init__.py, `StreamContext`."""
    tensor = floats(2.0, card=1)
    current, contexts = [0], set()
    enter = torch.simgpu.stream

    @contextlib.contextmanager
    def device(card):
        before, current[0] = current[0], torch.device(card).index
        yield
        current[0] = before

    @contextlib.contextmanager
    def stream(one):
        with enter(one):
            yield
        if one.device_index != current[0]:
            contexts.add(current[0])

    monkeypatch.setattr(torch.simgpu, "device", device)
    monkeypatch.setattr(torch.simgpu, "stream", stream)
    kernel.park()
    kernel.unpark()
    assert tensor.cpu()[0] == 2 and not contexts


def test_a_return_without_an_exchange_keeps_no_blocks_on_the_card(kernel):
    """The kernel is in use at the exchange, so nothing returns. The error is kept, as a notebook does."""
    tensor = floats(1.0, count=MIB)
    kernel.park()
    kernel.still.at_exchange = lambda: "a thread uses torch"
    with pytest.raises(NotStill) as error:
        kernel.unpark()
    assert error.value.__traceback__ is not None
    assert simgpu.used_bytes(0) == 0
    kernel.still.at_exchange = lambda: ""
    kernel.unpark()
    assert tensor.cpu()[0] == 1


@pytest.mark.parametrize("fails_at", [1, 3, 5])
def test_an_exchange_that_fails_is_undone_by_exchanging_again(kernel, fails_at):
    tensors = [floats(float(value)) for value in range(5)]
    real = getattr(torch.UntypedStorage, "_swap_data_ptr_", old_torch.exchange)
    left = [fails_at]

    def fails(one, other):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return real(one, other)

    for act, before in ((kernel.park, 0), (kernel.unpark, 5)):
        left[0] = fails_at
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(torch.UntypedStorage, "_swap_data_ptr_", fails, raising=False)
            act()
        assert len(kernel.handle.away) == before
        act()
    assert [tensor.cpu()[0] for tensor in tensors] == [0, 1, 2, 3, 4]


def test_a_storage_that_stays_keeps_its_segment_and_what_is_free_is_less_than_hoped(kernel):
    """The lease's bytes have left, but the card still shows used memory, because the whole segment stays in use."""
    moving = floats(1.0, count=MIB // 16)
    staying = floats(2.0, count=16)
    sent = frozenset((staying.untyped_storage()._cdata,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_sent_to_others", lambda: sent)
        kernel.park()
    assert simgpu.used_bytes(0) == 64
    assert simgpu.SimProbe().used()["simgpu:0"] == 2 * MIB
    assert staying.cpu()[0] == 2
    kernel.unpark()
    assert moving.cpu()[0] == 1


def test_accounts_go_to_zero_and_return_exactly(kernel):
    """After many parks no block, no segment and no work of a stream is left over."""
    tensors = [floats(float(n), count=100 * n + 1) for n in range(8)]
    with torch.simgpu.stream(side_stream()):
        tensors += [floats(float(n), count=300 * n + 1) for n in range(4)]
    held = simgpu.used_bytes(0)
    for _ in range(20):
        kernel.park()
        assert (simgpu.used_bytes(0), simgpu.cards[0].reserved_bytes) == (0, 0)
        kernel.unpark()
        assert simgpu.used_bytes(0) == held == kernel.bytes["simgpu:0"]
    assert [t.cpu()[0] for t in tensors] == [*map(float, range(8)), *map(float, range(4))]


def test_a_workspace_is_released_on_each_used_card_without_any_tensor(kernel, monkeypatch):
    """cuBLAS keeps 8 to 32 MiB for each process and card. No tensor of these bytes can be found."""
    workspace = simgpu.cards[1].allocate(8 * MIB)
    clear = simgpu.cards[1].free
    monkeypatch.setattr(
        streams, "release_cached", lambda card: card == "simgpu:1" and clear(workspace)
    )
    assert kernel.bytes == {"simgpu:1": 8 * MIB}
    kernel.park()
    assert simgpu.used_bytes(1) == 0 and not kernel.handle.away


def test_the_keys_of_digests_stay_on_their_card(kernel):
    """A model's digest is computed on the card while the notebook's own memory is parked."""
    shadows._on_cards.clear()
    own, model = floats(1.0, count=MIB), floats(2.0, count=MIB)
    key = model.untyped_storage()._cdata
    kernel.handle.governed = kernel_memory.GovernedModels(lambda: [key])
    try:
        before = shadows.digest(model.view(torch.uint8))
        assert kernel.bytes["simgpu:0"] == 8 * MIB
        kernel.park()
        assert torch.equal(shadows.digest(model.view(torch.uint8)), before)
        kernel.unpark()
        assert own.cpu()[0] == 1
    finally:
        shadows._on_cards.clear()


@settings(max_examples=settings().max_examples // 2)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.lists(st.tuples(st.booleans(), st.integers(1, 20), st.integers(-1, 1)), max_size=4),
)
def test_a_stage_moves_whole_tensors_and_never_more_than_there_is_room_for(sizes, stages):
    """It moves some if one of them fits, to RAM or back to the card."""
    kernel, unit = Kernel(), 4096
    tensors = [floats(n, count=size * unit // 4) for n, size in enumerate(sizes)]
    whole, handle = sum(sizes) * unit, kernel.handle
    for leaves, units, bytes_ in stages:
        before, room = handle.away_bytes, units * unit + bytes_
        in_host = before + room if leaves else before - room
        if in_host <= 0:
            continue
        away = {one.storage._cdata for one in handle.away}
        there = [one for one in tensors if leaves != (one.untyped_storage()._cdata in away)]
        fits = any(one.untyped_storage().nbytes() <= room for one in there)
        with contextlib.nullcontext() if fits else pytest.raises(NotStill, match="fits into"):
            kernel.backend.move(handle, (Share("simgpu:0", whole), Share(HOST, in_host)))
        moved = (handle.away_bytes - before) * (1 if leaves else -1)
        assert (0 < moved <= room) if fits else moved == 0
    kernel.unpark()
    assert [float(one.cpu().min()) for one in tensors] == [*range(len(sizes))]


@given(st.lists(st.integers(0, 3), max_size=12))
def test_moves_that_overlap_in_any_order_leave_the_collector_as_it_was(deeds):
    """0 begins a move. Another number ends one of those that are under way."""
    usual, moves = gc.get_threshold(), []
    try:
        for deed in deeds:
            if not deed:
                moves.append(kernel_memory.without_collections())
                moves[-1].__enter__()
            elif moves:
                moves.pop(deed % len(moves)).__exit__(None, None, None)
        for move in moves:
            move.__exit__(None, None, None)
        assert gc.get_threshold() == usual
    finally:
        gc.set_threshold(*usual)
