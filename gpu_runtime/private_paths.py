"""Private files: where they are, how they are replaced and read, and who can change their path.

A file is only as private as the directories above it. A user who may rename one of these
directories, or who owns a link in the path, can put another file in the place of the private file.
OpenSSH checks the path of a key in the same way.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

MOST_STEPS = 200  # limit of directories and links on the way, since links can form a circle


def state_home() -> Path:
    """The directory of this user's files that survive a restart. It may not exist yet."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "gpu-console"


def config_home() -> Path:
    """The directory of the files that this user writes for gpu-console. It may not exist."""
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(config) / "gpu-console"


def make_directory(path: Path, mode: int = 0o700) -> None:
    """Makes the directory `path` with this `mode`, unless it exists, and those above it that are missing.

    Those above may be read by all users and changed by this user only, also if the umask is 000:
    another user could replace what is in them. Raises OSError.
    """
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for above in reversed(missing[1:]):
        above.mkdir(0o755, exist_ok=True)  # less with a umask such as 077
    if not path.is_dir():
        path.mkdir(mode, exist_ok=True)
        path.chmod(mode)


def replace_file(
    path: Path, content: bytes, prepare: Callable[[Path], object] | None = None
) -> None:
    """Replaces the whole file `path` at once, so a reader finds the old content or the new content.

    The new content is written to a draft with mode 0600, which then replaces the file.
    `prepare(draft)` may change the mode before that. After an error the old file remains. Raises
    OSError.
    """
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    try:
        with open(os.open(draft, flags, 0o600), "wb") as file:
            file.write(content)
        if prepare:
            prepare(draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read_plain(path: Path, most_bytes: int, owner: int | None = None) -> bytes:
    """The content of the file `path`, which another user may have replaced.

    Only a plain file is read, because opening a pipe could wait for ever. Raises OSError if `path`
    is no plain file, if the file has more than `most_bytes`, or if it does not belong to the user
    with the id `owner`. If `owner` is None, the file may belong to any user.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if found.st_size > most_bytes:
            raise OSError(errno.EFBIG, "it is too large to be ours")
        if owner is not None and found.st_uid != owner:
            raise OSError(errno.EPERM, f"uid {found.st_uid} wrote it")
        return file.read(most_bytes)


def weak_step(path: Path, *, may_be_writable: bool = False) -> str:
    """Why another user could replace `path`, in words such as `/var/tmp/x belongs to uid 1001`.

    The text names the first directory or link above `path`, or `path` itself, that another user can
    change. It is empty if only root and this user can change them. A directory that does not exist
    yet is not checked. A directory with the sticky bit, such as /tmp, may be writable for others,
    because they cannot replace the entries of this user in it. If `may_be_writable` is true, only
    the owners of the directories are checked. Raises OSError.
    """
    trusted = (0, os.geteuid())
    for step, found in _steps(path.absolute()):
        if found.st_uid not in trusted:
            return f"{step} belongs to uid {found.st_uid}"
        if stat.S_ISLNK(found.st_mode) or may_be_writable:
            continue  # of a link: only its owner, or the owner of its directory, can replace it
        writable_by_others = found.st_mode & stat.S_IWOTH
        writable_by_group = found.st_mode & stat.S_IWGRP and not _is_harmless(found.st_gid)
        if (writable_by_others or writable_by_group) and not found.st_mode & stat.S_ISVTX:
            return f"{step} can be changed by other users (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every directory and link from the root to `path`. Links are followed."""
    place = Path("/")
    yield place, os.lstat(place)
    parts = deque(path.parts[1:])
    for _ in range(MOST_STEPS):
        if not parts:
            return
        part = parts.popleft()
        if part == "..":
            place = place.parent
            continue
        step = place / part
        try:
            found = os.lstat(step)
        except FileNotFoundError:  # below a missing directory there are no links
            return
        yield step, found
        if not stat.S_ISLNK(found.st_mode):
            place = step
            continue
        target = Path(os.readlink(step))
        if target.is_absolute():
            place = Path("/")
        parts.extendleft(reversed([part for part in target.parts if part != "/"]))
    raise OSError(f"{path} has too many links")


def _is_harmless(gid: int) -> bool:
    """Whether a directory that the group `gid` may write is safe from other users.

    It is safe if the group is root's, or if it is the private group of this user: the user's
    primary group with the user's name, and without other members. Many systems make such a group
    for each user.
    """
    import grp
    import pwd

    if gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:  # without an entry the members are unknown
        return False
    return (
        gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    )
