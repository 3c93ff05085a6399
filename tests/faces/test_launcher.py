"""The tile in JupyterLab's launcher: a click in a real JupyterLab opens the console, and strangers cannot open it."""

import http.client
import json
from pathlib import Path

import pytest
import tomllib

from tests.browser.chromium import CHROMIUM, BrowserPage, running
from tests.browser.lab import TOKEN, serving_lab
from tests.clock import PATIENCE
from tests.faces.conftest import FOUND_BY_CHILDREN, ROOT

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
    place = tmp_path_factory.mktemp("lab")
    found = f"{as_installed(place)}:{FOUND_BY_CHILDREN}"
    with serving_lab(place, {}, PYTHONPATH=found, GPU_DEVICES="sim:24GiB,host:64GiB") as port:
        yield port


def get(port, path, token=TOKEN):
    """The status and the body of the answer."""
    headers = {"Authorization": f"token {token}"} if token else {}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")
    finally:
        connection.close()


def test_the_launcher_has_a_tile_with_title_and_icon(jupyter):
    _, body = get(jupyter, "/server-proxy/servers-info")
    (tile,) = [one for one in json.loads(body)["server_processes"] if one["name"] == "gpu-console"]
    assert (tile["launcher_entry"]["title"], tile["new_browser_tab"]) == ("GPU console", False)
    status, icon = get(jupyter, "/server-proxy/icon/gpu-console")
    assert status == 200 and icon.startswith("<svg")


def test_jupyters_token_guards_the_console(jupyter):
    status, body = get(jupyter, "/gpu-console/", token="")
    assert status in (302, 403) and "GPU console" not in body
    status, body = get(jupyter, "/gpu-console/")
    assert status == 200 and '"token":' in body and TOKEN not in body


def test_the_tile_opens_the_console_in_a_tab_of_jupyterlab(jupyter):
    """In a real browser the page is drawn, and its websocket opens through Jupyter's proxy."""
    pytest.importorskip("playwright.sync_api")
    if not Path(CHROMIUM).exists():
        pytest.skip("needs Debian's chromium")
    with running() as browser:
        seen = BrowserPage(browser, f"http://127.0.0.1:{jupyter}/lab?token={TOKEN}")
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
