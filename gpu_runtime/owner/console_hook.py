"""Finds the console's package through an entry point, since this folder must not import `panels`.

A package with a console names a callable `console` in the entry-point group `gpu_runtime`. The
callable `console` takes the runtime and returns the object to show.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from ..errors import GpuError
from ..threads import import_whole

INSTALL = "Install it:  pip install 'gpu-console[console]'"


def console(rt: Any) -> Any:
    """The console of the runtime `rt`. Raises GpuError if no console is installed."""
    for found in entry_points(group="gpu_runtime", name="console"):
        try:
            import_whole(found.module)
            make = found.load()
        except ImportError as error:
            raise GpuError(
                f"the console needs {error.name}, which is not installed.\n  {INSTALL}"
            ) from None
        return make(rt)
    raise GpuError(f"no console is installed.\n  {INSTALL}")
