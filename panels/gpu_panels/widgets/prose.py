"""A piece of HTML on the page, in the console's own style.

Panel's HTML pane loses what it is told between being made and being drawn, with an error in the browser; on a busy
machine that was every other page. This one draws what is there when it is drawn.
"""

from __future__ import annotations

from typing import Any

import param
from panel.custom import JSComponent


class Prose(JSComponent):
    """Shows `html`, in which whatever a person or a file named is escaped by whoever made it."""

    html = param.String("")

    _esm = "prose.js"
    _stylesheets = ["prose.css"]

    def __init__(self, html: str = "", **params: Any) -> None:
        super().__init__(html=html, sizing_mode="stretch_width", **params)

    def show(self, html: str) -> None:
        """Shows this; costs nothing where it is shown already."""
        if html != self.html:
            self.html = html
