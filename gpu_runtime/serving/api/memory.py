"""The routes `/memory/*`. They show the book (all leases and requests of this host) under the paths and field names of
the Semantik governor.

Fields named `*_mb` are in MiB, percents are from 0 to 100, and times are epoch seconds. Sums are over all cards. The
pressure is that of the fullest card. A figure that the driver does not report is null, never 0. The functions for
figures are pure; `router` adds the paths.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, Field

from ...errors import AmbiguousName, GpuError, StillInUse
from ...facts import (
    AllocatorMap,
    Health,
    Lease,
    LeaseId,
    Level,
    ModelSpec,
    Snapshot,
    held_on_cards,
    lease_title,
    of_notebook,
)
from ...threads import Cancellation
from ...units import MIB
from ..requests import Json
from ..thread_stream import in_thread_until
from .calls import ACTS, StrictRoute
from .openai import unless_gone

if TYPE_CHECKING:
    from pandas import DataFrame

ModelType = Literal["llm", "embedding", "reranker", "vision", "diffusion", "other"]
TYPES: tuple[str, ...] = ModelType.__args__  # type: ignore[attr-defined]
MAX_ROWS = 1000
PRELOAD_SECONDS = 600.0  # the longest wait of one model for its memory, and the load, together


class Wanted(BaseModel):
    """A model to load. The type `other` is any type."""

    name: str = Field(min_length=1, max_length=256)
    model_type: Annotated[ModelType, BeforeValidator(lambda word: str(word).lower())] = "other"
    quantization: str = Field("", max_length=64)  # empty: any


class Preload(BaseModel):
    """The body of `POST /memory/preload`."""

    models: list[Wanted] = Field(max_length=64)


# -- figures


def stats(snapshot: Snapshot) -> Json:
    """The answer to `GET /memory/stats`, from `snapshot`."""
    cards = snapshot.cards
    host = [view for view in snapshot.devices if view.device.is_host]
    models = [lease for lease in snapshot.leases() if lease.kind == "model"]
    fullest = max(cards, key=lambda view: view.pressure, default=None)
    level = fullest.level if fullest and snapshot.governed else Level.UNKNOWN
    return {
        "cuda_available": any(view.device.id.startswith("cuda") for view in cards),
        "simulated": snapshot.simulated,
        **_measured(cards),
        "allocated_mb": sum(view.claimed_bytes for view in cards) // MIB,
        "budget_total_mb": sum(view.device.total_bytes for view in cards) // MIB,
        "budget_usable_mb": sum(view.limit_bytes for view in cards) // MIB,
        "cpu_budget_total_mb": sum(view.device.total_bytes for view in host) // MIB,
        "cpu_budget_usable_mb": sum(view.limit_bytes for view in host) // MIB,
        "cpu_used_mb": sum(view.claimed_bytes for view in host) // MIB,
        "models_loaded": sum(lease.all_on_device for lease in models),
        "models_offloaded": sum(lease.on_host or lease.in_parts for lease in models),
        "pressure_level": str(level),
        "total_evictions": snapshot.totals.get("evictions", 0),
        "total_offloads": snapshot.totals.get("offloads", 0),
        "total_restorations": snapshot.totals.get("restorations", 0),
        "total_unloads": snapshot.totals.get("unloads", 0),
    }


def _measured(cards: list[Any]) -> Json:
    """The memory of the `cards` in MiB as the driver measured it; null if it does not report that of one card."""
    total = sum(view.device.total_bytes for view in cards)
    parts = [view.measured_bytes for view in cards]
    figures: Json = {"total_mb": total // MIB}
    if None in parts:
        return {**figures, "free_mb": None, "used_mb": None, "used_percent": None}
    used = sum(parts)
    return {
        **figures,
        "free_mb": (total - used) // MIB,
        "used_mb": used // MIB,
        "used_percent": round(100 * used / total, 1) if total else None,
    }


def models(snapshot: Snapshot) -> list[Json]:
    """The answer to `GET /memory/models`: every model in `snapshot` that a process holds, on a card or in RAM."""
    return [
        _model_row(lease, section.owner.label, snapshot.now)
        for section in snapshot.sections.values()
        for lease in section.leases
        if lease.kind == "model"
    ]


def _model_row(lease: Lease, owner: str, now: float) -> Json:
    return {
        "model_name": lease.name,
        "model_type": lease.model_type,
        "quantization": lease.quantization,
        "location": "cpu" if lease.on_host else "gpu",
        "memory_mb": lease.bytes // MIB,
        "idle_seconds": round(lease.idle_seconds(now), 1),
        "use_count": lease.uses,
        "device": lease.where,
        "shares_mb": {share.device: share.bytes // MIB for share in lease.placed},
        "in_use": bool(lease.pins),
        "importance": lease.importance,
        "keep": lease.keep,
        "owner": owner,
    }


def evictions(frame: DataFrame, kinds: Mapping[str, tuple[str, str]]) -> list[Json]:
    """The answer to `GET /memory/evictions`, from the events in `frame`, and the result of `kinds`."""
    rows = []
    for event in frame.to_dict("records"):
        kind, quantization = kinds.get(event["model"], ("other", ""))
        rows.append(
            {
                "model_name": event["model"],
                "model_type": kind,
                "quantization": quantization,
                "reason": event["reason"],
                "action": event["action"],
                "memory_freed_mb": event["bytes"] // MIB,
                "timestamp": round(event["time"].timestamp(), 3),
                "device": event["device"],
            }
        )
    return rows


def kinds(snapshot: Snapshot) -> dict[str, tuple[str, str]]:
    """The model type and quantization, by name, of each model that is registered here or held by any process."""
    registered = {spec.name: (spec.model_type, spec.quantization) for spec in snapshot.specs}
    held = {
        lease_title(lease, section.owner): (lease.model_type, lease.quantization)
        for section in snapshot.sections.values()
        for lease in section.leases
    }
    return {**registered, **held}


def fragmentation(maps: Iterable[AllocatorMap], cuda: bool) -> Json:
    """The sums over the allocator `maps` of all processes, and whether a CUDA device is present (`cuda`)."""
    maps = list(maps)
    allocated = sum(map.allocated_bytes for map in maps)
    reserved = sum(map.reserved_bytes for map in maps)
    unused = reserved - allocated
    return {
        "cuda_available": cuda,
        "allocated_mb": allocated // MIB,
        "reserved_mb": reserved // MIB,
        "fragmentation_mb": unused // MIB,
        "fragmentation_percent": round(100 * unused / reserved, 1) if reserved else 0.0,
        "num_alloc_retries": sum(map.alloc_retries for map in maps),
        "num_ooms": sum(map.ooms for map in maps),
    }


def offloaded(snapshot: Snapshot, frame: DataFrame) -> list[Json]:
    """The models in `snapshot` that are in host memory. The eviction events in `frame` name the devices they left."""
    events = [event for event in frame.to_dict("records") if event["action"] == "offloaded"]
    devices = {(event["owner"], event["model"]): event["device"] for event in events}
    rows = []
    for lease in snapshot.leases():
        if lease.kind != "model" or not (lease.on_host or lease.in_parts):
            continue
        seconds = max(0.0, snapshot.now - lease.away_since) if lease.away_since else 0.0
        rows.append(
            {
                "model_key": f"{lease.model_type}:{lease.name}:{lease.quantization}",
                "original_device": devices.get((lease.owner, lease.name)),
                "offload_time": round(snapshot.wall - seconds, 3),
                "seconds_offloaded": round(seconds, 1),
                "memory_mb": lease.ram_bytes // MIB,
            }
        )
    return rows


def health(report: Health) -> Json:
    """The answer to `GET /memory/health`, from `report`."""
    return {
        "healthy": report.healthy,
        "pressure": str(report.pressure),
        "used_percent": report.used_percent,
        "message": report.message,
    }


# -- actions


def evict(rt: Any, wanted: str, drop: bool = False) -> tuple[int, Json]:
    """The HTTP status and the answer of `POST /memory/evict/{model_type}`. Blocks until the owners have answered.

    If `wanted` is a model type, every idle model of that type leaves its card, whichever process owns it; `*` selects
    all idle models without `keep`. Otherwise it is the name of one model, `name@pid`, `type:name:quantization`, or a
    notebook, all of whose memory is evicted. With `drop`, models leave host memory too. `rt` requests the evictions.
    """
    # A notebook may be called anything, also `*` or `llm`.
    selects_models = wanted == "*" or wanted.lower() in TYPES
    try:
        notebook = of_notebook(() if selects_models else rt.status().sections.values(), wanted)
    except AmbiguousName as error:
        return 409, {"error": str(error), "model_type": wanted}
    found = held_on_cards(notebook) if notebook else _held(rt, wanted, drop)
    if found is None:
        what = f"a model type ({', '.join(TYPES)}) nor the name of a model or of a notebook"
        return 400, {"error": f"{wanted[:100]!r} is neither {what} that holds memory"}
    evicted: list[str] = []
    freed_bytes = 0
    reasons: list[str] = []
    for id in found:
        try:
            outcome = rt.evict(id, drop=drop)
        except GpuError as error:
            reasons.append(str(error).splitlines()[0])
            if not isinstance(error, StillInUse) and len(found) == 1:
                return 409, {"error": reasons[0], "model_type": wanted}
            continue
        if outcome.done and outcome.bytes:
            evicted.append(outcome.name)
            freed_bytes += outcome.bytes
        elif not outcome.done:
            reasons.append(outcome.because)
    answer: Json = {"status": "evicted" if evicted else "no_action", "model_type": wanted}
    if evicted:
        answer |= {"models": evicted, "memory_freed_mb": freed_bytes // MIB}
    if reasons:
        answer["detail"] = "; ".join(reasons)
    return 200, answer


def _held(rt: Any, wanted: str, in_host: bool) -> list[LeaseId] | None:
    """The models on a card that `wanted` selects; with `in_host`, also those in host memory.

    None if `wanted` is neither a model type nor the name of a known model.
    """
    snapshot = rt.status()
    held = [
        (f"{lease.name}@{section.owner.pid}", lease)
        for section in snapshot.sections.values()
        for lease in section.leases
        if lease.kind == "model" and (lease.on_device or in_host)
    ]
    if wanted == "*":
        return _ids(lease for _, lease in held if not lease.pins and not lease.keep)
    if wanted.lower() in TYPES:
        return _ids(lease for _, lease in held if lease.model_type == wanted.lower())
    names = {lease.name for _, lease in held}
    names |= {spec.name for spec in snapshot.specs}
    names |= set(rt.catalog_names())
    name = wanted
    if wanted.partition("@")[0] not in names:
        kind, _, rest = wanted.partition(":")  # of `type:name:quantization`
        name = rest.rpartition(":")[0] if kind.lower() in TYPES else ""
        if name not in names:
            return None
    return _ids(lease for address, lease in held if name in (lease.name, address))


def _ids(leases: Iterable[Lease]) -> list[LeaseId]:
    return [LeaseId(lease.owner, lease.name) for lease in leases]


def preload(rt: Any, wanted: Preload, cancelled: Cancellation | None = None) -> Json:
    """Loads each model in `wanted` with the runtime `rt`, and returns the answer to `POST /memory/preload`.

    The answer has for each model whether it was loaded and, if known, why not. A model of another type or quantization
    than the wanted one is not loaded. Blocks until all models are loaded, or `cancelled` is set.
    """
    thread, guard = get_ident(), Lock()
    cancelled = cancelled or Cancellation()
    results: dict[str, bool] = {}
    errors: dict[str, str] = {}
    waits = True

    def leave() -> None:
        """Ends the wait or the load of this thread, which does other work later."""
        with guard:
            if waits:
                rt._leave_load(thread, "its caller has left")

    cancelled.then(leave)
    try:
        for model in wanted.models:
            if cancelled.is_set():
                break
            name = f"{model.model_type}:{model.name}:{model.quantization}"
            try:
                other = _difference(model, rt.spec(model.name))
                if other:
                    errors[name] = other
                else:
                    results[name] = rt.preload(model.name, timeout=PRELOAD_SECONDS).done
            except GpuError as error:
                errors[name] = " ".join(str(error).split())
            results.setdefault(name, False)
    finally:
        with guard:
            waits = False
    return {"results": results, **({"errors": errors} if errors else {})}


def _difference(wanted: Wanted, spec: ModelSpec) -> str:
    """The difference between the registered model of `spec` and the `wanted` one, as a sentence; "" if none."""
    if wanted.model_type not in ("other", spec.model_type):
        return f"{spec.name} is of type {spec.model_type}, not {wanted.model_type}"
    if wanted.quantization and wanted.quantization.lower() != spec.quantization.lower():
        has = f"has the quantization {spec.quantization}" if spec.quantization else "has none"
        return f"{spec.name} is registered with another quantization: it {has}, not {wanted.quantization}"
    return ""


# -- routes


def router(rt: Any) -> APIRouter:
    """The routes below `/memory`, over the runtime `rt`."""
    routes = APIRouter(prefix="/memory", tags=["memory"], route_class=StrictRoute)

    @routes.get("/stats")
    def get_stats() -> Json:
        """Bytes, budgets, pressure and counters of this host."""
        return stats(rt.status())

    @routes.get("/models")
    def get_models() -> list[Json]:
        """Every model that a process holds."""
        return models(rt.status())

    @routes.get("/evictions")
    def get_evictions() -> list[Json]:
        """The models that left a card or RAM, and the reasons. The newest eviction is last."""
        frame = rt.evictions(MAX_ROWS)
        return evictions(frame, {**frame.attrs["kinds"], **kinds(rt.status())})

    @routes.get("/fragmentation")
    def get_fragmentation() -> Json:
        """The memory that the allocators of all processes hold without using it."""
        cuda = any(view.device.id.startswith("cuda") for view in rt.status().devices)
        return fragmentation(rt.allocator_maps(), cuda)

    @routes.get("/offloaded")
    def get_offloaded() -> list[Json]:
        """The models that have left their cards and are in RAM."""
        return offloaded(rt.status(), rt.evictions(MAX_ROWS))

    @routes.get("/health")
    def get_health() -> Json:
        """Whether the host is without a problem. With `GPU_RELIEF=always`, the level CRITICAL is a problem."""
        return health(rt.health())

    async def act(actor: str, work: Callable[[Cancellation], Any]) -> Any:
        """Runs `work(cancelled)` in a thread, and returns its result. The journal names `actor` as the cause."""

        def acting(cancelled: Cancellation) -> Any:
            with rt.on_behalf_of(f"{actor}, HTTP"):
                return work(cancelled)

        return await in_thread_until(acting)

    @routes.post("/defragment")
    async def post_defragment(actor: str = ACTS) -> Json:
        """Returns to the device the memory that allocators hold without using it."""
        outcome = await act(actor, lambda _: rt.defrag())
        return {"status": "defragmentation_triggered", "memory_freed_mb": outcome.bytes // MIB}

    @routes.post(
        "/evict/{model_type:path}",
        responses={
            400: {"description": "no such type or model"},
            409: {"description": "its owner did not do it"},
        },
    )
    async def post_evict(model_type: str, drop: bool = False, actor: str = ACTS) -> JSONResponse:
        """Evicts from their cards the idle models of a type, one model given by its name, or all idle models."""
        status, answer = await act(actor, lambda _: evict(rt, model_type, drop))
        return JSONResponse(answer, status)

    @routes.post(
        "/cancel/{name:path}", responses={409: {"description": "nothing waits, or it did not end"}}
    )
    async def post_cancel(name: str, actor: str = ACTS) -> JSONResponse:
        """Ends the wait of a request in the queue. The cell that waits gets an error that names the actor."""
        try:
            outcome = await act(actor, lambda _: rt.cancel(name))
        except GpuError as error:
            return JSONResponse({"error": str(error).splitlines()[0]}, 409)
        return JSONResponse({"status": "cancelled", "detail": outcome.because})

    @routes.post("/preload")
    async def post_preload(request: Request, wanted: Preload, actor: str = ACTS) -> Json:
        """Loads models before they are needed. If the client leaves, a load that only it needs is stopped."""
        return await unless_gone(request, act(actor, partial(preload, rt, wanted)))

    return routes
