"""The helper process of a host. The helper calls the driver, so that no kernel has to call the
driver.

GPU_LEDGER=URL python -m gpu_runtime.telemetry.sampler [--simulated] DIRECTORY

The helper measures the cards and the machine's memory. While the figures change, it measures once a
second, else every other second. A notification makes the helper measure at once. The helper
publishes the figures in the ledger's directory (`devices/sampler_client.py`).

The helper ends if another process is the helper, if no process uses the ledger any more, or if the
helper's lock file is gone. It also ends if no card answers for some seconds: after a driver was
replaced, only a new process can call the new driver. Each card has a thread, so a driver call that
hangs does not stop the measuring of other cards. If no card is measured any more, the processes
that read the figures end the helper and start another helper.

A separate thread records how the devices are used (`recorder.py`). With simulated devices, only the
machine's memory is measured. Its figures are not published, and only the history uses them.
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
from msgspec.structs import replace

from ..devices import drivers
from ..devices.drivers import Card, Listing, NoAnswer
from ..devices.sampler_client import Figures, Person, boot_seconds
from ..errors import ProbeFailed
from ..facts import HOST, Sample, encode
from ..files import replace_file
from ..ledgers.access import access_to, owner_files
from ..ledgers.keeper.ledger import KeeperPeek
from ..ledgers.keeper.wire import SOCKET
from ..ledgers.liveness import Life, life

BUSY_SECONDS, REST_SECONDS = 1.0, 2.0
MOVING_SECONDS = 10.0  # after so long without a change, cards are measured every other second
LEAST_SECONDS = 0.01  # between two rounds, however many notifications arrive
# A round does not wait longer than this for a slow card, whose answer is used in a later round.
ROUND_SECONDS = 0.2
PCIE_SECONDS = 1.0  # the least time between two counts of a card's PCIe traffic
LINGER_SECONDS = 5.0  # the helper stays after the last owner has ended, since another may start
FAILING_SECONDS = 10.0
CLOSE_SECONDS = 1.0  # the longest wait for the last write of the history

_Answers = queue.SimpleQueue[tuple[str, Sample | str]]  # UUID of a card, and its sample or error


class HelperFiles:
    """The helper's files in the ledger's directory: lock, notification pipe, published figures."""

    def __init__(self, directory: Path) -> None:
        """Opens the lock in `directory`. Raises OSError if the directory cannot be used."""
        self.directory = directory
        self._access = access_to(directory)
        self._access.make_file(directory / "sampler.lock")
        self._lock = os.open(directory / "sampler.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self.bell = -1

    def take_lock(self) -> bool:
        """Takes the helper's lock. Returns whether this process is the helper now.

        This process must not open and close the lock's file again, because closing the file would
        release the lock.
        """
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another helper has it
            return False
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{boot_seconds():.3f}\n".encode(), 0)
        bell = self.directory / "sampler.bell"
        try:
            os.mkfifo(bell, 0o600)
            self._access.open_file(bell)
        except FileExistsError:
            pass  # an earlier helper made it
        self.bell = os.open(bell, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        for name in ("sampler.starting", "sampler.err"):
            (self.directory / name).unlink(missing_ok=True)
        return self.has_lock()

    def has_lock(self) -> bool:
        """Whether the lock that this process holds is still the lock file in the directory."""
        try:
            return os.stat(self.directory / "sampler.lock").st_ino == os.fstat(self._lock).st_ino
        except OSError:  # the directory was deleted
            return False

    def publish(self, figures: Figures) -> None:
        """Replaces the published `figures`. Raises OSError."""
        replace_file(self.directory / "samples", encode(figures), self._access.open_file)

    def write_error(self, error: BaseException) -> None:
        """Writes why the helper ends, for the processes that read the figures. Never fails."""
        text = f"{type(error).__name__}: {error}\n".encode(errors="replace")
        with contextlib.suppress(OSError):  # the readers then report no reason
            replace_file(self.directory / "sampler.err", text, self._access.open_file)


class CardReader(threading.Thread):
    """Measures one card in a separate thread, so a card that hangs does not block other cards."""

    def __init__(self, listing: Listing, card: Card, answers: _Answers) -> None:
        """Measures the `card` of the `listing`, and puts each result into the queue `answers`."""
        super().__init__(daemon=True, name=card.device.uuid)
        self._source, self._card, self._answers = listing.source, card, answers
        self._requests: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.busy = False
        self.start()

    def request(self) -> None:
        """Starts a measurement. The result is put into the queue `answers`."""
        self.busy = True
        self._requests.put(boot_seconds())

    def run(self) -> None:
        """The thread's loop. PCIe is counted after an answer, since that takes 40 ms, and is in the next one."""
        pcie, counted_at = None, float("-inf")
        count_pcie = getattr(self._source, "pcie", None)  # NVML alone has the figure
        while True:
            requested_at = self._requests.get()
            try:
                sample = self._source.measure(self._card, requested_at)
                answer: Sample | str = replace(sample, pcie=pcie)
            except NoAnswer as error:
                answer = str(error)
            except Exception as error:  # noqa: BLE001 - else this card would have no more answer, and no reason
                answer = f"{type(error).__name__}: {error}"
            self._answers.put((self.name, answer))
            self.busy = False
            if count_pcie and requested_at - counted_at >= PCIE_SECONDS:
                pcie, counted_at = count_pcie(self._card), requested_at


class CardRounds:
    """Measures all cards, once for each call of `next`, and keeps the last result of each card."""

    def __init__(self) -> None:
        """Lists the cards of all drivers."""
        self._answers: _Answers = queue.SimpleQueue()
        self._cards: dict[str, Sample] = {}
        self._failed: dict[str, str] = {}
        self._unlisted: dict[str, str] = {}  # card -> why it could not be listed
        self._people: dict[int, Person] = {}
        self._readers: list[CardReader] = []
        try:
            for listing in drivers.listings():
                self._unlisted |= listing.failed
                for card in listing.cards:
                    self._readers.append(CardReader(listing, card, self._answers))
            if not self._readers and not self._unlisted:
                self._unlisted = {"": "no driver lists a card"}
        except ProbeFailed as error:
            self._unlisted = {"": str(error).splitlines()[0]}
        psutil.cpu_percent()  # the first result is always 0, so it is dropped

    def next(self) -> Figures:
        """Measures all cards and returns the figures. A card that is late keeps its last figures."""
        idle = [reader for reader in self._readers if not reader.busy]
        self._store_answers()  # of earlier rounds, which this round must not take for its own
        began = boot_seconds()
        for reader in idle:
            reader.request()
        awaited = {reader.name for reader in idle}
        while awaited:
            left = began + ROUND_SECONDS - boot_seconds()
            if left <= 0:
                break
            try:
                awaited.discard(self._store(self._answers.get(timeout=left)))
            except queue.Empty:  # the round's time is over
                break
        self._store_answers()
        failed = {**self._unlisted, **self._failed}
        people = self._look_up_people()
        return Figures(os.getpid(), began, _machine(began), dict(self._cards), failed, people)

    def _store_answers(self) -> None:
        while not self._answers.empty():
            self._store(self._answers.get())

    def _store(self, answer: tuple[str, Sample | str]) -> str:
        """Stores the `answer` of one card, and returns the UUID of the card."""
        uuid, result = answer
        if isinstance(result, Sample):
            self._cards[uuid] = result
            self._failed.pop(uuid, None)
        else:
            self._failed[uuid] = result
        return uuid

    def _look_up_people(self) -> dict[int, Person]:
        """The users of the processes on the cards, by pid. Each process is looked up once."""
        pids = {pid for sample in self._cards.values() for pid in sample.processes}
        known = {}
        for pid in pids:
            person = self._people.get(pid) or _person(pid)
            if person:
                known[pid] = person
        self._people = known
        return known

    @property
    def hopeless(self) -> bool:
        """Whether all cards have failed. A card without any answer yet does not count as failed."""
        if not self._readers:
            return bool(self._unlisted)
        return len(self._failed) == len(self._readers)


class SimulatedRounds:
    """Measures only the machine's memory, because the cards are simulated."""

    hopeless = False

    def next(self) -> Figures:
        """New figures."""
        now = boot_seconds()
        return Figures(os.getpid(), now, _machine(now))


def _machine(now: float) -> Sample:
    available = psutil.virtual_memory().available
    return Sample(HOST, now, available, utilisation_percent=psutil.cpu_percent())


def _person(pid: int) -> Person | None:
    """The user and the command of the process `pid`; None if it has ended, or is in another container."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:3]
        command = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:  # ended, or hidden from this user
        return None
    # Every kernel is called `python`, so add the script's name. Other arguments may be secrets.
    script = next((word for word in words[1:] if word.endswith(b".py")), b"")
    script_name = os.path.basename(script).decode(errors="replace")
    return Person(uid, f"{command} {script_name}".strip())


def _any_owner_lives(directory: Path, peek: KeeperPeek) -> bool:
    if (directory / SOCKET).exists():
        return bool(peek.living())
    try:
        return any(life(path) is Life.ALIVE for path in owner_files(directory))
    except OSError:  # the directory was deleted
        return False


class HistoryThread:
    """The thread that writes the history. A ledger that does not answer delays only this thread."""

    def __init__(self, directory: Path, url: str) -> None:
        """`directory` has the ledger's files of this boot; `url` is its URL (empty: no history)."""
        self.figures: Figures | None = None  # the last published figures
        self._directory, self._url = directory, url
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        if self._url:
            self._thread.start()

    def end(self) -> None:
        """Writes the moments that are not written yet. Waits for this at most one second."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        # Imported late, because other processes wait for the first figures: the import takes time.
        from .recorder import EVERY_SECONDS, Recorder

        recorder = Recorder(self._directory, self._url)
        try:
            while not self._ended.wait(EVERY_SECONDS):
                # A book that cannot be read is skipped; the next one may be readable.
                with contextlib.suppress(Exception):
                    if self.figures is not None:
                        recorder.look(self.figures)
        finally:
            recorder.end()


def serve(files: HelperFiles, rounds: CardRounds | SimulatedRounds, history: HistoryThread) -> None:
    """Measures with `rounds`, and gives the figures to `history`.

    The figures of real cards are also published in `files`.

    Returns when this process should no longer be the helper (see the module's docstring). Raises
    OSError if the figures cannot be published.
    """
    peek = KeeperPeek(files.directory)
    poll = select.poll()
    poll.register(files.bell, select.POLLIN)
    wanted_at = moved_at = answered_at = boot_seconds()
    last: list[int | None] = []
    while files.has_lock():
        history.figures = figures = rounds.next()
        if isinstance(rounds, CardRounds):
            files.publish(figures)
        now = figures.began_at
        free = [sample.free_bytes for sample in figures.cards.values()]
        if free != last:
            last, moved_at = free, now
        if not rounds.hopeless:
            answered_at = now
        if _any_owner_lives(files.directory, peek):
            wanted_at = now
        if now - wanted_at > LINGER_SECONDS or now - answered_at > FAILING_SECONDS:
            return
        pause = BUSY_SECONDS if now - moved_at < MOVING_SECONDS else REST_SECONDS
        _wait(poll, files.bell, pause, now)


def _wait(poll: Any, bell: int, pause: float, began: float) -> None:
    """Waits for a notification, but not longer than until `pause` seconds after the time `began`.

    `bell` is the file descriptor of the notification pipe, and `began` is the start of the last
    measurement. The next measurement starts at least LEAST_SECONDS after `began`, so that many
    notifications do not keep the driver busy.
    """
    time.sleep(max(0.0, LEAST_SECONDS - (boot_seconds() - began)))
    if poll.poll(1000 * max(0.0, pause - (boot_seconds() - began))):
        try:
            os.read(bell, 65536)
        except BlockingIOError:
            pass  # the pipe is empty


def main(arguments: list[str]) -> int:
    """Runs the helper with the command-line `arguments`. Returns the exit status."""
    simulated, directory = arguments[:1] == ["--simulated"], Path(arguments[-1])
    files = HelperFiles(directory)
    if not files.take_lock():
        return 0  # another process is the helper
    history = HistoryThread(directory, os.environ.get("GPU_LEDGER", ""))
    try:
        rounds = SimulatedRounds() if simulated else CardRounds()
        history.start()
        serve(files, rounds, history)
    except FileNotFoundError:
        pass  # the ledger's directory is gone
    except Exception as error:
        files.write_error(error)
        return 1
    finally:
        history.end()
    return 0


if __name__ == "__main__":
    code = 1
    try:
        code = main(sys.argv[1:])
    finally:
        os._exit(code)  # ends without waiting for threads, because a driver may block them for ever
