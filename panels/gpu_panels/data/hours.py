"""The tab Hours: a chart of how the cards were used over time, and the table of the account. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpu_runtime.rendering.html import esc
from gpu_runtime.safe_text import clean
from gpu_runtime.units import show_seconds

from ..palette import EDGE
from .cells import NOTHING, Cell, Column, Row, as_json

# The columns of `rt.report(by="time")`
IN_USE, IDLE, BLOCKING, OUTSIDE, FREE = ON_CARD = (
    "in_use_gib_h", "idle_gib_h", "blocking_gib_h", "outside_gib_h", "free_gib_h",
)  # fmt: skip
# Only what kept others waiting is a problem, so only this has a saturated colour.
COLOURS = {IN_USE: "#748db1", IDLE: "#d7e2e3", BLOCKING: "#d55e00", OUTSIDE: "#998a65"}
HEIGHT = 180  # pixels of a card that is full all the time
MOST_LABELS = 7
MOST_BARS = 48
NO_HOURS = "Nothing was recorded in this time. The first figures appear within a minute."
HINT = (
    "A card-hour is a whole card for an hour; the columns after it are GiB-hours. In use: a cell, a call, a load ran. "
    "Kept waiting: idle, while somebody else waited for the card. Saved: used by others, where there would have been "
    "no room without parking."
)

Record = Mapping[str, Any]


def chart(records: Sequence[Record]) -> str:
    """The stacked bars of the report by time, as HTML; empty without records. Of many hours, a bar is a day."""
    if not records:
        return ""
    records = _by_day(records) if len(records) > MOST_BARS else records
    sums = [{state: float(record[state]) for state in ON_CARD} for record in records]
    most = max(sum(bar.values()) for bar in sums) or 1.0
    every = -(-len(sums) // MOST_LABELS)
    bars, labels = [], []
    for place, (record, bar) in enumerate(zip(records, sums, strict=True)):
        parts = "".join(
            f'<div style="height:{100 * bar[state] / most:.2f}%;background:{COLOURS[state]}"></div>'
            for state in (IN_USE, OUTSIDE, IDLE, BLOCKING)
        )
        title = esc(f"{_when(record)}: {_shares(bar)}")
        bars.append(f'<div style="{_BAR}" title="{title}">{parts}</div>')
        if place % every == 0:
            last = min(every, len(sums) - place)
            labels.append(f'<div style="flex:{last} 0 0;min-width:0">{esc(_when(record))}</div>')
    total = {state: sum(bar[state] for bar in sums) for state in ON_CARD}
    legend = "".join(
        f'<span style="margin-right:16px;white-space:nowrap"><span style="{_SWATCH};'
        f'background:{COLOURS.get(state, "transparent")}"></span>{_share(total, state)} {WORDS[state]}</span>'
        for state in ON_CARD
    )
    return (
        f'<div class="soft">{legend}</div><div role="img" aria-label="{esc(_shares(total))}" style="{_FRAME}">'
        f'{"".join(bars)}</div><div class="soft" style="{_LABELS}">{"".join(labels)}</div>'
    )


def _by_day(records: Sequence[Record]) -> list[Record]:
    """The sums of each day, in the time zone of the server."""
    days: dict[datetime.date, dict[str, float]] = {}
    for record in records:
        day = days.setdefault(_local(record).date(), dict.fromkeys(ON_CARD, 0.0))
        for state in ON_CARD:
            day[state] += float(record[state])
    midnight = datetime.time()
    return [{"time": datetime.datetime.combine(day, midnight)} | days[day] for day in sorted(days)]


MOST_DAYS = 31  # rows of the calendar


def calendar(records: Sequence[Record]) -> str:
    """When cards were held idle: a row for each day and a cell for each hour, as HTML. The darker, the more.

    `records` are those of hours. Empty if no card was idle.
    """
    idle: dict[tuple[datetime.date, int], float] = {}
    for record in records:
        local = _local(record)
        size = float(record[IDLE]) + float(record[BLOCKING])
        idle[local.date(), local.hour] = idle.get((local.date(), local.hour), 0.0) + size
    most = max(idle.values(), default=0.0)
    if not most:
        return ""
    heads = "".join(
        f'<th scope="col" style="{_HEAD}">{hour if hour % 6 == 0 else ""}</th>'
        for hour in range(24)
    )
    rows = []
    for day in sorted({day for day, _ in idle})[-MOST_DAYS:]:
        cells = [f'<th scope="row" style="{_DAY}">{day:%a %d}</th>']
        for hour in range(24):
            size = idle.get((day, hour), 0.0)
            title = f"{day:%a %d}, {hour}:00: {size:.1f} GiB-hours idle"
            colour = f"background:rgba(213,94,0,{size / most:.2f})"
            cells.append(f'<td title="{title}" style="{_HOUR};{colour}"></td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="soft">Held idle, by day and hour; the strongest colour is {most:.1f} GiB-hours</div>'
        f'<table style="{_CALENDAR}"><tr><td style="width:4em"></td>{heads}</tr>{"".join(rows)}</table>'
    )


def own_week(records: Sequence[Record], user: str) -> str:
    """A line about the last seven days of `user`, from the report by user; empty if nothing was recorded of them."""
    mine = next((record for record in records if record["user"] == user), None)
    if mine is None:
        return ""
    idle = float(mine[IDLE]) + float(mine[BLOCKING])
    parts = [f"{float(mine['card_h']):.1f} card-hours", f"{idle:.1f} GiB-hours idle"]
    if mine["waited_h"]:
        parts.append(f"waited {show_seconds(3600 * float(mine['waited_h']))}")
    return f"Your week: {', '.join(parts)}"


_CALENDAR = "border-spacing:1px;width:100%;max-width:760px;table-layout:fixed;font-size:12px"
_HOUR = f"height:14px;padding:0;outline:1px solid {EDGE}40"
_HEAD = "font-weight:400;text-align:left;padding:0"
_DAY = f"{_HEAD};white-space:nowrap"
_BAR = "flex:1 0 0;min-width:0;display:flex;flex-direction:column-reverse"
_SWATCH = f"display:inline-block;width:12px;height:12px;margin-right:6px;border:1px solid {EDGE}"
_FRAME = (
    f"display:flex;gap:1px;height:{HEIGHT}px;margin-top:8px;border:solid {EDGE};border-width:1px 0"
)
_LABELS = "display:flex;gap:1px;font-size:12px;overflow:hidden;white-space:nowrap"
WORDS = {
    IN_USE: "in use",
    IDLE: "idle",
    BLOCKING: "kept others waiting",
    OUTSIDE: "outside gpu-console",
    FREE: "free",
}


def _share(bar: Mapping[str, float], state: str) -> str:
    return f"{100 * bar[state] / (sum(bar.values()) or 1.0):.0f} %"


def _shares(bar: Mapping[str, float]) -> str:
    return ", ".join(f"{_share(bar, state)} {WORDS[state]}" for state in ON_CARD if bar[state])


def _local(record: Record) -> datetime.datetime:
    """The beginning of the `record`, in the time zone of the server."""
    seconds = record["time"].timestamp()  # pandas has its own kind of times
    return datetime.datetime.fromtimestamp(seconds)


def _when(record: Record) -> str:
    local = _local(record)
    return f"{local:%a %d}" if (local.hour, local.minute) == (0, 0) else f"{local:%H:%M}"


_TITLES = {
    "user": Column("User"),
    "notebook": Column("Notebook"),
    "model": Column("Model"),
    "card": Column("Card"),
    "waited_for": Column("Waited for", hint="Who held the card meanwhile"),
    "card_h": Column("Card-hours", True, "Whole cards: in use, idle, kept waiting and outside"),
    IN_USE: Column("In use", True, "GiB-hours in which a cell, a call or a load ran"),
    IDLE: Column("Idle", True, "GiB-hours"),
    BLOCKING: Column(
        "Kept waiting", True, "GiB-hours held idle while somebody else waited for the card"
    ),
    OUTSIDE: Column("Outside", True, "GiB-hours of programs that do not use gpu-console"),
    FREE: Column("Free", True, "GiB-hours"),
    "parked_gib_h": Column("Parked", True, "GiB-hours in RAM"),
    "on_disk_gib_h": Column("On disk", True, "GiB-hours of parked memory in files"),
    "saved_gib_h": Column(
        "Saved", True, "GiB-hours that others used, where there was no room without parking"
    ),
    "waited_h": Column("Waited", True, "How long its requests waited"),
}


def report_columns(records: Sequence[Record]) -> list[Column]:
    """The columns of a table of `records`."""
    return [_TITLES[name] for name in records[0]] if records else [Column("User")]


def report_rows(records: Iterable[Record]) -> str:
    """The rows of a table of `records` as JSON."""
    rows = []
    for number, record in enumerate(records):
        cells = tuple(_cell(name, value) for name, value in record.items())
        rows.append(Row(str(number), cells))
    return as_json(rows)


def _cell(name: str, value: Any) -> Cell:
    if isinstance(value, str):
        return Cell(clean(value) or "no notebook", kind="" if value else "soft")
    number = float(value)
    if not number:
        return NOTHING
    if name == "waited_h":
        return Cell(show_seconds(number * 3600), number)
    return Cell(
        f"{number:,.1f}" if number >= 0.05 else "< 0.1",
        number,
        kind="strong" if name == BLOCKING else "",
    )
