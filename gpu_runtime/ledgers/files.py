"""The directory of a ledger: how it is made, checked and cleaned up.

    LEDGER/BOOT-ID/           leases end with the boot, so each boot has its own book
        keeper.sock           the keeper's socket; keeper.log has what the keeper printed
        owners/ID             with a Redis: each owner's lock and roster (liveness.py)
        owners/ID.bell        its doorbell (notify.py)
        newest                the newest revision that any process has written (revision_hint.py)

`access.py` has the access rights of each file, and the place of the owners' files in a shared
ledger.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import LedgerUnavailable
from ..private_paths import make_directory
from .access import access_to, outsider, owners_in
from .liveness import Life, life

OLD_SECONDS = 86400.0
_BOOT = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_DRAFT = re.compile(r"\.(new-|\d+-)[0-9a-f]{8}")
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
            f"  Name a directory on a local disk:  GPU_LEDGER=keeper:///var/tmp/gpu-ledger",
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
        f"  Make it writable, or use another:  GPU_LEDGER=keeper:///PATH",
        path=str(path),
        why=why,
    )


# Cleaning up


def is_owner(id: str) -> bool:
    """Whether `id` can be the id of an owner, and so the name of its file."""
    return bool(_OWNER.fullmatch(id))


def owner_files(directory: Path) -> Iterator[Path]:
    """The lock files in `directory` of all owners, living and dead."""
    owners = owners_in(directory)
    try:
        names = os.listdir(owners)
    except FileNotFoundError:  # it was deleted; the next write makes it again
        return
    for name in names:
        if is_owner(name):
            yield owners / name


def owners_of_version_0_2(directory: Path) -> list[str]:
    """The pids of processes that use the book that version 0.2 kept in `directory`."""
    living = [path for path in owner_files(directory) if life(path) is Life.ALIVE]
    return sorted({path.name.partition(".")[0] for path in living})


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
        # The name of the lock file leads to the other one, so it goes last.
        path.with_name(f"{path.name}.bell").unlink(missing_ok=True)
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
