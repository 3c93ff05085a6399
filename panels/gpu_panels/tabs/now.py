"""The tab Now: a row for each device, with the device's last 15 minutes, and the queue below the rows."""

from __future__ import annotations

from typing import Any

import panel as pn

from gpu_runtime.facts import History, Snapshot
from gpu_runtime.rendering.elements import esc
from gpu_runtime.rendering.views import GOVERNOR_OFF

from ..actions import Actions
from ..data.cells import as_json, encoded
from ..data.devices import device_rows, past_rows
from ..data.queue_rows import QUEUE, queue
from ..poller import Poller
from ..widgets import Devices, Prose, Table
from .base import Tab

# The length of the small history, its points for each device, and the seconds between two reads.
PAST_SECONDS, PAST_POINTS, PAST_EVERY = 900.0, 120, 5.0
NOBODY_WAITS = "No request is waiting."


def shown_rows(snapshot: Snapshot, may_act: bool) -> str:
    """The rows of all devices of `snapshot` as JSON. If `may_act` is true, the rows have buttons."""
    return as_json(device_rows(snapshot, may_act))


def notices_html(snapshot: Snapshot) -> str:
    """HTML with a note if the governor is off in `snapshot`, and hints if there is no GPU or no lease."""
    parts = [] if snapshot.governed else [f'<div class="alarm">{esc(GOVERNOR_OFF)}</div>']
    has_card = any(not view.device.is_host for view in snapshot.devices)
    if not has_card:
        parts.append(
            '<div class="hint">No GPU was found on this machine. To try the console with simulated '
            "devices: <code>GPU_DEVICES=sim:2x24GiB</code></div>"
        )
    has_lease = any(True for _ in snapshot.leases())
    if not has_lease:
        parts.append(
            '<div class="hint">Nothing holds memory yet. In a notebook, type <code>%load_ext gpu</code> and run torch '
            "code, or load a model: <code>%gpu load NAME PATH</code></div>"
        )
    return "".join(parts)


class NowTab(Tab):
    """The use of each device, the memory of each process, and the waiting requests."""

    title = "Now"

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
        self._notices = Prose(margin=(4, 10))
        self.devices = Devices(actions.propose, past_title="Last 15 min", margin=(0, 10))
        self.queue = Table(
            QUEUE, actions.propose, empty=NOBODY_WAITS, filters=False, margin=(8, 10)
        )
        self.panel = pn.Column(self._notices, self.devices, self.queue, sizing_mode="stretch_width")

    def update(self, snapshot: Snapshot) -> None:
        once, may_act = self.poller.once, self.actions.may_act
        self._notices.show(once("notices", snapshot, notices_html))
        rows = once(f"now {may_act}", snapshot, lambda seen: shown_rows(seen, may_act))
        self.devices.show(rows, self._past(snapshot))
        waiting = once(f"queue {may_act}", snapshot, lambda seen: encoded(queue(seen), may_act))
        self.queue.show(waiting)

    def _past(self, snapshot: Snapshot) -> str:
        def fetch(rt: Any) -> History:
            """The last minutes of the runtime `rt`."""
            return rt.history(PAST_SECONDS, points=PAST_POINTS)

        past = self.poller.latest("now: past", fetch, PAST_EVERY)
        if past is None:
            return "{}"
        return self.poller.once(
            "now: past", past, lambda seen: as_json(past_rows(seen, snapshot.wall))
        )
