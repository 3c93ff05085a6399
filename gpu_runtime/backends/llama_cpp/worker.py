"""The worker that computes a llama.cpp model: loads one model, then answers one call after another.

As a program, this module is the process of an isolated model. If a model is not isolated, a thread of
the notebook's process runs `work`. Every load waits for the imports of this module.

The requests are as in `processes/remote_calls.py`. Their kinds are the methods of `Worker`. A call has
its arguments packed, unless the worker is a thread.
"""

from __future__ import annotations

import codecs
import ctypes
import functools
import gc
import os
import queue
import random
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any

from ...stop_text import StopText
from ..processes.remote_calls import Failed, MessageSocket, unpack

METHODS = (  # the methods of Llama that callers may use
    *("create_chat_completion", "create_completion", "__call__", "create_embedding", "embed"),
    *("tokenize", "detokenize", "n_ctx", "n_vocab", "n_embd", "token_bos", "token_eos", "token_nl"),
    *("metadata", "chat_format", "reset", "set_seed"),
)
OUR_METHODS = ("write", "drill")  # the methods of `_OurMethods` below
PIECE_CHARACTERS = 32_768  # a prompt is first counted in pieces of this length
CUT_TOKENS = 16  # a cut between two such pieces adds fewer tokens than this
SCORED_AT_ONCE = 64  # tokens of a prompt whose logits are kept at the same time
PR_SET_PDEATHSIG = 1
THREAD_BYTES = 1 << 20  # of a model that sleeps in a thread: its objects
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
    """The received requests: calls in their order, and the numbers of cancelled calls."""

    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[tuple[int, str, Any] | None] = queue.SimpleQueue()
        self.cancelled: set[int] = set()
        self.closed = False

    def take(self, request: tuple[int, str, Any] | None) -> None:
        """Stores one `request`. If it is None, no more requests will arrive."""
        if request is None:
            self.closed = True
        elif request[1] == "cancel":
            self.cancelled.add(request[0])
            return
        self.requests.put(request)


Send = Callable[[int, str, Any], None]  # sends an answer


class Worker:
    """The model of a worker. Its methods are the kinds of requests."""

    def __init__(self, inbox: Inbox, send: Send, log: Callable[[str], None], own: int) -> None:
        """No model is loaded yet. `log` gets the lines that llama.cpp prints. `own` is as in `work`."""
        self._inbox, self._send, self._log, self._own = inbox, send, log, own
        self._arguments: dict[str, Any] = {}
        self._model: Any = None

    def load(self, number: int, arguments: dict[str, Any]) -> dict[str, Any]:
        """Loads the model with these `arguments` of Llama. Returns facts about it.

        The items are the finished parts of the load, from 0 to 1.
        """
        import llama_cpp  # noqa: F401 - what it takes stays while the model sleeps

        own = self._own or _resident_bytes()
        buffers: dict[str, dict[str, int]] = {}  # bytes by device (CPU, CUDA0) and use (model, KV)

        def note_line(line: str) -> None:
            self._log(line)
            found = _BUFFER.search(line)
            if found:
                device, use, mebibytes = found.groups()
                sizes = buffers.setdefault(device, {})
                sizes[use] = sizes.get(use, 0) + int(float(mebibytes) * 2**20)

        self._arguments = arguments
        progress = lambda part: self._send(number, "item", part)
        self._model = _load(arguments, self._inbox, progress, note_line)
        return {"weight_bytes": self._model.weight_bytes, "buffers": buffers, "own_bytes": own}

    def sleep(self, number: int) -> None:
        """Frees everything that the model has. It cannot be called until it wakes."""
        self.close()
        gc.collect()  # the model and its functions refer to each other

    def wake(self, number: int) -> None:
        """Loads the model again, with the same arguments."""
        self._model = _load(self._arguments, self._inbox, lambda part: None, self._log)

    def call(self, number: int, method: str, given: Any) -> Any:
        """The result of a method of the model; see `_call`."""
        args, kwargs = given if self._own else unpack(given)
        return _call(self._model, number, method, args, kwargs, self._inbox, self._send)

    def close(self) -> None:
        """Frees the model, if it is loaded."""
        model, self._model = self._model, None
        if model is not None:
            model.close()


def work(inbox: Inbox, send: Send, log: Callable[[str], None], own: int = THREAD_BYTES) -> None:
    """Answers the requests in `inbox` one after the other, until it closes.

    `own` are the bytes of this worker while its model sleeps; 0 in a process, which measures them.
    """
    worker = Worker(inbox, send, log, own)
    try:
        while (request := inbox.requests.get()) is not None:
            number, kind, args = request
            try:
                send(number, "result", getattr(worker, kind)(number, *args))
            except Cancelled:  # the caller wants no more
                send(number, "result", None)
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                name = type(error).__name__
                send(number, "error", Failed(name, str(error) or name))
            finally:
                inbox.cancelled.discard(number)
    finally:
        worker.close()


def _resident_bytes() -> int:
    """The bytes of this process in RAM. Its peak would include that of its parent before the start."""
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


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
    model.metadata = _metadata(model._model.model)
    model.weight_bytes = lib.llama_model_size(model._model.model)
    model._model.detokenize = functools.partial(_detokenized, model._model)
    _make_cancellable(model)
    model.model_path = name  # its answers carry this name
    if template:
        _set_template(model, template)
    return model


class _OurMethods:
    """The methods of OUR_METHODS, for a class that extends `llama_cpp.Llama`."""

    def write(
        self,
        prompt: str | list[int],
        add_bos: bool,
        most: int | None,
        by_piece: bool,
        stream: bool = True,
        top_logprobs: int | None = None,
        echo: bool = False,
        stop: Iterable[str] = (),
        seed: int | None = None,
        logit_bias: dict[str, float] | None = None,
        json_grammar: str | None = None,
        **sampling: Any,
    ) -> Generator[dict[str, Any], None, dict[str, Any]]:
        """Continues `prompt` by at most `most` tokens (None: as many as fit into the context).

        `prompt` is a text or a list of tokens. In a text, the names of special tokens are read as
        these tokens. `add_bos` adds the tokens that begin and end a text in this vocabulary. A
        prompt made by a chat template has them already.

        With `by_piece`, each piece of the new text is an item. Otherwise the last item has all of
        the text. The last item, which the generator returns, also has the reason of the end and the
        token counts. With `top_logprobs`, each item also has its tokens; see `_scored`. With `echo`,
        the first item is the prompt. If the context has room for fewer than `most` tokens, an item
        {"room": tokens} is first, and the answer has at most this number. If the prompt alone fills
        the context, the only item is {"too_long": its tokens}; 0 for a prompt without any.

        The answer ends before the first of the texts `stop`. `logit_bias` has the number that is
        added to the score of a token, by the token's number. `json_grammar` is a grammar of
        llguidance that the answer must match. `sampling` are further arguments of `Llama.generate`.
        `stream` has no effect here: the proxy in the caller's process reads it, and returns the
        items one by one. Raises ValueError if the grammar cannot be used.
        """
        tokens = self._tokens_of(prompt, add_bos)
        room = self.n_ctx() - len(tokens)
        if not tokens or room < (most != 0):
            return {"too_long": len(tokens)}
        forced = None if json_grammar is None else _Forced(self, json_grammar)
        limit = room if most is None else min(most, room)
        if most is not None and most > room:
            yield {"room": room}
        if echo:
            scores = None if top_logprobs is None else self._scores_of_prompt(tokens, top_logprobs)
            yield {"text": self._text(tokens) if prompt is tokens else prompt, "tokens": scores}
        self.set_seed(random.SystemRandom().getrandbits(32) if seed is None else seed)
        masks = [_biased(logit_bias)] if logit_bias else []
        masks += [forced.mask] if forced else []
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        stops = StopText(list(stop))
        made, ready, finish = 0, _Ready(), "length"
        written = self.generate(tokens, logits_processor=masks or None, **sampling) if limit else ()
        for token in written:
            if self._is_end(token):
                finish = "stop"
                break
            made += 1
            if top_logprobs is not None:
                ready.tokens.append(self._scored(token, self._logprobs(-1), top_logprobs))
            ready.text += stops.feed(decoder.decode(self.detokenize([token])))
            if stops.hit or (forced and forced.ends_with(token)):
                finish = "stop"
                break
            if made >= limit:
                break
            if by_piece and ready.text:
                yield ready.take(top_logprobs)
        if not stops.hit:
            ready.text += stops.feed(decoder.decode(b"", final=True)) + stops.rest()
        counts = {"prompt_tokens": len(tokens), "completion_tokens": made}
        return {**ready.take(top_logprobs), "finish": finish, **counts}

    def _tokens_of(self, prompt: str | list[int], add_bos: bool) -> list[int]:
        """The tokens of `prompt`. The count ends as soon as a text cannot fit into the context, so
        that a huge text does not keep the model busy. Then the result is as long as is known.
        """
        if not isinstance(prompt, str):
            return prompt
        counted = 0
        for number, at in enumerate(range(0, len(prompt), PIECE_CHARACTERS)):
            self.require_wanted()
            piece = prompt[at : at + PIECE_CHARACTERS].encode()
            counted += len(self.tokenize(piece, add_bos=False, special=True))
            if counted - number * CUT_TOKENS > self.n_ctx():
                return [0] * (counted - number * CUT_TOKENS)
        return self.tokenize(prompt.encode(), add_bos=add_bos, special=True)

    def _is_end(self, token: int) -> bool:
        from llama_cpp import llama_vocab_is_eog

        return bool(llama_vocab_is_eog(self._model.vocab, token))

    def _text(self, tokens: list[int]) -> str:
        return self.detokenize(tokens, special=True).decode("utf-8", "replace")

    def _logprobs(self, place: int) -> Any:
        """The logarithm of each token's probability, at this `place` of the newest batch."""
        from numpy.ctypeslib import as_array

        logits = as_array(self._ctx.get_logits_ith(place), shape=(self.n_vocab(),))
        return self.logits_to_logprobs(logits)

    def _scored(self, token: int, logprobs: Any, count: int, special: bool = False) -> list[Any]:
        """[the bytes of `token`, the natural logarithm of its probability, alternatives].

        The alternatives are the `count` most probable tokens at this place, each as [bytes, logarithm].
        `logprobs` are those of all tokens. With `special`, a special token has its name as bytes.
        """
        best = sorted((-logprobs).argpartition(count)[:count], key=lambda number: -logprobs[number])
        top = [[self.detokenize([int(i)], special=True), float(logprobs[i])] for i in best]
        return [self.detokenize([token], special=special), float(logprobs[token]), top]

    def _scores_of_prompt(self, tokens: list[int], count: int) -> list[list[Any]]:
        """The `_scored` of the prompt's `tokens`. The first has no probability, so its own is None.

        Computes the prompt in small batches, because the library keeps all logits of a batch.
        """
        found: list[list[Any]] = [[self.detokenize(tokens[:1], special=True), None, []]]
        self.reset()
        self._ctx.kv_cache_seq_rm(-1, 0, -1)
        size = min(SCORED_AT_ONCE, self.n_batch)
        for at in range(0, len(tokens), size):
            batch = tokens[at : at + size]
            self._batch.set_batch(batch=batch, n_past=at, logits_all=True)
            self._ctx.decode(self._batch)
            self.input_ids[at : at + len(batch)] = batch
            self.n_tokens = at + len(batch)
            self._requires_eval = False
            for place, token in enumerate(tokens[at + 1 : at + 1 + len(batch)]):
                found.append(self._scored(token, self._logprobs(place), count, special=True))
        return found

    def drill(self, words: str) -> None:
        """Raises RuntimeError with the text `words`, as a failing driver does. For drills."""
        raise RuntimeError(words)


class _Ready:
    """The text, and its tokens, that can be sent to the caller."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[Any] = []

    def take(self, top_logprobs: int | None) -> dict[str, Any]:
        """Removes and returns everything. The tokens are left out if `top_logprobs` is None."""
        text, tokens = self.text, self.tokens
        self.text, self.tokens = "", []
        return {"text": text} if top_logprobs is None else {"text": text, "tokens": tokens}


class _Forced:
    """Computes which tokens may follow in an answer that must match a grammar of llguidance."""

    def __init__(self, model: Any, grammar: str) -> None:
        """Starts at the first token of an answer of `model`. Raises ValueError."""
        from llguidance import LLMatcher

        self._matcher = LLMatcher(_vocabulary(model), grammar, log_level=0)
        self._require_no_error()

    def mask(self, ids: Any, scores: Any) -> Any:
        """The `scores` of all tokens; those of the tokens that must not follow are -inf."""
        import numpy

        allowed = numpy.frombuffer(self._matcher.compute_logit_bias(), dtype=numpy.uint8)
        self._require_no_error()
        return numpy.where(allowed[: len(scores)], scores, -numpy.inf)

    def ends_with(self, token: int) -> bool:
        """Reads the next `token` of the answer. Returns whether this token completes the answer."""
        self._matcher.consume_token(token)
        self._require_no_error()
        return bool(self._matcher.is_stopped())

    def _require_no_error(self) -> None:
        """Raises ValueError if the grammar cannot be used. Without this, the answer would just end."""
        if self._matcher.is_error():
            raise ValueError(f"its grammar fails: {self._matcher.get_error().splitlines()[0]}")


def _vocabulary(model: Any) -> Any:
    """The vocabulary of `model` in llguidance's form. It takes about a second, so it is kept.

    Raises ValueError if the vocabulary has no token that ends an answer.
    """
    from llguidance.llamacpp import lltokenizer_from_vocab

    if model.vocabulary is None:
        ends = [token for token in range(model.n_vocab()) if model._is_end(token)]
        if not ends:
            raise ValueError("its vocabulary has no token that ends an answer")
        model.vocabulary = lltokenizer_from_vocab(model._model.vocab, eos_token=ends)
    return model.vocabulary


def _biased(biases: dict[str, float]) -> Callable[[Any, Any], Any]:
    """A function that adds `biases` to the scores of tokens. They are given by the token's number."""
    tokens = [int(token) for token in biases]

    def add(ids: Any, scores: Any) -> Any:
        changed = scores.copy()
        changed[tokens] += list(biases.values())
        return changed

    return add


def _model_class(inbox: Inbox) -> Any:
    """`llama_cpp.Llama` with cancellation and the methods of OUR_METHODS."""
    import llama_cpp

    class Model(_OurMethods, llama_cpp.Llama):
        job, vocabulary = -1, None

        def wanted(self) -> bool:
            """Whether the caller still waits."""
            return self.job not in inbox.cancelled and not inbox.closed

        def require_wanted(self) -> None:
            """Raises Cancelled if the caller has left."""
            if not self.wanted():
                raise Cancelled

    return Model


def _detokenized(model: Any, tokens: list[int], special: bool = False) -> bytes:
    """The bytes of `tokens`. The library's own method leaves out a token of more than 32 bytes.

    As in that method, a space at the beginning of a text is left out after the token that begins a
    text. With `special`, a special token is written as its name.
    """
    from llama_cpp import llama_cpp as lib

    found, size = b"", 256
    piece = ctypes.create_string_buffer(size)
    for token in tokens:
        count = lib.llama_token_to_piece(model.vocab, token, piece, size, 0, special)
        if count < 0:  # the number of bytes that the token needs
            size = -count
            piece = ctypes.create_string_buffer(size)
            count = lib.llama_token_to_piece(model.vocab, token, piece, size, 0, special)
        found += piece.raw[:count]
    begins = bool(tokens) and tokens[0] == model.token_bos()
    return found[1:] if begins and found[:1] == b" " else found


def _metadata(model: Any) -> dict[str, str]:
    """The metadata of `model`. The library cuts off the end of a value that just fills its buffer."""
    from llama_cpp import llama_cpp as lib

    def text(read: Callable[..., int], index: int) -> str:
        size = read(model, index, None, 0) + 1
        buffer = ctypes.create_string_buffer(size)
        read(model, index, buffer, size)
        return buffer.value.decode("utf-8", "replace")

    count = lib.llama_model_meta_count(model)
    return {
        text(lib.llama_model_meta_key_by_index, at): text(lib.llama_model_meta_val_str_by_index, at)
        for at in range(count)
    }


def _make_cancellable(model: Any) -> None:
    """Makes every computation of `model` end soon after its result is no longer wanted.

    Before each batch, `decode_if_wanted` raises Cancelled. A batch of a prompt may take seconds on a
    CPU. So llama.cpp also calls `left` during a batch of several tokens, and ends if it is True.
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


def _call(
    model: Any, number: int, method: str, args: Any, kwargs: Any, inbox: Inbox, send: Send
) -> Any:
    """Runs one call. Sends its items, and returns its result. Raises its error, and Cancelled."""
    model.job = number
    if number in inbox.cancelled:
        raise Cancelled
    if method not in METHODS + OUR_METHODS:
        raise AttributeError(f"there is no {method}")
    result = getattr(model, method)
    if callable(result):
        result = result(*args, **_with_grammar(kwargs, model))
    return _send_items(result, number, inbox, send) if hasattr(result, "__next__") else result


def _send_items(items: Generator[Any, None, Any], number: int, inbox: Inbox, send: Send) -> Any:
    """Sends the `items` of the call `number`. Returns the value that the generator returns.

    This last item is sent with the end, because each message wakes three threads.
    """
    try:
        while number not in inbox.cancelled:
            send(number, "item", next(items))
    except StopIteration as end:
        return end.value
    items.close()
    return None


def _with_grammar(kwargs: dict[str, Any], model: Any) -> dict[str, Any]:
    """The `kwargs` of a call. A `grammar` text becomes a LlamaGrammar. Raises ValueError.

    Without this check, the library would continue without a sampler, which ends the process
    (SIGSEGV).
    """
    if not isinstance(kwargs.get("grammar"), str):
        return kwargs
    from llama_cpp import LlamaGrammar, llama_cpp

    data = kwargs["grammar"].encode()
    sampler = None
    if b"\0" not in data:  # the library would read the text up to this byte
        sampler = llama_cpp.llama_sampler_init_grammar(model._model.vocab, data, b"root")
    if not sampler:
        raise ValueError("its grammar cannot be read by llama.cpp")
    llama_cpp.llama_sampler_free(sampler)
    return {**kwargs, "grammar": LlamaGrammar.from_string(kwargs["grammar"], verbose=False)}


def main(number: int, owner: int) -> None:
    """Runs the process of an isolated model. This process and its group end with its owner.

    `number` is the file descriptor of the socket to the process `owner`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles the stop button
    if sys.platform == "linux":
        # The system kills this process when the thread that started it ends.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != owner:  # the owner died before that
            os._exit(1)
    messages, inbox = MessageSocket(socket.socket(fileno=number)), Inbox()

    def read() -> None:
        try:
            while True:
                inbox.take(messages.receive())
        finally:  # the owner closed the socket: end at once, even in the middle of a computation
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    log = functools.partial(print, end="", file=sys.stderr, flush=True)
    work(inbox, lambda *answer: messages.send(answer), log, own=0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
