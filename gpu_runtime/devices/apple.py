"""Apple's GPU under Metal, as system_profiler describes it.

Apple silicon has one GPU, which uses the machine's memory. If an Intel Mac has a discrete card, the
discrete card is used; it has memory of its own, and its free memory is unknown. This module is
tested against recorded output of system_profiler. The module was not run on hardware.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import psutil

from ..errors import BadSize
from ..facts import Device, Sample
from ..units import parse_bytes
from .drivers import Card, Listing, NoAnswer

KIND, NAME = "metal", "system_profiler"
SECONDS = 10.0  # the time limit is long because the tool queries every display


def list_cards() -> Listing:
    """Lists the first discrete GPU with Metal, else the first with Metal. Raises NoAnswer if system_profiler fails."""
    here = sys.modules[__name__]
    if sys.platform != "darwin":
        return Listing(here, absent="this is no Mac")
    try:
        report = subprocess.run(
            ["system_profiler", "SPDisplaysDataType", "-json"],
            capture_output=True,
            timeout=SECONDS,
            check=True,
            text=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NoAnswer(str(error)) from error
    return read(report)


def read(report: str) -> Listing:
    """The listing of the card in `report`, the JSON of system_profiler. Raises NoAnswer."""
    here = sys.modules[__name__]
    try:
        gpus = [gpu for gpu in json.loads(report)["SPDisplaysDataType"] if _has_metal(gpu)]
    except (ValueError, KeyError, TypeError) as error:
        raise NoAnswer(f"system_profiler printed no valid report ({error})") from error
    if not gpus:
        return Listing(here, absent="no GPU here can do Metal")
    gpu = next((gpu for gpu in gpus if not _unified(gpu)), gpus[0])
    unified = _unified(gpu)
    total = psutil.virtual_memory().total if unified else _memory(gpu)
    if total is None:
        return Listing(here, failed={"0": "it does not report how much memory it has"})
    name = str(gpu.get("sppci_model") or gpu.get("_name") or "Apple GPU")
    device = Device(f"{KIND}:0", total, name, "METAL-0", 0, unified=unified)
    return Listing(here, (Card(device, gpu, "METAL-0"),))


def _has_metal(gpu: Mapping[str, Any]) -> bool:
    names = ("mtlgpufamilysupport", "metalfamily", "metal")
    support = next(
        (gpu[f"spdisplays_{name}"] for name in names if gpu.get(f"spdisplays_{name}")), ""
    )
    return bool(support) and "unsupported" not in str(support).lower()


def _unified(gpu: Mapping[str, Any]) -> bool:
    """Whether the GPU uses the machine's memory, as Apple's own and Intel's built-in GPUs do."""
    return "spdisplays_vram" not in gpu


def _memory(gpu: Mapping[str, Any]) -> int | None:
    """The GPU's memory in bytes. system_profiler prints "GB" for GiB."""
    size = str(gpu["spdisplays_vram"])
    try:
        return parse_bytes(size.replace("GB", "GiB").replace("MB", "MiB"))
    except BadSize:  # not a size: the tool writes a text for some cards
        return None


def visible(listing: Listing, environment: Mapping[str, str]) -> tuple[Card, ...]:
    """All cards of the `listing`: no variable can hide one."""
    return tuple(card._replace(torch="mps:0") for card in listing.cards)


def measure(card: Card, now: float) -> Sample:
    """The figures of the `card`; the free bytes of a card with memory of its own are unknown."""
    free = psutil.virtual_memory().available if card.device.unified else None
    return Sample(card.device.id, now, free)


def versions() -> dict[str, str]:
    """The version of macOS."""
    import platform

    return {"macOS": platform.mac_ver()[0]}
