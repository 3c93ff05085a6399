"""Requests of this process to other owners: evict, preload, restore, move, pin, defrag."""

from __future__ import annotations

from ..attribution import attributed, speaking_for
from ..facts import Book, Lease, LeaseId, Refuse, Verdict, Wait
from ..ledgers.liveness import Sight
from ..scheduler import recall
from ..scheduler.recall import Ask
from ..units import show_bytes
from . import presence
from .session import NEAR_SECONDS, POLL_SECONDS, Key, Session

# An owner that runs answers within this time whether a lease is in use. Without an answer, the pins
# in the book count.
OWNER_SECONDS = 10.0


def request(
    session: Session,
    verb: str,
    target: LeaseId,
    *,
    timeout: float | None,
    wait: bool = True,
    places: tuple[str, ...] = (),
) -> Verdict:
    """Requests `verb` from the owner of the lease `target`. Returns the last verdict.

    The call takes at most `timeout` seconds. If `wait` is false, the call does not wait for the
    answer, and the request stays in the book until the owner answers; see `follow_up`.
    """
    began = session.clock()
    deadline = None if timeout is None else began + timeout
    key = session.new_key(f"{verb} {target}")
    ask = _ask(session, key, verb, target, places)
    settled = False
    begun: Wait | None = None  # what the owner last said about the request
    try:
        while True:
            patience = OWNER_SECONDS if timeout is None else min(OWNER_SECONDS, timeout)
            answers = wait and session.clock() - began < patience and _runs(session, target.owner)
            verdict = _ask_once(session, ask, not answers)
            refusal = verdict.kind if isinstance(verdict, Refuse) else ""
            settled = not isinstance(verdict, Wait)
            if isinstance(verdict, Wait):
                if wait and (because := _prevented_by_caller(session, target)):
                    _journal_declined(session, ask, because)
                    return Refuse(because, kind="in use")
                if not verdict.silent:
                    begun = verdict
                # An owner that has begun and says nothing now is about to answer.
                verdict = presence.explained(session, begun or verdict)
            # A failure, and an answer that the lease is in use, were journaled by the owner.
            if refusal and refusal != "failed" and not _is_answered(session, ask):
                _journal_declined(session, ask, verdict.because)
            timed_out = deadline is not None and session.clock() >= deadline
            if not isinstance(verdict, Wait) or not wait or timed_out:
                return verdict
            pause(session, verdict, deadline)
            session.reap()
    finally:
        if wait or settled:
            session.done_with(key.note)
            if not settled:
                session.withdraw(key)
        else:
            session.standing[key] = ask


def _prevented_by_caller(session: Session, target: LeaseId) -> str:
    """Why `target` cannot return while the calling thread keeps its pins; empty if it can return.

    The calling cell's pins end with the cell. If the cell waited for a return that these pins
    prevent, it would wait for its own end.
    """
    pinned = session.pinned_by_caller()
    if not pinned:
        return ""
    book, limits = session.ledger.read(), session.limits
    leases = [one.lease for one in list(session.residents.values()) if one.lease.id in pinned]
    for ticket in book.tickets:
        if (ticket.verb, ticket.owner, ticket.name) != ("use", target.owner, target.name):
            continue
        lease = book.lease(target.owner, target.name)
        cards = [device for device in session.probe.devices if not device.is_host]
        if len(cards) > 1 and (lease is None or lease.kind != "kernel"):
            return ""  # a model may get room on another card
        for device, size in ((share.device, share.bytes) for share in ticket.need):
            own = sum(one.bytes for lease in leases for one in lease.shares if one.device == device)
            limit = min(limits.get(device, 0), book.limits.get(device, limits.get(device, 0)))
            if own and size + own > limit:
                return _prevented(session, target, book, f"{show_bytes(size)} on {device}", own)
    return ""


def _prevented(session: Session, target: LeaseId, book: Book, need: str, own: int) -> str:
    owner, lease = book.owner(target.owner), book.lease(target.owner, target.name)
    assert owner is not None  # it has a ticket
    is_kernel = lease is not None and lease.kind == "kernel"
    command = f"unpark {owner.pid}" if is_kernel else f"preload {target.name}@{owner.pid}"
    return (
        f"{owner.label if is_kernel else target.name} needs {need}, where {session.owner.label} holds "
        f"{show_bytes(own)} until its cell or block ends. After that, type in a terminal: gpu {command}"
    )


def follow_up(session: Session) -> None:
    """Removes answered requests for which no caller waits, so that no owner obeys them twice."""
    for key, ask in list(session.standing.items()):
        if not isinstance(_ask_once(session, ask), Wait):
            session.standing.pop(key, None)
            session.done_with(key.note)


def decline(session: Session, verb: str, target: LeaseId, because: str) -> None:
    """Journals a request that this user is not allowed to make."""
    key = session.new_key(f"{verb} {target}")
    _journal_declined(session, _ask(session, key, verb, target), because)
    session.done_with(key.note)


def note_action(session: Session, verb: str, name: str, because: str, size: int = 0) -> None:
    """Writes an action on a model of this process into the journal, if another person caused it.

    Does nothing if this process's own user caused the action. `size` is in bytes.
    """
    by = person(session)
    if not by:
        return
    leases = session.truth().leases
    known = {lease.name: lease for lease in leases}
    lease = known.get(name) or Lease(session.me, name)
    session.note(lease, verb, verb, because, size=size, by=by)


def person(session: Session) -> str:
    """The person for whom this thread acts. The text also names this process, in brackets.

    The result is empty if this thread acts for the user of this process.
    """
    said = speaking_for()
    return attributed(said, f"{session.owner.user}, {session.owner.label}") if said else ""


def pause(session: Session, verdict: Wait, deadline: float | None) -> None:
    """Waits until a notification comes, an owner dies, or a blocking model of this process is free.

    Returns at the latest after POLL_SECONDS, at the verdict's `retry_at`, or at `deadline`. Both
    times are in seconds of the session's clock.
    """
    now = session.clock()
    until = now + POLL_SECONDS
    for end in (verdict.retry_at, deadline):
        if end is not None:
            until = min(until, end)
    residents = list(session.residents.values())
    blocking = [one for one in residents if one.lease.id in verdict.blockers]
    ours = [one for one in blocking if one.pins]
    step = NEAR_SECONDS if ours else POLL_SECONDS
    sections = session.ledger.read().sections
    others = [section.owner for id, section in sections.items() if id != session.me]
    while (left := until - session.clock()) > 0:
        if session.ledger.wait(min(step, left), others):
            return
        if any(not resident.pins for resident in ours):
            return


def _ask_once(session: Session, ask: Ask, believes_book: bool = True) -> Verdict:
    return session.decide(lambda book, world: recall.ask(book, ask, world, believes_book))


def _runs(session: Session, owner: str) -> bool:
    """Whether the process of this `owner` runs: it is neither stopped nor crashed."""
    seen = session.ledger.sights(session.ledger.read(), {owner})
    return seen.get(owner) not in (Sight.STOPPED, Sight.DUMPING, Sight.DEAD)


def _is_answered(session: Session, ask: Ask) -> bool:
    return any(event.answers == ask.key for event in session.ledger.read().events)


def _ask(
    session: Session, key: Key, verb: str, target: LeaseId, places: tuple[str, ...] = ()
) -> Ask:
    return Ask(
        key.text,
        session.me,
        verb,
        str(target),
        session.clock(),
        by=session.ledger.owner.user,
        places=places,
        said_by=speaking_for(),
    )


def _journal_declined(session: Session, ask: Ask, because: str) -> None:
    session.decide(lambda book, world: (recall.declined(book, ask, world, because), None))
