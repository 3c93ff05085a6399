"""GPU memory in the status bar and the side panel of a real JupyterLab.

All tests share one JupyterLab, one browser and two notebooks.
"""

import os
import re
import signal
import urllib.error
import urllib.request

import pytest

from gpu_runtime import Runtime
from tests.clock import PATIENCE

from .lab import TOKEN, LabNotebook, serving_lab

pytestmark = pytest.mark.timeout(300)

DEVICES = "sim:24GiB,host:64GiB"
LOAD = "%load_ext gpu\n%gpu load {} --backend fake --size {}"
HOLD = 'import time\nwith rt.use("qwen"):\n    while True:\n        time.sleep(0.1)'
WAIT = '%load_ext gpu\nrt.register("giant", backend="fake", size="20GiB")\nwith rt.use("giant"):\n    pass'
SECOND = "import os\nos.environ['GPU_LEDGER'] = 'keeper://{}'\n" + LOAD.format("bge", "3GiB")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def port(home):
    """The port of a JupyterLab with the extension, as it is after an installation."""
    notebooks = {
        "train.ipynb": [LOAD.format("qwen", "14GiB"), HOLD],
        "wait.ipynb": [WAIT],
        "other.ipynb": [SECOND.format(home / "second")],
    }
    with serving_lab(home, notebooks, GPU_DEVICES=DEVICES) as port:
        yield port


@pytest.fixture(scope="module")
def train(chromium, port):
    """The first notebook in a real browser, after its cell has loaded a model of 14 GiB."""
    notebook = LabNotebook(chromium, port, "train.ipynb")
    notebook.run(0)
    yield notebook
    notebook.close()


def status(notebook, text):
    """Waits until the status bar shows exactly this `text`."""
    shown = notebook.page.locator(".gpu-status", has_text=re.compile(f"^{re.escape(text)}$"))
    shown.wait_for()
    return shown


def test_the_status_bar_and_the_panel_show_what_the_notebook_loaded(train, home):
    """Their figures are those of the ledger."""
    status(train, "sim:0 14/22 GiB · simulated").click()
    panel = train.page.get_by_role("region", name="GPU memory")
    panel.get_by_role("heading", name="train.ipynb").wait_for()
    with Runtime(ledger=f"keeper://{home}/ledger", monitor=False) as rt:
        assert rt.status().devices[0].claimed_bytes == 14 << 30
    panel.get_by_text("14.0 of 21.6 GiB").wait_for()  # raises if there are two
    for name in ("Evict qwen: train.ipynb", "Open notebook: train.ipynb"):
        panel.get_by_role("button", name=name).wait_for()
    assert train.seen.errors == [] and train.seen.elsewhere == []


def test_evict_from_the_panel_asks_first_and_then_evicts(train):
    """In the question, the button Cancel has the focus, so Enter changes nothing."""
    page = train.page
    evict = page.get_by_role("button", name="Evict qwen: train.ipynb")
    evict.click()
    page.locator(".jp-Dialog").get_by_text("This frees 14.0 GiB on sim:0.").wait_for()
    page.keyboard.press("Enter")
    page.locator(".jp-Dialog").wait_for(state="detached")
    evict.click()
    page.get_by_role("button", name="Evict, freeing 14.0 GiB").click()
    page.locator(".gpu-panel [role=status]").get_by_text("✓ Evict qwen:").wait_for()
    page.get_by_role("button", name="Restore qwen: train.ipynb").wait_for()
    status(train, "sim:0 0/22 GiB · simulated")


def test_a_stopped_kernel_is_continued_from_the_panel(train, home):
    page = train.page
    restore = page.get_by_role("button", name="Restore qwen: train.ipynb")
    restore.click()
    page.locator(".jp-Dialog").get_by_role("button", name="Restore").click()
    status(train, "sim:0 14/22 GiB · simulated")
    with Runtime(ledger=f"keeper://{home}/ledger", monitor=False) as rt:
        [lease] = rt.status().leases()
        pid = int(lease.owner.partition(".")[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        panel = page.get_by_role("region", name="GPU memory")
        panel.get_by_text(f"train.ipynb (pid {pid}) is stopped and holds 14.0 GiB.").wait_for()
        status(train, "sim:0 14/22 GiB · simulated · 1 problem")
        interrupt = panel.get_by_role("button", name="Interrupt kernel: train.ipynb")
        assert interrupt.get_attribute("aria-disabled") == "true"
        panel.get_by_role("button", name="Continue").click()
        page.locator(".jp-Dialog").get_by_text("SIGCONT").wait_for()
        page.locator(".jp-Dialog").get_by_role("button", name="Continue").click()
        panel.get_by_text("runs again").wait_for()
        status(train, "sim:0 14/22 GiB · simulated")
    finally:
        os.kill(pid, signal.SIGCONT)
    page.get_by_role("button", name="Evict qwen: train.ipynb").click()
    page.get_by_role("button", name="Evict, freeing 14.0 GiB").click()
    status(train, "sim:0 0/22 GiB · simulated")


def open_and_run(notebook, path, text):
    """Opens the notebook `path` in the same page, and runs its cell that contains `text`."""
    notebook.command("docmanager:open", {"path": path})
    cell = notebook.page.locator(".jp-Notebook:visible .jp-CodeCell", has_text=text)
    cell.locator(".cm-content").click()
    notebook.page.wait_for_selector("text=/Python 3 .* Idle/")
    notebook.page.keyboard.press("Shift+Enter")
    return cell


def test_end_wait_ends_the_cell_of_another_notebook_with_an_error_that_names_the_person(train):
    """Before that the queue shows what waits, since when, and why. Interrupt ends the holder's cell."""
    page = train.page
    page.locator(".jp-CodeCell", has_text="while True").locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")
    page.locator(".gpu-panel").get_by_text("in use").wait_for()
    cell = open_and_run(train, "wait.ipynb", "giant")
    status(train, "sim:0 14/22 GiB · simulated · 1 waiting")
    panel = page.get_by_role("region", name="GPU memory")
    panel.get_by_text("wait.ipynb · qwen").wait_for()
    panel.get_by_role("button", name="End wait of giant: wait.ipynb").click()
    page.locator(".jp-Dialog").get_by_text("Its cell stops with an error").wait_for()
    page.locator(".jp-Dialog").get_by_role("button", name="End wait").click()
    panel.get_by_text("✓ End wait of giant:").wait_for()
    cell.locator(".jp-OutputArea-output", has_text="JupyterLab").first.wait_for()
    assert "ended the wait for giant" in cell.locator(".jp-OutputArea-output").last.inner_text()
    panel.get_by_role("button", name="Interrupt kernel: train.ipynb").click()
    page.locator(".jp-Dialog").get_by_role("button", name="Interrupt").click()
    panel.get_by_text("✓ Interrupt train.ipynb:").wait_for()
    panel.get_by_role("button", name="Evict qwen: train.ipynb").click()
    page.get_by_role("button", name="Evict, freeing 14.0 GiB").click()
    status(train, "sim:0 0/22 GiB · simulated")


def test_a_notebook_with_another_ledger_is_followed_and_says_so(train):
    """The tile's console would show the first ledger, where nothing of this notebook is."""
    open_and_run(train, "other.ipynb", "bge")
    status(train, "sim:0 3/22 GiB · simulated · 2 ledgers are active")
    train.page.locator(".gpu-panel").get_by_text("The GPU console shows keeper").wait_for()
    train.command("docmanager:open", {"path": "train.ipynb"})
    status(train, "sim:0 0/22 GiB · simulated")


def choose(notebook, **settings):
    """Writes the user's settings of the extension, as JupyterLab's editor of settings does."""
    notebook.page.evaluate(
        """async values => {
            const url = window.jupyterapp.serviceManager.settings
            await url.save('gpu-console:memory', JSON.stringify(values))
        }""",
        settings,
    )
    notebook.page.reload()
    notebook.page.locator(".jp-Notebook .jp-CodeCell:visible").first.wait_for()


def test_the_users_settings_choose_the_words_and_an_alert(train):
    """The alert is told once, and the item keeps its mark while the card is that full."""
    page = train.page
    page.get_by_role("button", name="Restore qwen: train.ipynb").click()
    page.locator(".jp-Dialog").get_by_role("button", name="Restore").click()
    status(train, "sim:0 14/22 GiB · simulated")
    choose(train, show="notebook", alertPercent=60)
    page.locator(".Toastify__toast", has_text="sim:0 is 65 % full").wait_for()  # for 20 s
    marked = status(train, "train.ipynb 14.0 GiB · simulated")
    page.locator(".gpu-status.gpu-problem").wait_for()
    assert "sim:0: 14.0 of 21.6 GiB" in marked.get_attribute("title")
    second = train.seen.context.new_page()  # it has polled when its item is marked
    second.goto(page.url)
    second.locator(".gpu-status.gpu-problem").wait_for()
    page.reload()
    page.locator(".gpu-status.gpu-problem").wait_for()
    assert not second.locator(".Toastify__toast").count() + page.locator(".Toastify__toast").count()
    second.close()
    choose(train, show="nothing")
    page.locator(".gpu-status").wait_for(state="hidden")
    choose(train)
    status(train, "sim:0 14/22 GiB · simulated")
    assert not page.locator(".gpu-status.gpu-problem").count()


def test_the_list_of_running_kernels_shows_what_each_holds(train):
    """In its view as a tree, and in that as a list."""
    train.command("running:show-panel")
    kernels = train.page.locator(".jp-RunningSessions .lm-AccordionPanel-title", has_text="Kernels")
    # JupyterLab 4.2 closes the sections when the page is loaded again
    if kernels.get_attribute("aria-expanded") == "false":
        kernels.locator(".lm-AccordionPanel-titleLabel").click()
    beside = train.page.locator(".jp-RunningSessions-itemDetail:visible")
    for _view in ("tree", "list", "tree"):  # whichever comes first
        beside.get_by_text("14.0 GiB", exact=True).wait_for()  # raises if there are two
        train.page.locator(".jp-RunningSessions-viewButton:visible").click()
    train.page.locator(".gpu-status").click()
    train.page.get_by_role("button", name="Evict qwen: train.ipynb").click()
    train.page.get_by_role("button", name="Evict, freeing 14.0 GiB").click()
    status(train, "sim:0 0/22 GiB · simulated")
    train.command("running:show-panel")
    beside.get_by_text("14.0 GiB in RAM").wait_for()


def test_no_token_is_in_the_page_and_none_is_needed_beside_jupyters(train, port):
    """The panel's own requests and answers contain no token. Without Jupyter's login there is no answer."""
    url = f"http://127.0.0.1:{port}/api/gpu-console/status"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, timeout=PATIENCE)
    assert refused.value.code == 403
    asked = urllib.request.Request(url, headers={"Authorization": f"token {TOKEN}"})
    answer = urllib.request.urlopen(asked, timeout=PATIENCE).read().decode()
    shown = (
        train.page.locator(".gpu-panel").inner_html()
        + train.page.locator(".gpu-status").inner_html()
    )
    assert '"status"' in answer and "gpu" in shown
    assert not any(word in answer + shown for word in (TOKEN, "token", "sqlite:", "://"))
