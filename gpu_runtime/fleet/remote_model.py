"""A model on another host, as a client uses it. Calls of the model are sent to the agent of its host."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ..backends.processes import remote_calls
from ..errors import EngineDied, NodeLost
from . import cluster
from .hosts import on

log = logging.getLogger("gpu_runtime")
PING_SECONDS = 1.0
MOST_HOSTS = 4  # that may be lost under one call: a call that kills its host must not kill all
# The most calls of a block that run again on another host, and the most bytes of their arguments.
MOST_CALLS, MOST_BYTES = 1000, 256 << 20


class _Made(NamedTuple):
    """A call, as it is sent."""

    path: tuple[str, ...]
    given: remote_calls.Packed  # the arguments


class RemoteModel:
    """The model of a `with fleet.use(…)` block. An attribute of this object is an attribute of the model on its host.

    `model.generate(**words)` runs on the model's host. Tensors are sent to the model's device, and results come back in
    host memory.
    """

    def __init__(self, use: FleetUse) -> None:
        self._use = use

    @property
    def host(self) -> str:
        """The name of the host that runs the model now."""
        return self._use.host

    def __getattr__(self, name: str) -> _Path:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Path(self._use, (name,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._use.call((), args, kwargs)

    def __repr__(self) -> str:
        return f"<{self._use.name} on {self.host}>"


class _Path:
    """An attribute of a model on another host. If this object is called, the call runs on that host."""

    def __init__(self, use: FleetUse, path: tuple[str, ...]) -> None:
        self._use, self._path = use, path

    def __getattr__(self, name: str) -> _Path:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Path(self._use, (*self._path, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._use.call(self._path, args, kwargs)

    def __repr__(self) -> str:
        return f"<{'.'.join(self._path)} of {self._use.name} on {self._use.host}>"


class FleetUse:
    """`with fleet.use("qwen") as model:` — the model on one of the hosts, pinned while the block runs.

    The arguments are those of `Fleet.use`, and the `fleet` itself.
    """

    def __init__(
        self, fleet: Any, name: str, timeout: float | None, importance: Any, retry: bool
    ) -> None:
        self._fleet, self.name, self._retry = fleet, name, retry
        self._timeout, self._importance = timeout, importance
        self.host = ""
        self._hold = ""
        self._agent: Any = None
        self._made: list[_Made] = []  # with `retry`, the calls of the block that were answered
        self._made_bytes = 0
        self._copy = 0  # the number of the model's copy that the block uses now, from 0
        self._moving = threading.RLock()  # held while the model is obtained on another host

    def __enter__(self) -> RemoteModel:
        self._obtain()
        return RemoteModel(self)

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _obtain(self) -> None:
        # The client makes the id, so that it can withdraw a request that is interrupted.
        self._hold = secrets.token_hex(8)
        try:
            self.host, self._agent = self._fleet._obtain(
                self._hold, self.name, self._timeout, self._importance
            )
        except BaseException:
            self._fleet._withdraw(self._hold)
            raise

    def _leave(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            on(agent, "leave", "verbs", self._hold)

    def serve(self, begin: Callable[[Any, str], Any]) -> Any:
        """The result of `begin` on the host of the model; see `HostAgent.serve`. Raises the same errors as `call`."""
        return self._on_a_living_host(lambda: on(self._agent, "serve", "verbs", begin))

    def withdraw(self) -> None:
        """Ends the use, or the wait for a host. Any thread may call this method."""
        self._fleet._withdraw(self._hold)

    def call(self, path: tuple[str, ...], args: Any, kwargs: Any) -> Any:
        """The result of a call on the model.

        Raises the error of the call, EngineDied if the model's process died, and NodeLost if the host died. With
        `retry`, the model is then used again on another host or in a new process, and the calls of the `with` block run
        again there.
        """
        # Only the model's process and this process unpack values. A call that may run again has
        # copies of its arrays, because the caller may change them.
        dumps = cluster.ray().cloudpickle.dumps
        made = _Made(path, remote_calls.pack((args, kwargs), dumps=dumps, share=not self._retry))
        found = self._on_a_living_host(lambda: self._send(made))
        if self._retry:
            self._made.append(made)
            self._made_bytes += len(made.given[0])
        # The buffers are copied: Ray's memory is read-only, and must be freed.
        data, *buffers = remote_calls.packed_in(found)
        return remote_calls.unpack((data, *map(bytearray, buffers)))

    def _send(self, made: _Made) -> Any:
        order = self._hold, made.path, remote_calls.uncopied(made.given)
        message = remote_calls.message(remote_calls.pack(order))
        return on(self._agent, "call", "calls", message)

    def _on_a_living_host(self, send: Callable[[], Any]) -> Any:
        for attempt in range(1, MOST_HOSTS + 1):
            if self._agent is None:
                raise NodeLost(self.name, self.host, "the block has ended")
            copy = self._copy
            try:
                return cluster.answer(send(), None)
            except EngineDied:
                if not self._retry or attempt == MOST_HOSTS:
                    raise
                self._run_again(copy, elsewhere=False)
            except (cluster.Gone, cluster.Unreachable, NodeLost) as error:
                why = error.facts["why"] if isinstance(error, NodeLost) else self._why_lost()
                log.warning("%s was lost on %s: %s", self.name, self.host, why)
                host = self.host
                self._fleet._forget(host)
                if not self._retry or attempt == MOST_HOSTS:
                    raise NodeLost(self.name, host, why) from None
                self._run_again(copy, elsewhere=True)
        raise AssertionError  # the last attempt returns or raises

    def _run_again(self, lost: int, *, elsewhere: bool) -> None:
        """Runs the calls of the `with` block again on a new copy of the model, which replaces the copy number `lost`.

        Does nothing if another thread has already replaced it. With `elsewhere`, the new copy is on another host, else
        in the model's new process on the same host. Raises NodeLost if the calls are too many.
        """
        with self._moving:
            if self._copy != lost:
                return
            if len(self._made) > MOST_CALLS or self._made_bytes > MOST_BYTES:
                why = f"the block has made {len(self._made)} calls, too many to run them again"
                raise NodeLost(self.name, self.host, why)
            if elsewhere:
                self._leave()
                self._obtain()
            self._copy += 1
            for made in self._made:
                self._on_a_living_host(partial(self._send, made))

    def _why_lost(self) -> str:
        """Why a call has no answer: the host is gone, it is silent, or only the connection broke."""
        try:
            cluster.answer(on(self._agent, "ready", "offers"), PING_SECONDS)
        except cluster.Gone:
            return "its host is gone"
        except cluster.Unreachable:
            return "its host does not answer"
        return "the connection to its host broke"
