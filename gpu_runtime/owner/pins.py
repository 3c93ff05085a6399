"""Pins: weak references that keep a model on its device while a block of code uses it.

A pin must end with its `with` block. The stop button can interrupt `__exit__` before its first
line, so a release in Python code might never run. So a pin is not a counter. It is a weak reference
to a small object, the anchor. While the block runs, only the interpreter's stack refers to the
anchor. However the block ends, the anchor is deleted. The weak reference's callback then removes
the pin from the set of pins. The callback is C code, which no signal handler can interrupt.

The anchor is the bound method that the interpreter finds as `__exit__`. This method
binds the function `_leave` to a list of three: the thread's identifier, the `Held`, and a weak
reference to the anchor.

No frame of this package binds an anchor to a name while an error can be raised, because a traceback
keeps its frames and their callers' frames alive, with all local variables. Nor does a
frame raise an error to which one of its own local variables refers. The error, its traceback and
the frame would form a cycle, which stays until the next garbage collection.

The later parts keep a module in training on its device, and pin a module that user code calls.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import sys
import threading
import types
import weakref
from _thread import get_ident
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

from ..errors import NeedsWith, reword
from ..facts import NEVER
from ..notebook import activity
from ..threads import imported

Anchor = MethodType
AnchorRef = Callable[[], Anchor | None]  # a weak reference to an anchor


def thread_of(pin: AnchorRef) -> int:
    """The identifier of the thread that runs the block of `pin`; 0 if the block has ended."""
    entry = getattr(pin(), "__self__", (0,))
    return entry[0]


def called_by(pin: AnchorRef) -> int:
    """The identifier of the thread whose call of a model set `pin`; 0 if no call has set it."""
    entry: list[Any] = getattr(pin(), "__self__", [0])
    held = entry[1] if len(entry) > 1 else None
    return entry[0] if isinstance(held, Held) and held.is_call else 0


def new_anchor() -> Anchor:
    """Returns an anchor without a block, for a pin that belongs to the calling thread.

    The pin ends when nothing refers to the anchor any more.
    """
    return MethodType(_leave, [get_ident()])


class _Leave:
    """The `__exit__` of a `Held`. Each lookup of `__exit__` on an object returns a new anchor.

    The interpreter looks up `__exit__` before it calls `__enter__`, and keeps the anchor on its
    stack. The anchor is dropped when the block has ended, also after an interrupt at any
    instruction. `contextlib.ExitStack` looks up `__exit__` on the class instead, and gets a plain
    function.
    """

    def __get__(self, held: Held | None, kind: type | None = None) -> Any:
        if held is None:
            return _leave_by_hand
        entry = [get_ident(), held]
        leave = MethodType(_leave, entry)
        held._anchor = anchor = weakref.ref(leave)
        entry.append(anchor)
        return leave


def _leave(entry: list[Any], kind: Any, error: Any, trace: Any) -> None:
    _, held, anchor = entry
    if held._anchor is anchor:  # no `__enter__` has taken this anchor
        held._anchor = None
        _leave_by_hand(held, kind, error, trace)
        return
    try:
        held._finish(error)  # an error's report still names the model as in use
    finally:
        if anchor() is not None:  # the caller keeps a reference to `__exit__`
            held._release(anchor)


def _leave_by_hand(held: Held, kind: Any, error: Any, trace: Any) -> None:
    if held._kept:
        held._kept.pop()
    held._finish(error)


class Held:
    """A `with` block that holds something for exactly as long as it runs, also when interrupted.

    Users and `contextlib.ExitStack` may also call `__enter__` and `__exit__` directly. In this case
    the hold ends with the call of `__exit__`, or when this object is deleted.
    """

    __slots__ = ("_anchor", "_kept")
    is_call = False  # True for the block of a call of the model itself

    def __init__(self) -> None:
        # Anchor of the latest lookup of `__exit__`, until it is used.
        self._anchor: AnchorRef | None = None
        self._kept: list[Anchor] | None = None  # anchors of blocks that were entered by hand

    def _start(self, anchor: AnchorRef) -> Any:
        """Starts the hold, which lasts until the anchor is deleted. Returns the value of the block."""
        raise NotImplementedError

    def _start_if_here(self, anchor: AnchorRef) -> tuple[Any, ...]:
        """Starts the hold if that needs no wait. Returns the value in a tuple, or an empty tuple."""
        return ()

    def _release(self, anchor: AnchorRef) -> None:
        """Ends the hold of `anchor`, although the anchor still exists. Called after `_finish`."""

    def _finish(self, error: BaseException | None) -> None:
        """Does optional work at the end of the block. An interrupt can skip this call."""

    def _typed(self) -> tuple[str, str]:
        """The call as the user typed it, and a name for its value: `rt.use('qwen')` and `model`."""
        return f"{type(self).__name__}()", "held"

    def __repr__(self) -> str:
        call, value = self._typed()
        return f"<a block that is not entered; write:  with {call} as {value}: …>"

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError for a private `name`, and NeedsWith for any other `name`.

        Only the value that the `with` block yields has such attributes.
        """
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise NeedsWith(*self._typed(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NeedsWith, because only the value of the block can be called."""
        raise NeedsWith(*self._typed())

    def __enter__(self) -> Any:
        anchor, self._anchor = self._anchor, None
        if anchor is None or anchor() is None:  # no `with` statement holds an anchor
            return self._enter_by_hand(self._start)
        try:
            return self._start(anchor)
        except Exception as error:
            reword(error)
            raise

    def enter_if_here(self) -> tuple[Any, ...]:
        """Enters the block if that needs no wait, and returns its value in a tuple.

        The caller then ends the block by a call of `__exit__`, from any thread. If the model is not
        on its device, the block is not entered and the result is an empty tuple.
        """
        found = self._enter_by_hand(self._start_if_here)
        if not found and self._kept:
            self._kept.pop()
        return found

    def _enter_by_hand(self, start: Callable[[AnchorRef], Any]) -> Any:
        if self._kept is None:
            self._kept = []
        # This anchor must not refer to this object. The two would form a cycle, and a deleted object
        # would keep its pin until the next garbage collection.
        self._kept.append(new_anchor())
        try:
            return start(weakref.ref(self._kept[-1]))
        except BaseException:  # the caller does not call `__exit__` then
            self._kept.pop()
            raise

    __exit__ = _Leave()


# -- training
#
# Pinning a module only during its calls is not enough, because `backward` and `step` do not call it.
# A module is in training if it was adopted with its optimizer, or while it has gradients or an
# autograd graph. In a kernel, a module in training is in use while a cell runs. In a script, the
# module is in use from a `forward` with gradients enabled until `step`, `zero_grad` or the end of the
# graph.

_MOST_NODES = 64  # at most so many values of a result are searched for graphs
_KEY = "gpu_runtime"  # in the metadata of an autograd node


class Training:
    """Keeps one model on its device between its calls, while the model is in training."""

    def __init__(self, pins: set[AnchorRef]) -> None:
        """`pins` are the pins of the model."""
        self.pins, self.kernel = pins, activity  # which records the cells that run
        self.graphs: set[AnchorRef] = set()  # an anchor's reference for each graph that exists
        self._graph_pins: set[AnchorRef] = set()
        self._awaits_step = False
        self._waiver = threading.Lock()  # held while the main thread evicts the model
        self.measure_due = False  # whether the next step measures the model

    def forwarded(self, result: Any) -> None:
        """Notes the autograd graphs in the `result` of a `forward`.

        If no cell runs, the graphs pin the model.
        """
        torch = sys.modules["torch"]
        if not torch.is_grad_enabled():
            return
        nodes = list(_nodes(result, torch.Tensor))
        if not nodes:
            return
        anchor = new_anchor()
        # The nodes of the graph keep the anchor alive.
        for node in nodes:
            node.metadata[_KEY] = anchor
        self.graphs.add(weakref.ref(anchor, self.graphs.discard))
        if not self.kernel.running:
            self._awaits_step = True
            pin = weakref.ref(anchor, self._ended)
            self._graph_pins.add(pin)
            self.pins.add(pin)

    def _ended(self, pin: AnchorRef) -> None:
        self.pins.discard(pin)
        self._graph_pins.discard(pin)

    def stepped(self) -> None:
        """Ends the pins that `forwarded` set. Called after a step or a clearing of gradients."""
        self._awaits_step = False
        for pin in tuple(self._graph_pins):
            self._ended(pin)

    @property
    def in_script(self) -> bool:
        """Whether no cell has run in this process.

        A script may train at any time. A kernel trains only while a cell runs.
        """
        return not self.kernel.running and self.kernel.state.idle_since == NEVER

    def postpones_measuring(self, handle: Any) -> bool:
        """Whether only the thread that trains the model may measure the model, at its next step.

        Another thread could read gradients while they are made or cleared. Such a read ended in a
        segmentation fault.
        """
        trains = getattr(handle, "optimizer", None) is not None
        # Between two cells, a kernel does not train.
        may_run = self.kernel.running or self.in_script
        if (trains and may_run) or self.graphs:
            self.measure_due = True
            return True
        return False

    def blocks(self) -> int:
        """The number of the model's pins that do not belong to a graph."""
        return len(self.pins - self._graph_pins)

    def pinned(self) -> int:
        """The number of pins that keep the model from being moved now."""
        return self.blocks() if self._waived else len(self.pins)

    def holds(self, handle: Any) -> bool:
        """Whether training keeps the model of `handle` on its device, even without any pin."""
        if not hasattr(handle, "moves_in_training"):
            return False
        if self.kernel.running and not self._waived:
            return self.lives(handle)
        awaits_step = self._awaits_step and not self._waived
        if awaits_step and handle.optimizer is not None and handle.has_gradients():
            return True
        return self.lives(handle) and not handle.moves_in_training()

    def waived(self) -> contextlib.AbstractContextManager[object]:
        """A `with` block in which the caller's own training does not keep the model on its device.

        A person uses it to evict a model in the cell that trains the model. It has an effect only
        in the main thread: another thread could move the model during the main thread's backward
        pass.
        """
        # A lock ends its block in C, so no interrupt can leave the training waived.
        in_main = threading.current_thread() is threading.main_thread()
        return self._waiver if in_main and not self._waiver.locked() else contextlib.nullcontext()

    @property
    def _waived(self) -> bool:
        """Whether the main thread evicts the model, and no other thread has a graph of it."""
        if not self._waiver.locked():
            return False
        main = threading.main_thread().ident
        return all(thread_of(graph) in (main, 0) for graph in self.graphs.copy())

    def lives(self, handle: Any) -> bool:
        """Whether the model of `handle` is in training."""
        return handle.optimizer is not None or bool(self.graphs) or handle.has_gradients()


def _nodes(result: Any, tensor_type: type) -> Iterator[Any]:
    """The autograd nodes of the tensors in nested dicts, lists and tuples."""
    pending, seen = [result], 0
    while pending and seen < _MOST_NODES:
        value = pending.pop()
        seen += 1
        if isinstance(value, tensor_type):
            if value.grad_fn is not None:  # type: ignore[attr-defined]
                yield value.grad_fn  # type: ignore[attr-defined]
        elif isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, (list, tuple)):
            pending += value


# -- steps of optimizers ------------------------------------------------------------------------------


class _Arguments(tuple):
    """The arguments of `step`, with the `with` blocks that pin the models during the step.

    The frame of the step keeps the arguments. So the blocks end with the frame, whether the step
    returns or raises.
    """

    blocks: list[Held]


@functools.cache
def watch_steps(trained_by: Callable[[Any], list[Any]]) -> None:
    """From now on, each step of an optimizer pins the models `trained_by(optimizer)`.

    A model that is away is restored first.
    """
    optimizers = sys.modules["torch.optim.optimizer"]

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Pins the models. Returns the arguments of the step, which now hold the pins."""
        models = trained_by(optimizer)
        if not models:
            return None
        arguments = _Arguments(args)
        arguments.blocks = []
        for model in models:
            block = model.calling()
            block.__enter__()
            arguments.blocks.append(block)
        return arguments, kwargs

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if isinstance(args, _Arguments):
            for model in trained_by(optimizer):
                model.stepped()
            args.blocks.clear()

    optimizers.register_optimizer_step_pre_hook(before)
    optimizers.register_optimizer_step_post_hook(after)


def _cleared(model: Any, clear: Callable[[], Any]) -> Any:
    """The result of `clear`, a `zero_grad`, which releases the pins that a `forward` of `model` took.

    In a script, the model is also pinned while its gradients are cleared. Without this pin, the
    monitor measured the model meanwhile, and the process ended with a segmentation fault.
    """
    if model is None:
        return clear()
    with model.calling() if model.training.in_script else contextlib.nullcontext():
        result = clear()
    model.training.stepped()
    return result


def watch_zero_grad(optimizer: Any, model: Any) -> None:
    """From now on, `optimizer.zero_grad` ends a training step of `model`."""
    original = optimizer.zero_grad
    of = weakref.ref(model)

    @functools.wraps(original)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _cleared(of(), functools.partial(original, *args, **kwargs))

    # The new method is an attribute of the instance, as torch's schedulers do with `step`. A pickle
    # of the optimizer does not contain it.
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)


# -- calls of a governed module, a torch module whose memory this package manages
#
# A call pins the model, and first restores it if it is away. The pin ends with the call. Calls of the
# module's parts also pin the model, and so do methods that read or replace all weights. Without the
# pin, a copy or a saved file of a model that is away would contain no weights.

_CALLS = ("__call__", "forward", "generate")
# Methods that read or replace weights. `to`, `half`, `cuda` and others call `_apply`. The function
# that `apply` calls usually writes, such as one that initialises weights.
_WHOLE = (
    "state_dict",
    "load_state_dict",
    "save_pretrained",
    "push_to_hub",
    "resize_token_embeddings",
    "_apply",
    "apply",
    "__reduce_ex__",
    "__deepcopy__",
)


_governed: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_loading = threading.local()  # its `resident` is the model that `_load_for_change` is loading


def govern_calls(value: Any, resident: Any, dropped: bool = False) -> None:
    """From now on, each call of the module `value` or of one of its parts pins `resident`.

    `dropped` is true if the model's tensors hold no bytes. Such a model is loaded by a call, and
    before a tensor or part of it is replaced or deleted. On simulated cards, a read of a tensor
    loads it too.

    The class of the module is replaced by a subclass. A `forward` attribute on the module would be
    simpler. But a deep copy of the module would copy the attribute, and a call of the copy would
    use the original's weights. A part that another resident already governs stays with that
    resident.
    """
    if hasattr(value, "_calls_under"):  # our own proxies pin the model themselves
        value._calls_under = resident.calling
        return
    torch = imported("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return
    watch_steps(_trained_by)
    for part in list(value.modules()):
        if part is value or _governed.get(part) in (None, resident):
            _govern(part, resident, dropped)


def _govern(module: Any, resident: Any, dropped: bool) -> None:
    kind: Any = type(module)
    base = vars(kind).get("_gpu_base", kind)
    try:
        module.__class__ = _dropped_class(base) if dropped else _governed_class(base)
    except TypeError:  # its class allows no subclass, or no other class for its objects
        return
    _governed[module] = resident


def release_calls(value: Any) -> None:
    """Gives the module `value` and its parts their own classes back.

    If `value` is a proxy of this package, calls of the proxy no longer pin the model.
    """
    if hasattr(value, "_calls_under"):
        value._calls_under = contextlib.nullcontext
        return
    resident = _governed.get(value) if hasattr(type(value), "_gpu_base") else None
    if resident is None:
        return
    for module, owner in list(_governed.items()):
        if owner is resident:
            del _governed[module]
            if "_gpu_base" in vars(type(module)):
                module.__class__ = type(module)._gpu_base


def _trained_by(optimizer: Any) -> list[Any]:
    """The residents of the models that have a parameter of `optimizer`."""
    its = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found: dict[int, Any] = {}
    for module, resident in list(_governed.items()):
        if any(id(p) in its for p in module._parameters.values()):
            found[id(resident)] = resident
    return list(found.values())


def _named_like(base: type) -> dict[str, Any]:
    return {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_gpu_base": base,
        "_gpu_reloaded": functools.partial(_move_to_class, base),
    }


def _move_to_class(old: type, new: type) -> None:
    """Makes the governed modules of the class `old` modules of the class `new`.

    `%autoreload` does this with plain modules after their file has changed.
    """
    for module, resident in list(_governed.items()):
        kind = type(module)
        if vars(kind).get("_gpu_base") is old:
            module.__class__ = new
            _govern(module, resident, dropped=kind is _dropped_class(old))


@functools.cache
def _governed_class(base: type) -> type:
    body: dict[str, Any] = {
        **_named_like(base),
        "zero_grad": _clearing(base.zero_grad),  # type: ignore[attr-defined]
    }
    # Both `__call__` and `forward` pin the model. Code may call `forward` directly. And `__call__`
    # runs hooks before `forward`. A hook that moves inputs to the model's card must find the model there.
    for name in _CALLS:
        original = getattr(base, name, None)
        if callable(original):
            body[name] = _pinning(original, noted=True)
    own = {"__reduce_ex__": _reduce_as_base, "__deepcopy__": _copy_as_base}
    for name in _WHOLE:
        original = own.get(name) or getattr(base, name, None)
        if callable(original):
            body[name] = _pinning(original)
    return type(base.__name__, (base,), body)


def _pinning(original: Callable[..., Any], noted: bool = False) -> Callable[..., Any]:
    """A method that runs `original` while the model is on its device.

    If `noted` is true, the result is passed to the resident's `forwarded`, which detects training.
    """

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        resident = _governed.get(self)
        # A copy is not governed and needs no pin. A call inside another call is pinned already.
        if resident is None or resident.called_by(threading.get_ident()):
            return original(self, *args, **kwargs)
        if not noted and resident.pinned_by(threading.get_ident()):
            return original(self, *args, **kwargs)  # a block of this thread pins the model already
        with resident.calling():
            result = original(self, *args, **kwargs)
            if noted:
                resident.forwarded(result)
            return result

    return call


@functools.cache
def _dropped_class(base: type) -> type:
    """The subclass of `base` for a module whose tensors hold no bytes.

    The class is slow, because each access to a tensor runs a check. On simulated cards, the tensors
    are CPU tensors, which would read as zeros without the check. On real cards the check of a read
    does nothing, and the read raises an error; see `backends/pytorch/swap.py`.
    """
    governed: Any = _governed_class(base)

    def getattribute(self: Any, name: str) -> Any:
        if name in self.__dict__["_parameters"] or name in self.__dict__["_buffers"]:
            _load_for_read(self)
        return governed.__getattr__(self, name)

    def named_members(self: Any, *args: Any, **kwargs: Any) -> Any:
        _load_for_read(self)
        return governed._named_members(self, *args, **kwargs)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        _load_for_change(self, name)
        governed.__setattr__(self, name, value)

    def delete_attribute(self: Any, name: str) -> None:
        _load_for_change(self, name)
        governed.__delattr__(self, name)

    body = {
        **_named_like(base),
        "__getattr__": getattribute,
        "__setattr__": set_attribute,
        "__delattr__": delete_attribute,
        "_named_members": named_members,
    }
    return type(base.__name__, (governed,), body)


def _load_for_read(module: Any) -> None:
    """Loads the dropped model of `module` if its tensors are CPU tensors, which read as zeros."""
    resident = _governed.get(module)
    if resident is not None and resident.is_dropped() and _lies_on_cpu(module):
        with resident.calling():
            pass


def _load_for_change(module: Any, name: str) -> None:
    """Loads the dropped model of `module` before its tensor or part `name` is replaced or deleted.

    A load fills the tensors that the module had when its bytes were dropped. If one of these
    tensors were replaced or deleted before the load, its bytes would have no place.
    """
    has = module.__dict__
    kinds = ("_parameters", "_buffers", "_modules")
    if not any(name in has.get(kind, ()) for kind in kinds):
        return
    resident = _governed.get(module)
    is_loading = getattr(_loading, "resident", None)
    if resident is None or resident is is_loading or not resident.is_dropped():
        return
    _loading.resident = resident
    try:
        with resident.calling():
            pass
    finally:
        _loading.resident = is_loading


def _lies_on_cpu(module: Any) -> bool:
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                return tensor.device.type == "cpu"
    return False


def _clearing(original: Callable[..., Any]) -> Callable[..., Any]:
    """The module's `zero_grad`, changed to report the end of a training step."""

    @functools.wraps(original)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _cleared(_governed.get(self), functools.partial(original, self, *args, **kwargs))

    return zero_grad


def _reduce_as_base(self: Any, protocol: int) -> Any:
    """For pickle and copy: describes the module as an object of the class that the user wrote."""
    kind = type(self)
    # A library may have replaced the class by a subclass of the governed class, as torch does for
    # parametrizations.
    governed: Any = next(base for base in kind.__mro__ if "_gpu_base" in vars(base))
    made, args, *rest = governed._gpu_base.__reduce_ex__(self, protocol)
    if args and args[0] is kind is governed and made is copyreg.__newobj__:  # type: ignore[attr-defined]
        # With `__newobj__`, pickle requires the object's own class, so another constructor is used.
        made = copyreg._reconstructor  # type: ignore[attr-defined]
        args = (governed._gpu_base, object, None)
    return made, args, *rest


def _copy_as_base(self: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of the module, as an object of the class that the user wrote."""
    own = getattr(type(self)._gpu_base, "__deepcopy__", None)
    if own is not None:
        return own(self, memo)
    return copy._reconstruct(self, memo, *self.__reduce_ex__(4))  # type: ignore[attr-defined]
