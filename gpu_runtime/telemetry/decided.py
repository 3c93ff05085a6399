"""The recorded decisions of the journal: their encoding, and their table in the journal's file.

A record has everything that the scheduler read, so that the decision can be made again. It takes
about 0.3 KB with 2 leases in the book, and 3 KB with 20.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from ..facts import Decided

KEPT = 1_000  # decisions in the file; the oldest are removed first
MOST_ENTRIES = 256  # a decision on a larger book is not recorded: it would take 40 KB and 3 ms
MOST_BYTES = 1 << 20  # of one record, uncompressed
FORMAT = b"\x01"  # changes with WORDS, because WORDS is needed to read a record

# Names that most records contain. The compression has them as its dictionary, so a record contains
# only references to them. For a record with 2 leases, that saves two thirds of the bytes.
WORDS = b"".join(
    bytes([0xA0 + len(word)]) + word if len(word) < 32 else word
    for word in (
        b"id wall version policy book request world verdict now devices limits samples rules schema "
        b"sections tickets seq device taken_at free_bytes used_bytes processes simulated total_bytes "
        b"because steps asked asked_bytes blockers ahead retry_at type Wait Grant Refuse Load Move "
        b"Drop Shed kind hopeless need_bytes budget_bytes footprint parts bytes source declared "
        b"measured weights arrived placement layout held users owner host boot pid started serial "
        b"user notebook inode namespaces leases residue engines busy_since idle_since name shares "
        b"target filled phase settled pins pinned_since last_used uses recent_uses importance keep "
        b"keep_alive reload_seconds restore_seconds droppable movable piece_bytes settled_at "
        b"shadow_bytes backend transformers torch fake model_type llm quantization key cuda:0 sim:0"
    ).split()
)

_TABLE = (
    "CREATE TABLE IF NOT EXISTS decisions("
    "id INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT, body BLOB)"
)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Decided).decode


def pack(decided: Decided) -> bytes:
    """The decision `decided` as bytes, compressed, as the journal stores it."""
    squeeze = zlib.compressobj(6, zdict=WORDS)
    return FORMAT + squeeze.compress(_encode(decided)) + squeeze.flush()


def unpack(content: bytes) -> Decided | None:
    """The decision in `content`. None if it is damaged or was written in another format."""
    if content[:1] != FORMAT:
        return None
    try:
        return _decode(zlib.decompressobj(zdict=WORDS).decompress(content[1:], MOST_BYTES))
    except (zlib.error, msgspec.MsgspecError):  # damaged, or with fields of another version
        return None


def is_small(decided: Decided) -> bool:
    """Whether the book of the decision is small enough to be recorded."""
    return decided.book.entries <= MOST_ENTRIES


def insert(db: sqlite3.Connection, decisions: Iterable[Decided]) -> None:
    """Writes `decisions` into the journal's file `db`, and keeps only the newest `KEPT` there."""
    db.execute(_TABLE)
    for decided in decisions:
        row = (decided.model, pack(decided))
        db.execute("INSERT INTO decisions(model, body) VALUES (?, ?)", row)
    db.execute("DELETE FROM decisions WHERE id <= (SELECT max(id) FROM decisions) - ?", (KEPT,))


def select(db: sqlite3.Connection, name: str, limit: int) -> tuple[Decided, ...]:
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
