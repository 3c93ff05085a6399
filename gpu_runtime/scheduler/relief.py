"""Relief: idle models leave a device, or the host's memory, that is under pressure.

Pure. `pressure.py` holds the rule for each level of pressure. A shadow is an unchanged copy in host
memory of a model that is on a card.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

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
    Shed,
    World,
)
from ..units import show_seconds
from . import shadows
from .capacity import room
from .evictable import copied_bytes, eviction_step, mark_leaving, reason_to_stay
from .feasibility import why_no_return
from .pressure import level, pressure, relief, views
from .victims import part_of, worth

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

    - `always`: a model leaves once it has been idle for the time in the table of `pressure`.
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
    for view in views(book, world):
        if view.device.is_host:
            view = _without_claims(view, world)
        if rules.relief == "auto" and not _helps(book, view):
            continue
        freed = _leaving_bytes(book.leases(), view.device.id)
        if view.device.is_host:
            copies = _shadows_to_free(book, owner, view, freed, world, rank)
            freed += sum(copy.source[0].bytes for copy in copies)
            steps += copies
        for lease in _least_important_first(book.sections[owner].leases, view, world, rank):
            at = _level_now(view, freed, world)
            if relief(at, rules) is None:
                break
            for step in _steps(
                book,
                lease,
                at,
                view,
                freed,
                host_room,
                world,
                rank,
            ):
                steps.append(step)
                if isinstance(step, Shed):
                    continue  # other leases leave first; this lease leaves at a later call
                host_room -= copied_bytes(lease, step)
                freed += sum(share.bytes for share in step.source if share.device == view.device.id)
                book = mark_leaving(book, step, key)
    return book, tuple(steps)


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
        for lease in _least_important_first(kernels, view, world, rank):
            if excess <= 0:
                break
            excess -= lease.bytes_on(view.device.id)
            if lease.owner != owner:
                continue
            because = f"{view.device.id} holds more than its limit."
            step = eviction_step(lease, host_room, world, because=because, reason="memory_pressure")
            copies = _shed_first(
                book,
                lease,
                step,
                host_room,
                world,
                rank,
                because,
            )
            if copies:
                return book, copies
            if step is not None and not why_no_return(book, lease, world):
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
    if lease.kind != "kernel" or lease.idle_seconds(world.now) < KERNEL_IDLE_SECONDS:
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
    if on_host and not lease.droppable:
        return ()  # the rest of a lease in parts must not follow to the host
    full = _pressure_after(view, freed)
    part = 0
    if world.rules.relief == "auto" and not on_host:
        leaving = part_of(lease, _excess_bytes(view, freed, world))
        part = leaving.leaving_bytes if leaving.target else 0
    because = f"{at} memory pressure on {view.device.id} ({full:.1%}); idle {show_seconds(idle)}."
    drops = on_host or (demand.drop and world.rules.relief == "always")
    step = eviction_step(
        lease,
        host_room,
        world,
        part=part,
        drop=drops,
        because=because,
        reason="memory_pressure",
    )
    copies = (
        ()
        if drops
        else _shed_first(
            book,
            lease,
            step,
            host_room,
            world,
            rank,
            because,
        )
    )
    if copies:
        return copies
    if step is None or (isinstance(step, Drop) and not demand.may_drop):
        return ()
    return (step,)


def _shed_first(
    book: Book,
    lease: Lease,
    step: Move | Drop | None,
    host_room: int,
    world: World,
    rank: Policy,
    because: str,
) -> tuple[Shed, ...]:
    """Steps that free shadows of the lease's owner, so that the lease fits on the host.

    The result is empty if the lease fits already (`step` is a Move), or if freeing all shadows is
    not enough.
    """
    if isinstance(step, Move):
        return ()
    return shadows.steps_for(
        book,
        lease,
        host_room,
        world,
        rank,
        because,
        "memory_pressure",
    )


def _without_claims(view: DeviceView, world: World) -> DeviceView:
    """The view of the host, with the level of its measured memory only; LOW if not measured."""
    used, total = view.measured_bytes or 0, view.device.total_bytes
    full = 0.0 if view.device.simulated or not total else used / total
    return replace(view, claimed_bytes=0, pressure=full, level=level(full, world.rules))


def _shadows_to_free(
    book: Book, owner: str, view: DeviceView, freed: int, world: World, rank: Policy
) -> list[Shed]:
    """The steps that free shadows of this `owner` until the host is below the level HIGH."""
    if view.level not in (Level.HIGH, Level.CRITICAL):
        return []
    excess = (view.measured_bytes or 0) - freed - world.rules.high * view.device.total_bytes
    found = shadows.enough(shadows.held(book, owner=owner), int(excess) + 1, world, rank)
    because = f"{view.level} memory pressure on {HOST} ({view.pressure:.1%})."
    return [shadows.shed(lease, because, "memory_pressure") for lease in found]


def _excess_bytes(view: DeviceView, freed: int, world: World) -> int:
    """The bytes that must leave the card until its level of pressure is LOW."""
    least = world.rules.moderate
    excess = view.claimed_bytes - freed - least * view.limit_bytes
    if view.measured_bytes is not None:
        measured = view.measured_bytes - freed - least * view.device.total_bytes
        excess = max(excess, measured)
    return int(excess) + 1


def _least_important_first(
    leases: Iterable[Lease], view: DeviceView, world: World, rank: Policy
) -> list[Lease]:
    """The leases on this card in the order in which they leave."""
    there = [lease for lease in leases if _on(lease, view.device.id)]
    return sorted(there, key=lambda lease: worth(lease, world, rank))


def _on(lease: Lease, device: str) -> bool:
    return any(share.device == device for share in lease.shares)


def _leaving_bytes(leases: Iterable[Lease], device: str) -> int:
    """Bytes on the device that leases free by leaving it now."""
    freed = 0
    for lease in leases:
        if lease.phase is Phase.LEAVING:
            shares = lease.freed_by(lease.target)
            freed += sum(share.bytes for share in shares if share.device == device)
    return freed


def _helps(book: Book, view: DeviceView) -> bool:
    """Whether room on this device is needed.

    Room is needed if a request waits for it, or if the device is nearly full and holds memory
    outside the leases.
    """
    for ticket in book.tickets:
        if ticket.verb == "use" and any(share.device == view.device.id for share in ticket.need):
            return True
    strangers = (view.measured_bytes or 0) - view.claimed_bytes
    is_full = view.level in (Level.HIGH, Level.CRITICAL)
    return not view.device.simulated and strangers > 0 and is_full


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
