"""Ten situations on machines with simulated cards: the first screen says who, since when, and what to press or type.

Nothing is clicked and nothing is scrolled before it is said. One browser looks at all of them.
"""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from gpu_runtime import Runtime
from tests.clock import until
from tests.faces.served import OPERATORS, free_port, gpu_console, serving
from tests.nvml_driver import Driver
from tests.stories.kernels import LET_GO, Kernel
from tests.stories.notebooks import Notebook, park, rest

from .chromium import BrowserPage

pytestmark = pytest.mark.timeout(300)

DEVICES = "sim:48MiB+192MiB,host:80MiB"  # notebooks may hold 40 MiB of the RAM
HOLDS = "import torch\nweights = torch.ones(9 * 2**20)"  # 36 MiB
CLOCK, AGO = r"\d\d:\d\d:\d\d", r"ago|for \d+"
SCREEN = {"width": 1280, "height": 800}
GIB = 2**30


def is_on_screen(box) -> bool:
    return bool(box) and box["y"] >= 0 and box["y"] + box["height"] <= SCREEN["height"]


class Screen:
    """The first screen of a console."""

    def __init__(self, browser, port: int) -> None:
        url = f"http://127.0.0.1:{port}/?token={OPERATORS}"
        self.seen = BrowserPage(browser, url, viewport=SCREEN).ready()

    def says(self, *facts: str, press: str = ""):
        """The line of the screen with all these `facts` (regular expressions), whose button `press` can be pressed."""
        page = self.seen.page
        found = page.locator("tbody tr, [role=listitem]").filter(visible=True)
        for fact in facts:
            found = found.filter(has_text=re.compile(fact))
        line = found.first
        line.wait_for()
        parts = [line]
        if press:
            button = line.get_by_role("button", name=re.compile(f"^{press}"))
            until(button.is_enabled)
            parts.append(button)
        for part in parts:
            until(lambda part=part: is_on_screen(part.bounding_box()), "it is on the first screen")
        return line

    def calm(self) -> None:
        """Waits until no problem is shown."""
        self.seen.page.locator(".problems", has_text="No problems").wait_for()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("machine")


@pytest.fixture(scope="module")
def ledger(place):
    return f"keeper://{place}/ledger"


@pytest.fixture(scope="module")
def screen(chromium, place):
    with gpu_console(place, GPU_DEVICES=DEVICES) as served:
        yield Screen(chromium, served.port)


@pytest.fixture(scope="module")
def rt(ledger):
    with Runtime(devices=DEVICES, ledger=ledger, monitor=False, eviction_grace_seconds=0) as found:
        yield found


@pytest.fixture(scope="module")
def forgotten(ledger, rt):
    with Notebook("forgotten.ipynb", ledger, GPU_DEVICES=DEVICES) as one:
        one.run(HOLDS)
        rest(rt, "forgotten.ipynb", 36 << 20)
        yield one


def kernel(ledger: str, notebook: str) -> Kernel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JPY_SESSION_NAME", f"/home/ann/{notebook}")
        return Kernel(ledger, DEVICES)


@pytest.fixture(scope="module")
def train(ledger):
    with kernel(ledger, "train.ipynb") as one:
        one.do(fake("qwen"))
        yield one


@pytest.fixture(scope="module")
def tune(ledger):
    with kernel(ledger, "tune.ipynb") as one:
        one.do(fake("llama"))
        yield one


def fake(name: str, hook: str = "") -> str:
    hook = f"{hook}, " if hook else ""
    return f"rt.register({name!r}, {hook}backend='fake', size='120MiB', devices=['sim:1'])"


def test_a_forgotten_notebook_holds_most_of_a_card(screen, forgotten):
    screen.says("forgotten.ipynb", "36.0 MiB", AGO, press="Park")


def test_a_model_waits_for_the_pin_of_another_notebook(screen, train, tune):
    train.do("rt.preload('qwen'); rt.pin('qwen')")
    assert "DoesNotFit" in tune.run("rt.preload('llama')")
    screen.says("llama in tune.ipynb", "qwen", CLOCK, "120 MiB", press="Unpin qwen")
    screen.says("^train.ipynb", r"qwen \(pinned\)", press="Unpin qwen")
    train.do("rt.unpin('qwen')")
    tune.do("rt.preload('llama')")


def test_a_notebook_waits_for_a_model_in_use(screen, train, tune):
    """Who waits, for whom, and since when. A person can end the wait."""
    tune.do("held = rt.use('llama'); held.__enter__()")
    train.send("rt.preload('qwen')")
    screen.says("qwen", "train.ipynb", "llama", "in use by tune.ipynb", press="End wait")
    screen.says("^tune.ipynb", "runs", AGO)
    tune.do(LET_GO)
    assert train.answer() == "done"


def test_a_kernel_is_stuck_in_a_call_of_c(screen, train, tune):
    tune.do("rt.preload('llama')")
    tune.block()
    train.send("rt.preload('qwen')")
    screen.says("tune.ipynb", "does not answer", "120 MiB", CLOCK, press="Interrupt")
    screen.says("^tune.ipynb", r"no answer, \d+", press="Interrupt").get_by_role("button").click()
    screen.seen.page.locator("[role=dialog] button", has_text="Interrupt").click()
    assert "KeyboardInterrupt" in tune.answer()
    assert train.answer() == "done"
    screen.calm()


def test_a_load_fails_by_an_error_of_the_model(screen, tune):
    """It stays no problem of the machine: `gpu health` is healthy."""
    tune.do("def broken(what): raise ValueError('layer 3 has no weights')")
    tune.do(fake("broken", "broken"))
    assert "layer 3 has no weights" in tune.run("rt.preload('broken')")
    screen.says(
        "^tune.ipynb",
        "could not load broken",
        "layer 3 has no weights",
        CLOCK,
        press="Preload broken",
    )
    screen.calm()


def test_two_notebooks_evict_one_another(screen, train, tune):
    train.do("import time", fake("one", "lambda what: time.sleep(0.3)"))
    tune.do("import time", fake("two", "lambda what: time.sleep(0.3)"))
    for _ in range(3):
        train.do("rt.preload('one')")
        tune.do("rt.preload('two')")
    screen.says("one in train.ipynb", "two in tune.ipynb", "evict one another", CLOCK, press="Pin ")


def test_a_stopped_process(screen, tune):
    tune.do("rt.preload('llama')")
    tune.signal(signal.SIGSTOP)
    try:
        screen.says("tune.ipynb", "is stopped", "120 MiB", CLOCK, press="Continue")
    finally:
        tune.signal(signal.SIGCONT)


def test_a_drained_card(screen, rt):
    with rt.on_behalf_of("ann"):
        rt.drain("sim:1")
    screen.says("sim:1", "drained by ann", AGO, press="End the drain").get_by_role(
        "button", name="End the drain"
    ).click()
    screen.seen.page.locator("[role=dialog] button", has_text="End the drain").click()
    screen.says("sim:1", "173 MiB free")


def test_ram_is_full(screen, ledger, rt, forgotten, tune):
    park(rt, "forgotten.ipynb")
    with Notebook("new.ipynb", ledger, GPU_DEVICES=DEVICES) as new:
        new.run(HOLDS)
        rest(rt, "new.ipynb", 36 << 20)
        tune.do("rt.register('small', backend='fake', size='40MiB', devices=['sim:0'])")
        assert "DoesNotFit" in tune.run("rt.preload('small')")
        screen.says(
            "small in tune.ipynb",
            f"kill {forgotten.pid}",
            "4.0 MiB of 40.0 MiB free: forgotten.ipynb .*36.0 MiB",
            CLOCK,
        )
        screen.says("^forgotten.ipynb", "parked", AGO, "36.0 MiB", press="Unpark")
        stays = screen.says("^new.ipynb", "36.0 MiB", "RAM has no room for it").get_by_role(
            "button", name="Park"
        )
        assert stays.is_disabled() and "RAM has no room for it" in stays.get_attribute("title")


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc, to build the fake driver")
def test_a_program_without_the_extension_holds_memory(chromium, tmp_path):
    library = tmp_path / "libnvidia-ml.so.1"
    source = os.path.join(os.path.dirname(__file__), "..", "fake_nvml.c")
    words = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", library, source]
    subprocess.run(words, check=True)
    driver = Driver(tmp_path)
    outside = subprocess.Popen(["sleep", "600"])
    try:
        held = f"{outside.pid}:{30 * GIB}"
        driver.set(all_total=80 * GIB, _0_free=50 * GIB, _0_processes=held)
        with gpu_console(tmp_path, GPU_DEVICES="cuda", **driver.environment) as served:
            advice = f"kill {outside.pid}"
            Screen(chromium, served.port).says("sleep", "30.0 GiB on cuda:0", advice, CLOCK)
    finally:
        outside.kill()
        outside.wait()


FULL = f"""
mount -t tmpfs -o size=2m none "$PLACE"
{sys.executable} -m gpu_runtime.cli health >/dev/null
dd if=/dev/zero of="$PLACE/fill" bs=4k 2>/dev/null
exec {sys.executable} -m gpu_runtime.cli console --port $PORT --no-browser
"""


def test_the_disk_of_the_ledger_is_full(chromium, tmp_path):
    """The console starts on the full disk: it could not, since it could not write the file with its URL."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("needs a namespace of its own, for a small file system")
    disk, port = tmp_path / "disk", free_port()
    disk.mkdir()
    settings = {
        "PLACE": str(disk),
        "PORT": str(port),
        "GPU_LEDGER": f"keeper://{disk}/ledger",
        "XDG_STATE_HOME": str(disk / "state"),
        "GPU_CONSOLE_TOKEN": OPERATORS,
        "GPU_DEVICES": DEVICES,
    }
    with serving(["unshare", "-rm", "bash", "-c", FULL], tmp_path, settings, port=port):
        Screen(chromium, port).says("disk is full", f"df -h {disk}", CLOCK)
