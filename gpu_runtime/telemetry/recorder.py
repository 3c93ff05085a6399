"""Writes down how the devices are used, while anybody shares the ledger and whether or not anybody looks.

It lives in the host's helper process (`sampler.py`), which is one for each ledger. It only looks at the book
(`peek.py`). Nothing stands on it: what it cannot read or write it leaves out.
"""

from __future__ import annotations

import time
from pathlib import Path

from ..devices.sampler_client import Figures, boot_seconds
from ..facts import Book, Moment, Sample, World
from ..ledgers.access import journal_in
from ..ledgers.reader import Peek, peek
from ..scheduler.pressure import views
from .moments import Telling, moments_of
from .timeline import Record

EVERY_SECONDS = 2.0
REST_SECONDS = 30.0  # while nothing changes
WRITE_SECONDS = 5.0
THIN_SECONDS = 60.0
MOST_UNWRITTEN = 5_000  # where the file cannot be written for long


def record_in(directory: Path) -> Record:
    """The history of the ledger whose books of this boot lie in that directory; it outlives the boot."""
    return Record(journal_in(directory.parent).with_name("history.db"))


class Recorder:
    """Looks every two seconds, keeps what changed, writes every five."""

    def __init__(self, directory: Path, url: str) -> None:
        self._directory, self._url = directory, url
        self._record = record_in(directory)
        self._telling = Telling(REST_SECONDS)
        self._unwritten: list[Moment] = []
        self._written_at = self._thinned_at = float("-inf")
        self._book: Peek | None = None

    def turn(self, figures: Figures) -> None:
        """One look at the book and the devices."""
        if self._book is None:
            self._book = peek(self._url, self._directory)
        book = self._book.look()
        if book is None:
            return
        now = boot_seconds()
        self._unwritten += self._telling.worth(now_of(book, figures, now, time.time()))
        del self._unwritten[:-MOST_UNWRITTEN]
        if now - self._written_at >= WRITE_SECONDS:
            self._written_at = now
            self.flush()
        if now - self._thinned_at >= THIN_SECONDS:
            self._thinned_at = now
            self._record.thin(time.time())

    def flush(self) -> None:
        if self._unwritten and self._record.append(self._unwritten):
            self._unwritten.clear()


def now_of(book: Book, figures: Figures, now: float, wall: float) -> tuple[Moment, ...]:
    """A moment of each device of the book; of real ones as they were measured."""
    devices = tuple(device for device in book.devices if device.id in book.limits)
    samples: dict[str, Sample] = {}
    for device in devices:
        sample = None if device.simulated else figures.of(device)
        if sample is not None:
            samples[device.id] = sample
    world = World(now, wall, devices, book.limits, samples)
    return moments_of(views(book, world), book.sections.values(), wall)
