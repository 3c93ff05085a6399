"""The keys in a Redis and the two scripts that write them: a page per host, and a marker.

    gpu-console:ledger            the marker of a database that belongs to gpu-console; a hash with
                                  the schema
    gpu-console:page:BOOT-ID      a hash: generation, rev, schema, body; nonce (of the last write),
                                  opens (when grants begin), seen (when an owner last looked), name
                                  (of the machine that made it)
    gpu-console:beside:BOOT-ID:KIND   a hash of the owners' maps, names or answers
    gpu-console:damaged:…         a damaged page that was set aside; it expires after a week

Nothing here decides what is lawful or which page is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...facts import SCHEMA, Book
from ..pieces import UNREADABLE, Piece, Pieces, opened
from .connection import Ask

MOST_BYTES = 4 << 20  # a larger page was not written by gpu-console
# A page expires if no owner has read it for this long. An owner that still lives then makes the
# page again.
KEPT_SECONDS = 7 * 86400
SEEN_SECONDS = 60.0  # how often an owner marks its host's page as seen

NOT_A_PAGE = (ValueError, TypeError, *UNREADABLE)
MARKER = "gpu-console:ledger"  # marks a database that belongs to gpu-console
PAGE = "gpu-console:page:"
BESIDE = "gpu-console:beside:"

LOOK_OR_WRITE = f"""
local page, now = KEYS[1], redis.call('TIME')
local at = redis.call('HMGET', page, 'generation', 'rev', 'schema')
if not at[1] then return {{'gone'}} end
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
return {{'written'}}
"""

MAKE = f"""
local page, marker, aside = KEYS[1], KEYS[2], KEYS[3]
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


def page_in(name: str, body: bytes, rev: int, known: Pieces | None = None) -> Page:
    """The page of the generation `name` in `body`, the bytes of the revision `rev`.

    Pieces that are in the book `known` already are not decoded again. Raises ValueError, and one of
    UNREADABLE.
    """
    found, pieces = opened(body, rev), (known or Pieces()).copy()
    pieces.follow(found)
    for id, part in pieces.parts.items():
        owners = {ticket.owner for ticket in part.tickets}
        if part.section is not None:
            owners.add(part.section.owner.id)
        if owners - {id}:
            raise ValueError(f"the part of {id} is not its owner's")
    return Page(name, rev, pieces, found.contents())


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
    keys = _page_keys(ask)
    now = int(ask("TIME")[0])
    return tuple(_host_page(ask, key, now) for key in sorted(keys))


def _page_keys(ask: Ask) -> set[bytes]:
    keys: set[bytes] = set()
    cursor = b"0"
    while True:
        cursor, found = ask("SCAN", cursor, "MATCH", f"{PAGE}*", "COUNT", 500)
        keys.update(found)
        if cursor == b"0":
            return keys


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
