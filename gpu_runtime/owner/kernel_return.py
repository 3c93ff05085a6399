"""Makes what a notebook shows about the return of its memory: a line, or an error."""

from __future__ import annotations

from msgspec.structs import replace

from ..errors import GpuError, WaitEnded, rebuilt
from ..facts import lease_title
from ..units import show_bytes, show_seconds
from .kernel_resident import NAME, KernelResident
from .session import Session

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
