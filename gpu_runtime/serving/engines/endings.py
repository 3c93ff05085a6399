"""Checks that an answer is complete, and was not cut off by its engine.

OpenAI's format gives each choice a `finish_reason` when its text is complete. An answer without a `finish_reason` was
cut off by the engine, even if the stream ended with `[DONE]`. llama-cpp-python's server cut off a stream in this way
when it received another call.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from .base import EngineFailed

TEXT_KINDS = ("chat", "completions")


def require_ended(kind: str, answer: dict[str, Any], model: str) -> None:
    """Checks the whole `answer` of `model` to a call of this `kind`. Raises EngineFailed if it was cut off."""
    if kind not in TEXT_KINDS:
        return
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        raise _cut_off(model, "its answer has no choices")
    if not all(_has_ended(choice) for choice in choices):
        raise _cut_off(model, "its answer was cut off: it has no finish_reason")


async def until_ended(
    events: AsyncIterator[dict[str, Any]],
    model: str,
    note: Callable[[dict[str, Any]], None],
    hides_usage: bool = False,
) -> AsyncGenerator[dict[str, Any]]:
    """Yields the `events` of a streamed answer of `model`. Before each event, calls `note` with the event.

    With `hides_usage`, an event that has only the usage is left out, because the caller did not ask for the usage.
    Raises EngineFailed after the last event if a choice was cut off, or if there was no choice.
    """
    begun: set[int] = set()
    ended: set[int] = set()
    async with aclosing(events) as source:  # type: ignore[type-var]
        async for event in source:
            note(event)
            for choice in event.get("choices") or ():
                begun.add(choice.get("index", 0))
                if _has_ended(choice):
                    ended.add(choice.get("index", 0))
            if not hides_usage or event.get("choices"):
                yield event
    if not ended or begun - ended:
        raise _cut_off(model, "its answer was cut off: it ended without a finish_reason")


def _has_ended(choice: Any) -> bool:
    return isinstance(choice, dict) and bool(choice.get("finish_reason"))


def _cut_off(model: str, why: str) -> EngineFailed:
    return EngineFailed(f"{model} failed: {why}", name=model, why=why)
