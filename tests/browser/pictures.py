"""Takes the pictures of the README and the runbooks: `python -m tests.browser.pictures`.

The page is the real one, in a real Chromium, in both themes. Its data is made up, so that every run
gives the same pictures.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.faces.served import OPERATORS, free_port, serving
from tests.stories.test_views_in_chromium import SCRIPT

from .chromium import BrowserPage, running

IMAGES = Path(__file__).parents[2] / "notebooks" / "images"
SETTLED_MS = 2500  # until animations have ended and the first history is drawn


def now(seen: BrowserPage) -> None:
    """Shows the last 24 hours of the tab Now."""
    seen.page.get_by_role("button", name="24 h").click()
    seen.page.get_by_text("qwen ·").first.wait_for()


def evict(seen: BrowserPage) -> None:
    """Opens the dialog of an eviction."""
    seen.tab("Models")
    seen.row("reranker").locator("button", has_text="Evict").first.click()
    seen.page.locator("[role=dialog]").get_by_text("frees").first.wait_for()


PICTURES = {
    "console_now": (now, 790),
    "console_evict": (evict, 560),
}  # file -> preparation, height in pixels


def main() -> None:
    """Takes every picture in both themes."""
    with tempfile.TemporaryDirectory() as directory, running() as browser:
        place, port = Path(directory), free_port()
        (place / "views.py").write_text(SCRIPT)
        words = [sys.executable, str(place / "views.py"), str(port)]
        with serving(words, place, {"GPU_CONSOLE_TOKEN": OPERATORS}, port=port):
            for name, (prepare, height) in PICTURES.items():
                for theme in ("light", "dark"):
                    seen = BrowserPage(
                        browser,
                        f"http://127.0.0.1:{port}/?token={OPERATORS}",
                        timezone_id="UTC",
                        viewport={"width": 1200, "height": height},
                    )
                    seen.ready()
                    if theme == "dark":
                        seen.page.click("[aria-label='Toggle theme']")
                    prepare(seen)
                    seen.page.mouse.move(0, 0)
                    seen.page.wait_for_timeout(SETTLED_MS)
                    seen.page.screenshot(path=IMAGES / f"{name}_{theme}.png")
                    seen.close()


if __name__ == "__main__":
    main()
