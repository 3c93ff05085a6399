"""`%load_ext gpu`: the magics `%gpu` and `%%gpu`, their completions, and the runtime as `rt`.

Loading prints nothing and imports no torch, transformers or pandas: they come with the first model or table.
"""

from __future__ import annotations

from typing import Any


def load_ipython_extension(shell: Any) -> None:
    from .magics import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    from .magics import unload

    unload(shell)
