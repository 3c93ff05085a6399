"""What the console reads of a fleet, and which agent carries out its actions. Without Ray."""

import contextlib
import contextvars
from types import SimpleNamespace

import pytest
from gpu_panels import fleet_console
from gpu_panels.acting import attempt
from gpu_panels.data.confirmations import propose
from gpu_panels.fleet_console import READ_SECONDS, FleetHosts, seen_from_outside

from gpu_runtime import Runtime
from gpu_runtime.errors import FleetUnavailable
from gpu_runtime.fleet import hosts as hosts_of_fleet
from gpu_runtime.fleet.agent import HostAgent
from tests.clock import Clock


class StandInFleet:
    """A fleet of agents in this process. A call is carried out at once, unless the host is frozen."""

    def __init__(self, **runtimes):
        self.agents = {name: HostAgent.__new__(HostAgent) for name in runtimes}
        for name, agent in self.agents.items():
            agent.rt, agent._trouble = runtimes[name], None
        self.left, self.frozen = set(), set()
        self.sent = []  # the hosts of all calls

    def hosts(self):
        return tuple(sorted(self.agents))

    def joined(self):
        return {"box1", "box2"} - self.left

    def _agent(self, host):
        if host not in self.agents:
            raise hosts_of_fleet.cluster.Gone(host)
        return self.agents[host]

    def _forget(self, host):
        """Does nothing: the agents are listed here."""

    def _require_host(self, host):
        """Does nothing: then the caller gets NodeLost."""


@pytest.fixture
def boxes(tmp_path):
    """The runtimes of two hosts, each with an idle model of the same name."""
    made = {}
    for name in ("box1", "box2"):
        made[name] = Runtime(devices="sim:24GiB,host:64GiB", ledger=f"keeper://{tmp_path}/{name}")
        made[name].register("qwen", backend="fake", size="8GiB")
        made[name].preload("qwen")
    yield made
    for rt in made.values():
        rt.close()


class Call:
    """A call of an agent, as a reference of Ray: its result is there once the host is not frozen."""

    def __init__(self, fleet, host, run):
        self.fleet, self.host, self.run = fleet, host, run

    @property
    def ended(self):
        return self.host not in self.fleet.frozen


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def fleet(boxes, monkeypatch, clock):
    """The fleet of the boxes. A wait for a frozen host moves the `clock`."""
    found = StandInFleet(**boxes)

    def on(agent, method, group, *args, again=False):
        """Begins a call."""
        [host] = [name for name, one in found.agents.items() if one is agent]
        found.sent.append(host)
        return Call(found, host, lambda: getattr(agent, method)(*args))

    def ended(calls, seconds):
        """Waits for all calls, as Ray does."""
        calls = list(calls)
        if not all(call.ended for call in calls):
            clock.advance(seconds)
        return [call for call in calls if call.ended]

    def answer(call, timeout, ping=None):
        """The result of the call."""
        if not ended([call], timeout):
            raise hosts_of_fleet.cluster.Unreachable(call.host)
        # The agent is another process: it does not have the context of the caller.
        return contextvars.Context().run(call.run)

    monkeypatch.setattr(hosts_of_fleet, "on", on)
    monkeypatch.setattr(hosts_of_fleet.cluster, "ended", ended)
    monkeypatch.setattr(hosts_of_fleet.cluster, "answer", answer)
    return found


def where(rt):
    return [lease.where for lease in rt.status().leases()]


def no_answer():
    return pytest.raises(FleetUnavailable, match="box2 does not answer")


@pytest.fixture
def wall():
    return Clock()


@pytest.fixture
def hosts(fleet, clock, wall):
    """The hosts as the console reads them."""
    return FleetHosts(fleet, clock=clock, wall=wall)


def evicted(rt):
    """Evicts the model of the host, as a person confirms it."""
    snapshot = rt.status()
    [lease] = snapshot.leases()
    return attempt(rt, propose("evict", f"{lease.owner}/qwen", snapshot), "ann, console")[0]


def test_an_action_reaches_the_chosen_host_only_and_its_journal_names_the_visitor(hosts, boxes):
    """Both hosts have a model of the same name. The check before the action reads the host on which the action runs."""
    assert evicted(hosts.runtime("box2")) == "done"
    assert where(boxes["box2"]) == ["host"] and where(boxes["box1"]) == ["sim:0"]
    assert boxes["box2"].why("qwen")[0].by.startswith("ann, console")


@pytest.mark.parametrize(
    "verb", ["pin", "unpin", "evict", "restore", "drain", "undrain", "compact"]
)
def test_every_action_of_the_console_is_a_verb_of_the_agent(hosts, verb):
    rt = hosts.runtime("box1")
    snapshot = rt.status()
    [lease] = snapshot.leases()
    target = "/sim:0" if verb in ("drain", "undrain", "compact") else f"{lease.owner}/qwen"
    state, words = attempt(rt, propose(verb, target, snapshot), "ann")
    assert "AttributeError" not in words and "no verb" not in words, words


def test_the_agent_is_named_in_the_figures_of_its_host(boxes):
    """On the console, `this process` would mean the console itself."""
    own = boxes["box1"].status()
    seen = seen_from_outside(own, "box1")
    assert seen.sections[own.owner.id].owner.label.startswith("agent of box1 (pid ")
    assert seen.owner.id not in seen.sections
    assert [lease.owner for lease in seen.leases()] == [own.owner.id]


def test_a_host_that_is_gone_keeps_its_last_figures_and_their_age(hosts, fleet, clock, wall):
    """No request is sent to the host that is gone, so it does not delay the other hosts' figures."""
    rt = hosts.runtime("box2")
    before, answered_at = hosts.last.hosts, wall.now
    gone = fleet.agents.pop("box2")
    fleet.sent.clear()
    for _ in range(2):  # the time is that of the last answer
        clock.advance(10)
        wall.advance(10)
        found = hosts.read()
    assert [one.host for one in found.hosts] == ["box1", "box2"]
    assert found.hosts[1] is before[1] and found.silent == {"box2": answered_at}
    with no_answer():
        rt.status()
    assert {*fleet.sent} == {"box1"}
    fleet.agents["box2"] = gone
    clock.advance(10)
    assert hosts.read().silent == {}
    del fleet.agents["box2"]
    fleet.left.add("box2")
    clock.advance(10)
    assert [one.host for one in hosts.read().hosts] == ["box1"], "it has left the fleet"


def test_a_frozen_host_delays_no_figure_of_another_host(hosts, fleet, clock, wall):
    """It does not even end a call: it is asked once, and awaited once, for BRIEF_SECONDS."""
    before, answered_at = hosts.read().hosts, wall.now
    fleet.frozen.add("box2")
    fleet.sent.clear()
    waited, seen = [], []
    for _ in range(10):
        clock.advance(READ_SECONDS)
        wall.advance(READ_SECONDS)
        began = clock.now
        seen.append(hosts.read())
        waited.append(clock.now - began)
    assert waited == [pytest.approx(fleet_console.BRIEF_SECONDS)] + [0.0] * 9
    assert fleet.sent.count("box2") == 1
    assert len({id(one.hosts[0]) for one in seen}) == fleet.sent.count("box1") == 10
    assert {id(one.hosts[1]) for one in seen} == {id(before[1])}
    assert seen[0].silent == {} and seen[-1].silent == {"box2": answered_at}
    fleet.frozen.clear()
    found = hosts.read()
    assert found.silent == {} and found.hosts[1] is not before[1]


def test_the_page_of_a_frozen_host_waits_for_it_once(hosts, fleet, clock):
    """The poller of that page also draws the bars of all hosts. It waits until the host is silent."""
    rt = hosts.runtime("box2")
    last = rt.last_status()
    fleet.frozen.add("box2")
    began = clock.now
    assert rt.last_status() == last == rt.last_status(), "it may only be slow"
    for ask in (rt.history, rt.status):
        with no_answer():
            ask()
    waited = fleet_console.BRIEF_SECONDS + fleet_console.PATIENCE_SECONDS
    assert clock.now - began == pytest.approx(waited)
    with no_answer():
        rt.last_status()
    assert clock.now - began == pytest.approx(waited)
    assert fleet.sent.count("box2") == 4, "two answers, and two questions that have none"
    fleet.frozen.clear()
    assert rt.last_status().host == "box2"


def test_an_action_on_a_busy_host_waits_for_its_answer(hosts, fleet, boxes, clock):
    """The host is slow: the poller's question is older than BRIEF_SECONDS when a person acts."""
    rt = hosts.runtime("box2")
    fleet.frozen.add("box2")
    with contextlib.suppress(FleetUnavailable):
        rt.last_status()
    clock.advance(fleet_console.BRIEF_SECONDS)
    fleet.frozen.clear()
    assert evicted(rt) == "done" and where(boxes["box2"]) == ["host"]


def test_a_host_that_never_answered_has_a_page_and_no_figures(hosts, fleet):
    fleet.frozen.add("box2")
    assert [one.host for one in hosts.read().hosts] == ["box1"]
    with no_answer():
        hosts.runtime("box2").last_status()


def test_a_host_whose_answer_is_an_error_is_silent_until_it_answers(hosts, fleet, clock):
    hosts.read()
    rt, agent = hosts.runtime("box2"), fleet.agents["box2"]
    usual, agent.rt = agent.rt, SimpleNamespace()
    clock.advance(READ_SECONDS)
    assert {*hosts.read().silent} == {"box2"}
    with no_answer():
        rt.last_status()
    agent.rt = usual
    clock.advance(READ_SECONDS)
    assert hosts.read().silent == {} and rt.last_status().host == "box2"


def test_a_fleet_of_many_hosts_is_read_less_often(hosts, fleet, clock, monkeypatch):
    monkeypatch.setattr(fleet_console, "HOSTS_A_SECOND", 0.5)
    for _ in range(8):
        hosts.read()
        clock.advance(READ_SECONDS)
    assert fleet.sent == ["box1", "box2"] * 2, "two hosts are read every four seconds"


def test_all_sessions_share_one_reading_a_second_and_one_runtime_a_host(hosts, fleet, clock):
    assert hosts.runtime("box2") is hosts.runtime("box2")
    assert hosts.runtime("never heard of").host == "box1"
    assert FleetHosts(SimpleNamespace(hosts=lambda: ())).runtime("box1") is None
    for readings in (1, 2):
        for _ in range(2):
            hosts.read()
        assert fleet.sent == ["box1", "box2"] * readings
        clock.advance(READ_SECONDS)
