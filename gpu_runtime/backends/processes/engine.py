"""Engines (the program or thread that runs one model), and the common part of their backends.

An engine ends, is restarted, and explains both in errors. Engines place a model when they load it, and
never change its weights. Some engines sleep: they stay alive without their memory on the card, and
wake on the same card. Other models are dropped when they are evicted, and loaded again later. Only
`model_processes.py` moves models to other cards.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from ... import threads
from ...devices.probe import Probe
from ...devices.process_memory import Block, out_of_memory
from ...errors import CannotGovern, EngineDied, GpuError, LoadFailed, NotResident
from ...facts import HOST, ModelSpec, Share, Shares, where
from ...fault_texts import Fault, Kind, last_line, recognise
from ...files import new_log
from ...units import GIB, show_bytes
from ..base import Backend, Progress
from . import orphan_guard

OnLoss = Callable[[str, str], None]  # called with kind and because
LEAST_CHANGE_SECONDS = 30.0  # that an engine has to sleep, or to wake
KEPT_SECONDS = 10.0  # until the driver reports that a process has given its bytes back
MOST_CONTEXT_BYTES = GIB  # a process keeps so much of a card at most for its CUDA context alone


class Engine:
    """The program or thread that runs one model.

    An engine is lost if it ended by itself and is not restarted. This is reported once.
    """

    title: str  # what messages call the engine, such as "server"

    def __init__(self, name: str, log: Path) -> None:
        """The engine of the model `name`. Error messages name the file `log`."""
        self.name, self.log = name, log
        self.asleep = False  # its memory is not on the card; a restart would take it without room
        self.error: GpuError | None = None  # why the engine is lost; None: it is not
        self._wanted = True  # False: it was ended on purpose
        self._on_loss: OnLoss | None = None
        self._loss_reported = self._reporting = False
        self._changed = threading.Condition()

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the engine's processes; empty if the model runs in this process."""
        return ()

    def end(self) -> None:
        """Ends the engine and everything that it started. A repeated call does nothing."""
        raise NotImplementedError

    def watch(self, on_loss: OnLoss) -> None:
        """Calls `on_loss(kind, because)` once: when the engine is lost, or now if it is lost already."""
        with self._changed:
            self._on_loss = on_loss
        self._report_loss()

    def _report_loss(self) -> None:
        with self._changed:
            if self.error is None or self._on_loss is None:
                return
            if self._loss_reported or not self._wanted:
                return
            self._loss_reported = self._reporting = True
        try:
            self._on_loss(self.error.facts["kind"], str(self.error).splitlines()[0])
        finally:
            with self._changed:
                self._reporting = False
                self._changed.notify_all()

    def require(self) -> None:
        """Raises the error of a lost engine, as a new object with a traceback of its own."""
        if self.error is not None:
            raise type(self.error)(str(self.error), **self.error.facts)

    def sleep_or_wake(self, verb: str) -> str:
        """Lets the engine `verb`: "sleep" or "wake". Returns why it does not; empty once it has.

        Raises EngineDied if it has ended.
        """
        raise NotImplementedError

    def fail(self, why: str) -> NoReturn:
        """Ends the engine, and raises EngineDied with the reason `why`."""
        pid = next(iter(self.pids), None)
        self.end()
        raise self.died(
            Kind.CRASH, f"the {self.title} of {self.name} was ended, since {why}.", why, pid=pid
        )

    def _failed_load(self, told: str, fault: Fault | None, **facts: Any) -> GpuError:
        """The error for a load that failed as `told`: out of memory if the `fault` is that, else LoadFailed."""
        if fault is not None and fault.kind is Kind.OUT_OF_MEMORY:
            return out_of_memory(fault.line)
        facts = {"why": told, "source": "", "kind": fault.kind.value if fault else "", **facts}
        return LoadFailed(
            f"{self.name} could not be loaded: {told}.\n  Its log:  {self.log}",
            name=self.name,
            log=str(self.log),
            **facts,
        )

    def died(
        self, kind: str, text: str, why: str, status: int | None = None, pid: int | None = None
    ) -> EngineDied:
        """The error with the message `text` for an engine that ended because of `why`, in a few words.

        `pid` was its process, and `status` is the exit status.
        """
        facts = {"pid": pid, "status": status, "kind": str(kind), "why": why}
        return EngineDied(
            f"{text}\n  Its log:  {self.log}", name=self.name, log=str(self.log), **facts
        )


class RestartedEngine(Engine):
    """An engine in separate processes, which are restarted at most MOST_RESTARTS times."""

    def __init__(self, spec: ModelSpec) -> None:
        """The engine of the model `spec`. The engine's output is appended to the file `log`."""
        super().__init__(spec.name, new_log(spec.name))
        self.spec = spec
        self.restarts = 0
        self._pid: int | None = None  # named in errors

    def _wait_for_end(self) -> tuple[int, str] | None:
        """Waits for the end of the processes. Returns their exit status and the end of their log;
        None if they were ended on purpose.
        """
        raise NotImplementedError

    def _start_again(self) -> None:
        """Starts new processes on the same cards. Raises the errors of a load."""
        raise NotImplementedError

    def _supervise(self) -> None:
        """Restarts the processes if they end by themselves. Runs in a separate thread."""
        while ended := self._wait_for_end():
            status, output = ended
            fault = recognise(output)
            kind = fault.kind if fault else Kind.CRASH
            why = f"{in_words(status)}: {fault.line}" if fault else in_words(status)
            if self.asleep or self.restarts >= MOST_RESTARTS:
                return self._give_up(kind, why, status)
            self.restarts += 1
            try:
                self._start_again()
            except Exception as error:  # noqa: BLE001 - the next call raises it
                first_line = str(error).splitlines()[0]
                return self._give_up(kind, f"{why}; the restart failed: {first_line}", status)

    def _give_up(self, kind: Kind, why: str, status: int) -> None:
        """Records that the engine is lost, reports the loss, then wakes the waiting callers."""
        name = self.spec.name
        times = "once" if self.restarts == 1 else f"{self.restarts} times"
        state = "slept" if self.asleep else f"was restarted {times}"
        text = (
            f"the {self.title} of {name} is gone: {why.rstrip('.')}.\n"
            f"  It {state}. Its memory is free; the next use of {name} loads it again."
        )
        with self._changed:
            self.error = self.died(kind, text, why, status, self._pid)
        self._report_loss()
        with self._changed:  # wake the callers last: by now the book shows the loss
            self._changed.notify_all()

    def _load_error(self, why: str, output: str) -> GpuError:
        """The error for a load that failed because of `why`, with the line of `output` that explains it."""
        fault = recognise(output)
        explanation = fault.line if fault else last_line(output)
        detail = f": {explanation}" if explanation else ""
        return self._failed_load(f"{why}{detail}", fault, why=why, source=self.spec.source)


# -- models in engines ------------------------------------------------------------------------------

E = TypeVar("E", bound=Engine)


class EngineModel(Generic[E]):
    """The base of the object that `use` yields: the model's name and, while loaded, its engine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._engine: E | None = None
        self._where = ""
        # A function that returns a context manager. Each call of the model runs inside it.
        # `owner/pins.py` sets a function whose context manager pins the model.
        self._calls_under: Callable[[], AbstractContextManager[Any]] = nullcontext

    def _loaded_engine(self, hint: str = "Call it inside:  with rt.use({!r}) as model:") -> E:
        """The engine of the model. Raises NotResident, with the `hint`, if it is not loaded."""
        if self._engine is None:
            text = f"{self.name} is not loaded.\n  {hint.format(self.name)}"
            raise NotResident(text, name=self.name, where="not loaded")
        return self._engine


V = TypeVar("V", bound=EngineModel[Any])


class EngineHandle(Generic[E, V]):
    """An engine with its model, and the record of the model's bytes on each device.

    If the engine can sleep, `shares` are the bytes that it has in host memory while it sleeps.
    """

    total: Shares = ()  # what the engine took on its cards when it had loaded
    most_asleep = 0  # the bytes that it has in host memory while it sleeps; 0: it cannot sleep

    def __init__(self, engine: E, value: V) -> None:
        """A handle of `engine`. When the handle is freed, the engine ends. `use` yields `value`."""
        self.engine, self.value = engine, value
        self.shares: Shares = ()
        self.blocks: list[Block] = []
        self.kept: dict[str, int] = {}  # bytes that stayed on each card when the rest last left
        self._end = weakref.finalize(self, engine.end)

    @property
    def pids(self) -> tuple[int, ...]:
        """As `Engine.pids`."""
        return self.engine.pids

    @property
    def ended(self) -> bool:
        """Whether the engine was ended on purpose."""
        return not self._end.alive

    def watch(self, on_loss: OnLoss) -> None:
        """As `Engine.watch`."""
        self.engine.watch(on_loss)

    def loaded(self, shares: Shares, probe: Probe) -> None:
        """Counts the bytes of `shares` on the devices of `probe`, and gives the engine to `value`.

        Raises the device's out-of-memory error.
        """
        self.shares = self.total = shares
        for share in shares:
            self.blocks.append(probe.place(share.device).allocate(share.bytes))
        self.value._engine, self.value._where = self.engine, where(shares)

    @property
    def claims(self) -> Shares:
        """What the model claims on each card while it is awake: all but what stays while it sleeps."""
        return tuple(
            Share(part.device, part.bytes - self.kept.get(part.device, 0)) for part in self.total
        )

    @property
    def own(self) -> Shares:
        """The part of `claims` that is in host memory while the engine sleeps."""
        size = sum(share.bytes for share in self.claims)
        part = min(self.most_asleep, size)
        return tuple(Share(need.device, need.bytes * part // max(1, size)) for need in self.claims)

    @property
    def working_bytes(self) -> int:
        """The part of `claims` that is lost when the engine sleeps, such as its cache."""
        return sum(share.bytes for share in self.claims) - sum(share.bytes for share in self.own)

    def settle(self, blocks: list[Block], *, asleep: bool) -> None:
        """Counts the model in `blocks`: in host memory, or on its cards."""
        size = sum(share.bytes for share in self.own)
        self.engine.asleep = asleep
        self.shares = (Share(HOST, size),) if asleep else self.own
        self.value._engine = None if asleep else self.engine
        self.value._where = where(self.shares)
        before, self.blocks = self.blocks, blocks
        for block in before:
            block.free()

    def end(self) -> None:
        """Ends the engine and frees the model's bytes. A repeated call does nothing."""
        self._end()
        if self.value._engine in (self.engine, None):  # else the model was loaded again meanwhile
            self.value._engine, self.value._where = None, ""
        blocks, self.blocks, self.shares = self.blocks, [], ()
        for block in blocks:
            block.free()


H = TypeVar("H", bound=EngineHandle[Any, Any])


class EngineBackend(Backend, Generic[H, V]):
    """The part of a backend that is the same for all engines."""

    can_move = False
    engine_name: str  # as in messages
    model_type: ClassVar[type]  # what `use` yields
    probe: Probe

    def runs_here(self, spec: ModelSpec) -> bool:
        return False

    def value(self, model: H) -> V:
        return model.value  # type: ignore[no-any-return]

    def load(
        self,
        spec: ModelSpec,
        shares: Shares,
        origin: Any = None,
        *,
        progress: Progress | None = None,
        into: Any = None,
    ) -> H:
        """Starts an engine for the model of `spec` on the cards of `shares`, and returns its handle.

        The other arguments are as in `Backend.load`. Raises BadSetting, NotAModel, LoadFailed, and
        the device's out-of-memory error.
        """
        engine, start = self._prepared(spec, shares, progress or (lambda done, total: None))
        handle = EngineHandle(engine, self._reused(into, spec.name))
        try:
            handle.loaded(start(handle.value), self.probe)
            if self.can_move and spec.may_sleep:
                handle.most_asleep = self._bytes_asleep(spec, handle)
                handle.shares = handle.own if handle.most_asleep else handle.shares
            return handle  # type: ignore[return-value]
        except BaseException:
            handle.end()
            raise

    def _prepared(
        self, spec: ModelSpec, shares: Shares, report: Progress
    ) -> tuple[Engine, Callable[[V], Shares]]:
        """An engine, and a function that starts it for the object that `use` yields.

        The function returns the bytes of the model on each device. `report` gets bytes done and in
        total.
        """
        raise NotImplementedError

    # -- sleep

    def _bytes_asleep(self, spec: ModelSpec, handle: EngineHandle[Any, Any]) -> int:
        """The bytes that the loaded model has in host memory while its engine sleeps. 0: it cannot sleep."""
        return 0

    def _measured_asleep(self, model: H) -> int:
        """As `_bytes_asleep`, measured while the engine sleeps. 0: it stays as it was."""
        return 0

    def move(self, model: H, shares: Shares) -> None:
        """Puts the engine to sleep if `shares` are in host memory, and wakes it if they are its cards.

        If it does not sleep or wake, it is ended, and EngineDied is raised. The device's out-of-memory
        error ends nothing. Raises CannotGovern for other cards.
        """
        to_host, engine = all(share.device == HOST for share in shares), model.engine
        own = {share.device for share in shares} == {share.device for share in model.total}
        if not model.most_asleep or not (to_host or (engine.asleep and own)):
            name = model.value.name
            raise CannotGovern(
                f"{name} cannot be moved: {self.engine_name} places a model when it loads it.\n"
                f"  Load it again where it should be:  rt.evict({name!r}), then rt.preload({name!r})",
                name=name,
                why=f"{self.engine_name} cannot move",
            )
        if to_host == engine.asleep:
            return
        blocks = [self.probe.place(share.device).allocate(share.bytes) for share in shares]
        try:
            engine.asleep = True  # from its first step to sleep until it is awake
            verb = "sleep" if to_host else "wake"
            if why := engine.sleep_or_wake(verb):
                engine.fail(f"it did not {verb}: {why.rstrip('.')}")
            if to_host:
                model.kept = self._kept(model)
                if size := self._measured_asleep(model):
                    model.most_asleep = size
                    blocks.pop().free()
                    asleep = sum(share.bytes for share in model.own)
                    blocks.append(self.probe.place(HOST).allocate(asleep))
        except BaseException:
            model.end()
            for block in blocks:
                block.free()
            raise
        model.settle(blocks, asleep=to_host)

    def _kept(self, model: H) -> dict[str, int]:
        """The bytes that the sleeping engine of `model` keeps on each card: its context and graphs.

        An engine that keeps more than half of its bytes, and more than a context, has not given them back: it is
        ended, and EngineDied is raised.
        """
        total = sum(share.bytes for share in model.total)
        kept = self._beyond(model.pids, model.total, (), total)
        if (size := sum(kept.values())) > _most_kept(total):
            model.engine.fail(f"it says that it sleeps, and keeps {show_bytes(size)} on its card")
        return kept

    def _beyond(
        self, pids: Iterable[int], cards: Shares, own: Shares, moved_bytes: int
    ) -> dict[str, int]:
        """What the processes `pids` hold on each of the `cards` beyond the shares `own` of their model.

        The driver may report a change late. So if much is left of the `moved_bytes`, it is asked again, for
        KEPT_SECONDS at most.
        """
        held = {share.device: share.bytes for share in own}
        until = time.monotonic() + KEPT_SECONDS
        while True:
            charged = self._on_cards(pids, cards)
            beyond = {card: max(0, size - held.get(card, 0)) for card, size in charged.items()}
            if sum(beyond.values()) <= _most_kept(moved_bytes) or time.monotonic() >= until:
                return beyond
            time.sleep(_POLL_SECONDS)

    def working_bytes(self, model: H) -> int | None:
        return model.working_bytes if model.most_asleep else None

    def must_return_to(self, model: H) -> dict[str, int]:
        """Its cards, each with the bytes that the model claims there."""
        return {share.device: share.bytes for share in model.claims} if model.most_asleep else {}

    def drop(self, model: H) -> None:
        model.end()

    def measure(self, model: H) -> Shares:
        """The bytes of `model` as measured by the last load or move; empty once it is dropped."""
        return model.shares

    def droppable(self, model: H) -> bool:
        """Always True, because the engine of `model` never changes its weights."""
        return True

    def _charged(self, pids: Iterable[int], shares: Shares) -> Shares:
        """The bytes that the driver reports for the processes `pids`; where it reports none, `shares`."""
        charged = self._on_cards(pids, shares)
        return tuple(
            Share(share.device, charged.get(share.device) or share.bytes) for share in shares
        )

    def _on_cards(self, pids: Iterable[int], shares: Shares) -> dict[str, int]:
        """The bytes that the driver reports now for the processes `pids` on each real card of `shares`."""
        return self.probe.charged(pids, [share.device for share in shares])

    def _reused(self, into: Any, name: str) -> V:
        """The object that `use` yields for the model `name`: that of the earlier load `into` (its
        handle, or the object itself), else a new one.
        """
        kept = getattr(into, "value", into)
        value = kept if isinstance(kept, self.model_type) else self.model_type(name)
        return value  # type: ignore[no-any-return]


def _most_kept(moved_bytes: int) -> int:
    return max(moved_bytes // 2, MOST_CONTEXT_BYTES)


# -- child processes for engines, each with its own session and process group, and a log
#
# The kernel's stop button does not reach these processes. Jupyter signals the kernel's whole process
# group, and the child processes are in other groups. Two things end a child process when its owner
# dies: its socket to the owner closes, and the system sends it a signal because its parent has died.
# The system sends this signal even if only the *thread* that started the child ends. So one thread
# that never ends starts all child processes.

MOST_RESTARTS = 3  # of a process that ended by itself; then its model is lost
TAIL_BYTES = 32768
STOP_SECONDS = 3.0  # that a guarded process has to end after SIGTERM
KILL_SECONDS = 10.0  # that a killed process has to end
_POLL_SECONDS = 0.01
_lock = threading.Lock()
_jobs: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] | None = None


def _forget_starter() -> None:
    global _jobs, _lock
    _jobs, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_starter)  # a forked child has no starter thread


def _in_starter_thread(work: Callable[[], Any]) -> Any:
    """Runs `work()` in the thread that never ends, and returns its result or raises its error."""
    global _jobs
    with _lock:
        if _jobs is None:
            _jobs = queue.SimpleQueue()
            threads.start(lambda jobs=_jobs: _run_jobs(jobs))
    answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
    _jobs.put((work, answer))
    result, error = answer.get()
    try:
        if error is not None:
            raise error
        return result
    finally:
        del error  # else error and traceback keep each other alive until the next collection


def _run_jobs(jobs: queue.SimpleQueue[Any]) -> None:
    while True:
        work, answer = jobs.get()
        try:
            answer.put((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            answer.put((None, error))


class _Life:
    """A descriptor that is ready once the process `pid` has ended. It is closed when nobody refers to it."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def fileno(self) -> int:
        return self._descriptor

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):  # else the process had ended
            os.close(self._descriptor)


class Child:
    """A child process that leads its own process group."""

    def __init__(
        self, command: Sequence[str], *, log: Path, env: dict[str, str], fds: Sequence[int]
    ) -> None:
        """Starts `command` with the environment `env` and the inherited file descriptors `fds`.

        The output of the process is appended to the file `log`.
        """
        self.log = log
        with open(log, "ab") as file:
            self._log_began = file.tell()  # a log may begin with the output of an earlier child
            self._popen: subprocess.Popen[bytes] = _in_starter_thread(
                lambda: subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=env,
                    pass_fds=fds,
                    start_new_session=True,
                )
            )
        self.pid = self._popen.pid
        self._life: _Life | None = _Life(self.pid)  # None once its end is reaped
        self._ending = threading.Lock()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits up to `seconds` (None: no limit) for the end of the process: whether it has ended.

        The process is not reaped, so that no other process can get its id before `end`.
        """
        if (life := self._life) is None:
            return True
        poll = select.poll()  # `select` takes no descriptor above 1,023
        poll.register(life, select.POLLIN)
        return bool(poll.poll(None if seconds is None else seconds * 1000))

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self.wait(0)

    def end(self) -> int:
        """Kills the whole process group. Returns the exit status in the form of `subprocess`.

        A driver can block a process so that it does not end. It is waited for KILL_SECONDS at most.
        """
        with self._ending:
            if self._popen.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
                    os.killpg(self.pid, signal.SIGKILL)
                try:
                    self._popen.wait(KILL_SECONDS)
                except subprocess.TimeoutExpired:
                    return -signal.SIGKILL  # its status is that of its end
                # A traceback may keep this object alive for long. The descriptor is closed now.
                self._life = None
            return self._popen.returncode

    def tail(self) -> str:
        """The last TAIL_BYTES of the child's output; empty if the log cannot be read."""
        # An unreadable log is ignored: its text only explains an error that is raised anyway.
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(self._log_began, size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
        return ""


def in_words(status: int) -> str:
    """How a process with the exit `status` ended. The text is part of an error message.

    >>> in_words(-9), in_words(3)
    ('it was killed by SIGKILL', 'it ended with code 3')
    """
    if status >= 0:
        return f"it ended with code {status}"
    try:
        return f"it was killed by {signal.Signals(-status).name}"
    except ValueError:  # Python has no name for this signal
        return f"it was killed by signal {-status}"


def python_file(file: Path) -> list[str]:
    """The command that runs the Python `file` as a program, without importing its package.

    `-P` keeps its directory off `sys.path`: modules there may have the names of libraries.
    """
    return [sys.executable, "-P", str(file)]


def guarded(
    words: Sequence[str], log: Path, env: dict[str, str], fds: Sequence[int]
) -> tuple[Child, socket.socket]:
    """Starts a guard, which starts the command `words`. Returns the guard and a socket to it.

    When the socket closes, the guard ends the command. The other arguments are as for `Child`.
    """
    line, guard_end = socket.socketpair()
    guard = python_file(Path(orphan_guard.__file__))
    arguments = [str(guard_end.fileno()), str(os.getpid()), str(STOP_SECONDS)]
    command, inherited = [*guard, *arguments, *words], (guard_end.fileno(), *fds)
    try:
        with guard_end:
            return Child(command, log=log, env=env, fds=inherited), line
    except BaseException:
        line.close()
        raise


def card_environment(probe: Probe, shares: Shares, *, by_number: bool = False) -> dict[str, str]:
    """Environment variables with which a process sees only the cards of `shares`, in their order.

    `probe` knows the devices. A CUDA card is named by UUID if the driver reports one, because the
    number of a card differs between processes that see different cards; with `by_number`, by the driver's
    own number, if that is known. If all cards of `shares` are simulated, the process sees no card.
    """
    devices, numbers = {device.id: device for device in probe.devices}, probe.numbers()
    by_number = by_number and all(share.device in numbers for share in shares)
    visible: dict[str, list[str]] = {"cuda": [], "rocm": []}
    for share in shares:
        device = devices[share.device]
        kind = device.id.partition(":")[0]
        if kind in visible:
            by_uuid = kind == "cuda" and device.uuid and not by_number
            number = numbers.get(device.id, device.index)
            visible[kind].append(device.uuid if by_uuid else str(number))
    cuda, rocm = (",".join(names) for names in visible.values())
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if cuda and by_number else {}  # the driver's order
    return {"CUDA_VISIBLE_DEVICES": cuda, "HIP_VISIBLE_DEVICES": rocm, **order}
