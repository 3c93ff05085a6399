"""Anything that could run while a notebook is parked, or that has addresses of its memory, is a
reason not to park the notebook.

`tests/stories/test_parking.py` has some of these cases in a real kernel.
"""

import asyncio
import contextlib
import datetime
import gc
import os
import queue
import signal
import socket
import socketserver
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
from gpu_runtime import other_libraries
from gpu_runtime.devices import drivers
from gpu_runtime.units import MIB
from tests.clock import PATIENCE, finished, until


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
HERE = __name__
CALLBACKS = {
    "a function": (lambda: None, f"the function {HERE}.<lambda>"),
    "a method": (Model().forward, f"the method {HERE}.Model.forward"),
    "a method of a tensor": (torch.ones(1).sum, "the method torch.Tensor.sum"),
    "a partial": (partial(partial, Model().forward), "the class functools.partial"),
    "an object": (partial(map, print), "the class builtins.map"),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_of_the_user_is_found_however_it_is_scheduled(name):
    callback, described = CALLBACKS[name]
    with kernel() as one:
        assert obstacles.why_not_loop(one) == ""
        handle = one.io_loop.asyncio_loop.call_later(600, callback)
        assert obstacles.why_not_loop(one).startswith(f"{LATER}: {described}")
        handle.cancel()
        assert obstacles.why_not_loop(one) == ""
        handle = one.io_loop.call_later(600, callback)  # tornado wraps the function
        assert obstacles.why_not_loop(one).startswith(f"{LATER}: {described}")
        one.io_loop.remove_timeout(handle)
        assert obstacles.why_not_loop(one) == ""
        one.io_loop.asyncio_loop.call_soon(callback)  # it may repeat itself for ever
        assert obstacles.why_not_loop(one).startswith("a callback is due (call_soon): ")


def test_a_periodic_callback_of_the_user_is_found():
    with kernel() as one:
        periodic = PeriodicCallback(lambda: None, 1000)
        handle = one.io_loop.call_later(600, periodic._run)
        assert obstacles.why_not_loop(one).startswith(LATER)
        one.io_loop.remove_timeout(handle)
        one.io_loop.call_later(600, PeriodicCallback(one.io_loop.stop, 1000)._run)
        assert obstacles.why_not_loop(one) == ""  # the kernel's loop runs no code of the user


@pytest.mark.parametrize("of", ["asyncio", "tornado"])
def test_a_callback_that_waits_for_a_socket_is_found(of):
    ours, theirs = socket.socketpair()
    with ours, theirs, kernel() as one:
        if of == "asyncio":
            one.io_loop.asyncio_loop.add_reader(ours, lambda: None)
        else:
            one.io_loop.add_handler(ours, lambda fd, events: None, IOLoop.READ)
        assert obstacles.why_not_loop(one).startswith(f"{READER}: the function {HERE}.")
        if of == "asyncio":
            one.io_loop.asyncio_loop.remove_reader(ours)
        else:
            one.io_loop.remove_handler(ours)
        assert obstacles.why_not_loop(one) == ""


class Echo(asyncio.Protocol):
    def data_received(self, data):
        """What a connection of the user calls."""


async def answers(reader, writer):
    """What a server of the user calls."""


def test_a_server_and_a_connection_are_named_with_the_code_that_they_call():
    """A server ran while a notebook was parked: its callbacks are asyncio's, and what they call is the user's."""
    ours, theirs = socket.socketpair()
    with ours, kernel() as one:
        loop = one.io_loop.asyncio_loop
        server = loop.run_until_complete(asyncio.start_server(answers, "127.0.0.1", 0))
        why = obstacles.why_not_loop(one)
        assert why.startswith("a server listens on the event loop: the function asyncio.streams.")
        assert why.endswith(f"which calls the function {HERE}.answers")
        server.close()
        loop.run_until_complete(server.wait_closed())
        assert obstacles.why_not_loop(one) == ""
        transport, _ = loop.run_until_complete(loop.create_connection(Echo, sock=theirs))
        why = obstacles.why_not_loop(one)
        assert why.startswith("a connection is open on the event loop: the method asyncio.")
        assert why.endswith(f"which calls the class {HERE}.Echo")
        transport.abort()
        loop.run_until_complete(asyncio.sleep(0.01))
        assert obstacles.why_not_loop(one) == ""


def test_a_task_and_a_gui_are_named():
    """While cells wait, a task of the kernel's is always due to continue: the kernel never left the card."""

    async def training():
        await asyncio.sleep(600)

    with kernel() as one:
        loop = one.io_loop.asyncio_loop
        task = loop.create_task(training())
        [handle] = [each for each in loop._ready if each._callback.__self__ is task]
        assert not [*obstacles.Own(one).strangers(handle._callback)]
        assert obstacles.why_not_loop(one).startswith("an asyncio task is pending (the coroutine ")
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
        why = obstacles.why_not_loop(one)
        assert why == "a subshell is open", "an unknown version of ipykernel"
        shells._cache["1"] = two
        assert obstacles.why_not_loop(one) == ""
        handle = two.io_loop.asyncio_loop.call_later(600, Model().forward)
        why = obstacles.why_not_loop(one)
        assert why.startswith(LATER) and why.endswith(", in a subshell")
        handle.cancel()
        assert obstacles.why_not_loop(one) == ""


@pytest.mark.parametrize("of_panel", [True, False])
def test_a_task_that_repeats_a_function_of_panel_does_not_prevent_parking(of_panel):
    """The first click in `%gpu console` starts such a task. Then the notebook could not be parked any more."""
    callback = pn.state._cleanup_busy_counter if of_panel else Model().forward

    async def begin():
        options = {"session_scoped": False, "period": 600_000}
        repeats = pn.io.callbacks.PeriodicCallback(callback=callback, **options)
        repeats.start()
        await asyncio.sleep(0)
        return repeats

    with kernel() as one:
        loop = one.io_loop.asyncio_loop
        repeats = loop.run_until_complete(begin())
        named = "an asyncio task is pending (the coroutine PeriodicCallback._async_repeat)"
        assert obstacles.why_not_loop(one) == ("" if of_panel else named)
        repeats.stop()
        loop.run_until_complete(asyncio.sleep(0))
        assert obstacles.why_not_loop(one) == ""


@pytest.mark.parametrize("name", list(obstacles.TIMERS))
def test_an_armed_timer_is_named_with_its_handler(name, monkeypatch):
    """Its handler ran 207 times beside a park, and the tensor that it counted in lost some of them."""
    # pytest arms ITIMER_REAL for the time limit of each test.
    monkeypatch.setattr(obstacles, "TIMERS", {name: obstacles.TIMERS[name]})
    number = getattr(signal, obstacles.TIMERS[name])

    def count(number, frame):
        """What the timer calls."""

    before = signal.signal(number, count)
    usual = signal.setitimer(getattr(signal, name), 600)
    try:
        why = obstacles.why_not_timers()
    finally:
        signal.setitimer(getattr(signal, name), 0)
        signal.signal(number, before)
    assert why.startswith(f"a timer is armed (signal.{name}, which calls the function ")
    assert "count" in why and obstacles.why_not_timers() == ""
    signal.setitimer(getattr(signal, name), *usual)


def test_a_function_that_each_garbage_collection_calls_is_named(monkeypatch):
    monkeypatch.setattr(obstacles, "TIMERS", {})

    def counts(phase, info):
        """What each collection calls, in any thread."""

    gc.callbacks.append(counts)
    try:
        assert "counts (gc.callbacks)" in obstacles.why_not_timers()
    finally:
        gc.callbacks.remove(counts)


# Threads. `over` ends them.


def _timer(over):
    return threading.Timer(600, Model().forward)


def _timer_of_a_tensor(over):
    return threading.Timer(600, torch.ones(1).sum)


def _runs_a_loop(over):
    async def wait():
        while not over.is_set():
            await asyncio.sleep(0.01)

    return threading.Thread(target=lambda: asyncio.run(wait()), name="loop")


def _beats(over):
    while not over.wait(0.01):
        pass


def _named_like_the_kernels(over):
    return threading.Thread(target=_beats, args=(over,), name="Heartbeat")


class WriterThread(threading.Thread):
    """A class with the name of a class of the debugger, as pyserial has one."""

    def __init__(self, over):
        super().__init__()
        self.over = over

    def run(self):
        _beats(self.over)


def _in_a_file_named_like_pythons(over):
    source = "def _worker(over):\n    while not over.wait(0.01):\n        pass"
    variables: dict = {"__name__": f"{HERE}.thread"}
    exec(compile(source, "/home/me/thread.py", "exec"), variables)
    return threading.Thread(target=variables["_worker"], args=(over,), name="pool")


def _serves_the_users_handler(over):
    server = socketserver.TCPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=lambda: over.wait() and server.shutdown(), daemon=True).start()
    return threading.Thread(target=server.serve_forever, name="server")


class Handler(socketserver.BaseRequestHandler):
    def handle(self):
        """What a server in a thread calls."""


PREVENT = (
    _timer, _timer_of_a_tensor, _runs_a_loop, _named_like_the_kernels, WriterThread,
    _in_a_file_named_like_pythons, _serves_the_users_handler,
)  # fmt: skip


def _waits_without_a_limit(over):
    return threading.Thread(target=over.wait, name="waits")


def _consumer(over):
    return threading.Thread(target=queue.Queue().get, name="consumer", daemon=True)


def _idle_pool(over):
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    threading.Thread(target=lambda: over.wait() and pool.shutdown(), daemon=True).start()
    return next(iter(pool._threads))


def _wakes_and_finds_nothing(over):
    """As the thread of a TensorBoard writer does."""
    return threading.Thread(target=over.wait, args=(600,), name="logs")


def _an_idle_loop(over):
    """As IPython keeps one after the first `%%bash`."""
    loop = asyncio.new_event_loop()
    stop = lambda: over.wait() and loop.call_soon_threadsafe(loop.stop)
    threading.Thread(target=stop, daemon=True).start()
    return threading.Thread(target=loop.run_forever)


def _of_the_debugger(over):
    """debugpy hides these threads. A notebook whose debugger was on could not be parked."""
    pydevd = pytest.importorskip("debugpy._vendored.force_pydevd") and sys.modules["pydevd"]
    daemon = sys.modules["_pydevd_bundle.pydevd_daemon_thread"].PyDBDaemonThread
    debugger = pydevd.PyDB(set_as_global=False)
    return daemon(debugger, target_and_args=(over.wait, (600,)))


def _of_zeromq(over):
    """A thread frees the bytes of a large message: a notebook that had displayed a plot was never parked again."""
    collector = GarbageCollector(zmq.Context())
    collector.start()
    threading.Thread(target=lambda: over.wait() and collector.stop(), daemon=True).start()
    return collector.thread


REST = (
    _waits_without_a_limit, _consumer, _idle_pool, _wakes_and_finds_nothing, _an_idle_loop,
    _of_the_debugger, _of_zeromq,
)  # fmt: skip


@pytest.fixture
def begun():
    """A function that starts one of these threads, and returns why the notebook stays on their account."""
    over, threads = threading.Event(), []

    def start(make):
        thread = make(over)
        threads.append(thread)
        if thread.ident is None:
            thread.start()
        every = obstacles._threads

        def only(own, but):
            return {one: frame for one, frame in every(own, but).items() if one == thread.ident}

        def looks():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(obstacles, "_threads", only)
                return obstacles.why_not_threads(None), obstacles.not_at_rest(())

        return thread, looks

    yield start
    over.set()
    for thread in threads:
        getattr(thread, "cancel", print)()
        if not thread.daemon:
            thread.join()


@pytest.mark.parametrize("make", PREVENT)
def test_a_thread_that_will_run_code_of_the_user_is_named(begun, make):
    """Its name, the name of its class and the name of its file prove nothing about what it runs."""
    thread, looks = begun(make)
    kind = f"{type(thread).__module__}.{type(thread).__qualname__}"
    named = f"a thread of its own runs ({thread.name}: {kind} calls the "
    until(lambda: looks()[0].startswith(named))
    assert HERE in looks()[0] or "torch.Tensor" in looks()[0]


@pytest.mark.parametrize("make", REST)
def test_a_thread_that_waits_and_has_no_code_of_the_user_does_not_prevent_parking(begun, make):
    """It waits in C, for a lock, for a queue or for a timer, and its stack refers to nothing of the user's."""
    _, looks = begun(make)
    until(lambda: looks() == ("", ""))


@pytest.mark.parametrize("further", [0, 1])
def test_a_thread_that_refers_to_too_many_objects_prevents_parking(begun, further):
    """What was not examined may be the user's: a search that ended early used to count as one without a finding."""

    def make(over):
        thread = _wakes_and_finds_nothing(over)
        thread.list = [[] for _ in range(further * obstacles.MOST_OBJECTS)]
        return thread

    _, looks = begun(make)
    named = "and refers to more than 20,000 objects, so code"
    until(lambda: named in looks()[0] if further else looks() == ("", ""))


def test_a_thread_that_computes_prevents_parking():
    """It runs code of the library alone, and a computation in C has given up Python's lock."""
    script = (
        "import hashlib, os, threading; from gpu import obstacles;"
        "args = 'sha256', b'', b'', 10**9;"
        "threading.Thread(target=hashlib.pbkdf2_hmac, args=args, daemon=True).start();"
        "looks = lambda: (obstacles.why_not_threads(threading.get_ident()), obstacles.not_at_rest(()));"
        "found = next(said for said in iter(looks, None) if all('pbkdf2' in one for one in said));"
        "print(*found, flush=True); os._exit(0)"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    shown = finished([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths})
    assert shown.stdout.count("calls the function _hashlib.pbkdf2_hmac") == 2, shown


class OfALibrary:
    """A class whose objects have addresses of a card's memory."""


@pytest.mark.parametrize("library, module, name", other_libraries.CLASSES)
def test_a_library_is_an_obstacle_while_it_holds_something(monkeypatch, library, module, name):
    """It was one as soon as it was imported: botorch imports jax, and its notebook was never parked again."""
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: OfALibrary}))
    assert obstacles.why_not_modules() == ""
    held = type("Derived", (OfALibrary,), {})()
    assert obstacles.why_not_modules().startswith(f"{library} holds 1 objects of Derived")
    del held
    assert obstacles.why_not_modules() == ""


def _client(platform, arrays, size):
    device = SimpleNamespace(local_hardware_id=1, memory_stats=lambda: {"pool_bytes": size})
    devices = {"live_arrays": lambda: arrays, "local_devices": lambda: [device]}
    return SimpleNamespace(platform=platform, **devices)


@pytest.mark.parametrize(("clients", "why"), [
    ([], ""),  # it is imported, and has opened no card
    ([_client("cpu", [1, 2], 4096)], ""), ([_client("cuda", [], 0)], ""),
    ([_client("cuda", [1], MIB)], "jax holds 1 arrays (1.0 MiB) on cuda:1, and may keep addresses of"),
    (None, "jax holds what it does not say (AttributeError)"),  # another version keeps them elsewhere
])  # fmt: skip
def test_jax_is_asked_what_it_holds(monkeypatch, clients, why):
    known = {} if clients is None else {"_backends": dict(enumerate(clients))}
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", SimpleNamespace(**known))
    found = obstacles.why_not_modules()
    assert found.startswith(why) and bool(found) is bool(why)


@pytest.fixture
def distributed():
    """torch.distributed, without a group when the test ends."""
    yield torch.distributed
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_a_process_group_of_this_process_alone_ends_its_operations_and_keeps_no_kernel(
    distributed, monkeypatch
):
    """DDP and FSDP on one card open one. Its threads use the tensors, and Python does not see these threads."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    distributed.new_group([0])
    assert obstacles.why_not_modules() == ""
    monkeypatch.setattr(obstacles, "PENDING", datetime.timedelta(seconds=PATIENCE))
    tensors = [torch.ones(1 << 20) for _ in range(30)]
    works = [distributed.all_gather([torch.zeros(1 << 20)], one, async_op=True) for one in tensors]
    assert obstacles.why_not_modules() == ""
    assert all(work.is_completed() for work in works)


class Pending:
    """A group of gloo with this process alone, in which an operation does not end."""

    _device_types = ("cpu",)

    def size(self):
        return 1

    def _get_backend(self, device):
        return self

    def barrier(self):
        return self

    def wait(self, longest):
        raise RuntimeError("Operation timed out!")


def test_a_pending_operation_of_a_process_group_is_named(distributed, monkeypatch):
    inside = distributed.distributed_c10d
    monkeypatch.setattr(inside, "ProcessGroupGloo", Pending)
    monkeypatch.setattr(type(inside._world), "pg_map", {Pending(): ("gloo", None)})
    assert obstacles.why_not_modules() == "an operation of torch.distributed is pending"


def test_a_process_group_with_others_or_one_that_torch_does_not_list_is_named(
    distributed, monkeypatch
):
    """The others decide when an operation ends. Another version of torch may list its groups elsewhere."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    named = "a process group is open (torch.distributed: fake, 2 processes)"
    assert obstacles.why_not_modules() == named
    distributed.destroy_process_group()
    monkeypatch.setattr(distributed.distributed_c10d, "is_initialized", lambda: True)
    assert obstacles.why_not_modules() == "a process group is open (torch.distributed)"
    monkeypatch.undo()


def test_calls_of_other_processes_are_named(distributed, tmp_path):
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/rpc")
    rpc.init_rpc("one", rank=0, world_size=1, rpc_backend_options=options)
    named = "other processes may call functions of this one (torch.distributed.rpc)"
    assert obstacles.why_not_modules() == named
    rpc.shutdown()
    assert obstacles.why_not_modules() == ""


def test_the_thread_that_calls_the_driver_keeps_no_kernel():
    """`%gpu doctor` starts it, and a card's driver is called in it. It waits for its next call for ever."""
    before = set(sys._current_frames())
    made = drivers._DriverThread()
    answer: queue.SimpleQueue[int] = queue.SimpleQueue()
    made.calls.put(lambda: answer.put(7))
    assert answer.get(timeout=PATIENCE) == 7
    assert not obstacles._threads(obstacles.Own(), before)


def test_every_thread_of_ours_is_known_as_ours():
    """A thread that is started in another way keeps a notebook's memory on the card."""
    in_helpers = {"telemetry/sampler.py", "backends/llama_cpp/worker.py"}  # processes of their own
    package = Path(gpu_runtime.__file__).parent
    starts = [path for path in package.rglob("*.py") if "threading.Thread(" in path.read_text()]
    assert {str(path.relative_to(package)) for path in starts} <= in_helpers
