"""The hands that load, move and drop models, and the registry of them.

A backend knows one kind of model. It decides nothing: where a model goes was decided by the planner and reserved in
the ledger before a backend is called. Adding a backend is one file beside this one and one line in `_MODULES`.
"""
from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import BadSetting, NotAModel, OutOfMemory
from ..facts import Evidence, ModelSpec, Shares
from ..devices.probe import Probe
from .engines.recipe import RECIPES, recipe

if TYPE_CHECKING:
    from ..settings import Settings

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

    def load(self, spec: ModelSpec, shares: Shares, origin: Any = None, *,
             progress: Progress | None = None, into: Any = None) -> Any:
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


_MODULES = {  # name -> module and class; imported when first opened
    "fake": ("fake", "FakeBackend"),
    "llama_cpp": ("llama_cpp", "LlamaCppBackend"),
    "torch": ("torch", "TorchBackend"),
    "transformers": ("transformers", "TransformersBackend"),
    **dict.fromkeys(RECIPES, ("server", "ServerBackend")),
}

LAYERED = ("llama_cpp", "llama-server")  # those that put some layers on the card, and leave others to the CPU


def backend_names() -> tuple[str, ...]:
    """The backends that this version has."""
    return tuple(sorted(_MODULES))


def open_backend(name: str, probe: Probe, settings: Settings | None = None) -> Backend:
    """The backend of that name, over these devices. Raises BadSetting for an unknown one.

    `settings` are for those that start servers: their ports, and how long a start may take.
    """
    if name not in _MODULES:
        raise BadSetting("backend", name, "one of " + ", ".join(sorted(_MODULES)))
    module, kind = _MODULES[name]
    backend = getattr(importlib.import_module(f"{__name__}.{module}"), kind)
    return backend(probe, name, settings) if name in RECIPES else backend(probe)


def missing(name: str) -> str:
    """What has to be installed before that backend can load anything, in a sentence; empty where nothing has."""
    if name in RECIPES:
        return recipe(name).missing()
    if name == "llama_cpp" and importlib.util.find_spec("llama_cpp") is None:
        return "llama-cpp-python is not installed.\n  Install it:  pip install 'gpu-console[llama]'"
    return ""


def runs_here(spec: ModelSpec) -> bool:
    """Whether such a model runs in this process, and shares its fate."""
    return spec.backend not in RECIPES and not (spec.backend == "llama_cpp" and spec.options.get("isolated", True))


def backend_for(source: Any, requested: str = "auto") -> str:
    """The name of the backend that loads such a source: live Python, a GGUF file, a model directory, or a hub id.

    `requested` other than `auto` is taken at its word. Raises BadSetting for an unknown backend, and NotAModel.
    """
    if requested != "auto":
        if requested not in _MODULES:
            raise BadSetting("backend", requested, "auto or one of " + ", ".join(sorted(_MODULES)))
        return requested
    if callable(source) and not isinstance(source, os.PathLike):  # an nn.Module is callable too
        return "torch"
    text = os.fspath(source) if isinstance(source, (str, os.PathLike)) else ""
    if text.endswith(".gguf") or (os.path.isdir(text) and _holds_gguf(text)):
        return "llama_cpp"
    if os.path.isdir(text) or (looks_like_hub_id(text) and not os.path.exists(text)):
        return "transformers"
    found = "no such file or directory" if text and not os.path.exists(text) else f"{type(source).__name__}"
    raise NotAModel(
        f"{text or repr(source)} is nothing that can be loaded ({found if not os.path.isfile(text) else 'a file'}).\n"
        f"  Supported: a Hugging Face directory (config.json and *.safetensors), a GGUF file, a hub id like "
        f"org/name that was downloaded,\n  an nn.Module, or a callable that returns one.", name=text, source=text)


def _holds_gguf(directory: str) -> bool:
    """Whether that is a directory of GGUF files, and no Hugging Face model's."""
    names = os.listdir(directory)
    return "config.json" not in names and any(name.endswith(".gguf") for name in names)


def looks_like_hub_id(text: str) -> bool:
    """`org/name`, as the Hugging Face hub names its models.

    >>> looks_like_hub_id("Qwen/Qwen3-8B"), looks_like_hub_id("./Qwen/Qwen3-8B"), looks_like_hub_id("a/b.gguf")
    (True, False, False)
    """
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", text) is not None and not text.endswith(".gguf")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device ran out of memory: our own error, torch's, Python's, or a CUDA library's in other words."""
    if isinstance(error, (OutOfMemory, MemoryError)):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, getattr(torch, "OutOfMemoryError", ())):
        return True
    return isinstance(error, RuntimeError) and re.search(
        r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED", str(error)) is not None
