"""The console inside a notebook: the same live page, with the data of the kernel's own runtime.

A thread keeps the page up to date, also during a long cell, if the cell lets other threads run. Clicks reach the kernel
between cells. nbconvert, GitHub and terminals cannot show a live page, so they show a static status.
"""

from __future__ import annotations

import getpass
import sys
import threading
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import panel as pn
from panel.io.model import diff
from panel.io.notebook import block_comm, push, send
from panel.io.state import state

from gpu_runtime import threads
from gpu_runtime.errors import NotAllowed
from gpu_runtime.rendering import render

from . import inline_assets
from .console import Console
from .poller import of

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
            NotebookUser(getpass.getuser()),
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
        resources = inline_assets.Resources(shell)
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
        page, texts = inline_assets.split(data["text/html"], still["text/html"])
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
            state._stylesheets[doc] = inline_assets.LocalStyles()
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

    def _settle(self, resources: inline_assets.Resources, refs: set[str]) -> None:
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
