"""What a tab of the console is: how it is made, kept up to date, and paid for.

    class Queue(Tab):
        title = "Queue"

        def __init__(self, watch, actions):
            super().__init__(watch, actions)
            self.table = ...                       # Panel objects, made once
            self.panel = pn.Column(self.table)

        def update(self, snapshot):
            rows = self.watch.once("queue", snapshot, queue_rows)  # reckoned once for all sessions that look at it
            ...                                    # patch what differs from what is shown; never rebuild

A session makes a tab when it is first looked at, so one that nobody opens costs nothing; and only the tab in front is
updated. All calls come under the document's lock, one at a time. What a tab needs beside the Snapshot it asks of the
Watch, with `latest`: that never waits. Which tabs there are, and in which order: `tabs.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from gpu_runtime.facts import Snapshot

if TYPE_CHECKING:
    from ..actions import Actions
    from ..poller import Watch


class Tab:
    """One tab in one session. Its buttons go through `actions`, which asks first; a viewer gets none of them."""

    title: ClassVar[str]
    panel: Any  # the Panel object that is shown, set by __init__

    def __init__(self, watch: Watch, actions: Actions) -> None:
        self.watch, self.actions = watch, actions

    def update(self, snapshot: Snapshot) -> None:
        """Shows what is new; called when the tab comes to the front, and then as long as it stays there, about once a
        second and at once when something has happened."""

    def dark(self, on: bool) -> None:
        """Takes the colours of the dark or the light theme; called before the first update, and when it is toggled."""
