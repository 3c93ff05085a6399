"""Maps of the allocators' memory: published slowly, shown for each process and card, improved by defrag."""

import os

import pandas
import pytest

from gpu_runtime import GpuError
from gpu_runtime.facts import Outcome
from gpu_runtime.owner import allocator_maps, operations
from gpu_runtime.units import GIB, MIB
from tests.clock import PATIENCE

from .conftest import fakes, loaded


def holes(rt, count: int = 6) -> None:
    """Loads small models and evicts every second one. The holes between them are too small for other models."""
    fakes(rt, **{f"adapter{index}": "3MiB" for index in range(count)})
    for index in range(count):
        rt.preload(f"adapter{index}")
    for index in range(0, count, 2):
        rt.evict(f"adapter{index}")


def by_pid(frame) -> list[tuple]:
    columns = ["device", "allocated_bytes", "reserved_bytes", "inactive_bytes"]
    return [
        tuple(None if pandas.isna(value) else value for value in row)
        for row in frame[columns].values.tolist()
    ]


def test_everybodys_maps_are_told_by_owner(runtime, shared_book):
    a, b = (runtime(ledger=shared_book, monitor=False) for _ in "ab")
    holes(a)
    loaded(b, qwen="4GiB")
    a.tick(), b.tick()
    seen = {one.owner: (one.allocated_bytes, one.inactive_bytes) for one in a.allocator_maps()}
    assert seen == {a._session.me: (9 * MIB, 11 * MIB), b._session.me: (4 * GIB, 0)}
    assert {one.segments for one in b.allocator_maps()} == {
        one.segments for one in a.allocator_maps()
    }
    b.close()
    assert {one.owner for one in a.allocator_maps()} == {a._session.me}


def test_unknown_is_not_zero(runtime, shared_book):
    a, b = (runtime(ledger=shared_book, monitor=False) for _ in "ab")
    loaded(b, qwen="4GiB")
    assert by_pid(a.fragmentation()) == [("sim:0", None, None, None)]
    b.tick()
    assert by_pid(a.fragmentation()) == [("sim:0", 4 * GIB, 4 * GIB, 0)]


def test_the_frame_tells_what_defragmenting_would_give(runtime):
    rt = runtime(monitor=False)
    holes(rt, 12)  # two segments of 20 MiB
    row = rt.fragmentation().iloc[0]
    held = 6 * 3 * MIB
    assert (row["allocated_bytes"], row["reserved_bytes"], row["inactive_bytes"]) == (
        held,
        40 * MIB,
        40 * MIB - held,
    )
    assert (row["fragmentation_bytes"], row["fragmentation_percent"]) == (22 * MIB, 55.0)
    assert (row["releasable_bytes"], row["largest_free_bytes"]) == (0, 3 * MIB)
    limit = int(24 * GIB * rt.settings.gpu_memory_max_percent)
    assert row["largest_request_bytes"] == limit - held
    assert (row["pid"], row["owner"]) == (os.getpid(), f"pid {os.getpid()}")


def test_a_map_is_published_at_a_calm_pace(runtime, shared_book, clock):
    rt = fakes(runtime(ledger=shared_book, monitor=False, clock=clock), a="1GiB", b="1GiB")
    assert not rt._session.maps.publish()
    rt.preload("a")
    assert rt._session.maps.publish()
    rt.preload("b")
    clock.advance(0.75 * allocator_maps.PACE_SECONDS)
    assert not rt._session.maps.publish()
    clock.advance(0.25 * allocator_maps.PACE_SECONDS)
    assert rt._session.maps.publish()
    clock.advance(1000)
    assert not rt._session.maps.publish()


def test_what_takes_long_to_draw_is_drawn_seldom(runtime, clock, monkeypatch):
    """A training loop allocates all the time. Making maps must take at most 1 % of its time."""
    rt = fakes(runtime(monitor=False, clock=clock), a="1GiB", b="1GiB")
    times = iter([0.0, 0.5, 1.0, 1.5])
    monkeypatch.setattr(allocator_maps.time, "thread_time", lambda: next(times))
    rt.preload("a")
    assert rt._session.maps.publish()
    rt.preload("b")
    clock.advance(49.9)
    assert not rt._session.maps.publish()
    clock.advance(0.2)
    assert rt._session.maps.publish()


def test_a_full_disk_hides_the_map_and_harms_nothing_else(runtime, monkeypatch, clock):
    rt = loaded(runtime(monitor=False, clock=clock), a="1GiB")

    def full(drawn):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rt._session.ledger, "publish_maps", full)
    assert not rt._session.maps.publish()
    monkeypatch.undo()
    clock.advance(10)
    assert rt._session.maps.publish()


def kept_cache(rt, size: str) -> None:
    """Leaves `size` of used and freed memory in the allocator's cache."""
    rt.probe.place("sim:0").allocate(int(size.removesuffix("MiB")) * MIB).free()


def test_another_process_is_defragmented_by_asking_it(runtime, shared_book):
    a, b = (runtime(ledger=shared_book) for _ in "ab")
    loaded(a, qwen="1GiB")
    for name in (f"qwen@{os.getpid()}", "qwen"):
        kept_cache(a, "64MiB")
        done = b.defrag(name, timeout=PATIENCE)
        assert (done.done, done.bytes) == (True, 64 * MIB)
        assert done.because == f"64.0 MiB came free in pid {os.getpid()}"
        # published before the answer
        assert [one.inactive_bytes for one in b.allocator_maps()] == [0]


def test_all_processes_are_asked_where_none_is_named(runtime, shared_book):
    a, b = (runtime(ledger=shared_book) for _ in "ab")
    loaded(a, qwen="1GiB")
    kept_cache(a, "64MiB")
    kept_cache(b, "32MiB")
    done = b.defrag(timeout=PATIENCE)
    assert (done.done, done.bytes) == (True, 96 * MIB)
    assert done.because == f"32.0 MiB came free here; 64.0 MiB came free in pid {os.getpid()}"


def test_who_is_silent_is_told_and_does_not_hold_up_the_others(runtime, shared_book):
    """All processes share one time-out. A stopped process carries the request out when it runs again."""
    a, b, c = (runtime(ledger=shared_book, monitor=False) for _ in "abc")
    for rt, name in ((a, "qwen"), (b, "llama")):
        fakes(rt, **{name: "1GiB"})
        rt.preload(name)
    told = c.defrag(timeout=0)
    assert told.done and told.because.count(f"pid {os.getpid()} has not answered yet") == 2
    assert [ticket.verb for ticket in c.status().tickets] == ["defrag", "defrag"]


def test_processes_that_are_asked_one_after_the_other_share_the_time(
    runtime, shared_book, clock, monkeypatch
):
    """Each took three of the five seconds. The last one is only asked."""
    *holders, asker = (runtime(ledger=shared_book, monitor=False, clock=clock) for _ in range(4))
    for rt in holders:
        loaded(rt, m="1GiB")
    given = []

    def silent(_, verb, target, seconds, wait, must):
        given.append((seconds, wait))
        clock.advance(3)
        return Outcome(verb, "", False, "it has not answered")

    monkeypatch.setattr(operations, "ask_owner", silent)
    assert asker.defrag(timeout=5).done
    assert given == [(5.0, True), (2.0, True), (0.0, False)]


def test_an_unknown_process_is_refused_with_the_known_ones(runtime, shared_book):
    rt = fakes(runtime(ledger=shared_book, monitor=False), qwen="1GiB")
    with pytest.raises(GpuError, match=rf"no process 999999999 .*Those that do: pid {os.getpid()}"):
        rt.defrag("999999999")
    assert rt.defrag(str(os.getpid())).done and rt.defrag(f"@{os.getpid()}").done


def test_defragmenting_is_an_event_with_the_person_who_did_it(runtime, shared_book):
    a, b = (runtime(ledger=shared_book) for _ in "ab")
    loaded(a, qwen="1GiB")
    b.defrag(timeout=PATIENCE)
    kept_cache(a, "64MiB")
    with a.on_behalf_of("ann, console"):
        a.defrag(str(os.getpid()))
    kept_cache(a, "32MiB")
    with b.on_behalf_of("bob, console"):
        b.defrag("qwen", timeout=PATIENCE)
    told = [
        (event.bytes, event.by.partition(" (")[0])
        for event in a.status().events
        if event.action == "defrag" and event.bytes
    ]
    assert told == [(64 * MIB, "ann, console"), (32 * MIB, "bob, console")]
