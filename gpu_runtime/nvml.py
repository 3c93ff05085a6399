"""What NVIDIA's management library says of the cards: which CUDA sees, in its order, and how full they are.

NVML, not torch: asking torch would create a CUDA context, and that is itself memory on the card. Cards are told apart
by UUID, since NVML's index is not CUDA's.
"""
from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import psutil

from .errors import ProbeFailed
from .facts import Device, Sample

ANSWER_SECONDS = 5.0  # a call may hang in the driver for good
T = TypeVar("T")


class Card(NamedTuple):
    device: Device
    handle: Any


def cards(environment: Mapping[str, str] = os.environ) -> tuple[Card, ...]:
    """The cards that CUDA would see in this process, in CUDA's order; none where there is no driver.

    Honours CUDA_VISIBLE_DEVICES: indices, UUIDs or their unique beginnings, MIG instances. Raises ProbeFailed where
    there is a driver and it fails.
    """
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        return _patiently("cuda", lambda: _cards(pynvml, environment))
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return ()
    except pynvml.NVMLError as error:  # a broken card is no reason to pretend that there is none
        raise ProbeFailed(f"the NVIDIA driver does not answer: {error}.\n  Look at it with:  nvidia-smi",
                          device="cuda") from error


def sample(card: Card, now: float) -> Sample:
    """What the driver says of the card now. Raises ProbeFailed, naming the card."""
    import pynvml

    try:
        return _patiently(card.device.id, lambda: ask(pynvml, card, now))
    except pynvml.NVMLError as error:
        raise ProbeFailed(f"{card.device.id} ({card.device.name}) does not answer: {error}.\n"
                          f"  Look at it with:  nvidia-smi", device=card.device.id) from error


def process_bytes(card: Card, pid: int) -> int | None:
    """What the driver charges to that process on the card; None where it will not say. Raises ProbeFailed."""
    return sample(card, 0.0).processes.get(pid)


def _cards(nvml: Any, environment: Mapping[str, str]) -> tuple[Card, ...]:
    nvml.nvmlInit()
    every = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    names = {_text(nvml.nvmlDeviceGetName(handle)) for handle in every}
    if len(names) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        every = _fastest_first(nvml, every)
    chosen = _visible(nvml, every, environment.get("CUDA_VISIBLE_DEVICES"))
    return tuple(_card(nvml, index, handle) for index, handle in enumerate(chosen))


def _card(nvml: Any, index: int, handle: Any) -> Card:
    total = _or_none(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total)
    if total is None:  # a card that shares the machine's memory has none of its own to tell of
        total = psutil.virtual_memory().total
    return Card(Device(f"cuda:{index}", total, _text(nvml.nvmlDeviceGetName(handle)),
                       _text(nvml.nvmlDeviceGetUUID(handle)), index), handle)


def _visible(nvml: Any, every: list[Any], wanted: str | None) -> list[Any]:
    """The handles that CUDA_VISIBLE_DEVICES names, as CUDA reads it.

    The first wrong entry ends the list, and a card named twice leaves none.
    """
    if wanted is None:
        return [_first_instance(nvml, handle) for handle in every]
    chosen: list[Any] = []
    for entry in (entry.strip() for entry in wanted.split(",")):
        handle = _named(nvml, every, entry)
        if handle is None:
            break
        chosen.append(handle)
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in chosen]
    return chosen if len(set(uuids)) == len(uuids) else []


def _named(nvml: Any, every: list[Any], entry: str) -> Any:
    if entry.isdigit():
        return _first_instance(nvml, every[int(entry)]) if int(entry) < len(every) else None
    if entry.startswith("MIG-"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(entry)
        except nvml.NVMLError:
            return None
    matches = [h for h in every if _text(nvml.nvmlDeviceGetUUID(h)).lower().startswith(entry.lower())] if entry else []
    return _first_instance(nvml, matches[0]) if len(matches) == 1 else None


def _first_instance(nvml: Any, handle: Any) -> Any:
    """The card, or where it is partitioned its first instance: that is all CUDA shows of it."""
    try:
        partitioned = nvml.nvmlDeviceGetMigMode(handle)[0] == 1
        return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0) if partitioned else handle
    except nvml.NVMLError:
        return handle


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


def _fastest_first(nvml: Any, every: list[Any]) -> list[Any]:
    """Cards of several kinds in CUDA's own order. Asked in a child: CUDA, once started here, survives no fork."""
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    try:
        said = subprocess.run([sys.executable, "-c", _CUDA_ORDER], env=environment, capture_output=True, timeout=20,
                              check=True, start_new_session=True).stdout
    except (OSError, subprocess.SubprocessError):
        return every
    place = {uuid: index for index, uuid in enumerate(json.loads(said))}
    return sorted(every, key=lambda handle: place.get(_text(nvml.nvmlDeviceGetUUID(handle)), len(place)))


def every(nvml: Any) -> tuple[tuple[Card, ...], dict[str, str]]:
    """All cards of the machine, of a partitioned one its instances; and by index why others cannot be listed.

    May hang: for a process of which nothing else depends. Raises NVMLError where the driver as a whole fails.
    """
    nvml.nvmlInit()
    cards: list[Card] = []
    failed: dict[str, str] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            cards += [_card(nvml, index, part) for part in _instances(nvml, handle) or [handle]]
        except nvml.NVMLError as error:
            failed[str(index)] = str(error)
    return tuple(cards), failed


def _instances(nvml: Any, handle: Any) -> list[Any]:
    """The parts of a partitioned card; none of a whole one."""
    found: list[Any] = []
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] == 1:
            for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                try:
                    found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))
                except nvml.NVMLError_NotFound:
                    continue
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission, nvml.NVMLError_FunctionNotFound):
        pass
    return found


def ask(nvml: Any, card: Card, now: float) -> Sample:
    """What the driver says of the card. May hang; raises NVMLError."""
    memory = _or_none(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(card.handle).free)
    processes: dict[int, int | None] = {}
    for listing in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in _or_none(nvml, partial(listing, card.handle)) or ():
            processes[process.pid] = process.usedGpuMemory
    utilisation = _or_none(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(card.handle).gpu)
    temperature = _or_none(nvml, lambda: nvml.nvmlDeviceGetTemperature(card.handle, nvml.NVML_TEMPERATURE_GPU))
    return Sample(card.device.id, now, memory, processes, utilisation, temperature)


def _or_none(nvml: Any, ask: Callable[[], T]) -> T | None:
    """The answer, or None where this card or driver does not offer it. Any other failure is the card's."""
    try:
        return ask()
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission, nvml.NVMLError_FunctionNotFound):
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class _Clerk:
    """One daemon thread that talks to the driver, so that a call that never returns holds up nobody else."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.errands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.since: float | None = None  # when the question that is being asked was put
        threading.Thread(target=self._work, name="gpu-nvml", daemon=True).start()

    def _work(self) -> None:
        while True:
            errand = self.errands.get()
            self.since = time.monotonic()
            errand()
            self.since = None

    @property
    def hangs(self) -> bool:
        since = self.since
        return since is not None and time.monotonic() - since > ANSWER_SECONDS


_clerk: _Clerk | None = None


def _patiently(device: str, ask: Callable[[], T]) -> T:
    """The answer, within ANSWER_SECONDS. Raises ProbeFailed where the driver hangs, at once while it still does."""
    global _clerk
    if _clerk is None or _clerk.pid != os.getpid():  # a thread does not survive a fork
        _clerk = _Clerk()
    if _clerk.hangs:
        raise ProbeFailed(f"{device} does not answer: an earlier question to the driver still hangs.", device=device)
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def errand() -> None:
        try:
            answers.put((ask(), None))
        except BaseException as error:
            answers.put((None, error))

    _clerk.errands.put(errand)
    try:
        answer, error = answers.get(timeout=ANSWER_SECONDS)
    except queue.Empty:
        raise ProbeFailed(f"{device} did not answer within {ANSWER_SECONDS:.0f} s; the driver may hang.\n"
                          f"  Look at it with:  nvidia-smi", device=device) from None
    if error is not None:
        raise error
    return answer
