"""A call of a llama.cpp model can be cancelled at any moment, also while nothing of its answer has arrived."""

import queue
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from gpu_runtime.backends.llama_cpp import worker
from gpu_runtime.backends.llama_cpp.backend import LlamaEngine, LlamaModel
from gpu_runtime.serving.engines.transformers import Vocabulary
from gpu_runtime.threads import Cancellation
from tests import tiny_models
from tests.clock import PATIENCE


class Silent:
    """A connection to a worker that never answers. `sent` has the requests to it."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, str, Any]] = []
        self._messages: queue.SimpleQueue[None] = queue.SimpleQueue()

    def send(self, message: tuple[int, str, Any]) -> None:
        self.sent.append(message)

    def receive(self) -> None:
        self._messages.get()
        raise EOFError

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
    model._engine = LlamaEngine("qwen", Path("log"), channel, None)
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
    number, kind, (method, (args, kwargs)) = channel.sent[0]
    assert (kind, method, args) == ("call", "create_completion", ("hi",))
    assert kwargs == {"stream": stream}
    assert channel.sent[1:] == [(number, "cancel", (number,))], "and only once"


def load(file: Path, **more: Any) -> Any:
    """The model that a worker loads from `file`, in this process."""
    pytest.importorskip("llama_cpp")
    order = {"model_path": str(file), "n_ctx": 512, "verbose": False, **more}
    return worker._load(order, worker.Inbox(), lambda part: None, lambda line: None)


def test_the_worker_stops_within_one_batch_of_a_prompt(tiny_gguf):
    """A batch of 512 tokens takes seconds on a CPU. Afterwards the model computes the same as before."""
    model = load(tiny_gguf)
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


def test_a_whole_answer_is_one_message(tiny_gguf):
    """Each message wakes a thread of the worker's owner, a thread of the call, and the event loop."""
    model, inbox, sent = load(tiny_gguf), worker.Inbox(), []
    kwargs = {"stream": True, "temp": 0.0}
    try:
        for by_piece in (False, True):
            args = ["one two", False, 3, by_piece]
            result = worker._call(
                model, 1, "write", args, kwargs, inbox, lambda *sent_: sent.append(sent_[2])
            )
            sent.append(result)
    finally:
        model.close()
    whole, *pieces = sent
    assert whole["finish"] == "length" and whole["completion_tokens"] == 3
    texts = [one["text"] for one in pieces]
    assert len(texts) == 3 and "".join(texts) == whole["text"]


@pytest.mark.parametrize("kind", ["spm", "added", "bpe"])
def test_every_token_has_the_bytes_that_transformers_gives_it(tmp_path, kind):
    """The library's own method loses each token of more than 32 bytes, such as a line of dashes."""
    file = tiny_models.gguf_vocabulary(tmp_path / "v.gguf", kind)
    model = load(file, vocab_only=True)
    try:
        known = Vocabulary(AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name))
        tokens = range(model.n_vocab())
        ours = [model.detokenize([token], special=True) for token in tokens]
        assert ours == [known.data(token) for token in tokens]
        assert [data.decode() for data in ours[-4:]] == tiny_models.LONG_TOKENS
        assert model._model.detokenize([*tokens][3:]) == b"".join(ours[3:])
    finally:
        model.close()


@pytest.mark.parametrize("length", [1023, 1024, 1025])
def test_a_chat_template_keeps_its_last_character(tmp_path, length):
    """The library's own method cuts it off if the text just fills the buffer of 1024 bytes."""
    gguf = pytest.importorskip("gguf")
    plain = tiny_models.gguf_vocabulary(tmp_path / "v.gguf", "spm")
    writer = gguf.GGUFWriter(str(tmp_path / "t.gguf"), "llama")
    reader = gguf.GGUFReader(str(plain))
    for field in list(reader.fields.values()):
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kinds = [*field.types, None]
            writer.add_key_value(field.name, field.contents(), kinds[0], kinds[1])
    template = "x" * (length - 1) + "!"
    writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    model = load(tmp_path / "t.gguf", vocab_only=True)
    assert model.metadata["tokenizer.chat_template"] == template
    model.close()
