"""Hugging Face model directories, and hub ids that were downloaded before: safetensors only, nothing from the network.

A model from disk may be dropped and loaded again, since its source has it; so it is first proven that no weight was
changed in place. What users hold is the transformers module, with `.tokenizer` or `.processor` where there is one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...devices.probe import Probe
from ...errors import BadSetting, CannotGovern, GpuError, LoadFailed
from ...facts import Evidence, ModelSpec, Shares
from ..base import Progress, is_out_of_memory
from ..formats import safetensors, sources
from ..formats.safetensors import Checkpoint
from . import storages as st
from .fingerprint import digest
from .torch_backend import TorchBackend, TorchModel

AUTO_CLASSES = {
    "llm": "AutoModelForCausalLM",
    "embedding": "AutoModel",
    "reranker": "AutoModelForSequenceClassification",
    "vision": "AutoModelForImageTextToText",
    "causal-lm": "AutoModelForCausalLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "feature-extraction": "AutoModel",
}
_PASSED_ON = ("attn_implementation", "trust_remote_code", "revision")
_NOT_OURS = (
    "device_map",
    "quantization_config",
    "load_in_8bit",
    "load_in_4bit",
    "offload_folder",
    "max_memory",
)
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
)
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


class TransformersModel(TorchModel):
    """A model from disk, with the proof of what its source gave."""

    checkpoint: Checkpoint
    reproducible = (
        True  # False: the source left weights to be made up, or they were seen to have changed
    )
    given: dict[
        tuple[Any, ...], torch.Tensor
    ] = {}  # layout of a storage -> the digest of its bytes when loaded


class TransformersBackend(TorchBackend):
    """Model directories. Options: dtype, task, attn_implementation, revision, trust_remote_code."""

    name = "transformers"

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self._read: dict[
            str, Checkpoint
        ] = {}  # by source, as long as its files are those that were read

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """The weights as they will be in memory, from the safetensors headers."""
        dtype = _dtype(spec)
        return sources.of_checkpoint(self._known(spec), dtype.itemsize if dtype else None)

    def _known(self, spec: ModelSpec) -> Checkpoint:
        """The source's headers, read again only where its files have changed."""
        checkpoint = self._read.get(spec.source)
        if checkpoint is None or not checkpoint.unchanged():
            checkpoint = self._read[spec.source] = self._checkpoint(spec)
        return checkpoint

    def load(
        self,
        spec: ModelSpec,
        shares: Shares,
        origin: Any = None,
        *,
        progress: Progress | None = None,
        into: Any = None,
    ) -> TransformersModel:
        checkpoint = self._checkpoint(spec)
        for option in _NOT_OURS:
            if option in spec.options:
                raise BadSetting(
                    option, spec.options[option], "left out: where a model goes is decided here"
                )
        if "quantization_config" in checkpoint.config:
            method = checkpoint.config["quantization_config"].get(
                "quant_method", "an unknown method"
            )
            why = f"it is quantised by {method}, which keeps state outside its parameters"
            raise CannotGovern(f"{spec.name} cannot be governed: {why}.", name=spec.name, why=why)
        try:
            module, complete = _built(spec, checkpoint)
        except BaseException as error:
            st.let_go(error)
            raise
        model = TransformersModel(spec, module)
        model.checkpoint, model.reproducible = checkpoint, complete
        del module
        self._settled(model, shares, progress or _quiet_progress, into)
        try:
            model.given = _fingerprint(model)
        except BaseException as error:
            self.drop(model)
            st.let_go(error)
            raise
        return model

    def pieces(
        self, spec: ModelSpec, origin: Any = None, model: TransformersModel | None = None
    ) -> tuple[int, ...]:
        """From the headers, where the names tell the order; else from the module, built without data."""
        if model:
            return super().pieces(spec, origin, model)
        try:
            checkpoint = self._known(spec)
        except GpuError:  # its size was declared, and it is not here yet
            return ()
        return checkpoint.pieces() or super().pieces(spec, partial(_without_data, spec, checkpoint))

    def droppable(self, model: TransformersModel) -> bool:
        """Same tensors as loaded, no gradients, source untouched; the bytes themselves are for `unchanged` to prove."""
        if not model.memories or not model.reproducible or not model.checkpoint.unchanged():
            return False
        return {group.layout for group in st.grouped(st.slots(model.module))} == model.given.keys()

    def unchanged(self, model: TransformersModel) -> bool:
        """Every storage has the digest of what the source gave (see digests.py for what that proves), and the source's
        files have their size, time of change and inode still. Once seen to differ, it stays undroppable."""
        if not self.droppable(model):
            return False
        now = _fingerprint(model)
        model.reproducible = all(torch.equal(model.given[layout], now[layout]) for layout in now)
        return model.reproducible

    def _checkpoint(self, spec: ModelSpec) -> Checkpoint:
        return safetensors.read(
            sources.directory(spec.source, spec.name, spec.options.get("revision")), spec.name
        )


def _fingerprint(model: TransformersModel) -> dict[tuple[Any, ...], torch.Tensor]:
    return {group.layout: digest(group.bytes) for group in st.grouped(st.slots(model.module))}


def _quiet_progress(done: int, total: int) -> None:
    """A load goes by legs even when nobody watches, so that it can be interrupted."""


def _dtype(spec: ModelSpec) -> torch.dtype | None:
    """The dtype that the options ask for; None: as stored."""
    wanted = spec.options.get("dtype", spec.options.get("torch_dtype"))
    if wanted is None or wanted == "auto":
        return None
    dtype = (
        wanted
        if isinstance(wanted, torch.dtype)
        else getattr(torch, str(wanted).removeprefix("torch."), None)
    )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise BadSetting("dtype", wanted, "auto, bfloat16, float16 or float32")
    return dtype


def _model_class(spec: ModelSpec, config: dict[str, Any]) -> Any:
    """The class that `task` or the model type asks for, else the one that the checkpoint was saved from."""
    import transformers

    task = spec.options.get("task")
    if task is not None and task not in AUTO_CLASSES:
        raise BadSetting("task", task, "one of " + ", ".join(AUTO_CLASSES))
    architecture = (config.get("architectures") or [""])[0]
    saved = getattr(transformers, architecture, None)
    known = isinstance(saved, type) and issubclass(saved, nn.Module)
    if known and task is None and _serves(architecture, spec.model_type):
        return saved
    name = AUTO_CLASSES.get(task or spec.model_type)
    if name is None:
        name = next(
            (auto for auto in config.get("auto_map", {}) if auto.startswith("AutoModel")),
            "AutoModel",
        )
    return getattr(transformers, name)


def _serves(architecture: str, model_type: str) -> bool:
    """Whether that architecture, as saved, is what this type of model needs.

    >>> _serves("BertForMaskedLM", "embedding"), _serves("BertModel", "embedding"), _serves("Qwen3ForCausalLM", "other")
    (False, True, True)
    """
    needed = {"llm": "For", "embedding": "Model", "reranker": "ForSequenceClassification"}.get(
        model_type, ""
    )
    return architecture.endswith(needed) if model_type != "llm" else needed in architecture


def _built(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[nn.Module, bool]:
    """The module on the CPU, and whether all its weights came from the source. Raises LoadFailed.

    Where no conversion was asked for, the weights are still the mapped files' own pages.
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
                dtype=_dtype(spec) or "auto",
                **options,
            )
            _attach(module, checkpoint.directory, options)
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


def _without_data(spec: ModelSpec, checkpoint: Checkpoint) -> nn.Module:
    """The module that such a load would give, its tensors on the meta device."""
    import transformers

    options = {key: spec.options[key] for key in ("trust_remote_code",) if key in spec.options}
    config = transformers.AutoConfig.from_pretrained(
        checkpoint.directory, local_files_only=True, **options
    )
    kind = _model_class(spec, checkpoint.config)
    with torch.device("meta"):
        return (kind.from_config if kind.__name__.startswith("Auto") else kind._from_config)(config)


def _attach(module: nn.Module, directory: Path, options: dict[str, Any]) -> None:
    """Gives the module its `.tokenizer` and `.processor`, where the directory has them."""
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
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_loads_now = 0
_said_before: tuple[int, bool] = (0, False)
_loads_lock = threading.Lock()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """No progress bars and no chatter on stderr meanwhile; the user's own settings are back after the last of several
    loads at once."""
    global _loads_now, _said_before
    from transformers.utils import logging

    with _loads_lock:
        if _loads_now == 0:
            _said_before = logging.get_verbosity(), logging.is_progress_bar_enabled()
            logging.set_verbosity_error()
            logging.disable_progress_bar()
        _loads_now += 1
    try:
        yield
    finally:
        with _loads_lock:
            _loads_now -= 1
            if _loads_now == 0:
                logging.set_verbosity(_said_before[0])
                if _said_before[1]:
                    logging.enable_progress_bar()
