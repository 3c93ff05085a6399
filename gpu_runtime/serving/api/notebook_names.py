"""Finds what a notebook holds, for requests over HTTP that name the notebook."""

from __future__ import annotations

from typing import Any

from ...errors import AmbiguousName


def held_by_notebook(rt: Any, wanted: str) -> list[tuple[int, str]] | None:
    """The pairs (pid, name) of what the notebook with the file name or path `wanted` holds on a card.

    The result is None if no notebook has this name. Raises AmbiguousName if several notebooks have it.
    """
    sections = rt.status().sections.values()
    named = [one for one in sections if wanted in {one.owner.file, one.owner.notebook} - {""}]
    if not named:
        return None
    paths = tuple(sorted({section.owner.notebook for section in named}))
    if len(paths) > 1:
        raise AmbiguousName(wanted, paths)
    return [
        (section.owner.pid, lease.name)
        for section in named
        for lease in section.leases
        if lease.kind in ("model", "kernel") and lease.on_device
    ]
