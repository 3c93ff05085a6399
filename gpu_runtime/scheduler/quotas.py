"""What the operator allows a user: how much on each card, how important, what may be pinned, and for how long.

Pure. Every process decides about its own requests with its own user's cap; all processes of that user count together.
A block of code that is held for too long is not cut short, since its memory is in use: its user is granted nothing new
until it has ended.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..facts import HOST, IMPORTANCE, Book, Cap, Lease, Phase, Refuse, Request, World
from ..units import show_bytes, show_seconds
from .capacity import limit_of
from .eligibility import permanent_reason_to_stay
from .placement import claim


def refusal(book: Book, request: Request, world: World) -> Refuse | None:
    """Why the user may not ask for this on any card; None where nothing but its size can be in the way."""
    cap = world.rules.cap
    if cap is None:
        return None
    wanted = request.lease
    because = forbidden(wanted.name, wanted.importance, wanted.keep, cap)
    if not because and (late := next(overstaying(book, world), None)):
        because = (
            f"{cap.user} may hold a block of code for at most {show_seconds(cap.longest_lease_seconds or 0)} "
            f"({cap.named('longest_lease')}); {_held_for(book, late, world)}, and until it ends nothing new is "
            "granted"
        )
    return Refuse(because, kind="cap", need_bytes=request.footprint.bytes) if because else None


def forbidden(name: str, importance: int, keep: bool, cap: Cap | None) -> str:
    """Why this user may not hold a model so, wherever it lies; empty where they may."""
    if cap and cap.importance is not None and importance < cap.importance:
        return (
            f"{name} is asked for as {_word(importance)}; the highest importance that {cap.user} may ask for is "
            f"{_word(cap.importance)} ({cap.named('importance')})"
        )
    if cap and keep and not cap.keep:
        return f"{cap.user} may not keep {name} on a device ({cap.named('keep')})"
    return ""


def capped_cards(book: Book, request: Request, world: World) -> dict[str, Refuse]:
    """Cards on which the user may not hold this much, even once all of theirs that can leave has left; and why."""
    cap = world.rules.cap
    if cap is None or cap.bytes_per_device is None:
        return {}
    most = cap.bytes_per_device
    refusals = {}
    for card, left in at_most(book, world).items():
        size, held = (
            claim(request.footprint, request.placement, limit_of(book, world, card)),
            most - left,
        )
        if size <= left:
            continue
        cannot = f"; {show_bytes(held)} there cannot leave now" if held else ""
        refusals[card] = Refuse(
            f"{request.lease.name} needs {show_bytes(size)}; {cap.user} may hold at most {show_bytes(most)} on "
            f"{card} ({cap.named('bytes_per_device')}){cannot}",
            kind="cap",
            need_bytes=size,
            budget_bytes=left,
            device=card,
        )
    return refusals


def at_most(book: Book, world: World) -> dict[str, int]:
    """Bytes that the user may have on each card once all of theirs that can leave has left; nothing without a cap."""
    cap = world.rules.cap
    if cap is None or cap.bytes_per_device is None:
        return {}
    free = {device.id: cap.bytes_per_device for device in world.devices if not device.is_host}
    for lease in _theirs(book, cap):
        if (
            lease.pins
            or lease.kind == "block"
            or lease.phase is Phase.ARRIVING
            or permanent_reason_to_stay(lease, world)
        ):
            for share in lease.claims():
                if share.device in free:
                    free[share.device] -= share.bytes
    return free


def left(book: Book, world: World, *, leaving: bool = True) -> dict[str, int]:
    """Bytes that the user may still take on each card; nothing where there is no such cap.

    Those on their way out count, unless `leaving` is False.
    """
    cap = world.rules.cap
    if cap is None or cap.bytes_per_device is None:
        return {}
    free = {device.id: cap.bytes_per_device for device in world.devices if not device.is_host}
    for lease in _theirs(book, cap):
        if leaving or lease.phase is not Phase.LEAVING:
            for share in lease.claims():
                if share.device != HOST:
                    free[share.device] = free.get(share.device, cap.bytes_per_device) - share.bytes
    return free


def owners_of(book: Book, user: str) -> frozenset[str]:
    """The ids of all processes of that user."""
    return frozenset(id for id, section in book.sections.items() if section.owner.user == user)


def overstaying(book: Book, world: World) -> Iterator[Lease]:
    """The user's blocks of code that are held for longer than the cap allows."""
    cap = world.rules.cap
    if cap is None or cap.longest_lease_seconds is None:
        return
    for lease in _theirs(book, cap):
        if (
            lease.kind == "block"
            and lease.phase is Phase.SETTLED
            and world.now - lease.settled_at > cap.longest_lease_seconds
        ):
            yield lease


def overstay(book: Book, lease: Lease, world: World) -> str:
    """A block that is held for too long, in a sentence."""
    cap = world.rules.cap
    assert cap is not None
    return (
        f"{_held_for(book, lease, world)}; {cap.user} may hold one for at most "
        f"{show_seconds(cap.longest_lease_seconds or 0)} ({cap.named('longest_lease')}). "
        "Nothing new is granted until it ends."
    )


def _held_for(book: Book, lease: Lease, world: World) -> str:
    owner = book.owner(lease.owner)
    by = f" of {owner.label}" if owner else ""
    return f"{lease.name} ({show_bytes(lease.bytes)}){by} is held for {show_seconds(world.now - lease.settled_at)}"


def _theirs(book: Book, cap: Cap) -> Iterator[Lease]:
    for section in book.sections.values():
        if section.owner.user == cap.user:
            yield from section.leases


def _word(importance: int) -> str:
    word = next((word for word, number in IMPORTANCE.items() if number == importance), "")
    return f"{word} ({importance})" if word else f"importance {importance}"
