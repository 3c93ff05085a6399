"""Paints the elements of a page as HTML: lines, bars and tables. Pure.

The colours are the colours of Okabe and Ito, which colour-blind people can distinguish. A model has
the same colour everywhere. Nothing here is random, so that executed notebooks can be compared.
Every name given by a person or a file is escaped.

JupyterLab removes the style sheet from a notebook that the user does not trust yet, but keeps
inline styles. So the colours and widths of bars are inline, and the sheet has only optional rules,
such as the alignment of cells. If a frontend removes both, the reader still sees plain tables.

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

from ..facts import Level, Snapshot
from ..safe_text import clean
from ..units import show_bytes
from . import views
from .views import Bar, BarSegment

COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
# The textures plain, stripes and dots: each with its class in style.css, and the character that
# stands for it in text.
TEXTURES = (("", "■"), ("g-t1", "▨"), ("g-t2", "▩"))
_DARK_COLOURS = ("#0072b2",)  # text on these is white
_GREY = "#80808080"  # colour of bytes that belong to no model
_TRACK = "#80808029"
_BAR_HEIGHT = "22px"
_LABEL_FROM = 0.09  # a segment narrower than this fraction of its bar has no label


# Read with this module: `gpu box remove` prints its answer when the file is gone.
_RULES = Path(__file__).with_name("style.css").read_text().splitlines()


@functools.cache
def style(body: str | None = None) -> str:
    """The style sheet as one line of HTML, with only the rules that apply to `body`, if it is given.

    A notebook stores the rules with every output, so rules without effect are left out.
    """
    lines = _RULES if body is None else [line for line in _RULES if _applies(line, body)]
    return f"<style>{''.join(lines)}</style>"


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
    kind = "" if segment.kind == "settled" else f"g-{segment.kind}"
    classes = ["g-seg", drawn.texture, "g-thin" if thin else "", kind]
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
    if row.kind in views.OURS:
        drawn = look(row.name)
    return f'<span style="color:{drawn.colour}">{drawn.square}</span> '


# -- tables --------------------------------------------------------------------------------------


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], kinds: Sequence[str] = ()) -> str:
    """A table with `headers`. Each cell of `rows` is a whole `<td>`. Empty columns are left out.

    The header of a column of numbers, `g-num` in `kinds`, is aligned as its cells are.
    """
    cells = [list(row) for row in rows]
    columns = _used_columns(cells)
    head = "".join(
        table_cell("th", esc(headers[n]), "g-num" if "g-num" in kinds[n : n + 1] else "")
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
