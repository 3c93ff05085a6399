"""What left a device and why: filtered, counted, over time, and as a file for a spreadsheet.

Pure: events in; rows, columns or text out. The tab is in `evictions.py`.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from gpu_runtime.facts import Event, Snapshot
from gpu_runtime.rendering.views import clean
from gpu_runtime.rendering.words import deed
from gpu_runtime.units import show_bytes, show_seconds

from ..palette import PLAIN
from ..tabs.decisions import named, row_id, when, who
from ..widgets.table import Cell, Column, Row

EVICTIONS = ("offloaded", "unloaded")
ACTIONS = {  # what may be looked at -> the events' actions
    "evictions": EVICTIONS,
    "offloaded": ("offloaded",),
    "unloaded": ("unloaded",),
    "restored": ("restored",),
    "loaded": ("loaded",),
}
WINDOWS = {"15 min": 900.0, "2 h": 7200.0, "24 h": 86400.0, "7 days": 604800.0}
ANY = "any reason"
MOST = 500  # rows that are shown, the newest; the file has them all
BINS = 48
COLUMNS = (
    Column("When", hint="By your clock"),
    Column("Model"),
    Column("What"),
    Column("Bytes", True),
    Column("Device"),
    Column("Reason"),
    Column("Because"),
    Column("Owner", hint="The process that held it"),
    Column("Took", True, "How long it took to come back, or to be loaded"),
)


class Filter(NamedTuple):
    """Which events are looked at."""

    model: str = ""  # a part of its name
    action: str = "evictions"  # one of ACTIONS
    reason: str = ANY
    since: float = 0.0  # epoch seconds


def merged(past: Iterable[Event], recent: Iterable[Event]) -> tuple[Event, ...]:
    """All of them once, the newest first: the journal's, fetched now and then, and the page's, which are of now."""
    known = {(event.wall, event.seq): event for event in (*recent, *past)}
    return tuple(sorted(known.values(), key=lambda event: (event.wall, event.seq), reverse=True))


def matching(events: Iterable[Event], wanted: Filter) -> tuple[Event, ...]:
    """Those of the events that the filter lets through, in their order."""
    actions, part = ACTIONS[wanted.action], wanted.model.strip().lower()
    return tuple(
        event
        for event in events
        if event.action in actions
        and event.wall >= wanted.since
        and part in event.model.lower()
        and wanted.reason in (ANY, event.reason)
    )


def reasons(events: Iterable[Event]) -> list[str]:
    """What may be chosen as a reason."""
    told = {
        event.reason
        for event in events
        if any(event.action in actions for actions in ACTIONS.values())
    }
    return [ANY, *sorted(told)]


def rows(events: Sequence[Event], snapshot: Snapshot) -> tuple[Row, ...]:
    """A row an event, in the order given, at most MOST."""
    return tuple(_row(event, snapshot) for event in events[:MOST])


def _row(event: Event, snapshot: Snapshot) -> Row:
    devices = ", ".join(share.device for share in event.shares) or event.device
    took = (
        Cell(show_seconds(event.seconds), event.seconds)
        if event.seconds
        else Cell("–", kind="soft")
    )
    return Row(
        row_id(event),
        (
            when(event.wall),
            named(event),
            Cell(MARKS.get(event.action, "") + event.action, hint=deed(event)),
            Cell(show_bytes(event.bytes), event.bytes),
            Cell(clean(devices)),
            Cell(clean(event.reason.replace("_", " "))),
            Cell(clean(event.because), kind="prose"),
            who(event, snapshot),
            took,
        ),
    )


MARKS = {"offloaded": "▼ ", "unloaded": "⊠ ", "restored": "▲ ", "loaded": "● "}


# -- counted ------------------------------------------------------------------------------------------------------


def counters(snapshot: Snapshot) -> tuple[tuple[str, int, str], ...]:
    """The totals of this boot: what is counted, how often, and what that means. Evictions are offloads and unloads."""
    n = snapshot.totals.get
    return (
        ("evictions", n("evictions", 0), "offloads and unloads, together"),
        ("offloads", n("offloads", 0), "stepped aside to host memory"),
        ("unloads", n("unloads", 0), "dropped: the source has them"),
        ("restored", n("restorations", 0), "came back from host memory"),
        ("loads", n("loads", 0), "from their source"),
        ("refusals", n("refusals", 0), "never fitted, and nothing was evicted for them"),
    )


# -- over time ----------------------------------------------------------------------------------------------------

PIECES = ("left", "right", "bottom", "top", "colour", "hatch", "told", "start", "end")
LOOKS = {
    "offloaded": ("#56b4e9", PLAIN),
    "unloaded": ("#d55e00", "x"),
    "restored": ("#009e73", "/"),
}


class Timeline(NamedTuple):
    """Evictions and returns over time, in BINS equal parts of a window."""

    start: float
    end: float
    offloaded: tuple[int, ...]
    unloaded: tuple[int, ...]
    restored: tuple[int, ...]
    seconds: tuple[float, ...]  # spent on loading and restoring
    timed: bool  # whether any of these were measured


def window(seconds: float, now: float) -> tuple[float, float]:
    """A start and an end that stay where they are until the next part of the time begins; the end is ahead of now."""
    step = seconds / BINS
    end = math.ceil(now / step) * step
    return end - seconds, end


def timeline(events: Iterable[Event], start: float, end: float) -> Timeline:
    """How many left and came back in each part of the time, and how many seconds coming back took."""
    step = (end - start) / BINS
    counts = {action: [0] * BINS for action in ("offloaded", "unloaded", "restored")}
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
    return Timeline(start, end, *(tuple(counts[name]) for name in counts), tuple(seconds), timed)


def pieces(told: Timeline) -> dict[str, list[Any]]:
    """A source's columns: for each part of the time evictions as a stack, returns beside it; times in ms."""
    step, rows = (told.end - told.start) * 1e3 / BINS, []
    for n, (offloaded, unloaded, restored) in enumerate(
        zip(told.offloaded, told.unloaded, told.restored, strict=True)
    ):
        start = told.start * 1e3 + n * step
        for count, bottom, left, action in (
            (offloaded, 0, 0.08, "offloaded"),
            (unloaded, offloaded, 0.08, "unloaded"),
            (restored, 0, 0.5, "restored"),
        ):
            if count:
                rows.append(
                    (
                        start + left * step,
                        start + (left + 0.42) * step,
                        bottom,
                        bottom + count,
                        *LOOKS[action],
                        f"{count} {action}",
                        start,
                        start + step,
                    )
                )
    return {name: [row[n] for row in rows] for n, name in enumerate(PIECES)}


def spent(told: Timeline) -> dict[str, list[Any]]:
    """A source's columns: the seconds that loading and coming back took, in the middle of each part of the time."""
    step = (told.end - told.start) * 1e3 / BINS
    return {
        "x": [told.start * 1e3 + (n + 0.5) * step for n in range(BINS)],
        "y": [round(one, 3) for one in told.seconds],
    }


def top(told: Timeline) -> int:
    """A height that holds every bar, with air above it: a multiple of four, so that the axis counts whole ones."""
    most = max(
        *(a + b for a, b in zip(told.offloaded, told.unloaded, strict=True)), *told.restored, 1
    )
    return 4 * math.ceil(most * 1.1 / 4)


# -- as a file ----------------------------------------------------------------------------------------------------

CSV = (
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
    """The events as CSV, times in UTC. No cell is a formula to a spreadsheet, whatever a model is called."""
    out = io.StringIO()
    write = csv.writer(out).writerow
    write(CSV)
    for event in events:
        section = snapshot.sections.get(event.owner)
        told = datetime.fromtimestamp(event.wall, UTC).isoformat(timespec="milliseconds")
        write(
            [
                told,
                *map(safe, (event.model, event.action, event.reason, event.because)),
                event.bytes,
                *map(
                    safe, (event.device, section.owner.label if section else event.owner, event.by)
                ),
                round(event.seconds, 3) or "",
            ]
        )
    return out.getvalue()


def safe(cell: str) -> str:
    """The text, with an apostrophe before what a spreadsheet would run. Source: OWASP, CSV injection.

    >>> safe("=1+1"), safe("qwen")
    ("'=1+1", 'qwen')
    """
    said = clean(cell)
    return f"'{said}" if said.lstrip()[:1] in tuple("=+-@|%") and said.strip() else said
