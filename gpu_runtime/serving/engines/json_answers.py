"""Forces an answer to be JSON: for `response_format`, and for a tool call that the caller requires.

The library llguidance computes which tokens may follow. For llama.cpp's models it does so in their worker.
"""

from __future__ import annotations

import json
import threading
import weakref
from typing import Any

from ... import threads
from ..requests import Refused, bad
from .base import cannot
from .tool_calls import Tools

MOST_CHARACTERS = 120_000  # of a schema
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
    if len(text) > MOST_CHARACTERS:
        raise _not_enforced(model, f"it has more than {MOST_CHARACTERS:,} characters", param)
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
