"""The console's page: a header that says how things stand, and the tabs. The same when served and in a notebook.

One `Console` is one session. It asks nobody anything: it shows what its Watch was told.
"""
from __future__ import annotations

import html
import logging
from typing import Any

import panel as pn
import panel_material_ui as pmui
from gpu.view import clean, clock, worst_level

from gpu_runtime.facts import Snapshot

from . import tabs
from .actions import Actions
from .tab import Tab
from .watch import Look, Watch

log = logging.getLogger("gpu_runtime")

TICK_MILLISECONDS = 250  # how often a session looks whether its Watch knows anything new


class Console:
    """One session's page. `tick` brings it up to date; whoever shows it sees to it that it is called."""

    def __init__(self, watch: Watch, visitor: Any) -> None:
        self.watch, self.visitor = watch, visitor
        self.actions = Actions(watch, visitor)
        self._shown: int | None = None
        self._titles = tabs.titles()
        self._made: dict[str, Tab] = {}
        self._holders = {title: pn.Column(sizing_mode="stretch_width") for title in self._titles}
        self._status = pn.pane.HTML("", sizing_mode="stretch_width")
        self._banner = pmui.Alert(severity="error", visible=False, sizing_mode="stretch_width")
        self._tabs = pmui.Tabs(*self._holders.items(), sizing_mode="stretch_width")
        self._tabs.param.watch(self._turned, "active")
        self.page = pmui.Page(title="GPU console", header=[self._status],
                              main=[self._banner, self.actions.panel, self._tabs])
        self.page.param.watch(self._toggled, "dark_theme")
        watch.join(self)
        watch.first(0.5)
        self.tick()

    def close(self) -> None:
        self.watch.leave(self)

    def tick(self) -> None:
        """Shows what is new since the last time; costs next to nothing where nothing is."""
        look = self.watch.look
        if look.revision == self._shown:
            return
        self._shown = look.revision
        self._show(look)

    def _show(self, look: Look) -> None:
        self._banner.param.update(visible=bool(look.error), object=_trouble(look))
        if look.snapshot is None:
            return
        words = _header(look.snapshot, self.visitor)
        if words != self._status.object:
            self._status.object = words
        self.actions.update(look.snapshot)
        self._update(look.snapshot)

    def _update(self, snapshot: Snapshot) -> None:
        """The tab in front, made when it is first looked at. What fails there is told there."""
        if not self._titles:
            return
        title = self._titles[self._tabs.active]
        try:
            tab = self._made.get(title)
            if tab is None:
                tab = self._made[title] = tabs.kind(title)(self.watch, self.actions)
                tab.dark(self.page.dark_theme)
                tab.update(snapshot)
                self._holders[title].objects = [tab.panel]
            else:
                tab.update(snapshot)
        except Exception as failed:  # one tab that fails takes no other with it
            log.exception("the tab %s failed", title)
            self._made.pop(title, None)
            self._holders[title].objects = [pmui.Alert(f"This tab could not be drawn: {failed}", severity="error")]

    def _turned(self, _: Any) -> None:
        if snapshot := self.watch.look.snapshot:
            self._update(snapshot)

    def _toggled(self, _: Any) -> None:
        for tab in self._made.values():
            tab.dark(self.page.dark_theme)


def page(visitor: Any, watch: Watch) -> pmui.Page:
    """The page for a visitor who was let in, brought up to date as long as this session lives."""
    console = Console(watch, visitor)
    ticking = pn.state.add_periodic_callback(console.tick, TICK_MILLISECONDS)

    def ended(_: Any) -> None:
        ticking.stop()
        console.close()

    pn.state.on_session_destroyed(ended)
    return console.page


def _trouble(look: Look) -> str:
    return f"Since {clock(look.since)} nothing newer is known: {look.error}" if look.error else ""


def _header(snapshot: Snapshot, visitor: Any) -> str:
    level = worst_level(snapshot)
    kind = "simulated" if snapshot.simulated else "real"
    role = "operator" if visitor.may_act else "viewer"
    said = (level, kind, snapshot.ledger, snapshot.owner.host, visitor.name, role, f"as of {clock(snapshot.wall)}")
    return " · ".join(html.escape(clean(one)) for one in said)
