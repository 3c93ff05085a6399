"""AMD's cards, as `amdsmi` (ROCm's own Python binding) describes them.

`amdsmi` is part of ROCm. Without `amdsmi`, no AMD card is found. This module was written from the
source and the documentation of `amdsmi`, and is tested against the documented answers. The module
was not run on hardware. `amdsmi` reports a card's memory in MiB, a process's memory in bytes, and
power in W. A value that the driver does not know is "N/A".

Source: ROCm/amdsmi, py-interface/amdsmi_interface.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..facts import Device, Sample
from ..threads import import_whole
from ..units import MIB
from .drivers import Card, Listing, NoAnswer, named_by

KIND, NAME = "rocm", "amdsmi"


def list_cards() -> Listing:
    """All cards, with the numbers that HIP uses. Raises NoAnswer if the driver does not answer."""
    here = sys.modules[__name__]
    try:
        import_whole("amdsmi")
        import amdsmi
    except ImportError:
        return Listing(here, absent="ROCm's Python binding amdsmi is not installed")
    except Exception as error:  # the import loads a C library, and can raise many kinds of errors
        return Listing(here, absent=f"amdsmi cannot be imported ({error})")
    handles = _handles(amdsmi)
    cards: list[Card] = []
    failed: dict[str, str] = {}
    for index, handle in _numbered(amdsmi, handles):
        try:
            cards.append(_card(amdsmi, index, handle))
        except NoAnswer as error:
            failed[str(index)] = str(error)
    absent = "" if handles else "amdsmi lists no card"
    return Listing(here, tuple(cards), failed, absent)


def _handles(smi: Any) -> list[Any]:
    _answer(smi, smi.amdsmi_init)
    return _answer(smi, smi.amdsmi_get_processor_handles)


def _numbered(smi: Any, handles: list[Any]) -> list[tuple[int, Any]]:
    """The cards in the order of HIP's numbers, each with its number.

    If `amdsmi` does not report HIP's numbers, the positions in the list are used.
    """
    numbers = []
    for position, handle in enumerate(handles):
        numbers.append(_enumeration(smi, handle).get("hip_id", position))
    distinct = len(set(numbers)) == len(numbers)
    if not distinct or not all(isinstance(number, int) for number in numbers):
        return list(enumerate(handles))
    return sorted(zip(numbers, handles, strict=True), key=lambda pair: pair[0])


def _card(smi: Any, index: int, handle: Any) -> Card:
    """The card with the number `index` and the `handle` of amdsmi. Raises NoAnswer."""
    total = _answer(smi, lambda: smi.amdsmi_get_gpu_vram_usage(handle))["vram_total"]
    asic = _or_none(smi, lambda: smi.amdsmi_get_gpu_asic_info(handle)) or {}
    # HIP_VISIBLE_DEVICES uses HIP's own UUID, which differs from the driver's UUID of a card.
    uuid = _enumeration(smi, handle).get("hip_uuid")
    if not uuid:
        uuid = _answer(smi, lambda: smi.amdsmi_get_gpu_device_uuid(handle))
    name = str(asic.get("market_name", "AMD"))
    device = Device(f"{KIND}:{index}", int(total) * MIB, name, uuid, index)
    return Card(device, handle, uuid)


def _enumeration(smi: Any, handle: Any) -> Mapping[str, Any]:
    """The card's number and UUID in HIP; empty if `amdsmi` is older than ROCm 6.4."""
    ask = getattr(smi, "amdsmi_get_gpu_enumeration_info", None)
    if ask is None:
        return {}
    return _or_none(smi, lambda: ask(handle)) or {}


def visible(listing: Listing, environment: Mapping[str, str]) -> tuple[Card, ...]:
    """The cards of the `listing` that HIP shows to a process with this `environment`.

    ROCR_VISIBLE_DEVICES selects cards first. HIP_VISIBLE_DEVICES selects among the cards that are
    left; if this variable is not set, CUDA_VISIBLE_DEVICES is used in its place. torch uses names
    such as cuda:0 for ROCm's cards too.
    """
    left = named_by(environment.get("ROCR_VISIBLE_DEVICES"), listing.cards, "")
    named = environment.get("HIP_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES"))
    return named_by(named, left, "cuda")


def measure(card: Card, now: float) -> Sample:
    """The driver's figures of the `card`, stamped with `now`. Raises NoAnswer."""
    import_whole("amdsmi")
    import amdsmi as smi

    handle = card.handle
    memory = _answer(smi, lambda: smi.amdsmi_get_gpu_vram_usage(handle))
    used, total = _number(memory.get("vram_used")), _number(memory.get("vram_total"))
    free = None if used is None or total is None else int(total - used) * MIB
    processes = {}
    for process in _or_none(smi, lambda: smi.amdsmi_get_gpu_process_list(handle)) or ():
        if isinstance(process, Mapping):
            processes[int(process["pid"])] = _vram(process)
    activity = _or_none(smi, lambda: smi.amdsmi_get_gpu_activity(handle)) or {}
    busy = _number(activity.get("gfx_activity"))
    heat, watts = _temperature(smi, handle), _watts(smi, handle)
    return Sample(card.device.id, now, free, processes, busy, heat, watts)


def _vram(process: Mapping[str, Any]) -> int | None:
    used = process.get("memory_usage", {}).get("vram_mem", process.get("mem"))
    size = _number(used)
    return None if size is None else int(size)


def _watts(smi: Any, handle: Any) -> float | None:
    """The card's power in watts, which is reported under one of several keys; None if unknown."""
    power = _or_none(smi, lambda: smi.amdsmi_get_power_info(handle)) or {}
    keys = ("socket_power", "current_socket_power", "average_socket_power")
    known = (watts for key in keys if (watts := _number(power.get(key))) is not None)
    return next(known, None)


def _temperature(smi: Any, handle: Any) -> float | None:
    """The card's temperature in °C, at its hottest spot: accelerators have none at the edge. None if unknown."""
    current = smi.AmdSmiTemperatureMetric.CURRENT
    for name in ("HOTSPOT", "EDGE"):
        sensor = getattr(smi.AmdSmiTemperatureType, name)
        ask = partial(smi.amdsmi_get_temp_metric, handle, sensor, current)
        celsius = _number(_or_none(smi, ask))
        if celsius is not None:
            return celsius
    return None


def versions() -> dict[str, str]:
    """The versions of driver and binding. Raises NoAnswer."""
    import_whole("amdsmi")
    import amdsmi as smi

    handles = _handles(smi)
    info = _or_none(smi, lambda: smi.amdsmi_get_gpu_driver_info(handles[0])) if handles else None
    return {
        "driver": str((info or {}).get("driver_version", "unknown")),
        NAME: getattr(smi, "__version__", "unknown"),
    }


def _answer(smi: Any, ask: Callable[[], Any]) -> Any:
    """The result of `ask()`. Raises NoAnswer."""
    try:
        return ask()
    except smi.AmdSmiException as error:
        raise NoAnswer(" ".join(str(error).split())) from error


def _or_none(smi: Any, ask: Callable[[], Any]) -> Any:
    """The result of `ask()`; None if this card or driver does not support the call."""
    try:
        return ask()
    except smi.AmdSmiException:  # not supported by this card or driver
        return None


def _number(value: Any) -> float | None:
    """Returns `value` if it is a number, and None for texts such as "N/A"."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number else None
