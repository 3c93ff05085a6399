"""The backend for engines that are HTTP servers, and `Served`, the object that `use` yields.

The backend also counts the bytes of the models that engines load. `server.py` starts and ends a
server. The recipe of each engine has the command that starts it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...devices.probe import Probe
from ...errors import LoadFailed
from ...facts import Evidence, ModelSpec, Shares
from ...fault_texts import Kind
from ..base import Progress
from ..processes.engine import EngineBackend, EngineHandle, EngineModel
from ..processes.processes import card_environment
from .ports import ports
from .recipe import LaunchOrder, RequestFields, recipe
from .server import POLL_SECONDS, Server, ServerState

if TYPE_CHECKING:  # settings load pydantic, a tenth of a second
    from ...settings import Settings

PORTS, START_SECONDS = "8300-8399", 600.0  # defaults without settings


class Served(EngineModel[Server]):
    """The object that `use` yields for a server: its address, its key, and the model's name in requests.

    `base_url` ends in `/v1`. Pass `base_url` and `api_key` to an OpenAI client. Both are valid
    inside `with rt.use(…)`. A restart of the server may change both. Reading one of them during a
    restart waits until the restart has ended.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.chat_template: str | None = ""  # the model's own, as `Recipe.template` defines it

    def __repr__(self) -> str:
        place = f"at {self._engine.base_url} on {self._where}" if self._engine else "on disk"
        return f"<{self.name} {place}>"

    @property
    def base_url(self) -> str:
        """The prefix of /chat/completions. Raises NotResident, EngineDied."""
        return self._listening_server().base_url

    @property
    def model(self) -> str:
        """The name of the model in requests. Raises NotResident, EngineDied."""
        server = self.running_server()
        return server.recipe.model(server.launch_order())

    @property
    def headers(self) -> dict[str, str]:
        """The headers that a request must carry. Raises NotResident, EngineDied."""
        return self._listening_server().headers

    @property
    def api_key(self) -> str:
        """The key in `headers`, or `none` for an engine without a key."""
        return self.headers.get("Authorization", "Bearer none").removeprefix("Bearer ")

    @property
    def request_fields(self) -> RequestFields:
        """The fields that the server reads, by kind of call. A missing kind is not known."""
        return self._engine.request_fields if self._engine else {}

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the server. The first is that of the guard, which ends the others."""
        return self._engine.pids if self._engine else ()

    @property
    def state(self) -> ServerState:
        """What the server is doing now, such as loading or stopping."""
        return self._engine.state if self._engine else ServerState.IDLE

    @property
    def starting(self) -> bool:
        """Whether the server ended by itself and is being restarted."""
        return self._engine is not None and self._engine.starting

    def health(self) -> bool:
        """Whether the server answers its health check now."""
        return self._engine is not None and self._engine.healthy()

    def listens(self) -> bool:
        """Whether the port of `base_url` reaches the server's own processes now."""
        return self._engine is not None and self._engine.listens()

    def _listening_server(self) -> Server:
        """The server, after a check that its port reaches the server's own processes.

        Without this check, a process of another user could receive the key. Raises NotResident,
        EngineDied.
        """
        server = self.running_server()
        if server.listens():
            return server
        why = "no process of the server listens on its port"
        text = f"the server of {self.name} cannot be reached: {why}."
        raise server.died(Kind.CRASH, text, why, pid=next(iter(server.pids), None))

    def running_server(self) -> Server:
        """The server, after a restart has ended. Raises NotResident, EngineDied.

        Its attributes `base_url` and `headers` are not checked. The caller calls `listens` for each
        new connection, before anything is sent.
        """
        while self.starting:
            time.sleep(POLL_SECONDS)
        server = self._loaded_engine("Use it inside:  with rt.use({!r}) as served:")
        server.require()
        return server


ServerHandle = EngineHandle[Server, Served]


class ServerBackend(EngineBackend[ServerHandle, Served]):
    """Loads models into servers of one engine.

    The options of a model are context_length, sequences, runtime_args, start_seconds and the
    options that the recipe reads.
    """

    model_type = Served

    def __init__(self, probe: Probe, name: str, settings: Settings | None = None) -> None:
        """The engine is called `name`. `settings` have the ports and the time-out of a start."""
        self.probe, self.recipe = probe, recipe(name)
        self.name = self.engine_name = name
        self.layout = self.recipe.LAYOUT
        self._port_range = ports(settings.gpu_engine_ports if settings else PORTS)
        self._start_seconds = settings.gpu_engine_start_seconds if settings else START_SECONDS

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """As `Recipe.evidence`. `origin` is ignored."""
        return self.recipe.evidence(spec)

    def _prepared(
        self, spec: ModelSpec, shares: Shares, report: Progress
    ) -> tuple[Server, Callable[[Served], Shares]]:
        missing = self.recipe.missing()
        if missing:
            raise LoadFailed(
                f"{spec.name} cannot be loaded by {self.name}: {missing}",
                name=spec.name,
                source=spec.source,
                mistake=True,
            )
        total = sum(share.bytes for share in shares)
        report(0, total)
        server = self._server(spec, shares)

        def start(value: Served) -> Shares:
            server.start()
            value.chat_template = self.recipe.template(server.launch_order())
            report(total, total)
            return self._charged(server.pids, shares)

        return server, start

    def _server(self, spec: ModelSpec, shares: Shares) -> Server:
        """A server for `spec`, not started yet. It sees only the cards of `shares` that it uses."""
        config = self.evidence(spec).config
        source = self.recipe.source(spec)
        totals = {device.id: device.total_bytes for device in self.probe.devices}
        simulated = self.probe.place(shares[0].device).simulated

        def order_for(port: int, key: str) -> LaunchOrder:
            return LaunchOrder(spec, shares, totals, source, port, simulated, key, config)

        on_cpu = spec.options.get("gpu_layers") == 0
        cards = card_environment(self.probe, () if on_cpu else shares)
        return Server(
            spec,
            self.recipe,
            order_for,
            {**os.environ, **cards},
            port_range=self._port_range,
            start_seconds=spec.options.get("start_seconds", self._start_seconds),
        )
