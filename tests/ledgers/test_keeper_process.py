"""The keeper's process under kills, stops, forks and hostile clients."""

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from gpu_runtime.errors import LedgerUnavailable
from gpu_runtime.facts import Holdings, Section
from gpu_runtime.ledgers.keeper import core, ledger, server, wire
from gpu_runtime.ledgers.keeper.core import Hello, Keep, Leave, Part, Put
from gpu_runtime.ledgers.keeper.wire import SOCKET, frame, socket_path
from gpu_runtime.ledgers.liveness import Sight, boot_id
from tests.clock import PATIENCE, until

from .conftest import count, names, put, without
from .test_keeper import owner


@pytest.fixture(autouse=True)
def _started_as_by_users(monkeypatch):
    monkeypatch.setattr(ledger, "spawn", wire.spawn)


@pytest.fixture
def here(tmp_path, open_at):
    """Opens the kept book as a new owner in this process. The keeper ends after the test."""
    opened = []

    def open_():
        opened.append(open_at(f"keeper://{tmp_path}/kept"))
        return opened[-1]

    yield open_
    for keeper in keepers(tmp_path):
        keeper.kill()


@pytest.fixture
def other(tmp_path, notebook):
    return lambda: notebook(f"keeper://{tmp_path}/kept")


def keepers(directory) -> list[psutil.Process]:
    """The keepers of ledgers in `directory`."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or [""]
        if (
            command[-1].startswith(f"{directory}/")
            and "gpu_runtime.ledgers.keeper.server" in command
        ):
            found.append(process)
    return found


def keeper_of(one) -> psutil.Process:
    """The process of the keeper that `one` is connected to."""
    one.read()
    return psutil.Process(one._wire.keeper_pid)


def test_a_killed_keeper_loses_nothing(here, other):
    """Four processes count while the keeper is killed again and again. No count is lost or made twice."""
    one = here()
    others = [other() for _ in range(4)]
    for each in others:
        each.send("[count(ledger) for _ in range(400)][-1]")
    for _ in range(4):
        keeper_of(one).kill()
        count(one)
    assert [each.answer() for each in others] == ["400"] * 4
    assert one.read().sections[one.owner.id].counts == {"n": 4}


def test_a_write_that_a_killed_keeper_lost_is_not_taken_for_another_threads_write(
    here, monkeypatch
):
    """Two threads of a process write, and the keeper has the later of the two writes only."""
    one, ask, puts = here(), ledger.KeeperLedger._ask, []

    def lost(self, message):
        if not isinstance(message, Put) or puts:
            return ask(self, message)
        puts.append(message)
        assert count(one) == 1
        keeper_of(one).kill()
        until(lambda: not one._wire.is_open())
        raise ledger._Lost

    monkeypatch.setattr(ledger.KeeperLedger, "_ask", lost)
    assert count(one) == 2
    assert one.read().sections[one.owner.id].counts == {"n": 2}


def test_only_owners_of_the_given_book_are_silent(here):
    """A status failed if an owner came between its read of the book and that of the silences."""
    one, two = here(), here()
    put(one, "a")
    before = one.read()
    put(two, "b")
    assert one.silences(before).keys() == {one.owner.id}
    assert one.silences(one.read()).keys() == {one.owner.id, two.owner.id}


def test_a_new_owner_finds_the_book_after_the_keeper_was_killed(here, other):
    """The process that starts the next keeper knows nothing of the book. Another one has it, and is stopped."""
    first = other()
    assert first.run("put(ledger, 'qwen')") == "None"
    first.signal(signal.SIGSTOP)
    one = here()
    keeper = keeper_of(one)
    one.close()
    keeper.kill()
    assert names(here()) == ["qwen"]
    first.signal(signal.SIGCONT)


def test_a_stopped_keeper_is_replaced_and_reading_goes_on(here, monkeypatch):
    monkeypatch.setattr(ledger, "HANGING_SECONDS", 0.5)
    one = here()
    put(one, "qwen")
    before = keeper_of(one)
    before.suspend()
    assert names(one) == ["qwen"], "reading asks nobody"
    put(one, "llama")
    assert names(one) == ["llama"]
    assert not before.is_running() or before.status() == psutil.STATUS_ZOMBIE
    keeper_of(one).suspend()
    assert names(here()) == ["llama"], "an owner that comes replaces it too"


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_next_keeper_gets_all_that_is_kept_beside_the_book(here, monkeypatch, interrupted):
    """Another thread adds to it during the greeting, or the greeting is interrupted."""
    one, exchange, threads = here(), ledger.KeeperLedger._exchange, []

    def publish(asker: str) -> None:
        one.publish_answer(asker, Holdings(()), private=False)

    def meddled(self, wire, message):
        if isinstance(message, Keep) and not threads:
            threads.append(threading.Thread(target=publish, args=("8.8.8",)))
            threads[0].start()
            until(lambda: ("answer", "8.8.8") in self._kept)
            if interrupted:
                raise KeyboardInterrupt
        return exchange(self, wire, message)

    publish("7.7.7")
    publish(one.owner.id)
    keeper_of(one).kill()
    until(lambda: not one._wire.is_open())
    monkeypatch.setattr(ledger.KeeperLedger, "_exchange", meddled)
    with pytest.raises(KeyboardInterrupt) if interrupted else contextlib.nullcontext():
        one.names()
    threads[0].join(PATIENCE)
    assert one.answer(one.owner.id) == Holdings(())


def test_a_keeper_that_ends_between_the_two_connections_of_an_owner_is_replaced(here, monkeypatch):
    """Opening raised ConnectionRefusedError. The second connection, on which the keeper rings, is opened later."""
    one, connected, calls = here(), ledger.KeeperLedger._connected, []

    def killed(self):
        wire = connected(self)
        calls.append(self)
        if len(calls) == 2:
            psutil.Process(wire.keeper_pid).kill()
            until(lambda: not wire.is_open())
        return wire

    with monkeypatch.context() as patched:
        patched.setattr(ledger.KeeperLedger, "_connected", killed)
        two = here()
    count(two)
    assert one.read().sections[two.owner.id].counts == {"n": 1}

    def is_rung() -> bool:
        one.ring([two.owner.id])
        return two.wait(1)

    until(is_rung)


def test_the_death_of_an_owner_is_proven_at_once_and_wakes_others(here, other):
    one, killed = here(), other()
    killed.run("put(ledger, 'qwen')")
    one.wait(0)
    killed.kill()
    assert one.wait(PATIENCE)
    until(lambda: one.dead(one.read()) == {killed.id})
    without(one, killed.id)
    assert names(one) == []


def test_an_ended_process_is_seen_before_the_keeper_notices(here, other):
    """The keeper is stopped, so it can prove nothing. The operating system shows the end."""
    one, killed = here(), other()
    killed.run("put(ledger, 'qwen')")
    keeper = keeper_of(one)
    keeper.suspend()
    killed.kill()
    assert one.sights(one.read())[killed.id] is Sight.DEAD
    keeper.resume()


def test_a_closed_connection_is_no_death(here, other):
    """A library closes all descriptors of a process. The process lives, and connects again by itself."""
    one, closed = here(), other()
    closed.run("put(ledger, 'qwen')")
    closed.run("os.closerange(3, 100)")
    assert one.dead(one.read()) == frozenset() and names(one) == ["qwen"]
    assert closed.run("names(ledger)") == "['qwen']"
    assert closed.run("count(ledger)") == "1"


def test_the_death_of_a_parent_is_seen_although_its_child_lives(here, other):
    """A forked child has the parent's connections open until it closes them."""
    one, parent = here(), other()
    parent.run("put(ledger, 'qwen')")
    assert parent.run("in_a_child(ledger.read)") == "LedgerUnavailable"
    parent.kill()
    until(lambda: one.dead(one.read()) == {parent.id})


def test_a_second_keeper_ends_at_once(here):
    one = here()
    arguments = [sys.executable, "-m", "gpu_runtime.ledgers.keeper.server", str(one.directory)]
    assert subprocess.run(arguments, timeout=PATIENCE, check=False).returncode == 0
    assert count(one) == 1


def test_a_removed_directory_is_made_again(here):
    """Everything beside the book can be deleted. The keeper is the same one, and the book too."""
    one = here()
    put(one, "qwen")
    keeper = keeper_of(one).pid
    shutil.rmtree(one.directory.parent)
    assert names(one) == ["qwen"]
    until((one.directory / SOCKET).exists)
    two = here()
    assert names(two) == ["qwen"] and keeper_of(two).pid == keeper


def test_a_stopped_keeper_whose_directory_was_deleted_is_replaced(here):
    """It has the lock, makes no new socket, and no client can reach it. Who opened the ledger waited in vain."""
    one = here()
    put(one, "qwen")
    stopped = keeper_of(one)
    stopped.suspend()
    shutil.rmtree(one.directory.parent)
    soon = "from gpu_runtime.ledgers.keeper import server; server.HANGING_SECONDS = 0.2"
    line = f"{soon}; server.main([{str(one.directory)!r}])"
    one.directory.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", line]) as fresh:
        until((one.directory / SOCKET).exists)
        assert names(here()) == ["qwen"]
        assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE
        fresh.kill()


@pytest.mark.parametrize("step", ["mkdir", "open"])
def test_a_directory_that_is_deleted_while_it_is_made_is_made_again(here, monkeypatch, step):
    """A soak deleted it between two steps of a start, and the caller got "cannot be written"."""
    one, real, torn = here(), getattr(os, step), []
    put(one, "qwen")

    def deleted_once(path, *arguments, **more):
        if str(path).endswith(("/owners", "/keeper.starting")) and not torn:
            torn.append(path)
            shutil.rmtree(one.directory.parent, ignore_errors=True)
        return real(path, *arguments, **more)

    keeper_of(one).kill()
    until(lambda: not one._wire.is_open())
    shutil.rmtree(one.directory.parent)
    with monkeypatch.context() as patched:
        patched.setattr(os, step, deleted_once)
        assert names(one) == ["qwen"]
    assert torn


HOSTILE = {
    "garbage": b"\xff" * 100,
    "half a frame": struct.pack("<I", 1000) + b"x",
    "a frame of 2 GiB": struct.pack("<I", 2 << 30),
    "no greeting": frame(core.encode(Leave(1))),
    "another version": frame(core.encode(Hello(1, 99, "", owner(1)))),
    "a field of a later version that nests": frame(
        b"\x94\xa4Pass\x01" + b"\x91" * 20_000 + b"\xc0"
    ),
    "a kind of a later version that nests": frame(b"\x93\xa4Next\x01" + b"\x91" * 20_000 + b"\xc0"),
    "a bell that keeps and fetches": b"".join(
        frame(core.encode(message))
        for message in (
            Hello(1, 1, "", owner(1), bell=True),
            Keep(2, "maps", b"x", private=True),
            core.Fetch(3, "maps"),
        )
    ),
    "an owner that no process can be": frame(
        core.encode(Hello(1, 1, "", replace(owner(1), pid=2**63), again=True))
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_client_harms_nobody(here, kind):
    one = here()
    hostile = socket.socket(socket.AF_UNIX)
    with socket_path(one.directory, SOCKET) as path:
        hostile.connect(path)
    keeper = keeper_of(one)
    hostile.sendall(HOSTILE[kind])
    assert count(one) == 1
    hostile.close()
    assert count(one) == 2
    assert keeper_of(one) == keeper, "it ended, and another one was started"
    keeper.kill()
    assert count(one) == 3, "the next keeper reads what it has left"


def deep(levels: int) -> bytes:
    """A part with a section that has a field of a later version."""
    return b"\x91\x82\xa5later" + b"\x91" * levels + b"\xc0\xa5owner" + core.encode(owner(1))


def test_what_others_could_not_read_is_refused_or_left_out(here):
    """A member wrote what nests so deep that a status of another member raised RecursionError."""
    one, two = here(), here()
    put(two, "qwen")
    keeper = keeper_of(one)
    for levels in (core.DEEPEST + 1, 500):
        for more in (
            {"part": msgspec.Raw(deep(levels))},
            {"shared": msgspec.Raw(deep(levels)[1:])},
        ):
            mine = msgspec.Raw(core.encode(Part(Section(one.owner), (), 1)))
            reply = one._ask(replace(Put(0, one._current().revision, mine), **more))
            assert isinstance(reply, core.Refused) and "nested" in reply.why, (levels, more, reply)
    for kind in ("names", "maps"):
        one._ask(Keep(0, kind, b"\x91" * 20_000))
    three, large = here(), Keep(0, "names", b"x" * (core.MOST_KEPT_BYTES - 50_000))
    assert [type(each._ask(large)) for each in (one, three)] == [core.Written] * 2, (
        "no frame has both"
    )
    assert (two.names(), two.maps(), names(two)) == ({}, {}, ["qwen"])
    assert keeper_of(two) == keeper


def test_nobody_writes_in_anothers_name(here):
    """The keeper takes the pid from the socket, and checks each section against it."""
    one, two = here(), here()
    put(one, "qwen")
    theirs = core.encode(Part(Section(one.owner), (), 9))
    reply = two._ask(Put(0, two._current().revision, msgspec.Raw(theirs)))
    assert isinstance(reply, core.Refused) and "as its owner" in reply.why
    claimed = replace(two.owner, pid=1)
    wire = ledger._Wire(two.directory)
    welcome = two._exchange(wire, Hello(0, core.PROTOCOL, "", claimed))
    assert welcome.owner.pid == os.getpid()
    wire.close()
    wire = ledger._Wire(two.directory)
    welcome = two._exchange(wire, Hello(0, core.PROTOCOL, "", one.owner, b"guessed", again=True))
    assert welcome.owner.id not in (one.owner.id, two.owner.id)
    wire.close()
    assert names(one) == ["qwen"]


def test_a_client_that_reads_nothing_is_disconnected(here):
    one, deaf = here(), here()
    deaf._keep("maps", ())
    big = b"x" * (core.MOST_KEPT_BYTES - 100)
    one._ask(Keep(0, "maps", big))
    wire = deaf._wire
    wire.socket.settimeout(PATIENCE)
    with contextlib.suppress(OSError):
        for number in range(50):
            wire.socket.sendall(frame(core.encode(core.Fetch(number, "maps"))))
    assert count(one) == 1
    until(lambda: psutil.Process(one._wire.keeper_pid).memory_info().rss < 200 << 20)


def test_a_ledger_opens_after_a_pause_of_the_machine_that_takes_all_its_time(here, monkeypatch):
    """A paused machine makes the keeper's answer late, and the deadline too."""
    greet, paused = ledger.KeeperLedger._greet, []

    def greet_late(self, wire):
        if not paused:
            paused.append(10_000.0)
            wire.close()
            raise ledger._Lost("no answer")
        return greet(self, wire)

    monkeypatch.setattr(ledger.KeeperLedger, "_greet", greet_late)
    clock = SimpleNamespace(**vars(time))
    clock.monotonic = lambda: time.monotonic() + sum(paused)
    monkeypatch.setattr(ledger, "time", clock)
    assert here().read() is not None and paused


def test_only_a_keeper_is_ended_when_it_hangs(here):
    """While no keeper runs, systemd accepts, and the number of the last one may be another program's."""
    one = here()
    with subprocess.Popen(["sleep", "1000"]) as other:
        wire = SimpleNamespace(is_open=lambda: True, keeper_pid=other.pid, keeper_uid=os.geteuid())
        one._end_hanging(wire)
        other.terminate()
        assert other.wait(PATIENCE) == -signal.SIGTERM


def test_the_keeper_ends_after_its_last_owner(here):
    one = here()
    keeper = keeper_of(one)
    one.close()
    assert keeper.is_running()
    with contextlib.suppress(psutil.NoSuchProcess):
        keeper.wait(PATIENCE)
    assert not (one.directory / SOCKET).exists()


@pytest.mark.parametrize(
    ("free", "said"), [(9, "keeper.log"), (0, "the disk of the ledger .* is full")]
)
def test_a_keeper_that_cannot_start_is_named_with_the_cause(tmp_path, monkeypatch, free, said):
    """On a full disk the keeper's log, which cannot be written then, does not say it."""
    monkeypatch.setattr(ledger, "PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(ledger, "spawn", lambda *_, **__: subprocess.Popen(["false"]))
    monkeypatch.setattr(ledger.os, "statvfs", lambda path: SimpleNamespace(f_bavail=free))
    with pytest.raises(LedgerUnavailable, match=said):
        ledger.KeeperLedger(tmp_path / "kept", patience_seconds=0.5)


def test_links_in_the_directory_lead_no_keeper_elsewhere(here, tmp_path, monkeypatch):
    """Members may write there, and root's keeper follows none of their links, whatever the setting of the kernel."""
    target, started = tmp_path / "target", []
    one = here()
    (one.directory / "book-of-a-newer-version.db").unlink()
    (one.directory / f".book-{os.getpid()}").symlink_to(target)
    server._close_to_version_0_2(one.directory)
    assert (one.directory / "CURRENT").read_bytes().startswith(b"SQLite format 3")
    (one.directory / "keeper.starting").unlink()
    (one.directory / "keeper.starting").symlink_to(target)
    with pytest.raises(LedgerUnavailable, match="keeper.starting"):
        one._start()
    monkeypatch.setattr(server, "spawn", lambda arguments, log: started.append(arguments))
    for place in (one.directory.parent / "sim-1x8GiB", tmp_path / "elsewhere"):
        (place / one.directory.name).mkdir(parents=True)
        (place / one.directory.name / wire.WANTED).touch()
    (one.directory.parent / "sim-link").symlink_to(tmp_path / "elsewhere")
    service = SimpleNamespace(_stays=True, _directory=one.directory)
    server.Server._start_wanted(service)
    assert started == [[str(one.directory.parent / "sim-1x8GiB" / one.directory.name)]]
    assert not target.exists()


CONTAINED = """
import sys
from pathlib import Path
from gpu_runtime.ledgers import open_ledger
from tests.ledgers.conftest import count, names, put
ledger = open_ledger({url!r})
for line in sys.stdin:
    print(eval(line), flush=True)
"""


class Contained:
    """A process in a PID namespace of its own, as in a container that mounts the ledger's directory."""

    def __init__(self, url: str) -> None:
        command = ["unshare", "-p", "-f", "--mount-proc", "--kill-child", sys.executable, "-c"]
        self.process = subprocess.Popen(
            [*command, CONTAINED.format(url=url)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, line: str) -> str:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def contained(tmp_path):
    made = []

    def start() -> Contained:
        made.append(Contained(f"keeper://{tmp_path}/kept"))
        if made[-1].run("1") != "1":
            pytest.skip("this machine makes no PID namespace (unshare -p)")
        return made[-1]

    yield start
    for one in made:
        one.kill()


def test_owners_of_other_pid_namespaces_share_the_book(here, other, contained):
    """The keeper in a container sees no process outside. Every owner there has the pid 0 for it."""
    inside = contained()
    assert inside.run("put(ledger, 'a')") == "None"
    one, two = here(), other()
    put(one, "b")
    assert two.run("put(ledger, 'c')") == "None"
    assert sorted(names(one)) == ["a", "b", "c"]
    assert inside.run("sorted(names(ledger))") == "['a', 'b', 'c']"
    assert len({*one.read().sections, one.owner.id}) == 3
    gone = two.run("ledger.owner.id").strip("'")
    two.kill()
    until(lambda: gone in one.dead(one.read()), "its end, although nobody sees its process")
    inside.kill()  # and with it the keeper
    until(lambda: len(one.dead(one.read())) == 2, "the next keeper knows the book")
    assert sorted(names(one)) == ["a", "b", "c"]
    assert count(one) == 1


def test_a_taken_lock_lets_no_keeper_begin(tmp_path):
    """The address is an abstract one, which any user can take while no keeper runs."""
    directory = tmp_path / "kept" / boot_id()
    directory.mkdir(parents=True)
    with server.locked(directory):
        with pytest.raises(LedgerUnavailable, match="keeper.log"):
            ledger.KeeperLedger(tmp_path / "kept", patience_seconds=0.1)
        until(lambda: "another process is the keeper" in (directory / "keeper.log").read_text())
    ledger.KeeperLedger(tmp_path / "kept").close()
