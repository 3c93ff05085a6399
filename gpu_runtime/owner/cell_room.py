"""Room for a cell of plain code, which makes no request before it takes memory.

Before a cell runs, this module requests the memory that the cell took at its peak the last time.
The wait is bounded, and the cell runs in any case. After a cell that ran out of memory, idle
notebooks and models are evicted.
"""

from __future__ import annotations

import gc
import re
import traceback
from typing import Any, NamedTuple

from msgspec.structs import replace

from ..backends.base import is_out_of_memory
from ..cell_keys import cell_key
from ..errors import GpuError
from ..facts import NORMAL, Footprint, Lease, Phase, PlacementRules, lease_title
from ..notebook import notebook_path
from ..scheduler.evictable import reason_to_stay
from ..telemetry.cell_peaks import peaks_of_this_user
from ..telemetry.measurements import Measurements
from ..units import MIB, parse_bytes, show_bytes
from . import acquire, failures
from .kernel_resident import Bytes, KernelResident, exactly
from .pins import AnchorRef
from .resident import Place
from .session import Session, log

LEAST_BYTES = 8 * MIB  # fewer bytes are not requested
WAIT_TURNS = 2  # the longest wait of a cell for room, in turns of other notebooks
CHANGED = 0.01  # a peak that differs by a smaller fraction is not written again


class CellRoom:
    """The peaks of this notebook's cells, and the requests for room for these peaks."""

    def __init__(self, session: Session) -> None:
        """Keeps the peaks of the notebook of `session` in a file.

        If the ledger has no directory (a ledger in memory, for example), the peaks are only kept
        in memory.
        """
        self._session = session
        lasting = getattr(session.ledger, "directory", None) is not None
        self._peaks = peaks_of_this_user() if lasting else Measurements()
        self._leased_bytes = 0  # bytes that blocks of code had leased before this cell
        self._block: str | None = None  # the name of this cell's room, if the kernel has no lease

    def wanted(self, text: str) -> Bytes:
        """The bytes of each card that the cell took at the peak of its last run.

        `text` is the source of the cell. The result is empty if the peak is unknown or above a
        card's limit, or if the memory governor is off.
        """
        self._leased_bytes = self._session.blocks.leased_bytes
        key = cell_key(notebook_path(), text)
        if not key or not self._session.settings.enable_memory_governor:
            return {}
        peak = self._peaks.cell_peak(key)
        if not peak:
            return {}
        limits = self._session.ledger.read().limits or self._session.limits
        hopeless = [card for card, size in peak.items() if size > limits.get(card, 0)]
        if hopeless:
            return {}  # no wait would help
        return peak

    def learn(self, text: str, peak: Bytes) -> None:
        """Stores the `peak` of the cell with the source `text`, unless the cell leased memory."""
        key = cell_key(notebook_path(), text)
        if not key or self._session.blocks.leased_bytes != self._leased_bytes:
            return
        before = self._peaks.cell_peak(key)
        is_same = before.keys() == peak.keys()
        for card, size in peak.items():
            is_same = is_same and abs(size - before[card]) <= CHANGED * size
        if not is_same:
            self._peaks.remember_cell(key, dict(peak))

    # -- before a cell

    def request(self, resident: KernelResident | None, pin: AnchorRef, wanted: Bytes) -> None:
        """Requests the bytes of `wanted` that the kernel does not hold yet, and pins the kernel.

        `wanted` has the bytes that the cell needs of each card. `pin` refers to the cell's anchor.
        If the wait takes too long, or if the kernel's memory has to leave meanwhile, this method
        returns without the room.
        """
        session = self._session
        if self._block is not None:  # another cell runs this cell, and has its room already
            return
        more = {}
        for card, size in wanted.items():
            missing = size - (resident.lease.bytes_on(card) if resident else 0)
            if missing > 0:
                more[card] = missing
        if sum(more.values()) < LEAST_BYTES:
            return
        name = "room for a cell"  # a process has at most one
        key = session.new_key(f"lease {name}")
        granted = False
        try:
            for lease in self._grants(name, key, more, resident):
                granted = True
                if resident is None:
                    session.blocks[name] = (lease, pin)
                    self._block = name
                elif resident.enter(pin):
                    resident.claim(wanted)
                break
        except GpuError as error:  # the wait is over, or waiting is useless: the cell runs
            log.debug("a cell runs without its room: %s", error)
        finally:
            session.done_with(key.note)
            if not granted:
                session.withdraw(key)
        if granted:
            self._note(resident, more)

    def _grants(self, name: str, key: Any, more: Bytes, resident: KernelResident | None) -> Any:
        """Waits for the grant of the bytes `more` of each card, and yields the lease on them.

        If the kernel's memory leaves its card before the grant, nothing is yielded.
        """
        session = self._session
        wanted = Lease(session.me, name, kind="block", movable=False)
        rules = replace(PlacementRules(devices=tuple(more)), **exactly(more))
        footprint = Footprint.of(sum(more.values()), "measured")

        def is_over() -> bool:
            return resident is not None and resident.place is not Place.HERE

        for verdict in acquire.grants(
            session, key, wanted, footprint, rules, self.patience_seconds, is_over
        ):
            yield replace(
                verdict.lease,
                shares=verdict.lease.target,
                target=(),
                phase=Phase.SETTLED,
                key="",
                settled_at=session.clock(),
            )

    @property
    def patience_seconds(self) -> float:
        """The longest time that a cell waits for room."""
        return WAIT_TURNS * self._session.settings.gpu_park_turn_seconds

    def _note(self, resident: KernelResident | None, more: Bytes) -> None:
        """Writes into the journal that the kernel's lease has grown by the bytes `more`."""
        session = self._session
        size = sum(more.values())
        lease = resident.lease if resident else Lease(session.me, "kernel", kind="kernel")
        because = f"The cell took {show_bytes(size)} more than this the last time it ran."
        session.note(lease, "grown", "cell", because, size=size, device=next(iter(more)))

    def end(self, resident: KernelResident | None) -> bool:
        """Ends the claim on the cell's room. Returns whether there was such a claim."""
        block, self._block = self._block, None
        if block is not None:
            self._session.blocks.pop(block, None)
        if resident is None or not resident.claims:
            return block is not None
        resident.claim({})
        return True


# -- after a cell that ran out of memory


class Freed(NamedTuple):
    """The memory that came free after an out-of-memory error."""

    bytes: int
    titles: tuple[str, ...]  # of the notebooks and models that left

    def __str__(self) -> str:
        return f"{show_bytes(self.bytes)} came free ({', '.join(self.titles)} stepped aside)"


def make_room(session: Session, error: BaseException) -> Freed:
    """Evicts idle leases until there is room for the bytes that the out-of-memory `error` names.

    If `error` names no size, all idle leases are evicted. Models of this process that left at the
    end of the cell's `with` block count as freed memory.
    """
    gone: tuple[Lease, ...] = getattr(error, "left", ())
    wanted = bytes_wanted(error)
    freed = sum(lease.bytes for lease in gone)
    left = [lease.name for lease in gone]
    if wanted and freed >= wanted:
        return Freed(freed, tuple(left))
    book = session.ledger.read()
    world = session.world(fresh=True)
    cards = {device.id for device in session.probe.devices if not device.is_host}
    for lease in sorted(book.leases(), key=lambda lease: lease.last_used):
        here = sum(lease.bytes_on(card) for card in cards)
        why = reason_to_stay(lease, world, asker=session.me, importance=NORMAL)
        if not here or why or (lease.owner == session.me and lease.kind == "kernel"):
            continue
        if failures.evict_anywhere(session, lease, "A cell ran out of memory."):
            freed += here
            left.append(lease_title(lease, book.owner(lease.owner)))
        if wanted and freed >= wanted:
            break
    session.probe.empty_cache()
    return Freed(freed, tuple(left))


def forget_frames(error: BaseException) -> None:
    """Clears the ended frames of `error` and of its causes, since these frames keep tensors alive."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            traceback.clear_frames(current.__traceback__)
            pending += [current.__cause__, current.__context__]
    gc.collect()


def bytes_wanted(error: BaseException) -> int:
    """The bytes that torch could not allocate, read from the message of `error` or of its cause.

    Returns 0 if no message names a size.
    """
    for one in (error, error.__cause__):
        if one is not None and is_out_of_memory(one):
            found = re.search(r"Tried to allocate ([\d.]+ ?(?:[KMGT]?i?B)?)", str(one))
            if found:
                return parse_bytes(found[1].strip())
    return 0
