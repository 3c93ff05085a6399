"""The routes of `gpu serve --fleet` that replace those of one host: health and figures of all hosts, and slots.

A slot is a model on certain cards of a certain host. A wished slot was requested by a person.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import APIRouter, HTTPException
from prometheus_client.core import GaugeMetricFamily
from pydantic import BaseModel, ConfigDict, Field

from ...errors import FleetUnavailable, StillInUse, UnknownDevice, UnknownModel
from ...facts import Snapshot
from ..requests import Json
from .metrics import Scraped, devices, gauge
from .strict_route import ACTS, StrictRoute

_STATUSES = {UnknownModel: 404, UnknownDevice: 404, FleetUnavailable: 404, StillInUse: 409}


class NewSlot(BaseModel):
    """A model on named cards of a named host."""

    model_config = ConfigDict(extra="forbid")
    model: str
    host: str
    devices: list[str] = Field(min_length=1, description="cards of the host, such as cuda:0")


def router(models: Any) -> APIRouter:
    """The routes over the fleet of `models`."""
    routes = APIRouter(route_class=StrictRoute)

    @routes.get("/health", tags=["server"])
    def get_health() -> Json:
        """Whether the server works, and the hosts that answer. The status is always 200."""
        return {"status": "ok", "hosts": list(models.hosts)}

    @routes.get("/api/v1/slots", tags=["fleet"])
    def get_slots() -> Json:
        """The slots that hold a model, and the wished slots. Each has the bytes on its cards, and the number of calls
        that use its model now.
        """
        return {"slots": slots(models.fleet)}

    @routes.post("/api/v1/slots", tags=["fleet"], status_code=201)
    def post_slots(new: NewSlot, actor: str = ACTS) -> Json:
        """Loads a model on exactly these cards. The model is loaded there again after a restart of the host."""
        _acting(lambda: models.fleet.create_slot(new.model, new.host, new.devices))
        id = f"{new.model}@{new.host}"
        return next(one for one in slots(models.fleet) if one["id"] == id)

    @routes.delete("/api/v1/slots/{slot}", tags=["fleet"])
    def delete_slot(slot: str, actor: str = ACTS) -> Json:
        """Removes a wished slot, and evicts its model from the host unless the model is in use."""
        outcome = _acting(lambda: models.fleet.delete_slot(slot))
        return {"id": slot, "deleted": outcome.done}

    return routes


def slots(fleet: Any) -> list[Json]:
    """The models on cards of the `fleet`, and the wished slots that are not loaded now."""
    found: dict[str, Json] = {}
    for slot in fleet._wishes().slots:
        found[slot.id] = _row(slot.id, slot.model, slot.host, True)
    for row in fleet.slots().itertuples(index=False):
        one = found.setdefault(row.slot, _row(row.slot, row.model, row.host, bool(row.wished)))
        one["devices"].append({"device": row.device, "bytes": int(row.bytes)})
        one["active_calls"] = int(row.active)
    return [found[id] for id in sorted(found)]


def _row(id: str, model: str, host: str, wished: bool) -> Json:
    return {
        "id": id, "model": model, "host": host, "wished": wished, "devices": [], "active_calls": 0
    }  # fmt: skip


def _acting(act: Any) -> Any:
    """The result of `act()`. An error about a name, or a model in use, becomes an HTTP error with status 4xx."""
    try:
        return act()
    except tuple(_STATUSES) as error:
        status = next(code for kind, code in _STATUSES.items() if isinstance(error, kind))
        raise HTTPException(status, " ".join(str(error).split())) from error


class FleetMetrics(Scraped):
    """The metrics of the fleet of `models`."""

    def __init__(self, models: Any, gateway: Callable[[], Any]) -> None:
        super().__init__(gateway)
        self._models = models

    def collect(self) -> Iterator[Any]:
        snapshots = {snapshot.host: snapshot for snapshot in self._models.fleet.status()}
        yield GaugeMetricFamily("gpu_hosts", "Hosts that answer", len(snapshots))
        yield from devices((((host,), one) for host, one in snapshots.items()), ("host",))
        waiting = {host: len(one.tickets) for host, one in snapshots.items()}
        text = "Requests for memory that wait"
        yield gauge("gpu_host_waiting_requests", text, ["host"], waiting.items())
        yield from _models(snapshots)
        yield from self.calls()


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
    text = "Models on cards, by the number of their cards"
    yield gauge("gpu_placements", text, ["cards"], placements.items())
