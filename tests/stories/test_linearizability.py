"""The answers of the book, explained: the operations in the order of their revisions give the same answers.

Processes write each operation to a log, with its begin and end on the clock that all processes share.
They and the keeper are killed and stopped meanwhile. `problem` then looks for the order.

A page is known by a number: the sum of one number for each section, for the tickets, and for the facts
of all owners. A write is known by the numbers that it replaces. No two writes have the same, since each
counts on in its owner's section.

python -m tests.stories.test_linearizability URL DIRECTORY OPERATIONS SEED
"""

import contextlib
import hashlib
import itertools
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gpu_runtime.errors import LedgerRefused
from gpu_runtime.facts import Book, Lease, Phase, Section, Share
from gpu_runtime.files import child_environment
from gpu_runtime.ledgers.keeper import ledger as keeper_ledger
from gpu_runtime.ledgers.keeper.core import Put, Refused, Written
from gpu_runtime.ledgers.keeper.wire import SERVER
from gpu_runtime.ledgers.pieces import Pieces, encode
from tests import soak
from tests.clock import PATIENCE, scaled
from tests.ledgers.conftest import GIB, ticket

from .kernels import counted

CLIENTS, THREADS = 4, 2
LIMIT_GIB = 12
ATTACKS = ("kill client", "kill keeper", "stop client", "kill client", "kill keeper", "stop keeper")
# What became of a write. MAYBE: no answer has come, so it happened once or not at all. ONCE: it happened, and the
# page with it is not known, because a keeper was replaced before it answered.
WRITTEN, ONCE, MAYBE, NEVER, REFUSED = "written", "once", "maybe", "never", "refused"
NO_END = 1 << 62


class Read(msgspec.Struct, array_like=True, tag=True):
    """A page that somebody has seen; a write has seen the one that it was decided on."""

    begin: int  # nanoseconds of the monotonic clock
    end: int
    revision: int
    page: int
    is_base: bool = False


class Write(msgspec.Struct, array_like=True, tag=True):
    """A message to the keeper, decided on the page `base`."""

    begin: int
    number: int
    base: int
    change: dict[str, tuple[int, int]]  # the numbers that it replaces, and with which; 0: absent
    releases: bool = (
        False  # it claims no bytes and changes nothing of others: an older page may be its base
    )
    fate: str = MAYBE
    end: int = NO_END
    revision: int = 0  # 0: not known

    @property
    def gain(self) -> int:
        return sum(new - old for old, new in self.change.values())


# -- the checker


def problem(reads: Iterable[Read], writes: Iterable[Write]) -> str:
    """Why no order of the operations explains their answers; empty if one does.

    The writes whose revision is not known get one, if a page shows them.
    """
    known = [write for write in writes if write.fate == WRITTEN]
    lost = [write for write in writes if write.fate in (MAYBE, ONCE)]
    used = {write.revision for write in known}
    if len(used) < len(known):
        twice = Counter(write.revision for write in known).most_common(1)
        return f"two writes have one revision: {twice}"
    state: dict[str, int] = {}
    page = seen_at = claimed_at = 0
    for one in sorted([*known, *reads], key=lambda one: (one.revision, isinstance(one, Read))):
        found: Iterable[Write] | None = ()
        if isinstance(one, Write):
            found = [one]
        elif one.page != page:
            could = [
                write
                for write in lost
                if write.begin < one.end
                and all(state.get(key, 0) == old for key, (old, _) in write.change.items())
            ]
            some = (found for n in (1, 2, 3) for found in itertools.combinations(could, n))
            found = next((f for f in some if page + sum(w.gain for w in f) == one.page), None)
            if found is None:
                return f"no writes make the page that was seen: {one}"
        for write in found:
            if not write.revision:
                lost.remove(write)
                free = range(max(seen_at, write.base) + 1, one.revision + 1)
                write.revision = next((n for n in free if n not in used), 0)
                used.add(write.revision)
            if write.revision <= write.base:
                return f"it has no revision after its base: {write}"
            if any(state.get(key, 0) != old for key, (old, _) in write.change.items()):
                return f"it replaces what it had not seen: {write}"
            if not write.releases and write.base < claimed_at:
                return f"others wrote as revision {claimed_at} what it had not seen: {write}"
            state.update({key: new for key, (_, new) in write.change.items()})
            page += write.gain
            if not write.releases:
                claimed_at = write.revision
        if isinstance(one, Read):
            seen_at = one.revision
    if missing := [write for write in lost if write.fate == ONCE]:
        return f"no page shows a write that was answered: {missing[0]}"
    done = [*reads, *(write for write in writes if write.revision)]
    ended = sorted((one.end, one.revision) for one in done)
    newest = place = 0
    for one in sorted(done, key=lambda one: one.begin):
        while place < len(ended) and ended[place][0] < one.begin:
            newest = max(newest, ended[place][1])
            place += 1
        if one.revision < newest + isinstance(one, Write):
            return f"it began after revision {newest} was answered: {one}"
    return ""


A1, A2, B1 = {"a": (0, 1)}, {"a": (1, 2)}, {"b": (0, 10)}
FIRST = Write(0, 1, 0, A1, fate=WRITTEN, end=10, revision=1)


def second(change: dict[str, tuple[int, int]] = A2, **more: Any) -> Write:
    """A write after FIRST, from 20 to 30."""
    usual: dict[str, Any] = {"base": 1, "fate": WRITTEN, "end": 30, "revision": 2}
    return Write(20, 2, change=change, **usual | more)


SECOND = second()
THIRD = Write(40, 3, 1, {"c": (0, 100)}, True, WRITTEN, 50, 5)
LOST, DONE, DENIED = (second(fate=fate, revision=0) for fate in (MAYBE, ONCE, REFUSED))
# The reads, and the writes after FIRST.
GOOD: dict[str, tuple[list[Read], list[Write]]] = {
    "one write": ([], []),
    "two writes, then a read": ([Read(40, 50, 2, 2)], [SECOND]),
    "a read beside the write, of the page before": ([Read(25, 26, 1, 1)], [SECOND]),
    "a read beside the write, of its page": ([Read(25, 26, 2, 2)], [SECOND]),
    "pages of the keeper's own": ([Read(40, 50, 9, 2)], [second(revision=5)]),
    "no answer, and not written": ([Read(40, 50, 2, 1)], [LOST]),
    "no answer, and written": ([Read(40, 50, 2, 2)], [LOST]),
    "written for a keeper that was killed": ([Read(40, 50, 3, 2)], [DONE]),
    "refused": ([Read(40, 50, 2, 1)], [DENIED]),
    "a release with an older base": ([], [second(B1, base=0, releases=True)]),
    "a release after a claim": ([], [SECOND, THIRD]),
}
LOST_UPDATE = second({"a": (0, 2)}, base=0, releases=True)
COMES_BACK = [Read(25, 26, 2, 2), Read(40, 50, 1, 1)]
BAD: dict[str, tuple[list[Read], list[Write], str]] = {
    "a lost write": ([Read(40, 50, 2, 1)], [SECOND], "no writes make"),
    "a stale read": ([Read(40, 50, 1, 1)], [SECOND], "it began after revision 2"),
    "a page that comes back": (COMES_BACK, [SECOND], "it began after revision 2"),
    "a revision used twice": ([], [second(revision=1)], "one revision"),
    "a real-time inversion": ([], [second(revision=7), THIRD], "it began after revision 7"),
    "an update that is lost": ([], [LOST_UPDATE], "had not seen"),
    "a claim on an older page": ([], [second(B1, base=0)], "others wrote as revision 1"),
    "a refused write that happened": ([Read(40, 50, 2, 2)], [DENIED], "no writes make"),
    "an answered write that no page shows": ([Read(40, 50, 3, 1)], [DONE], "that was answered"),
    "a write that happens twice": (
        [Read(40, 50, 2, 2), Read(60, 70, 4, 3)],
        [LOST],
        "no writes make",
    ),
    "a write that is seen late": (
        [Read(40, 50, 2, 1), Read(60, 70, 3, 2)],
        [DONE],
        "it began after revision 3",
    ),
    "a page before its write": ([Read(12, 15, 2, 2)], [LOST], "no writes make"),
    "no revision for a write": (
        [Read(11, 12, 1, 1), Read(40, 50, 1, 2)],
        [LOST],
        "no revision after its base",
    ),
}


def problem_after_first(reads: list[Read], writes: list[Write]) -> str:
    """The problem of these operations after FIRST. The checker changes its writes, so it gets copies."""
    return problem(reads, [replace(write) for write in (FIRST, *writes)])


@pytest.mark.parametrize("kind", GOOD)
def test_a_history_that_can_be_explained(kind):
    assert problem_after_first(*GOOD[kind]) == ""


@pytest.mark.parametrize("kind", BAD)
def test_a_history_that_nothing_explains(kind):
    reads, writes, why = BAD[kind]
    assert why in problem_after_first(reads, writes)


# -- the recorded ledger


def number_of(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(encode(value), digest_size=8).digest(), "big")


def numbers(book: Book) -> dict[str, int]:
    """The numbers whose sum stands for the page with this `book`. An empty book has none."""
    facts = replace(book, sections={}, tickets=())
    found = {id: number_of(section) for id, section in book.sections.items()}
    found["tickets"] = number_of(book.tickets) if book.tickets else 0
    found["facts"] = number_of(facts) if facts != Book() else 0
    return found


class Recorded(keeper_ledger.KeeperLedger):
    """A ledger that writes what it does to a log. A killed process has written all that it had sent."""

    def __init__(self, url: str, log: Path) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._mine = threading.local()
        super().__init__(Path(url.removeprefix("keeper://")), patience_seconds=PATIENCE)

    def _note(self, one: Read | Write) -> None:
        os.write(self._log, msgspec.json.encode(one) + b"\n")

    def read(self) -> Book:
        begin = time.monotonic_ns()
        pieces = self._current()
        end = time.monotonic_ns()
        self._note(Read(begin, end, pieces.revision, sum(numbers(pieces.book).values())))
        return pieces.book

    def transact(self, decide: Any) -> Any:
        self._mine.begin, self._mine.write = time.monotonic_ns(), None
        answer = super().transact(decide)
        self._ended(ONCE)
        return answer

    def _put(self, number: int, old: Pieces, new: Book) -> Put:
        self._ended(NEVER)  # the write before, whose answer was lost, since it is decided again
        put = super()._put(number, old, new)
        me, before, after = self.owner.id, numbers(old.book), numbers(new)
        change = {
            key: (before.get(key, 0), after.get(key, 0))
            for key in before | after
            if before.get(key, 0) != after.get(key, 0)
        }
        releases = change.keys() == {me} and me in before
        if releases:
            was, claims = old.book.sections[me].claims(), new.sections[me].claims()
            releases = claims.get("sim:0", 0) <= was.get("sim:0", 0)
        begin = self._mine.begin
        end = time.monotonic_ns()
        self._note(Read(begin, end, old.revision, sum(before.values()), is_base=True))
        self._mine.write = Write(begin, number, old.revision, change, releases)
        self._note(self._mine.write)
        return put

    def _ask(self, message: Any) -> Any:
        reply = super()._ask(message)
        if isinstance(message, Put):
            fate = {Written: WRITTEN, Refused: REFUSED}.get(type(reply), NEVER)
            self._ended(fate, getattr(reply, "revision", 0))
        return reply

    def _ended(self, fate: str, revision: int = 0) -> None:
        write = self._mine.write
        if write is not None and write.fate == MAYBE:
            write.fate, write.revision, write.end = fate, revision, time.monotonic_ns()
            self._note(write)


def history_in(directory: Path) -> tuple[list[Read], list[Write]]:
    """What the logs in `directory` have. The last line of a killed process may be cut off."""
    reads: list[Read] = []
    writes: list[Write] = []
    decode = msgspec.json.Decoder(Read | Write).decode
    for log in sorted(directory.glob("*.log")):
        last: dict[int, Write] = {}  # each is noted twice: when it is sent, and when it has ended
        for line in log.read_bytes().split(b"\n")[:-1]:
            one = decode(line)
            if isinstance(one, Read):
                reads.append(one)
            else:
                last[one.number] = one
        writes += last.values()
    return reads, writes


# -- the processes


def act(ledger: Recorded, dice: random.Random, number: int) -> None:
    """One operation, chosen at random."""
    deed = dice.choices(
        ["read", "count", "claim", "fact", "ticket", "reap", "too much"], [60, 10, 8, 8, 8, 4, 2]
    )[0]
    if deed == "read":
        ledger.read()
        return
    me = ledger.owner.id

    def arriving(gib: int) -> Lease:
        share = Share("sim:0", gib * GIB)
        return Lease(me, f"model{number}", target=(share,), phase=Phase.ARRIVING)

    def decide(book: Book) -> tuple[Book, None]:
        mine = book.sections.get(me) or Section(ledger.owner)
        mine = replace(mine, counts={"n": number})
        if deed == "claim":
            is_full = sum(len(section.leases) for section in book.sections.values()) >= LIMIT_GIB
            more = () if is_full else (*mine.leases, arriving(1))
            mine = replace(mine, leases=more)
        if deed == "too much":
            mine = replace(mine, leases=(arriving(LIMIT_GIB + 1),))
        book = book.with_section(mine)
        if deed == "fact":
            book = replace(book, counts={"n": book.counts.get("n", 0) + 1})
        if deed == "ticket":
            others = tuple(one for one in book.tickets if one.owner != me)
            own = () if len(others) < len(book.tickets) else (ticket(ledger, f"{me}#{number}"),)
            book = replace(book, tickets=(*others, *own))
        if deed == "reap":
            left = book.owner_ids() - ledger.dead(book)
            book = replace(
                book,
                sections={id: one for id, one in book.sections.items() if id in left},
                tickets=tuple(one for one in book.tickets if one.owner in left),
            )
        return book, None

    with pytest.raises(LedgerRefused) if deed == "too much" else contextlib.nullcontext():
        ledger.transact(decide)


def client(url: str, log: Path, seed: str, done: memoryview, slot: int, wanted: int) -> None:
    """Acts in two threads until all clients together have done `wanted` operations. `done` counts them."""
    ledger, counter = Recorded(url, log), itertools.count(1)

    def work(thread: int) -> None:
        dice = random.Random(f"{seed} {thread}")
        while sum(done) < wanted:
            act(ledger, dice, next(counter))
            done[THREADS * slot + thread] += 1

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    ledger.close()


# A keeper that ends between a new page and the answer to the write, at each revision that is a multiple of EVERY.
MORTAL = """
import os, signal, sys
from gpu_runtime.ledgers.keeper import server

def publish(self, publish=server.Server._publish):
    before = self._published
    publish(self)
    if before < self._published and self._published % EVERY == 0:
        os.kill(os.getpid(), signal.SIGKILL)

server.Server._publish = publish
sys.exit(server.main(sys.argv[1:]))
"""


def mortal(every: int) -> Callable[..., subprocess.Popen[bytes]]:
    """What starts such keepers, in place of `spawn` of `ledgers/keeper/wire.py`."""

    def spawn(arguments: list[str], log: int, **inherited: int) -> subprocess.Popen[bytes]:
        names = {f"GPU_KEEPER_{name}": str(number) for name, number in inherited.items()}
        program = MORTAL.replace("EVERY", str(every))
        return subprocess.Popen(
            [sys.executable, "-c", program, SERVER, *arguments], cwd="/", stdin=subprocess.DEVNULL,
            env={**child_environment(), **names}, stdout=log, stderr=log,
            pass_fds=list(inherited.values()), start_new_session=True,
        )  # fmt: skip

    return spawn


def run(url: str, directory: Path, wanted: int, attacks: int, seed: int) -> Counter[str]:
    """Makes the history of `wanted` operations in `directory`. Returns how many of which attacks it had."""
    keeper_ledger.HANGING_SECONDS = scaled(0.5)  # a stopped keeper is replaced sooner
    keeper_ledger.spawn = mortal(wanted // attacks)
    dice, serial = random.Random(seed), itertools.count()
    done = memoryview(mmap.mmap(-1, 8 * CLIENTS * THREADS)).cast("q")
    auditor = Recorded(url, directory / "auditor.log")  # the book stays, whoever is killed
    auditor.transact(
        lambda book: (
            replace(book.with_section(Section(auditor.owner)), limits={"sim:0": LIMIT_GIB * GIB}),
            None,
        )
    )

    def start(slot: int) -> int:
        life = next(serial)
        pid = os.fork()
        if pid == 0:
            try:
                client(url, directory / f"{life}.log", f"{seed} {life}", done, slot, wanted)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        return pid

    pids = [start(slot) for slot in range(CLIENTS)]
    made: Counter[str] = Counter()
    for turn in itertools.count(1):
        while sum(done) < min(wanted, turn * wanted // attacks):
            if any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids):
                done[0] = wanted  # all end: one has failed, or has seen that all is done
            time.sleep(dice.uniform(0, 0.01))
        if sum(done) >= wanted:
            break
        attack, slot = ATTACKS[turn % len(ATTACKS)], dice.randrange(CLIENTS)
        made[attack] += 1
        auditor.read()
        if attack == "kill client":
            os.kill(pids[slot], signal.SIGKILL)
            assert os.waitpid(pids[slot], 0)[1] in (0, signal.SIGKILL), "a client had failed"
            pids[slot] = start(slot)
        elif attack == "stop client":
            os.kill(pids[slot], signal.SIGSTOP)
            time.sleep(0.05)
            os.kill(pids[slot], signal.SIGCONT)
        else:
            number = signal.SIGKILL if attack == "kill keeper" else signal.SIGSTOP
            with contextlib.suppress(ProcessLookupError):  # it hung, and somebody replaced it
                os.kill(auditor._wire.keeper_pid, number)
    assert not any(os.waitpid(pid, 0)[1] for pid in pids), "a client failed"
    auditor.read()
    auditor.close()
    return made


@pytest.mark.parametrize(
    "operations, attacks",
    [(4000, 12), pytest.param(10**6, 600, marks=[pytest.mark.soak, pytest.mark.timeout(0)])],
    ids=["some", "a million"],
)
def test_some_order_explains_all_answers(keeper, tmp_path, operations, attacks):
    done = counted("test_linearizability", keeper, tmp_path, operations, attacks, 1)
    assert done["operations"] >= operations, done
    assert done["kill keeper"] and done["kill client"], done
    assert done["writes known from the next keeper"], done
    soak.add("keeper", **{f"{name} of a history": count for name, count in done.items()})


if __name__ == "__main__":
    url, directory, *words = sys.argv[1:]
    operations, attacks, seed = map(int, words)
    made = run(url, Path(directory), operations, attacks, seed)
    reads, writes = history_in(Path(directory))
    if why := problem(reads, writes):
        sys.exit(why)
    fates = Counter(write.fate for write in writes)
    answered = fates[WRITTEN] + fates[ONCE]
    counts = {
        "operations": sum(not read.is_base for read in reads) + answered + fates[REFUSED],
        "writes": answered,
        "refusals": fates[REFUSED],
        "writes known from the next keeper": fates[ONCE],
        "writes without an answer": fates[MAYBE],
        "of these done": sum(write.fate == MAYBE and write.revision > 0 for write in writes),
        **made,
    }
    print(json.dumps(counts))
