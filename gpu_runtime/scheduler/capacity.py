"""What is free: the bytes that a grant may spend on each device.

Pure. The smaller of two numbers is believed: what the book has not promised, and what the driver measured. Who may
spend it first is `queueing.py`'s to say.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..facts import HOST, Book, Phase, Sample, Share, World, one_memory
from ..units import show_seconds
from .pressure import sample_of

FREEING = (
    "offloaded",
    "unloaded",
    "moved",
    "released",
    "lost",
)  # events after which a device has more room


def limit_of(book: Book, world: World, device: str) -> int:
    """The budget of a device: the host's, or this process's own where that is less."""
    mine = world.limits.get(device, 0)
    return min(mine, book.limits.get(device, mine))


def room(book: Book, world: World) -> dict[str, int]:
    """Bytes that a grant may spend on each device; negative in an overdraft.

    min(limit − claims, measured free − reserve − what the sample cannot have seen). A simulated device has no
    sample: there the book is the measurement.
    """
    return room_and_blind(book, world)[0]


def room_and_blind(book: Book, world: World) -> tuple[dict[str, int], dict[str, str]]:
    """The room, and for each device that cannot be seen well enough to grant on it, why."""
    rules, now = world.rules, world.now
    samples = {
        device.id: sample_of(device, book, world)
        for device in world.devices
        if not device.simulated
    }
    claims, unseen = _sums(book, {id: sample.taken_at for id, sample in samples.items() if sample})
    free: dict[str, int] = {}
    blind: dict[str, str] = {}
    for device in world.devices:
        id = device.id
        free[id] = limit_of(book, world, id) - claims.get(id, 0)
        if device.simulated:
            continue
        sample = samples[id]
        if sample is None:
            blind[id] = f"{id} has not been measured yet"
        elif sample.free_bytes is None:
            blind[id] = f"the driver of {id} does not say how much memory is free"
        elif now - sample.taken_at > rules.stale_seconds:
            blind[id] = f"the last measurement of {id} is {show_seconds(now - sample.taken_at)} old"
        else:
            free[id] = min(free[id], sample.free_bytes - rules.reserve_bytes - unseen.get(id, 0))
    if shared := one_memory(world.devices):
        left = _left_of_one_memory(book, world, shared, samples, claims, unseen)
        free |= {id: min(free[id], left) for id in shared if id in free}
    return free, blind


def _left_of_one_memory(
    book: Book,
    world: World,
    shared: frozenset[str],
    samples: Mapping[str, Sample | None],
    claims: Mapping[str, int],
    unseen: Mapping[str, int],
) -> int:
    """Bytes left of a memory that the host and cards have together: the largest of their budgets less all that is
    claimed of any, and no more than was measured."""
    left = max(limit_of(book, world, id) for id in shared) - sum(claims.get(id, 0) for id in shared)
    measured = [
        sample.free_bytes
        for id in shared
        if (sample := samples.get(id)) and sample.free_bytes is not None
    ]
    if measured:
        left = min(
            left,
            min(measured) - world.rules.reserve_bytes - sum(unseen.get(id, 0) for id in shared),
        )
    return left


def _sums(book: Book, taken_at: dict[str, float]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes claimed on each device, and those among them that a sample taken then cannot have counted.

    Unseen is what settled since, and whatever is on its way: its bytes may come at any moment.
    """
    claims: dict[str, int] = {}
    unseen: dict[str, int] = {}
    for ghost in book.ghosts:
        claims[ghost.device] = claims.get(ghost.device, 0) + ghost.bytes
        if ghost.device in taken_at and ghost.settled_at >= taken_at[ghost.device]:
            unseen[ghost.device] = unseen.get(ghost.device, 0) + ghost.bytes
    for section in book.sections.values():
        for device, size in section.residue.items():
            claims[device] = claims.get(device, 0) + size
        for lease in section.leases:
            for share in lease.shares:
                device, size = share.device, share.bytes
                claims[device] = claims.get(device, 0) + size
                if device in taken_at and lease.settled_at >= taken_at[device]:
                    unseen[device] = unseen.get(device, 0) + size
            for share in lease.target:
                device, size = share.device, share.bytes
                claims[device] = claims.get(device, 0) + size
                if device in taken_at:
                    unseen[device] = unseen.get(device, 0) + size
    return claims, unseen


def freed_since(book: Book, world: World) -> dict[str, int]:
    """Bytes that left each measured device after its sample was taken, or with a process: not yet seen to be free.

    No grant spends them; but no further victim need leave for want of them either.
    """
    freed: dict[str, int] = {}
    for device in world.devices:
        sample = None if device.simulated else sample_of(device, book, world)
        if sample is None:
            continue
        sampled_wall = world.wall - (world.now - sample.taken_at)
        freed[device.id] = sum(
            share.bytes
            for event in book.events
            if event.action in FREEING and event.wall >= sampled_wall
            for share in event.shares or (Share(event.device, event.bytes),)
            if share.device == device.id
        )
    for ghost in book.ghosts:
        freed[ghost.device] = freed.get(ghost.device, 0) + ghost.bytes
    return freed


def on_cards(book: Book, owner: str, *, leaving: bool = True) -> int:
    """Bytes that the models of one owner claim on all cards; with or without those on their way out."""
    section = book.sections.get(owner)
    return sum(
        share.bytes
        for lease in (section.leases if section else ())
        if lease.kind == "model" and (leaving or lease.phase is not Phase.LEAVING)
        for share in lease.claims()
        if share.device != HOST
    )
