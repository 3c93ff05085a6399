"""The registry of backends: opens a backend by its name, and finds the backend for a source.

To add a backend, add its module to this folder or a subfolder, and one line to `_MODULES`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from ..devices.probe import Probe
from ..errors import BadSetting, GpuError, NotAModel
from ..facts import ENGINES
from ..safe_text import quoted
from ..threads import import_whole
from .base import Backend, looks_like_hub_id
from .engines.recipe import recipe
from .formats import sources

if TYPE_CHECKING:
    from ..settings import Settings

_MODULES = {  # name -> module and class; a module is imported when its backend is first opened
    "fake": ("fake", "FakeBackend"),
    "kernel": ("pytorch.kernel_memory", "KernelBackend"),
    "llama_cpp": ("llama_cpp.backend", "LlamaCppBackend"),
    "torch": ("pytorch.torch_backend", "TorchBackend"),
    "transformers": ("pytorch.transformers_backend", "TransformersBackend"),
    **dict.fromkeys(ENGINES, ("engines.backend", "ServerBackend")),
}


def backend_names() -> tuple[str, ...]:
    """The names of all backends of this version, sorted."""
    return tuple(sorted(_MODULES))


def open_backend(name: str, probe: Probe, settings: Settings | None = None) -> Backend:
    """The backend called `name`, on the devices of `probe`. Raises BadSetting for an unknown name.

    Only backends that start servers use `settings`: the range of ports, and the time-out of a
    start.
    """
    if name not in _MODULES:
        raise BadSetting("backend", name, "one of " + ", ".join(backend_names()))
    module_name, class_name = _MODULES[name]
    import_whole(f"{__package__}.{module_name}")
    module = importlib.import_module(f".{module_name}", __package__)
    backend_class = getattr(module, class_name)
    if name in ENGINES:
        return backend_class(probe, name, settings)
    return backend_class(probe)


def missing(name: str) -> str:
    """A sentence about what the backend `name` lacks here; empty if nothing is missing."""
    if name in ENGINES:
        return recipe(name).missing()
    if name == "llama_cpp" and importlib.util.find_spec("llama_cpp") is None:
        return "llama-cpp-python is not installed.\n  Install it:  pip install 'gpu-console[llama]'"
    return ""


def backend_for(source: Any, requested: str = "auto") -> str:
    """The name of the backend that loads `source`.

    `source` is a module or another callable, a GGUF file, a model directory or a hub id. If
    `requested` is the name of a backend and not "auto", it is returned, and the source is not read.
    Raises BadSetting for an unknown backend, and NotAModel for an unusable source.
    """
    if requested != "auto":
        if requested not in _MODULES:
            raise BadSetting("backend", requested, "auto or one of " + ", ".join(backend_names()))
        return requested
    is_path = isinstance(source, os.PathLike)
    if callable(source) and not is_path:  # an nn.Module is callable too
        return "torch"
    text = os.fspath(source) if is_path or isinstance(source, str) else ""
    is_hub_id = looks_like_hub_id(text) and not os.path.exists(text)
    if os.path.isdir(text) or text.endswith(".gguf") or is_hub_id:
        return file_backend(text)
    raise _not_a_model(source, text)


def file_backend(source: str) -> str:
    """The backend for a file, a directory or a hub id: `llama_cpp` if it has GGUF files only.

    Without such files, and for a source that is not here, the result is `transformers`.
    """
    if source.endswith(".gguf"):
        return "llama_cpp"
    try:
        found = sources.holds_gguf(sources.directory(source, source))
    except GpuError:  # a hub id that was not downloaded
        found = False
    return "llama_cpp" if found else "transformers"


def _not_a_model(source: Any, text: str) -> NotAModel:
    if not text:
        found = type(source).__name__
    elif os.path.isfile(text):
        found = "a file of another kind"
    else:
        found = "no such file or directory"
    what = f"{text or quoted(source)} cannot be loaded ({found})."
    if source is None:
        what = "the source of the model is missing."
    return NotAModel(
        f"{what}\n"
        f"  Supported: a Hugging Face directory (config.json and *.safetensors), a GGUF file,\n"
        f"  the hub id (org/name) of a downloaded model, an nn.Module, or a callable that returns one.",
        name=text,
        source=text,
    )
