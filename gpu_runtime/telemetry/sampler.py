"""The helper process of a host that talks to the driver, so that nobody else has to.

    GPU_LEDGER=URL python -m gpu_runtime.telemetry.sampler [--simulated] DIRECTORY

Measures the cards, and the machine's memory, once a second while the figures move, every other second while they rest,
and at once when somebody rings; publishes them in the ledger's directory (`sampling.py`). It ends by itself: when
another is the helper, when no owner of that ledger is left, when its lock is gone, or when for some seconds no card
answers, since a fresh process may fare better after a driver was replaced. A call that hangs hangs one card's
thread: the others' figures go on, and when none goes on, the readers end this process and start another.

In a thread of its own it also writes down how the devices are used (`recorder.py`), on simulated ones nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import select
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from ..devices import drivers
from ..devices.drivers import Card, Listing, Silent
from ..devices.sampler_client import Figures, Person, boot_seconds
from ..errors import ProbeFailed
from ..facts import HOST, Sample, encode
from ..ledgers.access import access_to
from ..ledgers.liveness import Life, life
from ..ledgers.sqlite.files import owner_files

BUSY_SECONDS, REST_SECONDS = 1.0, 2.0
MOVING_SECONDS = 10.0  # figures that have not changed for so long rest
LEAST_SECONDS = 0.01  # between two rounds, however many ring
ROUND_SECONDS = (
    0.2  # a card that takes longer is not waited for; its answer comes with a later round
)
LINGER_SECONDS = 5.0  # after the last owner has gone: another may come
FAILING_SECONDS = 10.0
CLOSE_SECONDS = 1.0  # for the history's last words


class Post:
    """The helper's own side of the directory: its lock, its bell, and the figures that it publishes."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError where the directory cannot be used."""
        self.directory = directory
        self._access = access_to(directory)
        self._access.make_file(directory / "sampler.lock")
        self._lock = os.open(directory / "sampler.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self.bell = -1

    def take(self) -> bool:
        """Whether this process is the helper now. Nothing may open and close the lock's file again in this process."""
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{boot_seconds():.3f}\n".encode(), 0)
        bell = self.directory / "sampler.bell"
        try:
            os.mkfifo(bell, 0o600)
            self._access.open_file(bell)
        except FileExistsError:
            pass
        self.bell = os.open(bell, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        for name in ("sampler.starting", "sampler.err"):
            (self.directory / name).unlink(missing_ok=True)
        return self.kept()

    def kept(self) -> bool:
        """Whether others still find this very lock here."""
        try:
            return os.stat(self.directory / "sampler.lock").st_ino == os.fstat(self._lock).st_ino
        except OSError:
            return False

    def publish(self, figures: Figures) -> None:
        """Raises OSError."""
        draft = self.directory / f".samples-{os.getpid()}"
        with open(draft, "wb", opener=_private) as file:
            file.write(encode(figures))
        self._access.open_file(draft)
        os.replace(draft, self.directory / "samples")

    def failed(self, error: BaseException) -> None:
        """Leaves word of why it ends, for who finds it gone."""
        try:
            with open(self.directory / "sampler.err", "w", opener=_private) as file:
                file.write(f"{type(error).__name__}: {error}\n")
            self._access.open_file(self.directory / "sampler.err")
        except OSError:
            pass


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


class Asker(threading.Thread):
    """Asks one card, so that a card that hangs holds up no other."""

    def __init__(
        self, listing: Listing, card: Card, answers: queue.SimpleQueue[tuple[str, Sample | str]]
    ) -> None:
        super().__init__(daemon=True, name=card.device.uuid)
        self._source, self._card, self._answers = listing.source, card, answers
        self._turns: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.busy = False
        self.start()

    def ask(self) -> None:
        self.busy = True
        self._turns.put(boot_seconds())

    def run(self) -> None:
        while True:
            asked_at = self._turns.get()
            try:
                answer: Sample | str = self._source.ask(self._card, asked_at)
            except Silent as error:
                answer = str(error)
            self.busy = False
            self._answers.put((self.name, answer))


class Rounds:
    """Asks all cards, again and again; keeps what each said last."""

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[tuple[str, Sample | str]] = queue.SimpleQueue()
        self._cards: dict[str, Sample] = {}
        self._failed: dict[str, str] = {}
        self._lost: dict[str, str] = {}  # those that could not even be listed
        self._people: dict[int, Person] = {}
        self._askers: list[Asker] = []
        try:
            for listing in drivers.listings():
                self._lost |= listing.failed
                self._askers += [Asker(listing, card, self._answers) for card in listing.cards]
            if not self._askers and not self._lost:
                self._lost = {"": "no driver lists a card"}
        except ProbeFailed as error:
            self._lost = {"": str(error).splitlines()[0]}
        psutil.cpu_percent()  # the first answer means nothing

    def next(self) -> Figures:
        """The figures of now; of a card that did not answer in time, the last."""
        began = boot_seconds()
        awaited = {asker.name for asker in self._askers if not asker.busy}
        for asker in self._askers:
            if asker.name in awaited:
                asker.ask()
        while (left := began + ROUND_SECONDS - boot_seconds()) > 0 and awaited:
            try:
                awaited.discard(self._heard(self._answers.get(timeout=left)))
            except queue.Empty:
                break
        while not self._answers.empty():
            self._heard(self._answers.get())
        failed = {**self._lost, **self._failed}
        return Figures(os.getpid(), began, _machine(began), dict(self._cards), failed, self._seen())

    def _heard(self, answer: tuple[str, Sample | str]) -> str:
        uuid, said = answer
        if isinstance(said, Sample):
            self._cards[uuid] = said
            self._failed.pop(uuid, None)
        else:
            self._failed[uuid] = said
        return uuid

    def _seen(self) -> dict[int, Person]:
        """Whose the processes on the cards are; looked up once for each."""
        pids = {pid for sample in self._cards.values() for pid in sample.processes}
        self._people = {
            pid: person for pid in pids if (person := self._people.get(pid) or _person(pid))
        }
        return self._people

    @property
    def hopeless(self) -> bool:
        """Whether no card answers, not even by silence."""
        return (
            bool(self._lost)
            and not self._askers
            or bool(self._askers)
            and len(self._failed) == len(self._askers)
        )


class Simulated:
    """What there is to measure beside simulated cards: the machine's own memory."""

    hopeless = False

    def next(self) -> Figures:
        return Figures(os.getpid(), now := boot_seconds(), _machine(now))


def _machine(now: float) -> Sample:
    return Sample(
        HOST, now, psutil.virtual_memory().available, utilisation_percent=psutil.cpu_percent()
    )


def _person(pid: int) -> Person | None:
    """Who runs a process, and what; None where it cannot be seen from here (a container's, or gone)."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:3]
        command = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None
    # `python` says little: the script's name with it, yet no arguments, which may hold secrets.
    script = next((word for word in words[1:] if word.endswith(b".py")), b"")
    return Person(uid, f"{command} {os.path.basename(script).decode(errors='replace')}".strip())


def _somebody(directory: Path) -> bool:
    try:
        return any(life(path) is Life.ALIVE for path in owner_files(directory))
    except OSError:
        return False


class Writing:
    """The thread that writes the history: a ledger that does not answer must not hold up the figures."""

    def __init__(self, directory: Path, url: str) -> None:
        self.figures: Figures | None = None  # the last
        self._directory, self._url = directory, url
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        if self._url:
            self._thread.start()

    def end(self) -> None:
        """Writes what is still to be written, unless that takes long."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        from .recorder import (
            EVERY_SECONDS,
            Recorder,
        )  # not before the first figures are out, which somebody waits for

        recorder = Recorder(self._directory, self._url)
        try:
            while not self._ended.wait(EVERY_SECONDS):
                with contextlib.suppress(
                    Exception
                ):  # of a page that makes no sense nothing is told; the next may
                    if self.figures is not None:
                        recorder.turn(self.figures)
        finally:
            recorder.flush()


def serve(post: Post, rounds: Rounds | Simulated, writing: Writing) -> None:
    """Measures and publishes for as long as somebody may want it. Raises OSError where it cannot publish."""
    poll = select.poll()
    poll.register(post.bell, select.POLLIN)
    wanted_at = moved_at = answered_at = boot_seconds()
    last: list[int | None] = []
    while post.kept():
        writing.figures = figures = rounds.next()
        if isinstance(rounds, Rounds):
            post.publish(figures)
        now = figures.began_at
        free = [sample.free_bytes for sample in figures.cards.values()]
        if free != last:
            last, moved_at = free, now
        if not rounds.hopeless:
            answered_at = now
        if _somebody(post.directory):
            wanted_at = now
        if now - wanted_at > LINGER_SECONDS or now - answered_at > FAILING_SECONDS:
            return
        pause = BUSY_SECONDS if now - moved_at < MOVING_SECONDS else REST_SECONDS
        _wait(poll, post.bell, pause, now)


def _wait(poll: Any, bell: int, pause: float, began: float) -> None:
    """Until somebody rings, or the time is up; but never so soon that rings alone keep the driver busy."""
    time.sleep(max(0.0, LEAST_SECONDS - (boot_seconds() - began)))
    if poll.poll(1000 * max(0.0, pause - (boot_seconds() - began))):
        try:
            os.read(bell, 65536)
        except BlockingIOError:
            pass


def main(arguments: list[str]) -> int:
    simulated, directory = arguments[:1] == ["--simulated"], Path(arguments[-1])
    post = Post(directory)
    if not post.take():
        return 0  # another one is
    writing = Writing(directory, os.environ.get("GPU_LEDGER", ""))
    try:
        rounds = Simulated() if simulated else Rounds()
        writing.start()
        serve(post, rounds, writing)
    except FileNotFoundError:
        pass  # the ledger's directory is gone
    except Exception as error:
        post.failed(error)
        return 1
    finally:
        writing.end()
    return 0


if __name__ == "__main__":
    code = 1
    try:
        code = main(sys.argv[1:])
    finally:
        os._exit(code)  # without waiting for threads that a driver may keep for good
