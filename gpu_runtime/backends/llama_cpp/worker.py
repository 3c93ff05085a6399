"""The side of a llama.cpp model that computes: a loop that loads one model, then answers one call after the other.

Run as a script it is the process of an isolated model: JSON lines come and go over a socket whose number is its
argument. In process a thread runs `work`. Only the standard library and llama_cpp here: what this imports, every load
pays for.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import queue
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

METHODS = (  # of Llama, that can be called from outside
    "create_chat_completion",
    "create_completion",
    "__call__",
    "create_embedding",
    "embed",
    "tokenize",
    "detokenize",
    "n_ctx",
    "n_vocab",
    "n_embd",
    "token_bos",
    "token_eos",
    "token_nl",
    "metadata",
    "chat_format",
    "reset",
    "set_seed",
)
OUR_METHODS = ("write", "drill")  # of Model, below
LONGEST_LINE = 256 << 20
_BUFFER = re.compile(
    r"([A-Za-z]+\d*)(?:_\w+)?\s+(model|KV|RS|output|compute) buffer size\s*=\s*([\d.]+) MiB"
)
_loading = threading.Lock()


class Cancelled(Exception):
    """Nobody waits for the answer any more."""


class Desk:
    """What has come in: calls in their order, and which of them nobody wants any more."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.cancelled: set[int] = set()
        self.closed = False

    def take(self, message: dict[str, Any] | None) -> None:
        """Notes one message; None: no more will come."""
        if message is None:
            self.closed = True
            self.jobs.put(None)
        elif "cancel" in message:
            self.cancelled.add(message["cancel"])
        else:
            self.jobs.put(message)


def work(desk: Desk, send: Callable[[dict[str, Any]], None], told: Callable[[str], None]) -> None:
    """Loads what the first message says, then answers calls until the desk closes. `told` gets llama.cpp's lines."""
    order = desk.jobs.get()
    if order is None:
        return
    buffers: dict[str, dict[str, int]] = {}

    def heard(line: str) -> None:
        told(line)
        if found := _BUFFER.search(line):
            of = buffers.setdefault(found[1], {})
            of[found[2]] = of.get(found[2], 0) + int(float(found[3]) * 2**20)

    try:
        model = _load(order["load"], desk, lambda part: send({"progress": part}), heard)
    except BaseException as error:  # noqa: BLE001 - told to whoever asked
        send({"failed": _told(error)})
        return
    try:
        send({"loaded": _facts(model, buffers)})
        while (job := desk.jobs.get()) is not None:
            _answer(model, job, desk, send)
    finally:
        model.close()


def _load(
    order: dict[str, Any],
    desk: Desk,
    progress: Callable[[float], None],
    heard: Callable[[str], None],
) -> Any:
    import llama_cpp
    from llama_cpp import llama_cpp as lib

    class Model(llama_cpp.Llama):
        """Looks between two batches whether the answer is still wanted."""

        job = -1

        def eval(self, tokens: Any) -> None:
            if self.job in desk.cancelled or desk.closed:
                raise Cancelled
            super().eval(tokens)

        def write(
            self,
            prompt: str,
            add_bos: bool,
            most: int | None,
            by_piece: bool,
            stream: bool = True,
            **given: Any,
        ) -> Iterator[dict[str, Any]]:
            """How the prompt goes on, in one round trip: texts, then how it ended, with the tokens of both.

            A template writes the beginning of the sequence itself; to a plain prompt it is added, and nothing in it is
            a special token. What is too long for the context is told in the place of an answer. `stream` is for the
            proxy, which brings items one by one where it stands among the words of a call.
            """
            tokens = self.tokenize(prompt.encode(), add_bos=add_bos, special=not add_bos)
            room = self.n_ctx() - len(tokens)
            if room < (most or 1):
                yield {"too_long": len(tokens)}
                return
            said, finish = [], "stop"
            for chunk in self.create_completion(
                tokens, stream=True, max_tokens=most or room, **given
            ):
                choice = chunk["choices"][0]
                finish = choice.get("finish_reason") or finish
                if choice["text"]:
                    said.append(choice["text"])
                    if by_piece:
                        yield {"text": choice["text"]}
            text = "".join(said)
            # The library counts nothing while it streams: the answer's tokens are those that its text is written in.
            count = (
                most
                if most and finish == "length"
                else len(self.tokenize(text.encode(), add_bos=False, special=False))
                if said
                else 0
            )
            yield {
                "text": "" if by_piece else text,
                "finish": finish,
                "prompt_tokens": len(tokens),
                "completion_tokens": count,
            }

        def drill(self, words: str) -> None:
            """Fails with these words, as a driver would: for runbooks and tests."""
            raise RuntimeError(words)

    @lib.llama_log_callback
    def log(level: int, text: bytes, _: Any) -> None:
        heard(text.decode("utf-8", "replace"))

    @lib.llama_progress_callback
    def passed(part: float, _: Any) -> bool:
        progress(part)
        return not desk.closed  # False ends the load

    defaults = lib.llama_model_default_params

    def with_progress() -> Any:
        params = defaults()
        params.progress_callback = passed
        return params

    order = dict(order)
    needs_gpu, template, name = (
        order.pop(key, None) for key in ("needs_gpu", "chat_template", "name")
    )
    if (
        needs_gpu and not lib.llama_supports_gpu_offload()
    ):  # it would accept n_gpu_layers, and compute on the CPU
        raise NoOffload("this build of llama-cpp-python cannot use a GPU")
    with _loading:  # the library takes its default parameters from one place for all
        lib.llama_log_set(log, ctypes.c_void_p(0))
        lib.llama_model_default_params = with_progress
        try:
            model = Model(**order)
        finally:
            lib.llama_model_default_params = defaults
    model.kept = (log, passed)  # C has their addresses
    model.model_path = name  # as which it answers
    if template:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        eos, bos = model.token_eos(), model.token_bos()
        words = [model._model.token_get_text(token) if token != -1 else "" for token in (eos, bos)]
        model.chat_handler = Jinja2ChatFormatter(
            template, *words, stop_token_ids=[eos]
        ).to_chat_handler()
    return model


class NoOffload(Exception):
    """A GPU is wanted, and the library was built without."""


def _facts(model: Any, buffers: dict[str, dict[str, int]]) -> dict[str, Any]:
    """What a loaded model is: its weights to the byte, and the buffers that llama.cpp says it allocated: of a device
    (CPU, CUDA0, …), by what they are for (model, KV, compute, …), in bytes."""
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
    model: Any, job: dict[str, Any], desk: Desk, send: Callable[[dict[str, Any]], None]
) -> None:
    number = model.job = job["id"]
    try:
        if number in desk.cancelled:
            raise Cancelled
        if job["call"] not in METHODS + OUR_METHODS:
            raise AttributeError(f"there is no {job['call']}")
        called = getattr(model, job["call"])
        result = called(*job["args"], **_grammar(job["kwargs"])) if callable(called) else called
        if hasattr(result, "__next__"):
            for item in result:
                if number in desk.cancelled:
                    result.close()
                    break
                send({"id": number, "item": item})
            result = None
        send({"id": number, "end": result})
    except Cancelled:
        send({"id": number, "end": None})
    except Exception as error:  # noqa: BLE001 - told to whoever asked
        send({"id": number, "error": _told(error)})
    finally:
        desk.cancelled.discard(number)


def _grammar(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A grammar comes as text."""
    if isinstance(kwargs.get("grammar"), str):
        from llama_cpp import LlamaGrammar

        return {**kwargs, "grammar": LlamaGrammar.from_string(kwargs["grammar"], verbose=False)}
    return kwargs


def _told(error: BaseException) -> dict[str, str]:
    return {"type": type(error).__name__, "text": str(error) or type(error).__name__}


# -- as lines ---------------------------------------------------------------------------------------------------------


def to_line(message: dict[str, Any]) -> bytes:
    """One message as a line of JSON; bytes travel in base64.

    >>> from_line(to_line({"id": 1, "args": [b"hi"]}))
    {'id': 1, 'args': [b'hi']}
    """
    return json.dumps(message, default=_plain, separators=(",", ":")).encode() + b"\n"


def from_line(line: bytes) -> dict[str, Any]:
    return json.loads(
        line,
        object_hook=lambda found: (
            base64.b64decode(found["$bytes"]) if found.keys() == {"$bytes"} else found
        ),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if hasattr(value, "tolist"):  # NumPy's
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot go to another process")


def main(number: int, owner: int) -> None:
    """The process of an isolated model. It ends with its owner, and takes all that it started with it."""
    import socket

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the stop button is the owner's to understand
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(
            1, signal.SIGKILL
        )  # PR_SET_PDEATHSIG: when the thread that started it ends
        if os.getppid() != owner:
            os._exit(1)
    line = socket.socket(fileno=number)
    desk, lock = Desk(), threading.Lock()

    def read() -> None:
        try:
            with line.makefile("rb") as file:
                while (text := file.readline(LONGEST_LINE)).endswith(b"\n"):
                    desk.take(from_line(text))
        finally:  # the owner has let go, whatever it is that computes here
            os.killpg(0, signal.SIGKILL)

    def send(message: dict[str, Any]) -> None:
        with lock:
            line.sendall(to_line(message))

    def told(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    threading.Thread(target=read, daemon=True).start()
    work(desk, send, told)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
