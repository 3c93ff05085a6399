"""Models that clients of the fleet use on this host, with one thread for each use (a hold).

A pin belongs to the thread that took it. So each hold has its own thread, which stays inside `with rt.use(model)` until
the hold is released. Each call of a client runs in the thread that receives the call.
"""

from __future__ import annotations

import _thread
import queue
import threading
from collections import deque
from typing import Any

from ..backends.processes import remote_calls
from ..backends.processes.model_processes import ProcessModel
from ..backends.processes.remote_calls import Packed
from ..errors import EngineDied, NodeLost, NotResident
from ..threads import start

MOST_RELEASED = 1000  # releases that arrived before their hold, and are remembered


class _HoldReleased(BaseException):
    """Raised in a thread that waits for room, once the hold of that thread was released.

    It is no Exception, so that no `except Exception` between the wait and `FleetHolds` catches it.
    """


class FleetHold:
    """One use of `model` by a client of the Ray `job`, or the wait for the use."""

    def __init__(self, id: str, job: str, model: str) -> None:
        self.id, self.job, self.model = id, job, model
        self.ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.released = threading.Event()
        self.value: Any = None  # the model, from the beginning of the use to its end
        self.calling = threading.Lock()  # held during a call: the calls of a hold run one by one

    def release(self) -> None:
        """Ends the use of the model, or the wait for it. A call that runs is completed."""
        self.released.set()


class FleetHolds:
    """All holds of this `host`, by their ids, over its runtime `rt`."""

    def __init__(self, rt: Any, host: str) -> None:
        self._rt, self._host = rt, host
        self._all: dict[str, FleetHold] = {}
        # Ids that were released before their hold began: the release may arrive first.
        self._released_early: deque[str] = deque(maxlen=MOST_RELEASED)
        self._by_thread: dict[int, FleetHold] = {}
        rt.tell_waits(self._on_wait)

    def enter(self, hold: FleetHold, timeout: float | None, importance: Any) -> None:
        """Waits until the model of `hold` is on its device. Parameters and errors are those of `rt.use`."""
        self._all[hold.id] = hold
        if hold.id in self._released_early:
            self.release(hold.id)
        start(lambda: self._run(hold, timeout, importance))
        error = hold.ready.get()
        try:
            if error is not None:
                self._all.pop(hold.id, None)
                raise error
        finally:
            del error

    def call(self, id: str, path: tuple[str, ...], given: Packed) -> Packed:
        """The packed result of a call on the model of the hold `id`. Raises the errors of the call.

        `path` and `given` are as in `remote_calls.run`. Raises NodeLost if there is no such hold, because the agent has
        been restarted, or if the model's process is gone for good.
        """
        hold = self._all.get(id)
        if hold is None:
            raise NodeLost("", self._host, "its agent has been restarted")
        with hold.calling:
            if hold.released.is_set():
                raise NodeLost(hold.model, self._host, "the use has ended")
            try:
                if isinstance(hold.value, ProcessModel):
                    return hold.value.run_there(path, given)
                return remote_calls.run(hold.value, path, given)
            except (EngineDied, NotResident):
                if self._rt.here(hold.model):
                    raise
                raise NodeLost(hold.model, self._host, "its process is gone") from None

    def release(self, id: str) -> None:
        """Ends the hold with this `id`, if there is one."""
        if hold := self._all.pop(id, None):
            hold.release()
        else:
            self._released_early.append(id)

    def release_jobs(self, ended: set[str]) -> int:
        """Ends all holds of the jobs in `ended`. Returns the number of these holds."""
        dead = [hold.id for hold in list(self._all.values()) if hold.job in ended]
        for id in dead:
            self.release(id)
        return len(dead)

    def users(self, model: str) -> int:
        """The number of holds on `model`, including the holds that still wait for room."""
        return sum(hold.model == model for hold in list(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)

    def _run(self, hold: FleetHold, timeout: float | None, importance: Any) -> None:
        thread = _thread.get_ident()
        self._by_thread[thread] = hold
        try:
            with self._rt.use(hold.model, timeout=timeout, importance=importance) as value:
                hold.value = value
                hold.ready.put(None)
                hold.released.wait()
                with hold.calling:  # a call that runs is completed
                    del hold.value, value
        except _HoldReleased:
            hold.ready.put(NodeLost(hold.model, self._host, "the client has ended"))
        except BaseException as error:  # noqa: BLE001 - raised where the client waits
            hold.ready.put(error)
        finally:
            self._by_thread.pop(thread, None)
            hold.released.set()

    def _on_wait(self, model: str, wait: Any) -> None:
        """Called in a hold's thread when its request must wait. Raises _HoldReleased if the hold was released."""
        hold = self._by_thread.get(_thread.get_ident())
        if hold is not None and wait is not None and hold.released.is_set():
            raise _HoldReleased
