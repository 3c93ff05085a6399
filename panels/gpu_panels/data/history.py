"""Reads the recorded history of a device: when each record ends, and the titles of the recorded leases.

A moment is one record of a device's use, with the time at which the record begins. This module is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from gpu_runtime.facts import KERNEL, Event, Moment, Share, Snapshot, notebooks_in
from gpu_runtime.rendering.views import clean

from ..palette import label_of
from .row_parts import notebook_name

MARKED = ("offloaded", "unloaded")  # the evictions

Span = tuple[Moment, float]  # a moment, and the time until which it holds


def spans_of(moments: Sequence[Moment], end: float) -> list[Span]:
    """Each of the `moments` of one device together with the time at which it ends.

    A moment ends when the next moment begins. Before a gap in the record, a moment ends after the
    usual step between moments. `end` is the end of the record.
    """
    steps = [later.wall - moment.wall for moment, later in zip(moments, moments[1:], strict=False)]
    usual = median(steps) if steps else 0.0
    longest = max(10 * usual, 60.0)  # a longer step is a gap: nothing was sampled
    spans = []
    for moment, step in zip(moments, steps, strict=False):
        lasted = step if step <= longest else usual
        spans.append((moment, moment.wall + lasted))
    if moments:
        last = moments[-1]
        is_recent = end - last.wall <= longest
        spans.append((last, end if is_recent else last.wall + usual))
    return spans


def devices_of(event: Event) -> set[str]:
    """The devices on which the bytes of `event` are."""
    shares = event.shares or (Share(event.device, event.bytes),)
    return {share.device for share in shares}


def lease_titles(
    labels: Iterable[str], snapshot: Snapshot, events: Iterable[Event] = ()
) -> dict[str, str]:
    """The title of each of `labels`: `qwen · train.ipynb`, or `train.ipynb` for a notebook's own code.

    If the process is not in the `snapshot`, and none of the `events` is of it, the title is `qwen · pid 4121`.
    """
    ended = {label_of(id, ""): clean(name) for id, name in notebooks_in(events).items()}
    notebooks = ended | {
        label_of(section.owner.id, ""): notebook_name(section)
        for section in snapshot.sections.values()
    }
    return {label: _title(label, notebooks) for label in labels}


def _title(label: str, notebooks: Mapping[str, str]) -> str:
    name, _, pid = label.rpartition("@")
    process = notebooks.get(f"@{pid}", f"pid {pid}")
    return process if name == KERNEL else f"{clean(name)} · {process}"
