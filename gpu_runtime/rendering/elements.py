"""The HTML elements of every page: style, colours, bars and tables. This module is pure.

The colours are those of Okabe and Ito, which colour-blind people can distinguish. A model has the
same colour everywhere. Nothing here is random, so that executed notebooks can be compared. Every
name given by a person or a file is escaped.

JupyterLab removes the style sheet from a notebook that it does not trust yet, but keeps inline
styles. So colours, widths and alignment are inline, and the sheet has only optional rules. If a
frontend removes both, the reader still sees plain tables.

Source: Okabe & Ito 2008, Color Universal Design.
"""

from __future__ import annotations

import functools
import html
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_runtime.facts import Level, Snapshot
from gpu_runtime.units import show_bytes

from . import views
from .views import Bar, BarSegment, clean

COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
TEXTURES = 3  # number of classes gpuc-t0 … in style.css: plain, stripes, dots
_DARK_COLOURS = ("#0072b2",)  # text on these is white
_GREY = "rgba(128,128,128,0.5)"  # colour of bytes that belong to no model
_TRACK = "rgba(128,128,128,0.16)"
_BAR_HEIGHT = "22px"
_LABEL_FROM = 0.09  # a segment narrower than this fraction of its bar has no label


@functools.cache
def style(body: str | None = None) -> str:
    """The style sheet as one line of HTML: all rules, or those that apply to the HTML `body`.

    A notebook keeps the rules with every output, so rules without effect are left out.
    """
    lines = _rules() if body is None else [line for line in _rules() if _applies(line, body)]
    return f"<style>{''.join(lines)}</style>"


@functools.cache
def _rules() -> list[str]:
    return Path(__file__).with_name("style.css").read_text().splitlines()


def _applies(rule: str, body: str) -> bool:
    """Whether a `rule` of the style sheet has an effect on the HTML `body`."""
    names = set(re.findall(r"gpuc-\w[\w-]*", rule))
    if names:
        return any(name in body for name in names)
    return ".gpuc code" not in rule or "<code" in body


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
    texture: str  # a class of style.css


def look(name: str) -> Look:
    """The colour and texture of the model `name`, which depend only on the name."""
    number = zlib.crc32(name.encode()) >> 8  # the low bits of short names are often equal
    colour = COLOURS[number % len(COLOURS)]
    ink = "#ffffff" if colour in _DARK_COLOURS else "#000000"
    return Look(colour, ink, f"gpuc-t{number // len(COLOURS) % TEXTURES}")


# -- text ----------------------------------------------------------------------------------------


def pill(level: Level) -> str:
    """The pressure `level` as a coloured badge."""
    return f'<span class="gpuc-level gpuc-{esc(level)}">{esc(level)}</span>'


def code(typed: str) -> str:
    """The command `typed`, set as code."""
    return f"<code>{esc(typed)}</code>"


def line(*parts: str, soft: bool = False) -> str:
    """One line that consists of the non-empty HTML `parts`. `soft` is for less important text."""
    kind = " gpuc-soft" if soft else ""
    return f'<div class="gpuc-line{kind}">{" ".join(part for part in parts if part)}</div>'


def pre(lines: str) -> str:
    """The `lines` of text, unchanged, in a fixed-width font."""
    return f'<pre class="gpuc-pre">{html.escape(lines)}</pre>'


def with_code(sentence: str) -> str:
    """The `sentence` as escaped HTML. The command after `:  ` in it is shown as code."""
    text, colon, typed = sentence.partition(":  ")
    return f"{esc(text)}: {code(typed)}" if colon else esc(sentence)


def simulated(snapshot: Snapshot) -> str:
    """A badge if the devices of the `snapshot` are simulated, otherwise an empty text."""
    return '<span class="gpuc-badge">simulated</span>' if snapshot.simulated else ""


# -- bars ----------------------------------------------------------------------------------------


def bar(drawn: Bar) -> str:
    """The bar `drawn` of one device. Its label describes the bar for screen readers."""
    scale = drawn.scale_bytes
    segments = "".join(_segment(segment, segment.bytes / scale) for segment in drawn.segments)
    limit = ""
    if 0 < drawn.limit_bytes < scale:
        limit = (
            f'<div class="gpuc-limit" title="budget {esc(show_bytes(drawn.limit_bytes))}" '
            f'style="position:absolute;top:0px;height:{_BAR_HEIGHT};border-left:2px solid;'
            f'left:{drawn.limit_bytes / scale:.2%}"></div>'
        )
    label = ", ".join(segment.title for segment in drawn.segments) or "empty"
    return track(segments, f"{drawn.device.id}: {label}", limit)


def track(stretches: str, label: str, over: str = "") -> str:
    """An empty bar with the HTML `stretches` in it and `over` on top.

    Screen readers read `label`.
    """
    return (
        f'<div class="gpuc-bar" role="img" aria-label="{esc(label)}" '
        f'style="position:relative;height:{_BAR_HEIGHT};background-color:{_TRACK}">'
        f'<div class="gpuc-fill" style="height:{_BAR_HEIGHT};overflow:hidden">{stretches}</div>'
        f"{over}</div>"
    )


def _segment(segment: BarSegment, part: float) -> str:
    drawn = look(segment.label) if segment.is_lease else Look(_GREY, "inherit", "")
    thin = part < _LABEL_FROM
    classes = ["gpuc-seg", drawn.texture]
    if thin:
        classes.append("gpuc-thin")
    if segment.kind != "settled":
        classes.append(f"gpuc-{segment.kind}")
    return stretch(
        part,
        drawn.colour,
        "transparent" if thin else drawn.ink,
        " ".join(filter(None, classes)),
        segment.title,
        segment.label,
    )


def stretch(
    part: float,
    colour: str,
    ink: str = "transparent",
    classes: str = "gpuc-seg",
    title: str = "",
    label: str = "",
) -> str:
    """A `part` of a bar (0 to 1) in this `colour`, with its `label` in the colour `ink`.

    `title` is shown on hover; `classes` are those of style.css.
    """
    hover = f' title="{esc(title)}"' if title else ""
    # A segment that is too short for its label has an empty one, which gives it its height.
    text = "&nbsp;" if ink == "transparent" else esc(label)
    colours = f"background-color:{colour}" + ("" if ink == "transparent" else f";color:{ink}")
    return (
        f'<div class="{classes}"{hover} style="float:left;width:{part:.2%};{colours}">{text}</div>'
    )


def swatch(row: views.Holding) -> str:
    """A square in the colour of the `row`'s model."""
    drawn = Look(_GREY, "", f"gpuc-{row.kind}")
    if row.kind in ("model", "block", "kernel"):
        drawn = look(row.name)
    return (
        f'<span class="gpuc-swatch {drawn.texture}" style="background-color:{drawn.colour}"></span>'
    )


# -- tables --------------------------------------------------------------------------------------


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with `headers`. Each cell of `rows` is a whole `<td>`. Empty columns are left out."""
    cells = [list(row) for row in rows]
    columns = _used_columns(cells)
    head = "".join(
        table_cell("th", esc(headers[n]), "gpuc-num" if headers[n] in _NUMBERS else "")
        for n in columns
    )
    return (
        f'<table class="gpuc-table" style="table-layout:auto"><thead><tr>{head}</tr></thead>'
        f"<tbody>{_body(cells, columns)}</tbody></table>"
    )


def devices(rows: Iterable[tuple[str, str, str, str, str]]) -> str:
    """A table of bars. A row of `rows` is device, bar, bytes, level and remarks, each as HTML."""
    cells = [_device_row(*row) for row in rows]
    return (
        '<table class="gpuc-devices" style="width:100%;table-layout:auto">'
        f"<tbody>{_body(cells, _used_columns(cells))}</tbody></table>"
    )


def _device_row(id: str, drawn: str, size: str, level: str, remarks: str) -> tuple[str, ...]:
    return (
        table_cell("td", id, "gpuc-nowrap"),
        table_cell("td", drawn, "gpuc-wide", "width:50%;max-width:0px"),
        table_cell("td", size, "gpuc-num", "white-space:nowrap"),
        table_cell("td", level),
        table_cell("td", remarks, "gpuc-soft gpuc-remarks", "min-width:120px" if remarks else ""),
    )


_NUMBERS = ("size", "holds", "frees")  # headers of columns with numbers
_EMPTY_CELL = re.compile("<td[^>]*></td>")


def _used_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """The indices of the columns that have at least one non-empty cell."""
    if not rows:
        return []
    return [
        n for n in range(len(rows[0])) if any(not _EMPTY_CELL.fullmatch(row[n]) for row in rows)
    ]


def _body(rows: Sequence[Sequence[str]], columns: Sequence[int]) -> str:
    return "".join(f"<tr>{''.join(row[n] for n in columns)}</tr>" for row in rows)


def table_cell(tag: str, inner: str, kind: str = "", style: str = "") -> str:
    """A `<td>` or `<th>` (the `tag`) around the HTML `inner`, with the classes `kind`.

    The alignment of numbers is inline, for a notebook whose style sheet is removed. `style` is
    further inline style.
    """
    numbers = "text-align:right" if "gpuc-num" in kind else ""
    inline = ";".join(filter(None, (numbers, style)))
    classes = f' class="{kind}"' if kind else ""
    styles = f' style="{inline}"' if inline else ""
    return f"<{tag}{classes}{styles}>{inner}</{tag}>"


def td(text: object, kind: str = "") -> str:
    """A `<td>` with the `text` escaped, and the classes `kind`."""
    return table_cell("td", esc(text), kind)
