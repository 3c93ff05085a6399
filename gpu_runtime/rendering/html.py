"""Renders facts as HTML: the elements of a page, then a snapshot, a plan, tables, a fleet's hosts, and a load. Pure.

The colours are the colours of Okabe and Ito, which colour-blind people can distinguish. A model has
the same colour everywhere. Nothing here is random, so that executed notebooks can be compared.
Every name given by a person or a file is escaped.

JupyterLab removes the style sheet from a notebook that the user does not trust yet, but keeps
inline styles. So the colours and widths of bars are inline, and the sheet has only optional rules,
such as the alignment of cells. If a frontend removes both, the reader still sees plain tables.
Beside the HTML of a table, of the hosts and of a load is its text, with the same words.

Source: Okabe & Ito 2008, Color Universal Design.
"""

from __future__ import annotations

import functools
import html
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from ..facts import (
    HOST,
    KERNEL,
    Applied,
    Device,
    Event,
    Health,
    Level,
    Outcome,
    OutOfMemoryStory,
    Plan,
    Replayed,
    Schedule,
    ScheduledModel,
    Snapshot,
    problems,
)
from ..owner.arrivals import LOADING, Arrival
from ..tables import Table
from ..units import show_bytes, show_rate, show_seconds
from . import text, views
from .views import Bar, BarSegment, clean, clock

COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
# The textures plain, stripes and dots: each with its class in style.css, and the character that
# stands for it in text.
TEXTURES = (("", "■"), ("g-t1", "▨"), ("g-t2", "▩"))
_DARK_COLOURS = ("#0072b2",)  # text on these is white
_GREY = "#80808080"  # colour of bytes that belong to no model
_TRACK = "#80808029"
_BAR_HEIGHT = "22px"
_LABEL_FROM = 0.09  # a segment narrower than this fraction of its bar has no label


@functools.cache
def style(body: str | None = None) -> str:
    """The style sheet as one line of HTML, with only the rules that apply to `body`, if it is given.

    A notebook stores the rules with every output, so rules without effect are left out.
    """
    lines = _rules() if body is None else [line for line in _rules() if _applies(line, body)]
    return f"<style>{''.join(lines)}</style>"


@functools.cache
def _rules() -> list[str]:
    return Path(__file__).with_name("style.css").read_text().splitlines()


def _applies(rule: str, body: str) -> bool:
    names = re.findall(r"\.g-(\w[\w-]*)", rule)
    if names:
        return any(f"g-{name}" in body for name in names)
    tags = re.findall(r"\.gpuc (code|table|tbody|td|th)\b", rule)
    return not tags or any(f"<{tag}" in body for tag in tags)


def page(*parts: str) -> str:
    """The HTML `parts` together with the style sheet, whose rules apply inside these parts only."""
    body = "".join(parts)
    return f'{style(body)}<div class="gpuc">{body}</div>'


def esc(text: object) -> str:
    """The `text` escaped for HTML, with unprintable characters replaced."""
    return html.escape(clean(text), quote=True)


class Look(NamedTuple):
    """How a model is drawn."""

    colour: str
    ink: str  # the colour of text on the model's colour
    texture: str  # a class of style.css, or empty
    square: str  # the character that stands before the model's name


def look(name: str) -> Look:
    """The colour and texture of the model `name`, which depend only on the name."""
    number = zlib.crc32(name.encode()) >> 8  # the low bits of short names are often equal
    colour = COLOURS[number % len(COLOURS)]
    ink = "#fff" if colour in _DARK_COLOURS else "#000"
    return Look(colour, ink, *TEXTURES[number // len(COLOURS) % len(TEXTURES)])


# -- text ----------------------------------------------------------------------------------------


def pill(level: Level) -> str:
    """The pressure `level` as a coloured badge."""
    return f'<span class="g-level g-{esc(level)}">{esc(level)}</span>'


def code(typed: str) -> str:
    """The command `typed`, set as code."""
    return f"<code>{esc(typed)}</code>"


def line(*parts: str, soft: bool = False) -> str:
    """One line that consists of the non-empty HTML `parts`. `soft` is for less important text."""
    kind = ' class="g-soft"' if soft else ""
    return f"<div{kind}>{' '.join(part for part in parts if part)}</div>"


def pre(lines: str) -> str:
    """The `lines` of text, unchanged, in a fixed-width font."""
    return f'<pre class="g-pre">{html.escape(lines)}</pre>'


def with_code(sentence: str) -> str:
    """The `sentence` as escaped HTML. The command after a colon and two spaces is shown as code."""
    text, colon, typed = sentence.partition(":  ")
    return f"{esc(text)}: {code(typed)}" if colon else esc(sentence)


def simulated(snapshot: Snapshot) -> str:
    """A badge if the devices of the `snapshot` are simulated, otherwise an empty text."""
    return '<span class="g-mark">simulated</span>' if snapshot.simulated else ""


# -- bars ----------------------------------------------------------------------------------------


def bar(drawn: Bar) -> str:
    """The HTML of the bar `drawn` of one device. Screen readers read its segments."""
    scale = drawn.scale_bytes
    segments = "".join(_segment(segment, segment.bytes / scale) for segment in drawn.segments)
    limit = ""
    if 0 < drawn.limit_bytes < scale:
        limit = (
            f'<div title="budget {esc(show_bytes(drawn.limit_bytes))}" '
            f'style="position:absolute;top:0px;height:{_BAR_HEIGHT};border-left:2px solid;'
            f'left:{drawn.limit_bytes / scale:.2%}"></div>'
        )
    label = ", ".join(segment.title for segment in drawn.segments) or "empty"
    return track(segments, f"{views.device_name(drawn.device.id)}: {label}", limit)


def track(stretches: str, label: str, over: str = "") -> str:
    """A bar with the HTML `stretches` in it and the HTML `over` on top. Screen readers read `label`."""
    return (
        f'<div role="img" aria-label="{esc(label)}" '
        f'style="position:relative;height:{_BAR_HEIGHT};background-color:{_TRACK}">'
        f'<div class="g-fill" style="height:{_BAR_HEIGHT};overflow:hidden">{stretches}</div>'
        f"{over}</div>"
    )


def _segment(segment: BarSegment, part: float) -> str:
    drawn = look(segment.label) if segment.is_lease else Look(_GREY, "inherit", "", "■")
    thin = part < _LABEL_FROM
    classes = ["g-seg", drawn.texture]
    if thin:
        classes.append("g-thin")
    if segment.kind != "settled":
        classes.append(f"g-{segment.kind}")
    return stretch(
        part,
        drawn.colour,
        "transparent" if thin else drawn.ink,
        " ".join(filter(None, classes)),
        segment.title if thin else "",
        segment.label,
    )


def stretch(
    part: float,
    colour: str,
    ink: str = "transparent",
    classes: str = "g-seg",
    title: str = "",
    label: str = "",
) -> str:
    """A segment of a bar: a fraction `part` (0 to 1) of its length, the text `label`, and `title` on hover."""
    hover = f' title="{esc(title)}"' if title else ""
    # A segment that is too short for its label contains a space, which gives the segment its height.
    text = "&nbsp;" if ink == "transparent" else esc(label)
    colours = f"background-color:{colour}"
    if ink not in ("transparent", "#000"):  # black is the rule in style.css
        colours += f";color:{ink}"
    return (
        f'<div class="{classes}"{hover} style="float:left;width:{part:.2%};{colours}">{text}</div>'
    )


def swatch(row: views.Holding) -> str:
    """A square in the colour of the model in `row`; a grey square for memory without a lease."""
    drawn = Look(_GREY, "", "", "▧")
    if row.kind in ("model", "block", "kernel", "stays"):
        drawn = look(row.name)
    return f'<span style="color:{drawn.colour}">{drawn.square}</span> '


# -- tables --------------------------------------------------------------------------------------


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with `headers`. Each cell of `rows` is a whole `<td>`. Empty columns are left out."""
    cells = [list(row) for row in rows]
    columns = _used_columns(cells)
    head = "".join(
        table_cell("th", esc(headers[n]), "g-num" if headers[n] in _NUMBERS else "")
        for n in columns
    )
    return (
        f'<table class="g-rows" style="table-layout:auto"><thead><tr>{head}</tr></thead>'
        f"<tbody>{_body(cells, columns)}</tbody></table>"
    )


def devices(rows: Iterable[tuple[str, str, str, str]]) -> str:
    """A table of bars. Each of the `rows` has the device, its bar, bytes and remarks, as HTML."""
    cells = [
        (
            table_cell("td", id),
            table_cell("td", drawn, style="width:50%;max-width:0px"),
            table_cell("td", size, "g-num"),
            table_cell("td", remarks, "g-soft g-wrap", "min-width:120px") if remarks else td(""),
        )
        for id, drawn, size, remarks in rows
    ]
    return (
        '<table style="width:100%;table-layout:auto">'
        f"<tbody>{_body(cells, _used_columns(cells))}</tbody></table>"
    )


_NUMBERS = ("size", "holds", "frees")  # headers of columns with numbers
_EMPTY_CELL = re.compile("<td[^>]*></td>")


def _used_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    if not rows:
        return []
    return [
        n for n in range(len(rows[0])) if any(not _EMPTY_CELL.fullmatch(row[n]) for row in rows)
    ]


def _body(rows: Sequence[Sequence[str]], columns: Sequence[int]) -> str:
    return "".join(f"<tr>{''.join(row[n] for n in columns)}</tr>" for row in rows)


def table_cell(tag: str, inner: str, kind: str = "", style: str = "") -> str:
    """A `<td>` or `<th>` around the HTML `inner`. Inline `style` stays in a notebook that is not trusted."""
    classes = f' class="{kind}"' if kind else ""
    styles = f' style="{style}"' if style else ""
    return f"<{tag}{classes}{styles}>{inner}</{tag}>"


def td(text: object, kind: str = "") -> str:
    """A `<td>` with the `text` escaped, and the classes `kind`."""
    return table_cell("td", esc(text), kind)


LONGEST_SHOWN = 30  # characters of a name in the table of holders

# -- status --------------------------------------------------------------------------------------


def status(snapshot: Snapshot) -> str:
    """The `snapshot` as a page, which shows the devices, the queue, the holders and the last decision."""
    users = len(views.owners(snapshot))
    shared = f'<span class="g-soft">shared by {users} processes</span>' if users > 1 else ""
    head = (
        f'<div class="g-head"><b>{esc(views.device_title(snapshot))}</b> '
        f"{simulated(snapshot)} {shared}</div>"
    )
    alarms = "".join(f'<div class="g-alarm">{esc(alarm)}</div>' for alarm in views.alarms(snapshot))
    return page(
        head, alarms, _devices(snapshot), _queue(snapshot), _holders(snapshot), _past(snapshot)
    )


def host(snapshot: Snapshot) -> str:
    """The `snapshot` of one of several hosts as a page, under the host's name."""
    return page(line(f"<b>{esc(views.host_title(snapshot))}</b>")) + status(snapshot)


def _devices(snapshot: Snapshot) -> str:
    rows = []
    for view, drawn in zip(snapshot.devices, views.bars(snapshot), strict=True):
        fill = f'{esc(views.fill(view))} <span class="g-soft">{view.pressure:.0%}</span>'
        remarks = esc(", ".join(views.remarks(snapshot, view)))
        rows.append((f"<b>{esc(views.device_name(view.device.id))}</b>", bar(drawn), fill, remarks))
    return devices(rows)


def _holders(snapshot: Snapshot) -> str:
    rows = views.holdings(snapshot)
    hint = ""
    if not any(row.kind in ("model", "block", "kernel", "stays") for row in rows):
        hint = line(with_code(text.nothing_yet("%gpu", [spec.name for spec in snapshot.specs])))
    if not rows:
        return hint
    headers = ("model", "size", "where", "held by", "importance", "state")
    shown = table(headers, map(_holding, rows[: views.MOST_ROWS]))
    more = len(rows) - views.MOST_ROWS
    rest = line(f"and {more} more:", code("%gpu leases"), soft=True) if more > 0 else ""
    return hint + shown + rest


def _holding(row: views.Holding) -> tuple[str, ...]:
    in_use = "g-in-use" if row.state.startswith("in use") else ""
    state = td(row.state, in_use)
    if row.kind == "stays":  # a reason, which is long
        state = table_cell("td", esc(row.state), "g-wrap", "min-width:150px")
    marks = " ".join(f'<span class="g-mark">{esc(mark)}</span>' for mark in row.marks)
    name = esc(row.name)
    if len(row.name) > LONGEST_SHOWN:  # the end of a longer name is hidden
        name = f'<span title="{name}">{name}</span>'
    name = swatch(row) + name
    return (
        table_cell("td", name, "g-name"),
        td(text.size(row.bytes), "g-num"),
        td(row.where),
        td(row.holder, "g-wrap"),
        table_cell("td", marks),
        state,
    )


def _queue(snapshot: Snapshot) -> str:
    queue = views.waiting(snapshot)
    if not queue:
        return ""
    items = "".join(f"<li>{esc(sentence)}</li>" for sentence in queue)
    head = f"<b>Waiting: {len(queue)}</b>"
    return f'<div class="g-wait">{head}<ol class="g-list">{items}</ol></div>'


def _past(snapshot: Snapshot) -> str:
    parts = []
    if snapshot.events:
        event = snapshot.events[-1]
        parts.append(
            line(
                f'<span class="g-soft">Last decision, {clock(event.wall)}:</span>',
                f"<b>{esc(views.event_subject(event, snapshot))}</b>",
                esc(views.event_sentence(event)),
            )
        )
    if any(snapshot.totals.values()):
        parts.append(line(esc(views.counters(snapshot)), soft=True))
    if versions := views.versions(snapshot):
        parts.append(line(esc(versions), soft=True))
    return "".join(parts)


# -- answers -------------------------------------------------------------------------------------


def health(found: Health) -> str:
    """The health `found`, as one line."""
    fullest = f'<span class="g-soft">{esc(found.fullest)}</span>'
    state = "healthy" if found.healthy else "not healthy"
    return page(line(pill(found.pressure), f"<b>{state}</b>", fullest, esc(found.message)))


def outcome(done: Outcome) -> str:
    """The outcome `done` of a verb, as one line."""
    head, _, detail = text.outcome(done).partition(": ")
    return page(line(f"<b>{'✓' if done.done else '✗'} {esc(head)}</b>", esc(detail)))


def applied(done: Applied) -> str:
    """The result `done` of applying a file of models, with its notes."""
    head, _, detail = text.applied_head(done).partition(": ")
    notes = "".join(f"<li>{esc(note)}</li>" for note in done.notes)
    return page(
        line(f"<b>✓ {esc(head)}</b>", esc(detail)),
        f'<ul class="g-list">{notes}</ul>' if notes else "",
    )


def plan(found: Plan, snapshot: Snapshot) -> str:
    """The plan `found` for `snapshot`: its verdict, reason and steps, and the devices after them."""
    mark = "✓" if found.granted else "✗"
    head = (
        f'<div class="g-head"><b>{mark} {esc(views.verdict(found))}</b> {simulated(snapshot)}</div>'
    )
    done = ""
    if found.steps or found.obstacle:
        command = with_code(views.how_to_do_it(found, "%gpu"))
        done = line("Nothing was done.", command, soft=True)
    return page(
        head,
        line(esc(found.because)),
        _plan_needs(found),
        _plan_steps(found, snapshot),
        _plan_alternatives(found),
        done,
    )


def _plan_needs(found: Plan) -> str:
    parts = []
    needs = views.needs(found)
    if needs:
        parts.append(line(f"Needs {esc(needs)}{esc(views.on_cards(found))}", soft=True))
    rows = [
        (td(part), td(size, "g-num"), td(source, "g-soft g-wrap"))
        for part, size, source in views.parts(found)
    ]
    if rows:
        parts.append(table(("part", "size", "from"), rows))
    parts += [line(with_code(note), soft=True) for note in views.notes(found)]
    return "".join(parts)


def _plan_steps(found: Plan, snapshot: Snapshot) -> str:
    parts = []
    if found.steps:
        sentences = [views.step_sentence(snapshot, step) for step in found.steps]
        items = "".join(f"<li>{esc(sentence)}</li>" for sentence in sentences)
        parts.append(f'<ol class="g-list">{items}</ol>')
    after = views.bars_after(snapshot, found.steps)
    if after:
        rows = [
            (
                f"<b>{esc(views.device_name(one.device.id))}</b>",
                bar(one),
                esc(show_bytes(one.used_bytes)),
                "",
            )
            for one in after
        ]
        parts.append(line("Then:", soft=True) + devices(rows))
    return "".join(parts)


def _plan_alternatives(found: Plan) -> str:
    others = views.others_considered(found)
    if not others:
        return ""
    headers = ("also considered" if found.granted else "considered", "why not")
    return table(headers, [(td(place), td(because, "g-wrap")) for place, because in others])


def why(name: str, events: Sequence[Event], around: Snapshot | None = None) -> str:
    """The `events` about the model `name` as a table of sentences, the newest first; see `text.why`."""
    if not events:
        return page(line(with_code(text.why(name, events))))
    rows = table(("when", f"why {name}".rstrip()), map(_event_row, views.titled(events, around)))
    return page(rows, "" if name else line(with_code(text.why_hint(events))))


def story(found: OutOfMemoryStory, full: bool = True) -> str:
    """Why a cell ran out of memory; see `text.story`."""
    rows, before = [], ""
    for label, words in found.rows(full):
        inner = code(words) if label == "more" else esc(words)
        shown = td("" if label == before else label, "g-soft")
        rows.append(f"<tr>{shown}{table_cell('td', inner, 'g-wrap', 'max-width:760px')}</tr>")
        before = label
    return page(line(f"<b>{esc(found.headline)}</b>"), f"<table>{''.join(rows)}</table>")


def replays(found: Sequence[Replayed]) -> str:
    """The recorded decisions, and whether the scheduler decides the same now."""
    return page(table(("when", "number", "decision", "decided again"), map(_replay_row, found)))


def _replay_row(one: Replayed) -> tuple[str, ...]:
    sentence = f"<b>{esc(one.model)}</b> {esc(one.decided)}"
    return (
        td(clock(one.wall), "g-soft"),
        td(str(one.id), "g-soft"),
        table_cell("td", sentence),
        td(one.result.removeprefix("Decided again: ")),
    )


def _event_row(titled: tuple[str, Event]) -> tuple[str, str]:
    title, event = titled
    sentence = f"<b>{esc(title)}</b> {esc(views.event_sentence(event))}"
    return td(clock(event.wall), "g-soft"), table_cell("td", sentence, "g-wrap")


def config(rows: Sequence[Any]) -> str:
    """The settings in `rows` as a table."""
    return page(table(("setting", "value", "set by", "meaning"), map(_setting_row, rows)))


def _setting_row(row: Any) -> tuple[str, ...]:
    return (
        table_cell("td", code(row.name)),
        td(row.value),
        td("" if row.source == "default" else row.source, "g-wrap"),
        td(row.doc, "g-soft g-wrap"),
    )


def preset(settings: Mapping[str, str]) -> str:
    """The `settings` as lines for a shell."""
    return page(pre(text.preset(settings)))


# -- the tables of `%gpu models`, `%gpu who` and other verbs, in units for people, and of `%gpu next`
#
# A DataFrame keeps the raw numbers for code.

Show = Callable[[Any], str]  # a DataFrame -> what is shown
MOST_SHOWN = 60  # rows; of a longer table the first and the last rows are shown
# Columns of the table of allocators that repeat other columns, or that few people need. They are
# not shown, because about eight columns fit into a notebook. The DataFrame has them.
_NOT_SHOWN = (
    *("user", "pid", "notebook", "fragmentation_bytes", "fragmentation_percent"),
    *("alloc_retries", "ooms"),
)


def for_people(frame: Any) -> Any:
    """The DataFrame `frame`, displayed in units for people."""
    return showing(frame, table_text, table_html)


def showing(frame: Any, text_of: Show, html_of: Show) -> Any:
    """The table `frame`, displayed by these functions. Selections of a DataFrame are plain DataFrames."""
    base = Table if isinstance(frame, Table) else sys.modules["pandas"].DataFrame
    shown = _class_that_shows(base, text_of, html_of)(frame)
    shown.attrs = dict(frame.attrs)
    return shown


@functools.cache
def _class_that_shows(base: Any, text_of: Show, html_of: Show) -> type:
    class Shown(base):
        """A table with its own text and HTML."""

        def __repr__(self) -> str:
            return text_of(self)

        def _repr_html_(self) -> str:
            return html_of(self)

    return Shown


def table_text(frame: Any) -> str:
    """The table as aligned text, under the names of its columns."""
    columns, rows, more = _rows(frame)
    if not rows:
        return "(no rows)"
    numbers = [place for place, name in enumerate(columns) if text.is_number(name)]
    lines = text.table(rows, columns, numbers)
    if more:
        middle = 1 + MOST_SHOWN // 2
        lines[middle:middle] = [f"… {more} more rows …"]
    return "\n".join(lines)


def table_html(frame: Any) -> str:
    """The table as HTML in the notebook's own style of tables."""
    columns, rows, more = _rows(frame)
    align = ["" if text.is_number(name) else ' style="text-align:left"' for name in columns]
    head = "".join(f"<th>{esc(name)}</th>" for name in columns)
    lines = []
    for row in rows:
        cells = zip(align, row, strict=True)
        lines.append("<tr>" + "".join(f"<td{to}>{esc(cell)}</td>" for to, cell in cells))
    if more:
        note = f'<tr><td colspan="{len(columns)}">… {more} more rows …</td>'
        lines.insert(MOST_SHOWN // 2, note)
    return f'<table class="dataframe"><thead><tr>{head}</thead>{"".join(lines)}</table>'


def _rows(frame: Any) -> tuple[list[str], list[list[str]], int]:
    """The names of the columns, the cells of the shown rows, and the number of the other rows."""
    is_of_allocators = "reserved_bytes" in frame.columns
    columns = [name for name in frame.columns if not (is_of_allocators and name in _NOT_SHOWN)]
    more = max(0, len(frame) - MOST_SHOWN)
    records = frame.to_dict("records")
    if more:
        half = MOST_SHOWN // 2
        records = [*records[:half], *records[-half:]]
    owners = frame.attrs.get("owners")
    rows = [[text.cell(name, record[name], owners) for name in columns] for record in records]
    return columns, rows, more


WHO = ("NAME", "KIND", "DEVICE", "HOLDS", "FREES", "CELL", "WHAT")
_PARTS = (  # key of the sums -> words
    ("graph_bytes", "in autograd graphs"),
    ("cached_bytes", "cached"),
    ("unknown_bytes", "without a name"),
    ("unseen_bytes", "that no tensor explains"),
)


def who(frame: Any) -> Any:
    """The DataFrame `frame` of `rt.who()` as a table whose sizes are written for people."""
    return showing(frame, _who_text, _who_html)


def _who_text(frame: Any) -> str:
    rows = _who_rows(frame)
    lines = [*text.table(rows, WHO, right=(3, 4)), ""] if rows else [_nothing(frame.attrs)]
    return "\n".join([*lines, *sentences(frame.attrs)])


def _who_html(frame: Any) -> str:
    rows = _who_rows(frame)
    sums = "".join(line(esc(one), soft=True) for one in sentences(frame.attrs))
    if not rows:
        return page(line(_nothing(frame.attrs)), sums)
    cells = [
        [td(cell, "g-num" if n in (3, 4) else "g-wrap") for n, cell in enumerate(row)]
        for row in rows
    ]
    return page(table([name.lower() for name in WHO], cells), sums)


def _who_rows(frame: Any) -> list[list[str]]:
    """The cells of the table. If all rows have the same device, the cells leave out the device."""
    records = frame.to_dict("records")
    several = len({record["device"] for record in records}) > 1
    return [
        [
            record["name"],
            record["kind"],
            record["device"] if several else "",
            show_bytes(int(record["bytes"])),
            _frees(record),
            record["cell"],
            what(record),
        ]
        for record in records
    ]


def _frees(record: Mapping[str, Any]) -> str:
    """What becomes free if only this name is deleted. Parked memory is in RAM."""
    size = int(record["alone_bytes"])
    return show_bytes(size) + (" of RAM" if size and record["device"] == HOST else "")


def what(record: Mapping[str, Any]) -> str:
    """The last cell of a row: what holds the memory, and how much of it cannot be parked."""
    stays = f"{show_bytes(int(record['stays_bytes']))} stays" if record["stays"] else ""
    return "; ".join(filter(None, [clean(record["what"]), stays]))


def _nothing(sums: Mapping[str, Any]) -> str:
    if sums.get("note"):
        return "Nothing is listed."
    if not sums.get("whole", True):
        return "Nothing was found in the time allowed."
    return "No variable or output holds memory on a device."


def sentences(sums: Mapping[str, Any]) -> list[str]:
    """Sentences under the table, made from `sums`, the attributes of the DataFrame of `rt.who()`."""
    if not sums:
        return []
    lines = [f"{clean(sums['process'])} holds this."] if sums["process"] else []
    if sums["held_bytes"] or not sums["parked_bytes"]:
        parts = [f"{show_bytes(sums[key])} {words}" for key, words in _PARTS if sums[key]]
        held = show_bytes(sums["held_bytes"])
        explained = f"explained {show_bytes(sums['explained_bytes'])} of {held}"
        lines.append("; ".join(filter(None, [explained, ", ".join(parts)])) + ".")
    lines += [f"{clean(staying.words())}." for staying in sums["staying"]]
    if sums["stays"]:
        lines.append(f"It cannot be parked now: {clean(sums['stays'])}.")
    if sums["parked_bytes"]:
        parked = show_bytes(sums["parked_bytes"])
        lines.append(f"{parked} is parked in RAM, until a cell needs it.")
    if sums["left_out"]:
        size = show_bytes(sums["left_out_bytes"])
        lines.append(f"{sums['left_out']} more rows are not listed; they reach {size}.")
    if sums["note"]:
        lines.append(clean(sums["note"]))
    if not sums["whole"]:
        seconds = f"{sums['seconds']:.0f}"
        lines.append(f"The search stopped after {seconds} s: the figures are partial.")
    return lines


SCHEDULE = ("MODEL", "FIRST USE", "WHERE", "STATE")
NO_CELL_WAITS = "No cell waits that uses a model. Run All, then look again:  %gpu next"


def schedule_text(schedule: Schedule) -> str:
    if not schedule.models:
        return "\n".join([NO_CELL_WAITS, *_table_notes(schedule)])
    lines = text.table(_scheduled(schedule), SCHEDULE, longest=100)
    return "\n".join([*lines, *_table_notes(schedule)])


def schedule_html(schedule: Schedule) -> str:
    notes = [line(esc(note), soft=True) for note in _table_notes(schedule)]
    if not schedule.models:
        return page(line(with_code(NO_CELL_WAITS)), *notes)
    rows = [[td(cell, "g-wrap") for cell in row] for row in _scheduled(schedule)]
    return page(table([name.lower() for name in SCHEDULE], rows), *notes)


def _scheduled(schedule: Schedule) -> list[tuple[str, ...]]:
    return [(model.name, model.cell, model.where, _state(model)) for model in schedule.models]


def _state(model: ScheduledModel) -> str:
    if model.running:
        return "used by the running cell"
    if model.ahead:
        return "loaded ahead"
    if model.where == "moving":
        return "being moved"
    if model.loading:
        return "being loaded ahead"
    if model.where not in ("disk", "host"):
        return "on its device"
    return f"not loaded ahead: {model.because}" if model.because else "not loaded yet"


def _table_notes(schedule: Schedule) -> list[str]:
    notes = []
    if schedule.mode == "never":
        notes.append("Look-ahead is off (GPU_PREFETCH=never).")
    if schedule.loaded_ahead:
        notes.append(
            f"Loaded ahead so far: {schedule.loaded_ahead}; "
            f"{schedule.used} used, {schedule.unused} not used."
        )
    return notes


# -- the hosts of a fleet: one bar for each host

NOTHING = "No host has joined the fleet. On each host:  gpu fleet join"


def fleet_text(hosts: Sequence[Snapshot]) -> str:
    """Text with one bar for each of the `hosts`, its models, and its number of waiting requests."""
    if not hosts:
        return NOTHING
    width = max(len(clean(one.host)) for one in hosts)
    lines = []
    for one in hosts:
        drawn, legend = text.draw(_bar(one))
        lines.append(
            f"{clean(one.host):{width}}  {drawn}  {_fill(one):>19}  "
            f"{views.worst_level(one):8}  {_host_notes(one)}".rstrip()
        )
        if legend:
            lines.append(f"{'':{width}}  {legend}")
    return "\n".join(lines)


def fleet_html(hosts: Sequence[Snapshot]) -> str:
    """HTML with one bar for each of the `hosts`, its models, and its number of waiting requests."""
    if not hosts:
        return page(line(with_code(NOTHING)))
    rows = [
        (
            f"<b>{esc(one.host)}</b>",
            bar(_bar(one)),
            esc(_fill(one)),
            f"{pill(views.worst_level(one))} {esc(_host_notes(one))}",
        )
        for one in hosts
    ]
    return page(devices(rows))


def as_chooser(
    hosts: Sequence[Snapshot], silent: Mapping[str, float], *, chosen: str, tab: str = ""
) -> str:
    """One bar for each of the `hosts`, whose name is a link to its page in the console, on the tab `tab`.

    `silent` maps each host that does not answer to the time, in epoch seconds, since which it has not
    answered; its figures are grey. `chosen` is the host whose page is open.
    """
    rows = []
    for one in hosts:
        query = urlencode({"host": one.host} | ({"tab": tab} if tab else {}))
        here = ' aria-current="page"' if one.host == chosen else ""
        drawn, fill, notes = bar(_bar(one)), esc(_fill(one)), esc(_host_notes(one))
        if one.host in silent:
            since = clock(silent[one.host])
            drawn, fill = (f'<div class="g-old">{part}</div>' for part in (drawn, fill))
            notes = f"no answer since {since}"
        elif count := len(problems(one)):
            notes = f"<b>{count} problem{'s' if count != 1 else ''}</b>, {notes}"
        name = f'<a href="?{esc(query)}"{here}>{esc(one.host)}</a>'
        rows.append((name, drawn, fill, notes))
    return page(f'<nav class="g-hosts" aria-label="Hosts">{devices(rows)}</nav>')


def _bar(snapshot: Snapshot) -> views.Bar:
    """One bar for all cards of a host. A model on several cards has only one segment in the bar."""
    cards = [card for card in views.bars(snapshot) if not card.device.is_host]
    merged: dict[tuple[str, str, str], views.BarSegment] = {}
    for card in cards:
        for segment in card.segments:
            key = segment.label, segment.kind, segment.lease
            before = merged.get(key)
            size = segment.bytes + (before.bytes if before else 0)
            merged[key] = segment._replace(bytes=size)
    total = sum(card.device.total_bytes for card in cards)
    limit = sum(card.limit_bytes for card in cards)
    return views.Bar(Device(snapshot.host, total), tuple(merged.values()), limit)


def _fill(snapshot: Snapshot) -> str:
    card = _bar(snapshot)
    return f"{show_bytes(card.used_bytes)} of {show_bytes(card.device.total_bytes)}"


def _host_notes(snapshot: Snapshot) -> str:
    cards = views.cards(snapshot)
    notes = [f"{len(cards)} card{'s' if len(cards) != 1 else ''}"]
    if snapshot.simulated:
        notes.append("simulated")
    if any(view.drained for view in cards):
        notes.append("drained")
    if waiting := len(snapshot.tickets):
        notes.append(f"{waiting} waiting")
    if snapshot.degraded:
        notes.append(snapshot.degraded)
    return ", ".join(notes)


# -- two lines about a load or a restore: its progress, and what stays after its end

STOP_IN_NOTEBOOK, STOP_IN_TERMINAL = "■ stops it", "Ctrl-C stops it"


def subject(name: str) -> str:
    """The model `name`, or the words for the memory of the notebook itself."""
    return "this notebook" if name == KERNEL else clean(name)


def running(arrival: Arrival, seconds: float, stop: str) -> str:
    """The line of an `arrival` after `seconds`: bar, bytes, rate, time left, and how to `stop` it."""
    title = f"{arrival.verb} {subject(arrival.name)}"
    filled = "█" * round(_part(arrival, seconds) * text.BAR_CELLS)
    return f"{title}  {filled:·<{text.BAR_CELLS}}  {note(arrival, seconds, stop)}"


def running_html(arrival: Arrival, seconds: float, stop: str) -> str:
    """The line of `running` as HTML, with a drawn bar."""
    title, words = f"{arrival.verb} {subject(arrival.name)}", esc(note(arrival, seconds, stop))
    part = _part(arrival, seconds)
    drawn = track(stretch(part, COLOURS[2]) if part else "", note(arrival, seconds, stop))
    return page(devices([(f"<b>{esc(title)}</b>", drawn, words, "")]))


def note(arrival: Arrival, seconds: float, stop: str) -> str:
    """The text after the bar: `6.0 GiB of 14.0 GiB · 2.1 GB/s · 4 s left · Ctrl-C stops it`."""
    size = show_bytes(arrival.all_bytes)
    if arrival.done_bytes:
        size = f"{show_bytes(arrival.done_bytes)} of {size}"
    left = seconds_left(arrival, seconds)
    figures = (
        size,
        show_rate(arrival.done_bytes, seconds),
        "" if left is None else f"{show_seconds(max(1.0, left))} left",
        stop,
    )
    return " · ".join(figure for figure in figures if figure)


def seconds_left(arrival: Arrival, seconds: float) -> float | None:
    """The seconds until the `arrival` ends, which began `seconds` ago; None if they are unknown.

    A restore does not report its bytes: it is expected to take as long as the model's last restore.
    """
    if arrival.done_bytes:
        left_bytes = max(0, arrival.all_bytes - arrival.done_bytes)
        return left_bytes * seconds / arrival.done_bytes
    left = arrival.expected_seconds - seconds
    return left if left > 0 else None


def _part(arrival: Arrival, seconds: float) -> float:
    """The part of the `arrival` that is done, from 0 to 1. An estimate from time is at most 0.95."""
    if arrival.done_bytes and arrival.all_bytes:
        return min(1.0, arrival.done_bytes / arrival.all_bytes)
    return min(0.95, seconds / arrival.expected_seconds) if arrival.expected_seconds else 0.0


def summary(arrival: Arrival, waited_seconds: float) -> str:
    """The line that stays after the `arrival`: `qwen: waited 12 s, loaded in 20 s (2.1 GB/s)`."""
    waited = f"waited {show_seconds(waited_seconds)}, " if waited_seconds else ""
    took = show_seconds(arrival.seconds)
    if arrival.failed:
        return f"{subject(arrival.name)}: {waited}{arrival.verb} stopped after {took}"
    done = "loaded" if arrival.verb == LOADING else "restored"
    rate = show_rate(arrival.all_bytes, arrival.seconds)
    figures = f" ({rate})" if rate else ""
    return f"{subject(arrival.name)}: {waited}{done} in {took}{figures}"
