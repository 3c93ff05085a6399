"""`gpu serve --fleet` on a real Ray cluster: two hosts on this machine, with simulated cards."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from starlette.testclient import TestClient

import gpu_runtime
from gpu_runtime.fleet import cluster
from gpu_runtime.serving.fleet_server import FleetGateway, FleetModels, fleet_application
from gpu_runtime.settings import Settings
from tests.clock import scaled, until
from tests.fleet.ray_cluster import Hosts, started, write_models
from tests.serving.app_client import OPERATOR, Gateway, with_visitor

DEVICES = "sim:2x40GiB,host:1GiB"
CALLS, AT_ONCE = 30, 6


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("fleet")
    with started(folder, {"box1": (DEVICES, 2), "box2": (DEVICES, 2)}) as found:
        yield found


@pytest.fixture(scope="module")
def models(hosts: Hosts) -> Iterator[FleetModels]:
    fleet = gpu_runtime.fleet(hosts.cluster.address)
    fleet.apply(write_models(hosts.directory / "models.yaml", {"echo": 4, "wide": 60}), copies=0)
    found = FleetModels(fleet, Settings.load())
    yield found
    found.close()


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": text}], **more}


async def whole(gateway: FleetGateway, text: str) -> str:
    reply = await gateway.answer("chat", body(text))
    return reply.json["choices"][0]["message"]["content"]


async def streamed(gateway: FleetGateway, text: str) -> str:
    """The text of an answer that is sent as a stream.

    A stream may be cut off after its first token. Then the client makes the call again.
    """
    reply = await gateway.answer("chat", body(text, stream=True))
    parts = []
    async for event in reply.events:
        if "error" in event:
            assert "".join(parts), "no stream is cut off before its first token"
            return await streamed(gateway, text)
        parts += [choice["delta"].get("content") or "" for choice in event["choices"]]
    return "".join(parts)


def test_the_server_of_each_host_runs_before_a_call_needs_it(models, hosts):

    def listens(host: str) -> bool:
        """Whether a server for HTTP answers in the host's agent."""
        try:
            agent = psutil.Process(hosts.agent_pid(host))
        except (cluster.Unreachable, psutil.Error):  # it is being restarted
            return False
        for one in agent.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and ":" not in one.laddr.ip:  # Ray's are IPv6
                with contextlib.suppress(httpx.HTTPError):
                    url = f"http://{one.laddr.ip}:{one.laddr.port}/health"
                    if httpx.get(url, timeout=5).status_code in (200, 401):
                        return True
        return False

    until(lambda: listens("box1") and listens("box2"), "both servers run")
    os.kill(hosts.agent_pid("box2"), signal.SIGKILL)
    hosts.join("box2")  # it ended an agent that was being restarted
    until(lambda: listens("box2"), "the server of the restarted agent runs")


def test_calls_run_again_elsewhere_while_agents_are_killed(models, hosts):
    """No call is lost before its first token. No call counts as a call of a cloud."""
    texts = [f"{number} two three" for number in range(CALLS)]

    async def all_calls() -> list[str]:
        """Makes all calls, some at once. Twice, the agent that answers is killed."""
        gateway = FleetGateway(models)
        slots = asyncio.Semaphore(AT_ONCE)
        done = 0

        async def one(number: int, text: str) -> str:
            nonlocal done
            async with slots:
                found = await (streamed if number % 2 else whole)(gateway, text)
            done += 1
            if done in (CALLS // 3, CALLS * 2 // 3):
                host = next(h for h, held in models.fleet._holdings().items() if "echo" in held)
                await asyncio.to_thread(lambda: os.kill(hosts.agent_pid(host), signal.SIGKILL))
            return found

        try:
            found = await asyncio.gather(*(one(*each) for each in enumerate(texts)))
            counts = gateway.state().counts
            assert counts["answered"] >= CALLS and counts.keys() == {"answered", "streamed"}
            return found
        finally:
            await gateway.close()

    assert asyncio.run(asyncio.wait_for(all_calls(), scaled(120))) == texts


def test_a_server_ends_while_a_call_runs(models):
    """It stopped the loads of a runtime, and a fleet has none: `gpu serve --fleet` ended with an error."""

    async def close_early() -> None:
        gateway = FleetGateway(models)
        await gateway.answer("chat", body("one two three", stream=True))
        await gateway.close()

    asyncio.run(asyncio.wait_for(close_early(), scaled(60)))


def test_slots_over_http_and_the_metrics_of_each_host(models, hosts):
    app = with_visitor(fleet_application(models, Gateway, None), OPERATOR)
    with TestClient(app, raise_server_exceptions=False) as http:
        until(lambda: http.get("/health").json()["hosts"] == ["box1", "box2"], "all hosts")
        new = {"model": "echo", "host": "box2", "devices": ["sim:1"]}
        os.kill(hosts.agent_pid("box2"), signal.SIGKILL)  # its restart is awaited
        made = http.post("/api/v1/slots", json=new)
        assert made.status_code == 201, made.text
        slot = {
            "id": "echo@box2", "model": "echo", "host": "box2", "wished": True,
            "devices": [{"device": "sim:1", "bytes": 4 << 30}], "active_calls": 0,
        }  # fmt: skip

        def listed() -> bool:
            return slot in http.get("/api/v1/slots").json()["slots"]

        assert listed()
        assert http.get("/api/v1/slots?hots=box2").status_code == 400
        os.kill(hosts.agent_pid("box2"), signal.SIGKILL)
        until(listed, "the slot is filled again")
        row = 'gpuconsole_host_model_bytes{Hostname="box2",model="echo"} 4.294967296e+09'
        until(lambda: row in http.get("/metrics").text, "the new agent answers")
        metrics = http.get("/metrics").text
        claimed = r'gpuconsole_device_claimed_bytes\{Hostname="box2",UUID=".*",device="sim:1"'
        assert re.search(claimed, metrics)
        assert "gpuconsole_hosts 2.0" in metrics and 'gpuconsole_placements{cards="1"}' in metrics
        assert http.post("/api/v1/slots", json={**new, "devices": ["sim:7"]}).status_code == 404
        twice = {**new, "devices": ["sim:0", "sim:0"]}
        assert http.post("/api/v1/slots", json=twice).status_code == 400
        assert http.post("/api/v1/slots", json={**new, "host": "box9"}).status_code == 404
        assert http.post("/api/v1/slots", json={**new, "model": "none"}).status_code == 404
        assert http.post("/api/v1/slots", json={**new, "model": "wide"}).status_code == 507
        assert http.delete("/api/v1/slots/echo@box2").json()["deleted"] is True
        assert not listed()
        assert http.delete("/api/v1/slots/echo@box2").status_code == 404
