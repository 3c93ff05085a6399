"""Several hosts on one machine, for drills, runbooks and tests.

Each host is a Ray node with simulated cards and its own ledger. Ray notices a dead node after 1 s instead of 14.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..threads import import_whole
from . import client, cluster
from .hosts import on

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "2",
}
OBJECT_STORE_BYTES = 80 << 20
MOST_STARTS = 3  # of a node: Ray gives its processes 15 s, which is short on a busy machine


class Drill:
    """Hosts of one cluster on this machine, by name. Call `close` at the end."""

    def __init__(self, directory: Path, ray_directory: str = "") -> None:
        """A drill without hosts, with its ledgers in `directory`, and Ray's files in `ray_directory`, if given."""
        self.directory, self._ray_directory = directory, ray_directory
        self.nodes: dict[str, Any] = {}
        self.devices: dict[str, str] = {}
        self.cluster: Any = None

    @property
    def address(self) -> str:
        """The address of the head, for `gpu_runtime.fleet`."""
        return str(self.cluster.address)

    def add(self, name: str, devices: str, cards: int | None = None) -> None:
        """Starts the node of the host `name` with these simulated `devices`. The first node is the head.

        `cards` is the number of cards for Ray; None means the number in `devices`.
        """
        import_whole("ray.cluster_utils")
        from ray.cluster_utils import Cluster

        node: dict[str, Any] = dict(
            num_cpus=1,
            num_gpus=_cards(devices) if cards is None else cards,
            object_store_memory=OBJECT_STORE_BYTES,
            **_ports(),
        )
        self.devices[name] = devices
        if self.cluster is not None:
            self.nodes[name] = self.cluster.add_node(**node)
            return
        if self._ray_directory:
            node["temp_dir"] = self._ray_directory
        node["include_dashboard"] = False
        # `Cluster` always writes a file in Ray's default directory. Ray makes it only if it is used.
        parent = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
        os.makedirs(f"{parent}/ray", exist_ok=True)
        self.cluster = Cluster(initialize_head=True, head_node_args=node)
        self.nodes[name] = self.cluster.head_node

    def ledger(self, name: str) -> str:
        """The URL of the host's ledger."""
        return f"keeper://{self.directory / name}"

    def join(self, name: str) -> None:
        """Lets the host join the fleet."""
        client.join(
            name=name,
            devices=self.devices[name],
            ledger=self.ledger(name),
            node=self.nodes[name].node_id,
            address=self.address,
        )

    def agent_pid(self, name: str) -> int:
        """The process id of the host's agent."""
        agent = cluster.actor(cluster.AGENT + self.nodes[name].node_id)
        return int(cluster.answer(on(agent, "ready", "offers", again=True))["pid"])

    def kill(self, name: str) -> None:
        """Kills the node of the host `name` and its agent at once, as a power cut would."""
        pid = self.agent_pid(name)
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends all hosts, and disconnects this process."""
        cluster.leave()
        if self.cluster is not None:
            self.cluster.shutdown()


def start(hosts: Mapping[str, str]) -> Drill:
    """Starts a new fleet with these `hosts` on this machine. The values are the simulated cards of each host.

    The head is a node of its own, so every host may be killed. This process gets the settings of
    ENVIRONMENT and a new token. For example: `drill.start({"box1": "sim:2x80GiB", "box2": "sim:40GiB"})`.
    """
    os.environ.update(ENVIRONMENT, RAY_AUTH_TOKEN=secrets.token_hex(16))
    directory = tempfile.mkdtemp()
    found = Drill(Path(directory), f"{directory}/ray")
    _start(found, "head", "", 0)
    for name, devices in hosts.items():
        _start(found, name, devices)
    for name in hosts:
        found.join(name)
    return found


def _start(drill: Drill, name: str, devices: str, cards: int | None = None) -> None:
    for attempt in range(1, MOST_STARTS + 1):
        try:
            return drill.add(name, devices, cards)
        except Exception as error:
            if "timed out during startup" not in str(error) or attempt == MOST_STARTS:
                raise
            time.sleep(attempt)


def _cards(devices: str) -> int:
    """The number of cards in `devices`, a value of the setting GPU_DEVICES.

    >>> _cards("sim:2x80GiB,host:1GiB"), _cards("sim:24GiB+12GiB"), _cards("sim:24GiB")
    (2, 2, 1)
    """
    cards = devices.partition(",")[0].removeprefix("sim:")
    counted = re.match(r"(\d+)x", cards)
    return int(counted[1]) if counted else cards.count("+") + 1


def _ports() -> dict[str, int]:
    """Free ports for Ray's own agent processes on a node, which then need not choose ports."""
    names = ("metrics_agent", "runtime_env_agent", "metrics_export", "dashboard_agent_listen")
    with ExitStack() as stack:  # all are open at once, so that they differ
        sockets = [stack.enter_context(socket.socket()) for _ in names]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        found = [opened.getsockname()[1] for opened in sockets]
    return {f"{name}_port": port for name, port in zip(names, found, strict=True)}
