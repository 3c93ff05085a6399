"""Anything that could run while a notebook is parked, or that has addresses of its memory, is a
reason not to park the notebook.

`tests/stories/test_parking.py` has some of these cases in a real kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import panel as pn
import pytest
import torch
import zmq
from gpu import obstacles
from tornado.ioloop import IOLoop, PeriodicCallback
from zmq.utils.garbage import GarbageCollector

import gpu_runtime
from gpu_runtime.devices import drivers


class Model:
    def forward(self):
        """What a callback of the user calls."""


@contextlib.contextmanager
def kernel(**more):
    """A kernel with a loop of its own, which does not run."""
    io_loop = IOLoop(make_current=False)
    try:
        yield SimpleNamespace(io_loop=io_loop, eventloop=None, **more)
    finally:
        io_loop.close()


LATER = "a callback is scheduled (call_later)"
READER = "a callback waits for a file or a socket (add_reader)"
CALLBACKS = {
    "a function": lambda: None,
    "a method": Model().forward,
    "a method of a tensor": torch.ones(1).sum,
    "a partial": partial(partial, Model().forward),
    "an object": partial(map, print),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_of_the_user_is_found_however_it_is_scheduled(name):
    callback = CALLBACKS[name]
    with kernel() as one:
        assert obstacles.why_not_loop(one) == ""
        handle = one.io_loop.asyncio_loop.call_later(600, callback)
        assert obstacles.why_not_loop(one) == LATER
        handle.cancel()
        assert obstacles.why_not_loop(one) == ""
        handle = one.io_loop.call_later(600, callback)  # tornado wraps the function
        assert obstacles.why_not_loop(one) == LATER
        one.io_loop.remove_timeout(handle)
        assert obstacles.why_not_loop(one) == ""


def test_a_periodic_callback_of_the_user_is_found():
    with kernel() as one:
        periodic = PeriodicCallback(lambda: None, 1000)
        handle = one.io_loop.call_later(600, periodic._run)
        assert obstacles.why_not_loop(one) == LATER
        one.io_loop.remove_timeout(handle)
        one.io_loop.call_later(600, PeriodicCallback(one.io_loop.stop, 1000)._run)
        assert obstacles.why_not_loop(one) == ""  # a function of tornado runs no code of the user


@pytest.mark.parametrize("of", ["asyncio", "tornado"])
def test_a_callback_that_waits_for_a_socket_is_found(of):
    ours, theirs = socket.socketpair()
    with ours, theirs, kernel() as one:
        if of == "asyncio":
            one.io_loop.asyncio_loop.add_reader(ours, lambda: None)
        else:
            one.io_loop.add_handler(ours, lambda fd, events: None, IOLoop.READ)
        assert obstacles.why_not_loop(one) == READER
        if of == "asyncio":
            one.io_loop.asyncio_loop.remove_reader(ours)
        else:
            one.io_loop.remove_handler(ours)
        assert obstacles.why_not_loop(one) == ""


def test_a_task_and_a_gui_are_named():
    async def training():
        await asyncio.sleep(600)

    with kernel() as one:
        loop = one.io_loop.asyncio_loop
        task = loop.create_task(training())
        assert obstacles.why_not_loop(one).startswith("an asyncio task is pending (")
        assert "training" in obstacles.why_not_loop(one)
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        assert obstacles.why_not_loop(one) == ""
        one.eventloop = print
        assert obstacles.why_not_loop(one) == "a GUI event loop runs its callbacks (%gui)"


def test_an_idle_subshell_does_not_prevent_parking():
    """JupyterLab opens one for widgets, such as the progress bar of tqdm. The user's code in its loop is named."""
    shells = SimpleNamespace(list_subshell=lambda: ["1"], _cache={})
    with kernel(shell_channel_thread=SimpleNamespace(_manager=shells)) as one, kernel() as two:
        assert (
            obstacles.why_not_loop(one) == "a subshell is open"
        )  # an unknown version of ipykernel
        shells._cache["1"] = two
        assert obstacles.why_not_loop(one) == ""
        handle = two.io_loop.asyncio_loop.call_later(600, Model().forward)
        assert obstacles.why_not_loop(one) == f"{LATER}, in a subshell"
        handle.cancel()
        assert obstacles.why_not_loop(one) == ""


@pytest.mark.parametrize("of_panel", [True, False])
def test_a_task_that_repeats_a_function_of_panel_does_not_prevent_parking(of_panel):
    """The first click in `%gpu console` starts such a task. Then the notebook could not be parked any more."""
    callback = pn.state._cleanup_busy_counter if of_panel else Model().forward

    async def begin():
        repeats = pn.io.callbacks.PeriodicCallback(
            callback=callback, session_scoped=False, period=600_000
        )
        repeats.start()
        await asyncio.sleep(0)
        return repeats

    with kernel() as one:
        loop = one.io_loop.asyncio_loop
        repeats = loop.run_until_complete(begin())
        named = "an asyncio task is pending (PeriodicCallback._async_repeat)"
        assert obstacles.why_not_loop(one) == ("" if of_panel else named)
        repeats.stop()
        loop.run_until_complete(asyncio.sleep(0))
        assert obstacles.why_not_loop(one) == ""


def _timer(over):
    return threading.Timer(600, print)


def _waits_with_a_limit(over):
    return threading.Thread(target=over.wait, args=(600,), name="logs")


def _runs_a_loop(over):
    loop = asyncio.new_event_loop()

    async def wait():
        while not over.is_set():
            await asyncio.sleep(0.01)

    return threading.Thread(target=lambda: loop.run_until_complete(wait()), name="loop")


def _waits_without_a_limit(over):
    return threading.Thread(target=over.wait, name="waits")


def _consumer(over):
    return threading.Thread(target=queue.Queue().get, name="consumer", daemon=True)


@pytest.mark.parametrize(
    "make, prevents",
    [
        (_timer, True),
        (_waits_with_a_limit, True),
        (_runs_a_loop, True),
        (_waits_without_a_limit, False),
        (_consumer, False),
    ],
)
def test_a_thread_that_will_run_by_itself_is_named(make, prevents):
    """A thread that waits for another thread without a limit runs only if a cell gives it work."""
    over = threading.Event()
    before = set(obstacles._threads())
    thread = make(over)
    thread.start()
    try:
        while not obstacles._threads()[thread.ident].rests:
            pass
        main = threading.main_thread().ident
        if prevents:
            assert why_not_threads_but(before, main) == f"a thread of its own runs ({thread.name})"
        else:
            assert why_not_threads_but(before, main) == ""
    finally:
        over.set()
        getattr(thread, "cancel", print)()
        if not thread.daemon:
            thread.join()


def why_not_threads_but(before: set[int], main: int | None) -> str:
    """The obstacle that the threads are, without the threads that other tests have left running."""
    every = obstacles._threads

    def new():
        return {ident: found for ident, found in every().items() if ident not in before}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(obstacles, "_threads", new)
        return obstacles.why_not_threads(main)


def test_an_idle_pool_does_not_prevent_parking():
    before = set(obstacles._threads())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        [ident] = obstacles._threads().keys() - before
        while not obstacles._threads()[ident].is_idle:
            pass
        assert why_not_threads_but(before, None) == ""


def test_a_thread_of_the_debugger_does_not_prevent_parking(monkeypatch):
    """debugpy hides these threads. A notebook whose debugger was on could not be parked."""
    monkeypatch.setattr(threading, "enumerate", list)
    over = threading.Event()
    thread = threading.Thread(target=over.wait, args=(600,))
    thread.is_pydev_daemon_thread = True
    before = set(obstacles._threads())
    thread.start()
    try:
        assert why_not_threads_but(before, None) == ""
    finally:
        over.set()
        thread.join()


def test_the_thread_that_zmq_starts_for_a_large_output_does_not_prevent_parking():
    """ZeroMQ sends a message of 64 KiB or more without a copy, and starts a thread that frees its bytes.

    A notebook that had displayed a plot could never be parked again. A parked notebook that displayed
    the console could not get its memory back.
    """
    collector = GarbageCollector(zmq.Context())
    before = set(obstacles._threads())
    collector.start()
    try:
        [ident] = obstacles._threads().keys() - before
        while obstacles._threads()[ident].place != ("garbage.py", "run"):
            pass
        assert why_not_threads_but(before, None) == ""
        assert obstacles.not_at_rest({threading.get_ident(), *before}) == ""
    finally:
        collector.stop()


@pytest.mark.parametrize("name", obstacles.OTHER_LIBRARIES)
def test_a_library_that_may_keep_addresses_is_named(monkeypatch, name):
    for other in obstacles.OTHER_LIBRARIES:
        monkeypatch.delitem(sys.modules, other, raising=False)
    assert obstacles.why_not_modules() == ""
    monkeypatch.setitem(sys.modules, name, sys)
    assert obstacles.why_not_modules() == f"{name} is loaded, which may keep addresses of its own"


def test_a_process_group_is_named(monkeypatch):
    for other in obstacles.OTHER_LIBRARIES:
        monkeypatch.delitem(sys.modules, other, raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert obstacles.why_not_modules() == "a process group is open (torch.distributed)"


def test_the_thread_that_calls_the_driver_keeps_no_kernel():
    """`%gpu doctor` starts it, and a card's driver is called in it. It waits for its next call for ever."""
    before = set(obstacles._threads())
    made = drivers._DriverThread()
    answer: queue.SimpleQueue[int] = queue.SimpleQueue()
    made.calls.put(lambda: answer.put(7))
    assert answer.get(timeout=10) == 7
    assert why_not_threads_but(before, None) == ""


def test_every_thread_of_ours_is_known_as_ours():
    """A thread that is started in another way keeps a notebook's memory on the card."""
    in_helpers = {"telemetry/sampler.py", "backends/llama_cpp/worker.py"}  # processes of their own
    package = Path(gpu_runtime.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "threading.Thread(" in path.read_text()
    }
    assert found <= in_helpers
