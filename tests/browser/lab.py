"""Runs a real JupyterLab on loopback with given notebooks, which Chromium opens."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest

from tests.clock import PATIENCE, scaled
from tests.faces.conftest import FOUND_BY_CHILDREN
from tests.faces.served import end, free_port

from .chromium import SHOWN_MS, BrowserPage

TOKEN = "a-token-of-these-tests-alone"
START_SECONDS = scaled(90.0)
_ENDED = re.compile(r"\[\d+\]:")  # the prompt of a cell that has run
EXTENSION = Path(__file__).parents[2] / "panels/gpu_panels/lab"
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


@contextmanager
def serving_lab(
    home: Path, notebooks: Mapping[str, Sequence[str]], **settings: str
) -> Iterator[int]:
    """Runs a JupyterLab in the directory `home` with `notebooks` (file name -> cells). Yields its port.

    `settings` are added to the environment of its kernels.
    """
    pytest.importorskip("jupyterlab")
    installed = _as_installed(home)
    (home / "work").mkdir()
    for name, cells in notebooks.items():
        made = [nbformat.v4.new_code_cell(cell) for cell in cells]
        nbformat.write(nbformat.v4.new_notebook(cells=made, metadata=KERNEL), home / "work" / name)
    settings_file = home / "config/lab/user-settings/@jupyterlab/apputils-extension"
    settings_file.mkdir(parents=True)
    quiet = '{"fetchNews": "false", "checkForUpdates": false}'
    (settings_file / "notification.jupyterlab-settings").write_text(quiet)
    port = free_port()
    environment = os.environ | {
        "HOME": str(home),
        "JUPYTER_CONFIG_DIR": f"{home}/config",
        "JUPYTER_DATA_DIR": f"{home}/data",
        "JUPYTER_RUNTIME_DIR": f"{home}/run",
        "PYTHONPATH": FOUND_BY_CHILDREN,
        "JUPYTER_PATH": f"{installed}/share",
        "JUPYTER_CONFIG_PATH": f"{installed}/etc",
        "GPU_LEDGER": f"keeper://{home}/ledger",
        "XDG_STATE_HOME": f"{home}/state",
        **settings,
    }
    words = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
        f"--port={port}", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={home}/work",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.news_url=",
        "--LabApp.expose_app_in_browser=True",
    ]  # fmt: skip
    with (home / "output.txt").open("wb") as out:
        server = subprocess.Popen(
            words, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait(f"http://127.0.0.1:{port}/api?token={TOKEN}", server, home / "output.txt")
        yield port
    finally:
        server.send_signal(signal.SIGINT)
        end(server)


def _as_installed(home: Path) -> Path:
    """A directory in `home` with the files of this checkout that an installation puts beside Jupyter's own."""
    installed = home / "installed"
    (installed / "share/labextensions").mkdir(parents=True)
    (installed / "share/labextensions/gpu-console").symlink_to(EXTENSION / "browser")
    (installed / "etc/jupyter_server_config.d").mkdir(parents=True)
    settings = installed / "etc/jupyter_server_config.d/gpu-console.json"
    settings.symlink_to(EXTENSION / "jupyter_server_config.json")
    return installed


def _wait(url: str, server: subprocess.Popen[bytes], output: Path) -> None:
    """Returns when the `server` answers at `url`. Fails with the text in `output` if the server ends."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        assert server.poll() is None, output.read_text()
        try:
            urllib.request.urlopen(url, timeout=PATIENCE).close()
            return
        except OSError:
            time.sleep(0.1)  # there is no other way to know that another process listens
    raise AssertionError(output.read_text())


class LabNotebook:
    """A notebook of JupyterLab that is open in a page of its own."""

    def __init__(self, browser, port: int, name: str, **context) -> None:
        url = f"http://127.0.0.1:{port}/lab/workspaces/{name.removesuffix('.ipynb')}/tree/{name}"
        self.seen = BrowserPage(browser, f"{url}?token={TOKEN}&reset", **context)
        self.page = self.seen.page
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=2 * SHOWN_MS)
        self.page.wait_for_selector("text=/Python 3 .* Idle/", timeout=2 * SHOWN_MS)

    def command(self, name: str, arguments: Mapping[str, object] | None = None) -> None:
        """Runs one of JupyterLab's commands, as its menu does."""
        self.page.evaluate(
            "([name, given]) => { window.jupyterapp.commands.execute(name, given) }",
            [name, dict(arguments or {})],
        )

    def cell(self, number: int):
        """The code cell with this number; the first code cell is 0."""
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(number)

    def run(self, number: int, timeout: float = START_SECONDS) -> str:
        """Runs a cell as a user does, waits until it has ended, and returns the text that it shows."""
        self.cell(number).locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")
        return self.output(number, timeout)

    def output(self, number: int, timeout: float = START_SECONDS) -> str:
        """Waits until a cell has ended, and returns the text that it shows."""
        prompt = self.cell(number).locator(".jp-InputPrompt", has_text=_ENDED)
        prompt.wait_for(timeout=1000 * timeout)
        shown = self.cell(number).locator(".jp-OutputArea-output")
        return "\n".join(shown.all_inner_texts())

    def close(self) -> None:
        self.seen.close()
