"""The reasons why the memory of a kernel must not be moved now: threads, tasks and callbacks of the
user, and other libraries.

Threads, tasks and callbacks could run code while the memory is not on the card. Libraries could have stored addresses
of the memory. Nothing here moves memory.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Iterator
from types import BuiltinMethodType, CodeType, MethodType
from typing import Any, NamedTuple

# These libraries may have stored the addresses of tensors, or run code of their own on the card.
OTHER_LIBRARIES = (
    "cupy", "numba.cuda", "jax", "tensorflow", "cudf", "rmm", "pycuda", "tensorrt", "warp", "vllm",
    "deepspeed", "transformer_engine", "dgl",
)  # fmt: skip
KERNEL_THREADS = frozenset(
    ("MainThread", "IOPub", "Control", "Heartbeat", "Shell channel", "IPythonHistorySavingThread")
)
KERNEL_THREAD_TYPES = frozenset(
    (
        "ParentPollerUnix", "HistorySavingThread", "Heartbeat", "ControlThread", "ShellChannelThread",
        "WriterThread", "ReaderThread", "TMonitor", "GarbageCollectorThread",
    )
)  # fmt: skip
KERNEL_TASKS = frozenset(
    ("Kernel.dispatch_queue", "Kernel.shell_main", "Kernel.dispatch_shell", "Kernel.process_one")
)
# A callback of these packages runs no code of the user.
CALLBACK_PACKAGES = frozenset(
    ("ipykernel", "tornado", "zmq", "asyncio", "jupyter_client", "panel", "bokeh")
)
# A place is the file and the function that a thread executes now. RESTING has the places where the
# kernel's own threads wait.
WAITING = ("threading.py", "wait")
RESTING = frozenset(
    (
        ("selectors.py", "select"), WAITING, ("iostream.py", "_watch_pipe_fd"),
        ("__init__.py", "device"), ("parentpoller.py", "run"), ("_monitor.py", "run"),
        ("queue.py", "get"), ("thread.py", "_worker"), ("pydevd_comm.py", "_read_line"),
        ("garbage.py", "run"),  # of ZeroMQ; it frees the bytes of large outputs
    )
)  # fmt: skip
# A thread that waits at one of these places does not prevent a move, even if its name is not known as a name of
# the kernel's threads: a worker of a thread pool with an empty queue, and two threads of ipykernel and tqdm.
IDLE = frozenset(
    (("thread.py", "_worker"), ("iostream.py", "_watch_pipe_fd"), ("_monitor.py", "run"))
)
OURS = "gpu_runtime."  # the threads of these modules touch the kernel's tensors only to move them


def why_not_modules() -> str:
    """The reason why the memory must not be moved now, or "" if no module is a reason.

    Reasons are a loaded library that may have stored addresses of tensors, and an open process group.
    """
    for name in OTHER_LIBRARIES:
        if name in sys.modules:
            return f"{name} is loaded, which may keep addresses of its own"
    torch = sys.modules.get("torch")
    group = getattr(torch, "distributed", None)
    if group is not None and group.is_available() and group.is_initialized():
        return "a process group is open (torch.distributed)"
    return ""


def why_not_loop(kernel: Any) -> str:
    """The reason why the memory must not be moved now, or "" if no event loop of the `kernel` is a reason.

    Reasons are code of the user that waits in the main thread's event loop, or in the loop of a subshell. JupyterLab
    opens a subshell for the messages of widgets. Before a message to a subshell is handled, parked memory comes back,
    as before a message to the main thread.
    """
    if getattr(kernel, "eventloop", None) is not None:
        return "a GUI event loop runs its callbacks (%gui)"
    if why := _why_not_io_loop(kernel.io_loop):
        return why
    manager = getattr(getattr(kernel, "shell_channel_thread", None), "_manager", None)
    threads = getattr(manager, "_cache", {})
    for subshell in manager.list_subshell() if manager is not None else ():
        io_loop = getattr(threads.get(subshell), "io_loop", None)
        if io_loop is None:  # another version of ipykernel
            return "a subshell is open"
        if why := _why_not_io_loop(io_loop):
            return f"{why}, in a subshell"
    return ""


def _why_not_io_loop(io_loop: Any) -> str:
    loop = getattr(io_loop, "asyncio_loop", None)
    if loop is None:
        return ""
    for task in asyncio.all_tasks(loop):
        if not is_kernel_task(task) and not _repeats_panel(task):
            name = getattr(task.get_coro(), "__qualname__", "?")
            return f"an asyncio task is pending ({name})"
    for handle in tuple(getattr(loop, "_scheduled", ())):
        if not handle.cancelled() and not _is_kernels(handle._callback, *(handle._args or ())):
            return "a callback is scheduled (call_later)"
    for handlers in _handlers(io_loop, loop):
        if not _is_kernels(*handlers):
            return "a callback waits for a file or a socket (add_reader)"
    return ""


def _handlers(io_loop: Any, loop: Any) -> Iterator[tuple[Any, ...]]:
    """The callbacks that wait for a file or a socket, each with its arguments."""
    selector = getattr(loop, "_selector", None)
    watched = (selector.get_map() if selector is not None else None) or {}
    for key in list(watched.values()):
        for handle in key.data if isinstance(key.data, tuple) else ():
            if handle is not None and not handle.cancelled():
                yield (handle._callback, *(handle._args or ()))
    for _, handler in list(getattr(io_loop, "handlers", {}).values()):
        yield (handler,)


def is_kernel_task(task: asyncio.Task[Any]) -> bool:
    """Whether the kernel itself made the `task`, and not a cell.

    ipykernel 7 makes its tasks through the function `_async_in_context` in `ipykernel.utils`. Such a task runs a
    coroutine that is defined inside this function.
    """
    coroutine = task.get_coro()
    if getattr(coroutine, "__qualname__", "") in KERNEL_TASKS:
        return True
    code, utils = getattr(coroutine, "cr_code", None), sys.modules.get("ipykernel.utils")
    made_by = getattr(utils, "_async_in_context", None)
    constants = made_by.__code__.co_consts if made_by is not None else ()
    return any(code is one for one in constants if code is not None)


def _repeats_panel(task: asyncio.Task[Any]) -> bool:
    """Whether the `task` is Panel's, and repeats a function of CALLBACK_PACKAGES.

    Panel starts such a task at the first event of a widget, and never ends it.
    """
    coroutine = task.get_coro()
    if getattr(coroutine, "__qualname__", "") != "PeriodicCallback._async_repeat":
        return False
    frame = getattr(coroutine, "cr_frame", None)
    repeated = frame.f_locals.get("func") if frame is not None else None
    return repeated is not None and _is_kernels(repeated)


def _is_kernels(*values: Any) -> bool:
    """Whether all functions among the `values` (a callback and its arguments) belong to CALLBACK_PACKAGES."""
    functions = (function for value in values for function in _functions(value))
    return all(package(function) in CALLBACK_PACKAGES for function in functions)


def _functions(value: Any) -> Iterator[Any]:
    """The functions that `value` calls; `value` is a callback or one of its arguments.

    tornado and Panel wrap the user's function in a `partial` or a `PeriodicCallback`, which are unwrapped here.
    """
    if isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _functions(part)
    elif isinstance(value, MethodType) and type(value.__self__).__name__ == "PeriodicCallback":
        yield from _functions(value.__self__.callback)
    elif callable(value):
        yield value


def package(function: Any) -> str:
    """The name of the top-level package in which `function` is defined."""
    if isinstance(function, MethodType):
        function = function.__func__
    of_type = isinstance(function, BuiltinMethodType) and function.__self__ is not None
    module = type(function.__self__).__module__ if of_type else getattr(function, "__module__", "")
    return str(module).partition(".")[0]


class _Thread(NamedTuple):
    """The position of a thread, as a file and a function.

    The frame of the thread is not kept. A frame can be part of a reference cycle, which would keep the
    moved bytes alive.
    """

    code: CodeType  # the code of its innermost function
    is_ours: bool  # gpu_runtime started it
    wakes: bool  # it waits with a time limit, and then runs by itself

    @property
    def rests(self) -> bool:
        """Whether the thread waits in one of the functions where the kernel's own threads wait."""
        return self.place in RESTING

    @property
    def is_idle(self) -> bool:
        """Whether the thread waits until a cell gives it work."""
        return self.place in IDLE or (self.place == WAITING and not self.wakes)

    @property
    def place(self) -> tuple[str, str]:
        """The name of the file, and the function."""
        return self.code.co_filename.rpartition("/")[2], self.code.co_name


def _threads() -> dict[int, _Thread]:
    """The threads that run Python, by their identifiers."""
    return {
        ident: _Thread(frame.f_code, _is_ours(frame), _wakes(frame))
        for ident, frame in sys._current_frames().items()
    }


def _is_ours(frame: Any) -> bool:
    """Whether gpu_runtime started the thread of `frame`. If so, the thread's outermost frame is in the module
    `gpu_runtime.threads`.
    """
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").startswith(OURS)


def _wakes(frame: Any) -> bool:
    """Whether the thread of `frame` waits for another thread, and this wait has a time limit."""
    place = frame.f_code.co_filename.rpartition("/")[2], frame.f_code.co_name
    return place == WAITING and frame.f_locals.get("timeout") is not None


def why_not_threads(main: int | None) -> str:
    """The reason why the memory must not be moved now, with the name of a thread; or "" if no thread is a reason.

    A thread prevents the move if it runs, or will run by itself as a `threading.Timer` does. Threads of the kernel and
    of gpu_runtime never prevent it. `main` is the identifier of the main thread.
    """
    # `threading.enumerate` is not used: debugpy replaces it by a function that leaves out the threads of
    # debugpy and of the kernel.
    known: dict[int, threading.Thread] = dict(threading._active)  # type: ignore[attr-defined]
    for ident, found in _threads().items():
        if ident in (main, threading.get_ident()) or found.is_idle or found.is_ours:
            continue
        thread = known.get(ident)
        if thread is None or not _is_kernel_thread(thread):
            return f"a thread of its own runs ({thread.name if thread else ident})"
    return ""


def _is_kernel_thread(thread: threading.Thread) -> bool:
    return (
        thread.name in KERNEL_THREADS
        or type(thread).__name__ in KERNEL_THREAD_TYPES
        or getattr(thread, "is_pydev_daemon_thread", False)  # of the debugger
    )


def not_at_rest(but: set[int]) -> str:
    """The function in which a thread runs instead of waiting, or "" if all threads wait.

    The threads whose identifiers are in `but`, and the threads of gpu_runtime, are not examined.
    """
    for ident, found in _threads().items():
        if ident not in but and not found.rests and not found.is_ours:
            return f"{found.code.co_name} in {found.code.co_filename}"
    return ""
