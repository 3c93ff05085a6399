"""The setting GPU_DEVICES: which texts are allowed, and the simulated devices that one describes.

No driver is called here; `probe` opens the devices.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import psutil

from ..errors import BadSetting, BadSize
from ..facts import HOST, Device
from ..units import KIB, parse_bytes
from . import drivers
from .drivers import Card

EXPECTED = "auto, cuda, cuda:0,2, rocm, metal, sim:24GiB, sim:2x24GiB or sim:2x24GiB,host:64GiB"
KINDS = {"cuda": "CUDA card", "rocm": "ROCm card", "metal": "Apple GPU"}
_MOST_CARDS = 64


def is_expected(text: str, kind: str) -> bool:
    """Whether the `text` is `auto` or begins with a `kind`; a selection must not be empty."""
    if kind == "auto":
        return text == "auto"
    return kind in KINDS and not text.endswith(":")


def why_none(kind: str, cpu_only: bool) -> str:
    """Why no card of that `kind` is used; `cpu_only` forbids all cards."""
    if cpu_only:
        return "DEVELOPMENT_CPU_ONLY or INFERENCE_GPU_LAYERS=0 forbids it"
    return f"no {KINDS[kind]} is visible here"


def chosen_cards(
    given: str,
    wanted: str,
    visible: tuple[Card, ...],
) -> tuple[Card, ...]:
    """The `visible` cards that the text `wanted` selects; `given` is the whole setting.

    Raises BadSetting.
    """
    found = drivers.chosen(wanted, visible)
    if isinstance(found, str):
        here = ", ".join(f"{card.device.id} ({card.device.uuid})" for card in visible) or "none"
        raise BadSetting(
            "GPU_DEVICES",
            given,
            f"numbers or UUIDs of cards that this process sees, and {found!r} is none "
            f"of them; it sees {here}",
        )
    return found


class _Wish(NamedTuple):
    """The devices that a `sim:` text describes."""

    cards: int
    card_bytes: int
    host_bytes: int | None

    @property
    def possible(self) -> bool:
        """Whether there is a sensible number of cards, and no device is smaller than 1 KiB."""
        sizes = (self.card_bytes, self.host_bytes)
        too_small = any(size is not None and size < KIB for size in sizes)
        return 0 < self.cards <= _MOST_CARDS and not too_small


def simulated_devices(given: str, text: str) -> tuple[Device, ...]:
    """The devices that a `sim:` text describes, host last; `given` is the setting as it was typed.

    Raises BadSetting.
    """
    wish = _parsed(given, text)
    cards = [simulated_card(index, wish.card_bytes) for index in range(wish.cards)]
    return *cards, host_device(wish.host_bytes)


def _parsed(given: str, text: str) -> _Wish:
    """The devices of a `sim:` text. Raises BadSetting."""
    match = re.fullmatch(r"sim:(?:(\d+)x)?([^,]+)(?:,\s*host:([^,]+))?", text)
    if match is None:
        raise BadSetting("GPU_DEVICES", given, EXPECTED)
    count, card, host = match.groups()
    try:
        host_bytes = parse_bytes(host) if host else None
        wish = _Wish(int(count or 1), parse_bytes(card), host_bytes)
    except BadSize:
        raise BadSetting("GPU_DEVICES", given, EXPECTED) from None
    if not wish.possible:
        raise BadSetting("GPU_DEVICES", given, EXPECTED)
    return wish


def simulated_card(index: int, size: int) -> Device:
    """The simulated card with that `index` and `size` bytes."""
    return Device(
        f"sim:{index}",
        size,
        "simulated",
        f"SIM-{index}",
        index,
        simulated=True,
    )


def host_device(simulated_bytes: int | None = None) -> Device:
    """This machine's memory, or a simulated host of `simulated_bytes`."""
    if simulated_bytes is not None:
        return Device(HOST, simulated_bytes, "simulated RAM", simulated=True)
    return Device(HOST, psutil.virtual_memory().total, "RAM")
