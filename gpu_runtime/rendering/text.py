"""Renders facts as aligned text, for a terminal and for the text output in a notebook's file.

This module is pure. `cli.py` redraws the screen of `gpu status --watch`.
"""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from gpu_runtime.facts import (
    Applied,
    Event,
    Health,
    Outcome,
    OutOfMemoryStory,
    Plan,
    Replayed,
    Snapshot,
    importance_name,
)
from gpu_runtime.units import show_bytes, show_seconds

from . import views
from .views import Bar, clean, clock

BAR_CELLS = 32
_LEASES = "█▓"  # neighbours alternate, so that their border is visible
_MARKS = {"arriving": "▒", "leaving": "▒", "residue": "░", "ended": "░", "strangers": "░"}
_FREE, _LIMIT = "·", "│"
_OWNER_ID = re.compile(r"\d+(\.\d+)+")
LONGEST = 44  # characters of a cell; a longer text is shortened in the middle
LONGEST_LEGEND = 28  # characters of a model's name in a bar's legend
MOST_LEGEND = 8  # entries of a bar's legend


def status(snapshot: Snapshot, prompt: str = "%gpu") -> str:
    """The devices, the holders, the queue and the last decision. Commands begin with `prompt`."""
    sections = [
        [views.device_title(snapshot), *views.alarms(snapshot)],
        list(_devices(snapshot)),
        _holders(snapshot, prompt),
        _queue(snapshot),
        _past(snapshot),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def host(snapshot: Snapshot, prompt: str = "%gpu") -> str:
    """The `snapshot` of one of several hosts, under the host's name."""
    return f"── {views.host_title(snapshot)} ──\n{status(snapshot, prompt)}"


def _devices(snapshot: Snapshot, aligned: bool = True) -> Iterator[str]:
    """The lines of the devices, whose figures may be `aligned`."""
    id_width = max((len(view.device.id) for view in snapshot.devices), default=0)
    fills = [len(views.fill(view)) for view in snapshot.devices] if aligned else []
    fill_width, pressure_width = max(fills, default=0), 5 if aligned else 0
    for view, bar in zip(snapshot.devices, views.bars(snapshot), strict=True):
        drawn, legend = draw(bar)
        remarks = ", ".join(views.remarks(snapshot, view))
        figures = f"{views.fill(view):>{fill_width}}  {view.pressure:>{pressure_width}.0%}"
        yield f"{views.device_name(view.device.id):{id_width}}  {drawn}  {figures}  {remarks}".rstrip()
        if legend:
            yield f"{'':{id_width}}  {legend}"


# The state is the last column, because its width changes with time.
_HOLDERS = ("MODEL", "SIZE", "WHERE", "HELD BY", "IMPORTANCE", "STATE")


def _holders(snapshot: Snapshot, prompt: str) -> list[str]:
    rows = views.holdings(snapshot)
    if not any(row.kind in ("model", "block", "kernel", "stays") for row in rows):
        hint = nothing_yet(prompt, registered=[spec.name for spec in snapshot.specs])
        return [hint, *table(_cells(rows), _HOLDERS, right=(1,))] if rows else [hint]
    lines = table(_cells(rows[: views.MOST_ROWS]), _HOLDERS, right=(1,))
    if len(rows) > views.MOST_ROWS:
        lines.append(f"and {len(rows) - views.MOST_ROWS} more:  {prompt} leases")
    return lines


def _cells(rows: Iterable[views.Holding]) -> list[tuple[str, ...]]:
    return [
        (row.name, size(row.bytes), row.where, row.holder, ", ".join(row.marks), row.state)
        for row in rows
    ]


def _queue(snapshot: Snapshot) -> list[str]:
    queue = views.waiting(snapshot)
    if not queue:
        return []
    lines = [f"  {n}. {clean(sentence)}" for n, sentence in enumerate(queue, 1)]
    return [f"Waiting: {len(queue)}", *lines]


def _past(snapshot: Snapshot) -> list[str]:
    lines = []
    if snapshot.events:
        last = snapshot.events[-1]
        subject = clean(views.event_subject(last, snapshot))
        sentence = clean(views.event_sentence(last))
        lines.append(f"Last decision  {clock(last.wall)}  {subject} {sentence}")
    if any(snapshot.totals.values()):
        lines.append(views.counters(snapshot))
    if versions := views.versions(snapshot):
        lines.append(versions)
    return lines


def nothing_yet(prompt: str, registered: Sequence[str] = ()) -> str:
    """What `status` shows while nothing is loaded: a command with a `registered` model, if there is one."""
    if registered:
        return (
            f"Nothing is loaded. Registered here: {clean(', '.join(registered))}. Load one:  "
            f"{prompt} preload {clean(registered[0])}"
        )
    if prompt == "%gpu":
        torch = "Tensors of plain torch code appear here by themselves. Load a model:"
    else:
        torch = "In a notebook, type  %load_ext gpu  and run torch code, or load a model:"
    return f"Nothing is loaded yet. {torch}  %gpu load NAME PATH"


def size(count: int | None) -> str:
    """The text for a `count` of bytes, such as `14.0 GiB`, or `unknown` for None."""
    return "unknown" if count is None else show_bytes(count)


# -- bars ----------------------------------------------------------------------------------------


def draw(bar: Bar, cells: int = BAR_CELLS) -> tuple[str, str]:
    """The `bar` in characters, `cells` wide, and its legend.

    Every segment gets at least one cell, so that small segments are visible. If the cells do not
    suffice, the last segments are cut off.
    >>> from gpu_runtime.facts import Device
    >>> from gpu_runtime.rendering.views import BarSegment
    >>> two = (BarSegment("a", 8, lease="1/a"), BarSegment("b", 4, lease="1/b"))
    >>> draw(Bar(Device("sim:0", 16), two, 14), cells=16)
    ('████████▓▓▓▓··│·', '█ a 8 B  ▓ b 4 B')
    """
    scale = bar.scale_bytes
    drawn, legend, end, leases = "", [], 0, 0
    for segment in bar.segments:
        end += segment.bytes
        mark = _MARKS.get(segment.kind) or _LEASES[leases % 2]
        leases += segment.is_lease
        drawn += mark * max(1, round(end / scale * cells) - len(drawn))
        short = segment._replace(label=shorten(segment.label, LONGEST_LEGEND))
        legend.append(f"{mark} {clean(short.title)}")
    drawn = drawn[:cells].ljust(cells, _FREE)
    if bar.limit_bytes < scale:
        at = min(cells - 1, round(bar.limit_bytes / scale * cells))
        drawn = drawn[:at] + _LIMIT + drawn[at + 1 :]
    return drawn, "  ".join(_short(legend))


def _short(legend: list[str]) -> list[str]:
    if len(legend) <= MOST_LEGEND:
        return legend
    return [*legend[:MOST_LEGEND], f"and {len(legend) - MOST_LEGEND} more"]


# -- tables --------------------------------------------------------------------------------------


def width(text: str) -> int:
    """The number of terminal columns that `text` occupies."""
    return sum(map(_character_width, text))


def _character_width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def shorten(text: str, longest: int = LONGEST) -> str:
    """The `text` with at most `longest` characters. The middle of a longer text is removed.

    Both ends are kept, because either end can distinguish a name from other names.

    >>> shorten("Qwen/Qwen3-Embedding-0.6B", 15)
    'Qwen/Qw…ng-0.6B'
    """
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]}…{text[-(longest - longest // 2 - 1) :]}"


def table(
    rows: Sequence[Sequence[str]],
    headers: Sequence[str],
    right: Sequence[int] = (),
    longest: int = LONGEST,
) -> list[str]:
    """The `rows` as aligned lines under `headers`, without empty columns; those of `right` are right-aligned."""
    cells = [[shorten(clean(cell), longest) for cell in row] for row in rows]
    columns = [n for n in range(len(headers)) if any(row[n] for row in cells)]
    widths = {n: max(width(row[n]) for row in (headers, *cells)) for n in columns}

    def padded(row: Sequence[str], n: int) -> str:
        padding = " " * (widths[n] - width(row[n]))
        return padding + row[n] if n in right else row[n] + padding

    def line(row: Sequence[str]) -> str:
        return "  ".join(padded(row, n) for n in columns).rstrip()

    return [line(headers), *map(line, cells)]


def frame(
    records: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    owners: Mapping[str, str] | None = None,
) -> str:
    """A DataFrame's `records` as an aligned table with the `columns`; see `cell`."""
    numbers = [n for n, name in enumerate(columns) if is_number(name)]
    headers = [name.removesuffix("_seconds").replace("_", " ").upper() for name in columns]
    rows = [[cell(name, record[name], owners) for name in columns] for record in records]
    return "\n".join(table(rows, headers, numbers))


def as_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """The `rows` as CSV with a line of names. No cell is a formula, even if a model's name looks like one.

    >>> as_csv([{"user": "ann", "card_h": 1.5}, {"user": "=1+1", "card_h": 0.0}], ["user", "card_h"])
    "user,card_h\\nann,1.5\\n'=1+1,0.0\\n"
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_safe(row[name]) for name in columns])
    return out.getvalue()


def _safe(value: Any) -> Any:
    """The `value`. A text that a spreadsheet would run gets an apostrophe in front (OWASP, CSV injection)."""
    if not isinstance(value, str):
        return value
    cell = clean(value)
    return f"'{cell}" if cell.lstrip()[:1] in tuple("=+-@|%") else cell


def is_number(column: str) -> bool:
    """Whether the values of the DataFrame's `column` are aligned to the right."""
    return column.endswith(("bytes", "_seconds", "uses", "pins", "pid", "percent", "_s"))


def cell(column: str, value: Any, owners: Mapping[str, str] | None = None) -> str:
    """A `value` of a DataFrame in the unit that its `column` names. `owners` labels processes by id."""
    is_missing = value is None or type(value).__name__ in ("NAType", "NaTType")
    if is_missing or value != value:  # NaN differs from itself
        return "unknown" if column.endswith("bytes") else ""
    if column.endswith("bytes"):
        return show_bytes(int(value))
    if column.endswith("_seconds"):
        return show_seconds(value)
    if hasattr(value, "timestamp"):
        return datetime.fromtimestamp(value.timestamp()).strftime("%Y-%m-%d %H:%M:%S")
    if column == "importance" and isinstance(value, int):
        return importance_name(value).removeprefix("importance ")
    if column == "owner" and _OWNER_ID.fullmatch(str(value)):
        known = (owners or {}).get(str(value))
        return clean(known) if known else f"pid {str(value).partition('.')[0]}"
    if isinstance(value, bool) or type(value).__name__ == "bool":  # also NumPy's bool
        return "yes" if value else ""
    return str(value)


# -- answers -------------------------------------------------------------------------------------


def health(found: Health) -> str:
    """The health `found`, in one line."""
    state = "healthy" if found.healthy else "NOT healthy"
    fullest = f", {found.fullest}" if found.fullest else ""
    return f"{state} · pressure {found.pressure}{fullest} · {found.message}"


def outcome(done: Outcome) -> str:
    """The outcome `done` of a verb in one line, with the bytes that moved and the seconds."""
    because, moved = done.because.rstrip("."), show_bytes(done.bytes)
    figures = [] if moved in because else [moved]
    if done.bytes and done.seconds:
        figures.append(show_seconds(done.seconds))
    head = f"{done.verb} {done.name}".strip() + ("" if done.done else ", not done")
    detail = f" ({', '.join(figures)})" if done.bytes and figures else ""
    return clean(f"{head}: {because}{detail}")


def applied(done: Applied) -> str:
    """The result `done` of applying a file of models, with notes on fields that had no effect."""
    return "\n".join([applied_head(done), *(f"  {clean(note)}" for note in done.notes)])


def applied_head(done: Applied) -> str:
    """The first line of `applied`: how many models of `done` are new, changed and unchanged."""
    kinds = {"new": done.added, "changed": done.changed, "unchanged": done.unchanged}
    parts = []
    for kind, names in kinds.items():
        if names:
            listed = clean(", ".join(names))
            parts.append(f"{len(names)} {kind} ({listed})")
    return f"apply {clean(done.file)}: {', '.join(parts)}"


def block(used: Any) -> str:
    """The memory that the leased block of code `used` has used. None is shown as unknown, never as zero."""
    leased = f"on {used.device.id}"
    if used.bytes:
        leased = f"{show_bytes(used.bytes)} reserved {leased}"
    if used.peak_bytes is None and used.delta_bytes is None:
        return f"{leased} · peak and delta unknown: only torch on a real card reports them"
    sign = "+" if (used.delta_bytes or 0) > 0 else ""
    return f"peak {size(used.peak_bytes)} · {leased} · delta {sign}{size(used.delta_bytes)}"


def plan(found: Plan, snapshot: Snapshot, prompt: str = "%gpu") -> str:
    """The plan `found` for `snapshot`: its verdict, reason and steps, and the bars after them."""
    lines = [
        f"{clean(views.verdict(found))}{' · simulated' if snapshot.simulated else ''}",
        clean(found.because),
        *_plan_needs(found),
        *_plan_steps(found, snapshot),
    ]
    others = views.others_considered(found)
    if others:
        lines.append("Also considered:" if found.granted else "Considered:")
        lines += [f"  {place} {clean(because)}" for place, because in others]
    if found.steps or found.obstacle:
        lines.append(f"Nothing was done. {views.how_to_do_it(found, prompt)}")
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _plan_needs(found: Plan) -> list[str]:
    needs = views.needs(found)
    lines = [f"Needs {clean(needs)}{views.on_cards(found)}"] if needs else []
    parts = views.parts(found)
    if parts:
        rows = table(parts, ("PART", "SIZE", "FROM"), right=(1,), longest=100)
        lines += [f"  {row}" for row in rows]
    return lines + [f"  {clean(note)}" for note in views.notes(found)]


def _plan_steps(found: Plan, snapshot: Snapshot) -> list[str]:
    sentences = [views.step_sentence(snapshot, step) for step in found.steps]
    lines = [f"  {n}. {clean(sentence)}" for n, sentence in enumerate(sentences, 1)]
    after = views.bars_after(snapshot, found.steps)
    id_width = max((len(bar.device.id) for bar in after), default=0)
    for bar in after:
        drawn, legend = draw(bar)
        lines += [
            f"then  {views.device_name(bar.device.id):{id_width}}  {drawn}  {show_bytes(bar.used_bytes)}",
            f"{'':{8 + id_width}}{legend}",
        ]
    return lines


def why(
    name: str, events: Sequence[Event], prompt: str = "%gpu", around: Snapshot | None = None
) -> str:
    """The `events` about the model `name` as sentences, the newest first. Without one, a hint.

    The snapshot `around` names the processes, if the events are of several.
    """
    if not name:
        return "\n".join([*_why_lines(events, around), why_hint(events, prompt)])
    if not events:
        command = f"{prompt} plan {clean(name)}"
        return f"No decision about {clean(name)} is recorded. What would happen:  {command}"
    return "\n".join(_why_lines(events, around))


def _why_lines(events: Sequence[Event], around: Snapshot | None) -> list[str]:
    return [
        f"{clock(event.wall)}  {clean(title)} {clean(views.event_sentence(event))}"
        for title, event in views.titled(events, around)
    ]


def why_hint(events: Sequence[Event], prompt: str = "%gpu") -> str:
    """How to ask about one model, after the recent `events`. The command begins with `prompt`."""
    what = "this notebook" if prompt == "%gpu" else "this host"
    none = "" if events else f"No decision about {what} is recorded. "
    return f"{none}About a model or a notebook:  {prompt} why NAME"


def replays(found: Sequence[Replayed]) -> str:
    """The recorded decisions, and whether the scheduler decides the same now."""
    return "\n".join(
        f"{clock(one.wall)}  {clean(one.model)} {clean(one.decided)}\n"
        f"{'':10}{clean(one.result)}  (decision {one.id})"
        for one in found
    )


def story(found: OutOfMemoryStory, full: bool = True) -> str:
    """Why a cell ran out of memory: all that is known, or unless `full` at most ten lines."""
    rows = found.rows(full)
    return "\n".join(
        [clean(found.headline), *(f"  {label:14}{clean(words)}" for label, words in rows)]
    )


CONFIG = ("SETTING", "VALUE", "SET BY", "MEANING")


def config(rows: Sequence[Any]) -> str:
    """The settings in `rows`: each with its value, its source and its meaning."""
    cells = [
        (row.name, row.value, "" if row.source == "default" else row.source, row.doc)
        for row in rows
    ]
    return "\n".join(table(cells, CONFIG, longest=200))


def preset(settings: Mapping[str, str]) -> str:
    """The `settings` as lines for a shell."""
    return "\n".join(f"export {name}={value}" for name, value in settings.items())


BOLD, DIM, REVERSE, RED, ORANGE = "1", "2", "7", "31;1", "33"
_LEAST_WIDTH = 20


def screen(
    snapshot: Snapshot,
    processes: Sequence[views.Process],
    chosen: str,
    title: str,
    last: str,
    size: tuple[int, int],
    now: str,
) -> list[str]:
    """The lines of `gpu top` at the time of day `now`; `size` is the width and the height of the terminal.

    Problems and waits are above the devices, then come the `processes` under their `title`, with the `chosen` one
    marked, and the line `last`. What does not fit is counted.
    """
    width, height = max(size[0], _LEAST_WIDTH), max(size[1], 2)
    lines = list(_lines(snapshot, processes, chosen, title, now))
    if len(lines) > height - 1:
        more = len(lines) - height + 2
        lines = [*lines[: height - 2], (DIM, f"… {more} more lines")]
    lines += [("", "")] * (height - 1 - len(lines))
    cut = [(code, _cut(line, width)) for code, line in [*lines, (REVERSE, clean(last))]]
    return [f"\x1b[{code}m{line}\x1b[0m" if code and line else line for code, line in cut]


def _lines(
    snapshot: Snapshot, processes: Sequence[views.Process], chosen: str, title: str, now: str
) -> Iterator[tuple[str, str]]:
    """The lines of the screen but the last one, each with its colour."""
    yield BOLD, f"{views.device_title(snapshot)} · {now}"
    for problem in views.alarms(snapshot):
        yield RED, f"! {problem}"
    for request in _waiting(snapshot):
        yield ORANGE, f"! {request}"
    yield "", ""
    for line in _devices(snapshot, aligned=False):
        yield "", line
    yield "", ""
    cells = [
        (
            one.name,
            one.user,
            str(one.pid),
            one.state,
            show_bytes(one.card_bytes) if one.card_bytes else "",
            show_bytes(one.host_bytes) if one.host_bytes else "",
        )
        for one in processes
    ]
    header, *rows = table(
        cells, ("NOTEBOOK", "USER", "PID", "STATE", "ON CARDS", "IN RAM"), (2, 4, 5)
    )
    yield DIM, f"  {header}   {clean(title)}"
    for one, row in zip(processes, rows, strict=True):
        yield (REVERSE, f"> {row}") if one.id == chosen else ("", f"  {row}")


def _waiting(snapshot: Snapshot) -> Iterator[str]:
    """The requests that wait for room: the process, the time and the reason."""
    for ticket in snapshot.tickets:
        if ticket.verb == "use":
            waited = show_seconds(max(0.0, snapshot.now - ticket.arrived))
            because = f": {ticket.because}" if ticket.because else ""
            name = "" if ticket.name == views.KERNEL else f" for {ticket.name}"
            who = views.holder(snapshot, ticket.owner)
            yield views.clean(f"{who} waits {waited}{name}{because}")


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"
