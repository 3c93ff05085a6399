"""Memory on the cards that nobody leased: how much, and whose processes may hold it.

Pure. It is what was measured less what the book accounts for; a lease is an agreement among those who ask, and a
process that never asks is seen only here.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..facts import Book, Stranger, World
from .capacity import freed_since
from .pressure import sample_of


def stranger_bytes(book: Book, world: World) -> dict[str, int | None]:
    """Bytes in use on each real card beyond leases, residue and what is just going; None where the driver won't say.

    The driver's own use of the card is among them: some hundred MiB that belong to no process.
    """
    beyond: dict[str, int | None] = {}
    freed = freed_since(book, world)
    for device in world.devices:
        if (
            device.simulated or device.is_host or device.unified
        ):  # of the machine's own memory the rest is nobody's to tell
            continue
        sample = sample_of(device, book, world)
        if sample is None or sample.free_bytes is None:
            beyond[device.id] = None
            continue
        used = device.total_bytes - sample.free_bytes
        beyond[device.id] = max(
            0, used - _seen(book, device.id, sample.taken_at) - freed.get(device.id, 0)
        )
    return beyond


def _seen(book: Book, device: str, taken_at: float) -> int:
    """Bytes of ours that a sample taken then has counted."""
    seen = 0
    for section in book.sections.values():
        seen += section.residue.get(device, 0)
        seen += sum(
            share.bytes
            for lease in section.leases
            if lease.settled_at < taken_at
            for share in lease.shares
            if share.device == device
        )
    return seen


def strangers(
    book: Book, world: World, people: Mapping[int, tuple[str, str]]
) -> tuple[Stranger, ...]:
    """The processes that the driver lists on real cards and that are no owner's, the largest first.

    `people` are user and command by process number, where they are known. In a container the driver's numbers are
    other than ours: then an owner may be listed here under a number that nobody can tell for it.
    """
    ours = {section.owner.pid for section in book.sections.values()} | {
        ghost.pid for ghost in book.ghosts
    }
    ours.update(pid for section in book.sections.values() for pid in section.engines)
    found = []
    for device in world.devices:
        sample = None if device.simulated or device.is_host else sample_of(device, book, world)
        for pid, size in sample.processes.items() if sample else ():
            if pid not in ours:
                user, command = people.get(pid, ("", ""))
                found.append(Stranger(device.id, pid, size, user, command))
    return tuple(sorted(found, key=lambda one: (-(one.bytes or 0), one.device, one.pid)))
