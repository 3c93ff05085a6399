"""One server of an engine: its process, states, port, key, health and restarts.

    IDLE → LOADING → READY → STOPPING → IDLE

A server has no other states; a failed load is also followed by STOPPING. A server that ends by
itself is restarted on the same cards, at most three times. If the server then ends again, its model
is lost. The recipe of each engine defines how the server is started.
"""

from __future__ import annotations

import enum
import errno
import http.client
import json
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from ... import threads
from ...errors import LoadFailed
from ...facts import ModelSpec
from ...tcp_sockets import Listener, listeners, of_another_user, socket_inodes
from ..processes.engine import RestartedEngine
from ..processes.orphan_guard import descendants
from ..processes.processes import MOST_RESTARTS, STOP_SECONDS, Child, guarded, in_words
from .ports import Port, claim
from .recipe import LaunchOrder, Recipe, RequestFields, SendRequest

MOST_PORTS = 5  # tried for one start, since a process without a claim may take a port
POLL_SECONDS = 0.05
ANSWER_SECONDS = 2.0
READY_STATUS = 200  # of the health check
LOAD_ANSWER_SECONDS = 3600.0  # time-out of the request that loads the model


class ServerState(enum.StrEnum):
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
        return f"http://127.0.0.1:{self.order.port}{self.recipe.BASE}"

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
        until = self._clock() + self._start_seconds
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

    def _answers_health_check(self) -> bool:
        status, _ = self._sender(ANSWER_SECONDS)("GET", self.recipe.health_path(), None)
        return status == READY_STATUS

    def _sender(self, seconds: float) -> SendRequest:
        """A function that sends one request to the server's port, with a time-out of `seconds`.

        It sends nothing to a process that is not the server's own, and never the key.
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
                connection.request(method, path, data, {"Content-Type": "application/json"})
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
