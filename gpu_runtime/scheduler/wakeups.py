"""Finds changes of the book that concern waiting requests, so that their processes are woken.

Pure. The book before a change is compared with the book after it.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..facts import Book, Lease


def affects_waiters(before: Book, after: Book) -> bool:
    """Whether a waiting request might get another verdict from `after` than from `before`.

    A refreshed ticket, a counted use and a new sample do not count as changes. If they did, the
    waiting processes would wake each other forever.
    """
    if before.ghosts != after.ghosts or before.drained != after.drained:
        return True
    if before.limits != after.limits or before.sections.keys() != after.sections.keys():
        return True
    if any(event.answers for event in after.events if event.seq > before.seq):
        return True  # the answer to `defrag`, for example, changes nothing else in the book
    return _tickets_differ(before, after) or _leases_differ(before, after)


def _tickets_differ(before: Book, after: Book) -> bool:
    if len(before.tickets) != len(after.tickets):
        return True
    for old, new in zip(before.tickets, after.tickets, strict=True):
        if old is new:
            continue
        # A ticket's reason may contain a time, such as "was used 774 ms ago", which differs at each
        # comparison.
        if replace(old, refreshed=0.0, because="") != replace(new, refreshed=0.0, because=""):
            return True
    return False


def _leases_differ(before: Book, after: Book) -> bool:
    for id, old in before.sections.items():
        new = after.sections[id]
        if old is new or old.leases == new.leases:
            continue
        relevant_before = [_relevant_part(lease) for lease in old.leases]
        relevant_after = [_relevant_part(lease) for lease in new.leases]
        if relevant_before != relevant_after:
            return True
    return False


def _relevant_part(lease: Lease) -> Lease:
    """The lease without the fields that cannot change another request's verdict."""
    return replace(
        lease,
        pins=min(lease.pins, 1),
        pinned_since=0.0,
        last_used=0.0,
        uses=0,
        measured_bytes=None,
    )
