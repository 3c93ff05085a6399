"""Measures the time to read a day of history, and the size on disk; and what the account of hours takes.

There are eight devices with 25 leases each. A moment of each device is written every two seconds, and old moments are
thinned out, as by the recorder. The journal is full. The moments are read as for a chart of 600 points.
"""

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from gpu_runtime.facts import Event, Level, Moment, Section
from gpu_runtime.scheduler.capacity import views
from gpu_runtime.telemetry.hours import Account, Hours, held_now
from gpu_runtime.telemetry.journal import KEPT, Journal
from gpu_runtime.telemetry.recorder import DAY, Record
from gpu_runtime.units import GIB
from tests.worlds import book, lease, owner, ticket, world

from .results import Row
from .timing import medians

DEVICES, LEASES, ROUNDS, KERNELS = 8, 25, 15, 64


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
    yield _account(time.time())


def _account(now: float) -> Row:
    """The row of what the helper adds to the account: a look every two seconds, and a write every minute."""
    page = book()
    for number in range(1, KERNELS + 1):
        of = replace(owner(number), user=f"user{number % 20}", notebook=f"/home/{number}.ipynb")
        own = replace(lease("kernel", by=number, **{f"sim{number % 8}": 6}), kind="kernel")
        away = lease("m", by=number, host=4)
        section = Section(of, leases=(own, away), residue={f"sim:{number % 8}": GIB})
        page = page.with_section(section)
    tickets = tuple(ticket("big", by=number, sim0=30) for number in range(1, 9))
    page = replace(page, tickets=tickets)
    seen = views(page, world(host=512, **{f"sim{n}": 80 for n in range(8)}))
    with tempfile.TemporaryDirectory(prefix="bench-hours-") as place:
        account, file = Account(), Hours(Path(place) / "hours.db")
        for second in (0, 8):
            account.look(held_now(page, seen), second, now)
        rows = account.rows()
        for past in range(48):  # two days of minutes are there already
            minutes = range(int(now) - 3600 * (past + 1), int(now) - 3600 * past, 60)
            file.add((row._replace(start=start) for start in minutes for row in rows), now)
        looks = iter(range(10**9))
        [look, write] = medians(
            ROUNDS,
            lambda: account.look(held_now(page, seen), 2.0 * next(looks), now),
            lambda: file.add(rows, now),
            clock=time.thread_time,
        )
        on_disk = file.path.stat().st_size / 2**20
    part = 100 * (look / 2 + write / 60)
    return Row(
        f"the account of hours, {KERNELS} kernels of 20 users, of one processor's time",
        f"{part:.3f} % (a look {look * 1e3:.2f} ms, a write {write * 1e3:.1f} ms, two days {on_disk:.0f} MiB)",
        "≤ 0.1 %", part <= 0.1,
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
