"""The hands that load, move and drop models, and the registry of them.

A backend knows one kind of model. It decides nothing: where a model goes was decided by the planner and reserved in
the ledger before a backend is called.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..facts import Footprint, ModelSpec, Shares

Progress = Callable[[int, int], None]  # bytes so far, bytes in all


class Backend(Protocol):
    """Loads, moves and drops one kind of model. Thread-safe; a model is only ever handled by one thread at a time."""

    name: str
    can_move: bool  # False: a Move becomes Drop + Load

    def footprint(self, spec: ModelSpec, origin: Any = None) -> Footprint:
        """The bytes it will need, before loading it. Raises NotAModel, or BadSize where only a declared size can tell."""
        ...

    def load(self, spec: ModelSpec, shares: Shares, origin: Any = None, *,
             progress: Progress | None = None, into: Any = None) -> Any:
        """The model, resident on its shares.

        `origin` is the live Python that a model was registered with (a factory callable); `into` is the object an
        earlier load returned, where somebody still holds it: it is filled again in place and returned.
        On any failure, an interrupt too, nothing stays allocated. Raises LoadFailed, or the device's own
        out-of-memory error.
        """
        ...

    def move(self, model: Any, shares: Shares) -> None:
        """Carries the model's bytes to its new shares; Python objects stay what they are. All or nothing."""
        ...

    def drop(self, model: Any) -> None:
        """Frees its bytes, also where user code still holds the object."""
        ...

    def measure(self, model: Any) -> Shares:
        """The bytes of its real storages, by device id."""
        ...

    def droppable(self, model: Any) -> bool:
        """Whether, as far as can be told cheaply, its source could bring it back byte for byte."""
        ...

    def unchanged(self, model: Any) -> bool:
        """Proof, just before a drop: its bytes are those its source gave, and the source is the same still."""
        ...
