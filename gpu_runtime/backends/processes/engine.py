"""The base of engines: the end of an engine, its restarts, and the errors about both.

An engine is the program or thread that runs one model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...devices.process_memory import out_of_memory
from ...engine_logs import new_log
from ...errors import EngineDied, GpuError, LoadFailed
from ...facts import ModelSpec
from ...fault_texts import Kind, last_line, recognise
from .processes import MOST_RESTARTS, in_words

OnLoss = Callable[[str, str], None]  # called with kind and because


class Engine:
    """The program or thread that runs one model. If the engine is lost, this is reported once.

    An engine is lost if it ended by itself and is not restarted.
    """

    def __init__(self) -> None:
        """An engine without a watcher; see `watch`."""
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
            self._reporting = False

    def require(self) -> None:
        """Raises the error of the engine's end, if the engine is gone for good.

        Each caller gets a new error object, with its own traceback.
        """
        if self.error is not None:
            raise type(self.error)(str(self.error), **self.error.facts)


class RestartedEngine(Engine):
    """An engine in separate processes, which are restarted at most MOST_RESTARTS times."""

    title: str  # what messages call the engine: "server" or "process"

    def __init__(self, spec: ModelSpec) -> None:
        """The engine of the model `spec`. The engine's output is appended to the file `log`."""
        super().__init__()
        self.spec, self.log = spec, new_log(spec.name)
        self.restarts = 0
        self._pid: int | None = None  # named in errors

    def _wait_for_end(self) -> tuple[int, str] | None:
        """Waits for the end of the processes. Returns their exit status and the end of their log.

        Returns None if the processes were ended on purpose.
        """
        raise NotImplementedError

    def _start_again(self) -> None:
        """Starts new processes on the same cards. Raises the errors of a load."""
        raise NotImplementedError

    def _supervise(self) -> None:
        """Restarts the processes if they end by themselves, at most MOST_RESTARTS times.

        Runs in a separate thread.
        """
        while ended := self._wait_for_end():
            status, output = ended
            fault = recognise(output)
            kind = fault.kind if fault else Kind.CRASH
            why = f"{in_words(status)}: {fault.line}" if fault else in_words(status)
            if self.restarts >= MOST_RESTARTS:
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
        text = (
            f"the {self.title} of {name} is gone: {why.rstrip('.')}.\n"
            f"  It was restarted {times}. Its memory is free; the next use of {name} loads it again."
        )
        with self._changed:
            self.error = self.died(kind, text, why, status, self._pid)
        self._report_loss()
        with self._changed:  # wake the callers last: by now the book shows the loss
            self._changed.notify_all()

    def died(
        self, kind: Kind, text: str, why: str, status: int | None = None, pid: int | None = None
    ) -> EngineDied:
        """The error for an engine that ended. `pid` was its process, `status` is the exit status.

        `text` is the message, to which the path of the log is added. `why` is the reason in a few
        words.
        """
        return EngineDied(
            f"{text}\n  Its log:  {self.log}",
            name=self.spec.name,
            pid=pid,
            status=status,
            kind=kind.value,
            why=why,
            log=str(self.log),
        )

    def _load_error(self, why: str, output: str) -> GpuError:
        """The error for a load that failed because of `why`.

        The message has the line of `output` that explains the failure. If this line shows that a
        device had no room, the result is an out-of-memory error, else LoadFailed.
        """
        fault = recognise(output)
        if fault is not None and fault.kind is Kind.OUT_OF_MEMORY:
            return out_of_memory(fault.line)
        explanation = fault.line if fault else last_line(output)
        detail = f": {explanation}" if explanation else ""
        return LoadFailed(
            f"{self.spec.name} could not be loaded: {why}{detail}.\n  Its log:  {self.log}",
            name=self.spec.name,
            source=self.spec.source,
            why=why,
            kind=fault.kind.value if fault else "",
            log=str(self.log),
        )
