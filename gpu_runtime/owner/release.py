"""How a model of this process leaves its device: an eviction, or a step that was decided."""

from __future__ import annotations

from msgspec.structs import replace

from ..errors import DoesNotFit, GpuError, StillInUse
from ..facts import HOST, Book, Drop, Lease, Move, Step, World
from ..scheduler import eligibility, explain
from ..scheduler import transitions as books
from ..scheduler.capacity import room
from ..units import show_bytes
from .resident import Place, Resident, Stays
from .session import Key, Session


def evict(
    session: Session, resident: Resident, because: str, *, drop: bool = False, by: str = ""
) -> Move | Drop | None:
    """Evicts an own model now. Returns the step taken; None if it is on no device already.

    `drop` unloads it although host memory has room. `by` is the person who requested it.
    Raises StillInUse, DoesNotFit.
    """
    if resident.handle is None or (resident.place is Place.AWAY and not drop):
        return None
    key = session.new_key(f"evict {resident.spec.name}")

    def leave(book: Book, world: World) -> tuple[Book, Move | Drop | GpuError]:
        return _leave(session, resident, key, book, world, because, drop)

    try:
        step = session.decide(leave)
        if isinstance(step, GpuError):
            raise step
        if not carry_out(session, step, key, by):
            # It was used meanwhile, or it may not be dropped: decide again.
            return evict(session, resident, because, by=by)
        return step
    finally:
        session.done_with(key.note)


def _leave(
    session: Session,
    resident: Resident,
    key: Key,
    book: Book,
    world: World,
    because: str,
    drop: bool,
) -> tuple[Book, Move | Drop | GpuError]:
    """The book with the model leaving, and the step; or the book as it was, and the error."""
    name = resident.spec.name
    lease = book.lease(session.me, name)
    if lease is None:
        return book, StillInUse(f"{name} is being loaded or moved; try again.", name=name)
    if why := eligibility.reason_to_stay(lease, world, asker=session.me, importance=-1):
        return book, explain.still_here(book, session.me, lease, why, world)
    host_room = room(book, world).get(HOST, 0)
    step = eligibility.eviction_step(
        lease, host_room, world, drop=drop, because=because, reason="evict"
    )
    if step is None:
        return book, _only_copy(lease)
    return eligibility.mark_leaving(book, step, key.text), step


def _only_copy(lease: Lease) -> DoesNotFit:
    return DoesNotFit(
        f"{lease.name} ({show_bytes(lease.bytes)}) exists nowhere else and host memory has no room "
        f"for it.\n"
        f"  Raise CPU_MEMORY_MAX_PERCENT, or give it up for good:  rt.forget({lease.name!r})",
        name=lease.name,
        need_bytes=lease.bytes,
        device=HOST,
    )


def carry_out(session: Session, step: Move | Drop, key: Key, by: str = "") -> bool:
    """Performs an own step where no interrupt cuts it in half.

    False if the model is in use or its bytes have changed; then nothing was moved.
    """
    return session.uninterrupted(key, lambda: step_aside(session, step, key, by))


def step_aside(session: Session, step: Step, key: Key, by: str = "") -> bool:
    """Moves or drops one of our own models. False if it is in use after all, and stays."""
    assert isinstance(step, (Move, Drop))
    name = step.lease.partition("/")[2]
    resident = session.residents.get(name)
    if resident is None or not resident.begin_moving():
        _abandon(session, name, key)
        return False
    try:
        if resident.remeasure():  # the room reserved for it may be too little: decide again
            raise Stays("its bytes have changed since they were counted")
        shares = resident.carry(step)
    except BaseException as error:
        resident.lease = replace(resident.lease, droppable=resident.droppable())
        resident.stay()
        expected = isinstance(error, Stays)
        why = str(error) if expected else f"{type(error).__name__}: {explain.first_line(error)}"
        _abandon(session, name, key, f"{name} stays where it is: {why}.")
        if expected:
            return False
        raise
    if isinstance(step, Move):
        moved = replace(resident.lease, target=step.shares).holding(shares)
        now = session.clock()
        away_since = 0.0 if moved.on_device else now
        resident.settle_at(replace(moved, settled_at=now, away_since=away_since))
    session.probe.empty_cache()
    session.probe.watch_peaks()  # what has left must not count in the peak of what stays
    session.decide(
        lambda book, world: (books.left(book, step, shares, world, by), None), fresh=True
    )
    return True


def _abandon(session: Session, name: str, key: Key, because: str = "") -> None:
    session.decide(
        lambda book, world: (
            books.abandon(book, session.me, name, key.text, world, because),
            None,
        )
    )
