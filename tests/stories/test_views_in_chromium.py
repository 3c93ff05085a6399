"""The views of the console in a real browser: themes, tooltips, zoom, filters, files, the viewer's time zone."""

import os
import sys
from contextlib import contextmanager

import pytest

from tests.clock import until

from ..browser.chromium import CHROMIUM, BrowserPage, running, serious
from ..faces import pasts
from ..faces.served import OPERATORS, free_port, serving

pytestmark = [
    pytest.mark.skipif(not os.path.exists(CHROMIUM), reason="no chromium on this machine"),
    pytest.mark.timeout(300),
]

SCRIPT = """
import asyncio, sys
from msgspec.structs import replace
from gpu_panels import console, poller, server
from gpu_runtime.facts import Event
from gpu_runtime.units import GIB
from tests.faces import pasts, samples
from tests.faces.polling import FixedRuntime
from gpu_runtime.serving.api.openai import Jobs
from gpu_runtime.serving.breaker import BreakerState
from gpu_runtime.serving.records import served
from tests.serving.harness import chat, harness

day = pasts.day(busy=1.5)
decisions = tuple(Event(n, samples.WALL - 100 * n, f"model-{n}", ("granted", "waiting", "refused")[n % 3], "request",
                        "sim:0 has room", n * GIB, "sim:0", samples.ME.id, runners_up=("sim:1: too full",))
                  for n in range(30))
rt = FixedRuntime(samples.busy, history=lambda seconds, points=600: replace(
              day, moments=tuple(m for m in day.moments if m.wall >= samples.WALL - seconds), seconds=seconds),
          decisions=lambda limit: decisions, plan=lambda words: samples.fits,
          allocator_maps=lambda maps=(samples.scattered(),): maps)
if "serving" in sys.argv:  # as in `gpu serve`
    async def called():
        async with harness(qwen=4, scripts={"qwen": []}) as k:
            await k.gateway.answer("chat", chat("qwen", "hi", x_client_id="bot"), "ann")
            return served(k.gateway, Jobs(), 100.0)

    figures = asyncio.run(called())
    breakers = {"llama": BreakerState("open", 5, 30.0, "CUDA error")}
    figures = replace(figures, state=replace(figures.state, breakers=breakers, waiting={"phi": 3}))
    kept = poller.of(rt)
    kept.serving = lambda: figures
server.run(port=int(sys.argv[1]), browser=False, page=lambda visitor: console.page(visitor, poller.of(rt)))
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("views"), free_port()
    (folder / "views.py").write_text(SCRIPT)
    words = [sys.executable, str(folder / "views.py"), str(port), "serving"]
    with (
        serving(words, folder, {"GPU_CONSOLE_TOKEN": OPERATORS}, port=port),
        running() as browser,
    ):
        yield Pages(browser, f"http://127.0.0.1:{port}/?token={OPERATORS}")


class Pages:
    """The pages of this module, by their contexts; shared, since loading one takes five seconds."""

    def __init__(self, browser, url) -> None:
        self._browser, self._url = browser, url
        self._made: dict[str, BrowserPage] = {}

    @contextmanager
    def at(self, tab, **context):
        """A page with this tab in front. Fails at the end if it had errors or sent requests to other hosts."""
        key = str(context)
        if key not in self._made:
            made = BrowserPage(self._browser, self._url, ("error", "warning"), **context)
            self._made[key] = made.ready()
        seen = self._made[key]
        seen.page.get_by_role("tab", name=tab, exact=True).click()
        yield seen.page
        assert (seen.errors, seen.elsewhere) == ([], [])


SHOWN = {
    "Now": "18.0 of 21.6 GiB held",
    "Fragmentation": "reserved are allocated",
    "Timeline": "since this machine started",
    "What if": "Choose a model, or type a size such as",
    "Serving": "open, tried again in 30 s: CUDA error",
}


# The theme that the page's background and its scroll bars have, once they have the same and it is not the theme `was`.
THEME = """(was) => {
  const {backgroundColor} = getComputedStyle(document.body), {colorScheme} = getComputedStyle(document.documentElement)
  const theme = {"rgb(255, 255, 255)": "light", "rgb(18, 18, 18)": "dark"}[backgroundColor]
  return theme !== was && theme === colorScheme && theme
}"""


@pytest.mark.parametrize("tab", SHOWN)
def test_each_view_is_drawn_in_both_themes(pages, tab):
    with pages.at(tab) as page:
        page.get_by_text(SHOWN[tab]).first.wait_for()
        was = page.wait_for_function(THEME).json_value()
        page.get_by_label("Toggle theme").click()
        page.wait_for_function(THEME, arg=was)
        page.get_by_text(SHOWN[tab]).first.wait_for()


PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.mark.parametrize("context", [{}, PHONE], ids=["laptop", "phone"])
def test_the_figures_of_serving_fit_and_are_accessible(pages, context):
    """The other tabs are checked on the page of a real server, in tests/browser/test_served.py."""
    with pages.at("Serving", **context) as page:
        page.get_by_text(SHOWN["Serving"]).wait_for()
        page.wait_for_function("document.documentElement.scrollWidth <= innerWidth")
        assert serious(page) == []


def test_the_menu_of_a_lease_shows_its_process_and_returns_the_focus(pages):
    """A part of a bar is a button with a name. Escape closes its menu and returns the focus."""
    with pages.at("Now") as page:
        part = page.get_by_role("button", name="qwen · train.ipynb, 14.0 GiB")
        part.click()
        menu = page.get_by_role("dialog", name="qwen · train.ipynb")
        menu.get_by_text("held by train.ipynb (pid 4000), ann").wait_for()
        assert menu.get_by_role("button", name="Evict").is_disabled()
        page.keyboard.press("Escape")
        menu.wait_for(state="detached")
        until(lambda: part.evaluate("(node) => node.getRootNode().activeElement === node"))


def test_eight_cards_fit_on_a_laptop(pages):
    """Rows have 44 pixels. The bars of the two devices here begin and end at the same place."""
    with pages.at("Now") as page:
        page.get_by_text("18.0 of 21.6 GiB held").wait_for()
        boxes = "all => all.map(one => one.getBoundingClientRect()).map(({x, width, height}) => [x, width, height])"
        rows, bars = page.get_by_role("listitem"), page.get_by_role("group")
        until(lambda: [height for _, _, height in rows.evaluate_all(boxes)] == [44, 44])
        until(lambda: len({(x, width) for x, width, _ in bars.evaluate_all(boxes)}) == 1)


# The devices whose name and longest level do not fit into their cell, or are higher than their row.
CUT = """() => {
  const found = []
  const collect = (root) => {
    for (const level of root.querySelectorAll(".level:not(:empty)")) {
      level.textContent = "MODERATE"
      const name = level.parentNode
      const is_high = name.scrollHeight > name.parentNode.clientHeight
      if (name.scrollWidth > name.clientWidth || is_high) found.push(name.textContent)
    }
    for (const node of root.querySelectorAll("*")) if (node.shadowRoot) collect(node.shadowRoot)
  }
  collect(document)
  return found
}"""


@pytest.mark.parametrize("width", [1200, 800, 660])
def test_a_device_and_its_level_fit_into_one_row(pages, width):
    """`sim:0 after` with its level took two lines, and the size below was over the next device."""
    with pages.at("Now", viewport={"width": width, "height": 900}) as page:
        page.get_by_text("18.0 of 21.6 GiB held").wait_for()
        until(lambda: page.evaluate(CUT) == [])  # its style may come a moment later
    with pages.at("What if", viewport={"width": width, "height": 900}) as page:
        page.get_by_label("or a size, such as 14 GiB").fill("12 GiB")
        page.keyboard.press("Enter")
        page.get_by_text("sim:0 after").wait_for()
        until(lambda: page.evaluate(CUT) == [])


def test_times_are_shown_in_the_viewers_time_zone(pages):
    with pages.at("Timeline", timezone_id="Asia/Kolkata", locale="en-GB") as page:
        page.get_by_text("17:32:08").first.wait_for()


def test_the_events_of_the_range_can_be_saved(pages):
    day = pasts.day(busy=1.5)
    with pages.at("Timeline") as page:
        page.get_by_role("button", name="24 h").click()
        page.get_by_text("bge · ").first.wait_for()
        with page.expect_download() as saved:
            page.get_by_text("Save as CSV").click()
        lines = saved.value.path().read_text().splitlines()
    own = 4  # events of the snapshot, which the journal here does not have
    assert lines[0].startswith("time,model,action") and len(lines) == len(day.events) + own + 1


def test_a_plan_is_shown_and_drawn(pages):
    with pages.at("What if") as page:
        page.get_by_label("or a size, such as 14 GiB").fill("12 GiB")
        page.keyboard.press("Enter")
        page.get_by_text("gemma fits once 1 other is evicted").wait_for()
        page.get_by_text("Would be evicted").wait_for()
        page.get_by_text("sim:0 after").wait_for()
        font = "(node) => getComputedStyle(node).fontFamily"
        fonts = [one.evaluate(font) for one in page.locator(".prose, .prose .gpuc").all()]
        assert len(set(fonts)) == 1, "the steps have the font of the page"
        page.get_by_label("or a size, such as 14 GiB").fill("14 Gob")
        page.keyboard.press("Enter")
        page.get_by_text("'14 Gob' is not a size").wait_for()
