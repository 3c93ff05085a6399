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
    kernels = [section.owner for section in book.sections.values() if section.lease(NAME)]
    found = [owner.id for owner in kernels if who in owner.names]
    if len(found) == 1:
        return LeaseId(found[0], NAME)
    known = ", ".join(sorted(owner.label for owner in kernels))
    those = f"Kernels with memory of their own: {known or 'none'}."
    if found:
        raise GpuError(f"{who} is the name of {len(found)} kernels. {those}\n  Use a process id.")
    models = _models_of(book, who)
    if models:
        those = f"It holds models: {', '.join(models)}. Evict them:  %gpu evict {who}"
        raise GpuError(f"{who} has no memory of its own to park. {those}", process=who)
    raise GpuError(f"no kernel {who!r} holds memory. {those}", process=who)


def _models_of(book: Book, who: str) -> list[str]:
    """The names of the models that the notebook `who` holds."""
    found: list[str] = []
    for section in book.sections.values():
        if section.owner.notebook.endswith(who):
            found += [lease.name for lease in section.leases if lease.kind == "model"]
    return found
