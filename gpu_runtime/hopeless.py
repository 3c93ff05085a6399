"""Whether a request can be served at all.

Pure. A request that can never fit is refused at once, and nothing is evicted for it.
"""
from __future__ import annotations

from .facts import HOST, Book, Device, Lease, Refuse, Request, World
from .leaving import never_leaves, that_fit
from .room import limit_of
from .units import show_bytes

GB = 2**30


def hopeless(book: Book, request: Request, world: World) -> Refuse | None:
    """Why it can never fit, were everything gone that can go; None where it can.

    What cannot go: what is kept, what this thread itself pins, and what neither its source can reproduce nor the host
    can take in. Of several such leases, the host may have room for some but not for all.
    """
    size, name, allowed = request.footprint.bytes, request.lease.name, request.placement.devices
    cards = [d for d in world.devices if not d.is_host and (not allowed or d.id in allowed)]
    if not cards:
        where = f"only go to {', '.join(allowed)}" if allowed else "not lie in host memory alone"
        return Refuse(f"{name} may {where}, and this machine has no such device", need_bytes=size)
    refusals: list[Refuse] = []
    for card in cards:
        refusal = _hopeless_on(card, book, request, world)
        if refusal is None:
            return _past_own_limit(book, request, world)
        refusals.append(refusal)
    return max(refusals, key=lambda refusal: refusal.budget_bytes)


def _hopeless_on(card: Device, book: Book, request: Request, world: World) -> Refuse | None:
    size, name = request.footprint.bytes, request.lease.name
    limit = limit_of(book, world, card.id)
    if size > limit:
        return Refuse(f"{name} needs {show_bytes(size)} on one device; the largest budget is {show_bytes(limit)} "
                      f"({card.id})", need_bytes=size, budget_bytes=limit, device=card.id)
    stuck: list[tuple[Lease, str]] = []
    precious: list[Lease] = []
    for lease in book.leases():
        if any(share.device == card.id for share in lease.shares):
            if why := never_leaves(lease, world, held=request.held):
                stuck.append((lease, why))
            elif not lease.droppable and lease.kind == "model":
                precious.append(lease)
    left = limit - sum(_on(lease, card) for lease, _ in stuck)
    if size <= left and precious:
        saved = that_fit(precious, _host_bytes_to_be_had(book, world))
        remain = [lease for lease in precious if lease not in saved]
        if size > left - sum(_on(lease, card) for lease in remain):
            stuck += [(lease, "exists nowhere else, and the host has no room for them all") for lease in precious]
            left -= sum(_on(lease, card) for lease in remain)
    if size <= left:
        return None
    who = "; ".join(f"{lease.name} ({show_bytes(lease.bytes)}) {why}" for lease, why in stuck)
    nested = any(lease.id in request.held for lease, _ in stuck)
    kind = "nested" if nested else "kept" if any(lease.keep for lease, _ in stuck) else "precious"
    return Refuse(f"{name} needs {show_bytes(size)}; {card.id} has {show_bytes(limit)}, and {who}", kind,
                  need_bytes=size, budget_bytes=limit, device=card.id, holders=tuple(lease.id for lease, _ in stuck))


def _on(lease: Lease, card: Device) -> int:
    return sum(share.bytes for share in lease.shares if share.device == card.id)


def _host_bytes_to_be_had(book: Book, world: World) -> int:
    """Host memory that weights may move to, were everything gone from it that may be dropped."""
    taken = sum(share.bytes for lease in book.leases() if lease.keep or not lease.droppable
                for share in lease.shares if share.device == HOST)
    return limit_of(book, world, HOST) - taken


def _past_own_limit(book: Book, request: Request, world: World) -> Refuse | None:
    """INFERENCE_MEMORY_LIMIT_GB: refused at once where what cannot leave now and the new one pass it together."""
    limit = world.rules.limit_bytes
    if limit is None or request.lease.kind != "model":
        return None
    section = book.sections.get(request.lease.owner)
    stays = sum(share.bytes for lease in (section.leases if section else ())
                if lease.kind == "model" and (lease.pins or lease.keep or never_leaves(lease, world))
                for share in lease.claims() if share.device != HOST)
    size = request.footprint.bytes
    if stays + size <= limit:
        return None
    return Refuse(
        f"Loading '{request.lease.name}' ({size / GB:.1f}GB) would exceed memory limit "
        f"({stays / GB:.1f}GB + {size / GB:.1f}GB > {limit / GB:.1f}GB)",
        kind="limit", need_bytes=size, budget_bytes=limit - stays)
