"""The base class of a tab. It defines the methods of a tab, and when these methods are called.

    class QueueTab(Tab):
        title = "Queue"

        def __init__(self, poller, actions):
            super().__init__(poller, actions)
            self.table = ...                       # Panel objects, made once
            self.panel = pn.Column(self.table)

        def update(self, snapshot):
            rows = self.poller.once("queue", snapshot, queue_rows)  # computed once for all sessions
            ...                                    # patch what differs; never rebuild

A session makes a tab when the tab is first opened, and updates only the tab in front. So a tab that is not open costs
nothing. The document's lock is held during each call of a tab, so a tab must not wait. `poller.latest` returns data
that the Snapshot does not have, and never waits. `__init__.py` lists the tabs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from gpu_runtime.facts import Snapshot

from ..actions import Actions
from ..poller import Poller

MOST_TYPED = 200  # characters of a text in the URL


class Tab:
    """One tab in one session. Its buttons call `actions`, which asks for a confirmation. A viewer gets no buttons."""

    title: ClassVar[str]
    panel: Any  # the Panel object that is shown; set by __init__

    def __init__(self, poller: Poller, actions: Actions) -> None:
        self.poller, self.actions = poller, actions
        self._addressed: dict[str, tuple[Any, str, Any]] = {}  # key -> widget, parameter, default
        self.address_changed: Callable[[], None] = lambda: None  # set by the console

    def in_address(self, **widgets: Any) -> None:
        """Keeps the values of the `widgets`, also while a person types, in the page's URL under these names."""
        for key, widget in widgets.items():
            parameter = "value_input" if "value_input" in widget.param else "value"
            self._addressed[key] = widget, parameter, getattr(widget, parameter)
            widget.param.watch(lambda _: self.address_changed(), parameter)

    def address(self) -> dict[str, str]:
        """The part of the URL that opens the present view of the tab. It has the values of the tab's widgets."""
        found = {}
        for key, (widget, parameter, default) in self._addressed.items():
            value = getattr(widget, parameter)
            if default is None:  # the options are not known before the first update
                default = next(iter(widget.options), None)
            if value and value != default:
                found[key] = str(value)
        return found

    def visit(self, address: Mapping[str, str]) -> None:
        """Sets the widgets to the values in `address`. Unknown values are ignored, because `address` is from a URL."""
        for key, (widget, parameter, _) in self._addressed.items():
            value = address.get(key, "")
            options = getattr(widget, "options", None)
            if options is None and value:
                widget.param.update({"value": value[:MOST_TYPED], parameter: value[:MOST_TYPED]})
            elif options is not None and value in options:
                setattr(widget, parameter, value)

    def update(self, snapshot: Snapshot) -> None:
        """Shows `snapshot`. Called when the tab comes to the front, then once a second, and at urgent changes."""

    def update_again(self) -> None:
        """Updates the tab with the last snapshot, for example after a change of a filter."""
        if self.poller.result.snapshot is not None:
            self.update(self.poller.result.snapshot)

    def dark(self, on: bool) -> None:
        """Switches to the dark or the light theme. Called before the first update, and at each change."""


FINGER_PIXELS = {"minWidth": 44, "minHeight": 44}  # pixels, for a finger
_PLAIN = {
    "textTransform": "none",
    "whiteSpace": "nowrap",
    "@media (pointer: coarse)": FINGER_PIXELS,
}
NO_CAPITALS: dict[str, Any] = {"sx": {**_PLAIN, "& button": _PLAIN}}  # shows sim:0, not SIM:0
BUTTONS: dict[str, Any] = {"size": "small", "margin": (5, 10), **NO_CAPITALS}
SELECT: dict[str, Any] = {  # with the height of a text field
    "size": "small",
    "sx": {"& .MuiSelect-select": {"py": "8.5px"}},
}
