"""Finds the kernel that a person names by its notebook, its process id, or its owner's id."""

from __future__ import annotations

import shlex

from ..errors import GpuError
from ..facts import Book, Lease, LeaseId, Outcome, Phase
from ..units import show_bytes, show_seconds
from .kernel_resident import NAME
from .session import Session


def find(session: Session, who: str) -> LeaseId:
    """The lease of the kernel `who`: a notebook's file name, a process id or an owner's id.

    Raises GpuError if no kernel or several kernels have the name. The error lists the kernels that
    hold memory.
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


def in_ram_already(session: Session, verb: str, name: str, leases: list[Lease]) -> Outcome:
    """The outcome of `verb` for the process `name`, all of whose `leases` are in host memory.

    The outcome says since when the leases are in RAM, and how they come back.
    """
    parts, back = [], ""
    for lease in leases:
        size, away = show_bytes(lease.bytes), show_seconds(session.clock() - lease.away_since)
        if lease.name == NAME:
            parts.append(f"its own memory ({size}) for {away}, until a cell needs it")
            back = f". Bring it back now:  %gpu unpark {shlex.quote(name) if name else ''}".rstrip()
        else:
            parts.append(f"{lease.name} ({size}) for {away}, until its next use")
    because = f"all of it is in RAM already: {'; '.join(parts)}{back}"
    if not leases:
        because = "it holds nothing on a card, and nothing in RAM"
    return Outcome(
        verb=verb,
        name=name,
        done=True,
        because=because,
        bytes=0,
    )


def in_ram(session: Session, id: LeaseId) -> Lease | None:
    """The lease `id` if all of its bytes are in host memory and are not being moved; else None."""
    lease = session.ledger.read().lease(*id)
    is_there = lease is not None and lease.on_host and lease.phase is Phase.SETTLED
    return lease if is_there else None


def _models_of(book: Book, who: str) -> list[str]:
    """The names of the models that the notebook `who` holds."""
    found: list[str] = []
    for section in book.sections.values():
        if section.owner.notebook.endswith(who):
            found += [lease.name for lease in section.leases if lease.kind == "model"]
    return found
