"""Measures a call through the fleet against Ray's own actor call of the same function, in one run.

    python -m tests.bench.bench_fleet_calls

Both functions return their argument. Blocks of calls alternate. In the fleet's call, the model runs in a child
process of the agent, so the argument and the result pass one process more.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy

import gpu_runtime
from gpu_runtime.fleet import cluster, drill

BLOCKS, FIRST_CALLS = 20, 3  # the first calls of a block wake the processes, and are not counted
PAYLOADS: dict[str, tuple[int, Any]] = {  # calls in a block, and the argument
    "an integer": (40, 7),
    "an array of 10 MB": (4, numpy.zeros(1_250_000)),
    "bytes of 10 MB": (4, os.urandom(10_000_000)),
}
MODEL = """apiVersion: model.aispec.org/v1alpha1
kind: Model
metadata: {name: echo}
spec: {runtime: fake, memory: 1GiB, layout: single}
"""


class Echo:
    """An actor of Ray whose call returns its argument."""

    def call(self, value: Any) -> Any:
        """The `value`."""
        return value


@contextlib.contextmanager
def callers() -> Iterator[dict[str, Callable[[Any], Any]]]:
    """A function for Ray's own call and one for the fleet's call, each with its name."""
    hosts = drill.start({"box1": "sim:24GiB,host:1GiB"})
    try:
        fleet = gpu_runtime.fleet(hosts.address)
        file = Path(tempfile.mkdtemp()) / "models.yaml"
        file.write_text(MODEL)
        fleet.apply(file, copies=0)
        node = hosts.nodes["box1"].node_id
        ray = cluster.ray()
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        actor = ray.remote(num_cpus=0, scheduling_strategy=affinity)(Echo).remote()
        with fleet.use("echo") as model:
            yield {"ray": lambda value: ray.get(actor.call.remote(value)), "fleet": model}
    finally:
        hosts.close()


def figures() -> dict[str, dict[str, float]]:
    """The median seconds of each call, by the payload and by the name of the caller."""
    found = {}
    with callers() as calls:
        for payload, (count, value) in PAYLOADS.items():
            taken: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(BLOCKS):
                for name, call in calls.items():
                    seconds = [_timed(call, value) for _ in range(FIRST_CALLS + count)]
                    taken[name] += seconds[FIRST_CALLS:]
            found[payload] = {name: statistics.median(all) for name, all in taken.items()}
    return found


def _timed(call: Callable[[Any], Any], value: Any) -> float:
    began = time.perf_counter()
    found = call(value)
    seconds = time.perf_counter() - began
    assert numpy.array_equal(found, value) if isinstance(value, numpy.ndarray) else found == value
    return seconds


if __name__ == "__main__":
    for payload, seconds in figures().items():
        words = ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in seconds.items())
        print(f"{payload}: {words}, {seconds['fleet'] / seconds['ray']:.2f}×", flush=True)
