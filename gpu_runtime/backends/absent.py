"""Stands in for a backend that this version does not have: its models can be planned, not loaded."""
from __future__ import annotations

import os
from typing import Any, NoReturn

from ..errors import LoadFailed
from ..facts import Evidence, ModelSpec
from . import sources


class AbsentBackend:
    """Knows what a model's source tells of its size. Nothing of it is ever loaded."""

    can_move = False
    can_split = True

    def __init__(self, name: str) -> None:
        self.name = name

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """What its files tell, where they lie here; else its name may."""
        if os.path.exists(os.path.expanduser(spec.source)):
            return sources.evidence(spec.source, spec.name, spec.options)
        return Evidence(name=spec.source, why_unknown=f"its backend {self.name} is not here to tell it, nor is its "
                                                      f"source ({spec.source or 'none was named'})")

    def pieces(self, spec: ModelSpec, origin: Any = None, model: Any = None) -> tuple[int, ...]:
        return ()

    def load(self, spec: ModelSpec, *_: Any, **__: Any) -> NoReturn:
        raise LoadFailed(f"{spec.name} cannot be loaded: its backend {self.name} is not part of this version.",
                         name=spec.name, source=spec.source)
