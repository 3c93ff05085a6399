"""The figures of the console are those of the ledger, also if leases change while the page is drawn."""

import contextlib

import pytest
from gpu_panels.data.devices import bars, room_words

from gpu_runtime import Runtime
from gpu_runtime.units import show_bytes
from tests.clock import until
from tests.faces.served import OPERATORS, gpu_console
from tests.stories.kernels import Kernel

from .chromium import BrowserPage

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
# The free memory of each device as its row says it, and the bytes of all leases in its bar.
FIGURES = """() => {
  const seen = {}
  const collect = (root) => {
    for (const node of root.querySelectorAll("*")) {
      if (node.getAttribute("role") === "listitem" && node.querySelector(".free b")) {
        const names = [...node.querySelectorAll(".part")].map((part) => part.getAttribute("aria-label"))
        const parts = names.map((name) => name.split(", ").slice(0, 2).join(" "))
        seen[node.querySelector(".name b").textContent] = [node.querySelector(".free b").textContent, parts.sort()]
      }
      if (node.shadowRoot) collect(node.shadowRoot)
    }
  }
  collect(document)
  return seen
}"""


def figures_of(rt) -> dict[str, list]:
    """The free memory and the leases of each device, from the ledger of `rt`, in the words of the console's page."""
    snapshot = rt.status()
    return {
        "RAM" if bar.device.is_host else bar.device.id: [
            room_words(view),
            sorted(f"{one.title} · {one.notebook} {show_bytes(one.bytes)}" for one in bar.segments),
        ]
        for view, bar in zip(snapshot.devices, bars(snapshot), strict=True)
    }


@pytest.mark.parametrize("loads", [4, pytest.param(50, marks=pytest.mark.soak)])
def test_every_row_and_bar_shows_the_ledger_after_a_load_under_churn(chromium, tmp_path, loads):
    """A change between the request of the page and its drawing was lost for ever."""
    ledger = f"keeper://{tmp_path}/ledger"
    kernel = Kernel(ledger, DEVICES)
    rt = Runtime(devices=DEVICES, ledger=ledger, monitor=False)
    try:
        assert kernel.run(f"exec({CHURN!r}, globals())") == "done"
        with gpu_console(tmp_path, GPU_DEVICES=DEVICES) as console:
            url = f"http://127.0.0.1:{console.port}/?token={OPERATORS}"
            for _ in range(loads):
                assert kernel.run("changes.set()") == "done"
                seen = BrowserPage(chromium, url).ready()
                assert kernel.run("changes.clear(); time.sleep(0.5)") == "done"
                _compare(seen, rt)
                seen.close()
    finally:
        rt.close()
        kernel.end()


def _compare(seen: BrowserPage, rt) -> None:
    """Waits until the page shows the ledger's figures. Fails with both if it never does."""
    with contextlib.suppress(AssertionError):
        until(lambda: seen.page.evaluate(FIGURES) == figures_of(rt))
    assert seen.page.evaluate(FIGURES) == figures_of(rt)
    assert seen.errors == []
