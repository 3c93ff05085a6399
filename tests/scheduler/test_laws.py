"""The laws of docs/architecture.md for single decisions on any book; sequences are in test_audited_processes.py."""

from __future__ import annotations

import itertools
import math
from typing import Any

from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import (
    HOST,
    IMPORTANCE,
    Book,
    Drop,
    Footprint,
    Grant,
    Lease,
    Load,
    Move,
    Phase,
    Refuse,
    Request,
    Share,
    Shed,
    Wait,
    World,
    overdrafts,
)
from gpu_runtime.ledgers.invariants import refuse_unlawful
from gpu_runtime.scheduler import transitions as books
from gpu_runtime.scheduler.admission import admit
from gpu_runtime.scheduler.capacity import room
from gpu_runtime.scheduler.eviction_policy import cost_aware, lru
from gpu_runtime.scheduler.placement import PLACEMENTS, place
from gpu_runtime.scheduler.plan import plan
from gpu_runtime.scheduler.pressure import level, pressure
from gpu_runtime.scheduler.queue import load_seconds
from gpu_runtime.scheduler.recall import obey
from gpu_runtime.scheduler.relief import relieve
from tests.worlds import NOW, book, lease, owner, replayed, request, ticket, world

PLACES = ("sim0", "sim1", "sim2", "host")
CARDS = ("sim:0", "sim:1", "sim:2")
B = 2**-30  # one byte, in the builders' GiB
shadows = st.sampled_from([0, 0, 1, 4, 9])  # bytes of a copy in host memory, of some or all bytes


@st.composite
def leases(draw: Any, quiet: bool = False) -> list[Lease]:
    """Draws leases of three owners. With `quiet`, all leases are settled and idle, and none is kept."""
    made = []
    for n in range(draw(st.integers(0, 7))):
        phase = (
            Phase.SETTLED
            if quiet
            else draw(st.sampled_from([Phase.SETTLED] * 4 + [Phase.ARRIVING, Phase.LEAVING]))
        )
        place, size = draw(st.sampled_from(PLACES)), draw(st.integers(1, 9)) * B
        fields: dict[str, Any] = {place: size, "droppable": draw(st.booleans())}
        # over two cards, or all three
        if place != "host" and draw(st.sampled_from([False, False, True])):
            fields |= {
                card: draw(st.integers(1, 5)) * B
                for card in draw(st.sampled_from([PLACES[:2], PLACES[1:3], PLACES[:3]]))
            }
        movable = draw(st.booleans()) or quiet
        pieces = movable and place != "host" and len(fields) == 2 and draw(st.booleans())
        if pieces:
            fields["piece_bytes"] = draw(st.integers(1, 4))
        in_parts = pieces and draw(st.booleans())
        if in_parts:
            fields |= {"host": draw(st.integers(1, 5)) * B, "away_since": NOW - 500}
        if phase is Phase.ARRIVING and in_parts:
            card = f"{place[:3]}:{place[3]}"
            fields |= {"target": (Share(card, round(fields["host"] / B)),), "pins": 1}
        elif phase is Phase.ARRIVING:
            fields = {"host": size} if draw(st.booleans()) else {}
            to = draw(st.sampled_from([("sim:0",), ("sim:0",), ("sim:0", "sim:2")]))
            fields |= dict(
                target=tuple(Share(card, round(size / B)) for card in to),
                pins=1,
                droppable=bool(fields),
            )
        elif phase is Phase.LEAVING:
            fields |= dict(shadow_bytes=draw(shadows) if place != "host" else 0)
            total = sum(round(fields[card] / B) for card in PLACES[:3] if card in fields)
            if pieces:
                total = draw(st.integers(1, total))
            fields |= dict(
                target=(Share(HOST, total),) if place != "host" and draw(st.booleans()) else ()
            )
        elif not quiet:
            fields |= dict(
                pins=0 if place == "host" or in_parts else draw(st.sampled_from([0, 0, 0, 1])),
                keep=draw(st.sampled_from([False, False, True])),
                keep_alive=draw(st.sampled_from([0.0, 0.0, 500.0])),
            )
        if phase is Phase.SETTLED and place != "host":
            fields |= dict(shadow_bytes=draw(shadows))
        made.append(
            lease(
                f"m{n}",
                by=draw(st.integers(1, 3)),
                phase=phase,
                key="" if phase is Phase.SETTLED else f"k{n}",
                importance=draw(st.sampled_from(sorted(IMPORTANCE.values()))),
                wished=draw(st.sampled_from([0, 0, 1, 2])),
                movable=movable,
                last_used=NOW
                - draw(
                    st.sampled_from([1, 10, 100, 400])
                    if not quiet
                    else st.sampled_from([10, 100, 400])
                ),
                reload_seconds=draw(st.sampled_from([0.0, 1.0, 30.0])),
                **fields,
            )
        )
    return made


@st.composite
def tickets(draw: Any) -> list[Any]:
    return [
        ticket(
            f"t{n}",
            by=draw(st.integers(2, 3)),
            arrived=NOW - draw(st.integers(0, 200)),
            refreshed=NOW - draw(st.sampled_from([0, 1, 3])),
            importance=draw(st.sampled_from([5, 10, 20])),
            blocked_since=draw(st.sampled_from([0.0, NOW - 5, NOW - 50])),
            layout=draw(st.sampled_from(["balanced", "proportional"])),
            **{
                card: draw(st.integers(1, 9)) * B
                for card in draw(st.sampled_from([("sim0",), ("sim1",), ("sim0", "sim2")]))
            },
        )
        for n in range(draw(st.integers(0, 2)))
    ]


@st.composite
def worlds(draw: Any) -> World:
    return world(
        sim0=draw(st.integers(4, 16)) * B,
        sim1=draw(st.integers(4, 16)) * B,
        sim2=draw(st.sampled_from([0, 4, 9, 12])) * B,
        host=draw(st.integers(0, 20)) * B,
        offload=draw(st.sampled_from([True, True, False])),
        limit_bytes=draw(st.sampled_from([None, None, 12])),
        relief=draw(st.sampled_from(["auto", "always"])),
    )


@st.composite
def requests(draw: Any, page: Book) -> Request:
    held = [
        lease.id
        for lease in page.leases()
        if lease.pins and lease.owner == owner(1).id and draw(st.booleans())
    ]
    name = draw(st.sampled_from(["new", *(lease.name for lease in page.leases())]))
    layout = draw(
        st.sampled_from(["single", "single", "auto", "balanced", "proportional", "whole"])
    )
    size = draw(st.integers(1, 16 if layout == "single" else 36))
    pieces = draw(
        st.sampled_from([(), (), (1,) * size, (3,) * (size // 3) + (size % 3,) * bool(size % 3)])
    )
    rules = {
        "margin_bytes": draw(st.sampled_from([0, 0, 1])),
        "overhead": draw(st.sampled_from([0.0, 0.0, 0.1])),
        "most_cards": draw(st.sampled_from([0, 0, 2])),
        "least_cards": draw(st.sampled_from([1, 1, 2])),
        "factor": draw(st.sampled_from([0.0, 0.0, 3.0])),
        "card_bytes": draw(st.sampled_from([{}, {}, {"sim:0": 7, "sim:1": 4, "sim:2": 9}])),
    }
    return request(
        name,
        size * B,
        held=tuple(held),
        arrived=NOW - draw(st.integers(0, 100)),
        importance=draw(st.sampled_from([1, 5, 10, 20, 30])),
        layout=layout,
        pieces=pieces,
        heads=draw(st.sampled_from([0, 8, 12])),
        policy=draw(st.sampled_from(PLACEMENTS)),
        devices=draw(st.sampled_from([(), (), ("sim:0",), ("sim:0", "sim:2")])),
        rules=rules,
    )


@st.composite
def situations(draw: Any, quiet: bool = False) -> tuple[Book, Request, World]:
    there = draw(worlds())
    page = book(
        *draw(leases(quiet)),
        tickets=() if quiet else draw(tickets()),
        owners=(1, 2, 3),
        limits=there.limits,
    )
    assume(all(size >= 0 for size in room(page, there).values()))
    return page, draw(requests(page)), there


def decide(situation: tuple[Book, Request, World]) -> tuple[Book, Any]:
    page, wanted, there = situation
    return replayed(lambda b: admit(b, wanted, there, lru), page)


@given(situations())
def test_1_no_grant_takes_a_device_over_its_budget(situation):
    """A grant spends only bytes that are free now, and no bytes of leases that are still leaving."""
    page, _, there = situation
    after, verdict = decide(situation)
    assert overdrafts(page, after) == {}
    if isinstance(verdict, Grant) and verdict.steps:
        before = room(page, there)
        assert all(share.bytes <= before[share.device] for share in verdict.lease.target)
    assert all(size >= 0 for size in room(after, there).values())


@settings(suppress_health_check=[HealthCheck.filter_too_much])  # most situations refuse or wait
@given(situations(), st.integers(0, 30))
def test_2_facts_are_always_accepted(situation, measured):
    """Even if they overdraw a device, such as a load larger than declared, or memory beyond the leases."""
    page, verdict = decide(situation)
    wanted = situation[1].lease
    assume(isinstance(verdict, Grant) and verdict.steps)
    settled = books.arrived(
        page, wanted.owner, wanted.name, (Share("sim:0", measured),), situation[2]
    )
    assert settled.lease(wanted.owner, wanted.name).bytes == measured
    refuse_unlawful(page, settled, wanted.owner, lambda _: frozenset())
    told = books.publish(settled, books.Truth(owner(2), residue={"sim:0": measured}), situation[2])
    refuse_unlawful(settled, told, owner(2).id, lambda _: frozenset())


@given(situations())
def test_3_bytes_are_conserved(situation):
    """However a lease ends, it releases exactly the bytes that it took, on every device."""
    page = situation[0]
    after, verdict = decide(situation)
    before, now = page.claims(), after.claims()
    steps = verdict.steps if isinstance(verdict, (Grant, Wait)) else ()
    steps = [step for step in steps if not isinstance(step, Shed)]  # it frees bytes once performed
    again = any(step.because in ("granted before", "This was decided before.") for step in steps)
    for step in () if again else steps:
        claimed = (
            verdict.lease.target if isinstance(verdict, Grant) else getattr(step, "shares", ())
        )
        for share in claimed:
            before[share.device] = before.get(share.device, 0) + share.bytes
        if isinstance(step, Move) and isinstance(verdict, Wait):
            gone = page.find(step.lease)  # its shadow is a part of its target now
            before[HOST] -= gone.shadow_bytes - after.find(step.lease).shadow_beyond_target
    before = {device: size for device, size in before.items() if size or device in now}
    assert now == before
    for lease_ in list(after.leases()):
        after = after.without_lease(lease_.owner, lease_.name)
    assert not any(after.claims().values())


@given(situations())
def test_4_and_5_victims_are_idle_no_more_important_not_kept_and_not_the_only_copy(situation):
    page, wanted, there = situation
    after, verdict = decide(situation)
    if not isinstance(verdict, Wait):
        return
    assert {t.key for t in after.tickets if t.verb == "use"} >= {t.key for t in page.tickets}
    freed = [step for step in verdict.steps if isinstance(step, Shed)]
    steps = [step for step in verdict.steps if not isinstance(step, Shed)]
    for id in [step.lease for step in steps] + list(verdict.asked):
        gone = page.find(id)
        assert gone.phase is Phase.SETTLED and gone.kind == "model"
        assert not gone.pins and not gone.keep and id not in wanted.held
        assert gone.importance >= wanted.lease.importance
        overdue = NOW - wanted.arrived >= there.rules.most_wait(load_seconds(page, wanted))
        assert (
            overdue
            or gone.owner == wanted.lease.owner
            or gone.idle_seconds(NOW) >= there.rules.grace_seconds
        )
        assert (gone.owner == wanted.lease.owner) == (id not in verdict.asked)
        assert gone.droppable or gone.movable
    for step in freed:
        gone = page.find(step.lease)
        assert gone.owner == wanted.lease.owner and gone.phase is Phase.SETTLED
        assert step.source == (Share(HOST, gone.shadow_bytes),) and gone.shadow_bytes
    for id in verdict.shadows:
        assert page.find(id).shadow_bytes and page.find(id).owner != wanted.lease.owner
    for step in steps:
        assert page.find(step.lease).droppable or not isinstance(step, Drop)
        if isinstance(step, Move):
            assert [share.device for share in step.shares] == [HOST] and there.rules.offload


@st.composite
def wished_cards(draw: Any) -> tuple[Book, Request, World]:
    """A card full of idle models of equal importance, and a request that needs some of their room."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    made = [
        lease(
            f"m{n}",
            by=draw(st.integers(1, 2)),
            sim0=size * B,
            wished=draw(st.integers(0, 2)),
            last_used=NOW - draw(st.integers(10, 400)),
        )
        for n, size in enumerate(sizes)
    ]
    there = world(sim0=sum(sizes) * B, host=0, offload=False)
    wanted = request("new", draw(st.integers(1, sum(sizes))) * B)
    return book(*made, owners=(1, 2), limits=there.limits), wanted, there


def evicted(verdict: Any) -> set[str]:
    """The ids of the leases that leave by a Wait."""
    return {step.lease for step in verdict.steps}.union(verdict.asked)


@given(wished_cards(), st.sampled_from([1, 2]))
def test_4_what_is_loaded_for_a_wish_evicts_nothing_that_is_wished_as_much(situation, spared):
    """Two wished models would otherwise evict each other for ever."""
    page, wanted, there = situation
    wanted = replace(wanted, placement=replace(wanted.placement, spared=spared))
    _, verdict = decide((page, wanted, there))
    assert isinstance(verdict, Wait)
    assert all(page.find(id).wished < spared for id in evicted(verdict))
    less = sum(one.bytes for one in page.leases() if one.wished < spared)
    assert bool(evicted(verdict)) == (less >= wanted.footprint.bytes)


@given(wished_cards())
def test_8_no_wished_model_leaves_if_models_that_are_wished_less_free_enough(situation):
    """The importance is compared first, then the wish, and only then the policy's rank."""
    page, wanted, there = situation
    _, verdict = decide(situation)
    most = max(page.find(id).wished for id in evicted(verdict))
    less = sum(one.bytes for one in page.leases() if one.wished < most)
    assert less < wanted.footprint.bytes


@given(situations())
def test_6_a_grant_is_a_reservation_born_pinned(situation):
    page, verdict = decide(situation)
    wanted = situation[1]
    if isinstance(verdict, Grant) and verdict.steps:
        reserved = page.lease(wanted.lease.owner, wanted.lease.name)
        assert (reserved, reserved.phase, reserved.key, reserved.pins) == (
            verdict.lease,
            Phase.ARRIVING,
            wanted.key,
            1,
        )
        assert page.ticket(wanted.key) is None
        assert isinstance(verdict.steps[0], Move if reserved.shares else Load)


@given(situations())
def test_7_a_refusal_evicts_nothing(situation):
    after, verdict = decide(situation)
    if isinstance(verdict, Refuse):
        assert list(after.leases()) == list(situation[0].leases())
        assert [t for t in after.tickets if t.key == situation[1].key] == []


def _departures(victim: Lease) -> list[tuple[int, dict[str, int]]]:
    """How an idle lease may leave, as (bytes for the host, freed bytes by card): droppable whole, others in parts."""
    if victim.droppable:
        targets: list[tuple[Share, ...]] = [()]
    else:
        whole = victim.card_bytes
        sizes = range(victim.piece_bytes, whole, victim.piece_bytes) if victim.piece_bytes else ()
        targets = [(Share(HOST, part),) for part in (*sizes, whole)]
    return [(0, {})] + [
        (
            sum(share.bytes for share in target),
            {share.device: share.bytes for share in victim.freed_by(target)},
        )
        for target in targets
    ]


@given(situations(quiet=True))
@example(  # pieces that the host can take are enough, on one card or on several
    (
        book(lease("a", by=2, sim0=8 * B, piece_bytes=1, droppable=False), owners=(1, 2, 3)),
        request("new", 5 * B),
        world(sim0=10 * B, sim1=4 * B, sim2=0, host=3 * B),
    )
)
@example(
    (
        book(lease("a", by=2, sim0=8 * B, piece_bytes=1, droppable=False), owners=(1, 2, 3)),
        request("new", 8 * B, layout="proportional", rules={"margin_bytes": 0}),
        world(sim0=10 * B, sim1=3 * B, sim2=0, host=3 * B),
    )
)
def test_7_no_set_of_victims_could_serve_a_refused_request(situation):
    """Every set of leases and pieces that may be dropped or that the host can take, with every allowed layout."""
    page, wanted, there = situation
    after, verdict = decide(situation)
    wanted_lease = page.lease(wanted.lease.owner, wanted.lease.name)
    footprint = wanted.footprint
    if wanted_lease:
        footprint = replace(footprint, parts=Footprint.of(wanted_lease.bytes).parts)
    rules = wanted.placement
    layouts = (
        (rules.layout,)
        if rules.layout != "auto"
        else ("single", "proportional")[rules.least_cards > 1 :]
    )
    on = [m for m in page.leases() if m.on_device and m is not wanted_lease]
    host_stays = sum(m.bytes_on(HOST) for m in page.leases() if not m.droppable)
    host_room = there.limits[HOST] - host_stays if there.rules.offload else 0
    departures = [_departures(m) for m in on]
    assume(math.prod(map(len, departures)) <= 2_000)
    limits = {card: there.limits[card] for card in CARDS}
    possible = False
    for gone in itertools.product(*departures):
        if sum(copied for copied, _ in gone) > max(0, host_room):
            continue
        left = dict(limits)
        for m, (_, freed) in zip(on, gone, strict=True):
            for share in m.shares:
                if share.device != HOST:
                    left[share.device] -= share.bytes - freed.get(share.device, 0)
        possible = possible or any(
            c.fits
            for layout in layouts
            for c in place(footprint, left, replace(wanted.placement, layout=layout), limits)
        )
    if isinstance(verdict, Refuse) and verdict.kind != "limit":
        assert not possible
    if not possible and not (wanted_lease and wanted_lease.all_on_device):
        assert isinstance(verdict, Refuse)


@given(situations(quiet=True), st.sampled_from(["sim:0", "sim:1"]), st.integers(0, 6))
def test_8_no_victim_can_be_spared(situation, card, more):
    """If any victim or piece stayed, the request would not fit. Nothing that stays is less important than all."""
    page, _, there = situation
    there = replace(there, rules=replace(there.rules, limit_bytes=None))
    free = room(page, there)[card]
    wanted = request("new", (free + 1 + more) * B, importance="urgent", devices=(card,))
    _, verdict = decide((page, wanted, there))
    if not isinstance(verdict, Wait):
        return
    [candidate] = verdict.considered
    assume(candidate.victims)  # else the host has no room now, and nothing leaves
    steps = {step.lease: step for step in verdict.steps}
    parts = dict(zip(verdict.asked, verdict.asked_bytes, strict=False))
    assume(all(id in steps or id in verdict.asked for id in candidate.victims))  # all leave now
    gone = []
    for id in candidate.victims:
        victim, step = page.find(id), steps.get(id)
        target = (Share(HOST, parts.get(id, 0)),) if parts.get(id) else ()
        if isinstance(step, Move):
            target = step.shares
        freed = sum(s.bytes for s in victim.freed_by(target) if s.device == card)
        least = 0  # bytes that would be free if one piece less left
        copied = sum(s.bytes for s in target)
        # A shadow of some bytes helps only if all bytes leave. So a part may need more host memory.
        part_of_a_shadow = 0 < victim.shadow_bytes < victim.card_bytes
        if victim.piece_bytes and copied and not part_of_a_shadow:
            assert copied % victim.piece_bytes == 0 or copied == victim.card_bytes
            fewer = (copied - 1) // victim.piece_bytes * victim.piece_bytes
            least = freed - copied + fewer if fewer else 0
        gone.append((freed, least))
    total = free + sum(freed for freed, _ in gone)
    assert gone and total >= wanted.footprint.bytes
    for freed, least in gone:
        assert total - freed + least < wanted.footprint.bytes


@given(situations())
def test_9_a_request_that_fails_leaves_the_book_as_it_was(situation):
    """A granted load fails, or the victims of a waiting request fail to leave and it is withdrawn."""
    page, wanted, there = situation
    assume(not any(m.key == wanted.key for m in page.leases()) and not page.ticket(wanted.key))
    after, verdict = decide(situation)
    if isinstance(verdict, Grant) and verdict.steps:
        after = books.abandon(after, wanted.lease.owner, wanted.lease.name, wanted.key, there)
    elif isinstance(verdict, Wait):
        for step in verdict.steps:
            after = books.abandon(
                after, wanted.lease.owner, step.lease.partition("/")[2], wanted.key, there
            )
        after = books.withdraw(after, wanted.key)

    def without_traces(leases_: Any) -> list[Lease]:
        """Leases without traces of a request: an abandoned restore keeps its importance and times for a while."""
        return sorted(
            (
                replace(m, last_used=0, pinned_since=0, importance=0, keep_alive=0, key="")
                for m in leases_
            ),
            key=lambda m: m.id,
        )

    assert without_traces(after.leases()) == without_traces(page.leases())
    assert after.tickets == page.tickets


@given(situations())
def test_9_every_decision_first_looks_for_its_own_key(situation):
    """A decision that is made twice in a row reserves, recalls and evicts only once."""
    page, wanted, there = situation
    once, first = decide(situation)
    twice, second = decide((once, wanted, there))
    assert list(twice.leases()) == list(once.leases())
    assert type(first) is type(second)
    if not isinstance(first, Refuse):
        marked = [s for s in first.steps if not isinstance(s, Shed)]  # a shadow is freed at once
        if marked:
            again = [s for s in second.steps if not isinstance(s, Shed)]
            assert [replace(s, because="") for s in marked] == [
                replace(s, because="") for s in again
            ]
        assert twice.seq == once.seq and len(twice.tickets) == len(once.tickets)


@given(situations(), st.sampled_from([lru, cost_aware]))
def test_10_every_verdict_and_event_says_because(situation, rank):
    page, wanted, there = situation
    after, verdict = replayed(lambda b: admit(b, wanted, there, rank), page)
    assert verdict.because and all(event.because for event in after.events)
    for step in getattr(verdict, "steps", ()):
        assert step.because
    totals = books.totals(after)
    # a decision is no eviction yet
    assert totals["evictions"] == totals["offloads"] + totals["unloads"] == 0


@given(situations())
def test_a_process_writes_only_its_own_section_and_tickets(situation):
    """A process requests on its ticket, and the owner acts. The ledger refuses any other write."""
    after, _ = decide(situation)
    refuse_unlawful(situation[0], after, owner(1).id, lambda _: frozenset())
    for pid in (1, 2, 3):
        obeyed, *_ = replayed(
            lambda b, pid=pid: obey(b, owner(pid).id, situation[2], "obey"), after
        )
        refuse_unlawful(after, obeyed, owner(pid).id, lambda _: frozenset())
        relieved, _ = replayed(
            lambda b, pid=pid: relieve(b, owner(pid).id, situation[2], lru, "relieve"), obeyed
        )
        refuse_unlawful(obeyed, relieved, owner(pid).id, lambda _: frozenset())


@given(
    st.integers(1, 20),
    st.integers(0, 20),
    st.integers(0, 10),
    st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from(["seen", "unseen", "arriving", "leaving"])),
        max_size=4,
    ),
)
def test_11_room_is_the_smaller_of_claims_and_measurement_less_unseen_bytes(
    limit, free, reserve, held
):
    there = world(
        cuda0=limit * B, free={"cuda:0": free * B}, taken_at=NOW - 1, reserve_bytes=reserve
    )
    made = []
    for n, (size, kind) in enumerate(held):
        fields = {
            "seen": dict(cuda0=size * B, settled_at=NOW - 2),
            "unseen": dict(cuda0=size * B, settled_at=NOW - 1),
            "arriving": dict(phase=Phase.ARRIVING, target=(Share("cuda:0", size),)),
            "leaving": dict(cuda0=size * B, settled_at=NOW - 0.5, phase=Phase.LEAVING),
        }[kind]
        made.append(lease(f"m{n}", **fields))
    claims, unseen = (
        sum(size for size, _ in held),
        sum(size for size, kind in held if kind != "seen"),
    )
    assert room(book(*made), there)["cuda:0"] == min(limit - claims, free - reserve - unseen)


@given(st.integers(0, 2), situations())
def test_12_dead_owners_are_reaped_completely_and_no_others(pid, situation):
    page, there = situation[0], situation[2]
    gone = [owner(n).id for n in range(1, pid + 1)]
    after = books.reap(page, gone, there)
    assert set(after.sections) == set(page.sections) - set(gone)
    assert all(after.sections[id] == page.sections[id] for id in after.sections)
    assert after.tickets == tuple(t for t in page.tickets if t.owner not in gone)
    refuse_unlawful(page, after, owner(3).id, lambda _: frozenset(gone))


@given(situations())
def test_relief_brings_the_level_down_and_no_further(situation):
    """With `relief="auto"`, no step is needless: without the last step a card would still be too full."""
    page, _, there = situation
    assume(there.rules.relief == "auto")
    after, steps = relieve(page, owner(1).id, there, lru, "k")
    going = {
        card: sum(
            s.bytes
            for m in page.leases()
            if m.phase is Phase.LEAVING
            for s in m.freed_by(m.target)
            if s.device == card
        )
        for card in CARDS
    }
    for step in steps:
        full = [
            pressure(
                page.claims()[share.device] - going[share.device],
                there.limits[share.device],
                None,
                1,
            )
            for share in step.source
            if share.device != HOST
        ]
        # on one of its cards
        assert any(level(pressure_, there.rules) != "LOW" for pressure_ in full)
        for share in step.source:
            if share.device != HOST:
                going[share.device] += share.bytes


# -- progress --------------------------------------------------------------------------------------
def follow(
    page: Book, wanted: list[Request], there: World, rounds: int
) -> tuple[Book, dict[str, Any]]:
    """The book after `rounds` s, in which each process requests, obeys, loads, uses for a round, and ends."""
    answers: dict[str, Any] = {}
    using: list[Lease] = []
    for _ in range(rounds):
        for done in using:  # its block has ended
            page = page.with_lease(replace(page.find(done.id), pins=0))
        using = []
        for each in wanted:
            if isinstance(answers.get(each.key), (Grant, Refuse)):
                continue
            page, verdict = admit(page, each, there, lru)
            answers[each.key] = verdict
            if isinstance(verdict, Grant):
                name = each.lease.name
                if verdict.steps:
                    shares = verdict.lease.after(verdict.steps[0].shares)
                    page = books.arrived(
                        page, each.lease.owner, name, shares, there, droppable=True
                    )
                page = page.with_lease(
                    replace(page.lease(each.lease.owner, name), pins=1, last_used=there.now)
                )
                using.append(page.lease(each.lease.owner, name))
            for step in verdict.steps if isinstance(verdict, Wait) else ():
                page = books.perform(page, step, there)
        there = replace(there, now=there.now + 1.0, wall=there.wall + 1.0)
        for id in page.sections:
            page, steps, _ = obey(page, id, there, f"obey {id}")
            for step in steps:
                page = books.perform(page, step, there)
    return page, answers


# The rule claims a whole card, but the limit for each card is lower than that.
NO_CARD_ALONE = {"factor": 3.0, "margin_bytes": 0, "card_bytes": {"sim:0": 7, "sim:1": 4}}


@given(situations(quiet=True))
@example(  # in parts, on a card that is too small for the whole; the owner's limit counts its bytes
    (
        book(lease("a", sim0=6 * B, host=1 * B, piece_bytes=1, droppable=False)),
        request("a", 7 * B),
        world(sim0=6 * B, sim1=7 * B, host=1 * B, limit_bytes=12),
    )
)
@example(  # the same with more host memory: its bytes leave the card, and return to the other card
    (
        book(lease("a", sim0=6 * B, host=1 * B, piece_bytes=1, droppable=False)),
        request("a", 7 * B),
        world(sim0=6 * B, sim1=7 * B, host=9 * B, limit_bytes=12),
    )
)
@example(  # in parts, and only several cards together can hold it
    (
        book(lease("a", sim0=4 * B, host=1 * B, piece_bytes=1, droppable=False)),
        request("a", 5 * B, layout="auto", rules={"margin_bytes": 0}),
        world(sim0=4 * B, sim1=4 * B, host=1 * B),
    )
)
@example(  # in parts, and its rule claims more of the card than its own bytes
    (
        book(lease("a", sim0=4 * B, host=1 * B, piece_bytes=1, droppable=False)),
        request("a", 5 * B, rules={"factor": 3.0}),
        world(sim0=9 * B, host=1 * B),
    )
)
@example(  # its own bytes in host memory leave no room there for the lease in the way
    (
        book(
            lease("a", sim0=3 * B, droppable=False),
            lease("b", sim0=4 * B, host=3 * B, piece_bytes=1, droppable=False),
        ),
        request("b", 7 * B),
        world(sim0=7 * B, host=5 * B),
    )
)
@example(  # the same, all of it in host memory; its source has the bytes too
    (
        book(lease("a", sim0=8 * B, droppable=False), lease("b", host=8 * B)),
        request("b", 8 * B),
        world(sim0=8 * B, host=8 * B),
    )
)
@example(  # a part leaves, which the shadow of some bytes may lack: the host needs the shadow's place
    (
        book(
            lease("a", sim0=14 * B, piece_bytes=1, shadow_bytes=7, droppable=False),
            lease("b", host=13 * B, droppable=False),
        ),
        request("new", 14 * B),
        world(sim0=24 * B, host=22 * B),
    )
)
@example(  # the same, of another owner
    (
        book(
            lease("a", by=2, sim0=14 * B, piece_bytes=1, shadow_bytes=7, droppable=False),
            lease("b", by=2, host=13 * B, droppable=False),
            owners=(1,),
        ),
        request("new", 14 * B),
        world(sim0=24 * B, host=22 * B),
    )
)
@example(  # a shadow that becomes a share is no room for the other lease that leaves
    (
        book(
            lease("a", sim0=6 * B, shadow_bytes=6, droppable=False),
            lease("b", sim0=6 * B, piece_bytes=1, droppable=False),
        ),
        request("new", 9 * B),
        world(sim0=12 * B, host=9 * B),
    )
)
@example(  # a lease that leaves with its shadow is unloaded from the host at a later decision
    (
        book(
            lease("a", sim0=3 * B, sim1=4 * B, droppable=False),
            lease("b", sim0=1 * B, shadow_bytes=1),
            lease("c", host=1 * B, droppable=False),
        ),
        request("new", 5 * B),
        world(sim0=5 * B, sim1=4 * B, host=8 * B),
    )
)
@example(  # of leases on several cards, the host must take the one that frees most of this card
    (
        book(
            lease("a", sim1=6 * B, piece_bytes=1, droppable=False),
            lease("b", sim0=1 * B, sim1=5 * B, droppable=False),
        ),
        request("new", 20 * B),
        world(sim0=4 * B, sim1=24 * B, host=8 * B),
    )
)
@example(  # the host can take one lease, or pieces of the other; only the pieces are enough
    (
        book(
            lease("a", sim0=1 * B, droppable=False),
            lease("b", sim0=20 * B, piece_bytes=4, droppable=False),
        ),
        request("new", 14 * B),
        world(sim0=24 * B, host=12 * B),
    )
)
@example(  # of the sets that the host can take, the largest is not the one that helps the owner
    (
        book(
            lease("a", by=2, sim0=3 * B, droppable=False),
            lease("b", by=2, sim0=6 * B, droppable=False),
            lease("c", sim0=3 * B, droppable=False),
            lease("d", sim0=1 * B, droppable=False),
            lease("e", sim1=14 * B, droppable=False),
            lease("f", host=14 * B, droppable=False),
        ),
        request("f", 14 * B),
        world(sim0=24 * B, sim1=24 * B, host=22 * B, limit_bytes=30),
    )
)
@example(  # a shadow of a lease that may have to stay, under the owner's limit
    (
        book(
            lease("a", sim0=7 * B, droppable=False),
            lease("b", sim0=7 * B, droppable=False),
            lease("c", sim0=1 * B, droppable=False, shadow_bytes=1),
        ),
        request("new", 5 * B),
        world(sim0=15 * B, host=7 * B, limit_bytes=12),
    )
)
@example(  # the shadow is in host memory already, and does not make the rest fit
    (
        book(
            lease("a", sim0=9 * B, droppable=False, shadow_bytes=1),
            lease("b", host=1 * B, droppable=False),
        ),
        request("new", 5 * B),
        world(sim0=9 * B, host=9 * B),
    )
)
@example(
    (
        book(
            lease("a", by=2, sim0=8 * B, droppable=False),
            lease("b", by=3, sim0=8 * B, droppable=False),
            owners=(1,),
        ),
        request("new", 16 * B),
        world(sim0=16 * B, sim1=4 * B, host=8 * B),
    )
)
@example(
    (
        book(
            lease("a", by=2, sim0=8 * B, droppable=False), lease("b", by=3, host=8 * B), owners=(1,)
        ),
        request("new", 16 * B),
        world(sim0=16 * B, sim1=4 * B, host=8 * B),
    )
)
@example(
    (
        book(lease("a", sim1=4 * B, droppable=False)),
        request("new", 5 * B, layout="auto", rules=NO_CARD_ALONE),
        world(sim0=8 * B, sim1=4 * B, host=4 * B),
    )
)
@example(
    (
        book(lease("a", sim1=4 * B, droppable=False)),
        request(
            "new", 5 * B, layout="auto", pieces=(3, 2), rules=NO_CARD_ALONE | {"overhead": 0.1}
        ),
        world(sim0=8 * B, sim1=6 * B, host=4 * B),
    )
)
@example(
    (
        book(lease("a", sim1=1 * B)),
        request(
            "new",
            2 * B,
            layout="proportional",
            rules={"margin_bytes": 0, "overhead": 0.1, "least_cards": 2},
        ),
        world(sim0=4 * B, sim1=5 * B, host=9 * B, limit_bytes=4),
    )
)
def test_progress_without_models_in_use_a_request_is_granted_or_refused_within_a_few_rounds(
    situation,
):
    """One that a more important lease blocks waits and names this lease."""
    page, wanted, there = situation
    _, answers = follow(page, [wanted], there, rounds=10)
    verdict = answers[wanted.key]
    assert (
        not isinstance(verdict, Wait)
        or "more important" in verdict.because
        or any(m.importance < wanted.lease.importance for m in page.leases())
    ), verdict


@given(
    situations(quiet=True),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12)), min_size=1, max_size=5),
)
def test_progress_every_one_of_several_is_served_in_the_end(situation, others):
    """Requests do not evict each other's models for ever, and no request starves."""
    page, first, there = situation
    page = replace(
        page,
        sections={
            id: replace(s, leases=tuple(replace(m, importance=10) for m in s.leases))
            for id, s in page.sections.items()
        },
    )
    first = replace(first, lease=replace(first.lease, importance=10))
    there = replace(there, rules=replace(there.rules, limit_bytes=None))
    wanted = [
        first,
        *(
            request(f"n{n}", gib * B, by=pid, arrived=NOW + n / 10)
            for n, (pid, gib) in enumerate(others)
        ),
    ]
    _, answers = follow(page, wanted, there, rounds=60)
    assert not [verdict for verdict in answers.values() if isinstance(verdict, Wait)]


@given(situations())
def test_a_plan_changes_nothing_and_predicts_admit(situation):
    page, wanted, there = situation
    told = plan(page, wanted, there, lru)
    _, verdict = decide(situation)
    if isinstance(verdict, Grant):
        assert told.granted and told.steps == verdict.steps
    if isinstance(verdict, Refuse):
        assert not told.granted and told.because == verdict.because
    assert told.because
    for step in told.steps:
        assert isinstance(step, (Load, Move)) or page.find(step.lease).droppable
