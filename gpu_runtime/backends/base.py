"""`Backend`, the base of all backends. `registry.py` opens backends by name."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ..errors import GpuError, OutOfMemory
from ..facts import Evidence, ModelSpec, Shares

Progress = Callable[[int, int], None]  # called with bytes done and bytes in total
_OUT_OF_MEMORY = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED")


class NotStill(Exception):
    """Raised when the kernel's memory was not moved. The text is the reason, such as a running cell."""


class Damaged(Exception):
    """Bytes in a file cannot return. The text says why, as the end of a sentence about them."""

    def __init__(self, why: str, directory: Path, keys: frozenset[int], size: int) -> None:
        """`keys` are the keys of the storages concerned, and `size` their bytes."""
        super().__init__(why)
        self.directory, self.keys, self.bytes = directory, keys, size

    @property
    def sentence(self) -> str:
        """What has happened to the bytes, as the end of a sentence."""
        return f"its bytes in the file in {self.directory} {self}"


class Stillness(Protocol):
    """Knows whether running code may touch the kernel's tensors."""

    def why_not(self) -> str:
        """The reason why the kernel's memory must not be moved now; empty if it may be moved."""

    def mark(self) -> object:
        """A value that changes with every message to the kernel that may run the user's code."""

    def change(self, mark: object, act: Callable[[], None]) -> str:
        """Calls `act` while no other thread of the process runs, and returns an empty text.

        `mark` is an earlier result of the method `mark`. If the kernel was used since then, or if
        the user's code runs now, `act` is not called, and the result is the reason.
        """


class Backend:
    """The base of backends. A backend loads, moves and drops one kind of model.

    A backend is thread-safe. The owner calls it for one model from one thread at a time.
    """

    name: str
    can_move = True  # False: a Move becomes Drop + Load
    can_split = True  # False: a model stays on one device, whatever its layout says
    layout = "auto"  # the layout of a model whose spec sets none
    shares = False  # True: processes share one copy of a model in host memory
    # Whether nothing can write a model while it moves, so that its bytes need no comparison. A
    # process that only runs a model sets this.
    undisturbed: Callable[[], bool] = staticmethod(lambda: False)

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """What the source of `spec` shows about the model's size. Nothing is loaded.

        `origin` is the live Python object with which the model was registered, or None. The package
        `estimation` computes a footprint from the evidence.

        Raises NotAModel, and LoadFailed for a damaged source.
        """
        raise NotImplementedError

    def pieces(self, spec: ModelSpec, origin: Any = None, model: Any = None) -> tuple[int, ...]:
        """The relative sizes of the pieces of the model of `spec`, in order.

        A model on several cards is cut between pieces. A model with one piece must stay whole. If
        the result is empty, the model may be cut at any byte. With a loaded `model` the sizes are
        exact. Without it, they are read from `origin` or from the source.
        """
        return ()

    def load(
        self,
        spec: ModelSpec,
        shares: Shares,
        origin: Any = None,
        *,
        progress: Progress | None = None,
        into: Any = None,
    ) -> Any:
        """Loads the model of `spec` onto its `shares`. Returns a handle for the other methods.

        `origin` is the live Python object with which the model was registered: a module, or a
        callable that returns one. `progress` is called with bytes done and bytes in total. `into`
        is the handle of an earlier load, or the object that `use` yielded then. That object gets
        the new bytes, so the user's references to it stay valid.

        On any failure, an interrupt included, nothing stays allocated. Raises BadSetting,
        NotAModel, LoadFailed, CannotGovern, or the device's own out-of-memory error (see
        `is_out_of_memory`).
        """
        raise NotImplementedError

    def value(self, model: Any) -> Any:
        """The object that `use` yields for the handle `model`, such as a torch module."""
        return model

    def move(self, model: Any, shares: Shares) -> None:
        """Moves all bytes of `model` to `shares`, or none if it fails. The Python objects stay."""
        raise NotImplementedError

    def drop(self, model: Any) -> None:
        """Frees the bytes of `model` that its source can restore. A repeated call does nothing.

        These bytes are freed even if user code still has the object that `use` yielded. Bytes that
        exist nowhere else stay with that object, and are freed with it.
        """
        raise NotImplementedError

    def measure(self, model: Any) -> Shares:
        """The bytes that `model` holds on each device. Empty for a dropped model."""
        raise NotImplementedError

    def stows(self, model: Any) -> bool:
        """Whether the bytes of `model` in host memory may move on to a file on a disk.

        Then its handle has `disk_bytes`, and `move` also reads the file. If bytes there are damaged,
        `move` raises Damaged, and nothing has moved.
        """
        return False

    def write(self, model: Any, directory: Path, *, encrypted: bool = False) -> Any:
        """Writes the bytes of `model` in host memory to a new file in `directory`; they also stay there.

        On a simulated card they stay readable later, so the file cannot be `encrypted`. Returns what
        `move_on` needs. Raises OSError, an error whose text is the end of a sentence about bytes that
        the disk has not kept, and NotStill if bytes are moved meanwhile.
        """
        raise NotImplementedError

    def move_on(self, model: Any, written: Any) -> None:
        """Frees the bytes in host memory that are `written`.

        Raises NotStill if bytes have moved since the write, or cannot be freed now.
        """
        raise NotImplementedError

    def working_bytes(self, model: Any) -> int | None:
        """Bytes that `model` takes on its cards besides those of `measure`, if they were measured.

        They are lost when the model leaves, and taken again when it returns. None: not measured.
        """
        return None

    def elsewhere(self, model: Any) -> tuple[str, ...]:
        """The tensors of `model` that are not on its shares, each as `NAME on DEVICE`."""
        return ()

    def runs_here(self, spec: ModelSpec) -> bool:
        """Whether the model of `spec` runs in this process, which its crash would end."""
        return True

    def refusal(self, name: str) -> GpuError | None:
        """The error of each move of the model `name`, if this process can move no such model."""
        return None

    def droppable(self, model: Any) -> bool:
        """Whether a cheap check suggests that the source could restore `model` byte for byte."""
        return False

    def unchanged(self, model: Any) -> bool:
        """Whether a comparison, before a drop, proves that `model` and its source are unchanged."""
        return self.droppable(model)

    def piece_bytes(self, model: Any) -> int:
        """Bytes of the largest piece of `model` that can leave a card while the other pieces stay.

        The result is 0 if the model can only move as a whole. If not, `move` also accepts two
        shares: one on the model's card, and one on the host. It moves as many whole pieces as fit.
        The pieces return to the card if its share is larger than the bytes there now; else they
        leave the card.
        """
        return 0

    def must_return_to(self, model: Any) -> dict[str, int]:
        """The devices to which bytes of `model` must return, each with their number (0: any number).

        Empty if the model can return to any device.
        """
        return {}

    def keeps_shadow(self, spec: ModelSpec) -> bool:
        """Whether the model of `spec` may have a copy in host memory while it is on a card.

        If the result is true, `load` and `move` accept the argument `shadow`, and `free_shadow`
        frees the copy.
        """
        return False

    def free_shadow(self, model: Any) -> None:
        """Frees the copy of `model` in host memory. A repeated call does nothing."""


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
    """Whether `error` means that a device ran out of memory, by its class or a CUDA library's text."""
    if isinstance(error, (OutOfMemory, MemoryError)):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, getattr(torch, "OutOfMemoryError", ())):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
