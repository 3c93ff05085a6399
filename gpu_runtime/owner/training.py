"""Keeps a module in training on its device between its calls.

Pinning a module only during its calls is not enough, because `backward` and `step` do not call it.
A module is in training if it was adopted with its optimizer, or while it has gradients or an
autograd graph. In a kernel, a module in training is in use while a cell runs. In a script, the
module is in use from a `forward` with gradients enabled until `step`, `zero_grad` or the end of the
graph.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from ..facts import NEVER
from ..kernel_activity import Activity, activity
from .pins import AnchorRef, Held, new_anchor, thread_of

_MOST_NODES = 64  # at most so many values of a result are searched for graphs
_KEY = "gpu_runtime"  # in the metadata of an autograd node


class Trained(Protocol):
    """The members of a handle of torch's backends that training needs."""

    optimizer: Any

    def has_gradients(self) -> bool: ...

    def moves_in_training(self) -> bool: ...


class Training:
    """Keeps one model on its device between its calls, while the model is in training."""

    def __init__(self, pins: set[AnchorRef], kernel: Activity = activity) -> None:
        """`pins` are the pins of the model. `kernel` records which cells run."""
        self.pins, self.kernel = pins, kernel
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

    def lives(self, handle: Trained) -> bool:
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


class Stepping(Protocol):
    """The members of a model that an optimizer step needs."""

    calling: Callable[[], Held]
    training: Training

    def stepped(self) -> None: ...


class _Arguments(tuple):
    """The arguments of `step`, with the `with` blocks that pin the models during the step.

    The frame of the step keeps the arguments. So the blocks end with the frame, whether the step
    returns or raises.
    """

    blocks: list[Held]


@functools.cache
def watch_steps(trained_by: Callable[[Any], list[Stepping]]) -> None:
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


def watch_zero_grad(optimizer: Any, model: Stepping) -> None:
    """From now on, `optimizer.zero_grad` releases the pins that a `forward` of `model` took.

    In a script, the model is also pinned while its gradients are cleared. Without this pin, the
    monitor measured the model meanwhile, and the process ended with a segmentation fault.
    """
    original = optimizer.zero_grad
    of = weakref.ref(model)

    @functools.wraps(original)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        watched = of()
        if watched is None:
            return original(*args, **kwargs)
        with watched.calling() if watched.training.in_script else contextlib.nullcontext():
            result = original(*args, **kwargs)
        watched.training.stepped()
        return result

    # The new method is an attribute of the instance, as torch's schedulers do with `step`. A pickle
    # of the optimizer does not contain it.
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)
