"""What is answered to those who have not been let in: a refusal, a place to type the token, or the way in.

Nothing here decides; the gate does. No page here loads anything, names anybody or tells what runs behind it.
"""

from __future__ import annotations

import asyncio
import html
from typing import TYPE_CHECKING, Any

from tornado.web import RequestHandler, stream_request_body

if TYPE_CHECKING:
    from .gate import Gate

ASK = "This console is shown to those who bring its token. The URL with it is printed where the server was started."
WRONG = "This is not the token of the server that runs now: each start makes a new one, and prints it in its URL."
MANY = "Too many wrong tokens have been tried. Wait a few seconds, then try again."
FOREIGN = "This request came from a page of another origin."
OTHERS = "This session is another visitor's. Open the page anew."
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


def page(words: str, *, form: bool) -> str:
    """A page of one sentence."""
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>GPU console</title>
<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>
<body><main><h1>GPU console</h1><p>{html.escape(words)}</p>{_FORM if form else ""}</main></body></html>"""


def as_json(words: str, status: int) -> dict[str, Any]:
    """The sentence for programs, as OpenAI's clients read errors."""
    return {
        "error": {
            "message": words,
            "type": "rate_limit_error" if status == 429 else "invalid_request_error",
            "code": None,
            "param": None,
        }
    }


class Door(RequestHandler):
    """Refuses, after a while where somebody guessed; with a form, a token may be typed instead."""

    def initialize(
        self, gate: Gate, status: int, words: str, form: bool = False, wait: float = 0.0
    ) -> None:
        self._gate, self._status, self._words, self._form, self._wait = (
            gate,
            status,
            words,
            form,
            wait,
        )

    async def prepare(self) -> None:
        if not (self._form and self.request.method == "POST"):
            await self._refuse(self._status, self._words, self._wait)

    async def post(self) -> None:
        token = self.get_body_argument("token", "")
        opened, wait = self._gate.try_token(token)
        if opened:
            self._gate.welcome(self, opened)
        elif wait is None:
            await self._refuse(429, MANY, 0.0)
        else:
            await self._refuse(403, WRONG, wait)

    def check_xsrf_cookie(self) -> None:
        """The form asks for a secret; who knows it needs no other proof."""

    async def _refuse(self, status: int, words: str, wait: float) -> None:
        if wait:
            await asyncio.sleep(wait)
        program = "text/html" not in self.request.headers.get("Accept", "text/html")
        if (
            program and status == 403 and self._form
        ):  # a token would do: what HTTP calls unauthorized
            status = 401
            self.set_header("WWW-Authenticate", "Bearer")
        self.set_status(status)
        if status == 429:
            self.set_header("Retry-After", "10")
        self.finish(as_json(words, status) if program else page(words, form=self._form))


@stream_request_body
class TooLarge(Door):
    """Refuses a body by its head. A client that does not wait for that is let finish, and what it sends is forgotten:
    hung up on while it sends, it would never hear why."""

    async def prepare(self) -> None:
        if self.request.headers.get("Expect", "").lower() == "100-continue":
            await super().prepare()

    def data_received(self, chunk: bytes) -> None: ...

    async def post(self) -> None:
        await self._refuse(self._status, self._words, 0.0)

    get = head = put = patch = delete = options = post  # type: ignore[assignment]


class Welcome(RequestHandler):
    """Leads whoever brought a token in its URL to the same page without it."""

    def initialize(self, gate: Gate, role: Any) -> None:
        self._gate, self._role = gate, role

    def get(self) -> None:
        self._gate.welcome(self, self._role)

    head = get
