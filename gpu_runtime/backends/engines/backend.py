"""The backend for engines that are HTTP servers: what `use` yields for them, and the account of their bytes.

The lifecycle of a server is in `server.py`; how each engine is started is in its recipe.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from ...devices.probe import Probe
from ...devices.process_memory import Block
from ...errors import CannotGovern, EngineDied, LoadFailed, NotResident
from ...facts import Evidence, ModelSpec, Share, Shares, where
from ..base import Progress
from ..fault_texts import Kind
from ..processes.visible_devices import card_environment
from .ports import ports
from .recipe import LaunchOrder
from .registry import recipe
from .server import POLL_SECONDS, Server, ServerState

if TYPE_CHECKING:  # settings load pydantic, a tenth of a second
    from ...settings import Settings

PORTS, START_SECONDS = "8300-8399", 600.0  # defaults without settings


class Served:
    """What `use` yields for a server: its address, the model's name in requests, and the key.

    `base_url` ends in `/v1`; pass it to an OpenAI client together with `api_key`. Both are valid inside
    `with rt.use(…)`. A restart may change them: a read during a restart waits for its end.
    """

    def __init__(self, name: str) -> None:
        """The value for the model `name`, not loaded yet."""
        self.name = name
        self.chat_template: str | None = ""  # the model's own, as `Recipe.template` defines it
        self._server: Server | None = None
        self._where = ""
        self._calls_under: Callable[[], AbstractContextManager[Any]] = nullcontext  # pins the model

    def __repr__(self) -> str:
        place = f"at {self._server.base_url} on {self._where}" if self._server else "on disk"
        return f"<{self.name} {place}>"

    @property
    def base_url(self) -> str:
        """The prefix of /chat/completions. Raises NotResident, EngineDied."""
        return self._listening_server().base_url

    @property
    def model(self) -> str:
        """The name of the model in requests. Raises NotResident, EngineDied."""
        server = self._running_server()
        return server.recipe.model(server.launch_order())

    @property
    def headers(self) -> dict[str, str]:
        """The headers that a request must carry. Raises NotResident, EngineDied."""
        return self._listening_server().headers

    @property
    def api_key(self) -> str:
        """The key in those headers; `none` for an engine that has none."""
        return self.headers.get("Authorization", "Bearer none").removeprefix("Bearer ")

    @property
    def pids(self) -> tuple[int, ...]:
        """The server's processes; the first is the guard of the others."""
        return self._server.pids if self._server else ()

    @property
    def state(self) -> ServerState:
        """What the server is doing."""
        return self._server.state if self._server else ServerState.IDLE

    @property
    def starting(self) -> bool:
        """Whether the server ended by itself and is being restarted."""
        return self._server is not None and self._server.starting

    def health(self) -> bool:
        """Whether the server answers its health check now."""
        return self._server is not None and self._server.healthy()

    def listens(self) -> bool:
        """Whether the port of `base_url` reaches the server's own processes now."""
        return self._server is not None and self._server.listens()

    def _listening_server(self) -> Server:
        """The server, if its port reaches its own processes. Raises NotResident, EngineDied.

        Otherwise a process of another user could get the key.
        """
        server = self._running_server()
        if server.listens():
            return server
        why = "no process of the server listens on its port"
        raise EngineDied(
            f"the server of {self.name} cannot be reached: {why}.\n  Its log:  {server.log}",
            name=self.name,
            pid=next(iter(server.pids), None),
            status=None,
            kind=Kind.CRASH.value,
            why=why,
            log=str(server.log),
        )

    def _running_server(self) -> Server:
        """The server, after a restart in progress has ended. Raises NotResident, EngineDied."""
        while self.starting:
            time.sleep(POLL_SECONDS)
        server = self._server
        if server is None:
            raise NotResident(
                f"{self.name} is not loaded.\n"
                f"  Use it inside:  with rt.use({self.name!r}) as served:",
                name=self.name,
                where="not loaded",
            )
        if server.error is not None:
            raise type(server.error)(str(server.error), **server.error.facts)
        return server


class ServerHandle:
    """The handle of this backend: a running server, and the account of its bytes."""

    def __init__(self, server: Server, value: Served) -> None:
        """Ends `server` when the handle is garbage-collected. `value` is what users hold."""
        self.server, self.value = server, value
        self.shares: Shares = ()
        self.blocks: list[Block] = []
        self._end = weakref.finalize(self, server.end)

    @property
    def pids(self) -> tuple[int, ...]:
        """The server's processes; the first is the guard of the others."""
        return self.server.pids

    def watch(self, on_loss: Callable[[str, str], None]) -> None:
        """Has `on_loss(kind, because)` called once if the server ends for good."""
        self.server.watch(on_loss)

    def end(self) -> None:
        """Ends the server and frees its bytes. Repeating is safe."""
        self._end()
        if self.value._server is self.server:
            self.value._server = None
        blocks, self.blocks, self.shares = self.blocks, [], ()
        for block in blocks:
            block.free()


class ServerBackend:
    """Loads models into servers of one engine.

    Options of a model: context_length, sequences, runtime_args and those that the recipe names.
    """

    can_move = False
    can_split = True

    def __init__(self, probe: Probe, name: str, settings: Settings | None = None) -> None:
        """The backend of the engine `name` on the devices of `probe`.

        `settings` give the port range and the start time-out.
        """
        self.probe, self.name, self.recipe = probe, name, recipe(name)
        self.layout = self.recipe.LAYOUT
        self._port_range = ports(settings.gpu_engine_ports if settings else PORTS)
        self._start_seconds = settings.gpu_engine_start_seconds if settings else START_SECONDS

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """What the local files of `spec` show. An engine takes all its memory when it starts.

        `origin` is ignored.
        """
        return self.recipe.evidence(spec)

    def pieces(self, spec: ModelSpec, origin: Any = None, model: Any = None) -> tuple[int, ...]:
        """Empty: the engine divides the `model` of `spec` itself. `origin` is ignored."""
        return ()

    def load(
        self,
        spec: ModelSpec,
        shares: Shares,
        origin: Any = None,
        *,
        progress: Progress | None = None,
        into: Any = None,
    ) -> ServerHandle:
        """A handle to a running server for `spec` on the cards of `shares`.

        `progress` is called at the start and at the end. `into` is a handle or a Served of an earlier
        load, which gets the new server. `origin` is ignored.
        Raises LoadFailed, and the device's out-of-memory error.
        """
        missing = self.recipe.missing()
        if missing:
            raise LoadFailed(
                f"{spec.name} cannot be loaded by {self.name}: {missing}",
                name=spec.name,
                source=spec.source,
            )
        total = sum(share.bytes for share in shares)
        if progress:
            progress(0, total)
        server = self._server(spec, shares)
        kept = into.value if isinstance(into, ServerHandle) else into
        value = kept if isinstance(kept, Served) else Served(spec.name)
        handle = ServerHandle(server, value)
        try:
            server.start()
            handle.shares = self._measured(server, shares)
            for share in handle.shares:
                handle.blocks.append(self.probe.place(share.device).allocate(share.bytes))
            if progress:
                progress(total, total)
            value.chat_template = self.recipe.template(server.launch_order())
            value._server, value._where = server, where(handle.shares)
            return handle
        except BaseException:
            handle.end()
            raise

    def _server(self, spec: ModelSpec, shares: Shares) -> Server:
        """A server for `spec`, not started yet, that sees only the cards of its shares."""
        config = self.evidence(spec).config
        source = self.recipe.source(spec)
        totals = {device.id: device.total_bytes for device in self.probe.devices}
        simulated = any(
            device.simulated for device in self.probe.devices if device.id == shares[0].device
        )

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

    def value(self, model: ServerHandle) -> Served:
        """The Served of the handle `model`."""
        return model.value

    def move(self, model: ServerHandle, shares: Shares) -> NoReturn:
        """Always raises CannotGovern: `model` cannot be moved to other `shares`."""
        name = model.value.name
        raise CannotGovern(
            f"{name} cannot be moved: {self.name} places a model when it loads it.\n"
            f"  Load it again where it should be:  rt.evict({name!r}), then rt.preload({name!r})",
            name=name,
            why=f"{self.name} cannot move",
        )

    def drop(self, model: ServerHandle) -> None:
        """Ends the server of `model`. Repeating is safe."""
        model.end()

    def measure(self, model: ServerHandle) -> Shares:
        """The bytes of `model` by device, as measured after its start; empty once it is dropped."""
        return model.shares

    def elsewhere(self, model: ServerHandle) -> tuple[str, ...]:
        """Empty: the tensors of `model` are not visible here. Recipes check the placement."""
        return ()

    def droppable(self, model: ServerHandle) -> bool:
        """True: the weights of `model` are never changed."""
        return True

    def unchanged(self, model: ServerHandle) -> bool:
        """True: the weights of `model` are never changed."""
        return True

    def _measured(self, server: Server, shares: Shares) -> Shares:
        """The bytes that the driver charges to its processes; its shares if the driver does not say."""
        devices = tuple(share.device for share in shares)
        charged: dict[str, int] = {}
        for pid in server.pids:
            for device, size in self.probe.charged(pid, devices).items():
                charged[device] = charged.get(device, 0) + size
        return tuple(
            Share(share.device, charged.get(share.device) or share.bytes) for share in shares
        )
