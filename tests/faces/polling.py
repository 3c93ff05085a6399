"""A Poller over a runtime that gives fixed answers, polled by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gpu_panels.poller import Poller
from msgspec.structs import replace

from gpu_runtime.facts import History
from gpu_runtime.owner import frames


class FixedRuntime:
    """A runtime that has one snapshot, and whatever else it is given: `FixedRuntime(snapshot, history=lambda …)`."""

    def __init__(self, snapshot: Any, **answers: Any) -> None:
        self.snapshot = snapshot
        self.history = lambda seconds=900, points=600: History((), (), seconds)
        self.decisions = lambda limit=100: ()
        self.catalog = lambda: frames.catalog(())
        self.__dict__.update(answers)

    def status(self) -> Any:
        return replace(self.snapshot)  # another one each time, as a runtime's is

    def reap(self) -> None:
        """Nobody here dies."""


VIEWER = SimpleNamespace(may_act=False, propose=lambda verb, id: None)


def looked_at(kind: Any, snapshot: Any, *, dark: bool = False, **answers: Any) -> Any:
    """The tab, as a session has it that looks at this snapshot; `refresh(tab)` after its runtime's answers changed."""
    tab = kind(Poller(FixedRuntime(snapshot, **answers), start=lambda run: None), VIEWER)
    tab.dark(dark)
    tab.update(snapshot)  # asks for what it needs beside the snapshot
    refresh(tab)
    return tab


def refresh(tab: Any) -> None:
    tab.poller.poll()
    tab.update(tab.poller.result.snapshot)
