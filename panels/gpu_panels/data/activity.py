"""The events of a host: as lines that a click opens, as kinds for the filter, and as a CSV file. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import msgspec

from gpu_runtime.facts import Event, Snapshot, ended_label, notebooks_in
from gpu_runtime.rendering.views import clean, event_phrase
from gpu_runtime.units import show_seconds

from .cells import process_name

MOST = 500  # lines on the page: the newest events; the CSV file has all events
KINDS = {  # kind -> mark, actions
    "grant": ("✓", ("granted", "loaded", "restored", "preload", "restore")),
    "wait": ("◷", ("waiting", "refused", "unfinished")),
    "evict": ("▼", ("offloaded", "unloaded", "moved", "stays", "misplaced")),
    "ended": ("○", ("released", "reaped", "lost", "left", "ended")),
    "operator": (
        "☞",
        (
            *("asked", "declined", "pin", "unpin", "drained", "undrained"),
            *("defrag", "resume", "who", "cancel"),
        ),
    ),
}
_KIND_OF = {action: kind for kind, (_, actions) in KINDS.items() for action in actions}
OTHER_MARK = "·"


class ActivityLine(msgspec.Struct, frozen=True):
    """One event."""

    key: str
    wall: float
    mark: str
    kinds: tuple[str, ...]
    model: str
    words: str
    process: str
    is_problem: bool
    details: tuple[str, ...]


def lines(events: Iterable[Event], snapshot: Snapshot) -> tuple[ActivityLine, ...]:
    """A line for each of the first MOST `events`, in their order; `snapshot` names the processes."""
    every = list(events)
    notebooks = notebooks_in(every)
    return tuple(_line(event, _process(event, snapshot, notebooks)) for event in every[:MOST])


def _line(event: Event, process: str) -> ActivityLine:
    kind = _KIND_OF.get(event.action, "")
    is_by_person = bool(event.by) and ":" not in event.by
    kinds = {kind, "operator" if is_by_person else kind} - {""}
    requested = (f"Requested by {clean(event.by)}.",) if event.by else ()
    took = (f"It took {show_seconds(event.seconds)}.",) if event.seconds else ()
    considered = tuple(f"Also considered: {clean(other)}" for other in event.runners_up)
    return ActivityLine(
        f"{event.wall:.6f}.{event.seq}",
        event.wall,
        KINDS[kind][0] if kind else OTHER_MARK,
        tuple(sorted(kinds)),
        clean(event.title),
        clean(event_phrase(event)),
        process,
        event.action in ("refused", "failed", "lost"),
        (clean(event.because), *requested, *took, *considered),
    )


def _process(event: Event, snapshot: Snapshot, notebooks: Mapping[str, str]) -> str:
    section = snapshot.sections.get(event.owner)
    if section:
        return process_name(section)
    if not event.owner:
        return ""
    return clean(ended_label(event.owner, notebooks.get(event.owner, "")))


def merged(past: Iterable[Event], recent: Iterable[Event]) -> tuple[Event, ...]:
    """The events in `past` (of the journal) and `recent` (of the snapshot) without duplicates, the newest first.

    Of an event in both, the journal's copy stays: only it has the candidates that were not chosen.
    """
    known = {(event.wall, event.seq): event for event in (*recent, *past)}
    return tuple(sorted(known.values(), key=lambda event: (event.wall, event.seq), reverse=True))


# -- as a file -------------------------------------------------------------------------------------

CSV_HEADER = (
    "time",
    "model",
    "action",
    "reason",
    "because",
    "bytes",
    "device",
    "owner",
    "asked_by",
    "seconds",
)


def csv_of(events: Iterable[Event], snapshot: Snapshot) -> str:
    """The `events` as CSV, with times in UTC. No cell is a formula, even if a model's name looks like one."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(CSV_HEADER)
    events = list(events)
    notebooks = notebooks_in(events)
    for event in events:
        section = snapshot.sections.get(event.owner)
        time = datetime.fromtimestamp(event.wall, UTC).isoformat(timespec="milliseconds")
        line = [
            time,
            safe(event.title),
            safe(event.action),
            safe(event.reason),
            safe(event.because),
            event.bytes,
            safe(event.device),
            safe(section.owner.label if section else _process(event, snapshot, notebooks)),
            safe(event.by),
            round(event.seconds, 3) or "",
        ]
        writer.writerow(line)
    return out.getvalue()


def safe(text: str) -> str:
    """The `text`. If a spreadsheet would run the text as a formula, an apostrophe is put before it.

    Source: OWASP, CSV injection.

    >>> safe("=1+1"), safe("qwen")
    ("'=1+1", 'qwen')
    """
    cell = clean(text)
    is_formula = cell.strip() and cell.lstrip()[:1] in tuple("=+-@|%")
    return f"'{cell}" if is_formula else cell
