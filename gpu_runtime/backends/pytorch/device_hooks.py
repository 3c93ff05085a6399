"""The hooks by which a module that lies on several cards runs: accelerate's, put on and taken off by us.

The weights are where they belong before; `dispatch_model` finds them there and moves none. What it leaves on the root
is replaced: the model's own `forward` stays its class's, so that a call pins it before anything else happens
(see pool.py), and a deep copy has nothing of the original's.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from torch import nn


class Dispatch:
    """A module's hooks, as long as it lies on several cards."""

    def __init__(self, module: nn.Module, device_map: Mapping[str, str]) -> None:
        """Puts them on: every module of the map runs on its device, and inputs come to the first.

        The map covers all weights, so no other card gets any; accelerate has no memory of its own to plan with.
        """
        from accelerate import dispatch_model

        self.module, self.door = (
            module,
            _Door(next(iter(device_map.values())), _kept_in_place(module)),
        )
        self.hooks: dict[int, tuple[nn.Module, Any]] = {}
        self.handles: list[Any] = []
        own = dict(vars(module))
        try:
            dispatch_model(
                module, dict(device_map), main_device=self.door.device, skip_keys=self.door.kept
            )
            self._bare_root(own)
            self._note_hooks()
            self.handles.append(
                module.register_forward_pre_hook(self.door.enter, prepend=True, with_kwargs=True)
            )
            self.handles.append(module.register_forward_hook(self.door.leave))
        except BaseException:
            self._bare_root(own)
            self._note_hooks()
            self.remove()
            raise

    def _note_hooks(self) -> None:
        self.hooks = {
            id(part): (part, part._hf_hook)
            for part in self.module.modules()
            if hasattr(part, "_hf_hook")
        }

    def _bare_root(self, own: Mapping[str, Any]) -> None:
        """Gives the root's own attributes back, except that it tells its `hf_device_map`, as transformers expects."""
        for name in vars(self.module).keys() - own.keys() - {"hf_device_map"}:
            delattr(self.module, name)
        if "forward" in own:
            self.module.forward = own["forward"]

    def owns(self, part: nn.Module) -> bool:
        """Whether the hook on that part is the one that was put there."""
        return id(part) in self.hooks and self.hooks[id(part)][1] is vars(part).get("_hf_hook")

    def remove(self) -> None:
        """Takes them off; the weights stay where they are. Twice is once."""
        from accelerate.hooks import remove_hook_from_module

        for handle in self.handles:
            handle.remove()
        for part, hook in self.hooks.values():
            if vars(part).get("_hf_hook") is hook:
                remove_hook_from_module(part)
                restored = vars(part).get("forward")
                if getattr(restored, "__func__", None) is type(part).forward:
                    del part.forward  # it is its class's
        vars(self.module).pop("hf_device_map", None)
        self.hooks, self.handles = {}, []


class _Door:
    """Brings inputs to the first card, and what comes out to where the inputs were."""

    def __init__(self, device: str, kept: list[str] | None) -> None:
        self.device, self.kept = device, kept
        self.came = threading.local()  # several threads may use a model at once

    def __deepcopy__(self, memo: Any) -> _Door:
        return _Door(self.device, self.kept)

    def __reduce__(self) -> Any:
        return _Door, (self.device, self.kept)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        from accelerate.utils import find_device, send_to_device

        self.came.source = find_device([args, kwargs])
        return send_to_device(args, self.device), send_to_device(
            kwargs, self.device, skip_keys=self.kept
        )

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        from accelerate.utils import send_to_device

        source = getattr(self.came, "source", None)
        return output if source is None else send_to_device(output, source, skip_keys=self.kept)


def _kept_in_place(module: nn.Module) -> list[str] | None:
    """Arguments that lie on several cards themselves, such as a cache of keys and values."""
    kept = getattr(module, "_skip_keys_device_placement", None)
    return [kept] if isinstance(kept, str) else sorted(kept) if kept else None
