"""Owners that are proven dead: this process looks for them and removes them from the book.

`ledgers/liveness.py` proves a death. `scheduler/transitions.reap` is the decision that removes the
dead owner's leases. `scheduler/ghosts.py` counts the bytes of the leases until the driver frees the
memory. Owners whose death is not proven are in `unproven_owners.py`.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..facts import Book
from .session import Session


def reap_neighbours(session: Session, book: Book) -> int:
    """Removes dead owners from the book. Returns the number of removed owners.

    Each call checks two owners: the next owner in the sorted list of owners, and a second owner
    that changes from call to call. So at every tick, each owner is checked by its predecessor in
    the list. (When each of 64 owners checked all others, the checks used 7 % of a core.)
    """
    waiting = {ticket.owner for ticket in book.tickets}
    owners = sorted(book.sections.keys() | waiting | {session.me})
    session.reap_turn += 1
    next_place = owners.index(session.me) + 1
    far_place = next_place + session.reap_turn
    checked = {owners[place % len(owners)] for place in (next_place, far_place)}
    sections = {id: section for id, section in book.sections.items() if id in checked}
    tickets = tuple([ticket for ticket in book.tickets if ticket.owner in checked])
    dead = session.ledger.dead(replace(book, sections=sections, tickets=tickets))
    return session.reap() if dead else 0
