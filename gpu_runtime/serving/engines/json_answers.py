"""Forces an answer to be JSON: for `response_format`, and for a tool call that the caller requires.

llama.cpp has grammars of its own. For transformers models the library llguidance computes which tokens may follow.
"""

from __future__ import annotations

import json
import threading
import weakref
from typing import Any

from ... import forks
from ..requests import bad
from .base import cannot
from .tool_calls import Tools

FORMATS = "of type text, json_object or json_schema"
# A JSON answer has one space after each comma and colon, and no other white space between values. If any white space
# were allowed, a model might write nothing else until its limit of tokens.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Tokenizer -> the tokens that end an answer -> the vocabulary in llguidance's form.
_vocabularies: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = (
    weakref.WeakKeyDictionary()
)
_reading = forks.freed(threading.Lock())


def schema_of(body: dict[str, Any], tools: Tools) -> dict[str, Any] | None:
    """The JSON schema that the answer to the chat in `body` must match, or None if the answer may be any text.

    `tools` are the tools of the call. Raises Refused for an unknown `response_format`.
    """
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


def require_library(model: str) -> None:
    """Raises Refused (400) if llguidance is not installed here. The refusal names the transformers `model`."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        why = (
            "the library that forces JSON is not installed here.\n"
            "  Install it:  pip install 'gpu-console[torch]'"
        )
        raise cannot(model, why, "response_format") from None


class ForcedTokens:
    """Computes which tokens may follow in an answer that must match a JSON schema."""

    def __init__(
        self,
        schema: dict[str, Any],
        tokenizer: Any,
        ends: list[int],
        model: str,
        *,
        is_hint: bool = False,
    ) -> None:
        """Starts at the first token of an answer of `model`. The answer must match the JSON `schema`.

        `ends` are the tokens that end an answer. If `is_hint` is true, keywords that the library does not know are left
        out, as for the parameters of a tool. Raises Refused if the schema or the `tokenizer` cannot be used.
        """
        from llguidance import LLMatcher

        options = {**_SPACING, "lenient": is_hint}
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        self._matcher = LLMatcher(_vocabulary(tokenizer, ends, model), grammar, log_level=0)
        if self._matcher.is_error():
            why = self._matcher.get_error().splitlines()[0]
            raise cannot(model, f"its JSON schema cannot be enforced: {why}", "response_format")

    def ends_with(self, token: int) -> bool:
        """Reads the next `token` of the answer. Returns whether this token completes the answer."""
        self._matcher.consume_token(token)
        return self._matcher.is_stopped()

    def allowed(self) -> bytes:
        """For each token of the vocabulary a byte, which is 0 if the token must not follow."""
        return self._matcher.compute_logit_bias()


def _vocabulary(tokenizer: Any, ends: list[int], model: str) -> Any:
    """The vocabulary of `tokenizer` in llguidance's form. `ends` are the tokens that end an answer of `model`.

    Converting a vocabulary takes about a second, so the result is kept as long as the tokenizer exists.
    """
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
