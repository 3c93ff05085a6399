"""Decides requests, records the decisions, and decides recorded requests again."""

from __future__ import annotations

from functools import partial

from ..facts import Book, Candidate, Decided, Grant, Refuse, Replayed, Request, Verdict, Wait, World
from ..scheduler import explain
from ..scheduler.admission import admit
from ..scheduler.plan import is_new, recorded, replayed
from ..telemetry.journal import KEPT_DECISIONS
from ..version import VERSION
from .session import Session

MOST = 20  # at most so many recorded decisions on a model are decided again


def admitted(
    session: Session, request: Request, compared: tuple[Candidate, ...]
) -> Grant | Wait | Refuse:
    """Decides the request in one transaction, and records the decision. Memory is measured first.

    `compared` are the ways to make room that the caller has compared before. They only add details
    to the journal; see `explain.with_runners_up`.
    """
    in_full = partial(explain.with_runners_up, rules=request.placement, room_made=compared)

    def decide(book: Book, world: World) -> tuple[Book, tuple[Verdict, Book, Book, World]]:
        after, verdict = admit(book, request, world, session.rank)
        return after, (verdict, book, after, world)

    verdict, book, after, world = session.decide(
        decide, fresh=True, in_full=lambda events, answer: in_full(events, answer[0])
    )
    if is_new(book, after, request, verdict):
        rule = session.settings.gpu_policy
        session.journal.record(recorded(book, request, world, verdict, rule, VERSION))
    return verdict


def again(session: Session, name: str, process: str = "") -> tuple[Replayed, ...]:
    """Decides the recorded decisions on the model `name` again. The newest decision is first.

    `name` may also be the number of a single decision in the journal. If `process` is the pid, the
    id or the notebook of an owner, only the decisions of this owner are made again.
    """
    decided = session.journal.decided(name, KEPT_DECISIONS if process else MOST)
    mine = [one for one in decided if not process or _is_by(process, one)]
    return tuple(replayed(one, VERSION) for one in mine[:MOST])


def _is_by(process: str, decided: Decided) -> bool:
    """Whether the owner with the name `process` made the request of the decision `decided`."""
    owner = decided.book.owner(decided.request.lease.owner)
    return owner is not None and process in owner.names
