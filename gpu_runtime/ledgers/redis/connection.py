"""One connection to a Redis. Failures of the connection become readable errors.

Error messages never show a password. Nothing here depends on what is stored in the Redis.
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
Ask = Callable[..., Any]  # sends one command and returns its answer

CONNECT_SECONDS = 1.0
ANSWER_SECONDS = 1.0  # limit of one answer; if all four attempts time out, that takes about 5 s
# If each attempt is refused at once, the attempts and the waits between them take about half a
# second. A restart of a Redis takes about as long.
RETRIES = 3


class RedisConnection:
    """A connection that is made again when it breaks.

    The caller has to make sure, with a lock, that only one thread uses the connection at a time.
    """

    def __init__(self, url: str) -> None:
        """Prepares a connection to the server at `url`. Nothing is connected yet.

        Raises BadSetting for an invalid URL.
        """
        self.url = masked(url)
        try:
            # With version 2 of the protocol, all versions of Redis give the same answers. A single
            # command is not retried, because `converse` calls `talk` again from its start.
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
        host, port = options.get("host", "localhost"), options.get("port", 6379)
        host_and_port = f"{host}:{port}"
        place = options.get("path") or host_and_port
        database = options.get("db", 0)
        self.address = f"{place}/{database}"
        self._retry = Retry(
            ExponentialBackoff(cap=0.25, base=0.05), RETRIES, (ConnectionError, TimeoutError)
        )
        self._in_step = True  # whether no command is waiting for its answer

    def converse(self, talk: Callable[[Ask], T]) -> T:
        """Calls `talk` with a function that sends one command. Returns the result of `talk`.

        If the connection breaks, `talk` is called again from its start. So a command may be
        executed twice. Raises LedgerUnavailable, and anything that `talk` raises.
        """
        try:
            return self._retry.call_with_retry(
                lambda: self._converse_once(talk), lambda error: self._connection.disconnect()
            )
        except (ConnectionError, TimeoutError) as error:
            raise self.unavailable(
                f"does not answer ({_reason(error)}); nothing new is granted until it does. "
                f"Leases that exist remain valid",
                "Start it, or name another:  GPU_LEDGER=redis://HOST:PORT/DB",
            ) from error
        except RedisError as error:
            raise self.unavailable(
                f"refused a command ({_reason(error)})", "See:  redis-cli info"
            ) from error

    def _converse_once(self, talk: Callable[[Ask], T]) -> T:
        if not self._in_step:
            # An exception, such as a KeyboardInterrupt, arrived between a command and its answer. On
            # this connection, the next command would read the old answer as its own.
            self._connection.disconnect()
        try:
            return talk(self._ask)
        except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
            raise self.unavailable(
                f"refused this user ({_reason(error)})",
                "Name a user with the right to:  GPU_LEDGER=redis://USER:PASSWORD@HOST:PORT/DB",
            ) from error

    def _ask(self, *words: str | bytes | int) -> Any:
        self._in_step = False
        try:
            self._connection.send_command(*words)
            answer = self._connection.read_response()
        except ResponseError:  # an error of Redis is an answer too
            self._in_step = True
            raise
        self._in_step = True
        return answer

    def unavailable(self, what: str, hint: str) -> LedgerUnavailable:
        """The error for this Redis. `what` has the verb ("refused a command"), `hint` the advice."""
        return LedgerUnavailable(f"the Redis {self.url} {what}.\n  {hint}", path=self.url)

    def close(self) -> None:
        """Closes the connection."""
        self._connection.disconnect()

    def require_safe(self, ask: Ask) -> None:
        """Raises LedgerUnavailable if this Redis may forget the book.

        The message names the Redis option to set. `ask` sends one command.
        """
        info = _info(ask, "persistence") | _info(ask, "memory")
        if info.get("aof_enabled") != "1":
            raise self.unavailable(
                "keeps no append-only file, so all grants would be lost when it ends",
                "Turn it on:  redis-cli config set appendonly yes      and in redis.conf:  appendonly yes",
            )
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise self.unavailable(
                f"may drop the book when its memory is full (maxmemory-policy {policy})",
                "Forbid it:  redis-cli config set maxmemory-policy noeviction      and in redis.conf",
            )


def _info(ask: Ask, section: str) -> dict[str, str]:
    lines = ask("INFO", section).decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _reason(error: Exception) -> str:
    return masked(str(error).strip().rstrip(".") or type(error).__name__)
