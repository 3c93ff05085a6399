"""Finds leases that cannot leave their card, however long a request waits.

Pure. A lease is *precious* if its weights exist nowhere else. A precious lease can only be
offloaded, and only while the host has room.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from ..facts import HOST, Book, Lease, Request, World, lease_title
from .capacity import limit_of
from .evictable import permanent_reason_to_stay
from .victims import parts_within

# If at most this many sets of precious leases fit into host memory, all sets are tried. So any
# eight leases are tried, and more leases if host memory is small.
MOST_TRIED = 256


class Stuck(NamedTuple):
    """Leases that cannot leave their card, and leases that may have to stay."""

    leases: dict[str, list[tuple[Lease, str]]]  # card -> leases that cannot leave, with the reason
    precious: dict[str, list[Lease]]  # card -> leases that can only go to the host, if it has room
    host_bytes: int  # host memory that the precious leases may use
    titles: dict[str, str]  # lease id -> the name of its notebook, for leases of notebooks

    def bytes_on(self, card: str, remaining: Iterable[Lease]) -> int:
        """Bytes on this `card` of the leases that cannot leave, and of the leases `remaining`."""
        stuck = [lease for lease, _ in self.leases.get(card, ())]
        return sum(lease.bytes_on(card) for lease in (*stuck, *remaining))

    def least_excess(self, remaining: Iterable[Lease], cards: Collection[str]) -> int:
        """Bytes that stay on the `cards`, however many precious leases there are to choose from.

        With too many precious leases to try every set, `remaining` is empty; see `sets_that_stay`.
        But the host cannot take more bytes than it has. The result is 0 if `remaining` is not empty.
        """
        if remaining:
            return 0
        precious = {lease.id: lease for card in cards for lease in self.precious.get(card, ())}
        claimed = sum([lease.bytes_on(card) for lease in precious.values() for card in cards])
        own = sum([lease.card_bytes for lease in precious.values()])
        return max(0, min(claimed, own) - self.host_bytes)


def stuck_leases(
    book: Book,
    request: Request,
    world: World,
) -> Stuck:
    """The leases that cannot leave their card, or may have to stay, while this `request` waits."""
    leases: dict[str, list[tuple[Lease, str]]] = {}
    precious: dict[str, list[Lease]] = {}
    titles: dict[str, str] = {}
    for lease in book.leases():
        if lease.kind == "kernel":
            titles[lease.id] = lease_title(lease, book.owner(lease.owner))
        if lease.droppable and not lease.keep and not request.held:
            continue
        why = permanent_reason_to_stay(lease, world, held=request.held)
        for device in {share.device for share in lease.shares if share.device != HOST}:
            if why:
                leases.setdefault(device, []).append((lease, why))
            elif not lease.droppable and lease.kind != "block":
                # `host_bytes` counts the memory of all shadows as free. So the shadow of this lease
                # is ignored. Otherwise its bytes would count twice: as free, and as copied already.
                bare = replace(lease, shadow_bytes=0) if lease.shadow_bytes else lease
                precious.setdefault(device, []).append(bare)
    host_bytes = host_bytes_to_be_had(book, world) if precious else 0
    return Stuck(leases, precious, host_bytes, titles)


def sets_that_stay(
    stuck: Stuck, too_many: Iterable[tuple[Lease, ...]] = ((),)
) -> Iterator[tuple[Lease, ...]]:
    """Yields sets of precious leases that may have to stay on their cards, sets of few leases first.

    For each set, the host has room for the precious leases outside the set. If it also has room for
    pieces of the leases in the set, their `shares` are only the bytes that stay. If the host has
    room for all precious leases in `stuck`, the only result is an empty set: then these leases are
    no reason to refuse the request. If there are too many sets to try, the results are the sets in
    `too_many`.
    """
    by_id = {}
    for leases in stuck.precious.values():
        for lease in leases:
            by_id[lease.id] = lease
    precious = list(by_id.values())
    total = sum(lease.card_bytes for lease in precious)
    if total <= stuck.host_bytes:
        yield ()
        return
    sets = _sets_that_fit(precious, stuck.host_bytes)
    if sets is None:
        yield from too_many
        return
    for leaving in sorted(sets, key=len, reverse=True):
        staying = tuple([one for one in precious if one.id not in leaving])
        left = stuck.host_bytes - sum([by_id[id].card_bytes for id in leaving])
        if not _is_needless(staying, left):
            yield from less_pieces(staying, left)


def _sets_that_fit(leases: Iterable[Lease], host_bytes: int) -> list[tuple[str, ...]] | None:
    """The ids of every set of `leases` that fits into `host_bytes`; None if the sets are too many."""
    sets: list[tuple[int, tuple[str, ...]]] = [(0, ())]  # bytes, ids
    for lease in leases:
        size = lease.card_bytes
        more = [(bytes + size, (*ids, lease.id)) for bytes, ids in sets]
        sets += [one for one in more if one[0] <= host_bytes]
        if len(sets) > MOST_TRIED:
            return None
    return [ids for _, ids in sets]


def _is_needless(staying: tuple[Lease, ...], host_bytes: int) -> bool:
    """Whether one more lease fits into `host_bytes`, so that the set without this lease is better.

    If the leases have pieces, the host may rather take pieces of another lease.
    """
    fits = any([lease.card_bytes <= host_bytes for lease in staying])
    return fits and not any([lease.piece_bytes for lease in staying if lease.kind != "kernel"])


def less_pieces(staying: tuple[Lease, ...], host_bytes: int) -> Iterator[tuple[Lease, ...]]:
    """Yields the leases in `staying` without the pieces that fit into `host_bytes` of host memory.

    There is a result for each lease whose pieces leave first.
    """
    cut = False
    for parts in parts_within(staying, host_bytes):
        left = {lease.id: lease for lease in staying}
        for part in parts:
            kept = [share for share in part.after(part.target) if share.device != HOST]
            left[part.id] = replace(part, shares=tuple(kept), target=())
        cut = True
        yield tuple(left.values())
    if not cut:
        yield staying


def host_bytes_to_be_had(book: Book, world: World) -> int:
    """Bytes of host memory that are free once every lease that can be loaded again is unloaded.

    Only leases whose weights exist nowhere else, and leases marked `keep`, stay in host memory.
    """
    taken = 0
    for lease in book.leases():
        if lease.keep or not lease.droppable:
            taken += lease.bytes_on(HOST)
    return max(0, limit_of(book, world, HOST) - taken)
