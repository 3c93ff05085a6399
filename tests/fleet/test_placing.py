"""Hosts are tried one after the other, in the order of their offers."""

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_runtime import Busy, DoesNotFit, LoadFailed
from gpu_runtime.facts import Offer, PlanLevel
from gpu_runtime.fleet import client, cluster
from gpu_runtime.fleet.client import Fleet
from gpu_runtime.fleet.cluster import Gone, Joined, Unreachable
from gpu_runtime.fleet.hosts import Hosts, attempts, refusal
from tests.clock import PATIENCE

ROOM, NEVER = PlanLevel.ROOM, PlanLevel.NEVER


def offer(host: str, level: PlanLevel = ROOM) -> Offer:
    return Offer(host, "qwen", level, f"because of {host}", need_bytes=7)


def answering(**answers: Any) -> Any:
    """An attempt in which each host gives its answer, or raises it."""

    def attempt(offer: Offer) -> Any:
        answer = answers[offer.host]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return attempt


BUSY = Busy("full\n  wait", name="qwen", waited_seconds=0, because="")
FULL = DoesNotFit("too large", name="qwen", need_bytes=7, budget_bytes=0, device="", holders=())


def test_the_next_host_serves_after_a_lost_race(caplog):
    with caplog.at_level(logging.INFO, "gpu_runtime"):
        served = attempts(
            "qwen", [offer("a"), offer("b"), offer("c", NEVER)], answering(a=BUSY, b="here")
        )
    assert served.host == "b"
    assert served.reasons == {"a": "full", "c": "because of c"}
    assert [record.getMessage() for record in caplog.records] == [
        "qwen: attempt 1/2 on a (room)",
        "qwen: attempt 2/2 on b (room)",
    ]


def test_a_dead_host_lets_the_next_one_try_and_an_error_of_the_code_does_not():
    """A fault in the code is shown, and not hidden by another host."""
    served = attempts("qwen", [offer("a"), offer("b")], answering(a=Gone("dead"), b=1))
    assert (served.host, served.gone) == ("b", ("a",))
    with pytest.raises(ZeroDivisionError):
        attempts("qwen", [offer("a"), offer("b")], answering(a=ZeroDivisionError(), b=1))


def test_a_refusal_names_every_host_with_its_reason():
    smaller = Offer("b", "qwen", NEVER, "because of b", need_bytes=3)
    offers = [offer("a", NEVER), smaller]
    served = attempts("qwen", offers, answering())
    error = refusal("qwen", offers, served, 0.0)
    assert isinstance(error, DoesNotFit) and error.need_bytes == 7
    assert str(error) == (
        "qwen fits on no host of the fleet.\n  a: because of a\n  b: because of b"
    )
    offers = [offer("a"), offer("b", NEVER)]
    error = refusal("qwen", offers, attempts("qwen", offers, answering(a=BUSY)), 3.0)
    assert isinstance(error, Busy) and error.hosts == {"a": "full", "b": "because of b"}


def test_a_model_that_no_host_can_load_is_not_tried_for_ever():
    """A damaged source is an error at once. Only a full host is worth another attempt."""
    damaged = LoadFailed("the file is cut", name="qwen", source="/x")
    offers = [offer("a"), offer("b")]
    for other, expected in (
        (damaged, LoadFailed),
        (FULL, LoadFailed),  # one host had room
        (BUSY, Busy),
        (Gone("dead"), Busy),
    ):
        error = refusal(
            "qwen", offers, attempts("qwen", offers, answering(a=damaged, b=other)), 0.0
        )
        assert isinstance(error, expected), other
        assert expected is Busy or "a: the file is cut" in str(error)


@pytest.mark.parametrize("others", [[], [offer("b", NEVER)], [offer("b")]])
def test_a_host_that_has_not_answered_makes_the_refusal_a_passing_one(others):
    """The agent of that host may be restarting at this moment, and may serve the model soon."""
    silent = Offer("a", "qwen", NEVER, "it is gone", answered=False)
    offers = [silent, *others]
    error = refusal("qwen", offers, attempts("qwen", offers, answering(b=FULL)), 1.0)
    assert isinstance(error, Busy) and error.hosts["a"] == "it is gone"


def test_a_fleet_without_hosts_says_how_to_join():
    assert "gpu fleet join" in str(refusal("qwen", [], attempts("qwen", [], answering()), 0.0))


def test_a_host_that_has_just_joined_is_not_lost_to_an_older_reading(monkeypatch):
    """The controller's watch may have read the hosts before the join, and be slower than the reading after it."""
    stored: dict[str, Joined] = {}
    has_read, is_done = threading.Event(), threading.Event()

    def read() -> dict[str, Joined]:
        found = dict(stored)
        if not has_read.is_set():
            has_read.set()
            is_done.wait(0.5)  # without a lock, the later reading ends here
        return found

    monkeypatch.setattr(cluster, "living_nodes", lambda: {"node": {}})
    monkeypatch.setattr(cluster, "stored_hosts", read)
    monkeypatch.setattr(cluster, "actor", str)
    hosts = Hosts()
    watch = threading.Thread(target=hosts.refresh)
    watch.start()
    assert has_read.wait(PATIENCE)
    stored["node"] = Joined("box1", "1")

    def join() -> None:
        hosts.refresh()
        is_done.set()

    join_thread = threading.Thread(target=join)
    join_thread.start()
    for thread in (watch, join_thread):
        thread.join()
    assert hosts.names() == ("box1",)


def test_an_interrupted_request_is_withdrawn_from_each_host(monkeypatch):
    """Also if another thread leaves a host out meanwhile: the hold may be on a host after it."""
    fleet = Fleet.__new__(Fleet)
    fleet._hosts = Hosts()
    fleet._hosts._handles = {name: ((name, "1"), f"agent of {name}") for name in "abc"}
    told = []

    def on(agent: Any, method: str, group: str, hold: str) -> None:
        told.append(agent)
        fleet._hosts.forget("b")

    monkeypatch.setattr(client, "on", on)
    fleet._withdraw("h1")
    assert told == ["agent of a", "agent of b", "agent of c"]


@pytest.mark.parametrize("last", [{}, {"qwen": ("a", float("inf"))}])
def test_a_use_that_may_have_begun_on_a_host_without_an_answer_is_ended_there(monkeypatch, last):
    """The model is used on another host. On this one it would stay pinned until the notebook ends."""
    fleet = Fleet.__new__(Fleet)
    fleet._hosts, fleet._last = Hosts(), last
    fleet._hosts._handles = {name: ((name, "1"), f"agent of {name}") for name in "abc"}
    told = []

    def answer(call: tuple[str, str], timeout: float = 60.0, _: Any = None) -> bool:
        if call == ("agent of a", "enter"):
            assert last == {} or timeout == client.SLICE_SECONDS
            raise Unreachable("no answer")
        return True

    monkeypatch.setattr(fleet, "_choose", lambda name: ((offer("a"), offer("b")), 1))
    monkeypatch.setattr(client, "on", lambda *call, **_: told.append(call[:2]) or call[:2])
    monkeypatch.setattr(cluster, "answer", answer)
    monkeypatch.setattr(cluster, "my_job", lambda: "job")
    assert fleet._obtain("h1", "qwen", None, None) == ("b", "agent of b")
    ended = [agent for agent, method in told if method == "leave"]
    assert ended == ["agent of a"]


@pytest.mark.parametrize("error", [None, Gone("dead"), Unreachable("no answer within 60 s")])
def test_the_agent_of_a_host_that_leaves_is_ended_also_if_it_hangs(monkeypatch, error):
    """An agent that has crashed would be started again, and one that hangs would keep its cards."""
    killed = []

    def answer(_: Any) -> None:
        if error is not None:
            raise error

    fakes = {
        "connect": lambda address: None,
        "ray": lambda: SimpleNamespace(kill=killed.append),
        "stored_hosts": lambda: {"n1": Joined("box1", "1")},
        "unstore": lambda key: None,
        "actor": lambda name: "agent",
        "answer": answer,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(cluster, name, fake)
    monkeypatch.setattr(client, "on", lambda *_: None)
    assert client.leave(node="n1").done and killed == ["agent"]
