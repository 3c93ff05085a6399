"""One connection to a Redis, and what can go wrong with it as sentences.

Passwords are never shown. Nothing here knows what a book is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from redis import ConnectionPool
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,
    NoPermissionError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from ...errors import BadSetting, LedgerUnavailable
from ...settings import masked

T = TypeVar("T")
Ask = Callable[..., Any]  # one command and its answer

CONNECT_SECONDS = 1.0
ANSWER_SECONDS = 1.0  # four attempts: who does not answer is given up after about 5 s
RETRIES = (
    3  # with the waits between them about half a second: as long as a Redis takes to start again
)


class Wire:
    """A connection that comes back by itself. Not for several threads at once: its user has a lock."""

    def __init__(self, url: str) -> None:
        """Raises BadSetting. Nothing is connected yet."""
        self.url = masked(url)
        try:
            # Version 2 of the protocol: the same answers from every Redis. No retries within a command: ours
            # start the whole conversation again.
            pool = ConnectionPool.from_url(
                url,
                protocol=2,
                socket_connect_timeout=CONNECT_SECONDS,
                socket_timeout=ANSWER_SECONDS,
                retry=Retry(NoBackoff(), 0),
            )
            self._connection = pool.make_connection()
        except (ValueError, TypeError) as error:
            raise BadSetting(
                "GPU_LEDGER", self.url, f"redis://USER:PASSWORD@HOST:PORT/DB ({error})"
            ) from None
        options = pool.connection_kwargs
        place = (
            options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        )
        self.address = f"{place}/{options.get('db', 0)}"
        self._retry = Retry(
            ExponentialBackoff(cap=0.25, base=0.05), RETRIES, (ConnectionError, TimeoutError)
        )
        self._clean = True

    def converse(self, talk: Callable[[Ask], T]) -> T:
        """What `talk` returns. All its commands go over one connection: where that breaks, it is begun anew.

        A command may therefore be done twice. Raises LedgerUnavailable, and whatever `talk` raises.
        """
        try:
            return self._retry.call_with_retry(
                lambda: self._once(talk), lambda error: self._connection.disconnect()
            )
        except (ConnectionError, TimeoutError) as error:
            raise self.unavailable(
                f"does not answer ({_why(error)}); nothing new is granted until it does, and what is held stays held",
                "Start it, or name another:  GPU_LEDGER=redis://HOST:PORT/DB",
            ) from error
        except RedisError as error:
            raise self.unavailable(
                f"would not do it ({_why(error)})", "See:  redis-cli info"
            ) from error

    def _once(self, talk: Callable[[Ask], T]) -> T:
        if not self._clean:
            # An interrupt came between a command and its answer: the next command would read that answer as its own.
            self._connection.disconnect()
        try:
            return talk(self._ask)
        except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
            raise self.unavailable(
                f"refused this user ({_why(error)})",
                "Name one who may:  GPU_LEDGER=redis://USER:PASSWORD@HOST:PORT/DB",
            ) from error

    def _ask(self, *words: str | bytes | int) -> Any:
        self._clean = False
        try:
            self._connection.send_command(*words)
            answer = self._connection.read_response()
        except ResponseError:  # an answer too
            self._clean = True
            raise
        self._clean = True
        return answer

    def unavailable(self, what: str, hint: str) -> LedgerUnavailable:
        return LedgerUnavailable(f"the Redis {self.url} {what}.\n  {hint}", path=self.url)

    def close(self) -> None:
        self._connection.disconnect()

    def require_safe(self, ask: Ask) -> None:
        """Nothing, where this Redis keeps what it was told; else raises LedgerUnavailable with what to set."""
        said = dict(
            line.split(":", 1)
            for section in ("persistence", "memory")
            for line in ask("INFO", section).decode().splitlines()
            if ":" in line
        )
        if said.get("aof_enabled") != "1":
            raise self.unavailable(
                "keeps no append-only file, so its end would be the end of every grant",
                "Turn it on:  redis-cli config set appendonly yes      and in redis.conf:  appendonly yes",
            )
        if said.get("maxmemory_policy", "noeviction") != "noeviction":
            raise self.unavailable(
                f"may drop the book when its memory is full (maxmemory-policy {said['maxmemory_policy']})",
                "Forbid it:  redis-cli config set maxmemory-policy noeviction      and in redis.conf",
            )


def _why(error: Exception) -> str:
    return masked(str(error).strip().rstrip(".") or type(error).__name__)
