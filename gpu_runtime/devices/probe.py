"""The devices of this machine: their names, their free memory, and this process's bytes on them.

The cards are listed once, with a time limit on their drivers. The host's helper process measures
the cards' figures (`follow`). A runtime that shares its book with no other process measures the
figures itself. Simulated cards count their own bytes. Nothing here decides.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
from msgspec.structs import replace

from ..errors import BadSetting, BadSize, ProbeFailed, UnknownDevice
from ..facts import HOST, AllocatorMap, Device, Sample
from ..safe_text import quoted
from ..units import GIB, KIB, parse_bytes
from . import allocators, drivers
from .drivers import Card, Listing
from .process_memory import Memory
from .sampler_client import Sampling, boot_seconds

log = logging.getLogger("gpu_runtime")
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
FIRST_SECONDS = 3.0  # the longest wait until a new helper has measured for the first time
RENEWAL_SECONDS = 10.0  # the longest wait for what a process holds now, as after its load


class Probe:
    """The devices of this machine, the host last, and this process's memory on each device. Thread-safe."""

    def __init__(self, devices: tuple[Device, ...], listing: Listing | None = None) -> None:
        self.devices = devices
        self.listing = listing  # the real cards
        cards = listing.cards if listing else ()
        self.simulated = not cards
        self._cards = {card.device.id: card for card in cards}
        self._memories = {device.id: self._memory(device) for device in devices}
        self._sampling: Sampling | None = None

    @property
    def cards(self) -> list[Device]:
        """The devices without host memory."""
        return [device for device in self.devices if not device.is_host]

    def rename(self, names: Mapping[str, str]) -> None:
        """Renames the cards: `names` maps this process's id of a card to its id in the book.

        Call this method before any memory is held, because a Memory keeps its first name.
        """
        self.devices = tuple(_renamed(device, names) for device in self.devices)
        cards = [old._replace(device=_renamed(old.device, names)) for old in self._cards.values()]
        self._cards = {card.device.id: card for card in cards}
        self._memories = {device.id: self._memory(device) for device in self.devices}

    def follow(self, directory: Path | None, ledger: str = "") -> None:
        """From now on, reads the figures of real cards from the helper's files in `directory`.

        If `directory` is None, this process measures by itself. `ledger` is the URL of the ledger
        whose history the helper records; empty for none. Waits a moment for the first figures.
        """
        self._sampling = None
        if directory is not None and self._cards:
            self._sampling = Sampling(directory, ledger)
            self._sampling.wait(FIRST_SECONDS)

    def _memory(self, device: Device) -> Memory:
        card = self._cards.get(device.id)
        if card is not None:
            return Memory(device.id, None, simulated=False, torch=card.torch)
        pinned = bool(self._cards)
        return Memory(device.id, device.total_bytes, simulated=device.simulated, pinned=pinned)

    def place(self, device: str) -> Memory:
        """This process's memory on the device with the id `device`. Raises UnknownDevice."""
        try:
            return self._memories[device]
        except KeyError:
            raise UnknownDevice(device, tuple(self._memories)) from None

    def named(self, torch: str) -> str:
        """The book's id of a device. `torch` is torch's name for it in this process, such as `cuda:0`.

        The name `cpu` stands for the host. Raises UnknownDevice for any other name.
        """
        if torch == "cpu":
            return HOST
        for id, card in self._cards.items():
            if card.torch == torch:
                return id
        raise UnknownDevice(torch, tuple(self._memories))

    def numbers(self) -> dict[str, int]:
        """The number of each whole card in the vendor's own order, by the book's id.

        Empty if some card cannot be listed: CUDA may leave it out, and then it numbers the others differently.
        """
        if self.listing is None or self.listing.failed:
            return {}
        own = {card.device.uuid: card.device.index for card in self.listing.cards}
        cards = self._cards.items()
        return {id: own[card.device.uuid] for id, card in cards if not card.is_part}

    # -- figures

    def samples(self, now: float, fresh: bool = False) -> dict[str, Sample]:
        """Maps device ids to the last figures from the driver; for `host`, from the machine.

        If `fresh` is true, new figures are requested, and returned if the helper answers at once.
        `now` is the time of samples that this process takes itself; then ProbeFailed is raised for
        a device that does not answer. Simulated devices have no sample.
        """
        if self._sampling:
            figures = self._sampling.fresh() if fresh else self._sampling.figures()
            if figures is None:
                return {}
            found = {id: figures.of(card.device) for id, card in self._cards.items()}
            return {**{id: sample for id, sample in found.items() if sample}, HOST: figures.host}
        samples = {id: self._measure(card, now) for id, card in self._cards.items()}
        if not self._memories[HOST].simulated:
            samples[HOST] = Sample(HOST, now, psutil.virtual_memory().available)
        return samples

    def _measure(self, card: Card, now: float) -> Sample:
        assert self.listing is not None
        return drivers.sample(card, self.listing.source, now)

    def look_after(self) -> None:
        """Starts the host's helper if no helper runs. Ends a helper that hangs. Never waits."""
        if self._sampling:
            self._sampling.look_after()

    def trouble(self, stale_seconds: float) -> str:
        """Sentences about the cards that cannot be used, or not measured for `stale_seconds`."""
        failed = self.listing.failed if self.listing else {}
        unused = (f"card {number} cannot be used: {why}" for number, why in failed.items())
        return "; ".join(dict.fromkeys([*self._troubles(stale_seconds).values(), *unused]))

    def check(self, now: float, stale_seconds: float) -> None:
        """Raises ProbeFailed if the helper measures no card; without a helper, if any card fails.

        `now` is as in `samples`, and `stale_seconds` as in `trouble`.
        """
        if not self._sampling:
            self.samples(now)
            return
        why = self._troubles(stale_seconds).get("")
        if why:
            raise ProbeFailed(why, device=next(iter(self._cards)))

    def _troubles(self, stale_seconds: float) -> dict[str, str]:
        if not self._sampling:
            return {}
        names = {card.device.uuid: f"{id} ({card.device.name})" for id, card in self._cards.items()}
        return self._sampling.trouble(stale_seconds, names)

    def people(self) -> dict[int, tuple[str, str]]:
        """Maps pids of processes on the cards to user and command, if the helper knows them."""
        figures = self._sampling.figures() if self._sampling else None
        return figures.programs if figures else {}

    def helper(self) -> dict[str, str]:
        """The state of the host's helper process, for a report; empty without a helper."""
        return self._sampling.state() if self._sampling else {}

    # -- bytes of this process

    def used(self) -> dict[str, int]:
        """Bytes that this process holds on each device.

        The bytes are those of this process's allocators. On a card, the CUDA context is included if
        the driver reports it. Raises ProbeFailed if this process measures by itself and a driver fails.
        """
        held = {id: memory.held_bytes() for id, memory in self._memories.items()}
        for id, card in self._cards.items():
            held[id] = max(_torch_reserved(card), self._charged(card))
        return held

    def contexts(self) -> dict[str, int]:
        """Bytes of this process on each real card beyond torch's allocator: its CUDA context.

        0 if there is none, or if the driver does not report it. Other engines in this process are
        included.
        """
        if _started_cuda() is None:
            return dict.fromkeys(self._cards, 0)
        cards = self._cards.items()
        return {id: max(0, self._charged(card) - _torch_reserved(card)) for id, card in cards}

    def measured_at(self, device: str) -> float:
        """When the driver's figures of `contexts` were measured, in seconds since boot; 0 if they were not."""
        if not self._sampling:
            return boot_seconds()
        card, figures = self._cards.get(device), self._sampling.figures()
        sample = figures.cards.get(card.device.uuid) if card and figures else None
        return sample.taken_at if sample else 0.0

    def beyond_torch(self) -> dict[str, int]:
        """Bytes of each real card that torch cannot take: `contexts`, and what the driver keeps for itself."""
        found, cuda = self.contexts(), _started_cuda()
        for id, number in self._numbered() if cuda else ():
            total = allocators.total_bytes(cuda, f"cuda:{number}")
            found[id] += max(0, self._cards[id].device.total_bytes - total)
        return found

    def watch_peaks(self) -> None:
        """Resets torch's record of its highest use of each card; see `beyond_now`."""
        cuda = _started_cuda() if self._cards else None
        if cuda is None:
            return
        for _, number in self._numbered():
            allocators.reset_peak(cuda, f"cuda:{number}")

    def beyond_now(self, device: str) -> int | None:
        """Bytes by which torch's highest use since `watch_peaks` is above the present one; None if unknown."""
        cuda, number = _started_cuda(), dict(self._numbered()).get(device)
        if cuda is None or number is None:
            return None
        return cuda.max_memory_allocated(number) - cuda.memory_allocated(number)

    def charged(self, pids: Iterable[int], devices: Iterable[str]) -> dict[str, int]:
        """Maps each real card of `devices` to the bytes that the driver reports now for the processes `pids`.

        They include the processes' CUDA contexts, and are 0 if the driver reports none. Waits until the helper has
        measured the cards after this call: earlier figures show a load's middle.
        """
        cards = {id: self._cards[id] for id in devices if id in self._cards}
        if self._sampling and cards:
            uuids = [card.device.uuid for card in cards.values()]
            self._sampling.wait(RENEWAL_SECONDS, oldest=0.0, cards=uuids)
        pids = tuple(pids)
        return {id: sum(self._charged(card, pid) for pid in pids) for id, card in cards.items()}

    def _charged(self, card: Card, pid: int = 0) -> int:
        """Bytes that the driver reports on a card for the process `pid` (0: this one); else 0.

        In a container, some drivers report the pids of the host. Then the result is 0 too, unless a
        process of the host has the number `pid`: nothing tells it from this process.
        """
        pid = pid or os.getpid()
        if self._sampling is None:
            return self._measure(card, 0.0).processes.get(pid) or 0
        figures = self._sampling.figures()
        sample = figures.cards.get(card.device.uuid) if figures else None
        return (sample.processes.get(pid) if sample else None) or 0

    # -- torch and the allocators

    def bound(self, device: str, fraction: float) -> bool:
        """Limits torch in this process to the given `fraction` of the `device`.

        Returns whether the limit was set. It is not set before this process uses the card, since some versions
        of torch would create a CUDA context there.
        """
        cuda, number = _started_cuda(), dict(self._numbered()).get(device)
        if cuda is None or number is None or not _has_context(number):
            return False
        card, total = f"cuda:{number}", self._cards[device].device.total_bytes
        allocators.limit(cuda, card, allocators.part_of(cuda, card, round(fraction * total)))
        return True

    def maps(self) -> tuple[AllocatorMap, ...]:
        """A map of each used allocator of this process: simulated cards, and torch's for CUDA and ROCm."""
        cuda = _started_cuda() if self._cards else None
        if cuda is None:
            maps = [self._memories[id].map() for id in self._simulated()]
        elif not allocators.lists_blocks(cuda):
            return ()
        else:
            snapshot = cuda.memory_snapshot(**_without_traces(cuda.memory_snapshot))
            maps = []
            for id, number in self._numbered():
                stats = cuda.memory_stats(number)
                maps.append(allocators.of_torch(id, number, snapshot, stats))
        return tuple(map for map in maps if map.reserved_bytes or map.alloc_retries or map.ooms)

    def pulse(self) -> tuple[object, ...]:
        """A value that changes when the maps change, and costs far less than the maps."""
        cuda = _started_cuda() if self._cards else None
        if cuda is None:
            return tuple(self._memories[id].pulse() for id in self._simulated())
        counters = (cuda.memory_stats(number) for _, number in self._numbered())
        return tuple(tuple(stats.get(name, 0) for name in _PULSE) for stats in counters)

    def _simulated(self) -> list[str]:
        return [card.id for card in self.cards if card.simulated]

    def _numbered(self) -> list[tuple[str, int]]:
        """The cards that torch's CUDA allocator serves, with torch's numbers in this process."""
        pairs = [(id, card.torch.partition(":")) for id, card in self._cards.items()]
        return [(id, int(number)) for id, (kind, _, number) in pairs if kind == "cuda"]

    def empty_cache(self) -> int:
        """Releases memory that this process keeps for reuse, on cards and on the host: its bytes."""
        released = sum(memory.empty_cache() for memory in self._memories.values())
        cuda, before = _started_cuda(), self._torch_reserved()
        if cuda is not None and before:
            # torch empties the caches of all cards in one call. The call would create a CUDA
            # context on the current card, so a card that torch already uses is made current.
            with cuda.device(next(iter(before))):
                cuda.empty_cache()
            released += sum(before.values()) - sum(self._torch_reserved().values())
        return released

    def _torch_reserved(self) -> dict[str, int]:
        """The bytes that torch's allocator has reserved, by torch's names of the cards."""
        reserved = {card.torch: _torch_reserved(card) for card in self._cards.values()}
        return {name: size for name, size in reserved.items() if size}


def _renamed(device: Device, names: Mapping[str, str]) -> Device:
    id = names.get(device.id, device.id)
    if id == device.id:
        return device
    number = id.partition(":")[2].partition(".")[0]
    return replace(device, id=id, index=int(number))


# -- GPU_DEVICES ---------------------------------------------------------------------------------


EXPECTED = (
    "auto, cuda, cuda:0,2, rocm, metal, sim:24GiB, sim:24GiB+12GiB, sim:2x24GiB or "
    "sim:2x24GiB,host:64GiB"
)
KINDS = {"cuda": "CUDA card", "rocm": "ROCm card", "metal": "Apple GPU"}
_MOST_CARDS = 64
_LARGEST = 2**50  # bytes of one simulated device
_SEVERAL = re.compile(r"([0-9]{1,9})x(.+)")  # 2x24GiB


def open_probe(
    devices: str = "auto", *, cpu_only: bool = False, environment: Mapping[str, str] = os.environ
) -> Probe:
    """The probe of the devices that the text `devices` names.

    - `auto`: the cards that this process sees in this `environment`. If the process sees no card,
      or if `cpu_only` is set: one simulated card with half of this machine's memory.
    - `cuda`, `rocm`, `metal`: all cards of the named kind, or an error.
    - `cuda:0,2` or `cuda:GPU-8a41`: the listed cards of the named kind.
    - `sim:2x24GiB,host:64GiB`: two simulated cards and a simulated host. Without `host:`, the host
      is this machine's memory. `sim:24GiB+12GiB`: cards of different sizes.

    If variables such as CUDA_VISIBLE_DEVICES hide all cards, a warning is logged.

    Raises BadSetting for any other text, and ProbeFailed if a driver is installed and fails.
    """
    text = devices.strip().lower()
    if text.startswith("sim:"):
        return Probe(_simulated_devices(devices, text))
    kind, _, wanted = text.partition(":")
    names_cards = kind in KINDS and not text.endswith(":")
    if text != "auto" and not names_cards:
        raise BadSetting("GPU_DEVICES", devices, EXPECTED)
    listing = None
    if not cpu_only:
        listing = drivers.visible_cards(environment, "" if kind == "auto" else kind)
    if wanted and listing:
        listing = listing._replace(cards=_chosen(devices, wanted, listing.cards))
    if listing and listing.cards:
        return Probe((*(card.device for card in listing.cards), host_device()), listing)
    if kind != "auto":
        why = f"no {KINDS[kind]} is visible here"
        if cpu_only:
            why = "DEVELOPMENT_CPU_ONLY forbids it"
        expected = f"auto or sim:24GiB on this machine, since {why}"
        raise BadSetting("GPU_DEVICES", devices, expected)
    if listing:
        log.warning("%s", _hidden(listing, environment))
    half = max(GIB, psutil.virtual_memory().total // 2 // GIB * GIB)
    return Probe((_simulated_card(0, half), host_device()))


def _hidden(listing: Listing, environment: Mapping[str, str]) -> str:
    """The warning that this process sees none of the machine's cards."""
    found = (f"{name}={quoted(environment[name])}" for name in _HIDING if name in environment)
    return (
        f"this process sees no {KINDS[listing.kind]} of this machine, so its devices are simulated. "
        f"They are hidden by {', '.join(found) or 'the driver'}.\n"
        f"  Use the cards:  unset the variable      or, to simulate:  GPU_DEVICES=sim:24GiB"
    )


def _chosen(given: str, wanted: str, visible: tuple[Card, ...]) -> tuple[Card, ...]:
    """The `visible` cards that the text `wanted` selects, a part of the setting `given`.

    `wanted` lists numbers (`0,2`), UUIDs, or unique beginnings of UUIDs. A number is the driver's
    own number of a card, as in `cuda:2` and nvidia-smi. Raises BadSetting if an entry names no card.
    """
    found: list[Card] = []
    for entry in wanted.split(","):
        entry = entry.strip()
        matches = [card for card in visible if entry and _is_called(card, entry)]
        if len(matches) != 1:
            here = ", ".join(f"{card.device.id} ({card.device.uuid})" for card in visible) or "none"
            raise BadSetting(
                "GPU_DEVICES",
                given,
                f"numbers or UUIDs of cards that this process sees, and {entry or 'nothing'!r} is "
                f"none of them; it sees {here}",
            )
        if matches[0] not in found:
            found.append(matches[0])
    return tuple(found)


def _is_called(card: Card, entry: str) -> bool:
    number = card.device.id.partition(":")[2]
    return number == entry or card.device.uuid.lower().startswith(entry.lower())


def _simulated_devices(given: str, text: str) -> tuple[Device, ...]:
    """The devices of a `sim:` text, the host last. Raises BadSetting, with the setting as it was `given`."""
    try:
        card_sizes, host_bytes = _parsed(text)
    except BadSize:
        raise BadSetting("GPU_DEVICES", given, EXPECTED) from None
    sizes = card_sizes if host_bytes is None else [*card_sizes, host_bytes]
    possible = all(KIB <= size <= _LARGEST for size in sizes)
    if not possible or not 0 < len(card_sizes) <= _MOST_CARDS:
        raise BadSetting("GPU_DEVICES", given, EXPECTED)
    cards = [_simulated_card(index, size) for index, size in enumerate(card_sizes)]
    return *cards, host_device(host_bytes)


def _parsed(text: str) -> tuple[list[int], int | None]:
    """The bytes of each card of a `sim:` text, and of the host (None if it does not name them). Raises BadSize."""
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


def _simulated_card(index: int, size: int) -> Device:
    return Device(f"sim:{index}", size, "simulated", f"SIM-{index}", index, simulated=True)


def host_device(simulated_bytes: int | None = None) -> Device:
    """This machine's memory, or a simulated host of `simulated_bytes`."""
    if simulated_bytes is not None:
        return Device(HOST, simulated_bytes, "simulated RAM", simulated=True)
    return Device(HOST, psutil.virtual_memory().total, "RAM")


def check_index(index: int | None, devices: Iterable[Device]) -> None:
    """Raises BadSetting if no card among `devices` has the `index` (INFERENCE_GPU_INDEX)."""
    cards = [device for device in devices if not device.is_host]
    if index is not None and index not in {card.index for card in cards}:
        known = ", ".join(f"{card.index} ({card.id})" for card in cards)
        wanted = f"the index of a GPU that this process sees: {known}"
        raise BadSetting("INFERENCE_GPU_INDEX", index, wanted)


# -- torch ---------------------------------------------------------------------------------------


def _started_cuda():
    """torch.cuda if this process already uses CUDA, else None. This function never starts CUDA.

    The result is also None if torch's allocator was replaced by one that counts no bytes.
    `torch.cuda.is_available()` is not called, because it starts the driver. After that, no forked
    child of this process could use CUDA.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized() or not allocators.counts_bytes(cuda):
        return None
    return cuda


def _has_context(number: int) -> bool:
    """Whether this process has a CUDA context on the card that torch calls `cuda:NUMBER`."""
    return sys.modules["torch"]._C._cuda_hasPrimaryContext(number)


def _torch_reserved(card: Card) -> int:
    cuda = _started_cuda()
    return cuda.memory_reserved(card.torch) if cuda and card.torch.startswith("cuda") else 0


# Every action of an allocator changes one of these counters.
_PULSE = (
    *("allocation.all.allocated", "allocation.all.freed", "segment.all.allocated"),
    *("segment.all.freed", "active_bytes.all.current", "reserved_bytes.all.current"),
    *("num_alloc_retries", "num_ooms"),
)


def _without_traces(snapshot: Callable[..., Any]) -> dict[str, bool]:
    """Arguments for `snapshot` that leave out the user's traces; older versions of torch have none."""
    if "include_traces" in inspect.signature(snapshot).parameters:
        return {"include_traces": False}
    return {}
