"""The rows of the devices, built from plain HTML elements instead of a drawing.

With HTML elements, each part of a row has a name for screen readers, and can be reached with the keyboard. The rows are
encoded once for all sessions; see `data/device_rows.py`. A Bokeh chart for each device needed 25 Bokeh objects per
device, and the page had to send, lay out and keep all of these objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import param
from panel.custom import JSComponent


class Devices(JSComponent):
    """A row for each device. `pressed(verb, id)` is called when a button of a menu is pressed."""

    rows = param.String('{"ticks":[],"rows":[]}', doc="The rows as JSON, `data.device_rows.Rows`.")
    past = param.String(
        "{}", doc="The last minutes of each device as JSON, `data.device_rows.Past`."
    )
    past_title = param.String("", doc="The title of the column with the last minutes.")

    _esm = "devices.js"
    _stylesheets = ["devices.css"]

    def __init__(self, pressed: Callable[[str, str], None] | None = None, **params: Any) -> None:
        super().__init__(sizing_mode="stretch_width", **params)
        self._pressed = pressed

    def show(self, rows: str, past: str = "{}") -> None:
        """Shows the encoded `rows` and `past`, the encoded last minutes. Unchanged text is not sent again."""
        changed = {"rows": rows, "past": past}
        changed = {name: new for name, new in changed.items() if new != getattr(self, name)}
        if changed:
            self.param.update(**changed)

    def _handle_msg(self, data: Any) -> None:
        """Handles a message from the browser, which is untrusted input and can name anything."""
        if self._pressed and isinstance(data, dict):
            verb, id = data.get("verb"), data.get("id")
            if isinstance(verb, str) and isinstance(id, str):
                self._pressed(verb, id)
