"""The RAM that this process may still take: the memory limits of its cgroups.

A container, a user's slice of systemd and a hub's spawner set such limits. Linux ends a process that
goes beyond one, however much RAM the machine has. Source: the kernel's cgroup-v1/memory.rst and
cgroup-v2.rst.
"""

from __future__ import annotations

import math
from pathlib import Path

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_UNLIMITED = 2**60  # bytes; version 1 writes a number near 2**63 where there is no limit
# The files of version 1 and 2: the limit, what is used, and the line of memory.stat with cached
# pages of files, which Linux gives up before it ends a process.
_FILES = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ("memory.max", "memory.current", "inactive_file"),
)


def ram_left(root: Path = _ROOT, own: Path = _OWN) -> float:
    """The bytes of RAM that this process's cgroups still allow; infinite where none has a limit.

    `root` is the directory where the cgroups are mounted, and `own` the file that names those of this
    process.
    """
    try:
        lines = own.read_text(errors="surrogateescape").splitlines()
    except OSError:  # no Linux
        return math.inf
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top = root / "memory" if controllers == "memory" else root
        if controllers not in ("memory", ""):
            continue
        group = top / path.lstrip("/")
        if not group.is_dir():  # in a container the path is often that of the machine
            group = top
        while True:
            found += [left for names in _FILES if (left := _left(group, *names)) is not None]
            if group == top:
                break
            group = group.parent
    return min(found, default=math.inf)


def _left(group: Path, limit_file: str, used_file: str, cache: str) -> int | None:
    try:
        limit = (group / limit_file).read_text().strip()
        if not limit.isdigit() or int(limit) >= _UNLIMITED:
            return None
        used = int((group / used_file).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(stat.get(cache, 0)))
    except (OSError, ValueError):  # another version's file, or one that this process may not read
        return None
