"""Models move although no request for memory needs that: relief, drained cards, moves on request.

Pure. Relief: idle models leave a device, or the host's memory, that is under pressure; `capacity`
has the rule for each level of pressure.

A drained card takes no new leases, and its idle models leave. The mark of a drained card is stored
in the book (all leases and requests of a host) under the card's UUID. The mark belongs to no owner.
So the drain continues after the terminal in which the operator typed the command is closed.
`owner/operations.py` checks whether a user may drain a card. Each owner moves its own tensors.

A move takes a model from its cards to other cards on request, without a stay in host memory. It
spends only free bytes; nothing is evicted for a move. Until the move is done, the bytes on the old
cards and the bytes reserved on the new cards both count in full. On a card that is both old and
new, the model's bytes therefore count twice.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from msgspec.structs import replace

from ..facts import (
    ENGINES,
    HOST,
    KERNEL,
    Book,
    Device,
    DeviceView,
    Drain,
    Drop,
    Footprint,
    Lease,
    Level,
    Move,
    Phase,
    PlacementRules,
    Policy,
    Refuse,
    Request,
    Share,
    Shares,
    Shed,
    Step,
    World,
    where,
)
from ..units import show_bytes, show_seconds
from .capacity import level, pressure, relief, room, views
from .caps import drained
from .feasibility import why_no_return
from .placement import place
from .policies import lru
from .queue import Context
from .transitions import note
from .victims import (
    PERSON,
    copied_bytes,
    enough_shadows,
    eviction_order,
    eviction_step,
    held_shadows,
    host_room_for,
    mark_leaving,
    needs_host_room,
    part_of,
    reason_to_stay,
    shed_step,
)

FULL = (Level.HIGH, Level.CRITICAL)
KERNEL_IDLE_SECONDS = 1.0  # a kernel whose last cell ended this long ago may leave an overfull card


def relieve(
    book: Book, owner: str, world: World, rank: Policy, key: str
) -> tuple[Book, tuple[Move | Drop | Shed, ...]]:
    """The book in which idle models of `owner` leave overfull devices, and the steps.

    For the host, only the measured memory counts, because idle models may fill the host's budget.
    If the host is overfull, shadows are freed first. A model in host memory is dropped, if the
    model's source can load it again.

    `rank` orders the leases of equal importance, the lowest first. `key` is stored in the leaving
    leases.

    `world.rules.relief` is one of these:

    - `always`: a model leaves once it has been idle for the time in the table of `capacity`.
    - `auto`: models leave a device only while a request waits for room there, or while the device
      is at the level HIGH or CRITICAL and holds memory outside the leases. Eviction stops at the
      level LOW; bytes that are already leaving count as gone. If host memory has room, models are
      offloaded and not dropped, at every level.
    - `never`: nothing leaves.
    """
    rules = world.rules
    if rules.relief == "never" or owner not in book.sections:
        return book, ()
    steps: list[Move | Drop | Shed] = []
    host_room = room(book, world).get(HOST, 0)
    for view in _under_pressure(book, world):
        freed = _leaving_bytes(book.leases(), view.device.id)
        if view.device.is_host:
            copies = _shadows_to_free(book, owner, view, freed, world, rank)
            freed += sum(copy.source[0].bytes for copy in copies)
            steps += copies
        for lease in _in_order(book.sections[owner].leases, view, world, rank):
            at = _level_now(view, freed, world)
            if relief(at, rules) is None:
                break
            for step in _steps(book, lease, at, view, freed, host_room, world, rank):
                steps.append(step)  # a Shed frees host memory: this lease leaves at a later call
                host_room -= copied_bytes(lease, step)
                freed += sum(share.bytes for share in step.source if share.device == view.device.id)
                book = mark_leaving(book, step, key)
    return book, tuple(steps)


def _under_pressure(book: Book, world: World) -> Iterator[DeviceView]:
    """The devices that idle models should leave."""
    for view in views(book, world):
        if view.device.is_host:
            view = _without_claims(view, world)
        helps = world.rules.relief == "always" or _helps(book, view)
        if helps and relief(view.level, world.rules) is not None:
            yield view


def pressed(book: Book, world: World, rank: Policy) -> set[str]:
    """The ids of the owners for which `relieve` or `park_kernels` has a step now.

    One owner looks for all: those that sleep long are to be woken.
    """
    cards = [view for view in views(book, world) if not view.device.is_host]
    is_overfull = any(view.claimed_bytes > view.limit_bytes for view in cards)
    if not (is_overfull or any(_under_pressure(book, world))):
        return set()
    acts = (relieve, park_kernels)
    return {id for id in book.sections if any(act(book, id, world, rank, "")[1] for act in acts)}


def park_kernels(
    book: Book, owner: str, world: World, rank: Policy, key: str
) -> tuple[Book, tuple[Move | Drop | Shed, ...]]:
    """The book in which the kernel of `owner` leaves an overfull card, and the step that evicts it.

    The kernel is the lease on the memory of a notebook's own code. A notebook's code takes memory
    without a request to the ledger. So a card may hold more than its limit, until idle kernels have
    left. As many kernels leave as needed, in the order of `rank`, but each owner evicts only its
    own kernel. If host memory is too full for the kernel, the steps free shadows instead, and a
    later call evicts the kernel. `key` is stored in the leaving lease.
    """
    if world.rules.relief == "never" or owner not in book.sections:
        return book, ()
    host_room = room(book, world).get(HOST, 0)
    for view in views(book, world):
        excess = (
            view.claimed_bytes - view.limit_bytes - _leaving_bytes(book.leases(), view.device.id)
        )
        if view.device.is_host or excess <= 0:
            continue
        kernels = [lease for lease in book.leases() if _is_idle_kernel(lease, world)]
        for lease in _in_order(kernels, view, world, rank):
            if excess <= 0:
                break
            excess -= lease.bytes_on(view.device.id)
            if lease.owner != owner:
                continue
            because = f"{view.device.id} holds more than its limit."
            steps = _departure(book, lease, host_room, world, rank, because)
            for step in steps:
                if isinstance(step, Shed):
                    return book, steps
                if not why_no_return(book, lease, world):
                    return mark_leaving(book, step, key), (step,)
    return book, ()


def overfull(book: Book, owner: str, cards: Iterable[str]) -> bool:
    """Whether other owners have memory on one of the `cards` that holds more than its limit.

    Bytes that are already leaving the card do not count.
    """
    claims = book.claims()
    for card in cards:
        held = claims.get(card, 0) - _leaving_bytes(book.leases(), card)
        own = book.sections[owner].claims().get(card, 0) if owner in book.sections else 0
        if held > book.limits.get(card, held) and held > own:
            return True
    return False


def _is_idle_kernel(lease: Lease, world: World) -> bool:
    if lease.kind != KERNEL or lease.idle_seconds(world.now) < KERNEL_IDLE_SECONDS:
        return False
    why = reason_to_stay(lease, world, asker=lease.owner, importance=lease.importance)
    return not why


def _steps(
    book: Book,
    lease: Lease,
    at: Level,
    view: DeviceView,
    freed: int,
    host_room: int,
    world: World,
    rank: Policy,
) -> tuple[Move | Drop | Shed, ...]:
    """The step by which this lease leaves the device at the level `at`; empty if the lease stays.

    If host memory is too full, the steps free shadows instead. `freed` bytes are leaving already.
    """
    demand = relief(at, world.rules)
    assert demand is not None
    # These evictions serve no request, so they respect the grace period of every owner. A model
    # leaves by itself, and so only after its `keep_alive`.
    if reason_to_stay(lease, world, asker="", importance=lease.importance):
        return ()
    idle = lease.idle_seconds(world.now)
    if idle <= demand.idle_seconds or idle < lease.keep_alive:
        return ()
    on_host = view.device.is_host
    if on_host and (not lease.droppable or lease.kept_on_disk):
        return ()  # the rest of a lease in parts must not follow to the host
    full = _pressure_after(view, freed)
    if world.rules.relief == "auto" and not on_host:
        lease = part_of(lease, _excess_bytes(view, freed, world))
    because = f"{at} memory pressure on {view.device.id} ({full:.1%}); idle {show_seconds(idle)}."
    drops = on_host or (demand.drop and world.rules.relief == "always")
    steps = _departure(book, lease, host_room, world, rank, because, drop=drops)
    return tuple(step for step in steps if demand.may_drop or not isinstance(step, Drop))


def _departure(
    book: Book,
    lease: Lease,
    host_room: int,
    world: World,
    rank: Policy,
    because: str,
    reason: str = "memory_pressure",
    *,
    drop: bool = False,
) -> tuple[Move | Drop | Shed, ...]:
    """The step by which the lease, or its `target`, leaves its device; empty if it cannot leave.

    If host memory is too full for the lease, the steps free shadows instead, where that is enough.
    """
    step = eviction_step(lease, host_room, world, drop=drop, because=because, reason=reason)
    if not drop and not isinstance(step, Move):
        found = host_room_for(book, lease, host_room, world, rank, owner=lease.owner)
        if found and found[0]:
            return tuple([shed_step(other, because, reason) for other in found[0]])
    return (step,) if step else ()


def _without_claims(view: DeviceView, world: World) -> DeviceView:
    """The view of the host, with the level of its measured memory only; LOW if not measured."""
    used, total = view.measured_bytes or 0, view.device.total_bytes
    full = 0.0 if view.device.simulated or not total else used / total
    return replace(view, claimed_bytes=0, pressure=full, level=level(full, world.rules))


def _shadows_to_free(
    book: Book, owner: str, view: DeviceView, freed: int, world: World, rank: Policy
) -> list[Shed]:
    """The steps that free shadows of this `owner` until the host is below the level HIGH.

    If these are too few, its parked bytes move to a disk.
    """
    if view.level not in FULL:
        return []
    excess = (view.measured_bytes or 0) - freed - world.rules.high * view.device.total_bytes
    able = held_shadows(book, owner=owner, to_disk=True)
    found = enough_shadows(able, int(excess) + 1, world, rank)
    because = f"{view.level} memory pressure on {HOST} ({view.pressure:.1%})."
    return [shed_step(lease, because, "memory_pressure") for lease in found]


def _excess_bytes(view: DeviceView, freed: int, world: World) -> int:
    """The bytes that must leave the card until its level of pressure is LOW."""
    least = world.rules.moderate
    excess = view.claimed_bytes - freed - least * view.limit_bytes
    if view.measured_bytes is not None:
        measured = view.measured_bytes - freed - least * view.device.total_bytes
        excess = max(excess, measured)
    return int(excess) + 1


def _in_order(leases: Iterable[Lease], view: DeviceView, world: World, rank: Policy) -> list[Lease]:
    """The leases on this card in the order in which they leave."""
    there = [lease for lease in leases if lease.bytes_on(view.device.id)]
    return eviction_order(there, world, rank)


def _leaving_bytes(leases: Iterable[Lease], device: str) -> int:
    """Bytes on the device that leases free by leaving it now."""
    shares = [share for lease in leases for share in lease.freed_soon({})]
    return sum(share.bytes for share in shares if share.device == device)


def _helps(book: Book, view: DeviceView) -> bool:
    """Whether room on this device is needed.

    Room is needed if a request waits for it, or if the device is nearly full and holds memory
    outside the leases.
    """
    for ticket in book.tickets:
        if ticket.verb == "use" and any(share.device == view.device.id for share in ticket.need):
            return True
    strangers = (view.measured_bytes or 0) - view.claimed_bytes
    return not view.device.simulated and strangers > 0 and view.level in FULL


def _level_now(view: DeviceView, freed: int, world: World) -> Level:
    """The level of pressure to act on: the level after the `freed` bytes have left.

    With the setting `always`, the result is the present level, at which the `freed` bytes still
    count.
    """
    if world.rules.relief == "always":
        return view.level
    return level(_pressure_after(view, freed), world.rules)


def _pressure_after(view: DeviceView, freed: int) -> float:
    used = None if view.measured_bytes is None else view.measured_bytes - freed
    return pressure(view.claimed_bytes - freed, view.limit_bytes, used, view.device.total_bytes)


# -- drained cards ---------------------------------------------------------------------------------


def drain(book: Book, device: Device, by: str, world: World) -> Book:
    """The book with `device` marked as drained; the same book if `device` is drained already.

    `by` is the user who drains the device.
    """
    if device.key in book.drained:
        return book
    marks = {**book.drained, device.key: Drain(by, world.wall)}
    because = f"{by} drained {device.id}: no request gets room on it, and its idle models leave."
    return _noted(replace(book, drained=marks), world, device, "drained", because, by)


def undrain(book: Book, device: Device, by: str, world: World) -> Book:
    """The book without the mark that `device` is drained; the same book if there is no mark.

    `by` is the user who ends the drain.
    """
    if device.key not in book.drained:
        return book
    marks = {key: mark for key, mark in book.drained.items() if key != device.key}
    because = f"{by} ended the drain of {device.id}: it can be used again."
    return _noted(replace(book, drained=marks), world, device, "undrained", because, by)


def _noted(book: Book, world: World, device: Device, action: str, because: str, by: str) -> Book:
    lease = Lease("", device.id)
    return note(book, world, lease, action, "drain", because, device=device.id, by=by)


def vacate(book: Book, owner: str, world: World, key: str) -> tuple[Book, tuple[Step, ...]]:
    """The book in which idle models of `owner` leave drained cards, and the steps to carry out.

    A model in use leaves at a later call, once it is idle. A model marked `keep` leaves once the
    mark is removed. If host memory is too full for a model, the steps may free shadows (copies in
    host memory of models on a card). The model then leaves at a later call. `key` identifies this
    decision and is stored in the leaving leases.
    """
    cards = drained(book, world)
    section = book.sections.get(owner)
    if section is None or not cards:
        return book, ()
    steps: list[Step] = []
    host_room = room(book, world).get(HOST, 0)
    # Leases that cannot be dropped are first, because they need host memory.
    for lease in sorted(_leases_on(section.leases, cards), key=lambda lease: lease.droppable):
        if reason_to_stay(lease, world, asker=owner, importance=PERSON):
            continue
        card = next(share.device for share in lease.shares if share.device in cards)
        for step in _departure(book, lease, host_room, world, lru, f"{cards[card]}.", "drain"):
            steps.append(step)  # a Shed frees host memory: this lease leaves at a later call
            host_room -= copied_bytes(lease, step)
            book = mark_leaving(book, step, key)
    return book, tuple(steps)


def has_leases_on_drained(book: Book, owner: str, world: World) -> bool:
    """Whether `owner` has a lease on a drained card."""
    section = book.sections.get(owner)
    if section is None or not book.drained:
        return False
    return bool(_leases_on(section.leases, drained(book, world)))


def staying(book: Book, card: str, world: World) -> list[tuple[Lease, str]]:
    """The leases still on `card`, each with the reason why it stays.

    The reason is empty for a lease that can leave.
    """
    host_room = room(book, world).get(HOST, 0)
    there = _leases_on(book.leases(), (card,))
    return [(lease, _why_it_stays(lease, host_room, world)) for lease in there]


def _why_it_stays(lease: Lease, host_room: int, world: World) -> str:
    why = reason_to_stay(lease, world, asker=lease.owner, importance=PERSON)
    if not why and eviction_step(lease, host_room, world) is None:
        return needs_host_room(lease)
    return "" if why == Phase.LEAVING else why


def _leases_on(leases: Iterable[Lease], cards: Container[str]) -> list[Lease]:
    """The leases that claim memory on any of the `cards` (ids)."""
    return [lease for lease in leases if any(share.device in cards for share in lease.claims())]


# -- moves to other cards --------------------------------------------------------------------------


_NO_CAP = 1 << 62


def move(
    book: Book,
    owner: str,
    name: str,
    footprint: Footprint,
    rules: PlacementRules,
    world: World,
    key: str,
    because: str,
) -> tuple[Book, Move | Refuse | None]:
    """The book with the lease moving to the cards of `rules`, and the step for the move.

    `owner` and `name` identify the lease. `footprint` is the size of the model. `key` identifies
    this decision and is stored in the lease. `because` is the end of the step's sentence.

    The step is None if the lease is on exactly these cards already. A Refuse leaves the book
    unchanged. A Refuse has one of these reasons:

    - The lease is not entirely on cards, is arriving or leaving, or is a block of code.
    - The lease is in use or kept, its last move failed just now, or its backend cannot move it.
    - A card has no room, is drained, capped, or cannot be measured.
    - The model cannot be divided over exactly these cards.
    """
    lease = book.lease(owner, name)
    if lease is None or not lease.all_on_device:
        return book, Refuse(f"{name} is on no card", kind="away")
    if {share.device for share in lease.shares} == set(rules.devices):
        return book, None
    stays = reason_to_stay(lease, world, asker=owner, importance=PERSON)
    if stays:
        kind = "in use" if stays in ("in use", "kept") else "busy"
        return book, Refuse(stays, kind=kind, holders=(lease.id,))
    if not lease.movable or lease.backend in ENGINES:  # an engine moves to host memory and back
        fixed = f"{name} cannot be moved: its backend {lease.backend} can only load it again"
        return book, Refuse(fixed, kind="fixed")
    found = _shares(book, lease, footprint, rules, world)
    if isinstance(found, str):
        return book, Refuse(
            f"{name} needs {show_bytes(footprint.bytes)}; {found}",
            need_bytes=footprint.bytes,
            device=rules.devices[0],
            holders=_holders(book, rules.devices),
        )
    step = Move(
        lease.id,
        source=lease.shares,
        shares=found,
        because=f"{name} moved from {lease.where} to {where(found)}, {because}.",
        reason="move",
    )
    return mark_leaving(book, step, key), step


def _shares(
    book: Book, lease: Lease, footprint: Footprint, rules: PlacementRules, world: World
) -> Shares | str:
    """The model's bytes on each card of `rules`, or the reason why these cards cannot hold it."""
    request = Request("", replace(lease, target=()), footprint, world.now, rules, wait=False)
    context = Context(book, request, world)
    blocked = {**drained(book, world), **context.blind}
    for card in rules.devices:
        if card in blocked:
            return blocked[card]
    free = {card: _free_bytes(card, context) for card in rules.devices}
    limits = {card: book.limits.get(card, world.limits.get(card, 0)) for card in rules.devices}
    on_all_cards = [
        candidate
        for candidate in place(footprint, free, rules, limits)
        if {share.device for share in candidate.shares} == set(free)
    ]
    for candidate in on_all_cards:
        if candidate.fits:
            return candidate.shares
    if on_all_cards:
        return on_all_cards[0].because
    cards = where(tuple(Share(card, 1) for card in rules.devices))
    return f"it cannot be divided over {cards}"


def _free_bytes(card: str, context: Context) -> int:
    """Bytes that a move may use on this card: free, within the cap, and not reserved for requests ahead."""
    return min(
        context.room_now.get(card, 0),
        context.room_later.get(card, 0),
        context.cap_left.get(card, _NO_CAP),
    )


def _holders(book: Book, cards: tuple[str, ...]) -> tuple[str, ...]:
    """Ids of the leases on these cards, the largest first."""
    there = sorted(_leases_on(book.leases(), cards), key=lambda lease: -lease.bytes)
    return tuple(lease.id for lease in there)


def parse_cards(text: str) -> tuple[str, ...]:
    """The cards in `text`, separated by commas. A bare number has the kind of the card before it.

    >>> parse_cards("cuda:1"), parse_cards("cuda:0,1"), parse_cards("sim:0, sim:2")
    (('cuda:1',), ('cuda:0', 'cuda:1'), ('sim:0', 'sim:2'))
    """
    cards: list[str] = []
    for part in text.split(","):
        word = part.strip()
        if not word:
            continue
        kind = cards[-1].rpartition(":")[0] if cards and word.isdigit() else ""
        cards.append(f"{kind}:{word}" if kind else word)
    return tuple(dict.fromkeys(cards))
