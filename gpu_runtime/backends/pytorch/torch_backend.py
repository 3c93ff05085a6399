"""The backend for modules from live Python: modules that a factory returns, and adopted modules.

A move moves every storage of a module once: weights, also tied ones, views, gradients and optimizer
state. The Python objects stay the same. Over several cards a module is cut between its pieces
and runs with accelerate's hooks (`torch_model.py`). On a simulated card the tensors
stay CPU tensors, in memory that is charged to the card. This backend never drops the bytes of a
module, because a module that was made in Python exists nowhere else.

While a model is offloaded from a real card, its tensors still name that card as their device. A
guard (`swap.py`) replaces their bytes, and an access raises an error. If torch has no guards, the
tensors are rebound to the copies and become CPU tensors. Tensors that leave a simulated card stay
readable.
"""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...devices.probe import Probe
from ...devices.process_memory import Memory
from ...errors import CannotGovern, LoadFailed, StillInUse, first_line
from ...facts import HOST, Evidence, ModelSpec, Share, Shares
from ...threads import all_outside_modes, with_own_modes
from ...version import NEWER_TORCH
from ..base import Backend, Progress
from . import park_file, shadows, streams, swap
from . import storages as st
from .kernel_memory import without_collections
from .park_file import Written
from .shadows import SharedCopy
from .storages import Group, TensorSlot, grouped
from .torch_model import (
    Destination,
    Dispatch,
    TorchModel,
    TwoPhaseMove,
    assignments,
    destination,
    handing_over,
    holder,
    nowhere,
    pieces,
)

# Maps a probe to the models that all PyTorch backends have placed on its devices.
_models_of: weakref.WeakKeyDictionary[Probe, weakref.WeakSet[TorchModel]]
_models_of = weakref.WeakKeyDictionary()


@all_outside_modes
class TorchBackend(Backend):
    """Loads modules from factories, and adopts existing modules."""

    name = "torch"

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self._models = _models_of.setdefault(probe, weakref.WeakSet())
        memories = [probe.place(device.id) for device in probe.devices]
        self._by_torch_device = {card.torch: card for card in memories if card.torch != "cpu"}

    @property
    def can_move(self) -> bool:  # type: ignore[override]
        """Whether torch can move weights so that their views and graphs stay valid."""
        return not self._why_not()

    def _why_not(self) -> str:
        return swap.why_not(map(torch.device, self._by_torch_device))

    def refusal(self, name: str) -> CannotGovern | None:
        """The error of a move that would part the weights of the model `name` from views and graphs."""
        why = self._why_not()
        if not why:
            return None
        return CannotGovern(
            f"{name} stays where it is: {why}, so its views and graphs would keep the old weights.\n"
            f"  Install a newer torch, and restart:  {NEWER_TORCH}",
            name=name,
            why=why,
        )

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """The size of the module `origin`, or of the module that the factory `origin` builds.

        A factory is called on torch's meta device, without data. If it fails there, the size is
        unknown.
        """
        if isinstance(origin, nn.Module):
            size = st.nbytes(TorchModel(spec, origin).groups())
            return Evidence(size, "module", config=_config(origin))
        try:
            module = _without_data(origin)
            size = st.nbytes(st.grouped(st.slots(module)))
            return Evidence(size, "shapes", config=_config(module))
        except Exception as error:  # the factory is the user's code; the user reads its error
            why = f"{type(error).__name__}: {first_line(error)}"
            where = "on torch's meta device, which has shapes and no data"
            return Evidence(why_unknown=f"its factory failed {where} ({why})")

    def load(
        self,
        spec: ModelSpec,
        shares: Shares,
        origin: Any = None,
        *,
        progress: Progress | None = None,
        into: Any = None,
    ) -> TorchModel:
        """Puts the module `origin`, or the result of the factory `origin`, on the `shares`.

        Raises LoadFailed, CannotGovern, the errors of the factory, and the device's out-of-memory
        error.
        """
        if isinstance(origin, nn.Module):
            model = self.adopt(spec, origin)
            self._place(model, shares, progress)
            return model
        with with_own_modes():
            module = origin()
        if not isinstance(module, nn.Module):
            raise LoadFailed(
                f"the factory of {spec.name} returned a {type(module).__name__}, not an nn.Module.",
                name=spec.name,
                source=spec.source,
                mistake=True,
            )
        return self._settled(TorchModel(spec, module), shares, progress, into)

    def adopt(
        self, spec: ModelSpec, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> TorchModel:
        """A handle for an existing `module`, which stays on its device. Its state in `optimizer` moves too.

        Raises CannotGovern, and UnknownDevice for a card that is not governed.
        """
        model = TorchModel(spec, module, optimizer)
        self._check(model)
        model.share_with(list(self._models))
        trains = module.training and any(p.requires_grad for p in module.parameters())
        if optimizer is None and trains:
            raise CannotGovern(
                f"{spec.name} is in train mode, and its optimizer's state must move with it.\n"
                f"  Pass it:  rt.adopt({spec.name!r}, module, optimizer=opt)      "
                f"or, if it is not trained:  module.eval()",
                name=spec.name,
                why="it is in training without its optimizer",
            )
        groups = model.groups()
        devices = {str(group.storage.device) for group in groups} or {"cpu"}
        if len(devices) > 1:
            why = f"it is on several devices ({', '.join(sorted(devices))})"
            raise CannotGovern(f"{spec.name} cannot be governed: {why}.", name=spec.name, why=why)
        device = devices.pop()
        memory = self._by_torch_device.get(device) or self.probe.place(self.probe.named(device))
        if not groups and model.bases:  # a part of another model: it is where that model is
            memory = next(iter(model.bases)).memories[0]
        model.memories = (memory,)
        self._models.add(model)
        self.measure(model)
        return model

    def value(self, model: TorchModel) -> nn.Module:
        return model.module

    def move(self, model: TorchModel, shares: Shares, shadow: bool = False) -> None:
        """Moves all storages of `model` to `shares`, or none if the move fails.

        With `shadow`, storages that return to a card leave a copy of their bytes in host memory.
        Raises CannotGovern, and the device's out-of-memory error.
        """
        left = model.memories
        try:
            with without_collections():
                self._place(model, shares, shadow=shadow)
        except BaseException as error:
            st.let_go(error)
            raise
        release_cached(left)

    def stows(self, model: TorchModel) -> bool:
        return model.in_ram() is not None

    def write(self, model: TorchModel, directory: Path, *, encrypted: bool = False) -> Written:
        with model.gate:
            exchanges, going = model.exchanges, model.in_ram() or []
        contents = {group.storage._cdata: partial(model.content, group) for group in going}
        sizes = [group.nbytes for group in going]
        return park_file.written(model, contents, sizes, exchanges, directory, encrypted=encrypted)

    def move_on(self, model: TorchModel, written: Written) -> None:
        exchange, away = swap.Exchange(), dict(model.away)
        with park_file.in_place(model, written.exchanges):
            mapped = {} if written.stored.keys() <= away.keys() else written.mapped()
            for group in model.groups():
                key = group.storage._cdata
                if key in mapped:
                    exchange.put(group.storage, mapped[key].untyped_storage(), refuses=mapped[key])
                elif key in written.stored:
                    away[key] = torch.empty(0, dtype=torch.uint8)
            now = {"away": away, "stored": {**model.stored, **written.stored}}
            try:
                swap.at_once([*exchange.calls, *assignments(model, **now)])
            except BaseException:
                exchange.undo()
                raise

    def piece_bytes(self, model: TorchModel) -> int:
        return model.piece_bytes()

    def drop(self, model: TorchModel) -> None:
        """Releases the module of `model`, which keeps its bytes: they exist nowhere else."""
        if not model.memories:
            return
        if model.dispatch:
            model.dispatch.remove()
        left = model.memories
        model.hand_over()
        calls = handing_over(model, self.probe.place(HOST))
        nothing = {**nowhere(), "module": nn.Module(), "optimizer": None}
        with model.gate:
            swap.at_once([*calls, *assignments(model, **nothing)])
        del calls
        release_cached(left)

    def measure(self, model: TorchModel) -> Shares:
        """The bytes of `model` on each device now. Empty if the model was dropped.

        Storages that torch has allocated since the last call, such as gradients and optimizer
        state, are recorded as the model's bytes.
        """
        held: dict[Memory, int] = dict.fromkeys(model.memories, 0)
        foreign: dict[Memory, int] = {}
        for group in model.groups() if held else ():
            if not model.memories:
                return ()  # another thread dropped the model meanwhile
            memory = model.place_of(group, self._by_torch_device)
            held[memory] = held.get(memory, 0) + group.nbytes
            if group.storage._cdata not in model.own:
                foreign[memory] = foreign.get(memory, 0) + group.nbytes
        for memory in {*held, *model.noted}:
            _note_foreign(model, memory, foreign.get(memory, 0))
        return tuple(
            Share(memory.device, size) for memory, size in held.items() if size or len(held) == 1
        )

    def pieces(
        self, spec: ModelSpec, origin: Any = None, model: TorchModel | None = None
    ) -> tuple[int, ...]:
        """The bytes of the pieces of `model`, or of the module from `origin` if `model` is None.

        A factory builds the module without data; if it fails, the result is one piece. Without
        `model` and with a single card, the result is empty, and nothing is built.
        """
        if not model and len(self.probe.cards) < 2:
            return ()
        module = model.module if model else origin
        if not isinstance(module, nn.Module):
            try:
                module = _without_data(origin)
            except Exception:  # the factory is the user's code; the load reports its error
                return (1,)
        groups = model.groups() if model else st.grouped(st.slots(module))
        return tuple(piece.bytes for piece in pieces(module, groups))

    def elsewhere(self, model: TorchModel) -> tuple[str, ...]:
        wrong: list[str] = []
        for slot in st.slots(model.module):
            wanted = model.memories[0]
            if model.is_away(slot.tensor):
                continue
            if model.layout:
                wanted = holder(slot.name, model.layout)
            if str(slot.tensor.device) != wanted.torch:
                wrong.append(f"{slot.name} on {slot.tensor.device}")
        return tuple(wrong)

    def must_return_to(self, model: TorchModel) -> dict[str, int]:
        cards = model.cards_to_return_to()
        return {self._by_torch_device[card].device: 0 for card in cards}

    def _check(self, model: TorchModel, found: Iterable[TensorSlot] = ()) -> None:
        """Raises CannotGovern if `model` cannot be moved safely. `found` are its tensors, if they are known."""
        types = {torch.device(name).type for name in self._by_torch_device}
        found = found or st.slots(model.module, model.optimizer)
        check(
            model.spec.name,
            model.module,
            [slot for slot in found if not model.is_away(slot.tensor)],
            device_types={"cpu", "cuda", *types},
            is_ours=model.hooked_by_us,
        )

    def _settled(
        self, model: TorchModel, shares: Shares, progress: Progress | None, into: Any
    ) -> TorchModel:
        """Puts the new `model` on the devices of `shares`, and returns it.

        The module of an earlier load, in `into`, gets the bytes, and becomes the module of `model`.
        """
        try:
            self._check(model)
            model.share_with(list(self._models))
            self._arrive(model, shares, progress)
            self._models.add(model)
            held = into.former() if isinstance(into, TorchModel) else into
            if isinstance(held, nn.Module) and held is not model.module:
                self._refill(model, held)
        except BaseException as error:
            self.drop(model)
            st.let_go(error)
            raise
        return model

    def _arrive(self, model: TorchModel, shares: Shares, progress: Progress | None) -> None:
        """Puts the bytes of the new `model` on the devices of `shares`."""
        self._place(model, shares, progress)

    def _refill(self, model: TorchModel, held: nn.Module) -> None:
        """Gives the bytes of `model` to `held`, which becomes its module. Raises LoadFailed for other tensors."""
        exchange = swap.Exchange()
        calls = st.refilling(held, model.module, exchange)
        if calls is None:
            raise LoadFailed(
                f"{model.spec.name} cannot be loaded into the existing object, which no longer has the "
                f"tensors of its source.\n  Delete your references to that object, then load again.",
                name=model.spec.name,
                source=model.spec.source,
            )
        self._dispatch(model, {})
        own, shadow = dict(model.own), dict(model.shadow)
        for storage, content in exchange.pairs:
            if content._cdata in own:
                own[storage._cdata] = own[content._cdata]
            if content._cdata in shadow:
                shadow[storage._cdata] = shadow.pop(content._cdata)
        after = assignments(model, module=held, own=own, shadow=shadow)
        try:
            swap.at_once([*exchange.calls, *calls, *after])
        except BaseException:
            exchange.undo()
            raise
        self._dispatch(model, model.layout)

    def _place(
        self,
        model: TorchModel,
        shares: Shares,
        progress: Progress | None = None,
        shadow: bool = False,
        shared: SharedCopy | None = None,
    ) -> None:
        """Moves all storages of `model` that are not on `shares` yet. If it fails, none has moved.

        With `shadow`, old bytes in host memory stay. With `shared` pages, the new bytes are in them.
        Raises CannotGovern, StillInUse if weights that leave a card are written meanwhile, and the
        device's out-of-memory error; with `shared` pages also OSError and TornCopy.
        """
        found = [*st.slots(model.module, model.optimizer)]
        self._check(model, found)
        groups = model.groups(found)
        held = [model.place_of(group, self._by_torch_device) for group in groups if model.memories]
        wanted: dict[Memory, int] = {}
        for share in shares:
            memory = self.probe.place(share.device)
            wanted[memory] = wanted.get(memory, 0) + share.bytes
        goal = destination(model, groups, wanted, held)
        moving = [i for i, goes in enumerate(goal.places) if not held or held[i] is not goes]
        if not moving and goal.memories == model.memories and goal.layout == model.layout:
            return
        # A model that is only being loaded has no views and graphs yet.
        if model.memories and (refusal := self.refusal(model.spec.name)):
            try:
                raise refusal
            finally:
                del refusal  # else its traceback would lead back to it, and keep the model
        going = [groups[i] for i in moving]
        places = [goal.places[i] for i in moving]
        sources = [model.content(group) for group in going]
        leaving = [n for n, i in enumerate(moving) if held and held[i].device != HOST]
        undisturbed = self.undisturbed()
        proof = swap.Unchanged(
            [sources[i] for i in leaving], [tensor for i in leaving for tensor in going[i].tensors]
        )
        unchanged = shadows.ready(model, going, places)
        with streams.current_card(goal.memories[0].torch):
            if shared:
                targets = shared.tensors(going, sources, self.probe.place(HOST), progress)
            elif unchanged:
                targets = shadows.new_bytes(unchanged, sources, places, self.probe.place(HOST))
            else:
                targets = st.copied(sources, places, self.probe.place(HOST), progress)
            model.read(going, targets)
        keys = [group.storage._cdata for group in going]
        moved = set(keys)
        kept = {key: it for key, it in model.shadow.items() if key not in moved}
        # What is copied to the host may have changed since the load, so its digest ends.
        copied = {
            key
            for i, (key, memory) in enumerate(zip(keys, places, strict=True))
            if memory.device == HOST and i not in unchanged
        }
        digests = {key: it for key, it in model.digests.items() if key not in copied}
        if shadow and not model.bases and not model.is_shared:
            kept |= shadows.staying(model, going, places, sources, targets)
        copies = [targets[i] for i in leaving]
        ends = (*copies, *(sources[i] for i in leaving))
        if not undisturbed and all(end.device.type == "cpu" for end in ends):
            proof.compare(copies)
        del copies, ends
        move = TwoPhaseMove(model, groups, going, places, targets)
        unchanged.clear()
        with model.gate:
            self._commit(model, move, goal, {"shadow": kept, "digests": digests}, proof)

    def _commit(
        self,
        model: TorchModel,
        move: TwoPhaseMove,
        goal: Destination,
        more: dict[str, Any],
        proof: swap.Unchanged,
    ) -> None:
        """Makes the calls of `move`, and sets the attributes of `model` to `goal` and `more`.

        If a call fails, or `proof` shows that weights were written since they were copied,
        everything is undone.
        """
        before = {name: getattr(model, name) for name in nowhere() if name != "dispatch"}
        after = {"memories": goal.memories, "noted": {}, "layout": goal.layout}
        after |= {"own": move.own, "away": move.away, "stored": move.stored, **more}
        after["exchanges"] = model.exchanges + 1
        try:
            if not proof.then([*move.calls, *assignments(model, **after)]):
                name = model.spec.name
                raise StillInUse(
                    f"{name} stays where it is: its weights are written while they are copied.\n"
                    f"  Write them in a block that keeps it in place:  with rt.use({name!r}) as model:",
                    name=name,
                )
            self._dispatch(model, goal.layout)
        except BaseException:
            move.undo()
            swap.at_once(assignments(model, **before))
            self._dispatch(model, model.layout)
            raise

    def _dispatch(self, model: TorchModel, layout: dict[str, Memory]) -> None:
        """Removes the module's hooks. Installs new hooks if `layout` has several torch devices."""
        if model.dispatch:
            model.dispatch.remove()
            model.dispatch = None
        device_map = {path: memory.torch for path, memory in layout.items()}
        if len(set(device_map.values())) > 1:
            model.dispatch = Dispatch(model.module, device_map)


def _note_foreign(model: TorchModel, memory: Memory, size: int) -> None:
    """Records that torch has allocated `size` bytes of `model` in `memory`."""
    known = model.noted.get(memory)
    if size == (known.size if known else 0):
        return
    known = model.noted.pop(memory, None)
    del known  # free the old entry first: both together may exceed the capacity
    if size:
        model.noted[memory] = memory.allocate(size, force=True)


def _without_data(factory: Callable[[], nn.Module]) -> nn.Module:
    """What `factory` builds on torch's meta device, which has shapes and no data.

    Its warnings are not shown: they are about weights that are not there, and the load shows its own.
    """
    with with_own_modes(), torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return factory()


def _config(module: nn.Module) -> dict[str, Any]:
    """The config of a transformers `module`. Empty for other modules."""
    to_dict = getattr(getattr(module, "config", None), "to_dict", None)
    return to_dict() if callable(to_dict) else {}


def release_cached(memories: Sequence[Memory]) -> None:
    """Returns freed memory of the cards to the driver, since other processes may wait for it."""
    for memory in memories:
        streams.empty_cache(memory.torch)


# -- modules that cannot be moved safely, each with the reason
#
# A module cannot be moved safely if it has state outside its parameters and buffers, or if other code
# stores the addresses of its tensors. After a move such a module would no longer work.

_PLAIN = (Tensor, nn.Parameter)
_HIDDEN_STATE = "which keeps state outside its parameters"
_COMPILED = "it was compiled by torch.compile, and compiled code keeps references to its tensors"
_WRAPPERS = {  # name of the class -> why
    "DistributedDataParallel": "it is wrapped in DistributedDataParallel, whose buckets store its addresses",
    "DataParallel": "it is wrapped in DataParallel, which itself copies it to cards",
    "FullyShardedDataParallel": "it is wrapped in FSDP, which itself moves its shards",
    "FSDPModule": "it is wrapped in FSDP (fully_shard), which itself moves its shards",
    "OptimizedModule": _COMPILED,
    "ScriptModule": "it is TorchScript, whose tensors cannot be rebound from Python",
}


def check(
    name: str,
    module: nn.Module,
    found: list[TensorSlot],
    *,
    device_types: Collection[str] = ("cpu", "cuda"),
    is_ours: Callable[[nn.Module], bool] = lambda part: False,
) -> None:
    """Raises CannotGovern, with the reason, if the model `name` cannot be moved safely.

    `found` are the tensors of `module`. `device_types` are the torch device types that are
    governed. `is_ours(part)` returns whether this package installed the accelerate hook of `part`.
    """
    parts = module.named_modules()
    reasons = (_of_part(part, f" (at {path})" if path else "", is_ours) for path, part in parts)
    of_tensors = (_of_tensor(slot.name, slot.tensor, device_types) for slot in found)
    why = next(filter(None, itertools.chain(reasons, of_tensors)), None)
    why = why or _of_storages(grouped(found))
    if why:
        raise CannotGovern(f"{name} cannot be governed: {why}.", name=name, why=why)


@functools.lru_cache(maxsize=256)
def _of_class(kind: type) -> str:
    """The reason why no instance of this class of modules can be moved, with {} for its path; else empty."""
    for parent in kind.__mro__:
        if parent.__name__ in _WRAPPERS:
            return _WRAPPERS[parent.__name__] + "{}"
    if any(parent.__module__.split(".")[0] == "bitsandbytes" for parent in kind.__mro__):
        return f"it is quantised by bitsandbytes ({kind.__name__}{{}}), {_HIDDEN_STATE}"
    if kind.__module__.startswith("torch.ao.nn.quantized"):
        return f"it is quantised by torch.ao ({kind.__name__}{{}}), {_HIDDEN_STATE}"
    return ""


def _of_part(part: nn.Module, at: str, is_ours: Callable[[nn.Module], bool]) -> str | None:
    """The reason why the `part` of a module cannot be moved, or None. `at` is its path as text."""
    if reason := _of_class(type(part)):
        return reason.format(at)
    if part.__dict__.get("_compiled_call_impl") is not None:
        return _COMPILED + at
    if "_hf_hook" in part.__dict__ and not is_ours(part):
        return (
            f"accelerate hooks move it already{at}; load it without device_map, or first:\n"
            f"  accelerate.hooks.remove_hook_from_module(module, recurse=True)"
        )
    forward = part.__dict__.get("forward")
    if "make_graphed_callables" in getattr(forward, "__qualname__", ""):
        return f"it was captured in a CUDA graph, which stores its addresses{at}"
    return None


def _of_tensor(name: str, tensor: Tensor, device_types: Collection[str]) -> str | None:
    """The reason why a module with the tensor called `name` cannot be moved, or None."""
    kind = type(tensor)
    if kind not in _PLAIN:
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            return f"{name} has no shape yet; call the module once first"
        library = kind.__module__.split(".")[0]
        if library == "bitsandbytes":
            return f"it is quantised by bitsandbytes ({name} is a {kind.__name__}), {_HIDDEN_STATE}"
        return f"{name} is a {library} {kind.__name__}, a tensor made of other tensors"
    if tensor.is_meta:
        return f"{name} is on the meta device and has no data; load its weights first"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"{name} is not a plain strided tensor ({tensor.layout})"
    if tensor.device.type not in device_types:
        governed = " and ".join(sorted(device_types))
        return f"{name} is on {tensor.device}; only {governed} are governed here"
    if tensor.device.type == "cpu" and tensor.untyped_storage().is_shared():
        return (
            f"{name} is in memory shared with other processes (share_memory_), "
            f"which would not see a move"
        )
    return None


def _of_storages(groups: list[Group]) -> str | None:
    """The reason if two storages of `groups` overlap, as two from_numpy() of one array do.

    Moved separately, a change of one would no longer change the other.
    """
    spans = sorted(
        (
            group.storage.device.index or 0,
            swap.address(group.slots[0].tensor),
            group.nbytes,
            group.slots[0].name,
        )
        for group in groups
        if group.nbytes
    )
    for (card, start, size, name), (next_card, next_start, _, other) in itertools.pairwise(spans):
        if card == next_card and next_start < start + size:
            return f"{name} and {other} overlap in memory, but are not in one storage"
    return None
