"""What a runtime shows of itself without knowing how: whoever can show it says so in an entry point.

The house imports no face. A package that has a console names a callable in the group `gpu_runtime`, as `console`; it is
given the runtime, and what it returns is shown.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from ..errors import GpuError

INSTALL = "Install it:  pip install 'gpu-console[console]'"


def console(rt: Any) -> Any:
    """The console over this runtime. Raises GpuError where none is installed."""
    for found in entry_points(group="gpu_runtime", name="console"):
        try:
            make = found.load()
        except ImportError as error:
            raise GpuError(
                f"the console needs {error.name}, which is not installed.\n  {INSTALL}"
            ) from None
        return make(rt)
    raise GpuError(f"no console is installed.\n  {INSTALL}")
