"""Makes room for one more lease in the book's page, by evicting an idle lease.

Pure. The page is the stored form of the book. Its entries are leases and requests, and their number
is limited. New leases never take the last 2 * RESERVED entries: RESERVED of them are for requests
that wait, the others for requests to owners. So even a full page can take the requests that empty
it.
"""

from __future__ import annotations

from ..facts import MOST_ENTRIES, Book, Drop, Lease, Phase, Policy, Refuse, Request, Wait
from ..units import show_seconds
from .context import Context
from .evictable import mark_leaving, reason_to_stay
from .victims import eviction_order

RESERVED = 32  # entries for requests to owners, and as many more for requests that wait
MOST_LEASES = MOST_ENTRIES - 2 * RESERVED  # entries beyond which no new lease is granted
MOST_WAITING = MOST_ENTRIES - RESERVED  # entries beyond which no new request waits


def needs_entry(book: Book, request: Request) -> bool:
    """Whether the page has no room for the lease that the `request` would get."""
    if book.lease(request.lease.owner, request.lease.name):
        return False
    own = book.ticket(request.key) is not None  # the request's own ticket becomes the lease
    return book.entries - own >= MOST_LEASES


def full_for_waiting(book: Book, request: Request) -> bool:
    """Whether the page has no room for this request's ticket."""
    return book.entries >= MOST_WAITING and book.ticket(request.key) is None


def page_full(request: Request) -> Refuse:
    """The refusal of the `request` if no lease may leave the full page."""
    because = f"the book is full: {MOST_ENTRIES} leases and requests"
    return Refuse(because, kind="full", need_bytes=request.footprint.bytes)


def free_an_entry(context: Context, rank: Policy) -> tuple[Book, Wait] | None:
    """The book, and the Wait while an idle lease leaves the page; None if no lease may leave.

    The chosen lease is unloaded, because an offloaded lease keeps its entry in the page. The choice
    follows the rules of an eviction that frees bytes. `context` has the inputs of this decision.
    `rank` is the eviction policy.
    """
    book, request, world = context.book, context.request, context.world
    head = f"The book is full ({book.entries} leases and requests)"
    leaving = _leaving(context)
    if leaving is not None:
        asked = () if leaving.owner == request.lease.owner else (leaving.id,)
        return book, Wait(f"{head}; {leaving.name} is being unloaded", asked=asked)
    victim = _victim(context, rank)
    if victim is None:
        return None
    idle = f"{victim.name} (idle {show_seconds(victim.idle_seconds(world.now))})"
    if victim.owner != request.lease.owner:
        owner = book.owner(victim.owner)
        label = owner.label if owner else victim.owner
        return book, Wait(f"{head}; {label} is asked to unload {idle}.", asked=(victim.id,))
    because = f"{head}; {request.lease.name} needs its entry."
    step = Drop(victim.id, victim.shares, because)
    emptier = mark_leaving(book, step, request.key)
    return emptier, Wait(f"{head}; {idle} is unloaded.", steps=(step,))


def _leaving(context: Context) -> Lease | None:
    """A lease that is being unloaded, or is leaving because this request recalled it; or None."""
    old = context.book.ticket(context.request.key)
    recalled = old.recalls if old else ()
    for lease in context.leases:
        if lease.phase is not Phase.LEAVING:
            continue
        if not lease.target or lease.id in recalled:
            return lease
    return None


def _victim(context: Context, rank: Policy) -> Lease | None:
    """The idle lease that leaves first; None if no lease may leave.

    Of leases with equal importance, leases that are not wholly on cards leave first.
    """
    request, world = context.request, context.world
    asker, importance = request.lease.owner, request.lease.importance
    idle = []
    for lease in context.leases:
        if not lease.droppable or lease.id in context.recalled:
            continue
        if not reason_to_stay(lease, world, asker=asker, importance=importance):
            idle.append(lease)
    ordered = eviction_order(idle, world, rank)
    ordered.sort(key=lambda lease: (-lease.importance, lease.all_on_device))
    return ordered[0] if ordered else None
