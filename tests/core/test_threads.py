"""The threads of this package start in one step. An interrupt leaves a thread either started or not started."""

import ast
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from gpu_runtime import threads
from tests.clock import PATIENCE, finished, until


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
    until(lambda: used not in sys._current_frames() and not spare)


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


def test_what_a_cancellation_calls_is_called_once_however_late_it_was_added():
    cancelled, called = threads.Cancellation(), []
    cancelled.then(lambda: called.append("before"))
    cancelled.then(lambda: called.append("too"))
    assert called == [] and not cancelled.is_set()
    for _ in range(2):
        cancelled.set()
        assert called == ["before", "too"] and cancelled.is_set()
    cancelled.then(lambda: called.append("after"))
    assert called == ["before", "too", "after"]


def stoppable(work):
    block = threads.Stoppable()

    def run():
        with block:
            work()

    block.start(run)
    return block


def test_a_stopped_block_ends_and_keeps_the_first_reason():
    """The caller is woken by the stop itself, since a call of C code may never end."""

    def work():
        while True:
            time.sleep(0.001)

    block = stoppable(work)
    assert not block.wait(0.01) and not block.ended(0.0)
    for why in ("its time is over", "its caller left"):
        block.stop(why)
        assert block.why == "its time is over" and block.stopped_at
        assert block.wait(PATIENCE)
    assert block.ended(PATIENCE)
    with pytest.raises(threads.Stopped):
        block.result()
    block.result()  # the error is raised once


def test_a_block_that_has_not_begun_or_has_ended_is_not_stopped_and_its_error_is_raised():
    early, done = threads.Stoppable(), []

    def run():
        with early:
            done.append(1)

    early.stop("nobody wants it")
    early.start(run)
    assert early.ended(PATIENCE) and done == [] and early.why == "nobody wants it"
    late = stoppable(lambda: done.append(2))
    assert late.wait(PATIENCE) and late.ended(PATIENCE)
    late.stop("too late")
    assert (late.why, late.stopped_at, done) == ("", 0.0, [2])
    late.result()
    block = stoppable(lambda: 1 / 0)
    assert block.wait(PATIENCE) and block.ended(PATIENCE) and not block.why
    with pytest.raises(ZeroDivisionError):
        block.result()


@pytest.mark.processes
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


def test_a_thread_that_other_code_started_is_noticed():
    """Whether `threading` has started it or not; one that waits for work of ours does not count."""
    code = """
import _thread, time
from gpu_runtime import threads
answers = []
threads.start_short(lambda: answers.append(threads.only_ours()))
threads.start(lambda: answers.append(threads.only_ours())).wait()
while len(answers) < 2:
    time.sleep(0.01)
begun, over = (threads.threading.Event() for _ in range(2))
_thread.start_new_thread(lambda: begun.set() or over.wait(), ())
begun.wait()
assert answers == [True, True] and not threads.only_ours(), answers
over.set()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


@pytest.mark.parametrize("many", [0, 1, 3])
def test_works_are_done_in_parallel(many):
    """The functions run at the same time: each one waits until all others have begun."""
    all_here, done = threading.Barrier(many or 1, timeout=PATIENCE), []
    threads.side_by_side([lambda: done.append(all_here.wait())] * many)
    assert sorted(done) == list(range(many))


def test_works_are_done_one_after_the_other_if_no_thread_can_be_started(monkeypatch):
    """While the interpreter is ending, no thread can be started. The functions are then called one after the other."""

    def too_late(work):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    done = []
    monkeypatch.setattr(threads, "start", too_late)
    threads.side_by_side([lambda: done.append(1), lambda: done.append(2)])
    assert sorted(done) == [1, 2]


def test_an_interrupt_does_not_break_work_that_is_done_here_because_no_thread_can_be_started(
    monkeypatch,
):
    def too_late(work):
        raise RuntimeError("can't start new thread")

    done = []

    def work():
        done.append("begun")
        signal.raise_signal(signal.SIGINT)
        done.append("ended")

    monkeypatch.setattr(threads, "start", too_late)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        threads.uninterrupted(work)
    assert done == ["begun", "ended"]
    assert signal.getsignal(signal.SIGINT) is handler


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


HALF = """
import builtins, threading
builtins.imports.append(__name__)
if builtins.imports.count("whole.core") > 1:
    raise ImportError("cannot load module more than once per process")
for press in range(3):
    builtins.press()  # the stop button, in the middle of the import
"""


@pytest.fixture
def whole(tmp_path, monkeypatch):
    """A package that, like numpy, cannot be imported again after an import that ended half-way. The
    stop button is pressed while it is imported.
    """
    taken = threading.Event()
    waits = threads.Running.wait.__code__

    def press():
        """Presses until the main thread has taken one: while it imports, or waits for the import."""
        taken.clear()
        os.kill(os.getpid(), signal.SIGINT)
        while not taken.wait(0.01):
            os.kill(os.getpid(), signal.SIGINT)

    def stop(_, frame):
        if frame.f_code in (waits, press.__code__):
            taken.set()
            raise KeyboardInterrupt

    (tmp_path / "whole").mkdir()
    (tmp_path / "whole/__init__.py").write_text(f"from .core import *\n{HALF}")
    (tmp_path / "whole/core.py").write_text(f"{HALF}\nvalue = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("builtins.imports", [], raising=False)
    monkeypatch.setattr("builtins.press", press, raising=False)
    old = signal.signal(signal.SIGINT, stop)
    yield
    signal.signal(signal.SIGINT, old)
    for name in [name for name in sys.modules if name.partition(".")[0] == "whole"]:
        del sys.modules[name]


def test_an_import_is_whole_however_often_the_stop_button_is_pressed(whole):
    """In an earlier version the first table, interrupted, left pandas half imported: each table and
    the user's own `import pandas` failed until the kernel was restarted.
    """
    with pytest.raises(KeyboardInterrupt):
        threads.import_whole("whole")
    import whole

    assert whole.value == 7


def test_without_it_the_interrupted_import_never_works_again(whole):
    """This shows that the package of these tests breaks as numpy does."""
    with pytest.raises(KeyboardInterrupt):
        import whole
    with pytest.raises(ImportError, match="more than once"):
        import whole  # noqa: F401


def test_an_import_in_a_thread_waits_for_no_caller_and_reports_no_error(tmp_path, monkeypatch):
    """A module of the user's may load a model while it is imported. A thread that imports this module
    again would wait for the import, and the import for the thread.
    """
    (tmp_path / "around.py").write_text("import builtins\nbuiltins.within()\n")
    (tmp_path / "inner.py").write_text("import around\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("builtins.within", lambda: threads.import_whole("inner"), raising=False)
    import around  # noqa: F401

    threads.import_whole("no_such_library")


# What `%load_ext gpu` or a kernel has imported before any function of ours runs.
AT_ONCE = {"IPython", "fastapi", "msgspec", "tomli", "zmq"}
# In these files functions run in a program of their own, or in threads. No interrupt reaches them.
APART = (
    "serving/",
    "backends/engines/diffusers_app.py",
    "backends/llama_cpp/",
    "threads.py",
    "hub.py",
)


@pytest.mark.thorough
def test_every_import_of_a_library_in_a_function_is_whole():
    """Each names the library to `import_whole` before its import statement."""
    root = Path(__file__).parents[2]
    bare = []
    for folder in ("gpu_runtime", "kernel_ext", "panels"):
        for path in (root / folder).rglob("*.py"):
            if path.relative_to(root / folder).as_posix().startswith(APART):
                continue
            for function in ast.walk(ast.parse(path.read_text())):
                if isinstance(function, ast.FunctionDef):
                    bare += [f"{path.name}: {name}" for name in imported_bare(function)]
    assert bare == []


def imported_bare(function):
    """The libraries that `function` imports without `import_whole`."""
    nodes = list(ast.walk(function))
    whole = {
        node.args[0].value.partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "import_whole"
        and isinstance(node.args[0], ast.Constant)
    }
    found = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    found += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    known = whole | AT_ONCE | {"gpu_runtime", "gpu_panels"} | sys.stdlib_module_names
    return {name.partition(".")[0] for name in found} - known


# -- two threads in every order --------------------------------------------------------------------
@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.parametrize("case", ["Collections", "Writes", "UseAndMove"])
def test_two_threads_keep_the_law_in_every_order(case):
    """In a process of its own, because frontrun replaces all locks of a process."""
    pytest.importorskip("frontrun", reason="frontrun is for Linux")
    frontrun = Path(sys.executable).with_name("frontrun")
    done = finished([frontrun, sys.executable, "-m", "tests.interleavings", case])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "interleavings" in done.stdout
