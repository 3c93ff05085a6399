"""The memory of a kernel, handled as a model that leaves its cards and returns to them as a whole.

A cell can need more memory than the kernel holds. The kernel's lease then claims this memory too,
as the lease of a model claims working memory. The memory returns for a cell, or for a message that
may read it although no cell runs. The notebook shows the return as a line, or as an error.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from ..backends.base import NotStill
from ..errors import GpuError, StillInUse, WaitEnded, rebuilt
from ..facts import HOST, KERNEL, Footprint, Lease, ModelSpec, Part, Share, Shares, lease_title
from ..units import show_bytes, show_seconds
from . import acquire
from .pins import Anchor, AnchorRef, new_anchor
from .resident import Place, Resident
from .session import Session, log

NAME = KERNEL
SPEC = ModelSpec(NAME, NAME, model_type="kernel")

Bytes = Mapping[str, int]  # by the id of a card


class KernelResident(Resident):
    """The memory of a kernel, handled as a model that leaves and returns as a whole.

    Unlike a model, the kernel may be used while its bytes are copied to host memory. After the
    copy, the tensors' pointers are exchanged, but only if the kernel was not used during the copy.
    """

    _moving = False

    def __init__(self, session: Session, handle: Any) -> None:
        """`handle` is the handle of the kernel's backend."""
        super().__init__(SPEC, session.backend(NAME), session.me, session.clock)
        self.claims: Bytes = {}  # the least bytes that the lease claims for the running cell
        self.footprint = self._footprint
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

    def carry(self, step: Any, shadow: bool = False) -> Shares:
        """Performs the step. Raises StillInUse if the kernel is used before or during the step."""
        try:
            return super().carry(step)
        except NotStill as error:
            raise StillInUse(f"{error}", name=NAME) from None

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
        claimed = self.held()
        for card, size in self.claims.items():
            claimed[card] = max(size, claimed.get(card, 0))
        return claimed


def sizes(shares: Shares) -> dict[str, int]:
    """The bytes of the `shares`, by the id of the card."""
    return {share.device: share.bytes for share in shares}


def exactly(claims: Bytes) -> dict[str, Any]:
    """Fields of PlacementRules that take from each card exactly the bytes in `claims`."""
    count = len(claims)
    return {
        "layout": "proportional" if count > 1 else "single",
        "least_cards": count,
        "most_cards": count,
        "card_bytes": dict(claims) if count > 1 else {},
        "margin_bytes": 0,
        "overhead": 0.0,
        "factor": 0.0,
    }


def claiming(lease: Lease, claims: Bytes) -> Lease:
    """The `lease`, changed to claim at least the bytes `claims` of each card.

    The field `filled` has the bytes that the lease really holds.
    """
    own = lease.filled or lease.shares
    held = sizes(own)
    claimed = dict(held)
    for card, size in claims.items():
        claimed[card] = max(size, claimed.get(card, 0))
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

LEAST_WAIT_SECONDS = 0.1  # a shorter wait for space is not mentioned
LEAST_PART = (
    0.5  # if the last holder had the card for a smaller part of the time, both times are named
)

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
        moved_seconds = lease.restore_seconds
        waited_seconds = now - self._began - moved_seconds
        size, moved = show_bytes(lease.own_bytes), show_seconds(moved_seconds)
        came = f"{size} came back from RAM in {moved}"
        if waited_seconds >= LEAST_WAIT_SECONDS:
            waited = show_seconds(waited_seconds)
            came = f"{size} came back from RAM: waited {waited} for space, moved in {moved}"
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
        title = lease_title(replace(largest, kind=NAME) if named else largest, owner)
        return title, max(self._away_since, largest.settled_at)


def interrupted() -> WaitEnded:
    """The error of a cell whose wait the user has stopped."""
    why = "You stopped the wait. To wait again, run the cell again."
    return WaitEnded(why, name=NAME, by="you", because="")


def refusal(why: Exception, parked_bytes: int = 0) -> GpuError:
    """The error of a cell that must not run because of `why`, with the class of `why`.

    `parked_bytes` are the bytes of the notebook's memory that are in host memory.
    """
    parked = f": {show_bytes(parked_bytes)} of its memory is parked in host memory"
    message = f"the cell did not run{parked if parked_bytes else ''}. {why}"
    if parked_bytes and not isinstance(why, WaitEnded):
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


class Reading:
    """Brings the memory of one kernel back for messages that may read it."""

    def __init__(self, session: Session, returned: Callable[[], None]) -> None:
        """Serves the kernel of `session`. Calls `returned` after each return of the memory."""
        self._session = session
        self._returned = returned
        self._again_at = 0.0

    def hold(self, seconds: float = 0.0) -> Anchor | None:
        """Keeps the memory on its cards for as long as the caller keeps the returned object.

        The result is None if the kernel has no lease, or if its memory did not return in time: in
        `seconds`, or for a message in WAIT_SECONDS. After such a failure of a message, no return is
        tried for other messages for PAUSE_SECONDS.
        """
        resident = self._session.residents.get(NAME)
        if not isinstance(resident, KernelResident):
            return None
        anchors = [new_anchor()]  # empty once this method has ended: see pins.py
        pin = weakref.ref(anchors[0])
        if resident.enter(pin):
            return anchors.pop()
        clock = self._session.clock
        if clock() < self._again_at and not seconds:
            return None
        try:
            bring_back(self._session, resident, pin, seconds or WAIT_SECONDS)
        except Exception as error:  # the message is handled in any case
            log.debug("a message is handled while the kernel's memory is away: %s", error)
            self._again_at = clock() + PAUSE_SECONDS
            anchors.clear()
            return None
        self._again_at = 0.0
        self._returned()
        return anchors.pop()
