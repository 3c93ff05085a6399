"""Pins: objects that keep a model on its device while a block of code uses it.

A pin must end with its `with` block, even if the stop button strikes inside `__exit__`, where a
release written in Python would never run. So a pin is no counter. It is the life of a small object
that only the interpreter's stack refers to while the block runs. When the block ends, in any way,
the object dies. A weak reference's callback, C code that no signal handler can interrupt, then
removes the pin from the set.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any


class Anchor:
    """Lives exactly as long as a `with` block runs, and records the thread that runs it.

    `call` is true if the block is a call of the model itself.
    """

    __slots__ = ("thread", "call", "__weakref__")

    def __init__(self, call: bool = False) -> None:
        self.thread, self.call = threading.get_ident(), call


class Pin(weakref.ref[Anchor]):
    """One use of a model: a weak reference to its anchor, and the thread it runs in."""

    __slots__ = ("thread", "call")
    thread: int
    call: bool

    def __new__(cls, anchor: Anchor, ended: Callable[[Any], None]) -> Pin:
        """`ended(pin)` is called when the anchor dies."""
        pin = super().__new__(cls, anchor, ended)
        pin.thread, pin.call = anchor.thread, anchor.call
        return pin


class _Leave:
    """`__exit__`, looked up on a `Held`: a C callable that alone keeps the anchor alive.

    The interpreter looks `__exit__` up before it calls `__enter__`. It keeps the result on its stack
    and drops it when the block has ended, at whatever instruction an interrupt strikes.
    `contextlib.ExitStack` looks it up on the class instead. It gets a plain function, and the anchor
    lives as long as the stack holds the `Held`.
    """

    def __get__(self, held: Held | None, kind: type | None = None) -> Any:
        if held is None:
            return _leave_late
        anchor = Anchor(held._call)
        held._anchor = weakref.ref(anchor)
        leave = functools.partial(_leave, held._finish)
        leave.anchor = anchor  # type: ignore[attr-defined]
        return leave


def _leave(
    finish: Callable[[BaseException | None], None], kind: Any, error: Any, trace: Any
) -> None:
    finish(error)


def _leave_late(held: Held, kind: Any, error: Any, trace: Any) -> None:
    held._kept = None
    held._finish(error)


class Held:
    """A `with` block that holds something for exactly as long as it runs, also when interrupted."""

    __slots__ = ("_start", "_finish", "_anchor", "_kept", "_call")

    def __init__(
        self,
        start: Callable[[Callable[[], Anchor | None]], Any],
        finish: Callable[[BaseException | None], None],
        call: bool = False,
    ) -> None:
        """`start(anchor)` returns what the block yields, and registers the weak reference `anchor`.

        `finish(error)` runs at the end for what is better done at once. Nothing may depend on its
        running. `call` marks a block that is a call of the model itself.
        """
        self._start, self._finish, self._call = start, finish, call
        self._anchor: Callable[[], Anchor | None] | None = None
        self._kept: Anchor | None = None

    def __enter__(self) -> Any:
        anchor, self._anchor = self._anchor, None
        if anchor is None:  # `__enter__` was called by hand or by an ExitStack
            self._kept = Anchor(self._call)
            anchor = weakref.ref(self._kept)
        return self._start(anchor)

    __exit__ = _Leave()
