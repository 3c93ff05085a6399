"""NVIDIA's cards, as its management library tells of them.

NVML, not torch: asking torch would create a CUDA context, and that is itself memory on the card. Cards are told apart
by UUID, since NVML's index is not CUDA's. Every call may hang: `cards.with_time_limit`, or a process that may be killed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import psutil

from ..facts import Device, Sample
from .drivers import Card, Listing, NoAnswer, named_by

KIND, NAME = "cuda", "NVML"
T = TypeVar("T")


class Handle(NamedTuple):
    own: Any
    whole: Any  # the physical card's: it has a temperature, an instance has none


def list_cards() -> Listing:
    """All cards, of a partitioned one its instances, and by number why others cannot be listed. Raises NoAnswer."""
    here = sys.modules[__name__]
    try:
        import pynvml
    except ImportError:
        return Listing(here, absent="the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
        return _every(pynvml)
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
        return Listing(here, absent=str(error))
    except pynvml.NVMLError as error:
        raise NoAnswer(str(error)) from error


def _every(nvml: Any) -> Listing:
    cards: list[Card] = []
    failed: dict[str, str] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            cards += _of_one(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index))
        except (nvml.NVMLError, NoAnswer) as error:
            failed[str(index)] = str(error)
    return Listing(sys.modules[__name__], tuple(cards), failed)


def _of_one(nvml: Any, index: int, whole: Any) -> list[Card]:
    """The card, or the instances that it is partitioned into."""
    uuid = _text(nvml.nvmlDeviceGetUUID(whole))
    instances = _instances(nvml, whole)
    if instances is None:
        return [_card(nvml, f"{KIND}:{index}", index, Handle(whole, whole), uuid)]
    if not instances:
        raise NoAnswer("it is partitioned (MIG), and has no instance")
    return [
        _card(nvml, f"{KIND}:{index}.{place}", index, Handle(instance, whole), uuid)
        for place, instance in instances.items()
    ]


def _instances(nvml: Any, whole: Any) -> dict[int, Any] | None:
    """The instances of a partitioned card by their place; None for one that is not."""
    found: dict[int, Any] = {}
    try:
        if nvml.nvmlDeviceGetMigMode(whole)[0] != 1:
            return None
        for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(whole)):
            try:
                found[place] = nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, place)
            except nvml.NVMLError_NotFound:
                continue
    except (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_NoPermission,
        nvml.NVMLError_FunctionNotFound,
    ):
        return None
    return found


def _card(nvml: Any, id: str, index: int, handle: Handle, whole_uuid: str) -> Card:
    """Raises NVMLError, and NoAnswer where it will not say how much memory it has."""
    name = _text(nvml.nvmlDeviceGetName(handle.own))
    total = _or_none(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle.own).total)
    unified = total is None and _has_no_memory_of_its_own(nvml, handle.own, name)
    if unified:
        total = psutil.virtual_memory().total
    if total is None:
        raise NoAnswer("it does not say how much memory it has")
    return Card(
        Device(id, total, name, _text(nvml.nvmlDeviceGetUUID(handle.own)), index, unified=unified),
        handle,
        whole_uuid,
    )


INTEGRATED = re.compile(r"\b(GB10|Jetson|Tegra|Xavier|Orin|Thor)\b", re.IGNORECASE)


def _has_no_memory_of_its_own(nvml: Any, handle: Any, name: str) -> bool:
    """Whether a card that tells of no memory uses the machine's: GB10 and Jetson do. NVML has no word for it but the
    addressing mode, ATS, which cards with memory of their own (GH200) have too: those tell how much."""
    if INTEGRATED.search(name):
        return True
    mode = getattr(nvml, "nvmlDeviceGetAddressingMode", None)
    return (
        mode is not None
        and _or_none(nvml, lambda: mode(handle)) == nvml.NVML_DEVICE_ADDRESSING_MODE_ATS
    )


def visible(listing: Listing, environment: Mapping[str, str]) -> tuple[Card, ...]:
    """Those that CUDA shows this process, in CUDA's order.

    Where that cannot be told from the listing (cards of several kinds, or some that cannot be listed) CUDA is asked.
    """
    cards = listing.cards
    mixed = (
        len({card.device.name for card in cards}) > 1
        and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    )
    if (mixed or listing.failed) and not any(card.is_part for card in cards):
        order = _asked_of_cuda(environment)
        if order is not None:
            by_uuid = {card.device.uuid: card for card in cards}
            return tuple(
                by_uuid[uuid]._replace(torch=f"cuda:{index}")
                for index, uuid in enumerate(order)
                if uuid in by_uuid
            )
    return named_by(environment.get("CUDA_VISIBLE_DEVICES"), cards, "cuda")


_CUDA_ORDER = """
import ctypes, json, uuid
cuda, count, order = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), []
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
for index in range(count.value):
    raw = (ctypes.c_ubyte * 16)()
    assert cuda.cuDeviceGetUuid(raw, index) == 0
    order.append("GPU-" + str(uuid.UUID(bytes=bytes(raw))))
print(json.dumps(order))
"""


def _asked_of_cuda(environment: Mapping[str, str]) -> list[str] | None:
    """UUIDs of the cards that CUDA shows, in its order; None where there is no CUDA. Asked in a child: CUDA, once
    started here, survives no fork. Raises NoAnswer where it takes too long: to guess would be to use the wrong card."""
    wanted = {
        key: environment[key]
        for key in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
        if key in environment
    }
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
    try:
        said = subprocess.run(
            [sys.executable, "-c", _CUDA_ORDER],
            env=inherited | wanted,
            capture_output=True,
            timeout=4,
            check=True,
            start_new_session=True,
        ).stdout
        return json.loads(said)
    except subprocess.TimeoutExpired:
        raise NoAnswer(
            "CUDA has not said within 4 s in which order it numbers these cards; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        ) from None
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def measure(card: Card, now: float) -> Sample:
    """What the driver says of the card. Raises NoAnswer."""
    import pynvml

    try:
        return _ask(pynvml, card, now)
    except pynvml.NVMLError as error:
        raise NoAnswer(str(error)) from error


def _ask(nvml: Any, card: Card, now: float) -> Sample:
    own, whole = card.handle
    if card.device.unified:
        nvml.nvmlDeviceGetUUID(own)  # is it still there?
        free: int | None = psutil.virtual_memory().available
    else:
        free = _or_none(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(own).free)
    processes: dict[int, int | None] = {}
    for listing in (
        nvml.nvmlDeviceGetComputeRunningProcesses,
        nvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        for process in _or_none(nvml, partial(listing, own)) or ():
            processes[process.pid] = process.usedGpuMemory
    utilisation = _or_none(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(own).gpu)
    temperature = _or_none(
        nvml, lambda: nvml.nvmlDeviceGetTemperature(whole, nvml.NVML_TEMPERATURE_GPU)
    )
    power = _or_none(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(whole) / 1000)
    return Sample(card.device.id, now, free, processes, utilisation, temperature, power)


def versions() -> dict[str, str]:
    """Raises NoAnswer."""
    import pynvml

    try:
        pynvml.nvmlInit()
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return {
            "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
            "CUDA": f"{cuda // 1000}.{cuda % 1000 // 10}",
            NAME: _text(pynvml.nvmlSystemGetNVMLVersion()),
        }
    except pynvml.NVMLError as error:
        raise NoAnswer(str(error)) from error


def _or_none(nvml: Any, ask: Callable[[], T]) -> T | None:
    """The answer, or None where this card or driver does not offer it. Any other failure is the card's."""
    try:
        return ask()
    except (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_NoPermission,
        nvml.NVMLError_FunctionNotFound,
    ):
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
