"""What a book calls the cards of its host.

Pure. Each process sees cards of its own choosing, and torch numbers them from 0; in the book one name is one physical
card for everybody, whoever sees what. The first owner names its cards as its driver numbers them; whoever comes later
finds them by their UUIDs. (In containers that see different cards the drivers number each from 0, too.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..facts import Book, Device


def names(mine: Iterable[Device], book: Book) -> dict[str, str]:
    """Our names that are not the book's -> what the book calls the same card.

    A card that the book does not know keeps its name, where no other card has it, else takes the next number.
    """
    known = {
        device.uuid: device.id for device in book.devices if device.uuid and not device.is_host
    }
    mine = [
        device for device in mine if device.uuid and not device.is_host and not device.simulated
    ]
    taken = {*known.values(), *(device.id for device in mine if device.uuid not in known)}
    called: dict[str, str] = {}
    for device in mine:
        id = known.get(device.uuid)
        if id is None and device.id in known.values():
            id = _next(device.id, taken)
            taken.add(id)
        if id is not None and id != device.id:
            called[device.id] = id
    return called


def _next(id: str, taken: set[str]) -> str:
    """`cuda:2` where cuda:0 and cuda:1 are taken; of an instance its last number goes on."""
    stem = re.match(r".*?(?=\d+$)", id)
    stem = stem[0] if stem else f"{id}."
    numbers = (
        int(other[len(stem) :])
        for other in taken
        if other.startswith(stem) and other[len(stem) :].isdigit()
    )
    return f"{stem}{max(numbers, default=-1) + 1}"
