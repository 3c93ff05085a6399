"""What a member of a shared machine sees and may do: the own processes, and one sum for every other user.

This module is pure. The console of a JupyterHub uses it for every visitor who is no operator.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from gpu_runtime.facts import USER, Lease, Owner, Section, Share, Snapshot, Ticket

from .confirmations import NOTHING_DONE, ON_CARDS, Proposal

ALL_NOTEBOOKS, EVERYTHING = "all notebooks", "everything"
A_REQUEST = "a request"


def seen_by(snapshot: Snapshot, user: str) -> Snapshot:
    """The part of `snapshot` that the member `user` sees.

    Each other user has one section without a pid. It has the bytes of all processes of this user, and no name of a
    notebook, a model or a process. The sums of the devices stay as they are.
    """
    own = {id: section for id, section in snapshot.sections.items() if section.owner.user == user}
    theirs: dict[str, list[Section]] = {}
    for id, section in snapshot.sections.items():
        if id not in own:
            theirs.setdefault(section.owner.user, []).append(section)
    waiting = {ticket.owner for ticket in snapshot.waiting}
    sums = [_sum(name, sections, snapshot) for name, sections in theirs.items()]
    sum_of = {
        section.owner.id: total.owner.id
        for total, sections in zip(sums, theirs.values(), strict=True)
        for section in sections
    }
    return replace(
        snapshot,
        owner=replace(snapshot.owner, user=user),
        sections=own
        | {
            total.owner.id: total
            for total, sections in zip(sums, theirs.values(), strict=True)
            if total.leases or not waiting.isdisjoint(section.owner.id for section in sections)
        },
        tickets=tuple(
            ticket if ticket.owner in own else _anonymous(ticket, number, sum_of)
            for number, ticket in enumerate(snapshot.tickets)
            if ticket.owner in own or ticket.verb == "use"
        ),
        events=tuple(event for event in snapshot.events if event.owner in own),
        specs=(),
        strangers=(),
        unanswered=tuple(wait for wait in snapshot.unanswered if wait.ticket.owner in own),
        presences={id: presence for id, presence in snapshot.presences.items() if id in own},
        names={id: names for id, names in snapshot.names.items() if id in own},
        declared={id: models for id, models in snapshot.declared.items() if id in own},
        member=user,
    )


def _sum(user: str, sections: Iterable[Section], snapshot: Snapshot) -> Section:
    """One section with one lease, which has the bytes of all `sections` of the `user`."""
    claims: dict[str, int] = {}
    for section in sections:
        for device, size in section.claims().items():
            claims[device] = claims.get(device, 0) + size
    leases = [lease for section in sections for lease in section.leases]
    number = zlib.crc32(user.encode())  # the same colour whoever else comes and goes
    me = snapshot.owner
    owner = Owner(me.host, me.boot, 0, number, user=user, notebook=ALL_NOTEBOOKS)
    lease = Lease(
        owner.id,
        EVERYTHING,
        shares=tuple(Share(device, size) for device, size in claims.items() if size),
        kind=USER,
        movable=False,
        pins=any(lease.pins for lease in leases),
        last_used=max((lease.last_used for lease in leases), default=0.0),
    )
    return Section(owner, (lease,) if lease.shares else ())


def _anonymous(ticket: Ticket, number: int, sum_of: dict[str, str]) -> Ticket:
    """Another user's waiting request: how much, how long and how important, and not what for."""
    return Ticket(
        f"request {number}",
        sum_of.get(ticket.owner, ""),
        "use",
        A_REQUEST,
        ticket.arrived,
        ticket.refreshed,
        ticket.importance,
        need=ticket.need,
        because="memory",
    )


def hours_of(
    records: Sequence[Mapping[str, Any]], by: str, user: str, others: bool
) -> Sequence[Mapping[str, Any]]:
    """The rows of the report by `by` that the member `user` sees: the own ones, and the sums of cards and times.

    With `others` also one sum for each other user, and who waited for whom, but no name of their notebooks and models.
    """
    if by in ("card", "time") or (others and by in ("user", "waits")):
        return records
    return [record for record in records if record["user"] == user and by != "waits"]


def refusal(proposal: Proposal, snapshot: Snapshot, member: str) -> str:
    """Why the `member` may not carry out `proposal`; empty if the process concerned is a process of this member."""
    if proposal.verb not in ON_CARDS and may_act_on(proposal.owner, snapshot, member):
        return ""
    return f"{member} may act on processes of {member} only. {NOTHING_DONE}"


def may_act_on(owner_id: str, snapshot: Snapshot, member: str) -> bool:
    """Whether the process with the id `owner_id` is a process of the `member`. An empty `member` means any process."""
    section = snapshot.sections.get(owner_id)
    return not member or (section is not None and section.owner.user == member)
