"""Decides whether a model may be loaded before the cell that uses the model has begun.

Pure. Such a load is a guess: the cell may never use the model. The load spends free memory, or the
memory of an idle model of the same process that is used later or never. The load never waits, frees
no copy in host memory, and never makes another process evict anything. While any request waits, no
model is loaded ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec.structs import replace

from ..facts import (
    Book,
    CellModels,
    Grant,
    Lease,
    Policy,
    Refuse,
    Request,
    Section,
    Shed,
    Step,
    Wait,
    World,
)
from .admission import admit
from .evictable import mark_leaving

# The rank of a model that a running or waiting cell uses is this number, less the model's place in
# the order of use. The number is far above the ranks of every policy.
_SCHEDULED = 1e15


def next_uses(cells: Sequence[CellModels]) -> dict[str, int]:
    """Maps the name of each model to the number of models that are used before it.

    `cells` are the running cell and the waiting cells, in order.
    """
    order: dict[str, int] = {}
    for cell in cells:
        for name in cell.uses:
            order.setdefault(name, len(order))
    return order


def with_next_uses(rank: Policy, owner: str, uses: Mapping[str, int]) -> Policy:
    """The policy `rank`, changed so that models of `owner` that are used soon leave last.

    `uses` is the result of `next_uses`. The model that is used soonest leaves after all others.
    """
    if not uses:
        return rank

    def hinted(lease: Lease, world: World) -> float:
        if lease.owner == owner and lease.name in uses:
            return _SCHEDULED - uses[lease.name]
        return rank(lease, world)

    return hinted


def load_ahead(
    book: Book,
    request: Request,
    world: World,
    rank: Policy,
    uses: Mapping[str, int],
    spared: Collection[str],
    cell: str,
) -> tuple[Book, Grant | Wait]:
    """A Grant if the model may be loaded ahead now, else a Wait; and the new `book`.

    The steps of a Wait evict idle models of the same process. After these steps, the caller calls
    this function again. A Wait without steps means that the model is not loaded ahead now. No
    ticket is written in any case.

    `uses` is the result of `next_uses`. `spared` are the models that stay because the running cell
    names them. `cell`, such as "cell 7", is the first cell that uses the model. `world` and `rank`
    are as in `admit`.
    """
    if book.tickets:
        return book, Wait("a request waits, and comes first")
    request = replace(request, wait=False)
    guarded = _guarded(book, request, uses, spared)
    _, verdict = admit(guarded, request, world, rank)
    if isinstance(verdict, Refuse):
        return book, Wait(verdict.because)
    if isinstance(verdict, Grant):
        return _granted(book, request, world, rank, f"loaded ahead: {cell} uses it")
    if verdict.shadows or any(isinstance(step, Shed) for step in verdict.steps):
        return book, Wait("host memory has too little free room for the models that would leave")
    if verdict.asked or not verdict.steps:
        return book, Wait(verdict.because)
    room_for = f"room for {request.lease.name}: {cell} uses it, and no cell before uses"
    steps = tuple(_said(step, f"{room_for} {_name(step)}.") for step in verdict.steps)
    for step in steps:
        book = mark_leaving(book, step, request.key)  # type: ignore[arg-type]
    return book, Wait(verdict.because, steps)


def _granted(
    book: Book, request: Request, world: World, rank: Policy, because: str
) -> tuple[Book, Grant | Wait]:
    """The book with the grant, and the Grant. Both give `because` as the reason of the load."""
    after, verdict = admit(book, request, world, rank)
    if not isinstance(verdict, Grant):
        return book, Wait(verdict.because)
    if after.seq > book.seq:
        *others, granted = after.events
        after = replace(after, events=(*others, replace(granted, because=f"{because}.")))
    steps = tuple(_said(step, f"{because}.") for step in verdict.steps)
    return after, replace(verdict, steps=steps, because=because)


def _guarded(
    book: Book, request: Request, uses: Mapping[str, int], spared: Collection[str]
) -> Book:
    """The book for the decision on a load ahead: each lease that must stay is marked as in use."""
    owner, own_use = request.lease.owner, uses.get(request.lease.name, len(uses))

    def may_leave(lease: Lease) -> bool:
        if lease.owner != owner or lease.kind != "model" or lease.name in spared:
            return False
        return lease.name not in uses or uses[lease.name] > own_use

    sections = {id: _with_pins(section, may_leave) for id, section in book.sections.items()}
    return replace(book, sections=sections)


def _with_pins(section: Section, may_leave: Callable[[Lease], bool]) -> Section:
    leases = [
        lease if lease.pins or may_leave(lease) else replace(lease, pins=1)
        for lease in section.leases
    ]
    return replace(section, leases=tuple(leases))


def _said(step: Step, because: str) -> Step:
    return replace(step, because=because)


def _name(step: Step) -> str:
    return step.lease.partition("/")[2]
