"""The figures of the console are those of the ledger, also if leases change while the page is drawn."""

from __future__ import annotations

import shutil
import sys

import pytest
from gpu_panels.data.device_words import room_words

from gpu_runtime import Runtime
from tests.faces.served import OPERATORS, free_port, serving
from tests.stories.test_processes import Kernel

from .chromium import CHROMIUM, SHOWN_MS, BrowserPage, running

pytest.importorskip("playwright")
pytestmark = pytest.mark.skipif(not shutil.which(CHROMIUM), reason="needs Chromium")

DEVICES = "sim:3x24GiB,host:64GiB"
CHURN = r"""
import random, threading, time

changes = threading.Event()

def churn():
    while True:
        changes.wait()
        verb = random.choice((rt.preload, rt.evict))
        try:
            verb(f"model{random.randrange(9)}")
        except Exception:
            pass  # it did not fit, or was evicted already
        time.sleep(0.05)

for n in range(9):
    rt.register(f"model{n}", backend="fake", size=f"{n % 6 + 1}GiB")
threading.Thread(target=churn, daemon=True).start()
"""
# The free memory of each device as its heading says it, and as its bar says it.
FIGURES = """() => {
  const heads = {}
  const collect = (root) => {
    for (const node of root.querySelectorAll("*")) {
      const free = node.classList.contains("head") && node.querySelector(".free")
      if (free) heads[node.querySelector(".name").textContent] = free.textContent
      if (node.shadowRoot) collect(node.shadowRoot)
    }
  }
  collect(document)
  const bars = []
  for (const doc of Bokeh.documents)
    for (const model of doc._all_models.values())
      for (const text of model.type === "ColumnDataSource" ? model.data.tooltip ?? [] : [])
        if (/ free; .* may be leased/.test(text)) bars.push(text.split(";")[0])
  return [heads, bars.sort()]
}"""


@pytest.fixture(scope="module")
def chromium():
    """Chromium, for all tests of this module."""
    with running() as browser:
        yield browser


def figures_of(rt) -> tuple[dict[str, str], list[str]]:
    """The free memory of each device by the ledger of `rt`, and the same words in order."""
    words = {view.device.id: room_words(view) for view in rt.status().devices}
    return words, sorted(words.values())


@pytest.mark.parametrize("loads", [4, pytest.param(50, marks=pytest.mark.soak)])
def test_every_heading_and_bar_shows_the_ledger_after_a_load_under_churn(chromium, tmp_path, loads):
    """Leases change from the request of the page until it is drawn. Then they rest.

    A change that was lost in between stayed wrong for good, because later snapshots were equal.
    """
    port, ledger = free_port(), f"sqlite://{tmp_path}/ledger"
    words = [sys.executable, "-m", "gpu_runtime.cli", "console", "--port", str(port)]
    environment = {"GPU_CONSOLE_TOKEN": OPERATORS, "GPU_DEVICES": DEVICES}
    kernel = Kernel(ledger, DEVICES)
    rt = Runtime(devices=DEVICES, ledger=ledger, monitor=False)
    try:
        assert kernel.tell(f"exec({CHURN!r}, globals())") == "done"
        with serving([*words, "--no-browser"], tmp_path, environment, port=port):
            for _ in range(loads):
                assert kernel.tell("changes.set()") == "done"
                seen = BrowserPage(chromium, f"http://127.0.0.1:{port}/?token={OPERATORS}").ready()
                assert kernel.tell("changes.clear(); time.sleep(0.5)") == "done"
                _compare(seen, rt)
                seen.close()
    finally:
        rt.close()
        kernel.end()


def _compare(seen: BrowserPage, rt) -> None:
    """Waits until the page shows the ledger's figures. Fails with both if it never does."""
    for _ in range(int(SHOWN_MS / 100)):
        shown, expected = tuple(seen.page.evaluate(FIGURES)), figures_of(rt)
        if shown == expected:
            break
        seen.page.wait_for_timeout(100)
    assert shown == expected
    assert seen.errors == []
