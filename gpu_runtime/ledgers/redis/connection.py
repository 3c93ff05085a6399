"""The connection to a Redis, the keys in it, and the two scripts that write them.

    gpu-console:ledger            the marker of a database that belongs to gpu-console; a hash with
                                  the schema
    gpu-console:page:BOOT-ID      a hash: generation, rev, schema, body; nonce (of the last write),
                                  opens (when grants begin), seen (when an owner last looked), name
                                  (of the machine that made it)
    gpu-console:newest:BOOT-ID    the generation and the newest revision of the page
    gpu-console:beside:BOOT-ID:KIND   a hash of the owners' maps, names or answers
    gpu-console:damaged:…         a damaged page that was set aside; it expires after a week

Failures of the connection become readable errors, which never show a password. Nothing here decides
what is lawful or which page is right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

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
from ...facts import SCHEMA, Book
from ...settings import masked
from ..pieces import UNREADABLE, Piece, Pieces, opened

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


# -- keys and scripts ------------------------------------------------------------------------------


MOST_BYTES = 4 << 20  # a larger page was not written by gpu-console
# A page expires if no owner has read it for this long. An owner that still lives then makes the
# page again.
KEPT_SECONDS = 7 * 86400
SEEN_SECONDS = 60.0  # how often an owner marks its host's page as seen

NOT_A_PAGE = (ValueError, TypeError, *UNREADABLE)
MARKER = "gpu-console:ledger"  # marks a database that belongs to gpu-console
PAGE = "gpu-console:page:"
NEWEST = "gpu-console:newest:"
BESIDE = "gpu-console:beside:"

LOOK_OR_WRITE = f"""
local page, now = KEYS[1], redis.call('TIME')
local at = redis.call('HMGET', page, 'generation', 'rev', 'schema')
if not at[1] then return {{'gone'}} end
local known, newest = string.match(redis.call('GET', KEYS[2]) or '', '(%S+) (%d+)')
if known == at[1] and tonumber(newest) > (tonumber(at[2] or '') or -1) then return {{'old', newest}} end
if ARGV[1] == 'look' then
  if ARGV[4] == 'seen' then
    redis.call('HSET', page, 'seen', now[1])
    redis.call('EXPIRE', page, {KEPT_SECONDS})
  end
  if at[1] == ARGV[2] and at[2] == ARGV[3] then return {{'same'}} end
  if redis.call('HSTRLEN', page, 'body') > {MOST_BYTES} then return {{'large'}} end
  return {{'page', at[1], at[2], at[3], redis.call('HGET', page, 'body')}}
end
local generation, rev, after, nonce, grants, schema, body = unpack(ARGV, 2)
if at[1] ~= generation then return {{'lost'}} end
-- The connection broke before the answer to the first attempt arrived: it was written.
if at[2] == after and redis.call('HGET', page, 'nonce') == nonce then return {{'written'}} end
if at[2] ~= rev then return {{'lost'}} end
if grants == 'yes' then
  local left = (tonumber(redis.call('HGET', page, 'opens')) or 0) - (now[1] + now[2] / 1000000)
  if left > 0 then return {{'closed', tostring(left)}} end
end
redis.call('HSET', page, 'rev', after, 'nonce', nonce, 'schema', schema, 'body', body)
redis.call('SET', KEYS[2], generation .. ' ' .. after, 'EX', {KEPT_SECONDS})
return {{'written'}}
"""

MAKE = f"""
local page, marker, aside = KEYS[1], KEYS[3], KEYS[4]
local found_generation, found_rev, generation, rev, schema, body, closed, name = unpack(ARGV)
local at = redis.call('HMGET', page, 'generation', 'rev')
if (at[1] or '') ~= found_generation or (at[2] or '') ~= found_rev then return 0 end
if redis.call('EXISTS', page) == 1 then
  redis.call('RENAME', page, aside)
  redis.call('EXPIRE', aside, {KEPT_SECONDS})
end
local now = redis.call('TIME')
redis.call('HSET', page, 'generation', generation, 'rev', rev, 'schema', schema, 'body', body, 'name', name,
           'seen', now[1], 'opens', tostring(now[1] + now[2] / 1000000 + closed))
redis.call('EXPIRE', page, {KEPT_SECONDS})
redis.call('SET', KEYS[2], generation .. ' ' .. rev, 'EX', {KEPT_SECONDS})
redis.call('HSETNX', marker, 'schema', schema)
return 1
"""


class Page(NamedTuple):
    """The book at a revision, decoded and as bytes. `name` is the generation of the page."""

    name: str
    rev: int
    pieces: Pieces
    raw: Mapping[str, Piece]

    @property
    def book(self) -> Book:
        return self.pieces.book


def page_in(name: str, body: bytes, rev: int, known: Page | None = None) -> Page:
    """The page of the generation `name` in `body`, the bytes of the revision `rev`.

    Pieces that are in the page `known` already are not decoded again. Raises ValueError, and one of
    UNREADABLE.
    """
    found = opened(body, rev, known.rev if known else -1)
    pieces = copy.copy(known.pieces) if known else Pieces()
    pieces.follow(found)
    for id, part in pieces.parts.items():
        owners = {ticket.owner for ticket in part.tickets}
        if part.section is not None:
            owners.add(part.section.owner.id)
        if owners - {id}:
            raise ValueError(f"the part of {id} is not its owner's")
    raw = {**(known.raw if known else {}), **found.pieces()}
    return Page(name, rev, pieces, {key: raw[key] for key in found.changed_at})


class Seen(NamedTuple):
    """A page as it was found in the Redis."""

    generation: str
    rev: int  # -1: the page cannot be read
    schema: int
    page: Page | None  # None: it cannot be read, is too large, or another version wrote it
    words: tuple[bytes, bytes] = (b"", b"")  # generation and revision, as stored
    seen_seconds: float = 0.0  # since an owner last marked it as seen


class HostPage(NamedTuple):
    """One host's page, for a reader of the pages of all hosts.

    The times in the book are readings of that host's own clock.
    """

    host: str  # its boot id: containers on one kernel are one host
    name: str  # the name of the machine that made the page
    # Seconds since an owner on the page's host last marked the page as seen. After two minutes,
    # perhaps no owner is left on this host.
    seen_seconds: float
    book: Book | None  # None: another version wrote it, or it cannot be read


def look_at(ask: Ask, key: str) -> Seen | None:
    """The page stored under `key`; None without a page. `ask` sends one command.

    Raises redis.exceptions.ResponseError if the value of `key` is not a hash.
    """
    generation, rev, schema, seen = ask("HMGET", key, "generation", "rev", "schema", "seen")
    size = ask("HSTRLEN", key, "body")
    if generation is None and rev is None and not size:
        return None
    words = generation or b"", rev or b""
    try:
        name, page = generation.decode(), None
        if int(schema) == SCHEMA and size <= MOST_BYTES:
            page = page_in(name, ask("HGET", key, "body"), int(rev))
        seconds = float(int(ask("TIME")[0]) - int(seen or 0))
        return Seen(name, int(rev), int(schema), page, words, seconds)
    except (*NOT_A_PAGE, AttributeError):  # the caller repairs a page that cannot be read
        return Seen("", -1, SCHEMA, None, words)


def all_pages(ask: Ask) -> tuple[HostPage, ...]:
    """The pages of all hosts, sorted by host. `ask` sends one command."""
    keys = set(_keys(ask, "MATCH", f"{PAGE}*"))
    now = int(ask("TIME")[0])
    return tuple(_host_page(ask, key, now) for key in sorted(keys))


def has_foreign_key(ask: Ask) -> bool:
    """Whether the database has a key of something else. The search ends at the first one."""
    return any(not key.startswith(b"gpu-console:") for key in _keys(ask))


def _keys(ask: Ask, *options: str) -> Iterator[bytes]:
    """The keys of the database, some of them perhaps twice."""
    cursor = b"0"
    while True:
        cursor, found = ask("SCAN", cursor, *options, "COUNT", 500)
        yield from found
        if cursor == b"0":
            return


def _host_page(ask: Ask, key: bytes, now: int) -> HostPage:
    name, seen, rev, schema, body = ask("HMGET", key, "name", "seen", "rev", "schema", "body")
    try:
        book = page_in("", body, int(rev)).book if int(schema) == SCHEMA else None
    except (*NOT_A_PAGE, AttributeError):  # the host is listed without figures
        book = None
    return HostPage(
        host=key.decode().removeprefix(PAGE),
        name=(name or b"").decode(errors="replace"),
        seen_seconds=max(0.0, float(now - int(seen or 0))),
        book=book,
    )
