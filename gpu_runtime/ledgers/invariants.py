"""The laws that a write to the book must keep: one function for each law, and `refuse_unlawful`.

Each function in LAWS returns the reason why a write breaks its law, or an empty text. A section is
one owner's part of the book, and a ticket is the entry of a request. Nothing here reads or writes a
ledger.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Set
from typing import NamedTuple

from ..errors import LedgerRefused
from ..facts import MOST_ENTRIES, MOST_EVENTS, SCHEMA, Book, Phase, Section, overdrafts
from ..units import show_bytes

MOST_CLAIM = 1 << 50  # bytes; as many claims as a page holds have a sum that can be written
MOST_RISE = 1 << 32  # of the number of the newest event in one write


class Write(NamedTuple):
    """A write to check: the book before and after the write, and the id of the writer."""

    old: Book
    new: Book
    writer: str
    dead: Callable[[Book], frozenset[str]]  # ids of a book's owners that are proven dead
    changed: tuple[tuple[str, Section], ...]  # added or changed sections, by owner id

    @property
    def is_alone(self) -> bool:
        """Whether no other owner has a section in the book."""
        return not (self.old.sections.keys() - {self.writer})


def refuse_unlawful(
    old: Book,
    new: Book,
    writer: str,
    dead: Callable[[Book], frozenset[str]],
    path: str = "",
    *,
    unsent: bool = False,
) -> None:
    """Raises LedgerRefused if the owner `writer` may not write `new` over `old`.

    `dead` returns the owners that are proven dead. The function `dead` is called only if the
    section or a ticket of another owner was removed. `path` names the ledger in the error. With
    `unsent`, only the changes are checked that a message to the keeper could not show to it.
    """
    write = Write(old, new, writer, dead, _changed(old, new, writer))
    for law in UNSENT if unsent else LAWS:
        why = law(write)
        if not why:
            continue
        raise LedgerRefused(
            f"the ledger {path or 'in memory'} refused a write by {writer}: {why}.\n"
            f"  The book is unchanged. This is a fault of gpu-console: please report it.",
            path=path,
            why=why,
            writer=writer,
        )


# Sections


def _changed(old: Book, new: Book, writer: str) -> tuple[tuple[str, Section], ...]:
    """The sections that a write adds or changes, each with the owner id that is its key."""
    ids = [
        id
        for id in new.changed_since(old)
        if id == writer or new.sections[id] != old.sections.get(id)
    ]
    return tuple([(id, new.sections[id]) for id in ids])


def _only_own_section(write: Write) -> str:
    """An owner writes its own section only."""
    for id, section in write.changed:
        if id != write.writer:
            return f"the section of {id} may only be written by its owner"
        if section.owner.id != write.writer:
            return f"the section of {write.writer} names {section.owner.id} as its owner"
    return ""


def _own_leases_in_own_section(write: Write) -> str:
    """A section holds only leases of its owner, and no two leases with the same name."""
    for _, section in write.changed:
        for lease in section.leases:
            if lease.owner != write.writer:
                return f"{lease.id} is in a section that is not its owner's"
        names = {lease.name for lease in section.leases}
        if len(names) < len(section.leases):
            return "two leases have one name: an identity is (owner, name)"
    return ""


def _sizes_are_possible(write: Write) -> str:
    """No claim is negative, which would grant its bytes to others, or so large that a sum cannot be written."""
    ghosts = write.new.ghosts if write.new.ghosts is not write.old.ghosts else ()
    sizes = [ghost.bytes for ghost in ghosts]
    for _, section in write.changed:
        sizes += section.residue.values()
        sizes += [share.bytes for lease in section.leases for share in lease.shares + lease.target]
    if sizes and not 0 <= min(sizes) <= max(sizes) <= MOST_CLAIM:
        return (
            f"it claims {min(sizes)} to {max(sizes)} bytes at once, and {MOST_CLAIM} are the most"
        )
    return ""


def _parts_are_cut(write: Write) -> str:
    """A settled lease in parts is on one card and the host, and claims only the model's own bytes.

    The model must have pieces, because it is cut between two pieces.
    """
    for _, section in write.changed:
        for lease in section.leases:
            if len(lease.shares) < 2 or lease.phase is not Phase.SETTLED or not lease.in_parts:
                continue
            if not lease.piece_bytes or len(lease.shares) > 2 or lease.filled:
                return f"{lease.id} is in parts ({lease.shares}), and cannot be cut like that"
    return ""


def _sections_go_with_proof(write: Write) -> str:
    """Another owner's section is removed only with proof of the owner's death."""
    old, new = write.old, write.new
    if new.sections is old.sections:
        return ""
    removed = old.sections.keys() - new.sections.keys()
    unproven = _not_proven_dead(write, removed - {write.writer})
    if unproven:
        return (
            f"the section of {', '.join(sorted(unproven))} may be removed only with proof of death"
        )
    return ""


def _not_proven_dead(write: Write, owners: Set[str]) -> Set[str]:
    """The `owners` whose death is not proven. If `owners` is empty, `dead` is not called."""
    if not owners:
        return owners
    return owners - write.dead(write.old)


# Tickets


def _only_own_tickets(write: Write) -> str:
    """An owner writes only its own tickets.

    The tickets of a dead owner are removed together with the owner's section.
    """
    if _same_tickets(write):
        return ""
    old, new = write.old, write.new
    before = {ticket.key: ticket for ticket in old.tickets if ticket.owner != write.writer}
    for ticket in new.tickets:
        if ticket.owner == write.writer:
            continue
        known = before.get(ticket.key)
        if ticket is not known and ticket != known:
            return f"the ticket {ticket.key} may only be written by {ticket.owner}"
        if ticket.owner in old.sections and ticket.owner not in new.sections:
            return f"the ticket {ticket.key} outlives {ticket.owner}: a dead owner is removed whole"
    return ""


def _tickets_go_with_proof(write: Write) -> str:
    """Another owner's tickets are removed only with its section and with proof of death."""
    if _same_tickets(write):
        return ""
    old, new = write.old, write.new
    kept = {ticket.key for ticket in new.tickets if ticket.owner != write.writer}
    losers = {
        ticket.owner
        for ticket in old.tickets
        if ticket.owner != write.writer and ticket.key not in kept
    }
    for loser in sorted(losers):
        if loser in new.sections:
            return f"the tickets of {loser} may only be withdrawn by itself"
    unproven = _not_proven_dead(write, losers)
    if unproven:
        return (
            f"the tickets of {', '.join(sorted(unproven))} may be removed only with proof of death"
        )
    return ""


def _same_tickets(write: Write) -> bool:
    """Whether no section and no ticket of another owner was added, changed or removed."""
    old, new, writer = write.old, write.new, write.writer
    if new.sections is not old.sections and new.sections.keys() != old.sections.keys():
        return False
    if new.tickets is old.tickets:
        return True
    before, after = (
        [ticket for ticket in book.tickets if ticket.owner != writer] for book in (old, new)
    )
    return before == after


# What all owners share


def _same_schema(write: Write) -> str:
    """Every new book has the schema of this version of gpu-console."""
    if write.new.schema != SCHEMA:
        return f"schema {write.new.schema} was to be written where {SCHEMA} is in force"
    return ""


def _opening_stays(write: Write) -> str:
    """The time at which grants begin in a new page is not changed.

    Before grants begin, the owners register in the new page.
    """
    if write.new.opens != write.old.opens:
        return "the time at which grants begin may not be changed"
    return ""


def _devices_stay(write: Write) -> str:
    """The first owner describes the devices. Other owners may only add devices.

    An owner that is alone in the book may also change the devices.
    """
    if write.new.devices is write.old.devices or write.is_alone:
        return ""
    after = {device.id: device for device in write.new.devices}
    for device in write.old.devices:
        if after.get(device.id) != device:
            return f"{device.id} was described by the first owner; others may only add devices"
    return ""


def _limits_stay(write: Write) -> str:
    """The first owner sets the limits. An owner that is alone may change them."""
    if write.new.limits is write.old.limits or write.is_alone:
        return ""
    for device, limit in write.old.limits.items():
        after = write.new.limits.get(device)
        if after != limit:
            return (
                f"the limit of {device} is {show_bytes(limit)} since the first owner set it; "
                f"{show_bytes(after or 0)} is possible only once no other owner is left"
            )
    return ""


def _samples_get_newer(write: Write) -> str:
    """A sample (one measurement) of a device is only replaced by a newer sample.

    An owner that is alone in the book may also remove samples.
    """
    if write.new.samples is write.old.samples:
        return ""
    for device, sample in write.old.samples.items():
        after = write.new.samples.get(device)
        if after is None and write.is_alone:
            continue
        if after is sample or after == sample:
            continue
        if after is None or after.taken_at <= sample.taken_at:
            return f"the sample of {device} would be replaced by one that is no newer"
    return ""


def _events_are_appended(write: Write) -> str:
    """Events are added at the end and removed at the beginning, and their numbers rise."""
    old, new = write.old, write.new
    if new.seq - old.seq > MOST_RISE:  # at its end nobody could write an event any more
        return f"seq would rise from {old.seq} to {new.seq}"
    if new.events is old.events:
        if new.seq < old.seq:
            return f"seq would fall from {old.seq} to {new.seq}"
        return ""
    kept = tuple(event for event in new.events if event.seq <= old.seq)
    if kept != old.events[len(old.events) - len(kept) :]:
        return "events are appended and trimmed, never changed"
    added = (event.seq for event in new.events[len(kept) :])
    numbers = (old.seq, *added, new.seq + 1)
    if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
        return f"the numbers of new events must rise from {old.seq} to {new.seq}"
    return ""


def _page_is_small(write: Write) -> str:
    """A page (a stored book) holds a limited number of leases, tickets and events.

    A page above the limit may still shrink.
    """
    after = write.new.entries
    if after > MOST_ENTRIES and after > write.old.entries:
        return f"{after} leases and tickets are more than the {MOST_ENTRIES} that a page holds"
    events = len(write.new.events)
    if events > MOST_EVENTS:
        return f"{events} events are more than the {MOST_EVENTS} that a page holds"
    return ""


def _no_overdraft(write: Write) -> str:
    """A grant does not take a device over its limit (law 1 in docs/architecture.md)."""
    old, new = write.old, write.new
    if new.sections is old.sections and new.limits is old.limits:
        return ""
    reasons = []
    for device, excess in overdrafts(old, new).items():
        limit = show_bytes(new.limits[device])
        reasons.append(
            f"{device} would be claimed {show_bytes(excess)} beyond its limit of {limit} (law 1)"
        )
    return "; ".join(reasons)


LAWS: tuple[Callable[[Write], str], ...] = (
    _only_own_section,
    _own_leases_in_own_section,
    _sizes_are_possible,
    _parts_are_cut,
    _sections_go_with_proof,
    _only_own_tickets,
    _tickets_go_with_proof,
    _same_schema,
    _opening_stays,
    _devices_stay,
    _limits_stay,
    _samples_get_newer,
    _events_are_appended,
    _page_is_small,
    _no_overdraft,
)
# A message to the keeper has the writer's own section and tickets, and no other owner's.
UNSENT = (_only_own_section, _only_own_tickets, _same_schema)
