"""The console's tile in JupyterLab's launcher, which uses jupyter-server-proxy.

The tile starts `gpu console` on a Unix socket, in a directory that the proxy makes for this process
alone. Jupyter has checked its own token before a visitor reaches the proxy, and no other user of
the machine can reach the socket. This module imports only small modules, because Jupyter imports it
when Jupyter starts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def tile() -> dict[str, Any]:
    """What jupyter-server-proxy starts for the tile; an entry point of `jupyter_serverproxy_servers` names it."""
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
        "update_last_activity": False,  # an open page must not keep an idle server alive
        "launcher_entry": {
            "title": "GPU console",
            "icon_path": str(Path(__file__).with_name("icon.svg")),
            # JupyterLab shows an icon that is given by a URL only in this section and in the section Console.
            "category": "Notebook",
        },
    }
