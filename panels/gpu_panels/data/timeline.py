"""The timeline: the places of each model over time, the evictions, and the use of the cards. Pure.

A moment is one record of a device's use, with the time at which the record begins. Times are rounded to thousandths of
the shown range, so that values often stay equal. Equal values are not sent again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from statistics import median
from typing import NamedTuple

import msgspec

from gpu_runtime.facts import (
    HOST,
    KERNEL,
    Event,
    History,
    Moment,
    Share,
    Snapshot,
    ended_label,
    notebooks_in,
)
from gpu_runtime.rendering.text import as_csv
from gpu_runtime.rendering.views import event_phrase
from gpu_runtime.safe_text import clean
from gpu_runtime.units import in_calendar, show_bytes, show_seconds

from ..palette import SHARED, label_of
from .cells import natural, notebook_name, process_name

MARKED = ("offloaded", "unloaded")  # the evictions

Span = tuple[Moment, float]  # a moment, and the time until which it holds


def spans_of(moments: Sequence[Moment], end: float) -> list[Span]:
    """Each of the `moments` of one device with its end: the next moment, or the usual step later before a gap."""
    steps = [later.wall - moment.wall for moment, later in zip(moments, moments[1:], strict=False)]
    usual = median(steps) if steps else 0.0
    longest = max(10 * usual, 60.0)  # a longer step is a gap: nothing was sampled
    spans = []
    for moment, step in zip(moments, steps, strict=False):
        lasted = step if step <= longest else usual
        spans.append((moment, moment.wall + lasted))
    if moments:
        last = moments[-1]
        is_recent = end - last.wall <= longest
        spans.append((last, end if is_recent else last.wall + usual))
    return spans


def devices_of(event: Event) -> set[str]:
    """The devices on which the bytes of `event` are."""
    shares = event.shares or (Share(event.device, event.bytes),)
    return {share.device for share in shares}


def lease_titles(
    labels: Iterable[str], snapshot: Snapshot, events: Iterable[Event] = ()
) -> dict[str, str]:
    """The title of each label: `qwen · train.ipynb`, `train.ipynb` for its own code, else `qwen · pid 4121`."""
    ended = {label_of(id, ""): clean(name) for id, name in notebooks_in(events).items()}
    notebooks = ended | {
        label_of(section.owner.id, ""): notebook_name(section)
        for section in snapshot.sections.values()
    }
    return {label: _title(label, notebooks) for label in labels}


def _title(label: str, notebooks: Mapping[str, str]) -> str:
    name, _, pid = label.rpartition("@")
    process = notebooks.get(f"@{pid}", f"pid {pid}")
    return process if name == KERNEL else f"{clean(name)} · {process}"


WHOLE = 1000  # the length of the range in the drawing
MOST_ROWS = 30  # models with a row; those that held the most for the longest time
# Arrows between the same two models become one if closer than this part of the range.
FOLDED_PART = 1 / 12
# These patterns find the name of the model that needed the room, in the reason of an eviction. If another process
# needed the room, the reason names the process first: "eval.ipynb (pid 9) needs room for qwen."
_RECALLED_FOR = re.compile(r" needs room for (.+?)\.?$")
_FOR = re.compile(r"(?:^|; )([^;]+?) needs ")
OWN_MEMORY = "its own memory"  # stands for the lease of a notebook's own code
_PID = re.compile(r"pid (\d+)")  # in the requester of an event


class Range(NamedTuple):
    """The time that the whole tab shows, in epoch seconds."""

    start: float
    end: float

    def at(self, wall: float) -> float:
        """The position of `wall` (epoch seconds) in the drawing."""
        part = (wall - self.start) / max(self.end - self.start, 1e-9)
        return round(WHOLE * min(1.0, max(0.0, part)), 1)


class Stay(msgspec.Struct, frozen=True, array_like=True):
    """A span of time in which a model's bytes on one device did not change."""

    start: float
    end: float
    device: str
    hint: str


class ModelRow(msgspec.Struct, frozen=True):
    """One model of one process."""

    key: str
    title: str
    bars: tuple[Stay, ...]
    words: str  # for screen readers
    colour: str  # of its process, as in every chart


class Arrow(msgspec.Struct, frozen=True):
    """An eviction of one model (`victim`) for another (`heir`), or several evictions of the same two models."""

    at: float
    victim: str  # keys of rows
    heir: str
    label: str  # such as `6× in 2 min`; empty for a single eviction
    hint: str


class CardFigures(msgspec.Struct, frozen=True):
    """The driver's measurements of one card over time. Unknown values are left out."""

    device: str
    lines: dict[str, tuple[tuple[tuple[float, float], ...], ...]]  # unit -> pieces without a gap
    now: str
    highest_watts: float


class Drawing(msgspec.Struct, frozen=True):
    """Everything that the timeline shows."""

    start: float
    end: float
    rows: tuple[ModelRow, ...] = ()
    arrows: tuple[Arrow, ...] = ()
    figures: tuple[CardFigures, ...] = ()
    gaps: tuple[tuple[float, float], ...] = ()  # times in which nothing was recorded
    cards: tuple[str, ...] = ()  # if there are several, a bar has its name; RAM is hatched
    note: str = ""


def timeline(history: History, snapshot: Snapshot, shown: Range) -> Drawing:
    """The drawing of `history` within the range `shown`. `snapshot` has the notebooks' names for the rows."""
    moments = [moment for moment in history.moments if shown.start <= moment.wall <= shown.end]
    devices = sorted({moment.device for moment in moments}, key=natural)
    spans = {
        device: spans_of([moment for moment in moments if moment.device == device], shown.end)
        for device in devices
    }
    held = _held(spans)
    kept = held.most_common(MOST_ROWS)
    titles = lease_titles((label for label, _ in kept), snapshot, history.events)
    styles = SHARED.styles(sorted(label for label, _ in kept))
    rows = tuple(
        _row(label, titles[label], spans, shown, styles[label].colour) for label, _ in kept
    )
    cards = [device for device in devices if device != HOST]
    more = len(held) - len(kept)
    note = f"{more} more held less, and have no row." if more > 0 else ""
    if not rows:
        note = "No process held memory in this time."
        if not moments:
            note = (
                "No history is recorded in this time. Recording runs while any notebook or server "
                "runs."
            )
    return Drawing(
        shown.start,
        shown.end,
        tuple(sorted(rows, key=lambda row: (row.bars[0].start, natural(row.title)))),
        arrows(history.events, {label for label, _ in kept}, shown),
        tuple(_figures(device, spans[device], shown) for device in cards),
        _gaps(spans, shown),
        tuple(cards),
        note,
    )


def _held(spans: Mapping[str, Sequence[Span]]) -> Counter[str]:
    """Maps the label of each lease to a sum over time: its bytes times the seconds for which it had these bytes."""
    held: Counter[str] = Counter()
    for of_device in spans.values():
        for moment, end in of_device:
            for label, size in moment.claims.items():
                held[label] += int(size * max(end - moment.wall, 0.001))
    return held


# -- the rows --------------------------------------------------------------------------------------


def _row(
    label: str, title: str, spans: Mapping[str, Sequence[Span]], shown: Range, colour: str
) -> ModelRow:
    bars = [bar for device in spans for bar in _bars(label, device, spans[device], shown)]
    bars.sort(key=lambda bar: (bar.start, bar.device))
    seconds: Counter[str] = Counter()
    for bar in bars:
        part = (bar.end - bar.start) / WHOLE
        seconds[bar.device] += round(part * (shown.end - shown.start))
    places = [
        f"{show_seconds(lasted)} {'in RAM' if device == HOST else f'on {device}'}"
        for device, lasted in seconds.items()
    ]
    return ModelRow(label, title, tuple(bars), f"{title}: {', '.join(places)}", colour)


def _bars(label: str, device: str, spans: Sequence[Span], shown: Range) -> list[Stay]:
    """The bars of the lease with the `label` on one `device`. Neighbouring spans with equal bytes become one bar."""
    found: list[tuple[float, float, int]] = []
    for moment, end in spans:
        size = moment.claims.get(label, 0)
        if not size:
            continue
        if found and found[-1][1] == moment.wall and found[-1][2] == size:
            found[-1] = (found[-1][0], end, size)
        else:
            found.append((moment.wall, end, size))
    place = "in RAM" if device == HOST else f"on {device}"
    return [
        Stay(
            shown.at(start),
            shown.at(end),
            device,
            f"{show_bytes(size)} {place} for {show_seconds(end - start)}",
        )
        for start, end, size in found
    ]


def _gaps(spans: Mapping[str, Sequence[Span]], shown: Range) -> tuple[tuple[float, float], ...]:
    seen = sorted((moment.wall, end) for of_device in spans.values() for moment, end in of_device)
    gaps, covered = [], shown.start
    for start, end in (*seen, (shown.end, shown.end)):
        if shown.at(start) - shown.at(covered) >= WHOLE / 100:
            gaps.append((shown.at(covered), shown.at(start)))
        covered = max(covered, end)
    return tuple(gaps)


# -- who left for whom -----------------------------------------------------------------------------


def arrows(events: Iterable[Event], labels: set[str], shown: Range) -> tuple[Arrow, ...]:
    """The arrows of the evictions in `shown`, from the evicted lease to the one that needed the room, both of `labels`.

    Several evictions of the same two leases, each soon after the previous one, become one arrow.
    """
    found: dict[tuple[str, str], list[list[Event]]] = {}
    for event in events:
        pair = _pair(event, labels) if shown.start <= event.wall <= shown.end else None
        if pair is None:
            continue
        groups = found.setdefault(pair, [])
        apart = FOLDED_PART * (shown.end - shown.start)
        if groups and event.wall - groups[-1][-1].wall <= apart:
            groups[-1].append(event)
        else:
            groups.append([event])
    drawn = [_arrow(pair, group, shown) for pair, groups in found.items() for group in groups]
    return tuple(sorted(drawn, key=lambda arrow: arrow.at))


def _pair(event: Event, labels: set[str]) -> tuple[str, str] | None:
    """The label of the lease that `event` evicted from a card, and of the lease that needed the room; or None."""
    victim = label_of(event.owner, event.model)
    needed_by = _RECALLED_FOR.search(event.because) or _FOR.search(event.because)
    if event.action not in MARKED or victim not in labels or HOST in devices_of(event):
        return None
    name = needed_by[1] if needed_by else ""
    name = KERNEL if name == OWN_MEMORY else name
    pid = event.owner.partition(".")[0]  # the process made room for itself
    if event.by:  # a claimed name may contain another pid
        pid = next(reversed(_PID.findall(event.by)), "")
    heir = label_of(pid, name)
    return (victim, heir) if heir in labels and heir != victim else None


def _arrow(pair: tuple[str, str], group: Sequence[Event], shown: Range) -> Arrow:
    first, last = group[0], group[-1]
    label = ""
    if len(group) > 1:
        label = f"{len(group)}× in {show_seconds(max(1.0, last.wall - first.wall))}"
    hint = f"{clean(first.title)} {first.action}: {clean(first.because)}"
    return Arrow(shown.at(first.wall), *pair, label, hint)


# -- what the driver measured ----------------------------------------------------------------------

_UNITS = {"%": "utilisation_percent", "°C": "temperature_celsius", "W": "power_watts"}


def _figures(device: str, spans: Sequence[Span], shown: Range) -> CardFigures:
    lines = {unit: _pieces(spans, field, shown) for unit, field in _UNITS.items()}
    last = spans[-1][0] if spans else None
    known = {unit: getattr(last, field, None) for unit, field in _UNITS.items()}
    now = " · ".join(f"{value:.0f} {unit}" for unit, value in known.items() if value is not None)
    watts = [value for piece in lines["W"] for _, value in piece]
    return CardFigures(device, lines, now, max(watts, default=0.0))


def _pieces(
    spans: Sequence[Span], field: str, shown: Range
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """The values of one `field` over time. A gap in the record divides the values into pieces."""
    pieces: list[list[tuple[float, float]]] = []
    until = None
    for moment, end in spans:
        value = getattr(moment, field)
        if value is None:
            until = None
            continue
        if until != moment.wall:
            pieces.append([])
        pieces[-1].append((shown.at(moment.wall), round(value)))
        until = end
    return tuple(tuple(piece) for piece in pieces)


# -- the events: as lines that a click opens, as kinds for the filter, and as a CSV file

MOST = 500  # lines on the page: the newest events; the CSV file has all events
KINDS = {  # kind -> mark, actions
    "grant": ("✓", ("granted", "adopted", "grown", "loaded", "restored", "preload", "restore")),
    "wait": ("◷", ("waiting", "refused", "unfinished")),
    "evict": (
        "▼",
        ("offloaded", "unloaded", "moved", "move", "stowed", "hibernate", "stays", "misplaced"),
    ),
    "ended": ("○", ("released", "reaped", "lost", "left", "ended")),
    "operator": (
        "☞",
        (
            *("asked", "declined", "pin", "unpin", "drained", "undrained"),
            *("defrag", "resume", "interrupt", "who", "cancel"),
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
    known = {event.unnumbered: event for event in (*recent, *past)}
    return tuple(sorted(known.values(), key=lambda event: (event.wall, event.seq), reverse=True))


# -- as a file -------------------------------------------------------------------------------------

CSV_HEADER = "time model action reason because bytes device owner asked_by seconds".split()


def csv_of(events: Iterable[Event], snapshot: Snapshot) -> str:
    """The `events` as CSV, with times in UTC. No cell is a formula, even if a model's name looks like one."""
    events = list(events)
    notebooks = notebooks_in(events)
    rows = []
    for event in events:
        section = snapshot.sections.get(event.owner)
        time = datetime.fromtimestamp(in_calendar(event.wall), timezone.utc)
        cells = (
            time.isoformat(timespec="milliseconds"),
            event.title,
            event.action,
            event.reason,
            event.because,
            event.bytes,
            event.place,
            section.owner.label if section else _process(event, snapshot, notebooks),
            event.by,
            round(event.seconds, 3) or "",
        )
        rows.append(dict(zip(CSV_HEADER, cells, strict=True)))
    return as_csv(rows, CSV_HEADER)
