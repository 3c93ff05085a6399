"""What a visitor's key allows: which models, which importance, and how many calls and tokens in a minute.

A visitor who sends the key NAME is called `key:NAME`. A visitor who sends the operator's token has no limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from ..access_keys import AccessKey, Keys, name_of
from ..facts import parse_importance
from ..web.auth import Visitor
from .choices import TASK_PREFIX
from .engines.openai_format import max_tokens_of
from .health.allowance import Allowance
from .health.costs import prompt_tokens
from .request_log import CallRecord, current
from .requests import Call, Refused, prompts_of
from .routing.fallback import Choice
from .usage import Usage

BEGIN = "key:"  # a visitor's name begins with this if the visitor has a key
_WRITTEN = ("chat", "completions")
_TIME_OUT = 504  # after this status the call's tokens count: an engine may have worked for it
_NOT_BEGUN = "budget_too_short"  # with this code of a time-out, no engine was asked


def visitor_of(keys: Keys, offered: str, *, read_only: bool) -> Visitor | None:
    """The visitor with the `offered` key, or None if there is no such key in `keys`.

    If `read_only` is true, the visitor may not call models.
    """
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
        """The context manager of `admitted` for a visitor with a `key`."""
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
                call = _limited(call, grant.answer // choices)
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
        """The `choices` whose models the key of `visitor` allows.

        If the call names a task, all `choices` stay, because the key allows the task by its name.

        Raises Refused (403) if no choice is left.
        """
        if call.model.startswith(TASK_PREFIX):
            return choices
        found = tuple(choice for choice in choices if self.may_call(visitor, choice.model))
        if not found:
            text = (
                f"the stand-ins of {call.model} that could answer now are not allowed for this key"
            )
            raise Refused(403, "model_not_allowed", text, param="model")
        return found

    def _key(self, visitor: str) -> AccessKey | None:
        if not visitor.startswith(BEGIN):
            return None
        key = self._keys().get(visitor.removeprefix(BEGIN))
        if key is None:  # the key was removed a moment ago
            raise Refused(401, "no_key", "this key was removed")
        return key


def _limited(call: Call, most: int) -> Call:
    """The `call`, changed so that each of the `n` texts of its answer has at most `most` tokens."""
    name = "max_completion_tokens" if "max_completion_tokens" in call.body else "max_tokens"
    asked = call.body.get(name)
    most = most if asked is None else min(most, asked)
    return replace(call, body={**call.body, name: most})
