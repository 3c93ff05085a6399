"""`move`, as it is typed: a reservation on the new cards, the journey, and one sentence where it cannot be."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from ..errors import BadSetting, DoesNotFit, GpuError, NotResident, StillInUse, UnknownDevice
from ..facts import HOST, Book, Lease, Move, Outcome, PlacementRules, Refuse, World, where
from ..scheduler import explain, migration
from ..units import show_bytes
from .resident import Place, Resident
from .session import Keeper


def cards(keeper: Keeper, name: str, wanted: str | Iterable[str]) -> tuple[str, ...]:
    """The cards that were named, by id or UUID, as the book calls them. Raises UnknownDevice, BadSetting."""
    book = keeper.look()
    known = {
        device.id: device
        for device in (*book.devices, *keeper.world().devices)
        if not device.is_host
    }
    found: list[str] = []
    for word in migration.parse_cards(wanted if isinstance(wanted, str) else ",".join(wanted)):
        if word == HOST:
            raise BadSetting("device", word, f"a card; to RAM it goes with  %gpu evict {name}")
        device = next(
            (device for device in known.values() if word in (device.id, device.uuid)), None
        )
        if device is None:
            raise UnknownDevice(word, tuple(known))
        found.append(device.id)
    if not found:
        raise UnknownDevice(str(wanted), tuple(known))
    return tuple(dict.fromkeys(found))


def placed(keeper: Keeper, resident: Resident, wanted: tuple[str, ...]) -> PlacementRules:
    """Just these cards, all of them. Raises DoesNotFit for a model that stays whole, or may not go there."""
    name, own = resident.spec.name, keeper.placement(resident)
    if len(wanted) > 1 and own.layout == "single":
        raise DoesNotFit(
            f"{name} lies on one card: it cannot be cut, or was registered with layout='single'.",
            name=name,
            need_bytes=resident.lease.bytes,
            device=wanted[0],
        )
    if outside := [card for card in wanted if own.devices and card not in own.devices]:
        raise DoesNotFit(
            f"{name} may not go to {', '.join(outside)}: it was registered for {', '.join(own.devices)}.",
            name=name,
            need_bytes=resident.lease.bytes,
            device=outside[0],
        )
    layout = (
        own.layout
        if len(wanted) > 1 and own.layout != "whole"
        else "single"
        if len(wanted) == 1
        else "auto"
    )
    return replace(
        own, devices=wanted, layout=layout, least_cards=len(wanted), most_cards=len(wanted)
    )


def move(keeper: Keeper, resident: Resident, wanted: tuple[str, ...], *, by: str = "") -> Outcome:
    """Carries one of our own models to these cards. `by` is who asked, where that is another process.

    Raises StillInUse, and DoesNotFit where it has no room there; nothing has changed then.
    """
    name, began = resident.spec.name, keeper.clock()
    placement, footprint = placed(keeper, resident, wanted), resident.footprint()
    because = f"as {by} asked" if by else "by hand"
    key = keeper.new_key(f"move {name}")
    try:
        while True:
            if resident.place not in (Place.HERE, Place.MOVING):
                raise NotResident(
                    f"{name} is {resident.place.value}, on no card to be moved from.\n"
                    f"  Bring it to one first:  %gpu preload {name}",
                    name=name,
                    where=resident.place.value,
                )

            def decided(book: Book, world: World) -> tuple[Book, Move | GpuError | None]:
                after, step = migration.move(
                    book, keeper.me, name, footprint, placement, world, key.text, because
                )
                return (
                    (book, _told(book, keeper.me, resident, step, world))
                    if isinstance(step, Refuse)
                    else (after, step)
                )

            step = keeper.decide(decided, fresh=True)
            if isinstance(step, GpuError):
                raise step
            if step is None:
                return Outcome(
                    "move",
                    name,
                    True,
                    f"{name} is on {resident.lease.where} already",
                    0,
                    resident.lease.where,
                )
            if keeper.carry(step, key, by):
                break  # else a user came in between, or its bytes had changed: decide again
    finally:
        keeper.done_with(key.note)
    there = resident.lease.where
    return Outcome(
        "move",
        name,
        True,
        f"{name} went from {where(step.source)} to {there}",
        resident.lease.bytes,
        there,
        keeper.clock() - began,
    )


def _told(book: Book, me: str, resident: Resident, refusal: Refuse, world: World) -> GpuError:
    lease = book.lease(me, resident.spec.name) or resident.lease
    if refusal.kind in ("in use", "busy"):
        return explain.still_here(book, me, lease, refusal.because, world)
    if refusal.kind == "away":
        return StillInUse(f"{lease.name} is on its way; try again.", name=lease.name)
    return DoesNotFit(
        f"{refusal.because}.{_whom_to_evict(book, me, refusal)}",
        name=lease.name,
        need_bytes=refusal.need_bytes,
        device=refusal.device,
        holders=refusal.holders,
    )


def _whom_to_evict(book: Book, me: str, refusal: Refuse) -> str:
    """A line for the largest idle lease there."""
    idle = [lease for id in refusal.holders if (lease := book.find(id)) and _may_go(lease)]
    if not idle:
        return ""
    owner = book.owner(idle[0].owner)
    at = f"@{owner.pid}" if owner and owner.id != me else ""
    return f"\n  Make room first:  %gpu evict {idle[0].name}{at}      ({show_bytes(idle[0].bytes)}, idle)"


def _may_go(lease: Lease) -> bool:
    return not lease.pins and not lease.keep and lease.kind == "model" and lease.on_device
