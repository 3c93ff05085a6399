"""Owners that are neither proven alive nor proven dead. A person who knows that such an owner has
ended can remove it.

An owner is unproven if its lock file is missing or was replaced, and its process runs in another
container or is hidden. No process removes such an owner automatically, because its memory may be in
use. Messages call its process lost. Owners that are proven dead are removed by
`maintenance.reap_neighbours` with `scheduler/transitions.reap`.
"""

from __future__ import annotations

from ..errors import GpuError, NotAllowed
from ..facts import Book, Outcome, Section, World
from ..scheduler import recall
from ..scheduler import transitions as books
from ..units import show_bytes
from . import permissions, requests
from .session import Session


def evict(session: Session, process: str, *, force: bool) -> Outcome:
    """Lists what the lost process holds. With `force`, ends its leases and reports the freed bytes.

    `process` is the pid of the lost process, as text; a leading `@` is ignored.

    Raises GpuError if no lost process has this pid. With `force`, raises NotAllowed if this user
    neither runs the lost process nor is an operator.
    """
    book = session.ledger.read()
    lost = _lost(session, book, process)
    freed = 0
    for section in lost:
        freed += sum(lease.bytes for lease in section.leases)
    holds = "; ".join(_what_it_holds(section) for section in lost)
    if not force:
        because = (
            f"nothing proves that it has ended, or that it lives. {holds}. "
            f"If you know that it has ended:  %gpu evict {process} --lost --force"
        )
        return Outcome(
            verb="evict",
            name=process,
            done=False,
            because=because,
        )
    for section in lost:
        _require_allowed(session, section)
    ids = [section.owner.id for section in lost]
    session.ledger.declare_dead(ids)
    said_by = requests.person(session) or session.owner.user
    session.decide(lambda book, world: (_without(session, book, ids, world, said_by), None))
    because = f"its leases were ended; {show_bytes(freed)} came free. {holds}"
    return Outcome(
        verb="evict",
        name=process,
        done=True,
        because=because,
        bytes=freed,
    )


def _without(session: Session, book: Book, ids: list[str], world: World, said_by: str) -> Book:
    """The book without the owners `ids`. An owner that by now is proven alive stays in the book."""
    return books.reap(book, session.ledger.dead(book).intersection(ids), world, said_by)


def _lost(session: Session, book: Book, process: str) -> list[Section]:
    """The sections of the lost process with the pid `process`. Raises GpuError if there is none."""
    unknown = session.ledger.unknown(book)
    sections = [section for id, section in book.sections.items() if id in unknown]
    pid = process.removeprefix("@")
    found = [section for section in sections if str(section.owner.pid) == pid]
    if found:
        return found
    known = ", ".join(sorted(section.owner.label for section in sections)) or "none"
    raise GpuError(
        f"process {process} is not lost: it is proven alive or dead, or holds nothing. "
        f"Lost processes: {known}.\n"
        f"  See who holds what:  %gpu status",
        process=process,
    )


def _what_it_holds(section: Section) -> str:
    held = []
    for lease in section.leases:
        size = show_bytes(lease.bytes)
        held.append(f"{lease.name} ({size} on {lease.where})")
    return f"{section.owner.label} holds {', '.join(held) or 'no lease'}"


def _require_allowed(session: Session, section: Section) -> None:
    """Raises NotAllowed unless this session's user runs the lost process or is an operator."""
    mine = session.owner.user
    owner = section.owner
    if owner.user == mine or permissions.asker(session, mine).operator:
        return
    because = recall.foreign(mine, "end the leases", "", owner)
    raise NotAllowed(f"{because}.", name=str(owner.pid), because=because, user=mine)
