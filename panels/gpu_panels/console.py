"""The console's page: a strip that says how things stand, and the tabs. The same when served and in a notebook.

One `Console` is one session. It asks nobody anything: it shows what its Watch was told.
"""

from __future__ import annotations

import html
import logging
from contextlib import suppress
from typing import Any

import panel as pn
import panel_material_ui as pmui
from panel.io.document import unlocked
from panel.io.resources import LOCAL_DIST
from panel.util import edit_readonly

from gpu_runtime.facts import Snapshot
from gpu_runtime.rendering.views import clock

from .actions import Actions
from .poller import Look, Watch
from .tabs import registry
from .tabs.base import Tab
from .widgets import header

log = logging.getLogger("gpu_runtime")

TICK_MILLISECONDS = 250  # how often a session looks whether its Watch knows anything new
FIRST_SECONDS = 0.5  # how long a new page waits for the first figures, at most
MARGIN = (0, 20)  # between the page's edge and what stands on it


def _theme(primary: str, bar: str) -> dict[str, Any]:
    look = {
        "backgroundColor": bar,
        "--AppBar-background": bar,
        "backgroundImage": "none",
        "color": "#ffffff",
    }
    return {
        "palette": {"primary": {"main": primary}},
        "typography": {"button": {"textTransform": "none"}},
        "components": {"MuiAppBar": {"styleOverrides": {"root": look, "colorPrimary": look}}},
    }


# The light one's can be read in the dark too: JupyterLab's dark theme keeps to it. The bar carries white words.
THEME = {"light": _theme("#2a78ab", "#0b5c8a"), "dark": _theme("#7cc0ea", "#0d3a55")}


class Console:
    """One session's page. `tick` brings it up to date; whoever shows it sees to it that it is called."""

    def __init__(self, watch: Watch, visitor: Any, theme_toggle: bool = True, **strip: Any) -> None:
        self.watch, self.visitor = watch, visitor
        self.actions = Actions(watch, visitor)
        self._shown: int | None = None
        self._titles = registry.titles()
        self._made: dict[str, Tab] = {}
        self._holders = {
            title: pn.Column(sizing_mode="stretch_width", margin=(10, 0)) for title in self._titles
        }
        self.strip = header.Strip(sizing_mode="stretch_width", chooses=theme_toggle, **strip)
        self.strip.wanted = self._wanted
        self._banner = _alarm("", visible=False)
        self._tabs = pmui.Tabs(*self._holders.items(), sizing_mode="stretch_width")
        self._tabs.param.watch(self._turned, "active")
        body = pn.Column(
            self._banner, self.actions.panel, self._tabs, sizing_mode="stretch_width", margin=MARGIN
        )
        # The title stands in the strip: the page's own would link to the root of the server, behind a proxy another's.
        self.page = pmui.Page(
            meta_title="GPU console",
            header=[self.strip],
            main=[body],
            theme_config=THEME,
            theme_toggle=theme_toggle,
            busy_indicator=None,
        )
        with edit_readonly(self.page):
            # It follows Panel's own state otherwise, which would keep every page for ever, and tell every browser
            # of every callback. Only another reference takes the place of that one; a value does not.
            self.page.busy = self.strip.param.loading
        self.page.param.watch(self._toggled, "dark_theme")
        watch.join(self)
        watch.first(FIRST_SECONDS)
        self.tick()

    def close(self) -> None:
        """Ends the session: nothing is asked for it any more."""
        self.watch.leave(self)

    def tick(self) -> None:
        """Shows what is new since the last time; costs next to nothing where nothing is."""
        look = self.watch.look
        if look.revision != self._shown:
            self._shown = look.revision
            with (
                unlocked()
            ):  # one message for all of it: each costs what the whole document is large
                self._show(look)

    def _show(self, look: Look) -> None:
        trouble = (
            f"Since {clock(look.since)} nothing newer is known: {look.error}" if look.error else ""
        )
        if _told(trouble) != self._banner.object:
            self._banner.param.update(visible=bool(trouble), object=_told(trouble))
        snapshot = look.snapshot
        if snapshot is None:
            return
        said = {"as_of": clock(snapshot.wall), "words": header.words(snapshot, self.visitor)}
        if not look.error:
            said["beat"] = look.revision
        self.strip.param.update(**said)
        self.actions.update(snapshot)
        self._update(snapshot)

    def _update(self, snapshot: Snapshot) -> None:
        """The tab in front, made when it is first looked at. What fails there is told there."""
        if not self._titles:
            return
        title = self._titles[self._tabs.active]
        holder = self._holders[title]
        try:
            tab = self._made.get(title)
            if tab is None:
                tab = registry.kind(title)(self.watch, self.actions)
                tab.dark(self.page.dark_theme)
                tab.update(snapshot)
                holder.objects = [tab.panel]
                self._made[title] = tab
            else:
                tab.update(snapshot)
        except Exception as failed:  # one tab that fails takes no other with it
            log.exception("the tab %s failed", title)
            self._made.pop(title, None)
            holder.objects = [
                _alarm(f"{title} could not be drawn: {type(failed).__name__}: {failed}")
            ]

    def _turned(self, _: Any) -> None:
        if snapshot := self.watch.look.snapshot:
            self._update(snapshot)

    def _wanted(self, dark: bool) -> None:
        """The browser wants that theme. It hears of no change before Panel has seen the page load."""
        pn.state.onload(lambda: self.page.param.update(dark_theme=dark))

    def _toggled(self, _: Any) -> None:
        self.strip.dark = self.page.dark_theme
        for tab in self._made.values():
            tab.dark(self.page.dark_theme)


ALARM = """[role=alert] { border-left: 4px solid #d55e00; background: rgba(213, 94, 0, .14); padding: 8px 14px;
  font-size: 14px; white-space: pre-line; overflow-wrap: anywhere; }"""


def _alarm(said: str, **look: Any) -> pn.pane.HTML:
    return pn.pane.HTML(
        _told(said), stylesheets=[ALARM], sizing_mode="stretch_width", margin=(12, 0, 0, 0), **look
    )


def _told(said: str) -> str:
    return f'<div role="alert">{html.escape(said)}</div>' if said else ""


def page(visitor: Any, watch: Watch) -> pmui.Page:
    """The page for a visitor who was let in, brought up to date as long as this session lives."""
    # A browser that needs longer than Bokeh keeps a page it has not heard of gets a session without a page, to which
    # Panel would give the style sheets of its CDN.
    pn.state.curdoc.template_variables.setdefault("dist_url", LOCAL_DIST)
    console = Console(watch, visitor)
    document = pn.state.curdoc
    # Bokeh's own callback: Panel's tells the browser that it is busy, and that it is done, each time.
    ticking = document.add_periodic_callback(console.tick, TICK_MILLISECONDS)

    def ended(_: Any) -> None:
        console.close()
        # What Panel knows of the browser holds the document by which it is kept, and so all that the session ever had.
        pn.state._browsers.pop(document, None)
        with suppress(
            AttributeError
        ):  # a server that has taken the document apart already has nobody to tell of it
            document.remove_periodic_callback(ticking)

    pn.state.on_session_destroyed(ended)
    return console.page
