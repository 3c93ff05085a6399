"""The `gpu serve` of one host of a fleet. It runs in the agent of the host, over the runtime of the agent.

The agent passes the server's URL and token to `gpu serve --fleet`, which sends the calls to this server.
"""

from __future__ import annotations

import asyncio
import getpass
import secrets
import threading
from typing import Any, NamedTuple

from ..errors import GpuError
from ..threads import start
from ..version import VERSION
from ..web.asgi import Asgi
from ..web.auth import AccessRules
from ..web.http_server import Service, bound, mask_logs
from .api.app import application
from .gateway import Gateway
from .server import MAX_BODY_BYTES, ROUTES, HeadlessServer

START_SECONDS = 60.0


class HostServer(NamedTuple):
    """The address of the server of a host, and the token that this server requires."""

    url: str  # such as http://10.0.0.2:41234
    token: str


def serve(rt: Any, host: str) -> HostServer:
    """Starts the server of the runtime `rt` on a free port of the address `host`, in a thread.

    Returns the server's URL and token. The server runs until this process ends. Raises GpuError if it does not start.
    """
    listens = threading.Event()
    found: list[HostServer] = []

    def run() -> None:
        """Runs the server's event loop."""
        asyncio.run(_run(rt, host, found, listens))

    thread = start(run)
    while not listens.wait(0.1):
        if thread.wait(0.0):
            raise GpuError(f"the server of this host could not listen on {host}.")
    return found[0]


async def _run(rt: Any, host: str, found: list[HostServer], listens: threading.Event) -> None:
    gateway = Gateway(rt, rt.settings)
    app = application(rt, lambda: gateway, VERSION)
    token = secrets.token_urlsafe(32)
    rules = AccessRules(user=getpass.getuser(), operator_token=token)
    service = Service(
        "gpu serve",
        command="gpu serve",
        default_port=0,
        routes=((ROUTES, Asgi, {"app": app}),),
        max_body_bytes=MAX_BODY_BYTES,
    )
    mask_logs()
    _, address = bound(HeadlessServer, service, rules, host, None, None)
    shown = f"[{host}]" if ":" in host else host
    found.append(HostServer(f"http://{shown}:{address.port}", token))
    listens.set()
    await asyncio.Event().wait()  # until the process ends
