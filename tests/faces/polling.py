"""A poller over a runtime that returns fixed answers. The test calls its polls itself."""

from types import SimpleNamespace
from typing import Any

from gpu_panels.poller import Poller
from msgspec.structs import replace

from gpu_runtime.facts import History
from gpu_runtime.owner import status


class FixedRuntime:
    """A runtime with one snapshot. Its other answers are given as keywords: `FixedRuntime(snapshot, history=...)`."""

    def __init__(self, snapshot: Any, **answers: Any) -> None:
        self.snapshot = snapshot
        self.history = lambda seconds=900, points=600: History((), (), seconds)
        self.decisions = lambda limit=100: ()
        self.allocator_maps = lambda: ()
        self.catalog = lambda: status.catalog(())
        self.__dict__.update(answers)

    def status(self) -> Any:
        return replace(self.snapshot)  # a new object each time, as from a runtime

    def reap(self) -> None:
        """Does nothing: no process of this runtime can die."""


VIEWER = SimpleNamespace(may_act=False, propose=lambda verb, id: None)
OPERATOR = SimpleNamespace(may_act=True, propose=lambda verb, id: None)


def opened(kind: Any, snapshot: Any, **answers: Any) -> Any:
    """A tab of the class `kind` after one poll. The answers of the runtime are `answers`."""
    tab = kind(Poller(FixedRuntime(snapshot, **answers), start=lambda run: None), VIEWER)
    tab.update(snapshot)  # requests other data that it needs
    refresh(tab)
    return tab


def refresh(tab: Any) -> None:
    """Polls once and updates the tab."""
    tab.poller.poll()
    tab.update(tab.poller.result.snapshot)
