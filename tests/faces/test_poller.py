"""One poller for all sessions: it asks once, only while somebody looks, and outlives a ledger that fails."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from gpu_panels import poller as pollers
from gpu_panels.poller import REFRESH_SECONDS, Poller
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
def poller(rt, clock):
    """Its thread never starts: the test polls."""
    return Poller(rt, clock=clock, wall=lambda: 1000.0 + clock.now, start=lambda work: None)


def test_a_snapshot_that_says_the_same_is_published_at_once_a_second(poller, rt, clock):
    """Sessions redraw what depends on the time alone, no more often than anybody can read it."""
    poller.poll()
    first = poller.result.revision
    clock.now += REFRESH_SECONDS / 2
    poller.poll()
    assert poller.result.revision == first
    clock.now += REFRESH_SECONDS / 2
    poller.poll()
    assert poller.result.revision == first + 1


def test_what_has_changed_is_published_at_at_once(poller, rt):
    poller.poll()
    rt.snapshot = samples.waiting
    poller.poll()
    assert poller.result.snapshot.tickets == samples.waiting.tickets


def changed(snapshot, **more):
    """The snapshot with its first lease changed."""
    owner, section = next(iter(snapshot.sections.items()))
    first, *others = section.leases
    leases = (replace(first, **more), *others)
    return replace(snapshot, sections=snapshot.sections | {owner: replace(section, leases=leases)})


def test_that_models_are_being_used_is_published_at_with_the_next_second(poller, rt, clock):
    """On a box at work it changes with every look; twenty sessions would draw all of it twice a second."""
    poller.poll()
    first = poller.result.revision
    rt.snapshot = changed(samples.busy, pins=3, uses=99, last_used=samples.busy.now)
    poller.poll()
    assert poller.result.revision == first
    clock.now += REFRESH_SECONDS
    poller.poll()
    assert poller.result.snapshot.sections == rt.snapshot.sections


@pytest.mark.parametrize(
    "news", [{"shares": ()}, {"keep": True}, {"phase": Phase.LEAVING}, {"importance": 1}]
)
def test_where_a_model_lies_and_what_may_be_done_with_it_is_published_at_at_once(poller, rt, news):
    """Whoever has just clicked waits for it."""
    poller.poll()
    rt.snapshot = changed(samples.busy, **news)
    poller.poll()
    assert poller.result.snapshot.sections == rt.snapshot.sections


def test_a_ledger_that_fails_is_told_with_the_time_since_when_and_the_last_figures_stay(
    poller, rt, clock
):
    """A page that went blank would say less than one that says how old it is."""
    poller.poll()
    rt.failure = LedgerUnavailable("the disk is full", path="/x")
    for clock.now in (10.0, 20.0):
        poller.poll()
    assert (poller.result.error, poller.result.since) == ("the disk is full", 1010.0)
    assert poller.result.snapshot.sections == samples.busy.sections
    rt.failure = None
    poller.poll()
    assert (poller.result.error, poller.result.since) == ("", 0.0)


def test_whatever_else_goes_wrong_does_not_end_the_watch(poller, rt, caplog):
    rt.failure = ZeroDivisionError("division by zero")
    poller.poll()
    assert poller.result.error == "division by zero" and poller.result.snapshot is None
    assert "Traceback" in caplog.text, "a fault of ours is in the log with its place"


def test_whoever_looks_also_looks_for_the_dead(poller, rt, clock):
    """A box whose last kernel was killed has nobody else to end its leases."""
    for clock.now in (10.0, 10.1, 11.5):
        poller.poll()
    assert (rt.asked, rt.reaped) == (3, 2)


def test_what_is_asked_beside_the_snapshot_is_fetched_once_for_all_and_anew_when_it_is_due(
    poller, rt, clock
):
    fetched = []

    def history(asked):
        fetched.append(asked)
        return len(fetched)

    def ask():
        return poller.latest("history", history, every=5.0)

    assert (ask(), ask()) == (None, None), "nobody waits for it"
    poller.poll()
    assert (ask(), ask(), fetched) == (1, 1, [rt])
    clock.now = 4.0
    poller.poll()
    clock.now = 6.0
    poller.poll()
    assert (ask(), len(fetched)) == (2, 2)


def test_what_came_beside_the_snapshot_is_news(poller):
    poller.poll()
    before = poller.result.revision
    poller.latest("history", lambda rt: object(), every=5.0)
    poller.poll()
    assert poller.result.revision == before + 1


def test_what_nobody_asks_for_any_more_is_not_fetched_and_is_forgotten(poller, clock):
    """A tab that is not looked at costs nothing."""
    fetched = []
    poller.latest("history", fetched.append, every=1.0)
    poller.poll()
    for clock.now in (30.0, 100.0):
        poller.poll()
    assert len(fetched) == 1 and not poller._fetched


def test_what_cannot_be_fetched_is_told_and_its_last_value_stays(poller, clock):
    answers = iter([7, OSError("no such file")])

    def fetch(rt):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    for clock.now in (0.0, 5.0, 6.0):  # the last of these fetches nothing, and forgets nothing
        poller.latest("x", fetch, every=5.0)
        poller.poll()
    assert poller.latest("x", fetch, every=5.0) == 7 and poller.result.error == "no such file"


def test_a_figure_is_reckoned_once_for_all_sessions(poller):
    made = []
    for snapshot in (samples.busy, samples.busy, samples.waiting):
        poller.once("bars", snapshot, lambda seen: made.append(seen))
    assert len(made) == 2


def test_it_asks_only_while_somebody_looks(rt):
    """Twenty sessions are one thread; none is none."""
    running = []
    poller = Poller(
        rt, start=lambda work: running.append(threading.Thread(target=work)) or running[-1].start()
    )
    sessions = [Session() for _ in range(20)]
    for session in sessions:
        poller.join(session)
    assert len(running) == 1 and poller.first(10).snapshot is not None
    for session in sessions:
        poller.leave(session)
    running[0].join(10)
    assert not running[0].is_alive()
    poller.join(sessions[0])
    assert len(running) == 2, "and it begins again"
    poller.leave(sessions[0])
    running[1].join(10)


def test_a_session_that_was_never_closed_does_not_keep_it_asking(rt):
    """A browser that vanishes leaves no goodbye."""
    running = []
    poller = Poller(
        rt, start=lambda work: running.append(threading.Thread(target=work)) or running[-1].start()
    )
    session = Session()
    poller.join(session)
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is None
    poller.nudge()
    running[0].join(10)
    assert not running[0].is_alive()


def test_a_runtime_has_one_watch_and_it_goes_with_those_who_hold_it(rt):
    one = pollers.of(rt)
    assert pollers.of(rt) is one
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None
