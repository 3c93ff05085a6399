"""Measures what `gpu serve` adds to an engine of its own: to one token, a stream, many clients and many embeddings.

Each figure is compared with the same engine called directly. The two are measured alternately in one run. Two models
with room for one are compared with llama-server's router.
"""

import contextlib
import http.client
import json
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil

from gpu_runtime import Runtime, samples
from tests.bench.bench_http import MESSAGES, Server, free_port, serving

CONNECTIONS = 32
TEXTS = [" ".join(["one two"] * (1 + n % 5)) for n in range(256)]
# The answers of this model take as long as those of a small model in use. The model "writer" only shows the cost of
# the server: one token of it takes less than a millisecond.
LARGER, LARGER_SIZE = "larger", "400 MiB"
MODELS = ("writer", LARGER)
PARALLEL = 8  # clients of two models with room for one
LONG = {"model": "writer", "stream": True, "max_tokens": 400, "temperature": 0}


def figures() -> dict[str, float]:
    """All figures, by name. Seconds are medians."""
    with tempfile.TemporaryDirectory() as directory:
        bge = str(samples.embedder(f"{directory}/bge", size="12 MiB"))
        samples.gguf_lm(f"{directory}/{LARGER}.gguf", size=LARGER_SIZE)
        models = {
            "bge": {"path": bge, "type": "embedding"},
            LARGER: {"path": f"{LARGER}.gguf", "type": "llm", "context_length": 512},
        }
        for name in MODELS:
            native = {"path": f"{name}.gguf", "type": "llm", "context_length": 512}
            models[f"native-{name}"] = native | {
                "backend": "llama-server",
                "sequences": CONNECTIONS,
            }

        with serving(directory, models) as server, _direct(directory) as (writer, larger):
            return {
                **embeddings(server, bge),
                **one_token(server, "writer", writer),
                **one_token(server, LARGER, larger, rounds=30),
                **stream_gap(server, writer),
                **many_clients(server, "writer", writer),
                **many_clients(server, LARGER, larger),
                **hang_up(server),
                **http_engine(server, directory, "writer", crowds=5),
                **http_engine(server, directory, LARGER, crowds=2),
            }


@contextmanager
def _direct(directory: str) -> Iterator[tuple[Any, Any]]:
    """Both models in workers of this process, without a server."""
    with Runtime(devices="sim:24GiB,host:64GiB", ledger="memory:") as rt:
        for name in MODELS:
            rt.register(name, f"{directory}/{name}.gguf", context_length=512)
        with rt.use("writer") as writer, rt.use(LARGER) as larger:
            yield writer, larger


def _messages() -> list[dict[str, str]]:
    """A short prompt, different at each call. For an equal prompt, llama.cpp would not run the model."""
    words = random.choices(("one", "two", "three", "four", "five"), k=8)
    return [{"role": "user", "content": " ".join(words)}]


def _alternately(rounds: int, *ways: Callable[[], float | None]) -> list[float]:
    """The median seconds of each way. A way may return its own seconds."""
    taken: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for seconds, way in zip(taken, ways, strict=True):
            began = time.perf_counter()
            own = way()
            seconds.append(time.perf_counter() - began if own is None else own)
    return [statistics.median(seconds) for seconds in taken]


def _one(place: Server, model: str) -> Callable[[], None]:
    """A function that makes a chat of `model` with one token."""
    connection = http.client.HTTPConnection(place.address)

    def one() -> None:
        body = {"model": model, "max_tokens": 1, "temperature": 0}
        place.call(connection, messages=_messages(), **body).read()

    return one


def _crowd(place: Server, model: str, calls: int) -> Callable[[], None]:
    """A function that makes `calls` chats of `model` with 8 tokens each, of CONNECTIONS clients."""

    def client(many: int) -> None:
        connection = http.client.HTTPConnection(place.address)
        for _ in range(many):
            body = {"model": model, "max_tokens": 8, "temperature": 0}
            place.call(connection, messages=_messages(), **body).read()

    def crowd() -> None:
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(client, [calls // CONNECTIONS] * CONNECTIONS))

    return crowd


def one_token(server: Server, name: str, model: Any, rounds: int = 100) -> dict[str, float]:
    """The seconds of a chat with one token of the model `name`; `model` is the same engine, called directly."""

    def direct() -> None:
        model.create_chat_completion(_messages(), max_tokens=1, temperature=0)

    ways = direct, _one(server, name)
    _alternately(3, *ways)
    alone, served = _alternately(rounds, *ways)
    return {f"{name}, one token, direct": alone, f"{name}, one token, served": served}


def stream_gap(server: Server, writer: Any) -> dict[str, float]:
    """The seconds between the first and the second piece of a stream."""
    connection = http.client.HTTPConnection(server.address)

    def gap(pieces: Iterator[Any]) -> float:
        times = [time.perf_counter() for piece in pieces if piece]
        return times[1] - times[0]

    def direct() -> float:
        said = writer.create_chat_completion(MESSAGES, stream=True, max_tokens=8, temperature=0)
        return gap(chunk["choices"][0]["delta"].get("content") for chunk in said)

    def through() -> float:
        answer = server.call(connection, model="writer", stream=True, max_tokens=8, temperature=0)
        lines = (line[6:] for line in answer if line.startswith(b"data: {"))
        found = gap(json.loads(line)["choices"][0]["delta"].get("content") for line in lines)
        answer.read()
        return found

    alone, served = _alternately(40, direct, through)
    return {"gap, direct": alone, "gap, served": served}


def many_clients(server: Server, name: str, model: Any, calls: int = 64) -> dict[str, float]:
    """The calls a second of CONNECTIONS clients with 8 tokens each, and of the engine alone."""

    def direct() -> None:
        for _ in range(calls):
            model.create_chat_completion(_messages(), max_tokens=8, temperature=0)

    alone, served = _alternately(3, direct, _crowd(server, name, calls))
    return {f"{name}, clients, direct": calls / alone, f"{name}, clients, served": calls / served}


def http_engine(server: Server, directory: str, name: str, crowds: int) -> dict[str, float]:
    """The same for llama-server with the model `name`: one token, and calls a second of CONNECTIONS clients.

    The calls a second are the median of `crowds` runs. The result is empty without llama-server.
    """
    if shutil.which("llama-server") is None:
        return {}
    with _llama_server(CONNECTIONS, "--model", f"{directory}/{name}.gguf") as alone:
        return _one_token_and_clients(server, alone, name, crowds)


@contextmanager
def _llama_server(parallel: int, *words: str) -> Iterator[Server]:
    """Runs llama-server inside the `with` block. It runs so many calls at once, as the models of `figures` do."""
    port = free_port()
    size = ["--ctx-size", str(512 * parallel), "--parallel", str(parallel)]
    command = ["llama-server", *words, "--port", str(port), "--jinja", *size]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as process:
        try:
            _wait_until_ready(port)
            yield Server(f"127.0.0.1:{port}", "", psutil.Process(process.pid))
        finally:
            process.terminate()


def _wait_until_ready(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError):  # HTTP 503 while it loads
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        time.sleep(0.1)
    raise TimeoutError("llama-server is not ready after a minute")


def _one_token_and_clients(
    server: Server, alone: Server, name: str, rounds: int
) -> dict[str, float]:
    calls = 4 * CONNECTIONS
    ways = [_one(place, f"native-{name}") for place in (alone, server)]
    _alternately(3, *ways)
    direct, served = _alternately(20 * rounds, *ways)
    crowds = [_crowd(place, f"native-{name}", calls) for place in (alone, server)]
    _alternately(1, *crowds)
    many, many_served = _alternately(rounds, *crowds)
    return {
        f"HTTP engine, {name}, one token, direct": direct,
        f"HTTP engine, {name}, one token, served": served,
        f"HTTP engine, {name}, clients, direct": calls / many,
        f"HTTP engine, {name}, clients, served": calls / many_served,
    }


def two_models(seconds: float = 20.0, rounds: int = 3, swaps: int = 10) -> dict[str, float]:
    """Two models with room for one, in `gpu serve` and in llama-server's router; empty without llama-server.

    `swap` is one call of each model by its own worker: two swaps. `calls` are those a second of PARALLEL clients, and
    `cold` is the median of the calls of the model that is away; see `_crowd_and_one`. Their engine is llama-server.
    """
    if shutil.which("llama-server") is None:
        return {}
    with tempfile.TemporaryDirectory() as directory:
        for name, size in zip(MODELS, ("24 MiB", LARGER_SIZE), strict=True):
            samples.gguf_lm(f"{directory}/{name}.gguf", size=size)
        words = ("--models-dir", directory, "--models-max", "1")
        with _llama_server(PARALLEL, *words) as router:
            with _room_for_one(directory, {}) as server:
                ways = [partial(_one_of_each, place) for place in (router, server)]
                _alternately(1, *ways)  # the first loads
                swap, swap_served = _alternately(swaps, *ways)
            engine = {"backend": "llama-server", "sequences": PARALLEL}
            found: dict[str, list[float]] = {}
            with _room_for_one(directory, engine) as server:
                for _ in range(rounds):
                    for place, end in ((router, ""), (server, ", served")):
                        calls, cold = _crowd_and_one(place, seconds)
                        found.setdefault(f"calls{end}", []).append(calls)
                        found.setdefault(f"cold{end}", []).append(cold)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {"swap": swap, "swap, served": swap_served, **medians}


@contextmanager
def _room_for_one(directory: str, options: dict[str, object]) -> Iterator[Server]:
    """Runs `gpu serve` with MODELS, and with `options`, on a card that has room for one of them."""
    with Runtime(devices="sim:24GiB,host:64GiB", ledger="memory:") as rt:
        needs = []
        for name in MODELS:
            found = rt.plan(f"{directory}/{name}.gguf", context_length=512, **options)
            needs.append(sum(share.bytes for share in found.shares))
    card = (max(needs) + min(needs) // 2) / rt.settings.gpu_memory_max_percent
    entry = {"type": "llm", "context_length": 512, **options}
    models = {name: {"path": f"{name}.gguf", **entry} for name in MODELS}
    with serving(directory, models, f"{card / 2**20:.0f}MiB") as server:
        yield server


def _one_of_each(place: Server) -> None:
    connection = http.client.HTTPConnection(place.address)
    for name in MODELS:
        place.call(connection, messages=_messages(), model=name, max_tokens=1).read()


def _crowd_and_one(place: Server, seconds: float) -> tuple[float, float]:
    """The calls a second of PARALLEL clients with 8 tokens each, and the median seconds of the last one's calls.

    The last client calls the larger model, each time when the others have got an answer since: it is away each time.
    """
    ends = time.perf_counter() + seconds
    answers = threading.Condition()
    counts = dict.fromkeys(MODELS, 0)
    cold: list[float] = []

    def call(connection: http.client.HTTPConnection, name: str) -> None:
        body = {"messages": _messages(), "max_tokens": 8, "temperature": 0}
        place.call(connection, model=name, **body).read()
        with answers:
            counts[name] += 1
            answers.notify_all()

    def of_the_crowd() -> None:
        connection = http.client.HTTPConnection(place.address)
        while time.perf_counter() < ends:
            call(connection, "writer")

    def is_answered(wanted: int) -> bool:
        return counts["writer"] >= wanted

    def single() -> None:
        connection = http.client.HTTPConnection(place.address)
        while time.perf_counter() < ends:
            with answers:
                wanted = counts["writer"] + 1
                answers.wait_for(partial(is_answered, wanted), ends - time.perf_counter())
            began = time.perf_counter()
            call(connection, LARGER)
            cold.append(time.perf_counter() - began)

    began = time.perf_counter()
    with ThreadPoolExecutor(PARALLEL) as pool:
        clients = [of_the_crowd] * (PARALLEL - 1) + [single]
        for client in [pool.submit(client) for client in clients]:
            client.result()
    return sum(counts.values()) / (time.perf_counter() - began), statistics.median(cold)


def embeddings(server: Server, source: str) -> dict[str, float]:
    """The seconds for the embeddings of TEXTS through the server, and in batches of 32 by transformers alone."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    module, tokenizer = AutoModel.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"}
    body = json.dumps({"model": "bge", "input": TEXTS, "encoding_format": "base64"})

    def through() -> None:
        connection = http.client.HTTPConnection(server.address)
        connection.request("POST", "/v1/embeddings", body, headers)
        answer = connection.getresponse()
        assert len(json.loads(answer.read())["data"]) == len(TEXTS)

    @torch.inference_mode()
    def direct() -> None:
        for at in range(0, len(TEXTS), 32):
            batch = tokenizer(TEXTS[at : at + 32], padding=True, return_tensors="pt")
            batch.pop("token_type_ids", None)
            mask = batch["attention_mask"][:, :, None]
            (module(**batch).last_hidden_state * mask).sum(1).div(mask.sum(1)).tolist()

    through()  # loads the model
    alone, served = _alternately(3, direct, through)
    return {"embeddings, direct": alone, "embeddings, served": served}


def hang_up(server: Server, rounds: int = 5) -> dict[str, float]:
    """The seconds until another client has a token after a client left its stream, and to cancel a job."""
    other = http.client.HTTPConnection(server.address)
    one = {"model": "writer", "max_tokens": 1, "temperature": 0}
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"}

    def left() -> float:
        leaving = http.client.HTTPConnection(server.address)
        server.call(leaving, **LONG).readline()
        began = time.perf_counter()
        leaving.close()
        server.call(other, **one).read()
        return time.perf_counter() - began

    def cancelled() -> float:
        body = {"messages": MESSAGES, **LONG, "stream": False}
        job = {"endpoint": "/v1/chat/completions", "body": body}
        other.request("POST", "/v1/jobs", json.dumps(job), headers)
        id = json.loads(other.getresponse().read())["id"]
        time.sleep(0.05)  # it runs
        began = time.perf_counter()
        other.request("DELETE", f"/v1/jobs/{id}", headers=headers)
        other.getresponse().read()
        return time.perf_counter() - began

    free, ended = _alternately(rounds, left, cancelled)
    return {"hang-up": free, "job": ended}
