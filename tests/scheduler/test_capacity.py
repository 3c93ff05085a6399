"""What counts on a card: the bytes of dead processes, torch's share, and memory outside the leases.

A dead process's bytes count, as a ghost, until the card's driver shows them free (law 12).
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import Drop, Grant, Phase, Sample, Share, Stranger, Wait
from gpu_runtime.scheduler import transitions as books
from gpu_runtime.scheduler.capacity import room, stranger_bytes, strangers, torch_bounds
from gpu_runtime.units import GIB
from tests.worlds import NOW, at, block, book, decide, lease, owner, request, size, world

DEAD = owner(2)


def there(free, *, taken_at, now=NOW, listing=None, budget=72):
    """A card of 80 GiB of which 72 may be claimed, with its driver's sample."""
    return world(
        cuda0=budget,
        total={"cuda:0": 80},
        free={"cuda:0": free},
        taken_at=taken_at,
        now=now,
        processes=listing or {},
    )


def reaped(page, free=40):
    here = there(free, taken_at=NOW - 1)
    return books.measure(books.reap(page, [DEAD.id], here), here)


def test_the_event_of_a_death_names_the_notebook():
    """It was about `kernel`, and `gpu why train.ipynb` did not find it."""
    page = book(replace(lease("kernel", by=2, cuda0=4), kind="kernel"), owners=(1, 2))
    dead = replace(page.sections[DEAD.id].owner, notebook="/home/ann/train.ipynb")
    page = page.with_section(replace(page.sections[DEAD.id], owner=dead))
    assert [event.title for event in reaped(page).events] == ["train.ipynb"]


HELD = book(lease("a", by=2, cuda0=40, settled_at=NOW - 100), owners=(1, 2))


def test_bytes_that_no_sample_has_seen_count_in_full_when_their_owner_dies():
    page = reaped(HELD)
    assert page.claims() == {"cuda:0": size(40)}
    assert room(page, there(40, taken_at=NOW - 1))["cuda:0"] == size(32)
    # They settled after the card's last sample: dropped, they would be granted twice.
    page = reaped(book(lease("a", by=2, cuda0=40, settled_at=NOW - 0.5), owners=(1, 2)), free=80)
    assert room(page, there(80, taken_at=NOW - 1))["cuda:0"] == size(32)
    assert room(page, there(50, taken_at=NOW - 1))["cuda:0"] == size(10)
    arriving = lease("a", by=2, cuda0=0)
    arriving = replace(
        arriving, shares=(), target=lease("a", cuda0=40).shares, phase=Phase.ARRIVING
    )
    page = reaped(book(arriving, owners=(1, 2)), free=80)
    assert room(page, there(80, taken_at=NOW - 1))["cuda:0"] == size(32)


def test_only_a_later_sample_without_the_process_frees_its_bytes():
    """The driver needs time to free them: a grant would exceed the card's budget."""
    later = there(40, taken_at=NOW + 1, now=NOW + 1, listing={2: size(40)})
    page = books.measure(reaped(HELD), later)
    assert room(page, later)["cuda:0"] == size(32)
    later = there(80, taken_at=NOW + 1, now=NOW + 1, listing={77: size(1)})
    page = books.measure(reaped(HELD), later)
    assert (page.ghosts, page.claims(), room(page, later)["cuda:0"]) == ((), {}, size(72))
    # with the proof in the page nobody goes by an older sample
    assert page.samples == later.samples
    assert not reaped(HELD).ghosts[0].gone(None)
    assert not reaped(HELD).ghosts[0].gone(Sample("cuda:0", NOW, 5))
    assert reaped(HELD).ghosts[0].gone(Sample("cuda:0", NOW + 0.001, 5))


@pytest.mark.parametrize("bytes_", [None, size(40)])
def test_a_process_with_unknown_bytes_is_still_listed(bytes_):
    later = there(40, taken_at=NOW + 1, now=NOW + 1, listing={2: bytes_})
    assert len(books.measure(reaped(HELD), later).ghosts) == 1


def test_unknown_free_memory_makes_a_request_wait():
    """Unknown memory is not treated as free, however long ago the process ended."""
    later = there(None, taken_at=NOW + 1, now=NOW + 1)
    page = books.measure(reaped(HELD), later)
    _, verdict = decide(page, request("qwen", 1), later)
    assert isinstance(verdict, Wait) and "does not say how much memory is free" in verdict.because


def test_a_card_is_not_granted_beyond_its_budget_while_the_driver_cleans_up():
    """A request waits a moment with a reason, and no lease is evicted for it."""
    idle = lease("b", by=1, cuda0=10, settled_at=NOW - 100, last_used=0)
    page = reaped(book(*HELD.leases(), idle, owners=(1, 2)), free=30)
    slow = there(30, taken_at=NOW - 0.1, listing={2: size(40)})
    page, verdict = decide(page, request("qwen", 60), slow)
    assert isinstance(verdict, Wait) and (verdict.steps, verdict.asked) == ((), ())
    assert verdict.because == (
        "qwen needs 60.0 GiB; cuda:0 has 22.0 GiB free. "
        "The driver has not yet freed the memory of pid 2, which has ended."
    )
    assert verdict.retry_at == NOW + 0.1
    done = there(70, taken_at=NOW + 1, now=NOW + 1)
    _, verdict = decide(books.measure(page, done), request("qwen", 60), done)
    assert isinstance(verdict, Grant)


def test_a_pid_that_was_reused_by_a_living_owner_is_no_ghost():
    """If a new process has the pid, the dead process that had it before is completely gone."""
    page = reaped(HELD)
    again = page.with_section(
        replace(book(owners=(2,)).sections[DEAD.id], owner=replace(DEAD, started=99))
    )
    assert books.measure(again, there(40, taken_at=NOW - 1)).ghosts == ()


PLACES = {"cuda0": "cuda:0", "cuda1": "cuda:1", "sim0": "sim:0", "host": "host"}
OF_THREE = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([*PLACES]), st.integers(1, 9)), max_size=6
)


@given(OF_THREE, OF_THREE, st.permutations([2, 3]), st.booleans())
def test_no_death_gives_back_a_byte_of_a_real_card(held, beyond, dying, together):
    """Leases and memory beyond them count until the driver shows them free, whether the owners die together or
    one after the other. What was on a simulated card or in RAM is free."""
    residue = {pid: {PLACES[place]: bytes_} for pid, place, bytes_ in beyond}
    leases = [
        lease(f"m{n}", by=pid, **{place: bytes_ / GIB})
        for n, (pid, place, bytes_) in enumerate(held)
    ]
    page = book(*leases, owners=(1, 2, 3), residue=residue)
    expected = dict.fromkeys(PLACES.values(), 0)
    for pid, place, bytes_ in held:
        expected[PLACES[place]] += bytes_ * (place.startswith("cuda") or pid == 1)
    for pid, of in residue.items():
        for id, bytes_ in of.items():
            expected[id] += bytes_ * (id.startswith("cuda") or pid == 1)
    gone = [owner(pid).id for pid in dying]
    for dead in [gone] if together else [[id] for id in gone]:
        page = books.reap(page, dead, world(cuda0=20, cuda1=20, sim0=20, free={"host": 9}))
    assert page.claims() == {id: bytes_ for id, bytes_ in expected.items() if bytes_}


def test_blocks_and_residue_leave_one_ghost_a_real_card():
    page = book(
        lease("a", by=2, cuda0=3, settled_at=7.0),
        block(by=2, cuda0=4, settled_at=5.0),
        owners=(1, 2),
        residue={2: {"cuda:0": 100, "cuda:1": 9}},
    )
    [first, second] = books.reap(page, [DEAD.id], world(cuda0=20, cuda1=20)).ghosts
    assert (first.device, first.bytes, first.settled_at, first.died_at) == (
        "cuda:0",
        size(7) + 100,
        7.0,
        NOW,
    )
    assert (second.device, second.bytes, second.pid) == ("cuda:1", 9, 2)


def test_the_event_describes_the_card_correctly():
    told = [
        books.reap(page, [DEAD.id], there(40, taken_at=NOW)).events[-1].because
        for page in (HELD, book(lease("a", by=2, host=1), owners=(1, 2)))
    ]
    assert told == [
        "pid 2 ended; its memory is free once its driver reports it.",
        "pid 2 ended; its memory is free again.",
    ]


# -- how much of a card torch may take in one process ----------------------------------------------
REAL = world(cuda0=10, cuda1=10)


def bound(*leases, context=0, open_cards=(), **fields):
    page = book(*leases, owners=(1, 2), **fields)
    return {
        card: round(fraction, 6)
        for card, fraction in torch_bounds(
            page, owner(1).id, REAL, {"cuda:0": context}, open_cards
        ).items()
    }


def test_torch_may_use_all_but_the_leases_of_others_until_its_own_last_lease_ends():
    """Activations may use free memory, but not the memory of another process's weights."""
    total = REAL.device("cuda:0").total_bytes
    mine, theirs = lease("mine", cuda0=3), lease("theirs", by=2, cuda0=2)
    assert bound(mine, theirs) == {"cuda:0": round((total - size(2)) / total, 6)}
    assert bound(mine, theirs, context=GIB) == {"cuda:0": round((total - size(3)) / total, 6)}
    assert bound(lease("mine", cuda0=3)) == {"cuda:0": 0.99}
    assert bound(lease("mine", cuda0="1 KiB"), lease("theirs", by=2, cuda0=10)) == {"cuda:0": 0.01}
    assert bound(lease("mine", host=3)) == bound(lease("theirs", by=2, cuda0=3)) == {}
    assert bound(lease("wide", cuda0=3, cuda1=3), lease("mine", cuda0=1)) == {}
    assert bound(lease("mine", cuda0=3), block(cuda0=1), open_cards=("cuda:0",)) == {}
    moving = replace(
        lease("mine", cuda0=3), target=(Share("cuda:1", size(3)),), phase=Phase.LEAVING
    )
    assert bound(moving) == {"cuda:0": 0.99, "cuda:1": 0.99}


@given(st.integers(1, 10), st.integers(0, 12), st.integers(0, 3))
def test_our_own_leases_always_fit_and_no_simulated_card_is_bounded(mine, theirs, context):
    leases = [lease("mine", cuda0=mine), lease("theirs", by=2, cuda0=theirs)]
    [fraction] = bound(*leases, context=context * GIB).values()
    assert 0.01 <= fraction <= 0.99
    assert fraction >= min(0.99, size(mine) / REAL.device("cuda:0").total_bytes) - 1e-6
    assert torch_bounds(book(lease("s", sim0=1)), owner(1).id, world(sim0=10), {}) == {}


# -- unmanaged memory: the measured use less what the book accounts for ----------------------------
def sampled(free, listing=None, **more):
    return world(
        cuda0=72, total={"cuda:0": 80}, free={"cuda:0": free}, processes=listing or {}, **more
    )


def beyond(page, world_):
    return stranger_bytes(page, world_)["cuda:0"]


def test_unmanaged_memory_is_the_cards_use_less_what_the_book_had_in_the_sample():
    page = book(lease("a", by=2, cuda0=30), residue={2: {"cuda:0": size(1)}})
    assert beyond(page, sampled(40)) == size(9)
    assert beyond(page, sampled(60)) == 0, "measured less than claimed: that is nobody's"
    page = book(lease("a", by=2, cuda0=30, settled_at=NOW))
    assert beyond(page, sampled(70)) == size(10)
    # The sample still includes the bytes that just left. The bytes of a dead process are counted
    # separately.
    page = book(lease("a", by=2, cuda0=30))
    step = Drop(at(2, "a"), page.lease(owner(2).id, "a").shares, "")
    assert beyond(books.left(page, step, (), sampled(50)), sampled(50)) == 0
    assert beyond(books.reap(page, [owner(2).id], sampled(50)), sampled(50)) == 0
    assert beyond(book(), sampled(None)) is None
    assert beyond(book(), world(cuda0=72)) is None
    # a simulated card has only what the book says
    assert stranger_bytes(book(), world(sim0=9)) == {}


def test_processes_that_are_no_owners_are_listed_the_largest_first():
    page = books.reap(
        book(lease("a", by=2, cuda0=30), lease("b", by=3, cuda0=1)), [owner(3).id], sampled(0)
    )
    listing = {2: size(30), 3: size(1), 71: None, 72: size(4), 73: size(5)}
    assert strangers(page, sampled(0, listing), {72: ("ann", "python train.py")}) == (
        Stranger("cuda:0", 73, size(5)),
        Stranger("cuda:0", 72, size(4), "ann", "python train.py"),
        Stranger("cuda:0", 71, None),
    )
    page = replace(book(), samples={"cuda:0": Sample("cuda:0", NOW, 0, {9: 5})})
    assert strangers(page, sampled(70), {}) == (Stranger("cuda:0", 9, 5),)
