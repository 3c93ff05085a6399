"""The tab Fragmentation: what every process's allocator holds on each card and cannot use, and one of them drawn.

`rows` and `report` are pure: maps and a Snapshot in, a table and words out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import panel as pn

from gpu_runtime.facts import AllocatorMap, DeviceView, Snapshot
from gpu_runtime.rendering import allocator_map as drawing
from gpu_runtime.rendering.html import esc
from gpu_runtime.rendering.views import clean
from gpu_runtime.units import show_bytes

from ..charts.map_chart import MapChart
from ..data.rows import UNKNOWN, owner_cell
from ..palette import EDGE
from ..widgets.table import Button, Cell, Column, Row, Sheet, encoded
from .base import Tab

MAP_SECONDS = (
    0.5  # how often the maps are looked at; those that have not changed are not read again
)

COLUMNS = (
    Column("Process"),
    Column("Device"),
    Column("Allocated", True, "Bytes in blocks that somebody uses"),
    Column("Reserved", True, "Bytes that the allocator took from the card"),
    Column("Inactive", True, "Reserved bytes that nobody uses"),
    Column(
        "Comes back",
        True,
        "Inactive bytes that defragmenting gives back to the card: segments that nobody uses",
    ),
    Column(
        "Largest free block",
        True,
        "The largest request that the allocator can serve from what it has reserved",
    ),
    Column(
        "Largest that fits",
        True,
        "The largest request of this process that would fit now: in its largest free "
        "block, or in new memory within the card's budget",
    ),
    Column("Retries", True, "How often the allocator had to empty its cache to serve a request"),
    Column("OOMs", True, "How often it could not serve a request"),
)
EMPTY = "No process holds memory on a card yet. Load a model in a notebook: `%gpu load NAME PATH`"


class Cut(NamedTuple):
    """One process's memory on one card; without a map where it does not tell."""

    owner: str
    device: str
    map: AllocatorMap | None
    fits_bytes: int | None

    @property
    def id(self) -> str:
        return f"{self.owner}/{self.device}"


def cuts(maps: Iterable[AllocatorMap], snapshot: Snapshot) -> tuple[Cut, ...]:
    """Everybody who holds memory on a card, the most inactive first, and who does not tell last."""
    cards: Mapping[str, DeviceView] = {
        view.device.id: view for view in snapshot.devices if not view.device.is_host
    }
    told = {(one.owner, one.device): one for one in maps if one.device in cards}
    silent = {
        (section.owner.id, share.device): None
        for section in snapshot.sections.values()
        for lease in section.leases
        for share in lease.shares
        if share.device in cards
    }
    found = [
        Cut(owner, device, one, one.largest_request_bytes(cards[device]) if one else None)
        for (owner, device), one in (silent | told).items()
        if owner in snapshot.sections or owner == snapshot.owner.id
    ]
    return tuple(
        sorted(found, key=lambda cut: (cut.map is None, -_inactive(cut), cut.device, cut.owner))
    )


def _inactive(cut: Cut) -> int:
    return (cut.map.inactive_bytes or 0) if cut.map else 0


def rows(found: Iterable[Cut], snapshot: Snapshot, acts: bool, chosen: str = "") -> tuple[Row, ...]:
    """The table: a row a process and card, with a button to draw it and, for who may act, one to defragment it."""
    return tuple(
        Row(cut.id, _cells(cut, snapshot), _buttons(cut, snapshot, acts, chosen)) for cut in found
    )


def _cells(cut: Cut, snapshot: Snapshot) -> tuple[Cell, ...]:
    section = snapshot.sections.get(cut.owner)
    who = owner_cell(section.owner if section else snapshot.owner, snapshot)
    if cut.map is None:
        return (who, Cell(cut.device), *[UNKNOWN] * (len(COLUMNS) - 2))
    map = cut.map
    part = (
        f"{100 * map.inactive_bytes / map.reserved_bytes:.0f} % of what is reserved"
        if map.inactive_bytes is not None and map.reserved_bytes
        else ""
    )
    return (
        who,
        Cell(cut.device),
        _size(map.allocated_bytes),
        _size(map.reserved_bytes),
        _size(map.inactive_bytes, part),
        _size(map.releasable_bytes),
        _size(map.largest_free_bytes),
        _size(cut.fits_bytes),
        Cell(str(map.alloc_retries), map.alloc_retries),
        Cell(str(map.ooms), map.ooms, kind="alarm" if map.ooms else ""),
    )


def _size(size: int | None, hint: str = "") -> Cell:
    return UNKNOWN if size is None else Cell(show_bytes(size), size, hint)


def _buttons(cut: Cut, snapshot: Snapshot, acts: bool, chosen: str) -> tuple[Button, ...]:
    unknown = "" if cut.map and cut.map.segments else "It does not tell how its memory is cut"
    show = Button("show", "Map", unknown or ("It is drawn below" if cut.id == chosen else ""))
    if not acts or cut.owner not in snapshot.sections:
        return (show,)
    idle = (
        ""
        if cut.map is None or cut.map.releasable_bytes is None or cut.map.releasable_bytes
        else "Nothing would come back: no segment is wholly inactive"
    )
    return (show, Button("defrag", "Defragment", idle))


def report(cut: Cut, snapshot: Snapshot) -> str:
    """What stands above the drawn map, as HTML: whose it is, and what it says."""
    section = snapshot.sections.get(cut.owner)
    who = (section.owner if section else snapshot.owner).label
    title = f'<div class="title">{esc(f"{clean(who)} on {cut.device}")}</div>'
    if cut.map is None:
        return (
            f"{title}<div>It has not told how its memory there is cut up: it has just come, or runs no allocator "
            "that tells.</div>"
        )
    said = " ".join(
        filter(None, (drawing.verdict(cut.map), _compared(cut), drawing.left_out(cut.map)))
    )
    return f"{title}<div>{esc(said)}</div>"


def _compared(cut: Cut) -> str:
    """The largest request that would fit, beside the largest free block, which the verdict tells."""
    fits = "unknown" if cut.fits_bytes is None else show_bytes(cut.fits_bytes)
    return f"The largest request that would fit now: {fits}."


CSS = f""".title{{font-weight:600;font-size:15px;margin-top:10px}} div{{font-size:14px;line-height:1.6}}
.hint{{border-left:4px solid {EDGE};padding:2px 12px;margin:6px 0;opacity:.85}}"""
WHAT_IT_IS = (
    "An allocator takes memory from the card in segments and cuts them into blocks. It gives a segment back only when "
    "no block of it is in use, so one small tensor can hold a large segment. Defragment gives back the segments that "
    "nobody uses; to free the others, evict the models that lie in them and restore them: they come back side by side."
)


class Told:
    """The maps that were told last, and what was made of them: once for all sessions, until they change."""

    def __init__(self, maps: tuple[AllocatorMap, ...] = ()) -> None:
        self.maps = maps
        self._pictures: dict[tuple[str, str], drawing.Picture] = {}
        self._of: Snapshot | None = None  # what the two below were made for
        self._cuts: tuple[Cut, ...] = ()
        self._rows: dict[tuple[bool, str], str] = {}

    def cuts(self, snapshot: Snapshot) -> tuple[Cut, ...]:
        if snapshot is not self._of:
            self._cuts, self._rows, self._of = cuts(self.maps, snapshot), {}, snapshot
        return self._cuts

    def rows(self, snapshot: Snapshot, acts: bool, chosen: str) -> str:
        """The table, as the browser takes it."""
        found, key = self.cuts(snapshot), (acts, chosen)
        if key not in self._rows:
            self._rows[key] = encoded(rows(found, snapshot, acts, chosen))
        return self._rows[key]

    def picture(self, map: AllocatorMap) -> drawing.Picture:
        key = map.owner, map.device
        if key not in self._pictures:
            self._pictures[key] = drawing.picture(map)
        return self._pictures[key]


class Fetch:
    """Fetches the maps; the same object again where none has changed, so that nobody draws anew."""

    def __init__(self) -> None:
        self._last = Told()

    def __call__(self, rt: Any) -> Told:
        maps = rt.allocator_maps()
        if maps != self._last.maps:
            self._last = Told(maps)
        return self._last


class FragmentationTab(Tab):
    """What allocators hold and cannot use; the one that is chosen is drawn, at first the worst."""

    title = "Fragmentation"

    def __init__(self, watch: Any, actions: Any) -> None:
        super().__init__(watch, actions)
        self._chosen = ""  # of a Cut; empty, or gone: the first
        self._drawn: AllocatorMap | None = None
        self.sheet = Sheet(COLUMNS, self._pressed, empty="Looking …")
        self.chart = MapChart()
        self._head, self._legend, self._hint = (
            pn.pane.HTML("", stylesheets=[CSS], margin=(2, 10), sizing_mode="stretch_width")
            for _ in range(3)
        )
        self._hint.object = f'<div class="hint">{esc(WHAT_IT_IS)}</div>'
        self._plot = pn.pane.Bokeh(self.chart.figure, sizing_mode="stretch_width", margin=(0, 6))
        self._below = pn.Column(
            sizing_mode="stretch_width"
        )  # a figure that is only hidden leaves its toolbar there
        self.panel = pn.Column(self.sheet, self._below, sizing_mode="stretch_width")

    def update(self, snapshot: Snapshot) -> None:
        told = self.watch.latest("maps", Fetch(), MAP_SECONDS)
        if told is None:
            return
        found = told.cuts(snapshot)
        chosen = next((cut for cut in found if cut.id == self._chosen), next(iter(found), None))
        self.sheet.empty = EMPTY
        self.sheet.show(told.rows(snapshot, self.actions.may_act, chosen.id if chosen else ""))
        self._draw(told, chosen, snapshot)

    def _draw(self, told: Told, chosen: Cut | None, snapshot: Snapshot) -> None:
        map = chosen.map if chosen else None
        if chosen and self._head.object != (head := report(chosen, snapshot)):
            self._head.object = head
        if map is not None and map != self._drawn:
            self._drawn = map
            self._legend.object = f"<div>{drawing.keys(map)}</div>"
            self.chart.show(told.picture(map))
        drawn = [self._plot, self._legend] if map and map.segments else []
        parts = [self._head, *drawn, self._hint] if chosen else []
        if list(self._below) != parts:
            self._below[:] = parts

    def _pressed(self, verb: str, id: str) -> None:
        """A button of a row; a browser may say anything, so only what is in the book counts."""
        snapshot = self.watch.look.snapshot
        owner = id.partition("/")[0]
        if snapshot is None or owner not in {*snapshot.sections, snapshot.owner.id}:
            return
        if verb == "show":
            self._chosen = id
            self.update(snapshot)
        elif verb == "defrag":
            self.actions.propose("defrag", f"{owner}/")
