"""Law 16: what leaves must be able to return. Real decisions and the ledger's laws; `Notebooks` moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import (
    HOST,
    Device,
    Footprint,
    Grant,
    Part,
    Phase,
    PlacementRules,
    Refuse,
    Request,
    Share,
    Wait,
    World,
)
from gpu_runtime.ledgers.invariants import refuse_unlawful
from gpu_runtime.scheduler import feasibility, victims
from gpu_runtime.scheduler import transitions as books
from gpu_runtime.scheduler.admission import admit, exchange
from gpu_runtime.scheduler.capacity import room
from gpu_runtime.scheduler.policies import lru
from gpu_runtime.scheduler.recall import obey
from tests.worlds import NOW, WALL, Rules, at, book, lease, owner, ticket

CARD = "sim:0"
KERNEL = {"kind": "kernel", "droppable": False}


def fitting(sizes: list[int], most: int) -> list[int]:
    """The largest of the `sizes` that together are at most `most`, as the backend chooses storages."""
    chosen = []
    for size in sorted(sizes, reverse=True):
        if size <= most:
            most -= size
            chosen.append(size)
    return chosen


class Notebooks:
    """Two notebooks, 1 and 2, each with the sizes of its tensors. The sizes are small numbers."""

    def __init__(self, card: int, budget: int, ram: int, ram_budget: int) -> None:
        devices = (Device(CARD, card, simulated=True), Device(HOST, ram, simulated=True))
        limits = {CARD: budget, HOST: ram_budget}
        self.world = World(NOW, NOW + WALL, devices, limits, rules=Rules(grace_seconds=0))
        self.book = replace(book(owners=(1, 2)), devices=devices, limits=limits)
        self.tensors: dict[int, list[int]] = {}
        self.away: dict[int, list[int]] = {1: [], 2: []}
        self.turns = 0  # how often bytes have returned

    # -- facts

    def lease(self, who: int):
        return self.book.lease(owner(who).id, "kernel")

    def hold(self, who: int, sizes: list[int]) -> None:
        """A cell of this notebook took tensors of these `sizes`, without a request."""
        self.tensors[who] = sizes
        shares = (Share(CARD, sum(sizes)),)
        held = lease("kernel", by=who, shares=shares, piece_bytes=max(sizes), **KERNEL)
        self.write(self.book.with_lease(held), who)

    def write(self, after, who: int) -> None:
        self.world = replace(self.world, now=self.world.now + 1)
        refuse_unlawful(self.book, after, owner(who).id, lambda book: frozenset())
        self.book = after

    def move(self, step, who: int) -> None:
        """Moves tensors to host memory, at most the bytes of the step, and settles the lease."""
        here = list(self.tensors[who])
        for size in self.away[who]:
            here.remove(size)
        self.away[who] = self.away[who] + fitting(here, sum(one.bytes for one in step.shares))
        self.write(books.left(self.book, step, self.places(who), self.world), who)

    def places(self, who: int) -> tuple[Share, ...]:
        away = sum(self.away[who])
        found = (Share(CARD, sum(self.tensors[who]) - away), Share(HOST, away))
        return tuple(share for share in found if share.bytes)

    # -- what a user or a cell requests

    def park(self, who: int) -> bool:
        """`%gpu park` in this notebook. Returns whether it was parked."""
        held = self.lease(who)
        step = victims.eviction_step(held, room(self.book, self.world)[HOST], self.world)
        if step is None or feasibility.why_no_return(self.book, held, self.world):
            return False
        self.write(victims.mark_leaving(self.book, step, "park"), who)
        self.move(step, who)
        return True

    def request(self, who: int) -> Request:
        held = self.lease(who)
        return Request(
            f"cell {who}",
            replace(held, shares=(), piece_bytes=0, phase=Phase.SETTLED),
            Footprint.of(held.own_bytes, "measured"),
            self.world.now,
            PlacementRules(devices=(CARD,)),
            stage_bytes=1,
        )

    def cell(self, who: int) -> bool:
        """A cell of this notebook begins. Returns whether it may run."""
        request, other = self.request(who), 3 - who
        for _ in range(99):
            after, verdict = admit(self.book, request, self.world, lru)
            self.write(after, who)
            if isinstance(verdict, Refuse):
                return False
            if isinstance(verdict, Grant):
                if not verdict.steps:
                    return True
                self.arrive(verdict, who)
                continue
            after, steps, _ = obey(self.book, owner(other).id, self.world, "obey")
            self.write(after, other)
            assert steps or verdict.steps, verdict.because
            for step in steps:
                self.move(step, other)
        raise AssertionError("the return does not end")

    def arrive(self, grant: Grant, who: int) -> None:
        for size in fitting(self.away[who], grant.steps[0].shares[0].bytes):
            self.away[who].remove(size)
        after = books.arrived(self.book, owner(who).id, "kernel", self.places(who), self.world)
        on_card = sum(one.bytes_on(CARD) for one in after.leases())
        assert on_card <= self.world.device(CARD).total_bytes, "the real card is overcommitted"
        self.turns += 1
        lease = replace(after.lease(owner(who).id, "kernel"), pins=0)
        self.write(after.with_lease(lease), who)


def test_a_return_uses_the_part_of_the_card_above_its_budget_only_where_it_must():
    """488 of 512 MiB, with a budget of 461. In 0.2 no cell ran again, not even `del x`."""
    both = Notebooks(card=512, budget=461, ram=4096, ram_budget=2048)
    both.hold(1, [488])
    assert both.park(1) and both.cell(1)
    assert both.lease(1).shares == (Share(CARD, 488),)
    # The part of the card above its budget is only for returns that need it.
    both = Notebooks(card=512, budget=400, ram=4096, ram_budget=2048)
    both.hold(1, [300])
    assert both.park(1)
    both.hold(2, [150])
    assert both.cell(1) and both.lease(2).shares == (Share(HOST, 150),)


def test_a_notebook_that_could_not_return_is_not_parked():
    """On a simulated card plain code can take more than there is. It could never return."""
    both = Notebooks(card=100, budget=90, ram=1000, ram_budget=500)
    both.hold(1, [101])
    assert not both.park(1)
    assert "holds more than the 100 B of sim:0" in feasibility.why_no_return(
        both.book, both.lease(1), both.world
    )
    # A kept model never makes room, nor a process's context. So the notebook must fit beside them.
    both = Notebooks(card=100, budget=90, ram=1000, ram_budget=500)
    kept = lease("m", by=2, shares=(Share(CARD, 30),), keep=True)
    section = both.book.with_lease(kept).sections[owner(2).id]
    both.write(both.book.with_section(replace(section, residue={CARD: 10})), 2)
    both.hold(1, [60])
    assert both.park(1) and both.cell(1)
    both.hold(1, [61])
    assert not both.park(1)
    assert at(2, "m") in {one.id for one in both.book.leases()}


def test_an_ordinary_grant_never_uses_the_part_above_the_budget():
    """Only a return may: the same bytes, requested anew, are refused."""
    both = Notebooks(card=512, budget=461, ram=4096, ram_budget=2048)
    request = Request("m", lease("m", shares=()), Footprint.of(488, "declared"), NOW)
    _, verdict = admit(both.book, request, both.world, lru)
    assert isinstance(verdict, Refuse) and verdict.budget_bytes == 461
    # They were not on the card, so they do not use the part above its budget.
    both = Notebooks(card=512, budget=461, ram=4096, ram_budget=2048)
    both.hold(1, [400])
    assert both.park(1)
    for more, verdict in ((0, Grant), (61, Grant), (62, Refuse)):
        wanted = replace(both.lease(1), shares=(), piece_bytes=0)
        rules = PlacementRules(devices=(CARD,))
        room = Footprint((Part("weights", 400, "x"), Part("room", more, "x")))
        request = Request("cell", wanted, room, both.world.now, rules)
        assert isinstance(admit(both.book, request, both.world, lru)[1], verdict)


def test_two_notebooks_that_fill_card_and_ram_change_places_in_pieces():
    """Neither has room for a whole copy: 90 of 100 on the card, 45 of 50 in RAM. Still each gets its turn."""
    both = Notebooks(card=100, budget=100, ram=50, ram_budget=50)
    both.hold(1, [5] * 9)
    assert both.park(1)
    both.hold(2, [5] * 18)
    for who in (1, 2, 1):
        assert both.cell(who)
        assert both.lease(who).shares == (Share(CARD, sum(both.tensors[who])),)
    assert both.turns > 3, "more than one piece returned at a time"


@pytest.mark.parametrize("ahead", [False, True])
def test_no_piece_moves_while_the_other_notebook_runs_or_another_request_is_ahead(ahead):
    both = Notebooks(card=100, budget=100, ram=50, ram_budget=50)
    both.hold(1, [5] * 9)
    assert both.park(1)
    both.hold(2, [5] * 18)
    theirs = both.lease(2)
    _, verdict = admit(both.book, both.request(1), both.world, lru)
    assert verdict.recalls == {theirs.id: 5}
    first = ticket("big", by=2, refreshed=both.world.now, importance="urgent")
    first = replace(first, need=(Share(CARD, 10),))
    in_use = replace(theirs, pins=1)
    page = both.book.with_ticket(first) if ahead else both.book.with_lease(in_use)
    _, verdict = admit(page, both.request(1), both.world, lru)
    assert isinstance(verdict, Wait) and (verdict.recalls, verdict.steps) == ({}, ())
    assert verdict.blockers == (() if ahead else (theirs.id,))


def test_a_return_that_cannot_end_moves_no_piece():
    both = Notebooks(card=100, budget=100, ram=50, ram_budget=50)
    both.hold(1, [5] * 9)
    assert both.park(1)
    both.hold(2, [5] * 18)
    both.write(both.book.with_lease(replace(both.lease(2), importance=5)), 2)
    assert not both.cell(1) and both.lease(2).all_on_device
    # Half a return would stop both notebooks. There is room for one piece less than it takes.
    both = Notebooks(card=100, budget=100, ram=50, ram_budget=50)
    both.hold(1, [10] * 5)
    assert both.park(1)
    both.hold(2, [50, 50])
    assert not both.cell(1)
    assert both.lease(1).on_host and both.lease(2).all_on_device and both.cell(2)


def test_what_fits_beside_the_free_bytes_returns_at_once():
    half = lease("kernel", sim0=4, host=6, piece_bytes=1, **KERNEL)
    need = half.bytes_on(HOST)
    assert exchange(half, (), need, 0) == exchange(half, (), need + 1, 0) == (None, need)
    assert exchange(half, (), need - 1, 0) is None


@given(
    card=st.integers(10, 60),
    budget=st.integers(5, 10),
    ram=st.integers(10, 120),
    ram_budget=st.integers(3, 10),
    first=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    second=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    doings=st.lists(st.tuples(st.sampled_from(["park", "cell"]), st.integers(1, 2)), max_size=8),
    parks_first=st.booleans(),
)
def test_what_left_can_return_or_its_park_was_refused(
    card, budget, ram, ram_budget, first, second, doings, parks_first
):
    """All sizes and budgets, by hand or by request; both fit into card and RAM with a spare piece of each."""
    both = Notebooks(card, card * budget // 10, ram, ram * ram_budget // 10)
    both.hold(1, first)
    parked = parks_first and both.park(1)
    on_card = sum(second) + (0 if parked else sum(first))
    spare = card + ram - sum(first) - sum(second)
    if on_card > card or spare < max(first) + max(second):
        return
    both.hold(2, second)
    for doing, who in doings:
        getattr(both, doing)(who)
    for who in (1, 2, 1):
        assert both.cell(who)
        assert both.lease(who).shares == (Share(CARD, sum(both.tensors[who])),)
