"""The history of the devices: how it is recorded, and kept on disk for a day.

A moment has the figures of one device at one time: its used bytes, its budget, and the leases'
claims on the device. The recorder runs in the helper process (`sampler.py`). Each ledger has one
helper process. The recorder reads the book (the ledger's leases and requests) without being an owner
in the book (`ledgers/reader.py`).

The history is one SQLite table in the directory of the journal, with a row for each device and
moment. The helper process writes the table, and other processes read the table. Nothing depends on
the table, or on the recorder. If it cannot read or write, the history has a gap.

The fullest of several moments is the moment with the most memory in use. After half an hour, only
the fullest moment of every 15 s is kept, and after three hours the fullest moment of every minute.
After a day, no moment is kept. Only recorded moments are returned; no figure is an average.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ..devices.sampler_client import Figures, boot_seconds
from ..facts import Book, DeviceView, Moment, Sample, Section, World
from ..ledgers.access import state_in
from ..ledgers.reader import Peek, peek
from ..scheduler.capacity import views
from .hours import Account, StateFile, held_now, hours_in, requests_now
from .journal import decoded

# -- moments ---------------------------------------------------------------------------------------


def moments_of(
    views: Iterable[DeviceView], sections: Iterable[Section], wall: float
) -> tuple[Moment, ...]:
    """A moment of each device in `views` at the time `wall`, with the bytes of the leases there, or on their way there.

    A copy in RAM of a model on a card is left out: the timeline would show the model in both places. Bytes on a disk
    are on no device.
    """
    claims: dict[str, dict[str, int]] = {}
    for section in sections:
        for lease in section.leases:
            label = f"{lease.name}@{section.owner.pid}"
            for share in (*lease.placed, *lease.target):
                on_device = claims.setdefault(share.device, {})
                on_device[label] = on_device.get(label, 0) + share.bytes
    return tuple(_moment(view, claims.get(view.device.id, {}), wall) for view in views)


def _moment(view: DeviceView, claims: dict[str, int], wall: float) -> Moment:
    device, sample = view.device, view.sample
    return Moment(
        wall,
        device.id,
        device.total_bytes,
        view.limit_bytes,
        view.measured_bytes,
        view.level,
        utilisation_percent=sample.utilisation_percent if sample else None,
        temperature_celsius=sample.temperature_celsius if sample else None,
        power_watts=sample.power_watts if sample else None,
        claims=claims,
    )


def alike(moment: Moment, other: Moment) -> bool:
    """Whether `moment` and `other` look the same in a chart.

    Two moments look the same if their total, limit, level and claims are equal, and the measured
    figures differ only by noise.
    """
    exact = ("total_bytes", "limit_bytes", "level", "claims")  # even a small change is recorded
    return (
        all(getattr(moment, name) == getattr(other, name) for name in exact)
        and _near(moment.measured_bytes, other.measured_bytes, moment.total_bytes / 400)
        and _near(moment.utilisation_percent, other.utilisation_percent, 5.0)
        and _near(moment.temperature_celsius, other.temperature_celsius, 2.0)
        and _near(moment.power_watts, other.power_watts, 10.0)
    )


def _near(figure: float | None, other: float | None, tolerance: float) -> bool:
    if figure is None or other is None:
        return figure is other
    return abs(figure - other) <= tolerance


class ChangeFilter:
    """Selects the moments to record: every changed moment, and now and then an unchanged moment.

    A moment is changed if it differs from the last recorded moment of its device. The last
    unchanged moment before a change is recorded too. Without this unchanged moment, the chart would
    draw a slope where there was a step.
    """

    def __init__(self, rest_seconds: float) -> None:
        """While nothing changes, one moment of each device is recorded every `rest_seconds`."""
        self._rest_seconds = rest_seconds
        self._kept: dict[str, Moment] = {}  # by device
        self._skipped: dict[str, Moment] = {}  # the last moment that was not kept, by device

    def select(self, moments: Iterable[Moment]) -> list[Moment]:
        """The moments to record, in order. Some of them may be moments that an earlier call skipped."""
        rows: list[Moment] = []
        for moment in moments:
            kept = self._kept.get(moment.device)
            skipped = self._skipped.pop(moment.device, None)
            # A clock that was put back would else stop the record until it is where it was.
            is_old = kept is None or abs(moment.wall - kept.wall) >= self._rest_seconds
            if kept is not None and not is_old and alike(kept, moment):
                self._skipped[moment.device] = moment
                continue
            if skipped is not None and not alike(skipped, moment):
                rows.append(skipped)
            rows.append(moment)
            self._kept[moment.device] = moment
        return rows


# -- the history on disk ---------------------------------------------------------------------------


DAY = 86400.0
# (age, stretch) in seconds. Of the moments older than `age`, one of each `stretch` is kept.
THINNED = ((1800.0, 15.0), (10800.0, 60.0))
AHEAD_SECONDS = 60.0  # a moment later than now + this was written while the clock was wrong

log = logging.getLogger("gpu_runtime")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Moment).decode
_Row = tuple[float, str, int, bytes]  # wall time, device, peak bytes, encoded moment

# Selects the rowid of the fullest moment for each device and stretch of time. With max(), SQLite
# takes the other columns from the row that has the maximum.
_FULLEST = """SELECT id FROM (SELECT rowid AS id, max(peak) FROM moments WHERE wall >= ? AND wall < ?
    GROUP BY device, CAST(wall / ? AS INTEGER))"""


class Record(StateFile):
    """The history of a day."""

    what = "history"

    def append(self, moments: Iterable[Moment]) -> bool:
        """Writes `moments`, and returns whether this succeeded."""
        rows = [(point.wall, point.device, point.peak_bytes, _encode(point)) for point in moments]

        def insert(db: sqlite3.Connection) -> None:
            db.execute(
                "CREATE TABLE IF NOT EXISTS moments(wall REAL, device TEXT, peak INTEGER, body BLOB)"
            )
            db.execute("CREATE INDEX IF NOT EXISTS moments_of ON moments(device, wall, peak)")
            db.executemany(
                "INSERT INTO moments(wall, device, peak, body) VALUES (?, ?, ?, ?)", rows
            )

        return self.write(insert)

    def thin(self, now: float, steady: float | None = None) -> None:
        """Removes moments that are too old at the wall time `now`, or too many for their age.

        `steady` is an earlier time, from which the age is counted while the clock may be ahead.
        """
        old_at = now if steady is None else steady

        def delete(db: sqlite3.Connection) -> None:
            edges = (old_at - DAY, now + AHEAD_SECONDS)
            db.execute("DELETE FROM moments WHERE wall < ? OR wall > ?", edges)
            for age, stretch in THINNED:
                edge = (old_at - age) // stretch * stretch  # only complete stretches, each once
                db.execute(
                    f"DELETE FROM moments WHERE wall < ? AND rowid NOT IN ({_FULLEST})",
                    (edge, 0.0, edge, stretch),
                )

        if self.path.exists():
            self.write(delete)

    def between(self, since: float, until: float, most: int) -> tuple[Moment, ...]:
        """At most `most` moments of each device from the wall time `since` to `until`, in order.

        The period is divided into stretches of time, and the fullest moment of each stretch is
        returned. The ends of the stretches are at fixed times, so a chart that is redrawn for a
        later period does not flicker.
        """
        # Stretches begin at multiples of their length, so the period can overlap one stretch more
        # than its length suggests. With `most` = 1, one stretch covers all time.
        stretch = max((until - since) / (most - 1), 1e-3) if most > 1 else 1e18
        if most < 1:
            return ()
        query = f"SELECT body FROM moments WHERE rowid IN ({_FULLEST}) ORDER BY wall, rowid"
        return tuple(decoded(_decode, self.read(query, (since, until, stretch))))


# -- the recorder ----------------------------------------------------------------------------------


EVERY_SECONDS = 2.0
REST_SECONDS = 30.0  # between two records while nothing changes
WRITE_SECONDS = 5.0
THIN_SECONDS = 60.0
MOST_UNWRITTEN = 5_000  # moments that are held while the file cannot be written


def record_in(directory: Path) -> Record:
    """The history of the ledger whose files of this boot are in `directory`. It survives a reboot."""
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
        self._account, self._hours = Account(), hours_in(directory)
        self._began = time.time() - boot_seconds()  # the wall time of the boot, as of now

    def look(self, figures: Figures) -> None:
        """Records the book and the measured `figures`, and writes if it is time. Raises GpuError."""
        if self._book is None:
            self._book = peek(self._url, self._directory)
        book = self._book.look()
        if book is None:
            return
        now, wall = boot_seconds(), time.time()
        seen = views_of(book, figures, now, wall)
        self._unwritten += self._changes.select(moments_of(seen, book.sections.values(), wall))
        held = held_now(book, seen, figures.programs)
        self._account.look(held, now, wall, requests_now(book))
        del self._unwritten[:-MOST_UNWRITTEN]
        if now - self._written_at >= WRITE_SECONDS:
            self._written_at = now
            self.flush()
        if now - self._thinned_at >= THIN_SECONDS:
            self._thinned_at = now
            steady = self._steady(wall)
            self._record.thin(wall, steady)
            self._add_hours(steady)

    def _steady(self, wall: float) -> float:
        """The wall time from which the age of records is counted: `wall`, unless the clock has jumped ahead.

        So a clock that is years ahead for a minute removes nothing.
        """
        return min(wall, self._began + boot_seconds())

    def _add_hours(self, steady: float) -> None:
        rows = self._account.rows()
        if rows:
            self._account.forget(rows if self._hours.add(rows, steady) else ())

    def flush(self) -> None:
        """Writes the moments that are not written yet. If this fails, they are kept for a later call."""
        if self._unwritten and self._record.append(self._unwritten):
            self._unwritten.clear()

    def end(self) -> None:
        """Writes everything."""
        self.flush()
        self._add_hours(self._steady(time.time()))


def views_of(book: Book, figures: Figures, now: float, wall: float) -> tuple[DeviceView, ...]:
    """Each device of `book` that has a limit, at the time `now`.

    `now` is in seconds since the boot, and `wall` is the same time in epoch seconds. The measured
    `figures` are used only for real devices.
    """
    devices = tuple(device for device in book.devices if device.id in book.limits)
    samples: dict[str, Sample] = {}
    for device in devices:
        sample = None if device.simulated else figures.of(device)
        if sample is not None:
            samples[device.id] = sample
    return views(book, World(now, wall, devices, book.limits, samples))
