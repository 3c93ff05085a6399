"""A piece of HTML on the page, in the console's own style.

Panel's HTML pane loses a text that is set after the pane was made and before the browser has drawn
the pane. The browser then reports an error. On a busy machine this happened on every second page.
This component always draws its latest text.
"""

from __future__ import annotations

from typing import Any

import param
from panel.custom import JSComponent


class Prose(JSComponent):
    """Shows `html`. The caller must escape every name in `html` that is from a person or a file."""

    html = param.String("", doc="What is shown.")

    _esm = "prose.js"
    _stylesheets = ["prose.css"]

    def __init__(self, html: str = "", **params: Any) -> None:
        super().__init__(html=html, sizing_mode="stretch_width", **params)

    def show(self, html: str) -> None:
        """Shows `html`. The call costs nothing if the page shows the same text already."""
        if html != self.html:
            self.html = html
