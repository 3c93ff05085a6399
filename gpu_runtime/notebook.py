"""The path of the notebook that this process runs, as its front end publishes it."""

from __future__ import annotations

import os
import sys

from .safe_text import LONGEST_PATH, printable


def notebook_path() -> str:
    """The path of the notebook that this kernel runs; empty until the front end has set the path.

    Jupyter sets an environment variable. Visual Studio Code and some servers set a name in the
    notebook's namespace, sometimes only after the kernel has started. The name of a file may have
    any bytes. Bytes that are not UTF-8 are written as escapes.
    """
    return printable(_published_path(), LONGEST_PATH)


def _published_path() -> str:
    if path := os.environ.get("JPY_SESSION_NAME"):
        return path
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    names = getattr(shell, "user_ns", None) or {}
    found = (names.get(name) for name in ("__vsc_ipynb_file__", "__session__"))
    return next((path for path in found if isinstance(path, str) and path), "")
