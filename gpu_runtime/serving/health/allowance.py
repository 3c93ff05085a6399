"""The limits of each key: requests and tokens in any minute.

A call reserves its tokens before it starts, so that simultaneous calls together stay within a limit. At the end of
the call, the counted tokens replace the reserved tokens. All calls of a key are counted in one event loop, so no lock
is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...access_keys import AccessKey
from ..requests import Refused

WINDOW_SECONDS = 60.0
# If the caller sets no limit, this number of tokens is reserved for the answer, and the answer cannot be longer.
UNSAID_TOKENS = 1024


class TokenGrant:
    """The tokens of one running call. The `with` block of `granted` sets `used` to the counted tokens.

    If `used` is still None at the end of the call, the call is taken to have used its `reserved` tokens.
    """

    def __init__(self, prompt: int, answer: int | None) -> None:
        """The tokens of a call that reads `prompt` tokens and writes at most `answer` tokens; None means no limit."""
        self.answer = answer
        self.reserved = prompt + (answer or 0)
        self.used: int | None = None


class _Recent:
    """The calls of one key that began or ended in the last minute, and the calls of the key that run now."""

    def __init__(self) -> None:
        self.begun: deque[float] = deque()  # the time of the start
        self.ended: deque[tuple[float, int]] = deque()  # the time of the end, and the tokens
        self.running: set[TokenGrant] = set()


class Allowance:
    """The requests and tokens that each key has used in the last minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._recent: dict[str, _Recent] = {}

    @contextmanager
    def granted(
        self, name: str, key: AccessKey, prompt: int, asked: int | None, least: int = 1
    ) -> Iterator[TokenGrant]:
        """A context manager in which a call of the `key` called `name` runs.

        `prompt` is about the number of tokens in the prompt. `asked` is the caller's limit for the answer in tokens, or
        None. `least` is the length in tokens of the shortest possible answer.

        If `asked` is None and the key has a limit of tokens, the answer may have UNSAID_TOKENS or `least`, whichever is
        more, but at most the tokens that the key has left.

        The call needs the tokens of its prompt and `asked` tokens, or `least` if `asked` is None. Raises Refused with
        400 if the key may not use so many tokens in a minute. Raises Refused with 429 if the key has fewer tokens left
        in this minute, or has no request left.
        """
        recent = self._recent.setdefault(name, _Recent())
        now = self._clock()
        _forget(recent, now - WINDOW_SECONDS)
        self._require_request(name, key, recent, now)
        grant = self._grant(name, key, recent, prompt, asked, least)
        recent.begun.append(now)
        recent.running.add(grant)
        try:
            yield grant
        finally:
            recent.running.discard(grant)
            used = grant.reserved if grant.used is None else grant.used
            recent.ended.append((self._clock(), used))

    def _require_request(self, name: str, key: AccessKey, recent: _Recent, now: float) -> None:
        limit = key.requests_a_minute
        if limit is not None and len(recent.begun) >= limit:
            wait = recent.begun[-limit] + WINDOW_SECONDS - now
            raise _refusal(name, f"{limit} requests", wait)

    def _grant(
        self,
        name: str,
        key: AccessKey,
        recent: _Recent,
        prompt: int,
        asked: int | None,
        least: int,
    ) -> TokenGrant:
        limit = key.tokens_a_minute
        if limit is None:
            return TokenGrant(prompt, asked)
        needed = prompt + (least if asked is None else asked)
        if needed > limit:
            text = f"the call has about {needed} tokens; the key {name} has {limit} a minute"
            raise Refused(400, "over_limit", text)
        taken = sum(tokens for _, tokens in recent.ended)
        taken += sum(grant.reserved for grant in recent.running)
        if taken + needed > limit:
            first = recent.ended[0][0] if recent.ended else self._clock()
            raise _refusal(name, f"{limit} tokens", first + WINDOW_SECONDS - self._clock())
        if asked is None:
            return TokenGrant(prompt, min(max(least, UNSAID_TOKENS), limit - taken - prompt))
        return TokenGrant(prompt, asked)


def _forget(recent: _Recent, before: float) -> None:
    while recent.begun and recent.begun[0] <= before:
        recent.begun.popleft()
    while recent.ended and recent.ended[0][0] <= before:
        recent.ended.popleft()


def _refusal(name: str, limit: str, wait: float) -> Refused:
    text = f"the key {name} has {limit} a minute, which are used. Try again in {wait:.0f} s."
    return Refused(429, "rate_limit_exceeded", text, max(1.0, wait))
