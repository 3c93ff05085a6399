"""One poller for all sessions: it asks once, only while somebody looks, and outlives a ledger that fails."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from gpu_panels import watch as watches
from gpu_panels.poller import REFRESH_SECONDS, Watch
from msgspec.structs import replace

from gpu_runtime.errors import LedgerUnavailable
from gpu_runtime.facts import Phase

from . import samples


class Session:
    """Somebody who looks."""


class FakeRuntime:
    """Tells a snapshot, and counts how often it was asked."""

    def __init__(self):
        self.snapshot, self.asked, self.reaped, self.failure = samples.busy, 0, 0, None

    def reap(self):
        self.reaped += 1
        return 0

    def status(self):
        self.asked += 1
        if self.failure:
            raise self.failure
        return replace(self.snapshot, now=self.snapshot.now + self.asked)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def rt():
    return FakeRuntime()


@pytest.fixture
def watch(rt, clock):
    """Its thread never starts: the test polls."""
    return Watch(rt, clock=clock, wall=lambda: 1000.0 + clock.now, start=lambda work: None)


def test_a_snapshot_that_says_the_same_is_passed_on_once_a_second(watch, rt, clock):
    """Sessions redraw what depends on the time alone, no more often than anybody can read it."""
    watch.poll()
    first = watch.look.revision
    clock.now += REFRESH_SECONDS / 2
    watch.poll()
    assert watch.look.revision == first
    clock.now += REFRESH_SECONDS / 2
    watch.poll()
    assert watch.look.revision == first + 1


def test_what_has_changed_is_passed_on_at_once(watch, rt):
    watch.poll()
    rt.snapshot = samples.waiting
    watch.poll()
    assert watch.look.snapshot.tickets == samples.waiting.tickets


def changed(snapshot, **more):
    """The snapshot with its first lease changed."""
    owner, section = next(iter(snapshot.sections.items()))
    first, *others = section.leases
    leases = (replace(first, **more), *others)
    return replace(snapshot, sections=snapshot.sections | {owner: replace(section, leases=leases)})


def test_that_models_are_being_used_is_passed_on_with_the_next_second(watch, rt, clock):
    """On a box at work it changes with every look; twenty sessions would draw all of it twice a second."""
    watch.poll()
    first = watch.look.revision
    rt.snapshot = changed(samples.busy, pins=3, uses=99, last_used=samples.busy.now)
    watch.poll()
    assert watch.look.revision == first
    clock.now += REFRESH_SECONDS
    watch.poll()
    assert watch.look.snapshot.sections == rt.snapshot.sections


@pytest.mark.parametrize(
    "news", [{"shares": ()}, {"keep": True}, {"phase": Phase.LEAVING}, {"importance": 1}]
)
def test_where_a_model_lies_and_what_may_be_done_with_it_is_passed_on_at_once(watch, rt, news):
    """Whoever has just clicked waits for it."""
    watch.poll()
    rt.snapshot = changed(samples.busy, **news)
    watch.poll()
    assert watch.look.snapshot.sections == rt.snapshot.sections


def test_a_ledger_that_fails_is_told_with_the_time_since_when_and_the_last_figures_stay(
    watch, rt, clock
):
    """A page that went blank would say less than one that says how old it is."""
    watch.poll()
    rt.failure = LedgerUnavailable("the disk is full", path="/x")
    for clock.now in (10.0, 20.0):
        watch.poll()
    assert (watch.look.error, watch.look.since) == ("the disk is full", 1010.0)
    assert watch.look.snapshot.sections == samples.busy.sections
    rt.failure = None
    watch.poll()
    assert (watch.look.error, watch.look.since) == ("", 0.0)


def test_whatever_else_goes_wrong_does_not_end_the_watch(watch, rt, caplog):
    rt.failure = ZeroDivisionError("division by zero")
    watch.poll()
    assert watch.look.error == "division by zero" and watch.look.snapshot is None
    assert "Traceback" in caplog.text, "a fault of ours is in the log with its place"


def test_whoever_looks_also_looks_for_the_dead(watch, rt, clock):
    """A box whose last kernel was killed has nobody else to end its leases."""
    for clock.now in (10.0, 10.1, 11.5):
        watch.poll()
    assert (rt.asked, rt.reaped) == (3, 2)


def test_what_is_asked_beside_the_snapshot_is_fetched_once_for_all_and_anew_when_it_is_due(
    watch, rt, clock
):
    fetched = []

    def history(asked):
        fetched.append(asked)
        return len(fetched)

    def ask():
        return watch.latest("history", history, every=5.0)

    assert (ask(), ask()) == (None, None), "nobody waits for it"
    watch.poll()
    assert (ask(), ask(), fetched) == (1, 1, [rt])
    clock.now = 4.0
    watch.poll()
    clock.now = 6.0
    watch.poll()
    assert (ask(), len(fetched)) == (2, 2)


def test_what_came_beside_the_snapshot_is_news(watch):
    watch.poll()
    before = watch.look.revision
    watch.latest("history", lambda rt: object(), every=5.0)
    watch.poll()
    assert watch.look.revision == before + 1


def test_what_nobody_asks_for_any_more_is_not_fetched_and_is_forgotten(watch, clock):
    """A tab that is not looked at costs nothing."""
    fetched = []
    watch.latest("history", fetched.append, every=1.0)
    watch.poll()
    for clock.now in (30.0, 100.0):
        watch.poll()
    assert len(fetched) == 1 and not watch._wanted


def test_what_cannot_be_fetched_is_told_and_its_last_value_stays(watch, clock):
    answers = iter([7, OSError("no such file")])

    def fetch(rt):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    for clock.now in (0.0, 5.0, 6.0):  # the last of these fetches nothing, and forgets nothing
        watch.latest("x", fetch, every=5.0)
        watch.poll()
    assert watch.latest("x", fetch, every=5.0) == 7 and watch.look.error == "no such file"


def test_a_figure_is_reckoned_once_for_all_sessions(watch):
    made = []
    for snapshot in (samples.busy, samples.busy, samples.waiting):
        watch.once("bars", snapshot, lambda seen: made.append(seen))
    assert len(made) == 2


def test_it_asks_only_while_somebody_looks(rt):
    """Twenty sessions are one thread; none is none."""
    running = []
    watch = Watch(
        rt, start=lambda work: running.append(threading.Thread(target=work)) or running[-1].start()
    )
    sessions = [Session() for _ in range(20)]
    for session in sessions:
        watch.join(session)
    assert len(running) == 1 and watch.first(10).snapshot is not None
    for session in sessions:
        watch.leave(session)
    running[0].join(10)
    assert not running[0].is_alive()
    watch.join(sessions[0])
    assert len(running) == 2, "and it begins again"
    watch.leave(sessions[0])
    running[1].join(10)


def test_a_session_that_was_never_closed_does_not_keep_it_asking(rt):
    """A browser that vanishes leaves no goodbye."""
    running = []
    watch = Watch(
        rt, start=lambda work: running.append(threading.Thread(target=work)) or running[-1].start()
    )
    session = Session()
    watch.join(session)
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is None
    watch.nudge()
    running[0].join(10)
    assert not running[0].is_alive()


def test_a_runtime_has_one_watch_and_it_goes_with_those_who_hold_it(rt):
    one = watches.of(rt)
    assert watches.of(rt) is one
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None
