"""Which tabs the console has, in their order. A module is imported when its tab is first looked at."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from .base import Tab

TABS = {  # title -> module:class
    "Now": "now:Now",
    "Models": "tables:Models",
    "Leases": "tables:Leases",
    "Queue": "tables:Queue",
    "Decisions": "decisions:Decisions",
    "Evictions": "evictions:Evictions",
    "Fragmentation": "fragmentation:FragmentationTab",
    "What if": "whatif:WhatIf",
}


def titles() -> list[str]:
    return [
        title
        for title, path in TABS.items()
        if find_spec(f"{__package__}.{path.partition(':')[0]}")
    ]


def kind(title: str) -> type[Tab]:
    """The class of a tab."""
    module, _, name = TABS[title].partition(":")
    return getattr(import_module(f".{module}", __package__), name)
