"""`gpu serve` as programs use it: a real server, two llama.cpp models that take turns, and OpenAI's client."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import threading
from collections import Counter

import psutil
import pytest

from tests.clock import PATIENCE, scaled, until

openai = pytest.importorskip("openai")
pytest.importorskip("llama_cpp")

from gpu_runtime import samples  # noqa: E402

from ..faces.served import free_port, serving  # noqa: E402

TOKEN, VIEWER = "o" * 43, "v" * 43
MODELS = ("writer", "editor")


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory):
    """The directory of a catalogue with two GGUF models. The card can hold only one of them at a time."""
    place = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(MODELS):
        samples.gguf_lm(place / f"{name}.gguf", seed=seed)
    (place / "models.json").write_text(
        json.dumps(
            {
                "models": {
                    name: {"source": str(place / f"{name}.gguf"), "type": "llm"} for name in MODELS
                }
            }
        )
    )
    return place


@pytest.fixture(scope="module")
def served(kitchen, tmp_path_factory):
    place, port = tmp_path_factory.mktemp("served"), free_port()
    environment = {
        "GPU_CONSOLE_TOKEN": TOKEN,
        "GPU_CONSOLE_VIEWER_TOKEN": VIEWER,
        "GPU_DEVICES": "sim:10MiB,host:1GiB",
        "GPU_MEMORY_MAX_PERCENT": "1.0",
        "GPU_CATALOG": str(kitchen / "models.json"),
        "EVICTION_GRACE_SECONDS": "0",
    }
    words = [sys.executable, "-m", "gpu_runtime.cli", "serve", "--port", str(port)]
    with serving(words, place, environment, port=port) as server:
        yield server


def client(server, token: str = TOKEN):
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1",
        api_key=token,
        max_retries=0,
        timeout=scaled(120),
    )


def say(words: str = "Hello") -> list[dict[str, str]]:
    return [{"role": "user", "content": words}]


def test_the_official_client_lists_asks_and_streams(served):
    talk = client(served)
    assert {model.id for model in talk.models.list()} == set(MODELS)
    whole = talk.chat.completions.create(model="writer", messages=say(), max_tokens=8)
    assert whole.model == "writer"
    assert whole.usage.completion_tokens == 8
    assert len(whole.choices[0].message.content) >= 8
    parts = [
        part.choices[0].delta.content or ""
        for part in talk.chat.completions.create(
            model="writer", messages=say(), max_tokens=8, stream=True
        )
        if part.choices
    ]
    assert len("".join(parts)) >= 8 and len(parts) > 2
    assert talk.completions.create(model="writer", prompt="Once", max_tokens=4).choices[0].text


def test_32_clients_and_two_models_that_do_not_fit_together(served):
    """Every call is answered by the model that it names. There are far fewer swaps of models than calls."""
    answers, errors = [], []

    def call(number: int) -> None:
        model = MODELS[number % 2]
        try:
            if number % 4 < 2:
                answer = client(served).chat.completions.create(
                    model=model, messages=say(str(number)), max_tokens=4
                )
                answers.append((model, answer.model))
            else:
                stream = client(served).chat.completions.create(
                    model=model, messages=say(str(number)), max_tokens=4, stream=True
                )
                answers.append((model, {part.model for part in stream}.pop()))
        except Exception as error:
            errors.append(error)

    before = loads(served)
    callers = [threading.Thread(target=call, args=(number,)) for number in range(32)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(scaled(120))
    assert not errors and Counter(answers) == {(model, model): 16 for model in MODELS}
    assert 1 <= loads(served) - before <= 8
    assert (
        json.loads(served.get("/memory/stats", Authorization=f"Bearer {TOKEN}").body)[
            "models_loaded"
        ]
        == 1
    )


def loads(server) -> float:
    text = server.get("/metrics", Authorization=f"Bearer {TOKEN}").body
    lines = (line.split() for line in text.splitlines() if line.startswith("gpu_loads_total"))
    return sum(float(words[1]) for words in lines)


def workers(server) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if "sampler" not in " ".join(child.cmdline())
    ]


def test_an_engine_killed_in_the_middle_is_one_clear_error_and_the_next_call_answers(served):
    talk = client(served)

    def breaks_off() -> bool:
        """Whether the kill came before the end of the answer."""
        talk.chat.completions.create(model="writer", messages=say(), max_tokens=1)
        engines = workers(served)  # found before the stream, which takes less time than the search
        stream = talk.chat.completions.create(
            model="writer", messages=say(), max_tokens=400, stream=True
        )
        next(iter(stream))
        for worker in engines:
            os.kill(worker.pid, signal.SIGKILL)
        try:
            list(stream)
        except openai.APIError:
            return True
        return False

    until(breaks_off)
    again = talk.chat.completions.create(model="writer", messages=say(), max_tokens=4)
    assert again.model == "writer" and again.usage.completion_tokens == 4


def test_who_hangs_up_lets_go_of_the_model(served):
    """The other model needs the room, and gets it."""
    stream = client(served).chat.completions.create(
        model="writer", messages=say(), max_tokens=450, stream=True
    )
    next(iter(stream))
    stream.close()
    assert (
        client(served).chat.completions.create(model="editor", messages=say(), max_tokens=2).model
        == "editor"
    )

    def in_use() -> list[str]:
        models = json.loads(served.get("/memory/models", Authorization=f"Bearer {TOKEN}").body)
        return [row["model_name"] for row in models if row["in_use"]]

    until(lambda: not in_use(), "the end of both uses: an answer is complete before its use ends")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "nobody", "messages": say()}, 404),
        ({"messages": say()}, 400),
        ({"model": 7, "messages": say()}, 400),
        ({"model": "writer", "messages": "hi"}, 400),
        ({"model": "writer", "messages": say(), "max_tokens": 10**12}, 400),
        ({"model": "writer", "messages": say(), "max_tokens": -1}, 400),
        ({"model": "writer", "messages": say("x" * 20_000), "max_tokens": 4}, 400),
        ({"model": "writer", "messages": say(), "temperature": "hot"}, 400),
    ],
)
def test_what_is_wrong_with_a_call_is_said_and_nothing_is_lost(served, body, status):
    answer = served.get(
        "/v1/chat/completions",
        method="POST",
        body=json.dumps(body),
        Authorization=f"Bearer {TOKEN}",
    )
    assert (answer.status, bool(json.loads(answer.body)["error"]["message"])) == (status, True)


@pytest.mark.parametrize("waits", [True, False])
def test_a_body_beyond_the_bound_is_refused_by_what_its_head_says(served, waits):
    """A client that sends the body at once gets the reason as well, and can use the connection for the next call."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Authorization", f"Bearer {TOKEN}")
    connection.putheader("Accept", "application/json")
    connection.putheader("Content-Length", str(33 << 20))
    if waits:
        connection.putheader("Expect", "100-continue")
    connection.endheaders(None if waits else bytes(33 << 20))
    answer = connection.getresponse()
    assert answer.status == 413
    assert "the limit is 33,554,432" in json.load(answer)["error"]["message"]
    if not waits:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {TOKEN}"})
        assert connection.getresponse().status == 200
    connection.close()


def test_fields_of_ours_do_not_come_by_header(served):
    """A proxy may add headers, but only the client writes the body."""
    answer = served.get(
        "/v1/chat/completions",
        method="POST",
        Authorization=f"Bearer {TOKEN}",
        x_client_id="other",
        x_priority="urgent",
        X_Cooldown="3600",
        body=json.dumps({"model": "writer", "messages": say(), "max_tokens": 1}),
    )
    assert answer.status == 200
    assert (
        served.get(
            "/v1/chat/completions",
            method="POST",
            Authorization=f"Bearer {TOKEN}",
            body=json.dumps({"model": "writer", "messages": say(), "max_tokens": 1}),
        ).status
        == 200
    )


def test_every_route_asks_for_the_token_and_a_viewer_only_reads(served):
    for path in (
        "/",
        "/health",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/v1/models",
        "/memory/stats",
        "/api/v1/config",
    ):
        assert served.get(path).status == 403, path
        assert served.get(path, Authorization=f"Bearer {VIEWER}").status == 200, path
    with pytest.raises(openai.PermissionDeniedError):
        client(served, VIEWER).chat.completions.create(model="writer", messages=say())
    assert TOKEN not in served.output


def test_a_job_goes_on_without_its_caller(served):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    body = {
        "endpoint": "/v1/chat/completions",
        "body": {"model": "writer", "messages": say(), "max_tokens": 16},
    }
    begun = served.get("/v1/jobs", method="POST", body=json.dumps(body), **headers)
    assert begun.status == 202
    path = begun.headers["location"]

    def ended() -> dict[str, object] | None:
        told = json.loads(served.get(path, **headers).body)
        return told if told["status"] != "running" else None

    told = until(ended)
    assert told["status"] == "succeeded" and told["result"]["usage"]["completion_tokens"] == 16
    assert json.loads(served.get(path, method="DELETE", **headers).body)["id"] == told["id"]
    assert served.get(path, **headers).status == 404


def test_it_ends_with_all_that_it_started(kitchen, tmp_path):
    port = free_port()
    environment = {
        "GPU_CONSOLE_TOKEN": TOKEN,
        "GPU_DEVICES": "sim:10MiB,host:1GiB",
        "GPU_CATALOG": str(kitchen / "models.json"),
        "GPU_MEMORY_MAX_PERCENT": "1.0",
    }
    words = [sys.executable, "-m", "gpu_runtime.cli", "serve", "--port", str(port)]
    with serving(words, tmp_path, environment, port=port) as server:
        client(server).chat.completions.create(model="writer", messages=say(), max_tokens=2)
        started = workers(server)
        assert started
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 0
        _, alive = psutil.wait_procs(started, timeout=PATIENCE)
        assert alive == []
