"""The console of a fleet: a bar for each host above the tabs, and the tabs of the chosen host.

The page's URL contains the host, and a session never changes its host. So an action can only reach
the host that was on the page when the button of the action was drawn.
"""

from __future__ import annotations

from typing import Any

import panel as pn

from gpu_runtime.rendering import elements
from gpu_runtime.rendering import fleet as rendering
from gpu_runtime.web.auth import Visitor

from . import console, poller
from .fleet_hosts import READ_SECONDS, FleetHosts, HostRuntime, Overview
from .poller import Poller
from .widgets.prose import Prose


class HostChooser:
    """The bars of all hosts. The name of a host is a link to the console of that host."""

    def __init__(self, host: str) -> None:
        """The chooser on the page of `host`."""
        self._host = host
        self.panel = Prose(margin=(12, 0, 0, 0))

    def update(self, poller: Poller, title: str) -> None:
        """Shows the hosts as `poller` has read them. The links to other hosts open the tab `title`."""
        found = poller.latest("hosts", HostRuntime.overview, READ_SECONDS) or Overview()
        key = f"hosts {self._host} {title}"
        self.panel.show(
            poller.once(
                key, found, lambda one: rendering.as_chooser(*one, chosen=self._host, tab=title)
            )
        )


def page_of(fleet: Any) -> Any:
    """A function that makes the page of a visitor. The page shows the hosts of the `fleet`."""
    hosts = FleetHosts(fleet)

    def page(visitor: Visitor) -> Any:
        """The console of the host that the page's URL names, or of the first host."""
        query = console.query_of_page()
        rt = hosts.runtime(query.get("host", ""))
        if rt is None:
            return pn.pane.HTML(elements.esc(rendering.NOTHING))
        return console.page(visitor, poller.of(rt, rt.last_status), HostChooser(rt.host))

    return page
