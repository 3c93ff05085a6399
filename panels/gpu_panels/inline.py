"""The console inside a notebook: the same page, live, over the kernel's own runtime.

A thread keeps it up to date, also while a long cell runs, as far as that cell lets other threads run. What is clicked
reaches the kernel between cells. Where nothing can be live (nbconvert, GitHub, a terminal) there is a picture of the
moment.
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
SILENCE = "nothing heard, as while a cell runs that lets no other thread run,"
OPENING_SECONDS = 60.0  # how long a browser may take to open its side of a page that was shown


class Oneself(NamedTuple):
    """Whoever runs the notebook looks at their own kernel's console, and may do there what they may do in a cell."""

    name: str
    may_act: bool = True


class Inline(pn.Column):
    """The console as a Panel object. Shown in a notebook it is live until its output is removed."""

    def __init__(self, rt: Any) -> None:
        # No toggle: it takes the notebook's theme, and changes with it.
        self._console = Console(
            of(rt), Oneself(getpass.getuser()), theme_toggle=False, silence=SILENCE, announces=True
        )
        super().__init__(self._console.page, sizing_mode="stretch_width")
        self._rt = rt
        self._turn = threading.RLock()  # the browser's messages and our own updates, one at a time
        self._driven = False
        self._heard = ""  # the view whose message is being heard
        self._ready: set[str] = set()  # views whose browser takes messages
        self._late: list[tuple[Any, Any]] = []
        self._console.strip.ready = lambda: self._ready.add(self._heard)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        still = render.shown("status", self._rt.status())._repr_mimebundle_()
        shell = _browser()
        if shell is None:
            return still
        resources = inline_assets.Resources(shell)
        resources.publish(lambda: pn.extension(inline=True))
        self._console.watch.join(self._console)
        with self._turn:
            before = set(self._models)
            data, *meta = super()._repr_mimebundle_(include, exclude)
            new = set(self._models) - before
            for ref in new:  # from here on: what came before is in the page
                _, _, doc, comm = state._views[ref]
                doc.on_change(partial(self._let_go, doc, comm))
        page, said_once = inline_assets.split(data["text/html"], still["text/html"])
        resources.publish_texts(said_once)
        threads.start(lambda: self._settle(resources, new))
        if not self._driven:
            self._driven = True
            threads.start(self._run)
        return {**data, "text/html": page, "text/plain": still["text/plain"]}, *meta

    def get_root(self, doc: Any = None, comm: Any = None, preprocess: bool = True) -> Any:
        if getattr(doc or state.curdoc, "session_context", None) is not None:
            raise NotAllowed(
                "this console is one person's, in their notebook; for others it is served with a token.\n"
                "  Type, in a terminal:  gpu console",
                verb="console",
            )
        return super().get_root(doc, comm, preprocess)

    def _render_model(self, doc: Any = None, comm: Any = None) -> Any:
        if doc is not None and comm is not None:
            state._stylesheets[doc] = inline_assets.LocalStyles()
        return super()._render_model(doc, comm)

    def _let_go(self, doc: Any, comm: Any, event: Any) -> None:
        """A change that the document was to keep for the browser, and lets go unsent: Panel does so with whatever was
        not a Panel object's when the browser's next message comes in."""
        if getattr(event, "setter", None) != comm.id:
            self._late.append((doc, event))

    def _on_msg(self, ref: str, manager: Any, msg: Any) -> None:
        with self._turn, self._held_back():
            self._heard = ref
            super()._on_msg(ref, manager, msg)
        with self._turn:
            self._send()

    def _held_back(self) -> Any:
        """Panel sends nothing by itself as long as any browser would not understand it."""
        return nullcontext() if self._ready >= set(self._models) else block_comm()

    def _send(self) -> None:
        """Tells the browsers all that they do not know yet. (Panel tells them of its own objects, not of Bokeh's.)"""
        late, self._late = self._late, []
        for ref in list(self._models):
            _, _, doc, comm = state._views[ref]
            events = [event for other, event in late if other is doc]
            if ref not in self._ready:
                self._late += [(doc, event) for event in events]
                continue
            if comm._comm is None:
                comm.init()
            if message := diff(doc, events=events):
                send(comm, message)
            push(doc, comm)

    def _run(self) -> None:
        """Keeps what is shown up to date until nothing is shown any more."""
        pause = threading.Event()
        while self._models:
            with self._turn, self._held_back():
                self._console.tick()
            with self._turn:
                self._send()
            pause.wait(TICK_SECONDS)
        self._driven = False

    def _settle(self, resources: inline_assets.Resources, refs: set[str]) -> None:
        """Takes back what the browser has by now. One that never came is forgotten, and its page stays a picture."""
        pause, waited = threading.Event(), 0.0
        while waited < OPENING_SECONDS and refs & set(self._models) - self._ready:
            pause.wait(TICK_SECONDS)
            waited += TICK_SECONDS
        resources.clear()
        with self._turn:
            for ref in refs & set(self._models) - self._ready:
                viewable, root, _, _ = state._views.pop(ref)
                viewable._cleanup(root)

    def _cleanup(self, root: Any = None) -> None:
        super()._cleanup(root)
        self._ready &= set(self._models)
        if not self._models:
            self._console.close()


def _browser() -> Any:
    """The shell of a kernel whose cell was run from a browser; None where nobody there could show anything live.

    Jupyter's pages leave the user's name in the header of their requests empty. Whatever runs notebooks from Python
    (nbclient, nbconvert, nbval, papermill, qtconsole) fills it in, and shows no Panel objects.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return None
    header = kernel.get_parent().get("header", {})
    return shell if header.get("username", None) == "" else None
