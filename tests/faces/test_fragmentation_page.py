"""The tab Fragmentation in a real browser: another kernel's memory, drawn, and given back at a click."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from gpu_runtime import Runtime
from gpu_runtime.units import MIB
from tests.faces.served import OPERATORS, VIEWERS, environ, free_port, serving
from tests.stories.test_processes import DEVICES, Kernel

playwright = pytest.importorskip("playwright.sync_api")
CONSOLE = "from gpu_panels import server; server.run(port={port}, browser=False)"
# Five models of 3 MiB in a segment of 20 MiB, and 64 MiB that code has used and is done with.
WORK = (
    "; ".join(
        f"rt.register('a{n}', backend='fake', size='3MiB'); rt.preload('a{n}')" for n in range(5)
    )
    + "; rt.probe.place('sim:0').allocate(64 << 20).free()"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("console")


@pytest.fixture(scope="module")
def served(place):
    """A console of its own process."""
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
    if not Path("/usr/bin/chromium").exists():
        pytest.skip("needs Debian's chromium")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(
            executable_path="/usr/bin/chromium",
            args=["--no-sandbox", "--disable-background-networking"],
        )
        yield opened
        opened.close()


@pytest.fixture
def kernel(place):
    """Another notebook, that holds memory and a cache."""
    one = Kernel(environ(place)["GPU_LEDGER"], DEVICES)
    assert one.tell(WORK) == "done"
    yield one
    one.end()


@pytest.fixture
def here(place):
    """An onlooker, by whose account things are as they are."""
    rt = Runtime(devices=DEVICES, ledger=environ(place)["GPU_LEDGER"])
    yield rt
    rt.close()


class Page:
    """A visitor at the tab, and what the browser complained of or asked of others."""

    def __init__(self, browser, served, token: str) -> None:
        self.page = browser.new_page(viewport={"width": 1280, "height": 900})
        self.amiss: list[str] = []
        ours = f"127.0.0.1:{served.port}"
        self.page.on(
            "console",
            lambda said: (
                self.amiss.append(said.text) if said.type in ("error", "warning") else None
            ),
        )
        self.page.on("pageerror", lambda error: self.amiss.append(str(error)))
        self.page.on(
            "request",
            lambda asked: (
                self.amiss.append(asked.url)
                if asked.url.startswith(("http", "ws")) and ours not in asked.url
                else None
            ),
        )
        self.page.goto(f"http://{ours}/?token={token}")
        self.page.get_by_role("tab", name="Fragmentation").click(timeout=60_000)

    def row(self, kernel: Kernel):
        return self.page.locator("tr", has_text=f"pid {kernel.process.pid}")

    def sees(self, kernel: Kernel, words: str) -> None:
        self.row(kernel).get_by_text(words, exact=True).first.wait_for(timeout=30_000)


def reserved(rt: Runtime) -> int:
    return sum(map.reserved_bytes for map in rt.allocator_maps())


def until(true) -> bool:
    deadline = time.monotonic() + 20
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


def test_another_kernels_memory_is_drawn_with_nothing_amiss(browser, served, kernel):
    """In both themes, with no complaint of the browser's and no request to anybody else."""
    visitor = Page(browser, served, OPERATORS)
    visitor.sees(kernel, "84.0 MiB")
    visitor.page.get_by_text("inactive, released by defrag").wait_for(timeout=30_000)
    assert visitor.page.locator("canvas").count() >= 1
    visitor.page.get_by_role("button", name="theme").click()
    visitor.page.wait_for_function(
        "getComputedStyle(document.body).backgroundColor === 'rgb(18, 18, 18)'"
    )
    visitor.sees(kernel, "84.0 MiB")
    assert visitor.amiss == []
    visitor.page.close()


def test_cancel_changes_nothing_and_confirm_gives_the_cache_back(browser, served, kernel, here):
    """Its own kernel does it; the page that asked shows it, and so does another session."""
    asker, other = Page(browser, served, OPERATORS), Page(browser, served, VIEWERS)
    asker.sees(kernel, "84.0 MiB")
    other.sees(kernel, "84.0 MiB")
    for answer, after in (("Cancel", 84 * MIB), ("Defragment", 20 * MIB)):
        asker.row(kernel).get_by_role("button", name="Defragment").click()
        dialog = asker.page.get_by_role("dialog")
        dialog.get_by_text(f"Defragment pid {kernel.process.pid}").wait_for(timeout=20_000)
        dialog.get_by_role("button", name=answer).click()
        dialog.wait_for(state="hidden", timeout=20_000)
        assert until(lambda after=after: reserved(here) == after)
    for visitor in (asker, other):
        visitor.sees(kernel, "20.0 MiB")
        assert visitor.amiss == []
        visitor.page.close()


def test_a_viewer_sees_the_map_and_no_button_that_acts(browser, served, kernel):
    visitor = Page(browser, served, VIEWERS)
    visitor.sees(kernel, "84.0 MiB")
    assert visitor.row(kernel).get_by_role("button").all_inner_texts() == ["Map"]
    visitor.page.close()


def test_a_killed_kernel_disappears_and_an_empty_page_says_what_to_do(browser, served, kernel):
    visitor = Page(browser, served, VIEWERS)
    visitor.sees(kernel, "84.0 MiB")
    kernel.end()
    visitor.page.get_by_text("No process holds memory on a card yet").wait_for(timeout=30_000)
    visitor.page.get_by_text("inactive, released by defrag").wait_for(
        state="detached", timeout=10_000
    )
    visitor.page.close()
