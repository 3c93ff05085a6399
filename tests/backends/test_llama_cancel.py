"""A call of a llama.cpp model can be cancelled at any moment, also while nothing of its answer has arrived."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from gpu_runtime.backends.llama_cpp import worker
from gpu_runtime.backends.llama_cpp.backend import LlamaModel
from gpu_runtime.backends.llama_cpp.channels import Channel
from gpu_runtime.backends.llama_cpp.rpc import LlamaEngine
from gpu_runtime.threads import Cancellation
from tests.clock import PATIENCE


class Silent(Channel):
    """A channel to an engine that never answers. `sent` has the messages to it."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self._messages: queue.SimpleQueue[None] = queue.SimpleQueue()

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def receive(self) -> None:
        return self._messages.get()

    def close(self) -> None:
        self._messages.put(None)


@pytest.fixture
def channel():
    made = Silent()
    yield made
    made.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_without_an_answer_ends_when_it_is_cancelled(channel, stream):
    """The thread that waits for the answer goes on at once, and the engine learns that nobody waits."""
    model = LlamaModel("qwen")
    model._engine = LlamaEngine("qwen", channel, None)
    cancelled, answers = Cancellation(), []

    def call() -> None:
        answer = model.create_completion("hi", stream=stream, cancelled=cancelled)
        answers.append(list(answer) if stream else answer)

    calling = threading.Thread(target=call)
    calling.start()
    while not channel.sent:
        calling.join(0.01)
    cancelled.set()
    calling.join(PATIENCE)
    assert answers == [[] if stream else None]
    call_id = channel.sent[0]["id"]
    assert channel.sent[0]["kwargs"] == ({"stream": True} if stream else {"stream": False})
    assert channel.sent[1:] == [{"cancel": call_id}]
    model._engine.cancel(call_id)
    assert len(channel.sent) == 2, "a call that has ended is not cancelled again"


def test_a_cancellation_calls_each_function_once():
    """A function that is given after the cancellation is called at once."""
    called = []
    cancellation = Cancellation()
    cancellation.then(lambda: called.append("before"))
    cancellation.set()
    cancellation.set()
    cancellation.then(lambda: called.append("after"))
    assert called == ["before", "after"]


def test_the_worker_stops_within_one_batch_of_a_prompt(tiny_gguf):
    """A batch of 512 tokens takes seconds on a CPU. Afterwards the model computes the same as before."""
    pytest.importorskip("llama_cpp")
    inbox = worker.Inbox()
    order = {"model_path": str(tiny_gguf), "n_ctx": 512, "verbose": False}
    model = worker._load(order, inbox, lambda part: None, lambda line: None)
    try:
        tokens = [1] * 300
        checks = []
        model.wanted = lambda: checks.append(True) or len(checks) < 3
        with pytest.raises(worker.Cancelled):
            model.eval(tokens)
        assert len(checks) > 2, "it was checked within the batch"
        assert model.n_tokens == 0
        del model.wanted
        model.eval(tokens)
        assert model.n_tokens == 300
    finally:
        model.close()
