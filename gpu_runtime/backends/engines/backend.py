"""The backend for engines that are HTTP servers, and `Served`, the object that `use` yields.

The backend also counts the bytes of the models that engines load. A `Server` starts and ends a
server, on a port that it claims. The recipe of each engine has the command that starts it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import http.client
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

from ... import threads
from ...compat import StrEnum
from ...devices.probe import Probe
from ...errors import BadSetting, LoadFailed
from ...facts import Evidence, ModelSpec, Shares
from ...fault_texts import Kind
from ...files import local_state, make_directory, weak_step
from ...tcp_sockets import Listener, listeners, of_another_user, socket_inodes
from ..base import Progress
from ..processes import engine
from ..processes.engine import (
    MOST_RESTARTS,
    STOP_SECONDS,
    Child,
    EngineBackend,
    EngineHandle,
    EngineModel,
    RestartedEngine,
    card_environment,
    guarded,
    in_words,
)
from ..processes.orphan_guard import descendants
from .recipe import LaunchOrder, Recipe, RequestFields, SendRequest, StateChange, recipe

if TYPE_CHECKING:
    from ...settings import Settings

PORTS, START_SECONDS = "8300-8399", 600.0  # defaults without settings


# -- one server of an engine: its process, states, port, key, health and restarts
#
#     IDLE → LOADING → READY → STOPPING → IDLE
#
# A server has no other states; a failed load is also followed by STOPPING. A server that ends by
# itself is restarted on the same cards, at most three times. If the server then ends again, its model
# is lost. The recipe of each engine defines how the server is started.

MOST_PORTS = 5  # tried for one start, since a process without a claim may take a port
POLL_SECONDS = 0.05
ANSWER_SECONDS = 2.0
READY_STATUS = 200  # of the health check
LOAD_ANSWER_SECONDS = 3600.0  # time-out of the request that loads the model


class ServerState(StrEnum):
    """What a server is doing now."""

    IDLE = "idle"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


NEXT_STATES = {
    ServerState.IDLE: {ServerState.LOADING},
    ServerState.LOADING: {ServerState.READY, ServerState.STOPPING},
    ServerState.READY: {ServerState.STOPPING},
    ServerState.STOPPING: {ServerState.IDLE},
}


class Server(RestartedEngine):
    """The server process of one engine, from its first start to its end, restarts included."""

    title = "server"
    _clock, _sleep = staticmethod(time.monotonic), staticmethod(time.sleep)  # tests replace them

    def __init__(
        self,
        spec: ModelSpec,
        recipe: Recipe,
        order_for: Callable[[int, str], LaunchOrder],
        env: dict[str, str],
        *,
        port_range: range,
        start_seconds: float,
    ) -> None:
        """A server for `spec`, which is not started yet. `recipe` makes its command line.

        `order_for` makes the launch order from a port and a key. `env` is the environment of the
        process. The port is one of `port_range`. `start_seconds` is the time limit of each start.
        """
        super().__init__(spec)
        self.recipe = recipe
        self.state, self.past = ServerState.IDLE, [ServerState.IDLE]
        self.order: LaunchOrder | None = None  # the order of the latest start
        self.request_fields: RequestFields = {}  # as `Recipe.request_fields` returned them
        self._order_for, self._env = order_for, env
        self._port_range, self._start_seconds = port_range, start_seconds
        self._child: Child | None = None
        self._line: socket.socket | None = None  # when it closes, the guard ends the server
        self._port: Port | None = None
        self._known_listeners: frozenset[Listener] = frozenset()  # sockets of its own processes
        self._started_in = 0.0  # seconds that its last start took

    # -- its properties

    @property
    def pids(self) -> tuple[int, ...]:
        """The guard, then all descendants of the guard."""
        child = self._child
        if child is None or self.state is ServerState.IDLE:
            return ()
        return (child.pid, *descendants(child.pid))

    @property
    def base_url(self) -> str:
        """The prefix of /chat/completions, with host and port; empty before the first start."""
        if self.order is None:
            return ""
        return f"http://127.0.0.1:{self.order.port}/v1"

    @property
    def model(self) -> str:
        """The name of the model in requests. The server must have been started."""
        return self.recipe.model(self.launch_order())

    @property
    def headers(self) -> dict[str, str]:
        """The headers that a request must carry. Send them only while `listens` is true."""
        if self.order is None or not self.recipe.KEYED:
            return {}
        return {"Authorization": f"Bearer {self.order.key}"}

    @property
    def starting(self) -> bool:
        """Whether the server is at its first start or at a restart. Each has a time-out."""
        return self._wanted and self.error is None and self.state is not ServerState.READY

    def healthy(self) -> bool:
        """Whether the server is ready and answers its health check now."""
        return self.state is ServerState.READY and self._answers_health_check()

    def listens(self) -> bool:
        """Whether the server's own processes, and no others, listen on its port now."""
        if self.order is None or self.state in (ServerState.IDLE, ServerState.STOPPING):
            return False
        found = listeners(self.order.port)
        if not found <= self._known_listeners:
            own = socket_inodes(self.pids)
            if not all(listener.inode in own for listener in found):
                return False
            self._known_listeners = found
        return bool(found)

    def launch_order(self) -> LaunchOrder:
        """The order of the latest start. The server must have been started."""
        assert self.order is not None
        return self.order

    def _enter(self, state: ServerState) -> None:
        assert state in NEXT_STATES[self.state], f"{self.state} -> {state}"
        self.state = state
        self.past.append(state)

    # -- start and stop

    def start(self) -> None:
        """Starts the server, and waits until it is ready and its model is on the ordered devices.

        If the model is on other devices, the server is started again, up to MOST_RESTARTS times.
        Raises LoadFailed, and the device's out-of-memory error. After any failure, an interrupt
        included, the caller calls `end`.
        """
        self._start_on_free_port()
        while why := self.recipe.misplaced(self.launch_order(), self._sender(ANSWER_SECONDS)):
            self._stop()
            if self.restarts >= MOST_RESTARTS:
                raise LoadFailed(
                    f"{self.spec.name} was started {self.restarts + 1} times, and each time {why}.\n"
                    f"  Its log:  {self.log}",
                    name=self.spec.name,
                    source=self.spec.source,
                    why=why,
                )
            self.restarts += 1
            self._start_on_free_port()
        threads.start(self._supervise)

    def _start_on_free_port(self) -> None:
        """Starts the server on a free port, and waits until it is ready."""
        tried: set[int] = set()
        while True:
            port = claim(self._port_range, self.spec.name, frozenset(tried))
            try:
                self._launch(port)
                self._wait_until_ready()
                return
            except BaseException as error:
                output = self._child.tail().lower() if self._child else ""
                port_taken = (
                    of_another_user(port.number) is not None
                    # The port may also be in use for a minute by connections of an earlier engine.
                    or getattr(error, "errno", None) == errno.EADDRINUSE
                    or "address already in use" in output
                    or "errno 98" in output
                )
                self._stop()
                tried.add(port.number)
                may_try_again = isinstance(error, (LoadFailed, OSError)) and len(tried) < MOST_PORTS
                if not port_taken or not may_try_again:
                    raise

    def _launch(self, port: Port) -> None:
        """Starts the guard process, which starts the engine.

        Both inherit the file whose lock reserves the `port`, which stays reserved while they run.
        """
        with self._changed:
            self._enter(ServerState.LOADING)
            self._port = port
            self._known_listeners = frozenset()
            self.order = self._order_for(port.number, secrets.token_urlsafe(16))
            fds = [port.fileno()]
            if self.recipe.INHERITS_SOCKET:
                self.order = self.order._replace(socket_fd=port.bind())
                fds.append(self.order.socket_fd)
            command = self.recipe.command(self.order)
            environment = {**self._env, **command.environment}
            self._child, self._line = guarded(command.words, self.log, environment, fds)
            self._pid = self._child.pid
            port.release_socket()

    def _wait_until_ready(self) -> None:
        """Polls the health check until it succeeds, then calls `prepare` of the recipe.

        Raises LoadFailed or the device's out-of-memory error if the server ends, if it takes too
        long, if another user listens on its port, or if `prepare` fails.
        """
        child = self._child
        assert child is not None
        began = self._clock()
        until = began + self._start_seconds
        while not self._answers_health_check():
            why = ""
            if not self._wanted or child.ended:
                why = in_words(child.end())
            elif (other := of_another_user(self.launch_order().port)) is not None:
                why = f"a process of uid {other} listens on its port"
            elif self._clock() >= until:
                why = f"it did not answer within {self._start_seconds:g} s"
            if why:
                raise self._load_error(why, child.tail())
            self._sleep(POLL_SECONDS)
        order, send = self.launch_order(), self._sender(LOAD_ANSWER_SECONDS)
        self.recipe.prepare(order, send)
        self.request_fields = self.recipe.request_fields(order, send)
        self._started_in = self._clock() - began
        with self._changed:
            self._enter(ServerState.READY)

    def _stop(self) -> None:
        """Ends the server and all its child processes, by the guard; else kills the whole group."""
        with self._changed:
            if self.state in (ServerState.IDLE, ServerState.STOPPING):
                return
            self._enter(ServerState.STOPPING)
            child, line, port = self._child, self._line, self._port
        if line is not None:
            line.close()
        if child is not None:
            child.wait(STOP_SECONDS + 1.0)
            child.end()
        if port is not None:
            port.close()
        with self._changed:
            self._line = self._port = None
            self._enter(ServerState.IDLE)

    def end(self) -> None:
        self._wanted = False
        self._stop()

    # -- after the start

    def _wait_for_end(self) -> tuple[int, str] | None:
        child = self._child
        if child is None or not self._wanted:
            return None
        child.wait()
        if not self._wanted:
            return None
        ended = child.end(), child.tail()
        self._stop()
        return ended

    def _start_again(self) -> None:
        self._start_on_free_port()

    # -- sleep

    def sleep_or_wake(self, verb: str) -> str:
        """As `Engine.sleep_or_wake`. It has as much time as its last start took, at least LEAST_CHANGE_SECONDS."""
        until = time.monotonic() + max(engine.LEAST_CHANGE_SECONDS, self._started_in)

        def send(*request: Any) -> tuple[int, Any]:
            return self._sender(max(POLL_SECONDS, until - time.monotonic()))(*request)

        change = StateChange(self.launch_order(), send, partial(self._run, until), until)
        return self.recipe.sleep(change) if verb == "sleep" else self.recipe.wake(change)

    def _run(self, until: float, words: tuple[str, ...]) -> int | None:
        """Runs the command `words`, which ends with this process, and writes to the server's log.

        Returns its exit status; None if it has not ended at `until` (monotonic seconds).
        """
        environment = {**self._env, "GPU_ENGINE_KEY": self.launch_order().key}
        child, line = guarded(words, self.log, environment, ())
        try:
            return child.end() if child.wait(max(0.0, until - time.monotonic())) else None
        finally:
            line.close()
            child.wait(STOP_SECONDS)
            child.end()

    def _answers_health_check(self) -> bool:
        send = self._sender(ANSWER_SECONDS, keyed=False)
        status, _ = send("GET", self.recipe.health_path(self.spec), None)
        return status == READY_STATUS

    def _sender(self, seconds: float, keyed: bool = True) -> SendRequest:
        """A function that sends one request to the server's port, with a time-out of `seconds`.

        It sends nothing, and no key, to a process that is not the server's own.
        """
        order = self.launch_order()

        def send(method: str, path: str, body: Any) -> tuple[int, Any]:
            connection = http.client.HTTPConnection("127.0.0.1", order.port, timeout=seconds)
            data = None if body is None else json.dumps(body)
            try:
                # Check the listener after the connection exists. Before that, it could change.
                connection.connect()
                if not self.listens():
                    return 0, None
                headers = {"Content-Type": "application/json", **(self.headers if keyed else {})}
                connection.request(method, path, data, headers)
                answer = connection.getresponse()
                return answer.status, _json_or_text(answer.read())
            except (OSError, ValueError, http.client.HTTPException):
                return 0, None  # no server there yet, or its answer is not HTTP
            finally:
                connection.close()

        return send


def _json_or_text(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:  # not JSON: an error page, for example
        return data.decode("utf-8", "replace")


# -- ports for engine servers
#
# Each server claims a port from a range. Its claim ends with the server.
#
# A claim is a lock on a file in a directory that only this user can enter, so no other user can hold
# the claim. A guard process starts each engine. The guard inherits the open file, so the lock lasts
# as long as the engine. Engines of two users may choose the same port at the same moment. One of
# these engines then cannot listen on the port, and is started again on the next port.


class Port:
    """A claimed port."""

    def __init__(self, number: int, claim: IO[bytes]) -> None:
        """The port `number`, held by the lock on the file `claim`."""
        self.number, self._claim = number, claim
        self._bound: socket.socket | None = None

    def fileno(self) -> int:
        """The descriptor of the locked file. A child process that inherits it keeps the lock."""
        return self._claim.fileno()

    def bind(self) -> int:
        """The descriptor of a socket bound to the port, which the engine can inherit and listen on.

        No other process can listen on the port any more. Raises OSError if the port is in use.
        """
        # SO_REUSEADDR is not set. If two processes set it, both could bind the port, and the other
        # process could listen first.
        self._bound = socket.socket()
        self._bound.bind(("127.0.0.1", self.number))
        return self._bound.fileno()

    def release_socket(self) -> None:
        """Closes this process's copy of the bound socket, once the engine has inherited it."""
        if self._bound is not None:
            self._bound.close()
            self._bound = None

    def close(self) -> None:
        """Releases this process's claim. A child that inherited the claim still holds the port."""
        self.release_socket()
        self._claim.close()


def ports(text: str) -> range:
    """The range of ports that the setting `text` names. Raises BadSetting.

    >>> ports("8300-8302")
    range(8300, 8303)
    """
    first, _, last = text.replace(" ", "").partition("-")
    numbers = [int(word) for word in (first, last or first) if word.isdigit()]
    if len(numbers) != 2 or not 1024 <= numbers[0] <= numbers[1] <= 65535:
        expected = "a range of ports from 1024 to 65535, such as 8300-8399"
        raise BadSetting("GPU_ENGINE_PORTS", text, expected)
    return range(numbers[0], numbers[1] + 1)


def claim(among: range, name: str, but: frozenset[int] = frozenset()) -> Port:
    """The first port of `among` that no engine of this user has claimed and no process listens on.

    Ports in `but` are skipped. `name` is the model, for error messages. Raises LoadFailed if no
    port is left, or if other users can change the directory of the claims.
    """
    directory = _claims_directory(name)
    for number in among:
        if number in but:
            continue
        held = _lock(directory / f"{number}.lock")
        if held is None:
            continue
        if not _listened_on(number):
            return Port(number, held)
        held.close()
    raise LoadFailed(
        f"{name} cannot be started: all ports from {among.start} to {among.stop - 1} are taken.\n"
        f"  Give engines more:  GPU_ENGINE_PORTS={among.start}-{among.stop + 99}",
        name=name,
        source="",
    )


def _claims_directory(name: str) -> Path:
    """The directory of the claims, made with mode 0700. Raises LoadFailed as `claim` does."""
    directory = local_state() / "ports"
    try:
        make_directory(directory)
        weak = weak_step(directory)
    except OSError as error:
        weak = f"{directory} cannot be made ({error.strerror})"
    if weak:
        raise LoadFailed(
            f"{name} cannot be started: ports are claimed in {directory}, and {weak}.\n"
            f"  Name another directory:  XDG_STATE_HOME=DIR",
            name=name,
            source="",
        )
    return directory


def _lock(path: Path) -> IO[bytes] | None:
    """The open file `path` with a lock on it, or None if it is locked already."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    file = open(os.open(path, flags, 0o600), "r+b", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # another process has this port
        file.close()
        return None
    return file


def _listened_on(number: int) -> bool:
    """Whether a process uses the port `number`, with or without a claim."""
    with socket.socket() as trial:
        # Without this option, a port seems to be in use while an old connection of it is closing.
        # Servers set the option too.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", number))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return True
    return False


# -- the backend


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
        place = (
            f"at {self._engine.base_url} on {self._where}"
            if self._engine
            else f"on {self._where or 'disk'}"
        )
        return f"<{self.name} {place}>"

    @property
    def base_url(self) -> str:
        """The prefix of /chat/completions. Raises NotResident, EngineDied."""
        return self._listening_server().base_url

    @property
    def model(self) -> str:
        """The name of the model in requests. Raises NotResident, EngineDied."""
        return self._running_server().model

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
        server = self._running_server()
        if server.listens():
            return server
        why = "no process of the server listens on its port"
        text = f"the server of {self.name} cannot be reached: {why}."
        raise server.died(Kind.CRASH, text, why, pid=next(iter(server.pids), None))

    def ready_server(self) -> Server | None:
        """The server; None while it restarts. Raises NotResident, EngineDied.

        Its attributes `base_url` and `headers` are not checked. The caller calls `listens` for each
        new connection, before anything is sent.
        """
        if self.starting:
            return None
        server = self._loaded_engine("Use it inside:  with rt.use({!r}) as served:")
        server.require()
        return server

    def _running_server(self) -> Server:
        while (server := self.ready_server()) is None:
            time.sleep(POLL_SECONDS)
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

    @property
    def can_move(self) -> bool:  # type: ignore[override]
        """Whether servers of this engine sleep. A move is the way to sleep and back, nothing else."""
        return self.recipe.sleeps(self.probe.devices[0].id)

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """As `Recipe.evidence`. `origin` is ignored."""
        return self.recipe.evidence(spec)

    def _prepared(
        self, spec: ModelSpec, shares: Shares, report: Progress
    ) -> tuple[Server, Callable[[Served], Shares]]:
        missing = self.recipe.missing() or spec.options.get("refused", "")
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

    def _bytes_asleep(self, spec: ModelSpec, handle: ServerHandle) -> int:
        """The bytes of its weights, which a sleeping server has in host memory."""
        found = self.evidence(spec)
        return found.weight_bytes or found.file_bytes or sum(share.bytes for share in handle.total)

    def _measured_asleep(self, model: ServerHandle) -> int:
        """The RAM of the server's processes, if its recipe says that it counts."""
        if not self.recipe.MEASURED_ASLEEP:
            return 0
        sizes = []
        for pid in model.pids[1:]:  # the first is that of the guard
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                sizes.append(psutil.Process(pid).memory_info().rss)
        return sum(sizes)

    def _server(self, spec: ModelSpec, shares: Shares) -> Server:
        """A server for `spec`, not started yet. It sees only the cards of `shares` that it uses."""
        config = self.evidence(spec).config
        source = self.recipe.source(spec)
        totals = {device.id: device.total_bytes for device in self.probe.devices}
        simulated = self.probe.place(shares[0].device).simulated

        def order_for(port: int, key: str) -> LaunchOrder:
            return LaunchOrder(spec, shares, totals, source, port, simulated, key, config)

        on_cpu = spec.options.get("gpu_layers") == 0
        by_number = self.recipe.CARDS_BY_NUMBER
        cards = card_environment(self.probe, () if on_cpu else shares, by_number=by_number)
        return Server(
            spec,
            self.recipe,
            order_for,
            {**os.environ, **cards},
            port_range=self._port_range,
            start_seconds=spec.options.get("start_seconds", self._start_seconds),
        )
