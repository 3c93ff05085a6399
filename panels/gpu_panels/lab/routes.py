"""The routes of Jupyter Server for the status bar and the side panel.

Jupyter checks its own login and the XSRF cookie before a request reaches these routes. No answer contains a token or
the URL of a ledger.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import ensure_async, url_path_join
from tornado import web

from gpu_runtime.errors import GpuError
from gpu_runtime.web import json_body

from .reader import READ_SECONDS, Answer, Reader
from .view import LabKernel

ROOT = "api/gpu-console"
SESSIONS_SECONDS = 3.0  # for so long the list of kernels and their notebooks is used again
READERS, ACTORS = 2, 4  # numbers of threads; an action may wait half a minute for its process


class LabService:
    """The reader and the threads that all routes of one Jupyter server share."""

    def __init__(self) -> None:
        self.reader = Reader()
        self.readers = ThreadPoolExecutor(READERS, "gpu-console-read")
        self.actors = ThreadPoolExecutor(ACTORS, "gpu-console-act")
        self._kernels: tuple[LabKernel, ...] = ()
        self._looked_at = float("-inf")
        self._answered: dict[str, tuple[float, Answer]] = {}  # kernel in front -> last answer

    async def kernels(self, handler: APIHandler) -> tuple[LabKernel, ...]:
        """The kernels of the server of `handler` that run on this machine, with their notebooks."""
        if time.monotonic() - self._looked_at >= SESSIONS_SECONDS:
            self._looked_at = time.monotonic()
            sessions = await ensure_async(handler.session_manager.list_sessions())
            paths = {
                session["kernel"]["id"]: session["path"]
                for session in sessions
                if session.get("kernel") and session.get("type") == "notebook"
            }
            manager = handler.kernel_manager
            pids = {id: pid_of(manager, id) for id in list(manager.list_kernel_ids())}
            self._kernels = await self.run(self.readers, lambda: _with_families(pids, paths))
        return self._kernels

    async def status(self, handler: APIHandler, front: str) -> Answer:
        """The answer for a tab with this kernel in `front`. Raises GpuError, OSError.

        It is kept for a second, because a call of the reader in a thread costs more than the answer itself.
        """
        now = time.monotonic()
        self._answered = {
            kernel: (made_at, answer)
            for kernel, (made_at, answer) in self._answered.items()
            if now - made_at < READ_SECONDS
        }
        if front not in self._answered:
            kernels = await self.kernels(handler)
            answer = await self.run(self.readers, lambda: self.reader.status(kernels, front))
            self._answered[front] = now, answer
        return self._answered[front][1]

    def forget(self) -> None:
        """Makes the next request read the ledger again, because an action has just ended."""
        self._answered.clear()

    async def run(self, threads: ThreadPoolExecutor, work: Callable[[], Any]) -> Any:
        """Runs `work` in one of the `threads`, and returns its result. Raises the errors of `work`."""
        return await asyncio.get_running_loop().run_in_executor(threads, work)


def pid_of(manager: Any, kernel: str) -> int:
    """The pid of the kernel with the id `kernel`. 0 if the kernel runs on another machine, or has just ended."""
    try:
        found = manager.get_kernel(kernel)
    except (KeyError, web.HTTPError):  # it has ended
        return 0
    return getattr(getattr(found, "provisioner", None), "pid", None) or 0


def _with_families(pids: dict[str, int], paths: dict[str, str]) -> tuple[LabKernel, ...]:
    from gpu_runtime.ledgers import reader

    return tuple(
        LabKernel(id, reader.family(pid), paths.get(id, "")) for id, pid in pids.items() if pid
    )


class _Handler(APIHandler):
    """A route of this package. An error of gpu_runtime becomes an answer with status 409 and one sentence."""

    auth_resource = "gpu-console"
    _track_activity = False  # an open page must not keep an idle server alive

    def initialize(self, service: LabService) -> None:
        self.service = service

    async def answer(
        self,
        threads: ThreadPoolExecutor,
        work: Callable[[], Any],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Sends the result of `work`, which runs in one of the `threads`. Calls `after` if there was no error."""
        try:
            found = await self.service.run(threads, work)
            after()
        except (GpuError, OSError) as error:
            self.refuse(error)
        else:
            self.finish(json.dumps(found))

    def refuse(self, error: Exception) -> None:
        """Sends the `error` in one line."""
        self.set_status(409)
        self.finish(json.dumps({"error": " ".join(str(error).split())}))

    def body(self, *names: str) -> list[str]:
        """The texts with these `names` in the request's body. If one is missing, raises HTTPError with status 400."""
        try:
            given = json_body.parsed(self.request.body)
        except ValueError as error:
            raise web.HTTPError(400, str(error)) from None
        values = [given.get(name) for name in names] if isinstance(given, dict) else [None]
        if not all(isinstance(value, str) for value in values):
            raise web.HTTPError(400, f"the body must have the texts {', '.join(names)}")
        return values  # type: ignore[return-value]


class StatusRoute(_Handler):
    """`GET status?kernel=ID&seen=DIGEST`: the status bar and the side panel; status 204 if the digest is the same."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        service, front = self.service, self.get_argument("kernel", "")
        try:
            found = await service.status(self, front)
        except (GpuError, OSError) as error:
            return self.refuse(error)
        if found.digest == self.get_argument("seen", ""):
            self.set_status(204)
            self.finish()
            return
        self.set_header("X-GPU-Digest", found.digest)
        self.finish(found.body)


class VariablesRoute(_Handler):
    """`GET variables?ledger=KEY&owner=ID`: the names that hold a notebook's memory."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        ledger, owner = self.get_argument("ledger"), self.get_argument("owner")
        service = self.service
        await self.answer(service.actors, lambda: service.reader.variables(ledger, owner))


class QuestionRoute(_Handler):
    """`POST question`: the text of the dialog before an action."""

    @web.authenticated
    @authorized
    async def post(self) -> None:
        ledger, verb, target = self.body("ledger", "verb", "target")
        service = self.service
        await self.answer(service.readers, lambda: service.reader.ask(ledger, verb, target))


class ActionRoute(_Handler):
    """`POST act`: carries out the action that was confirmed."""

    @web.authenticated
    @authorized
    async def post(self) -> None:
        [number] = self.body("question")
        service = self.service
        await self.answer(service.actors, lambda: service.reader.act(number), service.forget)


def add(app: Any) -> None:
    """Adds the routes to Jupyter's web application `app`."""
    base = app.settings["base_url"]
    service = {"service": LabService()}
    routes = {
        "status": StatusRoute,
        "variables": VariablesRoute,
        "question": QuestionRoute,
        "act": ActionRoute,
    }
    app.add_handlers(
        ".*$", [(url_path_join(base, ROOT, name), route, service) for name, route in routes.items()]
    )
