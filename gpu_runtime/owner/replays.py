"""Decides recorded requests again."""

from __future__ import annotations

from ..facts import Decided, Replayed
from ..scheduler.plan import replayed
from ..telemetry.journal import KEPT_DECISIONS
from ..version import VERSION
from .session import Session

MOST = 20  # at most so many recorded decisions on a model are decided again


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
