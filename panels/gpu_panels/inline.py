"""The console inside a notebook: the same page, live, over the kernel's own runtime.

A thread keeps it up to date, also while a long cell runs, as far as that cell lets other threads run. What is clicked
reaches the kernel between cells. Where nothing can be live (nbconvert, GitHub, a terminal) there is a picture of the
moment.
"""
from __future__ import annotations

import getpass
import sys
import threading
from typing import Any, NamedTuple

import panel as pn
from gpu import render
from panel.io.model import diff
from panel.io.notebook import push, send
from panel.io.state import state

from gpu_runtime import threads
from gpu_runtime.errors import NotAllowed

from . import lean
from .console import Console
from .watch import of

TICK_SECONDS = 0.25
SILENCE = "nothing heard, as while a cell runs that lets no other thread run,"
OPENING_SECONDS = 30.0  # how long a browser may take to open its side of a page that was shown


class Oneself(NamedTuple):
    """Whoever runs the notebook looks at their own kernel's console, and may do there what they may do in a cell."""

    name: str
    may_act: bool = True


class Inline(pn.Column):
    """The console as a Panel object. Shown in a notebook it is live until its output is removed."""

    def __init__(self, rt: Any) -> None:
        self._console = Console(of(rt), Oneself(getpass.getuser()), silence=SILENCE)
        super().__init__(self._console.page, sizing_mode="stretch_width")
        self._rt = rt
        self._turn = threading.RLock()  # the browser's messages and our own updates, one at a time
        self._driven = False
        self._late: list[tuple[Any, Any]] = []

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        still = render.shown("status", self._rt.status())._repr_mimebundle_()
        shell = _browser()
        if shell is None:
            return still
        resources = lean.Resources(shell)
        resources.publish(lambda: pn.extension(inline=True))
        self._console.watch.join(self._console)
        data, *meta = super()._repr_mimebundle_(include, exclude)
        page, said_once = lean.split(data["text/html"], still["text/html"])
        resources.publish_texts(said_once)
        self._drive(resources)
        return {**data, "text/html": page, "text/plain": still["text/plain"]}, *meta

    def _on_msg(self, ref: str, manager: Any, msg: Any) -> None:
        with self._turn:
            if not _open(ref):  # Panel would send the answer later than what comes after it
                state._views[ref][3].init()
            super()._on_msg(ref, manager, msg)
            self._send()

    def get_root(self, doc: Any = None, comm: Any = None, preprocess: bool = True) -> Any:
        if getattr(doc or state.curdoc, "session_context", None) is not None:
            raise NotAllowed("this console is one person's, in their notebook; for others it is served with a token.\n"
                             "  Type, in a terminal:  gpu console", verb="console")
        return super().get_root(doc, comm, preprocess)

    def _render_model(self, doc: Any = None, comm: Any = None) -> Any:
        if doc is None or comm is None:
            return super()._render_model(doc, comm)
        state._stylesheets[doc] = lean.LocalStyles()
        model = super()._render_model(doc, comm)
        doc.on_change(lambda event: self._let_go(doc, comm, event))
        return model

    def _let_go(self, doc: Any, comm: Any, event: Any) -> None:
        """A change that the document was to keep for the browser, and lets go unsent: Panel does so with whatever was
        not a Panel object's when the browser's next message comes in."""
        if getattr(event, "setter", None) != comm.id:
            self._late.append((doc, event))

    def _send(self) -> None:
        """Tells the browser all that it does not know yet. (Panel tells it of its own objects, not of Bokeh's.)"""
        late, self._late = self._late, []
        for ref in list(self._models):
            if _open(ref):
                _, _, doc, comm = state._views[ref]
                if message := diff(doc, events=[event for other, event in late if other is doc]):
                    send(comm, message)
                push(doc, comm)

    def _cleanup(self, root: Any = None) -> None:
        super()._cleanup(root)
        if not self._models:
            self._console.close()

    def _drive(self, resources: lean.Resources) -> None:
        threads.start(lambda: self._take_back(resources, set(self._models)))
        if not self._driven:
            self._driven = True
            threads.start(self._run)

    def _run(self) -> None:
        """Keeps what is shown up to date until nothing is shown any more."""
        pause = threading.Event()
        while self._models:
            with self._turn:
                if any(_open(ref) for ref in self._models):
                    self._console.tick()
                    self._send()
            pause.wait(TICK_SECONDS)
        self._driven = False

    def _take_back(self, resources: lean.Resources, refs: set[str]) -> None:
        """Once the browser has what it needs, the notebook's file need not keep it."""
        pause, waited = threading.Event(), 0.0
        while waited < OPENING_SECONDS and not all(_open(ref) for ref in refs & set(self._models)):
            pause.wait(TICK_SECONDS)
            waited += TICK_SECONDS
        resources.clear()


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


def _open(ref: str) -> bool:
    """Whether a browser has opened its side of this view."""
    view = state._views.get(ref)
    return view is not None and getattr(view[3], "_comm", None) is not None
