"""Ways in which Python can run between two cells (docs/reference/parking.md) never lose a write to a tensor."""

import json
import os
import signal
import time

import pytest

from gpu_runtime import GpuError, Runtime
from gpu_runtime.facts import HOST
from tests.clock import PATIENCE

from .notebooks import DEVICES, Notebook, places, rest

PREPARED = """
import asyncio, atexit, gc, io, json, os, sched, signal, socket, socketserver, sys, threading, time, _thread, torch
from concurrent.futures import ThreadPoolExecutor
from tornado.ioloop import IOLoop, PeriodicCallback
x = torch.zeros(1_000_000); done = []; errors = []; over = threading.Event(); ends = []
ip = get_ipython(); io_loop = ip.kernel.io_loop; loop = io_loop.asyncio_loop
def act(*_):
    try:
        x.add_(1)
    except Exception as error:
        errors.append(repr(error)); return
    done.append(1)
    try:
        float(x[0]); torch.save(x[:10], io.BytesIO())
    except Exception as error:
        errors.append(repr(error))
def again():
    while not over.wait(0.02): act()
usual = set(sys._current_frames())
class Begun:
    def __init__(self, ident): self.ident = ident
    def is_alive(self): return self.ident in sys._current_frames()
def begun():
    for ident, frame in sys._current_frames().items():
        while frame.f_back: frame = frame.f_back
        own = frame.f_globals.get('__name__', '').startswith('gpu_runtime')
        if ident not in usual and not own: yield Begun(ident)
class WriterThread(threading.Thread):
    def run(self): again()
class Echo(asyncio.Protocol):
    def data_received(self, data): act()
class Handler(socketserver.BaseRequestHandler):
    def handle(self): act()
class Dies:
    def __init__(self): self.me = self
    def __del__(self): act()
def started(thread):
    thread.start(); ends.append(thread.join)
def timer():
    if not over.is_set():
        act(); threading.Timer(0.02, timer).start()
async def task():
    while not over.is_set():
        act(); await asyncio.sleep(0.02)
def later():
    if not over.is_set():
        act(); loop.call_later(0.02, later)
def soon():
    if not over.is_set():
        act(); time.sleep(0.01); loop.call_soon(soon)
def writes_into(end):
    def work():
        while not over.wait(0.02): end.send(b'1')
        end.close()
    started(threading.Thread(target=work))
def armed(timer, number):
    old = signal.signal(number, act); signal.setitimer(timer, 0.02, 0.02)
    ends.append(lambda: (signal.setitimer(timer, 0), signal.signal(number, old)))
def on_signal():
    old = signal.signal(signal.SIGUSR1, act); ends.append(lambda: signal.signal(signal.SIGUSR1, old))
def pool():
    p = ThreadPoolExecutor(1); p.submit(again); ends.append(p.shutdown)
def other_loop():
    two = asyncio.new_event_loop()
    t = threading.Thread(target=two.run_forever); t.start()
    asyncio.run_coroutine_threadsafe(task(), two)
    ends.append(lambda: (two.call_soon_threadsafe(two.stop), t.join()))
def readers():
    one, two = socket.socketpair(); two.setblocking(False)
    loop.add_reader(two, lambda: (two.recv(99), act())); ends.append(lambda: loop.remove_reader(two)); writes_into(one)
def handlers():
    one, two = socket.socketpair(); two.setblocking(False)
    io_loop.add_handler(two, lambda *_: (two.recv(99), act()), IOLoop.READ)
    ends.append(lambda: io_loop.remove_handler(two)); writes_into(one)
def threaded_server():
    s = socketserver.TCPServer(('127.0.0.1', 0), Handler); t = threading.Thread(target=s.serve_forever); t.start()
    def work():
        while not over.wait(0.05): socket.create_connection(s.server_address).close()
    started(threading.Thread(target=work)); ends.append(lambda: (s.shutdown(), t.join()))
def periodic():
    p = PeriodicCallback(act, 20); p.start(); ends.append(p.stop)
def collects():
    gc.callbacks.append(act); ends.append(lambda: gc.callbacks.remove(act))
def scheduler():
    s = sched.scheduler()
    def step():
        act()
        if not over.is_set(): s.enter(0.02, 1, step)
    s.enter(0, 1, step); started(threading.Thread(target=s.run))
def transformer():
    def seen(lines): act(); return lines
    ip.input_transformers_post.append(seen); ends.append(lambda: ip.input_transformers_post.remove(seen))
def formatter():
    f = ip.display_formatter.formatters['text/plain']
    f.for_type(int, lambda v, p, c: (act(), p.text(str(v)))); ends.append(lambda: f.pop(int))
def observer():
    ip.observe(act, 'execution_count'); ends.append(lambda: ip.unobserve(act, 'execution_count'))
def hook():
    ip.events.register('pre_execute', act2); ends.append(lambda: ip.events.unregister('pre_execute', act2))
def act2(): act()
def property_read():
    class Probe:
        def __dir__(self): act(); return ['a']
    globals()['probe'] = Probe()
def comm_target():
    ip.kernel.comm_manager.register_target('probe', act)
    ends.append(lambda: ip.kernel.comm_manager.unregister_target('probe', act))
def dies():
    for _ in range(3): Dies()
def loop_signal():
    loop.add_signal_handler(signal.SIGUSR2, act); ends.append(lambda: loop.remove_signal_handler(signal.SIGUSR2))
"""
WAYS = {
    "a thread": "started(threading.Thread(target=again))",
    "a thread with a name of the kernel's": "started(threading.Thread(target=again, name='Heartbeat'))",
    "a class with a name of the debugger's": "started(WriterThread())",
    "a daemon thread": "started(threading.Thread(target=again, daemon=True))",
    "_thread.start_new_thread": "_ = _thread.start_new_thread(again, ())",
    "threading.Timer": "timer()",
    "sched in a thread": "scheduler()",
    "a thread pool": "pool()",
    "an event loop in a thread": "other_loop()",
    "socketserver in a thread": "threaded_server()",
    "an asyncio task": "_ = loop.create_task(task())",
    "call_later": "later()",
    "call_soon that repeats itself": "soon()",
    "add_reader": "readers()",
    "a handler of tornado": "handlers()",
    "PeriodicCallback": "periodic()",
    "asyncio.start_server": (
        "async def serve(r, w): act(); w.close()\n"
        "server = await asyncio.start_server(serve, '127.0.0.1', 0); ends.append(server.close)"
    ),
    "a protocol": (
        "one, two = socket.socketpair()\n"
        "transport, _ = await loop.create_connection(Echo, sock=two); ends.append(transport.abort); writes_into(one)"
    ),
    "a signal of the loop": "loop_signal()",
    "signal.setitimer": "armed(signal.ITIMER_REAL, signal.SIGALRM)",
    "ITIMER_VIRTUAL": "armed(signal.ITIMER_VIRTUAL, signal.SIGVTALRM)",
    "ITIMER_PROF": "armed(signal.ITIMER_PROF, signal.SIGPROF)",
    "a signal handler": "on_signal()",
    "gc.callbacks": "collects()",
    "a finalizer in a cycle": "dies()",
    "an input transformer": "transformer()",
    "a formatter": "formatter()",
    "an observer of a trait": "observer()",
    "a hook of IPython": "hook()",
    "a completion": "property_read()",
    "a comm": "comm_target()",
}
ENDED = """
over.set()
for end in ends: end()
ends.clear()
while any(t.is_alive() for t in begun()): time.sleep(0.01)
await asyncio.sleep(0.1)
over.clear()
print("RESULT", json.dumps([len(done), float(x.min()), float(x.max()), errors[:3]]))
x.zero_(); done.clear(); errors.clear()
"""


SIGNALS = {"a signal handler": signal.SIGUSR1, "a signal of the loop": signal.SIGUSR2}
CELLS = ("an input transformer", "a formatter", "an observer of a trait", "a hook of IPython")
# The kernel can be parked with these: their code runs when something comes from outside.
PARKED = ("a signal handler", "a completion", "a comm", "a formatter")


def _send(one: Notebook, name: str) -> None:
    """What comes from outside while the notebook is parked or not."""
    if name in SIGNALS:
        os.kill(one.pid, SIGNALS[name])
    elif name == "a completion":
        one.client.complete("probe.", reply=True, timeout=PATIENCE)
    elif name == "a comm":
        content = {"comm_id": os.urandom(4).hex(), "target_name": "probe", "data": {}}
        one.client.shell_channel.send(one.client.session.msg("comm_open", content))
        one.client.kernel_info(reply=True, timeout=PATIENCE)
    elif name in CELLS:
        one.run("1 + 1")


@pytest.mark.timeout(900)
def test_no_way_to_run_between_two_cells_loses_a_write(keeper):
    """What these ways wrote while the bytes were copied or away was lost, and the tensor ended torn."""
    with (
        Runtime(devices=DEVICES, ledger=keeper, monitor=False) as rt,
        Notebook("one.ipynb", keeper) as one,
    ):
        one.run(PREPARED)
        rest(rt)
        for name, begin in WAYS.items():
            shown = one.run(begin)
            assert "Error" not in shown, (name, shown)
            tries = parked = 0
            end = time.monotonic() + PATIENCE
            # The end of a cell is published within a second, and until then the notebook is in use.
            while tries < 4 or (name in PARKED and not parked):
                tries += 1
                _send(one, name)  # before the copy, or while the bytes are away
                try:
                    parked += rt.park("one.ipynb").done
                    _send(one, name)
                except GpuError as error:
                    words = ("could not be moved: ", "in use", "has not answered")
                    assert any(one in str(error) for one in words), (name, error)
                assert time.monotonic() < end, f"{name}: it is never parked"
                time.sleep(0.05)
            shown = one.run(ENDED)
            assert "RESULT" in shown, (name, shown)
            count, least, most, errors = json.loads(shown.partition("RESULT ")[2].splitlines()[0])
            assert least == most == count, (name, count, least, most, errors)
        assert HOST not in places(rt)
