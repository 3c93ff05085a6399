"""Who may look at the console and who may act, decided from what a request brings along.

Pure but for `visitor`, which asks Panel who looks at the page that is being made: no clock, environment or server here.
`gate.py` puts these questions to every request of a server; any other face on the same port can do the same.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from gpu_runtime.errors import NotAllowed

Role = Literal["operator", "viewer"]
OPERATOR: Role = "operator"
VIEWER: Role = "viewer"
GUEST = "guest"  # what Panel calls somebody who has not logged in, where its options let such people through


@dataclass(frozen=True)
class Visitor:
    """Somebody who has been let in. `may_act` is checked when something is done, not only when a button is shown."""

    name: str  # for the journal and the page; escape it where it is shown
    may_act: bool


@dataclass(frozen=True)
class Terms:
    """On what terms people are let in. Tokens stay out of its repr, and so out of tracebacks."""

    user: str  # who runs the server: the name of whoever brings the operator's token
    operator_token: str = field(repr=False)
    viewer_token: str = field(default="", repr=False)  # empty: there is none
    operators: frozenset[str] = frozenset()  # names that Panel's own login proves
    viewers: frozenset[str] = frozenset()
    read_only: bool = False  # nobody acts, whoever they are

    def visitor(self, role: Role, name: str = "") -> Visitor:
        """Somebody with that role, by the name that a login proved, else by the one that the token stands for."""
        return Visitor(
            name or (self.user if role == OPERATOR else VIEWER),
            role == OPERATOR and not self.read_only,
        )


def check(
    terms: Terms, *, authorization: str = "", cookie: str = "", query: str = ""
) -> Role | None:
    """The role that a request's tokens give it: its `Authorization` header, its cookie, its `?token=`. None: no role.

    Every token is compared in full, in constant time, whatever the others were: the time that it takes tells nothing.

    >>> terms = Terms("ann", operator_token="o" * 32, viewer_token="v" * 32)
    >>> check(terms, authorization="Bearer " + "v" * 32), check(terms, query="o" * 32), check(terms, cookie="o")
    ('viewer', 'operator', None)
    """
    found = set()
    for offered in (bearer(authorization), cookie, query):
        for role, token in ((OPERATOR, terms.operator_token), (VIEWER, terms.viewer_token)):
            if _same(offered, token) and token:
                found.add(role)
    return OPERATOR if OPERATOR in found else VIEWER if VIEWER in found else None


def bearer(authorization: str) -> str:
    """The token of an `Authorization` header: `Bearer TOKEN`, or `token TOKEN` as Jupyter's clients send it.

    >>> bearer("token abc"), bearer("Basic YTpi")
    ('abc', '')
    """
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() in ("bearer", "token") else ""


def role_of(name: str, terms: Terms) -> Role | None:
    """The role of a name that a login proved; None for names that nobody gave one, and for Panel's guests.

    >>> terms = Terms("ann", "", operators=frozenset({"bob"}), viewers=frozenset({"*"}))
    >>> role_of("bob", terms), role_of("eve", terms), role_of("guest", terms)
    ('operator', 'viewer', None)
    """
    if not name or name == GUEST:
        return None
    if name in terms.operators or "*" in terms.operators:
        return OPERATOR
    return VIEWER if name in terms.viewers or "*" in terms.viewers else None


def same_origin(origin: str, host: str, also: Iterable[str] = ()) -> bool:
    """Whether a page of that `Origin` may open a websocket to this `Host`: its own, or one that was named explicitly.

    A wildcard names nobody. The port counts: another user's server may run at the next one.

    >>> same_origin("http://box:8211", "box:8211"), same_origin("http://box:9999", "box:8211", also=["*"])
    (True, False)
    """
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    place = parts.netloc.lower()
    if parts.scheme not in ("http", "https") or not place:
        return False
    named = {
        name.lower().removesuffix(":80") for name in also if "*" not in name
    }  # Bokeh adds the port to a bare name
    return place == host.lower() or place in named


class Guesses:
    """Slows those who guess: a few wrong guesses are free, then one is looked at every second, and few may wait.

    Nobody is locked out by name or address. On a shared box all come from the same one.
    """

    def __init__(
        self, clock: Callable[[], float], *, free: int = 5, seconds: float = 1.0, waiting: int = 10
    ) -> None:
        self._clock, self._seconds = clock, seconds
        self._head_start = free * seconds
        self._most = waiting * seconds
        self._paid_until = clock()

    def wait_seconds(self) -> float | None:
        """How long the next guess has to wait; None where too many wait already, so that it is not even looked at."""
        wait = max(0.0, self._paid_until - self._clock() - self._head_start)
        return wait if wait < self._most else None

    def count(self) -> None:
        """One guess has been looked at."""
        self._paid_until = max(self._paid_until, self._clock()) + self._seconds


def visitor() -> Visitor:
    """Who looks at the page that Panel is making. Raises NotAllowed where the gate has let nobody in."""
    import panel as pn

    context = getattr(pn.state.curdoc, "session_context", None)
    found = getattr(getattr(context, "request", None), "visitor", None)
    if not isinstance(found, Visitor):
        raise NotAllowed(
            "the console is shown to those who were let in, with the token of its URL",
            verb="console",
        )
    return found


def _same(offered: str, token: str) -> bool:
    """Equal, told in a time that depends on neither; digests, because lengths would tell too."""
    digests = (
        hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in (offered, token)
    )
    return hmac.compare_digest(*digests)
