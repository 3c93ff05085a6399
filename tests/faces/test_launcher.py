"""The tile in JupyterLab's launcher: a click in a real JupyterLab opens the console, and strangers cannot open it."""

import http.client
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.browser.chromium import CHROMIUM, BrowserPage, running
from tests.clock import scaled
from tests.faces import served
from tests.faces.conftest import FOUND_BY_CHILDREN, ROOT
from tests.faces.served import free_port

JUPYTERS = "jupyters-token-0123456789"
GROUP = "jupyter_serverproxy_servers"


def as_installed(place: Path) -> Path:
    """Metadata that declares this checkout's entry points, and hides an installed version."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        GROUP
    ]
    folder = place / "installed" / "gpu_console-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: gpu-console\nVersion: 0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in declared.items())
    (folder / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}")
    return folder.parent


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory):
    """The port of a JupyterLab with the tile."""
    place, port = tmp_path_factory.mktemp("lab"), free_port()
    environ = served.environ(place) | {
        "PYTHONPATH": f"{as_installed(place)}:{FOUND_BY_CHILDREN}",
        "JUPYTER_TOKEN": JUPYTERS,
        "JUPYTER_CONFIG_DIR": str(place / "config"),
        "JUPYTER_RUNTIME_DIR": str(place / "runtime"),
        "HOME": str(place),
    }
    words = [
        sys.executable, "-m", "jupyterlab", "--no-browser", f"--port={port}",
        "--ServerApp.port_retries=0", f"--ServerApp.root_dir={place}", "--allow-root",
        "--ip=127.0.0.1",
    ]  # fmt: skip
    said = place / "said.txt"
    with said.open("wb") as out:
        process = subprocess.Popen(
            words, env=environ, cwd=place, stdout=out, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + scaled(90)
        while get(port, "/api", Authorization=f"token {JUPYTERS}")[0] != 200:
            assert time.monotonic() < until and process.poll() is None, said.read_text()
            time.sleep(0.2)  # there is no other way to know that another process listens
        yield port
    finally:
        served.end(process)


def get(port, path, **headers):
    """The status and the body of the answer. The status is 0 if there is no answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=scaled(90))
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")
    except OSError:
        return 0, ""
    finally:
        connection.close()


def test_the_launcher_has_a_tile_with_title_and_icon(jupyter):
    status, body = get(jupyter, "/server-proxy/servers-info", Authorization=f"token {JUPYTERS}")
    (tile,) = [one for one in json.loads(body)["server_processes"] if one["name"] == "gpu-console"]
    assert (status, tile["launcher_entry"]["title"], tile["new_browser_tab"]) == (
        200,
        "GPU console",
        False,
    )
    status, icon = get(jupyter, "/server-proxy/icon/gpu-console", Authorization=f"token {JUPYTERS}")
    assert status == 200 and icon.startswith("<svg")


def test_jupyters_token_guards_the_console(jupyter):
    status, body = get(jupyter, "/gpu-console/")
    assert status in (302, 403) and "GPU console" not in body
    status, body = get(jupyter, "/gpu-console/", Authorization=f"token {JUPYTERS}")
    assert status == 200 and '"token":' in body and JUPYTERS not in body


def test_the_tile_opens_the_console_in_a_tab_of_jupyterlab(jupyter):
    """In a real browser the page is drawn, and its websocket opens through Jupyter's proxy."""
    pytest.importorskip("playwright.sync_api")
    if not Path(CHROMIUM).exists():
        pytest.skip("needs Debian's chromium")
    with running() as browser:
        seen = BrowserPage(browser, f"http://127.0.0.1:{jupyter}/lab?token={JUPYTERS}")
        page, sockets = seen.page, []
        page.on("websocket", lambda socket: sockets.append(socket.url))
        tile = page.locator(".jp-LauncherCard", has_text="GPU console")
        tile.wait_for()
        shown = "image => image.decode().then(() => image.naturalWidth)"  # waits for the picture
        assert tile.locator("img").evaluate(shown) > 0
        tile.click()
        frame = page.frame_locator("iframe[src*='gpu-console']")
        frame.get_by_text("simulated").first.wait_for()  # in the status bar
        assert any("/gpu-console/ws" in url for url in sockets) and seen.elsewhere == []
        # The console follows Lab's theme.
        shade = "parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
        for is_light, bounds in (("false", "< 90"), ("true", "> 200")):
            page.evaluate("light => { document.body.dataset.jpThemeLight = light }", is_light)
            inside = next(one for one in page.frames if "/gpu-console/" in one.url)
            inside.wait_for_function(f"{shade} {bounds}")
