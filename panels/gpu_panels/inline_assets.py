"""What a browser needs to show the console in a notebook, without leaving it in the notebook's file.

Panel puts 6 MB of scripts into the output of a cell and 1.4 MB more for every Material component on the page: 18 MB for
ours. Here what a page says more than once is said once, beside it; and that, with the scripts, is taken out of the
output again when the browser has it. What stays is the page, a hundred times smaller, and a picture for whoever opens
the file. Nor is anything fetched from elsewhere, as Panel does for the style of what changes later.
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

LOAD = "application/vnd.holoviews_load.v0+json"  # what Panel's extension of JupyterLab executes and does not show
LONG = 1000  # letters; what is longer is said beside the page
_DOCUMENT = "docs_json = "
_BEGIN = "(function(root) {"
_PLACE = re.compile(r'<div id="([^"]+)" data-root-id=')
TEXT_TRIES, SIGHT_TRIES = (
    100,
    36_000,
)  # of 0.1 s each: how long the texts are waited for, and a look at the cell


class LocalStyles(dict[str, ImportedStyleSheet]):
    """Panel's cache of a document's style sheets, in which each of its own stands already, with its text.

    Without it every change of an HTML pane in a notebook makes the browser fetch them from Panel's CDN.
    """

    def __bool__(self) -> bool:
        return True

    def __contains__(self, url: object) -> bool:
        return super().__contains__(url) or _local(str(url)) is not None

    def __missing__(self, url: str) -> ImportedStyleSheet:
        file = _local(url)
        if file is None:
            raise KeyError(url)
        named = f"{CDN_DIST}{file.relative_to(PANEL_DIR / 'dist')}"  # Panel has two names for it
        if url != named:
            return self[named]
        text = base64.b64encode(file.read_bytes()).decode()
        sheet = self[url] = ImportedStyleSheet(url=f"data:text/css;base64,{text}")
        return sheet


def _local(url: str) -> Path | None:
    """The file of a style sheet of Panel's; None for anybody else's."""
    path = url.partition("?")[0]
    for root in (CDN_DIST, LOCAL_DIST):
        file = PANEL_DIR / "dist" / path[len(root) :]
        if path.startswith(root) and path.endswith(".css") and file.is_file():
            return file
    return None


class Resources:
    """Outputs of a cell that can be taken back."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._shown: list[str] = []

    def publish(self, work: Callable[[], Any]) -> None:
        """What this work would display, to be taken back later."""
        with capture_output(stdout=False, stderr=False) as captured:
            work()
        for output in captured.outputs:
            self._publish(output.data, output.metadata)

    def publish_texts(self, texts: dict[str, str]) -> None:
        """Texts that a page refers to by their keys."""
        script = f"window.gpuc = Object.assign(window.gpuc || {{}}, {_script(texts)})"
        self._publish({LOAD: script, "application/javascript": script})

    def clear(self) -> None:
        """Takes them out of the cell's output. What was executed stays executed."""
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
    """Panel's HTML of a page with its long texts replaced by references, and these texts by key.

    Until the texts are there, and wherever they never come, `still` is shown in its place. A page that is not made as
    expected comes back as it was.
    """
    at = page.find(_DOCUMENT)
    begin = page.find(_BEGIN)
    if at < 0 or not 0 <= begin < at:
        return page, {}
    start = at + len(_DOCUMENT)
    document, length = json.JSONDecoder().raw_decode(page[start:])
    name = uuid.uuid4().hex
    texts: dict[str, str] = {}
    keys: dict[str, str] = {}

    def lean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: lean(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [lean(inner) for inner in value]
        if isinstance(value, str) and len(value) > LONG:
            key = keys.setdefault(value, f"{name}-{len(keys)}")
            texts[key] = value
            return f"@{key}@"
        return value

    said = _script(lean(document))
    for key in texts:
        said = said.replace(f'"@{key}@"', f'root.gpuc["{key}"]')
    # JupyterLab keeps cells that are out of sight out of the page; shown then, Bokeh would put ours over everything.
    found = _PLACE.search(page)
    place = f'document.getElementById("{found[1]}")' if found else "true"
    gate = (
        f'{_BEGIN}\n  function live(tries) {{\n    var texts = root.gpuc && root.gpuc["{name}"];\n'
        f"    if (!texts || !{place}) {{\n      if (tries < (texts ? {SIGHT_TRIES} : {TEXT_TRIES})) "
        f"setTimeout(function() {{ live(tries + 1) }}, 100);\n      return\n    }}\n"
        f"    document.querySelectorAll(\"[data-gpuc='{name}']\").forEach(function(one) {{ one.remove() }});\n"
        f"    show()\n  }}\n  function show() {{"
    )
    texts[name] = "here"
    head, body, tail = (
        page[:begin],
        page[begin + len(_BEGIN) : at + len(_DOCUMENT)],
        page[start + length :],
    )
    end = tail.rfind("})(")
    picture = f'<div data-gpuc="{name}">{still}</div>'
    return f"{picture}{head}{gate}{body}{said}{tail[:end]}\n  }}\n  live(0)\n{tail[end:]}", texts


def _script(value: Any) -> str:
    """The value as JavaScript that may stand inside a script element."""
    return json.dumps(value, separators=(",", ":")).replace("</", "<\\/").replace("<!--", "<\\!--")
