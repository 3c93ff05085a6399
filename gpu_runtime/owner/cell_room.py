"""Room for a cell of plain code, which makes no request before it takes memory.

Before a cell runs, this module requests the memory that the cell took the last time, beyond what
the notebook already held. The wait is bounded, and the cell runs in any case. After a cell that ran
out of memory, idle notebooks and models are evicted.
"""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from ..backends.base import is_out_of_memory
from ..cell_keys import cell_key
from ..errors import GpuError
from ..facts import NORMAL, Footprint, Lease, Phase, PlacementRules, lease_title
from ..notebook import notebook_path
from ..scheduler.victims import reason_to_stay
from ..telemetry.measurements import Measurements, cells_of_this_user
from ..units import MIB, parse_bytes, show_bytes, show_seconds
from . import acquire, failures
from .kernel_resident import NAME, Bytes, KernelResident, exactly, sizes
from .pins import AnchorRef
from .resident import Place
from .session import Session, log

LEAST_BYTES = 8 * MIB  # fewer bytes are not requested
LEAST_WAIT_SECONDS = 1.0  # a shorter wait shows nothing
WAIT_TURNS = 2  # the longest wait of a cell for room, in turns of other notebooks
CHANGED = 0.01  # bytes that differ by a smaller fraction are not written again
AGAIN = "+"  # at the end of a key: for runs after the first one of this kernel
MOST_RUN = 10_000  # cells whose runs in this kernel are known; beyond that all count as not run


class CellRoom:
    """The bytes that this notebook's cells took, and the requests for room for these bytes.

    A cell that makes a model takes memory when it runs for the first time in a kernel. When the same
    kernel runs it again, the new model often replaces the old one. So for each cell two numbers are
    kept: for the first run in a kernel, and for later runs.
    """

    def __init__(self, session: Session) -> None:
        """Keeps the bytes that the cells of the notebook of `session` took in a file.

        If the ledger has no directory (a ledger in memory, for example), the bytes are only kept
        in memory.
        """
        self._session = session
        lasting = getattr(session.ledger, "directory", None) is not None
        self._cells = cells_of_this_user() if lasting else Measurements()
        self._held: Bytes | None = {}  # when the cell began; None: unknown
        self._run: set[str] = set()  # the keys of the cells that this kernel has run
        self._is_first = True  # whether the last cell ran for the first time in this kernel
        self._replaced: dict[str, Bytes] = {}  # what was known before the last cell, by key
        self._leased_bytes = 0  # bytes that blocks of code had leased before this cell
        self._block: str | None = None  # the name of this cell's room, if the kernel has no lease

    def before(
        self, text: str, handle: Any, resident: KernelResident | None, uncounted: bool
    ) -> Bytes:
        """Called before the cell `text`: starts to measure its peak. The result is that of `wanted`.

        `handle` is the handle of the kernel's backend; None before the first count. `uncounted` is
        true if the count after the last cell was skipped.
        """
        if handle is not None:
            backend: Any = self._session.backend(NAME)
            backend.watch_peaks(handle)
            held = backend.peaks(handle, counted=False)  # a peak that has just begun: the bytes now
            if held is not None:
                return self.wanted(text, sizes(held))
        is_known = not uncounted and (resident is None or resident.place is not Place.MOVING)
        return self.wanted(text, resident.held() if resident else {}, is_known)

    def after(
        self, text: str, handle: Any, resident: KernelResident | None, uncounted: bool
    ) -> None:
        """Called after the cell `text`: stores the bytes that it took, if its peak is known.

        The peak is unknown if the count was skipped on cards that record no peak (simulated ones).
        """
        if not text or handle is None:
            return
        backend: Any = self._session.backend(NAME)
        peak = backend.peaks(handle, counted=not uncounted)
        if peak is not None:
            left = resident.held() if resident else {}
            self.learn(text, sizes(peak), None if uncounted else left)

    def wanted(self, text: str, held: Bytes, is_known: bool = True) -> Bytes:
        """The bytes of each card that the cell needs at its peak, if it takes as much as the last time.

        `text` is the source of the cell. `held` has the bytes that the notebook's own code holds now;
        if `is_known` is false, they are out of date. The result is empty if it is unknown what the
        cell takes, if a card's limit is smaller, or if the memory governor is off.
        """
        self._leased_bytes = self._session.blocks.leased_bytes
        self._held = dict(held) if is_known else None
        self._replaced = {}
        key = cell_key(notebook_path(), text)
        self._is_first = key not in self._run
        if not key or not self._session.settings.enable_memory_governor:
            return {}
        taken = self._cells.cell_bytes(key if self._is_first else key + AGAIN)
        wanted = {card: held.get(card, 0) + size for card, size in taken.items()}
        if not wanted:
            return {}
        limits = self._session.ledger.read().limits or self._session.limits
        hopeless = [card for card, size in wanted.items() if size > limits.get(card, 0)]
        return {} if hopeless else wanted  # no wait would help

    def learn(self, text: str, peak: Bytes, left: Bytes | None = None) -> None:
        """Stores what the cell with the source `text` took, unless the cell leased memory.

        Called again for the same run if a count that was skipped after the cell is made later.
        `peak` has the most bytes that the notebook's own code held while the cell ran, and `left`
        the bytes that it held after the cell; None: unknown.
        """
        key, held = cell_key(notebook_path(), text), self._held
        leased = self._session.blocks.leased_bytes != self._leased_bytes
        if not key or held is None or leased:
            return
        if len(self._run) >= MOST_RUN:
            self._run.clear()
        self._run.add(key)
        self._remember(key if self._is_first else key + AGAIN, _beyond(held, peak))
        if self._is_first and left is not None and not self._cells.cell_bytes(key + AGAIN):
            # The next run probably replaces what this run left, and needs the rest again.
            self._remember(key + AGAIN, _beyond(left, peak))

    def failed(self, out_of_memory: bool) -> None:
        """Called after the last cell has failed. It may need more memory than it took until then.

        So what was known of the cell stays, if that is more. A cell that ran out of memory has left
        nothing that its next run could replace.
        """
        for key, before in self._replaced.items():
            now = self._cells.cell_bytes(key)
            most = {card: max(size, now.get(card, 0)) for card, size in before.items()}
            self._remember(key, {**now, **most})
            if out_of_memory:
                self._run.discard(key)
        self._held = None  # a count that is made later must not be stored

    def _remember(self, key: str, taken: Bytes) -> None:
        before = self._cells.cell_bytes(key)
        self._replaced.setdefault(key, before)
        is_same = before.keys() == taken.keys()
        for card, size in taken.items():
            is_same = is_same and abs(size - before[card]) <= CHANGED * size
        if not is_same:
            self._cells.remember_cell(key, dict(taken))

    # -- before a cell

    def request(self, resident: KernelResident | None, pin: AnchorRef, wanted: Bytes) -> str:
        """Requests the bytes of `wanted` that the kernel does not hold yet, and pins the kernel.

        `wanted` has the bytes that the cell needs of each card. `pin` refers to the cell's anchor.
        If the wait takes too long, or if the kernel's memory has to leave meanwhile, this method
        returns without the room. The result is a sentence for the user about a wait that was long
        enough to be shown, or an empty text.
        """
        session = self._session
        if self._block is not None:  # another cell runs this cell, and has its room already
            return ""
        more = {}
        for card, size in wanted.items():
            missing = size - (resident.lease.bytes_on(card) if resident else 0)
            if missing > 0:
                more[card] = missing
        if sum(more.values()) < LEAST_BYTES:
            return ""
        name = "room for a cell"  # a process has at most one
        began, before = session.clock(), self._of_others(more)
        key = session.new_key(f"lease {name}")
        granted, why = False, ""
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
            why = str(error.facts.get("because", ""))
        finally:
            session.done_with(key.note)
            if not granted:
                session.withdraw(key)
        if granted:
            self._note(resident, more)
        waited = session.clock() - began
        if waited < LEAST_WAIT_SECONDS or not (granted or why):
            return ""
        return self._line(waited, more, before, why)

    def _line(self, waited: float, more: Bytes, before: Mapping[str, str], why: str) -> str:
        """The line that stays after a wait of `waited` seconds for the bytes `more`.

        `before` has the leases of others when the wait began. `why` is the reason of a wait in vain.
        """
        room = " + ".join(f"{show_bytes(size)} on {card}" for card, size in more.items())
        line = f"for {room}, which this cell took the last time"
        if why:
            return f"Waited {show_seconds(waited)} in vain {line}. {why.rstrip('.')}."
        after = self._of_others(more)
        left = ", ".join(title for id, title in before.items() if id not in after)
        who_left = f"; {left} left the card" if left else ""
        return f"Waited {show_seconds(waited)} {line}{who_left}."

    def _of_others(self, cards: Iterable[str]) -> dict[str, str]:
        """The leases of other processes that are wholly on one of the `cards`: their titles, by id."""
        session = self._session
        book = session.ledger.read()
        return {
            lease.id: lease_title(lease, book.owner(lease.owner))
            for lease in book.leases()
            if lease.owner != session.me and lease.all_on_device
            if any(lease.bytes_on(card) for card in cards)
        }

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
        card = next(iter(more))
        lease = resident.lease if resident else Lease(session.me, "kernel", kind="kernel")
        because = f"The cell took {show_bytes(size)} more than this the last time it ran."
        session.note(lease, "grown", "cell", because, size=size, device=card)

    def end(self, resident: KernelResident | None) -> bool:
        """Ends the claim on the cell's room. Returns whether there was such a claim."""
        block, self._block = self._block, None
        if block is not None:
            self._session.blocks.pop(block, None)
        if resident is None or not resident.claims:
            return block is not None
        resident.claim({})
        return True


def _beyond(held: Bytes, peak: Bytes) -> Bytes:
    """The bytes of `peak` beyond those in `held`, by card. Empty if they are fewer than LEAST_BYTES."""
    more = {card: size - held.get(card, 0) for card, size in peak.items()}
    more = {card: size for card, size in more.items() if size > 0}
    return more if sum(more.values()) >= LEAST_BYTES else {}


# -- after a cell that ran out of memory


class Freed(NamedTuple):
    """The memory that came free after an out-of-memory error."""

    bytes: int
    titles: tuple[str, ...]  # of the notebooks and models that left

    def __str__(self) -> str:
        return f"{show_bytes(self.bytes)} came free ({', '.join(self.titles)} stepped aside)"


def make_room(session: Session, error: BaseException) -> Freed:
    """Evicts idle leases until there is room for the bytes that the out-of-memory `error` names.

    Only leases on the card that `error` names leave. If it names no card, those on all cards do. If
    `error` names no size, all these idle leases are evicted. Models of this process that left at the
    end of the cell's `with` block count as freed memory.
    """
    gone: tuple[Lease, ...] = getattr(error, "left", ())
    wanted, cards = bytes_wanted(error), failures.full_cards(session, error)
    freed = sum(lease.bytes_on(card) for lease in gone for card in cards)
    left = [lease.name for lease in gone]
    if wanted and freed >= wanted:
        return Freed(freed, tuple(left))
    book = session.ledger.read()
    world = session.world(fresh=True)
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
