"""Compares the cost of a ledger's transaction with a bare round trip of the same bytes over a Unix socket."""

import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable

from msgspec.structs import replace

from gpu_runtime import Runtime
from gpu_runtime.facts import Book, Lease, Section, Share, encode
from gpu_runtime.ledgers import open_ledger
from gpu_runtime.ledgers.base import Ledger

LEASES, OWNERS = 50, 5


def fill(url: str, leases: int = LEASES, owners: int = OWNERS) -> list[Ledger]:
    """Opens a ledger for each of several owners of one book, and fills the book with leases."""
    doors = [open_ledger(url, notebook="/home/ann/work/analysis.ipynb") for _ in range(owners)]
    for door in doors:
        held = tuple(
            Lease(
                door.owner.id,
                f"model-{n}",
                key=f"{door.owner.id}-{n}",
                shares=(Share("cuda:0", 2**30 + n),),
                last_used=1234.567 + n,
                settled_at=1200.123,
                uses=7,
                reload_seconds=3.25,
                restore_seconds=0.25,
                droppable=True,
                backend="transformers",
                model_type="llm",
                quantization="int8",
            )
            for n in range(leases // owners)
        )
        section = Section(
            door.owner, leases=held, residue={"cuda:0": 500 * 2**20}, counts={"loaded": 10}
        )
        door.transact(lambda book, section=section: (book.with_section(section), None))
    return doors


def touch(door: Ledger) -> Callable[[], None]:
    """A function that makes one transaction, which changes a lease of this owner as publishing does."""

    def decide(book: Book) -> tuple[Book, None]:
        lease = book.sections[door.owner.id].leases[0]
        return book.with_lease(replace(lease, last_used=lease.last_used + 1)), None

    return lambda: door.transact(decide)


def bare_round_trip(size: int) -> Callable[[], None]:
    """A function that sends `size` bytes over a Unix socket to another process, and waits for a short reply."""
    here, there = socket.socketpair()
    if os.fork() == 0:
        here.close()
        while there.recv(size, socket.MSG_WAITALL):
            there.sendall(bytes(16))
        os._exit(0)
    there.close()
    content = bytes(size)

    def send() -> None:
        here.sendall(content)
        here.recv(16, socket.MSG_WAITALL)

    return send


def microseconds(*acts: Callable[[], object], rounds: int = 1500) -> list[float]:
    """The median microseconds of each of `acts`. They are measured alternately, so that noise affects all of them."""
    times: list[list[float]] = [[] for _ in acts]
    for _ in range(rounds):
        for act, taken in zip(acts, times, strict=True):
            began = time.perf_counter()
            act()
            taken.append(time.perf_counter() - began)
    return [statistics.median(taken) * 1e6 for taken in times]


def transaction_cost() -> dict[str, float]:
    """Medians in µs of a bare round trip, and of a transaction of one owner and of two in turn, with their ratios."""
    with tempfile.TemporaryDirectory() as root:
        doors = fill(f"keeper://{root}/ledger")
        bare = bare_round_trip(len(encode(doors[0].read().sections[doors[0].owner.id])))
        alone = microseconds(bare, touch(doors[0]))
        # The bare round trip is measured again with the two owners, so that noise affects all of them.
        in_turn, first, second = microseconds(bare, touch(doors[0]), touch(doors[1]))
        for door in doors:
            door.close()
    return {
        "bare round trip": alone[0],
        "transact, alone": alone[1],
        "ratio": alone[1] / alone[0],
        "transact, in turn": (first + second) / 2,
        "ratio in turn": (first + second) / 2 / in_turn,
    }


def large_page_cost() -> dict[str, float]:
    """Medians in µs of a transaction in a book of 50 and of 1,000 leases, and their ratios."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as root:
        small = fill(f"keeper://{root}/small")
        large = fill(f"keeper://{root}/large", leases=1000, owners=25)
        alone = microseconds(touch(small[0]), touch(large[0]), rounds=500)
        acts = [touch(door) for doors in (small, large) for door in doors[:2]]
        one, two, three, four = microseconds(*acts, rounds=500)
        for door in (*small, *large):
            door.close()
    found["50 leases, alone"], found["1,000 leases, alone"] = alone
    found["ratio, alone"] = alone[1] / alone[0]
    found["50 leases, in turn"] = (one + two) / 2
    found["1,000 leases, in turn"] = (three + four) / 2
    found["ratio, in turn"] = (three + four) / (one + two)
    return found


def register_cost(models: int = 4000) -> float:
    """The median µs of the last hundred of `models` registrations in one process."""
    with tempfile.TemporaryDirectory() as root:
        rt = Runtime(devices="sim:8GiB,host:8GiB", ledger=f"keeper://{root}/ledger")
        numbers = iter(range(models))

        def register() -> None:
            rt.register(f"m{next(numbers)}", backend="fake", size="1MiB")

        for _ in range(models - 100):
            register()
        (cost,) = microseconds(register, rounds=100)
        rt.close()
    return cost
