"""A huge prompt delays no other call.

The prompt is refused before all of it is tokenised, and before its call waits for the model.
"""

import asyncio
import sys
import threading
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_runtime.backends.llama_cpp import worker
from gpu_runtime.facts import ModelSpec
from gpu_runtime.serving import requests
from gpu_runtime.serving.engines.base import remember, require_room
from gpu_runtime.serving.engines.transformers import TransformersAdapter
from gpu_runtime.serving.requests import (
    CUT_TOKENS,
    MOST_CHARACTERS,
    Refused,
    read_call,
    tokens_if_too_many,
)
from tests.clock import PATIENCE
from tests.serving.harness import harness
from tests.serving.loops import settle, until

QWEN = "qwen"


def chat(text: str) -> dict:
    return {"model": QWEN, "messages": [{"role": "user", "content": text}]}


def words(text: str) -> int:
    return len(text.split())


def test_tokens_that_are_given_as_numbers_are_counted():
    for tokens, count in (([1, 2, 3], 3), ([[1, 2], [3]], 3), (["a"], 0), ("a", 0)):
        for field in ("prompt", "input"):
            assert requests.given_tokens({field: tokens}) == count


def test_images_do_not_count_as_text():
    picture = {"type": "image_url", "image_url": {"url": "data:" + "x" * (MOST_CHARACTERS + 1)}}
    body = chat("")
    body["messages"][0]["content"] = [{"type": "text", "text": "hi"}, picture]
    assert requests.characters(read_call("chat", body).body) == 2


async def test_a_prompt_that_cannot_fit_is_refused_before_its_turn():
    spec = ModelSpec(QWEN, "fake", options={"context_length": 8})
    with pytest.raises(Refused, match="its context is 8 tokens; the prompt has 39 or more"):
        require_room(read_call("chat", chat("x" * 10_000)), spec)
    require_room(read_call("chat", chat("x" * 100)), spec)
    async with harness(qwen=4) as k:
        k.rt.spec(QWEN)
        k.gateway.rt = SimpleNamespace(spec=lambda name: spec, here=k.rt.here)
        with pytest.raises(Refused, match="its context is 8 tokens"):
            await k.chat(QWEN, "x" * 10_000)
        assert k.gateway.state().loads == 0
        k.gateway.rt = k.rt


@example(pieces=["a", " ", "a"], most=2)  # as long as is allowed
@example(pieces=["defg", "defg"], most=1)  # one word that is cut
@given(
    pieces=st.lists(st.sampled_from(["a", "bc", " ", "defg"]), max_size=60),
    most=st.integers(0, 40),
)
def test_a_prompt_that_fits_is_never_refused(pieces, most):
    """The pieces are cut at any character, and a cut word counts as two tokens."""
    text = "".join(pieces)
    before, requests.PIECE_CHARACTERS = requests.PIECE_CHARACTERS, 5
    try:
        found = tokens_if_too_many(text, most, words)
    finally:
        requests.PIECE_CHARACTERS = before
    assert found <= words(text) + CUT_TOKENS and (not found or words(text) > most)


class Words:
    """A tokenizer that makes one token of each word. It calls `before` before each count."""

    chat_template = None

    def __init__(self, before=lambda: None) -> None:
        self.before, self.counted = before, 0

    def __call__(self, text: str, **_: object) -> dict[str, list[str]]:
        self.before()
        self.counted += 1
        return {"input_ids": text.split()}


async def test_a_long_prompt_that_cannot_fit_takes_no_turn_of_a_model_whose_tokenizer_is_known():
    """Counted while the call uses the model, it would let all other calls wait."""
    async with harness(qwen=4) as k:
        spec, tokenizer = k.rt.spec(QWEN), Words()
        config = SimpleNamespace(max_position_embeddings=20_000)
        TransformersAdapter(SimpleNamespace(tokenizer=tokenizer, config=config), spec)
        with pytest.raises(Refused, match="its context is 20000 tokens; the prompt has [23]"):
            await k.chat(QWEN, "a " * 1_000_000)
        assert k.gateway.state().loads == 0 and tokenizer.counted < 4
        assert await k.chat(QWEN, "a " * 10_000), "a prompt that fits is answered"
        before = tokenizer.counted
        assert await k.chat(QWEN, "short") and tokenizer.counted == before


async def test_counting_before_the_turn_ends_with_the_call():
    counts, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        counts.set()
        goes_on.wait(PATIENCE)

    async with harness(qwen=4) as k:
        tokenizer = Words(wait)
        remember(k.rt.spec(QWEN), tokenizer, 10**9)
        call = asyncio.ensure_future(k.chat(QWEN, "a " * 1_000_000))
        await until(counts.is_set)
        call.cancel()
        await settle()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert tokenizer.counted < 4 and k.gateway.state().loads == 0


def test_an_embedding_ends_with_its_caller():

    class Module(SimpleNamespace):
        __hash__ = object.__hash__

    left, read = threading.Event(), []
    config = SimpleNamespace(max_position_embeddings=4)
    value = Module(config=config, named_modules=tuple, tokenizer=read.append)
    adapter = TransformersAdapter(value, ModelSpec(QWEN, "transformers", model_type="embedding"))
    left.set()
    assert adapter._embed(["text"] * 2048, False, left) == ([], 0) and read == []


def test_the_worker_of_llama_cpp_stops_counting_when_the_caller_has_left(monkeypatch):
    """The worker cannot answer another call while it counts, so it must stop after the next piece."""

    class Llama:
        counted = 0

        def n_ctx(self) -> int:
            return 10**9

        def tokenize(self, text: bytes, **_: object) -> list[bytes]:
            self.counted += 1
            inbox.cancelled.add(self.job)
            return text.split()

    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama))
    inbox = worker.Inbox()
    model = worker._model_class(inbox)()
    model.job = 7
    with pytest.raises(worker.Cancelled):
        next(model.write("a " * 1_000_000, add_bos=False, most=1, by_piece=True))
    assert model.counted == 1
