"""Hours: who used the cards, who held them idle, who waited, and what parking has saved.

The recorder (`recorder.py`) looks at the book every two seconds. What it saw holds until its next look. So each byte of
a card is in exactly one state at each moment, and for each card, over any time that was recorded:

    in use + idle + idle while another waited + outside + free = capacity × time

- in use: its model has a user, its cell runs, it arrives, or it is memory for a block of code
- idle: leased, or held beside leases (CUDA context, cache), and not in use
- idle while another waited: the same, while a request of another process waited for this card
- outside: in use without a lease, by program and user where the driver tells
- parked, on disk: in RAM or in a file, because it has left a card; it counts on no card
- waited: the bytes for which a request waited
- saved: bytes on cards that were in use and for which there would have been no room, had the parked owners kept theirs:
  the smaller of the bytes in use by others, and of the parked bytes less what was free

Times in which nobody recorded, such as a reboot, are in no sum. The file has a row for each minute of the last two
days, for each hour of the last 90 days, and for each day of three years. A crash loses the last minute at most.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from .. import threads
from ..facts import DISK, HOST, KERNEL, Book, DeviceView, Lease, Phase, Section
from ..files import make_directory
from ..ledgers.access import access_to, state_in
from ..units import GIB, show_seconds
from .journal import (
    SQLITE_CORRUPT,
    SQLITE_ERROR,
    SQLITE_INTERRUPT,
    SQLITE_NOTADB,
    limit_steps,
    limit_values,
    opened,
    sqlite_code,
)

# -- a SQLite file that outlives a boot: the history, and the account of hours

log = logging.getLogger("gpu_runtime")


MOST_STEPS = 200_000_000  # of one call; a report over three years of 100 notebooks takes 24 million
_DAMAGES = (SQLITE_CORRUPT, SQLITE_NOTADB, SQLITE_ERROR, SQLITE_INTERRUPT)


class StateFile:
    """One SQLite file of the helper's, which outlives a boot. Every call opens the file again.

    For readers, a file that is damaged or is another kind of file is empty. The writer renames such a
    file, and begins a new one.
    """

    what = "file"  # its name in warnings
    most_row_bytes = 1 << 20

    def __init__(self, path: Path) -> None:
        """The file `path`. The first write creates it."""
        self.path = path
        self._warned = False
        self._lock = threads.awaited(threading.RLock())

    def write(self, act: Callable[[sqlite3.Connection], object]) -> bool:
        """Calls `act` in one transaction, and returns whether this succeeded.

        A failure is logged once. The caller may write the same again later.
        """
        try:
            try:
                self._write(act)
            except sqlite3.Error as error:
                # Else the file is damaged or is no history: another attempt would fail too.
                if sqlite_code(error) not in _DAMAGES:
                    raise
                self._set_aside(error)
                self._write(act)
        except (sqlite3.Error, OSError) as error:
            self._warn("written", error)
            return False
        return True

    def _write(self, act: Callable[[sqlite3.Connection], object]) -> None:
        if not self.path.exists():
            make_directory(self.path.parent)
            access_to(self.path.parent).make_file(self.path)
        with self._lock, contextlib.closing(self._connect()) as db:
            db.execute("PRAGMA journal_mode=TRUNCATE")
            act(db)
            db.commit()

    def read(self, query: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        """The rows of the `query`; none if the file cannot be read."""
        try:
            if not self.path.exists():
                return []
            with self._lock, contextlib.closing(self._connect()) as db:
                return db.execute(query, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            self._warn("read", error)
            return []

    def _set_aside(self, error: sqlite3.Error) -> None:
        log.warning(
            "the %s %s cannot be used (%s); it is set aside, and a new one is started",
            self.what,
            self.path,
            error,
        )
        os.replace(self.path, self.path.with_name(f"{self.path.name}.damaged"))
        self.path.with_name(f"{self.path.name}-journal").unlink(missing_ok=True)

    def _connect(self) -> sqlite3.Connection:
        db = opened(self.path)
        # Another user of the ledger may have put anything into the file.
        limit_values(db, self.most_row_bytes)
        limit_steps(db, MOST_STEPS)
        return db

    def _warn(self, what: str, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("the %s %s cannot be %s now (%s)", self.what, self.path, what, error)


IN_USE, IDLE, BLOCKING, OUTSIDE, FREE = (
    "in use",
    "idle",
    "idle while another waited",
    "outside",
    "free",
)
PARKED, ON_DISK, WAITED, WAITED_FOR, SAVED = ("parked", "on disk", "waited", "waited for", "saved")
OF_CARD_HOURS = (IN_USE, IDLE, BLOCKING, OUTSIDE)  # what a user has of a card, also without a lease
ON_CARD = (*OF_CARD_HOURS, FREE)  # the states that fill a card

MINUTE, HOUR, DAY = 60, 3600, 86400
# (stretch, age) in seconds: rows of this stretch are added up into the next one when they are older than the age.
KEPT = ((MINUTE, 2 * DAY), (HOUR, 90 * DAY), (DAY, 3 * 365 * DAY))
GAP_SECONDS = 10.0  # after a longer pause nobody knows what was held meanwhile
OWN_CODE = "its own code"
FILE = "hours.db"
MOST_UNWRITTEN = 20_000  # rows that are held while the file cannot be written


class Key(NamedTuple):
    """Whose bytes they are, where, and in which state."""

    user: str
    notebook: str  # the path of the notebook, or the program's command
    name: str  # of the model; "waited for": the user who held the card
    device: str
    state: str


class Hour(NamedTuple):
    """A row of the account: the bytes of one key, times the seconds, in one stretch of time."""

    start: int  # epoch seconds
    key: Key
    byte_seconds: float
    seconds: float


# -- what is held at one moment ------------------------------------------------------------------------------------


Programs = Mapping[int, tuple[str, str]]  # pid -> user and command of those that are known


def held_now(
    book: Book, views: Sequence[DeviceView], programs: Programs = MappingProxyType({})
) -> dict[Key, int]:
    """The bytes of each key now. `views` are the devices of the `book`; `programs` names those without a lease."""
    held: dict[Key, int] = defaultdict(int)
    cards = {view.device.id: view for view in views if not view.device.is_host}
    waiting: dict[str, set[str]] = defaultdict(set)  # card -> owners that wait for it
    for ticket in book.tickets:
        if ticket.verb == "use":
            for share in ticket.need:
                waiting[share.device].add(ticket.owner)
    for section in book.sections.values():
        _add_section(held, section, waiting, cards.keys())
    _add_waits(held, book, cards.keys())
    on_cards: dict[str, int] = defaultdict(int)
    for key, size in held.items():
        if key.state in ON_CARD:
            on_cards[key.device] += size
    for id, view in cards.items():
        _add_rest(held, view, on_cards[id], book, programs)
    _add_saved(held)
    return dict(held)


def _add_section(
    held: dict[Key, int], section: Section, waiting: Mapping[str, set[str]], cards: Iterable[str]
) -> None:
    owner = section.owner
    idle = {id: BLOCKING if waiting[id] - {owner.id} else IDLE for id in cards}
    for lease in section.leases:
        busy = _is_busy(lease, section)
        for share in (*lease.shares, *lease.target):
            if share.device in idle:
                state = IN_USE if busy else idle[share.device]
                held[Key(owner.user, owner.notebook, lease.name, share.device, state)] += (
                    share.bytes
                )
        away = {(HOST, PARKED): lease.ram_bytes, (DISK, ON_DISK): lease.disk_bytes}
        for place, size in away.items():
            if size:
                held[Key(owner.user, owner.notebook, lease.name, *place)] += size
    for id, size in section.residue.items():
        if id in idle:
            state = IN_USE if section.busy_since else idle[id]
            held[Key(owner.user, owner.notebook, KERNEL, id, state)] += size


def _is_busy(lease: Lease, section: Section) -> bool:
    own_code_runs = lease.kind == KERNEL and section.busy_since
    return bool(
        lease.pins or own_code_runs or lease.kind == "block" or lease.phase is Phase.ARRIVING
    )


def _waiting(book: Book) -> Iterator[tuple[Key, int, float]]:
    """For each request and device of its need: the key, the bytes, and the part of the request that waits there."""
    for ticket in book.tickets:
        owner = book.owner(ticket.owner)
        if ticket.verb != "use" or owner is None:
            continue
        for share in ticket.need:
            key = Key(owner.user, owner.notebook, ticket.name, share.device, WAITED)
            yield key, share.bytes, 1 / len(ticket.need)


def requests_now(book: Book) -> dict[Key, float]:
    """The number of requests that wait with each key. A request for two cards counts half on each."""
    found: dict[Key, float] = defaultdict(float)
    for key, _, part in _waiting(book):
        found[key] += part
    return dict(found)


def _add_waits(held: dict[Key, int], book: Book, cards: Iterable[str]) -> None:
    """What each request waits for, divided among the users who hold its card, in proportion to their bytes."""
    users: dict[str, dict[str, int]] = {id: defaultdict(int) for id in cards}
    for key, size in held.items():
        if size and key.device in users:
            users[key.device][key.user] += size
    for who, need, _ in _waiting(book):
        held[who] += need
        others = users.get(who.device, {})
        total = sum(others.values())
        for user, size in others.items():
            held[who._replace(name=user, state=WAITED_FOR)] += need * size // total


def _add_saved(held: dict[Key, int]) -> None:
    parked: dict[Key, int] = defaultdict(int)
    for key, size in held.items():
        if key.state in (PARKED, ON_DISK):
            parked[key._replace(name="", device="", state=SAVED)] += size
    owners = {key[:2] for key in parked}
    used = sum(size for key, size in held.items() if key.state == IN_USE and key[:2] not in owners)
    free = sum(size for key, size in held.items() if key.state == FREE)
    total = sum(parked.values())
    saved = max(0, min(used, total - free))
    for key, size in parked.items():
        held[key] = saved * size // total


def _add_rest(
    held: dict[Key, int], view: DeviceView, leased: int, book: Book, programs: Programs
) -> None:
    """Adds what is in use without a lease on the card of `view`, and what is free."""
    id, total = view.device.id, view.device.total_bytes
    used = max(view.measured_bytes or 0, view.claimed_bytes)
    outside = min(max(0, used - leased), max(0, total - leased))
    held[Key("", "", "", id, FREE)] = max(0, total - leased - outside)
    known = {
        pid for section in book.sections.values() for pid in (section.owner.pid, *section.engines)
    }
    processes = view.sample.processes if view.sample else {}
    for pid, size in processes.items():
        if pid in known or not size or (who := programs.get(pid)) is None:
            continue
        part = min(size, outside)
        held[Key(*who, "", id, OUTSIDE)] += part
        outside -= part
    if outside:
        held[Key("", "", "", id, OUTSIDE)] += outside


# -- the sums ------------------------------------------------------------------------------------------------------


class Account:
    """Adds up what was held, minute by minute. What one look has seen holds until the next look."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, Key], tuple[float, float]] = {}
        self._seen: dict[Key, int] = {}
        self._requests: Mapping[Key, float] = {}
        self._seen_at = float("-inf")

    def look(
        self,
        held: dict[Key, int],
        now: float,
        wall: float,
        requests: Mapping[Key, float] = MappingProxyType({}),
    ) -> None:
        """Adds what was seen last until `now`, a time of a clock that never jumps; `wall` is in epoch seconds.

        Two of the `requests` with one key wait twice as long as one; see `requests_now`.
        """
        seconds = now - self._seen_at
        if 0 < seconds <= GAP_SECONDS:
            start = int((wall - seconds) // MINUTE * MINUTE)
            for key, size in self._seen.items():
                byte_seconds, time = self._sums.get((start, key), (0.0, 0.0))
                lasted = seconds * self._requests.get(key, 1.0)
                self._sums[start, key] = byte_seconds + size * seconds, time + lasted
        self._seen, self._requests, self._seen_at = held, requests, now

    def rows(self) -> list[Hour]:
        """The sums of all minutes, also of one that has not ended: what follows is added to its row in the file."""
        return [Hour(start, key, *sums) for (start, key), sums in self._sums.items()]

    def forget(self, rows: Iterable[Hour]) -> None:
        """Removes `rows`, which are written, and the oldest of more than MOST_UNWRITTEN others."""
        for row in rows:
            self._sums.pop((row.start, row.key), None)
        for oldest in sorted(self._sums)[:-MOST_UNWRITTEN]:
            del self._sums[oldest]


_COLUMNS = (
    "stretch INTEGER, start INTEGER, user TEXT, notebook TEXT, name TEXT, device TEXT, state TEXT"
)
_KEY = "stretch, start, user, notebook, name, device, state"
# The key begins with the stretch, so without it each query would read the whole file.
_SINCE = f"stretch IN ({MINUTE}, {HOUR}, {DAY}) AND start >= ?"
# A report of a week that cron types at 07:00:01 has the hour from 07:00.
_NEAREST = (
    f"stretch = {MINUTE} AND start >= ? OR stretch = {HOUR} AND start >= ? - {HOUR // 2} "
    f"OR stretch = {DAY} AND start >= ? - {DAY // 2}"
)
_ADD = f"""ON CONFLICT({_KEY}) DO UPDATE SET
    byte_seconds = byte_seconds + excluded.byte_seconds, seconds = seconds + excluded.seconds"""


class Hours(StateFile):
    """The account of a ledger on disk."""

    what = "account of hours"

    def add(self, rows: Iterable[Hour], now: float) -> bool:
        """Adds the `rows` of minutes, and thins what is old at the wall time `now`. Returns whether this succeeded."""
        values = [(MINUTE, row.start, *row.key, row.byte_seconds, row.seconds) for row in rows]

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                f"CREATE TABLE IF NOT EXISTS hours({_COLUMNS}, byte_seconds REAL, seconds REAL, "
                f"PRIMARY KEY({_KEY})) WITHOUT ROWID"
            )
            db.executemany(f"INSERT INTO hours VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) {_ADD}", values)
            for (stretch, age), (next_stretch, _) in pairwise(KEPT):
                edge = int((now - age) // next_stretch * next_stretch)
                db.execute(
                    f"""INSERT INTO hours SELECT ?, start / ? * ?, user, notebook, name, device, state,
                    sum(byte_seconds), sum(seconds) FROM hours WHERE stretch = ? AND start < ?
                    GROUP BY 2, 3, 4, 5, 6, 7 {_ADD}""",
                    (next_stretch, next_stretch, next_stretch, stretch, edge),
                )
                db.execute("DELETE FROM hours WHERE stretch = ? AND start < ?", (stretch, edge))
            last, age = KEPT[-1]
            db.execute("DELETE FROM hours WHERE stretch = ? AND start < ?", (last, int(now - age)))

        return self.write(write)

    def between(self, since: float, until: float, stretch: int = 0) -> list[Hour]:
        """What began from the wall time `since` to `until`, in `stretch` seconds or in one sum (0).

        Of what is kept as hours or days, the time begins at the boundary that is nearest to `since`.
        """
        began = f"start / {stretch} * {stretch}" if stretch else "min(start)"
        query = f"""SELECT {began}, user, notebook, name, device, state, sum(byte_seconds), sum(seconds)
            FROM hours WHERE ({_NEAREST}) AND start < ? GROUP BY {"1, " if stretch else ""}2, 3, 4, 5, 6"""
        rows = self.read(query, (*[since] * len(KEPT), until))
        return [
            Hour(int(row[0]), Key(*map(str, row[1:6])), float(row[6]), float(row[7]))
            for row in rows
        ]

    def card_hours(
        self,
        user: str,
        now: float,
        seconds: float,
        half_life: float = float("inf"),
    ) -> float:
        """The card-hours that `user` has had in the last `seconds` before the wall time `now`, on all cards.

        What is `half_life` seconds old counts half.
        """
        capacity = _capacity(self.between(now - seconds, now))
        query = f"""SELECT start, device, sum(byte_seconds) FROM hours
            WHERE {_SINCE} AND start <= ? AND user = ? AND state IN (?, ?, ?, ?) GROUP BY 1, 2"""
        # What was written while the clock was ahead would count until then.
        rows = self.read(query, (now - seconds, now, user, *OF_CARD_HOURS))
        return sum(
            float(size) / capacity[str(card)] / HOUR * 0.5 ** ((now - start) / half_life)
            for start, card, size in rows
            if capacity[str(card)]
        )


def hours_in(directory: Path) -> Hours:
    """The account of the ledger whose files of this boot are in `directory`. It survives a reboot."""
    return Hours(state_in(directory.parent) / FILE)


# -- reports -------------------------------------------------------------------------------------------------------


COLUMNS = {
    state: f"{state.replace(' ', '_')}_gib_h"
    for state in (IN_USE, IDLE, OUTSIDE, FREE, PARKED, ON_DISK, SAVED)
}
COLUMNS[BLOCKING] = "blocking_gib_h"
_OF_PEOPLE = (*OF_CARD_HOURS, PARKED, ON_DISK, SAVED)
BY = ("user", "notebook", "model", "card", "waits", "time")
GIB_HOUR = GIB * HOUR
MOST_LINES = 10  # users in the text


def table(rows: Iterable[Hour], by: str) -> list[dict[str, Any]]:
    """The report by user, notebook, model, card, waits (who waited for whom) or time: a dictionary for each row.

    `rows` are sums over the whole time, as `Hours.between` returns them; for "time", sums over stretches of time.

    `card_h` are hours of a whole card, `waited_h` are hours of waiting, and the others are GiB-hours: `blocking_gib_h`
    is what was idle while another waited. The largest row is first. Notebooks of one user with the same file name have
    their paths.
    """
    rows = list(rows)
    if by == "waits":
        return _waits(rows)
    if by == "time":
        return _over_time(rows)
    capacity = _capacity(rows)
    states = ON_CARD if by == "card" else _OF_PEOPLE
    found: dict[tuple[str, ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        key, sums = row.key, found[_group(row.key, by)]
        if key.state in states:
            sums[key.state] += row.byte_seconds / GIB_HOUR
        if key.state in OF_CARD_HOURS and capacity[key.device]:
            sums["card"] += row.byte_seconds / capacity[key.device] / HOUR
        if key.state == WAITED:
            sums["waited"] += row.seconds / HOUR
    paths = Counter((group[0], _file(group[-1])) for group in found)
    listed = []
    for group, sums in sorted(found.items(), key=lambda pair: (-pair[1]["card"], pair[0])):
        if not any(group) or not any(sums.values()):
            continue
        if by == "notebook" and paths[group[0], _file(group[1])] == 1:
            group = (group[0], _file(group[1]))
        names = ("card", *states) if by == "card" else ("card", *states, "waited")
        values = [round(sums[name], 3) for name in names]
        listed.append(dict(zip(columns(by), [*group, *values], strict=True)))
    return listed


def _file(path: str) -> str:
    return path.rpartition("/")[2]


_HEADS = {
    "user": ("user",),
    "notebook": ("user", "notebook"),
    "model": ("user", "model"),
    "card": ("card",),
}


def columns(by: str) -> list[str]:
    """The names of the columns of `table(rows, by)`."""
    if by == "waits":
        return ["user", "waited_for", "waited_h"]
    if by == "time":
        return ["time", *(COLUMNS[state] for state in ON_CARD)]
    if by == "card":
        return ["card", "card_h", *(COLUMNS[state] for state in ON_CARD)]
    return [*_HEADS[by], "card_h", *(COLUMNS[state] for state in _OF_PEOPLE), "waited_h"]


def _group(key: Key, by: str) -> tuple[str, ...]:
    if by == "card":
        return (key.device if key.state in ON_CARD else "",)
    if key.state in (FREE, WAITED_FOR) or (key.state == OUTSIDE and not key.user):
        return ("",)
    second = {
        "notebook": key.notebook,
        "model": OWN_CODE if key.name == KERNEL else key.name,
    }
    return (key.user, second[by]) if by in second else (key.user,)


def _capacity(rows: Iterable[Hour]) -> dict[str, float]:
    """The bytes of each card: the sum of all states over the recorded time."""
    bytes_, seconds = defaultdict[str, float](float), defaultdict[str, float](float)
    for row in rows:
        if row.key.state in ON_CARD:
            bytes_[row.key.device] += row.byte_seconds
        if row.key.state == FREE:
            seconds[row.key.device] += row.seconds
    return defaultdict(float, {id: bytes_[id] / time for id, time in seconds.items() if time})


def stretch_of(seconds: float) -> int:
    """The seconds of one row of the report by time, for a report over `seconds`: a minute, an hour or a day."""
    return MINUTE if seconds <= 2 * HOUR else HOUR if seconds <= 31 * DAY else DAY


def _over_time(rows: Iterable[Hour]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        if row.key.state in ON_CARD:
            found[row.start][row.key.state] += row.byte_seconds / GIB_HOUR
    zone = datetime.timezone.utc
    return [
        {"time": datetime.datetime.fromtimestamp(start, zone)}
        | {COLUMNS[state]: round(found[start][state], 3) for state in ON_CARD}
        for start in sorted(found)
    ]


def _waits(rows: list[Hour]) -> list[dict[str, Any]]:
    """The hours in which each user waited, for each user who held the card."""
    waited: dict[Key, Hour] = {row.key: row for row in rows if row.key.state == WAITED}
    hours: dict[tuple[str, str], float] = defaultdict(float)
    for row in rows:
        if row.key.state != WAITED_FOR:
            continue
        total = [
            hour
            for key, hour in waited.items()
            if key[:2] == row.key[:2] and key.device == row.key.device
        ]
        bytes_ = sum(hour.byte_seconds for hour in total)
        seconds = sum(hour.seconds for hour in total)
        if bytes_:
            hours[row.key.user, row.key.name] += seconds * row.byte_seconds / bytes_ / HOUR
    found = [
        {"user": user, "waited_for": holder, "waited_h": round(time, 3)}
        for (user, holder), time in hours.items()
    ]
    return sorted(found, key=lambda wait: -wait["waited_h"])


def text(rows: Iterable[Hour], since: float, until: float) -> str:
    """The report as a short text, fit for a mail. `since` and `until` are in epoch seconds."""
    rows = list(rows)
    cards, users, waits = table(rows, "card"), table(rows, "user"), table(rows, "waits")
    recorded = max((row.seconds for row in rows if row.key.state == FREE), default=0.0)
    shown = f"{recorded / HOUR:.0f} h" if recorded >= DAY else show_seconds(recorded)
    held: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        held[row.key.device][row.key.state] += row.byte_seconds
    days = " to ".join(
        time.strftime("%a %d %b %H:%M", time.localtime(wall)) for wall in (since, until)
    )
    lines = [f"{days}; recorded {shown} of {show_seconds(until - since)}"]
    for card in cards:
        parts = {state: held[card["card"]][state] for state in ON_CARD}
        total = sum(parts.values())
        shares = [f"{100 * part / total:.0f} % {state}" for state, part in parts.items() if part]
        lines.append(f"{card['card']}: {', '.join(shares)}")
    for user in users[:MOST_LINES]:
        lines.append(_user_line(user, [wait for wait in waits if wait["user"] == user["user"]]))
    if len(users) > MOST_LINES:
        lines.append(f"and {len(users) - MOST_LINES} more users")
    if saved := sum(user["saved_gib_h"] for user in users):
        lines.append(
            f"Saved by parking: {saved:.1f} GiB-hours, in which others used what parked notebooks would have held."
        )
    return "\n".join(lines)


def _user_line(user: dict[str, Any], waits: list[dict[str, Any]]) -> str:
    blocking = user["blocking_gib_h"]
    idle = f"{user['idle_gib_h'] + blocking:.1f} idle"
    if blocking:
        idle += f" ({blocking:.1f} of them while another waited)"
    line = f"{user['user']}: {user['card_h']:.1f} card-hours; {user['in_use_gib_h']:.1f} GiB-hours in use, {idle}"
    if user["outside_gib_h"]:
        line += f", {user['outside_gib_h']:.1f} outside"
    if not user["waited_h"]:
        return line
    others = [wait["waited_for"] for wait in waits if wait["waited_for"] != user["user"]]
    whom = f", most for {others[0]}" if others else ""
    return f"{line}; waited {show_seconds(user['waited_h'] * HOUR)}{whom}"
