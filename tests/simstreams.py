"""Streams and events of the simulated accelerator (tests/simgpu.py), and its module `torch.simgpu`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils import backend_registration

from tests.simcard import DEFAULT, Queue
from tests.simtensors import CARDS, cards, mode

_DEVICE_TYPE = 20  # c10::DeviceType::PrivateUse1
_numbers = itertools.count(1)


class Stream(torch.Stream):
    """`torch.simgpu.Stream`: a queue of work of one card, which is done in order."""

    def __new__(cls, device: Any = 0, stream_id: int | None = None) -> Stream:
        """A new stream of that card, or the stream with the number `stream_id`."""
        number = next(_numbers) if stream_id is None else stream_id
        place = {"device_index": _index(device), "device_type": _DEVICE_TYPE}
        return super().__new__(cls, stream_id=number, **place)

    @property
    def queue(self) -> Queue:
        """The queue that holds the work of this stream."""
        return cards[self.device_index].queue(self.stream_id)

    def synchronize(self) -> None:
        self.queue.run()

    def record_event(self, event: Event | None = None) -> Event:
        """An event that happens once the work that is now in the stream is done."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Makes later work of this stream begin only after all work that the other stream has now."""
        self.wait_event(stream.record_event())


class Event:
    """`torch.simgpu.Event`: a position in the work of a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._place: tuple[Queue, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Places the event after the work that the stream has now."""
        queue = (stream or module.current_stream()).queue
        self._place = queue, queue.launched

    def wait(self, stream: Stream | None = None) -> None:
        """Makes later work of the stream begin only after this event."""
        if self._place is not None:
            queue, number = self._place
            (stream or module.current_stream()).queue.launch(partial(queue.run, number))

    def synchronize(self) -> None:
        if self._place is not None:
            self._place[0].run(self._place[1])

    def query(self) -> bool:
        return self._place is None or self._place[0].done >= self._place[1]


def _index(device: Any) -> int:
    if device is None:
        return 0
    return device if isinstance(device, int) else torch.device(device).index or 0


class Module(getattr(backend_registration, "_DummyBackendModule", object)):  # type: ignore[misc]
    """`torch.simgpu`, with the names of `torch.cuda`."""

    Stream, Event = Stream, Event

    def device_count(self) -> int:
        return CARDS

    def set_device(self, card: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def _lazy_init(self) -> None:
        pass

    def ExternalStream(self, stream_ptr: int, device: Any = None) -> Stream:  # noqa: N802
        """The stream with the number `stream_ptr`. As in torch, 0 gives a new stream.

        Source: pytorch/pytorch#182960.
        """
        return Stream(device, stream_ptr or None)

    def current_stream(self, device: Any = None) -> Stream:
        return Stream(device, mode.streams[_index(device)])

    def default_stream(self, device: Any = None) -> Stream:
        return Stream(device, DEFAULT)

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        card = stream.device_index
        before, mode.streams[card] = mode.streams[card], stream.stream_id
        try:
            yield
        finally:
            mode.streams[card] = before

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def synchronize(self, device: Any = None) -> None:
        cards[_index(device)].synchronise()

    def memory_snapshot(self, *_: Any, **__: Any) -> list[dict[str, Any]]:
        return [segment for card in cards for segment in card.snapshot()]

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return cards[_index(device)].stats()

    def is_initialized(self) -> bool:
        return True

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        card = cards[_index(device)]
        return {"requested_bytes": {"all": {"current": card.used_bytes, "peak": card.peak_bytes}}}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        card = cards[_index(device)]
        card.peak_bytes = card.used_bytes

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        card = cards[_index(device)]
        return card.capacity_bytes - card.reserved_bytes, card.capacity_bytes

    def empty_cache(self) -> None:
        for card in cards:
            card.empty_cache()


module = Module()
