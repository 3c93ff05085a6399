"""Measures a call through the fleet, in one run with what it is compared with.

Five tokens of the sample model are compared with the same call of the model in this process. A call that only returns
its argument is compared with Ray's own actor call.

Blocks of calls alternate. In the fleet's call, the model runs in a child process of the agent, so the argument and the
result pass one process more than in Ray's own call.
"""

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
from gpu_runtime import samples
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


SAMPLE = """---
apiVersion: model.aispec.org/v1alpha1
kind: Model
metadata: {{name: {name}}}
spec: {{path: {path}, layout: single}}
"""
TOKENS = 5
SAMPLES = {  # sizes of the sample model, by the words of its row
    f"{TOKENS} tokens of the sample model": None,
    f"{TOKENS} tokens of the sample model with 200 MiB": "200 MiB",
}


class Echo:
    """An actor of Ray whose call returns its argument."""

    def call(self, value: Any) -> Any:
        """The `value`."""
        return value


@contextlib.contextmanager
def started() -> Iterator[tuple[Any, Any, dict[str, Path]]]:
    """A fleet of one host with all models, its hosts, and the directory of each sample model, by its row."""
    hosts = drill.start({"box1": "sim:24GiB,host:1GiB"})
    try:
        fleet = gpu_runtime.fleet(hosts.address)
        place = Path(tempfile.mkdtemp())
        paths = {}
        models = MODEL
        for number, (row, size) in enumerate(SAMPLES.items()):
            paths[row] = samples.causal_lm(place / f"writer{number}", size=size)
            models += SAMPLE.format(name=paths[row].name, path=paths[row])
        file = place / "models.yaml"
        file.write_text(models)
        fleet.apply(file, copies=0)
        yield fleet, hosts, paths
    finally:
        hosts.close()


def sample_model(fleet: Any, sample: Path) -> dict[str, float]:
    """The median seconds of TOKENS tokens of the model in `sample`: here, and through the fleet."""

    def tokens(model: Any) -> Callable[[], float]:
        words = model.tokenizer("one two three", return_tensors="pt")

        def one() -> float:
            began = time.perf_counter()
            found = model.generate(**words, max_new_tokens=TOKENS, do_sample=False)
            seconds = time.perf_counter() - began
            assert found.shape[1] == words["input_ids"].shape[1] + TOKENS
            return seconds

        return one

    name = sample.name
    with gpu_runtime.Runtime(devices="sim:24GiB,host:1GiB", ledger="memory:") as rt:
        rt.register(name, sample)
        with rt.use(name) as here, fleet.use(name) as there:
            calls = {"here": tokens(here), "fleet": tokens(there)}
            taken: dict[str, list[float]] = {where: [] for where in calls}
            for _ in range(BLOCKS):
                for where, call in calls.items():
                    taken[where] += [call() for _ in range(FIRST_CALLS + 5)][FIRST_CALLS:]
    return {where: statistics.median(all) for where, all in taken.items()}


@contextlib.contextmanager
def callers(fleet: Any, hosts: Any) -> Iterator[dict[str, Callable[[Any], Any]]]:
    """A function for Ray's own call and one for the fleet's call, each with its name."""
    node = hosts.nodes["box1"].node_id
    ray = cluster.ray()
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    actor = ray.remote(num_cpus=0, scheduling_strategy=affinity)(Echo).remote()
    with fleet.use("echo") as model:
        yield {"ray": lambda value: ray.get(actor.call.remote(value)), "fleet": model}


def figures() -> dict[str, dict[str, float]]:
    """The median seconds of each call, by the payload and by the name of the caller."""
    found = {}
    with started() as (fleet, hosts, paths), callers(fleet, hosts) as calls:
        for row, path in paths.items():
            found[row] = sample_model(fleet, path)
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
