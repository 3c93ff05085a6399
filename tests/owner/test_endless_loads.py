"""A load that does not end is stopped by its time-out or by the end of the runtime or server."""

import asyncio
import ctypes
import os
import signal
import sys
import threading

import pytest
import torch

from gpu_runtime import Busy, LedgerUnavailable, LoadFailed, StillInUse, WaitEnded, threads
from gpu_runtime.facts import Outcome
from gpu_runtime.ledgers.memory import MemoryLedger
from gpu_runtime.owner import arrivals, load_and_plan
from gpu_runtime.serving.gateway import Gateway
from tests.clock import PATIENCE, until

from .conftest import alongside, claims


class Endless:
    """A factory whose code never ends, except where it is called without data for its size."""

    def __init__(self):
        self.began = threading.Event()
        self.ended = threading.Event()

    def __call__(self):
        if torch.get_default_device().type == "meta":
            return torch.nn.Linear(8, 8)
        try:
            self.began.set()
            while True:
                sum(range(100))
        finally:
            self.ended.set()


class InC:
    """A factory in a call of C code that ends only after `finish`, and that heeds no signal."""

    def __init__(self):
        # whether the call is also made when the factory is called for its size
        self.at_size = False
        self.began = threading.Event()
        self.calls = 0
        self._reading, self._writing = os.pipe()
        self._read = ctypes.CDLL(None).read

    def __call__(self):
        if torch.get_default_device().type == "meta" and not self.at_size:
            return torch.nn.Linear(8, 8)
        self.calls += 1
        self.began.set()
        self._read(self._reading, ctypes.create_string_buffer(1), 1)
        return torch.nn.Linear(8, 8)

    def finish(self):
        os.write(self._writing, b"x" * 100)  # for later calls too


@pytest.fixture(autouse=True)
def _least_load(monkeypatch):
    # Python 3.11: each traced call waits until the stopped thread runs Python code, or has ended.
    if sys.gettrace():
        pytest.skip("a tracer such as coverage hangs while a thread is being stopped")
    monkeypatch.setattr(arrivals, "LEAST_TIME_SECONDS", 0.1)


def begins_first(made, monkeypatch):
    """The time of a load counts once its call has begun. A busy machine begins it later than the time-outs here."""
    wait = threads.Stoppable.wait

    def wait_once_begun(work, seconds=None):
        until(lambda: made.began.is_set() or work.ended(0))
        return wait(work, seconds)

    monkeypatch.setattr(threads.Stoppable, "wait", wait_once_begun)
    return made


@pytest.fixture
def endless(monkeypatch):
    return begins_first(Endless(), monkeypatch)


@pytest.fixture
def in_c(monkeypatch):
    """A load that does not end when it is stopped, and short waits for its end."""
    monkeypatch.setattr(arrivals, "LOAD_SECONDS", 0.2)
    monkeypatch.setattr(threads, "ENDING_SECONDS", 0.2)
    made = begins_first(InC(), monkeypatch)
    yield made
    made.finish()


def failing(rt, errors, **options):
    def act():
        try:
            rt.preload("m", **options)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_a_preload_ends_with_its_time_out(runtime, endless):
    """It had not returned after 60 s, because the time-out counted the wait for room only."""
    rt = runtime()
    rt.register("m", endless)
    with pytest.raises(LoadFailed, match="m was not loaded: its time is over"):
        rt.preload("m", timeout=0.1)
    assert endless.ended.is_set() and not any(claims(rt).values())
    endless.began.clear()
    rt.register("other", backend="fake", size="1GiB")
    rt.preload("other", timeout=0)  # a load that ends at once is not stopped


def test_a_runtime_that_is_closed_stops_its_loads(runtime, endless):
    """`close` waited for ever for the lock of the model that was being loaded."""
    rt, errors = runtime(), []
    rt.register("m", endless)
    thread = failing(rt, errors)
    until(endless.began.is_set)
    rt.close()
    thread.join()
    assert endless.ended.is_set() and len(errors) == 1


def test_a_server_that_ends_stops_its_loads(runtime, endless):
    rt = runtime()
    rt.register("m", endless)

    async def serve():
        gateway = Gateway(rt)
        hold = gateway._holds.take("m", 10)
        await asyncio.to_thread(endless.began.wait)
        await gateway.close()
        return hold.ready.exception()

    assert "the server ends" in str(asyncio.run(serve()))
    assert endless.ended.is_set()


def test_a_load_that_has_ended_is_not_stopped_later(runtime):
    """The error must not arrive in the cell's next line."""
    rt = runtime()
    rt.register("m", backend="fake", size="1GiB")
    rt.preload("m", timeout=5)
    assert not rt._session.loads
    rt._stop_loads("too late")


# -- calls of C code, which cannot be stopped
def test_the_caller_of_a_load_in_c_code_returns_at_its_time_out(runtime, in_c):
    """The bytes stay reserved until the call ends, because the load may still use them."""
    rt = runtime()
    rt.register("m", in_c)
    with pytest.raises(
        LoadFailed, match=r"m was not loaded: its time is over.*\n.*restart"
    ) as late:
        rt.preload("m", timeout=0.1)
    assert "it is in __call__ (test_endless_loads.py, line" in str(late.value)
    reserved = claims(rt)
    assert any(reserved.values())
    in_c.began.clear()
    with pytest.raises(Busy, match="m is arriving, stopped .* ago .*has not ended"):
        rt.preload("m", timeout=0.1)
    assert claims(rt) == reserved and in_c.calls == 1
    assert any("has not ended" in event.because for event in rt.why("m"))
    in_c.finish()
    until(lambda: not any(claims(rt).values()))
    assert rt.preload("m").done and in_c.calls == 2


def test_a_model_whose_stopped_load_has_not_ended_is_not_forgotten(runtime, in_c):
    """`forget` waited for ever, also after a `load` of a new name that had failed."""
    rt = runtime()
    with pytest.raises(LoadFailed, match="its time is over"):
        rt.load("m", in_c, timeout=0.1)
    with pytest.raises(StillInUse, match="m cannot be freed: the load has not ended"):
        rt.forget("m")
    in_c.finish()
    until(lambda: not any(claims(rt).values()) and not rt._session.loads)
    rt.forget("m")


def test_forget_stops_a_load_that_runs(runtime):
    """It waited for the end of the load, and the stop button did not end this wait."""
    rt, endless = runtime(), Endless()
    rt.register("m", endless)

    def load():
        with pytest.raises(LoadFailed, match="m was not loaded: it was forgotten meanwhile"):
            rt.preload("m")
        failed.set()

    failed = threading.Event()
    with alongside(load):
        endless.began.wait(PATIENCE)
        rt.forget("m")
    assert failed.is_set() and endless.ended.is_set()
    assert not any(claims(rt).values()) and not rt.specs()


def test_the_stop_button_ends_the_wait_for_a_load_in_c_code(runtime, in_c):
    rt = runtime()
    rt.register("m", in_c)

    def press():
        in_c.began.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt) as interrupt:
        rt.preload("m")
    assert "the load has not ended: it is in __call__" in interrupt.value._render_traceback_()[0]
    assert any(claims(rt).values())
    in_c.finish()
    until(lambda: not any(claims(rt).values()))


def test_a_size_that_is_read_for_ever_ends_with_the_time_out(runtime, in_c):
    """The source is read before the load, and may be on a network that is gone too."""
    rt = runtime()
    rt.register("m", in_c)
    in_c.at_size = True
    late = "its time is over .*, while its source was read.* it is in __call__"
    with pytest.raises(LoadFailed, match=late):
        rt.preload("m", timeout=0.1)
    in_c.began.clear()
    with pytest.raises(LoadFailed, match=late):
        rt.load("new", in_c, timeout=0.1)
    assert not any(claims(rt).values())
    in_c.finish()
    rt.preload("m")
    rt.load("new", in_c)


@pytest.mark.parametrize("reads", [0, 4, 10])
def test_the_seconds_of_reading_the_source_are_part_of_the_time_out(
    runtime, clock, monkeypatch, reads
):
    rt, left = runtime(clock=clock), []
    done = Outcome(verb="preload", name="m", done=True, because="")
    preload = lambda *_, timeout, **__: left.append(timeout) or done
    monkeypatch.setattr(load_and_plan.operations, "preload", preload)
    register = lambda *_, **__: clock.advance(reads)
    load_and_plan.load(rt._session, register, "m", "source", {}, progress=None, timeout=10)
    assert left == [10 - reads]


def leave_to_the_next(rt, monkeypatch):
    """Ends the time of the caller of a load as soon as another request waits for the load."""

    def wait_for_the_next(work, seconds):
        until(lambda: work.ended(0) or rt.status().tickets)
        return work.ended(0)

    monkeypatch.setattr(arrivals.Stoppable, "wait", wait_for_the_next)


def test_a_load_that_another_request_waits_for_goes_on_after_its_caller_left(
    runtime, in_c, monkeypatch
):
    rt, errors, others = runtime(), [], []
    rt.register("m", in_c)
    leave_to_the_next(rt, monkeypatch)
    first = failing(rt, errors)
    until(in_c.began.is_set)
    second = failing(rt, others)
    first.join()
    assert isinstance(errors[0], Busy) and "still being loaded" in str(errors[0])
    in_c.finish()
    second.join()
    assert others == [] and in_c.calls == 1 and rt.here("m")


def test_a_load_is_stopped_when_its_last_caller_leaves(runtime, endless, monkeypatch):
    """The first caller left while another one waited; that one leaves later."""
    rt, errors, others = runtime(), [], []
    rt.register("m", endless)
    leave_to_the_next(rt, monkeypatch)
    first = failing(rt, errors)
    until(endless.began.is_set)
    second = failing(rt, others)
    first.join()
    arrivals.leave_request(rt._session, second.ident, "its caller left")
    second.join()
    assert [type(errors[0]), type(others[0])] == [Busy, WaitEnded]
    until(endless.ended.is_set)
    until(lambda: not any(claims(rt).values()))


def refused(*_: object) -> None:
    raise LedgerUnavailable("the ledger does not answer.", path="memory:")


@pytest.mark.parametrize(
    "ledger_answers, said", [(True, "its runtime was closed"), (False, "does not answer")]
)
def test_a_runtime_closes_although_a_load_in_c_code_goes_on(
    runtime, in_c, shared_book, monkeypatch, ledger_answers, said
):
    """The bytes of the load stay in the book until it ends."""
    rt, other, errors = runtime(ledger=shared_book), runtime(ledger=shared_book), []
    rt.register("m", in_c)
    thread = failing(rt, errors)
    until(in_c.began.is_set)
    reserved = claims(other)
    with monkeypatch.context() as patch:
        if not ledger_answers:
            patch.setattr(MemoryLedger, "transact", refused)
        rt.close()
        thread.join()
    assert said in str(errors[0])
    assert claims(other) == reserved and any(reserved.values())
    in_c.finish()
    until(lambda: not claims(other))
