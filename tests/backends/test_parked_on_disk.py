"""Bytes of notebooks and of models move on to a file on a disk, and return bit for bit, or not at all."""

import contextlib
import errno
import gc
import io
import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from torch import nn

from gpu_runtime.backends.base import Damaged, NotStill
from gpu_runtime.backends.pytorch import park_file, torch_model
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.facts import HOST, ModelSpec, Share
from gpu_runtime.units import MIB
from tests import simgpu
from tests.backends.test_kernel_memory import Kernel
from tests.clock import PATIENCE, scaled
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

    @property
    def stored(self) -> dict[int, park_file.Stored]:
        return {one.storage._cdata: one.stored for one in self.handle.away if one.stored}

    def is_whole(self) -> bool:
        now = [tensor.cpu().numpy().tobytes() for tensor in self.tensors]
        return now == [v if isinstance(v, bytes) else v.numpy().tobytes() for v in self.values]


class ModelOnDisk(OnDisk):
    """A model on a card, made by a factory, with a weight of random bytes for each of SIZES."""

    def __init__(self, kind: str, directory: Path, *, encrypted: bool = False) -> None:
        self.directory, self.encrypted = directory, encrypted
        self.values = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in SIZES]
        probe = open_probe("sim:2x64MiB,host:64MiB") if kind == "sim" else simgpu.SimProbe()
        self.card, self.backend = f"{kind}:0", open_backend("torch", probe)
        weights = [nn.Parameter(one.clone(), requires_grad=False) for one in self.values]
        self.handle = self.backend.load(
            ModelSpec("net", "torch"), (Share(self.card, sum(SIZES)),), lambda: module_of(weights)
        )
        self.tensors = list(self.handle.module.parameters())

    def park(self) -> None:
        self.backend.move(self.handle, (Share(HOST, sum(SIZES)),))

    def unpark(self) -> None:
        self.backend.move(self.handle, (Share(self.card, sum(SIZES)),))

    @property
    def stored(self) -> dict[int, park_file.Stored]:
        return self.handle.stored


def module_of(weights: list[nn.Parameter]) -> nn.Module:
    """A module in which each weight is a layer of its own, so that they can leave one by one."""
    layers = []
    for weight in weights:
        layers.append(nn.Module())
        layers[-1].weight = weight
    return nn.Sequential(*layers).eval()


KINDS = {"notebook": OnDisk, "model": ModelOnDisk}
CARDS = ["simgpu", "sim", "encrypted"]  # a file is encrypted on a card only: `simgpu`


def on_disk(what: str, card: str, directory: Path) -> OnDisk:
    encrypted = card == "encrypted"
    return KINDS[what]("simgpu" if encrypted else card, directory, encrypted=encrypted)


@pytest.fixture(params=CARDS)
def kernel(request, tmp_path):
    return on_disk("notebook", request.param, tmp_path)


@pytest.fixture(params=[f"{what} {card}" for what in KINDS for card in CARDS])
def held(request, tmp_path):
    return on_disk(*request.param.split(), tmp_path)


def file_of(kernel: OnDisk) -> park_file.ParkFile:
    [file] = {one.file for one in kernel.stored.values()}
    return file


def test_the_bytes_return_from_the_disk_bit_for_bit(held):
    held.park()
    held.to_disk()
    assert held.on_disk == sum(SIZES) and held.bytes == {HOST: sum(SIZES)}
    held.unpark()
    assert held.is_whole() and held.on_disk == 0


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

    monkeypatch.setattr(os, name, Mock(side_effect=OSError(number, os.strerror(number))))


@pytest.mark.parametrize(
    "call, number",
    [
        ("posix_fallocate", errno.ENOSPC),  # the disk is full
        ("pwrite", errno.EROFS),  # it was mounted read-only again
        ("fsync", errno.EIO),
    ],
)
def test_bytes_that_cannot_be_written_stay_in_ram(held, monkeypatch, call, number):
    held.park()
    with monkeypatch.context() as broken:
        fails(call, number, broken)
        with pytest.raises(OSError) as raised:
            held.to_disk()
    assert raised.value.errno == number
    assert_in_ram(held)


def test_a_removed_directory_is_an_error_and_one_removed_later_is_not(held):
    held.park()
    held.directory.rmdir()
    with pytest.raises(FileNotFoundError):
        held.to_disk()
    held.directory.mkdir()
    held.to_disk()
    held.directory.rmdir()  # it is empty: the file has no name
    held.unpark()
    assert held.is_whole()


def test_what_the_disk_has_not_kept_is_found_before_the_ram_is_freed(held, monkeypatch):
    """The verification reads the disk: a write that lost a byte is no write."""
    held.park()
    write = os.pwrite

    def lossy(fd: int, data: memoryview, at: int) -> int:
        size = write(fd, data, at)
        with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
            write(file.fileno(), bytes(8), at)
        return size

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", lossy)
        with pytest.raises(park_file.Damaged, match="not what was written"):
            held.to_disk()
    assert_in_ram(held)


def damage(kernel: OnDisk, at: int) -> None:
    """Changes the byte `at` of the file."""
    with open(f"/proc/self/fd/{file_of(kernel)._file.fileno()}", "r+b", buffering=0) as file:
        old = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([old[0] ^ 1]), at)


@pytest.mark.parametrize("how", ["changed", "cut", "unreadable"])
def test_a_damaged_file_is_an_error_that_names_its_storages_and_no_value(held, monkeypatch, how):
    held.park()
    held.to_disk()
    stored = dict(held.stored)
    with monkeypatch.context() as broken:
        if how == "changed":
            damage(held, 5)
        elif how == "cut":
            os.truncate(f"/proc/self/fd/{file_of(held)._file.fileno()}", 2 * MIB)
        else:
            fails("preadv", errno.EIO, broken)
        with pytest.raises(Damaged) as raised:
            held.unpark()
    assert held.bytes == {HOST: sum(SIZES)}
    if isinstance(held, ModelOnDisk) and held.card == "sim:0":
        assert held.backend.probe.used() == {"sim:0": 0, "sim:1": 0, HOST: 0}
    assert raised.value.directory == held.directory and raised.value.keys <= stored.keys()
    assert raised.value.bytes == sum(stored[key].bytes for key in raised.value.keys)
    if how == "changed":  # only the storages in the piece of this byte
        [key] = raised.value.keys
        assert stored[key].start == 0
    assert held.on_disk == sum(SIZES)
    if how == "changed":
        damage(held, 5)
        held.unpark()
        assert held.is_whole()


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


def test_bytes_return_from_ram_while_a_slow_disk_is_written(held, monkeypatch):
    """The return does not wait for the disk, and the write ends without an effect."""
    held.park()
    write, reached, go_on = os.pwrite, threading.Event(), threading.Event()

    def slow(*args: object) -> int:
        reached.set()
        assert go_on.wait(PATIENCE)
        return write(*args)  # type: ignore[arg-type]

    raised: list[BaseException] = []

    def to_disk() -> None:
        try:
            held.to_disk()
        except BaseException as error:
            raised.append(error)

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", slow)
        writing = threading.Thread(target=to_disk)
        writing.start()
        assert reached.wait(PATIENCE)
        held.unpark()
        assert held.is_whole()
        go_on.set()
        writing.join(PATIENCE)
    [error] = raised
    assert isinstance(error, NotStill) and held.on_disk == 0 and held.is_whole()


def test_the_file_ends_with_the_last_storage_in_it(held):
    held.park()
    held.to_disk()
    fd = file_of(held)._file.fileno()
    held.unpark()
    gc.collect()
    with contextlib.suppress(OSError):
        assert not os.readlink(f"/proc/self/fd/{fd}").startswith(str(held.directory))


# -- models


def test_the_file_of_a_model_is_its_users_alone_and_has_no_name(tmp_path):
    model = ModelOnDisk("simgpu", tmp_path)
    model.park()
    model.to_disk()
    found = os.stat(f"/proc/self/fd/{file_of(model)._file.fileno()}")
    assert (stat.S_IMODE(found.st_mode), found.st_nlink) == (0o600, 0)
    assert not os.listdir(tmp_path) and found.st_size >= sum(SIZES)


@pytest.mark.parametrize("card", CARDS)
def test_a_model_on_disk_that_is_given_up_leaves_its_bytes_to_the_module(tmp_path, caplog, card):
    """They exist nowhere else. Where the disk has lost some, those tensors are empty, and a warning says so."""
    for damaged in (False, True):
        model = on_disk("model", card, tmp_path)
        model.park()
        model.to_disk()
        if damaged:
            damage(model, 5)
        first = next(key for key, one in model.stored.items() if one.start == 0)
        lost = [one for one in model.tensors if one.untyped_storage()._cdata == first]
        model.backend.drop(model.handle)
        assert [one.numel() for one in lost] == [0 if damaged else SIZES[0]]
        assert ("is lost" in caplog.text) is damaged
        if damaged:
            del model.tensors[0], model.values[0]
        assert model.is_whole()


def test_a_model_whose_weights_could_be_written_in_ram_stays_there():
    """Such as one that its user made on the CPU: what is written to a file could be outdated."""
    backend = open_backend("torch", open_probe("sim:64MiB,host:64MiB"))
    handle = backend.adopt(ModelSpec("net", "torch"), nn.Linear(8, 8).eval())
    assert backend.measure(handle)[0].device == HOST and not backend.stows(handle)


def test_a_part_of_a_model_returns_from_the_disk_and_the_rest_later(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_model, "LEAST_BYTES_IN_PARTS", 0)
    for card in CARDS:
        model = on_disk("model", card, tmp_path)
        model.park()
        model.to_disk()
        there = model.on_disk
        model.backend.move(
            model.handle, (Share(model.card, SIZES[0]), Share(HOST, there - SIZES[0]))
        )
        assert model.bytes == {model.card: SIZES[0], HOST: there - SIZES[0]}
        assert model.on_disk == there - SIZES[0]
        model.park()
        assert model.bytes == {HOST: there} and model.on_disk == there - SIZES[0]
        model.to_disk()
        assert model.on_disk == there and len({one.file for one in model.stored.values()}) == 2
        model.unpark()
        assert model.is_whole()


DTYPES = some.sampled_from([torch.uint8, torch.float32, torch.bfloat16, torch.complex64])
WEIGHTS = some.lists(some.tuples(DTYPES, some.integers(0, 3000)), min_size=1, max_size=6)
DEEDS = some.lists(some.sampled_from(["card", "other", "ram", "disk", "write"]), max_size=8)


@settings(
    max_examples=max(1, settings().max_examples // 5),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(weights=WEIGHTS, deeds=DEEDS, card=some.sampled_from(CARDS))
def test_a_random_model_is_the_same_wherever_it_was(guards, weights, deeds, card):
    """Tied weights, views and a buffer follow their storage. On its card, weights are written in between."""
    kind = "sim" if card == "sim" else "simgpu"
    probe = open_probe("sim:2x64MiB,host:64MiB") if kind == "sim" else simgpu.SimProbe()
    bits = [torch.randint(0, 256, (n * of.itemsize,), dtype=torch.uint8) for of, n in weights]
    made = [
        nn.Parameter(one.clone().view(of), False)
        for one, (of, _) in zip(bits, weights, strict=True)
    ]
    module = module_of([*made, made[0]])
    module.register_buffer("start", made[-1].data[: len(made[-1]) // 2])
    backend = open_backend("torch", probe)
    handle = backend.load(ModelSpec("net", "torch"), (Share(f"{kind}:0", 1),), lambda: module)
    for number, deed in enumerate(deeds):
        here = backend.measure(handle)[0].device
        if deed in ("card", "other"):
            backend.move(handle, (Share(f"{kind}:{int(deed == 'other')}", 1),))
        elif deed == "write" and here != HOST:
            for one, weight in zip(bits, made, strict=True):
                one.fill_(number + 1)
                weight.view(torch.uint8).fill_(number + 1)
        elif deed == "ram":
            backend.move(handle, (Share(HOST, 1),))
        elif deed == "disk" and here == HOST and backend.stows(handle):
            directory = Path(tempfile.gettempdir())
            written = backend.write(handle, directory, encrypted=card == "encrypted")
            backend.move_on(handle, written)
            assert handle.disk_bytes == sum(one.nbytes for one in bits) and not probe.used()[HOST]
    backend.move(handle, (Share(f"{kind}:1", 1),))
    assert handle.disk_bytes == 0 and module[len(made)].weight is made[0]
    for one, weight in zip(bits, made, strict=True):
        assert torch.equal(weight.view(torch.uint8).cpu(), one)
    assert torch.equal(module.start.cpu().view(torch.uint8), bits[-1][: module.start.nbytes])


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

tensors = [torch.rand(MIB // 4) for _ in range({(taken := 160)})]
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
    assert max(later) - first < taken / 2, shown.stdout


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


def test_a_forked_child_does_not_keep_the_blocks_of_a_file(tmp_path):
    """It may live on after its parent was killed, and the disk would stay full."""
    file = park_file.ParkFile(tmp_path, MIB)
    assert str(tmp_path) in os.readlink(f"/proc/self/fd/{file._file.fileno()}")
    child = os.fork()
    if not child:
        fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        kept = [fd for fd in fds if os.path.lexists(fd) and str(tmp_path) in os.readlink(fd)]
        os._exit(len(kept))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    file.read(lambda start, buffer: None, [])
