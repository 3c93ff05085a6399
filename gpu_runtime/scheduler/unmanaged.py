"""Memory on the cards that no lease covers: the number of bytes, and their possible holders.

Pure. The number is the measured use less the leases in the book and less the residue, which is the
memory of known processes beyond their leases. A process without leases is visible only here. A
sample is one measurement of a device.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..facts import Book, Device, Section, Stranger, World
from .capacity import freed_since
from .pressure import sample_of


def stranger_bytes(book: Book, world: World) -> dict[str, int | None]:
    """Bytes in use on each real card of `world` beyond the leases and residue in `book`.

    The value is None if the driver gives no number. Memory that is being freed right now does not
    count. The driver's own use of the card is included: some hundred MiB that belong to no process.
    """
    beyond: dict[str, int | None] = {}
    freed = freed_since(book, world)
    for device in world.devices:
        # Unified memory is the machine's RAM: any program may use it, so it is not counted here.
        if device.simulated or device.is_host or device.unified:
            continue
        sample = sample_of(device, book, world)
        if sample is None or sample.free_bytes is None:
            beyond[device.id] = None
            continue
        used = device.total_bytes - sample.free_bytes
        accounted = _seen(book, device.id, sample.taken_at) + freed.get(device.id, 0)
        beyond[device.id] = max(0, used - accounted)
    return beyond


def _seen(book: Book, device: str, taken_at: float) -> int:
    """Bytes of leases and residue on `device` that a sample taken at `taken_at` includes."""
    return sum(_seen_of(section, device, taken_at) for section in book.sections.values())


def _seen_of(section: Section, device: str, taken_at: float) -> int:
    seen = section.residue.get(device, 0)
    for lease in section.leases:
        if lease.settled_at < taken_at:
            seen += lease.bytes_on(device)
    return seen


def strangers(
    book: Book, world: World, people: Mapping[int, tuple[str, str]]
) -> tuple[Stranger, ...]:
    """Processes that the driver lists on real cards of `world`, without those in `book`.

    The largest process is first. `people` maps pid -> (user, command), as far as known. In a
    container, the driver's pids differ from the pids in the book. So an owner may be listed here
    under a pid that the book does not know.
    """
    ours = _pids(book)
    found = []
    for device in world.devices:
        for pid, size in _processes(device, book, world).items():
            if pid in ours:
                continue
            user, command = people.get(pid, ("", ""))
            found.append(Stranger(device.id, pid, size, user, command))
    return tuple(sorted(found, key=_largest_first))


def _pids(book: Book) -> set[int]:
    """The pids in the book: owners, their engines, and dead owners that may still hold memory."""
    pids = {ghost.pid for ghost in book.ghosts}
    for section in book.sections.values():
        pids.add(section.owner.pid)
        pids.update(section.engines)
    return pids


def _processes(device: Device, book: Book, world: World) -> dict[int, int | None]:
    """Maps pids to bytes, for the processes that the driver lists on a real card."""
    if device.simulated or device.is_host:
        return {}
    sample = sample_of(device, book, world)
    return sample.processes if sample else {}


def _largest_first(stranger: Stranger) -> tuple[int, str, int]:
    return -(stranger.bytes or 0), stranger.device, stranger.pid
