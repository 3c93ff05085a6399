"""Every lock of a module is free in a forked child, whichever thread of the parent holds it."""

import ast
import threading
from pathlib import Path

import pytest

from gpu_runtime import threads

ROOT = Path(__file__).parents[2]
FOLDERS = ("gpu_runtime", "kernel_ext/gpu", "panels/gpu_panels")
OTHERWISE = {
    "gpu_runtime/backends/processes/engine.py": "it has a hook of its own",
    "gpu_runtime/backends/llama_cpp/worker.py": "the worker is a process that never forks",
}
LOCKS = {"Lock", "RLock", "Condition", "allocate_lock"}


def bare_locks(source: str) -> list[int]:
    """The lines of a module's top level that make a lock without registering it in `threads`."""
    if not any(f"{lock}(" in source for lock in LOCKS):
        return []
    found = []
    for node in ast.parse(source).body:
        value = getattr(node, "value", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(value, ast.Call):
            name = getattr(value.func, "attr", getattr(value.func, "id", ""))
            if name in LOCKS:
                found.append(node.lineno)
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_lock_of_a_module_is_known_to_forks(folder):
    """If the parent holds the lock at the fork, a child that needs it would wait for ever."""
    found = {
        name: lines
        for path in (ROOT / folder).rglob("*.py")
        if (lines := bare_locks(path.read_text()))
        and (name := path.relative_to(ROOT).as_posix()) not in OTHERWISE
    }
    assert found == {}, "wrap them:  threads.freed(threading.Lock())"


def test_a_bare_lock_is_found_by_the_names_of_threading():
    assert bare_locks("import threading\na = threading.Lock()\nb = f(threading.Lock())") == [2]
    assert all(hasattr(threading, name) for name in LOCKS - {"allocate_lock"})


def test_a_lock_that_nobody_uses_any_more_is_forgotten():
    """Each ledger and each journal has a lock, and a notebook may open thousands of them. So a lock
    that is no longer used must not be kept.
    """
    before = len(threads._awaited) + len(threads._freed)
    kept = [threads.awaited(threading.Lock()), threads.freed(threading.Lock())]
    assert len(threads._awaited) + len(threads._freed) == before + 2
    kept.clear()
    assert len(threads._awaited) + len(threads._freed) == before


def test_a_fork_that_began_before_the_import_ends_without_an_error():
    """A library forks in a thread while another thread imports this module: only the hooks after the fork run then."""
    thread = threading.Thread(target=threads._release)
    raised: list[object] = []
    before, threading.excepthook = threading.excepthook, raised.append
    try:
        thread.start()
        thread.join()
    finally:
        threading.excepthook = before
    assert not raised
