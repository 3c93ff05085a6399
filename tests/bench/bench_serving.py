"""Measures the cost and the gain of serving, without HTTP: the loads, and the calls a second.

Our order of calls and first-come order are compared on the same mixed trace, by a real gateway over a real runtime with
slow loads. First-come order uses the same code, with the calls in order of arrival.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

from gpu_runtime import Runtime
from gpu_runtime.serving import queue as ordering
from gpu_runtime.serving.gateway import Gateway
from gpu_runtime.serving.queue import (
    ModelActivity,
    Waiting,
)

from .results import Row

MODELS = "abcdef"


def first_come(
    waiting: Iterable[Waiting],
    engines: Mapping[str, ModelActivity],
    now: float,
    turns: object = None,
) -> list[Waiting]:
    return sorted(waiting, key=lambda call: call.key)


def _chat(model: str, text: str = "one two three", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


def _runtime(directory: str, load_seconds: float = 0.0) -> Runtime:
    rt = Runtime(
        devices="sim:24GiB,host:64GiB",
        ledger=f"keeper://{directory}/ledger",
        enable_cpu_offload=False,
    )
    for name in MODELS:
        rt.register(
            name,
            lambda what: time.sleep(load_seconds),
            backend="fake",
            size="9 GiB",
            model_type="llm",
            context_length=64,
            sequences=1,
        )
    return rt


async def _closed(gateway: Gateway, calls: int, clients: int) -> None:
    """So many calls, of clients that call again as soon as they have their answer."""
    chance, left = random.Random(1), iter(range(calls))

    async def client() -> None:
        for _ in left:
            model = chance.choices(MODELS, weights=(6, 4, 3, 2, 2, 1))[0]
            reply = await gateway.answer("chat", _chat(model))
            assert reply.json is not None and reply.json["model"] == reply.asked

    await asyncio.gather(*(client() for _ in range(clients)))


def _with_gateway(work: Callable[[Gateway], Any], **options: Any) -> Any:
    """The result of `work`, with a gateway of the models of `_runtime`."""

    async def run() -> Any:
        with tempfile.TemporaryDirectory() as directory, _runtime(directory, **options) as rt:
            gateway = Gateway(rt)
            try:
                return await work(gateway)
            finally:
                await gateway.close()

    return asyncio.run(run())


def real(calls: int = 600, clients: int = 32) -> Row:
    """The loads of a mixed trace, of 20 ms each, in our order and in first-come order."""

    async def work(gateway: Gateway) -> int:
        await _closed(gateway, calls, clients)
        return gateway.queue.loads

    ours = _with_gateway(work, load_seconds=0.02)
    with mock.patch.object(ordering, "order", first_come):
        plain = _with_gateway(work, load_seconds=0.02)
    what = f"number of loads for a mixed trace with a real gateway, {clients} clients, against first-come order"
    return Row(what, f"{plain / ours:.1f}× fewer ({ours})", "≥ 2×", plain >= 2 * ours)


def rates(calls: int = 6000, clients: int = 32) -> Row:
    """The calls of a warm echo engine for each second, and for each second of processor time."""

    async def work(gateway: Gateway) -> tuple[float, float]:
        gateway.rt.register("echo", backend="fake", size="1 GiB", model_type="llm")
        await gateway.answer("chat", _chat("echo"))

        async def client(many: int) -> None:
            for _ in range(many):
                await gateway.answer("chat", _chat("echo"))

        await client(200)
        wall, processor = time.perf_counter(), time.process_time()
        await asyncio.gather(*(client(calls // clients) for _ in range(clients)))
        return calls / (time.perf_counter() - wall), calls / (time.process_time() - processor)

    a_second, a_processor_second = _with_gateway(work)
    return Row(
        f"calls of an echo engine through gateway and queue, {clients} clients, without HTTP",
        f"{a_second:,.0f} a second ({a_processor_second:,.0f} a processor second)", "≥ 1,000", a_second >= 1000
    )  # fmt: skip


def rows() -> Iterator[Row]:
    yield real()
    yield rates()
