"""The times of a model's last uses, from which `keep_score` estimates the next use."""

import threading
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.backends.base import Evidence
from gpu_runtime.backends.fake import FakeBackend
from gpu_runtime.facts import MOST_EVENTS, decode_uses
from gpu_runtime.owner import release
from tests.clock import PATIENCE
from tests.worlds import lease

from .conftest import alongside, fakes, loaded, together


def recent_uses(rt):
    [found] = rt.status().leases()
    return decode_uses(found.recent_uses, 2000)


def test_a_use_that_waited_counts_from_its_request(runtime, clock):
    """Otherwise all callers that wait for one load would count as one use, at the load's end."""
    rt = runtime(clock=clock, wall=clock)
    loading, second_waits = threading.Event(), threading.Event()
    rt.tell_waits(lambda name, wait: second_waits.set() if wait else None)

    def load(verb):
        loading.set()
        assert second_waits.wait(PATIENCE)
        clock.advance(60)

    def use():
        with rt.use("a"):
            pass

    rt.register("a", load, backend="fake", size="3GiB")
    with alongside(use):
        assert loading.wait(PATIENCE)
        clock.advance(7)
        together(use)
    assert recent_uses(rt) == (1000, 1007)


def test_a_model_is_idle_since_the_end_of_its_use_or_of_its_load(runtime, clock):
    """Idle since the start of a use, or of the machine for one loaded ahead, a model would leave first."""
    rt = fakes(runtime(clock=clock, wall=clock), a="3GiB")

    def idle_seconds():
        rt.tick()
        [found] = rt.status().leases()
        return found.idle_seconds(clock())

    rt.preload("a")
    clock.advance(7)
    assert idle_seconds() == 7
    with rt.use("a"):
        clock.advance(600)
        rt.tick()
    assert idle_seconds() == 0
    clock.advance(5)
    assert idle_seconds() == 5


def test_a_use_counts_once_and_from_its_request_although_its_model_returns_first(runtime, clock):
    rt = runtime(clock=clock, wall=clock)
    rt.register("a", lambda verb: clock.advance(30), backend="fake", size="3GiB")
    rt.preload("a")
    rt.evict("a")
    with rt.use("a"):
        pass
    assert (recent_uses(rt), clock()) == ((1060,), 1090)


def test_a_model_is_in_use_since_the_first_of_its_overlapping_uses(runtime, clock):
    rt = loaded(runtime(clock=clock, wall=clock), a="3GiB")

    def since():
        [found] = rt.status().leases()
        return found.pins, found.pinned_since

    with rt.use("a"):
        clock.advance(60)
        with rt.use("a"):
            assert since() == (2, 1000)
        assert since() == (1, 1000)
    assert since() == (0, 0)
    with rt.use("a"):
        assert since() == (1, 1060)


def test_a_refused_request_is_no_use(runtime, clock):
    rt = fakes(runtime(clock=clock, wall=clock), a="3GiB", b="16GiB", c="16GiB")
    with rt.use("b"), pytest.raises(Exception, match="c"), rt.use("c", timeout=0):
        pass
    rt.evict("b", drop=True)
    rt.preload("c")
    assert recent_uses(rt) == ()


@pytest.fixture
def equal_sources(monkeypatch):
    same = Evidence(fingerprint="f" * 64)
    monkeypatch.setattr(FakeBackend, "evidence", lambda self, spec, origin=None: same)


def test_the_uses_of_an_earlier_process_count_if_the_source_is_the_same(
    runtime, clock, tmp_path, equal_sources
):
    """The journal has them. The first load reads them, although its own request is a use already."""
    ledger = f"keeper:///{tmp_path}/ledger.db"
    earlier = fakes(runtime(ledger=ledger, monitor=False, clock=clock, wall=clock), a="3GiB")
    with earlier.use("a"):
        pass
    earlier.evict("a", drop=True)
    earlier.close()
    clock.advance(100)
    later = fakes(runtime(ledger=ledger, monitor=False, clock=clock, wall=clock), a="3GiB")
    with later.use("a"):
        pass
    assert recent_uses(later) == (1000, 1100)


def test_the_uses_of_processes_that_ended_at_the_same_time_count_together(
    runtime, clock, tmp_path, equal_sources
):
    """Neither process has read the uses of the other one, so the newest event has not all uses."""
    settings = {
        "ledger": f"keeper:///{tmp_path}/ledger.db",
        "monitor": False,
        "clock": clock,
        "wall": clock,
    }
    both = [runtime(**settings) for _ in range(2)]
    for name, rt in zip("ab", both, strict=True):
        fakes(rt, **{name: "3GiB"})
        with rt.use(name):
            clock.advance(50)
    for rt in both:
        rt.close()
    later = fakes(runtime(**settings), c="3GiB")
    with later.use("c"):
        pass
    assert recent_uses(later) == (1000, 1050, 1100)


def test_the_uses_of_a_running_process_count_once_its_model_has_left(
    runtime, clock, shared_book, equal_sources
):
    shared = {"ledger": shared_book, "monitor": False, "clock": clock, "wall": clock}
    here, other = (runtime(**shared) for _ in range(2))
    with fakes(here, a="3GiB").use("a"):
        clock.advance(50)
    with fakes(other, b="3GiB").use("b"):
        here.tick()
    other.evict("b", drop=True)
    assert recent_uses(here) == (1000,)
    for _ in range(2):
        here.tick()
        assert recent_uses(here) == (1000, 1050)


@given(
    st.lists(st.sampled_from(("used", "never used", "unknown source")), max_size=40),
    st.integers(0, 2),
)
def test_each_used_lease_of_a_known_source_is_on_one_page(kinds, full):
    """A page is one transaction. There is one page at least, since the owner leaves the book with the last."""
    kinds += ["used"] * (full * MOST_EVENTS - kinds.count("used"))
    uses = {"used": ("s", "u"), "never used": ("s", ""), "unknown source": ("", "u")}
    leases = [
        lease(str(number), source=uses[kind][0], recent_uses=uses[kind][1])
        for number, kind in enumerate(kinds)
    ]
    found = release.released_in_pages(leases)
    assert list(chain(*found)) == [one for one in leases if one.source and one.recent_uses]
    assert len(found) == max(1, -(-len(list(chain(*found))) // MOST_EVENTS))
    assert all(len(page) <= MOST_EVENTS for page in found)


def test_the_uses_of_more_models_than_the_book_has_events_outlive_their_process(
    runtime, clock, tmp_path, monkeypatch
):
    """Each model gets an event. A transaction with more events than the book keeps would lose some."""
    by_name = lambda self, spec, origin=None: Evidence(fingerprint=f"{spec.name:f<64}")  # noqa: E731
    monkeypatch.setattr(FakeBackend, "evidence", by_name)
    settings = {
        "ledger": f"keeper:///{tmp_path}/ledger.db",
        "monitor": False,
        "clock": clock,
        "wall": clock,
    }
    names = [f"m{number}" for number in range(2 * MOST_EVENTS + 1)]
    earlier = runtime(**settings)
    for name in names:
        fakes(earlier, **{name: "64MiB"})
        with earlier.use(name):
            pass
    earlier.close()
    later = runtime(**settings)
    later.guest = True
    assert {event.action for event in later.why()} == {"granted", "loaded"}, "no place is taken"
    released = later._session.journal.tail(1000, None, ("released",))
    assert sorted(event.model for event in released) == sorted(names)
