"""The backend for Hugging Face model directories and downloaded hub ids.

The backend reads safetensors only and uses no network. A model from disk may be dropped and loaded
again, since its source has its weights. Before a drop, the backend proves that no weight was
changed in place. After a reload, it proves that the source has the same weights. Between drop and
reload, guards (see `swap.py`) replace the bytes, and the module keeps its hooks, modes and
settings. Users get the transformers module. It has `.tokenizer` or `.processor` if the directory
has files for them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import signal
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import threads
from ...devices.probe import Probe
from ...errors import BadSetting, CannotGovern, GpuError, LoadFailed, first_line
from ...facts import HOST, Evidence, ModelSpec, Share, Shares
from ...safe_text import printable
from ...threads import all_outside_modes, import_whole, with_own_modes
from ..base import Progress, is_out_of_memory
from ..formats import safetensors, sources
from ..formats.safetensors import Checkpoint
from . import storages as st
from . import swap
from .park_file import Written, in_place
from .sentence_modules import recipe_of
from .shadows import CopiedPart, SharedCopy, TornCopy, content_id, digest
from .torch_backend import TorchBackend, release_cached
from .torch_model import TorchModel, assignments, dropped_sentence, ending, nowhere


class TransformersModel(TorchModel):
    """A model from disk, with the digests of the bytes that were loaded from its source."""

    checkpoint: Checkpoint
    # False if weights were changed, or if the source lacks weights, which were then initialised.
    reproducible = True
    # Layout of a storage -> the digest of its bytes after the load.
    given: dict[tuple[Any, ...], torch.Tensor] = {}
    files = ""  # the id of its unchanged files, if other processes may share its copy
    shared: SharedCopy | None = None  # the copy that other processes share, during the load
    keeps_copy = False  # whether a copy of its bytes stays in host memory, at the load
    part: CopiedPart | None = None  # the model's part of the pages that other processes share
    proven = False  # `unchanged` has compared the bytes, so that the next `drop` need not


@all_outside_modes
class TransformersBackend(TorchBackend):
    """Loads models from the directories that Hugging Face's libraries write.

    Options of a model: dtype, task, attn_implementation, revision, trust_remote_code.
    """

    name = "transformers"
    shares = True  # copies in host memory are shared with other processes

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self._checkpoints: dict[str, Checkpoint] = {}  # by source
        # Maps a module to the digests of the bytes from its source, also while it is dropped.
        self._given: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], torch.Tensor]]
        self._given = weakref.WeakKeyDictionary()

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """The bytes of the weights of `spec` in memory, computed from the safetensors headers."""
        dtype_of(spec)
        return sources.of_checkpoint(self._known(spec), spec.options, spec.model_type)

    def _known(self, spec: ModelSpec) -> Checkpoint:
        """The headers of the source of `spec`, read again if the files have changed."""
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
        copies: Collection[int] | None = None,
        found_only: bool = False,
    ) -> TransformersModel:
        """Loads the model of `spec` onto its `shares`.

        With `shadow`, a copy stays in host memory. `copies` are the pids of processes that may
        share this copy; None means that the copy is private. If one of these processes has a copy
        already, that copy is used. If none has one and `found_only` is true, no copy stays. Raises
        BadSetting, NotAModel, LoadFailed, CannotGovern, and the device's out-of-memory error.
        """
        given: dict[str, Any] = {"progress": progress, "into": into}
        try:
            return self._loaded(spec, shares, copies, found_only, shadow=shadow, **given)
        except TornCopy:  # the copy was damaged: the model is read from its files
            kept = shadow and not found_only
            return self._loaded(spec, shares, None, False, shadow=kept, **given)

    def _loaded(
        self,
        spec: ModelSpec,
        shares: Shares,
        copies: Collection[int] | None,
        found_only: bool,
        *,
        progress: Progress | None,
        into: Any,
        shadow: bool,
    ) -> TransformersModel:
        checkpoint = _read(spec)
        _refuse_options(spec, checkpoint)
        with untouched(checkpoint.weight_files, spec.name) as check:
            if not checkpoint.unchanged():  # since its header was read
                checkpoint = _read(spec)
            model = None if copies is None else self._of_shared(spec, checkpoint, copies)
            if model is None:
                model = self._of_files(spec, checkpoint)
                shadow = shadow and not found_only
                if copies is not None and model.reproducible:
                    model.files = content_id(checkpoint, dtype_of(spec))
            model.keeps_copy = shadow
            self._settled(model, shares, partial(_leg, check, progress), into)
        try:
            self._given[model.module] = model.given = model.given or _digests(model)
            groups = st.grouped(st.slots(model.module))
            model.digests = {group.storage._cdata: model.given[group.layout] for group in groups}
            shared, model.shared = model.shared, None
            if shared is not None:
                model.part = shared.part
                if shared.is_new:
                    shared.complete(model.given)
        except BaseException as error:
            self.drop(model)
            st.let_go(error)
            raise
        return model

    def files_of(self, spec: ModelSpec) -> str:
        """The id that a shared copy of the files of `spec` has; empty if it is unknown."""
        try:
            return content_id(self._known(spec), dtype_of(spec))
        except (GpuError, OSError):  # the load reports the error
            return ""

    def _of_files(self, spec: ModelSpec, checkpoint: Checkpoint) -> TransformersModel:
        """The model of `spec` on the CPU, loaded from its files. Raises LoadFailed."""
        try:
            module, complete = built(spec, checkpoint)
        except BaseException as error:
            st.let_go(error)
            raise
        model = TransformersModel(spec, module)
        model.checkpoint, model.reproducible = checkpoint, complete
        return model

    def _of_shared(
        self, spec: ModelSpec, checkpoint: Checkpoint, copies: Collection[int]
    ) -> TransformersModel | None:
        """The model of `spec`, made from a usable copy that one of the processes `copies` has, or None."""
        found = SharedCopy.found(copies, content_id(checkpoint, dtype_of(spec)))
        if found is None:
            return None
        try:
            found.map(self.probe.place(HOST))
        except (GpuError, OSError):  # the host has no room
            return None
        try:
            module = built_from(spec, checkpoint, found.weights(checkpoint.tensors))
        except BaseException as error:
            st.let_go(error)
            raise
        if module is None:
            return None
        model = TransformersModel(spec, module)
        if not found.fits(model.groups()):
            return None
        model.checkpoint, model.reproducible, model.shared = checkpoint, True, found
        return model

    def _arrive(  # type: ignore[override]
        self, model: TransformersModel, shares: Shares, progress: Progress | None
    ) -> None:
        """As `TorchBackend._arrive`. The bytes are first copied to host memory if they stay there.

        Raises TornCopy if `model` was made from shared pages and differs from their index.
        """
        shadow = model.keeps_copy
        if shadow and not model.bases and self._is_on_host(model, progress):
            progress = None
        self._place(model, shares, progress, shadow)
        if model.shared and not model.shared.is_new:
            model.given = model.shared.proven(st.grouped(st.slots(model.module)))
            if not model.given:
                model.given = _digests(model)
                model.shared.require_same(model.given)

    def _is_on_host(self, model: TransformersModel, progress: Progress | None) -> bool:
        """Copies the bytes of a new `model` to host memory, in shared pages if it has some: whether there was room."""
        try:
            if model.shared is None and model.files:
                model.shared = SharedCopy.new(model.groups(), model.files)
            there = (Share(HOST, st.nbytes(model.groups())),)
            self._place(model, there, progress, shared=model.shared)
            return True
        except Exception as error:
            if not (is_out_of_memory(error) or isinstance(error, OSError)):
                raise
            st.let_go(error)
            return False

    def keeps_shadow(self, spec: ModelSpec) -> bool:
        return self.can_move

    def move(self, model: TransformersModel, shares: Shares, shadow: bool = False) -> None:
        """As `TorchBackend.move`. Only of bytes that are unchanged since the load a copy stays.

        One of changed bytes would have to be made again when the model leaves.
        """
        super().move(model, shares, shadow)
        known = model.digests.keys() & model.shadow.keys()
        if known != model.shadow.keys():
            model.shadow = {storage: model.shadow[storage] for storage in known}

    def write(
        self, model: TransformersModel, directory: Path, *, encrypted: bool = False
    ) -> Written:
        """As `TorchBackend.write`. The bytes are compared with the source, so `unchanged` reads no file."""
        written = super().write(model, directory, encrypted=encrypted)
        for group in model.groups():
            if group.storage._cdata in written.stored and model.reproducible:
                given = model.given.get(group.layout)
                with in_place(model, written.exchanges):
                    now = digest(model.content(group))
                model.reproducible = given is not None and torch.equal(given, now)
        return written

    def free_shadow(self, model: TransformersModel) -> None:
        model.shadow = {}

    def drop(self, model: TransformersModel) -> None:
        """Frees the bytes of `model`, even if user code has the module, whose weights then raise.

        If `unchanged` is False, or if the interpreter ends, all weights stay with the module; see
        `TorchBackend.drop`.
        """
        proven, model.proven = model.proven, False
        if not model.memories or ending.is_set() or not (proven or self.unchanged(model)):
            super().drop(model)
            return
        model.proven = False
        if model.dispatch:
            model.dispatch.remove()
        left = model.memories
        exchange, calls = swap.Exchange(), []
        sentence = dropped_sentence(model.spec.name)
        for group in model.groups():
            if swap.can_guard(group.storage.device):
                exchange.take(group.storage, sentence)
                if group.storage.device.type == "cpu":
                    calls += [swap.unreadable(tensor, sentence) for tensor in group.tensors]
            else:
                calls += st.emptying(group.slots)
        with model.gate:
            try:
                swap.at_once([*exchange.calls, *calls, *assignments(model, **nowhere())])
            except BaseException:
                if model.memories:
                    exchange.undo()
                raise
        del exchange, calls, group  # the old bytes are freed with the last reference to them
        release_cached(left)

    def _refill(  # type: ignore[override]
        self, model: TransformersModel, held: nn.Module
    ) -> None:
        """As `TorchBackend._refill`. Raises LoadFailed if `held` was loaded with other weights of the source."""
        before = self._given.get(held)
        if before is not None:
            model.given = _digests(model)
        # If the tensors are others, the base refuses them.
        if (
            before is None
            or model.given.keys() != before.keys()
            or all(torch.equal(before[layout], model.given[layout]) for layout in before)
        ):
            return super()._refill(model, held)
        name, source = model.spec.name, model.spec.source
        raise LoadFailed(
            f"{name} was unloaded, and its source has other weights now: {source}.\n"
            f"  To load those:  rt.forget({name!r}), then  rt.register({name!r}, {source!r})",
            name=name,
            source=source,
            mistake=True,
        )

    def pieces(
        self, spec: ModelSpec, origin: Any = None, model: TransformersModel | None = None
    ) -> tuple[int, ...]:
        """The bytes of the pieces of `model`, or of the source of `spec` if `model` is None.

        The source's sizes are read from the headers. If the tensors' names do not show the order of
        the pieces, the module is built without data. Empty if the source cannot be read.
        """
        if model:
            return super().pieces(spec, origin, model)
        try:
            checkpoint = self._known(spec)
        except GpuError:  # the source is not here yet; the size was declared
            return ()
        return checkpoint.pieces() or super().pieces(spec, partial(without_data, spec, checkpoint))

    def droppable(self, model: TransformersModel) -> bool:
        """Whether `model` has the same tensors as after its load, and its source is unchanged.

        False with gradients, with storages of another model, and while something else needs its
        bytes: a live graph, a view, a state dict. `unchanged` compares the bytes.
        """
        if not self.can_move:
            return False  # after a drop and a load, views of its weights would keep the old ones
        if not model.memories or not model.reproducible or not model.checkpoint.unchanged():
            return False
        if model.is_shared or model.bases or model.needed_elsewhere():
            return False
        layouts = {group.layout for group in st.grouped(st.slots(model.module))}
        return layouts == model.given.keys()

    def unchanged(self, model: TransformersModel) -> bool:
        """Whether `model` is droppable, and every storage still has the digest of its loaded bytes.

        `fingerprint.digest` states what equal digests prove. After one difference, the model is
        never droppable again. Those of bytes in a file were compared when they were written.
        """
        if not self.droppable(model):
            return False
        now = _digests(model)
        model.reproducible = all(torch.equal(model.given[layout], now[layout]) for layout in now)
        model.proven = model.reproducible
        return model.reproducible


def _read(spec: ModelSpec) -> Checkpoint:
    directory = sources.directory(spec.source, spec.name, spec.options.get("revision"))
    return safetensors.read(directory, spec.name)


def _refuse_options(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Raises CannotGovern for a quantised model."""
    if "quantization_config" in checkpoint.config:
        quantization = checkpoint.config["quantization_config"]
        method = quantization.get("quant_method", "an unknown method")
        why = f"it is quantised by {method}, which keeps state outside its parameters"
        raise CannotGovern(f"{spec.name} cannot be governed: {why}.", name=spec.name, why=why)


def _digests(model: TransformersModel) -> dict[tuple[Any, ...], torch.Tensor]:
    """The digest of the bytes of each storage of the `model` that is in no file, by the storage's layout."""
    groups = [
        group
        for group in st.grouped(st.slots(model.module))
        if group.storage._cdata not in model.stored
    ]
    contents = {group.layout: model.content(group) for group in groups}
    devices = {content.device for content in contents.values()}
    st.synchronise(devices)  # side streams may still write
    return {layout: digest(content) for layout, content in contents.items()}


def _leg(check: Callable[[], None], progress: Progress | None, done: int, total: int) -> None:
    """The progress callback of each load, which can be interrupted between two callbacks."""
    check()
    if progress:
        progress(done, total)


# -- the transformers module of a model directory, built on the CPU

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
    wanted = spec.options.get("dtype")
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
    # The repository's own code may be registered for one of the Auto classes.
    own = (name for name in config.get("auto_map", {}) if name.startswith("AutoModel"))
    name = AUTO_CLASSES.get(task or spec.model_type) or next(own, "AutoModel")
    import_whole("transformers", name)
    return getattr(transformers, name)


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
    try:
        with _heard(spec.name):
            module, info = _from_pretrained(
                spec,
                _model_class(spec, checkpoint.config),
                checkpoint.directory,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # transformers' own error names no tensor
            )
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

    try:
        with _heard(spec.name):
            kind, config = type(without_data(spec, checkpoint)), _config(spec, checkpoint)
            module, info = _from_pretrained(spec, kind, None, config=config, state_dict=weights)
            if (checkpoint.directory / "generation_config.json").exists():
                module.generation_config = GenerationConfig.from_pretrained(checkpoint.directory)
            _attach_files(module, spec, checkpoint.directory)
    except Exception as error:  # the load from the files reports what is wrong
        log.debug("%s is read from its files: %s", spec.name, first_line(error))
        return None
    whole = not info["missing_keys"] and not info["mismatched_keys"]
    return module if whole and not info["unexpected_keys"] else None


def _from_pretrained(
    spec: ModelSpec, kind: Any, source: Path | None, **more: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """The module of the class `kind`, and transformers' report about its tensors."""
    before = torch.get_rng_state()
    more |= {key: spec.options[key] for key in ("attn_implementation",) if key in spec.options}
    more |= {"dtype": dtype_of(spec) or "auto", "output_loading_info": True, **_trust(spec)}
    module, info = kind.from_pretrained(source, **more)
    if info["missing_keys"] or info["mismatched_keys"]:  # these drew random values
        torch.set_rng_state(before)
    return module, info


def _trust(spec: ModelSpec) -> dict[str, bool]:
    """Whether code of the model's directory may run. If left out, transformers asks on the terminal."""
    return {"trust_remote_code": bool(spec.options.get("trust_remote_code"))}


def _failed(spec: ModelSpec, directory: Path, error: Exception) -> LoadFailed:
    """The error for a load of the model of `spec` that failed with `error`."""
    why = first_line(error)
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
_loads_lock = threads.freed(threading.Lock())


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


# -- the files of a model, unchanged while a load has them mapped into memory
#
# A process that reads a mapped page beyond the end of a file is killed (SIGBUS), and with it the
# whole notebook. So a load holds a read lease of the operating system (fcntl) on each file. If
# another process opens such a file for writing, or truncates it, that process waits until the load
# has ended. The load fails once it notices the waiting process. The system grants a lease to the
# owner of a file and to root, on local file systems. A file without a lease is unprotected.


@contextlib.contextmanager
def untouched(paths: Iterable[str], name: str) -> Iterator[Callable[[], None]]:
    """A context manager that keeps the files `paths` of the model `name` unchanged.

    The value is a function that raises LoadFailed once a process waits to write one of the files.
    Call this function every few seconds, because after /proc/sys/fs/lease-break-time (45 s) the
    operating system lets the waiting process continue.
    """
    leased = {path: file for path in paths if (file := _leased(path)) is not None}

    def check() -> None:
        for path, file in leased.items():
            if fcntl.fcntl(file, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
                raise LoadFailed(
                    f"{name} cannot be loaded: another process started to write {path}.\n"
                    f"  Load it again once the file is complete.",
                    name=name,
                    source=path,
                )

    try:
        yield check
    finally:
        for file in leased.values():
            # Closing the file does not end the lease if a forked child has inherited the file.
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            os.close(file)


def _leased(path: str) -> int | None:
    """A descriptor of the file `path` with a read lease on it; None if the system grants no lease."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the load itself reports a file that cannot be opened
        return None
    try:
        # The usual signal, SIGIO, would end this process. SIGURG is ignored.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except (OSError, AttributeError):  # not granted, or not Linux
        os.close(file)
        return None
    return file
