"""The base class of a tab, and when its methods are called.

    class QueueTab(Tab):
        title = "Queue"

        def __init__(self, poller, actions):
            super().__init__(poller, actions)
            self.table = ...                       # Panel objects, made once
            self.panel = pn.Column(self.table)

        def update(self, snapshot):
            rows = self.poller.once("queue", snapshot, queue_rows)  # computed once for all sessions
            ...                                    # patch what differs; never rebuild

A session makes a tab when the tab is first opened, and updates only the tab in front. So a tab that is
not open costs nothing. Each call holds the document's lock. `poller.latest` returns data that is not
in the Snapshot, and never waits. `registry.py` lists the tabs in their order.
"""

from __future__ import annotations

from typing import Any, ClassVar

from gpu_runtime.facts import Snapshot

from ..actions import Actions
from ..poller import Poller


class Tab:
    """One tab in one session.

    Its buttons use `actions`, which requests a confirmation first. A viewer gets no buttons.
    """

    title: ClassVar[str]
    panel: Any  # the Panel object that is shown; set by __init__

    def __init__(self, poller: Poller, actions: Actions) -> None:
        self.poller, self.actions = poller, actions

    def update(self, snapshot: Snapshot) -> None:
        """Shows `snapshot`.

        It is called when the tab comes to the front. While the tab is in front, it is called about
        once a second, and at once after a change.
        """

    def update_again(self) -> None:
        """Updates the tab with the last snapshot, for example after a change of a filter."""
        if self.poller.result.snapshot is not None:
            self.update(self.poller.result.snapshot)

    def dark(self, on: bool) -> None:
        """Switches to the colours of the dark theme, or of the light theme if `on` is False.

        This method is called before the first update, and at each change of the theme.
        """
