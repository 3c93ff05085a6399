"""What the pages show is what a reader sees: every example runs, in the order of its page, with nothing set.

An output on a page is compared with the real one. Times, sizes, process ids and bars are compared by pattern.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jupyter_client.manager import KernelManager

from tests.clock import PATIENCE, scaled, until
from tests.stories.notebooks import paths

ROOT = Path(__file__).parents[2]
FILES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in FILES
    if not {"_build", "_notebooks"} & set(path.parts)
}
# Verbs that change the machine or do not end, and those of a second cluster. Other tests run them.
NOT_TYPED = ("serve", "exporter", "console", "box", "ledger", "autoload", "uninstall", "fleet")


class Step(NamedTuple):
    """A cell or a command of a page."""

    kind: str  # cell or command
    code: str
    shown: str  # what the page shows as its output; empty if it shows none


def steps(text: str) -> list[Step]:
    """The cells of a page, and its commands, in the order of the page.

    A block of `text` after a cell is the cell's output. A comment before a block can exclude the block.
    Of the commands, those of `gpu` are run.
    """
    text = re.sub(
        r"<!-- not run: .*? -->\n+(`{3,})\w*\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE
    )
    blocks = re.finditer(
        r"^```(?P<kind>python|ipython|console)\n(?P<code>.*?)^```$(?:\s*^```text\n(?P<shown>.*?)^```$)?",
        text,
        re.DOTALL | re.MULTILINE,
    )
    found = []
    for block in blocks:
        if block["kind"] == "console":
            for part in re.split(r"^(?=[$#] )", block["code"], flags=re.MULTILINE):
                command, _, shown = part.partition("\n")
                if re.match(rf"\$ gpu\b(?! ({'|'.join(NOT_TYPED)})\b)", command):
                    found.append(Step("command", command[2:], shown))
        else:
            found.append(Step("cell", block["code"], block["shown"] or ""))
    return found


SIZE = r"\d[\d.,]*(?: of \d[\d.,]*)? ?(?:[kKMGT]i?)?B(?:/s)?\b"
PATTERNS = {
    r"\d{4}-\d\d-\d\d": "DATE",
    r"\d\d:\d\d(:\d\d)?": "TIME",
    r"(?<=pid )\d+|(?<=@)\d+": "PID",
    r"[█▓▒░·│]{2,}": "BAR",
    SIZE: "SIZE",
    r"\d[\d.,]* ?(?:ns|µs|ms|s|min|h|d)\b": "SECONDS",
    r"\d[\d.,]* ?%": "PERCENT",
}


def by_pattern(text: str) -> str:
    """An output without what differs from run to run: times, sizes, process ids, bars and spaces.

    The line of a move that takes long, with its bar, is there on a slow machine only.
    """
    text = re.sub(r"^.* ■ stops it$", "", text, flags=re.MULTILINE)
    for pattern, word in PATTERNS.items():
        text = re.sub(pattern, word, text)
    return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())


def is_shown(page: str, real: str) -> bool:
    """Whether the output that a `page` shows is the `real` one. `…` on the page stands for any text."""
    page = re.escape(by_pattern(page)).replace("…", ".*")
    return (
        re.fullmatch(page, by_pattern(re.sub(r"^Out\[\d+\]: ?", "", real)), re.DOTALL) is not None
    )


def test_an_output_is_compared_by_its_words_and_its_counts():
    page = "sim:0  ███··│·   2.0 of 9.9 GiB  20%\n1 eviction (…) at 10:02:03, 14 ms"
    real = (
        "Out[0]: \nsim:0  █··│·   7 of 120 MiB  5%\n\n1 eviction (1 offloaded) at 18:22:00, 2.1 s\n"
    )
    assert is_shown(page, real)
    assert not is_shown(page, real.replace("1 eviction", "2 evictions"))
    assert not is_shown(page, real.replace("sim:0", "host"))
    assert not is_shown(page, real + "one line more")
    assert is_shown(page, real + "restoring this notebook  ··  32.0 MiB · ■ stops it\n")


def test_the_steps_of_a_page_are_its_cells_and_its_commands_with_their_outputs():
    text = "```python\nx\n```\n\n```text\n3\n```\n```text\nprose\n```\n"
    text += "```console\n$ gpu plan x   # dry\nfits\n$ pip install x\n$ gpu serve\n# gpu box\n```\n"
    text += "<!-- not run: no card -->\n```python\ny\n```\n"
    assert steps(text) == [
        Step("cell", "x\n", "3\n"),
        Step("command", "gpu plan x   # dry", "fits\n"),
    ]


class Reader:
    """A notebook and a terminal of a user who has just come, and has set nothing but `devices`.

    Without `devices` a card is simulated, also on a machine that has one. Ends with the `with` block.
    """

    def __init__(self, home: Path, devices: str) -> None:
        unset = ("GPU_", "XDG_", "CPU_", "INFERENCE_", "EVICTION_", "ENABLE_")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(unset)}
        self.home = home
        self.environment = kept | {
            "DEVELOPMENT_CPU_ONLY": "true",
            "HOME": str(home),
            "JPY_SESSION_NAME": str(home / "train.ipynb"),
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "PYTHONPATH": paths(),
            "OMP_NUM_THREADS": "1",  # the models are tiny: more threads only wait for each other
        }
        if devices:
            self.environment["GPU_DEVICES"] = devices

    def __enter__(self) -> "Reader":
        self.kernel = KernelManager(transport="ipc", ip=f"{self.home}/ipc")
        self.kernel.start_kernel(env=self.environment, cwd=str(self.home))
        self.client = self.kernel.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        self.kernel.shutdown_kernel(now=True)

    def output(self, step: Step) -> str:
        """What a step shows. It may fail only if the page shows that."""
        if step.kind == "command":
            ran = subprocess.run(
                ["bash", "-c", step.code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=self.home,
                env=self.environment,
                timeout=PATIENCE,
            )
            assert ran.returncode == 0 or step.shown, step.code + ran.stdout
            return ran.stdout
        shown: list[str] = []

        def show(message: dict[str, Any]) -> None:
            content = message["content"]
            text = content.get("text") or content.get("data", {}).get("text/plain", "")
            shown.append(text or "\n".join(content.get("traceback", ())))

        done = self.client.execute_interactive(step.code, output_hook=show, timeout=scaled(90))
        assert done["content"]["status"] == "ok" or step.shown, f"{step.code}: {shown}"
        return "\n".join(shown)


RUN_PAGES = [name for name in sorted(PAGES) if steps(PAGES[name])]


def test_most_guides_have_examples_that_are_run():
    assert len(RUN_PAGES) > 8


@pytest.mark.processes
@pytest.mark.parametrize("name", RUN_PAGES)
@pytest.mark.parametrize("devices", ["", "sim:4GiB,host:8GiB"])
def test_the_examples_run_and_show_what_the_page_shows(tmp_path, name, devices):
    """On any machine, and on one with little memory. Outputs are compared where nothing is set."""
    with Reader(tmp_path, devices) as reader:
        for step in steps(PAGES[name]):
            real = reader.output(step)
            if devices or not step.shown or is_shown(step.shown, real):
                continue
            shown = f"{step.code}\n{step.shown}\nin fact:\n{real}"
            assert step.kind == "command", shown
            # A reader types it a moment later, when the notebook before it is idle, or parked.
            until(lambda step=step: is_shown(step.shown, reader.output(step)), shown)


@pytest.mark.processes
def test_the_first_examples_on_a_card_that_holds_one_of_the_two_models(tmp_path):
    """The first model is offloaded, and the reason is shown."""
    with Reader(tmp_path, "sim:96MiB,host:8GiB") as reader:
        shown = [reader.output(step) for step in steps(PAGES["docs/getting_started.md"])]
    assert "ranker needs" in "".join(shown)
