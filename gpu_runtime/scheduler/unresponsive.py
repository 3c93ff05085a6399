"""Which processes do not answer what is asked of them, and since when.

Pure: a snapshot in. An owner answers from a thread of its own within a second, also while its cell runs; who does not
is stopped, swaps, or keeps the interpreter to itself.
"""

from __future__ import annotations

from ..facts import Phase, Rules, Section, Snapshot, Ticket, Unanswered

_USUAL = Rules()


def unanswered(seen: Snapshot, rules: Rules = _USUAL) -> tuple[Unanswered, ...]:
    """Each owner that does not answer, with the ticket that it leaves unanswered; the longest silent first.

    Who says that the model is in use, or has begun to do what was asked, has answered. Who waits for room to bring a
    model back has, too.
    """
    found = []
    for ticket in seen.tickets:
        since = (
            (ticket.recalled_since or ticket.arrived) if ticket.verb == "use" else ticket.arrived
        )
        if seen.now - since <= rules.answer_seconds or (
            ticket.verb == "use" and seen.now - ticket.refreshed > rules.refresh_seconds
        ):
            continue  # too soon to say; or it is the asker who is stopped, and nobody gives up room for that one
        silent = [
            section.owner
            for id in _asked(ticket)
            if (section := seen.sections.get(id.partition("/")[0]))
            and section.owner.id != ticket.owner
            and not _answers(seen, section, id.partition("/")[2], ticket)
        ]
        found += [Unanswered(owner, ticket, since) for owner in dict.fromkeys(silent)]
    return tuple(sorted(found, key=lambda one: one.since))


def _asked(ticket: Ticket) -> tuple[str, ...]:
    """The leases (`owner/name`) about which somebody is asked."""
    return ticket.recalls if ticket.verb == "use" else (ticket.name,)


def _answers(seen: Snapshot, section: Section, name: str, ticket: Ticket) -> bool:
    lease = section.lease(name)
    if lease is not None and lease.phase is not Phase.SETTLED:
        return True
    if ticket.verb in ("preload", "restore"):
        waits = any(
            other.owner == section.owner.id and other.name == name for other in seen.tickets
        )
        return waits or (lease is not None and lease.on_device)
    if ticket.verb in ("pin", "unpin"):
        return lease is None or lease.keep == (ticket.verb == "pin")
    if ticket.verb == "defrag":
        return False
    return lease is None or bool(lease.pins) or not lease.on_device
