"""The journal: the history of events with their reasons, including events of earlier boots.

The journal is one SQLite table, to which every process of a ledger appends. The book (the ledger's
current leases and requests) has only the newest events. A second table has the newest decisions,
with all inputs of each decision, so that the decision can be made again. A record takes about 0.3 KB
with 2 leases in the book, and 3 KB with 20. In a shared ledger, each user has a separate journal, and
everybody reads the events of all journals. Nothing depends on the journal. If it cannot be written,
the failure is logged once.

The content of another user's journal is never trusted. Each file is copied into memory, and SQLite
works on the copy. So the reader holds no lock, and the writer never waits for it. A file of another
user cannot make SQLite write or wait in this process.

A fork waits until no thread of gpu-console is inside SQLite (`threads.py`). But a fork does not wait
for the threads of other libraries, such as the thread that saves IPython's history. A lock that
such a thread held stays locked in the child for ever, and the first call that needs this lock never
returns. So the child makes its first call in a separate thread, and waits for the call only a
limited time.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import logging
import os
import sqlite3
import stat
import sys
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from .. import threads
from ..facts import Decided, Event
from ..files import make_directory, read_plain
from ..ledgers.access import JournalPlace, access_to, make_own_journal, require_no_link

TRY_SECONDS = 3.0
_began_as = os.getpid()
_usable_in: dict[int, bool] = {}  # process id -> what was found; one entry at most


def sqlite_is_usable() -> bool:
    """Whether this process can use SQLite. A forked child tests this once, in 0.2 ms."""
    pid = os.getpid()
    if pid == _began_as:
        return True
    if pid not in _usable_in:
        found = threads.is_clean() and threads.start(_use_once).wait(TRY_SECONDS)
        _usable_in.clear()
        _usable_in[pid] = found
    return _usable_in[pid]


def _use_once() -> None:
    """Makes a call that takes each of SQLite's global locks: for memory, page cache and files."""
    try:
        db = sqlite3.connect("file:/proc/self/cmdline?mode=ro", uri=True)
        db.execute("PRAGMA schema_version").fetchall()
    except sqlite3.Error:
        pass  # expected: the file is no database


# -- the journal of this user ----------------------------------------------------------------------


KEPT = 10_000  # events in the file; the oldest are removed first
TRIM_EVERY = 500  # events
EVERY_SECONDS = 1.0

log = logging.getLogger("gpu_runtime")
T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Event).decode


class Journal:
    """Appends events and returns the latest events.

    The file is opened for each write, so no connection is carried across a fork. Opening takes
    longer than granting a lease, so events are collected and written together once a second. If
    this process is killed, the events of the last second are missing in the journal. The book still
    has these events.
    """

    def __init__(
        self,
        path: Path | None = None,
        users: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """If `path`, the file, is None, the events stay in this process. `clock` returns seconds.

        In a shared ledger, `users` is the directory with the journals of all users.
        """
        self._path = path
        self._users = users
        # Whether the path to the file was checked: only this user can write it.
        self._is_ours = False
        self._clock = clock
        self._recent: deque[Event] = deque(maxlen=KEPT)
        self._unwritten: deque[Event] = deque(maxlen=KEPT)
        # Decisions that are not in the file: all of them if there is no file.
        self._decided: deque[Decided] = deque(maxlen=KEPT_DECISIONS)
        self._numbers = itertools.count(1)  # of the decisions that this process records
        self._written_at = float("-inf")
        self._lock = threads.awaited(threading.RLock())
        self._reading_others = threads.awaited(threading.RLock())  # no writer waits for it
        self._broken = self._writing = False

    def append(self, events: Iterable[Event]) -> None:
        """Adds `events`. Never fails: if the file cannot be written, the events stay in memory."""
        rows = list(events)
        if not rows:
            return
        self._recent.extend(rows)
        if self._path is None or self._broken:
            return
        self._unwritten.extend(rows)
        if self._clock() - self._written_at >= EVERY_SECONDS:
            self.flush()

    def record(self, decided: Decided) -> None:
        """Stores the decision `decided`, unless its book is too large. Never fails."""
        if decided.book.entries > MOST_ENTRIES:
            return
        self._decided.append(replace(decided, id=next(self._numbers)))
        if self._clock() - self._written_at >= EVERY_SECONDS:
            self.flush()

    def decided(self, name: str, limit: int) -> tuple[Decided, ...]:
        """The newest decisions of this user's processes about the model `name`, at most `limit`.

        The newest decision is first. If there is none and `name` is a number, the result is the
        decision with this number.
        """
        with self._lock:
            stored = self._stored(lambda db: select_decisions(db, name, limit))
            if stored is not None:
                return stored
            kept = tuple(reversed(self._decided))
        found = tuple(decision for decision in kept if decision.model == name)[:limit]
        return found or tuple(decision for decision in kept if name == str(decision.id))

    def _stored(self, read: Callable[[sqlite3.Connection], T]) -> T | None:
        """What `read` returns for the file, after a write. None if there is no file that can be read."""
        self._write()
        if self._path is not None and not self._broken and self._path.exists():
            try:
                with contextlib.closing(self._connect()) as db:
                    return read(db)
            except (sqlite3.Error, OSError, msgspec.MsgspecError) as error:
                log.warning("the journal %s cannot be read (%s)", self._path, error)
        return None

    def flush(self) -> None:
        """Writes the events and decisions that are not written yet. Never fails."""
        if self._unwritten or self._decided:
            threads.in_turn(self._lock, self._write)

    def _write(self, _: bool = True) -> None:
        rows, decided = list(self._unwritten), list(self._decided)
        if not (rows or decided) or self._broken or self._path is None or self._writing:
            return
        self._written_at = self._clock()
        self._writing = True
        try:
            with contextlib.closing(self._connect()) as db:
                if decided:
                    insert_decisions(db, decided)
                db.executemany(
                    "INSERT INTO events(wall, model, body) VALUES (?, ?, ?)",
                    [(event.wall, event.model, _encode(event)) for event in rows],
                )
                [last] = db.execute("SELECT max(id) FROM events").fetchone()
                if rows and last % TRIM_EVERY < len(rows):
                    db.execute("DELETE FROM events WHERE id <= ?", (last - KEPT,))
                db.commit()
        except (sqlite3.Error, OSError) as error:
            if sqlite_code(error) == SQLITE_BUSY:
                return  # many processes write at once; the next write, a second later, includes these
            self._broken = True
            log.warning(
                "the journal %s cannot be written (%s); history is kept in memory only",
                self._path,
                error,
            )
        finally:
            self._writing = False
        for _ in rows:  # a signal handler of the user may have added more
            self._unwritten.popleft()
        for _ in () if self._broken else decided:
            self._decided.popleft()

    def tail(
        self,
        limit: int | None = None,
        model: str | None = None,
        actions: Collection[str] = (),
        since: float = 0.0,
        source: str = "",
    ) -> tuple[Event, ...]:
        """At most `limit` of the latest events. The newest event is last.

        The result has only events of `model` (None: any model) whose action is in `actions` (empty:
        any action). Events before the wall time `since` are left out. `source` is the digest of a
        model's source; if it is given, only events of models from equal sources are returned.
        """
        count = KEPT if limit is None else limit

        def latest(events: Iterable[Event]) -> tuple[Event, ...]:
            """The newest `count` wanted events. The newest is first in `events`, and last in the result."""
            wanted = (event for event in events if not actions or event.action in actions)
            if source:
                wanted = (event for event in wanted if event.source == source)
            return tuple(itertools.islice(wanted, count))[::-1]

        with self._reading_others:
            others = self._of_others(model, since, source)

        def read(db: sqlite3.Connection) -> tuple[Event, ...]:
            # Rows are decoded one by one, and no more than needed: a full journal has 10,000 events.
            own = (_decode(body) for (body,) in _stored_events(db, model, since, source))
            return latest(_merged([own, *others]))

        with self._lock:
            stored = self._stored(read)
            if stored is not None:
                return stored
            kept = (
                event
                for event in reversed(tuple(self._recent))  # another thread may add some meanwhile
                if model in (None, event.model) and event.wall >= since
            )
            return latest(_merged([kept, *others]))

    def _of_others(self, model: str | None, since: float, source: str) -> list[list[Event]]:
        """The events of each other user's journal. The newest event is first."""
        if self._users is None or self._path is None or not sqlite_is_usable():
            return []
        files = journals_of_others(self._users, self._path.name, since)
        return [events_of(file, model, since, source) for file in files]

    def _connect(self) -> sqlite3.Connection:
        """A connection for one use, closed after it: no connection is carried across a fork."""
        assert self._path is not None
        if self._users is not None:
            if not (self._is_ours and self._path.exists()):
                make_own_journal(JournalPlace(self._path, self._users))
                self._is_ours = True
        elif not self._path.exists():
            make_directory(self._path.parent)
            access_to(self._path.parent).make_file(self._path)
        db = opened(self._path)
        db.execute(
            "CREATE TABLE IF NOT EXISTS events(id INTEGER PRIMARY KEY, wall REAL, model TEXT, body BLOB)"
        )
        db.execute("CREATE INDEX IF NOT EXISTS events_of_model ON events(model)")
        return db


# SQLite's result codes, and of what Python 3.10 says without a code. Source: https://www.sqlite.org/rescode.html
SQLITE_ERROR, SQLITE_BUSY, SQLITE_INTERRUPT, SQLITE_CORRUPT, SQLITE_NOTADB = 1, 5, 9, 11, 26
_TEXTS = {
    "locked": SQLITE_BUSY, "readonly": 8, "interrupted": SQLITE_INTERRUPT, "disk I/O": 10,
    "malformed": SQLITE_CORRUPT, "full": 13, "unable to open": 14, "not a database": SQLITE_NOTADB,
}  # fmt: skip


def sqlite_code(error: Exception) -> int:
    """SQLite's primary result code for `error`; SQLITE_ERROR if none is known."""
    if (code := getattr(error, "sqlite_errorcode", None)) is not None:
        return int(code) & 0xFF
    said = str(error) if isinstance(error, sqlite3.Error) else ""
    return next((code for text, code in _TEXTS.items() if text in said), SQLITE_ERROR)


def limit_values(db: sqlite3.Connection, most_bytes: int) -> None:
    """Lets `db` read no larger value than `most_bytes`. Python 3.10 sets no such limit."""
    if sys.version_info >= (3, 11):
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, most_bytes)


def limit_steps(db: sqlite3.Connection, most: int) -> None:
    """Interrupts `db` after `most` steps. A file that another user can write may have a view without an end."""
    calls = itertools.count(1)
    db.set_progress_handler(lambda: next(calls) > most // STEPS_AT_ONCE, STEPS_AT_ONCE)


def opened(path: Path) -> sqlite3.Connection:
    """Opens the database `path` in a directory where other users may have made files.

    Raises OSError if the file is a link, or if SQLite's journal for the file is not a plain file. Also in a forked
    process that cannot use SQLite.
    """
    if not sqlite_is_usable():
        raise OSError(errno.EDEADLK, "SQLite cannot be used in this forked process")
    # In a shared ledger, another user could put a link here that leads to a database of this user.
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link", str(path))
    # SQLite opens the journal at each read. If the journal is a pipe, SQLite waits for ever.
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(f"{path}-journal").st_mode):
            raise OSError(errno.EINVAL, "its journal is not a file", str(path))
    db = sqlite3.connect(path, timeout=0.5)
    try:
        require_no_link(db, path)
        db.execute("PRAGMA synchronous=OFF")
        db.execute("PRAGMA trusted_schema=OFF")
    except BaseException:
        db.close()
        raise
    return db


def _stored_events(
    db: sqlite3.Connection, model: str | None, since: float, source: str
) -> Iterable[tuple[Any, ...]]:
    """The events in the file that are of `model` (None: any model) and not before `since`, newest first, not decoded.

    If `source` is given, only events that contain this text are returned.
    """
    # The text of the query depends on `model`: "? IS NULL OR model = ?" would not use the index.
    # Without the index, the events of one model in a full journal take 7 ms.
    of_model = "" if model is None else "model = :model AND"
    return db.execute(
        f"SELECT body FROM events WHERE {of_model} wall >= :since AND instr(body, :source) "
        "ORDER BY id DESC",
        {"model": model, "since": since, "source": source.encode()},
    )


def _merged(sources: list[Iterable[Event]]) -> Iterable[Event]:
    """The events of all `sources`, newest first. Each source has its newest event first, too."""
    if len(sources) == 1:
        return sources[0]
    return heapq.merge(*sources, key=lambda event: (event.wall, event.seq), reverse=True)


# -- decisions -------------------------------------------------------------------------------------


KEPT_DECISIONS = 1_000  # decisions in the file; the oldest are removed first
MOST_ENTRIES = 256  # a decision on a larger book is not recorded: it would take 40 KB and 3 ms
MOST_RECORD_BYTES = 1 << 20  # of one record, uncompressed
FORMAT = b"\x02"  # of a record; the first one was compressed with a dictionary

_TABLE = (
    "CREATE TABLE IF NOT EXISTS decisions("
    "id INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT, body BLOB)"
)
_encode_decided = msgspec.msgpack.Encoder().encode
_decode_decided = msgspec.msgpack.Decoder(Decided).decode


def pack(decided: Decided) -> bytes:
    """The decision `decided` as bytes, compressed, as the journal stores it."""
    return FORMAT + zlib.compress(_encode_decided(decided))


def unpack(content: bytes) -> Decided | None:
    """The decision in `content`. None if it is damaged or was written in another format."""
    if content[:1] != FORMAT:
        return None
    try:
        return _decode_decided(zlib.decompressobj().decompress(content[1:], MOST_RECORD_BYTES))
    except (zlib.error, msgspec.MsgspecError):  # damaged, or with fields of another version
        return None


def insert_decisions(db: sqlite3.Connection, decisions: Iterable[Decided]) -> None:
    """Writes `decisions` into the journal's file `db`, and keeps only the newest `KEPT` there."""
    db.execute(_TABLE)
    for decided in decisions:
        row = (decided.model, pack(decided))
        db.execute("INSERT INTO decisions(model, body) VALUES (?, ?)", row)
    db.execute(
        "DELETE FROM decisions WHERE id <= (SELECT max(id) FROM decisions) - ?", (KEPT_DECISIONS,)
    )


def select_decisions(db: sqlite3.Connection, name: str, limit: int) -> tuple[Decided, ...]:
    """At most `limit` decisions about the model `name` from the file `db`. The newest decision is
    first.

    If no decision is about a model `name`, and `name` is a number, the result is the decision with
    this number.
    """
    db.execute(_TABLE)
    wanted = "SELECT id, body FROM decisions WHERE "
    rows = db.execute(f"{wanted} model = ? ORDER BY id DESC LIMIT ?", (name, limit)).fetchall()
    if not rows and name.isdecimal():
        rows = db.execute(f"{wanted} id = ?", (int(name),)).fetchall()
    found = ((id, unpack(body)) for id, body in rows)
    return tuple(replace(decided, id=id) for id, decided in found if decided is not None)


# -- journals of other users -----------------------------------------------------------------------


MOST_EVENTS = 10_000
MOST_BYTES = 64 << 20  # a journal of 10,000 events has about 5 MiB
# SQLite's steps for one file, about 0.1 s; a hostile file could need endless steps.
MOST_STEPS = 5_000_000
STEPS_AT_ONCE = 100_000
ATTEMPTS = 3  # the other user may write the file while it is copied

_complained: set[Path] = set()
_endless: dict[Path, int] = {}  # files whose query took too many steps -> their write time


def journals_of_others(users: Path, name: str, since: float) -> list[Path]:
    """The files with this `name` that belong to other users and were written at or after `since`.

    `users` has a directory for each user. The name of the directory is the uid. A file counts only
    if it belongs to the user with this uid.
    """
    found = []
    try:
        uids = [entry for entry in os.listdir(users) if entry.isascii() and entry.isdecimal()]
    except OSError:  # no user has written one yet
        return []
    for uid in uids:
        path = users / uid / name
        try:
            written = path.lstat()
        except OSError:  # this user has none for these devices
            continue
        if int(uid) != os.geteuid() and written.st_uid == int(uid) and written.st_mtime >= since:
            found.append(path)
    return found


def events_of(path: Path, model: str | None, since: float, source: str = "") -> list[Event]:
    """The events in another user's file `path`, newest first. Empty if the file cannot be read.

    The result has only events of `model` (None: any model) that are not before the wall time
    `since`, and that contain the text `source`. A file that cannot be read is logged once. If a
    query of the file takes too many steps, the file is not read again until it has changed.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            stamp = path.stat().st_mtime_ns
            return [] if _endless.get(path) == stamp else _read(path, model, since, source)
        except (sqlite3.Error, OSError) as error:
            if sqlite_code(error) == SQLITE_INTERRUPT:
                _endless[path] = stamp
            elif attempt < ATTEMPTS:
                continue  # its user may be writing it
            if path not in _complained:
                _complained.add(path)
                log.warning("the journal %s cannot be read (%s)", path, error)
            break
    return []


def _fill(db: sqlite3.Connection, content: bytes) -> None:
    """Makes `db` a copy of the database whose file has this `content`."""
    if sys.version_info >= (3, 11):
        db.deserialize(content)
        return
    with tempfile.NamedTemporaryFile() as file:  # its journal, if any, is of this user
        file.write(content)
        file.flush()
        with contextlib.closing(sqlite3.connect(file.name)) as copied:
            copied.backup(db)


def _read(path: Path, model: str | None, since: float, source: str) -> list[Event]:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        _fill(db, read_plain(path, MOST_BYTES, int(path.parent.name)))
        limit_values(db, MOST_BYTES)
        db.execute("PRAGMA trusted_schema=OFF")
        limit_steps(db, MOST_STEPS)
        rows = _stored_events(db, model, since, source)
        return decoded(_decode, itertools.islice(rows, MOST_EVENTS))


def decoded(decode: Callable[[Any], T], rows: Iterable[tuple[Any, ...]]) -> list[T]:
    """The values in the `rows` of one column, without those that are damaged."""
    found = []
    for (body,) in rows:
        # A damaged row says nothing, and the others are as they were.
        with contextlib.suppress(msgspec.MsgspecError, TypeError, UnicodeDecodeError):
            found.append(decode(body))
    return found
