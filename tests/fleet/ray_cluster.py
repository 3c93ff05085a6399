"""A Ray cluster on this machine, with hosts that have simulated cards. Every host is a Ray node."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpu_runtime.fleet import drill
from gpu_runtime.fleet.drill import Drill
from tests.isolation import HOME

ROOT = Path(__file__).parents[2]
PATHS = [
    str(ROOT / "tests" / "fleet" / "without_grammar"),
    *(str(ROOT / folder) for folder in ("", "kernel_ext", "panels")),
]
ENVIRONMENT = drill.ENVIRONMENT | {
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 2,
    "EVICTION_GRACE_SECONDS": "0",  # an idle model leaves at once
    "GPU_RELIEF": "never",  # what leaves, leaves for a request by name
    "RAY_health_check_timeout_ms": "5000",  # a node of a busy machine is slow, not dead
    "PYTHONPATH": os.pathsep.join(PATHS),
}


class Hosts(Drill):
    """The hosts of one cluster, by name."""

    def freeze(self, name: str) -> Callable[[], None]:
        """Stops all processes of the node, as when a virtual machine is paused. Returns a function
        that continues them.
        """
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
        """Starts a separate process, a Ray driver, that runs `code` with an open `fleet`."""
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
    # Ray's logs and sockets are in a directory of the tests, which is removed at the end.
    found = Hosts(directory, f"{HOME}/ray")
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
        found.close()
        patch.undo()
