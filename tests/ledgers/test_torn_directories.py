"""A ledger's directory that is deleted, renamed, closed or overwritten at any step of a transaction."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.errors import LedgerUnavailable
from gpu_runtime.facts import Book, Phase, Section, Share
from gpu_runtime.ledgers import book_store, open_ledger
from gpu_runtime.ledgers.base import Ledger
from gpu_runtime.ledgers.sqlite import page as sqlite_page
from gpu_runtime.ledgers.sqlite import recovery

from .conftest import GIB, lease

LIMIT = 8
STEPS = ["read", "decided", "roster written", "committed"]
TARGETS = [
    "directory",
    "ledger",
    "owners",
    "CURRENT",
    "book",
    "journal",
    "newest",
    "turn",
    "turn.pipe",
    "rebuild.lock",
    "own lock",
    "other lock",
    "own bell",
]
DEEDS = ["delete", "rename", "chmod", "replace by nothing", "replace by nonsense"]


class Kernel:
    """A process with a ledger, and what it really holds: bytes that were granted to it."""

    def __init__(self, url: str) -> None:
        self.ledger: Ledger = open_ledger(url)
        self.held: dict[str, int] = {}
        self.steps: Callable[[str], None] = lambda step: None
        store = self.ledger._store
        write_roster, in_force = store._write_roster, store._in_force
        committing = [False]

        def roster(*words) -> None:
            write_roster(*words)
            committing[0] = True
            self.steps("roster written")

        def force(page) -> bool:
            if committing[0]:
                committing[0] = False
                self.steps("committed")
            return in_force(page)

        store._write_roster, store._in_force = roster, force

    def truth(self, book: Book) -> Book:
        """The book with what this kernel holds: it publishes this with every write."""
        owner = self.ledger.owner
        leases = tuple(
            replace(lease(self.ledger, name), shares=(Share("sim:0", size * GIB),))
            for name, size in self.held.items()
        )
        section = book.sections.get(owner.id)
        fresh = Section(owner, leases)
        return book if section == fresh else book.with_section(fresh)

    def tick(self) -> None:
        """What its monitor does within a second."""
        try:
            if self.truth(book := self.ledger.read()) is not book:
                self.ledger.transact(lambda book: (self.truth(book), None))
        except LedgerUnavailable:
            pass

    def take(self, name: str, size: int) -> None:
        """Loads a model of so many GiB, if they are granted."""

        def decide(book: Book) -> tuple[Book, bool]:
            self.steps("read")
            book = book if book.limits else replace(book, limits={"sim:0": LIMIT * GIB})
            book = self.truth(book)
            fits = book.claims().get("sim:0", 0) + size * GIB <= LIMIT * GIB
            if fits:
                target = (Share("sim:0", size * GIB),)
                new = replace(lease(self.ledger, name), phase=Phase.ARRIVING, target=target)
                book = book.with_lease(replace(new, shares=()))
            self.steps("decided")
            return book, fits

        try:
            granted = self.ledger.transact(decide)
        except LedgerUnavailable:
            return
        if granted:
            self.held[name] = size
            self.tick()


def harm(deed: str, target: str, directory: Path, me: Kernel, other: Kernel) -> None:
    """Does the deed to the target. What is not there, or cannot be done, stays undone."""
    owners = directory / "owners"
    book = directory / (
        Path(directory / "CURRENT").readlink() if (directory / "CURRENT").is_symlink() else "x"
    )
    path = {
        "directory": directory,
        "ledger": directory.parent,
        "owners": owners,
        "book": book,
        "journal": Path(f"{book}-journal"),
        "own lock": owners / me.ledger.owner.id,
        "other lock": owners / other.ledger.owner.id,
        "own bell": owners / f"{me.ledger.owner.id}.bell",
    }.get(target, directory / target)
    try:
        if deed == "rename":
            path.rename(path.with_name(f"{path.name}.away"))
        elif deed == "chmod":
            path.chmod(0)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
            if deed == "replace by nothing":
                path.touch()
            elif deed == "replace by nonsense":
                path.write_bytes(b"nonsense" * 2000)
    except OSError:
        pass


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    deed=st.sampled_from(DEEDS),
    target=st.sampled_from(TARGETS),
    step=st.sampled_from(STEPS),
    again=st.booleans(),
    sizes=st.tuples(*[st.integers(1, LIMIT)] * 4),
)
def test_nothing_is_overcommitted_whatever_happens_to_the_files(
    tmp_path_factory, monkeypatch, deed, target, step, again, sizes
):
    """What two kernels hold never exceeds the card, at whichever step a file is torn away."""
    root = tmp_path_factory.mktemp("torn")
    now = [1e6]
    kernels = [Kernel(f"sqlite://{root}/ledger") for _ in range(2)]
    first, second = kernels
    directory = first.ledger.directory

    def sleep(seconds: float) -> None:
        now[0] += seconds
        for kernel in kernels:
            kernel.tick()

    def tear(reached: str, me: Kernel, other: Kernel, left: list[int]) -> None:
        if reached == step and left:
            left.pop()
            harm(deed, target, directory, me, other)

    with monkeypatch.context() as patch:
        patch.setattr(book_store, "sleep", sleep)
        patch.setattr(sqlite_page, "boottime", lambda: now[0])
        patch.setattr(recovery, "boottime", lambda: now[0])
        for kernel in kernels:
            kernel.ledger.patience_seconds = 2.0
            kernel.tick()
        first.take("a", sizes[0])
        left = [1, 2] if again else [1]
        for kernel, other in ((first, second), (second, first)):
            kernel.steps = lambda reached, me=kernel, o=other: tear(reached, me, o, left)
        second.take("b", sizes[1])
        first.take("c", sizes[2])
        second.take("d", sizes[3])
        held = sum(sum(kernel.held.values()) for kernel in kernels)
        assert held <= LIMIT, (first.held, second.held)
        for kernel in kernels:
            kernel.steps = lambda reached: None
            kernel.ledger.close()
    shutil.rmtree(root, ignore_errors=True)


def test_the_test_can_fail(monkeypatch, tmp_path):
    """Without the closed period and without what was last seen, the bytes are granted twice."""
    monkeypatch.setattr(recovery, "_missing", lambda *_: {})
    monkeypatch.setattr(recovery, "REGISTER_SECONDS", 0.0)
    first, second = (Kernel(f"sqlite://{tmp_path}/ledger") for _ in range(2))
    second.tick()
    first.take("a", 6)
    shutil.rmtree(first.ledger.directory)
    second.take("b", 6)
    assert first.held == {"a": 6} and second.held == {"b": 6}
    for kernel in (first, second):
        kernel.ledger.close()


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
