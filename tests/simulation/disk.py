"""The local disk of the simulated box, and fake models whose bytes in RAM may move there.

The decisions are those of `owner/disk.py`. A file has a name of its content in place of bytes, and ends with its
last reference or its process, as a file of `park_file.py` does. The disk can be full, slow, broken and torn.
"""

import errno
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from gpu_runtime.backends.base import Damaged, NotStill
from gpu_runtime.backends.fake import FakeBackend, FakeModel
from gpu_runtime.errors import BadSetting
from gpu_runtime.facts import HOST
from gpu_runtime.owner import disk
from gpu_runtime.units import GIB

from .machine import Machine

DIRECTORY = Path("/the disk")
SECONDS_PER_BYTE = 0.5 / GIB
BLOCK = 4096


class File:
    """A file without a name, of a process."""

    def __init__(self, number: int, process: Any, size: int) -> None:
        self.number, self.process, self.size = number, process, size
        self.content: object = None


class Written(NamedTuple):
    """What `write` returns: a file that is compared with the bytes at `place`."""

    file: File
    place: object
    seconds: float
    read_seconds: float


class Disk:
    """A disk of `budget` GiB for parked bytes, on which other programs may take all that is free."""

    active: "Disk"

    def __init__(self, machine: Machine, budget: int) -> None:
        """Without a `budget`, nobody names a directory."""
        self.machine, self.budget = machine, budget
        self.hooks: set[Any] = set()  # of the models that may move there
        self._files: weakref.WeakSet[File] = weakref.WeakSet()
        self.made = 0  # files
        self.recover()
        Disk.active = self

    @property
    def settings(self) -> dict[str, Any]:
        if not self.budget:
            return {}
        return {"gpu_park_dir": str(DIRECTORY), "gpu_park_disk_gb": self.budget}

    def recover(self) -> None:
        """It is fast again, others take nothing, and it can be written."""
        self.slowness, self.others, self.error = 1.0, 0, 0

    def trouble(self) -> str:
        """Something happens to the disk. Returns what."""
        random = self.machine.random
        what = random.choice(("full", "slow", "read-only", "torn", "torn", "well", "well"))
        self.recover()
        if what == "full":
            self.others = self.budget * GIB
        elif what == "slow":
            self.slowness = random.choice((5.0, 100.0))
        elif what == "read-only":
            self.error = random.choice((errno.EROFS, errno.ENOENT, errno.EIO))
        elif what == "torn" and (files := self.files()):
            random.choice(files).content = "other bytes"
        return what

    def files(self) -> list[File]:
        """The files of the living."""
        files = [one for one in self._files if not one.process.killed]
        return sorted(files, key=lambda one: one.number)

    def bytes(self) -> int:
        return sum(one.size for one in self.files())

    def directory(self, session: Any) -> Path:
        if self.error:
            raise BadSetting("GPU_PARK_DIR", f"{DIRECTORY}", os.strerror(self.error))
        return DIRECTORY

    def statvfs(self, path: Path) -> Any:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        total = 2 * self.budget * GIB  # no other law keeps the budget
        free = max(0, total - self.bytes() - 2 * self.others)
        return SimpleNamespace(
            f_bavail=free // BLOCK, f_frsize=BLOCK, f_blocks=total // BLOCK
        )  # fmt: skip

    def new_file(self, size: int) -> File:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        if self.statvfs(DIRECTORY).f_bavail * BLOCK < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.made += 1
        assert self.machine.current is not None
        file = File(self.made, self.machine.current.process, size)
        self._files.add(file)
        return file

    def pause(self, size: int) -> float:
        """Waits while `size` bytes are written or read, each GiB as fast as the disk is then. Returns the seconds."""
        began = self.machine.now
        for done in range(0, size, GIB):
            part = min(GIB, size - done)
            self.machine.pause(None, part * SECONDS_PER_BYTE * self.slowness)
        return self.machine.now - began


def use(active: Disk) -> None:
    """Lets the product use this disk."""
    Disk.active = active
    disk.directory = active.directory
    disk.os = SimpleNamespace(statvfs=active.statvfs, path=os.path)  # type: ignore[assignment]
    disk.trim_heap = lambda: None


class Stowing(FakeBackend):
    """Fake models, of which some may move to the disk. The name of a model stands for its bytes."""

    def stows(self, model: FakeModel) -> bool:
        return model.hook in Disk.active.hooks

    def write(self, model: FakeModel, directory: Path, *, encrypted: bool = False) -> Written:
        place, there = model.place, Disk.active
        size = sum(share.bytes for share in place[0] if share.device == HOST)
        if not place[1] or {share.device for share in place[0]} != {HOST}:
            raise NotStill("its bytes are not all in RAM")
        file = there.new_file(size)
        seconds = there.pause(size)
        file.content = model.name if there.machine.random.random() < 0.95 else "a lost write"
        read_seconds = there.pause(size)
        if model.place is not place:
            raise NotStill("its memory returned")
        if file.content != model.name:
            raise Exception("are not what was written")  # noqa: TRY002 - as park_file's Damaged
        return Written(file, place, seconds + read_seconds, read_seconds)

    def move_on(self, model: FakeModel, written: Written) -> None:
        if model.place is not written.place:
            raise NotStill("its memory returned")
        shares, blocks = model.place
        model.file, model.disk_bytes = written.file, written.file.size  # type: ignore[attr-defined]
        model.place = shares, ()
        for block in blocks:
            block.free()

    def move(self, model: FakeModel, shares: Any, shadow: bool = False) -> None:
        file = file_of(model)
        if file is not None:
            Disk.active.pause(file.size)
            if file.content != model.name:
                raise Damaged("are not what was written", DIRECTORY, frozenset(), file.size)
        super().move(model, shares, shadow)
        self._let_go(model)

    def drop(self, model: FakeModel) -> None:
        super().drop(model)
        self._let_go(model)

    def _let_go(self, model: FakeModel) -> None:
        model.file, model.disk_bytes = None, 0  # type: ignore[attr-defined]


def file_of(model: Any) -> File | None:
    """The file that has the bytes of the fake `model`, if there is one."""
    return getattr(model, "file", None)
