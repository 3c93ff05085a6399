"""Takes the pictures of the README and the runbooks: `python -m tests.browser.pictures`.

The console's page is the real one, in a real Chromium, in both themes. Its data is made up, so that
every run gives the same pictures. The notebook's picture shows the stored outputs of runbook 02.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter

from tests.faces.served import OPERATORS, free_port, serving
from tests.stories.test_views_in_chromium import SCRIPT

from .chromium import BrowserPage, running

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
IMAGES = NOTEBOOKS / "images"
SHOWN_CELLS = ("cell-08", "cell-09", "cell-10", "cell-11")  # of runbook 02, in the README
NOTEBOOK_WIDTH = 690  # pixels, as in the README
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


def notebook(browser, directory: Path, theme: str) -> None:
    """Takes the picture of some cells of runbook 02, without requests to other hosts."""
    stored = nbformat.read(NOTEBOOKS / "02_two_models_one_gpu.ipynb", as_version=4)
    stored.cells = [cell for cell in stored.cells if cell.id in SHOWN_CELLS]
    html, _ = HTMLExporter(theme=theme).from_notebook_node(stored)
    file = directory / f"two_models_{theme}.html"
    file.write_text(html)
    context = browser.new_context(
        viewport={"width": NOTEBOOK_WIDTH, "height": 400},
        color_scheme=theme,
    )
    page = context.new_page()
    page.route("http*://**", lambda route: route.abort())
    page.goto(file.as_uri())
    page.add_style_tag(
        content="body { padding: 8px !important } .jp-Notebook { padding: 0 !important }"
    )
    page.screenshot(path=IMAGES / f"two_models_{theme}.png", full_page=True)
    context.close()


def main() -> None:
    """Takes every picture in both themes."""
    with tempfile.TemporaryDirectory() as directory, running() as browser:
        for theme in ("light", "dark"):
            notebook(browser, Path(directory), theme)
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
