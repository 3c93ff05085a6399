"""Which leases may be evicted, which of them leave first, and whether they are offloaded or dropped.

Pure. Leases are ordered by importance, then by the wishes of a fleet, then by the rank that a
policy of `policies` gives, then by their last use. They are taken in this order until the room is
enough; then each lease, or piece of a lease, that is not needed stays, the last one first. A lease
with a target leaves only in part: the target has the pieces of the model that leave.

A lease is offloaded to host memory while the host has room. Without room the lease is dropped, if
its source can load the weights again. Weights that exist nowhere else are never dropped.

A shadow is an unchanged copy in host memory of a model that is on a card. The eviction of a model
with a shadow copies nothing. A shadow never displaces a lease. When host memory is short, shadows
are freed before any lease is unloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from typing import NamedTuple

from msgspec.structs import replace

from ..facts import (
    HOST,
    KERNEL,
    OVER_CAP,
    Book,
    Drop,
    Lease,
    Move,
    Phase,
    Policy,
    Share,
    Shed,
    Step,
    World,
    why_not_moved,
)
from .capacity import room

MOST_FIRST = 8  # ways to cut leases that are tried

Bytes = Mapping[str, int]  # by device id


def victims(
    need: Bytes, idle: Iterable[Lease], world: World, rank: Policy
) -> tuple[Lease, ...] | None:
    """The leases to evict to free `need` bytes on each device; None if all together are not enough.

    The `idle` leases with the lowest `worth` in this `world` are chosen first.
    """
    lacks = {device: -size for device, size in need.items() if size > 0}
    room = Room(lacks, lambda free: min(free.values(), default=0) >= 0)
    return first_enough(eviction_order(idle, world, rank), room)


def eviction_order(idle: Iterable[Lease], world: World, rank: Policy) -> list[Lease]:
    """The `idle` leases in order: by `worth` in this `world`, then by last use, then by name."""

    def key(lease: Lease) -> tuple[int, int, float, float, str, str]:
        return (*worth(lease, world, rank), lease.last_used, lease.owner, lease.name)

    return sorted(idle, key=key)


def worth(lease: Lease, world: World, rank: Policy) -> tuple[int, int, float]:
    """How much the `lease` is worth; the lease with the lowest worth leaves first.

    Compared are its importance, then how much a fleet wishes it, then its `rank` in this `world`.
    """
    return (-lease.importance, lease.wished, rank(lease, world))


# -- the search -----------------------------------------------------------------------------------


class Room:
    """The bytes that are free on each device, while leases are tentatively evicted.

    They are enough once the devices together have `need` bytes, and `holds` is true of the bytes that
    are usable on each. Without `holds`, for one device, the sum decides.
    """

    def __init__(
        self, free: Bytes, holds: Callable[[Bytes], bool] | None = None, need: int = 0
    ) -> None:
        self.free = dict(free)
        self.missing = need - sum(free.values())  # above 0: together they have too few bytes
        self.holds = holds
        self.cap_left: dict[str, int] = {}  # bytes left under the operator's cap; empty: no cap
        self.cap_owners: Collection[str] = ()  # the owners whose bytes count under this cap
        self.owner: str | None = None  # the requester, if it has a limit of its own
        self.own_left = 0  # bytes left under this limit
        self.own_need = 0  # bytes that the new model claims of `own_left`

    def usable(self) -> Bytes:
        """The usable bytes of each card, within the operator's cap. Do not change the result."""
        if not self.cap_left:
            return self.free
        return {card: min(size, self.cap_left[card]) for card, size in self.free.items()}

    def enough(self) -> bool:
        """Whether the model fits now. One plan calls this function some hundred times."""
        if self.missing > 0 or self.above_own_limit:
            return False
        return self.holds is None or self.holds(self.usable())

    @property
    def above_own_limit(self) -> bool:
        """Whether the new model would exceed the memory limit of its owner."""
        return self.owner is not None and self.own_left < self.own_need

    def gains(self, lease: Lease) -> bool:
        """Whether evicting this `lease` helps."""
        if self.above_own_limit and lease.owner == self.owner:
            return True
        for share in lease.shares:  # a plain loop: it runs for every set of cards and every lease
            if share.device in self.free:
                return True
        return False

    def let_go(self, lease: Lease, times: int = 1) -> int:
        """Counts the `lease` as evicted, and returns the bytes that the cards gain.

        If `times` is -1, the lease is counted as back on its cards. If the lease has a target, only
        the bytes in the target are evicted.
        """
        free, gained = self.free, 0
        for share in lease.freed_by(lease.target) if lease.target else lease.shares:
            device = share.device
            if device in free:
                size = times * share.bytes
                free[device] += size
                gained += size
        self.missing -= gained
        if self.cap_left or self.owner is not None:
            self._raise_limits(lease, times)
        return gained

    def _raise_limits(self, lease: Lease, times: int) -> None:
        """Adds the bytes of the evicted `lease` to the limits under which the lease counts.

        `cap_left` grows if the operator's cap counts the lease's owner; `own_left` grows if the
        requester owns the lease.
        """
        if self.cap_left and lease.owner in self.cap_owners:
            for share in lease.freed_by(lease.target):
                if share.device in self.free:
                    self.cap_left[share.device] += times * share.bytes
        if lease.owner == self.owner:
            self.own_left += times * freed_bytes(lease)

    def gain(self, lease: Lease) -> int:
        """The bytes that this `lease` has on the devices of this room."""
        return sum([share.bytes for share in lease.shares if share.device in self.free])

    def all_go(self, leases: Iterable[Lease], times: int = 1) -> None:
        """Counts all these `leases` as evicted. If `times` is -1, they are back on their cards."""
        for lease in leases:
            self.let_go(lease, times)


class PartsRoom(NamedTuple):
    """The bytes of host memory that leases may take, and whether parts of leases may leave."""

    free: int
    # The room for weights that exist nowhere else: `free`, and the bytes that shadows and unloaded
    # leases give up for such weights.
    most: int
    may_cut: bool = True


NO_PARTS = PartsRoom(0, 0, may_cut=False)


def first_enough(
    order: Iterable[Lease], room: Room, host: PartsRoom = NO_PARTS
) -> tuple[Lease, ...] | None:
    """The first leases of `order` that make the `room` enough, without those that need not leave.

    A lease may leave in part if `host`, the host memory for such parts, allows that.
    After the call, the returned leases have left the room. The result is None if all leases
    together are too few; then all of them have left the room.
    """
    taken: list[tuple[Lease, int]] = []
    for lease in order:
        if room.missing <= 0 and room.enough():
            break
        freed = room.let_go(lease)
        if freed or lease.owner == room.owner:
            taken.append((lease, freed))
    else:  # all have left
        if not room.enough():
            return None
    return _without_needless(taken, room, host)


def _without_needless(
    taken: Sequence[tuple[Lease, int]], room: Room, host: PartsRoom
) -> tuple[Lease, ...]:
    """The leases that must leave, each with only the pieces that must leave.

    `taken` has the leases that have left the `room`, and the bytes that each of them freed. The
    last leases are worth most, so they are put back first. A lease leaves as a whole if host memory
    cannot take its pieces.
    """
    precious = precious_bytes([lease for lease, _ in taken]) if host.may_cut else 0
    free, most = host.free - precious, host.most - precious
    leaving: list[Lease] = []
    for lease, freed in reversed(taken):
        used = reserved = 0 if lease.droppable else lease.offload_bytes
        missing = room.missing + freed  # once this lease is back
        room.let_go(lease, times=-1)
        if missing <= 0 and room.enough():
            used = 0
        else:
            if host.may_cut and lease.piece_bytes:
                part = _smallest_part(lease, room)
                size = part.offload_bytes
                if part.target and size <= (free if lease.droppable else most + reserved):
                    lease, used = part, size
            room.let_go(lease)
            leaving.append(lease)
        free += reserved - used
        if reserved:
            most += reserved - used
    leaving.reverse()
    return tuple(leaving)


def _smallest_part(lease: Lease, room: Room) -> Lease:
    """The `lease` with a target: the fewest pieces that make the `room` enough. It is in the room."""
    part = part_of(lease, room.missing)
    if part is lease or (room.holds is None and not room.cap_left and room.owner is None):
        return part  # all of it leaves, or only the bytes of one card are missing
    piece = lease.piece_bytes
    middle = low = part.leaving_bytes // piece  # usually enough
    high = -(-lease.leaving_bytes // piece)  # pieces that are always enough
    while low < high:
        part = lease.leaving(middle * piece)
        room.let_go(part)
        if room.enough():
            high = middle
        else:
            low = middle + 1
        room.let_go(part, times=-1)
        middle = (low + high) // 2
    return lease.leaving(high * piece) if high * piece < lease.card_bytes else lease


# -- leases that leave in part ---------------------------------------------------------------------


def precious_bytes(leases: Iterable[Lease]) -> int:
    """Bytes of the `leases` that exist nowhere else, and that therefore need room in host memory."""
    return sum([lease.offload_bytes for lease in leases if not lease.droppable])


def freed_bytes(leaving: Lease) -> int:
    """How many bytes become free on cards when the lease `leaving` leaves.

    If the lease has a target, only the bytes in the target leave; else all its bytes.
    """
    freed = leaving.freed_by(leaving.target)
    return sum([share.bytes for share in freed if share.device != HOST])


def part_of(lease: Lease, need: int) -> Lease:
    """The `lease` with a `target`: the fewest pieces that free `need` bytes of its card.

    Returns `lease` itself if it cannot be cut, or if all its pieces must leave. Even if its working
    memory alone is enough, one piece leaves: a model that is whole on its card keeps its working
    memory there.
    """
    piece = lease.piece_bytes
    if not piece or lease.kind == KERNEL or not _on_one_card(lease):
        return lease
    own = lease.card_bytes
    if lease.filled:  # its working memory is freed without a copy
        need -= sum([share.bytes for share in lease.shares]) - own
    size = max(1, -(-need // piece)) * piece
    if size >= own:
        return lease
    return lease.leaving(size)


def _on_one_card(lease: Lease) -> bool:
    return sum([share.device != HOST for share in lease.shares]) == 1


def parts_within(leases: Sequence[Lease], host_bytes: int) -> Iterator[list[Lease]]:
    """Yields ways in which pieces of the `leases` fit into `host_bytes` of host memory.

    Each result has the leases of which pieces leave, with the pieces' bytes as `target`. Each lease
    that can be cut is the first one once, up to MOST_FIRST leases: as many of its pieces leave as
    fit.
    """
    able = [
        lease
        for lease in leases
        if 0 < lease.piece_bytes <= host_bytes and lease.kind != KERNEL and _on_one_card(lease)
    ]
    for first in able[:MOST_FIRST]:
        left, parts = host_bytes, []
        for lease in (first, *[other for other in able if other is not first]):
            size = min(left, lease.card_bytes) // lease.piece_bytes * lease.piece_bytes
            if size:
                parts.append(lease.leaving(size))
                left -= size
        yield parts


# -- which leases may be evicted, and how ----------------------------------------------------------


FIXED = "exists nowhere else, and its process cannot move it"
EXEMPT = "is exempt from parking"  # `%gpu park never`, or GPU_PARK=never
MOVE_FAILED = "waiting after a failed move"  # a reason to stay
PINNED = "is pinned (unpin it to let it go)"
WISHED = "wished by the fleet"  # a reason to stay, for a load that only a wish requests
PERSON = -OVER_CAP  # importance of a person's request: above all that can be typed
MOST_TRIED = 12  # every combination of so many leases is tried
# If at most this many sets of leases fit into host memory, all are tried: any eight leases, and more if
# host memory is small.
MOST_SETS = 256
MOST_SUMS = 128  # with more leases, only so many combinations are tried further: the largest ones


def reason_to_stay(lease: Lease, world: World, *, asker: str, importance: int) -> str:
    """Why this `lease` may not be evicted now; empty if the lease may be evicted.

    The reason is a few words, such as `in use`, or the phase of a lease that is not settled.
    `asker` is the id of the owner that needs the room. `importance` is the importance of the
    asker's request; lower numbers are more important.

    After the last use, the grace period protects a lease from other owners; it is measured at
    `world.now`. `keep_alive` protects from no request: see `relief`.
    """
    if lease.pins:
        return "in use"
    if lease.kind == "block":
        return "a block of code"
    if lease.phase is not Phase.SETTLED:
        return lease.phase.value
    if lease.keep:
        return "kept"
    if world.now < lease.moves_again_at:
        return MOVE_FAILED
    if lease.importance < importance:
        return "more important"
    if 0 < world.rules.spared <= lease.wished:
        return WISHED
    now = world.now
    # A use may have begun after `now` was read.
    used = lease.last_used if lease.last_used < now else now
    if lease.owner != asker and now < used + world.rules.grace_seconds:
        return "just used"
    return ""


def eviction_step(
    lease: Lease,
    host_room: int,
    world: World,
    *,
    drop: bool = False,
    because: str = "",
    reason: str = "request",
) -> Move | Drop | None:
    """The step that evicts this `lease`: a Move to the host, or a Drop if it cannot be moved.

    The result is None if neither step is possible: weights that exist nowhere else are never
    dropped. If `drop` is true, a Drop is preferred even if the host has room.

    `host_room` is the host's free bytes. A Move needs fewer of them if the lease has a shadow. If
    the lease has a target, a Move moves only the bytes in it. A Drop always drops all bytes.
    `because` (a sentence) and `reason` (a word) are put into the step. `world` holds the devices
    and the offload setting.
    """
    moves = lease.offload_bytes <= host_room and can_move(lease, world) and not lease.on_host
    if lease.droppable and (drop or not moves):
        return Drop(lease.id, lease.shares, because, reason)
    if moves:
        target = lease.target or (Share(HOST, lease.card_bytes),)
        return Move(lease.id, lease.freed_by(target), target, because, reason)
    return None


def copied_bytes(lease: Lease, step: Move | Drop | Shed | None) -> int:
    """The bytes of host memory that a Move takes beyond the lease's shadow; 0 for other steps."""
    if not isinstance(step, Move):
        return 0
    return lease.copied_by_offload(sum([share.bytes for share in step.shares]))


def can_move(lease: Lease, world: World) -> bool:
    """Whether this `lease` could be offloaded if the host had room.

    A lease on a card of the `world` that uses the host's memory is never offloaded: this would free
    nothing. A lease that exists nowhere else and holds more than a card has is never offloaded: it
    could not return.
    """
    if not (lease.movable and world.rules.offload) or _uses_host_memory(lease, world):
        return False
    return lease.droppable or not beyond_its_card(lease, world)


def beyond_its_card(lease: Lease, world: World) -> str:
    """The id of a card on which this `lease` holds more bytes than the card has, or an empty text.

    Only a simulated card can hold more than it has, since plain code takes memory unasked there.
    """
    for share in lease.filled or lease.shares:
        if share.device != HOST:
            for device in world.devices:
                if device.id == share.device and share.bytes > device.total_bytes:
                    return device.id
    return ""


def _uses_host_memory(lease: Lease, world: World) -> bool:
    """Whether the lease is on a card whose memory is the host's memory."""
    for device in world.devices:
        if device.unified:  # a plain loop: every decision runs this for every lease
            return any(share.device == device.id for share in lease.shares)
    return False


def permanent_reason_to_stay(lease: Lease, world: World, *, held: Sequence[str] = ()) -> str:
    """The reason why this `lease` never leaves its device, however long a request waits.

    The text is the end of a sentence. It is empty if the lease may leave at some time. `held` are
    the ids of the leases that the requesting thread itself pins. `world` holds the host's limit.
    """
    if lease.id in held:
        return "is held by the block that makes the request"
    if lease.kind == "block":
        return ""  # a block ends with its cell
    if lease.keep:
        return PINNED
    if lease.droppable:
        return ""
    if can_move(lease, world) and (lease.piece_bytes or lease.own_bytes) <= world.limits.get(
        HOST, 0
    ):
        return ""
    if _uses_host_memory(lease, world):
        return "exists nowhere else, and is in RAM already"
    if card := beyond_its_card(lease, world):
        return f"holds more than {card} has, so it could not return"
    return needs_host_room(lease)


def needs_host_room(lease: Lease) -> str:
    """The reason why this `lease`, whose weights exist nowhere else, cannot leave its card.

    The text is the end of a sentence. Either the lease is a notebook's memory that may not be
    moved, or its process cannot move it, or the host has no room for the lease.
    """
    if lease.fixed:
        return f"{FIXED} ({lease.fixed})"
    if lease.kind == KERNEL and not lease.movable:
        return EXEMPT
    if not lease.movable:
        return FIXED
    return "exists nowhere else, and RAM has no room for it"


def leaves_in_words(book: Book, lease: Lease) -> str:
    """How this `lease` leaves its card now. The text is the end of a sentence.

    If its last event is a failed move, the text has the reason: its process tries the move again.
    """
    for event in reversed(book.events):
        if not event.answers and (event.owner, event.model) == (lease.owner, lease.name):
            if event.action != "failed":
                break
            return f"could not be moved{why_not_moved(book.events, lease)}; its process tries again"
    return "is being moved to RAM" if lease.kind == KERNEL else "is being evicted"


def mark_leaving(book: Book, step: Step, key: str) -> Book:
    """The `book` with the lease of the `step` marked as leaving; the same book if only its shadow goes.

    The lease's bytes count on the old and the new device until the step is done. `key` identifies
    the decision.
    """
    if isinstance(step, Shed):
        return book
    lease = book.find(step.lease)
    assert lease is not None, f"{step.lease} is to leave, but is not in the book"
    target = step.shares if isinstance(step, Move) else ()
    return book.with_lease(replace(lease, phase=Phase.LEAVING, target=target, key=key))


def unfinished_steps(book: Book, owner: str, key: str) -> tuple[Move | Drop, ...]:
    """The steps of this `owner` decided under this `key` and not yet reported as done.

    The owner may not have received the verdict with these steps, so they are returned again.
    """
    section = book.sections.get(owner)
    if section is None:
        return ()
    because = "This was decided before."
    steps: list[Move | Drop] = []
    for lease in section.leases:
        if lease.phase is not Phase.LEAVING or lease.key != key:
            continue
        if lease.target:
            freed = lease.freed_by(lease.target)
            steps.append(Move(lease.id, freed, lease.target, because))
        else:
            steps.append(Drop(lease.id, lease.shares, because))
    return tuple(steps)


# -- the warm pool ---------------------------------------------------------------------------------


def warm(
    book: Book,
    world: World,
    *,
    asker: str,
    importance: int,
    owner: str = "",
    wanted: str = "",
    also: str = "",
) -> list[Lease]:
    """Leases of the `book` in host memory that may be unloaded now.

    If `owner` is given, only leases of this owner are returned. A lease in parts (partly on a card,
    partly in host memory) counts as being in host memory. If such a lease is unloaded, its bytes on
    the card are freed too. A lease that can move to a disk instead is left out, unless its id is
    `also`. `asker`, `importance` and `world` are as in `reason_to_stay`. The lease
    with the id `wanted` stays, because it is about to return to a card.
    """
    found = []
    for lease in book.leases():
        if not lease.droppable or lease.all_on_device or lease.id == wanted:
            continue
        if owner and lease.owner != owner:
            continue
        if lease.kept_on_disk and (lease.id != also or not lease.ram_bytes):
            continue
        if not reason_to_stay(lease, world, asker=asker, importance=importance):
            found.append(lease)
    return found


def worth_less(
    pool: Iterable[Lease], lease: Lease, host_room: int, world: World, rank: Policy
) -> tuple[Lease, ...]:
    """The leases of `pool` to unload from host memory so that `lease` fits into it; see `host_room_for`.

    Each returned lease has a lower `worth` in host memory than `lease` would have. The result is
    empty if such leases cannot make the room. If `lease` has a target, only the bytes in the target
    must fit. `host_room` is the host's free bytes, too few. `pool` is the result of `warm`.
    """

    def worth_there(moved: Lease) -> tuple[int, int, float]:
        # A lease in parts is a load from its source away once it is unloaded, like one in host memory.
        there = replace(moved, shares=(Share(HOST, moved.own_bytes),), target=(), filled=())
        return worth(there, world, rank)

    own = worth_there(lease)
    less = [other for other in pool if other.id != lease.id and worth_there(other) < own]
    return victims({HOST: lease.offload_bytes - host_room}, less, world, rank) or ()


def largest_fitting_set(leases: Iterable[Lease], host_bytes: int) -> tuple[Lease, ...]:
    """The set of `leases` whose offload uses most of `host_bytes` without exceeding it.

    If there are more than MOST_TRIED leases, and more than MOST_SUMS sums of their bytes fit, the
    result may not be the best possible set.
    """
    small = [lease for lease in leases if lease.offload_bytes <= host_bytes]
    small.sort(key=lambda lease: -lease.offload_bytes)
    if sum(lease.offload_bytes for lease in small) <= host_bytes:
        return tuple(small)
    sets: dict[int, tuple[Lease, ...]] = {0: ()}  # bytes -> a set of leases that needs these bytes
    for tried, lease in enumerate(small):
        with_it = {}
        for size, chosen in sets.items():
            total = size + lease.offload_bytes
            if total <= host_bytes:
                with_it[total] = (*chosen, lease)
        sets = {**with_it, **sets}
        if tried >= MOST_TRIED and len(sets) > MOST_SUMS:
            sets = {size: sets[size] for size in nlargest(MOST_SUMS, sets)}
    return sets[max(sets)]


def sets_that_fit_in(leases: Iterable[Lease], host_bytes: int) -> list[tuple[Lease, ...]] | None:
    """Every set of `leases` whose offload fits into `host_bytes`, the largest first; None if they are too many."""
    sets: list[tuple[int, tuple[Lease, ...]]] = [(0, ())]  # bytes, and the leases that need them
    for lease in leases:
        size = lease.offload_bytes
        sets += [(total + size, (*set, lease)) for total, set in sets if total + size <= host_bytes]
        if len(sets) > MOST_SETS:
            return None
    return sorted([leases for _, leases in sets], key=len, reverse=True)


# -- shadows ---------------------------------------------------------------------------------------


Renewed = Callable[[int], tuple[Lease, ...]]  # host room in bytes -> leases to unload from there


def held_shadows(
    book: Book, *, owner: str = "", spared: Collection[str] = (), to_disk: bool = False
) -> list[Lease]:
    """The leases of the `book` whose shadows may be freed now.

    If `owner` is given, only leases of this owner are returned. A shadow may also be freed while
    its model is in use. The leases with the ids `spared` are left out. With `to_disk`, leases are
    found too whose bytes can move from host memory to a disk.
    """
    found = []
    for lease in book.leases():
        size = lease.shed_bytes if to_disk else lease.shadow_bytes
        if not size or lease.phase is not Phase.SETTLED or lease.id in spared:
            continue
        if not owner or lease.owner == owner:
            found.append(lease)
    return found


def keeps_shadow(leaving: Lease) -> bool:
    """Whether the shadow of the lease `leaving` must stay, because it becomes the lease's share.

    If only a part of the lease leaves, a shadow of some bytes may lack this part. It is not used
    then, and may be freed for this part.
    """
    return not leaving.target or leaving.offload_bytes < leaving.leaving_bytes


def shadows_total(leases: Iterable[Lease]) -> int:
    """The bytes of host memory that all `leases` together give back."""
    return sum([lease.shed_bytes for lease in leases])


def enough_shadows(
    leases: Iterable[Lease], shortage: int, world: World, rank: Policy
) -> list[Lease]:
    """The leases whose shadows are freed to get `shortage` bytes; all leases if they are too few."""
    chosen: list[Lease] = []
    missing = shortage
    for lease in shadow_order(leases, world, rank):
        if missing <= 0:
            break
        chosen.append(lease)
        missing -= lease.shed_bytes
    for lease in chosen[:-1]:  # the last shadows may have made the first ones unnecessary
        if missing + lease.shed_bytes <= 0:
            chosen.remove(lease)
            missing += lease.shed_bytes
    return chosen


def shadow_order(leases: Iterable[Lease], world: World, rank: Policy) -> list[Lease]:
    """The `leases` in the order in which they give back host memory.

    The shadows of leases in use are freed first. Of the idle leases, the lease that would leave its
    card last loses its shadow first. So a lease that leaves early keeps its shadow, which saves the
    copy to host memory. Last, bytes move to a disk: first those of the lease that is worth least.
    """

    def key(lease: Lease) -> tuple[bool, bool, int, int, float, str]:
        importance, wished, ranked = worth(lease, world, rank)
        if not lease.shadow_bytes:
            return (True, False, importance, wished, ranked, lease.id)
        return (False, not lease.pins, -importance, -wished, -ranked, lease.id)

    return sorted(leases, key=key)


def host_room_for(
    book: Book,
    lease: Lease,
    host_room: int,
    world: World,
    rank: Policy,
    *,
    owner: str = "",
    spared: Collection[str] = (),
    renewed: Renewed = lambda host_room: (),
) -> tuple[list[Lease], tuple[Lease, ...]] | None:
    """Leases whose shadows are freed, and leases to unload, so that `lease` fits into host memory.

    If these are not enough, leases move from host memory to a disk. For a lease whose source is as fast
    as the disk, this costs more than it saves: its bytes are read once, and those of the others are
    written, compared and read. For a lease with a slower source, only such leases move. The result is None if `lease`
    fits as it is, or if the room cannot be made. `host_room` is the host's free bytes. The function
    `renewed` is called if the shadows are too few. Its parameter is the number of bytes that are
    free once all shadows are freed. It returns the leases to unload.
    All other parameters are as in `held_shadows` and `enough_shadows`.
    """
    shortage = lease.offload_bytes - host_room
    fits_alone = lease.leaving_bytes <= world.limits.get(HOST, 0)
    if shortage <= 0 or not fits_alone or lease.on_host or not can_move(lease, world):
        return None
    left_out = {lease.id, *spared} if keeps_shadow(lease) else spared
    able = held_shadows(book, owner=owner, spared=left_out)
    short = shortage - shadows_total(able)
    unloaded = renewed(host_room + shadows_total(able)) if short > 0 else ()
    if short > 0 and not unloaded:
        if lease.droppable and not lease.stow_bytes:
            return None
        able = held_shadows(book, owner=owner, spared=left_out, to_disk=True)
        if lease.droppable:
            able = [other for other in able if other.shadow_bytes or other.droppable]
        if shadows_total(able) < shortage:
            return None
    freed = sum([other.bytes_on(HOST) for other in unloaded])
    return enough_shadows(able, shortage - freed, world, rank), unloaded


def shed_step(lease: Lease, because: str, reason: str = "request", by: str = "") -> Shed:
    """The step with which `lease` gives back host memory. All other arguments are fields of the step."""
    return Shed(lease.id, (Share(HOST, lease.shed_bytes),), because, reason, by)


# -- how a shadow begins and ends ------------------------------------------------------------------


def reserve_shadow(
    book: Book, owner: str, name: str, size: int, world: World, copy: str = "", shared: int = 0
) -> tuple[Book, bool]:
    """Reserves `size` bytes of host memory for the shadow of a lease that is arriving.

    Returns the new book and True. Returns the same book and False if the lease is not arriving or
    cannot be offloaded, if the host has no room, or if a request waits for host memory.

    If `copy`, the id of shared pages, is given, the shadow will be in these pages. `shared` bytes
    of the pages exist and are counted already, by other leases that share the pages.
    """
    lease = book.lease(owner, name)
    if lease is None or lease.phase is not Phase.ARRIVING or lease.shares or size <= 0:
        return book, False
    if not (lease.movable and world.rules.offload) or any(card.unified for card in world.devices):
        return book, False
    if any(ticket.shadows for ticket in book.tickets):
        return book, False
    reserved = replace(lease, shadow_bytes=size, copy=copy, copy_bytes=shared, copied_bytes=shared)
    after = book.with_lease(reserved)
    extra = size - shared + max(0, shared - _largest(book, copy))
    if room(book, world).get(HOST, 0) < extra:
        return book, False
    return after, True


def _largest(book: Book, copy: str) -> int:
    """The bytes that the book counts for the shared pages with the id `copy`."""
    sizes = [lease.shared_bytes for lease in book.leases() if copy and lease.copy == copy]
    return max(sizes, default=0)


def has_room_for_shadow(book: Book, owner: str, name: str, world: World) -> bool:
    """Whether the settled lease `name` of `owner` has a shadow, and the host has room for it."""
    lease = book.lease(owner, name)
    if lease is None or not lease.shadow_bytes:
        return False
    return room(book, world).get(HOST, 0) >= 0


def shadow_freed(book: Book, lease_id: str) -> Book:
    """The book after the lease `lease_id` gave back its shadow, or moved from host memory to a disk.

    The result is the same book if the lease has nothing to give back. The shadow of a lease that is
    leaving stays, because the shadow becomes the lease's share on the host.
    """
    lease = book.find(lease_id)
    if lease is None or not lease.shed_bytes or lease.phase is Phase.LEAVING:
        return book
    return book.with_lease(lease.shed())
