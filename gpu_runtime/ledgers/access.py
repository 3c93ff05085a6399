"""The access rights of the files in a ledger's directory: for one user alone, or for a group.

                          private    shared (by group G, whatever the umask)
    LEDGER, WORLD,        0700       3770  sticky: nobody removes or replaces another user's file
    owners, journals
    journals/UID                     2750  only its user makes files in it
    other directories     0700       2770  new files in them belong to G too
    owners/ID             0600       0640  others read it, only its user writes it
    journals/UID/*.db                0640
    owners/ID.bell        0600       0660  members ring
    all other files       0600       0660  SQLite gives its journal the mode of its database

BOOT is the directory of one boot, LEDGER/BOOT. For simulated devices it is LEDGER/WORLD/BOOT, where
WORLD is a name made from the sizes of the devices.

The owners' directory is BOOT/owners if the ledger is private, and BOOT.owners beside BOOT if the
ledger is shared. All members of the group may rename what is in a shared BOOT. If a member renamed
the owners' directory, no owner's death could be proved any more.

A directory is shared if it, or the ledger above it, holds the file `.shared`. The owner of the
directory makes this file (`gpu ledger init`). The file's group is the group that shares the ledger.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import LedgerUnavailable
from ..private_paths import weak_step
from .liveness import name_of

if TYPE_CHECKING:
    import sqlite3

MARK = ".shared"
_LEVELS = 4  # a ledger's deepest directory is LEDGER/WORLD/BOOT/owners
_REPLACED = "something else has taken its place"


def _empty_file(path: Path, mode: int) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
    fd = os.open(path, flags, mode)
    os.close(fd)


class Access(NamedTuple):
    """The group that shares a ledger; None if the ledger is private."""

    group: int | None = None

    def open_file(self, path: Path) -> None:
        """Lets the group's members read and write this user's file `path`. Raises OSError.

        In a private ledger, nothing is changed.
        """
        self._open(path, 0o660)

    def open_directory(self, path: Path, *, sticky: bool = False) -> None:
        """Lets the group's members create files in this user's directory `path`. Raises OSError.

        In a `sticky` directory, members cannot remove or replace each other's files. In a private
        ledger, nothing is changed.
        """
        mode = 0o3770 if sticky else 0o2770
        self._open(path, mode | stat.S_IFDIR)

    def _open(self, path: Path, mode: int) -> None:
        if self.group is None:
            return
        # The mode is changed through a descriptor, not by path. A member who may write to the
        # directory could replace the file by a link, and this user would then give the group access
        # to another file.
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            is_link = stat.S_ISLNK(found.st_mode)
            same_kind = stat.S_ISDIR(found.st_mode) == stat.S_ISDIR(mode)
            if found.st_uid != os.geteuid() or is_link or not same_kind:
                raise PermissionError(errno.EPERM, _REPLACED, str(path))
            os.chown(f"/proc/self/fd/{fd}", -1, self.group)
            os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(mode))
        finally:
            os.close(fd)

    def make(self, directory: Path) -> None:
        """Makes a boot's `directory` in a shared ledger, and the directories that belong to it.

        These are the parent of `directory` and, in the parent, the directory `journal` and the
        owners' directory. Existing directories stay as they are. Raises OSError.
        """
        world = directory.parent
        for made in (world, world / "journal", directory, _beside(directory)):
            self.make_directory(made, sticky=made in (world, _beside(directory)))
        self.make_file(directory / "rebuild.lock")

    def make_directory(self, path: Path, *, sticky: bool) -> None:
        """Makes the directory `path` with its final mode, if it does not exist.

        `sticky` is as in `open_directory`. Raises OSError if `path` exists and is not a directory,
        or if the directory cannot be made.
        """
        if not os.path.lexists(path):
            # A draft gets its mode before its final name. So no other process finds a directory
            # that is closed to the group.
            draft = path.with_name(f".new-{secrets.token_hex(4)}")
            draft.mkdir(0o700)
            self.open_directory(draft, sticky=sticky)
            try:
                draft.rename(path)
            except OSError:
                draft.rmdir()  # another process has made the directory already
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, _REPLACED, str(path))

    def make_file(self, path: Path, make: Callable[[Path, int], None] = _empty_file) -> None:
        """Makes the file `path`, if it does not exist. Raises OSError.

        `make(path, mode)` makes the file under another name, by default as an empty file. The file
        gets its final name when it is complete.
        """
        if os.path.lexists(path):
            return
        draft = path.with_name(f".new-{secrets.token_hex(4)}")
        make(draft, 0o600)
        try:
            self.open_file(draft)
            os.link(draft, path, follow_symlinks=False)
        except FileExistsError:
            pass  # another process has made the file
        finally:
            draft.unlink(missing_ok=True)


PRIVATE = Access()


def access_to(directory: Path) -> Access:
    """The access rights of the ledger that is or contains `directory`; PRIVATE if not shared."""
    root = shared_root(directory)
    return PRIVATE if root is None else Access((root / MARK).lstat().st_gid)


def shared_root(directory: Path) -> Path | None:
    """The directory of the shared ledger that is or contains `directory`; None if not shared."""
    for place in (directory, *directory.parents[: _LEVELS - 1]):
        try:
            mark = (place / MARK).lstat()
            holder = place.stat()
        except OSError:  # no mark here: look one level up
            continue
        if stat.S_ISREG(mark.st_mode) and mark.st_uid == holder.st_uid:
            return place
    return None


def owners_in(directory: Path) -> Path:
    """The directory of the owners' files, for a ledger's `directory` of one boot."""
    return directory / "owners" if access_to(directory).group is None else _beside(directory)


def _beside(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.owners")


def state_in(ledger: Path) -> Path:
    """The directory for files that outlive a boot and that all members write.

    `ledger` is the ledger's directory. Any member must be able to replace such a file, and to remove
    the files that SQLite puts beside it. The directory of a shared ledger is sticky and prevents
    this, so a shared ledger has a separate directory for these files.
    """
    return ledger if access_to(ledger).group is None else ledger / "journal"


class JournalPlace(NamedTuple):
    """Where the journals of a ledger are."""

    own: Path  # this user's journal
    users: Path | None  # the parent of all users' journal directories; None in a private ledger


def journals_in(ledger: Path) -> JournalPlace:
    """The places of the journals of the ledger in the directory `ledger`.

    In a shared ledger, each user has a journal in a directory that only this user can write. SQLite
    reads some files beside a database as part of the database. So another user who could write to
    the directory could change the journal.
    """
    root = shared_root(ledger)
    if root is None:
        return JournalPlace(ledger / "journal.db", None)
    world = "-".join(ledger.relative_to(root).parts)  # of simulated devices; empty for real ones
    users = root / "journals"
    return JournalPlace(users / str(os.geteuid()) / f"{world or 'journal'}.db", users)


def make_own_journal(place: JournalPlace) -> None:
    """Makes this user's journal in a shared ledger, if it does not exist.

    Raises OSError, also if another user could replace the journal, or has put something else in the
    journal's place.
    """
    assert place.users is not None
    access, directory = access_to(place.users.parent), place.own.parent
    access.make_directory(place.users, sticky=True)
    if not os.path.lexists(directory):
        draft = place.users / f".new-{secrets.token_hex(4)}"
        draft.mkdir(0o700)
        access._open(draft, 0o2750 | stat.S_IFDIR)
        try:
            draft.rename(directory)
        except OSError:
            draft.rmdir()  # another process of this user has made it
    weak = weak_step(place.own)
    if weak:
        raise PermissionError(errno.EPERM, f"another user could replace it: {weak}", str(place.own))
    if not os.path.lexists(place.own):
        with suppress(FileExistsError):  # another process of this user has made it
            _empty_file(place.own, 0o600)
            access._open(place.own, 0o640)


def require_no_link(db: sqlite3.Connection, path: Path) -> None:
    """Raises OSError if `path` was a link when `db` was opened from it. Checks shared ledgers only.

    With a link, another member could make this user write into another database of this user. `db`
    must not have been read or written yet.

    A check of `path` before the opening proves nothing, because a member could make the link after
    the check. So the path that SQLite has opened is compared with the expected one.
    """
    if access_to(path.parent).group is None:
        return
    # No member of the group can change the path to the parent of the ledger's directory.
    above = next(one.parent for one in path.parents if os.path.lexists(one / MARK))
    expected = os.path.join(os.path.realpath(above), *path.relative_to(above).parts)
    opened = db.execute("PRAGMA database_list").fetchone()[2]
    if opened != expected:
        raise OSError(errno.ELOOP, "it is a link", str(path))


def outsider(directory: Path) -> LedgerUnavailable | None:
    """The error for a ledger's `directory` whose group does not contain this process.

    None if the directory is not shared, or if this process is in the group. If the directory does
    not exist yet, the nearest existing parent decides.
    """
    for place in (directory, *directory.parents):
        try:
            found = place.stat()
        except OSError:  # it does not exist yet: its parent decides
            continue
        if not _is_shared(found.st_mode):
            return None
        if found.st_gid in (os.getegid(), *os.getgroups()):
            return None
        group = _group_name(found.st_gid)
        user = name_of(os.geteuid())
        return LedgerUnavailable(
            f"the ledger {place} is shared by the group {group}, and {user} is not in it.\n"
            f"  The operator can add you:  usermod -aG {group} {user}      (then log in again)\n"
            f"  Or keep your own:  GPU_LEDGER=keeper://{Path.home()}/gpu-ledger",
            path=str(place),
            group=group,
            user=user,
        )
    return None


def _is_shared(mode: int) -> bool:
    """Whether a directory with this mode is open to its group and closed to others."""
    inherits_group = mode & stat.S_ISGID
    writable_by_group = mode & stat.S_IWGRP
    closed_to_others = not mode & stat.S_IXOTH
    return bool(inherits_group and writable_by_group and closed_to_others)


def group_name(ledger: Path) -> str:
    """The name of the group that shares the `ledger`, the directory with the mark."""
    return _group_name((ledger / MARK).lstat().st_gid)


def _group_name(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:  # a group without a name, as in containers
        return str(gid)
