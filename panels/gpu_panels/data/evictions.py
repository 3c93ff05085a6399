"""The contents of the tab Evictions: a filtered table, counters, a chart over time, and a CSV file.

This module is pure. It turns events into rows, columns or text, which `tabs/evictions.py` shows.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from gpu_runtime.facts import Event, Snapshot
from gpu_runtime.rendering.views import clean
from gpu_runtime.rendering.words import event_phrase
from gpu_runtime.units import show_bytes, show_seconds

from ..palette import PLAIN
from .cells import Cell, Column, Row
from .columns import Columns, as_columns
from .decisions import model_cell, process_cell, row_id, time_cell

EVICTIONS = ("offloaded", "unloaded")
ACTIONS = {  # choice of the filter -> actions of the events
    "evictions": EVICTIONS,
    "offloaded": ("offloaded",),
    "unloaded": ("unloaded",),
    "restored": ("restored",),
    "loaded": ("loaded",),
}
_SHOWN = {action for actions in ACTIONS.values() for action in actions}
WINDOWS = {"15 min": 900.0, "2 h": 7200.0, "24 h": 86400.0, "7 days": 604800.0}
ANY = "any reason"
MOST = 500  # the number of newest rows that are shown; the CSV file has all rows
BINS = 48
MARKS = {"offloaded": "▼ ", "unloaded": "⊠ ", "restored": "▲ ", "loaded": "● "}
COLUMNS = (
    Column("When", hint="In your local time"),
    Column("Model"),
    Column("What"),
    Column("Bytes", True),
    Column("Device"),
    Column("Reason"),
    Column("Because"),
    Column("Owner", hint="The process that held it"),
    Column("Took", True, "How long the load or restore took"),
)


class Filter(NamedTuple):
    """The choices that decide which events are shown."""

    model: str = ""  # a part of the model's name
    action: str = "evictions"  # one of ACTIONS
    reason: str = ANY
    since: float = 0.0  # epoch seconds


def merged(past: Iterable[Event], recent: Iterable[Event]) -> tuple[Event, ...]:
    """All events without duplicates, with the newest first.

    `past` events are from the journal and `recent` events from the snapshot. An event may be in both.
    """
    known = {(event.wall, event.seq): event for event in (*recent, *past)}
    return tuple(sorted(known.values(), key=lambda event: (event.wall, event.seq), reverse=True))


def matching(events: Iterable[Event], wanted: Filter) -> tuple[Event, ...]:
    """The `events` that match the filter `wanted`, in their order."""
    actions = ACTIONS[wanted.action]
    part = wanted.model.strip().lower()
    return tuple(
        event
        for event in events
        if event.action in actions
        and event.wall >= wanted.since
        and part in event.model.lower()
        and wanted.reason in (ANY, event.reason)
    )


def reasons(events: Iterable[Event]) -> list[str]:
    """The choices of the reason filter: first ANY, then the reasons that occur in `events`."""
    found = {event.reason for event in events if event.action in _SHOWN}
    return [ANY, *sorted(found)]


def rows(events: Sequence[Event], snapshot: Snapshot) -> tuple[Row, ...]:
    """A row for each of the first MOST `events`, in their order; `snapshot` names the processes."""
    return tuple(_row(event, snapshot) for event in events[:MOST])


def _row(event: Event, snapshot: Snapshot) -> Row:
    devices = ", ".join(share.device for share in event.shares) or event.device
    took = Cell("–", kind="soft")
    if event.seconds:
        took = Cell(show_seconds(event.seconds), event.seconds)
    cells = (
        time_cell(event.wall),
        model_cell(event),
        Cell(MARKS.get(event.action, "") + event.action, hint=event_phrase(event)),
        Cell(show_bytes(event.bytes), event.bytes),
        Cell(clean(devices)),
        Cell(clean(event.reason.replace("_", " "))),
        Cell(clean(event.because), kind="prose"),
        process_cell(event, snapshot),
        took,
    )
    return Row(row_id(event), cells)


# -- counters --------------------------------------------------------------------------------------


def counters(snapshot: Snapshot) -> tuple[tuple[str, int, str], ...]:
    """The totals of `snapshot` since the boot, each with its name, its number and an explanation.

    Evictions are offloads plus unloads.
    """
    count = snapshot.totals.get
    return (
        ("evictions", count("evictions", 0), "offloads and unloads together"),
        ("offloads", count("offloads", 0), "evicted to host memory"),
        ("unloads", count("unloads", 0), "evicted from memory; loaded again from the source"),
        ("restored", count("restorations", 0), "moved back from host memory to a device"),
        ("loads", count("loads", 0), "loaded from the source"),
        (
            "refusals",
            count("refusals", 0),
            "requests that can never fit; nothing was evicted for them",
        ),
    )


# -- over time -------------------------------------------------------------------------------------

BAR_COLUMNS = (
    "left",
    "right",
    "bottom",
    "top",
    "colour",
    "hatch",
    "tooltip",
    "start",
    "end",
)
STYLES = {  # action -> colour, hatch
    "offloaded": ("#56b4e9", PLAIN),
    "unloaded": ("#d55e00", "x"),
    "restored": ("#009e73", "/"),
}
_BAR_WIDTH = 0.42  # as a fraction of a bin
_EVICTIONS_AT, _RESTORES_AT = 0.08, 0.5  # the left edges of the two bars of a bin


class EvictionBins(NamedTuple):
    """Evictions and restores over time, in BINS equal parts of a window."""

    start: float
    end: float
    offloaded: tuple[int, ...]
    unloaded: tuple[int, ...]
    restored: tuple[int, ...]
    seconds: tuple[float, ...]  # time spent on loading and restoring, for each bin
    timed: bool  # whether any of these seconds were measured


def window(seconds: float, now: float) -> tuple[float, float]:
    """Start and end of a window of `seconds` that contains `now`.

    Both stay the same until the next bin begins.
    """
    step = seconds / BINS
    end = math.ceil(now / step) * step
    return end - seconds, end


def binned(events: Iterable[Event], start: float, end: float) -> EvictionBins:
    """The `events` counted in each bin between `start` and `end`, in epoch seconds."""
    step = (end - start) / BINS
    counts = {action: [0] * BINS for action in STYLES}
    seconds, timed = [0.0] * BINS, False
    for event in events:
        if not start <= event.wall <= end:
            continue
        n = min(int((event.wall - start) / step), BINS - 1)
        if event.action in counts:
            counts[event.action][n] += 1
        if event.action in ("loaded", "restored"):
            seconds[n] += event.seconds
            timed |= event.seconds > 0
    return EvictionBins(
        start,
        end,
        tuple(counts["offloaded"]),
        tuple(counts["unloaded"]),
        tuple(counts["restored"]),
        tuple(seconds),
        timed,
    )


def eviction_columns(bins: EvictionBins) -> Columns:
    """The bars of the chart: for each of `bins`, a stack of evictions and a bar of restores.

    Times are in ms.
    """
    step = (bins.end - bins.start) * 1e3 / BINS
    rows = []
    counts = zip(bins.offloaded, bins.unloaded, bins.restored, strict=True)
    for n, (offloaded, unloaded, restored) in enumerate(counts):
        start = bins.start * 1e3 + n * step
        bars = (
            ("offloaded", offloaded, 0, _EVICTIONS_AT),
            ("unloaded", unloaded, offloaded, _EVICTIONS_AT),
            ("restored", restored, 0, _RESTORES_AT),
        )
        for action, count, bottom, left in bars:
            if count:
                edges = (start + left * step, start + (left + _BAR_WIDTH) * step)
                tooltip = f"{count} {action}"
                rows.append(
                    (*edges, bottom, bottom + count, *STYLES[action], tooltip, start, start + step)
                )
    return as_columns(BAR_COLUMNS, rows)


def seconds_columns(bins: EvictionBins) -> Columns:
    """The line of the chart: the seconds of loading and restoring, at the middle of each bin."""
    step = (bins.end - bins.start) * 1e3 / BINS
    return {
        "x": [bins.start * 1e3 + (n + 0.5) * step for n in range(BINS)],
        "y": [round(seconds, 3) for seconds in bins.seconds],
    }


def top(bins: EvictionBins) -> int:
    """A height above every bar of `bins`. It is a multiple of four, so the axis shows whole numbers."""
    evictions = [a + b for a, b in zip(bins.offloaded, bins.unloaded, strict=True)]
    highest = max(*evictions, *bins.restored, 1)
    return 4 * math.ceil(highest * 1.1 / 4)


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
    """The `events` as CSV, with times in UTC and the process names of `snapshot`.

    No cell is a formula, even if a model's name looks like one.
    """
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(CSV_HEADER)
    for event in events:
        section = snapshot.sections.get(event.owner)
        time = datetime.fromtimestamp(event.wall, UTC).isoformat(timespec="milliseconds")
        line = [
            time,
            safe(event.model),
            safe(event.action),
            safe(event.reason),
            safe(event.because),
            event.bytes,
            safe(event.device),
            safe(section.owner.label if section else event.owner),
            safe(event.by),
            round(event.seconds, 3) or "",
        ]
        writer.writerow(line)
    return out.getvalue()


def safe(text: str) -> str:
    """The `text`, with an apostrophe in front if a spreadsheet would run the text as a formula.

    Source: OWASP, CSV injection.

    >>> safe("=1+1"), safe("qwen")
    ("'=1+1", 'qwen')
    """
    cell = clean(text)
    is_formula = cell.strip() and cell.lstrip()[:1] in tuple("=+-@|%")
    return f"'{cell}" if is_formula else cell
