"""The figures for alerts and dashboards, in Prometheus' format.

Names begin with `gpuconsole_`. The labels of a card are those of NVIDIA's DCGM exporter (`gpu`, `UUID`, `Hostname`), so
its figures can be joined; `device` is our name of the card. `gpu serve`, `gpu console` and `gpu exporter` serve them.

Gauges are read from one Snapshot at each scrape. Counters from the host's book may restart from 0 when the host
boots; Prometheus expects that counters can restart. Counters by reason, and histograms of durations, count only the
events that the journal records after the start of this server.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import prometheus_client
from prometheus_client import (
    CollectorRegistry,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from tornado.web import RequestHandler

from ..facts import (
    KERNEL,
    AllocatorMap,
    Book,
    Device,
    DeviceView,
    Event,
    ProblemKind,
    Snapshot,
    problems,
)
from ..telemetry import hours
from ..version import VERSION

SECONDS_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
LATE_SECONDS = 60.0  # processes write their events a second later, and clocks may be a little late
EVICTION_ACTIONS = ("offloaded", "unloaded", "lost")
VERDICT_ACTIONS = ("granted", "waiting", "refused")
BREAKER_VALUES = {"closed": 0, "half-open": 1, "open": 2}
TOTALS = {
    "evictions": "Models that left a card or RAM",
    "offloads": "Moves to RAM",
    "unloads": "Models dropped",
    "restorations": "Returns from RAM",
    "loads": "Models loaded",
    "refusals": "Requests refused",
}

# Counters that do not say how a call ended. `gpuconsole_calls` counts the same calls too, by how they ended.
_NO_ENDS = {
    "streamed": "Calls that were answered as a stream",
    "stood_in": "Calls that another model answered, because the first one failed",
    "reloads": "Models that were reloaded because their engine could not decode",
}


class Scraped:
    """A registry with figures that are read anew at each scrape, by `collect`, and with those of the process."""

    def __init__(self, gateway: Callable[[], Any] | None) -> None:
        """Registers this object. `gateway()` returns the gateway of the server; None if it answers no calls."""
        disable_created_metrics()
        self._gateway = gateway
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        Info("gpuconsole_build", "The version of this server", registry=self.registry).info(
            {"version": VERSION}
        )
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
        if self._gateway is None:
            return
        state = self._gateway().state()
        idle = dict.fromkeys(state.breakers, 0)
        waiting, running = {**idle, **state.waiting}, {**idle, **state.running}
        yield gauge(
            "gpuconsole_queue_depth", "Calls that wait for a model", ["model"], waiting.items()
        )
        text = "Calls that a model is answering"
        yield gauge("gpuconsole_active_calls", text, ["model"], running.items())
        values = [(model, BREAKER_VALUES[guard.state]) for model, guard in state.breakers.items()]
        yield gauge("gpuconsole_breaker_state", "0 closed, 1 half open, 2 open", ["model"], values)
        ends = [(end, count) for end, count in state.counts.items() if end not in _NO_ENDS]
        text = "Calls by how they ended, since this server began"
        yield _labelled(CounterMetricFamily("gpuconsole_calls", text, labels=["ended"]), ends)
        for name, text in _NO_ENDS.items():
            yield CounterMetricFamily(f"gpuconsole_{name}", text, value=state.counts.get(name, 0))
        yield from self._gateway().figures.collect()

    def describe(self) -> list[Any]:
        """No names of metrics. Without this method, the registry would call `collect` to learn them."""
        return []


class Metrics(Scraped):
    """The metrics of one host."""

    def __init__(self, rt: Any, gateway: Callable[[], Any] | None = None) -> None:
        """The metrics of the runtime `rt`, and of the gateway of the server that answers calls, if there is one."""
        super().__init__(gateway)
        self._rt = rt
        self._lock = threading.Lock()
        registry = self.registry
        text = "Models that left a card or RAM"
        labels = ["reason", "action"]
        self._evictions = prometheus_client.Counter(
            "gpuconsole_evictions_by_reason", text, labels, registry=registry
        )
        text = "Requests for memory: granted, waiting, refused"
        self._verdicts = prometheus_client.Counter(
            "gpuconsole_verdicts", text, ["verdict", "reason"], registry=registry
        )
        self._seconds = {
            action: Histogram(
                f"gpuconsole_{name}_seconds",
                f"Seconds that a {name} took",
                buckets=SECONDS_BUCKETS,
                registry=registry,
            )
            for action, name in (("loaded", "load"), ("restored", "restore"))
        }
        self._looked_at = rt.status().wall
        self._seen = self._recent_events(LATE_SECONDS)  # counted, or older than this server

    def text(self, accepts: str) -> tuple[bytes, str]:
        """See `Scraped.text`. The new events are counted first."""
        self._count_new_events()
        return super().text(accepts)

    def collect(self) -> Iterator[Any]:
        snapshot: Snapshot = self._rt.status()
        host = socket.gethostname()
        yield from devices({host: snapshot})
        yield from _held(snapshot, host)
        for name, text in TOTALS.items():
            value = snapshot.totals.get(name, 0)
            yield CounterMetricFamily(f"gpuconsole_{name}", f"{text}, since the book began", value)
        waiting = len(snapshot.waiting)
        yield GaugeMetricFamily(
            "gpuconsole_waiting_requests", "Requests for memory that wait", waiting
        )
        yield GaugeMetricFamily(
            "gpuconsole_processes", "Processes that take part", len(snapshot.sections)
        )
        yield from _problems(snapshot)
        yield from _allocators(self._rt.allocator_maps(), snapshot, host)
        yield from self.calls()

    def _count_new_events(self) -> None:
        with self._lock:
            now = self._rt.status().wall
            seconds = now - self._looked_at + LATE_SECONDS
            if seconds <= 0:  # the clock was put back: what it shows is counted
                self._looked_at, self._seen = now, self._recent_events(LATE_SECONDS)
                return
            recent = self._recent_events(seconds)
            for event in (recent - self._seen).elements():
                self._count(event)
            self._looked_at, self._seen = max(now, self._looked_at), recent

    def _recent_events(self, seconds: float) -> Counter[Event]:
        return Counter(event.unnumbered for event in self._rt.history(seconds, 2).events)

    def _count(self, event: Event) -> None:
        if event.action in EVICTION_ACTIONS:
            self._evictions.labels(event.reason, event.action).inc()
        elif event.action in VERDICT_ACTIONS:
            self._verdicts.labels(event.action, event.reason).inc()
        if event.action in self._seconds:  # 0 seconds mean less than a millisecond
            self._seconds[event.action].observe(event.seconds)


def _allocators(
    maps: Iterable[AllocatorMap], snapshot: Snapshot, host: str
) -> Iterator[CounterMetricFamily]:
    """Yields the counters of the allocator of each process on each card. They end with the process."""
    counters = (
        ("gpuconsole_allocator_retries", "Allocations that needed the cache to be released first"),
        ("gpuconsole_allocator_out_of_memory", "Allocations that failed for want of memory"),
    )
    families = [CounterMetricFamily(*counter, labels=[*CARD, "pid"]) for counter in counters]
    cards = {view.device.id: card_labels(view.device, host) for view in snapshot.devices}
    for map in maps:
        section = snapshot.sections.get(map.owner)
        if section is None or map.device not in cards:
            continue
        for family, count in zip(families, (map.alloc_retries, map.ooms), strict=True):
            family.add_metric([*cards[map.device], str(section.owner.pid)], count)
    yield from families


def _held(snapshot: Snapshot, host: str) -> Iterator[GaugeMetricFamily]:
    """Yields the bytes of each card and of RAM by user, notebook, model and state, as `gpu report` sums them up."""
    book = Book(sections=snapshot.sections, tickets=snapshot.tickets)
    held: dict[tuple[str, ...], int] = defaultdict(int)
    cards = {view.device.id: card_labels(view.device, host) for view in snapshot.devices}
    unknown = ("", "", "", host)  # of no card: what parking has saved
    programs = {stranger.pid: (stranger.user, stranger.command) for stranger in snapshot.strangers}
    for key, size in hours.held_now(book, snapshot.devices, programs).items():
        if key.state == hours.WAITED_FOR:
            continue
        name = hours.OWN_CODE if key.name == KERNEL else key.name
        notebook = key.notebook.rpartition("/")[2]
        labels = key.user, notebook, name, key.state.replace(" ", "_")
        held[(*labels, *cards.get(key.device, unknown))] += size
    text = "Bytes by holder and state: in_use, idle, idle_while_another_waited, outside and free add up to the card"
    family = GaugeMetricFamily("gpuconsole_held_bytes", text, labels=[*HOLDER, *CARD])
    for values, size in held.items():
        family.add_metric(values, size)
    yield family


def _problems(snapshot: Snapshot) -> Iterator[GaugeMetricFamily]:
    """Yields the problems of each kind, and the bytes that they concern. A kind without a problem has the value 0."""
    counts, sizes = dict.fromkeys(ProblemKind, 0), dict.fromkeys(ProblemKind, 0)
    for problem in problems(snapshot):
        counts[problem.kind] += 1
        sizes[problem.kind] += problem.bytes
    yield gauge("gpuconsole_problems", "Problems of the host", ["kind"], counts.items())
    yield gauge("gpuconsole_problem_bytes", "Memory in these problems", ["kind"], sizes.items())


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


def _utilisation(view: DeviceView) -> float | None:
    percent = _sampled("utilisation_percent")(view)
    return None if percent is None else percent / 100


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
    "utilisation_ratio": ("How busy it is, from 0 to 1", _utilisation),
    "temperature_celsius": ("Its temperature", _sampled("temperature_celsius")),
    "power_watts": ("What it draws", _sampled("power_watts")),
}

CARD = ("gpu", "UUID", "device", "Hostname")  # the labels of a card; `gpu` is empty for RAM
HOLDER = ("user", "notebook", "name", "state")


def card_labels(device: Device, host: str) -> tuple[str, ...]:
    """The values of the labels CARD for this `device` of the `host`."""
    number = "" if device.is_host else device.id.partition(":")[2]
    return number, device.uuid, device.id, host


def devices(snapshots: Mapping[str, Snapshot]) -> Iterator[GaugeMetricFamily]:
    """Yields the figures of each device that the driver reports. `snapshots` are those of hosts, by their names."""
    listed = [(host, view) for host, snapshot in snapshots.items() for view in snapshot.devices]
    about = GaugeMetricFamily(
        "gpuconsole_device_info", "The kind of a device", labels=[*CARD, "modelName", "simulated"]
    )
    for host, view in listed:
        simulated = str(view.device.simulated).lower()
        about.add_metric([*card_labels(view.device, host), view.device.name, simulated], 1)
    yield about
    for name, (text, figure) in _DEVICE_FIGURES.items():
        family = GaugeMetricFamily(f"gpuconsole_device_{name}", text, labels=CARD)
        for host, view in listed:
            if (value := figure(view)) is not None:
                family.add_metric(card_labels(view.device, host), value)
        yield family


class MetricsHandler(RequestHandler):
    """Answers a scraper with the metrics. The gate has admitted the request."""

    def initialize(self, metrics: Callable[[], Metrics]) -> None:
        """`metrics()` returns the figures to show."""
        self._metrics = metrics

    async def get(self) -> None:
        """Reads the figures in a thread, since a look at the book may wait."""
        accepts = self.request.headers.get("Accept", "")
        body, kind = await asyncio.to_thread(lambda: self._metrics().text(accepts))
        self.set_header("Content-Type", kind)
        self.finish(body)
