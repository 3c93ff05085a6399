"""A day on the simulated box: what users, operators and faults do, and what must hold after every step."""

import contextlib
import gc
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from gpu_runtime.errors import GpuError, LoadFailed, OutOfMemory
from gpu_runtime.facts import HOST, parse_importance
from gpu_runtime.ledgers.keeper import core
from gpu_runtime.owner import acquire, maintenance, requests
from gpu_runtime.scheduler import admission
from gpu_runtime.units import parse_bytes

from .box import NO_THREAD, Box, Kernel
from .disk import Disk, file_of
from .later import later_box, same_figures
from .laws import Laws
from .machine import Machine, Stuck

REST_SECONDS = 30.0  # in which threads without work end, and the last fact is published
MOST = admission.MOST_LEASES, admission.MOST_WAITING
QUIET_SECONDS = 400.0  # in which every request ends, once nobody asks for more
PACES = (2.0, 2.0, 20.0, 600.0)  # seconds
SIZES = ("1GiB", "2GiB", "3GiB", "5GiB", "8GiB")


class Call(str):
    """A call that has not returned, in words."""

    process: Any = None
    thread: Any = None


class Limits(NamedTuple):
    """What a day may have. A day with less is easier to read."""

    kernels: int = 6
    users: int = 3
    faults: tuple[str, ...] = ()
    acts: tuple[str, ...] = ()


class Day:
    """One seed: the box, its users and its faults."""

    def __init__(
        self, seed: int, seconds: float, trace: Callable[[str], None] | None, limits: Limits
    ) -> None:
        self.machine = Machine(seed)
        self.limits = limits
        self.lines: list[str] = []
        self.disk = Disk(self.machine, self.machine.random.choice((0, 0, 6, 24)))
        self.box = Box(self.machine, self._devices(), trace or self.lines.append, later_box)
        small = self.machine.random.random() < 0.1  # a page that is soon full
        admission.MOST_LEASES, admission.MOST_WAITING = (8, 12) if small else MOST
        self.random = self.machine.random
        self.crowded = (
            small  # models that others need stay in the page for ever, unless they are dropped
        )
        # A user waits so long between two requests. A day with few of them lasts for hours.
        self.pace = self.random.choice(PACES)
        if self.box.driver:  # who looks each second looks too often on a day of hours
            self.pace = PACES[0]
        self.seconds = seconds * self.pace / PACES[0]
        self.laws = Laws(self.box, slow=self.pace > PACES[0])
        same_figures(acquire, admission, maintenance, requests)
        # An important model that is idle stays for ever, and a request of less importance waits for ever.
        self.ranks = self.random.choice((("normal",), ("normal",), ("normal", "high", "low")))
        self.crowded |= len(self.ranks) > 1
        # How often a use begins in another. Those who hold much then wait for one another.
        self.nests = self.random.choice((0.15, 0.7))
        self.sizes = SIZES if self.nests < 0.5 else SIZES[1:4]
        self.precious = self.random.choice((0.2, 0.5) if self.disk.budget else (0.0, 0.0, 0.1))
        self.over = False  # nobody asks for anything more
        self.asking: dict[object, Call] = {}  # the calls that have not returned
        self.owner_seconds = 0.0
        self._done: list[str] = []

    def _devices(self) -> str:
        cards = self.machine.random.choice(("8GiB", "2x8GiB", "12GiB", "3x6GiB"))
        # With a disk, RAM is short.
        host = self.machine.random.choice((4, 4, 8) if self.disk.budget else (4, 16, 64))
        return f"sim:{cards},host:{host}GiB"

    def run(self) -> str:
        """Why the day failed; empty if all held."""
        gc.disable()
        with self.box.redis or contextlib.nullcontext():
            return self._run()

    def _run(self) -> str:
        box, machine = self.box, self.machine
        machine.after_step = self.laws.after_step
        box.slow = self.random.choice((0.0, 0.0, 0.02, 0.2))
        god = box.process("the operator")
        for _ in range(min(self.random.randint(1, 4), self.limits.kernels)):
            self._open_kernel()
        for card in self._cards() if box.driver and self.random.random() < 0.5 else ():
            box.driver.take(card, self.random.randint(0, 3) << 30)
        machine.start(self._faults, (), god, "faults")
        try:
            end = machine.now + self.seconds
            machine.run(lambda: machine.now >= end or bool(self._wrong()), self.seconds + 1)
            if wrong := self._wrong():
                return wrong
            self.over = True
            if box.keeper is not None and box.keeper.protocol != core.PROTOCOL:
                box.kill_keeper()
            if box.redis is not None:
                box.redis.slow = 0.0
            box.slow = box.no_keeper_until = 0.0
            self.disk.recover()
            for kernel in box.kernels:
                self._starts_no_thread(kernel, False)
            for card in box.driver.foreign if box.driver else ():
                box.driver.lost.clear()
                box.driver.lie[card] = 0
                box.driver.take(card, 0)
            for kernel in self._open():
                machine.start(self._tidy, (kernel,), kernel.process, "tidy")
            ended = machine.run(lambda: not self.asking or bool(self._wrong()), QUIET_SECONDS)
            if wrong := self._wrong():
                return wrong
            if not ended:
                return f"after {QUIET_SECONDS:g} s without new requests: {', '.join(self.asking.values())}"
            return self._rests(self.laws.at_rest) or self._usable() or self._closes()
        except Stuck as error:
            return f"{error}: {', '.join(self.asking.values())}"

    def _open(self) -> list[Kernel]:
        return [one for one in self.box.kernels if one.rt is not None and not one.closed]

    def _rests(self, left: Callable[[], str]) -> str:
        """What is `left` over after a time without requests."""
        tidy = [kernel for kernel in self._open() if left == self.laws.at_rest]
        for kernel in tidy:  # a user may have failed since the others were asked to end
            self.machine.start(self._tidy, (kernel,), kernel.process, "tidy")
        self._pauses(REST_SECONDS)
        self.machine.run(lambda: not left() or bool(self._wrong()), 2 * REST_SECONDS)
        return self._wrong() or (left() and f"at rest: {left()}")

    def _pauses(self, seconds: float) -> None:
        """Lets the box go on for so long, or until a law is broken."""
        end = self.machine.now + seconds
        self.machine.run(lambda: self.machine.now >= end or bool(self._wrong()), seconds + 1)

    def _closes(self) -> str:
        """At the end: nothing is left of the runtimes."""
        for kernel in self._open():
            self._close(kernel)
        return self._rests(self.laws.ended)

    def _tidy(self, kernel: Kernel) -> None:
        """Undoes the pins and drains whose users have failed or were killed, and forgets what can never leave."""
        only = [name for owner, name in self.box.precious.values() if owner is kernel]
        for name, resident in list(kernel.rt._session.residents.items()):
            file = file_of(resident.handle)
            if name in only and file is not None and file.content != name:
                self._gives_up(kernel, name)
        self.box.kept.clear()
        undo = [partial(kernel.rt.unpin, spec.name) for spec in kernel.rt.specs()]
        undo += [partial(kernel.rt.forget, name) for name in only]  # else they stay for ever
        undo += [partial(kernel.rt.drain, card, undo=True) for card in self._cards()]
        for act in undo:
            with contextlib.suppress(GpuError):  # it closes just now, or the model is not loaded
                act()
        if self.crowded:
            self._evict_all(kernel)
            while self.asking:
                self.machine.pause(None, 2.0)
                self._evict_all(kernel)

    def _gives_up(self, kernel: Kernel, name: str) -> None:
        """A model without a source does not return from a damaged file: the user hears of it, and forgets the model."""
        with contextlib.suppress(GpuError):
            with kernel.rt.use(name, timeout=30):
                raise AssertionError(f"{name} has returned from a damaged file")
        with contextlib.suppress(GpuError):
            kernel.rt.forget(name)

    def _evict_all(self, kernel: Kernel) -> None:
        for spec in kernel.rt.specs():
            with contextlib.suppress(GpuError):  # it is in use, or forgotten just now
                kernel.rt.evict(spec.name, drop=True)  # a small page has no entry for it in RAM

    def _usable(self) -> str:
        """At quiet: every living kernel can use each of its models that fits."""
        if self.crowded:  # a load that nobody waits for may have begun late, for want of a thread
            for kernel in self._open():
                self.machine.start(self._evict_all, (kernel,), kernel.process, "evict all")
            self._pauses(REST_SECONDS)
        for kernel in self._open():
            for name in [spec.name for spec in kernel.rt.specs()]:
                if self.box.cap:  # a use counts against it until its end is published
                    self._pauses(1.0)  # a message that it has begun may be under way
                    self.machine.run(lambda: not self._pinned(), REST_SECONDS)
                self.machine.start(self._use_once, (kernel, name), kernel.process, "use once")
                if not self.machine.run(
                    lambda: bool(self._done) or bool(self._wrong()), QUIET_SECONDS
                ):
                    return f"{kernel.process} cannot use {name} at quiet"
                outcome = self._done.pop() if self._done else ""
                if wrong := self._wrong() or outcome:
                    return wrong
        return ""

    def _pinned(self) -> bool:
        return any(lease.pins for lease in self.box.book().leases())

    def _use_once(self, kernel: Kernel, name: str) -> None:
        self._done = []
        try:
            with kernel.rt.use(name, timeout=300):
                pass
            if self.crowded:
                self._evict_all(kernel)
            self._done.append("")
        except GpuError as error:
            self._done.append(f"{kernel.process} cannot use {name} at quiet: {error}")

    def _wrong(self) -> str:
        for process, error in self.machine.failures:
            return f"{process}: {''.join(traceback.format_exception(error))}"
        return self.laws.problem

    # -- users

    def _open_kernel(self) -> Kernel:
        random = self.random
        kernel = self.box.start_kernel(
            eviction_grace_seconds=random.choice((0, 0, 2)),
            gpu_relief=random.choice(("auto", "always", "never")),
            gpu_policy=random.choice(("lru", "cost_aware", "keep_score")),
            **self.disk.settings,
        )
        self.box.note(f"{kernel.process} opens ({kernel.side.core.VERSION})")
        self._users(kernel)
        return kernel

    def _users(self, kernel: Kernel) -> None:
        for number in range(min(self.random.randint(1, 3), self.limits.users)):
            self.machine.start(self._user, (kernel, number), kernel.process, f"user {number}")

    def _user(self, kernel: Kernel, number: int) -> None:
        machine, random = self.machine, self.random
        machine.pause(lambda: kernel.rt is not None, None)
        while not self.over:
            machine.pause(lambda: self.over, random.expovariate(1 / self.pace))
            if self.over:
                return
            act = random.choice(RARE if random.random() < 0.02 else ACTIONS)
            if act.__name__ not in (self.limits.acts or act.__name__):
                continue
            token = object()
            self._asks(token, kernel, act.__name__)
            self.box.met[act.__name__] += 1
            try:
                act(self, kernel, token)
            except (GpuError, KeyboardInterrupt, MemoryError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and str(error) != NO_THREAD:
                    raise
                self.box.met[type(error).__name__] += 1
                first = (str(error).splitlines() or ["interrupted"])[0]
                self.box.note(f"{self.asking[token]}: {first}")
            finally:
                self.asking.pop(token, None)

    def _cards(self) -> list[str]:
        return [device for device in self.box.limits if device != "host"]

    def _asks(self, token: object, kernel: Kernel, what: str) -> None:
        call = self.asking[token] = Call(f"{kernel.process}: {what}")
        call.process, call.thread = kernel.process, self.machine.current

    def _a_model(self, kernel: Kernel) -> str:
        if kernel.models and self.random.random() < 0.7:
            return self.random.choice(kernel.models)
        name = f"m{next(self.box.numbers)}"
        random = self.random
        most = self.box.cap or 8 << 30  # what one card may hold for a user is enough for each model
        sizes = [size for size in self.sizes if parse_bytes(size) <= most]
        options: dict[str, Any] = {"size": random.choice(sizes)}
        if random.random() < 0.3:
            options["shadow"] = True
        if random.random() < 0.3:
            options["pieces"] = 8
        if random.random() < 0.1:
            options |= {"devices": random.choice(self._cards()), "size": random.choice(sizes[:4])}
        if random.random() < 0.2:
            options["keep_alive"] = random.choice((1, 20))
        slow = random.choice((0.0, 0.01, 0.5, 5.0))
        to_disk = self.disk.budget and "pieces" not in options and random.random() < 0.7
        if to_disk and random.random() < 0.5:
            slow = 30.0  # a load that is slower than the disk
        faulty = random.choice((0.0, 0.0, 0.0, 0.0, 0.05, 0.05, 0.2, 0.2, 1.0))
        fails: Callable[[], Exception] = random.choice(
            (
                partial(LoadFailed, "the disk is gone", name=name, source=""),
                partial(OutOfMemory, "no room"),
                MemoryError,
            )
        )

        def hook(what: str) -> None:
            self.machine.pause(None, random.uniform(0, slow))
            if not self.over and random.random() < faulty:
                raise fails()

        rank = random.choice(self.ranks)
        self.box.importance[name] = parse_importance(rank)
        kernel.rt.register(name, hook, backend="fake", importance=rank, **options)
        if random.random() < self.precious:  # its weights exist nowhere else
            self.box.precious[hook] = kernel, name
            to_disk = bool(self.disk.budget) and "pieces" not in options
        if to_disk:
            self.disk.hooks.add(hook)
        kernel.models.append(name)
        return name

    def _a_target(self, kernel: Kernel) -> str:
        """A model of this or of another kernel."""
        other = self.random.choice(self.box.kernels)
        if other is kernel or not other.models:
            return self._a_model(kernel)
        return f"{self.random.choice(other.models)}"

    def use(self, kernel: Kernel, token: object, depth: int = 0) -> None:
        name, random = self._a_model(kernel), self.random
        seconds = random.choice((None, 30.0) if depth else (None, 0, 0.5, 5.0, 30.0))
        wish = random.choice(self.ranks) if random.random() < 0.1 else None
        self._asks(token, kernel, f"use({name}, timeout={seconds})")
        with kernel.rt.use(name, timeout=seconds, importance=wish) as model:
            if file_of(model) is not None:
                raise AssertionError(f"{name} is used, and its bytes are on the disk")
            self.box.note(f"{kernel.process} uses {name}")
            long = random.random() < 0.03  # longer than others let a request that it blocks pass
            self.machine.pause(None, random.expovariate(0.02 if long else 1.0))
            if random.random() < self.nests and depth < 2:
                self.use(kernel, token, depth + 1)
            if any(share.device == HOST for share in model.place[0]):
                raise AssertionError(f"{name} is used, and lies at {model.place[0]}")

    def cancel(self, kernel: Kernel, token: object) -> None:
        name = self._a_target(kernel)
        self._asks(token, kernel, f"cancel({name})")
        kernel.rt.cancel(name, timeout=10)

    def block(self, kernel: Kernel, token: object) -> None:
        size = self.random.choice(SIZES)
        self._asks(token, kernel, f"lease({size})")
        with kernel.rt.lease(size, purpose="work", timeout=self.random.choice((None, 1.0, 20.0))):
            self.machine.pause(None, self.random.expovariate(1.0))

    def evict(self, kernel: Kernel, token: object) -> None:
        name = self._a_target(kernel)
        if self.random.random() < 0.1:
            name = "*"
        drop, wait = self.random.random() < 0.3, self.random.random() < 0.8
        self._asks(token, kernel, f"evict({name}, drop={drop}, wait={wait})")
        kernel.rt.evict(name, timeout=10, drop=drop, wait=wait)

    def preload(self, kernel: Kernel, token: object) -> None:
        name = self._a_target(kernel)
        self._asks(token, kernel, f"preload({name})")
        kernel.rt.preload(name, timeout=20, wait=self.random.random() < 0.8)

    def keep(self, kernel: Kernel, token: object) -> None:
        name = self._a_target(kernel)
        self._asks(token, kernel, f"pin({name})")
        kernel.rt.pin(name)
        owner = next((one.me for one in self.box.kernels if name in one.models), "")
        lease = f"{owner}/{name}"
        self.box.kept.add(lease)
        try:
            self.machine.pause(None, self.random.expovariate(0.3))
        finally:  # another user may unpin it too
            self.box.kept.discard(lease)
        kernel.rt.unpin(name)

    def forget(self, kernel: Kernel, token: object) -> None:
        if kernel.models:
            name = self.random.choice(kernel.models)
            self._asks(token, kernel, f"forget({name})")
            kernel.rt.forget(name)
            if name in kernel.models:
                kernel.models.remove(name)

    def move(self, kernel: Kernel, token: object) -> None:
        name = self._a_target(kernel)
        card = self.random.choice(self._cards())
        self._asks(token, kernel, f"move({name}, {card})")
        kernel.rt.move(name, card)

    def drain(self, kernel: Kernel, token: object) -> None:
        if self.box.cap:  # another user may come, and then only an operator undoes it
            return
        card = self.random.choice(self._cards())
        self._asks(token, kernel, f"drain({card})")
        kernel.rt.drain(card)
        self.machine.pause(None, self.random.expovariate(0.5))
        kernel.rt.drain(card, undo=True)

    def look(self, kernel: Kernel, token: object) -> None:
        rt = kernel.rt
        what = self.random.choice(
            (rt.status, rt.health, rt.why, rt.specs, rt.reap, rt.free, rt.defrag, rt.decisions)
        )
        self._asks(token, kernel, what.__name__)
        str(what())

    def plan(self, kernel: Kernel, token: object) -> None:
        name = self._a_target(kernel)
        self._asks(token, kernel, f"plan({name})")
        kernel.rt.plan(name)

    # -- faults

    def _faults(self) -> None:
        random, box = self.random, self.box
        calm = random.random() < 0.3
        while not self.over:
            before = self.machine.now
            self.machine.pause(lambda: self.over, random.expovariate(0.4 / self.pace))
            self.owner_seconds += (self.machine.now - before) * len(box.kernels)
            if calm or self.over:
                continue
            fault = random.choice(self.limits.faults or FAULTS)
            box.met[fault] += 1
            if box.redis is not None and fault in ("keeper", "both", "stop keeper", "no keeper"):
                box.redis.slow = random.choice((0.0, 0.0, 0.05, 0.3))
                box.redis.die()
            if fault in ("keeper", "cut") and random.random() < 0.5:
                self.machine.pause(box.answered, 1.0)  # a reply is lost with the connection
            if fault == "keeper":
                box.kill_keeper(torn=random.random() < 0.5)
            elif fault == "kernel" and len(box.kernels) > 1:
                self._kill(random.choice(box.kernels))
                if random.random() < 0.3 and len(box.kernels) > 1:  # as when memory is short
                    self._kill(random.choice(box.kernels))
            elif fault == "new kernel" and len(box.kernels) < self.limits.kernels:
                self._open_kernel()
            elif fault == "stop keeper" and box.keeper is not None:
                self._stop(box.keeper.process)
            elif fault == "stop kernel":
                asking = {one.owner for one in box.book().tickets if one.verb != "use"}
                asking = [one for one in box.kernels if one.me in asking]  # and reads no answer
                self._stop(random.choice(asking or box.kernels).process)
            elif fault == "no keeper" and all(one.rt is not None for one in box.kernels):
                self.machine.pause(lambda: self.over or self._answers(), 5 * self.pace)
                if self.over:
                    return
                seconds = random.choice((random.uniform(1.0, 15.0), 30.0))
                box.no_keeper_until = self.machine.now + seconds
                box.kill_keeper()
                # Work that failed in a thread of its own begins again at the next look.
                box.troubled_until = box.no_keeper_until + 2.0 + maintenance.POLL_SECONDS
                self.machine.pause(None, box.no_keeper_until - self.machine.now)
            elif fault == "close" and len(box.kernels) > 1:
                self._close(random.choice(box.kernels))
            elif fault == "cut":
                box.cut()
            elif fault == "suspend":
                self.machine.now += random.choice((5.0, 600.0))
                self.laws.jumped()
            elif fault == "interrupt":
                self._interrupt()
            elif fault == "impatience":
                for _ in range(random.randint(2, 6)):
                    self._interrupt()
                    self.machine.pause(None, random.choice((0.0, 0.0, 0.01, 0.3)))
            elif fault == "both" and len(box.kernels) > 1:  # as when memory is short
                self._kill(random.choice(box.kernels))
                self.machine.pause(None, random.choice((0.0, 0.005, 0.02)))
                box.kill_keeper()
            elif fault == "disk" and self.disk.budget:
                box.note(f"the disk is {self.disk.trouble()}")
            elif fault == "stranger" and box.driver is not None:
                card = random.choice(self._cards())
                busy = box.driver.foreign[card] and random.random() < 0.7
                box.driver.take(card, 0 if busy else random.randint(1, 6) << 30)
            elif fault == "card" and box.driver is not None:
                box.note(box.driver.trouble(random.choice(self._cards())))
            elif fault == "wall clock":
                box.wall += random.choice((-86400.0, -5.0, 5.0, 3600.0))
                box.note(f"the wall clock is now {box.wall + self.machine.now:.0f}")
            elif fault == "no thread":
                one = random.choice(box.kernels)
                self._starts_no_thread(one, not one.process.starts_no_thread)
            elif fault == "fork" and box.redis is None:
                self._fork(random.choice(box.kernels))
            elif fault == "collect":
                gc.collect()

    def _answers(self) -> bool:
        """Whether a process carries out an order of another one, and has not answered."""
        return any(None in one.rt._opened.orders.values() for one in self._open())

    def _starts_no_thread(self, kernel: Kernel, now: bool) -> None:
        """Whether the system starts threads of the kernel. Nothing rings once it does, so the next look comes now."""
        before, kernel.process.starts_no_thread = kernel.process.starts_no_thread, now
        if before != now:
            self.box.note(f"{kernel.process} can start {'no ' * now}threads")
        if before and kernel.rt is not None:
            kernel.rt._opened.ledger._bell.ring()

    def _fork(self, parent: Kernel) -> None:
        """A child with a runtime, or one that only has the parent's sockets, perhaps beyond its death."""
        if parent.rt is None or parent.closed:
            return
        if len(self.box.kernels) < self.limits.kernels and self.random.random() < 0.7:
            self._users(self.box.fork(parent))
            return
        child = self.box.fork_in_c(parent)
        if self.random.random() < 0.5:
            self.machine.pause(None, self.random.expovariate(1 / self.pace))
            self.box.end(child)

    def _kill(self, victim: Kernel) -> None:
        if victim.rt is not None:
            self._forget_calls(victim)
            self.box.kill(victim)

    def _interrupt(self) -> None:
        """The stop button: a thread that waits in a call gets a KeyboardInterrupt."""
        waiting = [
            one for one in self.machine.threads
            if one.name.startswith("user") and not one.held_back and (one.ready is not None or one.deadline is not None)
            and any(call.thread is one for call in self.asking.values())
        ]  # fmt: skip
        if waiting:
            one = self.random.choice(waiting)
            self.box.note(f"{one.process} is interrupted in {one.name}")
            one.error, one.deadline = KeyboardInterrupt(), self.machine.now

    def _close(self, kernel: Kernel) -> None:
        """The notebook closes its runtime, while its threads still use it."""
        if kernel.rt is not None and not kernel.closed:
            kernel.closed = True
            self.box.note(f"{kernel.process} closes")
            self.machine.start(kernel.rt.close, (), kernel.process, "close")

    def _forget_calls(self, kernel: Kernel) -> None:
        theirs = [token for token, call in self.asking.items() if call.process is kernel.process]
        for token in theirs:
            del self.asking[token]

    def _stop(self, process: Any) -> None:
        """SIGSTOP, and SIGCONT some time later."""
        self.box.note(f"{process} is stopped")
        threads = [one for one in self.machine.threads if one.process is process]
        for one in threads:
            one.frozen = True
        self.box.stopped.add(process)
        self.machine.pause(None, self.random.choice((0.1, 2.0, 20.0)))
        for one in threads:
            one.frozen = False
        self.box.stopped.discard(process)
        self.laws.jumped()


ACTIONS = (Day.use,) * 6 + (
    Day.block,
    Day.evict,
    Day.preload,
    Day.keep,
    Day.forget,
    Day.look,
    Day.plan,
    Day.move,
    Day.cancel,
)
RARE = (Day.drain,)
FAULTS = (
    "keeper",
    "kernel",
    "new kernel",
    "stop keeper",
    "stop kernel",
    "cut",
    "suspend",
    "interrupt",
    "impatience",
    "both",
    "collect",
    "disk",
    "stranger",
    "card",
    "wall clock",
    "no thread",
    "fork",
    "fork",
    "stranger",
    "no keeper",
)
