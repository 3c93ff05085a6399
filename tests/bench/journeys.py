"""How far a call travels through the package: `python -m tests.bench.journeys` prints a row for each journey.

A row has the files and the calls of the package, and how often the path changes the file, in the thread that
makes the call. The models are fake, and the notebook is a real kernel on a simulated card.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = tuple(f"{ROOT}/{folder}/" for folder in ("gpu_runtime", "kernel_ext", "panels"))
HEAD = "| journey | files | calls | file changes |\n|---|---|---|---|"
# Wraps the kernel's handler, so that the journey of a cell begins where the kernel receives it.
WRAP = """
from tests.bench.journeys import Journey
_kernel, _journeys = get_ipython().kernel, {}
_handler = _kernel.shell_handlers["execute_request"]
async def _counted(stream, ident, parent):
    code = parent["content"]["code"]
    with Journey() as journey:
        await _handler(stream, ident, parent)
    _journeys[code] = journey.row()
_kernel.shell_handlers["execute_request"] = _counted
"""


class Journey:
    """Counts the calls of the package in this thread, inside its `with` block."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.calls = self.changes = 0
        self._last = ""

    def _seen(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            self.files[file] = self.files.get(file, 0) + 1
            self.calls += 1
            self.changes += file != self._last
            self._last = file

    def __enter__(self) -> "Journey":
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def row(self) -> tuple[int, int, int]:
        """The files, the calls and the changes of the file."""
        return len(self.files), self.calls, self.changes


def of(act: Callable[[], Any]) -> tuple[int, int, int]:
    """The journey of `act`, called once."""
    with Journey() as journey:
        act()
    return journey.row()


def uses(folder: str) -> dict[str, tuple[int, int, int]]:
    """Uses of models: one that loads, one of a model that is there, and one that evicts another."""
    from gpu_runtime import Runtime

    def use(name: str) -> Callable[[], None]:
        def act() -> None:
            with rt.use(name):
                pass

        return act

    url = f"keeper://{folder}/ledger"
    with Runtime(devices="sim:24GiB,host:64GiB", ledger=url, eviction_grace_seconds=0) as rt:
        for name, size in (("first", "1GiB"), ("qwen", "14GiB"), ("llama", "14GiB")):
            rt.register(name, backend="fake", size=size)
        use("first")()  # it imports what a first use needs
        return {
            "cold `use`": of(use("qwen")),
            "resident `use`": of(use("qwen")),
            "`use` that evicts": of(use("llama")),
        }


def cells(folder: str) -> dict[str, tuple[int, int, int]]:
    """Cells of a notebook: one that touches nothing of ours, and a park with the return."""
    from gpu_runtime import Runtime
    from tests.clock import until
    from tests.stories.notebooks import places
    from tests.stories.test_parking import DEVICES, Notebook

    url = f"keeper://{folder}/cells"
    with (
        closing(Notebook("one.ipynb", url)) as notebook,
        Runtime(devices=DEVICES, ledger=url) as rt,
    ):
        notebook.run("import torch\nx = torch.ones(3_000_000)")
        until(lambda: places(rt) == {"sim:0"})
        notebook.run(WRAP)
        wanted = {"x = 1": "y = 1", "park": "%gpu park", "return": "x.sum()"}
        for code in ("y = 2", "%gpu park", "x.mean()", *wanted.values()):  # twice: it imports
            if code.startswith("x."):  # the notebook is parked some moments after the cell
                until(lambda: places(rt) == {"host"})
            notebook.run(code)
        rows = eval(notebook.run("print(_journeys)"))
    found = {name: rows[code] for name, code in wanted.items()}
    parts = [found.pop("park"), found.pop("return")]
    both = tuple(map(sum, zip(*parts, strict=True)))
    return {"cell `x=1` beside a tensor": found["x = 1"], "`%gpu park` and return": both}  # type: ignore[dict-item]


def chat() -> dict[str, tuple[int, int, int]]:
    """A chat call of a model that is loaded, from the gateway on."""
    from tests.serving.harness import harness

    async def answered() -> tuple[int, int, int]:
        async with harness(qwen=4) as served:
            for _ in range(2):
                await served.chat("qwen")
            with Journey() as journey:
                await served.chat("qwen")
            return journey.row()

    return {"warm chat": asyncio.run(answered())}


def main() -> None:
    print(HEAD)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        for journey in (lambda: uses(folder), lambda: cells(folder), chat):
            for name, row in journey().items():
                print(f"| {name} | {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
