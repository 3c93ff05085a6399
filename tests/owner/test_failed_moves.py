"""A failed move delays only its model: retries after growing pauses, one line of the log, no other request fails."""

import logging
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from gpu_runtime import Busy, GpuError, LedgerUnavailable, OutOfMemory, Runtime, threads
from gpu_runtime.devices.process_memory import out_of_memory
from gpu_runtime.owner import maintenance, release
from gpu_runtime.scheduler.recall import Order
from gpu_runtime.units import GIB
from tests.clock import PATIENCE, until
from tests.core.test_raised_errors import no_thread

from .conftest import fakes, loaded, where

BOX = {"devices": "sim:24GiB,host:64GiB", "eviction_grace_seconds": 0}


class Bus:
    """A fake model whose moves fail while `broken` is set. It counts the tries."""

    def __init__(self, rt: Runtime, name: str, size: str = "10GiB", *, droppable: bool = False):
        self.broken: Exception | None = RuntimeError("the host has no pinned memory left")
        self.tries = 0
        rt.register(name, self._step, backend="fake", size=size)
        rt.preload(name)
        backend = rt._session.residents[name].backend
        usual = backend.droppable
        backend.droppable = lambda model: droppable if model.name == name else usual(model)
        resident = rt._session.residents[name]
        resident.lease = replace(resident.lease, droppable=droppable)

    def _step(self, verb: str) -> None:
        if verb == "move":
            self.tries += 1
            if self.broken:
                raise self.broken


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the first pause after a failed move, so that a test can wait for its end."""
    monkeypatch.setattr(release, "FIRST_PAUSE_SECONDS", 0.05)


def failures(rt: Runtime, name: str) -> list[str]:
    return [event.because for event in rt.why(name) if event.action == "failed"]


# -- in one process


def test_a_move_after_which_all_bytes_are_where_they_were_has_failed(runtime, monkeypatch):
    """It counted as done, so the request moved the model again, without a pause and beyond its own time-out."""
    rt = runtime(**BOX)
    bus = Bus(rt, "oldest", "20GiB")
    bus.broken = None
    monkeypatch.setattr(type(rt._session.residents["oldest"].backend), "move", lambda *_: None)
    fakes(rt, wanted="10GiB")
    with pytest.raises(Busy):
        rt.preload("wanted", timeout=0.1)
    assert failures(rt, "oldest") == ["oldest stays where it is: none of its bytes left its card."]
    assert where(rt)["oldest"] == "sim:0"


def test_a_model_that_may_be_dropped_is_dropped_where_its_move_fails(runtime, caplog):
    rt = runtime(**BOX)
    Bus(rt, "oldest", droppable=True)
    fakes(rt, next="10GiB", wanted="10GiB")
    rt.preload("next")
    with caplog.at_level(logging.WARNING, "gpu_runtime"), rt.use("wanted", timeout=PATIENCE):
        assert where(rt) == {"oldest": "disk", "next": "sim:0", "wanted": "sim:0"}
    assert "no pinned memory left" in rt.why("oldest")[0].because
    assert len(caplog.records) == 1
    totals = rt.status().totals
    assert totals["evictions"] == totals["offloads"] + totals["unloads"] == 1


def test_a_request_that_cannot_be_served_says_busy_and_not_what_failed(runtime, quick):
    rt = runtime(**BOX)
    Bus(rt, "only", "20GiB")
    fakes(rt, wanted="10GiB")
    with pytest.raises(Busy, match="only .* could not be moved"), rt.use("wanted", timeout=0.2):
        pass
    assert where(rt)["only"] == "sim:0"
    assert rt.status().tickets == ()


@pytest.mark.parametrize("verb", ["evict", "move"])
def test_a_person_who_moves_the_model_sees_the_error_each_time_and_waits_for_no_pause(
    runtime, verb
):
    rt = runtime(**{**BOX, "devices": "sim:2x24GiB,host:64GiB"})
    bus = Bus(rt, "m")
    act = {"evict": lambda: rt.evict("m"), "move": lambda: rt.move("m", "sim:1")}[verb]
    for tries in (1, 2, 3):
        with pytest.raises(RuntimeError):
            act()
        assert bus.tries == tries and where(rt) == {"m": "sim:0"}
    bus.broken = None
    assert act().where == {"evict": "host", "move": "sim:1"}[verb]


def test_a_move_that_fails_after_its_bytes_have_moved_is_measured(runtime, monkeypatch):
    """The book has the bytes where they are, and not where they were before the move."""
    rt = loaded(runtime(**BOX), m="10GiB")
    backend = rt._session.residents["m"].backend

    def moves_and_fails(handle, shares):
        usual(handle, shares)
        raise RuntimeError("the copy was not verified")

    usual = backend.move
    monkeypatch.setattr(backend, "move", moves_and_fails)
    with pytest.raises(RuntimeError, match="not verified"):
        rt.evict("m")
    assert where(rt) == {"m": "host"}


def test_a_drop_that_its_backend_complains_of_is_a_drop(runtime, monkeypatch, caplog):
    rt = fakes(runtime(**BOX, monitor=False), m="10GiB", wanted="20GiB")
    rt.preload("m")
    rt.probe.place("host").squeeze(60 << 30)
    backend = rt._session.residents["m"].backend
    drop = backend.drop

    def complain(model):
        drop(model)
        raise RuntimeError("close() twice")

    monkeypatch.setattr(backend, "drop", complain)
    with caplog.at_level(logging.WARNING, "gpu_runtime"), rt.use("wanted", timeout=PATIENCE):
        assert where(rt) == {"m": "disk", "wanted": "sim:0"}
    assert "close() twice" in caplog.text
    monkeypatch.undo()


@pytest.mark.parametrize(("squeezed", "said"), [(15, "while loading wanted"), (0, "idle")])
def test_a_load_or_block_without_memory_says_that_and_not_what_failed_to_leave(
    runtime, squeezed, said
):
    rt = runtime(**BOX)
    Bus(rt, "idle", "5GiB")
    fakes(rt, wanted="10GiB")
    rt.probe.place("sim:0").squeeze(squeezed << 30)
    with pytest.raises(OutOfMemory, match=said), rt.use("wanted"):
        raise out_of_memory("sim:0 is full")


# -- what the monitor does for others
def test_a_failing_model_is_tried_less_and_less_often_and_logged_once(runtime, clock, caplog):
    """In an earlier version, two hundred tries in eight seconds filled the log and the journal."""
    rt = runtime(**BOX, monitor=False, clock=clock)
    bus = Bus(rt, "m")
    rt.drain("sim:0", timeout=0)
    tried_at = []
    with caplog.at_level(logging.WARNING, "gpu_runtime"):
        for _ in range(400):
            before = bus.tries
            rt.tick()
            if bus.tries > before:
                tried_at.append(round(clock.now - 1000.0, 1))
            clock.advance(0.5)
    # The drain itself was the first try, at 0.
    assert tried_at == [1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 123.0, 183.0]
    assert len(failures(rt, "m")) == len(caplog.records) == 1
    bus.broken = None
    clock.advance(60)
    rt.tick()
    assert where(rt) == {"m": "host"}


def test_each_row_of_failures_is_logged_and_journaled_once(runtime, clock, caplog):
    rt = runtime(**BOX, monitor=False, clock=clock)
    bus = Bus(rt, "m")
    with caplog.at_level(logging.WARNING, "gpu_runtime"):
        for _ in range(2):
            bus.broken = RuntimeError("no pinned memory")
            rt.drain("sim:0", timeout=0)
            for _ in range(20):
                clock.advance(1)
                rt.tick()
            bus.broken = None
            clock.advance(60)
            rt.tick()
            assert where(rt) == {"m": "host"}
            rt.drain("sim:0", undo=True)
            rt.preload("m")
    assert len(caplog.records) == len(failures(rt, "m")) == 2
    assert "m stays where it is: RuntimeError: no pinned memory" in caplog.text


def test_one_failing_model_does_not_keep_the_others_on_a_drained_card(runtime):
    rt = runtime(**BOX, monitor=False)
    Bus(rt, "a", "5GiB")
    loaded(rt, b="5GiB", c="5GiB")
    said = rt.drain("sim:0", timeout=0).because
    assert where(rt) == {"a": "sim:0", "b": "host", "c": "host"}
    assert "a (5.0 GiB) could not be moved; its process tries again" in said


def test_relief_does_not_drop_what_its_level_only_offloads(runtime):
    """At moderate pressure models are only offloaded. A failed offload is no reason to unload the model."""
    rt = runtime(**BOX, monitor=False, gpu_relief="always")
    bus = Bus(rt, "m", "17GiB", droppable=True)
    rt._session.residents["m"].last_used -= 400
    rt.tick()
    maintenance.relieve(rt._session)
    assert bus.tries == 1
    assert where(rt) == {"m": "sim:0"}


# -- in one process and between two
@pytest.fixture
def two(runtime: Callable[..., Runtime], shared_book: str) -> tuple[Runtime, Runtime]:
    a, b = (runtime(**BOX, ledger=shared_book) for _ in "ab")
    return a, b


@pytest.fixture(params=["own", "another's"])
def holder(two: tuple[Runtime, Runtime], request: pytest.FixtureRequest) -> tuple[Runtime, Runtime]:
    """The runtime whose moves fail, and the one that requests: the same, or another."""
    return two if request.param == "another's" else (two[0], two[0])


def test_the_next_victim_leaves_where_a_move_fails(holder):
    a, b = holder
    bus = Bus(a, "oldest")
    loaded(a, next="10GiB")
    fakes(b, wanted="10GiB")
    with b.use("wanted", timeout=PATIENCE):
        assert where(b) == {"oldest": "sim:0", "next": "host", "wanted": "sim:0"}
    assert bus.tries == 1
    assert len(failures(a, "oldest")) == 1


def test_a_request_waits_for_a_move_that_fails_at_first(holder, quick, caplog):
    a, b = holder
    bus = Bus(a, "only", "20GiB")
    fakes(b, wanted="10GiB")
    told = []

    def mend(name, wait):
        told.append(wait and wait.because)
        if bus.tries > 1:
            bus.broken = None

    b.tell_waits(mend)
    with caplog.at_level(logging.WARNING, "gpu_runtime"), b.use("wanted", timeout=PATIENCE):
        assert where(b) == {"only": "host", "wanted": "sim:0"}
    assert len(caplog.records) == len(failures(a, "only")) == 1
    assert a._session.residents["only"].failed_moves == 0
    assert "could not be moved: RuntimeError: the host has no" in "".join(filter(None, told))


def test_a_person_elsewhere_is_refused_with_the_reason_and_not_kept_waiting(two):
    a, b = two
    Bus(a, "m")
    with pytest.raises(Exception, match=r"m \(10.0 GiB on sim:0\) could not be moved.*again in"):
        b.evict("m", timeout=PATIENCE)


@pytest.mark.parametrize("verb", ["move", "preload"])
def test_an_order_that_fails_with_a_drivers_error_is_answered(runtime, shared_book, verb):
    """The error ended the thread that carried out the order, and the requester waited until its time-out."""
    box = BOX | {"devices": "sim:2x24GiB,host:64GiB"}
    a, b = (runtime(**box, ledger=shared_book) for _ in "ab")
    bus = Bus(a, "m")
    if verb == "preload":
        bus.broken = None
        a.evict("m")
        bus.broken = RuntimeError("the bus is gone")
    act = {
        "move": lambda: b.move("m", "sim:1", timeout=PATIENCE),
        "preload": lambda: b.preload("m"),
    }
    with pytest.raises(Exception, match="pinned memory left|the bus is gone"):
        act[verb]()


def test_an_order_whose_answer_could_not_be_written_is_carried_out_again(runtime, monkeypatch):
    """Otherwise the process that gave the order waits until its own time is over."""
    rt = fakes(runtime(), m="4GiB")
    session, order = rt._session, Order("k", "preload", "m")
    session.orders[order.key] = None

    def fails(*_, **__):
        raise LedgerUnavailable("the disk is full", path="/x")

    with monkeypatch.context() as broken:
        broken.setattr(session, "transact", fails)
        maintenance.carry_out_order(session, order)
    assert order.key not in session.orders


def test_what_no_thread_could_be_started_for_begins_later(runtime, shared_book, monkeypatch):
    """The order counted as begun for ever, and the process had no monitor until its end."""
    a, b = (runtime(ledger=shared_book, monitor=False, **BOX) for _ in "ab")
    fakes(a, m="4GiB")
    b.preload("m", wait=False)
    with monkeypatch.context() as full:
        full.setattr(threads, "start", no_thread)
        maintenance.tick(a._session)
        watched = runtime(monitor=True)
        with pytest.raises(RuntimeError):
            fakes(watched, n="1GiB")
    maintenance.tick(a._session)
    until(lambda: a.here("m"))
    watched.preload("n")
    assert watched._session.monitor._running


def test_an_answer_that_left_the_book_before_it_was_read_is_given_again(runtime, shared_book):
    """The book keeps the newest events only. A stopped requester waited for ever."""
    a, b = (runtime(ledger=shared_book, monitor=False, **BOX) for _ in "ab")
    bus = Bus(a, "m")
    bus.broken = None
    a.evict("m")
    bus.broken = RuntimeError("the bus is gone")
    b.preload("m", wait=False)
    [key] = b._session.standing
    maintenance.tick(a._session)
    until(lambda: a._session.orders[key.text])
    a._session.transact(lambda book, world: (replace(book, events=()), None))
    maintenance.tick(a._session)
    maintenance.tick(b._session)
    assert not b._session.standing
    maintenance.tick(a._session)
    assert not a._session.orders


# -- in a container


def test_what_the_containers_memory_limit_does_not_allow_stays_or_is_dropped(runtime, monkeypatch):
    """Linux would end the process, and values that exist nowhere else with it."""
    rt = runtime(**BOX)
    only, again = Bus(rt, "only"), Bus(rt, "again", droppable=True)
    only.broken = again.broken = None
    monkeypatch.setattr(release, "ram_left", lambda: 10 * GIB - 1)
    rt.evict("again")
    monkeypatch.setattr(rt._session.probe, "simulated", False)
    rt.preload("again")
    with pytest.raises(GpuError, match="limit of its container"):
        rt.evict("only")
    fakes(rt, next="10GiB")
    with rt.use("next", timeout=PATIENCE):
        assert where(rt) == {"only": "sim:0", "again": "disk", "next": "sim:0"}
    monkeypatch.setattr(release, "ram_left", lambda: 10 * GIB)
    rt.evict("only")
    assert where(rt)["only"] == "host" and only.tries == 1


def test_the_status_says_of_what_ram_has_no_room_for_what_an_eviction_would_say(runtime):
    for ram, stays in (("64GiB", False), ("16GiB", True)):  # half of it may be used
        rt = runtime(devices=f"sim:24GiB,host:{ram}", eviction_grace_seconds=0)
        bus = Bus(rt, "only")
        bus.broken = None
        lease = rt._session.residents["only"].lease
        rt._session.transact(lambda book, world, lease=lease: (book.with_lease(lease), None))
        found = rt.status().stays
        assert set(found) == ({lease.id} if stays else set())
        if stays:
            with pytest.raises(GpuError, match="RAM has no room for it"):
                rt.evict("only")
            assert "RAM has no room for it" in found[lease.id]
        else:
            assert rt.evict("only").done
