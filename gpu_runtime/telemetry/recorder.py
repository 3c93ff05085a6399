"""Records how the devices are used, while any process shares the ledger.

The recorder runs in the helper process (`sampler.py`). Each ledger has one helper process. The
recorder reads the book (the ledger's leases and requests) without being an owner in the book
(`ledgers/reader.py`). Nothing depends on the recorder. If it cannot read or write, the history has
a gap.
"""

from __future__ import annotations

import time
from pathlib import Path

from ..devices.sampler_client import Figures, boot_seconds
from ..facts import Book, Moment, Sample, World
from ..ledgers.access import state_in
from ..ledgers.reader import Peek, peek
from ..scheduler.capacity import views
from .moments import ChangeFilter, moments_of
from .timeline import Record

EVERY_SECONDS = 2.0
REST_SECONDS = 30.0  # between two records while nothing changes
WRITE_SECONDS = 5.0
THIN_SECONDS = 60.0
MOST_UNWRITTEN = 5_000  # moments that are held while the file cannot be written


def record_in(directory: Path) -> Record:
    """The history of the ledger whose files of this boot are in `directory`. The history survives a
    reboot.
    """
    return Record(state_in(directory.parent) / "history.db")


class Recorder:
    """Reads the book every two seconds, selects changed moments, and writes every five seconds."""

    def __init__(self, directory: Path, url: str) -> None:
        """`directory` has the ledger's files of this boot, and `url` is the ledger's address."""
        self._directory, self._url = directory, url
        self._record = record_in(directory)
        self._changes = ChangeFilter(REST_SECONDS)
        self._unwritten: list[Moment] = []
        self._written_at = self._thinned_at = float("-inf")
        self._book: Peek | None = None

    def turn(self, figures: Figures) -> None:
        """Records the book and the measured `figures`, and writes if it is time. Raises GpuError."""
        if self._book is None:
            self._book = peek(self._url, self._directory)
        book = self._book.look()
        if book is None:
            return
        now = boot_seconds()
        self._unwritten += self._changes.select(now_of(book, figures, now, time.time()))
        del self._unwritten[:-MOST_UNWRITTEN]
        if now - self._written_at >= WRITE_SECONDS:
            self._written_at = now
            self.flush()
        if now - self._thinned_at >= THIN_SECONDS:
            self._thinned_at = now
            self._record.thin(time.time())

    def flush(self) -> None:
        """Writes the moments that are not written yet. If this fails, these moments are kept for a
        later call.
        """
        if self._unwritten and self._record.append(self._unwritten):
            self._unwritten.clear()


def now_of(book: Book, figures: Figures, now: float, wall: float) -> tuple[Moment, ...]:
    """A moment of each device of `book` that has a limit, at the time `now`.

    `now` is in seconds since the boot, and `wall` is the same time in epoch seconds. The measured
    `figures` are used only for real devices.
    """
    devices = tuple(device for device in book.devices if device.id in book.limits)
    samples: dict[str, Sample] = {}
    for device in devices:
        sample = None if device.simulated else figures.of(device)
        if sample is not None:
            samples[device.id] = sample
    world = World(now, wall, devices, book.limits, samples)
    return moments_of(views(book, world), book.sections.values(), wall)
