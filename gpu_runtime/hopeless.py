"""Whether a request can be served at all.

Pure. A request that can never fit is refused at once, and nothing is evicted for it.
"""
from __future__ import annotations

from .facts import HOST, Book, Device, Lease, Refuse, Request, World
from .leaving import never_leaves, that_fit
from .room import limit_of
from .units import show_bytes

GB = 2**30


def hopeless(book: Book, request: Request, world: World, never: dict[str, Refuse]) -> Refuse | None:
    """Why it can never fit, were everything gone that can go; None where it can. `never` is from `hopeless_cards`."""
    size, name, allowed = request.footprint.bytes, request.lease.name, request.placement.devices
    cards = [d.id for d in world.devices if not d.is_host and (not allowed or d.id in allowed)]
    if not cards:
        where = f"only go to {', '.join(allowed)}" if allowed else "not lie in host memory alone"
        return Refuse(f"{name} may {where}, and this machine has no such device", need_bytes=size)
    if any(card not in never for card in cards):
        return _past_own_limit(book, request, world)
    return max((never[card] for card in cards), key=lambda refusal: refusal.budget_bytes)


def hopeless_cards(book: Book, request: Request, world: World) -> dict[str, Refuse]:
    """Cards on which the request can never fit, and why.

    What cannot go: what is kept, what this thread itself pins, and what neither its source can reproduce nor the host
    can take in. Of several such leases, the host may have room for some but not for all.
    """
    stuck: dict[str, list[tuple[Lease, str]]] = {}
    precious: dict[str, list[Lease]] = {}
    for lease in book.leases():
        if lease.droppable and not lease.keep and not request.held:
            continue
        why = never_leaves(lease, world, held=request.held)
        for device in {share.device for share in lease.shares}:
            if why:
                stuck.setdefault(device, []).append((lease, why))
            elif not lease.droppable and lease.kind == "model":
                precious.setdefault(device, []).append(lease)
    host_bytes = _host_bytes_to_be_had(book, world) if precious else 0
    refusals: dict[str, Refuse] = {}
    size = request.footprint.bytes
    for card in world.devices:
        limit = limit_of(book, world, card.id)
        if not card.is_host and (size > limit or card.id in stuck or card.id in precious):
            refusal = _refusal(card, limit, request, stuck.get(card.id, []), precious.get(card.id, []), host_bytes)
            if refusal:
                refusals[card.id] = refusal
    return refusals


def _refusal(card: Device, limit: int, request: Request, stuck: list[tuple[Lease, str]], precious: list[Lease],
             host_bytes: int) -> Refuse | None:
    size, name = request.footprint.bytes, request.lease.name
    if size > limit:
        return Refuse(f"{name} needs {show_bytes(size)} on one device; the largest budget is {show_bytes(limit)} "
                      f"({card.id})", need_bytes=size, budget_bytes=limit, device=card.id)
    left = limit - sum(_on(lease, card) for lease, _ in stuck)
    if size <= left and precious:
        saved = that_fit(precious, host_bytes)
        remain = [lease for lease in precious if lease not in saved]
        if size > left - sum(_on(lease, card) for lease in remain):
            too_many = "exists nowhere else, and the host has no room for them all"
            stuck = [*stuck, *((lease, too_many) for lease in precious)]
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
