"""The route `/metrics`: the figures for alerts, in Prometheus' format.

Gauges are read from one Snapshot at each scrape. Counters from the host's book may restart from 0 when the host boots;
Prometheus expects that counters can restart. Counters by reason, and histograms of durations, count only the events
that the journal records after the start of this server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
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
BREAKER_VALUES = {"closed": 0, "half-open": 1, "open": 2}
TOTALS = {
    "evictions": "Models that left a card or the warm pool",
    "offloads": "Moves to host memory",
    "unloads": "Models dropped",
    "restorations": "Returns from host memory",
    "loads": "Models loaded",
    "refusals": "Requests refused",
}

# Counters that do not say how a call ended. `gpu_calls` counts the same calls too, by how they ended.
_NO_ENDS = {
    "streamed": "Calls that were answered as a stream",
    "stood_in": "Calls that another model answered, because the first one failed",
    "reloads": "Models that were reloaded because their engine could not decode",
}


class Scraped:
    """A registry with figures that are read anew at each scrape, by `collect`, and with those of the process."""

    def __init__(self, gateway: Callable[[], Any]) -> None:
        """Registers this object. `gateway()` returns the gateway of the server."""
        disable_created_metrics()
        self._gateway = gateway
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def text(self, accepts: str) -> tuple[bytes, str]:
        """The metrics and their content type, in the format of the scraper's header `accepts`."""
        if "application/openmetrics-text" in accepts:
            return openmetrics(self.registry), OPENMETRICS
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def calls(self) -> Iterator[Any]:
        """Yields the figures of the gateway.

        A model that has a breaker but no call now gets the value 0, else Prometheus could not sum over models.
        """
        state = self._gateway().state()
        idle = dict.fromkeys(state.breakers, 0)
        waiting, running = {**idle, **state.waiting}, {**idle, **state.running}
        yield gauge("gpu_queue_depth", "Calls that wait for a model", ["model"], waiting.items())
        text = "Calls that a model is answering"
        yield gauge("gpu_active_calls", text, ["model"], running.items())
        values = [(model, BREAKER_VALUES[one.state]) for model, one in state.breakers.items()]
        yield gauge("gpu_breaker_state", "0 closed, 1 half open, 2 open", ["model"], values)
        ends = [(end, count) for end, count in state.counts.items() if end not in _NO_ENDS]
        text = "Calls by how they ended, since this server began"
        yield _labelled(CounterMetricFamily("gpu_calls", text, labels=["ended"]), ends)
        for name, text in _NO_ENDS.items():
            yield CounterMetricFamily(f"gpu_{name}", text, value=state.counts.get(name, 0))
        yield from self._gateway().figures.collect()

    def describe(self) -> list[Any]:
        """No names of metrics. Without this method, the registry would call `collect` to learn them."""
        return []


class Metrics(Scraped):
    """The metrics of one server."""

    def __init__(self, rt: Any, gateway: Callable[[], Any]) -> None:
        """The metrics of the runtime `rt` and of its gateway."""
        super().__init__(gateway)
        self._rt = rt
        self._lock = threading.Lock()
        registry = self.registry
        text = "Models that left a card or the warm pool"
        labels = ["reason", "action"]
        self._evictions = Counter("gpu_evictions_by_reason", text, labels, registry=registry)
        text = "Requests for memory: granted, waiting, refused"
        self._verdicts = Counter("gpu_verdicts", text, ["verdict", "reason"], registry=registry)
        self._seconds = {
            action: Histogram(
                f"gpu_{name}_seconds",
                f"Seconds that a {name} took",
                buckets=SECONDS_BUCKETS,
                registry=registry,
            )
            for action, name in (("loaded", "load"), ("restored", "restore"))
        }
        snapshot = rt.status()
        events = ((event.wall, event.seq) for event in snapshot.events)
        self._seen = max(events, default=(snapshot.wall, 0))  # of the last counted event

    def text(self, accepts: str) -> tuple[bytes, str]:
        """See `Scraped.text`. The new events are counted first."""
        self._count_new_events()
        return super().text(accepts)

    def collect(self) -> Iterator[Any]:
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
        yield from self.calls()

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


def gauge(
    name: str, text: str, labels: list[str], values: Iterable[tuple[str, float]]
) -> GaugeMetricFamily:
    return _labelled(GaugeMetricFamily(name, text, labels=labels), values)


def _labelled(family: Any, values: Iterable[tuple[str, float]]) -> Any:
    for label, value in values:
        family.add_metric([label], value)
    return family


def _sampled(field: str) -> Callable[[Any], Any]:
    """A function that returns `field` of a device's last measurement, or None if there is none."""
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
    """Yields the figures of each device that the driver reports, of pairs of the values of `labels` and a snapshot."""
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
