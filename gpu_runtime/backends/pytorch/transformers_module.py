"""Builds the transformers module of a model directory on the CPU."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import forks
from ...errors import BadSetting, GpuError, LoadFailed
from ...facts import ModelSpec
from ...safe_text import printable
from ...threads import import_whole
from ...torch_modes import with_own_modes
from ..base import is_out_of_memory
from ..formats import sources
from ..formats.safetensors import Checkpoint
from .sentence_modules import recipe_of

log = logging.getLogger("gpu_runtime")

AUTO_CLASSES = {  # task or model type -> transformers' class
    "llm": "AutoModelForCausalLM",
    "embedding": "AutoModel",
    "reranker": "AutoModelForSequenceClassification",
    "vision": "AutoModelForImageTextToText",
    "causal-lm": "AutoModelForCausalLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "feature-extraction": "AutoModel",
}
LIBRARIES = ("transformers", "huggingface_hub", "accelerate")  # their loggers are heard in a load
_MOST_NAMES = 5  # tensors that an error names
MOST_TOLD = 500  # characters of a library's warning
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "vocab.json"),
    "spiece.model",
)
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def dtype_of(spec: ModelSpec) -> torch.dtype | None:
    """The dtype that the options of `spec` set. None means the stored dtype. Raises BadSetting."""
    wanted = spec.options.get("dtype", spec.options.get("torch_dtype"))
    if wanted is None or wanted == "auto":
        return None
    dtype = wanted
    if not isinstance(wanted, torch.dtype):
        dtype = getattr(torch, str(wanted).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise BadSetting("dtype", wanted, "auto, bfloat16, float16 or float32")
    return dtype


def _model_class(spec: ModelSpec, config: dict[str, Any]) -> Any:
    """The class in `config`, if it fits the model type and no task is set; else that for the task or
    the model type, or a default. Raises BadSetting for an unknown task.
    """
    architecture = (config.get("architectures") or [""])[0]
    import_whole("transformers", architecture)
    import transformers

    task = spec.options.get("task")
    if task is not None and task not in AUTO_CLASSES:
        raise BadSetting("task", task, "one of " + ", ".join(AUTO_CLASSES))
    saved = getattr(transformers, architecture, None)
    is_known = isinstance(saved, type) and issubclass(saved, nn.Module)
    if is_known and task is None and _serves(architecture, spec.model_type):
        return saved
    name = AUTO_CLASSES.get(task or spec.model_type) or _auto_class_in(config)
    import_whole("transformers", name)
    return getattr(transformers, name)


def _auto_class_in(config: dict[str, Any]) -> str:
    """The Auto class for which `config` registers the repository's own code, else AutoModel."""
    own = (name for name in config.get("auto_map", {}) if name.startswith("AutoModel"))
    return next(own, "AutoModel")


def _serves(architecture: str, model_type: str) -> bool:
    """Whether the saved `architecture` fits the `model_type`.

    >>> _serves("BertForMaskedLM", "embedding"), _serves("BertModel", "embedding")
    (False, True)
    >>> _serves("Qwen3ForCausalLM", "other")
    True
    """
    if model_type == "llm":
        return "For" in architecture
    endings = {"embedding": "Model", "reranker": "ForSequenceClassification"}
    return architecture.endswith(endings.get(model_type, ""))


@with_own_modes()
def built(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[nn.Module, bool]:
    """The module on the CPU, and whether all its weights came from the source. Raises LoadFailed.

    If the dtype is not converted, the weights are in mapped pages of the files.
    """
    before = torch.get_rng_state()
    try:
        with _heard(spec.name):
            module, info = _model_class(spec, checkpoint.config).from_pretrained(
                checkpoint.directory,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # transformers' own error names no tensor
                dtype=dtype_of(spec) or "auto",
                **_options(spec),
                **_trust(spec),
            )
            if info["missing_keys"] or info["mismatched_keys"]:  # these drew random values
                torch.set_rng_state(before)
            _require_whole(spec, module, info)
            _attach_files(module, spec, checkpoint.directory)
    except GpuError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise _failed(spec, checkpoint.directory, error) from error
    return module, not info["missing_keys"]


def _require_whole(spec: ModelSpec, module: nn.Module, info: dict[str, Any]) -> None:
    """Raises LoadFailed if tensors of the `module` are not in its files, or have other shapes there.

    Such a tensor has random values. The option `allow_missing` accepts missing tensors, with a
    warning. A warning also names the tensors of the files that the module does not use.
    """
    shapes = [
        f"{name} has {tuple(stored)} in the files, and {tuple(needed)} in the model"
        for name, stored, needed in sorted(info["mismatched_keys"])
    ]
    missing = sorted(info["missing_keys"])
    kind = type(module).__name__
    total = len(module.state_dict())
    lacks = f"its files lack {len(missing)} of the {total} tensors of {kind}: {_listed(missing)}"
    fault = f"the shapes in its files are wrong: {_listed(shapes)}" if shapes else ""
    if missing and not spec.options.get("allow_missing"):
        fault = fault or lacks
    if fault:
        advice = "  Its config.json and its weights belong to different models."
        if not shapes:
            advice = (
                "  They would get random values. To load them so all the same:  allow_missing=True"
            )
        raise LoadFailed(
            f"{spec.name} cannot be loaded: {fault}.\n{advice}",
            name=spec.name,
            source=spec.source,
            missing=tuple(missing),
            mistake=True,
        )
    if missing:
        tell_once(spec.name, f"{lacks}. They have random values (allow_missing).")
    if info["unexpected_keys"]:
        unused = sorted(info["unexpected_keys"])
        tell_once(spec.name, f"its files hold tensors that {kind} does not use: {_listed(unused)}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


@with_own_modes()
def built_from(
    spec: ModelSpec, checkpoint: Checkpoint, weights: dict[str, torch.Tensor]
) -> nn.Module | None:
    """The module of `spec` on the CPU, made from the tensors `weights`; None if that is impossible."""
    import_whole("transformers", "GenerationConfig")
    from transformers import GenerationConfig

    before = torch.get_rng_state()
    try:
        with _heard(spec.name):
            kind = type(without_data(spec, checkpoint))
            module, info = kind.from_pretrained(  # type: ignore[attr-defined]
                None,
                config=_config(spec, checkpoint),
                state_dict=weights,
                output_loading_info=True,
                dtype=dtype_of(spec) or "auto",
                **_options(spec),
                **_trust(spec),
            )
            if info["missing_keys"]:  # these drew random values
                torch.set_rng_state(before)
            if (checkpoint.directory / "generation_config.json").exists():
                module.generation_config = GenerationConfig.from_pretrained(checkpoint.directory)
            _attach_files(module, spec, checkpoint.directory)
    except Exception as error:  # the load from the files reports what is wrong
        log.debug("%s is read from its files: %s", spec.name, _first_line(error))
        return None
    whole = not info["missing_keys"] and not info["mismatched_keys"]
    return module if whole and not info["unexpected_keys"] else None


def _options(spec: ModelSpec) -> dict[str, Any]:
    return {key: spec.options[key] for key in ("attn_implementation",) if key in spec.options}


def _trust(spec: ModelSpec) -> dict[str, bool]:
    """Whether code of the model's directory may run. If left out, transformers asks on the terminal."""
    return {"trust_remote_code": bool(spec.options.get("trust_remote_code"))}


def _failed(spec: ModelSpec, directory: Path, error: Exception) -> LoadFailed:
    """The error for a load of the model of `spec` that failed with `error`."""
    why = _first_line(error)
    if "trust_remote_code" in str(error):  # transformers' error about code in the directory
        why = (
            "it needs code of its own directory, and that code may not run.\n"
            "  Read the code. To run it:  GPU_TRUST_REMOTE_CODE=true, and trust_remote_code=True "
            "for the model"
        )
    return LoadFailed(
        f"{spec.name}: {directory} could not be loaded: {why}",
        name=spec.name,
        source=spec.source,
        mistake="trust_remote_code" in str(error),
    )


@with_own_modes()
def without_data(spec: ModelSpec, checkpoint: Checkpoint) -> nn.Module:
    """The module of `spec` with its tensors on the meta device. Raises LoadFailed."""
    try:
        config = _config(spec, checkpoint)
        kind = _model_class(spec, checkpoint.config)
        with torch.device("meta"):
            if kind.__name__.startswith("Auto"):
                return kind.from_config(config, **_trust(spec))
            return kind._from_config(config)
    except GpuError:
        raise
    except (ValueError, OSError, ImportError) as error:
        raise _failed(spec, checkpoint.directory, error) from error


def _config(spec: ModelSpec, checkpoint: Checkpoint) -> Any:
    import_whole("transformers", "AutoConfig")
    import transformers

    return transformers.AutoConfig.from_pretrained(
        checkpoint.directory, local_files_only=True, **_trust(spec)
    )


def _attach_files(module: nn.Module, spec: ModelSpec, directory: Path) -> None:
    """Sets `.tokenizer` and `.processor` of the `module`, if the `directory` has files for them.

    The module of an embedder also gets the modules that sentence-transformers has saved, as
    `.sentence_recipe`. If they cannot be used, each call for a vector is refused, with the reason.
    """
    import_whole("transformers", "AutoTokenizer", "AutoProcessor")
    import transformers

    options = {"local_files_only": True, **_trust(spec)}
    if any((directory / file).exists() for file in _TOKENIZER_FILES):
        module.tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **options)
    if any((directory / file).exists() for file in _PROCESSOR_FILES):
        module.processor = transformers.AutoProcessor.from_pretrained(directory, **options)
    if sources.embeds(spec.options, spec.model_type):
        with contextlib.suppress(ValueError):  # each call for a vector raises it again
            recipe = recipe_of(directory, getattr(module, "tokenizer", None))
            if recipe is not None:
                module.sentence_recipe = recipe


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


_told: set[tuple[str, str]] = set()


def tell_once(name: str, text: str) -> None:
    """Logs a warning about the model `name`, unless this process has logged it before."""
    text = " ".join(_COLOURS.sub("", text).split())
    if (name, text) not in _told:
        _told.add((name, text))
        log.warning("%s: %s", name, printable(text, MOST_TOLD))


class _Records(logging.Filter):
    """Removes the records of the LIBRARIES in this thread from a handler, and keeps the warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.warnings: dict[str, None] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self.thread or record.name.partition(".")[0] not in LIBRARIES:
            return True
        if record.levelno >= logging.WARNING:
            self.warnings[record.getMessage()] = None
        return False


_active_loads = 0
_had_bars = False
_loads_lock = forks.freed(threading.Lock())


@contextlib.contextmanager
def _heard(name: str) -> Iterator[None]:
    """A context manager in which the LIBRARIES print nothing.

    Their warnings are logged at its end, each once, under the `name` of the model. After the last of
    several simultaneous loads, the user's progress bars are shown again.
    """
    global _active_loads, _had_bars
    import_whole("transformers.utils")
    from transformers.utils import logging as users

    records = _Records()
    handlers = [handler for library in LIBRARIES for handler in _handlers(library)]
    for handler in handlers:
        handler.addFilter(records)
    with _loads_lock:
        if _active_loads == 0:
            _had_bars = users.is_progress_bar_enabled()
            users.disable_progress_bar()
        _active_loads += 1
    try:
        yield
    finally:
        with _loads_lock:
            _active_loads -= 1
            if _active_loads == 0 and _had_bars:
                users.enable_progress_bar()
        for handler in handlers:
            handler.removeFilter(records)
        for text in records.warnings:
            if "LOAD REPORT" not in text:  # `_require_whole` has said it in one sentence
                tell_once(name, text)


def _handlers(library: str) -> Iterator[logging.Handler]:
    """The handlers that get the records of the logger `library`."""
    logger: logging.Logger | None = logging.getLogger(library)
    while logger:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None
