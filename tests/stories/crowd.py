"""A crowd of kernels shares one book. They are killed, stopped and restarted at random.

An auditor checks the book against bytes that are counted without it. Each process has a slot in a
shared file and writes there the bytes that it holds on each device. It adds bytes *before* it takes
them and subtracts them *after* it has freed them, so a slot never shows less than the process holds.
The warden starts, kills and stops the processes. They are forked from a process that has imported
everything, so that a restart takes milliseconds.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import mmap
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from gpu_runtime import Busy, Deadlock, DoesNotFit, Runtime, StillInUse, UnknownModel
from gpu_runtime.backends.fake import FakeBackend, FakeModel
from gpu_runtime.errors import GpuError
from gpu_runtime.facts import Shares
from gpu_runtime.ledgers import open_ledger
from gpu_runtime.units import GIB
from tests.clock import PATIENCE

DEVICES = "sim:2x24GiB,host:40GiB"
LIMITS = {"sim:0": 24 * GIB, "sim:1": 24 * GIB, "host": 40 * GIB}
IDS = tuple(LIMITS)
EXPECTED = (Busy, Deadlock, DoesNotFit, StillInUse, UnknownModel)


# -- the side channel
_FIELDS = 3 + len(IDS)  # version, pid, times served (in slot 0: looks), bytes on each device


class Slots:
    """A row of numbers for each process, in a mapped file. A 1 in slot 0, the warden's, stops all processes."""

    def __init__(self, path: Path, kernels: int) -> None:
        size = (kernels + 1) * _FIELDS * 8
        with open(path, "a+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        # the whole row is stored, or nothing
        self._cells = (ctypes.c_int64 * (size // 8)).from_buffer(self._map)

    def __getitem__(self, place: tuple[int, int]) -> int:
        return self._cells[place[0] * _FIELDS + place[1]]

    def __setitem__(self, place: tuple[int, int], value: int) -> None:
        self._cells[place[0] * _FIELDS + place[1]] = value

    @property
    def stopping(self) -> bool:
        return bool(self[0, 0])

    def stop(self) -> None:
        self[0, 0] = 1

    def clear(self, slot: int) -> None:
        """Sets the row of a process to 0, since its bytes are free. The process must be dead."""
        for field in (1, *range(3, _FIELDS)):
            self[slot, field] = 0
        self[slot, 0] += 2

    def look(self) -> Look:
        """All slots at one instant: two equal copies in a row, since each change of a slot has a new version."""
        before = self._map[:]
        while (after := self._map[:]) != before:
            before = after
        return Look(after)


class Look:
    """The content of all slots at one instant."""

    def __init__(self, raw: bytes) -> None:
        self._cells = memoryview(raw).cast("q")
        self.count = len(raw) // 8 // _FIELDS

    def version(self, slot: int) -> int:
        return self._cells[slot * _FIELDS]

    def pid(self, slot: int) -> int:
        return self._cells[slot * _FIELDS + 1]

    def held(self, slot: int) -> dict[str, int]:
        return {id: self._cells[slot * _FIELDS + 3 + n] for n, id in enumerate(IDS)}

    def too_much(self, alive: Callable[[int], bool] = bool) -> str:
        """A sentence about the device over its limit and the holders among `alive`. Empty if no device is."""
        held = {
            slot: self.held(slot)
            for slot in range(1, self.count)
            if self.pid(slot) and alive(self.pid(slot))
        }
        for id, limit in LIMITS.items():
            total = sum(one[id] for one in held.values())
            if total > limit:
                who = {self.pid(slot): one[id] / GIB for slot, one in held.items() if one[id]}
                return f"{total / GIB:.2f} of {limit / GIB:.0f} GiB are held on {id}: {who}"
        return ""


class Account:
    """The slot of one process, which the process updates. Each time after it has taken bytes, it checks all slots."""

    def __init__(self, slots: Slots, slot: int) -> None:
        self._slots, self._slot = slots, slot
        self._lock = threading.Lock()
        for field in range(3, _FIELDS):
            slots[slot, field] = 0
        slots[slot, 1] = os.getpid()

    def add(self, shares: Shares, sign: int = 1) -> None:
        with self._lock:
            self._slots[self._slot, 0] += 1
            for share in shares:
                self._slots[self._slot, 3 + IDS.index(share.device)] += sign * share.bytes
            self._slots[self._slot, 0] += 1
        if sign > 0 and (why := overcommit(self._slots)):
            tell(why)

    def served(self) -> None:
        self._slots[self._slot, 2] += 1

    def holds(self) -> int:
        return sum(self._slots[self._slot, field] for field in range(3, _FIELDS))


def tell(why: str) -> None:
    """Writes a fault into the log of this process, which the warden reads."""
    print(f"WRONG: {why}", file=sys.stderr, flush=True)


def overcommit(slots: Slots) -> str:
    """A sentence about a device over its limit now, or "". The processes that are dying are left out."""
    look = slots.look()
    return look.too_much() and look.too_much(is_alive)


def is_alive(pid: int) -> bool:
    """Whether the process lives. One that ends is marked so (PF_EXITING) before its socket is closed."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return words[0] not in "ZX" and not int(words[6]) & 4


class AuditedBackend(FakeBackend):
    """Fake models that update the account before they take bytes and after they have freed them."""

    def __init__(self, account: Account, *args: Any) -> None:
        super().__init__(*args)
        self._account = account

    def _hold(self, model: FakeModel, shares: Shares, *rest: Any) -> None:
        old = model.place[0]
        self._account.add(shares)
        try:
            super()._hold(model, shares, *rest)
        except BaseException:
            self._account.add(shares, -1)
            raise
        self._account.add(old, -1)

    def drop(self, model: FakeModel) -> None:
        old = model.place[0]
        super().drop(model)
        self._account.add(old, -1)


# -- a kernel
class Kernel:
    """A runtime with a few fake models, which acts at random. The models of all kernels together do not fit."""

    def __init__(
        self, url: str, slots: Slots, slot: int, seed: int, forgives: tuple[type[Exception], ...]
    ) -> None:
        self.forgives = forgives
        self.dice = random.Random(seed)
        self.account = Account(slots, slot)
        self.rt = Runtime(
            devices=DEVICES,
            ledger=url,
            gpu_memory_max_percent=1.0,
            cpu_memory_max_percent=1.0,
            eviction_grace_seconds=self.dice.choice([0, 0, 0.1]),
            pressure_check_interval_seconds=1,
        )
        self.rt._session.backends["fake"] = AuditedBackend(self.account, self.rt.probe)
        self.names = [f"{name}{slot}" for name in "abc"]
        for name in self.names:
            self.rt.register(
                name,
                self.on_the_way,
                backend="fake",
                size=f"{self.dice.randint(2, 11)}GiB",
                importance=self.dice.choice(["normal", "normal", "normal", "high", "batch"]),
            )

    def on_the_way(self, verb: str) -> None:
        """The hook of the fake models while bytes are moved: it waits, and sometimes raises an error."""
        time.sleep(self.dice.choice([0, 0, 0.001, 0.01]))
        if self.dice.random() < 0.03:
            raise RuntimeError("it was told to fail")

    def act(self) -> None:
        dice, rt = self.dice, self.rt
        deeds: dict[Callable[[], Any], int] = {
            self.use: 50,
            self.use_two: 10,
            self.block: 12,
            self.evict: 8,
            self.ask_another: 6,
            self.keep: 4,
            rt.status: 4,
            lambda: rt.preload(dice.choice(self.names), timeout=1): 6,
        }
        try:
            dice.choices(list(deeds), list(deeds.values()))[0]()
        except (*EXPECTED, *self.forgives):
            pass
        except (GpuError, RuntimeError) as error:  # of its own, or of the process that it asked
            known = ("told to fail", "could not be moved", "is gone", "does not hold")
            if not any(words in str(error) for words in known):
                raise

    def timeout(self) -> float:
        return self.dice.choice([0.1, 1.0, 3.0])

    def stay_a_while(self) -> None:
        time.sleep(self.dice.choice([0, 0.002, 0.01, 0.1]))

    def use(self) -> None:
        with self.rt.use(self.dice.choice(self.names), timeout=self.timeout()):
            self.account.served()
            self.stay_a_while()

    def use_two(self) -> None:
        one, two = self.dice.sample(self.names, 2)
        with self.rt.use(one, timeout=self.timeout()), self.rt.use(two, timeout=self.timeout()):
            self.account.served()
            self.stay_a_while()

    def block(self) -> None:
        size = f"{self.dice.randint(1, 6)}GiB"
        with self.rt.lease(size, purpose="work", timeout=self.timeout()) as block:
            self.account.add(block.lease.shares)
            try:
                self.account.served()
                self.stay_a_while()
            finally:
                self.account.add(block.lease.shares, -1)

    def evict(self) -> None:
        self.rt.evict(self.dice.choice(self.names))

    def ask_another(self) -> None:
        book = self.rt._session.ledger.read()
        others = [lease for lease in book.leases() if lease.owner != self.rt._session.me]
        if others:
            lease = self.dice.choice(others)
            self.rt.evict(f"{lease.name}@{lease.owner.partition('.')[0]}", timeout=0.5)

    def keep(self) -> None:
        name = self.dice.choice(self.names)
        self.rt.pin(name)
        self.stay_a_while()
        self.rt.unpin(name)


def die_at(line: int) -> None:
    """Kills this process at the `line`-th line that its threads execute in the ledgers' code."""
    lines = itertools.count(1)

    def enter(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        return step if "gpu_runtime/ledgers" in frame.f_code.co_filename else None

    def step(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        if event == "line" and next(lines) == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return step

    threading.settrace(enter)
    sys.settrace(enter)


def be_a_kernel(
    url: str, slots: Slots, slot: int, seed: int, forgives: tuple[type[Exception], ...], fuse: int
) -> None:
    """Runs a kernel until the crowd stops. With a `fuse` N it kills itself at the N-th line of the ledgers."""
    if fuse:
        die_at(fuse)
    kernel = Kernel(url, slots, slot, seed, forgives)
    while not slots.stopping:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        kernel.act()
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    kernel.rt.close()
    assert not kernel.account.holds(), f"{kernel.account.holds()} bytes are held still"


# -- the auditor
def be_the_auditor(url: str, slots: Slots) -> None:
    """Checks without pause that no device is over its limit, and that the book has all living bytes."""
    ledger = open_ledger(url)
    while not slots.stopping:
        for why in filter(None, (overcommit(slots), *lost(slots, ledger.read))):
            tell(why)
        slots[0, 2] += 1
        time.sleep(0.002)
    ledger.close()


def lost(slots: Slots, read: Callable[[], Any]) -> Iterator[str]:
    """Sentences about living processes' bytes that the book lacks, if the slot did not change meanwhile."""
    before, book, after = slots.look(), read(), slots.look()
    for slot in range(1, after.count):
        pid = after.pid(slot)
        version = after.version(slot)
        if not pid or pid != before.pid(slot) or version % 2 or before.version(slot) != version:
            continue
        claimed: Counter[str] = Counter()
        for section in book.sections.values():
            if section.owner.pid == pid:
                for lease in section.leases:
                    claimed.update({share.device: share.bytes for share in lease.claims()})
        held = after.held(slot).items()
        less = {id: (size / GIB, claimed[id] / GIB) for id, size in held if size > claimed[id]}
        if less and is_alive(pid):
            yield f"pid {pid} holds more than the book says (held, claimed): {less}"


# -- the warden
class Warden:
    """Starts the crowd, kills and stops processes at random, and checks that nothing is left at the end."""

    forgives: tuple[type[Exception], ...] = ()  # further errors that a kernel may get
    # The share of kernels that kill themselves at a line of the ledgers' code, and the largest
    # number of that line. One transaction has some 300 lines; the opening of a runtime has some 3,000.
    with_fuse = 0.0
    longest_fuse = 8_000

    def __init__(self, url: str, directory: Path, kernels: int, seed: int, calm: float) -> None:
        self.url, self.directory, self.kernels, self.calm = url, directory, kernels, calm
        self.dice = random.Random(seed)
        self.slots = Slots(directory / "slots", kernels)
        self.running: dict[int, int] = {}  # slot -> pid
        self.stopped: dict[int, float] = {}  # slot -> time at which the process is continued
        self.wrong: list[str] = []
        self.heard: dict[Path, int] = {}
        self.kills = self.kills_in_the_ledger = self.stops = 0
        self.fused: set[int] = set()  # the pids of those that will die by themselves

    def run(
        self, seconds: float, enough: Callable[[Any], object], most_seconds: float = PATIENCE
    ) -> None:
        """Disturbs the crowd for `seconds` and until the counts are `enough`, `most_seconds` more at most."""
        auditor = self.fork("auditor", lambda: be_the_auditor(self.url, self.slots))
        for slot in range(1, self.kernels + 1):
            self.start(slot)
        end = time.monotonic() + seconds
        while not self.wrong:
            late = time.monotonic() - end
            if late >= 0 and (enough(self) or late > most_seconds):
                break
            time.sleep(self.dice.uniform(0, 2 * self.calm))
            self.disturb()
            self.go_on()
            self.look_for_crashes()
        self.go_on(everybody=True)
        self.slots.stop()
        self.join([*self.running.values(), auditor])
        self.hear()
        self.look_for_leftovers()

    @property
    def served(self) -> int:
        return sum(self.slots[slot, 2] for slot in range(1, self.kernels + 1))

    @property
    def looks(self) -> int:
        return self.slots[0, 2]

    def __str__(self) -> str:
        return (
            f"{self.kills} kills ({self.kills_in_the_ledger} in the ledger's code), {self.stops} stops, "
            f"{self.served} blocks served, {self.looks} looks, {len(self.wrong)} wrong"
        )

    def fork(self, name: str, act: Callable[[], None]) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        status = 3
        try:
            with open(self.directory / f"{name}.{os.getpid()}.log", "ab", 0) as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def start(self, slot: int) -> None:
        seed = self.dice.getrandbits(32)
        burns = self.dice.random() < self.with_fuse
        fuse = self.dice.randint(1, self.longest_fuse) if burns else 0
        given = self.url, self.slots, slot, seed, self.forgives, fuse
        self.running[slot] = self.fork(f"kernel{slot}", lambda: be_a_kernel(*given))
        if fuse:
            self.fused.add(self.running[slot])

    def disturb(self) -> None:
        slot = self.dice.choice(list(self.running))
        if self.dice.random() < 0.75 or slot in self.stopped:
            self.kill(slot)
            self.start(slot)
        else:
            os.kill(self.running[slot], signal.SIGSTOP)
            self.stopped[slot] = time.monotonic() + self.dice.choice([0.01, 0.1, 0.5, 2.5])
            self.stops += 1

    def kill(self, slot: int) -> None:
        pid = self.running.pop(slot)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):  # the process had ended by itself before the kill
            self.crashed(pid, status)
        self.bury(slot, pid)

    def bury(self, slot: int, pid: int) -> None:
        """Counts a killed process, reads its log a last time and removes the log."""
        self.hear()
        for log in self.directory.glob(f"*.{pid}.log"):
            log.unlink()
            self.heard.pop(log, None)
        self.fused.discard(pid)
        self.stopped.pop(slot, None)
        self.slots.clear(slot)
        self.kills += 1

    def go_on(self, everybody: bool = False) -> None:
        for slot, until in list(self.stopped.items()):
            if everybody or time.monotonic() > until:
                os.kill(self.running[slot], signal.SIGCONT)
                del self.stopped[slot]

    def look_for_crashes(self) -> None:
        for slot, pid in list(self.running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended and self.died_by_its_fuse(pid, status):
                self.kills_in_the_ledger += 1
                self.bury(slot, pid)
                self.start(slot)
            elif ended:
                self.crashed(pid, status)
        self.hear()

    def died_by_its_fuse(self, pid: int, status: int) -> bool:
        return pid in self.fused and os.waitstatus_to_exitcode(status) == -signal.SIGKILL

    def crashed(self, pid: int, status: int) -> None:
        text = "\n".join(path.read_text()[-6000:] for path in self.directory.glob(f"*.{pid}.log"))
        self.wrong.append(f"pid {pid} ended with {os.waitstatus_to_exitcode(status)}:\n{text}")
        self.running = {slot: other for slot, other in self.running.items() if other != pid}

    def hear(self) -> None:
        """Reads the new messages of the auditor and of the kernels."""
        for log in self.directory.glob("*.log"):
            text = log.read_text()
            new = text[self.heard.get(log, 0) :]
            self.heard[log] = len(text)
            self.wrong += [f"{log.name}: {line}" for line in new.splitlines() if "WRONG: " in line]

    def join(self, pids: Iterable[int]) -> None:
        """Waits for all these processes to end. A process that hangs prints where it hangs."""
        left = set(pids)
        deadline = time.monotonic() + 1.5 * PATIENCE
        while left:
            for pid in sorted(left):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    left.discard(pid)
                    if status and not self.died_by_its_fuse(pid, status):
                        self.crashed(pid, status)
            if left and time.monotonic() > deadline:
                self.wrong.append(f"pids {sorted(left)} did not end")
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                return
            time.sleep(0.01)

    def look_for_leftovers(self) -> None:
        """Checks that the book and its directory are empty after all processes have ended and were reaped."""
        with Runtime(devices=DEVICES, ledger=self.url, monitor=False) as rt:
            rt._session.reap()
            book = rt._session.ledger.read()
            # The process that looks registers itself while a rebuilt page is still closed.
            others = book.sections.keys() - {rt._session.me}
            if others or book.tickets or book.ghosts:
                self.wrong.append(f"left in the book: {msgspec.json.encode(book)!r}")
            directory = getattr(rt._session.ledger, "directory", None)
        open_ledger(self.url).close()  # a new owner removes files of dead owners
        if directory is None:
            return
        # A hidden file is a draft. A process that is killed while it makes one leaves it for a day; it is never read.
        if left := sorted(path.name for path in (directory / "owners").glob("[!.]*")):
            self.wrong.append(f"left beside the book: {left}")
        if books := [path.name for path in directory.glob("*damaged*")]:
            self.wrong.append(f"the book was damaged: {books}")

    def end(self) -> None:
        """Kills what still runs."""
        for pid in self.running.values():
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


def crowd(
    url: str,
    directory: Path,
    enough: Callable[[Any], object],
    *,
    kernels: int,
    seconds: float,
    seed: int,
    calm: float,
    kind: type[Warden] = Warden,
    most_seconds: float = PATIENCE,
) -> Warden:
    """The warden of a crowd that has ended. Fails if anything was wrong, or if its counts were not `enough`."""
    (directory / "slots").mkdir()
    warden = kind(url, directory / "slots", kernels, seed, calm)
    try:
        warden.run(seconds, enough, most_seconds)
    finally:
        warden.end()
    print(warden)
    assert not warden.wrong, "\n".join(warden.wrong)
    assert enough(warden), str(warden)
    return warden
