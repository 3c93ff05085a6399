"""One server of an engine: its process, its states, its port and key, its health and its restarts.

    IDLE → LOADING → READY → STOPPING → IDLE

and no other states; what fails to load stops as well. A server that ends by itself is started again on the same cards,
at most three times; then its model is lost. How each engine is started is its recipe's to say (engines/).
"""

from __future__ import annotations

import enum
import json
import os
import secrets
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import threads
from ...devices.process_memory import out_of_memory
from ...errors import EngineDied, GpuError, LoadFailed
from ...facts import ModelSpec
from ..fault_texts import Kind, recognise
from ..processes import orphan_guard
from ..processes.orphan_guard import descendants
from ..processes.processes import Child, in_words, new_log, python_file
from .ports import Port, claim
from .recipe import Ask, Order, Recipe

MOST_RESTARTS = 3
MOST_PORTS = 5  # tried where somebody who claims none is faster
STOP_SECONDS = 5.0  # for an orderly end
POLL_SECONDS = 0.05
ANSWER_SECONDS = 2.0
LOAD_ANSWER_SECONDS = 3600.0  # where an answer means that a model was loaded
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by way of a proxy


class State(enum.StrEnum):
    """What a server is doing."""

    IDLE = "idle"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


NEXT = {
    State.IDLE: {State.LOADING},
    State.LOADING: {State.READY, State.STOPPING},
    State.READY: {State.STOPPING},
    State.STOPPING: {State.IDLE},
}


class Server:
    """One engine's process, from one load to its end; restarts included."""

    def __init__(
        self,
        spec: ModelSpec,
        recipe: Recipe,
        order: Callable[[int, str], Order],
        env: dict[str, str],
        *,
        among: range,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.spec, self.recipe = spec, recipe
        self.state, self.past = State.IDLE, [State.IDLE]
        self.restarts = 0
        self.log = new_log(spec.name)
        self.order: Order | None = None
        self._order_for, self._env, self._among, self._seconds = order, env, among, seconds
        self._clock, self._sleep = clock, sleep
        self._child: Child | None = None
        self._line: socket.socket | None = None
        self._port: Port | None = None
        self._over: GpuError | None = None
        self._wanted = True
        self._lost: Callable[[str, str], None] | None = None
        self._told = False
        self._lock = threading.RLock()

    # -- what it is

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes: its guard, and all that descends from it."""
        child = self._child
        if child is None or self.state is State.IDLE:
            return ()
        return (child.pid, *descendants(child.pid))

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.order.port}{self.recipe.BASE}" if self.order else ""

    @property
    def headers(self) -> dict[str, str]:
        return (
            {"Authorization": f"Bearer {self.order.key}"}
            if self.order and self.recipe.KEYED
            else {}
        )

    @property
    def starting(self) -> bool:
        """Whether it is being started again; each start has its time-out, and there are at most three."""
        return self._wanted and self._over is None and self.state is not State.READY

    def healthy(self) -> bool:
        return (
            self.state is State.READY
            and self._ask(ANSWER_SECONDS)("GET", self.recipe.HEALTH, None)[0] == 200
        )

    def _to(self, state: State) -> None:
        assert state in NEXT[self.state], f"{self.state} -> {state}"
        self.state = state
        self.past.append(state)

    # -- its life

    def start(self) -> None:
        """Starts it, and waits until it is ready and its model lies where it should.

        Raises LoadFailed, and the device's out-of-memory error. On any failure, an interrupt too, nothing of it stays.
        """
        self._start_on_a_port()
        while why := self.recipe.misplaced(self._known(), self._ask(ANSWER_SECONDS)):
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
            self._start_on_a_port()
        threads.start(self._keep)

    def _start_on_a_port(self) -> None:
        tried: set[int] = set()
        while True:
            port = claim(self._among, self.spec.name, frozenset(tried))
            try:
                self._start(port)
                return
            except BaseException as error:
                said = self._child.tail() if self._child else ""
                self._stop()
                tried.add(port.number)
                taken = "address already in use" in said.lower() or "errno 98" in said.lower()
                if not taken or len(tried) >= MOST_PORTS or not isinstance(error, LoadFailed):
                    raise

    def _start(self, port: Port) -> None:
        with self._lock:
            self._to(State.LOADING)
            self._port = port
            self.order = self._order_for(port.number, secrets.token_urlsafe(16))
            command = self.recipe.command(self.order)
            self._line, theirs = socket.socketpair()
            with theirs:
                words = [
                    *python_file(Path(orphan_guard.__file__)),
                    str(theirs.fileno()),
                    str(os.getpid()),
                    str(STOP_SECONDS),
                    *command.words,
                ]
                self._child = Child(
                    words,
                    log=self.log,
                    env={**self._env, **command.environment},
                    fds=(theirs.fileno(), port.fileno()),
                )
        until = self._clock() + self._seconds
        ask = self._ask(ANSWER_SECONDS)
        while ask("GET", self.recipe.HEALTH, None)[0] != 200:
            if not self._wanted or self._child.ended:
                raise self._failed(f"{in_words(self._child.end())}")
            if self._clock() >= until:
                raise self._failed(f"it did not answer within {self._seconds:g} s")
            self._sleep(POLL_SECONDS)
        self.recipe.prepare(self.order, self._ask(LOAD_ANSWER_SECONDS))
        with self._lock:
            self._to(State.READY)

    def _failed(self, why: str) -> GpuError:
        said = self._child.tail() if self._child else ""
        fault = recognise(said)
        if fault is not None and fault.kind is Kind.OUT_OF_MEMORY:
            return out_of_memory(fault.line, device="", asked_bytes=0, holders=(), report="")
        last = [line.strip() for line in said.splitlines() if line.strip()]
        tells = fault.line if fault else last[-1][:300] if last else ""
        return LoadFailed(
            f"{self.spec.name} could not be loaded: {why}{f': {tells}' if tells else ''}.\n"
            f"  Its log:  {self.log}",
            name=self.spec.name,
            source=self.spec.source,
            why=why,
            kind=fault.kind.value if fault else "",
            log=str(self.log),
        )

    def _stop(self) -> None:
        """Ends the process and all it started: its guard does, or the whole group is killed."""
        with self._lock:
            if self.state in (State.IDLE, State.STOPPING):
                return
            self._to(State.STOPPING)
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
            self._to(State.IDLE)

    def _keep(self) -> None:
        """Starts it again when it ends by itself, as often as that may be. Runs in a thread of its own."""
        while self._wanted:
            child = self._child
            if child is None:
                return
            child.wait()
            if not self._wanted:
                return
            status = child.end()
            said = child.tail()
            self._stop()
            fault = recognise(said)
            why = in_words(status) + (f": {fault.line}" if fault else "")
            kind = fault.kind if fault else Kind.CRASH
            if self.restarts >= MOST_RESTARTS:
                return self._give_up(kind, why, status)
            self.restarts += 1
            try:
                self._start_on_a_port()
            except Exception as error:  # noqa: BLE001 - told to whoever uses it next
                return self._give_up(
                    kind, f"{why}; started again, {str(error).splitlines()[0]}", status
                )

    def _give_up(self, kind: Kind, why: str, status: int) -> None:
        name, pid = self.spec.name, self._child.pid if self._child else None
        self._over = EngineDied(
            f"the server of {name} is gone: {why.rstrip('.')}.\n"
            f"  It was started again {self.restarts} times. Its memory came free; the next use of {name} loads it anew."
            f"\n  Its log:  {self.log}",
            name=name,
            pid=pid,
            status=status,
            kind=kind.value,
            why=why,
            log=str(self.log),
        )
        self._tell_loss()

    def watch(self, lost: Callable[[str, str], None]) -> None:
        """Has `lost(kind, because)` called once, if it ends for good; at once, if it has already."""
        self._lost = lost
        self._tell_loss()

    def _tell_loss(self) -> None:
        with self._lock:
            if self._over is None or self._lost is None or self._told or not self._wanted:
                return
            self._told = True
        self._lost(self._over.facts["kind"], str(self._over).splitlines()[0])

    def end(self) -> None:
        """Ends it, and all it started. Twice is once."""
        self._wanted = False
        self._stop()

    def _known(self) -> Order:
        assert self.order is not None
        return self.order

    def _ask(self, seconds: float) -> Ask:
        order, headers = self._known(), {"Content-Type": "application/json", **self.headers}

        def ask(method: str, path: str, body: Any) -> tuple[int, Any]:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{order.port}{path}", data, headers, method=method
            )
            try:
                with _direct.open(request, timeout=seconds) as answer:
                    return answer.status, _read(answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, _read(error.read())
            except (OSError, ValueError):  # nobody there yet, or not in HTTP
                return 0, None

        return ask


def _read(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode("utf-8", "replace")
