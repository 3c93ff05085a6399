"""A Ray cluster on this machine, with hosts that have simulated cards. Every host is a Ray node."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.isolation import HOME

ROOT = Path(__file__).parents[2]
PATHS = [
    str(ROOT / "tests" / "fleet" / "without_grammar"),
    *(str(ROOT / folder) for folder in ("", "kernel_ext", "panels")),
]
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 2,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # A killed node is noticed after 1 s instead of 14, a frozen one after 3 instead of 65.
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "2",
    "EVICTION_GRACE_SECONDS": "0",  # an idle model leaves at once
    "PYTHONPATH": os.pathsep.join(PATHS),
}
PATIENCE_SECONDS = 60.0


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`. Fails after 60 s, naming `what` was expected."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < until, f"not within {PATIENCE_SECONDS:.0f} s: {what}"
        time.sleep(0.02)
    return found


def _ports() -> dict[str, int]:
    """Free ports for the agents of a node, which then need not write theirs to a file first."""
    sockets = [socket.socket() for _ in range(4)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    names = (
        "metrics_agent_port",
        "runtime_env_agent_port",
        "metrics_export_port",
        "dashboard_agent_listen_port",
    )
    ports = {name: one.getsockname()[1] for name, one in zip(names, sockets, strict=True)}
    for one in sockets:
        one.close()
    return ports


class Hosts:
    """The hosts of one cluster, by name."""

    def __init__(self, directory: Path) -> None:
        """Starts no host yet. Their ledgers are in `directory`."""
        self.directory = directory
        self.nodes: dict[str, Any] = {}
        self.devices: dict[str, str] = {}
        self.cluster: Any = None

    def add(self, name: str, devices: str, cards: int) -> None:
        """Starts a node with that many `cards`. The first node is the head."""
        from ray.cluster_utils import Cluster

        node: dict[str, Any] = dict(
            num_cpus=1,
            num_gpus=cards,
            object_store_memory=80 << 20,
            include_dashboard=False,
            **_ports(),
        )
        self.devices[name] = devices
        if self.cluster is None:
            # Ray's logs and sockets are in a directory of the tests, which is removed at the end.
            node["temp_dir"] = f"{HOME}/ray"
            self.cluster = Cluster(initialize_head=True, head_node_args=node)
            self.nodes[name] = self.cluster.head_node
        else:
            node.pop("include_dashboard")
            self.nodes[name] = self.cluster.add_node(**node)

    def ledger(self, name: str) -> str:
        """The URL of the host's ledger."""
        return f"sqlite://{self.directory / name}"

    def join(self, name: str) -> None:
        """Lets the host join the fleet."""
        from gpu_runtime.fleet import joining

        joining.join(
            name=name,
            devices=self.devices[name],
            ledger=self.ledger(name),
            node=self.nodes[name].node_id,
            address=self.cluster.address,
        )

    def kill(self, name: str) -> None:
        """Kills the node and its agent at once, as a power cut would."""
        pid = self.agent_pid(name)
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)
        os.kill(pid, signal.SIGKILL)

    def agent_pid(self, name: str) -> int:
        """The process id of the host's agent."""
        from gpu_runtime.fleet import cluster

        agent = cluster.actor(cluster.AGENT + self.nodes[name].node_id)
        return cluster.answer(agent.ready.remote())["pid"]

    def freeze(self, name: str) -> Callable[[], None]:
        """Stops all processes of the node, as a virtual machine that is paused. Returns the end."""
        [raylet] = self.nodes[name].all_processes["raylet"]
        pids = [self.agent_pid(name), raylet.process.pid]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

        def wake() -> None:
            """Lets the processes continue."""
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

        return wake

    def client(self, code: str) -> subprocess.Popen[str]:
        """A driver of its own: a process that runs `code` with `fleet` open."""
        program = f"import gpu_runtime\nfleet = gpu_runtime.fleet({self.cluster.address!r})\n{code}"
        return subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT,
        )


def write_models(file: Path, sizes: dict[str, int]) -> Path:
    """Writes fake models of these sizes in GiB into `file`, as `apply` reads them."""
    documents = [
        f"apiVersion: model.aispec.org/v1alpha1\nkind: Model\nmetadata: {{name: {name}}}\n"
        f"spec: {{runtime: fake, memory: {size}GiB, layout: single}}"
        for name, size in sizes.items()
    ]
    file.write_text("\n---\n".join(documents))
    return file


@contextmanager
def started(directory: Path, hosts: dict[str, tuple[str, int]]) -> Iterator[Hosts]:
    """The cluster with these `hosts` (devices and number of cards), which have all joined."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'gpu-console[fleet]'")
    patch = pytest.MonkeyPatch()
    for name, value in ENVIRONMENT.items():
        patch.setenv(name, value)
    import ray  # it reads the environment when it is imported

    found = Hosts(directory)
    try:
        try:
            for name, (devices, cards) in hosts.items():
                found.add(name, devices, cards)
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            pytest.skip("Ray gives its own processes 15 s to start, and this machine is too busy")
        for name in hosts:
            found.join(name)
        yield found
    finally:
        ray.shutdown()
        if found.cluster is not None:
            found.cluster.shutdown()
        patch.undo()
