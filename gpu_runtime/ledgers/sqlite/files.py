"""What lies in a ledger's directory, and how it is made, replaced and swept.

    LEDGER/BOOT-ID/           leases die with the boot, and so does their book
        CURRENT               a link that names the book in force
        book-3.db             the page (sqlite.py); the number never comes back
        book-2.damaged        set aside
        owners/ID             each owner's lock and roster (owner.py)
        owners/ID.bell        its doorbell (doorbell.py)
        owners/ID.map         how its allocators have cut what they hold (maps.py)
        rebuild.lock          held by whoever makes a new book
        newest                the newest revision that anybody has written (newest.py)
        turn, turn.pipe       where writers line up (turnstile.py)
        ballast               room to let go of when the disk is full

Who may open what is `access.py`'s to say. Nothing here opens a database: to open and close its file beside SQLite would
drop SQLite's locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from ...errors import LedgerUnavailable
from ..access import access_to, outsider
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
    """The kind of file system that a path lies on (or would lie on), as /proc/self/mountinfo calls it.

    >>> mounts = "1 0 8:1 / / rw - ext4 /dev/a rw\\n2 1 0:9 / /home rw shared:1 - nfs4 srv:/home rw"
    >>> file_system_of(Path("/home/ann/state"), mounts), file_system_of(Path("/homes"), mounts)
    ('nfs4', 'ext4')
    """
    if mounts is None:
        path = Path(os.path.realpath(path))
        mounts = Path("/proc/self/mountinfo").read_text()
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        fields, _, source = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4])
        # Of two mounts on one point the later one is seen.
        if path.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), source.split()[0]
    return kind


def is_network(kind: str) -> bool:
    return kind in _NETWORK


def prepare(directory: Path) -> None:
    """Makes a boot's directory where it is not there yet. Raises LedgerUnavailable with one clear sentence."""
    kind = file_system_of(directory)
    if is_network(kind):
        raise LedgerUnavailable(
            f"the ledger {directory} would lie on a network file system ({kind}), where locks do not prove who lives.\n"
            f"  Name a directory on a local disk:  GPU_LEDGER=sqlite:///var/tmp/gpu-ledger",
            path=str(directory),
            kind=kind,
        )
    access = access_to(directory)
    try:
        if access.group is not None:
            return access.make(directory)
        (directory / "owners").mkdir(mode=0o700, parents=True, exist_ok=True)
        # `parents` are made with the umask; only what is ours alone is narrowed.
        for made in (directory, directory / "owners"):
            if made.stat().st_uid == os.geteuid():
                made.chmod(0o700)
    except OSError as error:
        raise outsider(directory) or cannot_write(directory, error) from error
    if directory.stat().st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
        raise LedgerUnavailable(
            f"the ledger {directory} belongs to another user (uid {directory.stat().st_uid}).\n"
            f"  Use your own:  unset GPU_LEDGER",
            path=str(directory),
        )


def cannot_write(path: Path, error: OSError) -> LedgerUnavailable:
    """The error for a place that cannot be written, as one sentence and a way out."""
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


def current(directory: Path) -> str:
    """The name of the book in force, or nothing. One system call: every write asks."""
    try:
        return os.readlink(f"{directory}/CURRENT")
    except OSError:
        return ""


def inode_of(directory: Path, name: str) -> int:
    """Which file bears the name; 0: none. A link is none: it could lead to a file of ours outside a shared ledger."""
    try:
        found = os.lstat(f"{directory}/{name}") if name else None
    except OSError:
        return 0
    return found.st_ino if found and stat.S_ISREG(found.st_mode) else 0


def point_current_at(directory: Path, name: str) -> None:
    draft = directory / f".current-{secrets.token_hex(4)}"
    os.symlink(name, draft)
    os.replace(draft, directory / "CURRENT")


def next_book(directory: Path, last_known: str = "") -> str:
    """A name that no book here has had."""
    names = [*os.listdir(directory), current(directory), last_known]
    numbers = [int(match[1]) for match in map(_BOOK.match, names) if match]
    return f"book-{max(numbers, default=0) + 1}.db"


def other_books(directory: Path, name: str) -> list[str]:
    return [
        other
        for other in os.listdir(directory)
        if _BOOK.match(other) and other.endswith(".db") and other != name
    ]


def set_aside(directory: Path, name: str) -> Path | None:
    """Moves a book and its journal to a name that says `damaged`; None where there is no file left to keep."""
    kept = directory / f"{name.removesuffix('.db')}.damaged"
    while kept.exists():
        kept = kept.with_name(kept.name + "+")
    try:
        os.rename(directory / f"{name}-journal", f"{kept}-journal")
    except FileNotFoundError:
        pass
    try:
        os.rename(directory / name, kept)
    except FileNotFoundError:
        return None
    return kept


def rebuild_lock(directory: Path) -> IO[bytes]:
    """The file whose lock is the right to make a new book; opened, not yet locked.

    To be used as `with rebuild_lock(directory) as file: take(file, …)`: then nothing but the file's own close, which
    no KeyboardInterrupt can part from it, stands between a lock taken and a lock let go.
    """
    return open(directory / "rebuild.lock", "ab", opener=_private)


def take(file: IO[bytes], patience_seconds: float) -> None:
    """Locks the file. Raises LedgerUnavailable where another keeps it too long."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise LedgerUnavailable(
                    f"another process has been rebuilding the ledger for {patience_seconds:.0f} s; perhaps it is "
                    f"stopped.\n  See who:  fuser -v {file.name}",
                    path=str(file.name),
                ) from None
            time.sleep(0.005)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def writers(path: Path) -> list[int]:
    """Process numbers that hold a write lock on the file right now, as far as /proc/locks shows them."""
    try:
        inode = path.stat().st_ino
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return []
    held = {int(row[4]) for row in rows if row[3] == "WRITE" and row[5].endswith(f":{inode}")}
    return sorted(held - {-1})


def fill_ballast(directory: Path) -> bool:
    """Puts by some room for releases on a full disk. False where there is none to put by."""
    path = directory / "ballast"
    if path.exists():
        return True
    draft = directory / f".ballast-{secrets.token_hex(4)}"
    try:
        with open(draft, "xb", opener=_private) as file:
            file.write(
                os.urandom(BALLAST_BYTES)
            )  # zeros would take no room where a file system compresses
        os.replace(draft, path)
        return True
    except OSError:
        draft.unlink(missing_ok=True)
        return False


def drop_ballast(directory: Path) -> bool:
    """True where there was some to drop."""
    try:
        os.unlink(directory / "ballast")
        return True
    except OSError:
        return False


def owner_files(directory: Path) -> Iterator[Path]:
    """The lock files of the owners that live or have lived here."""
    for path in (directory / "owners").iterdir():
        if _OWNER.fullmatch(path.name):
            yield path


def sweep_owners(directory: Path, in_book: Callable[[], set[str]]) -> None:
    """Removes what the dead have left behind, except where the book still needs it to prove their death."""
    dead = [path for path in owner_files(directory) if life(path) is Life.DEAD]
    needed = (
        in_book() if dead else set()
    )  # looked up now: what they wrote just before they died is in it
    for path in dead:
        if path.name not in needed:
            try:
                for beside in ("bell", "map"):  # first: they are found by their owner's name
                    path.with_name(f"{path.name}.{beside}").unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            except PermissionError:
                continue  # in a shared ledger each user sweeps before their own door


def sweep_drafts(directory: Path) -> None:
    """Removes what processes were making when they were killed: drafts that nobody has touched for a day."""
    for place in (directory, directory / "owners"):
        for draft in filter(lambda path: _DRAFT.fullmatch(path.name), place.iterdir()):
            try:
                if time.time() - draft.lstat().st_mtime > OLD_SECONDS:
                    draft.unlink(missing_ok=True)
            except OSError:
                continue


def sweep_boots(directory: Path) -> None:
    """Removes the books of other boots: by name another boot's, untouched for a day, no owner's lock held."""
    try:
        others = [
            other
            for other in directory.parent.iterdir()
            if other != directory
            and _BOOT.fullmatch(other.name)
            and other.is_dir()
            and not other.is_symlink()
        ]
    except OSError:
        return
    for other in others:
        try:
            untouched = time.time() - max(
                file.lstat().st_mtime for file in (other, *other.iterdir())
            )
            if untouched > OLD_SECONDS and not any(
                life(file) is Life.ALIVE for file in owner_files(other)
            ):
                shutil.rmtree(other, ignore_errors=True)
        except OSError:
            continue
