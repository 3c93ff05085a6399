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
            super()._on_msg(ref, manager, msg)

    def get_root(self, doc: Any = None, comm: Any = None, preprocess: bool = True) -> Any:
        if getattr(doc or state.curdoc, "session_context", None) is not None:
            raise NotAllowed("this console is one person's, in their notebook; for others it is served with a token.\n"
                             "  Type, in a terminal:  gpu console", verb="console")
        return super().get_root(doc, comm, preprocess)

    def _render_model(self, doc: Any = None, comm: Any = None) -> Any:
        if doc is not None and comm is not None:
            state._stylesheets[doc] = lean.LocalStyles()
        return super()._render_model(doc, comm)

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
