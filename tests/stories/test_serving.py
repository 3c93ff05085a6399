"""`gpu serve` as programs use it: a real server, two llama.cpp models that take turns, and OpenAI's client."""

import http.client
import json
import os
import signal
import threading
from collections import Counter

import psutil
import pytest

from gpu_runtime import Runtime
from tests.clock import PATIENCE, until

from .serve import FAR_FUTURE, HELLO, TOKEN, client, gguf_models, gpu_serve, openai, send, told

pytest.importorskip("llama_cpp")

MODELS = ("writer", "editor")
CHAT = "/v1/chat/completions"
DEVICES = "sim:10MiB,host:1GiB"  # the card can hold only one of the models at a time


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return gguf_models(tmp_path_factory.mktemp("models"), *MODELS)


@pytest.fixture(scope="module")
def served(models, tmp_path_factory):
    with gpu_serve(tmp_path_factory.mktemp("served"), models, GPU_DEVICES=DEVICES) as server:
        yield server


def ask(talk, model: str, max_tokens: int, **more):
    return talk.chat.completions.create(model=model, messages=HELLO, max_tokens=max_tokens, **more)


def test_the_official_client_lists_asks_and_streams(served):
    talk = client(served)
    assert {model.id for model in talk.models.list()} == set(MODELS)
    whole = ask(talk, "writer", 8)
    assert whole.model == "writer" and whole.usage.completion_tokens == 8
    assert len(whole.choices[0].message.content) >= 8
    parts = [
        part.choices[0].delta.content or ""
        for part in ask(talk, "writer", 8, stream=True)
        if part.choices
    ]
    assert len("".join(parts)) >= 8 and len(parts) > 2
    assert talk.completions.create(model="writer", prompt="Once", max_tokens=4).choices[0].text


def test_32_clients_and_two_models_that_do_not_fit_together(served):
    """Every call is answered by the model that it names. There are far fewer swaps of models than calls.

    A lease keeps the card until all calls wait. Calls that come one by one would need a swap each.
    """
    answers, errors, talk, start = [], [], client(served), threading.Barrier(32)

    def call(number: int) -> None:
        model = MODELS[number % 2]
        try:
            start.wait(PATIENCE)
            answer = ask(talk, model, 4, stream=number % 4 >= 2)
            names = {part.model for part in answer} if number % 4 >= 2 else {answer.model}
            answers.append((model, *names))
        except Exception as error:
            errors.append(error)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(32)]
    ledger = f"keeper://{served.output_file.parent}/ledger"
    with Runtime(devices=DEVICES, ledger=ledger, gpu_memory_max_percent=1.0) as rt:
        with rt.lease("8MiB", timeout=PATIENCE):
            before = loads(served)
            for caller in callers:
                caller.start()
            until(lambda: figure(served, "gpuconsole_queue_depth") == 32, "all calls wait")
    for caller in callers:
        caller.join(FAR_FUTURE)
    assert not errors and Counter(answers) == {(model, model): 16 for model in MODELS}
    assert 1 <= loads(served) - before <= 8
    assert told(served, "/memory/stats")["models_loaded"] == 1


def figure(server, name: str) -> float:
    """The sum of that metric over all its labels."""
    lines = (line.split() for line in send(server, "/metrics").body.splitlines())
    return sum(float(words[-1]) for words in lines if words[0].startswith(name))


def loads(server) -> float:
    return figure(server, "gpuconsole_loads_total")


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
        ask(talk, "writer", 1)
        engines = workers(served)  # found before the stream, which takes less time than the search
        stream = ask(talk, "writer", 400, stream=True)
        next(iter(stream))
        for worker in engines:
            os.kill(worker.pid, signal.SIGKILL)
        try:
            list(stream)
        except openai.APIError:
            return True
        return False

    until(breaks_off)
    again = ask(talk, "writer", 4)
    assert again.model == "writer" and again.usage.completion_tokens == 4


def test_who_hangs_up_lets_go_of_the_model(served):
    """The other model needs the room, and gets it."""
    stream = ask(client(served), "writer", 450, stream=True)
    next(iter(stream))
    stream.close()
    assert ask(client(served), "editor", 2).model == "editor"

    def in_use() -> list[str]:
        return [row["model_name"] for row in told(served, "/memory/models") if row["in_use"]]

    until(lambda: not in_use(), "the end of both uses: an answer is complete before its use ends")


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
    body = {"model": "writer", "messages": HELLO, "max_tokens": 1}
    ours = {"x_client_id": "other", "x_priority": "urgent", "X_Cooldown": "3600"}
    for headers in (ours, {}):
        assert send(served, CHAT, "POST", body, **headers).status == 200


def test_a_job_goes_on_without_its_caller(served):
    asked = {"model": "writer", "messages": HELLO, "max_tokens": 16}
    begun = send(served, "/v1/jobs", "POST", {"endpoint": CHAT, "body": asked})
    assert begun.status == 202
    path = begun.headers["location"]
    until(lambda: told(served, path)["status"] != "running")
    ended = told(served, path)
    assert ended["status"] == "succeeded" and ended["result"]["usage"]["completion_tokens"] == 16
    assert told(served, path, "DELETE")["id"] == ended["id"]
    assert send(served, path).status == 404


def test_it_ends_with_all_that_it_started(models, tmp_path):
    with gpu_serve(tmp_path, models, GPU_DEVICES=DEVICES) as server:
        ask(client(server), "writer", 2)
        started = workers(server)
        assert started
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 0
        _, alive = psutil.wait_procs(started, timeout=PATIENCE)
        assert alive == []
