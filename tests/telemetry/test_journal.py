"""The journal against its model: a list of events. Each question gets the latest events that fit, in order."""

import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.facts import Event
from gpu_runtime.telemetry import journal as journals
from gpu_runtime.telemetry.journal import Journal
from tests.clock import Clock

ROWS = st.lists(
    st.tuples(*map(st.sampled_from, ("ab", ("loaded", "granted"), ("", "x", "y"), (0.0, 1.0)))),
    min_size=1,
    max_size=8,
)
QUESTION = st.fixed_dictionaries(
    {
        "limit": st.sampled_from((None, 0, 1, 2)),
        "model": st.sampled_from((None, "a", "b", "c")),
        "actions": st.sampled_from(((), ("loaded",), ("loaded", "granted"))),
        "since": st.sampled_from((0.0, 1.0, 1.5, 2.0)),
        "source": st.sampled_from(("", "x")),
    }
)


def event(number: int, wall: float = 0.0, model: str = "a", action: str = "loaded", **more: str):
    return Event(number, wall, model, action, "", "", **more)


def events(rows) -> list[Event]:
    """An event for each row, whose last field is the time since the event before."""
    wall, found = 0.0, []
    for number, (model, action, source, later) in enumerate(rows):
        wall += later
        found.append(event(number, wall, model, action, source=source))
    return found


@pytest.mark.parametrize("place", ["memory", "file", "no directory"])
@given(ROWS, st.lists(QUESTION, min_size=1, max_size=6))
def test_each_question_gets_the_latest_events_that_fit(tmp_path_factory, place, rows, questions):
    """Also from a journal that cannot be written, and from a file that another user copies and reads."""
    folder = tmp_path_factory.mktemp("journal") / str(os.geteuid())
    if place == "no directory":
        folder.write_text("")
    path = None if place == "memory" else folder / "journal.db"
    journal, told = Journal(path, clock=Clock()), events(rows)
    for first in range(0, len(told), 2):
        journal.append(told[first : first + 2])
    for asked in questions:
        fitting = [
            one
            for one in told
            if asked["model"] in (None, one.model) and one.wall >= asked["since"]
            if asked["source"] in ("", one.source)
        ]
        wanted = [one for one in fitting if not asked["actions"] or one.action in asked["actions"]]
        limit = len(wanted) if asked["limit"] is None else asked["limit"]
        assert journal.tail(**asked) == tuple(
            wanted[len(wanted) - limit :] if limit < len(wanted) else wanted
        )
        if place == "file":
            assert Journal(path).tail(**asked) == journal.tail(**asked)
            words = asked["model"], asked["since"], asked["source"]
            assert journals.events_of(path, *words) == fitting[::-1]


def test_events_reach_the_file_at_once_and_then_once_a_second(tmp_path):
    """The first event of a process is written at once; a killed process loses those of a second."""
    path, clock = tmp_path / "journal.db", Clock()
    journal, seen = Journal(path, clock=clock), []
    for number, seconds in enumerate((0.0, 0.75, 0.25, 0.75, 0.25)):
        clock.advance(seconds)
        journal.append([event(number)])
        seen.append(len(Journal(path).tail()))
    assert seen == [1, 1, 3, 3, 5]
    journal.append([event(5)])
    journal.flush()
    assert [one.seq for one in Journal(path).tail()] == list(range(6))


def test_events_that_meet_a_writing_process_are_written_later_and_a_lost_file_is_told_once(
    tmp_path, monkeypatch, caplog
):
    path, clock = tmp_path / "journal.db", Clock()
    connect = sqlite3.connect
    monkeypatch.setattr(journals.sqlite3, "connect", lambda path, timeout: connect(path, timeout=0))
    journal = Journal(path, clock=clock)
    journal.append([event(0)])
    opened, tries = journals.opened, []
    monkeypatch.setattr(journals, "opened", lambda path: tries.append(path) or opened(path))
    with closing(connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        for number, seconds in ((1, 9), (2, 9), (3, 0.5)):
            clock.advance(seconds)
            journal.append([event(number)])
        assert len(tries) == 2, "a try may wait half a second, so there is one a second"
        journal.flush()
    assert not caplog.records
    clock.advance(1)
    journal.append([event(4)])
    assert [one.seq for one in Journal(path).tail()] == [0, 1, 2, 3, 4]
    path.unlink()
    path.mkdir()
    for number in (5, 6):
        clock.advance(9)
        journal.append([event(number)])
    assert len(caplog.records) == 1 and [one.seq for one in journal.tail(3)] == [4, 5, 6]


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_oldest_events_go_and_others_stay(tmp_path, monkeypatch, on_disk):
    """The numbers of the events are those of the book, in which other users' events stand too."""
    monkeypatch.setattr(journals, "KEPT", 3)
    monkeypatch.setattr(journals, "TRIM_EVERY", 4)
    path = tmp_path / "journal.db" if on_disk else None
    journal = Journal(path, clock=Clock())
    for number in range(1, 17, 2):
        journal.append([event(number)])
        journal.flush()
    assert [one.seq for one in journal.tail()] == [11, 13, 15]
    if on_disk:
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("SELECT count(*) FROM events").fetchall() == [(3,)]


def test_events_of_all_users_are_one_history(tmp_path, monkeypatch):
    theirs = tmp_path / "elsewhere" / str(os.geteuid()) / "journal.db"
    Journal(theirs).append([event(number, float(number)) for number in (1, 3)])
    monkeypatch.setattr(journals, "journals_of_others", lambda *_: [theirs])
    users = tmp_path / "users"
    users.mkdir()
    journal = Journal(users / str(os.geteuid()) / "journal.db", users)
    journal.append([event(number, float(number)) for number in (2, 4)])
    for limit in (None, 3):
        assert [one.seq for one in journal.tail(limit)] == [1, 2, 3, 4][-(limit or 4) :]


def test_journals_of_other_users_are_those_that_they_wrote_themselves(tmp_path, monkeypatch):
    """The directory has the user's uid as its name, and the file belongs to this user."""
    mine = os.geteuid()
    for folder in (str(mine), str(mine + 1), "ann", "-1"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "journal.db").touch()
    file = tmp_path / str(mine) / "journal.db"
    os.utime(file, (100, 100))

    def found(since: float):
        return journals.journals_of_others(tmp_path, "journal.db", since)

    assert found(0.0) == []
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)  # then they are another user's
    assert [found(since) for since in (0.0, 100.0, 100.5)] == [[file], [file], []]
    assert journals.journals_of_others(tmp_path / "none", "journal.db", 0.0) == []


def test_no_statement_numbers_its_placeholders():
    """Python 3.12 warns about `?1` with a tuple of values, and Python 3.14 refuses it."""
    numbered = re.compile(r"[=(,<>] ?\?[0-9]")
    sources = (Path(__file__).parents[2] / "gpu_runtime").rglob("*.py")
    assert not [path.name for path in sources if numbered.search(path.read_text())]
