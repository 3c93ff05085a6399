"""The tab Fragmentation: a table of the processes' allocators, and the map of one of these allocators."""

from __future__ import annotations

from typing import Any

import panel as pn

from gpu_runtime.facts import Snapshot
from gpu_runtime.rendering.elements import esc

from ..actions import Actions
from ..data.fragmentation import COLUMNS, EMPTY, FetchedMaps, ProcessMemory, report
from ..palette import EDGE
from ..poller import Poller
from ..widgets import Table
from .base import Tab

MAP_SECONDS = 0.5  # between two checks for new maps; unchanged maps are not read again
CSS = f""".title{{font-weight:600;font-size:15px;margin-top:10px}} div{{font-size:14px;line-height:1.6}}
.hint{{border-left:4px solid {EDGE};padding:2px 12px;margin:6px 0;opacity:.85}}"""
HINT = (
    "An allocator takes memory from the card in segments and cuts them into blocks. It returns a "
    "segment only when no block in it is in use, so one small tensor can keep a large segment. "
    "Compact returns the segments without a block in use. To free the others, evict the models "
    "in them and restore them: they are then placed side by side."
)


class MapFetcher:
    """Fetches the maps of all allocators. As long as no map changes, it returns the same object."""

    def __init__(self) -> None:
        self._last = FetchedMaps()

    def __call__(self, rt: Any) -> FetchedMaps:
        maps = rt.allocator_maps()
        if maps != self._last.maps:
            self._last = FetchedMaps(maps)
        return self._last


class FragmentationTab(Tab):
    """The memory that allocators hold and cannot use, and the chosen map; at first the one with the most of it."""

    title = "Fragmentation"

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
        self._chosen = ""  # id of a row; if it is empty or unknown, the first row's map is drawn
        self.table = Table(COLUMNS, self._pressed, empty="Reading …", key="fragmentation")
        self._head, self._map, self._hint = _text(), _text(), _text()
        self._hint.object = f'<div class="hint">{esc(HINT)}</div>'
        self._below = pn.Column(sizing_mode="stretch_width")
        self.panel = pn.Column(self.table, self._below, sizing_mode="stretch_width")

    def update(self, snapshot: Snapshot) -> None:
        fetched = self.poller.latest("maps", MapFetcher(), MAP_SECONDS)
        if fetched is None:
            return
        chosen = self._chosen_of(fetched.memories(snapshot))
        self.table.empty = EMPTY
        rows = fetched.rows(snapshot, self.actions.may_act, chosen.id if chosen else "")
        self.table.show(rows)
        self._draw(fetched, chosen, snapshot)

    def _chosen_of(self, memories: tuple[ProcessMemory, ...]) -> ProcessMemory | None:
        for memory in memories:
            if memory.id == self._chosen:
                return memory
        return memories[0] if memories else None

    def _draw(self, fetched: FetchedMaps, chosen: ProcessMemory | None, snapshot: Snapshot) -> None:
        drawing = fetched.drawing(chosen.map) if chosen and chosen.map else ""
        if chosen is not None:
            self._head.object = report(chosen, snapshot)
            self._map.object = drawing
        drawn = [self._map] if drawing else []
        parts = [self._head, *drawn, self._hint] if chosen else []
        if list(self._below) != parts:
            self._below[:] = parts

    def _pressed(self, verb: str, id: str) -> None:
        """Handles a press in the row `id`, which the browser sends and which is checked here."""
        snapshot = self.poller.result.snapshot
        if snapshot is None:
            return
        owner = id.partition("/")[0]
        if owner not in {*snapshot.sections, snapshot.owner.id}:
            return
        if verb == "show":
            self._chosen = id
            self.update(snapshot)
        elif verb == "defrag":
            self.actions.propose("defrag", f"{owner}/")


def _text() -> pn.pane.HTML:
    return pn.pane.HTML("", stylesheets=[CSS], margin=(2, 10), sizing_mode="stretch_width")
