"""The names in this process that can hold memory: variables, outputs, the last error, threads.

The IPython extension registers its namespace in this module. A script has the variables of
`__main__`. `backends/pytorch/holders.py` finds the storages that a name reaches.
"""

from __future__ import annotations

import builtins
import gc
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from types import FrameType, TracebackType
from typing import Any, NamedTuple

VARIABLE, OUTPUT, ERROR = "variable", "output", "last error"
RUNNING, THREAD, MODEL, ELSEWHERE = "running", "thread", "model", "elsewhere"
LAST_ERROR = "the last error"

# Every cell runs inside frames of these libraries. These frames hold no objects of the user.
_RUNNERS = frozenset("IPython ipykernel runpy _pytest".split())  # they call the user's code
_LIBRARIES = _RUNNERS | frozenset(
    "traitlets tornado asyncio selectors concurrent gpu gpu_runtime zmq threading pluggy".split()
)

_NAME = type.__dict__["__name__"]  # a class of the user's may have a `__name__` of its own
_PLAIN = (str, bytes, int, float, type(None))
# A class of the user's may have attributes of its own with these names.
_ARGS: Any = BaseException.args
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", None)  # Python 3.10 has none


class Name(NamedTuple):
    """One name of this process, without the object that it refers to."""

    name: str
    kind: str
    what: str = ""  # such as the class of the object
    cell: str = ""  # the cell that made it, as In [7]


class Namespace:
    """The names of a process: variables, running functions, threads, and the last error.

    This class is for a script. The front end of a notebook registers an object of a subclass. Only
    the method `held` returns objects, and this class keeps no reference to them.
    """

    @property
    def _variables(self) -> dict[str, Any]:
        return vars(sys.modules["__main__"])

    def _errors(self) -> list[BaseException]:
        """The last errors, which Python keeps."""
        return last_errors()

    def names(self) -> list[Name]:
        """Every name that may hold memory."""
        mine = self._variables
        found = [Name(key, VARIABLE, describe(mine.get(key))) for key in self.variables()]
        return [*found, *frame_names(), Name(LAST_ERROR, ERROR, functions_of(self._errors()))]

    def held(self, name: Name) -> list[Any]:
        """The objects to which `name` refers, one entry for each reference that a deletion of it would remove."""
        if name.kind == ERROR:
            errors = self._errors()
            return [*variables_of(frames_of(errors)), *objects_of(errors)]
        if name.kind == VARIABLE:
            return [self._variables[name.name]] if name.name in self._variables else []
        return values_in(frames_named(name))

    def shared(self) -> list[Any]:
        """Containers that many names share. A search for a name's memory does not enter them."""
        return [self._variables]

    def emptied(self, name: Name) -> list[Any]:
        """What a deletion of `name` empties, so that it holds nothing then: the frames of an error."""
        return [*frames_of(self._errors())] if name.kind == ERROR else []

    def variables(self) -> list[str]:
        """The names of the user's variables."""
        names = [key for key in list(self._variables) if isinstance(key, str)]
        return [name for name in names if not name.startswith("__")]

    def release(self, names: Sequence[Name]) -> None:
        """Releases the outputs and the last error that are among `names`."""
        if any(name.kind == ERROR for name in names):
            clear(self._errors())

    def delete(self, variable: str) -> None:
        """Deletes a `variable`, and the outputs that refer to the same object."""
        self._variables.pop(variable, None)


class _Registered:
    """The namespace of this process: the namespace of a script, until a front end sets its own."""

    current = Namespace()


registered = _Registered()


def describe(value: Any) -> str:
    """The name of the class of `value`. No code of the user runs."""
    return _NAME.__get__(type(value))


# -- the last error --------------------------------------------------------------------------------


def last_errors(more: Iterable[Any] = ()) -> list[BaseException]:
    """The errors that Python keeps after a traceback, and the errors in `more`, each once."""
    every = [getattr(sys, "last_exc", None), getattr(sys, "last_value", None), *more]
    return list({id(error): error for error in every if isinstance(error, BaseException)}.values())


def frames_of(errors: Iterable[BaseException]) -> list[FrameType]:
    """The user's frames in the tracebacks of `errors`, of their causes, and in Python's last one, each once."""
    frames = [frame for frame, _ in traceback.walk_tb(getattr(sys, "last_traceback", None))]
    for error in with_causes(errors):
        frames += [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [frame for frame in {id(frame): frame for frame in frames}.values() if _is_users(frame)]


def objects_of(errors: Iterable[BaseException]) -> list[Any]:
    """The objects to which `errors` and causes refer, such as the tensor of `tensor.typo`, one for each reference."""
    found: list[Any] = []
    for error in with_causes(errors):
        found += _ARGS.__get__(error)
        if isinstance(error, AttributeError):
            found.append(error.obj)
    return found


def with_causes(errors: Iterable[BaseException]) -> list[BaseException]:
    """The `errors` and their causes, each once."""
    pending: list[BaseException | None] = list(errors)
    found: dict[int, BaseException] = {}
    while pending:
        error = pending.pop()
        if error is None or id(error) in found:
            continue
        found[id(error)] = error
        pending += [error.__cause__, error.__context__]
        if _GROUP and isinstance(error, _GROUP):
            pending += _GROUP.exceptions.__get__(error)
    return list(found.values())


def functions_of(errors: Iterable[BaseException]) -> str:
    """The functions in which the errors were raised, the innermost last, such as `step, forward`."""
    names = [frame.f_code.co_name for frame in frames_of(errors)]
    return ", ".join(dict.fromkeys(names))


def clear(errors: Iterable[BaseException]) -> None:
    """Removes the references that `errors` and their causes have to the user's objects.

    Clears the local variables of the user's frames that no longer run. The traceback ends before a
    function with variables of an enclosing function, since its frame keeps them. In the arguments
    of an error, an object that is not plain is replaced by the name of its class.
    """
    errors = with_causes(errors)
    for frame in frames_of(errors):
        try:
            frame.clear()
            # If a debugger has read `f_locals`, Python keeps a copy of the variables. This read
            # updates the copy, which is empty afterwards.
            _ = frame.f_locals
        except RuntimeError:  # the frame still runs; its variables end with the frame
            pass
    for error in errors:
        error.__traceback__ = _without_closures(error.__traceback__)
        if isinstance(error, AttributeError):
            error.obj = None
        args = _ARGS.__get__(error)
        plain = [value if isinstance(value, _PLAIN) else describe(value) for value in args]
        if any(value is not one for value, one in zip(args, plain, strict=True)):
            _ARGS.__set__(error, tuple(plain))


def _without_closures(traceback: TracebackType | None) -> TracebackType | None:
    """The `traceback`, cut before the first of the user's functions that has a closure."""
    kept, entry = None, traceback
    while entry is not None:
        if entry.tb_frame.f_code.co_freevars and _is_users(entry.tb_frame):
            if kept is None:
                return None
            kept.tb_next = None
            return traceback
        kept, entry = entry, entry.tb_next
    return traceback


def variables_of(frames: Iterable[FrameType]) -> list[Any]:
    """The objects to which finished `frames` refer, with one entry for each reference.

    A variable that an inner function uses too is in a cell, and the frame refers to the cell.
    """
    found: list[Any] = []
    for frame in frames:
        others = (frame.f_globals, frame.f_builtins, frame.f_code)
        for value in gc.get_referents(frame):
            if not (isinstance(value, FrameType) or any(value is other for other in others)):
                found.append(value)
    return found


# -- frames that run -------------------------------------------------------------------------------


def frame_names() -> list[Name]:
    """The functions that run in this thread, and the other threads that run the user's code."""
    names = dict.fromkeys(
        Name(f"{frame.f_code.co_name}()", RUNNING, "local variables")
        for frame in _stack(threading.get_ident())
    )
    for thread in threading.enumerate():
        if thread.ident != threading.get_ident():
            frames = _stack(thread.ident)
            if frames:
                names[Name(f"thread {thread.name}", THREAD, frames[0].f_code.co_name)] = None
    return list(names)


def frames_named(name: Name) -> list[FrameType]:
    """The frames of the function or thread that has this `name`, a result of `frame_names`."""
    if name.kind == RUNNING:
        here = _stack(threading.get_ident())
        return [frame for frame in here if f"{frame.f_code.co_name}()" == name.name]
    threads = [thread for thread in threading.enumerate() if f"thread {thread.name}" == name.name]
    return [frame for thread in threads for frame in _stack(thread.ident)]


def _stack(thread: int | None) -> list[FrameType]:
    """The frames of the user's functions that run in a `thread`, the innermost first."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    frames = []
    while frame is not None and _library(frame) not in _RUNNERS:
        if _is_users(frame):
            frames.append(frame)
        frame = frame.f_back
    return frames


def _is_users(frame: FrameType) -> bool:
    """Whether `frame` belongs to a function, and not to one of the libraries that run cells."""
    is_function = bool(frame.f_code.co_flags & 1)  # CO_OPTIMIZED
    return is_function and _library(frame) not in _LIBRARIES


def _library(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).split(".")[0]


def values_in(frames: Iterable[FrameType]) -> list[Any]:
    """The local variables of `frames`, with one entry for each reference that a frame holds."""
    found: list[Any] = []
    for frame in frames:
        variables = frame.f_locals
        found += variables.values()
        debugged = frame.f_trace is not None or sys.gettrace() is not None
        if isinstance(variables, dict) and not debugged:
            # Up to Python 3.12 `f_locals` is a copy of the variables. The frame keeps this copy,
            # which would keep the objects alive, so the copy is emptied. It is not emptied while a
            # debugger runs: Python then copies `f_locals` back into the variables after each step.
            variables.clear()
    return found
