"""Figures that a route reads in a thread while calls come and go in the event loop."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_runtime.serving.api.openai import Job, Jobs
from gpu_runtime.serving.breaker import Breakers
from gpu_runtime.serving.queue import Queue
from gpu_runtime.serving.records import Usage

numbers = itertools.count()


class Busy(SimpleNamespace):
    """A value in the dict `among`, to which the event loop adds another one whenever a thread reads this one."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("_"):
            super().__getattribute__("_among")[next(numbers)] = SimpleNamespace()
        return found


def waiting() -> Callable[[], Any]:
    queue = Queue(lambda *_: None, bool, len, clock=float)  # type: ignore[arg-type]
    queue._waiting[1] = Busy(_among=queue._waiting, waiting=SimpleNamespace(model="qwen"))
    return queue.depth


def running() -> Callable[[], Any]:
    queue = Queue(lambda *_: None, bool, len, clock=float)  # type: ignore[arg-type]
    queue._models["qwen"] = Busy(_among=queue._models, active=1)
    return queue.active


def breakers() -> Callable[[], Any]:
    made = Breakers(float)
    made._breakers["qwen"] = Busy(_among=made._breakers, state=lambda: "closed")
    return made.states


def usage() -> Callable[[], Any]:
    made = Usage()

    class Place(tuple):
        def __iter__(self) -> Any:
            made._new[next(numbers)] = [1, 1, 1]  # type: ignore[index]
            return super().__iter__()

    made._new[Place(("2998-01-01", "ann", "qwen"))] = [1, 2, 3]  # type: ignore[index]
    return lambda: [row[:2] for row in made._rows()]


def jobs() -> Callable[[], Any]:
    made = Jobs(float)

    class BusyJob(Job):
        def as_json(self) -> Any:
            made._jobs[str(next(numbers))] = Job("/v1/embeddings", 1.0)
            return super().as_json()

    made._jobs["a"] = BusyJob("/v1/embeddings", 1.0, "ann", id="a")
    return lambda: [row["id"] for row in made.of("ann")]


@pytest.mark.parametrize(
    ("figures", "seen"),
    [
        (waiting, {"qwen": 1}),
        (running, {"qwen": 1}),
        (breakers, {"qwen": "closed"}),
        (usage, [("2998-01-01", "ann")]),
        (jobs, ["a"]),
    ],
)
def test_a_scrape_does_not_fail_when_a_call_arrives_meanwhile(figures, seen):
    """`/metrics`, `/usage` and `/v1/jobs` failed: a dictionary changed size during iteration."""
    assert figures()() == seen
