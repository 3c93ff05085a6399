"""`gpu serve --fleet`: one address in front of the models of all hosts. Each call runs on the `gpu serve` of a host.

A call uses its model on the best host, and keeps the model there until the answer ends. If the host dies before the
first token of the answer, the call runs again on another host.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException
from prometheus_client.core import GaugeMetricFamily
from pydantic import BaseModel, ConfigDict, Field

from ..access_keys import Keys
from ..catalog.files import Catalog
from ..errors import FleetUnavailable, NodeLost, UnknownModel
from ..facts import HOST, Evidence, ModelSpec, Outcome, Snapshot
from ..fleet import cluster
from ..fleet.client import Fleet, open_fleet
from ..fleet.hosts import on
from ..settings import Settings
from ..threads import Cancellation, start
from .api.app import KNOWN_QUERY, add_metrics, base_application
from .api.calls import ACTS, StrictRoute
from .engines.base import EngineFailed
from .engines.openai_http import CONNECTION_ERRORS, HttpAdapter, HttpClient
from .gateway import Gateway
from .metrics import Scraped, devices, gauge
from .requests import Json
from .server import HostServer, run_app, serve
from .store import Store
from .thread_stream import in_thread, in_thread_until

log = logging.getLogger("gpu_runtime")
LOOK_SECONDS = 1.0  # between two reads of the hosts and their models
ALIVE_SECONDS = 0.2  # between two checks of a waiting call whether its host is alive
MOST_HOSTS = 3  # hosts tried for one call: a call that kills its host must not kill all hosts


class FleetModels:
    """The models of a fleet, with the methods of a runtime that the gateway needs.

    The hosts load, evict and pause the models by themselves, for other servers too.
    """

    def __init__(self, fleet: Fleet, settings: Settings) -> None:
        """Reads the hosts and models of `fleet` once, and then every second until `close`."""
        self.fleet, self.settings = fleet, settings
        self._revision = -1
        self._specs: dict[str, ModelSpec] = {}
        self.hosts: tuple[str, ...] = ()
        self.copies: Counter[str] = Counter()  # model -> number of hosts that have it on a card
        self._starting: dict[str, Any] = {}  # host -> the last call that starts its server
        self._closed = threading.Event()
        self.look()
        start(self._watch)

    def close(self) -> None:
        """Stops the reading of the hosts and models."""
        self._closed.set()

    def _stop_loads(self, why: str) -> None: ...

    def _leave_load(self, thread: int, why: str) -> None: ...

    def look(self) -> None:
        """Reads the living hosts, the models that the fleet should hold, and how many hosts have each on a card."""
        wishes = self.fleet._wishes()
        if wishes.revision != self._revision:
            with tempfile.TemporaryDirectory() as directory:
                lines = [json.dumps(wish.body) for wish in wishes.models]
                (Path(directory) / "fleet.json").write_text("\n".join(lines))
                specs = Catalog(Settings.load(gpu_catalog=directory)).specs()
            self._specs = {spec.name: spec for spec in specs}
            self._revision = wishes.revision
        self.hosts = self.fleet.hosts()
        held = [pair for models in self.fleet._holdings().values() for pair in models.items()]
        self.copies = Counter(name for name, (where, _) in held if where != "host")

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            try:
                self.look()
                # Starts the server of each host before a call needs it, also of a host whose agent was restarted. One
                # that runs already is not started again. On a busy machine a start takes many seconds.
                for host in self.hosts:
                    call = self._starting.get(host)
                    if call is None or cluster.ended([call], 0):
                        agent = self.fleet._agent(host)
                        self._starting[host] = on(agent, "serve", "verbs", serve)
            except Exception as error:  # noqa: BLE001 - the head restarts: read again
                log.debug("the fleet cannot be read: %s", error)

    # -- what the gateway calls

    def spec(self, name: str) -> ModelSpec:
        """The specification of the model `name`. Raises UnknownModel."""
        if name not in self._specs:
            none, advice = "The fleet has no model yet.", "See:  gpu fleet"
            raise UnknownModel(name, tuple(self._specs), none=none, advice=advice)
        return self._specs[name]

    def specs(self) -> tuple[ModelSpec, ...]:
        """The specifications of all models of the fleet."""
        return tuple(self._specs.values())

    def catalog_names(self) -> tuple[str, ...]:
        """The names of all models of the fleet."""
        return tuple(self._specs)

    def _source_facts(self, name: str) -> tuple[Evidence, str]:
        """No facts: the source of the model `name` is on its hosts."""
        return Evidence(), ""

    def here(self, name: str) -> bool:
        """Whether a host has the model on a card, as last read."""
        return self.copies[name] > 0

    def _pauses(self, name: str) -> bool:
        return False

    def _away_word(self, name: str) -> str:
        return ""

    def use(self, name: str, *, importance: int | None = None) -> FleetModel:
        """A context manager with the model `name` for calls of this `importance`. Each call chooses its host itself."""
        return FleetModel(self, name, importance)

    def evict(self, name: str, **_: Any) -> Outcome:
        """Does nothing: each host evicts the model `name` by itself, as its own settings say."""
        return Outcome("evict", name, False, "its hosts evict it")

    def tell_waits(self, _: Any) -> None: ...  # a use in a fleet does not wait in this process

    def status(self) -> Any:
        """The parts of a snapshot that the gateway reads: the owner, and rules that cap no call's importance."""
        rules = SimpleNamespace(cap=None)
        return SimpleNamespace(owner=SimpleNamespace(id="fleet"), rules=rules, sections={})


class FleetModel:
    """The context manager of `FleetModels.use`, and its value. Each call uses the model on a host by itself."""

    def __init__(self, models: FleetModels, name: str, importance: int | None) -> None:
        self.models, self.name, self.importance = models, name, importance

    def __enter__(self) -> FleetModel:
        return self

    def __exit__(self, *error: object) -> None: ...

    def enter_if_here(self) -> tuple[FleetModel]:
        """Enters the block at once; see `Held.enter_if_here`."""
        return (self,)


class _Place:
    """The server of a host, with the attributes that `HttpAdapter` reads."""

    chat_template = ""  # the host applies the template
    truncates = True
    more_paths = {"tokenize": "/tokenize", "detokenize": "/detokenize"}

    def __init__(self, model: str, host: str, server: HostServer) -> None:
        self.model, self.host = model, host
        self.base_url = f"{server.url}/v1"
        self.headers = {"Authorization": f"Bearer {server.token}"}


class FleetAdapter:
    """Sends a body to the `gpu serve` of the best host. See `EngineAdapter`."""

    counts_tokens = False  # some engines on the hosts do not know the field `stream_options`

    def __init__(self, value: FleetModel, spec: ModelSpec, http: HttpClient) -> None:
        """The adapter of `value`, which is the model of `spec`. `http` is the client for hosts."""
        self._value, self._spec, self._http = value, spec, http

    async def answer(self, kind: str, body: Json, think: bool | None) -> Json:
        for attempt in range(1, MOST_HOSTS + 1):
            async with AsyncExitStack() as stack:
                place, adapter = await self._on_a_host(stack)
                try:
                    return await self._while_alive(
                        place, adapter.answer(kind, _with(body, think), None)
                    )
                except Exception as error:
                    self._again(error, place, attempt)
        raise AssertionError  # the last attempt raises

    async def stream(self, kind: str, body: Json, think: bool | None) -> AsyncIterator[Json]:
        """Yields the chunks of the answer; see `EngineAdapter.stream`.

        Events before the first token are held back. So the call can still run on another host if this host is lost.
        """
        for attempt in range(1, MOST_HOSTS + 1):
            early: list[Json] = []
            has_begun = False
            async with AsyncExitStack() as stack:
                place, adapter = await self._on_a_host(stack)
                try:
                    async with aclosing(adapter.stream(kind, _with(body, think), None)) as events:
                        while event := await self._while_alive(place, anext(events, None)):
                            early.append(event)
                            has_begun = has_begun or _has_token(event)
                            while has_begun and early:
                                yield early.pop(0)
                    for event in early:
                        yield event
                    return
                except Exception as error:
                    if has_begun:
                        raise
                    self._again(error, place, attempt)

    async def _on_a_host(self, stack: AsyncExitStack) -> tuple[_Place, HttpAdapter]:
        """The best host's server, where the model is in use until the end of `stack`, and the adapter for it."""
        name, fleet = self._value.name, self._value.models.fleet

        def enter(cancelled: Cancellation) -> tuple[Any, HostServer]:
            use = fleet.use(name, importance=self._value.importance, retry=True)
            cancelled.then(use.withdraw)
            use.__enter__()
            try:
                return use, use.serve(serve)
            except BaseException:
                use.__exit__(None, None, None)
                raise

        use, server = await in_thread_until(enter)
        stack.push_async_callback(in_thread, lambda: use.__exit__(None, None, None))
        place = _Place(name, use.host, server)
        return place, HttpAdapter(name, place, self._http)

    async def _while_alive(self, place: _Place, work: Any) -> Any:
        """The result of `work`. Raises NodeLost once the host of `place` is gone.

        A host that lost its power closes no connection, so this checks regularly whether the host is alive.
        """
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=ALIVE_SECONDS))[0]:
                if place.host not in self._value.models.hosts:
                    raise NodeLost(self._value.name, place.host, "its host is gone")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    def _again(self, error: Exception, place: _Place, attempt: int) -> None:
        """Returns if the host of `place` was lost, unless it was the last of MOST_HOSTS: the call may run again."""
        lost = isinstance(error, NodeLost) or isinstance(error.__cause__, CONNECTION_ERRORS)
        if not lost:
            raise
        log.info("%s was lost on %s: attempt %d", self._value.name, place.host, attempt)
        if attempt == MOST_HOSTS:
            why = f"{attempt} hosts were lost under this call"
            name = self._value.name
            raise EngineFailed(f"{name} failed: {why}", name=name, why=why) from error


def _with(body: Json, think: bool | None) -> Json:
    return body if think is None else {**body, "x_thinking": think}


def _has_token(event: Json) -> bool:
    """Whether `event` of a stream has a part of the answer or the end of the answer."""
    for choice in event.get("choices") or ():
        parts = {**(choice.get("delta") or {}), "role": None, "text": choice.get("text")}
        if choice.get("finish_reason") or any(parts.values()):
            return True
    return False


class FleetGateway(Gateway):
    """The gateway in front of all hosts of a fleet."""

    def __init__(
        self, models: FleetModels, keys: Callable[[], Keys] = dict, store: Store | None = None
    ) -> None:
        """The gateway over the `models` of a fleet. `keys()` returns the keys of programs; `store` keeps the usage."""
        super().__init__(
            models,  # type: ignore[arg-type]
            keys=keys,
            store=store,
            make_adapter=FleetAdapter,
        )
        self._models = models

    def _concurrency(self, model: str) -> int:
        """The number of calls that all copies of the `model` run at once."""
        return super()._concurrency(model) * max(1, self._models.copies[model])


# -- the routes that replace those of one host: health and figures of all hosts, and slots
#
# A slot is a model on certain cards of a certain host. A wished slot was requested by a person.


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
        return next(slot for slot in slots(models.fleet) if slot["id"] == id)

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
    for row in fleet.slots().to_dict("records"):
        new = _row(row["slot"], row["model"], row["host"], row["wished"])
        entry = found.setdefault(row["slot"], new)
        entry["devices"].append({"device": row["device"], "bytes": row["bytes"]})
        entry["active_calls"] = row["active"]
    return [found[id] for id in sorted(found)]


def _row(id: str, model: str, host: str, wished: bool) -> Json:
    return {
        "id": id, "model": model, "host": host, "wished": wished, "devices": [], "active_calls": 0
    }  # fmt: skip


def _acting(act: Any) -> Any:
    """The result of `act()`. For an unknown host, the status is 404."""
    try:
        return act()
    except FleetUnavailable as error:
        raise HTTPException(404, " ".join(str(error).split())) from error


class FleetMetrics(Scraped):
    """The metrics of the fleet of `models`."""

    def __init__(self, models: Any, gateway: Callable[[], Any]) -> None:
        super().__init__(gateway)
        self._models = models

    def collect(self) -> Iterator[Any]:
        snapshots = {snapshot.host: snapshot for snapshot in self._models.fleet.status()}
        yield GaugeMetricFamily("gpuconsole_hosts", "Hosts that answer", len(snapshots))
        yield from devices(snapshots)
        waiting = {host: len(snapshot.waiting) for host, snapshot in snapshots.items()}
        text = "Requests for memory that wait"
        yield gauge("gpuconsole_host_waiting_requests", text, ["Hostname"], waiting.items())
        yield from _models(snapshots)
        yield from self.calls()


def _models(snapshots: dict[str, Snapshot]) -> Iterator[Any]:
    """Yields the bytes and the users of each model on each host, and how models are spread over cards."""
    labels = ["Hostname", "model"]
    sizes = GaugeMetricFamily(
        "gpuconsole_host_model_bytes", "Bytes of a model on cards", labels=labels
    )
    users = GaugeMetricFamily(
        "gpuconsole_host_model_users", "Blocks and calls that use a model now", labels=labels
    )
    held: Counter[tuple[str, str]] = Counter()  # several processes of a host may hold a model
    pins: Counter[tuple[str, str]] = Counter()
    placements: Counter[str] = Counter()
    for host, snapshot in snapshots.items():
        for lease in snapshot.leases():
            cards = [share.bytes for share in lease.shares if share.device != HOST]
            if lease.kind != "model" or not cards:
                continue
            held[host, lease.name] += sum(cards)
            pins[host, lease.name] += lease.pins
            placements[str(len(cards))] += 1
    for family, counted in ((sizes, held), (users, pins)):
        for values, value in counted.items():
            family.add_metric(values, value)
        yield family
    text = "Models on cards, by the number of their cards"
    yield gauge("gpuconsole_placements", text, ["cards"], placements.items())


def fleet_application(models: Any, gateway: Callable[[], Any], store: Store | None) -> FastAPI:
    """The application of `gpu serve --fleet`. `models` reads the models of the fleet's hosts. See `application`."""
    app = base_application(gateway, store)
    app.include_router(router(models), dependencies=[KNOWN_QUERY])
    add_metrics(app, FleetMetrics(models, gateway))
    return app


def run(address: str, **where: Any) -> None:
    """Serves the fleet at `address` until the process is interrupted.

    `where` has the arguments host, port, socket_path, read_only and log_level of `server.run`. Raises
    FleetUnavailable, and the errors of `server.run`.
    """
    with open_fleet(address) as fleet:
        models = FleetModels(fleet, Settings.load())
        try:
            run_app(
                lambda gateway, store: fleet_application(models, gateway, store),
                lambda keys, store: FleetGateway(models, keys, store),
                models.settings,
                **where,
            )
        finally:
            models.close()
