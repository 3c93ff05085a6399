"""A machine in one process: threads of which one runs at a time, a clock that waits move, and a seed that chooses.

`install` replaces the locks, queues, clocks and sleeps of Python, so that the product's own code runs here unchanged.
Each thread runs until it waits or until the seed lets another go on. Call it before `gpu_runtime` is imported.
"""

import _thread
import gc
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

_start, _lock, _ident = _thread.start_new_thread, _thread.allocate_lock, _thread.get_ident
# Python 3.13 has no such lock any more. A seed may then be another day now and then.
_sentinel = getattr(_thread, "_set_sentinel", lambda: None)
SWITCH = 0.15  # how often a thread that could go on lets another one run
BEGAN = 1000.0  # the clock at the start, in seconds


class Killed(BaseException):
    """Raised in every call of a thread whose process was killed, so that the thread ends."""


class Stuck(Exception):
    """Raised if all threads wait, and no time will ever wake one."""


class Thread:
    """A thread of a simulated process."""

    def __init__(self, process: Any, name: str) -> None:
        self.process, self.name = process, name
        self.baton = _lock()
        self.baton.acquire()
        self.ready: Callable[[], Any] | None = None  # what it waits for; None: only for the time
        self.deadline: float | None = None
        self.ended = False
        self.frozen = False  # stopped, as by SIGSTOP
        self.calls_after_kill = 0
        self.gone: Any = None  # a lock that is free once the thread has let go of all its objects


class Machine:
    """The threads, the clock and the random choices of one run."""

    active: "Machine | None" = None

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = BEGAN
        self.threads: list[Thread] = []
        self.current: Thread | None = None
        self.after_step: Callable[[], None] = lambda: None
        self.steps = 0
        self._home = _lock()
        self._home.acquire()
        self._dead: list[Thread] = []
        Machine.active = self

    def start(
        self, work: Callable[..., Any], arguments: tuple[Any, ...], process: Any, name: str
    ) -> Thread:
        """Starts a thread of the `process`, which runs when it is chosen."""
        thread = Thread(process, name)

        def run() -> None:
            thread.gone = _sentinel()
            # Else a thread with the number of an ended one would be taken for that one, or not.
            threading._active.pop(_ident(), None)  # type: ignore[attr-defined]
            thread.baton.acquire()
            try:
                if not process.killed:
                    work(*arguments)
            except (Killed, SystemExit):
                pass
            except BaseException as error:  # noqa: BLE001 - the run fails with it
                process.failures.append(error)
            thread.ended = True
            self._home.release()

        self.threads.append(thread)
        _start(run, ())
        return thread

    # -- called by the running thread

    def pause(self, ready: Callable[[], Any] | None, seconds: float | None) -> Any:
        """Waits until `ready()` is true, for at most `seconds`. Returns the value of `ready()`."""
        thread = self.current
        assert thread is not None
        thread.ready = ready
        thread.deadline = None if seconds is None else self.now + max(0.0, seconds)
        self._home.release()
        thread.baton.acquire()
        if thread.process.killed:
            self._end(thread)
        return ready() if ready else None

    def _end(self, thread: Thread) -> None:
        """Raises Killed. A thread that goes on after 100 of them, such as one that takes no interrupts, is left."""
        thread.calls_after_kill += 1
        if thread.calls_after_kill > 100:
            thread.ended = True
            self._home.release()
            thread.baton.acquire()
        raise Killed

    def switch(self) -> None:
        """Lets another thread run, if the seed chooses so."""
        thread = self.current
        if thread is None:
            return
        if thread.process.killed:
            self._end(thread)
        if self.random.random() < SWITCH:
            self.pause(None, 0)

    # -- called by the main thread

    def run(self, until: Callable[[], bool], seconds: float) -> bool:
        """Runs the threads until `until()` is true. Returns False if that takes more than `seconds` of the clock."""
        end = self.now + seconds
        while not until():
            runnable = [one for one in self.threads if self._may_run(one)]
            if not runnable:
                times = [
                    one.deadline
                    for one in self.threads
                    if one.deadline is not None and not one.frozen
                ]
                if not times:
                    raise Stuck(f"all {len(self.threads)} threads wait for ever")
                self.now = min(times)
                if self.now > end:
                    return False
                continue
            self._step(self.random.choice(runnable))
            self.after_step()
        return True

    def _may_run(self, thread: Thread) -> Any:
        if thread.frozen:
            return False
        on_time = thread.deadline is not None and thread.deadline <= self.now
        return (
            on_time
            or (thread.ready is None and thread.deadline is None)
            or (thread.ready and thread.ready())
        )

    def _step(self, thread: Thread) -> None:
        self.steps += 1
        thread.ready = thread.deadline = None
        self.current = thread
        thread.baton.release()
        self._home.acquire()
        self.current = None
        if thread.ended:
            self.threads.remove(thread)
            if thread.gone is not None and not thread.calls_after_kill:
                thread.gone.acquire()

    def kill(self, process: Any) -> None:
        """Ends a process between two steps: no code of it changes anything any more."""
        process.killed = True
        gone = [one for one in self.threads if one.process is process]
        self.threads = [one for one in self.threads if one.process is not process]
        self._dead += gone

    def close(self) -> None:
        """Ends all threads."""
        for thread in (*self.threads, *self._dead):
            thread.process.killed = True
        for thread in (*self.threads, *self._dead):
            while not thread.ended:  # its own clean-up may wait again
                self.current = thread
                thread.baton.release()
                self._home.acquire()
        self.current = Machine.active = None
        gc.collect()


class Lock:
    """A lock of the simulated threads."""

    def __init__(self) -> None:
        self._held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        machine = Machine.active
        if machine is not None and machine.current is not None:
            machine.switch()
            if self._held and blocking:
                machine.pause(lambda: not self._held, None if timeout < 0 else timeout)
        if self._held:
            assert machine is not None or not blocking, "a lock that nobody can release"
            return False
        self._held = True
        return True

    def release(self) -> None:
        if not self._held:
            raise RuntimeError("release unlocked lock")
        self._held = False

    def locked(self) -> bool:
        return self._held

    def _at_fork_reinit(self) -> None:
        self._held = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def _begin(work: Callable[..., Any], arguments: tuple[Any, ...] = (), keywords: Any = None) -> int:
    machine = Machine.active
    if machine is None or machine.current is None:
        return _start(work, arguments)
    process = machine.current.process
    machine.start(work, arguments, process, getattr(work, "__qualname__", "thread"))
    return 0


def _sleep(seconds: float) -> None:
    machine = Machine.active
    if machine is not None and machine.current is not None:
        machine.pause(None, seconds)


def _now(*_: object) -> float:
    return Machine.active.now if Machine.active else BEGAN


def install() -> None:
    """Replaces what Python's threads, queues and clocks are made of."""
    _thread.allocate_lock = threading._allocate_lock = threading.Lock = Lock  # type: ignore[attr-defined,assignment,misc]
    threading.RLock = threading._PyRLock  # type: ignore[attr-defined,assignment,misc]
    queue.SimpleQueue = queue._PySimpleQueue  # type: ignore[attr-defined,assignment,misc]
    _thread.start_new_thread = _begin  # type: ignore[assignment]
    time.sleep = _sleep
    for name in ("monotonic", "time", "clock_gettime", "perf_counter", "thread_time"):
        setattr(time, name, _now)
