"""The console in a notebook, opened in a real JupyterLab in Chromium.

The console is live, its buttons act, it adds little to the notebook's file, and it is no use of the notebook.
"""

import json
import time

import ipykernel
import pytest

from gpu_runtime import Runtime
from gpu_runtime.facts import HOST, Lease
from tests.clock import PATIENCE, until

from .chromium import SHOWN_MS, BrowserPage
from .lab import TOKEN, serving_lab

pytestmark = pytest.mark.timeout(300)

DEVICES = "sim:24GiB,host:64GiB"
CELLS = (
    "%load_ext gpu\nimport torch\nx = torch.ones(5_000_000)\n%gpu load qwen --backend fake --size 8GiB",
    "%gpu console",
    "import time\nfor _ in range(36_000):\n    time.sleep(0.1)  # a long cell",
)


@pytest.fixture(scope="module")
def lab(chromium, tmp_path_factory):
    """A JupyterLab on loopback, with the notebook open in Chromium."""
    home = tmp_path_factory.mktemp("lab")
    with (
        serving_lab(home, {"console.ipynb": CELLS}, GPU_DEVICES=DEVICES) as port,
        Runtime(devices=DEVICES, ledger=f"keeper://{home}/ledger", monitor=False) as rt,
    ):
        seen = BrowserPage(
            chromium, f"http://127.0.0.1:{port}/lab/tree/console.ipynb?token={TOKEN}"
        )
        seen.notebook, seen.rt = home / "work" / "console.ipynb", rt
        yield seen
        seen.close()


def run_next(lab):
    lab.page.keyboard.press("Shift+Enter")


@pytest.fixture(scope="module")
def live(lab):
    """The console, shown by `%gpu console`."""
    page = lab.page
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=2 * SHOWN_MS)
    page.wait_for_selector("text=/Python 3 .* Idle/", timeout=2 * SHOWN_MS)
    page.click(".jp-Notebook .jp-CodeCell >> nth=0 >> .cm-content")
    run_next(lab)
    page.wait_for_selector("text=qwen is on sim:0", timeout=2 * SHOWN_MS)
    run_next(lab)
    page.wait_for_selector("text=/as of \\d/", timeout=2 * SHOWN_MS)
    return lab


def see_updates(page, number: int) -> None:
    """Waits until the page has shown as many times of update."""
    fresh, seen = page.locator("text=/as of \\d/").first, set()
    until(lambda: seen.add(fresh.inner_text()) or len(seen) >= number)


def test_the_page_is_live_and_a_click_acts(live):
    live.tab("Models")
    live.row("qwen", "sim:0").locator("button", has_text="Evict").click()
    live.page.locator("button", has_text="Evict, freeing 8.0 GiB").click()
    live.page.locator(".outcome.done", has_text="evict qwen").wait_for()  # it is shown for 20 s
    live.row("qwen", "RAM").wait_for()


def test_an_open_console_is_no_use_of_the_notebook(live):
    """Its page sends a message a second. It can also be opened again without the memory."""

    def memory() -> Lease:
        (found,) = (lease for lease in live.rt.status().leases() if lease.kind == "kernel")
        return found

    last_used = memory().last_used
    see_updates(live.page, 4)
    assert memory().last_used == last_used
    live.rt.park("console.ipynb")
    see_updates(live.page, 4)
    assert memory().where == HOST
    live.page.click(".jp-Notebook .jp-CodeCell >> nth=1 >> .cm-content")
    run_next(live)
    live.page.locator(".jp-InputPrompt", has_text="[3]:").wait_for()
    see_updates(live.page, 4)
    assert memory().where == HOST


def test_no_request_goes_to_another_host(live):
    """Panel's scripts and styles are sent by the kernel, also when the page changes later."""
    for title in ("Now", "Leases", "Timeline", "Fragmentation", "What if", "Models"):
        live.tab(title)
        live.page.wait_for_selector(f"[role=tab][aria-selected=true]:has-text('{title}')")
    live.row("qwen", "RAM").wait_for()
    assert live.elsewhere == []
    assert not live.page.locator("text=could not be drawn").count()


def test_the_notebooks_file_stays_small_and_holds_a_picture(live):
    """The saved file is smaller than 1 MiB. A reader without a kernel sees the last state of the console."""
    live.page.keyboard.press("Escape")
    live.page.click(".jp-Notebook .jp-CodeCell >> nth=0 >> .jp-InputPrompt")
    end = time.monotonic() + PATIENCE
    while True:
        live.page.keyboard.press("Control+s")
        live.page.wait_for_timeout(500)
        text = live.notebook.read_text()
        if "data-gpuc" in text and len(text) < 2**20 or time.monotonic() > end:
            break
    assert len(text) < 2**20, f"{len(text):,} bytes"
    (output,) = (
        output for output in json.loads(text)["cells"][1]["outputs"] if "data-gpuc" in str(output)
    )
    html = "".join(output["data"]["text/html"])
    assert "1 simulated GPU" in html and "qwen" in "".join(output["data"]["text/plain"])


def test_in_a_narrow_window_the_page_stays_inside_its_output(live):
    """The tabs lay at the bottom of the browser's window, and the right part of each row was cut off."""
    page = live.page
    live.tab("Now")
    page.locator(".rack .row b", has_text="sim:0").wait_for()
    wide = page.viewport_size
    page.set_viewport_size({"width": 680, "height": 900})
    output = page.locator(".jp-Notebook .jp-CodeCell").nth(1).locator(".jp-OutputArea-output").last
    parts = {
        "tabs": page.locator(".MuiTabs-root"),
        "more": page.get_by_role("button", name="sim:0: all that it holds"),
        "age": page.locator("text=/as of \\d/").first,
    }

    def inside():
        around = output.bounding_box()
        found = {}
        for name, part in parts.items():
            box = part.bounding_box()
            right, bottom = around["x"] + around["width"], around["y"] + around["height"]
            found[name] = (
                box["x"] + box["width"] <= right + 1 and box["y"] + box["height"] <= bottom + 1
            )
        return found

    try:
        until(lambda: all(inside().values()))
        assert all(inside().values()), inside()
    finally:
        page.set_viewport_size(wide)
        live.tab("Models")  # for the next tests


def test_the_page_is_updated_while_a_long_cell_runs(live):
    page = live.page
    page.click(".jp-Notebook .jp-CodeCell >> nth=2 >> .cm-content")
    run_next(live)
    page.locator(".jp-InputPrompt", has_text="[*]:").wait_for()
    see_updates(page, 3)
    assert "[*]:" in page.locator(".jp-InputPrompt").all_inner_texts()


@pytest.mark.skipif(
    int(ipykernel.__version__.split(".")[0]) < 7, reason="needs the subshells of ipykernel 7"
)
def test_a_click_acts_while_a_long_cell_runs(live):
    live.tab("Models")
    live.row("qwen", "RAM").locator("button", has_text="Restore").click()
    live.page.locator("[role=dialog] button", has_text="Restore").click()
    live.row("qwen", "sim:0").wait_for()
    assert "[*]:" in live.page.locator(".jp-InputPrompt").all_inner_texts(), "the cell still runs"
    assert live.errors == []
