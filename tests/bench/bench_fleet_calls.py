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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy

import gpu_runtime
from gpu_runtime import samples
from gpu_runtime.fleet import cluster, drill

from .results import Row
from .timing import alternately

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


def sample_model(fleet: Any, sample: Path) -> tuple[float, float]:
    """The median seconds of TOKENS tokens of the model in `sample`: here, and through the fleet."""

    def tokens(model: Any) -> Callable[[], None]:
        words = model.tokenizer("one two three", return_tensors="pt")

        def one() -> None:
            found = model.generate(**words, max_new_tokens=TOKENS, do_sample=False)
            assert found.shape[1] == words["input_ids"].shape[1] + TOKENS

        return one

    name = sample.name
    with gpu_runtime.Runtime(devices="sim:24GiB,host:1GiB", ledger="memory:") as rt:
        rt.register(name, sample)
        with rt.use(name) as here, fleet.use(name) as there:
            return in_blocks(5, tokens(here), tokens(there))


def in_blocks(calls: int, one: Callable[[], Any], other: Callable[[], Any]) -> tuple[float, float]:
    """The median seconds of `one` and of `other`. Blocks of `calls` calls of each alternate."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(BLOCKS):
        for times, call in zip(taken, (one, other), strict=True):
            times += alternately(calls, call, warm=FIRST_CALLS)[0]
    return statistics.median(taken[0]), statistics.median(taken[1])


def rows() -> Iterator[Row]:
    with started() as (fleet, hosts, paths):
        for row, path in paths.items():
            here, there = sample_model(fleet, path)
            what = f"{row} through the fleet, against the same call in this process"
            yield Row.against(what, there, here, 1.1, digits=1)
        node = hosts.nodes["box1"].node_id
        ray = cluster.ray()
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        actor = ray.remote(num_cpus=0, scheduling_strategy=affinity)(Echo).remote()
        what = "a call of a fleet's model that returns its argument, %s, against Ray's own call of such an actor"
        with fleet.use("echo") as model:
            for payload, (count, value) in PAYLOADS.items():
                of_ray = lambda value=value: ray.get(actor.call.remote(value))
                ways = (of_ray, partial(model, value))
                assert all(numpy.array_equal(way(), value) for way in ways)
                alone, through = in_blocks(count, *ways)
                yield Row.against(what % payload, through, alone, 1.1, digits=2)
