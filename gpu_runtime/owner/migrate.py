"""`move`: reserves room on other cards, and moves an idle model of this process to these cards."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from ..errors import BadSetting, DoesNotFit, GpuError, NotResident, StillInUse, UnknownDevice
from ..facts import HOST, Book, Lease, Move, Outcome, PlacementRules, Refuse, World, where
from ..scheduler import explain, relief
from ..units import show_bytes
from . import demand, release
from .resident import Place, Resident
from .session import Key, Session


def cards(session: Session, name: str, wanted: str | Iterable[str]) -> tuple[str, ...]:
    """The ids in the book of the cards that `wanted` names by id or UUID.

    `name` is the model to move, for the messages. Raises UnknownDevice, BadSetting.
    """
    book = session.read_book()
    devices = (*book.devices, *session.world().devices)
    known = {device.id: device for device in devices if not device.is_host}
    by_name = known | {device.uuid: device for device in known.values() if device.uuid}
    found: list[str] = []
    words = wanted if isinstance(wanted, str) else ",".join(wanted)
    for word in relief.parse_cards(words):
        if word == HOST:
            hint = f"a card; to move it to host memory:  %gpu evict {name}"
            raise BadSetting("device", word, hint)
        if word not in by_name:
            raise UnknownDevice(word, tuple(known))
        found.append(by_name[word].id)
    if not found:
        raise UnknownDevice(str(wanted), tuple(known))
    return tuple(dict.fromkeys(found))


def _rules(session: Session, resident: Resident, wanted: tuple[str, ...]) -> PlacementRules:
    """Placement rules that allow exactly the cards `wanted`.

    Raises DoesNotFit if the model cannot be split, or may not be placed on the cards `wanted`.
    """
    name, own = resident.spec.name, demand.placement(session, resident)
    size = resident.lease.bytes
    if len(wanted) > 1 and own.layout == "single":
        raise DoesNotFit(
            f"{name} stays on one card: it cannot be split, or was registered with "
            f"layout='single'.",
            name=name,
            need_bytes=size,
            device=wanted[0],
        )
    outside = [card for card in wanted if own.devices and card not in own.devices]
    if outside:
        raise DoesNotFit(
            f"{name} may not go to {', '.join(outside)}: it was registered for "
            f"{', '.join(own.devices)}.",
            name=name,
            need_bytes=size,
            device=outside[0],
        )
    if len(wanted) == 1:
        layout = "single"
    else:
        layout = "auto" if own.layout == "whole" else own.layout
    count = len(wanted)
    return replace(own, devices=wanted, layout=layout, least_cards=count, most_cards=count)


def move(session: Session, resident: Resident, wanted: tuple[str, ...], *, by: str = "") -> Outcome:
    """Moves a model of this process to the cards `wanted`.

    `by` is the person who requested the move, or empty for this process's user. Raises NotResident,
    StillInUse, and DoesNotFit if the cards have no room. After an error, the model is where it was.
    """
    name, began = resident.spec.name, session.clock()
    rules = _rules(session, resident, wanted)
    release.try_again_now(resident)
    key = session.new_key(f"move {name}")
    try:
        step = _reserve(session, resident, rules, key, by)
        while step is not None and not release.carry_out(session, step, key, by):
            # The model was used meanwhile, or its bytes have changed: decide again.
            step = _reserve(session, resident, rules, key, by)
    finally:
        session.done_with(key.note)
    there = resident.lease.where
    if step is None:
        return Outcome(
            verb="move",
            name=name,
            done=True,
            because=f"{name} is on {there} already",
            bytes=0,
            where=there,
        )
    because = f"{name} moved from {where(step.source)} to {there}"
    size, seconds = resident.lease.bytes, session.clock() - began
    return Outcome(
        verb="move",
        name=name,
        done=True,
        because=because,
        bytes=size,
        where=there,
        seconds=seconds,
    )


def _reserve(
    session: Session, resident: Resident, rules: PlacementRules, key: Key, by: str
) -> Move | None:
    """Reserves room and returns the step of the move; None if the model is on these cards."""
    if resident.place not in (Place.HERE, Place.MOVING):
        name = resident.spec.name
        raise NotResident(
            f"{name} is {resident.place.value}, so there is nothing to move.\n"
            f"  Load it first:  %gpu preload {name}",
            name=name,
            where=resident.place.value,
        )
    name, footprint = resident.spec.name, resident.footprint()
    because = f"as {by} requested" if by else "by hand"

    def decided(book: Book, world: World) -> tuple[Book, Move | GpuError | None]:
        """Returns the book with the model marked as moving, and the step to perform.

        If the move is refused, returns the unchanged book and an error.
        """
        after, step = relief.move(
            book, session.me, name, footprint, rules, world, key.text, because
        )
        if isinstance(step, Refuse):
            return book, _refused(book, session.me, resident, step, world)
        return after, step

    step = session.decide(decided, fresh=True)
    if isinstance(step, GpuError):
        try:
            raise step
        finally:
            del step  # see pins.py
    return step


def _refused(book: Book, me: str, resident: Resident, refusal: Refuse, world: World) -> GpuError:
    lease = book.lease(me, resident.spec.name) or resident.lease
    if refusal.kind in ("in use", "busy"):
        return explain.still_here(book, me, lease, refusal.because, world)
    if refusal.kind == "away":
        return StillInUse(f"{lease.name} is being moved; try again.", name=lease.name)
    return DoesNotFit(
        f"{refusal.because}.{_suggest_eviction(book, me, refusal)}",
        name=lease.name,
        need_bytes=refusal.need_bytes,
        device=refusal.device,
        holders=refusal.holders,
    )


def _suggest_eviction(book: Book, me: str, refusal: Refuse) -> str:
    """What to type to make room: the command that evicts an idle lease in the way; may be empty."""
    found = (book.find(id) for id in refusal.holders)
    idle = [lease for lease in found if lease and _may_be_evicted(lease)]
    if not idle:
        return ""
    lease = idle[0]
    owner = book.owner(lease.owner)
    at = f"@{owner.pid}" if owner and owner.id != me else ""
    size = show_bytes(lease.bytes)
    return f"\n  Make room first:  %gpu evict {lease.name}{at}      ({size}, idle)"


def _may_be_evicted(lease: Lease) -> bool:
    return not lease.pins and not lease.keep and lease.kind == "model" and lease.on_device
