"""Decides which role a request has, from the credentials that the request carries. `gate.py` applies these rules.

This module is pure: it reads no clock, no environment and no server.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

Role = Literal["operator", "viewer"]
OPERATOR: Role = "operator"
VIEWER: Role = "viewer"
# The words after /v1 in the paths of calls. If a client forgets /v1, the server knows by this word which path is meant.
CALLS = (
    *("chat", "completions", "embeddings", "messages", "models", "rerank", "responses"),
    *("tokenize", "detokenize"),
)
PROBES = ("/livez", "/readyz")  # paths that programs on this machine may read without a token
API_PATHS = ("/v1/", "/v2/", "/api/", "/health", "/usage", *PROBES, *(f"/{word}" for word in CALLS))
GUEST = "guest"  # Panel's name for a visitor without a login, if its options admit such visitors


@dataclass(frozen=True)
class Visitor:
    """A person or program that the gate has admitted. Check `may_act` when an action runs, not only for its button."""

    name: str  # is written to the journal and shown on the page, where it must be escaped
    may_act: bool
    may_call: bool = False  # whether a visitor without `may_act` may nevertheless call models
    api_only: bool = False  # whether only the paths of API_PATHS are admitted
    # The user of this machine whose processes the visitor sees and may act on. Of every other user the visitor sees the
    # sum. Empty: all processes.
    member: str = ""


@dataclass(frozen=True)
class AccessRules:
    """The tokens, names and roles of one server. Its repr, and so a traceback, contains no token."""

    user: str  # the user who runs the server; the operator's token acts under this name
    operator_token: str = field(repr=False)
    viewer_token: str = field(default="", repr=False)  # empty: no viewer's token exists
    operators: frozenset[str] = frozenset()  # names that a login proves; "*" means every name
    viewers: frozenset[str] = frozenset()
    read_only: bool = False  # nobody may act, whatever the role
    # Returns the visitor with a key, or None. Keys are for programs, in addition to the two tokens.
    key_visitor: Callable[[str], Visitor | None] | None = field(default=None, repr=False)
    cors: frozenset[str] = frozenset()  # origins of pages that may send requests with a token

    def visitor(self, role: Role, name: str = "") -> Visitor:
        """The visitor of this `role`, under the `name` that a login proved.

        Without a name, an operator gets the name of the server's user, and a viewer gets the name "viewer".
        """
        token_name = self.user if role == OPERATOR else VIEWER
        return Visitor(name or token_name, role == OPERATOR and not self.read_only)


def role_of_tokens(
    rules: AccessRules, *, authorization: str = "", cookie: str = "", query: str = ""
) -> Role | None:
    """The highest role that a request's tokens give, or None.

    `authorization` is the whole header, `cookie` the value of this server's cookie, `query` that of `?token=`. Every
    token is compared with every known token in constant time, so the duration shows nothing about the tokens.

    >>> rules = AccessRules("ann", operator_token="o" * 32, viewer_token="v" * 32)
    >>> role_of_tokens(rules, authorization="Bearer " + "v" * 32), role_of_tokens(rules, query="o" * 32)
    ('viewer', 'operator')
    >>> role_of_tokens(rules, cookie="o") is None
    True
    """
    known: tuple[tuple[Role, str], ...] = (
        (OPERATOR, rules.operator_token),
        (VIEWER, rules.viewer_token),
    )
    offered = (bearer(authorization), cookie, query)
    found = {role for given in offered for role, token in known if _equal(given, token) and token}
    return next((role for role, _ in known if role in found), None)


def bearer(authorization: str) -> str:
    """The token of an `authorization` header: `Bearer TOKEN`, or `token TOKEN` as Jupyter's clients send it.

    >>> bearer("token abc"), bearer("Basic YTpi")
    ('abc', '')
    """
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() in ("bearer", "token") else ""


def role_of_name(name: str, rules: AccessRules) -> Role | None:
    """The role that `rules` give to a `name` that a login proved; None for an unknown name and for Panel's guests.

    >>> rules = AccessRules("ann", "", operators=frozenset({"bob"}), viewers=frozenset({"*"}))
    >>> role_of_name("bob", rules), role_of_name("eve", rules), role_of_name("guest", rules)
    ('operator', 'viewer', None)
    """
    if not name or name == GUEST:
        return None
    if name in rules.operators or "*" in rules.operators:
        return OPERATOR
    return VIEWER if name in rules.viewers or "*" in rules.viewers else None


def same_origin(origin: str, host: str, also: Iterable[str] = ()) -> bool:
    """Whether a page of this `origin` may send requests to this `host`: it is on it, or on a host in `also`.

    A wildcard in `also` matches nothing. The ports must be equal too, since another port may belong to another user.

    >>> same_origin("http://box:8211", "box:8211"), same_origin("http://box:9999", "box:8211", also=["*"])
    (True, False)
    """
    try:
        parts = urlsplit(origin)
    except ValueError:  # not an address, so no origin
        return False
    origin_host = parts.netloc.lower()
    if parts.scheme not in ("http", "https") or not origin_host:
        return False
    # Bokeh adds ":80" to a name without a port.
    allowed = {name.lower().removesuffix(":80") for name in also if "*" not in name}
    return origin_host == host.lower() or origin_host in allowed


class GuessLimiter:
    """Slows down the answers to wrong tokens of one stranger (a client without a right token).

    The first `free` refusals are sent at once, then one every `seconds` by the `clock`, and at most `waiting` may wait.
    A request that is admitted is never delayed, so a flood of wrong tokens keeps nobody out.
    """

    def __init__(
        self, clock: Callable[[], float], *, free: int = 5, seconds: float = 1.0, waiting: int = 10
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._free_seconds = free * seconds
        self._longest_wait = waiting * seconds
        self._used_until = clock()

    def wait_seconds(self) -> float | None:
        """The seconds until the next guess is answered; None: too many wait, so it must not be checked."""
        wait = max(0.0, self._used_until - self._clock() - self._free_seconds)
        return wait if wait < self._longest_wait else None

    def count(self) -> None:
        """Counts one wrong guess."""
        self._used_until = max(self._used_until, self._clock()) + self._seconds


def _equal(offered: str, token: str) -> bool:
    """Whether `offered` and `token` are equal, compared in the same time for any two values of any lengths."""
    digests = [
        hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in (offered, token)
    ]
    return hmac.compare_digest(*digests)
