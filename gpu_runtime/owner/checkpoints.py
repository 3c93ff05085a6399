"""Parks a process that cannot cooperate, by the driver's checkpoint calls. A person types the pid.

A process cannot cooperate if it has not loaded the extension, or if another framework holds its
memory. The driver copies the memory to RAM, and the process's CUDA calls wait until the memory
returns. No checkpoint is automatic, and none is interrupted: half a checkpoint locks the process.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shlex
import subprocess
import sys
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from ..attribution import name_of
from ..devices import drivers
from ..errors import Busy, GpuError, ProbeFailed
from ..facts import HOST, KERNEL, Lease, Outcome, Share, Value, where
from ..files import child_environment, local_state, make_directory, replace_file, weak_step
from ..ledgers.liveness import began, boot_id
from ..safe_text import LONGEST_NAME, printable, quoted
from ..threads import uninterrupted
from ..units import GIB, show_bytes
from . import requests
from .acquire import room_for_process
from .session import Session

# -- the driver's checkpoint calls on another process: its state, lock, checkpoint, restore,
# unlock.
#
# The calls use `cuda.core.checkpoint`; they need the package cuda-core 1.0 and the driver 570, or
# later versions. A call can hang, and a call loads CUDA. So each call runs with a time limit in a
# helper process, which runs this module as a program. Nothing here decides whether the memory of a
# process may be moved to host memory.


RUNNING, LOCKED, CHECKPOINTED, FAILED = "running", "locked", "checkpointed", "failed"
START_SECONDS = 20.0  # the helper's start: Python, cuda-core and the driver's library
MOST_TEXT = 300  # characters of the driver's own message


def call(action: str, target: Target, *, size: int = 0, lock_seconds: float = 0.0) -> str:
    """Performs the `action` on the process `target`. Returns its new state.

    Actions are `state`, `lock`, `checkpoint`, `restore` and `unlock`. `size` are the bytes that the
    call copies, for its time limit; the helper's start gets START_SECONDS more. The action `lock`
    gives up after `lock_seconds`. Raises Busy if the call hangs, and GpuError; both are readable.
    """
    seconds = START_SECONDS + _seconds(size) + lock_seconds
    words = [sys.executable, "-m", __name__, action, str(target.pid), str(int(lock_seconds * 1000))]
    try:
        helper = subprocess.Popen(
            words,
            cwd="/",  # a module in the notebook's directory could hide a standard module
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # the stop button must not end the helper during a call
        )
        output, errors = helper.communicate(timeout=seconds)
        answer = json.loads(output.splitlines()[-1])
    except subprocess.TimeoutExpired:
        # Its end is not waited for, as `subprocess.run` would: the driver can block it so that nothing ends it.
        helper.kill()
        why = f"the driver did not answer for {seconds:.0f} s"
        text = f"{action} of {target.label} hangs: {why}. Its state is not known."
        raise Busy(text, name=str(target.pid), because=why) from None
    except OSError as error:
        answer = {"missing": f"the helper process cannot be started: {error.strerror}"}
    except (IndexError, ValueError):
        last = (errors.strip().splitlines() or [f"exit status {helper.returncode}"])[-1]
        answer = {"failed": f"the helper process failed: {last[:MOST_TEXT]}"}
    if "missing" in answer:
        raise GpuError(
            f"no process can be parked by a checkpoint here: {answer['missing']}.\n"
            f"  Install it:  pip install 'cuda-core[cu13]>=1.0'"
        )
    if "failed" in answer:
        raise _failed(action, target, answer["failed"])
    return answer["state"]


# -- in the helper process -----------------------------------------------------------------------


def perform(action: str, pid: int, lock_ms: int) -> dict[str, str]:
    """Makes one checkpoint call. The result has one key: `state`, `failed`, or `missing`."""
    try:
        checkpoint = importlib.import_module("cuda.core").checkpoint
    except (ImportError, AttributeError) as error:
        return {"missing": _why_missing(error)}
    try:
        process = checkpoint.Process(pid)
        if action == "lock":
            process.lock(timeout_ms=lock_ms)
        elif action != "state":
            getattr(process, action)()
        return {"state": str(process.state)}
    except Exception as error:  # the library raises errors of several classes
        return {"failed": " ".join(str(error).split())[:MOST_TEXT] or type(error).__name__}


def _why_missing(error: Exception) -> str:
    try:
        version = metadata.version("cuda-core")
    except metadata.PackageNotFoundError:
        return "the package cuda-core is not installed"
    if version.startswith("0."):
        return f"cuda-core {version} is too old: 1.0 or later is needed"
    return f"cuda-core {version} cannot be imported ({error})"


if __name__ == "__main__":
    print(json.dumps(perform(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))


LEAST_DRIVER = 570
LOCK_SECONDS = 10.0  # the longest time that the lock waits for the work that runs on the card
CALL_SECONDS = 60.0  # the time limit of a call that copies nothing
SECONDS_A_GIB = 4.0  # ten times the usual time: a checkpoint copies at about 15 % of the bus
ENDING = (
    "Before you end it, park it again: on driver 595.71 the end of a process that had returned hung "
    "the machine"
)


class Target(NamedTuple):
    """A process that a person named by its pid."""

    pid: int
    started: int  # clock ticks after the boot
    user: str
    command: str
    threads: int
    stopped: bool

    @property
    def label(self) -> str:
        """The process for people: `python (pid 4121)`."""
        return f"{self.command} (pid {self.pid})"


def park(session: Session, who: str, confirmed: bool) -> Outcome:
    """Parks the process with the pid `who`.

    If `confirmed` is false, no checkpoint is made, and the outcome says what can go wrong. See
    Runtime.park.
    """
    target = _target(session, who)
    driver = _require_driver(session)
    state = call("state", target)
    if state != RUNNING:
        raise GpuError(f"{target.label} was not parked: {_why_not_running(state, target)}.")
    held = _held(session, target)
    _require_possible(session, target, held)
    if not confirmed:
        because = (
            f"{_hazards(target, held, driver)}. To park it all the same:  "
            f"%gpu park --checkpoint {target.pid} --yes"
        )
        return Outcome(verb="park", name=str(target.pid), done=False, because=because)
    began = session.clock()
    held = uninterrupted(lambda: _suspend(session, target), to_the_end=True)
    size = sum(share.bytes for share in held)
    because = (
        f"{target.label} is parked; {show_bytes(size)} came free on {where(held)}. "
        f"It waits until:  %gpu unpark --checkpoint {target.pid}"
    )
    _journal(session, target, "park", because, held)
    seconds = session.clock() - began
    return Outcome("park", str(target.pid), True, because, size, HOST, seconds)


def unpark(session: Session, who: str) -> Outcome:
    """Brings back the memory of the process with the pid `who`."""
    target = _target(session, who)
    _require_driver(session)
    state = call("state", target)
    if state == RUNNING:
        because = f"{target.label} is not parked"
        return Outcome("unpark", str(target.pid), True, because)
    if state == LOCKED:
        uninterrupted(lambda: call("unlock", target), to_the_end=True)
        because = f"{target.label} was locked, and runs again; its memory had not moved"
        return Outcome("unpark", str(target.pid), True, because)
    if state != CHECKPOINTED:
        raise GpuError(f"{target.label} does not return: {_why_not_running(state, target)}.")
    held = _noted(session, target)
    began = session.clock()
    with ExitStack() as room:
        for share in held:
            wanted = (target.pid, share.device, share.bytes, _seconds(share.bytes))
            room.enter_context(room_for_process(session, *wanted))
        uninterrupted(lambda: _restore(session, target, held), to_the_end=True)
    size = sum(share.bytes for share in held)
    returned = f"{show_bytes(size)} on {where(held)}"
    because = f"{target.label} is back with {returned}. {ENDING}"
    _journal(session, target, "unpark", because, held)
    seconds = session.clock() - began
    return Outcome("unpark", str(target.pid), True, because, size, where(held), seconds)


# -- who may be parked


def _target(session: Session, who: str) -> Target:
    """The process with the pid `who`. Raises GpuError, NotAllowed."""
    if not (who.isascii() and who.isdecimal()) or int(who) < 1:
        raise GpuError(
            f"--checkpoint needs a process id, and {quoted(who)} is none.\n  Find it:  %gpu status"
        )
    pid = int(who)
    if pid == os.getpid():
        raise GpuError(
            "a process cannot be parked by its own call.\n  This notebook:  %gpu park", process=who
        )
    target = look(pid)
    if target is None:
        raise GpuError(f"no process has the pid {pid}: it has ended, or is hidden from this user.")
    mine = session.owner.user
    because = f"{mine} may not park {target.label}: only {target.user} or an operator may"
    requests.require_allowed(session, target.user, who, because)
    _require_foreign(session, target)
    if target.stopped:
        raise GpuError(
            f"{target.label} is stopped (SIGSTOP), and a call of the driver on it would hang.\n"
            f"  Let it go on:  kill -CONT {pid}",
            process=who,
        )
    return target


def look(pid: int) -> Target | None:
    """The process `pid` as the operating system shows it; None for an ended or hidden process."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            status = process.status()
            if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return None
            return Target(
                pid,
                began(pid),
                name_of(process.uids().real),
                printable(process.name(), LONGEST_NAME),
                process.num_threads(),
                status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP),
            )
    except (psutil.Error, OSError):  # the process has ended meanwhile
        return None


def _require_foreign(session: Session, target: Target) -> None:
    """Raises GpuError if `target` has leases or is an engine, and so needs no checkpoint."""
    for section in session.ledger.read().sections.values():
        pid = target.pid
        if pid in section.engines:
            models = ", ".join(lease.name for lease in section.leases) or "a model"
            raise GpuError(
                f"{target.label} is the engine of {models}, and needs no checkpoint.\n"
                f"  Move it:  %gpu evict NAME@{section.owner.pid}",
                process=str(pid),
            )
        if section.owner.pid != pid or not section.leases:
            continue
        if section.lease(KERNEL):
            hint = f"%gpu park {pid}"
        else:
            address = shlex.quote(f"{section.leases[0].name}@{pid}")
            hint = f"%gpu evict {address}"
        raise GpuError(
            f"{section.owner.label} has leases, so it moves its memory by itself.\n"
            f"  Ask for it:  {hint}",
            process=str(pid),
        )


def _held(session: Session, target: Target) -> tuple[Share, ...]:
    """The bytes of the process on each card, as the driver reports them now. Raises GpuError."""
    began, devices = session.clock(), session.probe.devices
    session.probe.charged((target.pid,), [device.id for device in devices])  # waits for new figures
    samples = session.world().samples
    held = []
    for device in devices:
        sample = samples.get(device.id)
        if sample is None or device.is_host:
            continue
        if sample.taken_at < began:
            why = f"the driver's figures of {device.id} are old"
            raise GpuError(f"{why}, so what {target.label} holds there is not known.")
        processes = sample.processes
        if target.pid not in processes:
            continue
        size = processes[target.pid]
        if size is None:
            raise GpuError(
                f"the driver does not report how much {target.label} holds on {device.id}, so no "
                f"room could be kept for its return."
            )
        held.append(Share(device.id, size))
    if not held:
        raise GpuError(
            f"{target.label} holds nothing on a card that the driver shows. In a container the "
            f"driver's pids can differ.\n  See who holds what:  %gpu status"
        )
    return tuple(held)


def _require_possible(session: Session, target: Target, held: tuple[Share, ...]) -> None:
    """Raises GpuError if it is known that parking the process, or bringing it back, would fail."""
    why = ""
    cards = {share.device for share in held}
    listing = session.probe.listing
    parts = [card.device.id for card in listing.cards if card.is_part] if listing else []
    size = sum(share.bytes for share in held)
    host = session.world().samples.get(HOST)
    over = [share for share in held if share.bytes > session.limits.get(share.device, 0)]
    if cards & set(parts):
        why = f"{where(held)} is an instance of a partitioned card (MIG), which the driver refuses"
    elif platform.machine() == "aarch64":
        why = "on aarch64 the driver has no checkpoint"
    elif over:
        limit = session.limits.get(over[0].device, 0)
        why = (
            f"it holds {show_bytes(over[0].bytes)} on {over[0].device}, whose limit is "
            f"{show_bytes(limit)}, so its return would never get room"
        )
    elif host is not None and host.free_bytes is not None and host.free_bytes < size:
        why = f"it holds {show_bytes(size)}, and {show_bytes(host.free_bytes)} of RAM is available"
    if why:
        raise GpuError(f"{target.label} cannot be parked: {why}.", process=str(target.pid))


def _require_driver(session: Session) -> str:
    """The version of the driver. Raises GpuError if it is too old, or there are no NVIDIA cards."""
    listing = session.probe.listing
    if listing is None or listing.kind != "cuda" or not listing.cards:
        raise GpuError("a checkpoint needs NVIDIA cards, and this process has none.")
    try:
        versions = drivers.with_time_limit("the driver", listing.source.versions)
    except (drivers.NoAnswer, ProbeFailed) as error:
        raise GpuError(f"the driver's version is not known: {error}") from None
    version = versions.get("driver", "")
    major = version.partition(".")[0]
    if not major.isdecimal() or int(major) < LEAST_DRIVER:
        raise GpuError(
            f"driver {version or 'of unknown version'} has no checkpoint calls: "
            f"{LEAST_DRIVER} or later is needed."
        )
    return version


def _why_not_running(state: str, target: Target) -> str:
    """Why a process in that `state` cannot be moved, and what to type."""
    back = f"  %gpu unpark --checkpoint {target.pid}"
    if state == CHECKPOINTED:
        return f"it is parked already. To bring it back:{back}"
    if state == LOCKED:
        return f"it is locked by an attempt that was not completed. To unlock it:{back}"
    if state == FAILED:
        return "its last checkpoint or restore failed, and it can only be ended"
    return f"the driver reports an unknown state ({quoted(state)})"


def _hazards(target: Target, held: tuple[Share, ...], driver: str) -> str:
    """Sentences on what parking does and what can go wrong. The last sentence has no full stop."""
    size = show_bytes(sum(share.bytes for share in held))
    several = ""
    if target.threads > 1:
        several = f" It runs {target.threads} threads."
    return (
        f"{size} of {target.label} would leave {where(held)}, and its CUDA calls would wait until it "
        f"returns. This has not been tried on a real card (driver here: {driver}). Known hazards: on "
        f"driver 610.57 the lock ended a process with several threads.{several} Memory shared by CUDA "
        f"IPC and managed memory are refused by driver 580; this cannot be seen beforehand. A return "
        f"that runs out of memory stays stuck: its room is leased first, but a program without a lease "
        f"can take it. {ENDING}"
    )


# -- the calls


def _suspend(session: Session, target: Target) -> tuple[Share, ...]:
    """Locks the process and moves its memory to RAM; unlocks it on failure. Returns what it held."""
    call("lock", target, lock_seconds=LOCK_SECONDS)
    try:
        held = _held(session, target)  # measured again: the locked process can take no more
        uuids = {device.id: device.key for device in session.probe.devices}
        cards = {uuids[share.device]: share.bytes for share in held}
        note_parked(ParkedProcess(target.pid, target.started, cards))
        call("checkpoint", target, size=sum(share.bytes for share in held))
    except GpuError as error:
        raise _unlocked(target, error) from None
    session.world(fresh=True)  # renews the helper's figures, by which other processes decide
    return held


def _unlocked(target: Target, error: GpuError) -> GpuError:
    """Unlocks the process if it is still locked. Returns `error` with a note on what was undone."""
    if look(target.pid) is None:
        return error
    try:
        if call("state", target) == LOCKED:
            call("unlock", target)
            forget_parked(target.pid, target.started)
            return GpuError(f"{error} It runs on, with its memory in place.")
    except GpuError as second:
        error = GpuError(f"{error} {second}")
    return GpuError(
        f"{error}\n  See, and undo if it is locked:  %gpu unpark --checkpoint {target.pid}"
    )


def _restore(session: Session, target: Target, held: tuple[Share, ...]) -> None:
    """Moves the bytes `held` back to the cards, for which the caller has leased room."""
    call("restore", target, size=sum(share.bytes for share in held))
    call("unlock", target)
    forget_parked(target.pid, target.started)
    session.world(fresh=True)


def _failed(action: str, target: Target, why: str) -> GpuError:
    """The error for a call that the driver refused, with the process's present state."""
    now = look(target.pid)
    if now is None or now.started != target.started:
        threads_known = f", as driver 610.57 does to a process with {target.threads} threads"
        return GpuError(
            f"{target.label} ended during the driver's {action}"
            f"{threads_known if target.threads > 1 else ''}. Its memory came free.",
            process=str(target.pid),
        )
    if action == "lock":
        return Busy(
            f"{target.label} did not come to rest in {LOCK_SECONDS:.0f} s ({why}). "
            f"Nothing changed.",
            name=str(target.pid),
            waited_seconds=LOCK_SECONDS,
            because=why,
        )
    if action == "state":
        return GpuError(
            f"the driver does not know {target.label} as a process that uses CUDA ({why}).",
            process=str(target.pid),
        )
    if action == "restore":
        return GpuError(
            f"{target.label} did not return ({why}). Its memory is still in RAM, and a return that "
            f"ran out of memory can stay stuck.\n  Make room and try once more:  "
            f"%gpu unpark --checkpoint {target.pid}",
            process=str(target.pid),
        )
    return GpuError(f"{action} of {target.label} failed: {why}.", process=str(target.pid))


def _seconds(size: int) -> float:
    """The time limit of a call that copies `size` bytes."""
    return CALL_SECONDS + SECONDS_A_GIB * size / GIB


def _noted(session: Session, target: Target) -> tuple[Share, ...]:
    """The bytes that the parked process needs on each card. Raises GpuError for unknown bytes."""
    note = noted_parked(target.pid, target.started)
    ids = {device.key: device.id for device in session.probe.devices}
    if note is None or set(note.cards) - set(ids):
        raise GpuError(
            f"{target.label} was parked by another user or another tool, so the room that it needs is "
            f"not known.\n  Bring it back with that tool, and hold the room meanwhile:  %%gpu SIZE"
        )
    cards = sorted(note.cards.items())
    return tuple([Share(ids[uuid], size) for uuid, size in cards])


def _journal(
    session: Session, target: Target, verb: str, because: str, held: tuple[Share, ...]
) -> None:
    lease = Lease(session.me, f"pid {target.pid}", shares=held)
    size = sum(share.bytes for share in held)
    session.note(lease, verb, verb, because, fresh=True, size=size, by=session.owner.user)


# -- notes on parked processes
#
# The driver does not report how much memory a parked process needs for its return. So each one has
# a file in a directory of this user, which is valid until the machine boots again.

MOST_BYTES = 1 << 16


class ParkedProcess(Value):
    """A process that was parked, and the bytes that it held."""

    pid: int
    started: int  # clock ticks after the boot: a pid is used again
    cards: dict[str, int]  # UUID -> bytes


def note_parked(process: ParkedProcess) -> None:
    """Stores the note on `process`. Raises GpuError on failure: unparking needs the note."""
    path = _note_path(process.pid, process.started)
    try:
        make_directory(path.parent)
        if weak := weak_step(path.parent):
            raise GpuError(f"the notes on parked processes are not private: {weak}.")
        replace_file(path, msgspec.json.encode(process))
    except OSError as error:
        raise GpuError(f"{path} cannot be written ({error.strerror}).") from None


def noted_parked(pid: int, started: int) -> ParkedProcess | None:
    """The note on the process `pid` that began at `started`. None if this user has no such note."""
    path = _note_path(pid, started)
    try:
        if weak_step(path.parent) or path.stat().st_size > MOST_BYTES:
            return None
        return msgspec.json.decode(path.read_bytes(), type=ParkedProcess)
    except (OSError, msgspec.MsgspecError):  # there is no note, or it cannot be read
        return None


def forget_parked(pid: int, started: int) -> None:
    """Removes the note on the process `pid` that began at `started`, if there is a note."""
    _note_path(pid, started).unlink(missing_ok=True)


def _note_path(pid: int, started: int) -> Path:
    return local_state() / "parked" / boot_id() / f"{pid}-{started}.json"
