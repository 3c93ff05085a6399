"""The worker that computes a llama.cpp model: loads one model, then answers one call after another.

As a program, this module is the process of an isolated model. JSON lines are sent over a socket,
whose file descriptor is the program's first argument. If a model is not isolated, a thread of the
notebook's process runs `work`. The module imports only the standard library and llama_cpp, because
every load waits for its imports.

Messages to the worker: {"load": arguments of Llama}, {"id", "call", "args", "kwargs"}, {"cancel":
id}. Messages from the worker: {"progress": 0 to 1}, {"loaded": facts} or {"failed": error}. After
these, each call gets any number of {"id", "item"} and one {"id", "end"} or {"id", "error"}.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import queue
import re
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

METHODS = (  # the methods of Llama that callers may use
    *("create_chat_completion", "create_completion", "__call__", "create_embedding", "embed"),
    *("tokenize", "detokenize", "n_ctx", "n_vocab", "n_embd", "token_bos", "token_eos", "token_nl"),
    *("metadata", "chat_format", "reset", "set_seed"),
)
OUR_METHODS = ("write", "drill")  # the methods of `_OurMethods` below
LONGEST_LINE = 256 << 20
PIECE_CHARACTERS = 32_768  # a prompt is first counted in pieces of this length
CUT_TOKENS = 16  # a cut between two such pieces adds fewer tokens than this
PR_SET_PDEATHSIG = 1
_BUFFER = re.compile(
    r"([A-Za-z]+\d*)(?:_\w+)?\s+(model|KV|RS|output|compute) buffer size\s*=\s*([\d.]+) MiB"
)
_loading = threading.Lock()
_log_callbacks: list[Any] = []  # the newest one: the library calls it after its model is gone too


class Cancelled(Exception):
    """Raised when the caller no longer waits for the answer."""


class NoOffload(Exception):
    """Raised when a GPU is required, but the library was built without GPU support."""


class Inbox:
    """The received messages: calls in their order, and the ids of cancelled calls."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.cancelled: set[int] = set()
        self.closed = False

    def take(self, message: dict[str, Any] | None) -> None:
        """Stores one `message`. If `message` is None, no more messages will arrive."""
        if message is None:
            self.closed = True
            self.jobs.put(None)
        elif "cancel" in message:
            self.cancelled.add(message["cancel"])
        else:
            self.jobs.put(message)


def work(inbox: Inbox, send: Callable[[dict[str, Any]], None], log: Callable[[str], None]) -> None:
    """Loads the model that the first message describes, then answers calls until `inbox` closes.

    `send` sends a message to the caller. `log` gets the lines that llama.cpp prints.
    """
    order = inbox.jobs.get()
    if order is None:
        return
    buffers: dict[str, dict[str, int]] = {}

    def note_line(line: str) -> None:
        """Logs a `line`. If the line reports the size of a buffer, records this size."""
        log(line)
        found = _BUFFER.search(line)
        if found:
            device, use, mebibytes = found.groups()
            sizes = buffers.setdefault(device, {})
            sizes[use] = sizes.get(use, 0) + int(float(mebibytes) * 2**20)

    try:
        model = _load(order["load"], inbox, lambda part: send({"progress": part}), note_line)
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        send({"failed": _described(error)})
        return
    try:
        send({"loaded": _facts(model, buffers)})
        while (job := inbox.jobs.get()) is not None:
            _answer(model, job, inbox, send)
    finally:
        model.close()


def _load(
    order: dict[str, Any],
    inbox: Inbox,
    progress: Callable[[float], None],
    note_line: Callable[[str], None],
) -> Any:
    """Loads the model of `order` and returns it. Raises NoOffload, and the errors of `Llama`."""
    from llama_cpp import llama_cpp as lib

    @lib.llama_log_callback
    def on_log(level: int, text: bytes, _: Any) -> None:
        note_line(text.decode("utf-8", "replace"))

    @lib.llama_progress_callback
    def on_progress(part: float, _: Any) -> bool:
        progress(part)
        return not inbox.closed  # False ends the load

    defaults = lib.llama_model_default_params

    def with_progress() -> Any:
        params = defaults()
        params.progress_callback = on_progress
        return params

    arguments = dict(order)
    needs_gpu = arguments.pop("needs_gpu", None)
    template = arguments.pop("chat_template", None)
    name = arguments.pop("name", None)
    # Without GPU support the library accepts n_gpu_layers, but computes on the CPU.
    if needs_gpu and not lib.llama_supports_gpu_offload():
        raise NoOffload("this build of llama-cpp-python cannot use a GPU")
    with _loading:  # the library has one place for its default parameters and its log callback
        lib.llama_log_set(on_log, ctypes.c_void_p(0))
        _log_callbacks[:] = [on_log]
        lib.llama_model_default_params = with_progress
        try:
            model = _model_class(inbox)(**arguments)
        finally:
            lib.llama_model_default_params = defaults
    model.kept = (on_progress,)  # keeps it alive: C code has its address
    _make_cancellable(model)
    model.model_path = name  # its answers carry this name
    if template:
        _set_template(model, template)
    return model


class _OurMethods:
    """The methods of OUR_METHODS, for a class that extends `llama_cpp.Llama`."""

    n_ctx: Callable[..., int]
    tokenize: Callable[..., list[int]]
    create_completion: Callable[..., Any]
    written: list[Any]  # the tokens of the newest answer; see `_scored`
    top_logprobs: int | None  # the number of most probable tokens that `_scored` has for each token
    require_wanted: Callable[[], None]  # raises Cancelled if the caller has left

    def write(
        self,
        prompt: str,
        add_bos: bool,
        most: int | None,
        by_piece: bool,
        stream: bool = True,
        top_logprobs: int | None = None,
        **given: Any,
    ) -> Iterator[dict[str, Any]]:
        """Continues `prompt` by at most `most` tokens (None: as many as fit into the context).

        With `by_piece`, each piece of the new text is an item. Otherwise the last item has all of
        the text. The last item also has the reason of the end and the token counts. If the prompt
        and `most` tokens do not fit into the context, the only item is {"too_long": tokens of the
        prompt}. With `top_logprobs`, each item also has its tokens; see `_scored`.

        `add_bos` is for a plain prompt: it adds the beginning-of-sequence token, and no text of the
        prompt is read as a special token. A prompt made by a chat template has that token already.
        `given` are other arguments of `create_completion`. `stream` has no effect here. The proxy
        in the caller's process reads it, and returns the items one by one.
        """
        if too_many := self._tokens_if_too_many(prompt, special=not add_bos):
            yield {"too_long": too_many}
            return
        tokens = self.tokenize(prompt.encode(), add_bos=add_bos, special=not add_bos)
        room = self.n_ctx() - len(tokens)
        if room < (most or 1):
            yield {"too_long": len(tokens)}
            return
        pieces, finish = [], ""  # empty: the library ended the text without a reason
        self.written, self.top_logprobs, sent = [], top_logprobs, 0
        for chunk in self.create_completion(tokens, stream=True, max_tokens=most or room, **given):
            choice = chunk["choices"][0]
            finish = choice.get("finish_reason") or finish
            if choice["text"] and by_piece:
                yield {"text": choice["text"], **self._scored(sent)}
                sent = len(self.written)
            else:
                pieces.append(choice["text"])
        yield {
            "text": "".join(pieces),
            "finish": finish,
            "prompt_tokens": len(tokens),
            "completion_tokens": len(self.written),
            **self._scored(sent),
        }

    def _scored(self, sent: int) -> dict[str, Any]:
        """The answer's tokens after the first `sent`, in {"tokens": …}; {} without `top_logprobs`.

        A token is [its bytes, the natural logarithm of its probability, alternatives]. The
        alternatives are the most probable tokens at this place, each as [its bytes, its logarithm].
        """
        return {} if self.top_logprobs is None else {"tokens": self.written[sent:]}

    def _tokens_if_too_many(self, prompt: str, special: bool) -> int:
        """0 if `prompt` may fit into the context; else a lower bound of its number of tokens.

        The prompt is counted in pieces. The count ends as soon as the prompt cannot fit, so that a
        huge prompt does not keep the model busy.
        """
        counted = 0
        for number, at in enumerate(range(0, len(prompt), PIECE_CHARACTERS)):
            self.require_wanted()
            piece = prompt[at : at + PIECE_CHARACTERS].encode()
            counted += len(self.tokenize(piece, add_bos=False, special=special))
            if counted - number * CUT_TOKENS > self.n_ctx():
                return counted - number * CUT_TOKENS
        return 0

    def drill(self, words: str) -> None:
        """Raises RuntimeError with the text `words`, as a failing driver does. For drills."""
        raise RuntimeError(words)


def _model_class(inbox: Inbox) -> Any:
    """`llama_cpp.Llama` with cancellation and the methods of OUR_METHODS."""
    import llama_cpp
    from numpy.ctypeslib import as_array

    class Model(_OurMethods, llama_cpp.Llama):
        job, top_logprobs = -1, None

        def generate(self, *args: Any, **given: Any) -> Iterator[int]:
            """The tokens of `Llama.generate`. Adds all but end tokens to `written`."""
            self.written = []
            for token in super().generate(*args, **given):
                if not llama_cpp.llama_vocab_is_eog(self._model.vocab, token):
                    self.written.append(self._scores_of(token))
                yield token

        def _scores_of(self, token: int) -> Any:
            if (count := self.top_logprobs) is None:
                return token
            logits = as_array(self._ctx.get_logits_ith(-1), shape=(self.n_vocab(),))
            logprobs = self.logits_to_logprobs(logits)
            best = sorted((-logprobs).argpartition(count)[:count], key=lambda one: -logprobs[one])
            name = self._model.detokenize  # without `special`, a special token has no bytes
            top = [[name([int(one)], special=True), float(logprobs[one])] for one in best]
            return [name([token]), float(logprobs[token]), top]

        def wanted(self) -> bool:
            """Whether the caller still waits."""
            return self.job not in inbox.cancelled and not inbox.closed

        def require_wanted(self) -> None:
            """Raises Cancelled if the caller has left."""
            if not self.wanted():
                raise Cancelled

    return Model


def _make_cancellable(model: Any) -> None:
    """Makes every computation of `model` end soon after its result is no longer wanted.

    Before each batch, `decode_if_wanted` raises Cancelled if the result is not wanted. A batch of a
    prompt may take seconds on a CPU. So for a batch of several tokens, llama.cpp also calls `left`
    during the computation. If `left` returns True, llama.cpp ends the computation.
    """
    from llama_cpp import llama_cpp as lib

    @lib.ggml_abort_callback
    def left(_: Any) -> bool:
        return not model.wanted()

    never = lib.ggml_abort_callback()
    context, decode = model._ctx, model._ctx.decode

    def decode_if_wanted(batch: Any) -> None:
        model.require_wanted()
        is_long = batch.n_tokens() > 1
        if is_long:
            lib.llama_set_abort_callback(context.ctx, left, None)
        try:
            decode(batch)
        except RuntimeError:
            model.require_wanted()  # it was aborted, and has not failed
            raise
        finally:
            if is_long:
                lib.llama_set_abort_callback(context.ctx, never, None)

    context.decode = decode_if_wanted
    model.kept = (*model.kept, left)


def _set_template(model: Any, template: str) -> None:
    """Makes the chat methods of `model` use the Jinja `template`."""
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    eos, bos = model.token_eos(), model.token_bos()
    words = [model._model.token_get_text(token) if token != -1 else "" for token in (eos, bos)]
    formatter = Jinja2ChatFormatter(template, *words, stop_token_ids=[eos])
    model.chat_handler = formatter.to_chat_handler()


def _facts(model: Any, buffers: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Facts about a loaded `model`, such as the exact bytes of its weights.

    `buffers` has the bytes of llama.cpp's buffers, by device (CPU, CUDA0) and by use (model, KV).
    """
    from llama_cpp import llama_cpp as lib

    return {
        "weight_bytes": lib.llama_model_size(model._model.model),
        "context": model.n_ctx(),
        "pid": os.getpid(),
        "buffers": buffers,
        "layers": lib.llama_model_n_layer(model._model.model),
        "offload": bool(lib.llama_supports_gpu_offload()),
    }


def _answer(
    model: Any, job: dict[str, Any], inbox: Inbox, send: Callable[[dict[str, Any]], None]
) -> None:
    """Runs one call and sends its items, then its result or its error."""
    number = model.job = job["id"]
    model.top_logprobs = None
    try:
        if number in inbox.cancelled:
            raise Cancelled
        if job["call"] not in METHODS + OUR_METHODS:
            raise AttributeError(f"there is no {job['call']}")
        result = getattr(model, job["call"])
        if callable(result):
            result = result(*job["args"], **_with_grammar(job["kwargs"], model))
        if hasattr(result, "__next__"):
            for item in result:
                if number in inbox.cancelled:
                    result.close()
                    break
                send({"id": number, "item": item})
            result = None
        send({"id": number, "end": result})
    except Cancelled:  # the caller wants no more
        send({"id": number, "end": None})
    except Exception as error:  # noqa: BLE001 - the caller raises it
        send({"id": number, "error": _described(error)})
    finally:
        inbox.cancelled.discard(number)


def _with_grammar(kwargs: dict[str, Any], model: Any) -> dict[str, Any]:
    """The `kwargs` of a call. A `grammar` text or a `json_schema` becomes a LlamaGrammar."""
    given = dict(kwargs)
    name = "json_schema" if "json_schema" in given else "grammar"
    if isinstance(given.get(name), (dict, str)):
        grammar = runpy.run_path(str(Path(__file__).with_name("grammar.py")))
        given["grammar"] = grammar[f"of_{name}"](given.pop(name), model)
    return given


def _described(error: BaseException) -> dict[str, str]:
    return {"type": type(error).__name__, "text": str(error) or type(error).__name__}


def to_line(message: dict[str, Any]) -> bytes:
    """The `message` as a line of JSON, with bytes as base64.

    Raises TypeError for an object that JSON cannot hold.

    >>> from_line(to_line({"id": 1, "args": [b"hi"]}))
    {'id': 1, 'args': [b'hi']}
    """
    return _ENCODER.encode(message).encode() + b"\n"


def from_line(line: bytes) -> dict[str, Any]:
    """The message in a `line` that `to_line` made. Raises ValueError."""
    return _DECODER.decode(line.decode())


def _with_bytes(found: dict[str, Any]) -> Any:
    return base64.b64decode(found["$bytes"]) if found.keys() == {"$bytes"} else found


def _plain(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if hasattr(value, "tolist"):  # a NumPy value
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


# With these arguments, json.dumps and json.loads would make a new coder for each message.
_ENCODER = json.JSONEncoder(default=_plain, separators=(",", ":"))
_DECODER = json.JSONDecoder(object_hook=_with_bytes)


def main(number: int, owner: int) -> None:
    """Runs the process of an isolated model. This process and its group end with its owner.

    `number` is the file descriptor of the socket to the process `owner`.
    """
    import socket

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles the stop button
    if sys.platform == "linux":
        # The system kills this process when the thread that started it ends.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != owner:  # the owner died before that
            os._exit(1)
    connection = socket.socket(fileno=number)
    inbox, lock = Inbox(), threading.Lock()

    def read() -> None:
        """Reads messages into the inbox until the owner closes the socket."""
        try:
            with connection.makefile("rb") as file:
                while (line := file.readline(LONGEST_LINE)).endswith(b"\n"):
                    inbox.take(from_line(line))
        finally:  # the owner closed the socket: end at once, even in the middle of a computation
            os.killpg(0, signal.SIGKILL)

    def send(message: dict[str, Any]) -> None:
        with lock:
            connection.sendall(to_line(message))

    threading.Thread(target=read, daemon=True).start()
    work(inbox, send, lambda text: print(text, end="", file=sys.stderr, flush=True))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
