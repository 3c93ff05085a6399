"""Keeps the times of a model's uses when the process that used the model releases it.

The times belong to the content of the model's source, not to a process or a name. The event of each
lease that ends has them (`scheduler/transitions.ENDED_A_STAY`). The first load of a model reads the
events of equal models from the journal. While a model is registered, its process reads the newest
events in the book.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..facts import MOST_EVENTS, MOST_USES, Book, Lease, World, merged_uses
from ..scheduler import transitions as books
from .resident import Resident
from .session import Session


def pages(leases: Iterable[Lease]) -> list[list[Lease]]:
    """Those of the `leases` that get an event when they end, in lists of at most MOST_EVENTS.

    The book keeps MOST_EVENTS events, and the journal gets the events that the book has after a
    transaction. More events in one transaction would be lost. There is at least one list.
    """
    used = [lease for lease in leases if lease.source and lease.recent_uses]
    return [used[first : first + MOST_EVENTS] for first in range(0, len(used) or 1, MOST_EVENTS)]


def released(book: Book, leases: Iterable[Lease], world: World, because: str) -> Book:
    """The book with an event for each of the `leases`, which this process releases now.

    A lease that was never used, or whose source is unknown, gets no event. `because` is the event's
    sentence.
    """
    for lease in leases:
        if lease.source and lease.recent_uses:
            book = books.note(book, world, lease, "released", "owner", because, size=lease.bytes)
    return book


def publish_released(session: Session, lease: Lease | None) -> None:
    """Publishes that the user of this process has forgotten the model with this `lease`, if any."""
    leases = (lease,) if lease is not None else ()
    because = f"{session.owner.label} forgot it."
    session.decide(lambda book, world: (released(book, leases, world, because), None))


def read_journal(session: Session, resident: Resident) -> None:
    """Adds the uses of models with the content of `resident` that ended before its first load."""
    source = resident.content
    if source:
        events = session.journal.tail(MOST_USES, None, books.ENDED_A_STAY, source=source)
        for event in events:
            resident.note_uses(event.uses)


def read_book(session: Session, book: Book) -> None:
    """Adds the uses of leases of other processes that have ended, if this process has equal models.

    Without this, a model's uses in another notebook would no longer count after the notebook's end.
    """
    for event in book.events:
        if not event.uses or not event.source or event.owner == session.me:
            continue
        for resident in list(session.residents.values()):
            if resident.content == event.source:
                every_use = merged_uses((resident.recent_uses, event.uses), session.wall())
                # Written only if it changes, because another thread may note a use at the same time.
                if every_use != resident.recent_uses:
                    resident.note_uses(event.uses)
