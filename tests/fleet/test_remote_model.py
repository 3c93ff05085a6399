"""A `with fleet.use(…)` block whose host dies. With `retry`, its calls run again on another host."""

import pickle
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from gpu_runtime import EngineDied, NodeLost
from gpu_runtime.backends.processes import remote_calls
from gpu_runtime.fleet import client, cluster
from gpu_runtime.fleet.client import MOST_CALLS, MOST_HOSTS, FleetUse


class Notes:
    """A model that remembers the calls that it got."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def tell(self, what: Any) -> list[Any]:
        """What it was told until now."""
        self.told.append(what)
        return self.told


class World:
    """Hosts without Ray. Each host has a model of its own. A dead host does not answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.models: list[Notes] = []  # one for each use, in order
        self.given: list[Any] = []  # the packed arguments of the calls
        self.dies_with: BaseException | None = None  # the next call ends with it
        monkeypatch.setattr(cluster, "answer", lambda reference, *_: reference())
        monkeypatch.setattr(cluster, "ray", lambda: SimpleNamespace(cloudpickle=pickle))
        monkeypatch.setattr(client, "on", self._on)

    def _on(self, model: Notes, method: str, group: str, *args: Any) -> Any:
        def answer() -> Any:
            """The answer of the host, or the error that the host died."""
            if method != "call":
                return None
            error, self.dies_with = self.dies_with, None
            if isinstance(error, EngineDied):  # its process starts again, without what it was told
                model.told.clear()
            if error is not None:
                raise error
            _, path, given = remote_calls.unpack(remote_calls.packed_in(args[0]))
            self.given.append(given)
            return remote_calls.message(remote_calls.run(model, path, given))

        return answer

    def _obtain(self, *_: Any) -> tuple[str, Notes]:
        self.models.append(Notes())
        return f"box{len(self.models)}", self.models[-1]

    def _withdraw(self, hold: str) -> None:
        pass

    def _forget(self, host: str) -> None:
        pass


@pytest.fixture
def world(monkeypatch) -> World:
    return World(monkeypatch)


@pytest.mark.parametrize("error", [cluster.Gone("its node"), NodeLost("m", "box1", "gone")])
def test_with_retry_the_calls_of_the_block_run_again_in_their_order(world, error):
    """The answer shows that the earlier calls of the block were repeated on the other host first."""
    with FleetUse(world, "m", None, None, True) as model:
        assert model.tell(1) == [1] and model.tell(2) == [1, 2]
        world.dies_with = error
        assert model.tell(3) == [1, 2, 3]
        assert model.host == "box2"
        assert model.tell(4) == [1, 2, 3, 4]
    assert world.models[0].told == [1, 2]


def test_an_array_is_copied_only_if_its_call_may_run_again(world):
    """The caller may change the array before that second run. The result can be changed, too."""
    array = numpy.zeros(10_000)
    for retry, parts in ((False, 2), (True, 1)):
        with FleetUse(world, "m", None, None, retry) as model:
            [found] = model.tell(array)
            array[0] += 1
            found[0] = 7
            assert len(world.given[-1]) == parts
            if retry:
                world.dies_with = cluster.Gone("its node")
                assert model.tell("end")[0][0] == array[0] - 1


def test_a_model_whose_process_died_has_its_calls_again(world):
    died = EngineDied("gone", name="m", pid=None, status=-9, kind="crash", why="", log="")
    with FleetUse(world, "m", None, None, True) as model:
        model.tell(1)
        world.dies_with = died
        assert model.tell(2) == [1, 2]
        assert len(world.models) == 1, "the use goes on, so its card stays leased"
    with FleetUse(world, "m", None, None, False) as model, pytest.raises(EngineDied):
        world.dies_with = died
        model.tell(1)


def test_without_retry_a_loss_is_an_error_that_says_why(world):
    with FleetUse(world, "m", None, None, False) as model:
        model.tell(1)
        world.dies_with = NodeLost("m", "box1", "its agent has been restarted")
        with pytest.raises(NodeLost, match="^m was lost on box1: its agent has been restarted"):
            model.tell(2)
    assert len(world.models) == 1


def test_a_call_that_kills_its_host_does_not_kill_all(world, monkeypatch):
    monkeypatch.setattr(cluster, "answer", _dies)
    with pytest.raises(NodeLost), FleetUse(world, "m", None, None, True) as model:
        model.tell(1)
    assert len(world.models) == MOST_HOSTS


def _dies(*_: Any) -> Any:
    raise cluster.Gone("its node")


def test_a_block_with_too_many_calls_is_not_run_again(world):
    with FleetUse(world, "m", None, None, True) as model:
        for number in range(MOST_CALLS + 1):
            model.tell(number)
        world.dies_with = cluster.Gone("its node")
        with pytest.raises(NodeLost, match="too many to run them again"):
            model.tell("last")
