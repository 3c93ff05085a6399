"""One server of an engine: its process, states, port, key, health and restarts.

    IDLE → LOADING → READY → STOPPING → IDLE

There are no other states; a failed load is followed by STOPPING too. A server that ends by itself
is restarted on the same cards, at most three times. After that its model is lost. The recipe of
each engine defines how it is started.
"""

from __future__ import annotations

import enum
import errno
import http.client
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import threads
from ...devices.process_memory import out_of_memory
from ...engine_logs import new_log
from ...errors import EngineDied, GpuError, LoadFailed
from ...facts import ModelSpec
from ...tcp_sockets import Listener, listeners, of_another_user, socket_inodes
from ..fault_texts import Kind, last_line, recognise
from ..processes import orphan_guard
from ..processes.orphan_guard import descendants
from ..processes.processes import MOST_RESTARTS, Child, in_words, python_file
from .ports import Port, claim
from .recipe import LaunchOrder, Recipe, SendRequest

MOST_PORTS = 5  # tried, if a process that makes no claims keeps taking the port first
STOP_SECONDS = 3.0  # for an orderly end
POLL_SECONDS = 0.05
ANSWER_SECONDS = 2.0
READY_STATUS = 200  # of the health check
LOAD_ANSWER_SECONDS = 3600.0  # limit of a request that is answered after the model was loaded


class ServerState(enum.StrEnum):
    """What a server is doing."""

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


class Server:
    """The process of one engine, from its first start to its end, restarts included."""

    def __init__(
        self,
        spec: ModelSpec,
        recipe: Recipe,
        order_for: Callable[[int, str], LaunchOrder],
        env: dict[str, str],
        *,
        port_range: range,
        start_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """A server for `spec`. The method `start` starts it as its `recipe` describes.

        `order_for` makes the launch order from a port and a key. `env` is the environment of the
        process. The port is one of `port_range`. Each start may take `start_seconds`. Tests replace
        the monotonic `clock` and `sleep`.
        """
        self.spec, self.recipe = spec, recipe
        self.state, self.past = ServerState.IDLE, [ServerState.IDLE]
        self.restarts = 0
        self.log = new_log(spec.name)
        self.order: LaunchOrder | None = None  # the order of the latest start
        self.error: GpuError | None = None  # why the server has ended and is not restarted
        self._order_for, self._env = order_for, env
        self._port_range, self._start_seconds = port_range, start_seconds
        self._clock, self._sleep = clock, sleep
        self._child: Child | None = None
        self._line: socket.socket | None = None  # its guard ends the server when this closes
        self._port: Port | None = None
        self._known_listeners: frozenset[Listener] = frozenset()  # sockets of its own processes
        self._wanted = True  # False: it was ended on purpose
        self._on_loss: Callable[[str, str], None] | None = None
        self._loss_reported = False
        self._lock = threading.RLock()

    # -- its properties

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the server's processes: its guard, then all descendants of the guard."""
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
        """Whether the server is starting or being restarted. Each start has a time-out."""
        return self._wanted and self.error is None and self.state is not ServerState.READY

    def healthy(self) -> bool:
        """Whether the server is ready and answers its health check now."""
        if self.state is not ServerState.READY:
            return False
        return self._answers_health_check()

    def listens(self) -> bool:
        """Whether its port reaches its own processes, and not a process that took the port from it."""
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
        """The launch order of the latest start. Call this only for a server that was started."""
        assert self.order is not None
        return self.order

    def _enter(self, state: ServerState) -> None:
        assert state in NEXT_STATES[self.state], f"{self.state} -> {state}"
        self.state = state
        self.past.append(state)

    # -- start and stop

    def start(self) -> None:
        """Starts the server, and waits until it is ready and its model is on the ordered devices.

        Raises LoadFailed, and the device's out-of-memory error. After any failure, an interrupt
        included, no process and no port stays in use.
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
        """Starts the server. If another process took the port first, another port is tried."""
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
                    # Connections of an earlier engine also keep a port in use, for a minute.
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
        """Starts the guard, which starts the engine. Both inherit the claim of the port."""
        with self._lock:
            self._enter(ServerState.LOADING)
            self._port = port
            self._known_listeners = frozenset()
            self.order = self._order_for(port.number, secrets.token_urlsafe(16))
            fds = [port.fileno()]
            if self.recipe.INHERITS_SOCKET:
                self.order = self.order._replace(socket_fd=port.bind())
                fds.append(self.order.socket_fd)
            command = self.recipe.command(self.order)
            self._line, guard_end = socket.socketpair()
            with guard_end:
                guard = python_file(Path(orphan_guard.__file__))
                arguments = [str(guard_end.fileno()), str(os.getpid()), str(STOP_SECONDS)]
                self._child = Child(
                    [*guard, *arguments, *command.words],
                    log=self.log,
                    env={**self._env, **command.environment},
                    fds=(guard_end.fileno(), *fds),
                )
            port.release_socket()

    def _wait_until_ready(self) -> None:
        """Polls the health check, then prepares the model. Raises the error of a failed load."""
        assert self._child is not None
        until = self._clock() + self._start_seconds
        while not self._answers_health_check():
            if not self._wanted or self._child.ended:
                raise self._load_error(in_words(self._child.end()))
            other = of_another_user(self.launch_order().port)
            if other is not None:
                raise self._load_error(f"a process of uid {other} listens on its port")
            if self._clock() >= until:
                raise self._load_error(f"it did not answer within {self._start_seconds:g} s")
            self._sleep(POLL_SECONDS)
        self.recipe.prepare(self.launch_order(), self._sender(LOAD_ANSWER_SECONDS))
        with self._lock:
            self._enter(ServerState.READY)

    def _load_error(self, why: str) -> GpuError:
        """The error for a failed load, with the line of the server's log that explains it."""
        output = self._child.tail() if self._child else ""
        fault = recognise(output)
        if fault is not None and fault.kind is Kind.OUT_OF_MEMORY:
            return out_of_memory(fault.line, device="", asked_bytes=0, holders=(), report="")
        explanation = fault.line if fault else last_line(output)
        detail = f": {explanation}" if explanation else ""
        return LoadFailed(
            f"{self.spec.name} could not be loaded: {why}{detail}.\n  Its log:  {self.log}",
            name=self.spec.name,
            source=self.spec.source,
            why=why,
            kind=fault.kind.value if fault else "",
            log=str(self.log),
        )

    def _stop(self) -> None:
        """Ends the server and all its child processes.

        The guard ends them. If the guard does not, the whole process group is killed.
        """
        with self._lock:
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
        with self._lock:
            self._line = self._port = None
            self._enter(ServerState.IDLE)

    def end(self) -> None:
        """Ends the server and all processes that it started. Repeating is safe."""
        self._wanted = False
        self._stop()

    # -- after the start

    def _supervise(self) -> None:
        """Restarts the server when it ends by itself, at most MOST_RESTARTS times.

        This runs in a separate thread.
        """
        while self._wanted:
            child = self._child
            if child is None:
                return
            child.wait()
            if not self._wanted:
                return
            status = child.end()
            output = child.tail()
            self._stop()
            fault = recognise(output)
            kind = fault.kind if fault else Kind.CRASH
            why = in_words(status)
            if fault:
                why = f"{why}: {fault.line}"
            if self.restarts >= MOST_RESTARTS:
                return self._give_up(kind, why, status)
            self.restarts += 1
            try:
                self._start_on_free_port()
            except Exception as error:  # noqa: BLE001 - the next call raises it
                first_line = str(error).splitlines()[0]
                return self._give_up(kind, f"{why}; the restart failed: {first_line}", status)

    def _give_up(self, kind: Kind, why: str, status: int) -> None:
        """Records that the server will not be restarted again, and reports the loss."""
        name = self.spec.name
        times = "once" if self.restarts == 1 else f"{self.restarts} times"
        self.error = EngineDied(
            f"the server of {name} is gone: {why.rstrip('.')}.\n"
            f"  It was restarted {times}. Its memory is free; the next use of {name} loads it again.\n"
            f"  Its log:  {self.log}",
            name=name,
            pid=self._child.pid if self._child else None,
            status=status,
            kind=kind.value,
            why=why,
            log=str(self.log),
        )
        self._report_loss()

    def watch(self, on_loss: Callable[[str, str], None]) -> None:
        """Calls `on_loss(kind, because)` once if the server ends for good; at once if it already
        has.
        """
        self._on_loss = on_loss
        self._report_loss()

    def _report_loss(self) -> None:
        with self._lock:
            if self.error is None or self._on_loss is None:
                return
            if self._loss_reported or not self._wanted:
                return
            self._loss_reported = True
        self._on_loss(self.error.facts["kind"], str(self.error).splitlines()[0])

    def _answers_health_check(self) -> bool:
        status, _ = self._sender(ANSWER_SECONDS)("GET", self.recipe.health_path(), None)
        return status == READY_STATUS

    def _sender(self, seconds: float) -> SendRequest:
        """A function that sends one request to the current port, with a time-out of `seconds`.

        It sends nothing to a process that is not the server's own. It sends the key to no process,
        because no recipe needs the key.
        """
        order = self.launch_order()

        def send(method: str, path: str, body: Any) -> tuple[int, Any]:
            """Sends one request to the server. Returns status (0: no answer) and JSON."""
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
