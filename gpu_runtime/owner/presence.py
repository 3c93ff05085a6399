"""The current state of the processes in the book: running, idle, stopped, silent or ended.

The state is checked whenever a status is read. The book alone would show a killed process as a
living holder until another owner has removed the process from the book.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from ..facts import Book, Presence, ProcessState, Section, Unanswered, Wait
from ..ledgers.liveness import Sight
from .session import Session

# While a cell runs, a process gives a sign once a second. With many kernels it may sleep for 12 s.
HUNG_SECONDS = 20.0
_SEEN = {
    Sight.STOPPED: ProcessState.STOPPED,
    Sight.DUMPING: ProcessState.DUMPING,
    Sight.DEAD: ProcessState.ENDED,
}


def presences(
    session: Session, book: Book, unanswered: Iterable[Unanswered]
) -> dict[str, Presence]:
    """The state of each process that has a section in `book`, by owner id.

    `unanswered` are the requests that processes have not answered, the oldest first.
    """
    silent_since: dict[str, float] = {}
    for one in unanswered:
        silent_since.setdefault(one.owner.id, one.since)
    sights, now = session.ledger.sights(book), session.clock()
    for id, seconds in session.ledger.silences(book).items():
        if seconds > HUNG_SECONDS and book.sections[id].busy_since:
            silent_since[id] = min(now - seconds, silent_since.get(id, now))
    return {
        id: presence(section, sights[id], silent_since.get(id))
        for id, section in book.sections.items()
    }


def presence(section: Section, sight: Sight, silent_since: float | None = None) -> Presence:
    """The state of the process of `section`.

    `sight` is what the operating system shows of the process. `silent_since` is the time of the
    oldest request that the process has not answered, or of its last sign if its cell blocks its
    interpreter; or None.
    """
    if sight in _SEEN:
        return Presence(_SEEN[sight])
    if sight is Sight.UNKNOWN:
        return Presence(ProcessState.SILENT, _last_sign(section))
    if silent_since is not None:
        return Presence(ProcessState.SILENT, silent_since)
    if section.busy_since:
        return Presence(ProcessState.RUNNING, section.busy_since)
    if section.idle_since:
        return Presence(ProcessState.IDLE, section.idle_since)
    return Presence(ProcessState.RUNNING)


def _last_sign(section: Section) -> float:
    """The newest time that the process has written into its `section`; 0 if there is none."""
    stamps = [section.busy_since, section.idle_since]
    for lease in section.leases:
        stamps += [lease.last_used, lease.settled_at, lease.pinned_since]
    return max(stamps)


def explained(session: Session, wait: Wait) -> Wait:
    """Returns `wait` with a sentence for each blocking process that is stopped or has crashed."""
    leases = (*wait.blockers, *wait.asked)
    in_the_way = {id.partition("/")[0] for id in leases} - {session.me}
    if not in_the_way:
        return wait
    book = session.ledger.read()
    sights = session.ledger.sights(book, in_the_way)
    sentences = []
    for id, sight in sights.items():
        owner = book.sections[id].owner
        holder = owner.label
        if sight is Sight.DUMPING:
            sentences.append(
                f"{holder} has crashed, and holds its memory while it writes a core dump"
            )
        elif sight is Sight.STOPPED:
            sentences.append(
                f"{holder} is stopped, and keeps its memory. To continue it: kill -CONT {owner.pid}"
            )
    new = [sentence for sentence in sentences if sentence not in wait.because]
    if not new:
        return wait
    because = ". ".join([wait.because.rstrip("."), *new])
    return replace(wait, because=f"{because}.")
