"""Shadows cost an eviction nothing, and are the first host memory to be given back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import HOST, Drop, Grant, Move, Phase, Share, Shed, Wait, overdrafts
from gpu_runtime.scheduler import transitions as books
from gpu_runtime.scheduler.capacity import room
from gpu_runtime.scheduler.plan import plan
from gpu_runtime.scheduler.policies import lru
from gpu_runtime.scheduler.recall import ask, new_order, obey
from gpu_runtime.scheduler.relief import relieve
from gpu_runtime.scheduler.victims import (
    enough_shadows,
    eviction_step,
    has_room_for_shadow,
    held_shadows,
    mark_leaving,
    reserve_shadow,
)
from gpu_runtime.units import GIB
from tests.scheduler.test_laws import follow
from tests.worlds import NOW, ask_until, at, book, decide, lease, owner, request, ticket, world

THERE = world(sim0=20, host=10)


def shadowed(name, gib, copy=None, **fields):
    size = gib if copy is None else copy
    fields = {"last_used": NOW - 60, **fields}
    return lease(name, sim0=gib, shadow_bytes=int(size * GIB), **fields)


def steps_of(verdict):
    return [(type(step), step.lease.partition("/")[2]) for step in verdict.steps]


def test_a_shadow_counts_on_the_host_and_becomes_the_share_there():
    """Before the move, during it and after it, the host holds exactly the model's bytes."""
    page = book(shadowed("llama", 8), limits=THERE.limits)
    assert room(page, THERE)[HOST] == 2 * GIB
    page, verdict = decide(page, request("qwen", 14), THERE)
    [step] = verdict.steps
    assert isinstance(step, Move) and page.claims() == {"sim:0": 8 * GIB, HOST: 8 * GIB}
    page = books.left(page, step, step.shares, THERE)
    [llama] = page.leases()
    assert (llama.where, llama.shadow_bytes, page.claims()) == ("host", 0, {HOST: 8 * GIB})
    page = book(shadowed("llama", 8))
    step = eviction_step(page.find(at(1, "llama")), 0, THERE)
    leaving = mark_leaving(page, step, "k")
    late = Shed(at(1, "llama"), (Share(HOST, 8 * GIB),))
    assert books.left(leaving, late, (), THERE) is leaving, "it becomes the share"
    assert books.abandon(leaving, owner(1).id, "llama", "k", THERE).claims() == page.claims()
    page = book(shadowed("llama", 8))
    step = Drop(at(1, "llama"), page.find(at(1, "llama")).shares, "because")
    assert books.left(page, step, (), THERE).claims() == {}
    # That of a lease on its way out becomes its share; one on its way in is just being made.
    page = book(*(shadowed(phase, 2, phase=phase) for phase in Phase))
    assert [one.phase for one in held_shadows(page)] == [Phase.SETTLED]


def test_the_own_shadow_is_freed_first_for_a_victim_that_fits_then():
    """Otherwise it has no room in host memory, is dropped, and loaded from disk again."""
    page = book(shadowed("used", 6, pins=1), lease("victim", sim0=9, last_used=NOW - 60))
    page, first = decide(page, request("qwen", 12), THERE)
    assert steps_of(first) == [(Shed, "used")]
    page = books.after_step(page, first.steps[0], THERE)
    assert page.find(at(1, "used")).on_device
    _, second = decide(page, request("qwen", 12), THERE)
    assert steps_of(second) == [(Move, "victim")]
    page = book(shadowed("used", 4, pins=1), lease("victim", sim0=12, last_used=NOW - 60))
    _, verdict = decide(page, request("qwen", 14), THERE)
    assert steps_of(verdict) == [(Drop, "victim")]
    page = book(
        shadowed("used", 6, pins=1),
        lease("stale", host=2, last_used=NOW - 900),
        lease("victim", sim0=7, last_used=NOW - 60),
    )
    _, verdict = decide(page, request("qwen", 12), THERE)
    assert steps_of(verdict) == [(Shed, "used")]
    page = book(shadowed("used", 6, pins=1), lease("mine", sim0=9, droppable=False))
    page, first = decide(page, request("qwen", 12), THERE)
    assert steps_of(first) == [(Shed, "used")]
    page, _ = ask_until(page, request("qwen", 12), THERE)
    assert {m.name: m.where for m in page.leases()} == {
        "used": "sim:0",
        "mine": "host",
        "qwen": "arriving",
    }


def test_the_shadow_of_another_owner_is_recalled_on_the_ticket():
    page = book(shadowed("theirs", 6, by=2, pins=1), lease("mine", sim0=9, droppable=False))
    page, verdict = decide(page, request("qwen", 12), THERE)
    assert isinstance(verdict, Wait) and verdict.shadows == (at(2, "theirs"),)
    page, [step], _ = obey(page, owner(2).id, THERE, "k")
    assert isinstance(step, Shed)  # although the model is in use
    page = books.after_step(page, step, THERE)
    assert obey(page, owner(2).id, THERE, "k")[1] == ()
    _, second = decide(page, request("qwen", 12), THERE)
    assert steps_of(second) == [(Move, "mine")]
    page = book(shadowed("theirs", 6, by=2, pins=1), lease("mine", sim0=9, last_used=NOW - 60))
    page, first = decide(page, request("qwen", 12), THERE)
    assert first.shadows and not first.steps
    later = world(sim0=20, host=10, now=NOW + 3)
    _, second = decide(page, request("qwen", 12), later)
    assert steps_of(second) == [(Drop, "mine")]


@pytest.mark.parametrize("holder", [1, 2])
def test_a_part_takes_the_place_of_its_own_shadow_of_some_bytes(holder):
    """The shadow may lack this part, so it saves nothing: the request waited for ever."""
    model = shadowed("model", 14, 7, by=holder, droppable=False, piece_bytes=GIB)
    full = lease("full", host=13, droppable=False)
    wanted, there = request("new", 14), world(sim0=24, host=22)
    page, answers = follow(book(model, full, owners=(1, 2)), [wanted], there, rounds=8)
    assert isinstance(answers[wanted.key], Grant)
    assert page.find(model.id).shares == lease("", sim0=10, host=4).shares
    assert not page.find(model.id).shadow_bytes


def test_a_recalled_model_takes_the_place_of_its_owners_shadow():
    recall = ticket("qwen", by=2, sim0=12, recalls={at(1, "victim"): 0})
    victim = lease("victim", sim0=9, last_used=NOW - 60)
    page = book(shadowed("used", 6, pins=1), victim, tickets=[recall])
    page, [step], _ = obey(page, owner(1).id, THERE, "k")
    assert isinstance(step, Shed)
    page = books.after_step(page, step, THERE)
    _, [step], _ = obey(page, owner(1).id, THERE, "k")
    assert isinstance(step, Move)


def test_relief_frees_shadows_first():
    page = book(
        shadowed("used", 6, pins=1), lease("idle", sim0=9, last_used=NOW - 900, droppable=False)
    )
    always = replace(THERE, rules=replace(THERE.rules, relief="always", moderate=0.1))
    _, steps = relieve(page, owner(1).id, always, lru, "k")
    assert [type(step) for step in steps] == [Shed]


def test_relief_frees_no_more_shadows_than_the_leaving_part_needs():
    """6 of the 9 GiB leave the card. RAM has room for 2, and one copy more makes 6; all 9 would need both."""
    used = [shadowed(name, 4, pins=1) for name in ("a", "b")]
    idle = lease("idle", sim0=9, last_used=NOW - 900, droppable=False, piece_bytes=GIB)
    page = book(*used, idle, tickets=[ticket("qwen", by=2, sim0=12)])
    _, steps = relieve(page, owner(1).id, THERE, lru, "k")
    assert [type(step) for step in steps] == [Shed]


def test_a_person_asks_the_owner_of_a_shadow():
    page = book(shadowed("theirs", 6, by=2), owners=(1, 2))
    wanted = new_order("k", owner(1).id, "shed", at(2, "theirs"), NOW)
    page, verdict = ask(page, wanted, THERE)
    assert isinstance(verdict, Wait)
    page, [step], orders = obey(page, owner(2).id, THERE, "o")
    assert isinstance(step, Shed) and not orders
    page = books.after_step(page, step, THERE)
    page, verdict = ask(page, wanted, THERE)
    assert verdict.because == "theirs has no copy in RAM" and not page.tickets


def test_the_plan_names_the_shadows_that_are_freed():
    page = book(
        shadowed("theirs", 6, by=2, pins=1), lease("mine", sim0=9, droppable=False), owners=(1, 2)
    )
    found = plan(page, request("qwen", 12), THERE, lru)
    assert found.granted
    assert [type(step).__name__ for step in found.steps] == ["Shed", "Move", "Load"]
    assert found.victims == (at(1, "mine"),), "a freed copy is no victim"


@pytest.mark.parametrize("host, fits", [(8, True), (7, False)])
def test_a_shadow_is_reserved_only_while_the_host_has_room(host, fits):
    there = world(sim0=20, host=host)
    arriving = lease(
        "new", phase=Phase.ARRIVING, key="k", target=(Share("sim:0", 8 * GIB),), pins=1
    )
    page = book(arriving, limits=there.limits)
    after, reserved = reserve_shadow(page, owner(1).id, "new", 8 * GIB, there)
    assert reserved is fits and (after.find(arriving.id).shadow_bytes > 0) is fits
    assert has_room_for_shadow(after, owner(1).id, "new", there) is fits, "the room is just enough"
    cards = tuple(replace(one, unified=not one.is_host) for one in there.devices)
    shared = replace(there, devices=cards)
    assert not reserve_shadow(page, owner(1).id, "new", 8 * GIB, shared)[1], (
        "it would take the card's memory"
    )
    assert overdrafts(page, after) == {}
    assert books.abandon(after, owner(1).id, "new", "k", there).claims() == {}


def test_no_shadow_is_reserved_or_kept_without_room():
    arriving = lease(
        "new", phase=Phase.ARRIVING, key="k", target=(Share("sim:0", 8 * GIB),), pins=1
    )
    waiting = ticket("qwen", by=2, sim0=9, shadows=(at(1, "old"),))
    page = book(arriving, tickets=[waiting])
    assert reserve_shadow(page, owner(1).id, "new", 8 * GIB, world(sim0=20))[1] is False
    # There is no room if, for example, another program took the memory, or a model is larger than
    # its estimate.
    page = book(shadowed("llama", 12))
    assert not has_room_for_shadow(page, owner(1).id, "llama", THERE)


COPIES = st.tuples(
    st.integers(1, 9), st.integers(0, 1), st.sampled_from([5, 10]), st.integers(0, 1)
)


@given(st.lists(COPIES, max_size=6), st.integers(0, 30))
def test_no_shadow_is_freed_without_need(sizes, shortage):
    """Those of models in use go first, then those of the models that leave their card last."""
    leases = [
        lease(f"m{n}", sim0=1, shadow_bytes=s, pins=p, importance=i, wished=w, last_used=NOW - n)
        for n, (s, p, i, w) in enumerate(sizes)
    ]
    order = sorted(
        leases, key=lambda one: (not one.pins, one.importance, -one.wished, -one.last_used)
    )
    [first] = enough_shadows(leases, 1, THERE, lru) or [None]
    assert first == next(iter(order), None)
    chosen = enough_shadows(leases, shortage, THERE, lru)
    freed = sum(one.shadow_bytes for one in chosen)
    if freed < shortage:
        assert len(chosen) == len(leases)
    for one in chosen:
        assert freed < shortage or freed - one.shadow_bytes < shortage
