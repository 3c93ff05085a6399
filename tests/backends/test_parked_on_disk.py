"""Parked bytes move on to a file on a disk, and return bit for bit, or not at all."""

import contextlib
import errno
import gc
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from gpu_runtime.backends.base import Damaged, NotStill
from gpu_runtime.backends.pytorch import park_file
from gpu_runtime.facts import HOST
from gpu_runtime.units import MIB
from tests import simgpu
from tests.backends.test_kernel_memory import Kernel
from tests.clock import scaled
from tests.stories.notebooks import paths

PIECE_BYTES = park_file.PIECE_BYTES
SIZES = (3 * MIB + 12, 1 * MIB, 2 * MIB + 4)  # bytes of storages; pieces of 1 MiB cut them anywhere


@pytest.fixture(autouse=True)
def _small_pieces(guards, monkeypatch):
    gc.collect()
    monkeypatch.setattr(park_file, "PIECE_BYTES", MIB)
    with simgpu.late(segment_bytes=2 * MIB):
        yield
        gc.collect()


class OnDisk(Kernel):
    """A kernel that holds a tensor of random bytes for each of SIZES."""

    def __init__(self, kind: str, directory: Path, *, encrypted: bool = False) -> None:
        super().__init__(kind)
        self.directory, self.encrypted = directory, encrypted
        self.values = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in SIZES]
        self.tensors = [
            value.clone() if kind == "sim" else value.to(self.card) for value in self.values
        ]
        if kind == "sim":  # there all large CPU tensors count as tensors of the card
            self.values = [value.numpy().tobytes() for value in self.values]  # type: ignore[misc]

    def to_disk(self) -> None:
        written = self.backend.write(self.handle, self.directory, encrypted=self.encrypted)
        self.backend.move_on(self.handle, written)

    @property
    def on_disk(self) -> int:
        return self.handle.disk_bytes

    def is_whole(self) -> bool:
        now = [tensor.cpu().numpy().tobytes() for tensor in self.tensors]
        return now == [v if isinstance(v, bytes) else v.numpy().tobytes() for v in self.values]


@pytest.fixture(params=["simgpu", "sim", "encrypted"])
def kernel(request, tmp_path):
    """A file is encrypted on a card only, so `encrypted` is on `simgpu`."""
    encrypted = request.param == "encrypted"
    return OnDisk("simgpu" if encrypted else request.param, tmp_path, encrypted=encrypted)


def file_of(kernel: OnDisk) -> park_file.ParkFile:
    [file] = {one.stored.file for one in kernel.handle.away if one.stored}
    return file


def test_the_bytes_return_from_the_disk_bit_for_bit(kernel):
    kernel.park()
    kernel.to_disk()
    assert kernel.on_disk == sum(SIZES) and kernel.bytes == {HOST: sum(SIZES)}
    kernel.unpark()
    assert kernel.is_whole() and kernel.on_disk == 0


@pytest.mark.parametrize("encrypted", [False, True])
def test_an_encrypted_file_has_no_plain_bytes_and_not_its_key(tmp_path, encrypted):
    """Every value is in a plain file, and none in an encrypted one. Equal pieces differ there."""
    kernel = OnDisk("simgpu", tmp_path, encrypted=encrypted)
    kernel.tensors[0].fill_(7)
    kernel.values[0].fill_(7)
    kernel.park()
    kernel.to_disk()
    file = file_of(kernel)
    content = Path(f"/proc/self/fd/{file._file.fileno()}").read_bytes()
    found = [one.numpy().tobytes()[64:128] in content for one in kernel.values]
    assert found == [not encrypted] * len(SIZES) and file.size <= len(content)
    if encrypted:
        assert len(file._cipher.key) == 32 and file._cipher.key not in content
        blocks = {content[at : at + 16] for at in range(0, file.size, 4096)}
        assert len(blocks) == len(range(0, file.size, 4096)), (
            "no two pages of equal bytes are equal"
        )
        other = park_file.ParkFile(tmp_path, MIB, encrypted=True)
        assert other._cipher.key != file._cipher.key
    kernel.unpark()
    assert kernel.is_whole()


def test_torch_save_of_a_tensor_on_disk_writes_its_bytes(kernel):
    kernel.park()
    kernel.to_disk()
    saved = io.BytesIO()
    with kernel.backend.readable(kernel.handle) as stand_in:
        torch.save(kernel.tensors[0], saved)
        shown = stand_in(kernel.tensors[1])
        assert shown.device.type == "cpu" and shown.numel() == SIZES[1]
    saved.seek(0)
    loaded = torch.load(saved, map_location="cpu", weights_only=True)
    kernel.unpark()
    assert torch.equal(loaded, kernel.tensors[0].cpu())


# -- faults of the disk


def assert_in_ram(kernel: OnDisk) -> None:
    """The bytes are in host memory as before, and return from there."""
    assert kernel.on_disk == 0 and kernel.bytes == {HOST: sum(SIZES)}
    kernel.unpark()
    assert kernel.is_whole()


def fails(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each call of the function `name` of `os` fail with the error `number`."""

    def fail(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize(
    "call, number",
    [
        ("posix_fallocate", errno.ENOSPC),  # the disk is full
        ("pwrite", errno.EROFS),  # it was mounted read-only again
        ("fsync", errno.EIO),
    ],
)
def test_bytes_that_cannot_be_written_stay_in_ram(kernel, monkeypatch, call, number):
    kernel.park()
    with monkeypatch.context() as broken:
        fails(call, number, broken)
        with pytest.raises(OSError) as raised:
            kernel.to_disk()
    assert raised.value.errno == number
    assert_in_ram(kernel)


def test_a_removed_directory_is_an_error_and_one_removed_later_is_not(kernel):
    kernel.park()
    kernel.directory.rmdir()
    with pytest.raises(FileNotFoundError):
        kernel.to_disk()
    kernel.directory.mkdir()
    kernel.to_disk()
    kernel.directory.rmdir()  # it is empty: the file has no name
    kernel.unpark()
    assert kernel.is_whole()


def test_what_the_disk_has_not_kept_is_found_before_the_ram_is_freed(kernel, monkeypatch):
    """The verification reads the disk: a write that lost a byte is no write."""
    kernel.park()
    write = os.pwrite

    def lossy(fd: int, data: memoryview, at: int) -> int:
        size = write(fd, data, at)
        with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
            write(file.fileno(), bytes(8), at)
        return size

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", lossy)
        with pytest.raises(park_file.Damaged, match="not what was written"):
            kernel.to_disk()
    assert_in_ram(kernel)


def damage(kernel: OnDisk, at: int) -> None:
    """Changes the byte `at` of the file."""
    with open(f"/proc/self/fd/{file_of(kernel)._file.fileno()}", "r+b", buffering=0) as file:
        old = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([old[0] ^ 1]), at)


@pytest.mark.parametrize("how", ["changed", "cut", "unreadable"])
def test_a_damaged_file_is_an_error_that_names_its_storages_and_no_value(kernel, monkeypatch, how):
    kernel.park()
    kernel.to_disk()
    away = {one.storage._cdata: one for one in kernel.handle.away}
    with monkeypatch.context() as broken:
        if how == "changed":
            damage(kernel, 5)
        elif how == "cut":
            os.truncate(f"/proc/self/fd/{file_of(kernel)._file.fileno()}", 2 * MIB)
        else:
            fails("preadv", errno.EIO, broken)
        with pytest.raises(Damaged) as raised:
            kernel.unpark()
    assert raised.value.directory == kernel.directory and raised.value.keys <= away.keys()
    assert raised.value.bytes == sum(away[key].storage.nbytes() for key in raised.value.keys)
    if how == "changed":  # only the storages in the piece of this byte
        [key] = raised.value.keys
        assert away[key].stored.start == 0
    assert kernel.on_disk == sum(SIZES)
    if how == "changed":
        damage(kernel, 5)
        kernel.unpark()
        assert kernel.is_whole()


def test_only_the_damaged_tensor_is_lost_once_it_is_deleted(kernel):
    kernel.park()
    kernel.to_disk()
    damage(kernel, 5)
    first = [one.storage.nbytes() for one in kernel.handle.away if one.stored.start == 0]
    number = SIZES.index(*first)
    del kernel.tensors[number], kernel.values[number]
    assert kernel.backend.forget_unused(kernel.handle) == SIZES[number]
    kernel.unpark()
    assert kernel.is_whole()


def test_torch_save_of_damaged_bytes_raises(kernel):
    kernel.park()
    kernel.to_disk()
    for start in range(0, sum(SIZES), MIB):
        damage(kernel, start)
    with kernel.backend.readable(kernel.handle), pytest.raises(Damaged):
        torch.save(kernel.tensors, io.BytesIO())


def test_bytes_return_from_ram_while_a_slow_disk_is_written(kernel, monkeypatch):
    """The return does not wait for the disk, and the write ends without an effect."""
    kernel.park()
    write, reached, go_on = os.pwrite, threading.Event(), threading.Event()

    def slow(*args: object) -> int:
        reached.set()
        assert go_on.wait(60)
        return write(*args)  # type: ignore[arg-type]

    raised: list[BaseException] = []

    def to_disk() -> None:
        try:
            kernel.to_disk()
        except BaseException as error:
            raised.append(error)

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", slow)
        writing = threading.Thread(target=to_disk)
        writing.start()
        assert reached.wait(60)
        kernel.unpark()
        assert kernel.is_whole()
        go_on.set()
        writing.join(60)
    [error] = raised
    assert isinstance(error, NotStill) and kernel.on_disk == 0 and kernel.is_whole()


def test_the_file_ends_with_the_last_storage_in_it(kernel):
    kernel.park()
    kernel.to_disk()
    fd = file_of(kernel)._file.fileno()
    kernel.unpark()
    gc.collect()
    with contextlib.suppress(OSError):
        assert not os.readlink(f"/proc/self/fd/{fd}").startswith(str(kernel.directory))


ROUNDS = f"""
import os, threading
from pathlib import Path
import psutil, torch
from gpu_runtime.units import MIB
from tests.backends.test_parked_on_disk import Kernel

def in_a_thread(call, *given):
    thread = threading.Thread(target=call, args=given)
    thread.start()
    thread.join()

tensors = [torch.rand(MIB // 4) for _ in range({(held := 160)})]
kernel, disk = Kernel("sim"), Path("DISK")
for _ in range(4):
    in_a_thread(kernel.park)
    in_a_thread(lambda: kernel.backend.move_on(kernel.handle, kernel.backend.write(kernel.handle, disk)))
    kernel.backend.probe.empty_cache()
    print(psutil.Process().memory_info().rss // MIB)
    in_a_thread(kernel.unpark)
"""


@pytest.mark.processes
def test_memory_on_the_disk_takes_no_ram_however_often_it_returned(tmp_path):
    """The C library keeps freed tensors in the heaps of threads: one heap here, so that the test is exact."""
    shown = subprocess.run(
        [sys.executable, "-c", ROUNDS.replace("DISK", str(tmp_path))],
        env={**os.environ, "MALLOC_ARENA_MAX": "2", "PYTHONPATH": paths()},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=scaled(120),
    )
    first, *later = map(int, shown.stdout.split())
    assert max(later) - first < held / 2, shown.stdout


def test_a_move_takes_at_most_64_mib_of_ram():
    assert park_file.WORKERS * PIECE_BYTES <= 64 * MIB


def test_a_digest_sees_what_its_sum_does_not():
    """Two exchanged words have the same sum. The CRC sees them."""
    pages = park_file._pages(MIB)
    words = torch.frombuffer(pages, dtype=torch.int64)
    words.copy_(torch.arange(len(words)))
    content, same = memoryview(pages), words.view(torch.uint8)
    before = park_file._digest(content, same)
    words[[1, 2]] = words[[2, 1]]
    after = park_file._digest(content, same)
    assert after[0] != before[0] and after[1] == before[1]
    words[-1] += 1
    assert park_file._digest(content, same)[1] == before[1] + 1
