"""What happens after a cell of a notebook has run out of memory: room is made, and the story is told.

Idle leases are evicted until there is room. The story says what this notebook and the others held when the error was
raised, the largest number with which the cell would fit, and one thing to type. A story has texts and figures only,
and keeps no object of the user's.
"""

from __future__ import annotations

import gc
import math
import re
import traceback
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

from ..backends.base import is_out_of_memory
from ..errors import GpuError
from ..facts import KERNEL, NORMAL, Lease, OutOfMemoryStory, lease_title
from ..names import (
    ERROR,
    OUTPUT,
    RUNNING,
    Name,
    Namespace,
    describe,
    frames_of,
    registered,
    with_causes,
)
from ..scheduler.capacity import room, views
from ..scheduler.refusals import SMALLEST_STRANGER
from ..scheduler.victims import reason_to_stay
from ..threads import imported
from ..units import parse_bytes, show_bytes
from ..user_frames import user_lines
from . import failures, holdings
from .cell_room import Runs
from .session import Session

# -- room for the cell


class Freed(NamedTuple):
    """The memory that came free after an out-of-memory error."""

    bytes: int
    titles: tuple[str, ...] = ()  # of the notebooks and models that left
    stay: Mapping[str, str] = {}  # why a lease has not left, by its id

    def __str__(self) -> str:
        return f"{show_bytes(self.bytes)} came free ({', '.join(self.titles)} stepped aside)"


def room_for_cell(session: Session, error: BaseException) -> Freed:
    """Evicts idle leases until there is room for the bytes that the out-of-memory `error` names.

    Only leases on the card that `error` names leave. If it names no card, those on all cards do. If
    `error` names no size, all these idle leases are evicted. Models of this process that left at the
    end of the cell's `with` block count as freed memory.
    """
    gone: list[Lease] = list(getattr(error, "left", ()))
    wanted, cards = bytes_wanted(error) or math.inf, failures.full_cards(session, error)
    freed = sum(lease.bytes_on(card) for lease in gone for card in cards)
    owners = session.ledger.read()  # before they leave
    because = "A cell ran out of memory."
    own_code, enough = f"{session.me}/{KERNEL}", wanted - freed
    left, stay = failures.evict_idle(session, cards, because, spared=own_code, enough=enough)
    freed += sum(lease.bytes_on(card) for lease in left for card in cards)
    titles = [lease_title(lease, owners.owner(lease.owner)) for lease in left]
    return Freed(freed, (*(lease.name for lease in gone), *titles), stay)


def forget_frames(error: BaseException) -> None:
    """Clears the ended frames of `error` and of its causes, since these frames keep tensors alive."""
    for cause in with_causes([error]):
        traceback.clear_frames(cause.__traceback__)
    gc.collect()


def bytes_wanted(error: BaseException) -> int:
    """The bytes that torch could not allocate, read from the message of `error` or of its cause.

    Returns 0 if no message names a size.
    """
    for cause in (error, error.__cause__):
        if cause is not None and is_out_of_memory(cause):
            found = re.search(r"Tried to allocate ([\d.]+ ?(?:[KMGT]?i?B)?)", str(cause))
            if found:
                return parse_bytes(found[1].strip())
    return 0


# -- the story

SEARCH_SECONDS = 2.0  # for what this notebook held, while the user waits
MOST_LOCALS = 40  # objects of the functions that failed


class _AtError(Namespace):
    """The names of a notebook when an error was raised: also the local variables of the functions that failed."""

    def __init__(self, around: Namespace, error: BaseException) -> None:
        self._around = around
        self._locals: dict[Name, tuple[FrameType, str]] = {}
        seen: set[int] = set()
        for frame in frames_of([error]):
            for key, value in _locals(frame).items():
                if id(value) not in seen and not isinstance(value, (str, int, float, type(None))):
                    seen.add(id(value))
                    name = Name(f"{key} in {frame.f_code.co_name}()", RUNNING, describe(value))
                    self._locals.setdefault(name, (frame, key))

    def names(self) -> list[Name]:
        others = [name for name in self._around.names() if name.kind != ERROR]
        return [*others, *list(self._locals)[:MOST_LOCALS]]

    def held(self, name: Name) -> list[Any]:
        if name not in self._locals:
            return self._around.held(name)
        frame, key = self._locals[name]
        values = _locals(frame)
        return [values[key]] if key in values else []

    def shared(self) -> list[Any]:
        return [*self._around.shared(), self, self._locals]


def _locals(frame: FrameType) -> dict[str, Any]:
    """The local variables of a function's `frame`. Up to Python 3.12 the frame itself keeps no copy of them."""
    found = frame.f_locals
    values = dict(found)
    if isinstance(found, dict):
        found.clear()
    return values


class Telling:
    """Makes the story of one out-of-memory error. It is made before room is made, since it looks at what was held."""

    def __init__(self, session: Session, error: BaseException) -> None:
        self._session = session
        self._lines = tuple(user_lines(error))
        self._wanted = bytes_wanted(error)
        namespace = _AtError(registered.current, error)
        self._held = holdings.search_here(session, SEARCH_SECONDS, namespace=namespace)
        rooms = room(*session.look())
        # If the message names no card, the one with the least room is the full one.
        cards = failures.full_cards(session, error)
        self.card = min(cards, key=lambda card: rooms.get(card, 0))
        self._free = max(0, rooms.get(self.card, 0))
        self._stack, self._allocated = self._record()

    def story(self, freed: Freed, runs: Runs, cap: str = "") -> OutOfMemoryStory:
        """The story, after room was made: `freed` is what left. `runs` are the earlier runs of the cell.

        `cap` is the sentence about the cap that explains the error, if one does.
        """
        session, card = self._session, self.card
        kernel = session.residents.get(KERNEL)
        own = kernel.lease.bytes_on(card) if kernel is not None else 0
        free = max(0, room(*session.look()).get(card, 0))
        fit = runs.fit(card, free + own)
        others, staying_bytes = self._others(freed)
        if cap:
            advice = cap
        elif fit is not None and fit.most < fit.now:
            advice = f"{fit.change}, and run the cell again"
        elif freed.titles and free >= self._wanted:
            advice = "run the cell again"
        elif self._released_bytes() >= max(1, self._wanted):
            advice = "%gpu free, and run the cell again"
        elif staying_bytes >= max(1, self._wanted):
            advice = "%gpu (who holds the memory)"
        else:
            advice = "%gpu who (what could be deleted)"
        wanted = f"{show_bytes(self._wanted)} more was wanted, and " if self._wanted else ""
        return OutOfMemoryStory(
            headline=f"Out of memory on {card}: {wanted}{show_bytes(self._free)} was free.",
            lines=self._lines,
            held=self._held,
            others=others,
            fits=str(fit) if fit else "",
            advice=advice,
            device=card,
            wanted_bytes=self._wanted,
            free_bytes=self._free,
            stack=self._stack,
            allocated=self._allocated,
        )

    def _record(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What torch has recorded about the allocations of a real card since this kernel's first such error."""
        torch = imported("torch")
        if torch is None:
            return (), ()
        from ..backends.pytorch import streams

        card = torch.device(self._session.probe.place(self.card).torch)
        found = streams.recorded_lines(card)
        streams.record_lines(card)
        return found

    def _released_bytes(self) -> int:
        """What `%gpu free` would free: outputs and the allocator's cache."""
        outputs = [holder.alone_bytes for holder in self._held.holders if holder.kind == OUTPUT]
        return self._held.cached_bytes + sum(outputs)

    def _others(self, freed: Freed) -> tuple[tuple[str, ...], int]:
        """What left, and what else is on the card, the largest first; and the bytes that stay."""
        session, card = self._session, self.card
        book, world = session.look()
        words = [f"{title} stepped aside" for title in freed.titles]
        staying_bytes = 0
        leases = [
            peer for peer in book.leases() if peer.owner != session.me and peer.bytes_on(card)
        ]
        for lease in sorted(leases, key=lambda peer: -peer.bytes_on(card)):
            why = reason_to_stay(lease, world, asker=session.me, importance=NORMAL)
            why = freed.stay.get(lease.id) or why
            size = lease.bytes_on(card)
            staying_bytes += size if why else 0
            what = f"{book.title(lease)} ({show_bytes(size)})"
            words.append(f"{what} stays: {why}" if why else f"{what} leaves if the cell needs it")
        view = next(view for view in views(book, world) if view.device.id == card)
        unleased = (view.measured_bytes or 0) - view.claimed_bytes
        if unleased > SMALLEST_STRANGER:
            words.append(f"{show_bytes(unleased)} of other programs stays")
            staying_bytes += unleased
        return tuple(words), staying_bytes


def last(session: Session) -> OutOfMemoryStory:
    """The story of this notebook's last out-of-memory error. Raises GpuError if there was none."""
    story = session.kernel.story if session.kernel is not None else None
    if story is None:
        raise GpuError("no cell of this notebook has run out of memory yet; --oom is for notebooks")
    return story
