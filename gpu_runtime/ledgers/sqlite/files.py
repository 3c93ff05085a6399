"""The files in a ledger's directory: how they are named, made, replaced and cleaned up.

    LEDGER/BOOT-ID/           leases end with the boot, so each boot has its own book
        CURRENT               a link that names the book in force
        book-3.db             the page (page.py); a number is never used again
        book-2.damaged        a damaged book that was set aside
        owners/ID             each owner's lock and roster (liveness.py)
        owners/ID.bell        its doorbell (notify.py)
        owners/ID.map         its allocator maps (allocator_files.py)
        owners/ID.names       the models that it can load (name_files.py)
        owners/ID.who, .told  its answers to `who` (answer_files.py)
        rebuild.lock          held by the process that makes a new book
        newest                the newest revision that any process has written (revision_hint.py)
        turn, turn.pipe       the queue of writers (writer_queue.py)
        ballast               disk space that is freed when the disk is full

`access.py` has the access rights of each file, and the place of the owners' files in a shared
ledger. Nothing here opens a database, because SQLite's locks are dropped if a process opens and
closes the database's file without SQLite.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ...errors import LedgerUnavailable
from ...private_paths import make_directory, replace_file
from ..access import access_to, outsider, owners_in
from ..liveness import Life, life

BALLAST_BYTES = 1 << 20
OLD_SECONDS = 86400.0
_BOOT = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_BOOK = re.compile(r"book-(\d+)\.")
_DRAFT = re.compile(r"\.(current-|ballast-|new-|\d+-)[0-9a-f]{8}")
_OWNER = re.compile(r"\d+\.\d+\.\d+")
_NETWORK = frozenset(
    "nfs nfs4 cifs smb smb2 smb3 smbfs lustre gpfs mmfs ceph 9p afs beegfs beegfs_nodev glusterfs davfs ocfs2 gfs2 "
    "orangefs panfs wekafs ncpfs coda fuse.sshfs fuse.glusterfs fuse.ceph-fuse fuse.ceph fuse.s3fs fuse.rclone "
    "fuse.gcsfuse fuse.goofys fuse.mount-s3 fuse.juicefs fuse.beegfs fuse.lustre fuse.davfs2 fuse.smbnetfs "
    "fuse.blobfuse2".split()
)


def file_system_of(path: Path, mounts: str | None = None) -> str:
    """The kind of file system of `path`, from the text of /proc/self/mountinfo (`mounts`).

    >>> mounts = "1 0 8:1 / / rw - ext4 /dev/a rw\\n2 1 0:9 / /home rw shared:1 - nfs4 srv:/home rw"
    >>> file_system_of(Path("/home/ann/state"), mounts), file_system_of(Path("/homes"), mounts)
    ('nfs4', 'ext4')
    >>> file_system_of(Path("/home"), mounts + "\\n3 2 0:9 / /home rw - ceph over")
    'ceph'
    """
    if mounts is None:
        path = Path(os.path.realpath(path))
        mounts = Path("/proc/self/mountinfo").read_text()
    longest, kind = -1, "unknown"
    for line in mounts.splitlines():
        fields, _, source = line.partition(" - ")
        mount_point = _unescaped(fields.split()[4])
        # If two mounts have the same mount point, the later one is visible.
        if path.is_relative_to(mount_point) and len(mount_point) >= longest:
            longest, kind = len(mount_point), source.split()[0]
    return kind


def _unescaped(mount_point: str) -> str:
    """The path `mount_point` from /proc/self/mountinfo, with its octal escapes replaced."""
    return re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), mount_point)


def is_network(kind: str) -> bool:
    """Whether this `kind` of file system is a network file system, where locks prove nothing."""
    return kind in _NETWORK


def prepare(directory: Path) -> None:
    """Makes a boot's `directory` if it does not exist.

    Raises LedgerUnavailable if the directory is on a network file system, belongs to another user,
    or cannot be made.
    """
    kind = file_system_of(directory)
    if is_network(kind):
        raise LedgerUnavailable(
            f"the ledger {directory} would be on a network file system ({kind}), where locks do not prove "
            f"that an owner lives.\n"
            f"  Name a directory on a local disk:  GPU_LEDGER=sqlite:///var/tmp/gpu-ledger",
            path=str(directory),
            kind=kind,
        )
    access = access_to(directory)
    try:
        if access.group is not None:
            return access.make(directory)
        _make_private(directory)
    except OSError as error:
        raise outsider(directory) or cannot_write(directory, error) from error
    owner, user = directory.stat().st_uid, os.geteuid()
    if owner not in (user, 0) and user != 0:
        raise LedgerUnavailable(
            f"the ledger {directory} belongs to another user (uid {owner}).\n"
            f"  Use your own:  unset GPU_LEDGER",
            path=str(directory),
        )


def _make_private(directory: Path) -> None:
    # Other users may read the directories above. The ledger's own two directories get mode 0700,
    # unless they belong to another user.
    make_directory(directory)
    make_directory(directory / "owners")
    for made in (directory, directory / "owners"):
        if made.stat().st_uid == os.geteuid():
            made.chmod(0o700)


def cannot_write(path: Path, error: OSError) -> LedgerUnavailable:
    """The error for a `path` that could not be written because of `error`."""
    why = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LedgerUnavailable(
            f"the disk of the ledger {path} is full; nothing new can be granted until some room "
            f"is freed (releases still succeed).\n  See:  df -h {path}",
            path=str(path),
            why=why,
        )
    return LedgerUnavailable(
        f"the ledger {path} cannot be written ({why}).\n"
        f"  Make it writable, or use another:  GPU_LEDGER=sqlite:///PATH",
        path=str(path),
        why=why,
    )


# Books


def current(directory: Path) -> str:
    """The name of the book in force in `directory`; empty without a book.

    This function makes only one system call, because every write calls it.
    """
    try:
        return os.readlink(f"{directory}/CURRENT")
    except OSError:  # no book yet
        return ""


def inode_of(directory: Path, name: str) -> int:
    """The inode of the file `name` in `directory`; 0 if there is no such file.

    A link counts as no file: in a shared ledger it could lead to another file of this user.
    """
    try:
        found = os.lstat(f"{directory}/{name}") if name else None
    except OSError:  # no such file
        return 0
    return found.st_ino if found and stat.S_ISREG(found.st_mode) else 0


def has_plain_journal(database: str) -> bool:
    """Whether the journal beside the SQLite file `database` is a plain file, or is missing.

    SQLite opens the journal at each read. If the journal is a pipe, SQLite waits for ever.
    """
    try:
        return stat.S_ISREG(os.lstat(f"{database}-journal").st_mode)
    except OSError:  # there is none, or SQLite will report the error
        return True


def point_current_at(directory: Path, name: str) -> None:
    """Makes `name` the book in force in `directory`, atomically. Raises OSError."""
    draft = directory / f".current-{secrets.token_hex(4)}"
    os.symlink(name, draft)
    os.replace(draft, directory / "CURRENT")


def next_book(directory: Path, last_known: str = "") -> str:
    """A name that no book in `directory` has had. `last_known` is the name of a deleted book."""
    names = [*os.listdir(directory), current(directory), last_known]
    numbers = [int(match[1]) for match in map(_BOOK.match, names) if match]
    return f"book-{max(numbers, default=0) + 1}.db"


def other_books(directory: Path, name: str) -> list[str]:
    """The file names of all books in `directory`, except the book `name`."""
    books = [other for other in os.listdir(directory) if _BOOK.match(other)]
    return [other for other in books if other.endswith(".db") and other != name]


def set_aside(directory: Path, name: str) -> Path | None:
    """Renames the book `name` to `….damaged`, and its journal too. Returns the book's new path.

    The result is None if the book's file does not exist any more.
    """
    kept = directory / f"{name.removesuffix('.db')}.damaged"
    while kept.exists():
        kept = kept.with_name(kept.name + "+")
    try:
        os.rename(directory / f"{name}-journal", f"{kept}-journal")
    except FileNotFoundError:
        pass  # the book has no journal
    try:
        os.rename(directory / name, kept)
    except FileNotFoundError:  # another process renamed it first
        return None
    return kept


# Locks


def rebuild_lock(directory: Path) -> io.FileIO:
    """The file in `directory` whose lock is the right to make a new book; opened, but not locked.

    Use it as `with rebuild_lock(directory) as file: take(file, …)`. The end of the `with` block
    closes the file and so releases the lock, even after a KeyboardInterrupt.
    """
    return _Lock(_private(f"{directory}/rebuild.lock", os.O_RDWR | os.O_CREAT), "a")


class _Lock(io.FileIO):
    """A file whose lock ends when the file is closed.

    A lock belongs to the open file. A child that is forked while the lock is held shares the open
    file, and would keep the lock. So the lock is released explicitly.
    """

    def close(self) -> None:
        if not self.closed:
            fcntl.flock(self, fcntl.LOCK_UN)
        super().close()


def take(file: io.FileIO, patience_seconds: float) -> None:
    """Locks `file`.

    Raises LedgerUnavailable if another process keeps the lock for longer than `patience_seconds`.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise LedgerUnavailable(
                    f"another process has been rebuilding the ledger for {patience_seconds:.0f} s; "
                    f"perhaps it is stopped.\n  See which:  fuser -v {file.name}",
                    path=str(file.name),
                ) from None
            time.sleep(0.005)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def writers(path: Path) -> list[int]:
    """The pids that hold a write lock on the file `path`, as /proc/locks shows them."""
    try:
        inode = path.stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:  # no such file, or a system without this table
        return []
    held = set()
    for line in lines:
        kind, pid, file = line.split()[3:6]
        if kind == "WRITE" and file.endswith(f":{inode}"):
            held.add(int(pid))
    return sorted(held - {-1})


# Ballast


def fill_ballast(directory: Path) -> bool:
    """Reserves disk space in `directory`, if none is reserved. On a full disk, releases may use it.

    Returns whether the space is reserved now.
    """
    path = directory / "ballast"
    if path.exists():
        return True
    try:
        # The bytes are random, because zeros would take no space on a file system that compresses.
        replace_file(path, os.urandom(BALLAST_BYTES))
        return True
    except OSError:  # the disk is full already
        return False


def drop_ballast(directory: Path) -> bool:
    """Frees the reserved disk space in `directory`. Returns False if none was reserved."""
    try:
        os.unlink(directory / "ballast")
        return True
    except OSError:  # the reserve was spent already
        return False


# Cleaning up


def owner_files(directory: Path) -> Iterator[Path]:
    """The lock files in `directory` of all owners, living and dead."""
    owners = owners_in(directory)
    try:
        names = os.listdir(owners)
    except FileNotFoundError:  # it was deleted; the next write makes it again
        return
    for name in names:
        if _OWNER.fullmatch(name):
            yield owners / name


def sweep_owners(directory: Path, in_book: Callable[[], set[str]]) -> None:
    """Removes the files of dead owners in `directory` that the book does not need as proof.

    `in_book` returns the ids of all owners in the book. The function is called after the deaths are
    known. So its result includes an owner that wrote to the book just before it died.
    """
    dead = [path for path in owner_files(directory) if life(path) is Life.DEAD]
    needed = in_book() if dead else set()
    for path in dead:
        if path.name not in needed:
            _remove_owner(path)


def _remove_owner(path: Path) -> None:
    try:
        for suffix in (
            "bell",
            "map",
            "names",
            "who",
            "told",
        ):  # these files first: the name of the lock file leads to them
            path.with_name(f"{path.name}.{suffix}").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    except PermissionError:
        pass  # in a shared ledger each user removes the files of their own processes


def sweep_drafts(directory: Path) -> None:
    """Removes drafts of killed processes from `directory`, if they are unchanged for a day."""
    for place in (directory, owners_in(directory)):
        for draft in place.iterdir():
            if not _DRAFT.fullmatch(draft.name):
                continue
            try:
                if time.time() - draft.lstat().st_mtime > OLD_SECONDS:
                    draft.unlink(missing_ok=True)
            except OSError:  # another user's, or removed by another process
                continue


def sweep_boots(directory: Path) -> None:
    """Removes the books of other boots beside `directory`.

    A book is removed if it has been unchanged for a day and none of its owners lives.
    """
    try:
        others = [other for other in directory.parent.iterdir() if _is_other_boot(other, directory)]
    except OSError:  # not readable: nothing is removed
        return
    for other in others:
        try:
            if _is_abandoned(other):
                for place in (other, owners_in(other)):
                    shutil.rmtree(place, ignore_errors=True)
        except OSError:  # another user's, or removed by another process
            continue


def _is_other_boot(other: Path, directory: Path) -> bool:
    named_by_boot = other != directory and _BOOT.fullmatch(other.name)
    return bool(named_by_boot) and other.is_dir() and not other.is_symlink()


def _is_abandoned(boot: Path) -> bool:
    newest = max(file.lstat().st_mtime for file in (boot, *boot.iterdir()))
    if time.time() - newest <= OLD_SECONDS:
        return False
    return not any(life(file) is Life.ALIVE for file in owner_files(boot))
