"""The reasons why the memory of a kernel must not be moved now: threads, tasks, callbacks and timers, and other
libraries.

What could run while the memory is away is a reason. The parts of the kernel are known by identity: they are objects of
the running kernel application. Everything else is judged. A library may have stored addresses of the memory. Nothing
here moves memory.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import datetime
import functools
import gc
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import (
    BuiltinMethodType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

from gpu_runtime import other_libraries
from gpu_runtime.names import values_in

OURS = ("gpu_runtime", "gpu", "gpu_panels")  # the packages of gpu-console
TIMERS = {"ITIMER_REAL": "SIGALRM", "ITIMER_VIRTUAL": "SIGVTALRM", "ITIMER_PROF": "SIGPROF"}
PANEL = "panel.io.callbacks"
# The longest wait for operations of gloo that are under way.
PENDING = datetime.timedelta(seconds=1)
WAIT = threading.Condition.wait.__code__
RUN_FOREVER = asyncio.BaseEventLoop.run_forever.__code__
MOST_OBJECTS = 20_000  # the nearest objects that a thread or a callback refers to; 20 ms
UNKNOWN = object()  # stands for the objects that were not examined
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), ModuleType, CodeType)


class EndsByItself(str):
    """A reason not to move the memory that ends within moments, and that nobody need do anything about."""


def why_not_modules() -> str:
    """Why libraries are a reason not to move: they hold memory of a card and maybe addresses of tensors, or a
    connection to other processes.
    """
    for library in other_libraries.held():
        return f"{library}, and may keep addresses of tensors"
    return _why_not_groups()


def _why_not_groups() -> str:
    """The reason why the memory must not be moved now: torch's connections to other processes.

    A group of gloo that has only this process is allowed. Its barrier ends after all earlier operations have ended, in
    12 µs if there are none. In a larger group other processes decide when an operation ends, and NCCL may keep
    addresses.
    """
    calls = _loaded("torch.distributed.rpc.api", "_is_current_rpc_agent_set")
    if calls is not None and calls():
        return "other processes may call functions of this one (torch.distributed.rpc)"
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    groups = getattr(getattr(distributed, "_world", None), "pg_map", {})
    for group, (backend, _) in list(groups.items()):
        size = group.size()
        parts = [group._get_backend(device) for device in group._device_types]
        gloo = getattr(distributed, "ProcessGroupGloo", None)
        if size > 1 or not parts or any(type(part) is not gloo for part in parts):
            processes = "1 process" if size == 1 else f"{size} processes"
            return f"a process group is open (torch.distributed: {backend}, {processes})"
        for part in parts:
            try:
                part.barrier().wait(PENDING)
            except RuntimeError:
                return "an operation of torch.distributed is pending"
    known = groups or distributed is None or not distributed.is_initialized()
    return "" if known else "a process group is open (torch.distributed)"


def why_not_timers(own: Own | None = None) -> str:
    """Why an armed timer, or a function that each collection calls, is a reason."""
    for name, number in TIMERS.items():
        if hasattr(signal, name) and signal.getitimer(getattr(signal, name))[0]:
            handler = signal.getsignal(getattr(signal, number))
            return f"a timer is armed (signal.{name}, which calls {_described(handler)})"
    found = users(gc.callbacks, own or Own())
    return (
        f"each garbage collection calls {_described(found)} (gc.callbacks)"
        if found is not None
        else ""
    )


# -- the kernel's own ------------------------------------------------------------------------------


class Own:
    """The objects of one running kernel application: its loops, streams, sockets and threads."""

    def __init__(self, kernel: Any = None) -> None:
        """A kernel of another version may lack some of them."""
        app, shell = getattr(kernel, "parent", None), getattr(kernel, "shell", None)
        channel = getattr(kernel, "shell_channel_thread", None)
        self.subshells = getattr(channel, "_manager", None)
        cache = getattr(self.subshells, "_cache", {})
        names = self.subshells.list_subshell() if self.subshells is not None else []
        self.shells = [cache.get(name) for name in names]
        threads = [channel, *self.shells]
        threads += [getattr(app, name, None) for name in ("heartbeat", "control_thread", "poller")]
        threads.append(getattr(getattr(app, "iopub_thread", None), "thread", None))
        history = getattr(shell, "history_manager", None)
        threads.append(getattr(history, "save_thread", None))
        streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        threads += [getattr(stream, "watch_fd_thread", None) for stream in streams]
        # ZeroMQ frees the bytes of large outputs in a thread.
        zeromq = _loaded("zmq.utils.garbage", "gc")
        threads.append(getattr(zeromq, "thread", None))
        threads += _debugger_threads()
        self.threads = [thread for thread in threads if thread is not None]
        self.kernel, io_loops = kernel, [getattr(kernel, "io_loop", None)]
        io_loops += [getattr(subshell, "io_loop", None) for subshell in self.shells]
        loops = [getattr(loop, "asyncio_loop", None) for loop in io_loops]
        # Panel repeats a function of its own for each page, also for `%gpu console`.
        panel = _loaded("panel.io.state", "state")
        parts = [kernel, app, shell, self.subshells, panel, *self.threads, *io_loops, *loops]
        parts += [getattr(kernel, name, None) for name in ("session", "comm_manager", "log")]
        parts += [getattr(app, "iopub_thread", None), *streams]
        self._ids = {id(part) for part in parts if part is not None}

    def has(self, value: Any) -> bool:
        """Whether `value` is one of the objects."""
        return id(value) in self._ids

    def runs(self, coroutine: Any) -> bool:
        """Whether the `coroutine` is a method of the kernel, or ipykernel's wrapper around such a method."""
        code, frame = getattr(coroutine, "cr_code", None), getattr(coroutine, "cr_frame", None)
        variables = frame.f_locals if frame is not None else {}
        method = getattr(type(self.kernel), getattr(code, "co_name", ""), None)
        if method is not None and getattr(method, "__code__", None) is code:
            return variables.get("self") is self.kernel
        periodic = _loaded(PANEL, "PeriodicCallback")
        if periodic is not None and code is periodic._async_repeat.__code__:
            return not any(self.strangers(variables.get("func")))
        return code in _wrappers() and not any(self.strangers(variables.get("f")))

    def strangers(self, *values: Any) -> Iterator[Any]:
        """Yields the functions that `values` (a callback and its arguments) call and that are not the kernel's."""
        for value in values:
            if isinstance(value, functools.partial):
                yield from self.strangers(value.func, *value.args, *value.keywords.values())
            elif callable(value) and not self._is_own(value):
                yield value

    def _is_own(self, function: Any) -> bool:
        if type(function) in (MethodType, BuiltinMethodType, _task_step()):
            holder = function.__self__
            if self.has(holder) or isinstance(holder, asyncio.Task):  # tasks are judged as such
                return True
            called = _callbacks_of(holder)
            return called is not None and not any(self.strangers(*called))
        if type(function) is not FunctionType:
            return False
        if function.__code__ in _wrappers():
            return not any(self.strangers(_closure(function).get("f")))
        if function is asyncio.futures._set_result_unless_cancelled:  # type: ignore[attr-defined]
            return True  # of `asyncio.sleep`; the task that sleeps is judged
        return _is_ours(function.__globals__)

    def described(self, stranger: Any) -> str:
        """What the function `stranger` is, and which code of the user it calls."""
        target = users([stranger], self)
        if target is None or target is UNKNOWN or target is stranger:
            return _described(stranger)
        return f"{_described(stranger)}, which calls {_described(target)}"


def _debugger_threads() -> list[threading.Thread]:
    """The threads of JupyterLab's debugger, which evaluates nothing without a request; see `parking.py`."""
    pydevd = sys.modules.get("pydevd")
    daemon = _loaded("_pydevd_bundle.pydevd_daemon_thread", "PyDBDaemonThread")
    debugger = pydevd.get_global_debugger() if pydevd is not None else None
    made = list(getattr(debugger, "created_pydb_daemon_threads", ()))
    active = list(threading._active.values())  # type: ignore[attr-defined]
    return made + [thread for thread in active if daemon in type(thread).__mro__]


@functools.cache
def _task_step() -> type:
    """The class of the callback with which a task of asyncio continues. Python gives it no name."""

    class Loop(asyncio.AbstractEventLoop):
        step: Any = None

        def get_debug(self) -> bool:
            return False

        def call_soon(self, callback: Any, *_: Any, **__: Any) -> Any:
            self.step = callback

    async def nothing() -> None:
        pass

    task = asyncio.Task(work := nothing(), loop=(loop := Loop()))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    work.close()
    return type(loop.step)


def _wrappers() -> tuple[CodeType, ...]:
    """The codes of the functions in which ipykernel 7 wraps the methods of a kernel."""
    made_by = _loaded("ipykernel.utils", "_async_in_context")
    constants = made_by.__code__.co_consts if made_by is not None else ()
    return tuple(constant for constant in constants if isinstance(constant, CodeType))


def _loaded(module: str, name: str) -> Any:
    """The object `name` of a `module`, or None if the module is not loaded."""
    return getattr(sys.modules.get(module), name, None)


def _callbacks_of(holder: Any) -> tuple[Any, ...] | None:
    """The functions that a stream of ZeroMQ or a `PeriodicCallback` calls; None for another object."""
    kind = type(holder)
    if kind is _loaded("zmq.eventloop.zmqstream", "ZMQStream"):
        called = (holder._recv_callback, holder._send_callback)
        nothing = kind.send_multipart.__code__.co_consts  # has the function that does nothing
        return tuple(hook for hook in called if getattr(hook, "__code__", kind) not in nothing)
    periodic = [_loaded(name, "PeriodicCallback") for name in ("tornado.ioloop", PANEL)]
    return (holder.callback,) if kind in periodic else None


def _closure(function: FunctionType) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: _content(cell) for name, cell in cells}


def _content(cell: Any) -> Any:
    with contextlib.suppress(ValueError):  # it is empty
        return cell.cell_contents
    return None


def is_ours(function: Any) -> bool:
    """Whether `function` is a function or a method of gpu-console."""
    return _is_ours(getattr(getattr(function, "__func__", function), "__globals__", None))


def is_users(function: Any) -> bool:
    """Whether code of the user is called by `function`: a function, a method, a class or a callable object."""
    while isinstance(function, (functools.partial, MethodType)):
        holder = getattr(function, "__self__", None)
        if holder is not None and any(map(is_users_class, type(holder).__mro__)):
            return True
        function = function.func if isinstance(function, functools.partial) else function.__func__
    if isinstance(function, FunctionType):
        return not _is_installed_function(function)
    kind = function if isinstance(function, type) else type(function)
    return any(map(is_users_class, kind.__mro__))


def _is_ours(variables: dict[str, Any] | None) -> bool:
    """Whether `variables` are the globals of a loaded module of gpu-console."""
    name = str((variables or {}).get("__name__", ""))
    module = sys.modules.get(name) if name.partition(".")[0] in OURS else None
    return module is not None and vars(module) is variables


# -- the event loops -------------------------------------------------------------------------------


def why_not_loop(kernel: Any, own: Own | None = None) -> str:
    """Why an event loop of the `kernel`, or of a subshell, is a reason: it has tasks, callbacks, servers or connections
    that are not the kernel's own.

    JupyterLab opens a subshell for the messages of widgets. Before a message to a subshell is handled, parked memory
    comes back, as before a message to the main thread.
    """
    if getattr(kernel, "eventloop", None) is not None:
        return "a GUI event loop runs its callbacks (%gui)"
    own = own or Own(kernel)
    if why := _why_not_io_loop(own, kernel.io_loop):
        return why
    for shell in own.shells:
        io_loop = getattr(shell, "io_loop", None)
        if io_loop is None:  # another version of ipykernel
            return "a subshell is open"
        if why := _why_not_io_loop(own, io_loop):
            return f"{why}, in a subshell"
    return ""


def _why_not_io_loop(own: Own, io_loop: Any) -> str:
    loop = getattr(io_loop, "asyncio_loop", None)
    if loop is None:
        return ""
    for task in asyncio.all_tasks(loop):
        if not own.runs(task.get_coro()):
            return f"an asyncio task is pending ({_described(task.get_coro())})"
    ready = getattr(loop, "_ready", ())
    for handles, how in (
        (getattr(loop, "_scheduled", ()), "a callback is scheduled (call_later)"),
        (ready, "a callback is due (call_soon)"),
        (getattr(loop, "_signal_handlers", {}).values(), "a callback waits for a signal"),
    ):
        for handle in tuple(handles):
            for stranger in () if handle.cancelled() else own.strangers(*_calls(handle)):
                why = f"{how}: {own.described(stranger)}"
                return EndsByItself(why) if handles is ready else why
    for called in _watching(io_loop, loop):
        for stranger in own.strangers(*called):
            return f"{_watches(called)}: {own.described(stranger)}"
    return ""


def _calls(handle: asyncio.Handle) -> tuple[Any, ...]:
    return (handle._callback, *(handle._args or ()))  # type: ignore[attr-defined]


def _watching(io_loop: Any, loop: Any) -> Iterator[tuple[Any, ...]]:
    """The callbacks that wait for a file or a socket, each with its arguments."""
    selector = getattr(loop, "_selector", None)
    watched = (selector.get_map() if selector is not None else None) or {}
    for key in list(watched.values()):
        for handle in key.data if isinstance(key.data, tuple) else ():
            if handle is not None and not handle.cancelled():
                yield _calls(handle)
    for _, handler in list(getattr(io_loop, "handlers", {}).values()):
        yield (handler,)


def _watches(called: tuple[Any, ...]) -> str:
    """What a callback that waits for a file or a socket is, from the functions that it calls."""
    if getattr(called[0], "__name__", "") in ("_accept_connection", "accept_handler"):
        return "a server listens on the event loop"
    if isinstance(getattr(called[0], "__self__", None), asyncio.BaseTransport):
        return "a connection is open on the event loop"
    return "a callback waits for a file or a socket (add_reader)"


# -- threads ---------------------------------------------------------------------------------------


def why_not_threads(main: int | None, own: Own | None = None) -> str:
    """Why a thread is a reason, with its name; or "".

    A thread prevents the move if it runs. It also prevents the move if it will wake by itself, and its stack refers to
    code of the user or to a tensor. Threads of the kernel and of gpu_runtime never prevent it. `main` is the identifier
    of the main thread.
    """
    own = own or Own()
    if starting := _starting():
        return EndsByItself(f"a thread of its own runs ({starting})")
    for ident, frame in _threads(own, {main, threading.get_ident()}).items():
        if frame.f_code is WAIT and values_of(frame).get("timeout") is None:
            continue  # another thread or a cell wakes it
        frames = stack(frame)
        found = users([*frames, *_tasks(frames)], own)
        if found is not None or not _sleeps(ident):
            why = f"a thread of its own runs ({_named(ident, frames, found)})"
            return why if found is not None else EndsByItself(why)
    return ""


def not_at_rest(but: Iterable[int | None], own: Own | None = None) -> str:
    """The thread that runs instead of waiting, or "" if all threads wait.

    The caller has raised `sys.setswitchinterval`, so that no thread runs Python after the return, until the caller
    releases the GIL. The threads whose identifiers are in `but`, and the threads of the kernel and of gpu_runtime, are
    not examined.
    """
    own, but = own or Own(), {*but, threading.get_ident()}
    before = {ident: _position(ident, frame) for ident, frame in _threads(own, but).items()}
    running = [ident for ident in before if not _sleeps(ident)]  # this reads files: others may run
    for ident, frame in _threads(own, but).items():
        if ident in running or before.get(ident) != _position(ident, frame):
            return _named(ident, stack(frame))
    return _starting()


def _starting() -> str:
    """The thread that has been started and runs no Python yet, so that it has no frame; or ""."""
    threads = list(threading._limbo.values())  # type: ignore[attr-defined]
    return f"{threads[0].name} starts" if threads else ""


def _position(ident: int, frame: FrameType) -> tuple[Any, ...]:
    """Where the thread is, and the processor time that it has used. A thread that waits changes neither."""
    return id(frame), frame.f_lasti, _processor_seconds(ident)


def _threads(own: Own, but: set[int | None]) -> dict[int, FrameType]:
    """The innermost frames of the threads that run Python, without those of the kernel and of gpu_runtime."""
    # `threading.enumerate` is not used: debugpy replaces it by a function that leaves out the threads of
    # debugpy and of the kernel.
    known: dict[int, threading.Thread] = dict(threading._active)  # type: ignore[attr-defined]
    return {
        ident: frame
        for ident, frame in sys._current_frames().items()
        if ident not in but
        and not any(known.get(ident) is thread for thread in own.threads)
        and not _is_ours(stack(frame)[-1].f_globals)
    }


def stack(frame: FrameType | None) -> list[FrameType]:
    """The frames of a thread, the innermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _tasks(frames: Iterable[FrameType]) -> Iterator[Any]:
    """The coroutines of the event loops that a thread with these `frames` runs."""
    for frame in frames:
        if frame.f_code is RUN_FOREVER:
            for task in asyncio.all_tasks(values_of(frame)["self"]):
                yield task.get_coro()


def values_of(frame: FrameType) -> dict[str, Any]:
    """The local variables of `frame`; the frame keeps no copy of them."""
    names = list(frame.f_locals)
    return dict(zip(names, values_in([frame]), strict=True))


def _processor_seconds(ident: int) -> float:
    if not hasattr(time, "pthread_getcpuclockid"):  # macOS
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


def _sleeps(ident: int) -> bool:
    """Whether the thread waits for the system: it neither computes, nor waits for a processor."""
    thread = threading._active.get(ident)  # type: ignore[attr-defined]
    number = thread.native_id if thread is not None else None
    if number is None and hasattr(time, "pthread_getcpuclockid"):
        number = ~(time.pthread_getcpuclockid(ident) >> 3)  # glibc and musl: the number is in it
    try:
        with open(f"/proc/self/task/{number}/stat", "rb") as file:
            return file.read().rpartition(b")")[2][1:2] == b"S"
    except FileNotFoundError:  # the thread has ended, or the system has no /proc
        return True


def _named(ident: int, frames: list[FrameType], found: Any = None) -> str:
    """The thread's name, its class, the function that it calls, and the object `found` to which it refers."""
    thread = threading._active.get(ident)  # type: ignore[attr-defined]
    if thread is None:
        kind, target = "a thread without a name", frames[-1]
    else:
        kind = f"{thread.name}: {type(thread).__module__}.{type(thread).__qualname__}"
        is_timer = type(thread) is threading.Timer
        own = thread.function if is_timer else getattr(thread, "_target", None)
        target = own or type(thread).run
    calls, refers = _described(target), "" if found is None else _described(found)
    return f"{kind} calls {calls}" + (f", and refers to {refers}" if refers not in calls else "")


# -- whose code ------------------------------------------------------------------------------------


def users(roots: Iterable[Any], own: Own) -> Any:
    """The nearest object of the user's that the objects `roots` refer to; None, or UNKNOWN for too many objects.

    Such an object is a function, a class or a frame whose code is in no installed package, or a tensor of torch.
    """
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    modules = {id(vars(module)) for module in list(sys.modules.values()) if module is not None}
    waiting, seen = collections.deque(roots), set[int]()
    while waiting and len(seen) < MOST_OBJECTS:
        value = waiting.popleft()
        kind = type(value)
        if kind in _PLAIN or id(value) in seen or id(value) in modules or own.has(value):
            continue
        if kind is MethodType and own.has(value.__self__):
            continue
        seen.add(id(value))
        code = _code(value)
        if code is not None and not _is_installed(code):
            if not _is_ours(
                getattr(value, "__globals__", None) or getattr(value, "f_globals", None)
            ):
                return value
        elif tensor in kind.__mro__:
            return value
        if kind is FrameType:
            waiting += values_in([value])
        elif kind is FunctionType:
            waiting += (value.__defaults__, value.__kwdefaults__, value.__closure__)
        elif isinstance(value, type):
            if is_users_class(value):
                return value
        elif is_users_class(kind):
            return kind
        else:
            waiting += gc.get_referents(value)
    return UNKNOWN if waiting else None


def _code(value: Any) -> CodeType | None:
    """The code of a function, a frame, a coroutine or a generator."""
    names = {
        FunctionType: "__code__", FrameType: "f_code", CoroutineType: "cr_code", GeneratorType: "gi_code"
    }  # fmt: skip
    name = names.get(type(value))
    return getattr(value, name) if name else None


def is_users_class(kind: type) -> bool:
    """Whether a function of the class is the user's."""
    functions = [value for value in vars(kind).values() if type(value) is FunctionType]
    return bool(functions) and not any(map(_is_installed_function, functions))


def _is_installed_function(function: FunctionType) -> bool:
    return _is_ours(function.__globals__) or _is_installed(function.__code__)


def _is_installed(code: CodeType) -> bool:
    """Whether the `code` is in Python's own library, or in an installed package."""
    name = code.co_filename
    return name.startswith("<frozen ") or name.startswith(_installed_folders(tuple(sys.path)))


@functools.lru_cache(maxsize=4)
def _installed_folders(path: tuple[str, ...]) -> tuple[str, ...]:
    """The folders of Python's library, and those folders of `path` into which pip has installed something."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [entry for entry in path if entry and any(Path(entry).glob("*.dist-info"))]
    return tuple({f"{place}/" for folder in folders for place in (folder, Path(folder).resolve())})


def _described(value: Any) -> str:
    """What kind of thing `value` is, and its name, such as `the function __main__.step`."""
    if value is UNKNOWN:
        return f"more than {MOST_OBJECTS:,} objects, so code of the user may be among them"
    if isinstance(value, functools.partial):
        return _described(value.func)
    if isinstance(value, FrameType):
        code = value.f_code
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has the short name only
        return f"the function {value.f_globals.get('__name__')}.{name}"
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    if isinstance(value, (CoroutineType, GeneratorType)):
        return f"the coroutine {value.__qualname__}"
    if type(value) in (MethodType, BuiltinMethodType) and not isinstance(
        value.__self__, ModuleType
    ):
        holder = type(value.__self__)
        return f"the method {holder.__module__}.{holder.__qualname__}.{value.__name__}"
    if type(value) in (FunctionType, BuiltinMethodType):
        return f"the function {value.__module__}.{value.__qualname__}"
    return f"an object of {_described(type(value))}"
