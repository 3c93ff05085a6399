"""What happens after a cell of a notebook has run out of memory: room is made, and the story is told.

Idle leases are evicted until there is room. The story says what this notebook and the others held when the error was
raised, the largest number with which the cell would fit, and one thing to type. `Runs` has for this what earlier runs
of the cell took. A story has texts and figures only, and keeps no object of the user's.
"""

from __future__ import annotations

import ast
import gc
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
    VARIABLE,
    Name,
    Namespace,
    describe,
    frames_of,
    registered,
)
from ..scheduler.capacity import room, views
from ..scheduler.explain import SMALLEST_STRANGER
from ..scheduler.victims import reason_to_stay
from ..threads import imported
from ..units import parse_bytes, show_bytes
from ..user_frames import user_lines
from . import failures, holdings
from .session import Session

Bytes = Mapping[str, int]  # by the id of a card

# -- room for the cell


class Freed(NamedTuple):
    """The memory that came free after an out-of-memory error."""

    bytes: int
    titles: tuple[str, ...] = ()  # of the notebooks and models that left
    stay: Mapping[str, str] = {}  # why a lease has not left, by its id

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
    stay: dict[str, str] = {}
    if wanted and freed >= wanted:
        return Freed(freed, tuple(left))
    book = session.ledger.read()
    world = session.world(fresh=True)
    for lease in sorted(book.leases(), key=lambda lease: lease.last_used):
        here = sum(lease.bytes_on(card) for card in cards)
        why = reason_to_stay(lease, world, asker=session.me, importance=NORMAL)
        if not here or why or (lease.owner == session.me and lease.kind == "kernel"):
            continue
        stay[lease.id] = failures.evict_anywhere(session, lease, "A cell ran out of memory.")
        if not stay[lease.id]:
            freed += here
            left.append(lease_title(lease, book.owner(lease.owner)))
        if wanted and freed >= wanted:
            break
    session.probe.empty_cache()
    return Freed(freed, tuple(left), stay)


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


# -- what earlier runs of a cell took

MOST_CODE = 20_000  # characters of a cell in which numbers are looked for
MOST_RUNS = 8  # of one cell that are kept
MOST_CELLS = 200  # whose runs are kept


class Fit(NamedTuple):
    """The largest number with which a cell fits, by what two of its earlier runs took."""

    name: str  # a variable or an argument such as `batch`, or `in line 3`
    now: int  # its value in the run that failed
    most: int
    runs: tuple[tuple[int, int], ...]  # of the two runs: the number, and the bytes that were taken

    @property
    def change(self) -> str:
        """What to write into the cell, such as `batch = 48`."""
        most = min(self.most, self.now)
        if self.name.startswith("in line "):
            return f"{most} in place of {self.now} {self.name}"
        return f"{self.name} = {most}"

    def __str__(self) -> str:
        took = " and ".join(f"{show_bytes(size)} with {number}" for number, size in self.runs)
        most = f"about {self.change}" if self.most < self.now else f"{self.change} fits now"
        return f"{most} (this cell took {took})"


class _Run(NamedTuple):
    numbers: dict[str, int]
    taken: Bytes  # at the peak, beyond what the notebook held otherwise
    left: Bytes  # what the notebook held after it


class Runs:
    """What the cells of one kernel took, with the whole numbers in their code. Two runs of a cell give a slope.

    A cell is recognised by its code without the numbers, so `batch = 32` may become `batch = 64`. Numbers are
    constants of the code, and the notebook's variables that the code reads.
    """

    def __init__(self, sees_peaks: bool) -> None:
        """`sees_peaks` is false for simulated cards, where the peak of a cell is what the notebook holds after it.

        There a run replaces what the run before it has made, which a real peak still contains.
        """
        self._sees_peaks = sees_peaks
        self._cells: dict[str, dict[int, _Run]] = {}  # by code, then by the number of the run
        self._runs = 0
        self._text, self._code, self._numbers = "", "", dict[str, int]()
        self._held: Bytes = {}

    def begin(self, text: str, held: Bytes) -> None:
        """Called before the cell `text`, while the notebook's own code holds the bytes `held`."""
        self._runs += 1
        self._text = text
        self._code, self._numbers = numbers_in(text)
        self._held = dict(held)

    def end(self, text: str, held: Bytes, peak: Bytes, left: Bytes) -> None:
        """Called after the cell `text`, before which the notebook held the bytes `held`.

        `peak` has the most bytes that it held meanwhile, and `left` those it holds now. Called again for the same run
        if its count was made later.
        """
        if text != self._text:  # nobody was told of the first cell's beginning
            self.begin(text, held)
        if not self._numbers:
            return
        replaced = self._replaced()
        taken = {
            card: size - self._held.get(card, 0) + replaced.get(card, 0)
            for card, size in peak.items()
        }
        runs = self._cells.pop(self._code, {})
        runs[self._runs] = _Run(self._numbers, taken, dict(left))
        self._cells[self._code] = dict(list(runs.items())[-MOST_RUNS:])
        while len(self._cells) > MOST_CELLS:
            self._cells.pop(next(iter(self._cells)))

    def failed(self) -> None:
        """Called after the cell has failed. It took less than it needs, so its run tells nothing."""
        self._cells.get(self._code, {}).pop(self._runs, None)

    def _replaced(self) -> Bytes:
        """What the last run of the same cell has made, if nothing else has changed since."""
        earlier = [run for number, run in self._earlier() if number < self._runs]
        if self._sees_peaks or not earlier or dict(earlier[-1].left) != self._held:
            return {}
        return earlier[-1].taken

    def _earlier(self) -> list[tuple[int, _Run]]:
        return list(self._cells.get(self._code, {}).items())

    def fit(self, card: str, free_bytes: int) -> Fit | None:
        """The largest number with which the cell that failed fits on `card`; None if no two runs tell it.

        `free_bytes` are the bytes of the card that the notebook may hold as a whole.
        """
        free_bytes += self._replaced().get(card, 0) - self._held.get(card, 0)
        for name, now in self._numbers.items():
            others = {**self._numbers, name: 0}
            taken = {
                run.numbers[name]: run.taken.get(card, 0)
                for _, run in self._earlier()
                if {**run.numbers, name: 0} == others and run.numbers[name] < now
            }
            if len(taken) < 2:
                continue
            (less, first), (more, second) = runs = sorted(taken.items())[-2:]
            if second <= first:
                continue
            most = more + (free_bytes - second) * (more - less) // (second - first)
            if most > 0:
                return Fit(name, now, most, tuple(runs))
        return None


def numbers_in(text: str) -> tuple[str, dict[str, int]]:
    """The code of the cell `text` without its whole numbers above 0, and these numbers by name.

    A number is named by the variable or the argument that it is given to, or by its line. The values of variables
    that the code only reads are numbers too. Code that is not Python has none.

    >>> numbers_in("batch = 64\\nx = torch.randn(batch, 8)")[1]
    {'batch': 64, 'in line 2': 8}
    """
    lines = ["" if one.lstrip().startswith(("%", "!")) else one for one in text.splitlines()]
    try:
        tree = ast.parse("\n".join(lines) if len(text) <= MOST_CODE else "")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # another language, or a magic
        return "", {}
    names: dict[int, str] = {}
    nodes = list(ast.walk(tree))
    assigned = {one.id for one in nodes if isinstance(one, ast.Name) and not _is_read(one)}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[id(node.value)] = node.targets[0].id
        elif isinstance(node, ast.keyword) and node.arg:
            names[id(node.value)] = node.arg
    numbers: dict[str, int] = {}
    for node in nodes:
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value > 0:
            name = names.get(id(node), f"in line {node.lineno}")
            while name in numbers:
                name += ", the next"
            numbers[name], node.value = node.value, 0
    namespace = registered.current()
    for node in nodes:
        if isinstance(node, ast.Name) and _is_read(node) and node.id not in assigned:
            for value in namespace.held(Name(node.id, VARIABLE)):
                if type(value) is int and value > 0:
                    numbers[node.id] = value
    return ast.dump(tree), numbers


def _is_read(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)


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
        namespace = _AtError(registered.current(), error)
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
        from ..backends.pytorch import memory_history

        card = torch.device(self._session.probe.place(self.card).torch)
        found = memory_history.read(card)
        memory_history.start(card)
        return found

    def _released_bytes(self) -> int:
        """What `%gpu free` would free: outputs and the allocator's cache."""
        outputs = [one.alone_bytes for one in self._held.holders if one.kind == OUTPUT]
        return self._held.cached_bytes + sum(outputs)

    def _others(self, freed: Freed) -> tuple[tuple[str, ...], int]:
        """What left, and what else is on the card, the largest first; and the bytes that stay."""
        session, card = self._session, self.card
        book, world = session.look()
        words = [f"{title} stepped aside" for title in freed.titles]
        staying_bytes = 0
        leases = [one for one in book.leases() if one.owner != session.me and one.bytes_on(card)]
        for lease in sorted(leases, key=lambda one: -one.bytes_on(card)):
            why = reason_to_stay(lease, world, asker=session.me, importance=NORMAL)
            why = freed.stay.get(lease.id) or why
            size = lease.bytes_on(card)
            staying_bytes += size if why else 0
            what = f"{lease_title(lease, book.owner(lease.owner))} ({show_bytes(size)})"
            words.append(f"{what} stays: {why}" if why else f"{what} leaves if the cell needs it")
        view = next(one for one in views(book, world) if one.device.id == card)
        unleased = (view.measured_bytes or 0) - view.claimed_bytes
        if unleased > SMALLEST_STRANGER:
            words.append(f"{show_bytes(unleased)} without a lease stays")
            staying_bytes += unleased
        return tuple(words), staying_bytes


def last(session: Session) -> OutOfMemoryStory:
    """The story of this notebook's last out-of-memory error. Raises GpuError if there was none."""
    story = session.kernel.story if session.kernel is not None else None
    if story is None:
        raise GpuError("no cell of this notebook has run out of memory yet; --oom is for notebooks")
    return story
