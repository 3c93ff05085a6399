"""The memory that a notebook's own code holds: all its tensors that belong to no governed model.

The memory of a kernel leaves the cards and returns as a whole. If card and host memory are too full
for that, it leaves and returns in pieces, which are whole storages. The bytes are copied while the
kernel continues. Then one call into C exchanges the data pointers of all storages, at a moment when
no thread of the process uses torch. Tensors, views, gradients, optimizer state and the saved
tensors of graphs keep their identity and version.

A card works asynchronously. So in both directions the copy waits until the card has finished its
work, and so does the exchange. If a card does not finish within REST_SECONDS, nothing moves.

On a simulated card the storages are CPU storages of at least 1 MiB. Their offloaded bytes count as
host memory, stay readable, and refuse writes. Storages that cannot be moved stay on their card, such as those that
NumPy uses too. They are no part of the kernel's lease, and `KernelMemory.staying` lists them. On a
real card a guard replaces offloaded bytes: memory without content, where every access raises an
error (see `swap.py`).

Offloaded bytes may move on, to a file on a local disk (`park_file.py`). On a simulated card they
stay readable, as a mapping of the file. A return always reads the file itself and compares
digests: a damaged piece raises Damaged, and never becomes a value.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from ...devices.probe import Probe
from ...devices.process_memory import Block, Memory, trim_heap
from ...errors import CannotGovern
from ...facts import HOST, Evidence, ModelSpec, Share, Shares, Staying
from ...threads import all_outside_modes
from ...units import MIB, show_bytes
from ..base import Backend, NotStill, Stillness, is_out_of_memory
from . import park_file, streams, swap
from . import storages as st
from .park_file import Stored, Written
from .search import FOREIGN, UNREADABLE, Found, Known, Place, counted_on, search
from .shadows import digest, every_key, forget_keys, keys_on_cards
from .torch_model import ending

SENTENCE = (
    "These bytes are parked in RAM. They return before the next cell runs, or with  %gpu unpark"
)
_NEVER = 2**31 - 1  # a threshold of new objects that no process reaches, so no collection starts
_usual_threshold = [*gc.get_threshold()]
CHANGES = "its memory changes while it is copied"
BATCH_BYTES = 4 * MIB  # of small tensors on a card that are digested together
COPIES = 4  # how often bytes that change meanwhile are copied
REST_SECONDS = 10.0  # how long the work of a card may take to end


class Away(NamedTuple):
    """A storage of the kernel whose bytes are in host memory or in a file now."""

    storage: torch.UntypedStorage
    # On a real card its bytes, [nbytes] uint8, if they are in host memory; else the storage has them
    copy: torch.Tensor | None
    stream: int | None  # the stream that its block on the card belonged to
    stored: Stored | None = None  # None: in host memory

    @property
    def bytes(self) -> torch.Tensor:
        """The content of the storage, as a tensor [nbytes] of uint8."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


class _IsRecorded(Exception):
    """A thread records a count of the bytes at this moment, so they cannot be exchanged."""


class _Copied:
    """Compares bytes with their copies at the exchange, and copies again what has changed.

    On a card the digests of the bytes are compared, and then the version counters of the tensors.
    Between the two, only a write that changes no counter would be missed, such as one to `.data`,
    by code that interrupts the exchange.
    """

    def __init__(
        self, sources: list[torch.Tensor], tensors: Iterable[torch.Tensor], rest: Callable[[], None]
    ) -> None:
        """`sources` are about to be copied; `tensors` are theirs on cards. `rest` waits for the cards."""
        self._sources, self._tensors, self._rest = sources, list(tensors), rest
        self._copies: list[torch.Tensor] = []
        self._digests: list[torch.Tensor] = []
        known = {key.device for key in keys_on_cards()}
        self._without_keys = {source.device for source in sources} - known
        self._on_card = any(source.device.type != "cpu" for source in sources)
        self._batches = _batches(sources) if self._on_card else []
        self._start()

    def _start(self) -> None:
        self._rest()
        self._unchanged = swap.Unchanged(self._sources, self._tensors)
        self._digests = [*map(self._digest, self._batches)]

    def _digest(self, batch: range) -> torch.Tensor:
        """The digest of the sources `batch`, end to end; by the CPU if their card has no room for it."""
        sources = [self._sources[i] for i in batch]
        try:
            return digest(_joined(sources))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        return digest(_joined([source.cpu() for source in sources]))

    def to(self, copies: Iterable[torch.Tensor]) -> None:
        """Records the `copies` of the sources."""
        self._copies = list(copies)
        if not self._on_card:
            self._unchanged.compare(self._copies)

    def then(self, calls: Iterable[Callable[[], Any]]) -> bool:
        """Makes all `calls` if the sources equal their copies. Returns whether it made them."""
        if self._on_card and (self._unchanged.elsewhere() or self._changed()):
            return False
        return self._unchanged.then(calls)

    def _changed(self) -> list[int]:
        if not self._on_card:
            return self._unchanged.changed()
        pairs = zip(self._batches, self._digests, strict=True)
        changed = [batch for batch, known in pairs if not torch.equal(self._digest(batch), known)]
        return [*itertools.chain.from_iterable(changed)]

    def again(self) -> None:
        """Copies again the sources that have changed. Raises NotStill if their size has."""
        self._rest()
        if self._unchanged.elsewhere():
            raise NotStill(CHANGES)
        changed = self._changed()
        if self._on_card:
            self._start()
        if changed:
            copies = [self._copies[i] for i in changed]
            torch._foreach_copy_(copies, [self._sources[i] for i in changed])
        self._rest()

    def forget(self) -> None:
        """Releases all tensors, so that the traceback of an error does not keep them."""
        forget_keys(self._without_keys)
        for some in (self._sources, self._tensors, self._copies, self._digests):
            some.clear()
        self._unchanged = swap.Unchanged()


def _batches(sources: Sequence[torch.Tensor]) -> list[range]:
    """Ranges of the numbers of `sources`, each on one card, of at most BATCH_BYTES or one source.

    One digest a batch: with one for each of 10,000 small tensors, a card would compute 20,000 times.
    """
    batches: list[range] = []
    start = size = 0
    for number, source in enumerate(sources):
        fits = size + source.nbytes <= BATCH_BYTES and source.device == sources[start].device
        if number > start and not fits:
            batches.append(range(start, number))
            start, size = number, 0
        size += source.nbytes
    return [*batches, range(start, len(sources))]


def _joined(sources: Sequence[torch.Tensor]) -> torch.Tensor:
    return sources[0] if len(sources) == 1 else torch.cat(sources)


class GovernedModels(NamedTuple):
    """Functions that report the models of this process, whose memory is not the kernel's own."""

    keys: Callable[[], Iterable[int]]  # returns the keys of their storages (`storage._cdata`)
    shares: Callable[[], Iterable[Share]] = tuple  # returns their bytes on all devices


class KernelMemory:
    """The handle of KernelBackend: it records where the bytes of the kernel's own code are."""

    def __init__(
        self, memories: Sequence[Memory], stillness: Stillness, governed: GovernedModels
    ) -> None:
        """`memories` are the cards on which the tensors of the kernel are counted."""
        self.memories, self.stillness, self.governed = tuple(memories), stillness, governed
        self.on_swapped: Callable[[], None] = lambda: None  # called at once after the exchange
        self.noted: Block | None = None  # the account of bytes that torch allocated
        self.noted_staying: Block | None = None  # the account of the bytes in `staying`
        # What cannot be moved. On a real card it is known, and no part of the lease, while the
        # kernel is parked.
        self.staying: tuple[Staying, ...] = ()
        self.known: Known = {}  # for the next search
        self.away: tuple[Away, ...] = ()
        self.in_parts = False  # whether only some of its storages are in `away`
        self.streams: dict[torch.device, set[int]] = {}  # of each card, when the bytes left
        self.last: Shares = ()  # the result of the last count
        self.largest = 0  # the bytes of the largest storage that can be moved; 0: not known
        self.searches = False  # whether a count on a real card looks for the largest storage
        self.governed_bytes: dict[str, int] = {}  # by card, at the last `watch_peaks`
        self.exchanges = 0  # the number of times that the bytes have left or returned
        self.gate = threading.Lock()  # held while a count is recorded, or bytes are exchanged

    def why_not(self) -> str:
        """Why the bytes cannot leave now; empty if they can."""
        cards = [torch.device(memory.torch) for memory in self.memories]
        return swap.why_not(cards) or self.stillness.why_not()

    @property
    def memory(self) -> Memory:
        """The first card. On simulated cards all tensors count as tensors on this card."""
        return self.memories[0]

    @property
    def devices(self) -> tuple[str, ...]:
        """The ids of the cards."""
        return tuple(memory.device for memory in self.memories)

    @property
    def away_bytes(self) -> int:
        """The bytes that are in host memory, or in a file, now."""
        return sum(away.storage.nbytes() for away in self.away)

    @property
    def disk_bytes(self) -> int:
        """The part of `away_bytes` that is in a file."""
        return sum(away.storage.nbytes() for away in self.away if away.stored)


@all_outside_modes
class KernelBackend(Backend):
    """Counts, offloads and restores the memory of a notebook's own code."""

    name = "kernel"
    can_split = False

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def open(
        self,
        stillness: Stillness,
        keys: Callable[[], Iterable[int]],
        shares: Callable[[], Iterable[Share]] = tuple,
    ) -> KernelMemory:
        """The handle of the memory that the kernel's own code holds; `keys` and `shares` are those of
        `GovernedModels`.
        """
        cards = [self.probe.place(device.id) for device in self.probe.cards]
        own = cards[:1] if cards[0].counted else cards
        return KernelMemory(own, stillness, GovernedModels(keys, shares))

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        return Evidence(why_unknown="it is counted after each cell")

    def pieces(self, spec: ModelSpec, origin: Any = None, model: Any = None) -> tuple[int, ...]:
        """Returns one piece, because a kernel leaves and returns as a whole."""
        return (1,)

    def load(self, spec: ModelSpec, *order: Any, **options: Any) -> Any:
        """Always raises CannotGovern."""
        why = "it is what this notebook's own code holds"
        raise CannotGovern(f"{spec.name} cannot be loaded: {why}.", name=spec.name, why=why)

    def value(self, model: KernelMemory) -> None:
        """Returns None: `use` yields no object for a kernel."""

    def measure(self, model: KernelMemory) -> Shares:
        """The kernel's bytes on each device now.

        Recorded as `last` of `model`, and on a simulated card as allocated, unless the bytes are in
        host memory.
        """
        while True:
            exchanges = model.exchanges
            if model.away:
                return (*self._rest_on_card(model), Share(HOST, model.away_bytes))
            sizes = self.count(model)
            held = tuple(Share(card, size) for card, size in sizes.items() if size)
            with model.gate:
                if model.exchanges != exchanges:  # the bytes have moved during the count
                    continue
                if model.memory.counted:
                    _note(model, sizes[model.memory.device])
                model.last = held or (Share(model.memory.device, 0),)
                return model.last

    def count(self, model: KernelMemory) -> dict[str, int]:
        """The bytes on each card that the process of `model` holds beyond its governed models.

        They are read from torch's allocator. On a simulated card all storages are searched; those
        that cannot be moved do not count, and are recorded as `staying` of `model`.
        """
        if model.memory.counted:
            found, _ = self._found(model, model.known)
            _set_staying(model, found)
            model.largest = _largest(found)
            return {model.memory.device: sum(entry.own_bytes for entry in found if not entry.stays)}
        if model.searches:
            model.largest = _largest(self._found(model)[0])
        held = {card.device: streams.requested_bytes(card.torch) for card in model.memories}
        governed = _governed_bytes(model) if any(held.values()) else {}
        return {card: max(0, size - governed.get(card, 0)) for card, size in held.items()}

    def watch_peaks(self, model: KernelMemory) -> None:
        """Starts to measure `peaks`."""
        if model.memory.counted:
            return
        model.governed_bytes = _governed_bytes(model)
        for card in model.memories:
            streams.reset_peak(card.torch)

    def peaks(self, model: KernelMemory, *, counted: bool = True) -> Shares | None:
        """The most bytes on each card since `watch_peaks`, without the governed models.

        `counted` is whether `measure` was called since then; the peak is at least its result. A
        simulated card records no peak. For it, and while the bytes are in host memory, the result
        is that of `measure` if `counted`, else None.
        """
        if model.away or model.memory.counted:
            return model.last if counted else None
        peak = {share.device: share.bytes for share in model.last if counted}
        before, now = model.governed_bytes, _governed_bytes(model)
        for card in model.memories:
            governed = max(before.get(card.device, 0), now.get(card.device, 0))
            own = streams.requested_bytes(card.torch, peak=True) - governed
            peak[card.device] = max(peak.get(card.device, 0), own)
        return tuple(Share(card, size) for card, size in peak.items() if size > 0)

    def move(self, model: KernelMemory, shares: Shares) -> None:
        """Moves the bytes of the kernel to `shares`. If the move fails, no byte has moved.

        If `shares` are on a card and on the host, only whole storages move, of at most as many bytes
        as the host's share differs from the offloaded bytes. Raises NotStill if the bytes cannot be
        moved now, and the device's out-of-memory error.
        """
        to_host = all(share.device == HOST for share in shares)
        in_host = sum(share.bytes for share in shares if share.device == HOST)
        going = in_host - model.away_bytes
        with without_collections():
            if to_host:
                self._leave(model)
            elif going > 0:
                self._leave(model, going)
            elif model.away:
                self._return(model, -going if in_host else None)

    def piece_bytes(self, model: KernelMemory) -> int:
        """The bytes of the largest storage; 0 if it is not known, or if several cards have storages.

        Pieces leave only to change places with another lease; see `admission.exchange`.
        """
        return model.largest if len(model.last) == 1 else 0

    def _rest_on_card(self, model: KernelMemory) -> Shares:
        """What is still on the card while other storages of the kernel are in host memory."""
        if model.memory.counted:
            return (Share(model.memory.device, model.noted.size),) if model.noted else ()
        if not model.in_parts:
            return ()
        stays = {part.device: part.bytes for part in model.staying}
        left = {card: size - stays.get(card, 0) for card, size in self.count(model).items()}
        return tuple(Share(card, size) for card, size in left.items() if size > 0)

    def _leave(self, model: KernelMemory, most: int | None = None) -> None:
        """Offloads all storages; if `most` is given, only some, with at most so many bytes."""
        if why := model.why_not():
            raise NotStill(why)
        if not swap.can_guard(torch.device(model.memory.torch)):
            raise NotStill("this build of torch can put no guard in the place of its memory")
        mark = model.stillness.mark()
        here, known = self._found(model)
        found = [entry for entry in here if not entry.stays]
        if here and not found:
            raise NotStill(f"all of it stays: {here[0].stays}")
        model.largest = max(model.largest, _largest(found))
        rest = 0
        if most is not None:
            total = sum([entry.storage.nbytes() for entry in found])
            found = _fitting(found, most)
            if not found:
                raise NotStill(f"none of its tensors fits into {show_bytes(most)}")
            rest = total - sum([entry.storage.nbytes() for entry in found])
        cards = {entry.storage.device for entry in found}
        used = [memory.torch for memory in model.memories if streams.requested_bytes(memory.torch)]
        homes = _homes(found, cards)
        _rest(cards)
        host = self.probe.place(HOST)
        on_card = not model.memory.counted
        sources = _bytes([entry.storage for entry in found])
        tensors = [tensor for entry in found for tensor in entry.tensors]
        copied = _Copied(sources, tensors if on_card else (), partial(_rest, cards))
        copies = st.copied(
            list(sources), [host] * len(found), host, wait=partial(_rest, cards), together=True
        )
        exchange = swap.Exchange()
        away = []
        for entry, copy, home in zip(found, copies, homes, strict=True):
            if on_card:
                exchange.take(entry.storage, SENTENCE)
            else:
                exchange.put(entry.storage, copy.untyped_storage(), refuses=copy)
            away.append(Away(entry.storage, copy if on_card else None, home))
        staying = [entry._replace(tensors=()) for entry in here if entry.stays]
        copied.to(copies)
        del here, found, copies, sources, tensors
        try:
            self._exchange(model, mark, exchange, (*model.away, *away), None, copied)
        finally:
            copied.forget()
        model.in_parts = rest > 0
        if model.memory.counted:
            _note(model, rest)
        _set_staying(model, staying)
        model.streams |= _streams(known, away, cards)
        del exchange  # this frees the old memory
        if model.memory.counted:
            trim_heap()
        for card in used:  # a card without tensors can still have a workspace of cuBLAS
            streams.release_cached(card)

    def _return(self, model: KernelMemory, most: int | None = None, counts: bool = True) -> None:
        """Returns all storages to their card; if `most` is given, only some, with at most so many bytes."""
        mark = model.stillness.mark()
        coming = list(model.away) if most is None else _fitting(model.away, most)
        if not coming:
            raise NotStill(f"none of its tensors fits into {show_bytes(most or 0)}")
        keys = {away.storage._cdata for away in coming}
        staying = tuple([away for away in model.away if away.storage._cdata not in keys])
        before = model.noted.size if model.noted else 0
        size = sum([away.storage.nbytes() for away in coming])
        noted = None
        exchange = swap.Exchange()
        fresh: list[torch.Tensor] = []
        cards = {away.storage.device for away in coming}
        try:
            if model.memory.counted and counts:
                noted = model.memory.allocate(size)
            _rest(cards)  # a fresh block may have been freed while work on it was pending
            self._fill(model, coming, fresh, exchange)
            _rest(cards)
            self._exchange(model, mark, exchange, staying, noted)
            model.in_parts = bool(staying)
            if model.memory.counted and counts and before:
                _note(model, before + size)
            if not model.memory.counted and not staying:
                model.staying = ()  # its allocator counts all bytes again
        except BaseException as error:
            # The traceback keeps this frame and its variables, possibly for long.
            fresh.clear()
            del exchange, noted
            st.let_go(error)
            raise

    def _fill(
        self,
        model: KernelMemory,
        coming: Sequence[Away],
        fresh: list[torch.Tensor],
        exchange: swap.Exchange,
    ) -> None:
        """Starts the copies of `coming` to new tensors on the cards, in `fresh`; prepares `exchange`."""
        made: dict[int, torch.Tensor] = {}
        for places in st.places_of_equal([(away.storage.device, away.stream) for away in coming]):
            device, stream = coming[places[0]].storage.device, coming[places[0]].stream
            with streams.on_stream(device, stream):
                for i in places:
                    size = coming[i].storage.nbytes()
                    made[i] = torch.empty(size, dtype=torch.uint8, device=device)
            blocks = [made[i] for i in places]
            streams.record(blocks, device, stream, model.streams.get(device, ()))
            del blocks
        fresh += [made.pop(i) for i in range(len(coming))]
        in_ram = [i for i, away in enumerate(coming) if not away.stored]
        here = iter(_bytes([coming[i].storage for i in in_ram if coming[i].copy is None]))
        sources = [next(here) if (copy := coming[i].copy) is None else copy for i in in_ram]
        if sources:
            st.copy_to([fresh[i] for i in in_ram], sources)
        self._read(coming, fresh)
        for away, tensor in zip(coming, fresh, strict=True):
            exchange.put(away.storage, tensor.untyped_storage())

    def _exchange(
        self,
        model: KernelMemory,
        mark: object,
        exchange: swap.Exchange,
        away: tuple[Away, ...],
        noted: Block | None,
        copied: _Copied | None = None,
    ) -> None:
        """Makes the exchange while no other thread runs, and records the new place in `model`.

        After it, the storages `away` are in host memory, and `noted` counts the bytes on a simulated
        card. `mark` is from before the copies. What differs from its copy in `copied` is copied
        again, at most COPIES times in all. Raises NotStill if the exchange is impossible; then
        nothing has changed.
        """

        def act() -> None:
            nonlocal made
            if model.gate.locked():  # a wait would let other threads run
                raise _IsRecorded
            with model.gate:
                try:
                    if copied is None:
                        swap.at_once(exchange.calls)
                    elif not copied.then(exchange.calls):
                        return
                except BaseException:
                    exchange.undo()
                    raise
                made = True
                model.away, model.noted = away, noted
                model.exchanges += 1
            model.on_swapped()

        made = False
        for number in range(1, COPIES + 1):
            while True:
                try:
                    why = model.stillness.change(mark, act)
                    break
                except _IsRecorded:
                    with model.gate:
                        pass  # until the count is recorded
            if why:
                raise NotStill(why)
            if made:
                return
            if copied is not None and number < COPIES:
                copied.again()
        raise NotStill(CHANGES)

    # -- bytes that move on to a file

    def stows(self, model: KernelMemory) -> bool:
        return True

    def write(self, model: KernelMemory, directory: Path, *, encrypted: bool = False) -> Written:
        with model.gate:
            exchanges = model.exchanges
            going = [away for away in model.away if away.storage.nbytes() and not away.stored]
        contents = {away.storage._cdata: partial(_in_ram, away) for away in going}
        sizes = [away.storage.nbytes() for away in going]
        return park_file.written(model, contents, sizes, exchanges, directory, encrypted=encrypted)

    def move_on(self, model: KernelMemory, written: Written) -> None:
        mark = model.stillness.mark()
        if model.exchanges != written.exchanges:
            raise NotStill("its memory returned")
        exchange = swap.Exchange()
        away = []
        pages = written.mapped() if model.memory.counted else {}
        for parked in model.away:
            key = parked.storage._cdata
            if key not in written.stored:
                away.append(parked)
                continue
            away.append(parked._replace(copy=None, stored=written.stored[key]))
            if key in pages:
                content = pages[key]
                exchange.put(parked.storage, content.untyped_storage(), refuses=content)
        self._exchange(model, mark, exchange, tuple(away), model.noted)

    def _read(self, coming: Sequence[Away], fresh: Sequence[torch.Tensor | None]) -> None:
        """Copies those of `coming` that are in files to `fresh`; for None it only compares. Raises Damaged."""
        rows = zip(coming, fresh, strict=True)
        park_file.read([(away.storage._cdata, away.stored, to) for away, to in rows if away.stored])

    def _address(self, away: Away) -> int:
        """The address of the bytes of `away` on a simulated card. Those in a file are compared."""
        self._read([away], [None])
        return swap.address(away.bytes)

    def _content(self, away: Away) -> torch.UntypedStorage:
        """The bytes of `away` in host memory. Those in a file are read and compared. Raises Damaged."""
        if away.copy is not None:
            return away.copy.untyped_storage()
        content = torch.empty(away.storage.nbytes(), dtype=torch.uint8)
        self._read([away], [content])
        return content.untyped_storage()

    def drop(self, model: KernelMemory) -> None:
        """Returns offloaded bytes to their card, because they exist nowhere else.

        On a simulated card they are no longer counted. Raises NotStill, and the device's
        out-of-memory error.
        """
        if model.away and not (ending.is_set() and model.memory.counted):
            self._return(model, counts=False)
        model.away = ()
        model.noted = model.noted_staying = None

    def forget_unused(self, model: KernelMemory) -> int:
        """Frees offloaded bytes to which the user's code refers no longer. Returns their number."""
        with model.gate:
            used = tuple([away for away in model.away if _is_used(away)])
            freed = model.away_bytes - sum([away.storage.nbytes() for away in used])
            model.away = used
        return freed

    @contextlib.contextmanager
    def readable(self, model: KernelMemory, saves: bool = True) -> Iterator[Callable[[Any], Any]]:
        """While the block runs, `torch.save` reads offloaded tensors from host memory, or from their file.

        `torch.save` calls the methods `cpu` and `data_ptr` of each storage, and a guard raises in
        both; memory that refuses writes raises in `data_ptr`. So each storage gets its own methods
        for this time. Unless the block `saves`, no bytes in a file are read. Yields a function that
        returns a CPU tensor with the same bytes for an offloaded tensor, and any other object as it is.
        """
        away = {parked.storage._cdata: parked for parked in model.away}
        stand_ins = away
        if model.memory.counted:  # there bytes in host memory stay readable
            stand_ins = {key: parked for key, parked in away.items() if parked.stored}
        try:
            for key, parked in away.items():
                # What is in a file is read and compared when `torch.save` comes to its storage.
                if not model.memory.counted:
                    address = parked.copy.data_ptr() if parked.copy is not None else key
                    read = partial(self._content, parked)
                    vars(parked.storage).update(cpu=read, data_ptr=partial(_same, address))
                elif parked.stored and saves:
                    vars(parked.storage)["data_ptr"] = partial(self._address, parked)
                elif not parked.stored:
                    vars(parked.storage)["data_ptr"] = partial(_same, swap.address(parked.bytes))
            yield partial(self._stand_in, stand_ins)
        finally:
            for parked in away.values():
                for name in ("cpu", "data_ptr"):
                    vars(parked.storage).pop(name, None)

    def _stand_in(self, guarded: Mapping[int, Away], value: Any) -> Any:
        """A CPU tensor with the bytes of the tensor `value`, if they are in `guarded`; else `value`."""
        if not isinstance(value, torch.Tensor):
            return value
        away = guarded.get(value.untyped_storage()._cdata)
        return value if away is None else st.view(value, self._content(away))

    def must_return_to(self, model: KernelMemory) -> dict[str, int]:
        """The offloaded bytes of each card. Each tensor returns to the card where it was."""
        cards = {torch.device(memory.torch): memory.device for memory in model.memories}
        sizes: dict[str, int] = {}
        for away in model.away:
            card = model.memory.device
            if not model.memory.counted:
                card = cards[away.storage.device]
            sizes[card] = sizes.get(card, 0) + away.storage.nbytes()
        return sizes

    def _place(self) -> Place:
        return counted_on([self.probe.place(device.id) for device in self.probe.devices])

    def _found(
        self, model: KernelMemory, known: Known | None = None
    ) -> tuple[list[Found], tuple[torch.Stream, ...]]:
        """The storages on the cards of `model` that belong to no governed model, and all streams.

        Pages of this package, such as the copies of models in host memory, are counted where they
        were allocated. `known` is for `search`.
        """
        keys = (key.untyped_storage()._cdata for key in every_key())
        away = (parked.storage._cdata for parked in model.away)  # a guard has no content to look at
        governed = frozenset((*model.governed.keys(), *keys, *away))
        seen = search(self._place(), governed=governed, known=known)
        cards = {memory.device for memory in model.memories}
        places = [self.probe.place(device.id) for device in self.probe.devices]
        found = []
        for entry in seen.found:
            is_ours = entry.stays == FOREIGN and any(
                place.region_at(entry.storage.data_ptr()) for place in places
            )
            is_guard = entry.stays == UNREADABLE and model.memory.counted
            if entry.device in cards and not (is_ours or is_guard):
                found.append(entry)
        return found, seen.streams


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """A context manager in which Python starts no garbage collection by itself.

    Garbage collections took half the time of a move of 10,000 storages. A cell may run meanwhile
    and call `gc.disable`, so the number of new objects that starts a collection is raised instead.
    """
    usual = gc.get_threshold()
    if usual[0] != _NEVER:
        _usual_threshold[:] = usual
    try:
        gc.set_threshold(_NEVER, *usual[1:])
        yield
    finally:
        if gc.get_threshold()[0] == _NEVER:  # else the user's code has set it
            gc.set_threshold(*_usual_threshold)


def _rest(cards: Iterable[torch.device]) -> None:
    """Waits until the `cards` have finished their work. Raises NotStill after REST_SECONDS."""
    if why := streams.not_at_rest(cards, REST_SECONDS):
        raise NotStill(why)


def _homes(found: Sequence[Found], cards: Iterable[torch.device]) -> list[int | None]:
    """For each storage of `found`, the stream of its block of memory; None on a simulated card.

    Raises NotStill if a CUDA graph exists, or if a block is in a private pool.
    """
    kinds = {card.type: card for card in cards}
    segments = [segment for card in kinds.values() for segment in streams.segments(card)]
    if not segments:
        return [None] * len(found)
    addresses = [entry.storage.data_ptr() for entry in found]
    if streams.private(addresses, segments) or streams.captured():
        raise NotStill("a CUDA graph holds some of its memory")
    return streams.homes(addresses, segments)


def _streams(
    known: Iterable[torch.Stream], away: Iterable[Away], cards: Iterable[torch.device]
) -> dict[torch.device, set[int]]:
    """The numbers of each card's streams: those `known`, those of `away`, and the default stream."""
    found = {card: {streams.DEFAULT} for card in cards}
    for stream in known:
        if stream.device in found:
            found[stream.device].add(streams.pointer(stream))
    for parked in away:
        if parked.stream is not None:
            found[parked.storage.device].add(parked.stream)
    return found


def _governed_bytes(model: KernelMemory) -> dict[str, int]:
    """The bytes on each card of the governed models, and of the keys of their digests."""
    cards = {torch.device(memory.torch): memory.device for memory in model.memories}
    keys = [key for key in keys_on_cards() if key.device in cards]
    shares = [Share(cards[key.device], key.nbytes) for key in keys]
    total: dict[str, int] = {}
    for share in (*model.governed.shares(), *shares):
        total[share.device] = total.get(share.device, 0) + share.bytes
    return total


def _bytes(storages: Sequence[torch.UntypedStorage]) -> list[torch.Tensor]:
    """The content of each storage, as a tensor [nbytes] of uint8.

    Made in one call for each device, in inference mode, 10,000 take 9 ms instead of 20.
    """
    empty: dict[torch.device, Iterator[torch.Tensor]] = {}
    with torch.inference_mode():
        for device in {storage.device for storage in storages}:
            rows = torch.empty((len(storages), 0), dtype=torch.uint8, device=device)
            empty[device] = iter(rows.unbind())
        return [next(empty[storage.device]).set_(storage) for storage in storages]


def _set_staying(model: KernelMemory, found: Iterable[Found]) -> None:
    """Records what stays among the storages `found`: the bytes on each card for each reason."""
    model.staying = Staying.of(found)
    total = sum(part.bytes for part in model.staying)
    if model.memory.counted and total != (model.noted_staying.size if model.noted_staying else 0):
        model.noted_staying = None
        if total:
            model.noted_staying = model.memory.allocate(total, force=True)


def _largest(found: Iterable[Found]) -> int:
    return max([entry.storage.nbytes() for entry in found if not entry.stays], default=0)


_HasStorage = TypeVar("_HasStorage", Found, Away)


def _fitting(storages: Sequence[_HasStorage], most: int) -> list[_HasStorage]:
    """The largest of the `storages` that together have at most `most` bytes."""
    chosen = []
    for entry in sorted(storages, key=lambda entry: -entry.storage.nbytes()):
        if entry.storage.nbytes() <= most:
            most -= entry.storage.nbytes()
            chosen.append(entry)
    return chosen


_ONE_REFERENCE = 3  # what `sys.getrefcount` returns in `_is_used` if only `Away` has the storage


def _is_used(away: Away) -> bool:
    """Whether anything but `away` refers to its storage: a tensor, a graph, or a Python object."""
    storage = away.storage
    if torch._C._storage_Use_Count(storage._cdata) > 1:
        return True
    return sys.getrefcount(storage) > _ONE_REFERENCE


def _same(value: Any) -> Any:
    return value


def _in_ram(away: Away) -> torch.Tensor:
    return away.bytes if away.copy is None else away.copy


def _note(model: KernelMemory, size: int) -> None:
    """Records that the kernel's own code holds `size` bytes on the simulated card."""
    if size == (model.noted.size if model.noted else 0):
        return
    model.noted = None  # freed first: both together may exceed the capacity
    if size:
        model.noted = model.memory.allocate(size, force=True)
