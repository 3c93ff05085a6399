"""The measured figures of a host: one helper process publishes them, and every process reads them.

A call into a driver may hang for ever. So only the helper (`telemetry/sampler.py`) calls drivers,
and no kernel does. If the helper has ended, the first process that notices this starts another
helper. If the helper hangs, the first process that notices this kills the helper before it starts
another one. This module is the readers' side.

    DIRECTORY/                the directory of the ledger's files of this boot
        samples               the last figures: JSON, replaced by a rename
        sampler.lock          locked by the helper for life; it holds the helper's start time
        sampler.bell          a pipe: a write to it requests new figures
        sampler.starting      exists while a process is starting a helper
        sampler.err           the last error message of a helper that failed

The figures are stored in a separate file, because a book with the figures would change every
second, and every kernel would read and decode the book every second. A decision writes the figures
that it used into the book, and other processes read these figures in the book.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from ..attribution import name_of
from ..facts import Device, Sample, Value
from ..files import child_environment, read_plain, stamp
from ..units import show_seconds

HANG_SECONDS = 5.0  # a helper hangs if no card has answered for this long
START_SECONDS = 30.0  # limit for the first answer; an idle driver wakes eight cards so slowly
START_AGAIN_SECONDS = 3.0
FRESH_SECONDS = 0.25  # how long a decision waits for new figures
LOOK_SECONDS = 0.5  # how often one reader checks the helper
LATE_SECONDS = 3.0  # older figures are late, since they are renewed every 1 to 2 s
DEAD_SECONDS = 2.0  # how long a killed helper may take to end


class Person(Value):
    """The user and the command of a process on a card."""

    uid: int
    command: str


class Figures(Value):
    """The figures that the helper measured last."""

    pid: int  # pid of the helper
    began_at: float  # when this round of measurements began
    host: Sample
    cards: dict[str, Sample] = {}  # by UUID; a card that does not answer keeps its last sample
    # Maps the UUID of a card to the reason why the card does not answer. A card without a UUID has
    # its index as key. The key "" stands for all cards.
    failed: dict[str, str] = {}
    people: dict[int, Person] = {}  # by pid, for the visible processes on the cards

    @property
    def newest(self) -> float:
        """The newest time at which any card answered; 0 if no card has answered."""
        return max((sample.taken_at for sample in self.cards.values()), default=0.0)

    def as_of(self, cards: Iterable[str]) -> float:
        """The time since which the host and each of the `cards` (UUIDs) were measured, or have failed."""
        times = [self.began_at]
        for uuid in set(cards) - self.failed.keys() if "" not in self.failed else ():
            sample = self.cards.get(uuid)
            times.append(sample.taken_at if sample else 0.0)
        return min(times)

    @property
    def programs(self) -> dict[int, tuple[str, str]]:
        """The user and the command of each visible process on the cards, by pid."""
        return {pid: (name_of(person.uid), person.command) for pid, person in self.people.items()}

    def of(self, device: Device) -> Sample | None:
        """The sample of the given `device`; None if the device was not measured yet."""
        if device.is_host:
            return self.host
        if device.uuid in self.failed or "" in self.failed:
            # The card does not answer now, so its earlier figures are no longer valid.
            return Sample(device.id, self.began_at, None)
        sample = self.cards.get(device.uuid)
        return replace(sample, device=device.id) if sample else None


class LockHolder(NamedTuple):
    """The process that holds the helper's lock, as the operating system reports it."""

    pid: int  # 0: it is in another container
    started_at: float


def boot_seconds() -> float:
    """Seconds since boot. All times in this module are of this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_FLOCK = struct.Struct("hhqqi4x")
_decode = msgspec.json.Decoder(Figures).decode
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_BELL_FLAGS = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_MARK_FLAGS = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
_MOST_BYTES = 1 << 20  # limit of the file; 64 cards with a hundred processes each take 200 KiB
# Helpers that this process started. A helper continues to run when the `Sampling` that started it
# is gone.
_children: list[subprocess.Popen[bytes]] = []


class Sampling:
    """A reader of the host's figures that also keeps a helper running. Thread-safe; never calls a driver."""

    def __init__(self, directory: Path, ledger: str = "", *, simulated: bool = False) -> None:
        """Reads the files in `directory`.

        `ledger` is the URL of the ledger whose history the helper writes. If `simulated` is true,
        no card is measured, so a helper is never considered to hang.
        """
        self.directory = directory
        self._ledger, self._simulated = ledger, simulated
        self._read: tuple[tuple[int, int, int] | None, Figures] | None = None
        self._unanswered_since = -1.0  # start of the last round before an unanswered request
        self._looked_at = float("-inf")
        self._began = boot_seconds()
        self._killed: tuple[int, float] | None = None  # pid of the killed helper, and the time
        self._why = ""

    def figures(self) -> Figures | None:
        """The last figures, or None. This takes one system call, and 30 µs for a changed file."""
        path = self.directory / "samples"
        changed, read = stamp(path), self._read
        try:
            if read is None or read[0] != changed:
                read = self._read = changed, _decode(read_plain(path, _MOST_BYTES))
            return read[1]
        except (OSError, msgspec.MsgspecError):  # there are none yet, or of another version
            return None

    def fresh(self) -> Figures | None:
        """Figures measured after this call; the last figures if there are none after FRESH_SECONDS.

        After a call without an answer, the calls of this process return at once, until the helper
        has answered again.
        """
        requested_at = boot_seconds()
        last = self.figures()
        unanswered = last is not None and self._unanswered_since == last.began_at
        if unanswered or not self._ring():
            self.look_after()
            return last
        figures = self._awaited(FRESH_SECONDS, requested_at)
        if figures is None or figures.began_at < requested_at:
            self._unanswered_since = figures.began_at if figures else -1.0
        return figures

    def wait(self, seconds: float, oldest: float = LATE_SECONDS, cards: Iterable[str] = ()) -> None:
        """Waits at most `seconds` for figures that are now at most `oldest` seconds old, also of these `cards` (UUIDs).

        With 0 for `oldest`, they are measured after this call. A round does not wait for a slow card, whose last
        sample is of an earlier round. Starts a helper if none runs.
        """
        since = boot_seconds() - oldest
        self.look_after()
        self._ring()
        self._awaited(seconds, since, cards)

    def _awaited(self, seconds: float, since: float, cards: Iterable[str] = ()) -> Figures | None:
        """The first figures that were measured after the time `since`, with `cards`; after `seconds` the last ones."""
        began, pause = boot_seconds(), 0.0005
        while True:
            figures = self.figures()
            is_new = figures is not None and figures.as_of(cards) >= since
            if is_new or boot_seconds() - began > seconds:
                return figures
            time.sleep(pause)
            pause = min(pause * 1.5, 0.005)

    def _ring(self) -> bool:
        """Requests new figures. Returns whether a helper listens."""
        try:
            bell = os.open(self.directory / "sampler.bell", _BELL_FLAGS)
        except OSError:  # no helper has the pipe open
            return False
        try:
            with contextlib.suppress(BlockingIOError):  # full of requests: the helper will measure
                os.write(bell, b"!")
        finally:
            os.close(bell)
        return True

    # -- the helper

    def look_after(self) -> None:
        """Starts a helper if no helper runs. Ends a helper that hangs. Never waits."""
        now = boot_seconds()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        _children[:] = [child for child in _children if child.poll() is None]
        holder = self._holder()
        if holder is None:
            self._start()
        elif not self._simulated and self._overdue_seconds(holder, now) > 0:
            self._end(holder, now)
        else:
            self._why, self._killed = "", None

    def state(self) -> dict[str, str]:
        """The state of the helper, its figures and the failing cards, for a report."""
        holder, figures, now = self._holder(), self.figures(), boot_seconds()
        if holder is None:
            state = {"helper": self._why or self._last_error() or "none runs"}
        else:
            age = show_seconds(now - holder.started_at)
            trouble = f"; {self._why}" if self._why else ""
            state = {"helper": f"pid {holder.pid or 'unknown'}, for {age}{trouble}"}
        if figures is not None:
            age = show_seconds(now - figures.began_at)
            state["figures"] = f"{len(figures.cards)} cards, {age} old"
            for key, why in figures.failed.items():
                state[f"card {key or 'of any kind'}"] = why
        return state

    def _overdue_seconds(self, holder: LockHolder, now: float) -> float:
        """Seconds by which the helper's next answer is late; negative if the answer is not late."""
        figures = self.figures()
        since_start = now - holder.started_at - START_SECONDS
        if figures is None or figures.began_at < holder.started_at:
            return since_start
        round_age = now - figures.began_at
        if figures.failed or round_age > HANG_SECONDS:  # a card that fails has answered too
            return round_age - HANG_SECONDS
        if figures.newest < holder.started_at:
            return since_start
        return now - figures.newest - HANG_SECONDS

    def _holder(self) -> LockHolder | None:
        """The helper that holds the lock; None if no process holds it.

        The operating system reports the holder of a POSIX lock. A pid in the file could be wrong.
        """
        try:
            fd = os.open(self.directory / "sampler.lock", _READ_FLAGS)
        except OSError:  # no helper has run in this directory
            return None
        try:
            query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, query))
            words = os.pread(fd, 64, 0).split()
        except OSError:  # a file system without such locks
            return None
        finally:
            os.close(fd)
        if kind == fcntl.F_UNLCK:
            return None
        try:
            return LockHolder(max(0, pid), float(words[0]))
        except (ValueError, IndexError):  # the helper has not written its start time yet
            return LockHolder(max(0, pid), self._began)

    def _start(self) -> None:
        """Starts a helper, unless another process is starting one. Of several, one gets the lock."""
        mark = self.directory / "sampler.starting"
        try:
            if abs(time.time() - mark.stat().st_mtime) < START_AGAIN_SECONDS:
                return
            mark.unlink()
        except OSError:
            pass  # no start is in progress
        try:
            os.close(os.open(mark, _MARK_FLAGS, 0o600))
            self._why = self._last_error()
            _children.append(self._spawn())
        except FileExistsError:
            pass  # another process has just begun to start a helper
        except OSError as error:
            reason = error.strerror or error
            self._why = f"the helper that measures them cannot be started ({reason})"

    def _spawn(self) -> subprocess.Popen[bytes]:
        """A new helper process. Raises OSError."""
        options = ["--simulated"] if self._simulated else []
        module = "gpu_runtime.telemetry.sampler"
        return subprocess.Popen(
            [sys.executable, "-m", module, *options, str(self.directory)],
            # In the notebook's directory, a module of the user could hide a standard module.
            cwd="/",
            # The ledger's URL may contain a password. Every user can read a command line, so the
            # URL is passed in the environment.
            env={**child_environment(), "GPU_LEDGER": self._ledger},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # else the stop button would interrupt the helper too
        )

    def _last_error(self) -> str:
        try:
            message = read_plain(self.directory / "sampler.err", _MOST_BYTES)
        except OSError:  # no helper has failed
            return ""
        text = message.decode(errors="replace")[:300].strip()
        return f"the helper that measures them failed: {text}"

    def _end(self, holder: LockHolder, now: float) -> None:
        """Kills a helper that hangs. While one that is blocked in the driver exists, no other starts."""
        helper = f"the helper that measures them (pid {holder.pid}) hangs"
        if self._killed and self._killed[0] == holder.pid:
            if now - self._killed[1] > DEAD_SECONDS:
                self._why = (
                    f"{helper} in the driver and cannot be ended; nothing is granted there until "
                    f"the driver answers or the machine is restarted"
                )
            return
        try:
            self._kill(holder, now)
        except PermissionError:
            self._why = f"{helper}, and belongs to another user"
        except OSError:
            self._why = "the helper that measures them hangs, in another container"

    def _kill(self, holder: LockHolder, now: float) -> None:
        """Kills the process of `holder` if it still holds the lock: pids are reused. Raises OSError (pid 0, too)."""
        process = os.pidfd_open(holder.pid)
        try:
            again = self._holder()
            if again is not None and again.pid == holder.pid:
                signal.pidfd_send_signal(process, signal.SIGKILL)
                self._killed = (holder.pid, now)
        finally:
            os.close(process)

    def trouble(self, stale_seconds: float, cards: dict[str, str]) -> dict[str, str]:
        """Maps UUIDs of cards to the reason why the card is not measured now.

        The key "" means that no card is measured. `cards` has the name of the card for each UUID. A
        sample older than `stale_seconds` does not count.
        """
        figures, now = self.figures(), boot_seconds()
        if figures is None:
            waited = now - self._began
            since = f" for {show_seconds(waited)}" if waited > 1.0 else ""
            return {"": self._why or f"the devices have not been measured yet{since}"}
        oldest = now - stale_seconds
        reasons = {
            id: self._trouble_of(id, name, figures, now, oldest) for id, name in cards.items()
        }
        troubles = {uuid: why for uuid, why in reasons.items() if why}
        if troubles and len(troubles) == len(cards):
            troubles[""] = "; ".join(troubles.values())
        return troubles

    def _trouble_of(self, uuid: str, name: str, figures: Figures, now: float, oldest: float) -> str:
        """Why the card `uuid` has no sample since `oldest`; empty if it has."""
        error = figures.failed.get(uuid) or figures.failed.get("")
        if error:
            return f"{name} does not answer: {error}"
        sample = figures.cards.get(uuid)
        if sample is None:
            return f"{name} is not among the cards that the driver lists"
        if sample.taken_at >= oldest:
            return ""
        reason = f": {self._why}" if self._why else "; the driver may hang"
        age = show_seconds(now - sample.taken_at)
        return f"{name} was last measured {age} ago{reason}"
