"""The routes of Jupyter Server for the status bar and the side panel.

Jupyter checks its own login and the XSRF cookie before a request reaches these routes. No answer contains a token or
the URL of a ledger.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import ensure_async, url_path_join
from tornado import web

from gpu_runtime.attribution import own_name
from gpu_runtime.errors import GpuError
from gpu_runtime.facts import Snapshot
from gpu_runtime.web import json_body

from ..data.cells import ledger_title, without_password
from ..data.confirmations import NOTHING_DONE, Proposal, changed, propose, question
from ..data.hours import own_week
from ..data.rows import FirstSeen
from . import view
from .view import LabKernel, LedgerName

# -- the reader of the ledgers, for all browser tabs of one Jupyter server
#
# A ledger is read at most once a second, however many tabs request its status, and only while a tab requests it. All
# reading happens in threads, so a ledger that does not answer does not block Jupyter.

READ_SECONDS = 1.0  # an older snapshot is read again
LOOK_SECONDS = 3.0  # for so long the list of ledgers that each kernel has open is used again
CHOOSE_SECONDS = 30.0  # for so long the tile's ledger is kept; choosing it reads all processes
REAP_SECONDS = 2.0  # between two checks of one ledger for dead processes
HOURS_SECONDS = 300.0  # between two reads of the account of hours
MOST_LEDGERS = 8  # ledgers that this reader keeps open at the same time
MOST_QUESTIONS = 100


class Answer(NamedTuple):
    """The body of the answer to a status request, and the digest of this body."""

    body: bytes
    digest: str


class _Read:
    """One open ledger: its runtime, its last snapshot, and the answers made from that snapshot."""

    def __init__(self, rt: Any) -> None:
        self.rt = rt
        self.lock = threading.Lock()
        self.snapshot: Snapshot | None = None
        self.read_at = self.reaped_at = float("-inf")
        self.first_seen = FirstSeen()
        self.answers: dict[Any, Answer] = {}  # of the last snapshot only


class Reader:
    """The snapshots of all ledgers that the kernels of this server use."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._reads: OrderedDict[str, _Read] = OrderedDict()  # key of the ledger -> its reader
        self._cached: dict[str, tuple[float, Any]] = {}  # when it was made, and the value
        self._questions: OrderedDict[str, tuple[str, Proposal]] = OrderedDict()

    # -- what the tabs show

    def status(self, kernels: Sequence[LabKernel], front: str = "") -> Answer:
        """The answer to a tab, with the kernel of the notebook in `front`. Raises GpuError or OSError."""
        from gpu_runtime import watching  # loads the runtime; not needed until a tab asks

        # The ledger that the console would show if it were opened by its tile in JupyterLab's launcher.
        tile = self._of(self._every(CHOOSE_SECONDS, "tile", watching.followed))
        ledgers = self._ledgers(kernels)
        opened = ledgers.get(front, ())  # the last one is shown, or the tile's
        shown = tile
        if opened and watching.directory_of(tile.rt) not in [ledger.directory for ledger in opened]:
            shown = self._of(watching.guest(opened[-1]))
        others = [name for name in self._active(ledgers, tile) if name.key != self._key(shown)]
        self._close_unused()
        return self._answer(shown, kernels, others, self._name(tile))

    def _answer(
        self,
        read: _Read,
        kernels: Sequence[LabKernel],
        others: Sequence[LedgerName],
        tile: LedgerName,
    ) -> Answer:
        snapshot = self._snapshot(read)
        version = (tuple(kernels), tuple(others), tile)
        known = read.answers.get(version)
        if known is not None:
            return known
        name = self._name(read)
        read_week = lambda: own_week(read.rt.report("7d").to_dict("records"), own_name())
        week = self._every(HOURS_SECONDS, f"week {name.key}", read_week)
        plain = view.shown(snapshot, kernels, name, others, tile, read.first_seen, week)
        body = json.dumps(plain).encode()
        answer = Answer(body, hashlib.sha1(body, usedforsecurity=False).hexdigest())
        read.answers[version] = answer
        return answer

    def _snapshot(self, read: _Read) -> Snapshot:
        """The snapshot of the ledger of `read`, at most a second old."""
        with read.lock:
            now = self._clock()
            if read.snapshot is None or now - read.read_at >= READ_SECONDS:
                if now - read.reaped_at >= REAP_SECONDS:
                    read.reaped_at = now
                    read.rt.reap()
                read.snapshot = read.rt.status()
                read.read_at = now
                read.answers = {}
            return read.snapshot

    # -- which ledger

    def _ledgers(self, kernels: Sequence[LabKernel]) -> dict[str, tuple[Any, ...]]:
        """The ledgers that each of the `kernels` has open, by the id of the kernel."""
        from gpu_runtime.ledgers import reader

        def look() -> dict[str, tuple[Any, ...]]:
            return {
                kernel.id: tuple(ledger for pid in kernel.pids for ledger in reader.of_process(pid))
                for kernel in kernels
            }

        known = self._every(LOOK_SECONDS, "ledgers", look)
        if any(kernel.id not in known for kernel in kernels):  # a kernel has just started
            self._cached.pop("ledgers", None)
            known = self._every(LOOK_SECONDS, "ledgers", look)
        return known

    def _active(self, ledgers: dict[str, tuple[Any, ...]], tile: _Read) -> list[LedgerName]:
        """The ledgers that kernels of this server have open. Also the ledger `tile`, if it has leases."""
        from gpu_runtime import watching

        found: dict[Path | None, str] = {}
        if any(section.leases for section in self._snapshot(tile).sections.values()):
            found[watching.directory_of(tile.rt)] = self._snapshot(tile).ledger
        for opened in ledgers.values():
            for ledger in opened:
                found.setdefault(ledger.directory, ledger.url)
        return [LedgerName(key_of(directory), title_of(url)) for directory, url in found.items()]

    def _every(self, seconds: float, key: str, make: Callable[[], Any]) -> Any:
        """The last result of `make()` under `key`; it is made again if it is older than `seconds`."""
        with self._lock:
            now = self._clock()
            known = self._cached.get(key)
            if known is None or now - known[0] >= seconds:
                known = self._cached[key] = now, make()
            return known[1]

    def _of(self, rt: Any) -> _Read:
        from gpu_runtime import watching

        key = key_of(watching.directory_of(rt))
        with self._lock:
            read = self._reads.get(key)
            if read is None or read.rt is not rt:
                read = self._reads[key] = _Read(rt)
            self._reads.move_to_end(key)
            return read

    def _name(self, read: _Read) -> LedgerName:
        return LedgerName(self._key(read), title_of(self._snapshot(read).ledger))

    def _key(self, read: _Read) -> str:
        return next(key for key, known in self._reads.items() if known is read)

    def _close_unused(self) -> None:
        """Closes all open ledgers except the MOST_LEDGERS that were shown last."""
        from gpu_runtime import watching

        closed = []
        with self._lock:
            while len(self._reads) > MOST_LEDGERS:
                closed.append(self._reads.popitem(last=False)[1])
        for read in closed:
            watching.close(read.rt)

    # -- actions

    def ask(self, ledger: str, verb: str, target: str) -> dict[str, Any]:
        """The dialog for `verb` on the lease `target` (`OWNER_ID/NAME`); for `cancel`, on the key of a request.

        The result has the texts of the dialog, and `question`, the number that `act` expects. The dialog for
        `interrupt` has no number, because Jupyter interrupts the kernel. If the action is not possible any more, the
        result has only `refused`, the reason. Raises GpuError for an unknown `ledger` (a key) or verb.
        """
        from ..acting import asked_process

        read = self._known(ledger)
        snapshot = self._snapshot(read)
        if verb not in (*view.PANEL_VERBS, "interrupt"):
            raise GpuError(f"{verb} is no action of this panel")
        section = snapshot.sections.get(target.partition("/")[0])
        if section is None and verb != "cancel":  # the target of `cancel` has no owner
            return {"refused": "The process has ended. Nothing was done."}
        proposal = propose(verb, target, snapshot)
        if section is not None and verb == "interrupt":  # of the kernel, which may run a script
            why_not = view.why_no_interrupt(section, snapshot)
            difference = f"{why_not}. {NOTHING_DONE}" if why_not else ""
        else:
            difference = changed(proposal, snapshot)
        if difference:
            return {"refused": difference}
        text = question(proposal, snapshot)
        lines = [line for line in text.lines if line]
        if verb == "interrupt":
            return {**text._asdict(), "lines": lines}
        number = secrets.token_hex(8)
        with self._lock:
            self._questions[number] = (ledger, proposal)
            while len(self._questions) > MOST_QUESTIONS:
                self._questions.popitem(last=False)
        process = asked_process(proposal, snapshot)
        return {**text._asdict(), "lines": lines, "question": number, "process": process}

    def act(self, number: str) -> dict[str, Any]:
        """Carries out the action of the question `number`, once: whether it is `done`, and why. Raises GpuError."""
        from ..acting import attempt

        with self._lock:
            ledger, proposal = self._questions.pop(number, ("", None))
        if proposal is None:
            raise GpuError("this question was answered already. Press the button again")
        read = self._known(ledger)
        state, words = attempt(read.rt, proposal, f"{user()}, JupyterLab")
        with read.lock:
            read.read_at = float("-inf")  # the next request reads the ledger again
        return {"done": state == "done", "because": words}

    def variables(self, ledger: str, owner: str) -> dict[str, Any]:
        """The names that hold the memory of the process `owner`. It answers between two cells. Raises GpuError."""
        rt = self._known(ledger).rt
        with rt.on_behalf_of(f"{user()}, JupyterLab"):
            return view.variables(rt.who(owner))

    def _known(self, key: str) -> _Read:
        with self._lock:
            read = self._reads.get(key)
        if read is None:
            raise GpuError("this ledger is no longer shown. Press the button again")
        return read


def key_of(directory: Path | None) -> str:
    """The key by which requests name the ledger with its files in `directory`. The key does not show the URL."""
    return hashlib.sha256(str(directory).encode()).hexdigest()[:16]


def title_of(url: str) -> str:
    """A short name of the ledger at `url`, without a password or another option."""
    return ledger_title(without_password(url).partition("?")[0])


def user() -> str:
    """The person whom the journal names for each action. This is JupyterHub's user, else the system's user."""
    return os.environ.get("JUPYTERHUB_USER") or own_name()


# -- the routes

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
        """The answer for a tab with this kernel in `front`. Raises GpuError, OSError."""
        kernels = await self.kernels(handler)
        return await self.run(self.readers, lambda: self.reader.status(kernels, front))

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

    async def answer(self, threads: ThreadPoolExecutor, work: Callable[[], Any]) -> None:
        """Sends the result of `work`, which runs in one of the `threads`."""
        try:
            found = await self.service.run(threads, work)
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
        await self.answer(service.actors, lambda: service.reader.act(number))


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
