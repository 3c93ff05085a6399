"""Models that clients of the fleet use on this host: one thread for each use.

A pin belongs to the thread that took it. So each hold has its own thread, which stays inside
`with rt.use(model)` and runs the client's calls until the hold is released.
"""

from __future__ import annotations

import _thread
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import NodeLost
from ..threads import imported, start

MOST_RELEASED = 1000  # early releases that are remembered


class _Released(BaseException):
    """Raised in a thread that waits for room, after its hold was released.

    It is no subclass of Exception, so that no handler catches it.
    """


class _Call(NamedTuple):
    """A call that the hold's thread runs, and the box for its result."""

    path: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: queue.SimpleQueue[tuple[Any, BaseException | None]]


class Hold:
    """One use of a model by a client, or the wait for it."""

    def __init__(self, id: str, job: str, model: str) -> None:
        """The hold `id` of the Ray job `job` on `model`."""
        self.id, self.job, self.model = id, job, model
        self.ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.released = threading.Event()
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()

    def release(self) -> None:
        """Ends the use, or the wait for it. A call that runs is completed."""
        self.released.set()
        self.calls.put(None)


class Holds:
    """All holds of this host, by their ids."""

    def __init__(self, rt: Any, host: str) -> None:
        """`rt` is the runtime of this host, and `host` its name."""
        self._rt, self._host = rt, host
        self._all: dict[str, Hold] = {}
        # Ids that were released before their hold began: the release may arrive first.
        self._released_early: deque[str] = deque(maxlen=MOST_RELEASED)
        self._by_thread: dict[int, Hold] = {}
        rt.tell_waits(self._on_wait)

    def enter(self, hold: Hold, timeout: float | None, importance: Any) -> None:
        """Waits until the model of `hold` is on its device. `timeout` and `importance` as in use.

        Raises as `rt.use` does.
        """
        self._all[hold.id] = hold
        if hold.id in self._released_early:
            self.release(hold.id)
        start(lambda: self._run(hold, timeout, importance))
        error = hold.ready.get()
        if error is not None:
            self._all.pop(hold.id, None)
            raise error

    def call(self, id: str, path: tuple[str, ...], args: Any, kwargs: Any) -> Any:
        """The result of a call on the model of the hold `id`, run in the hold's thread.

        Raises the errors of the call. Raises NodeLost if there is no such hold, because the agent
        has been restarted.
        """
        hold = self._all.get(id)
        if hold is None or hold.released.is_set():
            raise NodeLost("", self._host, "its agent has been restarted")
        call = _Call(path, args, kwargs, queue.SimpleQueue())
        hold.calls.put(call)
        value, error = call.result.get()
        if error is not None:
            raise error
        return value

    def release(self, id: str) -> None:
        """Ends the hold `id`. Without such a hold, nothing happens."""
        if hold := self._all.pop(id, None):
            hold.release()
        else:
            self._released_early.append(id)

    def release_jobs(self, ended: set[str]) -> int:
        """Ends all holds of the jobs that have `ended`. Returns their number."""
        dead = [hold.id for hold in list(self._all.values()) if hold.job in ended]
        for id in dead:
            self.release(id)
        return len(dead)

    def users(self, model: str) -> int:
        """The number of holds on `model`, also of those that still wait."""
        return sum(hold.model == model for hold in list(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)

    def _run(self, hold: Hold, timeout: float | None, importance: Any) -> None:
        thread = _thread.get_ident()
        self._by_thread[thread] = hold
        try:
            with self._rt.use(hold.model, timeout=timeout, importance=importance) as value:
                hold.ready.put(None)
                while (call := hold.calls.get()) is not None:
                    call.result.put(_outcome(value, call))
                    del call  # this frame must not keep a result
                del value
        except _Released:
            hold.ready.put(NodeLost(hold.model, self._host, "the client has ended"))
        except BaseException as error:  # noqa: BLE001 - raised where the client waits
            hold.ready.put(error)
        finally:
            self._by_thread.pop(thread, None)
            self._end(hold)

    def _end(self, hold: Hold) -> None:
        """Answers the calls that arrived too late."""
        hold.released.set()
        while not hold.calls.empty():
            late = hold.calls.get()
            if late is not None:
                late.result.put((None, NodeLost(hold.model, self._host, "the use has ended")))

    def _on_wait(self, model: str, wait: Any) -> None:
        """Runs in the hold's thread each time the ledger decides that its request must wait."""
        hold = self._by_thread.get(_thread.get_ident())
        if hold is not None and wait is not None and hold.released.is_set():
            raise _Released


def _outcome(value: Any, call: _Call) -> tuple[Any, BaseException | None]:
    """The result of `call` on the model `value`, with tensors in host memory, or its error."""
    try:
        target = value
        for name in call.path:
            target = getattr(target, name)
        move = _mover(value)
        args, kwargs = _each_tensor((call.args, call.kwargs), move)
        found = target(*args, **kwargs)
        return _each_tensor(found, lambda tensor: tensor.detach().cpu()), None
    except Exception as error:  # noqa: BLE001 - raised where the client waits
        return None, error


def _mover(value: Any) -> Callable[[Any], Any]:
    """A function that moves a tensor to the device of the model `value`."""
    parameters = getattr(value, "parameters", None)
    first = next(iter(parameters()), None) if callable(parameters) else None
    device = getattr(first, "device", None)
    return lambda tensor: tensor if device is None else tensor.to(device)


def _each_tensor(value: Any, change: Callable[[Any], Any]) -> Any:
    """The `value` with `change` applied to every tensor in it. Without torch it is unchanged."""
    torch = imported("torch")
    if torch is None:
        return value
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple, set):
        return type(value)(_each_tensor(one, change) for one in value)
    if isinstance(value, dict) and hasattr(value, "items"):
        changed = {key: _each_tensor(one, change) for key, one in value.items()}
        return changed if type(value) is dict else _same_kind(value, changed)
    return value


def _same_kind(value: Any, changed: dict[Any, Any]) -> Any:
    """`changed` as a mapping of the class of `value`, such as a model's output."""
    try:
        return type(value)(**changed)
    except TypeError:
        return changed
