"""The threads of this package start in one step. An interrupt leaves a thread either started or not
started.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from gpu_runtime import threads
from tests.clock import PATIENCE, until


def test_it_runs_in_parallel_and_can_be_waited_for():
    ends, began = threading.Event(), threading.Event()
    running = threads.start(lambda: (began.set(), ends.wait(PATIENCE)))
    assert began.wait(PATIENCE) and not running.wait(0.01)
    ends.set()
    assert running.wait(PATIENCE) and running.wait(0), "a second wait returns at once"
    assert running.ident != threading.get_ident()


def test_short_work_takes_a_thread_that_is_free_and_keeps_nothing_of_the_work_before(monkeypatch):
    """A new thread costs more than a short call. Work that still runs never delays other work."""
    monkeypatch.setattr(threads, "_spare", [])  # not the threads of earlier tests
    first, second, ends = Work(), Work(), threading.Event()
    threads.start_short(first)
    used = first.thread()
    until(lambda: any(spare.work is None for spare in threads._spare))
    gone = weakref.ref(first)
    del first
    assert gone() is None, "the model that the work held can leave"
    threads.start_short(second)
    assert second.thread() == used
    threads.start_short(lambda: ends.wait(PATIENCE))
    third = Work()
    threads.start_short(third)
    assert third.thread(), "it runs beside the work that waits"
    ends.set()


def test_a_free_thread_ends_after_a_while(monkeypatch):
    monkeypatch.setattr(threads, "SPARE_SECONDS", 0.01)
    monkeypatch.setattr(threads, "_spare", spare := [])  # not the threads of earlier tests
    threads.start_short(work := Work())
    used = work.thread()
    until(lambda: used not in sys._current_frames())
    assert not spare


class Work:
    """Work that notes the thread it runs in."""

    def __init__(self):
        self._ran, self._thread = threading.Event(), 0

    def __call__(self):
        self._thread = threading.get_ident()
        self._ran.set()

    def thread(self):
        assert self._ran.wait(PATIENCE)
        return self._thread


@pytest.mark.thorough
def test_an_interrupt_during_its_start_leaves_it_running():
    """`threading.Thread.start` waits for the new thread. In an earlier version, an interrupt of
    that wait left a thread that never ran and a process that never ended. This happened about once
    in ten thousand presses of the stop button.
    """
    begun, ended, tried = [], [], 0
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    deadline = time.monotonic() + 3
    try:
        while tried < 1000 and time.monotonic() < deadline:
            tried += 1
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.00002 + tried % 50 * 0.000004)
                # An interrupt may be lost: in a destructor the interpreter ignores it.
                for _ in range(20):
                    begun.append(threads.start(lambda: ended.append(1)))
                signal.setitimer(signal.ITIMER_REAL, 0)
                time.sleep(0)  # a pending interrupt is raised here
            except KeyboardInterrupt:
                pass
    finally:
        signal.signal(signal.SIGALRM, old)
    assert all(running.wait(PATIENCE) for running in begun)
    assert len(ended) >= len(begun) > 0


def test_after_a_stopped_block_a_debugger_works():
    """In an earlier version the stop left a flag of Python's set, with which each function that is
    traced hangs: a breakpoint in a notebook never came after one load had taken too long.
    """
    code = """
import sys
from gpu_runtime.threads import Stoppable, Stopped
block = Stoppable()
try:
    with block:
        block.stop("it is enough")
except Stopped:
    pass
def traced(): return 1
seen = []
sys.settrace(lambda frame, event, arg: seen.append(frame.f_code.co_name))
traced()
sys.settrace(None)
assert seen == ["traced"], seen
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


@pytest.mark.parametrize("many", [0, 1, 3])
def test_works_are_done_in_parallel(many):
    """The functions run at the same time: each one waits until all others have begun."""
    all_here, done = threading.Barrier(many or 1, timeout=PATIENCE), []
    threads.side_by_side([lambda: done.append(all_here.wait())] * many)
    assert sorted(done) == list(range(many))


def test_works_are_done_one_after_the_other_if_no_thread_can_be_started(monkeypatch):
    """While the interpreter is ending, no thread can be started. The functions are then called one
    after the other.
    """

    def too_late(work):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    done = []
    monkeypatch.setattr(threads, "start", too_late)
    threads.side_by_side([lambda: done.append(1), lambda: done.append(2)])
    assert sorted(done) == [1, 2]


def test_a_module_that_another_thread_imports_counts_as_not_imported(tmp_path, monkeypatch):
    """The attributes of a module are missing until its import has ended. In an earlier version,
    `torch.nn` raised AttributeError.
    """
    (tmp_path / "slow_module.py").write_text("import builtins\nseen = builtins.look()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("builtins.look", lambda: threads.imported("slow_module"), raising=False)
    assert threads.imported("slow_module") is None
    import slow_module

    assert slow_module.seen is None
    assert threads.imported("slow_module") is slow_module
