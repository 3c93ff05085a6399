"""Two kernels that share one card. An attack damages the files or keys of their ledger at a step of
a transaction.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import random
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from gpu_runtime.errors import LedgerUnavailable
from gpu_runtime.facts import Book, Phase, Section, Share
from gpu_runtime.ledgers import book_store, open_ledger
from gpu_runtime.ledgers.base import Ledger
from gpu_runtime.ledgers.sqlite import page as sqlite_page
from gpu_runtime.ledgers.sqlite import recovery
from tests.clock import PATIENCE
from tests.impostor import NOBODY

from .conftest import GIB, lease

LIMIT = 8  # GiB on the card
STEPS = ["read", "decided", "roster written", "committed"]
REPLACE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: path.touch(),
    "nonsense": lambda path: path.write_bytes(b"nonsense" * 2000),
    "a pipe": os.mkfifo,
    "a directory": lambda path: path.mkdir(),
    "a link": lambda path: path.symlink_to("/dev/zero"),
}
DEEDS = ["delete", "rename", "chmod", *(f"replace by {what}" for what in REPLACE)]
FILES = [
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
# A Redis keeps the page; these files are still beside it.
FILES_OF_REDIS = ["directory", "owners", "turn", "turn.pipe", "own lock", "other lock", "own bell"]
KEYS_OF_REDIS = ["page", "marker", "all", "scripts"]
HANG_SECONDS = PATIENCE
REGISTER_SECONDS = 0.05  # for a Redis, whose closed period goes by the server's clock


class Attack(NamedTuple):
    """One attack: the damage (`deed`), what is damaged (`target`), and the step at which it
    happens.

    `again` repeats it. `sizes` are the GiB that the kernels load.
    """

    deed: str
    target: str
    step: str
    again: bool = False
    sizes: tuple[int, int, int, int] = (3, 3, 3, 3)


class Kernel:
    """An owner with a ledger, and the bytes that were granted to it and that it really holds."""

    def __init__(self, url: str) -> None:
        self.ledger: Ledger = open_ledger(url)
        self.ledger.patience_seconds = 2.0
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
        """The book with the leases that this kernel holds. Every write publishes them."""
        owner = self.ledger.owner
        leases = tuple(
            replace(lease(self.ledger, name), shares=(Share("sim:0", size * GIB),))
            for name, size in self.held.items()
        )
        section = book.sections.get(owner.id)
        fresh = Section(owner, leases)
        return book if section == fresh else book.with_section(fresh)

    def tick(self) -> None:
        """Does what the kernel's monitor does within a second."""
        try:
            if self.truth(book := self.ledger.read()) is not book:
                self.ledger.transact(lambda book: (self.truth(book), None))
        except LedgerUnavailable:
            pass

    def take(self, name: str, size: int) -> None:
        """Loads a model of `size` GiB, if the ledger grants them."""

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

    def close(self) -> None:
        self.steps = lambda step: None
        self.ledger.close()


def harm_a_file(deed: str, target: str, me: Kernel, other: Kernel) -> None:
    """Damages a file as `deed` says. Nothing happens if the damage is impossible.

    A file that is missing can still be replaced.
    """
    with suppress(OSError):
        path = _path_of(target, me, other)
        if deed == "rename":
            path.rename(path.with_name(f"{path.name}.away"))
        elif deed == "chmod":
            path.chmod(0)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=deed.startswith("replace"))
        if deed.startswith("replace by "):
            REPLACE[deed.removeprefix("replace by ")](path)


def _path_of(target: str, me: Kernel, other: Kernel) -> Path:
    """The file that `target` names. Raises OSError."""
    directory = me.ledger.directory
    owners, current = directory / "owners", directory / "CURRENT"
    book = directory / (os.readlink(current) if current.is_symlink() else "no book")
    return {
        "directory": directory,
        "ledger": directory.parent,
        "owners": owners,
        "book": book,
        "journal": Path(f"{book}-journal"),
        "own lock": owners / me.ledger.owner.id,
        "other lock": owners / other.ledger.owner.id,
        "own bell": owners / f"{me.ledger.owner.id}.bell",
    }.get(target, directory / target)


def harm_a_key(deed: str, target: str, me: Kernel) -> None:
    """Damages a key of the Redis, all its keys, or the scripts that Redis remembers."""
    page, marker = f"gpu-console:page:{me.ledger.owner.boot}", "gpu-console:ledger"
    ask = open_ledger_connection(me)
    if target == "scripts":
        ask("SCRIPT", "FLUSH")
        return
    for key in {"page": [page], "marker": [marker], "all": [page, marker]}[target]:
        if not ask("EXISTS", key):
            continue
        if deed == "rename":
            ask("RENAME", key, f"{key}.away")
        elif deed == "chmod":  # a key has no mode: it gets another type
            ask("SET", key, "x")
        elif deed == "delete":
            ask("DEL", key)
        elif ask("TYPE", key) == b"hash":
            nonsense = b"" if deed == "replace by nothing" else deed.encode() * 1000
            ask("HSET", key, "body", nonsense, "rev", "1")


def open_ledger_connection(kernel: Kernel) -> Callable[..., object]:
    """A connection of its own to the kernel's Redis, over which a test sends commands."""
    import redis

    path, _, number = kernel.ledger._connection.address.rpartition("/")
    return redis.Redis(unix_socket_path=path, db=int(number)).execute_command


def held_after(url: str, attack: Attack) -> int:
    """The GiB that two kernels hold on the card after this attack on their ledger `url`."""
    now, is_redis = [1e6], url.startswith("unix://")
    with pytest.MonkeyPatch.context() as patch, ends_within(HANG_SECONDS):
        kernels = [Kernel(url) for _ in range(2)]
        first, second = kernels

        def sleep(seconds: float) -> None:
            now[0] += seconds
            for kernel in kernels:
                kernel.tick()
            if is_redis:
                real_sleep(min(seconds, REGISTER_SECONDS))

        def harm(reached: str, me: Kernel, other: Kernel) -> None:
            if reached == attack.step and left:
                left.pop()
                if attack.target in KEYS_OF_REDIS:
                    harm_a_key(attack.deed, attack.target, me)
                else:
                    harm_a_file(attack.deed, attack.target, me, other)

        real_sleep = book_store.sleep
        patch.setattr(book_store, "sleep", sleep)
        patch.setattr(sqlite_page, "boottime", lambda: now[0])
        patch.setattr(recovery, "boottime", lambda: now[0])
        if is_redis:
            patch.setattr(book_store, "REGISTER_SECONDS", REGISTER_SECONDS)
        for kernel in kernels:
            kernel.tick()
        first.take("a", attack.sizes[0])
        left = [1, 2] if attack.again else [1]
        for me, other in ((first, second), (second, first)):
            me.steps = lambda reached, me=me, other=other: harm(reached, me, other)
        second.take("b", attack.sizes[1])
        first.take("c", attack.sizes[2])
        second.take("d", attack.sizes[3])
        for kernel in kernels:
            kernel.close()
    return sum(sum(kernel.held.values()) for kernel in kernels)


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """If the block does not end within `seconds`, prints where it hangs and ends this process."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def every_attack(targets: list[str], deeds: list[str] = DEEDS, seed: int = 0) -> Iterator[Attack]:
    """Every combination of target, deed and step, once and twice, with models of random sizes."""
    dice = random.Random(seed)
    for target, deed, step, again in itertools.product(targets, deeds, STEPS, (False, True)):
        sizes = tuple(dice.randint(1, LIMIT) for _ in range(4))
        yield Attack(deed, target, step, again, sizes)


@contextmanager
def a_directory() -> Iterator[Path]:
    """A new directory that another user can reach. It is removed at the end."""
    made = Path(tempfile.mkdtemp(prefix="torn-"))
    made.chmod(0o777)
    try:
        yield made
    finally:
        for place, directories, _ in os.walk(made):  # an attack may have closed some of them
            for name in directories:
                os.chmod(os.path.join(place, name), 0o700, follow_symlinks=False)
        shutil.rmtree(made, ignore_errors=True)


def as_nobody(act: Callable[[], object]) -> object:
    """Calls `act` in a forked child and returns its result. If this process is root's, the child
    becomes another user.

    File modes have no effect on root. Raises AssertionError with the child's error.
    """
    inbox, outbox = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            answer = json.dumps({"done": act()})
        except BaseException:
            answer = json.dumps({"error": traceback.format_exc()})
        try:
            os.write(outbox, answer.encode()[-60_000:])
        finally:
            os._exit(0)
    os.close(outbox)
    with open(inbox) as answers:
        said = answers.read()
    os.waitpid(pid, 0)
    found = json.loads(said or '{"error": "it said nothing"}')
    assert "error" not in found, found["error"]
    return found["done"]
