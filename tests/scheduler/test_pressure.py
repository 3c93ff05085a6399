"""How full a device is, and which leases leave because of it. The levels are those of the Semantik governor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import HOST, Drop, Level, Phase, Rules, Share, Shed
from gpu_runtime.scheduler.capacity import level, pressure, views
from gpu_runtime.scheduler.policies import lru
from gpu_runtime.scheduler.relief import overfull, park_kernels, pressed, relieve
from tests.worlds import NOW, block, book, lease, owner, replayed, size, ticket, world


@pytest.mark.parametrize("of_the_book, own", [(10, 20), (20, 10), (10, 10)])
def test_processes_with_different_limits_see_the_same_pressure(of_the_book, own):
    """The smaller limit counts, as it does for a grant."""
    page = book(lease("a", sim0=9), limits={"sim:0": size(of_the_book)})
    [view, _] = views(page, world(sim0=own))
    assert (view.limit_bytes, view.pressure) == (size(10), 0.9)


def test_the_level_of_a_device_is_that_of_the_larger_known_share():
    """A process that never requests can still take memory. So the larger of the two numbers counts."""
    there = world(cuda0="14400 MB", total={"cuda:0": "16000 MB"}, free={"cuda:0": "1440 MB"})
    [view, _] = views(book(lease("a", cuda0="5760 MB")), there)
    assert (view.level, view.pressure) == (Level.CRITICAL, 0.91)
    assert view.measured_bytes == 14_560 * 10**6
    [view, _] = views(book(lease("a", cuda0=9)), world(cuda0=10))
    assert (view.level, view.measured_bytes, view.sample) == (Level.CRITICAL, None, None)
    old = world(cuda0=10, free={"cuda:0": 9}, taken_at=1.0)
    new = world(cuda0=10, free={"cuda:0": 1}, taken_at=2.0)
    for page_has, we_have in ((old, new), (new, old)):
        [view, _] = views(book(samples=page_has.samples), we_have)
        assert view.sample == new.samples["cuda:0"]
    residue = {1: {"sim:0": 1, "host": 9}, 2: {"sim:0": 2}}
    [view, host] = views(book(owners=(1, 2), residue=residue), world(sim0=10))
    assert (view.residue_bytes, host.residue_bytes) == (3, 9)


def test_thresholds_are_settings():
    assert level(0.5, Rules(moderate=0.4)) is Level.MODERATE
    levels = {0.0: "LOW", 0.599: "LOW", 0.6: "MODERATE", 0.799: "MODERATE"}
    levels |= {0.8: "HIGH", 0.899: "HIGH", 0.9: "CRITICAL", 1.4: "CRITICAL"}
    assert {share: level(share, Rules()) for share in levels} == levels


amounts, some = st.integers(0, 10**12), st.integers(1, 10**12)


@given(amounts, some, st.none() | amounts, some)
def test_pressure_is_the_larger_share_and_never_negative(claimed, limit, used, total):
    assert pressure(claimed, limit, used, total) == max(claimed / limit, (used or 0) / total) >= 0


def test_a_device_without_a_budget_is_full_as_soon_as_anything_is_on_it():
    assert (pressure(0, 0, None, 10), pressure(1, 0, None, 10)) == (0.0, 1.0)


# -- the table, applied ----------------------------------------------------------------------------
def idle(name, seconds, **fields):
    return lease(name, last_used=NOW - seconds, **fields)


def leaving(page, there, by="1.1.0"):
    after, steps = replayed(lambda book: relieve(book, by, there, lru, "k"), page)
    for step in steps:
        assert step.because and step.reason == "memory_pressure"
        if not isinstance(step, Shed):  # a shadow leaves the book once it is freed
            gone = after.find(step.lease)
            assert (gone.phase, gone.key) == (Phase.LEAVING, "k")
    return [(type(step).__name__, step.lease.partition("/")[2]) for step in steps]


def always(**words):
    return world(sim0=10, relief="always", **words)


def test_low_evicts_nothing_and_never_means_never():
    assert leaving(book(idle("a", 999, sim0=5)), always()) == []
    assert leaving(book(idle("a", 999, sim0=10)), world(sim0=10, relief="never")) == []
    assert leaving(book(owners=()), always()) == []
    # A request recalls within milliseconds; evicting by time cost 1.6 times the waiting of LRU on
    # real traces.
    assert leaving(book(idle("a", 999, sim0=10)), world(sim0=10)) == []
    page = book(idle("a", 999, sim0=10), tickets=[ticket("q", by=2, sim1=9)])
    assert leaving(page, world(sim0=10, sim1=10)) == []


def test_moderate_offloads_what_was_idle_for_120_s_and_high_for_30_s_or_drops_it():
    page = book(idle("a", 121, sim0=3), idle("b", 120, sim0=2), idle("c", 500, sim0=2))
    assert leaving(page, always()) == [("Move", "c"), ("Move", "a")]
    # and drops nothing
    assert leaving(book(idle("a", 500, sim0=7)), always(host=1)) == []
    page = book(idle("a", 31, sim0=4), idle("b", 40, sim0=3), idle("c", 30, sim0=1))
    assert leaving(page, always(host=3)) == [("Move", "b"), ("Drop", "a")]
    page = book(idle("a", 999, sim0=7))
    _, [step] = relieve(page, "1.1.0", always(), lru, "k")
    assert step.because == "MODERATE memory pressure on sim:0 (70.0%); idle 17 min."
    assert not isinstance(step, Drop)


def test_critical_drops_everything_idle_but_no_precious_weights():
    """The five seconds of grace still apply, as for every eviction in the background."""
    page = book(idle("a", 5.5, sim0=3), idle("b", 400, sim0=3), idle("c", 4, sim0=4))
    assert leaving(page, always()) == [("Drop", "b"), ("Drop", "a")]
    # Weights that exist nowhere else are never dropped, at any level (law 5 in
    # docs/architecture.md).
    page = book(idle("adopted", 400, sim0=9, droppable=False))
    assert leaving(page, always()) == [("Move", "adopted")]
    assert leaving(page, always(host=1)) == []
    page = book(idle("mine", 400, sim0=5), idle("theirs", 400, by=2, sim0=5))
    assert leaving(page, always()) == [("Drop", "mine")]


@pytest.mark.parametrize(
    "guarded",
    [
        idle("used", 400, sim0=10, pins=1),
        idle("kept", 400, sim0=10, keep=True),
        idle("alive", 400, sim0=10, keep_alive=500),
        idle("graced", 4, sim0=10),
        block(sim0=10),
        idle("gone", 400, sim0=10, phase=Phase.LEAVING),
    ],
    ids=lambda lease: lease.name,
)
def test_leases_that_no_pressure_evicts(guarded):
    """A request overrides keep_alive, and pressure is no request."""
    assert leaving(book(guarded), always()) == []
    assert leaving(book(guarded, tickets=[ticket("q", by=2, sim0=5)]), world(sim0=10)) == []


def test_auto_helps_waiting_requests_and_evicts_no_more_than_lowers_the_level():
    page = book(
        *(idle(f"m{n}", 200 + n, sim0=2) for n in range(5)), tickets=[ticket("q", by=2, sim0=9)]
    )
    # until it is LOW
    assert leaving(page, world(sim0=10)) == [("Move", "m4"), ("Move", "m3"), ("Move", "m2")]
    page = book(
        *(idle(f"m{n}", 60 + n, sim0=2) for n in range(5)), tickets=[ticket("q", by=2, sim0=9)]
    )
    # MODERATE asks for 120 s
    assert leaving(page, world(sim0=10)) == [("Move", "m4"), ("Move", "m3")]
    going = idle("going", 999, sim0=5, phase=Phase.LEAVING, key="x", target=(Share(HOST, size(5)),))
    page = book(going, idle("a", 999, sim0=5), tickets=[ticket("q", by=2, sim0=9)])
    assert leaving(page, world(sim0=10)) == []


def test_auto_prefers_the_least_important_and_the_host_to_the_disk():
    page = book(idle("a", 999, sim0=10), tickets=[ticket("q", by=2, sim0=9)])
    assert leaving(page, world(sim0=10)) == [("Move", "a")]
    assert leaving(page, world(sim0=10, host=1)) == [("Drop", "a")]
    batch = idle("batch", 200, sim0=5, importance="batch")
    page = book(batch, idle("old", 900, sim0=4), tickets=[ticket("q", by=2, sim0=9)])
    assert leaving(page, world(sim0=10)) == [("Move", "batch")]
    # Its code cannot run while a part of it is away.
    kernel = idle("kernel", 999, sim0=9, kind="kernel", droppable=False, piece_bytes=1)
    page = book(kernel, tickets=[ticket("q", by=2, sim0=5)])
    _, [step] = relieve(page, "1.1.0", world(sim0=10), lru, "k")
    assert step.shares == (Share(HOST, size(9)),)


def test_auto_evicts_if_memory_of_other_programs_grows():
    there = world(cuda0=10, free={"cuda:0": 0.5})
    assert leaving(book(idle("a", 999, cuda0=5)), there) == [("Move", "a")]
    parts = idle("a", 999, cuda0=9, piece_bytes=1)
    ticketed = book(parts, tickets=[ticket("q", by=2, cuda0=5)])
    _, [step] = relieve(ticketed, "1.1.0", world(cuda0=10, free={"cuda:0": 9}), lru, "k")
    assert step.shares[0].bytes == size(3) + 1, "what is claimed counts, if less is measured"
    # all of it is leased: no stranger is there
    assert leaving(book(idle("a", 999, cuda0=9.5)), there) == []


# -- host memory -----------------------------------------------------------------------------------
def ram(free, **fields):
    """A host of 100 GiB, half of which models may claim."""
    return world(sim0=10, host=50, total={"host": 100}, free={"host": free}, **fields)


WARM = (idle("new", 20, host=10), idle("old", 500, host=10))


def test_idle_models_leave_ram_that_other_programs_fill():
    """At HIGH, models that were idle for 30 s leave. At CRITICAL, all idle models leave, until enough is free."""
    page = book(*WARM)
    assert leaving(page, ram(21)) == [], "MODERATE"
    assert leaving(page, ram(19)) == [("Drop", "old")], "HIGH"
    assert leaving(page, ram(12)) == [("Drop", "old")]
    assert leaving(page, ram(5)) == [("Drop", "old")], "5 % and what left are enough for HIGH"
    small = book(idle("new", 20, host=10), idle("old", 500, host=2))
    # CRITICAL without the first
    assert leaving(small, ram(5)) == [("Drop", "old"), ("Drop", "new")]
    assert leaving(page, ram(5, relief="always")) == [("Drop", "old"), ("Drop", "new")]
    assert leaving(page, ram(5, relief="never")) == []
    # Models in RAM may use the whole budget. They leave only if measured memory is short.
    page = book(*(idle(f"m{n}", 500, host=10) for n in range(5)))
    assert leaving(page, ram(40)) == []
    assert leaving(page, world(sim0=10, host=50)) == [], "simulated memory holds nothing else"
    ways = (dict(droppable=False), dict(keep=True), dict(keep_alive=900))
    stays = [idle(f"m{n}", 500, host=10, **way) for n, way in enumerate(ways)]
    assert leaving(book(*stays), ram(1)) == []


@pytest.mark.parametrize("relief", ["auto", "always"])
def test_the_rest_of_a_model_in_parts_does_not_follow_to_a_full_ram(relief):
    """In an earlier version its bytes on the card were offloaded, to relieve the RAM."""
    parts = idle("parts", 500, sim0=5, host=10, piece_bytes=size(1), away_since=NOW - 500)
    for free in (40, 25):
        assert leaving(book(parts), ram(free, relief=relief)) == [], "not yet HIGH"
    assert leaving(book(parts), ram(15, relief=relief)) == [("Drop", "parts")]
    only = replace(parts, droppable=False)
    assert leaving(book(only), ram(15, relief=relief)) == []


def test_shadows_are_freed_before_a_model_leaves_ram():
    shadowed = idle("shadowed", 500, sim0=5, shadow_bytes=size(5))
    page = book(shadowed, *WARM)
    assert leaving(page, ram(19)) == [("Shed", "shadowed")], "then the level is MODERATE"
    assert leaving(page, ram(8)) == [("Shed", "shadowed"), ("Drop", "old")]
    assert leaving(page, ram(30)) == []


def test_every_process_relieves_ram_by_its_own_bytes_there():
    """Its bytes on a card free none of the host's memory, so a second model leaves too."""
    parts = idle("parts", 900, sim0=30, host=1, piece_bytes=size(1), away_since=NOW - 900)
    page = book(parts, idle("old", 500, host=10))
    there = replace(ram(15), limits={"sim:0": size(99), HOST: size(50)})
    assert leaving(page, there) == [("Drop", "parts"), ("Drop", "old")]
    page = book(idle("mine", 500, host=10), idle("theirs", 900, by=2, host=10))
    assert leaving(page, ram(15)) == [("Drop", "mine")]
    after, _ = relieve(page, "1.1.0", ram(15), lru, "k")
    assert leaving(after, ram(15), by="2.1.0") == [], "what leaves counts as gone"


# -- a card that plain code has overfilled ---------------------------------------------------------
def kernel(by: int, gib: int, idle: float = 60.0, **fields):
    held = lease("kernel", by=by, sim0=gib, last_used=NOW - idle, **fields)
    return replace(held, kind="kernel", droppable=False)


def parked(held, by: int) -> list[str]:
    _, steps = park_kernels(held, owner(by).id, world(sim0=20), lru, "key")
    return [step.lease for step in steps]


def test_the_kernel_that_was_used_longest_ago_leaves_and_no_other():
    held = book(kernel(1, 12, idle=60), kernel(2, 12, idle=600), owners=(1, 2))
    assert parked(held, 1) == [] and parked(held, 2) == [f"{owner(2).id}/kernel"]
    held = book(kernel(1, 8), kernel(2, 8), owners=(1, 2))
    assert parked(held, 1) == parked(held, 2) == []
    held = book(kernel(1, 12), kernel(2, 12, idle=600), owners=(1, 2))
    leaving, steps = park_kernels(held, owner(2).id, world(sim0=20), lru, "key")
    assert len(steps) == 1 and parked(leaving, 1) == []
    # Or whose last cell ended less than a second ago.
    for idle in (5, 1, 0.9):
        held = book(kernel(1, 12, pins=1), kernel(2, 12, idle=idle), owners=(1, 2))
        assert parked(held, 1) == [] and len(parked(held, 2)) == (idle >= 1)


def test_one_owner_sees_who_has_something_to_do_about_pressure():
    page = book(idle("a", 121, sim0=5), idle("b", 119, by=2, sim0=2))
    assert pressed(page, always(), lru) == {owner(1).id}
    assert pressed(page, world(sim0=10, relief="never"), lru) == set()
    assert pressed(page, world(sim0=20, relief="always"), lru) == set()
    held = book(kernel(1, 12, idle=60), kernel(2, 12, idle=600), owners=(1, 2, 3))
    assert pressed(held, world(sim0=20), lru) == {owner(2).id}


@given(own=st.integers(0, 25), others=st.integers(0, 25), leaves=st.booleans())
def test_a_card_is_overfull_by_others_if_theirs_is_part_of_what_exceeds_its_limit(
    own, others, leaves
):
    """A kernel makes room for others, and never for itself alone. Bytes that leave count as gone."""
    away = {"phase": Phase.LEAVING, "target": (Share(HOST, size(others)),)} if leaves else {}
    held = book(
        lease("mine", sim0=own),
        lease("theirs", by=2, sim0=others, **away),
        limits={"sim:0": size(20)},
    )
    stays = 0 if leaves else others
    assert overfull(held, owner(1).id, ["sim:0"]) == (own + stays > 20 and stays > 0)
