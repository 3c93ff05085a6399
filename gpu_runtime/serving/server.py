"""`gpu serve`: the console, the REST of the memory, OpenAI's routes and metrics on one port, behind one gate."""

from __future__ import annotations

import asyncio
import gc
from importlib.metadata import version
from typing import Any

from .api.app import application

DEFAULT_PORT = 8210
ROUTES = r"/(?:memory|v1|api|health|metrics|docs|openapi\.json|static-offline-docs)(?:/.*)?"
TELLING_SECONDS = 0.5  # for callers to be told that it ends
MOST_BODY_BYTES = 32 << 20  # pictures come in bodies too


def run(
    rt: Any,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    socket_path: str | None = None,
    read_only: bool = False,
) -> None:
    """Serves until it is interrupted, and prints the URL to open. Raises GpuError where it cannot.

    The runtime is a full member of the ledger: models of the catalogue are loaded here when they are called.
    """
    from gpu_panels import console, poller, server

    from gpu_runtime.web.asgi import Asgi

    from .gateway import Gateway

    made: list[Any] = []

    def gateway() -> Any:
        """Made in the event loop that it belongs to, at the first call."""
        if not made:
            made.append(Gateway(rt, rt.settings))
        return made[0]

    async def end() -> None:
        await app.state.jobs.close()
        for one in made:
            await one.close()
        told = asyncio.all_tasks() - {asyncio.current_task()}
        if told:
            await asyncio.wait(told, timeout=TELLING_SECONDS)

    app = application(rt, gateway, version("gpu-console"))
    gc.freeze()  # what is imported stays: to search it again and again took a fifth of the time, 0.2 s at a stretch
    server.run(
        host=host,
        port=DEFAULT_PORT if port is None else port,
        socket_path=socket_path,
        read_only=read_only,
        browser=False,
        page=lambda visitor: console.page(visitor, poller.of(rt)),
        beside=server.Beside("gpu serve", ((ROUTES, Asgi, {"app": app}),), MOST_BODY_BYTES, end),
    )
