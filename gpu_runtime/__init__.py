"""gpu-console: all notebooks of a machine share its GPUs.

    import gpu_runtime
    rt = gpu_runtime.runtime()
    rt.register("qwen", "/models/qwen")
    with rt.use("qwen") as model:
        ...

This package exports the runtime and the errors. Importing the package imports neither torch nor any
other module that is slow to load. The parts of the runtime are imported when a runtime is first
opened.
"""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import errors, threads
from .errors import *  # noqa: F403 - the errors that `errors.__all__` lists
from .threads import import_whole
from .version import VERSION

if TYPE_CHECKING:
    from .fleet.client import Fleet
    from .runtime import Runtime

__version__ = VERSION
__all__ = ["Runtime", "fleet", "runtime"]
__all__ += errors.__all__

_lock = threads.freed(threading.RLock())
_runtime: Runtime | None = None


def runtime() -> Runtime:
    """The default runtime of this process: every call returns the same object until it is closed.

    The first call opens the runtime with the settings of the environment. Raises BadSetting for a
    setting that cannot be used, LedgerUnavailable and ProbeFailed.
    """
    global _runtime
    import_whole(f"{__name__}.runtime")
    from .runtime import Runtime

    with _lock:
        if _runtime is None or _runtime._closed:
            _runtime = Runtime()
        return _runtime


def fleet(address: str = "auto") -> Fleet:
    """The fleet: all hosts of the Ray cluster at `address` that have joined.

    `address` is `auto` on a machine of the cluster, else the address of the cluster's head node,
    such as `box1:6379`. Raises FleetUnavailable if the extra `fleet` is not installed, or if the
    process cannot connect to the cluster.
    """
    import_whole(f"{__name__}.fleet.client")
    from .fleet.client import open_fleet

    return open_fleet(address)


def _opened() -> Runtime | None:
    """The runtime of this process if it is open, else None. This function opens nothing."""
    return _runtime if _runtime is not None and not _runtime._closed else None


def __getattr__(name: str) -> Any:
    if name == "Runtime":
        import_whole(f"{__name__}.runtime")
        from .runtime import Runtime

        return Runtime
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(ModuleType):
    """The class of this package. It keeps the functions `runtime` and `fleet` of the package.

    Python sets an attribute of the package when it imports the submodule `runtime` or `fleet`.
    Without this class, that attribute would replace the function of the same name.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in ("runtime", "fleet") and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
