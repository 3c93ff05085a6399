"""How long the loads of a model took alone, and how long beside other models. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ..facts import Event
from ..units import show_seconds

MOST_LOADS = 50  # at most this many loads of a model are compared, the newest
MOST_BESIDE = 8  # names of other models that are recorded with a load, and named in a plan


def interference(loads: Sequence[Event]) -> str:
    """A sentence that compares the median seconds of `loads` alone and beside other models.

    `loads` are the load events of one model, the newest last. A load counts only if its source is
    the source of the newest load. If only one of the two kinds of loads was measured, or none, the
    result is empty.
    """
    measured = [one for one in loads if one.seconds and one.source == loads[-1].source]
    alone = [one.seconds for one in measured if not one.beside]
    beside = [one for one in measured if one.beside]
    if not alone or not beside:
        return ""
    names = sorted({name for one in beside for name in one.beside})[:MOST_BESIDE]
    slower = median(one.seconds for one in beside)
    return (
        f"Loads took {show_seconds(median(alone))} alone, and {show_seconds(slower)} beside "
        f"{', '.join(names)}."
    )
