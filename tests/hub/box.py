"""A real JupyterHub with its proxy, on loopback, for real users of this machine who share one simulated card.

The hub, its services and the users' servers run in the environment that `make hub` makes. Notebooks run in a real
browser.
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

from gpu_runtime import Runtime
from gpu_runtime.ledgers.setup import init
from tests.browser.chromium import SHOWN_MS, BrowserPage
from tests.browser.lab import EXTENSION, KERNEL, LabNotebook
from tests.clock import PATIENCE, scaled
from tests.clock import until as until_true
from tests.faces.conftest import FOUND_BY_CHILDREN
from tests.faces.served import end, free_port
from tests.ledgers.people import require_root, run_command

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv-hub/bin"
START_SECONDS = scaled(120.0)
SETTINGS = {
    "docmanager-extension/plugin.jupyterlab-settings": '{"autosave": false}',
    "apputils-extension/notification.jupyterlab-settings": '{"fetchNews": "false", "checkForUpdates": false}',
}
HOME_BYTES = 32 << 20  # of bob, whose home is a file system of its own
PASSWORD = "a-password-of-these-tests-alone"
GROUP = f"gpuh{os.getpid()}"
# With a number in their names, no test takes a user of this machine. The pictures have none.
NUMBER = os.environ.get("TESTS_HUB_NUMBER", f"{os.getpid()}")
ANN, BOB, OPS = (f"{name}{NUMBER}" for name in ("ann", "bob", "ops"))

CONFIG = """
c.JupyterHub.bind_url = {bind!r}
c.JupyterHub.hub_port = {hub_port}
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{proxy_port}"
c.ConfigurableHTTPProxy.pid_file = {root!r} + "/proxy.pid"
c.JupyterHub.db_url = "sqlite:///{root}/hub.sqlite"
c.JupyterHub.cookie_secret_file = {root!r} + "/cookie_secret"
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = {password!r}
c.Authenticator.allow_all = True
c.Authenticator.admin_users = {{{ops!r}}}
c.JupyterHub.allow_named_servers = True
c.JupyterHub.spawner_class = "localprocess"
c.Spawner.default_url = "/lab"
c.Spawner.start_timeout = c.Spawner.http_timeout = {seconds:.0f}  # the hub gives up after 30 s
c.Spawner.args = ["--LabApp.expose_app_in_browser=True", "--LabApp.news_url=",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
c.Spawner.environment = {environment!r}
c.JupyterHub.load_roles = [{{"name": "test", "services": ["test"],
    "scopes": ["admin:users", "admin:servers", "admin:groups", "access:servers"]}}]
c.JupyterHub.services = [{{"name": "test", "api_token": {token!r}}}]
{more}
"""
CONFIGURE = "from gpu_runtime import hub\nhub.configure(c, port={service_port})"
TOKEN = "0123456789abcdef" * 4


def require_hub() -> None:
    """Skips the test where JupyterHub, its proxy or real users are missing."""
    if not (BIN / "jupyterhub").exists() or not (BIN / "configurable-http-proxy").exists():
        pytest.skip("needs JupyterHub and its proxy:  make hub")
    require_root()
    if not shutil.which("setpriv"):
        pytest.skip("this machine has no setpriv")
    tried = [
        "setpriv",
        "--reuid=65534",
        "--clear-groups",
        str(BIN / "python"),
        "-c",
        "import gpu_runtime",
    ]
    if subprocess.run(tried, capture_output=True, cwd="/", timeout=START_SECONDS).returncode:
        pytest.skip("other users of this machine cannot run the Python of .venv-hub")


class HubBox:
    """A machine with a JupyterHub. Its users have homes of mode 0700, and the umask 077."""

    def __init__(self, devices: str, prefix: str, more: str, **settings: str) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="gpuhub-", dir="/tmp"))
        self.root.chmod(0o755)
        self.devices, self.prefix = devices, prefix
        self.ledger, self.config = self.root / "ledger", self.root / "config.toml"
        init(str(self.ledger), GROUP, str(self.config))
        self.port = free_port()
        environment = {
            "GPU_DEVICES": devices,
            "GPU_CONFIG_FILE": str(self.config),
            "EVICTION_GRACE_SECONDS": "0.2",
            **settings,
        }
        of_user = environment | {
            "PYTHONPATH": FOUND_BY_CHILDREN,
            "JUPYTER_PATH": f"{self._installed()}/share",
        }
        text = CONFIG.format(
            bind=f"http://127.0.0.1:{self.port}{prefix}",
            hub_port=free_port(),
            proxy_port=free_port(),
            root=str(self.root),
            password=PASSWORD,
            ops=OPS,
            environment=of_user,
            token=TOKEN,
            seconds=START_SECONDS,
            more=more.format(service_port=free_port()),
        )
        (self.root / "jupyterhub_config.py").write_text(text)
        self.environment = os.environ | environment
        self.environment |= {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": FOUND_BY_CHILDREN,
        }
        self.ids = {pwd.getpwnam(user).pw_uid for user in (ANN, BOB, OPS)}
        self.process: subprocess.Popen[bytes] | None = None

    def _installed(self) -> Path:
        """A directory with the files of this checkout that an installation puts beside Jupyter's own."""
        place = self.root / "installed/share/labextensions"
        place.mkdir(parents=True)
        (place / "gpu-console").symlink_to(EXTENSION / "browser")
        return self.root / "installed"

    @property
    def url(self) -> str:
        """The URL of the hub, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}{self.prefix}".rstrip("/")

    def start(self) -> None:
        """Starts the hub, and waits until it answers."""
        with (self.root / "hub.log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(BIN / "jupyterhub"), "-f", str(self.root / "jupyterhub_config.py")],
                cwd=self.root,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,
            )
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log()
            with contextlib.suppress(OSError):
                if self.api("")["version"]:
                    return
            time.sleep(0.1)  # there is no other way to know that another process listens
        raise AssertionError(self.log())

    def log(self) -> str:
        return (self.root / "hub.log").read_text()

    def api(self, path: str, method: str = "GET", body: Any = None) -> Any:
        """The answer of the hub's API to a request of the operator's program. Raises OSError."""
        request = urllib.request.Request(
            f"{self.url}/hub/api/{path}",
            method=method,
            headers={"Authorization": f"token {TOKEN}"},
            data=None if body is None else json.dumps(body).encode(),
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def of_server(self, user: str, path: str) -> Any:
        """The answer of a user's server at `path` of its API."""
        request = urllib.request.Request(
            f"{self.url}/user/{user}/api/{path}", headers={"Authorization": f"token {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)

    def server(self, user: str, name: str = "") -> dict[str, Any] | None:
        """What the hub knows of a user's server; None if the server does not run."""
        return self.api(f"users/{user}")["servers"].get(name)

    def start_server(self, user: str, name: str = "") -> None:
        """Starts a server of `user`, and waits until the hub says that it is ready."""
        with contextlib.suppress(urllib.error.HTTPError):  # the user exists already
            self.api(f"users/{user}", "POST")
        self.api(f"users/{user}/servers/{name}" if name else f"users/{user}/server", "POST", {})
        until = time.monotonic() + START_SECONDS
        while not ((found := self.server(user, name)) and found["ready"]):
            assert time.monotonic() < until, self.log()
            time.sleep(0.1)  # the hub has no event for a program that waits

    def stop_server(self, user: str, name: str = "") -> None:
        """Stops a server of `user`, and waits until it has ended."""
        self.api(f"users/{user}/servers/{name}" if name else f"users/{user}/server", "DELETE")
        until = time.monotonic() + START_SECONDS
        while (found := self.server(user, name)) and (found["ready"] or found["pending"]):
            assert time.monotonic() < until, self.log()
            time.sleep(0.1)

    def culled(self, *options: str, until: Callable[[str], Any]) -> str:
        """Runs the guarded culler with these options until `until(log)` is true. Returns its log."""
        words = [str(BIN / "python"), "-m", "gpu_runtime.hub", "--cull-every=2", *options]
        given = {"JUPYTERHUB_API_TOKEN": TOKEN, "JUPYTERHUB_API_URL": f"{self.url}/hub/api"}
        log = self.root / "culler.log"
        with (
            log.open("wb") as file,
            subprocess.Popen(
                words, env=self.environment | given, stderr=file, cwd=self.root
            ) as process,
        ):
            try:
                until_true(lambda: until(log.read_text()))
            except AssertionError:
                raise AssertionError(log.read_text()) from None
            finally:
                process.kill()
        return log.read_text()

    def write(self, user: str, notebooks: Mapping[str, Sequence[str]]) -> None:
        """Writes notebooks (file name -> cells) into the home of `user`."""
        entry = pwd.getpwnam(user)
        for name, cells in notebooks.items():
            path = Path(entry.pw_dir) / name
            made = [nbformat.v4.new_code_cell(cell) for cell in cells]
            nbformat.write(nbformat.v4.new_notebook(cells=made, metadata=KERNEL), path)
            os.chown(path, entry.pw_uid, entry.pw_gid)

    def runtime(self) -> Runtime:
        """A runtime that reads the ledger, and holds nothing."""
        return Runtime(devices=self.devices, gpu_config_file=str(self.config), monitor=False)

    def close(self) -> None:
        """Ends the hub, every process of its users, and the keeper, and removes the files."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            end(self.process)
        for process in psutil.process_iter(["uids", "cmdline"]):
            uids, command = process.info["uids"], process.info["cmdline"] or []
            is_keeper = (
                "gpu_runtime.ledgers.keeper.server" in command and str(self.ledger) in command[-1]
            )
            if is_keeper or (uids and uids.real in self.ids):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        shutil.rmtree(self.root, ignore_errors=True)


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


def _write_settings(user: str) -> None:
    """Turns off what JupyterLab would ask or save by itself in the middle of a test."""
    entry = pwd.getpwnam(user)
    place = Path(entry.pw_dir) / ".jupyter/lab/user-settings/@jupyterlab"
    for name, text in SETTINGS.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    run_command("chown", "-R", f"{entry.pw_uid}:{entry.pw_gid}", f"{entry.pw_dir}/.jupyter")


@contextmanager
def people() -> Iterator[None]:
    """A block in which ann, bob and ops exist. They are in the group of the ledger."""
    homes = Path(tempfile.mkdtemp(prefix="gpuhub-homes-", dir="/tmp"))
    homes.chmod(0o755)
    try:
        run_command("groupadd", GROUP)
        for user in (ANN, BOB, OPS):
            run_command(
                "useradd", "-m", "-d", str(homes / user), "-s", "/bin/bash", "-U", "-G", GROUP, user
            )
            (homes / user).chmod(0o700)
        entry = pwd.getpwnam(BOB)
        options = f"size={HOME_BYTES},mode=700,uid={entry.pw_uid},gid={entry.pw_gid}"
        with contextlib.suppress(subprocess.CalledProcessError):  # not allowed in most containers
            run_command("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(homes / BOB))
        for user in (ANN, BOB, OPS):
            _write_settings(user)
        yield
    finally:
        run_command("bash", "-c", f"umount -l {homes / BOB} 2>/dev/null || true")
        for user in (ANN, BOB, OPS):
            if _exists(user):
                run_command("userdel", "-f", user)
            with contextlib.suppress(KeyError):
                grp.getgrnam(user)
                run_command("groupdel", user)
        run_command("bash", "-c", f"groupdel {GROUP} 2>/dev/null || true")
        shutil.rmtree(homes, ignore_errors=True)


@contextmanager
def running_hub(
    devices: str, *, prefix: str = "/", more: str = CONFIGURE, **settings: str
) -> Iterator[HubBox]:
    """A block with a running JupyterHub. `more` are further lines of its configuration."""
    box = HubBox(devices, prefix, more, **settings)
    try:
        box.start()
        yield box
    finally:
        box.close()


# -- the browser


class Visitor:
    """A person who has logged in to the hub, in a browser context of their own."""

    def __init__(self, browser: Any, box: HubBox, user: str, **context: Any) -> None:
        self.box, self.user = box, user
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **context)
        page = self.context.new_page()
        page.set_default_timeout(SHOWN_MS)
        page.goto(f"{box.url}/hub/login?next={box.prefix.rstrip('/')}/hub/home")
        page.fill("input[name=username]", user)
        page.fill("input[name=password]", PASSWORD)
        page.click("input[type=submit], button[type=submit]")
        page.wait_for_url(re.compile("/hub/home"))
        page.close()

    def open(self, path: str) -> BrowserPage:
        """A page of the hub at `path`."""
        return _InContext(self.context, self.box.url + path)

    def console(self) -> BrowserPage:
        """The console, which shows figures."""
        return self.open("/services/gpu/").ready()

    def notebook(self, name: str, server: str = "") -> HubNotebook:
        """The notebook `name` in JupyterLab."""
        return HubNotebook(self, name, server)

    def close(self) -> None:
        self.context.close()


class _InContext(BrowserPage):
    """A page in a browser context that exists already."""

    def __init__(self, context: Any, url: str) -> None:
        class Same:
            def new_context(self, **_: Any) -> Any:
                return context

        super().__init__(Same(), url)

    def close(self) -> None:
        self.page.close()


class HubNotebook(LabNotebook):
    """A notebook of a user's server that is open in JupyterLab."""

    def __init__(self, visitor: Visitor, name: str, server: str) -> None:
        place = f"{visitor.user}/{server}".rstrip("/")
        workspace = f"{server}{name.removesuffix('.ipynb')}"
        self.seen = visitor.open(f"/user/{place}/lab/workspaces/{workspace}/tree/{name}?reset")
        self.page = self.seen.page
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=4 * SHOWN_MS)
        self.page.wait_for_selector("text=/Python 3 .* Idle/", timeout=2 * SHOWN_MS)
