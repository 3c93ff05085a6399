"""The route `/metrics`: the figures for alerts, in Prometheus' format.

Gauges are read from one Snapshot at each scrape. Counters from the host's book may restart from 0 when the host boots;
Prometheus expects that counters can restart. Counters by reason, and histograms of durations, count only the events
that the journal records after the start of this server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

from ...facts import AllocatorMap, Event, ProblemKind, Snapshot, problems

SECONDS_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
EVICTION_ACTIONS = ("offloaded", "unloaded", "lost")
VERDICT_ACTIONS = ("granted", "waiting", "refused")
BREAKER_VALUES = {"closed": 0, "half-open": 1, "half_open": 1, "open": 2}
TOTALS = {
    "evictions": "Models that left a card or the warm pool",
    "offloads": "Moves to host memory",
    "unloads": "Models dropped",
    "restorations": "Returns from host memory",
    "loads": "Models loaded",
    "refusals": "Requests refused",
}


class Scraped:
    """A registry that calls `collect` at each scrape, for figures that are read anew."""

    def __init__(self) -> None:
        """Registers this object. The registry also has the figures of the process."""
        disable_created_metrics()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def text(self, accepts: str) -> tuple[bytes, str]:
        """The metrics and their content type, in the format of the scraper's header `accepts`."""
        if "application/openmetrics-text" in accepts:
            return openmetrics(self.registry), OPENMETRICS
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def describe(self) -> list[Any]:
        """An empty list. Without this method, the registry would call `collect` to learn the names of the metrics."""
        return []


class Metrics(Scraped):
    """The metrics of one server."""

    def __init__(
        self,
        rt: Any,
        gateway_state: Callable[[], Any],
        call_figures: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        """The metrics of the runtime `rt` and of its gateway.

        `gateway_state()` returns the state of the gateway, and `call_figures()` its histograms.
        """
        super().__init__()
        self._rt = rt
        self._state = gateway_state
        self._figures = call_figures
        self._lock = threading.Lock()
        self._evictions = Counter(
            "gpu_evictions_by_reason",
            "Models that left a card or the warm pool",
            ["reason", "action"],
            registry=self.registry,
        )
        self._verdicts = Counter(
            "gpu_verdicts",
            "Requests for memory: granted, waiting, refused",
            ["verdict", "reason"],
            registry=self.registry,
        )
        self._seconds = {"loaded": self._histogram("load"), "restored": self._histogram("restore")}
        self._seen = self._newest(rt.status())  # (wall, seq) of the last counted event

    def text(self, accepts: str) -> tuple[bytes, str]:
        """See `Scraped.text`. The new events are counted first."""
        self._count_new_events()
        return super().text(accepts)

    def collect(self) -> Iterator[Any]:
        """Yields the figures that are read anew. The registry calls this method at each scrape."""
        snapshot: Snapshot = self._rt.status()
        yield from devices([((), snapshot)])
        for name, text in TOTALS.items():
            value = snapshot.totals.get(name, 0)
            yield CounterMetricFamily(f"gpu_{name}", f"{text}, since the boot", value)
        waiting = len(snapshot.tickets)
        yield GaugeMetricFamily("gpu_waiting_requests", "Requests for memory that wait", waiting)
        yield GaugeMetricFamily("gpu_processes", "Processes that take part", len(snapshot.sections))
        yield from _problems(snapshot)
        yield from _allocators(self._rt.allocator_maps(), snapshot)
        yield from calls(self._state())
        yield from self._figures()

    def _histogram(self, name: str) -> Histogram:
        return Histogram(
            f"gpu_{name}_seconds",
            f"Seconds that a {name} took",
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )

    def _count_new_events(self) -> None:
        with self._lock:
            pause = max(0.0, time.time() - self._seen[0])
            history = self._rt.history(pause + 60.0, 2).events  # other clocks may be a little late
            new = [event for event in history if (event.wall, event.seq) > self._seen]
            for event in new:
                self._count(event)
            self._seen = max([self._seen, *((event.wall, event.seq) for event in new)])

    def _count(self, event: Event) -> None:
        if event.action in EVICTION_ACTIONS:
            self._evictions.labels(event.reason, event.action).inc()
        elif event.action in VERDICT_ACTIONS:
            self._verdicts.labels(event.action, event.reason).inc()
        if event.action in self._seconds:  # 0 seconds mean less than a millisecond
            self._seconds[event.action].observe(event.seconds)

    @staticmethod
    def _newest(snapshot: Snapshot) -> tuple[float, int]:
        events = ((event.wall, event.seq) for event in snapshot.events)
        return max(events, default=(snapshot.wall, 0))


def _allocators(maps: Iterable[AllocatorMap], snapshot: Snapshot) -> Iterator[CounterMetricFamily]:
    """Yields the counters of the allocator of each process on each card. They end with the process."""
    counters = (
        ("gpu_allocator_retries", "Allocations that needed the cache to be released first"),
        ("gpu_allocator_out_of_memory", "Allocations that failed for want of memory"),
    )
    families = [CounterMetricFamily(*one, labels=["device", "pid"]) for one in counters]
    for one in maps:
        section = snapshot.sections.get(one.owner)
        if section is None:
            continue
        for family, count in zip(families, (one.alloc_retries, one.ooms), strict=True):
            family.add_metric([one.device, str(section.owner.pid)], count)
    yield from families


def _problems(snapshot: Snapshot) -> Iterator[GaugeMetricFamily]:
    """Yields the problems of each kind, and the bytes that they concern. A kind without a problem has the value 0."""
    counts, sizes = dict.fromkeys(ProblemKind, 0), dict.fromkeys(ProblemKind, 0)
    for problem in problems(snapshot):
        counts[problem.kind] += 1
        sizes[problem.kind] += problem.bytes
    yield gauge("gpu_problems", "Problems of the host", ["kind"], counts.items())
    yield gauge("gpu_problem_bytes", "Memory in these problems", ["kind"], sizes.items())


# Counters that do not say how a call ended. `gpu_calls` counts the same calls too, by how they ended.
_NO_ENDS = {
    "streamed": "Calls that were answered as a stream",
    "stood_in": "Calls that another model answered, because the first one failed",
    "reloads": "Models that were reloaded because their engine could not decode",
}


def calls(state: Any) -> Iterator[Any]:
    """Yields the figures of the gateway.

    A model that has a breaker but no call now gets the value 0. If it had no value, Prometheus could not compute sums
    over models.
    """
    waiting = {**dict.fromkeys(state.breakers, 0), **state.waiting}
    yield gauge("gpu_queue_depth", "Calls that wait for a model", ["model"], waiting.items())
    running = {**dict.fromkeys(state.breakers, 0), **state.running}
    yield gauge("gpu_active_calls", "Calls that a model is answering", ["model"], running.items())
    breakers = _breaker_values(state.breakers)
    yield gauge("gpu_breaker_state", "0 closed, 1 half open, 2 open", ["model"], breakers.items())
    ends = CounterMetricFamily(
        "gpu_calls", "Calls by how they ended, since this server began", labels=["ended"]
    )
    for ended, count in state.counts.items():
        if ended not in _NO_ENDS:
            ends.add_metric([ended], count)
    yield ends
    for name, text in _NO_ENDS.items():
        yield CounterMetricFamily(f"gpu_{name}", text, value=state.counts.get(name, 0))


def _breaker_values(breakers: Mapping[str, Any]) -> dict[str, int]:
    return {model: BREAKER_VALUES.get(breaker.state, 0) for model, breaker in breakers.items()}


def gauge(
    name: str, text: str, labels: list[str], values: Iterable[tuple[str, float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for label, value in values:
        family.add_metric([label], value)
    return family


def _sampled(field: str) -> Callable[[Any], Any]:
    """A function that returns `field` of a device's last measurement, or None if the device was never measured."""
    return lambda view: getattr(view.sample, field) if view.sample else None


_DEVICE_FIGURES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "total_bytes": ("Memory of the device", lambda view: view.device.total_bytes),
    "limit_bytes": ("What may be leased of it", lambda view: view.limit_bytes),
    "claimed_bytes": (
        "What is leased, moves counted on both sides",
        lambda view: view.claimed_bytes,
    ),
    "measured_bytes": ("What is in use, by the driver", lambda view: view.measured_bytes),
    "pressure_ratio": (
        "The larger of claimed / limit and measured / total",
        lambda view: view.pressure,
    ),
    "utilisation_percent": ("How busy it is", _sampled("utilisation_percent")),
    "temperature_celsius": ("Its temperature", _sampled("temperature_celsius")),
    "power_watts": ("What it draws", _sampled("power_watts")),
}


def devices(
    snapshots: Iterable[tuple[tuple[str, ...], Snapshot]], labels: tuple[str, ...] = ()
) -> Iterator[GaugeMetricFamily]:
    """Yields the figures of each device of `snapshots`.

    Each of `snapshots` is a pair: the values of the additional labels, and a snapshot. `labels` are the names of these
    labels, in the same order.

    A figure that the driver does not report is left out, since the value 0 would be wrong.
    """
    listed = list(snapshots)
    for name, (text, figure) in _DEVICE_FIGURES.items():
        names = [*labels, "device", "name", "simulated"]
        family = GaugeMetricFamily(f"gpu_device_{name}", text, labels=names)
        for given, snapshot in listed:
            for view in snapshot.devices:
                value = figure(view)
                if value is not None:
                    device = view.device
                    simulated = str(device.simulated).lower()
                    family.add_metric([*given, device.id, device.name, simulated], value)
        yield family
