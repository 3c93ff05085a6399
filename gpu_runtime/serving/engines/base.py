"""The common part of all adapters: they take a body in OpenAI's format and return dicts in OpenAI's format.

The object that `rt.use` yields decides the adapter. A model in a process of its own is called by an adapter in that
process. An object with a `base_url` is called over HTTP. A proxy with llama.cpp's methods is called in a thread. A
transformers module is called by `generate`. A fake model answers with its prompt.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Protocol

from msgspec.structs import replace

from ... import threads
from ...errors import GpuError
from ...facts import ModelSpec
from ..requests import (
    LOAD,
    LONGEST_TOKEN,
    PIECE_CHARACTERS,
    Call,
    Json,
    Refused,
    bad,
    characters,
    documents_of,
    prompts_of,
    texts,
    texts_of_embeddings,
    tokens_if_too_many,
)
from ..thread_stream import in_thread, in_thread_until
from .chat_template import BadConversation, Thoughts, override, render, tags_of, with_thinking
from .openai_format import (
    FORCED,
    Header,
    Pieces,
    TextPiece,
    ToolCallReader,
    Tools,
    embeddings,
    format_of,
    rerank_answer,
    stream_chunks,
    tools_of,
    wants_json,
    whole_answer,
)

TEXT_TYPES = ("llm", "embedding", "reranker")  # model types that make no images
MOST_AT_ONCE = 2  # counts of tokens at the same time, each in a thread that computes without pause
TYPES_WITHOUT_TEXT = ("embedding", "reranker", "diffusion")


def told_tools(answer: Json) -> Json:
    """The `answer`, or a chunk of it, with the note in `x_gpu` that the tools of the call were left out."""
    return {**answer, "x_gpu": {**(answer.get("x_gpu") or {}), "tools": "left out"}}


class EngineAdapter(Protocol):
    """Serves one call with one model.

    Raises Refused if the model cannot serve the call (400), or if the engine refuses the call. Raises EngineFailed or
    the engine's own error if the engine fails.
    """

    counts_tokens: bool  # whether a stream ends with the counts of its tokens, if the body asks

    async def answer(self, kind: str, body: Json, think: bool | None) -> Json:
        """The whole answer to a call of this `kind` with this `body`; `think` turns thinking on or off."""

    def stream(self, kind: str, body: Json, think: bool | None) -> AsyncIterator[Json]:
        """Yields the chunks of the answer. `kind`, `body` and `think` are the parameters of `answer`."""


class EngineFailed(GpuError):
    """Raised when an engine does not answer as it should. Attributes: name, why, status.

    `status` is the HTTP status of an engine that has answered with an error, otherwise None.
    """

    status: int | None = None


def cannot(model: str, why: str, param: str | None = None) -> Refused:
    """The refusal (400) of a call, or of its field `param`, that `model` cannot serve. `why` holds for every caller."""
    what = f"{model} cannot serve this call"
    if param is not None:
        what = f"{param} cannot be used with {model}"
    if param == "model":
        what = f"model={model} cannot be used here"
    return Refused(400, "not_supported", f"{what}: {why}", param=param)


def require(kind: str, spec: ModelSpec) -> None:
    """Raises Refused (400) if the model of `spec` cannot serve calls of this `kind`. Runs before any model is moved."""
    if kind == "images" and spec.model_type in TEXT_TYPES:
        why = f"it is of type {spec.model_type} and makes no images; those are for type diffusion"
        raise cannot(spec.name, why, "model")
    if kind in ("chat", "completions") and spec.model_type in TYPES_WITHOUT_TEXT:
        raise cannot(spec.name, f"it is of type {spec.model_type} and writes no text", "model")
    is_llama_text = spec.backend == "llama_cpp" and spec.model_type != "embedding"
    if kind == "embeddings" and (spec.model_type == "diffusion" or is_llama_text):
        raise no_embeddings(spec)
    if kind == "rerank" and spec.model_type != "reranker":
        why = f"it is of type {spec.model_type}; documents are ranked by type reranker"
        raise cannot(spec.name, why, "model")


def require_tools(body: Json, template: str, spec: ModelSpec) -> None:
    """Raises Refused if the chat in `body` has tools, and the chat `template` of the model of `spec` takes none."""
    if tools_of(body).tools and "tools" not in template:
        why = (
            "its chat template takes no tools. Leave them out, or let the catalogue do it "
            "(leave_out_tools), or give it a template with tools (chat_template)"
        )
        raise cannot(spec.name, why, "tools")


def without_tools(
    kind: str, body: Json, template: Callable[[], str], spec: ModelSpec
) -> Json | None:
    """The `body` without its tools, if the catalogue wants this for the model of `spec`; else None.

    None too if its chat template, which `template()` returns, takes tools, or if the call has none or requires one.
    """
    if kind != "chat" or not spec.options.get("leave_out_tools"):
        return None
    tools = tools_of(body)
    if not tools.tools or tools.forced or "tools" in template():
        return None
    left_out = ("tools", "tool_choice", "parallel_tool_calls")
    return {name: value for name, value in body.items() if name not in left_out}


def no_embeddings(spec: ModelSpec) -> Refused:
    """The refusal of a call for embeddings, because the model of `spec` is not of the type embedding."""
    why = f"it is of type {spec.model_type}; embeddings want type embedding"
    return cannot(spec.name, why, "model")


def text_too_long(model: str, tokens: int, most: int, more: str = "") -> Refused:
    """The refusal of a text of `tokens` tokens. `model` reads `most` tokens; `more` is how it can read more."""
    why = f"one of the texts has {tokens} tokens, and it reads at most {most}{more}. "
    return cannot(model, f"{why}With truncate: true, longer texts are cut off", "input")


def require_room(call: Call, spec: ModelSpec) -> None:
    """Refuses (400), before it is queued, a `call` with more characters than the context of `spec` can hold."""
    context = spec.options.get("context_length")
    if not isinstance(context, int) or call.kind not in ("chat", "completions"):
        return
    count = characters(call.body)
    if count > context * LONGEST_TOKEN:
        raise too_long(spec.name, call.kind, count // LONGEST_TOKEN, context)


def too_long(model: str, kind: str, prompt: int, context: int) -> Refused:
    """The refusal of a call whose `prompt`, in tokens or a lower bound of them, fills the `context` of `model`."""
    param = "messages" if kind == "chat" else "prompt"
    if not prompt:
        return cannot(model, "the prompt has no tokens", param)
    why = f"its context is {context} tokens; the prompt has {prompt} or more, which leaves no room for an answer"
    text = cannot(model, why, param).message
    return Refused(400, "context_length_exceeded", text, param=param)


# By the model's name: its spec, its tokenizer if that still exists, and its context.
_known: dict[str, tuple[ModelSpec, Callable[[], Any], int]] = {}


def remember(spec: ModelSpec, tokenizer: Any, context: int) -> None:
    """Remembers the `tokenizer` of `spec`, which counts the prompts of later calls; `context` is in tokens."""
    _known[spec.name] = spec, weakref.ref(tokenizer), context


async def require_tokens(call: Call, spec: ModelSpec, free: asyncio.Semaphore) -> None:
    """Refuses (400) a `call` with a long prompt that has more tokens than the context of `spec`, before it waits.

    Other calls would wait for a count that is made while the call uses the model. So a prompt is counted here if it is
    long and the tokenizer is known, else piece by piece in the call. `free` limits how many are counted at once.
    """
    known_spec, tokenizer_of, context = _known.get(spec.name, (None, lambda: None, 0))
    tokenizer = tokenizer_of() if known_spec == spec else None
    if tokenizer is None or call.kind not in ("chat", "completions"):
        return
    if characters(call.body) <= PIECE_CHARACTERS:
        return

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    prompts = list(texts(call.body))
    text = "".join(prompts) if call.kind == "chat" else max(prompts, key=len)
    async with free:
        found = await in_thread_until(
            lambda cancelled: tokens_if_too_many(text, context, count, cancelled.is_set)
        )
    if found:
        raise too_long(spec.name, call.kind, found, context)


def unit_vector(vector: list[float]) -> list[float]:
    """The `vector`, scaled to length one. A vector of zeros stays as it is."""
    length = math.hypot(*vector) or 1.0
    return [part / length for part in vector]


class TextAdapter:
    """The base class of adapters whose engine writes text piece by piece and computes embedding vectors."""

    kind = "a model"  # what error messages call the model
    counts_tokens = True
    takes_images = False  # whether the model has a processor of images
    can_force_calls = False  # whether the engine can force the answer to be a tool call

    def __init__(self, value: Any, spec: ModelSpec) -> None:
        """The adapter of `value`, which is the object that `rt.use` yielded for the model of `spec`."""
        self.value = value
        self.spec = spec
        self._prompt_end = ""  # the end of a chat's prompt; a template may write the first tag of the thoughts there

    def pieces(self, kind: str, body: Json, think: bool | None) -> AsyncGenerator[TextPiece]:
        """The pieces of the answer to `prompt(kind, body, think)`, which the thread that writes them makes."""
        raise cannot(self.spec.name, f"{self.kind} writes no text")

    def prompt(self, kind: str, body: Json, think: bool | None) -> Any:
        """The engine's input: what the chat template makes of a conversation, or the prompt of a call for completions.

        `think` turns thinking on or off in a conversation. Raises Refused if the template rejects it.
        """
        if kind == "completions":
            return body["prompt"]
        template = self._template()
        if not template:
            raise cannot(
                self.spec.name,
                "it has no chat template; give it one (chat_template in the catalogue), "
                "or use /v1/completions",
            )
        messages, switches = with_thinking(body, think, template, self.spec.name)
        tools = {"tools": list(tools_of(body).tools)} if tools_of(body).tools else {}
        require_tools(body, template, self.spec)
        try:
            prompt = render(
                template,
                messages,
                takes_images=self.takes_images and "image" in template,
                **self.tokens(),
                **tools,
                **switches,
            )
        except BadConversation as error:
            raise Refused(400, "bad_conversation", str(error), param="messages") from None
        self._prompt_end = prompt[-64:].rstrip()
        return prompt

    def template(self) -> str | None:
        """The model's own chat template."""
        return None

    def tokens(self) -> dict[str, str]:
        """The texts of the tokens that begin and end a sequence, by the names `bos_token` and `eos_token`."""
        return {}

    async def vectors(
        self, texts: list[str | list[int]], truncate: bool
    ) -> tuple[list[list[float]], int]:
        """An embedding of each of the `texts`, and the number of tokens read. A text may be a list of tokens.

        With `truncate`, texts that are too long are cut off; else Refused is raised for them.
        """
        raise no_embeddings(self.spec)

    async def scores(self, query: str, documents: list[str]) -> tuple[list[float], int]:
        """How well each of the `documents` fits the `query`, from 0 to 1, and the number of tokens read."""
        why = f"it is of type {self.spec.model_type}; documents are ranked by type reranker"
        raise cannot(self.spec.name, why, "model")

    async def tokenize(self, text: str, special: bool) -> list[int]:
        """The tokens of `text`. With `special`, the tokens that begin and end a sequence are added."""
        raise cannot(self.spec.name, f"{self.kind} has no tokenizer here", "model")

    async def detokenize(self, tokens: list[int]) -> str:
        """The text of `tokens`."""
        raise cannot(self.spec.name, f"{self.kind} has no tokenizer here", "model")

    async def answer(self, kind: str, body: Json, think: bool | None) -> Json:
        if kind == LOAD:
            return {"model": self.spec.name}
        if kind == "embeddings":
            vectors, tokens = await self.vectors(
                texts_of_embeddings(body), bool(body.get("truncate"))
            )
            if body.get("dimensions"):
                vectors = self._shortened(vectors, body["dimensions"])
            return embeddings(vectors, self.spec.name, tokens, body.get("encoding_format"))
        if kind == "rerank":
            scores, tokens = await self.scores(body["query"], documents_of(body))
            return rerank_answer(scores, self.spec.name, tokens, body)
        if kind == "tokenize":
            found = await self.tokenize(body["prompt"], bool(body.get("add_special_tokens")))
            return {"model": self.spec.name, "tokens": found, "count": len(found)}
        if kind == "detokenize":
            return {"model": self.spec.name, "prompt": await self.detokenize(body["tokens"])}
        plain = await self._without_tools(kind, body)
        choices = self._choices(kind, plain or body, think)
        made = await whole_answer(choices, self._header(kind), body)
        return made if plain is None else told_tools(made)

    async def stream(self, kind: str, body: Json, think: bool | None) -> AsyncIterator[Json]:
        plain = await self._without_tools(kind, body)
        choices = self._choices(kind, plain or body, think)
        source = stream_chunks(choices, self._header(kind), body)
        async with aclosing(source) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk if plain is None else told_tools(chunk)
                plain = None

    async def _without_tools(self, kind: str, body: Json) -> Json | None:
        """See `without_tools`. Reading the template may be a call to another process, so a thread does it."""
        if not self.spec.options.get("leave_out_tools"):
            return None
        return await in_thread(lambda: without_tools(kind, body, self._template, self.spec))

    def _choices(self, kind: str, body: Json, think: bool | None) -> list[Callable[[], Pieces]]:
        """For each choice of the answer, a function that returns the pieces of the choice. Raises Refused."""
        if kind == "images":
            why = "it makes no images; those are for type diffusion"
            raise cannot(self.spec.name, why, "model")
        tools = tools_of(body) if kind == "chat" else Tools()
        if tools.forced and not self.can_force_calls:
            raise cannot(self.spec.name, "it cannot be forced to call a tool", "tool_choice")

        prompts: list[Any] = prompts_of(body) if kind == "completions" else [body.get("prompt")]

        def choice(prompt: Any, number: int) -> Callable[[], Pieces]:
            """The function that returns the pieces of choice `number`. With a seed, each choice has its own seed."""
            given = {**body, "prompt": prompt}
            if number and body.get("seed") is not None:
                given["seed"] = body["seed"] + number

            def pieces() -> Pieces:
                made = self.pieces(kind, given, think)
                if kind == "chat":
                    made = self._with_thoughts(made, is_json=bool(tools.forced) or wants_json(body))
                return self._with_calls(made, tools) if tools.tools else made

            return pieces

        return [choice(prompt, at) for prompt in prompts for at in range(body.get("n") or 1)]

    async def _with_thoughts(self, pieces: Pieces, is_json: bool) -> Pieces:
        """Yields the `pieces` with the thoughts moved from the text to the field `thought`.

        An answer that a grammar forces to be JSON (`is_json`) has none, even if the prompt ends with the tag that
        begins them.
        """
        reader, begun = None, False
        async with aclosing(pieces) as source:
            async for piece in source:
                tags = None if begun else tags_of(self._template())
                if tags is not None:
                    opened = self._prompt_end.endswith(tags[0]) and not is_json
                    reader = Thoughts(tags, opened)
                begun = True  # the template is known when the first piece arrives
                if reader is None:
                    yield piece
                    continue
                thought, text = reader.feed(piece.text)
                if piece.finish:
                    last_thought, last_text = reader.rest()
                    thought, text = thought + last_thought, text + last_text
                if thought or text or piece.finish or piece.tokens or piece.room:
                    yield replace(piece, thought=thought, text=text)

    async def _with_calls(self, pieces: Pieces, tools: Tools) -> Pieces:
        """Yields the `pieces` with the calls of `tools` moved from the text to the field `calls`."""
        reader = None
        async with aclosing(pieces) as source:
            async for piece in source:
                if reader is None:  # the template is known when the first piece arrives
                    reader = ToolCallReader(
                        FORCED if tools.forced else format_of(self._template()), tools
                    )
                text = reader.feed(piece.text)
                if piece.finish:
                    text += reader.end(cut=piece.finish == "length")
                finish = "tool_calls" if piece.finish and reader.is_complete else piece.finish
                made = replace(piece, text=text, finish=finish, calls=reader.take())
                if finish or text or made.calls or piece.thought or piece.tokens or piece.room:
                    yield made

    def _template(self) -> str:
        """The chat template that the catalogue sets, else the model's template; empty if there is none."""
        return override(self.spec.options) or self.template() or ""

    def require_known(self, body: Json, size: int) -> None:
        """Refuses (400) a `body` whose `logit_bias` has a token outside the vocabulary of `size` tokens."""
        self.require_tokens([0, *map(int, body.get("logit_bias") or ())], size, "logit_bias")

    def _shortened(self, vectors: list[list[float]], size: int) -> list[list[float]]:
        """The first `size` parts of each vector, scaled to length one. Raises Refused if a vector is shorter."""
        if vectors and size > len(vectors[0]):
            why = f"its embeddings have {len(vectors[0])} dimensions"
            raise cannot(self.spec.name, why, "dimensions")
        return [unit_vector(vector[:size]) for vector in vectors]

    def _header(self, kind: str) -> Header:
        id = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        return Header(id, int(time.time()), self.spec.name, kind == "chat")

    def require_tokens(self, tokens: list[int], size: int, param: str) -> None:
        """Refuses (400) a call whose field `param` has `tokens` outside the vocabulary of `size` tokens."""
        if max(tokens) >= size:
            why = f"the token {max(tokens)} is not in its vocabulary of {size}"
            raise cannot(self.spec.name, why, param)


# -- answers that must be JSON: for `response_format`, and for a tool call that the caller requires
#
# The library llguidance computes which tokens may follow. For llama.cpp's models it does so in their worker.

MOST_SCHEMA_CHARACTERS = 120_000  # of a schema
FORMATS = "of type text, json_object or json_schema"
# A JSON answer has one space after each comma and colon, and no other white space between values. If any white space
# were allowed, a model might write nothing else until its limit of tokens.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Tokenizer -> the tokens that end an answer -> the vocabulary in llguidance's form.
_vocabularies: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = (
    weakref.WeakKeyDictionary()
)
_reading = threads.freed(threading.Lock())


def schema_of(body: dict[str, Any], tools: Tools) -> dict[str, Any] | None:
    """The JSON schema that the answer to the chat in `body` with `tools` must match, or None. Raises Refused."""
    if tools.forced:
        return tools.schema()
    format = body.get("response_format") or {"type": "text"}
    if format.get("type") == "text":
        return None
    if format.get("type") == "json_object":
        return format.get("schema") or {"type": "object"}
    schema = format.get("json_schema")
    schema = schema.get("schema") if isinstance(schema, dict) else None
    if format.get("type") != "json_schema" or not isinstance(schema, dict):
        raise bad("response_format", format, FORMATS)
    return schema


def grammar_of(schema: dict[str, Any], model: str, *, is_hint: bool = False) -> str:
    """The grammar, in llguidance's form, of the answers that match the JSON `schema`.

    With `is_hint`, as for the parameters of a tool, keywords that the library does not know are left out. Raises
    Refused (400), which names the `model`, if llguidance is missing or cannot enforce the schema.
    """
    try:
        from llguidance import LLMatcher
    except ImportError:
        why = (
            "the library that forces JSON is not installed here.\n"
            "  Install it:  pip install llguidance"
        )
        raise cannot(model, why, "response_format") from None
    param = "tools" if is_hint else "response_format"
    text = json.dumps(schema)
    if len(text) > MOST_SCHEMA_CHARACTERS:
        raise _not_enforced(model, f"it has more than {MOST_SCHEMA_CHARACTERS:,} characters", param)
    options = {**_SPACING, "lenient": is_hint}
    grammar: str = LLMatcher.grammar_from_json_schema(text, overrides=options)
    if wrong := LLMatcher.validate_grammar(grammar):
        raise _not_enforced(model, wrong, param)
    return grammar


def _not_enforced(model: str, why: str, param: str = "response_format") -> Refused:
    return cannot(model, f"its JSON schema cannot be enforced: {why.splitlines()[0]}", param)


class ForcedTokens:
    """Computes which tokens may follow in an answer that must match a grammar."""

    def __init__(self, grammar: str, tokenizer: Any, ends: list[int], model: str) -> None:
        """`grammar` is a result of `grammar_of`, and `ends` are the tokens that end an answer. Raises Refused."""
        from llguidance import LLMatcher

        self._model = model
        self._matcher = LLMatcher(_vocabulary(tokenizer, ends, model), grammar, log_level=0)
        self._require_no_error()

    def ends_with(self, token: int) -> bool:
        """Reads the next `token` of the answer. Returns whether this token completes the answer."""
        self._matcher.consume_token(token)
        self._require_no_error()
        return self._matcher.is_stopped()

    def allowed(self) -> bytes:
        """For each token of the vocabulary a byte, which is 0 if the token must not follow."""
        allowed = self._matcher.compute_logit_bias()
        self._require_no_error()
        return allowed

    def _require_no_error(self) -> None:
        """Raises Refused if the grammar cannot be used. Without this, the answer would just end."""
        if self._matcher.is_error():
            raise _not_enforced(self._model, self._matcher.get_error())


def _vocabulary(tokenizer: Any, ends: list[int], model: str) -> Any:
    """The vocabulary of `tokenizer` in llguidance's form. It is kept, since the conversion takes about a second."""
    from llguidance.hf import from_tokenizer

    with _reading:
        known = _vocabularies.setdefault(tokenizer, {})
        if tuple(ends) not in known:
            try:
                end = ends[0] if len(ends) == 1 else ends or None
                known[tuple(ends)] = from_tokenizer(tokenizer, eos_token=end)
            except ValueError as error:
                why = f"its tokenizer cannot be used to force JSON: {error}"
                raise cannot(model, why, "response_format") from None
        return known[tuple(ends)]
