"""The colours and the font of the console, and the style of each process.

A lease has the neutral colour of its process. Saturated colours are for problems only. People with any kind of
colour-blindness can distinguish the neutral colours on a dark and on a light page. Each area has a grey edge that is
visible on both pages. Colour is never the only sign: a lease also has its name.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

# Even the two most similar colours differ by eleven times the just noticeable difference, for any
# kind of colour-blindness.
COLOURS = ("#b5b7b0", "#748db1", "#9dd4ef", "#998a65", "#f0deb6", "#878d88", "#d7e2e3")
EDGE = "#808080"  # its contrast with a white and with a dark page is at least 3 : 1
PLAIN = " "  # the texture of an even area
# The first seven processes use the first texture, and the next seven processes the second texture.
TEXTURES = (PLAIN, ".", "-")
SLOTS = len(COLOURS) * len(TEXTURES)
# The colours of the accent and of the status bar, in the light and in the dark theme.
LIGHT, DARK = ("#2a78ab", "#0b5c8a"), ("#7cc0ea", "#0d3a55")
# Fonts of the operating system, because Material's own fonts are 130 kB. `system-ui`, which is a wide
# font on Linux, is not used.
FONT = '-apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif'
KEPT = 1024  # processes whose style is remembered


class LeaseStyle(NamedTuple):
    """How a process, and each of its leases, is drawn in every chart and table."""

    colour: str
    texture: str = PLAIN  # one of TEXTURES


def label_of(owner_id: str, name: str) -> str:
    """The label of the lease called `name` of the process `owner_id`, such as `qwen@4121`."""
    pid = owner_id.partition(".")[0]
    return f"{name}@{pid}"


def style_of(slot: int) -> LeaseStyle:
    """The style with the number `slot`: a colour and a texture."""
    texture = TEXTURES[slot // len(COLOURS) % len(TEXTURES)]
    return LeaseStyle(COLOURS[slot % len(COLOURS)], texture)


def assign_slots(kept: Mapping[str, int], labels: Iterable[str]) -> dict[str, int]:
    """A slot (the number of a style) for each of `labels`. A label keeps its slot in `kept`, the newest last.

    A new label gets a slot that no other shown or recently seen label has, or else the least used slot.
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
        # The least used slot, then the least used colour, then the lowest number, which is the most legible.
        slot = min(range(SLOTS), key=lambda n: (slot_uses[n], colour_uses[n % len(COLOURS)], n))
        assigned[label] = slot
        slot_uses[slot] += 1
        colour_uses[slot % len(COLOURS)] += 1
    return assigned


class Palette:
    """Remembers the style of each process, over time and across tabs. Thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[str, int] = {}
        self._lock = threading.Lock()

    def styles(self, labels: Iterable[str]) -> dict[str, LeaseStyle]:
        """Maps each of `labels` to the style of its process. A process without a style gets one in this call."""
        pids = {label: label.rpartition("@")[2] for label in labels}
        with self._lock:
            assigned = assign_slots(self._kept, pids.values())
            for pid, slot in assigned.items():
                self._kept.pop(pid, None)
                self._kept[pid] = slot  # the process becomes the most recently seen one
            for oldest in list(self._kept)[:-KEPT]:
                del self._kept[oldest]
        return {label: style_of(assigned[pid]) for label, pid in pids.items()}


SHARED = Palette()  # one for the process: every session and tab draws a process in the same style
