"""What users may do: send requests to this process, and use cards that several users share."""

from __future__ import annotations

from msgspec.structs import replace

from ..errors import NotAllowed
from ..facts import Asker, Book, Owner, Section
from ..ledgers.access import access_to
from ..ledgers.host_config import groups_of
from ..scheduler import caps
from ..scheduler.recall import foreign
from .session import Session


def asker(session: Session, user: str) -> Asker:
    """What `user` may request of this process.

    The configuration of the moment of the user's first request applies.
    """
    known = session.users.get(user)
    if known is None:
        groups = groups_of(user)
        cap = session.machine.cap(user, groups)
        known = Asker(
            user,
            at_home=user == session.ledger.owner.user,
            operator=session.machine.is_operator(user, groups),
            importance=(cap and cap.importance) or 0,
        )
        session.users[user] = known
    return known


def askers(session: Session, book: Book) -> dict[str, Asker]:
    """The requests to this owner: maps each ticket's key to the rights of the user who wrote it.

    A ticket is left out if the ledger cannot prove which owner wrote the ticket.
    """
    found = {}
    for ticket in book.tickets:
        concerned = (ticket.name, *ticket.recalls, *ticket.shadows)
        owners = [id.partition("/")[0] for id in concerned]
        if ticket.owner == session.me or session.me not in owners:
            continue
        if user := session.ledger.user_of(book, ticket.owner, ticket):
            found[ticket.key] = asker(session, user)
    return found


def proven_sections(session: Session, book: Book) -> dict[str, Section]:
    """The sections of the book by owner id, with a mark on each user name that is not proven."""
    sections = {}
    for id, section in book.sections.items():
        user = section.owner.user
        if id != session.me and session.ledger.user_of(book, id) != user:
            section = replace(section, owner=replace(section.owner, user=f"{user} (unproven)"))
        sections[id] = section
    return sections


def refusal_of_request(session: Session, verb: str, owner: Owner | None, name: str) -> str:
    """The reason why this user may not request `verb` of `owner`; empty if the request is allowed.

    A request that is refused here would be refused by the owner as well.
    """
    mine = session.owner.user
    if verb == "evict" or owner is None:
        return ""
    if owner.user == mine or asker(session, mine).operator:
        return ""
    return foreign(mine, verb, name, owner)


def refusal_of_drain(session: Session, book: Book) -> str:
    """The reason why this user may not drain a card; empty if the user may drain it.

    Operators may drain a card. A user who does not share the cards with other users may do so too.
    """
    mine = session.owner.user
    users = {section.owner.user for section in book.sections.values()}
    others = sorted(users - {mine})
    if asker(session, mine).operator or not (is_shared(session) or others):
        return ""
    reason = f"{', '.join(others)} use it too" if others else "the ledger is shared"
    return f"{mine} may not drain a card: {reason}. Only an operator may ({session.machine.file})"


def is_shared(session: Session) -> bool:
    """Whether an operator has set the ledger up for several users."""
    directory = getattr(session.ledger, "directory", None)
    return directory is not None and access_to(directory).group is not None


def require_within_cap(session: Session, name: str, importance: int, keep: bool) -> None:
    """Raises NotAllowed if the operator's cap forbids a model with this importance and `keep`."""
    if because := caps.forbidden(name, importance, keep, session.rules.cap):
        raise NotAllowed(
            f"{because}.\n  The operator can change it.",
            name=name,
            because=because,
            user=session.owner.user,
        )
