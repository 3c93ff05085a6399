"""A process forks while its threads use the ledger. No child hangs, and no child blocks other processes."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from gpu_runtime import Runtime, threads
from gpu_runtime.ledgers.keeper.ledger import KeeperPeek
from gpu_runtime.telemetry import journal
from gpu_runtime.threads import promptly
from tests import soak
from tests.clock import PATIENCE

from .kernels import counted, kind

DEVICES = "sim:2x24GiB,host:64GiB"
STATIC_MEMORY, STATIC_FILES = 3, 11  # SQLite's locks around its memory, and around open files


def child(act: Callable[[], object]) -> str:
    """Calls `act` in a forked child: the text of its result or error, or `hangs` after PATIENCE."""
    inbox, outbox = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(PATIENCE)
        try:
            answer = str(act())
        except BaseException as error:  # noqa: BLE001 - reported to the parent
            answer = f"{type(error).__name__}: {error}"
        os.write(outbox, answer.encode()[:4000])
        os._exit(0)
    os.close(outbox)
    with open(inbox, "rb") as answers:
        answer = answers.read().decode()
    code = os.waitpid(pid, 0)[1]
    return "hangs" if code == signal.SIGALRM else answer


@pytest.fixture
def rt(keeper) -> Iterator[Runtime]:
    with Runtime(devices=DEVICES, ledger=keeper) as opened:
        yield opened


def owners(rt: Runtime) -> set[str]:
    return set(KeeperPeek(rt._opened.ledger.directory).living())


def test_no_child_of_a_busy_parent_hangs_or_blocks_the_others(ledger, tmp_path):
    """When a child still opened the ledger at the fork, 1 of 200 hung, and all others waited for its lock."""
    found = counted("forking", ledger, 25, 1, XDG_STATE_HOME=str(tmp_path))
    assert set(found) == {"ended"} and found["ended"] >= 25


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(2, 6))
def test_no_child_of_a_busy_parent_hangs_for_long(ledger, tmp_path, seed):
    found = counted("forking", ledger, 2500, seed, XDG_STATE_HOME=str(tmp_path))
    assert set(found) == {"ended"}
    soak.add(kind(ledger), forks=found["ended"])


class Paused:
    """A thread that writes the book and pauses for a moment at one line of the ledger's code."""

    PAUSE_SECONDS = 0.02

    def __init__(self, write: Callable[[], object], line: int) -> None:
        """The thread pauses at the `line`-th executed line of `write`. With 0 it only counts the lines."""
        self.lines = 0
        self.at, self.done = threading.Event(), threading.Event()
        self._write, self._line = write, line
        self._thread = threads.start(self._run)

    def end(self) -> None:
        assert self._thread.wait(PATIENCE)

    def _run(self) -> None:
        sys.settrace(self._enter)
        try:
            self._write()
        finally:
            sys.settrace(None)
            self.at.set()

    def _enter(self, frame: FrameType, event: str, arg: object) -> Callable[..., object] | None:
        return self._step if "gpu_runtime/ledgers" in frame.f_code.co_filename else None

    def _step(self, frame: FrameType, event: str, arg: object) -> Callable[..., object]:
        if event == "line":
            self.lines += 1
            if self.lines == self._line:
                self.at.set()
                self.done.wait(self.PAUSE_SECONDS)
        return self._step


@pytest.mark.parametrize(
    "stride", [pytest.param(1, marks=pytest.mark.soak), 37], ids=["each step", "some steps"]
)
def test_a_fork_at_each_step_of_a_transaction_leaves_a_child_that_can_use_the_ledger(
    ledger, stride
):
    """Where the thread is inside SQLite, or holds a file for a moment, the fork waits."""
    with Runtime(devices=DEVICES, ledger=ledger) as rt:
        forks = fork_at_each_step(rt, stride)
    soak.add(kind(ledger), forks_at_a_step_of_a_write=forks)


def fork_at_each_step(rt: Runtime, stride: int) -> int:
    """Forks at every `stride`-th line of a write, and returns how often."""
    rt.register("m", backend="fake", size="1GiB")

    def write() -> None:
        with rt.lease("1MiB"):
            pass

    counting = Paused(write, 0)
    counting.end()
    assert counting.lines > 300
    lines = range(1, counting.lines, stride)
    for line in lines:
        writing = Paused(write, line)
        assert writing.at.wait(PATIENCE)
        answer = child(lambda: (threads.is_clean(), list(rt.status().sections) != []))
        writing.done.set()
        writing.end()
        assert answer == "(True, True)", f"forked at line {line}"
    assert list(rt.status().leases()) == []
    return len(lines)


def test_a_fork_opens_nothing_until_the_child_uses_the_runtime(rt):
    before = owners(rt)
    assert child(lambda: owners(rt) == before) == "True"
    assert child(lambda: rt.status() and owners(rt) != before) == "True"


def test_a_child_of_a_child_is_an_owner_of_its_own(rt):
    assert child(lambda: child(lambda: rt._session.me.startswith(f"{os.getpid()}."))) == "True"


def test_a_runtime_that_was_closed_stays_closed_in_a_child(rt):
    rt.close()
    assert "was closed" in child(rt.status)


def test_a_child_that_closes_the_runtime_closes_its_own(rt):
    def closes() -> str:
        rt.close()
        rt.status()
        return "it is open again"

    assert "was closed" in child(closes)
    assert rt.status().devices, "the parent's is open"


def test_a_block_that_a_child_leaves_ends_in_the_parent_only(rt):
    """Both the parent and the child leave the block. The lease belongs to the parent only."""
    block = rt.lease("1GiB")
    block.__enter__()
    assert child(lambda: block.__exit__(None, None, None)) == "None"
    assert len(list(rt.status().leases())) == 1
    block.__exit__(None, None, None)
    assert list(rt.status().leases()) == []


@pytest.mark.parametrize("which", [STATIC_MEMORY, STATIC_FILES])
def test_another_librarys_thread_inside_sqlite_at_the_fork_hangs_no_child(rt, which, monkeypatch):
    """As the thread that saves IPython's history."""
    monkeypatch.setattr(journal, "TRY_SECONDS", 0.5)
    import _sqlite3

    sqlite = ctypes.CDLL(_sqlite3.__file__)
    sqlite.sqlite3_mutex_alloc.restype = ctypes.c_void_p
    lock = ctypes.c_void_p(sqlite.sqlite3_mutex_alloc(which))
    ends, holds = threading.Event(), threading.Event()

    def inside() -> None:
        sqlite.sqlite3_mutex_enter(lock)
        holds.set()
        ends.wait(PATIENCE)
        sqlite.sqlite3_mutex_leave(lock)

    thread = threads.start(inside)
    try:
        assert holds.wait(PATIENCE)
        answer = child(rt.status)
    finally:
        ends.set()
        thread.wait(PATIENCE)
    assert answer.startswith("sim:0: "), "only the journal is in SQLite, and the child does without"


def test_locks_that_other_threads_hold_are_free_in_the_child():
    lock = threads.freed(threading.Lock())
    with lock:
        assert child(lambda: lock.acquire(timeout=PATIENCE)) == "True"
    assert lock.acquire(timeout=PATIENCE)


def test_a_child_has_nothing_to_finish_for_its_parent():
    """Its end waited up to 60 s for its parent's work, and its threads were switched ten times as often."""
    usual = sys.getswitchinterval()
    mark = object()
    threads._unfinished.add(mark)
    try:
        with promptly:
            assert child(lambda: (threads._unfinished, sys.getswitchinterval() == usual)) == (
                "(set(), True)"
            )
    finally:
        threads._unfinished.discard(mark)
    assert sys.getswitchinterval() == usual


_rt: list[Runtime] = []  # the runtime of the test below, for the functions that its workers call


def _device_ids(_: int) -> list[str]:
    return [view.device.id for view in _rt[0].status().devices]


def test_workers_of_a_pool_use_the_runtime(rt):
    """The workers of the pool are forked, as by the `multiprocessing` backend of joblib."""
    _rt[:] = [rt]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.map_async(_device_ids, range(4)).get(PATIENCE)
    _rt.clear()
    assert found == [["sim:0", "sim:1", "host"]] * 4


def test_workers_of_a_data_loader_feed_a_governed_model(rt):
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, TensorDataset

    model = torch.nn.Linear(4, 2).eval()
    rt.adopt("m", model)
    data = TensorDataset(torch.ones(16, 4))
    loader = DataLoader(data, 4, num_workers=2, multiprocessing_context="fork", timeout=PATIENCE)
    with rt.use("m") as used:
        shapes = [tuple(used(batch).shape) for _ in range(2) for (batch,) in loader]
    assert shapes == [(4, 2)] * 8
