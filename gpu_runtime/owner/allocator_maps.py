"""The maps of the allocators, which list their blocks: published by each owner beside the book, and read by all.

Making a map of thousands of blocks takes milliseconds in which the notebook's code cannot run. So maps are published
only after a change, and for at most 1 % of the time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from msgspec.structs import replace

from ..devices.allocators import bounded
from ..devices.probe import Probe
from ..facts import AllocatorMap, Book
from ..ledgers.base import Ledger

log = logging.getLogger("gpu_runtime")

PACE_SECONDS = 2.0  # shortest time between two maps
CALM = 100  # a pause lasts this many times the processor time that the last publication took


class Maps:
    """Publishes the maps of one owner, and reads the maps of all owners. Thread-safe."""

    def __init__(
        self, ledger: Ledger, probe: Probe, *, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        """`clock` returns seconds of CLOCK_BOOTTIME, `wall` epoch seconds."""
        self._ledger = ledger
        self._probe = probe
        self._clock = clock
        self._wall = wall
        # A pulse is a value that changes when the maps change.
        self._pulse: object = None  # the probe's pulse when the maps were last published
        self._drawn_at: object = None  # the probe's pulse when the maps were last made
        self._drawn: tuple[AllocatorMap, ...] = ()
        self._published = False  # an owner whose allocators were never used publishes nothing
        self._rest_until = float("-inf")
        self._lock = threading.RLock()

    def publish(self, *, at_once: bool = False) -> bool:
        """Publishes the maps if they have changed. Returns whether the maps were published.

        Nothing is published during the pause after the last publication; `at_once` ignores the
        pause.
        """
        with self._lock:
            now = self._clock()
            if now < self._rest_until and not at_once:
                return False
            pulse = self._probe.pulse()
            if pulse == self._pulse:
                return False
            began = time.thread_time()
            maps = self.own()
            due = bool(maps) or self._published
            if due:
                try:
                    self._ledger.publish_maps(maps)
                except OSError as error:  # the disk is full: others see the last maps
                    log.debug("the allocators' maps could not be published: %s", error)
                    return False
                finally:
                    drawing_seconds = time.thread_time() - began
                    self._rest_until = now + max(PACE_SECONDS, CALM * drawing_seconds)
            self._pulse, self._published = pulse, bool(maps)
            return due

    def own(self) -> tuple[AllocatorMap, ...]:
        """The maps of this process as they are now, bounded in size.

        Returns the same objects as the last call while the allocators do not change.
        """
        pulse = self._probe.pulse()
        if pulse != self._drawn_at:
            me, wall = self._ledger.owner.id, self._wall()
            maps = [replace(map, owner=me, wall=wall) for map in self._probe.maps()]
            self._drawn = bounded(maps)
            self._drawn_at = pulse
        return self._drawn

    def all(self, book: Book) -> tuple[AllocatorMap, ...]:
        """The maps of every owner in the book, in the book's order.

        The maps of this process are made now. The maps of each other owner are those that the owner
        published last.
        """
        me = self._ledger.owner.id
        published = self._ledger.maps() | {me: self.own()}
        owners = dict.fromkeys([*book.sections, me])
        return tuple(map for id in owners for map in published.get(id, ()))
