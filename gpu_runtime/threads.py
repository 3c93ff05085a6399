"""Our code in the user's process: interrupts, forks and torch's modes of the user's do not reach it.

A KeyboardInterrupt (the stop button) cannot break the start of the threads here.

A forked child has the memory of its parent and only one of the parent's threads. If another thread
holds a lock at the moment of the fork, the lock stays locked in the child for ever, and the data
that it protects may be half changed. SQLite has such locks itself, and remembers file locks that
the child does not have. (When a thread was inside SQLite, 2 in 200 children hung, or kept a lock
that stopped every process for 20 s.)

A mode changes what torch's functions do in a thread: `torch.set_default_device`, a
`TorchFunctionMode`, a `TorchDispatchMode`, `inference_mode`, `no_grad`, `autocast`, a transform of
`torch.func`. In a mode, a load could put weights on another card, and a search could raise.
"""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import ctypes
import functools
import importlib
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from types import FrameType, FunctionType
from typing import Any, TypeVar

MOST_SECONDS = 60.0  # the longest time that the interpreter waits at its end for unfinished work
ENDING_SECONDS = 2.0  # how long the caller of stopped work waits for its end
SPARE_SECONDS = 10.0  # how long a thread without work waits for work before it ends
_unfinished: set[object] = set()
_spare: list[Any] = []  # the threads that wait for work, see `start_short`
os.register_at_fork(after_in_child=_unfinished.clear)  # the parent continues that work
os.register_at_fork(after_in_child=_spare.clear)


class Running:
    """A thread that was started. `wait` waits for its end."""

    def __init__(self, work: Callable[[], None]) -> None:
        """`work` is the function that the thread calls."""
        self._work = work
        self._ended = _thread.allocate_lock()
        self._ended.acquire()
        self.ident = 0

    def wait(self, timeout: float = -1) -> bool:
        """Waits for the end of the thread. Returns False if it still runs after `timeout` seconds (-1: no limit)."""
        if not self._ended.acquire(timeout=timeout):
            return False
        with contextlib.suppress(RuntimeError):  # another waiting thread has released it already
            self._ended.release()
        return True

    def run(self) -> None:
        """Calls the function `work`. This method runs in the new thread."""
        self.ident = _thread.get_ident()
        try:
            self._work()
        finally:
            self._ended.release()


class Cancellation(threading.Event):
    """An event that is set when the result of some work is no longer wanted.

    When the event is set, it also calls the functions that were passed to the method `then`. Such a
    function ends work that does not wait for the event but for something else, such as an engine's
    process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._callbacks: list[Callable[[], None]] = []
        self._adding = threading.RLock()

    def then(self, callback: Callable[[], None]) -> None:
        """Calls `callback()` in the thread that sets the event, or at once if the event is set."""
        with self._adding:
            if not self.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def set(self) -> None:
        """Sets the event. Calls each function that was passed to the method `then`, once."""
        with self._adding:
            super().set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Stopped(BaseException):
    """Raised in a thread whose work another thread has stopped; see `Stoppable`."""


class Stoppable:
    """Work in a separate thread. Any thread can stop the work's `with` block; see `start` and `stop`.

    The block then gets Stopped between two lines of its Python code, as the stop button raises a
    KeyboardInterrupt. A call of C code, such as the read of a file, ends first, and may never end.
    So the caller waits only ENDING_SECONDS for the end of stopped work.
    """

    def __init__(self) -> None:
        """The work has not begun yet."""
        self.why = ""  # why the block was stopped; empty: it was not
        self.stopped_at = 0.0  # in seconds of time.monotonic
        self.left = ""  # why the caller has left; empty: it has not
        self.caller = _thread.get_ident()
        self.thread, self._block_over = 0, False  # the thread of the work
        self._lock = threading.RLock()
        self._running: Running | None = None
        # Gets an item when the block is stopped and when the work ends. A KeyboardInterrupt in the
        # caller's wait cannot leave it locked, unlike an Event.
        self._news: SimpleQueue[None] = SimpleQueue()
        self._outcome: list[BaseException | None] = []

    def start(self, work: Callable[[], None]) -> None:
        """Calls `work` in a new thread, with the context variables of the caller."""
        context = contextvars.copy_context()

        def run() -> None:
            """Calls `work`, keeps its error, and wakes the caller."""
            try:
                context.run(work)
                self._outcome.append(None)
            except BaseException as error:  # noqa: BLE001 - raised again by `result`
                self._outcome.append(error)
            finally:
                self._news.put(None)

        self._running = start(run)

    def __enter__(self) -> Stoppable:
        with self._lock:
            self.thread = _thread.get_ident()
            if self.why:
                raise Stopped
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._block_over = True
            if self.why:
                _raise_pending(self.thread)

    def stop(self, why: str) -> None:
        """Stops the block, because of `why`. Does nothing if the block has ended."""
        with self._lock:
            if not self._block_over and not self.why:
                self.why, self.stopped_at = why, time.monotonic()
                if self.thread:
                    _set_async_error(self.thread, Stopped)
                self._news.put(None)

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the work has ended or is stopped. Returns False after `seconds`. Only the caller calls this."""
        try:
            self._news.get(timeout=seconds)
        except Empty:  # the time is over; a lock would not survive an interrupt, see `_news`
            return False
        return True

    def ended(self, seconds: float | None = None) -> bool:
        """Waits at most `seconds` (ENDING_SECONDS) for the end of the work. Returns whether it has ended."""
        wait = ENDING_SECONDS if seconds is None else seconds
        return self._running is None or self._running.wait(wait)

    def result(self) -> None:
        """Raises the error of the work that has ended, if there is one."""
        error = self._outcome.pop() if self._outcome else None
        try:
            if error is not None:
                raise error
        finally:
            del error  # else error and traceback keep each other alive until the next collection

    def place(self) -> str:
        """The line of Python code that the block runs now, such as `read (loader.py, line 12)`."""
        frame = sys._current_frames().get(self.thread)
        if frame is None:
            return ""
        file = os.path.basename(frame.f_code.co_filename)
        return f"{frame.f_code.co_name} ({file}, line {frame.f_lineno})"


def next_item(queue: Any, seconds: float | None = None) -> Any:
    """The next item of a SimpleQueue. A `Stoppable` block can be stopped while it waits here.

    Raises TimeoutError if there is none within `seconds`. None means no limit.
    """
    until = None if seconds is None else time.monotonic() + seconds
    while True:
        try:
            return queue.get(timeout=0.2)
        except Empty:  # a wait without an end would be one call of C code
            if until is not None and time.monotonic() >= until:
                raise TimeoutError from None


def _set_async_error(thread: int, kind: type[BaseException]) -> None:
    """Lets the thread with this id raise an error of this `kind` at its next line."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def _raise_pending(thread: int) -> None:
    """Lets Stopped arrive here if it has not arrived in this `thread` yet.

    It is not taken back: that would leave a flag of Python's set for ever (3.11 and 3.12). With the
    flag set, a function that is traced, as by a debugger, never gets past its first instruction.
    """
    try:
        while True:  # in place of one that is pending; another thread's error may clear the flag
            _set_async_error(thread, Stopped)
    except Stopped:
        pass  # it has arrived


def start(work: Callable[[], None]) -> Running:
    """Starts a new daemon thread that calls `work`.

    `threading.Thread` is not used, because its `start` waits until the new thread reports that it
    is alive. If an interrupt ends this wait, the lock for the report stays locked. In this case the
    new thread never runs, and a process that waits for the thread never ends.
    """
    running = Running(work)
    _thread.start_new_thread(running.run, ())
    return running


class _Spare:
    """A thread without work, which waits at most SPARE_SECONDS for the next work and then ends."""

    def __init__(self) -> None:
        self.work: Callable[[], None] | None = None
        self.given = _thread.allocate_lock()
        self.given.acquire()

    def run(self) -> None:
        """Calls the given work, waits for further work, and calls it too."""
        while self.work is not None:
            self.work()
            self.work = None  # the function may refer to a model
            _spare.append(self)
            if self.given.acquire(timeout=SPARE_SECONDS):
                continue
            try:
                _spare.remove(self)
            except ValueError:  # work was given at this very moment
                self.given.acquire()


def start_short(work: Callable[[], None]) -> None:
    """Calls `work` in a daemon thread that may have done other work before. `work` must not raise.

    This function takes a fifth of the time of `start`. Use it for frequent, short work.
    """
    try:
        spare = _spare.pop()
    except IndexError:
        spare = _Spare()
        spare.work = work
        _thread.start_new_thread(spare.run, ())
        return
    spare.work = work
    spare.given.release()


def only_ours() -> bool:
    """Whether no thread of Python runs but the main one and those that this module started."""
    for ident, frame in sys._current_frames().items():
        while frame.f_back is not None:
            frame = frame.f_back
        if ident != threading.main_thread().ident and frame.f_code.co_filename != __file__:
            return False
    return True


class Switching:
    """A `with` block in which another thread gets the interpreter after other `seconds` than usual.

    Of blocks at the same time, in any threads, the most seconds count. After the last one all is as before. If other
    code changes the switch interval meanwhile, the new interval is the usual one.
    """

    _changing = threading.Lock()
    _wishes: list[float] = []  # noqa: RUF012 - of all blocks that run
    _usual = _ours = 0.0

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        self._change(self._wishes.append)

    def __exit__(self, *_: object) -> None:
        self._change(self._wishes.remove)

    def _change(self, change: Callable[[float], None]) -> None:
        with Switching._changing:
            now = sys.getswitchinterval()
            if not self._wishes or not math.isclose(now, Switching._ours, rel_tol=1e-3):
                Switching._usual = now
            change(self.seconds)
            Switching._ours = max(self._wishes, default=Switching._usual)
            sys.setswitchinterval(Switching._ours)

    @staticmethod
    def forget() -> None:
        """Ends all blocks in a forked child, where the parent's threads do not exist."""
        if Switching._wishes:
            sys.setswitchinterval(Switching._usual)
        Switching._changing = threading.Lock()
        Switching._wishes.clear()


os.register_at_fork(after_in_child=Switching.forget)
# A thread that runs Python code yields the interpreter after 0.5 ms, not 5 ms. A recall makes about sixty system calls,
# and each of them releases it. With 5 ms, a recall beside a pure-Python loop in the main thread took 400 ms.
promptly = Switching(0.0005)
# No other thread runs Python, unless the thread in the block releases the interpreter.
undisturbed = Switching(60.0)


def side_by_side(works: Sequence[Callable[[], None]]) -> None:
    """Calls all `works` at the same time, and returns when all have ended. No work may raise."""
    running = []
    for work in works[1:]:
        try:
            running.append(start(work))
        except RuntimeError:  # the interpreter is ending and starts no more threads
            work()
    for work in works[:1]:
        work()
    for thread in running:
        thread.wait()


def finish() -> None:
    """Waits until the work of `uninterrupted` has ended, for at most MOST_SECONDS.

    Call this at the end of the process. Without the wait, the end of the interpreter would stop the
    threads in the middle of their work.
    """
    until = time.monotonic() + MOST_SECONDS
    while _unfinished and time.monotonic() < until:
        time.sleep(0.01)


@contextlib.contextmanager
def _interrupt_afterwards() -> Iterator[None]:
    """A context manager that holds back the stop button: its signal is handled after the block."""
    pressed: list[int] = []  # not the frames, which would keep the objects of the work alive
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()  # only it handles signals
    if is_main and callable(before):
        signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        if is_main and callable(before):
            signal.signal(signal.SIGINT, before)
            if pressed:
                before(pressed[0], None)


def uninterrupted(work: Callable[[], Any], *, to_the_end: bool = False) -> Any:
    """Calls `work` in a separate thread, which gets no KeyboardInterrupt, and returns its result.

    An interrupt ends the wait, not the work. So a move that has begun is completed and recorded. If
    `to_the_end` is true, or the system starts no more threads, the interrupt is raised only after
    the work has ended. Raises the exceptions of `work`.
    """
    outcome: list[Any] = []

    def run() -> None:
        """Calls `work` and keeps its result or its error."""
        mark = object()
        _unfinished.add(mark)
        try:
            outcome.append((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            outcome.append((None, error))
        finally:
            _unfinished.discard(mark)

    interrupt: BaseException | None = None
    try:
        thread = start(run)
    except RuntimeError:  # the system starts no more threads: the work is done here
        with _interrupt_afterwards():
            run()
    else:
        while not outcome:
            try:
                thread.wait()
            except BaseException as stop:  # also an error that a signal handler of the user raises
                if not to_the_end:
                    raise
                interrupt = stop
    result, error = outcome.pop()
    try:
        if error is not None or interrupt is not None:
            raise error or interrupt
        return result
    finally:
        # The traceback of `error` refers to this frame. If the variable `error` stayed, the frame
        # would refer to `error`: a reference cycle, which would keep the caller's frames alive.
        del error, interrupt


def import_whole(name: str, *attributes: str) -> None:
    """Imports the module `name` in a separate thread, which an interrupt does not reach.

    The interrupt is raised in the caller after the import. In the middle of it, it would leave
    pandas or torch half imported, and each later import would fail until the process is restarted.
    Call this function before the import statement of a library, and name the `attributes` that a
    module such as `transformers` imports when they are first read. An import that fails raises
    nothing: the import statement raises the error again.
    """
    module = imported(name)
    if module is not None and all(attribute in vars(module) for attribute in attributes):
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return  # another thread could wait for this thread's import, and this thread for it
        frame = frame.f_back

    def work() -> None:
        with contextlib.suppress(Exception):  # the caller's import statement raises it again
            found = importlib.import_module(name)
            for attribute in attributes:
                getattr(found, attribute, None)

    uninterrupted(work, to_the_end=True)


def imported(name: str) -> Any:
    """The module `name` if it is imported, else None. This function imports nothing.

    The result is also None while another thread still imports the module, because attributes of the
    module are still missing.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if getattr(spec, "_initializing", False) else module


# -- locks at the moment of a fork -----------------------------------------------------------------


# The longest wait of a fork; a lock that the fork did not get is free in the child.
WAIT_SECONDS = 1.0

_awaited: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_freed: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_clean = True
L = TypeVar("L")


class _Here(threading.local):
    """The locks that the fork of this thread got, and those that it did not get.

    Both are empty for a fork that began before this module was imported.
    """

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.missed: list[Any] = []


_here = _Here()


def awaited(lock: L) -> L:
    """Makes every fork wait for `lock`, so the child sees no half-changed data. Returns `lock`.

    Use this function for locks around SQLite, and around files that are locked for a moment.
    """
    _awaited[id(lock)] = lock
    return lock


def freed(lock: L) -> L:
    """Makes `lock`, whose data must be valid at every moment, free in a forked child. Returns `lock`."""
    _freed[id(lock)] = lock
    return lock


TURN_SECONDS = 2.0  # how long a thread other than the main one waits for a lock; see `in_turn`


def in_turn(lock: Any, work: Callable[[bool], L], seconds: float = TURN_SECONDS) -> L:
    """The result of `work`, called with the RLock `lock`. Its argument is whether this thread has the lock.

    A signal handler of the user runs in the main thread, in the middle of what holds the lock, and may
    wait for another thread. So any other thread goes on without the lock after `seconds`.
    """
    if threading.current_thread() is threading.main_thread():
        with lock:  # an interrupt cannot leave it locked
            return work(True)
    held = lock.acquire(timeout=seconds)
    try:
        return work(held)
    finally:
        if held:
            lock.release()


def is_clean() -> bool:
    """Whether the fork that made this process got every lock that was passed to `awaited`.

    A fork waits at most WAIT_SECONDS for these locks. The forks that made the parent and its
    ancestors count too. In a process that was not forked, the result is True.
    """
    return _clean


def _before() -> None:
    """Acquires, in the parent, the locks that were passed to `awaited`."""
    deadline = time.monotonic() + WAIT_SECONDS
    _here.taken, _here.missed = [], []
    # An atomic copy, since other threads add locks meanwhile.
    for reference in _awaited.valuerefs():
        lock = reference()
        if lock is None:
            continue
        left = max(0.0, deadline - time.monotonic())
        # If this thread has it, the fork is in a signal handler, in the middle of what the lock protects.
        is_ours = getattr(lock, "_is_owned", bool)()
        taken = not is_ours and lock.acquire(timeout=left)
        (_here.taken if taken else _here.missed).append(lock)


def _release() -> None:
    for lock in _here.taken:
        lock.release()
    _here.taken = []


def _in_child() -> None:
    global _clean
    _clean = _clean and not _here.missed
    _release()
    for reference in _freed.valuerefs():
        lock = reference()
        if lock is not None:
            _free(lock)
    for lock in _here.missed:
        _free(lock)


def _free(lock: Any) -> None:
    """Makes `lock` free, also if a thread of the parent held it. Only for a child, which has one thread."""
    lock._at_fork_reinit()


os.register_at_fork(before=_before, after_in_parent=_release, after_in_child=_in_child)


# -- outside the user's modes of torch --------------------------------------------------------------


F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


def outside_modes(function: F) -> F:
    """The `function`, which runs outside the user's modes of torch.

    Within it, torch works as in a new thread, but no mode that it opens has an effect. Code that
    opens modes needs `with_own_modes` too. If torch is not imported, the function is only called.
    """

    @functools.wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        c = getattr(sys.modules.get("torch"), "_C", None)
        if not hasattr(c, "_DisableFuncTorch"):  # torch is not imported, or not yet completely
            return function(*args, **named)
        # Each of these guards is entered and left in C, where no interrupt can take effect.
        with (
            c.DisableTorchFunction(),
            c._DisableFuncTorch(),
            c._InferenceMode(False),
            c._DisableAutocast(),
        ):
            if not c._dispatch_tls_is_dispatch_key_included(c.DispatchKey.Python):
                return function(*args, **named)
            from torch.utils._python_dispatch import _disable_current_modes

            with _disable_current_modes():
                return function(*args, **named)

    return run  # type: ignore[return-value]


def all_outside_modes(kind: C) -> C:
    """The class `kind`, whose public methods and properties run outside the user's modes; see `outside_modes`."""
    for name, value in list(vars(kind).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, FunctionType):
            setattr(kind, name, outside_modes(value))
        elif isinstance(value, property) and value.fget is not None:
            setattr(kind, name, value.getter(outside_modes(value.fget)))
    return kind


@contextlib.contextmanager
def with_own_modes() -> Iterator[None]:
    """A context manager in which modes have an effect, but not those that the user has opened.

    Factories of modules and libraries open modes, such as `torch.device("meta")`.
    """
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    c = torch._C
    opened: list[Any] = []
    try:
        while c._len_torch_function_stack():
            opened.append(c._pop_torch_function_stack())
        with (
            c._InferenceMode(False),
            c._DisableAutocast(),
            _disable_current_modes(),
            c._EnableTorchFunction(),
        ):
            yield
    finally:
        while opened:
            c._push_on_torch_function_stack(opened.pop())
