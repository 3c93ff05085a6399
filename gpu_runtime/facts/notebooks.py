"""Finds the kernels of a notebook, and what they hold, by the notebook's file name or path."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import AmbiguousName
from .leases import LeaseId, Section

# The kinds of leases that are evicted. A block of code keeps its bytes until it ends.
EVICTED = ("model", "kernel")
# How a reason begins that keeps a notebook's memory for a moment only. Any other reason ends by an act of its user.
PASSING = ("a cell runs", "a thread runs", "the kernel was used meanwhile")


def notebook_has_name(path: str, name: str) -> bool:
    """Whether `name` is the file name or the path of the notebook at `path`. An empty path is no notebook.

    >>> names = ("train.ipynb", "/ann/train.ipynb", "rain.ipynb", "")
    >>> [notebook_has_name("/ann/train.ipynb", name) for name in names], notebook_has_name("", "")
    ([True, True, False, False], False)
    """
    return path != "" and name in (path, path.rpartition("/")[2])


def of_notebook(sections: Iterable[Section], name: str) -> list[Section]:
    """The `sections` of the notebook with the file name or path `name`, one for each of its kernels.

    Raises AmbiguousName if notebooks in several folders have the `name`.
    """
    found = [section for section in sections if notebook_has_name(section.owner.notebook, name)]
    paths = tuple(sorted({section.owner.notebook for section in found}))
    if len(paths) > 1:
        raise AmbiguousName(name, paths)
    return found


def held_on_cards(sections: Iterable[Section]) -> list[LeaseId]:
    """The leases in `sections` that an eviction of the whole notebook moves off a card."""
    leases = [lease for section in sections for lease in section.leases]
    held = [lease for lease in leases if lease.kind in EVICTED and lease.on_device]
    return [LeaseId(lease.owner, lease.name) for lease in held]
