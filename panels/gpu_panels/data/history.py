"""How a device was used: its moments and events as the columns of a chart.

Pure. Memory is held in steps, so what a lease held for a while is one rectangle, however many moments show it; an
hour in which nothing happened costs no more than a second. Drawing is `historychart.py`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from gpu_runtime.facts import Event, Level, Moment, Share, Snapshot
from gpu_runtime.rendering.views import clean
from gpu_runtime.rendering.words import told
from gpu_runtime.units import show_bytes

from ..palette import LEVELS, PLAIN, UNOWNED, Look, label_of, level_word
from .bar_columns import unit_of
from .bars import notebook

WINDOWS = {"15 min": 900.0, "2 h": 7200.0, "24 h": 86400.0}
POINTS = 600  # moments of a device that are asked for
MOST_LEASES = 12  # told apart in one chart; what held least, over time, gathers
OTHERS, UNLEASED = "others", "not leased"
MARKED = {"offloaded": "inverted_triangle", "unloaded": "square_x"}  # the evictions
MOST_MARKS = 240  # over the width of the chart; what happened closer together is told by one mark


class Run(NamedTuple):
    """What one lease held without a change, from when to when, and between which heights of the stack."""

    label: str  # of the lease; or OTHERS, UNLEASED
    start: float  # epoch seconds
    end: float
    low: int
    high: int

    @property
    def bytes(self) -> int:
        return self.high - self.low


class Band(NamedTuple):
    """A time of one pressure level."""

    level: Level
    start: float
    end: float


class Chart(NamedTuple):
    """All that the chart of one device shows."""

    device: str
    start: float
    end: float
    total_bytes: int  # 0: nothing is known of this device
    runs: tuple[Run, ...]
    bands: tuple[Band, ...]
    limits: tuple[tuple[float, int], ...]  # the budget, from when on
    events: tuple[Event, ...]  # those that are marked
    labels: tuple[str, ...]  # of the leases told apart, from the bottom up


def chart(
    moments: Sequence[Moment], events: Iterable[Event], device: str, start: float, end: float
) -> Chart:
    """What there is to show of a device between two times; `moments` and `events` may be of any device and time."""
    mine = sorted(
        (one for one in moments if one.device == device and one.wall <= end),
        key=lambda one: one.wall,
    )
    spans = _spans(mine, end)
    labels = ranked(spans)
    shown = tuple(
        event
        for event in events
        if event.action in MARKED and start <= event.wall <= end and device in _devices(event)
    )
    return Chart(
        device,
        start,
        end,
        mine[-1].total_bytes if mine else 0,
        tuple(_runs(spans, labels)),
        tuple(_bands(spans)),
        tuple(_limits(spans)),
        shown,
        labels,
    )


Span = tuple[Moment, float]  # a moment, and until when it stands for what was


def _spans(moments: Sequence[Moment], end: float) -> list[Span]:
    """Each moment with its end: the next one, or where the record has a gap (nobody sampled), as long as usual."""
    steps = [later.wall - one.wall for one, later in zip(moments, moments[1:], strict=False)]
    usual = median(steps) if steps else 0.0
    longest = max(10 * usual, 60.0)
    spans = [
        (one, one.wall + (step if step <= longest else usual))
        for one, step in zip(moments, steps, strict=False)
    ]
    if moments:
        last = moments[-1]
        spans.append((last, end if end - last.wall <= longest else last.wall + usual))
    return spans


def ranked(spans: Iterable[Span]) -> tuple[str, ...]:
    """The leases that are told apart, whoever held most over the time first."""
    held: Counter[str] = Counter()
    for moment, end in spans:
        for label, size in moment.claims.items():
            held[label] += int(size * max(end - moment.wall, 0.001))
    order = sorted(held, key=lambda label: (-held[label], label))
    return tuple(order if len(order) <= MOST_LEASES else order[: MOST_LEASES - 1])


def stacked(moment: Moment, labels: Sequence[str]) -> list[tuple[str, int]]:
    """A moment from the bottom up: the leases told apart, the others as one, and what is in use beyond all leases."""
    told_apart = [(label, moment.claims.get(label, 0)) for label in labels]
    others = moment.claimed_bytes - sum(size for _, size in told_apart)
    beyond = (moment.measured_bytes or 0) - moment.claimed_bytes
    return [
        (label, size)
        for label, size in (*told_apart, (OTHERS, others), (UNLEASED, beyond))
        if size > 0
    ]


def _runs(spans: Iterable[Span], labels: Sequence[str]) -> list[Run]:
    done: list[Run] = []
    going: dict[str, Run] = {}
    for moment, end in spans:
        low, now = 0, {}
        for label, size in stacked(moment, labels):
            before = going.get(label)
            if (
                before
                and before.end == moment.wall
                and (before.low, before.high) == (low, low + size)
            ):
                now[label] = before._replace(end=end)
            else:
                now[label] = Run(label, moment.wall, end, low, low + size)
            low += size
        done += [
            run for label, run in going.items() if label not in now or now[label].start != run.start
        ]
        going = now
    return sorted([*done, *going.values()], key=lambda run: (run.start, run.low))


def _bands(spans: Iterable[Span]) -> list[Band]:
    bands: list[Band] = []
    for moment, end in spans:
        if bands and bands[-1].level == moment.level and bands[-1].end == moment.wall:
            bands[-1] = bands[-1]._replace(end=end)
        else:
            bands.append(Band(moment.level, moment.wall, end))
    return [band for band in bands if band.level is not Level.LOW]


def _limits(spans: Sequence[Span]) -> list[tuple[float, int]]:
    """The points of a line in steps: where the budget changed, and its two ends."""
    points = [
        (moment.wall, moment.limit_bytes)
        for n, (moment, _) in enumerate(spans)
        if n == 0 or moment.limit_bytes != spans[n - 1][0].limit_bytes
    ]
    return [*points, (spans[-1][1], spans[-1][0].limit_bytes)] if spans else []


def _devices(event: Event) -> set[str]:
    return {share.device for share in event.shares or (Share(event.device, event.bytes),)}


# -- words --------------------------------------------------------------------------------------------------------


def titles(labels: Iterable[str], snapshot: Snapshot) -> dict[str, str]:
    """What each lease is called: `qwen · train.ipynb`, and `qwen · pid 4121` of a process that is gone."""
    notebooks = {
        label_of(section.owner.id, ""): notebook(section) for section in snapshot.sections.values()
    }
    named = {OTHERS: "other leases", UNLEASED: "in use, not leased"}
    return {label: named.get(label) or _title(label, notebooks) for label in labels}


def _title(label: str, notebooks: Mapping[str, str]) -> str:
    name, _, pid = label.rpartition("@")
    return f"{clean(name)} · {notebooks.get(f'@{pid}', f'pid {pid}')}"


def silence(drawn: Chart) -> str:
    """What to say where there is nothing to draw; empty where there is."""
    if drawn.runs:
        return ""
    if drawn.total_bytes:
        return f"Nobody held memory on {drawn.device} in this time."
    return (
        f"Nothing is recorded of {drawn.device} yet. What happens from now on is: the record is kept as long as "
        "any notebook or server uses the ledger."
    )


# -- columns ------------------------------------------------------------------------------------------------------


class Drawing(NamedTuple):
    """All that a figure needs to show a chart."""

    chart: Chart
    runs: dict[str, list[Any]]
    bands: dict[str, list[Any]]
    limits: dict[str, list[Any]]
    marks: dict[str, list[Any]]


def drawing(drawn: Chart, looks: Mapping[str, Look], named: Mapping[str, str]) -> Drawing:
    """The chart as columns."""
    return Drawing(
        drawn,
        run_columns(drawn, looks, named),
        band_columns(drawn),
        limit_columns(drawn),
        mark_columns(drawn),
    )


RUNS = ("left", "right", "bottom", "top", "colour", "alpha", "hatch", "title", "size")


def run_columns(
    drawn: Chart, looks: Mapping[str, Look], named: Mapping[str, str]
) -> dict[str, list[Any]]:
    """A source's columns: a rectangle a run; times in ms since the epoch, heights in the axis's unit."""
    other = {OTHERS: (UNOWNED, 0.75, PLAIN), UNLEASED: (UNOWNED, 0.3, "x")}
    rows, unit = [], unit_of(drawn.total_bytes)[0]
    for run in drawn.runs:
        look = looks.get(run.label)
        drawn_as = (
            (look.colour, 1.0, look.texture)
            if look
            else other.get(run.label, (UNOWNED, 1.0, PLAIN))
        )
        rows.append(
            (
                run.start * 1e3,
                run.end * 1e3,
                run.low / unit,
                run.high / unit,
                *drawn_as,
                named.get(run.label, run.label),
                show_bytes(run.bytes),
            )
        )
    return _columns(RUNS, rows)


BANDS = ("left", "right", "colour", "alpha", "hatch", "told")


def band_columns(drawn: Chart) -> dict[str, list[Any]]:
    """A source's columns: a band a time of pressure."""
    return _columns(
        BANDS,
        [
            (
                band.start * 1e3,
                band.end * 1e3,
                LEVELS[band.level].colour,
                LEVELS[band.level].alpha,
                LEVELS[band.level].hatch,
                f"{level_word(band.level)} pressure",
            )
            for band in drawn.bands
        ],
    )


MARKS = ("x", "y", "marker", "title", "told")


def mark_columns(drawn: Chart) -> dict[str, list[Any]]:
    """A source's columns: a mark an event, in a row above the device's top; those too close together as one."""
    step = max((drawn.end - drawn.start) / MOST_MARKS, 1e-3)
    near: dict[tuple[int, str], list[Event]] = {}
    for event in drawn.events:
        near.setdefault((int((event.wall - drawn.start) / step), event.action), []).append(event)
    rows, height = [], drawn.total_bytes * MARK_HEIGHT / unit_of(drawn.total_bytes)[0]
    for (_, action), several in near.items():
        first = several[0]
        title = (
            f"{clean(first.model)} {action}" if len(several) == 1 else f"{len(several)} × {action}"
        )
        lines = (
            [told(first)]
            if len(several) == 1
            else [f"{clean(one.model)} {told(one)}" for one in several[:3]]
        )
        more = [f"and {len(several) - 3} more"] if len(several) > 3 else []
        rows.append(
            (
                first.wall * 1e3,
                height,
                MARKED[action],
                title,
                "\n".join(map(clean, [*lines, *more])),
            )
        )
    return _columns(MARKS, rows)


MARK_HEIGHT, TOP = 1.06, 1.12  # parts of a device's total


def limit_columns(drawn: Chart) -> dict[str, list[Any]]:
    unit = unit_of(drawn.total_bytes)[0]
    return _columns(("x", "y"), [(wall * 1e3, size / unit) for wall, size in drawn.limits])


def _columns(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {name: [row[n] for row in rows] for n, name in enumerate(names)}
