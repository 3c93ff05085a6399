"""Circuit breakers, with which a model that keeps failing gets no calls for a while, and the cause of each error.

Five failures in a row open a model's breaker. While it is open, calls fail at once. After 30 s exactly one call
passes as a probe, and all others still fail at once. If the probe succeeds the breaker closes; if it fails, the
breaker stays open for another 30 s. A client that has no part in the failures need not wait: its next call is the
probe. So one client cannot close a model for the others.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

from .. import errors
from ..errors import first_line
from ..facts import Value
from .queue import LoadShared
from .requests import Refused

FAILURES = 5
OPEN_SECONDS = 30.0
MAX_BREAKERS = 1000


class BreakerState(Value):
    """The state of a model's breaker."""

    state: str  # closed, open or half-open
    failures: int  # in a row
    retry_after: float = 0.0  # seconds until a probe may pass; 0: now
    last: str = ""  # the last failure, in words


class BreakerOpen(Exception):
    """Raised for a call of a model that has failed too often. After `retry_after` seconds, one call may pass."""

    def __init__(self, model: str, state: BreakerState) -> None:
        self.model = model
        self.state = state
        self.retry_after = max(state.retry_after, 1.0)
        super().__init__(
            f"{model} has failed {state.failures} times in a row and is left alone for another "
            f"{math.ceil(self.retry_after)} s; the last time: {state.last}"
        )


class Permit:
    """Permission to make one call, the `probe` of an open breaker or not. Without an outcome it does not count."""

    def __init__(self, breaker: _Breaker, probe: bool, client: str) -> None:
        self._breaker = breaker
        self.probe = probe
        self.client = client
        self._reported = False

    def succeeded(self) -> None:
        """Reports that the call succeeded."""
        self._report(None, counts=True)

    def failed(self, error: BaseException) -> None:
        """Reports that the model failed with this `error`."""
        self._report(error, counts=True)

    def withdrawn(self) -> None:
        """Reports that the outcome shows nothing about the model. After a probe, the next call may be one."""
        self._report(None, counts=False)

    def _report(self, error: BaseException | None, counts: bool) -> None:
        if not self._reported:
            self._reported = True
            self._breaker.ended(self, error, counts)


class Breakers:
    """One breaker for each model, for the calls of this process."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        failures: int = FAILURES,
        open_seconds: float = OPEN_SECONDS,
    ) -> None:
        """A breaker opens for `open_seconds` after `failures` failures in a row. `clock` returns seconds."""
        self._clock = clock
        self._failures = failures
        self._open_seconds = open_seconds
        self._breakers: dict[str, _Breaker] = {}

    def enter(self, model: str, client: str = "") -> Permit:
        """Permission for a call of `model` by `client` now. Raises BreakerOpen."""
        if model not in self._breakers:
            self._make_room()
            breaker = _Breaker(model, self._clock, self._failures, self._open_seconds)
            self._breakers[model] = breaker
        return self._breakers[model].enter(client)

    def state(self, model: str) -> BreakerState:
        """The state of the breaker of `model`; closed if the model was never called."""
        breaker = self._breakers.get(model)
        return breaker.state() if breaker else BreakerState("closed", 0)

    def states(self) -> dict[str, BreakerState]:
        """The states of all models that were called, by name."""
        return {model: breaker.state() for model, breaker in list(self._breakers.items())}

    def _make_room(self) -> None:
        """Forgets the oldest closed breaker, or the oldest, of too many: callers can invent names of clouds' models."""
        if len(self._breakers) < MAX_BREAKERS:
            return
        states = self.states().items()
        closed = (model for model, state in states if state.state == "closed")
        del self._breakers[next(closed, next(iter(self._breakers)))]


class _Breaker:
    def __init__(
        self, model: str, clock: Callable[[], float], failures: int, seconds: float
    ) -> None:
        self._model = model
        self._clock = clock
        self._failures = failures
        self._seconds = seconds
        self._opened: float | None = None  # None: the breaker is closed
        self._probe: Permit | None = None
        self._last = ""
        self._in_a_row = 0
        self._clients: set[str] = set()  # of the failures in a row

    def enter(self, client: str) -> Permit:
        """Permission for a call of `client` now. Raises BreakerOpen."""
        if self._opened is None:
            return Permit(self, probe=False, client=client)
        is_due = self._seconds_left(self._opened) <= 0 or client not in self._clients
        if is_due and self._probe is None:
            self._probe = Permit(self, probe=True, client=client)
            return self._probe
        raise BreakerOpen(self._model, self.state())

    def ended(self, call: Permit, error: BaseException | None, counts: bool) -> None:
        """Records that the call with the permit `call` ended, and its outcome if it `counts`: an `error`, or a success.

        While the breaker is not closed, only the probe's outcome counts.
        """
        if call is self._probe:
            self._probe = None
        elif self._opened is not None:
            return  # the call began before the breaker opened; only the probe shows the present state
        if not counts:
            return
        if error is None:
            self._opened, self._in_a_row = None, 0
            self._clients.clear()
            return
        self._in_a_row += 1
        self._clients.add(call.client)
        self._last = first_line(error)[:200]
        if call.probe or self._in_a_row >= self._failures:
            self._opened = self._clock()

    def state(self) -> BreakerState:
        if self._opened is None:
            return BreakerState("closed", self._in_a_row, 0.0, self._last)
        left = self._seconds_left(self._opened)
        state = "half-open" if self._probe else "open"
        return BreakerState(state, self._in_a_row, 0.0 if self._probe else left, self._last)

    def _seconds_left(self, opened: float) -> float:
        return max(0.0, opened + self._seconds - self._clock())


# -- the cause of an error (the caller, the model or neither), and the refusal that the caller gets
#
# Only faults of an engine open a model's circuit breaker. Mistakes of callers, mistakes in the catalogue and a lack of
# memory do not open it. Another model may answer instead, unless the caller caused the error.

_NOT_OF_THE_MODEL = (
    errors.Busy, errors.WaitEnded, errors.Deadlock, errors.LedgerUnavailable, errors.NotLoaded,
    errors.CatalogUnavailable, errors.BadDocument, errors.BadSetting, errors.BadSize,
    errors.UnknownDevice, errors.CannotGovern, errors.DoesNotFit, errors.StillInUse, LoadShared,
    BreakerOpen,
)  # fmt: skip


# A call that every healthy model of its kind answers. It is made after a fault: if it is answered, the call before it
# was the cause. Images have none, because each takes long.
PLAIN_TEXT = "a"
PLAIN_CALLS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": PLAIN_TEXT}], "max_tokens": 1},
    "completions": {"prompt": PLAIN_TEXT, "max_tokens": 1},
    "embeddings": {"input": PLAIN_TEXT},
    "rerank": {"query": PLAIN_TEXT, "documents": [PLAIN_TEXT]},
    "tokenize": {"prompt": PLAIN_TEXT},
    "detokenize": {"tokens": [1]},
}
_ENGINE_GONE = (errors.EngineDied, errors.ProcessLost, errors.LoadFailed)


# The HTTP status of an error of this package: of the first class here that matches, else 503.
_STATUSES = {
    errors.BadSetting: 400,
    errors.NotAllowed: 403,
    errors.ModelDisabled: 403,
    errors.UnknownModel: 404,
    errors.UnknownDevice: 404,
    errors.StillInUse: 409,
    errors.DoesNotFit: 507,  # which clients do not repeat
}
_REFUSED_AT_ONCE = (  # no other model is tried. Code and parameter of the refusal
    (errors.UnknownModel, "model_not_found", "model"),
    (errors.ModelDisabled, "model_disabled", "model"),
    (errors.NotAllowed, "not_allowed", None),
)


def status_of(error: BaseException) -> int:
    """The HTTP status of an answer that is this `error`. A call that several models failed to answer: `no_answer`."""
    return next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 503)


def refusal_of(error: BaseException) -> Refused:
    """The refusal with which a request is answered that raised this `error` of the package."""
    return Refused(status_of(error), type(error).__name__, " ".join(str(error).split()))


class Blame(enum.Enum):
    """The cause of an error."""

    CALLER = "caller"
    MODEL = "model"
    NOBODY = "nobody"


def blame(error: BaseException, model: str) -> tuple[Blame, Refused | None]:
    """The cause of an `error` of `model`, and the refusal with which the call is answered.

    The refusal is None if `no_answer` makes it later, from the errors of all models that were tried.
    """
    if isinstance(error, Refused):
        return (Blame.CALLER if error.status < 500 else Blame.NOBODY), error
    if isinstance(error, errors.BadCall):
        text = f"{model} refused: {getattr(error, 'why', error)}"
        return Blame.CALLER, Refused(400, "engine_refused", text)
    for kind, code, param in _REFUSED_AT_ONCE:
        if isinstance(error, kind):
            return Blame.NOBODY, Refused(status_of(error), code, str(error), param=param)
    if isinstance(error, _NOT_OF_THE_MODEL) or getattr(error, "mistake", False):
        return Blame.NOBODY, None
    if isinstance(error, ValueError):  # a library rejected an argument
        return Blame.CALLER, Refused(400, "engine_refused", f"{model} refused: {first_line(error)}")
    return Blame.MODEL, None


def may_be_of_the_call(error: BaseException, kind: str, model: str) -> bool:
    """Whether a plain call can show the cause of `error`: the engine of `model` runs, or has sent a status."""
    is_fault = blame(error, model)[0] is Blame.MODEL
    gone = isinstance(error, _ENGINE_GONE) or getattr(error, "reloads", False)
    is_silent = getattr(error, "status", 500) is None
    return is_fault and kind in PLAIN_CALLS and not gone and not is_silent


def no_answer(asked: str, failed: Sequence[tuple[str, BaseException]]) -> Refused:
    """The refusal of a call of `asked` after all `failed`: 507 if none fits, else 503."""
    reasons = list(dict.fromkeys(f"{model}: {first_line(error)}" for model, error in failed))
    waits = [error.retry_after for _, error in failed if isinstance(error, BreakerOpen)]
    code = "breaker_open" if len(waits) == len(failed) else "no_answer"
    text = f"{asked} could not be answered. " + " · ".join(reasons)
    if failed and all(isinstance(error, errors.DoesNotFit) for _, error in failed):
        return Refused(507, "does_not_fit", text, failures=reasons)
    return Refused(503, code, text, min(waits, default=None), failures=reasons)
