"""Parking a process that runs no code of ours. A stand-in replaces the driver's checkpoint calls."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from msgspec.structs import replace

from gpu_runtime import GpuError, Runtime
from gpu_runtime.errors import NotAllowed
from gpu_runtime.facts import HOST
from gpu_runtime.ledgers.host_config import Machine
from gpu_runtime.owner import checkpoints
from gpu_runtime.scheduler.capacity import room
from gpu_runtime.units import GIB
from tests.checkpoint_driver import STAND_IN, CheckpointDriver
from tests.clock import PATIENCE, until


@pytest.fixture
def driver(tmp_path, monkeypatch):
    made = CheckpointDriver(tmp_path / "processes", cards=2)
    monkeypatch.setenv("CUDA_STAND_IN", str(made.file))
    monkeypatch.setenv("PYTHONPATH", f"{STAND_IN}:{os.environ.get('PYTHONPATH', '')}")
    yield made
    made.end()


@pytest.fixture
def rt(driver):
    with Runtime(probe=driver.probe(), ledger="memory:", monitor=False) as made:
        yield made


def park(rt, target, **options):
    return rt.park(str(target.pid), checkpoint=True, **options)


def unpark(rt, target):
    return rt.unpark(str(target.pid), checkpoint=True)


def refusal(rt, target) -> str:
    """The message that explains why that process is not parked."""
    with pytest.raises(GpuError) as caught:
        park(rt, target, yes=True)
    return str(caught.value)


def free(rt) -> list[int]:
    """The GiB that the driver shows as free on each card."""
    views = [view for view in rt.status().devices if view.device.id != HOST]
    return [view.sample.free_bytes // GIB for view in views]


# -- there and back
def test_the_hazards_are_named_before_anything_is_done(rt, driver):
    target = driver.process(_0=12)
    told = park(rt, target)
    assert not told.done and driver.calls() == [] and driver.state(target) == "running"
    for hazard in ("610.57", "595.71", "IPC", "managed memory", "stays stuck", "real card"):
        assert hazard in told.because
    assert "12.0 GiB" in told.because and "driver here: 580.82.07" in told.because
    assert told.because.endswith(f"%gpu park --checkpoint {target.pid} --yes")


def test_a_parked_process_gives_its_room_and_gets_it_back(rt, driver):
    target = driver.process(_0=12, _1=2)
    assert park(rt, target, yes=True).bytes == 14 * GIB
    assert driver.state(target) == "checkpointed" and free(rt) == [24, 24]
    rt.register("big", backend="fake", size="20GiB", devices="cuda:0")
    assert rt.preload("big", timeout=PATIENCE).done, "its room is room in the ledger"
    rt.evict("big")
    back = unpark(rt, target)
    assert driver.state(target) == "running" and free(rt) == [12, 22]
    assert back.where == "cuda:0,1" and "Before you end it, park it again" in back.because
    assert driver.calls() == ["lock", "checkpoint", "restore", "unlock"]
    assert not rt.leases().size, "the room was leased for the return only"
    assert [event.action for event in rt.why(f"pid {target.pid}")] == ["unpark", "park"]


@pytest.mark.parametrize("answers", [True, False])
def test_what_is_noted_was_measured_after_the_lock(rt, driver, monkeypatch, answers):
    """With figures of before, too little room would be leased for the return, which then stays stuck."""
    target, probe, call = driver.process(_0=12), rt.probe, checkpoints.call
    measure, seen, locked = probe.samples, {}, []

    def renew(pids, devices):
        if answers or not locked:
            seen["now"] = measure(rt._session.clock())
        return {}

    def grown(action, target, **limits):
        if action == "lock":
            locked.append(True)
            driver.grow(target, _0=20)
        return call(action, target, **limits)

    renew((), ())
    monkeypatch.setattr(probe, "samples", lambda now, fresh=False: seen["now"])
    monkeypatch.setattr(probe, "charged", renew)
    monkeypatch.setattr(checkpoints, "call", grown)
    if answers:
        assert park(rt, target, yes=True).bytes == 20 * GIB
    else:
        assert (
            "figures of cuda:0 are old" in refusal(rt, target) and driver.state(target) == "running"
        )


def test_room_is_leased_before_a_return(rt, driver):
    """A restore without memory would leave the process stuck, so the return first waits for room."""
    target = driver.process(_0=12)
    park(rt, target, yes=True)
    rt.register("big", backend="fake", size="20GiB", devices="cuda:0")
    answers = []
    with rt.use("big", timeout=PATIENCE):
        waiting = threading.Thread(target=lambda: answers.append(unpark(rt, target)))
        waiting.start()
        until(lambda: rt.status().tickets)
        assert "restore" not in driver.calls()
    waiting.join(PATIENCE)
    assert answers[0].done and driver.state(target) == "running"


def test_the_room_is_claimed_while_the_driver_restores(rt, driver, monkeypatch):
    """The lease counts as unmeasured meanwhile, so no other request gets the same bytes as free memory."""
    target = driver.process(_0=12)
    park(rt, target, yes=True)
    seen = []
    call = checkpoints.call

    def watched(action, target, **limits):
        if action == "restore":
            book, world = rt._session.ledger.read(), rt._session.world(fresh=True)
            seen.append((book.claims()["cuda:0"] // GIB, room(book, world)["cuda:0"] // GIB))
        return call(action, target, **limits)

    monkeypatch.setattr(checkpoints, "call", watched)
    driver.process(_0=8)  # a program without a lease
    unpark(rt, target)
    [(claimed, left)] = seen
    # also the measured bytes are not promised twice
    assert claimed == 12 and left < 24 - 8 - 12 + 1


def test_a_locked_process_is_unlocked_without_room(rt, driver):
    target = driver.process("locked", _0=12)
    assert "unpark --checkpoint" in refusal(rt, target)
    assert "runs again" in unpark(rt, target).because
    assert driver.state(target) == "running" and driver.calls() == ["unlock"]


def test_unpark_of_a_running_process_changes_nothing(rt, driver):
    target = driver.process(_0=1)
    assert "is not parked" in unpark(rt, target).because and driver.calls() == []


# -- who may not be parked: one clear sentence each
def test_a_process_that_has_ended_is_told(rt, driver):
    target = driver.process(_0=1)
    target.kill()
    target.wait()
    assert "no process has the pid" in refusal(rt, target)


@pytest.mark.parametrize("who", ["", "train.ipynb", "-4", "0", "٣"])
def test_a_pid_is_needed(rt, who):
    with pytest.raises(GpuError, match="needs a process id"):
        rt.park(who, checkpoint=True)


def test_this_process_cannot_park_itself(rt):
    with pytest.raises(GpuError, match="its own call"):
        rt.park(str(os.getpid()), checkpoint=True)


def test_another_users_process_is_parked_by_an_operator_only(rt, driver, monkeypatch):
    target = driver.process(_0=1)
    rt._session.machine = Machine(operators=())
    real = checkpoints.look
    monkeypatch.setattr(checkpoints, "look", lambda pid: real(pid)._replace(user="eve"))
    with pytest.raises(NotAllowed, match="only eve or an operator may"):
        park(rt, target, yes=True)
    with pytest.raises(NotAllowed, match="only eve or an operator may"):
        unpark(rt, target)
    assert driver.calls() == []
    mine = rt._session.owner.user
    rt._session.users.clear()
    rt._session.machine = Machine(operators=(mine,))
    assert park(rt, target, yes=True).done


def test_a_process_with_leases_is_asked_instead(rt, driver, monkeypatch):
    target = driver.process(_0=1)
    rt.register("llama", backend="fake", size="1GiB")
    rt.preload("llama")
    book = rt._session.ledger.read()
    [(id, section)] = book.sections.items()

    def read_with(**changes):
        changed = replace(section, **changes)
        monkeypatch.setattr(
            rt._session.ledger, "read", lambda: replace(book, sections={id: changed})
        )

    read_with(owner=replace(section.owner, pid=target.pid, notebook="/a/train.ipynb"))
    assert f"%gpu evict llama@{target.pid}" in refusal(rt, target)
    kernel = replace(section.leases[0], name="kernel")
    read_with(owner=replace(section.owner, pid=target.pid), leases=(kernel,))
    assert f"%gpu park {target.pid}" in refusal(rt, target)
    read_with(engines=(target.pid,))
    assert "the engine of llama" in refusal(rt, target)


def test_a_process_without_cuda_is_not_parked(rt, driver):
    target = driver.process(_0=1)
    driver.forget(target)
    assert "as a process that uses CUDA" in refusal(rt, target)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({}, "holds nothing on a card"),
        ({"_0": None}, "does not report how much"),
        ({"_0": 23}, "would never get room"),
    ],
    ids=["none", "unknown", "more than the limit"],
)
def test_bytes_that_no_room_can_be_leased_for_are_not_parked(rt, driver, held, said):
    assert said in refusal(rt, driver.process(**held))


def test_a_stopped_process_is_not_parked(rt, driver):
    target = driver.process(_0=1)
    os.kill(target.pid, signal.SIGSTOP)
    until(lambda: checkpoints.look(target.pid).stopped)
    assert "is stopped" in refusal(rt, target) and driver.calls() == []


def test_an_instance_of_a_partitioned_card_is_refused(tmp_path, driver, monkeypatch):
    parted = CheckpointDriver(tmp_path / "parted", parts=True)
    monkeypatch.setenv("CUDA_STAND_IN", str(parted.file))
    target = parted.process(_0=1)
    try:
        with Runtime(probe=parted.probe(), ledger="memory:", monitor=False) as rt:
            assert "MIG" in refusal(rt, target)
    finally:
        parted.end()


def test_aarch64_is_refused(rt, driver, monkeypatch):
    monkeypatch.setattr(checkpoints.platform, "machine", lambda: "aarch64")
    assert "aarch64" in refusal(rt, driver.process(_0=1))


def test_too_little_ram_is_refused(rt, driver, monkeypatch):
    monkeypatch.setattr(
        "gpu_runtime.devices.probe.psutil.virtual_memory",
        lambda: type("Memory", (), {"available": GIB, "total": 64 * GIB}),
    )
    assert "1.0 GiB of RAM is available" in refusal(rt, driver.process(_0=2))


@pytest.mark.parametrize("version", ["565.57.01", "", "unknown"])
def test_an_old_driver_is_named(rt, driver, version):
    driver.version = version
    assert "570 or later is needed" in refusal(rt, driver.process(_0=1))


def test_simulated_cards_have_no_processes():
    with Runtime(devices="sim:4GiB,host:8GiB", ledger="memory:", monitor=False) as rt:
        with pytest.raises(GpuError, match="needs NVIDIA cards"):
            rt.unpark(str(os.getppid()), checkpoint=True)


def test_a_missing_package_is_named(rt, driver, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"].replace(f"{STAND_IN}:", ""))
    told = refusal(rt, driver.process(_0=1))
    assert "cuda-core is not installed" in told and "pip install" in told


def test_an_old_package_is_named(rt, driver, monkeypatch, tmp_path):
    (tmp_path / "cuda" / "core").mkdir(parents=True)
    (tmp_path / "cuda" / "core" / "__init__.py").touch()
    (tmp_path / "cuda_core-0.3.1.dist-info").mkdir()
    (tmp_path / "cuda_core-0.3.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: cuda-core\nVersion: 0.3.1\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ['PYTHONPATH']}")
    assert "cuda-core 0.3.1 is too old" in refusal(rt, driver.process(_0=1))


# -- states and failures of the driver
def test_a_failed_process_can_only_be_ended(rt, driver):
    target = driver.process("failed", _0=1)
    assert "can only be ended" in refusal(rt, target)
    with pytest.raises(GpuError, match="can only be ended"):
        unpark(rt, target)


def test_a_parked_process_is_not_parked_again(rt, driver):
    target = driver.process(_0=1)
    park(rt, target, yes=True)
    assert "is parked already" in refusal(rt, target)
    assert driver.calls() == ["lock", "checkpoint"]


@pytest.mark.parametrize(
    ("faults", "said", "state", "calls"),
    [
        ({"lock": "times out"}, "did not come to rest in 10 s", "running", "lock"),
        # CUDA IPC and managed memory cannot be seen beforehand
        ({"checkpoint": "refuses"}, "It runs on", "running", "lock checkpoint unlock"),
        ({"checkpoint": "fails"}, "CUDA_ERROR_UNKNOWN", "failed", "lock checkpoint"),
        (
            {"checkpoint": "refuses", "unlock": "fails"},
            "unpark --checkpoint {pid}",
            "failed",
            "lock checkpoint unlock",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_call_that_the_driver_does_not_finish_is_undone_or_told(
    rt, driver, faults, said, state, calls
):
    target = driver.process(_0=1)
    driver.fault(**faults)
    told = refusal(rt, target)
    assert said.format(pid=target.pid) in told
    assert ("unpark --checkpoint" in told) is (state != "running")
    assert (driver.state(target), driver.calls()) == (state, calls.split())


def test_a_target_that_dies_at_the_lock_is_told(rt, driver):
    target = driver.process(_0=1)
    driver.fault(lock="dies")
    assert "ended during the driver's lock" in refusal(rt, target)
    target.wait()
    assert free(rt) == [24, 24] and not rt.leases().size


def test_a_restore_out_of_memory_leaves_the_process_parked_and_its_room_free(rt, driver):
    target = driver.process(_0=1)
    park(rt, target, yes=True)
    driver.fault(restore="no memory")
    with pytest.raises(GpuError, match="still in RAM.*can stay stuck"):
        unpark(rt, target)
    assert driver.state(target) == "checkpointed" and not rt.leases().size
    driver.fault()
    assert unpark(rt, target).done and driver.state(target) == "running"


def test_a_call_that_hangs_is_given_up(rt, driver, monkeypatch):
    monkeypatch.setattr(checkpoints, "START_SECONDS", 1.0)
    monkeypatch.setattr(checkpoints, "CALL_SECONDS", 1.0)
    monkeypatch.setattr(checkpoints, "LOCK_SECONDS", 0.0)
    target = driver.process(_0=1)
    driver.fault(lock="hangs")
    with pytest.raises(GpuError, match=r"hangs: the driver did not answer for 2 s"):
        park(rt, target, yes=True)


def test_a_helper_that_the_driver_keeps_from_ending_is_not_waited_for(rt, driver, monkeypatch):
    """A process that waits in the driver can be unkillable. The notebook waited for its end for ever."""
    monkeypatch.setattr(checkpoints, "START_SECONDS", 1.0)
    monkeypatch.setattr(checkpoints, "CALL_SECONDS", 1.0)
    blocked = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda helper: blocked.append(helper))
    driver.fault(lock="hangs")
    found = checkpoints.look(driver.process(_0=1).pid)
    with pytest.raises(GpuError, match="hangs"):
        checkpoints.call("lock", found)
    monkeypatch.undo()
    [helper] = blocked
    assert helper.poll() is None
    helper.kill()
    helper.communicate()


def test_a_helper_that_crashes_is_told(rt, driver, monkeypatch):
    target = driver.process(_0=1)
    driver.file.write_text("no JSON")
    found = checkpoints.look(target.pid)
    with pytest.raises(GpuError):
        checkpoints.call("state", found)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(GpuError, match="helper process failed"):
        checkpoints.call("state", found)


def test_a_process_parked_by_another_tool_is_not_restored_without_its_size(rt, driver):
    target = driver.process("checkpointed", _0=1)
    with pytest.raises(GpuError, match="parked by another user or another tool"):
        unpark(rt, target)
    assert driver.calls() == []


def test_an_interrupt_is_raised_when_the_call_has_ended(rt, driver, monkeypatch):
    """An interrupt in the middle of a checkpoint would leave the process locked."""
    target = driver.process(_0=1)
    call = checkpoints.call

    def interrupting(action, target, **limits):
        if action == "checkpoint":
            signal.raise_signal(signal.SIGINT)
        return call(action, target, **limits)

    monkeypatch.setattr(checkpoints, "call", interrupting)
    with pytest.raises(KeyboardInterrupt):
        park(rt, target, yes=True)
    assert driver.state(target) == "checkpointed"
    assert unpark(rt, target).done


# -- the notes on parked processes
def test_a_note_is_private_and_for_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    one = checkpoints.ParkedProcess(41, 7, {"GPU-0": 5})
    checkpoints.note_parked(one)
    assert checkpoints.noted_parked(41, 7) == one
    assert checkpoints.noted_parked(41, 8) is None, "the pid was used again"
    [file] = tmp_path.rglob("41-7.json")
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("[]")
    assert checkpoints.noted_parked(41, 7) is None
    checkpoints.forget_parked(41, 7)
    checkpoints.forget_parked(41, 7)
    assert not list(tmp_path.rglob("*.json"))


def test_a_note_that_others_could_replace_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    checkpoints.note_parked(checkpoints.ParkedProcess(41, 7, {"GPU-0": 5}))
    [file] = tmp_path.rglob("41-7.json")
    file.parent.chmod(0o777)
    assert checkpoints.noted_parked(41, 7) is None
    with pytest.raises(GpuError, match="not private"):
        checkpoints.note_parked(checkpoints.ParkedProcess(42, 7, {}))
