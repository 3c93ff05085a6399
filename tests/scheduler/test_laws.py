"""The laws of docs/architecture.md for single decisions on any book; sequences are in test_audited_processes.py."""

import functools
import itertools
import math
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import (
    HOST,
    IMPORTANCE,
    PLACEMENTS,
    Book,
    Drop,
    Event,
    Footprint,
    Ghost,
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
from gpu_runtime.scheduler.capacity import freed_since, level, pressure, room
from gpu_runtime.scheduler.placement import place
from gpu_runtime.scheduler.plan import plan
from gpu_runtime.scheduler.policies import cost_aware, lru
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
        phases = [Phase.SETTLED] * 4 + [Phase.ARRIVING, Phase.LEAVING]
        phase = Phase.SETTLED if quiet else draw(st.sampled_from(phases))
        place, size = draw(st.sampled_from(PLACES)), draw(st.integers(1, 9)) * B
        fields: dict[str, Any] = {place: size, "droppable": draw(st.booleans())}
        # over two cards, or all three
        if place != "host" and draw(st.sampled_from([False, False, True])):
            cards = draw(st.sampled_from([PLACES[:2], PLACES[1:3], PLACES[:3]]))
            fields |= {card: draw(st.integers(1, 5)) * B for card in cards}
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
            target = tuple(Share(card, round(size / B)) for card in to)
            fields |= dict(target=target, pins=1, droppable=bool(fields))
        elif phase is Phase.LEAVING:
            fields |= dict(shadow_bytes=draw(shadows) if place != "host" else 0)
            total = sum(round(fields[card] / B) for card in PLACES[:3] if card in fields)
            if pieces:
                total = draw(st.integers(1, total))
            moves = place != "host" and draw(st.booleans())
            fields |= dict(target=(Share(HOST, total),) if moves else ())
        elif not quiet:
            fields |= dict(
                pins=0 if place == "host" or in_parts else draw(st.sampled_from([0, 0, 0, 1])),
                keep=draw(st.sampled_from([False, False, True])),
                keep_alive=draw(st.sampled_from([0.0, 0.0, 500.0])),
            )
        if phase is Phase.SETTLED and place != "host":
            fields |= dict(shadow_bytes=draw(shadows))
        fields |= dict(
            by=draw(st.integers(1, 3)),
            phase=phase,
            key="" if phase is Phase.SETTLED else f"k{n}",
            importance=draw(st.sampled_from(sorted(IMPORTANCE.values()))),
            wished=draw(st.sampled_from([0, 0, 1, 2])),
            movable=movable,
            last_used=NOW - draw(st.sampled_from([10, 100, 400] if quiet else [1, 10, 100, 400])),
            reload_seconds=draw(st.sampled_from([0.0, 1.0, 30.0])),
        )
        made.append(lease(f"m{n}", **fields))
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
    mine = [one.id for one in page.leases() if one.pins and one.owner == owner(1).id]
    held = [id for id in mine if draw(st.booleans())]
    name = draw(st.sampled_from(["new", *(lease.name for lease in page.leases())]))
    layouts = ["single", "single", "auto", "balanced", "proportional", "whole"]
    layout = draw(st.sampled_from(layouts))
    size = draw(st.integers(1, 16 if layout == "single" else 36))
    threes = (3,) * (size // 3) + (size % 3,) * bool(size % 3)
    pieces = draw(st.sampled_from([(), (), (1,) * size, threes]))
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
        keep_alive=draw(st.sampled_from([0.0, 60.0])),
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
    made, waiting = draw(leases(quiet)), () if quiet else draw(tickets())
    page = book(*made, tickets=waiting, owners=(1, 2, 3), limits=there.limits)
    assume(all(size >= 0 for size in room(page, there).values()))
    return page, draw(requests(page)), there


def wants(name: str, size: int, **fields: Any) -> Request:
    """A request for so many bytes."""
    return request(name, size * B, **fields)


def only(
    name: str, *, pieces: int = 0, shadow: int = 0, drop: bool = False, **fields: Any
) -> Lease:
    """A lease with so many bytes at each place, whose weights exist nowhere else, unless `drop`."""
    fields |= {place: fields[place] * B for place in PLACES if place in fields}
    return lease(name, piece_bytes=pieces, shadow_bytes=shadow, droppable=drop, **fields)


def case(
    wanted: Request, *made: Lease, limit: int | None = None, **places: int
) -> tuple[Book, Request, World]:
    """A situation with these leases, where each place has so many bytes."""
    there = world(**{place: size * B for place, size in places.items()}, limit_bytes=limit)
    return book(*made, owners=(1, 2, 3)), wanted, there


def examples(cases: list[tuple[Book, Request, World]]) -> Any:
    """Tries each of the cases, beside those that Hypothesis draws."""
    return lambda test: functools.reduce(lambda made, each: example(each)(made), cases, test)


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
@given(situations(), st.lists(st.tuples(st.sampled_from((*CARDS, HOST)), st.integers(1, 9))))
def test_1_a_grant_of_free_bytes_is_right_after_others_claim_what_it_leaves_them(situation, claims):
    """A ledger may take it then, although it was decided before. See `Book.holds_below`."""
    page, wanted, there = situation
    after, verdict = decide(situation)
    assume(after.holds_below)
    assert isinstance(verdict, Grant) and not page.tickets
    mine = after.lease(wanted.lease.owner, wanted.lease.name)
    for number, (device, size) in enumerate(claims):
        other = lease(f"other{number}", by=2)
        claimed = page.with_lease(replace(other, shares=(Share(device, size),)))
        both = claimed.with_lease(mine).claims()
        if both.get(device, 0) <= after.holds_below.get(device, 0):
            page = claimed
    if all(size >= 0 for size in room(page, there).values()):
        merged = page.with_lease(mine)
        assert overdrafts(page, merged) == {}
        assert all(size >= 0 for size in room(merged, there).values())


@settings(suppress_health_check=[HealthCheck.filter_too_much])  # most situations refuse or wait
@given(situations(), st.integers(0, 30))
def test_2_facts_are_always_accepted(situation, measured):
    """Even if they overdraw a device, such as a load larger than declared, or memory beyond the leases."""
    page, verdict = decide(situation)
    wanted = situation[1].lease
    assume(isinstance(verdict, Grant) and verdict.steps)
    shares = (Share("sim:0", measured),)
    settled = books.arrived(page, wanted.owner, wanted.name, shares, situation[2])
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
        granted = isinstance(verdict, Grant)
        for share in verdict.lease.target if granted else getattr(step, "shares", ()):
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
        rested = gone.idle_seconds(NOW) >= there.rules.grace_seconds
        assert overdue or gone.owner == wanted.lease.owner or rested
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
    made = []
    for n, size in enumerate(sizes):
        fields = dict(wished=draw(st.integers(0, 2)), last_used=NOW - draw(st.integers(10, 400)))
        made.append(lease(f"m{n}", by=draw(st.integers(1, 2)), sim0=size * B, **fields))
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
        state = (reserved.phase, reserved.key, reserved.pins)
        assert (reserved, state) == (verdict.lease, (Phase.ARRIVING, wanted.key, 1))
        asked = (wanted.lease.importance, wanted.lease.keep_alive, NOW)
        assert (reserved.importance, reserved.keep_alive, reserved.last_used) == asked
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
    copied = [sum(share.bytes for share in target) for target in targets]
    freed = [{share.device: share.bytes for share in victim.freed_by(each)} for each in targets]
    return [(0, {}), *zip(copied, freed, strict=True)]


SPLIT = {"margin_bytes": 0}
# pieces that the host can take are enough, on one card or on several
PIECES = [
    case(wants("new", 5), only("a", by=2, pieces=1, sim0=8), sim0=10, sim1=4, sim2=0, host=3),
    case(
        wants("new", 8, layout="proportional", rules=SPLIT),
        only("a", by=2, pieces=1, sim0=8),
        **{"sim0": 10, "sim1": 3, "sim2": 0, "host": 3},
    ),
]


@given(situations(quiet=True))
@examples(PIECES)
def test_7_no_set_of_victims_could_serve_a_refused_request(situation):
    """Every set of leases and pieces that may be dropped or that the host can take, with every allowed layout."""
    page, wanted, there = situation
    after, verdict = decide(situation)
    wanted_lease = page.lease(wanted.lease.owner, wanted.lease.name)
    footprint = wanted.footprint
    if wanted_lease:
        footprint = replace(footprint, parts=Footprint.of(wanted_lease.bytes).parts)
    rules = wanted.placement
    auto = ("single", "proportional")[rules.least_cards > 1 :]
    layouts = auto if rules.layout == "auto" else (rules.layout,)
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
    assume(all(id in steps or id in verdict.asked for id in candidate.victims))  # all leave now
    gone = []
    for id in candidate.victims:
        victim, step = page.find(id), steps.get(id)
        part = verdict.recalls.get(id, 0)
        target = (Share(HOST, part),) if part else ()
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
            name = step.lease.partition("/")[2]
            after = books.abandon(after, wanted.lease.owner, name, wanted.key, there)
        after = after.without_ticket(wanted.key)

    def without_traces(leases_: Any) -> list[Lease]:
        """Leases without traces of a request: an abandoned restore keeps its importance and times for a while."""
        traces = dict(last_used=0, pinned_since=0, importance=0, keep_alive=0, key="")
        return sorted((replace(m, **traces) for m in leases_), key=lambda m: m.id)

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
    there = situation[2]
    for me in (owner(pid).id for pid in (1, 2, 3)):
        obeyed, *_ = replayed(lambda b, me=me: obey(b, me, there, "obey"), after)
        refuse_unlawful(after, obeyed, me, lambda _: frozenset())
        relieved, _ = replayed(lambda b, me=me: relieve(b, me, there, lru, "relieve"), obeyed)
        refuse_unlawful(obeyed, relieved, me, lambda _: frozenset())


states = st.sampled_from(["seen", "unseen", "arriving", "leaving"])
holdings = st.lists(st.tuples(st.integers(1, 5), states), max_size=4)


@given(st.integers(1, 20), st.integers(0, 20), holdings)
def test_11_room_is_the_smaller_of_claims_and_measurement_less_unseen_bytes(limit, free, held):
    there = world(cuda0=limit * B, free={"cuda:0": free * B}, taken_at=NOW - 1)
    made = []
    for n, (size, kind) in enumerate(held):
        fields = {
            "seen": dict(cuda0=size * B, settled_at=NOW - 2),
            "unseen": dict(cuda0=size * B, settled_at=NOW - 1),
            "arriving": dict(phase=Phase.ARRIVING, target=(Share("cuda:0", size),)),
            "leaving": dict(cuda0=size * B, settled_at=NOW - 0.5, phase=Phase.LEAVING),
        }[kind]
        made.append(lease(f"m{n}", **fields))
    claims = sum(size for size, _ in held)
    unseen = sum(size for size, kind in held if kind != "seen")
    assert room(book(*made), there)["cuda:0"] == min(limit - claims, free - unseen)
    wide = replace(there, limits={**there.limits, "cuda:0": 10**9})
    assert room(book(*made), wide)["cuda:0"] == free - unseen


IN_RAM = ["there", "offloaded", "copied", "copied late", "copying", "shared", "leaves", "in part"]


@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5), st.sampled_from(IN_RAM)), max_size=4),
)
@example(40, [(5, 3, kind) for kind in IN_RAM])
def test_11_host_memory_is_as_free_as_measured_less_what_the_sample_lacks(free, held):
    """A copy is counted with its lease. While it arrives no sample has it; an offload takes it along."""
    there = world(sim0=99 * B, host=50 * B, free={"host": free * B}, taken_at=NOW - 1)
    made, claims, unseen = [], 0, 0
    for n, (size, most, kind) in enumerate(held):
        copy = min(most, size)
        seen, late = {"settled_at": NOW - 2}, {"settled_at": NOW - 1}
        copied = {"sim0": size * B, "shadow_bytes": copy}
        arriving = {"phase": Phase.ARRIVING, "target": (Share("sim:0", size),)}
        leaving = {"phase": Phase.LEAVING, "target": (Share(HOST, size),), **seen}
        pages = {"copy": f"p{n}", "copy_bytes": copy, "copied_bytes": copy}
        rest = {"sim0": (size + 1) * B, "shadow_bytes": copy, "piece_bytes": 1}
        fields, claimed, lacks = {
            "there": ({"host": size * B, **seen}, size, 0),
            "offloaded": ({"host": size * B, **late}, size, size),
            "copied": ({**copied, **seen}, copy, 0),
            "copied late": ({**copied, **late}, copy, copy),
            "copying": ({"shadow_bytes": copy, **arriving}, copy, copy),
            "shared": ({"shadow_bytes": size, **arriving, **pages}, size, size - copy),
            "leaves": ({**copied, **leaving}, size, size - copy),
            "in part": ({**rest, **leaving}, size + copy, size),  # the copy may lack this part
        }[kind]
        made.append(lease(f"m{n}", **fields))
        claims, unseen = claims + claimed, unseen + lacks
    assert room(book(*made), there)[HOST] == min(50 - claims, free - unseen)
    wide = replace(there, limits={**there.limits, HOST: 10**9})
    assert room(book(*made), wide)[HOST] == free - unseen


HAPPENED = ["offloaded", "unloaded", "moved", "lost", "loaded", "granted", "refused"]


@given(
    st.lists(
        st.tuples(st.sampled_from(HAPPENED), st.integers(-1, 1), st.integers(1, 9), st.booleans()),
        max_size=6,
    ),
    st.lists(st.integers(1, 9), max_size=2),
)
def test_11_what_left_a_card_since_its_sample_will_be_free(happened, dead):
    """Bytes of this card alone, of events at or after the sample, and of dead processes."""
    there = world(cuda0=20, free={"cuda:0": 0}, taken_at=NOW - 1)
    events, expected = [], sum(dead)
    for n, (action, later, size, on_two) in enumerate(happened):
        shares = (Share("cuda:0", size), Share("cuda:1", 7)) if on_two else ()
        fields = {"bytes": size, "device": "cuda:0", "shares": shares}
        events.append(Event(n, there.wall - 1 + later, "m", action, "", "", **fields))
        expected += size if action in HAPPENED[:4] and later >= 0 else 0
    gone = tuple(Ghost("2.1.0", 2, "cuda:0", size, 0.0, NOW) for size in dead)
    page = replace(book(), events=tuple(events), ghosts=gone)
    assert freed_since(page, there)["cuda:0"] == expected


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
    going = Counter(dict.fromkeys(CARDS, 0))
    for one in (one for one in page.leases() if one.phase is Phase.LEAVING):
        going.update({share.device: share.bytes for share in one.freed_by(one.target)})
    for step in steps:
        cards = {share.device: share.bytes for share in step.source if share.device != HOST}
        claims = {card: page.claims()[card] - going[card] for card in cards}
        full = [pressure(claims[card], there.limits[card], None, 1) for card in cards]
        # on one of its cards
        assert any(level(pressure_, there.rules) != "LOW" for pressure_ in full)
        going.update(cards)


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
                mine = each.lease.owner
                if verdict.steps:
                    shares = verdict.lease.after(verdict.steps[0].shares)
                    page = books.arrived(page, mine, name, shares, there, droppable=True)
                using.append(replace(page.lease(mine, name), pins=1, last_used=there.now))
                page = page.with_lease(using[-1])
            for step in verdict.steps if isinstance(verdict, Wait) else ():
                page = books.after_step(page, step, there)
        there = replace(there, now=there.now + 1.0, wall=there.wall + 1.0)
        for id in page.sections:
            page, steps, _ = obey(page, id, there, f"obey {id}")
            for step in steps:
                page = books.after_step(page, step, there)
    return page, answers


TRIPLE = {"factor": 3.0}
# The rule claims a whole card, but the limit for each card is lower than that.
NO_CARD_ALONE = {"factor": 3.0, "margin_bytes": 0, "card_bytes": {"sim:0": 7, "sim:1": 4}}


HARD = [
    # in parts, on a card that is too small for the whole; the owner's limit counts its bytes
    case(wants("a", 7), only("a", sim0=6, host=1, pieces=1), sim0=6, sim1=7, host=1, limit=12),
    # the same with more host memory: its bytes leave the card, and return to the other card
    case(wants("a", 7), only("a", sim0=6, host=1, pieces=1), sim0=6, sim1=7, host=9, limit=12),
    # in parts, and only several cards together can hold it
    case(
        wants("a", 5, layout="auto", rules=SPLIT),
        only("a", sim0=4, host=1, pieces=1),
        **{"sim0": 4, "sim1": 4, "host": 1},
    ),
    # in parts, and its rule claims more of the card than its own bytes
    case(wants("a", 5, rules=TRIPLE), only("a", sim0=4, host=1, pieces=1), sim0=9, host=1),
    # its own bytes in host memory leave no room there for the lease in the way
    case(wants("b", 7), only("a", sim0=3), only("b", sim0=4, host=3, pieces=1), sim0=7, host=5),
    # the same, all of it in host memory; its source has the bytes too
    case(wants("b", 8), only("a", sim0=8), only("b", drop=True, host=8), sim0=8, host=8),
    # a part leaves, which the shadow of some bytes may lack: the host needs the shadow's place
    case(
        wants("new", 14),
        only("a", sim0=14, pieces=1, shadow=7),
        only("b", host=13),
        **{"sim0": 24, "host": 22},
    ),
    # the same, of another owner
    case(
        wants("new", 14),
        only("a", by=2, sim0=14, pieces=1, shadow=7),
        only("b", by=2, host=13),
        **{"sim0": 24, "host": 22},
    ),
    # a shadow that becomes a share is no room for the other lease that leaves
    case(
        wants("new", 9),
        only("a", sim0=6, shadow=6),
        only("b", sim0=6, pieces=1),
        **{"sim0": 12, "host": 9},
    ),
    # a lease that leaves with its shadow is unloaded from the host at a later decision
    case(
        wants("new", 5),
        only("a", sim0=3, sim1=4),
        only("b", drop=True, sim0=1, shadow=1),
        only("c", host=1),
        **{"sim0": 5, "sim1": 4, "host": 8},
    ),
    # of leases on several cards, the host must take the one that frees most of this card
    case(
        wants("new", 20),
        only("a", sim1=6, pieces=1),
        only("b", sim0=1, sim1=5),
        **{"sim0": 4, "sim1": 24, "host": 8},
    ),
    # the host can take one lease, or pieces of the other; only the pieces are enough
    case(wants("new", 14), only("a", sim0=1), only("b", sim0=20, pieces=4), sim0=24, host=12),
    # of the sets that the host can take, the largest is not the one that helps the owner
    case(
        wants("f", 14),
        only("a", by=2, sim0=3),
        only("b", by=2, sim0=6),
        only("c", sim0=3),
        only("d", sim0=1),
        only("e", sim1=14),
        only("f", host=14),
        **{"sim0": 24, "sim1": 24, "host": 22, "limit": 30},
    ),
    # a shadow of a lease that may have to stay, under the owner's limit
    case(
        wants("new", 5),
        only("a", sim0=7),
        only("b", sim0=7),
        only("c", sim0=1, shadow=1),
        **{"sim0": 15, "host": 7, "limit": 12},
    ),
    # the shadow is in host memory already, and does not make the rest fit
    case(wants("new", 5), only("a", sim0=9, shadow=1), only("b", host=1), sim0=9, host=9),
    case(
        wants("new", 16),
        only("a", by=2, sim0=8),
        only("b", by=3, sim0=8),
        **{"sim0": 16, "sim1": 4, "host": 8},
    ),
    case(
        wants("new", 16),
        only("a", by=2, sim0=8),
        only("b", by=3, drop=True, host=8),
        **{"sim0": 16, "sim1": 4, "host": 8},
    ),
    case(
        wants("new", 5, layout="auto", rules=NO_CARD_ALONE),
        only("a", sim1=4),
        **{"sim0": 8, "sim1": 4, "host": 4},
    ),
    case(
        wants("new", 5, layout="auto", pieces=(3, 2), rules=NO_CARD_ALONE | {"overhead": 0.1}),
        only("a", sim1=4),
        **{"sim0": 8, "sim1": 6, "host": 4},
    ),
    case(
        wants("new", 2, layout="proportional", rules=SPLIT | {"overhead": 0.1, "least_cards": 2}),
        only("a", drop=True, sim1=1),
        **{"sim0": 4, "sim1": 5, "host": 9, "limit": 4},
    ),
]


@given(situations(quiet=True))
@examples(HARD)
def test_progress_without_models_in_use_a_request_is_granted_or_refused_within_a_few_rounds(
    situation,
):
    """One that a more important lease blocks waits and names this lease."""
    page, wanted, there = situation
    _, answers = follow(page, [wanted], there, rounds=10)
    verdict = answers[wanted.key]
    if isinstance(verdict, Wait) and "more important" not in verdict.because:
        assert any(m.importance < wanted.lease.importance for m in page.leases()), verdict


several = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12)), min_size=1, max_size=5)


@given(situations(quiet=True), several)
def test_progress_every_one_of_several_is_served_in_the_end(situation, others):
    """Requests do not evict each other's models for ever, and no request starves."""
    page, first, there = situation
    for one in list(page.leases()):
        page = page.with_lease(replace(one, importance=10))
    first = replace(first, lease=replace(first.lease, importance=10))
    there = replace(there, rules=replace(there.rules, limit_bytes=None))
    wanted = [
        wants(f"n{n}", size, by=pid, arrived=NOW + n / 10) for n, (pid, size) in enumerate(others)
    ]
    _, answers = follow(page, [first, *wanted], there, rounds=60)
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
