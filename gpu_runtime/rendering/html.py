"""Facts as HTML: bars and calm tables, readable in the dark and in the light. Pure.

Colours are those of Okabe and Ito, told apart by colour-blind people too; a model keeps its own everywhere. Nothing
here is random, so that executed notebooks can be compared. Whatever a person or a file named is escaped.

JupyterLab takes the style sheet out of a notebook that it does not trust yet, and keeps inline styles: so colours,
widths and alignment are inline, and only what is nice to have is in the sheet. Where both are gone, tables remain.

Source: Okabe & Ito 2008, Color Universal Design.
"""

from __future__ import annotations

import functools
import html
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_runtime.facts import Applied, Event, Health, Level, Outcome, Plan, Snapshot
from gpu_runtime.units import show_bytes

from . import text, views, words
from .views import Bar, Segment, clean, clock

COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
TEXTURES = 3  # classes gpuc-t0 … of style.css: plain, stripes, dots
_GREY = "rgba(128,128,128,0.5)"  # what belongs to no model
_TRACK = "rgba(128,128,128,0.16)"
_LABEL_FROM = 0.09  # a stretch narrower than this part of its bar is too thin for its name


@functools.cache
def style() -> str:
    """The style sheet, as one line of the page."""
    return (
        f"<style>{''.join(Path(__file__).with_name('style.css').read_text().splitlines())}</style>"
    )


def page(*parts: str) -> str:
    """The parts in one scope, with the style that holds in it and nowhere else."""
    return f'{style()}<div class="gpuc">{"".join(parts)}</div>'


def esc(said: object) -> str:
    return html.escape(clean(said), quote=True)


class Look(NamedTuple):
    colour: str
    ink: str  # of words upon it
    texture: str  # a class


def look(name: str) -> Look:
    """The colour and texture of a model, by its name alone."""
    number = zlib.crc32(name.encode()) >> 8  # the low bits of short names lie close together
    colour = COLOURS[number % len(COLOURS)]
    return Look(
        colour,
        "#ffffff" if colour == "#0072b2" else "#000000",
        f"gpuc-t{number // len(COLOURS) % TEXTURES}",
    )


# -- pieces -------------------------------------------------------------------------------------------------------


def pill(level: Level) -> str:
    return f'<span class="gpuc-level gpuc-{esc(level)}">{esc(level)}</span>'


def code(typed: str) -> str:
    return f"<code>{esc(typed)}</code>"


def line(*parts: str, soft: bool = False) -> str:
    return f'<div class="gpuc-line{" gpuc-soft" if soft else ""}">{" ".join(part for part in parts if part)}</div>'


def simulated(snapshot: Snapshot) -> str:
    return '<span class="gpuc-badge">simulated</span>' if snapshot.simulated else ""


def bar(drawn: Bar) -> str:
    """One device's bar. Its label says in words what it shows in colour."""
    scale = drawn.scale_bytes
    stretches = "".join(_stretch(segment, segment.bytes / scale) for segment in drawn.segments)
    limit = ""
    if 0 < drawn.limit_bytes < scale:
        at = f"left:{drawn.limit_bytes / scale:.2%}"
        limit = (
            f'<div class="gpuc-limit" title="budget {esc(show_bytes(drawn.limit_bytes))}" style="'
            f'position:absolute;top:0px;height:22px;border-left:2px solid;{at}"></div>'
        )
    told = ", ".join(segment.title for segment in drawn.segments) or "empty"
    return track(stretches, f"{drawn.device.id}: {told}", limit)


def track(stretches: str, label: str, over: str = "") -> str:
    """An empty bar with stretches in it, and something over them."""
    return (
        f'<div class="gpuc-bar" role="img" aria-label="{esc(label)}" style="position:relative;height:22px;'
        f'background-color:{_TRACK}"><div class="gpuc-fill" style="height:22px;overflow:hidden">{stretches}</div>'
        f"{over}</div>"
    )


def _stretch(segment: Segment, part: float) -> str:
    seen = look(segment.label) if segment.is_lease else Look(_GREY, "inherit", "")
    classes = [
        "gpuc-seg",
        seen.texture,
        "gpuc-thin" if part < _LABEL_FROM else "",
        f"gpuc-{segment.kind}" if segment.kind != "settled" else "",
    ]
    ink = "transparent" if part < _LABEL_FROM else seen.ink
    return stretch(
        part, seen.colour, ink, " ".join(filter(None, classes)), segment.title, segment.label
    )


def stretch(
    part: float,
    colour: str,
    ink: str = "transparent",
    classes: str = "gpuc-seg",
    title: str = "",
    label: str = "",
) -> str:
    return (
        f'<div class="{classes}" title="{esc(title)}" style="float:left;width:{part:.2%};height:22px;'
        f'overflow:hidden;white-space:nowrap;background-color:{colour};color:{ink}">{esc(label)}</div>'
    )


def swatch(row: views.Holding) -> str:
    seen = look(row.name) if row.kind in ("model", "block") else Look(_GREY, "", f"gpuc-{row.kind}")
    return (
        f'<span class="gpuc-swatch {seen.texture}" style="display:inline-block;width:11px;height:11px;'
        f'margin-right:7px;background-color:{seen.colour}"></span>'
    )


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already, each a whole `<td>`. Columns where nothing stands are left out."""
    rows = [list(row) for row in rows]
    shown = _used(rows)
    head = "".join(
        _left("th", esc(headers[n]), "gpuc-num" if headers[n] == "size" else "") for n in shown
    )
    body = "".join(f"<tr>{''.join(row[n] for n in shown)}</tr>" for row in rows)
    return (
        f'<table class="gpuc-table" style="table-layout:auto"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )


def devices(rows: Iterable[tuple[str, str, str, str, str]]) -> str:
    """A table of bars: device, bar, bytes, level, remarks, each HTML already."""
    cells = [
        (
            _left("td", id, "gpuc-nowrap"),
            _left("td", bar_, "gpuc-wide", "width:50%;max-width:0px"),
            _left("td", size, "gpuc-num", "white-space:nowrap"),
            _left("td", level),
            _left("td", remarks, "gpuc-soft gpuc-remarks", "min-width:120px" if remarks else ""),
        )
        for id, bar_, size, level, remarks in rows
    ]
    shown = _used(cells)
    body = "".join(f"<tr>{''.join(row[n] for n in shown)}</tr>" for row in cells)
    return f'<table class="gpuc-devices" style="width:100%;table-layout:auto"><tbody>{body}</tbody></table>'


def _used(rows: Sequence[Sequence[str]]) -> list[int]:
    """The columns in which anything stands."""
    return (
        [n for n in range(len(rows[0])) if any(not _EMPTY_CELL.fullmatch(row[n]) for row in rows)]
        if rows
        else []
    )


_EMPTY_CELL = re.compile("<td[^>]*></td>")


def _left(tag: str, inner: str, kind: str = "", more: str = "") -> str:
    """A cell whose alignment is its own, whatever the frontend does to tables."""
    side = "right" if "gpuc-num" in kind else "left"
    return f'<{tag} class="{kind}" style="text-align:{side}{";" + more if more else ""}">{inner}</{tag}>'


def td(said: object, kind: str = "") -> str:
    return _left("td", esc(said), kind)


# -- status -------------------------------------------------------------------------------------------------------


def status(snapshot: Snapshot) -> str:
    """How full, who holds what, who waits, what was decided last: from top to bottom."""
    users = len(views.owners(snapshot))
    shared = f'<span class="gpuc-soft">shared by {users} processes</span>' if users > 1 else ""
    head = (
        f'<div class="gpuc-head"><span class="gpuc-title">{esc(views.device_title(snapshot))}</span>'
        f" {pill(views.worst_level(snapshot))} {simulated(snapshot)} {shared}</div>"
    )
    alarms = "".join(
        f'<div class="gpuc-alarm">{esc(alarm)}</div>' for alarm in words.alarms(snapshot)
    )
    return page(head, alarms, _devices(snapshot), _queue(snapshot), _who(snapshot), _past(snapshot))


def host(snapshot: Snapshot) -> str:
    """The same for one host of several, under its name."""
    return page(line(f"<b>{esc(words.host(snapshot))}</b>")) + status(snapshot)


def _devices(snapshot: Snapshot) -> str:
    rows = []
    for seen, drawn in zip(snapshot.devices, views.bars(snapshot), strict=True):
        fill = f'{esc(views.fill(seen))} <span class="gpuc-soft">{seen.pressure:.0%}</span>'
        rows.append(
            (
                f"<b>{esc(seen.device.id)}</b>",
                bar(drawn),
                fill,
                pill(seen.level),
                esc(", ".join(views.remarks(snapshot, seen))),
            )
        )
    return devices(rows)


def _who(snapshot: Snapshot) -> str:
    rows = views.holdings(snapshot)
    hint = ""
    if not any(row.kind in ("model", "block") for row in rows):
        hint = line(with_code(text.nothing_yet("%gpu", [spec.name for spec in snapshot.specs])))
    if not rows:
        return hint
    more = len(rows) - views.MOST_ROWS
    headers = ("model", "size", "where", "held by", "importance", "state")
    return (
        hint
        + table(headers, map(_holding, rows[: views.MOST_ROWS]))
        + (line(f"and {more} more:", code("%gpu leases"), soft=True) if more > 0 else "")
    )


def with_code(sentence: str) -> str:
    """The sentence escaped, with what it says to type set as code."""
    said, colon, typed = sentence.partition(":  ")
    return f"{esc(said)}: {code(typed)}" if colon else esc(sentence)


def _holding(row: views.Holding) -> tuple[str, ...]:
    in_use = " gpuc-in-use" if row.state.startswith("in use") else ""
    marks = " ".join(f'<span class="gpuc-mark">{esc(mark)}</span>' for mark in row.marks)
    return (
        _left(
            "td",
            f'{swatch(row)}<span title="{esc(row.name)}">{esc(row.name)}</span>',
            "gpuc-swatched",
        ),
        td(text.size(row.bytes), "gpuc-num"),
        td(row.where, "gpuc-nowrap"),
        td(row.holder),
        _left("td", marks),
        td(row.state, f"gpuc-nowrap{in_use}"),
    )


def _queue(snapshot: Snapshot) -> str:
    queue = words.waiting(snapshot)
    if not queue:
        return ""
    items = "".join(f"<li>{esc(waits)}</li>" for waits in queue)
    return f'<div class="gpuc-wait"><b>Waiting: {len(queue)}</b><ol class="gpuc-list">{items}</ol></div>'


def _past(snapshot: Snapshot) -> str:
    last = ""
    if snapshot.events:
        event = snapshot.events[-1]
        last = line(
            f'<span class="gpuc-soft">Last decision, {clock(event.wall)}:</span>',
            f"<b>{esc(event.model)}</b>",
            esc(words.told(event)),
        )
    return last + (
        line(esc(words.counters(snapshot)), soft=True) if any(snapshot.totals.values()) else ""
    )


# -- answers ------------------------------------------------------------------------------------------------------


def health(found: Health) -> str:
    used = "" if found.used_percent is None else f"{found.used_percent:.0f} % used"
    return page(
        line(
            pill(found.pressure),
            f"<b>{'healthy' if found.healthy else 'not healthy'}</b>",
            f'<span class="gpuc-soft">{used}</span>' if used else "",
            esc(found.message),
        )
    )


def outcome(done: Outcome) -> str:
    head, _, told = text.outcome(done).partition(": ")
    return page(line(f"<b>{'✓' if done.done else '✗'} {esc(head)}</b>", esc(told)))


def applied(done: Applied) -> str:
    head, _, told = text.applied_head(done).partition(": ")
    notes = "".join(f"<li>{esc(note)}</li>" for note in done.notes)
    return page(
        line(f"<b>✓ {esc(head)}</b>", esc(told)),
        f'<ul class="gpuc-list">{notes}</ul>' if notes else "",
    )


def plan(found: Plan, snapshot: Snapshot, subject: str = "") -> str:
    """The verdict first; then why, the steps, and how the devices would look after them."""
    mark = "✓" if found.granted else "✗"
    parts = [
        f'<div class="gpuc-head"><span class="gpuc-title">{mark} {esc(words.verdict(found))}</span> '
        f"{simulated(snapshot)}</div>",
        line(esc(found.because)),
    ]
    if needs := words.needs(found):
        parts.append(line(f"Needs {esc(needs)}{esc(words.on_cards(found))}", soft=True))
    if rows := words.parts(found):
        parts.append(
            table(
                ("part", "size", "from"),
                (
                    (td(part, "gpuc-nowrap"), td(size, "gpuc-num"), td(source, "gpuc-soft"))
                    for part, size, source in rows
                ),
            )
        )
    parts += [line(with_code(note), soft=True) for note in words.notes(found)]
    if found.steps:
        steps = "".join(
            f"<li>{esc(words.step_sentence(snapshot, step))}</li>" for step in found.steps
        )
        parts.append(f'<ol class="gpuc-list">{steps}</ol>')
    after = views.bars_after(snapshot, found.steps)
    if after:
        parts.append(
            line("Then:", soft=True)
            + devices(
                (
                    f"<b>{esc(drawn.device.id)}</b>",
                    bar(drawn),
                    esc(show_bytes(drawn.used_bytes)),
                    "",
                    "",
                )
                for drawn in after
            )
        )
    if others := words.others_considered(found):
        parts.append(
            table(
                ("also considered" if found.granted else "considered", "why not"),
                ((td(place, "gpuc-nowrap"), td(because)) for place, because in others),
            )
        )
    if found.steps:
        parts.append(
            line("Nothing was done.", with_code(words.how(found, subject, "%gpu")), soft=True)
        )
    return page(*parts)


def why(name: str, events: Sequence[Event]) -> str:
    """The last decisions as sentences, the newest first."""
    if not events:
        return page(line(with_code(text.why(name, events))))
    rows = (
        (
            td(clock(event.wall), "gpuc-nowrap gpuc-soft"),
            _left("td", f"<b>{esc(event.model)}</b> {esc(words.told(event))}"),
        )
        for event in words.worth_a_line(events)
    )
    return page(table(("when", f"why {name}"), rows))


def config(rows: Sequence[Any]) -> str:
    return page(
        table(
            ("setting", "value", "set by", "meaning"),
            (
                (
                    _left("td", code(row.name)),
                    td(row.value, "gpuc-nowrap"),
                    td("" if row.source == "default" else row.source),
                    td(row.doc, "gpuc-soft"),
                )
                for row in rows
            ),
        )
    )


def preset(settings: Mapping[str, str]) -> str:
    return page(pre(text.preset(settings)))


def pre(lines: str) -> str:
    return f'<pre class="gpuc-pre">{html.escape(lines)}</pre>'


def progress(title: str, done_bytes: int, all_bytes: int, note: str) -> str:
    """A load under way, or settled."""
    part = min(1.0, done_bytes / all_bytes) if all_bytes else 0.0
    stretches = stretch(part, COLOURS[2]) if part else ""
    return page(devices([(f"<b>{esc(title)}</b>", track(stretches, note), esc(note), "", "")]))
