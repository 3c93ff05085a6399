"""Names that stand for several models: a notebook's file name, and `*` for all idle models."""

from __future__ import annotations

from functools import partial

from ..errors import GpuError
from ..facts import EVICTED, Lease, LeaseId, Outcome, Section, held_on_cards, of_notebook
from ..safe_text import quoted
from ..scheduler.explain import first_line
from ..scheduler.victims import PERSON, reason_to_stay
from ..units import show_bytes
from . import kernel_names, kernel_resident, operations
from .session import Session

ALL_IDLE = "*"  # in place of a name: every idle model


def evict(
    session: Session,
    name: str | LeaseId,
    *,
    timeout: str | float | None,
    wait: bool = True,
    drop: bool = False,
) -> Outcome:
    """Evicts a model, all leases of a notebook, or all idle models; see Runtime.evict."""
    evict_one = partial(operations.evict, session, timeout=timeout, wait=wait, drop=drop)
    if name == ALL_IDLE:
        targets = _idle(session, drop)
    elif kernel_names.is_notebook(session, name):
        targets = held_on_cards(kernels(session, str(name)))
    else:
        return evict_one(name)
    if not targets and name != ALL_IDLE:
        return kernel_names.in_ram_already(session, "evict", str(name), _in_ram(session, str(name)))
    freed, left, later, stays = 0, [], "", []
    for id in targets:
        is_own_code = id.name == kernel_resident.NAME
        try:
            if is_own_code and id.owner == session.me and session.kernel is not None:
                done = session.kernel.park()  # at the end of the running cell, if there is one
            else:
                done = evict_one(id)
        except GpuError as error:
            stays.append(error)
            continue
        freed += done.bytes
        if is_own_code and not done.bytes:
            later = f". {done.because}"
        else:
            left.append("its own memory" if is_own_code else id.name)
    if stays and not (left or later):
        raise stays.pop(0)
    because = f"{', '.join(left) or 'nothing'} left; {show_bytes(freed)} came free{later}"
    for reason in stays:
        because += f". {first_line(reason).rstrip('.')}"
    return Outcome("evict", str(name), not stays, because, freed)


def _idle(session: Session, drop: bool) -> list[LeaseId]:
    """The idle models on cards, if they may be evicted. `drop` adds the models in host memory."""
    book, world = session.look()
    found = []
    for lease in book.leases():
        stays = reason_to_stay(lease, world, asker=lease.owner, importance=PERSON)
        if lease.kind == "model" and not stays and (lease.on_device or drop):
            found.append(LeaseId(lease.owner, lease.name))
    return found


def _in_ram(session: Session, notebook: str) -> list[Lease]:
    """The leases of the `notebook` in host memory."""
    sections = of_notebook(session.ledger.read().sections.values(), notebook)
    leases = [lease for section in sections for lease in section.leases]
    return [lease for lease in leases if lease.kind in EVICTED and lease.on_host]


def kernels(session: Session, notebook: str) -> list[Section]:
    """The sections of the notebook with the file name or path `notebook`: one for each of its kernels.

    Raises GpuError if no notebook of this name holds memory; the message lists the notebooks that
    do. Raises AmbiguousName if several notebooks have the name.
    """
    sections = session.ledger.read().sections.values()
    found = of_notebook(sections, notebook)
    if not found:
        names = sorted({section.owner.file for section in sections} - {""})
        those = f"Notebooks that hold memory: {', '.join(names) or 'none'}."
        raise GpuError(
            f"no notebook {quoted(notebook)} holds memory. {those}\n  All holders:  %gpu leases",
            name=notebook,
        )
    return found
