"""The lease of a kernel, handled as a model that leaves its cards and returns to them as a whole.

A cell can need more memory than the kernel holds. The kernel's lease then claims this memory too,
as the lease of a model claims working memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from ..backends.base import NotStill
from ..errors import StillInUse
from ..facts import HOST, KERNEL, Footprint, Lease, ModelSpec, Part, Share, Shares
from .resident import Place, Resident
from .session import Session

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
