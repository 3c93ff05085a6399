"""Stands in for a backend that this version does not have, or that a plan need not open: its models can be planned, not
loaded. No torch here."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from ..errors import LoadFailed
from ..facts import Evidence, ModelSpec
from .base import looks_like_hub_id
from .formats import sources


class AbsentBackend:
    """Knows what a model's source tells of its size. Nothing of it is ever loaded."""

    can_move = False
    can_split = True

    def __init__(self, name: str) -> None:
        self.name = name

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """What its files tell, where they lie here; else its name may."""
        here = os.path.exists(os.path.expanduser(spec.source))
        if not here and not looks_like_hub_id(spec.source):
            lies = (
                f"there is no {os.path.abspath(spec.source)}"
                if spec.source
                else "no source is named"
            )
            return Evidence(name=spec.source, why_unknown=lies)
        try:
            return sources.evidence(spec.source, spec.name, spec.options)
        except LoadFailed as error:
            if here:
                raise
            return Evidence(
                name=spec.source, why_unknown=str(error).removeprefix(f"{spec.name}: ").rstrip(".")
            )

    def pieces(self, spec: ModelSpec, origin: Any = None, model: Any = None) -> tuple[int, ...]:
        return ()

    def load(self, spec: ModelSpec, *_: Any, **__: Any) -> NoReturn:
        raise LoadFailed(
            f"{spec.name} cannot be loaded: its backend {self.name} is not part of this version.",
            name=spec.name,
            source=spec.source,
        )
