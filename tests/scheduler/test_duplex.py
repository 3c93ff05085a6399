"""A model returns in parts while other leases leave in stages to make its room."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import HOST, Book, Drop, Grant, Move, Phase, Share, Wait
from gpu_runtime.ledgers.invariants import refuse_unlawful
from gpu_runtime.scheduler import admission
from gpu_runtime.scheduler import transitions as books
from gpu_runtime.scheduler.admission import admit
from gpu_runtime.scheduler.policies import lru
from gpu_runtime.scheduler.recall import obey
from tests.worlds import at, book, lease, owner, request, size, world

GIB = 2**30


def wanted(total: float, **fields: Any) -> Any:
    """A request for "new", which may return in parts of at least 1 GiB."""
    return replace(request("new", total), stage_bytes=GIB, **fields)


def new(**fields: Any) -> Any:
    return lease("new", **{"piece_bytes": GIB, **fields})


def leaving(page: Book, gib: float) -> Book:
    """The book after `gib` more of the lease "old" have left its card."""
    old = page.find(at(1, "old"))
    step = Move(old.id, old.shares, (Share(HOST, size(gib)),))
    return admission.part_left(page, step, old.after(step.shares), world(sim0=40, host=99))


def crossing(**fields: Any) -> tuple[Book, Any]:
    """A book in which "old" (40 GiB) leaves for "new" (40 GiB in host memory), and its world."""
    there = world(sim0=40, host=99)
    page = book(new(host=40, **fields), lease("old", sim0=40, piece_bytes=GIB), owners=(1, 2))
    page, wait = admit(page, wanted(40), there, lru)
    assert [step.lease for step in wait.steps] == [at(1, "old")]
    return page, there


def test_a_stage_frees_its_bytes_and_the_rest_is_still_leaving():
    page, there = crossing()
    after = leaving(page, 5)
    old = after.find(at(1, "old"))
    assert old.phase is Phase.LEAVING and old.target == (Share(HOST, size(35)),)
    assert old.shares == (Share("sim:0", size(35)), Share(HOST, size(5)))
    assert after.claims() == {"sim:0": size(35), HOST: size(80)}
    assert (old.settled_at, old.away_since) == (there.now, there.now)
    assert not after.events[len(page.events) :], "the departure is noted at its end"
    step = Move(old.id, page.find(old.id).shares, old.target)
    done = books.left(after, step, (Share(HOST, size(40)),), there)
    assert (done.events[-1].action, done.events[-1].bytes) == ("offloaded", size(40))


def test_a_part_takes_the_free_bytes_in_whole_pieces_and_the_ticket_waits_for_the_rest():
    page, there = crossing()
    page = leaving(page, 5)
    asked = wanted(40, under_way=(at(1, "old"),))
    asked = replace(asked, lease=replace(asked.lease, importance=20))
    after, grant = admit(page, asked, there, lru)
    assert isinstance(grant, Grant) and admission.is_part(grant.lease)
    [step] = grant.steps
    assert step.shares == (Share("sim:0", size(5)),)
    [ticket] = after.tickets
    assert ticket.need == (Share("sim:0", size(35)),)
    assert after.claims()["sim:0"] == size(40)
    arriving = after.find(at(1, "new"))
    assert (arriving.pins, arriving.last_used, arriving.importance) == (1, there.now, 20)
    assert "5.0 GiB of new return meanwhile" in grant.because
    # Its grant also reserves the working memory.
    page, there = crossing()
    page = leaving(page, 39.5)
    _, grant = admit(page, wanted(40, under_way=(at(1, "old"),)), there, lru)
    assert grant.steps[0].shares == (Share("sim:0", size(39)),)
    # The part and the ticket together keep the room that the whole model needs.
    page, there = crossing()
    page = leaving(page, 5)
    page, grant = admit(page, wanted(40, under_way=(at(1, "old"),)), there, lru)
    page = books.after_step(page, grant.steps[0], there)
    page = leaving(page, 5)
    _, verdict = admit(page, request("rival", 3, by=2, importance="batch"), there, lru)
    assert isinstance(verdict, Wait) and not verdict.asked and not verdict.steps


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"piece_bytes": 0}, {}),
        ({"piece_bytes": 6 * GIB}, {}),  # less than a piece came free
        ({}, {"stage_bytes": 0}),
        ({}, {"wait": False}),
    ],
)
def test_otherwise_it_waits(fields, words):
    page, there = crossing(**fields)
    page = leaving(page, 5)
    asked = replace(wanted(40, under_way=(at(1, "old"),)), **words)
    _, verdict = admit(page, asked, there, lru)
    assert isinstance(verdict, Wait) and not verdict.steps


def test_the_steps_of_others_threads_are_not_returned_again():
    """Without `under_way`, the owner has not received the steps of its own departures."""
    page, there = crossing()
    _, verdict = admit(page, wanted(40), there, lru)
    assert [step.lease for step in verdict.steps] == [at(1, "old")]
    _, verdict = admit(page, wanted(40, under_way=(at(1, "old"),)), there, lru)
    assert isinstance(verdict, Wait) and not verdict.steps


@given(
    st.integers(1, 40),
    st.integers(0, 5),
    st.integers(0, 9),
    st.sampled_from([{}, {"shadow_bytes": 1}, {"copy": "p"}, {"kind": "kernel"}]),
    st.sampled_from([HOST, "sim:1"]),
)
@example(16, 1, 8, {}, HOST)
@example(15, 1, 8, {}, HOST)
@example(16, 1, 1, {"copy": "p"}, HOST)
def test_a_lease_leaves_in_at_least_two_stages_or_at_once(size, piece, least, fields, to):
    """Without a copy in host memory, which would make each stage needless."""
    there = lease("m", shares=(Share("sim:0", size),), piece_bytes=piece, **fields)
    stage = admission.departure_stages(there, (Share(to, size),), least)
    expected = max(least, piece, -(-size // admission.MOST_STAGES))
    whole = fields or to != HOST or not piece or not least or size < 2 * expected
    assert stage == (0 if whole else expected)


@settings(deadline=None)
@given(
    total=st.integers(6, 16),
    piece=st.integers(1, 2),
    olds=st.lists(
        st.tuples(st.integers(2, 12), st.integers(0, 2), st.booleans()), min_size=1, max_size=4
    ),
    host=st.integers(4, 40),
    stage=st.integers(1, 2),
    choices=st.lists(st.integers(0, 7), max_size=30),
)
def test_a_crossing_never_overcommits_and_always_ends(total, piece, olds, host, stage, choices):
    """Stages end in any order, some fail; no law breaks, and the model is whole or nothing can leave."""
    tiny = 2**-30
    there = world(sim0=16 * tiny, host=(host + total) * tiny)
    leases, used = [new(host=total * tiny, piece_bytes=piece)], 0
    for n, (bytes, cut, own) in enumerate(olds):
        if used + bytes > 16:
            continue
        used += bytes
        by = 1 if own else 2
        leases.append(lease(f"old{n}", by=by, sim0=bytes * tiny, piece_bytes=min(cut, bytes)))
    page = book(*leases, owners=(1, 2), limits=there.limits)
    before = {one.id: one.bytes for one in page.leases()}
    asked = replace(request("new", total * tiny), stage_bytes=stage)

    def write(after: Book, by: int = 1) -> Book:
        refuse_unlawful(page, after, owner(by).id, lambda _: frozenset())
        claims = after.claims()
        assert all(claims.get(id, 0) <= limit for id, limit in there.limits.items())
        for one in after.leases():
            assert one.bytes == before[one.id], "bytes are neither lost nor made"
        return after

    for choice in (*choices, *(1, 0) * 100):  # at the end, without failures
        there = replace(there, now=there.now + 0.5)
        going = [one for one in page.leases() if one.phase is Phase.LEAVING]
        if going and choice:
            one = going[choice % len(going)]
            by = 1 if one.owner == owner(1).id else 2
            step = Move(one.id, one.freed_by(one.target), one.target)
            size_of_stage = admission.departure_stages(one, one.target, stage)
            if choice == 7:
                page = write(books.abandon(page, one.owner, one.name, one.key, there), by)
            elif size_of_stage and one.target:
                part, host_claims = one.after((Share(HOST, size_of_stage),)), page.claims()[HOST]
                page = write(admission.part_left(page, step, part, there), by)
                assert page.claims()[HOST] == host_claims, "the room of the rest is kept"
            elif one.target:
                page = write(books.after_step(page, step, there), by)
            else:
                page = books.after_step(page, Drop(one.id, one.shares), there)
            continue
        page, _, _ = obey(page, owner(2).id, there, f"obey{there.now}", None, lru)
        under_way = tuple(one.id for one in going if one.owner == owner(1).id)
        here = page.lease(owner(1).id, "new")
        if here.phase is Phase.ARRIVING:
            step = Move(here.id, (), here.filled or here.target)
            after = books.after_step(page, step, there)
            done = replace(after.lease(owner(1).id, "new"), pins=0)
            page = write(after.with_lease(done))
            if done.all_on_device:
                break
            continue
        after, _ = admit(page, replace(asked, under_way=under_way), there, lru)
        page = write(after)
    here = page.lease(owner(1).id, "new")
    assert here.bytes == total
    if used + total <= 16 or used <= host:
        assert here.all_on_device
