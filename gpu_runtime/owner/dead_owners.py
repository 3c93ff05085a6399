"""Owners that are proven dead: this process looks for them and removes them from the book.

`ledgers/liveness.py` proves a death. `scheduler/transitions.reap` is the decision that removes the
dead owner's leases. Owners whose death is not proven are in `unproven_owners.py`.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..facts import Book
from .session import Session


def reap_neighbours(session: Session, book: Book) -> int:
    """Removes dead owners from the book. Returns the number of removed owners.

    Each call checks two owners: the next owner in the sorted list of owners, and another owner that
    changes from call to call. So every owner is checked at each tick of the owner before it. (When
    each of 64 owners checked all others, the checks used 7 % of a core.)
    """
    row = sorted(book.sections.keys() | {ticket.owner for ticket in book.tickets} | {session.me})
    me = row.index(session.me)
    session.reap_turn += 1
    near = {row[(me + 1) % len(row)], row[(me + 1 + session.reap_turn) % len(row)]}
    sections = {id: section for id, section in book.sections.items() if id in near}
    tickets = tuple(ticket for ticket in book.tickets if ticket.owner in near)
    if session.ledger.dead(replace(book, sections=sections, tickets=tickets)):
        return session.reap()
    return 0
