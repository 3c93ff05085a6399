"""The page of the console, which has a status bar and tabs. The server and notebooks show the same page.

One `Console` is one session. It does not read the ledger, but shows the last result of its poller.

The browser needs one to two seconds for Panel's scripts. Until then the HTML of the page shows a preview of the first
figures, drawn by the scripts of the console's own widgets. So the preview looks like the page that replaces it. Buttons
of the preview do nothing.
"""

from __future__ import annotations

import functools
import html
import json
import logging
import re
import string
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import panel as pn
import panel_material_ui as pmui
from panel.custom import JSComponent
from panel.io.document import unlocked
from panel.io.resources import LOCAL_DIST
from panel.util import edit_readonly
from panel_material_ui.base import BASE_TEMPLATE

from gpu_runtime import alerts
from gpu_runtime.facts import Snapshot
from gpu_runtime.rendering.views import clock

from . import palette, tabs
from .actions import MARKS, Actions
from .data.cells import encoded
from .data.rows import PROBLEMS, pressed, problem_rows
from .poller import Poller, PollResult
from .tabs import FINGER_PIXELS, Tab
from .widgets import Devices, Prose, StatusBar, Table, status_html

log = logging.getLogger("gpu_runtime")

CONNECTS_SECONDS = 300.0  # for so long Bokeh accepts the token of a page
TICK_MILLISECONDS = 250  # between two checks of a session for a new result of the poller
FIRST_SECONDS = 0.5  # the longest time that a new page waits for the first figures
OLD_FIGURES = {"filter": "grayscale(1) opacity(.55)"}  # of a host that is gone
MARGIN = (0, 20)  # between the page's edge and its contents


FINGER = {"@media (pointer: coarse)": FINGER_PIXELS}
FINGER_IN_FIELD = {
    "@media (pointer: coarse)": {"minHeight": "27px !important"}
}  # 44 with the padding of 17
WHOLE_NAMES = {"whiteSpace": "normal", "overflowWrap": "anywhere"}  # of models, in a list
# On a phone the tabs of the served page are at the bottom, where a thumb reaches them. Inside a notebook they stay
# above their content: the bottom of the window is outside the cell's output.
TABS = {
    "@media (max-width: 700px)": {
        "paddingBottom": "64px",
        "& > .MuiTabs-root": {
            "position": "fixed",
            "inset": "auto 0 0 0",
            "zIndex": 1100,
            "backgroundColor": "background.paper",
            "borderTop": "1px solid rgba(128, 128, 128, .5)",
        },
        "& > .MuiTabs-root .MuiTabs-indicator": {"top": 0, "bottom": "auto"},
    }
}


def _theme(primary: str, bar: str) -> dict[str, Any]:
    app_bar = {
        "backgroundColor": bar,
        "--AppBar-background": bar,
        "backgroundImage": "none",
        "color": "#ffffff",
    }
    return {
        "palette": {"primary": {"main": primary}},
        "typography": {"fontFamily": palette.FONT, "button": {"textTransform": "none"}},
        "components": {
            "MuiAppBar": {"styleOverrides": {"root": app_bar, "colorPrimary": app_bar}},
            # Material draws a progress bar although `busy_indicator` is None, and the bar has no name for screen
            # readers. So the bar is hidden.
            "MuiLinearProgress": {"styleOverrides": {"root": {"display": "none"}}},
            "MuiIconButton": {"styleOverrides": {"root": FINGER}},
            "MuiMenuItem": {"styleOverrides": {"root": WHOLE_NAMES}},
            "MuiOutlinedInput": {"styleOverrides": {"input": FINGER_IN_FIELD}},
        },
    }


# In a notebook, the light theme may be shown on a dark page of JupyterLab. So its colours are legible on light and on
# dark pages. The text of the status bar is white in both themes.
THEME = {"light": _theme(*palette.LIGHT), "dark": _theme(*palette.DARK)}


class Console:
    """The page of one session. The owner of a Console calls `tick` regularly, which updates the page."""

    def __init__(
        self,
        poller: Poller,
        visitor: Any,
        theme_toggle: bool = True,
        address: Mapping[str, str] = {},
        chooser: Any = None,
        **status_bar: Any,
    ) -> None:
        """`visitor` has a name and the attribute `may_act`; `status_bar` is passed on to the StatusBar.

        `address` is the query of the page's URL. It has the tab in front, and the choices in this tab. `chooser` is a
        HostChooser, which shows the hosts of a fleet above the tabs, or None.

        With `theme_toggle` the page has the window for itself: it has a button for the theme, and starts with the
        browser's theme. Without it, the page is inside a notebook.
        """
        self.poller, self.visitor, self._chooser = poller, visitor, chooser
        self.actions = Actions(poller, visitor)
        self._shown: int | None = None  # the revision on the page
        self._titles = tabs.titles(self.actions.member) + ([tabs.SERVING] if poller.serving else [])
        self._made: dict[str, Tab] = {}
        self._address = dict(address)  # for the first tab; empty once that tab was made
        self._holders = {
            title: pn.Column(sizing_mode="stretch_width", margin=(10, 0)) for title in self._titles
        }
        self.status_bar = StatusBar(sizing_mode="stretch_width", chooses=theme_toggle, **status_bar)
        self.status_bar.wanted = self._theme_wanted
        self._banner = _alarm("", visible=False)
        self._problems = Table(
            PROBLEMS,
            lambda button, _: self._pressed(*pressed(button)),
            filters=False,
            visible=False,
            margin=(10, 10, 0, 10),
        )
        first = address.get("tab", "")
        self._tabs = pmui.Tabs(
            *self._holders.items(),
            active=self._titles.index(first) if first in self._titles else 0,
            sizing_mode="stretch_width",
            sx=TABS if theme_toggle else {},
        )
        self._tabs.param.watch(self._tab_changed, "active")
        self.page = self._make_page(theme_toggle)
        poller.join(self)
        self._refresh(poller.first(FIRST_SECONDS))

    def _make_page(self, theme_toggle: bool) -> pmui.Page:
        body = pn.Column(
            *([self._chooser.panel] if self._chooser else []),
            self._banner,
            self._problems,
            self.actions.panel,
            self._tabs,
            sizing_mode="stretch_width",
            margin=MARGIN,
        )
        # The page has no title of its own, which would link to the root of the server. Behind a proxy, that is
        # another application. The title is in the status bar instead.
        page = pmui.Page(
            meta_title="GPU console",
            header=[self.status_bar],
            main=[body],
            theme_config=THEME,
            theme_toggle=theme_toggle,
            busy_indicator=None,
        )
        with edit_readonly(page):
            # By default `busy` is linked to Panel's global state. This link would keep every page alive for
            # ever, and notify every browser of every callback. A link to another parameter replaces this link;
            # a plain value would not.
            page.busy = self.status_bar.param.loading
        page.param.watch(self._theme_changed, "dark_theme")
        return page

    def preview(self) -> str:
        """HTML with the first figures, shown until the page is drawn; empty without figures, and for a fleet."""
        title = self._titles[self._tabs.active]
        tab = self._made.get(title)
        if tab is None or self._chooser:
            return ""
        return preview_html(self.status_bar, self._problems, tab.panel, self._titles, title)

    def close(self) -> None:
        """Ends the session, so that the poller no longer counts it."""
        self.poller.leave(self)

    def tick(self) -> None:
        """Shows the changes since the last call. If nothing has changed, the call costs almost nothing.

        While the browser still draws the page, nothing is changed: a component that is drawn during a change can miss
        the change. The first call after the drawing shows the newest figures.
        """
        result = self.poller.result
        if result.revision != self._shown and pn.state.loaded:
            self._refresh(result)

    def _refresh(self, result: PollResult) -> None:
        self._shown = result.revision
        # All changes are sent in one message, because the cost of a message grows with the size of
        # the whole document.
        with unlocked():
            self._show(result)

    def _show(self, result: PollResult) -> None:
        trouble = ""
        if result.error:
            trouble = f"No new figures since {clock(result.since)}: {result.error}"
        elif result.missing:
            trouble = f"Some data of this page could not be read: {result.missing}"
        if _alert(trouble) != self._banner.object:
            self._banner.param.update(visible=bool(trouble), object=_alert(trouble))
        if self._chooser:  # of a fleet: other hosts may still have new figures
            self._chooser.update(self.poller, self._titles[self._tabs.active])
            self._tabs.styles = OLD_FIGURES if result.error else {}
            self._problems.styles = OLD_FIGURES if result.error else {}
        snapshot = result.snapshot
        if snapshot is None:
            return
        visitor = self.visitor
        words = self.poller.once(
            f"words {visitor.may_act} {visitor.name}",
            snapshot,
            lambda seen: status_html(seen, visitor),
        )
        status = {"as_of": clock(snapshot.wall), "words": words}
        if self._chooser or not result.error:
            status["beat"] = result.revision
        self.status_bar.param.update(**status)
        self.actions.update(snapshot)
        self._show_problems(snapshot)
        self._update(snapshot)

    def _show_problems(self, snapshot: Snapshot) -> None:
        may_act, first_seen = self.actions.may_act, self.poller.first_seen
        rows = self.poller.once(
            f"problems {may_act}",
            snapshot,
            lambda seen: encoded(problem_rows(seen, first_seen, self._told()), may_act),
        )
        if rows != self._problems.rows:
            self._problems.param.update(rows=rows, visible=rows != "[]")

    def _told(self) -> alerts.State | None:
        """The state of alerts, if this page's server tells somebody; None for a member, and for a host of a fleet."""
        settings = getattr(self.poller.rt, "settings", None)  # that of a fleet's host has none here
        if (
            settings is None
            or self.actions.member
            or not alerts.file_of(settings.gpu_alerts).exists()
        ):
            return None
        return alerts.read_state()

    def _pressed(self, verb: str, target: str) -> None:
        """Acts for a pressed button of a problem. To acknowledge or silence one is harmless, and needs no question."""
        if verb in MARKS:
            self.actions.mark(verb, target)
        else:
            self.actions.propose(verb, target)

    def _update(self, snapshot: Snapshot) -> None:
        """Updates the tab in front, which is made when it is first opened. An error is shown in its place."""
        if not self._titles:
            return
        title = self._titles[self._tabs.active]
        holder = self._holders[title]
        try:
            tab = self._made.get(title)
            if tab is None:
                tab = tabs.TABS[title](self.poller, self.actions)
                tab.update(snapshot)
                tab.visit(self._address)
                self._address = {}
                tab.address_changed = self._show_address
                holder.objects = [tab.panel]
                self._made[title] = tab
            else:
                tab.update(snapshot)
        except Exception as failure:  # the other tabs must still work
            log.exception("the tab %s failed", title)
            self._made.pop(title, None)
            text = f"{title} could not be drawn: {type(failure).__name__}: {failure}"
            holder.objects = [_alarm(text)]

    def _tab_changed(self, _: Any) -> None:
        snapshot = self.poller.result.snapshot
        if snapshot is not None:
            self._update(snapshot)
        self._show_address()

    def _show_address(self) -> None:
        """Puts the name of the tab in front, and the choices in this tab, into the page's URL."""
        title = self._titles[self._tabs.active]
        tab = self._made.get(title)
        shown = {"tab": title} if self._tabs.active else {}
        self.status_bar.address = urlencode(shown | (tab.address() if tab else {}))

    def _theme_wanted(self, dark: bool) -> None:
        """Sets the theme that the browser wants, once Panel has loaded the page: an earlier change is not sent."""
        pn.state.onload(lambda: self.page.param.update(dark_theme=dark))

    def _theme_changed(self, _: Any) -> None:
        self.status_bar.dark = self.page.dark_theme


ALARM = """[role=alert] { border-left: 4px solid #d55e00; background: rgba(213, 94, 0, .14); padding: 8px 14px;
  font-size: 14px; white-space: pre-line; overflow-wrap: anywhere; }"""


def _alarm(text: str, **look: Any) -> pn.pane.HTML:
    return pn.pane.HTML(
        _alert(text), stylesheets=[ALARM], sizing_mode="stretch_width", margin=(12, 0, 0, 0), **look
    )


def _alert(text: str) -> str:
    return f'<div role="alert">{html.escape(text)}</div>' if text else ""


def deliver_early_changes(document: Any) -> None:
    """Makes Panel send the changes of `document` even before the browser has drawn the page.

    Panel discards such changes, since it assumes that the document, with the changes in it, is sent later. In fact the
    browser has fetched the document before, and on a slow machine draws it for seconds. The page then showed the old
    value until the next change: 12 of 19 pages showed a wrong figure. Bokeh sends a change only to browsers that are
    connected, and these browsers keep the change until they have the document.
    """
    pn.state._connected[document] = True


def wait_for_browser(document: Any) -> None:
    """Keeps the session of `document` until its browser has connected, or cannot connect any more.

    Bokeh ends a session 15 s after its last browser left, and also if none has connected for 15 s. When 40 pages were
    opened at once on a busy machine, up to 19 sessions ended before their page was loaded, and it stayed empty.
    """
    began = time.monotonic()
    unused_since: list[float] = []  # since when no browser was connected, at the first look

    def look() -> None:
        """Blocks the end of the session at the first call, and allows it later."""
        session = document.session_context.session
        now = time.monotonic()
        since = now - session.milliseconds_since_last_unsubscribe / 1e3
        if not unused_since:
            unused_since.append(since)
            session.block_expiration()
            return
        has_left = since > unused_since[0] + 1.0  # the two clocks differ a little
        if session.connection_count or has_left or now - began > CONNECTS_SECONDS:
            session.unblock_expiration()
            document.remove_periodic_callback(looking)

    looking = document.add_periodic_callback(look, 1000)


# The components of Material are one module of 1.4 MB. Panel's loader would fetch it last, as text, and compile it anew
# for each page. So the browser itself loads it, at once, and keeps its compiled code. All other scripts follow the
# preview, which the browser draws before they arrive.
HEAD = """{% extends "base.html" %}
{% block preamble %}{{ super() }}<link rel="modulepreload" href="BUNDLE">{% endblock %}
{% block js_resources %}{% endblock %}
{% block loader %}{{ preview }}{{ super() }}{% endblock %}
{% block contents %}{{ super() }}{{ bokeh_js }}<script>
  const bundle = new URL("BUNDLE", document.baseURI).href
  self.importShim = new Proxy(self.importShim, {apply: (load, self, [url, ...more]) =>
    new URL(url, document.baseURI).href === bundle ? import(bundle) : load(url, ...more)})
</script>{% endblock %}"""
ICON = Path(__file__).with_name("icon.svg")


@functools.cache
def _template() -> Any:
    """The HTML of a served page. HEAD is part of this HTML."""
    bundle = pmui.Page._render_esm(server=True)
    return BASE_TEMPLATE.environment.from_string(HEAD.replace("BUNDLE", bundle))


def query_of_page() -> dict[str, str]:
    """The query of the URL of the page that is being made."""
    return {
        name: values[0].decode("utf-8", "replace") for name, values in pn.state.session_args.items()
    }


def page(visitor: Any, poller: Poller, chooser: Any = None) -> pmui.Page:
    """The page for the authenticated `visitor`. The `chooser` of a fleet, if given, is above the tabs."""
    # If a browser connects after Bokeh has dropped its session, it gets a new session without a page. Without this
    # line, that session would load Panel's style sheets from its CDN.
    pn.state.curdoc.template_variables.setdefault("dist_url", LOCAL_DIST)
    document = pn.state.curdoc
    deliver_early_changes(document)
    wait_for_browser(document)
    console = Console(poller, visitor, address=query_of_page(), chooser=chooser)
    console.page.param.update(template=_template(), favicon=ICON)
    document.template_variables["preview"] = console.preview()
    # Bokeh's callback is used, because Panel's callback notifies the browser at each start and end.
    ticking = document.add_periodic_callback(console.tick, TICK_MILLISECONDS)

    def ended(_: Any) -> None:
        """Closes the console and removes every reference to the page's session."""
        console.close()
        # The key of this entry is the document, so the entry would keep the whole session alive.
        pn.state._browsers.pop(document, None)
        # If the server has destroyed the document already, its callbacks are gone, and this call
        # raises AttributeError.
        with suppress(AttributeError):
            document.remove_periodic_callback(ticking)

    pn.state.on_session_destroyed(ended)
    return console.page


# -- the preview of a page

WIDGETS = Path(__file__).with_name("widgets")
KINDS: tuple[type[JSComponent], ...] = (StatusBar, Prose, Devices, Table)
_EXPORTED = re.compile(r"^export (?=function (\w+))", re.MULTILINE)


def preview_html(
    status_bar: StatusBar, problems: Table, tab: Any, titles: Sequence[str], front: str
) -> str:
    """The preview of a page as HTML: its status bar, problems and `titles`, and `tab`, the one in `front`."""
    page = {
        "bar": _piece(status_bar, chooses=False, announces=False, silence="Connecting"),
        "problems": [_piece(widget) for widget in _widgets(problems)],
        "tabs": titles,
        "front": front,
        "parts": [_piece(widget) for widget in _widgets(tab)],
    }
    # Within a script, HTML's parser looks for the end tag only, so no `<` may be left in the text.
    text = json.dumps(page).replace("<", "\\u003c")
    return f'<style>{_style()}</style><div id="preview" inert></div><script>{_script()}({text}, widgets)</script>'


def _widgets(part: Any) -> Iterator[JSComponent]:
    """The visible widgets in the layout `part`, in their order. Panel's own widgets are left out."""
    if not part.visible:
        return
    if isinstance(part, KINDS):
        yield part
    for child in getattr(part, "objects", ()):
        yield from _widgets(child)


def _piece(widget: JSComponent, **instead: Any) -> dict[str, Any]:
    """The values of `widget` for the widget's script. The values in `instead` replace the widget's own values."""
    names = set(type(widget).param) - set(JSComponent.param)
    values = {name: getattr(widget, name) for name in names}
    margin = widget.margin if isinstance(widget.margin, tuple) else (widget.margin,)
    return {
        "kind": type(widget).__name__,
        "values": values | instead,
        "margin": " ".join(f"{pixels}px" for pixels in margin),
    }


@functools.cache
def _style() -> str:
    style = string.Template((WIDGETS / "preview.css").read_text())
    (light, light_bar), (dark, dark_bar) = palette.LIGHT, palette.DARK
    return style.substitute(
        font=palette.FONT, light=light, light_bar=light_bar, dark=dark, dark_bar=dark_bar
    )


@functools.cache
def _script() -> str:
    """The scripts of all widgets, as one object, and the function that draws the preview."""
    kinds = []
    for kind in KINDS:
        script = (WIDGETS / str(kind._esm)).read_text()
        style = json.dumps((WIDGETS / kind._stylesheets[0]).read_text())
        names = ", ".join(_EXPORTED.findall(script))
        body = _EXPORTED.sub("", script)
        kinds.append(f"{kind.__name__}: (() => {{ {body} return {{{names}, style: {style}}} }})()")
    draw = (WIDGETS / "first_paint.js").read_text()
    return f"const widgets = {{{', '.join(kinds)}}};\n{draw}"
