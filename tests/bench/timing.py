"""The times of what is compared. They are measured alternately in one run, so that noise affects all of them."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Waits(NamedTuple):
    """Statistics of several waits, in seconds."""

    count: int
    median: float
    p99: float
    worst: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Waits":
        ordered, count = sorted(seconds), len(seconds)
        p99 = ordered[min(count - 1, count * 99 // 100)]
        return cls(count, statistics.median(ordered), p99, ordered[-1])

    def __str__(self) -> str:
        median, p99, worst = (f"{s * 1e3:.1f} ms" for s in (self.median, self.p99, self.worst))
        return f"p50 {median}, p99 {p99}, worst {worst} ({self.count})"


def seconds(act: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """The seconds of one call of `act`. It may return its own seconds, as a float."""
    began = clock()
    own = act()
    ended = clock()
    return own if isinstance(own, float) else ended - began


def alternately(
    rounds: int,
    *acts: Callable[[], Any],
    clock: Callable[[], float] = time.perf_counter,
    warm: int = 0,
) -> list[list[float]]:
    """The seconds of each of `acts` in each of the rounds. The `warm` rounds before them do not count."""
    taken = [[seconds(act, clock) for act in acts] for _ in range(warm + rounds)]
    return [list(times) for times in zip(*taken[warm:], strict=True)]


def medians(rounds: int, *acts: Callable[[], Any], **options: Any) -> list[float]:
    """The median seconds of each of `acts`; `options` are those of `alternately`."""
    return [statistics.median(times) for times in alternately(rounds, *acts, **options)]
