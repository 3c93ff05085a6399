"""Computes how much of each card torch may use in this process, beside other owners' leases.

Pure. A lease covers weights. Code may also use unclaimed memory, for activations and caches. If the
code uses more than its fraction, torch raises its own out-of-memory error in this process, and no
other process fails.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..facts import HOST, Book, Lease, World

LEAST, MOST = 0.01, 0.99
ALL = 1.0


def bounds(
    book: Book,
    owner: str,
    world: World,
    contexts: Mapping[str, int],
    open_cards: Collection[str] = (),
) -> dict[str, float]:
    """The fraction of each real card of `world` that torch may use in the process of `owner`.

    The bound is the whole card, less other owners' claims in `book`, and less the CUDA context,
    which torch does not count. `contexts` maps cards to the bytes of the context. The bound is at
    least the owner's own leases on the card, and at most 99 % of the card.

    If the operator enforces the user's cap, the bound is also at most the cap less what the user's
    other processes hold on the card.

    A card has no bound, and no entry in the result, for one of three reasons: the owner has nothing
    on the card, one of the owner's models is split over several cards, or a block of code sets its
    own bound (`open_cards`).
    """
    section = book.sections.get(owner)
    if section is None:
        return {}
    unbounded = set(open_cards)
    ours: dict[str, int] = {}
    for lease in section.leases:
        if _is_split(lease):
            unbounded.update(share.device for share in lease.claims())
        for share in lease.claims():
            ours[share.device] = ours.get(share.device, 0) + share.bytes

    claims = book.claims()
    found = {}
    for device in world.devices:
        leased = ours.get(device.id, 0)
        if device.is_host or device.simulated or not leased or device.id in unbounded:
            continue
        others = claims.get(device.id, 0) - leased - section.residue.get(device.id, 0)
        free = device.total_bytes - others - contexts.get(device.id, 0)
        fraction = max(free, leased) / device.total_bytes
        found[device.id] = min(MOST, max(LEAST, fraction))
    allowed = _enforced(book, owner, world)
    for device in world.devices:
        if device.id in allowed and not device.simulated:
            fraction = max(LEAST, allowed[device.id] / device.total_bytes)
            found[device.id] = min(fraction, found.get(device.id, ALL))
    return found


def _enforced(book: Book, owner: str, world: World) -> dict[str, int]:
    """The bytes of each card that the process of `owner` may hold, if its user's cap is enforced."""
    cap = world.rules.cap
    if cap is None or not cap.enforce or cap.bytes_per_device is None:
        return {}
    allowed = {device.id: cap.bytes_per_device for device in world.devices if not device.is_host}
    for id, section in book.sections.items():
        if id == owner or section.owner.user != cap.user:
            continue
        for lease in section.leases:
            for share in lease.claims():
                if share.device in allowed:
                    allowed[share.device] -= share.bytes
    return allowed


def _is_split(lease: Lease) -> bool:
    cards = {share.device for share in lease.shares} - {HOST}
    return len(cards) > 1
