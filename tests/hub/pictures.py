"""Takes the pictures of the guide to JupyterHub, as root: `python -m tests.hub.pictures [DIRECTORY]`.

The users are real, and so are the hub and the notebooks. No user of this machine may be called ann, bob or ops.
"""

import os
import sys
from pathlib import Path

from tests.browser.chromium import running
from tests.browser.pictures import IMAGES, SETTLED_MS, TRAINING

os.environ["TESTS_HUB_NUMBER"] = ""
from .box import ANN, BOB, CONFIGURE, OPS, Visitor, people, running_hub  # noqa: E402

SIZE = {"width": 1200, "height": 520}
SHAPES = {ANN: "4, 1024, 1536", BOB: "4, 1024, 2048"}


def shown(visitor: Visitor, place: Path, name: str) -> None:
    """Takes the picture `name` of the visitor's console in both themes."""
    for theme in ("light", "dark"):
        seen = visitor.console()
        seen.page.set_viewport_size(SIZE)
        if theme == "dark":
            seen.page.click("[aria-label='Toggle theme']")
        seen.page.mouse.move(0, 0)
        seen.page.wait_for_timeout(SETTLED_MS)
        seen.page.screenshot(path=place / f"{name}_{theme}.png")
        if theme == "dark":
            seen.page.click("[aria-label='Toggle theme']")  # the browser remembers it
        seen.close()


def main(place: Path = IMAGES) -> None:
    """Takes every picture."""
    with people(), running() as browser, running_hub("sim:192MiB,host:2GiB", more=CONFIGURE) as box:
        visitors = {
            user: Visitor(browser, box, user, timezone_id="UTC") for user in (ANN, BOB, OPS)
        }
        for seed, (user, shape) in enumerate(SHAPES.items()):
            box.start_server(user)
            name = {ANN: "train.ipynb", BOB: "tune.ipynb"}[user]
            code = TRAINING.format(seed=seed, shape=shape)
            box.write(user, {name: ["%load_ext gpu\n" + code, "step()"]})
            notebook = visitors[user].notebook(name)
            notebook.run(0)
            if user == ANN:
                notebook.run(1)
        shown(visitors[ANN], place, "hub_member")
        shown(visitors[OPS], place, "hub_operator")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
