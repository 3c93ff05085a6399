"""Counts the tokens of a long prompt before its call waits for the model.

If the tokens were counted while the call uses the model, other calls would wait for the count too. This module knows a
model's tokenizer from the model's first call until the model is gone. If the tokenizer is not known, or is in another
process, the tokens are counted piece by piece while the call uses the model (see prompt_size.py).
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from ...facts import ModelSpec
from ..prompt_size import PIECE_CHARACTERS, characters, texts, tokens_if_too_many
from ..queue.thread_stream import in_thread_until
from ..requests import Call
from .base import too_long

MOST_AT_ONCE = 2  # counts that run at the same time, each in a thread that computes without pause

_Known = tuple[ModelSpec, Callable[[], Any], int]
_known: dict[
    str, _Known
] = {}  # by the model's name: its tokenizer, if it still exists, and its context


def remember(spec: ModelSpec, tokenizer: Any, context: int) -> None:
    """Remembers `tokenizer`, which will count the prompts of later calls of the model `spec`.

    `context` is the model's context length in tokens.
    """
    _known[spec.name] = spec, weakref.ref(tokenizer), context


async def require_tokens(call: Call, spec: ModelSpec, free: asyncio.Semaphore) -> None:
    """Refuses (400) a `call` with a long prompt that has more tokens than the context of `spec`.

    A prompt is counted only if it is long and the tokenizer is known. `free` limits how many prompts are counted at
    once. Counting ends as soon as the result is known, or when the call is cancelled.
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
