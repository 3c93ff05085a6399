"""The routes of `gpu serve --fleet` that replace routes of one host: the health of all hosts, and slots.

A slot is a model on certain cards of a certain host. A wished slot was requested by a person.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from ...errors import FleetUnavailable, StillInUse, UnknownDevice, UnknownModel
from .strict_route import StrictRoute

_STATUSES = {UnknownModel: 404, UnknownDevice: 404, FleetUnavailable: 404, StillInUse: 409}


class NewSlot(BaseModel):
    """A model on named cards of a named host."""

    model_config = ConfigDict(extra="forbid")
    model: str
    host: str
    devices: list[str] = Field(min_length=1, description="cards of the host, such as cuda:0")


def router(models: Any, acts: Any) -> APIRouter:
    """The routes over the fleet of `models`. `acts` is the FastAPI dependency that admits visitors who may act."""
    routes = APIRouter(route_class=StrictRoute)

    @routes.get("/health", tags=["server"])
    def get_health() -> dict[str, Any]:
        """Whether the server works, and the hosts that answer. The status is always 200."""
        return {"status": "ok", "hosts": list(models.hosts)}

    @routes.get("/api/v1/slots", tags=["fleet"])
    def get_slots() -> dict[str, Any]:
        """The slots that hold a model, and the wished slots. Each has the bytes on its cards, and the number of calls
        that use its model now.
        """
        return {"slots": slots(models.fleet)}

    @routes.post("/api/v1/slots", tags=["fleet"], status_code=201)
    def post_slots(new: NewSlot, actor: str = acts) -> dict[str, Any]:
        """Loads a model on exactly these cards. The model is loaded there again after a restart of the host."""
        _acting(lambda: models.fleet.create_slot(new.model, new.host, new.devices))
        id = f"{new.model}@{new.host}"
        return next(one for one in slots(models.fleet) if one["id"] == id)

    @routes.delete("/api/v1/slots/{slot}", tags=["fleet"])
    def delete_slot(slot: str, actor: str = acts) -> dict[str, Any]:
        """Removes a wished slot, and evicts its model from the host unless the model is in use."""
        outcome = _acting(lambda: models.fleet.delete_slot(slot))
        return {"id": slot, "deleted": outcome.done}

    return routes


def slots(fleet: Any) -> list[dict[str, Any]]:
    """The models on cards of the `fleet`, and the wished slots that are not loaded now."""
    found: dict[str, dict[str, Any]] = {}
    for slot in fleet._wishes().slots:
        found[slot.id] = _row(slot.id, slot.model, slot.host, True)
    for row in fleet.slots().itertuples(index=False):
        one = found.setdefault(row.slot, _row(row.slot, row.model, row.host, bool(row.wished)))
        one["devices"].append({"device": row.device, "bytes": int(row.bytes)})
        one["active_calls"] = int(row.active)
    return [found[id] for id in sorted(found)]


def _row(id: str, model: str, host: str, wished: bool) -> dict[str, Any]:
    return {
        "id": id, "model": model, "host": host, "wished": wished, "devices": [], "active_calls": 0
    }  # fmt: skip


def _acting(act: Any) -> Any:
    """The result of `act()`. An error about a name, or about a model in use, becomes an HTTP error with status 4xx."""
    try:
        return act()
    except tuple(_STATUSES) as error:
        status = next(code for kind, code in _STATUSES.items() if isinstance(error, kind))
        raise HTTPException(status, " ".join(str(error).split())) from error
