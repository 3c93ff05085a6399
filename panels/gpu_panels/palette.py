"""The colours of the console: which look a lease has, and how a pressure level is told apart.

The seven colours are those of `%gpu` (Okabe and Ito's), in the dark and in the light: told apart with every kind of
colour-blindness, each edged with a grey that stands out from both backgrounds. Nothing is said by colour alone: a
lease has its name, a level its word and a mark.

Source: Okabe & Ito 2008, Color Universal Design.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpu_runtime.facts import Lease, Level
from gpu_runtime.rendering.html import COLOURS, look

EDGE = "#808080"  # 3 : 1 and more against a white and against a dark page
UNOWNED = (
    "#8c8c8c"  # bytes that belong to no lease; always under a hatch, so that no lease looks like it
)
PLAIN = " "  # Bokeh's hatch that draws nothing
TEXTURES = (
    PLAIN,
    ".",
    "-",
)  # of the first, second and third round of colours; `%gpu` has stripes and dots
SLOTS = len(COLOURS) * len(TEXTURES)
KEPT = 1024  # labels whose look is remembered
_WHITE_INK = {"#0072b2"}


class Look(NamedTuple):
    """How a lease is drawn wherever it is drawn."""

    colour: str
    ink: str  # of words upon it, 4.5 : 1 and more
    texture: str = PLAIN  # one of TEXTURES


def label(lease: Lease) -> str:
    """`qwen@4121`: what a lease is called in the history, and what its look is kept under."""
    return label_of(lease.owner, lease.name)


def label_of(owner_id: str, name: str) -> str:
    return f"{name}@{owner_id.partition('.')[0]}"


def look_of(slot: int) -> Look:
    colour = COLOURS[slot % len(COLOURS)]
    ink = "#ffffff" if colour in _WHITE_INK else "#000000"
    return Look(colour, ink, TEXTURES[slot // len(COLOURS) % len(TEXTURES)])


def preferred(label: str) -> int:
    """The slot that this label has when nobody else wants it: the colour that the model has in `%gpu`, plain."""
    return COLOURS.index(look(label.rpartition("@")[0] or label).colour)


def choose(kept: Mapping[str, int], labels: Iterable[str]) -> dict[str, int]:
    """A slot for each label: the one it had; else its preferred one, or where that is taken, a free one.

    `kept` is in order of last sight, the newest last. Those shown together with it, and the last ones seen, are whom a
    new label must not be taken for; once all looks are given away, the one that fewest of them have is shared.
    """
    wanted = list(dict.fromkeys(labels))
    recent = list(kept)[-SLOTS:]
    chosen = {one: kept[one] for one in wanted if one in kept}
    rivals = {*recent, *chosen}
    slots = Counter(kept[one] for one in rivals)
    colours = Counter(kept[one] % len(COLOURS) for one in rivals)
    for one in wanted:
        if one in chosen:
            continue
        mine = preferred(one)
        slot = min(
            range(SLOTS),
            key=lambda slot: (
                slots[slot],
                colours[slot % len(COLOURS)],
                slot % len(COLOURS) != mine,
                slot,
            ),
        )  # plain first: it reads best
        chosen[one] = slot
        slots[slot] += 1
        colours[slot % len(COLOURS)] += 1
    return chosen


class Palette:
    """Remembers which label has which look, so that a lease keeps its colour over time and across tabs. Thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[str, int] = {}
        self._lock = threading.Lock()

    def looks(self, labels: Iterable[str]) -> dict[str, Look]:
        """The look of each label; new ones get theirs now."""
        with self._lock:
            chosen = choose(self._kept, labels)
            for one, slot in chosen.items():
                self._kept.pop(one, None)
                self._kept[one] = slot  # seen last
            for old in list(self._kept)[:-KEPT]:
                del self._kept[old]
        return {one: look_of(slot) for one, slot in chosen.items()}


SHARED = Palette()  # of this process: every session and tab draws a lease alike


class LevelLook(NamedTuple):
    """A pressure level in four ways: its word, a mark that fills up, a colour, and the hatch of its band."""

    mark: str
    colour: str
    ink: str  # of words on the colour
    alpha: float  # of its band behind a chart
    hatch: str  # over that band


LEVELS: dict[Level, LevelLook] = {
    Level.LOW: LevelLook("○", "#009e73", "#000000", 0.0, PLAIN),
    Level.MODERATE: LevelLook("◔", "#56b4e9", "#000000", 0.14, PLAIN),
    Level.HIGH: LevelLook("◕", "#e69f00", "#000000", 0.20, "/"),
    Level.CRITICAL: LevelLook("●", "#d55e00", "#000000", 0.28, "x"),
    Level.UNKNOWN: LevelLook("?", "#808080", "#000000", 0.10, "."),
}


def level_word(level: Level) -> str:
    """`◕ HIGH`: told without its colour too."""
    return f"{LEVELS[level].mark} {level}"
