"""What a visitor's key allows: which models, which importance, and how many calls and tokens in a minute.

A visitor who sends the key NAME is called `key:NAME`. A visitor who sends the operator's token has no limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from ..access_keys import AccessKey, Keys, name_of
from ..facts import parse_importance
from ..web.auth import Visitor
from .choices import TASK_PREFIX, Choice
from .engines.openai_format import max_tokens_of
from .records import CallRecord, Usage, current, prompt_tokens
from .requests import Call, Refused, prompts_of

BEGIN = "key:"  # a visitor's name begins with this if the visitor has a key
_WRITTEN = ("chat", "completions")
_TIME_OUT = 504  # after this status the call's tokens count: an engine may have worked for it
_NOT_BEGUN = "budget_too_short"  # with this code of a time-out, no engine was asked


def visitor_of(keys: Keys, offered: str, *, read_only: bool) -> Visitor | None:
    """The visitor with the `offered` one of the `keys`, or None. If `read_only`, the visitor may not call models."""
    name = name_of(keys, offered)
    if not name:
        return None
    calls = keys[name].role == "user"
    return Visitor(BEGIN + name, False, may_call=calls and not read_only, api_only=calls)


class KeyRules:
    """The rules of the keys for the calls of one gateway."""

    def __init__(self, keys: Callable[[], Keys], clock: Callable[[], float], usage: Usage) -> None:
        """`keys()` returns the current keys. `clock` returns seconds. `usage` counts the calls of all visitors."""
        self._keys = keys
        self._usage = usage
        self._allowance = Allowance(clock)

    def may_call(self, visitor: str, model: str) -> bool:
        """Whether this `visitor` may call the `model`."""
        key = self._key(visitor)
        return key is None or key.may_call(model)

    @contextmanager
    def admitted(self, call: Call, visitor: str) -> Iterator[Call]:
        """A context manager in which the `call` of this `visitor` runs. Yields the call, limited by the visitor's key.

        Raises Refused with 403 for a model that is not allowed, and with 429 if a limit is reached. At the end, adds
        the call's tokens to the usage.
        """
        key = self._key(visitor)
        record = current()
        try:
            if key is None:
                yield call
            else:
                with self._of_key(key, call, visitor, record) as limited:
                    yield limited
        finally:
            if "completion_tokens" in record.facts:
                self._usage.add(visitor, record.facts)

    @contextmanager
    def _of_key(
        self, key: AccessKey, call: Call, visitor: str, record: CallRecord
    ) -> Iterator[Call]:
        if not key.may_call(call.model):
            text = f"the key {visitor.removeprefix(BEGIN)} may not call {call.model[:64]!r}"
            raise Refused(403, "model_not_allowed", text, param="model")
        if key.importance is not None:
            call = replace(call, highest=parse_importance(key.importance))
        prompts = len(prompts_of(call.body)) if call.kind == "completions" else 1
        choices = prompts * (call.body.get("n") or 1)
        asked = max_tokens_of(call.body) if call.kind in _WRITTEN else 0
        total = None if asked is None else asked * choices
        name = visitor.removeprefix(BEGIN)
        with self._allowance.granted(name, key, prompt_tokens(call), total, choices) as grant:
            if grant.answer is not None and call.kind in _WRITTEN:
                # Each of the `n` texts of the answer may have so many tokens.
                most, asked = grant.answer // choices, max_tokens_of(call.body)
                in_body = "max_completion_tokens" in call.body
                name = "max_completion_tokens" if in_body else "max_tokens"
                most = most if asked is None else min(most, asked)
                call = replace(call, body={**call.body, name: most})
            try:
                yield call
            except Refused as refused:
                if refused.status != _TIME_OUT or refused.code == _NOT_BEGUN:
                    grant.used = 0
                raise
            finally:
                if "completion_tokens" in record.facts:
                    facts = record.facts
                    grant.used = facts["prompt_tokens"] + facts["completion_tokens"]

    def allowed(self, choices: tuple[Choice, ...], call: Call, visitor: str) -> tuple[Choice, ...]:
        """The `choices` whose models the key of `visitor` allows. Raises Refused (403) if none is left.

        If the call names a task, all `choices` stay, because the key allows the task by its name.
        """
        if call.model.startswith(TASK_PREFIX):
            return choices
        found = tuple(choice for choice in choices if self.may_call(visitor, choice.model))
        if not found:
            which = f"the fallbacks of {call.model} that could answer now"
            text = f"{which} are not allowed for this key"
            raise Refused(403, "model_not_allowed", text, param="model")
        return found

    def _key(self, visitor: str) -> AccessKey | None:
        if not visitor.startswith(BEGIN):
            return None
        key = self._keys().get(visitor.removeprefix(BEGIN))
        if key is None:  # the key was removed a moment ago
            raise Refused(401, "no_key", "this key was removed")
        return key


WINDOW_SECONDS = 60.0
# If the caller sets no limit, this number of tokens is reserved for the answer, and the answer cannot be longer.
UNSAID_TOKENS = 1024


class TokenGrant:
    """The tokens of one running call: `prompt`, and at most `answer` (None: no limit). `used` are those counted."""

    def __init__(self, prompt: int, answer: int | None) -> None:
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
    """The requests and tokens that each key has used in the last minute.

    A call reserves its tokens before it starts, so that simultaneous calls stay within a limit. At its end, the counted
    tokens replace the reserved ones. All calls of a key are counted in one event loop, so no lock is needed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._recent: dict[str, _Recent] = {}

    @contextmanager
    def granted(
        self, name: str, key: AccessKey, prompt: int, asked: int | None, least: int = 1
    ) -> Iterator[TokenGrant]:
        """A context manager in which a call of the `key` called `name` runs.

        `prompt` is about the number of tokens in the prompt. `asked` is the caller's limit for the answer in tokens, or
        None. `least` is the length in tokens of the shortest possible answer. If `asked` is None and the key has a
        limit of tokens, the answer may have UNSAID_TOKENS or `least`, whichever is more, but at most the tokens that
        the key has left.

        The call needs the tokens of its prompt and `asked` tokens, or `least` if `asked` is None. Raises Refused with
        400 if the key may not use so many tokens in a minute, and with 429 if it has fewer left now, or no request
        left.
        """
        recent = self._recent.setdefault(name, _Recent())
        now = self._clock()
        _forget(recent, now - WINDOW_SECONDS)
        limit = key.requests_a_minute
        if limit is not None and len(recent.begun) >= limit:
            wait = recent.begun[-limit] + WINDOW_SECONDS - now
            raise _refusal(name, f"{limit} requests", wait)
        grant = self._grant(name, key, recent, prompt, asked, least)
        recent.begun.append(now)
        recent.running.add(grant)
        try:
            yield grant
        finally:
            recent.running.discard(grant)
            used = grant.reserved if grant.used is None else grant.used
            recent.ended.append((self._clock(), used))

    def _grant(
        self, name: str, key: AccessKey, recent: _Recent, prompt: int, asked: int | None, least: int
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
