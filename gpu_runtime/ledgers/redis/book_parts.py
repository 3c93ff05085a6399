"""Takes one owner's part from a book, and makes a book from the parts of several owners.

Pure. Each owner keeps a copy of its part in its roster, which is the owner's own file. A damaged
book is rebuilt from the rosters.
"""

from __future__ import annotations

from msgspec.structs import replace

from ...facts import Book, Device, Drain, Quarantined, Section, Ticket


def part_of(book: Book, owner_id: str) -> Book:
    """The section and the tickets of the owner `owner_id`, as a book.

    The result also has the devices, limits and drained cards, which all owners share.
    """
    section, unread = book.sections.get(owner_id), book.quarantined.get(owner_id)
    sections = {owner_id: section} if section else {}
    tickets = [ticket for ticket in book.tickets if ticket.owner == owner_id]
    return Book(
        devices=book.devices,
        limits=book.limits,
        drained=book.drained,
        sections=sections,
        tickets=tuple(tickets),
        quarantined={owner_id: unread} if unread else {},
    )


def union(parts: list[Book]) -> Book:
    """One book made from `parts`, the parts of several owners, from the oldest to the newest.

    The description and the limit of a device are those of the first part that has the device: while
    any owner lives, the book keeps those of its first owner (`transitions.publish`), so the parts
    agree. The drained cards are those of the last part that has a section.
    """
    devices: dict[str, Device] = {}
    limits: dict[str, int] = {}
    sections: dict[str, Section] = {}
    tickets: list[Ticket] = []
    drained: dict[str, Drain] = {}
    quarantined: dict[str, Quarantined] = {}
    for part in parts:
        devices = {device.id: device for device in part.devices} | devices
        limits = part.limits | limits
        sections |= part.sections
        tickets += part.tickets
        quarantined |= part.quarantined
        if part.sections:
            drained = part.drained
    return Book(
        devices=tuple(devices.values()),
        limits=limits,
        sections=sections,
        drained=drained,
        tickets=tuple(sorted(tickets, key=lambda ticket: ticket.arrived)),
        quarantined={id: unread for id, unread in quarantined.items() if id not in sections},
    )


def with_living(book: Book, parts: dict[str, Book]) -> Book:
    """The `book`, with the sections and tickets of the owners in `parts` replaced by those in `parts`.

    `parts` maps owner ids to parts. The parts may also add devices and limits. The drained cards of
    the parts are used only if no card is drained in `book`.
    """
    sections = {id: section for id, section in book.sections.items() if id not in parts}
    tickets = [ticket for ticket in book.tickets if ticket.owner not in parts]
    unread = {id: unread for id, unread in book.quarantined.items() if id not in parts}
    others = replace(book, sections=sections, tickets=tuple(tickets), quarantined=unread)
    whole = union([others, *parts.values()])
    return replace(
        others,
        devices=whole.devices,
        limits=whole.limits,
        sections=whole.sections,
        tickets=whole.tickets,
        drained=book.drained or whole.drained,
        quarantined=whole.quarantined,
    )
