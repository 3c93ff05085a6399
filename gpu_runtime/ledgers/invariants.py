"""Which writes to the book are lawful."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from ..errors import LedgerRefused
from ..facts import MOST_ENTRIES, MOST_EVENTS, SCHEMA, Book, overdrafts
from ..units import show_bytes


def refuse_unlawful(
    old: Book, new: Book, writer: str, dead: Callable[[Book], frozenset[str]], path: str = ""
) -> None:
    """Nothing, where this owner may write `new` over `old`; else raises LedgerRefused.

    `dead` proves deaths; it is only asked when somebody else's section or ticket was removed.
    """
    why = (
        _sections_refusal(old, new, writer, dead)
        or _tickets_refusal(old, new, writer, dead)
        or _shared_refusal(old, new, writer)
        or _events_refusal(old, new)
        or _size_refusal(old, new)
        or _overdraft_refusal(old, new)
    )
    if why:
        raise LedgerRefused(
            f"the ledger {path or 'in memory'} refused a write by {writer}: {why}.\n"
            f"  The book is as it was. This is a fault of gpu-console: please report it.",
            path=path,
            why=why,
            writer=writer,
        )


def _sections_refusal(
    old: Book, new: Book, writer: str, dead: Callable[[Book], frozenset[str]]
) -> str:
    if new.sections is old.sections:
        return ""
    changed = [
        (id, section) for id, section in new.sections.items() if old.sections.get(id) is not section
    ]
    for id, section in changed:
        if id != writer and section == old.sections.get(id):
            continue
        if id != writer:
            return f"the section of {id} is its owner's to write"
        if section.owner.id != writer:
            return f"the section under {writer} says it is {section.owner.id}'s"
        for lease in section.leases:
            if lease.owner != writer:
                return f"{lease.id} lies in a section that is not its owner's"
        if len({lease.name for lease in section.leases}) < len(section.leases):
            return "two leases have one name: an identity is (owner, name)"
    removed = old.sections.keys() - new.sections.keys() - {writer}
    unproven = removed - dead(old) if removed else removed
    if unproven:
        return f"the section of {', '.join(sorted(unproven))} may go only with proof of death"
    return ""


def _tickets_refusal(
    old: Book, new: Book, writer: str, dead: Callable[[Book], frozenset[str]]
) -> str:
    if new.tickets is old.tickets and new.sections.keys() == old.sections.keys():
        return ""
    before = {ticket.key: ticket for ticket in old.tickets if ticket.owner != writer}
    after = {ticket.key: ticket for ticket in new.tickets if ticket.owner != writer}
    for key, ticket in after.items():
        if ticket is not before.get(key) and ticket != before.get(key):
            return f"the ticket {key} is {ticket.owner}'s to write"
        if ticket.owner in old.sections and ticket.owner not in new.sections:
            return f"the ticket {key} outlives {ticket.owner}: who is reaped goes whole"
    losers = {before[key].owner for key in before.keys() - after.keys()}
    for loser in sorted(losers):
        if loser in new.sections:
            return f"the tickets of {loser} are its own to withdraw"
    unproven = losers - dead(old) if losers else losers
    if unproven:
        return f"the tickets of {', '.join(sorted(unproven))} may go only with proof of death"
    return ""


def _shared_refusal(old: Book, new: Book, writer: str) -> str:
    """Devices and limits are the first owner's word; a sample gives way to a newer one."""
    if new.schema != SCHEMA:
        return f"schema {new.schema} was to be written where {SCHEMA} is in force"
    alone = not (old.sections.keys() - {writer})
    if new.devices is not old.devices and not alone:
        after = {device.id: device for device in new.devices}
        for device in old.devices:
            if after.get(device.id) != device:
                return f"{device.id} was described by the first owner; others may only add devices"
    if new.limits is not old.limits and not alone:
        for device, limit in old.limits.items():
            if new.limits.get(device) != limit:
                return (
                    f"the limit of {device} is {show_bytes(limit)} since the first owner; "
                    f"{show_bytes(new.limits.get(device, 0))} has to wait until nobody else is there"
                )
    if new.samples is not old.samples:
        for device, sample in old.samples.items():
            newer = new.samples.get(device)
            if newer is sample or newer == sample or (newer is None and alone):
                continue
            if newer is None or newer.taken_at <= sample.taken_at:
                return f"the sample of {device} would be replaced by one that is no newer"
    return ""


def _events_refusal(old: Book, new: Book) -> str:
    if new.events is old.events:
        return "" if new.seq >= old.seq else f"seq would fall from {old.seq} to {new.seq}"
    kept = tuple(event for event in new.events if event.seq <= old.seq)
    added = tuple(event.seq for event in new.events[len(kept) :])
    if kept != old.events[len(old.events) - len(kept) :]:
        return "events are appended and trimmed, never changed"
    if any(
        later <= earlier for earlier, later in itertools.pairwise((old.seq, *added, new.seq + 1))
    ):
        return f"the numbers of new events must rise from {old.seq} to {new.seq}"
    return ""


def _size_refusal(old: Book, new: Book) -> str:
    after = new.entries
    if after > MOST_ENTRIES and after > old.entries:
        return f"{after} leases and tickets are more than the {MOST_ENTRIES} that a page holds"
    if len(new.events) > MOST_EVENTS:
        return f"{len(new.events)} events are more than the {MOST_EVENTS} that a page holds"
    return ""


def _overdraft_refusal(old: Book, new: Book) -> str:
    if new.sections is old.sections and new.limits is old.limits:
        return ""
    return "; ".join(
        f"{device} would be claimed {show_bytes(excess)} beyond its limit of {show_bytes(new.limits[device])} (law 1)"
        for device, excess in overdrafts(old, new).items()
    )
