"""The console inside a notebook: the same live page, with the data of the kernel's own runtime.

A thread keeps the page up to date, also during a long cell, if the cell lets other threads run. Clicks reach the kernel
between cells. nbconvert, GitHub and terminals cannot show a live page, so they show a static status.

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
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import panel as pn
from bokeh.models import ImportedStyleSheet
from IPython.utils.capture import capture_output
from panel.io.model import diff
from panel.io.notebook import block_comm, push, send
from panel.io.resources import CDN_DIST, LOCAL_DIST, PANEL_DIR
from panel.io.state import state

from gpu_runtime import threads
from gpu_runtime.attribution import own_name
from gpu_runtime.errors import NotAllowed
from gpu_runtime.rendering import render

from .console import Console
from .poller import of

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
        # Panel has two URLs for a sheet
        canonical = f"{CDN_DIST}{file.relative_to(PANEL_DIR / 'dist')}"
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


TICK_SECONDS = 0.25
SILENCE = "no update from the kernel (a running cell can block it)"
OPENING_SECONDS = 60.0  # how long a browser may take to connect to a page that was shown


class NotebookUser(NamedTuple):
    """The visitor of a console in a notebook: the kernel's own user, who may act."""

    name: str
    may_act: bool = True


class Inline(pn.Column):
    """The console as a Panel object. In a notebook, the console is live until its output is removed."""

    def __init__(self, rt: Any) -> None:
        """`rt` is the kernel's runtime."""
        # The page has no theme button, because it follows the notebook's theme.
        self._console = Console(
            of(rt),
            NotebookUser(own_name()),
            theme_toggle=False,
            silence=SILENCE,
            announces=True,
        )
        super().__init__(self._console.page, sizing_mode="stretch_width")
        self._rt = rt
        self._page_lock = threading.RLock()  # held for each browser message and each update
        self._driven = False  # whether the updating thread runs
        self._sender = ""  # the view whose message is being handled
        self._ready: set[str] = set()  # views whose browser accepts messages
        self._late: list[tuple[Any, Any]] = []  # (document, event) that were not sent yet
        self._console.status_bar.ready = lambda: self._ready.add(self._sender)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        still = render.shown("status", self._rt.status())._repr_mimebundle_()
        shell = _browser()
        if shell is None:
            return still
        resources = Resources(shell)
        # Panel's object with facts of the browser has a comm of its own, whose messages would bring
        # the memory of a parked notebook back: code of the user's may follow that object.
        with pn.config.param.update(browser_info=False):
            resources.publish(lambda: pn.extension(inline=True))
        self._console.poller.join(self._console)
        with self._page_lock:
            before = set(self._models)
            data, *meta = super()._repr_mimebundle_(include, exclude)
            new = set(self._models) - before
            for ref in new:  # later changes must be sent; earlier ones are in the page already
                _, _, doc, comm = state._views[ref]
                doc.on_change(partial(self._note_unsent, doc, comm))
        page, texts = split(data["text/html"], still["text/html"])
        resources.publish_texts(texts)
        threads.start(lambda: self._settle(resources, new))
        if not self._driven:
            self._driven = True
            threads.start(self._run)
        return {**data, "text/html": page, "text/plain": still["text/plain"]}, *meta

    @property
    def has_objects_of_the_user(self) -> bool:
        """Whether the user's code has added an object, such as a button, whose callback may read a tensor."""
        return any(shown is not self._console.page for shown in self.objects)

    def get_root(self, doc: Any = None, comm: Any = None, preprocess: bool = True) -> Any:
        """The root model of the page. Raises NotAllowed for a served document: this console checks no token."""
        if getattr(doc or state.curdoc, "session_context", None) is not None:
            raise NotAllowed(
                "this console is for the notebook's own user; for others, serve it with a token.\n"
                "  Type, in a terminal:  gpu console",
                verb="console",
            )
        return super().get_root(doc, comm, preprocess)

    def _render_model(self, doc: Any = None, comm: Any = None) -> Any:
        if doc is not None and comm is not None:
            state._stylesheets[doc] = LocalStyles()
        return super()._render_model(doc, comm)

    def _note_unsent(self, doc: Any, comm: Any, event: Any) -> None:
        """Records the change `event` of `doc`, unless it came from the browser of `comm`. `_send` sends it later.

        Without this record the change could be lost: when the next message of the browser arrives, Panel drops unsent
        changes of objects that are not its own.
        """
        if getattr(event, "setter", None) != comm.id:
            self._late.append((doc, event))

    def _on_msg(self, ref: str, manager: Any, msg: Any) -> None:
        with self._page_lock, self._held_back():
            self._sender = ref
            super()._on_msg(ref, manager, msg)
        with self._page_lock:
            self._send()

    def _held_back(self) -> Any:
        """A context manager in which Panel sends nothing by itself if a browser is not ready yet."""
        all_are_ready = self._ready >= set(self._models)
        return nullcontext() if all_are_ready else block_comm()

    def _send(self) -> None:
        """Sends all changes that the browsers do not have yet. Panel sends changes of its own objects only."""
        late, self._late = self._late, []
        for ref in list(self._models):
            _, _, doc, comm = state._views[ref]
            events = [event for changed, event in late if changed is doc]
            if ref not in self._ready:
                self._late += [(doc, event) for event in events]
                continue
            if comm._comm is None:
                comm.init()
            message = diff(doc, events=events)
            if message:
                send(comm, message)
            push(doc, comm)

    def _run(self) -> None:
        """Keeps the shown pages up to date until no page is shown any more."""
        pause = threading.Event()
        while self._models:
            with self._page_lock, self._held_back():
                self._console.tick()
            with self._page_lock:
                self._send()
            pause.wait(TICK_SECONDS)
        self._driven = False

    def _settle(self, resources: Resources, refs: set[str]) -> None:
        """Removes the `resources` from the output once the browsers of the views `refs` have them.

        A browser that does not connect in time is dropped, and shows the static status.
        """
        pause, waited = threading.Event(), 0.0
        while waited < OPENING_SECONDS and self._unready(refs):
            pause.wait(TICK_SECONDS)
            waited += TICK_SECONDS
        resources.clear()
        with self._page_lock:
            for ref in self._unready(refs):
                viewable, root, _, _ = state._views.pop(ref)
                viewable._cleanup(root)

    def _unready(self, refs: set[str]) -> set[str]:
        """Those of the views `refs` that are still shown and whose browser has not connected."""
        return refs & set(self._models) - self._ready

    def _cleanup(self, root: Any = None) -> None:
        super()._cleanup(root)
        self._ready &= set(self._models)
        if not self._models:
            self._console.close()


def _browser() -> Any:
    """The IPython shell, if the cell was run from a browser. None if no live page can be shown.

    In requests from Jupyter's pages, the user name in the header is empty. Programs that run notebooks from Python
    (nbclient, nbconvert, nbval, papermill, qtconsole) send a user name, and cannot show Panel objects.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return None
    header = kernel.get_parent().get("header", {})
    return shell if header.get("username", None) == "" else None
