"""The probabilities of the tokens that real small models write, against the models' own figures."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from gpu_runtime.backends.llama_cpp import worker
from gpu_runtime.facts import ModelSpec
from gpu_runtime.serving.engines import transformers
from gpu_runtime.serving.engines.llama_cpp import LlamaCppAdapter
from gpu_runtime.serving.engines.openai_format import LEAST, LogprobsWriter, Token, Unsent
from gpu_runtime.serving.engines.transformers import ScoredTokens
from gpu_runtime.serving.requests import Refused, read_call
from tests.serving.harness import refusal
from tests.serving.test_engines import both, sources, with_models  # noqa: F401 - a fixture

pytestmark = pytest.mark.thorough

GREEDY = {"max_tokens": 8, "temperature": 0}


@both
async def test_a_chat_has_the_probability_of_each_token(name, sources):  # noqa: F811
    """At temperature zero llama.cpp writes the most probable tokens; the other model suppresses some."""
    wanted = {**GREEDY, "logprobs": True, "top_logprobs": 3}
    async with with_models(sources, name) as k:
        [plain] = (await k.chat(name, "hello", **GREEDY)).json["choices"]
        answer = (await k.chat(name, "hello", **wanted)).json
        [read] = ChatCompletion.model_validate(answer).choices  # as OpenAI's client reads it
        [choice] = answer["choices"]
        assert read.logprobs.content[0].top_logprobs[2].bytes is not None
        assert plain["logprobs"] is None and plain["message"] == choice["message"]
        tokens = choice["logprobs"]["content"]
        assert _text(tokens) == choice["message"]["content"] and len(tokens) <= 8
        for token in tokens:
            top = token["top_logprobs"]
            assert token["logprob"] == top[0]["logprob"] or name == "writer"
            assert token["logprob"] <= top[0]["logprob"]
            logs = [one["logprob"] for one in top]
            assert len(top) == 3 and logs == sorted(logs, reverse=True)
            assert sum(map(math.exp, logs)) <= 1 + 1e-5
        reply = await k.chat(name, "hello", stream=True, **wanted)
        streamed: list[Any] = []
        async for event in reply.events:
            for part in event["choices"]:
                streamed += (part["logprobs"] or {"content": []})["content"]
        assert streamed == tokens
        [none] = (await k.chat(name, "hello", **GREEDY, logprobs=True)).json["choices"]
        assert not any(token["top_logprobs"] for token in none["logprobs"]["content"])


@both
async def test_a_completion_has_the_probabilities_in_its_own_format(name, sources):  # noqa: F811
    body = {"model": name, "prompt": "the quick", **GREEDY, "logprobs": 2, "n": 2}
    async with with_models(sources, name) as k:
        choices = (await k.gateway.answer("completions", body)).json["choices"]
        for choice in choices:
            found = choice["logprobs"]
            assert "".join(found["tokens"]) == choice["text"]
            for text, offset in zip(found["tokens"], found["text_offset"], strict=True):
                assert choice["text"][offset : offset + len(text)] == text
            scored = zip(found["tokens"], found["token_logprobs"], strict=True)
            for (text, logprob), top in zip(scored, found["top_logprobs"], strict=True):
                assert top[text] == logprob and len(top) in (2, 3)
        for refused in ({"logprobs": 21}, {"logprobs": True}):
            with pytest.raises(Refused, match="logprobs"):
                await k.gateway.answer("completions", {**body, **refused})


@both
async def test_penalties_and_biases_change_no_probability(name, sources):  # noqa: F811
    """A forced token has the probability that the model itself computed for it."""
    wanted = {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 20}
    async with with_models(sources, name) as k:
        word = {"model": name, "prompt": "the"}
        [number, *_] = (await k.gateway.answer("tokenize", word)).json["tokens"]
        bias = {"logit_bias": {str(number): 100}, "repetition_penalty": 1.7}
        found = []
        for more in ({}, bias):
            [choice] = (await k.chat(name, **wanted, **more)).json["choices"]
            found += choice["logprobs"]["content"]
        free, forced = found
        assert forced["token"] != free["token"]
        assert forced["top_logprobs"] == free["top_logprobs"]
        assert forced["logprob"] < free["top_logprobs"][0]["logprob"]


@both
async def test_a_stop_string_has_no_tokens(name, sources):  # noqa: F811
    """The tokens of an answer that ends at a stop string begin in the text before the stop string."""
    async with with_models(sources, name) as k:
        full = (await k.chat(name, **GREEDY | {"max_tokens": 16})).json["choices"][0]
        text = full["message"]["content"]
        stop = {"stop": [text[5:7]], "logprobs": True, **GREEDY, "max_tokens": 16}
        [cut] = (await k.chat(name, **stop)).json["choices"]
        kept = cut["message"]["content"]
        tokens = cut["logprobs"]["content"]
        assert kept == text[: text.index(text[5:7])] and _text(tokens).startswith(kept)
        assert _text(tokens[:-1]) != kept


async def test_the_figures_of_a_module_are_those_of_its_own_logits(sources):  # noqa: F811
    """Those of the prompt, from its second token on, and those of the tokens that were written."""
    import torch

    body = {"model": "writer", "prompt": "the quick", **GREEDY, "logprobs": 0, "echo": True}
    async with with_models(sources, "writer") as k:
        [choice] = (await k.gateway.answer("completions", body)).json["choices"]
        with k.rt.use("writer") as module, torch.no_grad():
            prompt = torch.tensor([module.tokenizer("the quick")["input_ids"]])
            options = {"max_new_tokens": 8, "do_sample": False, "top_k": None}
            [written] = module.generate(prompt, **options)
            logs = module(written[None, :-1]).logits[0].log_softmax(-1)
            expected = logs.gather(1, written[1:, None])[:, 0].tolist()
            assert not module._forward_hooks, "the hook that reads the logits is removed"
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)


def test_logits_without_a_token_are_left_out(sources):  # noqa: F811
    """A model may have more logits than its tokenizer has tokens, and they may be the most probable ones."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sources["writer"])
    size = len(tokenizer)
    [number, *_] = tokenizer("the", add_special_tokens=False)["input_ids"]
    logits = torch.zeros(size + 40)
    logits[size:], logits[number] = 9.0, 5.0

    class Module(torch.nn.Module):
        def forward(self):
            return SimpleNamespace(logits=logits[None, None])

    def tokens_of(count: int) -> tuple[Token, ...]:
        scored, module = ScoredTokens(tokenizer, count), Module()
        with scored.reading(module):
            module()
        scored.add(number)
        scored.add(size + 1)
        return scored.unsent.take_rest()

    [token] = tokens_of(3)
    assert len(token.top) == 3 and token.top[0] == (token.data, token.logprob)
    assert all(data for data, _ in token.top)
    assert token.logprob == pytest.approx(float(logits.log_softmax(-1)[number]))
    assert [token.top for token in tokens_of(0)] == [()]


@pytest.mark.processes
async def test_the_figures_of_a_gguf_are_those_of_the_library(sources):  # noqa: F811
    """A special token, such as the end of the text, has its name. Its text was empty."""
    from llama_cpp import Llama

    body = {"model": "gguf", "prompt": "the quick", **GREEDY, "logprobs": 4}
    async with with_models(sources, "gguf") as k:
        [choice] = (await k.gateway.answer("completions", body)).json["choices"]
        with k.rt.use("gguf") as model:
            size = model.n_vocab()
            [part, *_] = model.write("the", True, 1, True, stream=True, top_logprobs=size - 1)
    [[_, _, top]] = part["tokens"]
    names = [name for name, _ in top]
    assert len(names) == size - 1 and b"</s>" in names and b"" not in names
    model = Llama(str(sources["gguf"]), logits_all=True, verbose=False, n_ctx=256)
    [own] = model.create_completion("the quick", **GREEDY, logprobs=4)["choices"]
    model.close()
    assert choice["text"] == own["text"]
    assert choice["logprobs"]["tokens"] == own["logprobs"]["tokens"]
    theirs = own["logprobs"]["token_logprobs"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(theirs, abs=1e-3)


async def test_tokens_of_a_gguf_without_text_are_left_out():
    """A token may have no text, such as padding. A special token that was written is no part of the text."""
    scores = [(b"a", -0.2), (b"", -0.1)]
    written = [[b"", -0.1, scores], [b"a", -0.2, scores]]
    end = {"text": "a", "finish": "stop", "tokens": written}
    model = SimpleNamespace(write=lambda *_, **__: (part for part in [end]))
    adapter = LlamaCppAdapter(model, ModelSpec("m", "llama_cpp"))
    body = {"prompt": "x", "logprobs": 2}
    [piece] = [piece async for piece in adapter.pieces("completions", body, None)]
    assert piece.tokens == (Token(b"a", -0.2, ((b"a", -0.2),)),)


@pytest.mark.parametrize(
    "body", [{"logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 2}]
)
def test_a_chat_that_requests_probabilities_wrongly_is_refused(body):
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    with refusal(400, match="logprobs"):
        read_call("chat", {**chat, **body})


def test_a_character_of_several_tokens_is_kept_as_bytes():
    """The text of such a token is the replacement character. JSON has no infinity."""
    tokens = (Token("é".encode()[:1], -0.5), Token("é".encode()[1:], -math.inf))
    unsent = Unsent()
    for token in tokens:
        unsent.add(token)
    assert unsent.take("é") == tokens and unsent.take_rest() == ()
    plain = LogprobsWriter(chat=False).field(tokens, "é") or {}
    assert plain["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"] and plain["text_offset"] == [0, 1]
    entries = (LogprobsWriter(chat=True).field(tokens, "é") or {})["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "é"
    assert entries[0]["token"] == "\ufffd" and entries[1]["logprob"] == LEAST


def _text(tokens: list[dict[str, Any]]) -> str:
    return bytes(byte for token in tokens for byte in token["bytes"]).decode()


async def test_a_prompt_that_is_scored_in_parts_has_the_same_figures(sources, monkeypatch):  # noqa: F811
    """A long prompt is computed in parts, because all its logits at once might not fit the card."""
    async with with_models(sources, "writer") as k:
        with k.rt.use("writer") as module:
            scored = ScoredTokens(module.tokenizer, 2)
            tokens = list(range(10, 60))
            whole = scored.of_prompt(module, tokens)
            monkeypatch.setattr(transformers, "LOGITS_AT_ONCE", 7 * 512)
            parts = scored.of_prompt(module, tokens)
    assert [token.data for token in parts] == [token.data for token in whole]
    assert whole[0].logprob is parts[0].logprob is None and len(whole) == 50
    logs = [[token.logprob for token in some[1:]] for some in (parts, whole)]
    assert logs[0] == pytest.approx(logs[1], abs=1e-4)


def test_a_prompt_of_a_gguf_has_the_figures_of_the_library(sources, monkeypatch):  # noqa: F811
    """The worker computes the prompt in small batches. It can continue the prompt afterwards."""
    llama_cpp = pytest.importorskip("llama_cpp")
    monkeypatch.setattr(worker, "SCORED_AT_ONCE", 3)
    order = {"model_path": str(sources["gguf"]), "n_ctx": 256, "verbose": False}
    inbox = worker.Inbox()
    model = worker._load(order, inbox, lambda part: None, lambda line: None)
    given = {"add_bos": True, "by_piece": False, "top_logprobs": 2, "temp": 0.0}
    text = "the quick brown fox"
    sent: list[tuple] = []
    send = lambda *answer: sent.append(answer)
    end, alone = (
        worker._send_items(model.write(text, most=4, echo=echo, **given), 1, inbox, send)
        for echo in (True, False)
    )
    [(_, _, prompt)] = sent
    assert (end["text"], prompt["text"]) == (alone["text"], text)
    own = llama_cpp.Llama(str(sources["gguf"]), logits_all=True, verbose=False, n_ctx=256)
    tokens = own.tokenize(text.encode())
    own.eval(tokens)
    for at, (_, logprob, _) in enumerate(prompt["tokens"][1:], 1):
        expected = own.logits_to_logprobs(own.scores[at - 1])[tokens[at]]
        assert logprob == pytest.approx(float(expected), abs=1e-3)
    assert len(prompt["tokens"]) == len(tokens)
    own.close()
    model.close()
