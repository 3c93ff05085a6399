"""Makes room for a request: chooses the cards and the leases to evict, and makes the verdict.

Pure. Of all ways to make room, the one with the least cost is chosen. A lease may have bytes on
several of the cards, and free bytes on one card may replace missing bytes on another card.
`victims` decides which leases may be evicted, and searches them in order.

The verdict has the requester's own steps, the recalls of other owners' leases, and sentences. A
recall is a request to another owner to evict its lease. Bytes are free only after the evicted lease
has left. So a request that makes room waits, and its ticket keeps its place in the queue.

Leases that leave a card may need room in host memory. A shadow is an unchanged copy in host memory
of a model on a card. The warm pool is the models in host memory that may be unloaded for a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, islice
from typing import NamedTuple

from msgspec.structs import replace

from ..facts import (
    ASLEEP,
    HOST,
    KERNEL,
    Book,
    Candidate,
    Drop,
    Lease,
    Leaver,
    Move,
    PlacementRules,
    Policy,
    Share,
    Shares,
    Step,
    Wait,
    World,
    away_word,
    is_engine,
    one_memory,
    where,
)
from ..units import show_bytes, show_seconds
from .capacity import limits_of
from .caps import drained, owners_of
from .feasibility import host_bytes_to_be_had, why_no_return
from .placement import claimed, divide, least_room, may_split, parts_on, sets_that_fit
from .policies import cost_of_leaving, gigabytes, with_uses_of_equal_models, would_go_to_host
from .queue import Context
from .victims import (
    PartsRoom,
    Room,
    can_move,
    enough_shadows,
    eviction_order,
    eviction_step,
    first_enough,
    held_shadows,
    host_room_for,
    keeps_shadow,
    largest_fitting_set,
    leaves_in_words,
    mark_leaving,
    parts_within,
    precious_bytes,
    reason_to_stay,
    sets_that_fit_in,
    shadow_order,
    shadows_total,
    shed_step,
    victims,
    warm,
    worth,
    worth_less,
)

# -- room in host memory for leases that leave a card ----------------------------------------------


def _warm(context: Context, wanted: str) -> list[Lease]:
    lease, book, world = context.request.lease, context.book, context.world
    return warm(
        book, world, asker=lease.owner, importance=lease.importance, wanted=wanted, also=lease.id
    )


def leaving_the_host(
    context: Context,
    rank: Policy,
    leaving: tuple[Lease, ...],
    shadowed: list[Lease],
    host_room: int,
    wanted: str,
) -> tuple[tuple[Lease, ...], tuple[Lease, ...]] | None:
    """The leases that make room in host memory for the leases `leaving` a card.

    Returns two tuples: leases whose shadows are freed, chosen from `shadowed`, and leases that are
    unloaded from host memory. Returns None if they cannot make the room. Host memory has
    `host_room` free bytes. The lease with the id `wanted` stays there.
    """
    shortage = precious_bytes(leaving) - host_room
    if shortage <= 0:
        return (), ()
    kept = {lease.id for lease in leaving if lease.shadow_bytes and keeps_shadow(lease)}
    able = [lease for lease in shadowed if lease.id not in kept]
    freed = enough_shadows(able, shortage, context.world, rank)
    shortage -= shadows_total(freed)

    def unload(shortage: int) -> tuple[Lease, ...] | None:
        """The leases to unload for `shortage` bytes of host memory; None if they are too few."""
        return victims({HOST: shortage}, _warm(context, wanted), context.world, rank)

    unloaded = unload(shortage)
    if unloaded is None:
        # A later decision may unload a lease in `leaving` whose shadow becomes its share.
        later = shadows_total([lease for lease in leaving if lease.droppable])
        if not later or unload(shortage - later) is None:
            return None
    return tuple(freed), unloaded or ()


# -- room on one card, or on several cards at once -------------------------------------------------


FEW_CARDS = 4  # up to this many, every set of cards is tried
MOST_POOLS = 100  # sets of leases that exist nowhere else, and of their parts, that are tried

Bytes = Mapping[str, int]  # by device id


def multi_card_ways(
    context: Context, idle: Sequence[Lease], host: PartsRoom, limits: Bytes
) -> Iterator[tuple[Candidate, tuple[Lease, ...]]]:
    """Yields the ways to place the request on several cards: a candidate, and the leases to evict.

    Each way is for another set of cards on which evictions can make enough room. The candidate has
    the bytes for each card. `idle` are the leases that may leave, in the order of
    `victims.eviction_order`. `context` holds the free bytes, and `limits` the budgets of the cards
    that may be used. `host` is the host memory for weights that exist nowhere else, and for parts.
    """
    footprint, rules = context.request.footprint, context.request.placement
    for cards in _sets(context, idle, limits):
        need = least_room(footprint, len(cards), rules)
        own_need = claimed(footprint, cards, rules, limits)
        room = _room(cards, context, need, own_need)
        room.holds = lambda usable: parts_on(footprint, usable, rules, limits) is not None
        chosen = _victims(idle, room, host, rules)
        if chosen is None:
            continue
        candidate = divide(footprint, room.usable(), rules, limits)
        if candidate is not None:
            yield candidate, chosen


def _room(cards: Iterable[str], context: Context, need: int = 0, own_need: int = 0) -> Room:
    """The bytes that the request may use on the `cards`, once all decided steps are done.

    It needs `need` of them, and claims `own_need` of its owner's own limit.
    """
    room = Room({card: context.room_later[card] for card in cards}, need=need)
    if context.cap_left_later:
        room.cap_left = {card: context.cap_left_later[card] for card in room.free}
        room.cap_owners = owners_of(context.book, context.world.rules.cap)
    if context.own_left_later is not None:
        room.owner, room.own_need = context.request.lease.owner, own_need
        room.own_left = context.own_left_later
    return room


def _victims(
    idle: Sequence[Lease], room: Room, host: PartsRoom, rules: PlacementRules
) -> tuple[Lease, ...] | None:
    """The leases in `idle` to evict; None if all of `idle` together cannot make the room.

    Weights that exist nowhere else leave only if they fit into the `host` memory, or in part as far
    as they fit. After the call, the returned leases have left the `room`.
    """
    search = _fewest if rules.policy == "fewest-evictions" else first_enough
    chosen = search(idle, room, host)
    if chosen is None or precious_bytes(chosen) <= host.most:
        return chosen
    room.all_go(chosen, -1)
    useful = list(filter(room.gains, idle))
    for pool in islice(_that_the_host_can_take(useful, host), MOST_POOLS):
        chosen = search(pool, room, host)
        if chosen is not None:
            return chosen
        room.all_go(pool, -1)
    return None


def _fewest(pool: Sequence[Lease], room: Room, host: PartsRoom) -> tuple[Lease, ...] | None:
    """As `first_enough`, but the leases of the `pool` that free most are taken first.

    Then each lease is exchanged for the smallest one that is enough in its place. No important lease
    leaves if less important leases are enough.
    """
    largest_first = sorted(pool, key=lambda lease: (-lease.importance, -room.gain(lease)))
    found = first_enough(largest_first, room)
    if not found:
        return found
    chosen = {lease.id: lease for lease in found}
    for lease in reversed(found):
        room.let_go(chosen.pop(lease.id), times=-1)
        for other in sorted(pool, key=room.gain):
            if other.id in chosen or other.importance < lease.importance:
                continue
            room.let_go(other)
            if room.enough():
                chosen[other.id] = other
                break
            room.let_go(other, times=-1)
    room.all_go(chosen.values(), -1)
    return first_enough([lease for lease in pool if lease.id in chosen], room, host)


def _that_the_host_can_take(pool: Sequence[Lease], host: PartsRoom) -> Iterator[list[Lease]]:
    """Yields the `pool` without leases that can neither be dropped nor fit into the `host` memory.

    Each result has other leases that fit: the largest set of them, then none, which leaves most room
    for parts, then the other sets. Further results have parts of the leases that do not fit, if they
    may be cut.
    """
    precious = [lease for lease in pool if not lease.droppable]
    others = sets_that_fit_in(precious, host.most) or ()
    for saved in (largest_fitting_set(precious, host.most), (), *others):
        staying = [lease for lease in precious if lease not in saved]
        yield [lease for lease in pool if lease not in staying]
        left = host.most - precious_bytes(saved)
        for parts in parts_within(staying, left) if host.may_cut else ():
            cut = {part.id: part for part in parts}
            fitting = [lease for lease in pool if lease not in staying or lease.id in cut]
            yield [cut.get(lease.id, lease) for lease in fitting]


def _sets(context: Context, idle: Sequence[Lease], limits: Bytes) -> list[tuple[str, ...]]:
    """Sets of cards on which room may be made.

    With up to FEW_CARDS cards, all sets are returned whose number of cards might hold the model.
    With more cards, two sets are returned for each such number. One is the first set that could
    hold the model if all idle leases left. The other has the cards with the most free bytes now.
    """
    footprint, rules = context.request.footprint, context.request.placement
    cards = []
    for card in limits:
        if card not in context.blind and (not rules.devices or card in rules.devices):
            cards.append(card)
    whole = _room(cards, context)
    now = dict(whole.usable())
    whole.all_go(idle)
    possible = list(sets_that_fit(footprint, whole.usable(), rules, limits))
    sets: list[tuple[str, ...]] = []
    if len(cards) <= FEW_CARDS:
        for count in sorted(set(map(len, possible))):
            sets += combinations(cards, count)
        return sets
    most_first = sorted(cards, key=lambda card: -now[card])
    for parts in possible:
        first = tuple(parts)
        largest = most_first[: len(first)]
        with_most = tuple(card for card in cards if card in largest)
        sets += dict.fromkeys([first, with_most])
    return sets


# -- the cheapest way ------------------------------------------------------------------------------


MOST_OTHERS = 8  # ways that are reported besides the chosen way; a dry run reports all ways


class Way(NamedTuple):
    """A way to make room: leases that leave the card, and leases that first leave host memory.

    If only some pieces of a lease leave the card, the lease's `target` has the bytes of the pieces.
    The ways in `others` are only reported, so they have no `warm`, `shadows` and `others`.
    """

    cost: tuple[float, ...]  # its last number is the way's position in the search: no two are equal
    candidate: Candidate
    leaving: tuple[Lease, ...]
    warm: tuple[Lease, ...] = ()  # leases that are unloaded from host memory for those that leave
    shadows: tuple[Lease, ...] = ()  # leases whose shadows are freed for those that leave
    others: tuple[Way, ...] = ()  # ways that were not chosen, the cheapest first


def cheapest_way(context: Context, rank: Policy, candidates: tuple[Candidate, ...]) -> Way | None:
    """The way that makes room for the request at the least cost; None if no way makes the room.

    `candidates` are cards that may hold the request alone; sets of cards are tried too if the model
    may be divided. `context` has the inputs of this decision, and `rank` is the eviction policy.
    Leases of owners that do not answer are recalled only if all other leases together cannot make
    the room.
    """
    rank = with_uses_of_equal_models(rank, context.leases)
    find = partial(_cheapest, context, rank, candidates)
    way = find(context.silent) if context.silent else None
    way = way or find()
    if way is None and any([one.shadow_bytes and not one.droppable for one in context.leases]):
        way = find(own_shadows="kept") or find(own_shadows="freed")
    if way is None and any([lease.disk_room for lease in context.leases]):
        way = find(to_disk=True)
    if way is None and any([lease.residue and lease.on_device for lease in context.leases]):
        way = find(ends=True)
    old = context.old
    if way is None and old and old.droppable and old.bytes_on(HOST):  # it may be loaded again
        way = find(wanted="")
        most = host_bytes_to_be_had(context.book, context.world, old.id)
        if way and precious_bytes(way.leaving) + old.ram_bytes <= most:
            return None  # the host gets room once other leases may be unloaded
    return way


def _cheapest(
    context: Context,
    rank: Policy,
    candidates: tuple[Candidate, ...],
    spared: frozenset[str] = frozenset(),
    wanted: str | None = None,
    own_shadows: str = "",
    to_disk: bool = False,
    ends: bool = False,
) -> Way | None:
    """The cheapest way that evicts none of the leases whose ids are `spared`.

    The lease with the id `wanted` stays in host memory; None is the requested lease. Weights that
    exist nowhere else may have a shadow of some of their bytes. With `own_shadows`, all these
    shadows are `kept` for their leases, or all are `freed`. With `to_disk`, bytes in host memory may
    move to a disk, but not those of the requested lease. With `ends`, engines that are awake end: their
    sleep would free less.
    """
    book, request, world = context.book, context.request, context.world
    if wanted is None:
        wanted = request.lease.id
    idle = _idle(context, rank, spared, ends)
    host_now = context.room_now.get(HOST, 0)
    host_later = host_now
    shadowed: list[Lease] = []
    if not all([lease.droppable for lease in idle]):
        precious = {lease.id for lease in idle if not lease.droppable}
        kept = precious if own_shadows == "kept" else set()
        out = context.silent_shadows | kept | {request.lease.id}
        shadowed = held_shadows(book, spared=out, to_disk=to_disk)
        host_later += shadows_total(shadowed)
        host_later += sum([lease.bytes_on(HOST) for lease in _warm(context, wanted)])
        if own_shadows == "freed":
            idle = [lease if lease.droppable else replace(lease, shadow_bytes=0) for lease in idle]
    in_pieces = world.rules.offload and any([lease.piece_bytes for lease in idle])
    host = PartsRoom(host_now, host_later, in_pieces and not one_memory(world.devices))
    found: list[Way] = []
    for candidate, leaving in _ways(context, candidates, idle, host):
        found.append(_priced(candidate, leaving, len(found), context, rank))
    found.sort()
    for best in found:
        room = leaving_the_host(context, rank, best.leaving, shadowed, host_now, wanted)
        if room is not None:
            others = [way for way in found if way is not best]
            most = MOST_OTHERS if request.wait else len(others)  # a dry run shows all ways
            freed, unloaded = room
            return best._replace(warm=unloaded, shadows=freed, others=tuple(others[:most]))
    return None


def _idle(
    context: Context, rank: Policy, spared: frozenset[str], ends: bool = False
) -> list[Lease]:
    """The leases on cards that may leave, in the order in which they are taken. Those in `spared` stay.

    With `ends`, an engine that has slept before ends, and what it would keep asleep leaves with it.
    """
    book, world = context.book, context.world
    able = _evictable(context, spared)
    able = [lease for lease in able if lease.droppable or not why_no_return(book, lease, world)]
    if ends:
        able = [
            _ended(lease, lease.freed_by(())) if lease.residue and lease.droppable else lease
            for lease in able
        ]
    return eviction_order(able, world, rank)


def _evictable(context: Context, spared: frozenset[str]) -> list[Lease]:
    """Leases that may leave now and that no request ahead in the queue has recalled.

    A lease in parts (partly on a card, partly in host memory) stays if this request or one ahead
    waits for the lease's return. The loop is plain because it runs often.
    """
    request, world, returning = context.request, context.world, context.returning
    asker, importance = request.lease.owner, request.lease.importance
    stays = {*spared, *context.recalled, *([request.lease.id] if context.held else ())}
    own_code = request.lease.kind == "block"
    found = []
    for lease in context.leases:
        if own_code and lease.kind == KERNEL and lease.owner == asker:
            continue  # the block runs in this kernel, and needs what the kernel holds
        if reason_to_stay(lease, world, asker=asker, importance=importance):
            continue
        if lease.residue and lease.on_host and lease.droppable and lease.id != request.lease.id:
            lease = _residue_of(lease, world)
        if not lease.on_device:
            continue
        if not lease.droppable and not can_move(lease, world):
            continue
        if (stays and lease.id in stays) or (lease.owner, lease.name) in returning:
            continue
        found.append(lease)
    return found


def _residue_of(lease: Lease, world: World) -> Lease:
    """What the sleeping engine of `lease` keeps on cards, as a lease that is only dropped.

    The end of the engine frees it, and its next use is a load in place of a wake.
    """
    lost = cost_of_leaving(lease, world)
    return replace(_ended(lease, lease.residue), reload_seconds=lost)


def _ended(lease: Lease, frees: Shares) -> Lease:
    """The `lease` of an engine, as one that is only dropped: its end frees the bytes `frees`."""
    return replace(lease, shares=frees, filled=(), movable=False, restore_seconds=0.0)


def _priced(
    candidate: Candidate, leaving: tuple[Lease, ...], order: int, context: Context, rank: Policy
) -> Way:
    """The way to make room for `candidate` by evicting the leases `leaving`, with its cost.

    Costs are compared in this order:
    1. the highest importance of an evicted lease
    2. how much a fleet wishes the evicted lease that is worth most
    3. the rank of that lease, by the eviction policy
    4. the seconds of loading the leases again
    5. the number of cards
    6. the number of leases; with the placement policy `fewest-evictions`, this is compared before 3
    7. `order`, the position of the way in the search

    (When the seconds were compared before the rank, small models in use all day left again and
    again: on a simulated week over 8 cards without host memory, the loads took 2.2 to 3.1 times as
    long. See tests/bench/bench_week.py.)
    """
    # The leases are in the order of their worth, so the last lease is worth most.
    most_precious = worth(leaving[-1], context.world, rank) if leaving else (-(10**9), 0, 0.0)
    most_important, most_wished, highest_rank = most_precious
    seconds = sum([_seconds_to_return(lease) for lease in leaving])
    # Measurements of the same load may differ by almost 0.1 s, so smaller differences do not count.
    rounded_seconds = round(seconds, 1)
    cards, leases = len(candidate.shares), len(leaving)
    is_fewest = context.request.placement.policy == "fewest-evictions"
    ranked = (leases, highest_rank) if is_fewest else (highest_rank,)
    cost = (most_important, most_wished, *ranked, rounded_seconds, cards, leases, order)
    priced = replace(
        candidate,
        victims=tuple([lease.id for lease in leaving]),
        cost_seconds=seconds,
        worth=highest_rank,
    )
    return Way(cost, priced, leaving)


def _seconds_to_return(lease: Lease) -> float:
    """Seconds that the return of this lease to its card takes after an eviction.

    If the lease has a target, only the bytes in the target leave and return.
    """
    seconds = lease.restore_seconds or lease.reload_seconds
    return seconds * lease.leaving_bytes / lease.bytes if lease.target else seconds


# -- the candidates, for people --------------------------------------------------------------------


def leavers(context: Context, rank: Policy) -> tuple[Leaver, ...]:
    """What may leave for the request: the candidates of `cheapest_way`, in the order of its search.

    First those that give back host memory: copies, models, then those that move to a disk. They
    are left out if host memory has room for all that may leave the cards. The leases on cards follow;
    those of owners that do not answer are last.
    """
    rank = with_uses_of_equal_models(rank, context.leases)
    book, request, world = context.book, context.request, context.world
    cards = request.placement.devices or tuple(_limits_of_open_cards(book, world))
    idle = [lease for lease in _idle(context, rank, frozenset()) if any(map(lease.bytes_on, cards))]
    idle.sort(key=lambda lease: lease.id in context.silent)
    found: list[Leaver] = []
    moving = [lease.offload_bytes for lease in idle if can_move(lease, world)]
    if sum(moving) > context.room_now.get(HOST, 0):
        spared = context.silent_shadows | {request.lease.id}
        held = shadow_order(held_shadows(book, spared=spared, to_disk=True), world, rank)
        copies = [lease for lease in held if lease.shadow_bytes]
        found += [_leaver(one, world, (Share(HOST, one.shadow_bytes),), "copy") for one in copies]
        loaded = eviction_order(_warm(context, request.lease.id), world, rank)
        found += [_leaver(lease, world, lease.shares) for lease in loaded if lease.on_host]
        stowed = [lease for lease in held if not lease.shadow_bytes]
        found += [_to_disk(lease) for lease in stowed]
    return (*found, *[_leaver(lease, world, lease.shares) for lease in idle])


def _to_disk(lease: Lease) -> Leaver:
    """The `lease` in host memory as one that moves to a disk, from which its next use reads it."""
    frees, seconds = (Share(HOST, lease.stow_bytes),), lease.seconds_from_disk
    per_gb = seconds / gigabytes(lease)
    return Leaver(lease.id, "to disk", frees, seconds, bool(lease.disk_seconds), per_gb)


def _leaver(lease: Lease, world: World, frees: Shares, what: str = "") -> Leaver:
    if what:  # what is on the card is not changed
        return Leaver(lease.id, what, frees, 0.0, True, 0.0)
    returns = would_go_to_host(lease, world)
    kind = "engine" if is_engine(lease) else "model"
    if lease.kind == KERNEL:
        kind = "notebook"
    seconds = cost_of_leaving(lease, world)
    if lease.residue and lease.residue == lease.shares:
        kind = ASLEEP
    return Leaver(
        lease.id,
        away_word(lease) or kind,
        frees,
        seconds,
        bool(lease.restore_seconds if returns else lease.reload_seconds),
        seconds / gigabytes(lease),
    )


# -- which leases leave ----------------------------------------------------------------------------


def _ways(
    context: Context,
    candidates: tuple[Candidate, ...],
    idle: list[Lease],
    host: PartsRoom,
) -> Iterator[tuple[Candidate, tuple[Lease, ...]]]:
    """Every card or set of cards on which room can be made, each with the leases to evict."""
    rules = context.request.placement
    idle_on = _by_device(idle) if candidates else {}
    for candidate in candidates:
        [share] = context.missing(candidate.shares)
        pool = idle_on.get(share.device, [])
        if context.own_left_later is not None:
            pool = idle  # what leaves other cards counts too
        room = _room([share.device], context, share.bytes, share.bytes)
        if room.cap_left:
            room.holds = partial(_fits, share)
        leaving = _victims(pool, room, host, rules)
        if leaving is not None:
            yield candidate, leaving
    if may_split(rules):
        limits = _limits_of_open_cards(context.book, context.world)
        yield from multi_card_ways(context, idle, host, limits)


def _fits(share: Share, usable: Bytes) -> bool:
    return usable[share.device] >= share.bytes


def _by_device(leases: Iterable[Lease]) -> dict[str, list[Lease]]:
    found: dict[str, list[Lease]] = {}
    for lease in leases:
        for share in lease.shares:
            found.setdefault(share.device, []).append(lease)
    return found


def _limits_of_open_cards(book: Book, world: World) -> dict[str, int]:
    """The budgets of the cards that are not drained."""
    out = drained(book, world).keys() | {HOST}
    return {id: limit for id, limit in limits_of(book, world).items() if id not in out}


# -- the verdict -----------------------------------------------------------------------------------


LOOK_AGAIN_SECONDS = 0.1  # until the next try, if a driver is about to free a dead process's memory
MEASURE_AGAIN_SECONDS = 1.0  # until the next try, if only a new sample shows the freed bytes


def make_room(context: Context, rank: Policy, way: Way) -> tuple[Book, Wait]:
    """The book with the requester's own victims marked as leaving, and a Wait with steps and recalls.

    `way` is the result of `cheapest_way`, which was called with the same `context` and `rank`.
    Other owners see the recall on the ticket of the request.
    """
    book, request = context.book, context.request
    cards = [share.device for share in way.candidate.shares]
    free = sum([max(0, context.room_now[card]) for card in cards])
    at, has = where(way.candidate.shares), "has" if len(cards) == 1 else "have"
    size = show_bytes(request.footprint.bytes)
    name = book.title(request.lease)
    head = f"{name} needs {size}; {at} {has} {show_bytes(free)} free."
    if not way.leaving:
        return book, _wait_for_what_left(context, cards, head)
    eviction = _Eviction(context, rank, at, way)
    for lease in way.shadows:
        eviction.free_shadow(lease)
    for lease in way.warm:
        eviction.unload_from_warm_pool(lease)
    # Leases that need host memory leave first, then leases of which only a part leaves.
    for lease in sorted(way.leaving, key=lambda lease: (lease.droppable, not lease.target)):
        if eviction.frees_more:
            break  # the next decision knows what is still missing
        if lease.id not in eviction.unloaded:
            eviction.evict(lease)
    return eviction.book, Wait(
        " ".join([head, *eviction.sentences]),
        tuple(eviction.steps),
        eviction.recalled,
        considered=(way.candidate, *[other.candidate for other in way.others]),
        silent=tuple(id for id in eviction.recalled if id in context.silent),
        shadows=tuple(eviction.recalled_shadows),
    )


def _wait_for_what_left(context: Context, cards: list[str], head: str) -> Wait:
    """The Wait of a request whose missing bytes become free without a further eviction.

    The bytes become free for one of three reasons. Leases are leaving, or the driver has not yet
    freed the memory of a dead process, or the bytes are free and not yet measured.
    """
    book, world = context.book, context.world
    for card in cards:
        if (lease := context.leaving.get(card)) is not None:
            title = book.title(lease)
            return Wait(f"{head} {title} {leaves_in_words(book, lease)}.")
    for ghost in book.ghosts:
        if ghost.device in cards:
            return Wait(
                f"{head} The driver has not yet freed the memory of pid {ghost.pid}, which has ended.",
                retry_at=world.now + LOOK_AGAIN_SECONDS,
            )
    return Wait(
        f"{head} The next measurement will show what was just freed.",
        retry_at=world.now + MEASURE_AGAIN_SECONDS,
    )


class _Eviction:
    """The evictions of one decision: book, steps, recalled leases and sentences."""

    def __init__(self, context: Context, rank: Policy, at: str, way: Way) -> None:
        self.book, self.request = context.book, context.request
        self.world, self.rank, self.context = context.world, rank, context
        self.at = at  # the cards on which room is made, as text
        self.cards = [share.device for share in way.candidate.shares]
        self.frees_more = False  # whether a lease that leaves host memory has bytes on these cards
        self.host_room = context.room_now.get(HOST, 0)
        self.steps: list[Step] = []
        self.recalled: dict[str, int] = {}  # id of another owner's lease -> bytes; 0: all
        self.recalled_shadows: list[str] = []
        # Ids of leases that leave host memory. The bytes of such a lease on the cards are freed too.
        self.unloaded: set[str] = set()
        # Ids of leases whose shadows cannot be freed. There are three reasons: the shadow is freed
        # already, the lease leaves its card and needs the shadow, or its owner does not answer.
        needed = [lease for lease in way.leaving if lease.shadow_bytes and keeps_shadow(lease)]
        self.spared = {lease.id for lease in needed}
        self.spared |= context.silent_shadows
        self.freed_soon = 0  # bytes of shadows that are freed, and that no lease has taken yet
        self.sentences: list[str] = []

    def free_shadow(self, lease: Lease) -> None:
        """Frees the shadow of `lease`; recalls the shadow if the requester does not own `lease`."""
        self.spared.add(lease.id)
        self.freed_soon += lease.shed_bytes
        copy = f"the copy of {lease.name} in RAM"
        free = f"free {copy}"
        if not lease.shadow_bytes:
            what = "its parked memory" if lease.kind == KERNEL else lease.name
            free = f"move {show_bytes(lease.stow_bytes)} of {what} from RAM to its disk"
        if lease.owner != self.request.lease.owner:
            self.recalled_shadows.append(lease.id)
            self.sentences.append(f"{self.book.label(lease.owner)} is asked to {free}.")
            return
        if not lease.shadow_bytes and lease.stowing:  # else the step is decided again until it ends
            self.sentences.append(f"{self.book.label(lease.owner)} has begun to {free}.")
            return
        because = f"{self.request.called} needs room on {self.at}."
        self.steps.append(shed_step(lease, because))
        done = f"{copy[0].upper()}{copy[1:]} is freed."
        self.sentences.append(
            done if lease.shadow_bytes else f"{self.book.label(lease.owner)} is to {free}."
        )

    def unload_from_warm_pool(self, lease: Lease) -> None:
        """Drops `lease` from host memory; recalls it if the requester does not own it."""
        self.unloaded.add(lease.id)
        self.frees_more |= any(map(lease.bytes_on, self.cards))
        if lease.owner != self.request.lease.owner:
            self.recalled[lease.id] = 0
            self.sentences.append(
                f"{self.book.label(lease.owner)} is asked to unload {self.book.title(lease)} from RAM."
            )
            return
        name = self.book.title(self.request.lease)
        if lease.id == self.request.lease.id:
            because = f"RAM has no room for {name} beside the models that leave {self.at}."
            done = "is unloaded from RAM, and loaded again then"
        else:
            because = f"RAM is full; {name} needs room on {self.at}."
            done = "is unloaded from RAM"
        self._leave(Drop(lease.id, lease.shares, because))
        self.sentences.append(f"{self.book.title(lease)} {done}.")

    def evict(self, lease: Lease) -> None:
        """Moves or drops `lease`, which is on a card; recalls it if the requester does not own it.

        If host memory is too full for `lease`, and room can be made there, this call only makes
        that room. A later decision evicts `lease`.
        """
        name, title = self.book.title(self.request.lease), self.book.title(lease)
        size = show_bytes(self.request.footprint.bytes)
        idle = show_seconds(lease.idle_seconds(self.world.now))
        because = f"{name} needs {size} on {self.at}; {title} was idle for {idle}."
        # A process that does not answer may use the lease: it cannot publish that.
        state = "" if lease.id in self.context.silent else f", idle {idle}"
        described = f"{title} ({show_bytes(lease.bytes)}{state})"
        if lease.target:
            described = f"{show_bytes(lease.leaving_bytes)} of {described}"
        step = eviction_step(lease, self.host_room, self.world, because=because)
        if isinstance(step, Move):
            self.host_room -= lease.offload_bytes
        elif self._free_host_memory(lease):
            done = "sleeps" if is_engine(lease) else "is moved to RAM"
            self.sentences.append(f"{described} {done} in their place.")
            return
        if lease.owner != self.request.lease.owner:
            self._recall(lease, described)
        elif step is None:
            self.sentences.append(f"{title} is evicted once RAM has room.")
        else:
            self._leave(step)
            done = "is unloaded"
            if isinstance(step, Move):
                done = "is put to sleep" if is_engine(lease) else "is offloaded to RAM"
            self.sentences.append(f"{described} {done}.")

    def _free_host_memory(self, lease: Lease) -> bool:
        """Makes room for this `lease` in host memory. Returns whether that is possible.

        Frees shadows first, then unloads leases that are worth less in host memory than this
        `lease`. If that is not enough, nothing is freed.
        """
        reach = self.host_room + self.freed_soon
        if isinstance(eviction_step(lease, reach, self.world), Move):
            self._take(lease.offload_bytes)
            return True
        found = host_room_for(
            self.book,
            lease,
            reach,
            self.world,
            self.rank,
            spared=self.spared,
            renewed=partial(self._worth_less, lease),
        )
        if found is None:
            return False
        for other in found[0]:
            self.free_shadow(other)
        for other in found[1]:
            self.unload_from_warm_pool(other)
        self._take(lease.offload_bytes - sum([other.bytes for other in found[1]]))
        return True

    def _take(self, size: int) -> None:
        """Reserves `size` bytes of host memory for a lease: first the bytes that shadows free."""
        freed = min(max(0, size), self.freed_soon)
        self.freed_soon -= freed
        self.host_room -= max(0, size) - freed

    def _worth_less(self, lease: Lease, host_room: int) -> tuple[Lease, ...]:
        """The leases to unload from host memory for this `lease`, each worth less than `lease`.

        The result is empty if the leases that are worth less are too few, or if one of their owners
        does not answer.
        """
        wanted = self.request.lease
        # The owner that is recalled chooses what it unloads for its lease.
        if lease.owner != wanted.owner:
            return ()
        pool = warm(
            self.book,
            self.world,
            asker=wanted.owner,
            importance=wanted.importance,
            wanted=wanted.id,
        )
        less = worth_less(pool, lease, host_room, self.world, self.rank)
        return () if any([other.id in self.context.silent for other in less]) else less

    def _recall(self, lease: Lease, described: str) -> None:
        self.recalled[lease.id] = lease.leaving_bytes if lease.target else 0
        owner, evict = self.book.label(lease.owner), f"evict {described}"
        if lease.kind == KERNEL:  # its title is the name of its owner
            evict = f"move its memory{described.removeprefix(self.book.title(lease))} to RAM"
        if lease.id in self.context.silent:
            ticket = self.book.ticket(self.request.key)
            since = show_seconds(self.world.now - ticket.recalled_since) if ticket else ""
            self.sentences.append(
                f"{owner} was asked to {evict}, and has not answered for {since}."
            )
        else:
            self.sentences.append(f"{owner} is asked to {evict}.")

    def _leave(self, step: Move | Drop) -> None:
        self.book = mark_leaving(self.book, step, self.request.key)
        self.steps.append(step)
