"""Finds the memory of a notebook's own code, which a person names by the notebook or its process.

Verbs on models take such a name too. A verb that only a model can take says what can be typed.
"""

from __future__ import annotations

import shlex

from ..errors import AmbiguousName, GpuError
from ..facts import Book, Lease, LeaseId, Outcome, Owner, Phase, notebook_has_name, of_notebook
from ..units import show_bytes, show_seconds
from . import registry
from .kernel_resident import NAME
from .session import Session


def find(session: Session, who: str, leased: bool = True) -> LeaseId:
    """The lease of the kernel `who`: a notebook's file name, a process id or an owner's id.

    Unless it must be `leased`, the kernel may have no lease, but only memory that cannot leave.
    Raises GpuError if no kernel has the name; the error lists the kernels that hold memory. Raises
    AmbiguousName if several kernels have the name.
    """
    book = session.ledger.read()
    kernels = [
        section.owner
        for section in book.sections.values()
        if section.lease(NAME) or (section.staying and not leased)
    ]
    found = [owner for owner in kernels if who in owner.names]
    if len(found) == 1:
        return LeaseId(found[0].id, NAME)
    known = ", ".join(sorted(owner.label for owner in kernels))
    those = f"Kernels with memory of their own: {known or 'none'}."
    if found:
        raise ambiguous(who, found)
    models = _models_of(book, who)
    if models:
        address = shlex.quote(f"{models[0]}@{who}")
        those = f"It holds models: {', '.join(models)}. Name one, as in {address}"
        raise GpuError(
            f"{who} has no memory of its own. {those}\n  All of them:  %gpu evict {shlex.quote(who)}",
            process=who,
        )
    if any(lease.kind == "model" and lease.name == who for lease in book.leases()):
        those = f"To move it to RAM:  %gpu evict {who}      and back:  %gpu restore {who}"
        raise GpuError(f"{who} is a model, and not a notebook.\n  {those}", process=who)
    raise GpuError(f"no kernel {who!r} holds memory. {those}", process=who)


def ambiguous(name: str, owners: list[Owner]) -> AmbiguousName:
    """The error that several `owners` have the `name`. It lists their paths, or pids if those are equal."""
    paths = {owner.notebook for owner in owners}
    pids = {str(owner.pid) for owner in owners}
    return AmbiguousName(name, tuple(sorted(paths if len(paths) == len(owners) else pids)))


def is_own(session: Session, who: str) -> bool:
    """Whether `who` is the notebook of this process, whose memory a cell parks when it has ended."""
    return session.kernel is not None and notebook_has_name(session.owner.notebook, who)


def is_notebook(session: Session, name: str | LeaseId) -> bool:
    """Whether `name` is the file name or path of a notebook, and not the name of a model."""
    if not isinstance(name, str) or "@" in name or not name.endswith(".ipynb"):
        return False
    return registry.by_key(session, name) is None


def resolve(session: Session, name: str | LeaseId, loadable: bool = False) -> LeaseId:
    """The lease that `name` refers to, also if it is a notebook; see `find`, `registry.resolve`."""
    if is_notebook(session, name):
        return find(session, str(name))
    return registry.resolve(session, name, loadable)


_MODELS_ONLY = {
    "pin": "To keep it on its card, type in that notebook:  %gpu park never",
    "unpin": "To let it be parked again, type in that notebook:  %gpu park asked",
    "move": "It returns only to the card that its tensors name. To free that card:  %gpu park {address}",
}


def require_model(session: Session, verb: str, typed: str | LeaseId, target: LeaseId) -> None:
    """Raises GpuError if `target` is not a model, but the memory of a notebook's own code.

    `verb` is pin, unpin or move, and `typed` is what the caller named. The error says what to type instead.
    """
    section = session.ledger.read().sections.get(target.owner)
    lease = section.lease(target.name) if section else None
    if section is None or lease is None or lease.kind != "kernel":
        return
    owner = section.owner
    name, kind = (owner.file, "notebook") if owner.file else (str(owner.pid), "process")
    # Another notebook may have the same file name. The path that was typed has one meaning.
    address = str(typed) if notebook_has_name(owner.notebook, str(typed)) else str(owner.pid)
    advice = _MODELS_ONLY[verb].format(address=shlex.quote(address))
    raise GpuError(
        f"{name} is a {kind}: {verb} is for models, and it holds {show_bytes(lease.bytes)} of its "
        f"own.\n  {advice}",
        name=name,
    )


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
    leases = [lease for one in of_notebook(book.sections.values(), who) for lease in one.leases]
    return [lease.name for lease in leases if lease.kind == "model"]
