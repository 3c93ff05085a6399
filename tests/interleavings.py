"""Searches the interleavings of two threads in places where two threads of the project run at once.

usage: frontrun python -m tests.interleavings [CASE...]

frontrun runs the threads one instruction at a time and chooses which one goes on. A case is the state
of both threads, what each does with it, and what must hold. Source: https://pypi.org/project/frontrun/
"""

import gc
import sys
from typing import Any

import frontrun
from msgspec.structs import replace

from gpu_runtime import Runtime
from gpu_runtime.backends.pytorch.kernel_memory import without_collections
from gpu_runtime.facts import Book, Section
from gpu_runtime.ledgers.memory import MemoryLedger
from gpu_runtime.owner import registry
from gpu_runtime.owner.resident import Place

USUAL = gc.get_threshold()
PATIENCE = 600.0  # seconds of one execution, on a machine of any speed


class Collections:
    """Two moves overlap, and Python collects garbage again after both."""

    def __init__(self) -> None:
        gc.set_threshold(*USUAL)

    def one(self) -> None:
        with without_collections():
            pass

    other = one

    def holds(self) -> bool:
        return gc.get_threshold() == USUAL


class Writes:
    """Neither of two owners loses what it has written to one book."""

    def __init__(self) -> None:
        self.owners = MemoryLedger("two"), MemoryLedger("two")

    def count(self, ledger: MemoryLedger) -> None:
        def decide(book: Book) -> tuple[Book, None]:
            mine = book.sections.get(ledger.owner.id) or Section(ledger.owner)
            counts = {"n": mine.counts.get("n", 0) + 1}
            return book.with_section(replace(mine, counts=counts)), None

        ledger.transact(decide)
        ledger.transact(decide)

    def one(self) -> None:
        self.count(self.owners[0])

    def other(self) -> None:
        self.count(self.owners[1])

    def holds(self) -> bool:
        sections = self.owners[0].read().sections
        counted = [sections[ledger.owner.id].counts["n"] for ledger in self.owners]
        for ledger in self.owners:
            ledger.close()
        return counted == [2, 2]


class UseAndMove:
    """A model in use does not move, and a model that moves is not used."""

    def __init__(self) -> None:
        self.rt = Runtime(devices="sim:24GiB,host:64GiB", ledger="memory:", monitor=False)
        self.rt.register("m", backend="fake", size="1GiB")
        self.rt.preload("m")
        self.model = registry.find(self.rt._session, "m")

    def one(self) -> None:
        use = self.rt.use("m")
        if use.enter_if_here():
            assert self.model.place is Place.HERE
            use.__exit__(None, None, None)

    def other(self) -> None:
        if self.model.begin_moving():
            assert not self.model.pins
            self.model.stay()

    def holds(self) -> bool:
        left = self.model.place, len(self.model.pins)
        self.rt.close()
        return left == (Place.HERE, 0)


CASES = {case.__name__: case for case in (Collections, Writes, UseAndMove)}


def search(case: Any) -> Any:
    """The result of frontrun: at random for memory of C code, which its systematic search does not see."""
    random: dict[str, Any] = {"strategy": "random", "max_attempts": 200, "seed": 1}
    systematic: dict[str, Any] = {"max_executions": 40, "detect_io": False}
    return frontrun.explore(
        setup=case,
        workers=[case.one, case.other],
        invariant=case.holds,
        trace_packages=["gpu_runtime*"],
        timeout_per_run=PATIENCE,
        deadlock_timeout=PATIENCE,
        **(random if case is Collections else systematic),
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        result = search(CASES[name])
        print(f"{name}: {result.num_explored} interleavings")
        result.assert_holds()
