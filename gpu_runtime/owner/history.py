"""Events from the journal and from the book."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import LedgerUnavailable
from ..facts import Event
from .session import Session


def recorded_events(
    session: Session,
    limit: int | None = None,
    model: str | None = None,
    actions: Collection[str] = (),
    since: float = 0.0,
) -> tuple[Event, ...]:
    """Events of the journal, and events of the book that the journal lacks; the newest is last.

    `limit` is the largest number of events; None means no limit. `model` and `actions` select
    events; None or an empty collection selects all. `since` is in epoch seconds.
    """
    journaled = session.journal.tail(limit, model, actions, since)
    try:
        page = session.ledger.read().events
    except LedgerUnavailable:  # the journal is on this host, and can still be read
        return journaled
    known = {(event.wall, event.seq) for event in journaled}

    def wanted(event: Event) -> bool:
        if (event.wall, event.seq) in known or event.wall < since:
            return False
        right_model = model is None or event.model == model
        return right_model and (not actions or event.action in actions)

    merged = [*journaled, *filter(wanted, page)]
    merged.sort(key=lambda event: (event.wall, event.seq))
    if limit is None:
        return tuple(merged)
    first = max(0, len(merged) - limit)
    return tuple(merged[first:])
