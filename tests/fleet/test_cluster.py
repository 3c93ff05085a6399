"""What a person reads if there is no Ray, no token, or no cluster."""

import importlib.util
import math
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pandas
import pytest

import gpu_runtime
from gpu_runtime import FleetUnavailable, NodeLost, cli
from gpu_runtime.fleet import cluster, hosts
from gpu_runtime.fleet.agent import HostAgent
from gpu_runtime.fleet.client import Fleet
from gpu_runtime.fleet.drill import Drill

from . import ray_cluster


def test_without_the_extra_the_error_names_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FleetUnavailable, match=r"pip install 'gpu-console\[fleet\]'"):
        gpu_runtime.fleet()
    assert cli.main(["fleet"]) == 1
    assert "gpu-console[fleet]" in capsys.readouterr().err


def test_without_a_token_nothing_connects(monkeypatch):
    """The token is checked before Ray is imported, because Ray reads this setting only once."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'gpu-console[fleet]'")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(FleetUnavailable, match="RAY_AUTH_MODE=token"):
        gpu_runtime.fleet()


@pytest.mark.parametrize("address", ["", None, 7])
def test_an_address_is_text(address):
    with pytest.raises(FleetUnavailable, match="is a text"):
        gpu_runtime.fleet(address)


class FakeRay:
    """A stand-in for Ray with a clock of its own. A reference is the second at which its value is ready."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, references, *, num_returns, timeout):
        in_time = sorted(one for one in references if one <= self.now + timeout)
        enough = in_time[:num_returns]
        complete = len(enough) == num_returns
        self.now = max([self.now, *enough]) if complete else self.now + timeout
        ready = [one for one in references if one <= self.now]
        return ready, [one for one in references if one > self.now]

    def get(self, reference, *, timeout):
        return reference

    exceptions = SimpleNamespace(
        **dict.fromkeys(
            "RayTaskError ActorUnavailableError GetTimeoutError RayActorError ActorUnschedulableError "
            "WorkerCrashedError NodeDiedError ObjectLostError OwnerDiedError".split(),
            OSError,
        )
    )


@pytest.fixture
def ray(monkeypatch):
    found = FakeRay()
    monkeypatch.setattr(cluster, "ray", lambda: found)
    monkeypatch.setattr(cluster, "_has_left", False)
    monkeypatch.setattr(cluster.time, "monotonic", lambda: found.now)
    return found


@pytest.mark.parametrize(
    ("delays", "found", "ended"),
    [
        ((0.1, 0.2), (0.1, 0.2), 0.2),  # all in time
        ((0.1, 9.0), (0.1,), 2.0),  # a slow host is left out, because another can serve
        ((5.0, 9.0), (5.0,), 5.0),  # nobody can serve yet: the first one ends the wait
        ((50.0, 60.0), (), 30.0),  # all are too slow
    ],
)
def test_slow_hosts_are_awaited_only_if_no_other_can_serve(ray, monkeypatch, delays, found, ended):
    """A host may import transformers for its first offer, which is slow. A frozen host must not delay the others."""
    monkeypatch.setattr(cluster, "answer", lambda reference, timeout: reference)
    references = {f"box{n}": delay for n, delay in enumerate(delays)}
    got, missing = cluster.answers(references, 2.0, longest=30.0, enough=lambda some: any(some))
    assert (tuple(got.values()), ray.now) == (found, ended)
    assert set(missing.values()) <= {"it does not answer"}
    assert {*got, *missing} == {*references}


def test_a_call_is_awaited_as_long_as_its_process_answers_another_one(ray):
    """Ray never ends a call of a process that is stopped while its node lives."""
    assert cluster.answer(200.0, 10.0, lambda: ray.now + 0.1) == ray.now == 200.0
    with pytest.raises(cluster.Unreachable, match="no answer within 60 s"):
        cluster.answer(math.inf, 10.0, lambda: ray.now + 0.1 if ray.now < 300.0 else math.inf)
    assert 360.0 < ray.now < 371.0


def test_an_act_on_a_host_whose_agent_restarts_fails_in_plain_words(ray, monkeypatch):
    """It ended with Ray's text about an actor, its id and an IOError, and with advice about a use."""
    monkeypatch.setattr(ray.exceptions, "RayTaskError", LookupError)
    monkeypatch.setattr(ray, "get", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(ray.exceptions, "ActorUnavailableError", ZeroDivisionError)
    monkeypatch.setattr(hosts, "on", lambda *_, **__: 0.0)
    fleet = SimpleNamespace(_agent=str, _forget=str, _require_host=str)
    with pytest.raises(NodeLost) as error:
        hosts.FarRuntime(fleet, "box2").evict("qwen")
    assert str(error.value) == (
        "box2 was lost: it is being restarted or cannot be reached; the call may have run.\n"
        "  See which hosts answer:  gpu fleet"
    )


def test_a_reading_waits_five_seconds_for_a_frozen_host_and_names_it(ray, monkeypatch, caplog):
    """It took up to a minute. As long as no host has answered, it still may."""
    monkeypatch.setattr(cluster, "answer", lambda reference, timeout: pandas.DataFrame({"n": [1]}))
    fleet = Fleet.__new__(Fleet)
    delays = {"box1": 0.2, "box2": 90.0}
    fleet._hosts = SimpleNamespace(
        refresh=lambda: None, ask=lambda *_, **words: cluster.answers(delays, **words)
    )
    assert list(fleet.models()["host"]) == ["box1"] and ray.now == 5.0
    assert "box2 is left out of models: it does not answer" in caplog.text
    delays["box1"] = 20.0
    ray.now = 0.0
    assert list(fleet.models()["host"]) == ["box1"] and ray.now == 20.0


def test_an_agent_of_another_version_says_so_whatever_it_is_asked(monkeypatch):
    """Ray starts an agent again that has crashed, perhaps after an upgrade of its host."""
    monkeypatch.setattr(cluster, "versions", lambda: {"gpu-console": "0.4.0"})
    agent = HostAgent("box1", "sim:1GiB", "memory:", {"gpu-console": "0.0.1"})
    refused = pytest.raises(FleetUnavailable, match="other versions: gpu-console 0.0.1, not 0.4.0")
    for act in (agent.ready, agent.holdings, agent.slots, lambda: agent.verb("status", (), {})):
        with refused:
            act()
    assert "other versions" in agent.offer("qwen", 1).because


def test_a_drill_starts_on_a_machine_where_ray_never_ran(monkeypatch, tmp_path):
    """Ray writes the address of a cluster into its default directory, which it does not make."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("TMPDIR", raising=False)

    class Head:
        node_id = "head"

    class Cluster:
        address, head_node = "127.0.0.1:1", Head()

        def __init__(self, **_: object) -> None:
            write_ray_address("127.0.0.1:1")

    from ray._private.utils import write_ray_address

    monkeypatch.setattr("ray.cluster_utils.Cluster", Cluster)
    Drill(tmp_path, f"{tmp_path}/elsewhere").add("one", "sim:24GiB")
    assert (tmp_path / "ray" / "ray_current_cluster").read_text() == "127.0.0.1:1"


@pytest.mark.parametrize("survives", [True, False])
def test_whoever_imported_ray_first_is_told_what_the_end_of_the_head_costs(
    monkeypatch, caplog, survives
):
    def init(**_):
        raise ConnectionError("nobody listens")

    worker = SimpleNamespace(worker=SimpleNamespace())
    spec = importlib.util.spec_from_loader("ray", None)
    imported = SimpleNamespace(
        is_initialized=lambda: False, init=init, _private=worker, __spec__=spec
    )
    monkeypatch.setattr(cluster, "ray", lambda: imported)
    monkeypatch.setitem(sys.modules, "ray", imported)
    monkeypatch.setattr(cluster, "_survives", survives)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(FleetUnavailable, match="nobody listens"):
        cluster.connect("auto")
    assert (cluster.HEAD_SECONDS in caplog.text) == (not survives)
    assert cluster.HEAD_SECONDS not in os.environ


@pytest.mark.parametrize("given", [True, False], ids=["given", "of the environment"])
def test_an_address_where_nobody_listens_is_told_at_once(monkeypatch, given):
    """Ray tries one for a quarter of an hour."""
    begun = []
    imported = SimpleNamespace(
        is_initialized=lambda: False,
        init=lambda **_: begun.append(1),
        _private=SimpleNamespace(worker=SimpleNamespace()),
    )
    monkeypatch.setattr(cluster, "ray", lambda: imported)
    with socket.socket() as bound:  # it does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(FleetUnavailable, match="there is no Ray cluster at .*refused"):
            cluster.connect(address if given else "auto")
    assert not begun


SURVIVES = """
import time
print("entered", flush=True)
input()
try:
    fleet.status()
except gpu_runtime.FleetUnavailable as error:
    print(str(error), flush=True)
time.sleep(1000)
"""


@pytest.mark.soak
def test_a_notebook_survives_the_head(tmp_path):
    """By default, Ray ends a process whose head does not answer for 60 s, with all that it has computed."""
    with ray_cluster.started(tmp_path, {"box1": ("sim:24GiB", 1)}) as hosts:
        notebook = hosts.client(SURVIVES)
        assert notebook.stdout.readline() == "entered\n"
        [head] = hosts.nodes["box1"].all_processes["gcs_server"]
        head.process.kill()
        notebook.stdin.write("\n")
        notebook.stdin.flush()
        assert "the fleet's head does not answer" in notebook.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            notebook.wait(70)
        notebook.kill()
        notebook.communicate()
