"""Measures the cost and the gain of serving, without HTTP: the loads, the calls a second and the tokens a second.

Our order of calls and first-come order are compared twice on the same mixed trace. The first comparison is a pure
simulation of cards and loads. The second uses a real gateway over a real runtime with slow loads. First-come order uses
the same code, with the calls in order of arrival.
"""

import asyncio
import heapq
import random
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

from gpu_runtime import Runtime
from gpu_runtime.samples import gguf_lm
from gpu_runtime.serving import queue as ordering
from gpu_runtime.serving.gateway import Gateway
from gpu_runtime.serving.queue import (
    ModelActivity,
    ModelState,
    Waiting,
    next_steps,
)
from tests.serving.test_order import overtaken_for_seconds

from .bench_http import compared
from .results import Row
from .timing import seconds

MODELS, ROOM = "abcdef", 2
LOAD_SECONDS, ANSWER_SECONDS, EVERY_SECONDS, CONCURRENCY = 5.0, 1.0, 0.5, 2
URGENT = 1


class Told(NamedTuple):
    """The result of a trace."""

    loads: int
    longest_wait: float
    overtaken_late: int  # calls that were overtaken by a call that arrived after their ageing bound
    # the longest wait, less one answer and one load, divided by the call's ageing bound
    against_bound: float


def trace(calls: int = 800, seed: int = 1) -> list[Waiting]:
    """Calls of six models in bursts, as people and programs call models. Some models are called more often."""
    chance, now, made = random.Random(seed), 0.0, []
    while len(made) < calls:
        model = chance.choices(MODELS, weights=(6, 4, 3, 2, 2, 1))[0]
        importance = chance.choices((1, 5, 10, 20, 30), weights=(1, 2, 10, 3, 2))[0]
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            made.append(Waiting(len(made), model, importance, now))
            now += chance.expovariate(1 / EVERY_SECONDS)
    return made[:calls]


def first_come(
    waiting: Iterable[Waiting],
    engines: Mapping[str, ModelActivity],
    now: float,
    turns: object = None,
) -> list[Waiting]:
    return sorted(waiting, key=lambda call: call.key)


def simulate(calls: list[Waiting]) -> Told:
    """The result of the `calls` on a simulated card with room for two models. A model answers one call at a time."""
    world = World(calls)
    while world.step():
        pass
    return world.told()


class World:
    def __init__(self, calls: list[Waiting]) -> None:
        self.coming, self.waiting = calls[::-1], {}
        self.calls = {call.key: call for call in calls}
        self.now, self.loads = 0.0, 0
        self.warm: dict[str, float] = {}  # model -> last use
        self.running: Counter[str] = Counter()
        self.loading: dict[str, float | None] = {}  # None: no room yet
        self.in_use: dict[str, frozenset[str]] = {}
        self.away: dict[str, float] = {}  # model that calls wait for -> since when
        self.events: list[tuple[float, int, str, str]] = []
        self.started: list[int] = []
        self.waits: dict[int, float] = {}

    def step(self) -> bool:
        """Simulates the events of the next moment. Returns False at the end."""
        times = [self.coming[-1].arrived] if self.coming else []
        if self.events:
            times.append(self.events[0][0])
        if not times:
            return False
        self.now = min(times)
        while self.events and self.events[0][0] <= self.now:
            _, _, what, model = heapq.heappop(self.events)
            if what == "answered":
                self.running[model] -= 1
            else:
                del self.loading[model]
            self.warm[model] = self.now
        while self.coming and self.coming[-1].arrived <= self.now:
            call = self.coming.pop()
            self.waiting[call.key] = call
        self.act()
        return True

    def act(self) -> None:
        while True:
            out = next_steps(self.waiting.values(), self.engines(), self.now)
            for key in out.start:
                call = self.waiting.pop(key)
                self.running[call.model] += 1
                self.started.append(key)
                self.waits[key] = self.now - call.arrived
                self.later(ANSWER_SECONDS, "answered", call.model)
            for model in out.load:
                self.loading[model] = None
            if not self.find_room() and not out.start and not out.load:
                return

    def find_room(self) -> bool:
        """Starts a load in place of the longest idle model, as the ledger would. Returns whether a load began."""
        before = self.loads
        for model in [model for model, done in self.loading.items() if done is None]:
            taken = len(self.warm) + sum(done is not None for done in self.loading.values())
            idle = sorted(
                (used, name) for name, used in self.warm.items() if not self.running[name]
            )
            if taken >= ROOM and not idle:
                self.in_use[model] = frozenset(self.warm)  # as last read from the ledger
                continue
            if taken >= ROOM:
                del self.warm[idle[0][1]]
            self.loads += 1
            self.in_use.pop(model, None)
            self.loading[model] = self.now + LOAD_SECONDS
            self.later(LOAD_SECONDS, "loaded", model)
        return self.loads > before

    def engines(self) -> dict[str, ModelActivity]:
        away = self.loading.keys() | {call.model for call in self.waiting.values()}
        self.away = {name: self.away.get(name, self.now) for name in away - self.warm.keys()}
        found = {
            name: ModelActivity(ModelState.WARM, self.running[name], CONCURRENCY)
            for name in self.warm
        }
        for name, since in self.away.items():
            state = ModelState.LOADING if name in self.loading else ModelState.COLD
            waits_for = self.in_use.get(name, frozenset())
            found[name] = ModelActivity(state, waits_for=waits_for, away_since=since)
        return found

    def later(self, seconds: float, what: str, model: str) -> None:
        heapq.heappush(self.events, (self.now + seconds, len(self.started), what, model))

    def told(self) -> Told:
        place = {key: at for at, key in enumerate(self.started)}
        late = 0
        for call in self.calls.values():
            late += any(
                place[other.key] < place[call.key]
                for other in self.calls.values()
                if other.arrived
                >= call.arrived + overtaken_for_seconds(call.importance, other.importance)
                and other.model == call.model
            )
        against = max(
            (wait - ANSWER_SECONDS - LOAD_SECONDS)
            / overtaken_for_seconds(self.calls[key].importance, URGENT)
            for key, wait in self.waits.items()
        )
        return Told(self.loads, max(self.waits.values()), late, against)


def simulated() -> Row:
    """Our order and first-come order on the same trace."""
    calls = trace()
    ours = simulate(calls)
    with mock.patch.object(ordering, "order", first_come):
        plain = simulate(calls)
    return Row(
        "number of loads for a mixed trace, six models and room for two, against first-come order; simulated",
        f"{plain.loads / ours.loads:.1f}× fewer; the longest wait {ours.longest_wait:.0f} s (first come "
        f"{plain.longest_wait:.0f}), {ours.against_bound:.2f} of its ageing bound", "≥ 2×; ≤ 1",
        plain.loads >= 2 * ours.loads and ours.against_bound <= 1 and not ours.overtaken_late
    )  # fmt: skip


# -- a real gateway -------------------------------------------------------------------------------------------------


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


def tokens(rounds: int = 9, most: int = 400) -> Row:
    """The tokens a second of a small real llama.cpp model, by its own methods and through the gateway.

    The row also has the time that the gateway adds to a short answer.
    """

    async def work(gateway: Gateway) -> tuple[float, float, float]:
        loop = asyncio.get_running_loop()
        name, messages = "gguf", _chat("gguf")["messages"]
        options = {"context_length": 512, "backend": "llama_cpp", "model_type": "llm"}
        source = gguf_lm(f"{directory}/tiny.gguf", size="24 MiB")
        gateway.rt.register(name, source, **options)

        def direct(count: int, _stream: bool) -> float:
            more = {"stream": True, "max_tokens": count, "temperature": 0}
            with gateway.rt.use(name) as model:
                return seconds(lambda: deque(model.create_chat_completion(messages, **more), 0))

        async def answered(count: int) -> float:
            began = time.perf_counter()
            more = {"stream": True, "max_tokens": count, "temperature": 0}
            reply = await gateway.answer("chat", _chat(name, **more))
            async for _ in reply.events:  # type: ignore[union-attr]
                pass
            return time.perf_counter() - began

        def through(count: int, _stream: bool) -> float:
            return asyncio.run_coroutine_threadsafe(answered(count), loop).result()

        return await asyncio.to_thread(compared, rounds, 5, most, direct, through)

    with tempfile.TemporaryDirectory() as directory:
        ratio, added, _ = _with_gateway(work)
    return Row(
        "a llama.cpp model through the gateway, against its own methods, without HTTP",
        f"{added * 1e3:.1f} ms added; {ratio:.2f}× the tokens a second",
        "≤ 3 ms; ≥ 0.95×", added <= 0.003 and ratio >= 0.95
    )  # fmt: skip


def rows() -> Iterator[Row]:
    yield simulated()
    yield real()
    yield rates()
    yield tokens()
