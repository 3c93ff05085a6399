"""Follows the messages and cells of a kernel, so that the kernel can be parked between two cells.

Parking moves the device memory of the notebook's own code to host memory. No line of a cell runs while the kernel is
parked. If the memory cannot return, the cell must be refused. IPython runs a cell even if a hook failed, so a
transformer of the cell's syntax tree refuses the cell.

The memory of a kernel is moved on the kernel's own event loop, between two messages. At that moment,
every other thread must be in a function that is known to wait.

IPython calls the hook `pre_execute` before a cell, and before it handles a message of a comm (the channel of a
widget). Other messages run code of the user, such as a property or `__repr__`, without this hook. The last part finds
the messages that may so read the memory of tensors although no cell runs.
"""

from __future__ import annotations

import ast
import asyncio
import atexit
import contextlib
import functools
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, FunctionType, MethodType
from typing import Any, TypeVar

from IPython.core.error import InputRejected
from IPython.core.events import EventManager

import gpu_runtime
from gpu_runtime import GpuError, threads
from gpu_runtime.errors import in_one_sentence, rebuilt
from gpu_runtime.facts import OutOfMemoryStory
from gpu_runtime.notebook import cell_key, is_remembered, notebook_path
from gpu_runtime.threads import outside_modes, undisturbed
from gpu_runtime.tracked_objects import frozen, instances, subclasses
from gpu_runtime.units import MIB

from . import obstacles, quiet_cells
from .waiting import quiet_line

T = TypeVar("T")
_told: set[str] = set()  # sentences that this kernel has shown


def hook(act: Callable[..., T]) -> Callable[..., T | None]:
    """Wraps a method that IPython or the kernel calls: it runs outside the user's modes of torch.

    A limit of the system, or an upgrade of gpu-console under this kernel, is told once in a line. It would be a
    traceback under every cell.
    """

    @functools.wraps(act)
    @outside_modes
    def call(*args: Any) -> T | None:
        try:
            return act(*args)
        except Exception as error:
            told = in_one_sentence(error)
            if told is None:
                raise
            if str(told) not in _told:
                _told.add(str(told))
                quiet_line(str(told))
            return None

    return call


class Handlers:
    """The handlers and exit functions of one process."""

    def __init__(
        self,
        with_memory: Callable[..., Any],
        at_exit: Callable[[], None],
        seconds: Callable[[], float],
    ) -> None:
        """`with_memory(function, *args)` brings the memory back and calls `function`.

        `at_exit` brings it back for good. `seconds` returns how long a handler may wait for the memory.
        """
        self._with_memory, self._at_exit, self._seconds = with_memory, at_exit, seconds
        self._theirs: dict[int, Any] = {}
        self._postponed: list[int] = []
        self._overdue: set[int] = set()  # postponed for too long: their handlers run in the block
        self._busy = 0  # how many blocks of our own code run in the main thread that no handler may interrupt

    def precede(self) -> None:
        """Called in the main thread before the memory leaves."""
        if self._theirs or threading.current_thread() is not threading.main_thread():
            return
        for number in signal.valid_signals() - {
            signal.SIGINT
        }:  # the kernel sets SIGINT for each message
            handler = signal.getsignal(number)
            if callable(handler) and not obstacles.is_ours(handler) and handler != self._on_signal:
                self._theirs[number] = handler
                signal.signal(number, self._on_signal)
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)  # the last that is registered runs first

    def restore(self) -> None:
        """Called when the memory is back. Does nothing in another thread than the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        while self._theirs:
            number, handler = self._theirs.popitem()
            if signal.getsignal(number) == self._on_signal:  # else the user has set another one
                signal.signal(number, handler)
        atexit.unregister(self._at_exit)

    @contextlib.contextmanager
    def postponed(self) -> Iterator[None]:
        """A block of our own code in the main thread. A signal that arrives is handled after the block."""
        in_main = threading.current_thread() is threading.main_thread()
        self._busy += in_main
        try:
            yield
        finally:
            self._busy -= in_main
            while in_main and not self._busy and self._postponed:
                signal.raise_signal(self._postponed.pop(0))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._busy and number not in self._overdue:
            # One that arrives twice is handled once, as by the system.
            if number not in self._postponed:
                self._postponed.append(number)
                threads.start(lambda: self._repeat(number))
            return
        self._overdue.discard(number)
        with contextlib.suppress(ValueError):  # it was not postponed
            self._postponed.remove(number)
        handler = self._theirs.get(number)
        if handler is not None:
            self._with_memory(handler, number, frame)

    def _repeat(self, number: int) -> None:
        """Repeats a signal that is still postponed after the time limit. Its handler then runs without the memory."""
        time.sleep(self._seconds())
        if number in self._postponed:
            self._overdue.add(number)
            signal.raise_signal(number)


LOOP_SECONDS = 10.0  # the longest wait until the exchange begins, in the kernel's loop and with all threads at rest
# The longest wait until a reason that ends by itself has ended, before the copies
MOMENT_SECONDS = 2.0
USED = "the kernel was used meanwhile"
AGAIN_SECONDS = 0.005  # between two looks whether all threads are at rest
DEBUG = "debug_request"  # the type of a message to the debugger
_PARKS = re.compile(r"\b(?:park|unpark|hibernate)\b")  # the verbs that need this notebook's kernel


class Parking:
    """Follows the cells of one kernel, and lets the kernel's memory be moved between two cells."""

    def __init__(self, shell: Any, opens: Callable[[], Any], show: Callable[[str], None]) -> None:
        self._shell, self._kernel = shell, shell.kernel
        self._opens, self._show = opens, show
        self._runtime: Any = None
        self._lease: Any = None  # the runtime's Kernel, once torch holds something
        self._mark = 0
        self._is_told = False  # that this user is not in the group of the ledger
        # The cells that run now, by the thread that runs them: of each cell, the frame that began it.
        self._cells_of: dict[int, list[FrameType]] = {}
        self._here = _Here()
        self._text = ""  # the text of the outermost cell
        self._in_hooks: set[int] = set()  # the threads that wait for the memory before a message
        self._main = threading.main_thread().ident
        self._refusing = _Refusing(self)
        shell.events.callbacks["pre_execute"].insert(0, self.before)  # before anybody else's hook
        shell.events.register("post_execute", self.after)
        shell.ast_transformers.insert(0, self._refusing)
        self._preceding = Handlers(self._with_memory, self._at_exit, self._exit_seconds)
        self._held: Any = None  # while it is set, the memory stays for the current message
        self._hook, self._end_hook = self._kernel.pre_handler_hook, self._kernel.post_handler_hook
        self._kernel.pre_handler_hook = self.on_message
        self._kernel.post_handler_hook = self.after_message
        self._handlers = self._kernel.control_handlers
        self._debug = self._handlers.get(DEBUG)
        if self._debug is not None:
            self._handlers[DEBUG] = self.on_debug_request

    def remove(self) -> None:
        """Removes everything that was added."""
        self._preceding.restore()
        events = self._shell.events
        for name, callback in (("pre_execute", self.before), ("post_execute", self.after)):
            if callback in events.callbacks[name]:
                events.unregister(name, callback)
        if self._refusing in self._shell.ast_transformers:
            self._shell.ast_transformers.remove(self._refusing)
        if self._kernel.pre_handler_hook == self.on_message:
            self._kernel.pre_handler_hook = self._hook
        if self._kernel.post_handler_hook == self.after_message:
            self._kernel.post_handler_hook = self._end_hook
        if self._handlers.get(DEBUG) == self.on_debug_request:
            self._handlers[DEBUG] = self._debug

    # -- messages and cells

    def on_message(self) -> None:
        """Called before the kernel handles a message."""
        try:  # noqa: SIM105 - an interrupt may come in Python's own `__exit__`
            self._message_begins()
        except KeyboardInterrupt:  # raised from a hook, it would end the kernel
            pass

    @outside_modes
    def _message_begins(self) -> None:
        kind, content = current_message(self._kernel)
        is_quiet = kind in QUIET_MESSAGES or self._reads_nothing(kind, content)
        self._mark += 0 if is_quiet else 1
        self._here.cells_before = len(self._cells_here)
        self._restore_handlers()
        reads = may_read(self._kernel, kind, content)
        # Code of the user's may run before IPython calls `pre_execute`.
        is_cell = kind in ("execute_request", "is_complete_request")
        if is_cell and not reads and self._bytes_are_away():
            reads = quiet_cells.runs_before_hooks(self._shell)
        try:
            self._hook()  # from this call on, the stop button raises KeyboardInterrupt
        finally:
            if not self._cells and reads:
                self._held = self._hold()

    def after_message(self) -> None:
        """Called after the kernel has handled a message."""
        self._end_hook()  # from this call on, the stop button does nothing
        self._message_ends()

    @outside_modes
    def _message_ends(self) -> None:
        self._held = None
        self._here.needs_no_card = False
        self._here.until_the_end.close()  # an interrupt may have ended `after`
        while len(self._cells_here) > self._here.cells_before:
            self._ended()  # a comm's callback failed: `post_execute` is not called then

    async def on_debug_request(self, stream: Any, ident: Any, message: Any) -> None:
        """Handles a message to the debugger, in the thread of the control channel."""
        held = None
        # While a cell is stopped at a breakpoint, its memory is on the card anyway. The debugger may have
        # stopped all other threads too, so no thread could bring memory back.
        if not self._cells and message["content"].get("command") in DEBUGGER_READS:
            held = await in_thread(self._hold)
        try:
            await self._debug(stream, ident, message)
        finally:
            del held

    def _reads_nothing(self, kind: str, content: Mapping[str, Any]) -> bool:
        """Whether a message of a comm runs no code of the user's, and no hook of the user runs with it."""
        is_known = reads_nothing(self._kernel, kind, content)
        return is_known and not quiet_cells.has_hooks(self._shell)

    @hook
    def _hold(self) -> Any:
        """Brings parked memory back to the card, until the returned object is dropped; see `Kernel.hold`."""
        lease = self._lease
        if lease is None:
            return None
        try:
            with self._waiting():
                return lease.hold()
        except KeyboardInterrupt:  # raised from a hook, it would end the kernel
            return None

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """A context manager in which this thread waits for parked memory, and runs no code of the user."""
        thread = threading.get_ident()
        with self._preceding.postponed():
            try:
                self._in_hooks.add(thread)
                yield
            finally:
                self._in_hooks.discard(thread)
                self._restore_handlers()

    def _bytes_are_away(self) -> bool:
        resident = getattr(self._lease, "resident", None)
        return bool(resident is not None and getattr(resident.handle, "away", ()))

    def _with_memory(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function(*args)`, a signal handler of the user's, with the memory if it returns in time."""
        if not self._bytes_are_away():
            return function(*args)
        seconds, held = self._exit_seconds(), []
        with self._waiting():
            # The signal may have interrupted this thread in code that holds a lock. So another thread waits for it.
            threads.start(lambda: held.append(self._lease.hold(seconds))).wait(seconds + 1)
        self._restore_handlers()
        try:
            return function(*args)
        finally:
            held.clear()

    def _at_exit(self) -> None:
        """Called at the end of the process, before the user's exit functions."""
        if self._bytes_are_away():
            with self._waiting():
                self._held = self._lease.hold(self._exit_seconds())

    def _exit_seconds(self) -> float:
        return float(self._runtime.settings.gpu_return_at_exit)

    def _restore_handlers(self) -> None:
        if not self._bytes_are_away():
            self._preceding.restore()

    @property
    def _cells(self) -> int:
        """How many cells run now, in the main thread and in subshells."""
        return sum(map(len, [*self._cells_of.values()]))

    @property
    def _cells_here(self) -> list[FrameType]:
        """The cells that this thread runs now."""
        return self._cells_of.get(threading.get_ident(), [])

    @hook
    def before(self) -> None:
        """Called before a cell, a silent request or a comm callback. Brings parked memory back."""
        kind, content = current_message(self._kernel)
        self._here.needs_no_card = self._reads_nothing(kind, content)
        if self._here.needs_no_card:
            return
        self._mark += 1
        if (
            self._lease is not None
            and self._lease.away
            and not self._cells
            and self._runs_in_ram(content)
        ):
            self._here.needs_no_card = True
            return
        self._cells_of.setdefault(threading.get_ident(), []).append(_event_of())
        text = content.get("code", "")  # the message of a comm has none
        if self._cells == 1:
            self._text = text
        # What the cell takes is known from a run before the kernel's restart, or it parks this notebook.
        if (
            self._lease is None
            and text
            and (_PARKS.search(text) or is_remembered(cell_key(notebook_path(), text)))
        ):
            self._attach()
        if self._lease is None:
            return
        frees = self._lease.refuses_above_cap() and quiet_cells.frees(self._shell, content)
        with self._waiting():
            news = self._lease.begin(text, outermost=self._cells == 1, frees=frees)
        if news:
            self._show(news)

    def _runs_in_ram(self, content: Mapping[str, Any]) -> bool:
        """Whether the cell in `content` may run while the memory is parked. Prepares for the cell if so."""
        if quiet_cells.touches_nothing(self._shell, content):
            return True
        cell = quiet_cells.in_ram(self._shell, content)
        if cell is None:
            return False
        until_the_end = self._here.until_the_end = contextlib.ExitStack()
        if cell.returns:
            until_the_end.enter_context(self._waiting())
        else:
            stand_in = until_the_end.enter_context(self._lease.readable(cell.saves))
            until_the_end.callback(self._forget_deleted)
            _bind(self._shell.user_ns, cell.printed, stand_in, until_the_end)
        return True

    def _forget_deleted(self) -> None:
        with contextlib.suppress(GpuError):  # the bytes are free, and the monitor publishes that
            if news := self._lease.forget_deleted():
                self._show(news)

    @hook
    def after(self) -> None:
        """Called after a cell, a silent request or a comm callback."""
        if self._here.needs_no_card:
            self._here.needs_no_card = False
            self._here.until_the_end.close()
            return
        # For an empty cell IPython calls `post_execute` only: `%run` of a notebook whose last cell is empty. The
        # frame that began the cell around it still runs then.
        cells, event = self._cells_here, _event_of()
        if not cells or cells[-1] is event or cells[-1] not in dict(traceback.walk_stack(event)):
            self._ended()

    def _ended(self) -> None:
        self._mark += 1
        if self._cells_here:
            self._cells_here.pop()
        if not self._cells_here:
            self._cells_of.pop(threading.get_ident(), None)
        rt = self._runtime
        if rt is not None and rt._closed and gpu_runtime._opened() is None:
            self._lease = None  # the user has closed the runtime, and may change its settings
            return
        if self._lease is None and not _holds_memory():
            return
        if self._attach():
            with contextlib.suppress(GpuError):  # the next cell reports it
                self._lease.end(self._text)
                if not self._cells and (news := self._lease.news_of_cap()):
                    self._show(news)

    def _attach(self) -> bool:
        """Opens the runtime, and registers this kernel with it. Returns whether both succeeded."""
        try:
            rt = self._opens()
            if rt is not self._runtime:
                self._runtime, self._lease = rt, rt.attach_kernel(self)
        except GpuError as error:  # `%gpu` reports it
            if getattr(error, "group", "") and not self._is_told:
                # The user must ask the operator, and may not know of the ledger.
                self._is_told = True
                self._show(" ".join(str(error).split()))
        return self._lease is not None

    @outside_modes
    def make_room_to_retry(self, error: BaseException) -> str:
        """Makes room after a failed `%%gpu --retry` cell. Returns what was evicted; "": the cell must not run again."""
        if self._lease is None and not self._attach():
            return ""
        return self._lease.make_room_to_retry(error)

    @hook
    def after_error(self, error: BaseException) -> None:
        """Called after a cell that failed. If it ran out of memory, room is made, and the story is shown."""
        # The notebook may have failed before it held any memory. So any error that mentions memory or
        # CUDA opens the runtime. The runtime then recognises its errors exactly.
        text = f"{type(error).__name__} {error}".lower()
        concerns_us = any(word in text for word in ("memory", "data pointer", "cuda", "nvidia"))
        if self._lease is None and not (concerns_us and self._attach()):
            return
        with contextlib.suppress(GpuError):  # the cell's own error is shown already
            news = self._lease.cell_failed(error)
            if isinstance(news, OutOfMemoryStory):
                from IPython.display import display

                from gpu_runtime.rendering import render

                display(render.story(news))
            elif news:
                self._show(news)

    @property
    def refusal(self) -> GpuError | None:
        """The error with the reason why the cell must not run, or None if the cell may run."""
        if self._lease is None or self._here.needs_no_card:
            return None
        return self._lease.refusal

    # -- the protocol Stillness

    def why_not(self) -> str:
        """Why the kernel's memory must not be moved now, or "".

        A reason that ends by itself is waited for, except in the kernel's loop, which ends some of them.
        """
        if threading.get_ident() == self._main:
            return self._why_not_now()
        return _waited_for(self._why_not_now, MOMENT_SECONDS)

    def _why_not_now(self) -> str:
        if self._main in self._in_hooks:
            return ""
        if self._cells:
            return "a cell runs"
        own = obstacles.Own(self._kernel)
        return (
            obstacles.why_not_loop(self._kernel, own)
            or obstacles.why_not_modules()
            or obstacles.why_not_timers(own)
            or obstacles.why_not_threads(self._main, own)
            or ("gc.freeze() has hidden objects from the search" if frozen() else "")
        )

    def mark(self) -> object:
        """A value that changes with every message to the kernel that may run code of the user's."""
        return self._mark

    def change(self, mark: object, act: Callable[[], None]) -> str:
        """Calls `act` while no other thread runs. Returns why it was not called, or "".

        `mark` is an earlier result of the method `mark`. A thread of the kernel's own may run for a moment, in a `send`
        of ZeroMQ for example, so it is waited for.
        """
        return _waited_for(lambda: self._change_once(mark, act), LOOP_SECONDS)

    def _change_once(self, mark: object, act: Callable[[], None]) -> str:
        if self._in_hooks or threading.get_ident() == self._main:
            return self._change_here(mark, act, threading.get_ident())
        answer: list[str | BaseException] = []
        done = threading.Event()
        caller = threading.get_ident()

        @outside_modes
        def on_loop() -> None:
            """Runs between two messages of the kernel."""
            try:
                if not done.is_set():
                    used = USED if self._mark != mark else ""
                    answer.append(
                        used or self._why_not_now() or self._change_here(mark, act, caller)
                    )
            except BaseException as error:
                answer.append(error)
            finally:
                done.set()

        self._kernel.io_loop.add_callback(on_loop)
        if not done.wait(LOOP_SECONDS):
            done.set()  # a late callback does nothing
            return "the kernel's loop did not answer"
        if answer and isinstance(answer[0], BaseException):
            raise answer.pop()  # type: ignore[misc]  # the frame must not keep it: see pins.py
        return answer[0] if answer else "the kernel's loop did not answer"  # type: ignore[return-value]

    def _change_here(self, mark: object, act: Callable[[], None], caller: int) -> str:
        with self._preceding.postponed():
            self._preceding.precede()
            try:
                return self._exchange(mark, act, caller)
            finally:
                self._restore_handlers()

    def _exchange(self, mark: object, act: Callable[[], None], caller: int) -> str:
        with undisturbed:
            if self._mark != mark:
                return USED
            own = obstacles.Own(self._kernel)
            moving = obstacles.not_at_rest({caller, *self._in_hooks}, own)
            if moving:
                return obstacles.EndsByItself(f"a thread runs ({moving})")
            act()
            return ""


def _waited_for(why_not: Callable[[], str], seconds: float) -> str:
    """The result of `why_not`, which is called again for at most `seconds` while its reason ends by itself."""
    end = time.monotonic() + seconds
    while isinstance(why := why_not(), obstacles.EndsByItself) and time.monotonic() < end:
        time.sleep(AGAIN_SECONDS)
    return why


def _event_of() -> FrameType:
    """The frame of the function that IPython's event comes from, which now calls a hook of this module."""
    frame = sys._getframe(1)
    while frame.f_code is not EventManager.trigger.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_back  # type: ignore[return-value]


class _Here(threading.local):
    """The state of the message that this thread handles now. Each subshell handles messages in its own thread."""

    cells_before = 0  # how many cells of this thread ran when its current message arrived
    # Whether the running cell or callback touches no object of the user's, or only those in host memory.
    needs_no_card = False

    def __init__(self) -> None:
        self.until_the_end = contextlib.ExitStack()  # closed at the end of a cell that runs in RAM


def _bind(
    values: dict[str, Any],
    names: Iterable[str],
    stand_in: Callable[[Any], Any],
    until_the_end: contextlib.ExitStack,
) -> None:
    """Binds the `names` to CPU tensors with the same bytes until the cell ends. One that the cell sets stays so."""
    for name in names:
        value = values[name]
        shown = stand_in(value)
        if shown is value:
            continue
        until_the_end.callback(_restore, values, name, shown, value)  # first: an interrupt may come
        values[name] = shown


def _restore(values: dict[str, Any], name: str, shown: Any, value: Any) -> None:
    if values.get(name) is shown:
        values[name] = value


class _Refusing(ast.NodeTransformer):
    """Refuses to run a cell while the memory of the kernel is parked."""

    def __init__(self, parking: Parking) -> None:
        self._parking = parking

    @outside_modes
    def visit(self, node: Any) -> Any:
        if isinstance(node, ast.Module) and (why := self._parking.refusal):
            raise _rejecting(why)
        return node


def _rejecting(why: GpuError) -> GpuError:
    """The error `why` as one of the same name after which IPython does not remove the transformer and run the cell."""
    kind = type(why)
    rejected = type(kind.__name__, (kind, InputRejected), {"__module__": kind.__module__})
    return rebuilt(rejected, str(why), why.facts)


def _holds_memory() -> bool:
    """Whether torch has a CUDA context, or has a CPU tensor of 1 MiB or more, which counts on a simulated card."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "UntypedStorage"):  # it is not imported completely
        return False
    if torch.cuda.is_initialized():
        return True
    found = instances({torch.UntypedStorage, *subclasses(torch.Tensor)})
    return any(_may_be_large(data, torch) for data in found)


def _may_be_large(data: Any, torch: Any) -> bool:
    """Whether the tensor or storage `data` is on the CPU and has 1 MiB or more, or does not say so.

    A sparse tensor does not say. A tensor of a subclass, such as a weight of 4 bits, is not asked: it may run code.
    """
    if type(data) not in (torch.Tensor, torch.nn.Parameter, torch.UntypedStorage):
        return True
    if data.device.type != "cpu":
        return False
    if type(data) is torch.UntypedStorage:
        return data.nbytes() >= MIB
    return data.layout is not torch.strided or data.nbytes >= MIB


# -- messages that may read memory although no cell runs

# Messages that run no code of the user's.
QUIET_MESSAGES = frozenset(
    (
        "kernel_info_request", "history_request", "is_complete_request", "comm_info_request",
        "connect_request", "usage_request",
    )
)  # fmt: skip
READING_MESSAGES = frozenset(("complete_request", "inspect_request"))
# Requests to the debugger that show or set variables. The debugger answers them in a thread of its own. For
# `initialize` the debugger runs a cell, and its thread does nothing else until the cell ends. This cell must
# not wait for the memory, so the memory is brought back before the request is handled.
DEBUGGER_READS = frozenset(
    (
        "initialize", "inspectVariables", "richInspectVariables", "variables", "evaluate",
        "setVariable", "setExpression", "copyToGlobals",
    )
)  # fmt: skip


def current_message(kernel: Any) -> tuple[str, dict[str, Any]]:
    """The type and the content of the message that `kernel` handles now; empty if it cannot be read."""
    try:
        message = kernel.get_parent("shell")
        return message["header"]["msg_type"], dict(message["content"])
    except Exception:  # no message is being handled, or it has no header
        return "", {}


def may_read(kernel: Any, kind: str, content: dict[str, Any]) -> bool:
    """Whether a message may read the memory of `kernel` without the hook `pre_execute`."""
    if kind == "execute_request":  # an empty cell is not run, but its expressions are evaluated
        return bool(content.get("user_expressions")) and not content.get("code", "").strip()
    if kind in ("comm_open", "comm_close"):
        callback = _comm_callback(kernel, kind, content)
        return callback is not None and not reads_nothing(kernel, kind, content)
    return kind in READING_MESSAGES


def reads_nothing(kernel: Any, kind: str, content: dict[str, Any]) -> bool:
    """Whether a comm's message is for a console that this notebook shows, which reads no tensor, or is sent by
    each page that is loaded, which asks ipywidgets for the state of all widgets.
    """
    callback = _comm_callback(kernel, kind, content) if kind.startswith("comm_") else None
    return _is_of_console(callback) or _is_of_page(callback, content)


async def in_thread(work: Callable[[], Any]) -> Any:
    """Calls `work` in a thread of `gpu_runtime.threads`, since another would be an obstacle to a move.

    Returns its result, or None if `work` raises.
    """
    loop = asyncio.get_running_loop()
    result = loop.create_future()
    waiting = [result]

    def run() -> None:
        done: list[Any] = [None]
        try:
            done[0] = work()
        finally:  # without a result the caller would wait for ever
            # `pop` empties both lists: the thread may end after the caller continues, and must not keep the
            # result alive.
            loop.call_soon_threadsafe(lambda: waiting.pop().set_result(done.pop()))

    threads.start(run)
    return await result


def _comm_callback(kernel: Any, kind: str, content: dict[str, Any]) -> Any:
    """The function of `kernel` that handles a message of a comm; None if there is no such function."""
    manager = getattr(kernel, "comm_manager", None)
    if kind == "comm_open":
        return getattr(manager, "targets", {}).get(content.get("target_name"))
    comm = getattr(manager, "comms", {}).get(content.get("comm_id"))
    return getattr(comm, "_close_callback" if kind == "comm_close" else "_msg_callback", None)


def _is_of_page(callback: Any, content: dict[str, Any]) -> bool:
    """Whether `callback` only reports the state of ipywidgets, none of the user's, as when a page is loaded."""
    module = sys.modules.get("ipywidgets.widgets.widget")
    if module is None or not isinstance(callback, (MethodType, FunctionType)):
        return False
    widget, function = module.Widget, getattr(callback, "__func__", callback)
    if function is widget.handle_control_comm_opened.__func__:
        return True
    asked = content.get("data", {}).get("method")
    if function is widget._handle_control_comm_msg.__func__ and asked == "request_states":
        shown = list(module._instances.values())
    elif function is widget._handle_msg and asked == "request_state":
        shown = [callback.__self__]
    else:
        return False
    kinds = {kind for instance in shown for kind in type(instance).__mro__}
    return not any(map(obstacles.is_users_class, kinds))


def _is_of_console(callback: Any) -> bool:
    """Whether `callback` belongs to a view of gpu-console: Panel's comm calls a method of that view."""
    comm = getattr(callback, "__self__", None)
    # Panel has a class of its own for comms, which is derived from one of pyviz_comms.
    if not any(kind.__module__.startswith("pyviz_comms") for kind in type(comm).__mro__):
        return False
    view = getattr(getattr(comm._on_msg, "func", None), "__self__", None)
    return type(view).__module__.startswith("gpu_panels.") and not view.has_objects_of_the_user
