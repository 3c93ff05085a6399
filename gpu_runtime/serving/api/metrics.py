"""`/metrics`: the figures that an alert goes by, for Prometheus.

Gauges are read from one Snapshot at each scrape. Counters of the host's book may start again with the boot, as
Prometheus expects of counters; those by reason and the seconds follow the journal from this server's start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

from ...facts import Event, Snapshot

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
LEFT = ("offloaded", "unloaded", "lost")
BREAKER = {"closed": 0, "half-open": 1, "half_open": 1, "open": 2}


class Metrics:
    """The registry of one server."""

    def __init__(self, rt: Any, gateway_state: Callable[[], Any]) -> None:
        disable_created_metrics()
        self._rt, self._state = rt, gateway_state
        self.registry = CollectorRegistry()
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
        self._seconds = {
            action: Histogram(
                f"gpu_{name}_seconds",
                f"Seconds that a {name} took",
                buckets=SECONDS,
                registry=self.registry,
            )
            for action, name in (("loaded", "load"), ("restored", "restore"))
        }
        self._seen = self._newest(rt.status())
        self.registry.register(self)

    def text(self, accepts: str) -> tuple[bytes, str]:
        """The exposition and its content type, in the format that the scraper accepts."""
        self._follow()
        if "application/openmetrics-text" in accepts:
            return openmetrics(self.registry), OPENMETRICS
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Any]:
        """What a scrape reads afresh; called by the registry."""
        snapshot: Snapshot = self._rt.status()
        yield from _devices(snapshot)
        for name, words in (
            ("evictions", "Models that left a card or the warm pool"),
            ("offloads", "Moves to host memory"),
            ("unloads", "Models dropped"),
            ("restorations", "Returns from host memory"),
            ("loads", "Models loaded"),
            ("refusals", "Requests refused"),
        ):
            yield CounterMetricFamily(
                f"gpu_{name}", f"{words}, since the boot", snapshot.totals.get(name, 0)
            )
        yield GaugeMetricFamily(
            "gpu_waiting_requests", "Requests for memory that wait", len(snapshot.tickets)
        )
        yield GaugeMetricFamily("gpu_processes", "Processes that take part", len(snapshot.sections))
        state = self._state()
        depth = GaugeMetricFamily(
            "gpu_queue_depth", "Calls that wait for a model", labels=["model"]
        )
        for model in {
            **state.breakers,
            **state.waiting,
        }:  # also 0: a sum over nothing would be no figure
            depth.add_metric([model], state.waiting.get(model, 0))
        active = GaugeMetricFamily(
            "gpu_active_calls", "Calls that a model is answering", labels=["model"]
        )
        for model in {**state.breakers, **state.running}:
            active.add_metric([model], state.running.get(model, 0))
        breakers = GaugeMetricFamily(
            "gpu_breaker_state", "0 closed, 1 half open, 2 open", labels=["model"]
        )
        for model, breaker in state.breakers.items():
            breakers.add_metric([model], BREAKER.get(breaker.state, 0))
        calls = CounterMetricFamily(
            "gpu_calls", "Calls by how they ended, since this server began", labels=["ended"]
        )
        for ended, count in state.counts.items():
            calls.add_metric([ended], count)
        yield from (depth, active, breakers, calls)

    def describe(self) -> list[Any]:
        """None: the registry need not read the book to know the names."""
        return []

    def _follow(self) -> None:
        with self._lock:
            history = self._rt.history("1h", 2).events
            fresh = [event for event in history if (event.wall, event.seq) > self._seen]
            for event in fresh:
                self._count(event)
            self._seen = max([self._seen, *((event.wall, event.seq) for event in fresh)])

    def _count(self, event: Event) -> None:
        if event.action in LEFT:
            self._evictions.labels(event.reason, event.action).inc()
        elif event.action in ("granted", "waiting", "refused"):
            self._verdicts.labels(event.action, event.reason).inc()
        if event.action in self._seconds and event.seconds:
            self._seconds[event.action].observe(event.seconds)

    @staticmethod
    def _newest(snapshot: Snapshot) -> tuple[float, int]:
        return max(
            ((event.wall, event.seq) for event in snapshot.events), default=(snapshot.wall, 0)
        )


def _devices(snapshot: Snapshot) -> Iterator[GaugeMetricFamily]:
    """What the driver does not tell has no sample: unknown is not 0."""
    figures = {
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
        "utilisation_percent": (
            "How busy it is",
            lambda view: view.sample and view.sample.utilisation_percent,
        ),
        "temperature_celsius": (
            "Its temperature",
            lambda view: view.sample and view.sample.temperature_celsius,
        ),
        "power_watts": ("What it draws", lambda view: view.sample and view.sample.power_watts),
    }
    for name, (words, figure) in figures.items():
        family = GaugeMetricFamily(
            f"gpu_device_{name}", words, labels=["device", "name", "simulated"]
        )
        for view in snapshot.devices:
            value = figure(view)
            if value is not None:
                family.add_metric(
                    [view.device.id, view.device.name, str(view.device.simulated).lower()], value
                )
        yield family
