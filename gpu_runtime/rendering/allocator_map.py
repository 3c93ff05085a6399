"""An allocator's map as a picture: rows of equal length, cut into pieces. The same for text, SVG and the console. Pure.

All segments lie end to end, in the order of their addresses, and are wrapped into rows as the words of a page are; so
area is bytes. What is too small to be seen is told together, by how much of it is in use.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gpu_runtime.facts import AllocatorMap, BlockState, SegmentMap, Snapshot
from gpu_runtime.units import MIB, show_bytes

from . import html

ALLOCATED, PENDING, STUCK, RELEASABLE, RELEASED = KINDS = (
    "allocated",
    "pending",
    "stuck",
    "releasable",
    "released",
)
WORDS = {
    ALLOCATED: "allocated",
    PENDING: "freed, in use by a stream",
    STUCK: "inactive, in a segment in use",
    RELEASABLE: "inactive, given back by defrag",
    RELEASED: "given back",
}
# Okabe and Ito's, as everywhere; none: a hatch alone.
COLOURS = {
    ALLOCATED: "#0072b2",
    PENDING: "#cc79a7",
    STUCK: "#d55e00",
    RELEASABLE: "#f0e442",
    RELEASED: "",
}
_ORDER = (
    RELEASED,
    RELEASABLE,
    STUCK,
    PENDING,
    ALLOCATED,
)  # what may be drawn wider than it is lies on top
MIDDLING = 20 * MIB  # torch's segment for blocks of 1 to 10 MiB, and its page of an expandable one
MOST_ROWS = 16
CELLS = 400  # pieces a row that can be told apart; what is narrower is told with its neighbours


class Mapped(NamedTuple):
    """The maps of all processes, each with whose it is."""

    maps: tuple[AllocatorMap, ...]
    titles: tuple[str, ...]


def mapped(maps: Iterable[AllocatorMap], snapshot: Snapshot) -> Mapped:
    """The maps with their titles, the one with most inactive bytes first."""
    known = {section.owner.id: section.owner.label for section in snapshot.sections.values()}
    known.setdefault(snapshot.owner.id, snapshot.owner.label)
    told = sorted(maps, key=lambda map: (-(map.inactive_bytes or 0), map.device, map.owner))
    return Mapped(
        tuple(told), tuple(f"{known.get(map.owner, map.owner)} on {map.device}" for map in told)
    )


class Piece(NamedTuple):
    """A stretch of a row: from `left` to `right` in bytes, from `low` to `high` in parts of the row's height."""

    row: int
    left: float
    right: float
    low: float
    high: float
    kind: str  # one of KINDS
    told: str


class Edge(NamedTuple):
    """The outline of a segment's stretch in a row."""

    row: int
    left: float
    right: float


class Picture(NamedTuple):
    row_bytes: int
    rows: int
    pieces: tuple[Piece, ...]
    edges: tuple[Edge, ...]


class _Stretch(NamedTuple):
    """Some bytes of one or several neighbours, and how many of each kind."""

    start: int
    sizes: tuple[int, ...]  # in the order of KINDS
    blocks: int
    where: str

    @property
    def bytes(self) -> int:
        return sum(self.sizes)


def picture(map: AllocatorMap, cells: int = CELLS) -> Picture:
    """The map's rows: at most 16, each a segment of middling size long or, of more, a power of two; none of nothing."""
    total = sum(segment.bytes for segment in map.segments)
    if not total:
        return Picture(MIDDLING, 0, (), ())
    row = MIDDLING if total <= MOST_ROWS * MIDDLING else 32 * MIB
    while row * MOST_ROWS < total:
        row *= 2
    cell = row / cells
    pieces = [
        piece for stretch in _stretches(map.segments, cell) for piece in _pieces(stretch, row, cell)
    ]
    pieces.sort(key=lambda piece: _ORDER.index(piece.kind))
    return Picture(row, -(-total // row), tuple(pieces), tuple(_edges(map.segments, row, 2 * cell)))


def legend(map: AllocatorMap) -> tuple[tuple[str, int], ...]:
    """The kinds that the map has, and how many bytes each."""
    sums = [0] * len(KINDS)
    for segment in map.segments:
        for sizes, _ in _cut(segment):
            sums = [one + other for one, other in zip(sums, sizes, strict=True)]
    return tuple((kind, size) for kind, size in zip(KINDS, sums, strict=True) if size)


def verdict(map: AllocatorMap) -> str:
    """What the map says, in a sentence or two."""
    said = f"{show_bytes(map.allocated_bytes)} of {show_bytes(map.reserved_bytes)} reserved are allocated"
    if map.inactive_bytes is None or map.releasable_bytes is None:
        return f"{said}; how the rest is cut up is unknown."
    if not map.inactive_bytes:
        return f"{said}. Nothing is inactive."
    stuck = map.inactive_bytes - map.releasable_bytes
    largest = (
        ""
        if map.largest_free_bytes is None
        else f", {show_bytes(map.largest_free_bytes)} in one piece at most"
    )
    if not stuck:
        where = "defrag gives them back"
    elif not map.releasable_bytes:
        where = "they lie in segments that are in use, and stay"
    else:
        where = (
            f"defrag gives {show_bytes(map.releasable_bytes)} back, {show_bytes(stuck)} lie in segments that are "
            f"in use, and stay"
        )
    return f"{said}. {show_bytes(map.inactive_bytes)} are inactive{largest}: {where}."


def left_out(map: AllocatorMap) -> str:
    """What the map does not tell, in a sentence; empty where it tells everything."""
    if not map.left_out:
        return ""
    return f"Not drawn: {map.left_out} smaller segments, {show_bytes(map.left_out_bytes)} in all."


def _cut(segment: SegmentMap) -> Iterator[tuple[tuple[int, ...], int]]:
    """How many bytes of each kind its blocks have, and how many blocks they are."""
    whole = not segment.in_use and segment.kind != "private"
    for block in segment.blocks:
        pages = segment.kind == "expandable" and block.bytes >= 2 * MIDDLING
        free = RELEASABLE if whole or pages else STUCK
        kind = {
            BlockState.ALLOCATED: ALLOCATED,
            BlockState.PENDING: PENDING,
            BlockState.RELEASED: RELEASED,
            BlockState.MIXED: ALLOCATED,
        }.get(block.state, free)
        sizes = dict.fromkeys(KINDS, 0)
        sizes[kind] += block.bytes - block.inactive_bytes
        sizes[free] += block.inactive_bytes
        yield tuple(sizes.values()), block.count


def _stretches(segments: Iterable[SegmentMap], least: float) -> Iterator[_Stretch]:
    """What is drawn as one: a block, or several neighbours that together are narrower than `least`."""
    at = 0
    few: _Stretch | None = None
    for segment in segments:
        where = f"{segment.kind} segment of {show_bytes(segment.bytes)}"
        large = segment.bytes >= 2 * least
        if few and large:
            yield few
            few = None
        for sizes, count in _cut(segment):
            one = _Stretch(at, sizes, count, where)
            at += one.bytes
            if few and few.bytes + one.bytes <= least:
                few = _Stretch(
                    few.start,
                    tuple(map(sum, zip(few.sizes, sizes, strict=True))),
                    few.blocks + count,
                    where if few.where == where else "several segments",
                )
                continue
            if few:
                yield few
            few = one
        if few and large:
            yield few
            few = None
    if few:
        yield few


def _pieces(stretch: _Stretch, row: int, least: float) -> Iterator[Piece]:
    """The stretch, cut where its rows end; of several kinds one above the other, by their part. What is in use and
    narrow is drawn as wide as can be seen: it may be all that keeps a segment from being given back."""
    told = _told(stretch)
    start, end = stretch.start, stretch.start + stretch.bytes
    if stretch.sizes[0] + stretch.sizes[1] == stretch.bytes:
        end = max(end, min(start + least, (start // row + 1) * row))
    while start < end:
        here = start // row
        until = min(end, (here + 1) * row)
        low = 0.0
        for kind, size in zip(KINDS, stretch.sizes, strict=True):
            if size:
                high = low + size / stretch.bytes
                yield Piece(
                    int(here), start - here * row, until - here * row, low, high, kind, told
                )
                low = high
        start = until


def _told(stretch: _Stretch) -> str:
    kinds = [(kind, size) for kind, size in zip(KINDS, stretch.sizes, strict=True) if size]
    blocks = f" in {stretch.blocks} blocks" if stretch.blocks > 1 else ""
    if len(kinds) == 1:
        return f"{show_bytes(stretch.bytes)} {WORDS[kinds[0][0]]}{blocks}\n{stretch.where}"
    parts = "; ".join(f"{show_bytes(size)} {WORDS[kind]}" for kind, size in kinds)
    return f"{show_bytes(stretch.bytes)}{blocks}: {parts}\n{stretch.where}"


def _edges(segments: Iterable[SegmentMap], row: int, least: float) -> Iterator[Edge]:
    start = 0
    for segment in segments:
        end = start + segment.bytes
        while segment.bytes >= least and start < end:
            until = min(end, (start // row + 1) * row)
            yield Edge(start // row, start % row, until - start // row * row)
            start = until
        start = end


# -- SVG ---------------------------------------------------------------------------------------------------------

_WIDTH, _ROW, _GAP, _LABEL = 720, 16, 3, 72
_SVG_CELLS = 240  # a map of thousands of blocks is then some 100 KB
_HATCH = {STUCK: "gpuc-hatch-stuck", RELEASED: "gpuc-hatch-released"}
_PATTERNS = (
    f'<defs><pattern id="{_HATCH[STUCK]}" width="5" height="5" patternUnits="userSpaceOnUse">'
    f'<rect width="5" height="5" fill="{COLOURS[STUCK]}"/>'
    f'<path d="M0 5L5 0" stroke="#fff" stroke-opacity=".7"/></pattern>'
    f'<pattern id="{_HATCH[RELEASED]}" width="5" height="5" patternUnits="userSpaceOnUse">'
    f'<circle cx="2" cy="2" r=".8" fill="#808080"/></pattern></defs>'
)


def as_svg(map: AllocatorMap, label: str) -> str:
    """The map as an SVG of its own, that needs no script and no style; `label` says what it shows, as text."""
    drawn = picture(map, _SVG_CELLS)
    if not drawn.rows:
        return ""
    height = drawn.rows * (_ROW + _GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LABEL + _WIDTH + 2} {height}" role="img" '
        f'aria-label="{html.esc(label)}" style="width:100%;max-width:{_LABEL + _WIDTH}px;display:block">{_PATTERNS}'
        + "".join(_row_label(row, drawn.row_bytes) for row in range(drawn.rows))
        + "".join(_paths(drawn))
        + "</svg>"
    )


def _row_label(row: int, row_bytes: int) -> str:
    return (
        f'<text x="{_LABEL - 8}" y="{row * (_ROW + _GAP) + 12}" text-anchor="end" font-size="11" fill="#808080" '
        f'font-family="sans-serif">{show_bytes(row * row_bytes)}</text>'
    )


def _box(
    row: int, left: float, right: float, row_bytes: int, low: float = 0.0, high: float = 1.0
) -> str:
    x, width = _LABEL + left / row_bytes * _WIDTH, max(0.2, (right - left) / row_bytes * _WIDTH)
    top, height = row * (_ROW + _GAP) + 1 + (1 - high) * _ROW, (high - low) * _ROW
    return f"M{x:.1f} {top:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"


def _paths(drawn: Picture) -> Iterator[str]:
    """One path a kind, and one for all outlines: thousands of elements would make a slow page."""
    for kind, pieces in itertools.groupby(drawn.pieces, lambda piece: piece.kind):
        fill = f"url(#{_HATCH[kind]})" if kind in _HATCH else COLOURS[kind]
        boxes = "".join(
            _box(one.row, one.left, one.right, drawn.row_bytes, one.low, one.high) for one in pieces
        )
        yield f'<path fill="{fill}" d="{boxes}"/>'
    edges = "".join(_box(edge.row, edge.left, edge.right, drawn.row_bytes) for edge in drawn.edges)
    yield f'<path fill="none" stroke="#808080" d="{edges}"/>'


def as_html(map: AllocatorMap, title: str) -> str:
    """The picture under its title, with what it says and a legend."""
    said = " ".join(filter(None, [verdict(map), left_out(map)]))
    return html.page(
        html.line(f"<b>{html.esc(title)}</b>"),
        html.line(html.esc(said)),
        as_svg(map, f"{title}: {said}"),
        html.line(keys(map), soft=True),
    )


def keys(map: AllocatorMap) -> str:
    """The legend, as HTML."""
    return "".join(
        f'<span style="white-space:nowrap;margin-right:16px">{_swatch(kind)} {html.esc(WORDS[kind])} '
        f"{show_bytes(size)}</span> "
        for kind, size in legend(map)
    )


def _swatch(kind: str) -> str:
    """A square of the kind's look; drawn without the shared patterns, so that it stands for itself."""
    fill = COLOURS[kind] or "none"
    lines = {
        STUCK: '<path d="M0 5L5 0M0 11L11 0M6 11L11 6" stroke="#fff" stroke-opacity=".7"/>',
        RELEASED: '<circle cx="3" cy="3" r=".8" fill="#808080"/><circle cx="8" cy="8" r=".8" fill="#808080"/>',
    }
    return (
        f'<svg width="11" height="11" viewBox="0 0 11 11" style="vertical-align:-1px"><rect width="11" height="11" '
        f'fill="{fill}" stroke="#808080"/>{lines.get(kind, "")}</svg>'
    )


# -- text ---------------------------------------------------------------------------------------------------------

_CELLS = 64
_MARKS = {ALLOCATED: "█", PENDING: "▓", STUCK: "░", RELEASABLE: "·", RELEASED: " "}


def as_text(map: AllocatorMap, title: str) -> str:
    """The map in characters: a cell shows what most of its bytes are, `▒` where some are in use and most are not."""
    drawn = picture(map, _CELLS)
    lines = [title, verdict(map)]
    width = len(show_bytes(drawn.row_bytes * max(0, drawn.rows - 1)))
    for row, cells in enumerate(_cells(drawn)):
        lines.append(f"  {show_bytes(row * drawn.row_bytes):>{width}} {cells}".rstrip())
    if drawn.rows:
        keys = [f"{_MARKS[kind]} {WORDS[kind]} {show_bytes(size)}" for kind, size in legend(map)]
        lines.append(f"  {'   '.join(keys)}")
    return "\n".join([*lines, *filter(None, [left_out(map)])])


def _cells(drawn: Picture) -> list[str]:
    cell = drawn.row_bytes / _CELLS
    shares = [[[0.0] * len(KINDS) for _ in range(_CELLS)] for _ in range(drawn.rows)]
    for piece in drawn.pieces:
        at = piece.left
        while at < piece.right:
            index = min(_CELLS - 1, int(at / cell))
            until = min(piece.right, (index + 1) * cell) if index < _CELLS - 1 else piece.right
            shares[piece.row][index][KINDS.index(piece.kind)] += (until - at) * (
                piece.high - piece.low
            )
            at = until
    return ["".join(_mark(kinds) for kinds in row).rstrip() for row in shares]


def _mark(kinds: Sequence[float]) -> str:
    if not sum(kinds):
        return " "
    most = max(range(len(KINDS)), key=lambda index: kinds[index])
    used = kinds[0] + kinds[1]
    if used and KINDS[most] not in (ALLOCATED, PENDING):
        return "▒"
    return _MARKS[KINDS[most]]
