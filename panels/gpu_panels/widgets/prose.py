"""A piece of HTML on the page, in the console's own style.

Panel's HTML pane loses what it is given between being made and being drawn, with an error in the
browser; on a busy machine this was every other page. This component draws the text that it has when
it is drawn.
"""

from __future__ import annotations

from typing import Any

import param
from panel.custom import JSComponent


class Prose(JSComponent):
    """Shows `html`. The caller escapes every name in it that comes from a person or a file."""

    html = param.String("", doc="What is shown.")

    _esm = "prose.js"
    _stylesheets = ["prose.css"]

    def __init__(self, html: str = "", **params: Any) -> None:
        super().__init__(html=html, sizing_mode="stretch_width", **params)

    def show(self, html: str) -> None:
        """Shows `html`; costs nothing where it is shown already."""
        if html != self.html:
            self.html = html
