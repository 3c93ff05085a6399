"""A backend that reads the size of a model from its source, and never loads a model.

This backend stands in for a backend that this version lacks. Dry runs and the backends of engines
use it to read a source without opening another backend. This module imports no torch.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from ..errors import LoadFailed
from ..facts import Evidence, ModelSpec
from .base import Backend, looks_like_hub_id
from .formats import sources


class AbsentBackend(Backend):
    """Reads the size of a model from its source. It never loads a model."""

    can_move = False

    def __init__(self, name: str) -> None:
        self.name = name

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """What the local files of `spec` show about the model's size; without them, their name.

        Raises LoadFailed if local files exist but their size cannot be read.
        """
        is_local = os.path.lexists(os.path.expanduser(spec.source))
        if not is_local and not looks_like_hub_id(spec.source):
            absent = (
                f"there is no {os.path.abspath(spec.source)}"
                if spec.source
                else "no source is given"
            )
            return Evidence(name=spec.source, why_unknown=absent)
        try:
            return sources.evidence(spec.source, spec.name, spec.options, spec.model_type)
        except LoadFailed as error:
            if is_local:
                raise
            reason = str(error).removeprefix(f"{spec.name}: ").rstrip(".")
            return Evidence(name=spec.source, why_unknown=reason)

    def load(self, spec: ModelSpec, *_: Any, **__: Any) -> NoReturn:
        """Always raises LoadFailed."""
        raise LoadFailed(
            f"{spec.name} cannot be loaded: its backend {self.name} is not part of this version.",
            name=spec.name,
            source=spec.source,
            mistake=True,
        )
