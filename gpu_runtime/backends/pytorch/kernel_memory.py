"""The memory that a notebook's own code holds: all its tensors that belong to no governed model.

This memory leaves and returns as a whole. The bytes are copied while the kernel continues. Then one call
into C exchanges the data pointers of all storages, at a moment when no thread of the process uses torch.
Tensors, views, gradients, optimizer state and saved tensors of graphs keep their identity and version.

On a simulated card the storages are CPU tensors of at least 1 MiB. Parked bytes count as host memory there
and stay readable. On a real card a guard replaces them, and every access raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ...devices.probe import Probe
from ...devices.process_memory import Block, Memory
from ...errors import CannotGovern
from ...facts import HOST, Evidence, ModelSpec, Share, Shares
from ..base import NotStill, Progress, Stillness
from . import storages as st
from . import streams, swap
from .search import Found, Place, counted_on, search

SENTENCE = "These bytes are parked in host memory. They return before the next cell runs, or with  %gpu unpark"


class Away(NamedTuple):
    """A storage whose bytes are in host memory."""

    storage: torch.UntypedStorage
    copy: torch.Tensor | None  # on a real card its bytes, [nbytes] uint8; else the storage has them
    stream: int | None  # the CUDA stream that its block on the card belonged to


class KernelMemory:
    """The handle of the backend: where the bytes are, and what is away."""

    def __init__(
        self, memory: Memory, stillness: Stillness, governed: Callable[[], Iterable[int]]
    ) -> None:
        """`memory` is the card that the tensors count on.

        `governed` returns the keys (`storage._cdata`) of the storages that belong to models.
        """
        self.memory, self.stillness, self.governed = memory, stillness, governed
        self.on_swapped: Callable[[], None] = lambda: None  # called at once after the exchange
        self.noted: Block | None = None  # the account of bytes that torch allocated
        self.away: tuple[Away, ...] = ()

    @property
    def away_bytes(self) -> int:
        """The bytes that are in host memory."""
        return sum(one.storage.nbytes() for one in self.away)


class KernelBackend:
    """Counts, offloads and restores what a notebook's own code holds."""

    name = "kernel"
    can_move = True
    can_split = False

    def __init__(self, probe: Probe) -> None:
        """Moves bytes between the devices of `probe`."""
        self.probe = probe

    def open(
        self, device: str, stillness: Stillness, governed: Callable[[], Iterable[int]]
    ) -> KernelMemory:
        """The handle of what this process holds on `device`. The other parameters: see KernelMemory."""
        return KernelMemory(self.probe.place(device), stillness, governed)

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """Nothing: its size is counted, not estimated."""
        return Evidence(why_unknown="it is counted after each cell")

    def pieces(self, spec: ModelSpec, origin: Any = None, model: Any = None) -> tuple[int, ...]:
        """One piece: a kernel leaves and returns whole."""
        return (1,)

    def load(
        self,
        spec: ModelSpec,
        shares: Shares,
        origin: Any = None,
        *,
        progress: Progress | None = None,
        into: Any = None,
    ) -> Any:
        """Raises CannotGovern: what a notebook's code holds cannot be loaded."""
        why = "it is what this notebook's own code holds"
        raise CannotGovern(f"{spec.name} cannot be loaded: {why}.", name=spec.name, why=why)

    def value(self, model: KernelMemory) -> None:
        """None: nothing is yielded for it."""

    def measure(self, model: KernelMemory) -> Shares:
        """The bytes by device now. On a simulated card they are noted in its account."""
        if model.away:
            return (Share(HOST, model.away_bytes),)
        size = self.count(model)
        if model.memory.counted:
            _note(model, size)
        return (Share(model.memory.device, size),)

    def count(self, model: KernelMemory) -> int:
        """Bytes on the card of `model` that its process holds beyond its governed models."""
        if model.memory.counted:
            return sum(one.bytes for one in self._found(model) if not one.stays)
        device = model.memory.torch
        if not torch.cuda.is_initialized():
            return 0
        held = int(torch.cuda.memory_stats(device).get("allocated_bytes.all.current", 0))
        governed = {key for key in model.governed()}
        if governed:
            held -= sum(one.bytes for one in search(self._place()).found if one.key in governed)
        return max(0, held)

    def move(self, model: KernelMemory, shares: Shares) -> None:
        """Moves everything to `shares`, all or nothing.

        Raises NotStill if the kernel is in use, and the device's out-of-memory error.
        """
        to_host = all(share.device == HOST for share in shares)
        if to_host and not model.away:
            self._leave(model)
        elif not to_host and model.away:
            self._return(model)

    def _leave(self, model: KernelMemory) -> None:
        if why := model.stillness.why_not():
            raise NotStill(why)
        if not swap.can_guard(torch.device(model.memory.torch)):
            raise NotStill("this build of torch can put no guard in the place of its memory")
        mark = model.stillness.mark()
        found = [one for one in self._found(model) if not one.stays]
        homes = _homes(found, model.memory)
        host = self.probe.place(HOST)
        copies = st.copied([_bytes(one.storage) for one in found], [host] * len(found), host)
        on_card = not model.memory.counted
        exchange = swap.Exchange()
        away = []
        for one, copy, home in zip(found, copies, homes, strict=True):
            if on_card:
                exchange.take(one.storage, SENTENCE)
            else:
                exchange.put(one.storage, copy.untyped_storage())
            away.append(Away(one.storage, copy if on_card else None, home))
        del found, copies
        self._exchange(model, mark, exchange, tuple(away))
        model.noted = None
        del exchange  # the last reference to the old memory
        _release_cached(model.memory)

    def _return(self, model: KernelMemory) -> None:
        mark = model.stillness.mark()
        noted = None
        if model.memory.counted:
            noted = model.memory.allocate(model.away_bytes)
        exchange = swap.Exchange()
        fresh, sources = [], []
        for one in model.away:
            size, device = one.storage.nbytes(), one.storage.device
            with streams.on_stream(device, one.stream):
                fresh.append(torch.empty(size, dtype=torch.uint8, device=device))
            sources.append(_bytes(one.storage) if one.copy is None else one.copy)
            exchange.put(one.storage, fresh[-1].untyped_storage())
        if sources:
            torch._foreach_copy_(fresh, sources, non_blocking=True)
        if model.memory.torch.startswith("cuda"):
            torch.cuda.synchronize(model.memory.torch)
        del fresh, sources
        self._exchange(model, mark, exchange, ())
        model.noted = noted

    def _exchange(
        self, model: KernelMemory, mark: object, exchange: swap.Exchange, away: tuple[Away, ...]
    ) -> None:
        """Makes the exchange while no other thread runs. Raises NotStill, and then nothing has changed."""

        def act() -> None:
            """Makes all exchanges, or none."""
            try:
                swap.at_once(exchange.calls)
            except BaseException:
                exchange.undo()
                raise
            model.away = away
            model.on_swapped()

        if why := model.stillness.change(mark, act):
            raise NotStill(why)

    def drop(self, model: KernelMemory) -> None:
        """Returns parked bytes to their card, since they exist nowhere else. Repeating is safe."""
        if model.away and not model.memory.counted:
            self._return(model)
        # On a simulated card the bytes stay readable where they are.
        model.away = ()
        model.noted = None

    def elsewhere(self, model: KernelMemory) -> tuple[str, ...]:
        """Nothing: the bytes are where they were counted."""
        return ()

    def droppable(self, model: KernelMemory) -> bool:
        """False: a notebook's tensors exist nowhere else."""
        return False

    def unchanged(self, model: KernelMemory) -> bool:
        """False: there is no source to compare them with."""
        return False

    def _place(self) -> Place:
        return counted_on([self.probe.place(device.id) for device in self.probe.devices])

    def _found(self, model: KernelMemory) -> list[Found]:
        """The storages on the card of `model` that belong to no governed model."""
        governed = frozenset(model.governed())
        found = search(self._place(), governed=governed).found
        return [one for one in found if one.device == model.memory.device]


def _homes(found: Sequence[Found], memory: Memory) -> list[int | None]:
    """The stream of each storage's block. Raises NotStill if one is in a private pool."""
    if not memory.torch.startswith("cuda"):
        return [None] * len(found)
    segments = torch.cuda.memory_snapshot()
    addresses = [one.storage.data_ptr() for one in found]
    if streams.private(addresses, segments):
        raise NotStill("a CUDA graph holds some of its memory")
    return streams.homes(addresses, segments)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _note(model: KernelMemory, size: int) -> None:
    """Notes that torch holds `size` bytes on the simulated card."""
    if size == (model.noted.size if model.noted else 0):
        return
    model.noted = None  # freed first: both together may exceed the capacity
    if size:
        model.noted = model.memory.allocate(size, force=True)


def _release_cached(memory: Memory) -> None:
    if memory.torch.startswith("cuda"):
        torch._C._cuda_clearCublasWorkspaces()
        with torch.cuda.device(memory.torch):
            torch.cuda.empty_cache()
