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

from .bench_http import MESSAGES, Server, free_port, serving
from .results import Row
from .timing import medians

CONNECTIONS = 32
TEXTS = [" ".join(["one two"] * (1 + n % 5)) for n in range(256)]
# The answers of this model take as long as those of a small model in use. The model "writer" only shows the cost of
# the server: one token of it takes less than a millisecond.
LARGER = "larger"
MODELS = {"writer": "24 MiB", LARGER: "400 MiB"}
PARALLEL = 8  # clients of two models with room for one
LONG = {"model": "writer", "stream": True, "max_tokens": 400, "temperature": 0}


def rows() -> Iterator[Row]:
    """The rows of llama-server are left out where it is not installed."""
    with_engine = shutil.which("llama-server") is not None
    with tempfile.TemporaryDirectory() as directory:
        bge = str(samples.embedder(f"{directory}/bge", size="12 MiB"))
        samples.gguf_lm(f"{directory}/{LARGER}.gguf", size=MODELS[LARGER])
        models = {
            "bge": {"path": bge, "type": "embedding"},
            LARGER: {"path": f"{LARGER}.gguf", "type": "llm", "context_length": 512},
        }
        for name in MODELS:
            native = {"path": f"{name}.gguf", "type": "llm", "context_length": 512}
            engine = {"backend": "llama-server", "sequences": CONNECTIONS}
            models[f"native-{name}"] = native | engine
        with serving(directory, models) as server, _direct(directory) as workers:
            yield from own_worker(server, "writer", workers[0], rounds=100)
            yield from own_worker(server, LARGER, workers[1], rounds=30)
            yield stream_gap(server, workers[0])
            yield embeddings(server, bge)
            if with_engine:
                yield from http_engine(server, directory, "writer", crowds=5)
                yield from http_engine(server, directory, LARGER, crowds=2)
            yield hang_up(server)
    if with_engine:
        yield from two_models()


def _beside_engine(
    name: str,
    engine: str,
    one: list[float],
    many: list[float],
    calls: int,
    most: float,
    least: float,
) -> Iterator[Row]:
    """The rows that compare `gpu serve` with its `engine`, called directly.

    `one` and `many` have the seconds of a chat with one token and of `calls` chats of all clients: direct, and served.
    """
    model = f"a model of {MODELS[name]}"
    ratio = one[1] / one[0]
    yield Row(
        f"a chat with one token through `gpu serve`, {model}, against {engine} called directly",
        f"{ratio:.2f}× of {one[0] * 1e3:.1f} ms", f"≤ {most}×", ratio <= most
    )  # fmt: skip
    ratio = many[0] / many[1]
    yield Row(
        f"calls a second of {CONNECTIONS} clients, {model}, against {engine} alone",
        f"{ratio:.2f}× of {calls / many[0]:.0f} a second", f"≥ {least}×", ratio >= least
    )  # fmt: skip


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


def _chat(place: Server, model: str, tokens: int, connection: http.client.HTTPConnection) -> None:
    more = {"model": model, "max_tokens": tokens, "temperature": 0}
    place.call(connection, messages=_messages(), **more).read()


def _one(place: Server, model: str) -> Callable[[], None]:
    """A function that makes a chat of `model` with one token."""
    return partial(_chat, place, model, 1, http.client.HTTPConnection(place.address))


def _crowd(place: Server, model: str, calls: int) -> Callable[[], None]:
    """A function that makes `calls` chats of `model` with 8 tokens each, of CONNECTIONS clients."""

    def client(many: int) -> None:
        connection = http.client.HTTPConnection(place.address)
        for _ in range(many):
            _chat(place, model, 8, connection)

    def crowd() -> None:
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(client, [calls // CONNECTIONS] * CONNECTIONS))

    return crowd


def own_worker(
    server: Server, name: str, model: Any, rounds: int, calls: int = 64
) -> Iterator[Row]:
    """A chat with one token, and CONNECTIONS clients, against the same engine as `model`, called directly."""

    def direct(tokens: int, calls: int) -> None:
        for _ in range(calls):
            model.create_chat_completion(_messages(), max_tokens=tokens, temperature=0)

    one = medians(rounds, partial(direct, 1, 1), _one(server, name), warm=3)
    many = medians(3, partial(direct, 8, calls), _crowd(server, name, calls))
    yield from _beside_engine(name, "its own worker", one, many, calls, 1.3, 0.95)


def stream_gap(server: Server, writer: Any) -> Row:
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

    alone, served = medians(40, direct, through)
    more = served - alone
    what = "gap between the first and the second piece of a stream, against the worker"
    return Row(what, f"{more * 1e3:+.1f} ms", "≤ +1 ms", more <= 0.001)


def http_engine(server: Server, directory: str, name: str, crowds: int) -> Iterator[Row]:
    """The same for llama-server. The calls a second are the median of `crowds` runs."""
    calls = 4 * CONNECTIONS
    with _llama_server(CONNECTIONS, "--model", f"{directory}/{name}.gguf") as alone:
        places = (alone, server)
        one = medians(20 * crowds, *(_one(place, f"native-{name}") for place in places), warm=3)
        many = [_crowd(place, f"native-{name}", calls) for place in places]
        taken = medians(crowds, *many, warm=1)
    yield from _beside_engine(name, "llama-server", one, taken, calls, 1.6, 0.85)


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


def two_models(seconds: float = 20.0, rounds: int = 3, swaps: int = 10) -> Iterator[Row]:
    """Two models with room for one, in `gpu serve` and in llama-server's router.

    A swap is one call of each model by its own worker: two swaps. The second row is of PARALLEL clients, see
    `_crowd_and_one`. Their engine is llama-server.
    """
    with tempfile.TemporaryDirectory() as directory:
        for name, size in MODELS.items():
            samples.gguf_lm(f"{directory}/{name}.gguf", size=size)
        words = ("--models-dir", directory, "--models-max", "1")
        with _llama_server(PARALLEL, *words) as router:
            with _room_for_one(directory, {}) as server:
                ways = [partial(_one_of_each, place) for place in (router, server)]
                swap, swap_served = medians(swaps, *ways, warm=1)  # the first loads
            engine = {"backend": "llama-server", "sequences": PARALLEL}
            with _room_for_one(directory, engine) as server:
                found = [
                    (*_crowd_and_one(router, seconds), *_crowd_and_one(server, seconds))
                    for _ in range(rounds)
                ]
    calls, cold, calls_served, cold_served = map(statistics.median, zip(*found, strict=True))
    ratio = swap_served / swap
    yield Row(
        "two models of 24 and 400 MiB with room for one: a call of each, by its own worker, against "
        "llama-server's router", f"{ratio:.2f}× of {swap * 1e3:.0f} ms", "≤ 1.3×", ratio <= 1.3
    )  # fmt: skip
    ratio = calls_served / calls
    yield Row(
        f"two models of 24 and 400 MiB with room for one, {PARALLEL} clients: calls a "
        "second against llama-server's router; p50 of the calls of the model that is away",
        f"{ratio:.2f}× of {calls:.1f} a second; {cold_served:.1f} s (router {cold:.1f})",
        "≥ 0.8×; ≤ 5 s", ratio >= 0.8 and cold_served <= 5
    )  # fmt: skip


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
        _chat(place, name, 1, connection)


def _crowd_and_one(place: Server, seconds: float) -> tuple[float, float]:
    """The calls a second of PARALLEL clients with 8 tokens each, and the median seconds of the last one's calls.

    The last client calls the larger model, each time when the others have got an answer since: it is away each time.
    """
    ends = time.perf_counter() + seconds
    answers = threading.Condition()
    counts = dict.fromkeys(MODELS, 0)
    cold: list[float] = []

    def call(connection: http.client.HTTPConnection, name: str) -> None:
        _chat(place, name, 8, connection)
        with answers:
            counts[name] += 1
            answers.notify_all()

    def of_the_crowd() -> None:
        connection = http.client.HTTPConnection(place.address)
        while time.perf_counter() < ends:
            call(connection, "writer")

    def single() -> None:
        connection = http.client.HTTPConnection(place.address)
        while time.perf_counter() < ends:
            with answers:
                wanted = counts["writer"] + 1
                answers.wait_for(
                    lambda wanted=wanted: counts["writer"] >= wanted, ends - time.perf_counter()
                )
            began = time.perf_counter()
            call(connection, LARGER)
            cold.append(time.perf_counter() - began)

    began = time.perf_counter()
    with ThreadPoolExecutor(PARALLEL) as pool:
        clients = [of_the_crowd] * (PARALLEL - 1) + [single]
        for client in [pool.submit(client) for client in clients]:
            client.result()
    return sum(counts.values()) / (time.perf_counter() - began), statistics.median(cold)


def embeddings(server: Server, source: str) -> Row:
    """The seconds for the embeddings of TEXTS through the server, and in batches of 32 by transformers alone."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    module, tokenizer = AutoModel.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    body = {"model": "bge", "input": TEXTS, "encoding_format": "base64"}

    def through() -> None:
        connection = http.client.HTTPConnection(server.address)
        answer = server.request(connection, "/v1/embeddings", body)
        assert len(json.loads(answer.read())["data"]) == len(TEXTS)

    @torch.inference_mode()
    def direct() -> None:
        for at in range(0, len(TEXTS), 32):
            batch = tokenizer(TEXTS[at : at + 32], padding=True, return_tensors="pt")
            batch.pop("token_type_ids", None)
            mask = batch["attention_mask"][:, :, None]
            (module(**batch).last_hidden_state * mask).sum(1).div(mask.sum(1)).tolist()

    alone, served = medians(3, direct, through, warm=1)  # the first call loads the model
    ratio = served / alone
    return Row(
        f"{len(TEXTS)} embeddings through `gpu serve`, against batches of 32 in plain transformers",
        f"{ratio:.2f}× of {alone:.2f} s", "≤ 1.2×", ratio <= 1.2
    )  # fmt: skip


def hang_up(server: Server, rounds: int = 5) -> Row:
    """The seconds until another client has a token after a client left its stream, and to cancel a job."""
    other = http.client.HTTPConnection(server.address)
    one = {"model": "writer", "max_tokens": 1, "temperature": 0}

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
        id = json.loads(server.request(other, "/v1/jobs", job).read())["id"]
        time.sleep(0.05)  # it runs
        began = time.perf_counter()
        server.request(other, f"/v1/jobs/{id}", None, "DELETE").read()
        return time.perf_counter() - began

    free, ended = medians(rounds, left, cancelled)
    what = "from a client that leaves its stream to another client's token; cancel of a job"
    taken = f"{free * 1e3:.0f} ms; {ended * 1e3:.0f} ms"
    return Row(what, taken, "≤ 100 ms", max(free, ended) <= 0.1)
