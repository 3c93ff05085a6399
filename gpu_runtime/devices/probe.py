"""The devices of this machine: which there are, how full they are, and what this process holds of them.

Which cards there are their drivers are asked once, with a time limit. How full they are is read from what the host's
helper process measures (`follow`); only a runtime that shares its book with nobody asks for itself. Simulated cards
keep their own account. Nothing here decides anything.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from msgspec.structs import replace

from ..errors import BadSetting, BadSize, ProbeFailed, UnknownDevice
from ..facts import HOST, AllocatorMap, Device, Sample
from ..ledgers.liveness import name_of
from ..units import GIB, KIB, parse_bytes
from . import allocator_stats
from . import drivers as cards
from .drivers import Card, Listing
from .process_memory import Memory
from .sampler_client import Sampling

_EXPECTED = "auto, cuda, cuda:0,2, rocm, metal, sim:24GiB, sim:2x24GiB or sim:2x24GiB,host:64GiB"
KINDS = {"cuda": "CUDA card", "rocm": "ROCm card", "metal": "Apple GPU"}
_MOST_CARDS = 64
FIRST_SECONDS = 3.0  # for a helper to start and measure for the first time


class Probe:
    """The devices of this machine, host last, and this process's memory on each. Thread-safe."""

    def __init__(self, devices: tuple[Device, ...], listing: Listing | None = None) -> None:
        self.devices = devices
        self.listing = listing  # where its real cards come from
        cards = listing.cards if listing else ()
        self.simulated = not cards
        self._cards = {card.device.id: card for card in cards}
        self._memories = {device.id: self._memory(device) for device in devices}
        self._sampling: Sampling | None = None

    def rename(self, names: Mapping[str, str]) -> None:
        """Calls its cards what the book calls them (ours -> the book's). Before anything is held: places keep names."""
        self.devices = tuple(_renamed(device, names) for device in self.devices)
        self._cards = {
            names.get(id, id): card._replace(device=_renamed(card.device, names))
            for id, card in self._cards.items()
        }
        self._memories = {device.id: self._memory(device) for device in self.devices}

    def follow(self, directory: Path | None, ledger: str = "") -> None:
        """From now on real cards are what the host's helper says of them, in that directory; None: asked from here.
        What they were used for it writes down, if it is told which ledger that is.

        Starts a helper where there is none, and waits a moment for its first figures.
        """
        self._sampling = (
            Sampling(directory, ledger) if directory is not None and self._cards else None
        )
        if self._sampling:
            self._sampling.first(FIRST_SECONDS)

    def _memory(self, device: Device) -> Memory:
        if device.id in self._cards:
            return Memory(device.id, None, simulated=False, torch=self._cards[device.id].torch)
        return Memory(
            device.id, device.total_bytes, simulated=device.simulated, pinned=bool(self._cards)
        )

    def place(self, device: str) -> Memory:
        """This process's memory on that device. Raises UnknownDevice."""
        try:
            return self._memories[device]
        except KeyError:
            raise UnknownDevice(device, tuple(self._memories)) from None

    def named(self, torch: str) -> str:
        """What everybody calls the card that torch calls so in this process; `cpu` is the host. Raises
        UnknownDevice."""
        if torch == "cpu":
            return HOST
        for id, card in self._cards.items():
            if card.torch == torch:
                return id
        raise UnknownDevice(torch, tuple(self._memories))

    def samples(self, now: float, fresh: bool = False) -> dict[str, Sample]:
        """What the drivers, and the machine for `host`, said last; `fresh`: say from now on, where they answer at once.

        Nothing of simulated devices. Raises ProbeFailed, naming the device that would not answer, where this process
        asks for itself.
        """
        if self._sampling:
            figures = self._sampling.fresh() if fresh else self._sampling.figures()
            if figures is None:
                return {}
            said = {id: figures.of(card.device) for id, card in self._cards.items()}
            return {id: sample for id, sample in said.items() if sample} | {HOST: figures.host}
        samples = {id: self._ask(card, now) for id, card in self._cards.items()}
        if not self._memories[HOST].simulated:
            samples[HOST] = Sample(HOST, now, psutil.virtual_memory().available)
        return samples

    def _ask(self, card: Card, now: float) -> Sample:
        assert self.listing is not None
        return cards.sample(card, self.listing.source, now)

    def look_after(self) -> None:
        """Sees to it that the host's helper lives and answers; never waits."""
        if self._sampling:
            self._sampling.look_after()

    def trouble(self, stale_seconds: float) -> str:
        """Which cards cannot be used or measured, and why; empty where all can."""
        lost = (
            [f"card {number} cannot be used: {why}" for number, why in self.listing.failed.items()]
            if self.listing
            else []
        )
        return "; ".join(dict.fromkeys([*self._troubles(stale_seconds).values(), *lost]))

    def check(self, now: float, stale_seconds: float) -> None:
        """Raises ProbeFailed where no card can be measured."""
        if not self._sampling:
            self.samples(now)
        elif why := self._troubles(stale_seconds).get(""):
            raise ProbeFailed(why, device=next(iter(self._cards)))

    def _troubles(self, stale_seconds: float) -> dict[str, str]:
        known = {card.device.uuid: f"{id} ({card.device.name})" for id, card in self._cards.items()}
        return self._sampling.trouble(stale_seconds, known) if self._sampling else {}

    def people(self) -> dict[int, tuple[str, str]]:
        """User and command of the processes on the cards, as far as they can be seen from here."""
        figures = self._sampling.figures() if self._sampling else None
        return (
            {pid: (name_of(one.uid), one.command) for pid, one in figures.people.items()}
            if figures
            else {}
        )

    def helper(self) -> dict[str, str]:
        """How the host's helper process does, for a report; empty where there is none to be had."""
        return self._sampling.state() if self._sampling else {}

    def used(self) -> dict[str, int]:
        """Bytes this process holds on each device: what its allocators hold, and on a card its context too where the
        driver tells. Raises ProbeFailed where this process asks for itself."""
        held = {}
        for id, memory in self._memories.items():
            card = self._cards.get(id)
            held[id] = (
                memory.held_bytes()
                if card is None
                else max(_torch_reserved(card), self._charged(card))
            )
        return held

    def contexts(self) -> dict[str, int]:
        """Bytes that this process's CUDA context takes on each real card, beside what torch's allocator holds there;
        0 where it has none, or the driver does not tell. (What other engines hold there is in it too.)"""
        if _started_cuda() is None:
            return dict.fromkeys(self._cards, 0)
        return {
            id: max(0, self._charged(card) - _torch_reserved(card))
            for id, card in self._cards.items()
        }

    def watch_peaks(self) -> None:
        """From now on `beyond_now` tells the most that torch has held on a card, beyond what it holds at this
        moment."""
        cuda = _started_cuda() if self._cards else None
        for card in self._cards.values() if cuda else ():
            cuda.reset_peak_memory_stats(card.device.index)

    def beyond_now(self, device: str) -> int | None:
        """How much more torch held on a card at its peak than it holds now; None: nothing tells."""
        cuda, card = _started_cuda(), self._cards.get(device)
        if cuda is None or card is None:
            return None
        return cuda.max_memory_allocated(card.device.index) - cuda.memory_allocated(
            card.device.index
        )

    def charged(self, pid: int, devices: tuple[str, ...]) -> dict[str, int]:
        """Bytes that the driver charges to that process on these cards, its CUDA context too; 0 where it does not
        tell."""
        return {id: self._charged(self._cards[id], pid) for id in devices if id in self._cards}

    def _charged(self, card: Card, pid: int = 0) -> int:
        """Bytes that the driver charges to a process, this one unless another is named; 0 where it does not tell, or in
        a container knows it by another number."""
        pid = pid or os.getpid()
        if self._sampling is None:
            return self._ask(card, 0.0).processes.get(pid) or 0
        figures = self._sampling.figures()
        sample = figures.cards.get(card.device.uuid) if figures else None
        return (sample.processes.get(pid) if sample else None) or 0

    def bound(self, device: str, fraction: float) -> bool:
        """Lets torch take at most that part of a card in this process; whether it uses CUDA yet, and so was told."""
        card, cuda = self._cards.get(device), _started_cuda()
        if card is None or cuda is None or not card.torch.startswith("cuda"):
            return False
        cuda.set_per_process_memory_fraction(fraction, card.torch)
        return True

    def maps(self) -> tuple[AllocatorMap, ...]:
        """How each card's allocator in this process has cut what it holds; one that nothing has used says nothing, and
        one that is not torch's for CUDA or ROCm cannot."""
        cuda = _started_cuda() if self._cards else None
        if cuda is None:
            said = [self._memories[id].map() for id in self._simulated()]
        else:
            cut = cuda.memory_snapshot(**_without_traces(cuda.memory_snapshot))
            said = [
                allocator_stats.of_torch(id, number, cut, cuda.memory_stats(number))
                for id, number in self._numbered()
            ]
        return tuple(one for one in said if one.reserved_bytes or one.alloc_retries or one.ooms)

    def pulse(self) -> tuple[object, ...]:
        """Equal for as long as the maps are; far cheaper to ask for."""
        cuda = _started_cuda() if self._cards else None
        if cuda is None:
            return tuple(self._memories[id].pulse() for id in self._simulated())
        counters = (cuda.memory_stats(number) for _, number in self._numbered())
        return tuple(tuple(stats.get(name, 0) for name in _PULSE) for stats in counters)

    def _simulated(self) -> list[str]:
        return [device.id for device in self.devices if device.simulated and not device.is_host]

    def _numbered(self) -> list[tuple[str, int]]:
        """The cards that torch's allocator for CUDA serves, and what torch calls them in this process."""
        cards = ((id, card.torch.partition(":")) for id, card in self._cards.items())
        return [(id, int(number)) for id, (kind, _, number) in cards if kind == "cuda"]

    def empty_cache(self) -> int:
        """Gives memory that waits to be used again back, on cards and host; returns its bytes."""
        released = sum(memory.empty_cache() for memory in self._memories.values())
        cuda = _started_cuda() if self._cards else None
        if cuda is not None:
            before = sum(_torch_reserved(card) for card in self._cards.values())
            cuda.empty_cache()
            released += before - sum(_torch_reserved(card) for card in self._cards.values())
        return released


def _renamed(device: Device, names: Mapping[str, str]) -> Device:
    id = names.get(device.id, device.id)
    return (
        device
        if id == device.id
        else replace(device, id=id, index=int(id.partition(":")[2].partition(".")[0]))
    )


def open_probe(
    devices: str = "auto", *, cpu_only: bool = False, environment: Mapping[str, str] = os.environ
) -> Probe:
    """The probe of the devices that the text names.

    `auto`: the cards that this process sees if there are any and `cpu_only` does not forbid it, else one simulated card
    of half this machine's memory. `cuda`, `rocm`, `metal`: those cards or an error; `cuda:0,2` or `cuda:GPU-8a41`:
    these among them. `sim:2x24GiB,host:64GiB`: two simulated cards and a simulated host; without `host:` the host is
    this machine's memory.

    Raises BadSetting for anything else, and ProbeFailed where there is a driver and it fails.
    """
    text = devices.strip().lower()
    if text.startswith("sim:"):
        return Probe(_simulated(_parsed(devices, text)))
    kind, _, wanted = text.partition(":")
    if kind not in ("auto", *KINDS) or (kind == "auto" or text.endswith(":")) and kind != text:
        raise BadSetting("GPU_DEVICES", devices, _EXPECTED)
    listing = None if cpu_only else cards.visible_cards(environment, "" if kind == "auto" else kind)
    if wanted and listing:
        listing = listing._replace(cards=_chosen(devices, wanted, listing.cards))
    if listing and listing.cards:
        return Probe((*(card.device for card in listing.cards), _host()), listing)
    if kind != "auto":
        raise BadSetting(
            "GPU_DEVICES",
            devices,
            f"auto or sim:24GiB on this machine, since {_why_none(kind, cpu_only)}",
        )
    half = max(GIB, psutil.virtual_memory().total // 2 // GIB * GIB)
    return Probe(_simulated(_Wish(1, half, None)))


def _why_none(kind: str, cpu_only: bool) -> str:
    return (
        "DEVELOPMENT_CPU_ONLY or INFERENCE_GPU_LAYERS=0 forbids it"
        if cpu_only
        else f"no {KINDS[kind]} is visible here"
    )


def _chosen(given: str, wanted: str, visible: tuple[Card, ...]) -> tuple[Card, ...]:
    found = cards.chosen(wanted, visible)
    if isinstance(found, str):
        here = ", ".join(f"{card.device.id} ({card.device.uuid})" for card in visible) or "none"
        raise BadSetting(
            "GPU_DEVICES",
            given,
            f"numbers or UUIDs of cards that this process sees, and {found!r} is none "
            f"of them; it sees {here}",
        )
    return found


class _Wish(NamedTuple):
    """What a `sim:` text asks for."""

    cards: int
    card_bytes: int
    host_bytes: int | None


def _parsed(given: str, text: str) -> _Wish:
    match = re.fullmatch(r"sim:(?:(\d+)x)?([^,]+)(?:,\s*host:([^,]+))?", text)
    count = int(match[1] or 1) if match else 0
    try:
        wish = (
            _Wish(count, parse_bytes(match[2]), parse_bytes(match[3]) if match[3] else None)
            if match
            else None
        )
    except BadSize:
        wish = None
    sizes = (wish.card_bytes, wish.host_bytes) if wish else ()
    if (
        wish is None
        or not 0 < count <= _MOST_CARDS
        or any(size is not None and size < KIB for size in sizes)
    ):
        raise BadSetting("GPU_DEVICES", given, _EXPECTED)
    return wish


def _simulated(wish: _Wish) -> tuple[Device, ...]:
    cards = (
        Device(f"sim:{index}", wish.card_bytes, "simulated", f"SIM-{index}", index, simulated=True)
        for index in range(wish.cards)
    )
    return *cards, _host(wish.host_bytes)


def _host(simulated_bytes: int | None = None) -> Device:
    if simulated_bytes is not None:
        return Device(HOST, simulated_bytes, "simulated RAM", simulated=True)
    return Device(HOST, psutil.virtual_memory().total, "RAM")


def _started_cuda():
    """torch.cuda, where this process uses it already; asking must not start it."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and cuda.is_available() and cuda.is_initialized() else None


def _torch_reserved(card: Card) -> int:
    cuda = _started_cuda()
    return cuda.memory_reserved(card.torch) if cuda and card.torch.startswith("cuda") else 0


# Whatever an allocator does counts here.
_PULSE = (
    "allocation.all.allocated",
    "allocation.all.freed",
    "segment.all.allocated",
    "segment.all.freed",
    "active_bytes.all.current",
    "reserved_bytes.all.current",
    "num_alloc_retries",
    "num_ooms",
)


def _without_traces(snapshot: Callable[..., Any]) -> dict[str, bool]:
    """The arguments that spare us the traces of allocations, which somebody may record; older torch has no choice."""
    return (
        {"include_traces": False}
        if "include_traces" in inspect.signature(snapshot).parameters
        else {}
    )
