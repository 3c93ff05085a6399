"""Parked bytes move to a disk when other bytes need the RAM, and only if nothing else makes the room."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import HOST, Drop, Grant, Move, Refuse, Shed, Wait
from gpu_runtime.scheduler import transitions as books
from gpu_runtime.scheduler.capacity import room
from gpu_runtime.scheduler.feasibility import why_no_return
from gpu_runtime.scheduler.policies import lru
from gpu_runtime.scheduler.recall import obey
from gpu_runtime.scheduler.victims import warm
from gpu_runtime.units import GIB
from tests.worlds import NOW, at, book, decide, lease, owner, request, ticket, world

THERE = world(sim0=7, host=8, grace_seconds=0)


def kernel(by, disk=0, **fields):
    """A notebook's own memory, idle since a minute. Its disk has room for `disk` GiB."""
    fields = {"last_used": NOW - 60, "kind": "kernel", "droppable": False, **fields}
    return lease("kernel", by=by, disk_room=int(disk * GIB), **fields)


def wanted(page, by=1, there=THERE):
    return decide(page, request("kernel", 6, by=by, kind="kernel"), there)


def test_a_parked_notebook_makes_room_in_ram_for_the_one_that_leaves_the_card():
    page = book(kernel(2, host=6, disk=9), kernel(3, sim0=6), owners=(1, 2, 3))
    page, verdict = wanted(page)
    assert isinstance(verdict, Wait) and verdict.shadows == (at(2, "kernel"),)
    [ask] = page.tickets
    _, steps, _ = obey(page, owner(2).id, THERE, "k", None, lru)
    assert [(type(step), step.lease) for step in steps] == [(Shed, at(2, "kernel"))]
    after = books.after_step(page, steps[0], THERE)
    stowed = after.find(at(2, "kernel"))
    assert (stowed.where, stowed.bytes, stowed.ram_bytes, stowed.disk_room) == (
        "disk",
        6 * GIB,
        0,
        3 * GIB,
    )
    assert after.claims() == {HOST: 0, "sim:0": 6 * GIB} and ask.shadows
    _, steps, _ = obey(after, owner(3).id, THERE, "k", None, lru)
    assert not steps, "its own request recalls the other one next"
    _, verdict = wanted(after)
    assert verdict.recalls == {at(3, "kernel"): 0} and not verdict.shadows


def test_without_room_on_the_disk_the_request_is_refused():
    for disk in (0, 5.9):
        page = book(kernel(2, host=6, disk=disk), kernel(3, sim0=6), owners=(1, 2, 3))
        _, verdict = wanted(page)
        assert isinstance(verdict, Refuse) and "no room" in verdict.because


def test_models_that_can_be_loaded_again_leave_ram_before_a_notebook_goes_to_the_disk():
    page = book(
        kernel(2, host=2, disk=9),
        lease("warm", by=1, host=4, last_used=NOW - 60),
        kernel(1, sim0=6),
    )
    _, verdict = decide(page, request("other", 6), THERE)
    assert Drop in {type(step) for step in verdict.steps} and not verdict.shadows


def test_no_notebook_goes_to_the_disk_for_a_model_that_can_be_loaded_again():
    """A write and two reads of the notebook cost more than one load of the model, and delay who waits now."""
    page = book(kernel(2, host=6, disk=9), lease("idle", by=1, sim0=6, last_used=NOW - 60))
    page, verdict = decide(page, request("other", 6), THERE)
    assert [type(step) for step in verdict.steps] == [Drop] and not verdict.shadows
    for by in (2, 3):  # of its own owner, of another one
        page = book(
            kernel(2, host=6, disk=9),
            lease("idle", by=by, sim0=6, last_used=NOW - 60),
            owners=(1, 2, 3),
        )
        page, verdict = decide(page, request("other", 6, by=1), THERE)
        assert verdict.recalls == {at(by, "idle"): 0} and not verdict.shadows
        _, steps, _ = obey(page, owner(by).id, THERE, "k", None, lru)
        assert [type(step) for step in steps] == [Drop]


def slow(name, by=1, disk=9, **fields):
    """A model whose load is slower than its owner's disk, which has room for `disk` GiB."""
    return lease(name, by=by, disk_room=int(disk * GIB), **{"last_used": NOW - 60, **fields})


def test_a_model_whose_load_is_slow_moves_to_the_disk_and_is_not_unloaded():
    """Faster models are unloaded first. If its disk is full, it is unloaded as they are."""
    fast = lease("fast", by=1, host=6, last_used=NOW - 60)
    held = kernel(1, sim0=6)
    for there_too, expected in (
        ((slow("slow", host=6),), [(Shed, at(1, "slow"))]),
        ((slow("slow", host=6, disk=5),), [(Drop, at(1, "slow"))]),
        ((slow("slow", host=2), fast), [(Drop, at(1, "fast"))]),
    ):
        there = THERE if len(there_too) == 1 else world(sim0=7, host=9, grace_seconds=0)
        _, verdict = decide(book(*there_too, held), request("other", 6), there)
        assert [(type(step), step.lease) for step in verdict.steps] == expected


def test_a_slow_model_goes_to_the_disk_for_a_slow_one_and_for_no_fast_one():
    other, notebook = slow("warm", host=6), kernel(1, host=6, disk=9)
    for going, beside, expected in (
        (slow("idle", sim0=6), other, Shed),
        (lease("idle", by=1, sim0=6, last_used=NOW - 60), other, Drop),
        (slow("idle", sim0=6), notebook, Drop),
    ):
        _, verdict = decide(book(going, beside), request("other", 6), THERE)
        step = verdict.steps[0]
        assert (type(step), step.lease) == (
            expected,
            beside.id if expected is Shed else going.id,
        )


def test_a_model_on_a_disk_is_not_unloaded_for_room_in_ram():
    """It claims none. Nor does pressure on the host's memory unload it."""
    there = replace(THERE, rules=replace(THERE.rules, relief="always"))
    stowed = slow("stowed", host=6, disk_bytes=6 * GIB, last_used=NOW - 10**6)
    page = book(stowed, slow("kept", sim0=6, droppable=False))
    assert stowed.kept_on_disk and not warm(page, there, asker=owner(1).id, importance=0)
    _, verdict = decide(page, request("other", 6), there)
    assert [(type(step), step.lease) for step in verdict.steps] == [(Move, at(1, "kept"))]


def test_a_requested_model_in_ram_may_itself_be_unloaded():
    """What leaves for it exists nowhere else and needs its room, and its source is there."""
    page = book(slow("wanted", host=6), slow("kept", sim0=6, droppable=False, disk=0))
    _, verdict = decide(page, request("wanted", 6), THERE)
    assert (Drop, at(1, "wanted")) in [(type(step), step.lease) for step in verdict.steps]


def test_bytes_on_a_disk_claim_no_ram_and_return_whole():
    parked = kernel(1, host=6, disk_bytes=6 * GIB)
    page = book(parked, lease("warm", by=2, host=8))
    assert parked.on_disk and parked.must_return and parked.own_bytes == 6 * GIB
    assert room(page, THERE)[HOST] == 0
    page, verdict = wanted(page)
    assert isinstance(verdict, Grant) and page.claims() == {HOST: 8 * GIB, "sim:0": 6 * GIB}
    page = books.arrived(page, owner(1).id, "kernel", verdict.lease.target, THERE)
    back = page.find(at(1, "kernel"))
    assert (back.where, back.disk_bytes, back.stow_bytes) == ("sim:0", 0, 0)


def test_the_notebook_that_returns_is_not_asked_to_leave_ram_first():
    """Its process decides that: two notebooks may also change places in pieces, which is faster."""
    page = book(kernel(1, host=6, disk=9), kernel(2, sim0=6, disk=9))
    _, verdict = wanted(page)
    assert isinstance(verdict, Refuse)
    page = book(kernel(1, host=6, disk_bytes=6 * GIB), kernel(2, sim0=6, disk=9))
    _, verdict = wanted(page)
    assert verdict.recalls == {at(2, "kernel"): 0}


def test_a_notebook_leaves_an_overfull_card_if_the_others_can_go_on_to_the_disk():
    """Law 16: what leaves must be able to return."""
    for disk, leaves in ((0, False), (30, True)):
        three = [kernel(by, sim0=6, disk=disk) for by in (1, 2, 3)]
        assert (not why_no_return(book(*three), three[0], THERE)) is leaves


def test_a_move_to_the_disk_that_its_own_process_has_begun_is_waited_for():
    """A step that is there again at once is decided again at once: a core was busy while the disk wrote."""
    only = lease("model", sim0=6, droppable=False, last_used=NOW - 60)
    page = book(kernel(1, host=6, disk=9, stowing=True), only, owners=(1,))
    _, verdict = decide(page, request("big", 6), THERE)
    assert isinstance(verdict, Wait) and (verdict.steps, verdict.shadows) == ((), ())
    assert "has begun to move 6.0 GiB" in verdict.because
    begun = page.with_lease(kernel(1, host=6, disk=9))
    assert [type(step) for step in decide(begun, request("big", 6), THERE)[1].steps] == [Shed]


def test_the_least_worth_goes_first_and_no_more_than_needed():
    page = book(
        kernel(2, host=3, disk=9),
        kernel(3, host=4, disk=9, last_used=NOW - 600),
        kernel(4, sim0=5),
        owners=(1,),
    )
    _, verdict = decide(page, request("kernel", 5, by=1, kind="kernel"), THERE)
    assert verdict.shadows == (at(3, "kernel"),)


def test_an_owner_that_writes_is_not_silent_and_one_that_does_nothing_is():
    late = NOW - 60
    asked = ticket(
        "kernel", by=1, sim0=6, arrived=late, recalled_since=late, shadows=(at(2, "kernel"),)
    )
    for stowing in (True, False):
        first = kernel(2, host=4, disk=9, last_used=NOW - 600)
        page = book(
            replace(first, stowing=stowing),
            kernel(3, host=4, disk=9),
            kernel(4, sim0=4),
            tickets=(asked,),
            owners=(1,),
        )
        _, verdict = decide(page, request("kernel", 6, by=1, kind="kernel", key=asked.key), THERE)
        assert verdict.shadows == (at(2 if stowing else 3, "kernel"),)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 20), st.booleans()), max_size=5))
def test_whoever_is_granted_and_wherever_bytes_are_no_device_is_above_its_budget(rows):
    """Law 1, with bytes on the disk."""
    parked = []
    for by, (gib, disk, on_disk) in enumerate(rows, 2):
        there = {"disk_bytes": gib * GIB} if on_disk else {}
        parked.append(kernel(by, host=gib, disk=disk, **there))
    if sum(one.ram_bytes for one in parked) > 8 * GIB:
        return
    page = book(*parked, kernel(9, sim0=6, disk=9), owners=(1,))
    for _ in range(12):
        page, verdict = wanted(page)
        if not isinstance(verdict, Wait):
            break
        for section in list(page.sections.values()):
            page, steps, _ = obey(page, section.owner.id, THERE, "k", None, lru)
            for step in steps:
                assert isinstance(step, (Shed, Move))
                page = books.after_step(page, step, THERE)
        assert all(size <= THERE.limits[id] for id, size in page.claims().items())
    assert isinstance(verdict, (Grant, Refuse)), verdict
