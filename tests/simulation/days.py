"""A day on the simulated box: what users, operators and faults do, and what must hold after every step."""

import contextlib
import gc
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from gpu_runtime.errors import GpuError, LoadFailed, OutOfMemory
from gpu_runtime.units import show_bytes

from .box import Box, Kernel
from .machine import Machine, Stuck

QUIET_SECONDS = 400.0  # in which every request ends, once nobody asks for more
SIZES = ("1GiB", "2GiB", "3GiB", "5GiB", "8GiB")


class Call(str):
    """A call that has not returned, in words."""

    process: Any = None


class Day:
    """One seed: the box, its users and its faults."""

    def __init__(self, seed: int, seconds: float, trace: Callable[[str], None] | None) -> None:
        self.machine = Machine(seed)
        self.seconds = seconds
        self.lines: list[str] = []
        self.box = Box(self.machine, self._devices(), trace or self.lines.append)
        self.random = self.machine.random
        # An important model that is idle stays for ever, and a request of less importance waits for ever.
        self.ranks = self.random.choice((("normal",), ("normal",), ("normal", "high", "low")))
        self.over = False  # nobody asks for anything more
        self.asking: dict[object, Call] = {}  # the calls that have not returned
        self.problem = ""
        self.owner_seconds = 0.0
        self._done: list[str] = []

    def _devices(self) -> str:
        cards = self.machine.random.choice(("8GiB", "2x8GiB", "12GiB", "3x6GiB"))
        host = self.machine.random.choice((4, 16, 64))
        return f"sim:{cards},host:{host}GiB"

    def run(self) -> str:
        """Why the day failed; empty if all held."""
        gc.disable()
        try:
            return self._run()
        finally:
            self.machine.close()
            gc.enable()

    def _run(self) -> str:
        box, machine = self.box, self.machine
        machine.after_step = self._check
        box.slow = self.random.choice((0.0, 0.0, 0.02, 0.2))
        god = box.process("the operator")
        for _ in range(self.random.randint(1, 4)):
            self._open_kernel()
        machine.start(self._faults, (), god, "faults")
        try:
            end = machine.now + self.seconds
            machine.run(lambda: machine.now >= end or bool(self._wrong()), self.seconds + 1)
            if wrong := self._wrong():
                return wrong
            self.over = True
            box.slow = 0.0
            for kernel in self._open():
                machine.start(self._tidy, (kernel,), kernel.process, "tidy")
            ended = machine.run(lambda: not self.asking or bool(self._wrong()), QUIET_SECONDS)
            if len(self.ranks) > 1:
                return self._wrong()
            if not ended:
                return f"after {QUIET_SECONDS:g} s without new requests: {', '.join(self.asking.values())}"
            return self._wrong() or self._usable()
        except Stuck as error:
            return f"{error}: {', '.join(self.asking.values())}"

    def _open(self) -> list[Kernel]:
        return [one for one in self.box.kernels if one.rt is not None and not one.closed]

    def _tidy(self, kernel: Kernel) -> None:
        """Undoes the pins and drains whose users have failed or were killed."""
        undo = [partial(kernel.rt.unpin, spec.name) for spec in kernel.rt.specs()]
        undo += [
            partial(kernel.rt.drain, card, undo=True) for card in self.box.limits if card != "host"
        ]
        for act in undo:
            with contextlib.suppress(GpuError):  # it closes just now, or the model is not loaded
                act()

    def _usable(self) -> str:
        """At quiet: every living kernel can use each of its models that fits."""
        for kernel in self._open():
            for name in [spec.name for spec in kernel.rt.specs()]:
                self.machine.start(self._use_once, (kernel, name), kernel.process, "use once")
                if not self.machine.run(
                    lambda: bool(self._done) or bool(self._wrong()), QUIET_SECONDS
                ):
                    return f"{kernel.process} cannot use {name} at quiet"
                outcome = self._done.pop() if self._done else ""
                if wrong := self._wrong() or outcome:
                    return wrong
        return ""

    def _use_once(self, kernel: Kernel, name: str) -> None:
        self._done = []
        try:
            with kernel.rt.use(name, timeout=300):
                self._done.append("")
        except GpuError as error:
            self._done.append(f"{kernel.process} cannot use {name} at quiet: {error}")

    # -- what must hold

    def _check(self) -> None:
        for device, limit in self.box.limits.items():
            held = self.box.physical(device)
            if sum(held.values()) > limit and not self.problem:
                sizes = ", ".join(f"{who} {show_bytes(size)}" for who, size in held.items() if size)
                self.problem = (
                    f"{device} has {show_bytes(limit)}, and holds: {sizes}\n{self._leases()}"
                )

            for kernel in self.box.kernels:
                self._all_is_leased(kernel, device, held.get(kernel.process, 0))

    def _all_is_leased(self, kernel: Kernel, device: str, size: int) -> None:
        """A process holds no byte that the newest page does not claim for it."""
        if size and not self.problem:
            section = self.box.book().sections.get(kernel.rt._opened.me)
            claimed = section.claims().get(device, 0) if section is not None else 0
            if size > claimed:
                self.problem = (
                    f"{kernel.process} holds {show_bytes(size)} on {device}, and the ledger has "
                    f"{show_bytes(claimed)}\n{self._leases()}"
                )

    def _leases(self) -> str:
        """The book, for a failure: a line for each lease and each of the last events."""
        book = self.box.book()
        leases = [
            f"  {one.id} {one.phase.value} shares={one.shares} target={one.target} filled={one.filled} pins={one.pins}"
            for one in book.leases()
        ]
        return "\n".join([*leases, *[f"  {event.owner} {event}" for event in book.events[-12:]]])

    def _wrong(self) -> str:
        for process in self.box._ids.values():
            for error in process.failures:
                lines = traceback.format_exception(error)
                return f"{process}: {''.join(lines)}"
        return self.problem

    # -- users

    def _open_kernel(self) -> Kernel:
        random = self.random
        kernel = self.box.start_kernel(
            eviction_grace_seconds=random.choice((0, 0, 2)),
            gpu_relief=random.choice(("auto", "always", "never")),
            gpu_policy=random.choice(("lru", "cost_aware", "keep_score")),
        )
        self.box.note(f"{kernel.process} opens")
        for number in range(random.randint(1, 3)):
            self.machine.start(self._user, (kernel, number), kernel.process, f"user {number}")
        return kernel

    def _user(self, kernel: Kernel, number: int) -> None:
        machine, random = self.machine, self.random
        machine.pause(lambda: kernel.rt is not None, None)
        while not self.over:
            machine.pause(None, random.expovariate(0.5))
            if self.over:
                return
            act = random.choice(RARE if random.random() < 0.02 else ACTIONS)
            token = object()
            self._asks(token, kernel, act.__name__)
            self.box.met[act.__name__] += 1
            try:
                act(self, kernel, token)
            except GpuError as error:
                self.box.met[type(error).__name__] += 1
                self.box.note(f"{self.asking[token]}: {str(error).splitlines()[0]}")
            finally:
                self.asking.pop(token, None)

    def _asks(self, token: object, kernel: Kernel, what: str) -> None:
        call = self.asking[token] = Call(f"{kernel.process}: {what}")
        call.process = kernel.process

    def _a_model(self, kernel: Kernel) -> str:
        if kernel.models and self.random.random() < 0.7:
            return self.random.choice(kernel.models)
        name = f"m{self.box._pids}.{len(kernel.models)}"
        random = self.random
        options: dict[str, Any] = {}
        if random.random() < 0.3:
            options["shadow"] = True
        if random.random() < 0.3:
            options["pieces"] = 8
        slow = random.choice((0.0, 0.01, 0.5, 5.0))
        faulty = random.choice((0.0, 0.0, 0.05, 0.2))

        def hook(what: str) -> None:
            self.machine.pause(None, random.uniform(0, slow))
            if not self.over and random.random() < faulty:
                raise random.choice(
                    (LoadFailed("the disk is gone", name=name, source=""), OutOfMemory("no room"))
                )

        kernel.rt.register(
            name, hook, backend="fake", size=random.choice(SIZES),
            importance=random.choice(self.ranks), **options,
        )  # fmt: skip
        kernel.models.append(name)
        return name

    def _a_target(self, kernel: Kernel) -> str:
        """A model of this or of another kernel."""
        other = self.random.choice(self.box.kernels)
        if other is kernel or not other.models:
            return self._a_model(kernel)
        return f"{self.random.choice(other.models)}"

    def use(self, kernel: Kernel, token: object) -> None:
        name, random = self._a_model(kernel), self.random
        seconds = random.choice((None, 0.5, 5.0, 30.0))
        self._asks(token, kernel, f"use({name}, timeout={seconds})")
        with kernel.rt.use(name, timeout=seconds):
            self.box.note(f"{kernel.process} uses {name}")
            self.machine.pause(None, random.expovariate(1.0))

    def block(self, kernel: Kernel, token: object) -> None:
        size = self.random.choice(SIZES)
        self._asks(token, kernel, f"lease({size})")
        with kernel.rt.lease(size, purpose="work", timeout=self.random.choice((None, 1.0, 20.0))):
            self.machine.pause(None, self.random.expovariate(1.0))

    def evict(self, kernel: Kernel, token: object) -> None:
        name = self._a_target(kernel)
        self._asks(token, kernel, f"evict({name})")
        kernel.rt.evict(name, timeout=10)

    def preload(self, kernel: Kernel, token: object) -> None:
        name = self._a_target(kernel)
        self._asks(token, kernel, f"preload({name})")
        kernel.rt.preload(name, timeout=20)

    def keep(self, kernel: Kernel, token: object) -> None:
        name = self._a_model(kernel)
        self._asks(token, kernel, f"pin({name})")
        kernel.rt.pin(name)
        self.machine.pause(None, self.random.expovariate(0.3))
        kernel.rt.unpin(name)

    def forget(self, kernel: Kernel, token: object) -> None:
        if kernel.models:
            name = self.random.choice(kernel.models)
            self._asks(token, kernel, f"forget({name})")
            kernel.rt.forget(name)
            if name in kernel.models:
                kernel.models.remove(name)

    def move(self, kernel: Kernel, token: object) -> None:
        name = self._a_model(kernel)
        card = self.random.choice([device for device in self.box.limits if device != "host"])
        self._asks(token, kernel, f"move({name}, {card})")
        kernel.rt.move(name, card)

    def drain(self, kernel: Kernel, token: object) -> None:
        card = self.random.choice([device for device in self.box.limits if device != "host"])
        self._asks(token, kernel, f"drain({card})")
        kernel.rt.drain(card)
        self.machine.pause(None, self.random.expovariate(0.5))
        kernel.rt.drain(card, undo=True)

    def look(self, kernel: Kernel, token: object) -> None:
        self._asks(token, kernel, "status")
        str(kernel.rt.status())
        kernel.rt.health()

    # -- faults

    def _faults(self) -> None:
        random, box = self.random, self.box
        calm = random.random() < 0.3
        while not self.over:
            before = self.machine.now
            self.machine.pause(None, random.expovariate(0.2))
            self.owner_seconds += (self.machine.now - before) * len(box.kernels)
            if calm or self.over:
                continue
            fault = random.choice(FAULTS)
            box.met[fault] += 1
            if fault == "keeper":
                box.kill_keeper(torn=random.random() < 0.5)
            elif fault == "kernel" and len(box.kernels) > 1:
                victim = random.choice(box.kernels)
                if victim.rt is not None:
                    self._forget_calls(victim)
                    box.kill(victim)
            elif fault == "new kernel" and len(box.kernels) < 6:
                self._open_kernel()
            elif fault == "stop keeper" and box.keeper is not None:
                self._stop(box.keeper.process)
            elif fault == "stop kernel":
                self._stop(random.choice(box.kernels).process)
            elif fault == "close" and len(box.kernels) > 1:
                self._close(random.choice(box.kernels))
            elif fault == "cut":
                box.cut()
            elif fault == "suspend":
                self.machine.now += random.choice((5.0, 600.0))
            elif fault == "collect":
                gc.collect()

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
        self.machine.pause(None, self.random.choice((0.1, 2.0, 20.0)))
        for one in threads:
            one.frozen = False


ACTIONS = (Day.use,) * 6 + (
    Day.block,
    Day.evict,
    Day.preload,
    Day.keep,
    Day.forget,
    Day.look,
    Day.move,
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
    "collect",
)
