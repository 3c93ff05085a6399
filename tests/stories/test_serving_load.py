"""`gpu serve` with more calls than it can answer, and with engines that are killed: `make soak`."""

import asyncio
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import soak
from tests.faces.served import Served

from .serve import FAR_FUTURE, HELLO, TOKEN, client, gguf_models, gpu_serve, openai
from .test_serving_under_fire import engines

httpx = pytest.importorskip("httpx")

CALLS = 5_000
CALLERS = 8
LOAD_SECONDS = 60.0
# The part of the server's capacity that each client asks for. Each asks for more than a quarter, its fair share.
OFFERED = {"modest": 0.4, "plain": 0.4, "usual": 0.4, "greedy": 0.8}
REFUSED_SECONDS = 0.02
DEVICES = {"GPU_DEVICES": "sim:1GiB,host:1GiB"}


class Replay:
    """Calls whose answers were recorded before, made by CALLERS threads while engines are killed."""

    def __init__(self, server: Served) -> None:
        self.server, self.chance = server, random.Random(1)
        self.calls = [
            {
                "messages": [{"role": "user", "content": " ".join(["hello"] * words)}],
                "max_tokens": tokens,
                "stream": stream,
            }
            for words in range(1, 9)
            for tokens in (1, 4, 8)
            for stream in (False, True)
        ]
        self.seen: Counter[str] = Counter()
        self.blamed: list[str] = []
        self.over = threading.Event()
        with client(server) as talk:
            self.recorded = [self._text(talk, "left", call) for call in self.calls]

    def run(self, many: int) -> None:
        """Makes so `many` calls, and kills an engine whenever ten calls were answered since the last kill."""
        killer = threading.Thread(target=self._kill)
        killer.start()
        try:
            with ThreadPoolExecutor(CALLERS) as pool:
                list(pool.map(self._caller, [many // CALLERS] * CALLERS, range(CALLERS)))
        finally:
            self.over.set()
            killer.join()

    def _caller(self, many: int, seed: int) -> None:
        chance = random.Random(seed)
        with client(self.server) as talk:
            for _ in range(many):
                number = chance.randrange(len(self.calls))
                said = self._answered(talk, self.calls[number])
                self.seen["right" if said == self.recorded[number] else "wrong"] += 1

    def _answered(self, talk: openai.OpenAI, call: dict[str, object]) -> str:
        """The answer to the `call`, which is repeated as long as the server says that it cannot answer now."""
        for _ in range(200):
            try:
                return self._text(talk, "task:both", call)
            except openai.APIStatusError as error:
                if error.status_code < 500:
                    self.blamed.append(str(error))
            except openai.APIError:  # a stream broke off, and its last event is the error
                self.seen["broken off"] += 1
            self.seen["repeated"] += 1
            time.sleep(0.2)
        return "no answer"

    def _text(self, talk: openai.OpenAI, model: str, call: dict[str, object]) -> str:
        answer = talk.chat.completions.create(model=model, temperature=0, **call)  # type: ignore[call-overload]
        if not call["stream"]:
            return answer.choices[0].message.content or ""
        return "".join(choice.delta.content or "" for part in answer for choice in part.choices)

    def _kill(self) -> None:
        answered = 0
        while not self.over.wait(self.chance.uniform(0.5, 3.0)):
            living = engines(self.server)
            if living and self.seen["right"] >= answered + 10:
                answered = self.seen["right"]
                self.seen["kills"] += 1
                os.kill(self.chance.choice(living).pid, signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_recorded_calls_get_their_answers_while_both_engines_are_killed(tmp_path):
    """No call is lost, no answer is wrong, and no caller is told that the call was a mistake."""
    tasks = tmp_path / "tasks.yaml"
    tasks.write_text("tasks:\n  both: {candidates: [left, right], replicas: true}\n")
    models = dict.fromkeys(("left", "right"), gguf_models(tmp_path, "tiny")["tiny"])
    with gpu_serve(tmp_path, models, **DEVICES, GPU_TASKS=str(tasks)) as server:
        replay = Replay(server)
        replay.run(CALLS)
    assert replay.blamed == []
    assert (replay.seen["right"], replay.seen["wrong"]) == (CALLS, 0), replay.seen
    assert replay.seen["kills"] > 20
    soak.add(
        "keeper",
        **{
            "recorded calls replayed": replay.seen["right"],
            "engines killed under the replay": replay.seen["kills"],
            "replayed calls that the client repeated": replay.seen["repeated"],
        },
    )


class Load:
    """Clients that send calls at their own rates, whether or not earlier calls were answered."""

    def __init__(self, server: Served) -> None:
        self.url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
        self.answered: Counter[str] = Counter()
        self.ends: deque[float] = deque(maxlen=40)  # of the newest answers
        self.refused: list[float] = []  # seconds
        self.others: Counter[int] = Counter()

    async def warm_up(self) -> None:
        """Four callers wait for their answers, until the speed of the server is known."""

        async def caller(number: int) -> None:
            while len(self.ends) < 30:
                await self._call(http, f"caller{number}")

        async with self._http() as http:
            await asyncio.gather(*map(caller, range(4)))
        self.answered.clear()

    def speed(self) -> float:
        """The calls that the server answers in a second now. The machine may be slower or faster than before."""
        return (len(self.ends) - 1) / (self.ends[-1] - self.ends[0])

    async def offer(self, parts: dict[str, float], seconds: float) -> None:
        """Sends calls for so many `seconds`. The rate of each client is its part of the server's speed."""
        ends = time.monotonic() + seconds

        async def client_of(name: str, part: float) -> None:
            chance = random.Random(name)
            calls = []
            at = time.monotonic()
            while at < ends:
                await asyncio.sleep(at - time.monotonic())
                calls.append(asyncio.ensure_future(self._call(http, name)))
                at += chance.expovariate(part * self.speed())
            await asyncio.gather(*calls)

        async with self._http() as http:
            await asyncio.gather(*(client_of(*pair) for pair in parts.items()))

    async def _call(self, http: httpx.AsyncClient, name: str) -> None:
        body = {"model": "only", "messages": HELLO, "max_tokens": 200, "x_client_id": name}
        began = time.monotonic()
        answer = await http.post(self.url, json=body)
        if answer.status_code == 200:
            self.answered[name] += 1
            self.ends.append(time.monotonic())
        elif answer.status_code == 503 and answer.json()["error"]["code"] == "queue_full":
            if not self.refused:
                self.answered.clear()  # until now there was room for every call
            self.refused.append(time.monotonic() - began)
        else:
            self.others[answer.status_code] += 1

    def _http(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(headers=headers, limits=limits, timeout=FAR_FUTURE)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_clients_get_equal_parts_of_a_server_that_is_asked_twice_what_it_can_do(tmp_path):
    """One sends twice as many. A call that another client's call displaces has waited before."""
    with gpu_serve(
        tmp_path, gguf_models(tmp_path, "only"), **DEVICES, GPU_SERVE_QUEUE="64"
    ) as server:
        load = Load(server)
        asyncio.run(load.warm_up())
        asyncio.run(load.offer(OFFERED, LOAD_SECONDS))
    fairness = min(load.answered.values()) / max(load.answered.values())
    in_time = sum(seconds <= REFUSED_SECONDS for seconds in load.refused)
    told = f"{fairness:.2f} {load.answered} {len(load.refused)} {in_time}"
    assert not load.others and set(load.answered) == set(OFFERED), told
    assert len(load.refused) > load.answered.total() / 3, f"it was not overloaded: {told}"
    assert fairness >= 0.8, told
    print(told, f"{statistics.median(load.refused):.4f} s")
    soak.add(
        "keeper",
        **{
            "seconds of twice the load": LOAD_SECONDS,
            "calls answered under twice the load": load.answered.total(),
            "calls refused under twice the load": len(load.refused),
            "calls refused within 20 ms, under twice the load": in_time,
        },
    )
