"""Who may open what lies in a ledger's directory: its user alone, or the members of a group.

                          private    shared (of group G, whatever the umask)
    LEDGER, owners/       0700       3770  sticky: nobody removes or replaces what is another's
    other directories     0700       2770  what is made in them is of G too
    owners/ID, ID.map     0600       0640  its user's: others read it, and only its user writes it
    owners/ID.bell        0600       0660  members ring
    all else              0600       0660  SQLite gives its journal the mode of its database

A directory is shared where the file `.shared` lies in it or in the ledger above it, put there by whoever made the
directory (`gpu ledger init`). Its group is the group.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..errors import LedgerUnavailable
from .liveness import name_of

MARK = ".shared"
_LEVELS = 4  # LEDGER/WORLD/BOOT/owners


def _empty_file(path: Path, mode: int) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, mode))


class Access(NamedTuple):
    """The group that shares a ledger; None: nobody."""

    group: int | None = None

    def open_file(self, path: Path) -> None:
        """Lets the members read and write a file of ours."""
        self._open(path, 0o660)

    def open_directory(self, path: Path, *, sticky: bool = False) -> None:
        """Lets the members work in a directory of ours; in a sticky one nobody touches what is another's."""
        self._open(path, (0o3770 if sticky else 0o2770) | stat.S_IFDIR)

    def _open(self, path: Path, mode: int) -> None:
        if self.group is None:
            return
        # By a descriptor of the very thing, and only if it is ours: where members may write, one could put a link to
        # something precious of ours in its place just now.
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            is_ = os.fstat(fd)
            of_its_kind = not stat.S_ISLNK(is_.st_mode) and stat.S_ISDIR(
                is_.st_mode
            ) == stat.S_ISDIR(mode)
            if is_.st_uid != os.geteuid() or not of_its_kind:
                raise PermissionError(errno.EPERM, "something else has taken its place", str(path))
            os.chown(f"/proc/self/fd/{fd}", -1, self.group)
            os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(mode))
        finally:
            os.close(fd)

    def make(self, directory: Path) -> None:
        """Makes a boot's directory in a shared ledger, where it is not there yet."""
        world = directory.parent
        for made in (world, world / "journal", directory, directory / "owners"):
            self.make_directory(made, sticky=made == world or made.name == "owners")
        self.make_file(directory / "rebuild.lock")

    def make_directory(self, path: Path, *, sticky: bool) -> None:
        """Makes a directory, where it is not there yet. Raises OSError where something else has its name."""
        if not os.path.lexists(path):
            # At once with its mode, so that nobody finds it closed.
            draft = path.with_name(f".new-{secrets.token_hex(4)}")
            draft.mkdir(0o700)
            self.open_directory(draft, sticky=sticky)
            try:
                draft.rename(path)
            except OSError:
                draft.rmdir()  # somebody else was first
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "something else has taken its place", str(path))

    def make_file(self, path: Path, make: Callable[[Path, int], None] = _empty_file) -> None:
        """Makes an empty file, or what else `make` makes, where it is not there yet."""
        if os.path.lexists(path):
            return
        draft = path.with_name(f".new-{secrets.token_hex(4)}")
        make(draft, 0o600)
        try:
            self.open_file(draft)
            os.link(draft, path, follow_symlinks=False)
        except FileExistsError:
            pass
        finally:
            draft.unlink(missing_ok=True)


PRIVATE = Access()


def access_to(directory: Path) -> Access:
    """Who shares the ledger that this directory lies in, or is."""
    for place in (directory, *directory.parents[: _LEVELS - 1]):
        try:
            mark, here = (place / MARK).lstat(), place.stat()
        except OSError:
            continue
        if stat.S_ISREG(mark.st_mode) and mark.st_uid == here.st_uid:
            return Access(mark.st_gid)
    return PRIVATE


def journal_in(ledger: Path) -> Path:
    """Where a ledger's journal lies: shared, in a directory of its own, since what SQLite puts beside it any member
    must be able to remove."""
    return (
        ledger / "journal.db"
        if access_to(ledger).group is None
        else ledger / "journal" / "journal.db"
    )


def outsider(directory: Path) -> LedgerUnavailable | None:
    """The error for a ledger that is shared by a group which this process is not in; None where it is not so."""
    for place in (directory, *directory.parents):
        try:
            here = place.stat()
        except OSError:
            continue
        shared = (
            here.st_mode & stat.S_ISGID
            and here.st_mode & stat.S_IWGRP
            and not here.st_mode & stat.S_IXOTH
        )
        if not shared or here.st_gid in (os.getegid(), *os.getgroups()):
            return None
        group, me = _group_name(here.st_gid), name_of(os.geteuid())
        return LedgerUnavailable(
            f"the ledger {place} is shared by the group {group}, and {me} is not in it.\n"
            f"  The operator can add you:  usermod -aG {group} {me}      (then log in again)\n"
            f"  Or keep your own:  GPU_LEDGER=sqlite://{Path.home()}/gpu-ledger",
            path=str(place),
            group=group,
            user=me,
        )
    return None


def _group_name(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
