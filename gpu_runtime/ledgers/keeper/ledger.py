"""A runtime's access to the book that a keeper keeps: `keeper:///DIRECTORY`.

Reading asks nobody: the book is in shared memory. A write is one message, and a second one if another
owner wrote meanwhile. If the keeper has ended, the next call starts another one, which goes on with
the same book. The methods are described in `ledgers/base.py`.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import itertools
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from ... import threads
from ...attribution import name_of
from ...errors import LedgerUnavailable
from ...facts import Book, Owner, Ticket
from ...version import VERSION
from .. import access
from ..access import group_name, outsider, shared_root
from ..base import Ledger, unusable
from ..invariants import refuse_unlawful
from ..liveness import Sight, boot_id, describe_self, namespaces, sight_of_process
from ..notify import Bell, _Waiter
from ..pieces import UNREADABLE, Pieces, Unwritable, decode, encode, encoded_change, refused
from . import core
from .wire import (
    HANGING_SECONDS,
    SERVER,
    SOCKET,
    WANTED,
    Reader,
    Torn,
    frame,
    frames_in,
    open_log,
    socket_path,
    spawn,
)

T = TypeVar("T")
PATIENCE_SECONDS = 10.0
BELL_SECONDS = 0.5  # between two attempts of a waiting thread to reach the keeper
_CREDENTIALS = struct.Struct("3i")
_children: list[subprocess.Popen[bytes]] = []  # keepers that this process started


class _Lost(Exception):
    """Raised when the keeper closed the connection, or does not answer."""


class _Wire:
    """A connection to the keeper. Not thread-safe."""

    def __init__(self, directory: Path) -> None:
        """Connects. Raises OSError."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self.socket.settimeout(HANGING_SECONDS)
            with socket_path(directory, SOCKET) as path:
                self.socket.connect(path)
            found = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except BaseException:
            self.socket.close()
            raise
        self.keeper_pid, self.keeper_uid, _ = _CREDENTIALS.unpack(found)
        self._inode = os.fstat(self.socket.fileno()).st_ino
        self._received = bytearray()
        self._heard = False
        self.descriptors: list[int] = []

    def send(self, message: core.Request) -> None:
        """Raises _Lost."""
        try:
            self.socket.sendall(frame(encode(message)))
        except OSError as error:
            raise _Lost(str(error)) from error

    def receive(self, number: int) -> Any:
        """The reply to the request `number`. Raises _Lost, also after HANGING_SECONDS."""
        deadline = time.monotonic() + HANGING_SECONDS
        while True:
            for content in frames_in(self._received):
                reply = core.decode_reply(content)
                if reply.number == number:
                    return reply
            try:
                self.socket.settimeout(max(0.001, deadline - time.monotonic()))
                if self._heard:
                    content = self.socket.recv(1 << 16)
                else:  # the book's memory comes with the first reply
                    content, self.descriptors, *_ = socket.recv_fds(self.socket, 1 << 16, 1)
                    self._heard = True
            except TimeoutError:
                raise _Lost(f"no answer within {HANGING_SECONDS:g} s") from None
            except OSError as error:
                raise _Lost(str(error)) from error
            if not content:
                raise _Lost("it ended")
            self._received += content

    def is_open(self) -> bool:
        """Whether the keeper still has the other end."""
        if self.socket.fileno() < 0:
            return False
        poll = select.poll()  # not kept: several threads may look at once
        poll.register(self.socket, select.POLLRDHUP)
        return not poll.poll(0)

    def fileno(self) -> int:
        return self.socket.fileno()

    def drain(self) -> bool:
        """Reads all rings. Returns whether there was one. Closes the wire if the keeper has ended."""
        found = False
        while True:
            try:
                content = self.socket.recv(4096)
            except BlockingIOError:  # no more rings are here
                return found
            except OSError:  # the keeper has ended
                content = b""
            if not content:
                self.close()
                return True
            found = True

    def close_descriptors(self) -> None:
        """Closes the descriptors that came with the messages."""
        descriptors, self.descriptors = self.descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)

    def close(self) -> None:
        """Closes the connection and the descriptors. Never fails.

        A library may have closed all descriptors of the process, and the user may have opened a file
        since. Such a file is not closed.
        """
        self.close_descriptors()
        with contextlib.suppress(OSError):  # the descriptor is closed, or another file
            if os.fstat(self.socket.fileno()).st_ino == self._inode:
                self.socket.close()
                return
        self.socket.detach()


class _KeeperBell(Bell):
    """A bell that the keeper can ring."""

    def __init__(self, open_wire: Callable[[], _Wire]) -> None:
        super().__init__()
        self._open_wire = open_wire  # raises LedgerUnavailable, OSError
        self._wire: _Wire | None = None
        with contextlib.suppress(OSError):  # the keeper has just ended: the next wait tries again
            self._wire = open_wire()
        self._opening = threads.freed(threading.Lock())
        self._telling = threads.freed(threading.RLock())
        self._unrung: set[str] = set()  # owners whose ring no keeper has got

    def tell(self, message: core.Request) -> None:
        """Sends a message that has no reply. Never fails. A ring that is not sent waits for the next keeper."""
        with self._telling:
            wire = self._wire
            try:
                if wire is None:
                    raise _Lost("no keeper answers")
                wire.send(message)
            except _Lost:  # perhaps half of the message was sent
                if isinstance(message, core.Ring):
                    self._unrung.update(message.owners)
                if wire is not None:
                    with contextlib.suppress(OSError):  # it is closed already
                        # Wakes the thread that will close it.
                        wire.socket.shutdown(socket.SHUT_RDWR)

    def _source(self) -> _Wire | None:
        wire = self._wire
        return wire if wire is not None and wire.fileno() >= 0 else None

    def _sleep(self, waiter: _Waiter, seconds: float) -> bool:
        if self._source() is None:
            seconds = min(seconds, BELL_SECONDS)
            if self._open_again():
                self.ring()  # the book may have changed meanwhile
                return True
        return super()._sleep(waiter, seconds)

    def _open_again(self) -> bool:
        if self.closed or not self._opening.acquire(blocking=False):
            return False
        try:
            self._wire = self._open_wire()
            with self._telling:
                unrung, self._unrung = self._unrung, set()
            if unrung:
                self.tell(core.Ring(0, tuple(sorted(unrung))))
            return True
        except (LedgerUnavailable, OSError):  # tried again at the next wait
            return False
        finally:
            self._opening.release()

    def close_here(self) -> None:
        """Closes the descriptors. A forked child may call this too."""
        self.closed = True
        if self._wire is not None:
            self._wire.close()


class KeeperLedger(Ledger):
    """One owner's access to the book of the keeper in a directory."""

    def __init__(
        self,
        directory: Path,
        *,
        notebook: str = "",
        user: str = "",
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """Connects to the keeper in `directory`, which is started if there is none.

        A call fails after `patience_seconds`. Raises LedgerUnavailable.
        """
        super().__init__()
        self.url = f"keeper://{directory}"
        self.directory = directory / boot_id()
        self.patience_seconds = patience_seconds
        self.owner: Owner = describe_self(notebook=notebook, user=user)
        self._pid = os.getpid()
        self._number = 0
        self._puts = itertools.count(1)  # the numbers of this owner's writes
        self._last_put = 0  # the last of them that the keeper had when this owner connected to it
        self._pieces = Pieces()
        self._kept: dict[tuple[str, str], core.Keep] = {}
        self._declared: frozenset[str] = frozenset()
        self._closed = False
        self._secret, self._registered = secrets.token_bytes(8), False
        self._calling = threads.freed(threading.RLock())
        self._reading = threads.freed(threading.RLock())
        self._asking = False  # whether a reply is awaited
        self._wire: _Wire | None = None
        self._reader: Reader | None = None
        access.prepare(self.directory)
        # The open directory shows other programs which ledger this process uses, see `reader.py`.
        self._place = os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        with self._calling:
            self._connected()
        self._bell = _KeeperBell(self._bell_wire)
        self.open_here.add(self)

    # The connection

    def _connected(self) -> _Wire:
        """The connection to a keeper, opened again if it was lost. Called with `_calling` held."""
        wire = self._wire
        if wire is not None and wire.is_open():
            return wire
        if wire is not None:
            self._drop()
        deadline = time.monotonic() + self.patience_seconds
        pause = 0.002
        while True:
            is_last = time.monotonic() > deadline  # a paused machine takes all the time of a try
            try:
                wire = _Wire(self.directory)
                self._require_trusted(wire)
                return self._greet(wire)
            except (OSError, _Lost, Torn) as error:
                try:
                    why = self._start() or str(error)
                except LedgerUnavailable as unavailable:
                    # Somebody deletes the directory while it is made: it is made again.
                    if not isinstance(unavailable.__cause__, FileNotFoundError):
                        raise
                    why = str(unavailable.__cause__)
                if is_last:
                    raise self._unavailable(why) from error
            time.sleep(pause)
            pause = min(0.05, 2 * pause)

    def _require_trusted(self, wire: _Wire) -> None:
        """Raises LedgerUnavailable if a user keeps the book who does not own the ledger."""
        root = shared_root(self.directory)
        owner = os.stat(root).st_uid if root else os.geteuid()
        if wire.keeper_uid not in (0, owner):
            wire.close()
            raise self._unavailable(
                f"it is run by {name_of(wire.keeper_uid)}, and the ledger is {name_of(owner)}'s"
            )

    def _greet(self, wire: _Wire) -> _Wire:
        try:
            welcome = self._exchange(wire, self._hello())
            if isinstance(welcome, core.Refused):
                raise self._unavailable(welcome.why)
            [descriptor] = wire.descriptors
            reader = Reader(descriptor)
            wire.close_descriptors()
            pieces = Pieces()
            pieces.follow(reader.page())
            # All else is as this version says it: an earlier keeper does not return later fields.
            proven = {name: getattr(welcome.owner, name) for name in core.PROVEN}
            self.owner, self._registered = replace(self.owner, **proven), True
            # A new keeper does not have them. Another thread may add one meanwhile, and then sends it.
            for keep in list(self._kept.values()):
                self._exchange(wire, keep)
        except BaseException as error:
            if isinstance(error, _Lost):
                self._end_hanging(wire)
            wire.close()
            raise
        self._last_put = welcome.put
        with self._reading:
            self._reader, self._pieces, self._wire = reader, pieces, wire
        return wire

    def _hello(self) -> core.Hello:
        return core.Hello(0, core.PROTOCOL, VERSION, self.owner, self._secret, self._registered)

    def _bell_wire(self) -> _Wire:
        """A second connection, on which the keeper rings."""
        with self._calling:
            self._require_open()
            self._connected()
            wire = _Wire(self.directory)
            try:
                self._exchange(wire, replace(self._hello(), bell=True))
            except _Lost as error:
                wire.close()
                raise OSError(str(error)) from error
            wire.close_descriptors()
            wire.socket.setblocking(False)
            return wire

    def _exchange(self, wire: _Wire, message: core.Request) -> Any:
        """Sends `message` with the next number, and returns the reply. Raises _Lost."""
        number = self._number = self._number + 1
        wire.send(replace(message, number=number))
        while isinstance(reply := wire.receive(number), core.Soon):
            with contextlib.suppress(Torn, *UNREADABLE):  # it is read again in the turn
                self._follow()
        return reply

    def _ask(self, message: core.Request) -> Any:
        """The keeper's reply to `message`. Raises _Lost, after which the connection is closed."""

        def ask(in_turn: bool) -> Any:
            self._require_open()
            if self._asking or not in_turn:
                return self._ask_beside(message)
            wire = self._connected()
            self._asking = True
            try:
                return self._exchange(wire, message)
            except _Lost:
                self._end_hanging(wire)
                self._drop()
                raise
            except BaseException:  # an interrupt: the reply would answer another request
                self._drop()
                raise
            finally:
                self._asking = False

        return threads.in_turn(self._calling, ask, self.patience_seconds + HANGING_SECONDS)

    def _ask_beside(self, message: core.Request) -> Any:
        """As `_ask`, while the main thread awaits a reply and runs a signal handler of the user meanwhile."""
        try:
            with contextlib.closing(_Wire(self.directory)) as wire:
                self._require_trusted(wire)
                self._exchange(wire, self._hello())
                return self._exchange(wire, message)
        except OSError as error:
            raise _Lost(str(error)) from error

    def _ask_again(self, message: core.Request) -> Any:
        """The keeper's reply to `message`, which may be sent twice. Raises LedgerUnavailable."""
        for _ in range(2):
            with contextlib.suppress(_Lost):  # the keeper ended: ask the next one
                return self._ask(message)
        raise self._unavailable("it ended twice during this call")

    def _drop(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def _end_hanging(self, wire: _Wire) -> None:
        """Kills a keeper that has the connection open and does not answer, if it is this user's.

        While no keeper runs, systemd has the connection open, and the keeper that ended is named.
        """
        if wire.is_open() and wire.keeper_pid > 0 and wire.keeper_uid == os.geteuid():
            with contextlib.suppress(OSError):  # it has ended
                words = Path(f"/proc/{wire.keeper_pid}/cmdline").read_bytes().split(b"\0")
                if SERVER.encode() in words:
                    os.kill(wire.keeper_pid, signal.SIGKILL)

    def _start(self) -> str:
        """Starts a keeper, unless another process is starting one. Returns why this user may not.

        Raises LedgerUnavailable.
        """
        for child in [child for child in _children if child.poll() is not None]:
            _children.remove(child)
        access.prepare(self.directory)
        root = shared_root(self.directory)
        if root is not None and os.geteuid() not in (0, owner := os.stat(root).st_uid):
            with contextlib.suppress(OSError):  # the directory was deleted
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                # The service starts it, if `root` is above. A member may have put a link there.
                os.close(os.open(self.directory / WANTED, flags, 0o600))
            group = group_name(root)
            return (
                f"it does not run, and {name_of(owner)} must start it:  "
                f"gpu ledger init --group {group} {root}"
            )
        if older := access.owners_of_version_0_2(self.directory):
            return (
                f"gpu-console 0.2 keeps a book of its own there, for pid {', '.join(older)}.\n"
                f"  Restart these notebooks with this version"
            )
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            lock = os.open(self.directory / "keeper.starting", flags, 0o600)
        except OSError as error:  # such as a link of a member
            raise self._unavailable(str(error)) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process starts it
            os.close(lock)
            return ""
        try:
            if not answers(self.directory):  # another process has started one just now
                with open_log(self.directory) as log:
                    # The keeper inherits the lock, and holds it until its socket is open or it ends.
                    started = spawn([str(self.directory)], log.fileno(), STARTING=lock)
                    _children.append(started)
        except OSError as error:
            raise self._unavailable(str(error)) from error
        finally:
            os.close(lock)
        return ""

    def _unavailable(self, why: str) -> LedgerUnavailable:
        denied = outsider(self.directory)
        if denied:
            return denied
        with contextlib.suppress(OSError):  # the directory is gone: that is `why`
            if not os.statvfs(self.directory).f_bavail:
                return access.cannot_write(self.directory, OSError(errno.ENOSPC, "it is full"))
        return LedgerUnavailable(
            f"the keeper of the ledger {self.directory} cannot be reached: {why}.\n"
            f"  What it printed is in {self.directory / 'keeper.log'}",
            path=str(self.directory),
            why=why,
        )

    def _require_open(self) -> None:
        if self._closed or os.getpid() != self._pid:
            raise unusable(self.url, self._pid)

    # The book

    def read(self) -> Book:
        return self._current().book

    def _current(self) -> Pieces:
        self._require_open()
        wire = self._wire
        if wire is None or not wire.is_open():
            with self._calling:
                self._require_open()
                self._connected()
        return self._follow()

    def _follow(self) -> Pieces:
        """The newest page. Raises Torn, and one of UNREADABLE."""

        def follow(_: bool) -> Pieces:
            reader, pieces = self._reader, self._pieces
            if reader is None:  # another thread closed it just now
                self._require_open()
            assert reader is not None
            if reader.revision() != pieces.revision:
                pieces = copy.copy(pieces)
                pieces.follow(reader.page(pieces.revision))
                if self._reader is reader:
                    self._pieces = pieces
            return pieces

        return threads.in_turn(self._reading, follow)

    def transact(self, decide: Callable[[Book], tuple[Book, T]]) -> T:
        deadline = time.monotonic() + self.patience_seconds
        turn: core.Turn | None = None
        try:
            while True:
                pieces = self._current()
                new, answer = decide(pieces.book)
                if new is pieces.book:
                    return answer
                write = (pieces.book, new, self.owner.id, self.dead, self.url)
                refuse_unlawful(*write, unsent=True)
                sent = next(self._puts)
                put = self._put(sent, pieces, new)
                try:
                    reply, turn = self._ask(put), None
                except _Lost as error:
                    turn, why = None, str(error)
                    with self._calling:
                        self._connected()
                    if self._last_put == sent:
                        return answer
                else:
                    if isinstance(reply, core.Written):
                        return answer
                    if isinstance(reply, core.Refused):
                        refuse_unlawful(*write)  # its error says more
                        raise refused(self.url, self.owner.id, reply.why)
                    turn, why = reply, "others write without pause"
                if time.monotonic() > deadline:
                    raise self._unavailable(why)
        finally:
            if turn is not None:
                self._pass(turn)

    def _pass(self, turn: core.Turn) -> None:
        with self._calling:
            if self._wire is not None:
                with contextlib.suppress(_Lost):  # the turn ended with the keeper
                    self._wire.send(core.Pass(turn.number))

    def _put(self, number: int, old: Pieces, new: Book) -> core.Put:
        """The message for the write `number`, from the book `old` to `new`. Raises LedgerRefused."""
        change = old.book, new, self.owner.id, number, old.facts
        try:
            part, fields = encoded_change(*change)
        except Unwritable as error:
            raise refused(self.url, self.owner.id, str(error)) from error
        declared = tuple(sorted(self._declared))
        fields |= {"declared": declared, "holds_below": new.holds_below}
        return core.Put(0, old.revision, msgspec.Raw(part), **fields)

    # Other owners

    def dead(self, book: Book) -> frozenset[str]:
        state = self._pieces.state
        others = frozenset(book.owner_ids() - {self.owner.id})
        return others & (frozenset(state.dead) | (self._declared - state.living.keys()))

    def unknown(self, book: Book) -> frozenset[str]:
        state = self._pieces.state
        others = frozenset(book.owner_ids() - {self.owner.id})
        return others - state.living.keys() - self.dead(book)

    def _sight(self, owner: Owner) -> Sight:
        state = self._pieces.state
        if owner.id in state.dead:
            return Sight.DEAD
        if owner.id not in state.living:
            return Sight.UNKNOWN
        if owner.id == self.owner.id or owner.namespaces != namespaces():
            return Sight.ALIVE
        return sight_of_process(owner.pid, owner.started)

    def give_sign(self) -> None:
        if not self._closed and os.getpid() == self._pid:
            self._bell.tell(core.Sign(0))

    def silences(self, book: Book) -> dict[str, float]:
        found = self._fetched("silences", float)
        return {id: seconds for id, seconds in found.items() if id in book.sections}

    def declare_dead(self, owners: Iterable[str]) -> None:
        self._declared = self._declared.union(owners)

    def user_of(self, book: Book, owner_id: str, ticket: Ticket | None = None) -> str:
        """The user of the owner `owner_id`, as the keeper has read it from its socket."""
        owner = book.owner(owner_id)
        known = self._pieces.state.living.get(owner_id, "")
        return owner.user if owner and not known else known

    def ring(self, owners: Iterable[str]) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        ids = set(owners)
        if self.owner.id in ids:
            self._bell.ring()
        others = tuple(sorted(ids - {self.owner.id}))
        if others:
            self._bell.tell(core.Ring(0, others))

    def wait(self, timeout: float, ends: Iterable[Owner] = ()) -> bool:
        self._require_open()
        return self._bell.wait(timeout, ends)

    # What is kept beside the book

    def _keep(self, kind: str, value: object, for_whom: str = "", private: bool = False) -> None:
        keep = core.Keep(0, kind, encode(value), for_whom, private)
        if self._kept.get((kind, for_whom)) == keep:
            return  # the keeper has it, and the next one gets it with the first message
        living = self._pieces.state.living
        for key in [key for key in self._kept if key[1] and key[1] not in living]:
            del self._kept[key]
        self._kept[kind, for_whom] = keep
        reply = self._ask_again(keep)
        if isinstance(reply, core.Refused):
            del self._kept[kind, for_whom]
            raise OSError(reply.why)

    def _fetched(self, kind: str, type: type[T], owner: str = "") -> dict[str, T]:
        reply = self._ask_again(core.Fetch(0, kind, owner))
        fetched = {}
        for id, content in reply.contents.items():
            with contextlib.suppress(*UNREADABLE):  # another version wrote it, or a hostile owner
                fetched[id] = decode(content, type=type)
        return fetched

    # The end

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        with self._calling:
            wire = self._wire
            if wire is not None and wire.is_open():
                with contextlib.suppress(_Lost):  # the keeper ended, and knows that it left
                    self._exchange(wire, core.Leave(0))
            self._closed = True
            self._drop()
        with self._reading:
            reader, self._reader = self._reader, None
            if reader is not None:
                reader.close()
        self._bell.close()
        self._bell.close_here()
        with contextlib.suppress(OSError):  # a library has closed it
            os.close(self._place)

    def close_in_child(self) -> None:
        self._bell.close_here()
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()


class KeeperPeek:
    """Reads the book of a keeper without being an owner. Starts no keeper."""

    def __init__(self, directory: Path) -> None:
        """`directory` has the keeper's socket."""
        self._directory = directory
        self._wire: _Wire | None = None
        self._reader: Reader | None = None
        self._pieces = Pieces()

    def look(self) -> Book | None:
        """The current book; None if no keeper answers."""
        try:
            if self._wire is None or not self._wire.is_open():
                self._connect()
            assert self._reader is not None
            self._pieces.follow(self._reader.page(self._pieces.revision))
            return self._pieces.book
        except (OSError, _Lost, Torn, *UNREADABLE):  # no keeper answers, or it writes the page
            return None

    def living(self) -> Collection[str]:
        """The ids of the living owners; empty if no keeper answers."""
        return self._pieces.state.living if self.look() is not None else ()

    def _connect(self) -> None:
        if self._wire is not None:
            self._wire.close()
        self._wire = wire = _Wire(self._directory)
        wire.send(core.Hello(1, core.PROTOCOL, VERSION, describe_self(), watch=True))
        wire.receive(1)
        [descriptor] = wire.descriptors
        self._reader, self._pieces = Reader(descriptor), Pieces()
        wire.close_descriptors()


def answers(directory: Path) -> bool:
    """Whether a keeper serves the ledger whose files are in `directory`.

    It has to reply: systemd accepts connections for a keeper that does not run.
    """
    return KeeperPeek(directory).look() is not None
