"""The protocol of a backend, and two tests that all backends share: hub ids and out-of-memory errors.

No backend is defined here; `registry.py` opens them by name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import OutOfMemory
from ..facts import Evidence, ModelSpec, Shares

Progress = Callable[[int, int], None]  # called with bytes done and bytes in total
_OUT_OF_MEMORY = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED")


class NotStill(Exception):
    """A kernel's memory stays: it was used meanwhile, or something in it may use the memory."""


class Stillness(Protocol):
    """Knows whether anything runs in this process that may touch a tensor."""

    def why_not(self) -> str:
        """Why the kernel's memory must not be moved now; empty if it may be moved."""
        ...

    def mark(self) -> object:
        """A value that changes with every message that the kernel handles."""
        ...

    def change(self, mark: object, act: Callable[[], None]) -> str:
        """Calls `act` while no other thread of the process runs, and returns an empty text.

        If the kernel was used since `mark`, or something runs, returns why, and `act` is not called.
        """
        ...


class Backend(Protocol):
    """Loads, moves and drops one kind of model.

    A backend is thread-safe. The owner calls it for one model from one thread at a time.
    """

    name: str
    can_move: bool  # False: a Move becomes Drop + Load
    can_split: bool  # False: a model stays on one device, whatever its layout says

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """What the source of `spec` shows about the model's size; nothing is loaded.

        `origin` is the live Python object that the model was registered with, if any. The package
        `estimation` turns the evidence into a footprint.
        Raises NotAModel, and LoadFailed for a damaged source.
        """
        ...

    def pieces(self, spec: ModelSpec, origin: Any = None, model: Any = None) -> tuple[int, ...]:
        """Relative sizes of the consecutive pieces between which the model of `spec` may be cut.

        One piece: the model must stay whole. None: it may be cut at any byte.
        A loaded `model` gives exact sizes; otherwise they come from `origin` or the source.
        """
        ...

    def load(
        self,
        spec: ModelSpec,
        shares: Shares,
        origin: Any = None,
        *,
        progress: Progress | None = None,
        into: Any = None,
    ) -> Any:
        """A handle to the model of `spec`, resident on its `shares`, for the other methods.

        `origin` is the live Python object that the model was registered with (a factory callable).
        `progress` is called with bytes done and bytes in total.
        `into` is a handle, or a value, of an earlier load. It is refilled in place, so references
        to it stay valid.
        On any failure, an interrupt included, nothing stays allocated. Raises LoadFailed,
        CannotGovern, or the device's own out-of-memory error (see `is_out_of_memory`).
        """
        ...

    def value(self, model: Any) -> Any:
        """The object that `use` yields for the handle `model`: for torch the nn.Module."""
        ...

    def move(self, model: Any, shares: Shares) -> None:
        """Moves the bytes of `model` to new `shares`, all or nothing. Python objects stay the same."""
        ...

    def drop(self, model: Any) -> None:
        """Frees the bytes of `model`, also if user code still holds the object. Repeating is safe.

        Bytes that exist nowhere else stay with an object that user code holds, and are freed with it.
        """
        ...

    def measure(self, model: Any) -> Shares:
        """Device id -> bytes of the storages of `model`; empty for a dropped model."""
        ...

    def elsewhere(self, model: Any) -> tuple[str, ...]:
        """Tensors of `model` that are not on its shares, each as `NAME on DEVICE`; normally none."""
        ...

    def droppable(self, model: Any) -> bool:
        """Whether a cheap check suggests that the source could restore `model` byte for byte."""
        ...

    def unchanged(self, model: Any) -> bool:
        """Whether `model` and its source are proven unchanged since the load. Called before a drop."""
        ...


def looks_like_hub_id(text: str) -> bool:
    """Whether `text` has the form `org/name` of a model on the Hugging Face hub.

    >>> looks_like_hub_id("Qwen/Qwen3-8B")
    True
    >>> looks_like_hub_id("./Qwen/Qwen3-8B"), looks_like_hub_id("a/b.gguf")
    (False, False)
    """
    if text.endswith(".gguf"):
        return False
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", text) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that a device ran out of memory.

    True for our own error, torch's, Python's MemoryError, and the texts of CUDA libraries.
    """
    if isinstance(error, (OutOfMemory, MemoryError)):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, getattr(torch, "OutOfMemoryError", ())):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
