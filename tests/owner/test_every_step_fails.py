"""Each step that leaves the process fails, is late or is interrupted; the story must end as without a fault."""

import contextlib
import signal
from collections.abc import Callable
from typing import Any

import pytest

from gpu_runtime import GpuError, LedgerUnavailable, Runtime
from gpu_runtime.backends.fake import FakeBackend
from gpu_runtime.devices.process_memory import Memory, out_of_memory
from gpu_runtime.ledgers.memory import MemoryLedger
from tests.clock import Clock

from .conftest import claims, fakes, where

STEPS: dict[type, tuple[str, ...]] = {
    MemoryLedger: ("read", "transact"),
    FakeBackend: ("load", "move", "drop", "free_shadow"),
    Memory: ("allocate",),
}
LATE_SECONDS = 3600.0


class Broken(Exception):
    """What a failed step of a backend raises."""


class Steps:
    """Counts the steps of a story, and lets step number `at` meet a fault."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
        self.clock, self.count, self.at, self.fault = clock, 0, -1, ""
        self.others: list[Runtime] = []
        self.in_monitor = False
        monkeypatch.setattr(
            MemoryLedger, "wait", lambda ledger, timeout, ends=(): self._wait(timeout)
        )
        for kind, names in STEPS.items():
            for name in names:
                monkeypatch.setattr(kind, name, self._watched(kind, getattr(kind, name)))

    def _wait(self, timeout: float) -> bool:
        """A wait for the other owners, who do their upkeep now. The time passes at once."""
        self.in_monitor = True
        for rt in self.others:
            with contextlib.suppress(GpuError, Broken):  # their monitors go on after an error
                rt.tick()
        self.in_monitor = False
        self.clock.advance(timeout)
        return False

    def _watched(self, kind: type, step: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count != self.at:
                return step(*args, **kwargs)
            if self.fault == "late":
                self.clock.advance(LATE_SECONDS)
            elif self.fault == "interrupted" and not self.in_monitor:
                signal.raise_signal(signal.SIGINT)
            elif (
                self.fault == "fails" and "drop" not in step.__name__
            ):  # a drop with an error is a drop
                raise self._error(kind, args)
            answer = step(*args, **kwargs)
            if self.fault == "fails after it was done":
                del answer  # a traceback keeps the names of its frames
                raise self._error(kind, args)
            return answer

        return watched

    @staticmethod
    def _error(kind: type, args: tuple[Any, ...]) -> Exception:
        if kind is MemoryLedger:
            return LedgerUnavailable("the ledger does not answer.\n  Try again.", path="memory:")
        if kind is Memory:
            return out_of_memory(
                "", device=args[0].device, asked_bytes=args[1], holders=(), report=""
            )
        return Broken("the driver is gone")

    def run(
        self, story: Callable[[], object], at: int = -1, fault: str = ""
    ) -> BaseException | None:
        """Runs the story. Returns what it raised."""
        self.count, self.at, self.fault = 0, at, fault
        try:
            story()
        except (Exception, KeyboardInterrupt) as error:
            return error
        finally:
            self.at = -1
        return None


def held(rt: Runtime) -> dict[str, int]:
    """The bytes that this process really holds, by device. Devices without bytes are left out."""
    devices = [device.id for device in rt.probe.devices]
    found = {one: rt.probe.place(one).held_bytes() for one in devices}
    return {one: size for one, size in found.items() if size}


def name_of_kind(place: str) -> str:
    return "card" if place.startswith("sim") else place


def settle(steps: Steps, *runtimes: Runtime) -> None:
    """Lets the owners do their own upkeep, now and after each pause that a failure may have made."""
    for _ in range(4):
        for rt in runtimes:
            rt.tick()
        steps.clock.advance(LATE_SECONDS)


# -- the stories. Each begins with whatever an earlier run left
def use(rt: Runtime, other: Runtime) -> None:
    with rt.use("a"):
        pass


def use_that_evicts(rt: Runtime, other: Runtime) -> None:
    rt.preload("a")
    rt.preload("b")
    with rt.use("c"), rt.use("d"):
        pass


def evict_and_return(rt: Runtime, other: Runtime) -> None:
    rt.preload("a")
    rt.evict("a")
    with rt.use("a"):
        pass


def drop(rt: Runtime, other: Runtime) -> None:
    rt.preload("a")
    rt.evict("a", drop=True)


def move(rt: Runtime, other: Runtime) -> None:
    rt.preload("a")
    for card in ("sim:1", "sim:0", "sim:1"):
        if where(rt)["a"] != card:
            rt.move("a", card)


def host_copy(rt: Runtime, other: Runtime) -> None:
    rt.preload("copied")
    rt.evict("copied")
    with rt.use("copied"):
        pass
    rt.evict("copied", drop=True)


def leave_in_parts(rt: Runtime, other: Runtime) -> None:
    rt.preload("pieces")
    with rt.use("c"), rt.use("small"):
        pass


def block(rt: Runtime, other: Runtime) -> None:
    with rt.lease("5GiB"), rt.use("a"):
        pass


def pin(rt: Runtime, other: Runtime) -> None:
    rt.preload("a")
    rt.pin("a")
    rt.unpin("a")


def recall(rt: Runtime, other: Runtime) -> None:
    other.preload("theirs")
    other.preload("their copied")
    with rt.use("a"), rt.use("b"):
        pass


def forget(rt: Runtime, other: Runtime) -> None:
    rt.register("new", backend="fake", size="20GiB")
    rt.preload("new")
    rt.forget("new")


STORIES = (
    use, use_that_evicts, evict_and_return, drop, move, host_copy, leave_in_parts, block, pin, recall, forget,
)  # fmt: skip
FAULTS = ("fails", "fails after it was done", "interrupted", "late")


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_nothing_is_kept_or_lost_wherever_one_step_fails(
    runtime, monkeypatch, shared_book, story, fault
):
    clock = Clock()
    steps = Steps(monkeypatch, clock)

    def begin() -> tuple[Runtime, Runtime]:
        devices = {"devices": "sim:2x24GiB,host:40GiB", "eviction_grace_seconds": 0}
        both = [runtime(ledger=shared_book, clock=clock, monitor=False, **devices) for _ in "ab"]
        rt, other = both
        fakes(rt, a="20GiB", b="20GiB", c="20GiB", d="20GiB", small="8GiB")
        rt.register("copied", backend="fake", size="10GiB", shadow=True)
        rt.register("pieces", backend="fake", size="20GiB", pieces=10)
        fakes(other, theirs="20GiB")
        other.register("their copied", backend="fake", size="12GiB", shadow=True)
        steps.others = [other]
        return rt, other

    def state(*both: Runtime) -> list[object]:
        """What is where, whichever card it is. Of equal models, the seconds of their loads decide who leaves."""
        places = [sorted(name_of_kind(place) for place in where(rt).values()) for rt in both]
        sizes = [sorted(found.values()) for found in (*map(held, both), claims(both[0]))]
        return [places, sizes, both[0].status().tickets]

    def close(*both: Runtime) -> None:
        for rt in both:
            rt.close()
            assert held(rt) == {}

    def law(*both: Runtime) -> bool:
        """Whether the book claims what the owners hold together."""
        claimed, owned = claims(both[0]), [held(rt) for rt in both]
        return all(
            sum(one.get(device, 0) for one in owned) <= claimed.get(device, 0)
            for device in ("sim:0", "sim:1", "host")
        )

    plain = begin()
    assert steps.run(lambda: story(*plain)) is None
    number = steps.count
    assert number > 2
    settle(steps, *plain)
    ends = state(*plain)
    close(*plain)
    for at in range(1, number + 1):
        both = begin()
        error = steps.run(lambda both=both: story(*both), at, fault)
        what = f"step {at} of {number} {fault}; the story raised {error!r}"
        assert isinstance(error, GpuError | KeyboardInterrupt | Broken | None), what
        assert law(*both), what
        settle(steps, *both)
        for rt in both:
            for name, place in where(rt).items():
                rt.unpin(name)
                if place != "disk":
                    rt.evict(name, drop=True)
        assert state(*both)[1:] == [[[], [], []], ()], what
        assert steps.run(lambda both=both: story(*both)) is None, what
        settle(steps, *both)
        assert state(*both) == ends, what
        close(*both)
