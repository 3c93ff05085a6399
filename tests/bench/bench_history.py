"""Measures the time to read a day of history, and the size on disk.

There are eight devices with 25 leases each. A moment of each device is written every two seconds, and old moments are
thinned out, as by the recorder. The journal is full. The moments are read as for a chart of 600 points.
"""

import statistics
import tempfile
import time
from pathlib import Path

from gpu_runtime.facts import Event, Level, Moment
from gpu_runtime.telemetry.journal import KEPT, Journal
from gpu_runtime.telemetry.timeline import DAY, Record
from gpu_runtime.units import GIB

DEVICES, LEASES, ROUNDS = 8, 25, 15


def figures() -> dict[str, float]:
    """The median processor time of one read in milliseconds, and the size on disk in MiB."""
    with tempfile.TemporaryDirectory(prefix="bench-history-") as place:
        record, journal, now = (
            Record(Path(place) / "history.db"),
            Journal(Path(place) / "journal.db"),
            time.time(),
        )
        for part in range(24 * 6):
            began = now - DAY + 600 * part
            record.append(_moments(began))
            record.thin(began + 600)
        journal.append(
            Event(
                n,
                now - DAY + n * DAY / KEPT,
                f"m{n % 200}",
                "granted",
                "request",
                "it needs 14.0 GiB; cuda:0 has 21.6 GiB free and would keep 7.6.",
            )
            for n in range(KEPT)
        )
        taken = {
            f"history, {name}": _median(lambda since=now - seconds: record.between(since, now, 599))
            for name, seconds in (("24 h", DAY), ("2 h", 7200), ("15 min", 900))
        }
        taken["events, 10,000"] = _median(lambda: journal.tail(since=now - DAY))
        taken["MiB on disk"] = record.path.stat().st_size / 2**20
        return taken


def _moments(began: float) -> list[Moment]:
    rows = []
    for second in range(0, 600, 2):
        for n in range(DEVICES):
            claims = {f"model-{n}-{m}@{4000 + m}": (m + 1) * GIB for m in range(LEASES)}
            rows.append(
                Moment(
                    began + second,
                    f"cuda:{n}",
                    80 * GIB,
                    72 * GIB,
                    40 * GIB + second * 2**20,
                    Level.LOW,
                    37.0,
                    61.0,
                    250.0,
                    claims,
                )
            )
    return rows


def _median(read: object) -> float:
    taken = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        assert read()  # type: ignore[operator]
        taken.append(1e3 * (time.thread_time() - began))
    return statistics.median(taken)
