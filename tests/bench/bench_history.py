"""Measures the time to read a day of history, and the size on disk.

There are eight devices with 25 leases each. A moment of each device is written every two seconds, and old moments are
thinned out, as by the recorder. The journal is full. The moments are read as for a chart of 600 points.
"""

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from gpu_runtime.facts import Event, Level, Moment
from gpu_runtime.telemetry.journal import KEPT, Journal
from gpu_runtime.telemetry.recorder import DAY, Record
from gpu_runtime.units import GIB

from .results import Row
from .timing import medians

DEVICES, LEASES, ROUNDS = 8, 25, 15


def rows() -> Iterator[Row]:
    because = "it needs 14.0 GiB; cuda:0 has 21.6 GiB free and would keep 7.6."
    with tempfile.TemporaryDirectory(prefix="bench-history-") as place:
        record, journal = Record(Path(place) / "history.db"), Journal(Path(place) / "journal.db")
        now = time.time()
        for part in range(24 * 6):
            began = now - DAY + 600 * part
            record.append(_moments(began))
            record.thin(began + 600)
        journal.append(
            Event(n, now - DAY + n * DAY / KEPT, f"m{n % 200}", "granted", "request", because)
            for n in range(KEPT)
        )
        spans = [
            partial(record.between, now - seconds, now, 599) for seconds in (DAY, 7200, 15 * 60)
        ]
        events = partial(journal.tail, since=now - DAY)
        assert all(read() for read in (*spans, events))
        *moments, tail = medians(ROUNDS, *spans, events, clock=time.thread_time)
        on_disk = record.path.stat().st_size / 2**20
    slowest = (max(moments) + tail) * 1e3
    yield Row(
        f"a day of history, {DEVICES} devices with {LEASES} leases each and 10,000 events, read for a chart of "
        "600 points", f"{slowest:.0f} ms ({on_disk:.0f} MiB on disk)", "≤ 100 ms", slowest <= 100
    )  # fmt: skip


def _moments(began: float) -> list[Moment]:
    claims = [
        {f"model-{n}-{m}@{4000 + m}": (m + 1) * GIB for m in range(LEASES)} for n in range(DEVICES)
    ]
    return [
        Moment(
            began + second, f"cuda:{n}", 80 * GIB, 72 * GIB, 40 * GIB + second * 2**20, Level.LOW, 37.0, 61.0, 250.0,
            claims[n],
        )
        for second in range(0, 600, 2)
        for n in range(DEVICES)
    ]  # fmt: skip
