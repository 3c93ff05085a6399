"""The tabs of the console, in their order. Each tab connects the poller's data to widgets.

`data` computes the contents of a tab. The module of a tab is imported when the tab is first opened.
"""

from __future__ import annotations

from importlib import import_module

from gpu_runtime.threads import import_whole

from .base import Tab

TABS = {  # title -> module:class
    "Now": "now:NowTab",
    "Models": "tables:ModelsTab",
    "Leases": "tables:LeasesTab",
    "Timeline": "timeline:TimelineTab",
    "Fragmentation": "fragmentation:FragmentationTab",
    "What if": "whatif:WhatIfTab",
    "Serving": "serving:ServingTab",
}
SERVING = "Serving"  # only on the page of a server that serves models


def titles() -> list[str]:
    """The titles of the tabs that every page has, in their order."""
    return [title for title in TABS if title != SERVING]


def kind(title: str) -> type[Tab]:
    """The class of the tab with that `title`."""
    module, _, name = TABS[title].partition(":")
    import_whole(f"{__package__}.{module}")
    return getattr(import_module(f".{module}", __package__), name)
