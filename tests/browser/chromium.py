"""A real browser for tests. It records the errors of its pages."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.clock import PATIENCE

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
WIDE = {"width": 1280, "height": 900}
SHOWN_MS = 1000 * PATIENCE  # how long anything may take to be visible


@contextmanager
def running() -> Iterator[object]:
    """A block with a running Chromium, which is closed at the end of the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"]
        )
        try:
            yield browser
        finally:
            browser.close()


class BrowserPage:
    """A page of the browser. It records the page's errors, and the requests to hosts other than its server."""

    def __init__(self, browser, url: str, levels: tuple[str, ...] = ("error",), **context) -> None:
        """`levels` are the kinds of the console's messages that count as errors."""
        self.context = browser.new_context(**{"viewport": WIDE, **context})
        self.page = self.context.new_page()
        self.page.set_default_timeout(SHOWN_MS)
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        host = urlsplit(url).netloc
        self.page.on(
            "console",
            lambda message: self.errors.append(message.text) if message.type in levels else None,
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self._note(request.url, host))
        self.page.on("websocket", lambda socket: self._note(socket.url, host))
        self.page.goto(url)

    def _note(self, url: str, host: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob") and parts.netloc != host:
            self.elsewhere.append(url)

    def close(self) -> None:
        self.context.close()

    # -- the console

    def draws(self) -> bool:
        """Whether the browser draws frames of this page. Without frames it cannot be clicked."""
        self.page.bring_to_front()  # a page behind another one may get none
        return self.page.evaluate(
            "(limit) => Promise.race([new Promise((draws) => requestAnimationFrame(() => draws(true))), "
            "new Promise((draws) => setTimeout(() => draws(false), limit))])",
            SHOWN_MS / 4,
        )

    def ready(self) -> BrowserPage:
        """Waits until the page shows figures."""
        self.page.wait_for_selector("text=/as of \\d/")
        return self

    def tab(self, title: str) -> None:
        self.page.click(f"[role=tab]:has-text('{title}')")

    def row(self, *words: str):
        """The table row that contains these `words`."""
        found = self.page.locator("tbody tr:not(.detail)")
        for word in words:
            found = found.filter(has_text=re.compile(word))
        return found

    def focused(self) -> str:
        """The text of the element that has the focus. The element may be inside a shadow root."""
        return self.page.evaluate(
            "() => { let one = document.activeElement; "
            "while (one && one.shadowRoot && one.shadowRoot.activeElement) one = one.shadowRoot.activeElement; "
            "return one ? one.textContent : '' }"
        )


AXE = """async () => {
  const found = await axe.run(document, {resultTypes: ["violations"]})
  return found.violations.filter(({impact}) => ["serious", "critical"].includes(impact))
    .map(({id, nodes}) => [id, ...nodes.map(({html}) => html.slice(0, 200))])
}"""


def serious(page: Any) -> list[Any]:
    """What axe-core finds on the `page` that is serious or critical, and stays for a moment: styles may come late."""
    axe = pytest.importorskip("axe_playwright_python", reason="needs the test extra")
    page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text())
    page.mouse.move(0, 0)  # a tooltip that fades out has no contrast
    page.locator("[role=tooltip]").first.wait_for(state="detached")
    end = time.monotonic() + PATIENCE / 6
    while (found := page.evaluate(AXE)) and time.monotonic() < end:
        page.wait_for_timeout(100)
    return found
