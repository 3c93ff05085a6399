"""The keeper's process: sockets, proofs of identity and death, and the memory of the book.

python -m gpu_runtime.ledgers.keeper.server DIRECTORY
python -m gpu_runtime.ledgers.keeper.server --ledger LEDGER
python -m gpu_runtime.ledgers.keeper.server --service LEDGER

The keeper listens on `keeper.sock` in the DIRECTORY of one boot. Its lock is an abstract Unix address,
which ends with the process and cannot be removed. It ends some seconds after the last owner.

With `--ledger` the DIRECTORY is that of the present boot in LEDGER. This is the command of a service,
which runs without owners too. systemd gets notifications, and keeps the book and the socket while the service
restarts: `keeper.sock` is then a link to the socket in LEDGER, and who connects meanwhile waits.
`--service` is for a machine without systemd: it starts this command again whenever it ends.
Source: sd_notify(3), sd_pid_notify_with_fds(3), sd_listen_fds(3).
"""

from __future__ import annotations

import os
import resource
import secrets
import selectors
import signal
import socket
import stat
import struct
import sys
import tempfile
import time
import traceback
from contextlib import closing, suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ...attribution import name_of
from ...facts import SCHEMA, Owner
from ...threads import import_whole
from ...version import VERSION
from ..access import access_to, owners_of_version_0_2, prepare, sweep_boots
from ..liveness import Life, began, boot_id, life_of_process, namespaces
from ..pieces import UNREADABLE, Page, encode
from .core import (
    PROTOCOL,
    Answers,
    Hello,
    Keeper,
    Leave,
    Refused,
    Welcome,
    decode_request,
    of_later_version,
)
from .wire import (
    HANGING_SECONDS,
    SERVER,
    SOCKET,
    WANTED,
    Writer,
    book_name,
    frame,
    frames_in,
    newest,
    socket_path,
    spawn,
)

LINGER_SECONDS = 5.0  # the keeper stays so long after its last owner, since another may start
AGAIN_SECONDS = 0.5  # before a keeper that ended is started again
LOOK_SECONDS = 1.0  # between two looks whether the socket is still at its path
UNSEEN_SECONDS = 2.0  # an owner whose process cannot be seen may be disconnected for so long
MOST_GREETING_BYTES = 1 << 16
MOST_CONNECTIONS_OF_A_USER = 4096  # a greeting, a bell and a look each take one
MOST_UNREAD_BYTES = 4 << 20  # a client that reads so little is disconnected
_CREDENTIALS = struct.Struct("3i")


class _Connection:
    """An open socket, with what was received and not decoded, and what is not sent yet."""

    def __init__(self, opened: socket.socket, number: int) -> None:
        self.socket, self.number = opened, number
        found = opened.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, self.uid, _ = _CREDENTIALS.unpack(found)
        self.received = bytearray()
        self.unsent = bytearray()
        self.events = selectors.EVENT_READ  # what the selector looks for
        self.owner = ""
        self.greeted = False


class Server:
    """The keeper of one directory."""

    def __init__(
        self,
        directory: Path,
        lock: socket.socket,
        *,
        stays: bool = False,
        given: socket.socket | None = None,
    ) -> None:
        """Goes on with the newest page that a process still has. `lock` is the bound abstract address.

        A keeper that `stays` does not end after its last owner. `given` is the socket that systemd has
        opened in the directory above. Raises OSError.
        """
        self._directory, self._lock, self._stays = directory, lock, stays
        self._given = given
        self._name = book_name(directory)
        self._keeper = Keeper()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_connections = min(MOST_CONNECTIONS_OF_A_USER, files // 4)
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._ends: dict[str, int] = {}  # owner id -> descriptor that is readable after its end
        self._unseen: dict[str, float] = {}  # owner id -> when it counts as ended
        self._next_number = 0
        page = newest(self._name)
        self._memory = Writer(self._name)
        if page is not None:
            self._adopt(page)
        self._published = 0
        self._publish()
        self._listening: socket.socket | None = None
        self._listen()
        tell_systemd("FDSTOREREMOVE=1\nFDNAME=book")
        tell_systemd("FDSTORE=1\nFDNAME=book", self._memory.descriptor)
        tell_systemd("READY=1")

    def _adopt(self, page: Page) -> None:
        pieces = self._keeper.known
        pieces.follow(page)
        living, dead = {}, set(pieces.state.dead)
        for id, user in pieces.state.living.items():
            owner = pieces.book.owner(id)
            pid, started = map(int, id.split(".")[:2])
            if not pid or (owner is not None and owner.namespaces != namespaces()):
                living[id] = user
                self._unseen[id] = time.monotonic() + UNSEEN_SECONDS
            elif life_of_process(pid, started) is Life.DEAD:
                dead.add(id)
            else:
                living[id] = user
                self._watch(id, pid)
        fresh = Keeper()
        fresh.adopt(page, living, dead)
        self._keeper = fresh

    # The socket at its path

    def _listen(self) -> None:
        """Puts the socket into the directory, which is made again if it vanished. Raises OSError.

        It is a link to the `given` one while that is at its path, else a socket of its own.
        """
        if self._listening is not None:
            self._selector.unregister(self._listening)
            if self._listening is not self._given:
                self._listening.close()
        access = access_to(self._directory)
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        opened = self._given if self._given_is_in_place() else None
        draft = f".keeper-{os.getpid()}"
        with (
            socket_path(self._directory, draft) as path,
            socket_path(self._directory, SOCKET) as end,
        ):
            with suppress(FileNotFoundError):  # no draft is left from an earlier start
                os.unlink(path)
            if opened is not None:
                os.symlink(f"../{SOCKET}", path)
            else:
                opened = socket.socket(
                    socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
                )
                opened.bind(path)
                access.open_file(self._directory / draft)
            os.replace(path, end)
        opened.listen(1024)  # of the given one too: clients then see this process at the other end
        self._place = os.stat(self._directory / SOCKET).st_ino
        self._listening = opened
        self._selector.register(opened, selectors.EVENT_READ, None)

    def _given_is_in_place(self) -> bool:
        """Whether the directory above has a socket of this user. No member can replace it there."""
        try:
            found = os.lstat(self._directory.parent / SOCKET)
        except OSError:  # it was deleted
            return False
        return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()

    def _is_in_place(self) -> bool:
        try:
            found = os.stat(self._directory / SOCKET)
        except OSError:  # the directory was deleted
            return False
        return stat.S_ISSOCK(found.st_mode) and found.st_ino == self._place

    # The loop

    def run(self) -> None:
        """Serves until some seconds after the last owner has ended. Raises OSError."""
        needed_at = looked_at = time.monotonic()
        while True:
            for key, events in self._selector.select(self._pause()):
                self._handle(key, events)
            now = time.monotonic()
            self.pass_time(now)
            if now - looked_at > LOOK_SECONDS:
                looked_at = now
                tell_systemd("WATCHDOG=1")
                self._start_wanted()
                if not self._is_in_place():
                    with suppress(OSError):  # such as a full disk: tried again at the next look
                        self._listen()
            if self._stays or self._keeper.known.state.living:
                needed_at = now
            elif now - needed_at > LINGER_SECONDS:
                with suppress(OSError):  # the directory was deleted
                    if self._is_in_place():
                        os.unlink(self._directory / SOCKET)
                return

    def pass_time(self, now: float) -> None:
        """Does what is due at `now`, in seconds of time.monotonic."""
        self._send(self._keeper.tick(now))
        for id in [id for id, at in self._unseen.items() if now >= at]:
            self._end(id)
        self._publish()

    def _start_wanted(self) -> None:
        """A service starts keepers of its ledger's simulated devices, which members want."""
        if not self._stays:
            return
        above = os.path.realpath(self._directory.parent)
        for wanted in self._directory.parent.glob(f"sim-*/{self._directory.name}/{WANTED}"):
            if os.path.realpath(wanted.parent) != os.path.join(above, *wanted.parts[-3:-1]):
                continue  # a member's link leads elsewhere
            with suppress(OSError):  # no file or process can be made: tried again at the next look
                wanted.unlink()
                spawn([str(wanted.parent)], sys.stderr.fileno())

    def _pause(self) -> float:
        deadline = self._keeper.deadline
        if deadline is None:
            return LOOK_SECONDS
        return min(LOOK_SECONDS, max(0.0, deadline - time.monotonic()))

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        if key.data is None:
            self._accept()
        elif isinstance(key.data, str):
            self._end(key.data)
        elif key.data.number in self._connections:
            if events & selectors.EVENT_WRITE:
                self._flush(key.data)
            if events & selectors.EVENT_READ:
                self._read(key.data)

    def _accept(self) -> None:
        assert self._listening is not None
        try:
            opened, _ = self._listening.accept()
        except OSError:  # no descriptor is free, or the client has left
            time.sleep(0.001)
            return
        opened.setblocking(False)
        self._next_number += 1
        connection = _Connection(opened, self._next_number)
        others = [other for other in self._connections.values() if other.uid == connection.uid]
        if connection.uid != os.geteuid() and len(others) >= self._most_connections:
            opened.close()
            return
        self._connections[connection.number] = connection
        self._selector.register(opened, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            received = connection.socket.recv(1 << 16)
        except BlockingIOError:  # woken for nothing
            return
        except OSError:  # the client was killed
            received = b""
        if not received:
            self._close(connection)
            return
        connection.received += received
        try:
            for content in frames_in(connection.received):
                self._receive(connection, content)
        except (ValueError, *UNREADABLE):  # garbage
            self._close(connection)
        except Exception:  # a fault of this code ends one connection, and not the keeper of all
            traceback.print_exc()
            self._close(connection)
        if not connection.greeted and len(connection.received) > MOST_GREETING_BYTES:
            self._close(connection)

    def _receive(self, connection: _Connection, content: bytes) -> None:
        try:
            message = decode_request(content)
        except msgspec.ValidationError:
            refused = of_later_version(content)
            if refused is None:
                raise
            self._send([(connection.number, refused)])
            return
        if not isinstance(message, Hello):
            self._send(self._keeper.receive(connection.number, message, time.monotonic()))
            if isinstance(message, Leave):
                self._forget(connection.owner)
            return
        if message.protocol != PROTOCOL or connection.greeted:
            why = f"the keeper speaks version {PROTOCOL} of the protocol, and this client {message.protocol}"
            self._send([(connection.number, Refused(message.number, why))])
            return
        if message.watch:
            self._publish()
            self._welcome(connection, Welcome(message.number, PROTOCOL, VERSION, message.owner, 0))
            return
        owner = self._keeper.identity(message, self._seen(connection, message.owner))
        welcome = self._keeper.hello(
            connection.number, replace(message, owner=owner), connection.uid, time.monotonic()
        )
        if isinstance(welcome, Refused):
            self._send([(connection.number, welcome)])
            return
        connection.owner, connection.greeted = owner.id, True
        self._unseen.pop(owner.id, None)
        self._watch(owner.id, connection.pid)
        self._publish()
        self._welcome(connection, welcome)

    # Identity and death

    def _seen(self, connection: _Connection, claimed: Owner) -> Owner:
        """The owner as the system knows it: pid, start, user and namespaces come from the socket."""
        user = name_of(connection.uid)
        if connection.uid == os.geteuid() and access_to(self._directory).group is None:
            user = claimed.user or user
        started = claimed.started
        if connection.pid:
            with suppress(OSError):  # it has just ended
                started = began(connection.pid)
        return replace(
            claimed,
            pid=connection.pid,
            started=started,
            user=user,
            boot=boot_id(),
            inode=0,
            namespaces=namespaces() if connection.pid else "",
        )

    def _watch(self, id: str, pid: int) -> None:
        """Watches the process of an owner, whose end is then noticed at once."""
        if id in self._ends:
            return
        try:
            descriptor = os.pidfd_open(pid) if pid else -1
        except ProcessLookupError:  # it has just ended
            self._unseen[id] = 0.0
            return
        except OSError:  # the process cannot be seen
            descriptor = -1
        if descriptor >= 0:
            self._ends[id] = descriptor
            self._selector.register(descriptor, selectors.EVENT_READ, id)

    def _end(self, id: str) -> None:
        """The owner's process has ended."""
        self._unseen.pop(id, None)
        self._forget(id)
        self._send(self._keeper.died([id]))

    def _forget(self, id: str) -> None:
        descriptor = self._ends.pop(id, None)
        if descriptor is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)

    # Sending

    def _publish(self) -> None:
        known = self._keeper.known
        if known.revision != self._published:
            self._memory.write(known.revision, self._keeper.pieces)
            self._published = known.revision

    def _send(self, answers: Answers) -> None:
        """Sends messages, after the book that they speak of is in the memory."""
        if answers:
            self._publish()
        for number, message in answers:
            connection = self._connections.get(number)
            if connection is not None:
                connection.unsent += frame(encode(message))
                self._flush(connection)

    def _welcome(self, connection: _Connection, welcome: Welcome) -> None:
        content = frame(encode(welcome))
        try:
            sent = socket.send_fds(connection.socket, [content], [self._memory.descriptor])
        except OSError:  # the client has left
            self._close(connection)
            return
        connection.unsent += content[sent:]

    def _flush(self, connection: _Connection) -> None:
        try:
            while connection.unsent:
                sent = connection.socket.send(connection.unsent)
                del connection.unsent[:sent]
        except BlockingIOError:  # the client reads slowly: sent later
            if len(connection.unsent) > MOST_UNREAD_BYTES:
                self._close(connection)
                return
        except OSError:  # the client has left
            self._close(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if events != connection.events:
            connection.events = events
            self._selector.modify(connection.socket, events, connection)

    def _close(self, connection: _Connection) -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        self._selector.unregister(connection.socket)
        connection.socket.close()
        now = time.monotonic()
        others = {other.owner for other in self._connections.values() if other.greeted}
        if connection.greeted and connection.owner not in {*self._ends, *others}:
            self._unseen.setdefault(connection.owner, now + UNSEEN_SECONDS)
        self._send(self._keeper.gone(connection.number, now))


def tell_systemd(text: str, descriptor: int | None = None) -> None:
    """Sends a notification, if systemd started this process. systemd keeps the `descriptor`."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as opened:
        with suppress(OSError):  # systemd restarts a service that is silent
            opened.connect(f"\0{address[1:]}" if address.startswith("@") else address)
            descriptors = [] if descriptor is None else [descriptor]
            socket.send_fds(opened, [text.encode()], descriptors)


def socket_of_systemd(directory: Path) -> socket.socket | None:
    """The listening socket `keeper.sock` in `directory` that systemd has given to this process; None without one.

    The memory of the book may be among the given descriptors too. Raises OSError.
    """
    count, pid = os.environ.pop("LISTEN_FDS", "0"), os.environ.pop("LISTEN_PID", "")
    if pid != str(os.getpid()):
        return None
    for number in range(3, 3 + int(count)):
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            opened = socket.socket(fileno=number)
            if opened.family == socket.AF_UNIX and opened.getsockname() == str(directory / SOCKET):
                opened.setblocking(False)
                opened.set_inheritable(False)
                return opened
            opened.detach()
    return None


def locked(directory: Path) -> socket.socket | None:
    """The socket that is the lock of the keeper in `directory`; None if another process has it."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        lock.bind(f"\0gpu-console/{book_name(directory)}")
        return lock
    except OSError:  # another process has it
        lock.close()
        return None


def _holder(directory: Path) -> int | None:
    """The pid of this user's keeper that has the lock of `directory`. Raises OSError."""
    import_whole("psutil")  # the keeper has no other use for it
    import psutil

    name = f"@gpu-console/{book_name(directory)}"
    for found in psutil.net_connections("unix"):
        if found.laddr == name and found.pid:  # without a pid it is another user's
            with suppress(psutil.Error):  # the process has ended
                if SERVER in psutil.Process(found.pid).cmdline():
                    return found.pid
    return None


def locked_after(directory: Path, seconds: float) -> socket.socket | None:
    """As `locked`. A keeper of this user that has the lock and answers nobody for `seconds` is ended.

    It may be stopped, with its directory deleted: then no client can connect to it. Raises OSError.
    """
    deadline = time.monotonic() + seconds
    while (lock := locked(directory)) is None:
        from .ledger import answers

        holder = _holder(directory)
        if holder is None or answers(directory):
            return None
        if time.monotonic() > deadline:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(holder, signal.SIGKILL)
        time.sleep(AGAIN_SECONDS / 10)
    return lock


def _close_to_version_0_2(directory: Path) -> None:
    """Puts a file in the place of version 0.2's book. That version says that it is too old for it.

    Without the file, it would begin a book of its own for the same cards. Raises OSError.
    """
    import sqlite3

    place = directory / "book-of-a-newer-version.db"
    if place.exists():
        return
    # Members may put links into the directory, which SQLite would follow.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as made:
        with closing(sqlite3.connect(f"{made}/book", isolation_level=None)) as db:
            db.execute("CREATE TABLE book (host TEXT PRIMARY KEY, rev INT, schema INT, body BLOB)")
            db.execute("INSERT INTO book VALUES (?, 1, ?, x'')", (directory.name, SCHEMA + 1))
        content = Path(made, "book").read_bytes()
    draft = directory / f".new-{secrets.token_hex(4)}"
    with open(draft, "xb") as file:  # follows no link
        file.write(content)
    access_to(directory).open_file(draft)
    os.replace(draft, place)
    os.symlink(place.name, draft)
    os.replace(draft, directory / "CURRENT")


def _serve_always(ledger: str) -> int:
    """Runs the keeper of `ledger`, and another one whenever it ends: systemd's part, without systemd."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    while True:
        child = spawn(["--ledger", ledger], sys.stderr.fileno())
        try:
            child.wait()
        finally:
            child.kill()
        time.sleep(AGAIN_SECONDS)


def main(arguments: list[str]) -> int:
    """Runs the keeper of the directory that `arguments` name. Returns the exit status."""
    directory, stays = Path(arguments[-1]), arguments[0] == "--ledger"
    if arguments[0] == "--service":
        return _serve_always(arguments[1])
    given = None
    if stays:
        given = socket_of_systemd(directory)
        directory /= boot_id()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if older := owners_of_version_0_2(directory):
        print(
            f"version 0.2 keeps a book in {directory}, for pid {', '.join(older)}", file=sys.stderr
        )
        return 1
    lock = locked_after(directory, HANGING_SECONDS)
    if lock is None:
        print(f"another process is the keeper of {directory}", file=sys.stderr)
        return int(stays)
    try:
        if stays:
            prepare(directory)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # for the keepers that it starts
        _close_to_version_0_2(directory)
        sweep_boots(directory)
        server = Server(directory, lock, stays=stays, given=given)
        if starting := os.environ.pop("GPU_KEEPER_STARTING", ""):
            os.close(int(starting))  # others may start a keeper again, if this one ends
        server.run()
    except OSError as error:
        print(f"the keeper of {directory} ends: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
