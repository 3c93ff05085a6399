"""One poller serves all sessions. It polls only while a session is open, and survives failures of the ledger."""

import gc
import threading
import weakref
from functools import partial

import pytest
from gpu_panels import poller as pollers
from gpu_panels.poller import REFRESH_SECONDS, Poller
from msgspec.structs import replace

from gpu_runtime.errors import LedgerUnavailable
from gpu_runtime.facts import Phase
from tests.clock import PATIENCE, Clock

from . import samples


class Session:
    """A session of the console."""


class FakeRuntime:
    """A runtime with one snapshot, which counts the calls of its methods."""

    def __init__(self):
        self.snapshot, self.status_calls, self.reap_calls, self.failure = samples.busy, 0, 0, None

    def reap(self):
        self.reap_calls += 1
        return 0

    def status(self):
        self.status_calls += 1
        if self.failure:
            raise self.failure
        return replace(self.snapshot, now=self.snapshot.now + self.status_calls)


@pytest.fixture
def clock():
    return Clock(0.0)


@pytest.fixture
def rt():
    return FakeRuntime()


@pytest.fixture
def poller(rt, clock):
    """A poller whose thread never starts. The test calls its polls itself."""
    return Poller(rt, clock=clock, wall=lambda: 1000.0 + clock.now, start=lambda work: None)


@pytest.mark.parametrize("more", [{}, {"pins": 3, "uses": 99, "last_used": samples.busy.now}])
def test_an_unchanged_snapshot_and_the_use_of_models_are_published_once_a_second(
    poller, rt, clock, more
):
    """On a busy box the use changes with each poll: twenty sessions would redraw twice a second."""
    clock.now = 100.0
    poller.poll()
    first = poller.result.revision
    rt.snapshot = with_first_lease(samples.busy, **more)
    clock.now += REFRESH_SECONDS / 2
    poller.poll()
    assert poller.result.revision == first
    clock.now += REFRESH_SECONDS / 2
    poller.poll()
    assert poller.result.revision == first + 1
    assert poller.result.snapshot.sections == rt.snapshot.sections


def with_first_lease(snapshot, **more):
    owner, section = next(iter(snapshot.sections.items()))
    first, *others = section.leases
    leases = (replace(first, **more), *others)
    return replace(snapshot, sections=snapshot.sections | {owner: replace(section, leases=leases)})


@pytest.mark.parametrize(
    "news", [{"shares": ()}, {"keep": True}, {"phase": Phase.LEAVING}, {"importance": 1}, None]
)
def test_places_settings_and_the_queue_are_published_at_once(poller, rt, news):
    """An operator may just have clicked, and waits for it."""
    poller.poll()
    rt.snapshot = samples.waiting if news is None else with_first_lease(samples.busy, **news)
    poller.poll()
    shown = poller.result.snapshot
    assert (shown.sections, shown.tickets) == (rt.snapshot.sections, rt.snapshot.tickets)


def test_a_failing_ledger_is_reported_with_its_time_and_the_last_figures_stay(poller, rt, clock):
    """Old figures with their age are more useful than an empty page."""
    poller.poll()
    rt.failure = LedgerUnavailable("the disk is full", path="/x")
    for clock.now in (10.0, 20.0):
        poller.poll()
    assert (poller.result.error, poller.result.since) == ("the disk is full", 1010.0)
    assert poller.result.snapshot.sections == samples.busy.sections
    rt.failure = None
    poller.poll()
    assert (poller.result.error, poller.result.since) == ("", 0.0)


def test_an_unexpected_error_does_not_end_the_polling(poller, rt, caplog):
    rt.failure = ZeroDivisionError("division by zero")
    poller.poll()
    assert poller.result.error == "division by zero" and poller.result.snapshot is None
    assert "Traceback" in caplog.text, "a defect is logged with its traceback"


def test_the_poller_reaps_dead_processes(poller, rt, clock):
    """If the last kernel of a box was killed, no other process would."""
    for clock.now in (10.0, 10.1, 11.5):
        poller.poll()
    assert (rt.status_calls, rt.reap_calls) == (3, 2)


def test_other_data_is_fetched_once_for_all_sessions_and_again_when_due(poller, rt, clock):
    fetched = []

    def history(runtime):
        fetched.append(runtime)
        return len(fetched)

    def latest():
        return poller.latest("history", history, every=5.0)

    assert (latest(), latest()) == (None, None), "it does not wait"
    poller.poll()
    assert (latest(), latest(), fetched) == (1, 1, [rt])
    clock.now = 4.0
    poller.poll()
    clock.now = 5.0
    poller.poll()
    assert (latest(), len(fetched)) == (2, 2)


def test_newly_fetched_data_counts_as_news(poller, clock):
    """Also a value that is equal to the last: the time that it shows may be another."""
    poller.poll()
    for revision in (2, 3):
        poller.latest("history", lambda rt: [], every=0.25)
        poller.poll()
        assert poller.result.revision == revision
        clock.now += REFRESH_SECONDS / 2
    poller.poll()
    poller.latest("catalog", lambda rt: open("/nowhere"), every=5.0)
    poller.poll()
    assert "No such file" in poller.result.missing, "a failure is news too"


def test_data_that_no_session_requests_is_not_fetched_and_is_forgotten(poller, clock):
    fetched = []
    poller.latest("history", fetched.append, every=1.0)
    poller.poll()
    for clock.now in (30.0, 100.0):
        poller.poll()
    assert len(fetched) == 1 and not poller._fetched
    for clock.now in (200.0, 201.0, 210.0):  # a value that is requested again and again is kept
        poller.latest("history", fetched.append, every=1.0)
        poller.poll()
    assert len(fetched) == 4


def test_a_failed_fetch_is_reported_and_the_last_value_stays(poller, clock):
    answers = iter([7, OSError("no such file"), 8])

    def fetch(rt):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    for clock.now in (0.0, 5.0, 6.0):  # the last poll fetches nothing and forgets nothing
        poller.latest("x", fetch, every=5.0)
        poller.poll()
    assert poller.latest("x", fetch, every=5.0) == 7
    assert (poller.result.missing, poller.result.error) == ("no such file", "")
    clock.now = 10.0
    poller.poll()
    assert poller.result.missing == "" and poller.latest("x", fetch, every=5.0) == 8


def test_an_error_of_data_that_no_session_requests_any_more_is_not_shown(poller, clock):
    """It was shown for a minute after the tab of these data was left."""
    poller.latest("x", lambda rt: open("/nowhere"), every=1.0)
    poller.poll()
    assert poller.result.missing
    clock.now += 5
    poller.poll()
    assert not poller.result.missing


def test_a_value_is_computed_once_for_all_sessions(poller):
    made = []
    for snapshot in (samples.busy, samples.busy, samples.waiting):
        poller.once("bars", snapshot, lambda seen: made.append(seen))
    assert len(made) == 2


def start_thread(running, work):
    running.append(threading.Thread(target=work, daemon=True))
    running[-1].start()


def test_it_polls_only_while_a_session_is_open(rt, monkeypatch):
    """One thread serves twenty sessions. The last one that leaves wakes it, and it ends."""
    monkeypatch.setattr(pollers, "POLL_SECONDS", threading.TIMEOUT_MAX)
    running = []
    poller = Poller(rt, start=partial(start_thread, running))
    sessions = [Session() for _ in range(20)]
    for session in sessions:
        poller.join(session)
    assert len(running) == 1 and poller.first(10).snapshot is not None
    for session in sessions:
        poller.leave(session)
    running[0].join(PATIENCE)
    assert not running[0].is_alive()
    rt.snapshot = samples.waiting
    poller.join(sessions[0])
    assert len(running) == 2, "polling starts again"
    assert poller.first(10).snapshot.tickets == samples.waiting.tickets, "not the last of before"
    poller.leave(sessions[0])
    running[1].join(PATIENCE)


def test_a_session_that_was_never_closed_does_not_keep_it_polling(rt):
    """A browser can vanish without closing its session. The poller then stops all the same."""
    running = []
    poller = Poller(rt, start=partial(start_thread, running))
    session = Session()
    poller.join(session)
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is None
    poller.nudge()
    running[0].join(PATIENCE)
    assert not running[0].is_alive()


def test_a_runtime_has_one_poller_which_is_freed_with_its_users(rt):
    one = pollers.of(rt)
    assert pollers.of(rt) is one
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None
