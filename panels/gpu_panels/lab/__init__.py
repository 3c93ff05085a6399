"""GPU memory in JupyterLab: a status-bar item and a side panel, and the server's routes for them.

`view` decides which values are shown, `routes` reads the ledgers for all browser tabs and
answers the browser, and `browser/static/remoteEntry.js` draws. Jupyter Server imports this package
when it starts, so the package imports nothing large, and nothing of Panel.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """The module that Jupyter Server loads as an extension, by which it is found."""
    return [{"module": "gpu_panels.lab"}]


def _load_jupyter_server_extension(server: Any) -> None:
    """Jupyter Server calls this when it loads the extension."""
    from . import routes

    make_command_found()
    routes.add(server.web_app)


def make_command_found() -> None:
    """Lets terminals and notebooks find the command `gpu`, if the server's environment is not activated."""
    directory = os.path.dirname(sys.executable)
    path = os.environ.get("PATH") or os.defpath
    if not shutil.which("gpu", path=path) and shutil.which("gpu", path=directory):
        os.environ["PATH"] = f"{path}{os.pathsep}{directory}"
