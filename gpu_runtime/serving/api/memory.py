"""`/memory/*`: the book as the Semantik governor told it, path by path and field by field.

MiB in `*_mb`, percents from 0 to 100, epoch seconds. Sums are over the cards, the pressure is the fullest one's. What
the driver will not tell is null, never 0. Pure functions of a Snapshot; `router` puts them behind their paths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from ...errors import GpuError, StillInUse
from ...facts import AllocatorMap, Health, Lease, Level, Snapshot
from ...units import MIB
from ..queue.thread_stream import in_thread

if TYPE_CHECKING:
    from pandas import DataFrame

ModelType = Literal["llm", "embedding", "reranker", "vision", "diffusion", "other"]
TYPES: tuple[str, ...] = ModelType.__args__  # type: ignore[attr-defined]
MOST_ROWS = 1000


class Wanted(BaseModel):
    """A model to bring to its device."""

    name: str = Field(min_length=1, max_length=256)
    model_type: ModelType = "other"
    quantization: str = Field("", max_length=64)


class Preload(BaseModel):
    models: list[Wanted] = Field(max_length=64)


def stats(snapshot: Snapshot) -> dict[str, Any]:
    """`GET /memory/stats`."""
    cards = [view for view in snapshot.devices if not view.device.is_host]
    host = [view for view in snapshot.devices if view.device.is_host]
    models = [lease for lease in snapshot.leases() if lease.kind == "model"]
    total, used = (
        sum(view.device.total_bytes for view in cards),
        _sum(view.measured_bytes for view in cards),
    )
    fullest = max(cards, key=lambda view: view.pressure, default=None)
    level = fullest.level if fullest and snapshot.governed else Level.UNKNOWN
    totals = snapshot.totals
    return {
        "cuda_available": any(view.device.id.startswith("cuda") for view in cards),
        "simulated": snapshot.simulated,
        "total_mb": total // MIB,
        "free_mb": None if used is None else (total - used) // MIB,
        "used_mb": None if used is None else used // MIB,
        "used_percent": None if used is None or not total else round(100 * used / total, 1),
        "allocated_mb": sum(view.claimed_bytes for view in cards) // MIB,
        "budget_total_mb": total // MIB,
        "budget_usable_mb": sum(view.limit_bytes for view in cards) // MIB,
        "cpu_budget_total_mb": sum(view.device.total_bytes for view in host) // MIB,
        "cpu_budget_usable_mb": sum(view.limit_bytes for view in host) // MIB,
        "cpu_used_mb": sum(view.claimed_bytes for view in host) // MIB,
        "models_loaded": sum(lease.on_device for lease in models),
        "models_offloaded": sum(lease.on_host for lease in models),
        "pressure_level": str(level),
        "total_evictions": totals.get("evictions", 0),
        "total_offloads": totals.get("offloads", 0),
        "total_restorations": totals.get("restorations", 0),
        "total_unloads": totals.get("unloads", 0),
    }


def models(snapshot: Snapshot) -> list[dict[str, Any]]:
    """`GET /memory/models`: every model that somebody holds, on a card or in host memory."""
    return [
        {
            "model_name": lease.name,
            "model_type": lease.model_type,
            "quantization": lease.quantization,
            "location": "cpu" if lease.on_host else "gpu",
            "memory_mb": lease.bytes // MIB,
            "idle_seconds": round(lease.idle_seconds(snapshot.now), 1),
            "use_count": lease.uses,
            "device": lease.where,
            "in_use": bool(lease.pins),
            "importance": lease.importance,
            "keep": lease.keep,
            "owner": section.owner.label,
        }
        for section in snapshot.sections.values()
        for lease in section.leases
        if lease.kind == "model"
    ]


def evictions(frame: DataFrame, kinds: Mapping[str, tuple[str, str]]) -> list[dict[str, Any]]:
    """`GET /memory/evictions`, the newest last. `kinds`: name -> model type and quantization, as far as known."""
    rows = []
    for event in frame.itertuples():
        kind, quantization = kinds.get(event.model, ("other", ""))
        rows.append(
            {
                "model_name": event.model,
                "model_type": kind,
                "quantization": quantization,
                "reason": event.reason,
                "action": event.action,
                "memory_freed_mb": int(event.bytes) // MIB,
                "timestamp": round(event.time.timestamp(), 3),
                "device": event.device,
            }
        )
    return rows


def kinds(snapshot: Snapshot) -> dict[str, tuple[str, str]]:
    """Name -> model type and quantization, of what is registered here or held by anybody."""
    known = {spec.name: (spec.model_type, spec.quantization) for spec in snapshot.specs}
    return known | {
        lease.name: (lease.model_type, lease.quantization) for lease in snapshot.leases()
    }


def fragmentation(maps: Iterable[AllocatorMap], cuda: bool) -> dict[str, Any]:
    """`GET /memory/fragmentation`: of the allocators of all processes together, as far as they tell."""
    told = list(maps)
    allocated, reserved = (
        sum(one.allocated_bytes for one in told),
        sum(one.reserved_bytes for one in told),
    )
    return {
        "cuda_available": cuda,
        "allocated_mb": allocated // MIB,
        "reserved_mb": reserved // MIB,
        "fragmentation_mb": (reserved - allocated) // MIB,
        "fragmentation_percent": round(100 * (reserved - allocated) / reserved, 1)
        if reserved
        else 0.0,
        "num_alloc_retries": sum(one.alloc_retries for one in told),
        "num_ooms": sum(one.ooms for one in told),
    }


def offloaded(snapshot: Snapshot, frame: DataFrame) -> list[dict[str, Any]]:
    """`GET /memory/offloaded`: the warm pool."""
    left = {
        (event.owner, event.model): event.device
        for event in frame.itertuples()
        if event.action == "offloaded"
    }
    rows = []
    for lease in snapshot.leases():
        if lease.kind == "model" and lease.on_host:
            away = max(0.0, snapshot.now - lease.away_since) if lease.away_since else 0.0
            rows.append(
                {
                    "model_key": key(lease),
                    "original_device": left.get((lease.owner, lease.name)),
                    "offload_time": round(snapshot.wall - away, 3),
                    "seconds_offloaded": round(away, 1),
                    "memory_mb": lease.bytes // MIB,
                }
            )
    return rows


def health(told: Health) -> dict[str, Any]:
    """`GET /memory/health`."""
    return {
        "healthy": told.healthy,
        "pressure": str(told.pressure),
        "used_percent": told.used_percent,
        "message": told.message,
    }


def key(lease: Lease) -> str:
    """`type:name:quantization`, as that governor called a model."""
    return f"{lease.model_type}:{lease.name}:{lease.quantization}"


def evict(rt: Any, wanted: str) -> tuple[int, dict[str, Any]]:
    """`POST /memory/evict/{model_type}`: status and answer. Every idle model of that type leaves its card, whoever
    holds it; or the one model of that name. Blocks: it waits for the owners."""
    snapshot = rt.status()
    held = [
        (section.owner, lease)
        for section in snapshot.sections.values()
        for lease in section.leases
        if lease.kind == "model" and lease.on_device
    ]
    names = (
        {lease.name for _, lease in held}
        | {spec.name for spec in snapshot.specs}
        | set(rt.catalog_names())
    )
    if (
        wanted not in TYPES
        and wanted.partition("@")[0] not in names
        and _named(wanted) not in names
    ):
        return 400, {
            "error": f"{wanted[:100]!r} is neither a model type ({', '.join(TYPES)}) nor the name of a model"
        }
    if wanted not in TYPES:
        name = wanted if wanted.partition("@")[0] in names else _named(wanted)
        found = [
            (owner, lease)
            for owner, lease in held
            if name in (lease.name, f"{lease.name}@{owner.pid}")
        ]
    else:
        found = [(owner, lease) for owner, lease in held if lease.model_type == wanted]
    done, freed, why = [], 0, []
    for owner, lease in found:
        try:
            outcome = rt.evict(f"{lease.name}@{owner.pid}")
        except GpuError as error:
            why.append(str(error).splitlines()[0])
            if not isinstance(error, StillInUse) and len(found) == 1:
                return 409, {"error": why[0], "model_type": wanted}
            continue
        if outcome.done and outcome.bytes:
            done.append(lease.name)
            freed += outcome.bytes
        elif not outcome.done:
            why.append(outcome.because)
    answer: dict[str, Any] = {"status": "evicted" if done else "no_action", "model_type": wanted}
    if done:
        answer |= {"models": done, "memory_freed_mb": freed // MIB}
    if why:
        answer["detail"] = "; ".join(why)
    return 200, answer


def preload(rt: Any, wanted: Preload) -> dict[str, Any]:
    """`POST /memory/preload`: which came, by `type:name:quantization`; and why the others did not. Blocks."""
    results, errors = {}, {}
    for model in wanted.models:
        name = f"{model.model_type}:{model.name}:{model.quantization}"
        try:
            results[name] = rt.preload(model.name, timeout=60.0).done
        except GpuError as error:
            results[name], errors[name] = False, " ".join(str(error).split())
    return {"results": results} | ({"errors": errors} if errors else {})


def router(rt: Any, acts: Any) -> APIRouter:
    """The routes. `acts` is the dependency that lets only those through who may act, and answers their name."""
    routes = APIRouter(prefix="/memory", tags=["memory"])

    @routes.get("/stats")
    def get_stats() -> dict[str, Any]:
        """Bytes, budgets, pressure and counters of this host."""
        return stats(rt.status())

    @routes.get("/models")
    def get_models() -> list[dict[str, Any]]:
        """Every model that somebody holds."""
        return models(rt.status())

    @routes.get("/evictions")
    def get_evictions() -> list[dict[str, Any]]:
        """What left its card or the warm pool, and why; the newest last."""
        return evictions(rt.evictions(MOST_ROWS), kinds(rt.status()))

    @routes.get("/fragmentation")
    def get_fragmentation() -> dict[str, Any]:
        """What the allocators of all processes hold and do not use."""
        cuda = any(view.device.id.startswith("cuda") for view in rt.status().devices)
        return fragmentation(rt.allocator_maps(), cuda)

    @routes.get("/offloaded")
    def get_offloaded() -> list[dict[str, Any]]:
        """The warm pool: models that wait in host memory."""
        return offloaded(rt.status(), rt.evictions(MOST_ROWS))

    @routes.get("/health")
    def get_health() -> dict[str, Any]:
        """Healthy or not: false at CRITICAL."""
        return health(rt.health())

    @routes.post("/defragment")
    async def post_defragment(who: str = acts) -> dict[str, Any]:
        """Gives memory back that allocators hold and nobody uses."""
        outcome = await in_thread(lambda: _as(rt, who, rt.defrag))
        return {"status": "defragmentation_triggered", "memory_freed_mb": outcome.bytes // MIB}

    @routes.post(
        "/evict/{model_type:path}",
        responses={
            400: {"description": "no such type or model"},
            409: {"description": "its owner did not do it"},
        },
    )
    async def post_evict(model_type: str, who: str = acts) -> JSONResponse:
        """Makes the idle models of a type leave their cards, or one model by its name."""
        status, answer = await in_thread(lambda: _as(rt, who, evict, rt, model_type))
        return JSONResponse(answer, status)

    @routes.post("/preload")
    async def post_preload(wanted: Preload, who: str = acts) -> dict[str, Any]:
        """Brings models to their devices before they are needed."""
        return await in_thread(lambda: _as(rt, who, preload, rt, wanted))

    return routes


def _as(rt: Any, who: str, act: Any, *arguments: Any) -> Any:
    with rt.on_behalf_of(f"{who}, HTTP"):
        return act(*arguments)


def _named(wanted: str) -> str:
    """The name in `type:name:quantization`; the text itself where it is none."""
    kind, _, rest = wanted.partition(":")
    return rest.rpartition(":")[0] if kind in TYPES and ":" in rest else wanted


def _sum(parts: Iterable[int | None]) -> int | None:
    known = list(parts)
    return None if None in known else sum(known)  # type: ignore[arg-type]
