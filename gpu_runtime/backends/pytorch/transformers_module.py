"""Builds the transformers module of a model directory on the CPU."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import forks
from ...errors import BadSetting, GpuError, LoadFailed
from ...facts import ModelSpec
from ..base import is_out_of_memory
from ..formats.safetensors import Checkpoint

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
_PASSED_ON = ("attn_implementation", "trust_remote_code", "revision")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
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
    """The class of the module. Raises BadSetting for an unknown task.

    If no task is set, and the class in `config` fits the model type, the result is that class.
    Otherwise it is the class for the task or the model type, or a default.
    """
    import transformers

    task = spec.options.get("task")
    if task is not None and task not in AUTO_CLASSES:
        raise BadSetting("task", task, "one of " + ", ".join(AUTO_CLASSES))
    architecture = (config.get("architectures") or [""])[0]
    saved = getattr(transformers, architecture, None)
    is_known = isinstance(saved, type) and issubclass(saved, nn.Module)
    if is_known and task is None and _serves(architecture, spec.model_type):
        return saved
    name = AUTO_CLASSES.get(task or spec.model_type) or _auto_class_in(config)
    return getattr(transformers, name)


def _auto_class_in(config: dict[str, Any]) -> str:
    """The name of the Auto class for which `config` registers the repository's own code.

    AutoModel if there is none.
    """
    for name in config.get("auto_map", {}):
        if name.startswith("AutoModel"):
            return name
    return "AutoModel"


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


def built(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[nn.Module, bool]:
    """The module on the CPU, and whether all its weights came from the source. Raises LoadFailed.

    If the dtype is not converted, the weights are in mapped pages of the files.
    """
    options = {key: spec.options[key] for key in _PASSED_ON if key in spec.options}
    options.pop("revision", None)  # the directory is of that revision already
    try:
        with _silence():
            module, info = _model_class(spec, checkpoint.config).from_pretrained(
                checkpoint.directory,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                dtype=dtype_of(spec) or "auto",
                **options,
            )
            _attach_tokenizer(module, checkpoint.directory, options)
    except GpuError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise LoadFailed(
            f"{spec.name}: {checkpoint.directory} could not be loaded: {_first_line(error)}",
            name=spec.name,
            source=spec.source,
        ) from error
    return module, not info["missing_keys"] and not info["mismatched_keys"]


def built_from(
    spec: ModelSpec, checkpoint: Checkpoint, weights: dict[str, torch.Tensor]
) -> nn.Module | None:
    """The module of `spec` on the CPU, made from the tensors `weights`, without the weight files.

    The result is None if the model cannot be built in this way.
    """
    from transformers import GenerationConfig

    kind = type(without_data(spec, checkpoint))
    options = {key: spec.options[key] for key in ("attn_implementation",) if key in spec.options}
    try:
        with _silence():
            module, info = kind.from_pretrained(  # type: ignore[attr-defined]
                None,
                config=_config(spec, checkpoint),
                state_dict=weights,
                output_loading_info=True,
                dtype=dtype_of(spec) or "auto",
                **options,
            )
            if (checkpoint.directory / "generation_config.json").exists():
                module.generation_config = GenerationConfig.from_pretrained(checkpoint.directory)
            _attach_tokenizer(module, checkpoint.directory, spec.options)
    except Exception as error:  # the load from the files reports what is wrong
        log.debug("%s is read from its files: %s", spec.name, _first_line(error))
        return None
    whole = not info["missing_keys"] and not info["mismatched_keys"]
    return module if whole and not info["unexpected_keys"] else None


def without_data(spec: ModelSpec, checkpoint: Checkpoint) -> nn.Module:
    """The module of `spec` with its tensors on the meta device."""
    config = _config(spec, checkpoint)
    kind = _model_class(spec, checkpoint.config)
    make = kind.from_config if kind.__name__.startswith("Auto") else kind._from_config
    with torch.device("meta"):
        return make(config)


def _config(spec: ModelSpec, checkpoint: Checkpoint) -> Any:
    import transformers

    options = {key: spec.options[key] for key in ("trust_remote_code",) if key in spec.options}
    return transformers.AutoConfig.from_pretrained(
        checkpoint.directory, local_files_only=True, **options
    )


def _attach_tokenizer(module: nn.Module, directory: Path, options: dict[str, Any]) -> None:
    """Sets `.tokenizer` and `.processor` of the `module`, if the `directory` has files for them."""
    import transformers

    trust = {key: value for key, value in options.items() if key == "trust_remote_code"}
    if any((directory / file).exists() for file in _TOKENIZER_FILES):
        module.tokenizer = transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, **trust
        )
    if any((directory / file).exists() for file in _PROCESSOR_FILES):
        module.processor = transformers.AutoProcessor.from_pretrained(
            directory, local_files_only=True, **trust
        )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


_active_loads = 0
_users_settings: tuple[int, bool] = (0, False)
_loads_lock = forks.freed(threading.Lock())


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """A context manager in which transformers shows no progress bars and logs only errors.

    After the last of several simultaneous loads, the user's settings are restored.
    """
    global _active_loads, _users_settings
    from transformers.utils import logging

    with _loads_lock:
        if _active_loads == 0:
            _users_settings = logging.get_verbosity(), logging.is_progress_bar_enabled()
            logging.set_verbosity_error()
            logging.disable_progress_bar()
        _active_loads += 1
    try:
        yield
    finally:
        with _loads_lock:
            _active_loads -= 1
            if _active_loads == 0:
                verbosity, had_bars = _users_settings
                logging.set_verbosity(verbosity)
                if had_bars:
                    logging.enable_progress_bar()
