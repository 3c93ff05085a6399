"""Leases in parts: some bytes on a card, others in host memory. Their laws are in test_laws.py, too."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from gpu_runtime.facts import (
    HOST,
    Book,
    Drop,
    Grant,
    Lease,
    Part,
    Phase,
    Refuse,
    Share,
    Wait,
    decode_book,
    encode,
)
from gpu_runtime.ledgers.invariants import refuse_unlawful
from gpu_runtime.scheduler import relief as drains
from gpu_runtime.scheduler import transitions as books
from gpu_runtime.scheduler.admission import admit
from gpu_runtime.scheduler.plan import plan
from gpu_runtime.scheduler.policies import keep_score, lru
from gpu_runtime.scheduler.recall import obey
from gpu_runtime.scheduler.relief import move, relieve
from gpu_runtime.scheduler.victims import PartsRoom, Room, first_enough
from tests.worlds import NOW, at, book, lease, owner, request, size, ticket, world

GIB = 2**30
B = 2**-30  # one byte, in the builders' GiB


def shares(**words: Any) -> tuple[Share, ...]:
    return lease("x", **words).shares


def big(**fields: Any) -> Lease:
    """An idle model of 40 GiB that may leave in pieces of 1 GiB."""
    return lease("big", **{"sim0": 40, "piece_bytes": GIB, **fields})


def decide(page: Book, wanted: Any, there: Any) -> tuple[Book, Any]:
    return admit(page, wanted, there, lru)


def test_only_the_missing_bytes_leave_rounded_up_to_pieces():
    """A request for 3 GiB takes 3 GiB of an idle model of 40 GiB."""
    page, there = book(big()), world(sim0=40, host=64)
    after, wait = decide(page, request("new", 3), there)
    [step] = wait.steps
    assert step.source == shares(sim0=3) and step.shares == shares(host=3)
    after = books.after_step(after, step, there)
    assert after.lease(owner(1).id, "big").shares == shares(sim0=37, host=3)
    assert after.claims() == {"sim:0": size(37), HOST: size(3)}
    _, grant = decide(after, request("new", 3), there)
    assert isinstance(grant, Grant)
    page = book(big(piece_bytes=int(2.5 * GIB)))
    _, wait = decide(page, request("new", 3), world(sim0=40, host=64))
    assert wait.steps[0].shares == shares(host=5)
    # 3 of 40 GiB come back in 3 s, a small model in 5 s.
    page = book(big(reload_seconds=40), lease("small", sim1=3, reload_seconds=5))
    _, wait = decide(page, request("new", 3), world(sim0=40, sim1=3, host=64))
    assert [step.lease for step in wait.steps] == [at(1, "big")]
    page = book(big(by=2), owners=(1, 2))
    told = plan(page, request("new", 3), world(sim0=40, host=64), lru)
    assert told.granted and told.steps[0].shares == shares(host=3)


def test_only_the_missing_bytes_return():
    """The bytes on the card stay there, so a card of 40 GiB is enough for the return."""
    page, there = book(big(sim0=37, host=3)), world(sim0=40, host=64)
    after, grant = decide(page, request("big", 40), there)
    [step] = grant.steps
    assert step.source == shares(host=3) and step.shares == shares(sim0=3)
    assert after.claims() == {"sim:0": size(40), HOST: size(3)}
    after = books.after_step(after, step, there)
    back = after.lease(owner(1).id, "big")
    assert (back.shares, back.phase) == (shares(sim0=40), Phase.SETTLED)
    assert (after.events[-1].action, after.events[-1].bytes) == ("restored", size(3))
    page, there = book(big(sim0=37, host=3)), world(sim0=40, host=64)
    after, _ = decide(page, request("big", 40), there)
    after = books.arrived(after, owner(1).id, "big", shares(sim0=40), there, restore_seconds=4.0)
    assert after.events[-1].seconds == 0.0
    assert after.lease(owner(1).id, "big").restore_seconds == 4.0
    page, there = book(big(sim0=37, host=3)), world(sim0=40, host=64)
    after, grant = decide(page, request("big", 40), there)
    again = books.abandon(after, owner(1).id, "big", grant.lease.key, there)
    lease_ = again.lease(owner(1).id, "big")
    assert (lease_.shares, lease_.target, lease_.filled) == (shares(sim0=37, host=3), (), ())


def test_working_memory_is_reserved_for_the_whole_and_freed_before_a_second_piece():
    page, there = book(big(sim0=37, host=3)), world(sim0=44, host=64)
    wanted = request("big", 40)
    room = Part("kv_cache", size(4), "config")
    wanted = replace(
        wanted, footprint=replace(wanted.footprint, parts=(*wanted.footprint.parts, room))
    )
    after, grant = decide(page, wanted, there)
    assert after.claims() == {"sim:0": size(44), HOST: size(3)}
    assert grant.steps[0].shares == shares(sim0=3)
    back = grant.lease.holding(shares(sim0=40))
    assert (back.shares, back.own_bytes) == (shares(sim0=44), size(40))
    # The model is not used while it is in parts, so it needs no working memory then.
    whole = big(sim0=44, filled=shares(sim0=40), working_bytes=size(4))
    _, wait = decide(book(whole), request("new", 4), world(sim0=44, host=64))
    assert wait.steps[0].shares == shares(host=1) and wait.steps[0].source == shares(sim0=5)


def test_a_model_in_parts_on_a_card_that_is_too_small_leaves_it_or_is_refused_with_the_reason():
    """Its bytes must leave the card before it fits elsewhere. The host has no room, so waiting would not help."""
    stuck = big(sim0=20, host=20, droppable=False)
    small = world(sim0=30, sim1=40, host=20, limit_bytes=size(50))
    _, limit = decide(book(stuck), request("big", 40), small)
    assert isinstance(limit, Refuse) and limit.kind == "limit"
    assert limit.because == (
        "Loading 'big' (40.0GB) would exceed memory limit (20.0GB + 40.0GB > 50.0GB)"
    )
    wanted = request("big", 40, layout="auto", rules={"margin_bytes": 0})
    _, refuse = decide(book(stuck), wanted, world(sim0=25, sim1=25, host=20))
    assert refuse.because == (
        "big needs 40.0 GiB, over several cards; sim:0,1 could give 5.0 GiB + 25.0 GiB, and "
        "big (40.0 GiB) exists nowhere else, and RAM has no room for it"
    )
    # Its bytes count on both cards, so under the owner's limit some go to host memory first.
    page = book(big(sim0=20, host=20))
    there = world(sim0=30, sim1=40, host=64, limit_bytes=size(50))
    after, wait = decide(page, request("big", 40), there)
    [step] = wait.steps
    assert (step.source, step.shares) == (shares(sim0=10), shares(host=10))
    after = books.after_step(after, step, there)
    _, grant = decide(after, request("big", 40), there)
    assert grant.steps[0].shares == shares(sim1=40)


def test_pieces_that_the_host_can_take_count_for_the_own_limit():
    """The host has room for 3 of the 8 pieces, and that is enough for the new model."""
    theirs = lease("theirs", by=2, sim0=8, piece_bytes=GIB, droppable=False)
    page, there = book(theirs, owners=(1,)), world(sim0=10, host=3, limit_bytes=size(12))
    _, wait = decide(page, request("new", 5), there)
    assert isinstance(wait, Wait) and tuple(wait.recalls.values()) == (size(3),)
    mine = lease("mine", sim1=8, piece_bytes=GIB, droppable=False)
    there = world(sim0=10, sim1=8, host=8, limit_bytes=size(12))
    for pieces in range(1, 7):  # of another card, so the missing bytes of this card do not tell
        _, wait = decide(book(mine), request("new", 4 + pieces), there)
        assert [step.shares for step in wait.steps] == [shares(host=pieces)]


def test_pieces_leave_if_the_host_can_take_no_whole_model():
    """The host has room for the small model, or for 3 of the pieces. Only the pieces are enough."""
    small = lease("small", sim0=1, droppable=False)
    large = lease("large", sim0=20, piece_bytes=4 * GIB, droppable=False)
    page, there = book(small, large), world(sim0=24, host=12)
    _, wait = decide(page, request("new", 14), there)
    assert [(step.lease, step.shares) for step in wait.steps] == [(at(1, "large"), shares(host=12))]
    # Their weights exist nowhere else. 2 GiB of one model are enough, and the host has room for 3.
    one = lease("one", by=2, sim0=8, piece_bytes=GIB, droppable=False)
    other = lease("other", by=2, sim1=8, piece_bytes=GIB, droppable=False)
    wanted = request("new", 6, layout="proportional", rules={"margin_bytes": 0})
    page, there = book(one, other, owners=(1,)), world(sim0=10, sim1=10, host=3)
    _, wait = decide(page, wanted, there)
    assert isinstance(wait, Wait) and tuple(wait.recalls.values()) == (size(2),)
    # A model of 40 GiB, whose weights exist nowhere else, frees 3 GiB although the host has room
    # for only 4 GiB.
    page = book(big(droppable=False))
    _, wait = decide(page, request("new", 3), world(sim0=40, host=4))
    assert wait.steps[0].shares == shares(host=3)
    _, refusal = decide(page, request("new", 5), world(sim0=40, host=4))
    assert isinstance(refusal, Refuse)


def test_room_for_a_return_is_made_or_it_moves_to_another_card():
    page = book(big(sim0=37, host=3), lease("other", sim0=3, by=1))
    after, wait = decide(page, request("big", 40), world(sim0=40, host=64))
    assert isinstance(wait, Wait) and [step.lease for step in wait.steps] == [at(1, "other")]
    assert after.ticket("1:big").need == shares(sim0=3)
    # Its own card is full of a model in use. All its bytes count on both until the move is done.
    page = book(big(sim0=10, host=30), lease("used", sim0=30, pins=1))
    after, grant = decide(page, request("big", 40), world(sim0=40, sim1=40, host=64))
    assert isinstance(grant, Grant) and grant.steps[0].shares == shares(sim1=40)
    assert after.claims() == {"sim:0": size(40), "sim:1": size(40), HOST: size(30)}
    # The weights exist nowhere else and host memory is full, so the lease's bytes on the card
    # cannot leave.
    mine = big(sim0=37, host=3, droppable=False)
    page = book(mine, lease("used", sim0=3, pins=1))
    _, verdict = decide(page, request("big", 40), world(sim0=40, host=3))
    assert isinstance(verdict, Wait)


def test_a_droppable_lease_leaves_whole_if_no_part_can_go_to_the_host():
    _, wait = decide(book(big()), request("new", 3), world(sim0=40, host=2))
    assert wait.steps == (Drop(at(1, "big"), shares(sim0=40), wait.steps[0].because),)
    _, wait = decide(book(big()), request("new", 3), world(sim0=40, host=64, offload=False))
    assert isinstance(wait.steps[0], Drop)


@pytest.mark.parametrize("fields", [{"piece_bytes": 0}, {"movable": False}])
def test_a_lease_that_cannot_be_cut_leaves_whole(fields):
    _, wait = decide(book(big(**fields)), request("new", 3), world(sim0=40, host=64))
    assert wait.steps[0].source == shares(sim0=40)


def test_the_cheapest_leaves_whole_before_a_second_one_is_cut():
    old = big(sim0=20, last_used=1.0)
    young = lease("young", sim0=20, piece_bytes=GIB, last_used=500.0)
    _, wait = decide(book(young, old), request("new", 23), world(sim0=40, host=64))
    assert {step.lease: step.shares for step in wait.steps} == {
        at(1, "big"): shares(host=20),
        at(1, "young"): shares(host=3),
    }
    one = big(sim0=20)
    two = replace(lease("two", sim1=20, piece_bytes=GIB), last_used=NOW - 50)
    wanted = request("new", 10, layout="balanced", rules={"least_cards": 2, "margin_bytes": 0})
    _, wait = decide(book(one, two), wanted, world(sim0=20, sim1=20, host=64))
    assert {step.lease: step.shares for step in wait.steps} == {
        at(1, "big"): shares(host=5),
        at(1, "two"): shares(host=5),
    }


def test_another_owner_is_asked_for_a_part_and_gives_it_once():
    page, there = book(big(by=2), owners=(1, 2)), world(sim0=40, host=64)
    page, wait = decide(page, request("new", 3), there)
    assert wait.recalls == {at(2, "big"): size(3)}
    page = decode_book(encode(page))
    assert page.ticket("1:new").recalls == wait.recalls
    page, steps, _ = obey(page, owner(2).id, there, "k")
    assert [step.shares for step in steps] == [shares(host=3)]
    page = books.after_step(page, steps[0], replace(there, now=NOW + 1))
    _, again, _ = obey(page, owner(2).id, replace(there, now=NOW + 1), "k2")
    assert again == (), "the ticket is older than the departure"


def test_other_requests_count_on_the_recalled_part_only():
    """The rest of the recalled model is not free for a younger request."""
    page, there = book(big(by=2), owners=(1, 2, 3)), world(sim0=40, host=64)
    page, _ = decide(page, request("first", 3, arrived=NOW - 1), there)
    page, wait = decide(page, request("second", 5, by=3), there)
    assert wait.asked == () and isinstance(wait, Wait)
    used = lease("used", by=3, sim0=10, pins=1)
    page = book(big(sim0=30, host=10), used, owners=(1, 2, 3))
    there = world(sim0=40, host=64)
    page, _ = decide(page, request("big", 40, arrived=NOW - 50), there)
    there = replace(there, now=NOW + 40)
    page, _ = decide(page, request("big", 40, arrived=NOW - 50), there)
    _, verdict = decide(page, request("new", 5, by=2, arrived=NOW), there)
    assert isinstance(verdict, Wait) and not verdict.asked and not verdict.steps


def test_relief_takes_pieces_a_drain_the_rest_and_no_move_either():
    waiting = ticket("w", by=2, sim0=1)
    page = book(big(), tickets=[waiting], owners=(1, 2))
    after, steps = relieve(page, owner(1).id, world(sim0=50, host=64), lru, "k")
    assert [step.shares for step in steps] == [shares(host=11)], "30 GiB are 60 % of 50 GiB"
    assert relieve(after, owner(1).id, world(sim0=50, host=64), lru, "k")[1] == ()
    there = world(sim0=40, sim1=40, host=64)
    page = book(big(sim0=37, host=3), devices=there.devices)
    page = drains.drain(page, there.devices[0], "ann", there)
    page, steps = drains.vacate(page, owner(1).id, there, "k")
    assert [step.shares for step in steps] == [shares(host=37)]
    page = books.after_step(page, steps[0], there)
    assert page.lease(owner(1).id, "big").shares == shares(host=40)
    assert books.totals(page)["offloads"] == 1
    wanted = request("big", 40, devices=("sim:1",))
    page = book(big(sim0=37, host=3))
    there = world(sim0=40, sim1=40, host=64)
    _, verdict = move(
        page, owner(1).id, "big", wanted.footprint, wanted.placement, there, "k", "by hand"
    )
    assert isinstance(verdict, Refuse) and verdict.kind == "away"


def test_a_lease_in_parts_is_dropped_for_weights_that_exist_nowhere_else():
    """They need its bytes in host memory, and its source has all its bytes."""
    parts = big(sim1=2, sim0=0, host=6)
    parts = replace(parts, shares=shares(sim1=2, host=6))
    only = lease("only", sim0=8, droppable=False)
    _, wait = decide(
        book(parts, only), request("new", 8, devices=("sim:0",)), world(sim0=8, sim1=8, host=8)
    )
    assert [(type(step), step.lease) for step in wait.steps][0] == (Drop, at(1, "big"))
    # A back-test of a day ended with an AssertionError: the moved lease was no longer there.
    away = lease("away", host=4, last_used=100.0)
    parts = replace(big(sim0=5, last_used=100.0), shares=shares(sim0=4, host=1))
    only = lease("only", sim0=1, piece_bytes=GIB, droppable=False, last_used=500.0)
    _, wait = decide(book(away, parts, only), request("new", 6), world(sim0=6, host=5))
    assert [step.lease for step in wait.steps] == [at(1, "away"), at(1, "big")]


sizes = st.integers(1, 12)


@given(
    st.lists(st.tuples(sizes, st.integers(0, 5), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 30),
    st.integers(0, 40),
)
def test_no_piece_that_leaves_could_have_stayed(models, need, host):
    """Host memory holds all parts, and as far as possible all weights that exist nowhere else."""
    idle = [
        lease(f"m{n}", sim0=bytes_ * B, piece_bytes=piece, droppable=droppable)
        for n, (bytes_, piece, droppable) in enumerate(models)
    ]
    chosen = first_enough(idle, Room({"sim:0": -need}), PartsRoom(host, host))
    if chosen is None:
        assert sum(one.bytes for one in idle) < need
        return
    freed = [one.freed_by(one.target) for one in chosen]
    total = sum(shares_[0].bytes for shares_ in freed)
    assert total >= need
    for one, [share] in zip(chosen, freed, strict=True):
        kept = (
            one.piece_bytes if one.target and one.leaving_bytes > one.piece_bytes else share.bytes
        )
        assert total - kept < need
    parts = [one for one in chosen if one.target]
    if parts:
        moved = parts + [one for one in chosen if not one.target and not one.droppable]
        assert sum(one.leaving_bytes for one in parts) <= host
        if all(one.droppable for one in chosen):
            assert sum(one.leaving_bytes for one in moved) <= host


class Journeys(RuleBasedStateMachine):
    """One model leaves in parts and returns beside others' requests: no byte lost, no limit or law broken."""

    @initialize(total=st.integers(2, 12), piece=st.integers(1, 5), droppable=st.booleans())
    def begin(self, total: int, piece: int, droppable: bool) -> None:
        self.there = world(sim0=12 * B, sim1=6 * B, host=20 * B)
        self.total = total
        whole = lease("big", sim0=total * B, piece_bytes=piece, droppable=droppable)
        self.page = book(whole, owners=(1, 2), limits=self.there.limits)
        self.steps: list[Any] = []

    def _decide(self, wanted: Any) -> Any:
        self.there = replace(self.there, now=self.there.now + 1)
        after, verdict = admit(self.page, wanted, self.there, keep_score)
        refuse_unlawful(self.page, after, wanted.lease.owner, lambda _: frozenset())
        self.page = after
        return verdict

    @property
    def big(self) -> Lease | None:
        return self.page.lease(owner(1).id, "big")

    @rule(need=st.integers(1, 6), n=st.integers(0, 2))
    def another_is_loaded(self, need: int, n: int) -> None:
        name = f"n{n}"
        if self.page.lease(owner(1).id, name):
            return
        verdict = self._decide(request(name, need * B))
        if isinstance(verdict, Grant):
            self.page = books.after_step(self.page, verdict.steps[0], self.there)
            self.page = self.page.with_lease(
                replace(self.page.lease(owner(1).id, name), pins=0, droppable=True)
            )
        elif isinstance(verdict, Wait):
            self.steps = list(verdict.steps)

    @rule()
    def it_is_requested(self) -> None:
        if self.big is None or self.big.phase is not Phase.SETTLED:
            return
        verdict = self._decide(request("big", self.total * B))
        self.page = self.page.without_ticket("1:big")
        if isinstance(verdict, Wait):
            self.steps = list(verdict.steps)
        if isinstance(verdict, Grant) and verdict.steps:
            self.steps = [verdict.steps[0]]

    @rule(fail=st.booleans())
    @precondition(lambda self: self.steps)
    def a_step_is_done(self, fail: bool) -> None:
        step = self.steps.pop()
        found = self.page.find(step.lease)
        if found is None or found.phase is Phase.SETTLED:
            return
        if fail:
            self.page = books.abandon(self.page, found.owner, found.name, found.key, self.there)
        else:
            self.page = books.after_step(self.page, step, self.there)
        after = self.page.find(step.lease)
        if after is not None:
            self.page = self.page.with_lease(replace(after, pins=0))

    @rule()
    @precondition(lambda self: self.page.tickets)
    def a_request_ends(self) -> None:
        self.page = self.page.without_ticket(self.page.tickets[0].key)

    @invariant()
    def its_bytes_are_conserved(self) -> None:
        if self.big is None:
            return
        assert self.big.bytes == self.total
        if self.big.phase is Phase.LEAVING and self.big.target:
            after = self.big.after(self.big.target)
            assert sum(share.bytes for share in after) == self.total
        for device, limit in self.there.limits.items():
            assert self.page.claims().get(device, 0) <= limit


TestJourneys = Journeys.TestCase


def test_the_laws_of_a_write_refuse_a_lease_in_parts_that_cannot_be_cut():
    page = book(big())
    for wrong in (
        big(sim0=37, host=3, piece_bytes=0),
        big(sim0=20, sim1=17, host=3),
        big(sim0=37, host=3, filled=shares(sim0=36)),
    ):
        with pytest.raises(Exception, match="in parts"):
            refuse_unlawful(page, book(wrong), owner(1).id, lambda _: frozenset())
    refuse_unlawful(page, book(big(sim0=37, host=3)), owner(1).id, lambda _: frozenset())
