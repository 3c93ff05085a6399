"""Parked memory moves from RAM to a disk when RAM is short, when it is idle, or by hand."""

import fcntl
import importlib.util
import os
import threading

import pytest
import torch

from gpu_runtime import BadSetting, GpuError
from gpu_runtime.backends.pytorch import park_file
from gpu_runtime.facts import HOST
from gpu_runtime.owner import disk, maintenance
from gpu_runtime.units import GIB, MIB
from tests import simgpu
from tests.clock import until

from .kernels import FLOATS, cell, keep, own


@pytest.fixture
def parked(started, tmp_path, clock):
    """Makes a runtime and its kernel, which holds 8 MiB of random numbers in RAM."""

    def park(**settings):
        rt, kernel = started(
            devices="sim:64MiB,host:64MiB",
            clock=clock,
            **{"gpu_park_dir": str(tmp_path), **settings},
        )
        tensor = keep(kernel, torch.rand(8 * FLOATS))
        kernel.before = tensor.clone().numpy().tobytes()[::7]
        rt.park()
        return rt, kernel

    return park


def kernel_lease(rt):
    [lease] = [lease for lease in rt.status().leases() if lease.kind == "kernel"]
    return lease


def assert_whole(kernel) -> None:
    cell(kernel)
    assert kernel.refused == ""
    assert kernel.kept_by_the_test.numpy().tobytes()[::7] == kernel.before


def test_hibernated_memory_takes_no_ram_and_returns_for_the_next_cell(parked):
    rt, kernel = parked()
    size = own(rt)[HOST]
    outcome = rt.hibernate()
    lease = kernel_lease(rt)
    assert (outcome.bytes, lease.disk_bytes, own(rt)) == (size, size, {HOST: 0})
    assert lease.where == "disk" and rt.status().devices[-1].claimed_bytes == 0
    assert rt.hibernate().bytes == 0, "it is there already"
    assert_whole(kernel)
    assert own(rt) == {"sim:0": size} and kernel_lease(rt).disk_bytes == 0


def test_hibernate_parks_what_is_on_the_card(parked):
    rt, kernel = parked()
    cell(kernel)
    assert rt.hibernate().where == "disk" and kernel_lease(rt).on_disk


def test_a_cell_that_hibernates_its_own_notebook_leaves_when_it_has_ended(parked):
    rt, kernel = parked()
    cell(kernel, lambda: rt.hibernate())
    until(lambda: kernel_lease(rt).on_disk)
    assert_whole(kernel)


@pytest.mark.parametrize(
    "named, says",
    [
        (None, "GPU_PARK_DIR=/var/tmp"),
        ("relative", "absolute"),
        ("/dev/shm", "tmpfs"),
        ("/proc/park", "write"),
    ],
)
def test_a_directory_that_cannot_be_used_is_refused_with_the_reason(parked, named, says):
    rt, kernel = parked(gpu_park_dir=named)
    with pytest.raises(GpuError, match=says) as raised:
        rt.hibernate()
    assert named is None or isinstance(raised.value, BadSetting)
    assert own(rt)[HOST] and kernel_lease(rt).disk_bytes == 0


def test_encrypted_memory_on_the_disk_returns_and_a_changed_byte_refuses_the_cell(
    started, tmp_path, guards
):
    """The bytes of a card. What a tampered file has is never a value."""
    ram = {"gpu_memory_max_percent": 1.0, "cpu_memory_max_percent": 1.0}
    rt, kernel = started(
        probe=simgpu.SimProbe(), gpu_park_dir=str(tmp_path), gpu_park_encrypt=True, **ram
    )
    tensor = keep(kernel, torch.rand(8 * FLOATS).to("simgpu:0"))
    before = tensor.cpu()
    for _ in range(2):
        assert rt.hibernate().bytes == 8 * MIB and own(rt) == {HOST: 0}
        cell(kernel)
        assert kernel.refused == "" and torch.equal(tensor.cpu(), before)
    rt.hibernate()
    [file] = {one.stored.file for one in kernel.resident.handle.away}
    fd = file._file.fileno()
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_RDWR)  # without O_DIRECT, to change one byte
    [old] = os.pread(fd, 1, 5)
    os.pwrite(fd, bytes([old ^ 1]), 5)
    kernel.begin()
    assert "are not what was written" in kernel.refused
    kernel.end()
    os.pwrite(fd, bytes([old]), 5)
    cell(kernel)
    assert kernel.refused == "" and torch.equal(tensor.cpu(), before)


@pytest.mark.parametrize("without, says", [(None, "real card"), ("cryptography", "encrypt")])
def test_bytes_that_cannot_be_encrypted_stay_in_ram_with_the_reason(
    parked, monkeypatch, without, says
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        disk.importlib.util, "find_spec", lambda name: None if name == without else find(name)
    )
    rt, kernel = parked(gpu_park_encrypt=True)
    with pytest.raises(GpuError, match=says):
        rt.hibernate()
    assert own(rt)[HOST] and kernel_lease(rt).disk_room == 0
    assert_whole(kernel)


def test_a_directory_that_another_user_can_replace_is_refused(parked, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    rt, _ = parked(gpu_park_dir=str(tmp_path / "open"))
    with pytest.raises(BadSetting, match="can be changed by other users"):
        rt.hibernate()


def test_the_budget_counts_the_bytes_of_every_notebook(parked):
    rt, kernel = parked(gpu_park_disk_gb=7 * MIB / GIB)
    with pytest.raises(GpuError, match="GPU_PARK_DISK_GB"):
        rt.hibernate()
    assert_whole(kernel)


def test_a_notebook_that_nobody_used_for_long_moves_to_the_disk(parked, clock):
    rt, kernel = parked(gpu_hibernate_seconds=100)
    maintenance.tick(rt._session)
    assert not kernel_lease(rt).on_disk
    clock.now += 101
    maintenance.tick(rt._session)
    until(lambda: kernel_lease(rt).on_disk)
    assert_whole(kernel)


def test_a_return_does_not_wait_for_a_disk_that_is_written(parked, monkeypatch):
    rt, kernel = parked()
    write, reached, go_on = park_file.ParkFile.write, threading.Event(), threading.Event()

    def slow(*args):
        reached.set()
        assert go_on.wait(60)
        return write(*args)

    monkeypatch.setattr(park_file.ParkFile, "write", slow)
    disk.start(rt._session, kernel.resident, "a test")
    assert reached.wait(60) and kernel_lease(rt).stowing
    assert_whole(kernel)
    go_on.set()
    until(lambda: not kernel.resident.stowing.locked())
    assert own(rt).keys() == {"sim:0"} and kernel_lease(rt).disk_bytes == 0
    assert_whole(kernel)
