"""Threads of our own: started in one go, so that an interrupt finds them either there or not."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from gpu_runtime import threads


def test_it_runs_beside_and_can_be_waited_for():
    ends, began = threading.Event(), threading.Event()
    running = threads.start(lambda: (began.set(), ends.wait(20)))
    assert began.wait(20) and not running.wait(0.01)
    ends.set()
    assert running.wait(20) and running.wait(0), "and more than once"
    assert running.ident != threading.get_ident()


def test_an_interrupt_while_it_is_started_leaves_it_running():
    """`threading.Thread.start`, struck in its wait for the new thread, left a thread that never ran and a process that
    never ended: one in some ten thousand presses of the stop button."""
    begun, ended, tried = [], [], 0
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    deadline = time.monotonic() + 3
    try:
        while tried < 1000 and time.monotonic() < deadline:
            tried += 1
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.00002 + tried % 50 * 0.000004)
                for _ in range(
                    20
                ):  # an interrupt may be lost: in a destructor the interpreter passes over it
                    begun.append(threads.start(lambda: ended.append(1)))
                signal.setitimer(signal.ITIMER_REAL, 0)
                time.sleep(0)  # what has struck by now strikes here
            except KeyboardInterrupt:
                pass
    finally:
        signal.signal(signal.SIGALRM, old)
    assert all(running.wait(20) for running in begun)
    assert len(ended) >= len(begun) > 0


@pytest.mark.parametrize("many", [0, 1, 3])
def test_works_are_done_side_by_side(many):
    """Each of these waits for all others."""
    all_here, done = threading.Barrier(many or 1, timeout=20), []
    threads.side_by_side([lambda: done.append(all_here.wait())] * many)
    assert sorted(done) == list(range(many))


def test_works_are_done_one_after_the_other_where_it_is_too_late_for_threads(monkeypatch):
    """While the interpreter ends none can be started."""

    def too_late(work):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    done = []
    monkeypatch.setattr(threads, "start", too_late)
    threads.side_by_side([lambda: done.append(1), lambda: done.append(2)])
    assert sorted(done) == [1, 2]
