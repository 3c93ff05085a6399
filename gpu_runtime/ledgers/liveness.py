"""The identity of this process as an owner, and the proof that an owner lives or has died.

With a keeper, the keeper knows its owners from their sockets and watches their processes. With a
Redis, an owner holds a lock on a file of its own while it lives. The operating system releases the
lock when the owner dies, and at no other time. A stopped process still holds its lock. A new process
with the same pid does not hold the lock. The locked file also has the owner's roster: the owner's
part of the book, from which a damaged book is rebuilt.

/proc shows whether a process is stopped. A pid can be used again for another process. A pid and a
start time together identify a process, for an observer in the same namespaces.

Nothing here reads or writes the book.
"""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import secrets
import socket
import stat
import struct
import threading
import weakref
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from msgspec.structs import replace

from .. import threads
from ..attribution import name_of, own_name
from ..compat import StrEnum
from ..errors import LedgerUnavailable
from ..facts import Owner
from ..safe_text import LONGEST_NAME, LONGEST_PATH, printable
from ..version import VERSION


class Life(StrEnum):
    """Whether an owner lives. ALIVE and DEAD are proven; UNKNOWN means that neither is proven."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class Sight(StrEnum):
    """The present state of an owner's process, as far as it can be seen."""

    ALIVE = "alive"
    STOPPED = "stopped"
    DUMPING = "dumping"  # it has crashed, and holds everything until its core dump is written
    DEAD = "dead"
    UNKNOWN = "unknown"


def start_ticks(stat: str) -> int:
    """When a process started, in clock ticks after the boot: field 22 of /proc/PID/stat (`stat`).

    >>> start_ticks("7 (a) b) S 1 " + "0 " * 17 + "4321 99")
    4321
    """
    # The name in field 2 may contain blanks and brackets. No field after the last bracket contains
    # blanks or brackets.
    return int(stat.rpartition(")")[2].split()[19])


def namespaces() -> str:
    """The namespaces that define the pid and start time of this process; empty if unknown.

    Two processes with the same result see each other under the same pid and start time.
    """
    try:
        ids = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "time")]
    except OSError:  # an old kernel
        return ""
    return "-".join(map(str, ids))


def began(pid: int | str) -> int:
    """When the process `pid`, or `self`, began, in clock ticks after the boot. Raises OSError."""
    return start_ticks(_read(pid, "stat"))


def _read(pid: int | str, name: str) -> str:
    """The text of /proc/PID/`name`. A wait reads two of each process in its way. Raises OSError.

    The name of a process may be any bytes: the system cuts it after 15, also within a letter.
    """
    descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 1 << 16).decode(errors="replace")
    finally:
        os.close(descriptor)


def life_of_process(pid: int, started: int) -> Life:
    """Whether the process `pid` that began at `started` (clock ticks after the boot) lives."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:  # no process has this number
        return Life.DEAD
    except PermissionError:
        pass  # another user's process
    try:
        stat = _read(pid, "stat")
    except OSError:  # hidden from this user, or it ended just now
        return Life.UNKNOWN
    ended = start_ticks(stat) != started or is_zombie(stat)
    return Life.DEAD if ended else Life.ALIVE


def is_zombie(stat: str) -> bool:
    """Whether a process has ended, but its parent has not noticed; `stat` is /proc/PID/stat.

    A process still lives if its first thread has ended and another thread runs.

    >>> is_zombie("7 (python) Z 1 " + "0 " * 15 + "1 0 4321"), is_zombie("7 (a) R 1 ")
    (True, False)
    """
    fields = stat.rpartition(")")[2].split()
    return fields[0] in "ZX" and fields[17] == "1"


def in_status(status: str) -> Sight:
    """The state of a living process, from the text of /proc/PID/status (`status`).

    >>> in_status("Name: a\\nState:\\tT (stopped)\\n"), in_status("State:\\tD\\nCoreDumping:\\t1\\n")
    (<Sight.STOPPED: 'stopped'>, <Sight.DUMPING: 'dumping'>)
    """
    if "\nCoreDumping:\t1" in status:
        return Sight.DUMPING
    state = f"\n{status}".partition("\nState:\t")[2][:1]
    return Sight.STOPPED if state in ("T", "t") else Sight.ALIVE


def sight_of_process(pid: int, started: int) -> Sight:
    """The state of the process `pid` that began at `started` (clock ticks after the boot).

    ALIVE if the state cannot be read.
    """
    if life_of_process(pid, started) is Life.DEAD:
        return Sight.DEAD
    try:
        return in_status(_read(pid, "status"))
    except OSError:  # hidden from this user, or it ended just now
        return Sight.ALIVE


# -- owners ----------------------------------------------------------------------------------------


_serials = itertools.count()


def boot_id() -> str:
    """The id of this boot of the machine. It is the same in all containers of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def describe_self(*, notebook: str = "", user: str = "") -> Owner:
    """A new owner in this process.

    Each call returns a different owner, because several runtimes in a process are several owners.
    `notebook` is the path that others see. `user` replaces the name of the process's user.
    """
    return Owner(
        host=socket.gethostname(),
        boot=boot_id(),
        pid=os.getpid(),
        started=began("self"),
        serial=next(_serials),
        user=printable(user, LONGEST_NAME) or own_name(),
        notebook=printable(notebook, LONGEST_PATH),
        namespaces=namespaces(),
        server=printable(os.environ.get("JUPYTERHUB_SERVER_NAME", ""), LONGEST_NAME),
        version=VERSION,
    )


def sight_of(owner: Owner, path: Path | str) -> Sight:
    """Whether the process of `owner` runs, is stopped, writes a core dump or has ended.

    `path` is the owner's lock file. For a process in another container, only ALIVE, DEAD and
    UNKNOWN can be seen. The check takes about 50 µs.
    """
    found = life_of(owner, path)
    if found is not Life.ALIVE or owner.namespaces != namespaces():
        return Sight(found.value)
    return sight_of_process(owner.pid, owner.started)


def end_of(owner: Owner) -> io.FileIO | None:
    """A descriptor that polls as readable once the process of `owner` has ended.

    The result is None if the process cannot be seen: it has ended, or it is in another container,
    which numbers processes differently. The descriptor only wakes a waiting thread. The proof of
    the owner's death is `life_of`.
    """
    try:
        end = io.FileIO(os.pidfd_open(owner.pid))
    except OSError:  # the process has ended, or is hidden
        return None
    try:
        started = began(owner.pid)
    except OSError:  # the process ended at this moment
        started = None
    if started == owner.started:
        return end
    end.close()
    return None


def life(path: Path | str, inode: int = 0) -> Life:
    """Whether the owner of the lock file `path` is alive.

    The lock is tested without being taken, so two processes that test at the same time get the same
    result. An owner is dead only if its file exists, has the given `inode` (0 allows any inode),
    and no process holds the file's lock. A missing or different file proves nothing.
    """
    try:
        fd = _no_links(path, os.O_RDONLY)
    except OSError:  # a missing file proves nothing
        return Life.UNKNOWN
    try:
        if inode and os.fstat(fd).st_ino != inode:
            return Life.UNKNOWN
        return Life.ALIVE if _held_elsewhere(fd) else Life.DEAD
    except OSError:  # a file system without such locks
        return Life.UNKNOWN
    finally:
        os.close(fd)


def life_of(owner: Owner, path: Path | str) -> Life:
    """Whether `owner` is alive. Tests its lock file `path`, or its process if the file is missing.

    Without the test of the process, the death of an owner whose file was deleted could never be
    proved. The process can be tested only if this process is in the owner's namespaces.
    """
    found = life(path, owner.inode)
    if found is not Life.UNKNOWN or os.path.lexists(path):
        return found
    if not owner.namespaces or owner.namespaces != namespaces():
        return Life.UNKNOWN
    pid, started = map(int, owner.id.split(".")[:2])
    return life_of_process(pid, started)


# This is struct flock. The lock is an OFD lock, which belongs to the open file and not to the
# process. So closing another descriptor of the same file does not release the lock. (A POSIX lock
# would be released.)
_FLOCK = struct.Struct("hhqqi4x")


def _held_elsewhere(fd: int) -> bool:
    # Test whether a read lock is possible. Only the owner's write lock prevents it. A test for a
    # write lock would be wrong: any process that may read the file can hold a read lock on it, and a
    # dead owner would then be reported as alive.
    asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
    lock_type = _FLOCK.unpack(answer)[0]
    return lock_type != fcntl.F_UNLCK


def _lock(fd: int) -> None:
    whole_file = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, whole_file)


class OwnerFile:
    """The file `DIRECTORY/ID` that an owner locks while it lives, with two slots for its roster.

    The slots are written alternately, each with its length and checksum. So a reader finds the last
    complete roster even if a write failed halfway, as on a full disk.
    """

    SLOT_BYTES = 1 << 20  # the file is sparse: parts that were never written take no disk space

    def __init__(self, directory: Path, owner: Owner, group: int | None = None) -> None:
        """Makes and locks the file of `owner` in `directory`.

        In a shared ledger, the members of `group` can read the file, and only the owner's user can
        write the file. Raises LedgerUnavailable, OSError.
        """
        # A child that is forked meanwhile would not close the file, and would keep the lock.
        with _making:
            fd, self.owner, self.path = _locked_file(directory, owner, group)
            self._fd = fd
            _open_files.add(self)
        self._writes = 0

    def write_roster(self, payload: bytes, *, rev: int, schema: int) -> None:
        """Writes the roster `payload` for the book's revision `rev`, in the format `schema`.

        Raises OSError if the roster is too large or the disk is full. Even after this error, the
        previous roster is readable.
        """
        if len(payload) > self.SLOT_BYTES - _FRAME.size:
            raise OSError(
                f"a roster of {len(payload)} bytes does not fit its slot of {self.SLOT_BYTES}"
            )
        writes = self._writes + 1
        frame = _FRAME.pack(_MAGIC, schema, writes, rev, len(payload), zlib.crc32(payload))
        frame += _CHECK.pack(zlib.crc32(frame)) + payload
        slot = writes % 2
        written = os.pwrite(self._fd, frame, slot * self.SLOT_BYTES)
        if written != len(frame):
            raise OSError(28, "No space left on device", str(self.path))
        self._writes = writes

    def sign(self) -> None:
        """Changes the time of the file, as a sign that a thread of the owner runs. Never fails."""
        with suppress(OSError):  # the disk is full: the sign is missing, and others see silence
            os.utime(self._fd)

    def in_place(self) -> bool:
        """Whether the file is still at its path, where other processes look for it."""
        try:
            return os.stat(self.path).st_ino == self.owner.inode
        except OSError:  # the file was deleted
            return False

    def release(self, *, remove: bool) -> None:
        """Releases the lock. Never fails.

        If `remove` is true, the file is also removed. An unlocked file proves this owner's death.
        """
        if remove and self.in_place():
            with suppress(OSError):  # the directory was closed to this user
                self.path.unlink()
        self.close_here()

    def close_here(self) -> None:
        """Closes the descriptor. The lock ends when no process has the file open any more.

        There is no explicit unlock, because in a forked child it would release the parent's lock.
        """
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _locked_file(directory: Path, owner: Owner, group: int | None) -> tuple[int, Owner, Path]:
    """Makes a locked file in `directory`. The name of the file is the owner's id.

    If a file with this name exists, the owner gets another serial. Returns the file's descriptor,
    the owner with the file's inode, and the file's path. The file is locked before it gets its name.
    So no process sees the file unlocked while its owner lives.
    """
    draft = directory / f".{os.getpid()}-{secrets.token_hex(4)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(draft, flags, 0o600)
    try:
        if group is not None:
            os.fchown(fd, -1, group)
            os.fchmod(fd, 0o640)
        _lock(fd)
        while True:
            path = directory / owner.id
            try:
                os.link(draft, path)
                return fd, replace(owner, inode=os.fstat(fd).st_ino), path
            except FileExistsError:
                # A process in another container has the same pid and the same start time.
                owner = replace(owner, serial=next(_serials))
    except OSError as error:
        os.close(fd)
        raise LedgerUnavailable(
            f"the file system of {directory} cannot keep an owner's lock ({error.strerror}).\n"
            f"  Name a directory on a local disk:  GPU_LEDGER=keeper:///PATH",
            path=str(directory),
        ) from error
    finally:
        draft.unlink(missing_ok=True)


_MAGIC = b"GPUR"
_FRAME = struct.Struct("<4sIQQII")  # magic, schema, writes, rev, length, checksum of the roster
_CHECK = struct.Struct("<I")  # checksum of the frame itself
# Below the largest integer of a Redis, so that the revision can still be increased.
_MOST_REV = 1 << 62


class Roster(NamedTuple):
    """The part of the book that an owner last wrote into its file, and the book's revision.

    `writes` is the number of the owner's writes so far.
    """

    writes: int
    rev: int
    schema: int
    payload: bytes


def read_roster(path: Path) -> Roster | None:
    """The last complete roster in the owner's file `path`; None without a complete roster."""
    try:
        with open(path, "rb", opener=_no_links) as file:
            return max(_rosters(file), default=None)
    except OSError:  # no such file, or another user's: no roster is proven
        return None


class Testimony(NamedTuple):
    """The roster of a living owner, and the user who must have written the roster."""

    user: str
    roster: Roster | None  # None: the owner has not written a roster yet


def testimony(path: Path, inode: int = 0) -> Testimony | None:
    """The roster in the owner's file `path`, and the file's user; None if nothing is proven.

    Nothing is proven if no living process holds the file's lock, or if the file does not have the
    given `inode` (0 allows any inode).

    The user is the owner of the file, as the operating system reports it. No user can claim to be
    another user: files are never given to another user, and only a file's owner can write or lock
    the file.
    """
    try:
        with open(path, "rb", opener=_no_links) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or inode not in (0, found.st_ino):
                return None
            if not _held_elsewhere(file.fileno()):
                return None
            return Testimony(name_of(found.st_uid), max(_rosters(file), default=None))
    except OSError:  # no such file, or not readable: nothing is proven
        return None


def _no_links(path: Path | str, flags: int) -> int:
    """A descriptor of the owner's file `path`. Raises OSError if the file is a link.

    The file is opened without waiting: if a pipe were in the file's place, the opening could wait
    for ever.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _rosters(file: IO[bytes]) -> list[Roster]:
    return list(filter(None, (_slot(file, 0), _slot(file, OwnerFile.SLOT_BYTES))))


def _slot(file: IO[bytes], offset: int) -> Roster | None:
    file.seek(offset)
    # The frame and its checksum are read in one call, because the slot may be written between two
    # calls.
    head = file.read(_FRAME.size + _CHECK.size)
    frame, check = head[: _FRAME.size], head[_FRAME.size :]
    if len(check) < _CHECK.size:
        return None
    [checksum_of_frame] = _CHECK.unpack(check)
    if checksum_of_frame != zlib.crc32(frame):
        return None
    magic, schema, writes, rev, length, checksum = _FRAME.unpack(frame)
    if length > OwnerFile.SLOT_BYTES or rev > _MOST_REV:
        return None  # not written by gpu-console
    payload = file.read(length)
    if magic != _MAGIC or len(payload) != length:
        return None
    if zlib.crc32(payload) != checksum:
        return None
    return Roster(writes, rev, schema, payload)


_open_files: weakref.WeakSet[OwnerFile] = weakref.WeakSet()
_making = threads.awaited(threading.Lock())


def _close_in_child() -> None:
    for file in list(_open_files):
        file.close_here()


os.register_at_fork(after_in_child=_close_in_child)
