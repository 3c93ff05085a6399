"""The directory of a ledger: which one a URL names, how it is made and cleaned up, and who may use it.

    LEDGER/BOOT-ID/           leases end with the boot, so each boot has its own book
        keeper.sock           the keeper's socket; keeper.log has what the keeper printed
        owners/ID             with a Redis: each owner's lock and roster (liveness.py)
        owners/ID.bell        its doorbell (notify.py)

Its files have access rights for one user alone, or for a group:

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
import grp
import itertools
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, urlencode

from ..attribution import name_of
from ..errors import BadSetting, LedgerUnavailable
from ..facts import Device
from ..files import file_system_of, is_network, local_state, make_directory, weak_step
from ..units import show_bytes
from .liveness import Life, life

if TYPE_CHECKING:
    import sqlite3

MARK = ".shared"
_LEVELS = 4  # a ledger's deepest directory is LEDGER/WORLD/BOOT/owners
_REPLACED = "something else has taken its place"
STICKY, COMMON, ONE_USERS = 0o3770, 0o2770, 0o2750  # modes of directories, see above


class Access(NamedTuple):
    """The group that shares a ledger; None if the ledger is private."""

    group: int | None = None

    def open_file(self, path: Path) -> None:
        """Lets the group's members read and write this user's file `path`. Raises OSError.

        In a private ledger, nothing is changed.
        """
        self._open(path, 0o660)

    def open_directory(self, path: Path, mode: int = COMMON) -> None:
        """Gives this user's directory `path` to the group, with this `mode`. Raises OSError.

        In a private ledger, nothing is changed.
        """
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
            self.make_directory(made, STICKY if made in (world, _beside(directory)) else COMMON)

    def make_directory(self, path: Path, mode: int) -> None:
        """Makes the directory `path` with its final `mode`, if it does not exist.

        Raises OSError if `path` exists and is not a directory,
        or if the directory cannot be made.
        """
        if not os.path.lexists(path):
            # A draft gets its mode before its final name. So no other process finds a directory
            # that is closed to the group.
            draft = path.with_name(f".new-{secrets.token_hex(4)}")
            draft.mkdir(0o700)
            self.open_directory(draft, mode)
            try:
                draft.rename(path)
            except OSError:
                draft.rmdir()  # another process has made the directory already
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, _REPLACED, str(path))

    def make_file(self, path: Path) -> None:
        """Makes the empty file `path` with its final mode, if it does not exist. Raises OSError."""
        if os.path.lexists(path):
            return
        draft = path.with_name(f".new-{secrets.token_hex(4)}")
        draft.touch(0o600, exist_ok=False)
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
    access = access_to(place.users.parent)
    access.make_directory(place.users, STICKY)
    access.make_directory(place.own.parent, ONE_USERS)
    weak = weak_step(place.own)
    if weak:
        raise PermissionError(errno.EPERM, f"another user could replace it: {weak}", str(place.own))
    if not os.path.lexists(place.own):
        with suppress(FileExistsError):  # another process of this user has made it
            place.own.touch(0o600, exist_ok=False)
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
    above = next(folder.parent for folder in path.parents if os.path.lexists(folder / MARK))
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
            f"  Or keep your own:  GPU_LEDGER={default_url()}",
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
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:  # a group without a name, as in containers
        return str(gid)


# -- the directory of a ledger: how it is made, checked and cleaned up -----------------------------


OLD_SECONDS = 86400.0
_BOOT = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_DRAFT = re.compile(r"\.(new-|\d+-)[0-9a-f]{8}")
_OWNER = re.compile(r"\d+\.\d+\.\d+")


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


# -- the directories that URLs name ----------------------------------------------------------------


FILE_SCHEMES = ("keeper:", "sqlite:")  # version 0.2 kept the book in an SQLite file


def directory_of(url: str, rest: str) -> Path:
    """The directory that `url` names. `rest` is the part of `url` after its scheme.

    Four slashes in a URL, as other tools write them, mean the same as three slashes. A name that
    ends in `.db` means the directory without this ending. Raises BadSetting for a relative path, and
    for a directory in the root of the file system that does not exist.
    """
    directory = Path("/" + rest.lstrip("/"))
    if directory.suffix == ".db":
        directory = directory.with_suffix("")
    as_relative = Path(*directory.parts[1:])
    if as_relative.parts and as_relative.parts[0] in ("~", ".", ".."):
        raise BadSetting(
            "GPU_LEDGER",
            url,
            f"an absolute path, such as keeper://{os.path.abspath(os.path.expanduser(as_relative))}",
        )
    if len(as_relative.parts) < 2 and not directory.exists():
        raise BadSetting(
            "GPU_LEDGER",
            url,
            f"a directory that is not in the root of the file system. Relative to the current "
            f"directory it is keeper://{as_relative.absolute()}",
        )
    return directory


def split_redis_url(url: str) -> tuple[str, Path]:
    """Splits `url` into the server's URL and the local directory for the owners' files.

    The option `owners=` in `url` names the directory. Without this option, the directory is `redis`
    in `local_state()`. The returned URL keeps all other options.
    """
    server, _, query = url.partition("?")
    options = parse_qsl(query)
    named = [value for name, value in options if name == "owners"]
    if named:
        directory = Path(named[-1])
    else:
        directory = Path(default_url().removeprefix("keeper://")).parent / "redis"
    other_options = urlencode([(name, value) for name, value in options if name != "owners"])
    if other_options:
        server = f"{server}?{other_options}"
    return server, directory


def default_url(devices_slug: str = "") -> str:
    """The URL of this user's private ledger, which is used if no setting names a ledger.

    The ledger is under the state directory. If the state directory is on a network file system,
    where locks do not hold, the ledger is in /var/tmp. `devices_slug` separates the books of
    different sets of devices, such as simulated and real cards.
    """
    return f"keeper://{local_state() / 'ledger' / devices_slug}"


def shared_url(ledger: str, slug: str) -> str:
    """The URL of the machine's shared `ledger`, or of its part `slug` for simulated devices."""
    return f"{ledger}/{slug}" if slug and ledger.startswith(FILE_SCHEMES) else ledger


def slug_of(simulated: Iterable[Device]) -> str:
    """A name made from the sizes of these `simulated` devices; empty without devices.

    The name selects the book. So each combination of sizes has a separate book.
    """
    devices = list(simulated)
    cards = [_compact(device.total_bytes) for device in devices if not device.is_host]
    if not cards:
        return ""
    groups = [f"{len(list(same))}x{size}" for size, same in itertools.groupby(cards)]
    host = next((device for device in devices if device.is_host and device.simulated), None)
    return f"sim-{'-'.join(groups)}" + (f"-host{_compact(host.total_bytes)}" if host else "")


def _compact(size: int) -> str:
    return show_bytes(size).replace(" ", "")


def require_private(directory: Path) -> None:
    """Raises LedgerUnavailable if another user could put files into the private ledger `directory`.

    If `directory` is below `local_state()`, no other user may be able to write to a directory on
    its path. `local_state()` is made here with mode 0700. If a setting names another directory,
    every directory on its path must belong to this user or to root, but may be writable for others,
    as in many containers. In two cases this other directory is not checked: the user is root, or
    the directory is in a shared ledger.
    """
    base = local_state()
    is_default = directory.is_relative_to(base)
    if not is_default and (os.geteuid() == 0 or access_to(directory).group is not None):
        return
    try:
        weak = weak_step(directory, may_be_writable=not is_default)
        if is_default and not weak:
            make_directory(base)
            weak = weak_step(directory)
    except OSError as error:
        if not is_default:  # such as another group's ledger: opening it raises the right error
            return
        raise cannot_write(directory, error) from error
    if weak:
        raise LedgerUnavailable(
            f"the ledger {directory} could be read or replaced by another user: {weak}.\n"
            f"  Name a directory of your own on a local disk:  GPU_LEDGER=keeper:///DIRECTORY",
            path=str(directory),
            why=weak,
        )
