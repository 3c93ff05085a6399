"""The backend for Hugging Face model directories and downloaded hub ids.

It reads safetensors only and uses no network. A model from disk may be dropped and loaded again,
since its source has it. Before a drop, the backend proves that no weight was changed in place.
After a reload, it proves that the source has the same weights. Between the two, guards (see
`swap.py`) replace the bytes, and the module keeps its hooks, modes and settings. Users hold the
transformers module. It has `.tokenizer` or `.processor` if the directory has one.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import forks
from ...devices.probe import Probe
from ...errors import BadSetting, CannotGovern, GpuError, LoadFailed
from ...facts import Evidence, ModelSpec, Shares
from ..base import Progress, is_out_of_memory
from ..formats import safetensors, sources
from ..formats.file_guard import untouched
from ..formats.safetensors import Checkpoint
from . import storages as st
from . import swap
from .fingerprint import digest
from .torch_backend import TorchBackend, release_cached
from .torch_model import TorchModel
from .two_phases import assignments, dropped_sentence, nowhere

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
_RESERVED_OPTIONS = (
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
    """A model from disk, with the digests of the bytes that its source gave."""

    checkpoint: Checkpoint
    # False if the source lacks weights, which were then initialised, or if weights were changed.
    reproducible = True
    # Layout of a storage -> the digest of its bytes after the load.
    given: dict[tuple[Any, ...], torch.Tensor] = {}
    # The next `drop` may free the bytes: `unchanged` has just compared them.
    proven = False


class TransformersBackend(TorchBackend):
    """Loads model directories.

    Options of a model: dtype, task, attn_implementation, revision, trust_remote_code.
    """

    name = "transformers"

    def __init__(self, probe: Probe) -> None:
        """Moves models between the devices of `probe`."""
        super().__init__(probe)
        self._checkpoints: dict[str, Checkpoint] = {}  # by source
        # Maps a module to the digests of the bytes from its source, also while it is dropped.
        self._given: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], torch.Tensor]]
        self._given = weakref.WeakKeyDictionary()

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """The bytes of the weights of `spec` in memory, from the safetensors headers.

        `origin` is ignored. Raises NotAModel, LoadFailed.
        """
        dtype = _dtype(spec)
        return sources.of_checkpoint(self._known(spec), dtype.itemsize if dtype else None)

    def _known(self, spec: ModelSpec) -> Checkpoint:
        """The source's headers. They are read again only if the files have changed."""
        checkpoint = self._checkpoints.get(spec.source)
        if checkpoint is None or not checkpoint.unchanged():
            checkpoint = self._checkpoints[spec.source] = _read(spec)
        return checkpoint

    def load(
        self,
        spec: ModelSpec,
        shares: Shares,
        origin: Any = None,
        *,
        progress: Progress | None = None,
        into: Any = None,
        shadow: bool = False,
    ) -> TransformersModel:
        """Loads the model of `spec` onto its `shares`. `origin` is ignored.

        `progress` is called with bytes done and in total. `into` is a handle or a module of an earlier
        load, which gets the weights. With `shadow`, a copy stays in host memory. Raises BadSetting,
        NotAModel, LoadFailed, CannotGovern, and the device's out-of-memory error.
        """
        checkpoint = _read(spec)
        _refuse_options(spec, checkpoint)
        with untouched(checkpoint.weight_files, spec.name) as check:
            if not checkpoint.unchanged():  # since its header was read
                checkpoint = _read(spec)
            try:
                module, complete = _built(spec, checkpoint)
            except BaseException as error:
                st.let_go(error)
                raise
            model = TransformersModel(spec, module)
            model.checkpoint, model.reproducible = checkpoint, complete
            del module
            self._settled(model, shares, partial(_leg, check, progress), into, shadow)
        try:
            self._given[model.module] = model.given = model.given or _digests(model)
            groups = st.grouped(st.slots(model.module))
            model.digests = {group.storage._cdata: model.given[group.layout] for group in groups}
        except BaseException as error:
            self.drop(model)
            st.let_go(error)
            raise
        return model

    def keeps_shadow(self, spec: ModelSpec) -> bool:
        """Whether a copy of the model of `spec` may stay in host memory: if storages can be swapped."""
        return swap.can_swap()

    def move(self, model: TransformersModel, shares: Shares, shadow: bool = False) -> None:
        """Moves all storages of `model`, or none; see `TorchBackend.move`.

        With `shadow`, only bytes stay in host memory that are those of the load: what was changed is
        copied again anyway.
        """
        super().move(model, shares, shadow)
        known = model.digests.keys() & model.shadow.keys()
        if known != model.shadow.keys():
            model.shadow = {storage: model.shadow[storage] for storage in known}

    def free_shadow(self, model: TransformersModel) -> None:
        """Frees the copies in host memory of the storages of `model` that are on a card."""
        model.shadow = {}

    def drop(self, model: TransformersModel) -> None:
        """Frees the bytes of `model`, also if user code holds the module. An access then raises an
        error.

        Only weights that the source has are freed. Other weights stay with the module. Repeating is
        safe.
        """
        proven, model.proven = model.proven, False
        if not model.memories or _ending.is_set() or not (proven or self.unchanged(model)):
            super().drop(model)
            return
        model.proven = False
        if model.dispatch:
            model.dispatch.remove()
        left = model.memories
        exchange, calls = swap.Exchange(), []
        for group in model.groups():
            if swap.can_guard(group.storage.device):
                exchange.take(group.storage, dropped_sentence(model.spec.name))
            else:
                calls += st.emptying(group.slots)
        try:
            swap.at_once([*exchange.calls, *calls, *assignments(model, **nowhere())])
        except BaseException:
            if model.memories:
                exchange.undo()
            raise
        del exchange, calls, group  # the old bytes are freed with the last reference to them
        release_cached(left)

    def _require_same(self, model: TorchModel, held: nn.Module) -> None:
        """Raises LoadFailed if the source has other weights than at the load of `held`."""
        before = self._given.get(held)
        if before is None or not isinstance(model, TransformersModel):
            return
        model.given = _digests(model)
        if model.given.keys() != before.keys():
            return  # `_refill` compares the tensors
        if all(torch.equal(before[layout], model.given[layout]) for layout in before):
            return
        name, source = model.spec.name, model.spec.source
        raise LoadFailed(
            f"{name} was unloaded, and its source has other weights now: {source}.\n"
            f"  To load those:  rt.forget({name!r}), then  rt.register({name!r}, {source!r})",
            name=name,
            source=source,
        )

    def pieces(
        self, spec: ModelSpec, origin: Any = None, model: TransformersModel | None = None
    ) -> tuple[int, ...]:
        """The bytes of the pieces of `model`. Without `model`, those of the model of `spec`.

        `origin` is ignored. Before a load the sizes come from the headers, if the names show the
        order. Otherwise they come from the module, built without data.
        """
        if model:
            return super().pieces(spec, origin, model)
        try:
            checkpoint = self._known(spec)
        except GpuError:  # the source is not here yet; the size was declared
            return ()
        return checkpoint.pieces() or super().pieces(spec, partial(_without_data, spec, checkpoint))

    def droppable(self, model: TransformersModel) -> bool:
        """Whether `model` has the tensors of its load, has no gradients, and its source is
        unchanged.

        The bytes themselves are not compared; `unchanged` does that.
        """
        if not model.memories or not model.reproducible or not model.checkpoint.unchanged():
            return False
        if model.is_shared or model.bases:
            return False
        layouts = {group.layout for group in st.grouped(st.slots(model.module))}
        return layouts == model.given.keys()

    def unchanged(self, model: TransformersModel) -> bool:
        """Whether every storage of `model` has the digest of the bytes that its source gave.

        The source's files must still have their size, inode and times of change. `fingerprint.digest`
        states what equal digests prove. After one difference the model is never droppable again.
        """
        if not self.droppable(model):
            return False
        now = _digests(model)
        model.reproducible = all(torch.equal(model.given[layout], now[layout]) for layout in now)
        model.proven = model.reproducible
        return model.reproducible


# Set when the interpreter ends. Then no code reads the weights, and comparing them takes seconds.
_ending = threading.Event()
atexit.register(_ending.set)


def _read(spec: ModelSpec) -> Checkpoint:
    directory = sources.directory(spec.source, spec.name, spec.options.get("revision"))
    return safetensors.read(directory, spec.name)


def _refuse_options(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Raises BadSetting for options that gpu-console decides, CannotGovern for a quantised model."""
    for option in _RESERVED_OPTIONS:
        if option in spec.options:
            expected = "left out: gpu-console decides where a model goes"
            raise BadSetting(option, spec.options[option], expected)
    if "quantization_config" in checkpoint.config:
        quantization = checkpoint.config["quantization_config"]
        method = quantization.get("quant_method", "an unknown method")
        why = f"it is quantised by {method}, which keeps state outside its parameters"
        raise CannotGovern(f"{spec.name} cannot be governed: {why}.", name=spec.name, why=why)


def _digests(model: TransformersModel) -> dict[tuple[Any, ...], torch.Tensor]:
    groups = st.grouped(st.slots(model.module))
    return {group.layout: digest(model.content(group)) for group in groups}


def _leg(check: Callable[[], None], progress: Progress | None, done: int, total: int) -> None:
    """Reports `progress` and calls `check`, which may raise.

    With a progress callback a load is made in parts, so that it can be interrupted between two
    parts.
    """
    check()
    if progress:
        progress(done, total)


def _dtype(spec: ModelSpec) -> torch.dtype | None:
    """The dtype that the options set. None means the stored dtype. Raises BadSetting."""
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
    """The class for the task or the model type. Without both, the class of the saved model."""
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
    """The class that the repository's own code registers. If there is none, AutoModel."""
    for name in config.get("auto_map", {}):
        if name.startswith("AutoModel"):
            return name
    return "AutoModel"


def _serves(architecture: str, model_type: str) -> bool:
    """Whether a saved architecture fits a model type.

    >>> _serves("BertForMaskedLM", "embedding"), _serves("BertModel", "embedding")
    (False, True)
    >>> _serves("Qwen3ForCausalLM", "other")
    True
    """
    if model_type == "llm":
        return "For" in architecture
    endings = {"embedding": "Model", "reranker": "ForSequenceClassification"}
    return architecture.endswith(endings.get(model_type, ""))


def _built(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[nn.Module, bool]:
    """The module on the CPU, and whether all its weights came from the source. Raises LoadFailed.

    Without a conversion of the dtype, the weights are still the pages of the mapped files.
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


def _without_data(spec: ModelSpec, checkpoint: Checkpoint) -> nn.Module:
    """The module of `spec` with its tensors on the meta device."""
    import transformers

    options = {key: spec.options[key] for key in ("trust_remote_code",) if key in spec.options}
    config = transformers.AutoConfig.from_pretrained(
        checkpoint.directory, local_files_only=True, **options
    )
    kind = _model_class(spec, checkpoint.config)
    make = kind.from_config if kind.__name__.startswith("Auto") else kind._from_config
    with torch.device("meta"):
        return make(config)


def _attach_tokenizer(module: nn.Module, directory: Path, options: dict[str, Any]) -> None:
    """Sets `.tokenizer` and `.processor` of the module, if the directory has their files."""
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
    """Inside the block, transformers shows no progress bars and writes no messages to stderr.

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
