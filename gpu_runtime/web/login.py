"""The answers to requests that the gate has not admitted: a refusal, a form for the token, or a redirect to the page.

The gate decides which answer is sent. These pages load no resource, and name no user and no software.
"""

from __future__ import annotations

import asyncio
import html
from typing import Any

from tornado.web import RequestHandler, stream_request_body

from .auth import Role

TOKEN_NEEDED = "A token is needed. Open the URL that was printed where the server was started."
WRONG_TOKEN = (
    "This token is not valid. Each start of the server makes a new one and prints it in its URL."
)
TOO_MANY_GUESSES = "Too many wrong tokens were tried. Wait a few seconds, then try again."
TOO_MANY_SECONDS = 10.0  # until that refusal is sent
FOREIGN_ORIGIN = "This request came from a page of another origin."
KEY_IS_FOR_CALLS = "This key is for calls of models. It opens no other page."
OTHER_VISITORS_SESSION = "This session belongs to another visitor. Open the page again."
_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { margin: 0; min-height: 100vh; display: grid; place-items: center; }
main { max-width: 32rem; padding: 2rem; }
h1 { font-size: 1.25rem; margin: 0 0 .75rem; }
p { margin: 0 0 1.25rem; }
form { display: flex; gap: .5rem; }
input { flex: 1; min-width: 0; font: inherit; padding: .5rem .75rem; border: 1px solid #8888; border-radius: .5rem; }
button { font: inherit; padding: .5rem 1rem; border: 0; border-radius: .5rem; background: #1763b6; color: #fff; }
"""
_FORM = """<form method="post">
<input name="token" type="password" autocomplete="off" aria-label="token" placeholder="token" autofocus required>
<button>Open</button></form>"""


def page(text: str, *, form: bool) -> str:
    """An HTML page with one sentence, `text`; with `form`, also with a field for the token."""
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>GPU console</title>
<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>
<body><main><h1>GPU console</h1><p>{html.escape(text)}</p>{_FORM if form else ""}</main></body></html>"""


def as_json(text: str, status: int) -> dict[str, Any]:
    """The error with the sentence `text` and the HTTP `status`, in the format that OpenAI's clients read."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": text, "type": kind, "code": None, "param": None}}


class RefusalHandler(RequestHandler):
    """Refuses the request. If the answer has a form, the visitor can type a token in it."""

    def initialize(
        self, gate: Any, status: int, text: str, form: bool = False, wait: float = 0.0
    ) -> None:
        """Sends `status` and `text` after `wait` seconds; with a `form` for a token, which `gate` checks."""
        self._gate = gate
        self._status = status
        self._text = text
        self._form = form
        self._wait = wait

    async def prepare(self) -> None:
        """Refuses the request at once, unless it is a form in which a user typed a token."""
        if not (self._form and self.request.method == "POST"):
            await self._refuse(self._status, self._text, self._wait)

    async def post(self) -> None:
        role, wait = self._gate.try_token(self.request, self.get_body_argument("token", ""))
        if role:
            self._gate.redirect_inside(self, role)
        elif wait is None:
            await self._refuse(429, TOO_MANY_GUESSES, TOO_MANY_SECONDS)
        else:
            await self._refuse(403, WRONG_TOKEN, wait)

    def check_xsrf_cookie(self) -> None:
        """Checks nothing, since the form itself contains a secret, the token."""

    async def _refuse(self, status: int, text: str, wait: float) -> None:
        if wait:
            await asyncio.sleep(wait)
        is_program = "text/html" not in self.request.headers.get("Accept", "text/html")
        if is_program and status == 403 and self._form:
            status = 401  # the same request with a token may be admitted
            self.set_header("WWW-Authenticate", "Bearer")
        self.set_status(status)
        if status == 429:
            self.set_header("Retry-After", "10")
        self.finish(as_json(text, status) if is_program else page(text, form=self._form))


@stream_request_body
class TooLargeHandler(RefusalHandler):
    """Refuses a request that announces a too large body.

    If the client sends the body without waiting for `100 Continue`, the body is read and discarded. If the server
    closed the connection instead, the client would not read the reason of the refusal.
    """

    async def prepare(self) -> None:
        """Refuses a client that waits for permission to send the body."""
        if self.request.headers.get("Expect", "").lower() == "100-continue":
            await super().prepare()

    def data_received(self, chunk: bytes) -> None:
        """Discards `chunk`."""

    async def post(self) -> None:
        """Refuses the request after its whole body was received."""
        await self._refuse(self._status, self._text, 0.0)

    get = head = put = patch = delete = options = post  # type: ignore[assignment]


class RedirectHandler(RequestHandler):
    """Redirects a request with a token in its URL, which gave the `role`, to the same page without it."""

    def initialize(self, gate: Any, role: Role) -> None:
        self._gate = gate
        self._role = role

    def get(self) -> None:
        self._gate.redirect_inside(self, self._role)

    head = get
