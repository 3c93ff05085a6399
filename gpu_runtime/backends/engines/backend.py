"""Models in servers of their own, which speak OpenAI's HTTP: what `use` yields for them, and the account of their
bytes.

A server's life is `servers.py`'s, and how each engine is started its recipe's (engines/).
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
from ...errors import CannotGovern, LoadFailed, NotResident
from ...facts import Evidence, ModelSpec, Share, Shares, where
from ..base import Progress
from ..processes.visible_devices import card_environment
from .ports import ports
from .recipe import Order
from .registry import recipe
from .server import POLL_SECONDS, Server, State

if TYPE_CHECKING:
    from ...settings import Settings

PORTS, START_SECONDS = "8300-8399", 600.0  # unless the settings say otherwise


class Served:
    """What `use` yields for a server: where it answers, what it calls the model, and what to show it.

    `base_url` ends in `/v1`; an OpenAI client takes it with `api_key`. Valid inside `with rt.use(…)`: a restart may
    change it, and is waited for where it is asked for meanwhile.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._server: Server | None = None
        self._where = ""
        self.chat_template: str | None = ""  # the model's own, as Recipe.template tells
        self._calls_under: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __repr__(self) -> str:
        at = f"at {self._server.base_url} on {self._where}" if self._server else "on disk"
        return f"<{self.name} {at}>"

    @property
    def base_url(self) -> str:
        return self._present().base_url

    @property
    def model(self) -> str:
        """The engine's own name for it, as requests must say it."""
        server = self._present()
        return server.recipe.model(server._known())

    @property
    def headers(self) -> dict[str, str]:
        """What a request must carry."""
        return self._present().headers

    @property
    def api_key(self) -> str:
        """The key in those headers; `none` for an engine that has none."""
        return self.headers.get("Authorization", "Bearer none").removeprefix("Bearer ")

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes, the first of which guards the others."""
        return self._server.pids if self._server else ()

    @property
    def state(self) -> State:
        return self._server.state if self._server else State.IDLE

    @property
    def starting(self) -> bool:
        """Whether it ended by itself and is being started again: a while later it answers, or is gone for good."""
        return self._server is not None and self._server.starting

    def health(self) -> bool:
        """Whether it answers at this moment."""
        return self._server is not None and self._server.healthy()

    def _present(self) -> Server:
        while self.starting:
            time.sleep(POLL_SECONDS)
        server = self._server
        if server is None:
            raise NotResident(
                f"{self.name} is not loaded.\n  Ask inside:  with rt.use({self.name!r}) as served:",
                name=self.name,
                where="not loaded",
            )
        if server._over is not None:
            raise type(server._over)(str(server._over), **server._over.facts)
        return server


class Loaded:
    """A running server, and the account of its bytes. The handle of this backend."""

    def __init__(self, server: Server, value: Served) -> None:
        self.server, self.value = server, value
        self.shares: Shares = ()
        self.blocks: list[Block] = []
        self._end = weakref.finalize(self, server.end)

    @property
    def pids(self) -> tuple[int, ...]:
        return self.server.pids

    def watch(self, lost: Callable[[str, str], None]) -> None:
        self.server.watch(lost)

    def end(self) -> None:
        self._end()
        if self.value._server is self.server:
            self.value._server = None
        blocks, self.blocks, self.shares = self.blocks, [], ()
        for block in blocks:
            block.free()


class ServerBackend:
    """The engines of `engines/`, each under its own name. Options: context_length, sequences, runtime_args, …."""

    can_move = False
    can_split = True

    def __init__(self, probe: Probe, name: str, settings: Settings | None = None) -> None:
        self.probe, self.name, self.recipe = probe, name, recipe(name)
        self.layout = self.recipe.LAYOUT
        self._among = ports(settings.gpu_engine_ports if settings else PORTS)
        self._seconds = settings.gpu_engine_start_seconds if settings else START_SECONDS

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """What its files tell, where they lie here. What an engine takes it takes when it starts."""
        return self.recipe.evidence(spec)

    def pieces(self, spec: ModelSpec, origin: Any = None, model: Any = None) -> tuple[int, ...]:
        return ()

    def load(
        self,
        spec: ModelSpec,
        shares: Shares,
        origin: Any = None,
        *,
        progress: Progress | None = None,
        into: Any = None,
    ) -> Loaded:
        if missing := self.recipe.missing():
            raise LoadFailed(
                f"{spec.name} cannot be loaded by {self.name}: {missing}",
                name=spec.name,
                source=spec.source,
            )
        total = sum(share.bytes for share in shares)
        if progress:
            progress(0, total)
        config = self.evidence(spec).config
        source = self.recipe.source(spec)
        totals = {device.id: device.total_bytes for device in self.probe.devices}
        simulated = any(
            device.simulated for device in self.probe.devices if device.id == shares[0].device
        )
        server = Server(
            spec,
            self.recipe,
            lambda port, key: Order(spec, shares, totals, source, port, simulated, key, config),
            {
                **os.environ,
                **card_environment(
                    self.probe, () if spec.options.get("gpu_layers") == 0 else shares
                ),
            },
            among=self._among,
            seconds=spec.options.get("start_seconds", self._seconds),
        )
        kept = into.value if isinstance(into, Loaded) else into
        value = kept if isinstance(kept, Served) else Served(spec.name)
        loaded = Loaded(server, value)
        try:
            server.start()
            loaded.shares = self._taken(server, shares)
            for share in loaded.shares:
                loaded.blocks.append(self.probe.place(share.device).allocate(share.bytes))
            if progress:
                progress(total, total)
            value.chat_template = self.recipe.template(server._known())
            value._server, value._where = server, where(loaded.shares)
            return loaded
        except BaseException:
            loaded.end()
            raise

    def value(self, model: Loaded) -> Served:
        return model.value

    def move(self, model: Loaded, shares: Shares) -> NoReturn:
        name = model.value.name
        raise CannotGovern(
            f"{name} cannot be moved: {self.name} places a model when it loads it.\n"
            f"  Load it again where it should be:  rt.evict({name!r}), then rt.preload({name!r})",
            name=name,
            why=f"{self.name} cannot move",
        )

    def drop(self, model: Loaded) -> None:
        model.end()

    def measure(self, model: Loaded) -> Shares:
        return model.shares

    def elsewhere(self, model: Loaded) -> tuple[str, ...]:
        return ()

    def droppable(self, model: Loaded) -> bool:
        return True

    def unchanged(self, model: Loaded) -> bool:
        return True

    def _taken(self, server: Server, shares: Shares) -> Shares:
        """What its processes hold by the driver's account; its shares, where that does not tell."""
        charged: dict[str, int] = {}
        for pid in server.pids:
            for device, size in self.probe.charged(
                pid, tuple(share.device for share in shares)
            ).items():
                charged[device] = charged.get(device, 0) + size
        return tuple(
            Share(share.device, charged.get(share.device) or share.bytes) for share in shares
        )
