"""The live terminal view of `gpu status --watch`: first the problems, then the devices, then the
holders by bytes.

This module is pure: it turns a Snapshot into the lines of a screen, with colours. `cli.py` redraws
the screen.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpu_runtime.facts import Snapshot
from gpu_runtime.units import show_seconds

from . import text, views, words

BOLD, DIM, RED, ORANGE = "1", "2", "31;1", "33"
_HEADERS = ("MODEL", "SIZE", "WHERE", "HELD BY", "IMPORTANCE", "STATE")
_LEAST_WIDTH = 20


def screen(snapshot: Snapshot, width: int, height: int, now: str) -> list[str]:
    """The lines of a screen of `width` columns and `height` lines. `now` is the time of day.

    Lines that do not fit are left out, from the bottom. The last line then has the number of these
    lines.
    """
    width = max(width, _LEAST_WIDTH)
    lines = list(_lines(snapshot, now))
    if len(lines) > height:
        more = len(lines) - height + 1
        lines = [*lines[: height - 1], (DIM, f"… {more} more lines")]
    return [_coloured(code, _cut(line, width)) for code, line in lines]


def _lines(snapshot: Snapshot, now: str) -> Iterator[tuple[str, str]]:
    """The lines of the screen in their order, each with its colour."""
    yield BOLD, f"{views.device_title(snapshot)} · {now} · Ctrl-C ends"
    for problem in words.alarms(snapshot):
        yield RED, f"! {problem}"
    for request in _waiting(snapshot):
        yield ORANGE, f"! {request}"
    yield "", ""
    id_width = max((len(view.device.id) for view in snapshot.devices), default=0)
    for view, bar in zip(snapshot.devices, views.bars(snapshot), strict=True):
        drawn, legend = text.draw(bar)
        remarks = ", ".join(views.remarks(snapshot, view))
        line = f"{view.device.id:{id_width}}  {drawn}  {views.fill(view)}  {view.pressure:.0%}  "
        yield "", f"{line}{remarks}".rstrip()
        if legend:
            yield "", f"{'':{id_width}}  {legend}"
    yield "", ""
    rows = sorted(views.holdings(snapshot), key=lambda row: -(row.bytes or 0))
    cells = [
        (row.name, text.size(row.bytes), row.where, row.holder, ", ".join(row.marks), row.state)
        for row in rows
    ]
    for place, line in enumerate(text.table(cells, _HEADERS, right=(1,))):
        in_use = place and rows[place - 1].state.startswith("in use")
        yield DIM if not place else BOLD if in_use else "", line


def _waiting(snapshot: Snapshot) -> Iterator[str]:
    """The requests that wait for room, as sentences: the process, the time, the bytes and the
    reason.
    """
    for ticket in snapshot.tickets:
        if ticket.verb == "use":
            waited = show_seconds(max(0.0, snapshot.now - ticket.arrived))
            because = f": {ticket.because}" if ticket.because else ""
            name = "" if ticket.name == words.KERNEL else f" for {ticket.name}"
            who = views.holder(snapshot, ticket.owner)
            yield views.clean(f"{who} waits {waited}{name}{because}")


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"


def _coloured(code: str, line: str) -> str:
    return f"\x1b[{code}m{line}\x1b[0m" if code and line else line
