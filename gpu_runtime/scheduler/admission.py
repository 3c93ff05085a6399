"""Decides whether a request gets memory, waits, or is refused: the numbered decision tree.

Pure. A book (all holders and requests of a host), a request and the world (devices and rules) go in.
A new book and a verdict come out. So a decision can be made twice, or replayed in a test.

Parts of the decision have modules of their own:

- `capacity` computes the free bytes, and `queue` the order of requests and the inputs of a decision.
- `victims` decides which leases may be evicted, and `eviction` how room is made.
- `feasibility` finds requests that can never be served.
- `caps` applies the operator's caps, and keeps leases off drained cards.

`transitions` changes the book after a step is done. A lease is settled while it is neither arriving
on its device nor leaving it. A ticket is the book's entry of a waiting request.

A departure copies bytes from a card to host memory, and a return copies bytes from host memory to a
card. The bus does both at once. So a large model leaves in stages: after each stage, the book shows
the bytes of that stage as free. A waiting model returns in parts. No part is larger than the bytes
that are free now.

The page is the stored form of the book. Its entries are holders and requests, and their number is
limited. New leases never take the last 2 * RESERVED entries: RESERVED of them are for requests that
wait, the others for requests to owners. So even a full page can take the requests that empty it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ..facts import (
    HOST,
    KERNEL,
    MOST_ENTRIES,
    Book,
    Candidate,
    Drop,
    Grant,
    Lease,
    Leaver,
    Load,
    Move,
    Part,
    Phase,
    Policy,
    Refuse,
    Request,
    Share,
    Shares,
    Step,
    Ticket,
    Verdict,
    Wait,
    World,
    bytes_label,
    one_memory,
    where,
    why_not_moved,
)
from ..units import show_bytes, show_seconds
from . import caps, eviction
from .capacity import filled_to_size, limits_of
from .caps import drained, drained_cards
from .eviction import cheapest_way, make_room
from .feasibility import (
    best_division,
    deadlocked,
    hopeless,
    hopeless_cards,
    host_bytes_to_be_had,
    never_returns,
    without_card_bytes,
)
from .placement import divisions, may_split, may_use_one_card, on_one_card
from .queue import Context, first_by_past_use, held_bytes, load_seconds, without_grace
from .transitions import note, with_refreshed
from .victims import (
    EXEMPT,
    FIXED,
    MOVE_FAILED,
    PINNED,
    WISHED,
    can_move,
    eviction_order,
    eviction_step,
    leaves_in_words,
    mark_leaving,
    needs_host_room,
    precious_bytes,
    reason_to_stay,
    unfinished_steps,
)

# Kinds of refusals that more room could change.
OF_ROOM = frozenset(("hopeless", "precious", "kept", "cap"))


def admit(book: Book, request: Request, world: World, rank: Policy) -> tuple[Book, Verdict]:
    """Decides the `request`. Returns the new book, and the verdict: a Grant, a Wait or a Refuse.

    1. The lease is settled on its device already → Grant, no steps
    2. The lease is arriving on its device or leaving it → Wait
    3. The request can never fit, or exceeds the operator's caps → Refuse; nothing is evicted.
       A return of bytes that exist nowhere else is then decided again, as below
    4. It fits into the free bytes that no request ahead in the queue needs → Grant: Load,
       or Move back from host. But if the page is full: Wait while a lease leaves it, else Refuse
    5. It fits once idle leases have left → Wait. Own leases leave now, and leases of other owners
       are recalled. If a part of the model can return from host meanwhile → Grant of this part
    6. It is the youngest of several deadlocked requests → Refuse, and name these requests
    7. Otherwise → Wait

    Bytes that exist nowhere else may return to where they were (law 16). So if such a return is
    refused in 3, or waits beside memory outside the leases that leaves too little of the budget, it
    is decided again: the cards may then be filled to their sizes, and if that does not help, host
    memory too while the return makes room.

    A Grant with steps is a reservation: the lease is in the book and pinned, and its bytes count
    from now on. Steps of an earlier call with the same key are returned again if they are not done.
    After a long wait (`Rules.most_wait`), the grace period protects no lease from the request.
    The caller publishes the owner's section before the call. `rank` orders the evictions.
    """
    request, world = _under_its_rules(book, request, world)
    after, verdict = _decided(book, request, world, rank)
    waits = isinstance(verdict, Wait) and not verdict.steps and not verdict.asked
    refusal = never_returns(book, request, world) if waits else verdict
    if not isinstance(refusal, Refuse) or refusal.kind not in OF_ROOM:
        return after, verdict
    for wider_book, wider_world in _as_it_was(book, request, world, refusal):
        found, wider = _decided(wider_book, request, wider_world, rank)
        if isinstance(wider, Refuse):
            found, wider = _in_pieces(wider_book, request, wider_world) or (found, wider)
        if not isinstance(wider, Refuse):
            return replace(found, limits=book.limits, holds_below={}), wider
    return after, verdict


def leavers(book: Book, request: Request, world: World, rank: Policy) -> tuple[Leaver, ...]:
    """What `admit` would let leave for the `request`, in its order; see `eviction.leavers`."""
    return eviction.leavers(Context(book, *_under_its_rules(book, request, world)), rank)


def _under_its_rules(book: Book, request: Request, world: World) -> tuple[Request, World]:
    """The request, and the world with the rules for it: after a long wait without grace periods."""
    world = without_grace(world, request.arrived, load_seconds(book, request))
    if request.placement.spared:
        rules = replace(world.rules, spared=request.placement.spared)
        world = replace(world, rules=rules)
    return caps.lowered(request, world), world


def _in_pieces(book: Book, request: Request, world: World) -> tuple[Book, Verdict] | None:
    """The next step of a return for which another lease leaves piece by piece; see `exchange`.

    The result is None if the return is impossible like that.
    """
    lease = book.lease(request.lease.owner, request.lease.name)
    cards = request.placement.devices
    if lease is None or not lease.piece_bytes or len(cards) != 1:
        return None
    if not (request.wait and request.stage_bytes):
        return None
    [card] = cards
    context = Context(book, request, world)
    if card in context.blind or card not in context.room_now:
        return None
    givers = [other for other in context.leases if _gives(other, lease, card, world)]
    free, host_free = context.room_now[card], context.room_now[HOST]
    found = exchange(lease, givers, max(0, free), host_free)
    if found is None:
        return None
    giver, moves = found
    size = show_bytes(lease.own_bytes)
    title = book.title(request.lease)
    head = f"{title} needs {size}; {card} has {show_bytes(max(0, free))} free."
    need = (Share(card, lease.bytes_on(HOST) - (0 if giver else moves)),)
    leaves = (one for one in context.leases if one.phase is Phase.LEAVING and one.bytes_on(card))
    leaving = next(leaves, None)
    busy = leaving or next((other for other in givers if _is_busy(other, request, world)), None)
    if context.blocking or busy:
        why = "Another request is ahead"
        if busy:
            holder = book.title(busy)
            why = f"{holder} {leaves_in_words(book, busy) if busy is leaving else 'is in use'}"
        blockers = (busy.id,) if busy else ()
        return _enqueue(book, request, world, Wait(f"{head} {why}.", blockers=blockers), ())
    if giver is None:
        if moves < lease.bytes_on(HOST):
            book, _ = _enqueue(book, request, world, Wait(head), need)
        else:
            book = book.without_ticket(request.key)
        return grant_part(book, request, world, (Share(card, moves),), moves, head)
    holder = book.title(giver)
    because = f"{head} {show_bytes(moves)} of {holder} leave for it, piece by piece."
    if giver.owner != lease.owner:
        wait = Wait(because, recalls={giver.id: moves})
        return _enqueue(book, request, world, wait, need)
    step = eviction_step(giver.leaving(moves), host_free, world, because=because)
    if step is None:
        return None
    book = mark_leaving(book, step, request.key)
    return _enqueue(book, request, world, Wait(because, (step,)), need)


def _gives(giver: Lease, lease: Lease, card: str, world: World) -> bool:
    """Whether pieces of `giver` may leave the `card`, now or later, so that `lease` returns."""
    if giver.id == lease.id or giver.droppable or giver.kind == "block" or not giver.bytes_on(card):
        return False
    if giver.importance < lease.importance or giver.keep or not can_move(giver, world):
        return False
    return len([share for share in giver.shares if share.device != HOST]) == 1


def _is_busy(lease: Lease, request: Request, world: World) -> bool:
    importance = request.lease.importance
    return bool(reason_to_stay(lease, world, asker=request.lease.owner, importance=importance))


def _as_it_was(
    book: Book, request: Request, world: World, refusal: Refuse
) -> Iterator[tuple[Book, World]]:
    """Yields books and worlds with more room, for the return of bytes that exist nowhere else.

    Only bytes that were on the card count: the room that a cell needs beside them is no return. A
    user may hold more than the operator's cap, and then parked bytes return in spite of the cap.
    """
    lease = book.lease(request.lease.owner, request.lease.name)
    if lease is None or not lease.must_return or lease.phase is not Phase.SETTLED:
        return
    if lease.kind == KERNEL and request.footprint.bytes > lease.own_bytes:
        return
    cap = world.rules.cap
    if refusal.kind == "cap":
        if cap is None or cap.bytes_per_device is None or lease.own_bytes <= cap.bytes_per_device:
            return
        rules = replace(world.rules, cap=replace(cap, bytes_per_device=None))
        world = replace(world, rules=rules)
        yield book, world
    cards = {device.id for device in world.cards}
    yield filled_to_size(book, world, cards)
    yield filled_to_size(book, world, {*cards, HOST})


def _decided(book: Book, request: Request, world: World, rank: Policy) -> tuple[Book, Verdict]:
    """The new book and the verdict of the numbered tree; see `admit`."""
    lease = book.lease(request.lease.owner, request.lease.name)
    if unreceived := _unreceived(book, request, lease):
        return book, unreceived

    # 1. The lease is settled on its device already.
    if lease and lease.phase is Phase.SETTLED and (lease.all_on_device or lease.kind == "block"):
        title = book.title(lease)
        because = f"{title} is on {lease.where} already"
        return book.without_ticket(request.key), Grant(lease, (), because)

    # 2. The lease is on its way in or out.
    if lease and lease.phase is not Phase.SETTLED:
        is_arriving = lease.phase is Phase.ARRIVING
        going = "is arriving" if is_arriving else leaves_in_words(book, lease)
        return _enqueue(book, request, world, Wait(f"{book.title(lease)} {going}"), ())

    # 3. The request can never fit, or exceeds the operator's caps.
    request = _as_measured(request, lease) if lease else request
    # A model of 0 bytes may use a drained card, because all its tensors belong to another model.
    out = drained(book, world) if request.footprint.bytes else {}
    others, never, request = laid_out(book, request, world, lease, out)
    refusal = caps.refusal(book, request, world) or hopeless(others, request, world, never)
    if refusal:
        return _refuse(book, request, world, refusal)

    # 4. It fits into the free bytes.
    context = Context(book, request, world, never)
    candidates = candidates_for(context, out)
    possible = tuple(
        [c for c in candidates if len(c.shares) > 1 or c.shares[0].device not in never]
    )
    measured = possible
    if context.blind:
        sees = context.blind.keys().isdisjoint
        measured = tuple([c for c in possible if sees([share.device for share in c.shares])])
    if measured and measured[0].fits:
        return _take_free_room(context, rank, measured[0], candidates)

    # 5. It fits once idle leases have left.
    if evicting := _evict(context, rank, measured):
        return evicting

    # 6. It is the youngest of several deadlocked requests.
    queued, verdict = _wait(context, possible, candidates)
    cycle = _cycle_to_break(queued, request, world, verdict)
    if cycle:
        return _refuse(book, request, world, _deadlock(cycle, request))

    # 7. Otherwise it waits.
    return queued, verdict


# -- the parts of the tree -------------------------------------------------------------------------


def _unreceived(book: Book, request: Request, lease: Lease | None) -> Verdict | None:
    """The verdict of an earlier call with this request's key, if its steps are not done; else None.

    The caller may not have received that verdict: the call was interrupted, or the ledger's reply
    was lost. Steps that the caller carries out already (`request.under_way`) are left out.
    """
    if lease and lease.key == request.key and lease.phase is Phase.ARRIVING:
        return Grant(lease, (_arrival(lease),), "granted before")
    decided = unfinished_steps(book, request.lease.owner, request.key)
    steps = tuple([step for step in decided if step.lease not in request.under_way])
    if not steps:
        return None
    because = "; ".join(f"{_name(step.lease)} is still to be evicted" for step in steps)
    return Wait(because, steps)


def _as_measured(request: Request, lease: Lease) -> Request:
    """The request with the measured size of the weights, taken from the model's `lease`."""
    parts = [Part("weights", lease.bytes, "measured")]
    parts += [part for part in request.footprint.parts if part.for_use]
    return replace(request, footprint=replace(request.footprint, parts=tuple(parts)))


def _evict(
    context: Context, rank: Policy, candidates: tuple[Candidate, ...]
) -> tuple[Book, Verdict] | None:
    """Evicts idle leases, and returns the book and a Wait; None if evictions cannot make the room.

    If a part of the model can return from host memory meanwhile, the verdict is a Grant of this
    part. The result is also None if the page has no room for the request's ticket, or if an earlier
    request of the same process makes room for this model already.
    """
    book, request, world = context.book, context.request, context.world
    if full_for_waiting(book, request) or context.is_twin:
        return None
    alone = tuple([candidate for candidate in candidates if len(candidate.shares) == 1])
    way = cheapest_way(context, rank, alone)
    if way is None:
        return None
    emptier, wait = make_room(context, rank, way)
    need = rest = context.missing(way.candidate.shares)
    part = 0 if way.leaving else returning_part(context, need)
    if part:
        rest = (Share(need[0].device, need[0].bytes - part),)
    queued, verdict = _enqueue(emptier, request, world, wait, rest)
    if part and isinstance(verdict, Wait):
        return grant_part(queued, request, world, need, part, wait.because)
    return queued, verdict


def _take_free_room(
    context: Context, rank: Policy, chosen: Candidate, candidates: tuple[Candidate, ...]
) -> tuple[Book, Verdict]:
    """Grants the free bytes of `chosen`. On a full page: a Wait for an idle lease, or a Refuse."""
    book, request, world = context.book, context.request, context.world
    if not needs_entry(book, request):
        return _grant(context, chosen, candidates)
    freeing = None
    if not request.wait or not full_for_waiting(book, request):
        freeing = free_an_entry(context, rank)
    if freeing is None:
        return _refuse(book, request, world, page_full(request))
    emptier, wait = freeing
    return _enqueue(emptier, request, world, wait, chosen.shares)


def _wait(
    context: Context, possible: tuple[Candidate, ...], candidates: tuple[Candidate, ...]
) -> tuple[Book, Verdict]:
    """The book with the request's ticket, and the Wait that names the obstacles."""
    book, request, world = context.book, context.request, context.world
    if not possible:  # no single card can hold the model, only several together
        possible = candidates = (*waiting_candidates(book, request, world), *candidates)
    wait = wait_for_obstacles(context, possible)
    need = () if context.is_twin else context.missing(possible[0].shares)
    return _enqueue(book, request, world, replace(wait, considered=candidates), need)


def _cycle_to_break(
    book: Book, request: Request, world: World, verdict: Verdict
) -> tuple[Ticket, ...]:
    """The deadlocked tickets if this request is the youngest among them, else an empty tuple."""
    if not request.wait or not isinstance(verdict, Wait):
        return ()
    cycle = deadlocked(book, world)
    if not cycle:
        return ()
    youngest = max(cycle, key=lambda ticket: (ticket.arrived, ticket.key))
    return cycle if youngest.key == request.key else ()


# -- the verdicts ----------------------------------------------------------------------------------


def _arrival(lease: Lease, because: str = "granted before") -> Step:
    """The step that brings a granted lease to its device."""
    # A layout by whole cards claims each card in full, but only the model's own bytes are loaded.
    shares = lease.filled or lease.target
    if not lease.shares:
        return Load(lease.id, shares, because)
    source = lease.shares
    if lease.in_parts and sum(share.bytes for share in shares) < lease.bytes:
        source = (Share(HOST, lease.bytes_on(HOST)),)
    return Move(lease.id, source, shares, because)


def _grant(
    context: Context, chosen: Candidate, considered: tuple[Candidate, ...]
) -> tuple[Book, Verdict]:
    book, request, world = context.book, context.request, context.world
    wanted, size, old = request.lease, request.footprint.bytes, context.old
    target, filled = context.missing(chosen.shares), chosen.filled
    if old and target != chosen.shares:  # in parts: only bytes in host memory move
        filled = (Share(target[0].device, old.bytes_on(HOST)),)
    lease = replace(
        old or wanted,
        key=request.key,
        target=target,
        filled=filled if filled != target else (),
        phase=Phase.ARRIVING,
        working_bytes=request.footprint.working_bytes,
        pins=1,
        pinned_since=world.now,
        last_used=world.now,
        importance=wanted.importance,
        keep_alive=wanted.keep_alive,
    )
    title = book.title(lease)
    because = f"{title} needs {show_bytes(size)}; {chosen.because}."
    book = book.without_ticket(request.key).with_lease(lease)
    granted = replace(lease, shares=chosen.shares)
    book = note(book, world, granted, "granted", "request", because, size=size)
    book = replace(book, holds_below=_holds_below(context))
    return book, Grant(lease, (_arrival(lease, because),), because, considered)


def _holds_below(context: Context) -> dict[str, int]:
    """The claims on each device up to which a grant of free bytes is right; see `Book.holds_below`.

    Empty if it depends on more than the free bytes of each device: on other requests, a user's cap, or
    memory that several devices have in common.
    """
    book, world = context.book, context.world
    if book.tickets or world.rules.cap or one_memory(world.devices):
        return {}
    claims = book.claims()
    return {device: claims.get(device, 0) + size for device, size in context.room_now.items()}


def _refuse(book: Book, request: Request, world: World, refusal: Refuse) -> tuple[Book, Verdict]:
    book = note(
        book.without_ticket(request.key),
        world,
        request.lease,
        "refused",
        refusal.kind,
        refusal.because,
        size=request.footprint.bytes,
        device=refusal.device,
    )
    return book, refusal


def _deadlock(cycle: Iterable[Ticket], request: Request) -> Refuse:
    waits = []
    for ticket in cycle:
        held = ", ".join(map(_name, ticket.held))
        waits.append(f"{ticket.name} waits while its thread holds {held}")
    because = f"waiting would never end: {', '.join(waits)}"
    return Refuse(because, kind="deadlock", need_bytes=request.footprint.bytes)


def _enqueue(
    book: Book, request: Request, world: World, wait: Wait, need: Shares
) -> tuple[Book, Verdict]:
    """The book with a ticket for the room `need`, and the Wait; a Refuse if the page is full."""
    if not request.wait:
        return book, wait
    if full_for_waiting(book, request):
        return _refuse(book, request, world, page_full(request))
    old = book.ticket(request.key)
    ticket = _ticket(request, world, wait, need, old, load_seconds(book, request))
    noted = old.because if old else ""
    # A waiting request gets one event, and another one if a user with fewer card-hours comes later. It
    # gets none if the Wait has steps, because each eviction gets an event.
    passed = FAIR in ticket.because and FAIR not in noted
    if ticket.because and (passed or not noted):
        size = request.footprint.bytes
        book = note(book, world, request.lease, "waiting", "request", wait.because, size=size)
        return book.with_ticket(ticket), wait
    return with_refreshed(book, ticket), wait


def _ticket(
    request: Request, world: World, wait: Wait, need: Shares, old: Ticket | None, seconds: float
) -> Ticket:
    """The ticket of a waiting request; `old` is the earlier ticket of the same request, if any.

    `need` is the room for which the request waits. `seconds` is the duration of the load.
    """
    now = world.now
    recalls = (wait.recalls, wait.shadows)
    blocked = bool(wait.blockers) and not any(recalls) and not wait.steps
    blocked_since = ((old and old.blocked_since) or now) if blocked else 0.0
    if any(recalls):
        same = old is not None and (old.recalls, old.shadows) == recalls
        recalled_since = old.recalled_since if old and same else now
    else:
        recalled_since = 0.0
    if wait.steps:
        because = old.because if old else ""
    else:
        because = wait.because
    return Ticket(
        key=request.key,
        owner=request.lease.owner,
        verb="use",
        name=request.lease.name,
        arrived=request.arrived,
        refreshed=now,
        importance=request.lease.importance,
        seconds=seconds,
        users=request.users,
        need=need,
        places=request.placement.devices,
        layout=request.placement.layout if len(need) > 1 else "",
        recalls=wait.recalls,
        shadows=wait.shadows,
        recalled_since=recalled_since,
        held=request.held,
        blocked_since=blocked_since,
        because=because,
        past_use=world.rules.past_use,
    )


def _name(lease_id: str) -> str:
    return lease_id.partition("/")[2]


# -- returns that overlap with departures ----------------------------------------------------------


MOST_STAGES = 8  # of one departure or return; each stage costs a transaction


def stage_bytes(size: int, piece_bytes: int, least_bytes: int) -> int:
    """The bytes of one stage, if `size` bytes are copied in at most MOST_STAGES stages.

    A stage has at least `least_bytes`. It also has at least `piece_bytes`, because the largest
    piece must fit into one stage.

    >>> stage_bytes(4000, 100, 50), stage_bytes(4000, 700, 50), stage_bytes(4000, 100, 900)
    (500, 700, 900)
    """
    return max(least_bytes, piece_bytes, -(-size // MOST_STAGES))


def departure_stages(lease: Lease, target: Shares, least_bytes: int) -> int:
    """The bytes of one stage when `lease` leaves its card for `target`; 0 if it leaves all at once.

    A lease leaves in stages only if its pieces are copied to host memory. It leaves at once if host
    memory has a copy already, if there would be only one stage, or if `least_bytes` is 0.
    `least_bytes` is the least bytes of a stage.
    """
    size = sum([share.bytes for share in target])
    copied = not (lease.shadow_bytes or lease.copy)
    if not copied or not lease.piece_bytes or lease.kind == KERNEL:
        return 0
    if not least_bytes:
        return 0
    if any([share.device != HOST for share in target]):
        return 0
    stage = stage_bytes(size, lease.piece_bytes, least_bytes)
    return stage if size >= 2 * stage else 0


def part_left(book: Book, step: Move, shares: Shares, world: World) -> Book:
    """The book after the first bytes of a leaving lease have left; the rest is still leaving.

    `step` is the whole departure. `shares` are the places of the lease's own bytes now. Waiting
    requests may use the freed bytes at once. The book gets an event only when the last bytes have
    left.
    """
    lease = book.find(step.lease)
    if lease is None or lease.phase is not Phase.LEAVING:
        return book
    in_host = sum([share.bytes for share in shares if share.device == HOST])
    moved = in_host - lease.bytes_on(HOST)
    rest = lease.leaving_bytes - moved
    leaving = replace(
        lease.holding(shares),
        target=(Share(HOST, rest),),
        phase=Phase.LEAVING,
        settled_at=world.now,
        away_since=world.now,
    )
    return book.with_lease(leaving)


def returning_part(context: Context, need: Shares) -> int:
    """The bytes of the requested model that may return now; 0 if no part may return.

    `need` is the room that is being made. At least one piece stays in host memory: the last pieces
    return with the grant of the whole model, which also reserves the working memory.
    """
    lease, request = context.old, context.request
    if not request.stage_bytes or not request.wait:
        return 0
    if lease is None or lease.phase is not Phase.SETTLED or lease.kind == KERNEL:
        return 0
    if not lease.piece_bytes or len(need) != 1:
        return 0
    card = need[0].device
    here = lease.bytes_on(card)
    if lease.on_device and here != context.held.get(card):
        return 0  # the other part of the model is on another card
    in_host = lease.bytes_on(HOST)
    free = context.free()[card] - context.held.get(card, 0)
    least = stage_bytes(lease.own_bytes, lease.piece_bytes, request.stage_bytes)
    part = min(free, in_host - lease.piece_bytes)
    return part if part >= least else 0


def exchange(
    lease: Lease, givers: Sequence[Lease], free: int, host_free: int
) -> tuple[Lease | None, int] | None:
    """The next step by which `lease` returns to a card from which `givers` leave, piece by piece.

    It is the bytes of the card that another lease gives, or that (if there is none) this lease takes.

    Two leases may fill a card and host memory so far that neither has room for a whole copy of the
    other. `free` and `host_free` are the free bytes of the card and of host memory. What one lease
    frees, the other one takes. The result is None if the lease cannot return as a whole like that:
    then no piece moves at all.
    """
    missing = lease.bytes_on(HOST) - free
    if missing <= 0:
        return None, lease.bytes_on(HOST)
    able = [other for other in givers if other.piece_bytes]
    if sum([other.card_bytes for other in able]) < missing:
        return None
    # With a spare piece of each, one of them always has room for its next piece.
    giver = max(able, key=lambda other: other.card_bytes)
    piece = max([other.piece_bytes for other in able])
    if host_free < missing + piece and free + host_free < lease.piece_bytes + piece:
        return None
    if host_free >= giver.piece_bytes:
        return giver, min(host_free, missing + giver.piece_bytes - 1, giver.card_bytes)
    return None, free


def is_part(lease: Lease) -> bool:
    """Whether only a part of this arriving `lease` returns, and the rest stays in host memory."""
    if not lease.target:
        return False
    shares = lease.filled or lease.target
    coming = sum([share.bytes for share in shares])
    return coming < lease.bytes_on(HOST)


def grant_part(
    book: Book, request: Request, world: World, need: Shares, part: int, because: str
) -> tuple[Book, Grant]:
    """Grants the return of `part` bytes. The request's ticket stays and waits for the rest.

    `need` is the room that the request still needs, on one card. `because` is the reason of the
    request's Wait, in sentences.
    """
    lease = book.lease(request.lease.owner, request.lease.name)
    assert lease is not None  # a part returns only from host memory
    target = (Share(need[0].device, part),)
    arriving = replace(
        lease,
        key=request.key,
        target=target,
        filled=(),
        phase=Phase.ARRIVING,
        pins=1,
        pinned_since=world.now,
        last_used=world.now,
        importance=request.lease.importance,
    )
    because = f"{because} {show_bytes(part)} of {lease.name} return meanwhile."
    step = Move(lease.id, (Share(HOST, part),), target, because)
    return book.with_lease(arriving), Grant(arriving, (step,), because)


# -- room for one more entry in the book's page ----------------------------------------------------


RESERVED = 32  # entries for requests to owners, and as many more for requests that wait
MOST_LEASES = MOST_ENTRIES - 2 * RESERVED  # entries beyond which no new lease is granted
MOST_WAITING = MOST_ENTRIES - RESERVED  # entries beyond which no new request waits


def needs_entry(book: Book, request: Request) -> bool:
    """Whether the page has no room for the lease that the `request` would get."""
    if book.lease(request.lease.owner, request.lease.name):
        return False
    own = book.ticket(request.key) is not None  # the request's own ticket becomes the lease
    return book.entries - own >= MOST_LEASES


def full_for_waiting(book: Book, request: Request) -> bool:
    """Whether the page has no room for this request's ticket."""
    return book.entries >= MOST_WAITING and book.ticket(request.key) is None


def page_full(request: Request) -> Refuse:
    """The refusal of the `request` if no lease may leave the full page."""
    because = f"the book is full: {MOST_ENTRIES} holders and requests"
    return Refuse(because, kind="full", need_bytes=request.footprint.bytes)


def free_an_entry(context: Context, rank: Policy) -> tuple[Book, Wait] | None:
    """The book, and the Wait while an idle lease leaves the page; None if no lease may leave.

    The chosen lease is unloaded, because an offloaded lease keeps its entry in the page. The choice
    follows the rules of an eviction that frees bytes. `context` has the inputs of this decision.
    `rank` is the eviction policy.
    """
    book, request, world = context.book, context.request, context.world
    head = f"The book is full ({book.entries} holders and requests)"
    leaving = _leaving(context)
    if leaving is not None:
        recalls = {} if leaving.owner == request.lease.owner else {leaving.id: 0}
        return book, Wait(f"{head}; {leaving.name} is being unloaded", recalls=recalls)
    victim = _victim(context, rank)
    if victim is None:
        return None
    idle = f"{victim.name} (idle {show_seconds(victim.idle_seconds(world.now))})"
    if victim.owner != request.lease.owner:
        label = book.label(victim.owner)
        return book, Wait(f"{head}; {label} is asked to unload {idle}.", recalls={victim.id: 0})
    because = f"{head}; {request.lease.name} needs its entry."
    step = Drop(victim.id, victim.shares, because)
    emptier = mark_leaving(book, step, request.key)
    return emptier, Wait(f"{head}; {idle} is unloaded.", steps=(step,))


def _leaving(context: Context) -> Lease | None:
    """A lease that is being unloaded, or is leaving because this request recalled it; or None."""
    old = context.book.ticket(context.request.key)
    recalled = old.recalls if old else {}
    for lease in context.leases:
        if lease.phase is not Phase.LEAVING:
            continue
        if not lease.target or lease.id in recalled:
            return lease
    return None


def _victim(context: Context, rank: Policy) -> Lease | None:
    """The idle lease that leaves first; None if no lease may leave.

    Of leases with equal importance, leases that are not wholly on cards leave first.
    """
    idle = [
        lease
        for lease in context.leases
        if lease.droppable and lease.id not in context.recalled
        if not _is_busy(lease, context.request, context.world)
    ]
    ordered = eviction_order(idle, context.world, rank)
    ordered.sort(key=lambda lease: (-lease.importance, lease.all_on_device))
    return ordered[0] if ordered else None


# -- the candidates for a request: cards, and sets of cards, the best first


def laid_out(
    book: Book, request: Request, world: World, lease: Lease | None, out: Mapping[str, str]
) -> tuple[Book, dict[str, Refuse], Request]:
    """The book, the cards that can never hold the request alone, and the request with its layout.

    If the `lease` is in parts and may return to its card, its bytes there are no obstacle. In this
    case they are not in the returned book.
    """
    if lease and lease.in_parts:
        others = without_card_bytes(book, lease)
        never = _never_alone(others, request, world, out)
        decided = _with_layout(request, world, never)
        if held_bytes(book, decided, never):
            return others, never, decided
    never = _never_alone(book, request, world, out)
    return book, never, _with_layout(request, world, never)


def _never_alone(
    book: Book, request: Request, world: World, out: Mapping[str, str]
) -> dict[str, Refuse]:
    """The cards that can never hold the whole request alone, each with the refusal."""
    never = drained_cards(request, world, out)
    never |= caps.capped_cards(book, request, world)
    never |= hopeless_cards(book, request, world)
    return never


def _with_layout(request: Request, world: World, never: Container[str]) -> Request:
    """The request with its layout `auto` or `whole` decided. Any other layout stays as it is.

    `never` has the cards that can never hold the request alone. The model gets one card if the
    rules allow that, and if at least one allowed card is not in `never`.
    """
    rules = request.placement
    if rules.layout not in ("auto", "whole"):
        return request
    cards = [device.id for device in world.cards if device.id not in never]
    alone = may_use_one_card(rules) and any(
        not rules.devices or id in rules.devices for id in cards
    )
    if rules.layout == "whole":
        return replace(request, placement=replace(rules, most_cards=1)) if alone else request
    layout = "single" if alone else "proportional"
    return replace(request, placement=replace(rules, layout=layout))


def candidates_for(context: Context, out: Mapping[str, str]) -> tuple[Candidate, ...]:
    """The cards, or sets of cards, for the request. Each candidate shows whether it has the room
    now.

    The best candidate is first, and drained cards are last. `out` maps each drained card to a
    sentence on who drained it.
    """
    request, free = context.request, context.free()
    rules = request.placement
    if out:
        free = {device: size for device, size in free.items() if device not in out}
    limits = limits_of(context.book, context.world)
    alone = on_one_card(request.footprint, free, rules, limits) if may_use_one_card(rules) else ()
    several = []
    if may_split(rules) and not (alone and alone[0].fits):
        # The divisions use only measured cards, and stay within the owner's own memory limit.
        measured = {device: size for device, size in free.items() if device not in context.blind}
        for candidate in divisions(request.footprint, measured, rules, limits):
            size = sum([share.bytes for share in candidate.shares])
            if context.own_left is None or size <= context.own_left:
                several.append(candidate)
    closed = [device for device in out if not rules.devices or device in rules.devices]
    size = request.footprint.bytes
    found = _with_reserved((*several, *alone), context)
    return (*found, *[Candidate((Share(card, size),), False, out[card]) for card in closed])


def _with_reserved(candidates: tuple[Candidate, ...], context: Context) -> tuple[Candidate, ...]:
    """The `candidates`. The reasons also name the bytes that are reserved for requests ahead.

    Only the reasons of candidates without room change.
    """
    if not context.blocking:
        return candidates
    found = []
    for candidate in candidates:
        reserved = "" if candidate.fits else reserved_ahead(context, candidate.shares)
        if reserved:
            candidate = replace(candidate, because=f"{candidate.because}; {reserved}")
        found.append(candidate)
    return tuple(found)


def waiting_candidates(book: Book, request: Request, world: World) -> tuple[Candidate, ...]:
    """The division over several cards that the request waits for; empty if none can ever fit."""
    found = best_division(book, request, world)
    if isinstance(found, Refuse):
        return ()
    return (replace(found, fits=False, because=f"{where(found.shares)} have too little free"),)


# -- why a request waits ---------------------------------------------------------------------------


FAIR = "GPU_FAIRNESS=day"
MOST_TOLD = 4  # leases in the way that are named in the sentence
TOO_FEW = "would not free enough"  # of a lease that could leave
LOOK_SECONDS = 1.0  # how soon to decide again if only a new measurement can change the verdict


def wait_for_obstacles(context: Context, candidates: tuple[Candidate, ...]) -> Wait:
    """A Wait that names the leases in the way on the first, and best, of the `candidates`.

    The Wait's field `retry_at` is the earliest time at which the verdict may change without an
    event: a lease on any of the `candidates` becomes evictable, or a new measurement exists.
    """
    world, ahead = context.world, len(context.ahead)
    if context.is_twin:
        wanted = context.request.lease
        words = "the notebook's memory" if wanted.kind == KERNEL else wanted.name
        because = f"Another thread of this process is waiting for {words} already"
        return Wait(because, ahead=ahead)
    nearest = candidates[0].shares
    found = _leases_in_the_way(context, candidates)
    sentences, retry = found.sentences, found.retry
    reserved = reserved_ahead(context, nearest)
    if reserved:
        sentences.insert(0, reserved)
    if world.rules.cap is not None and (beyond := caps.beyond_quota(world.rules.cap)):
        sentences.insert(0, f"{beyond}, so all others come first")
    if fair := _first_by_past_use(context):
        sentences.insert(0, fair)
    if ahead and not sentences:
        sentences.append(f"{ahead} requests are ahead" if ahead > 1 else "1 request is ahead")
    unmeasured = [context.blind[share.device] for share in nearest if share.device in context.blind]
    if unmeasured:
        sentences = unmeasured
        retry.append(world.now + LOOK_SECONDS)
    elif not found.leased and not ahead:
        sentences.append(_outside_memory(nearest, context))
        retry.append(world.now + LOOK_SECONDS)
    return Wait(
        _shortened(sentences),
        blockers=tuple(found.blockers),
        ahead=ahead,
        retry_at=min(retry, default=None),
    )


class _InTheWay(NamedTuple):
    """The leases in the way of one request."""

    blockers: list[str]  # ids of the leases that are in use or arriving
    sentences: list[str]
    retry: list[float]  # times at which a lease may be evicted, if nothing uses it until then
    leased: bool  # True: a lease is the reason to wait; False: memory outside the leases is


def _leases_in_the_way(context: Context, candidates: tuple[Candidate, ...]) -> _InTheWay:
    book, request, world = context.book, context.request, context.world
    wanted = request.lease
    nearest = {share.device for share in candidates[0].shares}
    all_cards = {share.device for candidate in candidates for share in candidate.shares}
    first_card = candidates[0].shares[0].device
    over_own_limit = context.own_left is not None and context.own_left < request.footprint.bytes
    blockers: list[str] = []
    sentences: list[str] = []
    retry: list[float] = []
    leased = False
    for lease in context.leases:
        if lease.id == wanted.id:
            continue  # the requested model itself, which is in parts and waits for its other bytes
        devices = {share.device for share in lease.claims()}
        why = reason_to_stay(lease, world, asker=wanted.owner, importance=wanted.importance)
        if why == "just used" and not devices.isdisjoint(all_cards):
            longest = request.arrived + world.rules.most_wait(load_seconds(book, request))
            retry.append(min(longest, lease.last_used + world.rules.grace_seconds))
        if why == MOVE_FAILED and not devices.isdisjoint(all_cards):
            retry.append(lease.moves_again_at)
        counts_against_limit = over_own_limit and lease.owner == wanted.owner and lease.on_device
        if devices.isdisjoint(nearest) and not counts_against_limit:
            continue
        if why in ("in use", "a block of code") or lease.phase is Phase.ARRIVING:
            blockers.append(lease.id)
        if why or (not lease.droppable and _in_words(lease, why, context) != TOO_FEW):
            leased = True
        if len(sentences) > MOST_TOLD:  # this lease is counted, but not named
            sentences.append("")
            continue
        held = f"{show_bytes(lease.bytes)} on {first_card}"
        if lease.shares:
            held = bytes_label(lease)
        words = _in_words(lease, why, context)
        title = book.title(lease)
        sentences.append(f"{title} ({held}) {words}")
    return _InTheWay(blockers, sentences, retry, leased)


def _first_by_past_use(context: Context) -> str:
    """That another user is first because of fewer card-hours, with both figures; empty if nobody is."""
    if (found := first_by_past_use(context)) is None:
        return ""
    ticket, hours = found
    owners = map(context.book.owner, (ticket.owner, context.request.lease.owner))
    first, second = [owner.user if owner else "another user" for owner in owners]
    return (
        f"{first} is first, with {ticket.past_use} card-hours in the last day; "
        f"{second} has had {hours} ({FAIR})"
    )


def reserved_ahead(context: Context, shares: Shares) -> str:
    """A sentence about free bytes that are reserved for requests ahead; empty if no bytes are reserved.

    `shares` name the cards. `context` holds the requests ahead and the room.
    """
    if not context.blocking:
        return ""
    cards = {share.device for share in shares}
    now, later = (
        sum([max(0, room.get(card, 0)) for card in cards])
        for room in (context.room_now, context.room_later)
    )
    reserved = now - later
    if reserved <= 0:
        return ""
    first = [
        ticket for ticket in context.blocking if any(share.device in cards for share in ticket.need)
    ]
    if not first:
        return ""
    more = len(first) - 1
    name = "a notebook" if first[0].name == KERNEL else first[0].name
    waiting = f"{name} and {more} more, which are" if more else f"{name}, which is"
    return f"{show_bytes(reserved)} is reserved for {waiting} ahead in the queue"


def _shortened(sentences: list[str]) -> str:
    """The `sentences` as one text, at most MOST_TOLD + 1 of them.

    There is a sentence for each lease in the way, which may be sixty on a crowded card. If two or
    more sentences are left out, the text ends with their number: `and 56 more`.
    """
    more = len(sentences) - MOST_TOLD
    if more >= 2:
        sentences = [*sentences[:MOST_TOLD], f"and {more} more"]
    return "; ".join(sentences)


def _in_words(lease: Lease, why: str, context: Context) -> str:
    """Why this lease is in the way. The text is the end of a sentence.

    `why` is the result of `reason_to_stay`.
    """
    book, wanted, world = context.book, context.request.lease, context.world
    in_use = {"in use": "is in use", "a block of code": "is held by running code"}.get(why)
    if lease.phase is Phase.ARRIVING and lease.kind == "model":
        in_use = "is being loaded"
    if in_use:
        return in_use + _by(book, lease, wanted.owner, world)
    if why == "just used":
        idle = lease.idle_seconds(world.now)
        left = max(0.0, world.rules.grace_seconds - idle)
        used = f"was used {show_seconds(idle)} ago{_by(book, lease, wanted.owner, world)}"
        return f"{used}, and can leave in {show_seconds(left)}"
    if why == MOVE_FAILED:
        return f"could not be moved{why_not_moved(book.events, lease)}; its process tries again"
    if why == "more important":
        return f"is more important (importance {lease.importance}, ours {wanted.importance})"
    if why == "kept":
        return PINNED
    if why == WISHED:
        return f"is {why}"
    if why == Phase.LEAVING or lease.id in context.recalled:
        return leaves_in_words(book, lease)
    all_fit_in_host = precious_bytes(context.leases) <= host_bytes_to_be_had(
        book, world, context.request.lease.id
    )
    if lease.droppable or (can_move(lease, world) and all_fit_in_host):
        return TOO_FEW
    why = needs_host_room(lease)
    return why if why == EXEMPT or FIXED in why else f"{why} now"


def _by(book: Book, lease: Lease, asker: str, world: World) -> str:
    """Which other process uses the lease, and for how long; empty if `asker` owns the lease."""
    owner = book.owner(lease.owner)
    if owner is None or lease.owner == asker:
        return ""
    by = f" by {owner.label}" if lease.kind != KERNEL else ""
    if lease.pinned_since:
        by += f" for {show_seconds(world.now - lease.pinned_since)}"
    return by


def _outside_memory(shares: Shares, context: Context) -> str:
    """The sentence for a request that waits because of memory outside the leases."""
    has = "has" if len(shares) == 1 else "have"
    free = sum(max(0, context.room_now.get(share.device, 0)) for share in shares)
    need = sum(share.bytes for share in shares)
    return (
        f"{where(shares)} {has} {show_bytes(free)} free as measured, {show_bytes(need)} are needed; "
        "memory of other programs is in the way"
    )
