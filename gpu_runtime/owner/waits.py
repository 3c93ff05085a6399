"""Ends a wait for memory. To end a wait of another process, sends a request to that process.

A thread whose wait was ended raises WaitEnded when it decides next, and withdraws its own ticket.
"""

from __future__ import annotations

from ..errors import AmbiguousName, GpuError
from ..facts import THIS_PROCESS, LeaseId, Outcome, Ticket, notebook_has_name
from ..safe_text import quoted
from ..scheduler.recall import Order
from . import operations, registry, requests
from .session import Session


def cancel(session: Session, name: str | LeaseId, timeout: str | float | None) -> Outcome:
    """Ends the waits for `name`; see Runtime.cancel."""
    target = _waiting(session, name)
    if target.owner != session.me:
        return operations.ask_owner(session, "cancel", target, timeout)
    outcome = end(session, target.name, requests.person(session) or THIS_PROCESS)
    requests.note_action(session, "cancel", target.name, outcome.because)
    return outcome


def obey(session: Session, order: Order) -> Outcome:
    """Ends the waits that another owner's `order` names, if the waits began before the order."""
    ticket = session.ledger.read().ticket(order.key)
    if ticket is None:
        raise GpuError("the request was withdrawn", name=order.name)
    return end(session, order.name, order.who, ticket.arrived)


def end(session: Session, name: str, by: str, before: float | None = None) -> Outcome:
    """Ends this process's waits for `name`; if `before` is given, only those begun by that time.

    `by` is the person or the process that ends the waits. The waiting threads raise WaitEnded. This
    function raises GpuError if there is no such wait.
    """
    ended = 0
    for ticket in _uses(session, session.me):
        if ticket.name == name and (before is None or ticket.arrived <= before):
            ended += session.keys.end(ticket.key, by)
    if not ended:
        raise GpuError(f"nothing waits for {name} any more", name=name)
    session.ledger.ring([session.me])
    return Outcome("cancel", name, True, f"the wait for {name} was ended")


def _uses(session: Session, owner: str = "") -> list[Ticket]:
    """The requests that wait for memory, of the owner with the id `owner` or of all owners."""
    tickets = session.ledger.read().tickets
    found = [one for one in tickets if one.verb == "use"]
    return [one for one in found if not owner or one.owner == owner]


def _waiting(session: Session, name: str | LeaseId) -> LeaseId:
    """Finds the wait for `name`. Returns the waiting owner's id and the name of the wanted model.

    Raises GpuError, AmbiguousName.
    """
    if isinstance(name, LeaseId):
        return name
    bare, process = registry.split_address(name)
    book = session.ledger.read()
    waiting: dict[str, LeaseId] = {}  # by the address, such as qwen@4121
    found: dict[str, LeaseId] = {}
    for ticket in _uses(session):
        owner = book.owner(ticket.owner)
        if owner is None:
            continue
        address = f"{ticket.name}@{owner.pid}"
        id = LeaseId(owner.id, ticket.name)
        waiting[address] = id
        names = (ticket.name, ticket.name.partition("#")[0])  # a block's name ends with a number
        is_named = bare in names and (not process or process in owner.names)
        if is_named or notebook_has_name(owner.notebook, name):
            found[address] = id
    if len(found) > 1:
        raise AmbiguousName(name, tuple(sorted(found)))
    for id in found.values():
        return id
    these = f"These wait: {', '.join(sorted(waiting))}." if waiting else "No request waits."
    raise GpuError(f"nothing waits for {quoted(name)}. {these}", name=name)
