"""Circuit breakers: five failures in a row open a breaker for 30 s, and then one call may try the model."""

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from hypothesis.strategies import integers, sampled_from

from gpu_runtime.errors import BadCall
from gpu_runtime.serving.breaker import (
    FAILURES,
    MAX_BREAKERS,
    OPEN_SECONDS,
    Blame,
    BreakerOpen,
    Breakers,
    BreakerState,
    Permit,
    blame,
)
from tests.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breakers(clock) -> Breakers:
    return Breakers(clock)


def fail(breakers: Breakers, times: int = FAILURES) -> None:
    for _ in range(times):
        breakers.enter("qwen").failed(RuntimeError("CUDA error: device-side assert triggered"))


def is_open(breakers: Breakers) -> bool:
    try:
        breakers.enter("qwen").withdrawn()
    except BreakerOpen:
        return True
    return False


def test_five_failures_in_a_row_open_it_and_one_call_is_the_probe(breakers, clock):
    """Its error has the number of failures, the last error, and the remaining seconds, never 0."""
    early = [breakers.enter("qwen") for _ in range(2)]
    fail(breakers, 4)
    assert not is_open(breakers)
    fail(breakers, 1)
    early[0].succeeded()
    early[1].failed(RuntimeError("a call from before it opened changes nothing"))
    with pytest.raises(BreakerOpen, match="failed 5 times .* another 30 s; the last time: CUDA"):
        breakers.enter("qwen")
    clock.now += OPEN_SECONDS - 0.2
    with pytest.raises(BreakerOpen, match="another 1 s; "):
        breakers.enter("qwen")
    clock.now += 0.2
    probe = breakers.enter("qwen")
    assert breakers.state("qwen").state == "half-open"
    probe.succeeded()
    last = "CUDA error: device-side assert triggered"
    assert breakers.state("qwen") == BreakerState("closed", 0, last=last)


def test_one_client_cannot_close_a_model_for_the_others(breakers):
    """The next call of another client is the probe. If it fails too, it is the model's fault."""
    for _ in range(FAILURES):
        breakers.enter("qwen", "key:bad").failed(RuntimeError("gone"))
    with pytest.raises(BreakerOpen):
        breakers.enter("qwen", "key:bad")
    probe = breakers.enter("qwen", "key:good")
    with pytest.raises(BreakerOpen):
        breakers.enter("qwen", "key:third")
    probe.failed(RuntimeError("gone"))
    with pytest.raises(BreakerOpen):
        breakers.enter("qwen", "key:good")
    breakers.enter("qwen", "key:third").succeeded()
    assert breakers.state("qwen").state == "closed"


@pytest.mark.parametrize("error", [BadCall("m: too long", why="too long"), ValueError("too long")])
def test_what_an_engine_or_a_library_rejects_is_the_callers_mistake(error):
    whose, refused = blame(error, "qwen")
    found = (whose, refused.status, refused.code, str(refused))
    assert found == (Blame.CALLER, 400, "engine_refused", "qwen refused: too long")


def test_each_name_has_its_own_breaker_and_invented_ones_fill_no_memory_and_remove_no_open_one(
    breakers,
):
    """A caller can invent any `provider:name`, and each new name gets a breaker. The number of breakers is limited."""
    fail(breakers)
    for n in range(2 * MAX_BREAKERS):
        breakers.enter(f"openai:{n}").succeeded()
    states = {model: state.state for model, state in breakers.states().items()}
    assert states.pop("qwen") == "open" and set(states.values()) == {"closed"}
    assert len(states) == MAX_BREAKERS - 1 and is_open(breakers)


class Model:
    """A simple reference implementation of a breaker, with which the real breaker is compared."""

    failures, opened_at, probing = 0, None, False


class BreakerMachine(RuleBasedStateMachine):
    """Calls begin and end in any order, while time passes, also to the moment at which a probe may begin."""

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.model = Clock(), Model()
        self.breakers = Breakers(self.clock)
        self.running: list[tuple[Permit, bool]] = []

    @rule()
    def begin(self) -> None:
        model = self.model
        may = model.opened_at is None or (
            not model.probing and self.clock.now - model.opened_at >= OPEN_SECONDS
        )
        try:
            call = self.breakers.enter("m")
        except BreakerOpen:
            assert not may
        else:
            assert may and call.probe == (model.opened_at is not None)
            model.probing |= call.probe
            self.running.append((call, call.probe))

    @rule(which=integers(0, 9), how=sampled_from(["succeeded", "failed", "withdrawn"]))
    def end(self, which, how) -> None:
        if not self.running:
            return
        call, probe = self.running.pop(which % len(self.running))
        getattr(call, how)(*([RuntimeError("x")] if how == "failed" else []))
        model = self.model
        if probe:
            model.probing = False
        if how == "withdrawn" or (model.opened_at is not None and not probe):
            return
        model.failures = model.failures + 1 if how == "failed" else 0
        if how == "succeeded":
            model.opened_at = None
        elif probe or model.failures >= FAILURES:
            model.opened_at = self.clock.now

    @rule(times=integers(FAILURES - 1, FAILURES))
    def fail_in_a_row(self, times) -> None:
        for _ in range(times):
            self.begin()
            self.end(len(self.running) - 1, "failed")

    @rule(seconds=sampled_from([0.125, 10.0, OPEN_SECONDS - 0.125, OPEN_SECONDS]))
    def later(self, seconds) -> None:
        self.clock.now += seconds

    @invariant()
    def never_two_probes(self) -> None:
        assert sum(probe for _, probe in self.running) <= 1
        state, opened_at = self.breakers.state("m"), self.model.opened_at
        assert state.failures == self.model.failures
        assert (state.state == "closed") == (opened_at is None)
        if state.state == "open" and not self.model.probing:
            assert state.retry_after == max(0.0, opened_at + OPEN_SECONDS - self.clock.now)


TestBreakerMachine = BreakerMachine.TestCase
