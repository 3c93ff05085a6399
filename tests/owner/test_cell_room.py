"""Room before a cell. A cell that took much memory the last time finds as much memory free when it runs again."""

import gc
import math
import re
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

from gpu_runtime import Runtime, WaitEnded
from gpu_runtime.facts import HOST
from gpu_runtime.owner.cell_room import CellRoom
from gpu_runtime.telemetry.measurements import Measurements
from gpu_runtime.units import GIB, MIB
from tests import simgpu
from tests.clock import PATIENCE

from .conftest import claims, loaded
from .kernels import FLOATS, Quiet, cell, keep, own

BIG = "weights = torch.empty(10 * GIB)"


def learn(kernel, text: str, size: int) -> None:
    """Makes the kernel remember that the cell took `size` bytes, as if an earlier kernel had run it."""
    kernel._room.wanted(text, {})
    kernel._room.learn(text, {"sim:0": size})
    kernel._room._run.clear()


def in_a_new_kernel(kernel, text: str) -> dict[str, int]:
    """The bytes that a new kernel, which holds nothing yet, requests for the cell."""
    run, kernel._room._run = kernel._room._run, set()
    try:
        return dict(kernel._room.wanted(text, {}))
    finally:
        kernel._room._run = run


@pytest.fixture
def two(started, runtime, shared_book):
    """A kernel whose cell BIG took 10 GiB, and a second runtime with an idle model on the same card."""
    settings = {"ledger": shared_book, "eviction_grace_seconds": 0.0}
    rt, kernel = started(**settings)
    learn(kernel, BIG, 10 * GIB)
    other = loaded(runtime(**settings), idle="16GiB")
    return rt, kernel, other


@pytest.fixture
def impatient(monkeypatch):
    """A cell's wait for its room ends soon. In every other test the room comes."""
    monkeypatch.setattr(CellRoom, "patience_seconds", 0.4)


def on_card(rt) -> int:
    return claims(rt).get("sim:0", 0)


def test_a_cell_finds_free_what_it_took_at_its_peak_the_last_time(two):
    rt, kernel, _ = two
    keep(kernel, torch.zeros(4 * FLOATS))
    held = own(rt)["sim:0"]
    seen = []
    cell(kernel, lambda: seen.append((own(rt), claims(rt))), BIG)
    assert seen[0][0] == {"sim:0": held + 10 * GIB} and seen[0][1][HOST] == 16 * GIB
    assert not kernel.refusal
    [grown] = [event for event in rt.why("kernel") if event.action == "grown"]
    assert (grown.bytes, grown.device) == (10 * GIB, "sim:0") and "the last time" in grown.because


@pytest.mark.parametrize("text", ["%gpu", "# and now?\n%gpu who", "df = %gpu leases", "%gpu free"])
def test_a_cell_of_our_lines_requests_no_room(started, text):
    """After `del weights` the user types `%gpu`. It showed 600 MiB in use: the room of its own cell."""
    rt, kernel = started()
    keep(kernel, torch.zeros(16 * FLOATS))
    cell(kernel, text=text)  # the notebook holds 16 MiB after this cell
    del kernel.kept_by_the_test
    gc.collect()
    cell(kernel)
    seen = []
    cell(kernel, lambda: seen.append(claims(rt)), text)
    assert seen == [{}]


def test_a_new_kernel_that_holds_nothing_yet_gets_the_room_too(two):
    """After a restart of the kernel, the first cell often takes the most memory."""
    rt, kernel, other = two
    seen = []
    cell(kernel, lambda: seen.append(claims(other)), BIG)
    assert seen[0]["sim:0"] >= 10 * GIB and seen[0][HOST] == 16 * GIB
    assert on_card(other) < 10 * GIB


@pytest.mark.parametrize(
    ("in_use", "line"),
    [
        (False, "Waited 9 s for 10.0 GiB on sim:0, which this cell took the last time; idle left"),
        (
            True,
            "Waited 9 s in vain for 10.0 GiB on sim:0, which this cell took the last time. idle",
        ),
    ],
)
def test_one_line_stays_after_a_wait_for_room(two, impatient, monkeypatch, in_use, line):
    """The line of the wait itself disappears. A wait of less than a second leaves no line."""
    _, kernel, other = two
    monkeypatch.setattr("gpu_runtime.owner.cell_room.LEAST_WAIT_SECONDS", 0.0)
    with other.use("idle") if in_use else nullcontext():
        news = cell(kernel, text=BIG)
    assert not kernel.refusal and not other.status().tickets
    assert re.sub(r"[\d.]+ m?s", "9 s", news).startswith(line)


def test_for_a_cell_that_took_more_than_the_card_may_give_nothing_leaves(two):
    rt, kernel, other = two
    limit = rt.status().devices[0].limit_bytes
    learn(kernel, "whole", limit)
    assert in_a_new_kernel(kernel, "whole") == {"sim:0": limit}
    learn(kernel, "huge", limit + 1)
    cell(kernel, text="huge")
    assert claims(other)["sim:0"] >= 16 * GIB and not kernel.refusal


def test_a_parked_kernel_returns_with_the_room_for_its_cell(two):
    """One request has the returning bytes and the room: two notebooks cannot wait for each other's room."""
    rt, kernel, other = two
    keep(kernel, torch.randn(4 * FLOATS))
    held = own(rt)["sim:0"]
    rt.park()
    seen = []
    news = cell(kernel, lambda: seen.append(own(rt)), BIG)
    assert seen == [{"sim:0": held + 10 * GIB}] and "came back from RAM" in news
    assert own(rt) == {"sim:0": held}


def test_a_parked_kernel_returns_without_the_room_if_there_is_none_in_time(two, impatient):
    rt, kernel, other = two
    keep(kernel, torch.randn(4 * FLOATS))
    rt.park()
    with other.use("idle"):
        cell(kernel, lambda: None, BIG)
        assert not kernel.refusal and own(rt)["sim:0"] < GIB


def test_stop_ends_the_wait_and_the_cell_does_not_run(two, monkeypatch):
    rt, kernel, other = two

    monkeypatch.setattr(kernel._room, "request", Mock(side_effect=KeyboardInterrupt))
    kernel.begin(BIG)
    assert isinstance(kernel.refusal, WaitEnded) and "did not run" in str(kernel.refusal)
    kernel.end()
    monkeypatch.undo()
    cell(kernel)
    assert not kernel.refusal


# -- what is remembered ----------------------------------------------------------------------------
def test_a_cell_is_remembered_with_the_bytes_that_it_left_beyond_those_before(started):
    """A simulated card measures no peak, so the bytes that the kernel held after the cell count as its peak."""
    rt, kernel = started()
    kept = [torch.zeros(32 * FLOATS)]
    cell(kernel, text="before")
    cell(kernel, lambda: kept.append(torch.zeros(16 * FLOATS)), "a")
    assert in_a_new_kernel(kernel, "a") == {"sim:0": 16 * MIB}
    assert in_a_new_kernel(kernel, " a\n") and not in_a_new_kernel(kernel, "b")


def test_bytes_that_differ_by_less_than_a_hundredth_are_not_written_again(started):
    _, kernel = started()
    for size, known in ((1000, 1000), (1009, 1000), (1011, 1011), (1000, 1000)):
        learn(kernel, "a", size * MIB)
        assert in_a_new_kernel(kernel, "a") == {"sim:0": known * MIB}


def test_a_cell_that_takes_nothing_requests_nothing(started):
    """`print` ran while the notebook held 32 MiB. After `del`, it requested 32 MiB again."""
    rt, kernel = started()
    kept = [torch.zeros(32 * FLOATS)]
    cell(kernel, text="make")
    cell(kernel, text="print(1)")
    kept.clear()
    gc.collect()
    cell(kernel, text="del kept")
    seen = []
    cell(kernel, lambda: seen.append(claims(rt)), "print(1)")
    assert seen == [{}]


def test_a_cell_that_runs_again_in_the_same_kernel_replaces_what_it_made(started):
    """A cell that makes a model takes its bytes once in each kernel, however often it runs there."""
    rt, kernel = started()
    kept = []

    def make():
        kept[:] = [torch.zeros(16 * FLOATS)]

    cell(kernel, make, "make")
    held, seen = own(rt), []
    for _ in range(2):
        cell(kernel, lambda: (seen.append(own(rt)), make()), "make")
    assert seen == [held, held]
    assert in_a_new_kernel(kernel, "make") == {"sim:0": 16 * MIB}


def test_a_cell_that_fails_or_is_refused_keeps_what_was_known_of_it(started, monkeypatch):
    """It stopped before it took all that it needs."""
    rt, kernel = started()
    kept = [torch.zeros(2 * FLOATS)]
    cell(kernel, text="first")
    learn(kernel, BIG, 16 * MIB)
    cell(kernel, text=BIG)
    kernel.cell_failed(MemoryError())
    assert in_a_new_kernel(kernel, BIG) == {"sim:0": 16 * MIB}
    assert kernel._room.wanted(BIG, {}), "its next run counts as the first"
    rt.park()
    monkeypatch.setattr(kernel, "_obtain", lambda *_: 1 / 0)
    kernel.begin(BIG)
    assert kernel.refusal
    kernel.end()
    assert in_a_new_kernel(kernel, BIG) == {"sim:0": 16 * MIB}
    del kept


def test_a_cell_that_fails_after_it_took_more_than_was_known_keeps_the_more(started):
    _, kernel = started()
    kept = []
    learn(kernel, "a", 16 * MIB)
    cell(kernel, lambda: kept.append(torch.zeros(40 * FLOATS)), "a")
    kernel.cell_failed(MemoryError())
    assert in_a_new_kernel(kernel, "a") == {"sim:0": 40 * MIB}


def test_the_peak_is_remembered_when_a_skipped_count_is_made(started):
    """After a slow count, the count after the next cell waits until the kernel is idle."""
    rt, kernel = started()
    kept = []
    cell(kernel, lambda: kept.append(torch.zeros(2 * FLOATS)), "first")
    kernel._count_again_at = math.inf
    kernel.begin("a")
    kept.append(torch.zeros(16 * FLOATS))
    kernel.end()
    assert not in_a_new_kernel(kernel, "a")
    kernel._room._held = {"sim:0": own(rt)["sim:0"]}
    kernel.catch_up()
    assert in_a_new_kernel(kernel, "a") == {"sim:0": 16 * MIB}


def test_a_notebook_that_held_more_than_its_card_is_counted_after_each_cell(started):
    """Others were refused for what the notebook no longer held."""
    rt, kernel = started(devices="sim:64MiB,host:1GiB")
    kept = [torch.zeros(80 * FLOATS)]
    cell(kernel)
    for holds in (16, 8):
        kernel._count_again_at = math.inf
        kernel.begin()
        kept[:] = [torch.zeros(holds * FLOATS)]
        kernel.end()
        assert own(rt)["sim:0"] < 64 * MIB
    assert kernel._uncounted  # it holds less than the card has


def test_a_count_during_which_the_next_cell_begins_tells_no_peak(started, monkeypatch):
    rt, kernel = started()
    kept = [torch.zeros(2 * FLOATS)]
    cell(kernel, text="first")
    kernel._count_again_at = math.inf
    kernel.begin("a")
    kernel.end()
    count = kernel.count

    def late():
        kernel.begin("b")
        kept.append(torch.zeros(16 * FLOATS))
        count()

    monkeypatch.setattr(kernel, "count", late)
    kernel.catch_up()
    assert not in_a_new_kernel(kernel, "a") and not in_a_new_kernel(kernel, "b")
    kernel.end()


def test_a_cell_that_leases_memory_by_itself_is_not_remembered(started):
    rt, kernel = started()
    kept = []

    def leased():
        with rt.lease("1GiB"):
            kept.append(torch.zeros(16 * FLOATS))

    cell(kernel, leased, "a")
    assert not in_a_new_kernel(kernel, "a")


def test_what_cells_took_survives_the_kernel_and_belong_to_the_notebook(tmp_path, monkeypatch):
    url = f"keeper://{tmp_path}/ledger"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("JPY_SESSION_NAME", "/work/a.ipynb")

    def opened():
        return Runtime(devices="sim:24GiB,host:64GiB", ledger=url, monitor=False)

    with opened() as rt:
        rt.attach_kernel(Quiet())._room.learn(BIG, {"sim:0": 10 * GIB})
    with opened() as rt:
        room = rt.attach_kernel(Quiet())._room
        assert room.wanted(BIG, {"sim:0": GIB}) == {"sim:0": 11 * GIB}
        monkeypatch.setenv("JPY_SESSION_NAME", "/work/b.ipynb")
        assert rt.attach_kernel(Quiet())._room.wanted(BIG, {}) == {}
    written = (tmp_path / "state/gpu-console/cells.json").read_text()
    assert "torch" not in written and "ipynb" not in written, "digests only"


def test_peaks_of_an_older_version_are_not_read(tmp_path):
    """They were stored without the bytes that the notebook held before the cell."""
    file = tmp_path / "cells.json"
    file.write_text('{"schema": 1, "cells": {"a": {"sim:0": 12345678}}}')
    known = Measurements(file)
    assert known.cell_bytes("a") == {}
    known.remember_cell("b", {"sim:0": 9})
    assert Measurements(file).cell_bytes("b") == {"sim:0": 9}


# -- a card that is really full --------------------------------------------------------------------
@pytest.fixture
def cards(started, guards, monkeypatch):
    """A runtime and its kernel on the simulated accelerator, whose cards have limits and raise their own errors."""
    monkeypatch.setattr("gpu_runtime.owner.cell_room.LEAST_ROOM_BYTES", MIB)
    return started(probe=simgpu.SimProbe(), gpu_memory_max_percent=1.0, cpu_memory_max_percent=1.0)


def on(card: int, mib: int) -> torch.Tensor:
    return torch.zeros(mib * FLOATS, device=f"simgpu:{card}")


def peaking() -> None:
    """A cell that takes 40 MiB for a moment and keeps nothing."""
    on(0, 40)


def test_a_cell_that_needs_its_peak_again_does_not_run_out_of_memory(cards):
    """Between the two runs of the cell, an idle model of 40 MiB has come to the card of 64 MiB."""
    rt, kernel = cards
    kept = on(0, 2)
    cell(kernel)
    cell(kernel, peaking, "peaking()")
    model = torch.nn.Linear(1024, 10 * 1024, bias=False, device="simgpu:0").requires_grad_(False)
    rt.adopt("idle", model)
    cell(kernel)
    with pytest.raises(torch.OutOfMemoryError):
        cell(kernel, peaking, "another text, so no room is requested")
    assert rt.here("idle")
    cell(kernel, peaking, "peaking()")
    assert not rt.here("idle") and own(rt)["simgpu:0"] == kept.nbytes


def test_room_is_made_on_the_card_that_is_full(cards):
    """Bytes of another card are no use to the cell, and its models stay."""
    rt, kernel = cards
    rt.register("full", backend="fake", size="40MiB", devices=("simgpu:0",))
    rt.register("elsewhere", backend="fake", size="50MiB", devices=("simgpu:1",))
    rt.preload("elsewhere")
    rt.preload("full")
    error = torch.OutOfMemoryError("simgpu:0 out of memory. Tried to allocate 41943040 bytes; …")
    assert "full stepped aside" in kernel.cell_failed(error).others
    assert rt.here("elsewhere") and not rt.here("full")
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40.00 MiB. GPU 9 has …")
    assert "elsewhere stepped aside" in kernel.cell_failed(error).others


def test_a_card_tells_the_peak_of_a_cell_after_which_no_count_was_made(cards):
    """A count is slow on a busy machine, and the next one is skipped. The allocator has the peak."""
    rt, kernel = cards
    kept = [on(0, 2), on(0, 10)]
    cell(kernel)
    kernel._count_again_at = math.inf
    kernel.begin("frees")
    kept.pop()
    kernel.end()
    kernel.begin("takes")
    on(0, 4)
    kernel.end()
    assert in_a_new_kernel(kernel, "frees") == {}
    assert in_a_new_kernel(kernel, "takes") == {"simgpu:0": 4 * MIB}


def test_a_count_that_is_made_later_makes_no_second_run_of_the_cell(cards):
    """The next run replaces the 10 MiB that the first run left. It requested 10 MiB more for them."""
    _, kernel = cards
    kept = [on(0, 2)]
    cell(kernel)
    kernel._count_again_at = math.inf
    kernel.begin("makes")
    kept.append(on(0, 10))
    kernel.end()
    kernel._count_again_at = 0.0
    kernel.catch_up()
    assert kernel._room.wanted("makes", {"simgpu:0": 12 * MIB}) == {}
    assert in_a_new_kernel(kernel, "makes") == {"simgpu:0": 10 * MIB}
    del kept


def test_a_peak_counts_the_kernels_own_bytes_and_no_model(cards):
    rt, kernel = cards
    kept = on(0, 2)
    rt.adopt("model", torch.nn.Linear(1024, 1024, bias=False, device="simgpu:0").eval())
    cell(kernel)
    cell(kernel, lambda: on(0, 8), "a")
    assert in_a_new_kernel(kernel, "a") == {"simgpu:0": 8 * MIB}
    del kept


# -- several cards ---------------------------------------------------------------------------------
def test_a_request_for_either_card_parks_the_whole_kernel(cards, runtime):
    rt, kernel = cards
    zero, one = on(0, 3), on(1, 40)
    cell(kernel)
    rt.register("elsewhere", backend="fake", size="30MiB", devices=("simgpu:1",))
    rt.preload("elsewhere", timeout=PATIENCE)
    assert own(rt) == {HOST: 43 * MIB}
    cell(kernel)
    assert own(rt) == {"simgpu:0": 3 * MIB, "simgpu:1": 40 * MIB} and not rt.here("elsewhere")
    del zero, one


def test_a_cell_that_peaks_on_the_second_card_gets_its_room_there(cards):
    rt, kernel = cards
    kept = on(0, 2), on(1, 2)
    cell(kernel)
    cell(kernel, lambda: on(1, 40), "second")
    rt.register("idle", backend="fake", size="50MiB", devices=("simgpu:1",))
    rt.preload("idle")
    seen = []
    cell(kernel, lambda: seen.append(own(rt)), "second")
    assert seen == [{"simgpu:0": 2 * MIB, "simgpu:1": 42 * MIB}] and not rt.here("idle")
    del kept
