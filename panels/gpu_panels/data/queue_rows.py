"""The rows of the queue on the tab Now: requests that wait for memory, and requests to other processes."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_runtime.facts import Snapshot, Ticket, Unanswered, lease_title
from gpu_runtime.rendering.views import clean, clock
from gpu_runtime.units import show_bytes

from .cells import Button, Cell, Column, Row
from .confirmations import VERBS, ticket_title
from .row_parts import (
    NO_ANSWER,
    NOTHING,
    UNKNOWN,
    holder_cell,
    importance_cell,
    lasting,
    waited_cell,
)

ASLEEP_SECONDS = 2.0  # a request that was not refreshed for longer is overtaken by others

QUEUE = (
    Column("#", True, "Place in the queue"),
    Column("Request"),
    Column("For"),
    Column("Needs", True),
    Column("Waiting", True),
    Column("Importance"),
    Column("Waits for"),
)


def queue(snapshot: Snapshot) -> tuple[Row, ...]:
    """The requests in `snapshot` that wait for memory, in the order of the queue, each with its reason.

    The last rows are requests to other processes.
    """
    silent: dict[str, list[Unanswered]] = {}
    for one in snapshot.unanswered:
        silent.setdefault(one.ticket.key, []).append(one)
    waiting = [ticket for ticket in snapshot.tickets if ticket.verb == "use"]
    asked = [ticket for ticket in snapshot.tickets if ticket.verb != "use"]
    rows = [
        _waiting_row(ticket, position, snapshot, silent.get(ticket.key, []))
        for position, ticket in enumerate(waiting, 1)
    ]
    rows += [_asked_row(ticket, snapshot, silent.get(ticket.key, [])) for ticket in asked]
    return tuple(rows)


def _no_answer_since(silent: Sequence[Unanswered], snapshot: Snapshot) -> str:
    """A sentence such as `No answer since 12:03:11 from train.ipynb (pid 7).`"""
    names = " and ".join(holder_cell(one.owner.id, snapshot).text for one in silent)
    longest = snapshot.now - min(one.since for one in silent)
    return f"No answer since {clock(snapshot.wall - longest)} from {names}."


def _waiting_row(
    ticket: Ticket, position: int, snapshot: Snapshot, silent: Sequence[Unanswered]
) -> Row:
    need = " + ".join(f"{show_bytes(share.bytes)} on {share.device}" for share in ticket.need)
    need_bytes = sum(share.bytes for share in ticket.need)
    because = clean(ticket.because) or "free memory"
    unrefreshed = snapshot.now - ticket.refreshed
    if unrefreshed > ASLEEP_SECONDS:
        stopped = f"Its process has been stopped for {lasting(unrefreshed)}"
        because = f"{stopped}; other requests overtake it. {because}"
    elif silent:
        because = f"{_no_answer_since(silent, snapshot)} {because}"
    cells = (
        Cell(str(position), position),
        Cell(ticket_title(ticket, snapshot), kind="strong"),
        holder_cell(ticket.owner, snapshot),
        Cell(need, need_bytes) if need else UNKNOWN,
        waited_cell(ticket.arrived, snapshot),
        importance_cell(ticket.importance),
        Cell(because, kind="prose alarm" if silent else "prose"),
    )
    return Row(ticket.key, cells, (end_wait(ticket, snapshot),))


def end_wait(ticket: Ticket, snapshot: Snapshot) -> Button:
    """The button that ends the wait of `ticket`. If the process is stopped, the button is disabled and shows why."""
    is_asleep = snapshot.now - ticket.refreshed > ASLEEP_SECONDS
    why_not = "Its process is stopped, and cannot end its wait" if is_asleep else ""
    return Button("cancel", VERBS["cancel"], why_not)


def _asked_row(ticket: Ticket, snapshot: Snapshot, silent: Sequence[Unanswered]) -> Row:
    """The row of a request that waits for the answer of another process, such as an eviction."""
    owner_id, _, name = ticket.name.partition("/")
    section = snapshot.sections.get(owner_id)
    lease = section.lease(name) if section else None
    title = lease_title(lease, section.owner) if lease and section else name
    cells = (
        NOTHING,
        Cell(f"{ticket.verb} {clean(title)}".rstrip(), kind="strong"),
        holder_cell(ticket.owner, snapshot),
        NOTHING,
        waited_cell(ticket.arrived, snapshot),
        NOTHING,
        _answer_cell(ticket, owner_id, snapshot, silent),
    )
    return Row(ticket.key, cells)


def _answer_cell(
    ticket: Ticket, owner_id: str, snapshot: Snapshot, silent: Sequence[Unanswered]
) -> Cell:
    person = clean(ticket.said_by)
    if silent:
        requested = f" Requested by {person}." if person else ""
        text = f"{_no_answer_since(silent, snapshot)}{requested}"
        return Cell(text, hint=f"{NO_ANSWER}.", kind="prose alarm")
    requested = f", requested by {person}" if person else ""
    return Cell(f"an answer from {holder_cell(owner_id, snapshot).text}{requested}", kind="prose")
