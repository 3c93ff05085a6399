"""The measured world of a host: figures that one helper process publishes and everybody reads, with their age.

A call into a driver may hang for good, so no kernel makes one: the helper (`sampler.py`) does, and whoever finds it
dead starts another, and whoever finds it hanging kills it first. Here is the readers' side; nothing is decided here.

    DIRECTORY/                the ledger's, of this boot
        samples               the last figures: JSON, replaced by a rename, so a reader finds them whole
        sampler.lock          locked by the helper for life; the lock says its process number, the file its start
        sampler.bell          a pipe: whoever writes to it has new figures taken now
        sampler.starting      somebody is starting one
        sampler.err           the last words of one that failed

They lie beside the book, not in it: a page that changed every second would be read and decoded by every kernel every
second. A decision puts the figures that it used into the page, and there they are what everybody goes by.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from ..facts import Device, Sample, Value
from ..units import show_seconds

HANG_SECONDS = 5.0  # without any card's answer
START_SECONDS = (
    30.0  # before the first: a driver that nobody uses may take as long to wake eight cards
)
START_AGAIN_SECONDS = 3.0
FRESH_SECONDS = 0.25  # how long a decision waits for figures taken now
LOOK_SECONDS = 0.5  # how often one reader looks after the helper
LATE_SECONDS = 3.0  # figures are renewed every 1 to 2 s


class Person(Value):
    """Whose process uses a card."""

    uid: int
    command: str


class Figures(Value):
    """What the helper measured last."""

    pid: int  # the helper's
    began_at: float  # when this round of questions began
    host: Sample
    cards: dict[str, Sample] = {}  # by UUID; a card that does not answer keeps its last
    failed: dict[
        str, str
    ] = {}  # UUID, or index of a card that cannot even tell it, or "": why there is no answer
    people: dict[
        int, Person
    ] = {}  # of the processes on the cards, as far as they can be seen from here

    @property
    def newest(self) -> float:
        """When a card answered last."""
        return max((sample.taken_at for sample in self.cards.values()), default=0.0)

    def of(self, device: Device) -> Sample | None:
        """What was measured of that device; None: nothing yet."""
        if device.is_host:
            return self.host
        if device.uuid in self.failed or "" in self.failed:
            return Sample(
                device.id, self.began_at, None
            )  # from now on unknown, whatever it said before
        sample = self.cards.get(device.uuid)
        return replace(sample, device=device.id) if sample else None


class Holder(NamedTuple):
    """Who holds the helper's lock, by the operating system's word; pid 0: a process that cannot be seen from here."""

    pid: int
    started_at: float


def boot_seconds() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_FLOCK = struct.Struct("hhqqi4x")
_decode = msgspec.json.Decoder(Figures).decode
_LOOKING = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_MOST_BYTES = 1 << 20  # of figures; 64 cards with a hundred processes each take 200 KiB
_children: list[
    subprocess.Popen[bytes]
] = []  # helpers that this process started; they outlive their objects' users


class Sampling:
    """A reader of the host's figures, who also sees to it that there is a helper. Thread-safe; never asks a driver."""

    def __init__(self, directory: Path, ledger: str = "", *, simulated: bool = False) -> None:
        """`ledger`: where the history is written down from. `simulated`: there is nothing to measure, so a helper that
        lives is good enough."""
        self.directory = directory
        self._ledger, self._simulated = ledger, simulated
        self._seen: tuple[tuple[int, int, int], Figures] | None = None
        self._deaf_since = -1.0  # the round after which the bell was not answered
        self._looked_at = float("-inf")
        self._began = boot_seconds()
        self._killed: tuple[int, float] | None = None
        self._why = ""

    def figures(self) -> Figures | None:
        """The last figures; None where there are none. A system call where they have not changed, else 30 µs."""
        path = self.directory / "samples"
        try:
            is_ = os.stat(path)
            stamp = (is_.st_ino, is_.st_mtime_ns, is_.st_size)
            seen = self._seen
            if seen is None or seen[0] != stamp:
                seen = self._seen = (stamp, _decode(_words(path)))
            return seen[1]
        except (OSError, msgspec.MsgspecError):
            return None

    def fresh(self) -> Figures | None:
        """Figures taken from now on; where the helper does not answer at once, the last there are.

        It is waited for once: until it has answered, the next caller does not.
        """
        asked_at = boot_seconds()
        last = self.figures()
        if last is not None and self._deaf_since == last.began_at or not self._ring():
            self.look_after()
            return last
        pause = 0.0005
        while (figures := self.figures()) is None or figures.began_at < asked_at:
            if boot_seconds() - asked_at > FRESH_SECONDS:
                self._deaf_since = figures.began_at if figures else -1.0
                return figures
            time.sleep(pause)
            pause = min(pause * 1.5, 0.005)
        return figures

    def first(self, seconds: float) -> None:
        """Waits for the first figures on this host, at most so long."""
        began = boot_seconds()
        self.look_after()
        while (figures := self.figures()) is None or began - figures.began_at > LATE_SECONDS:
            if boot_seconds() - began > seconds or figures is not None and figures.began_at > began:
                return
            time.sleep(0.005)

    def _ring(self) -> bool:
        try:
            bell = os.open(
                self.directory / "sampler.bell",
                os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW,
            )
        except OSError:
            return False  # nobody listens
        try:
            os.write(bell, b"!")
        except BlockingIOError:
            pass  # many rings wait there already
        finally:
            os.close(bell)
        return True

    # -- the helper

    def look_after(self) -> None:
        """Starts a helper where none lives, and ends one that hangs. Never waits."""
        now = boot_seconds()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        _children[:] = [child for child in _children if child.poll() is None]
        holder = self._holder()
        if holder is None:
            self._start()
        elif not self._simulated and self._silent_seconds(holder, now) > 0:
            self._end(holder, now)
        else:
            self._why, self._killed = "", None

    def state(self) -> dict[str, str]:
        """How the helper does, for a report."""
        holder, figures, now = self._holder(), self.figures(), boot_seconds()
        if holder is None:
            said = {"helper": self._why or self._last_words() or "none runs"}
        else:
            said = {
                "helper": f"pid {holder.pid or 'unknown'}, for {show_seconds(now - holder.started_at)}"
                + (f"; {self._why}" if self._why else "")
            }
        if figures is not None:
            said["figures"] = (
                f"{len(figures.cards)} cards, {show_seconds(now - figures.began_at)} old"
            )
            said |= {f"card {key or 'of any kind'}": why for key, why in figures.failed.items()}
        return said

    def _silent_seconds(self, holder: Holder, now: float) -> float:
        """For how much longer than anybody needs to wait for it the helper has not had one answer."""
        figures, silent = self.figures(), now - holder.started_at - START_SECONDS
        if figures is None or figures.began_at < holder.started_at:
            return silent
        if figures.failed or now - figures.began_at > HANG_SECONDS:  # an error is an answer too
            return now - figures.began_at - HANG_SECONDS
        return silent if figures.newest < holder.started_at else now - figures.newest - HANG_SECONDS

    def _holder(self) -> Holder | None:
        """Who is the helper. The lock is a POSIX one because the system names its holder: a file could lie."""
        try:
            fd = os.open(self.directory / "sampler.lock", _LOOKING)
        except OSError:
            return None
        try:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
            words = os.pread(fd, 64, 0).split()
        except OSError:
            return None
        finally:
            os.close(fd)
        if kind == fcntl.F_UNLCK:
            return None
        try:
            return Holder(max(0, pid), float(words[0]))
        except (ValueError, IndexError):  # it has the lock, and has yet to say since when
            return Holder(max(0, pid), self._began)

    def _start(self) -> None:
        """Starts a helper, unless somebody is at it: of several that start at once, the lock leaves one."""
        stamp = self.directory / "sampler.starting"
        try:
            if abs(time.time() - stamp.stat().st_mtime) < START_AGAIN_SECONDS:
                return
            stamp.unlink()
        except OSError:
            pass
        try:
            os.close(os.open(stamp, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            self._why = self._last_words()
            package = Path(__file__).parents[2]
            paths = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH", ""))))
            _children.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "gpu_runtime.telemetry.sampler",
                        *(["--simulated"] if self._simulated else []),
                        str(self.directory),
                    ],
                    cwd="/",  # a module of the notebook's directory would be taken for the standard library's
                    # The ledger in the environment: its URL may hold a password, and everybody sees a command line.
                    env={**os.environ, "PYTHONPATH": paths, "GPU_LEDGER": self._ledger},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )  # the stop button signals the whole group
        except FileExistsError:
            pass
        except OSError as error:
            self._why = (
                f"the helper that measures them cannot be started ({error.strerror or error})"
            )

    def _last_words(self) -> str:
        try:
            words = _words(self.directory / "sampler.err").decode(errors="replace")[:300].strip()
            return f"the helper that measures them failed: {words}"
        except OSError:
            return ""

    def _end(self, holder: Holder, now: float) -> None:
        """Kills a helper that hangs. In the driver's uninterruptible sleep it does not die; then none is started."""
        if self._killed and self._killed[0] == holder.pid:
            if now - self._killed[1] > 2.0:
                self._why = (
                    f"the helper that measures them (pid {holder.pid}) hangs in the driver and cannot be "
                    f"ended; nothing is granted there until the driver answers or the machine is restarted"
                )
            return
        try:
            process = os.pidfd_open(holder.pid) if holder.pid else -1
            if process < 0:
                raise ProcessLookupError
            try:
                again = self._holder()
                if again is not None and again.pid == holder.pid:  # a number may have come back
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                    self._killed = (holder.pid, now)
            finally:
                os.close(process)
        except PermissionError:
            self._why = f"the helper that measures them (pid {holder.pid}) hangs, and is another user's to end"
        except OSError:
            self._why = "the helper that measures them hangs, in another container"

    def trouble(self, stale_seconds: float, cards: dict[str, str]) -> dict[str, str]:
        """Why cards (UUID -> how they are called) are not measured now, in words; under "" where none of them is."""
        figures, now = self.figures(), boot_seconds()
        if figures is None:
            waited = f" for {show_seconds(now - self._began)}" if now - self._began > 1.0 else ""
            return {"": self._why or f"the devices have not been measured yet{waited}"}
        said = {}
        for uuid, name in cards.items():
            sample = figures.cards.get(uuid)
            age = now - sample.taken_at if sample else 0.0
            if why := figures.failed.get(uuid) or figures.failed.get(""):
                said[uuid] = f"{name} does not answer: {why}"
            elif sample is None:
                said[uuid] = f"{name} is not among the cards that the driver lists"
            elif age > stale_seconds:
                said[uuid] = f"{name} was last measured {show_seconds(age)} ago" + (
                    f": {self._why}" if self._why else "; the driver may hang"
                )
        if said and len(said) == len(cards):
            said[""] = "; ".join(said.values())
        return said


def _words(path: Path) -> bytes:
    """What stands in a file that another member of a shared ledger may have put there: no pipe that keeps a reader
    waiting, and not without end. Raises OSError."""
    fd = os.open(path, _LOOKING)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        return os.read(fd, _MOST_BYTES)
    finally:
        os.close(fd)
