"""Finds the processes that do not respond to a request, and since when.

Pure: the input is a snapshot. An owner responds within a second from a thread of its own, even
while a cell runs. If an owner does not respond, its process is stopped or swapping, or its
interpreter is blocked.
"""

from __future__ import annotations

from ..facts import Owner, Phase, Rules, Section, Snapshot, Ticket, Unanswered

_USUAL = Rules()


def unanswered(seen: Snapshot, rules: Rules = _USUAL) -> tuple[Unanswered, ...]:
    """Each owner in `seen` with a request that it does not answer. The longest silence is first.

    An owner has responded if it has published that the model is in use, has begun the work, or
    waits for room to restore the model. `rules.answer_seconds` is the time that an owner has to
    respond. A waiting request (`use`) is skipped if its requester has not refreshed it for
    `rules.refresh_seconds`.
    """
    found = []
    for ticket in seen.tickets:
        since = _since(ticket)
        if seen.now - since <= rules.answer_seconds:
            continue  # too early to judge
        if ticket.verb == "use" and seen.now - ticket.refreshed > rules.refresh_seconds:
            continue  # the requester itself is stopped, so no owner makes room for it
        owners = _unresponsive_owners(seen, ticket)
        found += [Unanswered(owner, ticket, since) for owner in owners]
    return tuple(sorted(found, key=lambda one: one.since))


def _since(ticket: Ticket) -> float:
    """The time of the request; for a waiting request (`use`), the time of its present recalls."""
    if ticket.verb == "use":
        return ticket.recalled_since or ticket.arrived
    return ticket.arrived


def _unresponsive_owners(seen: Snapshot, ticket: Ticket) -> list[Owner]:
    """The owners that should answer the ticket and have not responded, without repetitions."""
    owners: dict[Owner, None] = {}
    for lease_id in _addressed(ticket):
        owner_id, _, name = lease_id.partition("/")
        section = seen.sections.get(owner_id)
        if section is None or owner_id == ticket.owner:
            continue
        if not _responds(seen, section, name, ticket):
            owners[section.owner] = None
    return list(owners)


def _addressed(ticket: Ticket) -> tuple[str, ...]:
    """The ids (`owner/name`) of the leases that the ticket is about."""
    return ticket.recalls if ticket.verb == "use" else (ticket.name,)


def _responds(seen: Snapshot, section: Section, name: str, ticket: Ticket) -> bool:
    lease = section.lease(name)
    if lease is not None and lease.phase is not Phase.SETTLED:
        return True
    if ticket.verb in ("preload", "restore"):
        waits_for_room = any(
            other.owner == section.owner.id and other.name == name for other in seen.tickets
        )
        return waits_for_room or (lease is not None and lease.all_on_device)
    if ticket.verb in ("pin", "unpin"):
        return lease is None or lease.keep == (ticket.verb == "pin")
    if ticket.verb in ("defrag", "who", "cancel"):
        return False
    if lease is None or lease.pins or not lease.on_device:
        return True
    return ticket.verb == "use" and lease.away_since > _since(
        ticket
    )  # a part of the lease has left
