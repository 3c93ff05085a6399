"""All uses of Ray by the fleet: connections, named actors, stored values and answers.

Errors of Ray become errors of gpu-console here. `Gone` means that the process is dead. `Unreachable` means that it did
not answer; it may still live.
"""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import importlib.util
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

from .. import threads
from ..errors import FleetUnavailable, GpuError
from ..threads import import_whole

NAMESPACE = "gpu-console"
CONTROLLER = "controller"
AGENT = "agent:"  # followed by the id of the node
WISHES = b"wishes"
HOSTS = b"host:"  # followed by the id of the node; the value is the host's name
ANSWER_SECONDS = 60.0  # for an answer that needs no model
SIGN_SECONDS = 10.0  # a process that works for so long is asked whether it still answers
READ_SECONDS = 5.0  # a host that answers no reading for so long is left out, if another answers
OFFER_SECONDS = 2.0  # a host that makes no offer for so long is left out, if another can serve
SILENT, GONE = "it does not answer", "it is gone"  # why a host gave no answer
FIRST_SECONDS = 30.0  # for a first offer, for which a host may have to import transformers
HEAD_ANSWER_SECONDS = 10.0
# Ray's setting of the time for which a process waits for its head, before Ray ends the process.
HEAD_SECONDS = "RAY_gcs_rpc_server_reconnect_timeout_s"
SLICE_SECONDS = 0.5  # the longest single wait in Ray; `leave` waits for its end

log = logging.getLogger("gpu_runtime")
P, R = ParamSpec("P"), TypeVar("R")
_change = threads.freed(threading.Condition())
_calls = 0  # calls of Ray that run now, in all threads
_has_left = False
_survives = False  # whether Ray was imported such that this process survives its head


class Gone(Exception):
    """Raised when the process that should answer is dead, or its machine is."""


class Unreachable(Exception):
    """Raised when a process did not answer. The process may still live, and the call may have run."""


class Left(FleetUnavailable):
    """Raised when this process has left the cluster."""


def ray() -> Any:
    """The module `ray`. Raises FleetUnavailable where it is not installed."""
    try:
        import_whole("ray")
        import ray
    except ImportError as error:
        raise FleetUnavailable(
            f"a fleet needs {error.name}, which is not installed.\n"
            "  Install it:  pip install 'gpu-console[fleet]'",
            why="ray is not installed",
        ) from None
    return ray


def require_token() -> None:
    """Raises FleetUnavailable unless Ray checks its token: who can connect can run code on every host."""
    mode = os.environ.get("RAY_AUTH_MODE", "")
    if mode != "token":
        raise FleetUnavailable(
            "RAY_AUTH_MODE is not token here. A Ray cluster without a token lets anybody who reaches "
            "it run code on every host.\n"
            "  On every host:  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=FILE, then ray start",
            why="no token",
        )


def connect(address: str = "auto") -> None:
    """Connects this process to the cluster at `address`, unless it is connected already. Raises FleetUnavailable."""
    if importlib.util.find_spec("ray") is not None:
        require_token()  # must precede the import of Ray, because Ray reads this setting only once
    global _survives
    _survives = _survives or "ray" not in sys.modules or HEAD_SECONDS in os.environ
    with _surviving_the_head():
        module = ray()
        _open()
        # Without this, Ray prints the last lines of a killed node's log into the output of the code that runs then.
        module._private.worker.print_to_stdstream = lambda *_, **__: None
        if module.is_initialized():
            return
        if not _survives:
            log.warning(
                "Ray was imported before the fleet, so Ray ends this process if its head does not "
                "answer for 60 s. Before you import Ray:  os.environ[%r] = '1000000000'",
                HEAD_SECONDS,
            )
        try:
            _require_listener(address)
            module.init(
                address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error"
            )
        except Exception as error:
            why = " ".join(str(error).split())[:300]
            raise FleetUnavailable(
                f"there is no Ray cluster at {address} that takes this process ({why}).\n"
                "  Start the first host:  ray start --head, then  gpu fleet join",
                why=why,
            ) from error
        # Ray's thread that prints errors of other processes polls without pause once the head is gone.
        module._private.worker.global_worker.threads_stopped.set()


def _require_listener(address: str) -> None:
    """Raises OSError if nobody listens at the `address` of a head. Ray would try it for a quarter of an hour."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "://" not in host:
        socket.create_connection((host.strip("[]"), int(port)), HEAD_ANSWER_SECONDS).close()


@contextmanager
def _surviving_the_head() -> Iterator[None]:
    """Ray must be imported and connect in this block, so that this process survives its head.

    By default, Ray ends every process whose head does not answer for 60 s, and so a notebook. The setting is removed
    after the block, because hosts that this process starts end with their head.
    """
    is_set = HEAD_SECONDS in os.environ
    os.environ.setdefault(HEAD_SECONDS, str(10**9))
    try:
        yield
    finally:
        if not is_set:
            del os.environ[HEAD_SECONDS]


def _open() -> None:
    """Lets calls run. From now on this process disconnects before Ray does so at its end."""
    global _has_left
    with _change:
        _has_left = False
    atexit.unregister(leave)
    atexit.register(leave)


class _EndingCore:
    """Ray's core while it disconnects. It counts no references."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def remove_object_ref_reference(self, reference: Any) -> None: ...

    def remove_actor_handle_reference(self, actor: Any) -> None: ...


def leave() -> None:
    """Disconnects this process from the cluster, after the calls that run in other threads. Those that wait raise Left.

    Ray frees memory that its calls in other threads still read, and the process dies by SIGSEGV. Ray also ends the
    process if another thread frees a reference while Ray's core disconnects, so the core counts no references from now
    on.
    """
    global _has_left
    with _change:
        _has_left = True
        _change.wait_for(lambda: not _calls, ANSWER_SECONDS)
    worker = ray()._private.worker.global_worker
    if hasattr(worker, "core_worker"):
        worker.core_worker = _EndingCore(worker.core_worker)
    ray().shutdown()


@contextmanager
def _running() -> Iterator[Any]:
    """Ray, for one call. Raises Left."""
    global _calls
    with _change:
        if _has_left:
            raise Left(
                "this process has left the fleet.\n  Enter it again:  fleet = gpu_runtime.fleet()",
                why="it was closed",
            )
        _calls += 1
    try:
        yield ray()
    finally:
        with _change:
            _calls -= 1
            _change.notify_all()


def _forget_calls() -> None:
    """A forked child does not run the calls of its parent's threads."""
    global _calls
    _calls = 0


os.register_at_fork(after_in_child=_forget_calls)


def call(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Begins a call of the remote `method`. Returns its reference."""
    with _running():
        return method.remote(*args, **kwargs)


def _call(function: Callable[P, R]) -> Callable[P, R]:
    """`function` as one call of Ray's head, for whose end `leave` waits. Raises FleetUnavailable."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _running() as module:
            try:  # most calls of the head have no limit of time, so this one is made first
                module._private.worker.global_worker.gcs_client.internal_kv_exists(
                    WISHES, NAMESPACE.encode(), HEAD_ANSWER_SECONDS
                )
                return function(*args, **kwargs)
            except module.exceptions.RpcError as error:
                raise FleetUnavailable(
                    f"the fleet's head does not answer ({error}).\n"
                    "  On the head's machine:  ray status",
                    why="its head does not answer",
                ) from error

    return run


def versions() -> dict[str, str]:
    """The versions that must be equal on all hosts."""
    found = {"gpu-console": importlib.metadata.version("gpu-console"), "Ray": ray().__version__}
    return {**found, "Python": f"{sys.version_info[0]}.{sys.version_info[1]}"}


def require_equal_versions(theirs: Mapping[str, str], whose: str) -> None:
    """Raises FleetUnavailable if a version of this process differs from `theirs`, those of `whose` process."""
    ours = versions()
    differing = [name for name in ours if theirs.get(name) != ours[name]]
    if differing:
        words = ", ".join(f"{name} {theirs.get(name)}, not {ours[name]}" for name in differing)
        raise FleetUnavailable(
            f"{whose} has other versions: {words}.\n  Install the same versions on every host.",
            why="versions differ",
        )


# -- stored values -------------------------------------------------------------------------------


def _key_values() -> Any:
    """Ray's module for values that the head stores by key."""
    import_whole("ray.experimental.internal_kv")
    from ray.experimental import internal_kv

    return internal_kv


@_call
def stored(key: bytes) -> bytes | None:
    """The value that the head stores for `key`, or None."""
    return _key_values()._internal_kv_get(key, namespace=NAMESPACE.encode())


@_call
def store(key: bytes, value: bytes) -> None:
    """Stores `value` for `key` at the head."""
    _key_values()._internal_kv_put(key, value, overwrite=True, namespace=NAMESPACE.encode())


@_call
def unstore(key: bytes) -> None:
    """Removes the value for `key`."""
    _key_values()._internal_kv_del(key, namespace=NAMESPACE.encode())


class Joined(NamedTuple):
    """A host that has joined. Each join has a new serial number, which tells its agent from earlier ones."""

    name: str
    serial: str


def store_host(node: str, name: str) -> None:
    """Stores that the `node` has joined as the host `name`."""
    store(HOSTS + node.encode(), f"{secrets.token_hex(4)} {name}".encode())


@_call
def stored_hosts() -> dict[str, Joined]:
    """The hosts that have joined, by the id of their node."""
    keys = _key_values()._internal_kv_list(HOSTS, namespace=NAMESPACE.encode())
    found = {}
    for key in keys:
        value = _key_values()._internal_kv_get(key, namespace=NAMESPACE.encode())
        if value is not None:
            serial, _, name = value.decode().partition(" ")
            found[key.removeprefix(HOSTS).decode()] = Joined(name, serial)
    return found


# -- the cluster ---------------------------------------------------------------------------------


@_call
def living_nodes() -> dict[str, dict[str, Any]]:
    """Ray's nodes that are alive, by their ids."""
    return {node["NodeID"]: node for node in ray().nodes() if node["Alive"]}


@_call
def is_given_up() -> bool:
    """Whether Ray's head has declared the node of this process dead. A dead node never returns."""
    own = ray().get_runtime_context().get_node_id()
    return any(node["NodeID"] == own and not node["Alive"] for node in ray().nodes())


@_call
def ended_jobs() -> set[str]:
    """The ids of the jobs whose driver has ended."""
    worker = ray()._private.worker.global_worker
    jobs = worker.gcs_client.get_all_job_info()
    return {id.hex() for id, job in jobs.items() if job.is_dead}


@_call
def my_job() -> str:
    """The id of this process's job."""
    return ray().get_runtime_context().get_job_id()


@_call
def actor(name: str) -> Any:
    """The handle of the actor called `name`. Raises Gone if there is no such actor."""
    try:
        return ray().get_actor(name, namespace=NAMESPACE)
    except ValueError as error:
        raise Gone(name) from error


# -- answers -------------------------------------------------------------------------------------


def answer(
    reference: Any, timeout: float = ANSWER_SECONDS, ping: Callable[[], Any] | None = None
) -> Any:
    """Waits up to `timeout` seconds for the call `reference`, and returns its value.

    With `ping`, waits as long as the process answers the call `ping()` after each `timeout`: Ray does not notice
    that a process is stopped while its node lives. Raises the error of the call itself, such as DoesNotFit, and Gone
    or Unreachable.
    """
    errors = ray().exceptions
    while not ended([reference], timeout):
        if ping is None:
            raise Unreachable(f"no answer within {timeout:g} s")
        answer(ping(), ANSWER_SECONDS)
    try:
        with _running() as module:
            return module.get(reference, timeout=ANSWER_SECONDS)
    except errors.RayTaskError as error:
        raise _cause(error) from None
    except (errors.ActorUnavailableError, errors.GetTimeoutError) as error:
        raise Unreachable(
            "it is being restarted or cannot be reached; the call may have run"
        ) from error
    except (
        errors.RayActorError,
        errors.ActorUnschedulableError,
        errors.WorkerCrashedError,
        errors.NodeDiedError,
        errors.ObjectLostError,
        errors.OwnerDiedError,
    ) as error:
        raise Gone(str(error).splitlines()[0]) from error


def ended(references: Iterable[Any], seconds: float, count: int | None = None) -> list[Any]:
    """The calls among `references` that end within `seconds`. The wait ends once `count` (None: all) have."""
    pending = list(references)
    count = len(pending) if count is None else count
    until = time.monotonic() + seconds
    while True:
        left = max(0.0, until - time.monotonic())
        with _running() as module:
            ready, _ = module.wait(pending, num_returns=count, timeout=min(left, SLICE_SECONDS))
        if len(ready) >= count or left <= SLICE_SECONDS:
            return list(ready)


def _cause(error: Any) -> BaseException:
    """The error that the remote call raised. An error of another package has the remote traceback as a note."""
    cause = error.cause
    if not isinstance(cause, BaseException):
        return error
    if not isinstance(cause, GpuError) and not getattr(cause, "__notes__", None):
        if hasattr(cause, "add_note"):  # from Python 3.11 on
            cause.add_note(str(error))
    return cause


def answers(
    references: Mapping[str, Any],
    timeout: float,
    *,
    longest: float = 0.0,
    enough: Callable[[Iterable[Any]], bool] = lambda found: True,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of the calls that answered, and the reasons of the other calls, each by its key.

    All calls together get `timeout` seconds. If `enough(values)` is false after this time, the other calls get more
    time: until it is true, but at most `longest` seconds from the beginning. A call that fails does not stop the
    others.
    """
    keys = {reference: key for key, reference in references.items()}
    pending = list(keys)
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    began = time.monotonic()
    count, seconds = len(pending), timeout
    while pending and seconds > 0:
        ready = ended(pending, seconds, count)
        pending = [reference for reference in pending if reference not in ready]
        for reference in ready:
            _take(keys[reference], reference, found, missing)
        if enough(found.values()):
            break
        count, seconds = 1, began + longest - time.monotonic()
    for reference in pending:
        missing[keys[reference]] = SILENT
    return found, missing


def _take(key: str, reference: Any, found: dict[str, Any], missing: dict[str, str]) -> None:
    """Puts the value of a call that has ended into `found`, or the reason of its failure into `missing`."""
    try:
        found[key] = answer(reference, 0.0)
    except Unreachable:
        missing[key] = SILENT
    except Gone:
        missing[key] = GONE
    except Left:
        raise
    except Exception as error:  # noqa: BLE001 - the reason is shown with the host
        missing[key] = str(error)
