"""The lease of a notebook's kernel. It claims the device memory of the notebook's own code.

Memory of governed models is not part of the lease. The lease is opened automatically, is counted
after each cell and is never droppable. It is in use while a cell runs. When another process needs
the card, the memory of an idle kernel is parked in host memory. The memory returns before the next
cell runs, by the same kind of request as for a model. If the memory cannot return, the cell is
refused and no line of the cell runs. The `Stillness` of the front end says when a kernel may be
parked.

Before a cell runs, `cell_room.py` requests the memory that the cell took the last time, beyond what
the notebook already held. After a cell that ran out of memory, idle notebooks and models are evicted.

`KernelResident` handles the memory as a model that leaves its cards and returns to them as a whole. A
cell can need more memory than the kernel holds. The kernel's lease then claims this memory too, as
the lease of a model claims working memory. The memory returns for a cell, or for a message that may
read it although no cell runs. The notebook shows the return as a line, or as an error.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from msgspec.structs import replace

from .. import threads
from ..backends.base import Damaged, NotStill, Stillness, is_out_of_memory
from ..backends.torch_release import why_torch_moves_nothing
from ..errors import CannotGovern, GpuError, NotAllowed, StillInUse, WaitEnded, rebuilt
from ..facts import (
    DISK,
    HOST,
    KERNEL,
    Footprint,
    Lease,
    LeaseId,
    ModelSpec,
    Outcome,
    OutOfMemoryStory,
    Part,
    Share,
    Shares,
    Staying,
    lease_title,
)
from ..scheduler import caps, relief
from ..units import MIB, show_bytes, show_seconds
from . import acquire, disk, failures, holdings, operations, registry, release
from .cell_room import Bytes, CellRoom, sizes
from .out_of_memory import Freed, Telling, bytes_wanted, forget_frames, room_for_cell
from .pins import Anchor, AnchorRef, new_anchor
from .resident import Place, Resident
from .session import Session, log

NEARLY_USED = 0.9  # of the card-hours of a week: from then on the user is told
LEAST_BYTES = MIB  # a kernel that holds less has no lease
LONGEST_COUNT_SECONDS = 0.05
COUNT_SHARE = 20  # after a slow count, the next one waits this many times the count's duration
PARK_AGAIN_SECONDS = 60.0  # an idle kernel that could not be parked is tried again after this time
SWAPS_A_TURN = 5  # a turn lasts at least this many times what leaving and returning takes
# Given one of these words in place of a notebook, `park` forbids or allows parking this kernel.
NEVER, ASKED = "never", "asked"


class Kernel:
    """The kernel of this process. Its front end calls `begin` before each cell, and `end` after it."""

    def __init__(self, session: Session, stillness: Stillness) -> None:
        """`stillness` tells whether any code that may use the kernel's memory runs now."""
        self._session = session
        self._stillness = stillness
        self._room = CellRoom(session)
        self._cell = ""  # the text of the last cell
        self._handle: Any = None
        self._running: list[Anchor] = []  # one for each cell that runs; they pin the lease
        self._leaves_next = ""  # "park" or "hibernate", if the cell has called it: its end does it
        self._turn_began = session.clock()
        self._count_again_at = 0.0
        self._uncounted = False
        self._quota_told = 0.0  # the part of the week's card-hours that the notebook showed last
        self._shown_beyond = 0  # the bytes above the cap that the notebook showed last
        self._park_again_at = 0.0
        self._return_again_at = 0.0  # after a message for which the memory did not return
        self._may_leave = session.settings.gpu_park != "never"
        self.story: OutOfMemoryStory | None = None  # of the last out-of-memory error
        self._here = threading.local()  # a subshell runs its cells in a thread of its own

    def follow(self, stillness: Stillness) -> None:
        """Called by another front end, after `%reload_ext gpu`. The earlier one reports no end of a cell any more."""
        self._stillness = stillness
        self._running.clear()
        if self._handle is not None:
            self._handle.stillness = stillness

    @property
    def refusal(self) -> GpuError | None:
        """Why this thread's next cell must not run; None if the cell may run.

        The memory is away without another reason if an interrupt came before `begin`.
        """
        why, resident = getattr(self._here, "refusal", None), self.resident
        if why is None and resident is not None and getattr(resident.handle, "away", None):
            return did_not_run(interrupted(), resident)
        return why

    @property
    def resident(self) -> KernelResident | None:
        """The resident of the kernel's lease; None while the kernel holds too little for a lease."""
        found = self._session.residents.get(KERNEL)
        return found if isinstance(found, KernelResident) else None

    @property
    def staying(self) -> tuple[Staying, ...]:
        """What the kernel holds on a card and cannot be moved, as it was last counted."""
        return self._handle.staying if self._handle is not None else ()

    @property
    def away(self) -> bool:
        """Whether the kernel's memory is parked in host memory."""
        return (found := self.resident) is not None and found.place is Place.AWAY

    # -- cells

    def begin(self, text: str = "", outermost: bool = True, frees: bool = False) -> str:
        """Called before the cell `text`: brings the kernel's memory back and pins it for the cell.

        `outermost` is false for a cell that another cell runs. If an outermost cell finds pins,
        they belong to earlier cells whose end was interrupted; such pins are dropped. `frees` is
        true for a cell that only deletes, saves or frees; it runs above an enforced cap too.

        Then requests room for what the same cell took last time, and waits a limited time for this
        room. Returns a sentence about the memory that came back to the card, or about a wait for the
        room, or an empty text. After the call, `self.refusal` is the reason why the cell must not
        run, or empty.
        """
        self._here.refusal = None
        if not frees and self.refuses_above_cap() and self._uncounted:
            self.count()
            self._uncounted = False
        if not frees and (beyond := self.beyond_enforced_cap()):
            because = f"{beyond}.\n  These cells run, until less is held:  {WAYS_OUT}"
            self._here.refusal = did_not_run(NotAllowed(because, name=KERNEL, because=beyond))
        if outermost:
            self._running.clear()
        is_first, resident = not self._running, self.resident
        self._note_use()
        self._running.append(new_anchor())  # so that no other thread counts the memory
        pin = weakref.ref(self._running[-1])
        news, why = "", cast(Exception | None, None)
        try:
            wanted: Bytes = {}
            if is_first:
                self._cell = text
                wanted = self._room.before(text, self._handle, self.resident, self._uncounted)
            if resident is None:
                return self._room.request(None, pin, wanted)
            self._yield_turn(resident)
            news = self._obtain(resident, pin, wanted)
        except KeyboardInterrupt:
            why = interrupted()
        except Exception as error:  # IPython would ignore it, and run the cell
            why = error
        # If the memory is on its card, the cell runs in spite of an error (an unreadable ledger,
        # say).
        if why and not (resident is None or resident.enter(pin)):
            self._here.refusal = did_not_run(why, resident)
        elif isinstance(why, WaitEnded):
            self._here.refusal = did_not_run(why)
        del why  # see pins.py
        return news

    def _over_cap(self) -> tuple[str, int]:
        """What the user holds above the operator's cap, as a sentence, and its bytes; ("", 0) if not."""
        cap = self._session.rules.cap
        if cap is None or cap.bytes_per_device is None:
            return "", 0
        beyond = caps.over_cap(*self._session.look())
        return (caps.over_cap_in_words(beyond, cap), sum(beyond.values())) if beyond else ("", 0)

    def beyond_enforced_cap(self) -> str:
        """Why no cell may run: the user holds more than a cap that is enforced. Empty if cells may run.

        On a real card torch itself refuses more memory. On a simulated card nothing does.
        """
        resident = self.resident
        if resident is None or resident.place is not Place.HERE:
            return ""
        return self._over_cap()[0] if self.refuses_above_cap() else ""

    def refuses_above_cap(self) -> bool:
        """Whether a cell is refused while the user holds more than the cap."""
        cap = self._session.rules.cap
        return cap is not None and cap.enforce and self._session.probe.simulated

    def news_of_cap(self) -> str:
        """The line below a cell that has brought the user above the cap, or higher above it; or near the hours' end."""
        if told := self._news_of_quota():
            return told
        words, size = self._over_cap()
        grown, self._shown_beyond = size - self._shown_beyond, size
        if grown < LEAST_BYTES:
            return ""
        return f"{words}. This memory leaves first when anybody waits, and nothing new is granted."

    def _news_of_quota(self) -> str:
        """The line, once each, when most and when all of the user's card-hours of a week are used."""
        cap = self._session.rules.cap
        if cap is None or cap.card_hours_per_week is None:
            return ""
        part, told = cap.used_card_hours / cap.card_hours_per_week, self._quota_told
        self._quota_told = 0.0 if part < NEARLY_USED else max(told, min(part, 1.0))
        what = (
            "is refused" if cap.after_quota == "refuse" else "is of the lowest importance (batch)"
        )
        if part >= 1.0 > told:
            return f"{caps.beyond_quota(cap)}: what you request now {what}."
        if part >= NEARLY_USED > told:
            left = cap.card_hours_per_week - cap.used_card_hours
            return (
                f"{left:.1f} of {cap.card_hours_per_week:g} card-hours are left of the last seven days "
                f"({cap.named('card_hours_per_week')}). Beyond, what you request {what}."
            )
        return ""

    def _obtain(self, resident: KernelResident, pin: AnchorRef, wanted: Bytes) -> str:
        """Pins the kernel, with room for `wanted` if possible. Returns a sentence for the user."""
        news = ""
        if resident.place is Place.HERE:
            news = self._room.request(resident, pin, wanted)
        if resident.enter(pin):
            return news
        return self._return(resident, pin, wanted)

    def _return(self, resident: KernelResident, pin: AnchorRef, wanted: Bytes) -> str:
        session, returning = self._session, Return(self._session, resident)
        resident.claim(wanted)
        timeout = self._room.patience_seconds if wanted else None
        try:
            bring_back(session, resident, pin, timeout)
        except GpuError as error:
            if not wanted or isinstance(error, WaitEnded):
                raise
            resident.claim({})  # the memory returns without room for the cell's peak
            bring_back(session, resident, pin)
        self._turn_began = session.clock()
        return returning.news()

    def end(self, text: str = "") -> None:
        """Called after the cell `text`: ends the cell's pin, and counts the kernel's memory."""
        if self._running:
            self._running.pop()  # before anything else, so that an interrupt cannot leave the pin
        if self._running:
            return
        self._note_use()
        self._cell = self._cell or text  # the first cell may begin before the Kernel exists
        claimed_more = self._room.end(self.resident)
        if (resident := self.resident) is not None:
            resident.moves_again_at = 0.0  # the reason for the failed attempt may have ended
            self._park_again_at = 0.0
            resident.failed_moves = 0
        self.count_when_due(idle=False)
        if self.refusal is not None:
            self._cell = ""  # nothing of it ran
        self._room.after(self._cell, self._handle, self.resident, self._uncounted)
        if claimed_more or self._refuses_in_book():
            self._session.publish()  # other processes wait for the bytes, or read that none can leave
        if verb := self._leaves_next:
            self._leaves_next = ""
            threads.start(partial(self._leave_by_hand, verb))

    def _leave_by_hand(self, verb: str) -> None:
        """After a cell that parked or hibernated its own kernel, as `verb` says."""
        self.park_quietly("It was parked by hand.")
        if verb == "hibernate" and self.away and self.resident is not None:
            disk.start(self._session, self.resident, "It was hibernated by hand.")

    def _note_use(self) -> None:
        if (resident := self.resident) is not None:
            resident.last_used = self._session.clock()

    def _refuses_in_book(self) -> bool:
        """Whether the book still shows the ended cell, or a failed attempt to park before it.

        The monitor publishes a cell that runs when it ticks. Its next tick may begin with a count, which takes 0.3 s
        among a million objects. Until then every request to park would be refused.
        """
        lease = self._session.ledger.read().lease(self._session.me, KERNEL)
        return lease is not None and bool(lease.pins or lease.moves_again_at)

    # -- cells that run while the memory is parked

    def readable(
        self, saves: bool = True
    ) -> contextlib.AbstractContextManager[Callable[[Any], Any]]:
        """While the block runs, parked tensors can be read, and saved; see `KernelBackend.readable`."""
        resident = self.resident
        if resident is None or not self.away:
            return contextlib.nullcontext(lambda value: value)
        return resident.backend.readable(resident.handle, saves)  # type: ignore[attr-defined]

    def forget_deleted(self) -> str:
        """Called after a cell that ran while the memory is parked, such as `del x`.

        Frees the bytes in host memory that nothing refers to any more. Returns a sentence for the
        user, or an empty text if nothing was freed.
        """
        if not self.away:
            return ""
        gc.collect()  # in the thread of the cell, since it may run code of the user's
        # An interrupt in the middle would leave the memory as moving, and no cell would run any more.
        return threads.uninterrupted(self._forget_unused, to_the_end=True)

    def _forget_unused(self) -> str:
        resident = self.resident
        if resident is None or not resident.begin_moving():
            return ""
        freed = resident.backend.forget_unused(resident.handle)  # type: ignore[attr-defined]
        if not freed:
            resident.stay()
            return ""
        lease = resident.lease.holding(resident.backend.measure(resident.handle))
        resident.settle_at(replace(lease, away_since=resident.lease.away_since))
        if not resident.handle.away:
            self._end_lease(resident)
            left = "Nothing is parked any more."
        else:
            place = "on a disk" if lease.on_disk else "in RAM"
            left = f"{show_bytes(lease.own_bytes)} is still parked {place}."
            self._session.publish()
        return f"{show_bytes(freed)} came free. {left}"

    def _yield_turn(self, resident: KernelResident) -> None:
        """Before a cell: leaves the card if another process waits and this kernel's turn is over.

        A turn is the time for which a kernel may keep a card that others need. During Run All a
        kernel is never idle, so without turns no other process would get the card.
        """
        session = self._session
        if resident.place is not Place.HERE or resident.pins:
            return
        swap_seconds = 2 * resident.lease.restore_seconds
        turn = max(session.settings.gpu_park_turn_seconds, SWAPS_A_TURN * swap_seconds)
        if session.clock() - self._turn_began < turn or not self._is_needed(resident):
            return
        try:
            release.evict(session, resident, "Its turn on the card is over, and another waits.")
        except GpuError as error:
            log.debug("the kernel keeps its turn: %s", error)
            self._turn_began = session.clock()  # one attempt a turn

    def _is_needed(self, resident: KernelResident) -> bool:
        """Whether another process waits for this kernel's memory, or its card is over the limit."""
        id = resident.lease.id
        cards = {share.device for share in resident.lease.shares}
        book = self._session.ledger.read()
        if relief.overfull(book, self._session.me, cards):
            return True
        for ticket in book.tickets:
            if ticket.owner == self._session.me or ticket.verb != "use":
                continue
            if id in ticket.recalls or any(share.device in cards for share in ticket.need):
                return True
        return False

    def hold(self, seconds: float = 0.0) -> Anchor | None:
        """Brings the memory back for a message that may read it.

        It stays on its cards for as long as the caller keeps the returned object. The result is None
        if the kernel has no lease, or if its memory did not return in time: in `seconds`, or for a
        message in WAIT_SECONDS. After such a failure of a message, no return is tried for other
        messages for PAUSE_SECONDS.
        """
        resident = self.resident
        if resident is None:
            return None
        anchors = [new_anchor()]  # empty once this method has ended: see pins.py
        pin = weakref.ref(anchors[0])
        if resident.enter(pin):
            return anchors.pop()
        clock = self._session.clock
        if clock() < self._return_again_at and not seconds:
            return None
        try:
            bring_back(self._session, resident, pin, seconds or WAIT_SECONDS)
        except Exception as error:  # the message is handled in any case
            log.debug("a message is handled while the kernel's memory is away: %s", error)
            self._return_again_at = clock() + PAUSE_SECONDS
            anchors.clear()
            return None
        self._return_again_at = 0.0
        self._turn_began = clock()
        return anchors.pop()

    # -- counting

    def count_when_due(self, idle: bool) -> None:
        """Counts the kernel's memory, unless the last count was so slow that users would notice.

        On a simulated card a count searches all objects: 40 ms for 170,000. Between cells, counting
        takes at most a twentieth of the time. The count is never skipped if `idle` is true, or if the kernel
        held more than a simulated card has: it could not be parked, so who needs the card would be refused.
        """
        clock = self._session.clock
        began = clock()
        held, limits = self.resident.held() if self.resident else {}, self._session.limits
        too_much = any(size > limits.get(card, size) for card, size in held.items())
        self._uncounted = not (idle or too_much) and began < self._count_again_at
        if self._uncounted:
            self._session.start_monitor()  # it calls `catch_up`
            return
        self.count()
        seconds = clock() - began
        slow = seconds > LONGEST_COUNT_SECONDS
        self._count_again_at = began + (COUNT_SHARE * seconds if slow else 0.0)

    def catch_up(self) -> None:
        """Makes the count that was skipped between cells, if no cell runs now."""
        text = self._cell
        if self._uncounted and not self._running:
            self.count_when_due(idle=True)
            if not self._running and self._cell is text:  # no other cell began during the count
                self._room.after(text, self._handle, self.resident, False)

    def count(self) -> None:
        """Counts the device memory of the kernel, and opens, corrects or ends its lease."""
        if "torch" not in sys.modules:
            return
        session, resident = self._session, self.resident
        if resident is not None and resident.place is not Place.HERE:
            return
        backend = session.backend(KERNEL)
        if self._handle is None:
            self._handle = backend.open(  # type: ignore[attr-defined]
                self._stillness, lambda: governed_keys(session), lambda: governed_shares(session)
            )
        stayed = self.staying
        if resident is None:
            held = backend.measure(self._handle)
            if sum(share.bytes for share in held) >= LEAST_BYTES:
                self._open(held)
            elif self.staying != stayed:
                session.start_monitor()
                session.publish()
            return
        changed = resident.remeasure() or self.staying != stayed
        if resident.lease.own_bytes < LEAST_BYTES:
            threads.uninterrupted(partial(self._end_lease, resident), to_the_end=True)
        elif changed and session.dozing:
            session.wake_monitor()

    def _end_lease(self, resident: KernelResident) -> None:
        """Ends the lease of a kernel that holds too little for one, unless a cell runs."""
        if resident.begin_moving():
            self._session.residents.pop(KERNEL, None)
            self._session.publish()

    def has_changed(self, pinned: tuple[str, ...]) -> bool:
        """Counts for a request of the running cell, which may have deleted tensors since the last count.

        `pinned` are the leases that the requesting thread pins. While a model loads, nothing is counted:
        its bytes are not yet told from the notebook's own. Returns whether the kernel's lease has changed.
        """
        resident = self.resident
        if resident is None or resident.lease.id not in pinned or self._session.loads:
            return False
        return resident.remeasure()

    def recount(self) -> None:
        """Counts again after tensors were freed, so that their bytes are not cached on a simulated card.

        There the count is one account in a segment of its size. A smaller account would stay in the
        old segment, which could not be released.
        """
        if (resident := self.resident) is not None and resident.place is Place.HERE:
            self._handle.noted = None
            self._session.probe.empty_cache()
            self.count()

    def _open(self, held: Shares) -> None:
        """Opens the lease for the counted memory `held`."""
        session, handle = self._session, self._handle
        resident = KernelResident(session, handle)
        now, fixed = session.clock(), why_torch_moves_nothing() or ""
        lease = replace(
            resident.lease,
            kind=KERNEL,
            shares=held,
            movable=self._may_leave and not fixed,
            fixed=fixed,
            settled_at=now,
            last_used=now,
            backend=KERNEL,
            model_type=KERNEL,
        )
        resident.install(handle, lease, None)
        session.residents[KERNEL] = resident
        session.start_monitor()
        size = show_bytes(lease.bytes)
        because = f"This notebook's own code holds {size} on {lease.where}."
        session.note(lease, "adopted", "cell", because, size=lease.bytes)

    def cell_failed(self, error: BaseException) -> str | OutOfMemoryStory:
        """After a cell that failed. After an out-of-memory `error`, evicts idle leases, and returns the story.

        Plain code makes no request before it takes memory. After a write that bytes in host memory
        refused, returns a sentence that names them. Where CUDA is missing, it says what to write.
        After any other error it is empty. The cell is not run again.
        """
        self._room.failed(is_out_of_memory(error))
        session = self._session
        if not is_out_of_memory(error):
            return failures.refused_write(session, error) or failures.no_cuda(session, error)
        is_of_host = isinstance(error, MemoryError) and not isinstance(error, GpuError)
        telling = Telling(session, error)
        forget_frames(error)
        self.count_when_due(idle=True)
        is_told = isinstance(error, GpuError)  # such an error names the holders, and has made room
        refused = "" if is_told else self._refused_by_cap(error)
        freed = Freed(0) if is_told or refused else room_for_cell(session, error)
        if is_of_host:  # such as NumPy's: it says nothing about a card
            return f"{freed}: run the cell again." if freed.titles else ""
        self.story = telling.story(freed, self._room.runs, refused)
        return "" if is_told else self.story

    def _refused_by_cap(self, error: BaseException) -> str:
        """The sentence after an out-of-memory `error` that the enforced cap explains; else empty."""
        cap = self._session.rules.cap
        if cap is None or not cap.enforce or cap.bytes_per_device is None:
            return ""
        wanted = bytes_wanted(error)
        left = caps.left(*self._session.look())
        if not left or wanted <= max(left.values()):
            return ""
        allowed = caps.may_hold(cap, "of each card")
        return f"{cap.user} {allowed}, so torch refused more. What holds memory:  %gpu who"

    def make_room_to_retry(self, error: BaseException) -> str:
        """Makes room after the out-of-memory `error` of a cell that the user allows to run again.

        Returns a sentence if a lease was evicted. Returns an empty text if no lease was evicted, or
        if `error` is no out-of-memory error.
        """
        if not is_out_of_memory(error):
            return ""
        forget_frames(error)
        freed = room_for_cell(self._session, error)
        return f"{freed}: the cell runs again." if freed.titles else ""

    # -- parking by hand

    def park(self) -> Outcome:
        """Parks the kernel now, or at the end of the running cell. Raises GpuError."""
        resident = self.resident
        if resident is None:
            self.count()
            resident = self.resident
        if resident is None:
            stays = self._staying_in_words()
            nothing = (
                f"this notebook's own code holds less than {show_bytes(LEAST_BYTES)} on a card"
            )
            because = stays or f"{nothing}, so nothing is parked"
            return Outcome(verb="park", name="", done=True, because=because, bytes=0)
        if not self._may_leave:
            raise CannotGovern(
                "this notebook is exempt from parking.\n  To allow it again:  %gpu park asked",
                name=KERNEL,
                why="it is exempt from parking",
            )
        if self._running:
            self._leaves_next = self._leaves_next or "park"
            leaves = f"{show_bytes(resident.lease.bytes)} leaves when this cell has ended"
            because = "; ".join(filter(None, [leaves, self._staying_in_words()]))
            return Outcome(verb="park", name="", done=True, because=because, bytes=0)
        if self.away:
            return registry.in_ram_already(self._session, "park", "", [resident.lease])
        outcome = operations.evict_lease(self._session, self._id(), timeout=None)
        because = "; ".join(filter(None, [outcome.because, self._staying_in_words()]))
        return replace(outcome, verb="park", name="", because=because)

    def _staying_in_words(self) -> str:
        """What cannot leave this process's cards, as a sentence with the variables; empty if everything can."""
        if not self.staying:
            return ""
        found = holdings.search_here(self._session)
        said = []
        for part in found.staying:
            names = [row.name for row in found.holders if row.stays == part.why]
            said.append(part.words(holdings.listed(names) if names else ""))
        return "; ".join(said)

    def exempt(self, never: bool) -> Outcome:
        """If `never` is true, brings the memory back and forbids parking. If false, allows parking."""
        resident = self.resident
        if never and resident is not None and resident.place is not Place.HERE:
            operations.preload(self._session, self._id())
        self._may_leave = not never
        if resident is not None:
            movable = self._may_leave and not resident.lease.fixed
            resident.settle_at(replace(resident.lease, movable=movable))
            self._session.publish()
        because = f"this notebook is {'never parked' if never else 'parked when asked'}"
        return Outcome(verb="park", name="", done=True, because=because, bytes=0)

    def hibernate(self, by: str = "") -> Outcome:
        """Parks the kernel, and moves its parked bytes to the disk; see Runtime.hibernate.

        `by` is the person and the process that requests it, if it is not this one. Then a running
        cell is a reason to refuse.
        """
        disk.directory(self._session)
        if by and self._running:
            title = lease_title(Lease(self._session.me, KERNEL, kind=KERNEL), self._session.owner)
            raise StillInUse(f"{title} runs a cell now.", name=KERNEL)
        was_away = self.away
        outcome = replace(self.park(), verb="hibernate")
        resident = self.resident
        if self._leaves_next:
            self._leaves_next = "hibernate"
            because = outcome.because.replace("leaves when", "leaves for the disk when")
            return replace(outcome, because=because)
        if resident is None or not self.away:
            return outcome
        if self._session.activity.running and not by:  # a cell that runs while it is parked
            disk.start(self._session, resident, "It was hibernated by hand.")
            moving = show_bytes(resident.lease.ram_bytes)
            because = f"{moving} leaves RAM for the disk when this cell has ended"
            return replace(outcome, because=because)
        size = disk.stow(self._session, resident, "It was hibernated by hand.", by)
        held = show_bytes(resident.lease.disk_bytes)
        because = f"{held} is on the disk of {self._session.settings.gpu_park_dir}"
        if size:
            because = (
                f"{because}; {show_bytes(size)} of {'RAM' if was_away else 'its card'} came free"
            )
        return replace(outcome, because=because, bytes=size, where=DISK)

    def park_quietly(self, because: str) -> None:
        """Parks the kernel, unless a recent attempt failed. A failure is logged and not raised."""
        resident, now = self.resident, self._session.clock()
        if resident is None or now < self._park_again_at:
            return
        try:
            release.evict(self._session, resident, because)
        except GpuError as error:
            self._park_again_at = now + PARK_AGAIN_SECONDS
            log.warning("the kernel was not parked: %s", error)

    def _id(self) -> LeaseId:
        return LeaseId(self._session.me, KERNEL)


def look_after(session: Session) -> None:
    """Makes a count that was skipped, and parks the kernel in two cases.

    The kernel is parked if its card is over the limit and the scheduler chooses this kernel, or if
    it was idle for the time in the settings.
    """
    settings, kernel = session.settings, session.kernel
    if kernel is None:
        return
    kernel.catch_up()
    _know_pieces(session, kernel)
    _relieve(session, kernel.resident)
    if settings.gpu_park != "idle":
        return
    resident = kernel.resident
    if resident is None or resident.place is not Place.HERE or resident.pins:
        return
    # Not `resident.lease.last_used`: the lease has the time when it was opened.
    if session.clock() - resident.last_used < settings.gpu_park_idle_seconds:
        return
    kernel.park_quietly(f"It was idle for {show_seconds(settings.gpu_park_idle_seconds)}.")


def _know_pieces(session: Session, kernel: Kernel) -> None:
    """On a real card, looks for the kernel's largest storage while another lease waits in host memory.

    The other lease may have to change places with this kernel in pieces. A count on a simulated card
    searches all storages anyway.
    """
    resident = kernel.resident
    if resident is None or session.probe.simulated or resident.pins:
        return
    leases = session.ledger.read().leases()
    resident.handle.searches = any(peer.must_return and peer.owner != session.me for peer in leases)
    if resident.handle.searches and not resident.lease.piece_bytes:
        kernel.count()


def _relieve(session: Session, resident: KernelResident | None) -> None:
    if resident is None or resident.pins or resident.place is not Place.HERE:
        return
    cards = {share.device for share in resident.lease.shares}
    if not relief.overfull(session.ledger.read(), session.me, cards):
        return
    me, rank = session.me, session.rank
    release.perform_steps(
        session, "park", lambda book, world, key: relief.park_kernels(book, me, world, rank, key)
    )


# -- by name


def park(session: Session, who: str = "") -> Outcome:
    """Parks the kernel of `who`, or of this process if `who` is empty; see Runtime.park."""
    if who in (NEVER, ASKED):
        return _own(session).exempt(who == NEVER)
    if not who or registry.is_own(session, who):
        return _own(session).park()
    target = registry.find_kernel(session, who, leased=False)
    if (parked := registry.in_ram(session, target)) is not None:
        return registry.in_ram_already(session, "park", who, [parked])
    section = session.ledger.read().sections.get(target.owner)
    if section is not None and section.lease(KERNEL) is None:
        because = "; ".join(part.words() for part in section.staying)
        return Outcome(verb="park", name=who, done=True, because=because, bytes=0)
    outcome = replace(operations.evict_lease(session, target, timeout=None), verb="park", name=who)
    section = session.ledger.read().sections.get(target.owner)
    stays = [part.words() for part in section.staying] if section is not None else []
    return replace(outcome, because="; ".join([outcome.because, *stays]))


def hibernate(session: Session, who: str = "") -> Outcome:
    """Moves the memory of the kernel of `who` to its disk, or of this process; see Runtime.hibernate."""
    if not who or registry.is_own(session, who):
        return _own(session, "hibernate").hibernate()
    target = registry.find_kernel(session, who)
    return replace(operations.ask_owner(session, "hibernate", target, None), name=who)


def unpark(session: Session, who: str = "") -> Outcome:
    """Brings back the kernel of `who`, or of this process if `who` is empty; see Runtime.unpark."""
    target = registry.find_kernel(session, who) if who else _own(session, "unpark")._id()
    if not who and _own(session).resident is None:
        because = "nothing of this kernel is parked"
        return Outcome(verb="unpark", name="", done=True, because=because, bytes=0)
    outcome = operations.preload(session, target)
    return replace(outcome, verb="unpark", name=who)


def _own(session: Session, verb: str = "park") -> Kernel:
    """The kernel of this process. Raises CannotGovern, with `verb` to type, if it is none of a notebook."""
    kernel = session.kernel
    if kernel is None:
        raise CannotGovern(
            "only the kernel of a notebook can be parked: in a script or a terminal nobody knows when it "
            f"is idle.\n  A notebook:  gpu {verb} NOTEBOOK      In its own first cell:  %load_ext gpu",
            name=KERNEL,
            why="it is no notebook's kernel",
        )
    return kernel


# -- the memory of a kernel, as a resident

SPEC = ModelSpec(KERNEL, KERNEL, model_type=KERNEL)


class KernelResident(Resident):
    """The memory of a kernel, handled as a model that leaves and returns as a whole.

    Unlike a model, the kernel may be used while its bytes are copied to host memory. After the
    copy, the tensors' pointers are exchanged, but only if the kernel was not used during the copy.
    """

    _moving = False

    def __init__(self, session: Session, handle: Any) -> None:
        """`handle` is the handle of the kernel's backend."""
        super().__init__(SPEC, session.backend(KERNEL), session.me, session.clock)
        self._session = session
        self.came_from = "RAM"  # where the bytes of the last move were
        self.claims: Bytes = {}  # the least bytes that the lease claims for the running cell
        self.footprint = self._footprint
        self.with_disk = partial(disk.with_disk, session, self)
        handle.on_swapped = self.swapped

    def _used_now(self) -> None:
        """Does nothing: `Kernel` notes the time of each cell. A message that reads memory is no use."""

    def _footprint(self) -> Footprint:
        own = self.lease.own_bytes
        parts = [Part("weights", own, "measured")]
        if more := sum(self._claimed().values()) - own:
            parts.append(Part("room", more, "measured"))
        return Footprint(tuple(parts))

    # -- leaving and returning

    def begin_moving(self) -> bool:
        """Marks the kernel as moving, and returns True.

        Returns False if a cell runs, if the kernel moves already, or if it holds nothing.
        """
        with self.gate:
            if self.pins or self.handle is None or self._moving:
                return False
            self._moving = True
        return True

    def swapped(self) -> None:
        """Called when the bytes have left or returned, before the lease shows the move."""
        with self.gate:
            self.place = Place.MOVING

    def stay(self) -> None:
        super().stay()
        self._moving = False

    def settle_at(self, lease: Lease, anchor: Any = None) -> None:
        """Records the `lease` after a move of the kernel's bytes.

        While the bytes are on the device, the recorded lease includes the claims of the running
        cell. Claims end when the bytes leave. `anchor` pins the kernel for the caller.
        """
        if lease.all_on_device:
            lease = claiming(lease, self.claims)
        super().settle_at(lease, anchor)
        if lease.on_host:
            self.claim({})
        self._moving = False

    def move_or_drop(self, step: Any, shadow: bool = False) -> Shares:
        """Performs the step. Raises StillInUse if the kernel is used before or during the step.

        If bytes on a disk are damaged, the GpuError names their variables.
        """
        self.came_from = "the disk" if self.handle and self.handle.disk_bytes else "RAM"
        try:
            return super().move_or_drop(step)
        except NotStill as error:
            raise StillInUse(f"{error}", name=KERNEL) from None

    def damaged(self, error: Damaged) -> GpuError:
        names = holdings.names_of(self._session, error.keys)
        return GpuError(
            f"{show_bytes(error.bytes)} of {names} cannot return: {error.sentence}. Once {names} is deleted, "
            f"the rest returns."
        )

    def move_on(self, written: Any) -> None:
        """As `Resident.move_on`, while no cell runs."""
        if not self.begin_moving():
            raise NotStill("its memory returned")
        try:
            super().move_on(written)
        finally:
            self.stay()

    def remeasure(self) -> bool:
        """Measures the kernel again. Returns whether its lease has changed.

        The claims of a running cell stay. If a move of the kernel's bytes begins during the
        measurement, the lease stays unchanged, because the move itself measures the kernel.
        """
        handle = self.handle
        if handle is None:
            return False
        exchanges = handle.exchanges
        shares = self.backend.measure(handle)
        with self.gate:
            if handle.exchanges != exchanges or self.place is Place.MOVING:
                return False
            piece = self.backend.piece_bytes(handle)
            lease = replace(self.lease, filled=(), shares=shares, piece_bytes=piece)
            lease = claiming(lease, self.claims) if lease.all_on_device else self.lease
            changed = lease != self.lease
            self.lease = lease
        return changed

    # -- what a cell claims

    def claim(self, claims: Bytes) -> None:
        """Makes the lease claim at least `claims` of each card while the kernel is on its cards."""
        self.claims = dict(claims)
        if self.place is not Place.AWAY:
            self.lease = claiming(self.lease, self.claims)

    def must_return_to(self) -> dict[str, int]:
        """Maps each card to the bytes that the kernel needs there to return; empty if it is not away."""
        return self._claimed() if self.place is Place.AWAY else {}

    def held(self) -> dict[str, int]:
        """The bytes that the kernel holds on each card, as they were last counted.

        If the kernel's bytes are away, the cards are those to which the bytes will return.
        """
        if self.place is Place.AWAY:
            away = self.backend.must_return_to(self.handle)
            return {card: size + self.lease.bytes_on(card) for card, size in away.items()}
        return sizes(self.lease.filled or self.lease.shares)

    def _claimed(self) -> dict[str, int]:
        """The bytes that the kernel claims on each card, also for the running cell."""
        return _at_least(self.held(), self.claims)


def _at_least(held: Bytes, claims: Bytes) -> dict[str, int]:
    """The larger of the bytes `held` and the `claims`, by card."""
    return {card: max(held.get(card, 0), claims.get(card, 0)) for card in {**held, **claims}}


def claiming(lease: Lease, claims: Bytes) -> Lease:
    """The `lease`, changed to claim at least the bytes `claims` of each card.

    The field `filled` has the bytes that the lease really holds.
    """
    own = lease.filled or lease.shares
    held = sizes(own)
    claimed = _at_least(held, claims)
    if claimed == held:
        return replace(lease, shares=own, filled=(), working_bytes=0)
    shares = tuple(Share(card, size) for card, size in claimed.items())
    more = sum(claimed.values()) - sum(held.values())
    return replace(lease, shares=shares, filled=own, working_bytes=more)


def governed_keys(session: Session) -> set[int]:
    """The keys of all storages that belong to models of this process, their shadows included."""
    keys: set[int] = set()
    for resident in list(session.residents.values()):
        groups = getattr(resident.handle, "groups", None)
        if groups is not None:
            keys.update(group.storage._cdata for group in groups())
            keys.update(copy.untyped_storage()._cdata for copy in resident.handle.shadow.values())
    return keys


def governed_shares(session: Session) -> Iterator[Share]:
    """The bytes of this process's models, if torch allocated their tensors in this process.

    For a model that was not used since its last measurement, the bytes are those of its lease.
    Measuring takes time: 3 ms for 20 models of 20 tensors each.
    """
    for resident in list(session.residents.values()):
        if resident.lease.in_parts and resident.handle is not None:
            yield from (share for share in resident.lease.shares if share.device != HOST)
        if resident.place is not Place.HERE or not hasattr(resident.handle, "groups"):
            continue
        if resident.uses == resident.uses_counted or resident.postpones_measuring():
            yield from resident.lease.filled or resident.lease.shares
        else:
            yield from resident.backend.measure(resident.handle)


# -- what a notebook shows about the return

LEAST_TOLD_SECONDS = 0.1  # a shorter wait for space is not mentioned
# If the last holder had the card for a smaller part of the time, both times are named.
LEAST_PART = 0.5

# Cells that need no card. The front end runs them while the memory is parked, or above a cap.
WAYS_OUT = "del NAME      %gpu free NAME      torch.save(NAME, 'name.pt')"


class Return:
    """One return of a kernel's memory, from the request until the memory is on its cards."""

    def __init__(self, session: Session, resident: KernelResident) -> None:
        """To be made before the return of `resident` is requested."""
        self._session, self._resident = session, resident
        self._began = session.clock()
        self._away_since = resident.lease.away_since
        self._other, self._since = self._who_had_the_cards()

    def news(self) -> str:
        """The sentence for the user, after the return. Empty if the memory was not away.

        The sentence has the time of the wait for space and the time of the move, because only the
        move depends on this notebook.
        """
        if not self._away_since:
            return ""
        lease, now = self._resident.lease, self._session.clock()
        moved_seconds = self._resident.moved_seconds
        waited_seconds = now - self._began - moved_seconds
        size, moved = show_bytes(lease.own_bytes), show_seconds(moved_seconds)
        came = f"{size} came back from {self._resident.came_from} in {moved}"
        if waited_seconds >= LEAST_TOLD_SECONDS:
            waited = show_seconds(waited_seconds)
            came = f"{size} came back from {self._resident.came_from}: waited {waited} for space, moved in {moved}"
        until = self._began + max(0.0, waited_seconds)
        away_seconds, other_seconds = until - self._away_since, until - self._since
        away, other = show_seconds(away_seconds), show_seconds(other_seconds)
        if not self._other:
            return f"{came}; it was away for {away}."
        if other_seconds >= LEAST_PART * away_seconds:
            return f"{came}; {self._other} had the card for {other}."
        return (
            f"{came}; it was away for {away}, and {self._other} had the card for the last {other}."
        )

    def _who_had_the_cards(self) -> tuple[str, float]:
        """The name of the largest holder that used the cards while the memory was away, or "".

        The second value is the time since when this holder had the cards meanwhile.
        """
        book, me = self._session.ledger.read(), self._session.me
        cards = set(self._resident.must_return_to())
        found = [
            lease
            for lease in book.leases()
            if lease.owner != me
            and (lease.pins or lease.last_used >= self._away_since)
            and any(share.device in cards for share in (*lease.shares, *lease.target))
        ]
        if not found:
            return "", 0.0
        largest = max(found, key=lambda lease: lease.bytes)
        owner = book.owner(largest.owner)
        # A holder with a notebook is named by the notebook's file, even if the lease is a model's.
        named = owner is not None and owner.notebook
        title = lease_title(replace(largest, kind=KERNEL) if named else largest, owner)
        return title, max(self._away_since, largest.settled_at)


def interrupted() -> WaitEnded:
    """The error of a cell whose wait the user has stopped."""
    why = "You stopped the wait. To wait again, run the cell again."
    return WaitEnded(why, name=KERNEL, by="you", because="")


def did_not_run(why: Exception, parked: KernelResident | None = None) -> GpuError:
    """The error of a cell that must not run because of `why`, with the class of `why`.

    `parked` is the notebook's memory, if it is parked.
    """
    message = f"the cell did not run. {why}"
    if parked is not None:
        size = show_bytes(parked.lease.own_bytes)
        place = "on a disk" if parked.lease.on_disk else "in RAM"
        message = f"the cell did not run: {size} of its memory is parked {place}. {why}"
        if not isinstance(why, WaitEnded):
            message += f"\n  These cells run while it is parked:  {WAYS_OUT}"
    if isinstance(why, GpuError):
        return rebuilt(type(why), message, why.facts)
    return GpuError(message)


# -- the return for a cell, or for a message
#
# Completion, inspection and a debugger's view of variables read tensors. For such a message the wait
# is short, because the message has no line in the notebook that shows a wait. If the memory does not
# return, the message is handled without the memory, and each access to the memory raises.

WAIT_SECONDS = 5.0  # the longest wait for room; cells that are sent meanwhile wait too
ATTEMPTS = 40  # the most attempts while another thread prevents the return
AGAIN_SECONDS = 0.05  # the pause between two attempts
PAUSE_SECONDS = 60.0  # after a failed wait, messages are handled without a wait for this time


def bring_back(
    session: Session, resident: KernelResident, anchor: AnchorRef, timeout: float | None = None
) -> None:
    """Brings the kernel's memory onto its cards, and pins it with `anchor`.

    Just after the bytes have left, the thread that moved them still runs for a moment and prevents
    their return. So the return is tried again for two seconds. Each wait for room takes at most
    `timeout` seconds; None means no limit. Raises the errors of `acquire.obtain`.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return acquire.obtain(session, resident, anchor, timeout=timeout)
        except StillInUse:  # a thread prevented the return: try again after a pause
            time.sleep(AGAIN_SECONDS)
    return acquire.obtain(session, resident, anchor, timeout=timeout)
