"""A machine in one process: threads of which one runs at a time, a clock that waits move, and a seed that chooses.

`install` replaces the threads, locks, queues, clocks and sleeps of Python, so that the product's own code runs here
unchanged. A thread is a greenlet, which the system need not switch (a day takes a third of the time that it took
with threads). It runs until it waits or until the seed lets another go on. Call `install` before `gpu_runtime` is
imported.
"""

import _thread
import itertools
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import greenlet

_start, _ident = _thread.start_new_thread, _thread.get_ident
_main_thread = threading.main_thread()
_numbers = itertools.count(1)
SWITCHES = (
    0.02,
    0.15,
)  # how often a thread that could go on lets another one run: rarely on half of the days
MOST_STEPS = 20_000  # at one moment of the clock
BEGAN = 1000.0  # the clock at the start, in seconds


class Stuck(Exception):
    """Raised if all threads wait for ever, or if they never wait."""


class Thread:
    """A thread of a simulated process."""

    def __init__(self, process: Any, name: str) -> None:
        self.process, self.name = process, name
        self.number = next(_numbers)  # what `get_ident` returns
        self.greenlet: Any = None
        self.locals: dict[Any, dict[str, Any]] = {}  # of each `threading.local`
        self.ready: Callable[[], Any] | None = None  # what it waits for; None: only for the time
        self.deadline: float | None = None
        self.ended = False
        self.error: BaseException | None = None  # what interrupts its wait
        self.frozen = False  # stopped, as by SIGSTOP
        self.held_back = False  # no interrupt reaches it now


class Machine:
    """The threads, the clock and the random choices of one run."""

    active: "Machine | None" = None

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.switches = self.random.choice(SWITCHES)
        self.failures: list[tuple[Any, BaseException]] = []  # what ended a thread, and its process
        self.now = BEGAN
        self.threads: list[Thread] = []
        self.current: Thread | None = None
        self.stepped: Any = None  # the process whose thread ran last
        self.after_step: Callable[[], None] = lambda: None
        self.steps = 0
        self._home = greenlet.getcurrent()
        self._dead: list[Thread] = []  # kept, or Python would end them, and run their code
        Machine.active = self

    def start(
        self, work: Callable[..., Any], arguments: tuple[Any, ...], process: Any, name: str
    ) -> Thread:
        """Starts a thread of the `process`, which runs when it is chosen."""
        thread = Thread(process, name)

        def run() -> None:
            try:
                work(*arguments)
            except SystemExit:
                pass
            except BaseException as error:  # noqa: BLE001 - the run fails with it
                self.failures.append((process, error))
            thread.ended = True

        thread.greenlet = greenlet.greenlet(run, self._home)
        self.threads.append(thread)
        return thread

    # -- called by the running thread

    def pause(self, ready: Callable[[], Any] | None, seconds: float | None) -> Any:
        """Waits until `ready()` is true, for at most `seconds`. Returns the value of `ready()`."""
        thread = self.current
        assert thread is not None
        thread.ready = ready
        thread.deadline = None if seconds is None else self.now + max(0.0, seconds)
        self._home.switch()
        error, thread.error = thread.error, None
        if error is not None:
            raise error
        return ready() if ready else None

    def switch(self) -> None:
        """Lets another thread run, if the seed chooses so."""
        thread = self.current
        if thread is not None and self.random.random() < self.switches:
            self.pause(None, 0)

    # -- called by the main thread

    def run(self, until: Callable[[], bool], seconds: float) -> bool:
        """Runs the threads until `until()` is true. Returns False if that takes more than `seconds` of the clock."""
        end, busy = self.now + seconds, 0
        while not until():
            runnable = self._runnable()
            if not runnable:
                times = [
                    one.deadline
                    for one in self.threads
                    if one.deadline is not None and not one.frozen
                ]
                if not times:
                    raise Stuck(f"all {len(self.threads)} threads wait for ever")
                self.now, busy = min(times), 0
                if self.now > end:
                    return False
                continue
            busy += 1
            if busy > MOST_STEPS:
                names = sorted({f"{one.process} {one.name}" for one in runnable})
                raise Stuck(f"{MOST_STEPS} steps in no time: {', '.join(names)}")
            self._step(self.random.choice(runnable))
            self.after_step()
        return True

    def _runnable(self) -> list[Thread]:
        now = self.now
        return [
            one for one in self.threads
            if not one.frozen and (
                ((until := one.deadline) is not None and until <= now)
                or (until is None if (ready := one.ready) is None else ready())
            )
        ]  # fmt: skip

    def _step(self, thread: Thread) -> None:
        self.steps += 1
        thread.ready = thread.deadline = None
        self.current = thread
        thread.greenlet.switch()
        self.current, self.stepped = None, thread.process
        if thread.ended:
            self.threads.remove(thread)

    def raise_in(self, thread: int, kind: type[BaseException]) -> None:
        """Lets a thread raise an error of this `kind` when its wait ends; the running one raises it now."""
        for one in self.threads:
            if one.number == thread:
                if one is self.current:
                    raise kind
                one.error = kind()

    def kill(self, process: Any) -> None:
        """Ends a process between two steps: no code of it changes anything any more."""
        process.killed = True
        self._dead += [one for one in self.threads if one.process is process]
        self.threads = [one for one in self.threads if one.process is not process]


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


class Queue:
    """A `queue.SimpleQueue` of the simulated threads, in which nothing is interrupted, as in C."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def __class_getitem__(cls, item: Any) -> type:
        return cls

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        machine = Machine.active
        if block and not self._items and machine is not None and machine.current is not None:
            machine.pause(lambda: self._items, timeout)
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


def _begin(work: Callable[..., Any], arguments: tuple[Any, ...] = (), keywords: Any = None) -> int:
    machine = Machine.active
    if machine is None or machine.current is None:
        return _start(work, arguments)
    process = machine.current.process
    return machine.start(work, arguments, process, getattr(work, "__qualname__", "thread")).number


def _get_ident() -> int:
    machine = Machine.active
    return machine.current.number if machine is not None and machine.current else _ident()


def _current_thread() -> Any:
    machine = Machine.active
    return machine.current if machine is not None and machine.current else _main_thread


class Local:
    """A `threading.local` of the simulated threads."""

    _main: dict[Any, dict[str, Any]] = {}  # of the thread that runs the machine

    def __getattribute__(self, name: str) -> Any:
        own = _own(self)
        return own[name] if name in own else object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _own(self)[name] = value

    def __delattr__(self, name: str) -> None:
        if _own(self).pop(name, None) is None:
            raise AttributeError(name)


def _own(local: Local) -> dict[str, Any]:
    """The attributes of `local` in the running thread."""
    machine = Machine.active
    here = machine.current.locals if machine is not None and machine.current else Local._main
    if local not in here:
        here[local] = {}
        type(local).__init__(local)
    return here[local]


def _sleep(seconds: Any) -> None:
    machine = Machine.active
    if machine is not None and machine.current is not None:
        machine.pause(None, seconds)


def _now(*_: object) -> float:
    return Machine.active.now if Machine.active else BEGAN


def install() -> None:
    """Replaces what Python's threads, queues and clocks are made of."""
    _thread.allocate_lock = threading._allocate_lock = threading.Lock = Lock
    threading.RLock = threading._PyRLock  # type: ignore[attr-defined,assignment]
    queue.SimpleQueue = Queue  # type: ignore[assignment,misc]
    _thread.start_new_thread = threading._start_new_thread = _begin  # type: ignore[attr-defined]
    _thread.get_ident = threading.get_ident = _get_ident
    threading.current_thread = _current_thread
    threading.local = Local
    time.sleep = _sleep
    for name in ("monotonic", "time", "clock_gettime", "perf_counter", "thread_time"):
        setattr(time, name, _now)
