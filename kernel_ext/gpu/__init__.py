"""The extension for `%load_ext gpu`. It adds the magics `%gpu` and `%%gpu`, their completions, and `rt`.

Loading the extension prints nothing. It does not import torch, transformers or pandas; the first use of a model or a
table imports them. The verbs are defined in `gpu_runtime.verbs`, not here.
"""

from __future__ import annotations

from typing import Any

from gpu_runtime.threads import import_whole


def load_ipython_extension(shell: Any) -> None:
    """Adds the magics to the `shell`; IPython calls this for `%load_ext gpu`."""
    import_whole("gpu.magics")
    from .magics import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Removes what `load_ipython_extension` added to the `shell`; IPython calls this for `%unload_ext gpu`."""
    from .magics import unload

    unload(shell)
