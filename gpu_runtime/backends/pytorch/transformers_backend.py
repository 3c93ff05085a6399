"""The backend for Hugging Face model directories and downloaded hub ids.

The backend reads safetensors only and uses no network. A model from disk may be dropped and loaded
again, since its source has its weights. Before a drop, the backend proves that no weight was
changed in place. After a reload, it proves that the source has the same weights. Between drop and
reload, guards (see `swap.py`) replace the bytes, and the module keeps its hooks, modes and
settings. Users get the transformers module. It has `.tokenizer` or `.processor` if the directory
has files for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from ...devices.probe import Probe
from ...errors import CannotGovern, GpuError, LoadFailed
from ...facts import HOST, Evidence, ModelSpec, Shares
from ...torch_modes import all_outside_modes
from ..base import Progress
from ..formats import safetensors, sources
from ..formats.file_guard import untouched
from ..formats.safetensors import Checkpoint
from . import storages as st
from . import swap
from .fingerprint import digest
from .shared_copies import CopiedPart, SharedCopy, TornCopy, content_id
from .torch_backend import TorchBackend, release_cached
from .torch_model import TorchModel
from .transformers_module import built, built_from, dtype_of, without_data
from .two_phases import assignments, dropped_sentence, ending, nowhere


class TransformersModel(TorchModel):
    """A model from disk, with the digests of the bytes that were loaded from its source."""

    checkpoint: Checkpoint
    # False if weights were changed, or if the source lacks weights, which were then initialised.
    reproducible = True
    # Layout of a storage -> the digest of its bytes after the load.
    given: dict[tuple[Any, ...], torch.Tensor] = {}
    files = ""  # the id of its unchanged files, if other processes may share its copy
    shared: SharedCopy | None = None  # the copy that other processes share, during the load
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
            self._settled(model, shares, partial(_leg, check, progress), into, shadow)
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

    def _shared(self, model: TorchModel) -> SharedCopy | None:
        """The shared pages from which `model` was made, or new pages for it, or None."""
        if not isinstance(model, TransformersModel):
            return None
        if model.shared is None and model.files:
            model.shared = SharedCopy.new(model.groups(), model.files)
        return model.shared

    def _compare(self, model: TorchModel) -> None:
        """Raises TornCopy if `model` was made from shared pages and differs from their index."""
        if isinstance(model, TransformersModel) and model.shared and not model.shared.is_new:
            model.given = model.shared.proven(st.grouped(st.slots(model.module)))
            if not model.given:
                model.given = _digests(model)
                model.shared.require_same(model.given)

    def keeps_shadow(self, spec: ModelSpec) -> bool:
        return swap.can_swap()

    def move(self, model: TransformersModel, shares: Shares, shadow: bool = False) -> None:
        """As `TorchBackend.move`. Only of bytes that are unchanged since the load a copy stays.

        One of changed bytes would have to be made again when the model leaves.
        """
        super().move(model, shares, shadow)
        known = model.digests.keys() & model.shadow.keys()
        if known != model.shadow.keys():
            model.shadow = {storage: model.shadow[storage] for storage in known}

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
        try:
            swap.at_once([*exchange.calls, *calls, *assignments(model, **nowhere())])
        except BaseException:
            if model.memories:
                exchange.undo()
            raise
        del exchange, calls, group  # the old bytes are freed with the last reference to them
        release_cached(left)

    def _require_same(self, model: TorchModel, held: nn.Module) -> None:
        """Raises LoadFailed if the source now has other weights than when `held` was loaded."""
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
        if not model.memories or not model.reproducible or not model.checkpoint.unchanged():
            return False
        if model.is_shared or model.bases or model.needed_elsewhere():
            return False
        layouts = {group.layout for group in st.grouped(st.slots(model.module))}
        return layouts == model.given.keys()

    def unchanged(self, model: TransformersModel) -> bool:
        """Whether `model` is droppable, and every storage still has the digest of its loaded bytes.

        `fingerprint.digest` states what equal digests prove. After one difference, the model is
        never droppable again.
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
    """The digest of the bytes of each storage of the `model`, by the storage's layout."""
    groups = st.grouped(st.slots(model.module))
    contents = {group.layout: model.content(group) for group in groups}
    devices = {content.device for content in contents.values()}
    st.synchronise(devices)  # side streams may still write
    return {layout: digest(content) for layout, content in contents.items()}


def _leg(check: Callable[[], None], progress: Progress | None, done: int, total: int) -> None:
    """The progress callback of each load, which can be interrupted between two callbacks."""
    check()
    if progress:
        progress(done, total)
