"""Our own browser components, each with a JavaScript and a CSS file. The tabs decide what they display.

A page in a notebook contains the definitions of the components that exist when it is shown. Its browser cannot show a
component that is defined later. So all components are in this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import param
from panel.custom import JSComponent

from gpu_runtime.facts import Snapshot
from gpu_runtime.rendering.html import esc
from gpu_runtime.rendering.views import device_title

from ..data.cells import Column, ledger_title, without_password
from ..data.confirmations import MEANS
from ..data.rows import NO_PROBLEMS, summary
from ..data.timeline import KINDS

MOST_SECONDS = 366 * 86400.0  # the longest range that a browser may ask for
Pressed = Callable[[str, str], None]  # is called with the verb of a button, and the id of its row


class _Wide:
    """A component as wide as the page."""

    def __init__(self, **params: Any) -> None:
        super().__init__(**{"sizing_mode": "stretch_width"} | params)

    def send(self, **values: str) -> None:
        """Shows these `values`. A value that the page shows already is not sent again."""
        changed = {name: new for name, new in values.items() if new != getattr(self, name)}
        if changed:
            self.param.update(**changed)  # type: ignore[attr-defined]


class _WithButtons(_Wide):
    """A component whose buttons call `pressed`."""

    def __init__(self, pressed: Pressed | None = None, **params: Any) -> None:
        super().__init__(**params)
        self._pressed = pressed

    def _handle_msg(self, data: Any) -> None:
        """Handles a message from the browser, which is untrusted input and can name anything."""
        if self._pressed and isinstance(data, dict):
            verb, id = data.get("verb"), data.get("id")
            if isinstance(verb, str) and isinstance(id, str):
                self._pressed(verb, id)


class Prose(_Wide, JSComponent):
    """Shows `html`, in which the caller has escaped every name from a person or a file.

    Panel's HTML pane loses a text that is set after the pane was made and before the browser has drawn the pane. On a
    busy machine this happened on every second page.
    """

    html = param.String("", doc="What is shown.")

    _esm = "prose.js"
    _stylesheets = ["prose.css"]

    def __init__(self, html: str = "", **params: Any) -> None:
        super().__init__(html=html, **params)

    def show(self, html: str) -> None:
        self.send(html=html)


class Table(_WithButtons, JSComponent):
    """A table that the browser sorts and filters.

    The rows are encoded once for all sessions, and the browser updates the cells that differ. A button sends the id of
    its row instead of a position, so a click never acts on another row that has just moved there. Panel's Tabulator
    took 13 ms of the server's CPU for one change in one session; this table takes 0.2 ms.
    """

    columns = param.List(doc="[title, numeric, hint] of each column.")
    rows = param.String("[]", doc="The rows as JSON, from `data.cells.encoded`.")
    empty = param.String("", doc="Shown if there are no rows; text in `backticks` is code to type.")
    key = param.String("", doc="Under this name the words of the filter are in the page's URL.")
    filters = param.Boolean(True, doc="Whether there is a filter field.")
    means = param.Dict(MEANS, doc="What the tooltips of buttons say, by verb.")
    detail = param.String("", doc="What is below one row as JSON, from `data.rows.variables`.")

    _esm = "table.js"
    _stylesheets = ["table.css"]

    def __init__(
        self, columns: Iterable[Column], pressed: Pressed | None = None, **params: Any
    ) -> None:
        encoded_columns = [list(column) for column in columns]
        super().__init__(pressed, columns=encoded_columns, **{"margin": (0, 10)} | params)

    def show(self, rows: str) -> None:
        self.send(rows=rows)


class Devices(_WithButtons, JSComponent):
    """A row for each device, of HTML elements: each part has a name for screen readers, and the keyboard reaches it.

    A Bokeh chart for each device needed 25 Bokeh objects, all of which the page had to send, lay out and keep.
    """

    rows = param.String('{"ticks":[],"rows":[]}', doc="The rows as JSON, `data.devices.Rows`.")
    past = param.String("{}", doc="The last minutes of each device as JSON, `data.devices.Past`.")
    means = param.Dict(MEANS, doc="What the tooltips of buttons say, by verb.")
    past_title = param.String("", doc="The title of the column with the last minutes.")

    _esm = "devices.js"
    _stylesheets = ["devices.css"]

    def show(self, rows: str, past: str = "{}") -> None:
        self.send(rows=rows, past=past)


class Timeline(_Wide, JSComponent):
    """A row for each model, and a line for each event, in one range of time. The browser filters the lines.

    `ranged(start, end)` is called with epoch seconds when a person has chosen a range in the drawing.
    """

    drawing = param.String("{}", doc="`data.timeline.Drawing` as JSON.")
    lines = param.String("[]", doc="`data.activity.Line`s as JSON.")
    kinds = param.List(list(KINDS), doc="The kinds of lines that can be chosen.")

    _esm = "timeline.js"
    _stylesheets = ["timeline.css"]

    def __init__(self, ranged: Callable[[float, float], None], **params: Any) -> None:
        super().__init__(**params)
        self._ranged = ranged

    def show(self, drawing: str, lines: str) -> None:
        self.send(drawing=drawing, lines=lines)

    def _handle_msg(self, data: Any) -> None:
        """Handles a message from the browser, which is untrusted input and can be anything."""
        if not isinstance(data, dict):
            return
        start, end = data.get("start"), data.get("end")
        if isinstance(start, (int, float)) and isinstance(end, (int, float)):
            if 1 <= end - start <= MOST_SECONDS:
                self._ranged(float(start), float(end))


class ConfirmationForm(_Wide, JSComponent):
    """A text and two buttons. A press calls `answered` with `confirm` or `cancel`, and the number of the question."""

    lines = param.List([], doc="The text, one paragraph each.")
    confirm = param.String("", doc="Label of the button that confirms.")
    grave = param.Boolean(False, doc="Whether the action takes memory from a process.")
    question = param.Integer(0, doc="The number of the question.")

    _esm = "confirmation.js"
    _stylesheets = ["confirmation.css"]

    def __init__(self, answered: Callable[[str, int], None], **params: Any) -> None:
        super().__init__(**params)
        self._answered = answered

    def _handle_msg(self, data: Any) -> None:
        """Handles a message from the browser, which is untrusted input and can be anything."""
        if isinstance(data, dict) and data.get("answer") in ("confirm", "cancel"):
            self._answered(data["answer"], data.get("question", 0))


# -- the status bar above the tabs. The browser computes the age of the figures by its own clock.


class StatusBar(JSComponent):
    """The line at the top of the page."""

    words = param.String("", doc="HTML; the code that made it has escaped all names.")
    as_of = param.String("", doc="Time of the figures, as a person reads it.")
    beat = param.Integer(0, doc="A new number with each update from the server.")
    silence = param.String("no update from the server", doc="Shown when updates stop.")
    announces = param.Boolean(
        False, doc="Whether the browser reports that its page is ready, which calls `ready`."
    )
    chooses = param.Boolean(
        False, doc="Whether the browser reports the theme it wants, which calls `wanted`."
    )
    address = param.String("", doc="The query of the URL that leads to what the page shows.")
    dark = param.Boolean(False, doc="Whether the page is dark, for the browser to remember.")

    _esm = "header.js"
    _stylesheets = ["header.css"]

    ready: Callable[[], None] | None = None
    wanted: Callable[[bool], None] | None = None  # is called with True for a dark theme

    def _handle_msg(self, data: Any) -> None:
        if data == "ready" and self.ready:
            self.ready()
        elif data in ("dark", "light") and self.wanted:
            self.wanted(data == "dark")


LEDGER = "A ledger is the list in which notebooks agree who holds how much of a card."


def status_html(snapshot: Snapshot, visitor: Any) -> str:
    """HTML with the number of problems, the devices, the host and the ledger of `snapshot`, and the `visitor`."""
    problems = summary(snapshot)
    host = snapshot.host or snapshot.owner.host or "this host"
    simulated = snapshot.simulated
    return "".join(
        (
            '<h1 class="title">GPU console</h1>',
            f'<span class="problems{"" if problems.startswith(NO_PROBLEMS) else " some"}">{esc(problems)}</span>',
            _span(
                device_title(snapshot),
                "badge" if simulated else "",
                "These devices are simulated: no GPU is used" if simulated else "",
            ),
            _span(
                f"{host} · {ledger_title(snapshot.ledger)}",
                hint=f"Host {host}, ledger {without_password(snapshot.ledger)}. {LEDGER}",
            ),
            _span(_visitor_words(visitor, snapshot), "who"),
        )
    )


def _visitor_words(visitor: Any, snapshot: Snapshot) -> str:
    """The name and the role of the `visitor`. Of a shared ledger only its operators are called operators."""
    role = "viewer, read only"
    if visitor.may_act:
        role = "operator" if snapshot.operates and not snapshot.member else "member"
    is_named_like_role = visitor.name == role.partition(",")[0]
    return role if is_named_like_role else f"{visitor.name} · {role}"


def _span(text: str, kind: str = "", hint: str = "") -> str:
    return f'<span class="{kind}" title="{esc(hint or text)}">{esc(text)}</span>'
