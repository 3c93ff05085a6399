"""The adapter of llama.cpp models: it calls the methods of `llama_cpp.Llama` in a thread.

This module, not llama.cpp's library, makes the prompt from the chat template. So thinking can be turned on and off, the
catalogue can set another template, the prompt's tokens can be counted, and an answer can be ended early.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator
from typing import Any

from ...arguments import embedded_tokens
from ...facts import ModelSpec, Value
from ...threads import Cancellation
from ..requests import SAMPLING, sampling, tokens_if_too_many
from ..thread_stream import Emit, emit_each, in_thread_until, stream_from_thread
from .base import TextAdapter, grammar_of, schema_of, text_too_long, too_long, unit_vector
from .openai_format import (
    TextPiece,
    Token,
    Tools,
    Unsent,
    count_of,
    max_tokens_of,
    stops_of,
    tools_of,
)

_ADDED_TOKENS = 4  # at most: those that begin and end a text, and a space before it
_PENALTIES = ("presence_penalty", "frequency_penalty", "repeat_penalty")
_OTHERS = ("seed", "mirostat_mode", "mirostat_tau", "mirostat_eta")
_SAMPLING_FIELDS = {
    **SAMPLING,
    **{name: name for name in (*_PENALTIES, *_OTHERS)},
    "repetition_penalty": "repeat_penalty",
    "temperature": "temp",
}


class ModelFacts(Value):
    """Facts about a model. They are read only once, because each read is a call to another process."""

    template: str | None
    tokens: dict[str, str]
    context: int  # in tokens


_Known = tuple[ModelSpec, ModelFacts]
_known_facts: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


class LlamaCppAdapter(TextAdapter):
    """Calls the methods of `value`, which are llama.cpp's. The model itself may be in another process."""

    kind = "a llama.cpp model"
    can_force_calls = True

    @property
    def facts(self) -> ModelFacts:
        spec, facts = _known_facts.get(self.value, (None, None))
        if facts is None or spec != self.spec:  # the catalogue may have changed the model's context
            facts = self._read_facts()
            _known_facts[self.value] = self.spec, facts
        return facts

    def _read_facts(self) -> ModelFacts:
        metadata = dict(self.value.metadata or {})
        tokens = {}
        for name in ("bos", "eos"):
            id = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if id is not None:
                tokens[f"{name}_token"] = _text(self.value.detokenize([int(id)], special=True))
        return ModelFacts(metadata.get("tokenizer.chat_template"), tokens, int(self.value.n_ctx()))

    def template(self) -> str | None:
        return self.facts.template

    def tokens(self) -> dict[str, str]:
        return self.facts.tokens

    def pieces(
        self, kind: str, body: dict[str, Any], think: bool | None
    ) -> AsyncGenerator[TextPiece]:
        tools = tools_of(body) if kind == "chat" else Tools()
        schema = schema_of(body, tools) if kind == "chat" else None

        def work(emit: Emit, cancelled: Cancellation) -> None:
            prompt = self.prompt(kind, body, think)
            if isinstance(prompt, list):
                self.require_tokens(prompt, self.value.n_vocab(), "prompt")
            if body.get("logit_bias"):
                self.require_known(body, self.value.n_vocab())
            more = {"logit_bias": body["logit_bias"]} if body.get("logit_bias") else {}
            if schema is not None:
                grammar = grammar_of(schema, self.spec.name, is_hint=bool(tools.forced))
                more["json_grammar"] = grammar
            parts = self.value.write(
                prompt,
                kind != "chat",
                max_tokens_of(body),
                bool(body.get("stream")),
                stop=stops_of(body),
                stream=True,
                cancelled=cancelled,
                top_logprobs=count_of(body),
                echo=bool(body.get("echo")),
                **sampling(body, _SAMPLING_FIELDS),
                **more,
            )

            unsent = Unsent()

            def emit_part(part: dict[str, Any]) -> None:
                if "too_long" in part:
                    raise too_long(self.spec.name, kind, part["too_long"], self.facts.context)
                found = [_token(raw) for raw in part.pop("tokens", None) or ()]
                if found and found[0].logprob is None:  # the prompt
                    emit(TextPiece(**part, tokens=tuple(found)))
                    return
                for token in found:
                    if token.data:  # a special token is no text
                        unsent.add(token)
                tokens = unsent.take(part.get("text", ""))
                if part.get("finish") and not stops_of(body):
                    tokens += unsent.take_rest()
                emit(TextPiece(**part, tokens=tokens))

            emit_each(parts, emit_part, cancelled)

        return stream_from_thread(work)

    async def vectors(
        self, texts: list[str | list[int]], truncate: bool
    ) -> tuple[list[list[float]], int]:
        if self.spec.model_type != "embedding":
            return await super().vectors(texts, truncate)

        def embed(cancelled: Cancellation) -> Any:
            """Embeds the texts. The library takes no tokens, so lists of tokens become text first."""
            size = self.value.n_vocab()
            context = self.facts.context
            most = min(context, embedded_tokens(self.spec.options, context))
            plain = []
            for text in texts:
                if not isinstance(text, str):
                    self.require_tokens(text, size, "input")
                    text = _text(self.value.detokenize(text))
                plain.append(text)
                if not truncate:
                    self._require_short(text, most, cancelled)
            answer = self.value.create_embedding(plain, cancelled=cancelled)
            vectors = [unit_vector(row["embedding"]) for row in answer["data"]]
            return vectors, answer["usage"]["prompt_tokens"]

        return await in_thread_until(embed)

    def _require_short(self, text: str, most: int, cancelled: Cancellation) -> None:
        """Raises Refused if `text` has more than `most` tokens. The library would cut it off."""
        if len(text.encode()) + _ADDED_TOKENS <= most:  # a token has at least one byte
            return

        def count(piece: str) -> int:
            return len(self.value.tokenize(piece.encode(), cancelled=cancelled))

        found = tokens_if_too_many(text, most, count, cancelled.is_set) or count(text)
        if found > most and not cancelled.is_set():
            option = "n_batch" if most < self.facts.context else "context_length"
            raise text_too_long(self.spec.name, found, most, f" ({option} in the catalogue)")

    async def tokenize(self, text: str, special: bool) -> list[int]:
        return await in_thread_until(
            lambda cancelled: self.value.tokenize(
                text.encode(), add_bos=special, special=True, cancelled=cancelled
            )
        )

    async def detokenize(self, tokens: list[int]) -> str:
        def work(cancelled: Cancellation) -> str:
            """The text. For an invalid token, the library would read memory outside its table."""
            self.require_tokens(tokens, self.value.n_vocab(), "tokens")
            return _text(self.value.detokenize(tokens, special=True))

        return await in_thread_until(work)


def _token(found: list[Any]) -> Token:
    """A token as the worker describes it: its bytes, the logarithm of its probability, and alternatives."""
    data, logprob, top = found
    return Token(data, logprob, tuple((name, value) for name, value in top if name))


def _text(token: Any) -> str:
    return token.decode("utf-8", "replace") if isinstance(token, bytes) else str(token)
