"""Requests to other owners: what a user may request, the request, and whether its owner can answer.

The requests are those of `recall.ASKS`; `restore` is preload under another name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from ..attribution import attributed, speaking_for
from ..errors import NotAllowed
from ..facts import (
    KERNEL,
    Asker,
    Book,
    Lease,
    LeaseId,
    Owner,
    Phase,
    Presence,
    ProcessState,
    Refuse,
    Section,
    Ticket,
    Unanswered,
    Verdict,
    Wait,
)
from ..ledgers.access import access_to
from ..ledgers.host_config import groups_of
from ..ledgers.liveness import Sight
from ..scheduler import caps, recall
from ..scheduler.recall import foreign
from ..units import show_bytes
from .resident import Resident
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
            settled = not isinstance(verdict, Wait)
            if isinstance(verdict, Wait):
                if wait and (because := _prevented_by_caller(session, target)):
                    _journal_declined(session, ask, because)
                    return Refuse(because, kind="in use")
                if not verdict.silent:
                    begun = verdict
                # An owner that has begun and says nothing now is about to answer.
                verdict = explained(session, begun or verdict)
            # A failure, and an answer that the lease is in use, were journaled by the owner.
            if isinstance(verdict, Refuse) and verdict.kind != "failed":
                if all(event.answers != ask.key for event in session.ledger.read().events):
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

    The calling cell's pins and blocks end with the cell. If the cell waited for a return that they
    prevent, it would wait for its own end.
    """
    pinned = session.pinned_by_caller()
    if not pinned:
        return ""
    book, limits = session.ledger.read(), session.limits
    leases = book.find_all(pinned)
    for ticket in book.tickets:
        if (ticket.verb, ticket.owner, ticket.name) != ("use", target.owner, target.name):
            continue
        lease = book.lease(target.owner, target.name)
        cards = session.probe.cards
        if len(cards) > 1 and (lease is None or lease.kind != KERNEL):
            return ""  # a model may get room on another card
        for device, size in ((share.device, share.bytes) for share in ticket.need):
            own = sum(lease.bytes_on(device) for lease in leases)
            limit = min(limits.get(device, 0), book.limits.get(device, limits.get(device, 0)))
            if own and size + own > limit:
                return _prevented(session, target, book, f"{show_bytes(size)} on {device}", own)
    return ""


def _prevented(session: Session, target: LeaseId, book: Book, need: str, own: int) -> str:
    owner, lease = book.owner(target.owner), book.lease(target.owner, target.name)
    assert owner is not None  # it has a ticket
    is_kernel = lease is not None and lease.kind == KERNEL
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
    blocking = [resident for resident in residents if resident.lease.id in verdict.blockers]
    ours = [resident for resident in blocking if resident.pins]
    others: list[Owner] = []
    if not session.ledger.names_the_dead:  # else a keeper notifies, once it has noted the death
        sections = session.ledger.read().sections
        others = [section.owner for id, section in sections.items() if id != session.me]
    wait_for_change(session, ours, lambda: until - session.clock(), others)


def wait_for_change(
    session: Session,
    used: list[Resident],
    seconds_left: Callable[[], float],
    others: Iterable[Owner] = (),
) -> None:
    """Waits until a notification comes, one of `others` dies, a use of a model in `used` ends, or no time is left."""
    while (left := seconds_left()) > 0:
        if session.ledger.wait(min(NEAR_SECONDS, left) if used else left, others):
            return
        if any(not resident.pins for resident in used):
            return


def _ask_once(session: Session, ask: Ticket, believes_book: bool = True) -> Verdict:
    return session.transact(lambda book, world: recall.ask(book, ask, world, believes_book))


def _runs(session: Session, owner: str) -> bool:
    """Whether the process of this `owner` runs: it is neither stopped nor crashed."""
    seen = session.ledger.sights(session.ledger.read(), {owner})
    return seen.get(owner) not in (Sight.STOPPED, Sight.DUMPING, Sight.DEAD)


def _ask(
    session: Session, key: Key, verb: str, target: LeaseId, places: tuple[str, ...] = ()
) -> Ticket:
    return recall.new_order(
        key.text,
        session.me,
        verb,
        str(target),
        session.clock(),
        because=session.ledger.owner.user,
        places=places,
        said_by=speaking_for(),
    )


def _journal_declined(session: Session, ask: Ticket, because: str) -> None:
    session.transact(lambda book, world: (recall.declined(book, ask, world, because), None))


# -- the state of the processes in the book: running, idle, stopped, silent or ended
#
# The state is checked whenever a status is read. The book alone would show a killed process as a
# living holder until another owner has removed the process from the book.

# While a cell runs, a process gives a sign once a second. With many kernels it may sleep for 12 s.
HUNG_SECONDS = 20.0
# A lease that is leaving was marked by its owner, which is a sign. While an idle process copies, it gives none. A copy
# to fresh pages runs at 0.4 GB/s, and the estimate of a restore that was never measured is 10 GB/s.
MOVE_FACTOR = 50.0
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
    for open_request in unanswered:
        silent_since.setdefault(open_request.owner.id, open_request.since)
    sights, now = session.ledger.sights(book), session.clock()
    for id, seconds in session.ledger.silences(book).items():
        if seconds > _longest_silence(book.sections[id]):
            silent_since[id] = min(now - seconds, silent_since.get(id, now))
    return {
        id: presence(section, sights[id], silent_since.get(id))
        for id, section in book.sections.items()
    }


def _longest_silence(section: Section) -> float:
    """The seconds after its last sign for which the process of `section` may be at work or asleep."""
    leaving = [lease for lease in section.leases if lease.phase is Phase.LEAVING]
    if not leaving:
        return HUNG_SECONDS if section.busy_since else math.inf  # an idle process may sleep long
    moves = [lease.seconds_to_restore(lease.own_bytes) for lease in leaving]
    return HUNG_SECONDS + MOVE_FACTOR * sum(moves)


def presence(section: Section, sight: Sight, silent_since: float | None = None) -> Presence:
    """The state of the process of `section`.

    `sight` is what the operating system shows of the process. `silent_since` is the time of the
    oldest request that the process has not answered, or of its last sign if its interpreter is
    blocked; or None.
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


# -- what users may do


def asker(session: Session, user: str) -> Asker:
    """What `user` may request of this process.

    The configuration of the moment of the user's first request applies.
    """
    known = session.users.get(user)
    if known is None:
        groups = groups_of(user)
        cap = session.machine.cap(user, groups)
        known = Asker(
            user,
            at_home=user == session.ledger.owner.user,
            operator=session.machine.is_operator(user, groups),
            importance=(cap and cap.importance) or 0,
        )
        session.users[user] = known
    return known


def askers(session: Session, book: Book) -> dict[str, Asker]:
    """The requests to this owner: maps each ticket's key to the rights of the user who wrote it.

    A ticket is left out if the ledger cannot prove which owner wrote the ticket.
    """
    found = {}
    for ticket in book.tickets:
        concerned = (ticket.name, *ticket.recalls, *ticket.shadows)
        owners = [id.partition("/")[0] for id in concerned]
        if ticket.owner == session.me or session.me not in owners:
            continue
        if user := session.ledger.user_of(book, ticket.owner, ticket):
            found[ticket.key] = asker(session, user)
    return found


def proven_sections(session: Session, book: Book) -> dict[str, Section]:
    """The sections of the book by owner id, with a mark on each user name that is not proven."""
    sections = {}
    for id, section in book.sections.items():
        user = section.owner.user
        if id != session.me and session.ledger.user_of(book, id) != user:
            section = replace(section, owner=replace(section.owner, user=f"{user} (unproven)"))
        sections[id] = section
    return sections


def refusal_of_request(session: Session, verb: str, owner: Owner | None, name: str) -> str:
    """The reason why this user may not request `verb` of `owner`; empty if the request is allowed.

    A request that is refused here would be refused by the owner as well.
    """
    mine = session.owner.user
    if verb == "evict" or owner is None:
        return ""
    if owner.user == mine or asker(session, mine).operator:
        return ""
    return foreign(mine, verb, name, owner)


def require_allowed(session: Session, user: str, name: str, because: str) -> None:
    """Raises NotAllowed with `because` about `name`, unless this user is the `user`, or an operator."""
    mine = session.owner.user
    if user != mine and not asker(session, mine).operator:
        raise NotAllowed(f"{because}.", name=name, because=because, user=mine)


def refusal_of_drain(session: Session, book: Book) -> str:
    """The reason why this user may not drain a card; empty if the user may drain it.

    Operators may drain a card. A user who does not share the cards with other users may do so too.
    """
    mine = session.owner.user
    users = {section.owner.user for section in book.sections.values()}
    others = sorted(users - {mine})
    if asker(session, mine).operator or not (is_shared(session) or others):
        return ""
    reason = f"{', '.join(others)} use it too" if others else "the ledger is shared"
    return f"{mine} may not drain a card: {reason}. Only an operator may ({session.machine.file})"


def operates(session: Session) -> bool:
    """Whether this user may act on the processes of all users of the ledger. In a private ledger the user may."""
    return not is_shared(session) or asker(session, session.owner.user).operator


def is_shared(session: Session) -> bool:
    """Whether an operator has set the ledger up for several users."""
    directory = getattr(session.ledger, "directory", None)
    return directory is not None and access_to(directory).group is not None


def require_within_cap(session: Session, name: str, importance: int, keep: bool) -> None:
    """Raises NotAllowed if the operator's cap forbids a model with this importance and `keep`."""
    if because := caps.forbidden(name, importance, keep, session.rules.cap):
        raise NotAllowed(
            f"{because}.\n  The operator can change it.",
            name=name,
            because=because,
            user=session.owner.user,
        )
