"""Room for a cell of plain code: the bytes that the cell took when it ran before, which are requested before it runs.

Plain code makes no request before it takes memory. The wait is bounded, and the cell runs in any case. `CellRoom` keeps
what the cells took in a file. `Runs` keeps in this process what each run of a cell took, with the numbers in its code;
after an out-of-memory error they tell the number with which the cell would fit.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import GpuError
from ..facts import KERNEL, Footprint, Lease, PlacementRules, Shares
from ..notebook import cell_key, notebook_path, variables
from ..telemetry.measurements import Measurements, cells_of_this_user
from ..units import MIB, show_bytes, show_seconds
from . import acquire
from .pins import AnchorRef
from .resident import Place
from .session import Session, log

Bytes = Mapping[str, int]  # by the id of a card
KernelResident = Any  # its module imports this one

LEAST_ROOM_BYTES = 8 * MIB  # fewer bytes are not requested
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
        cards = [session.probe.place(card.id) for card in session.probe.cards]
        self.runs = Runs(sees_peaks=not cards[0].counted)
        self._block: str | None = None  # the name of this cell's room, if the kernel has no lease

    def before(
        self, text: str, handle: Any, resident: KernelResident | None, uncounted: bool
    ) -> Bytes:
        """Called before the cell `text`: starts to measure its peak. The result is that of `wanted`.

        `handle` is the handle of the kernel's backend; None before the first count. `uncounted` is
        true if the count after the last cell was skipped.
        """
        if handle is not None:
            backend: Any = self._session.backend(KERNEL)
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
        backend: Any = self._session.backend(KERNEL)
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
        self.runs.begin(text, held)
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
        if left is not None:
            self.runs.end(text, held, peak, left)
        self._remember(key if self._is_first else key + AGAIN, _beyond(held, peak))
        if self._is_first and left is not None and not self._cells.cell_bytes(key + AGAIN):
            # The next run probably replaces what this run left, and needs the rest again.
            self._remember(key + AGAIN, _beyond(left, peak))

    def failed(self, out_of_memory: bool) -> None:
        """Called after the last cell has failed. It may need more memory than it took until then.

        So what was known of the cell stays, if that is more. A cell that ran out of memory has left
        nothing that its next run could replace.
        """
        self.runs.failed()
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
        if sum(more.values()) < LEAST_ROOM_BYTES:
            return ""
        name = "room for a cell"  # a process has at most one
        began, before = session.clock(), self._of_others(more)
        wanted_lease = Lease(session.me, name, kind="block", movable=False)
        exact = PlacementRules(tuple(more), margin_bytes=0)
        rules = acquire.bound_to(more, exact)
        footprint = Footprint.of(sum(more.values()), "measured")

        def is_over() -> bool:
            """Whether the kernel's memory has left its card, so that the room is not needed now."""
            return resident is not None and resident.place is not Place.HERE

        key = session.new_key(f"lease {name}")
        granted, why = False, ""
        try:
            for verdict in acquire.grants(
                session, key, wanted_lease, footprint, rules, self.patience_seconds, is_over
            ):
                granted = True
                if resident is None:
                    session.blocks[name] = (acquire.settled(verdict.lease, session.clock()), pin)
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
            lease.id: book.title(lease)
            for lease in book.leases()
            if lease.owner != session.me and lease.all_on_device
            if any(lease.bytes_on(card) for card in cards)
        }

    @property
    def patience_seconds(self) -> float:
        """The longest time that a cell waits for room."""
        return WAIT_TURNS * self._session.settings.gpu_park_turn_seconds

    def _note(self, resident: KernelResident | None, more: Bytes) -> None:
        """Writes into the journal that the kernel's lease has grown by the bytes `more`."""
        session = self._session
        size = sum(more.values())
        card = next(iter(more))
        lease = resident.lease if resident else Lease(session.me, KERNEL, kind=KERNEL)
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
    """The bytes of `peak` beyond those in `held`, by card. Empty if they are fewer than LEAST_ROOM_BYTES."""
    more = {card: size - held.get(card, 0) for card, size in peak.items()}
    more = {card: size for card, size in more.items() if size > 0}
    return more if sum(more.values()) >= LEAST_ROOM_BYTES else {}


def sizes(shares: Shares) -> dict[str, int]:
    """The bytes of the `shares`, by the id of the card."""
    return {share.device: share.bytes for share in shares}


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
    lines = ["" if line.lstrip().startswith(("%", "!")) else line for line in text.splitlines()]
    try:
        tree = ast.parse("\n".join(lines) if len(text) <= MOST_CODE else "")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # another language, or a magic
        return "", {}
    names: dict[int, str] = {}
    nodes = list(ast.walk(tree))
    assigned = {found.id for found in nodes if isinstance(found, ast.Name) and not _is_read(found)}
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
    known = variables()
    for node in nodes:
        if isinstance(node, ast.Name) and _is_read(node) and node.id not in assigned:
            value = known.get(node.id)
            if type(value) is int and value > 0:
                numbers[node.id] = value
    return ast.dump(tree), numbers


def _is_read(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)
