"""Decides which leases may be evicted, and whether a lease is offloaded or dropped.

Pure. A lease is offloaded to host memory while the host has room. Without room the lease is
dropped, if its source can load the weights again. Weights that exist nowhere else are never
dropped. A shadow is an unchanged copy in host memory of a model that is on a card.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nlargest

from msgspec.structs import replace

from ..facts import HOST, Book, Drop, Lease, Move, Phase, Policy, Share, Shed, World
from .victims import victims, worth

EXEMPT = "is exempt from parking"  # `%gpu park never`, or GPU_PARK=never
MOVE_FAILED = "waiting after a failed move"  # a reason to stay
WISHED = "wished by the fleet"  # a reason to stay, for a load that only a wish requests
MOST_TRIED = 12  # every combination of so many leases is tried
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
    part: int = 0,
    drop: bool = False,
    because: str = "",
    reason: str = "request",
) -> Move | Drop | None:
    """The step that evicts this `lease`: a Move to the host, or a Drop if it cannot be moved.

    The result is None if neither step is possible: weights that exist nowhere else are never
    dropped. If `drop` is true, a Drop is preferred even if the host has room.

    `host_room` is the host's free bytes. A Move needs fewer of them if the lease has a shadow. A
    Move moves `part` bytes, or all bytes of the lease if `part` is 0. A Drop always drops all
    bytes. `because` (a sentence) and `reason` (a word) are put into the step. `world` holds the
    devices and the offload setting.
    """
    size = min(part, lease.card_bytes) if part else lease.card_bytes
    target = (Share(HOST, size),)
    copied = replace(lease, target=target).offload_bytes if lease.shadow_bytes else size
    moves = copied <= host_room and can_move(lease, world) and not lease.on_host
    if lease.droppable and (drop or not moves):
        return Drop(lease.id, lease.shares, because, reason)
    if moves:
        return Move(lease.id, lease.freed_by(target), target, because, reason)
    return None


def copied_bytes(lease: Lease, step: Move | Drop | Shed | None) -> int:
    """The bytes of host memory that a Move takes beyond the lease's shadow; 0 for other steps."""
    if not isinstance(step, Move):
        return 0
    if lease.shadow_bytes:
        return replace(lease, target=step.shares).offload_bytes
    return sum([share.bytes for share in step.shares])


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


def permanent_reason_to_stay(
    lease: Lease,
    world: World,
    *,
    held: Sequence[str] = (),
) -> str:
    """The reason why this `lease` never leaves its device, however long a request waits.

    The text is the end of a sentence. It is empty if the lease may leave at some time. `held` are
    the ids of the leases that the requesting thread itself pins. `world` holds the host's limit.
    """
    if lease.id in held:
        return "is held by the block that makes the request"
    if lease.kind == "block":
        return ""  # a block ends with its cell
    if lease.keep:
        return "is kept on the device (unpin it to let it go)"
    if lease.droppable:
        return ""
    if can_move(lease, world) and (lease.piece_bytes or lease.own_bytes) <= world.limits.get(
        HOST, 0
    ):
        return ""
    if _uses_host_memory(lease, world):
        return "exists nowhere else, and is in the host's memory already"
    if card := beyond_its_card(lease, world):
        return f"holds more than {card} has, so it could not return"
    return needs_host_room(lease)


def needs_host_room(lease: Lease) -> str:
    """The reason why this `lease`, whose weights exist nowhere else, cannot leave its card.

    The text is the end of a sentence. Either the lease is a notebook's memory that may not be
    moved, or the host has no room for the lease.
    """
    if lease.kind == "kernel" and not lease.movable:
        return EXEMPT
    return "exists nowhere else, and the host has no room for it"


def why_not_moved(book: Book, lease: Lease) -> str:
    """The owner's reason for the last failed move of `lease`, as the text `: reason`.

    The reason is from the newest event of a failed move. The text is empty without such an event.
    Events that answer another process's request (an order) are skipped.
    """
    for event in reversed(book.events):
        if event.answers:  # the answer to an order, such as a pin by a user without the right
            continue
        if (event.owner, event.model, event.action) == (lease.owner, lease.name, "failed"):
            reason = event.because.partition(": ")[2].rstrip(".")
            return f": {reason}" if reason else ""
    return ""


def leaves_in_words(book: Book, lease: Lease) -> str:
    """How this `lease` leaves its card now. The text is the end of a sentence.

    If its last event is a failed move, the text has the reason: its process tries the move again.
    """
    for event in reversed(book.events):
        if not event.answers and (event.owner, event.model) == (lease.owner, lease.name):
            if event.action != "failed":
                break
            return f"could not be moved{why_not_moved(book, lease)}; its process tries again"
    return "is being moved to RAM" if lease.kind == "kernel" else "is being evicted"


def mark_leaving(
    book: Book,
    step: Move | Drop,
    key: str,
) -> Book:
    """The `book` with the lease of the `step` marked as leaving.

    The lease's bytes count on the old and the new device until the step is done. `key` identifies
    the decision.
    """
    lease = book.find(step.lease)
    assert lease is not None, f"{step.lease} is to leave, but is not in the book"
    target = step.shares if isinstance(step, Move) else ()
    return book.with_lease(replace(lease, phase=Phase.LEAVING, target=target, key=key))


def unfinished_steps(
    book: Book,
    owner: str,
    key: str,
) -> tuple[Move | Drop, ...]:
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
) -> list[Lease]:
    """Leases of the `book` in host memory that may be unloaded now.

    If `owner` is given, only leases of this owner are returned. A lease in parts (partly on a card,
    partly in host memory) counts as being in host memory. If such a lease is unloaded, its bytes on
    the card are freed too. `asker`, `importance` and `world` are as in `reason_to_stay`. The lease
    with the id `wanted` stays, because it is about to return to a card.
    """
    found = []
    for lease in book.leases():
        if not lease.droppable or lease.all_on_device or lease.id == wanted:
            continue
        if owner and lease.owner != owner:
            continue
        if not reason_to_stay(lease, world, asker=asker, importance=importance):
            found.append(lease)
    return found


def worth_less(
    pool: Iterable[Lease], lease: Lease, host_room: int, world: World, rank: Policy
) -> tuple[Lease, ...]:
    """The leases of `pool` to unload from host memory so that `lease` fits into it.

    Each returned lease has a lower `worth` in host memory than `lease` would have. The result is
    empty if such leases cannot make the room. If `lease` has a target, only the bytes in the target
    must fit. `host_room` is the host's free bytes. `pool` is the result of `warm`.
    """
    shortage = lease.offload_bytes - host_room
    fits_alone = lease.leaving_bytes <= world.limits.get(HOST, 0)
    if shortage <= 0 or not fits_alone or lease.on_host or not can_move(lease, world):
        return ()

    def worth_there(one: Lease) -> tuple[int, int, float]:
        # A lease in parts is a load from its source away once it is unloaded, like one in host memory.
        there = replace(one, shares=(Share(HOST, one.own_bytes),), target=(), filled=())
        return worth(there, world, rank)

    own = worth_there(lease)
    less = [other for other in pool if other.id != lease.id and worth_there(other) < own]
    return victims({HOST: shortage}, less, world, rank) or ()


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
