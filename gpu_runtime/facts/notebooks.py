"""Finds the kernels of a notebook, and what they hold, by the notebook's file name or path."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import AmbiguousName
from .leases import LeaseId, Owner, Section

# The kinds of leases that are evicted. A block of code keeps its bytes until it ends.
EVICTED = ("model", "kernel")


def has_notebook(owner: Owner, name: str) -> bool:
    """Whether `name` is the file name or the path of the notebook of `owner`.

    >>> ann = Owner("h", "b", 41, 0, notebook="/ann/train.ipynb")
    >>> [has_notebook(ann, name) for name in ("train.ipynb", "/ann/train.ipynb", "rain.ipynb", "")]
    [True, True, False, False]
    """
    return name != "" and name in (owner.file, owner.notebook)


def of_notebook(sections: Iterable[Section], name: str) -> list[Section]:
    """The `sections` of the notebook with the file name or path `name`, one for each of its kernels.

    Raises AmbiguousName if notebooks in several folders have the `name`.
    """
    found = [section for section in sections if has_notebook(section.owner, name)]
    paths = tuple(sorted({section.owner.notebook for section in found}))
    if len(paths) > 1:
        raise AmbiguousName(name, paths)
    return found


def held_on_cards(sections: Iterable[Section]) -> list[LeaseId]:
    """The leases in `sections` that an eviction of the whole notebook moves off a card."""
    leases = [lease for section in sections for lease in section.leases]
    held = [lease for lease in leases if lease.kind in EVICTED and lease.on_device]
    return [LeaseId(lease.owner, lease.name) for lease in held]
