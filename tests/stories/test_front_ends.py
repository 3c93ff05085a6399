"""Kernels as VS Code, PyCharm and other front ends than JupyterLab start them: the notebook's name, parking, values."""

import json
import queue
import secrets
import sys
import urllib.request
from pathlib import Path

import pytest
from jupyter_client.blocking.client import BlockingKernelClient

from gpu_runtime import Runtime
from gpu_runtime.facts import HOST
from tests.clock import PATIENCE, until
from tests.faces.served import free_port, serving

from .notebooks import DEVICES, Notebook, places, rest

pytestmark = pytest.mark.processes

# The commands of VS Code's Jupyter extension: of today, with a debugger's option, and of 2020.
COMMANDS = (
    ["-m", "ipykernel_launcher", "--f={connection_file}"],
    ["-Xfrozen_modules=off", "-m", "ipykernel_launcher", "--f={connection_file}"],
    ["-m", "ipykernel_launcher", "-f", "{connection_file}"],
)
VARIABLES = {
    "JPY_SESSION_NAME": "",
    "PYTHONUNBUFFERED": "1",
    "PYDEVD_IPYTHON_COMPATIBLE_DEBUGGING": "1",
    "VSCODE_PID": "1",
}
# What the extension runs before the first cell, in one request.
FIRST = """
__vsc_ipynb_file__ = "{path}"
get_ipython().run_line_magic('config', 'Completer.use_jedi = False')
"""
TENSOR = "import torch; x = torch.arange(1 << 20)"  # 8 MiB
# The view of variables sends a silent request after each cell.
VIEW = "import json; print(json.dumps([type(x).__name__, list(x.shape), str(x)[-10:]]))"


@pytest.fixture
def url(tmp_path):
    return f"keeper://{tmp_path}/ledger"


@pytest.fixture
def rt(url):
    with Runtime(ledger=url, gpu_devices=DEVICES) as made:
        made.guest = True
        yield made


@pytest.mark.parametrize("words", COMMANDS, ids=("today", "option", "2020"))
def test_a_kernel_of_vs_code_has_its_notebooks_name_and_is_parked(url, rt, words):
    pytest.importorskip("torch")
    with Notebook("unused", url, words=words, loads=False, **VARIABLES) as kernel:
        kernel.client.execute_interactive(
            FIRST.format(path="/home/ann/train.ipynb"), store_history=False, timeout=PATIENCE
        )
        kernel.run("%load_ext gpu")
        kernel.run(TENSOR)
        rest(rt, "train.ipynb")
        view = kernel.client.execute(VIEW, silent=True, store_history=False)
        assert kernel.reply(view)["status"] == "ok"
        kernel.run("%gpu park")
        until(lambda: places(rt, "train.ipynb") == {HOST}, "it is parked")
        shown = []
        kernel.client.execute_interactive(
            VIEW, store_history=False, timeout=PATIENCE,
            output_hook=lambda message: shown.append(message["content"].get("text", "")),
        )  # fmt: skip
        assert json.loads("".join(shown)) == ["Tensor", [1 << 20], " 1048575])"]


class OfServer(Notebook):
    """A kernel of a Jupyter server, without a page that shows it."""

    def __init__(self, connection_file: Path) -> None:
        self.client = BlockingKernelClient(connection_file=str(connection_file))
        self.client.load_connection_file()
        self.client.start_channels()
        until(self._is_heard)  # `wait_for_ready` gives up after a second without a heartbeat

    def _is_heard(self) -> bool:
        self.client.kernel_info()
        try:
            return bool(self.client.get_iopub_msg(timeout=1))
        except queue.Empty:
            return False

    def close(self) -> None:
        self.client.stop_channels()


LEASE = "rt.register('m', backend='fake', size='1MiB'); rt.preload('m')"


@pytest.mark.parametrize(("path", "first", "title"), [
    ("pycharm.ipynb", "", "pycharm.ipynb"),
    ("code-jvsc-1f0c7b2a.ipynb", FIRST.format(path="c:\\\\Users\\\\ann\\\\code.ipynb"), "code.ipynb"),
    ("", "", ""),
], ids=("PyCharm", "VS Code", "no session"))  # fmt: skip
def test_a_kernel_of_a_server_without_jupyterlab_has_its_notebooks_name(
    url, rt, tmp_path, path, first, title
):
    """PyCharm runs a server of its own. VS Code invents a path for a server, and states the real one to the kernel."""
    port, token, runtime = free_port(), secrets.token_hex(16), tmp_path / "runtime"
    own = {"GPU_DEVICES": DEVICES, "JUPYTER_RUNTIME_DIR": str(runtime), "JUPYTER_TOKEN": token}
    words = f"-m jupyter server --no-browser --allow-root --ip=127.0.0.1 --port={port}".split()
    asked = {"kernel": {"name": "python3"}, "path": path, "name": path, "type": "notebook"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/{'sessions' if path else 'kernels'}",
        data=json.dumps(asked if path else asked["kernel"]).encode(),
        headers={"Authorization": f"token {token}"},
    )
    with serving([sys.executable, *words], tmp_path, own, port=port):
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            made = json.load(answer)
        id = made["kernel"]["id"] if path else made["id"]
        with OfServer(runtime / f"kernel-{id}.json") as kernel:
            assert "Error" not in (said := kernel.run(f"{first}\n%load_ext gpu\n{LEASE}")), said
            [owner] = [
                one.owner
                for one in rt.status().sections.values()
                if one.owner.id != rt.status().owner.id
            ]
            process = f"pid {owner.pid}"
            assert owner.label == (f"{title} ({process})" if title else process)
