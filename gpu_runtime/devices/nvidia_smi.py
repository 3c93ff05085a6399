"""NVIDIA's cards, as the tool nvidia-smi tells of them: for where the library or its Python binding is missing.

One run of the tool answers for all cards, so runs are shared: a tenth of a second of a core each, at most two a second.
Source of the report's form: nvsmi_device_v11.dtd and v12.dtd.
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

from ..facts import Device, Sample
from ..units import GIB, KIB, MIB
from . import nvml
from .drivers import Card, Listing, NoAnswer

KIND, NAME = nvml.KIND, "nvidia-smi"
ALSO_AT = ("/usr/lib/wsl/lib/nvidia-smi",)  # WSL does not put it on every PATH
SECONDS = 4.0  # for one run; waking eight cards that nobody uses takes two
SHARED_SECONDS = 0.5
visible = nvml.visible


class SmiReport(NamedTuple):
    """What the tool said, and when it was asked, by the monotonic clock."""

    began: float
    root: ElementTree.Element


def list_cards() -> Listing:
    """All cards, of a partitioned one its instances. Raises NoAnswer."""
    here = sys.modules[__name__]
    if _tool() is None:
        return Listing(here, absent="there is no nvidia-smi")
    cards: list[Card] = []
    failed: dict[str, str] = {}
    for index, gpu in enumerate(_report().root.iterfind("gpu")):
        try:
            cards += _of_one(index, gpu)
        except NoAnswer as error:
            failed[str(index)] = str(error)
    return Listing(here, tuple(cards), failed)


def _of_one(index: int, gpu: ElementTree.Element) -> list[Card]:
    uuid, name = gpu.findtext("uuid", "").strip(), gpu.findtext("product_name", "").strip()
    if _said(gpu, "mig_mode/current_mig") != "Enabled":
        total = _bytes(_said(gpu, "fb_memory_usage/total"))
        unified = total is None and bool(
            nvml.INTEGRATED.search(name) or _said(gpu, "addressing_mode") == "ATS"
        )
        if unified:
            total = psutil.virtual_memory().total
        if total is None:
            raise NoAnswer("it does not say how much memory it has")
        return [
            Card(Device(f"{KIND}:{index}", total, name, uuid, index, unified=unified), uuid, uuid)
        ]
    parts = []
    for instance in gpu.iterfind("mig_devices/mig_device"):
        place, total = (
            int(instance.findtext("index", "0")),
            _bytes(_said(instance, "fb_memory_usage/total")),
        )
        if total is not None:
            id = _said(instance, "uuid") or _instance_uuids().get((index, place), f"{uuid}/{place}")
            parts.append(
                Card(Device(f"{KIND}:{index}.{place}", total, f"{name} MIG", id, index), uuid, uuid)
            )
    if not parts:
        raise NoAnswer("it is partitioned (MIG), and has no instance")
    return parts


def _instance_uuids() -> dict[tuple[int, int], str]:
    """By card and place. Some drivers leave them out of the report."""
    found, index = {}, -1
    for line in _run("-L").splitlines():
        if match := re.match(r"GPU (\d+):", line):
            index = int(match[1])
        elif match := re.match(r"\s+MIG .*Device\s+(\d+): \(UUID: (MIG-[^)]+)\)", line):
            found[index, int(match[1])] = match[2]
    return found


def measure(card: Card, now: float) -> Sample:
    """What the tool says of the card; it may have been asked a moment before `now`, and then the sample is of then.
    Raises NoAnswer."""
    asked = time.monotonic()
    report = _report()
    gpu = next(
        (
            gpu
            for gpu in report.root.iterfind("gpu")
            if gpu.findtext("uuid", "").strip() == card.whole
        ),
        None,
    )
    if gpu is None:
        raise NoAnswer("nvidia-smi no longer lists it")
    part = _part(gpu, card) if card.is_part else gpu
    if part is None:
        raise NoAnswer("nvidia-smi no longer lists this instance")
    free = (
        psutil.virtual_memory().available
        if card.device.unified
        else _bytes(_said(part, "fb_memory_usage/free"))
    )
    processes = dict(_processes(gpu, part if card.is_part else None))
    return Sample(
        card.device.id,
        now - max(0.0, asked - report.began),
        free,
        processes,
        None if card.is_part else _number(_said(gpu, "utilization/gpu_util")),
        _number(_said(gpu, "temperature/gpu_temp")),
        _number(next((said for path in _POWER if (said := _said(gpu, path))), "")),
    )


_POWER = (
    "gpu_power_readings/instant_power_draw",
    "gpu_power_readings/power_draw",
    "power_readings/power_draw",
)


def _part(gpu: ElementTree.Element, card: Card) -> ElementTree.Element | None:
    place = card.device.id.rpartition(".")[2]
    return next(
        (one for one in gpu.iterfind("mig_devices/mig_device") if one.findtext("index") == place),
        None,
    )


def _processes(
    gpu: ElementTree.Element, part: ElementTree.Element | None
) -> Iterator[tuple[int, int | None]]:
    """Of an instance, those that run on it."""
    for process in gpu.iterfind("processes/process_info"):
        if part is None or process.findtext("gpu_instance_id") == part.findtext("gpu_instance_id"):
            yield int(process.findtext("pid", "0")), _bytes(_said(process, "used_memory"))


def versions() -> dict[str, str]:
    """Raises NoAnswer."""
    root = _report().root
    return {
        "driver": root.findtext("driver_version", "unknown"),
        "CUDA": root.findtext("cuda_version", "unknown"),
    }


# -- one run for all who ask -----------------------------------------------------------------------------------------

_running = threading.Lock()
_last: tuple[float, SmiReport | NoAnswer] | None = (
    None  # when the tool was asked, and what came of it
)


def _report() -> SmiReport:
    """The tool's report, at most SHARED_SECONDS old. Raises NoAnswer."""
    global _last
    with _running:
        if _last is None or time.monotonic() - _last[0] > SHARED_SECONDS:
            began = time.monotonic()
            try:
                said: SmiReport | NoAnswer = SmiReport(began, _read(_run("-q", "-x")))
            except NoAnswer as error:
                said = error
            _last = began, said
        if isinstance(_last[1], NoAnswer):
            raise _last[1]
        return _last[1]


def _read(text: str) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise NoAnswer(f"nvidia-smi said what is no report ({error})") from error


def _tool() -> str | None:
    return next((path for path in map(shutil.which, ("nvidia-smi", *ALSO_AT)) if path), None)


def _run(*arguments: str) -> str:
    """What the tool said. One that hangs in the driver cannot be ended, so it is left behind. Raises NoAnswer."""
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
        said, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise NoAnswer(f"nvidia-smi did not answer within {SECONDS:.0f} s") from None
    if process.returncode:
        raise NoAnswer(" ".join(said.split())[:300] or f"nvidia-smi failed ({process.returncode})")
    return said


def _said(element: Any, path: str) -> str:
    """The text there; empty for nothing, and for what the tool does not know: N/A, [N/A], Not available in WDDM…"""
    text = (element.findtext(path) or "").strip()
    return (
        ""
        if re.match(
            r"\[?(n/a|not (available|supported)|unknown|insufficient|error)", text, re.IGNORECASE
        )
        else text
    )


_UNITS: Mapping[str, int] = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}


def _bytes(text: str) -> int | None:
    match = re.fullmatch(r"(\d+) (B|[KMG]iB)", text)
    return int(match[1]) * _UNITS[match[2]] if match else None


def _number(text: str) -> float | None:
    match = re.match(r"-?\d+(\.\d+)?", text)
    return float(match[0]) if match else None
