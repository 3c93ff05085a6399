"""Modules from live Python: what a factory returns, and modules that exist already and are adopted.

Storage-exact: tied weights, views, gradients and optimizer state travel once each, and the Python objects stay. On a
simulated card the tensors remain CPU tensors, in memory of which the card's account is kept. Nothing here can be
dropped by itself: what was made in Python exists nowhere else.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import CannotGovern, LoadFailed
from ..facts import HOST, Evidence, ModelSpec, Share, Shares
from ..memory import Block, Memory
from ..probe import Probe
from . import Progress, refusals
from . import storages as st


class TorchModel:
    """A module, and where its bytes lie. The handle of this backend; users hold the module itself."""

    def __init__(self, spec: ModelSpec, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.spec, self.module, self.optimizer = spec, module, optimizer
        self.device: str | None = None  # None: nowhere of ours yet, or dropped
        self.own: frozenset[int] = frozenset()  # storages that we made; torch made the others
        self.noted: Block | None = None  # the account of the others

    def groups(self) -> list[st.Group]:
        """The storages that travel. Step counters and the like, which optimizers keep on the CPU, stay there."""
        return [group for group in st.grouped(st.slots(self.module, self.optimizer)) if not self._stays(group)]

    def _stays(self, group: st.Group) -> bool:
        if group.storage.device.type != "cpu" or group.storage._cdata in self.own:
            return False
        if any(slot.kind != "state" for slot in group.slots):
            return False
        return (self.device or "").startswith(("cuda", "rocm")) or all(slot.tensor.dim() == 0 for slot in group.slots)


class TorchBackend:
    """Factories and adopted modules, on one device each."""

    name = "torch"
    can_move = True
    can_split = False

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """A module's own storages; a factory is sized by building its module without data, on meta."""
        if isinstance(origin, nn.Module):
            return Evidence(st.nbytes(TorchModel(spec, origin).groups()), "module", config=_config(origin))
        try:
            with torch.device("meta"):
                module = origin()
            return Evidence(st.nbytes(st.grouped(st.slots(module))), "shapes", config=_config(module))
        except Exception as error:  # whatever the user's code raises is for the user to read
            why = str(error).strip().splitlines() or [""]
            return Evidence(why_unknown=f"its factory failed on torch's meta device, which has shapes and no data "
                                        f"({type(error).__name__}: {why[0][:300]})")

    def load(self, spec: ModelSpec, shares: Shares, origin: Any = None, *,
             progress: Progress | None = None, into: Any = None) -> TorchModel:
        memory = self._memory(spec.name, shares)
        if isinstance(origin, nn.Module):
            model = self.adopt(spec, origin)
            self._travel(model, memory, progress)
            return model
        module = origin()
        if not isinstance(module, nn.Module):
            raise LoadFailed(f"the factory of {spec.name} returned a {type(module).__name__}, not an nn.Module.",
                             name=spec.name, source=spec.source)
        return self._settled(TorchModel(spec, module), memory, progress, into)

    def adopt(self, spec: ModelSpec, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TorchModel:
        """A handle for a module that exists already, where it lies now. Raises CannotGovern, with the reason."""
        model = TorchModel(spec, module, optimizer)
        refusals.check(spec.name, module, list(st.slots(module, optimizer)))
        if optimizer is None and module.training and any(p.requires_grad for p in module.parameters()):
            raise CannotGovern(
                f"{spec.name} is in training, and its optimizer's state must travel with it.\n"
                f"  Say which:  rt.adopt({spec.name!r}, module, optimizer=opt)      or, if it is done:  module.eval()",
                name=spec.name, why="it is in training without its optimizer")
        where = {str(group.storage.device) for group in model.groups()} or {"cpu"}
        if len(where) > 1:
            why = f"it lies on several devices ({', '.join(sorted(where))})"
            raise CannotGovern(f"{spec.name} cannot be governed: {why}.", name=spec.name, why=why)
        model.device = self.probe.named(where.pop())  # raises UnknownDevice for a card that we do not govern
        self.measure(model)
        return model

    def value(self, model: TorchModel) -> nn.Module:
        return model.module

    def move(self, model: TorchModel, shares: Shares) -> None:
        memory = self._memory(model.spec.name, shares)
        left = model.device
        if memory.device != left:
            self._travel(model, memory)
            self._give_back(left)

    def drop(self, model: TorchModel) -> None:
        """Frees its bytes; the module's tensors are empty from now on, and a call on it fails on their shapes."""
        if model.device is None:
            return
        found = [slot for group in model.groups() for slot in group.slots]
        left = model.device
        st.at_once([*st.emptying(found),
                    partial(setattr, model, "device", None), partial(setattr, model, "noted", None)])
        del found  # the tensors are empty, but torch gives memory back only when nobody looks at it
        self._give_back(left)

    def measure(self, model: TorchModel) -> Shares:
        """Its bytes now: gradients and optimizer state that have come since are counted, and entered in the account."""
        if model.device is None:
            return ()
        groups, memory = model.groups(), self.probe.place(model.device)
        strangers = sum(group.nbytes for group in groups if group.storage._cdata not in model.own)
        if (model.noted.size if model.noted else 0) != strangers:
            model.noted = None  # the old entry first: both together may be more than there is
            model.noted = memory.allocate(strangers, force=True) if strangers else None
        return (Share(model.device, st.nbytes(groups)),)

    def droppable(self, model: TorchModel) -> bool:
        return False

    def unchanged(self, model: TorchModel) -> bool:
        return False

    def _memory(self, name: str, shares: Shares) -> Memory:
        devices = {share.device for share in shares}
        if len(devices) != 1:
            raise CannotGovern(f"{name} cannot be split over {len(devices)} devices by this backend; give it one.",
                               name=name, why="several devices")
        return self.probe.place(devices.pop())

    def _settled(self, model: TorchModel, memory: Memory, progress: Progress | None, into: Any) -> TorchModel:
        """The new model on its device, in the object of an earlier load where that is given."""
        try:
            self._travel(model, memory, progress)
            held = into.module if isinstance(into, TorchModel) else into
            if isinstance(held, nn.Module) and held is not model.module:
                calls = st.refilling(held, model.module)
                if calls is None:
                    raise LoadFailed(f"{model.spec.name} cannot be filled again: the object that is still held no "
                                     f"longer has the tensors of its source.\n  Let go of it, then load again.",
                                     name=model.spec.name, source=model.spec.source)
                st.at_once([*calls, partial(setattr, model, "module", held)])
        except BaseException as error:
            self.drop(model)
            st.let_go(error)
            raise
        return model

    def _travel(self, model: TorchModel, memory: Memory, progress: Progress | None = None) -> None:
        refusals.check(model.spec.name, model.module, list(st.slots(model.module, model.optimizer)))
        groups = model.groups()
        targets: Sequence[torch.Tensor] = st.copied(groups, memory, self.probe.place(HOST), progress)
        st.at_once([
            *st.rebinding(groups, targets),
            partial(setattr, model, "device", memory.device),
            partial(setattr, model, "own", frozenset(target.untyped_storage()._cdata for target in targets)),
            partial(setattr, model, "noted", None)])

    def _give_back(self, device: str | None) -> None:
        """Freed memory of a card goes back to the driver at once: other processes wait for it, and believe the driver."""
        card = self.probe.place(device).torch if device else ""
        if card.startswith("cuda"):
            with torch.cuda.device(card):
                torch.cuda.empty_cache()


def _config(module: nn.Module) -> dict[str, Any]:
    """What a module from transformers says of its shape."""
    tell = getattr(getattr(module, "config", None), "to_dict", None)
    return tell() if callable(tell) else {}
