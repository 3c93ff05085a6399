"""The tab Fragmentation in a real browser. It draws the memory of another kernel, and a click releases it."""

import sys
from pathlib import Path

import pytest

from gpu_runtime import Runtime
from gpu_runtime.units import MIB
from tests.browser.chromium import CHROMIUM, BrowserPage, running
from tests.clock import until
from tests.faces.served import OPERATORS, VIEWERS, environ, free_port, serving
from tests.stories.test_processes import DEVICES, Kernel

pytest.importorskip("playwright.sync_api")
CONSOLE = "from gpu_panels import server; server.run(port={port}, browser=False)"
# Five models of 3 MiB in a segment of 20 MiB, and 64 MiB of cache that is no longer in use.
WORK = (
    "; ".join(
        f"rt.register('a{n}', backend='fake', size='3MiB'); rt.preload('a{n}')" for n in range(5)
    )
    + "; rt.probe.place('sim:0').allocate(64 << 20).free()"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The directory of the ledger that all tests of this module share."""
    return tmp_path_factory.mktemp("console")


@pytest.fixture(scope="module")
def served(place):
    """A console in a process of its own."""
    port, tokens = (
        free_port(),
        {"GPU_CONSOLE_TOKEN": OPERATORS, "GPU_CONSOLE_VIEWER_TOKEN": VIEWERS},
    )
    with serving(
        [sys.executable, "-c", CONSOLE.format(port=port)], place, tokens, port=port
    ) as console:
        yield console


@pytest.fixture(scope="module")
def browser():
    if not Path(CHROMIUM).exists():
        pytest.skip("needs Debian's chromium")
    with running() as opened:
        yield opened


@pytest.fixture(scope="module")
def visitors(browser, served):
    """A function that opens the page of a visitor. Tests share it: loading takes five seconds of the processor."""
    made = {}

    def visitor(token: str) -> VisitorPage:
        if token not in made:
            made[token] = VisitorPage(browser, served, token)
        return made[token]

    return visitor


@pytest.fixture
def kernel(place):
    """Another notebook, which holds memory and has a cache."""
    one = Kernel(environ(place)["GPU_LEDGER"], DEVICES)
    assert one.tell(WORK) == "done"
    yield one
    one.end()


@pytest.fixture
def observer(place):
    """A runtime of the test itself, which shows the real state."""
    rt = Runtime(devices=DEVICES, ledger=environ(place)["GPU_LEDGER"])
    yield rt
    rt.close()


class VisitorPage(BrowserPage):
    """A visitor's page with the tab Fragmentation in front."""

    def __init__(self, browser, served, token: str) -> None:
        super().__init__(browser, f"http://127.0.0.1:{served.port}/?token={token}")
        self.page.get_by_role("tab", name="Fragmentation").click()

    @property
    def problems(self) -> list[str]:
        return [*self.errors, *self.elsewhere]

    def row(self, kernel: Kernel):
        return self.page.locator("tr", has_text=f"pid {kernel.process.pid}")

    def shows(self, kernel: Kernel, words: str) -> None:
        self.row(kernel).get_by_text(words, exact=True).first.wait_for()


def reserved_bytes(rt: Runtime) -> int:
    return sum(map.reserved_bytes for map in rt.allocator_maps())


def test_another_kernels_memory_is_drawn_without_errors(visitors, kernel):
    """The map is drawn in both themes, without a request to another host."""
    visitor = visitors(OPERATORS)
    visitor.shows(kernel, "84.0 MiB")
    visitor.page.locator("span", has_text="inactive, released by defrag").wait_for()
    kinds = visitor.page.locator("svg g path title").all_text_contents()
    assert any("allocated" in kind for kind in kinds)
    assert any("64.0 MiB inactive, released by defrag" in kind for kind in kinds)
    visitor.page.get_by_role("button", name="theme").click()
    visitor.page.wait_for_function(
        "getComputedStyle(document.body).backgroundColor === 'rgb(18, 18, 18)'"
    )
    visitor.shows(kernel, "84.0 MiB")
    assert visitor.problems == []


def test_cancel_changes_nothing_and_confirm_releases_the_cache(visitors, kernel, observer):
    """The other kernel itself releases its cache. The visitor's page shows the result, and so does another session."""
    asker, other = visitors(OPERATORS), visitors(VIEWERS)
    asker.shows(kernel, "84.0 MiB")
    other.shows(kernel, "84.0 MiB")
    for answer, after in (("Cancel", 84 * MIB), ("Compact", 20 * MIB)):
        asker.row(kernel).get_by_role("button", name="Compact").click()
        dialog = asker.page.get_by_role("dialog")
        dialog.get_by_text(f"Compact pid {kernel.process.pid}").wait_for()
        dialog.get_by_role("button", name=answer).click()
        dialog.wait_for(state="hidden")
        until(lambda after=after: reserved_bytes(observer) == after)
    for visitor in (asker, other):
        visitor.shows(kernel, "20.0 MiB")
        assert visitor.problems == []


def test_a_viewer_sees_the_map_and_no_button_that_acts(visitors, kernel):
    visitor = visitors(VIEWERS)
    visitor.shows(kernel, "84.0 MiB")
    assert visitor.row(kernel).get_by_role("button").all_inner_texts() == ["Map"]


def test_a_killed_kernel_disappears_and_an_empty_page_shows_what_to_do(visitors, kernel):
    visitor = visitors(VIEWERS)
    visitor.shows(kernel, "84.0 MiB")
    kernel.end()
    visitor.page.get_by_text("No process holds memory on a card yet").wait_for()
    visitor.page.locator("span", has_text="inactive, released by defrag").wait_for(state="detached")
