"""Stands in for a backend that this version does not have: its models can be planned, not loaded."""
from __future__ import annotations

from typing import Any, NoReturn

from ..errors import BadSize, LoadFailed
from ..facts import Footprint, ModelSpec


class AbsentBackend:
    """Knows a model's size where it was declared, or measured elsewhere. Nothing of it is ever loaded."""

    can_move = False
    can_split = True

    def __init__(self, name: str) -> None:
        self.name = name

    def footprint(self, spec: ModelSpec, origin: Any = None) -> Footprint:
        if spec.size is not None:
            return Footprint.of(spec.size)
        if spec.measured is not None:
            return Footprint.of(spec.measured, "measured")
        raise BadSize(spec.size, what=f"size for {spec.name!r}, whose backend {self.name} is not here to tell it",
                      example="memory: 10GiB in its entry of the catalogue")

    def load(self, spec: ModelSpec, *_: Any, **__: Any) -> NoReturn:
        raise LoadFailed(f"{spec.name} cannot be loaded: its backend {self.name} is not part of this version.",
                         name=spec.name, source=spec.source)
