"""The use of a device over time: recorded moments and events as the columns of a chart.

A moment is one record of a device's use in the history. This module is pure, and
`charts/history_chart.py` draws the chart. While a lease's bytes do not change, one rectangle shows
them, however many moments there are. So an hour without a change costs no more than a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from gpu_runtime.facts import Event, Level, Moment, Share, Snapshot
from gpu_runtime.rendering.views import clean
from gpu_runtime.rendering.words import event_sentence
from gpu_runtime.units import show_bytes

from ..palette import LEVELS, PLAIN, UNOWNED, LeaseStyle, label_of, level_word
from .columns import Columns, as_columns, unit_of
from .names import KERNEL, notebook_name

WINDOWS = {"15 min": 900.0, "2 h": 7200.0, "24 h": 86400.0}
POINTS = 600  # moments of each device that are requested
MOST_LEASES = 12  # leases with an area of their own in the chart; the smallest share one area
OTHERS, UNLEASED = "others", "not leased"
MARKED = {"offloaded": "inverted_triangle", "unloaded": "square_x"}  # the evictions
MOST_MARKS = 240  # marks over the width of the chart; events closer together share one mark
MARK_HEIGHT, TOP = 1.06, 1.12  # height of marks and of the axis; 1 is the device's total
MOST_NAMED = 3  # events in one mark's tooltip; the others are counted


class HeldInterval(NamedTuple):
    """An interval in which a lease's bytes do not change, with its two heights in the stack."""

    label: str  # label of the lease; or OTHERS, UNLEASED
    start: float  # epoch seconds
    end: float
    low: int
    high: int

    @property
    def bytes(self) -> int:
        """The bytes that were held."""
        return self.high - self.low


class Band(NamedTuple):
    """A period of one pressure level."""

    level: Level
    start: float
    end: float


class DeviceHistory(NamedTuple):
    """Everything that the chart of one device shows."""

    device: str
    start: float
    end: float
    total_bytes: int  # 0 if nothing is known about this device
    intervals: tuple[HeldInterval, ...]
    bands: tuple[Band, ...]
    limits: tuple[tuple[float, int], ...]  # (start time, budget in bytes)
    events: tuple[Event, ...]  # the events that have a mark
    labels: tuple[str, ...]  # leases with an area of their own, from the bottom up


def device_history(
    moments: Sequence[Moment], events: Iterable[Event], device: str, start: float, end: float
) -> DeviceHistory:
    """The history of `device` between the epoch seconds `start` and `end`.

    `moments` and `events` of other devices and times are left out.
    """
    of_device = [moment for moment in moments if moment.device == device and moment.wall <= end]
    of_device.sort(key=lambda moment: moment.wall)
    spans = spans_of(of_device, end)
    labels = ranked(spans)
    marked = [
        event
        for event in events
        if event.action in MARKED and start <= event.wall <= end and device in devices_of(event)
    ]
    return DeviceHistory(
        device,
        start,
        end,
        of_device[-1].total_bytes if of_device else 0,
        tuple(_intervals(spans, labels)),
        tuple(_bands(spans)),
        tuple(_limits(spans)),
        tuple(marked),
        labels,
    )


Span = tuple[Moment, float]  # a moment, and the time until which it holds


def spans_of(moments: Sequence[Moment], end: float) -> list[Span]:
    """Each moment together with the time at which it ends.

    A moment ends when the next moment begins. Before a gap in the record, a moment ends after the
    usual step between moments.
    """
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


def ranked(spans: Iterable[Span]) -> tuple[str, ...]:
    """The labels of the leases that get their own area in the chart.

    The lease that holds the most in `spans` is first.
    """
    held: Counter[str] = Counter()
    for moment, end in spans:
        seconds = max(end - moment.wall, 0.001)
        for label, size in moment.claims.items():
            held[label] += int(size * seconds)
    order = sorted(held, key=lambda label: (-held[label], label))
    return tuple(order if len(order) <= MOST_LEASES else order[: MOST_LEASES - 1])


def stacked(moment: Moment, labels: Sequence[str]) -> list[tuple[str, int]]:
    """The labels and bytes of a `moment`, in the order from the bottom of the chart.

    First come the leases in `labels`, then all other leases as one, then memory outside all leases.
    """
    apart = [(label, moment.claims.get(label, 0)) for label in labels]
    others = moment.claimed_bytes - sum(size for _, size in apart)
    unleased = (moment.measured_bytes or 0) - moment.claimed_bytes
    stack = [*apart, (OTHERS, others), (UNLEASED, unleased)]
    return [(label, size) for label, size in stack if size > 0]


def _intervals(spans: Iterable[Span], labels: Sequence[str]) -> list[HeldInterval]:
    done: list[HeldInterval] = []
    current: dict[str, HeldInterval] = {}  # intervals that the next span may extend
    for moment, end in spans:
        extended: dict[str, HeldInterval] = {}
        low = 0
        for label, size in stacked(moment, labels):
            new = HeldInterval(label, moment.wall, end, low, low + size)
            extended[label] = _extended(current.get(label), new)
            low += size
        for label, interval in current.items():
            if label not in extended or extended[label].start != interval.start:
                done.append(interval)
        current = extended
    return sorted([*done, *current.values()], key=lambda interval: (interval.start, interval.low))


def _extended(before: HeldInterval | None, new: HeldInterval) -> HeldInterval:
    """The interval `before` extended by `new` if the two touch at the same heights, otherwise `new`."""
    if before is None or before.end != new.start:
        return new
    same_heights = (before.low, before.high) == (new.low, new.high)
    return before._replace(end=new.end) if same_heights else new


def _bands(spans: Iterable[Span]) -> list[Band]:
    bands: list[Band] = []
    for moment, end in spans:
        last = bands[-1] if bands else None
        if last and last.level == moment.level and last.end == moment.wall:
            bands[-1] = last._replace(end=end)
        else:
            bands.append(Band(moment.level, moment.wall, end))
    return [band for band in bands if band.level is not Level.LOW]


def _limits(spans: Sequence[Span]) -> list[tuple[float, int]]:
    """The points of the stepped line of the budget: the start, each change, and the end."""
    if not spans:
        return []
    points: list[tuple[float, int]] = []
    for moment, _ in spans:
        if not points or moment.limit_bytes != points[-1][1]:
            points.append((moment.wall, moment.limit_bytes))
    last, end = spans[-1]
    return [*points, (end, last.limit_bytes)]


def devices_of(event: Event) -> set[str]:
    """The devices of the bytes of `event`."""
    shares = event.shares or (Share(event.device, event.bytes),)
    return {share.device for share in shares}


# -- words -----------------------------------------------------------------------------------------


def lease_titles(labels: Iterable[str], snapshot: Snapshot) -> dict[str, str]:
    """The title of each of `labels`: `qwen · train.ipynb`, or `train.ipynb` for a notebook's own code.

    If the process is not in the `snapshot`, the title is `qwen · pid 4121`.
    """
    notebooks = {
        label_of(section.owner.id, ""): notebook_name(section)
        for section in snapshot.sections.values()
    }
    fixed = {OTHERS: "other leases", UNLEASED: "in use, not leased"}
    return {label: fixed.get(label) or _title(label, notebooks) for label in labels}


def _title(label: str, notebooks: Mapping[str, str]) -> str:
    name, _, pid = label.rpartition("@")
    process = notebooks.get(f"@{pid}", f"pid {pid}")
    return process if name == KERNEL else f"{clean(name)} · {process}"


def empty_note(history: DeviceHistory) -> str:
    """The sentence for an empty `history`, or "" if there is something to draw."""
    if history.intervals:
        return ""
    if history.total_bytes:
        return f"No process held memory on {history.device} in this period."
    return (
        f"No history of {history.device} is recorded yet. Recording runs while any notebook or "
        "server uses the ledger."
    )


# -- columns ---------------------------------------------------------------------------------------

INTERVAL_COLUMNS = ("left", "right", "bottom", "top", "colour", "alpha", "hatch", "title", "size")
BAND_COLUMNS = ("left", "right", "colour", "alpha", "hatch", "tooltip")
LIMIT_COLUMNS = ("x", "y")
MARK_COLUMNS = ("x", "y", "marker", "title", "tooltip")
_UNOWNED = {OTHERS: (UNOWNED, 0.75, PLAIN), UNLEASED: (UNOWNED, 0.3, "x")}  # colour, alpha, hatch


class HistoryColumns(NamedTuple):
    """The data of a figure that shows a device's history.

    Times are in ms, heights in the unit of the axis.
    """

    history: DeviceHistory
    intervals: Columns
    bands: Columns
    limits: Columns
    marks: Columns


def history_columns(
    history: DeviceHistory, styles: Mapping[str, LeaseStyle], titles: Mapping[str, str]
) -> HistoryColumns:
    """The `history` as columns; `styles` and `titles` are by the labels of leases."""
    return HistoryColumns(
        history,
        interval_columns(history, styles, titles),
        band_columns(history),
        limit_columns(history),
        mark_columns(history),
    )


def interval_columns(
    history: DeviceHistory, styles: Mapping[str, LeaseStyle], titles: Mapping[str, str]
) -> Columns:
    """One rectangle for each interval of `history`.

    `styles` and `titles` are by the labels of leases.
    """
    unit_bytes, _ = unit_of(history.total_bytes)
    rows = []
    for interval in history.intervals:
        style = styles.get(interval.label)
        if style:
            drawn = (style.colour, 1.0, style.texture)
        else:
            drawn = _UNOWNED.get(interval.label, (UNOWNED, 1.0, PLAIN))
        row = (
            interval.start * 1e3,
            interval.end * 1e3,
            interval.low / unit_bytes,
            interval.high / unit_bytes,
            *drawn,
            titles.get(interval.label, interval.label),
            show_bytes(interval.bytes),
        )
        rows.append(row)
    return as_columns(INTERVAL_COLUMNS, rows)


def band_columns(history: DeviceHistory) -> Columns:
    """One band for each period of pressure in `history`."""
    rows = []
    for band in history.bands:
        style = LEVELS[band.level]
        tooltip = f"{level_word(band.level)} pressure"
        rows.append(
            (band.start * 1e3, band.end * 1e3, style.colour, style.alpha, style.hatch, tooltip)
        )
    return as_columns(BAND_COLUMNS, rows)


def limit_columns(history: DeviceHistory) -> Columns:
    """The points of the budget's line in `history`."""
    unit_bytes, _ = unit_of(history.total_bytes)
    return as_columns(
        LIMIT_COLUMNS, [(wall * 1e3, size / unit_bytes) for wall, size in history.limits]
    )


def mark_columns(history: DeviceHistory) -> Columns:
    """One mark for each event of `history`, in a row above the device's top.

    Events that are too close together share one mark.
    """
    step = max((history.end - history.start) / MOST_MARKS, 1e-3)
    near: dict[tuple[int, str], list[Event]] = {}
    for event in history.events:
        place = int((event.wall - history.start) / step)
        near.setdefault((place, event.action), []).append(event)
    unit_bytes, _ = unit_of(history.total_bytes)
    height = history.total_bytes * MARK_HEIGHT / unit_bytes
    rows = [
        (events[0].wall * 1e3, height, MARKED[action], *_mark_words(action, events))
        for (_, action), events in near.items()
    ]
    return as_columns(MARK_COLUMNS, rows)


def _mark_words(action: str, events: Sequence[Event]) -> tuple[str, str]:
    """Title and tooltip of a mark for one or more events."""
    first = events[0]
    if len(events) == 1:
        return f"{clean(first.model)} {action}", clean(event_sentence(first))
    lines = [clean(f"{event.model} {event_sentence(event)}") for event in events[:MOST_NAMED]]
    more = len(events) - MOST_NAMED
    if more > 0:
        lines.append(f"and {more} more")
    return f"{len(events)} × {action}", "\n".join(lines)
