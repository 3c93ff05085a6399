"""`/api/*` answers Ollama's clients: it translates the routes for chats, texts and embeddings."""

import asyncio
import json
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGUFReader
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM

from gpu_runtime import samples
from gpu_runtime.access_keys import AccessKey
from gpu_runtime.facts import HOST, Lease, Share
from gpu_runtime.serving.api import ollama
from gpu_runtime.serving.api.app import application
from gpu_runtime.serving.api.ollama import (
    OLLAMA_VERSION,
    _chat_part,
    _count,
    _durations,
    _OllamaWriter,
    chat_of,
    embed_of,
    generate_of,
    whole,
)
from gpu_runtime.serving.records import CallRecord
from gpu_runtime.serving.requests import Refused, Reply
from gpu_runtime.version import VERSION
from gpu_runtime.web.auth import Visitor
from tests.clock import Clock, until
from tests.serving.app_client import OPERATOR, with_visitor
from tests.serving.harness import Harness, refusal

BOT = Visitor("key:bot", False, may_call=True, api_only=True)
HI = {"model": "qwen", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{# tools <tool_call> <think> #}{% for m in messages %}{{ m.content if loop.last }}{% endfor %}"
)
SAID = 'See: <tool_call>{"name": "time", "arguments": {"zone": "CET"}}</tool_call>'


def test_a_conversation_is_translated():
    """The result of a tool belongs to the call before it, which gets a name."""
    answers = [
        {"role": "user", "content": "What?", "images": ["AAAA"]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "time", "arguments": {}}}]},
        {"role": "tool", "content": "12:00", "tool_name": "time"},
    ]
    kind, body = chat_of({**HI, "messages": answers, "tools": [TOOL]})
    asked, called, result = body.pop("messages")
    assert (kind, body.pop("tools")) == ("chat", [TOOL])
    assert body == {"model": "qwen", "stream": True, "stream_options": {"include_usage": True}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert asked["content"] == [{"type": "text", "text": "What?"}, image]
    call = {"id": "call0", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    assert (called["content"], called["tool_calls"]) == ("", [call])
    assert result == {"role": "tool", "content": "12:00", "tool_call_id": "call0"}


FORM = {"type": "json_schema", "json_schema": {"name": "format", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("field", "becomes"),
    [
        ({"format": {"type": "object"}}, {"response_format": FORM}),
        ({"options": {"num_predict": 5, "stop": ["END"]}}, {"max_tokens": 5, "stop": ["END"]}),
        ({"options": {"mirostat": 0, "top_k": None}}, {"mirostat_mode": 0}),
        ({"think": False}, {"x_thinking": False}),
        ({"think": "low"}, {"reasoning_effort": "low"}),
        ({"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"x_client_id": "bot"}, {"x_client_id": "bot"}),
        ({"keep_alive": "1h30m"}, {"x_stay_warm": 5400.0}),
        ({"keep_alive": "1.5h"}, {"x_stay_warm": 5400.0}),
        ({"keep_alive": "1m0s"}, {"x_stay_warm": 60.0}),
        ({"keep_alive": "2µs"}, {"x_stay_warm": pytest.approx(2e-6)}),
        ({"keep_alive": "-1m"}, {"x_stay_warm": 86400.0}),
        ({"keep_alive": -1}, {"x_stay_warm": 86400.0}),
        ({"keep_alive": "0"}, {"x_stay_warm": 0.0}),
    ],
)
def test_a_field_of_ollama_is_a_field_of_a_chat(field, becomes):
    """Durations are read as Go writes them. A negative one is the longest."""
    _, plain = chat_of(HI)
    assert chat_of({**HI, **field})[1] == {**plain, **becomes}
    _, text = generate_of({"model": "qwen", "prompt": "hi", **field})
    assert text == {**plain, **becomes}


def test_a_text_is_a_chat_unless_it_is_raw():
    body = {"model": "qwen", "prompt": "hi", "stream": False}
    made = {"model": "qwen", "stream": False}
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "hi"}
    assert generate_of(body | {"system": "Be brief."}) == (
        "chat",
        made | {"messages": [system, user]},
    )
    assert generate_of(body | {"raw": True}) == ("completions", made | {"prompt": "hi"})


@pytest.mark.parametrize(("translate", "change", "param"), [
    (chat_of, {"messages": "hi"}, "messages"),
    (chat_of, {"options": {"num_ctx": 0}}, "options.num_ctx"),
    (chat_of, {"options": {"num_gpu": 1}}, "options.num_gpu"),
    (chat_of, {"keep_alive": "5 m"}, "keep_alive"),
    (chat_of, {"options": 7}, "options"),
    (chat_of, {"format": "yaml"}, "format"),
    (chat_of, {"keep_alive": "soon"}, "keep_alive"),
    (chat_of, {"raw": True}, "raw"),
    (generate_of, {"prompt": "a", "messages": None, "suffix": "b"}, "suffix"),
    (generate_of, {"messages": None, "prompt": 7}, "prompt"),
    (generate_of, {"messages": None, "prompt": "a", "raw": True, "system": "b"}, "system"),
    (chat_of, {"messages": [{"role": "user", "images": True}]}, "messages[0].images"),
    (chat_of, {"messages": [{"role": "user", "tool_calls": 7}]}, "messages[0].tool_calls"),
])  # fmt: skip
def test_what_our_routes_have_not_is_refused(translate, change, param):
    with refusal(400, param=param):
        translate({**HI, **change})
    with pytest.raises(Refused):
        translate([])


def test_a_long_text_is_cut_off_unless_the_caller_forbids_it():
    """As Ollama does."""
    body = {"model": "bge", "input": "a"}
    for given, truncate in ({}, True), ({"truncate": None}, True), ({"truncate": False}, False):
        assert embed_of({**body, **given}) == ("embeddings", {**body, "truncate": truncate})


def test_a_call_without_a_text_only_loads_its_model():
    """Ollama's clients load a model in this way, and unload it with `keep_alive: 0`."""
    for translate, body in (
        (generate_of, {"prompt": ""}),
        (generate_of, {"system": "Be brief.", "options": {"temperature": 0}}),
        (chat_of, {"messages": []}),
        (chat_of, {}),
    ):
        made = {"model": "qwen", "x_stay_warm": 60.0}
        assert translate({"model": "qwen", "keep_alive": "1m", **body}) == ("load", made)


@pytest.fixture(scope="module")
def http():
    """A client of the application over a real gateway. The model `qwen` repeats the last message."""
    options = {
        "qwen": {"chat_template": TEMPLATE},
        "bge": {"model_type": "embedding"},
        "sized": {"context_length": 4096},
    }
    made = Harness(
        qwen=4, bge=2, sized=1, options=options, keys=lambda: {"bot": AccessKey("0" * 64)}
    )
    app = application(made.rt, lambda: made.gateway)
    operators, bots = with_visitor(app, OPERATOR), with_visitor(app, BOT)

    async def either(scope: Any, *channels: Any) -> None:
        is_bot = (b"x-bot", b"1") in scope.get("headers", ())
        await (bots if is_bot else operators)(scope, *channels)

    with TestClient(either, raise_server_exceptions=False) as client:
        yield client
        client.portal.call(made.gateway.close)
    made.rt.close()


def test_a_chat_with_thoughts_and_a_tool_call_whole_and_streamed(http):
    """Thoughts have a field of their own. A stream is lines of JSON with the parts of the whole answer."""
    messages = [{"role": "user", "content": f"<think>Hm.</think>{SAID}"}]
    body = {"model": "qwen", "messages": messages, "tools": [TOOL]}
    answer = http.post("/api/chat", json={**body, "stream": False}).json()
    said = answer["message"]
    assert (said["thinking"], said["content"], answer["done"]) == ("Hm.", "See: ", True)
    [call] = said["tool_calls"]
    assert call["function"] == {"index": 0, "name": "time", "arguments": {"zone": "CET"}}
    assert answer["done_reason"] == "stop" and answer["eval_count"] > 0 and answer["created_at"]
    stream = http.post("/api/chat", json=body)
    lines = [json.loads(line) for line in stream.text.splitlines()]
    assert stream.headers["content-type"].startswith("application/x-ndjson")
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    parts = [line["message"] for line in lines]
    assert "".join(part["content"] for part in parts) == "See: "
    assert "".join(part.get("thinking", "") for part in parts) == "Hm."
    [streamed] = [part["tool_calls"] for part in parts if "tool_calls" in part]
    assert [one["function"] for one in streamed] == [call["function"]] and streamed[0]["id"]
    assert lines[-1]["prompt_eval_count"] == answer["prompt_eval_count"]
    prompt = {"model": "qwen", "prompt": "<think>Hm.</think>Noon.", "stream": False}
    made = http.post("/api/generate", json=prompt).json()
    assert (made["thinking"], made["response"]) == ("Hm.", "Noon.")


def test_texts_and_embeddings(http):
    body = {"model": "qwen", "prompt": "one two", "options": {"num_predict": 1}}
    for raw in (False, True):
        answer = http.post("/api/generate", json={**body, "raw": raw, "stream": False}).json()
        assert (answer["response"], answer["done_reason"]) == ("one", "length")
        text = http.post("/api/generate", json={**body, "raw": raw}).text
        lines = [json.loads(line) for line in text.splitlines()]
        assert "".join(line["response"] for line in lines) == "one" and lines[-1]["done"]
    answer = http.post("/api/embed", json={"model": "bge", "input": ["fox", "a dog"]}).json()
    assert answer["embeddings"] == [[3.0, 1.0], [5.0, 1.0]] and answer["prompt_eval_count"] == 3


def test_the_older_route_embeds_one_text(http):
    """Clients from before `/api/embed` send `prompt`. Without a prompt the model is only loaded."""
    body = {"model": "bge", "prompt": "fox"}
    assert http.post("/api/embeddings", json=body).json() == {"embedding": [3.0, 1.0]}
    loaded = http.post("/api/embeddings", json={"model": "bge"}).json()
    assert (loaded["embedding"], loaded["done_reason"]) == ([], "load")
    for wrong in ({"prompt": ["fox"]}, {"input": "fox"}):
        answer = http.post("/api/embeddings", json={**body, **wrong})
        assert (answer.status_code, list(answer.json())) == (400, ["error"])


def warm(http: Any) -> set[str]:
    return {row["name"] for row in http.get("/api/ps").json()["models"]}


def test_a_model_is_loaded_and_unloaded_without_a_text(http):
    """An empty prompt made the model write an answer, and a missing one was refused."""
    loaded = http.post("/api/generate", json={"model": "qwen"}).json()
    assert (loaded["response"], loaded["done"], loaded["done_reason"]) == ("", True, "load")
    assert "qwen" in warm(http)
    body = {"model": "qwen", "messages": [], "keep_alive": 0}
    unloaded = http.post("/api/chat", json=body).json()
    assert (unloaded["message"]["content"], unloaded["done_reason"]) == ("", "unload")
    until(lambda: "qwen" not in warm(http))
    assert http.post("/api/chat", json=body).json()["done_reason"] == "unload"
    assert "qwen" not in warm(http)  # it was not loaded only to be unloaded
    for keep_alive in (0, 60):
        none = {"model": "none", "keep_alive": keep_alive}
        assert http.post("/api/generate", json=none).status_code == 404


def test_a_key_may_load_a_model_and_not_unload_it(http):
    """A key changes nothing for others, who may use the model."""
    bot = {"x-bot": "1"}
    loaded = http.post("/api/generate", json={"model": "qwen"}, headers=bot)
    assert loaded.json()["done_reason"] == "load"
    refused = http.post("/api/generate", json={"model": "qwen", "keep_alive": 0}, headers=bot)
    assert refused.status_code == 403 and "not unload" in refused.json()["error"]
    assert "qwen" in warm(http)


def test_the_models(http):
    assert http.get("/api/version").json() == {"version": OLLAMA_VERSION, "gpu_console": VERSION}
    names = {row["name"] for row in http.get("/api/tags").json()["models"]}
    assert names == {"qwen", "bge", "sized"}
    assert http.post("/api/chat", json={**HI, "keep_alive": "10m", "stream": False}).is_success
    [row] = [one for one in http.get("/api/ps").json()["models"] if one["name"] == "qwen"]
    assert (row["size"], row["size_vram"]) == (4 << 30, 4 << 30)
    left = datetime.fromisoformat(row["expires_at"]) - datetime.now(UTC)
    assert 0 < left.total_seconds() <= 600
    assert http.post("/api/show", json={"model": "bge"}).json()["capabilities"] == ["embedding"]
    assert http.post("/api/show", json={"name": "qwen"}).json()["model"] == "qwen"  # older clients
    assert http.post("/api/show", json={"model": "none"}).status_code == 404
    assert http.post("/api/show", json={}).json() == {"error": "model is required"}


def test_a_model_on_its_card_is_there_with_its_working_memory():
    """Its cache and a whole card were left out of `size_vram` only: `ollama ps` showed a part of it on the CPU."""
    gateway = SimpleNamespace(facts=lambda name: None, warm_seconds=lambda name: 60.0)
    on_card, own = Share("sim:0", 16 << 30), Share("sim:0", 14 << 30)
    whole = Lease("1", "qwen", shares=(on_card,), filled=(own,))
    parts = Lease("1", "qwen", shares=(own, Share(HOST, 2 << 30)))
    rows = [ollama._running(gateway, {"id": "qwen", "created": 0}, one) for one in (whole, parts)]
    assert [(row["size"] >> 30, row["size_vram"] >> 30) for row in rows] == [(16, 16), (16, 14)]


def test_errors_are_in_the_format_of_ollama(http):
    """Each error is a sentence. Models are added in the catalogue, so `/api/pull` is refused, too."""
    for path, body, status in (
        ("/api/chat", {**HI, "model": "qwem"}, 404),
        ("/api/chat", {**HI, "options": {"top_k": -2}}, 400),
        ("/api/embed", {"model": "bge"}, 400),
        ("/api/pull", {"model": "llama3"}, 400),
    ):
        answer: Any = http.post(path, json=body)
        assert answer.status_code == status and isinstance(answer.json()["error"], str)
    assert "catalogue" in http.request("DELETE", "/api/delete").json()["error"]
    for method, path, status in (("POST", "/api/blobs/a", 404), ("GET", "/api/chat", 405)):
        answer = http.request(method, path)
        assert answer.status_code == status and isinstance(answer.json()["error"], str)


def test_an_answer_has_its_durations_in_nanoseconds(http):
    """Clients divide the tokens by `eval_duration`, so a short answer is not rounded to 0."""
    names = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
    whole = http.post("/api/chat", json={**HI, "stream": False}).json()
    last = json.loads(http.post("/api/chat", json=HI).text.splitlines()[-1])
    for answer in (whole, last):
        assert all(type(answer[name]) is int for name in names)
    record = CallRecord(Clock(), "chat", "")
    record.note(queue_seconds=1e-5, first_seconds=1e-5, answer_seconds=3e-5)
    expected = dict(zip(names, (40_000, 10_000, 10_000, 20_000), strict=True))
    assert _durations(record.facts) == expected
    embedded = http.post("/api/embed", json={"model": "bge", "input": "fox"}).json()
    assert {"total_duration", "load_duration"} < embedded.keys()


def test_a_tag_and_a_context_that_the_model_has_are_no_reason_to_refuse(http):
    """Ollama's clients add `:latest` to a name, and send the context that `/api/show` has told them."""
    sized = {"model": "sized:latest", "messages": HI["messages"], "stream": False}
    for tokens in (1, 2048, 4096):
        assert http.post("/api/chat", json={**sized, "options": {"num_ctx": tokens}}).is_success
    refused = http.post("/api/chat", json={**sized, "options": {"num_ctx": 4097}})
    assert refused.status_code == 400
    assert "at most 4096, the context of sized" in refused.json()["error"]
    assert http.post("/api/chat", json={**HI, "model": "none:latest"}).status_code == 404
    shown = http.post("/api/show", json={"model": "sized:latest"}).json()
    assert shown["parameters"] == "num_ctx 4096"
    assert shown["model_info"]["llm.context_length"] == 4096


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_a_model_is_shown_with_the_facts_of_its_source(tmp_path, kind):
    """The facts come from the files, so the model need not be loaded. Clients choose by `capabilities`."""
    template = "{% if tools %}<think>{% endif %}{{ messages }}"
    if kind == "gguf":
        source = samples.gguf_lm(tmp_path / "lm.gguf")
        weights = sum(int(one.n_elements) for one in GGUFReader(source).tensors)
    else:
        source = samples.causal_lm(tmp_path / "lm")
        module = AutoModelForCausalLM.from_pretrained(source)
        weights = sum(one.numel() for one in module.parameters())  # tied ones once
    made = Harness()
    try:
        made.rt.register("lm", str(source), model_type="llm", quantization="Q4_0")
        made.rt.register("two", str(source), model_type="llm", chat_template=template)
        app = with_visitor(application(made.rt, lambda: made.gateway), OPERATOR)
        with TestClient(app) as client:
            shown = client.post("/api/show", json={"model": "lm"}).json()
            two = client.post("/api/show", json={"model": "two"}).json()
            [row] = [one for one in client.get("/api/tags").json()["models"] if one["name"] == "lm"]
            listed = client.get("/v1/models/lm").json()
            client.portal.call(made.gateway.close)
    finally:
        made.rt.close()
    family = shown["details"]["family"]
    info = shown["model_info"]
    assert family and info["general.architecture"] == family
    assert info[f"{family}.context_length"] == listed["context_length"] == listed["max_model_len"]
    assert info[f"{family}.embedding_length"] > 0 and info[f"{family}.block_count"] > 0
    assert shown["details"]["format"] == {"gguf": "gguf", "folder": "safetensors"}[kind]
    assert shown["details"]["quantization_level"] == "Q4_0"
    assert info["general.parameter_count"] == weights
    assert shown["details"]["parameter_size"] == _count(weights) != ""
    assert row["size"] > 0 and row["digest"] and row["details"] == shown["details"]
    assert shown["capabilities"] == ["completion"]
    assert two["capabilities"] == ["completion", "tools", "thinking"]
    assert (two["template"], "messages" in shown["template"]) == (template, True)


def test_vs_code_and_open_webui_find_what_they_read(http):
    """Both sort versions by their numbers; VS Code refuses one before 0.6.4, and reads the context under the name of
    the architecture. Without a key it sends an empty one, and content as parts.
    """
    version = http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    names = [row["model"] for row in http.get("/api/tags").json()["models"]]
    shown = {name: http.post("/api/show", json={"model": name}).json() for name in names}
    info = shown["sized"]["model_info"]
    assert info[f"{info['general.architecture']}.context_length"] == 4096
    assert info["general.basename"] == "sized"
    assert "tools" in shown["qwen"]["capabilities"] and "tools" not in shown["bge"]["capabilities"]
    content = [{"type": "text", "text": "hi"}]
    body = {"model": "qwen", "messages": [{"role": "user", "content": content}], "n": 1}
    empty = {"Authorization": "Bearer "}
    answer = http.post("/v1/chat/completions", json=body, headers=empty).json()
    assert answer["choices"][0]["message"]["content"] == "hi"


def test_probabilities_of_tokens_are_those_of_a_chat():
    """A client of Ollama's reads them beside the text that has the tokens, whole and streamed."""
    with pytest.raises(Refused, match="logprobs"):
        generate_of({"model": "qwen", "prompt": "hi", "raw": True, "logprobs": True})
    entries = [{"token": t, "logprob": -1.0, "bytes": [1], "top_logprobs": []} for t in "ab"]
    choice = {"message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop"}
    for scores in ({"content": entries}, None):
        answer = whole({"choices": [{**choice, "logprobs": scores}]}, _chat_part)
        assert answer.get("logprobs") == (scores and entries)

    async def chunks() -> Any:
        for entry in entries:
            delta = {"content": entry["token"]}
            yield {"choices": [{"delta": delta, "logprobs": {"content": [entry]}}]}
        yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}

    async def streamed() -> list[Any]:
        reply = Reply("m", "m", "", None, chunks())
        return [json.loads(line) async for line in _OllamaWriter(_chat_part, whole).events(reply)]

    first, second, last = asyncio.run(streamed())
    assert first["logprobs"] == entries[:1] and second["logprobs"] == entries[1:]
    assert last["done"] and "logprobs" not in last
