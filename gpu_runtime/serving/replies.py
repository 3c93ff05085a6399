"""Prepares answers for the caller: names their model, requires that they are complete, and releases what they hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from ..errors import EngineDied
from .engines.base import EngineFailed
from .health.blame import Blame, blame, first_line
from .requests import Json, Refused, Reply
from .routing.fallback import Choice

MAX_HEADER_LENGTH = 400
# The limit of the answer, if it is less than the call requests; whether tools were left out.
TOLD = ("max_tokens", "tools")


class Streamed:
    """A streamed answer. An error after the first event becomes the last event, in OpenAI's format of errors."""

    def __init__(
        self,
        first: Json,
        events: AsyncIterator[Json],
        held: AsyncExitStack,
        deadline: float | None,
        ended: Callable[[BaseException | None], Awaitable[None]],
    ) -> None:
        """An answer whose `first` event was read already; `events` are the following events.

        `held` holds the turn of the call, the pin and the engine's stream until the end of the answer or `aclose`,
        which the sender must call even if it sent nothing. `deadline` is a time of the event loop. `ended(error)` is
        called once at the end; an error of None means success.
        """
        self._first: Json | None = first
        self._events = events
        self._held = held
        self._deadline = deadline
        self._ended = ended
        self._over = False
        self._reader: asyncio.Task[Any] | None = None  # the task that waits for the next event
        self._aborted_because: Refused | None = None

    def abort(self, reason: Refused) -> None:
        """Ends the stream with `reason` as its last event, even while a task waits for the engine's next event."""
        self._aborted_because = reason
        if self._reader is not None:
            self._reader.cancel()

    @property
    def over(self) -> bool:
        """Whether the stream has ended, and has released its model or is about to."""
        return self._over

    @property
    def first(self) -> Json:
        """The first event; fields may still be added to it."""
        assert self._first is not None
        return self._first

    def __aiter__(self) -> Streamed:
        return self

    async def __anext__(self) -> Json:
        if self._first is not None:
            event, self._first = self._first, None
            return event
        if self._over:
            raise StopAsyncIteration
        if self._aborted_because is not None:
            await self._end(self._aborted_because)
            return _error_event(self._aborted_because)
        self._reader = asyncio.current_task()
        try:
            return await self._next()
        except StopAsyncIteration:
            await self._end(None)
            raise
        except Exception as error:
            await self._end(error)
            return _error_event(error)
        except asyncio.CancelledError:
            await self.aclose()
            if self._aborted_because is None or self._reader is None:
                raise
            self._reader.uncancel()
            return _error_event(self._aborted_because)
        except BaseException:
            await self.aclose()
            raise
        finally:
            self._reader = None

    async def _end(self, error: BaseException | None) -> None:
        """Counts the outcome, for which the model may be called once more, and releases the model."""
        self._over = True
        try:
            await self._ended(error)
        finally:
            await self.aclose()

    async def _next(self) -> Json:
        if self._deadline is None:
            return await anext(self._events)
        async with asyncio.timeout_at(self._deadline):
            return await anext(self._events)

    async def aclose(self) -> None:
        """Ends the stream and releases everything that it holds."""
        self._over = True
        self._first = None
        await self._held.aclose()


def server_ending() -> Refused:
    """The refusal (503) of a call while the server ends."""
    return Refused(503, "ending", "the server is ending; retry when it has started again", 5.0)


def attempts(
    choices: Sequence[Choice], failed: Sequence[tuple[str, BaseException]]
) -> Iterator[Choice]:
    """Yields each of `choices`. If none of them answered, yields once more the first choice whose engine died.

    The caller adds the model and the error of each attempt to `failed` before it reads the next choice. An engine may
    have died before the call reached it. A second death ends the call, because the call itself may be the cause.
    """
    yield from choices
    died = {model for model, error in failed if isinstance(error, EngineDied)}
    yield from [choice for choice in choices if choice.model in died][:1]


def raise_if_final(error: Exception, choice: Choice, choices: tuple[Choice, ...]) -> None:
    """Raises Refused if the call ends with this `error` of `choice`. Else the next model is tried.

    A refusal ends the call if the queue is full, if there is only one choice, or if the requested model refuses because
    of a mistake in the call. If a stand-in refuses, for example because the prompt is too long, the next one is tried.
    """
    cause, refused = blame(error, choice.model)
    if refused is None:
        return
    is_callers_mistake = choice is choices[0] and cause is Blame.CALLER
    is_final = len(choices) == 1 or is_callers_mistake or refused.code == "queue_full"
    try:
        if is_final:
            raise refused from (error.__cause__ if refused is error else error)
    finally:
        del refused, error  # else a cycle: error -> traceback -> this frame -> error


def why_this_model(choice: Choice, failed: Sequence[tuple[str, BaseException]]) -> str:
    """Why the model of `choice` answers, in words: the errors of the models that `failed` before, if any did."""
    if not failed:
        return choice.because
    return "; ".join(f"{model} could not answer: {first_line(error)}" for model, error in failed)


def add_origin(reply: Reply) -> None:
    """Writes into the body and headers of `reply` which model answered and why, and what its adapter noted (TOLD)."""
    origin = {"asked": reply.asked, "model": reply.model}
    if reply.because:
        origin["because"] = reply.because
    body = reply.json if reply.json is not None else reply.events.first  # type: ignore[union-attr]
    told = body.get("x_gpu") or {}
    origin |= {name: told[name] for name in TOLD if name in told}
    body["x_gpu"] = origin
    reply.headers = {
        f"X-GPU-{name.replace('_', '-').title()}": _header_text(str(value))
        for name, value in origin.items()
    }


@contextlib.contextmanager
def count_refusals(counts: Any) -> Any:
    """Adds to `counts` each refusal raised in this block, by status, and each cancelled call."""
    try:
        yield
    except Refused as refused:
        counts[f"refused_{refused.status}"] += 1
        raise
    except asyncio.CancelledError:
        counts["cancelled"] += 1
        raise


def _error_event(error: BaseException) -> Json:
    if isinstance(error, TimeoutError):
        error = Refused(504, "budget_spent", "the answer broke off: its budget is spent")
    if isinstance(error, Refused):
        return error.body()
    return Refused(500, "broken_off", f"the answer broke off: {first_line(error)}").body()


def _header_text(text: str) -> str:
    """The `text` in the form that a header may contain: printable ASCII on one line."""
    plain = text.encode("ascii", "replace").decode()
    return "".join(letter if letter.isprintable() else " " for letter in plain)[:MAX_HEADER_LENGTH]


# OpenAI's format gives each choice a `finish_reason` when its text is complete. Without one, the engine cut the answer
# off, even if the stream ended with `[DONE]`. llama-cpp-python's server does so when it receives another call.
TEXT_KINDS = ("chat", "completions")


def require_ended(kind: str, answer: Json, model: str) -> None:
    """Raises EngineFailed if the whole `answer` of `model` to a call of this `kind` was cut off."""
    if kind not in TEXT_KINDS:
        return
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        raise _cut_off(model, "its answer has no choices")
    if not all(_has_ended(choice) for choice in choices):
        raise _cut_off(model, "its answer was cut off: it has no finish_reason")


async def until_ended(
    events: AsyncIterator[Json], model: str, note: Callable[[Json], None], hides_usage: bool
) -> AsyncGenerator[Json]:
    """Yields the `events` of a streamed answer of `model`, after `note` was called with each.

    With `hides_usage`, an event that has only the usage is left out, because the caller did not ask for it. Raises
    EngineFailed after the last event if a choice was cut off, or if there was no choice.
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
