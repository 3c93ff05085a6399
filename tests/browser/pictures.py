"""Takes the pictures of the README and the runbooks: `python -m tests.browser.pictures`.

The pictures show the real page of the console in a real Chromium, in both themes. The data is made
up, so that every run gives the same pictures. The notebooks are run in a real JupyterLab.
"""

import sys
import tempfile
from pathlib import Path

from tests.faces.served import OPERATORS, free_port, serving
from tests.stories.test_views_in_chromium import SCRIPT

from .chromium import BrowserPage, running
from .lab import LabNotebook, serving_lab
from .test_two_notebooks import TRAINING

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
IMAGES = NOTEBOOKS / "images"
LAB_WIDTH, LAB_HEIGHT = 1180, 640  # pixels
PANEL_WIDTH, PANEL_HEIGHT = 900, 560
MENU_HEIGHT, SHOWN_HEIGHT = 28, 545  # the menu is left out, and the status line
SETTLED_MS = 2500  # until animations have ended and the first history is drawn


def now(seen: BrowserPage) -> None:
    """Shows the devices, with the menu of a model."""
    seen.page.get_by_role("button", name="reranker · analysis.ipynb").click()


def evict(seen: BrowserPage) -> None:
    """Opens the dialog of an eviction."""
    seen.tab("Models")
    seen.row("reranker").locator("button", has_text="Evict").first.click()
    seen.page.locator("[role=dialog]").get_by_text("frees").first.wait_for()


def fragmentation(seen: BrowserPage) -> None:
    """Shows the allocator map of the first process."""
    seen.tab("Fragmentation")
    seen.page.get_by_text("reserved are allocated").wait_for()


PICTURES = {
    "console_now": (now, 560),
    "console_evict": (evict, 560),
    "console_fragmentation": (fragmentation, 830),
}  # file -> preparation, height in pixels


def cells(seed: int) -> list[str]:
    """A notebook of plain torch code."""
    return [
        "%load_ext gpu\n" + TRAINING.format(seed=seed, shape="4, 1024, 2048"),
        *(["for _ in range(20): step()"] * 2),
        "losses[-1]",
    ]


def notebooks(browser, home: Path) -> None:
    """Runs the cells of both notebooks alternately in JupyterLab, and takes one picture of both."""
    settings = {"GPU_DEVICES": "sim:192MiB,host:2GiB", "EVICTION_GRACE_SECONDS": "0"}
    names = ("train.ipynb", "tune.ipynb")
    with serving_lab(home, {name: cells(n) for n, name in enumerate(names)}, **settings) as port:
        opened = [LabNotebook(browser, port, name) for name in names]
        for number in range(4):
            for one in opened:
                one.run(number)
                one.page.wait_for_timeout(SETTLED_MS)  # until the idle one has left the card
        for one in opened:
            one.command("docmanager:save")
            one.page.wait_for_timeout(SETTLED_MS)
            one.close()
        for theme in ("light", "dark"):
            _side_by_side(browser, port, names, theme)
            _panel(browser, port, names[1], theme)


def _side_by_side(browser, port: int, names: tuple[str, str], theme: str) -> None:
    seen = LabNotebook(browser, port, names[0], viewport={"width": LAB_WIDTH, "height": LAB_HEIGHT})
    right = {"path": names[1], "options": {"mode": "split-right"}}
    for command, arguments in (
        ("apputils:change-theme", {"theme": f"JupyterLab {theme.title()}"}),
        ("application:toggle-left-area", {}),
        ("application:toggle-side-tabbar", {"side": "left"}),
        ("application:toggle-side-tabbar", {"side": "right"}),
        ("docmanager:open", right),
    ):
        seen.command(command, arguments)
        seen.page.wait_for_timeout(SETTLED_MS)
    below_menu = {"x": 0, "y": MENU_HEIGHT, "width": LAB_WIDTH, "height": SHOWN_HEIGHT}
    seen.page.screenshot(path=IMAGES / f"two_notebooks_{theme}.png", clip=below_menu)
    seen.close()


def _panel(browser, port: int, name: str, theme: str) -> None:
    """Takes the picture of the side panel and the status bar, beside the notebook `name`."""
    size = {"width": PANEL_WIDTH, "height": PANEL_HEIGHT}
    seen = LabNotebook(browser, port, name, viewport=size)
    seen.command("apputils:change-theme", {"theme": f"JupyterLab {theme.title()}"})
    seen.page.locator(".gpu-status").click()
    seen.page.get_by_role("button", name="Variables of train.ipynb").click()
    seen.page.get_by_role("cell", name="optimizer").first.wait_for()
    seen.page.wait_for_timeout(SETTLED_MS)
    seen.page.screenshot(path=IMAGES / f"lab_panel_{theme}.png")
    seen.close()


def main() -> None:
    """Takes every picture in both themes."""
    with tempfile.TemporaryDirectory() as directory, running() as browser:
        (Path(directory) / "lab").mkdir()
        notebooks(browser, Path(directory) / "lab")
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
