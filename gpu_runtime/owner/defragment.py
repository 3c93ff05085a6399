"""`defrag`: frees the allocator's cache in this process, and requests this of other processes."""

from __future__ import annotations

import os

from ..errors import GpuError
from ..facts import Book, LeaseId, Outcome, Owner, of_notebook
from ..units import parse_seconds, show_bytes
from . import kernel_names, operations, permissions, registry, requests
from .session import Session


def defrag(session: Session, process: str, timeout: str | float | None) -> Outcome:
    """Frees cached memory in `process`, or in all processes to which this user may send requests.

    `timeout` is the limit in seconds for all processes together; None means no limit. A process
    that has not answered within `timeout` frees its cache once its kernel runs again. Raises the
    errors of Runtime.defrag.
    """
    book = session.ledger.read()
    me = session.me
    seconds = None if timeout is None else parse_seconds(timeout)
    owners = _named(session, process, book) if process else _all_owners(session, book)
    sentences = []
    freed = 0
    done = True
    if me in owners:
        freed = empty_cache(session)
        sentences.append(f"{show_bytes(freed)} came free here")
        requests.note_action(session, "defrag", "", sentences[0], freed)
    deadline = session.clock() + (seconds or 0.0)
    for id in dict.fromkeys(owners):
        owner = book.sections[id].owner if id != me else None
        if owner is None:
            continue
        if not process and permissions.refusal_of_request(session, "defrag", owner, ""):
            continue
        left = None if seconds is None else max(0.0, deadline - session.clock())
        answer = operations.ask_owner(
            session, "defrag", LeaseId(id, ""), left, wait=left != 0.0, must=bool(process)
        )
        freed += answer.bytes
        done = done and (answer.done or not process)
        sentences.append(_sentence(owner, answer))
    return Outcome(
        verb="defrag",
        name=process,
        done=done,
        because="; ".join(sentences),
        bytes=freed,
    )


def _sentence(owner: Owner, answer: Outcome) -> str:
    """What `owner` freed, or why its process has not answered."""
    if answer.done:
        return f"{show_bytes(answer.bytes)} came free in {owner.label}"
    # The first sentence of `because` says that the process has not answered. The next sentences
    # describe the process, for example that it is stopped.
    _, _, about = answer.because.partition(". ")
    return about.rstrip(".") or f"{owner.label} has not answered yet"


def empty_cache(session: Session) -> int:
    """Frees the allocator cache of this process and publishes its maps. Returns the freed bytes."""
    freed = session.probe.empty_cache()
    session.maps.publish(at_once=True)
    return freed


def _all_owners(session: Session, book: Book) -> list[str]:
    names = session.ledger.names()
    owners = []
    for id, section in book.sections.items():
        if section.leases or id in names:
            owners.append(id)
    return [*owners, session.me]


def _named(session: Session, process: str, book: Book) -> list[str]:
    """The ids of the owners that `process` names.

    `process` is an owner's id, a pid (also as `@4121`), a notebook, or the name of a model, which
    stands for the model's owner. Raises GpuError, and the errors of `registry.resolve`.
    """
    if process in book.sections:
        return [process]
    if notebook := of_notebook(book.sections.values(), process):
        return [section.owner.id for section in notebook]
    number = process.removeprefix("@")
    if not (number.isdigit() or kernel_names.is_notebook(session, process)):
        return [registry.resolve(session, process, loadable=True).owner]
    known = [section.owner for section in book.sections.values()]
    owners = [owner.id for owner in known if str(owner.pid) == number]
    if not owners and number != str(os.getpid()):
        labels = sorted(owner.label for owner in known)
        raise GpuError(
            f"no process {number} shares this ledger's memory. Those that do: "
            f"{', '.join(labels) or 'none'}.\n"
            f"  Ask all of them:  %gpu defrag",
            process=number,
        )
    return owners or [session.me]
