"""The tile in JupyterLab's launcher, by jupyter-server-proxy.

It starts `gpu console` on a Unix socket in a directory that the proxy makes for it alone: whoever comes by the proxy
has passed Jupyter's own token, and nobody else of the machine reaches the socket. Imports nothing, for Jupyter's sake.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def tile() -> dict[str, Any]:
    """What jupyter-server-proxy asks an entry point of `jupyter_serverproxy_servers` for."""
    return {
        "command": [
            sys.executable,
            "-m",
            "gpu_runtime.cli",
            "console",
            "--socket",
            "{unix_socket}",
            "--no-browser",
        ],
        "unix_socket": True,
        "timeout": 60,  # seconds; importing Panel takes most of it on a busy machine
        "new_browser_tab": False,
        "update_last_activity": False,  # a page that looks is no work that would keep an idle server alive
        "launcher_entry": {
            "title": "GPU console",
            "icon_path": str(Path(__file__).with_name("icon.svg")),
            "category": "Notebook",  # JupyterLab shows icons by URL in this section and in Console's only
        },
    }
