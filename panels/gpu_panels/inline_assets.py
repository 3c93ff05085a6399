"""Sends the scripts and long texts of a page to a notebook, but does not leave them in the notebook's file.

Panel puts 6 MB of scripts into the output of a cell and 1.4 MB more for every Material component on the page: 18 MB for
the console. This module sends the scripts and the long texts in separate outputs, each text only once. When the browser
has received them, these outputs are removed from the cell. After this the page in the notebook's file is a hundred
times smaller, and readers of the file see the static status. Style sheets, which Panel would fetch from its CDN for
later changes, are sent inline.
"""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bokeh.models import ImportedStyleSheet
from IPython.utils.capture import capture_output
from panel.io.resources import CDN_DIST, LOCAL_DIST, PANEL_DIR

# Panel's extension of JupyterLab runs a script of this type, and does not show it.
LOAD = "application/vnd.holoviews_load.v0+json"
LONG = 1000  # characters; a longer text is sent in an output of its own
# `split` looks for these places in Panel's HTML: the page's objects, its script, and its element.
_DOCUMENT = "docs_json = "
_BEGIN = "(function(root) {"
_PLACE = re.compile(r'<div id="([^"]+)" data-root-id=')
TEXT_TRIES = 100  # number of waits of 0.1 s each, until the texts have arrived
SIGHT_TRIES = 36_000  # number of waits of 0.1 s each, until the cell is in view


class LocalStyles(dict[str, ImportedStyleSheet]):
    """Panel's cache of a document's style sheets, with the text of each sheet in its URL.

    With Panel's own cache, the browser fetches the sheets from Panel's CDN at every change of an HTML pane.
    """

    def __bool__(self) -> bool:
        return True

    def __contains__(self, url: object) -> bool:
        return super().__contains__(url) or _local(str(url)) is not None

    def __missing__(self, url: str) -> ImportedStyleSheet:
        file = _local(url)
        if file is None:
            raise KeyError(url)
        canonical = (
            f"{CDN_DIST}{file.relative_to(PANEL_DIR / 'dist')}"  # Panel has two URLs for a sheet
        )
        if url != canonical:
            return self[canonical]
        text = base64.b64encode(file.read_bytes()).decode()
        sheet = self[url] = ImportedStyleSheet(url=f"data:text/css;base64,{text}")
        return sheet


def _local(url: str) -> Path | None:
    """The file of the style sheet at `url`, if it is one of Panel's; else None."""
    path = url.partition("?")[0]
    for root in (CDN_DIST, LOCAL_DIST):
        file = PANEL_DIR / "dist" / path[len(root) :]
        if path.startswith(root) and path.endswith(".css") and file.is_file():
            return file
    return None


class Resources:
    """Outputs of a cell that can be removed again."""

    def __init__(self, shell: Any) -> None:
        """`shell` is the IPython shell that displays the outputs."""
        self._shell = shell
        self._shown: list[str] = []

    def publish(self, work: Callable[[], Any]) -> None:
        """Displays everything that `work()` displays, as outputs that can be removed later."""
        with capture_output(stdout=False, stderr=False) as captured:
            work()
        for output in captured.outputs:
            self._publish(output.data, output.metadata)

    def publish_texts(self, texts: dict[str, str]) -> None:
        """Sends the `texts` to the browser. A page refers to each of these texts by its key."""
        script = f"window.gpuc = Object.assign(window.gpuc || {{}}, {_script(texts)})"
        self._publish({LOAD: script, "application/javascript": script})

    def clear(self) -> None:
        """Removes the displayed outputs from the cell. The effects of scripts that ran remain."""
        while self._shown:
            self._publish({"text/plain": ""}, id=self._shown.pop(), update=True)

    def _publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        id: str = "",
        update: bool = False,
    ) -> None:
        id = id or uuid.uuid4().hex
        if not update:
            self._shown.append(id)
        self._shell.display_pub.publish(
            data, metadata or {}, transient={"display_id": id}, update=update
        )


def split(page: str, still: str) -> tuple[str, dict[str, str]]:
    """The HTML `page` of Panel, in which references replace the long texts, and these texts by key.

    The browser shows the HTML `still` until the texts arrive. A `page` of an unknown format is returned unchanged.
    """
    at = page.find(_DOCUMENT)
    begin = page.find(_BEGIN)
    if at < 0 or not 0 <= begin < at:
        return page, {}
    start = at + len(_DOCUMENT)
    document, length = json.JSONDecoder().raw_decode(page[start:])
    name = uuid.uuid4().hex
    short, texts = _without_long_texts(document, name)
    script = _script(short)
    for key in texts:
        script = script.replace(f'"@{key}@"', f'root.gpuc["{key}"]')
    texts[name] = "here"
    gate = _gate(name, _PLACE.search(page))
    head = page[:begin]
    body = page[begin + len(_BEGIN) : start]
    tail = page[start + length :]
    end = tail.rfind("})(")
    picture = f'<div data-gpuc="{name}">{still}</div>'
    live = f"{gate}{body}{script}{tail[:end]}\n  }}\n  live(0)\n{tail[end:]}"
    return f"{picture}{head}{live}", texts


def _without_long_texts(document: Any, name: str) -> tuple[Any, dict[str, str]]:
    """The JSON value `document` with `@KEY@` for each long text, and these texts. All keys begin with `name`."""
    texts: dict[str, str] = {}
    keys: dict[str, str] = {}

    def shortened(value: Any) -> Any:
        """The `value`, in which `@KEY@` replaces each long text."""
        if isinstance(value, dict):
            return {key: shortened(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [shortened(inner) for inner in value]
        if isinstance(value, str) and len(value) > LONG:
            key = keys.setdefault(value, f"{name}-{len(keys)}")
            texts[key] = value
            return f"@{key}@"
        return value

    return shortened(document), texts


def _gate(name: str, place: re.Match[str] | None) -> str:
    """The beginning of the page's script, which waits for the texts of the page `name`, and for the element `place`."""
    # JupyterLab removes cells that are out of view from its page. If our script drew at that time,
    # Bokeh would put our page over everything else.
    is_placed = f'document.getElementById("{place[1]}")' if place else "true"
    return (
        f'{_BEGIN}\n  function live(tries) {{\n    var texts = root.gpuc && root.gpuc["{name}"];\n'
        f"    if (!texts || !{is_placed}) {{\n"
        f"      if (tries < (texts ? {SIGHT_TRIES} : {TEXT_TRIES})) "
        f"setTimeout(function() {{ live(tries + 1) }}, 100);\n      return\n    }}\n"
        f"    document.querySelectorAll(\"[data-gpuc='{name}']\")"
        f".forEach(function(one) {{ one.remove() }});\n"
        f"    show()\n  }}\n  function show() {{"
    )


def _script(value: Any) -> str:
    """The `value` as JavaScript that is safe inside a script element."""
    return json.dumps(value, separators=(",", ":")).replace("</", "<\\/").replace("<!--", "<\\!--")
