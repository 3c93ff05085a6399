"""What the console reads of a fleet, and which agent carries out its actions. Without Ray."""

from __future__ import annotations

import contextvars
from types import SimpleNamespace

import pytest
from gpu_panels import fleet_hosts
from gpu_panels.acting import attempt
from gpu_panels.data.confirmations import propose
from gpu_panels.fleet_hosts import FleetHosts, seen_from_outside
from msgspec.structs import replace

from gpu_runtime import Runtime
from gpu_runtime.errors import FleetUnavailable
from gpu_runtime.fleet import far_runtime
from gpu_runtime.fleet.agent import HostAgent
from tests.clock import Clock


class StandInFleet:
    """A fleet of agents in this process. A call is carried out at once."""

    def __init__(self, **runtimes):
        self.agents = {name: HostAgent.__new__(HostAgent) for name in runtimes}
        for name, agent in self.agents.items():
            agent.rt = runtimes[name]
        self.left = set()
        self.readings = 0

    def status(self, *, timeout):
        self.readings += 1
        return tuple(
            replace(agent.rt.status(), host=name) for name, agent in sorted(self.agents.items())
        )

    def joined(self):
        return {"box1", "box2"} - self.left

    def _agent(self, host):
        if host not in self.agents:
            raise far_runtime.cluster.Gone(host)
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
        made[name] = Runtime(devices="sim:24GiB,host:64GiB", ledger=f"sqlite://{tmp_path}/{name}")
        made[name].register("qwen", backend="fake", size="8GiB")
        made[name].preload("qwen")
    yield made
    for rt in made.values():
        rt.close()


@pytest.fixture
def fleet(boxes, monkeypatch):
    def on(agent, method, group, *args):
        # The agent is another process: it does not have the context of the caller.
        return contextvars.Context().run(getattr(agent, method), *args)

    monkeypatch.setattr(far_runtime, "on", on)
    monkeypatch.setattr(far_runtime.cluster, "answer", lambda value, timeout: value)
    return StandInFleet(**boxes)


def where(rt):
    return [lease.where for lease in rt.status().leases()]


def test_an_action_reaches_the_chosen_host_only_and_its_journal_names_the_visitor(fleet, boxes):
    """Both hosts have a model of the same name. The check before the action reads the host on which
    the action runs.
    """
    rt = FleetHosts(fleet).runtime("box2")
    snapshot = rt.status()
    [lease] = snapshot.leases()
    proposal = propose("evict", f"{lease.owner}/qwen", snapshot)
    assert attempt(rt, proposal, "ann, console")[0] == "done"
    assert where(boxes["box2"]) == ["host"] and where(boxes["box1"]) == ["sim:0"]
    assert boxes["box2"].why("qwen")[0].by.startswith("ann, console")


@pytest.mark.parametrize(
    "verb", ["pin", "unpin", "evict", "restore", "drain", "undrain", "compact"]
)
def test_every_action_of_the_console_is_a_verb_of_the_agent(fleet, verb):
    rt = FleetHosts(fleet).runtime("box1")
    snapshot = rt.status()
    [lease] = snapshot.leases()
    target = "/sim:0" if verb in ("drain", "undrain", "compact") else f"{lease.owner}/qwen"
    state, words = attempt(rt, propose(verb, target, snapshot), "ann")
    assert "AttributeError" not in words and "no verb" not in words, words


def test_the_agent_is_named_in_the_figures_of_its_host(boxes):
    """On the console, `this process` would mean the console itself. So the agent has a name. The
    lease still belongs to the agent.
    """
    own = boxes["box1"].status()
    seen = seen_from_outside(own, "box1")
    assert seen.sections[own.owner.id].owner.label.startswith("agent of box1 (pid ")
    assert seen.owner.id not in seen.sections
    assert [lease.owner for lease in seen.leases()] == [own.owner.id]


def test_a_host_that_is_gone_keeps_its_last_figures_and_says_since_when(fleet):
    """No request is sent to the host that is gone, so it does not delay the other hosts' figures."""
    clock, wall = Clock(), Clock()
    hosts = FleetHosts(fleet, clock=clock, wall=wall)
    rt = hosts.runtime("box2")
    before = hosts.last.hosts
    gone = fleet.agents.pop("box2")
    wall.now = 100.0
    for _ in range(2):  # the time is that of the first missing answer
        clock.now += 10
        found = hosts.read()
        wall.now += 10
    assert [one.host for one in found.hosts] == ["box1", "box2"]
    assert found.hosts[1] is before[1] and found.silent == {"box2": 100.0}
    with pytest.raises(FleetUnavailable, match="box2 does not answer"):
        rt.status()
    fleet.agents["box2"] = gone
    clock.now += 10
    assert hosts.read().silent == {}


def test_a_host_that_has_left_is_no_longer_listed(fleet):
    clock = Clock()
    hosts = FleetHosts(fleet, clock=clock)
    hosts.read()
    fleet.agents.pop("box2")
    fleet.left.add("box2")
    clock.now += 10
    assert [one.host for one in hosts.read().hosts] == ["box1"]


def test_all_sessions_share_one_reading_a_second_and_one_runtime_a_host(fleet):
    """A fleet of many hosts is read less often."""
    clock = Clock()
    hosts = FleetHosts(fleet, clock=clock)
    assert hosts.runtime("box2") is hosts.runtime("box2")
    assert hosts.runtime("never heard of").host == "box1"
    hosts.read()
    assert fleet.readings == 1
    clock.now += fleet_hosts.READ_SECONDS
    hosts.read()
    assert fleet.readings == 2


def test_a_fleet_without_hosts_has_no_runtime():
    empty = SimpleNamespace(status=lambda timeout: ())
    assert FleetHosts(empty).runtime("box1") is None
