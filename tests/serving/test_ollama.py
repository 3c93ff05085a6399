"""`/api/*` answers Ollama's clients: it translates the routes for chats, texts and embeddings."""

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from gguf import GGUFReader
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM

from gpu_runtime import samples
from gpu_runtime.access_keys import AccessKey
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
from gpu_runtime.serving.request_log import CallRecord
from gpu_runtime.serving.requests import Refused, Reply
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
    body = {
        **HI,
        "messages": [
            {"role": "user", "content": "What?", "images": ["AAAA"]},
            {"role": "assistant", "tool_calls": [{"function": {"name": "time", "arguments": {}}}]},
            {"role": "tool", "content": "12:00", "tool_name": "time"},
        ],
        "tools": [TOOL],
        "format": {"type": "object"},
        "options": {"num_predict": 5, "mirostat": 0, "top_k": None, "stop": ["END"]},
        "keep_alive": "5m",
        "think": False,
        "x_client_id": "bot",
    }
    function = {"name": "time", "arguments": "{}"}
    url = "data:image/png;base64,AAAA"
    assert chat_of(body) == (
        "chat",
        {
            "model": "qwen",
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What?"},
                        {"type": "image_url", "image_url": {"url": url}},
                    ],
                },
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": "call0", "type": "function", "function": function}],
                },
                {"role": "tool", "content": "12:00", "tool_call_id": "call0"},
            ],
            "tools": [TOOL],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "format", "schema": {"type": "object"}},
            },
            "max_tokens": 5,
            "mirostat_mode": 0,
            "stop": ["END"],
            "x_stay_warm": 300.0,
            "x_thinking": False,
            "x_client_id": "bot",
        },
    )


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
    app = application(made.rt, lambda: made.gateway, "7")
    operators, bots = with_visitor(app, OPERATOR), with_visitor(app, BOT)

    async def either(scope: Any, *channels: Any) -> None:
        is_bot = (b"x-bot", b"1") in scope.get("headers", ())
        await (bots if is_bot else operators)(scope, *channels)

    with TestClient(either, raise_server_exceptions=False) as client:
        yield client
        client.portal.call(made.gateway.close)
    made.rt.close()


def test_a_chat_with_a_tool_call_whole_and_streamed(http):
    messages = [{"role": "user", "content": SAID}]
    body = {"model": "qwen", "messages": messages, "tools": [TOOL]}
    answer = http.post("/api/chat", json={**body, "stream": False}).json()
    function = {"index": 0, "name": "time", "arguments": {"zone": "CET"}}
    calls = [{"id": answer["message"]["tool_calls"][0]["id"], "function": function}]
    said = {"role": "assistant", "content": "See: ", "tool_calls": calls}
    assert (answer["message"], answer["done"], answer["done_reason"]) == (said, True, "stop")
    assert answer["eval_count"] > 0 and answer["created_at"]
    stream = http.post("/api/chat", json=body)
    lines = [json.loads(line) for line in stream.text.splitlines()]
    assert stream.headers["content-type"].startswith("application/x-ndjson")
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "".join(line["message"]["content"] for line in lines) == "See: "
    assert [
        line["message"].get("tool_calls") for line in lines if "tool_calls" in line["message"]
    ] == [[{**calls[0], "id": lines[-2]["message"]["tool_calls"][0]["id"]}]]
    assert lines[-1]["prompt_eval_count"] == answer["prompt_eval_count"]


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
    assert http.get("/api/version").json() == {"version": OLLAMA_VERSION, "gpu_console": "7"}
    names = {row["name"] for row in http.get("/api/tags").json()["models"]}
    assert names == {"qwen", "bge", "sized"}
    http.post("/api/chat", json={**HI, "stream": False})
    assert "qwen" in {row["name"] for row in http.get("/api/ps").json()["models"]}
    assert http.post("/api/show", json={"model": "bge"}).json()["capabilities"] == ["embedding"]
    assert http.post("/api/show", json={"name": "qwen"}).json()["model"] == "qwen"  # older clients
    assert http.post("/api/show", json={"model": "none"}).status_code == 404
    assert http.post("/api/show", json={}).json() == {"error": "model is required"}


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


def test_thoughts_have_a_field_of_their_own(http):
    said = {"model": "qwen", "messages": [{"role": "user", "content": "<think>Hm.</think>Noon."}]}
    whole = http.post("/api/chat", json={**said, "stream": False}).json()["message"]
    assert (whole["thinking"], whole["content"]) == ("Hm.", "Noon.")
    lines = [json.loads(line) for line in http.post("/api/chat", json=said).text.splitlines()]
    assert "".join(line["message"].get("thinking", "") for line in lines) == "Hm."
    assert "".join(line["message"]["content"] for line in lines) == "Noon."
    made = http.post(
        "/api/generate",
        json={"model": "qwen", "prompt": "<think>Hm.</think>Noon.", "stream": False},
    )
    assert (made.json()["thinking"], made.json()["response"]) == ("Hm.", "Noon.")


def test_durations_are_read_as_go_writes_them():
    for text, seconds in (
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("1m0s", 60.0),
        ("2µs", 2e-6),
        ("-1m", 86400.0),
        (-1, 86400.0),
        ("0", 0.0),
    ):
        made = chat_of({**HI, "keep_alive": text})[1]["x_stay_warm"]
        assert made == pytest.approx(seconds)
    assert chat_of({**HI, "think": "low"})[1]["reasoning_effort"] == "low"


def test_an_answer_has_its_durations_in_nanoseconds(http):
    """Clients divide the tokens by `eval_duration`, so a short answer is not rounded to 0."""
    names = "total_duration load_duration prompt_eval_duration eval_duration".split()
    whole = http.post("/api/chat", json={**HI, "stream": False}).json()
    last = json.loads(http.post("/api/chat", json=HI).text.splitlines()[-1])
    for answer in (whole, last):
        assert all(type(answer[name]) is int for name in names)
    record = CallRecord(Clock(), "chat", "")
    record.note(queue_seconds=1e-5, first_seconds=1e-5, answer_seconds=3e-5)
    assert _durations(record.facts) == dict(
        zip(names, (40_000, 10_000, 10_000, 20_000), strict=True)
    )
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


def test_what_runs_has_its_memory_and_its_end(http):
    assert http.post("/api/chat", json={**HI, "keep_alive": "10m", "stream": False}).is_success
    row = next(one for one in http.get("/api/ps").json()["models"] if one["name"] == "qwen")
    assert (row["size"], row["size_vram"]) == (4 << 30, 4 << 30)
    left = datetime.fromisoformat(row["expires_at"]) - datetime.now(UTC)
    assert 0 < left.total_seconds() <= 600


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
        app = with_visitor(application(made.rt, lambda: made.gateway, "7"), OPERATOR)
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
    assert (shown["capabilities"], two["capabilities"]) == (
        ["completion"],
        ["completion", "tools", "thinking"],
    )
    assert (two["template"], "messages" in shown["template"]) == (template, True)


def test_the_calls_of_open_webui_are_answered(http):
    """It sorts versions by their numbers, and shows until when a model stays, from two lists with one name. It streams
    with a conversation's settings as options, asks for a title without a stream, and unloads with an empty prompt.
    """
    version = http.get("/api/version").json()["version"]
    assert all(part.isdecimal() for part in version.split("."))
    options = {
        "temperature": 0.8,
        "num_ctx": 2048,
        "top_k": 40,
        "min_p": 0,
        "seed": 1,
        "stop": ["END"],
    }
    body = {**HI, "stream": True, "options": options, "keep_alive": "5m"}
    lines = http.post("/api/chat", json=body).text.splitlines()
    assert "".join(json.loads(line)["message"]["content"] for line in lines) == "hi"
    names = {row["model"]: row["name"] for row in http.get("/api/tags").json()["models"]}
    [row] = [row for row in http.get("/api/ps").json()["models"] if row["name"] == names["qwen"]]
    assert datetime.fromisoformat(row["expires_at"]) > datetime.now(UTC)
    title = http.post("/v1/chat/completions", json={**HI, "stream": False, "max_tokens": 1000})
    assert title.json()["choices"][0]["message"]["content"] == "hi"
    gone = http.post("/api/generate", json={"model": "qwen", "keep_alive": 0, "prompt": ""})
    assert gone.json()["done_reason"] == "unload"
    until(lambda: "qwen" not in warm(http))


def test_the_calls_of_vs_code_are_answered(http):
    """It refuses a version before 0.6.4, and reads the context under the name of the architecture. Without a key it
    sends an empty one.
    """
    version = http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    names = [row["model"] for row in http.get("/api/tags").json()["models"]]
    shown = {name: http.post("/api/show", json={"model": name}).json() for name in names}
    info = shown["sized"]["model_info"]
    assert info[f"{info['general.architecture']}.context_length"] == 4096
    assert info["general.basename"] == "sized"
    assert "tools" in shown["qwen"]["capabilities"] and "tools" not in shown["bge"]["capabilities"]
    body = {
        "model": "qwen",
        "messages": [{"role": "user", "content": [{"type": "text", "text": SAID}]}],
        "tools": [{**TOOL, "function": {**TOOL["function"], "description": "It."}}],
        "tool_choice": "auto", "temperature": 0.1, "top_p": 1, "n": 1,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    stream = http.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer "})
    chunks = [
        json.loads(line[6:]) for line in stream.text.split("\n\n") if line.startswith("data: {")
    ]
    calls = [
        c
        for chunk in chunks
        for one in chunk["choices"]
        for c in one["delta"].get("tool_calls", ())
    ]
    assert calls[0]["function"]["name"] == "time" and chunks[-1]["usage"]["total_tokens"] > 0


def test_probabilities_of_tokens_are_those_of_a_chat():
    """A client of Ollama's reads them beside the text that has the tokens, whole and streamed."""
    wish = {"logprobs": True, "top_logprobs": 2}
    for translate, body in ((chat_of, HI), (generate_of, {"model": "qwen", "prompt": "hi"})):
        assert translate(body | wish)[1].items() >= wish.items()
        assert not translate(body)[1].keys() & wish.keys()
    with pytest.raises(Refused, match="logprobs"):
        generate_of({"model": "qwen", "prompt": "hi", "raw": True, **wish})
    entries = [{"token": t, "logprob": -1.0, "bytes": [1], "top_logprobs": []} for t in "ab"]
    message = {"role": "assistant", "content": "ab"}
    choice = {"message": message, "finish_reason": "stop", "logprobs": {"content": entries}}
    assert whole({"choices": [choice]}, _chat_part)["logprobs"] == entries
    assert "logprobs" not in whole({"choices": [{**choice, "logprobs": None}]}, _chat_part)

    async def streamed() -> list[Any]:
        async def chunks():
            for entry in entries:
                delta = {"content": entry["token"]}
                yield {"choices": [{"delta": delta, "logprobs": {"content": [entry]}}]}
            yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}

        events = Chunks(chunks())
        writer = _OllamaWriter(_chat_part, whole)
        return [json.loads(line) async for line in writer.events(Reply("m", "m", "", None, events))]

    first, second, last = asyncio.run(streamed())
    assert first["logprobs"] == entries[:1] and second["logprobs"] == entries[1:]
    assert last["done"] and "logprobs" not in last


class Chunks:
    """The chunks of a stream that a test has made."""

    def __init__(self, chunks: Any) -> None:
        self._chunks = chunks

    def __aiter__(self) -> Any:
        return self._chunks

    async def aclose(self) -> None:
        await self._chunks.aclose()
