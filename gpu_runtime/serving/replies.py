"""Answers on their way out: which model gave them and why, and streams that let go of everything at their end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from .health.blame import first_line
from .requests import Refused, Reply
from .routing.fallback import Choice

LONGEST_HEADER = 400


class Streamed:
    """A streamed answer. An error in its middle is its last event, as OpenAI's clients know it.

    `held` is all that the answer holds: its turn, the pin, the engine's own stream. It is given back at the end, and by
    `aclose`, which whoever sends the answer calls also where nothing was sent. `ended(error)` is told how it went.
    """

    def __init__(
        self,
        first: dict[str, Any],
        events: AsyncIterator[dict[str, Any]],
        held: AsyncExitStack,
        deadline: float | None,
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self._first: dict[str, Any] | None = first
        self._events, self._held, self._deadline, self._ended = events, held, deadline, ended
        self._over = False
        self._reader: asyncio.Task[Any] | None = None  # who waits for the next event
        self._why: Refused | None = None  # it was broken off

    def break_off(self, why: Refused) -> None:
        """Ends it with that error as its last event, also while somebody waits for the next."""
        self._why = why
        if self._reader is not None:
            self._reader.cancel()

    @property
    def first(self) -> dict[str, Any]:
        """Its first event, which may still be added to."""
        assert self._first is not None
        return self._first

    def __aiter__(self) -> Streamed:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._first is not None:
            event, self._first = self._first, None
            return event
        if self._over:
            raise StopAsyncIteration
        self._reader = asyncio.current_task()
        try:
            if self._why is not None:
                raise self._why
            if self._deadline is None:
                return await anext(self._events)
            async with asyncio.timeout_at(self._deadline):
                return await anext(self._events)
        except StopAsyncIteration:
            self._ended(None)
            await self.aclose()
            raise
        except Exception as error:
            self._ended(error)
            await self.aclose()
            return _broken_off(error)
        except asyncio.CancelledError:
            await self.aclose()
            if self._why is None or self._reader is None:
                raise
            self._reader.uncancel()
            return _broken_off(self._why)
        except BaseException:
            await self.aclose()
            raise
        finally:
            self._reader = None

    async def aclose(self) -> None:
        self._over, self._first = True, None
        await self._held.aclose()


def ending() -> Refused:
    """That the server ends, and takes nobody along."""
    return Refused(503, "ending", "the server is ending; another start of it may answer", 5.0)


def _broken_off(error: BaseException) -> dict[str, Any]:
    if isinstance(error, TimeoutError):
        error = Refused(504, "budget_spent", "the answer broke off: its budget is spent")
    if isinstance(error, Refused):
        return error.body()
    return Refused(500, "broken_off", f"the answer broke off: {first_line(error)}").body()


def because(choice: Choice, failed: Sequence[tuple[str, BaseException]]) -> str:
    """Why this model answers in the place of another."""
    if not failed:
        return choice.because
    return "; ".join(f"{model} could not answer: {first_line(error)}" for model, error in failed)


def signed(reply: Reply) -> None:
    """Writes into the answer, and its headers, which model gave it and why."""
    said = {"asked": reply.asked, "model": reply.model} | (
        {"because": reply.because} if reply.because else {}
    )
    body = reply.json if reply.json is not None else reply.events.first  # type: ignore[union-attr]
    body["x_gpu"] = said
    reply.headers = {f"X-GPU-{name.title()}": _header(text) for name, text in said.items()}


def _header(text: str) -> str:
    """As a header may be: printable ASCII on one line."""
    plain = text.encode("ascii", "replace").decode()
    return "".join(letter if letter.isprintable() else " " for letter in plain)[:LONGEST_HEADER]


@contextlib.contextmanager
def counted(counts: Any) -> Any:
    """Counts refusals by their status, and callers who went away."""
    try:
        yield
    except Refused as refused:
        counts[f"refused_{refused.status}"] += 1
        raise
    except asyncio.CancelledError:
        counts["cancelled"] += 1
        raise
