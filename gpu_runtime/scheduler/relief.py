"""Relief: idle models leave a device that is under pressure."""

from __future__ import annotations

from ..facts import (
    HOST,
    Book,
    DeviceView,
    Drop,
    Lease,
    Level,
    Move,
    Phase,
    Policy,
    Step,
    World,
)
from ..units import show_seconds
from .capacity import room
from .eligibility import eviction_step, mark_leaving, reason_to_stay
from .pressure import level, pressure, relief, views


def relieve(
    book: Book, owner: str, world: World, rank: Policy, key: str
) -> tuple[Book, tuple[Step, ...]]:
    """What this owner moves out because its devices are too full.

    `always` is the table to the letter: everything idle for long enough leaves. `auto` acts only while it helps
    someone (requests wait, or memory that nobody leased grows on the card), takes no more than brings the level
    down, and prefers the host to the disk at every level. Bytes on their way out count as gone.
    """
    rules = world.rules
    if rules.relief == "never" or owner not in book.sections:
        return book, ()
    steps: list[Step] = []
    host_room = room(book, world).get(HOST, 0)
    for view in views(book, world):
        card = view.device
        if card.is_host or (rules.relief == "auto" and not _helps(book, view)):
            continue
        going = sum(
            share.bytes
            for lease in book.leases()
            if lease.phase is Phase.LEAVING
            for share in lease.shares
            if share.device == card.id
        )
        freed = going
        idle = sorted(
            (lease for lease in book.sections[owner].leases if _on(lease, card.id)),
            key=lambda lease: (-lease.importance, rank(lease, world)),
        )
        for lease in idle:
            at = (
                view.level
                if rules.relief == "always"
                else level(_pressure_after(view, freed), rules)
            )
            asks = relief(at, rules)
            if asks is None:
                break
            # Background evictions respect grace and keep_alive whoever owns the lease: pressure is no request.
            if (
                reason_to_stay(lease, world, asker="", importance=lease.importance)
                or lease.idle_seconds(world.now) <= asks.idle_seconds
            ):
                continue
            because = (
                f"{at} memory pressure on {card.id} ({_pressure_after(view, freed):.1%}); idle "
                f"{show_seconds(lease.idle_seconds(world.now))}."
            )
            drop = asks.drop and rules.relief == "always"
            exit = eviction_step(
                lease, host_room, world, drop=drop, because=because, reason="memory_pressure"
            )
            if exit is None or (isinstance(exit, Drop) and not asks.may_drop):
                continue
            if isinstance(exit, Move):
                host_room -= lease.own_bytes
            freed += sum(share.bytes for share in lease.shares if share.device == card.id)
            book = mark_leaving(book, exit, key)
            steps.append(exit)
    return book, tuple(steps)


def _on(lease: Lease, device: str) -> bool:
    return any(share.device == device for share in lease.shares)


def _helps(book: Book, view: DeviceView) -> bool:
    """Whether anybody gains if this card empties a little: somebody waits for it, or strangers grow on it."""
    waits = any(
        share.device == view.device.id
        for ticket in book.tickets
        if ticket.verb == "use"
        for share in ticket.need
    )
    strangers = (view.measured_bytes or 0) - view.claimed_bytes
    grows = (
        not view.device.simulated and strangers > 0 and view.level in (Level.HIGH, Level.CRITICAL)
    )
    return waits or grows


def _pressure_after(view: DeviceView, freed: int) -> float:
    used = None if view.measured_bytes is None else view.measured_bytes - freed
    return pressure(view.claimed_bytes - freed, view.limit_bytes, used, view.device.total_bytes)
