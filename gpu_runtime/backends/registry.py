"""The hands that load, move and drop models, and the registry of them.

A backend knows one kind of model. It decides nothing: where a model goes was decided by the planner and reserved in
the ledger before a backend is called. Adding a backend is one file beside this one and one line in `_MODULES`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from ..devices.probe import Probe
from ..errors import BadSetting, NotAModel
from ..facts import ModelSpec
from .base import Backend, looks_like_hub_id
from .engines.registry import RECIPES, recipe

if TYPE_CHECKING:
    from ..settings import Settings


_MODULES = {  # name -> module and class; imported when first opened
    "fake": ("fake", "FakeBackend"),
    "llama_cpp": ("llama_cpp.backend", "LlamaCppBackend"),
    "torch": ("pytorch.torch_backend", "TorchBackend"),
    "transformers": ("pytorch.transformers_backend", "TransformersBackend"),
    **dict.fromkeys(RECIPES, ("engines.backend", "ServerBackend")),
}

LAYERED = (
    "llama_cpp",
    "llama-server",
)  # those that put some layers on the card, and leave others to the CPU


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
    backend = getattr(importlib.import_module(f".{module}", __package__), kind)
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
    return spec.backend not in RECIPES and not (
        spec.backend == "llama_cpp" and spec.options.get("isolated", True)
    )


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
    found = (
        "no such file or directory"
        if text and not os.path.exists(text)
        else f"{type(source).__name__}"
    )
    raise NotAModel(
        f"{text or repr(source)} is nothing that can be loaded ({found if not os.path.isfile(text) else 'a file'}).\n"
        f"  Supported: a Hugging Face directory (config.json and *.safetensors), a GGUF file, a hub id like "
        f"org/name that was downloaded,\n  an nn.Module, or a callable that returns one.",
        name=text,
        source=text,
    )


def _holds_gguf(directory: str) -> bool:
    """Whether that is a directory of GGUF files, and no Hugging Face model's."""
    names = os.listdir(directory)
    return "config.json" not in names and any(name.endswith(".gguf") for name in names)
