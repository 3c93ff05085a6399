"""Calls on a model in another process: how arguments and results are packed and sent, and how a call runs.

A request is a tuple (number, kind, arguments). Its answer is a tuple (number, "result" or "error",
value). Before the result, the items of a stream are sent as (number, "item", value); a result that is
not None is then the last item. During a load, (0, "progress", arguments) is sent. A request of the
kind "cancel", with the number of another request, has no answer: that request ends soon.

A packed value is the pickle of the value, followed by the value's large buffers. The processes
between the caller and the model pass these parts on without unpacking them or importing torch. A
pickle can run any code. So use this module only between processes that trust each other.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ... import threads
from ...errors import BadCall
from ...threads import import_whole, imported

Packed = tuple[Any, ...]  # the pickle as bytes, and the buffers
SMALL_BYTES = 1 << 14  # below this size a copy is cheaper than a separate buffer
READ_BYTES = 1 << 16  # read at once, so that a small message needs one system call


class MessageSocket:
    """One end of a connection for pickled objects.

    Several threads may send at once; only one thread may receive.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._file = connected.makefile("rb", READ_BYTES)
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Sends the `message`. Raises OSError. Errors of pickle are raised before any byte is sent.

        A `pickle.PickleBuffer` in the message is sent without a copy. The receiver gets a bytearray
        in its place.
        """
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(message, 5, buffer_callback=buffers.append)
        raw = [buffer.raw() for buffer in buffers]
        sizes = [len(data), *(part.nbytes for part in raw)]
        head = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        with self._sending:
            self._socket.sendall(head + data)
            for part in raw:
                self._socket.sendall(part)

    def receive(self) -> Any:
        """The next message. Raises OSError, and EOFError once the other end is closed."""
        [count] = struct.unpack("<I", self._read(4))
        size, *others = struct.unpack(f"<{count}Q", self._read(8 * count))
        data = self._read(size)
        return pickle.loads(data, buffers=[self._read(other) for other in others])

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        if self._file.readinto(data) < size:
            raise EOFError
        return data

    def close(self) -> None:
        """Waits until no thread sends, then closes this end. A repeated call does nothing."""
        with self._sending:
            self._file.close()
            self._socket.close()


class Ended(Exception):
    """Raised when the process has ended before it answered."""


class Failed(Exception):
    """An error that is sent as the name of its class and its text, because only its program has the class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text


class Requests:
    """Sends requests over a connection, and passes each answer to the thread that waits for it."""

    def __init__(
        self,
        connection: Any,
        progress: Callable[..., None] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Reads the `connection`, such as a MessageSocket, in a thread. `progress` gets the arguments of "progress".

        Once the connection has ended, `on_end` is called, and only then do waiting requests raise Ended.
        """
        self._connection, self._progress, self._on_end = connection, progress, on_end
        self._numbers = itertools.count(1)
        self._pending: dict[int, queue.SimpleQueue[tuple[str, Any]]] = {}
        self._lock = threading.Lock()
        self._over = False
        self.reading = threads.start(self._read)

    def request(self, kind: str, *args: Any, **options: Any) -> Any:
        """The result of a request. Raises its error, or Ended if the process ends before it answers.

        The `options` are `cancelled`, as in `stream`, and `seconds`: without an answer in this time,
        TimeoutError is raised.
        """
        seconds = options.pop("seconds", None)
        with self._answers(kind, args, **options) as answers:
            what, value = threads.next_item(answers, seconds)
        if what == "result":
            return value
        try:
            raise value
        finally:
            del value  # else error and traceback keep each other alive until the next collection

    def stream(
        self, kind: str, *args: Any, cancelled: threads.Cancellation | None = None
    ) -> Iterator[Any]:
        """Yields the items of a request. Raises the errors of `request`.

        If the iterator is closed before its end, or `cancelled` is set, the request is cancelled.
        """
        with self._answers(kind, args, cancelled) as answers:
            while True:
                what, value = threads.next_item(answers)
                if what != "item":
                    break
                yield value
            try:
                if what == "error":
                    raise value
                if value is not None:
                    yield value
            finally:
                del value

    @contextlib.contextmanager
    def _answers(
        self, kind: str, args: tuple[Any, ...], cancelled: threads.Cancellation | None = None
    ) -> Iterator[queue.SimpleQueue[Any]]:
        """A context manager that sends a request, and yields the queue of its answers.

        If the block is left before the last answer, as after an interrupt, the request is cancelled.
        """
        answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        number = next(self._numbers)
        self._send(number, kind, args, answers)
        try:
            if cancelled is not None:
                cancelled.then(lambda: self._cancel(number))
            yield answers
        finally:
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        """Cancels the request `number`, unless it has ended. The thread that waits for it gets the result None."""
        if answers := self._pending.pop(number, None):
            with contextlib.suppress(Ended):  # the process has ended, and the request with it
                self._send(number, "cancel", (number,))
            answers.put(("result", None))

    def _send(self, number: int, kind: str, args: tuple[Any, ...], answers: Any = None) -> None:
        with self._lock:
            if self._over:
                raise Ended
            if answers is not None:
                self._pending[number] = answers
        try:
            with contextlib.suppress(OSError):  # the process has just ended; `_read` answers
                self._connection.send((number, kind, args))
        except BaseException:  # the request cannot be pickled
            self._pending.pop(number, None)
            raise

    def _read(self) -> None:
        """Puts each answer into the queue of its request, in a thread, until the process ends."""
        try:
            while True:
                number, what, value = self._connection.receive()
                if what == "progress":
                    if self._progress:
                        self._progress(*value)
                    continue
                known = self._pending.get if what == "item" else self._pending.pop
                if answers := known(number, None):
                    answers.put((what, value))
        except (EOFError, OSError):  # the process has ended; `finally` answers its requests
            pass
        finally:
            self._connection.close()
            self._on_end()
            with self._lock:
                self._over = True
                waiting = list(self._pending.values())
            for answers in waiting:
                answers.put(("error", Ended()))


def pack(value: Any, *, dumps: Callable[..., bytes] = pickle.dumps, share: bool = True) -> Packed:
    """The packed `value`, pickled by `dumps`. With `share`, its large buffers are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    light = _each_tensor(value, partial(_lightened, {}))
    data = dumps(light, protocol=5, buffer_callback=buffers.append if share else None)
    return data, *buffers


class _LightTensor:
    """A tensor that is pickled as an array, so that its bytes can be a buffer of the packed value.

    Torch's own pickle of a tensor takes 0.3 ms more at each end, and copies the bytes.
    """

    def __init__(self, array: Any, dtype: str) -> None:
        self._parts = array, dtype

    def __reduce__(self) -> tuple[Any, ...]:
        return _tensor, self._parts


def _array(tensor: Any) -> Any:
    """The bytes of `tensor` as a NumPy array. Dtypes that NumPy lacks become integers."""
    import_whole("torch")
    import torch

    try:
        return tensor.numpy()
    except TypeError:  # such as bfloat16
        return tensor.view(getattr(torch, f"int{8 * tensor.element_size()}")).numpy()


def _tensor(array: Any, dtype: str) -> Any:
    """The tensor with the bytes of `array`, read as the torch dtype with the name `dtype`."""
    import_whole("torch")
    import torch

    writable = array if array.flags.writeable else array.copy()
    return torch.from_numpy(writable).view(getattr(torch, dtype))


def _lightened(known: dict[int, tuple[Any, _LightTensor]], tensor: Any) -> Any:
    """`tensor` as a `_LightTensor`, the same one each time; itself if only torch can pickle it."""
    import_whole("torch")
    import torch

    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    is_plain = is_plain and tensor.device.type == "cpu" and not tensor.requires_grad
    if not is_plain or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return tensor
    if id(tensor) not in known:
        light = _LightTensor(_array(tensor.contiguous()), str(tensor.dtype).split(".")[1])
        known[id(tensor)] = tensor, light  # the tensor is kept, so that its id stays its own
    return known[id(tensor)][1]


def unpack(packed: Packed) -> Any:
    """The value in `packed`. Its arrays use the buffers of `packed` as their memory."""
    data, *buffers = packed
    return pickle.loads(data, buffers=buffers)


def uncopied(packed: Packed) -> Packed:
    """The parts of `packed`, with each large part in a PickleBuffer, which pickle does not copy."""
    return tuple(
        part if type(part) is bytes and len(part) < SMALL_BYTES else pickle.PickleBuffer(part)
        for part in packed
    )


def message(packed: Packed) -> Any:
    """The parts of `packed` for Ray, which takes 0.3 ms less for single bytes than for a tuple."""
    parts = uncopied(packed)
    return parts[0] if len(parts) == 1 and type(parts[0]) is bytes else parts


def packed_in(message: Any) -> Packed:
    """The packed value in `message`, a result of the function `message`."""
    return message if isinstance(message, tuple) else (message,)


def run(value: Any, path: tuple[str, ...], given: Packed) -> Packed:
    """The packed result of a call of the model `value`, or of the object at `path` in it.

    `path` has the names of attributes. `given` is the packed pair of arguments and keyword
    arguments. Tensors in the arguments are moved to the model's device, and those in the result to
    the CPU. Raises the errors of the call, and BadCall for a result that cannot be sent.
    """
    target = value
    for name in path:
        target = getattr(target, name)
    args, kwargs = _each_tensor(unpack(given), _mover(value))
    found = target(*args, **kwargs)
    result = _each_tensor(found, lambda tensor: tensor.detach().cpu())
    try:
        return pack(result)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        method = ".".join(path) or "the call"
        raise BadCall(
            f"the result of {method} cannot be sent to another process ({error}).",
            name=getattr(value, "name", ""),
            method=method,
            why=str(error),
        ) from None


def _mover(value: Any) -> Callable[[Any], Any]:
    """A function that moves a tensor to the device of the model `value`."""
    parameters = getattr(value, "parameters", None)
    first = next(iter(parameters()), None) if callable(parameters) else None
    device = getattr(first, "device", None)
    return lambda tensor: tensor if device is None else tensor.to(device)


def _each_tensor(value: Any, change: Callable[[Any], Any]) -> Any:
    """The `value` with `change` applied to its tensors, also in lists, tuples, sets and dicts."""
    torch = imported("torch")
    if torch is None:
        return value
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple, set):
        return type(value)(_each_tensor(item, change) for item in value)
    if isinstance(value, dict) and hasattr(value, "items"):
        changed = {key: _each_tensor(item, change) for key, item in value.items()}
        return changed if type(value) is dict else _same_kind(value, changed)
    return value


def _same_kind(value: Any, changed: dict[Any, Any]) -> Any:
    """The items of `changed` in an object of the class of `value`, such as a model's output, if the
    class takes them as keywords.
    """
    try:
        return type(value)(**changed)
    except TypeError:
        return changed
