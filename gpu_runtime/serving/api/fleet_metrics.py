"""The route `/metrics` of a fleet: the figures of each host, with the label `host`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily

from ...facts import Snapshot
from .metrics import Scraped, calls, devices, gauge


class FleetMetrics(Scraped):
    """The metrics of a fleet."""

    def __init__(self, models: Any, gateway: Callable[[], Any]) -> None:
        """The metrics of the fleet of `models` and of its gateway, which `gateway()` returns."""
        super().__init__()
        self._models, self._gateway = models, gateway

    def collect(self) -> Iterator[Any]:
        """Yields the figures, which are read anew. The registry calls this method at each scrape."""
        snapshots = {snapshot.host: snapshot for snapshot in self._models.fleet.status()}
        yield GaugeMetricFamily("gpu_hosts", "Hosts that answer", len(snapshots))
        yield from devices((((host,), one) for host, one in snapshots.items()), ("host",))
        waiting = {host: len(one.tickets) for host, one in snapshots.items()}
        yield gauge(
            "gpu_host_waiting_requests", "Requests for memory that wait", ["host"], waiting.items()
        )
        yield from _models(snapshots)
        yield from calls(self._gateway().state())
        yield from self._gateway().figures.collect()


def _models(snapshots: dict[str, Snapshot]) -> Iterator[Any]:
    """Yields the bytes and the users of each model on each host, and how models are spread over cards."""
    labels = ["host", "model"]
    sizes = GaugeMetricFamily("gpu_host_model_bytes", "Bytes of a model on cards", labels=labels)
    users = GaugeMetricFamily(
        "gpu_host_model_users", "Blocks and calls that use a model now", labels=labels
    )
    placements: Counter[str] = Counter()
    for host, snapshot in snapshots.items():
        for lease in snapshot.leases():
            if lease.kind != "model" or not lease.on_device:
                continue
            sizes.add_metric([host, lease.name], lease.bytes)
            users.add_metric([host, lease.name], lease.pins)
            placements[str(len(lease.shares))] += 1
    yield sizes
    yield users
    yield gauge(
        "gpu_placements",
        "Models on cards, by the number of their cards",
        ["cards"],
        placements.items(),
    )
