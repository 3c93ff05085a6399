"""A host joins or leaves the fleet here, and the controller is found or started here."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from ..errors import BadSetting, FleetUnavailable, GpuError
from ..facts import Outcome
from ..threads import import_whole
from . import cluster
from .agent import GROUPS, HostAgent
from .controller import Controller
from .hosts import on

CARDS_HERE = "cuda"
JOIN_SECONDS = 120.0  # the agent's process starts, and its runtime opens


def controller() -> Any:
    """The handle of the controller. If there is no controller, one is started."""
    module = cluster.ray()
    options = module.remote(Controller).options(
        name=cluster.CONTROLLER,
        namespace=cluster.NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=64,
    )
    return options.remote()


def join(
    *,
    name: str = "",
    devices: str = "",
    ledger: str | None = None,
    address: str = "auto",
    node: str = "",
) -> Outcome:
    """Makes this machine a host of the fleet. Starts its agent, which owns the leases of the models.

    `name` is the name of the host; the default is the machine's name. `devices` are the cards as in GPU_DEVICES;
    simulated cards must be named, as in `sim:2x24GiB`. `ledger` is the URL of the host's ledger, by default that of the
    machine's configuration, as for its notebooks. `address` is the address of Ray's head. `node` is the id of the Ray
    node; the default is the node of this machine. Raises FleetUnavailable.
    """
    cluster.connect(address)
    cluster.require_token()
    module = cluster.ray()
    node = node or module.get_runtime_context().get_node_id()
    host = _free_name(name or socket.gethostname().partition(".")[0], node)
    devices = devices or _devices_here()
    cards = int(cluster.living_nodes().get(node, {}).get("Resources", {}).get("GPU", 0))
    agent = _start_agent(host, node, cards, devices, ledger)
    try:
        cluster.answer(on(agent, "ready", "offers"), JOIN_SECONDS)
    except BadSetting as error:
        module.kill(agent)
        if devices != CARDS_HERE:
            raise
        raise FleetUnavailable(
            f"{host} has no CUDA card that is visible here, so it has nothing to share.\n"
            "  For a drill with simulated cards:  gpu fleet join --devices sim:24GiB",
            why=str(error),
        ) from None
    except GpuError:
        module.kill(agent)
        raise
    except (cluster.Gone, cluster.Unreachable) as error:
        module.kill(agent)
        raise FleetUnavailable(
            f"the agent of {host} did not start ({error}). Does another Ray job use its GPUs?\n"
            "  See:  ray status",
            why=str(error),
        ) from None
    cluster.store_host(node, host)
    cluster.answer(controller().hosts.remote())  # the controller then knows the host
    return Outcome("join", host, True, f"{host} has joined the fleet, with {devices}")


def _start_agent(host: str, node: str, cards: int, devices: str, ledger: str | None) -> Any:
    """Starts the agent of `host` on its `node`. It claims all `cards` in Ray, so that no other task gets them."""
    import_whole("ray.util.scheduling_strategies")
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    module = cluster.ray()
    return (
        module.remote(concurrency_groups=GROUPS)(HostAgent)
        .options(
            name=cluster.AGENT + node,
            namespace=cluster.NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            num_gpus=cards,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(host, devices, ledger, cluster.versions())
    )


def _devices_here() -> str:
    """The cards of this machine as a value of GPU_DEVICES.

    Ray hides cards from processes that did not claim them. There `auto` would find no card, so the value is `cuda`.
    """
    given = os.environ.get("GPU_DEVICES", "")
    return given if given not in ("", "auto") else CARDS_HERE


def _free_name(wanted: str, node: str) -> str:
    """The name `wanted`, or another one if a living host of another node has it."""
    alive = cluster.living_nodes()
    taken = {
        joined.name
        for other, joined in cluster.stored_hosts().items()
        if other in alive and other != node
    }
    return f"{wanted}-{node[:6]}" if wanted in taken else wanted


def leave(*, node: str = "", address: str = "auto") -> Outcome:
    """Takes this machine out of the fleet: frees the models of its agent, and ends the agent.

    `node` is the id of the Ray node; the default is the node of this machine. Raises FleetUnavailable.
    """
    cluster.connect(address)
    module = cluster.ray()
    node = node or module.get_runtime_context().get_node_id()
    joined = cluster.stored_hosts().get(node)
    if joined is None:
        raise FleetUnavailable("this machine is in no fleet.", why="not joined")
    name = joined.name
    cluster.unstore(cluster.HOSTS + node.encode())
    began = time.monotonic()
    try:
        agent = cluster.actor(cluster.AGENT + node)
        cluster.answer(on(agent, "stop", "verbs"))
        module.kill(agent)
    except (cluster.Gone, cluster.Unreachable):
        pass  # the agent has ended already
    took = time.monotonic() - began
    return Outcome("leave", name, True, f"{name} has left the fleet", seconds=took)
