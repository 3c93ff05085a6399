"""The program of a process that runs one model for another process. See `model_processes.py`.

The program answers requests, as `remote_calls.py` describes them. The "progress" of a load has the
bytes done and in total. A "cancel" ends a stream after its next item. One thread at a time waits for a
request. When a request arrives, this thread starts another thread to wait for the next request. Then
it runs its own.

Requests are pickles, which can run any code. The socket connects this process with its owner only,
and the owner may run any code here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from ...devices.probe import open_probe
from ...errors import GpuError, ProcessLost
from ...facts import ModelSpec, Shares
from ...fault_texts import recognise
from ...threads import only_ours, start_short
from ..registry import open_backend
from . import remote_calls
from .remote_calls import MessageSocket

LOST_CODE = 70  # the exit code of a process that can no longer use its card


class Model:
    """The model of this process. Its methods are the kinds of requests; most are as in `Backend`."""

    def __init__(self, report: Callable[[int, int], None]) -> None:
        """No model is loaded yet. During a load, `report` gets the bytes done and in total."""
        self._report = report
        self._backend: Any = None
        self._handle: Any = None
        self._calls: set[object] = set()  # a mark for each call of the model that has not ended
        self._gate = threading.Lock()  # no call begins while the model moves

    def load(
        self, backend: str, devices: str, ids: tuple[str, ...], spec: ModelSpec, shares: Shares
    ) -> Shares:
        """Loads the model of `spec` onto its `shares` and returns the measured shares.

        `backend` is the name of the backend. `devices` is the owner's setting GPU_DEVICES. `ids`
        are the owner's names of these devices, in the same order.
        """
        probe = open_probe(devices)
        probe.rename({mine.id: id for mine, id in zip(probe.devices, ids, strict=True)})
        self._backend = open_backend(backend, probe)
        self._backend.undisturbed = lambda: not self._calls and only_ours()
        self._handle = self._backend.load(spec, shares, progress=self._report)
        return self.measure()

    def move(self, shares: Shares) -> Shares:
        """Moves the model to `shares` and returns the measured shares."""
        with self._gate:
            self._backend.move(self._handle, shares)
        return self.measure()

    def measure(self) -> Shares:
        """The bytes of the model on each device."""
        return self._backend.measure(self._handle)

    def ask(self, method: str) -> Any:
        """The result of the backend's `elsewhere`, `droppable` or `unchanged`."""
        return getattr(self._backend, method)(self._handle)

    def call(self, path: tuple[str, ...], given: remote_calls.Packed) -> remote_calls.Packed:
        """The packed result of a call on the model; see `remote_calls.run`."""
        with self._call() as value:
            return remote_calls.uncopied(remote_calls.run(value, path, given))

    def stream(self, function: Callable[..., Iterator[Any]], *args: Any) -> Iterator[Any]:
        """Yields the items of `function(value, *args)`, where `value` is the model."""
        with self._call() as value:
            yield from function(value, *args)

    @contextlib.contextmanager
    def _call(self) -> Iterator[Any]:
        mark = object()
        with self._gate:
            self._calls.add(mark)
        try:
            yield self._backend.value(self._handle)
        finally:
            self._calls.discard(mark)


KINDS = tuple(name for name in vars(Model) if not name.startswith("_"))


def main(number: int) -> None:
    """Answers requests from the socket `number` until the owner closes it."""
    messages = MessageSocket(socket.socket(fileno=number))

    def send(*message: Any) -> None:
        _send(messages, *message)

    model = Model(lambda done, total: send(0, "progress", (done, total)))
    cancelled: set[int] = set()  # numbers of streams whose reader has left

    def answer_one() -> None:
        """Receives a request and answers it. If the socket is closed, ends this process."""
        try:
            number, kind, args = messages.receive()
        except (EOFError, OSError):  # the owner has ended, or it wants this process no more
            os._exit(0)
        except BaseException:  # noqa: BLE001 - without its reader, this process is of no use
            traceback.print_exc()
            os._exit(1)
        start_short(answer_one)
        if kind == "cancel":
            cancelled.add(*args)
        else:
            _answer(model, number, kind, args, cancelled, send)

    start_short(answer_one)
    threading.Event().wait()


def _answer(
    model: Model,
    number: int,
    kind: str,
    args: tuple[Any, ...],
    cancelled: set[int],
    send: Callable[..., None],
) -> None:
    """Runs one request and sends its answers. If the card is lost, ends this process."""
    try:
        if kind not in KINDS:
            raise GpuError(f"{kind} is no request of a model; these are: {', '.join(KINDS)}.")
        found = getattr(model, kind)(*args)
        if kind == "stream":
            with contextlib.closing(found) as items:
                for item in items:
                    send(number, "item", item)
                    if number in cancelled:
                        break
            found = None
        send(number, "result", found)
    except Exception as error:  # noqa: BLE001 - raised where the owner waits
        fault = None
        if not isinstance(error, GpuError):
            fault = recognise(str(error))
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(traceback.format_exc())
        send(number, "error", error)
        if isinstance(error, ProcessLost) or (fault is not None and fault.loses_context):
            print(error, file=sys.stderr, flush=True)
            os._exit(LOST_CODE)
    finally:
        cancelled.discard(number)


def _send(messages: MessageSocket, number: int, what: str, value: Any) -> None:
    """Sends an answer, or a GpuError that describes `value` if it cannot be sent."""
    try:
        if what == "error":
            pickle.loads(pickle.dumps(value))  # some errors can be pickled, but not unpickled
        messages.send((number, what, value))
    except OSError:  # the owner has ended
        os._exit(0)
    except Exception as error:  # noqa: BLE001 - an error of any class may come from the model
        messages.send((number, "error", GpuError(f"{value!r} cannot be sent ({error}).")))


if __name__ == "__main__":
    main(int(sys.argv[1]))
