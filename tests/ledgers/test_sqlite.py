"""Tests that need real files and processes: death, damage, forks and the stop button.

The book is all leases and requests of a host, and the page is its stored form. Each owner (a
process in the book) keeps a copy of its section of the page in a file of its own, its roster. A
damaged page is rebuilt from the rosters.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpu_runtime.errors import LedgerNewer, LedgerRefused, LedgerUnavailable
from gpu_runtime.facts import SCHEMA, Share
from gpu_runtime.ledgers import liveness
from gpu_runtime.ledgers.access import owners_in
from gpu_runtime.ledgers.book_store import DamagedBook, LostRace
from gpu_runtime.ledgers.liveness import start_ticks
from gpu_runtime.ledgers.location import default_url
from gpu_runtime.ledgers.revision_hint import RevisionHint
from gpu_runtime.ledgers.sqlite import files
from gpu_runtime.ledgers.sqlite.ledger import SqliteLedger
from gpu_runtime.ledgers.sqlite.page import SqliteBook
from tests import forked
from tests.clock import PATIENCE, scaled, until

from .conftest import GIB, REPO, Notebook, count, lease, names, put, section, share, ticket, without


def copy_of(path: Path, to: Path) -> Path:
    """Copies `path` in another process, and returns the copy's path.

    Opening and closing the file in this process would drop SQLite's locks on it.
    """
    subprocess.run(["cp", path, to], check=True)
    return to


# Life and death


def test_a_killed_owner_is_proven_dead(new_owner_here, notebook):
    """The bytes of an owner may be granted to others only after its death is proven."""
    ledger, other = new_owner_here(), notebook()
    other.run("put(ledger, 'qwen')")
    with pytest.raises(LedgerRefused, match="proof of death"):
        without(ledger, other.id)
    other.kill()
    assert ledger.dead(ledger.read()) == {other.id}
    without(ledger, other.id)
    assert names(ledger) == []


def test_a_stopped_process_is_not_dead(new_owner_here, notebook):
    """A stopped process still holds its bytes, and may continue at any moment."""
    ledger, other = new_owner_here(), notebook()
    other.run("put(ledger, 'qwen')")
    other.signal(signal.SIGSTOP)
    until(lambda: " (stopped)" in Path(f"/proc/{other.process.pid}/status").read_text())
    assert ledger.dead(ledger.read()) == frozenset()
    other.signal(signal.SIGCONT)
    assert other.run("names(ledger)") == "['qwen']"


def test_another_lock_file_proves_nothing(new_owner_here, notebook):
    ledger, other = new_owner_here(), notebook()
    other.run("put(ledger, 'qwen')")
    book = ledger.read()
    other.kill()
    lock = ledger.directory / "owners" / other.id
    lock.rename(lock.with_name("away"))
    lock.touch()
    assert ledger.dead(book) == frozenset()
    assert ledger.unknown(book) == {other.id}
    lock.unlink()
    lock.with_name("away").rename(lock)
    assert ledger.dead(book) == {other.id}


def test_where_the_lock_file_is_missing_the_process_is_the_proof(new_owner_here, notebook):
    """If an owner's lock file is missing, its process proves life or death. In an earlier version
    the lease of such an owner stayed for ever after its death.
    """
    ledger, other = new_owner_here(), notebook()
    other.run("put(ledger, 'qwen')")
    book = ledger.read()
    (ledger.directory / "owners" / other.id).unlink()
    assert ledger.dead(book) == ledger.unknown(book) == frozenset(), "it lives"
    other.process.kill()
    other.process.await_death()
    assert ledger.dead(book) == {other.id}, "a zombie holds nothing"
    other.kill()
    assert ledger.dead(book) == {other.id}
    without(ledger, other.id)
    assert names(ledger) == []


def test_a_process_proves_nothing_to_an_observer_in_another_container(new_owner_here, notebook):
    """In another container the same process number means another process, or none."""
    ledger, other = new_owner_here(), notebook()
    other.run("put(ledger, 'qwen')")
    book = ledger.read()
    (ledger.directory / "owners" / other.id).unlink()
    other.kill()
    owner = replace(book.owner(other.id), namespaces="1-1")
    elsewhere = book.with_section(replace(book.sections[other.id], owner=owner))
    assert ledger.dead(elsewhere) == frozenset() and ledger.unknown(elsewhere) == {other.id}


def test_a_person_may_declare_dead_what_is_unknown_and_nothing_that_lives(new_owner_here, notebook):
    ledger, lives, lost = new_owner_here(), notebook(), notebook()
    lives.run("put(ledger, 'llama')")
    lost.run("put(ledger, 'qwen')")
    lost.kill()
    lock = ledger.directory / "owners" / lost.id
    lock.rename(lock.with_name("away"))
    lock.touch()  # neither the lock nor the process proves anything
    with pytest.raises(LedgerRefused, match="proof of death"):
        without(ledger, lost.id)
    ledger.declare_dead([lives.id, lost.id])
    assert ledger.dead(ledger.read()) == {lost.id}
    without(ledger, lost.id)
    assert names(ledger) == ["llama"]


def test_a_forked_child_owns_nothing_and_does_not_keep_its_parent_alive(new_owner_here, notebook):
    """The child of a killed notebook cannot use its parent's ledger. Its life does not count as its
    parent's.
    """
    ledger, other = new_owner_here(), notebook()
    other.run("put(ledger, 'qwen')")
    assert other.run("in_a_child(ledger.read)") == "LedgerUnavailable"
    assert ledger.dead(ledger.read()) == frozenset()
    other.kill()
    try:
        until(lambda: ledger.dead(ledger.read()) == {other.id})
    finally:
        os.killpg(other.process.pid, signal.SIGKILL)


def test_files_of_dead_owners_are_removed(new_owner_here, notebook):
    """The files of dead owners are removed once the book no longer needs them as a proof of death."""
    ledger, reaped, unreaped = new_owner_here(), notebook(), notebook()
    unreaped.run("put(ledger, 'qwen')")
    reaped.kill()
    unreaped.kill()
    another = new_owner_here()
    left = {path.name for path in (ledger.directory / "owners").iterdir()}
    assert {name.removesuffix(".bell") for name in left} == {
        ledger.owner.id,
        another.owner.id,
        unreaped.id,
    }


def test_closing_leaves_no_files(new_owner_here):
    ledger = new_owner_here()
    ledger.close()
    assert list((ledger.directory / "owners").iterdir()) == []


# Damage


def garble(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(os.urandom(3000))


def garble_the_page(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE book SET body='{', rev=rev+1")


def change_one_digit(path: Path) -> None:
    """Changes one digit of the page, which is then a valid document with a wrong number."""
    with sqlite3.connect(path) as db:
        (body,) = db.execute("SELECT body FROM book").fetchone()
        at = body.index(b'"leases":[')
        at += next(place for place, byte in enumerate(body[at:]) if chr(byte) in "1234567")
        db.execute(
            "UPDATE book SET body=?, rev=rev+1",
            (body[:at] + bytes([body[at] + 1]) + body[at + 1 :],),
        )


def change_the_schema(path: Path) -> None:
    """Changes one bit of the schema number. The page must count as damaged, not as one of a newer
    version.
    """
    with sqlite3.connect(path) as db:
        db.execute("UPDATE book SET schema=66")


DAMAGE = {
    "its schema changed": change_the_schema,
    "one digit changed": change_one_digit,
    "corrupt": garble,
    "truncated": lambda path: os.truncate(path, 5000),
    "emptied": lambda path: os.truncate(path, 0),
    "deleted": Path.unlink,
    "its page garbled": garble_the_page,
    "CURRENT deleted": lambda path: (path.parent / "CURRENT").unlink(),
    "an older copy copied over it": lambda path: subprocess.run(
        ["cp", f"{path}.old", path], check=True
    ),
    "an older copy moved over it": lambda path: os.replace(f"{path}.old", path),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_book_is_rebuilt_from_the_living_owners(new_owner_here, notebook, caplog, how):
    """The damaged book is kept under another name. Living owners keep their leases and tickets."""
    ledger, other, dead = new_owner_here(), notebook(), notebook()
    dead.run("put(ledger, 'ghost')")
    copy_of(Path(ledger.path), Path(f"{ledger.path}.old"))
    put(ledger, "qwen")
    ledger.transact(lambda book: (book.with_ticket(ticket(ledger, "mine")), None))
    other.run("put(ledger, 'llama')")
    other.run("count(ledger)")
    dead.kill()
    path = Path(ledger.path)
    damage = (
        "from pathlib import Path; from tests.ledgers.test_sqlite import DAMAGE;"
        f"DAMAGE[{how!r}](Path({str(path)!r}))"
    )
    assert forked.RUNTIME.start(damage).wait() == 0

    with caplog.at_level(logging.WARNING, "gpu_runtime"):
        book = ledger.read()
    assert sorted(one.name for one in book.leases()) == ["llama", "qwen"]
    assert book.lease(ledger.owner.id, "qwen") == lease(ledger, "qwen")
    assert [one.key for one in book.tickets] == ["mine"]
    assert Path(ledger.path).name == "book-2.db"
    assert other.run("count(ledger)") == "2"
    assert count(ledger) == 1
    assert "was damaged" in caplog.text and "2 living owners" in caplog.text
    if how != "deleted":
        assert (path.parent / "book-1.damaged").exists() and "book-1.damaged" in caplog.text


def test_a_new_owner_notices_an_old_copy(new_owner_here, notebook):
    """The new owner has not seen the book before. So it compares the book with the rosters of the
    living owners.
    """
    ledger = new_owner_here()
    path = Path(ledger.path)
    old = copy_of(path, Path(f"{path}.old"))
    put(ledger, "qwen")
    put(ledger, "qwen", "llama")
    os.replace(old, path)
    assert notebook().run("names(ledger)") == "['llama', 'qwen']"


def test_all_processes_find_the_same_new_book(new_owner_here, notebook):
    """Many processes notice the damage at once. Exactly one of them rebuilds the book, and no lease
    is lost.
    """
    ledger = new_owner_here()
    others = [notebook() for _ in range(4)]
    for number, other in enumerate(others):
        other.run(f"put(ledger, 'm{number}')")
    garble(Path(ledger.path))
    for other in others:
        other.send("reach(ledger, 50)")
    assert [other.answer() for other in others] == ["none lost"] * 4
    book = ledger.read()
    assert [one.counts for one in book.sections.values()] == [{"n": 50}] * 4
    books = {path.name for path in ledger.directory.glob("book-*") if "journal" not in path.name}
    assert books == {"book-1.damaged", "book-2.db"}


def test_damage_loses_no_acknowledged_write(new_owner_here, notebook):
    """The book is deleted and truncated ten times while four processes write."""
    ledger = new_owner_here()
    others = [notebook() for _ in range(4)]
    for other in others:
        other.send("reach(ledger, 1500)")
    for number in range(10):
        time.sleep(0.03)  # let them write; no condition is awaited
        path = Path(ledger.directory / files.current(ledger.directory))
        subprocess.run(
            ["truncate", "-s", "5000", path] if number % 2 else ["rm", "-f", path], check=True
        )
    assert [other.answer() for other in others] == ["none lost"] * 4
    assert [one.counts for one in ledger.read().sections.values()] == [{"n": 1500}] * 4


def test_a_grant_in_a_replaced_book_is_void(new_owner_here):
    """While a grant is written into the old book, a new book is made. So the grant is decided
    again.
    """
    ledger, runs = new_owner_here(), []

    def decide(book):
        runs.append(Path(ledger.path).name)
        if len(runs) == 1:
            files.point_current_at(ledger.directory, "book-7.db")
        return book.with_section(section(ledger, "qwen")), None

    ledger.transact(decide)
    assert runs == ["book-1.db", "book-8.db"]
    assert names(new_owner_here()) == ["qwen"]


def test_a_grant_during_a_rebuild_is_in_the_new_book(new_owner_here, monkeypatch):
    """The writer read the link CURRENT just before it changed. Its grant is still in the new book."""
    ledger, rebuilder = new_owner_here(), new_owner_here()
    page = rebuilder._store.look()
    change = files.point_current_at

    def late(directory, name):
        put(ledger, "qwen")
        change(directory, name)

    monkeypatch.setattr(files, "point_current_at", late)
    rebuilder._store.mend(DamagedBook(page.name, page.inode, "for this test"), 1)
    assert names(rebuilder) == ["qwen"]


def test_a_lost_race_is_noticed_before_the_roster_is_written(new_owner_here, monkeypatch):
    """In a crowd, most first attempts to write the book are lost. If the roster were written before
    the check, each lost attempt would write the roster twice.
    """
    ledger, other, runs, written = new_owner_here(), new_owner_here(), [], []
    write = ledger._store._write_roster
    monkeypatch.setattr(
        ledger._store, "_write_roster", lambda *now: written.append(now) or write(*now)
    )

    def decide(book):
        runs.append(1)
        if len(runs) == 1:
            count(other)
        return book.with_section(section(ledger, "qwen")), None

    ledger.transact(decide)
    assert len(runs) == 2 and len(written) == 1


def while_it_writes(ledger, act):
    """Calls `act` during the next write of `ledger`: after the check for a lost race, and before the
    roster is written.
    """
    store = ledger._store
    draft = store._draft

    def acting(page, new):
        del store._draft
        act()
        return draft(page, new)

    store._draft = acting


def test_a_grant_that_lost_its_race_is_not_in_a_rebuilt_book(new_owner_here):
    """A grant lost its race, but the roster already has it. The second decision grants nothing, so
    the rebuilt book must not have the grant.
    """
    ledger, other, runs = new_owner_here(), new_owner_here(), []

    def decide(book):
        runs.append(1)
        if len(runs) > 1:
            return book, None
        while_it_writes(ledger, lambda: count(other))
        return book.with_section(section(ledger, "ghost")), None

    ledger.transact(decide)
    os.unlink(ledger.path)
    assert len(runs) == 2 and names(ledger) == []


@pytest.fixture
def damaged_once(monkeypatch):
    """Deletes the book when the ledger's first write has lost its race. Another owner then rebuilds
    the book.
    """

    def arrange(ledger, other):
        write, left = ledger._store.put, [1]

        def put_and_lose(page, new):
            try:
                write(page, new)
            except LostRace:
                if left:
                    left.clear()
                    os.unlink(ledger.path)
                    other.read()
                    assert "ghost" in names(other), "it is in the roster"
                raise

        monkeypatch.setattr(ledger._store, "put", put_and_lose)

    return arrange


@pytest.mark.parametrize("races_lost", [1, 2, 3])
@pytest.mark.parametrize("others", ["another's grant", "nobody's"])
def test_a_grant_that_lost_its_race_just_before_the_damage_is_taken_back(
    new_owner_here, damaged_once, others, races_lost
):
    """The rebuilding process finds the grant in the roster, and another owner may have that memory
    by now.

    The grant is also taken back if its owner then loses the race for the new book.
    """
    ledger, other, seen = new_owner_here(), new_owner_here(), []
    put(ledger, "mine")
    damaged_once(ledger, other)

    def decide(book):
        seen.append(ours(book, ledger))
        if len(seen) <= races_lost:
            theirs = f"theirs{len(seen)}"
            act = (
                partial(put, other, theirs)
                if others == "another's grant"
                else partial(count, other)
            )
            while_it_writes(ledger, act)
            return book.with_section(section(ledger, "mine", "ghost")), None
        return book, None

    ledger.transact(decide)
    assert seen == [["mine"]] * (races_lost + 1)
    assert "ghost" not in names(other) and "mine" in names(other)


def test_taking_back_a_void_grant_keeps_the_grant_of_another_thread(new_owner_here, damaged_once):
    """All threads of an owner share one section. A thread whose grant is void takes back only its
    own grant.
    """
    ledger, other = new_owner_here(), new_owner_here()
    put(ledger, "mine")
    damaged_once(ledger, other)
    seen = []

    def beside():
        ledger.transact(
            lambda book: (book.with_section(section(ledger, *ours(book, ledger), "beside")), None)
        )

    def decide(book):
        seen.append(ours(book, ledger))
        if len(seen) == 1:
            while_it_writes(ledger, lambda: count(other))
        if len(seen) == 2:  # in the rebuilt book
            thread = threading.Thread(target=beside)
            thread.start()
            thread.join(PATIENCE)
        return book.with_section(section(ledger, *ours(book, ledger), "ghost")), None

    ledger.transact(decide)
    assert seen == [["mine"], ["mine"], ["mine", "beside"]]
    assert names(other) == ["beside", "ghost", "mine"]


@pytest.mark.parametrize("seen_by_the_other", ["before the copy was taken", "while it decided"])
def test_an_old_copy_is_rejected_by_an_owner_that_saw_nothing_newer(
    new_owner_here, tmp_path, seen_by_the_other
):
    """The owner knows only the state in this copy. The file with the newest revision, the hint,
    shows that the copy is old. Without it the same bytes would be granted again.
    """
    ledger, other, tries = new_owner_here(), new_owner_here(), []
    put(other, "theirs")

    def damage():
        old = copy_of(Path(ledger.path), tmp_path / "old")
        put(ledger, "granted", "since")
        copy_of(old, Path(ledger.path))

    def decide(book):
        tries.append(sorted(lease.name for lease in book.leases()))
        if len(tries) == 1 and seen_by_the_other == "while it decided":
            damage()
        return book.with_section(section(other, "theirs", "wanted")), None

    if seen_by_the_other == "before the copy was taken":
        assert names(other) == ["theirs"]
        damage()
    other.transact(decide)
    assert tries[-1] == ["granted", "since", "theirs"]
    assert names(ledger) == ["granted", "since", "theirs", "wanted"]


@pytest.mark.parametrize("what", ["nothing", "a link", "nonsense", "another book's"])
def test_the_revision_hint_may_be_missing_or_wrong(new_owner_here, tmp_path, what):
    """The hint is a file with the newest revision. The book can be used without it."""
    ledger = new_owner_here()
    put(ledger, "one")
    file = ledger.directory / "newest"
    if what == "nonsense":
        file.write_bytes(b"\xff" * 64)
    elif what == "another book's":
        RevisionHint(ledger.directory).record("book-99.db", 1 << 40)
    else:
        file.unlink()
        if what == "a link":
            (tmp_path / "precious").write_text("kept")
            file.symlink_to(tmp_path / "precious")
    other = new_owner_here()
    put(other, "two")
    put(ledger, "one", "three")
    assert names(other) == ["one", "three", "two"]
    assert what != "a link" or (tmp_path / "precious").read_text() == "kept"


def test_a_second_write_in_a_row_reads_nothing(monkeypatch, new_owner_here):
    """A second write in a row uses the page in memory, since a read takes a third of the time of a
    write.
    """
    ledger, other = new_owner_here(), new_owner_here()
    read, reads = SqliteBook._read, []
    monkeypatch.setattr(SqliteBook, "_read", lambda *args: reads.append(1) or read(*args))
    put(ledger, "one")
    reads.clear()
    put(ledger, "one", "two")
    assert not reads
    put(other, "theirs")
    reads.clear()
    put(ledger, "one")
    assert reads and names(other) == ["one", "theirs"]


def test_a_rebuilt_book_ignores_the_hint_of_an_older_book_with_its_name(new_owner_here):
    """The hint is a file with the newest revision of a book. If it counted for a new book of the
    same name, the new book would be taken as damaged for ever.
    """
    ledger = new_owner_here()
    put(ledger, "one")
    RevisionHint(ledger.directory).record("book-2.db", 1 << 40)
    os.unlink(ledger.path)
    assert names(ledger) == ["one"] and ledger.path.endswith("book-2.db")


def ours(book, ledger):
    return [lease.name for lease in book.sections[ledger.owner.id].leases]


def test_a_deleted_directory_is_made_again(new_owner_here, notebook):
    """`rm -rf` of the ledger loses no lease of a process that uses the ledger again.

    Afterwards that process can be proven alive again.
    """
    ledger = new_owner_here()
    put(ledger, "qwen")
    shutil.rmtree(ledger.directory)
    assert names(ledger) == ["qwen"]
    count(ledger)
    other = notebook()
    assert other.run("ledger.dead(ledger.read())") == "frozenset()"
    assert (
        ledger.read().owner(ledger.owner.id).inode
        == (ledger.directory / "owners" / ledger.owner.id).stat().st_ino
    )
    other.run(f"ledger.ring(['{ledger.owner.id}'])")
    ledger.wait(0)  # reads the notification about the move to the new directory
    other.run(f"ledger.ring(['{ledger.owner.id}'])")
    assert ledger.wait(PATIENCE)


def test_a_deleted_lock_file_is_made_again(new_owner_here):
    """Without the file no process could prove that the owner lives. The section names the inode of
    the new file.
    """
    ledger, other = new_owner_here(), new_owner_here()
    put(ledger, "qwen")
    (ledger.directory / "owners" / ledger.owner.id).unlink()
    count(ledger)
    inode = (ledger.directory / "owners" / ledger.owner.id).stat().st_ino
    assert other.read().owner(ledger.owner.id).inode == ledger.owner.inode == inode
    ledger.close()
    assert other.dead(other.read()) == {ledger.owner.id}


def test_a_roster_that_cannot_be_written_during_a_rebuild_is_a_ledger_error(
    new_owner_here, monkeypatch
):
    """In an earlier version, any call of the ledger could raise the OSError of the owner's files as
    it is.
    """
    ledger = new_owner_here()
    page = ledger._store.look()

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ledger._store, "_ensure_own_files", full)
    with pytest.raises(LedgerUnavailable, match="is full"):
        ledger._store.mend(DamagedBook(page.name, page.inode, "for this test"), 1)
    monkeypatch.undo()
    assert ledger.read() is not None


def test_a_book_that_two_owners_find_damaged_is_rebuilt_once(new_owner_here):
    """When the second owner gets the lock, it sees that there is a new book already."""
    ledger, other = new_owner_here(), new_owner_here()
    page = ledger._store.look()
    damage = DamagedBook(page.name, page.inode, "for this test")
    ledger._store.mend(damage, 1)
    other._store.mend(damage, 1)
    other.read()
    assert Path(other.path).name == "book-2.db"


def test_another_process_finishes_an_interrupted_rebuild(new_owner_here):
    """The killed process had written the name of a new book into CURRENT, but had not made that
    book.
    """
    ledger = new_owner_here()
    put(ledger, "qwen")
    files.point_current_at(ledger.directory, "book-2.db")
    assert names(ledger) == ["qwen"]
    assert Path(ledger.path).name == "book-3.db"


def test_a_half_written_roster_falls_back_to_the_previous_one(new_owner_here):
    """A roster is half written, because the disk was full or the file was damaged. Then the last
    complete roster counts.
    """
    ledger = new_owner_here()
    put(ledger, "qwen")
    put(ledger, "qwen", "llama")
    owner_file = ledger._store.owner_file
    os.pwrite(owner_file._fd, b"x" * 40, owner_file._turn % 2 * owner_file.SLOT_BYTES + 60)
    os.unlink(ledger.path)
    assert names(ledger) == ["qwen"]


def test_a_roster_that_is_written_while_it_is_read_is_ignored():
    """The first roster of a file is written to the second slot of the file, and leaves zeros in the
    first slot.

    A reader may read one slot before and one slot after that write. It then gets zeros with a right
    checksum.
    """

    class Growing:
        size = 0

        def seek(self, offset: int) -> None: ...

        def read(self, count: int) -> bytes:
            size, self.size = self.size, 4096
            return b"\0" * min(count, size)

    assert liveness._slot(Growing(), 0) is None


def test_reaping_an_owner_that_another_process_just_reaped_decides_again(new_owner_here, notebook):
    """An owner that opened the ledger has removed the file that proved the death.

    The decision was right when it was made, so it is only repeated.
    """
    ledger, other, dead, seen = new_owner_here(), new_owner_here(), notebook(), []
    dead.run("put(ledger, 'qwen')")
    dead.kill()

    def reap(book):
        seen.append([lease.name for lease in book.leases()])
        if len(seen) == 1:
            without(other, dead.id)
            new_owner_here()
        return replace(
            book, sections={id: it for id, it in book.sections.items() if id != dead.id}
        ), None

    ledger.transact(reap)
    assert seen == [["qwen"], []]


def test_an_owner_that_dies_during_a_cleanup_can_be_proven_dead(
    new_owner_here, notebook, monkeypatch
):
    """The dying owner wrote after the cleanup had read the book.

    If the cleanup removed its file, its lease would stay for ever.
    """
    ledger, dying, looked_at = new_owner_here(), notebook(), files.life

    def late(path, inode=0):
        if path.name == dying.id and dying.process.poll() is None:
            dying.run("put(ledger, 'qwen')")
            dying.kill()
        return looked_at(path, inode)

    monkeypatch.setattr(files, "life", late)
    new_owner_here()
    assert ledger.dead(ledger.read()) == {dying.id}


# Places that cannot keep a book


def test_a_book_of_a_newer_schema_is_left_alone(new_owner_here, notebook):
    """A book of a newer schema is not read, rebuilt or moved, and the error says what to do."""
    ledger, path = new_owner_here(), None
    put(ledger, "qwen")
    path = ledger.path
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sqlite3, sys\nwith sqlite3.connect(sys.argv[1]) as db: "
            "db.execute('UPDATE book SET schema=9, rev=rev+1')",
            path,
        ],
        check=True,
    )
    for use in (
        ledger.read,
        lambda: put(ledger, "x"),
        lambda: SqliteLedger(ledger.directory.parent),
    ):
        with pytest.raises(LedgerNewer) as newer:
            use()
        assert (newer.value.path, newer.value.found, newer.value.ours) == (path, 9, SCHEMA)
    assert os.path.exists(path)


def test_a_network_file_system_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "file_system_of", lambda path: "nfs4")
    with pytest.raises(LedgerUnavailable, match=r"network file system \(nfs4\)"):
        SqliteLedger(tmp_path / "ledger")
    assert not (tmp_path / "ledger").exists()


def test_the_default_avoids_a_home_on_a_network_file_system(monkeypatch):
    """Home directories on NFS are common. The default ledger must work there, too."""
    monkeypatch.setattr(files, "file_system_of", lambda path: "nfs4")
    assert default_url("sim") == f"sqlite:///var/tmp/gpu-console-{os.geteuid()}/ledger/sim"


def test_the_default_is_in_the_state_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_url() == f"sqlite://{tmp_path}/gpu-console/ledger"


def test_the_error_names_a_path_that_is_no_directory(tmp_path):
    (tmp_path / "ledger").touch()
    with pytest.raises(LedgerUnavailable, match="cannot be written.*\n.*GPU_LEDGER"):
        SqliteLedger(tmp_path / "ledger")


def test_files_are_private_to_their_user(new_owner_here):
    ledger = new_owner_here()
    put(ledger, "qwen")
    for path in ledger.directory.rglob("*"):
        if not path.is_symlink():
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_doorbell_works_at_a_long_path(tmp_path):
    """The path of a socket is limited to 107 bytes. The path of a home directory can be longer."""
    url = tmp_path / ("x" * 120)
    a, b = SqliteLedger(url), SqliteLedger(url)
    b.ring([a.owner.id])
    assert a.wait(PATIENCE)
    a.close()
    b.close()


def test_books_of_old_boots_are_removed(tmp_path):
    """A directory is removed only if its name is the id of another boot and it is unchanged for a
    day.
    """
    boots = [tmp_path / f"{number}3570074-f799-4d7e-a08f-84fbbe7bb98d" for number in range(3)]
    for boot in (*boots, tmp_path / "notes"):
        (boot / "owners").mkdir(parents=True)
        (boot / "book-1.db").touch()
    long_ago = time.time() - 3 * 86400
    for boot in (boots[0], boots[1], tmp_path / "notes"):
        for path in (boot / "book-1.db", boot / "owners", boot):
            os.utime(path, (long_ago, long_ago))
    (boots[1] / "book-1.db").touch()
    SqliteLedger(tmp_path).close()
    assert [path.exists() for path in (*boots, tmp_path / "notes")] == [False, True, True, True]


FULL_DISK = r"""
mount -t tmpfs -o size=2m none "$1" || exit 77
exec "$2" -c '
import os, sys
from tests.ledgers.conftest import *
from gpu_runtime.errors import LedgerUnavailable
ledger = open_ledger("sqlite://" + sys.argv[1] + "/ledger")
put(ledger, "qwen")
with open(sys.argv[1] + "/junk", "wb", buffering=0) as junk:
    try:
        while junk.write(bytes(4096)): pass
    except OSError: pass
try:
    put(ledger, "qwen", *map(str, range(200)))
except LedgerUnavailable as error:
    assert "is full" in str(error), error
else:
    raise AssertionError("the disk was not full")
assert names(ledger) == ["qwen"]
ledger.transact(lambda book: (book.with_section(section(ledger, counts={"x" * 60000: 1})), None))
assert names(ledger) == [] and not (ledger.directory / "ballast").exists()
os.unlink(sys.argv[1] + "/junk")
put(ledger, "qwen")
assert (ledger.directory / "ballast").exists()
print("released")
' "$1"
"""


def test_a_full_disk_refuses_grants_and_accepts_releases(tmp_path):
    """A release must be written even on a full disk. Otherwise the card would stay full as well."""
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", FULL_DISK, "-", tmp_path, sys.executable],
        capture_output=True,
        text=True,
        cwd=REPO,
        timeout=PATIENCE,
    )
    if (
        done.returncode in (1, 77, 127)
        and "unshare" in done.stderr + done.stdout
        or done.returncode == 77
    ):
        pytest.skip(f"no user namespaces here to mount a small disk in: {done.stderr.strip()}")
    assert done.stdout == "released\n", done.stderr


# Stopped writers, the stop button, many processes at once


@pytest.mark.parametrize("is_stopped", [True, False])
def test_the_error_names_the_writer_that_keeps_the_lock(tmp_path, is_stopped):
    """While a process holds the write lock, no other process can write. The error has the number of
    that process, and how to continue the process if it is stopped.
    """
    ledger = SqliteLedger(tmp_path, patience_seconds=0.3)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sqlite3, sys\ndb = sqlite3.connect(sys.argv[1])\n"
            "db.execute('BEGIN EXCLUSIVE')\nprint('held', flush=True)\nsys.stdin.read()",
            ledger.path,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    expected = f"pid {holder.pid} holds its lock now"
    if is_stopped:
        holder.send_signal(signal.SIGSTOP)
        expected = f"pid {holder.pid} holds its lock and is stopped.*\n.*kill -CONT {holder.pid}"
    with pytest.raises(LedgerUnavailable, match=expected):
        put(ledger, "qwen")
    holder.send_signal(signal.SIGCONT)
    holder.communicate()
    put(ledger, "qwen")
    ledger.close()


def test_the_stop_button_leaves_the_ledger_usable(new_owner_here, notebook):
    """Many interrupts arrive at any instruction. No thread, statement or file keeps a lock
    afterwards.
    """
    ledger, other = new_owner_here(), notebook()
    dice = random.Random(1)
    caught, counted = [], 0
    deadline = time.monotonic() + PATIENCE
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        while (counted < 400 or len(caught) < 400) and time.monotonic() < deadline:
            try:
                # One signal for each round: a second signal could arrive in the line that catches
                # the first.
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(0.0001, 0.001))
                # The interrupt may be lost: the interpreter ignores it in a destructor.
                end = time.monotonic() + 0.02
                while time.monotonic() < end:
                    count(ledger)
                    counted += 1
                    ledger.wait(0)
                signal.setitimer(signal.ITIMER_REAL, 0)
                time.sleep(0)  # a signal that has arrived by now is raised here
            except KeyboardInterrupt as interrupt:
                caught.append(interrupt)  # kept with its traceback, as IPython keeps the last one
    finally:
        signal.signal(signal.SIGALRM, old)
    assert len(caught) >= 100
    assert other.run("count(ledger)") == "1"
    written = ledger.read().sections[ledger.owner.id].counts["n"]
    assert written >= counted
    assert count(ledger) == written + 1
    os.unlink(ledger.path)
    assert ledger.read().sections[ledger.owner.id].counts == {"n": written + 1}


def test_killed_writers_lose_no_acknowledged_write(new_owner_here, notebook):
    """Writers are killed with SIGKILL at any point of a write. The book stays complete and keeps
    acknowledged writes.
    """
    ledger = new_owner_here()
    for _ in range(6):
        other = notebook()
        other.send("[print(count(ledger), flush=True) for _ in range(100000)]")
        last = 0
        deadline = time.monotonic() + 0.15
        while time.monotonic() < deadline:
            last = int(other.answer())
        other.kill()
        book = ledger.read()
        assert book.sections[other.id].counts["n"] >= last
        without(ledger, other.id)
    assert Path(ledger.path).name == "book-1.db"


def test_a_kernel_that_keeps_the_gil_delays_nobody(new_owner_here, notebook):
    """The kernel loads a library or copies a model with the GIL, while its monitor thread is
    executing a statement.
    """
    ledger, other = new_owner_here(), notebook()
    put(ledger, "qwen")
    other.run("looping(ledger)")
    wrote_meanwhile = 0
    for _ in range(8):
        other.send(f"[print('begun', flush=True), keep_the_gil({scaled(0.4)})]")
        assert other.answer() == "begun"
        count(ledger)
        wrote_meanwhile += not other.has_answered()
        assert other.answer()
    assert wrote_meanwhile > 4, "the kernel still keeps the GIL"


def test_processes_lose_no_increment(notebook):
    others = [notebook() for _ in range(4)]
    for other in others:
        other.send("[count(ledger) for _ in range(200)][-1]")
    assert [other.answer() for other in others] == ["200"] * 4


def test_the_death_of_an_owner_wakes_a_waiting_one(new_owner_here, notebook):
    """A killed process sends no notification. If nothing watched for deaths, its memory would be
    noticed only at the next poll.
    """
    a, other, bystander = new_owner_here(), notebook(), notebook()
    ends = [
        replace(a.owner, pid=one.process.pid, started=_started(one)) for one in (other, bystander)
    ]
    other.signal(signal.SIGSTOP)
    assert not a.wait(0.05, ends), "a stopped process is alive"
    threading.Timer(0.05, other.kill).start()
    assert a.wait(PATIENCE, ends)
    assert not a.wait(0.05, ends), "once is enough"


def test_a_process_that_cannot_be_seen_wakes_a_waiting_owner_once(new_owner_here):
    """An owner's process that cannot be seen may have ended just before, or may be in another
    container. In the second case, a poll every second must be enough.
    """
    a = new_owner_here()
    unseen = [replace(a.owner, pid=2**22 + 1), replace(a.owner, serial=99, started=1)]
    assert a.wait(0, unseen)
    assert not a.wait(0.05, unseen)


def _started(other: Notebook) -> int:
    return start_ticks(Path(f"/proc/{other.process.pid}/stat").read_text())


# A directory that is deleted or moved while its owners live


@pytest.fixture
def closed_clock(monkeypatch):
    """A clock for the period without grants, and the sleeps of writers that wait for its end.

    During each sleep the functions in `meanwhile` are called. They do what the living owners do
    within a tick of their monitors.
    """
    now, meanwhile, slept = [1e6], [], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds
        for act in meanwhile:
            act()

    monkeypatch.setattr("gpu_runtime.ledgers.book_store.sleep", sleep)
    for module in ("sqlite.page", "sqlite.recovery"):
        monkeypatch.setattr(f"gpu_runtime.ledgers.{module}.boottime", lambda: now[0])
    return meanwhile, slept


def promise(ledger, gib: int) -> None:
    """Reserves `gib` GiB for a model that is not loaded yet, if the limit of 8 GiB allows it."""

    def decide(book):
        book = book if book.limits else replace(book, limits={"sim:0": 8 * GIB})
        if book.claims().get("sim:0", 0) + gib * GIB > book.limits["sim:0"]:
            return book, None
        target = replace(lease(ledger, "new"), shares=(), target=(Share("sim:0", gib * GIB),))
        base = book if ledger.owner.id in book.sections else book.with_section(section(ledger))
        return base.with_lease(target), None

    ledger.transact(decide)


def put_back(ledger, *names: str, gib: int) -> None:
    """Does what the owner's monitor does within a second: if the owner is missing in the book, it
    registers again.
    """
    if ledger.owner.id not in ledger.read().sections:
        put(ledger, *names, gib=gib)


VANISH = {
    "deleted": lambda directory: shutil.rmtree(directory),
    "deleted with all above": lambda directory: shutil.rmtree(directory.parent),
    "moved": lambda directory: directory.rename(directory.with_name("elsewhere")),
}


# A newcomer cannot know that a directory was moved away, until its owners make it anew.
VANISHED = [(how, knows) for how in VANISH for knows in ("what it holds", "nothing of it")]
VANISHED += [("deleted", "a newcomer"), ("deleted with all above", "a newcomer")]


@pytest.mark.parametrize(("how", "knows"), VANISHED)
def test_a_directory_that_vanishes_grants_no_byte_twice(new_owner_here, closed_clock, how, knows):
    """In an earlier version, 10 GiB of 7.2 GiB were granted 0.01 s after the directory had
    vanished.
    """
    meanwhile, slept = closed_clock
    ledger, other = new_owner_here(), new_owner_here()
    put(other)
    ledger.transact(lambda book: (replace(book, limits={"sim:0": 8 * GIB}), None))
    put(ledger, "qwen", gib=6)
    if knows == "what it holds":
        other.read()
    VANISH[how](ledger.directory)
    if knows == "a newcomer":
        other = new_owner_here()
    meanwhile.append(lambda: put_back(ledger, "qwen", gib=6))
    promise(other, gib=4)
    assert other.read().claims() == ledger.read().claims() == {"sim:0": 6 * GIB}
    promise(other, gib=2)
    assert ledger.read().claims() == {"sim:0": 8 * GIB}
    assert 1 <= sum(slept) < 5, "grants were closed for a while"
    slept.clear()
    promise(new_owner_here(), gib=0)
    assert sum(slept) == 0, "only once"


def test_a_shared_directory_that_vanishes_grants_no_byte_twice(
    new_owner_here, closed_clock, tmp_path
):
    """The sockets of its owners are beside the directory of the boot. In an earlier version a new
    owner looked for them in it, found none, and was granted the same bytes at once.
    """
    meanwhile, slept = closed_clock
    share(tmp_path / "ledger")
    ledger = new_owner_here()
    put(ledger, "qwen", gib=6)
    for place in (ledger.directory, owners_in(ledger.directory)):
        shutil.rmtree(place)
    newcomer = new_owner_here()
    meanwhile.append(lambda: put_back(ledger, "qwen", gib=6))
    promise(newcomer, gib=4)
    assert newcomer.read().claims() == {"sim:0": 6 * GIB}
    assert slept, "grants were closed for a while"


def test_a_rebuilt_shared_book_has_no_ticket_of_an_owner_that_is_proven_dead(
    new_owner_here, closed_clock, tmp_path
):
    """An unlocked file beside the directory of the boot is the proof. In an earlier version the
    proof was not found, and nothing was granted for a while.
    """
    _, slept = closed_clock
    share(tmp_path / "ledger")
    ledger, dead = new_owner_here(), new_owner_here()
    dead.transact(lambda book: (book.with_ticket(ticket(dead, "t")), None))
    dead.close()
    assert [one.key for one in ledger.read().tickets] == ["t"]
    Path(ledger.path).unlink()
    promise(ledger, gib=1)
    assert ledger.read().tickets == () and slept == []


def test_facts_are_written_at_once_while_grants_are_closed(new_owner_here, closed_clock):
    """While no grants are given, a release, a settled load and a request are still written at once."""
    _, slept = closed_clock
    ledger = new_owner_here()
    put(ledger, "qwen")
    shutil.rmtree(ledger.directory)
    put(ledger, "llama")
    ledger.transact(lambda book: (book.with_ticket(ticket(ledger, "t")), None))
    assert slept == [] and names(ledger) == ["llama"]
    promise(ledger, gib=1)
    assert slept


def test_a_new_directory_grants_at_once(new_owner_here, closed_clock):
    _, slept = closed_clock
    promise(new_owner_here(), gib=1)
    promise(new_owner_here(), gib=1)
    assert slept == []


def test_a_damaged_book_beside_all_rosters_grants_at_once(new_owner_here, closed_clock):
    """All rosters are readable, so no owner can be missing in the rebuilt book."""
    _, slept = closed_clock
    ledger, other = new_owner_here(), new_owner_here()
    put(ledger, "qwen")
    Path(ledger.path).unlink()
    promise(other, gib=1)
    assert slept == [] and names(other) == ["new", "qwen"]


def test_an_owner_without_files_keeps_what_was_last_seen_of_it(new_owner_here, closed_clock):
    """If the files of an owner are gone, its leases stay until the owner registers again or is
    proven dead.
    """
    ledger, other = new_owner_here(), new_owner_here()
    put(ledger, "qwen")
    other.read()
    shutil.rmtree(ledger.directory)
    assert names(other) == ["qwen"]
    assert other.dead(other.read()) == frozenset()
    assert names(ledger) == ["qwen"]
    assert (ledger.directory / "owners" / ledger.owner.id).exists(), "it can be proven alive"
