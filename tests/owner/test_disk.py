"""Parked memory moves from RAM to a disk when RAM is short, when it is idle, or by hand."""

import fcntl
import importlib.util
import os
import threading

import pytest
import torch
from msgspec.structs import replace

from gpu_runtime import BadSetting, GpuError, threads
from gpu_runtime.backends.pytorch import park_file
from gpu_runtime.facts import HOST, Book, Lease, Section, Share
from gpu_runtime.owner import acquire, disk, maintenance
from gpu_runtime.rendering import render
from gpu_runtime.scheduler.victims import shed_step
from gpu_runtime.units import GIB, MIB, show_bytes, show_seconds
from tests import simgpu, tiny_models
from tests.clock import PATIENCE, until
from tests.core.test_raised_errors import no_thread

from .conftest import places
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
    assert kernel.refusal is None
    assert kernel.kept_by_the_test.numpy().tobytes()[::7] == kernel.before


def test_hibernated_memory_takes_no_ram_and_returns_for_the_next_cell(parked):
    rt, kernel = parked()
    size = own(rt)[HOST]
    outcome = rt.hibernate()
    lease = kernel_lease(rt)
    assert (outcome.bytes, lease.disk_bytes, own(rt)) == (size, size, {HOST: 0})
    assert lease.where == "disk" and rt.status().devices[-1].claimed_bytes == 0
    assert outcome.because.endswith(f"{show_bytes(size)} of RAM came free")
    [row] = rt.leases().to_dict("records")
    assert (row["device"], row["bytes"], row["measured_bytes"]) == ("disk", size, size)
    [shown] = render.status(rt.status())["leases"]
    assert shown["shares"] == {"disk": size}, "RAM has none of them"
    assert rt.hibernate().bytes == 0, "it is there already"
    assert_whole(kernel)
    assert own(rt) == {"sim:0": size} and kernel_lease(rt).disk_bytes == 0


def test_hibernate_parks_what_is_on_the_card(parked):
    rt, kernel = parked()
    cell(kernel)
    outcome = rt.hibernate()
    assert outcome.where == "disk" and kernel_lease(rt).on_disk
    assert outcome.because.endswith(" of its card came free")


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
        assert kernel.refusal is None and torch.equal(tensor.cpu(), before)
    rt.hibernate()
    [file] = {one.stored.file for one in kernel.resident.handle.away}
    fd = file._file.fileno()
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_RDWR)  # without O_DIRECT, to change one byte
    [old] = os.pread(fd, 1, 5)
    os.pwrite(fd, bytes([old ^ 1]), 5)
    kernel.begin()
    assert "are not what was written" in str(kernel.refusal)
    kernel.end()
    os.pwrite(fd, bytes([old]), 5)
    cell(kernel)
    assert kernel.refusal is None and torch.equal(tensor.cpu(), before)


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


@pytest.mark.parametrize("works", [0, 1], ids=["when room is reserved", "when it is written"])
@pytest.mark.parametrize("error", [BadSetting("GPU_PARK_DIR", "d", "a disk"), OSError(5, "gone")])
def test_a_directory_that_fails_is_left_alone_for_a_while(parked, monkeypatch, works, error):
    """Else a waiting request that needs the RAM begins the move again at once, and for ever."""
    rt, kernel = parked()
    assert kernel_lease(rt).disk_room
    real, answers = disk.directory, [True] * works

    def directory(session):
        if not answers:
            raise error
        answers.pop()
        return real(session)

    monkeypatch.setattr(disk, "directory", directory)
    disk.start(rt._session, kernel.resident, "")
    until(lambda: not kernel.resident.stowing.locked())
    lease = kernel_lease(rt)
    assert (lease.disk_room, lease.stowing, lease.disk_bytes) == (0, False, 0) and own(rt)[HOST]
    assert_whole(kernel)


def test_who_wants_the_bytes_waits_while_they_are_moving(parked):
    """Their step can begin nothing then. It was decided again at once, until the move ended."""
    rt, kernel = parked()
    session, step = rt._session, shed_step(kernel_lease(rt), "a test")
    with kernel.resident.stowing:
        assert not acquire._Departures(session, session.new_key("m")).start(step, wait=True)
    assert acquire._Departures(session, session.new_key("m")).start(step, wait=True)
    until(lambda: kernel_lease(rt).on_disk)
    assert_whole(kernel)


def test_what_is_on_its_way_to_the_disk_is_in_the_book_at_every_moment(parked, monkeypatch):
    """A write of another thread, just after the room was reserved, withdrew it until this process wrote again."""
    rt, kernel = parked()
    session, transact, others, seen = rt._session, rt._session.transact, [], []
    write = park_file.ParkFile.write

    def stowing() -> bool:
        """What other processes see."""
        return session.ledger.read().lease(session.me, kernel.resident.lease.name).stowing

    def beside(*decision, **more):
        """A transaction. After the one that reserves the room, another thread makes one."""
        found = transact(*decision, **more)
        if not others and stowing():
            others.append(threading.Thread(target=transact, args=(lambda book, _: (book, None),)))
            others[0].start()
            others[0].join(0.5)
        return found

    def seen_in_the_book(*args):
        others[0].join()
        seen.append(stowing())
        return write(*args)

    monkeypatch.setattr(threads.in_turn, "__defaults__", (PATIENCE,))
    monkeypatch.setattr(session, "transact", beside)
    monkeypatch.setattr(park_file.ParkFile, "write", seen_in_the_book)
    rt.hibernate()
    assert seen[0]
    assert_whole(kernel)


def test_memory_moves_to_the_disk_where_the_system_starts_no_more_threads(parked, monkeypatch):
    """The bytes stayed marked as moving for ever, with their room on the disk, and the next cell waited."""
    rt, kernel = parked()
    with monkeypatch.context() as full:
        full.setattr(threads, "start", no_thread)
        assert disk.start(rt._session, kernel.resident, "a test")
    assert kernel_lease(rt).on_disk and not kernel.resident.stowing.locked()
    assert_whole(kernel)


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
        assert go_on.wait(PATIENCE)
        return write(*args)

    monkeypatch.setattr(park_file.ParkFile, "write", slow)
    disk.start(rt._session, kernel.resident, "a test")
    assert reached.wait(PATIENCE) and kernel_lease(rt).stowing
    assert_whole(kernel)
    go_on.set()
    until(lambda: not kernel.resident.stowing.locked())
    assert own(rt).keys() == {"sim:0"} and kernel_lease(rt).disk_bytes == 0
    assert_whole(kernel)


# -- models


WHOLE = {"cpu_memory_max_percent": 1.0, "gpu_memory_max_percent": 1.0, "eviction_grace_seconds": 0}
SIZE = 4 * MIB


def net() -> torch.nn.Module:
    return torch.nn.Linear(FLOATS, 4, bias=False).eval()


@pytest.fixture
def nets(runtime, tmp_path):
    """A runtime whose card and RAM each hold one of the models a, b and c, which exist nowhere else."""
    rt = runtime(devices="sim:5MiB,host:5MiB", gpu_park_dir=str(tmp_path), **WHOLE)
    for name in "abc":
        rt.register(name, net)
    return rt


def weights(rt, name: str) -> bytes:
    with rt.use(name) as model:
        return model.weight.detach().numpy().tobytes()


def test_models_that_exist_nowhere_else_take_turns_on_card_ram_and_disk(nets, tmp_path):
    before = {name: weights(nets, name) for name in "abc"}
    assert places(nets) == {"a": "disk", "b": "host", "c": "sim:0"}
    assert nets.status().devices[-1].claimed_bytes == SIZE and not os.listdir(tmp_path)
    for name in "abcacb":
        assert weights(nets, name) == before[name]
        assert sorted(places(nets).values()) == ["disk", "host", "sim:0"]
    shown = str(nets.status())
    assert "on disk" in shown, shown


def test_why_says_what_the_return_of_a_model_on_disk_takes_as_the_disk_was_measured(
    nets, monkeypatch
):
    monkeypatch.setattr(disk, "LEAST_MEASURED", SIZE)
    for name in "abc":
        weights(nets, name)
    lease = next(one for one in nets.status().leases() if one.name == "a")
    first = nets.why("a")[0]
    assert lease.where == "disk" and first.action == "on disk"
    assert f"read back in {show_seconds(lease.restore_seconds)} (measured)" in first.because
    assert "exist nowhere else" in first.because and "sleeps" not in first.because
    assert lease.restore_seconds >= lease.disk_seconds > 0
    row = next(one for one in nets.why("a").leavers if one.what == "to disk")
    b = next(one for one in nets.status().leases() if one.name == "b")
    assert (row.lease, row.seconds, row.measured) == (b.id, b.disk_seconds, True)
    plan = nets.plan("a")
    assert plan.granted and [(one.what, one.leaves) for one in plan.leavers] == [
        ("to disk", True),
        ("model", True),
    ]


def test_after_a_return_from_the_disk_a_restore_is_expected_to_take_what_it_took_from_ram(
    nets, monkeypatch
):
    """The disk's time would make the next choice of who leaves for RAM wrong, until the next return."""
    weights(nets, "a"), nets.evict("a"), weights(nets, "a")

    def seconds() -> float:
        [lease] = [one for one in nets.status().leases() if one.name == "a"]
        return lease.restore_seconds

    from_ram, write = seconds(), park_file.written
    monkeypatch.setattr(
        park_file, "written", lambda *a, **k: write(*a, **k)._replace(read_seconds=900.0)
    )
    assert 0 < from_ram < 900.0
    weights(nets, "b"), weights(nets, "c")
    assert places(nets)["a"] == "disk" and seconds() == 900.0
    weights(nets, "a")
    assert places(nets)["a"] == "sim:0" and seconds() == from_ram
    assert nets._session.residents["a"].moved_seconds > 0


def damage(rt, name: str) -> None:
    """Changes a byte of the file of the model `name`."""
    [file] = {one.file for one in rt._session.residents[name].handle.stored.values()}
    fd = file._file.fileno()
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_RDWR)  # without O_DIRECT, to change one byte
    [old] = os.pread(fd, 1, 5)
    os.pwrite(fd, bytes([old ^ 1]), 5)


def test_a_damaged_file_of_a_model_without_a_source_is_an_error_that_names_both(nets, tmp_path):
    before = {name: weights(nets, name) for name in "abc"}
    damage(nets, "a")
    with pytest.raises(GpuError, match="4.0 MiB of a cannot return") as raised:
        weights(nets, "a")
    assert str(tmp_path) in str(raised.value) and "rt.forget('a')" in str(raised.value)
    assert places(nets)["a"] == "disk" and weights(nets, "b") == before["b"]
    damage(nets, "a")  # as it was
    assert weights(nets, "a") == before["a"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    pytest.importorskip("transformers")
    return str(tiny_models.causal_lm(tmp_path_factory.mktemp("llama") / "model"))


@pytest.fixture
def llms(runtime, tmp_path, llama):
    """A runtime whose card and RAM each hold one of the models a and b, which can be loaded again."""

    def make(**settings):
        given = {"gpu_park_dir": str(tmp_path), **WHOLE, **settings}
        rt = runtime(devices="sim:1MiB,host:1MiB", **given)
        for name in "abc":
            rt.register(name, llama)
        return rt

    return make


def sums(rt, name: str) -> list[float]:
    with rt.use(name) as model:
        return [float(one.detach().double().sum()) for one in model.parameters()]


@pytest.mark.parametrize("shadows", ["never", "auto"])
@pytest.mark.parametrize("slow", [True, False])
def test_a_model_whose_load_is_slower_than_the_disk_goes_there_and_another_is_unloaded(
    llms, slow, shadows
):
    """What is compared are the measured seconds of its load and those of the disk for its bytes."""
    rt = llms(gpu_shadows=shadows)
    rt._session.disk_seconds_per_byte = 0.0 if slow else 1.0
    before = sums(rt, "a")
    for name in "bca":
        assert sums(rt, name) == before
    assert ("disk" in places(rt).values()) is slow
    for name in "bcab":
        assert sums(rt, name) == before
    assert (rt.status().totals["loads"] == 3) is slow


def test_a_damaged_file_of_a_model_with_a_source_is_loaded_again_and_said_once(llms, caplog):
    rt = llms(gpu_shadows="never")
    rt._session.disk_seconds_per_byte = 0.0
    before = sums(rt, "a")
    with rt.use("a") as kept:
        pass
    for name in "bc":
        sums(rt, name)
    damage(rt, "a")
    assert sums(rt, "a") == before
    said = [one.message for one in caplog.records if "loaded again" in one.message]
    assert len(said) == 1 and "of a cannot return" in said[0]
    with rt.use("a") as again:
        assert again is kept


def test_a_changed_model_on_disk_is_not_unloaded_and_its_change_returns(llms):
    """Its cheap check says that its source has its bytes. The comparison before the write finds the change."""
    rt = llms(gpu_shadows="never")
    rt._session.disk_seconds_per_byte = 0.0
    with rt.use("a") as model, torch.no_grad():
        next(model.parameters()).data.add_(1)
    before = sums(rt, "a")
    for name in "bc":
        sums(rt, name)
    assert places(rt)["a"] == "disk"
    with pytest.raises(GpuError):
        rt.evict("a", drop=True)
    assert sums(rt, "a") == before


def test_models_that_can_be_loaded_again_leave_half_of_the_room_to_others(nets):
    """Of 100 MiB, 20 are a notebook's and 30 such a model's: 10 are left for another one, and 50 in all."""
    session, size = nets._session, 100 * MIB / GIB
    object.__setattr__(session.settings, "gpu_park_disk_gb", size)

    def lease(name: str, size: int, **more: object) -> Lease:
        shares = (Share(HOST, size * MIB),)
        return Lease(session.me, name, shares=shares, disk_bytes=size * MIB, **more)

    held = (lease("kernel", 20, kind="kernel"), lease("one", 30, droppable=True))
    book = Book().with_section(Section(session.owner, held))
    fresh = replace(lease("two", 8), disk_bytes=0)
    assert disk.room(session, book, fresh) == 50 * MIB
    assert disk.room(session, book, replace(fresh, droppable=True)) == 10 * MIB


def test_a_measured_rate_of_the_disk_counts_for_ten_minutes(runtime, tmp_path, clock, monkeypatch):
    """Measured while the disk was busy, it would keep models from it for good: none would measure it again."""
    monkeypatch.setattr(disk, "LEAST_MEASURED", SIZE)
    rt = runtime(devices="sim:5MiB,host:5MiB", gpu_park_dir=str(tmp_path), clock=clock, **WHOLE)
    session, before = rt._session, rt._session.disk_seconds_per_byte
    for name in "abc":
        rt.register(name, net)
        weights(rt, name)
    measured = session.disk_seconds_per_byte
    clock.now += 599
    disk.look_after(session)
    assert session.disk_seconds_per_byte == measured != before
    clock.now += 1
    disk.look_after(session)
    assert session.disk_seconds_per_byte == before
