"""How much of each card torch may take in this process, so that it never takes what somebody else has leased.

Pure. A lease holds weights; what code needs beyond them (activations, caches) it may take from what nobody claims.
torch refuses the rest with its own out-of-memory error, in the process that asks for too much and not in its neighbour.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..facts import HOST, Book, World

LEAST, MOST = 0.01, 0.99
ALL = 1.0


def bounds(
    book: Book,
    owner: str,
    world: World,
    contexts: Mapping[str, int],
    open_cards: Collection[str] = (),
) -> dict[str, float]:
    """The fraction of each real card that torch may take here, while a model of this owner lies on it alone.

    That is all but what others claim and what our CUDA context (`contexts`, bytes) takes outside torch's sight; never
    less than our own leases there. A card is left out, and so unbounded, where we have nothing, where a model of ours
    lies over several cards, or where a block of code sets its own bound (`open_cards`).
    """
    section = book.sections.get(owner)
    ours: dict[str, int] = {}
    unbounded = set(open_cards)
    for lease in section.leases if section else ():
        cards = {share.device for share in lease.claims() if share.device != HOST}
        if len({share.device for share in lease.shares} - {HOST}) > 1:
            unbounded |= cards
        for share in lease.claims():
            ours[share.device] = ours.get(share.device, 0) + share.bytes
    claims = book.claims()
    found = {}
    for device in world.devices:
        mine, own = ours.get(device.id, 0), (section.residue.get(device.id, 0) if section else 0)
        if device.is_host or device.simulated or not mine or device.id in unbounded:
            continue
        others = claims.get(device.id, 0) - mine - own
        free = device.total_bytes - others - contexts.get(device.id, 0)
        found[device.id] = min(MOST, max(LEAST, max(free, mine) / device.total_bytes))
    return found
