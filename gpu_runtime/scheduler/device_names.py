"""The book's names for the cards of its host.

Pure. In the book, one name means one physical card for all processes. But each process can see a
different selection of the cards, which torch numbers from 0. In a container, the driver also
numbers the visible cards from 0. So the first owner uses its driver's numbers as names, and later
owners find the cards by UUID.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..facts import Book, Device


def names(mine: Iterable[Device], book: Book) -> dict[str, str]:
    """Maps this process's name of a card to the book's name, for each card where the two differ.

    `mine` are the devices of this process. A card that the `book` does not contain keeps its name,
    unless a card of the book has the same name. In this case the new card gets the number after the
    highest number in use. Simulated cards are left out.
    """
    known = {device.uuid: device.id for device in book.devices if _is_card(device)}
    cards = [device for device in mine if _is_card(device) and not device.simulated]
    taken = set(known.values())
    taken.update(device.id for device in cards if device.uuid not in known)

    renamed: dict[str, str] = {}
    for device in cards:
        id = known.get(device.uuid)
        if id is None and device.id in known.values():
            id = _next(device.id, taken)
            taken.add(id)
        if id is not None and id != device.id:
            renamed[device.id] = id
    return renamed


def _is_card(device: Device) -> bool:
    return bool(device.uuid) and not device.is_host


def _next(id: str, taken: set[str]) -> str:
    """The name `id` with the number after the highest number in `taken`.

    The result is `cuda:3` for `cuda:0` if cuda:0 and cuda:2 are taken. The name of an instance of a
    partitioned card has two numbers, as in `cuda:0.1`. In this case only the last number is raised.
    """
    stem_before_number = re.match(r".*?(?=\d+$)", id)
    stem = stem_before_number[0] if stem_before_number else f"{id}."
    highest = -1
    for other in taken:
        number = other[len(stem) :]
        if other.startswith(stem) and number.isdigit():
            highest = max(highest, int(number))
    return f"{stem}{highest + 1}"
