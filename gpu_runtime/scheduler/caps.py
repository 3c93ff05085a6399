"""The operator's limits: caps on a user, and drained cards.

Pure. A cap limits a user's bytes on each card, importance, pinning, the time of a code block, and card-hours.
Every process checks its own requests against the cap of its own user. The memory of all processes
of the user is added up. A block of code that is held for too long is not ended, because its memory
is in use. Until the block ends, the user is granted nothing new. A drained card takes no new
leases; `relief` moves the idle models away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from msgspec.structs import replace

from ..facts import (
    HOST,
    IMPORTANCE,
    OVER_CAP,
    Book,
    Cap,
    Lease,
    Phase,
    Refuse,
    Request,
    Section,
    World,
    importance_name,
)
from ..units import show_bytes, show_seconds
from .capacity import limits_of
from .placement import claim
from .victims import permanent_reason_to_stay

# The importance of all leases and requests of a user beyond the card-hours of a week.
LOWERED = IMPORTANCE["batch"]


def refusal(book: Book, request: Request, world: World) -> Refuse | None:
    """The refusal of `request` if the user's cap forbids it on every card; else None.

    The cap on bytes is not checked here; see `capped_cards`.
    """
    cap = world.rules.cap
    if cap is None:
        return None
    wanted = request.lease
    because = forbidden(wanted.name, wanted.importance, wanted.keep, cap)
    if not because and cap.after_quota == "refuse" and (beyond := beyond_quota(cap)):
        because = f"{wanted.name} is refused: {beyond}"
    overlong = next(overstaying(book, world), None)
    if not because and overlong is not None:
        because = (
            f"{cap.user} may hold a block of code for at most {_longest(cap)}; "
            f"{_held_for(book, overlong, world)}, and until it ends nothing new is granted"
        )
    if not because:
        return None
    return Refuse(because, kind="cap", need_bytes=request.footprint.bytes)


def beyond_quota(cap: Cap) -> str:
    """That the user has used up the card-hours of a week, with both figures; empty if not."""
    most = cap.card_hours_per_week
    if most is None or cap.used_card_hours < most:
        return ""
    return (
        f"{cap.user} has had {cap.used_card_hours:.1f} card-hours in the last seven days, of {most:g} "
        f"({cap.named('card_hours_per_week')})"
    )


def lowered(request: Request, world: World) -> Request:
    """The `request`, of the lowest class of importance if its user has used up the card-hours of a week."""
    cap, wanted = world.rules.cap, request.lease
    if cap is None or wanted.importance >= LOWERED or not beyond_quota(cap):
        return request
    return replace(request, lease=replace(wanted, importance=LOWERED))


def forbidden(name: str, importance: int, keep: bool, cap: Cap | None) -> str:
    """Why `cap` forbids the model `name` with this `importance` and `keep`; empty if allowed.

    `importance` is a number; lower is more important. `keep` is True if the model would be pinned
    to its device.
    """
    if cap is None:
        return ""
    if cap.importance is not None and importance < cap.importance:
        return (
            f"{name} was requested as {_word(importance)}; the highest importance that {cap.user} "
            f"may request is {_word(cap.importance)} ({cap.named('importance')})"
        )
    if keep and not cap.keep:
        return f"{cap.user} may not keep {name} on a device ({cap.named('keep')})"
    return ""


def capped_cards(book: Book, request: Request, world: World) -> dict[str, Refuse]:
    """The cards on which the cap allows the user less than `request` needs, each with the refusal.

    Only the user's leases that cannot leave the card are counted.
    """
    cap = world.rules.cap
    if cap is None or cap.bytes_per_device is None:
        return {}
    most, limits = cap.bytes_per_device, limits_of(book, world)
    found = {}
    for card, left in at_most(book, world).items():
        size = claim(request.footprint, request.placement, limits[card])
        if size <= left:
            continue
        fixed = most - left
        allowed = may_hold(cap, f"on {card}")
        because = f"{request.called} needs {show_bytes(size)}; {cap.user} {allowed}"
        if fixed:
            because += f"; {show_bytes(fixed)} there cannot leave now"
        found[card] = Refuse(because, kind="cap", need_bytes=size, budget_bytes=left, device=card)
    return found


def at_most(book: Book, world: World) -> dict[str, int]:
    """The most bytes that the user could still take on each card after evicting own leases.

    Only the user's leases that cannot leave count as held. The result is empty if the user's bytes
    are not capped.
    """
    free = _left_beside(book, world, lambda lease: _is_fixed(lease, world))
    visible = {device.id for device in world.devices}
    return {card: size for card, size in free.items() if card in visible}


def _is_fixed(lease: Lease, world: World) -> bool:
    """Whether this lease cannot leave its card now."""
    if lease.pins or lease.kind == "block" or lease.phase is Phase.ARRIVING:
        return True
    return bool(permanent_reason_to_stay(lease, world))


def left(book: Book, world: World, *, leaving: bool = True) -> dict[str, int]:
    """Bytes that the user may still take on each card; empty if the user's bytes are not capped.

    If `leaving` is True, bytes that are being moved out count as held.
    """
    return _left_beside(book, world, lambda lease: leaving or lease.phase is not Phase.LEAVING)


def _left_beside(book: Book, world: World, counts: Callable[[Lease], bool]) -> dict[str, int]:
    """The byte cap of each card less the user's leases that count; empty without a byte cap."""
    cap = world.rules.cap
    if cap is None or cap.bytes_per_device is None:
        return {}
    most = cap.bytes_per_device
    free = {device.id: most for device in world.cards}
    for lease in filter(counts, _theirs(book, cap)):
        for share in lease.claims():
            if share.device != HOST:
                free[share.device] = free.get(share.device, most) - share.bytes
    return free


def over_cap(book: Book, world: World) -> dict[str, int]:
    """The bytes that the user holds on each card beyond the cap, on the cards where it is exceeded.

    Plain code takes memory without a request, so a user may exceed the cap. All leases count, also
    those of notebooks, and memory that is known to stay on its card.
    """
    cap = world.rules.cap
    if cap is None or cap.bytes_per_device is None:
        return {}
    beyond = {card: -size for card, size in left(book, world).items()}
    for section in book.sections.values():
        if section.owner.user == cap.user:
            for part in section.staying:
                if part.device in beyond:
                    beyond[part.device] += part.bytes
    return {card: size for card, size in beyond.items() if size > 0}


def over_cap_in_words(beyond: Mapping[str, int], cap: Cap) -> str:
    """The sentence, without its full stop, that the user holds the bytes `beyond` the cap."""
    most = cap.bytes_per_device or 0
    held = ", ".join([f"{show_bytes(most + size)} on {card}" for card, size in beyond.items()])
    return f"{cap.user} holds {held}, and {may_hold(cap, 'of each card')}"


def may_hold(cap: Cap, where: str) -> str:
    """The words that follow the user's name, such as `may hold at most 8.0 GiB of each card (cap [users.ann] …)`."""
    return f"may hold at most {show_bytes(cap.bytes_per_device or 0)} {where} ({cap.named('bytes_per_device')})"


def as_capped(book: Book, section: Section, cap: Cap, world: World) -> Section:
    """The `section`, of a process of the user of the `cap`, as it is published.

    Memory of a user above the cap leaves first when anybody waits, whatever its importance was. Beyond the card-hours
    of a week, it is of the lowest class.
    """
    if section.owner.user != cap.user:
        return section
    if beyond_quota(cap):
        leases = [replace(one, importance=max(one.importance, LOWERED)) for one in section.leases]
        section = replace(section, leases=tuple(leases))
    if cap.bytes_per_device is None:
        return section
    beyond = over_cap(book.with_section(section), world)
    if not beyond:
        return section
    leases = []
    for lease in section.leases:
        if any(share.device in beyond for share in lease.shares) and lease.kind != "block":
            lease = replace(lease, importance=OVER_CAP)
        leases.append(lease)
    holds = any(lease.importance == OVER_CAP for lease in leases) or section.staying
    words = over_cap_in_words(beyond, cap) if holds else ""
    return replace(section, leases=tuple(leases), over_cap=words)


def owners_of(book: Book, cap: Cap | None) -> set[str]:
    """The ids of all processes that the `cap` counts together."""
    return {id for id, section in book.sections.items() if cap and section.owner.user == cap.user}


def overstaying(book: Book, world: World) -> Iterator[Lease]:
    """The user's blocks of code that are held for longer than the cap allows."""
    cap = world.rules.cap
    if cap is None or cap.longest_lease_seconds is None:
        return
    for lease in _theirs(book, cap):
        if lease.kind != "block" or lease.phase is not Phase.SETTLED:
            continue
        if world.now - lease.settled_at > cap.longest_lease_seconds:
            yield lease


def overstay(book: Book, lease: Lease, world: World) -> str:
    """The warning about `lease`, a block of code that is held for longer than the cap allows."""
    cap = world.rules.cap
    assert cap is not None
    return (
        f"{_held_for(book, lease, world)}; {cap.user} may hold one for at most {_longest(cap)}. "
        "Nothing new is granted until it ends."
    )


def _longest(cap: Cap) -> str:
    """The longest time that a block of code may be held, and where the cap is set, as text."""
    return f"{show_seconds(cap.longest_lease_seconds or 0)} ({cap.named('longest_lease')})"


def _held_for(book: Book, lease: Lease, world: World) -> str:
    owner = book.owner(lease.owner)
    of_owner = f" of {owner.label}" if owner else ""
    held = show_seconds(world.now - lease.settled_at)
    return f"{lease.name} ({show_bytes(lease.bytes)}){of_owner} is held for {held}"


def _theirs(book: Book, cap: Cap) -> Iterator[Lease]:
    """The leases of all processes of the cap's user."""
    for section in book.sections.values():
        if section.owner.user == cap.user:
            yield from section.leases


def _word(importance: int) -> str:
    """The text `high (5)` for a class, or `importance 7` for a number between the classes."""
    name = importance_name(importance)
    return f"{name} ({importance})" if name in IMPORTANCE else name


def drained(book: Book, world: World) -> dict[str, str]:
    """Maps each drained card of `world` to a sentence: who drained the card, and when."""
    sentences = {}
    for device in world.devices if book.drained else ():
        mark = book.drained.get(device.key)
        if mark is None:
            continue
        ago = show_seconds(max(0.0, world.wall - mark.wall))
        sentences[device.id] = f"{device.id} was drained by {mark.by} {ago} ago"
    return sentences


def drained_cards(
    request: Request, world: World, sentences: Mapping[str, str]
) -> dict[str, Refuse]:
    """The refusal of `request` on each drained card. `sentences` is the result of `drained`."""
    if not sentences:
        return {}
    size = request.footprint.bytes
    take = "takes" if len(sentences) == 1 else "take"
    because = (
        f"{request.called} needs {show_bytes(size)}; {', '.join(sentences.values())}, "
        f"and {take} nothing new"
    )
    found = {}
    for card in sentences:
        found[card] = Refuse(
            because,
            kind="drained",
            need_bytes=size,
            budget_bytes=world.limits.get(card, 0),
            device=card,
        )
    return found
