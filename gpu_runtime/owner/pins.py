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
"""

from __future__ import annotations

import weakref
from _thread import get_ident
from collections.abc import Callable
from types import MethodType
from typing import Any

from ..errors import NeedsWith, reword

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
        self._anchor: AnchorRef | None = (
            None  # anchor of the latest lookup of `__exit__`, until it is used
        )
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
