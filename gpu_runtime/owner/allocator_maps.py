"""The maps of this process's allocators, published beside the book at a calm pace; and those of all owners.

Drawing a map of thousands of blocks takes milliseconds in which the kernel's own code stands still, so it is drawn
only when something has changed, and for at most a hundredth of the time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from msgspec.structs import replace

from ..devices.allocator_stats import bounded
from ..devices.probe import Probe
from ..facts import AllocatorMap, Book
from ..ledgers.base import Ledger

log = logging.getLogger("gpu_runtime")

PACE_SECONDS = 2.0  # between two maps, at least
CALM = 100  # times as long as drawing the last one took is rested before the next


class Maps:
    """One owner's maps, and its view of the others'. Thread-safe."""

    def __init__(
        self, ledger: Ledger, probe: Probe, *, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self._ledger, self._probe, self._clock, self._wall = ledger, probe, clock, wall
        self._pulse: object = None  # of what was published last
        self._drawn: tuple[object, tuple[AllocatorMap, ...]] = (
            None,
            (),
        )  # the pulse, and this process's maps at it
        self._published = False  # an owner whose allocators were never used publishes nothing
        self._rest_until = float("-inf")
        self._lock = threading.Lock()

    def publish(self, *, at_once: bool = False) -> bool:
        """Publishes the maps where they have changed and the last are old enough, or `at_once`; whether it did."""
        with self._lock:
            now = self._clock()
            if now < self._rest_until and not at_once:
                return False
            pulse = self._probe.pulse()
            if pulse == self._pulse:
                return False
            began = time.thread_time()
            maps = self.own()
            if maps or self._published:
                try:
                    self._ledger.publish_maps(maps)
                except (
                    OSError
                ) as error:  # a full disk: others see the last ones, and this process goes on
                    log.debug("the allocators' maps could not be published: %s", error)
                    return False
                finally:
                    self._rest_until = now + max(PACE_SECONDS, CALM * (time.thread_time() - began))
            told = bool(maps) or self._published
            self._pulse, self._published = pulse, bool(maps)
            return told

    def own(self) -> tuple[AllocatorMap, ...]:
        """The maps of this process as they are now, bounded in size; the same objects while nothing changes."""
        pulse = self._probe.pulse()
        if pulse != self._drawn[0]:
            me, wall = self._ledger.owner.id, self._wall()
            self._drawn = (
                pulse,
                bounded([replace(one, owner=me, wall=wall) for one in self._probe.maps()]),
            )
        return self._drawn[1]

    def all(self, book: Book) -> tuple[AllocatorMap, ...]:
        """The maps of every owner in the book, this process's as they are now; in the book's order."""
        told = self._ledger.maps() | {self._ledger.owner.id: self.own()}
        return tuple(
            one
            for id in dict.fromkeys([*book.sections, self._ledger.owner.id])
            for one in told.get(id, ())
        )
