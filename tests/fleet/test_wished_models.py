"""What wishes do on the hosts: the agents and the controller run in this process, without Ray."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from gpu_runtime import Busy, Runtime, StillInUse
from gpu_runtime.backends.fake import FakeBackend
from gpu_runtime.catalog.files import Catalog
from gpu_runtime.fleet import agent as agents
from gpu_runtime.fleet import cluster, controller
from gpu_runtime.fleet.agent import HostAgent
from gpu_runtime.fleet.controller import Controller
from gpu_runtime.fleet.wishes import Slot
from gpu_runtime.settings import Settings
from gpu_runtime.threads import Stoppable
from tests.clock import PATIENCE, until
from tests.fleet.ray_cluster import write_models

MODELS = {"a": 6, "b": 6, "c": 6, "d": 6}


class Fleet:
    """A controller and the agents of its hosts. Calls between them are ordinary calls."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._agents = folder, {}
        self.controller: Controller = None

    # what the controller calls, as in `hosts.Hosts`

    def refresh(self) -> tuple[str, ...]:
        return ()

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._agents))

    def agent(self, host: str) -> Any:
        return _Far(self._agents[host])

    def ask(self, method: str, *args: Any, hosts: Any = None, **_: Any) -> tuple[dict, dict]:
        names = self.names() if hosts is None else hosts
        return {host: getattr(self._agents[host], method)(*args) for host in names}, {}

    # what a test calls

    def join(self, host: str, devices: str) -> HostAgent:
        found = HostAgent(host, devices, f"keeper://{self._folder / host}", cluster.versions())
        found.ready()
        self._agents[host] = found
        return found

    def apply(self, *names: str, copies: int = 1, dedicated: bool = False) -> dict[str, str]:
        catalog = Catalog(Settings.load(gpu_catalog=str(self._folder / "catalogue")))
        file = write_models(self._folder / "m.yaml", {name: MODELS[name] for name in names})
        catalog.apply(file)
        bodies = [(one, catalog.entries()[one].body, MODELS[one] << 30) for one in names]
        return self.controller.apply(bodies, copies, dedicated)

    def on_cards(self, host: str) -> dict[str, str]:
        """The models of the host's agent, each with its place."""
        return {name: where for name, (where, _) in self._agents[host].holdings().items()}

    def close(self) -> None:
        for one in self._agents.values():
            one.stop()


class _Far:
    """The handle of an agent: a call is made when its answer is read."""

    def __init__(self, agent: HostAgent) -> None:
        self._agent = agent

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any, **kwargs: Any) -> Callable[[], Any]:
            return lambda: getattr(self._agent, method)(*args, **kwargs)

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=remote))


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    stored: dict[bytes, bytes] = {}
    found = Fleet(tmp_path)
    monkeypatch.setenv("EVICTION_GRACE_SECONDS", "0")
    monkeypatch.setenv("GPU_POLICY", "lru")
    monkeypatch.setattr(cluster, "_has_left", False)  # a test before may have left a real cluster
    monkeypatch.setattr(cluster, "stored", stored.get)
    monkeypatch.setattr(cluster, "store", stored.__setitem__)
    monkeypatch.setattr(cluster, "require_token", lambda: None)
    monkeypatch.setattr(cluster, "is_given_up", lambda: False)
    monkeypatch.setattr(cluster, "versions", dict)
    monkeypatch.setattr(cluster, "answer", lambda call, *_: call())
    monkeypatch.setattr(controller, "Hosts", lambda: found)
    monkeypatch.setattr(controller, "start", lambda _: None)  # nothing is filled in the background
    monkeypatch.setattr(agents, "WATCH_SECONDS", 3600.0)
    found.controller = Controller()
    yield found
    found.close()


def used(agent: HostAgent, *names: str) -> None:
    """Uses the models one after the other, as calls of clients do."""
    agent.learn(10**9)
    for name in names:
        with agent.rt.use(name, timeout=PATIENCE):
            time.sleep(0.01)  # the order of uses decides, so no two uses have the same time


def test_a_slot_moves_between_the_cards_of_a_host_unless_its_model_is_in_use(fleet):
    """Host memory has room, so an eviction only offloads. Also from there, the model returns to the slot's card."""
    box = fleet.join("box1", "sim:2x10GiB,host:64GiB")
    fleet.apply("a", copies=0)
    for card in ("sim:0", "sim:1", "sim:0", "sim:0"):
        assert fleet.controller.create_slot(Slot("a", "box1", (card,))) == card
        assert fleet.on_cards("box1") == {"a": card}
    box.rt.evict("a")
    assert fleet.on_cards("box1") == {"a": "host"}
    assert fleet.controller.create_slot(Slot("a", "box1", ("sim:1",))) == "sim:1"
    assert fleet.on_cards("box1") == {"a": "sim:1"}
    with box.rt.use("a"), pytest.raises(StillInUse):
        fleet.controller.create_slot(Slot("a", "box1", ("sim:0",)))
    assert fleet.controller.wishes().slots == (Slot("a", "box1", ("sim:1",)),)


@pytest.mark.parametrize("who", ["a call", "a dedicated model", "a notebook"])
def test_whoever_needs_room_gets_that_of_an_unwished_model(fleet, tmp_path, who):
    """The wished model was used least recently, so the policy alone would evict it.

    The marks are in the book, where every process of the host reads them.
    """
    box = fleet.join("box1", "sim:2x10GiB,host:1GiB")
    fleet.apply("b", "c", copies=0)
    assert fleet.apply("a", dedicated=who != "a notebook") == {"a": "box1"}
    used(box, "a", "b")
    if who == "a call":
        used(box, "c")
    elif who == "a dedicated model":
        assert fleet.apply("c", "a", dedicated=True) == {"a": "box1", "c": "box1"}
    else:
        ledger = f"keeper://{tmp_path / 'box1'}"
        with Runtime(devices="sim:2x10GiB,host:1GiB", ledger=ledger) as notebook:
            notebook.register("own", backend="fake", size="6GiB")
            until(lambda: not any(one.pins for one in notebook.status().leases()), "both are idle")
            with notebook.use("own", timeout=PATIENCE):
                assert sorted(fleet.on_cards("box1")) == ["a"]
        return
    assert sorted(fleet.on_cards("box1")) == ["a", "c"]


def test_a_wished_model_may_load_for_longer_than_it_may_wait_for_room(fleet, monkeypatch):
    """Its host waits for the end of the load without a limit, and so does the controller for its host.

    The load goes on once its caller waits for it.
    """
    fleet.join("box1", "sim:1x10GiB,host:1GiB")
    limits, caller_waits = [], threading.Event()
    wait, load = Stoppable.wait, FakeBackend.load

    def answer(
        call: Callable[[], Any], limit: float = cluster.ANSWER_SECONDS, ping: Any = None
    ) -> Any:
        limits.append(None if ping else limit)
        return call()

    def waiting(self: Stoppable, seconds: float | None) -> bool:
        limits.append(seconds)
        caller_waits.set()
        return wait(self, seconds)

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert caller_waits.wait(PATIENCE)
        return load(*args, **kwargs)

    monkeypatch.setattr(cluster, "answer", answer)
    monkeypatch.setattr(Stoppable, "wait", waiting)
    monkeypatch.setattr(FakeBackend, "load", slow)
    assert fleet.apply("a") == {"a": "box1"}
    assert set(limits) == {None}


def test_a_wish_without_room_tells_the_reason_of_each_host(fleet):
    """A wish evicts no model that is wished as much. A use may."""
    boxes = [fleet.join(name, "sim:1x10GiB,host:1GiB") for name in ("box1", "box2")]
    assert fleet.apply("a", copies=2) == {"a": "box1, box2"}
    why = "a (6.0 GiB on sim:0) is wished by the fleet"
    assert fleet.apply("b") == {"b": f"not loaded (box1: {why}; box2: {why})"}
    used(boxes[0], "b")
    assert sorted(fleet.on_cards("box1")) == ["b"]


def test_a_copy_that_is_missing_is_told_with_its_reason(fleet):
    fleet.join("box1", "sim:1x10GiB,host:1GiB")
    assert fleet.apply("a", copies=2) == {"a": "box1 (1 of 2 copies; no other host)"}
    fleet.join("box2", "sim:1x4GiB,host:1GiB")
    told = fleet.apply("a", copies=2)["a"]
    assert told.startswith("box1 (1 of 2 copies; box2: a needs 6.0 GiB")


def test_a_wish_for_fewer_copies_counts_also_for_a_load_that_has_begun(fleet, monkeypatch):
    for name in ("box1", "box2"):
        fleet.join(name, "sim:1x10GiB,host:1GiB")
    place = fleet.controller._place

    def placed(name: str, has: set[str]) -> Any:
        """Meanwhile a person wishes one copy."""
        fleet.controller._change(
            lambda old: replace(old, models=(replace(old.models[0], copies=1),))
        )
        return place(name, has)

    monkeypatch.setattr(fleet.controller, "_place", placed)
    assert fleet.apply("a", copies=2) == {"a": "box1"}
    assert fleet.on_cards("box2") == {}


def test_wished_models_that_are_loaded_at_once_evict_none_of_each_other(fleet):
    """The host decides in its book, so an outdated offer evicts nothing."""
    fleet.apply(*MODELS)
    box = fleet.join("box1", "sim:2x10GiB,host:1GiB")
    offers = {name: fleet.controller.choose(name, for_wish=True) for name in MODELS}
    assert all(offers[name][0][0].level == "room" for name in MODELS)
    revision = offers["a"][1]
    for name in ("a", "b"):
        box.load(name, revision, timeout=0.0)
    for name in ("c", "d"):
        with pytest.raises(Busy, match="is wished by the fleet"):
            box.load(name, revision, timeout=0.0)
    assert sorted(fleet.on_cards("box1")) == ["a", "b"]
