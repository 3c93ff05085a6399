"""What only a real Redis can show: what it loses, what it is not, and hosts that share it."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpu_runtime.errors import BadSetting, LedgerNewer, LedgerRefused, LedgerUnavailable
from gpu_runtime.facts import Share
from gpu_runtime.ledgers import open_ledger
from gpu_runtime.ledgers.redis import ledger as redis_ledger
from tests.redis_server import redis_server

from .conftest import GIB, count, lease, names, put, section, ticket, without


@pytest.fixture
def url(redis) -> str:
    return redis.fresh()


@pytest.fixture
def here(url, doors):
    """Opens a door of this process to the same book."""
    return lambda: doors(url)


@pytest.fixture
def own():
    """A Redis for one test alone, which may kill it."""
    with redis_server() as server:
        yield server


def page_of(ledger) -> str:
    return f"gpu-console:page:{ledger.owner.boot}"


def promise(ledger, gib: int, limit_gib: int = 8) -> None:
    """Reserves so much for a model that has not arrived."""

    def decide(book):
        target = replace(lease(ledger, "new"), shares=(), target=(Share("sim:0", gib * GIB),))
        book = book if book.limits else replace(book, limits={"sim:0": limit_gib * GIB})
        base = book if ledger.owner.id in book.sections else book.with_section(section(ledger))
        return base.with_lease(target), None

    ledger.transact(decide)


# What a Redis loses


@pytest.mark.parametrize("fsync", ["everysec", "always"])
def test_a_killed_redis_loses_nothing_that_was_acknowledged(doors, fsync):
    """Nor does any writer notice, where it starts again within half a second."""
    with redis_server("--appendfsync", fsync) as server:
        ledger, newest = doors(server.fresh()), [0]
        ended = threading.Event()

        def write() -> None:
            while not ended.is_set():
                newest[0] = count(ledger)

        writer = threading.Thread(target=write)
        writer.start()
        for _ in range(3):
            time.sleep(0.1)  # let it write; nothing is waited for
            server.kill()
            before = newest[0]
            server.start()
            assert ledger.read().sections[ledger.owner.id].counts["n"] >= before > 0
        ended.set()
        writer.join(20)
        assert newest[0] > before


def test_a_redis_restored_from_an_older_copy_is_put_right_by_the_living(own, doors, notebook):
    """It starts again with what it knew a while ago: no grant since then may be given twice."""
    url = own.fresh()
    ledger, other = doors(url), notebook(url)
    other.say("put(ledger, 'llama')")
    old = Path(f"{own.directory}-old")
    shutil.copytree(own.directory, old, ignore=shutil.ignore_patterns("*.sock"))
    put(ledger, "qwen")
    ledger.transact(lambda book: (book.with_ticket(ticket(ledger, "mine")), None))
    own.kill()
    shutil.copytree(old, own.directory, dirs_exist_ok=True)
    shutil.rmtree(old)
    own.start()
    assert other.say("names(ledger)") == "['llama', 'qwen']"
    assert [one.key for one in ledger.read().tickets] == ["mine"]
    assert own.say("KEYS", "gpu-console:damaged:*", database=1), "what was there is kept"


def test_a_flushed_redis_is_rebuilt_from_the_living(here, url, notebook, redis, caplog):
    """`FLUSHALL` loses no living lease and grants no byte twice; the dead are not raised."""
    ledger, other, dead = here(), notebook(url), notebook(url)
    dead.say("put(ledger, 'ghost')")
    other.say("put(ledger, 'llama', gib=6)")
    put(ledger, "qwen")
    ledger.transact(
        lambda book: (
            replace(book, limits={"sim:0": 8 * GIB}).with_ticket(ticket(ledger, "mine")),
            None,
        )
    )
    dead.kill()
    redis.say("FLUSHDB", database=redis.databases)
    with caplog.at_level(logging.WARNING, "gpu_runtime"):
        newcomer = here()
    assert names(newcomer) == ["llama", "qwen"]
    assert [one.key for one in newcomer.read().tickets] == ["mine"]
    assert "2 living owners, 2 leases" in caplog.text
    with pytest.raises(LedgerRefused, match="law 1"):
        promise(newcomer, gib=2)
    put(ledger)
    promise(newcomer, gib=2)
    assert other.say("count(ledger)") == "1"


def test_a_flush_under_many_writers_loses_nothing(redis, url, notebook, here):
    """Again and again, while four write."""
    others = [notebook(url) for _ in range(4)]
    for other in others:
        other.send("reach(ledger, 600)")
    for _ in range(5):
        time.sleep(0.05)  # let them write; nothing is waited for
        redis.say("FLUSHDB", database=redis.databases)
    assert [other.answer() for other in others] == ["none lost"] * 4
    assert [one.counts for one in here().read().sections.values()] == [{"n": 600}] * 4


def test_a_grant_that_was_not_to_be_is_taken_back(here, redis, monkeypatch):
    """It stood in the roster when the page was lost, and went into the new one; but its write never came through."""
    ledger, other, runs, flushed = here(), here(), [], []
    put(ledger, "qwen")
    put(other)
    run = ledger._store._run

    def lose_the_page(what, *more):
        if what == "write" and not flushed:
            flushed.append(1)
            redis.say("FLUSHDB", database=redis.databases)
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
    assert len(runs) == 2 and names(other) == names(ledger) == names(here()) == ["qwen"]


def test_what_two_find_gone_is_made_once(here, redis, monkeypatch):
    """The second must not put what it has read before in the place of what the first has made, and written since."""
    ledger, other, read = here(), here(), []
    put(ledger, "qwen")
    put(other, "llama")
    redis.say("FLUSHDB", database=redis.databases)
    living = ledger._store._living

    def read_early():
        read.append(living())
        if len(read) == 1:
            put(other, "llama", "third")
        return read[-1]

    monkeypatch.setattr(ledger._store, "_living", read_early)
    assert names(ledger) == names(other) == ["llama", "qwen", "third"]


def test_a_grant_in_an_abandoned_page_is_void(here, redis):
    """Another generation with the same revision is another page: the write is decided again."""
    ledger, runs = here(), []

    def decide(book):
        runs.append(1)
        if len(runs) == 1:
            redis.say("HSET", page_of(ledger), "generation", "another", database=redis.databases)
        return book.with_section(section(ledger, "qwen")), None

    ledger.transact(decide)
    assert len(runs) == 2 and names(here()) == ["qwen"]


def test_an_empty_redis_grants_nothing_until_all_had_time_to_register(redis, doors):
    """Owners in other containers may live whose rosters we cannot see. What is a fact is written at once."""
    ledger = doors(redis.virgin())
    began = time.monotonic()
    put(ledger, "mine")
    assert time.monotonic() - began < 1
    promise(ledger, gib=1)
    assert time.monotonic() - began > 1.5
    began = time.monotonic()
    promise(doors(f"unix://{redis.socket}?db={redis.databases}"), gib=1)
    assert time.monotonic() - began < 1, "and then no more"


def test_owners_of_another_directory_put_themselves_back(redis, url, doors, tmp_path):
    """In two containers of one host neither sees the other's rosters. Whoever makes the page anew, both are in it."""
    one, two = doors(f"{url}&owners={tmp_path}/one"), doors(f"{url}&owners={tmp_path}/two")
    put(one, "qwen")
    put(two, "llama")
    put(two, "llama")
    redis.say("FLUSHDB", database=redis.databases)
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
def test_a_garbled_page_is_set_aside_and_made_anew(here, redis, how):
    ledger, other = here(), here()
    put(ledger, "qwen")
    put(other, "llama")
    redis.say(*(word.format(page_of(ledger)) for word in GARBLED[how]), database=redis.databases)
    assert names(ledger) == ["llama", "qwen"]
    put(other)
    assert names(here()) == ["qwen"]
    kept = redis.say("KEYS", "gpu-console:damaged:*", database=redis.databases)
    assert bool(kept) == (how != "gone")


def test_a_page_that_is_too_large_is_not_read(here, redis):
    ledger = here()
    put(ledger, "qwen")
    redis.say(
        "EVAL",
        "local body = redis.call('HGET', KEYS[1], 'body')"
        "redis.call('HSET', KEYS[1], 'rev', 9, 'body', body .. string.rep(' ', 5000000))",
        "1",
        page_of(ledger),
        database=redis.databases,
    )
    assert names(ledger) == ["qwen"]
    assert redis.say("KEYS", "gpu-console:damaged:*", database=redis.databases)


def test_a_deleted_directory_of_the_owners_is_made_anew(here, url, notebook):
    """`rm -rf` of the local files loses nothing; and their owner can be proven alive again."""
    ledger = here()
    put(ledger, "qwen")
    shutil.rmtree(ledger.directory)
    assert names(ledger) == ["qwen"]
    count(ledger)
    other = notebook(url)
    assert other.say("ledger.dead(ledger.read())") == "frozenset()"
    assert (
        ledger.read().owner(ledger.owner.id).inode
        == (ledger.directory / "owners" / ledger.owner.id).stat().st_ino
    )


def test_a_forgotten_script_is_looked_into_and_loaded_again(here, redis):
    """It is how a Redis that started again is known: nobody writes before the page was compared with the rosters."""
    ledger, idle = here(), here()
    put(ledger, "qwen")
    put(ledger, "qwen", "llama")
    old = idle.read()
    redis.say("SCRIPT", "FLUSH")
    redis.say("HSET", page_of(ledger), "rev", "1", "body", '{"schema":1}', database=redis.databases)
    idle._store._page, idle._store._least_rev = (
        idle._store._page._replace(rev=1, book=replace(old, sections={})),
        1,
    )
    count(idle)
    assert names(idle) == ["llama", "qwen"]


# What a Redis must be


@pytest.mark.parametrize(
    ("options", "because"),
    [
        (("--appendonly", "no"), "config set appendonly yes"),
        (("--maxmemory-policy", "allkeys-lru"), "config set maxmemory-policy noeviction"),
    ],
)
def test_a_redis_that_may_forget_is_refused_with_what_to_set(own, doors, options, because):
    """At the first door, and where it comes back so under an open one."""
    url = own.fresh()
    ledger = doors(url)
    put(ledger, "qwen")
    own.kill()
    own.start(*options)
    for use in (lambda: open_ledger(url), ledger.read, lambda: put(ledger)):
        with pytest.raises(LedgerUnavailable, match=because):
            use()
    own.kill()
    own.start()
    assert names(ledger) == ["qwen"]


def test_a_database_of_something_else_is_refused_by_name(redis, doors):
    url = redis.virgin()
    redis.say("SET", "theirs", "1", database=redis.databases)
    with pytest.raises(
        LedgerUnavailable,
        match=r"not ours: it holds 1 keys of something else.*\n.*GPU_LEDGER=redis://",
    ):
        doors(url)
    assert redis.say("KEYS", "*", database=redis.databases) == "theirs"


def test_a_page_that_is_no_page_is_refused_by_name(here, redis):
    ledger = here()
    redis.say("DEL", page_of(ledger), database=redis.databases)
    redis.say("SET", page_of(ledger), "theirs", database=redis.databases)
    with pytest.raises(LedgerUnavailable, match="gpu-console:page:.* is no page of ours|WRONGTYPE"):
        ledger.read()
    with pytest.raises(LedgerUnavailable, match="gpu-console:page:.* is no page of ours"):
        here()


def test_a_newer_schema_is_respected(here, redis):
    ledger = here()
    put(ledger, "qwen")
    redis.say("HSET", page_of(ledger), "schema", "9", "rev", "99", database=redis.databases)
    for use in (ledger.read, lambda: put(ledger, "x"), here):
        with pytest.raises(LedgerNewer) as newer:
            use()
        assert (newer.value.path, newer.value.found, newer.value.ours) == (ledger.url, 9, 1)
    assert redis.say("HGET", page_of(ledger), "schema", database=redis.databases) == "9"


# Connections


def test_a_redis_that_does_not_answer_is_told_and_waited_for(own, doors):
    """One sentence in good time; what was held is held, and the door is good again when the Redis is."""
    ledger = doors(own.fresh())
    put(ledger, "qwen")
    own.kill()
    began = time.monotonic()
    with pytest.raises(
        LedgerUnavailable, match="does not answer .*Leases that exist remain valid.\n.*GPU_LEDGER"
    ):
        put(ledger)
    assert time.monotonic() - began < 5
    own.start()
    assert names(ledger) == ["qwen"]
    put(ledger)


def test_a_stopped_redis_is_not_waited_for_for_ever(own, doors):
    ledger = doors(own.fresh())
    own.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(LedgerUnavailable, match="does not answer"):
        ledger.read()
    assert time.monotonic() - began < 15
    own.process.send_signal(signal.SIGCONT)
    count(ledger)


def test_a_cut_connection_is_made_again(here, redis):
    ledger = here()
    put(ledger, "qwen")
    redis.say("CLIENT", "KILL", "TYPE", "normal")
    assert count(ledger) == 1


def test_a_write_whose_answer_was_lost_is_not_made_twice(here, monkeypatch):
    """The connection broke between the write and its answer."""
    from redis.exceptions import ConnectionError

    ledger = here()
    count(ledger)
    connection = ledger._store._server._connection
    answer, broken = connection.read_response, []

    def break_once(*args, **more):
        said = answer(*args, **more)
        if said == [b"written"] and not broken:
            broken.append(said)
            connection.disconnect()
            raise ConnectionError("cut")
        return said

    monkeypatch.setattr(connection, "read_response", break_once)
    assert count(ledger) == 2
    assert broken and ledger.read().sections[ledger.owner.id].counts == {"n": 2}


def test_passwords_are_never_shown(doors, caplog):
    with redis_server("--requirepass", "s3cret") as server:
        ledger = doors(f"unix://:s3cret@{server.socket}")
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


def test_hosts_have_pages_of_their_own(here, monkeypatch):
    """What is claimed on one is not claimed on another, and nobody reaps another host's owners; all can be seen."""
    ledger = here()
    put(ledger, "qwen", gib=8)
    other_boot = "00000000-0000-0000-0000-000000000000"
    with monkeypatch.context() as patch:
        patch.setattr(redis_ledger, "boot_id", lambda: other_boot)
        other = here()
    put(other, "llama", gib=8)
    assert (names(ledger), names(other)) == (["qwen"], ["llama"])
    pages = {page.host: page for page in ledger.read_all()}
    assert {host: [one.name for one in page.book.leases()] for host, page in pages.items()} == {
        ledger.owner.boot: ["qwen"],
        other_boot: ["llama"],
    }
    assert all(page.seen_seconds < 60 and page.name for page in pages.values())
    book = other.read()
    other._shut(remove=False)  # it dies
    assert ledger.dead(book) == frozenset()
    with pytest.raises(LedgerRefused, match="proof of death"):
        from gpu_runtime.ledgers.invariants import refuse_unlawful

        refuse_unlawful(book, replace(book, sections={}), ledger.owner.id, ledger.dead)


def test_names_of_two_containers_never_meet(url, doors, tmp_path, monkeypatch):
    """Both have a process 7 that started in the same hundredth of a second."""
    me = redis_ledger.describe_self()
    monkeypatch.setattr(redis_ledger, "describe_self", lambda **_: me)
    one, two = doors(f"{url}&owners={tmp_path}/one"), doors(f"{url}&owners={tmp_path}/two")
    assert one.owner.id != two.owner.id
    put(one, "qwen")
    put(two, "llama")
    assert names(one) == ["llama", "qwen"]
    two.close()
    assert one.dead(one.read()) == frozenset(), "its file is not here: unknown is not dead"


def test_a_killed_holder_is_proven_dead_and_a_stopped_one_is_not(here, url, notebook):
    ledger, other = here(), notebook(url)
    other.say("put(ledger, 'qwen')")
    other.signal(signal.SIGSTOP)
    assert ledger.dead(ledger.read()) == frozenset()
    other.kill()
    assert ledger.dead(ledger.read()) == {other.id}
    without(ledger, other.id)
    assert names(ledger) == []


def test_a_forked_child_neither_owns_nor_speaks(here, url, notebook):
    """It would read its parent's answers from the connection they share."""
    ledger, other = here(), notebook(url)
    other.say("put(ledger, 'qwen')")
    assert other.say("in_a_child(ledger.read)") == "LedgerUnavailable"
    assert other.say("count(ledger)") == "1"
    other.kill()
    deadline = time.monotonic() + 20
    try:
        while ledger.dead(ledger.read()) != {other.id}:
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        os.killpg(other.process.pid, signal.SIGKILL)


def test_rings_reach_the_processes_of_this_host(here, url, notebook):
    ledger, other = here(), notebook(url)
    other.send("ledger.wait(20)")
    ledger.ring([other.id])
    assert other.answer() == "True"


def test_the_stop_button_leaves_the_connection_in_step(here):
    """Interrupted between a command and its answer: the next command must not take that answer for its own."""
    ledger, caught, written = here(), 0, 0
    armed, done = threading.Event(), threading.Event()

    def interrupt(*_: object) -> None:
        if armed.is_set():
            armed.clear()
            raise KeyboardInterrupt

    def storm() -> None:
        while not done.wait(0.0005):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    stormer = threading.Thread(target=storm)
    deadline = time.monotonic() + 4
    old = signal.signal(signal.SIGINT, interrupt)
    stormer.start()
    while time.monotonic() < deadline:
        try:
            armed.set()
            while True:
                written = count(ledger)
                assert ledger.read().sections[ledger.owner.id].counts["n"] >= written
                ledger.read_all()
        except KeyboardInterrupt:
            caught += 1
    done.set()
    stormer.join()
    signal.signal(signal.SIGINT, old)
    assert caught >= 100 and written > 0
    assert count(ledger) > written
    assert names(here()) == []


def test_an_answer_that_was_not_waited_for_is_never_read(here, monkeypatch):
    """The one instant of that storm which matters."""
    ledger = here()
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


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    """It is an extra: most people need none."""
    monkeypatch.setitem(sys.modules, "redis", None)
    for name in ("connection", "page", "scripts", "ledger"):
        monkeypatch.delitem(sys.modules, f"gpu_runtime.ledgers.redis.{name}")
    with pytest.raises(LedgerUnavailable, match=r"\n.*pip install 'gpu-console\[redis\]'"):
        open_ledger("redis://localhost")
