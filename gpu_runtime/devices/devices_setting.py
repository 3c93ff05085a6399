"""The setting GPU_DEVICES: the allowed texts, and the simulated devices that a text describes.

No driver is called here; the module `probe` opens the devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import psutil

from ..errors import BadSetting, BadSize
from ..facts import HOST, Device
from ..units import KIB, parse_bytes
from . import drivers
from .drivers import Card

EXPECTED = (
    "auto, cuda, cuda:0,2, rocm, metal, sim:24GiB, sim:24GiB+12GiB, sim:2x24GiB or "
    "sim:2x24GiB,host:64GiB"
)
KINDS = {"cuda": "CUDA card", "rocm": "ROCm card", "metal": "Apple GPU"}
_MOST_CARDS = 64
_LARGEST = 2**50  # bytes of one simulated device
_SEVERAL = re.compile(r"([0-9]{1,9})x(.+)")  # 2x24GiB


def is_expected(text: str, kind: str) -> bool:
    """Whether `text`, which begins with `kind`, is `auto` or names a kind of card.

    Names of cards may follow after a colon, as in `cuda:0,1`. A colon with nothing after it is
    wrong.
    """
    if kind == "auto":
        return text == "auto"
    return kind in KINDS and not text.endswith(":")


def check_index(index: int | None, devices: Iterable[Device]) -> None:
    """Raises BadSetting if no card among `devices` has the `index` (INFERENCE_GPU_INDEX)."""
    cards = [device for device in devices if not device.is_host]
    if index is not None and index not in {card.index for card in cards}:
        known = ", ".join(f"{card.index} ({card.id})" for card in cards)
        wanted = f"the index of a GPU that this process sees: {known}"
        raise BadSetting("INFERENCE_GPU_INDEX", index, wanted)


def why_none(kind: str, cpu_only: bool) -> str:
    """Why no card of this `kind` is used. If `cpu_only` is true, all cards are forbidden."""
    if cpu_only:
        return "DEVELOPMENT_CPU_ONLY forbids it"
    return f"no {KINDS[kind]} is visible here"


def chosen_cards(
    given: str,
    wanted: str,
    visible: tuple[Card, ...],
) -> tuple[Card, ...]:
    """The `visible` cards that the text `wanted` selects.

    `given` is the whole setting, for the error. Raises BadSetting if `wanted` names a card that is
    not in `visible`.
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


def simulated_devices(given: str, text: str) -> tuple[Device, ...]:
    """The devices that a `sim:` text describes; the host is last.

    `given` is the setting as it was typed, for the error. Raises BadSetting for any other text.
    """
    try:
        card_sizes, host_bytes = _parsed(text)
    except BadSize:
        raise BadSetting("GPU_DEVICES", given, EXPECTED) from None
    sizes = card_sizes if host_bytes is None else [*card_sizes, host_bytes]
    possible = all(KIB <= size <= _LARGEST for size in sizes)
    if not possible or not 0 < len(card_sizes) <= _MOST_CARDS:
        raise BadSetting("GPU_DEVICES", given, EXPECTED)
    cards = [simulated_card(index, size) for index, size in enumerate(card_sizes)]
    return *cards, host_device(host_bytes)


def _parsed(text: str) -> tuple[list[int], int | None]:
    """The bytes of each card of a `sim:` text, and of the host. Raises BadSize.

    The bytes of the host are None if the text does not name them.
    """
    cards, comma, host = text.removeprefix("sim:").partition(",")
    host = host.strip()
    if comma and not host.startswith("host:"):
        raise BadSize(text)
    sizes: list[int] = []
    for part in cards.split("+"):
        match = _SEVERAL.fullmatch(part.strip())
        count, size = match.groups() if match else (1, part)
        # A list of a million cards would take much memory. The caller refuses any list that is too
        # long, so one card more than allowed is enough.
        sizes += [parse_bytes(size)] * min(int(count), _MOST_CARDS + 1)
    return sizes, parse_bytes(host.removeprefix("host:")) if host else None


def simulated_card(index: int, size: int) -> Device:
    """A simulated card with this `index` and `size` bytes."""
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
