"""Draws the map of an allocator: rows of equal length, divided into coloured pieces.

This module is pure. The picture is the same for text, SVG and the console. All segments are laid
end to end in the order of their addresses, and wrapped into rows like the words of a text. So the
area of a piece is proportional to its bytes. Neighbouring blocks of memory that are too small to be
seen are drawn as one piece, which shows the part of their bytes that is in use.
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
    RELEASABLE: "inactive, released by defrag",
    RELEASED: "released",
}
# Neutral colours, and a saturated one for the problem: memory that is not in use and that defrag
# cannot release. A kind without a colour is drawn as a pattern.
COLOURS = {
    ALLOCATED: "#748db1",
    PENDING: "#9dd4ef",
    STUCK: "#d55e00",
    RELEASABLE: "#f0deb6",
    RELEASED: "",
}
# The kinds in the order of drawing. Bytes in use are drawn last and on top, because a small block
# in use is drawn wider than its true size.
_ORDER = (RELEASED, RELEASABLE, STUCK, PENDING, ALLOCATED)
MIDDLING = 20 * MIB  # torch's segment for blocks of 1 to 10 MiB, and the page of an expandable one
MOST_ROWS = 16
CELLS = 400  # pieces that are visible in a row; narrower ones are joined with their neighbours


class Mapped(NamedTuple):
    """The allocator maps of all processes, each map with a title."""

    maps: tuple[AllocatorMap, ...]
    titles: tuple[str, ...]


def mapped(maps: Iterable[AllocatorMap], snapshot: Snapshot) -> Mapped:
    """The `maps` with titles from the `snapshot`. The map with the most inactive bytes is first."""
    labels = {section.owner.id: section.owner.label for section in snapshot.sections.values()}
    labels.setdefault(snapshot.owner.id, snapshot.owner.label)
    ordered = sorted(maps, key=lambda map: (-(map.inactive_bytes or 0), map.device, map.owner))
    titles = [f"{labels.get(map.owner, map.owner)} on {map.device}" for map in ordered]
    return Mapped(tuple(ordered), tuple(titles))


class MapPiece(NamedTuple):
    """A rectangle: two positions in its row, in bytes, and two fractions of the row's height."""

    row: int
    left: float
    right: float
    low: float
    high: float
    kind: str  # one of KINDS
    title: str  # the text that describes the piece


class Edge(NamedTuple):
    """The outline of the part of a segment that lies in one row."""

    row: int
    left: float
    right: float


class Picture(NamedTuple):
    """A map as rows of pieces, with the outlines of its segments."""

    row_bytes: int
    rows: int
    pieces: tuple[MapPiece, ...]
    edges: tuple[Edge, ...]


class _Stretch(NamedTuple):
    """Bytes that are drawn as one piece: one block of memory, or several neighbouring blocks."""

    start: int
    sizes: tuple[int, ...]  # bytes of each kind, in the order of KINDS
    blocks: int
    where: str

    @property
    def bytes(self) -> int:
        return sum(self.sizes)

    def with_next(self, other: _Stretch) -> _Stretch:
        sizes = tuple(size + more for size, more in zip(self.sizes, other.sizes, strict=True))
        where = other.where if self.where == other.where else "several segments"
        return _Stretch(self.start, sizes, self.blocks + other.blocks, where)


def picture(map: AllocatorMap, cells: int = CELLS) -> Picture:
    """The `map` as at most 16 rows, each wide enough for `cells` pieces. An empty map has no rows.

    A row stands for 20 MiB, which is the middle one of torch's segment sizes. If this would give
    more than 16 rows, a row stands for 32 MiB, 64 MiB, and so on.
    """
    total = sum(segment.bytes for segment in map.segments)
    if not total:
        return Picture(MIDDLING, 0, (), ())
    row = MIDDLING if total <= MOST_ROWS * MIDDLING else 32 * MIB
    while row * MOST_ROWS < total:
        row *= 2
    cell = row / cells
    stretches = _stretches(map.segments, cell)
    pieces = [piece for stretch in stretches for piece in _pieces(stretch, row, cell)]
    pieces.sort(key=lambda piece: _ORDER.index(piece.kind))
    return Picture(row, -(-total // row), tuple(pieces), tuple(_edges(map.segments, row, 2 * cell)))


def legend(map: AllocatorMap) -> tuple[tuple[str, int], ...]:
    """The kinds of bytes in the `map`, and the number of bytes of each kind."""
    sums = [0] * len(KINDS)
    for segment in map.segments:
        for sizes, _ in _cut(segment):
            sums = [total + other for total, other in zip(sums, sizes, strict=True)]
    return tuple((kind, size) for kind, size in zip(KINDS, sums, strict=True) if size)


def verdict(map: AllocatorMap) -> str:
    """One or two sentences on how much of the memory in `map` is in use, and how much is not."""
    allocated, reserved = show_bytes(map.allocated_bytes), show_bytes(map.reserved_bytes)
    head = f"{allocated} of {reserved} reserved are allocated"
    if map.inactive_bytes is None or map.releasable_bytes is None:
        return f"{head}; how the rest is divided is unknown."
    if not map.inactive_bytes:
        return f"{head}. Nothing is inactive."
    largest = ""
    if map.largest_free_bytes is not None:
        largest = f", {show_bytes(map.largest_free_bytes)} in one piece at most"
    future = _inactive_future(map.inactive_bytes - map.releasable_bytes, map.releasable_bytes)
    return f"{head}. {show_bytes(map.inactive_bytes)} are inactive{largest}: {future}."


def _inactive_future(stuck: int, releasable: int) -> str:
    """What defrag does with the inactive bytes, of which `stuck` are in segments partly in use. Ends a sentence."""
    if not stuck:
        return "defrag releases them"
    if not releasable:
        return "they are in segments in use, and stay"
    return (
        f"defrag releases {show_bytes(releasable)}, {show_bytes(stuck)} are in segments in use, "
        "and stay"
    )


def sentences(map: AllocatorMap) -> str:
    """The verdict on the `map`, and what the map leaves out."""
    return " ".join(filter(None, [verdict(map), left_out(map)]))


def left_out(map: AllocatorMap) -> str:
    """A sentence about the segments that the `map` leaves out, or "" if it contains all segments."""
    if not map.left_out:
        return ""
    return f"Not drawn: {map.left_out} smaller segments, {show_bytes(map.left_out_bytes)} in all."


_KIND_OF_STATE = {  # the other states are inactive: STUCK or RELEASABLE
    BlockState.ALLOCATED: ALLOCATED,
    BlockState.PENDING: PENDING,
    BlockState.RELEASED: RELEASED,
    BlockState.MIXED: ALLOCATED,
}


def _cut(segment: SegmentMap) -> Iterator[tuple[tuple[int, ...], int]]:
    """The bytes of each kind, and the number of blocks of memory, of each entry of `segment.blocks`."""
    whole = not segment.in_use and segment.kind != "private"
    for block in segment.blocks:
        # Defrag releases whole pages of an expandable segment. A free block of at least two pages
        # contains a whole page, wherever it begins.
        pages = segment.kind == "expandable" and block.bytes >= 2 * MIDDLING
        inactive = RELEASABLE if whole or pages else STUCK
        sizes = dict.fromkeys(KINDS, 0)
        sizes[_KIND_OF_STATE.get(block.state, inactive)] += block.bytes - block.inactive_bytes
        sizes[inactive] += block.inactive_bytes
        yield tuple(sizes.values()), block.count


def _stretches(segments: Iterable[SegmentMap], least: float) -> Iterator[_Stretch]:
    """Yields one block of memory, or several neighbours that together have at most `least` bytes.

    Blocks of a segment of 2 * `least` bytes or more are not joined with blocks of another segment.
    """
    pending: _Stretch | None = None
    start = group = 0  # the number of a large segment, or 0
    for number, segment in enumerate(segments, 1):
        where = f"{segment.kind} segment of {show_bytes(segment.bytes)}"
        last_group, group = group, number if segment.bytes >= 2 * least else 0
        for sizes, count in _cut(segment):
            block = _Stretch(start, sizes, count, where)
            start += block.bytes
            if pending and group == last_group and pending.bytes + block.bytes <= least:
                pending = pending.with_next(block)
                continue
            if pending:
                yield pending
            pending, last_group = block, group
    if pending:
        yield pending


def _pieces(stretch: _Stretch, row: int, least: float) -> Iterator[MapPiece]:
    """Yields the pieces of `stretch`, in which the kinds of bytes are stacked.

    If all bytes of the stretch are in use, it is drawn at least `least` bytes wide, but not beyond
    the end of its row, which has `row` bytes. Even a few bytes in use can keep a whole segment from
    being released, so they must be visible.
    """
    title = _title(stretch)
    start, end = stretch.start, stretch.start + stretch.bytes
    allocated, pending, *_ = stretch.sizes
    if allocated + pending == stretch.bytes:
        end_of_row = (start // row + 1) * row
        end = max(end, min(start + least, end_of_row))
    for here, left, right in _in_rows(start, end, row):
        low = 0.0
        for kind, size in zip(KINDS, stretch.sizes, strict=True):
            if size:
                high = low + size / stretch.bytes
                yield MapPiece(here, left, right, low, high, kind, title)
                low = high


def _in_rows(start: float, end: float, row: int) -> Iterator[Edge]:
    """Cuts the bytes from `start` to `end` at the ends of rows."""
    while start < end:
        here = int(start // row)
        until = min(end, (here + 1) * row)
        yield Edge(here, start - here * row, until - here * row)
        start = until


def _title(stretch: _Stretch) -> str:
    kinds = [(kind, size) for kind, size in zip(KINDS, stretch.sizes, strict=True) if size]
    blocks = f" in {stretch.blocks} blocks" if stretch.blocks > 1 else ""
    if len(kinds) == 1:
        return f"{show_bytes(stretch.bytes)} {WORDS[kinds[0][0]]}{blocks}\n{stretch.where}"
    parts = "; ".join(f"{show_bytes(size)} {WORDS[kind]}" for kind, size in kinds)
    return f"{show_bytes(stretch.bytes)}{blocks}: {parts}\n{stretch.where}"


def _edges(segments: Iterable[SegmentMap], row: int, least: float) -> Iterator[Edge]:
    """The outlines of the segments that have at least `least` bytes."""
    start = 0
    for segment in segments:
        end = start + segment.bytes
        if segment.bytes >= least:
            yield from _in_rows(start, end, row)
        start = end


# -- SVG -----------------------------------------------------------------------------------------

_WIDTH, _ROW, _GAP, _LABEL = 720, 16, 3, 72
_SVG_CELLS = 240  # with this number, the SVG of a map of thousands of blocks has about 100 KB
_HATCH = {STUCK: "gpuc-hatch-stuck", RELEASED: "gpuc-hatch-released"}
_PATTERNS = (
    f'<defs><pattern id="{_HATCH[STUCK]}" width="5" height="5" patternUnits="userSpaceOnUse">'
    f'<rect width="5" height="5" fill="{COLOURS[STUCK]}"/>'
    f'<path d="M0 5L5 0" stroke="#fff" stroke-opacity=".7"/></pattern>'
    f'<pattern id="{_HATCH[RELEASED]}" width="5" height="5" patternUnits="userSpaceOnUse">'
    f'<circle cx="2" cy="2" r=".8" fill="#808080"/></pattern></defs>'
)


def as_svg(map: AllocatorMap, label: str, *, titles: bool = False) -> str:
    """The `map` as an SVG without script or style sheet. Screen readers read `label`, and the mouse finds `titles`."""
    drawn = picture(map, _SVG_CELLS)
    if not drawn.rows:
        return ""
    height = drawn.rows * (_ROW + _GAP)
    labels = "".join(
        f'<text x="{_LABEL - 8}" y="{row * (_ROW + _GAP) + 12}" text-anchor="end" font-size="11" '
        f'fill="#808080" font-family="sans-serif">{show_bytes(row * drawn.row_bytes)}</text>'
        for row in range(drawn.rows)
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {_LABEL + _WIDTH + 2} {height}" role="img" '
        f'aria-label="{html.esc(label)}" '
        f'style="width:100%;max-width:{_LABEL + _WIDTH}px;display:block">'
        f"{_PATTERNS}{labels}{''.join(_paths(drawn, titles))}</svg>"
    )


def _box(
    row: int, left: float, right: float, row_bytes: int, low: float = 0.0, high: float = 1.0
) -> str:
    """A rectangle as an SVG path."""
    x = _LABEL + left / row_bytes * _WIDTH
    width = max(0.2, (right - left) / row_bytes * _WIDTH)
    top = row * (_ROW + _GAP) + 1 + (1 - high) * _ROW
    height = (high - low) * _ROW
    return f"M{x:.1f} {top:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"


def _paths(drawn: Picture, titles: bool) -> Iterator[str]:
    """Yields one path for each kind, and one for all outlines.

    An element for each of thousands of pieces is slower, so there is one only if they have `titles`.
    """
    for kind, pieces in itertools.groupby(drawn.pieces, lambda piece: piece.kind):
        fill = f"url(#{_HATCH[kind]})" if kind in _HATCH else COLOURS[kind]
        paths = []
        for piece in pieces:
            box = _box(piece.row, piece.left, piece.right, drawn.row_bytes, piece.low, piece.high)
            words = "\n".join(map(html.esc, piece.title.splitlines()))
            paths.append(f'<path d="{box}"><title>{words}</title></path>' if titles else box)
        if titles:
            yield f'<g fill="{fill}">{"".join(paths)}</g>'
        else:
            yield f'<path fill="{fill}" d="{"".join(paths)}"/>'
    outlines = "".join(
        _box(edge.row, edge.left, edge.right, drawn.row_bytes) for edge in drawn.edges
    )
    yield f'<path fill="none" stroke="#808080" pointer-events="none" d="{outlines}"/>'


def as_html(mapped: Mapped) -> str:
    """A page for each map: its title, its verdict, the picture and a legend."""
    pages = []
    for map, title in zip(mapped.maps, mapped.titles, strict=True):
        page = html.page(
            html.line(f"<b>{html.esc(title)}</b>"),
            html.line(html.esc(sentences(map))),
            as_svg(map, f"{title}: {sentences(map)}"),
            html.line(keys(map), soft=True),
        )
        pages.append(page)
    return "".join(pages)


def keys(map: AllocatorMap) -> str:
    """The legend of the `map` as HTML."""
    return "".join(
        f'<span style="white-space:nowrap;margin-right:16px">{_swatch(kind)} '
        f"{html.esc(WORDS[kind])} {show_bytes(size)}</span> "
        for kind, size in legend(map)
    )


def _swatch(kind: str) -> str:
    """A square like the pieces of this `kind`, without the patterns of the SVG."""
    fill = COLOURS[kind] or "none"
    lines = {
        STUCK: '<path d="M0 5L5 0M0 11L11 0M6 11L11 6" stroke="#fff" stroke-opacity=".7"/>',
        RELEASED: '<circle cx="3" cy="3" r=".8" fill="#808080"/>'
        '<circle cx="8" cy="8" r=".8" fill="#808080"/>',
    }
    return (
        '<svg width="11" height="11" viewBox="0 0 11 11" style="vertical-align:-1px">'
        f'<rect width="11" height="11" fill="{fill}" stroke="#808080"/>'
        f"{lines.get(kind, '')}</svg>"
    )


# -- text ----------------------------------------------------------------------------------------

_CELLS = 64
_MARKS = {ALLOCATED: "█", PENDING: "▓", STUCK: "░", RELEASABLE: "·", RELEASED: " "}


def as_text(mapped: Mapped) -> str:
    """The maps in characters, each under its title.

    A character stands for many bytes, and shows the kind of most of them. `▒` means that most of
    its bytes are not in use, but some are.
    """
    return "\n\n".join(map(_map_text, mapped.maps, mapped.titles))


def _map_text(map: AllocatorMap, title: str) -> str:
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
    """Each row of the picture `drawn` as a string, with one mark for each cell."""
    cell = drawn.row_bytes / _CELLS
    shares = [[[0.0] * len(KINDS) for _ in range(_CELLS)] for _ in range(drawn.rows)]
    for piece in drawn.pieces:
        kind = KINDS.index(piece.kind)
        at = piece.left
        while at < piece.right:
            index = min(_CELLS - 1, int(at / cell))
            end_of_cell = (index + 1) * cell if index < _CELLS - 1 else piece.right
            until = min(piece.right, end_of_cell)
            shares[piece.row][index][kind] += (until - at) * (piece.high - piece.low)
            at = until
    return ["".join(_mark(kinds) for kinds in row).rstrip() for row in shares]


def _mark(kinds: Sequence[float]) -> str:
    """The mark of a cell, from its bytes of each kind."""
    if not sum(kinds):
        return " "
    largest = max(range(len(KINDS)), key=lambda index: kinds[index])
    in_use = kinds[0] + kinds[1]
    if in_use and KINDS[largest] not in (ALLOCATED, PENDING):
        return "▒"
    return _MARKS[KINDS[largest]]
