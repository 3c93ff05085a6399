"""Holds: one thread for each use of a model by a client of the fleet."""

import contextlib
from types import SimpleNamespace

import pytest

from gpu_runtime import Busy, NodeLost, Runtime, UnknownModel
from gpu_runtime.backends.processes.remote_calls import pack, unpack
from gpu_runtime.facts import HOST, Lease, Share
from gpu_runtime.fleet.agent import FleetHold, FleetHolds, HostAgent
from gpu_runtime.threads import start
from tests.clock import PATIENCE, until


@pytest.fixture
def rt():
    with Runtime(devices="sim:24GiB,host:1GiB", ledger="memory:") as found:
        found.register("qwen", backend="fake", size="14GiB")
        found.register("llama", backend="fake", size="14GiB")
        yield found


@pytest.fixture
def holds(rt):
    return FleetHolds(rt, "box1")


def ask(holds: FleetHolds, hold: str, path: tuple[str, ...], *args: object) -> object:
    """The result of a call, as a client sends it."""
    return unpack(holds.call(hold, path, pack((args, {}))))


def pins(rt: Runtime) -> dict[str, int]:
    rt.tick()
    return {lease.name: lease.pins for lease in rt.status().leases()}


def test_a_slot_is_a_card():
    """A model in parts had a slot in RAM."""
    parts = Lease("1", "big", shares=(Share("sim:0", 2), Share(HOST, 3)))
    away = Lease("1", "away", shares=(Share(HOST, 5),))
    seen = SimpleNamespace(own_leases={"big": parts, "away": away})
    agent = SimpleNamespace(
        rt=SimpleNamespace(status=lambda: seen),
        holds=SimpleNamespace(users=lambda name: 1),
        _require_started=lambda: None,
    )
    assert HostAgent.slots(agent) == [("big", "sim:0", 2, 1)]


def test_a_hold_pins_its_model_until_it_is_released(rt, holds):
    holds.enter(FleetHold("h1", "job1", "qwen"), None, None)
    assert pins(rt) == {"qwen": 1} and holds.users("qwen") == 1
    with pytest.raises(AttributeError):
        ask(holds, "h1", ("nothing",))
    assert ask(holds, "h1", (), "words") == "words", "an error of a call ends no hold"
    holds.release("h1")
    until(lambda: pins(rt) == {"qwen": 0})
    with pytest.raises(NodeLost, match="restarted"):
        ask(holds, "h1", ())


def test_an_error_before_the_model_is_there_is_raised_where_the_client_waits(rt, holds):
    with pytest.raises(UnknownModel):
        holds.enter(FleetHold("h1", "job1", "nobody"), None, None)
    holds.enter(FleetHold("h2", "job1", "qwen"), None, None)
    with pytest.raises(Busy):
        holds.enter(FleetHold("h3", "job1", "llama"), 0.0, None)
    assert len(holds) == 1
    holds.release("h2")


def test_a_client_that_ended_frees_its_models_and_its_waits(rt, holds):
    """The wait of a dead client must not take the card from the living."""
    holds.enter(FleetHold("h1", "job1", "qwen"), None, None)
    waited: list[BaseException] = []

    def wait_for_room() -> None:
        """Waits for the card that h1 occupies."""
        try:
            holds.enter(FleetHold("h2", "job2", "llama"), None, None)
        except NodeLost as error:
            waited.append(error)

    thread = start(wait_for_room)
    until(lambda: rt.status().tickets)
    assert holds.users("llama") == holds.users("qwen") == 1, "it counts while it waits"
    assert holds.release_jobs({"job2"}) == 1
    assert thread.wait(PATIENCE) and waited
    until(lambda: not rt.status().tickets)
    assert holds.release_jobs({"job1"}) == 1
    until(lambda: pins(rt) == {"qwen": 0})


def test_a_release_that_arrives_before_its_hold_is_not_lost(rt, holds):
    """An interrupted client withdraws its request, which may overtake the request itself."""
    holds.release("h1")
    with pytest.raises(NodeLost, match="the client has ended"):
        holds.enter(FleetHold("h1", "job1", "qwen"), None, None)
    assert len(holds) == 0 and pins(rt) == {}, "the model is not even loaded"


def test_a_use_that_is_requested_again_is_one_use(rt, holds):
    """A client that got no answer asks again, and releases the use once."""
    for _ in range(2):
        holds.enter(FleetHold("h1", "job1", "qwen"), None, None)
    assert holds.users("qwen") == 1
    holds.release("h1")
    until(lambda: pins(rt) == {"qwen": 0})


def test_a_release_that_arrives_at_the_same_moment_as_its_hold_is_not_lost(rt, holds, monkeypatch):
    entering = []

    def enter() -> None:
        """The hold begins once its release has looked for it."""
        with contextlib.suppress(NodeLost):
            holds.enter(FleetHold("h1", "job1", "qwen"), None, None)

    class Looked(dict):
        def pop(self, id: str, default: object) -> object:
            """Finds no hold. Then the hold begins, or waits for the end of the release."""
            entering.append(start(enter))
            entering[0].wait(0.5)
            return default

    monkeypatch.setattr(holds, "_all", Looked())
    holds.release("h1")
    assert entering[0].wait(PATIENCE) and len(holds) == 0
    assert pins(rt) == {}
