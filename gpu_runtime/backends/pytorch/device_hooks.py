"""Installs and removes accelerate's hooks, which run a module over several cards.

The weights are already on their cards, so accelerate's `dispatch_model` moves no weights. It
changes the root module. All these changes except `hf_device_map` are undone, for two reasons. A
call of the root module must run the module's own `forward`, which pins the model
(`owner/governed_calls.py`). And a deep copy must not share attributes with the original.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...threads import import_whole


class Dispatch:
    """The hooks of one module while it is on several cards."""

    def __init__(self, module: nn.Module, device_map: Mapping[str, str]) -> None:
        """Installs the hooks: each part of `module` runs on its device in `device_map`.

        `device_map` maps the paths of modules to torch devices; inputs move to the first device.
        The paths must cover all weights, otherwise accelerate raises ValueError. With a complete
        map, accelerate uses no other card and plans no memory.
        """
        import_whole("accelerate")
        from accelerate import dispatch_model

        first_device = next(iter(device_map.values()))
        self.module = module
        self.transfer = _Transfer(first_device, _arguments_left_in_place(module))
        self.hooks: dict[int, tuple[nn.Module, Any]] = {}
        self.handles: list[Any] = []
        own = dict(vars(module))
        try:
            skip = self.transfer.left_in_place
            dispatch_model(module, dict(device_map), main_device=first_device, skip_keys=skip)
            self._restore_root(own)
            self._note_hooks()
            enter, leave = self.transfer.enter, self.transfer.leave
            before = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            self.handles.append(before)
            self.handles.append(module.register_forward_hook(leave))
        except BaseException:
            self._restore_root(own)
            self._note_hooks()
            self.remove()
            raise

    def _note_hooks(self) -> None:
        hooked = [part for part in self.module.modules() if hasattr(part, "_hf_hook")]
        self.hooks = {id(part): (part, part._hf_hook) for part in hooked}

    def _restore_root(self, own: Mapping[str, Any]) -> None:
        """Restores the attributes `own` of the root module, and removes new ones.

        `hf_device_map` stays, because transformers expects it.
        """
        for name in vars(self.module).keys() - own.keys() - {"hf_device_map"}:
            delattr(self.module, name)
        if "forward" in own:
            self.module.forward = own["forward"]

    def owns(self, part: nn.Module) -> bool:
        """Whether the hook on `part` was installed by this object."""
        known = self.hooks.get(id(part))
        return known is not None and known[1] is vars(part).get("_hf_hook")

    def remove(self) -> None:
        """Removes the hooks. The weights stay on their devices. A repeated call does nothing."""
        import_whole("accelerate.hooks")
        from accelerate.hooks import remove_hook_from_module

        for handle in self.handles:
            handle.remove()
        for part, hook in self.hooks.values():
            if vars(part).get("_hf_hook") is hook:
                remove_hook_from_module(part)
                restored = vars(part).get("forward")
                function = getattr(restored, "__func__", None)
                # A governed class wraps `forward`, see owner/governed_calls.py.
                if function and inspect.unwrap(function) is inspect.unwrap(type(part).forward):
                    del part.forward  # the same function as the class's
        vars(self.module).pop("hf_device_map", None)
        self.hooks, self.handles = {}, []


class _Transfer:
    """Moves inputs to the first card, and outputs back to the device of the inputs."""

    def __init__(self, device: str, left_in_place: list[str] | None) -> None:
        self.device, self.left_in_place = device, left_in_place
        self.call = threading.local()  # several threads may use a model at once

    def __deepcopy__(self, memo: Any) -> _Transfer:
        return _Transfer(self.device, self.left_in_place)

    def __reduce__(self) -> Any:
        return _Transfer, (self.device, self.left_in_place)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Moves the arguments to the first card, and records the device where they were."""
        import_whole("accelerate.utils")
        from accelerate.utils import find_device, send_to_device

        self.call.source = find_device([args, kwargs])
        moved_args = send_to_device(args, self.device)
        moved_kwargs = send_to_device(kwargs, self.device, skip_keys=self.left_in_place)
        return moved_args, moved_kwargs

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Moves the output to the device of the inputs."""
        import_whole("accelerate.utils")
        from accelerate.utils import send_to_device

        source = getattr(self.call, "source", None)
        if source is None:
            return output
        return send_to_device(output, source, skip_keys=self.left_in_place)


def _arguments_left_in_place(module: nn.Module) -> list[str] | None:
    """The names of arguments of `module` that no hook moves, such as a key/value cache.

    The tensors of such an argument are on several cards.
    """
    names = getattr(module, "_skip_keys_device_placement", None)
    if isinstance(names, str):
        return [names]
    return sorted(names) if names else None
