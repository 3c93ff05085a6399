"""Files of this user, which stay private, and files that anybody may have written.

A private file is only as private as the directories above it. A user who may rename one of these
directories, or who owns a link in the path, can put another file in the place of the private file.
OpenSSH checks the path of a key in the same way.

Files of models and settings may have been written by anybody. Opening them always ends, and takes
little memory. Only regular files are read. Their size is checked before, and the depth of their JSON
after. Every error is one sentence with the path.

The log files of engines that run as processes are in this user's state directory. The name of a log
contains the model, the process that started the engine, and a number.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
import secrets
import site
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from .units import MIB, show_bytes

FALLBACK = Path("/var/tmp")  # a local disk on every machine; its files survive a logout
_NETWORK = frozenset(
    "nfs nfs4 cifs smb smb2 smb3 smbfs lustre gpfs mmfs ceph 9p afs beegfs beegfs_nodev glusterfs davfs ocfs2 gfs2 "
    "orangefs panfs wekafs ncpfs coda fuse.sshfs fuse.glusterfs fuse.ceph-fuse fuse.ceph fuse.s3fs fuse.rclone "
    "fuse.gcsfuse fuse.goofys fuse.mount-s3 fuse.juicefs fuse.beegfs fuse.lustre fuse.davfs2 fuse.smbnetfs "
    "fuse.blobfuse2".split()
)
_MOUNTS = Path("/proc/self/mountinfo")
MOST_STEPS = 200  # limit of directories and links on the way, since links can form a circle


def state_home() -> Path:
    """The directory of this user's files that survive a restart. It may not exist yet."""
    return _below_home("XDG_STATE_HOME", "~/.local/state") or fallback_home()


def config_home() -> Path:
    """The directory of the files that this user writes for gpu-console. It may not exist."""
    without_home = FALLBACK / f"gpu-console-config-{os.geteuid()}"
    return _below_home("XDG_CONFIG_HOME", "~/.config") or without_home


def _below_home(variable: str, default: str) -> Path | None:
    """Our directory below the one that the `variable` names, or below the `default`. None without a home.

    A relative path is ignored, as the XDG specification says: each working directory would have files of its own.
    """
    homes = (os.environ.get(variable, ""), os.path.expanduser(default))
    return next((Path(home) / "gpu-console" for home in homes if os.path.isabs(home)), None)


def fallback_home() -> Path:
    """This user's directory on a local disk, in place of one in the home. Another user could make it first."""
    return FALLBACK / f"gpu-console-{os.geteuid()}"


def local_state() -> Path:
    """The directory on a local disk for this user's files with locks. It may not exist yet.

    The result is the state directory, or a directory in /var/tmp if the state directory is on a
    network file system. Another user could make the directory in /var/tmp first. So
    `weak_step` must check the directory before its first use.
    """
    directory = state_home()
    if is_network(file_system_of(directory)):
        return fallback_home()
    return directory


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
        mounts = os.fsdecode(_MOUNTS.read_bytes())
    longest, kind = -1, "unknown"
    # Any user may mount by FUSE. A mount point may be any bytes; Linux escapes only blank, tab, newline and backslash.
    for line in mounts.strip("\n").split("\n"):
        fields, _, source = line.partition(" - ")
        mount_point = _unescaped(fields.split(" ")[4])
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


def own_process() -> str:
    """This process's name in a directory that machines and containers share, which may have equal process numbers."""
    return f"{os.uname().nodename}-{os.getpid()}"


def child_environment() -> dict[str, str]:
    """This process's environment, in which a child process can import this package too.

    A notebook may have found the package by a finder (`gpu box install`) or by its own `sys.path`,
    which a child has not.
    """
    package = str(Path(__file__).parents[1])
    if package in (*site.getsitepackages(), site.getusersitepackages()):
        return dict(os.environ)
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": paths}


def stamp(path: str | os.PathLike[str] | None) -> tuple[int, ...] | None:
    """A value that differs after each change of the file `path` or of its mode; None if there is no file."""
    try:
        found = os.stat(path or "")
    except OSError:  # the caller reads the file, and reports all other errors
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def open_files(pid: int | str, proc: str | Path = "/proc") -> Iterator[tuple[str, str]]:
    """The open files of the process `pid` by their numbers: the path of each descriptor, and where it leads.

    There are none if the process has ended or belongs to another user.
    """
    directory = f"{proc}/{pid}/fd"
    try:
        names = sorted(os.listdir(directory), key=int)
    except OSError:  # the process has ended, or belongs to another user
        return
    for name in names:
        try:
            target = os.readlink(f"{directory}/{name}")
        except OSError:  # closed meanwhile
            continue
        yield f"{directory}/{name}", target


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


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A block in which this process alone has the lock file `path`. Waits for it. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600)) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def lock_within(fd: int, seconds: float) -> None:
    """Locks the file `fd`. Raises BlockingIOError if another process has the lock for `seconds`."""
    until = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.005)


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


# -- files that anybody may have written -----------------------------------------------------------


MOST_JSON = 4 * MIB  # of a model's config; the largest known ones have 1 MiB
DEEPEST = 100  # lists and objects in one another
MOST_LAYERS = 10_000
MOST_OTHERS = 1_000_000  # labels, experts, heads
_LAYERS = re.compile(r"(^|_)(layers?|blocks?|depths?|stages?)($|_)")
_OTHERS = re.compile(r"(^|_)(labels|classes|experts|heads|groups|codebooks)($|_)")


class BadFile(OSError):
    """A file that is not read. `strerror` says why, as the end of a sentence about the file."""

    def __init__(self, path: str | os.PathLike[str], why: str) -> None:
        """`why` is the reason, such as `it is a device, not a file`."""
        super().__init__(errno.EINVAL, why, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename} cannot be read: {self.strerror}"


def _too_large(path: str | os.PathLike[str], size: int, most: int) -> BadFile:
    return BadFile(path, f"it has {show_bytes(size)}, and at most {show_bytes(most)} are read")


def open_regular(path: str | os.PathLike[str], *, to_append: bool = False) -> BinaryIO:
    """The file `path`, opened for unbuffered reading of bytes. Raises BadFile for a pipe or a device.

    If `to_append` is true, the file is opened for writing at its end, and made if it is missing.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT if to_append else os.O_RDONLY
    # Without O_NONBLOCK, opening a pipe would wait for its other end. With O_RDWR it never fails.
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "ab" if to_append else "rb", buffering=0)  # type: ignore[return-value]
    os.close(descriptor)
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    raise BadFile(path, f"it is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a file")


def read_limited(path: str | os.PathLike[str], most: int = MOST_JSON) -> bytes:
    """The bytes of the file `path`. Raises BadFile for more than `most` bytes, and OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise _too_large(path, size, most)
        parts = []
        while part := file.read(most + 1):  # also a file of /proc, whose size is 0
            parts.append(part)
            most -= len(part)
            if most < 0:
                raise BadFile(path, "it grows while it is read")
        return b"".join(parts)


def read_text(path: str | os.PathLike[str], most: int = MOST_JSON) -> str:
    """The text of the file `path` in UTF-8. Raises BadFile, OSError."""
    try:
        return read_limited(path, most).decode()
    except UnicodeDecodeError:
        raise BadFile(path, "it is no text in UTF-8") from None


def json_object(path: str | os.PathLike[str], most: int = MOST_JSON) -> dict[str, Any]:
    """The JSON object in the file `path`. Raises BadFile, OSError."""
    try:
        value = json.loads(read_limited(path, most))
    except RecursionError:
        raise BadFile(path, _TOO_DEEP) from None
    except ValueError:  # also of a number with too many digits
        raise BadFile(path, "its JSON cannot be read") from None
    if not isinstance(value, dict):
        raise BadFile(path, "its JSON is not an object")
    if is_deep(value):
        raise BadFile(path, _TOO_DEEP)
    return value


_TOO_DEEP = f"its JSON is nested more than {DEEPEST} levels deep"


def is_deep(value: Any) -> bool:
    """Whether lists and objects in `value` are nested too deep, without recursion."""
    level = [value]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for outer in level:
            inner = outer.values() if isinstance(outer, dict) else outer
            below += [item for item in inner if isinstance(item, (dict, list))]
        if not below:
            return False
        level = below
    return True


def count_fault(config: Mapping[str, Any]) -> str:
    """Why the counts in a model's `config` are impossible, as the end of a sentence; else empty.

    A library would make so many layers or labels before it looks at the weights.

    >>> count_fault({"text_config": {"num_hidden_layers": 10**9}})
    'its num_hidden_layers is 1,000,000,000, and at most 10,000 are loaded'
    """
    pending = [config]
    while pending:
        for key, value in pending.pop().items():
            if isinstance(value, Mapping):
                pending.append(value)
            most = MOST_LAYERS if _LAYERS.search(str(key)) else MOST_OTHERS
            if most is MOST_OTHERS and not _OTHERS.search(str(key)):
                continue
            numbers = value if isinstance(value, list) else [value]
            for number in numbers:
                if isinstance(number, (int, float)) and number > most:
                    return f"its {key} is {number:,}, and at most {most:,} are loaded"
    return ""


def require_regular_files(directory: Path, most: int = 256 * MIB) -> None:
    """Raises BadFile for an entry of the model's `directory` that a library could read for ever.

    That is a device or a pipe, or a text or JSON file of more than `most` bytes.
    """
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        try:
            found = entry.stat()
        except OSError:  # a link to nothing: the library does not see it either
            continue
        if stat.S_ISDIR(found.st_mode):
            continue
        if not stat.S_ISREG(found.st_mode):
            open_regular(entry.path).close()
        is_text = entry.name.endswith((".json", ".txt", ".jinja", ".model", ".py", ".yaml"))
        if is_text and found.st_size > most:
            raise _too_large(entry.path, found.st_size, most)


# -- the log files of engines ----------------------------------------------------------------------


KEPT_LOGS = 50
_numbers = itertools.count(1)


def new_log(name: str) -> Path:
    """The path of a new, empty log for the model `name`. Of the older logs, at most KEPT_LOGS remain."""
    directory = _directory()
    make_directory(directory)
    known = sorted(directory.glob("*.log"), key=_modified_ns)
    for old in known[: -KEPT_LOGS + 1]:
        old.unlink(missing_ok=True)
    log = directory / f"{_stem(name)}-{next(_numbers)}.log"
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(log, flags, 0o600))
    return log


def newest_log(name: str) -> Path | None:
    """The log of the engine that this process started last for the model `name`, or None."""
    own = re.compile(rf"{re.escape(_stem(name))}-(\d+)\.log")
    logs = {
        int(found[1]): path
        for path in _directory().glob("*.log")
        if (found := own.fullmatch(path.name))
    }
    return logs[max(logs)] if logs else None


def part_of(log: Path, after: int, most: int) -> tuple[str, int]:
    """The text of the file `log` from byte `after` to the end, and the size of the file in bytes.

    If the text has more than `most` bytes, only the last `most` bytes are read. A file that is
    shorter than `after` is read from its beginning. Raises OSError.
    """
    with open(log, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin = after if 0 <= after <= size else 0
        file.seek(max(begin, size - most))
        return file.read(most).decode("utf-8", "replace"), size


def _directory() -> Path:
    return state_home() / "engines"


def _stem(name: str) -> str:
    model = re.sub(r"[^\w.-]+", "_", name)[:60]
    return f"{model}-{own_process()}"


def _modified_ns(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0
