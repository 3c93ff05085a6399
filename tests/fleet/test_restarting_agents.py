"""A host whose agent is being restarted has not refused the model. No cluster is needed here."""

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gpu_runtime import Busy, DoesNotFit, NodeLost, UnknownModel
from gpu_runtime.facts import HostRoom, Offer, PlanLevel
from gpu_runtime.fleet import client, cluster
from gpu_runtime.fleet.client import Fleet
from gpu_runtime.fleet.controller import Controller
from gpu_runtime.fleet.wishes import Slot, Wish, Wishes, applied, load

WISHES = Wishes(models=(Wish("qwen", {}),))
GONE = Offer("a", "qwen", PlanLevel.NEVER, cluster.GONE, answered=False)
FULL = Offer("b", "qwen", PlanLevel.NEVER, "too large")


class FleetOf(Fleet):
    """A fleet whose controller answers `rounds`, one after the other; every host serves."""

    def __init__(self, *rounds: tuple[Offer, ...], wishes: Wishes = WISHES) -> None:
        self._rounds = itertools.chain(rounds[:-1], itertools.repeat(rounds[-1]))
        self._known, self._last = wishes, {}

    def _choose(self, name: str) -> tuple[tuple[Offer, ...], int]:
        return next(self._rounds), 1

    def _wishes(self) -> Wishes:
        return self._known

    def _agent(self, host: str) -> Any:
        call = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_, **__: None))
        return SimpleNamespace(enter=call)


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ASK_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(cluster, "_has_left", False)  # a test before may have left a real cluster
    monkeypatch.setattr(cluster, "my_job", lambda: "job")
    monkeypatch.setattr(cluster, "answer", lambda *_: True)


@pytest.mark.parametrize("others", [(), (FULL,)])
def test_a_use_waits_for_the_restart_of_an_agent(others):
    restarted = Offer("a", "qwen", PlanLevel.ROOM, "room")
    fleet = FleetOf((GONE, *others), (GONE, *others), (restarted, *others))
    assert fleet._obtain("hold", "qwen", None, None)[0] == "a"


def test_the_wait_ends_at_the_time_limit_or_with_the_answer_of_the_last_host():
    with pytest.raises(Busy, match="it is gone"):
        FleetOf((GONE, FULL))._obtain("hold", "qwen", 0.0, None)
    with pytest.raises(DoesNotFit):
        FleetOf((GONE, FULL), (FULL,))._obtain("hold", "qwen", None, None)


def test_a_model_that_nobody_wished_is_unknown_although_a_host_is_silent():
    with pytest.raises(UnknownModel):
        FleetOf((GONE, FULL), wishes=Wishes())._obtain("hold", "qwen", None, None)


def raises(error: Exception) -> Any:
    def call(*_: Any) -> Any:
        raise error

    return call


def controller_of(hosts: Any) -> Controller:
    """A controller that has stored nothing yet."""
    controller = Controller.__new__(Controller)
    controller._wishes, controller._silent = WISHES, {}
    controller._hosts, controller._lock = hosts, threading.Lock()
    return controller


@pytest.mark.parametrize("why", [cluster.SILENT, cluster.GONE])
def test_the_controller_lists_a_silent_host_until_it_answers_again(why):
    """If another host answers, the silent host is not asked for a while. Its silence does not count as a refusal."""
    asked: list[list[str]] = []

    def ask(method: str, *_: Any, hosts: list[str], **__: Any) -> Any:
        asked.append(list(hosts))
        return {"b": FULL}, ({"a": why} if "a" in hosts else {})

    controller = controller_of(SimpleNamespace(names=lambda: ("a", "b"), ask=ask))
    for _ in range(2):
        offers, _ = controller.choose("qwen")
        assert {offer.host: offer.answered for offer in offers} == {"a": False, "b": True}
    assert asked == [["a", "b"], ["b"]]


@pytest.mark.parametrize("error", [cluster.Gone("a"), cluster.Unreachable("no answer")])
def test_a_slot_on_a_host_that_is_gone_is_an_error(error, monkeypatch):
    """The client took the error for one about the controller, and asked again without an end."""
    controller = controller_of(SimpleNamespace(agent=raises(error)))
    monkeypatch.setattr(cluster, "store", lambda *_: None)
    with pytest.raises(NodeLost, match="qwen was lost on a"):
        controller.create_slot(Slot("qwen", "a", ("cuda:0",)))
    assert controller.wishes().slots == ()


def test_a_copy_on_a_drained_host_is_replaced_on_another_host(monkeypatch):
    """The copy there is still in use. No other host had loaded the model."""
    held = {"a": {"qwen": ("cuda:0", 1)}, "b": {}}
    controller = controller_of(SimpleNamespace(ask=lambda *_, **__: (held, {})))
    controller._filling = {"qwen": threading.Lock()}
    controller._wishes = Wishes(models=(Wish("qwen", {}, copies=1),), drained=("a",))
    placed = SimpleNamespace(host="b", reasons={})
    monkeypatch.setattr(controller, "_place", lambda name, has: placed)
    assert controller._fill("qwen") == "b"
    controller._wishes = Wishes(models=(Wish("qwen", {}, copies=1),))
    assert controller._fill("qwen") == "a"


def room(host: str, gib: int = 80, **more: Any) -> HostRoom:
    return HostRoom(host, need_bytes=50, free_bytes=(gib,), budget_bytes=(gib,), **more)


class Hosts:
    """Hosts that report their rooms, and make an offer. A host without a room does not answer."""

    def __init__(self, *rooms: HostRoom, silent: tuple[str, ...] = (), able: str = "") -> None:
        self._rooms = {one.host: one for one in rooms}
        self._silent, self._able = silent, able
        self.asked: list[list[str]] = []
        self.enough: dict[str, Any] = {}

    def names(self) -> tuple[str, ...]:
        return (*self._rooms, *self._silent)

    def ask(self, method: str, *_: Any, hosts: list[str], enough: Any, **__: Any) -> Any:
        self.enough[method] = enough
        missing = {host: cluster.SILENT for host in hosts if host in self._silent}
        answering = [host for host in hosts if host not in missing]
        if method == "room":
            return {host: self._rooms[host] for host in answering}, missing
        self.asked.append(answering)
        levels = {True: PlanLevel.ROOM, False: PlanLevel.NEVER}
        return {host: Offer(host, "qwen", levels[host == self._able], "") for host in hosts}, {}


def chosen(hosts: Hosts) -> tuple[Offer, ...]:
    return controller_of(hosts).choose("qwen")[0]


def test_the_room_of_a_host_that_is_too_small_does_not_end_the_wait_for_others():
    """With more than eight hosts, a slow host is awaited until another one reports enough room."""
    hosts = Hosts(*(room(f"box{n}") for n in range(9)), able="box0")
    assert chosen(hosts)[0].host == "box0" and len(hosts.asked) == 1
    enough = hosts.enough["room"]
    assert not enough([room("small", 40), room("drained", drained=True)])
    assert enough([room("small", 40), room("large")])


def test_of_nine_hosts_one_that_reports_no_room_is_listed_as_silent():
    """Otherwise a model that only this host can take would be refused for good."""
    hosts = Hosts(*(room(f"box{n}", 40) for n in range(9)), silent=("large",))
    offers = {offer.host: offer for offer in chosen(hosts)}
    assert len(offers) == 10 and not offers["large"].answered
    assert all(offer.answered for host, offer in offers.items() if host != "large")
    assert hosts.asked == [[f"box{n}" for n in range(8)]], "a host that is too small makes no plan"
    assert offers["box8"].because == "its cards are too small or drained"


def test_if_the_best_eight_hosts_lack_the_engine_the_next_eight_are_asked():
    hosts = Hosts(*(room(f"box{n}", 80 + n) for n in range(9)), able="box8")
    assert chosen(hosts)[0].host == "box8" and list(map(len, hosts.asked)) == [8, 1]


def test_wishes_that_no_host_could_read_are_not_stored(monkeypatch):
    """A number of copies as text was stored. Then no host could read any wish, and no model could be used."""
    stored: list[bytes] = []
    monkeypatch.setattr(cluster, "store", lambda key, data: stored.append(data))
    controller = controller_of(None)
    wrong = Wish("phi", {}, copies="2")  # type: ignore[arg-type]
    with pytest.raises(msgspec.ValidationError):
        controller._change(lambda old: applied(old, [wrong], dedicated=False))
    assert controller.wishes() == WISHES and not stored
    controller._change(lambda old: applied(old, [Wish("phi", {}, copies=2)], dedicated=False))
    assert [load(data).names for data in stored] == [("phi", "qwen")]
