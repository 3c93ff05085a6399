"""The candidates that a decision did not choose, and why."""

import pytest
from msgspec.structs import replace

from gpu_runtime.errors import (
    Deadlock,
    DoesNotFit,
    LedgerUnavailable,
    MemoryLimitExceeded,
    NotAllowed,
)
from gpu_runtime.facts import (
    AllocatorMap,
    Candidate,
    Event,
    Grant,
    Lease,
    Phase,
    PlacementRules,
    Refuse,
    Share,
    Wait,
)
from gpu_runtime.scheduler.placement import MOST_RUNNERS_UP, alternatives, with_runners_up
from gpu_runtime.scheduler.plan import interference
from gpu_runtime.scheduler.refusals import (
    busy,
    out_of_memory,
    refusal,
    still_here,
)
from gpu_runtime.scheduler.transitions import arrived
from gpu_runtime.units import GIB
from tests.worlds import NOW, book, decide, lease, owner, request, world

RULES = PlacementRules()


def test_a_decision_says_why_the_other_cards_lost_and_its_event_keeps_it():
    page, there = (
        book(lease("a", sim1=4, pins=1), lease("b", sim2=15, pins=1)),
        world(sim0=20, sim1=20, sim2=20),
    )
    _, verdict = decide(page, request("qwen", 10), there)
    assert verdict.lease.target[0].device == "sim:1", "the tightest that will do"
    assert alternatives(verdict, RULES) == (
        "sim:0: has 20.0 GiB free and would keep 10.0 GiB, more than sim:1.",
        "sim:2: has 5.0 GiB free, 5.0 GiB too little.",
    )
    # At the time of the grant the room is already free. So the report has the candidates of the
    # earlier wait.
    page = book(lease("a", sim0=15, reload_seconds=2), lease("b", sim1=15, reload_seconds=60))
    page, wait = decide(page, request("qwen", 18), world(sim0=20, sim1=20))
    granted = Grant(Lease("1", "qwen", target=(Share("sim:0", 18 * GIB),)), (), "qwen fits")
    assert alternatives(granted, RULES, wait.considered) == (
        "sim:1: b would be evicted, and would take 60 s to load again, not 2.0 s.",
    )
    equal = book(lease("a", sim0=15), lease("b", sim1=15))
    _, wait = decide(equal, request("qwen", 18), world(sim0=20, sim1=20))
    assert alternatives(wait, RULES) == ("sim:1: b would be evicted, and should stay longer.",)
    page = book(lease("a", sim0=15, pins=1), lease("b", sim1=12, pins=1))
    _, wait = decide(page, request("qwen", 18), world(sim0=20, sim1=20))
    assert isinstance(wait, Wait)
    assert alternatives(wait, RULES) == ("sim:0: has 5.0 GiB free, 13.0 GiB too little.",)
    many = tuple(Candidate((Share(f"sim:{n}", 1),), False, "full") for n in range(64))
    assert len(alternatives(Refuse("no", considered=many), RULES)) == MOST_RUNNERS_UP
    refusal = Refuse("no", considered=(Candidate((Share("sim:0", 1),), False, "sim:0 is full"),))
    events = [
        Event(1, 0, "a", "unloaded", "request", ""),
        Event(2, 0, "b", "refused", "hopeless", "no"),
    ]
    assert [event.runners_up for event in with_runners_up(events, refusal, RULES)] == [
        (),
        ("sim:0: is full.",),
    ]


def test_a_notebook_that_cannot_leave_is_called_by_its_name():
    """Its lease is called `kernel` in the book, which says nothing to a person."""
    kernel = lease("kernel", sim0=3, pins=1, kind="kernel", by=2)
    page = book(kernel)
    section = page.sections[kernel.owner]
    page = page.with_section(
        replace(section, owner=replace(section.owner, notebook="a/train.ipynb"))
    )
    kernel = replace(kernel, pinned_since=NOW - 60, last_used=NOW - 5)
    error = still_here(page, "1", kernel, "in use", world(sim0=20))
    assert str(error).startswith("train.ipynb (3.0 GiB, sim:0) runs a cell for 60 s")
    assert "when that cell has ended" in str(error)
    script = lease("m", sim0=3, pins=1, by=3)
    error = still_here(book(script), "1", script, "in use", world(sim0=20))
    assert "is in use by pid 3" in str(error) and "when that block has ended" in str(error)


def test_the_report_of_a_memory_error_lists_the_holders_the_largest_first():
    """Then unleased memory, and what torch's cache holds. A process is named if it is another one."""
    used = {"last_used": NOW - 60}
    small = lease("small", by=2, cuda0=1, keep=True, **used)
    large = lease("large", cuda0=8, **used)
    there = world(cuda0=20, free={"cuda:0": 4, "host": 1})
    caches = [AllocatorMap("1", f"cuda:{n}", 0.0, GIB - n, GIB, 0, 0, 0) for n in (0, 1)]
    told = out_of_memory(MemoryError("no"), book(small, large), there, large.owner, caches)
    assert told.holders == (large.id, small.id)
    report = str(told).splitlines()
    assert "large, idle" in report[2] and "pid" not in report[2]
    assert "small, idle" in report[3] and "pinned" in report[3] and "pid 2" in report[3]
    assert [
        ("do not use gpu-console" in line, "reserved by torch" in line) for line in report[4:6]
    ] == [
        (True, False),
        (False, True),
    ]
    assert len(report) == 7 and "in use" not in report[0] and "run the cell again" in report[-1]
    told = out_of_memory(MemoryError("no"), book(), there, large.owner, [], using="large")
    assert "while large was in use" in str(told).splitlines()[0]
    loading = {"loading": "qwen", "device": "cuda:0", "declared_bytes": GIB}
    told = out_of_memory(MemoryError("no"), book(), there, large.owner, [], **loading)
    assert "cuda:0 ran out of memory while loading qwen" in str(told)
    assert "declared as 1.0 GiB" in str(told) and "load it again" in str(told)


@pytest.mark.parametrize(
    ("kind", "error", "advice"),
    [
        ("cap", NotAllowed, "%gpu leases"),
        ("limit", MemoryLimitExceeded, "INFERENCE_MEMORY_LIMIT_GB"),
        ("deadlock", Deadlock, "same order"),
        ("full", LedgerUnavailable, ""),
        ("drained", DoesNotFit, "gpu drain sim:1 --undo"),
        ("kept", DoesNotFit, "%gpu unpin llama"),
        ("nested", DoesNotFit, "Leave the block of llama"),
        ("precious", DoesNotFit, "rt.forget('llama')"),
        ("hopeless", DoesNotFit, "%gpu plan qwen"),
    ],
)
def test_the_error_for_a_refusal_says_what_to_type(kind, error, advice):
    refuse = Refuse("because", kind, 5, 4, "sim:1", holders=("2.1.0/llama",))
    found = refusal("qwen", refuse)
    assert type(found) is error and advice in str(found) and str(found).startswith("because")
    assert (found.need_bytes, found.budget_bytes, found.device) == (5, 4, "sim:1")


def test_only_silent_processes_are_to_be_continued():
    """A time-out names the pids of those that did not answer, and no others."""
    page = book(owners=(2, 3))
    wait = Wait("because", recalls={"2.1.0/a": 0, "3.1.0/b": 0}, silent=("3.1.0/b",))
    told = str(busy(page, "qwen", wait, 60.0))
    assert "kill -CONT 3 " in told and "kill -9 3\n" in told
    assert "kill" not in str(busy(page, "qwen", replace(wait, silent=()), 60.0))


# -- how long loads took alone and beside other models ---------------------------------------------
def load(seconds: float, *beside: str, source: str = "a") -> Event:
    return Event(
        1, 0.0, "qwen", "loaded", "request", "", seconds=seconds, beside=beside, source=source
    )


def arriving(name: str, *, by: int) -> Lease:
    target = (Share("sim:0", 4 * GIB),)
    return replace(lease(name, by=by), shares=(), target=target, phase=Phase.ARRIVING, pins=1)


def test_the_medians_of_both_kinds_are_compared_if_both_were_measured():
    loads = [load(4.0), load(5.0), load(9.0), load(8.0, "llama"), load(12.0, "llama", "phi")]
    assert interference(loads) == "Loads took 5.0 s alone, and 10 s beside llama, phi."
    # A load without a measurement, or from another source, says nothing about the next load.
    assert interference([]) == interference([load(4.0)]) == ""
    assert interference([load(8.0, "llama"), load(0.0)]) == ""
    assert interference([load(4.0, source="old"), load(8.0, "llama")]) == ""


def test_a_load_records_the_models_that_were_in_use_or_arriving_on_its_cards():
    """An idle model reads nothing from the disk and computes nothing. Another card does not count."""
    shares = (Share("sim:0", 4 * GIB),)
    page = book(
        arriving("qwen", by=1),
        arriving("phi", by=2),
        lease("llama", by=2, sim0=4, pins=1),
        lease("idle", by=2, sim0=4),
        lease("elsewhere", by=2, sim1=4, pins=1),
    )
    there = world(sim0=24, sim1=24)
    after = arrived(page, owner(1).id, "qwen", shares, there, reload_seconds=3.0)
    assert after.events[-1].beside == ("llama", "phi")
    alone = page.without_lease(owner(2).id, "llama").without_lease(owner(2).id, "phi")
    after = arrived(alone, owner(1).id, "qwen", shares, there, reload_seconds=3.0)
    assert after.events[-1].beside == ()
