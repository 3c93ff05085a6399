"""Two threads, or a thread and the stop button, at the worst moment; a stress test found each case."""

import signal
import sys
import threading
from inspect import CO_GENERATOR
from unittest.mock import Mock

import pytest

from gpu_runtime import Runtime
from gpu_runtime.errors import LoadFailed, StillInUse
from gpu_runtime.facts import Phase
from gpu_runtime.owner import release
from gpu_runtime.owner.resident import Place
from gpu_runtime.units import GIB
from tests.clock import PATIENCE, until

from .conftest import alongside, claims, fakes, loaded, stopped_at, used_elsewhere, where


def test_a_preload_ends_where_another_thread_loads_the_model_first(runtime):
    """The second thread, which requested meanwhile, got the same verdict for ever."""
    rt, begun, go = runtime(), threading.Event(), threading.Event()

    def slow(verb):
        begun.set()
        go.wait(PATIENCE)

    rt.register("m", slow, backend="fake", size="3GiB")
    outcomes = []
    load = lambda: outcomes.append(rt.preload("m", timeout=PATIENCE))
    with alongside(load):
        begun.wait(PATIENCE)
        with alongside(load):
            until(lambda: rt.status().tickets)
            go.set()
    assert [outcome.where for outcome in outcomes] == ["sim:0", "sim:0"]


def test_the_table_of_models_survives_the_drop_of_one(runtime, monkeypatch):
    """The monitor drops the model between the check that it is loaded and its measurement."""
    rt = loaded(runtime(monitor=False), m="3GiB")
    sizing = rt._session.sizing
    resident, require_evidence = rt._session.residents["m"], sizing._require_evidence

    def drop_first(*args):
        if resident.handle is not None:
            rt.evict("m", drop=True)
        return require_evidence(*args)

    monkeypatch.setattr(sizing, "_require_evidence", drop_first)
    assert sizing.footprint(resident).bytes == 3 * GIB
    assert resident.handle is None


def test_an_interrupt_right_after_a_load_leaves_the_model_whole(runtime, monkeypatch):
    """The model is already installed. If its bytes were dropped, an empty model would count as loaded."""
    rt = fakes(runtime(monitor=False), m="3GiB")
    resident = rt._session.residents["m"]
    install = resident.install

    def install_and_stop(*args):
        install(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(resident, "install", install_and_stop)
    with pytest.raises(KeyboardInterrupt), rt.use("m"):
        pass
    rt.tick()
    with rt.use("m") as model:
        assert sum(share.bytes for share in model.place[0]) == 3 * GIB
    rt.evict("m")
    assert rt.probe.used() == {"sim:0": 0, "host": 3 * GIB}


@pytest.mark.parametrize("again", [False, True])
def test_an_interrupt_at_the_end_of_a_load_gives_its_bytes_back_at_once(
    runtime, monkeypatch, again
):
    """The frames of the traceback that the notebook keeps refer to the bytes.

    The runtime keeps the object of the first load for a reload. This object must not keep the bytes as well.
    """
    rt = fakes(runtime(monitor=False), m="3GiB")
    resident = rt._session.residents["m"]
    if again:
        rt.preload("m")
        release.evict(rt._session, resident, "for this test", drop=True)
    hold = resident.backend._hold

    def hold_and_stop(*args):
        hold(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as kept:
        patch.setattr(resident.backend, "_hold", hold_and_stop)
        with rt.use("m"):
            pass
    assert rt.probe.used() == {"sim:0": 0, "host": 0}
    assert kept.value.__traceback__
    assert rt.preload("m").done


def test_a_model_that_is_used_at_each_attempt_is_not_evicted_for_ever(runtime, monkeypatch):
    rt = loaded(runtime(monitor=False), m="3GiB")
    resident, attempts = rt._session.residents["m"], []
    monkeypatch.setattr(resident, "begin_moving", lambda: attempts.append(1))
    with pytest.raises(StillInUse, match=f"{release.MOST_DECISIONS} attempts"):
        rt.evict("m")
    assert len(attempts) == release.MOST_DECISIONS
    monkeypatch.undo()
    assert rt.evict("m").bytes == 3 * GIB


def test_an_interrupt_before_a_move_begins_leaves_nothing(runtime, monkeypatch):
    """The error that the notebook keeps referred to the closure with the move's key: the room stayed reserved."""
    rt = loaded(runtime(monitor=False), m="3GiB")
    rt.evict("m")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as kept:
        patch.setattr("_thread.start_new_thread", Mock(side_effect=KeyboardInterrupt))
        rt.preload("m")
    rt.tick()
    assert claims(rt) == {"host": 3 * GIB}
    assert kept.value.__traceback__, "a notebook keeps its last error, frames and all"
    assert rt.preload("m").done


@pytest.mark.parametrize("deed", ["lease", "use", "evict"])
def test_an_interrupt_right_after_a_decision_leaves_nothing_for_the_monitor(
    runtime, monkeypatch, deed
):
    """Granted bytes, and a model that was to leave, stayed reserved until the monitor looked, up to a minute later."""
    rt = fakes(loaded(runtime(monitor=False), m="3GiB"), n="3GiB")
    session = rt._session
    there = session.ledger.read().claims()
    deeds = {"lease": _leased, "use": lambda rt: _used(rt, "n"), "evict": lambda rt: rt.evict("m")}

    def stop(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "_notify", stop)
    with pytest.raises(KeyboardInterrupt):
        deeds[deed](rt)
    book = session.ledger.read()
    assert book.claims() == there
    assert all(lease.phase is Phase.SETTLED for lease in book.leases())


def test_a_second_interrupt_wakes_the_monitor_which_tidies_up(runtime, monkeypatch):
    session, woken = fakes(runtime(monitor=False), m="3GiB")._session, []

    monkeypatch.setattr(session, "wake_monitor", lambda: woken.append(1))
    monkeypatch.setattr(session.ledger, "read", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        session.withdraw(session.new_key("use m"))
    monkeypatch.undo()
    assert woken == [1]


def test_a_second_interrupt_while_tidying_up_leaves_nothing(runtime, monkeypatch):
    """Users press twice. A ticket that could not be withdrawn at once is withdrawn at the next tick."""
    rt = fakes(runtime(monitor=False), m="14GiB", other="14GiB")

    def stop(*_):
        raise KeyboardInterrupt

    with used_elsewhere(rt, "other"):
        rt.tell_waits(stop)
        monkeypatch.setattr(rt._session, "withdraw", stop)
        with pytest.raises(KeyboardInterrupt) as kept, rt.use("m"):
            pass
        rt.tick()
        assert rt._session.ledger.read().tickets == ()
        assert kept.value.__traceback__, "a notebook keeps its last error, frames and all"
        monkeypatch.undo()


def test_an_eviction_that_nobody_waits_for_is_done_once(runtime, shared_book):
    """The console's button evicts the model once. After that, the model may return and stay."""
    asker, owner = (
        runtime(ledger=shared_book, eviction_grace_seconds=0, monitor=False) for _ in range(2)
    )
    loaded(owner, m="3GiB")
    asker.evict("m", wait=False)
    for rt in (owner, asker):
        rt.tick()
    assert where(owner) == {"m": "host"}
    owner.preload("m")
    for rt in (owner, asker):
        rt.tick()
    assert where(owner) == {"m": "sim:0"} and not owner._session.ledger.read().tickets
    assert asker._session.keys.texts() == ()


def ours(frame) -> bool:
    """Whether a function of gpu_runtime runs in the frame, other than a generator."""
    name = frame.f_globals.get("__name__", "")
    return name.startswith("gpu_runtime") and not frame.f_code.co_flags & CO_GENERATOR


@pytest.mark.parametrize("deed", ["lease", "use", "evict", "preload"])
def test_an_interrupt_at_the_entry_of_any_function_leaves_nothing_once_the_monitor_has_looked(
    runtime, deed
):
    """Even the `finally` that releases a key can be interrupted, and the notebook keeps the error."""
    rt = fakes(runtime(monitor=False), m="3GiB", n="3GiB")
    deeds = {
        "lease": lambda: _leased(rt),
        "use": lambda: _used(rt, "m"),
        "evict": lambda: rt.evict("n"),
        "preload": lambda: rt.preload("n"),
    }
    call = 0
    while True:
        rt.evict("m")
        rt.evict("n") if deed == "preload" else rt.preload("n")
        kept = stopped_at(call := call + 1, deeds[deed], ours, "call")
        if kept is None:
            break
        rt.tick()
        book = rt._session.ledger.read()
        assert {lease.name for lease in book.leases()} <= {"m", "n"}, call
        assert not book.tickets, call
        assert not [lease for lease in book.leases() if lease.target or lease.pins], call
        assert rt._session.keys.texts() == (), call
    assert call > 100


def _used(rt: Runtime, name: str) -> None:
    with rt.use(name):
        pass


def _leased(rt: Runtime) -> None:
    with rt.lease("1GiB"):
        pass


def _forgotten_meanwhile(rt, failures):
    try:
        rt.preload("m")
    except LoadFailed as error:
        failures.append(str(error))


@pytest.mark.parametrize("from_ram", [False, True])
def test_a_model_that_is_forgotten_while_it_arrives_holds_nothing(runtime, from_ram):
    """Its bytes were held beside the ledger, and another process was granted them too."""
    rt, begun, go = runtime(), threading.Event(), threading.Event()
    armed = []

    def slow(verb):
        if armed:
            begun.set()
            until(go.is_set)

    rt.register("m", slow, backend="fake", size="1GiB")
    if from_ram:
        rt.preload("m")
        assert rt.evict("m").where == "host"
    armed.append(True)
    resident, failures = rt._session.residents["m"], []
    with alongside(lambda: _forgotten_meanwhile(rt, failures)):
        begun.wait(PATIENCE)
        with alongside(lambda: rt.forget("m")):
            until(lambda: resident.is_forgotten)
            go.set()
    [failure] = failures
    assert failure.startswith("m was not loaded: it was forgotten meanwhile.")
    assert rt.probe.place("sim:0").held_bytes() == 0 and not any(claims(rt).values())


def test_a_forgotten_model_that_has_just_moved_is_not_used(runtime):
    """The move's end made it ready for uses, and then its bytes were freed under them."""
    resident = loaded(runtime(), m="1GiB")._session.residents["m"]
    assert resident.begin_forgetting()
    resident.settle_at(resident.lease)
    assert resident.place is not Place.HERE


def test_who_waits_for_a_model_gets_no_later_one_of_its_name(runtime):
    """The wait went on for ever, at full speed."""
    rt, failures = fakes(runtime(devices="sim:8GiB,host:1GiB"), m="4GiB"), []
    with rt.lease("5GiB"), alongside(lambda: _forgotten_meanwhile(rt, failures)):
        until(lambda: rt.status().tickets)
        rt.forget("m")
        fakes(rt, m="1GiB")
        rt.preload("m")
    assert failures == ["m was not loaded: it was forgotten meanwhile."]


def test_an_unpin_during_a_move_is_not_undone_by_its_end(runtime):
    """The move's end wrote the lease as it was before, and the model was kept for ever."""
    rt = loaded(runtime(), m="3GiB")
    rt.pin("m")
    before = rt._session.residents["m"].lease
    rt.unpin("m")
    rt._session.residents["m"].settle_at(before)
    rt._session.publish()
    [lease] = rt._session.ledger.read().leases()
    assert not lease.keep


def _at_each_opcode(act, handler, watched, step):
    """Calls `act` again and again. In each call, `handler` runs in the middle of a watched frame, as for a signal."""
    at, done = 1, False
    while not done:
        left = at

        def trace(frame, kind, _):
            nonlocal left
            if not frame.f_code.co_filename.endswith(watched):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            left -= kind == "opcode"
            if left == 0 and kind == "opcode":
                sys.settrace(None)
                handler()
            return trace

        sys.settrace(trace)
        try:
            act()
        finally:
            sys.settrace(None)
        at, done = at + step, left > 0
    return at


def _too_late(*_):
    raise AssertionError("the signal handler waits for what it has interrupted")


@pytest.mark.parametrize("kind", ["memory", "keeper"])
def test_a_signal_handler_of_the_user_may_use_the_runtime_at_any_moment(runtime, tmp_path, kind):
    """It runs in the main thread, in the middle of a use or a lease, whose locks this thread holds."""
    ledger = "memory:" if kind == "memory" else f"keeper://{tmp_path}/ledger"
    rt = loaded(runtime(ledger=ledger, monitor=False), m="1GiB")
    keeper = getattr(rt._session.ledger, "_wire", None)

    def use():
        with rt.use("m"):
            pass

    def lease():
        with rt.lease("1MiB"):
            pass

    def handler():
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        try:
            use()
            lease()
            rt.status()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    old = signal.signal(signal.SIGALRM, _too_late)
    try:
        assert _at_each_opcode(use, handler, "owner/resident.py", 3) > 50
        places = ("ledgers/memory.py", "ledgers/notify.py", "keeper/ledger.py", "journal.py")
        assert _at_each_opcode(lease, handler, places, 7) > 100
        _at_each_opcode(rt._session.start_monitor, handler, "owner/session.py", 1)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert claims(rt) == {"sim:0": 2**30} and len(rt._session.blocks) == 0
    assert getattr(rt._session.ledger, "_wire", None) is keeper  # it was not ended
