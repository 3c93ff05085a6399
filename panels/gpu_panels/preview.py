"""Puts the first figures into the HTML of the page. They are shown until the browser has started Panel.

The browser needs one to two seconds for Panel's scripts. The preview is drawn before these scripts run, by the scripts
of the console's own widgets. So the preview looks like the page that replaces it. Buttons of the preview do nothing.
"""

from __future__ import annotations

import functools
import json
import re
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from panel.custom import JSComponent

from . import palette
from .widgets import Devices, Prose, StatusBar, Table

WIDGETS = Path(__file__).with_name("widgets")
KINDS: tuple[type[JSComponent], ...] = (StatusBar, Prose, Devices, Table)
_EXPORTED = re.compile(r"^export (?=function (\w+))", re.MULTILINE)


def html(
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
    draw = (WIDGETS / "preview.js").read_text()
    return f"const widgets = {{{', '.join(kinds)}}};\n{draw}"
