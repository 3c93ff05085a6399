"""A load that does not end: the time-out, the end of the runtime and the end of a server stop it."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from gpu_runtime import LoadFailed
from gpu_runtime.serving.gateway import Gateway
from tests.clock import until

from .conftest import claims


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


@pytest.fixture
def endless():
    return Endless()


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
        rt.preload("m", timeout=1)
    assert endless.ended.is_set() and not any(claims(rt).values())
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
