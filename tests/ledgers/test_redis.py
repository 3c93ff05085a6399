"""Tests that need a real Redis: lost data, unsafe options, and several hosts that share the server.

The page is the stored book of a host. Each owner (a process in the book) keeps a copy of its
section of the page in a local file, its roster. A lost page is rebuilt from the rosters.
"""

import copy
import errno
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpu_runtime.errors import BadSetting, LedgerNewer, LedgerRefused, LedgerUnavailable
from gpu_runtime.facts import SCHEMA, Declared, Holdings, Section, Share
from gpu_runtime.ledgers import open_ledger
from gpu_runtime.ledgers.liveness import OwnerFile, read_roster
from gpu_runtime.ledgers.redis import ledger as redis_ledger
from gpu_runtime.ledgers.redis import page as redis_page
from tests.clock import PATIENCE, until
from tests.redis_server import redis_server

from .conftest import GIB, count, lease, names, put, section, ticket, without


@pytest.fixture
def url(redis) -> str:
    return redis.fresh()


@pytest.fixture
def new_owner_here(url, open_at):
    """Opens the same book as a new owner at each call, in this process."""
    return lambda: open_at(url)


@pytest.fixture
def own():
    """A Redis server for one test alone, which may kill it or copy its files.

    With `everysec`, it holds its writes back for up to two seconds while the disk is slow.
    """
    with redis_server("--appendfsync", "always") as server:
        yield server


def page_of(ledger) -> str:
    return f"gpu-console:page:{ledger.owner.boot}"


def with_book(page, book):
    """The `page`, as if `book` had been read."""
    pieces = copy.copy(page.pieces)
    pieces.book = book
    return page._replace(pieces=pieces)


def promise(ledger, gib: int) -> None:
    """Reserves `gib` GiB for a model that is not loaded yet."""

    def decide(book):
        target = replace(lease(ledger, "new"), shares=(), target=(Share("sim:0", gib * GIB),))
        book = book if book.limits else replace(book, limits={"sim:0": 8 * GIB})
        base = book if ledger.owner.id in book.sections else book.with_section(section(ledger))
        return base.with_lease(target), None

    ledger.transact(decide)


# Lost data


def test_an_emptied_redis_may_first_get_what_an_owner_keeps_beside_the_book(new_owner_here, redis):
    """The key is ours, although the marker of our databases is lost: else no process could use the Redis again."""
    ledger = new_owner_here()
    put(ledger, "qwen")
    redis.cli("FLUSHDB", database=redis.databases)
    ledger.publish_names({"llama": Declared(1, 10)})
    assert names(ledger) == ["qwen"] == names(new_owner_here())


def test_a_write_is_a_sign_of_life(new_owner_here):
    """A notebook that began a cell after a pause counted as blocked, until its next sign."""
    ledger = new_owner_here()
    os.utime(ledger._store.owner_file.path, (0, 0))
    put(ledger, "m")
    [silence] = ledger.silences(ledger.read()).values()
    assert silence < 3600


@pytest.mark.parametrize("fsync", ["everysec", "always"])
def test_a_killed_redis_loses_no_acknowledged_write(open_at, fsync):
    """If Redis is started again within half a second, no writer notices. A busy machine takes longer."""
    with redis_server("--appendfsync", fsync) as server:
        ledger, newest = open_at(server.fresh()), [0]
        ended = threading.Event()

        def write() -> None:
            while not ended.is_set():
                with suppress(LedgerUnavailable):
                    newest[0] = count(ledger)

        def seen() -> int:
            with suppress(LedgerUnavailable):
                return ledger.read().sections[ledger.owner.id].counts["n"]
            return -1

        writer = threading.Thread(target=write)
        writer.start()
        until(lambda: newest[0])
        for _ in range(3):
            server.kill()
            before = newest[0]
            server.start()
            assert until(lambda: max(0, seen())) >= before
            until(lambda before=before: newest[0] > before, "the writer goes on")
        ended.set()
        writer.join(PATIENCE)


def test_a_redis_restored_from_an_older_copy_is_repaired_by_the_living_owners(
    own, open_at, notebook
):
    """Redis starts again with older data. No grant that was made since then may be made twice."""
    url = own.fresh()
    ledger, other = open_at(url), notebook(url)
    other.run("put(ledger, 'llama')")
    old = Path(f"{own.directory}-old")
    shutil.copytree(own.directory, old, ignore=shutil.ignore_patterns("*.sock"))
    put(ledger, "qwen")
    ledger.transact(lambda book: (book.with_ticket(ticket(ledger, "mine")), None))
    own.kill()
    shutil.copytree(old, own.directory, dirs_exist_ok=True)
    shutil.rmtree(old)
    own.start()
    assert other.run("names(ledger)") == "['llama', 'qwen']"
    assert [one.key for one in ledger.read().tickets] == ["mine"]
    assert own.cli("KEYS", "gpu-console:damaged:*", database=1), "the old page is kept"


def test_a_dead_owner_that_an_older_copy_brings_back_is_removed_again(own, open_at, notebook):
    """A dead owner's lease comes back with an older copy of the data. In an earlier version it
    stayed for ever: the lock file that proves the owner's death had been removed with the owner.
    """
    url = own.fresh()
    ledger, other = open_at(url), notebook(url)
    other.run("put(ledger, 'llama')")
    old = Path(f"{own.directory}-old")
    shutil.copytree(own.directory, old, ignore=shutil.ignore_patterns("*.sock"))
    other.kill()
    without(ledger, other.id)
    open_at(url)  # sweeps the file
    assert not (ledger.directory / "owners" / other.id).exists()
    own.kill()
    shutil.copytree(old, own.directory, dirs_exist_ok=True)
    shutil.rmtree(old)
    own.start()
    assert names(ledger) == ["llama"]
    assert ledger.dead(ledger.read()) == {other.id}
    without(ledger, other.id)
    assert names(ledger) == []


def test_a_page_that_went_back_in_a_running_redis_is_noticed_by_an_owner_that_saw_no_newer_one(
    new_owner_here, redis
):
    """An operator restores an older copy of the page. Its revision is the last one that an owner has read."""
    ledger, other = new_owner_here(), new_owner_here()
    put(ledger, "qwen")
    redis.cli("COPY", page_of(ledger), "older", database=redis.databases)
    put(other, "llama")
    redis.cli("COPY", "older", page_of(ledger), "REPLACE", database=redis.databases)
    found = ledger.transact(lambda book: (book, sorted(one.name for one in book.leases())))
    assert found == ["llama", "qwen"]


def test_commands_share_a_connection(redis, open_at):
    """A new one for each command would take most of the time of a read."""
    made = lambda: re.search(r"total_connections_received:(\d+)", redis.cli("INFO", "stats"))[1]
    one = open_at(redis.fresh())
    count(one)
    before = int(made())
    for _ in range(5):
        count(one)
    assert int(made()) == before + 1, "that of redis-cli"


def test_a_write_that_is_taken_back_waits_until_grants_continue(new_owner_here, redis):
    """Redis is emptied while an owner takes a grant back. The owner's grant is restored first, and
    then taken back.
    """
    ledger = new_owner_here()
    promise(ledger, gib=2)
    emptied = []

    def gives_up(book):
        if not emptied:
            emptied.append(1)
            redis.cli("FLUSHDB", database=redis.databases)
        return book.with_section(section(ledger)), None

    ledger.transact(gives_up)
    assert emptied and names(ledger) == []


@pytest.mark.parametrize(("owners", "seconds"), [(1, 2.0), (60, 20.0)])
def test_the_closed_period_of_a_page_made_again_grows_with_its_owners(
    new_owner_here, redis, owners, seconds
):
    """With more owners, each owner's monitor runs less often. So it takes longer until all owners
    have registered.
    """
    ledger = new_owner_here()
    others = [replace(ledger.owner, pid=ledger.owner.pid + n) for n in range(1, owners)]
    sections = {other.id: Section(other) for other in others}
    put(ledger, "qwen")
    store = ledger._store
    book = replace(ledger.read(), sections=ledger.read().sections | sections)
    store._page = with_book(store._page, book)
    redis.cli("FLUSHDB", database=redis.databases)
    ledger.read()
    opens = float(redis.cli("HGET", page_of(ledger), "opens", database=redis.databases))
    now = float(redis.cli("TIME", database=redis.databases).split()[0])
    assert opens - now == pytest.approx(seconds, abs=1.5)


def test_a_flushed_redis_is_rebuilt_from_the_living_owners(
    new_owner_here, url, notebook, redis, caplog
):
    """A flush loses no lease of a living owner and grants no byte twice. Dead owners stay removed."""
    ledger, other, dead = new_owner_here(), notebook(url), notebook(url)
    dead.run("put(ledger, 'ghost')")
    other.run("put(ledger, 'llama', gib=6)")
    put(ledger, "qwen")
    ledger.transact(
        lambda book: (
            replace(book, limits={"sim:0": 8 * GIB}).with_ticket(ticket(ledger, "mine")),
            None,
        )
    )
    dead.kill()
    redis.cli("FLUSHDB", database=redis.databases)
    with caplog.at_level(logging.WARNING, "gpu_runtime"):
        newcomer = new_owner_here()
    assert names(newcomer) == ["llama", "qwen"]
    assert [one.key for one in newcomer.read().tickets] == ["mine"]
    assert "2 living owners, 2 leases" in caplog.text
    with pytest.raises(LedgerRefused, match="law 1"):
        promise(newcomer, gib=2)
    put(ledger)
    promise(newcomer, gib=2)
    assert other.run("count(ledger)") == "1"


def test_a_flush_under_many_writers_loses_nothing(redis, url, notebook, new_owner_here):
    """Redis is flushed five times while four processes write."""
    others = [notebook(url) for _ in range(4)]
    for other in others:
        other.send("reach(ledger, 600)")
    for _ in range(5):
        time.sleep(0.05)  # let them write; no condition is awaited
        redis.cli("FLUSHDB", database=redis.databases)
    assert [other.answer() for other in others] == ["none lost"] * 4
    assert [one.counts for one in new_owner_here().read().sections.values()] == [{"n": 600}] * 4


def test_a_grant_whose_write_failed_is_taken_back(new_owner_here, redis, monkeypatch):
    """The grant was already in the roster when the page was lost. So it is in the rebuilt page, and
    must be taken back.
    """
    ledger, other, runs, flushed = new_owner_here(), new_owner_here(), [], []
    put(ledger, "qwen")
    put(other)
    other.transact(lambda book: (book.with_ticket(ticket(other, "theirs")), None))
    run = ledger._store._run

    def lose_the_page(what, *more):
        if what == "write" and not flushed:
            flushed.append(1)
            redis.cli("FLUSHDB", database=redis.databases)
            assert names(other) == ["ghost", "qwen"]
            count(other)
        return run(what, *more)

    def decide(book):
        runs.append(names(other))
        return (
            book.with_section(section(ledger, "qwen", "ghost")) if len(runs) == 1 else book
        ), None

    monkeypatch.setattr(ledger._store, "_run", lose_the_page)
    ledger.transact(decide)
    assert len(runs) == 2 and names(other) == names(ledger) == names(new_owner_here()) == ["qwen"]
    assert [one.key for one in other.read().tickets] == ["theirs"], "others wait as before"


def test_on_a_full_disk_bytes_are_released_and_nothing_is_granted(
    new_owner_here, redis, monkeypatch
):
    """The copy in the owner's file then claims too much, until the file can be written again."""
    ledger, other = new_owner_here(), new_owner_here()
    put(other)
    put(ledger, "qwen", "llama")
    write = OwnerFile.write_roster

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(OwnerFile, "write_roster", full)
    put(ledger, "qwen")
    assert names(other) == names(ledger) == ["qwen"]
    with pytest.raises(LedgerUnavailable, match="the disk of the ledger .* is full"):
        put(ledger, "qwen", "new")
    redis.cli("FLUSHDB", database=redis.databases)
    assert names(other) == ["llama", "qwen"], "from the file"
    monkeypatch.setattr(OwnerFile, "write_roster", write)
    assert names(ledger) == names(other) == ["qwen"], "the owner knows that it has released llama"


def test_a_page_that_two_owners_find_gone_is_made_once(new_owner_here, redis, monkeypatch):
    """Both owners notice that the page is gone, and one makes it again. The other one must not
    replace the new page by the page that it read before.
    """
    ledger, other, read = new_owner_here(), new_owner_here(), []
    put(ledger, "qwen")
    put(other, "llama")
    redis.cli("FLUSHDB", database=redis.databases)
    living = ledger._store._living

    def read_early():
        read.append(living())
        if len(read) == 1:
            put(other, "llama", "third")
        return read[-1]

    monkeypatch.setattr(ledger._store, "_living", read_early)
    assert names(ledger) == names(other) == ["llama", "qwen", "third"]


def test_a_grant_in_a_replaced_page_is_void(new_owner_here, redis):
    """A page with the same revision but another generation is another page. So the write is decided
    again.
    """
    ledger, runs = new_owner_here(), []

    def decide(book):
        runs.append(1)
        if len(runs) == 1:
            redis.cli("HSET", page_of(ledger), "generation", "another", database=redis.databases)
        return book.with_section(section(ledger, "qwen")), None

    ledger.transact(decide)
    assert len(runs) == 2 and names(new_owner_here()) == ["qwen"]


def test_an_empty_redis_grants_nothing_until_owners_had_time_to_register(
    redis, open_at, monkeypatch
):
    """Owners in other containers may live, and their rosters (copies of their sections in files)
    cannot be read from here. Until they have registered, only facts are written.
    """
    monkeypatch.setattr("gpu_runtime.ledgers.redis.page.REGISTER_SECONDS", 3600.0)
    ledger = open_at(redis.empty())
    other = open_at(f"unix://{redis.socket}?db={redis.databases}")
    ledger.patience_seconds = other.patience_seconds = PATIENCE

    def opens() -> float:
        return float(redis.cli("HGET", page_of(ledger), "opens", database=redis.databases))

    put(ledger, "mine")
    assert time.time() < opens(), "a fact was written meanwhile"
    first = time.time() + 0.5  # the hour is cut short
    redis.cli("HSET", page_of(ledger), "opens", str(first), database=redis.databases)
    promise(ledger, gib=1)
    assert time.time() >= first
    promise(other, gib=1)
    assert opens() == first, "only once"


def test_owners_of_another_directory_register_again(redis, url, open_at, tmp_path):
    """Two containers of one host do not see each other's rosters. Owners of both are in the page
    that is made again.
    """
    one, two = open_at(f"{url}&owners={tmp_path}/one"), open_at(f"{url}&owners={tmp_path}/two")
    put(one, "qwen")
    put(two, "llama")
    put(two, "llama")
    redis.cli("FLUSHDB", database=redis.databases)
    assert names(one) == ["qwen"]
    assert names(two) == ["llama", "qwen"]
    put(one, "qwen", "third")
    assert names(two) == ["llama", "qwen", "third"]


GARBLED = {
    "its body": ("HSET", "{}", "rev", "9", "body", "["),
    "its revision": ("HSET", "{}", "rev", "x"),
    "its generation": ("HDEL", "{}", "generation"),
    "an older revision": ("HSET", "{}", "rev", "1"),
    "another generation": ("HSET", "{}", "generation", "x", "rev", "1"),
    "gone": ("DEL", "{}"),
}


@pytest.mark.parametrize("how", GARBLED)
def test_a_garbled_page_is_set_aside_and_made_again(new_owner_here, redis, how):
    ledger, other = new_owner_here(), new_owner_here()
    put(ledger, "qwen")
    put(other, "llama")
    redis.cli(*(word.format(page_of(ledger)) for word in GARBLED[how]), database=redis.databases)
    assert names(ledger) == ["llama", "qwen"]
    put(other)
    assert names(new_owner_here()) == ["qwen"]
    kept = redis.cli("KEYS", "gpu-console:damaged:*", database=redis.databases)
    assert bool(kept) == (how != "gone")


def test_a_page_that_is_too_large_is_not_read(new_owner_here, redis):
    ledger = new_owner_here()
    put(ledger, "qwen")
    redis.cli(
        "EVAL",
        "local body = redis.call('HGET', KEYS[1], 'body')"
        "redis.call('HSET', KEYS[1], 'rev', 9, 'body', body .. string.rep(' ', 5000000))",
        "1",
        page_of(ledger),
        database=redis.databases,
    )
    assert names(ledger) == ["qwen"]
    assert redis.cli("KEYS", "gpu-console:damaged:*", database=redis.databases)


def test_a_deleted_directory_of_the_owners_is_made_again(new_owner_here, url, notebook):
    """`rm -rf` of the local files loses no lease. Afterwards the owner of the files can be proven
    alive again.
    """
    ledger = new_owner_here()
    put(ledger, "qwen")
    shutil.rmtree(ledger.directory)
    assert names(ledger) == ["qwen"]
    count(ledger)
    other = notebook(url)
    assert other.run("ledger.dead(ledger.read())") == "frozenset()"
    assert (
        ledger.read().owner(ledger.owner.id).inode
        == (ledger.directory / "owners" / ledger.owner.id).stat().st_ino
    )


def test_a_forgotten_script_is_loaded_again_after_a_check(new_owner_here, redis):
    """Redis forgets scripts when it starts again. So the page is first compared with the rosters,
    and then the script is loaded again.
    """
    ledger, idle = new_owner_here(), new_owner_here()
    put(ledger, "qwen")
    put(ledger, "qwen", "llama")
    old = idle.read()
    redis.cli("SCRIPT", "FLUSH")
    redis.cli("HSET", page_of(ledger), "rev", "1", "body", '{"schema":1}', database=redis.databases)
    page = with_book(idle._store._page, replace(old, sections={}))
    idle._store._page, idle._store._least_rev = page._replace(rev=1), 1
    count(idle)
    assert names(idle) == ["llama", "qwen"]


# Options and databases


@pytest.mark.parametrize(
    ("options", "because"),
    [
        (("--appendonly", "no"), "config set appendonly yes"),
        (("--maxmemory-policy", "allkeys-lru"), "config set maxmemory-policy noeviction"),
    ],
)
def test_a_redis_that_may_lose_data_is_refused_with_the_option_to_set(
    own, open_at, options, because
):
    """A Redis whose options may lose data is refused for a new owner. An open ledger refuses it,
    too, if Redis starts again with such options.
    """
    url = own.fresh()
    ledger = open_at(url)
    put(ledger, "qwen")
    own.kill()
    own.start(*options)
    for use in (lambda: open_ledger(url), ledger.read, lambda: put(ledger)):
        with pytest.raises(LedgerUnavailable, match=because):
            use()
    own.kill()
    own.start()
    assert names(ledger) == ["qwen"]


def test_a_database_with_other_keys_is_refused(redis, open_at):
    url = redis.empty()
    redis.cli("SET", "theirs", "1", database=redis.databases)
    with pytest.raises(
        LedgerUnavailable,
        match=r"not ours: it holds keys of something else.*\n.*GPU_LEDGER=redis://",
    ):
        open_at(url)
    assert redis.cli("KEYS", "*", database=redis.databases) == "theirs"


def test_a_key_that_is_no_page_is_refused(new_owner_here, redis):
    ledger = new_owner_here()
    redis.cli("DEL", page_of(ledger), database=redis.databases)
    redis.cli("SET", page_of(ledger), "theirs", database=redis.databases)
    with pytest.raises(LedgerUnavailable, match="gpu-console:page:.* is no page of ours|WRONGTYPE"):
        ledger.read()
    with pytest.raises(LedgerUnavailable, match="gpu-console:page:.* is no page of ours"):
        new_owner_here()


def test_a_page_of_version_0_2_is_made_again_once_nobody_uses_it(new_owner_here, redis):
    """That version wrote another format. Its owners' bytes cannot be read, so nothing is granted."""
    ledger = new_owner_here()
    put(ledger, "qwen")
    key = page_of(ledger)
    redis.cli("HSET", key, "schema", "2", "body", "{}", "rev", "7", database=redis.databases)
    with pytest.raises(LedgerUnavailable, match="older version .*, used by a process in the last"):
        new_owner_here()
    seen = int(redis.cli("HGET", key, "seen", database=redis.databases))
    redis.cli("HSET", key, "seen", str(seen - 121), database=redis.databases)
    assert names(new_owner_here()) == ["qwen"] == names(ledger)


@pytest.mark.parametrize(("change", "because"), [
    ({"schema": 2}, r"older version of gpu-console, used by pid \d+"),
    ({"payload": b"torn"}, r"the file of pid (\d+), .*, cannot be read.\n  .* kill \1"),
])  # fmt: skip
def test_nothing_is_granted_while_the_bytes_of_a_living_owner_are_unknown(
    new_owner_here, redis, monkeypatch, change, because
):
    """Its part of a lost page is in its own file, which cannot be read."""
    ledger, other = new_owner_here(), new_owner_here()
    put(ledger, "qwen")
    redis.cli("FLUSHDB", database=redis.databases)
    with monkeypatch.context() as patch:
        patch.setattr(
            redis_page,
            "read_roster",
            lambda path: (found := read_roster(path)) and found._replace(**change),
        )
        with pytest.raises(LedgerUnavailable, match=because):
            other.read()
    assert names(other) == ["qwen"]


def test_a_page_of_a_newer_schema_is_left_alone(new_owner_here, redis):
    ledger = new_owner_here()
    put(ledger, "qwen")
    redis.cli("HSET", page_of(ledger), "schema", "9", "rev", "99", database=redis.databases)
    for use in (ledger.read, lambda: put(ledger, "x"), new_owner_here):
        with pytest.raises(LedgerNewer) as newer:
            use()
        assert (newer.value.path, newer.value.found, newer.value.ours) == (ledger.url, 9, SCHEMA)
    assert redis.cli("HGET", page_of(ledger), "schema", database=redis.databases) == "9"


# Connections


def test_a_redis_that_does_not_answer_raises_and_is_used_again_later(own, open_at):
    """One clear error is raised. Leases remain, and the ledger works again when the
    Redis server works.
    """
    ledger = open_at(own.fresh())
    put(ledger, "qwen")
    own.kill()
    with pytest.raises(
        LedgerUnavailable, match="does not answer .*Leases that exist remain valid.\n.*GPU_LEDGER"
    ):
        put(ledger)
    own.start()
    assert names(ledger) == ["qwen"]
    put(ledger)


def test_a_stopped_redis_does_not_block_for_ever(own, open_at):
    ledger = open_at(own.fresh())
    own.process.send_signal(signal.SIGSTOP)
    with pytest.raises(LedgerUnavailable, match="does not answer"):
        ledger.read()
    own.process.send_signal(signal.SIGCONT)
    count(ledger)


def test_a_cut_connection_is_made_again(new_owner_here, redis):
    ledger = new_owner_here()
    put(ledger, "qwen")
    redis.cli("CLIENT", "KILL", "TYPE", "normal")
    assert count(ledger) == 1


def test_a_write_whose_answer_was_lost_is_not_made_twice(new_owner_here, monkeypatch):
    """The connection breaks after a write, before its answer arrives. The write is not made a
    second time.
    """
    from redis.exceptions import ConnectionError

    ledger = new_owner_here()
    count(ledger)
    connection = ledger._store._server._connection
    answer, broken = connection.read_response, []

    def break_once(*args, **more):
        reply = answer(*args, **more)
        if reply == [b"written"] and not broken:
            broken.append(reply)
            connection.disconnect()
            raise ConnectionError("cut")
        return reply

    monkeypatch.setattr(connection, "read_response", break_once)
    assert count(ledger) == 2
    assert broken and ledger.read().sections[ledger.owner.id].counts == {"n": 2}


def test_passwords_are_never_shown(open_at, caplog):
    with redis_server("--requirepass", "s3cret") as server:
        ledger = open_at(f"unix://:s3cret@{server.socket}")
        assert "s3cret" not in ledger.url + str(ledger.directory)
        server.kill()
        errors = []
        for use in (
            ledger.read,
            lambda: open_ledger("redis://:s3cret@127.0.0.1:1/0"),
            lambda: open_ledger("redis://:s3cret@127.0.0.1:port/0"),
            lambda: open_ledger("redis://:s3cret@127.0.0.1/0?nonsense=1"),
            lambda: open_ledger("http://:s3cret@127.0.0.1"),
        ):
            with pytest.raises((LedgerUnavailable, BadSetting)) as error:
                use()
            errors.append(error.value)
        server.start()
        for url in (f"unix://{server.socket}", f"unix://:wr0ng@{server.socket}"):
            with pytest.raises(LedgerUnavailable, match="refused this user"):
                open_ledger(url)
        shown = caplog.text + "".join(f"{error} {error.facts}" for error in errors)
        assert "s3cret" not in shown and "***" in shown


# Hosts, life and death


def test_hosts_have_pages_of_their_own(new_owner_here, monkeypatch):
    """Claims count on one host only, and no host reaps owners of another host. Every host can read
    all pages.
    """
    ledger = new_owner_here()
    put(ledger, "qwen", gib=8)
    other_boot = "00000000-0000-0000-0000-000000000000"
    with monkeypatch.context() as patch:
        patch.setattr(redis_ledger, "boot_id", lambda: other_boot)
        other = new_owner_here()
    put(other, "llama", gib=8)
    assert (names(ledger), names(other)) == (["qwen"], ["llama"])
    pages = {page.host: page for page in ledger.read_all()}
    assert {host: [one.name for one in page.book.leases()] for host, page in pages.items()} == {
        ledger.owner.boot: ["qwen"],
        other_boot: ["llama"],
    }
    assert all(page.seen_seconds < 60 and page.name for page in pages.values())
    book = other.read()
    other._shut(remove=False)  # as if it were killed
    assert ledger.dead(book) == frozenset()
    with pytest.raises(LedgerRefused, match="proof of death"):
        from gpu_runtime.ledgers.invariants import refuse_unlawful

        refuse_unlawful(book, replace(book, sections={}), ledger.owner.id, ledger.dead)


def test_owners_in_two_containers_never_have_the_same_id(url, open_at, tmp_path, monkeypatch):
    """In each of two containers, process 7 may have started in the same hundredth of a second.
    Their ids differ all the same.
    """
    me = redis_ledger.describe_self()
    monkeypatch.setattr(redis_ledger, "describe_self", lambda **_: me)
    one, two = open_at(f"{url}&owners={tmp_path}/one"), open_at(f"{url}&owners={tmp_path}/two")
    assert one.owner.id != two.owner.id
    put(one, "qwen")
    put(two, "llama")
    assert names(one) == ["llama", "qwen"]
    two.close()
    assert one.dead(one.read()) == frozenset(), "its file is not here: unknown is not dead"


def test_a_killed_owner_is_proven_dead_and_a_stopped_one_is_not(new_owner_here, url, notebook):
    ledger, other = new_owner_here(), notebook(url)
    other.run("put(ledger, 'qwen')")
    other.signal(signal.SIGSTOP)
    assert ledger.dead(ledger.read()) == frozenset()
    other.kill()
    assert ledger.dead(ledger.read()) == {other.id}
    without(ledger, other.id)
    assert names(ledger) == []


def test_a_forked_child_owns_nothing_and_sends_nothing(new_owner_here, url, notebook):
    """The child shares its parent's connection, and would read answers to the parent's commands."""
    ledger, other = new_owner_here(), notebook(url)
    other.run("put(ledger, 'qwen')")
    assert other.run("in_a_child(ledger.read)") == "LedgerUnavailable"
    assert other.run("count(ledger)") == "1"
    other.kill()
    try:
        until(lambda: ledger.dead(ledger.read()) == {other.id})
    finally:
        os.killpg(other.process.pid, signal.SIGKILL)


def test_rings_reach_the_processes_of_this_host(new_owner_here, url, notebook):
    ledger, other = new_owner_here(), notebook(url)
    other.send(f"ledger.wait({PATIENCE})")
    ledger.ring([other.id])
    assert other.answer() == "True"


def test_the_stop_button_leaves_the_connection_in_step(new_owner_here):
    """The interrupt arrives between a command and its answer. The next command must not read that
    answer.
    """
    ledger, caught, written = new_owner_here(), 0, 0
    armed: list[bool] = []
    done = threading.Event()

    def interrupt(*_: object) -> None:
        if armed:  # no lock, so that an interrupt of this function finds it free
            armed.clear()
            raise KeyboardInterrupt

    def send_interrupts() -> None:
        while not done.wait(0.0005):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    sender = threading.Thread(target=send_interrupts)
    deadline = time.monotonic() + PATIENCE
    old = signal.signal(signal.SIGINT, interrupt)
    sender.start()
    while (caught < 1000 or not written) and time.monotonic() < deadline:
        try:
            armed.append(True)
            while True:
                written = count(ledger)
                assert ledger.read().sections[ledger.owner.id].counts["n"] >= written
                ledger.read_all()
        except KeyboardInterrupt:
            caught += 1
    done.set()
    sender.join()
    signal.signal(signal.SIGINT, old)
    assert caught >= 100 and written > 0
    assert count(ledger) > written
    assert names(new_owner_here()) == []


def test_the_answer_of_an_interrupted_command_is_never_read(new_owner_here, monkeypatch):
    """The interrupt arrives exactly when the answer is about to be read."""
    ledger = new_owner_here()
    count(ledger)
    with monkeypatch.context() as patch:

        def stop(*_, **__):
            raise KeyboardInterrupt

        patch.setattr(ledger._store._server._connection, "read_response", stop)
        with pytest.raises(KeyboardInterrupt):
            ledger.read()
    assert count(ledger) == 2
    assert count(ledger) == 3


def test_processes_lose_no_increment(url, notebook):
    others = [notebook(url) for _ in range(4)]
    for other in others:
        other.send("[count(ledger) for _ in range(200)][-1]")
    assert [other.answer() for other in others] == ["200"] * 4


def test_without_the_package_the_error_names_what_to_install(monkeypatch):
    """The `redis` package is an optional extra. Without it, the error names what to install."""
    monkeypatch.setitem(sys.modules, "redis", None)
    for name in ("connection", "page", "scripts", "ledger"):
        monkeypatch.delitem(sys.modules, f"gpu_runtime.ledgers.redis.{name}", raising=False)
    with pytest.raises(LedgerUnavailable, match=r"\n.*pip install 'gpu-console\[redis\]'"):
        open_ledger("redis://localhost")


def test_what_a_dead_owner_told_is_not_shown_and_is_removed(own, open_at, notebook):
    """Also after its lock file was removed: then nothing but the book says that it has lived."""
    url = own.fresh()
    ledger, dead = open_at(url), notebook(url)
    dead.run("ledger.add_name('llama')")
    dead.run(f"ledger.publish_answer({ledger.owner.id!r}, Holdings(()), private=False)")
    ledger.add_name("qwen")
    assert ledger.names().keys() == {dead.id, ledger.owner.id}
    dead.kill()
    open_at(url).close()  # removes the lock file
    assert not (ledger.directory / "owners" / dead.id).exists()
    assert ledger.names().keys() == {ledger.owner.id}
    ledger.publish_answer("7.7.7", Holdings(()), private=False)
    beside = f"gpu-console:beside:{ledger.owner.boot}"
    kept = [
        own.cli("HKEYS", f"{beside}:{kind}", database=own.databases)
        for kind in ("names", "answers")
    ]
    assert dead.id not in " ".join(kept) and ledger.owner.id in kept[1]
