"""NVIDIA's cards, as the management library NVML describes them.

torch is not used, because torch would create a CUDA context, which takes memory on the card. Cards
are identified by UUID, because NVML's index of a card differs from CUDA's index. Every call may
hang. So call this module through `drivers.with_time_limit`, or in a process that may be killed.
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
import pynvml

from ..facts import Device, Sample
from .drivers import Card, Listing, NoAnswer, named_by

KIND, NAME = "cuda", "NVML"
CUDA_SECONDS = 4.0  # time limit of the child process that reports CUDA's order of the cards
T = TypeVar("T")


class Handle(NamedTuple):
    """NVML's handles for a card or an instance."""

    own: Any
    whole: Any  # handle of the physical card, which has a temperature; an instance has none


def list_cards() -> Listing:
    """All NVIDIA cards; a partitioned card is replaced by its instances.

    For cards that cannot be listed, the listing has the number and the reason. Raises NoAnswer.
    """
    here = sys.modules[__name__]
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
        return Listing(here, absent=str(error))
    except pynvml.NVMLError as error:
        raise NoAnswer(str(error)) from error
    cards: list[Card] = []
    failed: dict[str, str] = {}
    for index in range(count):
        try:
            cards += _card_or_instances(index, pynvml.nvmlDeviceGetHandleByIndex(index))
        except (pynvml.NVMLError, NoAnswer) as error:
            failed[str(index)] = str(error)
    return Listing(here, tuple(cards), failed)


def _card_or_instances(index: int, whole: Any) -> list[Card]:
    """The card, or all instances of a partitioned card. Raises NoAnswer if it has no instances."""
    uuid = pynvml.nvmlDeviceGetUUID(whole)
    instances = _instances(whole)
    if instances is None:
        return [_card(f"{KIND}:{index}", index, Handle(whole, whole), uuid)]
    if not instances:
        raise NoAnswer("it is partitioned (MIG), and has no instance")
    cards = []
    for position, instance in instances.items():
        id = f"{KIND}:{index}.{position}"
        cards.append(_card(id, index, Handle(instance, whole), uuid))
    return cards


def _instances(whole: Any) -> dict[int, Any] | None:
    """The instances of a partitioned card, by position; None if the card is not partitioned."""
    found: dict[int, Any] = {}
    try:
        if pynvml.nvmlDeviceGetMigMode(whole)[0] != 1:
            return None
        for position in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(whole)):
            try:
                found[position] = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, position)
            except pynvml.NVMLError_NotFound:  # no instance at this position
                continue
    except _not_offered():  # a driver without partitions
        return None
    return found


def _card(id: str, index: int, handle: Handle, whole_uuid: str) -> Card:
    """The card with this `handle`. Raises NVMLError, and NoAnswer if the memory is unknown."""
    name = pynvml.nvmlDeviceGetName(handle.own)
    total = _or_none(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle.own).total)
    unified = total is None and _uses_machine_memory(handle.own, name)
    if unified:
        total = psutil.virtual_memory().total
    if total is None:
        raise NoAnswer("it does not report how much memory it has")
    uuid = pynvml.nvmlDeviceGetUUID(handle.own)
    return Card(Device(id, total, name, uuid, index, unified=unified), handle, whole_uuid)


INTEGRATED = re.compile(r"\b(GB10|Jetson|Tegra|Xavier|Orin|Thor)\b", re.IGNORECASE)


def _uses_machine_memory(handle: Any, name: str) -> bool:
    """Whether a card that reports no memory uses the machine's memory, as GB10 and Jetson do.

    The only sign in NVML is the addressing mode ATS. Cards with memory of their own (GH200) have
    the mode ATS too, but they report their memory.
    """
    if INTEGRATED.search(name):
        return True
    mode = getattr(pynvml, "nvmlDeviceGetAddressingMode", None)
    if mode is None:
        return False
    return _or_none(lambda: mode(handle)) == pynvml.NVML_DEVICE_ADDRESSING_MODE_ATS


def visible(listing: Listing, environment: Mapping[str, str]) -> tuple[Card, ...]:
    """The cards that CUDA shows to a process with this `environment`, in CUDA's order.

    NVML does not show this order if the `listing` has cards of several models and CUDA_DEVICE_ORDER
    is not PCI_BUS_ID, or if some cards cannot be listed. Then a child process gets it from CUDA,
    unless a card is partitioned. Raises NoAnswer if the child does not answer.
    """
    cards = listing.cards
    several_kinds = len({card.device.name for card in cards}) > 1
    mixed = several_kinds and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    if (mixed or listing.failed) and not any(card.is_part for card in cards):
        order = _order_by_cuda(environment)
        if order is not None:
            return _in_order(cards, order)
    return named_by(environment.get("CUDA_VISIBLE_DEVICES"), cards, "cuda")


def _in_order(cards: tuple[Card, ...], order: list[str]) -> tuple[Card, ...]:
    """The cards with the UUIDs in `order`, each with torch's name."""
    by_uuid = {card.device.uuid: card for card in cards}
    known = ((index, by_uuid[uuid]) for index, uuid in enumerate(order) if uuid in by_uuid)
    return tuple(card._replace(torch=f"cuda:{index}") for index, card in known)


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


def _order_by_cuda(environment: Mapping[str, str]) -> list[str] | None:
    """UUIDs of the cards that CUDA shows, in CUDA's order; None if there is no CUDA.

    A child process calls CUDA. If this process called CUDA, none of its forked children could use
    CUDA. Raises NoAnswer if the child takes too long, because a guess could select the wrong card.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
    for key in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        if key in environment:
            inherited[key] = environment[key]
    try:
        uuids = subprocess.run(
            [sys.executable, "-c", _CUDA_ORDER],
            env=inherited,
            capture_output=True,
            timeout=CUDA_SECONDS,
            check=True,
            start_new_session=True,
        ).stdout
        return json.loads(uuids)
    except subprocess.TimeoutExpired:
        raise NoAnswer(
            f"CUDA did not report its order of these cards within {CUDA_SECONDS:.0f} s; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        ) from None
    except (OSError, subprocess.SubprocessError, ValueError):
        return None  # without CUDA the order does not matter, so NVML's order is used


def measure(card: Card, now: float) -> Sample:
    """The driver's figures of the `card`, stamped with `now`. Raises NoAnswer."""
    try:
        return _measure(card, now)
    except pynvml.NVMLError as error:
        raise NoAnswer(str(error)) from error


def _measure(card: Card, now: float) -> Sample:
    own, whole = card.handle
    if card.device.unified:
        pynvml.nvmlDeviceGetUUID(own)  # raises an error if the card is gone
        free: int | None = psutil.virtual_memory().available
    else:
        free = _or_none(lambda: pynvml.nvmlDeviceGetMemoryInfo(own).free)
    utilisation = _sensor(lambda: pynvml.nvmlDeviceGetUtilizationRates(own).gpu)
    sensor = pynvml.NVML_TEMPERATURE_GPU
    temperature = _sensor(lambda: pynvml.nvmlDeviceGetTemperature(whole, sensor))
    power = _sensor(lambda: pynvml.nvmlDeviceGetPowerUsage(whole) / 1000)
    return Sample(card.device.id, now, free, _processes(own), utilisation, temperature, power)


def pcie(card: Card) -> tuple[int, int] | None:
    """Bytes a second over PCIe to the `card`, and from it; None if the driver does not count them.

    The driver counts for 20 ms in each direction, so this takes about 40 ms. An instance has the
    figures of its whole card.
    """
    received, sent = pynvml.NVML_PCIE_UTIL_RX_BYTES, pynvml.NVML_PCIE_UTIL_TX_BYTES
    try:
        kilobytes = [
            pynvml.nvmlDeviceGetPcieThroughput(card.handle.whole, way) for way in (received, sent)
        ]
    except pynvml.NVMLError:  # not offered, or the card is lost, which the next measurement reports
        return None
    return 1000 * kilobytes[0], 1000 * kilobytes[1]


def _processes(handle: Any) -> dict[int, int | None]:
    """Maps the pid of each process on the card to its bytes, or to None if they are unknown."""
    found: dict[int, int | None] = {}
    for list_processes in (
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        for process in _or_none(partial(list_processes, handle)) or ():
            found[process.pid] = process.usedGpuMemory
    return found


def versions() -> dict[str, str]:
    """The versions of driver, CUDA and NVML. Raises NoAnswer."""
    try:
        pynvml.nvmlInit()
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return {
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "CUDA": f"{cuda // 1000}.{cuda % 1000 // 10}",
            NAME: pynvml.nvmlSystemGetNVMLVersion(),
        }
    except pynvml.NVMLError as error:
        raise NoAnswer(str(error)) from error


def _not_offered() -> tuple[type[Exception], ...]:
    """The errors that NVML raises if this card or driver does not support a call."""
    return (
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_NoPermission,
        pynvml.NVMLError_FunctionNotFound,
    )


def _or_none(ask: Callable[[], T]) -> T | None:
    """The result of `ask()`; None if this card or driver does not support the call."""
    try:
        return ask()
    except _not_offered():  # the column stays empty
        return None


def _sensor(ask: Callable[[], T]) -> T | None:
    """The result of `ask()`; None if this card has no such sensor, or a broken one (ERR! in nvidia-smi)."""
    try:
        return ask()
    # Its memory can be leased all the same; a lost card has no figure of it.
    except pynvml.NVMLError:
        return None
