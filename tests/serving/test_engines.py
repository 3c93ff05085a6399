"""Real small models behind the gateway: transformers modules, and GGUF files in a llama.cpp worker."""

import asyncio
import base64
import importlib.util
import json
import math
import shutil
import struct
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime import samples
from gpu_runtime.facts import ModelSpec
from gpu_runtime.serving.engines.chat_template import TAGS, Thoughts
from gpu_runtime.serving.engines.registry import EchoAdapter, ProcessAdapter, adapter_for
from gpu_runtime.serving.requests import Refused, serves
from gpu_runtime.serving.thread_stream import in_thread, stream_from_thread
from tests import tiny_models
from tests.serving.harness import Harness, answer_text, chat, harness, refusal, stream_text
from tests.serving.loops import settle, until
from tests.serving.test_fields import VALUES, fields_for

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("models")
    return {
        "writer": tiny_models.causal_lm(home / "writer"),
        "embedder": tiny_models.embedder(home / "embedder"),
        "ranker": tiny_models.reranker(home / "ranker"),
        "gguf": tiny_models.gguf_lm(home / "tiny.gguf"),
    }


@asynccontextmanager
async def with_models(
    sources: dict[str, Any], *names: str, **options: Any
) -> AsyncIterator[Harness]:
    async with harness() as k:
        for name in names:
            kind = {"embedder": "embedding", "ranker": "reranker"}.get(name, "llm")
            backend = "llama_cpp" if name == "gguf" else "transformers"
            given = {"backend": backend, "model_type": kind, **options}
            k.rt.register(name, sources[name], **given)
        yield k


async def embeddings(k: Harness, texts: Any, **more: Any) -> dict[str, Any]:
    body = {"model": "embedder", "input": texts, **more}
    return (await k.gateway.answer("embeddings", body)).json


def vectors_of(answer: dict[str, Any]) -> list[Any]:
    return [row["embedding"] for row in answer["data"]]


async def embedded(k: Harness, texts: Any, **more: Any) -> list[Any]:
    return vectors_of(await embeddings(k, texts, **more))


async def tokens_of(k: Harness, model: str, text: str, **more: Any) -> list[int]:
    body = {"model": model, "prompt": text, **more}
    return (await k.gateway.answer("tokenize", body)).json["tokens"]


in_a_worker = pytest.param("gguf", marks=pytest.mark.processes)
needs_llguidance = pytest.mark.skipif(
    not importlib.util.find_spec("llguidance"), reason="llguidance is not installed"
)
forcing = pytest.mark.parametrize(
    "name", [pytest.param("writer", marks=needs_llguidance), in_a_worker]
)
both = pytest.mark.parametrize("name", ["writer", in_a_worker])


@both
async def test_a_stream_has_the_text_and_the_counts_of_the_whole_answer(name, sources):
    options = {"max_tokens": 12, "temperature": 0}
    async with with_models(sources, name) as k:
        whole = await k.chat(name, "hello", **options)
        assert whole.json["usage"]["completion_tokens"] == 12
        assert whole.json["choices"][0]["finish_reason"] == "length"
        stream = await k.chat(
            name, "hello", stream=True, stream_options={"include_usage": True}, **options
        )
        events = [event async for event in stream.events]
        text = "".join(
            choice["delta"].get("content") or "" for event in events for choice in event["choices"]
        )
        assert text == answer_text(whole) and events[-1]["usage"] == whole.json["usage"]
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]][-1] == "length"
        assert len(events) > 4, "it came piece by piece"
        assert text.strip() and text.isascii() and text.isprintable(), "a person can see the answer"


@both
async def test_the_prompt_is_made_by_the_models_chat_template(name, sources):
    """A longer conversation has more prompt tokens. A template in the catalogue replaces the model's own template."""

    async def tokens(**more: Any) -> int:
        return (await k.chat(name, "hello", max_tokens=1, **more)).json["usage"]["prompt_tokens"]

    async with with_models(sources, name) as k:
        alone = await tokens()
        brief = {"role": "system", "content": "Be brief."}
        assert await tokens(messages=[brief, {"role": "user", "content": "hello"}]) > alone > 5
    async with with_models(sources, name, chat_template="{{ messages[-1]['content'] }}") as k:
        assert await tokens() < alone


@both
async def test_the_refusal_of_a_too_long_prompt_has_the_figures(name, sources):
    """A too long prompt does not count as a failure of the model, and the model answers the next call."""
    async with with_models(
        sources, name, **({"context_length": 64} if name == "gguf" else {})
    ) as k:
        for body in (
            {"text": "word " * 400},
            {"text": "word " * 400, "max_tokens": 100_000},
            {"text": "word " * 400, "stream": True},
        ):
            words = "its context is [0-9]+ tokens; the prompt has [0-9]+"
            with refusal(400, "context_length_exceeded", param="messages", match=words):
                await k.chat(name, **body)
        assert answer_text(await k.chat(name, max_tokens=3))


@both
async def test_an_answer_may_have_the_rest_of_the_context(name, sources):
    """Anthropic's clients must send a maximum, so their defaults are larger than many contexts."""
    options = {"context_length": 256} if name == "gguf" else {}
    async with with_models(sources, name, **options) as k:
        reply = await k.chat(name, max_tokens=128_000)
        [choice] = reply.json["choices"]
        room = reply.json["usage"]["completion_tokens"]
        assert choice["finish_reason"] == "length" and room == reply.json["x_gpu"]["max_tokens"]
        assert reply.json["usage"]["total_tokens"] == 256
        assert reply.headers["X-GPU-Max-Tokens"] == str(room)
        stream = await k.chat(name, max_tokens=128_000, stream=True)
        assert stream.headers["X-GPU-Max-Tokens"] == str(room)
        assert await stream_text(stream)
        assert "X-GPU-Max-Tokens" not in ((await k.chat(name, max_tokens=3)).headers)


@both
async def test_a_caller_that_leaves_ends_the_generation(name, sources):
    """The model is free long before the answer would have ended, for a stream and for a whole answer."""
    async with with_models(sources, name) as k:
        reply = await k.chat(name, stream=True, max_tokens=150)
        await anext(reply.events)
        await anext(reply.events)
        await reply.aclose()
        whole = asyncio.ensure_future(k.chat(name, max_tokens=150))
        await until(lambda: k.gateway.state().running)
        whole.cancel()
        with pytest.raises(asyncio.CancelledError):
            await whole
        assert k.gateway.state().running == {}


@both
async def test_an_answer_ends_at_a_stop_string(name, sources):
    async with with_models(sources, name) as k:
        full = answer_text(await k.chat(name, max_tokens=16, temperature=0))
        stop = full[5:7]
        cut = await k.chat(name, max_tokens=16, temperature=0, stop=[stop])
        assert answer_text(cut) == full[: full.index(stop)]
        assert cut.json["choices"][0]["finish_reason"] == "stop"
        stream = await k.chat(name, max_tokens=16, temperature=0, stop=stop, stream=True)
        assert await stream_text(stream) == answer_text(cut)


@both
async def test_every_field_that_the_table_allows_is_taken_by_the_engine(name, sources):
    """No such call fails, whatever the spelling of a number. Refused values open no breaker."""
    backend = "llama_cpp" if name == "gguf" else "transformers"
    async with with_models(sources, name) as k:
        for field in VALUES:
            if field not in ("stream", "tools", "tool_choice") and serves(backend, "chat", field):
                wanted = {"max_tokens": 2, **fields_for("chat", field)}
                assert (await k.chat(name, **wanted)).json["choices"], field
        for _ in range(6):
            with refusal(400):
                await k.chat(name, top_k=-2)
        assert (await k.chat(name, max_tokens=1)).model == name


@both
async def test_several_choices_and_the_prompt_are_in_one_answer(name, sources):
    options = {"max_tokens": 4, "temperature": 0, "n": 2, "echo": True}
    body = {"model": name, "prompt": "the quick", **options}
    async with with_models(sources, name) as k:
        whole = (await k.gateway.answer("completions", body)).json
        assert whole["object"] == "text_completion"
        texts = [choice["text"] for choice in whole["choices"]]
        assert [choice["index"] for choice in whole["choices"]] == [0, 1]
        assert texts[0] == texts[1] and texts[0].startswith("the quick")
        assert whole["usage"]["completion_tokens"] == 8 and whole["usage"]["prompt_tokens"] < 20
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        events = [e async for e in (await k.gateway.answer("completions", body | stream)).events]
        streamed = ["", ""]
        for event in events:
            for choice in event["choices"]:
                streamed[choice["index"]] += choice["text"]
        assert streamed == texts and events[-1]["usage"] == whole["usage"]


@both
async def test_several_prompts_are_texts_or_lists_of_tokens(name, sources):
    plain = {"model": name, "max_tokens": 3, "temperature": 0}
    async with with_models(sources, name) as k:

        async def complete(prompt: Any, **more: Any) -> dict[str, Any]:
            body = {**plain, "prompt": prompt, **more}
            return (await k.gateway.answer("completions", body)).json

        texts = ["the quick", "the lazy dog"]
        alone = [await complete(text) for text in texts]
        known = [one["choices"][0]["text"] for one in alone]
        numbers = [await tokens_of(k, name, text, add_special_tokens=True) for text in texts]
        for prompt in (texts, numbers):
            found = await complete(prompt, n=2)
            assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
            texts_of_each = [known[0]] * 2 + [known[1]] * 2
            assert [choice["text"] for choice in found["choices"]] == texts_of_each
            assert found["usage"]["prompt_tokens"] == sum(map(len, numbers))
            assert found["usage"]["completion_tokens"] == 12
        assert (await complete(numbers[0]))["choices"][0]["text"] == known[0]
        with refusal(400, param="prompt", match="9999999 is not in its vocabulary"):
            await complete([1, 9999999])


@both
async def test_special_tokens_of_a_plain_prompt_are_read_as_such(name, sources):
    """Templates of clients, and the marks of fill-in-the-middle, are written in special tokens."""
    async with with_models(sources, name) as k:
        body = {"model": name, "prompt": "<s>a</s><s>b</s>", "max_tokens": 1}
        used = (await k.gateway.answer("completions", body)).json["usage"]["prompt_tokens"]
        assert used == len(await tokens_of(k, name, body["prompt"], add_special_tokens=True))
        assert used < len(body["prompt"])


@both
async def test_the_prompt_itself_is_scored(name, sources):
    """lm-evaluation-harness reads the probabilities of a text from its echo. The first token has none."""
    async with with_models(sources, name) as k:
        body = {"model": name, "prompt": "the quick brown", "echo": True, "logprobs": 1}

        async def choice(**more: Any) -> dict[str, Any]:
            reply = await k.gateway.answer("completions", {**body, "temperature": 0, **more})
            return reply.json["choices"][0]

        bare = await choice(max_tokens=0)
        assert bare["text"] == body["prompt"] and bare["finish_reason"] == "length"
        found = bare["logprobs"]
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        assert all(value < 0 for value in found["token_logprobs"][1:])
        assert found["text_offset"][0] == 0 and len(set(map(len, found.values()))) == 1
        whole = await choice(max_tokens=4)
        written = whole["text"].removeprefix(body["prompt"])
        first = len(bare["logprobs"]["tokens"])
        scored = whole["logprobs"]
        assert scored["token_logprobs"][:first] == pytest.approx(found["token_logprobs"])
        assert "".join(scored["tokens"][first:]) == written and len(scored["tokens"]) == first + 4
        for token, offset in zip(scored["tokens"], scored["text_offset"], strict=True):
            assert whole["text"][offset:].startswith(token) or offset < len(body["prompt"])
        stream = {**body, "max_tokens": 2, "stream": True}
        events = [event async for event in (await k.gateway.answer("completions", stream)).events]
        assert events[0]["choices"][0]["text"] == body["prompt"]


@pytest.mark.processes
async def test_a_token_of_more_than_32_bytes_is_in_the_text(tmp_path, monkeypatch):
    """The buffer of llama-cpp-python's method has 32 bytes, and such a token was lost in silence."""
    import gguf

    words = samples._gguf_vocabulary()
    more = [(word, gguf.TokenType.NORMAL) for word in ("-" * 64, "é" * 30)]
    monkeypatch.setattr(samples, "_gguf_vocabulary", lambda: words + more)
    async with with_models({"gguf": tiny_models.gguf_lm(tmp_path / "long.gguf")}, "gguf") as k:
        for number, (word, _) in enumerate(more, len(words)):
            bias = {"logit_bias": {str(number): 100}, "temperature": 0, "max_tokens": 3}
            reply = await k.chat("gguf", "hi", **bias)
            assert answer_text(reply) == 3 * word and reply.json["usage"]["completion_tokens"] == 3
            stream = await k.chat("gguf", "hi", stream=True, **bias)
            assert await stream_text(stream) == 3 * word


@both
async def test_equal_seeds_give_equal_texts(name, sources):
    """Several choices of one call still differ from each other, and so does another seed."""
    options = {"max_tokens": 16, "temperature": 1.5, "n": 2}
    async with with_models(sources, name) as k:
        one, two, other = [
            (await k.chat(name, seed=seed, **options)).json["choices"] for seed in (7, 7, 2)
        ]
        assert one == two != other and one[0]["message"] != one[1]["message"]


@both
async def test_penalties_keep_a_model_from_repeating_itself(name, sources):
    """The bias makes a model write one token again and again. A penalty is larger after each time."""
    async with with_models(sources, name) as k:
        body = {"model": name, "prompt": "the fox"}
        [token, *_] = await tokens_of(k, name, "the fox")

        async def repeats(**more: Any) -> int:
            bias = {"logit_bias": {str(token): 3}, "temperature": 0, "max_tokens": 8, "logprobs": 0}
            reply = (await k.gateway.answer("completions", {**body, **bias, **more})).json
            tokens = reply["choices"][0]["logprobs"]["tokens"]
            return max(map(tokens.count, tokens))

        assert await repeats(frequency_penalty=2, presence_penalty=2) < await repeats()


@both
async def test_a_biased_token_is_written(name, sources):
    """A bias can force a token. A bias for a token outside the vocabulary is refused, and is no fault of the model."""
    async with with_models(sources, name) as k:
        body = {"model": name, "prompt": "the fox"}
        [token, *_] = await tokens_of(k, name, "the fox")
        word = {"model": name, "tokens": [token] * 3}
        expected = (await k.gateway.answer("detokenize", word)).json["prompt"].strip()
        for more in ({"temperature": 0}, {"seed": 1}):
            bias = {"max_tokens": 3, "logit_bias": {str(token): 100}, **more}
            reply = await k.gateway.answer("completions", {**body, **bias})
            assert reply.json["choices"][0]["text"].strip() == expected
        for _ in range(6):
            with refusal(400, param="logit_bias", match="9999999 is not in its vocabulary"):
                await k.chat(name, max_tokens=1, logit_bias={"9999999": 1})


async def test_without_its_library_forced_json_is_refused_with_what_to_type(sources, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    async with with_models(sources, "writer") as k:
        with refusal(400, match="pip install llguidance"):
            await k.chat("writer", response_format={"type": "json_object"})
        assert answer_text(await k.chat("writer", max_tokens=2, response_format={"type": "text"}))


async def test_a_stream_that_is_not_read_to_its_end_is_closed():
    """When the reader ends, the engine's stream is closed at once, and not only by the garbage collector."""

    def stream() -> Any:
        try:
            while True:
                yield {"text": "a"}
        finally:
            closed.append(True)

    class Model:
        metadata = {"tokenizer.chat_template": "{{ messages[0].content }}"}
        create_chat_completion = None  # it tells that the model is one of llama.cpp

        def n_ctx(self) -> int:
            return 512

        def write(self, *_: Any, **__: Any) -> Any:
            kept.append(stream())  # else the garbage collector closes it
            return kept[-1]

    closed: list[bool] = []
    kept: list[Any] = []
    model = Model()
    make = lambda value, spec, http: adapter_for(model, spec, http)
    async with harness(qwen=4, make_adapter=make) as k:
        reply = await k.chat("qwen", stream=True)
        await anext(reply.events)
        await reply.aclose()
        assert closed == [True]


async def test_an_embedding_is_the_normalized_mean_of_the_last_layer(sources):
    """It is the same alone and among other texts, and as base64, which OpenAI's own client requests."""
    import torch

    async with with_models(sources, "embedder") as k:
        one = await embeddings(k, "the quick fox")
        [vector] = vectors_of(one)
        assert math.hypot(*vector) == pytest.approx(1, abs=1e-5) and len(vector) == 64
        assert (await embedded(k, ["a", "the quick fox"]))[1] == pytest.approx(vector, abs=1e-6)
        assert one["usage"]["prompt_tokens"] == one["usage"]["total_tokens"] > 0
        [packed] = await embedded(k, "the quick fox", encoding_format="base64")
        assert struct.unpack("<64f", base64.b64decode(packed)) == pytest.approx(vector, abs=1e-6)
        with k.rt.use("embedder") as module:
            ids = module.tokenizer("the quick fox", return_tensors="pt")
            with torch.no_grad():  # a graph that lives would keep the model in use
                mean = module(input_ids=ids["input_ids"]).last_hidden_state[0].mean(dim=0)
            expected = torch.nn.functional.normalize(mean, dim=0).tolist()
        assert expected == pytest.approx(vector, abs=1e-6)


@pytest.mark.processes
async def test_a_gguf_without_a_pooling_type_gives_one_vector_a_text(sources):
    async with with_models({"embedder": sources["gguf"]}, "embedder", backend="llama_cpp") as k:
        packed = await embedded(k, ["a", "b b"], encoding_format="base64")
        unpacked = [struct.unpack("<64f", base64.b64decode(one)) for one in packed]
        for vectors in (await embedded(k, ["a", "b b"]), unpacked):
            assert [len(one) for one in vectors] == [64, 64]
            assert [math.hypot(*one) for one in vectors] == pytest.approx([1, 1], abs=1e-6)


async def test_many_texts_are_embedded_in_few_batches(sources):
    """256 texts took 256 runs of the model. Each has the vector that it has alone."""
    texts = [" ".join(["fox"] * (1 + n % 40)) for n in range(256)]
    async with with_models(sources, "embedder") as k:
        with k.rt.use("embedder") as module:
            runs = []
            hook = module.register_forward_hook(lambda *_: runs.append(1))
            ids = module.tokenizer("the quick fox")["input_ids"]
        answer = await embeddings(k, texts)
        many = vectors_of(answer)
        assert [row["index"] for row in answer["data"]] == list(range(256))
        assert 8 <= len(runs) <= 12
        hook.remove()
        for n in (0, 39, 40, 255):
            assert many[n] == pytest.approx((await embedded(k, texts[n]))[0], abs=1e-5)
        [text] = await embedded(k, "the quick fox")
        tokens = await embeddings(k, ids)
        assert vectors_of(tokens)[0] == pytest.approx(text, abs=1e-6)
        assert tokens["usage"]["prompt_tokens"] == len(ids)
        assert len(await embedded(k, [ids, ids[:1]])) == 2
        [short] = await embedded(k, "the quick fox", dimensions=8)
        scale = math.hypot(*text[:8])
        assert short == pytest.approx([part / scale for part in text[:8]], abs=1e-6)
        for wrong, more in (("a", {"dimensions": 65}), ([10**6], {})):
            with refusal(400):
                await embedded(k, wrong, **more)


@pytest.mark.parametrize("family", ["XLMRoberta", "MPNet"])
async def test_a_long_text_fits_a_model_whose_first_positions_are_for_padding(family, tmp_path):
    """Of 66 positions such a model uses 64. A text of 66 tokens was an index error, which counted as the engine's."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        **dict(vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=1),
        **dict(num_attention_heads=2, max_position_embeddings=66, pad_token_id=1, num_labels=1),
    )
    heads = {"embedder": "Model", "ranker": "ForSequenceClassification"}
    sources = {name: tmp_path / name for name in heads}
    for name, head in heads.items():
        getattr(transformers, family + head)(config).save_pretrained(sources[name])
        tiny_models.tokenizer().save_pretrained(sources[name])
    async with with_models(sources, *heads) as k:
        words = "fox " * 100
        for kind, body in (
            ("embeddings", {"model": "embedder", "input": words, "truncate": True}),
            ("embeddings", {"model": "embedder", "input": [[5] * 100], "truncate": True}),
            ("rerank", {"model": "ranker", "query": "fox", "documents": [words]}),
        ):
            answer = (await k.gateway.answer(kind, body)).json
            assert answer["usage"]["prompt_tokens"] == 64


@pytest.mark.parametrize("name", ["embedder", in_a_worker])
async def test_a_text_that_is_too_long_is_refused_and_not_cut_off(name, sources):
    """A vector of the first part of a text looks like one of the whole text. OpenAI's own server refuses it too."""
    limits = {"embedder": 256, "gguf": 512}
    how = {"embedder": {}, "gguf": {"backend": "llama_cpp"}}
    async with with_models({"embedder": sources[name]}, "embedder", **how[name]) as k:
        for text in ("fox " * 1000, "fox " * 300_000, [[5] * 1000], ["a", "fox " * 1000]):
            with refusal(400, param="input", match=f"reads at most {limits[name]}"):
                await embedded(k, text)
        cut = await embeddings(k, "fox " * 1000, truncate=True)
        assert cut["usage"]["prompt_tokens"] == limits[name]
        assert k.gateway.state().breakers["embedder"].failures == 0
        assert await embedded(k, "fox " * 50)


@pytest.mark.processes
async def test_a_gguf_embeds_a_text_in_one_batch(tmp_path):
    """With n_batch=1024 alone, a text of 900 tokens had the vector of its last 388 tokens."""
    source = tiny_models.gguf_lm(tmp_path / "long.gguf", context=1024)
    vectors = []
    for options in ({}, {"n_batch": 1024}, {"n_batch": 1024, "n_ubatch": 1024}, {"n_ubatch": 1024}):
        given = {"backend": "llama_cpp", **options}
        async with with_models({"embedder": source}, "embedder", **given) as k:
            answer = await embeddings(k, "the quick fox " * 20 + "a dog " * 80)
            assert 512 < answer["usage"]["prompt_tokens"] < 1024
            vectors += vectors_of(answer)
    assert all(vector == vectors[0] for vector in vectors)


async def test_documents_are_ranked(sources):
    documents = ["the quick fox", {"text": "a dog"}, "fox " * 30]
    body = {"model": "ranker", "query": "quick", "documents": documents}
    async with with_models(sources, "ranker", "writer") as k:

        async def rank(**more: Any) -> Any:
            return (await k.gateway.answer("rerank", {**body, **more})).json

        answer = await rank(return_documents=True)
        scores = [row["relevance_score"] for row in answer["results"]]
        assert scores == sorted(scores, reverse=True) and all(0 < score < 1 for score in scores)
        assert sorted(row["index"] for row in answer["results"]) == [0, 1, 2]
        by_index = {row["index"]: row for row in answer["results"]}
        assert [by_index[n]["document"]["text"] for n in (0, 1)] == ["the quick fox", "a dog"]
        assert answer["usage"]["total_tokens"] > 30
        [alone] = (await rank(documents=documents[:1]))["results"]
        assert alone["relevance_score"] == pytest.approx(by_index[0]["relevance_score"], abs=1e-5)
        assert (await rank(top_n=1))["results"] == [
            {key: answer["results"][0][key] for key in ("index", "relevance_score")}
        ]
        for wrong in ({"documents": []}, {"documents": [7]}, {"query": ""}, {"model": "writer"}):
            with refusal(400):
                await rank(**wrong)


@both
async def test_tokens_and_text_are_turned_into_each_other(name, sources):
    async with with_models(sources, name) as k:

        async def ask(kind: str, **fields: Any) -> Any:
            return (await k.gateway.answer(kind, {"model": name, **fields})).json

        found = await ask("tokenize", prompt="the quick fox")
        assert found["count"] == len(found["tokens"]) > 0 and found["model"] == name
        back = await ask("detokenize", tokens=found["tokens"])
        assert back["prompt"].strip() == "the quick fox"
        longer = await ask("tokenize", prompt="the quick fox", add_special_tokens=True)
        assert longer["count"] >= found["count"]
        for wrong in ([10**6], [], ["a"]):
            with refusal(400):
                await ask("detokenize", tokens=wrong)


def library() -> Any:
    """The modules of sentence-transformers."""
    return pytest.importorskip("sentence_transformers.sentence_transformer.modules")


def sentence_model(source: Any, directory: Any, *modules: Any, **more: Any) -> Any:
    return tiny_models.sentence_embedder(directory, *modules, source=source, **more)


POOLINGS = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
TEXTS = ["the quick fox", "a dog", "memory console operator " * 3]


@pytest.mark.parametrize("mode", [*POOLINGS, ["cls", "max"]])
async def test_a_vector_is_that_of_sentence_transformers(mode, sources, tmp_path):
    """Each pooling and each later module, with the prompt that the model's files name as its default."""
    models = library()
    width = 64 * (1 if isinstance(mode, str) else len(mode))
    parts = [models.Pooling(64, mode, include_prompt=mode != "mean"), models.Dense(width, 16)]
    more = {"prompts": {"query": "memory: "}, "default_prompt_name": "query"}
    own = sentence_model(sources["embedder"], tmp_path / "m", *parts, models.Normalize(), **more)
    expected = own.encode(TEXTS, normalize_embeddings=True).tolist()
    async with with_models({"embedder": tmp_path / "m"}, "embedder") as k:
        found = await embedded(k, TEXTS)
        assert [len(vector) for vector in found] == [16] * 3
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
        with refusal(400, match="it reads at most 32"):
            await embedded(k, "word " * 90)
        [cut] = await embedded(k, "the fox " * 90, truncate=True)
        [theirs] = own.encode(["the fox " * 90], normalize_embeddings=True).tolist()
        assert cut == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("weights", [False, True], ids=["pooling alone", "with weights"])
@pytest.mark.parametrize("mode", ["cls", "mean", "lasttoken", "max"])
async def test_all_weights_of_an_embedder_are_in_its_lease_and_return_to_the_bit(
    mode, weights, sources, tmp_path
):
    """The weights of a Dense stayed in host memory, and nothing counted them."""
    import torch

    models = library()
    later = [models.Dense(64, 1024), models.LayerNorm(1024)] if weights else []
    for module in later[1:]:
        torch.nn.init.normal_(module.norm.weight)
    own = sentence_model(sources["embedder"], tmp_path / "m", models.Pooling(64, mode), *later)
    held = sum(parameter.nbytes for parameter in own.parameters())
    expected = torch.tensor(own.encode(TEXTS, normalize_embeddings=True)).double()
    async with with_models({"embedder": tmp_path / "m"}, "embedder") as k:
        planned = k.rt.plan("embedder").footprint.bytes
        state = torch.get_rng_state()
        found = await embedded(k, TEXTS)
        assert torch.equal(state, torch.get_rng_state())
        cosines = torch.cosine_similarity(torch.tensor(found).double(), expected)
        assert cosines.tolist() == pytest.approx([1.0] * len(TEXTS), abs=1e-6)
        sizes = []
        for place in ("sim:0", "host"):
            table = k.rt.leases()
            sizes += table[table["device"] == place]["bytes"].tolist()
            await k.gateway._holds.ended("embedder")
            if place != "host":
                k.rt.evict("embedder")
        assert k.where()["embedder"] == "host"
        assert sizes == pytest.approx([held, held], rel=0.07)
        assert planned == pytest.approx(sizes[0], rel=0.07)
        assert await embedded(k, TEXTS) == found


async def test_an_adopted_module_without_its_later_weights_is_refused(sources, tmp_path):
    """The vector of its pooling alone has another width, and is wrong in silence."""
    import transformers

    models = library()
    folder = tmp_path / "m"
    sentence_model(sources["embedder"], folder, models.Pooling(64, "cls"), models.Dense(64, 16))
    module = transformers.AutoModel.from_pretrained(folder)
    module.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    async with harness() as k:
        k.rt.adopt("embedder", module.eval(), model_type="embedding")
        with refusal(400, match="(?s)weights in .*register"):
            await embedded(k, "the fox")


async def test_an_object_of_sentence_transformers_is_refused_with_what_to_type(sources, tmp_path):
    """The call failed with a TypeError, and counted against the model."""
    own = sentence_model(sources["embedder"], tmp_path / "m", library().Pooling(64, "cls"))
    async with harness() as k:
        k.rt.adopt("embedder", own.eval(), model_type="embedding")
        with pytest.raises(Refused, match=r"SentenceTransformer.*\n.*model.save\(DIRECTORY\)"):
            await embedded(k, "the fox")
        assert k.gateway.breakers.state("embedder").failures == 0


async def test_a_score_is_that_of_sentence_transformers(sources, tmp_path):
    """Texts that its files cut to eight tokens were read whole, and its prompt was ignored."""
    library()
    from sentence_transformers import CrossEncoder

    plain = tmp_path / "plain"
    shutil.copytree(sources["ranker"], plain, ignore=shutil.ignore_patterns("chat_template.jinja"))
    own = CrossEncoder(str(plain), device="cpu", max_length=8)
    documents = ["a dog " * 9, "the quick fox", "memory console operator"]
    expected = own.predict([("quick", text) for text in documents]).tolist()
    body = {"model": "ranker", "query": "quick", "documents": documents}
    changes = {
        "config_sentence_transformers.json": {"default_prompt_name": "query"},
        "sentence_bert_config.json": {"do_lower_case": True},
        "modules.json": {"type": "sentence_transformers.models.Dense", "path": "1_Dense"},
    }
    for number, (file, change) in enumerate([("", {}), *changes.items()]):
        folder = tmp_path / str(number)
        own.save(str(folder))
        if file:
            content = json.loads((folder / file).read_text())
            content = [*content, change] if isinstance(content, list) else {**content, **change}
            (folder / file).write_text(json.dumps(content))
        async with with_models({"ranker": folder}, "ranker") as k:
            if file:
                with pytest.raises(Refused, match="not implemented here"):
                    await k.gateway.answer("rerank", body)
                continue
            rows = (await k.gateway.answer("rerank", body)).json["results"]
            found = {row["index"]: row["relevance_score"] for row in rows}
            assert [found[n] for n in range(3)] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("mode", ["cls_token", "lasttoken", "max_tokens"])
async def test_the_keys_of_older_versions_are_read(mode, sources, tmp_path):
    """Before version 6, each pooling was a key of its own. The keys without effect are left as they are."""
    models = library()
    own = sentence_model(sources["embedder"], tmp_path / "m", models.Pooling(64, "mean"))
    old = {
        "word_embedding_dimension": 64,
        "pooling_mode_mean_tokens": False,
        f"pooling_mode_{mode}": True,
    }
    (tmp_path / "m" / "1_Pooling" / "config.json").write_text(json.dumps(old))
    own[1].pooling_mode = mode.split("_")[0]
    [expected] = own.encode(["the quick fox"], normalize_embeddings=True).tolist()
    async with with_models({"embedder": tmp_path / "m"}, "embedder") as k:
        assert (await embedded(k, "the quick fox"))[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("file", "change", "why"), [
    ("1_Pooling/config.json", {"pooling_mode": "median"}, "median"),
    ("1_Pooling/config.json", {"pooling_mode": None}, "names no way to pool"),
    ("1_Pooling/config.json", {"pooling_mode_median": True}, "pooling_mode_median"),
    ("2_Dense/config.json", {"activation_function": "my.Act"}, "my.Act"),
    ("2_Dense/config.json", {"gated": True}, "gated"),
    ("2_Dense/config.json", {"out_features": 17}, "size mismatch"),
    ("2_Dense/model.safetensors", None, "pickled weights are not read"),
    ("sentence_bert_config.json", {"module_output_name": "x"}, "module_output_name='x'"),
    ("sentence_bert_config.json", {"query_expansion": True}, "query_expansion=True"),
    ("config_sentence_transformers.json", {"default_prompt_name": "q"}, "'q' is not among"),
    ("modules.json", {"type": "sentence_transformers.models.CNN"}, "CNN is not implemented"),
    ("modules.json", {"type": "my.code.Dense"}, "my.code.Dense is not implemented"),
    ("modules.json", {"path": "../other"}, "leaves its folder"),
])  # fmt: skip
async def test_what_is_unknown_in_an_embedder_is_refused_by_name(
    file, change, why, sources, tmp_path
):
    """A vector that was pooled in another way looks like any other, and is wrong."""
    models = library()
    parts = models.Pooling(64, "mean"), models.Dense(64, 16)
    sentence_model(sources["embedder"], tmp_path / "m", *parts)
    path = tmp_path / "m" / file
    if change is None:
        path.rename(path.with_name("pytorch_model.bin"))
    else:
        content = json.loads(path.read_text())
        (content[2] if isinstance(content, list) else content).update(change)
        path.write_text(json.dumps(content))
    async with with_models({"embedder": tmp_path / "m"}, "embedder") as k:
        with refusal(400, param="model", match=why):
            await embedded(k, "the fox")
        assert k.gateway.breakers.state("embedder").failures == 0


@pytest.mark.parametrize(
    ("template", "why"), [(True, "as messages of a chat"), (False, "pip install 'sentence")]
)
async def test_a_model_that_cannot_be_read_here_is_refused(
    template, why, sources, tmp_path, monkeypatch
):
    """With a chat template, sentence-transformers 6 writes each text into it. Else its library is not installed."""
    pooling = library().Pooling(64, "mean")
    sentence_model(sources["embedder"], tmp_path / "m", pooling, template=template)
    if not template:
        monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    async with with_models({"embedder": tmp_path / "m"}, "embedder") as k:
        with pytest.raises(Refused, match=why):
            await embedded(k, "the fox")


async def test_an_image_for_a_model_of_texts_is_the_callers_mistake(sources):
    content = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    async with with_models(sources, "writer") as k:
        with refusal(400):
            await k.chat("writer", messages=[{"role": "user", "content": content}])
        assert k.gateway.state().breakers["writer"].failures == 0


@pytest.mark.processes
async def test_a_stream_breaks_off_with_its_worker_and_a_dead_worker_costs_no_call(sources):
    """A worker is killed with SIGKILL during a stream. Its lease is released, and the next call is answered."""
    import os
    import signal

    async with with_models(sources, "gguf") as k:
        for _ in range(20):  # a short answer may be complete before the kill
            reply = await k.chat("gguf", stream=True, max_tokens=200)
            await anext(reply.events)
            with k.rt.use("gguf") as model:
                os.kill(model._engine.pid, signal.SIGKILL)
            last = [event async for event in reply.events][-1]
            if "error" in last:
                break
        assert last["error"]["code"] == "broken_off" and "is gone" in last["error"]["message"]
        with k.rt.use("gguf") as model:
            os.kill(model._engine.pid, signal.SIGKILL)
        assert answer_text(await k.chat("gguf", max_tokens=3))
        assert k.gateway.state().breakers["gguf"].failures == 0, "the success began the row anew"


_EMPTY: dict[str, list[dict[str, Any]]] = {
    "chat": [{"messages": [{"role": "user", "content": content}]} for content in ("", [])],
    "completions": [{"prompt": prompt} for prompt in ("", [], [[]], [""], ["", "a"])],
    "embeddings": [{"input": text} for text in ("", [], [[]], [""], ["", "a"])],
    "rerank": [{"query": "", "documents": ["a"]}, {"query": "a", "documents": []}]
    + [{"query": "a", "documents": [""]}],
    "tokenize": [{"prompt": ""}],
    "detokenize": [{"tokens": []}],
}


@pytest.mark.parametrize(("name", "kinds"), [
    ("writer", ("chat", "completions", "tokenize", "detokenize")),
    pytest.param("gguf", ("chat", "completions", "tokenize", "detokenize"), marks=pytest.mark.processes),
    ("embedder", ("embeddings",)), ("ranker", ("rerank",)),
])  # fmt: skip
async def test_an_empty_prompt_is_answered_or_refused_and_counts_for_nothing(name, kinds, sources):
    """It was an AssertionError. A template may make a prompt without tokens, too."""
    bare = {"chat_template": "{{ messages[0].content or '' }}"} if "chat" in kinds else {}
    async with with_models(sources, name, **bare) as k:
        for kind in kinds:
            for body in _EMPTY[kind]:
                given = body if kind in ("embeddings", "rerank") else {**body, "max_tokens": 2}
                given = given if "token" not in kind else body
                try:
                    reply = await k.gateway.answer(kind, {"model": name, **given})
                except Refused as refused:
                    assert refused.status == 400, (body, refused.message)
                    assert refused.facts["param"] in body, (body, refused.message)
                else:
                    assert reply.json and kind != "chat", body
        state = k.gateway.state().breakers.get(name)
        assert state is None or state.state == "closed"


# -- blocking work in a thread, whose values are read in the event loop ----------------------------
async def test_values_arrive_in_order_and_the_error_last():

    def work(emit, cancelled):
        for n in range(100):
            emit(n)
        raise RuntimeError("broke")

    values = []
    with pytest.raises(RuntimeError, match="broke"):
        async for value in stream_from_thread(work):
            values.append(value)
    assert values == list(range(100))


@pytest.mark.parametrize("how", ["closed", "cancelled", "cancelled twice"])
async def test_a_reader_that_stops_ends_the_work_and_waits_for_its_end(how):
    """An engine that still computes cannot take the next call. A disconnected client cancels the reading task, maybe
    after its budget has.
    """
    began, ended = threading.Event(), threading.Event()

    def work(emit, cancelled):
        emit(1)
        began.set()
        cancelled.wait()
        go.wait()
        ended.set()

    async def read():
        async for _ in stream:
            pass

    go = threading.Event()

    stream = stream_from_thread(work)
    if how == "closed":
        go.set()
        assert await anext(stream) == 1
        await stream.aclose()
    else:
        task = asyncio.ensure_future(read())
        await until(began.is_set)
        for _ in how.split():
            task.cancel()
            await settle()
        try:
            assert not task.done(), "it waits"
        finally:
            go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert ended.is_set()


async def test_a_whole_answer_of_a_model_in_a_process_of_its_own_ends_when_its_caller_leaves(
    monkeypatch,
):
    """Its process computed the answer to the end, and the model took no other call until then."""
    begun, ended = threading.Event(), threading.Event()

    async def pieces(self: Any, *call: Any) -> AsyncIterator[Any]:
        begun.set()
        try:
            yield await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(EchoAdapter, "pieces", pieces)
    there = SimpleNamespace(stream=lambda function, *args: function(None, *args))
    adapter = ProcessAdapter(there, ModelSpec("m", "fake"))
    call = asyncio.ensure_future(adapter.answer("chat", chat("m"), None))
    await until(begun.is_set)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended.is_set()


async def test_one_value_from_a_thread():
    assert await in_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 / 0)


# -- the thoughts of a model -----------------------------------------------------------------------
LAST = "{{ messages[-1].content }}"  # a fake model answers with its prompt
OPENS = f"{LAST}{{{{ '' if add_generation_prompt }}}}<think>\n"  # the template opens them


def read(pieces: list[str], begun: bool) -> tuple[str, str]:
    reader = Thoughts(TAGS[0], begun)
    read = [*(reader.feed(piece) for piece in pieces), reader.rest()]
    return "".join(thought for thought, _ in read), "".join(answer for _, answer in read)


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        ("<think>\n17 is\nprime.\n</think>\n\nYes. ", False, ("17 is\nprime.", "Yes. ")),
        ("17 is prime.</think>Yes.", True, ("17 is prime.", "Yes.")),
        ("\n<think></think>Yes.", False, ("", "Yes.")),
        ("17 is pri", True, ("17 is pri", "")),  # the limit of tokens was reached
        (" a < b, <think> is a tag", False, ("", " a < b, <think> is a tag")),
        ("<thi", False, ("", "<thi")),
        ("<think>x</think>a</think>b", False, ("x", "a</think>b")),
    ],
)
@given(cuts=st.sets(st.integers(0, 40)))
def test_the_pieces_of_a_text_may_end_anywhere(text, begun, expected, cuts):
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    assert read(pieces, begun) == expected


async def test_a_template_may_open_the_thoughts():
    """JSON that a grammar forces is the answer, even if the template has opened the thoughts."""

    class AfterPrompt(EchoAdapter):
        """Answers with the prompt up to its last tag, as a model continues its prompt."""

        def __init__(self, value: Any, spec: Any) -> None:
            super().__init__(lambda prompt: prompt.rpartition("<think>")[0], spec)

    async with harness(
        qwen=4,
        options={"qwen": {"chat_template": OPENS}},
        make_adapter=lambda value, spec, http: AfterPrompt(value, spec),
    ) as k:
        found = (await k.chat("qwen", "17 is prime. </think>\nYes.")).json["choices"][0]["message"]
        assert (found["reasoning_content"], found["content"]) == ("17 is prime.", "Yes.")
        forced = await k.chat("qwen", '{"a": 1}', response_format={"type": "json_object"})
        assert forced.json["choices"][0]["message"]["content"] == '{"a": 1}'
