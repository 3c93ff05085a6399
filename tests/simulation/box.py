"""The simulated box: owners with real runtimes, and keepers with the real core, on sockets that cut off and delay."""

import _thread
import contextlib
import copy
import itertools
import math
import operator
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msgspec.structs import asdict, replace

from gpu_runtime import Runtime as Runtime
from gpu_runtime import threads
from gpu_runtime.backends import fake
from gpu_runtime.backends.fake import FakeModel
from gpu_runtime.devices import allocators as allocators
from gpu_runtime.devices.probe import Probe, open_probe
from gpu_runtime.devices.process_memory import Memory
from gpu_runtime.errors import UnknownModel
from gpu_runtime.facts import HOST, Book, Sample
from gpu_runtime.ledgers import base, notify
from gpu_runtime.ledgers.keeper import core, ledger
from gpu_runtime.ledgers.keeper.wire import MOST_BYTES, Reader, Torn, Writer
from gpu_runtime.ledgers.liveness import Sight, describe_self
from gpu_runtime.ledgers.pieces import Pieces, encode
from gpu_runtime.owner import acquire as acquire
from gpu_runtime.owner import lifetime, release, requests

from . import disk
from .disk import Stowing
from .machine import Lock, Machine, Thread

try:
    from . import redis
except ModuleNotFoundError:  # no day has a Redis then
    redis = None  # type: ignore[assignment]

FIRST_PID = 1 << 23  # no process of the real machine has such a pid
NOTICED_SECONDS = 0.01  # from the death of a process until the keeper knows of it
REFUSED = "the keeper speaks version"
NO_THREAD = "can't start new thread"  # as Python says it
begin, pid_here = _thread.start_new_thread, os.getpid


def _start_thread(work: Callable[..., Any], *arguments: Any) -> int:
    """Starts a thread, unless the process has no memory for one."""
    if _running().starts_no_thread:
        raise RuntimeError(NO_THREAD)
    return begin(work, *arguments)


@contextlib.contextmanager
def _interrupt_afterwards() -> Iterator[None]:
    """As the block of `threads`, for a simulated thread: the stop button waits for its end."""
    thread = Machine.active and Machine.active.current
    if thread is None:
        yield
        return
    thread.held_back = True
    try:
        yield
    finally:
        thread.held_back = False


def _running() -> Any:
    """The process that runs now; the one without a name outside of the day."""
    current = Machine.active.current if Machine.active else None
    return NOBODY if current is None else current.process


class Process:
    """A process of the box: a notebook's kernel, or a keeper."""

    def __init__(self, name: str, pid: int, user: str = "ann") -> None:
        self.name, self.pid, self.user = name, pid, user
        self.killed = False
        self.wires: list[Wire] = []  # its ends of sockets
        self.starts_no_thread = False  # as when the system has no memory for one

    def __repr__(self) -> str:
        return self.name


NOBODY = Process("", pid_here())
_thread.start_new_thread = _start_thread
threads._interrupt_afterwards = _interrupt_afterwards
os.getpid = lambda: _running().pid


class Wire:
    """A client's end of a socket to a keeper. It has the methods of `keeper.ledger._Wire`.

    A forked child has it too. The keeper sees its end once all processes have closed it.
    """

    keeper_pid, keeper_uid = 0, os.geteuid()

    def __init__(self, directory: object) -> None:
        box = Box.active
        if box.keeper is None or box.keeper.process.killed:
            raise ConnectionRefusedError("no keeper listens")
        assert box.machine.current is not None
        self.process = box.machine.current.process
        self.process.wires.append(self)
        self.opened_by = self.process
        self.ends = [self]  # of the processes that have this socket
        self.socket = self
        self.keeper = box.keeper
        self.number = self.keeper.accept(self)
        self.inbox: deque[tuple[float, bytes]] = deque()
        self.descriptors: list[int] = []
        self.receiver: Thread | None = None  # which waits for a message
        self._open = True

    def inherited(self, process: Process) -> "Wire":
        """The same socket in a child that is forked now."""
        twin = copy.copy(self)
        twin.socket, twin.process = twin, process
        process.wires.append(twin)
        if self._open:
            self.ends.append(twin)
        return twin

    def send(self, message: core.Request) -> None:
        machine = Box.active.machine
        machine.switch()
        assert self.process is self.opened_by, f"{self.process} sends on its parent's socket"
        if not self.is_open():
            raise ledger._Lost("it ended")
        self.keeper.deliver(self, encode(message))

    def receive(self, number: int) -> Any:
        machine = Box.active.machine
        deadline = machine.now + ledger.HANGING_SECONDS
        while True:
            while self.readable():
                _, content = self.inbox.popleft()
                reply = core.decode_reply(content)
                if reply.number == number:
                    return reply
            if not self.is_open():
                raise ledger._Lost("it ended")
            if machine.now >= deadline:
                raise ledger._Lost("no answer")
            times = [deadline, *(at for at, _ in list(self.inbox)[:1])]
            self.receiver = machine.current
            machine.pause(lambda: self.readable() or not self.is_open(), min(times) - machine.now)
            self.receiver = None

    def readable(self) -> bool:
        return bool(self.inbox) and self.inbox[0][0] <= Box.active.machine.now

    def drain(self) -> bool:
        """Reads all rings that are here. Returns whether there was one."""
        found = self.readable()
        while self.readable():
            self.inbox.popleft()
        return found

    def is_open(self) -> bool:
        return self._open and self.number in self.keeper.wires and not self.keeper.process.killed

    def close_descriptors(self) -> None:
        self.descriptors = []

    def close(self) -> None:
        if self._open:
            self._open = False
            self.ends.remove(self)
            self.process.wires.remove(self)
            if not self.ends:
                self.keeper.leave(self)

    # the part of a socket that the ledger uses

    def setblocking(self, flag: bool) -> None: ...

    def shutdown(self, how: int) -> None:
        assert self.process is self.opened_by, f"{self.process} shuts its parent's socket down"
        self.keeper.leave(self)

    def fileno(self) -> int:
        return 0 if self.is_open() else -1


class Waiter(notify._Waiter):
    """A waiting thread. The kernel of the system sees no process of the box, so none is watched."""

    woken = False

    def wake(self) -> None:
        self.woken = True

    def watch(self, owners: object) -> None: ...


class KeeperBell(ledger._KeeperBell):
    """The bell of an owner, which waits on the simulated wire."""

    def _sleep(self, waiter: Any, seconds: float) -> bool:
        wire: Any = self._wire
        if wire is None or not wire.is_open():
            seconds = min(seconds, ledger.BELL_SECONDS)
            if self._open_again():
                self.ring()
                return True
            wire = None
        machine = Box.active.machine
        machine.pause(
            lambda: waiter.woken or (wire and (wire.inbox or not wire.is_open())), seconds
        )
        if wire is not None and wire.inbox and not wire.readable():
            machine.pause(wire.readable, wire.inbox[0][0] - machine.now)
        woken, waiter.woken = waiter.woken, False
        if wire is not None and (not wire.is_open() or wire.drain()):
            if not wire.is_open():
                wire.close()
            self._wake_all_but(waiter)
            return True
        return woken


class KeeperLedger(ledger.KeeperLedger):
    """The real client of a keeper, on the simulated wire and without a directory."""

    def __init__(self, url: str, *, notebook: str = "", user: str = "") -> None:
        base.Ledger.__init__(self)
        box = Box.active
        assert box.machine.current is not None
        process = box.machine.current.process
        self.url, self.directory, self.patience_seconds = url, None, ledger.PATIENCE_SECONDS  # type: ignore[assignment]
        me = describe_self(notebook=process.name, user=process.user)
        self.owner = replace(me, started=1, serial=0, namespaces="the box")
        self._pid = os.getpid()
        self._number, self._pieces, self._kept = 0, Pieces(), {}
        self._puts, self._last_put = itertools.count(1), 0
        self._declared: frozenset[str] = frozenset()
        self._closed, self._secret, self._registered = False, encode(process.pid), False
        self._calling, self._reading = ledger.threading.RLock(), Lock()  # type: ignore[assignment]
        self._asking = False
        self._wire = self._reader = None
        self._place = os.open("/", os.O_PATH | os.O_CLOEXEC)
        with self._calling:
            self._connected()
        self._bell = KeeperBell(self._bell_wire)

    def _require_trusted(self, wire: Any) -> None: ...

    def _sight(self, owner: Any) -> Sight:
        box, found = Box.active, super()._sight(owner)
        is_stopped = box.by_id(owner.id) in box.stopped
        return Sight.STOPPED if found is Sight.ALIVE and is_stopped else found

    def _start(self) -> str:
        Box.active.start_keeper(sys.modules[__name__])
        return ""

    def _end_hanging(self, wire: Any) -> None:
        if wire.is_open():
            Box.active.note(f"{wire.process} ends the keeper, which hangs")
            Box.active.hung = str(wire.process)
            Box.active.kill_keeper()

    def _unavailable(self, why: str) -> Any:
        return ledger.LedgerUnavailable(f"the keeper cannot be reached: {why}", path="", why=why)


class KeeperServer:
    """What `keeper.server.Server` does, with messages in place of sockets."""

    def __init__(self, box: "Box", process: Process) -> None:
        self.box, self.process, self.core = box, process, core.Keeper()
        self.protocol = core.PROTOCOL
        self.thread: Thread | None = None
        self.wires: dict[int, Wire] = {}
        self.inbox: dict[int, deque[tuple[float, bytes]]] = {}
        self.owners: dict[str, Process] = {}
        self._greeted: dict[int, str] = {}
        self._next, self._published, self.written = 0, 0, box.sides[0].Pieces()
        page = box.newest_page()
        self.memory = Writer("simulated")
        if page is not None:
            self.core.known.follow(page)
            state = self.core.known.state
            living = {id: user for id, user in state.living.items() if not box.is_dead(id)}
            dead = {*state.dead, *(state.living.keys() - living.keys())}
            fresh = core.Keeper()
            fresh.adopt(page, living, dead)
            self.core = fresh
            self.owners = {id: box.by_id(id) for id in living}
        self.publish()

    def accept(self, wire: Wire) -> int:
        self._next += 1
        self.wires[self._next], self.inbox[self._next] = wire, deque()
        return self._next

    def leave(self, wire: Wire) -> None:
        if self.wires.pop(wire.number, None) is not None and not self.process.killed:
            self.inbox.pop(wire.number)
            self._send(self.core.gone(wire.number, self.box.machine.now))

    def deliver(self, wire: Wire, content: bytes) -> None:
        queue = self.inbox[wire.number]
        due = self.box.machine.now + self.box.delay()
        queue.append((max([due, *(at for at, _ in list(queue)[-1:])]), content))
        self.wake()

    # the keeper's thread

    def serve(self) -> None:
        machine = self.box.machine
        while True:
            now = machine.now
            for at, id in self.box.deaths(self):
                if now >= at:
                    self.owners.pop(id)
                    self._send(self.core.died([id]))
            ready = [number for number, queue in self.inbox.items() if queue and queue[0][0] <= now]
            machine.random.shuffle(ready)
            for number in ready:
                if number in self.inbox:
                    self._receive(number, core.decode_request(self.inbox[number].popleft()[1]))
            self._send(self.core.tick(now))
            self.publish()
            machine.pause(None, self.due() - now)

    def due(self) -> float:
        """When the keeper has something to do."""
        times = [queue[0][0] for queue in self.inbox.values() if queue]
        times += [at for at, _ in self.box.deaths(self)]
        if self.core.deadline is not None:
            times.append(self.core.deadline)
        return min(times, default=self.box.machine.now + 3600)

    def wake(self) -> None:
        """Lets the thread look again when it has something to do, which may be earlier than it was."""
        if self.thread is not None and self.thread.deadline is not None:
            self.thread.deadline = min(self.thread.deadline, self.due())

    def _receive(self, number: int, message: core.Request) -> None:
        now, wire = self.box.machine.now, self.wires[number]
        self.box.met[type(message).__name__] += 1
        if not isinstance(message, core.Hello):
            self._send(self.core.receive(number, message, now))
            if isinstance(message, core.Leave):
                self.owners.pop(self._greeted.get(number, ""), None)
            return
        if message.protocol != self.protocol:
            why = f"{REFUSED} {self.protocol} of the protocol"
            self._post(wire, core.Refused(message.number, why))
            return
        seen = replace(message.owner, pid=wire.opened_by.pid, started=1)
        owner = self.core.identity(message, seen)
        self._greeted[number] = owner.id
        welcome = self.core.hello(number, replace(message, owner=owner), os.geteuid(), now)
        assert owner.pid == wire.opened_by.pid, f"{wire.opened_by} is the owner {owner.id}"
        self.owners[owner.id] = wire.opened_by
        self.publish()
        wire.descriptors = [self.memory.descriptor]
        self._post(wire, welcome)

    def publish(self) -> None:
        if self.core.known.revision != self._published:
            self.memory.write(self.core.known.revision, self.core.pieces)
            self._published, self.written = self.core.known.revision, self._as_seen()

    def _as_seen(self) -> Any:
        """The book, as the laws see it."""
        kind = self.box.sides[0]
        if isinstance(self.core.known, kind.Pieces):
            return copy.copy(self.core.known)
        pieces, reader = copy.copy(self.written), kind.Reader(self.memory.descriptor)
        pieces.follow(reader.page())
        reader.close()
        return pieces

    def _send(self, answers: core.Answers) -> None:
        if answers:
            self.publish()
        for number, message in answers:
            if number in self.wires:
                self.box.met[type(message).__name__] += 1
                self._post(self.wires[number], message)

    def _post(self, wire: Wire, message: core.Reply) -> None:
        due = self.box.machine.now + self.box.delay()
        due = max([due, *(at for at, _ in list(wire.inbox)[-1:])])
        wire.inbox.append((due, encode(message)))
        if wire.receiver is not None and wire.receiver.deadline is not None:
            wire.receiver.deadline = min(wire.receiver.deadline, due)


class Weightless(Stowing):
    """Fake models, of which some have weights that exist nowhere else."""

    def droppable(self, model: FakeModel) -> bool:
        return model.hook not in Box.active.precious

    def drop(self, model: FakeModel) -> None:
        kernel, name = Box.active.precious.get(model.hook, (None, ""))
        if kernel is not None and not kernel.closed and model.place[0]:
            resident = kernel.rt._session.residents.get(name)
            if resident is not None and not resident.is_forgotten and resident.handle is not None:
                raise AssertionError(f"the only copy of {name} was dropped")
        super().drop(model)


class CardMemory(Memory):
    """The bytes of a process on a card that others fill too."""

    @property
    def squeezed_bytes(self) -> int:  # type: ignore[override]
        box = Box.active
        held = [size for memory, size in box.held_on(self.device) if memory is not self]
        lost = box.limits[self.device] if self.device in box.driver.lost else 0
        return sum(held) + max(lost, box.driver.foreign[self.device])

    @squeezed_bytes.setter
    def squeezed_bytes(self, size: int) -> None: ...

    def _refuse(self, *figures: Any) -> None:
        Box.active.driver.refused = self.device
        super()._refuse(*figures)


class Cards(Probe):
    """Cards that are measured."""

    def __init__(self, devices: str) -> None:
        super().__init__(open_probe(devices).devices)
        self.devices = tuple(
            one if one.is_host else replace(one, simulated=False) for one in self.devices
        )
        self.simulated = False

    def _memory(self, device: Any) -> Memory:
        kind = Memory if device.is_host else CardMemory
        return kind(device.id, device.total_bytes)

    def samples(self, now: float, fresh: bool = False) -> dict[str, Sample]:
        found = Box.active.driver.samples(fresh)
        return {card: Sample(**asdict(one)) for card, one in found.items()}

    def bound(self, device: str, fraction: float) -> bool:
        return True


class Driver:
    """What the driver of all cards tells: once a second, and late of memory that was freed."""

    def __init__(self, box: "Box", late: float) -> None:
        self.box, self.late = box, late
        self.foreign = {card: 0 for card in box.limits if card != HOST}  # of other programs
        self.grew = dict.fromkeys(self.foreign, -math.inf)  # when such a program took more
        self.refused = ""  # the card on which memory was refused last
        self.lost: set[str] = set()  # cards that do not answer, and give no memory
        self.lie = dict.fromkeys(self.foreign, 0)  # bytes that are told to be free beyond the truth
        self._used: deque[tuple[float, dict[str, int]]] = deque()
        self._dead: list[tuple[float, int]] = []
        self._samples: dict[str, Sample] = {}

    def free(self, card: str) -> int:
        """The bytes of the card that nobody holds now."""
        held = sum(size for _, size in self.box.held_on(card))
        return self.box.limits[card] - held - self.foreign[card]

    def take(self, card: str, size: int) -> None:
        """From now on a program outside the ledger holds `size` bytes of the card, or what is free."""
        self.foreign[card] = 0
        self.foreign[card] = min(size, self.free(card))
        self.box.note(
            f"a program outside the ledger holds {self.foreign[card] >> 30} GiB of {card}"
        )
        if size:
            self.grew[card] = self.box.machine.now
        self.follow()

    def trouble(self, card: str) -> str:
        """Something happens to a card. Returns what."""
        random = self.box.machine.random
        what = random.choice(("lost", "measured wrongly", "well", "well"))
        self.lost.discard(card)
        self.lie[card] = 0
        if what == "lost":
            self.lost.add(card)
        elif what == "measured wrongly":
            self.lie[card] = random.choice((-2, -1, 1, 2)) << 30
        self.grew[card] = self.box.machine.now  # what was granted may meet too little memory
        return f"{card} is {what}"

    @property
    def is_well(self) -> bool:
        return not self.lost and not any(self.lie.values())

    def follow(self) -> None:
        """Notes what is in use now. Called whenever it changes."""
        if not self.late:
            self._used.clear()
        used = {card: self.box.limits[card] - self.free(card) for card in self.foreign}
        self._used.append((self.box.machine.now, used))

    def died(self, pid: int) -> None:
        self._dead.append((self.box.machine.now, pid))

    def samples(self, fresh: bool = False) -> dict[str, Sample]:
        """The newest sample of each card; a new one once a second, or if it is to be `fresh`."""
        now = self.box.machine.now
        if fresh or not self._samples or now > min(map(_taken_at, self._samples.values())) + 1.0:
            self.follow()
            while len(self._used) > 1 and self._used[1][0] <= now - self.late:
                self._used.popleft()
            dead = {pid: 1 for at, pid in self._dead if at > now - self.late}
            for card in self.foreign:
                used = max(figures[card] for _, figures in self._used)
                pids = {kernel.process.pid: 1 for kernel in self.box.kernels if kernel.rt}
                free = self.box.limits[card] - used + self.lie[card]
                free = min(self.box.limits[card], max(0, free))
                self._samples[card] = Sample(card, now, free, pids | dead)
        return {card: one for card, one in self._samples.items() if card not in self.lost}


def _taken_at(sample: Sample) -> float:
    return sample.taken_at


class Kernel:
    """A notebook's kernel: a process with a runtime."""

    def __init__(self, process: Process, side: Any) -> None:
        """`side` is the module with the ends of the version that this kernel has."""
        self.process, self.side = process, side
        self.rt: Any = None
        self.closed = False
        self.models: list[str] = []
        self._held: dict[str, int] = {}
        self._seen: list[Any] = []  # of its memories

    def held(self) -> dict[str, int]:
        """The bytes that this process holds on each device; the same object until one of its memories changes."""
        memories = self.rt.probe._memories if self.rt is not None else {}
        seen = [part for one in memories.values() for part in (one._state, len(one._freed))]
        if len(seen) != len(self._seen) or not all(map(operator.is_, seen, self._seen)):
            self._seen = seen
            self._held = {
                device: self.side.allocators.release(
                    memory._state, frozenset([note.key for note in memory._freed])
                ).requested
                for device, memory in memories.items()
            }
        return self._held

    @property
    def me(self) -> str:
        """The owner's id in the book; empty until the runtime is open."""
        return self.rt._opened.me if self.rt is not None else ""

    def owns(self, id: str) -> bool:
        """Whether the lease `id` is of this process."""
        return id.startswith(f"{self.me}/")


class Box:
    """All processes, the devices that they share, and what has happened."""

    active: "Box"

    def __init__(
        self, machine: Machine, devices: str, trace: Callable[[str], None], later: Any
    ) -> None:
        """On one day in five the cards are measured, and on as many the user ann has a cap.

        On one day in six, owners and keepers have two versions: this one, and the one of the module `later`.
        On one in twelve, the ledger is a Redis.
        """
        self.machine, self.devices, self._trace = machine, devices, trace
        self.keeper: KeeperServer | None = None
        self.kernels: list[Kernel] = []
        self.met: Counter[str] = Counter()  # how often each message, act, fault and error was met
        self._memories: list[Writer] = []
        self._left = Pieces()  # of the newest page, which the last keeper has left
        self._pids = FIRST_PID
        self._ids: dict[int, Process] = {}
        self.stopped: set[Process] = set()
        self.troubled_until = 0.0  # connections that were cut are opened again
        self._died_at: dict[int, float] = {}
        self.precious: dict[Any, tuple[Kernel, str]] = {}  # hooks of models without a source
        self.numbers = itertools.count(1)  # of the models
        self.importance: dict[str, int] = {}  # of each model; less is more
        self.kept: set[str] = set()  # ids of the leases that a user has pinned
        self.slow = 0.0  # how often a message is late
        self.no_keeper_until = 0.0  # as when the system has no memory for a process
        self.hung = ""  # a process that has just ended a keeper that did not answer
        self.wall = 1.7e9  # the wall clock is so far ahead of the other
        self.sides = [sys.modules[__name__], *(later,) * (machine.random.random() < 1 / 6)]
        for side in self.sides:
            side.use(self, disk.Disk.active)
        is_redis = len(self.sides) == 1 and machine.random.random() < 0.1
        self.redis = redis.Server(self) if is_redis and redis is not None else None
        self.limits = {one.id: int(one.total_bytes) for one in open_probe(devices).devices}
        random = machine.random
        late = random.choice((0.0, 0.0, 0.5, 3.0))
        self.driver = Driver(self, late) if random.random() < 0.2 else None
        capped = random.random() < (0.5 if self.driver else 0.15)
        self.cap = random.choice((4, 6)) << 30 if capped else 0
        self._config = os.memfd_create("config.toml")
        if self.cap:
            enforce = random.choice(("true", "false"))
            cap = f'[users.ann]\nbytes_per_device = "{self.cap >> 30} GiB"\nenforce = {enforce}\n'
            os.write(self._config, cap.encode())

    def note(self, text: str) -> None:
        """Adds a line to the trace."""
        self._trace(f"{self.machine.now - 1000:9.3f}  {text}")

    @property
    def hindered(self) -> set[Process]:
        """The processes that are stopped, or can start no thread."""
        return self.stopped | {one for one in self._ids.values() if one.starts_no_thread}

    def process(self, name: str) -> Process:
        self._pids += 1
        made = self._ids[self._pids] = Process(name, self._pids)
        return made

    def delay(self) -> float:
        late = self.machine.random.random() < self.slow
        return self.machine.random.uniform(0, 0.5 if late else 0.0005)

    # -- keepers

    def start_keeper(self, side: Any) -> None:
        """Starts a keeper of a client's version; seldom, where there are two, one of another protocol."""
        if self.keeper is not None and not self.keeper.process.killed:
            return
        if self.machine.now < self.no_keeper_until:
            return
        process = self.process(f"keeper {len(self._memories) + 1}")
        self.keeper = server = side.KeeperServer(self, process)
        self._memories.append(server.memory)
        server.thread = self.machine.start(server.serve, (), process, "serve")
        self.note(f"{process} ({side.core.VERSION}) starts at {server.core.known.revision}")
        if len(self.sides) > 1 and self.machine.random.random() < 0.2:
            server.protocol += 1
            self.troubled_until = math.inf
            self.machine.start(self._replace, (), process, "replace")

    def _replace(self) -> None:
        """Ends a keeper of another protocol some time later. In its thread, which ends with it."""
        self.machine.pause(None, self.machine.random.expovariate(0.1))
        self.kill_keeper()
        self.machine.pause(None, None)

    def kill_keeper(self, torn: bool = False) -> None:
        """Kills the keeper; if `torn`, while it writes the next page."""
        if self.keeper is not None:
            self.troubled_until = self.machine.now + 2.0
            self.note(f"{self.keeper.process} is killed")
            self.machine.kill(self.keeper.process)
            if torn:
                half = (self.keeper.core.known.revision + 1) % 2 * MOST_BYTES
                self.keeper.memory._memory[half : half + 64] = self.machine.random.randbytes(64)
            self.keeper = None
            if page := self.newest_page():
                self._left.follow(page)

    def cut(self) -> None:
        """Cuts one connection, with all messages that are under way."""
        if self.keeper is not None and self.keeper.wires:
            self.troubled_until = self.machine.now + 2.0
            wire = self.machine.random.choice(self.answered() or [*self.keeper.wires.values()])
            self.note(f"a connection of {wire.opened_by} is cut")
            wire.inbox.clear()
            self.keeper.leave(wire)

    def answered(self) -> list[Wire]:
        """The connections on which the reply to a call is under way."""
        wires = self.keeper.wires.values() if self.keeper is not None else ()
        return [wire for wire in wires if wire.receiver is not None and wire.inbox]

    def newest_page(self) -> Any:
        found = []
        for memory in self._memories:
            reader = Reader(memory.descriptor)
            with contextlib.suppress(Torn):
                found.append(reader.page())
            reader.close()
        return max(found, key=lambda page: page.revision, default=None)

    # -- owners

    def by_id(self, id: str) -> Process:
        return self._ids[int(id.split(".")[0])]

    def is_dead(self, id: str) -> bool:
        return self.by_id(id).killed

    def deaths(self, server: KeeperServer) -> list[tuple[float, str]]:
        """When the keeper learns that owners of its have died, and their ids."""
        return [
            (self._died_at[process.pid] + NOTICED_SECONDS, id)
            for id, process in server.owners.items()
            if process.killed
        ]

    def kill(self, kernel: Kernel) -> None:
        self.note(f"{kernel.process} is killed")
        self.machine.kill(kernel.process)
        self._died_at[kernel.process.pid] = self.machine.now
        if self.driver:
            self.driver.follow()
            self.driver.died(kernel.process.pid)
        self.kernels.remove(kernel)
        for wire in [*kernel.process.wires]:
            wire.close()
        if self.redis is not None:
            self.redis.killed(kernel.process.pid)
        if self.keeper is not None:
            self.keeper.wake()

    def start_kernel(self, **settings: Any) -> Kernel:
        """A new kernel, whose runtime is opened in a thread of its own."""
        side = self.machine.random.choice(self.sides)
        kernel = Kernel(self.process(f"kernel {self._pids - FIRST_PID}"), side)
        if self.cap and self._pids % 2:
            kernel.process.user = "bob"  # who has no cap
        self.kernels.append(kernel)

        def work() -> None:
            opens = partial(
                side.Runtime,
                devices=self.devices, ledger=self.redis.url if self.redis else "keeper:///simulated", catalog="drill",
                probe=self._probe(side),
                gpu_config_file=f"/proc/self/fd/{self._config}",
                clock=lambda: self.machine.now, wall=lambda: self.wall + self.machine.now,
                gpu_memory_max_percent=1.0, cpu_memory_max_percent=1.0, **settings,
            )  # fmt: skip
            rt = self._again(opens)
            self._ready(kernel, rt)

        self.machine.start(work, (), kernel.process, "open")
        return kernel

    def fork(self, parent: Kernel) -> Kernel:
        """A child of a kernel, as Python's fork makes it: a copy of its runtime, with the same sockets.

        The parent's threads are anywhere meanwhile. Nothing that they held is the child's: not the bytes of a card, and
        the pages in RAM are the parent's too. The child first does what was registered for a fork.
        """
        process, side = self.process(f"kernel {self._pids - FIRST_PID}"), parent.side
        process.user = parent.process.user
        kernel = Kernel(process, side)
        self.kernels.append(kernel)
        rt = copy.copy(parent.rt)
        inherited = rt._opened = copy.copy(rt._opened)
        inherited.residents = {name: copy.copy(one) for name, one in inherited.residents.items()}
        inherited.blocks = copy.copy(inherited.blocks)
        client = inherited.ledger = copy.copy(inherited.ledger)
        bell = client._bell = copy.copy(client._bell)
        for one in (client, bell):
            one._wire = one._wire and one._wire.inherited(kernel.process)
        rt.probe = self._probe(side) or side.open_probe(self.devices)

        def work() -> None:
            client.close_in_child()
            rt._forked()
            for name in list(inherited.blocks):  # which its parent was in
                side.acquire._end_block(inherited, name)
            for forbidden in (client.read, client.give_sign, lambda: client.wait(0), client.close):
                with contextlib.suppress(ledger.LedgerUnavailable):
                    forbidden()
            client.ring([*self.book().sections])
            for name in parent.models:
                with contextlib.suppress(UnknownModel):
                    self._again(partial(rt.use, name, timeout=1))
                    raise AssertionError(f"{kernel.process} uses {name} of {parent.process}")
            self._ready(kernel, rt)

        self.machine.start(work, (), kernel.process, "begin")
        self.note(f"{parent.process} forks {kernel.process}")
        return kernel

    def fork_in_c(self, parent: Kernel) -> Process:
        """A child that a library forks: without the product's fork handlers, it has the sockets until it ends."""
        child = self.process(f"a child of {parent.process}")
        for wire in list(parent.process.wires):
            wire.inherited(child)
        self.note(f"{parent.process} forks a child in C")
        return child

    def end(self, child: Process) -> None:
        """Ends a process that has no threads."""
        for wire in list(child.wires):
            wire.close()

    def _probe(self, side: Any) -> Any:
        return side.Cards(self.devices) if self.driver else None

    def _again(self, opens: Callable[[], Any]) -> Any:
        """What `opens` returns, once no keeper of another protocol refuses it."""
        while True:
            try:
                return opens()
            except ledger.LedgerUnavailable as error:
                if REFUSED not in str(error) and self.redis is None:
                    raise
                self.note(f"{self.machine.current.process}: {error}")  # type: ignore[union-attr]
                self.machine.pause(None, 5.0)

    def _ready(self, kernel: Kernel, rt: Any) -> None:
        # Who looks seldom refreshes its request seldom, and is not stopped.
        session = self._again(lambda: rt._session)
        seldom = max(session.rules.refresh_seconds, 2 * requests.POLL_SECONDS)
        session.rules = replace(session.rules, refresh_seconds=seldom)
        kernel.rt = rt

    def physical(self, device: str) -> dict[Process, int]:
        """The bytes that each living process holds on the `device`."""
        return {one.process: one.held().get(device, 0) for one in self.kernels}

    def held_on(self, device: str) -> list[tuple[Any, int]]:
        """The memory of each living process on the `device`, and its bytes."""
        return [
            (kernel.rt.probe.place(device), kernel.held().get(device, 0))
            for kernel in self.kernels
            if kernel.rt is not None
        ]

    def book(self) -> Any:
        """The newest page that a process has."""
        if self.redis is not None:
            return self.redis.book.book if self.redis.book else Book()
        if self.keeper is not None:
            return self.keeper.written.book
        return self._left.book


def use(box: Box, there: disk.Disk) -> None:
    """Lets the product use the ends of this module."""
    Box.active = box
    disk.use(there)
    ledger._Wire, ledger._KeeperBell = Wire, KeeperBell  # type: ignore[misc,assignment]
    notify._Waiter = Waiter  # type: ignore[misc]
    lifetime.open_ledger = KeeperLedger
    threads._set_async_error = box.machine.raise_in
    fake.FakeBackend = Weightless  # type: ignore[misc]
    release.ram_left = lambda: math.inf  # of the real machine
