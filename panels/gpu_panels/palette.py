"""The colours of the console: the style of each lease, and the style of each pressure level.

`%gpu` uses the same seven colours, which are those of Okabe and Ito. People with any kind of
colour-blindness can distinguish the colours on a dark and on a light page. Each area has a grey edge
that is visible on both. Colour is never the only sign: a lease also has its name, and a level has its
word and a mark.

Source: Okabe & Ito 2008, Color Universal Design.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpu_runtime.facts import Lease, Level
from gpu_runtime.rendering.elements import COLOURS, look

EDGE = "#808080"  # its contrast with a white and with a dark page is at least 3 : 1
UNOWNED = "#8c8c8c"  # bytes outside all leases; they are always hatched, unlike leases
PLAIN = " "  # Bokeh's hatch that draws nothing
# The first seven leases use the first texture, and the next seven leases the second texture.
# `%gpu` draws stripes and dots.
TEXTURES = (PLAIN, ".", "-")
SLOTS = len(COLOURS) * len(TEXTURES)
KEPT = 1024  # labels whose style is remembered
_NEEDS_WHITE_INK = {"#0072b2"}


class LeaseStyle(NamedTuple):
    """How one lease is drawn in every chart and table."""

    colour: str
    ink: str  # colour of text on `colour`, with a contrast of at least 4.5 : 1
    texture: str = PLAIN  # one of TEXTURES


def label(lease: Lease) -> str:
    """The label of `lease`, such as `qwen@4121`. The style of a lease and its history are kept by label."""
    return label_of(lease.owner, lease.name)


def label_of(owner_id: str, name: str) -> str:
    """The label of the lease `name` of the process `owner_id`: `qwen@4121`."""
    pid = owner_id.partition(".")[0]
    return f"{name}@{pid}"


def style_of(slot: int) -> LeaseStyle:
    """The style with the number `slot`: a colour, its ink and a texture."""
    colour = COLOURS[slot % len(COLOURS)]
    ink = "#ffffff" if colour in _NEEDS_WHITE_INK else "#000000"
    texture = TEXTURES[slot // len(COLOURS) % len(TEXTURES)]
    return LeaseStyle(colour, ink, texture)


def preferred_slot(label: str) -> int:
    """The slot that `label` gets if that slot is free.

    It has the colour that `%gpu` gives the model, and no texture.
    """
    model = label.rpartition("@")[0] or label
    return COLOURS.index(look(model).colour)


def assign_slots(kept: Mapping[str, int], labels: Iterable[str]) -> dict[str, int]:
    """A slot (the number of a style) for each of `labels`.

    A label gets its old slot, else its preferred slot, else a free slot. `kept` has the slots assigned
    so far, with the most recently seen label last. A new label avoids the slots of labels that are
    shown with it or were seen recently. If all slots are taken, it gets the least used slot.
    """
    wanted = list(dict.fromkeys(labels))
    recent = list(kept)[-SLOTS:]
    assigned = {label: kept[label] for label in wanted if label in kept}
    rivals = {*recent, *assigned}
    slot_uses = Counter(kept[label] for label in rivals)
    colour_uses = Counter(kept[label] % len(COLOURS) for label in rivals)
    for label in wanted:
        if label in assigned:
            continue
        slot = _best_slot(preferred_slot(label), slot_uses, colour_uses)
        assigned[label] = slot
        slot_uses[slot] += 1
        colour_uses[slot % len(COLOURS)] += 1
    return assigned


def _best_slot(preferred: int, slot_uses: Counter[int], colour_uses: Counter[int]) -> int:
    """The least used slot. Among equals, the least used colour counts, then the preferred colour."""

    def cost(slot: int) -> tuple[int, int, bool, int]:
        colour = slot % len(COLOURS)
        # The slot number is the last criterion, since low slots have no texture and are most legible.
        return slot_uses[slot], colour_uses[colour], colour != preferred, slot

    return min(range(SLOTS), key=cost)


class Palette:
    """Remembers the style of each label, so a lease keeps its colour over time and across tabs.

    It is thread-safe.
    """

    def __init__(self) -> None:
        self._kept: dict[str, int] = {}
        self._lock = threading.Lock()

    def styles(self, labels: Iterable[str]) -> dict[str, LeaseStyle]:
        """The style of each of `labels`. A new label gets a style now."""
        with self._lock:
            assigned = assign_slots(self._kept, labels)
            for label, slot in assigned.items():
                self._kept.pop(label, None)
                self._kept[label] = slot  # the label becomes the most recently seen one
            for oldest in list(self._kept)[:-KEPT]:
                del self._kept[oldest]
        return {label: style_of(slot) for label, slot in assigned.items()}


SHARED = Palette()  # one for the process: every session and tab draws a lease in the same style


class LevelStyle(NamedTuple):
    """The look of a pressure level: a mark, a colour, and the band in a chart."""

    mark: str
    colour: str
    ink: str  # colour of text on `colour`
    alpha: float  # opacity of the band behind a chart
    hatch: str  # hatch of that band


LEVELS: dict[Level, LevelStyle] = {
    Level.LOW: LevelStyle("○", "#009e73", "#000000", 0.0, PLAIN),
    Level.MODERATE: LevelStyle("◔", "#56b4e9", "#000000", 0.14, PLAIN),
    Level.HIGH: LevelStyle("◕", "#e69f00", "#000000", 0.20, "/"),
    Level.CRITICAL: LevelStyle("●", "#d55e00", "#000000", 0.28, "x"),
    Level.UNKNOWN: LevelStyle("?", "#808080", "#000000", 0.10, "."),
}


def level_word(level: Level) -> str:
    """The level with its mark, readable without colour: `◕ HIGH`."""
    return f"{LEVELS[level].mark} {level}"
