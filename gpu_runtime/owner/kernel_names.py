"""Finds the kernel that a person names by its notebook, its process id, or its owner's id."""

from __future__ import annotations

from ..errors import GpuError
from ..facts import Book, LeaseId
from .kernel_resident import NAME
from .session import Session


def find(session: Session, who: str) -> LeaseId:
    """The lease of the kernel `who`: a notebook's file name, a process id or an owner's id.

    Raises GpuError with the names of the kernels that hold memory.
    """
    book = session.ledger.read()
    found = [id for id in book.sections if who in _names_of(book, id)]
    if len(found) == 1:
        return LeaseId(found[0], NAME)
    known = [section.owner.label for id, section in book.sections.items() if section.lease(NAME)]
    those = f"Kernels with memory of their own: {', '.join(sorted(known)) or 'none'}."
    if found:
        raise GpuError(f"{who} is the name of {len(found)} kernels. {those}\n  Use a process id.")
    models = _models_of(book, who)
    if models:
        those = f"It holds models: {', '.join(models)}. Evict them:  %gpu evict {who}"
        raise GpuError(f"{who} has no memory of its own to park. {those}", process=who)
    raise GpuError(f"no kernel {who!r} holds memory. {those}", process=who)


def _models_of(book: Book, who: str) -> list[str]:
    """The names of the models that the notebook `who` holds."""
    sections = [one for one in book.sections.values() if one.owner.notebook.endswith(who)]
    return [lease.name for one in sections for lease in one.leases if lease.kind == "model"]


def _names_of(book: Book, id: str) -> tuple[str, ...]:
    section = book.sections[id]
    if section.lease(NAME) is None:
        return ()
    owner = section.owner
    file = owner.notebook.rsplit("/", 1)[-1]
    return tuple(name for name in (id, str(owner.pid), file, owner.notebook) if name)
