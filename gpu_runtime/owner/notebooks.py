"""A notebook's file name is an address: `rt.evict("train.ipynb")` evicts everything that it holds."""

from __future__ import annotations

from ..errors import AmbiguousName, GpuError
from ..facts import LeaseId, Outcome, Section
from ..safe_text import quoted
from ..scheduler.explain import first_line
from ..units import show_bytes
from . import kernel_resident, operations, registry
from .session import Session

EVICTED = ("model", "kernel")  # kinds of leases; a block of code keeps its bytes until it ends


def evict(
    session: Session, name: str | LeaseId, *, timeout: str | float | None, wait: bool = True
) -> Outcome:
    """Evicts a model, or all models and the own memory of a notebook; see Runtime.evict."""
    is_notebook = isinstance(name, str) and name.endswith(".ipynb") and "@" not in name
    if not is_notebook or registry.by_key(session, str(name)):
        return operations.evict(session, name, timeout=timeout, wait=wait)
    freed, left, stays = 0, [], []
    for id in held_by(session, str(name)):
        try:
            done = operations.evict(session, id, timeout=timeout, wait=wait)
        except GpuError as error:
            stays.append(error)
            continue
        freed += done.bytes
        left.append("its own memory" if id.name == kernel_resident.NAME else id.name)
    if stays and not left:
        raise stays[0]
    because = f"{', '.join(left) or 'nothing'} left; {show_bytes(freed)} came free"
    because += "".join(f". {first_line(error).rstrip('.')}" for error in stays)
    return Outcome("evict", str(name), not stays, because, freed)


def held_by(session: Session, notebook: str) -> list[LeaseId]:
    """The leases on a device of the notebook with this file name or path.

    Raises GpuError with the notebooks that hold memory, AmbiguousName for several notebooks.
    """
    book = session.ledger.read()
    found = {
        id: section
        for id, section in book.sections.items()
        if notebook in (section.owner.notebook, _file(section))
    }
    if not found:
        names = sorted({_file(section) for section in book.sections.values()} - {""})
        those = f"Notebooks that hold memory: {', '.join(names) or 'none'}."
        raise GpuError(f"no notebook {quoted(notebook)} holds memory. {those}", name=notebook)
    paths = tuple(sorted({section.owner.notebook for section in found.values()}))
    if len(paths) > 1:
        raise AmbiguousName(notebook, paths)
    return [
        LeaseId(id, lease.name)
        for id, section in found.items()
        for lease in section.leases
        if lease.kind in EVICTED and lease.on_device
    ]


def _file(section: Section) -> str:
    """The file name of the owner's notebook; empty for another program."""
    return section.owner.notebook.rsplit("/", 1)[-1]
