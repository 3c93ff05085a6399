"""NVIDIA's cards, as the tool nvidia-smi describes them, for machines without NVML's package.

One run of the tool reports all cards and takes 0.1 s of a core. So all callers share a report, and
the tool runs at most twice a second. The format of the report is from nvsmi_device_v11.dtd and
v12.dtd.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from xml.etree import ElementTree

import psutil

from .. import forks
from ..facts import Device, Sample
from ..units import GIB, KIB, MIB
from . import nvml
from .drivers import Card, Listing, NoAnswer

KIND, NAME = nvml.KIND, "nvidia-smi"
ALSO_AT = ("/usr/lib/wsl/lib/nvidia-smi",)  # under WSL this directory may be missing in PATH
SECONDS = 4.0  # time limit of a run; if eight cards are asleep, a run takes 2 s
SHARED_SECONDS = 0.5
visible = nvml.visible

Element = ElementTree.Element


class SmiReport(NamedTuple):
    """A report of the tool, and the time when the tool's run began (monotonic clock)."""

    began: float
    root: Element


def list_cards() -> Listing:
    """All cards; a partitioned card is replaced by its instances. Raises NoAnswer."""
    here = sys.modules[__name__]
    if _tool() is None:
        return Listing(here, absent="there is no nvidia-smi")
    cards: list[Card] = []
    failed: dict[str, str] = {}
    for index, gpu in enumerate(_report().root.iterfind("gpu")):
        try:
            cards += _card_or_instances(index, gpu)
        except NoAnswer as error:
            failed[str(index)] = str(error)
    return Listing(here, tuple(cards), failed)


def _card_or_instances(index: int, gpu: Element) -> list[Card]:
    """The card, or all instances of a partitioned card. Raises NoAnswer if it has no instances."""
    uuid = gpu.findtext("uuid", "").strip()
    name = gpu.findtext("product_name", "").strip()
    if _text(gpu, "mig_mode/current_mig") != "Enabled":
        return [_whole_card(index, gpu, uuid, name)]
    instances = []
    for instance in gpu.iterfind("mig_devices/mig_device"):
        total = _bytes(_text(instance, "fb_memory_usage/total"))
        if total is None:
            continue
        position = int(instance.findtext("index", "0"))
        own_uuid = _text(instance, "uuid")
        if not own_uuid:
            own_uuid = _instance_uuids().get((index, position), f"{uuid}/{position}")
        device = Device(f"{KIND}:{index}.{position}", total, f"{name} MIG", own_uuid, index)
        instances.append(Card(device, uuid, uuid))
    if not instances:
        raise NoAnswer("it is partitioned (MIG), and has no instance")
    return instances


def _whole_card(
    index: int,
    gpu: Element,
    uuid: str,
    name: str,
) -> Card:
    total = _bytes(_text(gpu, "fb_memory_usage/total"))
    unified = False
    if total is None:
        integrated = nvml.INTEGRATED.search(name) or _text(gpu, "addressing_mode") == "ATS"
        if not integrated:
            raise NoAnswer("it does not report how much memory it has")
        unified = True
        total = psutil.virtual_memory().total
    device = Device(
        f"{KIND}:{index}",
        total,
        name,
        uuid,
        index,
        unified=unified,
    )
    return Card(device, uuid, uuid)


def _instance_uuids() -> dict[tuple[int, int], str]:
    """Maps (card, position) to the UUID of an instance. Some drivers' reports lack these UUIDs."""
    found, index = {}, -1
    for line in _run("-L").splitlines():
        card = re.match(r"GPU (\d+):", line)
        instance = re.match(r"\s+MIG .*Device\s+(\d+): \(UUID: (MIG-[^)]+)\)", line)
        if card:
            index = int(card[1])
        elif instance:
            found[index, int(instance[1])] = instance[2]
    return found


def measure(card: Card, now: float) -> Sample:
    """The tool's figures of the `card`. Raises NoAnswer.

    Several callers share one report, so nvidia-smi may have started shortly before `now`. The
    sample's time is the start of nvidia-smi.
    """
    asked = time.monotonic()
    report = _report()
    gpu = _gpu(report.root, card)
    part = _part(gpu, card) if card.is_part else gpu
    if card.device.unified:
        free: int | None = psutil.virtual_memory().available
    else:
        free = _bytes(_text(part, "fb_memory_usage/free"))
    return Sample(
        card.device.id,
        now - max(0.0, asked - report.began),
        free,
        dict(_processes(gpu, part if card.is_part else None)),
        None if card.is_part else _number(_text(gpu, "utilization/gpu_util")),
        _number(_text(gpu, "temperature/gpu_temp")),
        _watts(gpu),
    )


def _gpu(root: Element, card: Card) -> Element:
    """The element of the physical card in the report. Raises NoAnswer if it is missing."""
    for gpu in root.iterfind("gpu"):
        if gpu.findtext("uuid", "").strip() == card.whole:
            return gpu
    raise NoAnswer("nvidia-smi no longer lists it")


def _part(gpu: Element, card: Card) -> Element:
    """The element of an instance in the report. Raises NoAnswer if it is missing."""
    position = card.device.id.rpartition(".")[2]
    for instance in gpu.iterfind("mig_devices/mig_device"):
        if instance.findtext("index") == position:
            return instance
    raise NoAnswer("nvidia-smi no longer lists this instance")


_POWER = (
    "gpu_power_readings/instant_power_draw",
    "gpu_power_readings/power_draw",
    "power_readings/power_draw",
)


def _watts(gpu: Element) -> float | None:
    for path in _POWER:
        text = _text(gpu, path)
        if text:
            return _number(text)
    return None


def _processes(gpu: Element, part: Element | None) -> Iterator[tuple[int, int | None]]:
    """Yields (pid, bytes) for each process on the card, or on the instance `part` if given."""
    instance = None if part is None else part.findtext("gpu_instance_id")
    for process in gpu.iterfind("processes/process_info"):
        if part is None or process.findtext("gpu_instance_id") == instance:
            yield int(process.findtext("pid", "0")), _bytes(_text(process, "used_memory"))


def versions() -> dict[str, str]:
    """The versions of driver and CUDA. Raises NoAnswer."""
    root = _report().root
    return {
        "driver": root.findtext("driver_version", "unknown"),
        "CUDA": root.findtext("cuda_version", "unknown"),
    }


# -- one run for all callers -----------------------------------------------------------------------

_running = forks.freed(threading.Lock())
_last: tuple[float, SmiReport | NoAnswer] | None = None  # when the tool was run, and its result


def _report() -> SmiReport:
    """The tool's report, at most SHARED_SECONDS old. Raises NoAnswer."""
    global _last
    with _running:
        if _last is None or time.monotonic() - _last[0] > SHARED_SECONDS:
            began = time.monotonic()
            try:
                result: SmiReport | NoAnswer = SmiReport(began, _parse(_run("-q", "-x")))
            except NoAnswer as error:
                result = error
            _last = began, result
        result = _last[1]
        if isinstance(result, NoAnswer):
            raise NoAnswer(*result.args)  # a new error, without the traceback of earlier callers
        return result


def _parse(text: str) -> Element:
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise NoAnswer(f"nvidia-smi printed no valid report ({error})") from error


def _tool() -> str | None:
    """The path of the tool; None if the tool is not installed."""
    for name in ("nvidia-smi", *ALSO_AT):
        path = shutil.which(name)
        if path:
            return path
    return None


def _run(*arguments: str) -> str:
    """The tool's output. Raises NoAnswer if the tool fails or does not end within SECONDS.

    A run that hangs in the driver cannot be killed, so this function stops waiting for it.
    """
    tool = _tool()
    if tool is None:
        raise NoAnswer("there is no nvidia-smi any more")
    try:
        process = subprocess.Popen(
            [tool, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise NoAnswer(f"nvidia-smi cannot be started ({error.strerror})") from error
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise NoAnswer(f"nvidia-smi did not answer within {SECONDS:.0f} s") from None
    if process.returncode:
        message = " ".join(output.split())[:300]
        raise NoAnswer(message or f"nvidia-smi failed ({process.returncode})")
    return output


# Texts that the tool prints for an unknown value, such as `[N/A]` or `Not available in WDDM…`.
_UNKNOWN = re.compile(
    r"\[?(n/a|not (available|supported)|unknown|insufficient|error)", re.IGNORECASE
)


def _text(element: Any, path: str) -> str:
    """The text at this `path`; empty if the element is missing or its value is unknown."""
    text = (element.findtext(path) or "").strip()
    return "" if _UNKNOWN.match(text) else text


_UNITS: Mapping[str, int] = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}


def _bytes(text: str) -> int | None:
    match = re.fullmatch(r"(\d+) (B|[KMG]iB)", text)
    return int(match[1]) * _UNITS[match[2]] if match else None


def _number(text: str) -> float | None:
    match = re.match(r"-?\d+(\.\d+)?", text)
    return float(match[0]) if match else None
