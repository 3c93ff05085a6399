"""The extension for `%load_ext gpu`: the magics `%gpu` and `%%gpu`, their completions, and `rt`.

Loading the extension imports neither torch, transformers nor pandas. It prints nothing, unless torch cannot park.
"""

from __future__ import annotations

from typing import Any

from gpu_runtime.errors import reword
from gpu_runtime.threads import import_whole


def load_ipython_extension(shell: Any) -> None:
    """Adds the magics to the `shell`; IPython calls this for `%load_ext gpu`."""
    import_whole("gpu.magics")
    try:
        from .magics import load
    except ImportError as error:
        reword(error)  # an IPython that is too old is named, with what to type
        raise

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Removes what `load_ipython_extension` added to the `shell`; IPython calls this for `%unload_ext gpu`."""
    from .magics import unload

    unload(shell)
