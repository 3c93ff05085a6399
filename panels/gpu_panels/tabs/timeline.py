"""The tab Timeline: the place of each model, the evictions, and all events, in one range of time."""

from __future__ import annotations

import io
from typing import Any

import panel as pn
import panel_material_ui as pmui

from gpu_runtime.facts import Event, History, Snapshot
from gpu_runtime.rendering.elements import esc
from gpu_runtime.rendering.views import counters

from ..actions import Actions
from ..data import activity
from ..data.cells import as_json
from ..data.timeline import Range, timeline
from ..poller import Poller
from ..widgets import MOST_SECONDS, Prose, Timeline
from .base import BUTTONS, NO_CAPITALS, Tab

WINDOWS = {"15 min": 900.0, "1 h": 3600.0, "2 h": 7200.0, "24 h": 86400.0, "7 days": 604800.0}
CUSTOM = "Custom"  # a range that the visitor has typed, or chosen by dragging
POINTS = 240  # moments of each device in the shown range
MOST_POINTS = 5_000  # the most that are read


class TimelineTab(Tab):
    """The tab with the timeline and the activity."""

    title = "Timeline"

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
        options = [*WINDOWS, CUSTOM]
        self.window = pmui.RadioButtonGroup(options=options, value="15 min", **BUTTONS)
        self.span = pmui.TextInput(visible=False)  # the custom range: two epoch seconds
        self.window.param.watch(lambda _: self.update_again(), "value")
        self.in_address(range=self.window, span=self.span)
        self._counters = Prose(margin=(6, 10, 0, 10))
        self.chart = Timeline(self._ranged, margin=(4, 10))
        self.save = pmui.FileDownload(
            callback=self._file,
            filename="events.csv",
            label="Save as CSV",
            size="small",
            margin=(5, 10),
            **NO_CAPITALS,
        )
        self.save.variant = "outlined"  # as an argument above it warns about `button_style`
        self.panel = pn.Column(
            self._counters,
            pn.FlexBox(self.window, self.save, align_items="center", sizing_mode="stretch_width"),
            self.chart,
            sizing_mode="stretch_width",
        )

    def _ranged(self, start: float, end: float) -> None:
        """Shows the time between the epoch seconds `start` and `end`."""
        self.span.param.update(value=f"{start:.0f}-{end:.0f}", value_input=f"{start:.0f}-{end:.0f}")
        if self.window.value == CUSTOM:
            self.update_again()
        else:
            self.window.value = CUSTOM

    def shown(self, snapshot: Snapshot) -> Range:
        """The range of time that the tab shows; the last 15 minutes if the typed range is not valid."""
        now = snapshot.wall
        seconds = WINDOWS.get(self.window.value)
        if seconds is None:
            start, _, end = (self.span.value or "").partition("-")
            if start.isdecimal() and end.isdecimal() and float(end) - float(start) >= 1:
                if now - MOST_SECONDS <= float(start) < now:
                    return Range(float(start), min(float(end), now))
            seconds = WINDOWS["15 min"]
        return Range(now - seconds, now)

    def update(self, snapshot: Snapshot) -> None:
        self._counters.show(
            f'<div class="soft">{esc(counters(snapshot))} since this machine started</div>'
        )
        past = self._past(snapshot)
        if past is None:
            return
        # All custom ranges share one key. Otherwise the poller would keep every range.
        key = self.window.value
        is_custom = self.window.value == CUSTOM
        drawing = self.poller.once(
            f"timeline {key}",
            past,
            lambda seen: as_json(timeline(seen, snapshot, self.shown(snapshot))),
        )
        found = self.poller.once(
            f"activity {key}",
            past if is_custom else snapshot,
            lambda _: as_json(activity.lines(self._events(past, snapshot), snapshot)),
        )
        self.chart.show(drawing, found)

    def _past(self, snapshot: Snapshot) -> History | None:
        """The record of the shown range, or None while this record is being read."""
        shown = self.shown(snapshot)
        length, back = shown.end - shown.start, snapshot.wall - shown.start
        points = int(min(MOST_POINTS, POINTS * max(1.0, back / length)))
        is_custom = self.window.value == CUSTOM

        def fetch(rt: Any) -> History:
            """The record of the runtime `rt`."""
            seconds = rt.status().wall - shown.start if is_custom else back
            return rt.history(seconds, points=points)

        every = min(30.0, max(5.0, length / 300))
        return self.poller.latest(f"timeline {self.window.value} {self.span.value}", fetch, every)

    def _events(self, past: History | None, snapshot: Snapshot) -> list[Event]:
        """All events of the shown range. The newest event is first."""
        shown = self.shown(snapshot)
        found = activity.merged(past.events if past else (), snapshot.events)
        return [event for event in found if shown.start <= event.wall <= shown.end]

    def _file(self) -> io.BytesIO:
        """Every event of the shown range, as a CSV file."""
        snapshot = self.poller.result.snapshot
        if snapshot is None:
            return io.BytesIO()
        events = self._events(self._past(snapshot), snapshot)
        return io.BytesIO(activity.csv_of(events, snapshot).encode())
