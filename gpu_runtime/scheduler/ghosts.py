"""Updates the samples in the book, and the ghosts.

A sample is one measurement of a device. A ghost is the memory that a dead process held and that the
driver may not have freed yet. Pure: this module decides nothing.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..facts import Book, Ghost, Sample, Section, World


def measure(book: Book, world: World) -> Book:
    """The book with the newer samples of `world`, and without ghosts whose memory has been freed.

    A new sample replaces the sample in the book only if it is newer by more than half of
    `stale_seconds`, or if it shows the end of a ghost's process. If every new sample were written,
    every kernel would write the book every second.
    """
    fresh = _fresh_samples(book, world)
    if book.ghosts:
        fresh |= _proofs(book, world)
    if fresh:
        book = replace(book, samples={**book.samples, **fresh})
    return _without_ended(book) if book.ghosts else book


def _fresh_samples(book: Book, world: World) -> dict[str, Sample]:
    """Samples of the `world` that are far newer than the book's, or that the book lacks."""
    getting_old = world.rules.stale_seconds / 2
    fresh = {}
    for id, sample in world.samples.items():
        known = book.samples.get(id)
        if known is None or sample.taken_at > known.taken_at + getting_old:
            fresh[id] = sample
    return fresh


def _proofs(book: Book, world: World) -> dict[str, Sample]:
    """Samples of the `world` that show the end of a ghost's process and are newer than the book's.

    With these samples, `_without_ended` finds that the ghost has ended.
    """
    proofs = {}
    for ghost in book.ghosts:
        sample = world.samples.get(ghost.device)
        if sample is None or not ghost.gone(sample):
            continue
        known = book.samples.get(ghost.device)
        if known is None or sample.taken_at > known.taken_at:
            proofs[ghost.device] = sample
    return proofs


def _without_ended(book: Book) -> Book:
    """The book without the ghosts whose process the samples no longer show.

    A ghost also ends if a living owner has its pid, because this proves that the ghost's process
    has ended.
    """
    alive = {section.owner.pid for section in book.sections.values()}
    left = []
    for ghost in book.ghosts:
        if ghost.pid not in alive and not ghost.gone(book.samples.get(ghost.device)):
            left.append(ghost)
    return book if len(left) == len(book.ghosts) else replace(book, ghosts=tuple(left))


def _real_cards(book: Book, world: World) -> set[str]:
    real = set()
    for device in (*book.devices, *world.devices):
        if not device.simulated and not device.is_host:
            real.add(device.id)
    return real


def ghosts_of(book: Book, section: Section, world: World) -> list[Ghost]:
    """A ghost for each real card on which the dead owner of `section` held or reserved memory."""
    real = _real_cards(book, world)
    held = {device: size for device, size in section.residue.items() if device in real and size}
    settled: dict[str, float] = {}
    for lease in section.leases:
        settled_at = world.now if lease.target else lease.settled_at
        for share in lease.claims():
            if share.device in real:
                held[share.device] = held.get(share.device, 0) + share.bytes
                settled[share.device] = max(settled_at, settled.get(share.device, 0.0))
    found = []
    for id, size in held.items():
        ghost = Ghost(
            owner=section.owner.id,
            pid=section.owner.pid,
            device=id,
            bytes=size,
            settled_at=settled.get(id, 0.0),
            died_at=world.now,
        )
        found.append(ghost)
    return found
