"""The usage of each visitor: calls and tokens by model and day. New usage is written to the store within a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from .queue.thread_stream import in_thread
from .store import Store, UsageRow

WRITE_SECONDS = 1.0  # the longest time for which calls are in memory only
MOST_DAYS = 400
RECENT_DAYS = 30
RECENT_SECONDS = 5.0  # how long `recent` returns the same rows
_Place = tuple[str, str, str]  # day, client, model


class Usage:
    """Counts the calls of one gateway, in its event loop."""

    def __init__(self, store: Store | None = None, wall: Callable[[], float] = time.time) -> None:
        """The counts go to `store`; without a store they stay in memory. `wall` returns epoch seconds."""
        self._store = store
        self._wall = wall
        self._new: dict[_Place, list[int]] = {}  # calls, tokens read and written
        self._writing: asyncio.Task[None] | None = None
        self._recent: list[dict[str, Any]] = []
        self._recent_until = 0.0  # epoch seconds

    def add(self, client: str, facts: dict[str, Any]) -> None:
        """Counts one call of the visitor `client`. `facts` are the facts of the call in the request log."""
        place = (self._day(0), client, facts["model"])
        self._count(place, 1, facts["prompt_tokens"], facts["completion_tokens"])
        if self._store is not None and self._writing is None:
            self._writing = asyncio.ensure_future(self._write_soon())

    def of(self, days: int, client: str | None = None) -> list[dict[str, Any]]:
        """Rows with the calls and tokens of each client and model in the last `days`; with `client`, only its rows."""
        since = self._day(days - 1)
        rows = self._store.usage(since) if self._store is not None else []
        sums: dict[tuple[str, str], list[int]] = {}
        for day, who, model, *counts in (*rows, *self._rows()):
            if day >= since and client in (None, who):
                known = sums.setdefault((who, model), [0, 0, 0])
                sums[who, model] = [a + b for a, b in zip(known, counts, strict=True)]
        names = ("calls", "prompt_tokens", "answer_tokens")
        return [
            {"client": who, "model": model, **dict(zip(names, counts, strict=True))}
            for (who, model), counts in sorted(sums.items())
        ]

    def recent(self) -> list[dict[str, Any]]:
        """The rows of the last RECENT_DAYS for all clients. They may be RECENT_SECONDS old."""
        if self._wall() >= self._recent_until:
            self._recent, self._recent_until = self.of(RECENT_DAYS), self._wall() + RECENT_SECONDS
        return self._recent

    async def close(self) -> None:
        """Writes the counts that are not in the store yet."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            await self._write()

    async def _write_soon(self) -> None:
        await asyncio.sleep(WRITE_SECONDS)
        self._writing = None
        await self._write()

    async def _write(self) -> None:
        rows, store = self._rows(), self._store
        self._new.clear()
        if rows and store is not None and not await in_thread(lambda: store.add_usage(rows)):
            # Such as a full disk: these calls are written with the next one.
            for day, client, model, *counts in rows:
                self._count((day, client, model), *counts)

    def _count(self, place: _Place, *counts: int) -> None:
        known = self._new.get(place, [0, 0, 0])
        self._new[place] = [a + b for a, b in zip(known, counts, strict=True)]

    def _rows(self) -> list[UsageRow]:
        return [(*place, *counts) for place, counts in self._new.items()]  # type: ignore[misc]

    def _day(self, ago: int) -> str:
        now = datetime.fromtimestamp(self._wall(), UTC)
        return (now - timedelta(days=ago)).date().isoformat()
