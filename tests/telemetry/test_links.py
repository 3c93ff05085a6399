"""A symbolic link in the place of a journal or a history is never followed to another database."""

import contextlib
import os
import sqlite3
from pathlib import Path

import pytest

from gpu_runtime.facts import Event, Level, Moment
from gpu_runtime.ledgers.access import MARK
from gpu_runtime.telemetry import journal
from gpu_runtime.telemetry.journal import Journal
from gpu_runtime.telemetry.recorder import Record

EVENT = Event(1, 5.0, "qwen", "loaded", "request", "it is used")
MOMENT = Moment(5.0, "sim:0", 8, 8, 4, Level.LOW)


@pytest.fixture
def ledger(tmp_path):
    """The journal's directory of a shared ledger. A link is a part of the path to that directory."""
    (tmp_path / "real").mkdir()
    (tmp_path / "lib").symlink_to(tmp_path / "real")
    made = tmp_path / "lib" / "ledger"
    (made / "world" / "journal").mkdir(parents=True)
    (made / MARK).touch()
    return made / "world" / "journal"


def _journal(path: Path) -> None:
    Journal(path).append([EVENT])


def _history(path: Path) -> None:
    Record(path).append([MOMENT])


@pytest.mark.parametrize("write", [_journal, _history])
def test_a_link_that_is_put_there_after_the_look_is_not_followed(
    ledger, tmp_path, monkeypatch, write
):
    """The link leads to another database of this user, which must stay unchanged."""
    diary = tmp_path / "diary.db"
    with contextlib.closing(sqlite3.connect(diary)) as db:
        db.execute("CREATE TABLE mine(text)")
        db.commit()
    before = diary.read_bytes()
    (ledger / "store.db").symlink_to(diary)
    monkeypatch.setattr(Path, "is_symlink", lambda path: False)
    write(ledger / "store.db")
    assert diary.read_bytes() == before and not os.path.exists(f"{diary}-journal")


@pytest.mark.parametrize("write", [_journal, _history])
def test_a_link_in_place_of_the_journals_directory_is_not_followed(ledger, tmp_path, write):
    precious = tmp_path / "precious"
    precious.mkdir()
    sqlite3.connect(precious / "store.db").close()
    (precious / "store.db").touch()
    ledger.rmdir()
    ledger.symlink_to(precious)
    write(ledger / "store.db")
    assert (precious / "store.db").stat().st_size == 0


def test_without_links_events_and_moments_are_written(ledger):
    """A link on the path to the ledger is allowed, because only root can change that link."""
    _journal(ledger / "journal.db")
    _history(ledger / "history.db")
    assert Journal(ledger / "journal.db").tail() == (EVENT,)
    assert Record(ledger / "history.db").between(0.0, 10.0, 5) == (MOMENT,)


def test_an_endless_query_in_another_users_journal_ends_and_is_not_tried_again(tmp_path, caplog):
    """The tables of another user's file may be anything, even an endless view.

    Such a file is read again only after it has changed.
    """
    other = tmp_path / str(os.geteuid()) / "journal.db"
    other.parent.mkdir()
    with contextlib.closing(sqlite3.connect(other)) as db:
        db.execute(
            "CREATE VIEW events AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) "
            "SELECT id, 1e12 AS wall, 'm' AS model, 'x' AS body FROM n"
        )
        db.commit()
    for _ in range(3):
        assert journal.events_of(other, None, 0.0) == []
    assert len(caplog.records) == 1 and other in journal._endless
    other.unlink()
    Journal(other).append([EVENT])
    assert journal.events_of(other, None, 0.0) == [EVENT]
