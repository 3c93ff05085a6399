"""Compares the cost of a ledger's transaction with a bare round trip of the same bytes over a Unix socket."""

import os
import socket
import tempfile
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from gpu_runtime import Runtime
from gpu_runtime.facts import Book, Lease, Section, Share, encode
from gpu_runtime.ledgers import open_ledger
from gpu_runtime.ledgers.base import Ledger

from .results import Row
from .timing import medians

LEASES, OWNERS = 50, 5


def fill(url: str, leases: int = LEASES, owners: int = OWNERS) -> list[Ledger]:
    """Opens a ledger for each of several owners of one book, and fills the book with leases."""
    doors = [open_ledger(url, notebook="/home/ann/work/analysis.ipynb") for _ in range(owners)]
    for door in doors:
        held = tuple(
            Lease(
                door.owner.id, f"model-{n}", key=f"{door.owner.id}-{n}", shares=(Share("cuda:0", 2**30 + n),),
                last_used=1234.567 + n, settled_at=1200.123, uses=7, reload_seconds=3.25, restore_seconds=0.25,
                droppable=True, backend="transformers", model_type="llm", quantization="int8",
            )
            for n in range(leases // owners)
        )  # fmt: skip
        residue, counts = {"cuda:0": 500 * 2**20}, {"loaded": 10}
        section = Section(door.owner, leases=held, residue=residue, counts=counts)
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


def rows() -> Iterator[Row]:
    yield from transactions()
    yield from large_pages()
    yield registration()


def transactions() -> Iterator[Row]:
    """A transaction of one owner, and of two in turn, against a bare round trip that is measured with them."""
    with tempfile.TemporaryDirectory() as root:
        doors = fill(f"keeper://{root}/ledger")
        bare = bare_round_trip(len(encode(doors[0].read().sections[doors[0].owner.id])))
        trip, alone = medians(1500, bare, touch(doors[0]))
        trip_in_turn, first, second = medians(1500, bare, touch(doors[0]), touch(doors[1]))
        for door in doors:
            door.close()
    what = f"one `transact`, the keeper, {LEASES} leases, %s, against a bare round trip of its bytes over a socket"
    yield Row.against(what % "alone", alone, trip, 3, "µs")
    yield Row.against(what % "in turn", (first + second) / 2, trip_in_turn, 3, "µs")


def large_pages() -> Iterator[Row]:
    """A transaction in a book of 1,000 leases, against one of 50."""
    with tempfile.TemporaryDirectory() as root:
        small = fill(f"keeper://{root}/small")
        large = fill(f"keeper://{root}/large", leases=1000, owners=25)
        alone = medians(500, touch(small[0]), touch(large[0]))
        acts = [touch(door) for doors in (small, large) for door in doors[:2]]
        one, two, three, four = medians(500, *acts)
        for door in (*small, *large):
            door.close()
    what = f"one `transact` in a page of 1,000 leases, %s, against one of {LEASES}"
    yield Row.against(what % "alone", alone[1], alone[0], 2, "µs")
    yield Row.against(what % "in turn", (three + four) / 2, (one + two) / 2, 2, "µs")


def registration(models: int = 4000) -> Row:
    """The last hundred of `models` registrations in one process."""
    with tempfile.TemporaryDirectory() as root:
        rt = Runtime(devices="sim:8GiB,host:8GiB", ledger=f"keeper://{root}/ledger")
        numbers = iter(range(models))
        register = lambda: rt.register(f"m{next(numbers)}", backend="fake", size="1MiB")
        [cost] = medians(100, register, warm=models - 100)
        rt.close()
    what = f"`register` of the {models:,}th model"
    return Row(what, f"{cost * 1e6:.0f} µs", "≤ 50 µs", cost <= 50e-6)
