"""The memory of a notebook's own code is counted, parked and returned. Parking never changes the values."""

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from gpu_runtime import (
    AmbiguousName,
    DoesNotFit,
    GpuError,
    NotAllowed,
    StillInUse,
    UnknownModel,
    samples,
)
from gpu_runtime.attribution import name_of
from gpu_runtime.backends.pytorch import swap
from gpu_runtime.backends.pytorch.search import ARRAY, FOREIGN
from gpu_runtime.facts import HOST, Holdings, Share, Staying, Ticket, problems
from gpu_runtime.names import Namespace, registered
from gpu_runtime.owner import acquire, holdings, maintenance, operations
from gpu_runtime.rendering import answers, views
from gpu_runtime.telemetry import hours
from gpu_runtime.telemetry.hours import IN_USE, Hour, Hours, Key
from gpu_runtime.units import MIB, show_bytes, show_seconds
from tests.clock import PATIENCE, until

from .conftest import alongside, claims, fakes, loaded
from .kernels import FLOATS, Quiet, cell, keep, own


# -- counting --------------------------------------------------------------------------------------
def test_plain_tensors_of_a_mebibyte_have_a_lease_and_smaller_ones_have_none(started):
    rt, kernel = started()
    cell(kernel)
    before = own(rt).get("sim:0", 0)
    kept = [torch.zeros(4 * FLOATS), torch.zeros(FLOATS // 2)]
    cell(kernel)
    assert own(rt)["sim:0"] - before == 4 * MIB
    assert "kernel" not in set(rt.models().name) and rt.specs() == (), "the lease is no model"
    assert f"pid {os.getpid()}" in set(rt.leases().model), "the name of its notebook, if it has one"
    del kept


def test_a_governed_model_is_not_counted_again(started):
    rt, kernel = started()
    module = nn.Linear(1024, 1024).eval().requires_grad_(False)
    cell(kernel)
    before = own(rt)["sim:0"]
    rt.adopt("m", module)
    cell(kernel)
    assert before - own(rt).get("sim:0", 0) == 4 * MIB


def test_a_cell_has_what_it_deleted_before_it_requests_a_model(started):
    """The request was refused: the bytes of before the cell still counted."""
    rt, kernel = started(devices="sim:64MiB,host:1GiB")
    rt.register("m", backend="fake", size="40MiB")
    kept = [keep(kernel, torch.zeros(40 * FLOATS))]
    kernel.begin("x")
    kernel.kept_by_the_test = kept.clear()
    with rt.use("m"):
        assert own(rt).get("sim:0", 0) < 24 * MIB
    kernel.end()


def test_a_refused_cell_names_the_notebook(started, monkeypatch):
    """It said "kernel needs 32 MiB", a name that no user has typed."""
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/ann/train.ipynb")
    rt, kernel = started(devices="sim:64MiB,host:1GiB")
    rt.register("m", backend="fake", size="40MiB")
    keep(kernel, torch.zeros(32 * FLOATS))
    kernel.park()
    rt.preload("m")
    rt.pin("m")
    kernel.begin("x")
    assert "train.ipynb needs 32" in str(kernel.refusal)
    kernel.end()


def test_a_cell_whose_beginning_was_interrupted_does_not_run_while_its_memory_is_away(started):
    """IPython ignores an interrupt of a hook, and ran the cell."""
    _, kernel = started()
    keep(kernel, torch.zeros(FLOATS))
    kernel.park()
    assert "You stopped the wait" in str(kernel.refusal) and "1.0 MiB" in str(kernel.refusal)
    kernel.begin("x")
    assert kernel.refusal is None
    kernel.end()


held: dict[str, torch.Tensor] = {}  # a notebook's variables are those of a module, too


@pytest.mark.thorough  # it searches all objects of the process five times
def test_frozen_tensors_are_counted_until_they_are_released(started, monkeypatch):
    """Python does not list objects that gc.freeze() hid, so their bytes were missing in the lease."""
    rt, kernel = started()
    counted = []

    def count(frozen: int) -> None:
        monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
        cell(kernel)
        counted.append(own(rt).get("sim:0", 0) // MIB)

    count(0)
    held["first"] = torch.zeros(4 * FLOATS)
    gc.freeze()
    count(2)
    held["new"] = torch.zeros(2 * FLOATS)
    count(2)
    del held["first"]
    count(1)
    held["second"] = torch.zeros(8 * FLOATS)
    gc.freeze()
    count(3)
    held.clear()
    count(1)
    before = counted.pop(0)
    assert [size - before for size in counted] == [4, 6, 2, 10, 0]


def test_the_monitor_does_not_count_while_the_first_cell_runs(started, monkeypatch):
    """Without a lease yet, a model that the cell was loading was counted as memory of its own code."""
    rt, kernel = started()
    counts = []
    monkeypatch.setattr(type(kernel), "count", lambda self: counts.append(1))
    kernel._uncounted = True  # the last count was slow, so the next one was left to the monitor
    kernel.begin()
    kernel.catch_up()
    assert kernel.resident is None and counts == []
    kernel.end()
    kernel._uncounted = True
    kernel.catch_up()
    assert counts


def test_the_copies_of_models_in_host_memory_are_not_the_notebooks_own(started, tmp_path):
    """Counted as the notebook's, such pages stayed on the card, and the model found no room to return."""
    rt, kernel = started(devices="sim:48MiB,host:1GiB")
    rt.register("m", samples.causal_lm(tmp_path / "m", size="24 MiB"))
    rt.preload("m")
    cell(kernel)
    assert rt._session.residents["m"].shadow_bytes > 20 * MIB
    assert rt.status().devices[0].claimed_bytes == rt._session.residents["m"].lease.bytes
    rt.evict("m")
    cell(kernel)
    with rt.use("m", timeout=PATIENCE) as model:
        assert own(rt) == {}
    rt.evict("m", drop=True)
    cell(kernel)
    assert rt.status().devices[0].claimed_bytes == 0, "nor are the weights of a dropped model"
    del model


# -- leaving and returning -------------------------------------------------------------------------
def test_parking_changes_no_value_identity_version_or_random_state(started):
    rt, kernel = started()
    weights = torch.randn(2 * FLOATS, requires_grad=True)
    view = weights[1:]
    with torch.no_grad():
        weights.add_(1)
    cell(kernel)
    values, version, random = weights.detach().clone(), weights._version, torch.get_rng_state()
    identity = id(weights), id(view), weights.untyped_storage()._cdata
    assert rt.park().done and own(rt)[HOST] > 0 and "sim:0" not in own(rt)
    assert "came back from RAM" in cell(kernel)
    assert torch.equal(weights, values) and view._base is weights
    assert (weights._version, torch.equal(random, torch.get_rng_state())) == (version, True)
    assert (id(weights), id(view), weights.untyped_storage()._cdata) == identity
    assert own(rt)["sim:0"] > 0 and HOST not in own(rt)


def trained(parks: Callable[[], None]) -> list[torch.Tensor]:
    """The losses and weights of a training run in which `parks` is called three times a step."""
    torch.manual_seed(5)
    module = nn.ModuleDict({"lstm": nn.LSTM(256, 256), "head": nn.Linear(256, 1024)})
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    drop, losses = nn.Dropout(0.3), []
    for _ in range(3):
        parks()
        out, _ = module["lstm"](torch.randn(8, 16, 256))
        parks()
        loss = module["head"](drop(out)).square().mean()
        parks()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        parks()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in module.parameters())]


def test_training_that_is_parked_in_the_middle_is_the_same_to_the_bit(started):
    """Weights, gradients, AdamW's moments and the saved tensors of live graphs leave and return."""
    alone = trained(lambda: None)
    rt, kernel = started()

    def park():
        kernel.count()
        if kernel.resident is not None:
            assert rt.park().done
            cell(kernel)
            assert not kernel.refusal

    parked = trained(park)
    assert all(torch.equal(mine, twin) for mine, twin in zip(alone, parked, strict=True))
    assert rt.status().totals["offloads"] == 12


OPERATIONS = {
    "add": lambda a, b: a.add_(b),
    "multiply": lambda a, b: a.mul_(b),
    "copy": lambda a, b: a.copy_(b),
    "view": lambda a, b: a.view(2, -1)[1].add_(1),
    "square": lambda a, b: a.square_().clamp_(-9, 9),
    "roll": lambda a, b: a.set_(a.roll(3)),
}
DEEDS = st.sampled_from([*OPERATIONS, "park", "gradient"])
PROGRAM = st.lists(st.tuples(DEEDS, st.integers(0, 2), st.integers(0, 2)), max_size=12)


def run(program, park: Callable[[], None]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    tensors = [torch.randn(FLOATS) for _ in range(3)]
    results = []
    for name, one, other in program:
        if name == "park":
            park()
        elif name == "gradient":
            leaf = tensors[one].clone().requires_grad_()
            loss = (leaf * tensors[other]).sum()
            park()
            loss.backward()
            results.append(leaf.grad)
        else:
            OPERATIONS[name](tensors[one], tensors[other])
    return [*tensors, *results]


@settings(max_examples=settings().max_examples // 5)  # each example opens a runtime
@given(PROGRAM)
def test_a_random_program_computes_the_same_with_and_without_parks(program):
    """Parking changes nothing that a program can compute (law 13 in docs/architecture.md)."""
    from gpu_runtime import Runtime

    alone = run(program, lambda: None)
    with Runtime(devices="sim:1GiB,host:4GiB", ledger="memory:", monitor=False) as rt:
        kernel = rt.attach_kernel(Quiet())

        def park():
            kernel.count()
            if kernel.resident is not None:
                rt.park()
                cell(kernel)

        parked = run(program, park)
    assert all(torch.equal(mine, twin) for mine, twin in zip(alone, parked, strict=True))


def test_a_kernel_that_is_used_while_it_is_copied_stays(started, quiet):
    """If the kernel is used during the copy, the copy is discarded and the kernel's memory is unchanged."""
    rt, kernel = started()
    kept = keep(kernel, torch.randn(4 * FLOATS))
    values = kept.clone()

    def use():
        quiet.used += 1
        quiet.while_copying = lambda: None
        quiet.reason = "a cell runs"

    quiet.while_copying = use
    with pytest.raises(Exception, match="kernel"):
        rt.park()
    assert torch.equal(kept, values) and HOST not in own(rt)


def test_what_may_use_an_address_keeps_the_kernel_and_is_named(started, quiet, caplog):
    """The user's code did nothing wrong, so no warning appears. The event names what may use an address."""
    rt, kernel = started()
    keep(kernel, torch.zeros(4 * FLOATS))
    quiet.reason = "a thread of its own runs (worker)"
    with pytest.raises(GpuError, match=r"a thread of its own runs \(worker\)"):
        rt.park()
    assert any("(worker)" in event.because for event in rt.why("kernel"))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_an_interrupt_after_a_cell_that_deletes_leaves_the_memory_able_to_return(
    started, monkeypatch
):
    """No cell ran any more: *kernel is being moved by another thread*, until the kernel was restarted."""
    rt, kernel = started()
    x = keep(kernel, torch.ones(4 * FLOATS))
    kernel.kept_too = torch.ones(4 * FLOATS)
    cell(kernel)
    assert rt.park().done
    usual = kernel.resident.backend.forget_unused

    def interrupted(handle):
        signal.raise_signal(signal.SIGINT)
        return usual(handle)

    monkeypatch.setattr(kernel.resident.backend, "forget_unused", interrupted)
    usual_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        del kernel.kept_too
        with pytest.raises(KeyboardInterrupt):
            kernel.forget_deleted()
    finally:
        signal.signal(signal.SIGINT, usual_handler)
    cell(kernel)
    assert kernel.refusal is None and own(rt)["sim:0"] >= x.nbytes and HOST not in own(rt)


def test_another_front_end_follows_the_cells_after_a_reload(started, quiet):
    """After `%reload_ext gpu` the notebook was in use for ever: its old front end saw no end of the cell."""
    rt, kernel = started()
    x = keep(kernel, torch.ones(4 * FLOATS))
    kernel.begin("%reload_ext gpu")
    quiet.reason = "a cell runs"
    after = rt.attach_kernel(Quiet())
    after.end()
    assert rt.park().done
    cell(after)
    assert own(rt)["sim:0"] >= x.nbytes and HOST not in own(rt)


def test_what_held_more_than_the_budget_returns_to_the_card(started):
    """60 of 64 MiB with a budget of 57.6: in 0.2 no cell ran again after a park, not even `del x` (law 16)."""
    rt, kernel = started(devices="sim:64MiB,host:4GiB")
    kept = keep(kernel, torch.full((60 * FLOATS,), 5.0))
    assert rt.park().done
    cell(kernel)
    assert not kernel.refusal and own(rt) == {"sim:0": 60 * MIB} and bool((kept == 5).all())


def test_what_holds_more_than_the_card_is_not_parked(started):
    """On a simulated card plain code can take more than the card has. It could not return."""
    rt, kernel = started(devices="sim:32MiB,host:4GiB")
    keep(kernel, torch.zeros(40 * FLOATS))
    with pytest.raises(DoesNotFit, match=r"holds more than the 32.* of sim:0.*could not return"):
        rt.park()
    assert own(rt) == {"sim:0": 40 * MIB}


def test_a_cell_just_after_a_park_runs_once_the_thread_that_parked_has_ended(started, monkeypatch):
    """The kernel's memory cannot return while the thread that parked it still runs. So the return is tried again."""
    rt, kernel = started()
    keep(kernel, torch.ones(4 * FLOATS))
    rt.park()
    change, attempts = kernel._stillness.change, []

    def busy_at_first(mark, act):
        attempts.append(1)
        return "a thread runs (gpu)" if len(attempts) < 4 else change(mark, act)

    monkeypatch.setattr("gpu_runtime.owner.kernel.AGAIN_SECONDS", 0.001)
    monkeypatch.setattr(kernel._stillness, "change", busy_at_first)
    cell(kernel)
    assert not kernel.refusal and HOST not in own(rt) and len(attempts) == 4


@pytest.mark.parametrize("change", [gc.disable, lambda: gc.set_threshold(123), lambda: None])
def test_a_cells_choice_of_when_garbage_is_searched_for_outlasts_a_park(started, quiet, change):
    """A move switches garbage collection off for a moment. A cell may change that setting meanwhile."""
    rt, kernel = started()
    keep(kernel, torch.ones(4 * FLOATS))
    usual, seen = gc.get_threshold(), []

    def in_a_cell():
        seen.append(gc.get_threshold()[0])
        change()
        seen.append((gc.isenabled(), gc.get_threshold()))

    quiet.while_copying = in_a_cell
    try:
        rt.park()
        chosen = (gc.isenabled(), gc.get_threshold())
    finally:
        gc.enable()
        gc.set_threshold(*usual)
    assert seen[0] > 10**9, "the park itself waits for no collection"
    assert chosen[0] == seen[1][0]
    assert chosen[1] == (seen[1][1] if seen[1][1][0] == 123 else usual)


def test_a_park_during_a_count_leaves_the_count_without_effect(started, monkeypatch):
    """The monitor's thread may be counting when the memory leaves. Its result is wrong then."""
    rt, kernel = started()
    kept = keep(kernel, torch.ones(4 * FLOATS))
    backend = kernel.resident.backend
    count = backend.count

    def parked_meanwhile(model):
        found = count(model)
        if not model.away:
            monkeypatch.setattr(backend, "count", count)
            rt.park()
        return found

    monkeypatch.setattr(backend, "count", parked_meanwhile)
    kernel.count()
    assert own(rt) == {HOST: 4 * MIB} and not rt.probe.used()["sim:0"]
    cell(kernel)
    assert own(rt) == {"sim:0": 4 * MIB} and rt.probe.used()["sim:0"] == kept.nbytes


def test_a_ledger_that_cannot_be_read_refuses_no_cell_whose_memory_is_here(started, monkeypatch):
    from gpu_runtime import LedgerUnavailable

    rt, kernel = started()
    keep(kernel, torch.zeros(4 * FLOATS))

    def gone():
        raise LedgerUnavailable("the ledger is gone", path="here")

    monkeypatch.setattr(rt._session.ledger, "read", gone)
    kernel.begin()
    assert not kernel.refusal and kernel.resident.pins
    monkeypatch.undo()
    kernel.end()


def test_a_park_of_less_than_a_mebibyte_says_so(started):
    """In 0.2 it said that only the kernel of a notebook can be parked, in the kernel of a notebook."""
    rt, kernel = started()
    cell(kernel)
    assert "holds less than 1.0 MiB on a card, so nothing is parked" in rt.park().because


def test_ram_is_given_back_a_while_after_a_return(started, clock):
    """The pages are kept for the next park for a minute. In 0.2, 1.27 GiB of a process became 2.30 for ever."""
    rt, kernel = started(clock=clock)
    kept = keep(kernel, torch.ones(64 * FLOATS))
    rt.park()
    cell(kernel)
    host = rt.probe.place(HOST)

    def kept_mib() -> int:
        rt.tick()
        return host.map().reserved_bytes // MIB

    assert kept_mib() >= 64
    clock.advance(maintenance.GIVE_BACK_SECONDS - 1)
    assert kept_mib() >= 64, "a park in the next minute copies into used pages"
    clock.advance(1)
    assert kept_mib() == 0 and bool((kept == 1).all())
    rt.park()
    clock.advance(maintenance.GIVE_BACK_SECONDS + 1)
    assert kept_mib() >= 64 and kept_mib() >= 64, "these pages are in use"
    cell(kernel)


# -- the operator's cap
@pytest.fixture
def capped(started, tmp_path):
    """Starts a runtime whose user may hold 8 MiB of each card, with these further lines."""

    def start(*lines, **settings):
        me = name_of(os.geteuid())
        text = "\n".join([f"[users.{me}]", 'bytes_per_device = "8 MiB"', *lines])
        (tmp_path / "config.toml").write_text(text)
        return started(gpu_config_file=str(tmp_path / "config.toml"), **settings)

    return start


def test_a_notebook_is_told_before_and_when_its_card_hours_are_used_up(started, tmp_path, clock):
    """Once each. The figures are those of the account of hours."""
    me = name_of(os.geteuid())
    file = tmp_path / "config.toml"
    file.write_text(f"[users.{me}]\ncard_hours_per_week = 2")
    rt, kernel = started(gpu_config_file=str(file), ledger=f"keeper://{tmp_path}/ledger")
    session = rt._session
    account = Hours(session.record.path.with_name(hours.FILE))
    card, now = rt.status().devices[0].device, session.wall()
    told = []
    for part in (0.5, 1.4, 0.2):
        key = Key(me, "", "m", card.id, IN_USE)
        seconds = part * hours.HOUR
        used = Hour(int(now) - hours.HOUR, key, seconds * card.total_bytes, seconds)
        free = used._replace(key=Key("", "", "", card.id, hours.FREE), byte_seconds=0.0)
        account.add([used, free], now)
        session._card_hours_at = float("-inf")
        cell(kernel)
        rt.status()
        told += [kernel.news_of_cap(), kernel.news_of_cap()]
    assert told[:2] == ["", ""] and told[3] == told[5] == ""
    assert "0.1 of 2 card-hours are left of the last seven days" in told[2]
    assert f"{me} has had 2.1 card-hours in the last seven days, of 2" in told[4]
    assert "is of the lowest importance (batch)" in told[2] and "(batch)" in told[4]
    rt.register("m", backend="fake", size="1MiB")
    rt.preload("m")
    assert session.ledger.read().lease(session.me, "m").importance == 30


def test_above_the_cap_one_line_says_so_and_the_console_names_it(capped):
    rt, kernel = capped()
    kept = [torch.zeros(6 * FLOATS)]
    cell(kernel)
    assert kernel.news_of_cap() == ""
    kept.append(torch.zeros(6 * FLOATS))
    cell(kernel)
    line = kernel.news_of_cap()
    assert "holds 12.0 MiB on sim:0, and may hold at most 8.0 MiB" in line
    assert "leaves first" in line
    cell(kernel)
    assert (kernel.news_of_cap(), kernel.refusal) == ("", None), "it is shown once"
    rt.tick()
    [problem] = [one for one in problems(rt.status()) if one.kind == "over_cap"]
    assert "config.toml" in problem.text and problem.bytes == 12 * MIB
    kept.clear()
    cell(kernel)
    rt.tick()
    assert kernel.news_of_cap() == ""
    assert not problems(rt.status())
    kept.append(torch.zeros(12 * FLOATS))
    cell(kernel)
    assert kernel.news_of_cap() == line, "it has come above the cap again"


def test_an_enforced_cap_refuses_the_next_cell_until_less_is_held(capped):
    """A simulated card cannot refuse memory to plain code, as torch does on a real card."""
    rt, kernel = capped("enforce = true")
    kept = [torch.zeros(6 * FLOATS), torch.zeros(6 * FLOATS)]
    cell(kernel)
    cell(kernel)
    assert "may hold at most 8.0 MiB" in str(kernel.refusal) and "torch.save(NAME" in str(
        kernel.refusal
    )
    assert type(kernel.refusal) is NotAllowed
    kernel.begin("del kept[0]", frees=True)
    assert kernel.refusal is None
    del kept[0]
    kernel.end()
    cell(kernel)
    assert kernel.refusal is None


def test_torchs_out_of_memory_error_at_the_cap_is_explained(capped):
    rt, kernel = capped("enforce = true")
    keep(kernel, torch.zeros(6 * FLOATS))
    for size, explains in (("2.01", True), ("2.00", False)):
        words = f"CUDA out of memory. Tried to allocate {size} MiB. GPU 0 has …"
        said = kernel.cell_failed(torch.OutOfMemoryError(words))
        assert ("may hold at most 8.0 MiB of each card" in said.advice) is explains


# -- who leaves for whom ---------------------------------------------------------------------------
def test_a_cell_does_not_wait_for_memory_that_needs_the_cells_own(started, runtime, shared_book):
    """The cell waited 30 s for its own end, and its error named neither the holder nor a remedy.

    The limit of the book counts also where this process may use more of the card.
    """
    devices = "sim:64MiB,host:4GiB"
    other = loaded(runtime(devices=devices, ledger=shared_book, monitor=True), m="48 MiB")
    other.evict("m")
    rt, kernel = started(devices=devices, ledger=shared_book, gpu_memory_max_percent=1)
    keep(kernel, torch.zeros(16 * FLOATS))
    kernel.begin()
    try:
        with pytest.raises(
            StillInUse, match=r"m needs 48.* on sim:0, where .* holds 16.*gpu preload m@"
        ):
            rt.preload(f"m@{other._session.me}", timeout=PATIENCE)
    finally:
        kernel.end()


def test_a_cell_that_has_ended_refuses_no_request_to_park(started, runtime, shared_book):
    """The book shows a cell until the next tick: 20 of 254 requests right after a cell were refused."""
    rt, kernel = started(ledger=shared_book)
    other = runtime(ledger=shared_book, monitor=False)
    keep(kernel, torch.randn(8 * FLOATS))
    kernel.begin()
    rt.tick()
    assert [lease.pins for lease in other.status().leases()] == [1]
    kernel.end()
    assert [lease.pins for lease in other.status().leases()] == [0]


def test_a_cell_whose_end_was_interrupted_ends_with_the_next(started):
    rt, kernel = started()
    keep(kernel, torch.randn(8 * FLOATS))
    kernel.begin()
    kernel.begin()
    kernel.end()
    rt.tick()
    assert [lease.pins for lease in rt.status().leases()] == [0]


def test_an_attempt_to_park_before_a_cell_refuses_no_request_after_it(
    started, runtime, shared_book, quiet
):
    """What prevented the first attempt may have ended in the cell."""
    rt, kernel = started(ledger=shared_book)
    other = runtime(ledger=shared_book, monitor=False)
    keep(kernel, torch.randn(8 * FLOATS))
    quiet.reason = "a thread runs"
    with pytest.raises(GpuError, match="a thread runs"):
        rt.park()
    rt.tick()
    assert [lease.moves_again_at > 0 for lease in other.status().leases()] == [True]
    cell(kernel)
    assert [lease.moves_again_at for lease in other.status().leases()] == [0.0]


@pytest.mark.parametrize(
    "asked, leaves",
    [
        ({"need": "sim:0"}, True),
        ({"need": "sim:1"}, False),
        ({"need": "sim:1", "recalls": True}, True),
        ({"need": "sim:0", "verb": "evict"}, False),
        ({"need": "sim:0", "own": True}, False),
    ],
)
def test_a_turn_lasts_five_times_as_long_as_leaving_and_returning(
    started, runtime, shared_book, clock, asked, leaves
):
    """Then the kernel leaves for a request of another process that needs its card, and has a new turn."""
    settings = {"devices": "sim:2x64MiB,host:4GiB", "ledger": shared_book, "clock": clock}
    rt, kernel = started(**settings, gpu_park_turn_seconds=1.0)
    other = rt if asked.get("own") else runtime(monitor=False, **settings)
    keep(kernel, torch.zeros(8 * FLOATS))
    kernel.resident.lease = replace(kernel.resident.lease, restore_seconds=3.0)
    recalls = {kernel.resident.lease.id: 0} if asked.get("recalls") else {}
    need, ledger = (Share(asked["need"], MIB),), other._session.ledger
    # It was not refreshed for long, so that it takes no room before the kernel returns.
    wish = Ticket(
        "k", ledger.owner.id, asked.get("verb", "use"), "m", 0.0, 0.0, need=need, recalls=recalls
    )
    ledger.transact(lambda book: (book.with_ticket(wish), None))
    left = []
    for seconds in (29.5, 1.0, 0.0):
        clock.advance(seconds)
        cell(kernel)
        left.append([event.action for event in rt.why("kernel")].count("offloaded"))
    assert left == ([0, 1, 1] if leaves else [0, 0, 0]) and not kernel.refusal


def test_a_kernel_whose_card_is_overfull_leaves_when_its_turn_is_over(
    started, runtime, shared_book
):
    """Plain code requests nothing, so two notebooks that run all cells would overfill the card to their end."""
    devices = "sim:64MiB,host:4GiB"
    rt, kernel = started(devices=devices, ledger=shared_book, gpu_park_turn_seconds=0.3)
    other = fakes(runtime(devices=devices, ledger=shared_book, monitor=False), m="56MiB")
    began, left = threading.Event(), threading.Event()

    def use():
        with other.use("m"):
            began.set()
            left.wait(PATIENCE)
        other.evict("m")

    with alongside(use):
        assert began.wait(PATIENCE)
        kept = torch.randn(8 * FLOATS)
        rt.tell_waits(lambda *_: left.set())  # the kernel waits for its return, so it has left
        end = time.monotonic() + PATIENCE
        while not left.is_set() and time.monotonic() < end:
            cell(kernel, lambda: kept.add_(1))
        left.set()
    assert [e.action for e in rt.why("kernel")].count("offloaded") == 1 and not kernel.refusal


def test_a_notebook_may_be_exempt_from_parking(started, runtime, shared_book):
    """`%gpu park never` restores the memory. From then on, no request of another process moves it."""
    devices = "sim:64MiB,host:4GiB"
    settings = dict(devices=devices, ledger=shared_book, eviction_grace_seconds=0.0)
    rt, kernel = started(monitor=True, **settings)
    keep(kernel, torch.randn(16 * FLOATS))
    rt.park()
    assert rt.park("never").because == "this notebook is never parked" and HOST not in own(rt)
    other = fakes(runtime(**settings), m="50MiB")
    with pytest.raises(GpuError):
        other.preload("m", timeout=0.3)

    def ask() -> None:
        with pytest.raises(GpuError, match="park asked"):
            rt.park()

    ask()
    cell(kernel, ask)  # a running cell is not told that its memory leaves at its end
    assert HOST not in own(rt)
    assert rt.park("asked").done
    other.preload("m", timeout=PATIENCE)
    assert HOST in own(rt)


def test_an_exemption_that_fails_changes_nothing(started, monkeypatch):
    rt, kernel = started(devices="sim:64MiB,host:4GiB")
    keep(kernel, torch.randn(16 * FLOATS))
    rt.park()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(operations, "preload", Mock(side_effect=KeyboardInterrupt))
        rt.park("never")
    rt.restore("kernel")
    keep(kernel, None)
    keep(kernel, torch.randn(16 * FLOATS))
    assert kernel.resident.lease.movable and rt.park().done


@pytest.fixture
def train(started, runtime, shared_book):
    """The runtime of train.ipynb, which holds 4 MiB, its kernel, and the runtime of another process."""
    settings = {"devices": "sim:2x1GiB,host:4GiB", "ledger": shared_book}
    rt, kernel = started(monitor=True, **settings)
    rt._session.notebook = "/work/train.ipynb"
    keep(kernel, torch.zeros(4 * FLOATS))
    rt.tick()
    return rt, kernel, runtime(**settings)


@pytest.fixture
def trained_models(runtime, shared_book):
    """The runtime of train.ipynb, which holds the model qwen, and one of another process with llama."""
    rt, other = (runtime(ledger=shared_book) for _ in range(2))
    rt._session.notebook = "/work/train.ipynb"
    loaded(rt, qwen="3GiB").tick()
    loaded(other, llama="1GiB").tick()
    return rt, other


def test_a_notebook_or_process_is_parked_by_its_name(train):
    rt, _, other = train
    parked = other.park("train.ipynb")
    assert (parked.name, parked.done, HOST in own(rt)) == ("train.ipynb", True, True)
    assert parked.because == "train.ipynb is in RAM"
    assert list(other.evictions().model) == ["train.ipynb"]
    for again in (other.evict("train.ipynb"), other.park("train.ipynb")):
        assert (again.name, again.done, again.bytes) == ("train.ipynb", True, 0)
        there = r"all of it is in RAM already: its own memory \(4.0 MiB\) for [\d.]+ m?s, until a "
        assert re.match(there, again.because)
        assert again.because.endswith("cell needs it. Bring it back now:  %gpu unpark train.ipynb")
    assert rt.park().because.endswith("Bring it back now:  %gpu unpark")
    assert other.unpark("train.ipynb").done and HOST not in own(rt)
    with pytest.raises(GpuError, match=r"no kernel 'evel.ipynb'.*train.ipynb"):
        other.park("evel.ipynb")
    with pytest.raises(GpuError, match="%load_ext gpu"):
        other.park()


def test_a_notebooks_name_is_an_address_for_every_verb(train):
    """A verb that only a model can take says what to type; `pin` suggested to register the notebook."""
    rt, _, other = train
    assert other.plan("train.ipynb").because.startswith("train.ipynb is on sim:0")
    assert other.defrag("train.ipynb").done
    for here in (rt, other):
        assert here.evict("train.ipynb").done and HOST in own(rt)
        back = here.restore("train.ipynb")
        assert (back.name, back.done, HOST in own(rt)) == ("train.ipynb", True, False)
        for refused, advice in (
            (here.pin, "%gpu park never"),
            (here.unpin, "%gpu park asked"),
            (partial(here.move, device="sim:1"), "%gpu park train.ipynb"),
        ):
            with pytest.raises(GpuError, match=r"train.ipynb is a notebook: .* 4\.0 MiB") as caught:
                refused("train.ipynb")
            assert advice in str(caught.value) and "sim:1" not in own(rt)
        for known in (here.forget, here.spec):
            with pytest.raises(UnknownModel, match="NAME@train.ipynb"):
                known("train.ipynb")
        with pytest.raises(GpuError, match="no kernel 'evel.ipynb'.*train.ipynb"):
            here.pin("evel.ipynb")


def test_of_two_notebooks_with_one_file_name_the_path_is_the_address(started, runtime, shared_book):
    """`why` was silently about one of them, `defrag` acted on both, and errors showed no path."""
    devices = "sim:1GiB,host:4GiB"
    kept = torch.zeros(4 * FLOATS)
    for folder in ("ann", "bob"):
        rt, kernel = started(devices=devices, ledger=shared_book)
        rt._session.notebook = f"/{folder}/train.ipynb"
        cell(kernel)
        rt.tick()
    other = runtime(devices=devices, ledger=shared_book)
    choices = "'train.ipynb': /ann/train.ipynb, /bob/train.ipynb. Name one"
    verbs = (other.park, other.why, other.who, other.plan, other.pin, other.evict, other.defrag)
    for verb in verbs:
        with pytest.raises(AmbiguousName, match=choices):
            verb("train.ipynb")
    [event] = other.why("/bob/train.ipynb")
    assert event.notebook == "/bob/train.ipynb"
    with pytest.raises(GpuError, match="To free that card:  %gpu park /bob/train.ipynb"):
        other.move("/bob/train.ipynb", "sim:0")
    del kept


def test_a_notebook_without_memory_of_its_own_is_an_address_of_its_models(trained_models):
    _, other = trained_models
    for verb in (other.pin, other.restore, other.plan):
        with pytest.raises(GpuError, match="It holds models: qwen. .*qwen@train.ipynb"):
            verb("train.ipynb")
    with pytest.raises(GpuError, match="(?s)It holds models: qwen.*%gpu evict train.ipynb"):
        other.park("train.ipynb")
    assert other.pin("qwen@train.ipynb").done
    with pytest.raises(GpuError, match="(?s)qwen is a model, and not a notebook.*%gpu evict qwen"):
        other.park("qwen")
    with pytest.raises(GpuError, match="no kernel 'rain.ipynb' holds memory"):
        other.park("rain.ipynb")  # the end of a name is no name


def test_why_without_a_name_is_about_this_process(runtime, shared_book):
    """`%gpu why` was an error. In a terminal, which holds nothing, it is about the host."""
    rt, other, command = (runtime(ledger=shared_book) for _ in range(3))
    command.guest = True
    fakes(rt, mine="3GiB")
    fakes(other, theirs="3GiB")
    assert rt.why() == command.why() == ()
    rt.preload("mine")
    other.preload("theirs")
    assert {event.model for event in rt.why()} == {"mine"}
    assert {event.model for event in command.why()} == {"mine", "theirs"}
    assert rt.why()[0].action == "loaded", "the newest is first"


def test_the_decisions_on_a_notebook_are_found_after_its_kernel_has_ended(train):
    """Another notebook's kernel, which has the same name in the ledger, is not mixed in."""
    rt, _, other = train
    loaded(rt, qwen="1MiB")
    assert other.park("train.ipynb").done
    before = other.why("train.ipynb")
    assert {event.title for event in before} == {"train.ipynb"}, "nor are those on its models"
    rt.close()
    for name in ("train.ipynb", "/work/train.ipynb"):
        after = other.why(name)
        assert {event.owner for event in after} == {before[0].owner}
        assert {event.action for event in before} <= {event.action for event in after}
    with pytest.raises(UnknownModel):
        other.why("/")


def test_an_ended_notebook_that_held_only_models_keeps_its_name(trained_models):
    """Its events named it by its pid, because only events about a notebook's own memory had its path."""
    rt, other = trained_models
    me = rt._session.me
    rt.close()
    ended = f"train.ipynb (pid {os.getpid()}), ended"
    assert other.events().attrs["owners"][me] == ended
    assert views.holder(other.status(), me) == ended
    [loaded, *_] = [event for event in other.why("qwen") if event.action == "loaded"]
    assert (loaded.title, str(loaded).split()[0]) == ("qwen", "qwen")
    for name in ("train.ipynb", "/work/train.ipynb", "qwen@train.ipynb"):
        assert {event.model for event in other.why(name)} == {"qwen"}


def test_why_of_an_unknown_notebook_says_which_there_are_and_what_to_type(trained_models):
    """It answered "no model is called …". A notebook with only models gets its last events."""
    _, other = trained_models
    those = r"Notebooks that hold memory: train.ipynb.\n  All holders:  %gpu leases"
    for unknown, meant in (("nope.ipynb", ""), ("rain.ipynb", r"Did you mean train.ipynb\? ")):
        told = f"no notebook '{unknown}' holds memory. {meant}{those}"
        with pytest.raises(GpuError, match=told):
            other.why(unknown)
        for verb in ("defrag", "who"):
            with pytest.raises(GpuError, match=f"shares this ledger.*{meant}Those that do"):
                getattr(other, verb)(unknown)
    for verb in ("why", "evict"):
        with pytest.raises(GpuError, match="train.ipynb is a notebook: type its whole name"):
            getattr(other, verb)("train")
    found = other.why("train.ipynb")
    assert {event.model for event in found} == {"qwen"} and found[0].action == "loaded"


@pytest.mark.parametrize(
    "verb, name", [("park", ""), ("park", "train.ipynb"), ("evict", "train.ipynb")]
)
def test_a_cell_that_parks_its_own_kernel_parks_it_at_its_end(train, verb, name):
    """Also under the name of its notebook, which was refused: "runs a cell"."""
    rt, kernel, _ = train
    told = []
    cell(kernel, lambda: told.append(getattr(rt, verb)(name)))
    assert told[0].done and "when this cell has ended" in told[0].because
    until(lambda: HOST in own(rt))


def test_a_closed_runtime_leaves_the_tensors_usable(started):
    rt, kernel = started()
    kept = keep(kernel, torch.randn(4 * FLOATS))
    values = kept.clone()
    rt.park()
    rt.close()
    kept.add_(0)
    assert torch.equal(kept, values) and kernel.refusal is None


def test_after_a_cell_without_memory_idle_leases_leave_and_the_user_is_told(
    started, runtime, shared_book
):
    """Idle models leave until the bytes that torch requested are free, and no more than necessary."""
    devices = "sim:1GiB,host:4GiB"
    rt, kernel = started(devices=devices, ledger=shared_book, eviction_grace_seconds=0.0)
    other = runtime(devices=devices, ledger=shared_book, eviction_grace_seconds=0.0)
    loaded(other, old="300MiB", young="300MiB")
    cell(kernel)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has …")
    story = kernel.cell_failed(error)
    assert story.others == ("old stepped aside", "young (300 MiB) leaves if the cell needs it")
    assert story.advice == "run the cell again"
    assert kernel.cell_failed(ValueError("no")) == ""
    kernel.cell_failed(error)
    assert kernel.cell_failed(error).others == ()


def test_consent_to_run_again_counts_for_out_of_memory_errors_only(started, runtime, shared_book):
    """The error may be torch's own error, or the report of a block that ran out of memory."""
    devices = "sim:1GiB,host:4GiB"
    rt, kernel = started(devices=devices, ledger=shared_book, eviction_grace_seconds=0.0)
    other = runtime(devices=devices, ledger=shared_book, eviction_grace_seconds=0.0)
    loaded(other, idle="300MiB")
    assert kernel.make_room_to_retry(ValueError("no")) == ""
    with pytest.raises(MemoryError) as caught, rt.lease(None):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.")
    expected = "300 MiB came free (idle stepped aside): the cell runs again."
    assert kernel.make_room_to_retry(caught.value) == expected
    assert kernel.make_room_to_retry(caught.value) == ""


def test_an_overdraft_ends_within_3_seconds(started, runtime, shared_book, clock):
    """Plain code took memory without a request. The idle kernel then leaves the overfull card."""
    devices = "sim:64MiB,host:4GiB"
    rt, kernel = started(devices=devices, ledger=shared_book, clock=clock)
    other = runtime(devices=devices, ledger=shared_book, monitor=False, clock=clock)
    loaded(other, m="50MiB")
    keep(kernel, torch.zeros(16 * FLOATS))
    view = other.status().devices[0]
    assert view.claimed_bytes > view.limit_bytes
    began = clock()
    while HOST not in own(rt) and clock() < began + 60:
        clock.advance(rt.tick())
    assert HOST in own(rt) and clock() - began <= 3


def test_the_line_of_a_return_names_the_other_notebook(started, runtime, shared_book, clock):
    devices = "sim:64MiB,host:4GiB"
    settings = {"devices": devices, "ledger": shared_book, "clock": clock}
    rt, kernel = started(**settings)
    other = runtime(monitor=False, **settings)
    other._session.notebook = "/work/trainer.ipynb"
    keep(kernel, torch.zeros(16 * FLOATS))
    rt.park()
    with other.lease("1MiB", purpose="training"):
        clock.advance(12 * 60)
        news = cell(kernel)
    assert news.endswith("; trainer.ipynb had the card for 12 min.")
    assert "came back from RAM in" in news
    rt.park()
    clock.advance(60)
    assert cell(kernel).endswith("; it was away for 60 s.")
    rt.park()
    clock.advance(11 * 60)  # other notebooks had the card, and have left it
    with other.lease("1MiB", purpose="training"):
        other.tick()  # publishes that the lease has settled
        clock.advance(26)
        news = cell(kernel)
    expected = "; it was away for 11 min, and trainer.ipynb had the card for the last 26 s."
    assert news.endswith(expected)


def test_sentences_about_the_notebooks_memory_name_the_notebook(started):
    """They said "unpark kernel: kernel is on sim:0 already" and "kernel stays where it is"."""
    rt, kernel = started()
    rt._session.notebook = "/work/train.ipynb"
    keep(kernel, torch.zeros(16 * FLOATS))
    back = rt.unpark()
    assert (back.name, back.because) == ("", "train.ipynb is on sim:0 already")
    kernel._stillness.reason = "a thread of its own runs (loader)"
    with pytest.raises(GpuError):
        rt.park()
    [failed] = [event for event in rt.why("kernel") if event.action == "failed"]
    assert failed.because.startswith("train.ipynb stays where it is: ")


def test_the_line_of_a_return_tells_the_wait_for_space_from_the_move(started, clock, monkeypatch):
    """A notebook that waited 71 s for another one was told that the move took 71 s."""
    rt, kernel = started(clock=clock)
    keep(kernel, torch.zeros(16 * FLOATS))
    rt.park()
    clock.advance(9)
    obtain = acquire.obtain

    def waits(*args, **options):
        clock.advance(71)
        obtain(*args, **options)

    monkeypatch.setattr(acquire, "obtain", waits)
    news = cell(kernel)
    moved = kernel.resident.lease.restore_seconds
    assert 0 < moved < 60 and news == (
        f"16.0 MiB came back from RAM: waited {show_seconds(71 - moved)} for space, "
        f"moved in {show_seconds(moved)}; it was away for {show_seconds(80 - moved)}."
    )


# -- settings --------------------------------------------------------------------------------------
@pytest.mark.parametrize("by_verb", [False, True])
def test_a_kernel_that_is_never_parked_stays(started, runtime, shared_book, by_verb):
    """Other processes read at once that it cannot leave."""
    rt, kernel = started(ledger=shared_book, gpu_park="asked" if by_verb else "never")
    keep(kernel, torch.zeros(4 * FLOATS))
    if by_verb:
        rt.park("never")
    [lease] = runtime(ledger=shared_book, monitor=False).status().leases()
    assert not lease.movable
    with pytest.raises(GpuError):
        rt.park()
    assert HOST not in own(rt)


def test_a_kernel_that_could_not_be_parked_is_tried_again_after_a_minute_or_a_cell(
    started, clock, quiet, caplog
):
    """What prevented it may have ended in the cell. While a cell runs, it is not tried."""
    rt, kernel = started(gpu_park="idle", gpu_park_idle_seconds=10.0, clock=clock)
    keep(kernel, torch.zeros(4 * FLOATS))
    tries = []

    def passes(seconds):
        clock.advance(seconds)
        rt.tick()
        tries.append(len(caplog.records))

    quiet.reason = "a thread runs"
    for seconds in (9, 1, 59, 1):
        passes(seconds)
    cell(kernel)
    for seconds in (9, 1):
        passes(seconds)
    kernel.begin()
    passes(100)
    kernel.end()
    assert tries == [0, 1, 1, 2, 2, 3, 3]
    assert [event.action for event in rt.why("kernel")].count("failed") == 2, "once for each row"
    quiet.reason = ""
    passes(60)
    assert HOST in own(rt)


@pytest.mark.parametrize("seconds, pause", [(0.04, 1), (1.0, 20)])
def test_slow_counts_between_cells_take_a_twentieth_of_the_time(
    started, clock, monkeypatch, seconds, pause
):
    _, kernel = started(clock=clock)
    counted = []

    def count(_):
        counted.append(clock())
        clock.advance(seconds)

    monkeypatch.setattr(type(kernel), "count", count)
    while clock() < 1100:
        clock.advance(1)
        kernel.begin()
        kernel.end()
    pauses = [later - one for one, later in pairwise(counted)]
    assert pauses and all(pause <= each <= pause + 1 for each in pauses)


# -- what stays ------------------------------------------------------------------------------------
@pytest.fixture
def variables(monkeypatch):
    """The variables of a notebook. No function's variable refers to their tensors."""
    found: dict[str, torch.Tensor] = {}
    kind = type("Variables", (Namespace,), {"_variables": found})
    monkeypatch.setattr(registered, "current", kind())
    return found


def staying(rt) -> dict[str, int]:
    """The MiB that cannot leave a card in the book, by reason."""
    sections = rt.status().sections.values()
    return {one.why: one.bytes // MIB for section in sections for one in section.staying}


def test_what_numpy_uses_is_counted_named_and_does_not_leave(started, variables):
    """In an earlier version it was not counted."""
    rt, kernel = started()
    cell(kernel, lambda: variables.update(y=torch.zeros(8 * FLOATS)))
    before, claimed = own(rt)["sim:0"], claims(rt)["sim:0"]
    array = np.zeros(16 * FLOATS, dtype="float32")
    cell(kernel, lambda: variables.update(x=torch.from_numpy(array)))
    assert own(rt)["sim:0"] == before and staying(rt) == {FOREIGN: 16}
    assert claims(rt)["sim:0"] == claimed + 16 * MIB
    assert f"16.0 MiB stays on sim:0 (x): {FOREIGN}" in rt.park().because
    assert claims(rt)["sim:0"] == 16 * MIB
    assert f"16.0 MiB on sim:0: {FOREIGN}" in [event.because for event in rt.why()]


def test_memory_that_stays_in_two_tensors_counts_once(started, variables):
    rt, kernel = started()
    array = np.zeros(16 * FLOATS, dtype="float32")
    both = {name: torch.from_numpy(array) for name in "xy"}
    cell(kernel, lambda: variables.update(both))
    assert sum(staying(rt).values()) == 16


def test_what_stays_has_a_row_and_a_name_everywhere(started, variables):
    rt, kernel = started()
    array = np.zeros(16 * FLOATS, dtype="float32")
    cell(kernel, lambda: variables.update(x=torch.from_numpy(array)))
    [row] = [row for row in views.holdings(rt.status()) if row.kind == "stays"]
    assert (row.bytes, row.where, row.state) == (16 * MIB, "sim:0", f"stays: {FOREIGN}")
    table = rt.who()
    [x] = [row for row in table.to_dict("records") if row["name"] == "x"]
    assert (x["stays"], x["stays_bytes"]) == (FOREIGN, 16 * MIB)
    text = repr(answers.showing(table, answers.who))
    assert "Tensor; 16.0 MiB stays" in text and f"16.0 MiB stays on sim:0: {FOREIGN}." in text


def test_a_notebook_without_a_lease_says_what_stays(started, monkeypatch):
    """In an earlier version, `park` reported "holds nothing on a card" beside the bytes in `who`."""
    rt, kernel = started()
    cell(kernel)
    found = Staying("sim:0", FOREIGN, 16 * MIB)
    monkeypatch.setattr(type(kernel), "resident", None)
    monkeypatch.setattr(type(kernel), "count", lambda self: None)
    monkeypatch.setattr(type(kernel), "staying", (found,))
    monkeypatch.setattr(holdings, "search_here", lambda session: Holdings((), staying=(found,)))
    assert rt.park().because == f"16.0 MiB stays on sim:0: {FOREIGN}"


def test_park_reports_the_bytes_that_moved(started, variables):
    """In an earlier version it reported what was counted last."""
    rt, kernel = started()
    cell(kernel, lambda: variables.update(x=torch.ones(2 * FLOATS)))
    counted = own(rt)["sim:0"]
    variables["y"] = torch.ones(16 * FLOATS)
    outcome = rt.park()
    assert outcome.bytes == counted + 16 * MIB == own(rt)[HOST]
    assert f"{show_bytes(outcome.bytes)} came free" in outcome.because


def test_another_process_is_told_what_stays(started, runtime, shared_book, variables, monkeypatch):
    """Without the names of the variables, also if the notebook has no lease."""
    rt, kernel = started(ledger=shared_book)
    other = runtime(ledger=shared_book, monitor=False)
    found = (Staying("sim:0", FOREIGN, 16 * MIB),)
    monkeypatch.setattr(rt._session, "staying", lambda: found)
    rt._session.publish()
    me = rt._session.me
    outcome = other.park(me)
    assert (outcome.bytes, outcome.because) == (0, f"16.0 MiB stays on sim:0: {FOREIGN}")
    assert [event.action for event in other.why(me)] == ["stays"]
    with pytest.raises(GpuError, match="no kernel .* holds memory"):
        other.unpark(me)


def test_a_reason_to_stay_ends_with_the_array(started, variables):
    """torch marks a tensor for ever once `numpy()` was called."""
    rt, kernel = started()
    cell(kernel, lambda: variables.update(x=torch.ones(16 * FLOATS)))
    before = own(rt)["sim:0"]
    arrays = []
    cell(kernel, lambda: arrays.append(variables["x"].numpy()))
    assert before - own(rt).get("sim:0", 0) == 16 * MIB and staying(rt) == {ARRAY: 16}
    cell(kernel, arrays.clear)
    assert own(rt)["sim:0"] == before and staying(rt) == {}
    address = swap.address(variables["x"])
    assert rt.park().done and swap.address(variables["x"]) != address
    cell(kernel)
    assert variables["x"].sum() == 16 * FLOATS


def test_a_model_that_is_mapped_from_its_file_is_counted_and_parked(started, variables, tmp_path):
    """Nobody else sees a private mapping, so its bytes can be exchanged for equal ones."""
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.ones(8 * FLOATS), "b": torch.ones(4)}, path)
    rt, kernel = started()
    cell(kernel, lambda: variables.update(y=torch.zeros(8 * FLOATS)))
    before = own(rt)["sim:0"]
    cell(kernel, lambda: variables.update(torch.load(path, mmap=True)))
    assert own(rt)["sim:0"] - before == 8 * MIB and staying(rt) == {}
    assert rt.park().done
    cell(kernel, lambda: variables["a"].add_(1))
    assert variables["a"].sum() == 16 * FLOATS and variables["b"].sum() == 4
    assert torch.load(path)["a"].sum() == 8 * FLOATS


def test_a_kernel_all_of_whose_memory_stays_is_not_parked(started, variables, monkeypatch):
    """The failed move names the reason."""
    rt, kernel = started()
    cell(kernel, lambda: variables.update(x=torch.ones(16 * FLOATS)))
    backend = kernel.resident.backend
    found = backend._found

    def of_numpy(model, known=None):
        every, streams = found(model, known)
        return [one._replace(stays=ARRAY) for one in every], streams

    monkeypatch.setattr(backend, "_found", of_numpy)
    with pytest.raises(StillInUse, match=f"all of it stays: {ARRAY}"):
        rt.park()


def test_a_skipped_count_is_made_up_for_without_a_lease(started, variables):
    """A slow first count that found nothing delayed the next one for ever: the monitor starts with a lease."""
    rt, kernel = started()
    kernel._count_again_at = rt._session.clock() + 60
    kernel.begin("")
    variables.update(x=torch.ones(16 * FLOATS))
    kernel.end()
    assert rt._session.monitor_started and not own(rt)
    maintenance.tick(rt._session)
    assert own(rt)["sim:0"] >= 16 * MIB
