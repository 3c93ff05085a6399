"""The timeline and the activity below it, as HTML elements of the page. The browser filters the lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import param
from panel.custom import JSComponent

from ..data.activity import KINDS

MOST_SECONDS = 366 * 86400.0  # the longest range that a browser may ask for


class Timeline(JSComponent):
    """A row for each model, and a line for each event, in one range of time.

    `ranged(start, end)` is called with epoch seconds when a person has chosen a range in the drawing.
    """

    drawing = param.String("{}", doc="`data.timeline.Drawing` as JSON.")
    lines = param.String("[]", doc="`data.activity.Line`s as JSON.")
    kinds = param.List(list(KINDS), doc="The kinds of lines that can be chosen.")

    _esm = "timeline.js"
    _stylesheets = ["timeline.css"]

    def __init__(self, ranged: Callable[[float, float], None], **params: Any) -> None:
        super().__init__(sizing_mode="stretch_width", **params)
        self._ranged = ranged

    def show(self, drawing: str, lines: str) -> None:
        """Shows the encoded `drawing` and `lines`. Unchanged text is not sent again."""
        changed = {"drawing": drawing, "lines": lines}
        changed = {name: new for name, new in changed.items() if new != getattr(self, name)}
        if changed:
            self.param.update(**changed)

    def _handle_msg(self, data: Any) -> None:
        """Handles a message from the browser, which is untrusted input and can be anything."""
        if not isinstance(data, dict):
            return
        start, end = data.get("start"), data.get("end")
        if isinstance(start, (int, float)) and isinstance(end, (int, float)):
            if 1 <= end - start <= MOST_SECONDS:
                self._ranged(float(start), float(end))
