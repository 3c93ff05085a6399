"""Measures how long a fleet needs after a loss, and after a notebook's request, on a Ray cluster of local processes.

    python -m tests.bench.bench_fleet_losses

Three hosts with simulated cards, fake models, and Ray's short health settings. Each time is one measurement.
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gpu_runtime
from gpu_runtime import Runtime
from gpu_runtime.facts import PlanLevel
from gpu_runtime.fleet import cluster
from tests.clock import until
from tests.fleet.ray_cluster import Hosts, started, write_models

HOSTS = {
    "box1": ("sim:2x80GiB,host:1GiB", 2),
    "box2": ("sim:2x40GiB,host:1GiB", 2),
    "box3": ("sim:1x40GiB,host:1GiB", 1),
}
MODELS = {"seventy": 70, "thirty": 30, "small": 4}
CALLS = 20
DRIVER = """
with fleet.use("small") as model:
    print(model.host, flush=True)
    input()
"""


class Loss(NamedTuple):
    """What was measured, its seconds, and the seconds that it may take."""

    what: str
    seconds: float
    target: float | None


def figures() -> Iterator[Loss]:
    """All measurements, in the order in which the hosts are lost."""
    directory = Path(tempfile.mkdtemp())
    with started(directory, HOSTS) as hosts:
        fleet = gpu_runtime.fleet(hosts.address)
        fleet.apply(write_models(directory / "models.yaml", MODELS), copies=0)
        yield from _notebook(fleet, hosts)
        yield _controller(fleet)
        yield _driver(fleet, hosts)
        yield _killed(fleet, hosts)
        yield from _frozen(fleet, hosts)


def _until(condition: Callable[[], Any], what: str) -> float:
    began = time.perf_counter()
    until(condition, what)
    return time.perf_counter() - began


def _notebook(fleet: Any, hosts: Hosts) -> list[Loss]:
    """A notebook takes both cards of box1, which has an idle model of the fleet."""
    with fleet.use("seventy") as model:
        assert model.host == "box1"

    def level() -> PlanLevel:
        """What box1 offers."""
        return next(offer.level for offer in fleet.plan("seventy") if offer.host == "box1")

    assert level() is PlanLevel.HERE
    with Runtime(
        devices=HOSTS["box1"][0], ledger=hosts.ledger("box1"), eviction_grace_seconds=0.0
    ) as notebook:
        began = time.perf_counter()
        with notebook.lease("72 GiB", purpose="a"), notebook.lease("72 GiB", purpose="b"):
            recalled = time.perf_counter() - began
            noticed = _until(lambda: level() in (PlanLevel.WAIT, PlanLevel.NEVER), "a new offer")
            event = fleet.why("seventy")["box1"][0]
            assert "needs room for b" in event.because, event
    what = "a notebook leases a host's two cards, until the fleet's idle model has left; `why` names the lease"
    return [
        Loss(what, recalled, None),
        Loss("the same, until the host's offer has changed", noticed, 1.0),
    ]


def _controller(fleet: Any) -> Loss:
    before = fleet._wishes()
    pid = fleet._ask_controller("ready", cluster.versions())
    taken = []
    for number in range(CALLS):
        if number == 5:
            os.kill(pid, signal.SIGKILL)
        began = time.perf_counter()
        with fleet.use(("small", "thirty")[number % 2]) as model:
            assert model(number) == number
        taken.append(time.perf_counter() - began)
    assert fleet._wishes() == before and fleet._ask_controller("ready", cluster.versions()) != pid
    what = f"the controller killed during {CALLS} uses with a call each, none of which fails: the longest"
    return Loss(what, max(taken), None)


def _driver(fleet: Any, hosts: Hosts) -> Loss:
    driver = hosts.client(DRIVER)
    assert driver.stdout is not None
    host = driver.stdout.readline().strip()
    leases = fleet.host(host).leases

    def pins() -> int:
        """The pins of the model on its host."""
        table = leases()
        return int(table[table["model"] == "small"]["pins"].sum())

    assert pins() == 1
    driver.kill()
    seconds = _until(lambda: not pins(), "the pin ends")
    driver.wait()
    return Loss("a client killed, until its pin has ended", seconds, 1.0)


def _elsewhere(fleet: Any, host: str, what: str, target: float, lose: Callable[[], Any]) -> Loss:
    """The time from `lose()` to the answer of a call that began on `host`."""
    others = [one for one in fleet.hosts() if one != host]
    for other in others:
        fleet.drain(other)
    with fleet.use("thirty", retry=True) as model:
        assert model.host == host and model("first") == "first"
        for other in others:
            fleet.drain(other, undo=True)
        began = time.perf_counter()
        lose()
        assert model("second") == "second" and model.host != host
        return Loss(what, time.perf_counter() - began, target)


def _killed(fleet: Any, hosts: Hosts) -> Loss:
    what = "a node killed, until the call is answered elsewhere"
    return _elsewhere(fleet, "box3", what, 2.0, lambda: hosts.kill("box3"))


def _frozen(fleet: Any, hosts: Hosts) -> list[Loss]:
    wake: list[Callable[[], None]] = []
    what = "a node frozen, until the call is answered elsewhere"
    elsewhere = _elsewhere(fleet, "box2", what, 5.0, lambda: wake.append(hosts.freeze("box2")))
    with Runtime(devices=HOSTS["box2"][0], ledger=hosts.ledger("box2")) as notebook:
        wake[0]()

        def holds_nothing() -> bool:
            """Whether no lease is in the book of the woken host."""
            notebook.reap()
            return not list(notebook.status().leases())

        freed = _until(holds_nothing, "the woken host holds nothing")
    return [elsewhere, Loss("the frozen node wakes, until it holds nothing", freed, None)]


if __name__ == "__main__":
    for loss in figures():
        load = os.getloadavg()[0]
        print(
            f"{loss.what}: {loss.seconds:.2f} s (target {loss.target}, load {load:.1f})", flush=True
        )
