"""Back-tests replay a history of uses with other policies, cards and host memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..backtest import (
    DEVICES,
    HOSTS,
    USE_SECONDS,
    BacktestRow,
    UseHistory,
    compare,
    journal_history,
    read_history,
    split_words,
)
from ..errors import BadSetting, GpuError
from ..threads import import_whole
from .history import recorded_events
from .session import Session

if TYPE_CHECKING:
    from pandas import DataFrame

DAY = 86_400.0  # seconds
DAYS = 7.0
POLICIES = "lru,cost_aware,keep_score"
Words = str | Iterable[str]


def backtest(
    session: Session | None,
    requests: str | os.PathLike[str] | None = None,
    models: str | os.PathLike[str] | None = None,
    *,
    days: float | None = None,
    policy: Words = POLICIES,
    engine: Words = "full",
    device: Words = DEVICES,
    host: Words = HOSTS,
) -> DataFrame:
    """A table of the waiting that each choice of policy, engine, card and host memory would cause.

    The history is read from the CSV files `requests` and `models`; without them, from the journal
    of the last `days` days (7). `policy`, `engine`, `device` and `host` are each a list of
    words, or one string of words with commas. The words of `device` and `host` are sizes such as
    `80GB`, or percents of the bytes of all models. The columns of the table are the fields of
    `backtest.Row`. Raises BadSetting, GpuError.
    """
    import_whole("pandas")
    from pandas import DataFrame

    if (requests is None) != (models is None):
        raise GpuError(
            "a trace has two files, and only one was given.\n"
            "  Type both:  gpu backtest --requests FILE --models FILE"
        )
    if requests is not None and models is not None:
        if days is not None:
            raise BadSetting("days", days, "left out beside a trace, which is replayed in full")
        history = read_history(os.fspath(requests), os.fspath(models))
        note = ""
    else:
        assert session is not None, "only a runtime has a journal"
        history = _recorded(session, DAYS if days is None else days)
        note = f"The journal does not know how long uses took: each counts as {USE_SECONDS:g} s."
    rows = compare(
        history,
        policies=split_words(policy),
        engines=split_words(engine),
        devices=split_words(device),
        hosts=split_words(host),
    )
    frame = DataFrame(list(rows), columns=list(BacktestRow._fields))
    if note:
        frame.attrs["note"] = note
    return frame


def _recorded(session: Session, days: float) -> UseHistory:
    """The history of the last `days` days, from the journal and the current leases."""
    wall = session.wall()
    events = recorded_events(session, since=wall - days * DAY)
    return journal_history(events, session.ledger.read().leases(), wall)
