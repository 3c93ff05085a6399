"""AMD's cards, as ROCm's own Python binding tells of them. `amdsmi` comes with ROCm; where it is not installed there is
no AMD card for us.

Written from the binding's source and documentation, and tested against its documented answers: not run on hardware.
Memory is told in MiB, a process's in bytes, power in W; what the driver does not know is "N/A".
Source: ROCm/amdsmi, py-interface/amdsmi_interface.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..facts import Device, Sample
from ..units import MIB
from .drivers import Card, Listing, NoAnswer, named_by

KIND, NAME = "rocm", "amdsmi"


def list_cards() -> Listing:
    """All cards, numbered as HIP does. Raises NoAnswer."""
    here = sys.modules[__name__]
    try:
        import amdsmi
    except ImportError:
        return Listing(here, absent="ROCm's Python binding amdsmi is not installed")
    except Exception as error:  # the binding loads its library as it is imported, and says in many ways that it cannot
        return Listing(here, absent=f"amdsmi cannot be imported ({error})")
    handles = _heard(
        amdsmi, lambda: (amdsmi.amdsmi_init(), amdsmi.amdsmi_get_processor_handles())[1]
    )
    numbered = [
        (_enumeration(amdsmi, handle).get("hip_id", place), handle)
        for place, handle in enumerate(handles)
    ]
    if len({number for number, _ in numbered}) < len(numbered) or not all(
        isinstance(n, int) for n, _ in numbered
    ):
        numbered = list(enumerate(handles))
    cards: list[Card] = []
    failed: dict[str, str] = {}
    for index, handle in sorted(numbered, key=lambda one: one[0]):
        try:
            cards.append(_card(amdsmi, index, handle))
        except NoAnswer as error:
            failed[str(index)] = str(error)
    absent = "" if handles else "amdsmi lists no card"
    return Listing(here, tuple(cards), failed, absent)


def _card(smi: Any, index: int, handle: Any) -> Card:
    total = _heard(smi, lambda: smi.amdsmi_get_gpu_vram_usage(handle))["vram_total"]
    asic = _or_none(smi, lambda: smi.amdsmi_get_gpu_asic_info(handle)) or {}
    # HIP's own UUID, since HIP_VISIBLE_DEVICES goes by it; the driver's is another.
    uuid = _enumeration(smi, handle).get("hip_uuid") or _heard(
        smi, lambda: smi.amdsmi_get_gpu_device_uuid(handle)
    )
    return Card(
        Device(
            f"{KIND}:{index}", int(total) * MIB, str(asic.get("market_name", "AMD")), uuid, index
        ),
        handle,
        uuid,
    )


def _enumeration(smi: Any, handle: Any) -> Mapping[str, Any]:
    """The card's number and UUID for HIP; nothing from a binding that does not tell them (before ROCm 6.4)."""
    ask = getattr(smi, "amdsmi_get_gpu_enumeration_info", None)
    return (_or_none(smi, lambda: ask(handle)) if ask else None) or {}


def visible(listing: Listing, environment: Mapping[str, str]) -> tuple[Card, ...]:
    """Those that HIP shows this process: of those that ROCR_VISIBLE_DEVICES leaves, those that HIP_VISIBLE_DEVICES
    names, or where it is unset CUDA_VISIBLE_DEVICES. torch calls ROCm's cards cuda:0 too."""
    left = named_by(environment.get("ROCR_VISIBLE_DEVICES"), listing.cards, "")
    return named_by(
        environment.get("HIP_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES")),
        left,
        "cuda",
    )


def measure(card: Card, now: float) -> Sample:
    """What the driver says of the card. Raises NoAnswer."""
    import amdsmi as smi

    handle = card.handle
    memory = _heard(smi, lambda: smi.amdsmi_get_gpu_vram_usage(handle))
    used, total = _number(memory.get("vram_used")), _number(memory.get("vram_total"))
    free = None if used is None or total is None else int(total - used) * MIB
    processes = {
        int(process["pid"]): _vram(process)
        for process in _or_none(smi, lambda: smi.amdsmi_get_gpu_process_list(handle)) or ()
        if isinstance(process, Mapping)
    }
    activity = _or_none(smi, lambda: smi.amdsmi_get_gpu_activity(handle)) or {}
    power = _or_none(smi, lambda: smi.amdsmi_get_power_info(handle)) or {}
    watts = next(
        (
            said
            for key in ("socket_power", "current_socket_power", "average_socket_power")
            if (said := _number(power.get(key))) is not None
        ),
        None,
    )
    return Sample(
        card.device.id,
        now,
        free,
        processes,
        _number(activity.get("gfx_activity")),
        _temperature(smi, handle),
        watts,
    )


def _vram(process: Mapping[str, Any]) -> int | None:
    said = _number(process.get("memory_usage", {}).get("vram_mem", process.get("mem")))
    return None if said is None else int(said)


def _temperature(smi: Any, handle: Any) -> float | None:
    """At the hottest spot, which all cards have; accelerators have no sensor at the edge."""
    for sensor in ("HOTSPOT", "EDGE"):
        said = _or_none(
            smi,
            lambda sensor=sensor: smi.amdsmi_get_temp_metric(
                handle,
                getattr(smi.AmdSmiTemperatureType, sensor),
                smi.AmdSmiTemperatureMetric.CURRENT,
            ),
        )
        if _number(said) is not None:
            return _number(said)
    return None


def versions() -> dict[str, str]:
    """Raises NoAnswer."""
    import amdsmi as smi

    handles = _heard(smi, lambda: (smi.amdsmi_init(), smi.amdsmi_get_processor_handles())[1])
    said = _or_none(smi, lambda: smi.amdsmi_get_gpu_driver_info(handles[0])) if handles else None
    return {
        "driver": str((said or {}).get("driver_version", "unknown")),
        NAME: getattr(smi, "__version__", "unknown"),
    }


def _heard(smi: Any, ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except smi.AmdSmiException as error:
        raise NoAnswer(" ".join(str(error).split())) from error


def _or_none(smi: Any, ask: Callable[[], Any]) -> Any:
    """The answer, or None where this card or driver does not offer it."""
    try:
        return ask()
    except smi.AmdSmiException:
        return None


def _number(said: Any) -> float | None:
    return said if isinstance(said, (int, float)) and not isinstance(said, bool) else None
