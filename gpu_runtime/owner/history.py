"""The past: recorded events, the last decisions and their replay, and back-tests."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from ..arguments import WORDS, read
from ..backtest import (
    DEVICES,
    HOSTS,
    NO_DISK,
    USE_SECONDS,
    BacktestRow,
    compare,
    journal_history,
    read_history,
)
from ..errors import AmbiguousName, BadSetting, GpuError, LedgerUnavailable, UnknownModel
from ..facts import ASLEEP, KERNEL, Event, Replayed, away_word, notebook_has_name
from ..scheduler import policies
from ..scheduler.plan import replayed
from ..tables import table
from ..telemetry import hours
from ..telemetry.journal import KEPT_DECISIONS
from ..telemetry.recorder import AHEAD_SECONDS
from ..units import parse_seconds, show_bytes, show_seconds
from ..version import VERSION
from . import operations, registry
from .session import Session

if TYPE_CHECKING:
    from pandas import DataFrame


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
    known = {event.unnumbered for event in journaled}

    def wanted(event: Event) -> bool:
        if event.unnumbered in known or event.wall < since:
            return False
        right_model = model is None or event.model == model
        return right_model and (not actions or event.action in actions)

    merged = [*journaled, *filter(wanted, page)]
    numbers = {event.unnumbered: event.seq for event in page}
    # An event of the future is older than it says: the clock was ahead when it was written.
    latest = session.wall() + AHEAD_SECONDS

    def order(event: Event) -> tuple[bool, float, int]:
        return event.wall <= latest, event.wall, numbers.get(event.unnumbered, event.seq)

    merged.sort(key=order)
    if limit is None:
        return tuple(merged)
    first = max(0, len(merged) - limit)
    return tuple(merged[first:])


# -- hours


def report(session: Session, since: str | float, by: str, text: bool) -> DataFrame | str:
    """The account of hours since `since` seconds ago, by `by` as a table, or as a text.

    A ledger in memory keeps nothing. Raises BadSize, BadSetting.
    """
    if by not in hours.BY:
        raise BadSetting("by", by, f"one of {', '.join(hours.BY)}")
    if text and by != "user":
        raise BadSetting("by", by, "left out with the text, which has cards, users and waits")
    until, seconds = session.wall(), parse_seconds(since)
    stretch = hours.stretch_of(seconds) if by == "time" else 0
    began = until - seconds
    rows: list[hours.Hour] = []
    if session.record is not None:
        kept = hours.Hours(session.record.path.with_name(hours.FILE))
        rows = kept.between(began, until, stretch)
    if text:
        return hours.text(rows, began, until)
    found = hours.table(rows, by)
    return table([list(row.values()) for row in found], hours.columns(by))


# -- the last decisions on a model or a notebook

FEW = 8  # events that `why` returns without a name, among the last MOST_RECENT
MOST_RECENT = 500
MOST_OF_ONE = 20  # events or decisions that `why` returns about one name


def why(session: Session, name: str) -> tuple[Event, ...]:
    """The last decisions on a model, or on the memory of the notebook `name`, the newest first.

    Without a `name`, the last decisions that concern this process. In a terminal, the last ones on
    this host. Raises UnknownModel if there is no decision on `name` and no model has this name, and
    GpuError if no notebook has it.
    """
    if not name:
        recent = _recent(session)
        mine = [event for event in recent if session.guest or event.owner == session.me]
        return (*_staying(session, session.me), *mine[-FEW:][::-1])
    bare, process = registry.split_address(name)
    resident = registry.by_key(session, bare)
    found = recorded_events(
        session, None if process else MOST_OF_ONE, resident.spec.name if resident else bare
    )
    if process:
        found = _of_process(session, found, process)[-MOST_OF_ONE:]
    if not found and resident is None and session.catalogue.spec(bare) is None:
        found = _on_kernel(session, bare)
    return (*_away(session, bare), *found[::-1])


def _recent(session: Session) -> list[Event]:
    """The last events. A model that its process releases at its end is no decision.

    With these events, a process that ends with eight models would displace all decisions.
    """
    recent = recorded_events(session, MOST_RECENT)
    return [event for event in recent if event.action != "released"]


def _of_process(session: Session, events: tuple[Event, ...], process: str) -> tuple[Event, ...]:
    """Those of the `events` that the `process` recorded: its notebook, pid or owner's id."""
    sections = session.ledger.read().sections.values()
    owners = {section.owner.id for section in sections if process in section.owner.names}
    owners |= {event.owner for event in events if notebook_has_name(event.notebook, process)}
    return tuple(
        event
        for event in events
        if event.owner in owners or process in (event.owner, event.owner.partition(".")[0])
    )


def _on_kernel(session: Session, who: str) -> tuple[Event, ...]:
    """The last decisions on the kernel `who`; see `registry.find_kernel`. Raises UnknownModel, GpuError.

    If the notebook `who` has no kernel now, the result has the decisions on its last kernel.
    """
    of_all = recorded_events(session, model=KERNEL)
    try:
        owner = registry.find_kernel(session, who, leased=False).owner
    except AmbiguousName:
        raise
    except GpuError:
        owners = [event.owner for event in of_all if notebook_has_name(event.notebook, who)]
        if not owners and registry.is_notebook(session, who):
            return _on_models_of(session, who)
        if not owners:
            book = session.ledger.read()
            raise registry.unknown(who, registry.addresses(session, book), book) from None
        owner = owners[-1]
    found = [event for event in of_all if event.owner == owner]
    return (*found[-MOST_OF_ONE:], *_staying(session, owner))


def _staying(session: Session, owner_id: str) -> tuple[Event, ...]:
    """An event for each part of the memory of the process `owner_id` that cannot leave its card now."""
    section = session.ledger.read().sections.get(owner_id)
    if section is None:
        return ()
    now = session.wall()
    return tuple(
        Event(
            seq=0,
            wall=now,
            model=KERNEL,
            action="stays",
            reason="shared",
            because=f"{show_bytes(part.bytes)} on {part.device}: {part.why}",
            owner=owner_id,
            notebook=section.owner.notebook,
        )
        for part in section.staying
    )


def _away(session: Session, name: str) -> tuple[Event, ...]:
    """An event for each `name` that sleeps or is on a disk: what its return takes, and what a load would."""
    found = []
    for lease in session.ledger.read().leases():
        word = away_word(lease)
        if lease.name != name or not (word == ASLEEP or lease.on_disk):
            continue
        size = lease.own_bytes
        back = lease.restore_seconds or lease.seconds_to_restore(size)
        load = lease.reload_seconds or lease.seconds_to_load(size)
        returns = f"{show_seconds(back)} ({_known(lease.restore_seconds)})"
        loads = f"{show_seconds(load)} ({_known(lease.reload_seconds)})"
        because = (
            f"{lease.name} sleeps, and has {show_bytes(size)} in RAM. It wakes in {returns}. "
            f"If it were ended, its next use would start it in {loads}."
        )
        if lease.on_disk:
            rest = f"A load from its source would take {loads}."
            rest = rest if lease.droppable else "Its bytes exist nowhere else."
            because = f"its {show_bytes(size)} are read back in {returns}. {rest}"
        event = Event(0, session.wall(), name, word, "compared", because, owner=lease.owner)
        found.append(event)
    return tuple(found)


def _known(seconds: float) -> str:
    return "measured" if seconds else "estimated"


def _on_models_of(session: Session, notebook: str) -> tuple[Event, ...]:
    """The last decisions on the models of the `notebook`. Raises GpuError, AmbiguousName."""
    found = [event for event in _recent(session) if notebook_has_name(event.notebook, notebook)]
    paths = tuple(sorted({event.notebook for event in found}))
    if len(paths) > 1:
        raise AmbiguousName(notebook, paths)
    if not found:
        # Raises GpuError if no notebook has the name.
        operations.sections_of_notebook(session, notebook)
    return tuple(found[-FEW:])


def replays(session: Session, name: str) -> tuple[Replayed, ...]:
    """Decides the recorded decisions on the model or notebook `name` again; see Runtime.why.

    `name` may be the number of one decision. Raises UnknownModel if no decision is recorded and no
    model has this name, and GpuError if no notebook has it.
    """
    bare, process = registry.split_address(name)
    is_notebook = registry.is_notebook(session, name)
    if is_notebook:
        bare, process = KERNEL, name
    resident = registry.by_key(session, bare)
    model = resident.spec.name if resident else bare
    decided = session.journal.decided(model, KEPT_DECISIONS if process else MOST_OF_ONE)
    if process:
        owners = [decision.book.owner(decision.request.lease.owner) for decision in decided]
        named = [owner is not None and process in owner.names for owner in owners]
        decided = tuple(itertools.compress(decided, named))
    found = tuple([replayed(decision, VERSION) for decision in decided[:MOST_OF_ONE]])
    if not found and is_notebook:
        operations.sections_of_notebook(session, name)  # raises GpuError if no notebook has it
    elif not found and resident is None and session.catalogue.spec(bare) is None:
        numbers = "No recorded decision has this number. See the numbers:  gpu why NAME --replay"
        advice = numbers if bare.isdecimal() else ""
        raise UnknownModel(bare, registry.addresses(session), advice=advice)
    return found


# -- back-tests: a history of uses with other policies, cards and host memory

DAY = 86_400.0  # seconds
DAYS = 7.0
ALL_POLICIES = ",".join(policies.POLICIES)
Words = str | Iterable[str]


def backtest(
    session: Session | None,
    requests: str | os.PathLike[str] | None = None,
    models: str | os.PathLike[str] | None = None,
    *,
    days: float | None = None,
    policy: Words = ALL_POLICIES,
    engine: Words = "full",
    device: Words = DEVICES,
    host: Words = HOSTS,
    disk: str = NO_DISK,
) -> DataFrame:
    """A table of the waiting that each choice of policy, engine, card and host memory would cause.

    The history is read from the CSV files `requests` and `models`; without them, from the journal
    of the last `days` days (7). `policy`, `engine`, `device` and `host` are each a list of
    words, or one string of words with commas. The words of `device` and `host`, and `disk`, are sizes
    such as `80GB`, or percents of the bytes of all models. The columns of the table are the fields of
    `backtest.Row`. Raises BadSetting, GpuError.
    """
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
        wall = session.wall()
        events = recorded_events(session, since=wall - (DAYS if days is None else days) * DAY)
        history = journal_history(events, session.ledger.read().leases(), wall)
        note = f"The journal does not know how long uses took: each counts as {USE_SECONDS:g} s."
    rows = compare(
        history,
        policies=read("policy", policy, WORDS),
        engines=read("engine", engine, WORDS),
        devices=read("device", device, WORDS),
        hosts=read("host", host, WORDS),
        disk=disk,
    )
    frame = table(rows, BacktestRow._fields)
    if note:
        frame.attrs["note"] = note
    return frame
