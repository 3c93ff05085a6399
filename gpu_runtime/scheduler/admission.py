"""Who gets room, who waits, who is refused: the decisions of the house.

Pure: a book, a request and the world as it is go in; a new book and a verdict come out. Nothing here reads a clock, a
device, a setting or a ledger, so a decision can be made twice, or replayed in a test.

The tree stands here; its parts have pages of their own: what is free (`room`), who comes first (`queueing`), who may
leave and how (`leaving`), how room is made (`clearing`), what can never be (`hopeless`, `deadlock`). What others did is
recorded by `bookkeeping`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from msgspec.structs import replace

from ..facts import (
    MOST_ENTRIES,
    Book,
    Candidate,
    Grant,
    Lease,
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
    where,
)
from ..units import show_bytes, show_seconds
from . import quotas
from .capacity import limit_of
from .context import Context
from .deadlock import deadlocked
from .drain import drained
from .drain import refusals as drained_cards
from .eligibility import reason_to_stay, unfinished_steps
from .eviction import cheapest_way, make_room
from .feasibility import at_best, hopeless, hopeless_cards
from .placement import place
from .splitting import could_split, one_card_may_do, split
from .transitions import note

MOST_TOLD = 4  # leases in the way, by name
LOOK_SECONDS = 1.0  # how soon to look again where only a new measurement can tell


def admit(book: Book, request: Request, world: World, rank: Policy) -> tuple[Book, Verdict]:
    """Whether the request gets its room now, must wait, or can never have it.

    1. settled here already → Grant, no steps
    2. on its way in or out → Wait
    3. hopeless, or beyond the operator's caps → Refuse, evicting nothing
    4. fits in what is free, elders' needs set aside → Grant: Load, or Move back from host
    5. fits once idle leases have left → Wait, with our own Moves and Drops to do now, others' asked on the ticket
    6. deadlocked → Refuse the youngest, naming the cycle
    7. otherwise → Wait behind its elders

    A Grant is a reservation: the lease is in the book, pinned by its loader, and its bytes count from now on.
    The owner's section must be in the book: `publish` comes first.
    """
    wanted = request.lease
    lease = book.lease(wanted.owner, wanted.name)

    # An answer that was written but never heard (an interrupt, a lost reply) is given again.
    if lease and lease.key == request.key and lease.phase is Phase.ARRIVING:
        return book, Grant(lease, (_arrival(lease),), "granted before")
    if steps := unfinished_steps(book, wanted.owner, request.key):
        return book, Wait(
            "; ".join(f"{_name(step.lease)} was to step aside" for step in steps), steps
        )

    # 1. settled here already
    if lease and lease.phase is Phase.SETTLED and (lease.on_device or lease.kind == "block"):
        return _without_ticket(book, request), Grant(
            lease, (), f"{lease.name} is on {lease.where} already"
        )

    # 2. on its way in or out
    if lease and lease.phase is not Phase.SETTLED:
        going = "arriving" if lease.phase is Phase.ARRIVING else "stepping aside"
        return _line_up(book, request, world, Wait(f"{lease.name} is {going}"), ())

    if lease:  # it lies in host memory: what it needs was measured there
        room_for_use = (part for part in request.footprint.parts if part.for_use)
        measured = (Part("weights", lease.bytes, "measured"), *room_for_use)
        request = replace(request, footprint=replace(request.footprint, parts=measured))

    # 3. hopeless, or beyond the operator's caps
    out = drained(book, world)
    never = {
        **drained_cards(request, world, out),
        **quotas.capped_cards(book, request, world),
        **hopeless_cards(book, request, world),
    }
    request = _with_layout(request, world, never)
    if refusal := quotas.refusal(book, request, world) or hopeless(book, request, world, never):
        return _refuse(book, request, world, refusal)

    # 4. fits in what is free
    ground = Context.of(book, request, world)
    candidates = _candidates(book, request, world, ground, out)
    possible = tuple(
        [c for c in candidates if len(c.shares) > 1 or c.shares[0].device not in never]
    )
    in_sight = _not_on(ground.blind, possible)
    if in_sight and in_sight[0].fits:
        return _grant(book, request, world, in_sight[0], candidates)

    # 5. fits once idle leases have left (and nobody leaves for whom the page has no room to wait)
    if not _full(book, request) and not _twin(ground, request):
        alone = tuple([candidate for candidate in in_sight if len(candidate.shares) == 1])
        if way := cheapest_way(book, request, world, rank, ground, alone):
            emptier, wait = make_room(book, request, world, ground, way)
            return _line_up(emptier, request, world, wait, way.candidate.shares)

    # 6. deadlocked
    if not possible:  # only several cards together can hold it
        possible = candidates = (*_at_best(book, request, world), *candidates)
    wait = replace(
        _what_stands_in_the_way(book, request, world, ground, possible), considered=candidates
    )
    queued, verdict = _line_up(
        book, request, world, wait, () if _twin(ground, request) else possible[0].shares
    )
    if isinstance(verdict, Wait) and request.wait and (cycle := deadlocked(queued, world)):
        youngest = max(cycle, key=lambda ticket: (ticket.arrived, ticket.key))
        if youngest.key == request.key:
            names = ", ".join(
                f"{t.name} waits while its thread holds {_names(t.held)}" for t in cycle
            )
            return _refuse(
                book,
                request,
                world,
                Refuse(
                    f"waiting would never end: {names}",
                    kind="deadlock",
                    need_bytes=request.footprint.bytes,
                ),
            )

    # 7. otherwise
    return queued, verdict


def _with_layout(request: Request, world: World, never: Container[str]) -> Request:
    """The request with `auto` decided, and `whole`: one card, where one could ever hold it, else several."""
    rules = request.placement
    if rules.layout not in ("auto", "whole"):
        return request
    alone = one_card_may_do(rules) and any(
        card.id not in never
        for card in world.devices
        if not card.is_host and (not rules.devices or card.id in rules.devices)
    )
    if rules.layout == "whole":
        return replace(request, placement=replace(rules, most_cards=1)) if alone else request
    return replace(request, placement=replace(rules, layout="single" if alone else "proportional"))


def _candidates(
    book: Book, request: Request, world: World, ground: Context, out: Mapping[str, str]
) -> tuple[Candidate, ...]:
    """Where it may go as things stand, the best first; drained cards stand last, and say so."""
    rules, free = request.placement, ground.free()
    if out:
        free = {device: size for device, size in free.items() if device not in out}
    drained_ = tuple(
        [
            Candidate((Share(id, request.footprint.bytes),), False, because)
            for id, because in out.items()
            if not rules.devices or id in rules.devices
        ]
    )
    if (
        rules.layout == "single" and not rules.factor
    ):  # a card alone, and no more of it than is needed
        return _kept(place(request.footprint, free, rules), ground) + drained_
    limits = {device: limit_of(book, world, device) for device in free}
    found = place(request.footprint, free, rules, limits)
    if ground.blind or ground.mine is not None:  # a sum of what each card may give
        alone = tuple([c for c in found if len(c.shares) == 1])
        seen = {device: size for device, size in free.items() if device not in ground.blind}
        several = (
            ()
            if alone and alone[0].fits or not could_split(rules)
            else tuple(
                [
                    c
                    for c in split(request.footprint, seen, rules, limits)
                    if ground.mine is None or sum(share.bytes for share in c.shares) <= ground.mine
                ]
            )
        )
        found = several + alone
    return _kept(found, ground) + drained_


def _kept(candidates: tuple[Candidate, ...], ground: Context) -> tuple[Candidate, ...]:
    """The candidates, and of those without room what is kept there for others: it looks free to everybody else."""
    return tuple(
        [
            c
            if c.fits or not (kept := _kept_for_others(ground, c.shares))
            else replace(c, because=f"{c.because}; {kept}")
            for c in candidates
        ]
    )


def _kept_for_others(ground: Context, shares: Shares) -> str:
    """Who comes first on these cards, and how much of what is free there waits for them; empty where nothing does."""
    if not ground.stands:
        return ""
    cards = {share.device for share in shares}
    first = [
        ticket for ticket in ground.stands if any(share.device in cards for share in ticket.need)
    ]
    kept = sum(
        max(0, ground.now.get(card, 0)) - max(0, ground.later.get(card, 0)) for card in cards
    )
    if not first or kept <= 0:
        return ""
    who = f" and {len(first) - 1} more, which come" if len(first) > 1 else ", which comes"
    return f"{show_bytes(kept)} are kept for {first[0].name}{who} first"


def _at_best(book: Book, request: Request, world: World) -> tuple[Candidate, ...]:
    """The division that it waits for, where none can be had now."""
    found = at_best(book, request, world)
    if isinstance(found, Refuse):
        return ()
    return (replace(found, fits=False, because=f"{where(found.shares)} have too little free"),)


def _not_on(cards: Container[str], candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    return (
        tuple(c for c in candidates if not any(share.device in cards for share in c.shares))
        if cards
        else candidates
    )


# -- the answers --------------------------------------------------------------------------------------------------


def _arrival(lease: Lease, because: str = "granted before") -> Step:
    going = lease.filled or lease.target  # a whole card is claimed, and what is loaded is the model
    if lease.shares:
        return Move(lease.id, lease.shares, going, because)
    return Load(lease.id, going, because)


def _grant(
    book: Book, request: Request, world: World, chosen: Candidate, considered: tuple[Candidate, ...]
) -> tuple[Book, Verdict]:
    wanted = request.lease
    old = book.lease(wanted.owner, wanted.name)
    if old is None and _full(book, request):
        return _refuse(book, request, world, _no_place(request))
    lease = replace(
        old or wanted,
        key=request.key,
        target=chosen.shares,
        filled=chosen.filled,
        phase=Phase.ARRIVING,
        working_bytes=request.footprint.working_bytes,
        pins=1,
        pinned_since=world.now,
        last_used=world.now,
        importance=wanted.importance,
        keep_alive=wanted.keep_alive,
    )
    because = f"{lease.name} needs {show_bytes(request.footprint.bytes)}; {chosen.because}."
    book = _without_ticket(book, request).with_lease(lease)
    book = note(
        book,
        world,
        lease,
        "granted",
        "request",
        because,
        size=request.footprint.bytes,
        device=chosen.shares[0].device,
    )
    return book, Grant(lease, (_arrival(lease, because),), because, considered)


def _refuse(book: Book, request: Request, world: World, refusal: Refuse) -> tuple[Book, Verdict]:
    book = _without_ticket(book, request)
    return note(
        book,
        world,
        request.lease,
        "refused",
        refusal.kind,
        refusal.because,
        size=request.footprint.bytes,
        device=refusal.device,
    ), refusal


def _no_place(request: Request) -> Refuse:
    return Refuse(
        f"the book is full: {MOST_ENTRIES} leases and requests",
        kind="full",
        need_bytes=request.footprint.bytes,
    )


def _full(book: Book, request: Request) -> bool:
    """Whether the page has no room for this request's ticket."""
    return book.entries >= MOST_ENTRIES and book.ticket(request.key) is None


def _without_ticket(book: Book, request: Request) -> Book:
    return book.without_ticket(request.key) if book.ticket(request.key) else book


def _line_up(
    book: Book, request: Request, world: World, wait: Wait, need: Shares
) -> tuple[Book, Verdict]:
    """The book with the request's ticket in it. `need` is the room it waits for."""
    if not request.wait:
        return book, wait
    if _full(book, request):
        return _refuse(book, request, world, _no_place(request))
    old = book.ticket(request.key)
    blocked = bool(wait.blockers) and not wait.asked and not wait.steps
    since = (old.blocked_since if old and old.blocked_since else world.now) if blocked else 0.0
    asked_since = old.recalled_since if old and old.recalls == wait.asked else world.now
    ticket = Ticket(
        key=request.key,
        owner=request.lease.owner,
        verb="use",
        name=request.lease.name,
        arrived=request.arrived,
        refreshed=world.now,
        importance=request.lease.importance,
        need=need,
        places=request.placement.devices,
        layout=request.placement.layout if len(need) > 1 else "",
        recalls=wait.asked,
        recalled_since=asked_since if wait.asked else 0.0,
        held=request.held,
        blocked_since=since,
        because=(old.because if old else "") if wait.steps else wait.because,
    )
    if ticket.because and not (
        old and old.because
    ):  # once a wait, and not while room is only being made
        book = note(
            book,
            world,
            request.lease,
            "waiting",
            "request",
            wait.because,
            size=request.footprint.bytes,
        )
    return book.with_ticket(ticket), wait


# -- what stands in the way, in words -----------------------------------------------------------------------------


def _twin(ground: Context, request: Request) -> Ticket | None:
    """An elder's ticket for this very model: room is made for it once, not twice."""
    return next(
        (
            t
            for t in ground.stands
            if t.owner == request.lease.owner and t.name == request.lease.name
        ),
        None,
    )


def _what_stands_in_the_way(
    book: Book, request: Request, world: World, ground: Context, candidates: tuple[Candidate, ...]
) -> Wait:
    """Who is in the way on the nearest card, and when time alone may have changed it there or on another."""
    ahead = len(ground.elders)
    if _twin(ground, request):
        return Wait(
            f"{request.lease.name} is waited for by another thread of this process already",
            ahead=ahead,
        )
    wanted, cards = (
        request.lease,
        [share.device for candidate in candidates for share in candidate.shares],
    )
    nearest = {share.device: share.bytes for share in candidates[0].shares}
    card = cards[0]
    over_own_limit = ground.mine is not None and ground.mine < request.footprint.bytes
    blockers, told, retry, leased = (
        [],
        [],
        [],
        False,
    )  # leased: some lease of ours is what stands in the way
    for lease in ground.leases:
        on = {share.device for share in lease.claims()}
        why = reason_to_stay(lease, world, asker=wanted.owner, importance=wanted.importance)
        if why in ("just used", "kept alive") and on.intersection(cards):
            retry.append(lease.last_used + _quiet_seconds(lease, wanted, world))
        if on.intersection(nearest) or (
            over_own_limit and lease.owner == wanted.owner and lease.on_device
        ):
            if why in ("in use", "a block of code") or lease.phase is Phase.ARRIVING:
                blockers.append(lease.id)
            leased = leased or bool(why) or not lease.droppable
            told.append(
                f"{lease.name} ({show_bytes(lease.bytes)} on {lease.where if lease.shares else card}) "
                + _in_words(book, lease, why, wanted, world, ground)
            )
    if kept := _kept_for_others(ground, candidates[0].shares):
        told.insert(0, kept)
    if not told and ahead:
        told.append(f"{ahead} request{'s come' if ahead > 1 else ' comes'} first")
    if unseen := [ground.blind[card] for card in nearest if card in ground.blind]:
        told, retry = unseen, [*retry, world.now + LOOK_SECONDS]
    elif not leased and not ahead:
        told, retry = (
            [*told, _strangers(candidates[0].shares, ground)],
            [*retry, world.now + LOOK_SECONDS],
        )
    return Wait(
        _few(told), blockers=tuple(blockers), ahead=ahead, retry_at=min(retry, default=None)
    )


def _few(told: list[str]) -> str:
    """What stands in the way, as far as one reads it: on a crowded card sixty leases may."""
    more = len(told) - MOST_TOLD
    return "; ".join(told if more < 2 else [*told[:MOST_TOLD], f"and {more} more"])


def _quiet_seconds(lease: Lease, wanted: Lease, world: World) -> float:
    """How long after its last use this lease may be asked to leave."""
    grace = world.rules.grace_seconds if lease.owner != wanted.owner else 0.0
    return max(grace, lease.keep_alive if wanted.importance >= lease.importance else 0.0)


def _in_words(
    book: Book, lease: Lease, why: str, wanted: Lease, world: World, ground: Context
) -> str:
    if lease.phase is Phase.ARRIVING and lease.kind == "model":
        return "is being loaded" + _by(book, lease, wanted.owner, world)
    if why == "in use":
        return "is in use" + _by(book, lease, wanted.owner, world)
    if why == "a block of code":
        return "is held by running code" + _by(book, lease, wanted.owner, world)
    if why == "just used":
        return f"was used {show_seconds(lease.idle_seconds(world.now))} ago"
    if why == "kept alive":
        return (
            f"is kept alive for {show_seconds(lease.last_used + lease.keep_alive - world.now)} more"
        )
    if why == "more important":
        return f"is more important (importance {lease.importance}, ours {wanted.importance})"
    if why == "kept":
        return "is kept"
    if why == Phase.LEAVING or lease.id in ground.promised:
        return "is stepping aside"
    if lease.droppable:
        return "would not be enough"
    return "exists nowhere else, and the host has no room for it now"


def _by(book: Book, lease: Lease, asker: str, world: World) -> str:
    owner = book.owner(lease.owner)
    who = f" by {owner.label}" if owner and lease.owner != asker else ""
    since = (
        f" for {show_seconds(world.now - lease.pinned_since)}" if lease.pinned_since and who else ""
    )
    return who + since


def _strangers(shares: Shares, ground: Context) -> str:
    has = "has" if len(shares) == 1 else "have"
    free = sum(max(0, ground.now.get(share.device, 0)) for share in shares)
    return (
        f"{where(shares)} {has} {show_bytes(free)} free as measured, "
        f"{show_bytes(sum(share.bytes for share in shares))} are needed; memory outside our leases is in the way"
    )


def _names(ids: Iterable[str]) -> str:
    return ", ".join(map(_name, ids))


def _name(lease_id: str) -> str:
    return lease_id.partition("/")[2]
