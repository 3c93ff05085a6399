"""Models that keep failing are left alone for a while: a circuit breaker for each.

Five consecutive failures open it. While it is open calls fail at once; 30 s later exactly one passes as a probe, while
all others go on failing fast: its success closes the breaker, its failure opens it for another 30 s.

The states and their changes are pybreaker's (BSD-3, since 2010, typed, 1.4.1 of September 2025). It would hold its lock
for the length of a call, so here it is told how calls ended instead of making them; when a probe is due, and that it is
one, is decided here, by a clock that is given. Of the other libraries, circuitbreaker and purgatory let every call pass
while half open.
"""

from __future__ import annotations

from collections.abc import Callable

import pybreaker

from ...facts import Value

FAILURES = 5
OPEN_SECONDS = 30.0
MOST_BREAKERS = 1000
_STATES = {
    pybreaker.STATE_CLOSED: "closed",
    pybreaker.STATE_OPEN: "open",
    pybreaker.STATE_HALF_OPEN: "half-open",
}


class BreakerState(Value):
    """A model's breaker as others see it."""

    state: str  # closed, open or half-open
    failures: int  # in a row
    retry_after: float = 0.0  # seconds until a probe may pass; 0: now
    last: str = ""  # the last failure, in words


class Open(Exception):
    """The model failed too often and is left alone; `retry_after` seconds from now one call may try it."""

    def __init__(self, model: str, state: BreakerState) -> None:
        super().__init__(
            f"{model} has failed {state.failures} times in a row and is left alone for another "
            f"{state.retry_after:.0f} s; the last time: {state.last}"
        )
        self.model, self.state, self.retry_after = model, state, max(state.retry_after, 1.0)


class Pass:
    """Leave to make one call. Say how it ended, once; what is never said is neither success nor failure."""

    def __init__(self, breaker: _Breaker, probe: bool) -> None:
        self._breaker, self.probe = breaker, probe
        self._said = False

    def succeeded(self) -> None:
        self._say(None)

    def failed(self, error: BaseException) -> None:
        self._say(error)

    def withdrawn(self) -> None:
        """It says nothing of the model: the caller went away, or the mistake was theirs. The next call may probe."""
        if not self._said:
            self._said = True
            self._breaker.ended(self, None, told=False)

    def _say(self, error: BaseException | None) -> None:
        if not self._said:
            self._said = True
            self._breaker.ended(self, error, told=True)


class Breakers:
    """One breaker for each model, as seen by this process."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        failures: int = FAILURES,
        open_seconds: float = OPEN_SECONDS,
    ) -> None:
        self._clock, self._failures, self._open_seconds = clock, failures, open_seconds
        self._breakers: dict[str, _Breaker] = {}

    def enter(self, model: str) -> Pass:
        """Leave to call the model now. Raises Open."""
        breaker = self._breakers.get(model)
        if breaker is None:
            self._make_room()
            breaker = self._breakers[model] = _Breaker(
                model, self._clock, self._failures, self._open_seconds
            )
        return breaker.enter()

    def _make_room(self) -> None:
        """Anybody may make up names of clouds: of too many breakers the oldest one at rest goes, else the oldest."""
        if len(self._breakers) >= MOST_BREAKERS:
            at_rest = (
                model
                for model, breaker in self._breakers.items()
                if breaker.state().state == "closed"
            )
            del self._breakers[next(at_rest, next(iter(self._breakers)))]

    def state(self, model: str) -> BreakerState:
        breaker = self._breakers.get(model)
        return breaker.state() if breaker else BreakerState("closed", 0)

    def states(self) -> dict[str, BreakerState]:
        """Of the models that were called."""
        return {model: breaker.state() for model, breaker in self._breakers.items()}


class _Breaker:
    def __init__(
        self, model: str, clock: Callable[[], float], failures: int, seconds: float
    ) -> None:
        self._model, self._clock, self._seconds = model, clock, seconds
        self._circuit = pybreaker.CircuitBreaker(
            failures, seconds, name=model, throw_new_error_on_trip=False
        )
        self._opened = 0.0
        self._probe: Pass | None = None
        self._last = ""
        self._in_a_row = 0

    def enter(self) -> Pass:
        state = self._circuit.current_state
        if state == pybreaker.STATE_OPEN and self._left() <= 0:
            self._circuit.half_open()
            state = pybreaker.STATE_HALF_OPEN
        if state == pybreaker.STATE_CLOSED:
            return Pass(self, probe=False)
        if state == pybreaker.STATE_HALF_OPEN and self._probe is None:
            self._probe = Pass(self, probe=True)
            return self._probe
        raise Open(self._model, self.state())

    def ended(self, call: Pass, error: BaseException | None, told: bool) -> None:
        if call is self._probe:
            self._probe = None
        elif self._circuit.current_state != pybreaker.STATE_CLOSED:
            return  # it began before the breaker opened; only the probe says how things stand since
        if not told:
            return
        if error is not None:
            self._in_a_row += 1
            self._last = _first_line(error)
        else:
            self._in_a_row = 0

        def outcome() -> None:
            if error is not None:
                raise _Failed

        try:
            self._circuit.call(outcome)
        except _Failed:
            if self._circuit.current_state == pybreaker.STATE_OPEN:
                self._opened = self._clock()

    def state(self) -> BreakerState:
        state = _STATES[self._circuit.current_state]
        return BreakerState(
            state, self._in_a_row, self._left() if state == "open" else 0.0, self._last
        )

    def _left(self) -> float:
        return max(0.0, self._opened + self._seconds - self._clock())


class _Failed(Exception):
    """A call's failure, as it is told to pybreaker."""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
