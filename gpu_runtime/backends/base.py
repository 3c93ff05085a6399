"""What every backend does: load, move and drop one kind of model."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import OutOfMemory
from ..facts import Evidence, ModelSpec, Shares

if TYPE_CHECKING:
    pass


Progress = Callable[[int, int], None]  # bytes so far, bytes in all


class Backend(Protocol):
    """Loads, moves and drops one kind of model. Thread-safe; a model is only ever handled by one thread at a time."""

    name: str
    can_move: bool  # False: a Move becomes Drop + Load
    can_split: bool  # False: a model lies on one device, whatever its layout says

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """What its source tells of its size, nothing of it loaded; what is made of that is `estimate.py`'s to say.

        Raises NotAModel, and LoadFailed for a damaged source.
        """
        ...

    def pieces(self, spec: ModelSpec, origin: Any = None, model: Any = None) -> tuple[int, ...]:
        """Sizes, in proportion, of the consecutive parts between which the model may be cut to go over several cards.

        One: it must stay whole. None: it may be cut at any byte. `model`, where it is loaded, tells more than its
        source.
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
        """The model, resident on its shares: a handle for the other verbs; `value` gives what users hold.

        `origin` is the live Python that a model was registered with (a factory callable); `into` is the handle, or
        what `value` gave, of an earlier load: it is filled again in place, so whoever kept it can go on.
        On any failure, an interrupt too, nothing stays allocated. Raises LoadFailed, CannotGovern, or the device's
        own out-of-memory error (see `is_out_of_memory`).
        """
        ...

    def value(self, model: Any) -> Any:
        """What `use` yields: the nn.Module of a torch or transformers model."""
        ...

    def move(self, model: Any, shares: Shares) -> None:
        """Carries the model's bytes to its new shares; Python objects stay what they are. All or nothing."""
        ...

    def drop(self, model: Any) -> None:
        """Frees its bytes, also where user code still holds the object. Twice is once."""
        ...

    def measure(self, model: Any) -> Shares:
        """The bytes of its real storages, by device id; nothing for a dropped model."""
        ...

    def elsewhere(self, model: Any) -> tuple[str, ...]:
        """Tensors that do not lie on the shares that it was loaded to, each as `NAME on DEVICE`; none, if all is
        well."""
        ...

    def droppable(self, model: Any) -> bool:
        """Whether, as far as can be told cheaply, its source could bring it back byte for byte."""
        ...

    def unchanged(self, model: Any) -> bool:
        """Proof, just before a drop: its bytes are those its source gave, and the source is the same still."""
        ...


def looks_like_hub_id(text: str) -> bool:
    """`org/name`, as the Hugging Face hub names its models.

    >>> looks_like_hub_id("Qwen/Qwen3-8B"), looks_like_hub_id("./Qwen/Qwen3-8B"), looks_like_hub_id("a/b.gguf")
    (True, False, False)
    """
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", text) is not None and not text.endswith(
        ".gguf"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device ran out of memory: our own error, torch's, Python's, or a CUDA library's in other words."""
    if isinstance(error, (OutOfMemory, MemoryError)):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, getattr(torch, "OutOfMemoryError", ())):
        return True
    return (
        isinstance(error, RuntimeError)
        and re.search(
            r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED", str(error)
        )
        is not None
    )
