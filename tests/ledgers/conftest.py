"""Builders for the tests of the ledgers: owners, decisions, and other processes with a ledger."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpu_runtime.facts import AllocatorMap as AllocatorMap  # used by code in other processes
from gpu_runtime.facts import Book, Lease, Section, Share, Ticket
from gpu_runtime.facts import Holdings as Holdings  # as above
from gpu_runtime.ledgers import open_ledger
from gpu_runtime.ledgers.access import MARK, Access
from gpu_runtime.ledgers.base import Ledger
from tests import forked
from tests.clock import PATIENCE
from tests.redis_server import redis as redis

GIB = 2**30
REPO = Path(__file__).resolve().parents[2]


def section(ledger: Ledger, *names: str, gib: int = 1, **more) -> Section:
    """A section of the ledger's owner, with a settled lease on sim:0 for each of the names."""
    leases = tuple(lease(ledger, name, gib=gib) for name in names)
    return Section(ledger.owner, leases=leases, **more)


def lease(ledger: Ledger, name: str, gib: int = 1) -> Lease:
    return Lease(ledger.owner.id, name, shares=(Share("sim:0", gib * GIB),))


def ticket(ledger: Ledger, key: str) -> Ticket:
    return Ticket(
        key=key, owner=ledger.owner.id, verb="use", name="qwen", arrived=1.0, refreshed=1.0
    )


def put(ledger: Ledger, *names: str, **more) -> None:
    """Writes the section of this ledger's owner, with leases of those names."""
    ledger.transact(lambda book: (book.with_section(section(ledger, *names, **more)), None))


def count(ledger: Ledger) -> int:
    """Adds one to the count in this owner's section, and returns the new count."""

    def decide(book: Book) -> tuple[Book, int]:
        mine = book.sections.get(ledger.owner.id) or Section(ledger.owner)
        n = mine.counts.get("n", 0) + 1
        return book.with_section(replace(mine, counts={"n": n})), n

    return ledger.transact(decide)


def reach(ledger: Ledger, most: int) -> str:
    """Counts to `most` and returns whether a count was missing that the ledger had acknowledged.

    If a decision finds its own count in the book, it does not write it again. That happens after a
    rebuild: the copy in the owner's file may be newer than the page that was lost.
    """
    for n in range(1, most + 1):

        def decide(book: Book, n: int = n) -> tuple[Book, int]:
            mine = book.sections.get(ledger.owner.id) or Section(ledger.owner)
            return book.with_section(replace(mine, counts={"n": n})), mine.counts.get("n", 0)

        if ledger.transact(decide) not in (n - 1, n):
            return f"lost before {n}"
    return "none lost"


def without(ledger: Ledger, owner_id: str) -> None:
    """Reaps an owner: removes its section and its tickets."""

    def decide(book: Book) -> tuple[Book, None]:
        sections = {id: section for id, section in book.sections.items() if id != owner_id}
        tickets = tuple(ticket for ticket in book.tickets if ticket.owner != owner_id)
        return replace(book, sections=sections, tickets=tickets), None

    ledger.transact(decide)


def share(directory: Path) -> Path:
    """Makes `directory` a ledger that the group of this process shares. Returns `directory`."""
    directory.mkdir()
    access = Access(os.getegid())
    access.make_file(directory / MARK)
    access.open_directory(directory, 0o3770)
    return directory


def names(ledger: Ledger) -> list[str]:
    return sorted(lease.name for lease in ledger.read().leases())


def in_a_child(act: Callable[[], object]) -> str:
    """Forks this process, calls `act` in the child and returns the name of its error, or an empty
    text.

    The child closes its copy of the ledger. It lives on for as long as a test waits for something.
    """
    inbox, outbox = os.pipe()
    if os.fork() == 0:
        try:
            act()
        except Exception as error:
            os.write(outbox, type(error).__name__.encode())
        act.__self__.close()
        time.sleep(PATIENCE)
        os._exit(0)
    os.close(outbox)
    return os.read(inbox, 99).decode()


@pytest.fixture
def open_at() -> Iterator[Callable[[str], Ledger]]:
    """Opens ledgers by URL, and closes them after the test."""
    opened: list[Ledger] = []

    def open_(url: str) -> Ledger:
        opened.append(open_ledger(url))
        return opened[-1]

    yield open_
    for ledger in opened:
        ledger.close()


@pytest.fixture(params=["memory", "keeper", "redis"])
def new_owner(
    request: pytest.FixtureRequest, tmp_path: Path, open_at: Callable[[str], Ledger]
) -> Callable[[], Ledger]:
    """Opens the same book as a new owner at each call. The test runs for each kind of ledger."""
    if request.param == "redis":
        url = request.getfixturevalue("redis").fresh()
    else:
        url = {"memory": f"memory:{tmp_path.name}", "keeper": f"keeper://{tmp_path}/ledger"}[
            request.param
        ]
    return lambda: open_at(url)


class Notebook(forked.Answering):
    """Another process with a ledger. It evaluates lines of Python that use the variable `ledger`."""

    def __init__(self, url: str) -> None:
        code = (
            "import sys; from gpu_runtime.ledgers import open_ledger; from tests.ledgers.conftest import *\n"
            f"ledger = open_ledger({url!r}); print(ledger.owner.id, flush=True)\n"
            "for line in sys.stdin:\n"
            "    try: print(eval(line), flush=True)\n"
            "    except Exception as error: print(type(error).__name__, flush=True)\n"
        )
        super().__init__(code)
        self.id = self.answer()


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Callable[..., Notebook]]:
    """Starts processes that use the book in tmp_path/ledger, or another book. They are killed after
    the test.
    """
    started: list[Notebook] = []

    def start(url: str = f"keeper://{tmp_path}/ledger") -> Notebook:
        started.append(Notebook(url))
        return started[-1]

    yield start
    for other in started:
        other.end()


@pytest.fixture
def new_owner_here(tmp_path: Path, open_at: Callable[[str], Ledger]) -> Callable[[], Ledger]:
    """Opens the book in tmp_path/ledger as a new owner in this process."""
    return lambda: open_at(f"keeper://{tmp_path}/ledger")
