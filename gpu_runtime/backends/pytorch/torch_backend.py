"""Modules from live Python: what a factory returns, and modules that exist already and are adopted.

Storage-exact: tied weights, views, gradients and optimizer state travel once each, and the Python objects stay. Over
several cards a module is cut between its pieces (pieces.py) and runs by accelerate's hooks (dispatch.py). On a
simulated card the tensors remain CPU tensors, in memory of which the card's account is kept. Nothing here can be
dropped by itself: what was made in Python exists nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ...devices.probe import Probe
from ...devices.process_memory import Block, Memory
from ...errors import CannotGovern, LoadFailed
from ...facts import HOST, Evidence, ModelSpec, Share, Shares
from ..base import Progress
from . import storages as st
from . import unsupported
from .device_hooks import Dispatch
from .pieces import cut, holder, pieces


class TorchModel:
    """A module, and where its bytes lie. The handle of this backend; users hold the module itself."""

    def __init__(
        self, spec: ModelSpec, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.spec, self.module, self.optimizer = spec, module, optimizer
        self.memories: tuple[Memory, ...] = ()  # none: nowhere of ours yet, or dropped
        self.own: dict[int, Memory] = {}  # storages that we made, and where; torch made the others
        self.noted: dict[Memory, Block] = {}  # the account of the others
        self.layout: dict[
            str, Memory
        ] = {}  # path of a module -> where it lies; empty on one device
        self.dispatch: Dispatch | None = None  # its hooks, while it runs on several torch devices

    def groups(self) -> list[st.Group]:
        """The storages that travel. Step counters and the like, which optimizers keep on the CPU, stay there."""
        return [
            group
            for group in st.grouped(st.slots(self.module, self.optimizer))
            if not self._stays(group)
        ]

    def _stays(self, group: st.Group) -> bool:
        if group.storage.device.type != "cpu" or group.storage._cdata in self.own:
            return False
        if any(slot.kind != "state" for slot in group.slots):
            return False
        on_card = any(memory.torch != "cpu" for memory in self.memories)
        return on_card or all(slot.tensor.dim() == 0 for slot in group.slots)

    def hooked_by_us(self, part: nn.Module) -> bool:
        return self.dispatch is not None and self.dispatch.owns(part)


class _Goal(NamedTuple):
    """Where a module is to lie."""

    memories: tuple[Memory, ...]
    places: list[Memory]  # of each of its storages
    layout: dict[str, Memory]


class TorchBackend:
    """Factories and adopted modules."""

    name = "torch"
    can_move = True
    can_split = True

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self._on_torch = {
            memory.torch: memory
            for device in probe.devices
            if (memory := probe.place(device.id)).torch != "cpu"
        }

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """A module's own storages; a factory is sized by building its module without data, on meta."""
        if isinstance(origin, nn.Module):
            return Evidence(
                st.nbytes(TorchModel(spec, origin).groups()), "module", config=_config(origin)
            )
        try:
            with torch.device("meta"):
                module = origin()
            return Evidence(
                st.nbytes(st.grouped(st.slots(module))), "shapes", config=_config(module)
            )
        except Exception as error:  # whatever the user's code raises is for the user to read
            why = str(error).strip().splitlines() or [""]
            return Evidence(
                why_unknown=f"its factory failed on torch's meta device, which has shapes and no data "
                f"({type(error).__name__}: {why[0][:300]})"
            )

    def load(
        self,
        spec: ModelSpec,
        shares: Shares,
        origin: Any = None,
        *,
        progress: Progress | None = None,
        into: Any = None,
    ) -> TorchModel:
        if isinstance(origin, nn.Module):
            model = self.adopt(spec, origin)
            self._travel(model, shares, progress)
            return model
        module = origin()
        if not isinstance(module, nn.Module):
            raise LoadFailed(
                f"the factory of {spec.name} returned a {type(module).__name__}, not an nn.Module.",
                name=spec.name,
                source=spec.source,
            )
        return self._settled(TorchModel(spec, module), shares, progress, into)

    def adopt(
        self, spec: ModelSpec, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> TorchModel:
        """A handle for a module that exists already, where it lies now. Raises CannotGovern, with the reason."""
        model = TorchModel(spec, module, optimizer)
        self._check(model)
        if (
            optimizer is None
            and module.training
            and any(p.requires_grad for p in module.parameters())
        ):
            raise CannotGovern(
                f"{spec.name} is in training, and its optimizer's state must travel with it.\n"
                f"  Say which:  rt.adopt({spec.name!r}, module, optimizer=opt)      or, if it is done:  module.eval()",
                name=spec.name,
                why="it is in training without its optimizer",
            )
        where = {str(group.storage.device) for group in model.groups()} or {"cpu"}
        if len(where) > 1:
            why = f"it lies on several devices ({', '.join(sorted(where))})"
            raise CannotGovern(f"{spec.name} cannot be governed: {why}.", name=spec.name, why=why)
        device = where.pop()
        # raises UnknownDevice for a card that we do not govern
        model.memories = (self._on_torch.get(device) or self.probe.place(self.probe.named(device)),)
        self.measure(model)
        return model

    def value(self, model: TorchModel) -> nn.Module:
        return model.module

    def move(self, model: TorchModel, shares: Shares) -> None:
        left = model.memories
        try:
            self._travel(model, shares)
        except BaseException as error:
            st.let_go(error)
            raise
        _give_back(left)

    def drop(self, model: TorchModel) -> None:
        """Frees its bytes; the module's tensors are empty from now on, and a call on it fails on their shapes."""
        if not model.memories:
            return
        if model.dispatch:
            model.dispatch.remove()
        found = [slot for group in model.groups() for slot in group.slots]
        left = model.memories
        st.at_once(
            [
                *st.emptying(found),
                *(
                    partial(setattr, model, name, nothing)
                    for name, nothing in (
                        ("memories", ()),
                        ("own", {}),
                        ("noted", {}),
                        ("layout", {}),
                        ("dispatch", None),
                    )
                ),
            ]
        )
        del found  # the tensors are empty, but torch gives memory back only when nobody looks at it
        _give_back(left)

    def measure(self, model: TorchModel) -> Shares:
        """Its bytes now: gradients and optimizer state that have come since are counted, and entered in the account."""
        held: dict[Memory, int] = dict.fromkeys(model.memories, 0)
        strangers: dict[Memory, int] = {}
        for group in model.groups() if held else ():
            memory = self._place(model, group)
            held[memory] = held.get(memory, 0) + group.nbytes
            if group.storage._cdata not in model.own:
                strangers[memory] = strangers.get(memory, 0) + group.nbytes
        for memory in {*held, *model.noted}:
            size, known = strangers.get(memory, 0), model.noted.get(memory)
            if size != (known.size if known else 0):
                known = model.noted.pop(memory, None)
                del known  # the old entry first: both together may be more than there is
                if size:
                    model.noted[memory] = memory.allocate(size, force=True)
        return tuple(
            Share(memory.device, size) for memory, size in held.items() if size or len(held) == 1
        )

    def pieces(
        self, spec: ModelSpec, origin: Any = None, model: TorchModel | None = None
    ) -> tuple[int, ...]:
        """The module's own, its factory's built without data, or one where that cannot be known in advance.

        Nobody asks where there is one card only; nothing is built then.
        """
        if not model and sum(not device.is_host for device in self.probe.devices) < 2:
            return ()
        module = model.module if model else origin
        if not isinstance(module, nn.Module):
            try:
                with torch.device("meta"):
                    module = origin()
            except Exception:  # a factory may do anything; what it raises is for the load to tell
                return (1,)
        groups = model.groups() if model else st.grouped(st.slots(module))
        return tuple(piece.bytes for piece in pieces(module, groups))

    def elsewhere(self, model: TorchModel) -> tuple[str, ...]:
        """Tensors of the module that do not lie where it was put, each with where it lies instead."""
        wanted = {memory.torch for memory in model.memories}
        return tuple(
            f"{slot.name} on {slot.tensor.device}"
            for slot in st.slots(model.module)
            if str(slot.tensor.device)
            != (holder(slot.name, model.layout).torch if model.layout else next(iter(wanted)))
        )

    def droppable(self, model: TorchModel) -> bool:
        return False

    def unchanged(self, model: TorchModel) -> bool:
        return False

    def _check(self, model: TorchModel) -> None:
        known = {"cpu", "cuda", *(torch.device(name).type for name in self._on_torch)}
        unsupported.check(
            model.spec.name,
            model.module,
            list(st.slots(model.module, model.optimizer)),
            known=known,
            ours=model.hooked_by_us,
        )

    def _place(self, model: TorchModel, group: st.Group) -> Memory:
        """Where a storage lies. What torch made on the CPU lies, by its account, where its module does."""
        memory = model.own.get(group.storage._cdata) or self._on_torch.get(
            str(group.storage.device)
        )
        if memory is None:
            memory = (
                holder(group.slots[0].name, model.layout) if model.layout else model.memories[0]
            )
        return memory

    def _goal(self, model: TorchModel, groups: Sequence[st.Group], shares: Shares) -> _Goal:
        """Raises CannotGovern where the module cannot be cut so often, or would run in two kinds of memory."""
        sizes: dict[str, int] = {}
        for share in shares:
            sizes[share.device] = sizes.get(share.device, 0) + share.bytes
        memories = tuple(self.probe.place(device) for device in sizes)
        if len(memories) == 1:
            return _Goal(memories, [memories[0]] * len(groups), {})
        name, found = model.spec.name, pieces(model.module, groups)
        if HOST in sizes:
            raise CannotGovern(
                f"{name} cannot lie partly in host memory: this backend runs it where it lies.",
                name=name,
                why="partly in host memory",
            )
        if len(found) < len(memories):
            whole = (
                "it must stay whole"
                if len(found) == 1
                else f"it has {len(found)} pieces that must stay whole"
            )
            raise CannotGovern(
                f"{name} cannot be split over {len(memories)} devices: {whole}.\n"
                f"  Give it one:  rt.register({name!r}, …, layout='single')",
                name=name,
                why="several devices",
            )
        numbers = cut([piece.bytes for piece in found], list(sizes.values()))
        places = {
            group.storage._cdata: memories[number]
            for number, piece in zip(numbers, found, strict=True)
            for group in piece.groups
        }
        return _Goal(
            memories,
            [places[group.storage._cdata] for group in groups],
            {
                path: memories[number]
                for number, piece in zip(numbers, found, strict=True)
                for path in piece.modules
            },
        )

    def _settled(
        self, model: TorchModel, shares: Shares, progress: Progress | None, into: Any
    ) -> TorchModel:
        """The new model on its device, in the object of an earlier load where that is given."""
        try:
            self._travel(model, shares, progress)
            held = into.module if isinstance(into, TorchModel) else into
            if isinstance(held, nn.Module) and held is not model.module:
                calls = st.refilling(held, model.module)
                if calls is None:
                    raise LoadFailed(
                        f"{model.spec.name} cannot be filled again: the object that is still held no "
                        f"longer has the tensors of its source.\n  Let go of it, then load again.",
                        name=model.spec.name,
                        source=model.spec.source,
                    )
                self._dispatch(model, {})
                st.at_once([*calls, partial(setattr, model, "module", held)])
                self._dispatch(model, model.layout)
        except BaseException as error:
            self.drop(model)
            st.let_go(error)
            raise
        return model

    def _travel(self, model: TorchModel, shares: Shares, progress: Progress | None = None) -> None:
        """Carries what does not lie there already. All or nothing: the old bytes are let go of last."""
        self._check(model)
        groups = model.groups()
        goal = self._goal(model, groups, shares)
        moving = [
            i
            for i, group in enumerate(groups)
            if not model.memories or self._place(model, group) is not goal.places[i]
        ]
        if not moving and goal.memories == model.memories and goal.layout == model.layout:
            return
        going = [groups[i] for i in moving]
        with _context_on(goal.memories[0]):
            targets = st.copied(
                going, [goal.places[i] for i in moving], self.probe.place(HOST), progress
            )
        stays = [group for i, group in enumerate(groups) if i not in set(moving)]
        own = {
            group.storage._cdata: model.own[group.storage._cdata]
            for group in stays
            if group.storage._cdata in model.own
        }
        own |= {
            target.untyped_storage()._cdata: goal.places[i]
            for i, target in zip(moving, targets, strict=True)
        }
        before = {name: getattr(model, name) for name in ("memories", "own", "noted", "layout")}
        calls = [
            *st.rebinding(going, targets),
            *(
                partial(setattr, model, name, value)
                for name, value in (
                    ("memories", goal.memories),
                    ("own", own),
                    ("noted", {}),
                    ("layout", goal.layout),
                )
            ),
        ]
        try:
            st.at_once(calls)
            self._dispatch(model, goal.layout)
        except BaseException:
            calls[:] = st.rebinding(going, [group.bytes for group in going])
            while calls:
                with contextlib.suppress(
                    RuntimeError
                ):  # a tensor that could not change is where it was
                    calls.pop()()
            targets.clear()  # a notebook keeps the traceback, and with it what is named here
            st.at_once(partial(setattr, model, name, value) for name, value in before.items())
            self._dispatch(model, model.layout)
            raise

    def _dispatch(self, model: TorchModel, layout: dict[str, Memory]) -> None:
        """Takes the module's hooks off, and puts on those that this layout needs: none where torch sees one device."""
        if model.dispatch:
            model.dispatch.remove()
            model.dispatch = None
        if len({memory.torch for memory in layout.values()}) > 1:
            model.dispatch = Dispatch(
                model.module, {path: memory.torch for path, memory in layout.items()}
            )


def _config(module: nn.Module) -> dict[str, Any]:
    """What a module from transformers says of its shape."""
    tell = getattr(getattr(module, "config", None), "to_dict", None)
    return tell() if callable(tell) else {}


def _context_on(memory: Memory) -> contextlib.AbstractContextManager[Any]:
    """The card that torch takes for the current one meanwhile; in a process that has used none yet, from now on.

    A context is some 400 MB of a card; one that comes along by the way lands on the current card, which is 0 unless
    told.
    """
    device = torch.device(memory.torch)
    if device.type != "cuda":
        return contextlib.nullcontext()
    if not torch.cuda.is_initialized():
        torch.cuda.set_device(device)
    return torch.cuda.device(device)


def _give_back(memories: Sequence[Memory]) -> None:
    """Freed memory of a card goes back to the driver at once: other processes wait for it, and believe the driver."""
    for memory in memories:
        if memory.torch.startswith("cuda"):
            with torch.cuda.device(memory.torch):
                torch.cuda.empty_cache()
